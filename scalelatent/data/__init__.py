"""Rows on disk or in memory: datasets, their writers, importers and generators, and the row grid.

Nothing heavy is imported until a name is used (PEP 562), so `import scalelatent` stays fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalelatent._lazy import attach

if TYPE_CHECKING:
    from .create import create_dataset
    from .dataset import Dataset, open_dataset
    from .digits import InfiniteDigits, make_digits
    from .documents import ResampledDocuments, make_documents
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
    )
    from .writer import DatasetWriter

__all__ = [
    "Dataset",
    "DatasetWriter",
    "InfiniteDigits",
    "ResampledDocuments",
    "RowGrid",
    "create_dataset",
    "fetch_named",
    "import_csr",
    "import_hdf5",
    "import_idx",
    "import_images",
    "import_mat",
    "import_named",
    "import_npy",
    "import_npz",
    "import_svmlight",
    "make_digits",
    "make_documents",
    "open_dataset",
]

_WHERE = {
    "Dataset": ".dataset",
    "DatasetWriter": ".writer",
    "InfiniteDigits": ".digits",
    "ResampledDocuments": ".documents",
    "RowGrid": ".grid",
    "create_dataset": ".create",
    "fetch_named": ".importers",
    "import_csr": ".importers",
    "import_hdf5": ".importers",
    "import_idx": ".importers",
    "import_images": ".importers",
    "import_mat": ".importers",
    "import_named": ".importers",
    "import_npy": ".importers",
    "import_npz": ".importers",
    "import_svmlight": ".importers",
    "make_digits": ".digits",
    "make_documents": ".documents",
    "open_dataset": ".dataset",
}

__getattr__, __dir__ = attach(__name__, _WHERE)
