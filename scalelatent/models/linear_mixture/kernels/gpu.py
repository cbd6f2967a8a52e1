"""Mixtures of linear models in CuPy: products of cuBLAS, and launches of the kernels of ``gpu.cu``.

The sums of a leaf (a group of blocks of rows) stay on the device in float64 and are added in the order of the
rows, so that all runs on one model of GPU give the same bits. They are copied to the host once per leaf.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import cupy
import numpy as np

from scalelatent.kernels.arrays import Array, check_same_width
from scalelatent.kernels.cuda import Kernels, download, multiply

from .reference import GAMMA, PIVOT, TANGENTS, Groups, Scores, TangentSpec, gradients, velocity
from .reference import select_best as select_best  # in numpy, because the scores are on the host

_kernels = Kernels(__package__)
_launch, THREADS = _kernels.launch, _kernels.threads
# Upper bound of the float32 products of a tile (range of rows) and the columns of the scores: 256 MiB.
PRODUCTS = 2**26
# Upper bound of the pairs (row, candidate component) of a kernel launch.
PAIRS = 32_768
# Argument that is passed to a CUDA kernel in place of an array that is not given.
_NULL_POINTER = np.uint64(0)


def _grid_size(n: int) -> int:
    return -(-n // THREADS)


def _to_device(a: np.ndarray, dtype: str = "f4") -> cupy.ndarray:
    return cupy.asarray(np.ascontiguousarray(a, dtype=dtype))


def _matmul(a: cupy.ndarray, b: cupy.ndarray) -> cupy.ndarray:
    out = cupy.empty((a.shape[0], b.shape[1]), dtype=np.float32)
    multiply(a, b, out)
    return out


def _copy_rows(x: Array) -> cupy.ndarray:
    return cupy.ascontiguousarray(cupy.asarray(x, dtype=np.float32))


@dataclass(frozen=True)
class Scorer:
    """Parameters of the scores d |z|² + z·b + c - |W'z|² of centred rows z, on the device.

    ``columns`` (K width, p) are b and W of each component. ``own`` is d of each feature, or None if a
    component has one d for all features.
    """

    columns: cupy.ndarray
    own: cupy.ndarray | None
    d: cupy.ndarray
    c: cupy.ndarray
    centre: cupy.ndarray
    starts: np.ndarray
    device_starts: cupy.ndarray
    width: int


def make_scorer(scores: Scores, starts: np.ndarray) -> Scorer:
    """Copy ``scores``, the parameters of all components, to the device for the kernels that score rows."""
    k, p, h = scores.w.shape
    columns = np.concatenate([scores.b[:, :, None], scores.w], axis=2)
    own = scores.d.ndim == 2
    return Scorer(
        _to_device(np.swapaxes(columns, 1, 2).reshape(k * (h + 1), p)),
        _to_device(scores.d) if own else None,
        _to_device(np.zeros(k) if own else scores.d),
        _to_device(scores.c),
        _to_device(scores.centre),
        np.asarray(starts, dtype=np.int64),
        _to_device(starts, "i4"),
        h + 1,
    )


def _subtract_means(
    x: cupy.ndarray,
    rows: cupy.ndarray | np.uint64,
    member: cupy.ndarray | np.uint64,
    means: cupy.ndarray,
    n: int,
    p: int,
) -> cupy.ndarray:
    z = cupy.empty((n, p), dtype=np.float32)
    _launch("lm_centre", (_grid_size(n * p),), x, rows, member, means, np.int32(n), np.int32(p), z)
    return z


def _centred_lengths(
    scorer: Scorer, x: cupy.ndarray, rows: cupy.ndarray | np.uint64
) -> tuple[cupy.ndarray, cupy.ndarray]:
    """Return rows minus the centre, and their squared lengths (not computed if each feature has a d)."""
    check_same_width(x.shape[1], scorer.centre.size)
    n, p = x.shape
    z = _subtract_means(x, rows, _NULL_POINTER, scorer.centre, n, p)
    lengths = cupy.empty(n, dtype=np.float32)
    if scorer.own is None:
        _launch("lm_lengths", (_grid_size(n),), z, np.int32(n), np.int32(p), lengths)
    return z, lengths


def _score_centred(
    scorer: Scorer, z: cupy.ndarray, lengths: cupy.ndarray, first: int, stop: int
) -> cupy.ndarray:
    """Return the scores of centred rows ``z`` under the components ``first`` to ``stop`` - 1."""
    n, k = len(z), stop - first
    products = _matmul(z, scorer.columns[first * scorer.width : stop * scorer.width].T)
    own = _NULL_POINTER if scorer.own is None else _matmul(z * z, scorer.own[first:stop].T)
    scores, shape = cupy.empty((n, k), dtype=np.float32), (np.int32(n), np.int32(k), np.int32(scorer.width))
    d, c = scorer.d[first:stop], scorer.c[first:stop]
    _launch("lm_scores", (_grid_size(n * k),), products, own, lengths, d, c, *shape, scores)
    return scores


def _tile_rows(scorer: Scorer, first: int, stop: int) -> int:
    return max(PRODUCTS // max((stop - first) * scorer.width, 1), 1)


def all_scores(scorer: Scorer, x: Array, first: int, stop: int) -> np.ndarray:
    """Return the scores of rows under all components of the classes first to stop - 1, in float32."""
    first, end = int(scorer.starts[first]), int(scorer.starts[stop])
    out, tile = np.empty((len(x), end - first), dtype=np.float32), _tile_rows(scorer, first, end)
    for a in range(0, len(x) if out.size else 0, tile):
        rows = _centred_lengths(scorer, _copy_rows(x[a : a + tile]), _NULL_POINTER)
        out[a : a + tile] = cupy.asnumpy(_score_centred(scorer, *rows, first, end))
    return out


class _Nearest:
    """Smallest score of each row in each class, and the component, on the device until `to_host`."""

    def __init__(self, n: int, classes: int) -> None:
        self._found = cupy.empty((2, n, classes), dtype=np.float32)
        self.best, self.index = self._found[0], self._found[1].view(np.int32)

    def search(self, scorer: Scorer, scores: cupy.ndarray, a: int, first: int, stop: int) -> None:
        """Write to ``best`` and ``index`` the smallest score of each row in each class, and its component.

        ``scores`` has the rows from number ``a`` on, and the components of classes ``first`` to ``stop`` - 1.
        """
        n, classes, starts = len(scores), stop - first, scorer.device_starts[first : stop + 1]
        sizes = np.int32(scores.shape[1]), np.int32(classes)
        out = self.best[a : a + n], self.index[a : a + n]
        _launch("lm_best", (n, classes), scores, *sizes, starts, np.int32(scorer.starts[first]), *out)

    def to_host(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the scores and the components; the score of a class without components is infinite."""
        best, index = self._found.get()
        best[best >= np.finfo(np.float32).max] = np.inf
        return best, index.view(np.int32)


