"""A search works for every kind of model in job files, and with scikit-learn's scorers and splitters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.metrics import f1_score, get_scorer, make_scorer
from sklearn.model_selection import GridSearchCV, GroupKFold, KFold, ShuffleSplit, StratifiedKFold

from scalelatent import (
    CapsuleRegression,
    ConditionalRBM,
    Dataset,
    HierarchicalCompositionalNetwork,
    LinearMixture,
    LinearMixtureClassifier,
    MultilayerBootstrapNetwork,
    Search,
)
from scalelatent.contract.kinds import load_own_kinds
from scalelatent.data.read.selected import select_rows
from scalelatent.errors import DataError
from scalelatent.search.candidates import find_folds
from tests.estimators.crbm_cases import Pair
from tests.helpers import HookLog, InterruptAt

Arrays = tuple[np.ndarray, Any]
CAPSULE = CapsuleRegression(max_iter=4, nu_schedule=None, random_state=0, n_jobs=1)
RBM = ConditionalRBM(n_hidden=4, n_epochs=2, learning_rate=0.3, random_state=0, n_jobs=1)
NETWORK = MultilayerBootstrapNetwork(
    decay=0.5, n_clusterings=50, n_classes=4, k1=20, random_state=0, n_jobs=1
)
PARTS = HierarchicalCompositionalNetwork([(3, (3, 2))], n_epochs=2, random_state=0, n_jobs=1)
DENSITY = LinearMixture(n_components=4, n_dims=2, max_iter=3, random_state=0, n_jobs=1)
MIXTURE = LinearMixtureClassifier(n_components=2, n_dims=2, max_iter=3, random_state=0, n_jobs=1)
KIND_CASES: dict[str, tuple[Any, dict[str, list[Any]]]] = {
    "capsule": (CAPSULE, {"capsule_dim": [1, 3]}),
    "crbm": (RBM, {"learner": ["cd", "mle-bp"]}),
    "hcn": (PARTS, {"p_weight": [0.1, 0.3]}),
    "linear_density": (DENSITY, {"n_dims": [1, 4]}),
    "linear_mixture": (MIXTURE, {"n_dims": [1, 4]}),
    "mbn": (NETWORK, {"feature_fraction": [0.2, 0.8]}),
}


@pytest.fixture
def rows_by_kind(digits: Arrays, pair: Pair) -> dict[str, Arrays]:
    """Return a dict from the kind of a model to its rows, and its labels, outputs or None."""
    few = digits[0][:200], digits[1][:200] % 4
    images = few[0].reshape(-1, 8, 8) > 7, None
    return {
        "capsule": few,
        "crbm": pair,
        "hcn": images,
        "linear_density": (few[0], None),
        "linear_mixture": few,
        "mbn": few,
    }


def select_labels(y: np.ndarray | None, rows: Any) -> np.ndarray | None:
    return None if y is None else y[rows]


def test_every_kind_of_job_files_is_tested() -> None:
    assert set(KIND_CASES) == {name for name, kind in load_own_kinds().items() if not kind.python_only}


@pytest.mark.parametrize("kind", KIND_CASES)
def test_a_search_equals_separate_fits_and_scores(kind: str, rows_by_kind: dict[str, Arrays]) -> None:
    base, grid = KIND_CASES[kind]
    cv = KFold(2, shuffle=True, random_state=1)
    search = Search(base, grid, cv=cv).fit(*rows_by_kind[kind])
    found = search.cv_results_
    (name, values), (x, y) = next(iter(grid.items())), rows_by_kind[kind]
    for i, value in enumerate(values):
        for k, (train, test) in enumerate(cv.split(x)):
            train, test = np.sort(train), np.sort(test)
            alone = clone(base).set_params(**{name: value}).fit(x[train], select_labels(y, train))
            if kind == "mbn":
                from scalelatent.evaluation.output_scores import score_clusters

                expected = score_clusters(alone, Dataset.from_arrays(x[test], y[test]))["nmi"]
            else:
                expected = alone.score(x[test], select_labels(y, test))
            assert found[f"split{k}_test_score"][i] == pytest.approx(expected, abs=1e-12)
    mean = found["mean_test_score"]
    np.testing.assert_allclose(mean, (found["split0_test_score"] + found["split1_test_score"]) / 2)
    assert search.best_index_ == int(mean.argmax())
    assert (search.best_score_, search.best_params_) == (mean.max(), found["params"][search.best_index_])
    assert found[f"param_{name}"].tolist() == values
    assert sorted(found["rank_test_score"]) == [1, 2]
    assert (found["mean_fit_time"] > 0).all()
    assert (found["mean_score_time"] > 0).all()
    assert set(found) >= {"std_test_score", "std_fit_time", "std_score_time"}
    whole = clone(base).set_params(**search.best_params_).fit(x, y)
    np.testing.assert_array_equal(search.transform(x), whole.transform(x))
    assert search.refit_time_ > 0
    assert (search.n_splits_, search.n_features_in_) == (2, whole.n_features_in_)
    assert hasattr(search, "predict") == hasattr(base, "predict")


def test_a_network_is_chosen_by_the_class_of_the_nearest_row(rows_by_kind: dict[str, Arrays]) -> None:
    base, grid = KIND_CASES["mbn"]
    search = Search(base, grid, cv=2, scoring="retrieval").fit(*rows_by_kind["mbn"])
    assert 0 < search.best_score_ <= 1


@pytest.mark.parametrize("kind", KIND_CASES)
def test_validation_rows_make_the_best_candidate_the_result(
    kind: str, rows_by_kind: dict[str, Arrays]
) -> None:
    base, grid = KIND_CASES[kind]
    x, y = rows_by_kind[kind]
    held = x[120:], select_labels(y, slice(120, None))
    search = Search(base, grid).fit(x[:120], select_labels(y, slice(120)), validation=held)
    assert search.n_splits_ == 1
    assert not hasattr(search, "refit_time_")
    alone = clone(base).set_params(**search.best_params_)
    alone.fit(x[:120], select_labels(y, slice(120)), **({"validation": held} if base._validates else {}))
    np.testing.assert_array_equal(search.best_estimator_.transform(x), alone.transform(x))
    assert search.score(*held) == pytest.approx(search.best_score_)


@pytest.mark.parametrize("kind", ["crbm", "mbn"])
@pytest.mark.parametrize("at", [1, 6, 11])
def test_an_interrupted_search_of_any_kind_resumes(
    kind: str, at: int, rows_by_kind: dict[str, Arrays], tmp_path: Path
) -> None:
    base, grid = KIND_CASES[kind]
    search, log = Search(base, grid, cv=2), HookLog()
    with pytest.raises(KeyboardInterrupt):
        interrupt = InterruptAt(at, "stage", "pass_end", "event")
        clone(search).fit(*rows_by_kind[kind], run_dir=tmp_path, callbacks=[log, interrupt])
    again = clone(search).fit(*rows_by_kind[kind], run_dir=tmp_path, resume=True, callbacks=log)
    whole = clone(search).fit(*rows_by_kind[kind])
    assert again.cv_results_["mean_test_score"].tolist() == whole.cv_results_["mean_test_score"].tolist()
    x = rows_by_kind[kind][0]
    np.testing.assert_array_equal(again.transform(x), whole.transform(x))
    scored = [e for e in log.infos("event") if e["event"] == "candidate_scored"]
    assert len(scored) == 4  # Each of 2 candidates is scored once per fold.
    assert not (tmp_path / "candidates" / "000-f0").exists()


def test_a_finished_search_with_validation_rows_is_loaded(
    pair: Pair, held_pair: Pair, tmp_path: Path
) -> None:
    search = Search(RBM, {"n_hidden": [2, 5, 3]})
    first = clone(search).fit(*pair, validation=held_pair, run_dir=tmp_path)
    log = HookLog()
    again = clone(search).fit(*pair, validation=held_pair, run_dir=tmp_path, resume=True, callbacks=log)
    assert not [e for e in log.infos("event") if e["event"] == "candidate"]
    np.testing.assert_array_equal(again.best_estimator_.W_, first.best_estimator_.W_)
    assert [p.name for p in (tmp_path / "candidates").iterdir() if any(p.iterdir())] == [
        f"{first.best_index_:03d}"
    ]


@pytest.mark.parametrize(
    "cv",
    [
        StratifiedKFold(3),
        ShuffleSplit(2, test_size=0.3, random_state=0),
        [(np.arange(0, 300, 2), np.arange(1, 300, 2))],
        3,
    ],
    ids=["stratified", "shuffled", "pairs", "runs"],
)
def test_splitters_and_scorers_of_scikit_learn_give_its_results(digits: Arrays, cv: Any) -> None:
    x, y = digits[0][:300], digits[1][:300]
    grid, scoring = {"capsule_dim": [1, 3]}, "f1_weighted"
    cv_theirs = KFold(3) if cv == 3 else cv
    theirs = GridSearchCV(CAPSULE, grid, cv=cv_theirs, scoring=scoring).fit(x, y)
    ours = Search(CAPSULE, grid, cv=cv, scoring=scoring).fit(x, y)
    # If candidates share passes, held-out rows have weight 0. GridSearchCV removes these rows, so blocks (row
    # ranges of one product) start at other rows, and one or two predictions differ by rounding.
    tolerance = 0.03 if cv == 3 else 0
    for name in (n for n in theirs.cv_results_ if "test_score" in n and "rank" not in n):
        np.testing.assert_allclose(
            ours.cv_results_[name], theirs.cv_results_[name], atol=tolerance, err_msg=name
        )
    assert ours.cv_results_["params"] == theirs.cv_results_["params"]
    assert ours.score(x, y) == pytest.approx(get_scorer(scoring)(ours.best_estimator_, x, y))


def test_groups_and_users_scorers_are_used(digits: Arrays, pair: Pair) -> None:
    x, y = digits[0][:200], digits[1][:200] % 2
    groups = np.arange(200) % 4
    grid = {"momentum": [0.0, 0.5]}
    theirs = GridSearchCV(CAPSULE, grid, cv=GroupKFold(2)).fit(x, y, groups=groups)
    ours = Search(CAPSULE, grid, cv=GroupKFold(2)).fit(x, y, groups=groups)
    np.testing.assert_allclose(ours.cv_results_["mean_test_score"], theirs.cv_results_["mean_test_score"])
    micro = make_scorer(f1_score, average="micro")
    found = Search(RBM, {"n_hidden": [3]}, cv=2, scoring=micro).fit(*pair).cv_results_
    model = clone(RBM).set_params(n_hidden=3).fit(pair[0][150:], pair[1][150:])
    assert found["split0_test_score"][0] == pytest.approx(micro(model, pair[0][:150], pair[1][:150]))
    seen: list[Any] = []

    def of_rows(model: Any, rows: Dataset) -> float:
        seen.append(rows)
        return 1.0

    # A scorer that is a function needs no labels, so the search accepts rows without labels.
    Search(NETWORK, {"n_clusterings": [50]}, cv=2, scoring=of_rows).fit(x)
    assert [len(one) for one in seen] == [100, 100]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x, y: Search(NETWORK, {"n_clusterings": [50]}).fit(x), "labels, and there are none: give y"),
        (
            lambda x, y: Search(NETWORK, {}, scoring="f1").fit(x, y),
            "'f1' is not one of nmi, accuracy, retrieval",
        ),
        (
            lambda x, y: Search(RBM, {"n_hidden": [0]}).fit(x, x > 0),
            r"candidate 0 \{'n_hidden': 0\}.*n_hidden=0",
        ),
        (
            lambda x, y: Search(RBM, {"n_hidden": [2]}, halving=True).fit(x, x > 0),
            "fitted one by one: set halving",
        ),
        (lambda x, y: Search(CAPSULE, {}, cv=[([0, 0], [1])]).fit(x, y), "each once"),
        (lambda x, y: Search(CAPSULE, {}, cv=[]).fit(x, y), "gives no fold"),
        (lambda x, y: Search(CAPSULE, {}, cv="five").fit(x, y), "cv='five': give a number of folds"),
    ],
    ids=["no labels", "metric", "candidate", "halving", "twice", "no fold", "word"],
)
def test_invalid_searches_are_refused(digits: Arrays, make: Any, message: str) -> None:
    with pytest.raises((ValueError, DataError), match=message):
        make(digits[0][:50], digits[1][:50])


def test_a_diverging_candidate_of_any_kind_does_not_end_the_search(pair: Pair) -> None:
    wild = {"learning_rate": 1e30, "n_epochs": 3}
    with pytest.warns(UserWarning, match=r"candidate 1 \(001-f0\) ended after 0 passes"):
        search = Search(RBM, [{}, wild], cv=2, error_score=-1).fit(*pair)
    assert search.cv_results_["mean_test_score"][1] == -1
    assert search.best_index_ == 0


def test_rows_selected_by_index_are_those_rows(digits: Arrays, tmp_path: Path) -> None:
    import scipy.sparse

    x, y = digits
    weight = np.linspace(0, 1, len(y))
    wanted = np.array([599, 0, 7, 8, 9, 300])
    rows = np.sort(wanted)
    for given in (x, scipy.sparse.csr_array(x)):
        path = tmp_path / type(given).__name__
        stored = Dataset.from_arrays(given, y, sample_weight=weight).save(path)
        for ds in (stored, stored[100:], Dataset.from_arrays(given, y, sample_weight=weight)):
            at = rows[rows < len(ds)]
            some, first = select_rows(ds, wanted[wanted < len(ds)]), len(y) - len(ds)
            read = some.read_x(0, len(at))
            np.testing.assert_array_equal(read.toarray() if some.is_sparse else read, x[first + at])
            np.testing.assert_array_equal(some.read_y(0, len(at)), y[first + at])
            np.testing.assert_array_equal(some.read_weight(1, 3), weight[first + at[1:3]])
        kept = select_rows(stored, wanted).save(f"{path}-some")
        np.testing.assert_array_equal(kept.read_y(0, 6), y[rows])


def test_a_search_has_feature_names_and_an_html_form(digits: Arrays) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(digits[0][:100]).add_prefix("p")
    search = Search(NETWORK, {"n_clusterings": [50, 60]}, cv=2)
    search.fit(frame, digits[1][:100])
    np.testing.assert_array_equal(search.feature_names_in_, frame.columns)
    np.testing.assert_array_equal(search.best_estimator_.feature_names_in_, frame.columns)
    assert "Search" in search._repr_mimebundle_()["text/html"]


# -- what scorers and splitters of scikit-learn receive ------------------------------------------------------


class _ManyRows:
    has_y = has_targets = False

    def __len__(self) -> int:
        return 10**12


def test_folds_need_no_memory_per_row() -> None:
    splits, runs = find_folds(5, _ManyRows(), None, shared=True)  # type: ignore[arg-type]
    assert splits is None
    assert runs is not None
    assert [runs[0], runs[-1]] == [(0, 2 * 10**11), (8 * 10**11, 10**12)]


@pytest.mark.parametrize(("n_rows", "n_folds"), [(10, 3), (11, 4), (6, 6), (7, 2)])
def test_a_number_of_folds_equals_kfold(n_rows: int, n_folds: int) -> None:
    rows = Dataset.from_arrays(np.zeros((n_rows, 1), "f4"))
    theirs = [(int(test[0]), int(test[-1]) + 1) for _, test in KFold(n_folds).split(np.zeros(n_rows))]
    assert find_folds(n_folds, rows, None, shared=True) == (None, theirs)


@pytest.mark.parametrize("cv", [[1, 2], {1: 2}, [(1, 2, 3)]])
def test_splits_that_are_not_pairs_of_row_indices_are_refused(digits: Arrays, cv: Any) -> None:
    with pytest.raises(ValueError, match=r"give pairs \(train, test\) of row numbers"):
        Search(CAPSULE, {"capsule_dim": [1]}, cv=cv).fit(*digits)


def test_an_invalid_error_score_is_refused(digits: Arrays) -> None:
    with pytest.raises(ValueError, match="error_score='rasie': give 'raise' or a number"):
        Search(CAPSULE, {"capsule_dim": [1]}, error_score="rasie").fit(*digits)


def test_a_metric_without_weights_is_used_for_weighted_rows(digits: Arrays) -> None:
    x, y = digits
    search = Search(CAPSULE, {"capsule_dim": [1]}, cv=2, scoring="adjusted_rand_score")
    search.fit(x, y, sample_weight=np.linspace(1, 2, len(y)))
    assert 0 < search.best_score_ <= 1


@pytest.mark.filterwarnings("error:X does not have valid feature names")
def test_scorers_do_not_warn_about_feature_names(digits: Arrays) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(digits[0]).rename(columns=str)
    search = Search(CAPSULE, {"capsule_dim": [1]}, cv=2, scoring="f1_weighted").fit(frame, digits[1])
    assert search.score(frame, digits[1]) > 0
    assert search.best_estimator_.feature_names_in_[1] == "1"
