"""The E-step of a block of rows, by one fused kernel or by two products, equals the reference in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalelatent.engine.backend import make_backend
from scalelatent.kernels import tiles
from scalelatent.models.capsule.kernels.squash import squash_table
from scalelatent.models.capsule.model.members import Members, build_members

ROWS = [0, 1, 7, 8, 127, 128, 129, 300]
FEATURES = [3, 8, 11, 24, 25, 196]
CASES = {
    "D = 2": build_members("multiclass", 2, 1),
    "D = 3": build_members("multiclass", 3, 1),
    "D = 7, unequal": build_members("multiclass", 3, [1, 4, 2]),
    "D = 20": build_members("multiclass", 10, 2),
    "D = 25": build_members("multiclass", 5, 5),
    "D = 64": build_members("multiclass", 8, 8),
    "D = 70": build_members("multiclass", 10, 7),
    "one_vs_all, D = 24": build_members("one_vs_all", 4, 3),
    "one_vs_all, D = 80": build_members("one_vs_all", 8, 5),
}


def make_inputs(members: Members, n: int, p: int, seed: int) -> tuple[Any, ...]:
    rng = np.random.Generator(np.random.Philox(seed))
    w = (rng.normal(size=(members.total_dim, p)) * 2 / np.sqrt(p)).astype("f4")
    x = (rng.normal(size=(n, p)) * rng.uniform(0.1, 2, (n, 1))).astype("f4")
    y = rng.integers(0, members.n_classes, n).astype(np.int32)
    return w, x, y, rng.uniform(0, 3, n)


def run_estep(
    device: str, members: Members, w: Any, x: Any, y: Any, weight: Any, nu: Any, train: bool
) -> tuple[Any, Any]:
    backend = make_backend(device)
    table = squash_table(int(members.dims[0].sum()))
    w, x = backend.asarray(w, np.float32), backend.asarray(x, np.float32, "x")
    delta, sums = backend.kernel("capsule_estep")(
        backend, w, x, y, weight, members.dims, members.labels, nu, table, train
    )
    return (None if delta is None else np.array(delta, dtype="f8")), sums


def assert_close_sums(members: Members, n: int, p: int, nu: float, train: bool, seed: int) -> None:
    w, x, y, weight = make_inputs(members, n, p, seed)
    thresholds = np.full(members.n_members, nu)
    exact, sums = run_estep("reference", members, w, x, y, weight, thresholds, train)
    fast, fast_sums = run_estep("cpu", members, w, x, y, weight, thresholds, train)
    assert fast_sums.shape == (members.n_members, 3)
    flips = np.abs(fast_sums[:, 2] - sums[:, 2]).max(initial=0)
    # One row may have P(wrong class) / P(right class) = nu up to rounding, and be active in one result only.
    assert flips <= (1 if nu > 0 else 0)
    np.testing.assert_allclose(fast_sums[:, 0], sums[:, 0], rtol=2e-6, atol=1e-5)
    # The errors may differ by one row (of weight up to 3) whose two best classes are equal up to rounding.
    assert np.abs(fast_sums[:, 1] - sums[:, 1]).max(initial=0) <= 3.0
    if not train:
        assert fast is None
        assert exact is None
    elif flips == 0:
        zeros = np.zeros((members.total_dim, p))
        exact, fast = zeros if exact is None else exact, zeros if fast is None else fast
        # The tolerance is for float32 sums over rows and features. A residual times its weight (up to 3) is
        # at most about 15, and the rounding error of a sum of n residuals grows with the root of n.
        assert np.abs(fast - exact).max(initial=0) <= 2e-6 * 15 * max(n, 10) ** 0.5 * 3


@pytest.mark.parametrize("nu", [0.0, 0.4])
@pytest.mark.parametrize("p", FEATURES)
@pytest.mark.parametrize("case", CASES)
def test_kernels_equal_the_reference(case: str, p: int, nu: float) -> None:
    for n in ROWS:
        for train in (True, False):
            assert_close_sums(CASES[case], n, p, nu, train, seed=n + p)


@given(
    st.sampled_from(sorted(CASES)),
    st.integers(0, 400),
    st.integers(1, 60),
    st.floats(0, 0.95),
    st.integers(0, 10**6),
)
def test_kernels_equal_the_reference_on_random_rows(case: str, n: int, p: int, nu: float, seed: int) -> None:
    assert_close_sums(CASES[case], n, p, nu, True, seed)


@pytest.mark.parametrize("case", ["D = 20", "one_vs_all, D = 24"])
@pytest.mark.parametrize("nu", [0.0, 0.3])
def test_the_fused_body_equals_the_two_products(
    case: str, nu: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = CASES[case]
    w, x, y, weight = make_inputs(members, 300, 25, 3)
    thresholds = np.full(members.n_members, nu)
    fused, sums = run_estep("cpu", members, w, x, y, weight, thresholds, True)
    monkeypatch.setattr(tiles, "MAX_DIMS", 0)
    products, other = run_estep("cpu", members, w, x, y, weight, thresholds, True)
    np.testing.assert_allclose(fused, products, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(sums, other, rtol=1e-6)


def test_members_may_have_different_thresholds() -> None:
    members = CASES["one_vs_all, D = 24"]
    w, x, y, weight = make_inputs(members, 300, 24, 4)
    nu = np.array([0.8, 0.4, 0.2, 0.0])
    exact, sums = run_estep("reference", members, w, x, y, weight, nu, True)
    fast, fast_sums = run_estep("cpu", members, w, x, y, weight, nu, True)
    np.testing.assert_array_equal(fast_sums[:, 2], sums[:, 2])
    assert (np.diff(sums[:, 2]) > 0).all()
    np.testing.assert_allclose(fast, exact, rtol=0, atol=2e-4)


@pytest.mark.parametrize("case", ["D = 20", "D = 70"])
def test_a_block_without_active_rows_changes_nothing(case: str) -> None:
    members = CASES[case]
    w, x, _, weight = make_inputs(members, 130, 24, 5)
    # Label each row with the class that the model predicts, so that no row exceeds the threshold nu.
    y = np.array([(h.reshape(10, -1) ** 2).sum(axis=1).argmax() for h in x @ w.T], dtype=np.int32)
    nu = np.array([1 - 1e-9])
    for device in ("reference", "cpu"):
        delta, sums = run_estep(device, members, w, x, y, weight, nu, True)
        assert sums[0, 1:].tolist() == [0.0, 0.0]
        assert delta is None or not delta.any()


@pytest.mark.parametrize("nu", [0.0, 0.3])
@pytest.mark.parametrize("case", ["D = 20", "D = 70"])
def test_buffers_do_not_leak_rows_of_the_previous_block(case: str, nu: float) -> None:
    """The backend reads only the part of its buffers that the current block has written.

    Most blocks have fewer rows than the block before, so the buffers contain rows of that block.
    """
    members = CASES[case]
    backend, table = make_backend("cpu"), squash_table(int(members.dims.sum()))
    for n in (300, 129, 7, 1, 0, 128):
        w, x, y, weight = make_inputs(members, n, 25, n)
        args = (y, weight, members.dims, members.labels, np.full(1, nu), table, True)
        delta, sums = backend.kernel("capsule_estep")(backend, w, backend.asarray(x, np.float32, "x"), *args)
        fresh = make_backend("cpu")
        expected, other = fresh.kernel("capsule_estep")(fresh, w, x, *args)
        if delta is None or expected is None:
            assert delta is expected
        else:
            np.testing.assert_array_equal(delta, expected)
        np.testing.assert_array_equal(sums, other)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("case", ["D = 20", "D = 70"])
@pytest.mark.parametrize("nu", [0.0, 0.3])
def test_a_bad_row_shows_in_the_sums(case: str, bad: float, nu: float) -> None:
    members = CASES[case]
    w, x, y, weight = make_inputs(members, 300, 25, 6)
    x[200, 3] = bad
    with np.errstate(all="ignore"):
        _, sums = run_estep("cpu", members, w, x, y, weight + 0.1, np.full(1, nu), True)
    assert not np.isfinite(sums[0, 0])
