"""Principal components of one-hot codes, the output of a bootstrap network; the codes are never expanded.

H is the one-hot form of the codes: n rows of V groups of k columns. For few rows the components come from the
eigenvectors of the centred matrix of inner products, which counts the codes that two rows share (linear
kernel PCA). For many rows they come from streamed EM for PCA (Roweis, 1998). Its two steps give the columns
of C the span of (H' H) C: it is a subspace iteration. Here the columns are orthonormal, there are more of
them than components, and Ritz values show when each component has converged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from scalelatent.contract.block_requirements import BlockRequirements
from scalelatent.contract.learners import Backend, Block
from scalelatent.contract.stats import Layout, Stats
from scalelatent.reductions.eigen import column_signs, ritz_pairs

# Function that returns a kernel by its name, the method `Backend.kernel`.
FindKernel: TypeAlias = Callable[[str], Callable[..., np.ndarray]]
# Least number of spare columns of the iteration in addition to the components; spare columns speed up
# convergence.
_SPARE = 8
# Least number of rows for which Lanczos' method computes a few eigenvectors faster than LAPACK does.
LANCZOS_ROWS = 200


@dataclass(frozen=True)
class Components:
    """Principal components of rows of codes in one-hot form (a column for each code of each clustering)."""

    # float64 (V clusterings, k centroids, d components): orthonormal columns, largest variance first; the
    # entry of largest magnitude of each column is positive
    table: np.ndarray
    offset: np.ndarray  # float64 (d,): product of the mean row and the components
    # float64 (d,): variance of the rows along each component (sum of squares divided by n rows)
    variance: np.ndarray
    total_variance: float  # Variance of the one-hot rows, summed over all V k columns

    def first(self, d: int) -> Components:
        """Return the first d components."""
        return Components(
            np.ascontiguousarray(self.table[:, :, :d]),
            self.offset[:d],
            self.variance[:d],
            self.total_variance,
        )


def compute_total_variance(mean: np.ndarray) -> float:
    """Return the variance of one-hot rows, the sum of p (1 - p) over columns with mean p."""
    return float((mean * (1.0 - mean)).sum())


def make_components(vectors: np.ndarray, variance: np.ndarray, mean: np.ndarray) -> Components:
    """Return components from eigenvectors (columns, d); the largest entry of each becomes positive."""
    vectors = vectors * column_signs(vectors)
    table = np.ascontiguousarray(vectors.reshape(*mean.shape, -1))
    return Components(table, mean.reshape(-1) @ vectors, variance, compute_total_variance(mean))


def compute_mean(codes: np.ndarray, k: int) -> np.ndarray:
    """Return the share of the rows with each code, float64 (clusterings, k)."""
    return np.stack([np.bincount(column, minlength=k) for column in codes.T]) / len(codes)


def kernel_components(codes: np.ndarray, k: int, kernel: FindKernel) -> Components:
    """Return all principal components of few rows, from the matrix of their inner products."""
    n, mean = len(codes), compute_mean(codes, k)
    values, u = find_leading(codes, n, kernel)
    kept = values > 1e-10 * max(values[0], 1.0)
    if not kept.any():
        return make_components(np.zeros((mean.size, 1)), np.zeros(1), mean)
    values, u = values[kept], np.ascontiguousarray(u[:, kept])
    vectors = np.zeros((*mean.shape, len(values)))
    kernel("mbn_scatter_add")(codes, u, vectors)
    # The columns of u sum to zero, so subtracting the mean row would not change the vectors.
    return make_components(vectors.reshape(-1, len(values)) / np.sqrt(values), values / n, mean)


def kernel_coordinates(codes: np.ndarray, d: int, kernel: FindKernel) -> np.ndarray:
    """Return the coordinates (n, d) of few rows along their first d principal components.

    The components themselves are not computed.
    """
    d_kept = min(d, len(codes))
    direct = len(codes) < LANCZOS_ROWS or d_kept > len(codes) // 50
    values, u = (find_leading if direct else _find_leading_by_lanczos)(codes, d_kept, kernel)
    found = np.zeros((len(codes), d))
    found[:, : len(values)] = u * np.sqrt(np.maximum(values, 0.0))
    return found * column_signs(found)


def find_leading(codes: np.ndarray, count: int, kernel: FindKernel) -> tuple[np.ndarray, np.ndarray]:
    """Return the ``count`` largest eigenvalues, decreasing, and eigenvectors of the rows' inner products.

    The inner products are those of one-hot rows minus their mean.
    """
    from scipy.linalg import eigh

    n = len(codes)
    matches = _centre_matches(codes, kernel)
    values, u = eigh(matches, subset_by_index=[n - count, n - 1] if count < n else None)
    return values[::-1], u[:, ::-1]


def _find_leading_by_lanczos(
    codes: np.ndarray, count: int, kernel: FindKernel
) -> tuple[np.ndarray, np.ndarray]:
    """Return what :func:`find_leading` returns, by Lanczos' method (about 100 products with vectors)."""
    from scipy.sparse.linalg import ArpackError, eigsh

    matches = _centre_matches(codes, kernel)
    start = np.cos(np.arange(len(codes)) ** 1.5)  # an arbitrary vector, the same in each run
    try:
        values, u = eigsh(matches, k=count, which="LA", v0=start, ncv=16 + 4 * count, tol=1e-9, maxiter=200)
    except ArpackError:  # nearly equal eigenvalues do not converge, and a matrix of zeros has no start vector
        return find_leading(codes, count, kernel)
    return values[::-1], u[:, ::-1]


def _centre_matches(codes: np.ndarray, kernel: FindKernel) -> np.ndarray:
    matches = kernel("mbn_count_matches")(codes).astype(np.float64)
    matches -= matches.mean(axis=0)
    matches -= matches.mean(axis=1, keepdims=True)
    return matches


