"""Recognition of rows: the best component of each class, tangent distance, probabilities, rejects."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from scalelatent.contract.block_requirements import BlockRequirements
from scalelatent.contract.finite import find_nonfinite, find_too_large
from scalelatent.contract.learners import Backend, Block
from scalelatent.contract.stats import Layout, Stats
from scalelatent.kernels.arrays import Array
from scalelatent.models.linear_mixture.kernels import AnyScorer, AnyTangentScores
from scalelatent.models.linear_mixture.kernels.reference import Scores, TangentSpec
from scalelatent.reductions.moments import NonFiniteError
from scalelatent.reductions.temperature import losses_at_temperatures

from .leave_one_out import LeaveOneOut

# Number of rows that tangent distance scores at a time.
_BLOCK_ROWS = 1024
# Tangent distance is computed for this many components per row, which have the best scores without tangents.
N_CANDIDATES = 10
# Upper bound of the training rows that determine the temperature. With 5,000 rows, temperatures of different
# samples would have a spread of 8 %.
TEMPERATURE_ROWS = 20_000
# Shares of rejected rows at which errors are reported.
REJECT_SHARES = (0.0, 0.01, 0.05, 0.1)
# Candidates for the temperature of probabilities, as multiples of the mean score.
TEMPERATURES = np.geomspace(1e-4, 1e1, 101)


class PreparedRecogniser(NamedTuple):
    """Parameters of scores, packed for a backend; ``tangent_scores`` is None without tangent distance."""

    backend: Backend
    scorer: AnyScorer
    tangent_scores: AnyTangentScores | None


@dataclass(frozen=True)
class Recogniser:
    """Rule that scores rows under the best component of each class.

    Attributes
    ----------
    scores : Scores
    starts : ndarray of int64, shape (classes + 1,)
        First component of each class, followed by the number of components.
    tangent_spec : TangentSpec or None
        Tangents of the rows; rows are then recognised by tangent distance.
    """

    scores: Scores
    starts: np.ndarray
    tangent_spec: TangentSpec | None = None

    def prepare(self, backend: Backend) -> PreparedRecogniser:
        """Pack the parameters of the components' scores for the kernels of a backend."""
        scorer = backend.kernel("linear_mixture_make_scorer")(self.scores, self.starts)
        tangent_scores = None
        if self.tangent_spec is not None:
            tangent_scores = backend.kernel("linear_mixture_pack_tangent_scores")(self.scores)
        return PreparedRecogniser(backend, scorer, tangent_scores)

    def recognise(self, prepared: PreparedRecogniser, x: Array) -> tuple[np.ndarray, np.ndarray]:
        """Return the best score of each row in each class, float32 (n, classes), and its component, int32."""
        n_classes = len(self.starts) - 1
        if self.tangent_spec is None:
            return prepared.backend.kernel("linear_mixture_nearest")(prepared.scorer, x, 0, n_classes)
        best, index = np.empty((len(x), n_classes), "f4"), np.empty((len(x), n_classes), "i4")
        for a in range(0, len(x), _BLOCK_ROWS):
            part = slice(a, a + _BLOCK_ROWS)
            best[part], index[part] = self._recognise_by_tangents(prepared, self.tangent_spec, x[part])
        return best, index

    def _recognise_by_tangents(
        self, prepared: PreparedRecogniser, spec: TangentSpec, x: Array
    ) -> tuple[np.ndarray, np.ndarray]:
        backend, scorer, tangent_scores = prepared
        scores = backend.kernel("linear_mixture_all_scores")(scorer, x, 0, len(self.starts) - 1)
        nearest = backend.kernel("linear_mixture_select_best")(scores, N_CANDIDATES)
        make_tangents = backend.kernel("linear_mixture_tangent_rows")
        tangents = make_tangents(x, spec.shape, spec.names, spec.smoothing)
        distances = backend.kernel("linear_mixture_tangent_distance")(tangent_scores, x, tangents, nearest)
        rows = np.arange(len(x))[:, None]
        scores[rows, nearest] = np.minimum(distances, scores[rows, nearest])
        index = np.stack([scores[:, a:b].argmin(axis=1) + a for a, b in pairwise(self.starts)], axis=1)
        return np.take_along_axis(scores, index, axis=1), index.astype(np.int32)


def confidence(scores: np.ndarray) -> np.ndarray:
    """Return 1 - best / second best error of each row of ``scores`` (n, classes); 1 if there is one class."""
    if scores.shape[1] < 2:
        return np.ones(len(scores))
    two = np.partition(np.asarray(scores, dtype=np.float64), 1, axis=1)[:, :2]
    two = np.maximum(two, 0.0)
    return 1.0 - two[:, 0] / np.maximum(two[:, 1], np.finfo(float).tiny)


