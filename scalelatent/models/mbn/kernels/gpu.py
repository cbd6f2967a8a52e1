"""Nearest centroids on a GPU: Python functions that launch the CUDA kernels of ``gpu.cu``.

For dense rows, cuBLAS computes the products of rows and centroids into a buffer: float32 (never TF32), or
exact int32 by tensor cores if rows and centroids are bytes. One kernel reads the buffer, keeps the 32 best
scores of each row in a list, and takes the nearest centroid in each clustering from the list. The CPU
computes the rare rows whose list has no centroid of a clustering. CSR rows and rows of upper layers take one
thread block each, with sums or counts in shared memory.

The results equal those of the numba and numpy kernels. They are copied to the host, 4 bytes per row and
clustering, or 2 bytes in upper layers with at most 65,536 centroids. All work is in CuPy's current stream.
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
# Largest number of products of rows and centroids in GPU memory at a time; they take 256 MiB.
MAX_SCORES = 2**26
# Matrices of bytes get zeros up to multiples of this number of rows and columns, as tensor cores require.
_ALIGNMENT = 16


@dataclass(frozen=True)
class DeviceBank:
    """Centroids w that clusterings share, on the GPU; a row x has the score scale (w . x) + bias."""

    # float32 (k, columns); for bytes, int8 with the values minus 128, padded with zeros to multiples of 16
    w: cupy.ndarray
    sums: cupy.ndarray  # int32 (k,): 128 times the sum of each centroid of bytes; 0 for floats
    scale: cupy.ndarray  # float32 (k,)
    bias: cupy.ndarray  # float32 (k,)
    exact: cupy.ndarray  # float64 (2, k): scale and bias, for scores in float64
    codes: cupy.ndarray  # int32 (k, clusterings): number of each centroid in each clustering; NONE outside
    exact_length: float  # largest Euclidean norm of a row of integers with exact float32 scores; -1 if none
    error: tuple[float, float]  # a score in float32 is wrong by less than error[0] |x| + error[1]
    # Returns the centroids for the CPU, which computes rows without a candidate in a clustering
    on_host: Callable[[], by_tiles.PackedCentroids]


@dataclass(frozen=True)
class Postings:
    """Entries of the k CSR centroids that clusterings share, sorted by column, on the GPU."""

    start: cupy.ndarray  # int32 (columns + 1,): start of the entries of each column
    centroid: cupy.ndarray  # int32 (entries,): centroid of each entry
    value: cupy.ndarray  # float32 (entries,): value of each entry
    exact: cupy.ndarray  # float64 (2, k): scale and bias in the score scale (w . x) + bias of a row x
    codes: cupy.ndarray  # int32 (k, clusterings): number of each centroid in each clustering; NONE outside


@dataclass(frozen=True)
class DeviceLists:
    """For each code of the layer below, the centroids of an upper layer that have this code, on the GPU.

    A code is the number of a nearest centroid in one of V clusterings of the layer below.
    """

    start: cupy.ndarray  # int32 (clusterings, V, codes + 1): first index of each code in ``members``
    members: cupy.ndarray  # int32 (clusterings, V, k): numbers of the centroids, sorted by their code


def make_bank(w: np.ndarray, metric: str, draws: np.ndarray | None = None) -> DeviceBank:
    """Copy centroids ``w`` to the GPU; ``draws`` (clusterings, k) is true for each clustering's centroids."""
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
    """Return the number of each row's nearest centroid in each clustering, int32 (rows, clusterings)."""
    w, (k, clusterings), q = bank.w, bank.codes.shape, len(columns)
    with_bytes = x.dtype == np.uint8 and w.dtype == np.int8
    x, places = _to_device(x, np.uint8 if with_bytes else np.float32), _to_device(columns, np.int32)
    if not with_bytes and w.dtype == np.int8:
        w = cupy.ascontiguousarray(w[:k, :q], dtype=np.float32) + np.float32(128)
    codes = cupy.empty((len(x), clusterings), dtype=np.int32)
    stride, width = w.shape
    tile = max(1, min(len(x), MAX_SCORES // stride))
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
    """Return the number of each CSR row's nearest centroid in each clustering, int32 (rows, clusterings)."""
    shape = (len(x), bank.codes.shape[1])
    codes, tops = cupy.empty(shape, dtype=np.int32), cupy.empty(shape, dtype=np.float64)
    rows = (_to_device(x.data, np.float32), _to_device(x.indices, np.int32), _to_device(x.indptr, np.int32))
    if len(x):
        postings = (bank.start, bank.centroid, bank.value, np.int32(bank.exact.shape[1]), bank.exact)
        numbers = (bank.codes, np.int32(shape[1]))
        _launch("mbn_sparse", (len(x),), *rows, *postings, *numbers, tops, codes)
    return codes.get()


def choose_masks(key: np.ndarray, layer: int, first: int, count: int, n: int, m: int) -> cupy.ndarray:
    """Draw ``m`` of ``n`` numbers for each of ``count`` clusterings; return the masks of ``.cpu.draws``."""
    masks, drawn = cupy.empty((count, n), dtype=np.bool_), cupy.zeros(count, dtype=np.int32)
    if n:
        stream = (*key, np.int32(layer), np.int32(first), np.int32(count), np.int64(n))
        grid = (-(-n // (32 * THREADS)), count)
        _launch("mbn_draw", grid, *stream, np.int32(round(256 * m / n)), drawn, masks.view(np.uint8))
        _complete(key, layer, first, m, (n + 7) // 8, drawn, masks)
    return masks


def choose_numbers(
    key: np.ndarray, layer: int, first: int, count: int, n: int, m: int, by_mask: bool
) -> cupy.ndarray:
    """Draw ``m`` of ``n`` numbers for each of ``count`` clusterings; return those of `.cpu.draws`, int32."""
    if by_mask:
        masks = choose_masks(key, layer, first, count, n, m)
    else:
        masks = cupy.zeros((count, n), dtype=np.bool_)
        _complete(key, layer, first, m, 0, cupy.zeros(count, dtype=np.int32), masks)
    out = cupy.empty(count * m, dtype=np.int32)
    _launch("mbn_list_marked", (count,), masks.view(np.uint8), np.int64(n), np.int64(m), out)
    return out


def _complete(
    key: np.ndarray, layer: int, first: int, m: int, word: int, drawn: cupy.ndarray, masks: cupy.ndarray
) -> None:
    """Mark or unmark random numbers, from number ``word`` of the streams on, until masks have ``m`` marks."""
    count, n = masks.shape
    sizes = np.int32(layer), np.int32(first), np.int64(n), np.int64(m), np.int64(word)
    _launch("mbn_complete", (count,), *key, *sizes, drawn, masks.view(np.uint8))


def make_lists(codes: Array, units: Array) -> DeviceLists:
    """Return the centroids of an upper layer, sorted by their codes in each clustering below, on the GPU.

    ``codes`` (clusterings, k, V) are the codes of the centroids in the V clusterings of the layer below;
    ``units`` (clusterings, V, codes) is true for the codes that each clustering uses.
    """
    (sets, k, v), below = codes.shape, units.shape[2]
    moved = _to_device(codes, codes.dtype)  # copy uint16, which has fewer bytes than int32
    drawn = _to_device(units, np.bool_).view(np.uint8)
    start = cupy.empty((sets, v, below + 1), dtype=np.int32)
    members = cupy.empty((sets, v, k), dtype=np.int32)
    sizes = (np.int32(size) for size in (sets, v, k, below))
    _launch("mbn_lists", (v, sets), _to_device(moved, np.int32), drawn, *sizes, start, members)
    return DeviceLists(start, members)


def nearest_codes(x: Array, lists: DeviceLists) -> np.ndarray:
    """Return the centroid that shares most codes with each row ``x``, in clusterings of an upper layer.

    The result has the shape (rows, clusterings) and the type uint16, or int32 for more than 65,536 centroids.
    """
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
