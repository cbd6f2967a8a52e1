"""Description lengths equal computations by hand; features that cost more bits than they save are removed."""

from __future__ import annotations

from math import isnan, log2

import numpy as np
import pytest

from scalelatent.contract.learners import Block
from scalelatent.contract.stats import Stats
from scalelatent.models.hcn.model.compression import (
    DescriptionLength,
    compression,
    count_bits,
    count_total_bits,
    find_paying_features,
)
from scalelatent.models.hcn.model.decode import Decoder
from scalelatent.models.hcn.model.layer import FeatureLayer, from_features
from tests.models.hcn.cases import Kernels

LAYER = FeatureLayer((1, 4, 6), 2, (2, 2), 1e-2, 1e-2, 0.5, 1e-2)
SQUARE, BAR = np.ones((1, 2, 2), bool), np.array([[[1, 1], [0, 0]]], bool)
IMAGE = np.array([[1, 1, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [0, 0, 0, 1, 1, 0], [0, 0, 0, 1, 1, 1]])


def entropy(p: float) -> float:
    return -p * log2(p) - (1 - p) * log2(1 - p)


def compute_counts(features: list[np.ndarray], x: np.ndarray = IMAGE) -> tuple[np.ndarray, Stats]:
    weights = from_features(np.stack(features))
    reduction = DescriptionLength(Decoder(LAYER, weights))
    stats = Stats.zeros(reduction.layout())
    backend = Kernels()
    reduction.accumulate(reduction.prepare(None, backend), Block(x.reshape(1, -1), None, None, 0), stats)
    return weights, stats


def test_the_description_length_of_bits_is_their_entropy() -> None:
    assert count_bits(2, 8) == pytest.approx(8 * entropy(0.25))
    assert count_bits(0, 8) == count_bits(8, 8) == count_bits(0, 0) == 0


def test_description_lengths_equal_those_by_hand() -> None:
    weights, stats = compute_counts([SQUARE, BAR])
    # The image has two squares, and one of its nine active pixels is not explained. Only the feature of the
    # square is used: it has 15 possible positions and 4 weights, which are all 1.
    assert [int(stats[name]) for name in ("rows", "known", "ones", "errors")] == [1, 24, 9, 1]
    assert stats["placed"].tolist() == [2, 0]
    assert stats["explained"].tolist() == [8, 0]
    want = 15 * entropy(2 / 15) + 24 * entropy(1 / 24)
    assert count_total_bits(LAYER, weights, stats) == pytest.approx(want)
    assert compression(LAYER, weights, stats) == pytest.approx(want / (24 * entropy(9 / 24)))
    assert find_paying_features(LAYER, weights, stats).tolist() == [True, False]


def test_a_feature_that_costs_more_than_it_saves_is_removed() -> None:
    once = np.zeros((4, 6), int)
    once[1:3, 2:4] = [[1, 0], [1, 1]]
    weights, stats = compute_counts([np.array([[[1, 0], [1, 1]]], bool), BAR], once)
    assert stats["placed"].tolist() == [1, 0]
    # H(q) is the entropy in bits of a binary variable with probability q. The image needs 24 H(3 / 24) = 13.0
    # bits without a feature, and 15 H(1 / 15) + 4 H(3 / 4) = 8.5 bits with one feature.
    assert count_total_bits(LAYER, weights, stats) == pytest.approx(15 * entropy(1 / 15) + 4 * entropy(3 / 4))
    assert find_paying_features(LAYER, weights, stats).tolist() == [True, False]
    # An image with one active pixel takes only 24 H(1 / 24) = 6.0 bits without a feature, so none pays.
    weights = from_features(np.array([[[[1, 0], [0, 0]]], [[[1, 1], [0, 0]]]], bool))
    stats["ones"][...] = stats["explained"][0] = 1
    assert not find_paying_features(LAYER, weights, stats).any()


def test_images_of_one_value_have_no_compression() -> None:
    assert isnan(compression(LAYER, *compute_counts([SQUARE, BAR], np.zeros((4, 6), int))))
