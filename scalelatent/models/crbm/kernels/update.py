"""Sums and gradient steps over all parameters, on host or device.

A step on a small batch reads more bytes of parameters than of rows. The compiled loops read and write each
parameter once; numpy would read and write it in each operation.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from scalelatent.kernels.arrays import Array, aligned_empty
from scalelatent.kernels.jit import entry, in_array, out_array

_F4 = numba.float32


class StepArrays(NamedTuple):
    """Old and new parameters and velocities (last changes of the parameters) of a gradient step.

    All are C-contiguous float32 arrays of one shape, but the velocities are empty without momentum. The new
    arrays may be the same arrays as the old ones.
    """

    theta: Array
    velocity: Array
    new_theta: Array
    new_velocity: Array

    def slice_part(self, place: slice, *shape: int) -> StepArrays:
        """Return the range ``place`` of each of the four vectors, as matrices if a shape is given."""
        parts = (a[place] for a in self)
        return StepArrays(
            *((a.reshape(shape if a.size else (0, *shape[1:])) for a in parts) if shape else parts)
        )


class StepRates(NamedTuple):
    """Factors of one gradient step."""

    rate: float  # learning rate divided by the number of rows, because gradients are summed over rows
    decay: float  # learning rate times weight decay
    momentum: float


def _ascend_signature(gradient: str) -> tuple[numba.types.Type, ...]:
    return (
        in_array("f4", 1), in_array("f4", 1), out_array("f4", 1), out_array("f4", 1),
        in_array(gradient, 1), numba.int64, _F4, _F4, _F4,
    )  # fmt: skip


def _ascend(
    theta: np.ndarray, velocity: np.ndarray, new_theta: np.ndarray, new_velocity: np.ndarray,
    gradient: np.ndarray, n_weights: int, rate: np.float32, decay: np.float32, momentum: np.float32,
) -> None:  # fmt: skip
    moving = len(velocity) > 0
    for i in range(len(theta)):
        move = rate * np.float32(gradient[i])
        if i < n_weights:
            move -= decay * theta[i]
        if moving:
            move += momentum * velocity[i]
            new_velocity[i] = move
        new_theta[i] = theta[i] + move


_ascend_host = {np.dtype(kind): entry(*_ascend_signature(kind))(_ascend) for kind in ("f4", "f8")}


@entry(in_array("f4", 1), out_array("f8", 1))
def _add_float32(part: np.ndarray, total: np.ndarray) -> None:
    for i in range(len(part)):
        total[i] += part[i]


@entry(in_array("f4", 1), in_array("f8", 1), _F4, out_array("f4", 1))
def _add_scaled(array: np.ndarray, change: np.ndarray, factor: np.float32, out: np.ndarray) -> None:
    for i in range(len(array)):
        out[i] = array[i] + factor * np.float32(change[i])


def ascend(arrays: StepArrays, gradient: Array, n_weights: int, rates: StepRates) -> None:
    """Set new_theta = theta + move, where move = momentum * velocity + rate * gradient - decay * theta.

    Only the first ``n_weights`` parameters decay. With momentum, new_velocity is set to the move.
    """
    theta, velocity, new_theta, new_velocity = arrays
    if isinstance(theta, np.ndarray) and theta.dtype == np.float32 and gradient.dtype in _ascend_host:
        _ascend_host[gradient.dtype](*arrays, gradient, n_weights, *map(np.float32, rates))
        return
    rate, decay, momentum = rates
    move = gradient * theta.dtype.type(rate)
    move[:n_weights] -= decay * theta[:n_weights]
    if len(velocity):
        move += momentum * velocity
        new_velocity[...] = move
    new_theta[...] = theta + move


def add_to(total: np.ndarray, part: np.ndarray) -> None:
    """Add the vector ``part`` on the host to the float64 vector ``total`` in place."""
    if part.dtype == np.float32:
        _add_float32(part, total)
    else:
        total += part


def add_scaled(array: np.ndarray, change: np.ndarray, factor: float) -> np.ndarray:
    """Return ``array + factor * change`` in float32."""
    out = aligned_empty(array.shape)
    _add_scaled(array, change, np.float32(factor), out)
    return out
