"""The CUDA kernels for beliefs of conditional RBMs equal the reference, on a processor and on a device.

The numba kernels must pass the checks at the sizes of the device. So a check that no float32 kernel can pass
is found without a device.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from scalelatent.engine.backend import find_kernel, make_backend
from scalelatent.kernels.cuda import Kernels
from scalelatent.models.crbm.kernels import reference
from scalelatent.models.crbm.kernels.inference import MOST_CHAINS
from scalelatent.models.crbm.kernels.reference import sigmoid

METHODS = ("sum_product", "mixed_product", "max_product", "mean_field")
KEPT_KERNELS = {"sum_product_kept", "max_product_kept", "sum_product_held_kept"}
CHAIN_KERNELS = {"positive", "negative", "chain_weights", "chain_biases"}
STEP_KERNELS = {"ascend", "ascend_outer", "ascend_biases"}
KERNELS = {
    *METHODS,
    *(f"{method}_cluster" for method in METHODS),
    *KEPT_KERNELS,
    "add_pairs_f4",
    "add_pairs_f8",
    *CHAIN_KERNELS,
    *STEP_KERNELS,
}


@pytest.fixture(scope="session")
def emulated(emulate):
    return emulate("crbm")


@pytest.fixture
def emulated_gpu(fake):
    return importlib.import_module("scalelatent.models.crbm.kernels.gpu")


@pytest.fixture(params=["numba", pytest.param("cupy", marks=pytest.mark.gpu)])
def full_size(request):
    """Return the module of kernels for a check at full size, and the number of rows.

    The kernels are numba kernels, or, in tests marked ``gpu``, those of a GPU.
    """
    if request.param == "numba":
        return list_numba_kernels(), 5
    request.getfixturevalue("real")
    return importlib.import_module("scalelatent.models.crbm.kernels.gpu"), 20


def list_numba_kernels() -> Any:
    """Return the numba kernels under the names of the device's kernels."""
    names = ("make_coupling", *METHODS, "sum_product_pairs")
    bodies = {name: find_kernel(f"crbm_{name}", "numba") for name in names}
    return SimpleNamespace(cupy=np, **bodies)


def to_host(a: Any) -> np.ndarray:
    return a if isinstance(a, np.ndarray) else a.get()


def draw_graph(v: int, h: int, rows: int, scale: float) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(v + h)
    parts = rng.normal(size=(v, h)) * scale, rng.normal(size=(rows, v)), rng.normal(size=(rows, h))
    return tuple(part.astype("f4") for part in parts)


def compute_beliefs(found: Any) -> np.ndarray:
    """Return P(unit = 1) of the v visible and h hidden units, an array of shape (rows, v + h)."""
    return sigmoid(np.concatenate([to_host(found.lv), to_host(found.lh)], axis=1).astype(np.float64))


def check_beliefs(gpu, method: str, v: int, h: int, rows: int, scale: float, tol: float | None) -> None:
    """Compare P(unit = 1), sweeps and changes with those of the reference, in float64.

    Max-product magnifies rounding errors in each sweep. Rounding a message to float32 has the effect of a
    weight with an error of one ulp (unit in the last place) of the log odds, whose size is about 1. So the
    beliefs may differ by 4 times the change that the reference shows if its weights have an error of one ulp
    of 1. The numba kernels differ by a quarter of this limit.
    """
    w, bv, bh = draw_graph(v, h, rows, scale)

    def expected(w: np.ndarray) -> Any:
        return getattr(reference, method)(reference.make_coupling(w), bv, bh, 6, tol)

    found = getattr(gpu, method)(gpu.make_coupling(w), *map(gpu.cupy.asarray, (bv, bh)), 6, tol)
    want, largest, mean = expected(w), 1e-5, 1e-6
    rng, steady = np.random.default_rng(0), np.ones(rows, dtype=bool)
    for _ in range(2 if method == "max_product" else 0):
        nudged = expected(w + rng.integers(-1, 2, w.shape) * np.spacing(np.maximum(np.abs(w), np.float32(1))))
        off = np.abs(compute_beliefs(nudged) - compute_beliefs(want))
        largest, mean = max(largest, 1e-5 + 4 * off.max()), max(mean, 1e-6 + 4 * off.mean())
        # Do not compare a row whose number of sweeps changes with these small errors of the weights.
        steady &= nudged.sweeps == want.sweeps
    assert steady.mean() > 0.5
    assert_array_equal(to_host(found.sweeps)[steady], want.sweeps[steady])
    off = np.abs(compute_beliefs(found) - compute_beliefs(want))[steady]
    assert off.max() <= largest
    assert off.mean() <= mean
    off = np.abs(to_host(found.change) - want.change)[steady]
    assert off.max() <= 2 * largest


