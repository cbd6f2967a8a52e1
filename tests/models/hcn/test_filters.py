"""Filters by numba find the same edges in grey images as those in numpy, with the right directions."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from scalelatent.contract.learners import Block
from scalelatent.errors import DataError
from scalelatent.models.hcn.kernels import reference
from scalelatent.models.hcn.kernels.cpu import filters as compiled
from scalelatent.models.hcn.model.filters import MIN_STEP, STEP_RESPONSE, OrientedFilters
from scalelatent.models.hcn.model.layer import FeatureLayer


@pytest.mark.parametrize(("n", "size"), [(16, 3), (16, 7), (8, 5), (2, 1 + 2)])
@pytest.mark.parametrize("shape", [(5, 9, 12), (1, 1, 1), (2, 2, 40), (3, 28, 28)])
def test_edges_equal_the_reference(n: int, size: int, shape: tuple[int, int, int]) -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, shape).astype(np.uint8)
    images[0] = 255 * (images[0] > 100)  # Many pixels are equal, as in flat areas.
    weights = OrientedFilters(n, size).weights
    for least in (0, MIN_STEP * STEP_RESPONSE, 255 * STEP_RESPONSE):
        want, found = (np.full((shape[0], n, *shape[1:]), 7, np.uint8) for _ in range(2))
        reference.oriented_edges(images, weights, least, want)
        compiled.oriented_edges(images, weights, np.int32(least), found)
        assert_array_equal(found, want)


@pytest.mark.parametrize("size", [3, 7])
@pytest.mark.parametrize("direction", range(16))
def test_the_filter_of_the_edges_direction_is_on_most_often(size: int, direction: int) -> None:
    """The image is bright on one side of a straight edge, which has one of 16 directions."""
    angle = 2 * np.pi * direction / 16
    y, x = np.indices((21, 21)) - 10
    # The grey value of a pixel is the share of its area that is bright.
    fine = np.clip((x * np.cos(angle) + y * np.sin(angle)) + 0.5, 0, 1)
    edges = OrientedFilters(16, size).find_edges(np.uint8(np.rint(255 * fine))[None])[0]
    middle = edges[:, 7:14, 7:14]
    assert middle.sum(axis=0).max() == 1
    on = np.bincount(np.nonzero(middle)[0], minlength=16)
    assert on.argmax() == direction
    # The neighbouring directions may win at some pixels, because small filters do not resolve 22.5 degrees.
    assert on[[(direction - 1) % 16, direction, (direction + 1) % 16]].sum() == on.sum() > 0


@pytest.mark.parametrize(("least", "how"), [(MIN_STEP, ()), (16, (16,))])
def test_only_steps_of_the_least_size_are_edges(least: int, how: tuple[int, ...]) -> None:
    images = np.zeros((2, 9, 9), np.uint8)
    images[0, :, 5:], images[1, :, 5:] = least, least - 1
    found = OrientedFilters(16, 3, *how).find_edges(images)
    # Both columns beside the step from dark to bright are edges.
    assert_array_equal(np.argwhere(found[0, :, 4, :7]), [[0, 4], [0, 5]])
    assert not found[1, :, 1:-1, :7].any()  # A smaller step is no edge.


def make_grey_layer() -> FeatureLayer:
    """Return a layer whose filters find edges in grey images of 5 x 6 pixels."""
    return FeatureLayer((16, 5, 6), 3, (2, 2), 1e-3, 1e-3, 0.25, 1e-3, filters=OrientedFilters(16, 3))


def make_block(x: np.ndarray) -> Block:
    return Block(x.reshape(len(x), -1), None, None, 7)


def test_a_flipped_pixel_is_an_edge_only_for_small_filters() -> None:
    images = np.zeros((1, 9, 9), np.uint8)
    images[0, 4, 4] = 255
    # The eight neighbours of the flipped pixel are edges.
    assert OrientedFilters(16, 3).find_edges(images).sum() == 8
    assert not OrientedFilters(16, 5).find_edges(images).any()


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_filter_channels_are_the_evidence_of_grey_images(dtype: type) -> None:
    layer, images = make_grey_layer(), np.random.default_rng(0).integers(0, 256, (4, 5, 6)).astype(np.uint8)
    assert layer.input_shape == (1, 5, 6)
    off, on = layer.evidence_values
    edges = OrientedFilters(16, 3).find_edges(images)
    assert 0 < edges.mean() <= 1 / 16
    assert_array_equal(layer.read_evidence(make_block(images.astype(dtype))), np.where(edges, on, off))
    # Images of zeros are accepted, and have no edge.
    assert (layer.read_evidence(make_block(np.zeros((2, 5, 6), dtype))) == off).all()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0.5, "row 8, pixel 2 is 0.5: filters need grey images of whole numbers from 0 to 255"),
        (-1, "row 8, pixel 2 is -1"),
        (256, "row 8, pixel 2 is 256"),
        (np.nan, "row 8, pixel 2 is nan"),
        (1, "rows from 7 on hold only 0 and 1, but filters find the edges of grey images: remove filters"),
    ],
)
def test_images_that_are_not_grey_are_refused(value: float, message: str) -> None:
    x = np.zeros((3, 30), np.float32)
    x[1, 2] = value
    with pytest.raises(DataError, match=message):
        make_grey_layer().read_evidence(make_block(x))
