"""The temperature of class probabilities: the one with the least log-loss of rows of known classes."""

from __future__ import annotations

import numpy as np


def losses_at(gaps: np.ndarray, y: np.ndarray, weight: np.ndarray, temperatures: np.ndarray) -> np.ndarray:
    """Return the weighted log-loss in nats of probabilities exp(-gap / T), normalised, at each T.

    ``gaps`` (rows, classes) are 0 for the best class of a row, ``y`` (rows,) are class codes.
    """
    own = gaps[np.arange(len(gaps)), y]
    return np.array([(own / t + np.log(np.exp(-gaps / t).sum(axis=1))) @ weight for t in temperatures])


def choose_temperature(temperatures: np.ndarray, loss: np.ndarray) -> float:
    """Return the one with the smallest log-loss, by a parabola through the logarithms around it."""
    i = int(loss.argmin())
    if i in (0, len(loss) - 1):
        return float(temperatures[i])
    left, middle, right = loss[i - 1 : i + 2]
    bend = left - 2.0 * middle + right
    shift = 0.5 * (left - right) / bend if bend > 0 else 0.0
    step = np.log(temperatures[i + 1] / temperatures[i])
    return float(temperatures[i] * np.exp(shift * step))


def tempered(p: np.ndarray, temperature: float) -> np.ndarray:
    """Return probabilities (rows, classes) to the power of 1 / T, normalised."""
    if temperature == 1.0:
        return p
    exponent = np.log(np.maximum(p, np.finfo(float).tiny)) / temperature
    out = np.exp(exponent - exponent.max(axis=1, keepdims=True))
    return np.asarray(out / out.sum(axis=1, keepdims=True))