def check_pairs(gpu, v: int, h: int, rows: int, tol: float | None, dtype: str, scale: float = 0.7) -> None:
    w, bv, bh = draw_graph(v, h, rows, scale)
    pairs, want = gpu.cupy.asarray(np.ones((v, h), dtype)), np.ones((v, h))
    device = tuple(map(gpu.cupy.asarray, (bv, bh)))
    found = gpu.sum_product_pairs(gpu.make_coupling(w), *device, 6, tol, pairs)
    wanted = reference.sum_product_pairs(reference.make_coupling(w), bv, bh, 6, tol, want)
    assert_allclose(to_host(pairs), want, rtol=0, atol=1e-5 * rows)
    assert_allclose(to_host(found.log_z), wanted.log_z, rtol=1e-5, atol=1e-5)
    # After a row has reached the tolerance, the kernel that computes P(v = 1, h = 1) makes one more sweep, up
    # to the limit of 6 sweeps.
    alone = gpu.sum_product(gpu.make_coupling(w), *device, 6, tol)
    assert_array_equal(to_host(found.sweeps), wanted.sweeps)
    assert_array_equal(to_host(found.sweeps), np.minimum(to_host(alone.sweeps) + (tol is not None), 6))
    assert_array_equal(to_host(alone.change), to_host(found.change))
    assert_allclose(sigmoid(to_host(found.lv)), sigmoid(wanted.lv), rtol=0, atol=1e-5)
    if tol is None:
        assert_array_equal(to_host(alone.lv), to_host(found.lv))


def test_the_cuda_file_declares_its_kernels(load_helper) -> None:
    text = Kernels("scalelatent.models.crbm.kernels", 256).text
    assert set(load_helper("emulation").kernel_names(text)) == {f"crbm_{name}" for name in KERNELS}


def test_launches_and_cuda_file_agree_on_block_sizes(emulated_gpu):
    for name in ("THREADS", "BLOCKS", "POSITIVE_ROWS"):
        assert f"constexpr int {name} = {getattr(emulated_gpu, name)}" in emulated_gpu._kernels.text
    levels = (MOST_CHAINS + 1).bit_length() - 1
    assert f"constexpr int LEVELS = {levels};" in emulated_gpu._kernels.text
    assert 2**levels == MOST_CHAINS + 1


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("v", "h", "scale"), [(1, 1, 1.0), (9, 40, 0.5), (17, 5, 3.0)])
def test_emulated_kernels_equal_the_reference(emulated_gpu, method, v, h, scale):
    check_beliefs(emulated_gpu, method, v, h, 2, scale, None)


@pytest.fixture(params=["kept", "cluster"])
def clustered(request, emulated_gpu, fake, monkeypatch):
    """Use thread-block clusters for graphs of any size.

    With the parameter "cluster", thread blocks have no room for messages in shared memory.
    """
    monkeypatch.setattr(emulated_gpu, "CLUSTER_EDGES", 0)
    if request.param == "cluster":
        monkeypatch.setattr(emulated_gpu, "_STATIC_BYTES", 2**20)
    fake.LAUNCHED.clear()
    emulated_gpu.launched = lambda: {
        name.rpartition("_")[2] for name, _ in fake.LAUNCHED if name.startswith("crbm_")
    }
    emulated_gpu.way = request.param
    return emulated_gpu


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("v", "h", "scale"), [(1, 1, 1.0), (30, 40, 0.5), (17, 5, 3.0)])
def test_emulated_clusters_equal_the_reference(clustered, method, v, h, scale):
    """Eight thread blocks compute one graph; in some cases a block has no unit of the graph."""
    check_beliefs(clustered, method, v, h, 2, scale, None)
    check_beliefs(clustered, method, v, h, 3, scale, 1e-2)
    keeps = clustered.way == "kept" and f"{method}_kept" in KEPT_KERNELS
    assert clustered.launched() == {"kept" if keeps else "cluster"}


