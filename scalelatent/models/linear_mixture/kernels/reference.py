"""Kernels in float64 numpy, with which the tests compare the kernels of numba and CuPy.

Component q has the score E_q(x) = (z∘z)·d_q + z·b_q + c_q - |W_q'z|² of a row x, with z = x - centre and the
parameters d_q, b_q, c_q and W_q of the component. The score is a squared reconstruction error, or -2 log
density.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.linalg import slogdet

LOG_2PI = float(np.log(2 * np.pi))
# Tangent distance adds this share of the squared length of each tangent to the diagonal of the linear
# equations for the moves along the tangents.
GAMMA = 1e-3
# Tangent distance skips tangents whose Cholesky pivot is below this share of the largest diagonal element.
PIVOT = 1e-12
# Names of all tangents: derivatives of an image with respect to small transformations.
TANGENTS = (
    "shift-x",
    "shift-y",
    "rotation",
    "scaling",
    "hyperbolic-axis",
    "hyperbolic-diagonal",
    "thickness",
)


@dataclass(frozen=True)
class Scores:
    """Parameters of the scores of K components."""

    d: np.ndarray  # (K,): factor of the squares of all features; or (K, p): of each feature
    w: np.ndarray  # (K, p, h): directions whose squared coordinates are subtracted
    b: np.ndarray  # (K, p): linear factors
    c: np.ndarray  # (K,): constants, infinite for a dropped component
    centre: np.ndarray  # (p,): subtracted from rows, so that differences in float32 lose fewer digits


def _expand_scores(
    d: np.ndarray, w: np.ndarray, means: np.ndarray, extra: np.ndarray, centre: np.ndarray
) -> Scores:
    """Return parameters of the scores (z - m)' (diag(d) - W W') (z - m) + extra, a function of a row z.

    m is the mean of a component minus ``centre``, and rows z are centred as well.
    """
    m = means - centre
    wide = d if d.ndim == 2 else d[:, None]
    pm = wide * m - np.einsum("kph,kh->kp", w, np.einsum("kph,kp->kh", w, m))
    return Scores(d, w, -2.0 * pm, np.einsum("kp,kp->k", m, pm) + extra, centre)


def error_scores(means: np.ndarray, bases: np.ndarray, centre: np.ndarray) -> Scores:
    """Return scores that are squared distances from planes; ``bases`` (K, p, h) have orthonormal columns."""
    k = len(means)
    return _expand_scores(np.ones(k), bases, means, np.zeros(k), centre)


def shrinkage(values: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Return factors (K, h) that shrink coordinates: 1 - noise / variance along a direction, at least 0."""
    return np.maximum(1.0 - noise[:, None] / np.maximum(values, np.finfo(float).tiny), 0.0)


def code_cost_scores(
    means: np.ndarray, bases: np.ndarray, values: np.ndarray, noise: float, centre: np.ndarray
) -> Scores:
    """Return scores that are the reconstruction error plus the cost of the code (coordinates of a row).

    All components share ``noise``.
    """
    k = len(means)
    root = np.sqrt(shrinkage(values, np.full(k, noise)))
    return _expand_scores(np.ones(k), bases * root[:, None, :], means, np.zeros(k), centre)


def ppca_scores(
    means: np.ndarray,
    bases: np.ndarray,
    values: np.ndarray,
    noise: np.ndarray,
    weights: np.ndarray,
    centre: np.ndarray,
) -> Scores:
    """Return -2 log (weight x density) of Gaussians with low-rank covariances.

    The variances are ``values`` (K, h) along orthonormal ``bases``, and ``noise`` (K,) in all other
    directions.
    """
    p = bases.shape[1]
    w = bases * np.sqrt(shrinkage(values, noise) / noise[:, None])[:, None, :]
    return _expand_scores(1.0 / noise, w, means, ppca_constants(p, values, noise, weights), centre)


