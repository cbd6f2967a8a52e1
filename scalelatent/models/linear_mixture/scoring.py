"""Metrics of mixtures: errors of a classifier that rejects rows; likelihood and clusters of a density."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.data import Dataset
from scalelatent.data.feature_names import without_names
from scalelatent.evaluation.clustering import OnProgress, clustering_accuracy, nmi, read_labels
from scalelatent.evaluation.scoring import BATCH_ROWS, ClassScorer, Scorer

from .model.recognition import errors_at_rejects, probabilities

if TYPE_CHECKING:
    from .estimator import LinearMixture, LinearMixtureClassifier

# Metrics of a density that compare clusters (the best component of each row) with the classes of the rows.
_CLASS_METRICS = ("nmi", "accuracy", "purity")


class RejectScorer(ClassScorer):
    """Metrics of a classifier; ``reject`` are the errors without the 0, 1, 5 and 10 % least certain rows."""

    metrics = (*ClassScorer.metrics, "reject")

    def measure(
        self,
        model: LinearMixtureClassifier,
        dataset: Dataset,
        metrics: Sequence[str],
        progress: OnProgress | None,
    ) -> dict[str, Any]:
        if "reject" not in metrics:
            return super().measure(model, dataset, metrics, progress)
        recorder, others = _RecordingClassifier(model), [name for name in metrics if name != "reject"]
        found = super().measure(recorder, dataset, others, progress)
        guess = recorder.classes_[np.concatenate(recorder.guesses)]
        wrong = guess != dataset.read_y(0, len(dataset))
        found["reject"] = errors_at_rejects(np.concatenate(recorder.certain), wrong)
        return {name: found[name] for name in metrics}


class _RecordingClassifier:
    """Classifier that predicts by another classifier, and records the class and certainty of each row."""

    def __init__(self, model: LinearMixtureClassifier) -> None:
        self._model, self.classes_, self.n_features_in_ = model, model.classes_, model.n_features_in_
        self.guesses: list[np.ndarray] = []
        self.certain: list[np.ndarray] = []

    def predict_proba(self, x: Dataset) -> np.ndarray:
        """Return the class probabilities (n, classes) of rows; record class and certainty of each row."""
        scores = self._model._mapped_rows(x, "scores")
        self.certain.append(self._model._certainty(scores))
        self.guesses.append(scores.argmin(axis=1))
        return probabilities(scores, self._model.temperature_)

    def predict(self, x: Dataset) -> np.ndarray:
        """Return the predicted class of each row; record class and certainty of each row."""
        self.predict_proba(x)
        return np.asarray(self.classes_[self.guesses[-1]])


class DensityScorer(Scorer):
    """Metrics of a density: ``log_likelihood`` in nats per row, and for rows with labels clustering metrics.

    ``nmi``; ``accuracy`` with the best one-to-one pairing of components and classes; ``purity``, where each
    component stands for the most frequent class of its rows.
    """

    metrics = ("log_likelihood", *_CLASS_METRICS)
    default = ("log_likelihood",)
    headline = ("log_likelihood", "nmi")

    def measure(
        self,
        model: LinearMixture,
        dataset: Dataset,
        metrics: Sequence[str],
        progress: OnProgress | None,
    ) -> dict[str, Any]:
        rows, model = model._given_rows(dataset), without_names(model)
        needs_classes = any(name in _CLASS_METRICS for name in metrics)
        labels = read_labels(rows) if needs_classes else None
        components, total, weighed = [], 0.0, 0.0
        for first in range(0, len(rows), BATCH_ROWS):
            stop = min(first + BATCH_ROWS, len(rows))
            x = rows.read_x(first, stop)
            if "log_likelihood" in metrics:
                found, weight = model.score_samples(x), rows.read_weight(first, stop)
                total += float(found.sum() if weight is None else found @ weight)
                weighed += float(len(found) if weight is None else weight.sum())
            if needs_classes:
                components.append(model.predict(x))
            if progress is not None:
                progress(stop, len(rows))
        out: dict[str, Any] = {"log_likelihood": total / weighed if weighed else float("nan")}
        if labels is not None:
            clusters = np.concatenate(components)
            out |= {
                "nmi": nmi(labels, clusters),
                "accuracy": clustering_accuracy(labels, clusters),
                "purity": _purity(labels, clusters),
            }
        return {name: out[name] for name in metrics}

    def test_scores(self, model: LinearMixture, dataset: Dataset, progress: OnProgress) -> dict[str, Any]:
        labelled = dataset.has_y and dataset.y_kind == "labels"
        metrics = self.metrics if labelled else ("log_likelihood",)
        return self.measure(model, dataset, metrics, progress)


def _purity(labels: np.ndarray, clusters: np.ndarray) -> float:
    """Return the share of rows whose class is the most frequent class among the rows of their component."""
    classes, found = (np.unique(column, return_inverse=True)[1] for column in (labels, clusters))
    shared = np.zeros((int(found.max()) + 1, int(classes.max()) + 1), dtype=np.int64)
    np.add.at(shared, (found, classes), 1)
    return float(shared.max(axis=1).sum() / len(classes))
