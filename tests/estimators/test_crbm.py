"""Conditional RBMs fit, predict, score, infer, resume, save and learn from streams as documented."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_array
from sklearn.base import clone

import scalelatent as sl
from scalelatent import ConditionalRBM, Dataset
from scalelatent.errors import DataError, RunError
from scalelatent.kernels.corruption import corrupt
from scalelatent.models.crbm import parameters
from scalelatent.models.crbm.fit import log_held_rows
from tests.estimators.crbm_cases import Pair, assert_same, make_patterns, make_rbm
from tests.helpers import InterruptAt

# -- learning ------------------------------------------------------------------------------------------------


def test_mle_bp_learns_and_beats_logistic() -> None:
    """The learner "mle-bp" couples all 24 outputs, which helps because there are only twelve patterns.

    Logistic regression predicts each output on its own.
    """
    pair, held = make_patterns(300, 1, k=12), make_patterns(120, 2, k=12)
    options = {"n_hidden": 16, "n_epochs": 12, "learning_rate": 1.0, "init_scale": 0.1}
    model = make_rbm(**options).fit(*pair, validation=held)
    logistic = make_rbm(learner="logistic", **options).fit(*pair, validation=held)
    assert model.score(*held) > logistic.score(*held) + 0.03
    assert logistic.W_.shape == (24, 0)
    errors = [record["validation_error"] for record in model.history_]
    assert model.best_validation_error_ == min(errors) == pytest.approx(1 - model.score(*held))
    assert model.best_epoch_ == int(np.argmin(errors)) + 1
    assert model.n_sweeps_ == 7 + model.best_epoch_
    first, last = model.history_[0], model.history_[-1]
    assert last["objective"] < first["objective"]
    assert last["n_sweeps"] == 19
    assert 0 < last["converged"] <= 1
    assert model.errors(*held)["changed"] == pytest.approx(
        model.history_[model.best_epoch_ - 1]["changed_error"]
    )


@pytest.mark.parametrize("learner", ["mle-mf", "cd", "pcd", "cd-percloss", "mssvm", "lssvm"])
def test_each_learner_improves_on_the_noisy_inputs(learner: str, pair: Pair, held_pair: Pair) -> None:
    model = make_rbm(learner=learner, n_epochs=6, learning_rate=0.1).fit(*pair)
    assert model.score(*held_pair) > 0.9  # A prediction that copies the noisy inputs has a score of 0.8.
    assert model.n_iter_ == 6


def test_multilabel_sparse_and_wide_outputs_are_learned() -> None:
    rng = np.random.default_rng(0)
    x = (rng.random((200, 50)) < 0.1) * rng.random((200, 50))
    v = (x[:, :8] > 0).astype(np.uint8)
    dense = make_rbm(n_epochs=3).fit(x, csr_array(v))
    sparse = make_rbm(n_epochs=3).fit(csr_array(x), v)
    np.testing.assert_allclose(sparse.Wvx_, dense.Wvx_, atol=1e-5)
    assert sparse.predict(csr_array(x)).shape == (200, 8)
    assert np.isnan(sparse.errors(csr_array(x), v)["changed"])


def test_the_error_of_changed_outputs_is_known_for_sparse_rows(pair: Pair, held_pair: Pair) -> None:
    """The error of outputs that differ from x is computed for dense and for CSR rows of zeros and ones."""
    model = make_rbm(n_epochs=2).fit(
        csr_array(pair[0]), pair[1], validation=(csr_array(held_pair[0]), held_pair[1])
    )
    assert model.errors(csr_array(held_pair[0]), held_pair[1]) == model.errors(*held_pair)
    assert 0 < model.history_[0]["changed_error"] < 1


def test_clean_rows_are_corrupted_on_the_fly(pair: Pair, held_pair: Pair) -> None:
    flips = {"kind": "flip", "rate": 0.2}
    model = make_rbm(corruption=flips, n_epochs=8).fit(pair[1], validation=held_pair[1])
    again = make_rbm(corruption=flips, n_epochs=8).fit(
        None, pair[1], validation=Dataset.from_arrays(held_pair[1])
    )
    assert_same(model, again)
    assert model.Wvx_.shape == (24, 24)
    assert model.score(*held_pair) > 0.93
    assert model.score(held_pair[1]) == pytest.approx(model.score(*held_pair), abs=0.03)
    stored = make_rbm(corruption=flips, n_epochs=1).fit(pair[1], validation=held_pair)
    assert stored.best_validation_error_ == pytest.approx(1 - stored.score(*held_pair))
    patches = make_rbm(corruption={"kind": "occlude", "size": 2, "shape": (4, 6)}, n_epochs=1).fit(pair[1])
    assert 0 < patches.history_[0]["train_error"] < 0.5


def test_the_free_energy_of_a_corrupting_model_accepts_pairs_and_clean_rows(
    pair: Pair, held_pair: Pair
) -> None:
    """Given x and v, nothing is corrupted. Given only clean rows v, x is v corrupted as in ``score``."""
    model = make_rbm(corruption={"kind": "flip", "rate": 0.2}, n_epochs=2).fit(pair[1])

    def by_hand(x: np.ndarray, v: np.ndarray) -> np.ndarray:
        logits = v @ model.W_ + x @ model.Whx_.T + model.bh_
        return -(v * (x @ model.Wvx_.T + model.bv_)).sum(axis=1) - np.logaddexp(0, logits).sum(axis=1)

    x, v = held_pair[0], held_pair[1]
    np.testing.assert_allclose(model.free_energy(x, v), by_hand(x, v), atol=1e-4)
    np.testing.assert_allclose(model.free_energy(csr_array(x), v), by_hand(x, v), atol=1e-4)
    made = corrupt(v, np.arange(len(v)), 0, kind="flip", rate=0.2, seed=model.seed_, stage="corruption-test")
    assert model.score(v) == model.score(made, v)
    np.testing.assert_allclose(model.free_energy(v), by_hand(made, v), atol=1e-4)


@pytest.mark.parametrize(
    "options", [{"kind": "flip", "rate": 0.2}, {"kind": "occlude", "size": (2, 3), "shape": (4, 6)}], ids=str
)
def test_corruption_on_the_fly_equals_stored_corrupted_rows(
    options: dict[str, Any], pair: Pair, tmp_path: Path
) -> None:
    """Only one epoch is compared, because each epoch draws another corruption."""
    v = pair[1]
    fly = make_rbm(corruption=options, n_epochs=1).fit(v)
    x = corrupt(v, np.arange(len(v)), 0, seed=fly.seed_, stage="corruption", **options)
    assert_same(fly, make_rbm(n_epochs=1).fit(x, v))
    rows = Dataset.from_arrays(x).save(tmp_path / "x", chunk_rows=50)
    stored = rows.with_target(Dataset.from_arrays(v).save(tmp_path / "v", chunk_rows=70))
    assert_same(fly, make_rbm(n_epochs=1).fit(stored))


def test_a_plain_rbm_learns_and_reconstructs(pair: Pair) -> None:
    v = pair[1]
    for learner in ("cd", "pcd", "mle-bp", "mle-mf"):
        model = make_rbm(learner=learner, n_epochs=3, learning_rate=0.05).fit(None, v, validation=v)
        assert model.Wvx_.shape == (24, 0)
        assert model.transform(v).shape == (300, 6)
        assert model.predict_marginals().shape == (1, 24)
        assert model.predict(np.empty((5, 0))).shape == (5, 24)
    assert_same(
        model,
        make_rbm(learner="mle-mf", n_epochs=3, learning_rate=0.05).fit(np.empty((300, 0)), v, validation=v),
    )
    energy = model.free_energy(None, v)
    noise = np.random.default_rng(0).integers(0, 2, v.shape)
    assert energy.mean() < model.free_energy(None, noise).mean()


def test_every_inference_returns_beliefs_and_convergence(pair: Pair, held_pair: Pair) -> None:
    model, x = make_rbm(n_epochs=3).fit(*pair), held_pair[0]
    np.testing.assert_allclose(model.infer(x).visible, model.predict_marginals(x), atol=1e-6)
    exact = model.infer(x, inference="sum-product", n_sweeps=40, pairs=True, log_z=True)
    assert exact.converged.all()
    mixed = model.infer(x, inference="mixed-product")
    assert ((mixed.visible > 0.5) == (exact.visible > 0.5)).mean() > 0.95
    likelihood = -model.free_energy(*held_pair) - exact.log_z
    assert (likelihood < 1e-3).all()
    assert exact.pairs is not None
    assert (exact.pairs <= exact.visible.mean(axis=0)[:, None] + 1e-5).all()
    quick = model.infer(x, tol=0.5, n_sweeps=40)
    assert (quick.sweeps < 40).all()
    with pytest.warns(UserWarning, match="tol=1e-09 was not met by .*% of the rows within 2 sweeps"):
        model.infer(x, tol=1e-9, n_sweeps=2)
    with pytest.raises(ValueError, match="inference='bp' is not one of 'sum-product'"):
        model.infer(x, inference="bp")
    with pytest.raises(ValueError, match="results of inference='sum-product', not of 'mean-field'"):
        model.infer(x, inference="mean-field", log_z=True)


def test_log_z_without_hidden_units_is_exact(pair: Pair, held_pair: Pair) -> None:
    model = make_rbm(learner="logistic", n_epochs=2).fit(*pair)
    for inference in (None, "sum-product"):
        found = model.infer(held_pair[0], inference=inference, log_z=True, pairs=True)
        likelihood = np.where(held_pair[1] > 0, found.visible, 1 - found.visible)
        assert found.log_z is not None
        np.testing.assert_allclose(
            -model.free_energy(*held_pair) - found.log_z, np.log(likelihood).sum(axis=1), atol=1e-3
        )


@pytest.mark.parametrize("inference", ["mean-field", "sum-product"])
def test_an_inference_without_sweeps_is_refused(inference: str, pair: Pair) -> None:
    model = make_rbm(n_epochs=1).fit(*pair)
    with pytest.raises(ValueError, match="n_sweeps=0: give a whole number of at least 1"):
        model.infer(pair[0], inference=inference, n_sweeps=0)


def test_scores_use_row_weights(pair: Pair, held_pair: Pair) -> None:
    model = make_rbm(n_epochs=1).fit(*pair)
    weight = np.arange(120) % 3 / 7
    twice = np.repeat(np.arange(120), np.arange(120) % 3)
    assert model.score(*held_pair, sample_weight=weight) == pytest.approx(
        model.score(*(a[twice] for a in held_pair))
    )
    stored = Dataset.from_arrays(*held_pair, sample_weight=weight)
    assert model.score(stored) == model.score(*held_pair, sample_weight=weight) != model.score(*held_pair)
    with pytest.raises(DataError, match="weights have shape"):
        model.score(*held_pair, sample_weight=weight[:5])


# -- the same bits, resume, save ----------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"learner": "mle-bp"}, {"learner": "pcd"}, {"local_steps": 3}], ids=str)
def test_threads_and_storage_do_not_change_the_fit(
    options: dict[str, Any], pair: Pair, tmp_path: Path
) -> None:
    options = {"n_chains": 4, "n_epochs": 2, "momentum": 0.5, "batch_size": 20} | options
    one, three = (make_rbm(n_jobs=jobs, **options).fit(*pair) for jobs in (1, 3))
    assert_same(one, three)
    x = Dataset.from_arrays(pair[0]).save(tmp_path / "x", chunk_rows=50)
    stored = make_rbm(**options).fit(x, Dataset.from_arrays(pair[1]).save(tmp_path / "v", chunk_rows=70))
    assert_same(one, stored)


# Parameters of fits that are interrupted at the reported events 3, 17 and 33, inside epochs 1, 2 and 3.
RESUMED_OPTIONS: list[dict[str, Any]] = [
    {},
    {"learner": "pcd", "momentum": 0.5},
    {"local_steps": 2, "n_chains": 2, "batch_size": 5, "momentum": 0.5},
    {"corruption": {"kind": "flip", "rate": 0.2}},
]


@pytest.mark.parametrize("at", [3, 17, 33])
@pytest.mark.parametrize("options", RESUMED_OPTIONS, ids=str)
def test_a_resume_within_an_epoch_gives_the_same_bits(
    at: int, options: dict[str, Any], pair: Pair, held_pair: Pair, tmp_path: Path
) -> None:
    rows, validation = (pair[1:], held_pair[1]) if "corruption" in options else (pair, held_pair)
    model = make_rbm(n_epochs=3, **options)
    whole = make_rbm(n_epochs=3, **options).fit(*rows, validation=validation)
    call: dict[str, Any] = {"validation": validation, "run_dir": tmp_path, "engine": {"report_steps": 1}}
    with pytest.raises(KeyboardInterrupt):
        model.fit(*rows, **call, callbacks=[InterruptAt(at - 1, "report", "pass_end")])
    model.fit(*rows, **call, resume=True)
    assert_same(model, whole)
    ends = [record for record in model.history_ if record["steps"] % 15 == 0]
    for record, other in zip(ends, whole.history_, strict=True):
        assert record["objective"] == other["objective"]
        assert record["validation_error"] == other["validation_error"]
    with pytest.raises(RunError, match="weight_decay: 0.0 -> 0.1"):
        make_rbm(n_epochs=3, weight_decay=0.1, **options).fit(*rows, **call, resume=True)


def test_a_saved_model_predicts_the_same(pair: Pair, held_pair: Pair, tmp_path: Path) -> None:
    model = make_rbm(learner="mssvm", learning_rate=[(0.2, 1), (0.1, 1)], n_epochs=2).fit(*pair)
    model.save(tmp_path / "m")
    loaded = sl.load_model(tmp_path / "m")
    assert_same(model, loaded)
    np.testing.assert_array_equal(
        loaded.predict_marginals(held_pair[0]), model.predict_marginals(held_pair[0])
    )
    assert loaded.n_sweeps_ == model.n_sweeps_ == 9
    assert_same(model.partial_fit(*held_pair), loaded.partial_fit(*held_pair))
    out = loaded.predict(Dataset.from_arrays(held_pair[0]), out=tmp_path / "out.zarr")
    np.testing.assert_array_equal(out.read_x(0, 120), loaded.predict(held_pair[0]))


def test_plain_and_corrupting_models_are_saved_and_loaded(pair: Pair, tmp_path: Path) -> None:
    v = pair[1]
    make_rbm(learner="cd", n_epochs=1).fit(None, v).save(tmp_path / "plain")
    assert sl.load_model(tmp_path / "plain").transform(v).shape == (300, 6)
    model = make_rbm(corruption={"kind": "flip", "rate": 0.1}, n_epochs=1).fit(v)
    model.save(tmp_path / "flips")
    assert sl.load_model(tmp_path / "flips").score(v) == model.score(v)


def test_partial_fit_continues_a_stream(pair: Pair, held_pair: Pair) -> None:
    model = make_rbm(learner="mle-bp", momentum=0.5)
    for _ in range(4):
        for a in range(0, 300, 50):
            model.partial_fit(pair[0][a : a + 50], pair[1][a : a + 50])
    assert model.score(*held_pair) > 0.9
    again = make_rbm(learner="cd", n_epochs=1).fit(*pair)
    before = again.W_.copy()
    assert (before != again.partial_fit(*held_pair).W_).any()


def test_partial_fit_refuses_another_shape_and_resets_changed_statistics(pair: Pair, held_pair: Pair) -> None:
    """Kept arrays may be smaller than new parameters need; without a reset, writes would exceed them."""
    model = make_rbm(n_epochs=1).fit(*pair)
    for changed in ({"n_hidden": 3}, {"learner": "logistic"}):
        before = model.get_params()
        with pytest.raises(ValueError, match="partial_fit: the last fit was of another shape.*set n_hidden"):
            model.set_params(**changed).partial_fit(*pair)
        model.set_params(**before)
    model.partial_fit(*held_pair)
    for changed in ({"momentum": 0.5}, {"learner": "pcd"}, {"batch_size": 30}, {"momentum": 0.0}):
        model.set_params(**changed).partial_fit(*held_pair)
    assert model.score(*held_pair) > 0.8


def test_schedules_patience_and_warm_starts_are_used(pair: Pair, held_pair: Pair) -> None:
    model = make_rbm(learning_rate=[(0.2, 2), (0.05, 1)], n_epochs=4).fit(*pair)
    assert [record["learning_rate"] for record in model.history_] == [0.2, 0.2, 0.05, 0.05]
    stopped = make_rbm(learner="logistic", patience=1, n_epochs=60, learning_rate=3.0).fit(
        *pair, validation=held_pair
    )
    assert stopped.n_iter_ < 60
    assert stopped.n_iter_ == stopped.best_epoch_ + 1
    warm = make_rbm(warm_start=True, n_epochs=1, learning_rate=1e-9).fit(*pair)
    warm._theta = model._theta
    assert abs(warm.fit(*pair).W_ - model.W_).max() < 1e-6
    with pytest.raises(ValueError, match="warm_start: the last fit was of another shape"):
        warm.set_params(n_hidden=3).fit(*pair)


def test_patience_counts_epochs_and_not_validations(pair: Pair, held_pair: Pair) -> None:
    """The learning rate is almost 0, so no validation is better than the first one."""
    model = make_rbm(patience=2, n_epochs=9, learning_rate=1e-9)
    for every in (None, 3):
        model.fit(*pair, validation=held_pair, engine={"validate_steps": every} if every else None)
        assert (model.best_epoch_, model.n_iter_) == (1, 3)


def test_patience_without_validation_rows_is_refused(pair: Pair) -> None:
    for method in (make_rbm(patience=2).fit, make_rbm(patience=2).plan):
        with pytest.raises(ValueError, match="patience=2 waits for a better .*leave patience out"):
            method(*pair)


def make_default_model(**more: Any) -> ConditionalRBM:
    return ConditionalRBM(n_hidden=6, random_state=0, n_jobs=1, **more)


def test_a_default_fit_holds_out_a_tenth_and_stops_by_it(caplog: pytest.LogCaptureFixture) -> None:
    """Every tenth row is held out. So even if rows are sorted, each pattern is learned and validated."""
    log_held_rows.cache_clear()
    x, v = make_patterns(403, 1)
    order = np.lexsort(v.T)
    x, v = x[order], v[order]
    m = make_default_model().fit(x, v)
    errors = [record["validation_error"] for record in m.history_]
    lasts = [k for k in range(len(errors)) if errors[k] < 0.995 * min(errors[:k], default=1)]
    # The fit learns from 363 rows, so it waits 12 epochs (over 4,000 rows) for an error that is 0.5 % lower.
    # After the last such error, 12 epochs at the old rate and 12 at a quarter of this rate bring none.
    assert m.n_iter_ == lasts[-1] + 1 + 2 * 12 < 50
    last, lower = (m.history_[epoch]["learning_rate"] for epoch in (-13, -12))
    assert lower == last / 4
    assert m.best_epoch_ == int(np.argmin(errors)) + 1
    spared = np.arange(403) % 10 == 9
    asked = make_default_model().fit(x[~spared], v[~spared], validation=(x[spared], v[spared]))
    assert_same(m, asked)
    assert m.history_[0]["validation_error"] == asked.history_[0]["validation_error"]
    assert_same(make_default_model().fit(x, v), m)
    reported = [record.getMessage() for record in caplog.records]
    assert len(reported) == 1
    assert reported[0].startswith("n_epochs=None holds out 40 of the 403 rows of X, and ends the fit when")
    assert make_default_model().plan(x, v)["passes"]["at_most"] == 50


def test_rows_of_every_kind_are_held_out() -> None:
    x, v = make_patterns(200, 1)
    expected = make_default_model().fit(x, v)
    for given in (
        (csr_array(x), csr_array(v)),
        (Dataset.from_arrays(x).with_target(Dataset.from_arrays(v)),),
    ):
        np.testing.assert_allclose(make_default_model().fit(*given).W_, expected.W_, atol=1e-5)
    images = v.reshape(200, 4, 6)
    m = make_default_model(corruption={"kind": "occlude", "size": 2}).fit(images)
    assert m.history_[0]["validation_error"] > 0
    assert make_default_model(patience=1).fit(x, v).n_iter_ <= 50


def test_ranges_of_many_rows_are_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameters, "MAX_HELD", 20)
    monkeypatch.setattr(parameters, "HELD_RANGES", 5)
    x, v = make_patterns(403, 1)
    spared = np.arange(403) % 80 >= 76
    asked = make_default_model().fit(x[~spared], v[~spared], validation=(x[spared], v[spared]))
    assert_same(make_default_model().fit(x, v), asked)


def test_few_rows_are_all_learned_by_default(caplog: pytest.LogCaptureFixture) -> None:
    x, v = make_patterns(1000, 1)
    few = make_default_model().fit(x[:99], v[:99])
    assert (few.n_iter_, few.best_validation_error_) == (50, None)
    plain = make_default_model(conditional=False).fit(v[:99])
    assert (plain.n_iter_, plain.best_validation_error_) == (50, None)
    assert "holds out" not in caplog.text


@pytest.mark.parametrize("learner", ["mle-bp", "cd", "pcd"])
def test_a_plain_rbm_stops_by_the_reconstruction_error(learner: str) -> None:
    v = make_patterns(1000, 1)[1]
    m = make_default_model(conditional=False, learner=learner).fit(v)
    spared = np.arange(1000) % 10 == 9
    if learner == "mle-bp":  # Other learners draw by row index, and removed rows change indices.
        assert_same(
            m, make_default_model(conditional=False, learner=learner).fit(v[~spared], validation=v[spared])
        )
    hidden = 1 / (1 + np.exp(-(v[spared] @ m.W_ + m.bh_)))
    wrong = ((hidden @ m.W_.T + m.bv_ > 0) != v[spared]).mean()
    assert m.best_validation_error_ == pytest.approx(wrong, abs=1e-9)
    assert m.n_iter_ <= 50
    assert m.best_validation_error_ == min(record["validation_error"] for record in m.history_) < 0.2


def test_the_epochs_of_the_paper_may_be_requested_by_name(pair: Pair) -> None:
    named, given = (make_rbm(n_epochs=n).fit(*pair) for n in ("paper", 50))
    assert (named.n_iter_, named.best_validation_error_) == (50, None)
    assert_same(named, given)
    with pytest.raises(ValueError, match="n_epochs='papers': give a whole number of at least 1, 'paper'"):
        make_rbm(n_epochs="papers").fit(*pair)


@pytest.mark.parametrize(("rows", "epochs"), [(1400, (4, 3)), (700, (8, 6))])
def test_learning_rates_decrease_by_default_and_a_stream_uses_the_last_one(
    rows: int, epochs: tuple[int, int], pair: Pair
) -> None:
    high, middle = epochs
    found = make_rbm(learning_rate=None, n_epochs=high + middle + 2).fit(*make_patterns(rows, 1)).history_
    expected = [0.2] * high + [0.1] * middle + [0.05] * 2
    assert [record["learning_rate"] for record in found] == expected
    assert_same(
        make_rbm(learning_rate=None).partial_fit(*pair), make_rbm(learning_rate=0.05).partial_fit(*pair)
    )


def test_a_default_fit_is_resumed_with_its_held_out_rows(tmp_path: Path) -> None:
    x, v = make_patterns(300, 1)
    whole = make_default_model().fit(x, v)
    with pytest.raises(KeyboardInterrupt):
        make_default_model().fit(x, v, run_dir=tmp_path, callbacks=InterruptAt(2))
    assert_same(make_default_model().fit(x, v, run_dir=tmp_path, resume=True), whole)
    with pytest.raises(RunError, match="validation data"):
        make_default_model(n_epochs=60).fit(x, v, run_dir=tmp_path, resume=True)


def test_a_plan_has_steps_passes_and_seconds_of_a_fit(pair: Pair, held_pair: Pair) -> None:
    reported = make_rbm(n_epochs=3).plan(*pair, validation=held_pair)
    assert reported["stages"]["learn"]["steps_per_pass"] == 15
    assert reported["passes"] == {"at_least": 3, "expected": 3, "at_most": 3}
    assert reported["expected_seconds_at_least"] >= 3 * reported["seconds_per_pass"] * 0.99
    with pytest.raises(sl.errors.PlanError, match="lower n_hidden"):
        make_rbm(n_hidden=10**6).plan(*pair, memory_limit="2GB")


def test_clone_and_parameters_follow_scikit_learn(pair: Pair) -> None:
    model = make_rbm(learning_rate=[(0.1, 2)], corruption={"kind": "flip", "rate": 0.1})
    twin = clone(model)
    assert twin.get_params() == model.get_params()
    weird = object()
    assert ConditionalRBM(learner=weird, corruption=weird).corruption is weird
    assert "ConditionalRBM" in repr(model)
    fitted = make_rbm(n_epochs=1)
    assert fitted.fit(*pair) is fitted
    assert list(fitted.get_feature_names_out())[:1] == ["conditionalrbm0"]
    assert fitted.set_output(transform="pandas").transform(pair[0]).shape == (300, 6)


def test_damping_of_earlier_versions_is_accepted_at_1_only(pair: Pair, tmp_path: Path) -> None:
    model = make_rbm(n_epochs=1).fit(*pair)
    params = model.get_params()
    for damping in (1.0, 0.5):
        model.get_params = lambda deep=True, damping=damping: params | {"damping": damping}  # type: ignore[method-assign]
        model.save(tmp_path / f"{damping}.zarr")
    del model.get_params
    assert_same(sl.load_model(tmp_path / "1.0.zarr"), model)
    with pytest.raises(DataError, match=r"was saved with damping=0.5: this version has no parameter damping"):
        sl.load_model(tmp_path / "0.5.zarr")


def test_a_loss_of_earlier_versions_does_not_stop_loading_a_model(pair: Pair, tmp_path: Path) -> None:
    model = make_rbm(n_epochs=1).fit(*pair)
    params = model.get_params() | {"loss": [1.0, 2.0]}
    model.get_params = lambda deep=True: params  # type: ignore[method-assign]
    model.save(tmp_path / "model.zarr")
    del model.get_params
    with pytest.warns(UserWarning, match=r"was saved with loss=\[1.0, 2.0\].*predictions stay the same"):
        assert_same(sl.load_model(tmp_path / "model.zarr"), model)


def test_a_run_of_a_version_with_the_parameter_loss_is_resumed(pair: Pair, tmp_path: Path) -> None:
    model, file = make_rbm(n_epochs=1).fit(*pair, run_dir=tmp_path), tmp_path / "engine" / "identity.json"
    identity = json.loads(file.read_text())
    file.write_text(json.dumps({**identity, "params": {**identity["params"], "loss": "'hamming'"}}))
    assert_same(make_rbm(n_epochs=1).fit(*pair, run_dir=tmp_path, resume=True), model)
    file.write_text(json.dumps({**identity, "params": {**identity["params"], "loss": "[1.0, 2.0]"}}))
    with pytest.raises(RunError, match=r"another fit \(loss: \[1.0, 2.0\] -> 'hamming'\)"):
        make_rbm(n_epochs=1).fit(*pair, run_dir=tmp_path, resume=True)


# -- plain RBMs, parameters from other programs, tolerances --------------------------------------------------


def test_a_plain_rbm_is_fitted_like_other_transformers(pair: Pair) -> None:
    v, labels = pair[1], np.arange(len(pair[1])) % 3
    model = make_rbm(conditional=False, learner="cd", n_epochs=2).fit(v, labels)  # The fit ignores y.
    assert_same(model, make_rbm(learner="cd", n_epochs=2).fit(None, v))
    assert model.Wvx_.shape == (24, 0)
    assert model.transform(v).shape == (len(v), 6)
    with pytest.raises(ValueError, match="no x to corrupt"):
        make_rbm(conditional=False, corruption={"kind": "flip"}).fit(v)
    targets = Dataset.from_arrays(v).with_target(Dataset.from_arrays(v))
    with pytest.raises(DataError, match="learns rows alone"):
        make_rbm(conditional=False, learner="cd").fit(targets)


def test_a_model_from_external_weights_predicts_and_continues(pair: Pair, tmp_path: Path) -> None:
    fitted = make_rbm(n_epochs=2).fit(*pair)
    given = ConditionalRBM.from_weights(
        fitted.W_, fitted.bv_, fitted.bh_, Wvx=fitted.Wvx_, Whx=fitted.Whx_, n_sweeps=fitted.n_sweeps_
    )
    np.testing.assert_array_equal(given.predict_marginals(pair[0]), fitted.predict_marginals(pair[0]))
    given.save(tmp_path / "m.zarr")
    loaded = sl.load_model(tmp_path / "m.zarr")
    np.testing.assert_array_equal(loaded.predict(pair[0]), fitted.predict(pair[0]))
    before = given.W_.copy()
    given.partial_fit(*pair)  # The external weights are the start of further learning.
    assert (before != given.W_).any()


def test_a_model_from_weights_of_scikit_learn_agrees_with_it() -> None:
    from sklearn.neural_network import BernoulliRBM

    v = np.eye(8, dtype="uint8").repeat(10, axis=0)
    theirs = BernoulliRBM(3, n_iter=2, random_state=0).fit(v)
    ours = ConditionalRBM.from_weights(
        theirs.components_.T, theirs.intercept_visible_, theirs.intercept_hidden_
    )
    np.testing.assert_allclose(ours.transform(v), theirs.transform(v), atol=1e-6)
    assert ours.predict().shape == (1, 8)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"W": [1, 2]}, r"W has shape \(2,\): give couplings of shape \(v, h\)"),
        ({"bv": [1, 2]}, r"bv has shape \(2,\), but with W of shape \(1, 1\) it must be \(1,\)"),
        ({"Wvx": np.eye(2)}, r"Wvx has shape \(2, 2\).*it must be \(1, 2\)"),
        ({"W": [[np.nan]]}, "W has non-finite values"),
        ({"W": [[50.0]]}, "largest coupling .* is 50; beyond 40"),
        ({"bh": ["a"]}, "bh: give an array of real numbers"),
        ({"inference": "magic"}, "inference='magic' is not one of"),
        ({"inference": None}, "inference=None is that of training, .*: name an inference"),
    ],
)
def test_invalid_arguments_of_from_weights_are_refused(changed: dict[str, Any], words: str) -> None:
    given = {"W": [[1.0]], "bv": [0.0], "bh": [0.0]} | changed
    with pytest.raises(ValueError, match=words):
        ConditionalRBM.from_weights(given.pop("W"), given.pop("bv"), given.pop("bh"), **given)


def test_predict_warns_if_the_tolerance_is_not_reached(pair: Pair, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    w = rng.normal(size=(24, 10)) * 3
    biases = {"bv": -w.sum(axis=1) / 2, "bh": -w.sum(axis=0) / 2, "Wvx": np.eye(24)}
    options: dict[str, Any] = {"inference": "max-product", "tol": 1e-3, "n_sweeps": 60}
    model = ConditionalRBM.from_weights(w, **biases, **options)
    missed = 1 - model.set_params(tol=None).infer(pair[0], n_sweeps=60).converged.mean()
    assert missed > 0.1
    model.set_params(tol=1e-3)
    for call in (model.predict, model.predict_marginals):
        with pytest.warns(
            UserWarning, match=r"tol=0.001 was not met by .* of the rows within 60 sweeps"
        ) as reported:
            call(pair[0])
        assert reported[0].filename == __file__
    with pytest.warns(UserWarning, match="was not met"):
        model.predict(Dataset.from_arrays(pair[0]), out=tmp_path / "v.zarr")
