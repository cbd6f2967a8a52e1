"""Capsule regression has few errors for rows that span few directions, and for features in any units."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import scalelatent as sl
from scalelatent.models.capsule.model.members import build_members
from scalelatent.models.capsule.model.start import subspace_start

ALGORITHMS = ("em", "stepwise")
Case = tuple[Any, np.ndarray, dict[str, Any]]


def make_own_features() -> Case:
    """Return rows of four classes; each class uses three features that no other class uses."""
    rng, y = np.random.default_rng(0), np.repeat(np.arange(4), 100)
    x = np.zeros((400, 12), np.float32)
    for c in range(4):
        x[y == c, 3 * c : 3 * c + 3] = rng.normal(size=(100, 3)) + 1
    return x, y, {}


def make_two_vocabularies() -> Case:
    rng, y = np.random.default_rng(1), np.repeat([0, 1], 150)
    x = np.zeros((300, 16), np.float32)
    for row, c in zip(x, y, strict=True):
        row[rng.choice(4, 2, replace=False) + 8 * c] = 1
    return sp.csr_matrix(x), y, {}


def make_few_distinct_rows() -> Case:
    rng = np.random.default_rng(2)
    return np.repeat(rng.normal(size=(6, 10)), 50, axis=0).astype("f4"), np.repeat([0, 1, 0, 1, 0, 1], 50), {}


def make_oversampled_class() -> Case:
    """Return a class of three distinct rows, repeated, and two classes that scatter in other directions."""
    rng, y = np.random.default_rng(3), np.repeat(np.arange(3), 200)
    x = np.zeros((600, 24), np.float32)
    x[:200, :10], x[200:400, 10:20] = rng.normal(size=(2, 200, 10))
    x[400:, 20:] = rng.normal(size=(3, 4))[np.arange(200) % 3]
    return x, y, {}


def make_words(n: int = 600, seed: int = 4) -> Case:
    """Return rows that each have five of the fifteen words of their class."""
    rng, y = np.random.default_rng(seed), np.arange(n) % 3
    x = np.zeros((n, 45), np.float32)
    for row, c in zip(x, y, strict=True):
        row[rng.choice(15, 5, replace=False) + 15 * c] = 1
    return x, y, {"capsule_dim": 16}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    "case",
    [make_own_features, make_two_vocabularies, make_few_distinct_rows, make_oversampled_class, make_words],
)
def test_rows_of_low_rank_are_learned(case: Callable[[], Case], algorithm: str) -> None:
    x, y, more = case()
    model = sl.CapsuleRegression(algorithm=algorithm, random_state=0, n_jobs=1, **more).fit(x, y)
    assert (model.predict(x) != y).sum() <= 0.01 * len(y)
    if case is make_words:
        other = make_words(300, 5)
        assert 1 - model.score(*other[:2]) <= 0.01


def test_directions_without_rows_of_a_class_have_zero_weights() -> None:
    x, y, _ = make_own_features()
    moment = np.stack([x[y == c].T.astype(float) @ x[y == c] for c in range(4)])
    members = build_members("multiclass", 4, 8)
    w = subspace_start(members, moment, np.full(4, 100.0))
    norms = np.linalg.norm(w.reshape(4, 8, 12), axis=2)
    assert (norms[:, :3] > 0).all()
    assert not norms[:, 3:].any()
    h = np.einsum("cdp,np->ncd", w.reshape(4, 8, 12), x)
    own = (h[np.arange(400), y] ** 2).sum(axis=1)
    np.testing.assert_allclose(own.mean(), 1.0, rtol=1e-5)


@pytest.mark.parametrize("factor", [1e-9, 1e-3, 1e6, 1e9])
def test_a_useless_column_in_other_units_does_not_raise_the_error(factor: float) -> None:
    rng, y = np.random.default_rng(6), np.arange(600) % 3
    x = rng.normal(size=(600, 8)) + 2.0 * (y[:, None] == np.arange(8) % 3)
    errors = {}
    for scale in (1.0, factor):
        rows = np.column_stack([x, scale * rng.normal(size=600)]).astype("f4")
        model = sl.CapsuleRegression(random_state=0, n_jobs=1, max_iter=100, projection=None)
        errors[scale] = 1 - model.fit(rows, y).score(rows, y)
    assert errors[factor] <= errors[1.0] + 0.02