def ppca_constants(p: int, values: np.ndarray, noise: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the terms (K,) of -2 log (weight x density) that do not depend on the row; p features."""
    kept = np.maximum(values, noise[:, None])
    left = (p - values.shape[1]) * np.log(noise)
    return p * LOG_2PI + left + np.log(kept).sum(axis=1) - 2.0 * np.log(weights)


def factor_scores(
    means: np.ndarray, loadings: np.ndarray, noise: np.ndarray, weights: np.ndarray, centre: np.ndarray
) -> Scores:
    """Return -2 log (weight x density) of factor analysers: loadings (K, p, h), noise (K, p)."""
    p, h = loadings.shape[1:]
    scaled = loadings / noise[:, :, None]
    m = np.eye(h) + np.swapaxes(loadings, 1, 2) @ scaled
    # With the Cholesky factor C of M, W W' = Psi^-1 L M^-1 L' Psi^-1 is what the inverse covariance subtracts
    # from the inverse noise Psi^-1 (Woodbury identity).
    w = scaled @ np.swapaxes(np.linalg.inv(np.linalg.cholesky(m)), 1, 2) if h else scaled
    extra = p * LOG_2PI + np.log(noise).sum(axis=1) - 2.0 * np.log(weights)
    return _expand_scores(1.0 / noise, w, means, extra + (slogdet(m)[1] if h else 0.0), centre)


@dataclass(frozen=True)
class Scorer:
    """Scores of all components, class by class.

    The components of class i are ``starts[i]`` to ``starts[i + 1] - 1``.
    """

    scores: Scores
    starts: np.ndarray


def make_scorer(scores: Scores, starts: np.ndarray) -> Scorer:
    """Return the scores in the form that :func:`nearest`, :func:`nearest_own` and :func:`all_scores` take."""
    return Scorer(scores, starts)


def all_scores(scorer: Scorer, x: np.ndarray, first: int, stop: int) -> np.ndarray:
    """Return the scores (n, components) of rows under all components of the classes first to stop - 1."""
    s, part = scorer.scores, slice(scorer.starts[first], scorer.starts[stop])
    z = np.asarray(x, dtype=np.float64) - s.centre
    d = s.d[part]
    square = (z * z) @ d.T if d.ndim == 2 else (z * z).sum(axis=1)[:, None] * d
    out = square + z @ s.b[part].T + s.c[part]
    for j, w in enumerate(s.w[part]):
        out[:, j] -= ((z @ w) ** 2).sum(axis=1)
    return out


def nearest(scorer: Scorer, x: np.ndarray, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the smallest score of each class first to stop - 1, and its component: two arrays (n, classes).

    Of components with equal scores the first is returned.
    """
    best = np.full((len(x), stop - first), np.inf)
    index = np.zeros((len(x), stop - first), dtype=np.int32)
    for i in range(first, stop):
        index[:, i - first] = scorer.starts[i]
        if scorer.starts[i + 1] > scorer.starts[i] and len(x):
            scores = all_scores(scorer, x, i, i + 1)
            index[:, i - first] += scores.argmin(axis=1).astype(np.int32)
            best[:, i - first] = scores.min(axis=1)
    return best, index


def nearest_own(
    scorer: Scorer, x: np.ndarray, rows: np.ndarray, edges: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the smallest score of each row under its own class, and the component: two arrays (n,).

    ``rows[edges[i]:edges[i + 1]]`` are the rows of class i.
    """
    best, index = np.full(len(x), np.inf), np.zeros(len(x), dtype=np.int32)
    for i, (first, stop) in enumerate(pairwise(edges)):
        own = rows[first:stop]
        scores, components = nearest(scorer, x[own], i, i + 1)
        best[own], index[own] = scores[:, 0], components[:, 0]
    return best, index


def select_best(scores: np.ndarray, n_best: int) -> np.ndarray:
    """Return the columns of the smallest scores of each row, ascending, int32 (n, n_best).

    Of equal scores the first is returned.
    """
    return np.argsort(scores, axis=1, kind="stable")[:, :n_best].astype(np.int32)


@dataclass(frozen=True)
class TangentSpec:
    """Names of the tangents, the shape of an image, and the smoothing before derivatives in pixels."""

    names: tuple[str, ...]
    shape: tuple[int, int]
    smoothing: float


@dataclass(frozen=True)
class PackedBases:
    """Means (K, p) and bases (K, p, q) for :func:`add_scatter`.

    If ``per_feature`` is True, squares of residuals are summed for each feature, else over all features.
    """

    means: np.ndarray
    bases: np.ndarray
    per_feature: bool


def pack_bases(means: np.ndarray, bases: np.ndarray, per_feature: bool) -> PackedBases:
    """Return the bases for :func:`add_scatter` and :func:`add_tangent_scatter`."""
    return PackedBases(means, bases, per_feature)


@dataclass(frozen=True)
class Groups:
    """Rows of a block by component: the rows of component q are ``rows[starts[q]:starts[q + 1]]``.

    The rows of a group are in their order in the block; ``weights`` are their responsibilities.
    """

    starts: np.ndarray
    rows: np.ndarray
    weights: np.ndarray


def group_rows(index: np.ndarray, n: int, weights: np.ndarray | None = None) -> Groups:
    """Return the rows of each of n components; ``index`` is the component of each row.

    ``weights`` are the responsibilities of the rows; None means 1.
    """
    rows, starts = sort_by_code(index, n)
    return Groups(starts, rows, np.ones(len(rows)) if weights is None else weights[rows])


def sort_by_code(codes: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return row indices sorted by their codes 0 to n - 1, and the first position of each code (n + 1,)."""
    # numpy sorts 16-bit integers by radix sort, six times as fast as larger integers.
    rows = np.argsort(codes.astype(np.uint16) if n < 2**16 else codes, kind="stable")
    return rows, np.concatenate([[0], np.cumsum(np.bincount(codes, minlength=n))])


def open_sums(*fields: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the arrays to which kernels add the sums of a leaf (a group of blocks): the fields themselves.

    The fields are total, square, scatter, gram and trace; without tangents the last two are empty.
    """
    return fields


def close_sums(sums: tuple[np.ndarray, ...], *fields: np.ndarray) -> None:
    """Do nothing, because on a CPU :func:`open_sums` returns the fields themselves, not copies."""


def add_scatter(
    bases: PackedBases, x: np.ndarray, groups: Groups, total: np.ndarray, square: np.ndarray,
    scatter: np.ndarray, gram: np.ndarray,
) -> None:  # fmt: skip
    """Add the sums of residuals R = x - mean over each group, with responsibilities r.

    total : r R, (K, p)
    square : r |R|² (K,), or r R∘R (K, p)
    scatter : r (B'R) R', (K, q, p)
    gram : r (B'R) (B'R)', (K, q, q); not computed if it is empty
    """
    for q in range(len(groups.starts) - 1):
        part = slice(groups.starts[q], groups.starts[q + 1])
        r = groups.weights[part]
        residual = x[groups.rows[part]].astype(np.float64) - bases.means[q]
        weighted = r[:, None] * residual
        total[q] += weighted.sum(axis=0)
        squares = (weighted * residual).sum(axis=0)
        square[q] += squares if bases.per_feature else squares.sum()
        codes = residual @ bases.bases[q]
        scatter[q] += codes.T @ weighted
        if len(gram):
            gram[q] += (codes * r[:, None]).T @ codes


def add_tangent_scatter(
    bases: PackedBases, x: np.ndarray, groups: Groups, spec: TangentSpec, factors: np.ndarray,
    scatter: np.ndarray, trace: np.ndarray,
) -> None:  # fmt: skip
    """Add the scatter of tangents t of the rows, with responsibilities r; the means of ``bases`` are 0.

    scatter : r f (B't) t' with the factor f of each kind of tangent, ``factors`` (K, tangents)
    trace : r |t|², (K, tangents)
    """
    tangents = tangent_rows(x, spec.shape, spec.names, spec.smoothing)
    for q in range(len(groups.starts) - 1):
        part = slice(groups.starts[q], groups.starts[q + 1])
        t = tangents[groups.rows[part]]
        squares = (t * t).sum(axis=2)
        trace[q] += groups.weights[part] @ squares
        flat = t.reshape(-1, t.shape[2])
        weights = (groups.weights[part][:, None] * factors[q]).ravel()
        scatter[q] += (flat @ bases.bases[q]).T @ (weights[:, None] * flat)


def make_axis_smoothing_matrix(size: int, smoothing: float) -> np.ndarray:
    """Return the matrix (size, size) of Gaussian smoothing along one axis; pixels beyond the border are 0."""
    taps = smoothing_taps(smoothing)
    return sum(tap * np.eye(size, k=k - len(taps) // 2) for k, tap in enumerate(taps))


def smoothing_taps(smoothing: float) -> np.ndarray:
    """Return the weights of a Gaussian filter, an odd number of weights that sum to 1.

    ``smoothing`` is the standard deviation of the filter in pixels.
    """
    radius = int(np.ceil(3.0 * smoothing))
    steps = np.arange(-radius, radius + 1)
    taps = np.exp(-0.5 * (steps / smoothing) ** 2) if smoothing > 0 else np.ones(1)
    return taps / taps.sum()


def _make_difference_matrix(size: int) -> np.ndarray:
    """Return the matrix (size, size) of central differences on one axis; pixels beyond the border are 0."""
    return 0.5 * (np.eye(size, k=1) - np.eye(size, k=-1))


def gradients(shape: tuple[int, int], smoothing: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the matrices (p, p) that map an image to its smoothed derivatives in x and in y."""
    rows, columns = (make_axis_smoothing_matrix(size, smoothing) for size in shape)
    along_x = np.kron(rows, _make_difference_matrix(shape[1]) @ columns)
    along_y = np.kron(_make_difference_matrix(shape[0]) @ rows, columns)
    return along_x, along_y


def velocity(name: str, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the velocity field of a linear tangent: the factors (p,), (p,) of the derivatives in x and y.

    u and v are the horizontal and the vertical coordinate of each pixel. They are 0 in the middle of the
    image and measured in halves of the longer side, so that all tangents have similar lengths.
    """
    height, width = shape
    half = max(height, width) / 2
    v, u = np.meshgrid(
        (np.arange(height) - (height - 1) / 2) / half,
        (np.arange(width) - (width - 1) / 2) / half,
        indexing="ij",
    )
    one, none = np.ones(shape), np.zeros(shape)
    fields = {
        "shift-x": (one, none),
        "shift-y": (none, one),
        "rotation": (v, -u),
        "scaling": (u, v),
        "hyperbolic-axis": (u, -v),
        "hyperbolic-diagonal": (v, u),
    }
    return fields[name][0].ravel(), fields[name][1].ravel()


def tangent_rows(x: np.ndarray, shape: tuple[int, int], names: Sequence[str], smoothing: float) -> np.ndarray:
    """Return the tangents (derivatives under small transformations) of images (n, p), (n, tangents, p)."""
    along_x, along_y = (np.asarray(x, dtype=np.float64) @ g.T for g in gradients(shape, smoothing))
    out = np.empty((len(x), len(names), x.shape[1]))
    for i, name in enumerate(names):
        if name == "thickness":
            out[:, i] = np.sqrt(along_x**2 + along_y**2)
        else:
            by_x, by_y = velocity(name, shape)
            out[:, i] = by_x * along_x + by_y * along_y
    return out


def solve_pivoted(g: np.ndarray, b: np.ndarray) -> float:
    """Return b' G^-1 b by Cholesky; directions whose pivot is as small as rounding errors are skipped."""
    n = len(g)
    low, y, total = np.zeros((n, n)), np.zeros(n), 0.0
    floor = PIVOT * max(g.diagonal().max(initial=0.0), np.finfo(float).tiny)
    for i in range(n):
        pivot = g[i, i] - low[i, :i] @ low[i, :i]
        if pivot <= floor:
            continue
        low[i, i] = np.sqrt(pivot)
        low[i + 1 :, i] = (g[i + 1 :, i] - low[i + 1 :, :i] @ low[i, :i]) / low[i, i]
        y[i] = (b[i] - low[i, :i] @ y[:i]) / low[i, i]
        total += y[i] ** 2
    return total


def pack_tangent_scores(scores: Scores) -> Scores:
    """Return ``scores`` unchanged, because :func:`tangent_distance` in numpy needs no packed parameters."""
    return scores


def tangent_distance(
    scores: Scores, x: np.ndarray, tangents: np.ndarray, candidates: np.ndarray, gamma: float = GAMMA
) -> np.ndarray:
    """Return scores (n, c) of rows that may move along their own tangents T (n, t, p).

    ``candidates`` (n, c) are the components to score each row with. The score is the minimum, over the moves
    a of the row x along its tangents, of the score of x + T'a plus the sum over j of gamma (T T')_jj a_j² (in
    units of d).
    """
    out = np.empty(candidates.shape)
    for i in range(len(x)):
        z, t = x[i].astype(np.float64) - scores.centre, tangents[i].astype(np.float64)
        for j, q in enumerate(candidates[i]):
            w, d = scores.w[q], scores.d[q]
            code, a = z @ w, t @ w
            weighted = t * d
            g = weighted @ t.T
            g += gamma * np.diag(g.diagonal()) - a @ a.T
            b = weighted @ z + 0.5 * (t @ scores.b[q]) - a @ code
            score = (d * z * z).sum() + z @ scores.b[q] + scores.c[q] - code @ code
            out[i, j] = score - solve_pivoted(g, b)
    return out
