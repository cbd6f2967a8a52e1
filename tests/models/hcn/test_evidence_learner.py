"""Online learning of features forgets some old evidence per minibatch, and sums parallel minibatches."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from scalelatent.contract.learners import Block
from scalelatent.contract.stats import Stats
from scalelatent.errors import DivergenceError
from scalelatent.generators.images import image_set
from scalelatent.models.hcn.kernels.pixel_order import shuffled
from scalelatent.models.hcn.kernels.units import UNITS_PER_NAT, to_units
from scalelatent.models.hcn.model.evidence_learner import (
    CENTER_EVERY,
    EvidenceState,
    OnlineFeatureLearner,
    center_features,
    forget,
)
from scalelatent.models.hcn.model.layer import FeatureLayer, from_features, to_features
from tests.models.hcn.cases import Kernels, compute_overlap, learn_online, run_one_step

BACKEND = Kernels()
SMALL = FeatureLayer((1, 7, 6), 3, (3, 2), 1e-2, 1e-2, 0.3, 1e-3)


def make_learner(
    forgetting: float = 0.9, layer: FeatureLayer = SMALL
) -> tuple[OnlineFeatureLearner, np.ndarray]:
    x = (np.random.default_rng(0).random((24, layer.n_pixels)) < 0.3).astype(np.uint8)
    return OnlineFeatureLearner(layer, forgetting, 2, 5), x


def test_one_chain_of_one_minibatch_follows_the_papers_rule() -> None:
    learner, x = make_learner()
    state = learner.start()
    prior = state.first
    for first in range(0, 24, 2):
        rows = np.arange(first, first + 2)
        w = to_units(state.beliefs)
        after, s = w[None].copy(), SMALL.prior_beliefs(2)[None]
        order = shuffled(5, "hcn sweep", 0, rows[:1], 2 * SMALL.n_pixels)
        BACKEND.kernel("hcn_sweep")(SMALL.compute_evidence(x[rows])[None], order, s, after)
        posterior = state.beliefs + (after[0] - w) / UNITS_PER_NAT
        state = run_one_step(learner, state, x, rows, 0, BACKEND)
        assert_allclose(state.beliefs, 0.9 * posterior + 0.1 * prior, rtol=1e-13)
    assert np.abs(state.beliefs - prior).max() > 1


def check_forgetting(step: Callable[..., EvidenceState]) -> None:
    """Check that learned evidence is multiplied by 0.9 per minibatch if all pixels are unknown."""
    learner, x = make_learner(layer=replace(SMALL, missing=9))
    first = learner.start().first
    state = EvidenceState(first + 10.0, first)
    prepared, total = learner.prepare(state, BACKEND), Stats.zeros(learner.layout())
    for chain in range(3):
        stats, rows = Stats.zeros(learner.layout()), np.arange(8 * chain, 8 * chain + 8)
        learner.run_chain(prepared, Block(np.full_like(x[rows], 9), None, None, 0, rows, 0, chain), stats)
        total = total.merge(stats)
    assert_allclose(step(learner, state, total, 24).beliefs, first + 10 * 0.9**12, rtol=1e-12)


def step_that_forgets_once(
    learner: OnlineFeatureLearner, state: EvidenceState, stats: Stats, n: int
) -> EvidenceState:
    return replace(state, beliefs=forget(state.beliefs, state.first, 0.9) + stats["evidence"])


def test_steps_forget_for_each_minibatch() -> None:
    check_forgetting(OnlineFeatureLearner.step)
    with pytest.raises(AssertionError):
        check_forgetting(step_that_forgets_once)


def check_parallel_minibatches(step: Callable[..., EvidenceState]) -> None:
    """Check that parallel minibatches change beliefs (log odds) like the same minibatches one by one."""
    learner, _ = make_learner(0.9)
    state, evidence = learner.start(), 3.0
    stats = Stats.zeros(learner.layout())
    for m in (4, 4, 2):
        stats["evidence"][...] += evidence * sum(0.9**j for j in range(1, m + 1))
        stats["minibatches"][...] += m
        stats["weight"][...] += 1 - 0.9**m
    serial = state.beliefs
    for _ in range(10):
        serial = forget(serial + evidence, state.first, 0.9)
    assert_allclose(step(learner, state, stats, 20).beliefs, serial, rtol=1e-12)


def step_that_only_adds(
    learner: OnlineFeatureLearner, state: EvidenceState, stats: Stats, n: int
) -> EvidenceState:
    beliefs = forget(state.beliefs, state.first, 0.9 ** int(stats["minibatches"]))
    return replace(state, beliefs=beliefs + stats["evidence"])


def test_parallel_chains_have_the_weight_of_serial_minibatches() -> None:
    check_parallel_minibatches(OnlineFeatureLearner.step)
    with pytest.raises(AssertionError):
        check_parallel_minibatches(step_that_only_adds)


def test_without_forgetting_evidence_adds_up() -> None:
    learner, x = make_learner(1.0)
    state, rows = learner.start(), np.arange(24)
    apart = [run_one_step(learner, state, x, rows[a : a + 8], 0, BACKEND) for a in (0, 8, 16)]
    together = run_one_step(learner, state, x, rows, 0, BACKEND, chains=3)
    assert_allclose(together.beliefs, sum(s.beliefs for s in apart) - 2 * state.beliefs, rtol=1e-12)


def test_parallel_chains_equal_serial_chains() -> None:
    learner, x = make_learner()
    state = run_one_step(learner, learner.start(), x, np.arange(24), 0, BACKEND)
    prepared = learner.prepare(state, BACKEND)
    parts = [np.arange(0, 6), np.arange(6, 13), np.arange(13, 24)]
    blocks = [Block(x[part], None, None, 0, part, 1, k) for k, part in enumerate(parts)]
    together, alone = ([Stats.zeros(learner.layout()) for _ in parts] for _ in range(2))
    learner.run_chains(prepared, blocks, together)
    for block, stats in zip(blocks, alone, strict=True):
        learner.run_chain(prepared, block, stats)
    for a, b in zip(together, alone, strict=True):
        assert_array_equal(a.vector, b.vector)


def test_the_reference_kernels_learn_the_same() -> None:
    learner, x = make_learner()
    found, want = (learn_online(learner, x, 2, backend) for backend in (BACKEND, Kernels("reference")))
    assert_array_equal(found.beliefs, want.beliefs)
    assert found.last_changed == want.last_changed > 0


def test_beliefs_beyond_exact_sums_are_refused() -> None:
    learner, x = make_learner(1.0)
    state = replace(learner.start(), beliefs=np.full(SMALL.weights_shape, 2_000_000.0))
    with pytest.raises(DivergenceError, match=r"layer 1: .*feature 0 have reached 2,000,0.*lower forgetting"):
        run_one_step(learner, state, x, np.arange(4), 0, BACKEND)


def test_a_chain_stays_within_its_requested_memory() -> None:
    layer = FeatureLayer((1, 24, 24), 32, (8, 6), 1e-3, 1e-3, 0.3, 1e-4)
    learner = OnlineFeatureLearner(layer, 0.95, 5, 0)
    x = (np.random.default_rng(0).random((20, layer.n_pixels)) < 0.2).astype(np.uint8)
    block = Block(x, None, None, 0, np.arange(20))
    stats = Stats.zeros(learner.layout())
    learner.run_chain(learner.prepare(learner.start(), BACKEND), block, stats)  # The first run compiles.
    prepared = learner.prepare(learner.start(), Kernels())
    tracemalloc.start()
    try:
        learner.run_chain(prepared, block, stats)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    fixed, each = learner.requirements.scratch or (0, 0)
    assert 4 * 5 * np.prod(layer.places) <= peak <= fixed + 20 * each


def test_features_are_converted_between_kernels_and_users() -> None:
    w = np.arange(2 * 3 * 2 * 4).reshape(2, 3, 2, 4)
    assert to_features(w)[3, 1, 0, 0] == w[1, 2, 1, 3]
    assert_array_equal(from_features(to_features(w)), w)


# Data and parameters are those of Figure 6 of Lázaro-Gredilla et al. (2016), with minibatches of 5 images.
@pytest.mark.parametrize(("n_rows", "epochs"), [(30, 100), (3000, 1)])
def test_online_learning_finds_letters(n_rows, epochs) -> None:
    letters = image_set("letters", alphabet="AKSTX", noise=0.03, seed=1)
    layer = FeatureLayer((1, 24, 24), 6, (8, 6), 1e-4, 1e-4, 0.4, 1e-6)
    x = letters.rows(0, n_rows)[0].reshape(n_rows, -1)
    state = learn_online(OnlineFeatureLearner(layer, 0.95, 5, 1), x, epochs, BACKEND)
    features = to_features(state.beliefs > 0)[:, 0]
    found = [compute_overlap(features, truth.astype(bool)) for truth in letters.features]
    assert min(found) >= 0.9


def make_uncentred_beliefs(first: np.ndarray) -> np.ndarray:
    """Return beliefs (log odds that a pixel is on) of three features of 7 x 6 pixels.

    The weights of the first feature are at the lower left, those of the second reach from top to bottom. The
    third feature has the initial beliefs ``first`` and no weights.
    """
    beliefs = first.copy()
    beliefs[:, 3:7, 0:2, 0] = 5.0
    beliefs[:, :, 2:4, 1] = 7.0
    return beliefs


def check_centred(move: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> None:
    layer = FeatureLayer((2, 9, 9), 3, (7, 6), 1e-2, 1e-2, 0.3, 1e-3)
    first = layer.first_beliefs(0)
    beliefs = make_uncentred_beliefs(first)
    found, want = move(beliefs, first), first.copy()
    want[:, 2:6, 2:4, 0] = 5.0
    # Log odds around the weights move with the weights. Pixels that become free get their initial log odds.
    want[:, :2, 2:, 0] = first[:, 1:3, :4, 0]
    want[:, 2:6, 4:, 0] = first[:, 3:, 2:4, 0]
    want[:, 6:, :, 0] = first[:, 6:, :, 0]
    want[..., 1] = beliefs[..., 1]
    assert_array_equal(found, want)
    assert_array_equal(move(found, first), found)
    assert_array_equal(beliefs, make_uncentred_beliefs(first))


def roll_features(beliefs: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Move features wrongly: pixels that leave the window on one side enter it on the other side."""
    out = beliefs.copy()
    out[..., 0] = np.roll(beliefs[..., 0], (-1, 2), axis=(1, 2))
    return out