def probabilities(scores: np.ndarray, temperature: float) -> np.ndarray:
    """Return exp(-score / 2 sigma²), normalised over the classes; ``temperature`` is sigma²."""
    exponent = np.asarray(scores, dtype=np.float64) * (-0.5 / temperature)
    out = np.exp(exponent - exponent.max(axis=1, keepdims=True))
    return out / out.sum(axis=1, keepdims=True)


def reject_curve(certainty: np.ndarray, wrong: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the share of rejected rows and the error of the remaining rows, for 0, 1, … rejected rows.

    The least certain rows are rejected first, and equally certain rows in their order.
    """
    n = len(wrong)
    order = np.argsort(certainty, kind="stable")
    n_wrong = wrong.sum() - np.concatenate([[0], np.cumsum(wrong[order])])[:n]
    return np.arange(n) / n, n_wrong / (n - np.arange(n))


def errors_at_rejects(certainty: np.ndarray, wrong: np.ndarray) -> dict[str, float]:
    """Return the error of the remaining rows at each share of rejected rows in `REJECT_SHARES`."""
    rejected, error = reject_curve(certainty, wrong)
    places = np.minimum(np.searchsorted(rejected, REJECT_SHARES), len(wrong) - 1)
    return {f"{share:.0%}": float(error[i]) for share, i in zip(REJECT_SHARES, places, strict=True)}


@dataclass(frozen=True)
class TemperaturePass:
    """Sum of the log-loss of probabilities at each candidate temperature (a reduction).

    Attributes
    ----------
    recogniser : Recogniser
    temperatures : ndarray, shape (temperatures,)
    leave_one_out : LeaveOneOut or None
        Not None for training rows. The score of a row in its own class is then computed as if the fit had
        not used the row.
    every : int
        Use the rows of the dataset whose numbers are multiples of ``every``.
    """

    recogniser: Recogniser
    temperatures: np.ndarray
    leave_one_out: LeaveOneOut | None = None
    every: int = 1

    @property
    def requirements(self) -> BlockRequirements:
        """Requirements of the pass on blocks of rows: the defaults."""
        return BlockRequirements()

    def layout(self) -> Layout:
        """Return the names and shapes of the sums of log-losses."""
        return Layout((("loss", (len(self.temperatures),)), ("rows", ())))

    def flops_per_row(self) -> float:
        """Return the number of floating-point operations per row, for the scores of all classes."""
        k, p, h = self.recogniser.scores.w.shape
        return 2.0 * p * k * (h + 1)

    def prepare(self, state: object, backend: Backend) -> PreparedRecogniser:
        """Pack the parameters of the components' scores for the kernels of a backend."""
        return self.recogniser.prepare(backend)

    def accumulate(self, prepared: PreparedRecogniser, block: Block, stats: Stats) -> None:
        """Add the log-losses of the rows of a block at each temperature.

        Raises
        ------
        NonFiniteError
            A value is NaN, infinite or beyond float32.
        """
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
        best, index = self.recogniser.recognise(prepared, x)
        scores = np.array(best, dtype=np.float64)
        if self.leave_one_out is not None:
            self._leave_out(self.leave_one_out, prepared, x, y, np.asarray(index), scores)
        gaps = 0.5 * (scores - scores.min(axis=1, keepdims=True))
        stats["loss"][...] += losses_at_temperatures(gaps, y, weight, self.temperatures)
        stats["rows"][...] += weight.sum()

    def _leave_out(
        self,
        leave_one_out: LeaveOneOut,
        prepared: PreparedRecogniser,
        x: Array,
        y: np.ndarray,
        index: np.ndarray,
        scores: np.ndarray,
    ) -> None:
        """Replace in place the score of each row in its own class by the score of a fit without this row."""
        backend, scorer, _ = prepared
        all_scores = backend.kernel("linear_mixture_all_scores")
        for c in np.unique(y):
            own = np.flatnonzero(y == c)
            of_class = np.array(all_scores(scorer, x[own], int(c), int(c) + 1), dtype=np.float64)
            rows = np.asarray(backend.to_host(x[own]), dtype=np.float64)
            first, by_tangents = int(self.recogniser.starts[c]), self.recogniser.tangent_spec is not None
            scores[own, c] = leave_one_out.best_scores(
                rows, index[own, c], scores[own, c], of_class, first, by_tangents
            )
