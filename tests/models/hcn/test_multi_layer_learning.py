"""Networks of two layers find the features and templates of the two-trait images.

Each of these images shows a square or a circle, and one of two diagonals.
"""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from scalelatent.contract.learners import Block
from scalelatent.contract.stats import Stats
from scalelatent.engine.backend import make_backend
from scalelatent.generators.images import image_set
from scalelatent.models.hcn.kernels.units import (
    CLASS_FLOOR,
    OFF_IMAGE,
    POOL_FLOOR,
    UNITS_PER_NAT,
    to_units,
)
from scalelatent.models.hcn.model.hierarchy import Hierarchy, LayerMessages, shift_priors, update_images
from scalelatent.models.hcn.model.layer import FeatureLayer, from_features
from scalelatent.models.hcn.model.multi_layer_learning import (
    BatchNetworkLearner,
    OnlineNetworkLearner,
    pack_messages,
    row_bytes,
    stored_bytes,
    to_dense,
    to_sparse,
    unpack_messages,
)
from scalelatent.models.hcn.model.templates import TemplateCounts
from scalelatent.storage.record import dumps, loads

CATEGORY = (0, 1, 1, 0)  # Class of each of the four patterns (a shape with a diagonal).


def make_two_layers(size: int = 7, gap: int = 1, **options: Any) -> tuple[Hierarchy, Any]:
    """Return a network of two layers for the two-trait images, and these images."""
    images = image_set("traits", size=size, gap=gap, labels="pattern")
    height, width = images.image_shape
    below = FeatureLayer((1, height, width), 4, (size, size), 1e-3, 1e-3, 0.25, 0.5)
    high, wide, parts = below.places
    above = FeatureLayer((parts, high, wide), 4, (high, wide), 1e-3, 1e-3, 1e-20, 0.5)
    return Hierarchy((below, above), **options), images


def make_true_weights(net: Hierarchy, images: Any) -> np.ndarray:
    """Return log odds of weights, positive for the weights that generate the two-trait images."""
    size = images.features.shape[1]
    left = size + images.parameters["gap"] + 1
    above = np.zeros((4, *net.layers[1].image), bool)
    for template, places in enumerate(above):
        places[template >> 1, 2, 2] = places[2 + (template & 1), 2, left + 1] = True
    parts = from_features(images.features[:, None].astype(bool)), from_features(above)
    return np.concatenate([np.where(w, 1.0, -1.0).ravel() for w in parts])


def make_block(images: Any, start: int, stop: int, known: bool = True) -> Block:
    x, y = images.rows(start, stop)
    y = np.where(known, y.astype(np.int32), -1)
    return Block(x.reshape(len(x), -1), y, None, start)


def learn_batch(learner: BatchNetworkLearner, block: Block, visits: int) -> Any:
    backend, state, kept = make_backend("cpu"), learner.start(), None
    for _ in range(visits):
        new = learner.visit((state, backend), block, kept)
        stats = Stats.zeros(learner.layout())
        learner.replace_contribution(None, kept, new, stats)
        state, kept = learner.end_epoch(learner.step(state, stats, len(block.x))), new
    return state


def measure_error(learner: OnlineNetworkLearner, state: Any, images: Any) -> float:
    found, backend = learner.validation(), make_backend("cpu")
    stats = Stats.zeros(found.layout())
    found.accumulate(found.prepare(state, backend), make_block(images, 5000, 6000), stats)
    return learner.validated(state, stats).error


def test_true_weights_classify_their_images() -> None:
    net, images = make_two_layers(13, 2, classes=(0, 1, 2, 3))
    learner = BatchNetworkLearner(net, n_classes=4)
    state = learner.start()
    state = type(state)(make_true_weights(net, images), state.first)
    assert measure_error(learner, state, images) < 0.005
    # Images are classified also if the network assumes more noise than the images have.
    other = [replace(layer, p01=0.2, p10=0.05) for layer in net.layers]
    found = TemplateCounts(Hierarchy(tuple(other), (0, 1, 2, 3)), 4)
    stats, backend = Stats.zeros(found.layout()), make_backend("cpu")
    found.accumulate(found.prepare(state, backend), make_block(images, 5000, 6000), stats)
    assert stats["templates"].trace() > 995


