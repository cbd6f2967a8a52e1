"""Decoding finds the positions of known features in images, reconstructs images, and fills in pixels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from scalelatent.contract.learners import Block
from scalelatent.generators.images import image_set
from scalelatent.models.hcn.model.decode import (
    BeliefMap,
    Decoder,
    PlaceMap,
    ReconstructionMap,
    reconstruct,
)
from scalelatent.models.hcn.model.layer import FeatureLayer, from_features
from scalelatent.models.hcn.model.sampling import draw_images
from tests.models.hcn.cases import Kernels

BACKEND = Kernels()
LETTERS = image_set("letters", alphabet="AKSTX", noise=0.03, seed=3)
N = 50


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    features = LETTERS.features[:, None].astype(bool)
    layer = FeatureLayer((1, 24, 24), 5, features.shape[2:], 0.03, 0.03, 0.4, 2e-3)
    return Decoder(layer, from_features(features))


def make_block(x: np.ndarray) -> Block:
    return Block(x.reshape(len(x), -1), None, None, 0)


def test_the_true_positions_of_features_are_found(decoder) -> None:
    x, truth = LETTERS.rows(0, N)[0], LETTERS.truth(0, N)
    want = np.zeros((N, *decoder.layer.places), np.uint8)
    for n in range(N):
        for f, r, c in truth[n]:
            want[n, r, c, f] = 1
    found = PlaceMap(decoder).apply(BACKEND, make_block(x))
    assert (found & want).sum() >= 0.97 * want.sum()
    assert (found & ~want & 1).sum() <= 0.03 * want.sum()


def test_reconstructions_have_less_noise(decoder) -> None:
    x, clean = LETTERS.rows(0, N)[0], LETTERS.clean(0, N)
    found = ReconstructionMap(decoder).apply(BACKEND, make_block(x))[:, 0]
    assert (found != clean).mean() < 0.1 * (x != clean).mean()


def test_unknown_pixels_are_filled_in_and_known_ones_stay(decoder) -> None:
    x, clean = LETTERS.rows(0, N)[0].copy(), LETTERS.clean(0, N)
    hidden = np.random.default_rng(0).random(x.shape) < 0.3
    x[hidden] = 9
    unsure = replace(decoder, layer=replace(decoder.layer, missing=9))
    found = ReconstructionMap(unsure, fills=True).apply(BACKEND, make_block(x))[:, 0]
    assert_array_equal(found[~hidden], x[~hidden])
    assert (found[hidden] != clean[hidden]).mean() < 0.01
    evidence = decoder.layer.compute_evidence(make_block(x * (x != 9)).x)
    evidence[hidden.reshape(evidence.shape)] = 0
    again = reconstruct(decoder, evidence, np.arange(N), BACKEND, fills=True)[:, 0]
    assert_array_equal(again, found)


def test_a_belief_map_has_beliefs_and_the_share_of_explained_pixels(decoder) -> None:
    x = LETTERS.rows(0, N)[0]
    found = BeliefMap(decoder).apply(BACKEND, make_block(x))
    assert found.shape == (N, *BeliefMap(decoder).output()[0])
    assert ((found[:, -1] >= 0.8) & (found[:, -1] <= 1)).all()
    assert (found[:, -1] == 1).mean() > 0.5
    placed = PlaceMap(decoder).apply(BACKEND, make_block(x)).reshape(N, -1)
    assert ((found[:, :-1] > 0) == placed).mean() > 0.999


def test_rows_are_decoded_independently(decoder) -> None:
    x = LETTERS.rows(0, N)[0].reshape(N, -1)
    together = PlaceMap(decoder).apply(BACKEND, Block(x, None, None, 0))
    apart = [PlaceMap(decoder).apply(BACKEND, Block(x[n : n + 1], None, None, n))[0] for n in range(N)]
    assert_array_equal(together, apart)


def test_samples_consist_of_the_features(decoder) -> None:
    found = draw_images(decoder, 3, 0, 40, BACKEND)
    assert_array_equal(found[10:20], draw_images(decoder, 3, 10, 20, BACKEND))
    clean = draw_images(decoder, 3, 0, 40, BACKEND, noise=False)
    assert 0.02 < (found != clean).mean() < 0.04
    evidence = decoder.layer.compute_evidence(clean.reshape(40, -1))
    again = reconstruct(decoder, evidence, np.arange(40), BACKEND)
    assert (again != clean).mean() < 0.002
