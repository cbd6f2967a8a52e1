"""If all weights are multiplied by a factor, predictions stay close, or an error names the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import scalelatent as sl

RNG = np.random.default_rng(0)
Y = np.repeat(np.arange(3), 100)
X = (RNG.normal(size=(3, 6))[Y] * 3 + RNG.normal(size=(300, 6))).astype(np.float32)
MODELS: dict[str, Callable[[], Any]] = {
    "em": lambda: sl.CapsuleRegression(capsule_dim=2, max_iter=5, random_state=0),
    "stepwise": lambda: sl.CapsuleRegression(capsule_dim=2, algorithm="stepwise", random_state=0),
    "mixture": lambda: sl.LinearMixtureClassifier(n_components=2, n_dims=2, max_iter=3, random_state=0),
}


@pytest.mark.parametrize("factor", [1e-30, 1 / 300, 1e9])
@pytest.mark.parametrize("name", MODELS)
def test_a_common_factor_of_all_weights_hardly_changes_predictions(name: str, factor: float) -> None:
    plain = MODELS[name]().fit(X, Y)
    if name == "mixture" and factor > 1:
        pytest.skip("in a mixture, a row of weight w counts as w rows")
    scaled = MODELS[name]().fit(X, Y, sample_weight=np.full(300, factor))
    np.testing.assert_allclose(scaled.predict_proba(X), plain.predict_proba(X), atol=2e-3)


@pytest.mark.parametrize("factor", [1e-300, 1e300])
@pytest.mark.parametrize("name", MODELS)
def test_too_small_or_too_large_weights_are_refused(name: str, factor: float) -> None:
    with pytest.raises(ValueError, match=r"the largest sample_weight is 1e[+-]300.*divide sample_weight"):
        MODELS[name]().fit(X, Y, sample_weight=np.full(300, factor))
