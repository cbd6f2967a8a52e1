"""Retrieval accuracy, computed block by block, equals that of a ranking of all documents."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st

from scalelatent import Dataset
from scalelatent.errors import DataError
from scalelatent.evaluation import retrieval, retrieval_accuracy, retrieval_levels


def rank_completely(scores: np.ndarray, relevant: np.ndarray, level: int) -> float:
    """Return the mean share of relevant documents in the first ``level`` ranks; ties share their ranks."""
    total, n = 0.0, len(scores)
    for q in range(n):
        others = np.delete(np.arange(n), q)
        s, hit = scores[q, others], relevant[q, others]
        threshold = np.sort(s)[::-1][level - 1]
        above, tied = s > threshold, s == threshold
        total += (hit[above].sum() + (level - above.sum()) * hit[tied].mean()) / level
    return total / n


def make_topics(n: int, seed: int) -> tuple[Any, np.ndarray]:
    """Return the topics of documents (some have none), and a matrix of which documents share a topic."""
    held = np.random.default_rng(seed).random((n, 70)) < 0.02
    held[:: n // 3 + 1] = False
    return scipy.sparse.csr_array(held.astype(np.uint8)), (held.astype(int) @ held.T) > 0


@given(st.integers(3, 40), st.integers(0, 5))
def test_overlap_equals_brute_force(n: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 3, (n, 6)).astype(np.uint16)  # Few values give many ties.
    y, relevant = make_topics(n, seed)
    scores = (codes[:, None] == codes).sum(axis=2)
    curve = retrieval_accuracy(codes, y, metric="overlap", levels=range(1, n))
    assert curve.accuracy == pytest.approx([rank_completely(scores, relevant, k) for k in range(1, n)])
    wide = retrieval_accuracy(codes.astype(np.uint32) + 70_000, y, metric="overlap", levels=range(1, n))
    assert wide.accuracy.tolist() == curve.accuracy.tolist()


def test_real_outputs_equal_brute_force() -> None:
    rng = np.random.default_rng(0)
    x, (y, relevant) = rng.normal(size=(60, 4)) + 5, make_topics(60, 1)
    unit = x / np.linalg.norm(x, axis=1)[:, None]
    curve = retrieval_accuracy(x, y)
    assert curve.levels.tolist() == [1, 3, 7, 15, 31]
    assert curve.accuracy == pytest.approx(
        [rank_completely(unit @ unit.T, relevant, int(k)) for k in curve.levels]
    )


def test_sparse_rows_rank_like_dense_rows_with_a_row_of_zeros() -> None:
    x = scipy.sparse.random_array((50, 30), density=0.1, rng=1).toarray()
    x[3] = 0
    x = scipy.sparse.csr_array(x)
    y = np.arange(50) % 4
    dense, sparse = (retrieval_accuracy(rows, y).accuracy for rows in (x.toarray(), x))
    assert sparse == pytest.approx(dense)


def test_a_query_without_topics_scores_zero() -> None:
    y = scipy.sparse.csr_array(np.array([[1], [1], [0]], dtype=np.uint8))
    nowhere = np.zeros((3, 2))
    curve = retrieval_accuracy(nowhere, y, levels=[1, 2])
    # All documents are equally near: queries 1 and 2 share a topic with one of two others, query 3 with none.
    assert curve.accuracy == pytest.approx([(0.5 + 0.5 + 0) / 3, (0.5 + 0.5 + 0) / 3])
    dense = retrieval_accuracy(nowhere, y.toarray(), levels=[1, 2])
    assert dense.accuracy.tolist() == curve.accuracy.tolist()


def test_neither_threads_nor_blocks_change_the_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = np.random.default_rng(2).integers(0, 9, (200, 12)).astype(np.uint16)
    y = np.arange(200) % 5
    whole = retrieval_accuracy(codes, y, metric="overlap", n_jobs=1)
    monkeypatch.setattr(retrieval, "MAX_BLOCK_ROWS", 7)
    cut = retrieval_accuracy(codes, y, metric="overlap", n_jobs=3)
    assert cut.accuracy == pytest.approx(whole.accuracy, abs=1e-12)
    assert retrieval_accuracy(codes, y, metric="overlap", n_jobs=1).accuracy.tolist() == cut.accuracy.tolist()


def test_scores_of_all_pairs_are_never_in_memory_together(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    make_scores = retrieval.make_scores

    def recording(*arguments: Any) -> Any:
        score_block = make_scores(*arguments)

        def score(queries: np.ndarray) -> np.ndarray:
            out = score_block(queries)
            sizes.append(out.nbytes)
            return out

        return score

    monkeypatch.setattr(retrieval, "make_scores", recording)
    monkeypatch.setattr(retrieval, "BLOCK_BYTES", 2**16)
    n = 700
    retrieval_accuracy(np.random.default_rng(0).normal(size=(n, 3)), np.arange(n) % 3, n_jobs=1)
    assert max(sizes) <= 2**16
    assert sum(sizes) == 8 * n * n


def test_a_sample_of_queries_is_near_the_whole() -> None:
    rng = np.random.default_rng(3)
    y = np.arange(900) % 3
    x = np.eye(3)[y] + 0.7 * rng.normal(size=(900, 3))
    ds = Dataset.from_arrays(x, y)
    whole, some = retrieval_accuracy(ds), retrieval_accuracy(ds, queries=300)
    assert (whole.n_queries, some.n_queries, some.n_documents) == (900, 300, 900)
    assert np.abs(whole.accuracy - some.accuracy).max() < 0.05
    assert whole.accuracy[0] > 0.5 > whole.accuracy[-1]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"output": np.zeros((3, 2))}, "there are no labels"),
    ({"output": np.zeros((3, 2)), "labels": [0, 1]}, "labels of 2 rows for 3 documents"),
    ({"output": np.zeros((3, 2)), "labels": np.full((3, 2), 0.5)}, "are not topics"),
    ({"output": np.zeros((3, 2)), "labels": [0, 1, 1], "levels": [3]}, "give numbers from 1 to 2"),
    ({"output": np.zeros((3, 2)), "labels": [0, 1, 1], "queries": 4}, "queries=4: give 1 to 3"),
    ({"output": np.zeros((1, 2)), "labels": [0]}, "retrieval needs at least two"),
    ({"output": np.full((3, 2), np.nan), "labels": [0, 1, 1]}, "contains NaN"),
    ({"output": np.zeros((3, 2)), "labels": [0, 1, 1], "metric": "overlap"}, "counts the codes"),
    ({"output": np.zeros((3, 2)), "labels": [0, 1, 1], "metric": "hamming"}, "is not one of cosine"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[message[:24] for _, message in BAD])
def test_bad_input_raises_an_error_that_names_it(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        retrieval_accuracy(**arguments)


def test_levels_are_powers_of_two_minus_one() -> None:
    assert retrieval_levels(402_207)[-1] == 262_143
    assert retrieval_levels(2).tolist() == [1]
