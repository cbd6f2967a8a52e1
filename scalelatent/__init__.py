"""Latent-variable models fitted to image sets of any size, out of core, on one machine or a Dask cluster.

>>> import scalelatent as sl
>>> sl.__version__
'0.1.0'

Names are loaded when they are first used (PEP 562), so that `import scalelatent` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:  # what a type checker and an editor see; the same names as in _WHERE
    from ._versions import show_versions
    from .data import Dataset, open_dataset
    from .engine.callbacks import Callback
    from .engine.cluster import cluster
    from .estimators import CapsuleRegression, load_model

__all__ = [
    "Callback",
    "CapsuleRegression",
    "Dataset",
    "__version__",
    "cluster",
    "load_model",
    "open_dataset",
    "show_versions",
]

_WHERE = {
    "Callback": ".engine.callbacks",
    "CapsuleRegression": ".estimators",
    "Dataset": ".data",
    "cluster": ".engine.cluster",
    "load_model": ".estimators",
    "open_dataset": ".data",
    "show_versions": "._versions",
}


def __getattr__(name: str) -> Any:
    try:
        module = _WHERE[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = getattr(importlib.import_module(module, __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
