"""Scores of a fitted model on a dataset, for models that predict classes, binary outputs or clusters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.contract.kinds import find_kind, import_object
from scalelatent.data import Dataset
from scalelatent.engine.callbacks import Callback
from scalelatent.errors import DataError, JobError, nearest
from scalelatent.reductions.confusion import CONFUSION_METRICS

from .clustering import OnProgress
from .output_scores import CLUSTER_METRICS, METRICS, check_clusters, score_clusters, score_retrieval

if TYPE_CHECKING:
    from scalelatent.estimators.base import StreamedEstimator


# Rows that a scorer predicts at a time.
BATCH_ROWS = 16384


def score_dataset(
    model: StreamedEstimator,
    dataset: Dataset,
    metrics: Sequence[str] | None = None,
    *,
    progress: OnProgress | None = None,
) -> dict[str, Any]:
    """Return the scores of a model on labelled rows by metric name; by default the usual metrics of its kind.

    Classifiers: the metrics of a confusion matrix, and ``log_loss`` in nats per row. In ``confusion`` the
    true classes are rows and the predicted classes are columns, both in the order of ``model.classes_``.
    Models of binary outputs: ``all`` and ``changed``, the shares of wrong outputs. Other models: ``nmi``,
    ``accuracy`` (both of k-means clusters) and ``retrieval``; by default the first two, or only ``retrieval``
    if the output is codes.
    """
    scorer = make_scorer(model)
    metrics = scorer.defaults(model) if metrics is None else metrics
    for name in metrics:
        if name not in scorer.metrics:
            of = f" of {type(model).__name__}, which {scorer.reason}" if scorer.reason else ""
            raise JobError(f"unknown metric {name!r}{of}; {nearest(name, scorer.metrics)}")
    return scorer.measure(model, dataset, metrics, progress)


def make_scorer(model: StreamedEstimator) -> Scorer:
    scorer: Scorer = import_object(find_kind(model._kind).scorer)()
    return scorer


class Scorer:
    """Base class of objects that score a fitted model on labelled rows; each kind of model has a subclass."""

    metrics: tuple[str, ...] = ()  # names of the metrics that ``measure`` accepts
    default: tuple[str, ...] = ()  # names of the metrics if the user gives none
    # Names of the test scores in ``state.json`` of a run; the event ``scored`` of the run has all scores.
    headline: tuple[str, ...] = ("error", "accuracy", "nmi")
    reason: str = ""  # words such as "predicts no classes", for the error about an unsuitable metric

    def defaults(self, model: StreamedEstimator) -> Sequence[str]:
        """Return the default metrics of a model."""
        return self.default

    def measure(
        self, model: Any, dataset: Dataset, metrics: Sequence[str], progress: OnProgress | None
    ) -> dict[str, Any]:
        """Return the scores by metric name; `score_dataset` has checked that this scorer has the metrics."""
        raise NotImplementedError

    def test_scores(self, model: Any, dataset: Dataset, progress: OnProgress) -> dict[str, Any]:
        """Return the scores of the test rows of a run by name; an empty dict if these rows have no score."""
        raise NotImplementedError


class RowProgress(Callback):
    """Callback that forwards the progress of a pass, in rows, to a function."""

    def __init__(self, progress: OnProgress) -> None:
        self._progress = progress

    def on_progress(self, info: dict[str, Any]) -> None:
        self._progress(info["rows_done"], info["rows_total"])


class _PredictionScorer(Scorer):
    """Base class of scorers of models whose ``score`` method returns the share of right predictions."""

    def test_scores(self, model: Any, dataset: Dataset, progress: OnProgress) -> dict[str, Any]:
        accuracy = float(model.score(dataset, callbacks=RowProgress(progress)))
        return {"accuracy": accuracy, "error": round(1.0 - accuracy, 12)}


class ClassScorer(_PredictionScorer):
    """Scorer of a classifier. It calls ``predict_proba`` if ``log_loss`` is requested, else ``predict``."""

    metrics = (*CONFUSION_METRICS, "log_loss")
    default = ("accuracy", "error")

    def measure(
        self, model: Any, dataset: Dataset, metrics: Sequence[str], progress: OnProgress | None
    ) -> dict[str, Any]:
        where = dataset.url or "the data"
        _check(model, dataset, where)
        classes = np.asarray(model.classes_)
        confusion = np.zeros((len(classes), len(classes)), dtype=np.int64)
        loss = 0.0
        for start in range(0, dataset.n_rows, BATCH_ROWS):
            stop = min(start + BATCH_ROWS, dataset.n_rows)
            part = dataset[start:stop]
            truth = _encode_labels(part.read_y(0, len(part)), classes, where)
            if "log_loss" in metrics:
                probability = model.predict_proba(part)
                guess = probability.argmax(axis=1)
                of_truth = probability[np.arange(len(truth)), truth].astype(np.float64)
                loss -= float(np.log(np.maximum(of_truth, np.finfo(np.float64).tiny)).sum())
            else:
                guess = _encode_labels(model.predict(part), classes, "the model's predictions")
            np.add.at(confusion, (truth, guess), 1)
            if progress is not None:
                progress(stop, dataset.n_rows)
        found = {name: value(confusion) for name, value in CONFUSION_METRICS.items() if name in metrics}
        if "log_loss" in metrics:
            found["log_loss"] = loss / dataset.n_rows
        return {name: found[name] for name in metrics}


class TargetScorer(_PredictionScorer):
    """Scorer of a model of binary outputs.

    ``all`` is the share of wrong outputs, ``changed`` the share among the outputs that differ from the input.
    """

    metrics = default = ("all", "changed")
    reason = "predicts binary outputs"

    def measure(
        self, model: Any, dataset: Dataset, metrics: Sequence[str], progress: OnProgress | None
    ) -> dict[str, Any]:
        errors = model.errors(dataset)
        return {name: errors[name] for name in metrics}


class OutputScorer(Scorer):
    """Scorer of the output of ``transform``, for models without classes; see :mod:`.output_scores`."""

    metrics = METRICS
    reason = "predicts no classes"

    def defaults(self, model: StreamedEstimator) -> Sequence[str]:
        return ("retrieval",) if model._output_metric == "overlap" else CLUSTER_METRICS

    def measure(
        self, model: Any, dataset: Dataset, metrics: Sequence[str], progress: OnProgress | None
    ) -> dict[str, Any]:
        # The check comes before the transform, which may take long.
        check_clusters(metrics, model._output_metric)
        _check(model, dataset, dataset.url or "the data")
        found: dict[str, Any] = {}
        if requested := tuple(name for name in CLUSTER_METRICS if name in metrics):
            scores = score_clusters(model, dataset, progress=progress)
            selected = (*requested, "restarts", "clustered_rows")
            found |= {key: value for key, value in scores.items() if key.startswith(selected)}
        if "retrieval" in metrics:
            found["retrieval"] = score_retrieval(model, dataset, progress=progress).to_dict()
        return found

    def test_scores(self, model: Any, dataset: Dataset, progress: OnProgress) -> dict[str, Any]:
        if not dataset.has_y or dataset.y_kind != "labels" or model._output_metric == "overlap":
            return {}
        return self.measure(model, dataset, CLUSTER_METRICS, progress)


def _check(model: StreamedEstimator, dataset: Dataset, where: str) -> None:
    if not dataset.has_y:
        raise DataError(f"{where} has no labels, so it cannot be scored; import the rows with their labels")
    if dataset.n_rows == 0:
        raise DataError(f"{where} has no rows, so it cannot be scored")
    if dataset.n_features != model.n_features_in_:
        raise DataError(
            f"{where} has {dataset.n_features} features per row, but the model was fitted to "
            f"{model.n_features_in_}: pass rows with the features of the fit"
        )


def _encode_labels(labels: np.ndarray, classes: np.ndarray, where: str) -> np.ndarray:
    """Return the index of each label in the model's sorted classes; raise DataError for other labels."""
    codes = np.minimum(np.searchsorted(classes, labels), len(classes) - 1)
    strange = classes[codes] != labels
    if strange.any():
        raise DataError(
            f"{where}: label {labels[strange][0]!r} is unknown to the model, whose classes are "
            f"{', '.join(map(str, classes[:12]))}{', ...' if len(classes) > 12 else ''}"
        )
    return codes
