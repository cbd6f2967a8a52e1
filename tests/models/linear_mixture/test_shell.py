"""Mixtures of linear models are scored, reported, searched and resumed, and can skip missing row files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.metrics import log_loss, normalized_mutual_info_score

from scalelatent import Dataset, LinearMixture, LinearMixtureClassifier, Search, load_model, open_dataset
from scalelatent.engine.callbacks import Callback
from scalelatent.errors import DataError, JobError
from scalelatent.evaluation.scoring import make_scorer, score_dataset
from scalelatent.jobs.resolve import load_job
from scalelatent.jobs.runner import run_new_job
from scalelatent.models.linear_mixture.model.components import Components
from scalelatent.models.linear_mixture.model.leave_one_out import LeaveOneOut
from scalelatent.models.linear_mixture.report_data import collect_classes, collect_density, list_phases
from tests.helpers import HookLog, InterruptAt

SMALL: dict[str, Any] = {"n_dims": 3, "max_iter": 3, "random_state": 0, "n_jobs": 1}
TANGENTS: dict[str, Any] = {"tangents": ("shift-x", "thickness"), "image_shape": (8, 8)}


@pytest.fixture(scope="module")
def digits() -> SimpleNamespace:
    x, y = load_digits(return_X_y=True)
    x = x.astype("f4")
    return SimpleNamespace(x=x[:600], y=y[:600], test=Dataset.from_arrays(x[600:1000], y[600:1000]))


@pytest.fixture(scope="module")
def fitted(digits: SimpleNamespace) -> tuple[LinearMixtureClassifier, LinearMixture]:
    m = LinearMixtureClassifier(n_components=2, recognition="tangent-distance", **TANGENTS, **SMALL)
    d = LinearMixture(n_components=12, likelihood="ppca", assignment="soft", **SMALL)
    return m.fit(digits.x, digits.y), d.fit(digits.x)


# -- scores ------------------------------------------------------------------------------------------------


@pytest.fixture
def small_batches(monkeypatch):
    """Let scorers read 150 rows at a time, so that the 400 test rows are several batches."""
    monkeypatch.setattr("scalelatent.evaluation.scoring.BATCH_ROWS", 150)
    monkeypatch.setattr("scalelatent.models.linear_mixture.scoring.BATCH_ROWS", 150)


@pytest.mark.usefixtures("small_batches")
def test_a_classifier_has_scores(digits, fitted):
    m, _ = fitted
    x, y = digits.test.read_x(0, 400), digits.test.read_y(0, 400)
    found = score_dataset(m, digits.test, ["reject", "error", "log_loss"])
    assert list(found) == ["reject", "error", "log_loss"]
    assert found["error"] == pytest.approx(1 - m.score(digits.test))
    assert found["log_loss"] == pytest.approx(log_loss(y, m.predict_proba(x)))
    wrong, order = m.predict(x) != y, np.argsort(m.confidence(x), kind="stable")
    for share, error in found["reject"].items():
        left = order[round(400 * float(share.rstrip("%")) / 100) :]
        assert error == pytest.approx(wrong[left].mean())
    assert list(found["reject"]) == ["0%", "1%", "5%", "10%"]
    assert found["reject"]["10%"] < found["error"]
    assert score_dataset(m, digits.test, ["reject"]) == {"reject": found["reject"]}
    with pytest.raises(JobError, match="reject"):
        score_dataset(m, digits.test, ["rejects"])


@pytest.mark.usefixtures("small_batches")
def test_a_density_has_scores(digits, fitted):
    _, d = fitted
    x, y = digits.test.read_x(0, 400), digits.test.read_y(0, 400)
    found = score_dataset(d, digits.test, ["purity", "nmi", "log_likelihood", "accuracy"])
    assert found["log_likelihood"] == pytest.approx(d.score_samples(x).mean())
    clusters = d.predict(x)
    assert found["nmi"] == pytest.approx(normalized_mutual_info_score(y, clusters))
    majority = sum(np.bincount(y[clusters == k]).max() for k in np.unique(clusters))
    assert found["purity"] == pytest.approx(majority / 400)
    assert found["accuracy"] <= found["purity"]
    weight = np.arange(400.0)
    weighed = score_dataset(d, digits.test.with_weight(weight))["log_likelihood"]
    assert weighed == pytest.approx(np.average(d.score_samples(x), weights=weight))
    assert list(make_scorer(d).test_scores(d, Dataset.from_arrays(x), lambda *_: None)) == ["log_likelihood"]
    with pytest.raises(DataError, match="no labels to compare clusters with"):
        score_dataset(d, Dataset.from_arrays(x), ["nmi"])


def test_written_decisions_equal_returned_ones(digits, tmp_path):
    few = digits.y < 2
    for rows in (few, slice(None)):
        m = LinearMixtureClassifier(n_components=2, **SMALL).fit(digits.x[rows], digits.y[rows])
        given = m.decision_function(digits.x[:50])
        out = m.decision_function(digits.x[:50], out=tmp_path / f"{len(m.classes_)}.zarr")
        np.testing.assert_array_equal(out.read_x(0, 50), given.reshape(50, -1))
        best = given > 0 if given.ndim == 1 else given.argmax(axis=1)
        np.testing.assert_array_equal(m.classes_[best.astype(int)], m.predict(digits.x[:50]))


# -- report pages ------------------------------------------------------------------------------------------


def test_a_classifier_has_a_report_page(digits, fitted, tmp_path):
    m, _ = fitted
    page = Path(m.report(tmp_path, data=digits.test)).read_text()
    named = {file.stem for file in (tmp_path / "report").glob("*.png")}
    wanted = "means directions reconstructions confusion mistakes reliability passes"
    assert named == set(wanted.split())
    assert f"{100 * (1 - m.score(digits.test)):.2f} %" in page
    seen = collect_classes(m, digits.test)
    assert seen.confusion is not None
    assert seen.confusion.error == pytest.approx(1 - m.score(digits.test))
    np.testing.assert_array_equal(seen.codes, np.arange(10))
    # Column c shows the reconstruction by the components of class c, also if another class fits better.
    for c in range(10):
        np.testing.assert_allclose(seen.reconstructed[:, c], m.reconstruct(seen.examples, label=c), atol=1e-4)
    bare = m.report(tmp_path / "bare", data=Dataset.from_arrays(digits.test.read_x(0, 100)))
    assert "have no labels" in Path(bare).read_text()
    assert not (tmp_path / "bare" / "report" / "confusion.png").exists()


def test_a_density_has_a_report_page(digits, fitted, tmp_path):
    _, d = fitted
    page = Path(d.report(tmp_path, data=digits.test)).read_text()
    named = {file.stem for file in (tmp_path / "report").glob("*.png")}
    wanted = "samples means directions reconstructions unlikely passes"
    assert named == set(wanted.split())
    x = digits.test.read_x(0, 400)
    assert f"{d.score(digits.test):,.2f}" in page
    seen = collect_density(d, digits.test)
    order = np.argsort(d.score_samples(x), kind="stable")[:20]
    np.testing.assert_array_equal(seen.least_row_indices, order)
    phases = list_phases(d, d.history_)
    assert [(name, nats) for _, _, name, nats in phases] == [
        ("k-means", False),
        ("settle", False),
        ("em", True),
    ]
    assert sum(b - a + 1 for a, b, *_ in phases) == d.n_iter_


@pytest.mark.parametrize(
    "options",
    [
        {"n_dims": 0, "smoothing": 0.5, "image_shape": (8, 8)},
        {"likelihood": "factor-analysis"},
    ],
)
def test_other_mixtures_have_report_pages(digits, tmp_path, options):
    few = {**SMALL, **options, "n_components": 2}
    for model in (LinearMixtureClassifier(**few), LinearMixture(**few)):
        model.fit(digits.x[:200], *([digits.y[:200]] if isinstance(model, LinearMixtureClassifier) else []))
        page = model.report(tmp_path / type(model).__name__, data=digits.test[:50])
        assert "could not be" not in Path(page).read_text()


# -- searches ----------------------------------------------------------------------------------------------


def test_candidates_of_a_search_read_the_rows_once_per_pass(digits, tmp_path):
    rows = Dataset.from_arrays(digits.x, digits.y).save(tmp_path / "rows.zarr")
    m = LinearMixtureClassifier(**{**SMALL, **TANGENTS, "max_iter": 1})
    grid = {
        "n_components": [2, 3],
        "n_dims": [2, 4],
        "tangent_weight": [0.0, 0.3],
        "recognition_tangent_weight": [0.0, 0.3],
    }
    log, uncached = HookLog(), {"cache": 0}
    held = (digits.test.read_x(0, 400), digits.test.read_y(0, 400))
    search = Search(m, grid, n_jobs=1).fit(
        rows, validation=held, callbacks=log, engine=uncached, run_dir=tmp_path / "run"
    )
    passes = log.infos("pass_end")
    alone = clone(m).set_params(**search.best_params_)
    reported = HookLog()
    alone.fit(rows, validation=held, callbacks=reported, engine=uncached)
    once = reported.infos("pass_end")[0]["bytes_read"]
    assert once > 0
    assert passes[0]["candidates"] == 16
    assert {record["bytes_read"] for record in passes} == {once}
    # There are three more passes: for the sample of rows, the temperatures, and the scores of all candidates.
    assert search.n_passes_ == len(passes) + 3
    best = search.best_estimator_
    np.testing.assert_array_equal(best.bases_, alone.bases_)
    assert best.temperature_ == alone.temperature_
    assert not list((tmp_path / "run" / "engine" / "sets").glob("*"))


def test_candidates_of_one_smoothing_share_the_smoothed_rows(digits):
    m = LinearMixtureClassifier(**(SMALL | {"max_iter": 1, "image_shape": (8, 8), "smoothing": 0.5}))
    held, log = (digits.test.read_x(0, 400), digits.test.read_y(0, 400)), HookLog()
    grid = {"n_components": [2, 3], "n_dims": [2, 4]}
    search = Search(m, grid, n_jobs=1).fit(digits.x, digits.y, validation=held, callbacks=log)
    assert {record["rows"] for record in log.infos("pass_end")} == {600}
    alone = clone(m).set_params(**search.best_params_).fit(digits.x, digits.y, validation=held)
    np.testing.assert_array_equal(search.best_estimator_.bases_, alone.bases_)


def test_searches_use_folds_and_densities(digits):
    m = LinearMixtureClassifier(**SMALL)
    search = Search(m, {"n_components": [1, 3]}, cv=3, n_jobs=1, refit=False).fit(digits.x, digits.y)
    for k, (a, b) in enumerate([(0, 200), (200, 400), (400, 600)]):
        held = np.arange(600) // 200 == k
        alone = clone(m).set_params(n_components=3).fit(digits.x[~held], digits.y[~held])
        found = search.cv_results_[f"split{k}_test_score"][1]
        assert found == pytest.approx(alone.score(digits.x[a:b], digits.y[a:b]), abs=0.03)
    d = LinearMixture(n_components=3, likelihood="ppca", **SMALL)
    search = Search(d, {"n_dims": [1, 6]}, cv=2, n_jobs=1).fit(digits.x)
    assert search.best_params_ == {"n_dims": 6}
    assert search.best_score_ > search.cv_results_["mean_test_score"][0]


# -- missing files of rows, run folders --------------------------------------------------------------------


def test_rows_of_a_bad_shard_are_excluded(digits, tmp_path):
    rows = Dataset.from_arrays(digits.x, digits.y).save(tmp_path / "rows", chunk_rows=50, shard_rows=50)
    Path(rows.shards(100, 101)[0][0]).unlink()
    events: list[dict[str, Any]] = []

    class EventLog(Callback):
        def on_event(self, info: dict[str, Any]) -> None:
            events.append(info)

    m = LinearMixtureClassifier(n_components=2, **SMALL)
    with pytest.raises(DataError, match="is missing"):
        clone(m).fit(open_dataset(tmp_path / "rows"), run_dir=tmp_path / "stopped")
    skip = {"on_bad_shard": "skip"}
    m.fit(open_dataset(tmp_path / "rows"), run_dir=tmp_path / "run", engine=skip, callbacks=EventLog())
    assert [info["rows"] for info in events if info["event"] == "shard_quarantined"] == [50]
    assert m._fitted.counts.sum() == 550
    assert np.abs(m.means_).min(axis=1).max() < 1e-6 < np.abs(m.means_).max(axis=1).min()
    assert m.score(digits.test) > 0.9
    with pytest.raises(ValueError, match="set algorithm='em'"):
        clone(m).set_params(algorithm="stepwise").fit(open_dataset(tmp_path / "rows"), engine=skip)


@pytest.mark.parametrize("after", [0, 3])
def test_the_sample_is_deleted_after_the_fit_and_kept_for_a_resume(digits, tmp_path, after):
    m = LinearMixture(n_components=4, **SMALL)
    options: dict[str, Any] = {"run_dir": tmp_path / "run", "engine": {"checkpoint_passes": 1}}
    with pytest.raises(KeyboardInterrupt):
        clone(m).fit(digits.x, callbacks=InterruptAt(after, "pass_end"), **options)
    sets = tmp_path / "run" / "engine" / "sets"
    assert list(sets.glob("*"))
    resumed = clone(m).fit(digits.x, resume=True, **options)
    assert not list(sets.glob("*"))
    np.testing.assert_array_equal(resumed.bases_, clone(m).fit(digits.x).bases_)
    again = clone(m).fit(digits.x, resume=True, **options)  # The finished fit is loaded.
    np.testing.assert_array_equal(again.bases_, resumed.bases_)


# -- probabilities, components of few rows ----------------------------------------------------------------


def test_leave_one_out_scores_equal_those_of_a_fit_without_the_row():
    """If the basis has all directions, the leave-one-out score of a row is exact.

    The score equals the error of the row from the mean and the principal components of the other rows.
    """
    x = np.random.default_rng(0).normal(size=(12, 5)) * [4.0, 3.0, 2.0, 1.0, 0.5]
    h, mean = 2, x.mean(axis=0)
    values, vectors = np.linalg.eigh(np.cov(x.T, bias=True))
    bases, values = vectors[None, :, ::-1], values[None, ::-1]
    noise = np.array([values[0, h:].mean()])
    p = Components(mean[None], bases, values, noise, np.ones(1), h)
    errors = ((x - mean) ** 2).sum(axis=1) - (((x - mean) @ bases[0, :, :h]) ** 2).sum(axis=1)
    rows = LeaveOneOut(p, np.array([12.0]), "error")
    found = rows.best_scores(x, np.zeros(12, int), errors, errors[:, None], 0, False)
    for i in range(12):
        others = np.delete(x, i, axis=0)
        z = x[i] - others.mean(axis=0)
        directions = np.linalg.svd(others - others.mean(axis=0))[2][:h]
        assert found[i] == pytest.approx(z @ z - ((directions @ z) ** 2).sum())
    assert (found > errors).all()
    # Without the row, its component has a larger error, so the second component of the class is the best.
    both = np.stack([errors, errors + 1e-3], axis=1)
    np.testing.assert_allclose(rows.best_scores(x, np.zeros(12, int), errors, both, 0, False), errors + 1e-3)


@pytest.mark.parametrize("likelihood", ["error", "ppca"])
def test_a_temperature_from_training_rows_gives_calibrated_probabilities(likelihood):
    x, y = load_digits(return_X_y=True)
    held = np.arange(len(x)) % 5 < 2
    options: dict[str, Any] = {**SMALL, "n_components": 6, "n_dims": 5, "likelihood": likelihood}
    m = LinearMixtureClassifier(**options).fit(x[~held], y[~held])
    found = log_loss(y[held], m.predict_proba(x[held]))
    reported = clone(m).fit(x[~held], y[~held], validation=(x[held], y[held]))
    least = log_loss(y[held], reported.predict_proba(x[held]))
    assert least <= found < 1.2 * least
    assert m.predict_proba(x[held]).max(axis=1).mean() == pytest.approx(m.score(x[held], y[held]), abs=0.03)


def test_components_of_few_rows_have_fewer_directions(caplog):
    """Three rows span two directions, so two of four are removed, which the fit counts and logs once."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(63, 9)), np.repeat([0, 1], [60, 3])
    for likelihood in ("error", "ppca"):
        caplog.clear()
        m = LinearMixtureClassifier(n_components=1, **{**SMALL, "n_dims": 4}, likelihood=likelihood)
        m.fit(x, y)
        assert (np.linalg.norm(m.bases_, axis=1) > 0.5).sum(axis=1).tolist() == [4, 2]
        assert m.history_[-1]["cut"] == 2
        reported = [
            record.message for record in caplog.records if "too few rows for n_dims=4" in record.message
        ]
        assert len(reported) == 1
        assert "1 of 2 components" in reported[0]
        assert np.isfinite(m.predict_proba(x)).all()
        # ``far`` is orthogonal to the two directions of class 1. So the reconstruction of the mean of the
        # class plus ``far`` is the mean.
        span = x[60:] - x[60:].mean(axis=0)
        far = rng.normal(size=(1, 9)) @ (np.eye(9) - np.linalg.pinv(span) @ span)
        row = far + x[60:].mean(axis=0)
        np.testing.assert_allclose(m.reconstruct(row, label=1)[0], x[60:].mean(axis=0), atol=1e-4)


