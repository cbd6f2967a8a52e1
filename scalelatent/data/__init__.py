"""Public names for rows on disk or in memory: datasets, writers, importers, generators, and `RowGrid`.

The first use of a name imports its module (PEP 562), so that `import scalelatent` stays fast.
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
    from scalelatent.importers.arrow_tables import import_csv, import_parquet
    from scalelatent.importers.csr_archive import import_csr
    from scalelatent.importers.hdf5 import import_hdf5
    from scalelatent.importers.idx import import_idx
    from scalelatent.importers.image_folder import import_images
    from scalelatent.importers.mat import import_mat
    from scalelatent.importers.named import import_named
    from scalelatent.importers.npy import import_npy, import_npz
    from scalelatent.importers.svmlight import import_svmlight

    from .check import check_dataset
    from .dataset import Dataset, open_dataset
    from .write.append import append_rows
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
    "image_set",
    "image_set_of",
    "import_csr",
    "import_csv",
    "import_hdf5",
    "import_idx",
    "import_images",
    "import_mat",
    "import_named",
    "import_npy",
    "import_npz",
    "import_parquet",
    "import_svmlight",
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
    ".write.append": ("append_rows",),
    ".write.convert": ("convert_dataset",),
    ".write.shuffle": ("shuffle_dataset", "shuffled_rows"),
    ".write.writer": ("DatasetWriter", "create_dataset"),
    "scalelatent.engine.grid": ("RowGrid",),
    "scalelatent.generators.corrupted": ("make_corrupted",),
    "scalelatent.generators.digits": ("InfiniteDigits", "make_digits"),
    "scalelatent.generators.documents": ("ResampledDocuments", "make_documents"),
    "scalelatent.generators.images": ("ImageSet", "image_set", "image_set_of", "make_images"),
    "scalelatent.generators.make": ("repair_dataset",),
    "scalelatent.importers.arrow_tables": ("import_csv", "import_parquet"),
    "scalelatent.importers.csr_archive": ("import_csr",),
    "scalelatent.importers.hdf5": ("import_hdf5",),
    "scalelatent.importers.idx": ("import_idx",),
    "scalelatent.importers.image_folder": ("import_images",),
    "scalelatent.importers.mat": ("import_mat",),
    "scalelatent.importers.named": ("import_named",),
    "scalelatent.importers.npy": ("import_npy", "import_npz"),
    "scalelatent.importers.svmlight": ("import_svmlight",),
}

__getattr__, __dir__ = attach(__name__, _WHERE)
