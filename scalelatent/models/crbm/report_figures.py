"""Restored images and convergence of conditional RBMs: Figures 2 and 4 of Ping and Ihler (2017)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from scalelatent.errors import DataError
from scalelatent.report.figures import marker_style, pass_positions, read_column
from scalelatent.report.pictures import draw_image
from scalelatent.report.style import ACCENT, INK, LINE, new_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# Colour map of images, and the values that it draws white and black.
_IMAGE_COLORS = ("gray_r", 0.0, 1.0)


def plot_restored(rows: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> Figure:
    """Draw a row of images of ``shape`` for each entry of ``rows``, with the name of the entry (Figure 2)."""
    n = min((len(images) for images in rows.values()), default=0)
    if not n:
        raise DataError("there are no images to draw: give at least one image of each kind")
    figure = new_figure(0.9 * n + 0.6, 0.95 * len(rows))
    axes = figure.subplots(len(rows), n, squeeze=False)
    for row_axes, (name, images) in zip(axes, rows.items(), strict=True):
        for image_axes, image in zip(row_axes, images, strict=False):
            draw_image(image_axes, np.asarray(image, np.float64), shape, _IMAGE_COLORS)
            for side in image_axes.spines.values():
                side.set_color(LINE)
        row_axes[0].set_ylabel(name, fontsize=9, color=INK)
    return figure


def plot_convergence(records: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw the share of rows whose inference converged in each epoch (Figure 4)."""
    found = [record for record in records if record.get("converged") is not None]
    if not found:
        raise DataError("no record has a share of converged rows: the learner sends no messages")
    figure = new_figure(8, 3.2)
    axes = figure.subplots()
    axes.plot(
        pass_positions(found),
        100 * read_column(found, "converged"),
        color=ACCENT,
        linewidth=1.6,
        **marker_style(found),
    )
    axes.set(xlabel="epoch", ylabel="rows that converged, %", ylim=(0, 103))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    style_axes(axes)
    return figure
