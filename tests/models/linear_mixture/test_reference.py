"""The reference kernels equal written-out sums; tangents equal the change of images by small moves."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import ndimage

from scalelatent.models.linear_mixture.kernels import reference
from scalelatent.models.linear_mixture.kernels.reference import Groups, TangentSpec
from tests.models.linear_mixture.cases import draw, score_rows

SHAPE = (17, 15)


def make_components(k: int, p: int, h: int, seed: int = 0):
    bases, _ = np.linalg.qr(draw(seed, k, p, h)) if h else (np.zeros((k, p, 0)), None)
    return draw(seed + 1, k, p), bases


@pytest.mark.parametrize("h", [0, 1, 4])
def test_the_error_is_the_squared_distance_from_the_component(h):
    means, bases = make_components(3, 7, h)
    x = draw(5, 6, 7)
    found = score_rows(reference.error_scores(means, bases, draw(6, 7)), x)
    for q in range(3):
        r = x - means[q]
        expected = ((r - (r @ bases[q]) @ bases[q].T) ** 2).sum(axis=1)
        np.testing.assert_allclose(found[:, q], expected, atol=1e-12)


def test_code_cost_adds_the_cost_of_codes():
    means, bases = make_components(3, 7, 2)
    values, noise = np.array([[4.0, 2.0], [3.0, 1.0], [5.0, 0.2]]), 0.5
    x = draw(5, 6, 7)
    found = score_rows(reference.code_cost_scores(means, bases, values, noise, np.zeros(7)), x)
    for q in range(3):
        r = x - means[q]
        codes = r @ bases[q]
        # A code (coordinate in the component) of a variance below the noise costs its square, like an error.
        cost = noise * codes**2 / np.maximum(values[q], noise)
        expected = (r * r).sum(axis=1) - (codes**2).sum(axis=1) + cost.sum(axis=1)
        np.testing.assert_allclose(found[:, q], expected, atol=1e-12)


def test_factor_scores_are_gaussian_densities():
    loadings, noise, means = draw(1, 2, 6, 3), np.exp(draw(2, 2, 6)), draw(3, 2, 6)
    x, weights = draw(4, 5, 6), np.array([0.3, 0.7])
    found = score_rows(reference.factor_scores(means, loadings, noise, weights, draw(5, 6)), x)
    for q in range(2):
        covariance = loadings[q] @ loadings[q].T + np.diag(noise[q])
        z = x - means[q]
        expected = np.einsum("np,pr,nr->n", z, np.linalg.inv(covariance), z)
        expected += np.linalg.slogdet(2 * np.pi * covariance)[1] - 2 * np.log(weights[q])
        np.testing.assert_allclose(found[:, q], expected)


def test_the_first_nearest_component_of_each_class_is_found():
    means, bases = make_components(5, 4, 1)
    means[3], bases[3] = means[2], bases[2]
    scorer = reference.error_scores(means, bases, np.zeros(4))
    x = draw(9, 11, 4)
    whole = score_rows(scorer, x)
    best, index = reference.nearest(reference.make_scorer(scorer, np.array([0, 2, 2, 5])), x, 0, 3)
    np.testing.assert_array_equal(index[:, 0], whole[:, :2].argmin(axis=1))
    assert (best[:, 1] == np.inf).all()
    np.testing.assert_array_equal(index[:, 2], 2 + whole[:, 2:].argmin(axis=1))
    assert 3 not in index


@pytest.mark.parametrize("per_feature", [False, True])
def test_statistics_equal_written_out_sums(per_feature):
    means, bases = make_components(3, 5, 2)
    x, r = draw(7, 4, 5), np.array([0.5, 0.25, 1.0, 0.75, 2.0])
    groups = Groups(np.array([0, 0, 2, 5]), np.array([0, 3, 0, 1, 2]), r)
    total, square = np.zeros((3, 5)), np.zeros((3, 5) if per_feature else 3)
    image, gram = np.zeros((3, 2, 5)), np.zeros((3, 2, 2))
    packed = reference.pack_bases(means, bases, per_feature)
    reference.add_scatter(packed, x, groups, total, square, image, gram)
    for q, rows, part in ((1, [0, 3], r[:2]), (2, [0, 1, 2], r[2:])):
        residual = x[rows] - means[q]
        s = sum(w * np.outer(v, v) for w, v in zip(part, residual, strict=True))
        np.testing.assert_allclose(total[q], part @ residual)
        np.testing.assert_allclose(square[q], np.diag(s) if per_feature else np.trace(s))
        np.testing.assert_allclose(image[q], bases[q].T @ s)
        np.testing.assert_allclose(gram[q], bases[q].T @ s @ bases[q])
    assert not total[0].any()


def draw_blob(shape=SHAPE) -> np.ndarray:
    """Return a smooth image of one slanted stroke in the middle of the image."""
    v, u = np.meshgrid(*(np.arange(size) - (size - 1) / 2 for size in shape), indexing="ij")
    return np.exp(-0.5 * ((u - 0.5 * v) / 1.5) ** 2 - 0.5 * (v / 2.0) ** 2)


def move_image(image: np.ndarray, by_u, by_v) -> np.ndarray:
    """Return an image whose value at row v and column u is image[v + by_v, u + by_u], interpolated."""
    v, u = np.meshgrid(*(np.arange(size, dtype=float) for size in image.shape), indexing="ij")
    return ndimage.map_coordinates(image, [v + by_v, u + by_u], order=5, mode="nearest")


@pytest.mark.parametrize("name", [name for name in reference.TANGENTS if name != "thickness"])
def test_tangents_are_derivatives_of_moved_images(name):
    image, step = draw_blob(), 1e-3
    by_x, by_y = (field.reshape(SHAPE) for field in reference.velocity(name, SHAPE))
    change = (move_image(image, step * by_x, step * by_y) - move_image(image, -step * by_x, -step * by_y)) / (
        2 * step
    )
    found = reference.tangent_rows(image.reshape(1, -1), SHAPE, (name,), 0.0)[0, 0].reshape(SHAPE)
    error = np.linalg.norm(found - change) / np.linalg.norm(change)
    assert error < 0.15, error  # Differences of pixels are rough derivatives of a narrow stroke.


def test_velocity_fields_of_scaling_and_rotation_have_their_directions():
    half = max(SHAPE) / 2
    v, u = np.meshgrid(*((np.arange(size) - (size - 1) / 2) / half for size in SHAPE), indexing="ij")
    assert all(
        (field == want.ravel()).all()
        for field, want in zip(reference.velocity("scaling", SHAPE), (u, v), strict=True)
    )
    by_x, by_y = reference.velocity("rotation", SHAPE)
    # A rotation moves each pixel at right angles to its radius.
    assert np.abs(by_x * u.ravel() + by_y * v.ravel()).max() < 1e-12


def test_thickness_grows_strokes():
    image = draw_blob()
    tangent = reference.tangent_rows(image.reshape(1, -1), SHAPE, ("thickness",), 0.6)[0, 0]
    assert (tangent >= 0).all()
    grown = ndimage.grey_dilation(image, size=3) - image
    assert np.corrcoef(grown.ravel(), tangent)[0, 1] > 0.9


def test_pixels_beyond_the_border_are_background():
    tangents = reference.tangent_rows(np.full((1, 17 * 15), 3.0), SHAPE, reference.TANGENTS, 0.7)[0]
    inner = tangents.reshape(-1, *SHAPE)[:, 4:-4, 4:-4]
    np.testing.assert_allclose(inner, 0.0, atol=1e-12)
    assert (tangents[0].reshape(SHAPE)[8, [0, -1]] * [1, -1] > 0).all()


def test_tangent_scatter_equals_written_out_sums():
    means, bases = make_components(2, 17 * 15, 3)
    x, spec = (
        np.random.default_rng(1).random((6, 17 * 15)),
        TangentSpec(("shift-x", "thickness"), SHAPE, 0.6),
    )
    groups = Groups(np.array([0, 2, 6]), np.arange(6), np.linspace(0.5, 1.0, 6))
    factors, image, trace = np.array([[0.1, 0.2], [0.3, 0.4]]), np.zeros((2, 3, 255)), np.zeros((2, 2))
    packed = reference.pack_bases(0 * means, bases, False)
    reference.add_tangent_scatter(packed, x, groups, spec, factors, image, trace)
    made = reference.tangent_rows(x, SHAPE, spec.names, 0.6)
    for q, rows in ((0, slice(0, 2)), (1, slice(2, 6))):
        t, r = made[rows], groups.weights[rows]
        s = np.einsum("n,j,njp,njo->po", r, factors[q], t, t)
        np.testing.assert_allclose(image[q], bases[q].T @ s)
        np.testing.assert_allclose(trace[q], np.einsum("n,njp->j", r, t * t))


@pytest.mark.parametrize("kind", ["error", "code-cost", "factors"])
def test_tangent_distance_solves_a_least_squares_problem(kind):
    p, h, t = 12, 3, 2
    means, bases = make_components(4, p, h)
    if kind == "factors":
        noise = np.exp(draw(3, 4, p))
        scorer = reference.factor_scores(means, bases, noise, np.full(4, 0.25), draw(2, p))
    elif kind == "error":
        scorer = reference.error_scores(means, bases, draw(2, p))
    else:
        values = np.abs(draw(4, 4, h)) + 1
        scorer = reference.code_cost_scores(means, bases, values, 0.3, draw(2, p))
    x, tangents = draw(5, 3, p), draw(6, 3, t, p)
    candidates = np.array([[0, 1], [2, 3], [3, 0]], dtype=np.int32)
    found = reference.tangent_distance(scorer, x, tangents, candidates, 1e-9)
    whole = score_rows(scorer, x)
    for i in range(3):
        for j, q in enumerate(candidates[i]):
            d = np.broadcast_to(scorer.d[q], (p,))
            metric = np.diag(d) - scorer.w[q] @ scorer.w[q].T
            plain = whole[i, q]
            assert found[i, j] <= plain
            root = np.linalg.cholesky(metric + 1e-9 * np.eye(p))
            z = x[i] - scorer.centre + np.linalg.lstsq(metric, 0.5 * scorer.b[q], rcond=None)[0]
            a = np.linalg.lstsq(root.T @ tangents[i].T, -root.T @ z, rcond=None)[0]
            best = score_rows(scorer, (x[i] + a @ tangents[i])[None])[0, q]
            np.testing.assert_allclose(found[i, j], best, rtol=1e-5, atol=1e-6)


def test_tangents_that_are_equal_or_zero_leave_the_distance_finite():
    means, bases = make_components(1, 6, 2)
    scorer = reference.error_scores(means, bases, np.zeros(6))
    t = draw(3, 1, 1, 6)
    # The last tangent is a direction of the component.
    tangents = np.concatenate([t, t, 0 * t, bases[0].T[None, :1]], axis=1)
    x, candidates = draw(4, 1, 6), np.zeros((1, 1), dtype=np.int32)
    found = reference.tangent_distance(scorer, x, tangents, candidates)[0, 0]
    alone = reference.tangent_distance(scorer, x, t, candidates)[0, 0]
    assert 0 <= found <= alone + 1e-9
