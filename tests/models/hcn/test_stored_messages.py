"""Learning with stored messages of leaves (ranges of images) finds bars, letters and probable weights."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from scalelatent.contract.learners import Block
from scalelatent.contract.stats import Stats
from scalelatent.errors import DivergenceError
from scalelatent.generators.images import image_set
from scalelatent.models.hcn.kernels.units import from_units, to_units
from scalelatent.models.hcn.model.layer import FeatureLayer, log_odds, to_features
from scalelatent.models.hcn.model.stored_messages import (
    BatchFeatureLearner,
    LeafMessages,
    leaf_bytes,
    start_leaf,
    visit_leaves,
)
from tests.models.hcn.cases import Kernels, compute_overlap

BACKEND = Kernels()


def learn_leaf(
    layer: FeatureLayer, evidence: np.ndarray, seed: int, n_sweeps: int, damping: float, restart: int = 0
) -> tuple[np.ndarray, LeafMessages]:
    """Learn from all images as one leaf (range of images); return log odds of weights and stored messages."""
    beliefs, leaf, key = (
        to_units(layer.first_beliefs(seed, restart)),
        start_leaf(layer, len(evidence)),
        seed + restart,
    )
    leaf, change = visit_leaves([leaf], evidence[None], beliefs, [0], key, n_sweeps, damping, BACKEND)[0]
    return from_units(beliefs + change), leaf


def test_one_long_visit_equals_several_short_visits() -> None:
    layer = FeatureLayer((1, 7, 6), 3, (3, 2), 1e-2, 1e-2, 0.3, 1e-3)
    x = (np.random.default_rng(0).random((4, 42)) < 0.3).astype(np.uint8)
    evidence, start = layer.compute_evidence(x), to_units(layer.first_beliefs(0))
    whole, change = visit_leaves([start_leaf(layer, 4)], evidence[None], start, [0], 7, 6, 0.8, BACKEND)[0]
    leaf, beliefs = start_leaf(layer, 4), start.copy()
    for n in (1, 2, 3):
        leaf, more = visit_leaves([leaf], evidence[None], beliefs, [0], 7, n, 0.8, BACKEND)[0]
        beliefs += more
    assert_array_equal(beliefs, start + change)
    for name in ("s", "to_s", "to_w", "held"):
        assert_array_equal(getattr(leaf, name), getattr(whole, name))
    assert leaf.sweeps == whole.sweeps == 6
    assert leaf_bytes(layer, 4) == sum(a.nbytes for a in (leaf.s, leaf.to_s, leaf.to_w, leaf.held))


# A pair is a position and a pixel of a feature. Case 1 has the sizes of Lázaro-Gredilla et al. (2016).
@pytest.mark.parametrize(("side", "n_features", "window"), [(24, 32, (8, 6)), (14, 5, (6, 6))])
def test_messages_take_about_four_bytes_per_pair(side, n_features, window) -> None:
    layer = FeatureLayer((1, side, side), n_features, window, 1e-3, 1e-3, 0.3, 1e-4)
    assert leaf_bytes(layer, 7) <= 4.4 * 7 * layer.pairs


def make_learner(n_rows: int, layer: FeatureLayer) -> BatchFeatureLearner:
    return BatchFeatureLearner(layer, 0.95, 5, 0, damping=0.8, n_rows=n_rows, single_leaf_sweeps=2)


def test_a_visit_stays_within_its_requested_memory() -> None:
    layer = FeatureLayer((1, 14, 14), 5, (6, 6), 1e-3, 1e-3, 0.3, 1e-4)
    learner = make_learner(40, layer)
    x = (np.random.default_rng(0).random((40, layer.n_pixels)) < 0.2).astype(np.uint8)
    prepared = learner.prepare(learner.start(), BACKEND)
    block = Block(x, None, None, 0, np.arange(40), 1)
    kept = learner.visit(prepared, block, None)  # The first call compiles the kernels.
    tracemalloc.start()
    try:
        learner.visit(prepared, block, kept)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    fixed, each = learner.requirements.scratch or (0, 0)
    # The messages from the first call were allocated before the trace, so ``peak`` does not include them.
    assert leaf_bytes(layer, 40) <= peak <= fixed + 40 * each - leaf_bytes(layer, 40)


def test_beliefs_beyond_exact_sums_are_refused() -> None:
    layer = FeatureLayer((1, 7, 6), 3, (3, 2), 1e-2, 1e-2, 0.3, 1e-3)
    learner, stats = make_learner(4, layer), Stats.zeros(make_learner(4, layer).layout())
    stats["evidence"][0, 1, 1, 2] = 1_048_500.0
    state = learner.step(learner.start(), stats, 4)
    with pytest.raises(DivergenceError, match=r"layer 1: .*feature 2 have reached 2,09.*lower damping"):
        learner.step(state, stats, 4)


def test_bars_are_found_in_one_image() -> None:
    bars = image_set("bars", noise=0.03, seed=1)
    layer = FeatureLayer((1, *bars.image_shape), 3, (6, 6), 1e-2, 1e-2, 0.1, 1e-4)
    evidence = layer.compute_evidence(bars.rows(0, 1)[0].reshape(1, -1))
    found = []
    for restart in range(3):
        beliefs, _ = learn_leaf(layer, evidence, 0, 60, 1.0, restart)
        features = to_features(beliefs > 0)[:, 0]
        found.append(min(compute_overlap(features, truth.astype(bool)) for truth in bars.features))
    assert max(found) >= 0.9


def test_leaves_of_several_images_find_letters_together() -> None:
    letters = image_set("letters", alphabet="AKS", noise=0.01, seed=2)
    layer = FeatureLayer((1, 24, 24), 4, (8, 6), 1e-3, 1e-3, 0.3, 1e-4)
    evidence = layer.compute_evidence(letters.rows(0, 40)[0].reshape(40, -1))
    beliefs = to_units(layer.first_beliefs(0))
    leaves = [start_leaf(layer, 10) for _ in range(4)]
    for _ in range(40):
        firsts = [10 * k for k in range(4)]
        visits = visit_leaves(leaves, evidence.reshape(4, 10, 1, 24, 24), beliefs, firsts, 0, 1, 0.5, BACKEND)
        leaves = [leaf for leaf, _ in visits]
        beliefs = beliefs + sum(change for _, change in visits)
    features = to_features(beliefs > 0)[:, 0]
    assert min(compute_overlap(features, truth.astype(bool)) for truth in letters.features) >= 0.9


def test_features_as_large_as_the_image_are_boolean_factors() -> None:
    rng = np.random.default_rng(0)
    factors = rng.random((4, 30)) < 0.3
    placed = rng.random((120, 4)) < 0.3
    x = ((placed[:, :, None] & factors).any(axis=1)).astype(np.uint8)
    layer = FeatureLayer((1, 5, 6), 5, (5, 6), 1e-3, 1e-3, 0.3, 0.2)
    best = 0.0
    for restart in range(5):
        beliefs, _ = learn_leaf(layer, layer.compute_evidence(x), 0, 60, 0.8, restart)
        features = to_features(beliefs > 0).reshape(5, 30)
        score = [max((f & g).sum() / max((f | g).sum(), 1) for f in features) for g in factors]
        best = max(best, min(score))
    assert best >= 0.9


def list_bits(n: int) -> np.ndarray:
    return (np.arange(2**n)[:, None] >> np.arange(n)) & 1


def compute_scores(layer: FeatureLayer, evidence: np.ndarray, s: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Return log joint probabilities (len(s), len(w)) of positions S and weights W, up to a constant."""
    high, wide, _ = layer.places
    h, width = layer.window
    made = np.zeros((len(s), len(w), high + h - 1, wide + width - 1), bool)
    for r in range(high):
        for c in range(wide):
            over = np.einsum("af,bijf->abij", s[:, r, c], w[:, 0, ::-1, ::-1]) > 0
            made[:, :, r : r + h, c : c + width] |= over
    pixel_evidence = (made * evidence[0, 0]).sum(axis=(2, 3)) / 256
    prior_s, prior_w = log_odds(layer.p_sparsity), log_odds(layer.p_weight)
    return pixel_evidence + prior_s * s.sum(axis=(1, 2, 3))[:, None] + prior_w * w.sum(axis=(1, 2, 3, 4))


