"""The numba kernels equal the reference in numpy for unusual shapes, and rows do not affect each other."""

from __future__ import annotations

import numpy as np
import pytest

from scalelatent.models.linear_mixture.kernels import cpu, reference
from scalelatent.models.linear_mixture.kernels.reference import Groups, TangentSpec, group_rows, sort_by_code
from scalelatent.models.linear_mixture.kernels.small_matrices import eigenvectors
from scalelatent.models.linear_mixture.model.m_steps import orthonormalise
from tests.models.linear_mixture.cases import draw

# Each case is (rows, features, dimensions, components, classes).
SHAPES = [
    (0, 20, 3, 5, 1),
    (1, 20, 0, 1, 1),
    (7, 33, 1, 3, 2),
    (129, 16, 5, 10, 3),
    (129, 47, 12, 50, 4),
    (300, 64, 40, 9, 1),
    (129, 20, 3, 1000, 10),
    (40, 784, 10, 30, 2),
    (260, 1030, 3, 70, 2),
    (9, 2500, 2, 5, 1),
    (130, 1, 0, 4, 2),
]


def make_scores(p: int, h: int, k: int, kind: str, seed: int = 0):
    h = min(h, p)
    means = draw(seed, k, p)
    bases = np.linalg.qr(draw(seed + 1, k, p, h))[0] if h else np.zeros((k, p, 0))
    values, noise = np.exp(draw(seed + 2, k, h)) + 1.0, np.exp(0.3 * draw(seed + 3, k))
    weights, centre = np.full(k, 1.0 / k), np.float64(draw(seed + 4, p).astype("f4"))
    if kind == "error":
        return reference.error_scores(means, bases, centre)
    if kind == "ppca":
        return reference.ppca_scores(means, bases, values, noise, weights, centre)
    wide = np.exp(0.3 * draw(seed + 5, k, p))
    return reference.factor_scores(means, bases, wide, weights, centre)


@pytest.mark.parametrize("kind", ["error", "ppca", "factors"])
@pytest.mark.parametrize(("n", "p", "h", "k", "classes"), SHAPES)
def test_scores_equal_the_reference(n, p, h, k, classes, kind):
    scores, starts = make_scores(p, h, k, kind), np.linspace(0, k, classes + 1).astype(int)
    x = (0.7 * draw(9, n, p)).astype("f4")
    ours, theirs = cpu.make_scorer(scores, starts), reference.make_scorer(scores, starts)
    size = 1.0 + np.abs(x - scores.centre).max(initial=0) ** 2 * p * scores.d.max()
    for run, stop in ((0, classes), (classes - 1, classes), (0, 1), (0, 0)):
        found, wanted = (m.all_scores(s, x, run, stop) for m, s in ((cpu, ours), (reference, theirs)))
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, wanted, atol=1e-5 * size, rtol=0)
        best, index = cpu.nearest(ours, x, run, stop)
        least, where = reference.nearest(theirs, x, run, stop)
        assert index.dtype == np.int32
        np.testing.assert_allclose(best, least, atol=1e-5 * size, rtol=0)
        for i in range(stop - run):
            first = starts[run + i] - starts[run]
            part = wanted[:, first : starts[run + i + 1] - starts[run]]
            chosen = np.take_along_axis(part, index[:, i : i + 1] - starts[run + i], axis=1)[:, 0]
            differ = index[:, i] != where[:, i]
            assert (chosen[differ] - least[:, i][differ] < 1e-5 * size).all()


def test_dropped_components_are_never_chosen_and_ties_go_to_the_first():
    scores = make_scores(12, 2, 40, "error")
    for array in (scores.w, scores.b, scores.c):
        array[20:] = array[:20]
    scores.c[:10] = np.inf
    x, starts = draw(3, 50, 12).astype("f4"), np.array([0, 40])
    best, index = cpu.nearest(cpu.make_scorer(scores, starts), x, 0, 1)
    assert ((index >= 10) & (index < 30)).all()
    assert np.isfinite(best).all()
    scores.c[:] = np.inf
    best, index = cpu.nearest(cpu.make_scorer(scores, starts), x, 0, 1)
    assert (best == np.inf).all()
    assert not index.any()


