"""Comparison of clusters with classes: normalized mutual information, accuracy, and repeated k-means."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from scalelatent.data import Dataset
from scalelatent.engine.cache import memory_limit
from scalelatent.engine.threads import resolve_jobs, single_threaded
from scalelatent.errors import DataError
from scalelatent.kernels.streams import resolve_seed, stream

if TYPE_CHECKING:
    import numpy.typing as npt

    from scalelatent.typing import LabelsLike, RandomState, RowsLike

# Largest share of the memory of the machine for the rows that k-means clusters.
MEMORY_SHARE = 0.3

OnProgress = Callable[[int, int], None]
"""Function that is called with the completed and the total number of rows or restarts."""


def nmi(labels: npt.ArrayLike, clusters: npt.ArrayLike) -> float:
    """Return the mutual information of classes and clusters, divided by the mean of their entropies.

    Parameters
    ----------
    labels, clusters : array-like, shape (n,)
        Values of any type; the names of the clusters do not matter.

    Returns
    -------
    float
        From 0 (independent) to 1 (the same partition).

    Raises
    ------
    DataError
        The arrays differ in shape, are not one-dimensional, or are empty.

    Examples
    --------
    >>> nmi(["a", "a", "b", "b"], [7, 7, 3, 3]), nmi([0, 0, 1, 1], [0, 1, 0, 1])
    (1.0, 0.0)
    """
    from sklearn.metrics import normalized_mutual_info_score

    return float(normalized_mutual_info_score(*_check_columns(labels, clusters)))


def clustering_accuracy(labels: npt.ArrayLike, clusters: npt.ArrayLike) -> float:
    """Return the share of rows whose cluster is paired with their class, for the best one-to-one pairing.

    The pairing is an assignment problem (Hungarian method). If there are more clusters than classes, some
    clusters have no class.

    Parameters
    ----------
    labels, clusters : array-like, shape (n,)

    Returns
    -------
    float

    Raises
    ------
    DataError
        The arrays differ in shape, are not one-dimensional, or are empty.

    Examples
    --------
    >>> clustering_accuracy([0, 0, 1, 1], [5, 5, 4, 5])
    0.75
    """
    from scipy.optimize import linear_sum_assignment

    rows = _check_columns(labels, clusters)
    classes, found = (np.unique(column, return_inverse=True)[1] for column in rows)
    shared = np.zeros((int(classes.max()) + 1, int(found.max()) + 1), dtype=np.int64)
    np.add.at(shared, (classes, found), 1)
    return float(shared[linear_sum_assignment(shared, maximize=True)].sum() / len(classes))


def _check_columns(labels: npt.ArrayLike, clusters: npt.ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    first, second = np.asarray(labels), np.asarray(clusters)
    if first.ndim != 1 or first.shape != second.shape or not len(first):
        raise DataError(
            f"labels of shape {first.shape} and clusters of shape {second.shape}: give one label and one "
            "cluster per row, for at least one row"
        )
    return first, second


@dataclass(frozen=True)
class KMeansScores:
    """Scores of each restart of k-means, float64 (restarts,)."""

    inertias: np.ndarray  # sums of squared distances to the cluster centres
    nmis: np.ndarray
    accuracies: np.ndarray

    @property
    def best(self) -> int:
        """Index of the restart with the smallest inertia; the first one if several have the same inertia."""
        return int(np.argmin(self.inertias))

    @property
    def nmi(self) -> float:
        """NMI of the best restart."""
        return float(self.nmis[self.best])

    @property
    def accuracy(self) -> float:
        """Accuracy of the best restart."""
        return float(self.accuracies[self.best])

    def to_dict(self) -> dict[str, float | int]:
        """Return the scores of the best restart, and their mean and standard deviation over all restarts."""
        return {
            "restarts": len(self.inertias),
            "inertia": float(self.inertias[self.best]),
            "nmi": self.nmi,
            "nmi_mean": float(self.nmis.mean()),
            "nmi_spread": float(self.nmis.std()),
            "accuracy": self.accuracy,
            "accuracy_mean": float(self.accuracies.mean()),
            "accuracy_spread": float(self.accuracies.std()),
        }


def kmeans_scores(
    output: RowsLike,
    labels: LabelsLike | None = None,
    n_clusters: int | None = None,
    *,
    restarts: int = 50,
    random_state: RandomState = 0,
    n_jobs: int | None = None,
    progress: OnProgress | None = None,
) -> KMeansScores:
    """Cluster the output of a model by k-means from many random starts, and compare clusters with classes.

    This is the protocol of Tables 3 and 4 of X.-L. Zhang, "Multilayer bootstrap networks" (2018): the restart
    with the smallest inertia counts, whatever its scores. Restarts run in threads; the number of threads
    changes no result.

    Parameters
    ----------
    output : array-like, shape (n, d); or Dataset
        Rows to cluster, which must fit into memory.
    labels : array-like, shape (n,), optional
        Class of each row; by default the labels of the Dataset.
    n_clusters : int, optional
        Number of clusters; by default the number of classes.
    restarts : int
        Number of random starts.
    random_state : int, Generator or RandomState
        Seed of the starts.
    n_jobs : int, optional
        Number of threads; None means all cores.
    progress : callable, optional
        Called with the completed and the total number of restarts.

    Returns
    -------
    KMeansScores

    Raises
    ------
    DataError
        There are no labels, labels that are not classes, NaN, fewer rows than clusters, or rows that do not
        fit into memory.

    Warns
    -----
    UserWarning
        Clusters stayed empty, because many rows are equal.

    Examples
    --------
    >>> x = np.concatenate([np.zeros((20, 2)), np.ones((20, 2))])
    >>> kmeans_scores(x + np.arange(40)[:, None] / 1e3, np.repeat(["a", "b"], 20), restarts=3).accuracy
    1.0
    """
    from sklearn.exceptions import ConvergenceWarning

    if restarts < 1:
        raise DataError(f"restarts={restarts}: give a whole number of at least 1")
    seed = resolve_seed(random_state)
    rows, classes = _read_rows(output, labels)
    k = int(classes.max()) + 1 if n_clusters is None else int(n_clusters)
    if not 1 <= k <= len(rows):
        raise DataError(f"n_clusters={k}: give 1 to {len(rows)}, the number of rows")
    found = []
    # Warning filters apply to the whole process, so they are set here and not in each thread. One warning
    # below replaces the warnings of all restarts.
    with warnings.catch_warnings(), ThreadPoolExecutor(resolve_jobs(n_jobs), "kmeans") as pool:
        warnings.simplefilter("ignore", ConvergenceWarning)
        for scores in pool.map(partial(_cluster_once, rows, classes, k, seed), range(restarts)):
            found.append(scores)
            if progress is not None:
                progress(len(found), restarts)
    inertias, nmis, accuracies, missing = np.array(found).T
    if missing.any():
        warnings.warn(
            f"{int((missing > 0).sum())} of {restarts} restarts of k-means found up to {int(missing.max())} "
            "clusters fewer than n_clusters, because many rows of the output are equal. A network with more "
            "clusterings, or with more features for each clustering, distinguishes more rows",
            stacklevel=2,
        )
    return KMeansScores(inertias, nmis, accuracies)


def _read_rows(output: RowsLike, labels: LabelsLike | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the output in memory (n, d) and the class codes (n,)."""
    where = getattr(output, "url", None) or "the output"
    if isinstance(output, Dataset):
        if labels is None:
            labels = read_labels(output)
        _check_memory(len(output), output.n_features, output.dtype.itemsize, where)
        output = output.read_x(0, len(output))
    if labels is None:
        raise DataError(f"{where} has no labels, so clusters cannot be compared with classes: pass labels")
    rows = np.asarray(output)
    if rows.ndim != 2 or not rows.size:
        raise DataError(f"{where} has shape {rows.shape}: give rows (n, d) of at least one column")
    classes = np.asarray(labels)
    if classes.shape != (len(rows),):
        raise DataError(f"labels of shape {classes.shape} for {len(rows)} rows: give one label per row")
    if rows.dtype not in (np.float32, np.float64):
        rows = rows.astype(np.float64)
    if not np.isfinite(rows).all():
        bad = int(np.argwhere(~np.isfinite(rows))[0, 0])
        raise DataError(f"{where}: row {bad} contains NaN or infinity, so it has no cluster; remove it")
    return rows, np.unique(classes, return_inverse=True)[1]


