"""Distances of benchmarks/tangent_neighbours.py equal those of least squares.

A tangent is the change of a row under a small transformation. The distance allows steps along tangents.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

from scalelatent.data import Dataset
from scalelatent.errors import DataError

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
if not BENCHMARKS.exists():
    pytest.skip("benchmarks/ is not part of this copy", allow_module_level=True)
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(BENCHMARKS))
    neighbours = importlib.import_module("tangent_neighbours")
nearest_neighbours = neighbours.nearest_neighbours

RNG = np.random.Generator(np.random.Philox(8))
P = 12
TRAIN, X, LABELS = RNG.normal(size=(90, P)), RNG.normal(size=(17, P)), np.arange(90) % 4
DIRECTIONS = RNG.normal(size=(3, P, P))


def make_tangents(rows: np.ndarray) -> np.ndarray:
    """Return three tangents of each row (linear functions of the row); the last is twice the first."""
    found = np.einsum("np,tpq->ntq", rows, DIRECTIONS)
    found[:, 2] = 2 * found[:, 0]
    return found


def compute_by_least_squares(x: np.ndarray, row: np.ndarray, sides: int) -> float:
    own, other = make_tangents(x[None])[0], make_tangents(row[None])[0]
    ways = np.concatenate([own, other][:sides]) if sides else np.zeros((1, P))
    step = np.linalg.lstsq(ways.T, x - row, rcond=1e-9)[0]
    return float(((x - row - ways.T @ step) ** 2).sum())


@pytest.mark.parametrize("sides", [0, 1, 2])
def test_distances_are_those_of_least_squares(
    sides: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = np.array([[compute_by_least_squares(x, row, sides) for row in TRAIN] for x in X])
    train = Dataset.from_arrays(TRAIN, LABELS).save(tmp_path / "rows", chunk_rows=30)
    for size in (4096, 7):
        monkeypatch.setattr(neighbours, "BLOCK_ROWS", size)
        monkeypatch.setattr(neighbours, "QUERY_ROWS", 5 if size == 7 else 256)
        found = nearest_neighbours(
            train, X, tangents=make_tangents, sides=sides, n_candidates=90, damping=0.0
        )
        np.testing.assert_allclose(found.distances, wanted.min(axis=1), rtol=1e-6, atol=1e-9)
        np.testing.assert_array_equal(found.rows, wanted.argmin(axis=1))
        np.testing.assert_array_equal(found.labels, LABELS[found.rows])


def test_fewer_candidates_are_not_nearer_and_damping_keeps_planes_apart() -> None:
    train = Dataset.from_arrays(TRAIN, LABELS)
    every = nearest_neighbours(train, X, tangents=make_tangents, sides=2, n_candidates=90)
    few = nearest_neighbours(train, X, tangents=make_tangents, sides=2, n_candidates=5)
    assert (few.distances >= every.distances - 1e-9).all()
    free = nearest_neighbours(train, X, tangents=make_tangents, sides=2, n_candidates=90, damping=0.0)
    assert (every.distances > free.distances).all()


def test_the_first_of_equal_rows_wins_and_bad_arguments_are_refused() -> None:
    train = Dataset.from_arrays(np.zeros((6, 2)), np.arange(6))
    assert nearest_neighbours(train, np.ones((2, 2))).rows.tolist() == [0, 0]
    with pytest.raises(ValueError, match="give tangents"):
        nearest_neighbours(train, np.ones((2, 2)), sides=1)
    with pytest.raises(ValueError, match="sides=3"):
        nearest_neighbours(train, np.ones((2, 2)), sides=3)
    with pytest.raises(DataError, match="rows of 2 features; give dense rows of 3"):
        nearest_neighbours(train, np.ones((2, 3)))
    with pytest.raises(DataError, match="no labels"):
        nearest_neighbours(Dataset.from_arrays(np.zeros((6, 2))), np.ones((2, 2)))