@pytest.mark.parametrize(
    ("image", "window", "n_features"), [((3, 3), (2, 2), 2), ((2, 5), (1, 3), 1), ((1, 9), (1, 3), 1)]
)
def test_the_best_of_ten_restarts_is_the_map_by_enumeration(image, window, n_features) -> None:
    """In at least 95 % of small networks, the best of ten restarts is the most probable configuration.

    The networks have at most 18 bits, so that all configurations can be enumerated.
    """
    hits = 0
    layer = FeatureLayer((1, *image), n_features, window, 0.05, 0.05, 0.4, 0.2)
    n_s, n_w = int(np.prod(layer.places)), int(np.prod(layer.weights_shape))
    assert n_s + n_w <= 18
    every_s = list_bits(n_s).reshape(-1, *layer.places)
    every_w = list_bits(n_w).reshape(-1, *layer.weights_shape)
    for seed in range(40):
        rng = np.random.default_rng(seed)
        s, w = rng.random((1, *layer.places)) < 0.25, rng.random((1, *layer.weights_shape)) < 0.5
        clean = np.zeros(image, bool)
        for r, c, f in np.argwhere(s[0]):
            clean[r : r + window[0], c : c + window[1]] |= w[0, 0, ::-1, ::-1, f]
        evidence = layer.compute_evidence((clean ^ (rng.random(image) < 0.02)).reshape(1, -1))
        best = compute_scores(layer, evidence, every_s, every_w).max()
        found = []
        for restart in range(10):
            beliefs, leaf = learn_leaf(layer, evidence, seed, 60, 0.8, restart)
            found.append(compute_scores(layer, evidence, leaf.s > 0, (beliefs > 0)[None])[0, 0])
        # The evidence is rounded to multiples of 1/256 nat, so the score of the optimum may be lower by 0.1.
        hits += max(found) >= best - 0.1
    assert hits >= 0.95 * 40