@pytest.mark.slow
@pytest.mark.parametrize("labelled", [True, False])
def test_learned_features_and_templates_classify_images(labelled: bool) -> None:
    classes = (0, 1, 2, 3) if labelled else None
    net, images = make_two_layers(13, 2, classes=classes, seed=0)
    learner = BatchNetworkLearner(net, n_rows=100, single_leaf_passes=25, n_classes=4)
    state = learn_batch(learner, make_block(images, 0, 100), 4 if labelled else 16)
    assert measure_error(learner, state, images) <= 0.006


def test_hidden_parts_are_completed_in_place() -> None:
    """The lower part of an image is hidden. At least 95 % of completed pixels touch or are a true pixel."""
    net, images = make_two_layers(13, 2, classes=CATEGORY)
    weights = [w > 0 for w in net.split(make_true_weights(net, images))]
    x, _ = images.rows(0, 40)
    clean = images.clean(0, 40).reshape(40, *net.layers[0].image)
    known = np.ones(clean.shape, bool)
    known[..., 8:, :] = False
    pixels = np.where(known, net.layers[0].compute_evidence(x.reshape(40, -1)), 0)
    beliefs = net.complete(weights, pixels, None, make_backend("cpu"))
    filled = (beliefs > 0) & ~known
    near = np.zeros_like(clean, bool)
    padded = np.pad(clean, ((0, 0), (0, 0), (1, 1), (1, 1))).astype(bool)
    for dy in range(3):
        for dx in range(3):
            near |= padded[:, :, dy : dy + clean.shape[2], dx : dx + clean.shape[3]]
    assert filled.sum() > 0.7 * (clean.astype(bool) & ~known).sum()
    assert (filled & near).sum() >= 0.95 * filled.sum()
    # The image can also be completed as a pattern of the other category.
    scores = net.template_scores(weights, pixels, make_backend("cpu"))
    found = np.array(CATEGORY)[scores.argmax(axis=1)]
    other = net.complete(weights, pixels, 1 - found, make_backend("cpu"))
    assert ((other > 0) != (beliefs > 0))[~known].any()


def test_drawn_images_show_templates_equally_often() -> None:
    """Drawn images show each template (pattern) equally often, and the network classifies the images."""
    net, images = make_two_layers(13, 2, classes=CATEGORY)
    weights = [w > 0 for w in net.split(make_true_weights(net, images))]
    labels = np.arange(300) % 2
    drawn = net.draw(weights, 300, labels, 5)
    pixels = net.layers[0].compute_evidence(drawn.reshape(300, -1))
    found = net.template_scores(weights, pixels, make_backend("cpu"))
    assert (np.array(CATEGORY)[found.argmax(axis=1)] == labels).mean() > 0.99
    np.testing.assert_allclose(np.bincount(found.argmax(axis=1)) / 300, 0.25, atol=0.08)
    np.testing.assert_array_equal(net.draw(weights, 2, None, 5)[1], net.draw(weights, 2, None, 5)[1])


@pytest.mark.parametrize("labelled", [True, False])
def test_templates_without_a_weight_are_not_drawn(labelled: bool) -> None:
    net, images = make_two_layers(13, 2, classes=CATEGORY)
    weights = [w > 0 for w in net.split(make_true_weights(net, images))]
    codes = np.array(CATEGORY)
    whole = net.draw(weights, 40, codes[np.arange(40) % 4], 5)
    assert whole.any(axis=(1, 2, 3)).all()
    weights[-1][..., np.flatnonzero(codes == 1)[0]] = False
    labels = np.ones(40, int) if labelled else None
    assert net.draw(weights, 40, labels, 5).any(axis=(1, 2, 3)).all()
    weights[-1][..., codes == 1] = False  # No template of class 1 has a weight.
    assert net.draw(weights, 40, labels, 5).any(axis=(1, 2, 3)).all() == (not labelled)
    weights[-1][...] = False
    assert not net.draw(weights, 4, None, 5).any()


