"""A network for images of one object finds and classifies several objects in larger images."""

from __future__ import annotations

import itertools
import pickle
from dataclasses import replace
from typing import Any

import dask.array as da
import numpy as np
import pytest
from numpy.testing import assert_array_equal

import scalelatent as sl
from scalelatent.engine.backend import make_backend
from scalelatent.errors import DataError
from scalelatent.generators.images import image_set
from scalelatent.models.hcn.estimator import HierarchicalCompositionalNetwork
from scalelatent.models.hcn.model.hierarchy import Hierarchy, place_features
from scalelatent.models.hcn.model.layer import FeatureLayer, from_features
from scalelatent.models.hcn.model.multi_layer_learning import LayeredState
from scalelatent.models.hcn.model.object_search import choose_places, enlarge
from scalelatent.models.hcn.multi_layer import MultiLayer, build_multi_layer

TRAITS = image_set("traits")
HEIGHT, WIDTH = TRAITS.image_shape
SMALL_TRAITS = image_set("traits", size=5, gap=1)


def frames_overlap(one: Any, other: Any, frame: tuple[int, int]) -> bool:
    return abs(one[0] - other[0]) < frame[0] and abs(one[1] - other[1]) < frame[1]


def list_disjoint_sets(all_positions: list[Any], frame: tuple[int, int], most: int, where: Any = None) -> Any:
    """Yield all sets of at most ``most`` positions whose frames (of the size of an object) do not overlap.

    ``where`` returns the row and the column of a position; by default, a position is (row, column).
    """
    where = where or (lambda position: position)
    for n in range(most + 1):
        for some in itertools.combinations(all_positions, n):
            if not any(frames_overlap(where(a), where(b), frame) for a, b in itertools.combinations(some, 2)):
                yield some


def make_true_model(names: Any) -> Any:
    """Return a model of the two-trait images with the weights that generate them, without a fit."""
    m = HierarchicalCompositionalNetwork([(4, 13)], templates=2, online=False, random_state=0)
    below = FeatureLayer((1, HEIGHT, WIDTH), 4, (13, 13), 1e-3, 1e-3, 0.25, 0.5)
    network = build_multi_layer(m, (below,), np.array(names), 2)
    above = np.zeros((4, *network.net.layers[1].image), bool)
    # Templates are sorted by class: the two with equal traits are class 0, the two others are class 1.
    for bits, (shape, diagonal) in zip(above, [(0, 0), (1, 1), (0, 1), (1, 0)], strict=True):
        bits[shape, 2, 2] = bits[2 + diagonal, 2, 2 + 15] = True
    parts = from_features(TRAITS.features[:, None].astype(bool)), from_features(above)
    beliefs = np.concatenate([np.where(w, 1.0, -1.0).ravel() for w in parts])
    m._network, m._stream, m.n_features_in_ = network, LayeredState(beliefs, beliefs), HEIGHT * WIDTH
    return m


@pytest.mark.parametrize("names", [[0, 1], ["same", "other"]])
def test_traits_side_by_side_are_found_with_their_positions(names: list[Any]) -> None:
    """40 images have two objects at random offsets, one image has one object, and one has none."""
    n, room, rng = 40, (HEIGHT + 6, 2 * WIDTH + 12), np.random.default_rng(0)
    images, labels = TRAITS.rows(0, 2 * n)
    wide, truth = np.zeros((n + 2, *room), np.uint8), np.full((n + 2, 2, 2), -1)
    for i in range(n + 1):
        left = rng.integers(7)
        for j, column in enumerate((left, left + WIDTH + rng.integers(6))[: 2 if i < n else 1]):
            truth[i, j] = row, _ = rng.integers(7), column
            wide[i, row : row + HEIGHT, column : column + WIDTH] = images[2 * i + j if i < n else 0]
    several = make_true_model(names).with_classes(room)
    found = several.predict(wide)
    none = "" if isinstance(names[0], str) else -1
    expected = np.array(names)[labels.astype(int)].reshape(n, 2)
    assert (found.labels[:n] == expected).mean() >= 0.99
    assert_array_equal(found.labels[n:], [[names[labels[0]], none], [none, none]])
    # Positions may be wrong by two pixels, the range in which traits and pixels are shifted.
    assert (np.abs(found.positions - truth) <= 2).all(axis=2).mean() >= 0.99
    assert_array_equal(found.positions[n:][found.labels[n:] == none], -1)
    assert_array_equal(found.scores > 0, found.labels != none)
    assert found.exact.all()
    scores = several.decision_function(wide[:3])
    assert scores.shape == (3, 7, WIDTH + 13, 2)
    (row, column), name = found.positions[0, 0], found.labels[0, 0]
    assert found.scores[0, 0] == scores[0, row, column, names.index(name)] == scores[0, row, column].max()


