"""Mixtures of linear models in CuPy: products of cuBLAS, and launches of the kernels of ``gpu.cu``.

Sums are copied to the host and added there in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import cupy
import numpy as np

from scalelatent.kernels.arrays import Array, check_same_width
from scalelatent.kernels.cuda import Kernels, multiply

from .reference import GAMMA, PIVOT, TANGENTS, Groups, Scores, TangentSpec, gradients, velocity
from .reference import select_best as select_best  # scores are on the host

_kernels = Kernels(__package__)
_launch, THREADS = _kernels.launch, _kernels.threads
# A tile of rows has at most this many products (256 MiB). A launch has at most this many pairs of row and
# candidate.
PRODUCTS, PAIRS = 2**26, 32_768
# Passed to CUDA kernels in the place of an array that is absent.
_NULL_POINTER = np.uint64(0)


def _blocks(n: int) -> int:
    return -(-n // THREADS)


def _move(a: np.ndarray, dtype: str = "f4") -> cupy.ndarray:
    return cupy.asarray(np.ascontiguousarray(a, dtype=dtype))


def _product(a: cupy.ndarray, b: cupy.ndarray) -> cupy.ndarray:
    out = cupy.empty((a.shape[0], b.shape[1]), dtype=np.float32)
    multiply(a, b, out)
    return out


def _rows(x: Array) -> cupy.ndarray:
    return cupy.ascontiguousarray(cupy.asarray(x, dtype=np.float32))


@dataclass(frozen=True)
class Scorer:
    """Scores on the device: columns b, W of each component (K width, p) and d of each feature, or None."""

    columns: cupy.ndarray
    own: cupy.ndarray | None
    d: cupy.ndarray
    c: cupy.ndarray
    centre: cupy.ndarray
    starts: np.ndarray
    width: int


def make_scorer(scores: Scores, starts: np.ndarray) -> Scorer:
    """See :func:`..reference.make_scorer`."""
    k, p, h = scores.w.shape
    columns = np.concatenate([scores.b[:, :, None], scores.w], axis=2)
    own = scores.d.ndim == 2
    return Scorer(
        _move(np.swapaxes(columns, 1, 2).reshape(k * (h + 1), p)),
        _move(scores.d) if own else None,
        _move(np.zeros(k) if own else scores.d),
        _move(scores.c),
        _move(scores.centre),
        np.asarray(starts, dtype=np.int64),
        h + 1,
    )


def _centred(
    x: cupy.ndarray,
    rows: cupy.ndarray | np.uint64,
    member: cupy.ndarray | np.uint64,
    means: cupy.ndarray,
    n: int,
    p: int,
) -> cupy.ndarray:
    z = cupy.empty((n, p), dtype=np.float32)
    _launch("lm_centre", (_blocks(n * p),), x, rows, member, means, np.int32(n), np.int32(p), z)
    return z


def _tile_scores(scorer: Scorer, x: cupy.ndarray, first: int, stop: int) -> cupy.ndarray:
    check_same_width(x.shape[1], scorer.centre.size)
    (n, p), k = x.shape, stop - first
    z = _centred(x, _NULL_POINTER, _NULL_POINTER, scorer.centre, n, p)
    part = slice(first * scorer.width, stop * scorer.width)
    products, own = _product(z, scorer.columns[part].T), _NULL_POINTER
    lengths, scores = cupy.empty(n, dtype=np.float32), cupy.empty((n, k), dtype=np.float32)
    if scorer.own is None:
        _launch("lm_lengths", (_blocks(n),), z, np.int32(n), np.int32(p), lengths)
    else:
        own = _product(z * z, scorer.own[first:stop].T)
    shape = np.int32(n), np.int32(k), np.int32(scorer.width)
    d, c = (cupy.ascontiguousarray(a[first:stop]) for a in (scorer.d, scorer.c))
    _launch("lm_scores", (_blocks(n * k),), products, own, lengths, d, c, *shape, scores)
    return scores


def _tiles(scorer: Scorer, n: int, first: int, stop: int) -> range:
    return range(0, n, max(PRODUCTS // max((stop - first) * scorer.width, 1), 1))


def all_scores(scorer: Scorer, x: Array, first: int, stop: int) -> np.ndarray:
    """See :func:`..reference.all_scores`; float32."""
    first, end = int(scorer.starts[first]), int(scorer.starts[stop])
    out = np.empty((len(x), end - first), dtype=np.float32)
    tiles = _tiles(scorer, len(x), first, end)
    for a in tiles if out.size else ():
        out[a : a + tiles.step] = cupy.asnumpy(_tile_scores(scorer, _rows(x[a : a + tiles.step]), first, end))
    return out


def nearest(scorer: Scorer, x: Array, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """See :func:`..reference.nearest`; float32."""
    class_starts, n_classes = scorer.starts[first : stop + 1], stop - first
    first, end = int(class_starts[0]), int(class_starts[-1])
    best = np.full((len(x), n_classes), np.inf, dtype=np.float32)
    index = np.tile(class_starts[:-1].astype(np.int32), (len(x), 1))
    tiles, starts = _tiles(scorer, len(x), first, end), _move(class_starts, "i4")
    for a in tiles if best.size and end > first else ():
        part = slice(a, a + tiles.step)
        scores = _tile_scores(scorer, _rows(x[part]), first, end)
        n, sizes = len(scores), (np.int32(end - first), np.int32(n_classes))
        shape = n, n_classes
        found, where = cupy.empty(shape, dtype=np.float32), cupy.empty(shape, dtype=np.int32)
        _launch("lm_best", shape, scores, *sizes, starts, np.int32(first), found, where)
        best[part], index[part] = cupy.asnumpy(found), cupy.asnumpy(where)
    best[best >= np.finfo(np.float32).max] = np.inf
    return best, index


def nearest_own(
    scorer: Scorer, x: Array, rows: np.ndarray, edges: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """See :func:`..reference.nearest_own`; float32."""
    x, best, index = _rows(x), np.empty(len(x), dtype=np.float32), np.empty(len(x), dtype=np.int32)
    for i, (first, stop) in enumerate(pairwise(edges)):
        own = rows[first:stop]
        found, where = nearest(scorer, x[cupy.asarray(own)] if len(own) < len(x) else x, i, i + 1)
        best[own], index[own] = found[:, 0], where[:, 0]
    return best, index


@dataclass(frozen=True)
class PackedBases:
    """Means (K, p) and bases (K, q, p) on the device."""

    means: cupy.ndarray
    bases: cupy.ndarray
    width: int
    per_feature: bool


def pack_bases(means: np.ndarray, bases: np.ndarray, per_feature: bool) -> PackedBases:
    """See :func:`..reference.pack_bases`."""
    return PackedBases(_move(means), _move(np.swapaxes(bases, 1, 2)), bases.shape[2], per_feature)


def _members(groups: Groups) -> np.ndarray:
    return np.repeat(np.arange(len(groups.starts) - 1), np.diff(groups.starts))


def _sums(
    packed: PackedBases, z: cupy.ndarray, member: cupy.ndarray, groups: Groups, grams: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return scatter, sums and squares (groups, q + 2, p), and grams; residuals ``z`` are sorted by group."""
    (n, p), q, count = z.shape, packed.width, len(groups.starts) - 1
    codes, shape = cupy.empty((n, q), dtype=np.float32), (np.int32(n), np.int32(p), np.int32(q))
    _launch("lm_codes", (_blocks(max(n * q, 1)),), z, member, packed.bases, *shape, codes)
    weights, starts = _move(groups.weights), _move(groups.starts, "i4")
    out = cupy.empty((count, q + 2, p), dtype=np.float64)
    grid, sizes = (_blocks((q + 2) * p), count), (np.int32(count), np.int32(p), np.int32(q))
    _launch("lm_scatter", grid, z, codes, weights, starts, *sizes, out)
    gram = cupy.zeros((count, q, q), dtype=np.float64)
    if grams:
        grid = (_blocks(max(q * q, 1)), count)
        _launch("lm_grams", grid, codes, weights, starts, np.int32(count), np.int32(q), gram)
    return cupy.asnumpy(out), cupy.asnumpy(gram)


