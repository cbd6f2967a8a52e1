"""Kernels on a device agree with the reference; products, passes and whole fits agree with the host's.

These tests are deselected without ``-m gpu``.
"""

from __future__ import annotations

import numpy as np
import pytest

import scalelatent as sl
from scalelatent.models.capsule.kernels import reference
from scalelatent.models.capsule.kernels.squash import squash_table

pytestmark = pytest.mark.gpu


@pytest.fixture
def gpu(real):
    from scalelatent.models.capsule.kernels import gpu

    return gpu


@pytest.fixture
def backend(real):
    from scalelatent.engine.backend import CupyBackend

    made = CupyBackend()
    made.stream.use()  # Arrays of a test must be on the stream of the backend.
    return made


@pytest.mark.parametrize("nu", [0.0, 0.2, 0.8])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["d1", "d2", "d8", "d13", "unequal", "one_vs_all", "all_vs_all"])
def test_residuals_equal_the_reference(real, gpu, cases, name, dtype, nu):
    for seed, rows in enumerate((*cases.ROWS, 1000, 50_001)):
        for host in (True, False):
            cases.check_residuals(gpu, real.asarray, cases.make_case(name, rows, nu, dtype, seed), host)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_finite_shows_in_the_sums(real, gpu, cases, bad):
    names = ("y", "weight", "dims", "labels", "nu", "table")
    for nu in (0.0, 0.8):
        case = cases.make_case("d2", 1000, nu, "float32")
        case["h"][3, 150] = bad
        _, sums = gpu.residuals(real.asarray(case["h"]), *(case[k] for k in names))
        assert not np.isfinite(sums[0, 0])
    real.cuda.runtime.deviceSynchronize()


def test_the_same_bits_in_every_run(real, gpu, cases):
    names = ("y", "weight", "dims", "labels", "nu", "table")
    for nu in (0.0, 0.8):
        case = cases.make_case("one_vs_all", 30_001, nu, "float32")
        runs = set()
        for _ in range(5):
            h = real.asarray(case["h"])
            active, sums = gpu.residuals(h, *(case[k] for k in names))
            used = h.get()[:, : h.shape[1] if active is None else len(active)]
            runs.add((used.tobytes(), sums.tobytes(), b"" if active is None else active.get().tobytes()))
        assert len(runs) == 1


@pytest.mark.parametrize("dims", [[1, 1], [2] * 10, [4, 1, 7], [32] * 10])
def test_probabilities_equal_the_reference(real, gpu, dims):
    rng = np.random.default_rng(1)
    dims = np.array(dims)
    for rows in (0, 1, 128, 333, 5000):
        for dtype, tolerance in (("float32", 2e-6), ("float64", 1e-11)):
            h = rng.normal(size=(dims.sum(), rows)).astype(dtype)
            out = gpu.probabilities(real.asarray(h), dims, squash_table(int(dims.sum())))
            np.testing.assert_allclose(out.get(), reference.probabilities(h, dims), rtol=0, atol=tolerance)


def test_products_of_every_layout_equal_numpys(real, backend):
    rng = np.random.default_rng(2)
    for dtype, tolerance in ((np.float32, 2e-6), (np.float64, 1e-14)):
        for m, n, k in ((1, 1, 1), (5, 7, 3), (1, 4, 6), (6, 1, 4), (20, 196, 2000), (320, 196, 333)):
            a, b = rng.normal(size=(m, k)), rng.normal(size=(k, n))
            wide = np.concatenate([a, a], axis=1).astype(dtype)
            want = a.astype(dtype).astype(np.float64) @ b.astype(dtype).astype(np.float64)
            for left in (real.asarray(wide)[:, :k], real.asarray(a.T.astype(dtype)).T):
                for right in (real.asarray(b.astype(dtype)), real.asarray(b.T.astype(dtype)).T):
                    got = backend.to_host(backend.matmul(left, right, "out"))
                    assert np.linalg.norm(got - want) <= tolerance * np.linalg.norm(want) * np.sqrt(k)


@pytest.mark.parametrize("stored", ["u1", "f2", "f4", "f8", ">f4"])
def test_rows_on_the_device_equal_the_stored_ones(backend, stored):
    rng = np.random.default_rng(3)
    for step in range(3):  # Each block reuses the page-locked memory of the block before.
        a = (rng.random((3000 + step, 196)) * 255).astype(stored)
        for wanted in (np.float32, np.float64):
            np.testing.assert_array_equal(backend.to_host(backend.asarray(a, wanted, "x")), a.astype(wanted))


@pytest.mark.parametrize("architecture", ["multiclass", "one_vs_all", "all_vs_all"])
@pytest.mark.parametrize("stored", [np.float32, np.uint8])
def test_whole_fits_equal_the_hosts(real, architecture, stored):
    """Compare a fit by plain EM, and a fit with a schedule of thresholds, with fits on the host.

    Float32 products are summed in another order, so the weights of plain EM agree to 1e-3 of the largest
    weight. A schedule also counts errors and excludes rows beyond a threshold. Rounding may move a row across
    the threshold, so only the scores are compared.
    """
    rng = np.random.default_rng(7)
    y = np.arange(20_000) % 4
    means = 60 * (y[:, None] == np.arange(40) % 4) + 60
    x = np.clip(rng.normal(size=(len(y), 40)) * 40 + means, 0, 255).astype(stored)
    settings = {
        "capsule_dim": 3,
        "architecture": architecture,
        "max_iter": 6,
        "projection": 20,
        "random_state": 0,
    }
    for schedule in (None, [(0.8, 3), (0.0, 10)]):
        cpu, gpu = (
            sl.CapsuleRegression(device=device, nu_schedule=schedule, **settings).fit(x, y)
            for device in ("cpu", "gpu")
        )
        assert abs(gpu.score(x, y) - cpu.score(x, y)) < 0.005
        if schedule is None:
            np.testing.assert_allclose(gpu.W_, cpu.W_, rtol=0, atol=1e-3 * np.abs(cpu.W_).max())
            got, want = (model.history_[-1]["objective"] for model in (gpu, cpu))
            np.testing.assert_allclose(got, want, rtol=1e-4)


def test_two_fits_on_one_gpu_give_the_same_bits(real):
    rng = np.random.default_rng(8)
    y = np.arange(6000) % 3
    x = rng.normal(size=(len(y), 30)).astype(np.float32) + y[:, None]
    fits = [
        sl.CapsuleRegression(capsule_dim=2, max_iter=5, random_state=0, device="gpu").fit(x, y).W_
        for _ in range(2)
    ]
    np.testing.assert_array_equal(*fits)


def test_the_error_names_the_memory_limit(real):
    from scalelatent.engine.backend import CupyBackend
    from scalelatent.errors import RunError

    backend, pool = CupyBackend(), real.get_default_memory_pool()
    before = pool.get_limit()
    pool.free_all_blocks()
    pool.set_limit(size=pool.total_bytes() + 2**22)
    try:
        with pytest.raises(RunError, match=r"then resume the run; or start again .*block_rows = 1024"):
            backend.asarray(np.zeros((2048, 4096), np.uint8), np.float32, "x")
    finally:
        pool.set_limit(size=before)
