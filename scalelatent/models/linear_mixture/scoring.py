"""Scores of mixtures: of a classifier also errors with rejects; of a density likelihood and clusters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.data import Dataset
from scalelatent.evaluation.clustering import Progress, clustering_accuracy, nmi, read_labels
from scalelatent.evaluation.scoring import ClassScorer, Scorer

from .model.recognise import errors_at_rejects, probabilities

if TYPE_CHECKING:
    from .estimator import LinearMixture, LinearMixtureClassifier

# Metrics of a density that hold its components against classes.
_OF_CLASSES = ("nmi", "accuracy", "purity")


class RejectScorer(ClassScorer):
    """Of a classifier; ``reject``: the errors when 0, 1, 5 and 10 % of the rows are rejected."""

    metrics = (*ClassScorer.metrics, "reject")

    def measure(
        self,
        model: LinearMixtureClassifier,
        dataset: Dataset,
        metrics: Sequence[str],
        batch_rows: int,
        progress: Progress | None,
    ) -> dict[str, Any]:
        if "reject" not in metrics:
            return super().measure(model, dataset, metrics, batch_rows, progress)
        asked, others = _Asked(model), [name for name in metrics if name != "reject"]
        found = super().measure(asked, dataset, others, batch_rows, progress)
        guess = asked.classes_[np.concatenate(asked.guesses)]
        wrong = guess != dataset.read_y(0, len(dataset))
        found["reject"] = errors_at_rejects(np.concatenate(asked.certain), wrong)
        return {name: found[name] for name in metrics}


class _Asked:
    """A model that remembers how certain it was of the rows that it was asked about."""

    def __init__(self, model: LinearMixtureClassifier) -> None:
        self._model, self.classes_, self.n_features_in_ = model, model.classes_, model.n_features_in_
        self.guesses: list[np.ndarray] = []
        self.certain: list[np.ndarray] = []

    def predict_proba(self, x: np.ndarray) -> np.ndarray:
        """Probabilities of classes."""
        scores = self._model._mapped_rows(x, "scores")
        self.certain.append(self._model._certainty(scores))
        self.guesses.append(scores.argmin(axis=1))
        return probabilities(scores, self._model.temperature_)

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Classes."""
        self.predict_proba(x)
        return np.asarray(self.classes_[self.guesses[-1]])


class DensityScorer(Scorer):
    """Of a density: ``log_likelihood``, nats a row; of rows with labels how its components are their classes.

    ``nmi``; ``accuracy`` by the best one-to-one pairing of components and classes; ``purity``: each component
    stands for the class that most of its rows have.
    """

    metrics = ("log_likelihood", *_OF_CLASSES)
    default = ("log_likelihood",)
    headline = ("log_likelihood", "nmi")

    def measure(
        self,
        model: LinearMixture,
        dataset: Dataset,
        metrics: Sequence[str],
        batch_rows: int,
        progress: Progress | None,
    ) -> dict[str, Any]:
        rows = model._given_rows(dataset)
        wants_classes = any(name in _OF_CLASSES for name in metrics)
        labels = read_labels(rows) if wants_classes else None
        components, total, weighed = [], 0.0, 0.0
        for first in range(0, len(rows), batch_rows):
            stop = min(first + batch_rows, len(rows))
            x = rows.read_x(first, stop)
            if "log_likelihood" in metrics:
                found, weight = model.score_samples(x), rows.read_weight(first, stop)
                total += float(found.sum() if weight is None else found @ weight)
                weighed += float(len(found) if weight is None else weight.sum())
            if wants_classes:
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

    def test_scores(self, model: LinearMixture, dataset: Dataset, progress: Progress) -> dict[str, Any]:
        labelled = dataset.has_y and dataset.y_kind == "labels"
        metrics = self.metrics if labelled else ("log_likelihood",)
        return self.score(model, dataset, metrics, progress=progress)


def _purity(labels: np.ndarray, clusters: np.ndarray) -> float:
    """Share of rows whose component's most frequent class is theirs."""
    classes, found = (np.unique(column, return_inverse=True)[1] for column in (labels, clusters))
    shared = np.zeros((int(found.max()) + 1, int(classes.max()) + 1), dtype=np.int64)
    np.add.at(shared, (found, classes), 1)
    return float(shared.max(axis=1).sum() / len(classes))
