"""Score a model on a dataset: a classifier by one streamed pass, a model of binary outputs by its errors, any
other by what its output is worth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.errors import DataError, JobError
from scalelatent.reductions.tally import CONFUSION_METRICS

from .spec import nearest

if TYPE_CHECKING:
    from scalelatent.data import Dataset

__all__ = ["METRICS", "score_dataset"]


METRICS = (*CONFUSION_METRICS, "log_loss")
"""Names of the metrics that `score_dataset` knows of a classifier; of other models it knows those of
`scalelatent.evaluation`.
"""


ERRORS = ("all", "changed")
"""Names of the metrics of a model with binary outputs: of all of them, and of those that x has otherwise."""


def score_dataset(
    model: Any,
    dataset: Dataset,
    metrics: Sequence[str] | None = None,
    *,
    batch_rows: int = 16384,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Score a model on a labelled dataset; a classifier takes a batch of rows in memory at a time.

    Parameters
    ----------
    model : fitted estimator
        A classifier has ``classes_`` and ``predict_proba`` (``predict`` suffices without ``log_loss``); of
        any other model the ``transform`` is scored, see :func:`scalelatent.evaluation.score_output`.
        A model of binary outputs has ``errors``.
    dataset : Dataset
        With labels, or with binary outputs.
    metrics : sequence of str, optional
        Of a classifier any of `METRICS`, by default accuracy and error. ``confusion`` has true classes as
        rows and predicted ones as columns, both in the order of ``model.classes_``; ``log_loss`` is in nats a
        row. Of binary outputs ``all`` and ``changed``, the shares of wrong ones. Of another model ``nmi``,
        ``accuracy`` (of clusters) and ``retrieval``, by default the first two; where its output is codes,
        ``retrieval`` alone, by the codes that rows share.
    batch_rows : int
        Rows read and scored at a time.
    progress : callable, optional
        Called with rows done and rows in all.

    Returns
    -------
    dict
        The metrics by name.

    Raises
    ------
    JobError
        For an unknown metric, or clusters of codes.
    DataError
        If the dataset has no labels, no row, another number of features, or a label the model does not know.

    Examples
    --------
    >>> import numpy as np
    >>> from scalelatent.jobs.scoring import score_dataset
    >>> class Parity:
    ...     classes_ = np.array([0, 1]); n_features_in_ = 1
    ...     def predict(self, x): return (x[:, 0] % 2).astype(int)
    >>> from scalelatent import Dataset
    >>> data = Dataset.from_arrays(np.arange(8.0)[:, None], np.array([0, 1] * 4))
    >>> score_dataset(Parity(), data)
    {'accuracy': 1.0, 'error': 0.0}
    """
    if getattr(model, "takes_targets", False):
        return _score_targets(model, dataset, metrics)
    if not hasattr(model, "predict"):
        return _score_output(model, dataset, metrics, progress)
    metrics = ("accuracy", "error") if metrics is None else metrics
    for name in metrics:
        if name not in METRICS:
            raise JobError(f"unknown metric {name!r}; {nearest(name, METRICS)}")
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


def _score_targets(model: Any, dataset: Dataset, metrics: Sequence[str] | None) -> dict[str, Any]:
    metrics = ERRORS if metrics is None else metrics
    for name in metrics:
        if name not in ERRORS:
            raise JobError(
                f"unknown metric {name!r} of {type(model).__name__}, which predicts binary outputs; "
                f"{nearest(name, ERRORS)}"
            )
    errors = model.errors(dataset)
    return {name: errors[name] for name in metrics}


def _score_output(
    model: Any,
    dataset: Dataset,
    metrics: Sequence[str] | None,
    progress: Callable[[int, int], None] | None,
) -> dict[str, Any]:
    from scalelatent.evaluation import METRICS as OF_OUTPUTS
    from scalelatent.evaluation import score_output
    from scalelatent.evaluation.output_scores import OF_CLUSTERS, check_clusters, score_clusters

    codes = gives_codes(model)
    if metrics is None:
        metrics = ("retrieval",) if codes else ("nmi", "accuracy")
    for name in metrics:
        if name not in OF_OUTPUTS:
            raise JobError(
                f"unknown metric {name!r} of {type(model).__name__}, which predicts no classes; "
                f"{nearest(name, OF_OUTPUTS)}"
            )
    metric = "overlap" if codes else "cosine"
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


def gives_codes(model: Any) -> bool:
    """Whether a model's output is numbers of centroids, which say only whether they are equal.

    Parameters
    ----------
    model : estimator
    """
    return getattr(model, "output", None) == "codes"


def _check(model: Any, dataset: Dataset, where: str) -> None:
    if not dataset.has_y:
        raise DataError(f"{where} has no labels, so there is nothing to score against")
    if dataset.n_rows == 0:
        raise DataError(f"{where} has no rows, so there is nothing to score")
    expected = getattr(model, "n_features_in_", dataset.n_features)
    if dataset.n_features != expected:
        raise DataError(
            f"{where} has {dataset.n_features} features a row; the model was fitted to {expected}"
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
