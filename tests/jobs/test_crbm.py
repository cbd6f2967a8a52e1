"""Jobs of kind "crbm" read rows and their targets, resume, and write predictions, scores and a report."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scalelatent import Dataset, load_model, open_dataset
from scalelatent.errors import DataError, DivergenceError, JobError
from scalelatent.evaluation.scoring import score_dataset
from scalelatent.jobs import runner
from scalelatent.jobs.planning import plan_job
from scalelatent.jobs.resolve import load_job, override
from scalelatent.jobs.runfolder import RunFolder
from tests.estimators.test_crbm import make_patterns
from tests.jobs.test_end_to_end import run_command

JOB = """
[job]
out = "{folder}/run"
seed = 3
[data]
train = "{folder}/x.zarr"
target = "{folder}/v.zarr"
train_rows = "0:300"
validation = "{folder}/x.zarr"
validation_target = "{folder}/v.zarr"
validation_rows = "300:400"
test = "{folder}/x.zarr"
test_target = "{folder}/v.zarr"
test_rows = "400:"
[model]
kind = "crbm"
n_hidden = 4
n_epochs = 3
learning_rate = 0.2
n_sweeps = "none"
[engine]
checkpoint_steps = 5
"""


@pytest.fixture
def job_folder(tmp_path: Path) -> Path:
    x, v = make_patterns(500, 1)
    Dataset.from_arrays(x).save(tmp_path / "x.zarr", chunk_rows=64)
    Dataset.from_arrays(v).save(tmp_path / "v.zarr", chunk_rows=64)
    (tmp_path / "job.toml").write_text(JOB.format(folder=tmp_path))
    return tmp_path


def test_a_job_fits_predicts_and_scores(job_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_report", lambda *_: None)
    job = load_job(job_folder / "job.toml")
    reported = plan_job(job)
    assert reported["stages"]["learn"]["steps_per_pass"] == 15
    result = runner.run_new_job(job)
    model = load_model(result.folder.url)
    test = open_dataset(job_folder / "x.zarr")[400:].with_target(open_dataset(job_folder / "v.zarr")[400:])
    assert result.scores["test_error"] == pytest.approx(model.errors(test)["all"])
    assert result.scores["test_error"] < 0.1
    assert result.scores["best_validation_error"] == model.best_validation_error_
    assert score_dataset(model, test) == model.errors(test)
    with pytest.raises(JobError, match="unknown metric 'nmi'"):
        score_dataset(model, test, ["nmi"])
    out = model.predict(open_dataset(job_folder / "x.zarr"), out=job_folder / "clean.zarr")
    np.testing.assert_array_equal(out.read_x(0, 500), model.predict(open_dataset(job_folder / "x.zarr")))


def test_a_job_that_diverged_is_resumed_with_a_lower_rate(
    job_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_report", lambda *_: None)
    job = load_job(job_folder / "job.toml", settings=["model.learning_rate=[[0.2, 1], [1e6, 1]]"])
    with pytest.raises(DivergenceError, match="epoch 2, step 16"):
        runner.run_new_job(job)
    folder = RunFolder(str(job_folder / "run"))
    assert "resume the run with it" in folder.read_state()["error"]
    for setting, said in (("learning_rate=0", "give a number above 0"), ("n_epochs=x", "whole number")):
        with pytest.raises(JobError, match=rf"^\[model\] {setting.split('=')[0]}=.*{said}"):
            runner.run_job(override(folder.read_job(), [f"model.{setting}"]), folder, resume=True)
    lower = override(folder.read_job(), ["model.learning_rate=0.1", "model.n_epochs=2"])
    result = runner.run_job(lower, folder, resume=True)
    assert [record["learning_rate"] for record in result.estimator.history_] == [0.2, 0.1]
    assert folder.read_job().params["n_epochs"] == 2


MODEL = """
[model]
kind = "crbm"
n_hidden = 6
n_epochs = 2
learning_rate = [[0.2, 1], [0.1, 1]]
"""
PAIRS = f"""
[job]
seed = 3
out = "pairs"
[data]
train = "noisy.zarr"
target = "clean.zarr"
test = "few.zarr"
test_target = "few-clean.zarr"
{MODEL}
"""
CORRUPTING = f"""
[job]
seed = 3
out = "flips"
[data]
train = "clean.zarr"
test = "few-clean.zarr"
{MODEL}
[model.corruption]
kind = "flip"
rate = 0.1
"""


@pytest.mark.slow
def test_the_commands_from_data_to_restored_images(tmp_path: Path) -> None:
    make = "data", "make", "noisy-digits"
    run_command(*make, "noisy.zarr", "--base-rows", "0:300", "--clean", "clean.zarr", cwd=tmp_path)
    run_command(*make, "few.zarr", "--base-rows", "300:360", "--clean", "few-clean.zarr", cwd=tmp_path)
    for name, text in (("pairs", PAIRS), ("flips", CORRUPTING)):
        (tmp_path / "crbm.toml").write_text(text)
        reported = run_command("fit", "crbm.toml", "--json", cwd=tmp_path).json()
        assert reported["state"] == "done"
        page = (tmp_path / name / "report" / "index.html").read_text()
        assert f"{100 * reported['test_error']:.2f} %" in page
        figures = {file.stem for file in (tmp_path / name / "report").glob("*.png")}
        assert figures == {"restored", "learning", "convergence"}
        rates = [
            record["learning_rate"] for record in RunFolder(str(tmp_path / name)).records("metrics.jsonl")
        ]
        assert rates == [0.2, 0.1]
        run_command("predict", name, "few.zarr", "--out", f"{name}.zarr", cwd=tmp_path)
        restored = open_dataset(tmp_path / f"{name}.zarr").read_x(0, 60)
        clean = open_dataset(tmp_path / "few-clean.zarr").read_binary(0, 60)
        found = run_command("score", name, "few.zarr", "--target", "few-clean.zarr", "--json", cwd=tmp_path)
        assert found.json()["all"] == pytest.approx((restored != clean).mean())
        assert name == "flips" or found.json()["all"] == pytest.approx(reported["test_error"])


def test_a_job_may_fit_a_plain_rbm(job_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job with ``conditional=false`` learns rows alone; if it also has outputs, it is refused."""
    monkeypatch.setattr(runner, "_report", lambda *_: None)
    text = JOB.format(folder=job_folder).replace("x.zarr", "v.zarr")
    lines = [line for line in text.splitlines() if "target" not in line]
    (job_folder / "plain.toml").write_text("\n".join(lines))
    settings = ["model.conditional=false", "model.learner=pcd"]
    job = load_job(job_folder / "plain.toml", settings=settings)
    assert plan_job(job)["stages"]["learn"]["steps_per_pass"] == 15
    result = runner.run_new_job(job)
    model = load_model(result.folder.url)
    assert model.Wvx_.shape == (24, 0)
    hidden = model.transform(open_dataset(job_folder / "v.zarr"), out=job_folder / "h.zarr")
    assert hidden.read_x(0, 500).shape == (500, 4)
    with pytest.raises(DataError, match="learns rows alone"):
        runner.run_new_job(
            load_job(job_folder / "job.toml", settings=[*settings, f"job.out={job_folder}/other"])
        )
