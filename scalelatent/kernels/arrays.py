"""What annotations call arrays that may lie on a card, and rows that may be sparse."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

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
