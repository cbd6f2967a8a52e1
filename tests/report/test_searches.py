"""The report of a search shows its candidates and the curves of the best one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from scalelatent.report.build import _history_of_best, draw_candidates, make_candidates_table
from scalelatent.report.runfiles import RunFiles
from scalelatent.storage.disk import locate


def make_candidate(rank: int, score: float | None, **more: Any) -> dict[str, Any]:
    one = {"params": {"k1": rank, "decay": None}, "rank": rank, "score": score, "spread": 0.01, "error": None}
    return one | {"scores": [score, score], "passes": 3, "fit_seconds": 1.5} | more


def test_table_lists_candidates_best_first_and_failed_ones_with_their_error() -> None:
    away = make_candidate(3, None, spread=None, error="not finite")
    search = {
        "scoring": "nmi",
        "folds": 2,
        "candidates": [make_candidate(2, 0.25), away, make_candidate(1, 0.5)],
    }
    table = make_candidates_table(search)
    assert [row[0] for row in table.rows] == ["1", "2", "3"]
    assert table.rows[0][1:3] == ["k1 = 1, decay = none", "0.5000"]
    assert table.rows[2][2] == "not finite"
    picture = draw_candidates(search)
    assert picture.caption.startswith("Scores of 2 candidates of 3 ")
    labels = [text.get_text() for text in picture.figure.axes[0].get_yticklabels()]
    assert labels == ["k1 = 1, decay = none", "k1 = 2, decay = none"]


def test_curves_belong_to_the_saved_model() -> None:
    history = [{"pass": n} for n in (1, 2, 3, 1, 2, 1, 2)]
    run = RunFiles(locate("memory://none"), history=history, search={"folds": 2})
    own = [{"pass": 1, "objective": 0.5}]
    assert _history_of_best(run, SimpleNamespace(history_=own)) == own
    # The last fit of the search is that of the best candidate to all rows; it starts at the last pass 1.
    assert _history_of_best(run, SimpleNamespace(history_=[])) == history[5:]
    run.search = {"folds": 1}
    assert _history_of_best(run, SimpleNamespace(history_=[])) == []
    assert "all candidates" in run.notes[-1]
