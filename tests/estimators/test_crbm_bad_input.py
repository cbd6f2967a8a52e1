"""Conditional RBMs refuse invalid rows and parameters, and a fit that diverges keeps its finished epochs."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_array

from scalelatent import Dataset
from scalelatent.engine.checkpoints import EngineStore
from scalelatent.errors import DataError, DivergenceError
from scalelatent.storage.disk import locate
from tests.estimators.crbm_cases import Pair, assert_same, make_rbm


def replace_value(a: np.ndarray, value: Any, dtype: str = "f4") -> np.ndarray:
    out = a.astype(dtype)
    out[17, 3] = value
    return out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, v: (x, replace_value(v, 2)), "column 3 of row 17 is 2"),
        (lambda x, v: (x, replace_value(v, np.nan)), "row 17"),
        (lambda x, v: (x, replace_value(v, 0.5)), "0.5"),
        (lambda x, v: (x, v[:-1]), "X has 300 rows, but y has 299"),
        (lambda x, v: (x[:-1], v), "X has 299 rows, but y has 300"),
        (lambda x, v: (Dataset.from_arrays(x), Dataset.from_arrays(v[:9])), "300 rows, but its target has 9"),
        (lambda x, v: (np.empty((7, 0)), v), "X has 7 rows, but y has 300"),
        (lambda x, v: (replace_value(x, np.nan), v), "NaN: row 17, feature 3"),
        (lambda x, v: (replace_value(x, np.inf), v), "row 17, feature 3 is inf"),
        (lambda x, v: (x, v[:, 0]), r"rows of 0 and 1 of shape \(n, v\); for one column: y.reshape"),
        (lambda x, v: (x, None), "there are no outputs.*pass y of shape"),
        (lambda x, v: (Dataset.from_arrays(x, np.arange(300) % 2), None), "there are no outputs"),
        (lambda x, v: (None, None), "received no rows"),
        (
            lambda x, v: (x[:10], v[:10]),
            "batch_size=20 is larger than the data, which has 10 rows: set batch_size to 10",
        ),
        (lambda x, v: (Dataset.from_arrays(x, v, sample_weight=np.ones(300)), None), "the rows have weights"),
    ],
)
def test_invalid_rows_are_refused(change: Any, message: str, pair: Pair) -> None:
    with pytest.raises(DataError, match=message):
        make_rbm().fit(*change(*pair))


def test_lazy_rows_are_checked_when_they_are_read(pair: Pair) -> None:
    import dask.array as da

    x = da.from_array(replace_value(pair[0], np.nan), chunks=(100, -1))
    with pytest.raises(DataError, match="row 17, feature 3 is nan"):
        make_rbm(learner="cd").fit(x, pair[1])


def test_stored_rows_are_checked_when_they_are_read(pair: Pair, tmp_path: Path) -> None:
    x = Dataset.from_arrays(pair[0]).save(tmp_path / "x")
    v = Dataset.from_arrays(replace_value(pair[1], 3, "u1")).save(tmp_path / "v")
    with pytest.raises(DataError, match="row 17"):
        make_rbm().fit(x, v)


def test_a_corruption_together_with_outputs_is_refused(pair: Pair) -> None:
    """Without this error, a fit would use the outputs and silently ignore the corruption."""
    x, v = (Dataset.from_arrays(a) for a in pair)
    for given in (pair, (x.with_target(v), None), (None, x.with_target(v))):
        with pytest.raises(
            DataError, match="makes the inputs from clean rows, but there are outputs y as well: leave out y"
        ):
            make_rbm(corruption={"kind": "flip"}).fit(*given)
    model = make_rbm(corruption={"kind": "flip"}, n_epochs=1).fit(pair[1])
    with pytest.raises(DataError, match="or set corruption=None$"):
        model.partial_fit(*pair)
    assert model.set_params(corruption=None).partial_fit(*pair).score(*pair) > 0.5


@pytest.mark.parametrize("learner", ["logistic", "cd-percloss"])
def test_learners_that_need_inputs_refuse_plain_rbms(learner: str, pair: Pair) -> None:
    with pytest.raises(
        DataError, match=f"learner='{learner}' starts from a prediction from x, and a plain RBM has no x"
    ):
        make_rbm(learner=learner).fit(None, pair[1])


def test_partial_fit_refuses_what_fit_refuses(pair: Pair) -> None:
    with pytest.raises(DataError, match="learner='logistic' starts from a prediction from x"):
        make_rbm(learner="logistic").partial_fit(None, pair[1])
    with pytest.raises(DataError, match="the rows have weights"):
        make_rbm().partial_fit(Dataset.from_arrays(*pair, sample_weight=np.ones(300)))
    assert make_rbm().partial_fit(pair[0][:3], pair[1][:3]).predict(pair[0]).shape == (300, 24)


def test_the_recommended_batch_size_suits_rows_and_chains(pair: Pair) -> None:
    few = pair[0][:10], pair[1][:10]
    with pytest.raises(DataError, match="larger than the data, which has 10 rows: set batch_size to 8$"):
        make_rbm(n_chains=4).fit(*few)
    assert make_rbm(n_chains=4, batch_size=8, n_epochs=1).fit(*few).n_iter_ == 1
    with pytest.raises(DataError, match="10 rows: lower n_chains, and batch_size$"):
        make_rbm(n_chains=20).fit(*few)
    with pytest.raises(DataError, match="10 rows: lower local_steps or n_chains, and batch_size$"):
        make_rbm(n_chains=4, local_steps=5).fit(*few)


def test_local_steps_with_more_rows_than_the_data_are_refused(pair: Pair) -> None:
    with pytest.raises(
        DataError, match="= 400 rows.* is larger than the data, which has 300 rows: set batch_size to 15"
    ):
        make_rbm(local_steps=5, n_chains=4).fit(*pair)


def test_a_tolerance_that_is_never_reached_is_reported(pair: Pair) -> None:
    with pytest.warns(UserWarning, match=r"tol=1e-12 was not met by 100.0% of the rows within 1 sweeps"):
        make_rbm(tol=1e-12, n_sweeps=1, n_epochs=1).fit(*pair)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_rbm(tol=0.5, n_epochs=1).fit(*pair)


def test_weights_beyond_float32_keep_the_last_good_checkpoint(pair: Pair, tmp_path: Path) -> None:
    """The error recommends a learning rate, and the run folder keeps the state before the divergence."""
    with pytest.raises(FloatingPointError, match=r"epoch 1, step 2, at learning_rate=100: try .*=0.05"):
        make_rbm(learning_rate=100.0, learner="cd").fit(*pair, run_dir=tmp_path)
    found = EngineStore(locate(tmp_path).at("engine")).latest_state("crbm_learn")
    assert found is not None
    assert found[0] == 1
    assert abs(found[1]["state"].theta[: 24 * 6]).max() <= 40


def test_a_diverged_fit_resumes_with_a_lower_rate(pair: Pair, tmp_path: Path) -> None:
    """The resumed fit equals a fit that uses the lower rate from the diverging epoch on."""
    wild = make_rbm(learning_rate=[(0.2, 2), (1e6, 1)])
    with pytest.raises(DivergenceError, match=r"epoch 3, step 31, .*last good checkpoint: resume the run"):
        wild.fit(*pair, run_dir=tmp_path)
    resumed = make_rbm(learning_rate=[(0.2, 2), (0.1, 1)]).fit(*pair, run_dir=tmp_path, resume=True)
    assert_same(resumed, make_rbm(learning_rate=[(0.2, 2), (0.1, 1)]).fit(*pair))
    assert [record["learning_rate"] for record in resumed.history_] == [0.2, 0.2, 0.1, 0.1]


def test_a_finished_fit_continues_with_more_epochs(pair: Pair, held_pair: Pair, tmp_path: Path) -> None:
    call: dict[str, Any] = {"validation": held_pair, "run_dir": tmp_path}
    make_rbm(n_epochs=2).fit(*pair, **call)
    longer = make_rbm(n_epochs=4).fit(*pair, **call, resume=True)
    assert_same(longer, make_rbm(n_epochs=4).fit(*pair, validation=held_pair))
    assert longer.n_iter_ == 4


@pytest.mark.parametrize("learner", ["mle-bp", "cd"])
def test_the_error_of_diverging_local_steps_does_not_blame_the_rows(learner: str, pair: Pair) -> None:
    with pytest.raises(DivergenceError, match=r"epoch 1, step \d, at learning_rate=1e\+06: try") as reported:
        make_rbm(learner=learner, learning_rate=1e6, local_steps=3, n_chains=2).fit(*pair)
    assert isinstance(reported.value, FloatingPointError)
    assert "rows" not in str(reported.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learner": "bp"}, "learner='bp' is not one of 'mle-bp'"),
        ({"inference": "exact"}, "inference='exact' is not one of None, 'sum-product'"),
        ({"n_hidden": 0}, "n_hidden=0: give a whole number"),
        ({"n_sweeps": 0}, "n_sweeps=0: give a whole number"),
        ({"momentum": 1.0}, r"momentum=1.0: give a number in \[0, 1\)"),
        ({"weight_decay": -1}, "weight_decay=-1: give a finite number of at least 0"),
        ({"init_scale": 100}, "init_scale=100: give a number from 0 to 5"),
        ({"tol": 0}, "tol=0: give a number above 0, or None"),
        ({"learning_rate": 0}, "learning_rate=0: give a number above 0, or a schedule"),
        ({"learning_rate": [0.1]}, "give a number above 0, or a schedule of pairs"),
        ({"batch_size": 10, "n_chains": 4}, "not a multiple of n_chains=4: set batch_size to 8"),
        (
            {"gibbs_steps": 3, "learner": "mssvm"},
            "gibbs_steps is set, but learner=.mssvm. does not.*one of .cd",
        ),
        ({"device": "tpu"}, "device='tpu' is not one of"),
    ],
)
def test_invalid_parameters_are_refused(options: dict[str, Any], message: str, pair: Pair) -> None:
    with pytest.raises(ValueError, match=message):
        make_rbm(**options).fit(*pair)


@pytest.mark.parametrize(
    ("corruption", "error", "message"),
    [
        ({"kind": "blur"}, ValueError, 'give {"kind": "flip", "rate": 0.1}'),
        ({"kind": "flip", "size": 3}, ValueError, 'give {"kind": "flip", "rate": 0.1}'),
        ({"kind": "flip", "rate": 2.0}, DataError, r"\(rate\) is 2.0: give a number between 0 and 1"),
        ({"kind": "occlude", "size": 3}, DataError, "shape=5 x 5 does not fit the 24 features"),
        ({"kind": ["flip"]}, ValueError, 'give {"kind": "flip", "rate": 0.1}'),
        ({"kind": "flip", "rate": 0.01}, DataError, "none of the 24 pixels of a row: give at least 0.042"),
        ({"kind": "occlude", "size": 2.5}, ValueError, "size must be a whole number of pixels, or two"),
        ({"kind": "occlude", "size": (2,)}, ValueError, "size must be a whole number of pixels, or two"),
        ({"kind": "occlude", "size": "3"}, ValueError, "size must be a whole number of pixels, or two"),
        (
            {"kind": "occlude", "shape": (3.7, 4)},
            ValueError,
            "shape must be a whole number of pixels, or two",
        ),
    ],
)
def test_invalid_corruptions_are_refused(corruption: Any, error: Any, message: str, pair: Pair) -> None:
    with pytest.raises(error, match=message):
        make_rbm(corruption=corruption).fit(pair[1])


def test_the_size_of_a_corruption_may_be_an_array(pair: Pair) -> None:
    sides = {"size": np.array([2, 3]), "shape": np.array([4, 6])}
    model = make_rbm(corruption={"kind": "occlude", **sides}, n_epochs=1).fit(pair[1])
    assert_same(
        model,
        make_rbm(corruption={"kind": "occlude", "size": (2, 3), "shape": (4, 6)}, n_epochs=1).fit(pair[1]),
    )


def test_predictions_of_other_rows_are_refused(pair: Pair) -> None:
    model = make_rbm(n_epochs=1).fit(*pair)
    with pytest.raises((DataError, ValueError), match="24"):
        model.predict(pair[0][:, :5])
    with pytest.raises(DataError, match="each row has 5 outputs, but ConditionalRBM has 24"):
        model.score(pair[0], pair[1][:, :5])
    plain = make_rbm(n_epochs=1, learner="cd").fit(None, pair[1])
    with pytest.raises(DataError, match="plain RBM without x"):
        plain.predict(pair[0])


@pytest.mark.parametrize(
    ("learner", "inference"),
    [
        ("mle-bp", None),
        ("mle-bp", "mean-field"),
        ("logistic", None),
    ],
)
def test_the_error_names_nan_in_rows_to_infer(learner: str, inference: Any, pair: Pair) -> None:
    model = make_rbm(n_epochs=1, learner=learner).fit(*pair)
    rows = Dataset.from_arrays(np.tile(replace_value(pair[0], np.nan), (2, 1)))
    with pytest.raises(DataError, match=r"row 17, feature 3 is nan"):
        model.infer(rows, inference=inference)
    with pytest.raises(DataError, match=r"row 317, feature 3 is nan"):  # A later block of rows has row 317.
        model.infer(
            Dataset.from_arrays(np.vstack([pair[0], replace_value(pair[0], np.nan)])), inference=inference
        )


def test_a_score_with_weights_that_sum_to_zero_is_refused(pair: Pair) -> None:
    model = make_rbm(n_epochs=1).fit(*pair)
    with pytest.raises(DataError, match="the weights of the rows sum to 0"):
        model.score(*pair, sample_weight=np.zeros(300))


@pytest.mark.parametrize("learner", ["mle-bp", "cd", "logistic"])
def test_the_error_names_row_and_feature_of_a_value_too_large_for_products(learner: str, pair: Pair) -> None:
    with pytest.raises(DataError, match=r"row \d+, feature \d+ is .*: scale the features below 1e\+18"):
        make_rbm(learner=learner).fit(pair[0] * np.float32(1e25), pair[1])


def test_the_error_of_products_beyond_float32_names_the_learning_rate(pair: Pair) -> None:
    x = pair[0] * np.float32(1e17)
    model = make_rbm(learner="logistic", learning_rate=1e6)  # ``partial_fit`` does not scale X.
    with pytest.raises(
        DivergenceError, match=r"products of row \d+ .*scale X\) in epoch 1, step 2, at learn"
    ):
        model.partial_fit(x, pair[1])


@pytest.mark.parametrize("n_sweeps", [0, 2.7, True, "9"])
def test_n_sweeps_of_a_prediction_must_be_a_whole_number(n_sweeps: Any, pair: Pair) -> None:
    model = make_rbm(n_epochs=1).fit(*pair)
    for method in (model.predict, model.predict_marginals, model.infer):
        with pytest.raises(ValueError, match=f"n_sweeps={n_sweeps!r}: give a whole number of at least 1$"):
            method(pair[0], n_sweeps=n_sweeps)
    with pytest.raises(ValueError, match="tol='a': give a number of at least 0"):
        model.infer(pair[0], tol="a")


@pytest.mark.parametrize("value", [255, -0.5, np.nan])
def test_a_plain_rbm_transforms_only_values_between_0_and_1(value: float, pair: Pair) -> None:
    plain = make_rbm(n_epochs=1, learner="cd").fit(None, pair[1])
    assert plain.transform(0.5 * pair[1]).shape == (300, 6)
    with pytest.raises((DataError, ValueError), match=r"row 17, (unit|feature) 3 is"):
        plain.transform(replace_value(pair[1], value))
    with pytest.raises(DataError, match=r"row 17, unit 3 is"):
        plain.transform(Dataset.from_arrays(replace_value(pair[1], value)))


def test_a_plain_rbm_accepts_inputs_without_features(pair: Pair) -> None:
    plain = make_rbm(n_epochs=1, learner="mle-bp").fit(csr_array((300, 0)), pair[1])
    assert_same(plain, make_rbm(n_epochs=1, learner="mle-bp").fit(None, pair[1]))
    assert plain.infer(np.empty((0, 0))).visible.shape == plain.predict(np.empty((0, 0))).shape == (0, 24)


def test_partial_fit_resets_the_validation_error_and_needs_rows(pair: Pair, held_pair: Pair) -> None:
    model = make_rbm(n_epochs=1).fit(*pair, validation=held_pair)
    assert model.best_validation_error_ is not None
    with pytest.raises(DataError, match="X is missing"):
        model.partial_fit(None, pair[1])
    model.partial_fit(*pair)
    assert model.best_validation_error_ is None
