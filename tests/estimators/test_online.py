"""Capsule models learn online, by ``fit`` with stepwise EM and by ``partial_fit``."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalelatent import Callback, CapsuleRegression, Dataset, load_model
from scalelatent.errors import DataError, RunError
from tests.helpers import InterruptAt

Arrays = tuple[np.ndarray, np.ndarray]


def make_model(algorithm: str, **more: Any) -> CapsuleRegression:
    # With batches of 64 rows, an epoch over the 600 rows has 10 steps.
    options = {
        "capsule_dim": 4,
        "random_state": 0,
        "n_jobs": 1,
        "n_epochs": 6,
        "batch_rows": 64,
        "n_chains": 2,
    }
    options |= more
    return CapsuleRegression(algorithm=algorithm, **options)


# -- fit -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["multiclass", "one_vs_all", "all_vs_all"])
def test_stepwise_em_learns_digits(digits: Arrays, held_out: Arrays, architecture: str) -> None:
    options = {"architecture": architecture, "capsule_dim": 3, "n_epochs": 6}
    model = make_model("stepwise", **options).fit(*digits, validation=held_out)
    assert model.score(*held_out) > 0.8
    assert model.n_iter_ == 6 == len(model.history_)
    errors = [r["validation_error"] for r in model.history_]
    assert model.score(*held_out) == pytest.approx(1 - model.best_validation_error_)
    if architecture == "multiclass":
        assert model.best_validation_error_ == min(errors)
    else:  # Each member (a model of two classes or groups) has its own best epoch.
        assert all(0 < error < 0.9 for error in errors)
    record = model.history_[-1]
    assert record["rows_seen"] == 3600
    assert record["objective"] < model.history_[0]["objective"]
    assert record["active_members"] == len(model.capsule_dims_)


def test_threads_do_not_change_an_online_fit(digits: Arrays) -> None:
    one, three = (make_model("stepwise", n_jobs=jobs, n_epochs=2).fit(*digits) for jobs in (1, 3))
    np.testing.assert_array_equal(one.W_, three.W_)


def test_stored_rows_are_projected_and_learned(digits: Arrays, held_out: Arrays, tmp_path: Path) -> None:
    stored = Dataset.from_arrays(*digits).save(tmp_path / "x", chunk_rows=50)
    model = make_model("stepwise", projection=24, n_epochs=3).fit(stored)
    twin = make_model("stepwise", projection=24, n_epochs=3).fit(*digits)
    np.testing.assert_array_equal(model.W_, twin.W_)
    assert model.W_.shape == (80, 24)
    assert model.best_validation_error_ is None
    assert model.score(*held_out) > 0.8


def test_sorted_rows_are_learned_like_shuffled_ones(digits: Arrays, held_out: Arrays) -> None:
    x, y = digits
    order = np.argsort(y, kind="stable")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # Another test covers the warning of sorted rows.
        a = make_model("stepwise", n_chains=2).fit(x, y).score(*held_out)
        b = make_model("stepwise", n_chains=2).fit(x[order], y[order]).score(*held_out)
    assert b > a - 0.03


def test_sorted_rows_that_a_buffer_cannot_mix_give_a_warning(digits: Arrays) -> None:
    x, y = digits
    order = np.argsort(y, kind="stable")
    small = {"run_rows": 16, "buffer_runs": 2}
    with pytest.warns(UserWarning, match="sorted by label.*data shuffle"):
        make_model("stepwise", n_epochs=1).fit(x[order], y[order], engine=small)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_model("stepwise", n_epochs=1).fit(x, y, engine=small)


@pytest.mark.parametrize("at", [3, 10, 17])
def test_an_online_fit_resumed_within_an_epoch_has_the_same_bits(
    digits: Arrays, held_out: Arrays, at: int, tmp_path: Path
) -> None:
    engine = {"report_steps": 1}
    model = make_model("stepwise", n_epochs=3)
    whole = make_model("stepwise", n_epochs=3).fit(*digits, validation=held_out)
    call: dict[str, Any] = {"validation": held_out, "run_dir": tmp_path, "engine": engine}
    with pytest.raises(KeyboardInterrupt):
        model.fit(*digits, **call, callbacks=[InterruptAt(at - 1, "report", "pass_end")])
    assert not hasattr(model, "W_")
    model.fit(*digits, **call, resume=True)
    np.testing.assert_array_equal(model.W_, whole.W_)
    per_epoch = [r for r in model.history_ if r["steps"] % 10 == 0]
    for record, other in zip(per_epoch, whole.history_, strict=True):
        assert record["objective"] == other["objective"]
        assert record["validation_error"] == other["validation_error"]
    assert not list(tmp_path.rglob("leaf-*.rec"))  # A finished fit deletes partial sums.


def test_a_run_folder_refuses_other_parameters(digits: Arrays, tmp_path: Path) -> None:
    make_model("stepwise", n_epochs=1).fit(*digits, run_dir=tmp_path)
    with pytest.raises(RunError, match="kappa: .* -> 0.7"):
        make_model("stepwise", n_epochs=1, kappa=0.7).fit(*digits, run_dir=tmp_path, resume=True)
    with pytest.raises(RunError, match="validate_steps: None -> 2"):
        make_model("stepwise", n_epochs=1).fit(
            *digits, run_dir=tmp_path, resume=True, engine={"validate_steps": 2}
        )


def test_patience_stops_an_online_fit(digits: Arrays, held_out: Arrays) -> None:
    given = {"architecture": "multiclass", "nu_schedule": [(0.8, 2), (0.0, 1)], "n_epochs": 500}
    model = make_model("stepwise", **given).fit(*digits, validation=held_out)
    assert 3 <= model.n_iter_ < 100
    assert {r["nu"] for r in model.history_} == {0.8, 0.0}


def test_a_callback_stops_an_online_fit(digits: Arrays) -> None:
    class Stop(Callback):
        def on_pass_end(self, record: dict[str, Any]) -> bool:
            return record["pass"] == 2

    assert make_model("stepwise").fit(*digits, callbacks=[Stop()]).n_iter_ == 2


def test_a_weight_of_two_equals_a_repeated_row(digits: Arrays) -> None:
    """Stepwise EM treats a row of weight 2 like two equal rows of weight 1."""
    x, y = digits
    whole = {"batch_rows": 4096, "n_chains": 1, "n_epochs": 1, "momentum": 0.0}
    weight = 1.0 + (np.arange(len(x)) % 2)
    a = make_model("stepwise", **whole).fit(x, y, sample_weight=weight)
    again = np.repeat(np.arange(len(x)), weight.astype(int))
    b = make_model("stepwise", **whole).fit(x[again], y[again])
    np.testing.assert_allclose(a.W_, b.W_, rtol=1e-3, atol=1e-5)
    assert not np.allclose(a.W_, make_model("stepwise", **whole).fit(x, y).W_, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "sgd"}, "algorithm='sgd' is not one of None, 'em', 'stepwise'"),
        ({"n_epochs": 0}, "n_epochs=0: give a whole number"),
        ({"n_epochs": 2.5}, "n_epochs=2.5: give a whole number"),
        ({"batch_rows": "many"}, "batch_rows='many'"),
        ({"batch_rows": 10, "n_chains": 4}, "not a multiple of n_chains=4: set batch_rows to 12"),
        ({"n_chains": None}, "n_chains=None"),
        ({"kappa": 1.5}, r"kappa=1.5: give a number in \[0, 1\]"),
        ({"kappa": float("nan")}, "kappa=nan: give a finite"),
        ({"t0": 0}, "t0=0"),
    ],
)
def test_invalid_online_parameters_are_refused(digits: Arrays, options: dict[str, Any], message: str) -> None:
    model = make_model(**{"algorithm": "stepwise", **options})
    with pytest.raises(ValueError, match=message):
        model.fit(*digits)
    with pytest.raises(ValueError, match=message):
        model.partial_fit(*digits, classes=range(10))


def test_the_error_of_an_online_fit_names_bad_rows(digits: Arrays, tmp_path: Path) -> None:
    x = digits[0].astype("f4")
    x[77, 3] = np.inf
    with pytest.raises(DataError, match="row 77, feature 3 is inf"):
        make_model("stepwise").fit(x, digits[1])


def test_a_former_algorithm_fits_by_stepwise_em(digits: Arrays) -> None:
    old, new = (make_model(name, n_epochs=1) for name in ("passive_aggressive", "stepwise"))
    with pytest.warns(FutureWarning, match=r"algorithm='passive_aggressive'.*algorithm='stepwise'"):
        old.fit(*digits)
    np.testing.assert_array_equal(old.W_, new.fit(*digits).W_)
    with pytest.warns(FutureWarning, match=r"algorithm='passive_aggressive'.*algorithm='stepwise'"):
        make_model("passive_aggressive").partial_fit(*digits, classes=range(10))


# -- partial_fit ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["em", "stepwise"])
def test_partial_fit_learns_row_by_row(digits: Arrays, held_out: Arrays, algorithm: str) -> None:
    x, y = digits
    model = make_model(algorithm, batch_rows=None)
    for i in range(len(x)):
        assert model.partial_fit(x[i : i + 1], y[i : i + 1], classes=range(10) if i == 0 else None) is model
    assert model.score(*held_out) > 0.7
    assert model.n_features_in_ == 64
    assert model.predict_proba(x[:3]).shape == (3, 10)


def test_a_first_call_of_many_rows_starts_from_their_subspaces(digits: Arrays, held_out: Arrays) -> None:
    """The first call starts from the subspaces of all its rows, and then learns from them batch by batch."""
    model = make_model("stepwise", batch_rows=32, n_chains=1).partial_fit(*digits, classes=range(10))
    scores = [model.score(*held_out)]
    for _ in range(4):
        scores.append(model.partial_fit(*digits).score(*held_out))
    assert scores[0] > 0.5
    assert scores[-1] > 0.8


@pytest.mark.parametrize("algorithm", ["em", "stepwise"])
@pytest.mark.parametrize("architecture", ["multiclass", "all_vs_all"])
def test_partial_fit_continues_from_a_fit(
    digits: Arrays, held_out: Arrays, algorithm: str, architecture: str, tmp_path: Path
) -> None:
    model = make_model(algorithm, max_iter=20, projection=24, architecture=architecture).fit(*digits)
    before, w = model.score(*held_out), model.W_.copy()
    for i in range(20):
        model.partial_fit(held_out[0][i : i + 1], held_out[1][i : i + 1])
    model.partial_fit(held_out[0][:100], held_out[1][:100])
    assert not np.array_equal(model.W_, w)
    assert model.score(*held_out) > before - 0.02
    # After loading, a saved model continues like the model itself.
    model.save(tmp_path / "m.zarr")
    twin = load_model(tmp_path / "m.zarr")
    np.testing.assert_array_equal(twin.W_, model.W_)
    for m in (model, twin):
        m.partial_fit(held_out[0][100:140], held_out[1][100:140])
    np.testing.assert_allclose(twin.W_, model.W_, rtol=1e-5, atol=1e-7)
    # A model that was saved before any partial_fit continues, too; a new fit starts from scratch.
    fitted = make_model(algorithm, max_iter=20, projection=24, architecture=architecture).fit(*digits)
    np.testing.assert_array_equal(fitted.W_, w)
    fitted.save(tmp_path / "f.zarr")
    a, b = fitted, load_model(tmp_path / "f.zarr")
    for m in (a, b):
        m.partial_fit(held_out[0][:9], held_out[1][:9])
    np.testing.assert_array_equal(a.W_, b.W_)
    np.testing.assert_array_equal(model.fit(*digits).W_, w)


def test_partial_fit_after_passes_takes_small_steps(digits: Arrays, held_out: Arrays) -> None:
    """The steps of a stream get smaller with the rows read before, which include all passes of a fit."""
    x, y = held_out
    moved = {}
    for passes in (2, 40):
        model = make_model("em", max_iter=passes, t0=1.0, batch_rows=32).fit(*digits)
        w = model.W_.copy()
        model.partial_fit(x[:32], y[:32])
        assert model._stream.rows == passes * len(digits[0]) + 32
        moved[passes] = np.abs(model._stream.w[:, :-1] - w).max()
    assert moved[40] < 0.5 * moved[2]


@pytest.mark.parametrize("architecture", ["multiclass", "all_vs_all"])
@pytest.mark.slow
def test_partial_fit_uses_weights_of_single_rows(digits: Arrays, architecture: str) -> None:
    x, y = digits
    moved = {}
    for weight in (1e-6, 1.0):
        model = make_model("stepwise", architecture=architecture).partial_fit(
            x[:300], y[:300], classes=range(10)
        )
        assert model._stream.w is not None
        w = model._stream.w  # W_ is the average of these weights over all steps, so it moves less.
        model.partial_fit(x[300:301], y[300:301], sample_weight=[weight])
        moved[weight] = np.abs(model._stream.w - w).max()
    assert moved[1e-6] < 1e-3 * moved[1.0]


def test_partial_fit_accepts_datasets_text_labels_and_weights(digits: Arrays, tmp_path: Path) -> None:
    x, y = digits
    names = np.array([f"digit {c}" for c in range(10)])
    stored = Dataset.from_arrays(x, names[y]).save(tmp_path / "x")
    a = make_model("stepwise").partial_fit(stored, classes=names)
    b = make_model("stepwise").partial_fit(x, names[y], classes=names)
    np.testing.assert_array_equal(a.W_, b.W_)
    a.partial_fit(stored[:5])
    b.partial_fit(x[:5].tolist(), names[y[:5]].tolist())
    np.testing.assert_array_equal(a.W_, b.W_)
    import scipy.sparse

    b.partial_fit(scipy.sparse.csr_array(x[5:9]), names[y[5:9]])
    a.partial_fit(x[5:9], names[y[5:9]])
    np.testing.assert_array_equal(a.W_, b.W_)
    # Row weights are used in later calls, too.
    for one in (a, b):
        one.partial_fit(*((stored[:9],) if one is a else (x[:9], names[y[:9]])), sample_weight=np.arange(9.0))
    np.testing.assert_array_equal(a.W_, b.W_)
    # The class weight 2 has the effect of row weights of 2 in that class.
    weight = np.where(y == 3, 2.0, 1.0)
    c = make_model("stepwise", class_weight={"digit 3": 2.0}).partial_fit(x, names[y], classes=names)
    d = make_model("stepwise").partial_fit(x, names[y], classes=names, sample_weight=weight)
    np.testing.assert_array_equal(c.W_, d.W_)
    assert not np.array_equal(d.W_, make_model("stepwise").partial_fit(x, names[y], classes=names).W_)


def test_partial_fit_refuses_invalid_rows_and_classes(digits: Arrays) -> None:
    x, y = digits
    with pytest.raises(ValueError, match="classes must be passed on the first call to partial_fit"):
        make_model("stepwise").partial_fit(x, y)
    with pytest.raises(ValueError, match="projection=5: partial_fit starts before.*or call fit first"):
        make_model("stepwise", projection=5).partial_fit(x, y, classes=range(10))
    with pytest.raises(ValueError, match="class_weight='balanced': partial_fit does not know"):
        make_model("stepwise", class_weight="balanced").partial_fit(x, y, classes=range(10))
    with pytest.raises(ValueError, match="device='gpu': partial_fit runs on the processor"):
        make_model("stepwise", device="gpu").partial_fit(x, y, classes=range(10))
    with pytest.raises(ValueError, match=r"label\(s\) \[9\], which are not among the classes"):
        make_model("stepwise").partial_fit(x, y, classes=range(9))
    model = make_model("stepwise").partial_fit(x, y, classes=range(10))
    w = model.W_.copy()
    for call, error, message in [
        ((x[:2], np.array([3, 11])), ValueError, r"label\(s\) \[11\].*the first call of a new model"),
        ((x[:2], y[:2], [0, 1]), ValueError, r"classes=\[0, 1\] is not the same"),
        ((x[:2, :7], y[:2]), ValueError, "7 features.*64"),
        ((x[:2], y[:3]), ValueError, "X has 2 rows, but y has 3 labels"),
        ((x[:2], None), ValueError, "requires y to be passed"),
        ((x[:0], y[:0]), ValueError, "0 sample"),
        ((x[0], y[:1]), ValueError, "Expected 2D array"),
        ((np.full((1, 64), np.nan), y[:1]), DataError, "row 0, feature 0 is nan"),
        ((Dataset.from_arrays(x[:5, :3], y[:5]),), DataError, "has 3 features.*64"),
        ((Dataset.from_arrays(x[:5]),), ValueError, "no labels"),
        ((Dataset.from_arrays(x[:5], y[:5]), y[:5]), DataError, "brings its own labels"),
        ((Dataset.from_arrays(x[:5], np.stack([y[:5]] * 2, axis=1)),), DataError, "one label a row"),
    ]:
        with pytest.raises(error, match=message):
            model.partial_fit(*call)
    for weight, message in [
        (np.ones(3), r"shape \(3,\).* 2 rows"),
        (np.array([1.0, -1.0]), "at least 0|>= 0"),
    ]:
        for rows in ((x[:2], y[:2]), (Dataset.from_arrays(x[:2], y[:2]),)):
            with pytest.raises(ValueError, match=message):
                model.partial_fit(*rows, sample_weight=weight)
    np.testing.assert_array_equal(model.W_, w)


def test_a_failed_first_call_leaves_no_model(digits: Arrays) -> None:
    x, y = digits
    model = make_model("stepwise")
    with pytest.raises(ValueError, match="not among the classes"):
        model.partial_fit(x, y, classes=[0, 1])
    assert not hasattr(model, "W_")
    model.partial_fit(x, y, classes=range(10))
    model.set_params(kappa=3.0)
    with pytest.raises(ValueError, match="kappa=3.0"):
        model.partial_fit(x, y)


def test_parameters_are_checked_once(digits: Arrays, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks of parameters take longer than a step of one row, so later calls do not repeat them."""
    import scalelatent.models.capsule.partial_fit as module

    x, y = digits
    model = make_model("stepwise").partial_fit(x, y, classes=range(10))

    def refuse_checks(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("checked again")

    monkeypatch.setattr(type(model), "_check_params", refuse_checks)
    monkeypatch.setattr(module, "validate_rows", refuse_checks)
    model.partial_fit(x[:1], y[:1])
    monkeypatch.undo()
    with pytest.raises(ValueError, match="features"):
        model.partial_fit(x[:1, :3], y[:1])
