"""All scores of an output at once, by the names that `scalelatent score --metric` knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from scalelatent.data import Dataset
from scalelatent.errors import DataError, JobError

from .clustering import Progress, kmeans_scores, labels_of
from .retrieval import retrieval_accuracy

__all__ = ["METRICS", "score_output"]

METRICS = ("nmi", "accuracy", "retrieval")
"""Names of the metrics of an output: NMI and accuracy of its k-means clusters, retrieval accuracy."""

OF_CLUSTERS = ("nmi", "accuracy")
"""Those of them that k-means clusters are asked for."""

QUERIES = 10_000
"""So many documents ask for the others where there are more."""


def score_output(
    output: np.ndarray,
    dataset: Dataset,
    metrics: Sequence[str] = ("nmi", "accuracy"),
    *,
    metric: str = "cosine",
    n_clusters: int | None = None,
    restarts: int = 50,
    random_state: Any = 0,
    n_jobs: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Score what an unsupervised model makes of labelled rows.

    Parameters
    ----------
    output : ndarray, shape (n, d)
        Of the rows of the dataset.
    dataset : Dataset
        With labels, or topics (multi-labels) for retrieval.
    metrics : sequence of str
        Any of `METRICS`. ``nmi`` and ``accuracy`` are those of the best of ``restarts`` k-means clusterings,
        with mean and spread over all of them; ``retrieval`` asks 10,000 queries at most.
    metric : {"cosine", "euclidean", "overlap"}
        What ``retrieval`` ranks by. The last is for codes of a bootstrap network, whose numbers have no mean:
        k-means knows nothing of them.
    n_clusters : int, optional
        By default the number of classes.
    restarts, random_state, n_jobs, progress
        As for :func:`kmeans_scores`.

    Returns
    -------
    dict
        The metrics by name.

    Raises
    ------
    JobError
        An unknown metric; clusters of codes.
    DataError
        No labels, or labels that a metric does not know.

    Examples
    --------
    >>> x, y = np.eye(2).repeat(10, axis=0), np.repeat([0, 1], 10)
    >>> score_output(x, Dataset.from_arrays(x, y), ["accuracy"], restarts=2)["accuracy"]
    1.0
    """
    for name in metrics:
        if name not in METRICS:
            raise JobError(f"unknown metric {name!r}: of an output there are {', '.join(METRICS)}")
    check_clusters(metrics, metric)
    if not dataset.has_y:
        raise DataError(
            f"{dataset.url or 'the rows'}: there are no labels, so nothing to score {', '.join(metrics)} "
            "against; import the rows with their labels"
        )
    found: dict[str, Any] = {}
    if wanted := [name for name in OF_CLUSTERS if name in metrics]:
        of_clusters = kmeans_scores(
            output,
            labels_of(dataset),
            n_clusters,
            restarts=restarts,
            random_state=random_state,
            n_jobs=n_jobs,
            progress=progress,
        ).to_dict()
        for name in wanted:
            found |= {key: value for key, value in of_clusters.items() if key.startswith(name)}
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
    """Refuse clusters of codes: k-means would average numbers of centroids.

    Raises
    ------
    JobError
        Naming the metric.
    """
    wanted = [name for name in OF_CLUSTERS if name in metrics]
    if wanted and metric == "overlap":
        raise JobError(
            f"metric {wanted[0]!r} clusters components, and this output is codes, which have no mean: ask "
            "for retrieval, or fit with output='pca'"
        )
