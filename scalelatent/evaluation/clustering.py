"""Clusters against classes: normalized mutual information, accuracy, and k-means with many restarts."""

from __future__ import annotations

import queue
import uuid
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from scalelatent.data import Dataset
from scalelatent.engine.cache import memory_limit
from scalelatent.engine.threads import resolve_jobs, single_threaded
from scalelatent.errors import DataError, JobError
from scalelatent.kernels.streams import resolve_seed, stream

if TYPE_CHECKING:
    import numpy.typing as npt
    from distributed import Client

    from scalelatent.data.schema import DatasetSpec
    from scalelatent.typing import LabelsLike, RandomState, RowsLike

MEMORY_SHARE = 0.3
STALL_SECONDS = 900.0
"""With a cluster: so long no restart may end before the job is given up."""
_POLL_SECONDS = 2.0

Progress = Callable[[int, int], None]


def nmi(labels: npt.ArrayLike, clusters: npt.ArrayLike) -> float:
    """Normalized mutual information of classes and clusters, normalized by the mean of their entropies.

    Parameters
    ----------
    labels, clusters : array-like, shape (n,)
        Of any type; the names of clusters do not matter.

    Returns
    -------
    float
        From 0 (independent) to 1 (the same partition).

    Raises
    ------
    DataError
        Not one label and one cluster a row, or no row.

    Examples
    --------
    >>> nmi(["a", "a", "b", "b"], [7, 7, 3, 3]), nmi([0, 0, 1, 1], [0, 1, 0, 1])
    (1.0, 0.0)
    """
    from sklearn.metrics import normalized_mutual_info_score

    return float(normalized_mutual_info_score(*_columns(labels, clusters)))


def clustering_accuracy(labels: npt.ArrayLike, clusters: npt.ArrayLike) -> float:
    """Share of rows whose cluster stands for their class, under the best one-to-one pairing of the two.

    The pairing is an assignment problem (Hungarian method). Clusters beyond the number of classes stand for
    none.

    Parameters
    ----------
    labels, clusters : array-like, shape (n,)

    Returns
    -------
    float

    Raises
    ------
    DataError
        As for :func:`nmi`.

    Examples
    --------
    >>> clustering_accuracy([0, 0, 1, 1], [5, 5, 4, 5])
    0.75
    """
    from scipy.optimize import linear_sum_assignment

    rows = _columns(labels, clusters)
    classes, found = (np.unique(column, return_inverse=True)[1] for column in rows)
    shared = np.zeros((int(classes.max()) + 1, int(found.max()) + 1), dtype=np.int64)
    np.add.at(shared, (classes, found), 1)
    return float(shared[linear_sum_assignment(shared, maximize=True)].sum() / len(classes))


