"""The forward pass of several layers is a convolutional network, so torch computes the same scores."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scalelatent.engine.backend import make_backend
from scalelatent.models.hcn.kernels.units import from_units
from scalelatent.models.hcn.model.hierarchy import Hierarchy
from scalelatent.models.hcn.model.layer import FeatureLayer, to_features
from scalelatent.models.hcn.multi_layer import MultiLayer

BELOW = FeatureLayer((1, 10, 12), 5, (4, 3), 1e-3, 1e-2, 0.25, 1e-3)
CLASSES = (0, 0, 1, 1, 2, 2)


def make_network(side: int, first: FeatureLayer = BELOW) -> tuple[Hierarchy, np.ndarray]:
    """Return a network of two layers of features and six class templates, and log odds of its weights.

    All features have four weights that are on, so that no feature has a larger score because of its size.
    """
    high, wide, channels = first.places
    second = FeatureLayer((channels, high, wide), 4, (3, 5), 1e-3, 1e-2, 0.25, 1e-3)
    high, wide, channels = second.places
    top = replace(second, image=(channels, high, wide), n_features=6, window=(high, wide))
    net = Hierarchy((first, second, top), CLASSES, side, 0.9, seed=3)
    rng, parts = np.random.default_rng(1), []
    for layer in net.layers:
        rank = rng.random((int(np.prod(layer.weights_shape[:3])), layer.n_features)).argsort(axis=0)
        parts.append(np.where(rank.argsort(axis=0) < 4, 1.0, -1.0).ravel())
    return net, np.concatenate(parts)


@pytest.mark.parametrize("side", [1, 3, 5])
@pytest.mark.parametrize("noise", [(1e-3, 1e-2), (0.2, 1e-4)])
def test_torch_gives_the_same_scores(side: int, noise: tuple[float, float]) -> None:
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    first = replace(BELOW, p01=noise[0], p10=noise[1])
    net, beliefs = make_network(side, first)
    pools = [pool.astype(np.float32) for pool in MultiLayer(net, None, 2).pools]
    features = [to_features(part > 0).astype(np.float32) for part in net.split(beliefs)]
    off, on = from_units(first.evidence_values)
    x = (np.random.default_rng(2).random((1000, 1, 10, 12)) < 0.06).astype(np.uint8)

    values = torch.tensor(np.where(x, on, off).astype(np.float32))
    for pool, weights in zip(pools, features, strict=True):
        height, width = values.shape[2:]
        wide = functional.pad(values, (side // 2,) * 4)
        shifted = [
            wide[:, :, dy : dy + height, dx : dx + width] + torch.tensor(pool[dy * side + dx])
            for dy in range(side)
            for dx in range(side)
        ]
        values = functional.conv2d(torch.stack(shifted).amax(dim=0), torch.tensor(weights))
    found = values[:, :, 0, 0].numpy()

    fixed, pixels = [part > 0 for part in net.split(beliefs)], first.compute_evidence(x.reshape(1000, -1))
    scores = net.template_scores(fixed, pixels, make_backend("cpu"))
    assert len(np.unique(scores.argmax(axis=1))) > 1
    np.testing.assert_array_equal(found * 256, scores)
