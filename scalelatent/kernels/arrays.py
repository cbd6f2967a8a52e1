"""Names of arrays that may lie on a card, and of rows that may be sparse; the check of their widths."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from scalelatent.errors import DataError

if TYPE_CHECKING:
    import cupy
    import numpy as np
    from scipy.sparse import csr_array

    from .sparse_rows import CsrRows

Array: TypeAlias = "np.ndarray | cupy.ndarray"
"""An array of numpy, or of CuPy where a card computes."""

HostRows: TypeAlias = "np.ndarray | CsrRows"
"""Rows in memory as a work takes them: dense, or CSR where it wants that."""

DenseOrCsr: TypeAlias = "np.ndarray | csr_array"
"""Rows as a dataset reads them."""


def check_same_width(one: int, other: int) -> None:
    """Refuse rows and a model of different widths, before compiled code reads beyond the end of one."""
    if one != other:
        raise DataError(
            f"the rows and the model have different numbers of features, {one} and {other}: pass rows with "
            "the features that the model was fitted on"
        )
