"""Grey images as binary channels: of oriented filters the strongest at a pixel is on (appendix B)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

GREY_LEVELS = 256
EDGE = 64
"""Grey levels of a step from which a filter is on, where no others are asked for."""
# Whole numbers, so that sums are the same in any order: grey levels in so many parts.
PARTS = 2**12


@dataclass(frozen=True)
class OrientedFilters:
    """Filters for edges in n directions over a full turn: a dark side and a bright side make two of a line.

    Attributes
    ----------
    n : int
        Even: opposite directions share their sums.
    size : int
        Side in pixels, odd.
    threshold : float
        Grey levels of a step from which a filter is on.
    """

    n: int
    size: int
    threshold: float = EDGE

    @cached_property
    def weights(self) -> np.ndarray:
        """Derivatives of a Gaussian in the first half of the directions, int32 (n / 2, size, size).

        The first one answers a step by one grey level with PARTS; in between, answers are those of a slope,
        so that the strongest is nearest to its direction.
        """
        y, x = np.indices((self.size, self.size)) - self.size // 2
        angles = 2 * np.pi * np.arange(self.n // 2)[:, None, None] / self.n
        slope = (x * np.cos(angles) + y * np.sin(angles)) * np.exp(
            -(x**2 + y**2) / (2 * (self.size / 3) ** 2)
        )
        return np.rint(slope / slope[0].clip(0).sum() * PARTS).astype(np.int32)

    def edges(self, images: np.ndarray) -> np.ndarray:
        """Which filter is on where: bool (images, n, height, width); of uint8 images (n, height, width)."""
        from scalelatent.models.hcn.kernels.cpu.filters import oriented_edges

        out = np.empty((len(images), self.n, *images.shape[1:]), np.uint8)
        oriented_edges(images, self.weights, np.int32(np.rint(self.threshold * PARTS)), out)
        return out.view(bool)
