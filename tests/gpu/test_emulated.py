"""The CUDA kernels of capsules, run on this processor, equal the reference."""

from __future__ import annotations

import importlib
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from scalelatent.models.capsule.kernels import cpu, reference
from scalelatent.models.capsule.kernels.squash import squash_table


@pytest.fixture
def gpu(fake):
    return importlib.import_module("scalelatent.models.capsule.kernels.gpu")


@pytest.mark.parametrize("nu", [0.0, 0.8])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["d1", "d2", "d8", "d13", "unequal", "one_vs_all", "all_vs_all"])
def test_residuals_equal_the_reference(fake, gpu, cases, name, dtype, nu):
    for rows, host in product(cases.ROWS, (True, False)):
        cases.check_residuals(gpu, fake.asarray, cases.make_case(name, rows, nu, dtype), host)


@pytest.mark.parametrize("nu", [0.0, 0.5])
def test_more_thread_blocks_than_threads_give_the_same_sums(fake, gpu, cases, nu):
    cases.check_residuals(gpu, fake.asarray, cases.make_case("d1", 128 * 128 + 77, nu, "float64"))


@pytest.mark.parametrize("nu", [0.0, 0.5])
def test_kernels_accept_no_rows(fake, gpu, cases, nu):
    case = cases.make_case("d2", 0, nu, "float32")
    active, sums = gpu.residuals(
        fake.asarray(case["h"]), *(case[k] for k in ("y", "weight", "dims", "labels", "nu", "table"))
    )
    assert (active is None) == (nu == 0)
    assert active is None or len(active) == 0
    np.testing.assert_array_equal(sums, np.zeros((1, 3)))


def test_no_row_is_active_if_all_are_certain(fake, gpu):
    h = np.zeros((2, 200), np.float32)
    h[0] = 50.0
    active, sums = gpu.residuals(fake.asarray(h), np.zeros(200, np.int32), np.ones(200), np.array([[1, 1]]),
                                 np.array([[0, 1]]), np.array([0.8]), squash_table(2))  # fmt: skip
    assert len(active) == 0
    assert sums[0, 2] == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("nu", [0.0, 0.8])
def test_a_row_that_is_not_finite_changes_the_sums_and_no_other_row(fake, gpu, cases, bad, nu):
    case = cases.make_case("d2", 200, nu, "float32")
    names = ("y", "weight", "dims", "labels", "nu", "table")
    good = fake.asarray(case["h"])
    gpu.residuals(good, *(case[k] for k in names))
    case["h"][3, 150] = bad
    h = fake.asarray(case["h"])
    _, sums = gpu.residuals(h, *(case[k] for k in names))
    assert not np.isfinite(sums[0, 0])
    if nu == 0:
        others = np.arange(200) != 150
        np.testing.assert_array_equal(h.get()[:, others], good.get()[:, others])
        assert not np.isfinite(h.get()[:, 150]).all()


@pytest.mark.parametrize("nu", [0.0, 0.8])
def test_very_long_rows_stay_inside_the_table(fake, gpu, cases, nu):
    case = cases.make_case("d2", 100, nu, "float32")
    case["h"] *= np.float32(1e12)
    cases.check_residuals(gpu, fake.asarray, case)


def test_an_invalid_class_gives_nan_without_reads_out_of_bounds(fake, gpu):
    h = fake.asarray(np.ones((2, 3), np.float32))
    y = np.array([0, 7, -1], np.int32)
    _, sums = gpu.residuals(
        h, y, np.ones(3), np.array([[1, 1]]), np.array([[0, 1]]), np.zeros(1), squash_table(2)
    )
    assert np.isnan(sums[0, 0])
    assert np.isnan(h.get()[:, 1:]).all()
    assert np.isfinite(h.get()[:, 0]).all()


def test_a_tie_goes_to_the_first_capsule(fake, gpu):
    h = fake.asarray(np.repeat(np.array([[0.0], [0.3], [0.7], [0.7], [0.1]]), 4, axis=1))
    y, weight = np.array([1, 2, 3, 0], np.int32), np.array([1.0, 10.0, 100.0, 1000.0])
    wiring = np.ones((1, 5), int), np.arange(5)[None]
    _, sums = gpu.residuals(h, y, weight, *wiring, np.zeros(1), squash_table(5))
    # Of capsules 2 and 3, which are equally long, the first wins. So row 1, of class 2, is no error, and the
    # weights of the other rows are the sum of errors.
    assert sums[0, 1] == 1101.0


