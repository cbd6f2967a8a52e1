"""A network of several layers learns classes or clusters, accepts missing labels, and refuses bad input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import scalelatent as sl
from scalelatent.contract.kinds import find_kind, import_object
from scalelatent.errors import DataError, RunError
from scalelatent.generators.images import image_set
from scalelatent.models.hcn.estimator import HierarchicalCompositionalNetwork
from scalelatent.models.hcn.model import hierarchy, multi_layer_learning
from scalelatent.models.hcn.model.hierarchy import Hierarchy
from scalelatent.models.hcn.model.multi_layer_learning import BatchNetworkLearner, to_sparse
from scalelatent.models.hcn.model.templates import assign_classes, list_template_classes
from scalelatent.storage.record import read_record

pytestmark = pytest.mark.filterwarnings("ignore:.*weights still changed")

TRAITS = image_set("traits", size=5, gap=1)
X, Y = TRAITS.rows(0, 40)
Y = Y.astype(int)
MODES: dict[str, dict[str, Any]] = {
    "kept": {"n_epochs": 24},
    "online": {"online": True, "n_epochs": 2, "batch_size": 4, "inner_iterations": 3, "n_chains": 2},
}
MODES["from images"] = {**MODES["online"], "p_weight": (0.5, 0.1), "template_passes": 3}
MODES["from images"] |= {"read_noise": (0.1, 1e-4), "pool": 3}
MODES["defaults"] = {"online": None, "n_epochs": 1}


def make_network(**params: Any) -> HierarchicalCompositionalNetwork:
    options: dict[str, Any] = {"layers": [(4, 5)], "templates": 2, "online": False}
    return HierarchicalCompositionalNetwork(**options | {"n_epochs": 4, "random_state": 3} | params)


def assert_same(a: Any, b: Any) -> None:
    for one, other in zip(a.beliefs_, b.beliefs_, strict=True):
        assert_array_equal(one, other)
    assert_array_equal(a.template_classes_, b.template_classes_)


@pytest.fixture(scope="module")
def fitted() -> HierarchicalCompositionalNetwork:
    return make_network(n_epochs=30).fit(X, Y)


def test_a_fit_has_learned_attributes_and_outputs(fitted: Any, tmp_path: Any) -> None:
    m = fitted
    high, wide = X.shape[1] - 4, X.shape[2] - 4
    assert [w.shape for w in m.weights_] == [(4, 1, 5, 5), (4, 4, high, wide)]
    assert [pool.shape for pool in m.pools_] == [(9, *X.shape[1:]), (9, high, wide)]
    assert m.classes_.tolist() == [0, 1]
    assert m.template_classes_.tolist() == [0, 0, 1, 1]
    assert [used.shape for used in m.used_] == [(4,), (4,)]
    assert {record["restart"] for record in m.history_} == {0}
    scores = m.transform(X)
    assert scores.shape == (40, 4)
    of_classes = m.decision_function(X)
    assert_array_equal(of_classes, np.stack([scores[:, :2].max(1), scores[:, 2:].max(1)], axis=1))
    assert_array_equal(m.predict(X), of_classes.argmax(axis=1))
    assert m.score(X, Y) == np.mean(m.predict(X) == Y)
    written = m.predict(sl.Dataset.from_arrays(X, Y).save(tmp_path / "x.zarr"), out=tmp_path / "y.zarr")
    assert_array_equal(written.read_y(0, 40), m.predict(X))
    assert not hasattr(m, "infer")
    made = m.reconstruct(X)
    assert made.shape == (40, 1, *X.shape[1:])


def test_a_saved_network_of_several_layers_predicts_the_same(fitted: Any, tmp_path: Any) -> None:
    names = np.array(["left", "right"])[Y]
    for m in (fitted, make_network().fit(X, names), make_network(templates=3).fit(X)):
        m.save(tmp_path / "m.zarr", overwrite=True)
        again = sl.load_model(tmp_path / "m.zarr")
        assert_same(m, again)
        assert_array_equal(again.classes_, m.classes_)
        assert_array_equal(again.pools_[0], m.pools_[0])
        assert_array_equal(again.predict(X), m.predict(X))
        assert_array_equal(again.sample(3, random_state=1), m.sample(3, random_state=1))


def test_read_noise_changes_templates_and_outputs_but_no_features(tmp_path: Any) -> None:
    """``read_noise``, the noise assumed after features are learned, changes templates but no features."""
    options: dict[str, Any] = MODES["from images"] | {"n_epochs": 1}
    m, other = make_network(**options).fit(X, Y), make_network(**options | {"read_noise": None}).fit(X, Y)
    assert_array_equal(m.beliefs_[0], other.beliefs_[0])
    assert (m.beliefs_[1] != other.beliefs_[1]).any()
    assert (m._network.layer.p01, m._network.layer.p10) == (0.1, 1e-4)
    m.save(tmp_path / "m")
    assert_array_equal(sl.load_model(tmp_path / "m").transform(X), m.transform(X))
    given, drawn = m.transform(X), m.sample(40, random_state=0)
    m.set_params(read_noise=(0.3, 0.2))
    assert (m.transform(X) != given).any()
    assert (m.sample(40, random_state=0) != drawn).any()
    assert_array_equal(m.set_params(read_noise=(0.1, 1e-4)).transform(X), given)
    with pytest.raises(ValueError, match=r"read_noise=0.2: give \(p01, p10\)"):
        m.set_params(read_noise=0.2).predict(X)


def test_validation_error_is_that_of_templates_from_images() -> None:
    options = MODES["from images"] | {"n_epochs": 1, "n_chains": 1}
    m = make_network(**options).fit(X[:32], Y[:32], validation=(X[32:], Y[32:]))
    assert m.history_[-1]["validation_error"] == pytest.approx(1 - m.score(X[32:], Y[32:]))
    with pytest.warns(UserWarning, match=r"templates have no weights.*of templates now 1e-20"):
        make_network(**options | {"p_weight": (0.5, 1e-20)}).fit(X, Y)


def test_read_noise_does_not_affect_the_learning_of_features() -> None:
    options = MODES["from images"] | {"n_epochs": 1, "n_chains": 1, "template_passes": 0}
    m = make_network(**options | {"read_noise": np.array([0.1, 1e-4])}).fit(X, Y)
    other = make_network(**options | {"read_noise": None}).fit(X, Y)
    assert_array_equal(
        m.set_params(read_noise=None).partial_fit(X[:8], Y[:8]).beliefs_[0],
        other.partial_fit(X[:8], Y[:8]).beliefs_[0],
    )


@pytest.mark.parametrize("mode", MODES)
def test_threads_and_resumes_give_the_same_bits(mode: str, tmp_path: Any) -> None:
    options = MODES[mode]
    engine: dict[str, Any] = {"report_steps": 1} | ({"leaf_rows": 8} if mode == "kept" else {})
    fit: dict[str, Any] = {"validation": (X[32:], Y[32:]), "engine": engine}
    if mode == "kept":
        options = options | {"n_epochs": 4, "n_chains": 2}
    whole = make_network(n_jobs=1, **options).fit(X[:32], Y[:32], **fit)
    for n_jobs in (2, 4):
        assert_same(whole, make_network(n_jobs=n_jobs, **options).fit(X[:32], Y[:32], **fit))

    class Stop(sl.Callback):
        def on_report(self, record: dict[str, Any]) -> None:
            raise KeyboardInterrupt

    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        make_network(**options).fit(X[:32], Y[:32], run_dir=run, callbacks=Stop(), **fit)
    with pytest.raises(RunError):
        make_network(**options | {"pool": 1}).fit(X[:32], Y[:32], run_dir=run, resume=True, **fit)
    resumed = make_network(**options).fit(X[:32], Y[:32], run_dir=run, resume=True, **fit)
    assert_same(whole, resumed)
    keys = ("pass", "weights_on", "validation_error")
    histories = [[[record[key] for key in keys] for record in m.history_] for m in (whole, resumed)]
    assert histories[0] == histories[1]


def test_a_fit_resumes_in_the_middle_of_a_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    visit, visits = BatchNetworkLearner.visit, []

    def visit_and_stop(*args: Any) -> Any:
        visits.append(visit(*args))
        if len(visits) == 6:
            raise KeyboardInterrupt
        return visits[-1]

    options: dict[str, Any] = {"engine": {"leaf_rows": 10}}
    monkeypatch.setattr(BatchNetworkLearner, "visit", visit_and_stop)
    with pytest.raises(KeyboardInterrupt):
        make_network(n_jobs=1).fit(X, Y, run_dir=tmp_path / "run", **options)
    resumed = make_network(n_jobs=1).fit(X, Y, run_dir=tmp_path / "run", resume=True, **options)
    assert len(visits) < 6 + 16
    assert_same(resumed, make_network().fit(X, Y, **options))


LABELS = {"all": Y, "some": np.where(np.arange(40) % 4 == 0, -1, Y), "none": None}


def store_dense_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Store messages (log odds) of templates of all classes as dense arrays, as an earlier version did."""
    start = Hierarchy.start
    monkeypatch.setattr(Hierarchy, "start", lambda net, n_rows, own_class_only=False: start(net, n_rows))
    monkeypatch.setattr(multi_layer_learning, "to_sparse", np.copy)


