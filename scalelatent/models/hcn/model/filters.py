"""Oriented edge filters, which convert grey images to binary channels.

The filters follow appendix B of Lázaro-Gredilla et al., "Hierarchical compositional feature learning" (2016).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

GREY_LEVELS = 256
MIN_STEP = 64
"""Default of the smallest difference between two sides of an edge, in grey levels, that turns a filter on."""
# Approximate response of a filter to an edge between two grey levels that differ by 1. Weights of filters are
# rounded to whole numbers, because sums of whole numbers are identical in any order.
STEP_RESPONSE = 2**12


@dataclass(frozen=True)
class OrientedFilters:
    """Edge filters of ``n`` directions; at each pixel the filter with the largest response can be on.

    The direction of an edge leads from its dark side to its bright side.

    Attributes
    ----------
    n : int
        Number of directions over a full turn; even, because the response of a filter is minus the response of
        the filter of the opposite direction.
    size : int
        Side of a filter in pixels, odd.
    threshold : float
        Smallest difference of grey levels between the two sides of an edge that turns a filter on.
    """

    n: int
    size: int
    threshold: float = MIN_STEP

    @cached_property
    def weights(self) -> np.ndarray:
        """Filters of the first half of the directions, int32 (n / 2, size, size): derivatives of a Gaussian.

        The filter of an opposite direction has the opposite sign. The response of the first filter to an edge
        between two grey levels that differ by 1 is ``STEP_RESPONSE``, up to rounding.
        """
        y, x = np.indices((self.size, self.size)) - self.size // 2
        angles = 2 * np.pi * np.arange(self.n // 2)[:, None, None] / self.n
        slope = (x * np.cos(angles) + y * np.sin(angles)) * np.exp(
            -(x**2 + y**2) / (2 * (self.size / 3) ** 2)
        )
        return np.rint(slope / slope[0].clip(0).sum() * STEP_RESPONSE).astype(np.int32)

    def find_edges(self, images: np.ndarray) -> np.ndarray:
        """Return True for the filter that is on at each pixel, bool (images, n, height, width).

        ``images`` are uint8 (images, height, width). No filter is on at a pixel where all responses are below
        that of an edge of ``threshold`` grey levels.
        """
        from scalelatent.models.hcn.kernels.cpu.filters import oriented_edges

        out = np.empty((len(images), self.n, *images.shape[1:]), np.uint8)
        oriented_edges(images, self.weights, np.int32(np.rint(self.threshold * STEP_RESPONSE)), out)
        return out.view(bool)
