"""Jobs of bootstrap networks run from plan to transform, and resume after a kill."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scalelatent as sl
from scalelatent.data import make_digits, open_dataset
from scalelatent.jobs import runner
from tests.jobs.test_end_to_end import read_files, run_command, start_command, stop_process

pytestmark = pytest.mark.slow

JOB = """
[job]
seed = 1
out = "run"
[data]
train = "train.zarr"
[model]
kind = "mbn"
decay = 0.5
n_clusterings = 48
k1 = 1000
n_components = 5
n_classes = 10
"""


@pytest.fixture(autouse=True)
def skip_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_report", lambda *_: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a dataset of digits and a job file."""
    folder = tmp_path_factory.mktemp("mbn")
    make_digits(str(folder / "train.zarr"), 6000, base_rows=(0, 1500))
    (folder / "job.toml").write_text(JOB)
    return folder


def read_events(run: Path) -> list[dict[str, Any]]:
    path = run / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_job_runs_from_plan_to_transform_and_resumes_after_a_kill(folder: Path) -> None:
    reported = run_command("plan", "job.toml", "--json", cwd=folder).json()["plan"]
    assert [layer["k"] for layer in reported["layers"].values()] == [1000, 500, 250, 125, 62, 31, 15]
    said = run_command("fit", "job.toml", cwd=folder)
    assert "mbn_code-l3, layer 3 of 7, k = 250: 6,000 rows" in said.err
    stages = [event["stage"] for event in read_events(folder / "run") if event["event"] == "layer_written"]
    # Layers 2 to 4 have at least 6,000 centroids (48 times k), so they read them from the codes below.
    steps = [(what, number) for number in range(1, 8) for what in ("gather", "code")]
    assert stages == [f"mbn_{what}-l{n}" for what, n in steps if what == "code" or n not in (2, 3, 4)]
    run_command("transform", "run", "train.zarr", "--out", "z.zarr", cwd=folder)
    z = open_dataset(folder / "z.zarr")
    model = sl.load_model(folder / "run")
    np.testing.assert_array_equal(z.read_x(0, 50), model.transform(open_dataset(folder / "train.zarr")[:50]))
    assert z.has_y

    killed = folder / "killed"
    with start_command("fit", "job.toml", "--out", killed, cwd=folder) as process:
        deadline = time.monotonic() + 120
        while not any(event.get("stage") == "mbn_code-l2" for event in read_events(killed)):
            assert process.poll() is None, process.stdout.read()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        stop_process(process, signal.SIGKILL)
    assert run_command("status", killed, "--json", cwd=folder).json()["state"] == "failed"
    before = len(read_events(killed))
    assert run_command("resume", killed, "--json", cwd=folder).json()["state"] == "done"
    again = [event["stage"] for event in read_events(killed)[before:] if event["event"] == "stage"]
    assert not {"mbn_gather-l1", "mbn_code-l1"} & set(again)
    assert read_files(killed / "model.zarr") == read_files(folder / "run" / "model.zarr")


def test_invalid_requests_of_a_job_are_refused(folder: Path) -> None:
    said = run_command("plan", "job.toml", "--set", "model.k_lst=3", cwd=folder, code=2)
    assert "did you mean 'k_last'?" in said.err
    said = run_command("fit", "job.toml", "--out", "no", "--set", "model.k1=7000", cwd=folder, code=2)
    assert "k1=7000 is more than the 6000 rows" in said.err
    assert not (folder / "no").exists()