def test_passes_of_several_calls_equal_those_of_one_call() -> None:
    """Six passes over a leaf (a fixed range of images) in one call of ``visit`` equal six calls of one pass.

    Messages are stored between calls, and a call does not change the stored messages that it receives.
    """
    net, images = make_two_layers(classes=(0, 1, 2, 3))
    block = make_block(images, 0, 12)
    several = learn_batch(BatchNetworkLearner(net, n_rows=12, single_leaf_passes=1), block, 6)
    at_once = learn_batch(BatchNetworkLearner(net, n_rows=12, single_leaf_passes=6), block, 1)
    np.testing.assert_array_equal(several.beliefs, at_once.beliefs)
    learner, backend = BatchNetworkLearner(net, n_rows=12), make_backend("cpu")
    state = learner.start()
    kept = learner.visit((state, backend), block, None)
    before = dumps(kept)
    learner.visit((state, backend), block, kept)
    assert dumps(kept) == before


@pytest.mark.parametrize("known", [True, False])
def test_stored_bytes_are_bounded(known: bool) -> None:
    """Messages (log odds) take the planned bytes in memory, and fewer on disk if many messages are 0."""
    net, images = make_two_layers(classes=(0, 1, 2, 3))
    learner = BatchNetworkLearner(net, n_rows=12, single_leaf_passes=6)
    block = make_block(images, 0, 12, known)
    kept = learner.visit((learner.start(), make_backend("cpu")), block, None)
    messages = unpack_messages(kept)
    assert messages[-1].s.shape[-1] == (1 if known else 4)
    parts = [part for m in messages for part in vars(m).values()]
    assert sum(part.nbytes for part in parts) == 12 * row_bytes(net, known)
    assert count_bytes(kept) < 0.8 * 12 * row_bytes(net, known)
    full = [replace(m, **{k: np.full_like(v, 7) for k, v in vars(m).items()}) for m in messages]
    of_full = {"layers": {str(level): pack_messages(m) for level, m in enumerate(full)}}
    assert 12 * row_bytes(net, known) < count_bytes(of_full) <= 12 * stored_bytes(net, known) + 1000


@pytest.mark.parametrize("full", [True, False])
def test_a_visit_stays_within_its_requested_memory(full: bool) -> None:
    """The upper bound of memory includes reading and writing the stored messages, even if no message is 0."""
    net, images = make_two_layers(classes=(0, 1, 2, 3))
    learner = BatchNetworkLearner(net, n_rows=60, single_leaf_passes=2, all_labelled=True)
    block, prepared = make_block(images, 0, 60), (learner.start(), make_backend("cpu"))
    kept = learner.visit(prepared, block, None)
    if full:
        parts = [{k: np.full_like(v, 7) for k, v in vars(m).items()} for m in unpack_messages(kept)]
        kept["layers"] = {str(k): pack_messages(LayerMessages(**part)) for k, part in enumerate(parts)}
    data = dumps(kept)
    del kept
    tracemalloc.start()
    try:
        kept = loads(data)
        dumps(learner.visit(prepared, block, kept))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    fixed, each = learner.requirements.scratch or (0, 0)
    assert count_bytes(kept) + 60 * row_bytes(net, True) < peak < fixed + 60 * each


def count_bytes(kept: Any) -> int:
    """Return the bytes of all arrays in nested dicts."""
    return sum(map(count_bytes, kept.values())) if isinstance(kept, dict) else getattr(kept, "nbytes", 0)


ARRAYS = [
    np.zeros((3, 0, 2), np.int32),
    np.zeros((2, 3, 5), np.int32),
    np.array([[-(2**31), 0, 1], [2**31 - 1, -1, 0], [0, 40_000, -40_000]], np.int32),
    np.random.default_rng(0).integers(-2, 3, (3, 2, 37)).astype(np.int32),
    np.arange(300).astype(np.uint8).reshape(4, 3, 25),
    np.full((1, 9), 3, np.int32)[:, ::2],
]


@pytest.mark.parametrize("values", ARRAYS, ids=[str(values.shape) for values in ARRAYS])
def test_sparse_arrays_restore_the_dense_ones(values: np.ndarray) -> None:
    for found in (to_dense(to_sparse(values)), to_dense(loads(dumps(to_sparse(values)))), to_dense(values)):
        np.testing.assert_array_equal(found, values)
        assert found.dtype == values.dtype
        assert found.flags.c_contiguous
        assert found.flags.writeable
        assert not np.shares_memory(found, values)


