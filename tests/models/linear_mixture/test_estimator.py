"""Linear mixtures learn, are saved, resume to the same bits, pass scikit-learn's checks, refuse bad input."""

from __future__ import annotations

import warnings
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import sparse
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.decomposition import PCA
from sklearn.linear_model import SGDClassifier
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from scalelatent import Dataset, load_model
from scalelatent.engine.callbacks import Callback
from scalelatent.errors import DataError, PlanError
from scalelatent.estimators.base import warn_reduced
from scalelatent.kernels.streams import stream
from scalelatent.models.linear_mixture.estimator import LinearMixture, LinearMixtureClassifier
from scalelatent.models.linear_mixture.model.choose_dims import count_wrong
from tests.models.linear_mixture.cases import make_rows
from tests.models.linear_mixture.test_engine import load_usps

ENGINE = {"block_rows": 128, "leaf_rows": 256}
SMALL: dict[str, Any] = {"n_dims": 4, "max_iter": 4, "random_state": 0, "n_jobs": 1}
WEIGHTS = "a fit starts from a sample of the rows, and a row of weight 2 is one of them"
PROBABILITIES = "takes whatever has predict_proba for a classifier"
OF_WEIGHTS = {f"check_sample_weight_equivalence_on_{form}_data": WEIGHTS for form in ("dense", "sparse")}
OF_DENSITIES = {f"check_estimator_sparse_{form}": PROBABILITIES for form in ("array", "matrix")}
LEARNED = ("means_", "bases_", "variances_", "noise_", "weights_", "component_classes_")


@pytest.fixture(scope="module")
def digits() -> SimpleNamespace:
    x, y = load_digits(return_X_y=True)
    x = x.astype("f4")
    return SimpleNamespace(x=x[:1000], y=y[:1000], test_x=x[1000:], test_y=y[1000:])


def make_classifier(**options: Any) -> LinearMixtureClassifier:
    return LinearMixtureClassifier(**{"n_components": 3, **SMALL, **options})


def make_density(**options: Any) -> LinearMixture:
    return LinearMixture(**{"n_components": 6, "likelihood": "ppca", **SMALL, **options})


def assert_same(a: Any, b: Any) -> None:
    for name in LEARNED:
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


# -- predictions -------------------------------------------------------------------------------------------


def test_a_classifier_learns_digits(digits):
    m = make_classifier(n_dims=6).fit(digits.x, digits.y)
    assert m.score(digits.test_x, digits.test_y) > 0.95
    scores, shares = m.decision_function(digits.test_x), m.predict_proba(digits.test_x)
    np.testing.assert_array_equal(scores.argmax(axis=1), m.predict(digits.test_x))
    np.testing.assert_allclose(shares.sum(axis=1), 1)
    all_scores = m.transform(digits.test_x)
    best = [all_scores[:, m.component_classes_ == c].min(axis=1) for c in range(10)]
    np.testing.assert_allclose(-scores, np.stack(best, axis=1), rtol=1e-4, atol=1e-2)
    certain = m.confidence(digits.test_x)
    assert ((certain >= 0) & (certain <= 1)).all()
    rejected, error = m.reject_curve(digits.test_x, digits.test_y)
    assert error[0] == pytest.approx(1 - m.score(digits.test_x, digits.test_y))
    assert rejected[0] == 0
    assert error.shape == (797,)
    codes, components = m.encode(digits.test_x)
    rows = m.means_[components] + np.einsum("nph,nh->np", m.bases_[components], codes)
    np.testing.assert_allclose(m.reconstruct(digits.test_x), rows, atol=1e-3)
    errors = ((digits.test_x - rows) ** 2).sum(axis=1)
    np.testing.assert_allclose(errors, -scores.max(axis=1), rtol=1e-3, atol=0.1)
    assert (m.component_classes_[m.encode(digits.test_x, label=3)[1]] == 3).all()
    assert [record["pass"] for record in m.history_] == list(range(1, m.n_iter_ + 1))