def test_images_of_one_object_are_classified_as_before() -> None:
    m, (x, _) = make_true_model([0, 1]), TRAITS.rows(0, 50)
    one = m.with_classes((HEIGHT, WIDTH), n_objects=3)
    assert_array_equal(one.decision_function(x)[:, 0, 0], m.decision_function(x))
    found = one.predict(sl.Dataset.from_arrays(x))
    assert_array_equal(found.labels[:, 0], m.predict(x))
    assert_array_equal(found.labels[:, 1:], -1)


@pytest.mark.parametrize(
    ("shape", "frame", "most"), [((1, 12), (1, 3), 3), ((4, 4), (2, 2), 4), ((3, 5), (2, 3), 2)]
)
def test_positions_are_the_best_of_all_choices(shape: Any, frame: Any, most: int) -> None:
    rng, all_positions = np.random.default_rng(3), list(np.ndindex(*shape))
    choices = list(list_disjoint_sets(all_positions, frame, most))
    greedy = 0
    for trial in range(30):
        gains = rng.normal(0.5, 1, shape) if trial else -rng.random(shape)
        totals = [sum(gains[position] for position in some) for some in choices]
        chosen, exact = choose_places(gains, frame, most)
        assert exact
        assert set(chosen) == set(choices[int(np.argmax(totals))])
        assert chosen == sorted(chosen, key=lambda position: position[::-1])
        greedy += bool(chosen) and np.unravel_index(gains.argmax(), shape) not in chosen
    # In some trials the position of the largest gain is not in the best choice, so a greedy search fails.
    assert greedy


def test_a_bounded_search_returns_the_best_choice_so_far() -> None:
    """If many choices have nearly equal scores, the search ends early and does not report an optimum.

    The result is at least as good as the greedy choice.
    """
    gains = 100 + np.random.default_rng(0).random((30, 30))
    chosen, exact = choose_places(gains, (8, 8), 9)
    assert not exact
    assert not any(frames_overlap(a, b, (8, 8)) for a, b in itertools.combinations(chosen, 2))
    left, greedy = gains.copy(), 0.0
    for _ in range(9):
        row, column = np.unravel_index(left.argmax(), left.shape)
        greedy += left[row, column]
        left[max(0, row - 7) : row + 8, max(0, column - 7) : column + 8] = 0
    assert sum(gains[position] for position in chosen) >= greedy > 0


def test_objects_are_those_of_the_likeliest_of_all_images() -> None:
    """No set of templates (patterns) and positions is clearly more probable than the found objects.

    The network allows no shifts, and 5 % of the pixels are flipped.
    """
    below = FeatureLayer((1, 3, 3), 2, (2, 2), 0.1, 0.05, 0.25, 0.5)
    features = np.array([[[[1, 1], [0, 1]]], [[[0, 1], [1, 0]]]], bool)
    above = np.zeros((3, 2, 2, 2), bool)
    above[0, 0, 0, 0] = above[1, 1, 0, 1] = above[2, 1, 1, 0] = True
    top = replace(below, image=(2, 2, 2), n_features=3, window=(2, 2))
    net = Hierarchy((below, top), (0, 1, 1), side=1)
    weights = [from_features(features), from_features(above)]
    beliefs = np.concatenate([np.where(w, 1.0, -1.0).ravel() for w in weights])
    network = MultiLayer(net, np.array([0, 1]), 2)
    m = HierarchicalCompositionalNetwork([(2, 2)], templates=2)
    m._network, m._stream = network, LayeredState(beliefs, beliefs)
    several = m.with_classes((4, 7))
    all_positions = [(t, r, c) for t in range(3) for r in range(2) for c in range(5)]
    choices = list(list_disjoint_sets(all_positions, (3, 3), 2, lambda position: position[1:]))
    made = np.zeros((len(choices), 4, 7), bool)
    for image, some in zip(made, choices, strict=True):
        for template, row, column in some:
            at = np.zeros((3, 1, 1), bool)
            at[template] = True
            image[row : row + 3, column : column + 3] |= place_features(
                place_features(at, weights[1]), weights[0]
            )[0]
    # Log probabilities that a pixel is on (off), for a generated pixel that is off and for one that is on.
    log_on, log_off = np.log([0.05, 0.9]), np.log([0.95, 0.1])
    noise, matches = np.random.default_rng(1), []
    x = (made[noise.integers(len(choices), size=40)] ^ (noise.random((40, 4, 7)) < 0.05)).astype(np.uint8)
    found = several.predict(x)
    cost = np.log(len(all_positions)) * np.array([len(some) for some in choices])
    for image, labels, positions in zip(x, found.labels, found.positions, strict=True):
        likely = np.where(image, log_on[made.astype(int)], log_off[made.astype(int)]).sum(axis=(1, 2)) - cost
        some = choices[int(likely.argmax())]
        best = {(min(t, 1), r, c) for t, r, c in some}
        mine = {(label, *position) for label, position in zip(labels, positions, strict=True) if label >= 0}
        # Other sets of objects may give the same or equally probable pixels, so compare log probabilities.
        chosen = [i for i, s in enumerate(choices) if {(min(t, 1), r, c) for t, r, c in s} == mine]
        assert likely[chosen].max() >= likely.max() - 0.05
        matches.append(mine == best)
    assert np.mean(matches) > 0.5
    assert (found.labels >= 0).any()
    assert (found.labels < 0).any()


