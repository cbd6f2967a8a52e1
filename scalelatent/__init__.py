"""Latent-variable models fitted to image sets of any size, out of core, on one machine or a Dask cluster.

>>> import scalelatent as sl
>>> sl.__version__
'0.1.0'

Names are loaded when they are first used (PEP 562), so that `import scalelatent` costs next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalelatent._above import offer
from scalelatent._lazy import attach

__version__ = "0.1.0"

if TYPE_CHECKING:  # what a type checker and an editor see; the same names as in _WHERE
    from .data import Dataset, open_dataset
    from .deploy.clusters import cluster
    from .deploy.versions import show_versions
    from .engine.callbacks import Callback
    from .estimators import (
        CapsuleRegression,
        CompressiveMBN,
        ConditionalRBM,
        MultilayerBootstrapNetwork,
        Search,
        load_model,
    )

__all__ = [
    "Callback",
    "CapsuleRegression",
    "CompressiveMBN",
    "ConditionalRBM",
    "Dataset",
    "MultilayerBootstrapNetwork",
    "Search",
    "__version__",
    "cluster",
    "load_model",
    "open_dataset",
    "show_versions",
]

_WHERE = {
    "Callback": ".engine.callbacks",
    "CapsuleRegression": ".models.capsule.estimator",
    "CompressiveMBN": ".models.mbn.compressive",
    "ConditionalRBM": ".models.crbm.estimator",
    "Dataset": ".data",
    "MultilayerBootstrapNetwork": ".models.mbn.estimator",
    "Search": ".search.search",
    "cluster": ".deploy.clusters",
    "load_model": ".estimators.persist",
    "open_dataset": ".data",
    "show_versions": ".deploy.versions",
}

__getattr__, __dir__ = attach(__name__, _WHERE)

offer("fit recorder", "scalelatent.jobs.recorder", "recorded")
offer("report", "scalelatent.jobs.reporting", "report_model")
