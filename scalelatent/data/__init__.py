"""Rows on disk or in memory: datasets, their writers, importers and generators, and the row grid.

Nothing heavy is imported until a name is used (PEP 562), so `import scalelatent` stays fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalelatent._lazy import attach

if TYPE_CHECKING:
    from .append import append_rows
    from .check import check_dataset
    from .convert import convert_dataset
    from .create import create_dataset
    from .dataset import Dataset, open_dataset
    from .digits import InfiniteDigits, make_digits
    from .documents import ResampledDocuments, make_documents
    from .generators.corrupted import make_corrupted
    from .generators.images import ImageSet, image_set, image_set_of, make_images
    from .grid import RowGrid
    from .importers import (
        fetch_named,
        import_csr,
        import_hdf5,
        import_idx,
        import_images,
        import_mat,
        import_named,
        import_npy,
        import_npz,
        import_svmlight,
        import_tokens,
        leaf_topics,
    )
    from .make import repair_dataset
    from .shuffle import shuffle_dataset, shuffled_rows
    from .writer import DatasetWriter

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
    "import_csr",
    "import_hdf5",
    "import_idx",
    "import_images",
    "import_mat",
    "import_named",
    "import_npy",
    "import_npz",
    "import_svmlight",
    "import_tokens",
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
    "Dataset": ".dataset",
    "DatasetWriter": ".writer",
    "ImageSet": ".generators.images",
    "InfiniteDigits": ".digits",
    "ResampledDocuments": ".documents",
    "RowGrid": ".grid",
    "append_rows": ".append",
    "check_dataset": ".check",
    "convert_dataset": ".convert",
    "create_dataset": ".create",
    "fetch_named": ".importers",
    "image_set": ".generators.images",
    "image_set_of": ".generators.images",
    "import_csr": ".importers",
    "import_hdf5": ".importers",
    "import_idx": ".importers",
    "import_images": ".importers",
    "import_mat": ".importers",
    "import_named": ".importers",
    "import_npy": ".importers",
    "import_npz": ".importers",
    "import_svmlight": ".importers",
    "import_tokens": ".importers",
    "leaf_topics": ".importers",
    "make_corrupted": ".generators.corrupted",
    "make_digits": ".digits",
    "make_documents": ".documents",
    "make_images": ".generators.images",
    "open_dataset": ".dataset",
    "repair_dataset": ".make",
    "shuffle_dataset": ".shuffle",
    "shuffled_rows": ".shuffle",
}

__getattr__, __dir__ = attach(__name__, _WHERE)
