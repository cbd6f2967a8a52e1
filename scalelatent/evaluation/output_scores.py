"""Scores of the output of unsupervised models, by the metric names of `scalelatent score --metric`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from scalelatent.data import Dataset
from scalelatent.data.csr import concatenate
from scalelatent.engine.grid import space_ranges
from scalelatent.errors import JobError

from .clustering import OnProgress, kmeans_scores, read_labels
from .retrieval import RetrievalCurve, retrieval_accuracy

if TYPE_CHECKING:
    from scalelatent.estimators.base import StreamedEstimator
    from scalelatent.kernels.arrays import DenseOrCsr

METRICS = ("nmi", "accuracy", "retrieval")
"""Metrics of an output: NMI and accuracy of its k-means clusters, and retrieval accuracy."""

CLUSTER_METRICS = ("nmi", "accuracy")
"""Metrics that compare k-means clusters with classes."""

# A sample of rows consists of this many evenly spaced ranges of consecutive rows, so that few reads suffice.
SAMPLE_RANGES = 100
# Largest number of rows that are queries when the retrieval accuracy is computed.
MAX_QUERIES = 10_000
# Largest number of rows to cluster; from a larger dataset, this number of evenly spaced rows is used.
MAX_CLUSTERED_ROWS = 10_000
# Restarts and seed of k-means in all scores of jobs, reports and the command line.
KMEANS_RESTARTS, SCORE_SEED = 50, 0


def score_clusters(
    model: StreamedEstimator, dataset: Dataset, *, progress: OnProgress | None = None
) -> dict[str, float | int]:
    """Compare k-means clusters of a model's output with the classes of the rows.

    ``scalelatent score``, jobs and reports all use this function, so that their scores agree. The function
    runs k-means 50 times, always with the same seeds and rows, and scores the run with the smallest inertia.

    Parameters
    ----------
    model : fitted estimator
        Estimator with a ``transform``.
    dataset : Dataset
        Rows with labels. If there are more than 10,000 rows, 10,000 evenly spaced ones are used.
    progress : callable, optional
        Called with the completed and the total number of restarts.

    Returns
    -------
    dict
        ``nmi`` and ``accuracy``, each also with the mean and the standard deviation (``spread``) over all
        restarts; ``restarts`` and ``clustered_rows``.

    Raises
    ------
    DataError
        There are no labels, or targets or multi-labels instead.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> import numpy as np
    >>> data = Dataset.from_arrays(np.eye(2).repeat(10, axis=0), np.repeat([0, 1], 10))
    >>> model = SimpleNamespace(transform=lambda rows: rows.read_x(0, len(rows)))
    >>> found = score_clusters(model, data)
    >>> found["accuracy"], found["restarts"], found["clustered_rows"]
    (1.0, 50, 20)
    """
    read_labels(dataset[:1])  # raises an error without classes
    x, labels = read_spaced(dataset, MAX_CLUSTERED_ROWS)
    some = dataset
    if len(labels) < len(dataset):
        some = Dataset.from_arrays(x, feature_names=dataset.feature_names)
    found = kmeans_scores(
        model.transform(some),
        labels,
        restarts=KMEANS_RESTARTS,
        random_state=SCORE_SEED,
        n_jobs=getattr(model, "n_jobs", None),
        progress=progress,
    ).to_dict()
    del found["inertia"]
    return {**found, "clustered_rows": len(some)}


def read_spaced(dataset: Dataset, rows: int) -> tuple[DenseOrCsr, DenseOrCsr]:
    """Return at most ``rows`` evenly spaced rows of a dataset, and their labels or None."""
    pieces = space_ranges(len(dataset), rows, SAMPLE_RANGES)
    y = concatenate([dataset.read_y(a, b) for a, b in pieces]) if dataset.has_y else None
    return concatenate([dataset.read_x(a, b) for a, b in pieces]), y


def score_retrieval(
    model: StreamedEstimator, dataset: Dataset, *, progress: OnProgress | None = None
) -> RetrievalCurve:
    """Return the retrieval accuracy of a model's output for labelled rows, with at most 10,000 queries."""
    return retrieval_accuracy(
        model.transform(dataset),
        dataset.read_y(0, len(dataset)),
        metric=model._output_metric,
        queries=min(MAX_QUERIES, len(dataset)),
        random_state=SCORE_SEED,
        progress=progress,
    )


def check_clusters(metrics: Sequence[str], metric: str) -> None:
    """Raise JobError if k-means metrics are requested for codes, which are indices and have no mean."""
    requested = [name for name in CLUSTER_METRICS if name in metrics]
    if requested and metric == "overlap":
        raise JobError(
            f"metric {requested[0]!r} clusters components, but this output is codes, which have no mean: use "
            "the metric retrieval, or fit with output='pca'"
        )
