"""The scikit-learn shells: parameters, fit, predict, save; they alone join a model to the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalelatent._lazy import attach

if TYPE_CHECKING:
    from .capsule import CapsuleRegression
    from .compressive import CompressiveMBN
    from .crbm import ConditionalRBM
    from .mbn import MultilayerBootstrapNetwork
    from .persist import load_model
    from .search import Search

__all__ = [
    "CapsuleRegression",
    "CompressiveMBN",
    "ConditionalRBM",
    "MultilayerBootstrapNetwork",
    "Search",
    "load_model",
]

_WHERE = {
    "CapsuleRegression": ".capsule",
    "CompressiveMBN": ".compressive",
    "ConditionalRBM": ".crbm",
    "MultilayerBootstrapNetwork": ".mbn",
    "Search": ".search",
    "load_model": ".persist",
}

__getattr__, __dir__ = attach(__name__, _WHERE)
