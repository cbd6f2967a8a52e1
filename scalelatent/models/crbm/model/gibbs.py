"""Gibbs sampling in RBMs. Each row has a random stream, so its draws do not depend on the other rows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from types import ModuleType

import numpy as np

from scalelatent.kernels.arrays import Array

from .energy import Params, compute_hidden_logits, compute_negative_free_energy, sigmoid

# Second word of the Philox key; the first is the seed. It separates these random streams from all others.
_STREAM_KEY = int.from_bytes(hashlib.blake2b(b"crbm-gibbs", digest_size=8).digest(), "little")


class Uniforms:
    """Random streams of uniform float32 numbers in [0, 1), one stream for each row in an epoch.

    ``move`` is a function that copies the numbers to a device; None keeps them on the host.
    """

    def __init__(
        self, seed: int, epoch: int, rows: np.ndarray, move: Callable[[np.ndarray], Array] | None = None
    ) -> None:
        key = np.array([seed % 2**64, _STREAM_KEY], dtype=np.uint64)
        counters = (np.array([0, 0, row, epoch], dtype=np.uint64) for row in rows)
        self._streams = [np.random.Generator(np.random.Philox(key=key, counter=c)) for c in counters]
        self._move, self._out = move, np.empty((len(rows), 0), dtype=np.float32)

    def draw(self, count: int) -> Array:
        """Return the next ``count`` numbers of each row, (rows, count), valid until the next call."""
        if self._out.shape[1] != count:
            self._out = np.empty((len(self._streams), count), dtype=np.float32)
        for stream, out in zip(self._streams, self._out, strict=True):
            stream.random(dtype=np.float32, out=out)
        return self._out if self._move is None else self._move(self._out)


def run_gibbs_steps(
    params: Params, b1: Array, b2: Array, hidden: Array, numbers: Uniforms, steps: int, xp: ModuleType
) -> tuple[Array, Array]:
    """Draw hidden units h, then outputs v given h, ``steps`` times; return the last v and P(h = 1 | v).

    The first h is drawn from P(h = 1) = ``hidden``; ``b1`` and ``b2`` are the biases of v and h.
    """
    n_hidden, width = b2.shape[1], b1.shape[1] + b2.shape[1]
    v: Array | None = None
    for _ in range(steps):
        drawn = numbers.draw(width)
        h = (drawn[:, :n_hidden] < hidden).astype(b1.dtype)
        v = (drawn[:, n_hidden:] < sigmoid(h @ params.W.T + b1, xp)).astype(b1.dtype)
        hidden = sigmoid(v @ params.W + b2, xp)
    assert v is not None
    return v, hidden


def search_lowest_energy(
    params: Params, b1: Array, b2: Array, start: Array, numbers: Uniforms, steps: int, xp: ModuleType
) -> tuple[Array, Array, Array]:
    """Search the outputs v of lowest free energy for each row, from ``start``; return the best v found.

    A step of the search draws hidden units h and takes the most probable v given h. Also return P(h = 1 | v)
    and minus the free energy of the best v. ``b1`` and ``b2`` are the biases of v and h.
    """
    n_hidden, v, logits = b2.shape[1], start, compute_hidden_logits(params, start, b2)
    best, best_logits = v, logits
    energy = compute_negative_free_energy(v, b1, logits, xp)
    for _ in range(steps):
        h = (numbers.draw(n_hidden) < sigmoid(logits, xp)).astype(b1.dtype)
        v = (h @ params.W.T + b1 > 0).astype(b1.dtype)
        logits = compute_hidden_logits(params, v, b2)
        found = compute_negative_free_energy(v, b1, logits, xp)
        better = (found > energy)[:, None]
        best, best_logits = xp.where(better, v, best), xp.where(better, logits, best_logits)
        energy = xp.maximum(found, energy)
    return best, sigmoid(best_logits, xp), energy