@pytest.mark.parametrize("kind", ["error", "factors"])
@pytest.mark.parametrize(("n", "p", "h", "k", "classes"), SHAPES)
def test_rows_are_scored_under_the_components_of_their_class(n, p, h, k, classes, kind):
    scores, starts = make_scores(p, h, k, kind), np.linspace(0, k, classes + 1).astype(int)
    scores.c[: starts[1]] = np.inf  # A score of infinity drops a component.
    x = (0.7 * draw(9, n, p)).astype("f4")
    codes = np.random.default_rng(5).integers(0, classes, n)
    rows, edges = sort_by_code(codes, classes)
    for module in (cpu, reference):
        scorer = module.make_scorer(scores, starts)
        best, index = module.nearest_own(scorer, x, rows, edges)
        all_best, all_index = module.nearest(scorer, x, 0, classes)
        # The reference uses BLAS, which may sum in another order if there are fewer rows.
        rtol = 0.0 if module is cpu else 1e-10
        np.testing.assert_allclose(best, all_best[np.arange(n), codes], rtol=rtol)
        np.testing.assert_array_equal(index, all_index[np.arange(n), codes])
        assert index.dtype == np.int32


@pytest.mark.parametrize("kind", ["error", "factors"])
def test_a_row_has_the_same_bits_in_any_block(kind):
    scores, starts = make_scores(50, 7, 60, kind), np.array([0, 25, 60])
    scorer, x = cpu.make_scorer(scores, starts), draw(1, 300, 50).astype("f4")
    whole, scored = cpu.nearest(scorer, x, 0, 2), cpu.all_scores(scorer, x, 0, 2)
    for cut in (1, 127, 128, 200):
        for part in (slice(0, cut), slice(cut, 300)):
            for found, wanted in zip(cpu.nearest(scorer, x[part], 0, 2), whole, strict=True):
                np.testing.assert_array_equal(found, wanted[part])
            np.testing.assert_array_equal(cpu.all_scores(scorer, x[part], 0, 2), scored[part])
    np.testing.assert_array_equal(whole[0][:, 1], scored[:, 25:].min(axis=1))


@pytest.mark.parametrize(("n", "k", "few"), [(0, 5, 2), (3, 1, 10), (7, 10, 10), (40, 33, 1), (60, 300, 10)])
def test_the_few_best_are_the_first_of_a_stable_sort(n, k, few):
    scores = np.random.default_rng(k).integers(0, 40, (n, k)).astype("f4")  # Some scores are equal.
    scores[:, k // 2 :: 3] = np.inf
    found = cpu.select_best(scores, few)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, reference.select_best(scores, few))


def make_groups(n: int, k: int, seed: int) -> Groups:
    rng = np.random.default_rng(seed)
    index = rng.integers(0, k, n)
    index[index == k // 2] = 0  # Of several components, one has no rows.
    return group_rows(index, k, rng.random(n))


@pytest.mark.parametrize("per_feature", [False, True])
@pytest.mark.parametrize("q", [1, 8, 16, 24])
@pytest.mark.parametrize(("n", "p", "k"), [(0, 20, 3), (1, 24, 1), (7, 33, 3), (129, 49, 2), (700, 97, 5)])
def test_scatter_equals_the_reference(n, p, k, q, per_feature):
    means, bases = draw(1, k, p), np.linalg.qr(draw(2, k, p, min(q, p)))[0]
    q, x, groups = bases.shape[2], draw(3, n, p).astype("f4"), make_groups(n, k, 4)
    found = []
    for module in (cpu, reference):
        square = np.ones((k, p) if per_feature else k)
        out = np.ones((k, p)), square, np.ones((k, q, p)), np.ones((k, q, q))
        module.add_scatter(module.pack_bases(means, bases, per_feature), x, groups, *out)
        found.append(out)
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6 * max(n, 1) * np.sqrt(p))


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (16, 16), (28, 28)])
@pytest.mark.parametrize("smoothing", [0.0, 0.6, 1.5])
def test_tangents_equal_the_reference(shape, smoothing):
    x = np.random.default_rng(0).random((5, shape[0] * shape[1])).astype("f4")
    found = cpu.tangent_rows(x, shape, reference.TANGENTS, smoothing)
    wanted = reference.tangent_rows(x, shape, reference.TANGENTS, smoothing)
    np.testing.assert_allclose(found, wanted, atol=1e-6)


@pytest.mark.parametrize("names", [("shift-x",), reference.TANGENTS])
@pytest.mark.parametrize(("n", "k"), [(0, 1), (1, 1), (9, 3), (200, 3)])
def test_tangent_scatter_equals_the_reference(n, k, names):
    p, q = 12 * 10, 8
    x = np.random.default_rng(0).random((n, p)).astype("f4")
    spec, groups = TangentSpec(names, (12, 10), 0.6), make_groups(n, k, 4)
    factors, bases = np.abs(draw(5, k, len(names))), np.linalg.qr(draw(2, k, p, q))[0]
    found = []
    for module in (cpu, reference):
        out = np.zeros((k, q, p)), np.zeros((k, len(names)))
        module.add_tangent_scatter(
            module.pack_bases(np.zeros((k, p)), bases, False), x, groups, spec, factors, *out
        )
        found.append(out)
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * max(n, 1))


