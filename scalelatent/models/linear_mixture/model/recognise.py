"""From rows to classes: the best pancake of each, also by tangent distance, and what its score says."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from scalelatent.contract.finite import find_nonfinite, find_too_large
from scalelatent.contract.learners import Backend, Block
from scalelatent.contract.stats import Layout, Stats
from scalelatent.contract.wants import Wants
from scalelatent.kernels.arrays import Array
from scalelatent.models.linear_mixture.kernels import PackedPlanes, PackedScores
from scalelatent.models.linear_mixture.kernels.reference import Frame, Scores
from scalelatent.reductions.moments import NonFiniteError
from scalelatent.reductions.temperature import losses_at_temperatures

from .held_out import FittedRows

# Rows whose scores under all sub-classes lie in memory at a time.
_ROWS = 1024
# Tangent distance is computed for this many sub-classes of a row, those with the best scores.
N_CANDIDATES = 10
# Rows of the fit by which the temperature is chosen, at most.
HELD_OUT_ROWS = 20_000
# Shares of the rows that are rejected, in scores.
REJECTED = (0.0, 0.01, 0.05, 0.1)
# Temperatures among which that of probabilities is chosen, as multiples of the mean score.
TEMPERATURES = np.geomspace(1e-4, 1e1, 101)


class Recogniser(NamedTuple):
    """Scores as the kernels want them, also those of tangent distance."""

    backend: Backend
    scorer: PackedScores
    planes: PackedPlanes | None


@dataclass(frozen=True)
class PancakeRows:
    """Rows to scores of classes, or to the best sub-classes."""

    scores: Scores
    starts: np.ndarray  # int64: first sub-class of each class, and their number
    # or "sub-classes": float32 (rows, classes), the smaller the better; or int32, the best of each class
    what: str = "scores"
    frame: Frame | None = None  # tangents of the rows, for tangent distance

    @property
    def wants(self) -> Wants:
        """Nothing."""
        return Wants()

    def output(self) -> tuple[tuple[int, ...], str]:
        """(shape of a row, dtype)."""
        return (len(self.starts) - 1,), "float32" if self.what == "scores" else "int32"

    def prepare(self, backend: Backend) -> Recogniser:
        scorer = backend.kernel("linear_mixture_make_scorer")(self.scores, self.starts)
        planes = None
        if self.frame is not None:
            planes = backend.kernel("linear_mixture_make_planes")(self.scores)
        return Recogniser(backend, scorer, planes)

    def apply(self, prepared: Recogniser, block: Block) -> np.ndarray:
        """Output rows of the block."""
        if place := find_too_large(block) or find_nonfinite(block):
            raise NonFiniteError(place)
        best, index = self.recognise(prepared, prepared.backend.asarray(block.x, np.float32, "x"))
        return best.astype(np.float32, copy=False) if self.what == "scores" else index

    def recognise(self, prepared: Recogniser, x: Array) -> tuple[np.ndarray, np.ndarray]:
        """Score of each class and its best sub-class, (n, classes) each."""
        classes = len(self.starts) - 1
        if self.frame is None:
            return prepared.backend.kernel("linear_mixture_nearest")(prepared.scorer, x, 0, classes)
        best, index = np.empty((len(x), classes), "f4"), np.empty((len(x), classes), "i4")
        for a in range(0, len(x), _ROWS):
            part = slice(a, a + _ROWS)
            best[part], index[part] = self._by_tangents(prepared, x[part])
        return best, index

    def _by_tangents(self, prepared: Recogniser, x: Array) -> tuple[np.ndarray, np.ndarray]:
        backend, scorer, planes = prepared
        frame, starts = self.frame, self.starts
        assert frame is not None
        scores = backend.kernel("linear_mixture_all_scores")(scorer, x, 0, len(starts) - 1)
        nearest = backend.kernel("linear_mixture_few_best")(scores, N_CANDIDATES)
        tangents = backend.kernel("linear_mixture_tangent_rows")(x, frame.shape, frame.names, frame.smoothing)
        distances = backend.kernel("linear_mixture_tangent_distance")(planes, x, tangents, nearest)
        rows = np.arange(len(x))[:, None]
        found = scores.copy()
        found[rows, nearest] = np.minimum(distances, scores[rows, nearest])
        index = np.stack([found[:, a:b].argmin(axis=1) + a for a, b in pairwise(starts)], axis=1)
        return np.take_along_axis(found, index, axis=1), index.astype(np.int32)


def confidence(scores: np.ndarray) -> np.ndarray:
    """1 - best / second class of rows (n, classes) of errors: 0 where two are alike; 1 for one class."""
    if scores.shape[1] < 2:
        return np.ones(len(scores))
    two = np.partition(np.asarray(scores, dtype=np.float64), 1, axis=1)[:, :2]
    two = np.maximum(two, 0.0)
    return 1.0 - two[:, 0] / np.maximum(two[:, 1], np.finfo(float).tiny)


def probabilities(scores: np.ndarray, temperature: float) -> np.ndarray:
    """exp(-score / 2 sigma²), normalised over the classes."""
    exponent = np.asarray(scores, dtype=np.float64) * (-0.5 / temperature)
    out = np.exp(exponent - exponent.max(axis=1, keepdims=True))
    return out / out.sum(axis=1, keepdims=True)


def reject_curve(certainty: np.ndarray, wrong: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(share rejected, error rate of the rest) when 0, 1, … of the least certain rows are rejected; of equals
    the first.
    """
    n = len(wrong)
    order = np.argsort(certainty, kind="stable")
    left = wrong.sum() - np.concatenate([[0], np.cumsum(wrong[order])])[:n]
    return np.arange(n) / n, left / (n - np.arange(n))


