"""Jobs of compositional networks run from data to report, resume, and refuse mistakes in job files."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalelatent import load_model, open_dataset
from scalelatent.jobs import runner
from tests.jobs.test_end_to_end import run_command, start_command, stop_process, wait_for_passes

JOB = """
[job]
seed = 1
out = "run"
[data]
train = "letters.zarr"
train_rows = "0:200"
validation = "letters.zarr"
validation_rows = "200:240"
test = "letters.zarr"
test_rows = "240:"
[model]
kind = "hcn"
layers = [[4, [8, 6]]]
p01 = 1e-4
p10 = 1e-4
p_weight = 0.4
p_sparsity = 1e-6
n_epochs = 2
[engine]
report_steps = 20
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with images of three letters, and a job file."""
    folder = tmp_path_factory.mktemp("hcn")
    run_command("data", "make", "letters", "letters.zarr", "--rows", 300, "--alphabet", "AKT", cwd=folder)
    (folder / "job.toml").write_text(JOB)
    return folder


@pytest.fixture
def skip_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_report", lambda *_: None)


def read_records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_job_runs_from_data_to_report(folder: Path) -> None:
    plan = run_command("plan", "job.toml", "--json", cwd=folder).json()["plan"]
    assert plan["bytes_per_image"] == 4 * 17 * 19 * 4
    said = run_command("fit", "job.toml", cwd=folder)
    assert "weights on" in said.err
    assert "weights changed" in said.err
    assert "rows at rest" in said.err
    assert "test compression" in said.out
    model, letters = load_model(folder / "run"), open_dataset(folder / "letters.zarr")
    state = run_command("status", "run", "--json", cwd=folder).json()
    assert state["test_compression"] == pytest.approx(1 - model.score(letters[240:]))
    assert state["objective"] == read_records(folder / "run")[-1]["compression"]
    found = run_command("score", "run", "letters.zarr", "--rows", "240:", "--json", cwd=folder).json()
    assert found["compression"] == pytest.approx(state["test_compression"])
    figures = {file.stem for file in (folder / "run" / "report").glob("*.png")}
    assert figures == {"parts", "features", "learning", "filled"}
    page = (folder / "run" / "report" / "index.html").read_text()
    assert f"{100 * state['test_compression']:.2f} %" in page
    run_command("transform", "run", "letters.zarr", "--out", "s.zarr", cwd=folder)
    places = open_dataset(folder / "s.zarr")
    assert tuple(places.feature_shape) == (17, 19, 4)
    np.testing.assert_array_equal(places.read_x(0, 300), model.transform(letters).reshape(300, -1))
    learned = run_command("model", "info", "run", "--json", cwd=folder).json()["learned"]
    assert learned["weights_"] == ["array 4 x 1 x 8 x 6, bool"]
    run_command("report", "run", cwd=folder)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("model.layers=[[4,[30,6]]]", "features of 30 x 6 are larger than images of 24 x 24"),
        ("model.layers=[[4,[8,6]],[3,[2,2]]]", "need a class layer on top: set templates"),
        ("model.p01=0.5", r"p01=0.5: give a number in (0, 0.5)"),
        ("model.p_wieght=0.1", "did you mean 'p_weight'"),
        ("model.damping=0.5", "online learning stores no messages to damp"),
        ("model.batch_size=500", "larger than the data, 200"),
        ("model.missing=x", "missing='x': give a number, NaN or None"),
        ('data.target="letters.zarr"', "a model of kind 'hcn' learns no outputs; remove the key"),
        ("engine.leaf_rows=-1", "leaf_rows"),
    ],
)
def test_mistakes_are_refused_before_work_starts(folder: Path, setting: str, says: str) -> None:
    said = run_command("fit", "job.toml", "--out", "bad", "--set", setting, cwd=folder, code=2)
    assert says in said.err
    assert not (folder / "bad").exists()


def test_unsupported_methods_are_refused(folder: Path) -> None:
    run_command("fit", "job.toml", "--out", "other", "--set", "model.n_epochs=1", cwd=folder)
    said = run_command("predict", "other", "letters.zarr", "--out", "p.zarr", cwd=folder, code=2)
    assert "has no predict; use `scalelatent transform" in said.err
    said = run_command("score", "other", "letters.zarr", "--metric", "nmi", cwd=folder, code=2)
    assert "unknown metric 'nmi'" in said.err
    run_command("data", "make", "bars", "bars.zarr", "--rows", 5, cwd=folder)
    said = run_command("transform", "other", "bars.zarr", "--out", "b.zarr", cwd=folder, code=2)
    assert "was fitted on" in said.err


@pytest.mark.slow
@pytest.mark.usefixtures("skip_report")
def test_a_job_that_was_interrupted_gives_the_same_model(folder: Path) -> None:
    kept = ["model.online=false", "model.n_epochs=12", "engine.leaf_rows=20", "data.train_rows=0:60"]
    for name, settings in (("online", ["model.n_epochs=12"]), ("kept", kept)):
        more = [word for setting in settings for word in ("--set", setting)]
        run_command("fit", "job.toml", "--out", f"{name}-whole", *more, cwd=folder)
        with start_command("fit", "job.toml", "--out", name, *more, cwd=folder) as process:
            wait_for_passes(folder / name, process, 3)
            said = stop_process(process, signal.SIGINT)
        assert f"scalelatent resume {folder / name}" in said
        run_command("resume", name, cwd=folder)
        whole, resumed = (load_model(folder / run) for run in (f"{name}-whole", name))
        np.testing.assert_array_equal(whole.beliefs_[0], resumed.beliefs_[0])
        keys = ("pass", "steps", "weights_on", "compression")
        histories = [
            [[r[key] for key in keys] for r in read_records(folder / run)] for run in (f"{name}-whole", name)
        ]
        assert histories[0] == histories[1]


CLASSES = """
[job]
seed = 1
out = "traits"
[data]
train = "traits.zarr"
train_rows = "0:60"
validation = "traits.zarr"
validation_rows = "60:80"
test = "traits.zarr"
test_rows = "80:"
[model]
kind = "hcn"
layers = [[4, 5]]
templates = 2
online = false
n_epochs = 20
"""


def test_a_job_learns_classes(folder: Path) -> None:
    make = ("data", "make", "traits", "traits.zarr", "--rows", 100, "--size", 5, "--gap", 1)
    run_command(*make, cwd=folder)
    (folder / "classes.toml").write_text(CLASSES)
    assert "templates" in run_command("plan", "classes.toml", "--json", cwd=folder).json()["plan"]["stages"]
    said = run_command("fit", "classes.toml", cwd=folder)
    assert "test error" in said.out
    model, images = load_model(folder / "traits"), open_dataset(folder / "traits.zarr")
    state = run_command("status", "traits", "--json", cwd=folder).json()
    assert state["test_error"] == pytest.approx(1 - model.score(images[80:]))
    assert "4 templates of" in (folder / "traits" / "report" / "index.html").read_text()
    run_command("predict", "traits", "traits.zarr", "--out", "classes.zarr", cwd=folder)
    reported = open_dataset(folder / "classes.zarr")
    np.testing.assert_array_equal(reported.read_y(0, 100), model.predict(images))
    said = run_command("score", "traits", "traits.zarr", "--metric", "compression", cwd=folder, code=2)
    assert "unknown metric 'compression' of a network with templates" in said.err
    again = ("--out", "bad", "--set", "model.pool=2")
    assert "an odd number" in run_command("fit", "classes.toml", *again, cwd=folder, code=2).err
    plan = ("plan", "classes.toml", "--json", "--set")
    run_command(*plan, "model.inner_rounds=5", cwd=folder)
    said = run_command(*plan, "model.n_candidates=4", cwd=folder, code=2)
    assert "n_candidates=4: this version has no parameter n_candidates" in said.err
