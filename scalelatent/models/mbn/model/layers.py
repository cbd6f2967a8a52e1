"""Layers of random clusterings: number of centroids, random draws and codes.

A layer has V clusterings of k centroids, which are random rows of its input. The input of the first layer is
the data; the input of an upper layer is the output of the layer below. The output of a row is V codes. A code
is the number of the nearest centroid in one clustering. One-hot codes would have V k columns (one-hot units);
they are never computed.

Clusterings of the first layer can share a pool: one draw of columns and of up to 2 k rows. Each clustering
takes k of these rows at random as centroids. The distances of a row to all rows of a pool give its codes in
all clusterings of the pool. With G pools, the first layer therefore costs 2 G / V of the first layer in the
paper. Upper layers have no pools, because shared columns worsen the clusters there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context, Decimal
from typing import Protocol

import numpy as np

from scalelatent.contract.block_requirements import BlockRequirements
from scalelatent.contract.finite import find_nonfinite
from scalelatent.contract.learners import Backend, Block
from scalelatent.kernels.arrays import Array, HostRows
from scalelatent.kernels.sparse_rows import CsrRows

from .sampling import choose_masks, choose_numbers

# Largest number of centroids per clustering for which the number of a centroid fits into 16 bits.
MAX_UINT16_CENTROIDS = 65_536
FLOAT32_MAX = float(np.finfo(np.float32).max)
# An error message rounds the least allowed fraction up with this context, so that users can type the number.
_ROUNDED_UP = Context(prec=6, rounding=ROUND_CEILING)
# Upper bounds for the clusterings of an upper layer that are computed together: number of clusterings; bits
# of the numbers of all their centroids; bytes of their masks, which select one-hot units of the layer below.
_MAX_GROUP, _GROUP_BITS, _GROUP_BYTES = 32, 16, 2**26
# Upper bound on the bytes of the codes of a layer from which the centroids of the next layer are read.
_MAX_CODE_BYTES = 2**27
# Default number of pools (draws of rows and columns that clusterings share). Data with fewer rows or columns
# than the other two numbers have no pools by default (measured by benchmarks/mbn_pools.py).
DEFAULT_POOLS, MIN_POOLED_ROWS, MIN_POOLED_FEATURES = 40, 1000, 32
# An upper layer keeps lists of the centroids that have the same code in the layer below. Time to look up one
# list, in floating point operations; time to add a centroid to a list, as a multiple of the first time.
_LOOKUP_FLOPS, _LOOKUPS_PER_LISTED_CODE = 90.0, 8.0


def floor_share(fraction: float, n: int) -> int:
    """Return floor(fraction * n), corrected for rounding errors: 0.29 of 100 is 29, not 28."""
    return math.floor(fraction * n * (1 + 2.0**-51))


def make_schedule(
    n: int, k1: int | None, decay: float, k_last: int | None, n_classes: int | None
) -> list[int]:
    """Return the number of centroids per clustering of each layer, for ``n`` training rows.

    It is ``k1`` in the first layer (n / 2 if this is None), and falls by the factor ``decay`` to ``k_last``.
    """
    if not 0 < decay < 1:
        raise ValueError(f"decay={decay!r}: give a number between 0 and 1 (0.5 is the paper's), or 'auto'")
    k = n // 2 if k1 is None else int(k1)
    given = f"k1={k1!r}" + (f" (half of {n} rows, {k})" if k1 is None else "")
    if k > n:
        raise ValueError(
            f"k1={k} is more than the {n} rows that centroids are drawn from: give at most {n}, or None for "
            "half of them"
        )
    if k < 2:
        raise ValueError(
            f"{given}: a clustering needs at least 2 centroids: give k1 of 2 or more, or more rows"
        )
    least = max(2, math.ceil(1.5 * (n_classes or 2))) if k_last is None else k_last
    if least < 2:
        raise ValueError(f"k_last={k_last!r}: a clustering needs at least 2 centroids: give 2 or more")
    if k < least:
        why = f"k_last={k_last}" if k_last is not None else f"1.5 times n_classes={n_classes or 2} is {least}"
        raise ValueError(
            f"{given} is too small for one layer, because {why}: raise k1, or lower "
            f"{'k_last' if k_last is not None else 'n_classes'}"
        )
    ks = [k]
    # Subtract at least 1, so that each layer has fewer centroids even if ``decay`` is nearly 1.
    while (following := min(floor_share(decay, ks[-1]), ks[-1] - 1)) >= least:
        ks.append(following)
    return ks


def choose_pools(n_pools: int | str, n_rows: int, n_features: int, n_clusterings: int) -> int | None:
    """Return the number of pools of the first layer; None if each clustering draws its own centroids.

    A pool is one draw of rows and columns that several clusterings share. "auto" makes no pools for few rows,
    because their first layer is fast, and none for few columns, because a pool may miss the decisive column.
    """
    if n_pools == "auto":
        n_pools = "paper" if n_rows < MIN_POOLED_ROWS or n_features < MIN_POOLED_FEATURES else DEFAULT_POOLS
    return None if n_pools == "paper" else min(n_clusterings, int(n_pools))


class CentroidSets(Protocol):
    """Centroids of a layer, in memory or on disk, in one set per pool (draw of rows) or per clustering."""

    def read(self, which: int, count: int = 1) -> Array | CsrRows:
        """Return the centroids of ``count`` sets, one set after the other, starting with set ``which``."""

    def source_rows(self) -> HostRows | None:
        """Return the rows from which each read takes those of its sets; None if the sets are copies."""


@dataclass(frozen=True)
class ArraySets:
    """Centroids of a layer in memory, in sets of ``rows_per_set``, which one or several clusterings use."""

    rows: HostRows  # (sets x rows_per_set, columns): the centroids of all sets, one set after the other
    rows_per_set: int

    def source_rows(self) -> None:
        return None

    def read(self, which: int, count: int = 1) -> HostRows:
        return self.rows[which * self.rows_per_set : (which + count) * self.rows_per_set]


@dataclass(frozen=True)
class CodesBelow:
    """Centroids of an upper layer, taken from the codes of all training rows in the layer below."""

    layer: Layer
    codes: Array  # (training rows, clusterings of the layer below), on the device of the backend
    backend: Backend

    def source_rows(self) -> None:
        return None

    def read(self, which: int, count: int = 1) -> Array:
        """Return the centroids of ``count`` clusterings, in a buffer that the next call reuses."""
        rows = self.layer.draw_rows(which, count, self.backend)
        return self.backend.take(self.codes, rows, "mbn-centroids")


@dataclass(frozen=True)
class Layer:
    """Parameters that determine the random draws of one layer; its centroids are stored elsewhere."""

    number: int  # number of the layer; the first layer has the number 1
    seed: int
    n_rows: int  # number of training rows, from which centroids are drawn
    n_clusterings: int  # number of clusterings of the layer
    k: int  # number of centroids of a clustering
    width: int  # number of columns of the input: features, or clusterings of the layer below
    k_below: int  # number of centroids of a clustering of the layer below; 0 in the first layer
    fraction: float  # share of the columns (upper layers: of one-hot units) that a clustering uses
    metric: str  # distance of the first layer; upper layers count the equal codes of a row and a centroid
    csr: bool  # True if the input is CSR, which is possible only in the first layer
    dtype: str  # type of the input
    share: int = 1  # number of clusterings of the first layer that share one draw of rows and columns
    pool_rows: int | None = None  # number of rows of a shared draw, of which a clustering takes k; None: k

    @property
    def n_columns(self) -> int:
        """Number of columns of the data that a clustering of the first layer uses."""
        return floor_share(self.fraction, self.width)

    @property
    def code_dtype(self) -> str:
        """Type of the output, whose values are numbers of centroids."""
        return "uint16" if self.k <= MAX_UINT16_CENTROIDS else "uint32"

    def draw_rows(self, first: int, count: int = 1, backend: Backend | None = None) -> Array:
        """Return the row numbers of ``count`` draws as one array; those of each draw are in rising order.

        The array is on the device of ``backend``; None means the CPU.
        """
        sizes = {"n": self.n_rows, "m": self.rows_per_set}
        return choose_numbers(self.seed, "rows", self.number, first, count, **sizes, backend=backend)

    def draw_columns(self, which: int) -> np.ndarray:
        """Return the columns that the first-layer clusterings of set ``which`` share, in rising order."""
        return choose_numbers(self.seed, "columns", 1, which, n=self.width, m=self.n_columns)

    def draw_units(self, first: int, count: int = 1, backend: Backend | None = None) -> Array:
        """Return the one-hot units that each of ``count`` clusterings uses, bool (count, width, k_below).

        A one-hot unit is a centroid of a clustering of the layer below. The device is that of ``backend``.
        """
        n = self.width * self.k_below
        m = floor_share(self.fraction, n)
        units = choose_masks(self.seed, "units", self.number, first, count, n=n, m=m, backend=backend)
        return units.reshape(count, self.width, self.k_below)

    def draw_centroids(self, first: int, stop: int) -> np.ndarray:
        """Return the rows of a shared draw that clusterings first to stop - 1 use as centroids.

        The result is a mask, bool (clusterings, rows of the draw).
        """
        if self.rows_per_set == self.k:
            return np.ones((stop - first, self.k), dtype=bool)
        return choose_masks(self.seed, "taken", 1, first, stop - first, n=self.rows_per_set, m=self.k)

    @property
    def reads_codes_below(self) -> bool:
        """True if centroids are read from the codes of the layer below, because a copy of them is larger.

        A process keeps the codes of one layer in memory, so there is an upper bound on their size.
        """
        nbytes = self.n_rows * self.width * np.dtype(self.dtype).itemsize
        return self.number > 1 and self.n_clusterings * self.k >= self.n_rows and nbytes <= _MAX_CODE_BYTES

    # -- methods of scalelatent.contract.learners.RowSets: the rows that the engine copies as centroids

    @property
    def requirements(self) -> BlockRequirements:
        """Format in which rows are read: CSR if the input is CSR, else dense."""
        return BlockRequirements(csr=self.csr)

    @property
    def n_sets(self) -> int:
        """Number of draws of rows: one per ``share`` clusterings."""
        return -(-self.n_clusterings // self.share)

    @property
    def rows_per_set(self) -> int:
        """Number of rows of each draw, from which its clusterings take their centroids."""
        return self.pool_rows or self.k

    def output(self) -> tuple[tuple[int, ...], str]:
        """Return (shape, dtype) in which a centroid is stored."""
        return (self.n_columns if self.number == 1 and not self.csr else self.width,), self.dtype

    def rows(self, which: int) -> np.ndarray:
        """Return the numbers of the training rows in draw number ``which``, in rising order."""
        return self.draw_rows(which)

    def take(self, which: int, x: HostRows, rows: np.ndarray) -> HostRows:
        """Return the rows ``rows`` of ``x`` in the format of set ``which``: centroids that clusterings share.

        In the first layer, only the columns of the set are kept; CSR rows keep their width. In upper layers,
        the rows are returned unchanged.
        """
        if not isinstance(x, CsrRows):
            return x[rows] if self.number > 1 else np.take(x[rows], self.draw_columns(which), axis=1)
        return x.take(rows).keep_columns(self.draw_columns(which))

    def flops_per_row(self) -> float:
        """Return the time to assign one row to a centroid of one clustering, in floating point operations."""
        if self.number > 1:
            return _LOOKUP_FLOPS * self.width
        return 2.0 * self.rows_per_set * self.n_columns / self.share

    def preparation_flops(self) -> float:
        """Return the time to prepare the centroids of one clustering, in floating point operations."""
        if self.number > 1:
            return _LOOKUP_FLOPS * _LOOKUPS_PER_LISTED_CODE * self.width * self.k
        return 60.0 * self.rows_per_set * self.n_columns / self.share

    @property
    def group_size(self) -> int:
        """Number of clusterings that :meth:`compute_codes` computes together, because this is faster."""
        if self.number == 1:
            return self.share
        most = min(2**_GROUP_BITS >> (self.k - 1).bit_length(), _GROUP_BYTES // (self.width * self.k_below))
        return max(1, min(_MAX_GROUP, most))

    def compute_codes(
        self, backend: Backend, x: Array | CsrRows, centroids: CentroidSets, first: int, stop: int
    ) -> np.ndarray:
        """Return the number of the nearest centroid of each row ``x`` in clusterings first to stop - 1.

        The result has the shape (rows, clusterings), with at most :attr:`group_size` clusterings.
        """
        kernel = backend.kernel
        if self.number > 1:
            units = self.draw_units(first, stop - first, backend)
            codes = centroids.read(first, stop - first)
            assert not isinstance(codes, CsrRows)
            lists = kernel("mbn_make_lists")(codes.reshape(-1, self.k, self.width), units)
            return np.asarray(kernel("mbn_nearest_codes")(x, lists))
        pool = first // self.share
        rows, columns = centroids.read(pool), self.draw_columns(pool)
        draws = self.draw_centroids(first, stop)
        if self.csr:
            packed = kernel("mbn_make_sparse_bank")(rows, columns, self.metric, draws)
            return np.asarray(kernel("mbn_nearest_sparse")(x, packed))
        packed = kernel("mbn_make_bank")(rows, self.metric, draws)
        return np.asarray(kernel("mbn_nearest")(x, columns, packed))

    def check(self, x: HostRows, start: int) -> None:
        """Raise ValueError for rows with NaN, infinity or huge values; for the cosine, also for zero rows.

        ``start`` is the number of the first row of ``x`` in its dataset, for the message.
        """
        if self.number > 1:
            return
        values = x.data if isinstance(x, CsrRows) else x
        # Integers of fewer than 8 bytes are always below the limit.
        if values.size and (values.dtype.kind == "f" or values.dtype.itemsize == 8):
            limit = _largest_value(self.width)
            with np.errstate(invalid="ignore", over="ignore"):
                least, most = np.float32(values.min()), np.float32(values.max())
            # If a value is NaN, least and most are NaN, and the comparisons are False.
            if not (-limit <= least and most <= limit):
                raise ValueError(find_nonfinite(Block(x, None, None, start), limit))
        if self.metric == "cosine":
            empty = np.flatnonzero(_count_nonzeros(x) == 0)
            if len(empty):
                raise ValueError(
                    f"row {start + empty[0]} is all zeros, so its cosine is undefined: remove empty rows, "
                    "or use metric='euclidean'"
                )


def _count_nonzeros(x: HostRows) -> np.ndarray:
    if not isinstance(x, CsrRows):
        return np.count_nonzero(x, axis=1)
    before = np.concatenate([[0], np.cumsum(x.data != 0)])
    return before[x.indptr[1:]] - before[x.indptr[:-1]]


def _largest_value(width: int) -> float:
    """Return the largest allowed value, a power of ten for which squared lengths of rows fit float32."""
    return float(10 ** math.floor(math.log10(FLOAT32_MAX / (4 * width)) / 2))


def make_layers(
    ks: list[int],
    *,
    n_rows: int,
    n_features: int,
    n_clusterings: int,
    fraction: float,
    metric: str,
    csr: bool,
    dtype: str,
    seed: int,
    n_pools: int | None = None,
) -> tuple[Layer, ...]:
    """Return the layers of a network that has ``ks`` centroids per clustering, for each layer.

    The clusterings of the first layer share ``n_pools`` draws of rows and columns; if None, they share none.
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"feature_fraction={fraction!r}: give a number above 0 and up to 1")
    sizes = [n_features, *(n_clusterings * k for k in ks[:-1])]
    least = min(sizes)
    if floor_share(fraction, least) < 1:
        number = sizes.index(least) + 1
        raise ValueError(
            f"layer {number}: feature_fraction={fraction!r} of {least} "
            f"{'feature(s)' if number == 1 else 'one-hot units of the layer below'} selects nothing: give at "
            f"least {float(_ROUNDED_UP.divide(Decimal(1), least)):g}"
        )
    layers: list[Layer] = []
    for i, k in enumerate(ks):
        below = layers[-1] if layers else None
        layers.append(
            Layer(
                number=i + 1,
                seed=seed,
                n_rows=n_rows,
                n_clusterings=n_clusterings,
                k=k,
                width=n_features if below is None else n_clusterings,
                k_below=0 if below is None else below.k,
                fraction=fraction,
                metric=metric,
                csr=csr and below is None,
                dtype=dtype if below is None else below.code_dtype,
                share=1 if below or n_pools is None else -(-n_clusterings // n_pools),
                pool_rows=None if below or n_pools is None else min(2 * k, n_rows),
            )
        )
    return tuple(layers)
