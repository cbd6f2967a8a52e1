"""Principal components of one-hot codes, which are never expanded: the output layer of a network.

H is the one-hot form of the codes, n rows of V groups of k columns. Few rows: the eigenvectors of the centred
matrix of inner products, which counts how many codes two rows share (linear kernel PCA). Many: EM for PCA
(Roweis, 1998), streamed. Its two steps give the columns of C the span of (H' H) C, so that it is an iteration
of subspaces; here with orthonormal columns, more than are wanted, and Ritz values, by which it is known when
each component has settled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from scalelatent.contract.learners import Backend, Block
from scalelatent.contract.stats import Layout, Stats
from scalelatent.contract.wants import Wants
from scalelatent.reductions.eigen import column_signs, ritz_pairs

# A kernel by its name, see `Backend.kernel`.
FindKernel: TypeAlias = Callable[[str], Callable[..., np.ndarray]]
# Components beyond those that are wanted: their number decides how fast the wanted ones settle.
_SPARE = 8
# From so many rows on, a few eigenvectors are found by Lanczos' method.
LANCZOS_ROWS = 200


@dataclass(frozen=True)
class Components:
    """Principal components of one-hot rows."""

    # float64 (V, k, d): orthonormal columns, largest variance first; the entry of largest
    # magnitude of each is positive
    table: np.ndarray
    # float64 (d,): mean row times the components
    offset: np.ndarray
    # float64 (d,): along each, by n
    variance: np.ndarray
    # Of the rows
    total_variance: float

    def first(self, d: int) -> Components:
        """The first few."""
        return Components(
            np.ascontiguousarray(self.table[:, :, :d]),
            self.offset[:d],
            self.variance[:d],
            self.total_variance,
        )

    def reaching(self, share: float) -> int | None:
        """The fewest components that explain a share of the variance; None where all of these do not."""
        there = np.flatnonzero(np.cumsum(self.variance) >= share * (1 - 1e-9) * self.total_variance)
        return int(there[0]) + 1 if len(there) else None


def total_variance(mean: np.ndarray) -> float:
    """Variance of one-hot rows, all columns together: of each p (1 - p)."""
    return float((mean * (1.0 - mean)).sum())


def make_components(vectors: np.ndarray, variance: np.ndarray, mean: np.ndarray) -> Components:
    """Components from columns over all V k units, signs settled."""
    vectors = vectors * column_signs(vectors)
    table = np.ascontiguousarray(vectors.reshape(*mean.shape, -1))
    return Components(table, mean.reshape(-1) @ vectors, variance, total_variance(mean))


def mean_of(codes: np.ndarray, k: int) -> np.ndarray:
    """Share of the rows with each code, float64 (V, k)."""
    return np.stack([np.bincount(column, minlength=k) for column in codes.T]) / len(codes)


def kernel_components(codes: np.ndarray, k: int, kernel: FindKernel) -> Components:
    """All components of few rows, by the matrix of their inner products."""
    n, mean = len(codes), mean_of(codes, k)
    values, u = _leading(codes, n, kernel)
    kept = values > 1e-10 * max(values[0], 1.0)
    if not kept.any():
        return make_components(np.zeros((mean.size, 1)), np.zeros(1), mean)
    values, u = values[kept], np.ascontiguousarray(u[:, kept])
    vectors = np.zeros((*mean.shape, len(values)))
    kernel("mbn_scatter_add")(codes, u, vectors)
    # Columns of u sum to zero, so the mean row drops out.
    return make_components(vectors.reshape(-1, len(values)) / np.sqrt(values), values / n, mean)


def kernel_coordinates(codes: np.ndarray, d: int, kernel: FindKernel) -> np.ndarray:
    """Few rows along their first principal components, for which no components are needed."""
    d_kept = min(d, len(codes))
    few = len(codes) < LANCZOS_ROWS or d_kept > len(codes) // 50
    values, u = (_leading if few else _leading_by_lanczos)(codes, d_kept, kernel)
    found = np.zeros((len(codes), d))
    found[:, : len(values)] = u * np.sqrt(np.maximum(values, 0.0))
    return found * column_signs(found)


def _leading(codes: np.ndarray, count: int, kernel: FindKernel) -> tuple[np.ndarray, np.ndarray]:
    """Largest eigenvalues of the centred matrix of inner products, and their vectors."""
    from scipy.linalg import eigh

    n = len(codes)
    matches = _centred(codes, kernel)
    values, u = eigh(matches, subset_by_index=[n - count, n - 1] if count < n else None)
    return values[::-1], u[:, ::-1]


def _leading_by_lanczos(codes: np.ndarray, count: int, kernel: FindKernel) -> tuple[np.ndarray, np.ndarray]:
    """The same for few of many: a hundred products with a vector, where `eigh` reduces the whole matrix."""
    from scipy.sparse.linalg import ArpackError, eigsh

    matches = _centred(codes, kernel)
    start = np.cos(np.arange(len(codes)) ** 1.5)  # any vector, the same each time
    try:
        values, u = eigsh(matches, k=count, which="LA", v0=start, ncv=16 + 4 * count, tol=1e-9, maxiter=200)
    except ArpackError:  # no convergence where eigenvalues are all but equal; no start where all are zero
        return _leading(codes, count, kernel)
    return values[::-1], u[:, ::-1]


def _centred(codes: np.ndarray, kernel: FindKernel) -> np.ndarray:
    matches = kernel("mbn_count_matches")(codes).astype(np.float64)
    matches -= matches.mean(axis=0)
    matches -= matches.mean(axis=1, keepdims=True)
    return matches


@dataclass(frozen=True)
class CodeCounts:
    """How many rows have each code, a :class:`~scalelatent.contract.learners.Reduction`."""

    wants = Wants()

    n_clusterings: int
    k: int

    def layout(self) -> Layout:
        return Layout((("counts", (self.n_clusterings, self.k)),))

    def flops_per_row(self) -> float:
        return 50.0 * self.n_clusterings

    def prepare(self, state: object, backend: Backend) -> None:
        """Nothing."""

    def accumulate(self, prepared: None, block: Block, stats: Stats) -> None:
        counts = stats["counts"]
        for v in range(self.n_clusterings):
            counts[v] += np.bincount(block.x[:, v], minlength=self.k)


@dataclass(frozen=True)
class PcaState:
    """Between two passes."""

    iteration: int
    # float64 (V k, q): orthonormal
    basis: np.ndarray
    # vectors, variance: float64 (V k, q) and (q,): Ritz vectors and values of the last
    # pass, largest first
    vectors: np.ndarray
    variance: np.ndarray
    # Largest |S c - v c| of the wanted components, over the largest variance
    residual: float


@dataclass(frozen=True)
class StreamedPca:
    """EM for PCA of one-hot rows, a :class:`~scalelatent.contract.learners.BatchLearner`."""

    # float64 (V, k)
    mean: np.ndarray
    n_rows: int
    # Those that have to settle
    n_components: int
    # Columns that are iterated
    width: int
    # Residual at which it ends
    tol: float
    max_iter: int

    @classmethod
    def of(
        cls, counts: np.ndarray, n_rows: int, n_components: int, tol: float = 1e-4, max_iter: int = 200
    ) -> StreamedPca:
        """The learner of a number of components; at most all that there can be."""
        v, k = counts.shape
        most = max(1, min(n_rows - 1, v * (k - 1)))
        d = min(n_components, most)
        return cls(counts / n_rows, n_rows, d, min(max(2 * d, d + _SPARE), most), tol, max_iter)

    def start(self, rng: np.random.Generator) -> PcaState:
        """Random orthonormal columns."""
        basis = np.linalg.qr(rng.standard_normal((self.mean.size, self.width)))[0]
        return PcaState(0, basis, np.zeros_like(basis), np.zeros(self.width), np.inf)

    def components(self, state: PcaState) -> Components:
        d = self.n_components
        variance, vectors = state.variance[:d], state.vectors[:, :d]
        # Rows that lie in fewer dimensions have nothing along the others.
        empty = variance <= 1e-10 * max(variance[0], 1e-300)
        return make_components(np.where(empty, 0.0, vectors), np.where(empty, 0.0, variance), self.mean)

    def reductions(self) -> dict[str, CodeProducts]:
        return {"train": CodeProducts(self.mean, self.width)}

    def update(self, state: PcaState, stats: Mapping[str, Stats]) -> PcaState:
        """Ritz pairs of the basis, and the next basis."""
        image = stats["train"]["image"].reshape(self.mean.size, self.width) / self.n_rows
        image -= np.outer(self.mean.reshape(-1), stats["train"]["total"] / self.n_rows)
        values, u = ritz_pairs(state.basis, image)
        vectors, image = state.basis @ u, image @ u
        lengths = np.linalg.norm(image - vectors * values, axis=0)[: self.n_components]
        residual = float(lengths.max() / max(values[0], 1e-300))
        basis = np.linalg.qr(image)[0]
        return PcaState(state.iteration + 1, basis, vectors, np.maximum(values, 0.0), residual)

    def summary(self, state: PcaState) -> dict[str, float | int | None]:
        """The scalars of the last pass; the objective is the share of the variance that is left."""
        whole = max(total_variance(self.mean), 1e-300)
        share = float(state.variance[: self.n_components].sum()) / whole
        return {"pass": state.iteration, "objective": 1.0 - share, "residual": state.residual}

    def is_done(self, state: PcaState) -> bool:
        """Whether the components have settled."""
        return state.residual <= self.tol or state.iteration >= self.max_iter


class UnitBasis(NamedTuple):
    """The basis by units, and its product with the mean row."""

    kernel: FindKernel
    table: np.ndarray
    offset: np.ndarray


@dataclass(frozen=True)
class CodeProducts:
    """H' (H - mean) C and the sum of (H - mean) C over rows: the pass of :class:`StreamedPca`."""

    wants = Wants()

    mean: np.ndarray
    width: int

    def layout(self) -> Layout:
        return Layout((("image", (*self.mean.shape, self.width)), ("total", (self.width,))))

    def flops_per_row(self) -> float:
        return 30.0 * self.mean.shape[0] * self.width

    def prepare(self, state: PcaState, backend: Backend) -> UnitBasis:
        table = np.ascontiguousarray(state.basis).reshape(*self.mean.shape, self.width)
        return UnitBasis(backend.kernel, table, self.mean.reshape(-1) @ state.basis)

    def accumulate(self, prepared: UnitBasis, block: Block, stats: Stats) -> None:
        kernel, table, offset = prepared
        y = kernel("mbn_gather_sum")(block.x, table) - offset
        kernel("mbn_scatter_add")(block.x, y, stats["image"])
        stats["total"][...] += y.sum(axis=0)


GatherSum: TypeAlias = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Codes and a table -> the sums of what the table has for them."""


@dataclass(frozen=True)
class CodeProjection:
    """Codes -> principal components, a :class:`~scalelatent.contract.learners.RowMap`."""

    wants = Wants()

    table: np.ndarray
    offset: np.ndarray

    what = "transform"

    @classmethod
    def of(cls, components: Components) -> CodeProjection:
        return cls(components.table, components.offset)

    def output(self) -> tuple[tuple[int, ...], str]:
        return (len(self.offset),), "float32"

    def prepare(self, backend: Backend) -> GatherSum:
        return backend.kernel("mbn_gather_sum")

    def apply(self, prepared: GatherSum, block: Block) -> np.ndarray:
        """Output rows of the block, float32 (rows, d)."""
        found: np.ndarray = prepared(block.x, self.table) - self.offset
        return found.astype(np.float32)
