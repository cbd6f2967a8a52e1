"""Clusters are compared with classes; restarts of k-means give the same scores with any number of threads."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalelatent import Dataset
from scalelatent.errors import DataError
from scalelatent.evaluation import clustering_accuracy, kmeans_scores, nmi

PARTITIONS = st.integers(1, 30).flatmap(
    lambda n: st.tuples(*(st.lists(st.integers(0, 3), min_size=n, max_size=n) for _ in range(2)))
)


@settings(max_examples=25)
@given(PARTITIONS)
def test_accuracy_uses_the_best_pairs_of_clusters_and_classes(columns: tuple[list[int], list[int]]) -> None:
    labels, clusters = map(np.array, columns)
    best = max((np.array(names)[clusters] == labels).mean() for names in itertools.permutations(range(4)))
    assert clustering_accuracy(labels, clusters) == pytest.approx(best)


@settings(max_examples=25)
@given(PARTITIONS, st.permutations(range(4)))
def test_names_of_clusters_do_not_matter(columns: tuple[list[int], list[int]], names: list[int]) -> None:
    labels, clusters = map(np.array, columns)
    renamed = np.array(names)[clusters]
    assert nmi(labels, renamed) == pytest.approx(nmi(labels, clusters))
    assert clustering_accuracy(labels, renamed) == clustering_accuracy(labels, clusters)


def make_blobs(n: int = 300, spread: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    y = np.arange(n) % 6
    return rng.normal(size=(6, 3))[y] * 2 + spread * rng.normal(size=(n, 3)), y


def test_the_best_restart_is_that_of_the_smallest_inertia() -> None:
    x, y = make_blobs()
    scores = kmeans_scores(x, y, restarts=12)
    assert len(set(scores.inertias)) > 1
    assert scores.inertias[scores.best] == scores.inertias.min()
    assert scores.nmi == scores.nmis[scores.best]
    assert scores.to_dict()["accuracy_mean"] == pytest.approx(scores.accuracies.mean())


def test_threads_do_not_change_the_numbers() -> None:
    x, y = make_blobs()
    one, three = (kmeans_scores(x, y, restarts=9, n_jobs=jobs) for jobs in (1, 3))
    assert one.inertias.tolist() == three.inertias.tolist()
    assert one.nmis.tolist() == three.nmis.tolist()
    fewer = kmeans_scores(x, y, restarts=4)
    assert fewer.inertias.tolist() == one.inertias[:4].tolist()


def test_empty_clusters_give_one_warning() -> None:
    x = np.zeros((30, 2))
    with pytest.warns(UserWarning, match="4 of 4 restarts of k-means found up to 2 clusters fewer") as warned:
        found = kmeans_scores(x, np.arange(30) % 3, restarts=4, n_jobs=2)
    assert len(warned) == 1
    assert found.nmi == 0


BAD: list[tuple[dict[str, Any], str]] = [
    ({"output": np.zeros((4, 2)), "labels": None}, "has no labels"),
    ({"output": np.zeros((4, 2)), "labels": [0, 1]}, r"labels of shape \(2,\) for 4 rows"),
    ({"output": np.full((4, 2), np.nan), "labels": [0, 0, 1, 1]}, "row 0 contains NaN"),
    ({"output": np.zeros((4, 2)), "labels": [0, 0, 1, 1], "n_clusters": 5}, "n_clusters=5: give 1 to 4"),
    ({"output": np.zeros((4, 2)), "labels": [0, 0, 1, 1], "restarts": 0}, "restarts=0"),
    ({"output": Dataset.from_arrays(np.zeros((4, 2)))}, "there are no labels"),
    (
        {"output": Dataset.from_arrays(np.zeros((4, 2)), np.zeros((4, 3)))},
        "rows have 3 targets columns instead of one class each",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[message[:24] for _, message in BAD])
def test_bad_input_raises_an_error_that_names_it(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        kmeans_scores(**arguments)


def test_rows_beyond_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from scalelatent.evaluation import clustering

    monkeypatch.setattr(clustering, "memory_limit", lambda: 1000)
    with pytest.raises(DataError, match="needs its 300 rows of 3 columns in memory"):
        kmeans_scores(Dataset.from_arrays(*make_blobs()))