def add_scatter(
    bases: PackedBases, x: Array, groups: Groups, total: np.ndarray, square: np.ndarray,
    scatter: np.ndarray, gram: np.ndarray,
) -> None:  # fmt: skip
    """See :func:`..reference.add_scatter`."""
    n, p, q = len(groups.rows), x.shape[1], bases.width
    if not n:
        return
    member = _move(_members(groups), "i4")
    z = _centred(_rows(x), _move(groups.rows, "i4"), member, bases.means, n, p)
    found, grams = _sums(bases, z, member, groups, bool(len(gram)))
    scatter += found[:, :q]
    total += found[:, q]
    square += found[:, q + 1] if bases.per_feature else found[:, q + 1].sum(axis=1)
    if len(gram):
        gram += grams


def tangent_rows(x: Array, shape: tuple[int, int], names: Sequence[str], smoothing: float) -> np.ndarray:
    """See :func:`..reference.tangent_rows`; float32."""
    return cupy.asnumpy(_tangents(_rows(x), shape, names, smoothing))


def _tangents(
    x: cupy.ndarray, shape: tuple[int, int], names: Sequence[str], smoothing: float
) -> cupy.ndarray:
    (n, p), kinds = x.shape, len(names)
    along = [_product(x, _move(g.T)) for g in gradients(shape, smoothing)]
    fields = np.full((kinds, 2, p), np.nan, dtype=np.float32)
    for i, name in enumerate(names):
        if name != "thickness":
            fields[i] = velocity(name, shape)
    out = cupy.empty((n, kinds, p), dtype=np.float32)
    sizes = np.int32(n), np.int32(kinds), np.int32(p)
    if n * kinds:
        _launch("lm_tangents", (_blocks(n * kinds * p),), *along, _move(fields), *sizes, out)
    return out