MUTANTS: dict[str, Any] = {
    "a sign is lost": lambda values: {"values": np.abs(values[values != 0])},
    "16 bits": lambda values: {"values": values[values != 0].astype(np.int16)},
    "bits from the other end": lambda values: {"there": np.packbits(values != 0, bitorder="little")},
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_wrong_sparse_arrays_would_fail(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sparse arrays that lose signs, large values or the order of bits do not restore the dense arrays."""
    whole = to_sparse
    monkeypatch.setattr(
        "tests.models.hcn.test_multi_layer_learning.to_sparse",
        lambda values: whole(values) | MUTANTS[mutant](values),
    )
    with pytest.raises((AssertionError, ValueError)):
        for values in ARRAYS:
            test_sparse_arrays_restore_the_dense_ones(values)


def test_beliefs_equal_priors_plus_messages() -> None:
    """In sum over all weights W, the change of log odds equals the messages (log odds from pixels) to W.

    In sum over all positions S of features, log odds are messages from pixels and from the upper layer.
    """
    net, images = make_two_layers()
    learner, block = BatchNetworkLearner(net, n_rows=8, single_leaf_passes=5), make_block(images, 0, 8)
    state = learner.start()
    new = learner.visit((state, make_backend("cpu")), block, None)
    changes, messages = net.split(to_dense(new["change"])), unpack_messages(new)
    for level, (layer, change) in enumerate(zip(net.layers, changes, strict=True)):
        kept = messages[level]
        assert change.sum(dtype=np.int64) == kept.to_w.sum(dtype=np.int64)
        of_trees = (kept.s - kept.above).sum(dtype=np.int64)
        assert of_trees == kept.to_s.sum(dtype=np.int64), layer


def test_changing_weights_in_the_backward_pass_would_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """If messages to the lower layer changed weights too, the log odds would not be sums of messages."""
    pass_down = Hierarchy.pass_down

    def mutant(net: Hierarchy, kept: Any, weights: list[np.ndarray], *others: Any) -> None:
        weights[0] += 1
        pass_down(net, kept, weights, *others)

    monkeypatch.setattr(Hierarchy, "pass_down", mutant)
    with pytest.raises(AssertionError):
        test_beliefs_equal_priors_plus_messages()


def test_without_labels_a_network_with_classes_learns_like_one_without_classes() -> None:
    net, images = make_two_layers(classes=(0, 1, 2, 3))
    learner = BatchNetworkLearner(net, n_rows=12, single_leaf_passes=3)
    labelled = learn_batch(learner, make_block(images, 0, 12), 1)
    unlabelled = learn_batch(learner, make_block(images, 0, 12, known=False), 1)
    clusters = learn_batch(
        BatchNetworkLearner(Hierarchy(net.layers), n_rows=12, single_leaf_passes=3),
        make_block(images, 0, 12),
        1,
    )
    np.testing.assert_array_equal(unlabelled.beliefs, clusters.beliefs)
    assert (labelled.beliefs != unlabelled.beliefs).any()


def test_class_messages_are_minus_the_best_other_score() -> None:
    net, _ = make_two_layers(classes=(0, 0, 1, 1))
    scores = np.array([[5, 3, 9, 9], [1, 2, 3, 4]], np.int32)
    np.testing.assert_array_equal(net.class_messages(scores, None), [[-9, -9, -9, -9], [-4, -4, -4, -3]])
    found = net.class_messages(scores, np.array([0, -1]))
    np.testing.assert_array_equal(found, [[-3, -5, -CLASS_FLOOR, -CLASS_FLOOR], [-4, -4, -4, -3]])


def test_wrong_class_messages_would_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class message is wrong if its maximum over all templates includes the template's own score."""

    def mutant(net: Hierarchy, scores: np.ndarray, labels: Any) -> np.ndarray:
        return -np.broadcast_to(scores.max(axis=1, keepdims=True), scores.shape)

    monkeypatch.setattr(Hierarchy, "class_messages", mutant)
    with pytest.raises(AssertionError):
        test_class_messages_are_minus_the_best_other_score()


def test_priors_of_shifts_sum_to_one_and_peak_at_the_centre() -> None:
    for side, image in ((3, (1, 5)), (5, (6, 4)), (1, (2, 2))):
        prior = shift_priors(image, side, 0.9, 3)
        there = prior != OFF_IMAGE
        chance = np.where(there, np.exp(prior / UNITS_PER_NAT), 0)
        np.testing.assert_allclose(chance.sum(axis=0), 1, atol=0.02)
        assert there[side * side // 2].all()
        assert (chance.argmax(axis=0) == side * side // 2).all()


def test_online_learning_counts_minibatches_and_weights() -> None:
    net, images = make_two_layers(classes=(0, 1, 2, 3))
    learner, backend = OnlineNetworkLearner(net, 0.9, batch_rows=4, inner_iterations=3), make_backend("cpu")
    state, stats = learner.start(), Stats.zeros(OnlineNetworkLearner(net).layout())
    learner.run_chain((state, backend), make_block(images, 0, 10), stats)
    assert stats["minibatches"] == 3
    after = learner.step(state, stats, 10)
    assert (after.beliefs != state.beliefs).any()
    assert learner.summary(after)["weights_on"] == (after.beliefs > 0).sum()


def keep_order(seed: int, purpose: str, epoch: int, rows: np.ndarray, n: int) -> np.ndarray:
    return np.arange(n, dtype=np.int32)[None]


def test_templates_of_other_classes_need_no_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """For labelled images, the messages of templates (patterns) of other classes need not be stored."""
    net, images = make_two_layers(classes=(0, 1, 1, 0))
    x, y = images.rows(0, 10)
    y = np.array(net.classes)[y]
    by_class = np.argsort(y, kind="stable")
    pixels, labels = net.layers[0].compute_evidence(x[by_class]), y[by_class]
    monkeypatch.setattr("scalelatent.models.hcn.model.hierarchy.shuffled", keep_order)
    found = []
    for of_class in (True, False):
        kept, units = net.start(len(x), of_class), to_units(net.first_beliefs())
        for number in range(12):
            units = units + update_images(net, kept, units, pixels, labels, 0, number, make_backend("cpu"))
        found.append(units)
        assert kept[-1].s.shape[-1] == (2 if of_class else 4)
    np.testing.assert_array_equal(*found)
    assert (found[0] != to_units(net.first_beliefs())).mean() > 0.3


def test_templates_of_a_class_without_images_learn_nothing_from_labelled_ones() -> None:
    net, images = make_two_layers(classes=(0, 1, 1, 0))
    x, _ = images.rows(0, 10)
    learner = BatchNetworkLearner(net, n_rows=10, single_leaf_passes=6)
    block = Block(x.reshape(10, -1), np.zeros(10, np.int32), None, 0)
    new = learner.visit((learner.start(), make_backend("cpu")), block, None)
    change = net.split(to_dense(new["change"]))[-1]
    assert change[..., [0, 3]].any()
    assert not change[..., [1, 2]].any()
    # One image has no label, so messages of all four templates are stored.
    few = learner.visit(
        (learner.start(), make_backend("cpu")), replace(block, y=np.r_[-1, block.y[1:]]), None
    )
    assert unpack_messages(few)[-1].s.shape[-1] == 4


def test_templates_of_another_class_would_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """If images stored messages of the first templates, not of those of their class, weights would differ."""
    monkeypatch.setattr(Hierarchy, "templates_of", lambda net, code: np.arange(net.per_class))
    with pytest.raises(AssertionError):
        test_templates_of_other_classes_need_no_messages(monkeypatch)


def test_small_class_messages_would_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """If log odds of wrong classes were limited to POOL_FLOOR, as in pools, wrong templates would learn."""
    monkeypatch.setattr("scalelatent.models.hcn.model.hierarchy.CLASS_FLOOR", POOL_FLOOR)
    with pytest.raises(AssertionError):
        test_templates_of_other_classes_need_no_messages(monkeypatch)
