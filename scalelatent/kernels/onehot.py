"""Products with one-hot rows in numpy. Rows are given as codes and are never expanded.

Row i of H is one-hot in each of V groups of k columns: ``H[i, v k + codes[i, v]] = 1``.
"""

from __future__ import annotations

import numpy as np


def gather_sum(codes: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Return H C (rows, width): for each row, the sum of the rows of C that its codes select."""
    out = np.zeros((len(codes), table.shape[2]))
    for v in range(codes.shape[1]):
        out += table[v, codes[:, v]]
    return out


def scatter_add(codes: np.ndarray, y: np.ndarray, total: np.ndarray) -> None:
    """Add H' Y to ``total``: each row of y is added to the entries that its codes select."""
    for v in range(codes.shape[1]):
        np.add.at(total[v], codes[:, v], y)


def count_matches(codes: np.ndarray, others: np.ndarray | None = None) -> np.ndarray:
    """Return the number of groups in which two rows have the same code, (rows, others).

    This is H G', where G is the one-hot form of ``others``.
    """
    others = codes if others is None else others
    return np.array([(others == row).sum(axis=1) for row in codes], dtype=np.float32)
