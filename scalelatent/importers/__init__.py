"""Importers: files of other programs become datasets, a shard at a time, whatever their size."""

from __future__ import annotations

from .arrow_tables import import_arrow, import_csv, import_parquet
from .csr_archive import import_csr
from .hdf5 import import_hdf5
from .hugging_face import import_hf
from .idx import import_idx
from .image_folder import import_images
from .mat import import_mat
from .named import fetch_named, import_named
from .npy import import_npy, import_npz
from .svmlight import import_svmlight
from .tokens import import_tokens, leaf_topics
from .zarr_arrays import import_zarr

__all__ = [
    "fetch_named",
    "import_arrow",
    "import_csr",
    "import_csv",
    "import_hdf5",
    "import_hf",
    "import_idx",
    "import_images",
    "import_mat",
    "import_named",
    "import_npy",
    "import_npz",
    "import_parquet",
    "import_svmlight",
    "import_tokens",
    "import_zarr",
    "leaf_topics",
]