def add_tangent_scatter(
    bases: PackedBases, x: Array, groups: Groups, spec: TangentSpec, factors: np.ndarray,
    scatter: np.ndarray, trace: np.ndarray,
) -> None:  # fmt: skip
    """See :func:`..reference.add_tangent_scatter`."""
    kinds, p = len(spec.names), x.shape[1]
    if not len(groups.rows) or not kinds:
        return
    made = _tangents(_rows(x)[_move(groups.rows, "i8")], spec.shape, spec.names, spec.smoothing)
    flat, members = made.reshape(-1, p), _members(groups)
    lengths = cupy.empty(len(flat), dtype=np.float32)
    _launch("lm_lengths", (_blocks(len(flat)),), flat, np.int32(len(flat)), np.int32(p), lengths)
    squares = groups.weights[:, None] * cupy.asnumpy(lengths).reshape(-1, kinds).astype(np.float64)
    np.add.at(trace, members, squares)
    weights = (groups.weights[:, None] * factors[members]).ravel()
    flat_groups = Groups(groups.starts * kinds, np.arange(len(flat)), weights)
    found, _ = _sums(bases, flat, _move(np.repeat(members, kinds), "i4"), flat_groups, False)
    scatter += found[:, : bases.width]


@dataclass(frozen=True)
class PackedTangentScores:
    """Scores for tangent distance: columns W, b (K, width, p) on the device; ``own``: d is (K, p)."""

    columns: cupy.ndarray
    width: int
    d: cupy.ndarray
    own: bool
    c: cupy.ndarray
    centre: cupy.ndarray


def pack_tangent_scores(scores: Scores) -> PackedTangentScores:
    """See :func:`..reference.pack_tangent_scores`."""
    columns = np.concatenate([scores.w, scores.b[:, :, None]], axis=2)
    moved = (_move(a) for a in (scores.d, scores.c, scores.centre))
    d, c, centre = moved
    return PackedTangentScores(
        _move(np.swapaxes(columns, 1, 2)), columns.shape[2], d, scores.d.ndim == 2, c, centre
    )


def tangent_distance(
    scores: PackedTangentScores, x: Array, tangents: Array, candidates: np.ndarray, gamma: float = GAMMA
) -> np.ndarray:
    """See :func:`..reference.tangent_distance`; float32."""
    if tangents.shape[1] > len(TANGENTS):
        raise ValueError(f"tangents has {tangents.shape[1]} tangents per row; give at most {len(TANGENTS)}")
    out, some = np.empty(candidates.shape, dtype=np.float32), candidates.shape[1]
    for a in range(0, len(out) if some else 0, max(PAIRS // max(some, 1), 1)):
        part = slice(a, a + max(PAIRS // some, 1))
        rows, moved, chosen = _rows(x[part]), _rows(tangents[part]), _move(candidates[part], "i4")
        (n, t, p), pairs = moved.shape, len(rows) * some
        z, width = _centred(rows, _NULL_POINTER, _NULL_POINTER, scores.centre, n, p), scores.width
        each = (t + 1) * (width + t + 1)
        products, found = cupy.empty((pairs, each), dtype=np.float32), cupy.empty(pairs, dtype=np.float32)
        sizes = tuple(np.int32(size) for size in (pairs, some, t, p, width, scores.own))
        grid = (_blocks(each), pairs)
        _launch("lm_products", grid, z, moved, chosen, scores.columns, scores.d, *sizes, products)
        few = np.int32(pairs), np.int32(t), np.int32(width)
        numbers = np.float64(gamma), np.float64(PIVOT)
        _launch("lm_distances", (_blocks(pairs),), products, chosen, scores.c, *few, *numbers, found)
        out[part] = cupy.asnumpy(found).reshape(n, some)
    return out
