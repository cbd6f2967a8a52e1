"""The forward pass of fixed weights as that of a convolutional network (section 3.4)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scalelatent.models.hcn.kernels.exact import ABSENT, from_grid

from .hierarchy import Hierarchy
from .layer import to_features


@dataclass(frozen=True, eq=False)
class ConvolutionalForm:
    """What a convolutional network needs to score templates as a compositional one does.

    A pixel becomes ``evidence[0]`` or ``evidence[1]``. Then in each layer a value becomes the largest of
    those its shifts lead to, each plus that shift's entry of ``pools``; and a convolution with ``weights``
    follows. The last gives one place: the scores of the templates, in nats. Values beyond 10,000 nats, which
    compositional networks clip, are not.

    Attributes
    ----------
    evidence : (float, float)
        Of a pixel that is 0, and of one that is 1, in nats.
    pools : list of ndarray of float32, shape (shifts, height, width)
        Of each layer; shifts by rows, then columns, from the upper left. -inf where one leaves the image.
    weights : list of ndarray of float32, shape (features, channels, h, w)
        0 and 1, as `torch.nn.functional.conv2d` takes them; the templates last.
    template_classes : ndarray, shape (templates,)
    """

    evidence: tuple[float, float]
    pools: list[np.ndarray]
    weights: list[np.ndarray]
    template_classes: np.ndarray


def convolutional_form(net: Hierarchy, beliefs: np.ndarray, classes: np.ndarray) -> ConvolutionalForm:
    """The form of a network whose weights are on where beliefs are positive."""
    off, on = (float(value) for value in from_grid(net.layers[0].evidence_of))
    pools = [np.where(prior == ABSENT, -np.inf, from_grid(prior)).astype(np.float32) for prior in net.priors]
    weights = [to_features(part > 0).astype(np.float32) for part in net.split(beliefs)]
    return ConvolutionalForm((off, on), pools, weights, classes)
