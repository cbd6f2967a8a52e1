"""Images explained by drawings: against enumeration, and numba against the reference."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from scalelatent.models.hcn.kernels import reference
from scalelatent.models.hcn.kernels.cpu import explaining
from scalelatent.models.hcn.kernels.exact import ABSENT, GRID
from scalelatent.models.hcn.model.hierarchy import shift_priors

# images, (channels, height, width), side of a pool, features, their window
SHAPES = [
    (1, (1, 1, 1), 1, 1, (1, 1)),
    (2, (3, 4, 5), 3, 4, (2, 2)),
    (1, (2, 5, 6), 5, 2, (3, 1)),
    (3, (1, 6, 4), 3, 3, (3, 4)),
]


def draw(shape, seed: int = 0) -> tuple:
    """below, prior, weights that are on, where those of a feature begin, places; one feature has none."""
    n, image, side, n_features, window = shape
    rng = np.random.default_rng(seed)
    on = rng.random((n_features, image[0], *window)) < 0.4
    on[-1] = n_features == 1
    where = np.argwhere(on)
    begins = np.searchsorted(where[:, 0], np.arange(n_features + 1))
    below = np.rint(rng.normal(size=(n, *image)) * rng.choice([2, 5], (n, *image)) * GRID).astype(np.int32)
    places = image[1] - window[0] + 1, image[2] - window[1] + 1
    at = np.ascontiguousarray(where[:, 1:], np.int32)
    return below, shift_priors(image[1:], side, 0.9, seed), at, begins, places


def drawings(below: np.ndarray, seed: int, share: float = 0.4) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images, pixels that are on, where those of a drawing begin; the second has none."""
    rng, runs = np.random.default_rng(seed), list[np.ndarray]()
    images = rng.integers(0, len(below), 4)
    for k in range(4):
        runs.append(np.flatnonzero(rng.random(below[0].size) < share * (k != 1)).astype(np.int32))
    return images, np.concatenate(runs), np.cumsum([0, *map(len, runs)])


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("side", "window"), [(1, (2, 3)), (3, (1, 1)), (3, (3, 2)), (5, (2, 2))])
def test_places_of_images_that_are_nearly_empty(side, window, seed) -> None:
    """What images say where they are alike is computed once."""
    _, prior, at, begins, places = draw((1, (2, 9, 8), side, 3, window), seed)
    rng = np.random.default_rng(seed)
    below = np.full((4, 2, 9, 8), -2 * GRID, np.int32)
    for n in range(1 + seed % 2, 4):  # of which each has one pixel, at a border too
        below[n, rng.integers(2), rng.integers(9), rng.integers(8)] = 5 * GRID
    want = reference.place_values(below, prior, at, begins, places)
    assert_array_equal(explaining.place_values(below, prior, at, begins, places), want)
    assert len(np.unique(want, axis=0)) > 1


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", SHAPES)
def test_as_the_reference(shape, seed) -> None:
    below, prior, at, begins, places = draw(shape, seed)
    want = reference.place_values(below, prior, at, begins, places)
    assert_array_equal(explaining.place_values(below, prior, at, begins, places), want)
    given = drawings(below, seed)
    for a, b in zip(
        explaining.explain(below, prior, *given), reference.explain(below, prior, *given), strict=True
    ):
        assert_array_equal(a, b)
    rng = np.random.default_rng(seed)
    price = rng.integers(0, 3 * GRID, places, dtype=np.int32)
    drawn, lit = (rng.integers(0, 2, below.shape, dtype=np.int32) for _ in range(2))
    taken = rng.random(want.shape) < 0.2
    kept = [drawn.copy(), lit.copy()]
    gains = reference.put_down(below, prior, at, begins, price, *kept, taken)
    found = explaining.put_down(below, prior, at, begins, price, drawn, lit, taken)
    assert_array_equal(found, gains)
    assert_array_equal(drawn, kept[0])
    assert_array_equal(lit, kept[1])
    assert not (found[taken] != 0).any()


def says(below: np.ndarray, prior: np.ndarray, pixels: list[tuple[int, ...]], ways: tuple[int, ...]) -> int:
    """Log priors of these shifts, and what the places say, each once; ABSENT where one leaves the image."""
    lands, total = set(), 0
    for (channel, y, x), d in zip(pixels, ways, strict=True):
        if prior[d, y, x] == ABSENT:
            return ABSENT
        dy, dx = reference.shifts(len(prior))[d]
        lands.add((channel, y + dy, x + dx))
        total += int(prior[d, y, x])
    return total + sum(int(below[place]) for place in lands)


def test_no_pixel_has_a_better_shift() -> None:
    """What is told is what these shifts say: with one changed never more, and seldom with all."""
    best = 0
    for seed in range(40):
        below, prior, *_ = draw((1, (2, 3, 4), 3, 1, (1, 1)), seed)
        rng = np.random.default_rng(seed)
        run = np.sort(rng.choice(24, 4, replace=False)).astype(np.int32)
        shift, first, told = explaining.explain(below, prior, np.zeros(1, int), run, np.array([0, 4]))
        pixels = [tuple(int(i) for i in np.unravel_index(p, (2, 3, 4))) for p in run]
        found = says(below[0], prior, pixels, tuple(shift.tolist()))
        assert told.sum() == found
        assert first.sum() == len(
            {(p[0], p[1] + d // 3, p[2] + d % 3) for p, d in zip(pixels, shift, strict=True)}
        )
        all_ways = list(itertools.product(range(9), repeat=4))
        said = [says(below[0], prior, pixels, ways) for ways in all_ways]
        near = [np.count_nonzero(shift != ways) <= 1 for ways in all_ways]
        assert found == np.max(np.array(said)[near])
        best += found == max(said)
    assert best > 20


def test_places_that_count_twice_are_noticed(monkeypatch) -> None:
    """The mutant of the test above: what is explained already pays again."""
    whole = explaining.explain

    def twice(below, prior, images, pixels, begins):
        alone = [whole(below, prior, images, pixels[i : i + 1], np.array([0, 1])) for i in range(len(pixels))]
        return (*(np.concatenate([one[k] for one in alone]) for k in range(2)), sum(one[2] for one in alone))

    monkeypatch.setattr(explaining, "explain", twice)
    with pytest.raises(AssertionError):
        test_no_pixel_has_a_better_shift()


def test_features_are_put_down_while_they_pay() -> None:
    """Two strokes: a feature of each pays; one between them, that both pay for, is not put down too."""
    below = np.full((1, 1, 5, 5), -4 * GRID, np.int32)
    below[0, 0, 2, 0:2] = below[0, 0, 2, 3:5] = 4 * GRID
    prior = shift_priors((5, 5), 3, 0.9, 0)
    at, begins = np.array([[0, 0, 0], [0, 0, 1]], np.int32), np.array([0, 2])
    price = np.full((5, 4), 2 * GRID, np.int32)
    drawn, lit = (np.zeros(below.shape, np.int32) for _ in range(2))
    gains = explaining.put_down(below, prior, at, begins, price, drawn, lit, np.zeros((1, 1, 5, 4), bool))
    assert [tuple(at) for at in np.argwhere(gains)] == [(0, 0, 2, 0), (0, 0, 2, 3)]
    alone = explaining.place_values(below, prior, at, begins, (5, 4))
    assert (alone[0, 0, 2] > price[2]).all()
    assert_array_equal(gains[gains > 0], alone[gains > 0])
    assert lit.sum() == drawn.sum() == 4
