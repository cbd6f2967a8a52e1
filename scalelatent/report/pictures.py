"""Rows as pictures: which rows are images, how they are toned, and mosaics of many at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.collections import LineCollection

from .style import ACCENT, INK, MUTED, class_ticks, new_figure, short_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "MAX_ELEMENTS",
    "classes_across",
    "draw_image",
    "image_shape",
    "plot_mistakes",
    "plot_prototypes",
    "tone_of",
]

SMALLEST_SIDE = 8
CHANNELS = (3, 4)
MAX_ELEMENTS = 32
_MAX_ACROSS = 10


def image_shape(feature_shape: Sequence[int]) -> tuple[int, ...] | None:
    """Shape in which a row is drawn as an image, None where it is none.

    Parameters
    ----------
    feature_shape : sequence of int
        Of a stored row. (height, width), (height, width, 1 or 3 or 4), or one axis whose length is the square
        of 8 or more: shorter rows are more likely tables.

    Returns
    -------
    tuple of int, or None

    Examples
    --------
    >>> [image_shape(shape) for shape in ((28, 28), (64,), (16, 16, 1), (50,), (4,))]
    [(28, 28), (8, 8), (16, 16), None, None]
    """
    shape = tuple(int(n) for n in feature_shape)
    if len(shape) == 3 and shape[2] == 1:
        shape = shape[:2]
    if len(shape) == 1:
        side = math.isqrt(shape[0])
        return (side, side) if side >= SMALLEST_SIDE and side * side == shape[0] else None
    if len(shape) == 2 or (len(shape) == 3 and shape[2] in CHANNELS):
        return shape if min(shape[:2]) > 1 else None
    return None


def tone_of(rows: np.ndarray) -> tuple[str, float, float]:
    """(colour map, lowest, highest value) that all given images are drawn with.

    Ink on an empty ground (digits) is drawn dark on white, as on paper; other images as they are.

    Parameters
    ----------
    rows : ndarray, shape (n, features)

    Examples
    --------
    >>> tone_of(np.array([[0, 0, 0, 9]])), tone_of(np.array([[1, 5, 8, 9]]))[0]
    (('gray_r', 0.0, 9.0), 'gray')
    """
    low, high = (float(rows.min()), float(rows.max())) if rows.size else (0.0, 1.0)
    if high <= low:
        high = low + 1.0
    ground = rows.size > 0 and float((rows < low + 0.05 * (high - low)).mean()) > 0.35
    return ("gray_r" if ground else "gray"), low, high


def draw_image(axes: Axes, row: np.ndarray, shape: tuple[int, ...], tone: tuple[str, float, float]) -> None:
    """One row as an image, without ticks."""
    colors, low, high = tone
    image = row.reshape(shape)
    if len(shape) == 3:
        image = np.clip((image - low) / (high - low), 0, 1)
    axes.imshow(image, cmap=colors, vmin=low, vmax=high, interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])


def classes_across(n_classes: int, n_dims: int) -> bool:
    """Whether prototypes of a class stand in a column: few elements of many classes would make a tower.

    Examples
    --------
    >>> classes_across(10, 2), classes_across(10, 8), classes_across(50, 2)
    (True, False, False)
    """
    return 2 * n_dims < n_classes <= 2 * _MAX_ACROSS


def plot_prototypes(
    x: np.ndarray, present: np.ndarray, names: Sequence[str], shape: tuple[int, ...] | None
) -> Figure:
    """Draw the row that each element of each capsule contributes most to (equation 3.2, Figure 4).

    Parameters
    ----------
    x : ndarray, shape (classes, dimensions, features)
        At most 32 dimensions are drawn.
    present : ndarray of bool, shape (classes, dimensions)
        Where there is such a row.
    names : sequence of str
    shape : tuple of int or None
        Of an image; None draws a line over the features.

    Returns
    -------
    Figure
        A row of pictures for each class and a column for each element of the capsule; the other way round
        where there are far more classes than elements (`classes_across`).

    Examples
    --------
    >>> x = np.arange(2 * 3 * 64.0).reshape(2, 3, 64)
    >>> figure = plot_prototypes(x, np.ones((2, 3), bool), ["a", "b"], (8, 8))
    >>> figure.axes[0].images[0].get_array().shape
    (17, 26)
    """
    x, present = x[:, :MAX_ELEMENTS], present[:, :MAX_ELEMENTS]
    across = classes_across(*present.shape)
    if across:
        x, present = x.swapaxes(0, 1), present.T
    rows, columns = present.shape
    cell = 0.66 if shape is not None else 0.95
    figure = new_figure(max(cell * columns, 1.5) + 0.9, cell * rows + 0.65)
    axes = figure.subplots()
    (_line_mosaic if shape is None else partial(_image_mosaic, shape=shape))(axes, x, present)
    elements = [str(a + 1) for a in range(columns if not across else rows)]
    below, beside = (names, elements) if across else (elements, names)
    class_ticks(axes, below, y=False)
    class_ticks(axes, beside, x=False)
    axes.set_xlabel("class" if across else "element of the latent vector", color=INK, fontsize=10)
    axes.set_ylabel("element" if across else "class", color=INK, fontsize=10)
    axes.tick_params(length=0, colors=INK)
    axes.xaxis.set_label_position("top")
    axes.xaxis.tick_top()
    for side in axes.spines.values():
        side.set_visible(False)
    return figure


def _image_mosaic(axes: Axes, x: np.ndarray, present: np.ndarray, shape: tuple[int, ...]) -> None:
    """All pictures as one array: hundreds of axes would take minutes to lay out."""
    (m, d), (height, width) = present.shape, shape[:2]
    gap = max(1, height // 14)
    colors, low, high = tone_of(x[present])
    blank = np.full((m * (height + gap) - gap, d * (width + gap) - gap, *shape[2:]), np.nan)
    for c, a in np.argwhere(present):
        top, left = c * (height + gap), a * (width + gap)
        blank[top : top + height, left : left + width] = x[c, a].reshape(shape)
    if len(shape) == 3:
        blank = np.nan_to_num(np.clip((blank - low) / (high - low), 0, 1), nan=1.0)
    # One unit a cell, so that classes and elements lie at whole numbers.
    right, bottom = (d - gap / (width + gap)), (m - gap / (height + gap))
    off = (-0.5 + 0.5 * gap / (width + gap), -0.5 + 0.5 * gap / (height + gap))
    extent = (off[0], off[0] + right, off[1] + bottom, off[1])
    aspect = (height + gap) / (width + gap)
    axes.imshow(blank, cmap=colors, vmin=low, vmax=high, extent=extent, aspect=aspect)


def _line_mosaic(axes: Axes, x: np.ndarray, present: np.ndarray) -> None:
    """Every row as a small curve over its features, all on one scale."""
    m, d = present.shape
    shown = x[present].astype(np.float64)
    low, high = (shown.min(), shown.max()) if shown.size else (0.0, 1.0)
    span = high - low if high > low else 1.0
    across = np.linspace(-0.42, 0.42, max(x.shape[2], 2))
    curves = []
    for c, a in np.argwhere(present):
        y = c + 0.38 - 0.76 * (x[c, a].astype(np.float64) - low) / span
        curves.append(np.column_stack([across + a, np.resize(y, len(across))]))
    if low < 0 < high:
        zero = 0.38 + 0.76 * low / span
        axes.hlines([c + zero for c in range(m)], -0.45, d - 0.55, color=MUTED, linewidth=0.4)
    axes.add_collection(LineCollection(curves, colors=ACCENT, linewidths=0.9))
    axes.set(xlim=(-0.5, d - 0.5), ylim=(m - 0.5, -0.5))


def plot_mistakes(
    x: np.ndarray, truth: Sequence[str], guess: Sequence[str], score: Sequence[float], shape: tuple[int, ...]
) -> Figure:
    """The rows predicted wrong with the highest score, as images.

    Parameters
    ----------
    x : ndarray, shape (n, features)
    truth, guess : sequence of str, n
        Names of the true and of the predicted class.
    score : sequence of float, n
        Probability (share of votes) of the predicted class.
    shape : tuple of int
        Of an image.

    Returns
    -------
    Figure
        An axes a row, titled ``truth → guess`` (long names in two lines) and the score in percent.

    Examples
    --------
    >>> figure = plot_mistakes(np.zeros((1, 64)), ["4"], ["9"], [0.98], (8, 8))
    >>> figure.axes[0].get_title()
    '4 → 9\\n98 %'
    """
    n = len(x)
    columns = min(n, 10)
    rows = -(-n // columns)
    wide = max(len(t) + len(g) for t, g in zip(truth, guess, strict=True)) > 8
    figure = new_figure(max(columns, 3) * 0.95, rows * (1.5 if wide else 1.34))
    tone = tone_of(x)
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