def test_features_move_to_the_middle_of_their_windows() -> None:
    check_centred(center_features)
    with pytest.raises(AssertionError):
        check_centred(roll_features)


@pytest.mark.parametrize(
    ("minibatches", "steps"), [(1, CENTER_EVERY), (8, CENTER_EVERY // 8), (3 * CENTER_EVERY, 1)]
)
def test_features_are_moved_every_20_minibatches(minibatches, steps) -> None:
    learner, _ = make_learner(1.0, replace(SMALL, window=(5, 3)))
    first = learner.start().first
    state = EvidenceState(first.copy(), first)
    state.beliefs[:, 4, 1, 0] = 5.0
    stats, moved = Stats.zeros(learner.layout()), []
    stats["minibatches"][...] = minibatches
    for _ in range(2 * steps):
        before, state = state, learner.step(state, stats, 5)
        moved.append(bool((before.beliefs != state.beliefs).any()))
    assert moved.index(True) == steps - 1
    assert sum(moved) == 1
    assert state.beliefs[0, 2, 1, 0] == 5


def test_unknown_pixels_are_skipped() -> None:
    letters = image_set("letters", alphabet="AKSTX", noise=0.03, seed=1)
    layer = FeatureLayer((1, 24, 24), 6, (8, 6), 1e-4, 1e-4, 0.4, 1e-6, missing=7)
    x = letters.rows(0, 3000)[0].reshape(3000, -1)
    x[np.random.default_rng(0).random(x.shape) < 0.2] = 7
    state = learn_online(OnlineFeatureLearner(layer, 0.95, 5, 1), x, 1, BACKEND)
    features = to_features(state.beliefs > 0)[:, 0]
    found = [compute_overlap(features, truth.astype(bool)) for truth in letters.features]
    assert sum(o >= 0.9 for o in found) >= 4


def test_validation_rows_stop_online_learning() -> None:
    letters = image_set("letters", alphabet="AKSTX", noise=0.03, seed=1)
    layer = FeatureLayer((1, 24, 24), 6, (8, 6), 1e-4, 1e-4, 0.4, 1e-6)
    x = letters.rows(0, 120)[0].reshape(120, -1)
    learner = OnlineFeatureLearner(layer, 0.95, 5, 1, patience=2)
    state, found = learner.start(), []
    for epoch in range(12):
        for first in range(0, 100, 5):
            state = run_one_step(learner, state, x, np.arange(first, first + 5), epoch, BACKEND)
        reduction = learner.validation()
        stats = Stats.zeros(reduction.layout())
        reduction.accumulate(reduction.prepare(state, BACKEND), Block(x[100:], None, None, 100), stats)
        state = learner.end_epoch(learner.validated(state, stats))
        found.append(learner.summary(state)["compression"])
        if learner.is_done(state):
            break
    assert min(found) == state.best < 0.8
    assert found.index(state.best) == len(found) - 3