def errors_at_rejects(certainty: np.ndarray, wrong: np.ndarray) -> dict[str, float]:
    """Error rate of the rows that are left when these shares of the least certain are rejected."""
    rejected, error = reject_curve(certainty, wrong)
    places = np.minimum(np.searchsorted(rejected, REJECTED), len(wrong) - 1)
    return {f"{share:.0%}": float(error[i]) for share, i in zip(REJECTED, places, strict=True)}


@dataclass(frozen=True)
class TemperaturePass:
    """Log-loss of probabilities at each of some temperatures: ``loss`` (temperatures,), and ``rows``."""

    rows: PancakeRows
    temperatures: np.ndarray
    # rows are those of the fit: the score of a row's class is what it would be had it not been there
    fitted: FittedRows | None = None
    every: int = 1  # of such rows one in so many is looked at

    @property
    def wants(self) -> Wants:
        """Nothing."""
        return Wants()

    def layout(self) -> Layout:
        """Fields of the statistic."""
        return Layout((("loss", (len(self.temperatures),)), ("rows", ())))

    def flops_per_row(self) -> float:
        """The scores of all classes."""
        k, p, h = self.rows.scores.w.shape
        return 2.0 * p * k * (h + 1)

    def prepare(self, state: object, backend: Backend) -> Recogniser:
        """As for the scores."""
        return self.rows.prepare(backend)

    def accumulate(self, prepared: Recogniser, block: Block, stats: Stats) -> None:
        """Add a block."""
        assert block.y is not None
        if place := find_too_large(block) or find_nonfinite(block):
            raise NonFiniteError(place)
        x, y, weight = block.x, block.y, block.weight
        weight = np.ones(len(y)) if weight is None else weight
        if self.every > 1:
            some = np.flatnonzero((block.start + np.arange(len(y))) % self.every == 0)
            if not len(some):
                return
            x, y, weight = x[some], y[some], weight[some]
        x = prepared.backend.asarray(x, np.float32, "x")
        scores, index = self.rows.recognise(prepared, x)
        scores = np.array(scores, dtype=np.float64)
        if self.fitted is not None:
            backend, scorer, _ = prepared
            for c in np.unique(y):
                own = np.flatnonzero(y == c)
                all_own = np.array(
                    backend.kernel("linear_mixture_all_scores")(scorer, x[own], int(c), int(c) + 1), "f8"
                )
                rows = np.asarray(backend.to_host(x[own]), dtype=np.float64)
                q = np.asarray(index)[own, c]
                scores[own, c] = self.fitted.held_out(
                    rows, q, scores[own, c], all_own, int(self.rows.starts[c]), self.rows.frame is not None
                )
        gaps = 0.5 * (scores - scores.min(axis=1, keepdims=True))
        stats["loss"][...] += losses_at_temperatures(gaps, y, weight, self.temperatures)
        stats["rows"][...] += weight.sum()