@pytest.mark.parametrize("kind", ["error", "ppca", "factors"])
@pytest.mark.parametrize(("n", "h", "t"), [(0, 3, 6), (1, 0, 1), (20, 10, 6), (20, 20, 7), (5, 17, 9)])
def test_tangent_distance_equals_the_reference(n, h, t, kind):
    p, k = 144, 12
    scores = make_scores(p, h, k, kind)
    x, tangents = draw(7, n, p).astype("f4"), draw(8, n, t, p).astype("f4")
    candidates = np.random.default_rng(1).integers(0, k, (n, 4)).astype("i4")
    wanted = reference.tangent_distance(reference.pack_tangent_scores(scores), x, tangents, candidates)
    found = cpu.tangent_distance(cpu.pack_tangent_scores(scores), x, tangents, candidates)
    np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=1e-3)
    whole = reference.all_scores(reference.make_scorer(scores, np.array([0, k])), x, 0, 1)
    plain = np.take_along_axis(whole, candidates.astype(int), axis=1)
    assert (found <= plain + 1e-3 * (1 + np.abs(plain))).all()


def test_equal_rows_and_constant_features_give_zero_statistics():
    x = np.tile(draw(1, 1, 30).astype("f4"), (40, 1))
    groups = group_rows(np.zeros(40, dtype=int), 1)
    total, square, image = np.zeros((1, 30)), np.zeros(1), np.zeros((1, 8, 30))
    packed = cpu.pack_bases(x[:1].astype("f8"), np.linalg.qr(draw(2, 1, 30, 8))[0], False)
    cpu.add_scatter(packed, x, groups, total, square, image, np.zeros((0, 0, 0)))
    assert not total.any()
    assert not square.any()
    assert not image.any()


@pytest.mark.parametrize("q", [1, 2, 7, 16, 44])
def test_small_eigenvectors_equal_lapacks(q):
    factors = draw(q, 5, q, q)
    matrices = factors @ np.swapaxes(factors, 1, 2)
    matrices[3] = 0.0
    matrices[4] = np.diag(np.arange(q, dtype=float))
    before = matrices.copy()
    values, turn = eigenvectors(matrices)
    np.testing.assert_array_equal(matrices, before)
    np.testing.assert_allclose(values, np.linalg.eigvalsh(matrices)[:, ::-1], atol=1e-10 * q)
    np.testing.assert_allclose((turn * values[:, None]) @ np.swapaxes(turn, 1, 2), matrices, atol=1e-10 * q)
    np.testing.assert_allclose(np.swapaxes(turn, 1, 2) @ turn, np.tile(np.eye(q), (5, 1, 1)), atol=1e-12)


def test_any_columns_become_orthonormal_in_order():
    p, q = 30, 8
    columns, otherwise = draw(1, 7, p, q), np.linalg.qr(draw(2, 7, p, q))[0]
    columns[1, :, 5] = 2.0 * columns[1, :, 0]  # Column 5 is a multiple of column 0.
    columns[2, :, 3] = 0.0
    columns[3] = 0.0
    columns[4] = columns[4] @ np.diag(10.0 ** -np.arange(0, 4 * q, 4))  # Columns have very different lengths.
    # Column 7 is nearly a multiple of column 1.
    columns[5, :, 7] = columns[5, :, 1] + 1e-7 * columns[5, :, 7]
    columns[6] *= 1e-180
    found = orthonormalise(columns.copy(), otherwise)
    np.testing.assert_allclose(np.swapaxes(found, 1, 2) @ found, np.tile(np.eye(q), (7, 1, 1)), atol=1e-13)
    np.testing.assert_allclose(found[3], otherwise[3], atol=1e-13)
    for k in (0, 2, 4, 5, 6):  # Column j is a sum of multiples of the results 0 to j.
        for j in range(q if k != 2 else 3):
            basis, some = found[k][:, : j + 1], columns[k, :, j] / np.abs(columns[k, :, j]).max()
            np.testing.assert_allclose(basis @ (basis.T @ some), some, atol=1e-12)
            assert found[k][:, j] @ some > 0
