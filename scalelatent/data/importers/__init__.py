"""Importers: files of other programs become datasets, a shard at a time, whatever their size."""

from __future__ import annotations

from .hdf5 import import_hdf5
from .idx import import_idx
from .images import import_images
from .mat import import_mat
from .named import fetch_named, import_named
from .npy import import_npy, import_npz

__all__ = [
    "fetch_named",
    "import_hdf5",
    "import_idx",
    "import_images",
    "import_mat",
    "import_named",
    "import_npy",
    "import_npz",
]
