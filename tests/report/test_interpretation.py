"""A report interprets its numbers by intervals, baselines and differences, and shows how to use the model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.stats
from sklearn.datasets import load_digits

from scalelatent import CapsuleRegression, ConditionalRBM, Dataset, MultilayerBootstrapNetwork
from scalelatent.contract.kinds import find_kind, import_object
from scalelatent.models.capsule.report import ONE_VS_ALL_NOTE
from scalelatent.models.capsule.report_figures import plot_history
from scalelatent.models.crbm.report import RbmEvidence, collect_rbm, rbm_numbers
from scalelatent.report.build import build_report
from scalelatent.report.classes import Confusion, Reliability, describe_confusion, explain_calibration
from scalelatent.report.interpretation import (
    count_validation_rows,
    explain_error_gap,
    format_error,
    wilson_interval,
)
from scalelatent.report.runfiles import RunFiles, read_run


def write_run(folder: Path, data: dict[str, Any], **event: Any) -> RunFiles:
    """Write a job file with the datasets ``data``, and an event with the fields ``event``; return the run."""
    (folder / "job.json").write_text(json.dumps({"job": {"name": "it"}, "data": data}))
    if event:
        (folder / "events.jsonl").write_text(json.dumps({"event": "fit_started", **event}) + "\n")
    return read_run(folder)


@pytest.mark.parametrize(("wrong", "rows"), [(0, 50), (1, 7), (256, 10_000), (30, 30)])
def test_intervals_are_wilsons(wrong: int, rows: int) -> None:
    expected = scipy.stats.binomtest(wrong, rows).proportion_ci(0.95, method="wilson")
    assert wilson_interval(wrong / rows, rows) == pytest.approx((expected.low, expected.high), abs=1e-6)


def test_errors_of_unweighted_rows_have_counts_and_intervals() -> None:
    assert format_error(0.0256, 10_000, wrong=256).startswith(
        "2.56 % (256 of 10,000 rows; 95 % interval 2.27 to"
    )
    counts = np.array([[30, 2], [0, 18]])
    assert describe_confusion(Confusion(counts, 50.0, 2.0)) == format_error(0.04, 50, wrong=2)
    # A weighted error is not a share of equal rows, so it has no binomial interval.
    assert describe_confusion(Confusion(counts, 200.0, 20.0)) == "10.00 % by weight (2 of 50 rows)"


@pytest.mark.parametrize(
    ("data", "event", "expected"),
    [
        ({"validation": "v"}, {"validation_rows": 120}, 120),
        ({"validation": "v", "validation_rows": "300:350"}, {}, 50),  # Earlier versions wrote no event.
        ({"validation": "v", "validation_rows": ":40"}, {}, 40),
        ({"validation": "v", "validation_rows": "-40:"}, {}, None),
        ({"validation": "v"}, {}, None),
    ],
)
def test_the_number_of_validation_rows_is_found(
    tmp_path: Path, data: Any, event: Any, expected: int | None
) -> None:
    assert count_validation_rows(write_run(tmp_path, data, **event)) == expected


def test_why_errors_differ_names_the_sources(tmp_path: Path) -> None:
    two = {"validation": "train.zarr", "validation_rows": "50000:60000", "test": "test.zarr"}
    text = explain_error_gap(write_run(tmp_path, two), 30) or ""
    assert "best of 30 passes on the validation rows (train.zarr, rows 50000:60000)" in text
    assert "different sources" in text
    one = {"validation": "x", "validation_rows": "0:9", "test": "x", "test_rows": "9:20"}
    text = explain_error_gap(write_run(tmp_path, one), 30, members=45) or ""
    assert "Each of the 45 members is the best" in text
    assert "of one dataset" in text
    assert explain_error_gap(write_run(tmp_path, {"test": "x"}), 30) is None


@pytest.mark.parametrize(("confidence", "verdict"), [(0.25, "underconfident"), (0.99, "overconfident")])
def test_calibration_error_is_defined_and_interpreted(confidence: float, verdict: str) -> None:
    kept = Reliability.empty()
    kept.counts[2], kept.confidence[2], kept.hits[2] = 100, 100 * confidence, 95
    text = explain_calibration(kept, ONE_VS_ALL_NOTE)
    assert f"class is {100 * confidence:.2f} %, and that class is right in 95.00 % of the rows" in text
    assert f"the model is {verdict}" in text
    assert "divided by their sum" in text
    assert "divided by their sum" not in explain_calibration(kept)


def digits() -> tuple[np.ndarray, np.ndarray]:
    x, y = load_digits(return_X_y=True)
    return x[:200].astype(np.uint8), y[:200]


def models(kind: str) -> tuple[Any, Dataset]:
    x, y = digits()
    if kind == "capsule":
        return CapsuleRegression(capsule_dim=1, max_iter=3).fit(x, y), Dataset.from_arrays(x, y)
    if kind == "mbn":
        model = MultilayerBootstrapNetwork(decay=0.5, n_clusterings=5, n_classes=10, n_components=2)
        return model.fit(x), Dataset.from_arrays(x, y)
    binary = (x > 8).astype(np.uint8)
    return ConditionalRBM(n_hidden=3, n_epochs=1).fit(binary, binary), Dataset.from_arrays(binary, binary)


@pytest.mark.parametrize("kind", ["capsule", "mbn", "crbm"])
def test_the_snippet_runs_anywhere(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = models(kind)
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path)
    rows.save("rows.zarr")
    model.save("run/model.zarr")
    write_run(Path("run"), {"train": str(tmp_path / "rows.zarr")})
    page = Path(build_report("run", model=model)).read_text()
    snippet = import_object(find_kind(model._kind).report)(model, None, read_run("run"), "test", None).snippet
    assert str(tmp_path / "run" / "model.zarr") in page.replace("&#39;", "'")
    monkeypatch.chdir("/")
    code = snippet.replace("model.predict(", "print(len(model.predict(").replace("[:10])", "[:10])))")
    code = code.replace("model.transform(", "print(len(model.transform(")
    found: list[Any] = []
    exec(code, {"print": found.append})
    assert found == [10]


def test_a_crbm_is_compared_with_the_unchanged_input(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    v = rng.integers(0, 2, (400, 16)).astype(np.uint8)
    flipped = rng.random(v.shape) < 0.1
    model = SimpleNamespace(
        _source="targets", best_validation_error_=None, n_iter_=2, inference_="mean-field", n_sweeps_=3,
        W_=np.zeros((16, 2)), Wvx_=np.zeros(1), Whx_=np.zeros(1), seed_=1234567,
    )  # fmt: skip
    given, _ = models("crbm")
    evidence = collect_rbm(given, Dataset.from_arrays(*[(np.tile(v, (1, 4)))] * 2))
    assert isinstance(evidence, RbmEvidence)
    x = v ^ flipped
    evidence = RbmEvidence(400, v, v ^ (flipped & (rng.random(v.shape) < 0.5)), x, False, None)
    head, table = rbm_numbers(read_run(tmp_path), model, evidence, "test")
    assert dict(head)["doing nothing"] == f"{100 * flipped.mean():.2f} %"
    assert f"{100 * flipped.mean():.2f} %" == dict(table)["error of doing nothing: x is returned unchanged"]
    assert "of 400 rows; 95 % interval" in dict(table)["test error, all outputs"]
    assert dict(table)["seed"] == "1234567"
    other = RbmEvidence(400, v, evidence.predicted, None, False, None)
    ones = v.mean(axis=0)
    reported = dict(rbm_numbers(read_run(tmp_path), model, other, "test")[0])["ignoring x"]
    assert reported == f"{100 * np.minimum(ones, 1 - ones).mean():.2f} %"


def test_page_of_an_ensemble_shows_its_error_and_the_errors_of_members(tmp_path: Path) -> None:
    x, y = digits()
    model = CapsuleRegression(capsule_dim=1, architecture="one_vs_all", max_iter=4, random_state=0)
    model.fit(x[:150], y[:150], validation=(x[150:], y[150:]))
    data = Dataset.from_arrays(x[150:], y[150:])
    (tmp_path / "job.json").write_text(json.dumps({"data": {"validation": "v", "validation_rows": "0:50"}}))
    for history in (model.history_, [_make_earlier_record(record) for record in model.history_]):
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in history))
        page = Path(build_report(tmp_path, model=model, data=data, role="validation")).read_text()
        assert format_error(1 - model.score(data), 50) in page
        mean = f"{100 * model.mean_member_validation_error_:.2f} %"
        assert f"mean member validation error</th><td>{mean}" in page
    lines = [line.get_label() for line in plot_history(model.history_, ensemble=True).axes[1].lines]
    assert lines[:3] == ["mean member, training", "mean member, validation", "validation"]
    assert lines[3].startswith("lowest validation error")


def _make_earlier_record(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record as earlier versions wrote it: the errors were means over members (capsule models)."""
    names = ("train_error", "validation_error")
    return {key: value for key, value in record.items() if not key.startswith("mean_")} | {
        key: record[f"mean_member_{key}"] for key in names
    }
