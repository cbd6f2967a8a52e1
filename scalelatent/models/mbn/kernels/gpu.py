"""The kernels of a clustering on a GPU: Python functions that launch the CUDA kernels of ``gpu.cu``.

For dense rows, cuBLAS computes the products of rows and centroids into a buffer of bounded size: float32
(never TF32), or exact int32 by tensor cores if rows and centroids are bytes. One kernel reads the buffer,
keeps the best scores of each row in a list, and writes the code of each clustering. The rare rows whose list
is too short are coded on the CPU. The buffer is written and read once, 8 bytes per score. CSR rows and rows
of codes (in upper layers) take one thread block each, with sums or counts in shared memory.

In upper layers, the GPU also draws the codes that a clustering uses, and makes the lists of its centroids.
One launch computes the codes of all clusterings of a group.

The codes equal those of the numba and numpy kernels. They are copied to the host: 4 bytes per code, or 2 in
upper layers with at most 65,536 centroids. All work is queued in CuPy's current stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import cupy
import numpy as np
import numpy.typing as npt

from scalelatent.kernels.arrays import Array
from scalelatent.kernels.cuda import Kernels, multiply
from scalelatent.kernels.sparse_rows import CsrRows

from .cpu import dense as by_tiles
from .cpu.candidates import NONE, number_centroids
from .reference import score_terms, squared_lengths

_kernels = Kernels(__package__)
_launch, THREADS = _kernels.launch, _kernels.threads
_WARPS = THREADS // 32
# Largest number of scores in the buffer, which take 256 MiB.
SCORES = 2**26
# Centroids and columns of bytes are padded to multiples of this number, as tensor cores require.
_ALIGNMENT = 16


@dataclass(frozen=True)
class DeviceBank:
    """Centroids that clusterings share, on the GPU, with the terms of their scores.

    Fields without a comment have the meaning of the fields of :class:`..cpu.dense.PackedCentroids`.
    """

    # float32 (k, columns); or bytes minus 128, int8, with rows and columns of zeros up to multiples of
    # _ALIGNMENT
    w: cupy.ndarray
    sums: cupy.ndarray  # int32 (k,): 128 times the sum of each centroid of bytes; 0 for floats
    scale: cupy.ndarray
    bias: cupy.ndarray
    exact: cupy.ndarray
    codes: cupy.ndarray
    exact_length: float
    error: tuple[float, float]
    # Packs the centroids for the CPU, which computes the codes of rows whose list of candidates is too short
    on_host: Callable[[], by_tiles.PackedCentroids]


@dataclass(frozen=True)
class Postings:
    """Entries of the CSR centroids that clusterings share, sorted by column, on the GPU."""

    start: cupy.ndarray  # int32 (p + 1,): start of the entries of each column
    centroid: cupy.ndarray  # int32 (entries,): centroid of each entry
    value: cupy.ndarray  # float32 (entries,): value of each entry
    # float64 (2, k): scale and bias; a row x and a centroid w have the score scale (w . x) + bias
    exact: cupy.ndarray
    # int32 (k, clusterings): number of each centroid within each clustering, counted from 0;
    # ``candidates.NONE`` if the centroid does not belong to the clustering
    codes: cupy.ndarray


@dataclass(frozen=True)
class DeviceLists:
    """Lists of the centroids of an upper layer by their codes in the layer below, on the GPU.

    The upper layer has ``sets`` clusterings of k centroids, and the layer below has V clusterings.
    """

    start: cupy.ndarray  # int32 (sets, V, k below + 1): index at which the list of each code starts
    members: cupy.ndarray  # int32 (sets, V, k): centroids of the lists of all codes, one after the other


def make_bank(w: np.ndarray, metric: str, draws: np.ndarray | None = None) -> DeviceBank:
    """Copy centroids to the GPU for :func:`nearest`; ``draws`` marks the centroids of each clustering."""
    w = np.ascontiguousarray(w, dtype=np.uint8 if by_tiles.fits_integers(w) else np.float32)
    w, codes = by_tiles.merge_rows(w, draws)
    squares, sums = squared_lengths(w), np.zeros(len(w), dtype=np.int32)
    stored = w
    if w.dtype == np.uint8:
        sums = 128 * w.sum(axis=1, dtype=np.int32)
        stored = np.zeros([-(-size // _ALIGNMENT) * _ALIGNMENT for size in w.shape], dtype=np.int8)
        stored[: len(w), : w.shape[1]] = w.astype(np.int16) - 128
    exact = np.stack(score_terms(squares, metric))
    scale, bias = (cupy.asarray(np.ascontiguousarray(part, dtype=np.float32)) for part in exact)
    return DeviceBank(
        *(cupy.asarray(stored), cupy.asarray(sums), scale, bias, cupy.asarray(exact), cupy.asarray(codes)),
        *by_tiles.bound_rounding(w, squares, exact, metric),
        partial(by_tiles.pack, w, codes, squares, metric),
    )


def nearest(x: Array, columns: np.ndarray, bank: DeviceBank) -> np.ndarray:
    """Return the code of each row's nearest centroid in each clustering, int32 (rows, clusterings)."""
    w, (k, clusterings), q = bank.w, bank.codes.shape, len(columns)
    with_bytes = x.dtype == np.uint8 and w.dtype == np.int8
    x, places = _to_device(x, np.uint8 if with_bytes else np.float32), _to_device(columns, np.int32)
    if not with_bytes and w.dtype == np.int8:
        w = cupy.ascontiguousarray(w[:k, :q], dtype=np.float32) + np.float32(128)
    codes = cupy.empty((len(x), clusterings), dtype=np.int32)
    stride, width = w.shape
    tile = max(1, min(len(x), SCORES // stride))
    cut = cupy.empty((tile, width), dtype=w.dtype)
    products = cupy.empty((tile, stride), dtype=np.int32 if with_bytes else np.float32)
    gaps, starts = cupy.empty(tile, dtype=np.float64), cupy.empty(tile, dtype=np.int32)
    name = "u8" if with_bytes else "f32"
    bounds = tuple(np.float64(part) for part in (*bank.error, bank.exact_length))
    sizes = (np.int32(q), np.int32(width))
    terms = (bank.scale, bank.bias, bank.exact, gaps, starts, bank.sums, bank.codes, np.int32(clusterings))
    for first in range(0, len(x), tile):
        rows, out = x[first : first + tile], codes[first : first + tile]
        n, warps = np.int32(len(rows)), (-(-len(rows) // _WARPS),)
        values = (rows, np.int32(x.shape[1]), n, places, *sizes)
        _launch(f"mbn_gather_{name}", warps, *values, *bounds, cut, gaps, starts)
        multiply(cut[: len(rows)], w.T, products[: len(rows)])
        operands = (products, np.int32(stride), n, np.int32(k), cut, w, *sizes)
        _launch(f"mbn_take_{name}", warps, *operands, *terms, out)
    found = codes.get()
    short = np.flatnonzero((found == NONE).any(axis=1))
    if len(short):
        found[short] = by_tiles.nearest(x[cupy.asarray(short)].get(), columns, bank.on_host())
    return found


def make_sparse_bank(
    w: CsrRows, columns: np.ndarray, metric: str, draws: np.ndarray | None = None
) -> Postings:
    """Copy the entries of CSR centroids in ``columns`` to the GPU, sorted by column."""
    k, p = w.shape
    w = w.keep_columns(columns)
    column, value = w.indices, np.asarray(w.data, dtype=np.float32)
    centroid = np.repeat(np.arange(k, dtype=np.int32), np.diff(w.indptr))
    squares = np.bincount(centroid, weights=value.astype(np.float64) ** 2, minlength=k)
    exact = np.stack(score_terms(squares, metric))
    order = np.argsort(column, kind="stable")
    start = np.concatenate([[0], np.cumsum(np.bincount(column, minlength=p))]).astype(np.int32)
    codes = number_centroids(draws, k)
    return Postings(*(cupy.asarray(part) for part in (start, centroid[order], value[order], exact, codes)))


def nearest_sparse(x: CsrRows, bank: Postings) -> np.ndarray:
    """Return the code of each CSR row's nearest centroid in each clustering, int32 (rows, clusterings)."""
    shape = (len(x), bank.codes.shape[1])
    codes, tops = cupy.empty(shape, dtype=np.int32), cupy.empty(shape, dtype=np.float64)
    rows = (_to_device(x.data, np.float32), _to_device(x.indices, np.int32), _to_device(x.indptr, np.int32))
    if len(x):
        postings = (bank.start, bank.centroid, bank.value, np.int32(bank.exact.shape[1]), bank.exact)
        numbers = (bank.codes, np.int32(shape[1]))
        _launch("mbn_sparse", (len(x),), *rows, *postings, *numbers, tops, codes)
    return codes.get()


def choose_masks(key: np.ndarray, layer: int, first: int, count: int, n: int, m: int) -> cupy.ndarray:
    """Draw ``m`` of ``n`` numbers for each of ``count`` clusterings, with the masks of ``.cpu.draws``."""
    masks, drawn = cupy.empty((count, n), dtype=np.bool_), cupy.zeros(count, dtype=np.int32)
    stream = (*key, np.int32(layer), np.int32(first), np.int32(count), np.int64(n))
    if n:
        grid = (-(-n // (32 * THREADS)), count)
        _launch("mbn_draw", grid, *stream, np.int32(round(256 * m / n)), drawn, masks.view(np.uint8))
        _launch("mbn_complete", (-(-count // THREADS),), *stream, np.int64(m), drawn, masks.view(np.uint8))
    return masks


def make_lists(codes: Array, units: Array) -> DeviceLists:
    """Return lists of the centroids by their codes in the layer below, for :func:`nearest_codes`."""
    (sets, k, v), below = codes.shape, units.shape[2]
    moved = _to_device(codes, codes.dtype)  # copy uint16 codes, which are shorter than int32
    drawn = _to_device(units, np.bool_).view(np.uint8)
    start = cupy.empty((sets, v, below + 1), dtype=np.int32)
    members = cupy.empty((sets, v, k), dtype=np.int32)
    sizes = (np.int32(size) for size in (sets, v, k, below))
    _launch("mbn_lists", (v, sets), _to_device(moved, np.int32), drawn, *sizes, start, members)
    return DeviceLists(start, members)


def nearest_codes(x: Array, lists: DeviceLists) -> np.ndarray:
    """Return the centroid that shares most codes with each row, uint16 if k <= 65,536, else int32."""
    (sets, v, k), below = lists.members.shape, lists.start.shape[2] - 1
    short = k <= 2**16
    x, codes = _to_device(x, np.int32), cupy.empty((len(x), sets), dtype=np.uint16 if short else np.int32)
    if len(x):
        sizes = (np.int32(size) for size in (sets, v, below))
        name = "mbn_count_u16" if short else "mbn_count_i32"
        _launch(name, (len(x), sets), x, *sizes, lists.start, lists.members, np.int32(k), codes)
    return codes.get()


def _to_device(a: Array, dtype: npt.DTypeLike) -> cupy.ndarray:
    """Return the array on the GPU, contiguous and with this dtype."""
    if isinstance(a, cupy.ndarray):
        return cupy.ascontiguousarray(a, dtype=dtype)
    return cupy.asarray(np.ascontiguousarray(a, dtype=dtype))