def test_weights_stay_and_pools_cover_the_larger_image() -> None:
    m = make_true_model([0, 1])
    net, wide = m._network.net, enlarge(m._network.net, HEIGHT + 3, 2 * WIDTH)
    assert [layer.weights_shape for layer in wide.layers] == [layer.weights_shape for layer in net.layers]
    for own, more in zip(net.priors, wide.priors, strict=True):
        assert_array_equal(own[:, 1:-1, 1:-1], more[:, 1 : own.shape[1] - 1, 1 : own.shape[2] - 1])
    pixels = wide.layers[0].compute_evidence(np.zeros((1, wide.layers[0].n_pixels), np.uint8))
    weights = [part > 0 for part in net.split(m._stream.beliefs)]
    assert wide.forward(weights, pixels, make_backend("cpu"))[-1][1].shape == (1, 4, 4, WIDTH + 1)


def test_wrong_images_are_refused() -> None:
    m = make_true_model([0, 1])
    for shape in [(HEIGHT - 1, WIDTH), (HEIGHT, WIDTH, 1), (HEIGHT,)]:
        with pytest.raises(DataError, match=f"at least {HEIGHT} x {WIDTH}"):
            m.with_classes(shape)
    with pytest.raises(ValueError, match="n_objects=0"):
        m.with_classes((HEIGHT, WIDTH), n_objects=0)
    several = m.with_classes((HEIGHT, 2 * WIDTH))
    with pytest.raises(DataError, match="with_classes was called for"):
        several.predict(np.zeros((2, HEIGHT, WIDTH)))
    with pytest.raises(DataError, match="row 1, pixel 0 is 2"):
        several.predict(np.stack([np.zeros((HEIGHT, 2 * WIDTH)), np.full((HEIGHT, 2 * WIDTH), 2)]))
    with pytest.raises(DataError, match="NaN"):
        several.predict(np.full((1, HEIGHT, 2 * WIDTH), np.nan))
    assert not hasattr(HierarchicalCompositionalNetwork([(4, 13)]), "with_classes")


def test_networks_without_classes_return_cluster_indices() -> None:
    x, _ = SMALL_TRAITS.rows(0, 20)
    m = HierarchicalCompositionalNetwork([(4, 5)], templates=2, n_epochs=2, random_state=0)
    with pytest.warns(UserWarning, match="weights still changed"):
        m.fit(sl.Dataset.from_arrays(x, np.zeros(20)).without_labels())
    several = m.with_classes((x.shape[1], x.shape[2] + 1))
    assert several.decision_function(np.pad(x, ((0, 0), (0, 0), (0, 1)))).shape == (20, 1, 2, 2)
    assert several.classes_.tolist() == [0, 1]


def test_a_loaded_network_and_lazy_images_give_the_same(tmp_path: Any) -> None:
    """Arrays for larger images are not saved: a loaded network computes them again, with equal results."""
    x, y = SMALL_TRAITS.rows(0, 20)
    m = HierarchicalCompositionalNetwork([(4, 5)], templates=2, online=False, n_epochs=2, random_state=0)
    with pytest.warns(UserWarning, match="weights still changed"):
        m.fit(x, y.astype(int))
    m.save(tmp_path / "m.zarr")
    shape = x.shape[1], 2 * x.shape[2]
    wide = np.concatenate([x, x[::-1]], axis=2)
    stored = sl.Dataset.from_arrays(wide).save(tmp_path / "x.zarr")
    found = m.with_classes(shape).predict(wide)
    assert (found.labels >= 0).any()
    again = sl.load_model(tmp_path / "m.zarr").with_classes(shape)
    for given in (wide, stored, da.from_array(wide, chunks=(7, -1, -1))):
        assert_same(again.predict(given), found)
    assert_same(pickle.loads(pickle.dumps(again.predict))(wide), found)  # Workers receive the method pickled.


def assert_same(one: Any, other: Any) -> None:
    for name in ("labels", "positions", "scores"):
        assert_array_equal(getattr(one, name), getattr(other, name))
