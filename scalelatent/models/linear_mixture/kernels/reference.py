"""The kernels in float64: what numba and CuPy are compared with.

Sub-class q has the score E_q(x) = (z∘z)·d_q + z·b_q + c_q - |W_q'z|² with z = x - centre: a squared
reconstruction error, or -2 log density.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.linalg import slogdet

LOG_2PI = float(np.log(2 * np.pi))
# Share of the tangents' lengths on the diagonal of a tangent distance, and the smallest pivot.
GAMMA, PIVOT = 1e-3, 1e-12
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
    """Parameters of the score of K sub-classes."""

    d: np.ndarray  # (K,), the same for all features, or (K, p)
    w: np.ndarray  # (K, p, h)
    b: np.ndarray  # (K, p)
    c: np.ndarray  # (K,), infinite where a sub-class was dropped
    centre: np.ndarray  # (p,), subtracted from rows, so that float32 has less to cancel


def _scores(d: np.ndarray, w: np.ndarray, means: np.ndarray, extra: np.ndarray, centre: np.ndarray) -> Scores:
    """The score (z - m)' (diag(d) - W W') (z - m) + extra with m = mean - centre."""
    m = means - centre
    wide = d if d.ndim == 2 else d[:, None]
    pm = wide * m - np.einsum("kph,kh->kp", w, np.einsum("kph,kp->kh", w, m))
    return Scores(d, w, -2.0 * pm, np.einsum("kp,kp->k", m, pm) + extra, centre)


def error_scores(means: np.ndarray, bases: np.ndarray, centre: np.ndarray) -> Scores:
    """Squared distance from each pancake; orthonormal bases (K, p, h)."""
    k = len(means)
    return _scores(np.ones(k), bases, means, np.zeros(k), centre)


def shrinkage(values: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """1 - sigma² / variance along each direction, at least 0: (K, h)."""
    return np.maximum(1.0 - noise[:, None] / np.maximum(values, np.finfo(float).tiny), 0.0)


def code_cost_scores(
    means: np.ndarray, bases: np.ndarray, values: np.ndarray, noise: float, centre: np.ndarray
) -> Scores:
    """Reconstruction error plus the cost of codes: variances (K, h) of codes, one noise for all."""
    k = len(means)
    root = np.sqrt(shrinkage(values, np.full(k, noise)))
    return _scores(np.ones(k), bases * root[:, None, :], means, np.zeros(k), centre)


def ppca_scores(
    means: np.ndarray,
    bases: np.ndarray,
    values: np.ndarray,
    noise: np.ndarray,
    weights: np.ndarray,
    centre: np.ndarray,
) -> Scores:
    """-2 log (weight x density) of Gaussians with variances ``values`` (K, h) along orthonormal bases and
    ``noise`` (K,) in all other directions.
    """
    p = bases.shape[1]
    w = bases * np.sqrt(shrinkage(values, noise) / noise[:, None])[:, None, :]
    return _scores(1.0 / noise, w, means, ppca_constants(p, values, noise, weights), centre)


def ppca_constants(p: int, values: np.ndarray, noise: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """What no row changes in -2 log (weight x density): of p features, (K,)."""
    kept = np.maximum(values, noise[:, None])
    left = (p - values.shape[1]) * np.log(noise)
    return p * LOG_2PI + left + np.log(kept).sum(axis=1) - 2.0 * np.log(weights)


def factor_scores(
    means: np.ndarray, loadings: np.ndarray, noise: np.ndarray, weights: np.ndarray, centre: np.ndarray
) -> Scores:
    """-2 log (weight x density) of factor analysers: loadings (K, p, h), noise (K, p)."""
    p, h = loadings.shape[1:]
    scaled = loadings / noise[:, :, None]
    m = np.eye(h) + np.swapaxes(loadings, 1, 2) @ scaled
    # Psi^-1 L chol(M^-1): with M = C C', M^-1 = C'^-1 C^-1.
    w = scaled @ np.swapaxes(np.linalg.inv(np.linalg.cholesky(m)), 1, 2) if h else scaled
    extra = p * LOG_2PI + np.log(noise).sum(axis=1) - 2.0 * np.log(weights)
    return _scores(1.0 / noise, w, means, extra + (slogdet(m)[1] if h else 0.0), centre)


@dataclass(frozen=True)
class Scorer:
    """Scores as the kernels here take them; sub-classes of run i, a class say, are
    [starts[i], starts[i + 1]).
    """

    scores: Scores
    starts: np.ndarray


def make_scorer(scores: Scores, starts: np.ndarray) -> Scorer:
    """What :func:`nearest` and :func:`all_scores` take."""
    return Scorer(scores, starts)


def all_scores(scorer: Scorer, x: np.ndarray, run: int, stop: int) -> np.ndarray:
    """Scores of rows under the sub-classes of the runs [run, stop): (n, sub-classes)."""
    s, part = scorer.scores, slice(scorer.starts[run], scorer.starts[stop])
    z = np.asarray(x, dtype=np.float64) - s.centre
    d = s.d[part]
    square = (z * z) @ d.T if d.ndim == 2 else (z * z).sum(axis=1)[:, None] * d
    out = square + z @ s.b[part].T + s.c[part]
    for j, w in enumerate(s.w[part]):
        out[:, j] -= ((z @ w) ** 2).sum(axis=1)
    return out


def nearest(scorer: Scorer, x: np.ndarray, run: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Smallest score of each run and its sub-class, the first of equals: two arrays (n, runs)."""
    best = np.full((len(x), stop - run), np.inf)
    index = np.zeros((len(x), stop - run), dtype=np.int32)
    for i in range(run, stop):
        index[:, i - run] = scorer.starts[i]
        if scorer.starts[i + 1] > scorer.starts[i] and len(x):
            found = all_scores(scorer, x, i, i + 1)
            index[:, i - run] += found.argmin(axis=1).astype(np.int32)
            best[:, i - run] = found.min(axis=1)
    return best, index


