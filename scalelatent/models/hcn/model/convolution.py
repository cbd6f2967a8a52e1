"""The forward pass of a network with fixed weights in the form of a convolutional network (section 3.4)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scalelatent.models.hcn.kernels.units import ABSENT, from_units

from .hierarchy import Hierarchy
from .layer import to_features


@dataclass(frozen=True, eq=False)
class ConvolutionalForm:
    """Weights of a convolutional network that gives the same template scores as a compositional network.

    1. Replace a pixel of 0 by ``evidence[0]`` and a pixel of 1 by ``evidence[1]``.
    2. In each layer, replace each value by the largest of the values that its shifts reach, each plus the
       entry of ``pools`` for that shift.
    3. Convolve with ``weights`` of the layer. The last convolution gives the template scores in nats.

    A compositional network clips values beyond 10,000 nats; this form does not.

    Attributes
    ----------
    evidence : (float, float)
        Evidence of a pixel that is 0 and of a pixel that is 1, in nats.
    pools : list of ndarray of float32, shape (shifts, height, width)
        Log priors of the shifts of each layer, ordered by rows, then columns, from the upper left shift;
        -inf for a shift that leaves the image.
    weights : list of ndarray of float32, shape (features, channels, h, w)
        Weights of 0 and 1 of each layer in the layout of `torch.nn.functional.conv2d`; the templates last.
    template_classes : ndarray, shape (templates,)
        Class of each template.
    """

    evidence: tuple[float, float]
    pools: list[np.ndarray]
    weights: list[np.ndarray]
    template_classes: np.ndarray


def convolutional_form(net: Hierarchy, beliefs: np.ndarray, classes: np.ndarray) -> ConvolutionalForm:
    """Return the convolutional form of a network whose weights with positive beliefs are on."""
    off, on = (float(value) for value in from_units(net.layers[0].evidence_of))
    pools = [np.where(prior == ABSENT, -np.inf, from_units(prior)).astype(np.float32) for prior in net.priors]
    weights = [to_features(part > 0).astype(np.float32) for part in net.split(beliefs)]
    return ConvolutionalForm((off, on), pools, weights, classes)
