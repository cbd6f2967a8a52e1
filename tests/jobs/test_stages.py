"""Steps after the fit are reported as stages of the run, with their progress."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import scalelatent as sl
from scalelatent.cli import app
from scalelatent.jobs.resolve import load_job
from scalelatent.jobs.runfolder import RunFolder
from scalelatent.jobs.runner import run_new_job
from tests.helpers import HookLog, make_fresh_kernel

JOBS = {
    "capsule": "capsule_dim = 2\nmax_iter = 3",
    "crbm": "n_hidden = 2\nn_epochs = 2\nbatch_size = 20",
    "mbn": "n_clusterings = 5\nk1 = 20\nn_classes = 4",
}


class StageRecorder(sl.Callback):
    """Callback that records stages, and at each progress report the state and progress in the run folder."""

    def __init__(self, run: Any) -> None:
        self.run, self.stages, self.progress = run, [], {}
        self.states: dict[str, Any] = {}
        self.files: dict[str, Any] = {}
        self.status = ""

    def on_stage(self, info: dict[str, Any]) -> None:
        self.stages.append(info["stage"])

    def on_progress(self, info: dict[str, Any]) -> None:
        stage = info["stage"]
        self.progress.setdefault(stage, []).append((info["rows_done"], info["rows_total"]))
        self.states[stage] = RunFolder(self.run).read_state()
        self.files[stage] = RunFolder(self.run).read_progress()
        if stage == "report" and not self.status:
            self.status = CliRunner().invoke(app, ["status", str(self.run)]).output


@pytest.mark.parametrize("kind", JOBS)
def test_scoring_and_report_are_stages(kind: str, job_paths: SimpleNamespace) -> None:
    text = job_paths.job.read_text().replace("[model]", f"[model]\n{JOBS[kind]}")
    text = text.replace('kind = "capsule"', f'kind = "{kind}"')
    text = text.replace('capsule_dim = 2\n        max_iter = 5\n        tol = "none"', "")
    if kind == "crbm":
        x = (np.random.default_rng(0).normal(size=(400, 16)) > 0).astype("u1")
        sl.Dataset.from_arrays(x, x).save(job_paths.data, overwrite=True)
    if kind == "mbn":
        text = text.replace('validation = "small.zarr"', "").replace('validation_rows = "300:350"', "")
    job_paths.job.write_text(text)
    watch = StageRecorder(job_paths.run)
    run_new_job(load_job(job_paths.job), callbacks=[watch])
    assert watch.stages[-3:] == ["saving", "scoring", "report"]
    for stage in ("scoring", "report"):
        done, total = watch.progress[stage][-1]
        assert done == total > 0
        assert watch.states[stage]["stage"] == stage
        assert watch.states[stage]["state"] == "running"
        assert watch.files[stage]["stage"] == stage
    assert "report" in watch.status
    assert "rows of the stage" in watch.status
    # The status has the progress of the report over its 50 rows, in place of values of the last pass.
    assert "0 of 50" in watch.status


def test_a_run_cancelled_at_its_report_resumes_and_writes_the_report(job_paths: SimpleNamespace) -> None:
    class Stop(sl.Callback):
        def on_stage(self, info: dict[str, Any]) -> None:
            if info["stage"] == "report":
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_new_job(load_job(job_paths.job), callbacks=[Stop()])
    assert CliRunner().invoke(app, ["resume", str(job_paths.run)]).exit_code == 0
    assert RunFolder(job_paths.run).has_report


def test_compilation_for_scoring_is_reported(use_fake_estimator: Any, job_paths: SimpleNamespace) -> None:
    def score(self: Any, rows: Any, **kwargs: Any) -> float:
        return float(make_fresh_kernel()(0))

    use_fake_estimator.score = score
    log = HookLog()
    run_new_job(load_job(job_paths.job), callbacks=[log])
    events = [info["event"] for info in log.infos("event")]
    assert events == ["compiling_kernels", "kernel_compiled"]
