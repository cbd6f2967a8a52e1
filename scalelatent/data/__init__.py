"""Rows on disk or in memory: datasets, their writers, importers and generators, and the row grid.

Nothing heavy is imported until a name is used (PEP 562), so `import scalelatent` stays fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .create import create_dataset
    from .dataset import Dataset, open_dataset
    from .digits import InfiniteDigits, make_digits
    from .grid import RowGrid
    from .importers import import_idx, import_npy, import_npz
    from .writer import DatasetWriter

__all__ = [
    "Dataset",
    "DatasetWriter",
    "InfiniteDigits",
    "RowGrid",
    "create_dataset",
    "import_idx",
    "import_npy",
    "import_npz",
    "make_digits",
    "open_dataset",
]

_WHERE = {
    "Dataset": ".dataset",
    "DatasetWriter": ".writer",
    "InfiniteDigits": ".digits",
    "RowGrid": ".grid",
    "create_dataset": ".create",
    "import_idx": ".importers",
    "import_npy": ".importers",
    "import_npz": ".importers",
    "make_digits": ".digits",
    "open_dataset": ".dataset",
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
