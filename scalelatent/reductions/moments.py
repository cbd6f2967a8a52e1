"""Second moments of the rows: what EM needs once, before its first pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from scalelatent.contract.finite import LARGEST_VALUE, find_nonfinite
from scalelatent.contract.learners import Backend, Block
from scalelatent.contract.stats import Layout, Stats
from scalelatent.contract.wants import Wants

from .intercept import Intercept, mapped_rows

if TYPE_CHECKING:
    from scalelatent.kernels.arrays import Array


OUTLIER_SHARE = 0.9


class NonFiniteError(ValueError):
    """A row holds NaN or an infinite value; the engine adds the dataset's name."""


@dataclass(frozen=True)
class SecondMoments:
    """Sum of w x x^T over rows, with their intercept if there is one, for each class or for all together.

    About a mean also ``outlier``: the sum of squares of the rows' squared lengths, and the same sum weighted
    by the number of the row, from which :func:`outlier` names a row that outweighs all others.
    """

    # float64 throughout: the moments are factorised, and their small eigenvalues would drown in float32 sums.

    wants = Wants()

    n_features: int
    n_classes: int = 0
    class_weight: np.ndarray | None = None
    intercept: Intercept | None = None

    def layout(self) -> Layout:
        m, p = max(self.n_classes, 1), self.n_features + (self.intercept is not None)
        fields = (("moment", (m, p, p)), ("weight", (m,)), ("count", (m,)))
        return Layout(fields if self.intercept is None else (*fields, ("outlier", (2,))))

    def flops_per_row(self) -> float:
        """A symmetric rank-one update in float64, counted as if in float32."""
        return 2.0 * self.n_features**2

    def prepare(self, state: object, backend: Backend) -> Backend:
        """The backend itself: there are no parameters."""
        return backend

    def accumulate(self, prepared: Backend, block: Block, stats: Stats) -> None:
        """Add a block, class by class."""
        x = mapped_rows(self.intercept, prepared, block.x, np.float64, "x64")
        weight = np.ones(len(block.x)) if block.weight is None else block.weight
        codes = block.y if self.n_classes else np.zeros(len(block.x), dtype=np.int32)
        assert codes is not None
        if self.class_weight is not None:
            weight = weight * self.class_weight[codes]
        if self.intercept is not None:
            # Rows that are not finite are named below.
            with np.errstate(over="ignore", invalid="ignore"):
                squares = prepared.to_host((x[:, :-1] * x[:, :-1]).sum(axis=1)) * weight
                stats["outlier"][...] += (squares**2).sum(), squares**2 @ (block.start + np.arange(len(x)))
        # One group at a time: x[rows] is a copy, and A.T @ A runs as a symmetric update.
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
            # A NaN or a value too large, wherever it is in a row, reaches the diagonal.
            if not (length := np.trace(moment)) <= LARGEST_VALUE**2:
                place = find_nonfinite(block, LARGEST_VALUE)
                if place or not np.isfinite(length):
                    raise NonFiniteError(
                        place or f"the second moments of rows {block.start} and on overflow float64"
                    )
            stats["moment"][c] += moment
            stats["weight"][c] += weight[rows].sum()
            stats["count"][c] += np.count_nonzero(weight[rows])


def outlier(stats: Stats) -> int | None:
    """Return the number of a row with more than nine tenths of the squared lengths of all rows, or None."""
    total = float(np.trace(stats["moment"].sum(axis=0)[:-1, :-1]))
    fourth, numbered = (float(value) for value in stats["outlier"])
    return round(numbered / fourth) if fourth > (OUTLIER_SHARE * total) ** 2 > 0 else None


@dataclass(frozen=True)
class Project:
    """Rows, with their intercept if there is one, times a matrix: float32 (a :class:`~..base.RowMap`)."""

    wants = Wants()

    basis: np.ndarray
    intercept: Intercept | None = None

    def output(self) -> tuple[tuple[int, ...], str]:
        return (self.basis.shape[1],), "float32"

    def prepare(self, backend: Backend) -> tuple[Backend, Array]:
        """Basis in float32 on the device."""
        return backend, backend.asarray(self.basis, np.float32)

    def apply(self, prepared: tuple[Backend, Array], block: Block) -> np.ndarray:
        if place := find_nonfinite(block, LARGEST_VALUE):
            raise NonFiniteError(place)
        backend, basis = prepared
        return backend.to_host(mapped_rows(self.intercept, backend, block.x, np.float32, "x") @ basis)
