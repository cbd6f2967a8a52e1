"""One-layer networks learn features, have the same bits with any number of threads, and refuse bad input."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from sklearn.utils.estimator_checks import check_estimator

import scalelatent as sl
from scalelatent.contract.kinds import find_kind, import_object
from scalelatent.errors import DataError, JobError, PlanError, RunError
from scalelatent.estimators.base import StreamedEstimator
from scalelatent.generators.images import image_set
from scalelatent.models.hcn import fit as fitting
from scalelatent.models.hcn import single_layer
from scalelatent.models.hcn.estimator import HierarchicalCompositionalNetwork
from scalelatent.models.hcn.model.stored_messages import BatchFeatureLearner
from tests.models.hcn.cases import compute_overlap

pytestmark = pytest.mark.filterwarnings("ignore:messages of")


SMALL = {"layers": [(3, (3, 2))], "p01": 1e-2, "p10": 1e-2, "p_sparsity": 1e-3, "random_state": 3}
X = (np.random.default_rng(0).random((60, 7, 6)) < 0.3).astype(np.uint8)
LETTERS = {"layers": [(6, (8, 6))], "p01": 1e-4, "p10": 1e-4, "p_weight": 0.4, "p_sparsity": 1e-6}


def make_network(**params: Any) -> HierarchicalCompositionalNetwork:
    return HierarchicalCompositionalNetwork(**SMALL | {"n_epochs": 2} | params)


def assert_same(a: Any, b: Any) -> None:
    assert_array_equal(a.beliefs_[0], b.beliefs_[0])
    assert_array_equal(a.used_[0], b.used_[0])
    assert a.compression_ == b.compression_ or np.isnan([a.compression_, b.compression_]).all()


class StopAfter(sl.Callback):
    def __init__(self, number: int, stage: str = "hcn_learn") -> None:
        self.number, self.stage, self.now = number, stage, ""

    def on_stage(self, info: dict[str, Any]) -> None:
        self.now = info["stage"]

    def on_pass_end(self, record: dict[str, Any]) -> None:
        if self.now == self.stage and record["pass"] == self.number:
            raise KeyboardInterrupt


def test_letters_are_found_and_explain_the_images() -> None:
    letters = image_set("letters", alphabet="AKSTX", noise=0.03, seed=1)
    x = letters.rows(0, 1000)[0]
    m = HierarchicalCompositionalNetwork(**LETTERS, random_state=1).fit(x)
    features = m.weights_[0][:, 0]
    assert features.shape == (6, 8, 6)
    assert features.dtype == bool
    assert min(compute_overlap(features, truth.astype(bool)) for truth in letters.features) >= 0.9
    assert m.compression_ < 0.8
    assert m.n_iter_ == len(m.history_) == 3
    assert m.used_[0].sum() >= 5
    some = x[:20]
    s = m.transform(some)
    assert s.shape == (20, 17, 19, 6)
    assert s.dtype == np.uint8
    assert abs(m.score(x[:200]) - (1 - m.compression_)) < 0.05
    made = m.reconstruct(some)
    assert made.shape == (20, 1, 24, 24)
    assert (made[:, 0] != some).mean() < 0.06
    known = np.ones(some.shape, bool)
    known[:, 12:, :] = False
    filled = m.inpaint(some, known)[:, 0]
    assert_array_equal(filled[:, :12], some[:, :12])
    inferred = m.infer(some)
    assert inferred.places.shape == s.shape
    assert inferred.converged.shape == (20,)
    drawn = m.sample(3, random_state=0)
    assert_array_equal(drawn, m.sample(3, random_state=0))
    assert drawn.shape == (3, 1, 24, 24)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"n_chains": 2, "chain_batches": 3, "warmup_rows": 20},
        {"n_restarts": 2, "n_epochs": 1},
        {"online": False, "n_epochs": 6, "damping": 0.8},
    ],
    ids=["online", "chains", "restarts", "messages"],
)
def test_threads_and_stored_rows_give_the_same_bits(params: dict[str, Any], tmp_path: Any) -> None:
    one = make_network(n_jobs=1, **params).fit(X)
    assert_same(one, make_network(n_jobs=2, **params).fit(X))
    stored = sl.Dataset.from_arrays(X).save(tmp_path / "x.zarr")
    assert_same(one, make_network(n_jobs=2, **params).fit(stored))
    out = one.transform(stored, out=tmp_path / "s.zarr")
    assert_array_equal(out.read_x(0, 60).reshape(60, 5, 5, 3), one.transform(X))


def test_leaves_may_have_several_images() -> None:
    options: dict[str, Any] = {"online": False, "n_epochs": 5, "damping": 0.5}
    leaves = {"leaf_rows": 20}
    m = make_network(n_jobs=1, n_chains=3, **options).fit(X, engine=leaves)
    assert_same(m, make_network(n_jobs=2, n_chains=3, **options).fit(X, engine=leaves))
    assert m.n_iter_ == 5
    # By default, all images are in one leaf (a fixed range of images), whose sweeps are done in one pass.
    assert make_network(**options).fit(X).n_iter_ == 1
    with pytest.raises(DataError, match="ranges of fewer than 5 images"):
        make_network(**options).fit(X, engine={"leaf_rows": 4})


def test_partial_fit_of_pieces_equals_a_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    order = fitting.make_fit_order
    monkeypatch.setattr(fitting, "make_fit_order", lambda *a, **k: replace(order(*a, **k), shuffle=False))
    whole = make_network(n_epochs=1).fit(X)
    m = make_network()
    for first in range(0, 60, 20):
        m.partial_fit(X[first : first + 20])
        m.save(tmp_path / f"{first}.zarr")
        m = sl.load_model(tmp_path / f"{first}.zarr")
    assert_array_equal(m.beliefs_[0], whole.beliefs_[0])


@pytest.mark.parametrize("online", [True, False])
def test_a_saved_network_decodes_the_same(online: bool, tmp_path: Any) -> None:
    m = make_network(online=online).fit(X)
    m.save(tmp_path / "m.zarr")
    again = sl.load_model(tmp_path / "m.zarr")
    assert_same(m, again)
    assert_array_equal(m.transform(X), again.transform(X))
    assert m.score(X) == again.score(X) == pytest.approx(1 - m.compression_)


@pytest.mark.parametrize(
    "params",
    [{"warmup_rows": 20, "n_chains": 2}, {"online": False, "n_chains": 3, "damping": 0.5}],
    ids=["online", "messages"],
)
def test_an_interrupted_fit_resumes(params: dict[str, Any], tmp_path: Any) -> None:
    options: dict[str, Any] = {"engine": {} if "damping" not in params else {"leaf_rows": 20}}
    whole = make_network(**params | {"n_epochs": 4}).fit(X, **options)
    m = make_network(**params | {"n_epochs": 4})
    with pytest.raises(KeyboardInterrupt):
        m.fit(X, run_dir=tmp_path / "run", callbacks=StopAfter(2), **options)
    with pytest.raises(RunError):
        make_network(**params | {"n_epochs": 4, "p01": 0.1}).fit(
            X, run_dir=tmp_path / "run", resume=True, **options
        )
    assert_same(whole, m.fit(X, run_dir=tmp_path / "run", resume=True, **options))


def test_a_fit_resumes_in_the_middle_of_an_epoch(tmp_path: Any) -> None:
    class Stop(sl.Callback):
        def on_report(self, record: dict[str, Any]) -> None:
            if record["steps"] == 17:
                raise KeyboardInterrupt

    m, options = make_network(), {"run_dir": tmp_path / "run", "engine": {"report_steps": 5}}
    with pytest.raises(KeyboardInterrupt):
        m.fit(X, callbacks=Stop(), **options)
    events: list[dict[str, Any]] = []

    class EventLog(sl.Callback):
        def on_event(self, event: dict[str, Any]) -> None:
            events.append(event)

    assert_same(make_network().fit(X), m.fit(X, resume=True, callbacks=EventLog(), **options))
    assert [event["step"] for event in events if event["event"] == "resumed"] == [5]


def test_one_leaf_is_written_at_intervals_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"online": False, "n_epochs": 8, "damping": 0.5}
    once = make_network(**options).fit(X)
    assert once.n_iter_ == 1
    monkeypatch.setattr(fitting, "WRITE_SECONDS", 0)
    each = make_network(**options).fit(X)
    assert each.n_iter_ == 8
    assert_same(once, each)


def test_a_batch_fit_resumes_in_the_middle_of_a_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    options: dict[str, Any] = {"engine": {"leaf_rows": 20}, "run_dir": tmp_path / "run"}
    params = {"online": False, "n_epochs": 4, "damping": 0.5, "n_jobs": 1}
    visit, visits = BatchFeatureLearner.visit, []

    def visit_and_stop(*args: Any) -> Any:
        visits.append(visit(*args))
        if len(visits) == 5:
            raise KeyboardInterrupt
        return visits[-1]

    monkeypatch.setattr(BatchFeatureLearner, "visit", visit_and_stop)
    with pytest.raises(KeyboardInterrupt):
        make_network(**params).fit(X, **options)
    resumed = make_network(**params).fit(X, resume=True, **options)
    assert 12 <= len(visits) <= 14
    assert_same(make_network(**params).fit(X, engine={"leaf_rows": 20}), resumed)


def test_features_that_do_not_pay_together_are_removed() -> None:
    """All features together cost more bits than they save, so all are removed: the compression is 1."""
    rng = np.random.default_rng(3)
    parts, kind = rng.uniform(0, 1, (3, 12)), np.arange(200) % 3
    x = (parts[kind] + rng.normal(0, 0.2, (200, 12)) > 0.5).astype(np.uint8)
    m = make_network(
        layers=[(3, (1, 8))], p01=0.1, p10=0.1, p_weight=0.4, p_sparsity=0.3, online=False, n_epochs=6
    )
    m.set_params(random_state=0).fit(x, engine={"leaf_rows": 50})
    assert m.weights_[0].any()
    assert not m.used_[0].any()
    assert m.compression_ == 1


def test_validation_images_stop_the_fit() -> None:
    m = make_network(n_epochs=30, patience=1).fit(X[:40], validation=X[40:])
    assert m.n_iter_ < 30
    assert m.history_[-1]["compression"] is not None


def test_unknown_pixels_and_thresholds_are_used() -> None:
    grey = np.where(X == 1, 200.0, 30.0)
    assert_same(make_network(threshold=100).fit(grey), make_network().fit(X))
    holes = X.copy()
    holes[:, 3, 2] = 7
    m = make_network(missing=7).fit(holes)
    filled = m.inpaint(holes)[:, 0]
    assert_array_equal(np.delete(filled.reshape(60, 42), 20, 1), np.delete(X.reshape(60, 42), 20, 1))
    assert_same(m, make_network(missing=7, image_shape=(7, 6)).fit(holes.reshape(60, -1)))


def test_a_warm_start_continues_from_the_last_beliefs() -> None:
    m = make_network(warm_start=True).fit(X)
    before = m.beliefs_[0]
    assert (m.fit(X).beliefs_[0] != before).any()
    with pytest.raises(ValueError, match="the last fit was of 3 features"):
        m.set_params(layers=[(4, (3, 2))]).fit(X)


def test_a_plan_estimates_bytes_per_image() -> None:
    online, kept = make_network().plan(X), make_network(online=False).plan(X)
    assert online["bytes_per_image"] == 4 * 5 * 5 * 3
    assert kept["bytes_per_image"] > online["bytes_per_image"]
    assert kept["disk_bytes"] > 60 * kept["bytes_per_image"]
    large = make_network(online=False, layers=[(32, (8, 6))])
    images = np.zeros((60, 96, 96), np.uint8)
    assert large.plan(images, memory_limit="16GB")["stages"]["learn"]["steps_per_pass"] > 1
    with pytest.raises(PlanError, match=r"leaf_rows to 15, or online=True"):
        large.plan(images, memory_limit="4GB", engine={"leaf_rows": 60})


@pytest.mark.parametrize("n_rows", [1, 4, 5, 61, 64, 10_007])
def test_every_leaf_has_enough_rows(n_rows: int) -> None:
    m = make_network(online=False, layers=[(32, (8, 6))])
    image_bytes = single_layer.SingleLayer(fitting.make_feature_layers(m, (1, 96, 96))[0]).image_bytes
    order = fitting.make_leaf_order(m, image_bytes, n_rows, {})
    smallest = order.step_rows(order.n_steps - 1) // order.n_chains
    assert smallest >= min(5, n_rows)


REFUSED = [
    ({"layers": [(3, (3, 2)), (3, (2, 2))]}, "several layers need a class layer on top: set templates"),
    ({"layers": [3, (3, 2)]}, "give a list of"),
    ({"p01": 0.5}, r"\(0, 0.5\)"),
    ({"p_weight": 0}, r"\(0, 1\)"),
    ({"p_sparsity": 1.0}, r"\(0, 1\)"),
    ({"forgetting": 0}, r"\(0, 1\]"),
    ({"damping": 0.5}, "online learning stores no messages"),
    ({"online": False, "warmup_rows": 5}, "belongs to online=True"),
    ({"patience": 2}, "no validation rows"),
    ({"batch_size": 61}, "larger than the data"),
    ({"n_chains": 4, "chain_batches": 4, "batch_size": 5}, "larger than the data"),
    ({"warmup_rows": 61, "n_chains": 2}, "there are 60 images"),
    ({"layers": [(3, (8, 2))]}, "larger than images of 7 x 6"),
    ({"image_shape": (6, 7)}, "images of this shape"),
]


@pytest.mark.parametrize(("params", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_inconsistent_parameters_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, DataError), match=message):
        make_network(**params).fit(X)


def test_invalid_images_are_refused() -> None:
    import scipy.sparse

    odd = X.copy()
    odd[7, 1, 2] = 5
    rows = X.reshape(60, -1)
    for bad, message in (
        (odd, "row 7, pixel 8 is 5"),
        (np.zeros_like(X), "all pixels are 0"),
        (np.ones_like(X), "all pixels are 1"),
        (np.where(X == 1, np.nan, 0.0), "NaN"),
        (scipy.sparse.csr_array(rows), "CSR"),
        (sl.Dataset.from_arrays(rows, sample_weight=np.full(60, 2.0)), "weighted"),
        (rows, "set image_shape"),
    ):
        with pytest.raises(DataError, match=message):
            make_network().fit(bad)
    m = make_network().fit(X)
    for call, message in (
        (lambda: m.transform(X.transpose(0, 2, 1)), "was fitted on"),
        (lambda: m.transform(X[:, 1:]), "was fitted on"),
        (lambda: m.transform(odd), "row 7"),
        (lambda: m.inpaint(X), "no pixels are marked as unknown"),
        (lambda: m.inpaint(X, np.ones((60, 7), bool)), "give a bool for each pixel"),
    ):
        with pytest.raises(DataError, match=message):
            call()
    with pytest.raises(ValueError, match="set online=True"):
        make_network(online=False).partial_fit(X)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"p_weight": 1e-9}, "off after epoch 1: raise p_weight"),
        ({"p_weight": 1 - 1e-9}, "on after epoch 1: lower"),
    ],
)
def test_uniform_weights_give_one_warning(params: dict[str, Any], message: str) -> None:
    with pytest.warns(UserWarning, match=message) as caught:
        make_network(p_sparsity=1e-9, **params).fit(X)
    assert sum("all weights" in str(one.message) for one in caught) == 1


def test_messages_that_do_not_converge_give_a_warning() -> None:
    with pytest.warns(UserWarning, match="messages of 97% of the pixels still changed in the last sweep"):
        m = make_network(online=False, n_epochs=1).fit(X)
    found = single_layer.SingleLayerFit(m._stream, [], m.used_[0], 0.9, rows=30, at_rest=0)
    with pytest.warns(UserWarning, match="none of 30 images converged in 10 sweeps"):
        single_layer.warn_unsettled(found, m._network.layer, 60)


def test_ignored_labels_give_a_warning() -> None:
    labels = np.arange(60) % 2
    for given in ((X, labels), (sl.Dataset.from_arrays(X, labels),)):
        with pytest.warns(UserWarning, match="because there is no class layer"):
            m = make_network().fit(*given)
    with pytest.warns(UserWarning, match="labels y are not learned from"):
        m.partial_fit(X, labels)
    with pytest.raises(DataError, match="has outputs for the rows"):
        make_network().fit(sl.Dataset.from_arrays(X, X.reshape(60, -1)))


def test_learned_attributes_are_read_only() -> None:
    m = make_network(layers=[(4, (3, 2))]).fit(X)
    with pytest.raises(AttributeError, match="cannot be set: fit again"):
        m.weights_ = []
    with pytest.raises(AttributeError, match="fit it first"):
        _ = make_network().beliefs_


def test_the_network_follows_scikit_learns_conventions() -> None:
    m = make_network()
    assert isinstance(m, StreamedEstimator)
    assert m._parameters.defaults() == HierarchicalCompositionalNetwork().get_params()
    assert [entry.name for entry in m._parameters] == list(
        HierarchicalCompositionalNetwork.__init__.__annotations__
    )[:-1]


# Checks of scikit-learn that may fail: their values are near 100, so all pixels are above the threshold 0.5.
ALL_ON = {"check_fit_idempotent", "check_fit_check_is_fitted", "check_n_features_in"}


@pytest.mark.filterwarnings("ignore")
def test_scikit_learns_checks_pass() -> None:
    m = make_network(layers=[(2, (1, 1))], threshold=0.5, batch_size=1, n_epochs=1)
    checks = check_estimator(m, on_fail=None, on_skip=None)
    assert {check["check_name"] for check in checks if check["status"] == "failed"} <= ALL_ON
    assert len(checks) > 40


def test_search_chooses_by_compression() -> None:
    letters = image_set("letters", alphabet="AKS", noise=0.02, seed=1).rows(0, 200)[0]
    m = HierarchicalCompositionalNetwork(**LETTERS | {"layers": [(4, (8, 6))]}, n_epochs=3, random_state=0)
    search = sl.Search(m, {"p_weight": [0.01, 0.4], "p01": [1e-4, 0.45]})
    search.fit(letters[:150], validation=letters[150:])
    assert search.best_params_ == {"p_weight": 0.4, "p01": 1e-4}
    assert search.best_score_ == pytest.approx(search.best_estimator_.score(letters[150:]))
    assert 0.1 < search.best_score_ < 1


def test_a_search_on_one_image_compares_descriptions_of_that_image() -> None:
    """The best candidate gives the shortest description of the single image."""
    image = image_set("letters", alphabet="AKS", noise=0.02, seed=1, size=(48, 48), count=12).rows(0, 1)[0]
    options = {"online": False, "n_epochs": 30, "n_restarts": 2, "damping": 1.0, "random_state": 0}
    grid = {"p01": [1e-3, 0.3], "p10": [1e-3, 0.3]}
    search = sl.Search(HierarchicalCompositionalNetwork([(4, (8, 6))], p_sparsity=1e-4, **options), grid)
    # The candidate with p01 = p10 = 0.3 causes the warning.
    with pytest.warns(UserWarning, match="all weights are off"):
        search.fit(image)
    assert search.best_params_ == {"p01": 1e-3, "p10": 1e-3}
    assert search.best_score_ == pytest.approx(1 - search.best_estimator_.compression_)


def test_runs_are_scored_by_compression() -> None:
    m, seen = make_network().fit(X), []
    scorer = import_object(find_kind("hcn").scorer)()
    ds = sl.Dataset.from_arrays(X)
    found = scorer.measure(m, ds, scorer.defaults(m), lambda done, of: seen.append(done / of))
    assert found == {"compression": pytest.approx(m.compression_)}
    assert seen[-1] == 1
    with pytest.raises(JobError, match="unknown metric 'accuracy'"):
        scorer.measure(m, ds, ["accuracy"], None)