@pytest.mark.parametrize("kind", ["linear_mixture", "linear_density"])
def test_jobs_fit_score_and_report(digits, tmp_path, kind):
    Dataset.from_arrays(digits.x[:300], digits.y[:300]).save(tmp_path / "train.zarr")
    digits.test.save(tmp_path / "test.zarr")
    text = f"""
[job]
out = "{tmp_path}/run"
seed = 0
[data]
train = "{tmp_path}/train.zarr"
test = "{tmp_path}/test.zarr"
[model]
kind = "{kind}"
n_components = 2
n_dims = 3
max_iter = 2
n_jobs = 1
"""
    (tmp_path / "job.toml").write_text(text)
    result = run_new_job(load_job(tmp_path / "job.toml"))
    assert not result.warnings
    model = load_model(result.folder.model_url)
    wanted = (
        {"test_error": 1 - model.score(digits.test)}
        if kind == "linear_mixture"
        else {"test_log_likelihood": model.score(digits.test)}
    )
    reported = result.folder.read_state()
    for name, value in wanted.items():
        assert reported[name] == pytest.approx(value)
    assert reported["pass"] == model.n_iter_
    assert reported["objective"] is not None
    assert (tmp_path / "run" / "report" / "means.png").exists()
    assert not list((tmp_path / "run" / "engine" / "sets").glob("*"))
