"""Learning that has run away."""

from __future__ import annotations

import numpy as np

from scalelatent.errors import DivergenceError
from scalelatent.models.crbm.kernels.inference import MAX_WEIGHT, magnitude

from .energy import CrbmShape

# Learning rates of the paper, tried in this order.
RATES = (0.05, 0.02, 0.01, 0.005)
NOT_FINITE = "parameters are no longer finite"


def what_diverged(shape: CrbmShape, theta: np.ndarray) -> str:
    """What of a flat vector of parameters is not finite, or more than messages in float32 bear; else empty.

    Examples
    --------
    >>> shape = CrbmShape(1, 1, 0)
    >>> what_diverged(shape, np.ones(3, "f4")), what_diverged(shape, np.full(3, np.nan, "f4"))
    ('', 'parameters are no longer finite')
    """
    # Gradients of Wvx and Whx are products with those of the biases, so that a NaN shows in these too: far
    # fewer numbers to look at.
    most = magnitude(theta[: shape.n_visible * shape.n_hidden])
    if not np.isfinite([most, magnitude(theta[shape.n_weights :])]).all():
        return NOT_FINITE
    if most > MAX_WEIGHT:
        limits = f"largest {most:.3g}, at most {MAX_WEIGHT:g}"
        return f"weights have grown beyond what messages in float32 bear ({limits})"
    return ""


def lower_rate(rate: float) -> float:
    """The learning rate to try next.

    Examples
    --------
    >>> lower_rate(0.05), lower_rate(0.004)
    (0.02, 0.002)
    """
    return next((r for r in RATES if r < rate), rate / 2)


def diverged(what: str, epoch: int, step: int, rate: float, weight_decay: float) -> DivergenceError:
    """The error that ends such a fit; epochs and steps counted from 1.

    Examples
    --------
    >>> str(diverged("parameters are no longer finite", 3, 70, 0.05, 0.0))[:63]
    'parameters are no longer finite in epoch 3, step 70, at learnin'
    """
    return DivergenceError(
        f"{what} in epoch {epoch}, step {step}, at learning_rate={rate:g}: try "
        f"learning_rate={lower_rate(rate):g} (a run folder keeps the last good checkpoint: resume the run "
        f"with it), or a new run with weight_decay above {weight_decay:g}"
    )