def test_emulated_pair_beliefs_of_clusters_equal_the_reference(clustered, monkeypatch):
    monkeypatch.setattr(clustered, "MESSAGE_BYTES", 2 * 4 * 19 * 5)  # Memory for two graphs at a time.
    check_pairs(clustered, 19, 5, 3, 1e-2, "f4")
    assert clustered.way in clustered.launched()


def test_only_large_graphs_use_clusters_and_request_shared_memory(emulated_gpu, fake):
    way = emulated_gpu._choose_kernel
    assert way("sum_product", 127, 128) == ("crbm_sum_product", 1, 0)
    assert way("sum_product", 785, 128) == ("crbm_sum_product_held_kept", 8, 4 * 99 * 128)
    assert way("sum_product", 400, 257) == ("crbm_sum_product_kept", 8, 4 * 50 * 257)
    assert way("mean_field", 785, 128) == ("crbm_mean_field_cluster", 8, 0)
    assert way("max_product", 10_000, 2000) == ("crbm_max_product_cluster", 8, 0)
    # This kernel needs more than 48 KiB of shared memory, which the stand-in refuses unless the launch has
    # requested it.
    check_beliefs(emulated_gpu, "sum_product", 785, 120, 1, 0.05, None)
    assert ("crbm_sum_product_held_kept", 0) in fake.LAUNCHED


@pytest.mark.parametrize(("v", "h"), [(30, 40), (9, 256), (5, 3)])
def test_beliefs_in_registers_give_the_same_bits(emulated_gpu, monkeypatch, v, h):
    monkeypatch.setattr(emulated_gpu, "CLUSTER_EDGES", 0)
    w, bv, bh = draw_graph(v, h, 2, 0.5)
    found = []
    for units in (256, 0):
        monkeypatch.setattr(emulated_gpu, "HELD_UNITS", units)
        pairs = emulated_gpu.cupy.zeros((v, h), "f4")
        device = tuple(map(emulated_gpu.cupy.asarray, (bv, bh)))
        one = emulated_gpu.sum_product_pairs(emulated_gpu.make_coupling(w), *device, 3, 1e-3, pairs)
        found.append([a.get() for a in (one.lv, one.lh, one.sweeps, one.change, one.log_z, pairs)])
    for held, read in zip(*found, strict=True):
        assert_array_equal(held, read)


