"""Second moments of rows, their eigenvectors, and initial weights from eigenvectors equal those of numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalelatent.contract.finite import find_nonfinite
from scalelatent.contract.learners import Block
from scalelatent.contract.stats import Stats
from scalelatent.engine.backend import make_backend
from scalelatent.models.capsule.model.members import build_members
from scalelatent.models.capsule.model.start import random_start, subspace_start
from scalelatent.reductions.eigen import leading_eigenvectors
from scalelatent.reductions.moments import NonFiniteError, Projection, SecondMoments

DTYPES = ["u1", "i2", "f4", "f8", "f2", "?"]


def make_rows(n: int, p: int, m: int, dtype: str, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.Generator(np.random.Philox(seed))
    x = (
        (rng.normal(size=(n, p)) * 3).astype("f4").astype(dtype)
        if dtype != "u1"
        else rng.integers(0, 256, (n, p), "u1")
    )
    return x, rng.integers(0, m, n).astype(np.int32), rng.uniform(0, 2, n)


def compute_moments(reduction: SecondMoments, blocks: list[Block]) -> Stats:
    stats = Stats.zeros(reduction.layout())
    prepared = reduction.prepare(None, make_backend("cpu"))
    for block in blocks:
        reduction.accumulate(prepared, block, stats)
    return stats


@given(
    st.integers(1, 80), st.integers(1, 9), st.integers(1, 5), st.sampled_from(DTYPES),
    st.booleans(), st.booleans(), st.integers(0, 10**6),
)  # fmt: skip
def test_moments_equal_numpy_per_class(
    n: int, p: int, m: int, dtype: str, weighted: bool, class_weighted: bool, seed: int
) -> None:
    x, y, weight = make_rows(n, p, m, dtype, seed)
    class_weight = np.linspace(0.5, 2, m) if class_weighted else None
    reduction = SecondMoments(p, m, class_weight)
    cut = n // 3
    stats = compute_moments(
        reduction,
        [Block(x[a:b], y[a:b], weight[a:b] if weighted else None, a) for a, b in ((0, cut), (cut, n))],
    )
    full = (weight if weighted else np.ones(n)) * (class_weight[y] if class_weighted else 1)
    for c in range(m):
        own = x[y == c].astype("f8")
        np.testing.assert_allclose(
            stats["moment"][c], (own * full[y == c, None]).T @ own, rtol=1e-12, atol=1e-12 * 255**2
        )
        assert stats["weight"][c] == pytest.approx(full[y == c].sum(), rel=1e-13)
        assert stats["count"][c] == (y == c).sum()


def test_without_classes_moments_are_one_matrix_and_need_no_labels() -> None:
    x, _, weight = make_rows(50, 4, 2, "f4", 1)
    stats = compute_moments(SecondMoments(4), [Block(x, None, weight, 0)])
    assert stats["moment"].shape == (1, 4, 4)
    np.testing.assert_allclose(
        stats["moment"][0], (x.astype("f8") * weight[:, None]).T @ x.astype("f8"), rtol=1e-12
    )


def test_float32_rows_are_summed_in_float64() -> None:
    """A float32 sum of 1,000 squares would have a relative error near 1e-7, and the test allows 1e-12."""
    x = np.full((1000, 2), [1.0, 1e-5], dtype="f4")
    moment = compute_moments(SecondMoments(2), [Block(x, None, None, 0)])["moment"][0]
    assert moment[1, 1] == pytest.approx(1000 * float(np.float32(1e-5)) ** 2, rel=1e-12)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("classes", [0, 3])
def test_nonfinite_rows_are_reported(bad: float, classes: int) -> None:
    x, y, _ = make_rows(30, 5, 3, "f4", 2)
    x[17, 3] = bad
    with pytest.raises(NonFiniteError, match=f"row 1017, feature 3 is {bad}"):
        compute_moments(SecondMoments(5, classes), [Block(x, y, None, 1000)])


def test_a_nonfinite_row_of_weight_zero_is_reported() -> None:
    x, y, _ = make_rows(30, 5, 3, "f4", 2)
    x[4, 0] = np.nan
    weight = np.ones(30)
    weight[4] = 0
    with pytest.raises(NonFiniteError, match="row 4, feature 0"):
        compute_moments(SecondMoments(5, 3), [Block(x, y, weight, 0)])


def test_find_nonfinite_gives_the_first_of_several() -> None:
    x = np.zeros((4, 3))
    x[2, 1], x[3, 0] = np.inf, np.nan
    assert find_nonfinite(Block(x, None, None, 10)) == "row 12, feature 1 is inf"
    assert find_nonfinite(Block(np.zeros((2, 2)), None, None, 0)) is None
    assert find_nonfinite(Block(np.zeros((2, 2), "u1"), None, None, 0)) is None


@given(st.integers(1, 12), st.integers(0, 10**6), st.data())
def test_leading_eigenvectors_equal_numpys(p: int, seed: int, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, p))
    a = np.random.Generator(np.random.Philox(seed)).normal(size=(2 * p, p))
    moment = a.T @ a
    values, vectors = leading_eigenvectors(moment, n)
    np.testing.assert_allclose(values, np.linalg.eigvalsh(moment)[::-1][:n], rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(moment @ vectors, vectors * values, atol=1e-9 * values[0])
    np.testing.assert_allclose(vectors.T @ vectors, np.eye(n), atol=1e-12)
    largest = vectors[np.abs(vectors).argmax(axis=0), np.arange(n)]
    assert (largest > 0).all()


@pytest.mark.parametrize("architecture", ["multiclass", "one_vs_all", "all_vs_all"])
def test_subspace_start_is_the_leading_eigenvectors(architecture: str) -> None:
    m, p, d = 3, 6, 2
    x, y, weight = make_rows(400, p, m, "f4", 3)
    stats = compute_moments(SecondMoments(p, m), [Block(x, y, weight, 0)])
    members = build_members(architecture, m, d)
    w = subspace_start(members, stats["moment"], stats["weight"])
    row = 0
    for r in range(members.n_members):
        for i in range(members.dims.shape[1]):
            own = np.isin(y, np.flatnonzero(members.labels[r] == i))
            mean = (x[own].astype("f8") * weight[own, None]).T @ x[own].astype("f8") / weight[own].sum()
            xi, v = np.linalg.eigh(mean)
            expected = (v[:, ::-1][:, :d] / np.sqrt(xi[::-1][:d])).T / np.sqrt(d)
            got = w[row : row + d]
            np.testing.assert_allclose(
                got * np.sign((got * expected).sum(axis=1))[:, None], expected, rtol=1e-8
            )
            # The start values are scaled (equation 2.28 of Saul 2021) so that the latents of the rows of a
            # class have a mean squared length of 1.
            assert np.trace(got @ mean @ got.T) == pytest.approx(1, rel=1e-10)
            row += d
    assert row == len(w)


def test_subspace_start_of_a_class_without_variance_is_finite() -> None:
    x = np.ones((20, 4), "f4")
    y = (np.arange(20) % 2).astype(np.int32)
    stats = compute_moments(SecondMoments(4, 2), [Block(x * (y[:, None] + 1), y, None, 0)])
    w = subspace_start(build_members("multiclass", 2, 3), stats["moment"], stats["weight"])
    assert np.isfinite(w).all()
    blank = compute_moments(SecondMoments(4, 2), [Block(0 * x, y, None, 0)])
    assert np.isfinite(
        subspace_start(build_members("multiclass", 2, 3), blank["moment"], blank["weight"])
    ).all()


def test_random_start_has_the_requested_scale_and_repeats() -> None:
    x, y, _ = make_rows(3000, 20, 2, "f4", 5)
    stats = compute_moments(SecondMoments(20, 2), [Block(x, y, None, 0)])
    members = build_members("multiclass", 2, 50)
    first, again, other = (
        random_start(members, stats["moment"], stats["weight"], 0.25, np.random.default_rng(s))
        for s in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    # The standard deviation of all latents is 0.25, with a relative error of 1/sqrt(2 * 100 latents * 20
    # directions) = 1.6 %. The tolerance is four times this error.
    assert np.sqrt(((x @ first.T) ** 2).mean()) == pytest.approx(0.25, rel=0.07)


@pytest.mark.parametrize("dtype", DTYPES)
def test_projected_rows_are_products_with_the_basis(dtype: str) -> None:
    x, _, _ = make_rows(40, 6, 2, dtype, 8)
    basis = np.linalg.qr(np.random.Generator(np.random.Philox(1)).normal(size=(6, 3)))[0]
    project = Projection(basis)
    out = project.apply(project.prepare(make_backend("cpu")), Block(x, None, None, 0))
    assert out.dtype == np.float32
    assert project.output() == ((3,), "float32")
    np.testing.assert_allclose(
        out, x.astype("f8") @ basis, rtol=1e-5, atol=1e-5 * np.abs(x.astype("f8")).max()
    )
