"""Products with one-hot rows, in plain numpy: rows are codes, and are never expanded.

Row i of H is one-hot in each of V groups of k columns: ``H[i, v k + codes[i, v]] = 1``.
"""

from __future__ import annotations

import numpy as np


def gather_sum(codes: np.ndarray, table: np.ndarray) -> np.ndarray:
    """H C: each row's sum of the rows of C that it names."""
    out = np.zeros((len(codes), table.shape[2]))
    for v in range(codes.shape[1]):
        out += table[v, codes[:, v]]
    return out


def scatter_add(codes: np.ndarray, y: np.ndarray, total: np.ndarray) -> None:
    """total += H' Y: each row is added to the places that it names."""
    for v in range(codes.shape[1]):
        np.add.at(total[v], codes[:, v], y)


def count_matches(codes: np.ndarray, others: np.ndarray | None = None) -> np.ndarray:
    """H G', where G is the one-hot form of ``others``: in how many groups two rows have the same code."""
    others = codes if others is None else others
    return np.array([(others == row).sum(axis=1) for row in codes], dtype=np.float32)