def read_labels(dataset: Dataset) -> np.ndarray:
    """Return the classes of all rows; raise DataError if the dataset has none."""
    where = dataset.url or "the rows"
    if not dataset.has_y:
        raise DataError(
            f"{where}: there are no labels to compare clusters with; import the rows with their labels, or "
            "omit these metrics"
        )
    if dataset.y_kind != "labels":
        raise DataError(
            f"{where}: rows have {dataset.n_targets} {dataset.y_kind} columns instead of one class each, "
            "so clusters cannot be compared with them; use the metric retrieval"
        )
    return dataset.read_y(0, len(dataset))


def _check_memory(n: int, width: int, itemsize: int, where: str) -> None:
    # k-means makes a centred copy of the rows.
    needed = 2 * n * width * max(itemsize, 4)
    if needed > MEMORY_SHARE * memory_limit():
        raise DataError(
            f"{where}: k-means needs its {n:,} rows of {width:,} columns in memory: {needed / 2**30:.1f} GiB "
            f"with a copy, more than {MEMORY_SHARE:.0%} of this machine's memory. Score fewer rows, or an "
            "output with fewer columns"
        )


def _cluster_once(rows: np.ndarray, classes: np.ndarray, k: int, seed: int, restart: int) -> list[float]:
    """Return inertia, NMI, accuracy and the number of empty clusters of one restart."""
    from sklearn.cluster import KMeans

    start = int(stream(seed, "kmeans", 0, restart).integers(2**31))
    # Use a single thread: several threads would add their sums in a random order, which changes rounding.
    with single_threaded():
        fitted = KMeans(k, n_init=1, random_state=start).fit(rows)
    clusters = fitted.labels_
    missing = float(k - len(np.unique(clusters)))
    return [float(fitted.inertia_), nmi(classes, clusters), clustering_accuracy(classes, clusters), missing]