def test_two_runs_give_the_same_bits(fake, gpu, cases):
    case = cases.make_case("one_vs_all", 1000, 0.8, "float32")
    runs = []
    for _ in range(2):
        h = fake.asarray(case["h"])
        active, sums = gpu.residuals(h, *(case[k] for k in ("y", "weight", "dims", "labels", "nu", "table")))
        runs.append((h.get()[:, : len(active)].tobytes(), active.get().tobytes(), sums.tobytes()))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("dims", [[1, 1], [2] * 10, [4, 1, 7]])
def test_probabilities_equal_the_reference(fake, gpu, dims, dtype):
    rng = np.random.default_rng(1)
    dims = np.array(dims)
    for rows in (0, 1, 128, 333):
        h = rng.normal(size=(dims.sum(), rows)).astype(dtype)
        h[:, :1] = 0.0
        out = gpu.probabilities(fake.asarray(h), dims, squash_table(int(dims.sum())) if rows % 2 else None)
        assert out.dtype == np.float64
        tolerance = 1e-11 if dtype == "float64" else 1e-6
        np.testing.assert_allclose(out.get(), reference.probabilities(h, dims), rtol=0, atol=tolerance)


@pytest.mark.parametrize("nu", [0.0, 0.8])
@pytest.mark.parametrize("train", [True, False])
def test_sums_and_moment_in_one_copy_have_the_bits_of_separate_copies(gpu, cases, nu, train):
    from scalelatent.engine.backend import CupyBackend
    from scalelatent.models.capsule.kernels.estep import estep_by_products

    case, rng = cases.make_case("d13", 129, nu, "float32"), np.random.default_rng(3)
    w = rng.normal(size=(int(case["dims"].sum()), 7)).astype("f4")
    x = rng.normal(size=(129, 7)).astype("f4")
    found = []
    for estep in (gpu.estep, estep_by_products):
        backend = CupyBackend()
        rows = [backend.asarray(a, np.float32) for a in (w, x)]
        names = ("y", "weight", "dims", "labels", "nu", "table")
        found.append(estep(backend, *rows, *(case[k] for k in names), train))
    for ours, theirs in zip(*found, strict=True):
        if theirs is None:
            assert ours is None
        else:
            np.testing.assert_array_equal(ours, theirs)


def test_invalid_input_is_refused(fake, gpu):
    dims, labels, nu = np.array([[1, 1]]), np.array([[0, 1]]), np.zeros(1)
    y, weight = np.zeros(3, np.int32), np.ones(3)
    wrong = [np.ones((2, 3)), fake.zeros((2, 3), np.float16), fake.zeros((3, 2)).T, fake.zeros(3)]
    for h in wrong:
        with pytest.raises(ValueError, match="C-contiguous device array"):
            gpu.residuals(h, y, weight, dims, labels, nu, squash_table(2))
    with pytest.raises(ValueError, match=r"pass squash_table\(2\)"):
        gpu.residuals(fake.zeros((2, 3)), y, weight, dims, labels, nu, squash_table(3))


def test_every_kernel_is_launched_with_its_declared_arguments(emulated, fake, gpu, cases):
    for dtype, nu in product(("float32", "float64"), (0.0, 0.8)):
        case = cases.make_case("d2", 10, nu, dtype)
        cases.check_residuals(gpu, fake.asarray, case)
        gpu.probabilities(fake.asarray(case["h"]), case["dims"][0])
    assert {name for name, _ in fake.LAUNCHED} >= set(emulated.names)
    assert len(emulated.names) == 10


def test_launches_and_cuda_file_agree_on_the_thread_block(cuda_text, gpu):
    assert f"constexpr int THREADS = {gpu.THREADS};" in cuda_text


class HostArrayWithGet(np.ndarray):
    """A numpy array with the method ``get`` of a CuPy array, for checks that expect device arrays."""

    def get(self) -> np.ndarray:
        return np.asarray(self)


@pytest.mark.slow
@pytest.mark.parametrize("nu", [0.0, 0.2, 0.8])
@pytest.mark.parametrize("name", ["d1", "d2", "d8", "d13", "unequal", "one_vs_all", "all_vs_all"])
def test_numbas_residuals_pass_the_checks_of_a_device(cases, name, nu):
    """The float32 kernel of numba passes the checks of a GPU, so these checks are not too strict."""

    def residuals(h, *more):
        active, sums = cpu.residuals(np.asarray(h), *more)
        return (None if active is None else active.view(HostArrayWithGet)), sums

    numba = SimpleNamespace(residuals=residuals)
    for seed, rows in ((7, 1000), (8, 50_001)):
        case = cases.make_case(name, rows, nu, "float32", seed)
        cases.check_residuals(numba, lambda h: h.copy().view(HostArrayWithGet), case)
