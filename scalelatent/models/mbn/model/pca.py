"""Principal components of one-hot codes, which are the output of a bootstrap network.

A code is the number of a row's nearest centroid in one of V clusterings. A one-hot row has V k columns, with
a one in the column of each of its V codes. One-hot rows are never stored. For few rows, the components come
from the eigenvectors of the centred matrix of inner products of the rows (linear kernel PCA); the inner
product of two rows is the number of their equal codes. For many rows, they come from EM for PCA (Roweis,
1998) in passes over the rows. This is a subspace iteration: each pass replaces the columns of a basis C by
H' H C, where H are the centred rows. The columns are orthonormal, there are more columns than components, and
Ritz values show when each component has converged.
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

# Type of the method `Backend.kernel`, which returns the compiled function (kernel) with a given name.
FindKernel: TypeAlias = Callable[[str], Callable[..., np.ndarray]]
# The basis of the iteration has at least this many columns more than components, for faster convergence.
_SPARE_COLUMNS = 8
# With fewer rows, all eigenvectors by LAPACK are faster than a few eigenvectors by Lanczos' method.
LANCZOS_ROWS = 200


@dataclass(frozen=True)
class Components:
    """The first d principal components of one-hot rows, which have a column per centroid and clustering."""

    # float64 (clusterings, centroids, d): one unit vector per component, largest variance first; the entry of
    # largest magnitude of each vector is positive
    table: np.ndarray
    offset: np.ndarray  # float64 (d,): product of the mean row and each component
    variance: np.ndarray  # float64 (d,): variance of the rows along each component, with divisor n
    total_variance: float  # variance of the one-hot rows, summed over all columns

    def take_first(self, d: int) -> Components:
        return Components(
            np.ascontiguousarray(self.table[:, :, :d]),
            self.offset[:d],
            self.variance[:d],
            self.total_variance,
        )


def compute_total_variance(mean: np.ndarray) -> float:
    """Return the variance of one-hot rows with this mean row, summed over the columns."""
    return float((mean * (1.0 - mean)).sum())


def make_components(vectors: np.ndarray, variance: np.ndarray, mean: np.ndarray) -> Components:
    """Return components from eigenvectors (columns, d), their variances, and the mean of the one-hot rows."""
    vectors = vectors * column_signs(vectors)
    table = np.ascontiguousarray(vectors.reshape(*mean.shape, -1))
    return Components(table, mean.reshape(-1) @ vectors, variance, compute_total_variance(mean))


def compute_mean(codes: np.ndarray, k: int) -> np.ndarray:
    """Return the mean of the one-hot rows: the share of the rows with each code, (clusterings, k)."""
    return np.stack([np.bincount(column, minlength=k) for column in codes.T]) / len(codes)


def run_kernel_pca(codes: np.ndarray, k: int, kernel: FindKernel) -> Components:
    """Return all principal components of few one-hot rows, from the matrix of their inner products."""
    n, mean = len(codes), compute_mean(codes, k)
    values, u = find_eigenvectors(codes, n, kernel)
    kept = values > 1e-10 * max(values[0], 1.0)
    if not kept.any():
        return make_components(np.zeros((mean.size, 1)), np.zeros(1), mean)
    values, u = values[kept], np.ascontiguousarray(u[:, kept])
    vectors = np.zeros((*mean.shape, len(values)))
    kernel("mbn_scatter_add")(codes, u, vectors)
    # The columns of ``u`` (eigenvectors) sum to zero, so the mean row need not be subtracted from the rows.
    return make_components(vectors.reshape(-1, len(values)) / np.sqrt(values), values / n, mean)


def compute_coordinates(codes: np.ndarray, d: int, kernel: FindKernel) -> np.ndarray:
    """Return coordinates (n, d) of few one-hot rows along their d components, without the components."""
    d_kept = min(d, len(codes))
    direct = len(codes) < LANCZOS_ROWS or d_kept > len(codes) // 50
    values, u = (find_eigenvectors if direct else _find_leading_by_lanczos)(codes, d_kept, kernel)
    found = np.zeros((len(codes), d))
    found[:, : len(values)] = u * np.sqrt(np.maximum(values, 0.0))
    return found * column_signs(found)


def find_eigenvectors(codes: np.ndarray, count: int, kernel: FindKernel) -> tuple[np.ndarray, np.ndarray]:
    """Return the ``count`` largest eigenvalues of the matrix of inner products of rows, and eigenvectors.

    The rows are the one-hot form of ``codes``, minus the mean row. The largest eigenvalue is the first.
    """
    from scipy.linalg import eigh

    n = len(codes)
    matches = _count_centred_matches(codes, kernel)
    values, u = eigh(matches, subset_by_index=[n - count, n - 1] if count < n else None)
    return values[::-1], u[:, ::-1]


def _find_leading_by_lanczos(
    codes: np.ndarray, count: int, kernel: FindKernel
) -> tuple[np.ndarray, np.ndarray]:
    """Return the ``count`` largest eigenvalues of the matrix of inner products of rows, and eigenvectors.

    Lanczos' method is faster than :func:`find_eigenvectors` for many rows and few eigenvectors.
    """
    from scipy.sparse.linalg import ArpackError, eigsh

    matches = _count_centred_matches(codes, kernel)
    start = np.cos(np.arange(len(codes)) ** 1.5)  # an arbitrary vector that is the same in each run
    try:
        values, u = eigsh(matches, k=count, which="LA", v0=start, ncv=16 + 4 * count, tol=1e-9, maxiter=200)
    except ArpackError:  # nearly equal eigenvalues do not converge, and a matrix of zeros has no start vector
        return find_eigenvectors(codes, count, kernel)
    return values[::-1], u[:, ::-1]


def _count_centred_matches(codes: np.ndarray, kernel: FindKernel) -> np.ndarray:
    matches = kernel("mbn_count_matches")(codes).astype(np.float64)
    matches -= matches.mean(axis=0)
    matches -= matches.mean(axis=1, keepdims=True)
    return matches


@dataclass(frozen=True)
class CodeCounts:
    """Count the rows with each code (number of the nearest centroid) in each clustering.

    This is a :class:`~scalelatent.contract.learners.Reduction`, whose counts the engine adds over all rows.
    """

    requirements = BlockRequirements()

    n_clusterings: int
    k: int

    def layout(self) -> Layout:
        return Layout((("counts", (self.n_clusterings, self.k)),))

    def flops_per_row(self) -> float:
        return 50.0 * self.n_clusterings

    def prepare(self, state: object, backend: Backend) -> None:
        """Return None: the engine calls this method, but counting needs no preparation."""

    def accumulate(self, prepared: None, block: Block, stats: Stats) -> None:
        counts = stats["counts"]
        for v in range(self.n_clusterings):
            counts[v] += np.bincount(block.x[:, v], minlength=self.k)


@dataclass(frozen=True)
class PcaState:
    """State of the subspace iteration for principal components between two passes over the rows."""

    iteration: int  # number of completed passes
    basis: np.ndarray  # float64 (one-hot columns, q): q orthonormal columns, which the next pass multiplies
    # Estimates of q components (one-hot columns, q) and of their variances (q,), largest first (Ritz pairs)
    vectors: np.ndarray
    variance: np.ndarray
    # Largest norm of S c - v c over the components c, divided by the largest variance; S is the covariance
    # matrix of the rows, and v is the variance of c. It is 0 if all components are exact.
    residual: float


@dataclass(frozen=True)
class StreamedPca:
    """A :class:`~scalelatent.contract.learners.BatchLearner` of principal components in passes over rows."""

    mean: np.ndarray  # float64 (clusterings, k): mean of the one-hot rows, in one row per clustering
    n_rows: int
    n_components: int  # number of components, all of which must converge
    width: int  # number of columns of the basis; the additional columns speed up convergence
    tol: float  # the iteration ends if the residual of the state is at most this number
    max_iter: int  # largest number of passes over the rows

    @classmethod
    def create(
        cls, counts: np.ndarray, n_rows: int, n_components: int, tol: float = 1e-4, max_iter: int = 200
    ) -> StreamedPca:
        """Return the learner of ``n_components`` components, or of fewer if the rows have fewer dimensions.

        ``counts`` (clusterings, k) are the numbers of rows whose nearest centroid is each of the k centroids.
        """
        v, k = counts.shape
        most = max(1, min(n_rows - 1, v * (k - 1)))
        d = min(n_components, most)
        return cls(counts / n_rows, n_rows, d, min(max(2 * d, d + _SPARE_COLUMNS), most), tol, max_iter)

    def start(self, rng: np.random.Generator) -> PcaState:
        """Return the initial state, with a basis of random orthonormal columns."""
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
        """Return the state after a pass, from the products of the centred rows and the basis.

        The new estimates of the components are the Ritz vectors of the old basis.
        """
        image = stats["train"]["image"].reshape(self.mean.size, self.width) / self.n_rows
        image -= np.outer(self.mean.reshape(-1), stats["train"]["total"] / self.n_rows)
        values, u = ritz_pairs(state.basis, image)
        vectors, image = state.basis @ u, image @ u
        lengths = np.linalg.norm(image - vectors * values, axis=0)[: self.n_components]
        residual = float(lengths.max() / max(values[0], 1e-300))
        basis = np.linalg.qr(image)[0]
        return PcaState(state.iteration + 1, basis, vectors, np.maximum(values, 0.0), residual)

    def summary(self, state: PcaState) -> dict[str, float | int | None]:
        """Return numbers about the last pass; the objective is the share of the variance not explained."""
        whole = max(compute_total_variance(self.mean), 1e-300)
        share = float(state.variance[: self.n_components].sum()) / whole
        return {"pass": state.iteration, "objective": 1.0 - share, "residual": state.residual}

    def is_done(self, state: PcaState) -> bool:
        """Return True if the components have converged, or ``max_iter`` passes are done."""
        return state.residual <= self.tol or state.iteration >= self.max_iter


class PackedBasis(NamedTuple):
    """The basis of the subspace iteration in the layout that the kernels read."""

    kernel: FindKernel
    table: np.ndarray  # the basis with q columns, (clusterings, k, q): one row per one-hot column
    offset: np.ndarray  # (q,): product of the mean row and the basis


@dataclass(frozen=True)
class CodeProducts:
    """Sums over all one-hot rows h that update a basis C: h' (h - mean) C, and (h - mean) C."""

    requirements = BlockRequirements()

    mean: np.ndarray  # (clusterings, k): mean of the rows
    width: int  # number of columns of the basis

    def layout(self) -> Layout:
        return Layout((("image", (*self.mean.shape, self.width)), ("total", (self.width,))))

    def flops_per_row(self) -> float:
        return 30.0 * self.mean.shape[0] * self.width

    def prepare(self, state: PcaState, backend: Backend) -> PackedBasis:
        table = np.ascontiguousarray(state.basis).reshape(*self.mean.shape, self.width)
        return PackedBasis(backend.kernel, table, self.mean.reshape(-1) @ state.basis)

    def accumulate(self, prepared: PackedBasis, block: Block, stats: Stats) -> None:
        kernel, table, offset = prepared
        y = kernel("mbn_gather_sum")(block.x, table) - offset
        kernel("mbn_scatter_add")(block.x, y, stats["image"])
        stats["total"][...] += y.sum(axis=0)


# Type of the kernel that adds, for each row of codes, the entries of a table that the codes select.
GatherSum: TypeAlias = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class CodeProjection:
    """A :class:`~scalelatent.contract.learners.RowMap` from rows of codes to d principal components."""

    requirements = BlockRequirements()

    table: np.ndarray  # (clusterings, centroids, d): the d components
    offset: np.ndarray  # (d,): product of the mean row and each component, which is subtracted

    output_name = "transform"

    @classmethod
    def from_components(cls, components: Components) -> CodeProjection:
        return cls(components.table, components.offset)

    def output(self) -> tuple[tuple[int, ...], str]:
        return (len(self.offset),), "float32"

    def prepare(self, backend: Backend) -> GatherSum:
        return backend.kernel("mbn_gather_sum")

    def apply(self, prepared: GatherSum, block: Block) -> np.ndarray:
        """Return the coordinates of the rows of the block along the components, float32 (rows, d)."""
        found: np.ndarray = prepared(block.x, self.table) - self.offset
        return found.astype(np.float32)
