"""Retrieval accuracy: the share of the first retrieved documents that share a topic with the query."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.data import Dataset
from scalelatent.engine.threads import resolve_jobs, single_threaded
from scalelatent.errors import DataError
from scalelatent.kernels.onehot_compiled import count_matches
from scalelatent.kernels.streams import resolve_seed, stream

if TYPE_CHECKING:
    from scipy.sparse import csr_array

    from scalelatent.kernels.arrays import DenseOrCsr
    from scalelatent.typing import LabelsLike, RandomState, RowsLike

RETRIEVAL_METRICS = ("cosine", "overlap")
"""Similarities for the ranking; "overlap" counts the codes that two rows share."""


ScoreBlock = Callable[[np.ndarray], np.ndarray]
"""Function from indices of queries to scores (queries, n) of all n documents; a larger score is nearer."""


def make_scores(output: Any, metric: str) -> ScoreBlock:
    """Return a function of indices of documents (queries): the similarity of each query to all documents."""
    if metric not in RETRIEVAL_METRICS:
        raise DataError(f"metric={metric!r} is not one of {', '.join(RETRIEVAL_METRICS)}")
    sparse = hasattr(output, "tocsr")
    values = output.tocsr() if sparse else np.asarray(output)
    if values.ndim != 2 or min(values.shape) < 1:
        raise DataError(f"the output has shape {values.shape}: give rows (n, d) of at least one column")
    numbers: np.ndarray = values.data if sparse else values  # type: ignore[assignment]
    if numbers.dtype.kind not in "buif" or (numbers.dtype.kind == "f" and not np.isfinite(numbers).all()):
        raise DataError(
            "the output is not numeric, or contains NaN or infinity, so its rows cannot be ranked: score an "
            "output of finite numbers"
        )
    if metric == "overlap":
        return _score_by_overlap(values)
    return _score_by_cosine(values)


def _score_by_cosine(rows: DenseOrCsr) -> ScoreBlock:
    if isinstance(rows, np.ndarray):
        rows = rows.astype(np.float64)
        lengths = np.sqrt(np.einsum("nd,nd->n", rows, rows))[:, None]
        unit = np.divide(rows, lengths, out=rows, where=lengths > 0)
        return lambda queries: unit[queries] @ unit.T
    import scipy.sparse

    lengths = np.sqrt(np.asarray(rows.multiply(rows).sum(axis=1), dtype=np.float64)).ravel()
    scale = np.divide(1.0, lengths, out=np.zeros_like(lengths), where=lengths > 0)
    sparse = scipy.sparse.csr_array(scipy.sparse.diags_array(scale) @ rows.astype(np.float64))
    columns = sparse.T.tocsr()
    return lambda queries: (sparse[queries] @ columns).toarray()


def _score_by_overlap(rows: DenseOrCsr) -> ScoreBlock:
    if not isinstance(rows, np.ndarray) or rows.dtype.kind not in "ui" or rows.min() < 0:
        raise DataError(
            "metric='overlap' counts the codes that rows share: give the output of `codes` of a "
            "bootstrap network, whole numbers of at least 0"
        )
    short = int(rows.max()) <= np.iinfo(np.uint16).max
    codes = np.ascontiguousarray(rows, dtype=np.uint16 if short else np.uint32)
    return lambda queries: count_matches(codes[queries], codes)


# Bytes of the scores of one block of queries, and its largest number of queries.
BLOCK_BYTES, MAX_BLOCK_ROWS = 2**26, 256


@dataclass(frozen=True)
class RetrievalCurve:
    """Mean accuracy for several numbers of retrieved documents."""

    levels: np.ndarray  # numbers of retrieved documents, int64
    accuracy: np.ndarray  # share of relevant documents among them, mean over the queries, float64
    n_documents: int
    n_queries: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "levels": self.levels.tolist(),
            "accuracy": self.accuracy.tolist(),
            "documents": self.n_documents,
            "queries": self.n_queries,
        }


def retrieval_levels(n_documents: int) -> np.ndarray:
    """Return the numbers of retrieved documents to score: 1, 3, 7, 15, … below `n_documents`, int64."""
    powers = itertools.takewhile(lambda level: level < n_documents, (2**j - 1 for j in itertools.count(1)))
    return np.array(list(powers), dtype=np.int64)


def retrieval_accuracy(
    output: RowsLike,
    labels: LabelsLike | None = None,
    *,
    metric: str = "cosine",
    levels: Sequence[int] | None = None,
    queries: int | None = None,
    random_state: RandomState = 0,
    n_jobs: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> RetrievalCurve:
    """Return the share of the nearest documents of a query that share a topic with the query.

    This is the protocol of section 5.5 of X.-L. Zhang, "Multilayer bootstrap networks" (2018). Each document
    of a (test) set is a query for the other documents. A retrieved document without topics is a mistake, and
    a query without topics scores 0 at all levels. Equally near documents share their places, so the order of
    the rows does not matter.

    Parameters
    ----------
    output : array-like or scipy CSR, shape (n, d); or Dataset
        Output for the documents. It must fit into memory; the scores of all pairs need not.
    labels : array-like, shape (n,); or CSR or 0/1 matrix, shape (n, topics); optional
        One class per document, or any number of topics; by default those of the Dataset.
    metric : {"cosine", "overlap"}
        Similarity; "overlap" counts equal codes, for the output of ``codes`` of a bootstrap network.
    levels : sequence of int, optional
        Numbers of retrieved documents; by default 1, 3, 7, 15, … below the number of documents.
    queries : int, optional
        Number of queries, drawn with ``random_state``; by default all documents.
    random_state : int, Generator or RandomState
        Seed of the queries.
    n_jobs : int, optional
        Number of threads; None means all cores. It does not change the result.
    progress : callable, optional
        Called with the completed and the total number of queries.

    Returns
    -------
    RetrievalCurve

    Raises
    ------
    DataError
        There are no labels, labels of other rows, levels out of range, NaN, or fewer than two documents.

    Examples
    --------
    >>> rows = np.array([[1.0, 0.0], [2.0, 0.1], [0.0, 1.0], [0.1, 3.0]])
    >>> retrieval_accuracy(rows, ["a", "a", "b", "b"]).to_dict()["accuracy"]
    [1.0, 0.3333]
    """
    rows, given_labels = _get_rows_and_labels(output, labels)
    score_block = make_scores(rows, metric)
    n = rows.shape[0] if hasattr(rows, "tocsr") else len(rows)
    find_relevant = _make_relevance(given_labels, n)
    levels_to_score = _check_levels(levels, n)
    query_rows = _draw_queries(queries, n, resolve_seed(random_state))
    step = max(1, min(MAX_BLOCK_ROWS, BLOCK_BYTES // (16 * n)))
    blocks = [query_rows[a : a + step] for a in range(0, len(query_rows), step)]

    def work(block: np.ndarray) -> np.ndarray:
        return _sum_accuracy(score_block(block), block, find_relevant(block), levels_to_score)

    with single_threaded(), ThreadPoolExecutor(resolve_jobs(n_jobs), "retrieval") as pool:
        total, done = np.zeros(len(levels_to_score)), 0
        # ``map`` returns the sums in order, so the total is the same for any number of threads.
        for found, block in zip(pool.map(work, blocks), blocks, strict=True):
            total, done = total + found, done + len(block)
            if progress is not None:
                progress(done, len(query_rows))
    return RetrievalCurve(levels_to_score, total / len(query_rows), n, len(query_rows))


def _get_rows_and_labels(output: RowsLike, labels: LabelsLike | None) -> tuple[Any, Any]:
    if isinstance(output, Dataset):
        if labels is None and output.has_y:
            labels = output.read_y(0, len(output))
        where, output = output.url or "the rows", output.read_x(0, len(output))
    else:
        where = "the output"
    if labels is None:
        raise DataError(f"{where}: there are no labels that define relevant documents; pass labels or topics")
    return output, labels


def _make_relevance(labels: Any, n: int) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function of query indices: bool (queries, n), True for a common topic or class."""
    if hasattr(labels, "tocsr") or np.ndim(labels) == 2:
        topics = labels.tocsr() if hasattr(labels, "tocsr") else _topics_from_dense(np.asarray(labels))
        _check_length(topics.shape[0], n)
        present = (topics != 0).astype(np.int32).tocsr()
        columns = present.T.tocsr()
        return lambda queries: (present[queries] @ columns).toarray() > 0
    classes = np.asarray(labels)
    _check_length(len(classes), n)
    codes = np.unique(classes, return_inverse=True)[1]
    return lambda queries: codes[queries][:, None] == codes


