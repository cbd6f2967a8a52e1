"""Messages (log odds) of pools equal an enumeration of all bits; numba equals the reference in numpy.

A pool is the square of pixels to which a pixel may be shifted.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from scalelatent.models.hcn.kernels import reference
from scalelatent.models.hcn.kernels.cpu import pools, sweeps
from scalelatent.models.hcn.kernels.units import OFF_IMAGE, UNITS_PER_NAT
from scalelatent.models.hcn.kernels.windows import MESSAGE_ROOM, message_starts
from scalelatent.models.hcn.model.hierarchy import shift_priors

# Each case has the number of images, their (channels, height, width), and the side of a pool in pixels.
SHAPES = [(1, (1, 1, 1), 3), (2, (3, 4, 5), 3), (1, (1, 7, 33), 5), (3, (2, 3, 2), 1), (1, (16, 6, 17), 3)]


def draw_messages(shape, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Return arguments of the kernels of pools: random messages (small, large and equal) and the prior."""
    n, image, side = shape
    rng = np.random.default_rng(seed)

    def draw_array(*size: int) -> np.ndarray:
        wide = rng.choice([3, 30, 3000, 20_000], size)
        return np.rint(np.clip(rng.normal(size=size) * wide, -1e4, 1e4) * UNITS_PER_NAT).astype(np.int32)

    prior = shift_priors(image[1:], side, 0.9, seed)
    down = draw_array(n, image[0], side**2, *image[1:])
    return draw_array(n, *image), prior, draw_array(n, *image), down, draw_array(n, *image)


@pytest.mark.parametrize("shape", SHAPES)
def test_pools_equal_the_reference(shape) -> None:
    below, prior, above, down, evidence = draw_messages(shape)
    for damping in (1.0, 0.2):
        want, found = evidence.copy(), evidence.copy()
        reference.pass_pools_up(below, prior, down, want, damping)
        pools.pass_pools_up(below, prior, down, found, damping)
        assert_array_equal(found, want)
        want, found = down.copy(), down.copy()
        expected = reference.pass_pools_down(below, prior, above, want, 2)
        assert_array_equal(pools.pass_pools_down(below, prior, above, found, 2), expected)
        assert_array_equal(found, want)
        down = found


@pytest.mark.parametrize(
    "shape", [(1, (1, 5, 5), (2, 3), 1), (2, (3, 6, 7), (6, 7), 19), (1, (16, 4, 5), (2, 2), 17)]
)
def test_trees_equal_the_reference(shape) -> None:
    n, (channels, height, width), (h, wide), n_features = shape
    rng = np.random.default_rng(1)
    room = message_starts((height, width), (h, wide), n_features)[-1] + MESSAGE_ROOM
    s = rng.integers(-(10**6), 10**6, (n, height - h + 1, width - wide + 1, n_features), np.int32)
    w = rng.integers(-(10**6), 10**6, (channels, h, wide, n_features), np.int32)
    kept = [rng.integers(-(10**6), 10**6, (n, channels, room), np.int32) for _ in range(2)]
    assert_array_equal(pools.pass_trees_down(s, w, *kept), reference.pass_trees_down(s, w, *kept))
    evidence = rng.integers(-(10**6), 10**6, (n, channels, height, width), np.int32)
    places, on = np.ascontiguousarray(np.moveaxis(s, -1, 1)), w > 0
    want = reference.pass_features_down(places, on, evidence)
    assert_array_equal(pools.pass_features_down(places, on, evidence), want)
    evidence[..., 0, :2] = 0
    order = rng.permutation(evidence.size).astype(np.int32)
    want = [a[None].copy() for a in (s, w, *kept, np.ones((n, channels, height * width, h), np.uint8))]
    found = [a.copy() for a in want]
    for _ in range(3):
        reference.sweep_messages(evidence[None], order[None], *want, 1.0)
        sweeps.sweep_messages(evidence[None], order[None], *found, 1.0)
        for a, b in zip(found[:4], want[:4], strict=True):
            assert_array_equal(a, b)
        evidence = rng.permutation(evidence.ravel()).reshape(evidence.shape)


def find_best(score, n: int, at: int) -> tuple[float, float]:
    """Return two maxima of the score over all values of n bits: one with bit ``at`` = 0, one with 1."""
    found = [-np.inf, -np.inf]
    for bits in itertools.product((0, 1), repeat=n):
        found[bits[at]] = max(found[bits[at]], score(bits))
    return found[0], found[1]


@pytest.mark.parametrize("side", [1, 3])
def test_pool_messages_are_max_marginals(side) -> None:
    """A message is the largest score with a bit equal to 1, minus the largest score with the bit equal to 0.

    The bits of a pool are a pixel of the upper image R and the pixels to which it may be shifted.
    """
    rng, n = np.random.default_rng(side), side**2
    shape = (2 * (side // 2) + 1,) * 2
    at = side // 2, side // 2
    prior = shift_priors(shape, side, 0.9, 0)
    chance = prior[:, at[0], at[1]] / UNITS_PER_NAT
    for _ in range(20):
        sent, top = rng.normal(size=n) * 5, float(rng.normal() * 5)

        def score_pool(bits, sent=sent, top=top) -> float:
            """Return the score of ``bits``: one bit per shift, then the bit of the pixel in R."""
            on, r = np.array(bits[:-1]), bits[-1]
            if on.sum() != r:
                return -np.inf
            return float((on * (sent + chance)).sum() + r * top)

        below = np.full((1, 1, *shape), -10_000 * UNITS_PER_NAT, np.int32)
        down = np.full((1, 1, n, *shape), -10_000 * UNITS_PER_NAT, np.int32)
        for d, (dy, dx) in enumerate(reference.list_shifts(n)):
            below[0, 0, at[0] + dy, at[1] + dx] = round(sent[d] * UNITS_PER_NAT)
        evidence = np.zeros((1, 1, *shape), np.int32)
        reference.pass_pools_up(below, prior, down, evidence, 1.0)
        off, on = find_best(lambda bits, top=top: score_pool(bits) - bits[-1] * top, n + 1, n)
        assert evidence[0, 0][at] / UNITS_PER_NAT == pytest.approx(on - off, abs=0.02)
        above = np.full((1, 1, *shape), -10_000 * UNITS_PER_NAT, np.int32)
        above[0, 0][at] = round(top * UNITS_PER_NAT)
        reference.pass_pools_down(below, prior, above, down, 0)
        for d in range(n):
            off, on = find_best(lambda bits, d=d, sent=sent: score_pool(bits) - bits[d] * sent[d], n + 1, d)
            assert down[0, 0, d][at] / UNITS_PER_NAT == pytest.approx(on - off, abs=0.02)


def test_pools_without_prior_would_fail(monkeypatch) -> None:
    """If all shifts in a pool had equal priors, messages would not be max-marginals (largest scores)."""
    whole = reference.pass_pools_up

    def pass_up_without_prior(below, prior, down, evidence, damping) -> None:
        whole(below, np.where(prior == OFF_IMAGE, OFF_IMAGE, 0), down, evidence, damping)

    monkeypatch.setattr(reference, "pass_pools_up", pass_up_without_prior)
    with pytest.raises(AssertionError):
        test_pool_messages_are_max_marginals(3)
