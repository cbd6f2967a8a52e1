"""The numba E-step equals the reference (numpy, float64) for many shapes, architectures and thresholds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalelatent.kernels.jit import kernel
from scalelatent.models.capsule import KERNELS
from scalelatent.models.capsule.kernels import cpu, reference
from scalelatent.models.capsule.kernels.squash import squash_table
from scalelatent.models.capsule.model.members import Members, build_members

ROWS = [0, 1, 2, 255, 256, 257, 1000]
CASES = {
    "multiclass d=1, two classes": build_members("multiclass", 2, 1),
    "multiclass d=2": build_members("multiclass", 10, 2),
    "multiclass, odd D": build_members("multiclass", 3, 3),
    "multiclass, unequal": build_members("multiclass", 3, [1, 4, 2]),
    "one_vs_all": build_members("one_vs_all", 4, 3),
    "a class of all_vs_all": build_members("all_vs_all", 4, 2),
}


def make_inputs(members: Members, n: int, seed: int, scale: float = 1.5) -> tuple[Any, ...]:
    """Return latents h, labels and weights of rows, and the arguments of kernels that describe the models.

    In all_vs_all, all rows have class 1, so the arguments describe only the models that distinguish class 1.
    """
    rng = np.random.Generator(np.random.Philox(seed))
    live = np.arange(members.n_members)
    y = rng.integers(0, members.n_classes, n).astype(np.int32)
    if members.architecture == "all_vs_all":
        live, y = np.flatnonzero(members.labels[:, 1] >= 0), np.ones(n, dtype=np.int32)
    dims, labels = members.dims[live], members.labels[live]
    h = (rng.normal(size=(dims.sum(), n)) * scale * rng.uniform(0.05, 2, n)).astype(np.float32)
    return h, y, rng.uniform(0, 3, n), dims, labels, squash_table(int(dims[0].sum()))


def spread_residuals(h: np.ndarray, active: np.ndarray | None) -> np.ndarray:
    """Return residuals of all rows, given those of ``active`` rows (None: all rows); other rows get zeros."""
    if active is None:
        return h
    out = np.zeros(h.shape)
    out[:, active] = h[:, : len(active)]
    return out


def run_kernel(
    kernel_function: Any, h: np.ndarray, dtype: type, *rest: Any
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    h = h.astype(dtype)
    active, sums = kernel_function(h, *rest)
    return spread_residuals(h, active), active, sums


def assert_kernels_agree(members: Members, n: int, nu: float, seed: int) -> None:
    h, y, weight, dims, labels, table = make_inputs(members, n, seed)
    thresholds = np.full(len(dims), nu)
    exact, rows, sums = run_kernel(reference.residuals, h, np.float64, y, weight, dims, labels, thresholds)
    fast, fast_rows, fast_sums = run_kernel(
        cpu.residuals, h, np.float32, y, weight, dims, labels, thresholds, table
    )
    if nu > 0:
        assert fast_rows.dtype == np.int32
        # No P(wrong class) / P(right class) is within 1e-6 of the threshold nu, so rounding decides no row.
        np.testing.assert_array_equal(fast_rows, rows)
    else:
        assert fast_rows is None
        assert rows is None
    # The tolerance is about two float32 roundings of 6e-8, times weights up to 3 and latents |h| up to 15.
    np.testing.assert_allclose(fast, exact, rtol=5e-6, atol=5e-6)
    np.testing.assert_allclose(fast_sums[:, 0], sums[:, 0], rtol=1e-6, atol=1e-6)
    # Both kernels sum the weights of the same wrongly classified rows in float64.
    np.testing.assert_allclose(fast_sums[:, 1], sums[:, 1], rtol=1e-12)
    np.testing.assert_array_equal(fast_sums[:, 2], sums[:, 2])


@pytest.mark.parametrize("nu", [0.0, 0.2, 0.8])
@pytest.mark.parametrize("n", ROWS)
@pytest.mark.parametrize("case", CASES)
def test_numba_equals_reference(case: str, n: int, nu: float) -> None:
    assert_kernels_agree(CASES[case], n, nu, seed=n)


@given(
    st.sampled_from(sorted(CASES)),
    st.integers(0, 600),
    st.sampled_from([0.0, 0.1, 0.5, 0.9]),
    st.integers(0, 10**6),
)
def test_numba_equals_reference_at_random(case: str, n: int, nu: float, seed: int) -> None:
    h, y, weight, dims, labels, table = make_inputs(CASES[case], n, seed)
    thresholds = np.full(len(dims), nu)
    exact, _, sums = run_kernel(reference.residuals, h, np.float64, y, weight, dims, labels, thresholds)
    fast, _, fast_sums = run_kernel(cpu.residuals, h, np.float32, y, weight, dims, labels, thresholds, table)
    # A row with P(wrong class) / P(right class) = nu up to rounding may have residuals in one result only.
    # Compare the rows that have residuals in both results.
    both = (exact != 0) & (fast != 0)
    assert np.abs(fast_sums[:, 2] - sums[:, 2]).max(initial=0) <= 1
    np.testing.assert_allclose(fast[both], exact[both], rtol=5e-6, atol=5e-6)


def test_members_may_have_different_thresholds() -> None:
    """Models of different classes may have different thresholds nu, because each model lowers nu separately.

    A row is active (has residuals) if its P(wrong class) / P(right class) exceeds nu in any model.
    """
    h, y, weight, dims, labels, table = make_inputs(CASES["one_vs_all"], 500, 1)
    nu = np.array([0.8, 0.4, 0.2, 0.0])
    exact, rows, sums = run_kernel(reference.residuals, h, np.float64, y, weight, dims, labels, nu)
    fast, fast_rows, fast_sums = run_kernel(cpu.residuals, h, np.float32, y, weight, dims, labels, nu, table)
    np.testing.assert_array_equal(fast_rows, rows)
    np.testing.assert_allclose(fast, exact, rtol=5e-6, atol=5e-6)
    np.testing.assert_array_equal(fast_sums[:, 2], sums[:, 2])
    assert sums[3, 2] == 500
    assert (np.diff(sums[:, 2]) > 0).all()


@pytest.mark.parametrize("backend", ["reference", "numba"])
@pytest.mark.parametrize("case", ["multiclass d=2", "one_vs_all"])
def test_inactive_rows_change_nothing(backend: str, case: str) -> None:
    members = CASES[case]
    h, y, weight, dims, labels, table = make_inputs(members, 300, 4)
    run = {"reference": reference.residuals, "numba": cpu.residuals}[backend]
    dtype = {"reference": np.float64, "numba": np.float32}[backend]
    nu = 0.6
    dense, active, sums = run_kernel(run, h, dtype, y, weight, dims, labels, np.full(len(dims), nu), table)
    start = 0
    for r, sizes in enumerate(dims):
        stop = start + sizes.sum()
        p = reference.probabilities(h[start:stop].astype(float), sizes)
        target = labels[r][y]
        right = p[target, np.arange(300)]
        wrong = np.where(np.arange(len(sizes))[:, None] == target, -1, p).max(axis=0)
        wanted = wrong > nu * right
        assert 0 < wanted.sum() < 300
        assert sums[r, 2] == wanted.sum()
        assert not dense[start:stop, ~wanted].any()
        assert (np.abs(dense[start:stop, wanted]).max(axis=0) > 0).all()
        start = stop
    assert (np.diff(active) > 0).all()


@pytest.mark.parametrize("backend", ["reference", "numba"])
@pytest.mark.parametrize("seed", range(3))
def test_a_tie_goes_to_the_first_class(backend: str, seed: int) -> None:
    """Capsules 1 and 2 are equally long. Class 1 is predicted, so rows of other classes are errors."""
    run = {"reference": reference.residuals, "numba": cpu.residuals}[backend]
    dtype = {"reference": np.float64, "numba": np.float32}[backend]
    rng = np.random.Generator(np.random.Philox(seed))
    lengths = rng.uniform(0.01, 9, 400).astype(np.float32)
    small = (lengths * rng.uniform(0, 0.5, 400)).astype(np.float32)
    h = np.stack([small, lengths, -lengths, small])
    dims, labels = np.ones((1, 4), dtype=np.int64), np.arange(4)[None]
    for y, expected in ((1, 0.0), (2, 400.0), (0, 400.0)):
        args = (np.full(400, y, dtype=np.int32), np.ones(400), dims, labels, np.zeros(1), squash_table(4))
        assert run(h.astype(dtype), *args)[1][0, 1] == expected


@pytest.mark.parametrize("backend", ["reference", "numba"])
@pytest.mark.parametrize("nu", [0.0, 0.5])
def test_rows_of_zeros_have_zero_residuals_and_the_largest_capsule_wins(backend: str, nu: float) -> None:
    run = {"reference": reference.residuals, "numba": cpu.residuals}[backend]
    dtype = {"reference": np.float64, "numba": np.float32}[backend]
    members = CASES["multiclass, unequal"]
    h, y = np.zeros((7, 300)), (np.arange(300) % 3).astype(np.int32)
    with np.errstate(all="raise"):
        dense, _, sums = run_kernel(
            run, h, dtype, y, np.ones(300), members.dims, members.labels, np.full(1, nu), squash_table(7)
        )
    assert not dense.any()
    assert sums[0, 0] == pytest.approx(100 * np.log([1 / 7, 4 / 7, 2 / 7]).sum(), rel=1e-12)
    # In rows of zeros the capsule of 4 dimensions wins, so the rows of the two other classes are errors.
    assert sums[0, 1] == 200
    assert sums[0, 2] == (300 if nu == 0 else 200 + 100 * (nu < 2 / 4))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e38])
@pytest.mark.parametrize("nu", [0.0, 0.5])
@pytest.mark.parametrize("backend", ["reference", "numba"])
def test_a_bad_row_is_visible_and_changes_no_other_row(backend: str, nu: float, bad: float) -> None:
    run = {"reference": reference.residuals, "numba": cpu.residuals}[backend]
    dtype = {"reference": np.float64, "numba": np.float32}[backend]
    h, y, weight, dims, labels, table = make_inputs(CASES["multiclass d=2"], 600, 7)
    weight += 0.1
    args = (y, weight, dims, labels, np.full(1, nu), table)
    with np.errstate(all="ignore"):
        clean = run_kernel(run, h, dtype, *args)[0]
        h[3, 301] = bad
        dense, _, sums = run_kernel(run, h, dtype, *args)
    if abs(bad) != 1e38 or backend == "numba":  # 1e38**2 is finite only in float64.
        assert not np.isfinite(sums[0, 0])
    rest = np.arange(600) != 301
    np.testing.assert_array_equal(dense[:, rest], clean[:, rest])


@pytest.mark.parametrize("backend", ["reference", "numba"])
def test_weights_scale_sums_and_residuals(backend: str) -> None:
    run = {"reference": reference.residuals, "numba": cpu.residuals}[backend]
    dtype = {"reference": np.float64, "numba": np.float32}[backend]
    h, y, _, dims, labels, table = make_inputs(CASES["multiclass d=2"], 257, 9)
    one = run_kernel(run, h, dtype, y, np.ones(257), dims, labels, np.zeros(1), table)
    four = run_kernel(run, h, dtype, y, np.full(257, 4.0), dims, labels, np.zeros(1), table)
    none = run_kernel(run, h, dtype, y, np.zeros(257), dims, labels, np.zeros(1), table)
    np.testing.assert_array_equal(four[0], 4 * one[0])  # A product with a power of two is exact.
    np.testing.assert_array_equal(four[2][:, :2], 4 * one[2][:, :2])
    assert not none[0].any()
    assert not none[2][:, :2].any()


@kernel
def compute_log(width, work):
    cpu._log_right(width, work)


def test_the_logarithm_of_the_kernel_is_exact_to_rounding() -> None:
    rng = np.random.Generator(np.random.Philox(1))
    x = np.concatenate([rng.uniform(0, 1, 200), 10 ** rng.uniform(-300, 0, 50), [1.0, 0.5, 1e-300, 2**-0.5]])
    work = np.empty(cpu._FIELDS * cpu.STRIP)
    work[cpu._RIGHT : cpu._RIGHT + len(x)] = x
    compute_log(len(x), work)
    out = work[cpu._LOG : cpu._LOG + len(x)]
    np.testing.assert_allclose(out, np.log(x), rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_table_of_kernels_names_real_functions(name: str) -> None:
    import importlib

    assert set(KERNELS[name]) == {"reference", "numba", "cupy"}
    for backend in ("reference", "numba"):
        module, function = KERNELS[name][backend].split(":")
        assert callable(getattr(importlib.import_module(module), function))
