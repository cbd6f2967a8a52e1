"""What is remembered of the rows as they stream by: each tally is small, whatever the number of rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .report_wiring import Wiring, squashed

__all__ = ["Confident", "Confusion", "Mistakes", "Prototypes", "Reliability", "RowsSeen", "Sample", "Votes"]

RELIABILITY_BINS = 10
MISTAKES_KEPT = 20
_TINY = np.finfo(np.float64).tiny


@dataclass(frozen=True)
class RowsSeen:
    """A block of rows and what the model makes of them.

    Attributes
    ----------
    start : int
        Row number of the first.
    x : ndarray, shape (n, features)
    truth : ndarray of int32, shape (n,), or None
    guess : ndarray of int32, shape (n,)
    score : ndarray of float64, shape (n, classes)
        Probabilities, or shares of votes.
    h : ndarray of float32, shape (n, total_dim)
    weight : ndarray of float64, shape (n,), or None
    """

    start: int
    x: np.ndarray
    truth: np.ndarray | None
    guess: np.ndarray
    score: np.ndarray
    h: np.ndarray
    weight: np.ndarray | None

    @property
    def codes(self) -> np.ndarray:
        """True classes where they are known, else predicted ones."""
        return self.guess if self.truth is None else self.truth


@dataclass
class Confusion:
    """True against predicted classes.

    Attributes
    ----------
    counts : ndarray of int64, shape (classes, classes)
        Rows of each true class (row) by predicted class (column).
    weight, missed : float
        Sum of row weights (1 where there are none), and of those predicted wrong.

    Examples
    --------
    >>> Confusion(np.array([[3, 1], [0, 4]]), 8.0, 1.0).error
    0.125
    """

    counts: np.ndarray
    weight: float = 0.0
    missed: float = 0.0

    @classmethod
    def empty(cls, n_classes: int) -> Confusion:
        """Before the first row."""
        return cls(np.zeros((n_classes, n_classes), dtype=np.int64))

    def add(self, seen: RowsSeen) -> None:
        """Count a block."""
        m = len(self.counts)
        self.counts += np.bincount(seen.codes * m + seen.guess, minlength=m * m).reshape(m, m)
        weight = np.ones(len(seen.guess)) if seen.weight is None else seen.weight
        self.weight += float(weight.sum())
        self.missed += float(weight[seen.codes != seen.guess].sum())

    @property
    def error(self) -> float:
        """Share of rows (by weight) predicted wrong, as the estimator's ``score`` counts them."""
        return self.missed / self.weight if self.weight else float("nan")

    @property
    def class_error(self) -> np.ndarray:
        """Share of each true class predicted wrong; NaN for a class without rows."""
        total = self.counts.sum(axis=1)
        return np.where(total > 0, 1 - np.diag(self.counts) / np.maximum(total, 1), np.nan)


@dataclass
class Reliability:
    """How often the predicted class is right, by the probability it was given; and the log-loss.

    Attributes
    ----------
    counts, confidence, hits : ndarray of float64, shape (10,)
        Rows in bins of equal width in probability, their summed probability, and those that were right; all
        by row weight (1 where there are none).
    loss : float
        Summed -log P(true class), nats, by row weight.
    """

    counts: np.ndarray
    confidence: np.ndarray
    hits: np.ndarray
    loss: float = 0.0

    @classmethod
    def empty(cls) -> Reliability:
        """Before the first row."""
        return cls(*np.zeros((3, RELIABILITY_BINS)))

    def add(self, seen: RowsSeen) -> None:
        """Count a block."""
        rows, bins = np.arange(len(seen.guess)), len(self.counts)
        weight = np.ones(len(rows)) if seen.weight is None else seen.weight
        top = seen.score[rows, seen.guess]
        which = np.minimum((top * bins).astype(np.int64), bins - 1)
        self.counts += np.bincount(which, weights=weight, minlength=bins)
        self.confidence += np.bincount(which, weights=weight * top, minlength=bins)
        self.hits += np.bincount(which, weights=weight * (seen.codes == seen.guess), minlength=bins)
        self.loss -= float(weight @ np.log(np.maximum(seen.score[rows, seen.codes], _TINY)))

    @property
    def calibration_error(self) -> float:
        """Mean distance between probability and share right, over rows (expected calibration error)."""
        return float(np.abs(self.hits - self.confidence).sum() / max(self.counts.sum(), _TINY))

    @property
    def log_loss(self) -> float:
        """Mean -log P(true class), nats."""
        return self.loss / max(float(self.counts.sum()), _TINY)


