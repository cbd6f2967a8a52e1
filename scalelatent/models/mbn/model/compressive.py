"""Feed-forward network that replaces a bootstrap network in predictions (section 5.6 of the paper)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from scalelatent.contract.block_requirements import BlockRequirements
from scalelatent.contract.learners import Backend, Block
from scalelatent.kernels.arrays import Array


class DeviceNetwork(NamedTuple):
    """Weights and biases of each layer, as arrays of the backend on the CPU or the GPU."""

    backend: Backend
    layers: list[tuple[Array, Array]]


@dataclass(frozen=True)
class NetworkRows:
    """A :class:`~scalelatent.contract.learners.RowMap` that applies a feed-forward network to rows.

    A layer with weights W and biases b maps h to max(0, h W + b); the last layer maps h to h W + b.
    """

    requirements = BlockRequirements()

    weights: tuple[np.ndarray, ...]  # one array per layer, float32 (inputs, outputs)
    biases: tuple[np.ndarray, ...]  # one array per layer, float32 (outputs,)
    output_name: str = "output"

    def output(self) -> tuple[tuple[int, ...], str]:
        return (len(self.biases[-1]),), "float32"

    def prepare(self, backend: Backend) -> DeviceNetwork:
        layers = [
            (backend.asarray(w, np.float32), backend.asarray(b, np.float32))
            for w, b in zip(self.weights, self.biases, strict=True)
        ]
        return DeviceNetwork(backend, layers)

    def apply(self, prepared: DeviceNetwork, block: Block) -> np.ndarray:
        """Return the outputs of the rows of a block, float32 (rows, outputs)."""
        backend, layers = prepared
        h = backend.asarray(block.x, np.float32, "x")
        for layer, (w, b) in enumerate(layers):
            h = backend.matmul(h, w, f"h{layer}")
            h += b
            if layer < len(layers) - 1:
                backend.xp.maximum(h, 0, out=h)
        out = np.array(backend.to_host(h), dtype=np.float32)
        if not np.isfinite(out).all():
            row = block.start + int(np.argwhere(~np.isfinite(out))[0, 0])
            raise ValueError(f"row {row} contains NaN, infinity or numbers beyond float32: clean this row")
        return out


def draw_weights(sizes: list[int], streams: list[np.random.Generator]) -> list[np.ndarray]:
    """Return random weights of each layer, normal with variance 2 / inputs (He et al., 2015).

    ``sizes`` are the number of inputs and the number of units of each layer; ``streams`` has one random
    generator per layer.
    """
    shapes = zip(sizes[:-1], sizes[1:], streams, strict=True)
    return [(rng.standard_normal((a, b)) * np.sqrt(2 / a)).astype(np.float32) for a, b, rng in shapes]


def remove_scales(
    weights: list[np.ndarray],
    biases: list[np.ndarray],
    row_scale: tuple[float, float],
    output_scale: tuple[np.ndarray, float],
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Convert weights and biases for scaled rows and outputs to weights and biases for unscaled ones.

    Scaled rows are (x - shift) / scale with ``row_scale`` = (shift, scale). Scaled outputs are (z - mean) /
    size with ``output_scale`` = (mean, size), where the mean has one number per column.
    """
    (shift, scale), (mean, size) = row_scale, output_scale
    weights, biases = [w.astype(np.float64) for w in weights], [b.astype(np.float64) for b in biases]
    biases[0] = biases[0] - shift / scale * weights[0].sum(axis=0)
    weights[0] = weights[0] / scale
    weights[-1] = weights[-1] * size
    biases[-1] = biases[-1] * size + mean
    return [w.astype(np.float32) for w in weights], [b.astype(np.float32) for b in biases]
