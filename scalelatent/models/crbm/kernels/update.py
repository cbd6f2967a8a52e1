"""Sums and steps over parameters: one reading and one writing of each, on host or device.

A step of a small batch moves more bytes of parameters than of anything else; numpy would pass over them once
an operation.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from scalelatent.kernels.arrays import Array, aligned
from scalelatent.kernels.jit import entry, filled, given

_F4 = numba.float32


class Way(NamedTuple):
    """From old parameters to new ones: C-contiguous arrays of float32, all vectors or all matrices.

    Both velocities are empty without momentum.
    """

    theta: Array
    velocity: Array
    new_theta: Array
    new_velocity: Array

    def part(self, place: slice, *shape: int) -> Way:
        """Part of vectors, in the shape of a matrix if one is given."""
        parts = (a[place] for a in self)
        return Way(*((a.reshape(shape if a.size else (0, *shape[1:])) for a in parts) if shape else parts))


class StepRates(NamedTuple):
    """Of one step: ``decay`` is the learning rate times the weight decay."""

    rate: float
    decay: float
    momentum: float


def _climb_signature(gradient: str) -> tuple[numba.types.Type, ...]:
    return (
        given("f4", 1), given("f4", 1), filled("f4", 1), filled("f4", 1), given(gradient, 1), numba.int64,
        _F4, _F4, _F4,
    )  # fmt: skip


def _climb(
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


_climb_host = {np.dtype(kind): entry(*_climb_signature(kind))(_climb) for kind in ("f4", "f8")}


@entry(given("f4", 1), filled("f8", 1))
def _add_f4(part: np.ndarray, total: np.ndarray) -> None:
    for i in range(len(part)):
        total[i] += part[i]


@entry(given("f4", 1), given("f8", 1), _F4, filled("f4", 1))
def _moved(array: np.ndarray, change: np.ndarray, factor: np.float32, out: np.ndarray) -> None:
    for i in range(len(array)):
        out[i] = array[i] + factor * np.float32(change[i])


def climb(way: Way, gradient: Array, n_weights: int, pace: StepRates) -> None:
    """u = momentum * velocity + rate * gradient - decay * theta (the first ``n_weights``); theta + u."""
    theta, velocity, new_theta, new_velocity = way
    if isinstance(theta, np.ndarray) and theta.dtype == np.float32 and gradient.dtype in _climb_host:
        _climb_host[gradient.dtype](*way, gradient, n_weights, *map(np.float32, pace))
        return
    rate, decay, momentum = pace
    move = gradient * theta.dtype.type(rate)
    move[:n_weights] -= decay * theta[:n_weights]
    if len(velocity):
        move += momentum * velocity
        new_velocity[...] = move
    new_theta[...] = theta + move


def add_to(total: np.ndarray, part: np.ndarray) -> None:
    """Add a vector on the host to a float64 one in place."""
    if part.dtype == np.float32:
        _add_f4(part, total)
    else:
        total += part


def moved(array: np.ndarray, change: np.ndarray, factor: float) -> np.ndarray:
    """``array + factor * change``, float32."""
    out = aligned(array.shape)
    _moved(array, change, np.float32(factor), out)
    return out
