"""Templates (patterns of classes) start from images of their class, and learn from rows assigned to them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from scalelatent.contract.learners import Block
from scalelatent.contract.stats import Stats
from scalelatent.engine.backend import make_backend
from scalelatent.models.hcn.kernels.units import UNITS_PER_NAT
from scalelatent.models.hcn.model.hierarchy import Hierarchy
from scalelatent.models.hcn.model.multi_layer_learning import BatchNetworkLearner
from scalelatent.models.hcn.model.templates import RowCodes, TemplateEvidence, choose_first_images
from tests.models.hcn.test_multi_layer_learning import (
    make_block,
    make_true_weights,
    make_two_layers,
    measure_error,
)


def collect_stats(reduction: Any, *blocks: Block) -> Stats:
    stats, prepared = Stats.zeros(reduction.layout()), reduction.prepare(None, make_backend("cpu"))
    for block in blocks:
        reduction.accumulate(prepared, block, stats)
    return stats


def learn_beliefs(net: Hierarchy, images: Any, numbers: list[int], passes: int = 1) -> np.ndarray:
    """Return the beliefs (log odds of weights) after passes over forty images, given the true features.

    ``numbers`` are the indices of the images from which the templates (patterns of classes) start.
    """
    first = net.first_beliefs()
    beliefs = np.where(
        np.arange(len(first)) < net.split(first)[0].size, make_true_weights(net, images), first
    )
    begins = choose_first_images(net, np.array(numbers), make_block(images, 0, 40).y[numbers])
    for number in range(passes):
        evidence = TemplateEvidence(net, beliefs, *(begins if number == 0 else ()))
        beliefs = evidence.update_beliefs(
            first, collect_stats(evidence, make_block(images, 0, 25), make_block(images, 25, 40))
        )
    return beliefs


def test_a_template_is_the_evidence_of_its_image() -> None:
    """A template (pattern of a class) from an image has weights where evidence + prior log odds is above 0.

    Its score for that image is the sum of the evidence at these weights.
    """
    net, images = make_two_layers(classes=(0, 1, 2, 3))
    numbers = list(range(7, 40))
    beliefs, y = learn_beliefs(net, images, numbers), make_block(images, 0, 40).y
    weights = [part > 0 for part in net.split(beliefs)]
    prior = net.split(net.first_beliefs())[-1]
    for template in range(4):
        row = next(number for number in numbers if y[number] == template)
        pixels = net.layers[0].read_evidence(make_block(images, row, row + 1))
        made, scores = net.forward(weights, pixels, make_backend("cpu"))[-1]
        speaks = made[0] + UNITS_PER_NAT * prior[:, ::-1, ::-1, template] > 0
        assert 0 < weights[-1][..., template].sum() == speaks.sum()
        assert scores[0, template, 0, 0] == made[0][speaks].sum()


def test_unflipped_windows_would_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are stored flipped in both axes; templates that start without this flip get other weights."""

    def mutant(evidence: TemplateEvidence, first: np.ndarray, stats: Stats) -> np.ndarray:
        below, priors = evidence.net.split(first)
        beliefs = priors + np.moveaxis(stats["evidence"], 0, -1)
        return np.concatenate([evidence.beliefs[: below.size], beliefs.ravel()])

    monkeypatch.setattr(TemplateEvidence, "update_beliefs", mutant)
    with pytest.raises(AssertionError):
        test_a_template_is_the_evidence_of_its_image()


def test_templates_of_few_images_classify() -> None:
    net, images = make_two_layers(13, 2, classes=(0, 1, 2, 3))
    learner = BatchNetworkLearner(net, n_classes=4)
    state = learner.start()
    found = type(state)(learn_beliefs(net, images, list(range(40)), 3), state.first)
    assert measure_error(learner, found, images) < 0.05


def test_rows_go_to_used_templates_of_their_class() -> None:
    net, images = make_two_layers(classes=(0, 0, 1, 1))
    beliefs = make_true_weights(net, images)
    net.split(beliefs)[-1][..., 0] = -1.0  # ``split`` returns views: switch off all weights of template 0.
    x, y = images.rows(0, 40)
    of_class = np.array([0, 0, 1, 1])
    for codes in (y % 2, np.full(40, -1)):
        evidence = TemplateEvidence(net, beliefs)
        block = Block(x.reshape(40, -1), codes.astype(np.int32), None, 0)
        weights = [part > 0 for part in net.split(beliefs)]
        pixels = net.layers[0].read_evidence(block)
        made, scores = net.forward(weights, pixels, make_backend("cpu"))[-1]
        allowed = (of_class == codes[:, None]) | (codes < 0)[:, None]
        allowed[:, 0] = False
        best = np.where(allowed, scores[..., 0, 0], -np.inf).argmax(axis=1)
        wanted = np.zeros((4, *made.shape[1:]))
        np.add.at(wanted, best, made / UNITS_PER_NAT)
        assert_array_equal(collect_stats(evidence, block)["evidence"], wanted)
        assert not wanted[0].any()


def test_ignoring_labels_would_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test of assigned rows detects an assignment to the best template of any class."""
    whole = TemplateEvidence.accumulate

    def mutant(evidence: TemplateEvidence, prepared: Any, block: Block, stats: Stats) -> None:
        whole(evidence, prepared, replace(block, y=np.full(len(block.x), -1, np.int32)), stats)

    monkeypatch.setattr(TemplateEvidence, "accumulate", mutant)
    with pytest.raises(AssertionError):
        test_rows_go_to_used_templates_of_their_class()


def test_first_images_are_chosen_from_each_class() -> None:
    net, _ = make_two_layers(classes=(0, 0, 1, 1))
    numbers, codes = np.array([9, 4, 7, 1, 3]), np.array([1, -1, 0, 0, 0])
    taken, templates = choose_first_images(net, numbers, codes)
    assert taken.tolist() == [1, 7, 9]
    assert templates.tolist() == [1, 0, 2]
    clusters, _ = make_two_layers()
    taken, templates = choose_first_images(clusters, numbers, codes)
    assert taken.tolist() == [1, 4, 7, 9]
    assert templates.tolist() == [3, 1, 2, 0]
    block = Block(np.zeros((6, 1)), np.array([2, -1, 0, 1, 1, 1], np.int32), None, 3)
    assert collect_stats(RowCodes(np.array([1, 3, 4, 5, 99])), block)["codes"].tolist() == [0, 3, 0, 1, 0]
