"""The CUDA text of conditional RBMs: it compiles, and gives the reference's beliefs, run on a processor and,
with ``-m gpu``, on a device.
"""

from __future__ import annotations

import importlib

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from scalelatent.kernels.cuda import Kernels
from scalelatent.models.crbm.kernels import reference
from scalelatent.models.crbm.kernels.reference import sigmoid

METHODS = ("sum_product", "mixed_product", "max_product", "mean_field")
KEPT = {"sum_product_kept", "max_product_kept"}
NAMES = {*METHODS, *(f"{method}_cluster" for method in METHODS), *KEPT, "add_pairs_f4", "add_pairs_f8"}


@pytest.fixture(scope="session")
def emulated(emulate):
    return emulate("crbm")


@pytest.fixture
def emulated_gpu(fake):
    return importlib.import_module("scalelatent.models.crbm.kernels.gpu")


@pytest.fixture
def real_gpu(real):
    return importlib.import_module("scalelatent.models.crbm.kernels.gpu")


def draw(v: int, h: int, rows: int, scale: float) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(v + h)
    parts = rng.normal(size=(v, h)) * scale, rng.normal(size=(rows, v)), rng.normal(size=(rows, h))
    return tuple(part.astype("f4") for part in parts)


def check(
    gpu, method: str, v: int, h: int, rows: int, scale: float, tol: float | None, *damping: float
) -> None:
    w, bv, bh = draw(v, h, rows, scale)
    found = getattr(gpu, method)(gpu.make_coupling(w), *map(gpu.cupy.asarray, (bv, bh)), 6, tol, *damping)
    want = getattr(reference, method)(reference.make_coupling(w), bv, bh, 6, tol, *damping)
    assert_array_equal(found.sweeps.get(), want.sweeps)
    for name in ("lv", "lh"):
        assert_allclose(sigmoid(getattr(found, name).get()), sigmoid(getattr(want, name)), rtol=0, atol=1e-5)
    assert_allclose(found.change.get(), want.change, rtol=0, atol=2e-5)


def check_pairs(gpu, v: int, h: int, rows: int, tol: float | None, dtype: str, scale: float = 0.7) -> None:
    w, bv, bh = draw(v, h, rows, scale)
    pairs, want = gpu.cupy.asarray(np.ones((v, h), dtype)), np.ones((v, h))
    device = tuple(map(gpu.cupy.asarray, (bv, bh)))
    found = gpu.sum_product_pairs(gpu.make_coupling(w), *device, 6, tol, pairs)
    wanted = reference.sum_product_pairs(reference.make_coupling(w), bv, bh, 6, tol, want)
    assert_allclose(pairs.get(), want, rtol=0, atol=1e-5 * rows)
    assert_allclose(found.log_z.get(), wanted.log_z, rtol=1e-5, atol=1e-5)
    # A sweep more leaves the pairs behind, where tol was met before the last one.
    alone = gpu.sum_product(gpu.make_coupling(w), *device, 6, tol)
    assert_array_equal(found.sweeps.get(), wanted.sweeps)
    assert_array_equal(found.sweeps.get(), np.minimum(alone.sweeps.get() + (tol is not None), 6))
    assert_array_equal(alone.change.get(), found.change.get())
    assert_allclose(sigmoid(found.lv.get()), sigmoid(wanted.lv), rtol=0, atol=1e-5)
    if tol is None:
        assert_array_equal(alone.lv.get(), found.lv.get())


def test_the_text_names_its_kernels(load_helper) -> None:
    text = Kernels("scalelatent.models.crbm.kernels", 256).text
    assert set(load_helper("emulation").kernel_names(text)) == {f"crbm_{name}" for name in NAMES}


def test_launches_and_text_agree_on_blocks(emulated_gpu):
    for name in ("THREADS", "BLOCKS"):
        assert f"constexpr int {name} = {getattr(emulated_gpu, name)};" in emulated_gpu._kernels.text


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("v", "h", "scale"), [(1, 1, 1.0), (9, 40, 0.5), (17, 5, 3.0)])
def test_emulated(emulated_gpu, method, v, h, scale):
    check(emulated_gpu, method, v, h, 2, scale, None)


@pytest.mark.parametrize("method", ["sum_product", "max_product"])
@pytest.mark.parametrize(("v", "h", "scale"), [(9, 40, 0.5), (17, 5, 3.0)])
def test_emulated_damping(emulated_gpu, method, v, h, scale):
    check(emulated_gpu, method, v, h, 2, scale, None, 0.5)
    check(emulated_gpu, method, v, h, 2, scale, 1e-2, 0.7)


