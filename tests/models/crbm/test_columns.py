"""A fit standardises the columns of x, and its fitted parameters are those for the original columns."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import sparse
from sklearn.datasets import load_breast_cancer

import scalelatent as sl
from scalelatent.contract.learners import Block
from scalelatent.engine.backend import make_backend
from scalelatent.models.crbm.fit import measure_columns
from scalelatent.models.crbm.model.columns import ColumnUnits
from scalelatent.models.crbm.model.energy import CrbmShape, compute_block_biases

SMALL = {"n_hidden": 8, "n_epochs": 3, "random_state": 0, "n_jobs": 1}


def make_pairs(n: int = 300, p: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """Return real rows x and three binary outputs that linear functions of x determine."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, p))
    return x, (x @ rng.normal(size=(p, 3)) > 0).astype(np.uint8)


@pytest.mark.parametrize("change", [lambda x: 1000 * x, lambda x: x / 1000, lambda x: x - 50])
def test_units_and_offsets_of_columns_do_not_change_the_predictions(change):
    x, v = make_pairs()
    before = sl.ConditionalRBM(**SMALL).fit(x, v).predict_marginals(x)
    after = sl.ConditionalRBM(**SMALL).fit(change(x), v).predict_marginals(change(x))
    # The differences are rounding errors of float32 rows, and of sums with an offset of 50.
    np.testing.assert_allclose(after, before, atol=2e-4)


def test_columns_in_their_own_units_are_learned():
    x, y = load_breast_cancer(return_X_y=True)
    v = (y[:, None] == [0, 1]).astype(np.uint8)
    assert sl.ConditionalRBM(**SMALL).fit(x[::2], v[::2]).score(x[1::2], v[1::2]) > 0.93


@pytest.mark.parametrize("form", [np.asarray, sparse.csr_array])
def test_zeros_and_ones_are_learned_as_they_are(form):
    x = form((make_pairs()[0] > 0).astype(np.float32))
    assert measure_columns(sl.Dataset.from_arrays(x)) is None


def test_sparse_rows_give_the_results_of_the_same_rows_in_a_dense_array():
    x, v = make_pairs()
    x = np.maximum(x - 1, 0) * [1.0, 10.0, 0.1, 5.0, 1.0, 300.0]
    dense, found = (sl.ConditionalRBM(**SMALL).fit(form(x), v) for form in (np.asarray, sparse.csr_array))
    np.testing.assert_allclose(found.Wvx_, dense.Wvx_, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(found.predict_marginals(x), dense.predict_marginals(x), atol=1e-4)


def test_standardised_columns_have_mean_0_and_a_bounded_length():
    rng = np.random.default_rng(0)
    x = rng.normal(3.0, [0.01, 1.0, 100.0, 5.0], (500, 4))
    x[:, 3] = 0.0
    x[7, 3] = 10.0  # One row differs: the scale of the column is its lower bound, a tenth of its range.
    units = ColumnUnits.measure(np.concatenate([x, np.ones((500, 1))], axis=1))
    np.testing.assert_allclose(units.scale[:3], x[:, :3].std(axis=0), rtol=1e-5)
    np.testing.assert_allclose(units.scale[3:], [1.0, 1.0])
    wide = rng.normal(size=(50, 1200))
    z = ColumnUnits.measure(wide).standardise(Block(wide, None, None, 0)).x
    np.testing.assert_allclose((z**2).sum(axis=1).mean(), 300.0, rtol=1e-3)


def test_rows_that_are_not_finite_have_no_units():
    x = make_pairs()[0]
    x[3, 1] = np.nan
    assert ColumnUnits.measure(x) is None


def test_parameters_for_rows_and_for_standardised_rows_give_the_same_biases():
    x = make_pairs()[0] * [1.0, 10.0, 0.1, 5.0, 1.0, 3.0] + 2.0
    shape, rng = CrbmShape(3, 4, 6), np.random.default_rng(1)
    theta = rng.normal(size=shape.n_parameters).astype(np.float32)
    units, backend = ColumnUnits.measure(x), make_backend("cpu")
    block = Block(x.astype(np.float32), None, None, 0)
    raw = units.convert_to_original(shape, theta)
    found = [
        np.concatenate(compute_block_biases(shape, shape.split(t), b, backend)[1:], axis=1).copy()
        for t, b in ((theta, units.standardise(block)), (raw, block))
    ]
    np.testing.assert_allclose(found[1], found[0], atol=1e-4)
    np.testing.assert_allclose(units.convert_to_standardised(shape, raw), theta, atol=1e-5)


def test_a_warm_start_continues_from_the_parameters_of_the_last_fit():
    x, v = make_pairs()
    x = 100 * x + 7
    m = sl.ConditionalRBM(warm_start=True, **SMALL).fit(x, v)
    score = m.score(x, v)
    m.set_params(n_epochs=1, learning_rate=1e-6)
    assert m.fit(x, v).score(x, v) == pytest.approx(score, abs=0.01)


def test_a_warm_start_from_logistic_regression_adds_hidden_units():
    x, v = make_pairs()
    x = 100 * x + 7
    m = sl.ConditionalRBM(**{**SMALL, "learner": "logistic"}).fit(x, v)
    logistic = m.Wvx_, m.bv_
    m.set_params(learner="cd", warm_start=True, n_epochs=1, learning_rate=1e-9).fit(x, v)
    np.testing.assert_allclose(m.Wvx_, logistic[0], atol=1e-5)
    np.testing.assert_allclose(m.bv_, logistic[1], atol=1e-3)
    assert m.W_.shape == (v.shape[1], m.n_hidden)
    assert m.W_.std() == pytest.approx(m.init_scale, rel=0.5)
    with pytest.raises(ValueError, match="warm_start: the last fit was of another shape"):
        m.fit(x[:, 1:], v)


def test_any_number_of_threads_gives_the_same_bits():
    x, v = make_pairs()
    fits = [
        sl.ConditionalRBM(**{**SMALL, "n_jobs": jobs}, batch_size=40, n_chains=2).fit(x, v) for jobs in (1, 2)
    ]
    np.testing.assert_array_equal(fits[0].Wvx_, fits[1].Wvx_)