@pytest.mark.parametrize("method", ["sum_product", "mean_field"])
@pytest.mark.parametrize(("v", "h"), [(9, 7), (70, 20), (3, 600)])
def test_gradients_of_chains_equal_the_reference_and_do_not_depend_on_other_chains(
    emulated_gpu, monkeypatch, method, v, h
):
    xp, starts, sweeps = emulated_gpu.cupy, np.array([0, 5, 6, 19]), 4
    rows, rng, chains = 19, np.random.default_rng(v), 3
    monkeypatch.setattr(emulated_gpu, "MESSAGE_BYTES", 4 * 4 * v * h)  # Memory for four graphs at a time.
    w, bv, bh = draw_graph(v, h, rows, 0.2)
    seen = (rng.random((rows, v)) < 0.4).astype("f4")

    def run(first: int, stop: int) -> tuple[np.ndarray, ...]:
        a, b = starts[first], starts[stop]
        flat = xp.zeros((stop - first, v * h + v + h), "f4")
        dv, dh, measures = (xp.empty(shape, "f4") for shape in ((b - a, v), (b - a, h), (3, b - a)))
        moved = [xp.asarray(part[a:b].copy()) for part in (seen, bv, bh)]
        own = starts[first : stop + 1] - a
        emulated_gpu.add_chain_gradients(method, emulated_gpu.make_coupling(w), *moved, own, sweeps, None,
                                         flat, dv, dh, measures, flat.reshape(-1)[v * h :])  # fmt: skip
        return flat.get(), dv.get(), dh.get(), measures.get()

    flat, dv, dh, measures = run(0, chains)
    pairs = np.zeros((chains, v, h))
    kernel = reference.sum_product_pairs if method == "sum_product" else reference.mean_field
    for c in range(chains):
        a, b = starts[c], starts[c + 1]
        more = (pairs[c],) if method == "sum_product" else ()
        found = kernel(reference.make_coupling(w), bv[a:b], bh[a:b], sweeps, None, *more)
        on, hidden = sigmoid(found.lv), sigmoid(found.lh)
        positive = sigmoid(seen[a:b].astype(float) @ w + bh[a:b])
        negative = pairs[c] if more else on.T @ hidden
        assert_allclose(flat[c, : v * h].reshape(v, h), seen[a:b].T @ positive - negative, rtol=0, atol=2e-4)
        assert_allclose(dv[a:b], seen[a:b] - on, rtol=0, atol=1e-5)
        assert_allclose(dh[a:b], positive - hidden, rtol=0, atol=1e-5)
        sums = np.concatenate([dv[a:b].sum(axis=0), dh[a:b].sum(axis=0)])
        assert_allclose(flat[c, v * h :], sums, rtol=0, atol=1e-5)
        log_loss = (np.logaddexp(0, found.lv) - found.lv * seen[a:b]).sum(axis=1)
        assert_allclose(measures[0, a:b], log_loss, rtol=1e-5)
        assert_array_equal(measures[1, a:b], ((found.lv > 0) != (seen[a:b] > 0)).sum(axis=1))
        assert_allclose(measures[2, a:b], found.change, rtol=0, atol=2e-5)
        alone = run(c, c + 1)
        assert_array_equal(alone[0], flat[c : c + 1])
        for own, all_rows in zip(alone[1:3], (dv, dh), strict=True):
            assert_array_equal(own, all_rows[a:b])
        assert_array_equal(alone[3], measures[:, a:b])


def test_gpus_without_clusters_use_one_block_per_graph(emulated_gpu, fake, monkeypatch):
    reported = fake.runtime.getDeviceProperties(0)
    monkeypatch.setattr(fake.runtime, "getDeviceProperties", lambda device: reported | {"major": 8})
    assert emulated_gpu._choose_kernel("sum_product", 784, 256) == ("crbm_sum_product", 1, 0)


@pytest.mark.parametrize("largest", [-20.0, 20.0])
def test_emulated_products_of_large_weights_do_not_overflow(emulated_gpu, largest):
    """A product of these factors exceeds float32 after four factors, so the kernel splits the product."""
    w, bv, bh = np.full((20, 9), largest, "f4"), np.full((1, 20), -4 * largest, "f4"), np.zeros((1, 9), "f4")
    bh[:] = -9 * largest
    coupling = emulated_gpu.make_coupling(w)
    assert coupling.factors < 8
    found = emulated_gpu.sum_product(coupling, *map(emulated_gpu.cupy.asarray, (bv, bh)), 6)
    want = reference.sum_product(reference.make_coupling(w), bv, bh, 6)
    for name in ("lv", "lh"):
        assert_allclose(sigmoid(getattr(found, name).get()), sigmoid(getattr(want, name)), rtol=0, atol=1e-3)


@pytest.mark.parametrize(("tol", "dtype"), [(None, "f4"), (1e-2, "f8")])
def test_emulated_pair_beliefs_equal_the_reference(emulated_gpu, tol, dtype, monkeypatch):
    monkeypatch.setattr(emulated_gpu, "MESSAGE_BYTES", 2 * 4 * 9 * 5)  # Memory for two graphs at a time.
    check_pairs(emulated_gpu, 9, 5, 3, tol, dtype)