def test_tangent_distance_changes_the_recognition_and_not_the_fit(digits):
    options = {"tangents": ("shift-x", "shift-y", "thickness"), "image_shape": (8, 8), "smoothing": 0.4}
    plain = make_classifier(**options).fit(digits.x, digits.y)
    m = make_classifier(**options, recognition="tangent-distance").fit(digits.x, digits.y)
    assert_same(m, plain)
    assert (m.decision_function(digits.test_x) >= plain.decision_function(digits.test_x) - 1e-2).all()
    assert m.basis_.shape == (64, 64)
    shaped = Dataset.from_arrays(digits.x.reshape(-1, 8, 8), digits.y)
    assert_same(clone(m).set_params(image_shape=None).fit(shaped), m)


def test_recognition_may_change_after_the_fit(digits, tmp_path):
    m = make_classifier(tangents=("shift-x", "shift-y"), image_shape=(8, 8)).fit(digits.x, digits.y)
    plain = m.decision_function(digits.test_x)
    moved = m.set_params(recognition="tangent-distance").decision_function(digits.test_x)
    assert (moved >= plain - 1e-2).all()
    assert (moved > plain + 1e-2).any()
    m.set_params(recognition="error").save(tmp_path / "m.zarr")
    loaded = load_model(tmp_path / "m.zarr")
    np.testing.assert_array_equal(loaded.decision_function(digits.test_x), plain)
    loaded.set_params(recognition="tangent-distance")
    np.testing.assert_array_equal(loaded.decision_function(digits.test_x), moved)
    without = make_classifier().fit(digits.x, digits.y).set_params(recognition="tangent-distance")
    with pytest.raises(ValueError, match="needs tangents"):
        without.predict(digits.test_x)


@pytest.mark.parametrize("likelihood", ["error", "code-cost", "ppca", "factor-analysis"])
def test_a_density_learns_digits(digits, tmp_path, likelihood):
    d = make_density(likelihood=likelihood, assignment="soft").fit(digits.x)
    found = d.score_samples(digits.test_x)
    assert np.isfinite(found).all()
    assert d.score(digits.test_x) == pytest.approx(found.mean())
    np.testing.assert_allclose(d.predict_proba(digits.test_x).sum(axis=1), 1)
    rows, components = d.sample(64)
    assert rows.shape == (64, 64)
    assert components.max() < len(d.weights_)
    np.testing.assert_array_equal(rows, d.sample(64)[0])
    seen = np.arange(64) < 40
    filled = d.reconstruct(digits.test_x, observed=seen)
    np.testing.assert_allclose(filled[:, seen], digits.test_x[:, seen], atol=1e-5)
    rest = digits.test_x[:, ~seen]
    assert ((filled[:, ~seen] - rest) ** 2).mean() < 0.9 * rest.var(axis=0).mean()
    found = d.predict(digits.test_x)
    np.testing.assert_array_equal(found, d.encode(digits.test_x)[1])
    np.testing.assert_array_equal(
        d.predict(digits.test_x, out=tmp_path / "x.zarr").read_x(0, 797)[:, 0], found
    )


@pytest.mark.parametrize("likelihood", ["error", "ppca", "factor-analysis"])
def test_stepwise_em_learns_digits(digits, likelihood):
    options: dict[str, Any] = {"likelihood": likelihood, "n_dims": 6, "noise_floor": 0.1}
    engine = {"run_rows": 32}
    batch = make_classifier(**options).fit(digits.x, digits.y)
    found = [
        make_classifier(algorithm="stepwise", n_jobs=jobs, **options).fit(digits.x, digits.y, engine=engine)
        for jobs in (1, 2)
    ]
    assert_same(*found)
    assert found[0].n_iter_ == 3
    scores = [m.score(digits.test_x, digits.test_y) for m in (found[0], batch)]
    assert scores[0] > scores[1] - 0.02


