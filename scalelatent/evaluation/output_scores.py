"""All scores of an output at once, by the names that `scalelatent score --metric` knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.data import Dataset
from scalelatent.engine.grid import space_ranges
from scalelatent.errors import DataError, JobError

from .clustering import Progress, kmeans_scores, labels_of
from .retrieval import retrieval_accuracy

if TYPE_CHECKING:
    from scalelatent.estimators.base import StreamedEstimator
    from scalelatent.kernels.arrays import DenseOrCsr
    from scalelatent.typing import RandomState

METRICS = ("nmi", "accuracy", "retrieval")
"""Names of the metrics of an output: NMI and accuracy of its k-means clusters, retrieval accuracy."""

OF_CLUSTERS = ("nmi", "accuracy")
"""Those of them that k-means clusters are asked for."""

PLACES = 100

QUERIES = 10_000
"""So many documents ask for the others where there are more."""


SCORED_ROWS = 10_000
"""So many rows, evenly spaced, are clustered where there are more."""

RESTARTS, SEED = 50, 0
"""Of k-means, in every score that a job, a report or the command line tells."""


def score_clusters(
    model: StreamedEstimator, dataset: Dataset, *, progress: Progress | None = None
) -> dict[str, float | int]:
    """Hold k-means clusters of a model's output against the classes of rows.

    What ``scalelatent score``, the scores of a job and its report tell: always the best of 50 clusterings by
    inertia, with the same seed, of the same rows.

    Parameters
    ----------
    model : fitted estimator
        With a ``transform``.
    dataset : Dataset
        With labels. Of more than 10,000 rows so many are taken, evenly spaced.
    progress : callable, optional
        Called with restarts done and restarts in all.

    Returns
    -------
    dict
        ``nmi`` and ``accuracy``, of each also the mean and the standard deviation (``spread``) over all
        restarts; ``restarts`` and ``clustered_rows``.

    Raises
    ------
    DataError
        No labels, or targets or multi-labels in their place.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> data = Dataset.from_arrays(np.eye(2).repeat(10, axis=0), np.repeat([0, 1], 10))
    >>> model = SimpleNamespace(transform=lambda rows: rows.read_x(0, len(rows)))
    >>> found = score_clusters(model, data)
    >>> found["accuracy"], found["restarts"], found["clustered_rows"]
    (1.0, 50, 20)
    """
    labels_of(dataset[:1])  # refuses what has no classes
    x, labels = read_spaced(dataset, SCORED_ROWS)
    some = dataset if len(labels) == len(dataset) else Dataset.from_arrays(x)
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
    """(x, y) of at most so many rows of a dataset, from all over it; y is None where there is none."""
    pieces = space_ranges(len(dataset), rows, PLACES)
    y = joined([dataset.read_y(a, b) for a, b in pieces]) if dataset.has_y else None
    return joined([dataset.read_x(a, b) for a, b in pieces]), y


def joined(parts: Sequence[DenseOrCsr]) -> DenseOrCsr:
    """One array, or CSR array, of several."""
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    import scipy.sparse

    return scipy.sparse.vstack(parts, format="csr")


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
    """Refuse clusters of codes: k-means would average numbers of centroids."""
    wanted = [name for name in OF_CLUSTERS if name in metrics]
    if wanted and metric == "overlap":
        raise JobError(
            f"metric {wanted[0]!r} clusters components, and this output is codes, which have no mean: ask "
            "for retrieval, or fit with output='pca'"
        )
