"""Importers: files of other programs become datasets, a shard at a time, whatever their size."""

from __future__ import annotations

from .csr import import_csr
from .idx import import_idx
from .npy import import_npy, import_npz
from .svmlight import import_svmlight

__all__ = ["import_csr", "import_idx", "import_npy", "import_npz", "import_svmlight"]
