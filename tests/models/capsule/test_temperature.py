"""The temperature of capsule regression makes probabilities match accuracies, and changes no class."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.metrics import log_loss

import scalelatent as sl
from scalelatent.models.capsule.fit import TEMPERATURES
from scalelatent.reductions.temperature import apply_temperature, choose_temperature, losses_at_temperatures

ORDER = np.random.default_rng(0).permutation(1797)
X, Y = (part[ORDER] for part in load_digits(return_X_y=True))
TRAIN, HELD, TEST = slice(900), slice(900, 1300), slice(1300, None)


def compute_calibration_error(p: np.ndarray, y: np.ndarray, bins: int = 15) -> float:
    """Return the mean absolute difference of certainty and accuracy, over bins of equal numbers of rows."""
    certainty, right = p.max(axis=1), p.argmax(axis=1) == y
    parts = np.array_split(np.argsort(certainty, kind="stable"), bins)
    return sum(abs(certainty[rows].sum() - right[rows].sum()) for rows in parts) / len(y)


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("options", [{}, {"projection": 30}, {"architecture": "one_vs_all"}])
def test_probabilities_are_calibrated(options: dict[str, object], held: bool) -> None:
    model = sl.CapsuleRegression(capsule_dim=4, random_state=0, n_jobs=1, **options)
    model.fit(X[TRAIN], Y[TRAIN], validation=(X[HELD], Y[HELD]) if held else None)
    error = compute_calibration_error(model.predict_proba(X[TEST]), Y[TEST])
    model.set_params(temperature=1.0).fit(X[TRAIN], Y[TRAIN])
    assert error < 0.05 < 0.3 < compute_calibration_error(model.predict_proba(X[TEST]), Y[TEST])


def test_the_temperature_has_the_least_log_loss_of_validation_rows() -> None:
    model = sl.CapsuleRegression(capsule_dim=2, random_state=0, n_jobs=1)
    model.fit(X[TRAIN], Y[TRAIN], validation=(X[HELD], Y[HELD]))
    chosen = model.temperature_
    model.set_params(temperature=1.0)._set_fitted_attributes(temperature_=1.0)
    p = model.predict_proba(X[HELD])
    losses = [log_loss(Y[HELD], apply_temperature(p, t)) for t in (chosen / 1.1, chosen, chosen * 1.1)]
    assert losses[1] < min(losses[0], losses[2])


def test_a_given_temperature_is_used_and_changes_no_class() -> None:
    fits = [
        sl.CapsuleRegression(capsule_dim=2, temperature=t, random_state=0, n_jobs=1).fit(X[TRAIN], Y[TRAIN])
        for t in (1.0, 0.2)
    ]
    assert [one.temperature_ for one in fits] == [1.0, 0.2]
    raw, sharp = (one.predict_proba(X[TEST]) for one in fits)
    np.testing.assert_allclose(sharp, raw**5 / (raw**5).sum(axis=1, keepdims=True), rtol=1e-9)
    np.testing.assert_array_equal(fits[0].predict(X[TEST]), fits[1].predict(X[TEST]))


def test_a_saved_model_keeps_its_temperature(tmp_path: Path) -> None:
    model = sl.CapsuleRegression(capsule_dim=2, random_state=0, n_jobs=1).fit(X[TRAIN], Y[TRAIN])
    model.save(tmp_path / "model")
    np.testing.assert_array_equal(
        sl.load_model(tmp_path / "model").predict_proba(X[TEST]), model.predict_proba(X[TEST])
    )


def test_every_nth_row_of_a_large_dataset_chooses_the_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    """CALIBRATION_ROWS = 300 selects every third of the 900 rows, for any block size."""
    monkeypatch.setattr("scalelatent.models.capsule.fit.CALIBRATION_ROWS", 300)
    given = {"architecture": "multiclass", "capsule_dim": 2, "random_state": 0, "n_jobs": 1, "n_epochs": 3}
    found = {
        block: sl.CapsuleRegression(**given)
        .fit(X[TRAIN], Y[TRAIN], engine={"block_rows": block})
        .temperature_
        for block in (100, 256)
    }
    assert found[100] == pytest.approx(found[256], rel=1e-6)
    monkeypatch.setattr("scalelatent.models.capsule.fit.CALIBRATION_ROWS", 900)
    every = sl.CapsuleRegression(**given).fit(X[TRAIN], Y[TRAIN])
    assert every.temperature_ != pytest.approx(found[100], rel=1e-6)


def test_losses_are_log_losses() -> None:
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(4), 50)
    y, weight = rng.integers(0, 4, 50), rng.uniform(0.5, 2.0, 50)
    gaps = np.log(p).max(axis=1, keepdims=True) - np.log(p)
    expected = [
        log_loss(y, apply_temperature(p, t), sample_weight=weight, normalize=False, labels=range(4))
        for t in (0.3, 1.0)
    ]
    np.testing.assert_allclose(
        losses_at_temperatures(gaps, y, weight, np.array([0.3, 1.0])), expected, rtol=1e-9
    )


def test_the_chosen_temperature_may_be_between_the_tried_ones() -> None:
    best = 0.31
    assert choose_temperature(TEMPERATURES, np.log(TEMPERATURES / best) ** 2) == pytest.approx(best, rel=1e-6)
    assert choose_temperature(TEMPERATURES, TEMPERATURES) == TEMPERATURES[0]