def test_stepwise_em_with_tangents_follows_its_plan(digits):
    m = make_classifier(algorithm="stepwise", tangents=("shift-x",), image_shape=(8, 8)).fit(
        digits.x, digits.y
    )
    assert m.score(digits.test_x, digits.test_y) > 0.94
    assert len(m.history_) == 6
    reported = m.plan(digits.x, digits.y)
    assert reported["stages"]["stepwise"]["rows"] == 1000
    with pytest.raises(ValueError, match="stepwise EM clusters without tangents"):
        m.set_params(tangent_weight=1.0).fit(digits.x, digits.y)
    # A step has four chains (parallel parts) of equal size, so 101 rows per step are rounded up to 104.
    m.set_params(tangent_weight=0.0, batch_rows=101)
    assert m.plan(digits.x, digits.y)["stages"]["stepwise"]["steps_per_pass"] == 10


def test_a_density_without_directions_is_k_means(digits):
    d = make_density(likelihood="error", n_dims=0, max_iter=50, tol=0.0).fit(digits.x)
    distances = ((digits.x[:, None] - d.means_[None]) ** 2).sum(axis=2)
    np.testing.assert_array_equal(d.predict(digits.x), distances.argmin(axis=1))


def test_a_constant_column_changes_no_probability(digits):
    """A column of zeros adds 0 to each score, and probabilities depend only on scores."""
    x, test_x = digits.x[:, 26:32], digits.test_x[:, 26:32]
    m = make_classifier(n_dims=2, likelihood="error").fit(x, digits.y)
    wider = make_classifier(n_dims=2, likelihood="error").fit(np.pad(x, ((0, 0), (0, 1))), digits.y)
    # A score, divided by the temperature, is about 10, and is a float32 sum of six squares, each of which
    # rounds by 2**-24: 10 * 6 * 2**-24 < 4e-6.
    found = wider.predict_proba(np.pad(test_x, ((0, 0), (0, 1))))
    np.testing.assert_allclose(found, m.predict_proba(test_x), rtol=0, atol=4e-6)


# -- bits, saving, resuming --------------------------------------------------------------------------------


def test_threads_change_no_bit(digits):
    found = [make_classifier(n_jobs=jobs).fit(digits.x, digits.y, engine=ENGINE) for jobs in (1, 2)]
    assert_same(*found)
    assert found[0].temperature_ == found[1].temperature_
    found = [make_density(n_jobs=jobs, assignment="soft").fit(digits.x, engine=ENGINE) for jobs in (1, 2)]
    assert_same(*found)


@pytest.mark.parametrize("make", [make_classifier, make_density])
def test_a_saved_model_predicts_the_same(digits, tmp_path, make):
    options: dict[str, Any] = {"smoothing": 0.4, "image_shape": (8, 8)} if make is make_classifier else {}
    m = make(**options).fit(digits.x, *([digits.y] if make is make_classifier else []))
    m.save(tmp_path / "model.zarr")
    again = load_model(tmp_path / "model.zarr")
    assert type(again) is type(m)
    assert_same(m, again)
    np.testing.assert_array_equal(again.transform(digits.test_x), m.transform(digits.test_x))
    np.testing.assert_array_equal(again.predict(digits.test_x), m.predict(digits.test_x))
    np.testing.assert_array_equal(again.predict_proba(digits.test_x), m.predict_proba(digits.test_x))


class _Interrupt(Callback):
    def __init__(self, after: int) -> None:
        self.left = after

    def on_pass_end(self, info: dict[str, Any]) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("algorithm", "after", "n_dims"), [("em", 3, 4), ("em", 12, None), ("stepwise", 1, None)]
)
def test_an_interrupted_fit_resumes_to_the_same_bits(digits, tmp_path, algorithm, after, n_dims):
    m = make_classifier(algorithm=algorithm, n_dims=n_dims)
    whole = clone(m).fit(digits.x, digits.y)
    every = {"checkpoint_passes": 1} if algorithm == "em" else {"checkpoint_steps": 1}
    options: dict[str, Any] = {"run_dir": tmp_path / "run", "engine": every}
    with pytest.raises(KeyboardInterrupt):
        clone(m).fit(digits.x, digits.y, callbacks=_Interrupt(after), **options)
    resumed = clone(m).fit(digits.x, digits.y, resume=True, **options)
    assert_same(whole, resumed)
    assert resumed.n_iter_ == whole.n_iter_
    assert resumed.temperature_ == whole.temperature_


