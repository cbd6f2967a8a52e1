"""Temperature of class probabilities, chosen by the log-loss of labelled rows."""

from __future__ import annotations

import numpy as np


def losses_at_temperatures(
    gaps: np.ndarray, y: np.ndarray, weight: np.ndarray, temperatures: np.ndarray
) -> np.ndarray:
    """Return the weighted log-loss (nats) of the normalised probabilities exp(-gap / T) at each T.

    ``gaps`` (rows, classes) are 0 for the best class of a row; ``y`` (rows,) are class codes.
    """
    own = gaps[np.arange(len(gaps)), y]
    return np.array([(own / t + np.log(np.exp(-gaps / t).sum(axis=1))) @ weight for t in temperatures])


def choose_temperature(temperatures: np.ndarray, loss: np.ndarray) -> float:
    """Return the temperature with the smallest log-loss, refined by a parabola over log temperatures."""
    i = int(loss.argmin())
    if i in (0, len(loss) - 1):
        return float(temperatures[i])
    left, middle, right = loss[i - 1 : i + 2]
    bend = left - 2.0 * middle + right
    shift = 0.5 * (left - right) / bend if bend > 0 else 0.0
    step = np.log(temperatures[i + 1] / temperatures[i])
    return float(temperatures[i] * np.exp(shift * step))


def apply_temperature(p: np.ndarray, temperature: float) -> np.ndarray:
    """Return probabilities (rows, classes) raised to 1 / T and normalised."""
    if temperature == 1.0:
        return p
    exponent = np.log(np.maximum(p, np.finfo(float).tiny)) / temperature
    out = np.exp(exponent - exponent.max(axis=1, keepdims=True))
    return np.asarray(out / out.sum(axis=1, keepdims=True))
