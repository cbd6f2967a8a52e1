"""What a page shows of any classifier: confusion, reliability, mistakes, tallied block by block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .explained import error_text
from .figures import plot_confusion, plot_reliability
from .page import Picture, count
from .pictures import image_shape, plot_mistakes
from .style import percent

RELIABILITY_BINS = 10
MISTAKES_KEPT = 20
_TINY = np.finfo(np.float64).tiny


@dataclass(frozen=True)
class ClassesSeen:
    """A block of rows and what the model makes of them."""

    start: int  # row number of the first
    x: np.ndarray  # (n, features)
    truth: np.ndarray | None  # int32 (n,)
    guess: np.ndarray  # int32 (n,)
    score: np.ndarray  # float64 (n, classes): probabilities, or shares of votes
    weight: np.ndarray | None  # float64 (n,)

    @property
    def codes(self) -> np.ndarray:
        """True classes where they are known, else predicted ones."""
        return self.guess if self.truth is None else self.truth


@dataclass
class Confusion:
    """True against predicted classes."""

    counts: np.ndarray  # int64 (true classes, predicted classes)
    weight: float = 0.0  # sum of row weights, 1 where there are none
    missed: float = 0.0  # of rows predicted wrong

    @classmethod
    def empty(cls, n_classes: int) -> Confusion:
        return cls(np.zeros((n_classes, n_classes), dtype=np.int64))

    def add(self, seen: ClassesSeen) -> None:
        m = len(self.counts)
        self.counts += np.bincount(seen.codes * m + seen.guess, minlength=m * m).reshape(m, m)
        weight = np.ones(len(seen.guess)) if seen.weight is None else seen.weight
        self.weight += float(weight.sum())
        self.missed += float(weight[seen.codes != seen.guess].sum())

    @property
    def error(self) -> float:
        """Share of rows (by weight) predicted wrong, as the estimator's ``score`` counts them."""
        return self.missed / self.weight if self.weight else float("nan")


@dataclass
class Reliability:
    """How often the predicted class is right, by the probability it was given; and the log-loss."""

    counts: np.ndarray  # by row weight, in 10 bins of equal width in probability, as the next two
    confidence: np.ndarray  # summed probability
    hits: np.ndarray
    loss: float = 0.0  # summed -log P(true class), nats, by row weight

    @classmethod
    def empty(cls) -> Reliability:
        return cls(*np.zeros((3, RELIABILITY_BINS)))

    def add(self, seen: ClassesSeen) -> None:
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
class Mistakes:
    """The rows that were predicted wrong with the highest score."""

    # (score, row, true code, predicted code, x), at most 20
    found: list[tuple[float, int, int, int, np.ndarray]] = field(default_factory=list)

    def add(self, seen: ClassesSeen) -> None:
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


def confusion_text(confusion: Confusion) -> str:
    """The error with its rows and interval."""
    rows = int(confusion.counts.sum())
    wrong = rows - int(confusion.counts.trace())
    if abs(confusion.weight - rows) > 1e-9 * rows:
        return f"{percent(confusion.error)} by weight ({wrong:,} of {count(rows, 'row')})"
    return error_text(confusion.error, rows, wrong=wrong)


def calibration_text(kept: Reliability, more: str = "") -> str:
    """The calibration error in words."""
    total = max(float(kept.counts.sum()), 1e-300)
    promised, right = float(kept.confidence.sum()) / total, float(kept.hits.sum()) / total
    words = [
        "The mean distance, in percentage points, between the probability that the predicted class is given "
        "and the share of rows in which it is right, over ten bins of probability, weighted by their rows. "
        "At 0 % a probability of 90 % is right nine times in ten.",
        f"Here the predicted class is given {percent(promised)} on average and is right in {percent(right)} "
        f"of the rows: the model is {'underconfident' if right >= promised else 'overconfident'}.",
    ]
    if more:
        words.append(more)
    words.append(
        "It says nothing of which class wins. Before probabilities are used as such: "
        "sklearn.calibration.CalibratedClassifierCV."
    )
    return " ".join(words)


def confusion_picture(confusion: Confusion, names: Sequence[str], rows: str) -> Picture:
    off = confusion.counts - np.diag(np.diag(confusion.counts))
    caption = (
        f"Rows of each true class by predicted class, {rows} rows; the bars are each class's error. "
        "Mistakes have a colour scale of their own."
    )
    alt = f"Confusion matrix of {count(len(names), 'class', 'classes')}: {percent(confusion.error)} wrong."
    if off.any():
        i, j = np.unravel_index(off.argmax(), off.shape)
        often = f"Most often, {names[i]} is taken for {names[j]} ({count(int(off[i, j]), 'row')})."
        caption, alt = f"{caption} {often}", f"{alt} {often}"
    return Picture(
        "confusion",
        "Confusion matrix",
        caption,
        alt,
        plot_confusion(confusion.counts, names),
        wide=len(names) > 12,
    )


def mistakes_picture(
    mistakes: Mistakes,
    names: Sequence[str],
    feature_shape: Sequence[int],
    rows: str,
    score: str = "probability",
) -> Picture | None:
    """The surest mistakes as images; None where there is none, or rows are no images."""
    found, shape = mistakes.found, image_shape(feature_shape)
    if shape is None or not found:
        return None
    truth, guess = [names[row[2]] for row in found], [names[row[3]] for row in found]
    figure = plot_mistakes(
        np.stack([row[4] for row in found]), truth, guess, [row[0] for row in found], shape
    )
    numbers = ", ".join(str(row[1]) for row in found)
    caption = (
        f"The {rows} rows that are wrong with the highest {score}: true → predicted class. Row numbers: "
        f"{numbers}."
    )
    alt = (
        "Images predicted wrong: "
        + ", ".join(f"{t} taken for {g}" for t, g in zip(truth, guess, strict=True))
        + "."
    )
    return Picture("mistakes", "Surest mistakes", caption, alt, figure, wide=len(found) > 5)


def reliability_picture(kept: Reliability, rows: str) -> Picture:
    """How often the predicted class is right, by its probability."""
    caption = (
        f"How often the predicted class is right, by the probability it was given, {rows} rows. On the "
        "dashed line a probability says what it promises; the mean distance is "
        f"{percent(kept.calibration_error)}. Above the line the model is underconfident, below overconfident."
    )
    alt = (
        f"Reliability curve; calibration error {percent(kept.calibration_error)}, log-loss "
        f"{kept.log_loss:.3f} nats."
    )
    return Picture(
        "reliability",
        "Reliability of the probabilities",
        caption,
        alt,
        plot_reliability(kept.counts, kept.confidence, kept.hits),
    )
