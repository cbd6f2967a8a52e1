"""Second moments of the rows, which capsule models need before their first pass, and projections of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from scalelatent.contract.block_requirements import BlockRequirements
from scalelatent.contract.finite import LARGEST_VALUE, find_nonfinite
from scalelatent.contract.learners import Backend, Block
from scalelatent.contract.stats import Layout, Stats

from .intercept import Intercept, map_rows

if TYPE_CHECKING:
    from scalelatent.kernels.arrays import Array


# A row is an outlier if its squared length is more than this share of the sum over all rows.
OUTLIER_SHARE = 0.9


class NonFiniteError(ValueError):
    """Error for a row with NaN or an infinite value; the engine adds the name of the dataset."""


@dataclass(frozen=True)
class SecondMoments:
    """Reduction to the sum of w x x^T over rows, mapped by the intercept if there is one.

    The sums are per class, or for all rows together if ``n_classes`` is 0. With an intercept, ``outlier``
    (2,) holds the sum of the rows' lengths to the fourth power, and the same sum weighted by the row number;
    :func:`find_outlier` computes the row that outweighs all others from them.

    All sums are float64, because the moments are factorised, and float32 sums would lose small eigenvalues.
    """

    requirements = BlockRequirements()

    n_features: int
    n_classes: int = 0
    class_weight: np.ndarray | None = None
    intercept: Intercept | None = None

    def layout(self) -> Layout:
        m, p = max(self.n_classes, 1), self.n_features + (self.intercept is not None)
        fields = (("moment", (m, p, p)), ("weight", (m,)), ("count", (m,)))
        return Layout(fields if self.intercept is None else (*fields, ("outlier", (2,))))

    def flops_per_row(self) -> float:
        """Return the float32 operations that take as long as a symmetric rank-one update in float64."""
        return 2.0 * self.n_features**2

    def prepare(self, state: object, backend: Backend) -> Backend:
        """Return the backend, because there are no parameters."""
        return backend

    def accumulate(self, prepared: Backend, block: Block, stats: Stats) -> None:
        """Add a block, class by class; raise NonFiniteError for a NaN, an infinity or a too large value."""
        x = map_rows(self.intercept, prepared, block.x, np.float64, "x64")
        weight = np.ones(len(block.x)) if block.weight is None else block.weight
        codes = block.y if self.n_classes else np.zeros(len(block.x), dtype=np.int32)
        assert codes is not None
        if self.class_weight is not None:
            weight = weight * self.class_weight[codes]
        if self.intercept is not None:
            # Rows that are not finite are reported below.
            with np.errstate(over="ignore", invalid="ignore"):
                squares = prepared.to_host((x[:, :-1] * x[:, :-1]).sum(axis=1)) * weight
                stats["outlier"][...] += (squares**2).sum(), squares**2 @ (block.start + np.arange(len(x)))
        # Add one class at a time: BLAS computes A.T @ A of the rows of a class as a symmetric update.
        order = np.argsort(codes, kind="stable")
        starts = np.searchsorted(codes[order], np.arange(max(self.n_classes, 1) + 1))
        root = np.sqrt(weight)
        plain = block.weight is None and self.class_weight is None
        for c in range(len(starts) - 1):
            rows = order[starts[c] : starts[c + 1]]
            if not len(rows):
                continue
            part = x if len(rows) == len(x) else x[rows]
            if not plain:
                part = part * prepared.asarray(root[rows], np.float64)[:, None]
            with np.errstate(invalid="ignore", over="ignore"):
                moment = prepared.to_host(part.T @ part)
            # A NaN or a too large value in any feature appears on the diagonal, and so in its sum.
            if not (length := np.trace(moment)) <= LARGEST_VALUE**2:
                place = find_nonfinite(block, LARGEST_VALUE)
                if place or not np.isfinite(length):
                    raise NonFiniteError(
                        place or f"the second moments of the rows from {block.start} on overflow float64"
                    )
            stats["moment"][c] += moment
            stats["weight"][c] += weight[rows].sum()
            stats["count"][c] += np.count_nonzero(weight[rows])


def find_outlier(stats: Stats) -> int | None:
    """Return the row that has more than nine tenths of the squared lengths of all rows, or None."""
    total = float(np.trace(stats["moment"].sum(axis=0)[:-1, :-1]))
    fourth, numbered = (float(value) for value in stats["outlier"])
    return round(numbered / fourth) if fourth > (OUTLIER_SHARE * total) ** 2 > 0 else None


@dataclass(frozen=True)
class Projection:
    """Row map to the product of rows, mapped by the intercept if there is one, with a matrix; float32."""

    requirements = BlockRequirements(reads_on_gpu=True)

    basis: np.ndarray
    intercept: Intercept | None = None

    def output(self) -> tuple[tuple[int, ...], str]:
        return (self.basis.shape[1],), "float32"

    def prepare(self, backend: Backend) -> tuple[Backend, Array]:
        """Return the backend and the basis in float32 on the device."""
        return backend, backend.asarray(self.basis, np.float32)

    def apply(self, prepared: tuple[Backend, Array], block: Block) -> np.ndarray:
        if place := find_nonfinite(block, LARGEST_VALUE):
            raise NonFiniteError(place)
        backend, basis = prepared
        return backend.to_host(map_rows(self.intercept, backend, block.x, np.float32, "x") @ basis)
