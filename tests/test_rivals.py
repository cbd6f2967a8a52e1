"""Each method of benchmarks/rivals.py predicts a few rows; each unit is measured once, in limited time.

A unit is one task, one set of rows, one method and one seed.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
pytestmark = pytest.mark.skipif(not BENCHMARKS.exists(), reason="benchmarks/ is not part of this copy")
# For each task, the name of a set of rows that needs no downloaded data.
SET_NAMES = {
    "classification": "digits",
    "density": "digits",
    "clustering": "wine",
    "denoising": "silhouettes, lower half",
    "labels": "generated",
    "parts": "bars",
}


def import_benchmarks(*names: str) -> list[ModuleType]:
    """Import files of benchmarks/, and restore the environment: the files set numbers of threads there."""
    before = dict(os.environ)
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return [importlib.import_module(name) for name in names]
    finally:
        sys.path.remove(str(BENCHMARKS))
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="module")
def tasks() -> Any:
    return import_benchmarks("rivals_tasks")[0]


@pytest.fixture
def rivals() -> Any:
    return import_benchmarks("rivals")[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SET_NAMES)
def test_each_method_answers_for_held_out_rows(tasks: Any, name: str) -> None:
    task, set_name = tasks.TASKS[name], SET_NAMES[name]
    rows = task.sets[set_name](1)
    for found, method in task.list_pairs():
        absent = any(method.startswith(m) and not find_spec(p) for m, p in tasks.NEEDS.items())
        if found != set_name or absent:
            continue
        few = task.first(rows, method)
        score = task.score(few, task.methods[method](few, 1))
        shares = [value for key, value in score.items() if key not in ("log_likelihood", "kinds")]
        assert all(0 <= share <= 100 for share in shares), method
        assert all(np.isfinite(value) for value in score.values()), method


def test_mixed_rows_take_each_value_from_a_usual_row(tasks: Any) -> None:
    rows = tasks.DENSITY.sets["digits"](2)
    usual, other = rows.test[rows.truth == 0], rows.test[rows.truth == 1]
    mixed = rows.test[rows.truth == 2]
    assert len(rows.train) + len(usual) + len(other) < 1797
    assert mixed.shape == usual.shape
    # A mixed row takes the value of each column from some usual row.
    assert all(np.isin(mixed[:, column], usual[:, column]).all() for column in range(64))
    assert (mixed != usual).any(axis=1).mean() > 0.99


def test_chosen_is_the_candidate_with_the_fewest_wrong_targets(tasks: Any) -> None:
    class Constant:
        def __init__(self, value: int) -> None:
            self.value = value

        def fit(self, x: np.ndarray, y: np.ndarray) -> Constant:
            if self.value < 0:
                raise ValueError("too few rows")
            return self

        def predict(self, x: np.ndarray) -> np.ndarray:
            return np.full(len(x), self.value)

    x, y = np.zeros((20, 1)), np.full(20, 3)
    makes = [lambda seed, value=value: Constant(value) for value in (-1, 0, 3, 4)]
    answer = tasks.choose_and_predict(*makes)(tasks.TaskRows(x, y, x[:2], y[:2]), 0)
    assert answer.tolist() == [3, 3]


def make_task(tasks: Any) -> Any:
    """Return a task with a small and a large set of rows, and methods that succeed, fail, or never end."""

    def busy(rows: Any, seed: int) -> Any:
        while rows == "all":
            pass

    methods = {"good": lambda rows, seed: seed, "bad": lambda rows, seed: 1 / 0, "slow": busy}
    loads = {"large": lambda seed: "all", "small": lambda seed: "all"}
    score = lambda rows, answer: {"error": float(answer)}  # noqa: E731
    return tasks.Task(loads, methods, score, lambda rows, method: "few", large=("large",))


@pytest.fixture
def run(rivals: Any, tasks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that runs rivals.py on ``make_task``, and returns measured units and results."""
    monkeypatch.setattr(rivals, "TASKS", {"made": make_task(tasks)})
    out = tmp_path / "rivals.json"
    run_unit, measured = rivals.run_unit, []
    monkeypatch.setattr(
        rivals, "run_unit", lambda unit, limit: (measured.append(unit), run_unit(unit, limit))[1]
    )

    def start(*arguments: str) -> tuple[list[Any], dict[str, Any]]:
        measured.clear()
        monkeypatch.setattr(sys, "argv", ["rivals.py", "--out", str(out), "--limit", "1", *arguments])
        rivals.main()
        parts = json.loads(out.read_text())["parts"] if out.exists() else {}
        return list(measured), {part: found["result"] for part, found in parts.items()}

    return start


def test_units_are_measured_once_and_large_sets_last(run: Any) -> None:
    measured, found = run("--method", "good", "--seeds", "2")
    assert measured == [("made", name, "good", seed) for name in ("small", "large") for seed in (0, 1)]
    assert [found["made/small/good"][seed]["error"] for seed in "01"] == [0, 1]
    assert set(found["made/large/good"]["0"]) == {"error", "cpu_seconds", "date"}
    assert run("--method", "good", "--seeds", "2")[0] == []
    assert run("--method", "good", "--set", "small", "--seeds", "3")[0] == [("made", "small", "good", 2)]
    assert len(run("--method", "good", "--set", "small", "--again")[0]) == 3


def test_failed_units_leave_no_record_and_run_again(run: Any) -> None:
    for _ in range(2):
        measured, found = run("--method", "bad", "--set", "small", "--seeds", "1")
        assert len(measured) == 1
        assert found == {}


def test_slow_units_are_ended_and_other_seeds_of_them_do_not_run(run: Any) -> None:
    measured, found = run("--method", "slow", "--set", "small")
    assert measured == [("made", "small", "slow", 0)]
    assert found["made/small/slow"]["0"]["over_seconds"] == 1
    assert run("--method", "slow", "--set", "small", "--limit", "2", "--seeds", "1")[0] != []


def test_methods_of_absent_packages_are_not_planned(rivals: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "find_spec", lambda package: None)
    args = type("Args", (), {"task": None, "set": None, "method": None, "seed": 0, "seeds": 1})
    methods = {unit[2] for unit in rivals.plan_units(args)}
    assert "RBF SVM" in methods
    assert not [method for method in methods if method.startswith(("LightGBM", "UMAP", "U-Net"))]


def test_tables_have_a_column_for_each_method(tasks: Any) -> None:
    (tables,) = import_benchmarks("tables")
    for name, task in tasks.TASKS.items():
        assert set(tables.RIVALS[name]) == set(task.methods)
