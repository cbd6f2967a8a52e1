"""Shared functions of the benchmarks of compositional networks: overlaps, true compression, pictures.

A building block is a small shape, such as a letter, which the generator of the images places.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from common import write_png

from scalelatent.generators.images import ImageSet
from scalelatent.models.hcn.model.compression import count_bits

MIN_IOU = 0.9
"""Least overlap (intersection over union) of a building block with a feature, so that it counts as found."""


def compute_overlap(feature: np.ndarray, kind: np.ndarray) -> float:
    """Return the largest intersection over union of a feature and a building block over all shifts."""
    kh, kw = kind.shape
    wide = np.pad(feature.astype(np.int64), ((kh - 1,) * 2, (kw - 1,) * 2))
    both = np.lib.stride_tricks.sliding_window_view(wide, kind.shape)
    common = int((both * kind).sum(axis=(2, 3)).max())
    union = int(feature.sum() + kind.sum()) - common
    return common / union if union else 0.0


def compute_overlaps(weights: np.ndarray, kinds: np.ndarray) -> np.ndarray:
    """Return the largest overlap of each building block (kinds, h, w) with a feature (features, 1, h, w)."""
    return np.array([max(compute_overlap(f[0], kind) for f in weights) for kind in kinds])


def count_found(weights: np.ndarray, kinds: np.ndarray) -> int:
    """Return the number of building blocks whose largest overlap with a feature is at least MIN_IOU."""
    return int((compute_overlaps(weights, kinds) >= MIN_IOU).sum())


def compute_true_compression(images: ImageSet, n: int) -> float:
    """Return the compression of the first n images with the features and places that generated them.

    Compression is the number of bits of the coded images divided by the number of bits of their pixels. The
    code contains only features that occur in these images.
    """
    placed = np.unique(
        np.concatenate([np.c_[np.full(len(p), i), p] for i, p in enumerate(images.truth(0, n))]), axis=0
    )
    kinds, counts = np.unique(placed[placed[:, 1] >= 0, 1], return_counts=True)
    height, width = images.image_shape
    places = 0
    for kind in images.features[kinds]:
        h, w = (int(np.flatnonzero(kind.any(axis=side)).max()) + 1 for side in (1, 0))
        places += n * (height - h + 1) * (width - w + 1)
    x, sent = images.rows(0, n)[0], images.features[kinds]
    errors = int((x != images.clean(0, n)).sum())
    reported = (
        count_bits(counts.sum(), places) + count_bits(sent.sum(), sent.size) + count_bits(errors, x.size)
    )
    return float(reported / count_bits(x.sum(), x.size))


def arrange_tiles(features: np.ndarray, columns: int) -> np.ndarray:
    """Return one picture of 1 - features (n, h, w), in ``columns`` columns of tiles with grey borders."""
    n, h, w = features.shape
    rows = -(-n // columns)
    out = np.full((rows * (h + 1) + 1, columns * (w + 1) + 1), 0.6)
    for i, feature in enumerate(features):
        r, c = divmod(i, columns)
        out[r * (h + 1) + 1 : (r + 1) * (h + 1), c * (w + 1) + 1 : (c + 1) * (w + 1)] = 1 - feature
    return out


def draw_pictures(
    path: Path, rows: list[list[tuple[str, np.ndarray]]], column_titles: Sequence[str] = ()
) -> None:
    """Write titled pictures (0 is black, 1 is white) to a PNG file.

    ``rows`` has a list of (title, picture) for each row of the figure.
    """
    from scalelatent.report.style import new_figure

    columns = max(map(len, rows))
    figure = new_figure(2.0 * columns, 1.9 * len(rows))
    all_axes = figure.subplots(len(rows), columns, squeeze=False)
    for r, line in enumerate(rows):
        for c, axes in enumerate(all_axes[r]):
            axes.axis("off")
            if c < len(line):
                title, picture = line[c]
                axes.imshow(picture, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
                head = column_titles[c] if column_titles and r == 0 else ""
                axes.set_title("\n".join(filter(None, (head, title))), fontsize=7)
    write_png(figure, path)
    print(f"drawn to {path}", flush=True)
