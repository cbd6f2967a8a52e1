"""Learning often finds the most probable weights of networks so small that all weights can be enumerated.

The networks have two layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from scalelatent.contract.learners import Block
from scalelatent.engine.backend import make_backend
from scalelatent.models.hcn.kernels import reference
from scalelatent.models.hcn.kernels.units import to_units
from scalelatent.models.hcn.model.hierarchy import (
    INNER_ROUNDS,
    Hierarchy,
    LayerMessages,
    channels_last,
    shift_pixels_randomly,
)
from scalelatent.models.hcn.model.layer import FeatureLayer, log_odds, to_features
from scalelatent.models.hcn.model.multi_layer_learning import BatchNetworkLearner, to_dense, unpack_messages
from tests.models.hcn.test_multi_layer_learning import learn_batch, make_block, make_two_layers

BELOW = FeatureLayer((1, 1, 4), 2, (1, 2), 0.05, 0.02, 0.3, 0.5)
"""Layer of two features of two pixels each (4 bits) for images of four pixels: three positions each."""
TOP = replace(BELOW, image=(2, 1, 3), window=(1, 3), p_weight=0.2)
"""Layer of two templates of 6 bits each, so that the network has 16 bits of weights."""


def compute_log_posterior(x: np.ndarray) -> np.ndarray:
    """Return the log posterior of all 2 ** 16 weights for images x (2, 4), up to a constant.

    Each image is explained by the better of the two templates (whole images made of features).
    """
    codes = np.arange(2**16)[:, None]
    features = (codes >> np.arange(4) & 1).astype(bool).reshape(-1, 2, 2)
    templates = (codes >> np.arange(4, 16) & 1).astype(bool).reshape(-1, 2, 2, 3)
    made = np.zeros((len(codes), 2, 4), bool)
    for feature, position, pixel in np.ndindex(2, 3, 2):
        made[..., position + pixel] |= templates[..., feature, position] & features[:, None, feature, pixel]
    p01, p10 = BELOW.p01, BELOW.p10
    chance = np.log([[1 - p10, p10], [p01, 1 - p01]])
    seen = chance[made[:, None].astype(int), x[None, :, None].astype(int)].sum(axis=3)
    on = [features.sum(axis=(1, 2)), templates.sum(axis=(1, 2, 3))]
    prior = on[0] * log_odds(BELOW.p_weight) + on[1] * log_odds(TOP.p_weight)
    return prior + seen.max(axis=2).sum(axis=1)


def find_weights(x: np.ndarray, seed: int) -> int:
    """Return the weights that message passing finds for images x, as an index into the log posteriors."""
    net = Hierarchy((BELOW, TOP), None, side=1, seed=seed)
    learner = BatchNetworkLearner(net, n_rows=2, single_leaf_passes=100)
    state = learn_batch(learner, Block(x.astype("u1"), None, None, 0), 1)
    on = np.concatenate([to_features(part > 0).ravel() for part in net.split(state.beliefs)])
    return int(on @ 2 ** np.arange(16))


def check_likeliest() -> None:
    """Check that message passing finds the most probable weights for at least 4 of eight pairs of images.

    For each pair the best of twelve seeds counts, because a fit also restarts from other seeds.
    """
    rng, hits = np.random.default_rng(0), 0
    for _ in range(8):
        x = rng.random((2, 4)) < 0.4
        posterior = compute_log_posterior(x)
        best = max(posterior[find_weights(x, seed)] for seed in range(12))
        hits += bool(best > posterior.max() - 1e-9)
    assert hits >= MIN_HITS


MIN_HITS = 4


def test_the_likeliest_of_all_weights_are_often_found() -> None:
    check_likeliest()


def test_wrong_class_messages_find_the_likeliest_weights_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A template (a whole image made of features) must be compared with the best score of the others.

    If its own score is included, fewer of the most probable weights are found.
    """

    def mutant(net: Hierarchy, scores: np.ndarray, labels: Any) -> np.ndarray:
        return -np.broadcast_to(scores.max(axis=1, keepdims=True), scores.shape).astype(np.int32)

    monkeypatch.setattr(Hierarchy, "class_messages", mutant)
    with pytest.raises(AssertionError):
        check_likeliest()


def check_messages_from_above() -> None:
    """Check that new messages (log odds) from the upper layer replace the old ones, without averaging."""
    net, images = make_two_layers(5, 1)
    backend, block = make_backend("cpu"), make_block(images, 0, 6)
    learner = BatchNetworkLearner(net, n_rows=6, single_leaf_passes=3)
    state = learner.start()
    new = learner.visit((state, backend), block, None)
    kept = unpack_messages(new)
    weights = net.split(to_units(state.beliefs) + to_dense(new["change"]))
    top, below = kept[1], kept[0].from_below
    made = reference.pass_trees_down(top.s, weights[1], top.to_s, top.to_w)
    expected = reference.pass_pools_down(below, net.priors[1], made, top.down.copy(), INNER_ROUNDS)
    before = kept[0].above
    net.pass_down(kept, weights, net.layers[0].read_evidence(block), None, backend)
    assert (before != kept[0].above).any()
    assert_array_equal(kept[0].above, channels_last(expected))
    assert_array_equal(kept[0].s - kept[0].above, channels_last(below))


def test_messages_from_above_are_not_damped() -> None:
    check_messages_from_above()


def test_damping_messages_from_above_would_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check detects messages (log odds) from the upper layer that change by only a fifth per pass."""
    lower = LayerMessages.with_above

    def mutant(kept: LayerMessages, above: np.ndarray) -> LayerMessages:
        return lower(kept, kept.above + np.rint(0.2 * (above - kept.above)).astype(np.int32))

    monkeypatch.setattr(LayerMessages, "with_above", mutant)
    with pytest.raises(AssertionError):
        check_messages_from_above()


def test_shifts_are_drawn_with_the_priors_of_their_pool() -> None:
    """A pool is the 3 x 3 pixels to which a pixel may be shifted; each shift has a prior probability.

    The shares of 20,000 draws are within five standard errors of the priors.
    """
    net = Hierarchy((BELOW, TOP), side=3, seed=4)
    prior, rng, n = net.priors[0], np.random.default_rng(0), 20_000
    made = np.zeros((1, 1, 4), bool)
    made[0, 0, 1] = True
    share = np.mean([shift_pixels_randomly(made, prior, rng)[0, 0] for _ in range(n)], axis=0)

    def compute_shares(pixel: int) -> np.ndarray:
        """Return the probabilities that a pixel is shifted by -1, 0 or 1 column."""
        units = prior[3:6, 0, pixel]
        return np.exp(units / 256.0) / np.exp(units / 256.0).sum()

    off = np.abs(share[:3] - compute_shares(1)) / np.sqrt(compute_shares(1) * (1 - compute_shares(1)) / n)
    assert off.max() < 5
    assert share[3] == 0
    # The shares differ from 1/3, so a draw with equal probabilities would fail this test.
    assert (np.abs(share[:3] - 1 / 3) > 0.02).any()