@dataclass(frozen=True)
class CodeCounts:
    """Count the rows with each code, a :class:`~scalelatent.contract.learners.Reduction`."""

    requirements = BlockRequirements()

    n_clusterings: int
    k: int

    def layout(self) -> Layout:
        return Layout((("counts", (self.n_clusterings, self.k)),))

    def flops_per_row(self) -> float:
        return 50.0 * self.n_clusterings

    def prepare(self, state: object, backend: Backend) -> None:
        """Prepare nothing."""

    def accumulate(self, prepared: None, block: Block, stats: Stats) -> None:
        counts = stats["counts"]
        for v in range(self.n_clusterings):
            counts[v] += np.bincount(block.x[:, v], minlength=self.k)


@dataclass(frozen=True)
class PcaState:
    """State of the subspace iteration between two passes over the rows."""

    iteration: int  # number of completed passes
    basis: np.ndarray  # float64 (V k, q): q orthonormal columns, for V clusterings of k centroids
    # float64 (V k, q) and (q,): Ritz vectors and values of the last pass, largest first
    vectors: np.ndarray
    variance: np.ndarray
    # Largest length of S c - v c (covariance S, component c with variance v), divided by the largest variance
    residual: float


@dataclass(frozen=True)
class StreamedPca:
    """EM for PCA of one-hot rows, a :class:`~scalelatent.contract.learners.BatchLearner`."""

    # float64 (clusterings, k): share of the rows with each code
    mean: np.ndarray
    n_rows: int
    n_components: int  # components that must converge
    width: int  # columns of the basis
    tol: float  # the iteration ends if the residual of the state is at most this number
    max_iter: int  # largest number of passes

    @classmethod
    def create(
        cls, counts: np.ndarray, n_rows: int, n_components: int, tol: float = 1e-4, max_iter: int = 200
    ) -> StreamedPca:
        """Return the learner of ``n_components`` components, or of as many as the rows have dimensions."""
        v, k = counts.shape
        most = max(1, min(n_rows - 1, v * (k - 1)))
        d = min(n_components, most)
        return cls(counts / n_rows, n_rows, d, min(max(2 * d, d + _SPARE), most), tol, max_iter)

    def start(self, rng: np.random.Generator) -> PcaState:
        """Return the initial state, whose basis has random orthonormal columns."""
        basis = np.linalg.qr(rng.standard_normal((self.mean.size, self.width)))[0]
        return PcaState(0, basis, np.zeros_like(basis), np.zeros(self.width), np.inf)

    def components(self, state: PcaState) -> Components:
        d = self.n_components
        variance, vectors = state.variance[:d], state.vectors[:, :d]
        # If the rows have fewer dimensions than components, the variance of the last components is 0.
        empty = variance <= 1e-10 * max(variance[0], 1e-300)
        return make_components(np.where(empty, 0.0, vectors), np.where(empty, 0.0, variance), self.mean)

    def reductions(self) -> dict[str, CodeProducts]:
        return {"train": CodeProducts(self.mean, self.width)}

    def update(self, state: PcaState, stats: Mapping[str, Stats]) -> PcaState:
        """Return the state with the Ritz pairs of the basis, and the next basis."""
        image = stats["train"]["image"].reshape(self.mean.size, self.width) / self.n_rows
        image -= np.outer(self.mean.reshape(-1), stats["train"]["total"] / self.n_rows)
        values, u = ritz_pairs(state.basis, image)
        vectors, image = state.basis @ u, image @ u
        lengths = np.linalg.norm(image - vectors * values, axis=0)[: self.n_components]
        residual = float(lengths.max() / max(values[0], 1e-300))
        basis = np.linalg.qr(image)[0]
        return PcaState(state.iteration + 1, basis, vectors, np.maximum(values, 0.0), residual)

    def summary(self, state: PcaState) -> dict[str, float | int | None]:
        """Return the scalars of the last pass; the objective is the unexplained share of the variance."""
        whole = max(compute_total_variance(self.mean), 1e-300)
        share = float(state.variance[: self.n_components].sum()) / whole
        return {"pass": state.iteration, "objective": 1.0 - share, "residual": state.residual}

    def is_done(self, state: PcaState) -> bool:
        """Return True if the components have converged, or ``max_iter`` passes are done."""
        return state.residual <= self.tol or state.iteration >= self.max_iter


class UnitBasis(NamedTuple):
    """Kernels, the basis as a table (V, k, q), and the product (q,) of the mean row and the basis."""

    kernel: FindKernel
    table: np.ndarray
    offset: np.ndarray


@dataclass(frozen=True)
class CodeProducts:
    """Sums of h' (h - mean) C and (h - mean) C over the rows h in one-hot form, for a basis C."""

    requirements = BlockRequirements()

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
"""Kernel (codes, table) -> for each row, the sum of the entries of the table that its codes select."""


@dataclass(frozen=True)
class CodeProjection:
    """Map codes to principal components, a :class:`~scalelatent.contract.learners.RowMap`."""

    requirements = BlockRequirements()

    table: np.ndarray
    offset: np.ndarray

    output_name = "transform"

    @classmethod
    def from_components(cls, components: Components) -> CodeProjection:
        return cls(components.table, components.offset)

    def output(self) -> tuple[tuple[int, ...], str]:
        return (len(self.offset),), "float32"

    def prepare(self, backend: Backend) -> GatherSum:
        return backend.kernel("mbn_gather_sum")

    def apply(self, prepared: GatherSum, block: Block) -> np.ndarray:
        """Return the output rows of the block, float32 (rows, d)."""
        found: np.ndarray = prepared(block.x, self.table) - self.offset
        return found.astype(np.float32)