def test_the_emulated_tolerance_ends_each_row(emulated_gpu):
    check_beliefs(emulated_gpu, "sum_product", 6, 4, 3, 0.5, 1e-2)
    check_pairs(emulated_gpu, 5, 1, 2, None, "f4")  # With one hidden unit, the graph is a tree.


FULL_SIZES = [
    (1, 1, 1.0),
    (100, 37, 0.3),
    (784, 120, 0.1),
    (784, 256, 0.1),
    (50, 2000, 0.05),
    (2000, 300, 0.01),
]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("v", "h", "scale"), FULL_SIZES)
@pytest.mark.parametrize("tol", [None, 1e-3])
def test_kernels_at_full_size_equal_the_reference(full_size, method, v, h, scale, tol):
    gpu, rows = full_size
    check_beliefs(gpu, method, v, h, rows, scale, tol)


@pytest.mark.slow
@pytest.mark.parametrize(("v", "h"), [(100, 70), (784, 256), (2000, 300)])
@pytest.mark.parametrize(("tol", "dtype"), [(None, "f4"), (1e-3, "f8")])
def test_pair_beliefs_at_full_size_equal_the_reference(full_size, v, h, tol, dtype):
    gpu, rows = full_size
    check_pairs(gpu, v, h, rows, tol, dtype, 0.7 if v < 200 else 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["weights", "a sweep"])
@pytest.mark.parametrize(("v", "h", "scale"), FULL_SIZES[1:])
def test_the_check_at_full_size_detects_a_wrong_kernel(fault, v, h, scale):
    """The check fails for kernels with weights wrong by a thousandth, and for kernels that lack a sweep."""
    gpu = list_numba_kernels()
    right, off = gpu.max_product, np.random.default_rng(1).normal(size=(v, h)) * 1e-3
    if fault == "weights":
        gpu.make_coupling = lambda w: find_kernel("crbm_make_coupling", "numba")((w * (1 + off)).astype("f4"))
    else:

        def one_less(coupling, bv, bh, sweeps, *more):
            return replace(right(coupling, bv, bh, sweeps - 1, *more), sweeps=np.full(len(bv), sweeps))

        gpu.max_product = one_less
    with pytest.raises(AssertionError):
        check_beliefs(gpu, "max_product", v, h, 5, scale, None)


@pytest.mark.slow
@pytest.mark.parametrize("error", [0.0, 1e-3])
def test_the_checks_of_the_benchmark_detect_wrong_weights(monkeypatch, error):
    """The benchmark accepts numba kernels instead of GPU kernels, and rejects kernels with wrong weights."""
    folder = Path(__file__).resolve().parents[2] / "benchmarks"
    if not folder.exists():
        pytest.skip("benchmarks/ is not part of this copy")
    monkeypatch.syspath_prepend(str(folder))
    script = importlib.import_module("gpu_crbm")

    def find_wrong_kernel(name: str, backend: str) -> Any:
        if backend != "cupy":
            return find_kernel(name, backend)
        off, make = np.random.default_rng(1), find_kernel(name, "numba")
        return lambda w: make((w * (1 + error * off.normal(size=w.shape))).astype("f4"))

    monkeypatch.setattr(script, "find_kernel", find_wrong_kernel)
    parts = script.list_checks(make_backend("cpu"), SimpleNamespace(quick=False, seed=0))
    checks = [check for _, name, part in parts if name.startswith("graphs") for check in part()]
    # Ignore checks that compute a part of the batch, because numba kernels, unlike those of a GPU, give other
    # bits for another batch.
    compared = [check for check in checks if "largest difference" in check]
    assert len(compared) == 5 * 6
    if error:  # Estimates of log Z and a graph of one edge hardly change if weights change by 0.1 %.
        compared = [c for c in compared if c["name"].startswith(METHODS) and "1 x 1" not in c["name"]]
    assert {check["passed"] for check in compared} == {not error}, compared
