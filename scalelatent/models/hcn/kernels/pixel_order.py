"""Random orders in which pixels are updated; seed, purpose, epoch and row number determine an order."""

from __future__ import annotations

import numba
import numpy as np

from scalelatent.kernels.jit import entry, in_array, out_array
from scalelatent.kernels.philox import philox
from scalelatent.kernels.streams import stage_word

_U0, _U1, _HALF = np.uint64(0), np.uint64(1), np.uint64(32)


@entry(numba.uint64, numba.uint64, numba.uint64, in_array("i8", 1), out_array("i4", 2))
def _shuffle(seed: np.uint64, word: np.uint64, epoch: np.uint64, rows: np.ndarray, out: np.ndarray) -> None:
    n = out.shape[1]
    for k in range(out.shape[0]):
        counter, a, b, c, d = _U0, _U0, _U0, _U0, _U0
        for i in range(n):
            out[k, i] = i
        for step in range(n - 1):
            if step % 4 == 0:
                counter += _U1  # as in numpy, the counter increases before four random words are drawn
                a, b, c, d = philox(counter, _U0, np.uint64(rows[k]), epoch, seed, word)
            drawn = a if step % 4 == 0 else b if step % 4 == 1 else c if step % 4 == 2 else d
            i = n - 1 - step
            j = np.int64(((drawn >> _HALF) * np.uint64(i + 1)) >> _HALF)
            out[k, i], out[k, j] = out[k, j], out[k, i]


def shuffled(seed: int, purpose: str, epoch: int, rows: np.ndarray, n: int) -> np.ndarray:
    """Return for each row number a random permutation of 0 to n - 1, int32 (rows, n).

    A Fisher-Yates shuffle draws a permutation with Philox random numbers, whose key and counter contain
    ``seed``, ``purpose``, ``epoch`` and the row number. Each permutation is a function of these four values.
    """
    out = np.empty((len(rows), n), np.int32)
    rows = np.ascontiguousarray(rows, np.int64)
    _shuffle(np.uint64(seed), np.uint64(stage_word(purpose)), np.uint64(epoch), rows, out)
    return out