@pytest.fixture(params=["kept", "cluster"])
def clustered(request, emulated_gpu, fake, monkeypatch):
    """Clusters work on graphs of any size; "cluster" has no room for messages in its blocks."""
    monkeypatch.setattr(emulated_gpu, "CLUSTER_EDGES", 0)
    if request.param == "cluster":
        monkeypatch.setattr(emulated_gpu, "_STATIC_BYTES", 2**20)
    fake.LAUNCHED.clear()
    emulated_gpu.launched = lambda: {
        name.rpartition("_")[2] for name, _ in fake.LAUNCHED if name[:5] == "crbm_"
    }
    emulated_gpu.way = request.param
    return emulated_gpu


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("v", "h", "scale"), [(1, 1, 1.0), (30, 40, 0.5), (17, 5, 3.0)])
def test_emulated_clusters(clustered, method, v, h, scale):
    """Eight blocks a graph, also where some of them have no unit."""
    check(clustered, method, v, h, 2, scale, None)
    check(clustered, method, v, h, 3, scale, 1e-2)
    if method in ("sum_product", "max_product"):
        check(clustered, method, v, h, 2, scale, None, 0.5)
    keeps = clustered.way == "kept" and f"{method}_kept" in KEPT
    assert clustered.launched() == {"kept" if keeps else "cluster"}


def test_emulated_pairs_of_clusters(clustered, monkeypatch):
    monkeypatch.setattr(clustered, "MESSAGE_BYTES", 2 * 4 * 19 * 5)  # two graphs at a time
    check_pairs(clustered, 19, 5, 3, 1e-2, "f4")
    assert clustered.way in clustered.launched()


def test_large_graphs_alone_have_clusters_and_say_what_they_keep(emulated_gpu, fake):
    way = emulated_gpu._way
    assert way("sum_product", 127, 128) == ("crbm_sum_product", 1, 0)
    assert way("sum_product", 785, 128) == ("crbm_sum_product_kept", 8, 4 * 99 * 128)
    assert way("mean_field", 785, 128) == ("crbm_mean_field_cluster", 8, 0)
    assert way("max_product", 10_000, 2000) == ("crbm_max_product_cluster", 8, 0)
    # More than 48 KiB, with what the kernel declares, are asked for before the launch.
    check(emulated_gpu, "sum_product", 785, 120, 1, 0.05, None)
    assert ("crbm_sum_product_kept", 0) in fake.LAUNCHED


def test_cards_without_clusters_have_a_block_a_graph(emulated_gpu, fake, monkeypatch):
    told = fake.runtime.getDeviceProperties(0)
    monkeypatch.setattr(fake.runtime, "getDeviceProperties", lambda device: told | {"major": 8})
    assert emulated_gpu._way("sum_product", 784, 256) == ("crbm_sum_product", 1, 0)


@pytest.mark.parametrize("largest", [-20.0, 20.0])
def test_emulated_products_of_large_weights(emulated_gpu, largest):
    """They leave float32 after four factors, so products are split in between."""
    w, bv, bh = np.full((20, 9), largest, "f4"), np.full((1, 20), -4 * largest, "f4"), np.zeros((1, 9), "f4")
    bh[:] = -9 * largest
    coupling = emulated_gpu.make_coupling(w)
    assert coupling.factors < 8
    found = emulated_gpu.sum_product(coupling, *map(emulated_gpu.cupy.asarray, (bv, bh)), 6)
    want = reference.sum_product(reference.make_coupling(w), bv, bh, 6)
    for name in ("lv", "lh"):
        assert_allclose(sigmoid(getattr(found, name).get()), sigmoid(getattr(want, name)), rtol=0, atol=1e-3)


@pytest.mark.parametrize(("tol", "dtype"), [(None, "f4"), (1e-2, "f8")])
def test_emulated_pairs(emulated_gpu, tol, dtype, monkeypatch):
    monkeypatch.setattr(emulated_gpu, "MESSAGE_BYTES", 2 * 4 * 9 * 5)  # two graphs at a time
    check_pairs(emulated_gpu, 9, 5, 3, tol, dtype)


def test_emulated_bethe_and_tolerance(emulated_gpu):
    gpu = emulated_gpu
    check(gpu, "sum_product", 6, 4, 3, 0.5, 1e-2)
    w, bv, bh = draw(5, 1, 2, 1.0)  # a tree
    found = gpu.bethe(gpu.make_coupling(w), gpu.cupy.asarray(bv), gpu.cupy.asarray(bh), 3)
    assert_allclose(found.get(), reference.bethe(reference.make_coupling(w), bv, bh, 3), rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["sum_product", "max_product"])
@pytest.mark.parametrize(("v", "h"), [(100, 37), (784, 256)])
def test_damping_on_a_device(real_gpu, method, v, h):
    check(real_gpu, method, v, h, 20, 0.1, None, 0.5)


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("v", "h", "scale"),
    [(1, 1, 1.0), (100, 37, 0.3), (784, 120, 0.1), (784, 256, 0.1), (50, 2000, 0.05), (2000, 300, 0.01)],
)
@pytest.mark.parametrize("tol", [None, 1e-3])
def test_on_a_device(real_gpu, method, v, h, scale, tol):
    check(real_gpu, method, v, h, 20, scale, tol)


@pytest.mark.gpu
@pytest.mark.parametrize(("v", "h"), [(100, 70), (784, 256), (2000, 300)])
@pytest.mark.parametrize(("tol", "dtype"), [(None, "f4"), (1e-3, "f8")])
def test_pairs_on_a_device(real_gpu, v, h, tol, dtype):
    check_pairs(real_gpu, v, h, 20, tol, dtype, 0.7 if v < 200 else 0.05)