def _topics_from_dense(labels: np.ndarray) -> csr_array:
    import scipy.sparse

    if not np.isin(labels, (0, 1)).all():
        raise DataError(
            f"labels of shape {labels.shape} are not topics: give one class per row, or a matrix of 0 and 1"
        )
    return scipy.sparse.csr_array(labels)


def _check_length(found: int, n: int) -> None:
    if found != n:
        raise DataError(f"labels of {found} rows for {n} documents: give the labels of the same rows")


def _check_levels(levels: Sequence[int] | None, n: int) -> np.ndarray:
    if n < 2:
        raise DataError(f"{n} document(s): retrieval needs at least two, a query and one to be found")
    if levels is None:
        return retrieval_levels(n)
    wanted = np.unique(np.asarray(levels, dtype=np.int64))
    if not len(wanted) or wanted[0] < 1 or wanted[-1] >= n:
        raise DataError(f"levels={list(levels)}: give numbers from 1 to {n - 1}, the other documents")
    return wanted


def _draw_queries(queries: int | None, n: int, seed: int) -> np.ndarray:
    if queries is None:
        return np.arange(n)
    if not 1 <= queries <= n:
        raise DataError(f"queries={queries}: give 1 to {n}, the number of documents")
    return np.sort(stream(seed, "queries").permutation(n)[:queries])


def _sum_accuracy(
    scores: np.ndarray, queries: np.ndarray, relevant: np.ndarray, levels: np.ndarray
) -> np.ndarray:
    """Return, for each number of retrieved documents (``levels``), the accuracy summed over the queries."""
    scores = scores.astype(np.float64, copy=False)
    scores[np.arange(len(queries)), queries] = -np.inf  # a query does not find itself
    n, out = scores.shape[1], np.zeros((len(queries), len(levels)))
    for i, (row, hits) in enumerate(zip(scores, relevant, strict=True)):
        order = np.argsort(row)
        rising, nearest_hits = row[order], np.concatenate([[0], np.cumsum(hits[order[::-1]])])
        thresholds = rising[n - levels]  # score of the last retrieved document, for each level
        above = n - np.searchsorted(rising, thresholds, "right")
        reached = n - np.searchsorted(rising, thresholds, "left")
        # Documents with the score of the threshold share the remaining places.
        tied_share = (nearest_hits[reached] - nearest_hits[above]) / (reached - above)
        out[i] = (nearest_hits[above] + (levels - above) * tied_share) / levels
    return out.sum(axis=0)
