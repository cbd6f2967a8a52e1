"""Classifiers choose the parameter ``likelihood`` by cross-validation if the user does not set it."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import sparse
from sklearn.datasets import load_digits, load_wine, make_hastie_10_2, make_moons

import scalelatent as sl
from scalelatent.kernels.streams import resolve_seed
from scalelatent.models.linear_mixture.choosing import _count_wrong, choose_likelihood
from scalelatent.models.linear_mixture.estimator import LinearMixtureClassifier

OPTIONS = {"random_state": 0, "n_jobs": 1}


def make_rows(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return rows and labels in random order.

    "squares" are classified by their length, "units" has columns in different units, "moons" are two arcs.
    """
    make = {
        "squares": lambda: make_hastie_10_2(1200, random_state=0),
        "units": lambda: load_wine(return_X_y=True),
        "moons": lambda: make_moons(600, noise=0.2, random_state=0),
    }
    x, y = make[name]()
    order = np.random.default_rng(0).permutation(len(x))
    return x[order], y[order]


@pytest.mark.parametrize(("name", "gain", "components"), [("squares", 0.25, 2), ("units", 0.2, 3)])
def test_one_gaussian_per_class_replaces_the_error_where_it_is_better(name, gain, components):
    x, y = make_rows(name)
    half = len(x) // 2
    chosen = LinearMixtureClassifier(**OPTIONS).fit(x[:half], y[:half])
    by_error = LinearMixtureClassifier(likelihood="error", **OPTIONS).fit(x[:half], y[:half])
    assert chosen.likelihood_ == "factor-analysis"
    assert len(chosen.means_) == components
    assert chosen.score(x[half:], y[half:]) > by_error.score(x[half:], y[half:]) + gain


def test_many_components_replace_one_where_classes_are_bent():
    x, y = make_rows("moons")
    chosen = LinearMixtureClassifier(**OPTIONS).fit(x[:300], y[:300])
    assert chosen.likelihood_ == "factor-analysis"
    assert len(chosen.means_) > 2
    assert chosen.score(x[300:], y[300:]) > 0.9


def test_images_keep_the_bits_of_the_reconstruction_error():
    x, y = load_digits(return_X_y=True)
    chosen, by_error = (
        LinearMixtureClassifier(likelihood=name, max_iter=3, **OPTIONS).fit(x, y) for name in (None, "error")
    )
    assert chosen.likelihood_ == "error"
    np.testing.assert_array_equal(chosen.bases_, by_error.bases_)
    assert chosen.temperature_ == by_error.temperature_


def test_a_given_number_of_components_is_kept():
    x, y = make_rows("squares")
    m = LinearMixtureClassifier(n_components=4, n_dims=2, **OPTIONS).fit(x, y)
    assert len(m.means_) == 8
    assert m.n_dims_ == 2


@pytest.mark.parametrize("likelihood", ["error", "factor-analysis"])
def test_a_fold_counts_the_errors_of_a_separate_fit(likelihood):
    x, y = make_rows("moons")
    learned = np.arange(len(x)) % 3 != 0
    model = LinearMixtureClassifier(n_components=2, n_dims=1, likelihood=likelihood, **OPTIONS)
    fitted = model.fit(x[learned], y[learned])
    wrong = (fitted.predict(x[~learned]) != y[~learned]).sum()
    assert wrong > 0
    assert _count_wrong(model, x, y, learned, resolve_seed(0)) == wrong


def test_classes_with_few_rows_keep_the_reconstruction_error():
    rng = np.random.default_rng(0)
    for n_rows in (5, 6):
        x, y = rng.normal(size=(2 * n_rows, 3)), np.arange(2 * n_rows) % 2
        x[y == 1] *= 100
        model = LinearMixtureClassifier(n_dims=0, **OPTIONS)
        found = choose_likelihood(model, x, y, 0).likelihood
        assert found == ("error" if n_rows == 5 else "factor-analysis")


def test_sparse_rows_and_tangents_keep_the_reconstruction_error():
    x, y = make_rows("squares")
    counts = sparse.csr_array(np.round(np.abs(x)))
    assert LinearMixtureClassifier(max_iter=2, **OPTIONS).fit(counts, y).likelihood_ == "error"
    m = LinearMixtureClassifier(tangents=("shift-x",), image_shape=(2, 5), max_iter=2, **OPTIONS)
    assert m.fit(x, y).likelihood_ == "error"


def test_partial_fit_starts_with_a_score_that_can_learn_single_rows():
    x, y = make_rows("squares")
    m = LinearMixtureClassifier(**OPTIONS).partial_fit(x[:600], y[:600])
    assert (m.likelihood, m.likelihood_) == (None, "error")
    m.partial_fit(x[600:601], y[600:601])
    fitted = LinearMixtureClassifier(**OPTIONS).fit(x, y)
    with pytest.raises(ValueError, match="the fit used likelihood='factor-analysis', which cannot learn"):
        fitted.partial_fit(x[:1], y[:1])


def test_a_warm_start_keeps_the_choice_of_the_last_fit():
    x, y = make_rows("squares")
    m = LinearMixtureClassifier(warm_start=True, max_iter=2, **OPTIONS).fit(x, y)
    before = m.means_.copy()
    m.fit(x, y)
    assert m.likelihood_ == "factor-analysis"
    assert len(m.means_) == len(before)


def test_a_search_chooses_as_separate_fits_do():
    x, y = make_rows("squares")
    grid = {"n_components": [1, 4]}
    search = sl.Search(LinearMixtureClassifier(max_iter=5, **OPTIONS), grid).fit(
        x[:900], y[:900], validation=(x[900:], y[900:])
    )
    for params, score in zip(
        search.cv_results_["params"], search.cv_results_["mean_test_score"], strict=True
    ):
        alone = LinearMixtureClassifier(max_iter=5, **OPTIONS, **params).fit(x[:900], y[:900])
        assert alone.score(x[900:], y[900:]) == pytest.approx(score)
        assert alone.likelihood_ == "factor-analysis"