def test_partial_fit_adds_rows_to_components(digits):
    whole = make_classifier(n_dims=6, tol=0.0).fit(digits.x, digits.y)
    m = make_classifier(n_dims=6).partial_fit(digits.x[:500], digits.y[:500])
    before = m.score(digits.test_x, digits.test_y)
    for a in range(500, 1000, 50):
        m.partial_fit(digits.x[a : a + 50], digits.y[a : a + 50])
    assert m.score(digits.test_x, digits.test_y) > before - 0.005
    assert m.score(digits.test_x, digits.test_y) > whole.score(digits.test_x, digits.test_y) - 0.03
    totals = [np.bincount(f.component_classes_, f._fitted.counts) for f in (m, whole)]
    np.testing.assert_allclose(*totals)
    kept = m.means_.copy()
    with pytest.raises(DataError, match="label 11 is none of the classes"):
        m.partial_fit(digits.x[:2], [1, 11])
    with pytest.raises(DataError, match=r"NaN.*row 1, feature 0"):
        m.partial_fit(np.array([[0.0] * 64, [np.nan] * 64]), [1, 2])
    with pytest.raises(ValueError, match="are not those that the model knows"):
        m.partial_fit(digits.x[:2], [1, 2], classes=[1, 2])
    with pytest.raises(DataError, match="class 10 has no rows"):
        make_classifier().partial_fit(digits.x, digits.y, classes=range(12))
    np.testing.assert_array_equal(m.means_, kept)
    d = make_density().fit(digits.x[:500])
    first = d.score(digits.test_x)
    assert d.partial_fit(digits.x[500:]).score(digits.test_x) > first
    with pytest.raises(ValueError, match="cannot learn from single rows"):
        make_density(likelihood="factor-analysis").fit(digits.x).partial_fit(digits.x)


def test_a_weight_in_partial_fit_equals_repeated_rows(digits):
    x, y = digits.x[500:540], digits.y[500:540]
    weight = np.arange(40) % 3
    begun = make_classifier().fit(digits.x[:500], digits.y[:500])
    found, wanted, stored = (deepcopy(begun) for _ in range(3))
    found.partial_fit(x, y, sample_weight=weight)
    wanted.partial_fit(x.repeat(weight, axis=0), y.repeat(weight))
    stored.partial_fit(Dataset.from_arrays(x, y, sample_weight=weight.astype(float)))
    for model in (found, stored):
        np.testing.assert_allclose(model._fitted.counts, wanted._fitted.counts)
        np.testing.assert_allclose(model.means_, wanted.means_, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(model.variances_, wanted.variances_, rtol=1e-7, atol=1e-7)
    assert not np.allclose(found.means_, begun.partial_fit(x, y).means_)


def test_the_first_partial_fit_uses_weights_like_a_fit(digits):
    x, y, weight = digits.x[:300], digits.y[:300], np.arange(300) % 3 + 1.0
    assert_same(
        make_classifier().partial_fit(x, y, sample_weight=weight),
        make_classifier().fit(x, y, sample_weight=weight),
    )


@pytest.mark.parametrize("fitted", [False, True])
@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ([1.0, np.nan] * 150, "NaN or infinity"),
        ([1.0, -1.0] * 150, "[Nn]egative"),
        ([1.0] * 299, "sample_weight.shape"),
        ([1e300] * 300, "the largest sample_weight is 1e.300"),
        ([0.0] * 300, "0 for all rows"),
    ],
)
def test_partial_fit_refuses_the_weights_that_fit_refuses(digits, fitted, weight, message):
    x, y = digits.x[:300], digits.y[:300]
    m = make_classifier().fit(x, y) if fitted else make_classifier()
    with pytest.raises(ValueError, match=message):
        m.partial_fit(x, y, sample_weight=weight)
    with pytest.raises(DataError, match="sample_weight is 0 for all rows"):
        m.partial_fit(Dataset.from_arrays(x, y, sample_weight=np.zeros(300)))


