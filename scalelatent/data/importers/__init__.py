"""Importers: files of other programs become datasets, a shard at a time, whatever their size."""

from __future__ import annotations

from .idx import import_idx
from .npy import import_npy, import_npz

__all__ = ["import_idx", "import_npy", "import_npz"]
