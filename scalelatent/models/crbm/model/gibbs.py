"""Gibbs sampling in RBMs: matrix products and Bernoulli draws, with numbers that belong to rows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from types import ModuleType

import numpy as np

from scalelatent.kernels.arrays import Array

from .energy import Params, hidden_logits, negative_free_energy, sigmoid

_WORD = int.from_bytes(hashlib.blake2b(b"crbm-gibbs", digest_size=8).digest(), "little")


class Uniforms:
    """Uniform numbers in [0, 1) of some rows in an epoch, float32, a few at a time."""

    def __init__(
        self, seed: int, epoch: int, rows: np.ndarray, give: Callable[[np.ndarray], Array] | None = None
    ) -> None:
        key = np.array([seed % 2**64, _WORD], dtype=np.uint64)
        counters = (np.array([0, 0, row, epoch], dtype=np.uint64) for row in rows)
        self._streams = [np.random.Generator(np.random.Philox(key=key, counter=c)) for c in counters]
        self._give, self._out = give, np.empty((len(rows), 0), dtype=np.float32)

    def draw(self, count: int) -> Array:
        """The next so many of each row, (rows, count), valid until the next call."""
        if self._out.shape[1] != count:
            self._out = np.empty((len(self._streams), count), dtype=np.float32)
        for stream, out in zip(self._streams, self._out, strict=True):
            stream.random(dtype=np.float32, out=out)
        return self._out if self._give is None else self._give(self._out)


def gibbs_steps(
    params: Params, b1: Array, b2: Array, hidden: Array, numbers: Uniforms, steps: int, xp: ModuleType
) -> tuple[Array, Array]:
    """Some steps of block Gibbs sampling: draw h, then v, as often as asked."""
    n_hidden, width = b2.shape[1], b1.shape[1] + b2.shape[1]
    v: Array | None = None
    for _ in range(steps):
        drawn = numbers.draw(width)
        h = (drawn[:, :n_hidden] < hidden).astype(b1.dtype)
        v = (drawn[:, n_hidden:] < sigmoid(h @ params.W.T + b1, xp)).astype(b1.dtype)
        hidden = sigmoid(v @ params.W + b2, xp)
    assert v is not None
    return v, hidden


def gibbs_marginals(
    params: Params, b1: Array, b2: Array, numbers: Uniforms, steps: int, xp: ModuleType
) -> tuple[Array, Array]:
    """Means of the conditional probabilities of v and h over the second half of a chain."""
    n_hidden, width = b2.shape[1], b1.shape[1] + b2.shape[1]
    hidden = sigmoid((b1 > 0).astype(b1.dtype) @ params.W + b2, xp)
    sums = [xp.zeros_like(b1), xp.zeros_like(b2)]
    for step in range(steps):
        drawn = numbers.draw(width)
        h = (drawn[:, :n_hidden] < hidden).astype(b1.dtype)
        visible = sigmoid(h @ params.W.T + b1, xp)
        v = (drawn[:, n_hidden:] < visible).astype(b1.dtype)
        hidden = sigmoid(v @ params.W + b2, xp)
        if step >= steps // 2:
            sums[0] += visible
            sums[1] += hidden
    taken = steps - steps // 2
    return sums[0] / taken, sums[1] / taken


def gibbs_search(
    params: Params, b1: Array, b2: Array, start: Array, numbers: Uniforms, steps: int, xp: ModuleType
) -> tuple[Array, Array, Array]:
    """The visible states of lowest free energy among a start and what a chain from it comes by."""
    n_hidden, v, logits = b2.shape[1], start, hidden_logits(params, start, b2)
    best, best_logits = v, logits
    energy = negative_free_energy(v, b1, logits, xp)
    for _ in range(steps):
        h = (numbers.draw(n_hidden) < sigmoid(logits, xp)).astype(b1.dtype)
        v = (h @ params.W.T + b1 > 0).astype(b1.dtype)
        logits = hidden_logits(params, v, b2)
        found = negative_free_energy(v, b1, logits, xp)
        better = (found > energy)[:, None]
        best, best_logits = xp.where(better, v, best), xp.where(better, logits, best_logits)
        energy = xp.maximum(found, energy)
    return best, sigmoid(best_logits, xp), energy
