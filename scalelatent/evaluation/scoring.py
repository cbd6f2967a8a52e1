"""Scores of a fitted model on a dataset: of classes, of binary outputs, or of what ``transform`` gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.contract.kinds import find_kind, import_object
from scalelatent.data import Dataset
from scalelatent.engine.callbacks import Callback
from scalelatent.errors import DataError, JobError, nearest
from scalelatent.reductions.confusion import CONFUSION_METRICS

from .clustering import Progress
from .output_scores import METRICS, OF_CLUSTERS, check_clusters, score_clusters, score_output

if TYPE_CHECKING:
    from scalelatent.estimators.base import StreamedEstimator

Told = Callable[[int, int], None]


def score_dataset(
    model: StreamedEstimator,
    dataset: Dataset,
    metrics: Sequence[str] | None = None,
    *,
    batch_rows: int = 16384,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Score a model on a labelled dataset, by default by what its scorer tells; a classifier takes a batch of
    rows in memory at a time.

    Of a classifier ``confusion`` has true classes as rows and predicted ones as columns, both in the order of
    ``model.classes_``; ``log_loss`` is in nats a row. Of binary outputs there are ``all`` and ``changed``,
    the shares of wrong ones. Of another model ``nmi``, ``accuracy`` (of clusters) and ``retrieval``, by
    default the first two; where its output is codes, ``retrieval`` alone, by the codes that rows share.
    """
    return scorer_of(model).score(model, dataset, metrics, batch_rows=batch_rows, progress=progress)


def scorer_of(model: StreamedEstimator) -> Scorer:
    scorer: Scorer = import_object(find_kind(model._kind).scorer)()
    return scorer


