"""Row maps from rows to probabilities, classes and latent means, for all three architectures."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from scipy.linalg import block_diag

from scalelatent.contract.block_requirements import BlockRequirements
from scalelatent.contract.finite import find_nonfinite, find_too_large
from scalelatent.contract.learners import Backend, Block
from scalelatent.contract.stats import Layout, Stats
from scalelatent.kernels.arrays import Array
from scalelatent.models.capsule.kernels.squash import squash_table
from scalelatent.reductions.intercept import Intercept, map_rows
from scalelatent.reductions.moments import NonFiniteError
from scalelatent.reductions.temperature import apply_temperature, losses_at_temperatures

from .members import Members

# Blocks of at most this many rows are multiplied in float64, so that their rounding does not depend on the
# number of rows.
FEW_ROWS = 256


def compute_class_scores(backend: Backend, members: Members, h: Array) -> np.ndarray:
    """Return the scores (rows, classes) of latent vectors (D, rows); each row sums to 1.

    The largest score is the predicted class. Multiclass: P(y | x). One-versus-all: the normalised
    probabilities of each member's own class. All-versus-all: the normalised numbers of votes; the sums of the
    members' probabilities break ties.
    """
    kernel = backend.kernel("capsule_probabilities")
    # All members have the same sum of capsule dimensions.
    table = backend.copy_table(squash_table(int(members.dims[0].sum())))
    if members.architecture == "multiclass":
        return backend.to_host(kernel(h, members.dims[0], table)).T
    scores = np.zeros((members.n_classes, h.shape[1]))
    for r, dims in enumerate(members.dims):
        p = backend.to_host(kernel(h[members.rows_of(r)], dims, table))
        if members.architecture == "one_vs_all":
            scores[r] = p[0]
            continue
        a, b = members.pairs[r]
        # A vote counts 1. The probabilities of a class from all its members together count less than a vote.
        wins = p[0] >= p[1]
        scores[a] += wins + p[0] / members.n_classes
        scores[b] += ~wins + p[1] / members.n_classes
    return (scores / scores.sum(axis=0)).T


@dataclass(frozen=True)
class RowFrame:
    """Affine map of rows to the vectors that W multiplies: an intercept, then a projection; both optional."""

    intercept: Intercept | None = None
    # float64 (features, p); with an intercept (features + 1, p + 1), which keeps the constant column.
    matrix: np.ndarray | None = None

    @classmethod
    def from_projection(cls, intercept: Intercept | None, projection: np.ndarray) -> RowFrame:
        """Return the map of an intercept and a projection (features, p) of rows without a constant column."""
        return cls(intercept, projection if intercept is None else block_diag(projection, 1.0))

    @property
    def projection(self) -> np.ndarray | None:
        """Directions that rows are projected on, (features, p)."""
        return self.matrix if self.matrix is None or self.intercept is None else self.matrix[:-1, :-1]

    @property
    def row_intercept(self) -> Intercept | None:
        """Intercept of the rows that passes read; None for projected rows, which have a constant column."""
        return self.intercept if self.matrix is None else None


class Weights(NamedTuple):
    """Matrices on the device that multiply rows: for each dtype the transposed projection (if any) and W."""

    backend: Backend
    factors: dict[type, tuple[Array | None, Array]]


@dataclass(frozen=True)
class CapsuleRows:
    """Row map to latent means or class scores.

    ``output_name`` is "latents" for h = W x, float32 (rows, D); "probabilities" for
    :func:`compute_class_scores`, float64 (rows, classes); or "classes" for the same
    scores, with the predicted classes as labels.
    """

    members: Members
    w: np.ndarray  # float64 (D, p), or (D, p + 1) with an intercept
    frame: RowFrame
    output_name: str
    temperature: float = 1.0  # probabilities are raised to 1 / temperature; 1 in Saul (2021)

    def output(self) -> tuple[tuple[int, ...], str]:
        if self.output_name == "latents":
            return (self.members.total_dim,), "float32"
        return (self.members.n_classes,), "float64"

    def prepare(self, backend: Backend) -> Weights:
        """Return the matrices; the product of projection and W replaces both if that is cheaper per row."""
        w, basis = self.w, self.frame.matrix
        if basis is not None and len(w) * len(basis) <= basis.size + w.size:
            w, basis = w @ basis.T, None
        dtypes = (np.float32, np.float64) if backend.device == "cpu" else (np.float32,)
        return Weights(
            backend,
            {
                dtype: (None if basis is None else backend.asarray(basis.T, dtype), backend.asarray(w, dtype))
                for dtype in dtypes
            },
        )

    def apply(self, prepared: Weights, block: Block) -> np.ndarray:
        """Return the scores or the latent means of a block."""
        backend, factors = prepared
        dtype = np.float64 if len(block.x) <= FEW_ROWS and np.float64 in factors else np.float32
        directions, w = factors[dtype]
        with np.errstate(invalid="ignore", over="ignore"):
            x = map_rows(self.frame.intercept, backend, block.x, dtype, "x")
            if place := find_too_large(block):
                raise NonFiniteError(place)
            x = x.T
            h = backend.matmul(w, x if directions is None else backend.matmul(directions, x, "z"), "h")
            h = backend.asarray(h, np.float32, "h32")
        if not bool(backend.xp.isfinite(h).all()):
            raise NonFiniteError(find_nonfinite(block) or f"rows from {block.start} on overflow float32")
        if self.output_name == "latents":
            return np.ascontiguousarray(backend.to_host(h).T)
        return apply_temperature(compute_class_scores(backend, self.members, h), self.temperature)

    @property
    def requirements(self) -> BlockRequirements:
        """Requirements for the engine: with the output "classes", it stores predicted classes as labels."""
        return BlockRequirements(labels=self.output_name == "classes", reads_on_gpu=True)

    @staticmethod
    def labels(scores: np.ndarray) -> np.ndarray:
        """Return the class code of each row: the class of the largest score, or the first of equal scores."""
        return scores.argmax(axis=1)


@dataclass(frozen=True)
class CalibrationPass:
    """Reduction to the log-loss of class probabilities at each of several temperatures."""

    requirements = BlockRequirements()

    rows: CapsuleRows
    temperatures: np.ndarray
    class_weight: np.ndarray | None
    every: int  # use every n-th row of the dataset

    def layout(self) -> Layout:
        return Layout((("loss", (len(self.temperatures),)),))

    def flops_per_row(self) -> float:
        return 2.0 * self.rows.w.size / self.every

    def prepare(self, state: object, backend: Backend) -> Weights:
        return self.rows.prepare(backend)

    def accumulate(self, prepared: Weights, block: Block, stats: Stats) -> None:
        """Add the rows of a block whose row numbers are multiples of ``every``."""
        some = np.arange(-block.start % self.every, len(block.x), self.every)
        if not len(some):
            return
        assert block.y is not None
        part = replace(block, x=block.x[some], rows=block.start + some)
        p = np.log(np.maximum(self.rows.apply(prepared, part), np.finfo(float).tiny))
        weight, y = np.ones(len(some)) if block.weight is None else block.weight[some], block.y[some]
        if self.class_weight is not None:
            weight = weight * self.class_weight[y]
        gaps = p.max(axis=1, keepdims=True) - p
        stats["loss"][...] += losses_at_temperatures(gaps, y, weight, self.temperatures)
