"""Candidates of a search that learn online share work, and are checked before the search starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalelatent import CapsuleRegression, Search
from scalelatent.errors import ScalelatentError
from tests.helpers import HookLog, InterruptAt

Arrays = tuple[np.ndarray, np.ndarray]
SMALL = {"block_rows": 32, "leaf_rows": 64, "checkpoint_seconds": 0}
BASE = CapsuleRegression(
    capsule_dim=1, n_epochs=2, batch_rows=64, n_chains=2, max_iter=3, projection=12, random_state=0, n_jobs=1
)
ALGORITHMS = ("em", "stepwise")
GRID = {"algorithm": list(ALGORITHMS)}


@pytest.fixture
def models_by_key(monkeypatch: pytest.MonkeyPatch) -> dict[str, CapsuleRegression]:
    """Return a dict into which each search puts its models; key "001-f0" is candidate 1 without fold 0."""
    kept: dict[str, CapsuleRegression] = {}
    set_results = Search._set_results

    def keep(self: Any, params: Any, candidates: Any, scores: Any) -> None:
        kept.update({one.key: one.model for one in candidates})
        set_results(self, params, candidates, scores)

    monkeypatch.setattr(Search, "_set_results", keep)
    return kept


def test_online_candidates_equal_separate_fits(
    digits: Arrays, held_out: Arrays, models_by_key: dict[str, CapsuleRegression]
) -> None:
    log = HookLog()
    search = Search(BASE, GRID, n_jobs=1).fit(*digits, validation=held_out, engine=SMALL, callbacks=log)
    for number, algorithm in enumerate(ALGORITHMS):
        alone = CapsuleRegression(**{**BASE.get_params(), "algorithm": algorithm})
        alone.fit(*digits, validation=held_out, engine=SMALL)
        np.testing.assert_array_equal(models_by_key[f"{number:03d}"].W_, alone.W_)
        assert search.results_["n_passes"][number] == alone.n_iter_
    # All candidates share 4 stages: second moments before and after the projection, projected training rows,
    # and projected validation rows.
    apart = ("search_score", "search_temper", "search_decision")
    made = [name for name in log.stages if not name.startswith(apart)]
    assert len(made) == 4 + len(ALGORITHMS), log.stages


def test_online_candidates_exclude_the_fold(
    digits: Arrays, models_by_key: dict[str, CapsuleRegression]
) -> None:
    x, y = digits
    Search(BASE, GRID, cv=2, refit=False, n_jobs=1).fit(x, y, engine=SMALL)
    weight = np.ones(len(x))
    weight[:300] = 0
    for number, algorithm in enumerate(ALGORITHMS):
        alone = CapsuleRegression(**{**BASE.get_params(), "algorithm": algorithm})
        alone.fit(x, y, sample_weight=weight, engine=SMALL)
        np.testing.assert_array_equal(models_by_key[f"{number:03d}-f0"].W_, alone.W_)


def test_online_candidates_are_checked_before_work_starts(digits: Arrays, tmp_path: Path) -> None:
    log = HookLog()
    grid = [{"algorithm": "em"}, {"algorithm": "stepwise", "kappa": 5}]
    with pytest.raises(ValueError, match=r"candidate 1 .*'kappa': 5.*kappa=5: give a number in"):
        Search(BASE, grid, cv=2).fit(*digits, callbacks=log, run_dir=tmp_path / "run")
    assert not log.stages
    assert not (tmp_path / "run").exists()


def test_divergence_ends_one_candidate_only(
    digits: Arrays, held_out: Arrays, monkeypatch: pytest.MonkeyPatch
) -> None:
    from scalelatent.models.capsule.model.online import CapsuleStepwise

    def raise_divergence(self: Any, *given: Any) -> Any:
        raise FloatingPointError("the log-loss of member(s) [0] is not finite in step 1")

    monkeypatch.setattr(CapsuleStepwise, "step", raise_divergence)
    grid = [{"algorithm": "stepwise"}, {"algorithm": "em"}]
    with pytest.warns(UserWarning, match=r"candidate 0 .*not finite in step 1; its score is nan"):
        search = Search(BASE, grid, n_jobs=1).fit(*digits, validation=held_out, engine=SMALL)
    assert search.best_index_ == 1
    assert "not finite" in search.results_["error"][0]
    with pytest.raises(ScalelatentError, match="candidate 0"):
        Search(BASE, grid, error_score="raise", n_jobs=1).fit(*digits, validation=held_out, engine=SMALL)


def test_a_resumed_search_ends_with_the_same_candidates(
    digits: Arrays, held_out: Arrays, tmp_path: Path, models_by_key: dict[str, CapsuleRegression]
) -> None:
    call = {"validation": held_out, "engine": SMALL}
    Search(BASE, GRID, n_jobs=1).fit(*digits, **call)
    whole = dict(models_by_key)

    with pytest.raises(KeyboardInterrupt):
        Search(BASE, GRID, n_jobs=1).fit(
            *digits, **call, run_dir=tmp_path, callbacks=InterruptAt(2, "pass_end")
        )
    Search(BASE, GRID, n_jobs=1).fit(*digits, **call, run_dir=tmp_path, resume=True)
    for key, model in models_by_key.items():
        np.testing.assert_array_equal(model.W_, whole[key].W_)
