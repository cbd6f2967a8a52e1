"""Steps of gradient ascent on flat vectors of parameters, on the host or on a device."""

from __future__ import annotations

from typing import Any

import numpy as np

# Numbers at a time on the host: what is read and written of them stays in the cache meanwhile.
CHUNK = 2**15


def _parts(array: Any) -> list[slice]:
    size = len(array)
    step = CHUNK if isinstance(array, np.ndarray) else max(size, 1)  # a device wants few, large launches
    return [slice(a, min(a + step, size)) for a in range(0, size, step)]


def climb(
    theta: Any,
    velocity: Any,
    gradient: Any,
    rate: float,
    decay: float,
    n_weights: int,
    momentum: float,
    out: Any,
    speed: Any,
) -> None:
    """u = momentum * velocity + rate * gradient - decay * theta (the first ``n_weights``); theta + u.

    Parameters
    ----------
    theta, velocity : array of float32
        ``velocity`` is empty without momentum.
    gradient : array of float32 or float64
    rate, decay : float
        Of one step: decay is the learning rate times the weight decay.
    n_weights : int
        Parameters that decay; biases come after them.
    momentum : float
    out, speed : array of float32
        The new parameters and velocity; may be the old ones' arrays.

    Examples
    --------
    >>> theta, none = np.ones(3, np.float32), np.zeros(0, np.float32)
    >>> climb(theta, none, np.array([1.0, 2.0, 3.0]), 0.5, 0.25, 2, 0.0, theta, none)
    >>> theta.tolist()
    [1.25, 1.75, 2.5]
    """
    for part in _parts(theta):
        old = theta[part]
        move = gradient[part] * old.dtype.type(rate)
        if decay and part.start < n_weights:
            kept = min(n_weights, part.stop) - part.start
            move[:kept] -= decay * old[:kept]
        if len(velocity):
            move += momentum * velocity[part]
            speed[part] = move
        out[part] = old + move


def moved(array: np.ndarray, change: np.ndarray, factor: float) -> np.ndarray:
    """``array + factor * change``, float32.

    Examples
    --------
    >>> moved(np.ones(2, np.float32), np.array([1.0, 2.0]), 0.5).tolist()
    [1.5, 2.0]
    """
    out = np.empty_like(array)
    for part in _parts(array):
        out[part] = array[part] + factor * change[part]
    return out