def check_messages_of_all_templates(labels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"n_epochs": 10, "n_chains": 2, "damping": 0.1}
    y, engine = LABELS[labels], {"leaf_rows": 10}
    found = make_network(**options).fit(X, y, engine=engine)
    with monkeypatch.context() as patch:
        store_dense_messages(patch)
        assert_same(found, make_network(**options).fit(X, y, engine=engine))
    assert found.history_[-1]["weights_on"] > 100


@pytest.mark.parametrize("labels", LABELS)
def test_stored_messages_give_the_bits_of_all_messages(labels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_messages_of_all_templates(labels, monkeypatch)


def test_another_order_of_pixel_updates_would_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the order of pixel updates ignored that images are sorted by class, the bits would differ."""
    monkeypatch.setattr(hierarchy, "reorder_images", lambda order, ranks, n_pixels: order)
    with pytest.raises(AssertionError):
        check_messages_of_all_templates("all", monkeypatch)


def test_dropping_small_messages_would_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """If stored messages below 9/256 nat became 0, the weights would differ."""
    monkeypatch.setattr(
        multi_layer_learning, "to_sparse", lambda values: to_sparse(np.where(np.abs(values) < 9, 0, values))
    )
    with pytest.raises(AssertionError):
        check_messages_of_all_templates("none", monkeypatch)


@pytest.mark.parametrize("labels", LABELS)
def test_runs_of_earlier_versions_resume(labels: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """An interrupted run of an earlier version, which stored messages as dense arrays, is resumed."""
    visit, visits = BatchNetworkLearner.visit, 0

    def visit_and_stop(*args: Any) -> Any:
        nonlocal visits
        visits += 1
        if visits == 7:
            raise KeyboardInterrupt
        return visit(*args)

    y, engine = LABELS[labels], {"leaf_rows": 10}
    with monkeypatch.context() as patch:
        store_dense_messages(patch)
        patch.setattr(BatchNetworkLearner, "visit", visit_and_stop)
        with pytest.raises(KeyboardInterrupt):
            make_network(n_jobs=1).fit(X, y, run_dir=tmp_path / "run", engine=engine)
    whole = read_record(tmp_path / "run" / "engine", "leaf-hcn_learn-000001-10.rec")["layers"]["1"]["to_w"]
    assert isinstance(whole, np.ndarray)
    resumed = make_network(n_jobs=1).fit(X, y, run_dir=tmp_path / "run", resume=True, engine=engine)
    assert_same(resumed, make_network().fit(X, y, engine=engine))


@pytest.mark.parametrize("labels", LABELS)
def test_leaves_on_disk_are_planned(labels: str, tmp_path: Any) -> None:
    """The plan gives an upper bound of the bytes of message files, one per leaf (fixed range of images).

    Each pass writes new files. Files that no checkpoint needs are deleted in the next pass.
    """
    sizes: list[list[int]] = []
    run = tmp_path / "run"

    class SizeLog(sl.Callback):
        def on_checkpoint(self, info: dict[str, Any]) -> None:
            sizes.append([file.stat().st_size for file in run.rglob("leaf-*")])

    engine: dict[str, Any] = {"leaf_rows": 10}
    m = make_network(n_epochs=9, n_chains=1)
    forecast = m.plan(X, LABELS[labels], engine=engine)
    m.fit(X, LABELS[labels], run_dir=run, engine=engine, callbacks=SizeLog())
    assert max(map(len, sizes)) == 5 * 4
    assert max(map(sum, sizes)) < forecast["disk_bytes"]
    assert 5 * 40 * forecast["bytes_per_image"] < forecast["disk_bytes"]
    assert max(map(max, sizes)) < 10 * forecast["bytes_per_image"]
    assert " MiB a worker, at most 1" in forecast["summary"]


def test_rows_without_labels_are_learned_without_a_class() -> None:
    whole = make_network().fit(X, Y)
    # The label -1 (missing) is not a class, but rows without labels change the fit.
    some = np.where(np.arange(40) % 4 == 0, -1, Y)
    partly = make_network().fit(X, some)
    assert partly.classes_.tolist() == [0, 1]
    assert any((a != b).any() for a, b in zip(whole.beliefs_, partly.beliefs_, strict=True))
    assert partly.score(X, some) == np.mean((partly.predict(X) == Y)[some >= 0])
    # If only a few rows have labels, templates are learned without labels. Then the labelled rows give the
    # templates their classes.
    few = np.full(40, -1)
    few[:6] = Y[:6]
    m = make_network().fit(X, few)
    assert sorted(m.template_classes_.tolist()) == [0, 0, 1, 1]
    stored = sl.Dataset.from_arrays(X, few)
    assert_same(m, make_network().fit(stored))
    # For models that need all labels, -1 is a class like any other.
    binary = sl.CapsuleRegression(capsule_dim=2, max_iter=2).fit(X.reshape(40, -1), np.where(Y == 0, -1, 1))
    assert binary.classes_.tolist() == [-1, 1]


def test_labelled_rows_of_a_partly_labelled_dataset_are_learned_with_labels() -> None:
    """A slice of labelled rows is learned with labels, even if other rows of the dataset have label -1."""
    stored = sl.Dataset.from_arrays(X, np.where(np.arange(40) < 32, Y, -1))[:32]
    assert -1 in stored.classes
    m = make_network().fit(stored)
    assert_same(m, make_network().fit(X[:32], Y[:32]))
    assert m.classes_.tolist() == [0, 1]


def test_a_class_for_unlabelled_rows_would_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """If -1 (unlabelled) were a class, a fit on labelled rows would fail, because this class has no rows."""
    monkeypatch.setattr("scalelatent.models.hcn.multi_layer.known_classes", lambda ds: ds.classes)
    with pytest.raises(DataError, match="class -1 has no rows"):
        test_labelled_rows_of_a_partly_labelled_dataset_are_learned_with_labels()


def test_templates_without_labels_are_clusters() -> None:
    m = make_network(templates=4).fit(X, validation=(X, Y))
    assert m.classes_.tolist() == [0, 1, 2, 3]
    counts = np.zeros((2, 4))
    np.add.at(counts, (Y, m.predict(X)), 1)
    assert m.score(X, Y) == pytest.approx(counts.max(axis=0).sum() / 40)
    assert m.history_[-1]["validation_error"] == pytest.approx(1 - m.score(X, Y))
    with pytest.raises(DataError, match="no labels to compare with"):
        m.score(X)


def test_templates_have_the_classes_of_their_images() -> None:
    assert list_template_classes(3, 2) == (0, 0, 1, 1, 2, 2)
    assert assign_classes(np.array([[9, 8, 7, 0], [0, 6, 6, 0]]), 2) == (0, 0, 1, 1)
    assert assign_classes(np.zeros((2, 4)), 2) == (0, 0, 1, 1)


def test_classes_do_not_depend_on_the_noise(fitted: Any) -> None:
    from dataclasses import replace

    fixed = fitted._row_map("probabilities").network
    layers = tuple(replace(layer, p01=0.2, p10=0.2) for layer in fixed.net.layers)
    m = HierarchicalCompositionalNetwork(**fitted.get_params())
    network = replace(fitted._network, net=replace(fitted._network.net, layers=layers))
    m._network, m._stream, m.n_features_in_ = network, fitted._stream, fitted.n_features_in_
    scores, others = fitted.decision_function(X), m.decision_function(X)
    sure = np.abs(np.diff(scores, axis=1)[:, 0]) > 20
    assert sure.any()
    assert_array_equal(m.predict(X)[sure], fitted.predict(X)[sure])
    assert (scores != others).any()


def test_hidden_pixels_are_completed_and_images_drawn(fitted: Any) -> None:
    known = np.ones(X.shape, bool)
    known[:, :, 6:] = False
    filled = fitted.inpaint(X, known)[:, 0]
    assert_array_equal(filled[:, :, :6], X[:, :, :6])
    found = fitted.inpaint(X, known, y=Y)
    assert_array_equal(found, fitted.inpaint(X, known, y=Y.tolist()))
    with pytest.raises(DataError, match="not one of the 2 classes"):
        fitted.inpaint(X, known, y=7)
    drawn = fitted.sample(30, y=1, noise=False, random_state=0)
    assert drawn.shape == (30, 1, *X.shape[1:])
    noise = (fitted.sample(30, y=1, random_state=0) != drawn).mean()
    assert 0 < noise < 0.01
    assert_array_equal(drawn, fitted.sample(30, y=np.ones(30, int), noise=False, random_state=0))
    with pytest.raises(DataError, match="give a class for each of the 2 images"):
        fitted.sample(2, y=[1])


@pytest.mark.parametrize("mode", MODES)
def test_weights_that_are_all_off_give_a_warning(mode: str) -> None:
    options = {**MODES[mode], "n_epochs": 1, "p_weight": [1e-9, 1e-20], "n_chains": 1}
    with pytest.warns(
        UserWarning, match=r"all weights are off .*raise p_weight \(now 1e-09, of the first layer\)$"
    ):
        m = make_network(**options).fit(X, Y)
    assert m.history_[-1]["share_on"] == 0


def test_a_stream_and_a_warm_start_continue_a_fit() -> None:
    options = {**MODES["online"], "n_epochs": 1, "n_chains": 1}
    m = make_network(**options).partial_fit(X[:20], Y[:20])
    before = m.beliefs_[0]
    assert (m.partial_fit(X[20:], Y[20:]).beliefs_[0] != before).any()
    warm = make_network(warm_start=True).fit(X, Y)
    before, pools = warm.beliefs_[0], warm.pools_[0]
    warm.set_params(random_state=9).fit(X, Y)
    assert (warm.beliefs_[0] != before).any()
    assert_array_equal(warm.pools_[0], pools)
    for other in ({"templates": 3}, {"layers": [(5, 5)]}, {"templates": None}):
        with pytest.raises(ValueError, match="the last fit was of 4 features of 1 x 5 x 5 under 4 templates"):
            make_network(warm_start=True).fit(X, Y).set_params(**other).fit(X)


def test_a_warm_start_with_other_classes_is_refused() -> None:
    """The message lists the first ten classes, but all classes have to be those of the last fit."""
    y = np.arange(len(X)) % 11
    model = make_network(warm_start=True, templates=1, n_epochs=1).fit(X, y)
    with pytest.raises(ValueError, match=r"of the classes 0, 1, .*, 9, with other classes: set layers"):
        model.fit(X, np.where(y == 10, 11, y))


REFUSED = [
    ({"pool": 4}, "an odd number"),
    ({"templates": 0}, "templates=0: give a whole number of at least 1"),
    ({"p_weight": [0.1]}, "one for each of the 1 layers and one for the templates"),
    ({"layers": [(4, 5), (3, 30)]}, "features of layer 2 of 30 x 30 are larger than the places of layer 1"),
    ({"n_restarts": 2}, "n_restarts=2 is set"),
    ({"inner_iterations": 3}, "belongs to online=True"),
    ({"templates": None, "pool": 5}, "has no pools"),
    ({"templates": None, "template_passes": 1}, "no templates: set templates"),
    ({"read_noise": (0.1, 0.6)}, r"read_noise=.*: give \(p01, p10\)"),
    ({"patience": 2}, "waits for better classes"),
]


@pytest.mark.parametrize(("params", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_inconsistent_parameters_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, DataError), match=message):
        make_network(**params).fit(X, Y)


def test_invalid_labels_are_refused() -> None:
    whole = sl.Dataset.from_arrays(X, np.where(np.arange(40) < 30, Y, 5))
    for given, message in (
        ((X, np.full(40, -1)), "all labels are -1"),
        ((whole[:30],), "class 5 has no rows here"),
        ((X, Y + 0.5), "unknown label type: continuous"),
        ((sl.Dataset.from_arrays(X, X.reshape(40, -1)),), "outputs for the rows"),
    ):
        with pytest.raises(DataError, match=message):
            make_network().fit(*given)
    with pytest.raises(DataError, match="online=True learns templates from labels alone"):
        make_network(online=True).fit(X)
    with pytest.raises(DataError, match="validation has no labels"):
        make_network().fit(X, Y, validation=X)
    with pytest.raises(DataError, match="not one of the 2 classes"):
        make_network().fit(X, Y, validation=(X, Y + 1))


def test_runs_are_scored_by_classes(fitted: Any) -> None:
    scorer, ds = import_object(find_kind("hcn").scorer)(), sl.Dataset.from_arrays(X, Y)
    accuracy = fitted.score(ds)
    found = scorer.measure(fitted, ds, scorer.defaults(fitted), None)
    assert found == {"accuracy": accuracy, "error": pytest.approx(1 - accuracy)}
    assert scorer.test_scores(fitted, sl.Dataset.from_arrays(X), lambda *_: None) == {}


def test_a_network_of_several_layers_is_planned_and_searched() -> None:
    forecast = make_network().plan(X, Y)
    assert set(forecast["stages"]) == {"learn", "templates"}
    assert forecast["disk_bytes"] > 40 * forecast["bytes_per_image"]
    search = sl.Search(make_network(n_epochs=2), {"templates": [1, 2]}).fit(X, Y, validation=(X, Y))
    assert search.best_score_ == search.best_estimator_.score(X, Y)


@pytest.mark.slow
def test_the_two_trait_set_is_learned_with_four_labels() -> None:
    """Four templates (patterns) are learned without labels; then four labelled images name their classes.

    At most 1 of 1,000 images may get a wrong label.
    """
    images, patterns = image_set("traits"), image_set("traits", labels="pattern")
    (x, category), (_, pattern) = images.rows(0, 100), patterns.rows(0, 100)
    first = [int(np.flatnonzero(pattern == kind)[0]) for kind in range(4)]
    labels = np.where(np.isin(np.arange(100), first), category.astype(int), -1)
    m = HierarchicalCompositionalNetwork([(4, 13)], templates=2, online=False, random_state=0).fit(x, labels)
    assert m.score(*images.rows(5000, 6000)) >= 0.999


def test_the_forward_pass_equals_a_convolutional_network(fitted: Any) -> None:
    odds = np.round(256 * np.log([fitted.p01 / (1 - fitted.p10), (1 - fitted.p01) / fitted.p10])) / 256
    below = odds[X.astype(int)][:, None]
    for pool, weights in zip(fitted.pools_, fitted.weights_, strict=True):
        padded = np.pad(below, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=-1e9)
        shifted = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
        shifted = shifted.reshape(*below.shape, 9) + np.moveaxis(pool, 0, -1)
        windows = np.lib.stride_tricks.sliding_window_view(
            shifted.max(axis=-1), weights.shape[2:], axis=(2, 3)
        )
        below = np.einsum("ncyxij,fcij->nfyx", windows, weights.astype(float))
    assert_array_equal(below[:, :, 0, 0], fitted.transform(X))


@pytest.fixture(scope="module")
def grey() -> Any:
    images = image_set("traits", size=5, gap=1, blur=1).rows(0, 40)[0]
    return make_network(filters=8, n_epochs=2).fit(images, Y), images


def test_filters_make_channels_of_grey_images(grey: Any, tmp_path: Any) -> None:
    m, images = grey
    assert m.weights_[0].shape == (4, 8, 5, 5)
    assert m.weights_[1].shape[1] == 4
    assert m.predict(images).shape == (40,)
    assert_array_equal(m.transform(images.reshape(40, -1)), m.transform(images))
    m.save(tmp_path / "m")
    again = sl.load_model(tmp_path / "m")
    assert_array_equal(again.transform(images), m.transform(images))
    with pytest.raises(DataError, match="filters keep only edges"):
        m.inpaint(images, images > 0)
    with pytest.raises(DataError, match=r"images are \(8, 8\), but .* was fitted on"):
        m.predict(np.zeros((1, 8, 8), np.uint8))


def test_the_threshold_of_filters_applies_to_their_steps(grey: Any) -> None:
    m, images = grey
    assert_same(m, make_network(filters=8, n_epochs=2, threshold=64).fit(images, Y))
    less = make_network(filters=8, n_epochs=2, threshold=16).fit(images, Y)
    on = [one._network.layer.compute_evidence(images) > 0 for one in (m, less)]
    assert on[0].sum() < on[1].sum()
    assert not (on[0] & ~on[1]).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"filters": 3}, "give an even number of directions"),
        ({"filters": 8, "filter_size": 2}, "give an odd number: a filter has a middle"),
        ({"filter_size": 5}, "filter_size=5 is set, but filters is None"),
        ({"filters": 8, "threshold": 0}, r"threshold=0: with filters it is .*: give a number in \(0, 255\]"),
        ({"filters": 8, "missing": 9.0}, "missing=9.0 is set, but filters need all grey values"),
        ({"filters": 8, "templates": None}, "filters need templates: set templates"),
        ({"filters": 8}, "rows from 0 on hold only 0 and 1, .* remove filters"),
        ({"filters": 8, "filter_size": 11}, "filters of 11 x 11 need larger grey images"),
    ],
)
def test_inconsistent_parameters_of_filters_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_network(**options).fit(X, Y)
