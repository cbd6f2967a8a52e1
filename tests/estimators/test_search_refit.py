"""A search refits its best candidate with its own threads, and stores the refit in its run folder."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone

from scalelatent import CapsuleRegression, Dataset, Search
from scalelatent.errors import DataError
from scalelatent.storage.disk import locate

Arrays = tuple[np.ndarray, np.ndarray]
SMALL = {"block_rows": 32, "leaf_rows": 64}
BASE = CapsuleRegression(max_iter=3, random_state=0, n_jobs=1)
GRID = {"capsule_dim": [1, 2]}


def test_the_refit_is_stored_next_to_the_search(
    digits: Arrays, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url = f"memory://search-{uuid.uuid4().hex[:8]}"
    Search(BASE, GRID, cv=2).fit(*digits, run_dir=url, engine=SMALL)
    assert list(locate(url).at("refit/engine").keys(""))
    assert list(tmp_path.iterdir()) == []


def test_a_search_without_refit_has_no_model_and_a_refused_search_keeps_its_results(
    digits: Arrays,
) -> None:
    search = Search(BASE, GRID, cv=2).fit(*digits, engine=SMALL)
    search.set_params(refit=False).fit(*digits, engine=SMALL)
    assert not hasattr(search, "best_estimator_")
    with pytest.raises(AttributeError, match="refit=True"):
        search.predict(digits[0])
    results = search.results_
    with pytest.raises(ValueError, match="cv=1"):
        search.set_params(cv=1).fit(*digits)
    assert search.results_ is results


def test_the_refit_has_the_threads_of_the_search(digits: Arrays, monkeypatch: pytest.MonkeyPatch) -> None:
    from scalelatent.engine import inprocess

    asked: set[Any] = set()
    init = inprocess.InProcessExecutor.__init__

    def record_jobs(self: Any, n_jobs: Any = None, *more: Any, **options: Any) -> None:
        asked.add(n_jobs)
        init(self, n_jobs, *more, **options)

    monkeypatch.setattr(inprocess.InProcessExecutor, "__init__", record_jobs)
    search = Search(clone(BASE).set_params(n_jobs=None), GRID, cv=2, n_jobs=2).fit(*digits, engine=SMALL)
    assert asked == {2}
    assert search.best_estimator_.n_jobs == 2
    assert Search(BASE, GRID, cv=2).fit(*digits, engine=SMALL).best_estimator_.n_jobs == 1


def test_halving_refuses_a_scoring_function(digits: Arrays, tmp_path: Path) -> None:
    search = Search(BASE, GRID, halving=True, min_passes=1, scoring=lambda model, rows: 0.0)
    with pytest.raises(ValueError, match="halving=True compares candidates during the fit"):
        search.fit(*digits, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_row_weights_are_used_in_the_score(digits: Arrays) -> None:
    x, y = digits
    search = Search(BASE, GRID, cv=2).fit(x, y, engine=SMALL)
    weight = np.linspace(0.0, 2.0, len(y))
    expected = search.best_estimator_.score(x, y, weight)
    np.testing.assert_allclose(search.score(x, y, weight), expected, rtol=1e-12)
    np.testing.assert_allclose(
        search.score(Dataset.from_arrays(x, y), sample_weight=weight), expected, rtol=1e-12
    )
    assert search.score(x, y) != expected
    with pytest.raises(DataError, match="brings its own labels"):
        search.score(Dataset.from_arrays(x, y), y)
