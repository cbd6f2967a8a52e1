"""Products with one-hot rows in numba; a row is given as the number (code) of the 1 in each group."""

from __future__ import annotations

import numpy as np

from .jit import entry, in_array, out_array


def gather_sum(codes: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Return, for each row, the sum of the vectors of ``table`` that its codes select; (rows, width)."""
    out = np.zeros((len(codes), table.shape[2]))
    (_gather_long if codes.dtype.itemsize > 2 else _gather_short)(_as_codes(codes), table, out)
    return out


def scatter_add(codes: np.ndarray, y: np.ndarray, total: np.ndarray) -> None:
    """Add each row of ``y`` in place to those vectors of ``total`` that the codes of the row select."""
    (_scatter_long if codes.dtype.itemsize > 2 else _scatter_short)(_as_codes(codes), y, total)


def count_matches(codes: np.ndarray, others: np.ndarray | None = None) -> np.ndarray:
    """Return the number of groups in which two rows have the same code, float32 (rows, others)."""
    others = codes if others is None else others
    out = np.empty((len(codes), len(others)), dtype=np.float32)
    long = max(codes.dtype.itemsize, others.dtype.itemsize) > 2 or codes.shape[1] >= 2**16
    dtype = np.uint32 if long else np.uint16
    (_match_long if long else _match_short)(
        np.ascontiguousarray(codes, dtype=dtype), np.ascontiguousarray(others, dtype=dtype), out
    )
    return out


def _as_codes(codes: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(codes, dtype=np.uint32 if codes.dtype.itemsize > 2 else np.uint16)


def _gather(codes, table, out):  # type: ignore[no-untyped-def]
    for i in range(len(codes)):
        row = out[i]
        for v in range(codes.shape[1]):
            # Assign the row of the table to a variable, so that LLVM uses vector instructions for the loop.
            add = table[v, codes[i, v]]
            for j in range(row.shape[0]):
                row[j] += add[j]


def _scatter(codes, y, total):  # type: ignore[no-untyped-def]
    for i in range(len(codes)):
        row = y[i]
        for v in range(codes.shape[1]):
            place = total[v, codes[i, v]]
            for j in range(row.shape[0]):
                place[j] += row[j]


def _match(codes, others, out):  # type: ignore[no-untyped-def]
    one, none = codes.dtype.type(1), codes.dtype.type(0)
    for i in range(len(codes)):
        for j in range(len(others)):
            # Counts have the type of codes, so that a vector register holds equal numbers of both.
            same = none
            for v in range(codes.shape[1]):
                same += one if codes[i, v] == others[j, v] else none
            out[i, j] = same


_gather_short, _gather_long = (
    entry(in_array(code, 2), in_array("f8", 3), out_array("f8", 2))(_gather) for code in ("u2", "u4")
)
_scatter_short, _scatter_long = (
    entry(in_array(code, 2), in_array("f8", 2), out_array("f8", 3))(_scatter) for code in ("u2", "u4")
)
_match_short, _match_long = (
    entry(in_array(code, 2), in_array(code, 2), out_array("f4", 2))(_match) for code in ("u2", "u4")
)
