"""Latent-variable models fitted to data sets of any size, out of core, on one machine or a Dask cluster.

>>> import scalelatent as sl
>>> sl.__version__
'0.1.0'

Names are loaded when they are first used (PEP 562), so that `import scalelatent` costs next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scalelatent._lazy import attach
from scalelatent._registry import register

__version__ = "0.1.0"

if TYPE_CHECKING:  # the public names, for type checkers and editors
    from .data import Dataset, open_dataset
    from .deploy.checks import show_versions
    from .deploy.clusters import cluster
    from .engine.callbacks import Callback
    from .engine.saved_models import load_model
    from .models.capsule.estimator import CapsuleRegression
    from .models.crbm.estimator import ConditionalRBM
    from .models.hcn.estimator import HierarchicalCompositionalNetwork
    from .models.linear_mixture.estimator import LinearMixture, LinearMixtureClassifier
    from .models.mbn.compressive import CompressiveMBN
    from .models.mbn.estimator import MultilayerBootstrapNetwork
    from .search.search import Search

__all__ = [
    "Callback",
    "CapsuleRegression",
    "CompressiveMBN",
    "ConditionalRBM",
    "Dataset",
    "HierarchicalCompositionalNetwork",
    "LinearMixture",
    "LinearMixtureClassifier",
    "MultilayerBootstrapNetwork",
    "Search",
    "__version__",
    "cluster",
    "load_model",
    "open_dataset",
    "show_versions",
]

_WHERE = {
    ".data": ("Dataset", "open_dataset"),
    ".deploy.clusters": ("cluster",),
    ".deploy.checks": ("show_versions",),
    ".engine.callbacks": ("Callback",),
    ".engine.saved_models": ("load_model",),
    ".search.search": ("Search",),
}

_load, _names = attach(__name__, _WHERE)


def __getattr__(name: str) -> Any:
    # The class of an estimator is named in `KINDS` of the folder of its model.
    if name[:1].isupper() and not any(name in names for names in _WHERE.values()):
        from scalelatent.contract.kinds import load_own_kinds

        for kind in load_own_kinds().values():
            if kind.estimator.endswith(f":{name}"):
                return globals().setdefault(name, kind.estimator_class())
    return _load(name)


def __dir__() -> list[str]:
    return sorted({*_names(), *__all__})


register("fit recorder", "scalelatent.jobs.recorder", "record_fit")
register("report", "scalelatent.jobs.runs", "report_model")