@dataclass
class Sample:
    """Squashed latents of evenly spaced rows.

    Attributes
    ----------
    rows : ndarray of int64, shape (k,)
        Row numbers.
    codes : ndarray of int32, shape (k,)
    points : list of ndarray of float32, shape (k, dimension)
        For each class, the squashed vectors of its capsule (equation 3.1).
    """

    wiring: Wiring
    rows: np.ndarray
    codes: np.ndarray
    points: list[np.ndarray]

    @classmethod
    def empty(cls, wiring: Wiring, n_rows: int, sample_rows: int) -> Sample:
        """Choose the rows."""
        k = max(1, min(n_rows, sample_rows))
        rows = np.arange(k, dtype=np.int64) * n_rows // k
        return cls(wiring, rows, np.zeros(k, np.int32), [np.zeros((k, d), np.float32) for d in wiring.dims])

    def add(self, seen: RowsSeen) -> None:
        """Keep those of the block's rows that were chosen."""
        first, last = np.searchsorted(self.rows, [seen.start, seen.start + len(seen.x)])
        here = self.rows[first:last] - seen.start
        self.codes[first:last] = seen.codes[here]
        for points, ((member, capsule),) in zip(self.points, self.wiring.capsules, strict=True):
            points[first:last] = squashed(seen.h[here], member, capsule)


@dataclass
class Votes:
    """Votes of an all-versus-all model.

    Attributes
    ----------
    wins : ndarray of int64, shape (classes, members)
        Rows of each class for which a member's first class won.
    rows : ndarray of int64, shape (classes,)
    """

    wiring: Wiring
    wins: np.ndarray
    rows: np.ndarray

    @classmethod
    def empty(cls, wiring: Wiring) -> Votes:
        """Before the first row."""
        m = wiring.n_classes
        return cls(wiring, np.zeros((m, len(wiring.pairs)), np.int64), np.zeros(m, np.int64))

    def add(self, seen: RowsSeen) -> None:
        """Count a block."""
        m, members = self.wins.shape
        square = np.square(seen.h, dtype=np.float64)
        # All members have two capsules of one dimension, stacked: one reshape gives every length.
        length = square.reshape(len(square), members, 2, -1).sum(axis=3)
        first = (length[:, :, 0] >= length[:, :, 1]).astype(np.float64)
        one_hot = np.zeros((len(square), m))
        one_hot[np.arange(len(square)), seen.codes] = 1
        self.wins += (one_hot.T @ first).astype(np.int64)
        self.rows += np.bincount(seen.codes, minlength=m)

    @property
    def shares(self) -> np.ndarray:
        """(classes, classes): of the m - 1 votes a class can get, its share from rows of each true class."""
        m, total = len(self.rows), np.maximum(self.rows, 1)[:, None]
        got = np.zeros((m, m))
        for r, (a, b) in enumerate(self.wiring.pairs):
            got[:, a] += self.wins[:, r]
            got[:, b] += self.rows - self.wins[:, r]
        return np.where(self.rows[:, None] > 0, got / total / (m - 1), np.nan)

    @property
    def pair_wins(self) -> np.ndarray:
        """(classes, classes): of rows of class i, the share that member {i, j} gives to i; else NaN."""
        out = np.full((len(self.rows),) * 2, np.nan)
        for r, (a, b) in enumerate(self.wiring.pairs):
            out[a, b] = self.wins[a, r] / self.rows[a] if self.rows[a] else np.nan
            out[b, a] = 1 - self.wins[b, r] / self.rows[b] if self.rows[b] else np.nan
        return out