def _columns(labels: npt.ArrayLike, clusters: npt.ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    first, second = np.asarray(labels), np.asarray(clusters)
    if first.ndim != 1 or first.shape != second.shape or not len(first):
        raise DataError(
            f"labels of shape {first.shape} and clusters of shape {second.shape}: give one label and one "
            "cluster a row, for at least one row"
        )
    return first, second


@dataclass(frozen=True)
class KMeansScores:
    """Squared distances, NMI and accuracy of each restart of k-means, float64 (restarts,)."""

    inertias: np.ndarray
    nmis: np.ndarray
    accuracies: np.ndarray

    @property
    def best(self) -> int:
        """The restart of the smallest inertia; the first of equals."""
        return int(np.argmin(self.inertias))

    @property
    def nmi(self) -> float:
        """Of the best restart."""
        return float(self.nmis[self.best])

    @property
    def accuracy(self) -> float:
        """Of the best restart."""
        return float(self.accuracies[self.best])

    def to_dict(self) -> dict[str, float | int]:
        """Scores of the best restart, and mean and standard deviation over all of them."""
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
    client: Client | None = None,
    progress: Progress | None = None,
) -> KMeansScores:
    """Cluster an output by k-means, many times from new starts, and hold the clusters against the classes.

    The protocol of the paper's Tables 3 and 4: the restart of the smallest inertia counts, whatever its
    scores. Restarts are independent: they run in threads, or as the tasks of one Dask map, and give the same
    numbers wherever they run.

    Parameters
    ----------
    output : array-like, shape (n, d); or Dataset
        Whole in memory, in each process that clusters.
    labels : array-like, shape (n,), optional
        Classes; by default the labels of the Dataset.
    n_clusters : int, optional
        By default the number of classes.
    restarts : int
    random_state : int, Generator or RandomState
    n_jobs : int, optional
        Threads; None is all cores.
    client : distributed.Client, optional
        Needs a stored Dataset with labels, which its workers open.
    progress : callable, optional
        Called with restarts done and restarts in all.

    Returns
    -------
    KMeansScores

    Raises
    ------
    DataError
        No labels, labels that are not classes, NaN, fewer rows than clusters, rows that do not fit into
        memory, a client without a stored Dataset.
    JobError
        With a client: no restart ended for 15 minutes.

    Warns
    -----
    UserWarning
        Clusters stayed empty, since many rows are equal.

    Examples
    --------
    >>> x = np.concatenate([np.zeros((20, 2)), np.ones((20, 2))])
    >>> kmeans_scores(x + np.arange(40)[:, None] / 1e3, np.repeat(["a", "b"], 20), restarts=3).accuracy
    1.0
    """
    if restarts < 1:
        raise DataError(f"restarts={restarts}: give a whole number of at least 1")
    seed = resolve_seed(random_state)
    if client is not None:
        found = _on_dask(output, labels, n_clusters, seed, restarts, client, progress)
    else:
        rows, classes = _rows_of(output, labels)
        k = _clusters(n_clusters, classes, len(rows))
        found = _in_threads(rows, classes, k, seed, restarts, resolve_jobs(n_jobs), progress)
    inertias, nmis, accuracies, missing = np.array(found).T
    if missing.any():
        warnings.warn(
            f"{int((missing > 0).sum())} of {restarts} k-means found up to {int(missing.max())} clusters "
            "fewer than asked for: many rows of the output are equal; a network of more clusterings, or of "
            "more features for each, tells more rows apart",
            stacklevel=2,
        )
    return KMeansScores(inertias, nmis, accuracies)


def _rows_of(output: RowsLike, labels: LabelsLike | None) -> tuple[np.ndarray, np.ndarray]:
    """Output in memory, and classes as codes."""
    where = getattr(output, "url", None) or "the output"
    if isinstance(output, Dataset):
        if labels is None:
            labels = labels_of(output)
        _check_memory(len(output), output.n_features, output.dtype.itemsize, where)
        output = output.read_x(0, len(output))
    if labels is None:
        raise DataError(f"{where} has no labels, so clusters cannot be held against classes: pass labels")
    rows = np.asarray(output)
    if rows.ndim != 2 or not rows.size:
        raise DataError(f"{where} has shape {rows.shape}: give rows (n, d) of at least one column")
    classes = np.asarray(labels)
    if classes.shape != (len(rows),):
        raise DataError(f"labels of shape {classes.shape} for {len(rows)} rows: give one label a row")
    if rows.dtype not in (np.float32, np.float64):
        rows = rows.astype(np.float64)
    if not np.isfinite(rows).all():
        bad = int(np.argwhere(~np.isfinite(rows))[0, 0])
        raise DataError(f"{where}: row {bad} holds NaN or infinity, which has no cluster; leave it out")
    return rows, np.unique(classes, return_inverse=True)[1]


def labels_of(dataset: Dataset) -> np.ndarray:
    where = dataset.url or "the rows"
    if not dataset.has_y:
        raise DataError(
            f"{where}: there are no labels, so nothing to hold clusters against; import the rows with their "
            "labels, or leave these metrics out"
        )
    if dataset.y_kind != "labels":
        raise DataError(
            f"{where}: rows have {dataset.n_targets} {dataset.y_kind} columns instead of one class each, "
            "which clusters cannot be held against; ask for retrieval"
        )
    return dataset.read_y(0, len(dataset))


def _check_memory(n: int, width: int, itemsize: int, where: str) -> None:
    # k-means centres a copy of its own beside the rows.
    needed = 2 * n * width * max(itemsize, 4)
    if needed > MEMORY_SHARE * memory_limit():
        raise DataError(
            f"{where}: k-means needs its {n:,} rows of {width:,} columns in memory ({needed / 2**30:.1f} GiB "
            f"with its copy, beyond {MEMORY_SHARE:.0%} of this machine's); score fewer rows, or an output of "
            "fewer columns"
        )


