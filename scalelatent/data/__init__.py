"""Rows on disk or in memory: datasets, their writers, importers and generators, and the row grid.

Nothing heavy is imported until a name is used (PEP 562), so `import scalelatent` stays fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalelatent._lazy import attach

if TYPE_CHECKING:
    from scalelatent.engine.grid import RowGrid
    from scalelatent.generators.corrupted import make_corrupted
    from scalelatent.generators.digits import InfiniteDigits, make_digits
    from scalelatent.generators.documents import ResampledDocuments, make_documents
    from scalelatent.generators.images import ImageSet, image_set, image_set_of, make_images
    from scalelatent.generators.make import repair_dataset
    from scalelatent.importers import (
        fetch_named,
        import_arrow,
        import_csr,
        import_csv,
        import_hdf5,
        import_hf,
        import_idx,
        import_images,
        import_mat,
        import_named,
        import_npy,
        import_npz,
        import_parquet,
        import_svmlight,
        import_tokens,
        import_zarr,
        leaf_topics,
    )
    from scalelatent.importers.append_rows import append_rows

    from .check import check_dataset
    from .dataset import Dataset, open_dataset
    from .write.convert import convert_dataset
    from .write.shuffle import shuffle_dataset, shuffled_rows
    from .write.writer import DatasetWriter, create_dataset

__all__ = [
    "Dataset",
    "DatasetWriter",
    "ImageSet",
    "InfiniteDigits",
    "ResampledDocuments",
    "RowGrid",
    "append_rows",
    "check_dataset",
    "convert_dataset",
    "create_dataset",
    "fetch_named",
    "image_set",
    "image_set_of",
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
    "make_corrupted",
    "make_digits",
    "make_documents",
    "make_images",
    "open_dataset",
    "repair_dataset",
    "shuffle_dataset",
    "shuffled_rows",
]

_WHERE = {
    ".check": ("check_dataset",),
    ".dataset": ("Dataset", "open_dataset"),
    ".write.convert": ("convert_dataset",),
    ".write.shuffle": ("shuffle_dataset", "shuffled_rows"),
    ".write.writer": ("DatasetWriter", "create_dataset"),
    "scalelatent.engine.grid": ("RowGrid",),
    "scalelatent.generators.corrupted": ("make_corrupted",),
    "scalelatent.generators.digits": ("InfiniteDigits", "make_digits"),
    "scalelatent.generators.documents": ("ResampledDocuments", "make_documents"),
    "scalelatent.generators.images": ("ImageSet", "image_set", "image_set_of", "make_images"),
    "scalelatent.generators.make": ("repair_dataset",),
    "scalelatent.importers": (
        "fetch_named", "import_arrow", "import_csr", "import_csv", "import_hdf5", "import_hf", "import_idx",
        "import_images", "import_mat", "import_named", "import_npy", "import_npz", "import_parquet",
        "import_svmlight", "import_tokens", "import_zarr", "leaf_topics",
    ),
    "scalelatent.importers.append_rows": ("append_rows",),
}  # fmt: skip

__getattr__, __dir__ = attach(__name__, _WHERE)
