"""The report of a conditional RBM shows its numbers and the data of its figures."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalelatent import ConditionalRBM, Dataset
from scalelatent.errors import DataError
from scalelatent.generators.bases import load_base_digits
from scalelatent.kernels.corruption import corrupt
from scalelatent.models.crbm.report import collect_rbm, rbm_numbers
from scalelatent.models.crbm.report_figures import plot_convergence, plot_restored
from scalelatent.report.build import build_report
from scalelatent.report.figures import plot_learning
from scalelatent.report.runfiles import RunFiles
from scalelatent.storage.disk import locate

V = (load_base_digits()[0][:260] > 127).astype(np.uint8)
NOISE: dict[str, Any] = {"kind": "flip", "rate": 0.1}
X = corrupt(V.reshape(260, -1), np.arange(260), seed=1, stage="test", **NOISE)


@cache
def fitted(source: str) -> ConditionalRBM:
    """Fit a model to pairs of corrupted and clean digits, to digits that it corrupts, or to clean digits."""
    clean, given = Dataset.from_arrays(V[:200]), Dataset.from_arrays(X[:200])
    model = ConditionalRBM(
        n_hidden=6,
        n_epochs=2,
        n_sweeps=4,
        random_state=0,
        n_jobs=1,
        corruption=NOISE if source == "corruption" else None,
    )
    if source == "plain":
        return model.fit(None, clean)
    held = Dataset.from_arrays(V[200:])
    if source == "corruption":
        return model.fit(clean, validation=held)
    return model.fit(given.with_target(clean), validation=Dataset.from_arrays(X[200:]).with_target(held))


def page_of(folder: Path, model: ConditionalRBM, data: Dataset | None) -> tuple[str, list[str]]:
    (folder / "job.json").write_text(json.dumps({"job": {"name": "digits"}, "data": {"train": "x.zarr"}}))
    page = Path(build_report(folder, model=model, data=data)).read_text()
    return page, sorted(file.stem for file in (folder / "report").glob("*.png"))


@pytest.mark.parametrize("source", ["pairs", "corruption"])
def test_page_of_a_restoring_model(tmp_path: Path, source: str) -> None:
    clean = Dataset.from_arrays(V[200:])
    data = Dataset.from_arrays(X[200:]).with_target(clean) if source == "pairs" else clean
    model = fitted(source)
    page, names = page_of(tmp_path, model, data)
    assert names == ["convergence", "learning", "restored"]
    assert "Conditional RBM, 64 outputs and 6 hidden units, maximum likelihood by belief propagation" in page
    errors = model.errors(data)
    for share in (errors["all"], errors["changed"]):
        assert f"{100 * share:.2f} %" in page
    assert ("corrupted as in training" in page) == (source == "corruption")
    assert 'src="http' not in page


def test_page_names_the_sample_size_and_prefers_the_exact_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scalelatent.models.crbm.report._choose_sample_rows", lambda model: 50)
    model, data = fitted("corruption"), Dataset.from_arrays(V)
    sampled = collect_rbm(model, data)
    run = RunFiles(locate(tmp_path), history=[])
    reported = dict(rbm_numbers(run, model, collect_rbm(model, data), "test")[0])
    assert reported["test error of 50 rows"] == f"{100 * sampled.all_error:.2f} %"
    run.events = [{"event": "scored", "test_error": model.errors(data)["all"]}]
    reported = dict(rbm_numbers(run, model, collect_rbm(model, data), "test")[0])
    assert reported["test error"] == f"{100 * model.errors(data)['all']:.2f} %"
    assert reported["error where changed of 50 rows"] == f"{100 * sampled.changed_error:.2f} %"
    assert "training error of 50 rows" in dict(
        rbm_numbers(run, model, collect_rbm(model, data), "training")[0]
    )


@pytest.mark.parametrize(
    ("learner", "tol", "words"),
    [
        ("mle-bp", None, "more than 0.001 in the last sweep of sum-product belief propagation"),
        ("mle-mf", 0.5, "more than 0.5 in the last sweep of mean field"),
    ],
)
def test_page_shows_convergence(learner: str, tol: float | None, words: str, tmp_path: Path) -> None:
    model = ConditionalRBM(n_hidden=2, n_epochs=1, learner=learner, tol=tol, random_state=0, n_jobs=1)
    page, _ = page_of(tmp_path, model.fit(X[:40], V[:40].reshape(40, -1)), None)
    assert words in " ".join(page.split())


def test_pages_without_rows_images_or_inputs(tmp_path: Path) -> None:
    page, names = page_of(tmp_path, fitted("plain"), Dataset.from_arrays(V[200:]))
    assert names == ["convergence", "learning"]
    assert "Restricted Boltzmann machine, 64 outputs" in page
    (tmp_path / "b").mkdir()
    page, names = page_of(tmp_path / "b", fitted("pairs"), None)
    assert "made without rows" in page
    (tmp_path / "c").mkdir()
    page, names = page_of(tmp_path / "c", fitted("pairs"), Dataset.from_arrays(X[:, :5]))
    assert "has 5 features per row, but the model was fitted to rows of 64" in page


def test_a_sample_is_predicted_as_the_model_does() -> None:
    model, data = fitted("pairs"), Dataset.from_arrays(X).with_target(Dataset.from_arrays(V))
    evidence = collect_rbm(model, data, sample_rows=100)
    rows = np.concatenate([np.arange(a, a + 2) for a in np.linspace(0, 258, 50).astype(int)])
    np.testing.assert_array_equal(evidence.v, V.reshape(260, -1)[rows])
    np.testing.assert_array_equal(evidence.predicted, model.predict(X[rows]))
    whole = collect_rbm(model, data)
    assert whole.all_error == pytest.approx(model.errors(data)["all"])
    assert whole.changed_error == pytest.approx(model.errors(data)["changed"])


def test_figures_show_the_given_data() -> None:
    figure = plot_restored({"original": V[:3], "restored": 1 - V[:3]}, (8, 8))
    np.testing.assert_array_equal(figure.axes[4].images[0].get_array(), 1 - V[1])
    records = [
        {"pass": i, "objective": 2.0 - i, "validation_error": 0.1, "converged": 1 - 0.1 * i} for i in (1, 2)
    ]
    upper, lower = plot_learning(records).axes
    assert upper.lines[0].get_xydata().tolist() == [[1, 1.0], [2, 0.0]]
    assert lower.lines[0].get_ydata().tolist() == [10.0, 10.0]
    np.testing.assert_allclose(plot_convergence(records).axes[0].lines[0].get_ydata(), [90, 80])
    for wrong, words in (
        (lambda: plot_restored({}, (8, 8)), "no images"),
        (lambda: plot_learning([]), "no epochs"),
        (lambda: plot_convergence([{"pass": 1}]), "no messages"),
    ):
        with pytest.raises(DataError, match=words):
            wrong()