def _clusters(n_clusters: int | None, classes: np.ndarray, n: int) -> int:
    k = int(classes.max()) + 1 if n_clusters is None else int(n_clusters)
    if not 1 <= k <= n:
        raise DataError(f"n_clusters={k}: give 1 to {n}, the number of rows")
    return k


def _cluster_once(rows: np.ndarray, classes: np.ndarray, k: int, seed: int, restart: int) -> list[float]:
    """(inertia, NMI, accuracy, clusters that stay empty) of one restart, by nothing but its arguments."""
    from sklearn.cluster import KMeans

    start = int(stream(seed, "kmeans", 0, restart).integers(2**31))
    # One thread: sums over rows of several come in the order in which the threads end.
    with single_threaded():
        fitted = KMeans(k, n_init=1, random_state=start).fit(rows)
    clusters = fitted.labels_
    missing = float(k - len(np.unique(clusters)))
    return [float(fitted.inertia_), nmi(classes, clusters), clustering_accuracy(classes, clusters), missing]


def _in_threads(
    rows: np.ndarray,
    classes: np.ndarray,
    k: int,
    seed: int,
    restarts: int,
    threads: int,
    progress: Progress | None,
) -> list[list[float]]:
    from sklearn.exceptions import ConvergenceWarning

    done: queue.SimpleQueue[int] = queue.SimpleQueue()

    def work(restart: int) -> list[float]:
        found = _cluster_once(rows, classes, k, seed, restart)
        done.put(restart)
        if progress is not None:
            progress(done.qsize(), restarts)
        return found

    # Empty clusters are told once for all restarts. Filters are the process's: here, around all threads, and
    # not in the tasks of a worker, which may run beside each other.
    with warnings.catch_warnings(), ThreadPoolExecutor(min(threads, restarts), "kmeans") as pool:
        warnings.simplefilter("ignore", ConvergenceWarning)
        futures = [pool.submit(work, restart) for restart in range(restarts)]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()


def _task(spec: DatasetSpec, n_clusters: int | None, seed: int, restart: int) -> list[float]:
    """One restart in a worker, which opens the rows itself."""
    rows, classes = _rows_of(Dataset.from_spec(spec), None)
    return _cluster_once(rows, classes, _clusters(n_clusters, classes, len(rows)), seed, restart)


def _on_dask(
    output: RowsLike,
    labels: LabelsLike | None,
    n_clusters: int | None,
    seed: int,
    restarts: int,
    client: Client,
    progress: Progress | None,
) -> list[list[float]]:
    from distributed import wait

    from scalelatent.engine.dask.worker_access import send_access

    if labels is not None or not isinstance(output, Dataset) or not output.is_stored:
        raise DataError(
            "k-means on a cluster reads rows and labels from a stored dataset, which every worker can open: "
            "write the output with transform(rows, out='z.zarr') or Dataset.save and pass that, without "
            "labels beside it"
        )
    send_access(client, output)
    labels_of(output[:1])
    _clusters(n_clusters, np.zeros(1, np.int64), len(output))
    job = uuid.uuid4().hex[:8]
    tasks = [
        client.submit(_task, output.spec(), n_clusters, seed, restart, key=f"kmeans-{job}-r{restart:04d}")
        for restart in range(restarts)
    ]
    ended, waited = 0, 0.0
    try:
        while ended < restarts:
            try:
                wait(tasks, timeout=_POLL_SECONDS)
            except TimeoutError:
                waited += _POLL_SECONDS
            now = sum(task.status in ("finished", "error", "lost", "cancelled") for task in tasks)
            if now > ended and progress is not None:
                progress(now, restarts)
            waited, ended = (0.0, now) if now > ended else (waited, ended)
            if waited > STALL_SECONDS:
                raise JobError(
                    f"k-means: no restart ended in {STALL_SECONDS:.0f} s ({ended} of {restarts} did); look "
                    "at the cluster's dashboard for workers that hang, or run it without a client"
                )
        return [task.result(timeout=60) for task in tasks]
    finally:
        client.cancel(tasks)
