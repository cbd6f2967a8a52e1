"""What the scikit-learn shells of all models share; each shell lies in its model's folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalelatent._lazy import attach

if TYPE_CHECKING:
    from scalelatent.engine.saved_models import load_model
    from scalelatent.models.capsule.estimator import CapsuleRegression
    from scalelatent.models.crbm.estimator import ConditionalRBM
    from scalelatent.models.mbn.compressive import CompressiveMBN
    from scalelatent.models.mbn.estimator import MultilayerBootstrapNetwork
    from scalelatent.search.search import Search

__all__ = [
    "CapsuleRegression",
    "CompressiveMBN",
    "ConditionalRBM",
    "MultilayerBootstrapNetwork",
    "Search",
    "load_model",
]

_WHERE = {
    "CapsuleRegression": "scalelatent.models.capsule.estimator",
    "CompressiveMBN": "scalelatent.models.mbn.compressive",
    "ConditionalRBM": "scalelatent.models.crbm.estimator",
    "MultilayerBootstrapNetwork": "scalelatent.models.mbn.estimator",
    "Search": "scalelatent.search.search",
    "load_model": "scalelatent.engine.saved_models",
}

__getattr__, __dir__ = attach(__name__, _WHERE)
