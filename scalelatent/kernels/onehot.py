"""Products with one-hot rows in numpy. Rows are given as codes and are never expanded.

Row i of H is one-hot in each of V groups of k columns: ``H[i, v k + codes[i, v]] = 1``.
"""

from __future__ import annotations

import numpy as np


def gather_sum(codes: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Return, for each row, the sum of the vectors of ``table`` that its codes select; (rows, width)."""
    out = np.zeros((len(codes), table.shape[2]))
    for v in range(codes.shape[1]):
        out += table[v, codes[:, v]]
    return out


def scatter_add(codes: np.ndarray, y: np.ndarray, total: np.ndarray) -> None:
    """Add each row of ``y`` in place to those vectors of ``total`` that the codes of the row select."""
    for v in range(codes.shape[1]):
        np.add.at(total[v], codes[:, v], y)


def count_matches(codes: np.ndarray, others: np.ndarray | None = None) -> np.ndarray:
    """Return the number of groups in which two rows have the same code, (rows, others).

    This number is the product of the one-hot forms of the two rows.
    """
    others = codes if others is None else others
    return np.array([(others == row).sum(axis=1) for row in codes], dtype=np.float32)
