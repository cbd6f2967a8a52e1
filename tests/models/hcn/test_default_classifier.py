"""Compositional networks with default parameters classify binary images, with or without pixel shifts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier

import scalelatent as sl
from scalelatent.models.hcn.model.templates import TemplateEvidence

N_TRAIN, N_LINES = 600, 60


def load_binary_digits() -> tuple[np.ndarray, np.ndarray]:
    pixels, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    return (pixels[order] > 7).astype(np.uint8).reshape(-1, 8, 8), y[order]


def draw_lines() -> tuple[np.ndarray, np.ndarray]:
    """Return images of one line, and labels: 1 if the line is vertical, else 0.

    A line is at one of three offsets. The two templates (patterns) of a class cannot fit three offsets
    unless pixels may be shifted.
    """
    rng = np.random.default_rng(7)
    x, y = np.zeros((400, 9, 10), np.uint8), np.arange(400) % 2
    for image, is_vertical, place in zip(x, y, rng.integers(3, 6, 400), strict=True):
        image[(slice(2, 8), place) if is_vertical else (place, slice(2, 8))] = 1
    return x, y


def make_network(**params: Any) -> sl.HierarchicalCompositionalNetwork:
    return sl.HierarchicalCompositionalNetwork(**{"templates": 20, "random_state": 0, "n_jobs": 1} | params)


@pytest.fixture(scope="module")
def digits() -> sl.HierarchicalCompositionalNetwork:
    x, y = load_binary_digits()
    return make_network().fit(x[:N_TRAIN], y[:N_TRAIN])


def test_digits_are_classified_almost_as_well_as_by_neighbours(digits: Any) -> None:
    """The fit chooses pools (ranges of pixel shifts) of 1 x 1 pixels, which allow no shifts.

    With shifts of one pixel, digits of 8 x 8 pixels would be too similar.
    """
    x, y = load_binary_digits()
    flat = x.reshape(len(x), -1)
    neighbours = KNeighborsClassifier(3).fit(flat[:N_TRAIN], y[:N_TRAIN])
    assert digits.score(x[N_TRAIN:], y[N_TRAIN:]) > neighbours.score(flat[N_TRAIN:], y[N_TRAIN:]) - 0.06
    assert digits.pools_[0].shape == (1, 8, 8)


def test_lines_are_classified_by_shifts(tmp_path: Any) -> None:
    x, y = draw_lines()
    m = make_network(templates=2).fit(x[:N_LINES], y[:N_LINES])
    assert m.score(x[N_LINES:], y[N_LINES:]) > 0.98
    assert m.pools_[0].shape == (9, 9, 10)


def test_given_pools_are_not_chosen(digits: Any) -> None:
    x, y = load_binary_digits()
    m = make_network(pool=1, templates=2).fit(x[:100], y[:100])
    assert {record["restart"] for record in m.history_} == {0}
    assert m.pools_[0].shape == (1, 8, 8)


def test_chosen_pools_are_saved_and_kept(digits: Any, tmp_path: Any) -> None:
    x, y = load_binary_digits()
    digits.save(tmp_path / "m")
    again = sl.load_model(tmp_path / "m")
    assert_array_equal(again.transform(x[:50]), digits.transform(x[:50]))
    warm = again.set_params(warm_start=True).fit(x[:100], y[:100])
    assert_array_equal(warm.pools_[0], digits.pools_[0])


def test_the_last_validation_error_is_that_of_the_fitted_network() -> None:
    x, y = load_binary_digits()
    m = make_network().fit(x[:300], y[:300], validation=(x[300:400], y[300:400]))
    assert m.history_[-1]["validation_error"] == pytest.approx(1 - m.score(x[300:400], y[300:400]))


def test_templates_never_lose_all_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines of a class are at three offsets, but the class has one template (pattern) without shifts.

    So no pixel is on in most images of the template. The template must still have weights.
    """
    x, y = draw_lines()
    m = make_network(templates=1, pool=1).fit(x[:N_LINES], y[:N_LINES])
    assert m.used_[-1].all()
    whole = TemplateEvidence.update_beliefs

    def mutant(evidence: TemplateEvidence, first: np.ndarray, stats: Any) -> np.ndarray:
        off = TemplateEvidence(evidence.net, np.where(evidence.beliefs > 0, -1.0, evidence.beliefs))
        return whole(off, first, stats)

    monkeypatch.setattr(TemplateEvidence, "update_beliefs", mutant)
    assert not make_network(templates=1, pool=1).fit(x[:N_LINES], y[:N_LINES]).used_[-1].all()


def test_partial_fit_needs_labels() -> None:
    x, y = load_binary_digits()
    m = make_network(templates=2).partial_fit(x[:50], y[:50]).partial_fit(x[50:100], y[50:100])
    assert m.pools_[0].shape == (9, 8, 8)
    with pytest.raises(sl.errors.DataError, match="learns templates from labels alone: give y"):
        make_network(templates=2).partial_fit(x[:50])
