"""Rows drawn as images: image shapes, colour maps, single images and mosaics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .style import INK, new_figure, short_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMALLEST_SIDE = 8
CHANNELS = (3, 4)


def image_shape(feature_shape: Sequence[int]) -> tuple[int, ...] | None:
    """Return the image shape of a row, or None if the row is not an image."""
    shape = tuple(int(n) for n in feature_shape)
    if len(shape) == 3 and shape[2] == 1:
        shape = shape[:2]
    if len(shape) == 1:
        side = math.isqrt(shape[0])
        return (side, side) if side >= SMALLEST_SIDE and side * side == shape[0] else None
    if len(shape) == 2 or (len(shape) == 3 and shape[2] in CHANNELS):
        return shape if min(shape[:2]) > 1 else None
    return None


def choose_colormap_range(rows: np.ndarray) -> tuple[str, float, float]:
    """Return colour map, lowest and highest value with which all these images are drawn."""
    low, high = (float(rows.min()), float(rows.max())) if rows.size else (0.0, 1.0)
    if high <= low:
        high = low + 1.0
    ground = rows.size > 0 and float((rows < low + 0.05 * (high - low)).mean()) > 0.35
    return ("gray_r" if ground else "gray"), low, high


def draw_image(axes: Axes, row: np.ndarray, shape: tuple[int, ...], tone: tuple[str, float, float]) -> None:
    """Draw one row as an image; ``tone`` is the result of `choose_colormap_range`."""
    colors, low, high = tone
    image = row.reshape(shape)
    if len(shape) == 3:
        image = np.clip((image - low) / (high - low), 0, 1)
    axes.imshow(image, cmap=colors, vmin=low, vmax=high, interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])


def draw_mosaic(
    axes: Axes,
    tiles: np.ndarray,
    shape: tuple[int, ...],
    tone: tuple[str, float, float],
    *,
    below: float = 0.0,
    beside: Sequence[int] = (),
) -> tuple[np.ndarray, np.ndarray]:
    """Draw a grid of images, array (down, across, features), as one picture; images of NaN stay empty.

    Return the centres of the columns and the lower edges of the grid's rows, in pixels. ``below`` is the
    space for text under an image, as a share of its height; ``beside`` lists columns with a wide gap before.
    """
    colors, low, high = tone
    down, across = tiles.shape[:2]
    height, width = shape[:2]
    gap = max(1, round(0.08 * width))
    step = height + max(gap, round(below * height))
    lefts = np.arange(across) * (width + gap) + 3 * gap * np.isin(np.arange(across), beside).cumsum()
    canvas = np.full((down * step, int(lefts[-1]) + width, *shape[2:]), np.nan)
    for i, j in np.ndindex(down, across):
        top, left = i * step, int(lefts[j])
        canvas[top : top + height, left : left + width] = tiles[i, j].reshape(shape)
    if len(shape) == 3:
        canvas = np.nan_to_num(np.clip((canvas - low) / (high - low), 0, 1), nan=1.0)
    axes.imshow(np.ma.masked_invalid(canvas), cmap=colors, vmin=low, vmax=high, interpolation="nearest")
    axes.set_axis_off()
    return lefts + (width - 1) / 2, np.arange(down) * step + height - 0.5


def plot_mistakes(
    x: np.ndarray, truth: Sequence[str], guess: Sequence[str], score: Sequence[float], shape: tuple[int, ...]
) -> Figure:
    """Draw misclassified rows as images, with true class, predicted class and score."""
    n = len(x)
    columns = min(n, 10)
    rows = -(-n // columns)
    wide = max(len(t) + len(g) for t, g in zip(truth, guess, strict=True)) > 8
    figure = new_figure(max(columns, 3) * 0.95, rows * (1.5 if wide else 1.34))
    tone = choose_colormap_range(x)
    for k, axes in enumerate(np.ravel(figure.subplots(rows, columns, squeeze=False))):
        if k >= n:
            axes.set_axis_off()
            continue
        draw_image(axes, x[k], shape, tone)
        names = short_name(truth[k], 11), short_name(guess[k], 11)
        title = f"{names[0]}{chr(10) if wide else ' '}→ {names[1]}\n{100 * score[k]:.0f} %"
        axes.set_title(title, fontsize=8.5, color=INK)
        for side in axes.spines.values():
            side.set_color("#c9ced4")
    return figure