def test_duplicate_classes_count_once_as_in_scikit_learn(digits):
    x, y = digits.x[:300], digits.y[:300]
    twice = [*range(10), *range(10)]
    m = make_classifier().partial_fit(x, y, classes=twice)
    np.testing.assert_array_equal(m.classes_, range(10))
    m.partial_fit(x, y, classes=twice[::-1])
    np.testing.assert_array_equal(SGDClassifier().partial_fit(x, y, classes=twice).classes_, m.classes_)


@pytest.mark.parametrize("likelihood", ["error", "code-cost", "ppca", "factor-analysis"])
@pytest.mark.parametrize("size", [0.0, 1e-310])
def test_rows_that_are_all_zeros_are_fitted_and_scored_without_a_warning(likelihood, size):
    rows = size * np.random.default_rng(0).normal(size=(60, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        d = make_density(n_components=2, n_dims=2, likelihood=likelihood).fit(rows)
        m = make_classifier(n_components=2, n_dims=2, likelihood=likelihood).fit(rows, np.arange(60) % 2)
        reported = d.score_samples(rows)
        assert np.isfinite(reported).all()
        assert np.ptp(reported) == 0.0
        np.testing.assert_allclose(m.predict_proba(rows), 0.5)


def test_a_warm_start_continues_the_fit(digits):
    m = make_classifier(warm_start=True, tol=0.0).fit(digits.x, digits.y)
    first = m.history_[-1]["objective"]
    assert m.fit(digits.x, digits.y).history_[-1]["objective"] <= first * (1 + 1e-4)
    for changed in ({"n_components": 2}, {"n_dims": 12}, {"likelihood": "ppca"}):
        with pytest.raises(ValueError, match="warm_start"):
            deepcopy(m).set_params(**changed).fit(digits.x, digits.y)


# -- conventions -------------------------------------------------------------------------------------------


@parametrize_with_checks(
    [
        LinearMixtureClassifier(),
        LinearMixture(),
        LinearMixtureClassifier(n_components=1, n_dims=0, max_iter=3, n_jobs=1),
        LinearMixture(n_components=2, n_dims=0, max_iter=3, n_jobs=1, random_state=0),
    ],
    expected_failed_checks=lambda estimator: (
        OF_WEIGHTS if isinstance(estimator, LinearMixtureClassifier) else OF_DENSITIES
    ),
)
def test_scikit_learns_checks_pass(estimator, check):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(estimator)


@pytest.mark.parametrize("factor", [1e-30, 1e-18, 1e-9, 1e9])
def test_units_of_the_rows_hardly_change_the_classes(digits, factor):
    """Rows in other units get nearly the same classes, or the fit refuses rows that vanish in float32."""
    x = digits.x[:300].astype("f8") * factor
    if factor < 1e-15:
        with pytest.raises(DataError, match="vanish in float32: multiply the rows by about"):
            make_classifier().fit(x, digits.y[:300])
    else:
        plain = make_classifier().fit(digits.x[:300], digits.y[:300]).predict(digits.test_x)
        scaled = make_classifier().fit(x, digits.y[:300]).predict(digits.test_x.astype("f8") * factor)
        assert (plain == scaled).mean() > 0.97


def test_default_sizes_depend_on_rows_and_features(digits, caplog):
    """A class of 30 rows gets 6 components, which is logged once; spherical classes need no dimensions."""
    rng = np.random.default_rng(0)
    y = np.repeat([0, 1], [200, 30])
    x = rng.normal(size=(230, 40)) + 2.0 * y[:, None]
    warn_reduced.cache_clear()
    m = LinearMixtureClassifier(random_state=0, n_jobs=1).fit(x, y)
    assert m.n_dims_ == 0
    assert np.bincount(m.component_classes_).tolist() == [20, 6]
    words = [record.getMessage() for record in caplog.records]
    components = (
        "n_components is 6 instead of its default 20, because the training rows have only 30 rows in a class"
    )
    assert sum(components in w for w in words) == 1
    given = LinearMixtureClassifier(n_components=3, n_dims=5, random_state=0, n_jobs=1).fit(x, y)
    assert (given.n_dims_, len(given.weights_)) == (5, 6)
    assert m.set_params(warm_start=True).fit(x[::2], y[::2]).n_dims_ == 0
    d = LinearMixture(random_state=0, n_jobs=1).fit(x[:, :3])
    assert (d.n_dims_, len(d.weights_)) == (1, 11)


def make_planes(n: int, p: int, dims: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return n noisy rows of three classes; each class has its own plane through 0 of ``dims`` directions."""
    rng = np.random.default_rng(seed)
    y = np.arange(n) % 3
    bases = rng.normal(size=(3, dims, p))
    rows = np.einsum("nh,nhp->np", rng.normal(size=(n, dims)), bases[y])
    return rows + rng.normal(size=(n, p)), y


@pytest.mark.parametrize(("p", "dims"), [(12, 2), (12, 3), (40, 7), (300, 12)])
def test_a_classifier_by_default_is_as_good_as_with_the_true_dimensions(p, dims):
    x, y = make_planes(1500, p, dims, 0)
    by_default, given = (
        LinearMixtureClassifier(n_dims=h, random_state=0, n_jobs=1).fit(x[:900], y[:900])
        for h in (None, dims)
    )
    assert by_default.score(x[900:], y[900:]) > given.score(x[900:], y[900:]) - 0.01
    assert p > 12 or by_default.n_dims_ == dims


def test_wrong_rows_per_dimension_equal_those_of_separate_pca():
    """The fit counts wrong rows for 0 to 8 dimensions; PCA of each class and fold gives the same counts."""
    x, y = make_planes(100, 60, 3, 1)
    x, y = x[y != 2], y[y != 2]  # Two classes remain, with 67 rows.
    rng = stream(5, "linear-mixture-folds")
    order = [rng.permutation(np.flatnonzero(y == c)) for c in range(2)]
    expected = np.zeros(9, dtype=int)
    for fold in range(3):
        tested = np.concatenate([rows[fold::3] for rows in order])
        errors = np.empty((9, len(tested), 2))
        for c, rows in enumerate(order):
            learned = x[np.setdiff1d(rows, rows[fold::3])]
            for h in range(9):
                bases = PCA(8, svd_solver="full").fit(learned).components_[:h]
                centred = x[tested] - learned.mean(axis=0)
                errors[h, :, c] = ((centred - centred @ bases.T @ bases) ** 2).sum(axis=1)
        expected += (errors.argmin(axis=2) != y[tested]).sum(axis=1)
    np.testing.assert_array_equal(count_wrong(x, y, 8, 5), expected)


@pytest.mark.parametrize("most", [0, 3])
def test_dimensions_are_chosen_from_constant_single_and_equal_rows(most):
    x = np.zeros((9, 4), dtype="f4")
    x[3:8] = 1.0
    wrong = count_wrong(x, np.array([0, 0, 0, 1, 1, 1, 1, 1, 2]), most, 0)
    np.testing.assert_array_equal(wrong, np.ones(most + 1))  # The only row of class 2 is always wrong.


def test_more_components_leave_fewer_dimensions_to_choose():
    x, y = make_planes(900, 40, 7, 0)
    assert LinearMixtureClassifier(n_components=10, random_state=0, n_jobs=1).fit(x, y).n_dims_ <= 5


def test_a_density_by_default_has_no_more_components_than_few_rows_can_estimate():
    x = StandardScaler().fit_transform(load_breast_cancer().data)
    train, test = train_test_split(x, test_size=0.3, random_state=0)

    def held_out(n_components):
        model = LinearMixture(n_components=n_components, likelihood="ppca", random_state=0, n_jobs=1)
        return model.fit(train).score(test)

    assert held_out(None) > held_out(7) + 1


@pytest.mark.parametrize("make", [make_classifier, make_density])
def test_parameters_equal_those_of_the_table(make):
    m = make()
    assert list(m._parameters.defaults()) == [
        name for name in type(m).__init__.__kwdefaults__ if name != "self"
    ]
    assert m._parameters.defaults() == type(m).__init__.__kwdefaults__
    assert clone(m).get_params() == m.get_params()


@pytest.mark.parametrize("make", [make_classifier, make_density])
def test_former_parameters_may_be_named_with_their_defaults(make):
    table = make()._parameters
    assert table.drop_removed({**table.removed, "n_dims": 2}) == {"n_dims": 2}
    with pytest.raises(ValueError, match="statistics='moments': this version has no parameter statistics"):
        table.drop_removed({"statistics": "moments"})


def test_labels_of_any_type_weights_and_feature_names_are_used(digits):
    pd = pytest.importorskip("pandas")
    names = np.array([f"digit {i}" for i in range(10)])
    frame = pd.DataFrame(digits.x, columns=[f"pixel {i}" for i in range(64)])
    m = make_classifier(n_components=2).fit(frame, names[digits.y], sample_weight=np.full(1000, 2.0))
    assert m.predict(frame[:5]).dtype.kind == "U"
    assert len(m.feature_names_in_) == 64
    plain = make_classifier(n_components=2).fit(digits.x, digits.y)
    np.testing.assert_allclose(m.means_, plain.means_, rtol=1e-3, atol=1e-3)
    assert m.set_output(transform="pandas").transform(frame[:5]).shape == (5, 20)


def test_sparse_and_stored_rows_give_the_same_model(digits, tmp_path):
    m = make_classifier().fit(digits.x, digits.y)
    assert_same(m, make_classifier().fit(sparse.csr_array(digits.x), digits.y))
    ds = Dataset.from_arrays(digits.x, digits.y).save(tmp_path / "rows.zarr")
    assert_same(m, make_classifier().fit(ds))
    assert m.score(ds) == m.score(digits.x, digits.y)
    written = m.predict(ds, out=tmp_path / "predicted.zarr")
    np.testing.assert_array_equal(written.read_y(0, 1000), m.predict(digits.x))
    np.testing.assert_array_equal(m.reject_curve(ds)[1], m.reject_curve(digits.x, digits.y)[1])


def test_classes_may_have_different_numbers_of_components(digits):
    few = digits.y < 2
    m = make_classifier(n_components=[2, 5]).fit(digits.x[few], digits.y[few])
    assert list(np.bincount(m.component_classes_)) == [2, 5]
    assert m.decision_function(digits.x).shape == (1000,)
    np.testing.assert_array_equal(m.decision_function(digits.x) > 0, m.predict(digits.x) == 1)


def test_the_plan_predicts_passes_and_memory(digits):
    reported = make_classifier().plan(digits.x, digits.y)
    assert reported["stages"]["em"]["rows"] == 1000
    assert reported["expected_seconds"] < 60
    with pytest.raises(PlanError, match="lower n_components or n_dims"):
        make_classifier(n_components=200, n_dims=40).plan(
            np.zeros((3000, 784), "u1"), np.arange(3000) % 10, memory_limit="2GB"
        )


# -- bad input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_components": 0}, "n_components=0"),
        ({"n_dims": 64}, r"n_dims=64: rows have 64 feature\(s\)"),
        ({"n_dims": -1}, "n_dims=-1"),
        ({"likelihood": "exact"}, "likelihood='exact' is not one of"),
        ({"tangents": ("shift",)}, "tangents="),
        ({"tangents": ("shift-x",)}, r"give image_shape=\(8, 8\)"),
        ({"tangents": ("shift-x",), "image_shape": (8, 9)}, "has 72 pixels, and the rows have 64 features"),
        ({"tangents": ("shift-x",), "likelihood": "ppca"}, "fitted with the reconstruction error"),
        ({"recognition": "tangent-distance"}, "needs tangents"),
        ({"n_components": [1, 2]}, "has 2 numbers, and there are 10 classes"),
        ({"n_components": [150] + [3] * 9}, "fewer than its 150 components"),
        ({"n_components": 101}, "rows are fewer than the 1,010 components"),
        ({"n_dims": 0.8}, "n_dims=0.8: give a whole number of at least 0"),
    ],
)
def test_invalid_parameters_are_refused(digits, options, message):
    with pytest.raises((ValueError, DataError), match=message):
        make_classifier(**options).fit(digits.x, digits.y)


def test_invalid_rows_are_refused(digits):
    with pytest.raises(DataError, match="LinearMixture is a density"):
        make_classifier().fit(Dataset.from_arrays(digits.x))
    with pytest.raises(ValueError, match="LinearMixture is a density"):
        make_classifier().fit(digits.x)
    tangents: dict[str, Any] = {"tangents": ("shift-x",)}
    with pytest.raises(DataError, match="CSR"):
        make_classifier(**tangents, image_shape=(8, 8)).fit(sparse.csr_array(digits.x), digits.y)
    with pytest.raises(DataError, match="grey"):
        make_classifier(**tangents).fit(Dataset.from_arrays(digits.x.reshape(-1, 4, 4, 4), digits.y))
    for value, what in ((np.nan, "NaN"), (np.inf, "infinite"), (1e39, "beyond float32")):
        x = digits.x.astype(float)
        x[17, 3] = value
        with pytest.raises(DataError, match=f"{what}.*row 17, feature 3"):
            make_classifier().fit(x, digits.y)
    m = make_density().fit(digits.x)
    with pytest.raises(ValueError, match="observed has 3 entries"):
        m.reconstruct(digits.x, observed=[True, False, True])
    with pytest.raises(ValueError, match="False for all"):
        m.reconstruct(digits.x, observed=np.zeros(64, bool))
    with pytest.raises(ValueError, match="5 features"):
        m.predict(digits.x[:, :5])


@pytest.mark.parametrize("likelihood", ["error", "ppca", "factor-analysis"])
def test_equal_rows_and_constant_pixels_are_learned(likelihood):
    x = make_rows(300, 12, 3, 2)
    x[:, 5] = 1.0
    x[:100] = 0.5
    y = np.arange(300) // 100
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        m = make_classifier(likelihood=likelihood, n_components=2, n_dims=2).fit(x, y)
        assert np.isfinite(m.predict_proba(x)).all()
        d = make_density(likelihood=likelihood, n_dims=2).fit(x)
        assert np.isfinite(d.score_samples(x)).all()
    assert m.score(x[:100], y[:100]) == 1


@pytest.mark.parametrize("likelihood", ["ppca", "factor-analysis"])
def test_noise_is_never_below_its_floor(likelihood):
    """The floor is ``noise_floor`` times the mean variance of the features, not a fixed number."""
    x = make_rows(300, 36, 3, 4).copy()
    x[:, 5] = 1.0  # This feature is constant, so its noise is the floor.
    m = make_density(likelihood=likelihood, n_dims=8 if likelihood == "ppca" else 2, noise_floor=0.5).fit(x)
    assert m.noise_.min() == pytest.approx(0.5 * x.var(axis=0, dtype=np.float64).mean(), rel=1e-6)


# -- errors of USPS digits, very large rows ----------------------------------------------------------------


@pytest.mark.realdata
def test_a_classifier_of_usps_has_the_documented_error(data_root):
    """The parameters of the model were chosen on a fifth of the training rows, not on the test rows."""
    x, y, test_x, test_y = load_usps(data_root)
    m = LinearMixtureClassifier(
        n_components=20,
        n_dims=10,
        tangents=("shift-x", "shift-y", "rotation", "scaling", "hyperbolic-axis", "hyperbolic-diagonal"),
        image_shape=(16, 16),
        recognition="tangent-distance",
        random_state=0,
        n_jobs=1,
    ).fit(x, y)
    assert m.score(test_x, test_y) >= 0.96
    rejected, error = m.reject_curve(test_x, test_y)
    assert error[np.searchsorted(rejected, 0.1)] <= 0.012


@pytest.mark.parametrize("factor", [1e3, 1e9])
def test_a_warning_names_a_row_that_outweighs_all_others(factor: float) -> None:
    rng, y = np.random.default_rng(0), np.arange(200) % 2
    x = rng.normal(size=(200, 4)) + y[:, None]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LinearMixtureClassifier(max_iter=2, n_jobs=1).fit(x, y)
    x[77] *= factor
    with pytest.warns(UserWarning, match=r"row 77 has more than 90% of the squared lengths"):
        LinearMixtureClassifier(max_iter=2, n_jobs=1).fit(x, y)
