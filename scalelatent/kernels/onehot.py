"""Products with one-hot rows, in plain numpy: rows are codes, and are never expanded.

Row i of H is one-hot in each of V groups of k columns: ``H[i, v k + codes[i, v]] = 1``.
"""

from __future__ import annotations

import numpy as np


def gather_sum(codes: np.ndarray, table: np.ndarray) -> np.ndarray:
    """H C: each row's sum of the rows of C that it names.

    Parameters
    ----------
    codes : ndarray of uint16 or uint32, shape (n, V)
        All below k.
    table : ndarray of float64, shape (V, k, d)

    Returns
    -------
    ndarray of float64, shape (n, d)

    Examples
    --------
    >>> table = np.arange(4.0).reshape(2, 2, 1)
    >>> gather_sum(np.array([[0, 1], [1, 1]], dtype=np.uint16), table).ravel().tolist()
    [3.0, 4.0]
    """
    out = np.zeros((len(codes), table.shape[2]))
    for v in range(codes.shape[1]):
        out += table[v, codes[:, v]]
    return out


def scatter_add(codes: np.ndarray, y: np.ndarray, total: np.ndarray) -> None:
    """total += H' Y: each row is added to the places that it names.

    Parameters
    ----------
    codes : ndarray of uint16 or uint32, shape (n, V)
    y : ndarray of float64, shape (n, d)
    total : ndarray of float64, shape (V, k, d)
        Changed.

    Examples
    --------
    >>> total = np.zeros((2, 2, 1))
    >>> scatter_add(np.array([[0, 1], [1, 1]], dtype=np.uint16), np.array([[1.0], [2.0]]), total)
    >>> total.ravel().tolist()
    [1.0, 2.0, 0.0, 3.0]
    """
    for v in range(codes.shape[1]):
        np.add.at(total[v], codes[:, v], y)


def count_matches(codes: np.ndarray, others: np.ndarray | None = None) -> np.ndarray:
    """H G', where G is the one-hot form of ``others``: in how many groups two rows have the same code.

    Parameters
    ----------
    codes : ndarray of uint16 or uint32, shape (n, V)
    others : ndarray of uint16 or uint32, shape (m, V), or None
        None: ``codes`` themselves.

    Returns
    -------
    ndarray of float32, shape (n, m)

    Examples
    --------
    >>> count_matches(np.array([[0, 1], [1, 1]], dtype=np.uint16)).tolist()
    [[2.0, 1.0], [1.0, 2.0]]
    """
    others = codes if others is None else others
    return np.array([(others == row).sum(axis=1) for row in codes], dtype=np.float32)
