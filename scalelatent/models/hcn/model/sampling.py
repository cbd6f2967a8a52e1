"""Random images from a network of one layer, and noise that flips pixels of images."""

from __future__ import annotations

import numpy as np

from scalelatent.contract.learners import Backend
from scalelatent.kernels.streams import stream

from .decode import Decoder
from .layer import FeatureLayer


def draw_images(
    decoder: Decoder, seed: int, start: int, stop: int, backend: Backend, noise: bool = True
) -> np.ndarray:
    """Draw the images number ``start`` to ``stop`` - 1: uint8 (images, channels, height, width).

    Image number i is a function of ``seed`` and i only. If ``noise``, pixels are flipped with the
    probabilities p01 and p10 of the layer.
    """
    layer = decoder.layer
    s = np.empty((stop - start, *layer.places), np.uint8)
    drawn = np.empty((stop - start, *layer.image))
    for row, places, pixels in zip(range(start, stop), s, drawn, strict=True):
        numbers = stream(seed, "hcn sample", 0, row)
        places[...] = numbers.random(places.shape) < layer.p_sparsity
        pixels[...] = numbers.random(pixels.shape)
    made = decoder.cover_counts(s, backend) > 0
    if noise:
        made = np.where(made, drawn >= layer.p01, drawn < layer.p10)
    return made.astype(np.uint8)


def add_noise(layer: FeatureLayer, images: np.ndarray, seed: int) -> np.ndarray:
    """Return ``images`` as uint8 after pixels are flipped with the probabilities p01 and p10 of ``layer``."""
    out = np.empty(images.shape, np.uint8)
    for row, made in enumerate(images):
        drawn = stream(seed, "hcn noise", 0, row).random(made.shape)
        out[row] = np.where(made, drawn >= layer.p01, drawn < layer.p10)
    return out
