"""Candidates of a search share each pass over the rows, and get the same bits as in separate fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, KFold, ParameterGrid

import scalelatent as sl
from scalelatent import Callback, CapsuleRegression, Dataset, Search
from scalelatent.errors import DataError, PlanError, RunError, ScalelatentError
from tests.helpers import HookLog, InterruptAt

Arrays = tuple[np.ndarray, np.ndarray]
SMALL = {"block_rows": 32, "leaf_rows": 64, "checkpoint_seconds": 0}
BASE = CapsuleRegression(max_iter=12, nu_schedule=[(0.5, 3), (0.0, 2)], random_state=0, n_jobs=1)
CANDIDATES: list[dict[str, Any]] = [
    {"capsule_dim": 1},
    {"capsule_dim": 3, "max_iter": 5},
    {"capsule_dim": 2, "projection": 20},
    {"capsule_dim": 2, "projection": 20, "momentum": 0.0},
    {"capsule_dim": 1, "projection": 9, "init": "random"},
    {"architecture": "all_vs_all", "capsule_dim": 1},
    {"architecture": "one_vs_all", "capsule_dim": 2, "class_weight": "balanced", "nu_schedule": None},
]
KEYS = ("pass", "objective", "train_error", "validation_error", "best_error", "nu", "round")


def assert_same(a: CapsuleRegression, b: CapsuleRegression) -> None:
    np.testing.assert_array_equal(a.W_, b.W_)
    np.testing.assert_array_equal(a.projection_, b.projection_)
    assert a.n_iter_ == b.n_iter_
    assert [[r[k] for k in KEYS] for r in a.history_] == [[r[k] for k in KEYS] for r in b.history_]


@pytest.fixture
def models_by_key(monkeypatch: pytest.MonkeyPatch) -> dict[str, CapsuleRegression]:
    """Return a dict into which each search puts its models; key "001-f0" is candidate 1 without fold 0."""
    from scalelatent.search import search

    kept: dict[str, CapsuleRegression] = {}
    set_results = search.Search._set_results

    def keep(self: Any, params: Any, candidates: Any, scores: Any) -> None:
        kept.update({one.key: one.model for one in candidates})
        set_results(self, params, candidates, scores)

    monkeypatch.setattr(search.Search, "_set_results", keep)
    return kept


# -- candidates have the bits of separate fits ---------------------------------------------------------------


def test_candidates_equal_separate_fits(digits: Arrays, held_out: Arrays, models_by_key: Any) -> None:
    search = Search(BASE, CANDIDATES, n_jobs=2).fit(*digits, validation=held_out, engine=SMALL)
    scores = []
    for i, own in enumerate(CANDIDATES):
        alone = clone(BASE).set_params(**own).fit(*digits, validation=held_out, engine=SMALL)
        assert_same(models_by_key[f"{i:03d}"], alone)
        scores.append(alone.score(*held_out))
        assert search.results_["n_passes"][i] == alone.n_iter_
    assert search.results_["mean_test_score"].tolist() == scores
    assert search.best_index_ == int(np.argmax(scores))
    assert search.best_estimator_ is models_by_key[f"{search.best_index_:03d}"]
    assert len(set(search.results_["n_passes"].tolist())) > 1  # Candidates stop after different passes.


@pytest.mark.parametrize("weighted", [False, True])
def test_a_fold_equals_a_fit_with_weight_zero_for_its_rows(
    digits: Arrays, models_by_key: Any, weighted: bool
) -> None:
    x, y = digits
    own = np.random.Generator(np.random.Philox(5)).uniform(0.5, 2, len(x)) if weighted else None
    grid = [*CANDIDATES[:3], CANDIDATES[6]]
    search = Search(BASE, grid, cv=3, n_jobs=1, refit=False).fit(x, y, sample_weight=own, engine=SMALL)
    for i, params in enumerate(grid):
        for k, (_, test) in enumerate(KFold(3).split(x)):
            weight = np.ones(len(x)) if own is None else own.copy()
            weight[test] = 0
            alone = clone(BASE).set_params(**params).fit(x, y, sample_weight=weight, engine=SMALL)
            assert_same(models_by_key[f"{i:03d}-f{k}"], alone)
            expected = alone.score(x[test], y[test], sample_weight=None if own is None else own[test])
            assert search.results_[f"split{k}_test_score"][i] == pytest.approx(expected, abs=1e-12)
    with pytest.raises(AttributeError, match="refit=True"):
        search.predict(x)


def test_folds_agree_with_grid_search(digits: Arrays) -> None:
    grid = {"capsule_dim": [1, 2, 4], "momentum": [0.0, 0.5]}
    ours = Search(BASE, grid, cv=3).fit(*digits)
    theirs = GridSearchCV(BASE, grid, cv=KFold(3)).fit(*digits)
    # GridSearchCV removes the rows of a fold from the data, so blocks (row ranges of one product) start at
    # other rows. The rounding then differs, and one or two predicted classes may differ.
    np.testing.assert_allclose(
        ours.results_["mean_test_score"], theirs.cv_results_["mean_test_score"], atol=4 / 600
    )
    assert ours.results_["params"] == theirs.cv_results_["params"]
    for name in ("param_capsule_dim", "param_momentum"):
        assert ours.results_[name].tolist() == theirs.cv_results_[name].tolist()
    assert_same(ours.best_estimator_, clone(BASE).set_params(**ours.best_params_).fit(*digits))
    np.testing.assert_array_equal(ours.predict(digits[0]), ours.best_estimator_.predict(digits[0]))
    assert ours.score(*digits) == ours.best_estimator_.score(*digits)
    assert ours.transform(digits[0][:5]).shape == (5, 20 * ours.best_params_["capsule_dim"])
    assert ours.predict_proba(digits[0][:5]).shape == (5, 10)
    assert ours.classes_.tolist() == list(range(10))
    assert ours.n_features_in_ == 64


# -- all candidates share each pass --------------------------------------------------------------------------


def test_each_pass_reads_the_rows_once(digits: Arrays, tmp_path: Path) -> None:
    train = Dataset.from_arrays(*digits).save(tmp_path / "train", chunk_rows=100)
    grid = {"capsule_dim": [1, 2, 3], "max_iter": [4, 9]}
    base = clone(BASE).set_params(nu_schedule=None)
    one_pass = digits[0].nbytes + 4 * len(digits[0])
    log = HookLog()
    search = Search(base, grid, cv=4, refit=False).fit(train, callbacks=log, engine={"cache": 0})
    assert [r["bytes_read"] for r in log.infos("pass_end")] == [one_pass] * 9
    assert [r["candidates"] for r in log.infos("pass_end")] == [24] * 4 + [12] * 5
    assert log.stages == [
        "search_moments-1-4",
        "search-24_estep",
        "search-12_estep",
        "search_temperature-5-24",
        "search_score-000-f0-24",
    ]
    assert search.n_passes_ == 9 + 3
    assert {len(r["members"]) for r in log.infos("pass_end")} == {24, 12}


def test_candidates_of_one_projection_share_its_rows(digits: Arrays, held_out: Arrays) -> None:
    log = HookLog()
    grid = {"projection": [10, 20], "momentum": [0.0, 0.3, 0.5]}
    Search(BASE, grid).fit(*digits, validation=held_out, callbacks=log)
    assert [s for s in log.stages if "svd" in s] == ["search_svd-1-1"]
    assert len([s for s in log.stages if "project-train" in s]) == 2
    assert len([s for s in log.stages if "moments" in s]) == 1


def test_memory_splits_candidates_into_groups(digits: Arrays, held_out: Arrays, models_by_key: Any) -> None:
    from scalelatent.engine.plan import ALLOWED_SHARE, PROCESS_BYTES, Resources, process_bytes

    log = HookLog()
    limit = int((process_bytes(Resources(1, 1, 0)) + 3.5 * 2**20) / ALLOWED_SHARE)
    base = clone(BASE).set_params(architecture="all_vs_all", projection=20, max_iter=3)
    grid = {"capsule_dim": [1, 8, 12, 16]}
    search = Search(base, grid, memory_limit=limit, n_jobs=1).fit(
        *digits, validation=held_out, engine=SMALL, callbacks=log
    )
    groups = [s for s in log.stages if s.endswith("_estep")]
    assert groups[0] == "search-g0-2_estep"
    assert len(groups) in (2, 3)
    for i, d in enumerate(grid["capsule_dim"]):
        alone = clone(base).set_params(capsule_dim=d).fit(*digits, validation=held_out, engine=SMALL)
        assert_same(models_by_key[f"{i:03d}"], alone)
    # For all candidates, a single pass measures the joint decision of the 45 models of two classes.
    assert len([s for s in log.stages if "_decision" in s]) == 1
    # Each group has 3 passes. The 5 other passes are for all candidates, such as the one for temperatures.
    assert search.n_passes_ == 3 * len(groups) + 3 + 2
    with pytest.raises(PlanError, match=r"search_svd-1 would need .* MiB a worker"):
        Search(base, grid, memory_limit=PROCESS_BYTES, n_jobs=1).fit(*digits, validation=held_out)


# -- interruptions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 2, 4, 7, 12, 20, 31])
def test_an_interrupted_search_resumes(digits: Arrays, tmp_path: Path, models_by_key: Any, at: int) -> None:
    search = Search(BASE, CANDIDATES[:4], cv=2, n_jobs=1)
    try:
        clone(search).fit(
            *digits,
            run_dir=tmp_path,
            engine=SMALL,
            callbacks=InterruptAt(at, "stage", "pass_end", "checkpoint"),
        )
        pytest.fail("the search ended before it was interrupted")
    except KeyboardInterrupt:
        pass
    models_by_key.clear()
    again = clone(search).fit(*digits, run_dir=tmp_path, engine=SMALL, resume=True)
    resumed = dict(models_by_key)
    whole = clone(search).fit(*digits, engine=SMALL)
    for key, model in models_by_key.items():
        assert_same(resumed[key], model)
    assert again.results_["mean_test_score"].tolist() == whole.results_["mean_test_score"].tolist()
    assert_same(again.best_estimator_, whole.best_estimator_)


def test_a_finished_search_is_loaded(digits: Arrays, tmp_path: Path) -> None:
    search = Search(BASE, CANDIDATES[:4], cv=2, n_jobs=1)
    first = clone(search).fit(*digits, run_dir=tmp_path, engine=SMALL)
    log = HookLog()
    again = clone(search).fit(*digits, run_dir=tmp_path, engine=SMALL, resume=True, callbacks=log)
    assert log.infos("pass_end") == []
    assert not [s for s in log.stages if "project" in s]
    assert_same(first.best_estimator_, again.best_estimator_)
    assert not list(tmp_path.rglob("state-*"))[3:]  # The refit leaves at most three state files.
    assert [path.name for path in tmp_path.rglob("*.zarr")] == ["model.zarr"]
    with pytest.raises(RunError, match="already holds a fit"):
        clone(search).fit(*digits, run_dir=tmp_path, engine=SMALL)
    with pytest.raises(RunError, match=r"holds another fit \(candidates: 4 of them -> 3 of them; cand"):
        Search(BASE, CANDIDATES[:3], cv=2).fit(*digits, run_dir=tmp_path, engine=SMALL, resume=True)


def test_a_callback_stops_the_search(digits: Arrays, held_out: Arrays) -> None:
    class Stop(Callback):
        def on_pass_end(self, record: dict[str, Any]) -> bool:
            return record["pass"] == 3

    for halving in (False, True):
        search = Search(BASE, CANDIDATES, halving=halving).fit(*digits, validation=held_out, callbacks=Stop())
        assert search.results_["n_passes"].tolist() == [3] * len(CANDIDATES)
        assert search.best_estimator_.n_iter_ == 3


# -- halving ------------------------------------------------------------------------------------------------


def test_halving_stops_the_worse_half(
    digits: Arrays, held_out: Arrays, models_by_key: Any, tmp_path: Path
) -> None:
    base = clone(BASE).set_params(nu_schedule=None, max_iter=30, momentum=0.0)
    grid = [{"capsule_dim": d} for d in (1, 2, 3, 4, 6)]
    log = HookLog()
    search = Search(base, grid, halving=True, min_passes=3, n_jobs=1)
    search = search.fit(*digits, validation=held_out, engine=SMALL, callbacks=log)
    passes = search.results_["n_passes"].tolist()
    assert sorted(passes) == [3, 3, 6, 12, 30]
    assert [e["candidates"] for e in log.infos("event") if e["event"] == "halved"] == [3, 2, 1]
    assert passes[search.best_index_] == 30
    for i, own in enumerate(grid):
        alone = clone(base).set_params(**own, max_iter=passes[i])
        np.testing.assert_array_equal(
            models_by_key[f"{i:03d}"].W_, alone.fit(*digits, validation=held_out, engine=SMALL).W_
        )
    # The search stopped the two candidates with the lowest scores after 3 passes.
    first = [
        clone(base)
        .set_params(**own, max_iter=3)
        .fit(*digits, validation=held_out, engine=SMALL)
        .score(*held_out)
        for own in grid
    ]
    assert {i for i, n in enumerate(passes) if n == 3} == set(
        np.argsort(np.negative(first), kind="stable")[3:]
    )
    expected = dict(models_by_key)
    for at in (5, 20, 40):
        folder = tmp_path / str(at)
        fresh = Search(base, grid, halving=True, min_passes=3, n_jobs=1)
        with pytest.raises(KeyboardInterrupt):
            fresh.fit(
                *digits,
                validation=held_out,
                run_dir=folder,
                engine=SMALL,
                callbacks=InterruptAt(at, "stage", "pass_end", "checkpoint"),
            )
        fresh.fit(*digits, validation=held_out, run_dir=folder, engine=SMALL, resume=True)
        for key, model in expected.items():
            assert_same(models_by_key[key], model)
        assert fresh.results_["n_passes"].tolist() == passes


# -- scores -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scoring", ["accuracy", "balanced_accuracy", "f1_macro", "neg_log_loss"])
def test_scores_equal_those_of_scikit_learn(digits: Arrays, held_out: Arrays, scoring: str) -> None:
    from sklearn.metrics import get_scorer

    search = Search(BASE, {"capsule_dim": [1, 3]}, scoring=scoring).fit(*digits, validation=held_out)
    for i in range(2):
        model = clone(BASE).set_params(**search.results_["params"][i]).fit(*digits, validation=held_out)
        expected = get_scorer(scoring)(model, *held_out)
        assert search.results_["mean_test_score"][i] == pytest.approx(expected, rel=1e-9)
    assert search.score(*held_out) == pytest.approx(search.best_score_)


def test_a_users_scorer_is_used(digits: Arrays, held_out: Arrays) -> None:
    def small(model: Any, rows: Dataset) -> float:
        assert len(rows) == 300
        return -float(len(model.W_))

    search = Search(BASE, {"capsule_dim": [3, 1, 2]}, scoring=small).fit(*digits, validation=held_out)
    assert search.best_params_ == {"capsule_dim": 1}
    assert search.results_["rank_test_score"].tolist() == [3, 1, 2]
    # The best model has 20 rows of W: ten members (one against the rest) with two capsules of one dimension.
    assert search.score(*held_out) == -20


def test_a_diverging_candidate_does_not_end_the_search(
    digits: Arrays, held_out: Arrays, models_by_key: Any
) -> None:
    # Weights that start near 1e30 exceed the range of float32 (3e38) in the first pass.
    wild = {"init": "random", "init_scale": 1e30, "nu_schedule": None}
    with pytest.raises((FloatingPointError, ScalelatentError)):
        clone(BASE).set_params(**wild).fit(*digits)
    with pytest.warns(UserWarning, match=r"candidate 1 \(001\) ended after 0 passes: the log-loss"):
        search = Search(BASE, [{}, wild], n_jobs=1).fit(*digits, validation=held_out, engine=SMALL)
    assert_same(models_by_key["000"], clone(BASE).fit(*digits, validation=held_out, engine=SMALL))
    assert np.isnan(search.results_["mean_test_score"][1])
    assert search.results_["rank_test_score"].tolist() == [1, 2]
    assert search.best_index_ == 0
    assert "not finite" in search.results_["error"][1]
    with pytest.raises(ScalelatentError, match="not finite"):
        Search(BASE, [{}, wild], error_score="raise").fit(*digits, validation=held_out)


# -- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"param_grid": {"capsule_dims": [1]}}, ValueError, "'capsule_dims'.*has not; it has .*capsule_dim"),
        ({"param_grid": {"n_jobs": [1]}}, ValueError, "'n_jobs'.*says where"),
        ({"param_grid": []}, ValueError, "holds no candidate"),
        (
            {"param_grid": {"momentum": [0.5, 2.0]}},
            ValueError,
            r"candidate 1 \{'momentum': 2.0\}.*momentum=2.0",
        ),
        ({"cv": 1}, ValueError, "cv=1"),
        (
            {"cv": KFold(3, shuffle=True, random_state=0), "halving": True},
            ValueError,
            "folds are not contiguous: set halving=False",
        ),
        ({"scoring": "roc"}, ValueError, "scoring='roc' is not one of accuracy"),
        ({"halving": True, "min_passes": 0}, ValueError, "min_passes=0"),
        ({"estimator": GridSearchCV(BASE, {})}, TypeError, "GridSearchCV"),
    ],
    ids=str,
)
def test_invalid_input_is_refused_before_work_starts(
    digits: Arrays, tmp_path: Path, options: dict[str, Any], error: Any, message: str
) -> None:
    given = {"estimator": BASE, "param_grid": {"capsule_dim": [1, 2]}, "cv": 2, **options}
    with pytest.raises(error, match=message):
        Search(**given).fit(*digits, run_dir=tmp_path / "run")
    assert not list(tmp_path.rglob("*.rec"))


def test_folds_of_rows_sorted_by_class_are_refused(digits: Arrays) -> None:
    x, y = digits
    order = np.argsort(y, kind="stable")
    with pytest.raises(
        DataError, match=r"candidate 0 .*without rows 0 to 119 .*shuffled first.*class\(es\) 0"
    ):
        Search(BASE, {"capsule_dim": [1]}, cv=5).fit(x[order], y[order])


def test_a_search_accepts_inputs_of_every_kind(digits: Arrays, held_out: Arrays, tmp_path: Path) -> None:
    import dask.array as da

    x, y = digits
    stored = Dataset.from_arrays(x, y).save(tmp_path / "train")
    grid = list(ParameterGrid({"capsule_dim": [1, 2]}))
    expected = Search(BASE, grid, cv=2).fit(x, y).best_estimator_
    for given in ((x.tolist(), y.tolist()), (stored,), (da.from_array(x, chunks=200), y)):
        assert_same(Search(BASE, iter(grid), cv=2).fit(*given).best_estimator_, expected)


def test_candidates_without_a_seed_use_the_seed_of_the_search(digits: Arrays, held_out: Arrays) -> None:
    grid = [{"init": "random", "random_state": 4}, {"init": "random"}]
    base = clone(BASE).set_params(random_state=None)
    search = Search(base, grid, random_state=9).fit(*digits, validation=held_out)
    assert search.seed_ == 9
    for own in ({"random_state": 4}, {"random_state": 9}):
        alone = clone(base).set_params(init="random", **own).fit(*digits, validation=held_out)
        if own["random_state"] == search.best_estimator_.seed_:
            assert_same(search.best_estimator_, alone)
    drawn = Search(base, grid[1:], cv=2).fit(*digits)
    again = clone(base).set_params(init="random", random_state=drawn.seed_).fit(*digits)
    assert_same(drawn.best_estimator_, again)


def test_a_search_is_cloned_and_names_its_parameters() -> None:
    search = Search(BASE, {"capsule_dim": [1]}, cv=3)
    twin = clone(search)
    assert twin.estimator is not search.estimator
    assert twin.get_params()["estimator__max_iter"] == 12
    assert sl.Search is Search
    from sklearn.base import is_classifier
    from sklearn.exceptions import NotFittedError

    assert is_classifier(search)
    with pytest.raises(NotFittedError):
        search.predict(np.zeros((2, 2)))


def test_a_search_accepts_sparse_rows(digits: Arrays, models_by_key: Any) -> None:
    import scipy.sparse

    x, y = digits
    rows = scipy.sparse.csr_array(x)
    Search(BASE, CANDIDATES[:3], cv=2, refit=False, n_jobs=1).fit(rows, y, engine=SMALL)
    sparse = dict(models_by_key)
    Search(BASE, CANDIDATES[:3], cv=2, refit=False, n_jobs=1).fit(x, y, engine=SMALL)
    for key, model in models_by_key.items():
        assert_same(sparse[key], model)