def nearest_own(
    scorer: Scorer, x: np.ndarray, rows: np.ndarray, edges: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Smallest score of each row under the sub-classes of its own run, and its sub-class, two arrays (n,);
    ``rows[edges[i]:edges[i + 1]]`` are those of run i.
    """
    best, index = np.full(len(x), np.inf), np.zeros(len(x), dtype=np.int32)
    for i, (first, stop) in enumerate(pairwise(edges)):
        own = rows[first:stop]
        found, where = nearest(scorer, x[own], i, i + 1)
        best[own], index[own] = found[:, 0], where[:, 0]
    return best, index


def few_best(scores: np.ndarray, few: int) -> np.ndarray:
    """Columns of the smallest scores of each row, int32 (n, few), in rising order; of equals the first."""
    return np.argsort(scores, axis=1, kind="stable")[:, :few].astype(np.int32)


@dataclass(frozen=True)
class Frame:
    """How rows become tangents: ``names`` of them, the shape of an image, smoothing in pixels."""

    names: tuple[str, ...]
    shape: tuple[int, int]
    smoothing: float


@dataclass(frozen=True)
class Bank:
    """Means (K, p) and bases (K, p, q) under which statistics are taken; ``per_feature``: squares of R are
    summed for each feature.
    """

    means: np.ndarray
    bases: np.ndarray
    per_feature: bool


def make_bank(means: np.ndarray, bases: np.ndarray, per_feature: bool) -> Bank:
    """What :func:`add_images` takes."""
    return Bank(means, bases, per_feature)


@dataclass(frozen=True)
class Groups:
    """Rows of a block by sub-class: those of ``first + i`` are ``rows[starts[i]:starts[i + 1]]``, in the
    order of rows, each with its responsibility.
    """

    first: int
    starts: np.ndarray
    rows: np.ndarray
    weights: np.ndarray


def group_rows(index: np.ndarray, first: int, stop: int, weights: np.ndarray | None = None) -> Groups:
    """Groups of rows that belong to one sub-class each."""
    rows, starts = sorted_runs(index - first, stop - first)
    return Groups(first, starts, rows, np.ones(len(rows)) if weights is None else weights[rows])


def sorted_runs(codes: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows in the order of their codes in [0, n), and where each code begins, with their number."""
    # numpy sorts short integers by their digits, six times as fast.
    rows = np.argsort(codes.astype(np.uint16) if n < 2**16 else codes, kind="stable")
    return rows, np.concatenate([[0], np.cumsum(np.bincount(codes, minlength=n))])


def add_images(
    bank: Bank, x: np.ndarray, groups: Groups, total: np.ndarray, square: np.ndarray, image: np.ndarray,
    gram: np.ndarray,
) -> None:  # fmt: skip
    """Add sum r R, sum r |R|² (or r R∘R), the images sum r (B'R) R', (K, q, p), of R = x - mean, and unless
    it is empty ``gram``, sum r (B'R) (B'R)', (K, q, q).
    """
    for i in range(len(groups.starts) - 1):
        part = slice(groups.starts[i], groups.starts[i + 1])
        r, q = groups.weights[part], groups.first + i
        residual = x[groups.rows[part]].astype(np.float64) - bank.means[q]
        weighted = r[:, None] * residual
        total[q] += weighted.sum(axis=0)
        squares = (weighted * residual).sum(axis=0)
        square[q] += squares if bank.per_feature else squares.sum()
        codes = residual @ bank.bases[q]
        image[q] += codes.T @ weighted
        if len(gram):
            gram[q] += (codes * r[:, None]).T @ codes


def add_tangents(
    bank: Bank, x: np.ndarray, groups: Groups, frame: Frame, factors: np.ndarray, image: np.ndarray,
    trace: np.ndarray,
) -> None:  # fmt: skip
    """Add the images of tangents, each kind times its factor (K, tangents), and sum r |t|² (K, tangents);
    the bank's means are 0.
    """
    tangents = tangent_rows(x, frame.shape, frame.names, frame.smoothing)
    for i in range(len(groups.starts) - 1):
        part = slice(groups.starts[i], groups.starts[i + 1])
        q = groups.first + i
        t = tangents[groups.rows[part]]
        squares = (t * t).sum(axis=2)
        trace[q] += groups.weights[part] @ squares
        flat = t.reshape(-1, t.shape[2])
        weights = (groups.weights[part][:, None] * factors[q]).ravel()
        image[q] += (flat @ bank.bases[q]).T @ (weights[:, None] * flat)


def _band(size: int, smoothing: float) -> np.ndarray:
    """Gaussian smoothing along one axis as a matrix; beyond the border there is 0."""
    taps = smoothing_taps(smoothing)
    return sum(tap * np.eye(size, k=k - len(taps) // 2) for k, tap in enumerate(taps))


def smoothing_taps(smoothing: float) -> np.ndarray:
    """Weights of a Gaussian of this standard deviation in pixels, an odd number of them."""
    radius = int(np.ceil(3.0 * smoothing))
    steps = np.arange(-radius, radius + 1)
    taps = np.exp(-0.5 * (steps / smoothing) ** 2) if smoothing > 0 else np.ones(1)
    return taps / taps.sum()


def _difference(size: int) -> np.ndarray:
    """Central differences as a matrix; beyond the border there is 0."""
    return 0.5 * (np.eye(size, k=1) - np.eye(size, k=-1))


def gradients(shape: tuple[int, int], smoothing: float) -> tuple[np.ndarray, np.ndarray]:
    """Matrices (p, p) that take an image to its smoothed derivatives along columns and along rows."""
    rows, columns = (_band(size, smoothing) for size in shape)
    along_x = np.kron(rows, _difference(shape[1]) @ columns)
    along_y = np.kron(_difference(shape[0]) @ rows, columns)
    return along_x, along_y


def velocity(name: str, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """What a linear tangent multiplies both derivatives with, pixel by pixel: its velocity field.

    Pixels are counted from the middle, in halves of the longer side, so that tangents are of one size.
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
    """Tangents of images: (n, tangents, p)."""
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
    """b' G^-1 b by Cholesky; directions whose pivot is at rounding are left out."""
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


def make_planes(scores: Scores) -> Scores:
    """What :func:`tangent_distance` takes: the scores themselves."""
    return scores


def tangent_distance(
    planes: Scores, x: np.ndarray, tangents: np.ndarray, candidates: np.ndarray, gamma: float = GAMMA
) -> np.ndarray:
    """Scores of rows moved along their own tangents (n, t, p), for some sub-classes of each: (n, c).

    The least over a of the score of x + T'a, plus gamma (T T')_jj a_j² (in units of d).
    """
    out = np.empty(candidates.shape)
    for i in range(len(x)):
        z, t = x[i].astype(np.float64) - planes.centre, tangents[i].astype(np.float64)
        for j, q in enumerate(candidates[i]):
            w, d = planes.w[q], planes.d[q]
            code, a = z @ w, t @ w
            weighted = t * d
            g = weighted @ t.T
            g += gamma * np.diag(g.diagonal()) - a @ a.T
            b = weighted @ z + 0.5 * (t @ planes.b[q]) - a @ code
            score = (d * z * z).sum() + z @ planes.b[q] + planes.c[q] - code @ code
            out[i, j] = score - solve_pivoted(g, b)
    return out
