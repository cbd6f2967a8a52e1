"""Base classes of the scikit-learn estimators. Each estimator itself is in the folder of its model."""

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
    "scalelatent.engine.saved_models": ("load_model",),
    "scalelatent.models.capsule.estimator": ("CapsuleRegression",),
    "scalelatent.models.crbm.estimator": ("ConditionalRBM",),
    "scalelatent.models.mbn.compressive": ("CompressiveMBN",),
    "scalelatent.models.mbn.estimator": ("MultilayerBootstrapNetwork",),
    "scalelatent.search.search": ("Search",),
}

__getattr__, __dir__ = attach(__name__, _WHERE)