class Scorer:
    """What is computed of a fitted model and labelled rows; a `Kind` names one."""

    metrics: tuple[str, ...] = ()  # what ``score`` knows
    default: tuple[str, ...] = ()  # what it tells where none is asked for
    # test scores that the state of a run tells; its event ``scored`` has all
    headline: tuple[str, ...] = ("error", "accuracy", "nmi")
    what: str = ""  # what the model does, for the refusal of a metric that others have

    def score(
        self,
        model: StreamedEstimator,
        dataset: Dataset,
        metrics: Sequence[str] | None = None,
        *,
        batch_rows: int = 16384,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """The metrics by name; those that the kind tells by default where None are given."""
        metrics = self.defaults(model) if metrics is None else metrics
        for name in metrics:
            if name not in self.metrics:
                of = f" of {type(model).__name__}, which {self.what}" if self.what else ""
                raise JobError(f"unknown metric {name!r}{of}; {nearest(name, self.metrics)}")
        return self.measure(model, dataset, metrics, batch_rows, progress)

    def defaults(self, model: StreamedEstimator) -> Sequence[str]:
        """What is told of a model where nothing is asked for."""
        return self.default

    def measure(
        self,
        model: StreamedEstimator,
        dataset: Dataset,
        metrics: Sequence[str],
        batch_rows: int,
        progress: Progress | None,
    ) -> dict[str, Any]:
        """Metrics that it knows, by name, with so many rows in memory at a time."""
        raise NotImplementedError

    def test_scores(self, model: StreamedEstimator, dataset: Dataset, progress: Told) -> dict[str, Any]:
        """What a run tells of its test rows; empty where these are rows to look at in the report."""
        raise NotImplementedError


class RowsTold(Callback):
    """Tells the progress of a pass, whatever its name, as that of a stage."""

    def __init__(self, told: Told) -> None:
        self._told = told

    def on_progress(self, info: dict[str, Any]) -> None:
        self._told(info["rows_done"], info["rows_total"])


class _Predicted(Scorer):
    """Of a model with ``predict``, whose ``score`` is a share of right ones."""

    def test_scores(self, model: Any, dataset: Dataset, progress: Told) -> dict[str, Any]:
        accuracy = float(model.score(dataset, callbacks=RowsTold(progress)))
        return {"accuracy": accuracy, "error": round(1.0 - accuracy, 12)}


class ClassScorer(_Predicted):
    """Of a classifier: ``classes_`` and ``predict_proba`` (``predict`` suffices without ``log_loss``)."""

    metrics = (*CONFUSION_METRICS, "log_loss")
    default = ("accuracy", "error")

    def measure(
        self, model: Any, dataset: Dataset, metrics: Sequence[str], batch_rows: int, progress: Progress | None
    ) -> dict[str, Any]:
        where = dataset.url or "the data"
        _check(model, dataset, where)
        classes = np.asarray(model.classes_)
        confusion = np.zeros((len(classes), len(classes)), dtype=np.int64)
        loss = 0.0
        for start in range(0, dataset.n_rows, batch_rows):
            stop = min(start + batch_rows, dataset.n_rows)
            x = dataset.read_x(start, stop)
            truth = _codes(dataset.read_y(start, stop), classes, where)
            if "log_loss" in metrics:
                probability = model.predict_proba(x)
                guess = probability.argmax(axis=1)
                of_truth = probability[np.arange(len(truth)), truth].astype(np.float64)
                loss -= float(np.log(np.maximum(of_truth, np.finfo(np.float64).tiny)).sum())
            else:
                guess = _codes(model.predict(x), classes, "the model's predictions")
            np.add.at(confusion, (truth, guess), 1)
            if progress is not None:
                progress(stop, dataset.n_rows)
        found = {name: value(confusion) for name, value in CONFUSION_METRICS.items() if name in metrics}
        if "log_loss" in metrics:
            found["log_loss"] = loss / dataset.n_rows
        return {name: found[name] for name in metrics}


class TargetScorer(_Predicted):
    """Of a model of binary outputs: shares of wrong ones, of all and of those that x has otherwise."""

    metrics = default = ("all", "changed")
    what = "predicts binary outputs"

    def measure(
        self, model: Any, dataset: Dataset, metrics: Sequence[str], batch_rows: int, progress: Progress | None
    ) -> dict[str, Any]:
        errors = model.errors(dataset)
        return {name: errors[name] for name in metrics}


class OutputScorer(Scorer):
    """Of a model without classes: what its ``transform`` is worth, see :func:`.score_output`."""

    metrics = METRICS
    what = "predicts no classes"

    def defaults(self, model: StreamedEstimator) -> Sequence[str]:
        return ("retrieval",) if model._output_metric == "overlap" else OF_CLUSTERS

    def measure(
        self,
        model: StreamedEstimator,
        dataset: Dataset,
        metrics: Sequence[str],
        batch_rows: int,
        progress: Progress | None,
    ) -> dict[str, Any]:
        metric = model._output_metric
        # Before the rows are transformed, which may take long.
        check_clusters(metrics, metric)
        _check(model, dataset, dataset.url or "the data")
        found: dict[str, Any] = {}
        if wanted := tuple(name for name in OF_CLUSTERS if name in metrics):
            scores = score_clusters(model, dataset, progress=progress)
            kept = (*wanted, "restarts", "clustered_rows")
            found |= {key: value for key, value in scores.items() if key.startswith(kept)}
        if others := [name for name in metrics if name not in OF_CLUSTERS]:
            found |= score_output(model.transform(dataset), dataset, others, metric=metric, progress=progress)
        return found

    def test_scores(self, model: StreamedEstimator, dataset: Dataset, progress: Told) -> dict[str, Any]:
        if not dataset.has_y or dataset.y_kind != "labels" or model._output_metric == "overlap":
            return {}
        return self.score(model, dataset, OF_CLUSTERS, progress=progress)


def _check(model: StreamedEstimator, dataset: Dataset, where: str) -> None:
    if not dataset.has_y:
        raise DataError(f"{where} has no labels, so there is nothing to score against")
    if dataset.n_rows == 0:
        raise DataError(f"{where} has no rows, so there is nothing to score")
    if dataset.n_features != model.n_features_in_:
        raise DataError(
            f"{where} has {dataset.n_features} features a row; the model was fitted to {model.n_features_in_}"
        )


def _codes(labels: np.ndarray, classes: np.ndarray, where: str) -> np.ndarray:
    """Turn labels into positions in the model's sorted classes."""
    codes = np.minimum(np.searchsorted(classes, labels), len(classes) - 1)
    strange = classes[codes] != labels
    if strange.any():
        raise DataError(
            f"{where}: label {labels[strange][0]!r} is unknown to the model, whose classes are "
            f"{', '.join(map(str, classes[:12]))}{', ...' if len(classes) > 12 else ''}"
        )
    return codes