def nearest(scorer: Scorer, x: Array, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the smallest score of each row in each class first to stop - 1, and the component."""
    n, starts = len(x), scorer.starts[first : stop + 1]
    if not n or starts[0] == starts[-1]:
        index = np.tile(starts[:-1].astype(np.int32), (n, 1))
        return np.full(index.shape, np.inf, dtype=np.float32), index
    found, tile = _Nearest(n, stop - first), _tile_rows(scorer, int(starts[0]), int(starts[-1]))
    for a in range(0, n, tile):
        rows = _centred_lengths(scorer, _copy_rows(x[a : a + tile]), _NULL_POINTER)
        scores = _score_centred(scorer, *rows, int(starts[0]), int(starts[-1]))
        found.search(scorer, scores, a, first, stop)
    return found.to_host()


def nearest_own(
    scorer: Scorer, x: Array, rows: np.ndarray, edges: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the smallest score of each row under its own class, and the component; float32, int32."""
    best, index = np.full(len(x), np.inf, dtype=np.float32), np.zeros(len(x), dtype=np.int32)
    if not len(x):
        return best, index
    found = _Nearest(len(x), 1)  # results in the order of `rows`
    z, lengths = _centred_lengths(scorer, _copy_rows(x), _to_device(rows, "i4"))
    for c, (first, stop) in enumerate(pairwise(edges.tolist())):
        start, end = int(scorer.starts[c]), int(scorer.starts[c + 1])
        tile = _tile_rows(scorer, start, end)
        for a in range(first, stop if end > start else first, tile):
            part = slice(a, min(a + tile, stop))
            scores = _score_centred(scorer, z[part], lengths[part], start, end)
            found.search(scorer, scores, a, c, c + 1)
    values, components = found.to_host()
    best[rows], index[rows] = values[:, 0], components[:, 0]
    for i in np.flatnonzero(np.diff(scorer.starts) == 0):  # classes without components
        own = rows[edges[i] : edges[i + 1]]
        best[own], index[own] = np.inf, scorer.starts[i]
    return best, index


@dataclass(frozen=True)
class PackedBases:
    """Means (K, p) and bases (K, q, p) on the device."""

    means: cupy.ndarray
    bases: cupy.ndarray
    width: int
    per_feature: bool


def pack_bases(means: np.ndarray, bases: np.ndarray, per_feature: bool) -> PackedBases:
    """Copy means and bases to the device for :func:`add_scatter` and :func:`add_tangent_scatter`."""
    return PackedBases(_to_device(means), _to_device(np.swapaxes(bases, 1, 2)), bases.shape[2], per_feature)


@dataclass(frozen=True)
class LeafSums:
    """Sums of a leaf (a group of blocks of rows): a float64 vector on the device, and a view of each sum."""

    vector: cupy.ndarray
    fields: tuple[cupy.ndarray, ...]

    def __iter__(self) -> Iterator[cupy.ndarray]:
        return iter(self.fields)


def open_sums(
    total: np.ndarray, square: np.ndarray, scatter: np.ndarray, gram: np.ndarray, trace: np.ndarray
) -> LeafSums:
    """Return zeros on the device for the sums of a group of blocks; squares have one number per feature."""
    shapes = [a.shape for a in (total, total, scatter, gram, trace)]
    edges = [0, *accumulate(int(np.prod(shape)) for shape in shapes)]
    vector = cupy.zeros(edges[-1], dtype=np.float64)
    views = (vector[a:b].reshape(shape) for (a, b), shape in zip(pairwise(edges), shapes, strict=True))
    return LeafSums(vector, tuple(views))


def close_sums(sums: LeafSums, *fields: np.ndarray) -> None:
    """Copy the sums of a leaf (a group of blocks) to the host in one transfer; add them to ``fields``."""
    host, start = download(sums.vector), 0
    for field, on_device in zip(fields, sums, strict=True):
        found = host[start : start + on_device.size].reshape(on_device.shape)
        field += found.sum(axis=1) if found.ndim > field.ndim else found
        start += on_device.size


@dataclass(frozen=True)
class _DeviceGroups:
    """Rows sorted by component, on the device; ``members`` is the component of each row."""

    rows: cupy.ndarray
    members: cupy.ndarray
    starts: cupy.ndarray
    weights: cupy.ndarray
    count: np.int32


def _move_groups(groups: Groups, members: np.ndarray) -> _DeviceGroups:
    """Copy the arrays of ``groups`` to the device in one transfer."""
    weights = groups.weights.astype(np.float32).view(np.int32)
    parts = [groups.rows, members, groups.starts, weights]
    moved = _to_device(np.concatenate(parts), "i4")
    edges = [0, *accumulate(len(part) for part in parts)]
    rows, own, starts, shares = (moved[a:b] for a, b in pairwise(edges))
    return _DeviceGroups(rows, own, starts, shares.view(np.float32), np.int32(len(groups.starts) - 1))


def _list_row_components(groups: Groups) -> np.ndarray:
    return np.repeat(np.arange(len(groups.starts) - 1), np.diff(groups.starts))


def _add_codes(
    packed: PackedBases,
    z: cupy.ndarray,
    groups: _DeviceGroups,
    scatter: cupy.ndarray,
    totals: tuple[cupy.ndarray, cupy.ndarray] | None = None,
) -> cupy.ndarray:
    """Add the scatter, sums and squares of residuals ``z``; return their codes (coordinates in the bases)."""
    (n, p), q = z.shape, packed.width
    codes, shape = cupy.empty((n, q), dtype=np.float32), (np.int32(n), np.int32(p), np.int32(q))
    if codes.size:
        _launch("lm_codes", (_grid_size(n * q),), z, groups.members, packed.bases, *shape, codes)
    lines = q if totals is None else q + 2
    out = scatter, *(totals or (_NULL_POINTER, _NULL_POINTER))
    sizes = groups.count, np.int32(p), np.int32(q), np.int32(lines)
    if lines:
        grid = _grid_size(lines * p), int(groups.count)
        _launch("lm_scatter", grid, z, codes, groups.weights, groups.starts, *sizes, *out)
    return codes


def add_scatter(
    bases: PackedBases, x: Array, groups: Groups, total: cupy.ndarray, square: cupy.ndarray,
    scatter: cupy.ndarray, gram: cupy.ndarray,
) -> None:  # fmt: skip
    """Add sums over residuals (rows minus the mean) of each component to arrays of :func:`open_sums`."""
    n, p, q = len(groups.rows), x.shape[1], bases.width
    if not n:
        return
    moved = _move_groups(groups, _list_row_components(groups))
    z = _subtract_means(_copy_rows(x), moved.rows, moved.members, bases.means, n, p)
    codes = _add_codes(bases, z, moved, scatter, (total, square))
    if gram.size:
        grid, sizes = (_grid_size(q * q), int(moved.count)), (moved.count, np.int32(q))
        _launch("lm_grams", grid, codes, moved.weights, moved.starts, *sizes, gram)


def tangent_rows(x: Array, shape: tuple[int, int], names: Sequence[str], smoothing: float) -> np.ndarray:
    """Return the tangents (derivatives under small transformations) of images (n, p), (n, tangents, p)."""
    return cupy.asnumpy(_tangents(_copy_rows(x), shape, names, smoothing))


def _tangents(
    x: cupy.ndarray, shape: tuple[int, int], names: Sequence[str], smoothing: float
) -> cupy.ndarray:
    (n, p), kinds = x.shape, len(names)
    along = [_matmul(x, _to_device(g.T)) for g in gradients(shape, smoothing)]
    fields = np.full((kinds, 2, p), np.nan, dtype=np.float32)
    for i, name in enumerate(names):
        if name != "thickness":
            fields[i] = velocity(name, shape)
    out = cupy.empty((n, kinds, p), dtype=np.float32)
    sizes = np.int32(n), np.int32(kinds), np.int32(p)
    if n * kinds:
        _launch("lm_tangents", (_grid_size(n * kinds * p),), *along, _to_device(fields), *sizes, out)
    return out


def add_tangent_scatter(
    bases: PackedBases, x: Array, groups: Groups, spec: TangentSpec, factors: np.ndarray,
    scatter: cupy.ndarray, trace: cupy.ndarray,
) -> None:  # fmt: skip
    """Add the scatter of tangents of the rows to ``scatter`` and ``trace``, arrays of :func:`open_sums`."""
    kinds, p = len(spec.names), x.shape[1]
    if not len(groups.rows) or not kinds:
        return
    members = _list_row_components(groups)
    moved = _move_groups(groups, members)
    flat = _tangents(_copy_rows(x)[moved.rows], spec.shape, spec.names, spec.smoothing).reshape(-1, p)
    lengths = cupy.empty(len(flat), dtype=np.float32)
    _launch("lm_lengths", (_grid_size(len(flat)),), flat, np.int32(len(flat)), np.int32(p), lengths)
    grid, sizes = (_grid_size(kinds), int(moved.count)), (moved.count, np.int32(kinds))
    _launch("lm_traces", grid, lengths, moved.weights, moved.starts, *sizes, trace)
    weights = (groups.weights[:, None] * factors[members]).ravel()
    flat_groups = Groups(groups.starts * kinds, np.zeros(0, dtype=np.int64), weights)
    _add_codes(bases, flat, _move_groups(flat_groups, np.repeat(members, kinds)), scatter)


@dataclass(frozen=True)
class PackedTangentScores:
    """Parameters of tangent-distance scores: columns W and b (K, width, p), d (K,) or (K, p), c, centre."""

    columns: cupy.ndarray
    width: int
    d: cupy.ndarray
    c: cupy.ndarray
    centre: cupy.ndarray


def pack_tangent_scores(scores: Scores) -> PackedTangentScores:
    """Copy ``scores``, the parameters of all components, to the device for :func:`tangent_distance`."""
    columns = np.concatenate([scores.w, scores.b[:, :, None]], axis=2)
    d, c, centre = (_to_device(a) for a in (scores.d, scores.c, scores.centre))
    return PackedTangentScores(_to_device(np.swapaxes(columns, 1, 2)), columns.shape[2], d, c, centre)


def tangent_distance(
    scores: PackedTangentScores, x: Array, tangents: Array, candidates: np.ndarray, gamma: float = GAMMA
) -> np.ndarray:
    """Return the scores (n, candidates) of rows that may move along their tangents, in float32."""
    if tangents.shape[1] > len(TANGENTS):
        raise ValueError(f"tangents has {tangents.shape[1]} tangents per row; give at most {len(TANGENTS)}")
    out, some = np.empty(candidates.shape, dtype=np.float32), candidates.shape[1]
    for a in range(0, len(out) if some else 0, max(PAIRS // max(some, 1), 1)):
        part = slice(a, a + max(PAIRS // some, 1))
        rows, moved = _copy_rows(x[part]), _copy_rows(tangents[part])
        chosen = _to_device(candidates[part], "i4")
        (n, t, p), pairs = moved.shape, len(rows) * some
        z, width = _subtract_means(rows, _NULL_POINTER, _NULL_POINTER, scores.centre, n, p), scores.width
        each = (t + 1) * (width + t + 1)
        products, found = cupy.empty((pairs, each), dtype=np.float32), cupy.empty(pairs, dtype=np.float32)
        sizes = tuple(np.int32(size) for size in (pairs, some, t, p, width, scores.d.ndim == 2))
        grid = (_grid_size(each), pairs)
        _launch("lm_products", grid, z, moved, chosen, scores.columns, scores.d, *sizes, products)
        few = np.int32(pairs), np.int32(t), np.int32(width)
        numbers = np.float64(gamma), np.float64(PIVOT)
        _launch("lm_distances", (_grid_size(pairs),), products, chosen, scores.c, *few, *numbers, found)
        out[part] = cupy.asnumpy(found).reshape(n, some)
    return out