@dataclass
class Confident:
    """The most confidently recognised row of each class.

    Attributes
    ----------
    rows : ndarray of int64, shape (classes,)
        Row number, -1 where the class has no row.
    score : ndarray of float64, shape (classes,)
    x : ndarray, shape (classes, features)
    """

    rows: np.ndarray
    score: np.ndarray
    x: np.ndarray

    @classmethod
    def empty(cls, n_classes: int, n_features: int, dtype: Any) -> Confident:
        """Before the first row."""
        return cls(
            np.full(n_classes, -1), np.full(n_classes, -np.inf), np.zeros((n_classes, n_features), dtype)
        )

    def add(self, seen: RowsSeen) -> None:
        """Keep better rows; of equals the first."""
        for c in np.unique(seen.codes):
            own = np.flatnonzero(seen.codes == c)
            best = own[seen.score[own, c].argmax()]
            if seen.score[best, c] > self.score[c]:
                self.rows[c], self.score[c], self.x[c] = seen.start + best, seen.score[best, c], seen.x[best]


@dataclass
class Prototypes:
    """For each class and element of its capsule, the row that the element contributes most to (equation 3.2).

    Attributes
    ----------
    rows : ndarray of int64, shape (classes, largest dimension)
        Row number, -1 where there is no such element, or no row.
    score : ndarray of float64, shape (classes, largest dimension)
        (h_ia / |h|)^2, in all-versus-all the mean over the members that know the class.
    x : ndarray, shape (classes, largest dimension, features)
    """

    wiring: Wiring
    rows: np.ndarray
    score: np.ndarray
    x: np.ndarray

    @classmethod
    def empty(cls, wiring: Wiring, n_features: int, dtype: Any) -> Prototypes:
        """Before the first row."""
        shape = (wiring.n_classes, max(wiring.dims))
        return cls(wiring, np.full(shape, -1), np.full(shape, -np.inf), np.zeros((*shape, n_features), dtype))

    def add(self, seen: RowsSeen) -> None:
        """Keep better rows; of equals the first."""
        for c in np.unique(seen.codes):
            own = np.flatnonzero(seen.codes == c)
            h, capsules = seen.h[own], self.wiring.capsules[c]
            share = np.mean([squashed(h, *capsule) ** 2 for capsule in capsules], axis=0)
            best = np.argmax(share, axis=0)
            for a, i in enumerate(best):
                if share[i, a] > self.score[c, a]:
                    self.score[c, a], self.rows[c, a] = share[i, a], seen.start + own[i]
                    self.x[c, a] = seen.x[own[i]]


@dataclass
class Mistakes:
    """The rows that were predicted wrong with the highest score.

    Attributes
    ----------
    found : list of (score, row, true code, predicted code, x)
        Highest score first, at most 20.
    """

    found: list[tuple[float, int, int, int, np.ndarray]] = field(default_factory=list)

    def add(self, seen: RowsSeen) -> None:
        """Keep the worst."""
        if seen.truth is None:
            return
        wrong = np.flatnonzero(seen.truth != seen.guess)
        score = seen.score[wrong, seen.guess[wrong]]
        for k in np.argsort(-score, kind="stable")[:MISTAKES_KEPT]:
            i = wrong[k]
            row = (
                float(score[k]),
                seen.start + int(i),
                int(seen.truth[i]),
                int(seen.guess[i]),
                seen.x[i].copy(),
            )
            self.found.append(row)
        self.found = sorted(self.found, key=lambda row: (-row[0], row[1]))[:MISTAKES_KEPT]
