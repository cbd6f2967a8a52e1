"""The command line fits a bootstrap network from a job file, scores it, and writes its report."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

from scalelatent import CompressiveMBN, Dataset, load_model
from scalelatent.cli import main
from scalelatent.evaluation import retrieval_accuracy

pytestmark = pytest.mark.slow

JOB = """
[job]
name = "digits-mbn"
seed = 0
out = "run"
[data]
train = "x.zarr"
train_rows = "0:400"
test = "x.zarr"
test_rows = "400:600"
[model]
kind = "mbn"
decay = 0.5
n_clusterings = 30
n_classes = 10
"""


def run_command(*arguments: str, cwd: Path, code: int = 0) -> str:
    """Run the command line; return its output, or its error output if ``code`` is not 0."""
    out, err = io.StringIO(), io.StringIO()
    said = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
    with contextlib.chdir(cwd), said[0], said[1], pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert (ended.value.code or 0) == code, (out.getvalue(), err.getvalue())
    return out.getvalue() if code == 0 else err.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    """Return a folder with a run of the job, and datasets with and without labels."""
    path = tmp_path_factory.mktemp("mbn")
    x, y = load_digits(return_X_y=True)
    Dataset.from_arrays(x[:600].astype(np.uint8), y[:600]).save(str(path / "x.zarr"))
    Dataset.from_arrays(x[:50].astype(np.uint8)).save(str(path / "bare.zarr"))
    (path / "job.toml").write_text(JOB)
    reported = json.loads(run_command("fit", "job.toml", "--json", cwd=path))
    assert reported["state"] == "done"
    assert 0.4 < reported["test_nmi"] <= 1
    assert Path(path, reported["report"]).exists()
    return path


def test_a_run_has_scores(folder: Path) -> None:
    reported = json.loads(
        run_command(
            "score", "run", "x.zarr", "--rows", "400:600", "--metric", "nmi,accuracy",
            "--metric", "retrieval", "--json", cwd=folder,
        )
    )  # fmt: skip
    assert (reported["rows"], reported["restarts"]) == (200, 50)
    state = json.loads((folder / "run" / "state.json").read_text())
    assert reported["nmi"] == state["test_nmi"]
    assert reported["accuracy"] == state["test_accuracy"]
    assert reported["retrieval"]["levels"][:4] == [1, 3, 7, 15]
    assert reported["retrieval"]["accuracy"][0] > 0.5
    assert "nmi spread" in run_command("score", "run", "x.zarr", cwd=folder)


def test_a_run_may_output_codes(folder: Path) -> None:
    job = JOB.replace('out = "run"', 'out = "coded"') + 'output = "codes"\n'
    (folder / "coded.toml").write_text(job)
    reported = json.loads(run_command("fit", "coded.toml", "--json", cwd=folder))
    assert "test_nmi" not in reported
    assert Path(folder, reported["report"]).exists()
    scores = json.loads(run_command("score", "coded", "x.zarr", "--rows", "400:600", "--json", cwd=folder))
    x, y = load_digits(return_X_y=True)
    codes = load_model(folder / "coded").codes(x[400:600].astype(np.uint8))
    assert scores["retrieval"] == retrieval_accuracy(codes, y[400:600], metric="overlap").to_dict()
    said = run_command("score", "coded", "x.zarr", "--metric", "nmi", cwd=folder, code=2)
    assert "use the metric retrieval, or fit with output='pca'" in said


def test_the_error_names_missing_labels_and_unknown_metrics(folder: Path) -> None:
    said = run_command("score", "run", "bare.zarr", "--metric", "nmi", cwd=folder, code=2)
    assert "bare.zarr has no labels" in said
    said = run_command("score", "run", "x.zarr", "--metric", "nmi,f1_macro", cwd=folder, code=2)
    assert "unknown metric 'f1_macro' of MultilayerBootstrapNetwork" in said


def test_the_report_can_be_written_again(folder: Path) -> None:
    page = folder / "run" / "report" / "index.html"
    before = page.read_bytes()
    page.unlink()
    run_command("report", "run", cwd=folder)
    assert page.read_bytes() == before
    assert b"200 test rows" in before
    assert b"Output of each layer" in before


def test_a_compressive_network_is_scored_in_place_of_the_bootstrap_network(folder: Path) -> None:
    pytest.importorskip("torch")
    ds = Dataset.from_arrays(load_digits().data[:400].astype(np.uint8))
    output = load_model(folder / "run").transform(ds)
    small = CompressiveMBN(hidden=(32,), n_epochs=6, batch_size=64, n_jobs=1, random_state=0).fit(ds, output)
    small.save(str(folder / "small.zarr"))
    reported = json.loads(
        run_command("score", "small.zarr", "x.zarr", "--rows", "400:600", "--json", cwd=folder)
    )
    assert reported["nmi"] > 0.2


def test_predict_of_a_model_without_classes_is_refused(folder: Path) -> None:
    reported = run_command("predict", "run", "x.zarr", "--out", "p.zarr", cwd=folder, code=2)
    assert (
        "a MultilayerBootstrapNetwork has no predict; use `scalelatent transform RUN DATA --out OUT`"
        in reported
    )
    assert not (folder / "p.zarr").exists()
