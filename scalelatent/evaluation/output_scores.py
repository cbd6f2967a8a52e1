"""Scores of the output of unsupervised models, by the metric names of `scalelatent score --metric`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.data import Dataset
from scalelatent.data.csr import concatenate
from scalelatent.engine.grid import space_ranges
from scalelatent.errors import DataError, JobError

from .clustering import Progress, kmeans_scores, read_labels
from .retrieval import retrieval_accuracy

if TYPE_CHECKING:
    from scalelatent.estimators.base import StreamedEstimator
    from scalelatent.kernels.arrays import DenseOrCsr
    from scalelatent.typing import RandomState

METRICS = ("nmi", "accuracy", "retrieval")
"""Metrics of an output: NMI and accuracy of its k-means clusters, and retrieval accuracy."""

CLUSTER_METRICS = ("nmi", "accuracy")
"""Metrics of k-means clusters."""

# Number of ranges of rows that a sample of evenly spaced rows consists of.
SAMPLE_RANGES = 100
# Largest number of queries of the retrieval accuracy.
QUERIES = 10_000
# Largest number of rows to cluster; of more rows, this many evenly spaced ones are clustered.
SCORED_ROWS = 10_000
# Restarts and seed of k-means in all scores of jobs, reports and the command line.
RESTARTS, SEED = 50, 0


def score_clusters(
    model: StreamedEstimator, dataset: Dataset, *, progress: Progress | None = None
) -> dict[str, float | int]:
    """Compare k-means clusters of a model's output with the classes of the rows.

    ``scalelatent score``, jobs and reports all use this function, so that they agree: it takes the best of 50
    clusterings by inertia, with the same seed and the same rows.

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
    >>> data = Dataset.from_arrays(np.eye(2).repeat(10, axis=0), np.repeat([0, 1], 10))
    >>> model = SimpleNamespace(transform=lambda rows: rows.read_x(0, len(rows)))
    >>> found = score_clusters(model, data)
    >>> found["accuracy"], found["restarts"], found["clustered_rows"]
    (1.0, 50, 20)
    """
    read_labels(dataset[:1])  # raises an error without classes
    x, labels = read_spaced(dataset, SCORED_ROWS)
    some = dataset
    if len(labels) < len(dataset):
        some = Dataset.from_arrays(x, feature_names=dataset.feature_names)
    found = kmeans_scores(
        model.transform(some),
        labels,
        restarts=RESTARTS,
        random_state=SEED,
        n_jobs=getattr(model, "n_jobs", None),
        progress=progress,
    ).to_dict()
    del found["inertia"]
    return {**found, "clustered_rows": len(some)}


def read_spaced(dataset: Dataset, rows: int) -> tuple[DenseOrCsr, DenseOrCsr]:
    """Return (x, y) of at most ``rows`` evenly spaced rows of a dataset; y is None without labels."""
    pieces = space_ranges(len(dataset), rows, SAMPLE_RANGES)
    y = concatenate([dataset.read_y(a, b) for a, b in pieces]) if dataset.has_y else None
    return concatenate([dataset.read_x(a, b) for a, b in pieces]), y


def score_output(
    output: np.ndarray,
    dataset: Dataset,
    metrics: Sequence[str] = ("nmi", "accuracy"),
    *,
    metric: str = "cosine",
    n_clusters: int | None = None,
    restarts: int = RESTARTS,
    random_state: RandomState = SEED,
    n_jobs: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Score the output of an unsupervised model for labelled rows.

    Parameters
    ----------
    output : ndarray, shape (n, d)
        Output for the rows of the dataset.
    dataset : Dataset
        Rows with labels, or with topics (multi-labels) for retrieval.
    metrics : sequence of str
        Any of `METRICS`. ``nmi`` and ``accuracy`` belong to the best of ``restarts`` k-means clusterings,
        with mean and spread over all of them; ``retrieval`` uses at most 10,000 queries.
    metric : {"cosine", "euclidean", "overlap"}
        Similarity for the ranking of ``retrieval``. "overlap" is for the codes of a bootstrap network, which
        k-means cannot cluster, because codes have no mean.
    n_clusters : int, optional
        Number of clusters; by default the number of classes.
    restarts, random_state, n_jobs, progress
        See :func:`kmeans_scores`.

    Returns
    -------
    dict
        The metrics by name.

    Raises
    ------
    JobError
        A metric is unknown, or clusters of codes were requested.
    DataError
        There are no labels, or labels that a metric cannot use.

    Examples
    --------
    >>> x, y = np.eye(2).repeat(10, axis=0), np.repeat([0, 1], 10)
    >>> score_output(x, Dataset.from_arrays(x, y), ["accuracy"], restarts=2)["accuracy"]
    1.0
    """
    for name in metrics:
        if name not in METRICS:
            raise JobError(f"unknown metric {name!r}: the metrics of an output are {', '.join(METRICS)}")
    check_clusters(metrics, metric)
    if not dataset.has_y:
        raise DataError(
            f"{dataset.url or 'the rows'}: there are no labels, which {', '.join(metrics)} needs; import the "
            "rows with their labels"
        )
    found: dict[str, Any] = {}
    if requested := [name for name in CLUSTER_METRICS if name in metrics]:
        scores = kmeans_scores(
            output,
            read_labels(dataset),
            n_clusters,
            restarts=restarts,
            random_state=random_state,
            n_jobs=n_jobs,
            progress=progress,
        ).to_dict()
        for name in requested:
            found |= {key: value for key, value in scores.items() if key.startswith(name)}
        found["restarts"] = restarts
    if "retrieval" in metrics:
        found["retrieval"] = retrieval_accuracy(
            output,
            dataset.read_y(0, len(dataset)),
            metric=metric,
            queries=min(QUERIES, len(output)),
            random_state=random_state,
            n_jobs=n_jobs,
            progress=progress,
        ).to_dict()
    return found


def check_clusters(metrics: Sequence[str], metric: str) -> None:
    """Raise JobError if clusters of codes are requested: k-means would average numbers of centroids."""
    requested = [name for name in CLUSTER_METRICS if name in metrics]
    if requested and metric == "overlap":
        raise JobError(
            f"metric {requested[0]!r} clusters components, but this output is codes, which have no mean: use "
            "the metric retrieval, or fit with output='pca'"
        )
