r"""The interpolating functions lambda0 and lambda1 of capsule regression, exactly and as a table.

.. math::

    I_s(b) = b e^{-b} \int_0^1 \rho^s e^{\rho b} d\rho, \qquad
    \lambda_0 = I_{D/2}(\beta), \quad \lambda_1 = I_{D/2+1}(\beta)

(Saul, 2021, equations 2.13, 2.14 and A.1). D is the sum of the capsule dimensions of a member. If D is odd, s
is a half-integer and the recursion starts from Dawson's integral.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.special import dawsn

# Number of cells of the table of lambda0 and lambda1. D is the total capsule dimension, and |h|^2 is the
# squared length of the latent means of a row. For D from 2 to 4,000 the largest error is below 1e-12. For
# |h|^2 up to 1e8 D the relative error of 1 - lambda0 is below 2^-24, so kernels may compute 1 - lambda0 by
# subtraction. tests/models/capsule/test_squash.py checks both errors.
TABLE_CELLS = 1024


def squash_integral(s: float, b: np.ndarray) -> np.ndarray:
    """Return I_s(b) = b e^-b int_0^1 r^s e^(r b) dr with an error of about 1e-15; 2 s is an integer >= 0.

    For b > s the forward recursion (Saul, 2021, equation A.3) is stable. For b <= s the backward recursion
    (A.5) from the bounds (A.4) is stable. The paper's 64 backward steps are too few for large s; this
    function makes 9 sqrt(s) + 16 steps.
    """
    if s < 0 or (2 * s) % 1:
        raise ValueError(f"s={s}: the exponent must be a multiple of 1/2 and at least 0")
    b = np.asarray(b, dtype=np.float64)
    out = np.empty_like(b)
    ahead = b > s
    out[ahead] = _forward(s, b[ahead])
    out[~ahead] = _backward(s, b[~ahead])
    return out


def _forward(s: float, b: np.ndarray) -> np.ndarray:
    if s % 1:
        value, start = 2 * np.sqrt(b) * dawsn(np.sqrt(b)), -0.5
    else:
        value, start = -np.expm1(-b), 0.0
    for k in range(round(s - start)):
        value = 1 - (start + k + 1) / b * value
    return value


def _backward(s: float, b: np.ndarray) -> np.ndarray:
    steps = int(np.ceil(9 * np.sqrt(s))) + 16
    top = s + steps
    value = b / (b + top + 0.5)  # between the bounds b/(b+top+1) and b/(b+top)
    for k in range(steps):
        value = b / (top - k) * (1 - value)
    return value


@dataclass(frozen=True)
class SquashTable:
    """Table of lambda0 and lambda1: a cubic per cell of t = b / (b + scale), for one total dimension D.

    ``coefficients`` is float64 (cells, 8): four of lambda0 and four of lambda1, so that a look-up reads one
    cache line.
    """

    coefficients: np.ndarray
    scale: float

    def __call__(self, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (lambda0, lambda1) at b, as the kernels compute them."""
        cells = len(self.coefficients)
        t = b / (b + self.scale) * cells
        cell = np.minimum(t.astype(np.int64), cells - 1)
        u = t - cell
        c = self.coefficients[cell]
        return (
            ((c[..., 3] * u + c[..., 2]) * u + c[..., 1]) * u + c[..., 0],
            ((c[..., 7] * u + c[..., 6]) * u + c[..., 5]) * u + c[..., 4],
        )


@lru_cache(maxsize=64)
def squash_table(dimension: int) -> SquashTable:
    """Return the table of lambda0 and lambda1 for a total capsule dimension D.

    Each cell is a Hermite cubic, because the derivative has a closed form (equation A.8): dI/db = 1 - (b +
    s)/b I.
    """
    scale = dimension / 2 + 1.0
    t = np.arange(TABLE_CELLS + 1) / TABLE_CELLS
    pieces = [_hermite(*_nodes(dimension / 2 + extra, scale, t)) for extra in (0, 1)]
    coefficients = np.ascontiguousarray(np.concatenate(pieces, axis=1))
    coefficients.setflags(write=False)
    return SquashTable(coefficients, scale)


def _nodes(s: float, scale: float, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return I_s (`squash_integral`) and dI_s/dt at the nodes t; at t = 0 and t = 1 both are limits."""
    inner = t[1:-1]
    b = scale * inner / (1 - inner)
    value = np.concatenate([[0.0], squash_integral(s, b), [1.0]])
    slope = np.where(b > s, _slope_above(s, b), _slope_below(s, b))
    db_dt = scale / (1 - inner) ** 2
    # Limits of the derivative. At t = 0: I_s ~ b/(s+1), b ~ scale t. At t = 1: 1 - I_s ~ s/b, b ~
    # scale/(1-t).
    slope_t = np.concatenate([[scale / (s + 1)], slope * db_dt, [s / scale]])
    return value, slope_t


def _slope_below(s: float, b: np.ndarray) -> np.ndarray:
    """Return the derivative dI_s/db of `squash_integral` for b <= s.

    The closed form 1 - (b + s)/b I_s would cancel; this differentiates I_s = b/(s + 1) (1 - I_{s+1}) instead.
    """
    first, second = squash_integral(s + 1, b), squash_integral(s + 2, b)
    return (1 - first - (first + b * (second - first))) / (s + 1)


def _slope_above(s: float, b: np.ndarray) -> np.ndarray:
    """Return the derivative dI_s/db of `squash_integral` for b > s >= 1.

    It is computed from the complements 1 - I, which keep their relative precision as b grows.
    """
    complement = s / b * squash_integral(s - 1, b)
    if s == 1:
        previous = np.exp(-b)
    elif s == 1.5:
        previous = dawsn(np.sqrt(b)) / np.sqrt(b)
    else:
        previous = (s - 1) / b * squash_integral(s - 2, b)
    return s / b * (complement - previous)


def _hermite(value: np.ndarray, slope: np.ndarray) -> np.ndarray:
    h = 1.0 / (len(value) - 1)
    rise = value[1:] - value[:-1]
    m0, m1 = slope[:-1] * h, slope[1:] * h
    return np.stack([value[:-1], m0, 3 * rise - 2 * m0 - m1, m0 + m1 - 2 * rise], axis=1)
