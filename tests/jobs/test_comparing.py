"""Comparison of runs: differences, errors and groups, in Python, on the command line and as a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from scalelatent.cli import app
from scalelatent.errors import JobError
from scalelatent.jobs.comparing import compare_runs
from scalelatent.jobs.runfolder import RunFolder
from scalelatent.jobs.spec import DataSection, Job, JobSection
from scalelatent.report.comparison import comparison_tables, write_comparison


def make(
    place: Path, name: str, *, kind: str = "capsule", data: Any = None, state: Any = None, **params: Any
) -> str:
    """Return a run folder like that of a runner."""
    rows = {"train": "x.zarr", "test": "t.zarr"} | (data or {})
    job = Job(JobSection(name=name, out=str(place / name), seed=3), DataSection(**rows), kind, params)
    folder = RunFolder.create(place / name, job)
    folder.begin("running")
    folder.event("fit_started", rows=1234)
    for number in (1, 2):
        folder.append("metrics.jsonl", {"pass": number, "seconds": 0.5, "validation_error": 0.3 / number})
    done = {"state": "done", "seconds": 7.5, "validation_error": 0.15, "best_validation_error": 0.125}
    folder.event("scored", test_error=0.0621, test_rows=500)
    folder.update_state(**{**done, "test_error": 0.0621, **(state or {})})
    return str(place / name)


def test_comparison_lists_differences_and_results(tmp_path: Path) -> None:
    runs = [
        make(tmp_path, "a", capsule_dim=4, architecture="multiclass"),
        make(tmp_path, "b", capsule_dim=8, architecture="multiclass", data={"train_rows": "0:9"}),
    ]
    reported = compare_runs(runs)
    (group,) = reported["groups"]
    assert set(group["differing"]) == {"data.train_rows", "model.capsule_dim"}
    assert (group["kind"], group["role"], group["data"]) == ("capsule", "test", "t.zarr")
    first, second = reported["runs"]
    assert first["parameters"] == {"data.train_rows": None, "model.capsule_dim": 4}
    assert second["parameters"] == {"data.train_rows": "0:9", "model.capsule_dim": 8}
    wanted = {
        "rows": 1234,
        "passes": 2,
        "seconds": 7.5,
        "pass_seconds": 1.0,
        "state": "done",
        "test_rows": 500,
    }
    assert wanted.items() <= first.items()
    assert (first["best_validation_error"], first["test_error"]) == (0.125, 0.0621)
    assert "validation_error" not in first  # The last pass measured it, and its weights were not kept.
    assert reported["notes"] == []
    ((caption, columns, rows),) = comparison_tables(reported)
    assert caption == "capsule: test rows of t.zarr"
    cells = dict(zip(columns, rows[1], strict=True))
    assert (cells["capsule_dim"], cells["train_rows"], cells["training rows"]) == ("8", "0:9", "1,234")
    assert (cells["best validation error"], cells["test error"], cells["time"]) == (
        "12.50 %",
        "6.21 %",
        "7.5 s",
    )


def test_kinds_and_test_rows_form_separate_groups(tmp_path: Path) -> None:
    runs = [
        make(tmp_path, "a", capsule_dim=4),
        make(tmp_path, "b", capsule_dim=4, data={"test": "other.zarr"}),
        make(tmp_path, "c", kind="mbn", k1=9, state={"test_nmi": 0.75, "test_error": None}),
        make(tmp_path, "d", capsule_dim=2),
    ]
    reported = compare_runs(runs)
    assert [run["group"] for run in reported["runs"]] == [0, 1, 2, 0]
    assert [group["differing"] for group in reported["groups"]] == [
        ["data.test", "model.capsule_dim"]
    ] * 2 + [[]]
    assert [note.split(":")[0] for note in reported["notes"]] == [
        "models of different kinds (capsule, mbn)",
        "runs were scored on different rows",
    ]
    tables = comparison_tables(reported)
    assert [len(rows) for _, _, rows in tables] == [2, 1, 1]
    assert "75.00 %" in tables[2][2][0]
    assert "capsule_dim" not in tables[2][1]


@pytest.mark.parametrize("state", ["failed", "cancelled"])
def test_unfinished_runs_show_their_progress(tmp_path: Path, state: str) -> None:
    runs = [make(tmp_path, "a"), make(tmp_path, "b", state={"state": state})]
    reported = compare_runs(runs)
    run = reported["runs"][1]
    assert (run["state"], run["validation_error"], run["seconds"], run["passes"]) == (state, 0.15, None, 2)
    assert "test_error" not in run
    assert reported["notes"] == [f"unfinished: {run['id']}; their errors are those of the last pass"]


def test_folders_that_are_not_runs_are_refused(tmp_path: Path) -> None:
    a = make(tmp_path, "a")
    for runs, message in (
        ([a], "a comparison needs two or more run folders"),
        ([a, a], "is given twice"),
        ([a, str(tmp_path)], ", not a run folder"),
    ):
        with pytest.raises(JobError, match=message):
            compare_runs(runs)


def test_a_comparison_is_printed_and_written_as_a_page(tmp_path: Path) -> None:
    runs = [make(tmp_path, name, capsule_dim=dim) for name, dim in (("a", 4), ("b", 8))]
    out = str(tmp_path / "page")
    said = CliRunner().invoke(app, ["compare", *runs, "--out", out])
    assert said.exit_code == 0, said.output
    assert "capsule_dim" in said.output
    assert "6.21 %" in said.output
    page = (tmp_path / "page" / "index.html").read_text()
    names = {file.name for file in (tmp_path / "page").iterdir()}
    assert names == {"index.html", "errors.png", "dimensions.png"}
    for text in ("Comparison of 2 runs", "best validation error", "6.21 %", "95 % intervals", "Figure 5"):
        assert text in page
    reported = json.loads(CliRunner().invoke(app, ["compare", *runs, "--json"]).output)
    assert reported == compare_runs(runs)
    assert write_comparison(reported, out) == str(tmp_path / "page" / "index.html")
    assert (tmp_path / "page" / "index.html").read_text() == page
