"""Layers of random clusterings: number of centroids, random draws and codes.

A layer has V clusterings of k centroids, which are random rows of its input. The input is the data in the
first layer, and the codes of the layer below in upper layers. The output of a row is V codes: the number of
its nearest centroid in each clustering. The one-hot form of the output would have V k columns (one-hot
units); it is never computed.

Clusterings of the first layer can share a pool: one draw of columns and of up to 2 k rows. Each clustering
takes k of these rows at random as centroids. The scores of a row with a pool give the codes of all
clusterings of the pool. With G pools, the first layer therefore costs 2 G / V of the first layer in the
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

# Number of centroids whose codes fit into 16 bits.
SHORT_CODES = 65_536
FLOAT32_MAX = float(np.finfo(np.float32).max)
# Messages round the least allowed fraction up, so that the number in the message is allowed.
_ROUNDED_UP = Context(prec=6, rounding=ROUND_CEILING)
# At most _GROUP clusterings of an upper layer are computed together, and fewer if the numbers of all their
# centroids do not fit _GROUP_BITS bits, or the masks of the codes that they use exceed _GROUP_BYTES bytes.
_GROUP, _GROUP_BITS, _GROUP_BYTES = 32, 16, 2**26
# Upper bound on the bytes of the codes of a layer from which the centroids of the next layer are read.
_CODES_BYTES = 2**27
# Number of pools (draws of rows and columns that clusterings share) by default, and the fewest rows and
# columns of data for which there are pools by default (benchmarks/mbn_pools.py).
POOLS, POOLED_ROWS, POOLED_FEATURES = 40, 1000, 32
# Time to look up the list of the centroids that have a code, in floating point operations; time to add one
# code of a centroid to these lists, as a multiple of the time of a look-up.
_LOOKUP_FLOPS, _LIST_LOOKUPS = 90.0, 8.0


def floor_share(fraction: float, n: int) -> int:
    """Return floor(fraction * n), corrected for rounding errors: 0.29 of 100 is 29, not 28."""
    return math.floor(fraction * n * (1 + 2.0**-51))


def make_schedule(
    n: int, k1: int | None, decay: float, k_last: int | None, n_classes: int | None
) -> list[int]:
    """Return the number k_l of centroids per clustering of each layer l, k_{l+1} = floor(decay k_l)."""
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
    # Each layer has fewer centroids, even if decay is nearly 1.
    while (following := min(floor_share(decay, ks[-1]), ks[-1] - 1)) >= least:
        ks.append(following)
    return ks


def choose_pools(n_pools: int | str, n_rows: int, n_features: int, n_clusterings: int) -> int | None:
    """Return the number of pools of the first layer; None if each clustering draws its own centroids.

    A pool is one draw of rows and columns that several clusterings share. "auto" makes no pools for datasets
    of few rows, whose first layer is a small part of the fit, and none for few columns, because the columns
    that a pool happens to draw would decide the result.
    """
    if n_pools == "auto":
        n_pools = "paper" if n_rows < POOLED_ROWS or n_features < POOLED_FEATURES else POOLS
    return None if n_pools == "paper" else min(n_clusterings, int(n_pools))


class CentroidSets(Protocol):
    """Rows that are the centroids of a layer, in memory or on disk, in one set per pool or clustering."""

    def read(self, which: int, count: int = 1) -> Array | CsrRows:
        """Return the rows of ``count`` sets, starting with set ``which``."""

    def source_rows(self) -> HostRows | None:
        """Return the rows from which each read takes those of its sets; None if the sets are copies."""


@dataclass(frozen=True)
class ArraySets:
    """Centroids of a layer in memory, in sets of ``rows_per_set`` rows."""

    # (sets x rows_per_set, columns): the rows of one set after those of another
    rows: HostRows
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
        rows = np.concatenate([self.layer.rows(i) for i in range(which, which + count)])
        return self.backend.take(self.codes, rows, "mbn-centroids")


@dataclass(frozen=True)
class Layer:
    """Parameters of a layer, which determine all its random draws; its centroids are not included."""

    number: int  # number of the layer; the first layer has the number 1
    seed: int
    n_rows: int  # rows that centroids are drawn from
    n_clusterings: int  # V, number of clusterings of the layer
    k: int  # centroids of a clustering
    width: int  # columns of the input: features, or clusterings of the layer below
    k_below: int  # centroids of the layer below; 0 in the first layer
    fraction: float  # share of the columns (in upper layers: of the codes below) that a clustering uses
    metric: str  # distance of the first layer; upper layers count the codes that two rows share
    csr: bool  # whether the input of the first layer is CSR
    dtype: str  # type of the input
    share: int = 1  # clusterings of the first layer that share a pool of rows and its columns
    pool_rows: int | None = None  # rows of a pool, of which each clustering takes k; None: k

    @property
    def n_columns(self) -> int:
        """Number of columns of a clustering of the first layer."""
        return floor_share(self.fraction, self.width)

    @property
    def code_dtype(self) -> str:
        return "uint16" if self.k <= SHORT_CODES else "uint32"

    def draw_columns(self, which: int) -> np.ndarray:
        """Return the columns of pool number ``which`` of the first layer, int64 in rising order.

        A pool is a draw of rows and columns that several clusterings share.
        """
        return choose_numbers(self.seed, "columns", 1, which, n=self.width, m=self.n_columns)

    def draw_units(self, first: int, count: int = 1, backend: Backend | None = None) -> Array:
        """Return masks of the codes below that upper-layer clusterings use, bool (count, width, k_below).

        The masks are on the device of ``backend``, or in the memory of the host by default.
        """
        n = self.width * self.k_below
        m = floor_share(self.fraction, n)
        units = choose_masks(self.seed, "units", self.number, first, count, n=n, m=m, backend=backend)
        return units.reshape(count, self.width, self.k_below)

    def draw_centroids(self, first: int, stop: int) -> np.ndarray:
        """Return masks of the rows in a pool (draw) that first-layer clusterings use as centroids, bool.

        The shape is (clusterings first to stop - 1, rows of their pool).
        """
        if self.rows_per_set == self.k:
            return np.ones((stop - first, self.k), dtype=bool)
        return choose_masks(self.seed, "taken", 1, first, stop - first, n=self.rows_per_set, m=self.k)

    @property
    def reads_codes_below(self) -> bool:
        """Whether centroids stay among the codes of the layer below, because a copy of them would be larger.

        A process keeps the codes of one layer in memory, so there is an upper bound on their size.
        """
        nbytes = self.n_rows * self.width * np.dtype(self.dtype).itemsize
        return self.number > 1 and self.n_clusterings * self.k >= self.n_rows and nbytes <= _CODES_BYTES

    # -- rows that become centroids: the methods of scalelatent.contract.learners.RowSets

    @property
    def requirements(self) -> BlockRequirements:
        """Form in which rows are read: CSR if the input is CSR, else dense."""
        return BlockRequirements(csr=self.csr)

    @property
    def n_sets(self) -> int:
        """Number of draws of rows (pools): one per ``share`` clusterings."""
        return -(-self.n_clusterings // self.share)

    @property
    def rows_per_set(self) -> int:
        """Number of rows of each draw (pool), from which its clusterings take their centroids."""
        return self.pool_rows or self.k

    def output(self) -> tuple[tuple[int, ...], str]:
        """Return (shape, dtype) in which a centroid is stored."""
        return (self.n_columns if self.number == 1 and not self.csr else self.width,), self.dtype

    def rows(self, which: int) -> np.ndarray:
        """Return the numbers of the rows in pool number ``which`` (a draw of rows), in rising order."""
        return choose_numbers(self.seed, "rows", self.number, which, n=self.n_rows, m=self.rows_per_set)

    def take(self, which: int, x: HostRows, rows: np.ndarray) -> HostRows:
        """Return some rows of ``x`` in the form in which centroids are stored.

        In the first layer, dense rows have only the columns of the pool number ``which`` (a draw of rows and
        columns that clusterings share); CSR rows have only entries in these columns, but keep their width. In
        upper layers, rows of codes are returned unchanged.
        """
        if not isinstance(x, CsrRows):
            return x[rows] if self.number > 1 else np.take(x[rows], self.draw_columns(which), axis=1)
        return x.take(rows).keep_columns(self.draw_columns(which))

    # -- codes ----------------------------------------------------------------------------------------------

    def flops_per_row(self) -> float:
        """Return the time to compute one code of one row, in floating point operations."""
        if self.number > 1:
            return _LOOKUP_FLOPS * self.width
        return 2.0 * self.rows_per_set * self.n_columns / self.share

    def preparation_flops(self) -> float:
        """Return the time to prepare the centroids of one clustering, in floating point operations."""
        if self.number > 1:
            return _LOOKUP_FLOPS * _LIST_LOOKUPS * self.width * self.k
        return 60.0 * self.rows_per_set * self.n_columns / self.share

    @property
    def group_size(self) -> int:
        """Number of clusterings that :meth:`compute_codes` computes together."""
        if self.number == 1:
            return self.share
        most = min(2**_GROUP_BITS >> (self.k - 1).bit_length(), _GROUP_BYTES // (self.width * self.k_below))
        return max(1, min(_GROUP, most))

    def compute_codes(
        self, backend: Backend, x: Array | CsrRows, centroids: CentroidSets, first: int, stop: int
    ) -> np.ndarray:
        """Return the codes of rows in the clusterings first to stop - 1, (rows, clusterings).

        These clusterings must be in one group: at most :attr:`group_size` clusterings.
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
        """Refuse rows with NaN, infinite or huge values, and rows of zeros under the cosine."""
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
    """Return the number of nonzero entries of each row."""
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
    """Return the layers of a network from the numbers ``ks`` of centroids and the parameters of the fit.

    Without ``n_pools``, each clustering of the first layer draws its own rows and columns.
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
