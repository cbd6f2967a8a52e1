"""Report parts that all classifiers share: confusion, reliability, mistakes, counted over blocks of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .figures import plot_confusion, plot_reliability
from .interpretation import format_error
from .page import Picture, count
from .pictures import image_shape, plot_mistakes
from .style import percent

RELIABILITY_BINS = 10
MISTAKES_KEPT = 20
_TINY = np.finfo(np.float64).tiny


@dataclass(frozen=True)
class ClassifiedBlock:
    """Block of rows with their true and predicted classes."""

    start: int  # number of the first row
    x: np.ndarray  # (n, features)
    truth: np.ndarray | None  # int32 (n,)
    guess: np.ndarray  # int32 (n,)
    score: np.ndarray  # float64 (n, classes): probabilities, or shares of the votes of an ensemble
    weight: np.ndarray | None  # float64 (n,)

    @property
    def class_indices(self) -> np.ndarray:
        """Index of the true class of each row, or of the predicted class if true classes are unknown."""
        return self.guess if self.truth is None else self.truth


@dataclass
class Confusion:
    """Confusion matrix: number of rows for each pair of true and predicted class."""

    counts: np.ndarray  # int64 (true classes, predicted classes)
    weight: float = 0.0  # sum of the row weights; a row without a weight counts 1
    missed: float = 0.0  # sum of the weights of misclassified rows

    @classmethod
    def empty(cls, n_classes: int) -> Confusion:
        return cls(np.zeros((n_classes, n_classes), dtype=np.int64))

    def add(self, seen: ClassifiedBlock) -> None:
        m = len(self.counts)
        self.counts += np.bincount(seen.class_indices * m + seen.guess, minlength=m * m).reshape(m, m)
        weight = np.ones(len(seen.guess)) if seen.weight is None else seen.weight
        self.weight += float(weight.sum())
        self.missed += float(weight[seen.class_indices != seen.guess].sum())

    @property
    def error(self) -> float:
        """Weighted share of misclassified rows: 1 minus the ``score`` of the estimator."""
        return self.missed / self.weight if self.weight else float("nan")


@dataclass
class Reliability:
    """Share of correct predictions by predicted probability, and the log-loss."""

    # The three arrays have one value for each of 10 bins of predicted probability, each 0.1 wide.
    counts: np.ndarray  # sum of the weights of the rows in the bin
    confidence: np.ndarray  # sum of weight x probability of the predicted class over the rows in the bin
    hits: np.ndarray  # sum of the weights of the rows in the bin whose predicted class is right
    loss: float = 0.0  # weighted sum of -log P(true class), in nats

    @classmethod
    def empty(cls) -> Reliability:
        return cls(*np.zeros((3, RELIABILITY_BINS)))

    def add(self, seen: ClassifiedBlock) -> None:
        rows, bins = np.arange(len(seen.guess)), len(self.counts)
        weight = np.ones(len(rows)) if seen.weight is None else seen.weight
        top = seen.score[rows, seen.guess]
        which = np.minimum((top * bins).astype(np.int64), bins - 1)
        self.counts += np.bincount(which, weights=weight, minlength=bins)
        self.confidence += np.bincount(which, weights=weight * top, minlength=bins)
        self.hits += np.bincount(which, weights=weight * (seen.class_indices == seen.guess), minlength=bins)
        self.loss -= float(weight @ np.log(np.maximum(seen.score[rows, seen.class_indices], _TINY)))

    @property
    def calibration_error(self) -> float:
        """Expected calibration error: mean distance between probability and share of correct rows."""
        return float(np.abs(self.hits - self.confidence).sum() / max(self.counts.sum(), _TINY))

    @property
    def log_loss(self) -> float:
        """Mean of -log P(true class), in nats."""
        return self.loss / max(float(self.counts.sum()), _TINY)


@dataclass
class Mistakes:
    """The misclassified rows whose predicted class has the highest scores."""

    # At most MISTAKES_KEPT tuples (score, row number, index of true class, index of predicted class, x).
    found: list[tuple[float, int, int, int, np.ndarray]] = field(default_factory=list)

    def add(self, seen: ClassifiedBlock) -> None:
        """Add the misclassified rows of a block, and keep those with the highest scores."""
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


def describe_confusion(confusion: Confusion) -> str:
    """Return the error as text, with its number of rows and its 95 % interval."""
    rows = int(confusion.counts.sum())
    wrong = rows - int(confusion.counts.trace())
    if abs(confusion.weight - rows) > 1e-9 * rows:
        return f"{percent(confusion.error)} by weight ({wrong:,} of {count(rows, 'row')})"
    return format_error(confusion.error, rows, wrong=wrong)


def explain_calibration(reliability: Reliability, more: str = "") -> str:
    """Return an explanation of the calibration error; ``more`` is added before the last sentence."""
    total = max(float(reliability.counts.sum()), 1e-300)
    promised, right = float(reliability.confidence.sum()) / total, float(reliability.hits.sum()) / total
    words = [
        "The mean distance, in percentage points, between the probability of the predicted class and the "
        "share of rows in which that class is right, over ten bins of probability weighted by their rows. "
        "At 0 %, predictions with a probability of 90 % are right nine times in ten.",
        f"Here the mean probability of the predicted class is {percent(promised)}, and that class is right "
        f"in {percent(right)} of the rows: the model is "
        f"{'underconfident' if right >= promised else 'overconfident'}.",
    ]
    if more:
        words.append(more)
    words.append(
        "The calibration error does not measure which class is predicted. To use the probabilities "
        "themselves, calibrate them first with sklearn.calibration.CalibratedClassifierCV."
    )
    return " ".join(words)


def draw_confusion(confusion: Confusion, names: Sequence[str], rows: str) -> Picture:
    off = confusion.counts - np.diag(np.diag(confusion.counts))
    caption = (
        f"Number of {rows} rows by true and predicted class; the bars show the error of each class. "
        "Mistakes have a separate colour scale."
    )
    alt = f"Confusion matrix of {count(len(names), 'class', 'classes')}: {percent(confusion.error)} wrong."
    if off.any():
        i, j = np.unravel_index(off.argmax(), off.shape)
        often = (
            f"The most frequent mistake predicts {names[j]} for {names[i]} ({count(int(off[i, j]), 'row')})."
        )
        caption, alt = f"{caption} {often}", f"{alt} {often}"
    return Picture(
        "confusion",
        "Confusion matrix",
        caption,
        alt,
        plot_confusion(confusion.counts, names),
        wide=len(names) > 12,
    )


def draw_mistakes(
    mistakes: Mistakes,
    names: Sequence[str],
    feature_shape: Sequence[int],
    rows: str,
    score: str = "probability",
) -> Picture | None:
    """Return a picture of the mistakes as images, or None without mistakes or if rows are not images."""
    found, shape = mistakes.found, image_shape(feature_shape)
    if shape is None or not found:
        return None
    truth, guess = [names[row[2]] for row in found], [names[row[3]] for row in found]
    figure = plot_mistakes(
        np.stack([row[4] for row in found]), truth, guess, [row[0] for row in found], shape
    )
    numbers = ", ".join(str(row[1]) for row in found)
    caption = (
        f"Misclassified {rows} rows with the highest {score}, as true → predicted class. Row numbers: "
        f"{numbers}."
    )
    alt = (
        "Misclassified images: "
        + ", ".join(f"{g} predicted for {t}" for t, g in zip(truth, guess, strict=True))
        + "."
    )
    return Picture("mistakes", "Most confident mistakes", caption, alt, figure, wide=len(found) > 5)


def draw_reliability(reliability: Reliability, rows: str) -> Picture:
    """Return a picture of the share of correct predictions against the predicted probability."""
    caption = (
        f"Share of {rows} rows whose predicted class is right, by the probability of that class. On the "
        "dashed line, both are equal; the mean distance from the line is "
        f"{percent(reliability.calibration_error)}. Above the line the model is underconfident, below it "
        "overconfident."
    )
    alt = (
        f"Reliability curve; calibration error {percent(reliability.calibration_error)}, log-loss "
        f"{reliability.log_loss:.3f} nats."
    )
    return Picture(
        "reliability",
        "Reliability of the probabilities",
        caption,
        alt,
        plot_reliability(reliability.counts, reliability.confidence, reliability.hits),
    )
