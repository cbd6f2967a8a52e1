"""Figures of mixtures of linear models: components, reconstructions, passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from scalelatent.report.figures import marker_style, read_column
from scalelatent.report.pictures import choose_colormap_range, draw_mosaic
from scalelatent.report.style import ACCENT, INK, MUTED, new_figure, short_name, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Size of an image in inches, and size of small text in points.
_IMAGE_INCHES = 0.62
_TEXT_POINTS = 8.0


def _write_text(axes: Axes, x: float, y: float, text: str, color: str = MUTED, **more: Any) -> None:
    axes.text(x, y, text, ha="center", va="top", fontsize=_TEXT_POINTS, color=color, clip_on=False, **more)


def _write_row_names(axes: Axes, centres: np.ndarray, names: Sequence[str]) -> None:
    """Write names to the left of the rows of a mosaic."""
    for y, name in zip(centres, names, strict=True):
        axes.text(-2, y, short_name(name), ha="right", va="center", fontsize=10, color=INK, clip_on=False)


def _plot_features(tiles: np.ndarray) -> Figure:
    """Plot rows that are not images: one line per row, with the features from left to right."""
    flat = tiles.reshape(-1, tiles.shape[-1])
    flat = flat[np.isfinite(flat).all(axis=1)]
    figure = new_figure(8, min(0.6 + 0.12 * len(flat), 8))
    axes = figure.subplots()
    drawn = axes.imshow(flat, aspect="auto", cmap="gray_r", interpolation="nearest")
    axes.set(xlabel="feature", ylabel="row")
    figure.colorbar(drawn, ax=axes)
    style_axes(axes, grid=False)
    return figure


def plot_means(
    tiles: np.ndarray, rows: np.ndarray, names: Sequence[str], shape: tuple[int, ...] | None
) -> Figure:
    """Plot means (down, across, features), with the rows (down, across) of each component below."""
    if shape is None:
        return _plot_features(tiles)
    down, across = rows.shape
    figure = new_figure(_IMAGE_INCHES * across + (0.5 if names else 0.1), _IMAGE_INCHES * 1.28 * down)
    axes = figure.subplots()
    x, y = draw_mosaic(axes, tiles, shape, choose_colormap_range(tiles[np.isfinite(tiles)]), below=0.3)
    for i, j in np.argwhere(rows >= 0):
        _write_text(axes, x[j], y[i], f"{rows[i, j]:,.0f}")
    if names:
        _write_row_names(axes, y - shape[0] / 2, names)
    return figure


def plot_deviations(tiles: np.ndarray, names: Sequence[str], shape: tuple[int, ...] | None) -> Figure:
    """Plot for each component its mean, then pairs of the mean minus and plus two standard deviations."""
    if shape is None:
        return _plot_features(tiles)
    down, across = tiles.shape[:2]
    beside = list(range(1, across, 2))
    figure = new_figure(_IMAGE_INCHES * across * 1.1 + 0.5, _IMAGE_INCHES * 1.1 * down + 0.3)
    axes = figure.subplots()
    x, y = draw_mosaic(axes, tiles, shape, choose_colormap_range(tiles[:, 0]), beside=beside)
    _write_row_names(axes, y - shape[0] / 2, names)
    for j in range(across):
        text = "mean" if j == 0 else f"{'-' if j % 2 else '+'} 2 sd\ndirection {(j + 1) // 2}"
        axes.text(x[j], -1, text, ha="center", va="bottom", fontsize=_TEXT_POINTS, color=INK, clip_on=False)
    return figure


def plot_reconstructions(
    x: np.ndarray,
    made: np.ndarray,
    scores: np.ndarray,
    truth: Sequence[str],
    names: Sequence[str],
    shape: tuple[int, ...] | None,
) -> Figure:
    """Plot rows (n, p), each with its reconstructions by the best component of each class (n, classes, p)."""
    tiles = np.concatenate([x[:, None], made], axis=1)
    if shape is None:
        return _plot_features(tiles)
    n, across = tiles.shape[:2]
    figure = new_figure(_IMAGE_INCHES * 1.08 * across + 0.6, _IMAGE_INCHES * 1.28 * n + 0.3)
    axes = figure.subplots()
    at, y = draw_mosaic(axes, tiles, shape, choose_colormap_range(x), below=0.3, beside=[1])
    for i in range(n):
        best = int(scores[i].argmin())
        for j in range(across - 1):
            _write_text(axes, at[j + 1], y[i], f"{scores[i, j]:.3g}", INK if j == best else MUTED)
        corner = at[best + 1] - (shape[1] - 1) / 2 - 1, y[i] - shape[0] - 0.5
        box = Rectangle(corner, shape[1] + 1, shape[0] + 1, fill=False, edgecolor=ACCENT, linewidth=1.8)
        axes.add_patch(box)
        box.set_clip_on(False)
    _write_row_names(axes, y - shape[0] / 2, truth)
    for j, name in enumerate(["row", *names]):
        text = short_name(name, 8)
        axes.text(at[j], -1.5, text, ha="center", va="bottom", fontsize=9, color=INK, clip_on=False)
    return figure


def plot_rows(
    tiles: np.ndarray,
    shape: tuple[int, ...] | None,
    words: Sequence[str] = (),
    like: np.ndarray | None = None,
) -> Figure:
    """Plot rows (down, across, features) as images, optionally with words below."""
    if shape is None:
        return _plot_features(tiles)
    down, across = tiles.shape[:2]
    figure = new_figure(_IMAGE_INCHES * across, _IMAGE_INCHES * down * (1.28 if words else 1.06))
    axes = figure.subplots()
    x, y = draw_mosaic(
        axes,
        tiles,
        shape,
        choose_colormap_range(tiles if like is None else like),
        below=0.3 if words else 0.0,
    )
    for k, text in enumerate(words):
        _write_text(axes, x[k % across], y[k // across], text)
    return figure


def plot_image_rows(rows: Sequence[tuple[str, np.ndarray]], shape: tuple[int, ...] | None) -> Figure:
    """Plot named rows of images (across, features), in the grey scale of the first row."""
    tiles = np.stack([images for _, images in rows])
    if shape is None:
        return _plot_features(tiles)
    down, across = tiles.shape[:2]
    figure = new_figure(_IMAGE_INCHES * 1.08 * across + 1.2, _IMAGE_INCHES * 1.1 * down)
    axes = figure.subplots()
    _, y = draw_mosaic(axes, tiles, shape, choose_colormap_range(tiles[0]))
    for centre, (name, _) in zip(y - shape[0] / 2, rows, strict=True):
        axes.text(-2, centre, name, ha="right", va="center", fontsize=9, color=INK, clip_on=False)
    return figure


def plot_passes(records: Sequence[Mapping[str, Any]], phases: Sequence[tuple[int, int, str, bool]]) -> Figure:
    """Plot error and log-likelihood against passes.

    ``phases`` are tuples (first record, last record, name, whether the objective is in nats).
    """
    passes, values = read_column(records, "pass"), read_column(records, "objective")
    units = [nats for nats in (False, True) if any(phase[3] is nats for phase in phases)]
    figure = new_figure(8, 3.0 * len(units) + 0.6)
    panels = np.ravel(figure.subplots(len(units), 1, sharex=True, squeeze=False))
    for axes, nats in zip(panels, units, strict=True):
        for first, last, _, in_nats in phases:
            if in_nats is nats:
                part = slice(first, last + 1)
                shown = -values[part] if nats else values[part]
                axes.plot(passes[part], shown, color=ACCENT if nats else INK, linewidth=1.6,
                          **marker_style(records))  # fmt: skip
        axes.set_ylabel("log-likelihood, nats per row" if nats else "mean error of a row")
        errors = np.concatenate([values[a : b + 1] for a, b, _, in_nats in phases if in_nats is nats])
        if not nats and errors.min() > 0 and errors.max() > 3 * errors.min():
            axes.set_yscale("log")
            axes.set_ylim(errors.min() / 1.3, errors.max() * 1.15)
            axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.yaxis.set_minor_locator(NullLocator())
        style_axes(axes)
        for i, (first, last, name, _) in enumerate(phases):
            left, right = passes[first] - 0.5, passes[last] + 0.5
            axes.axvspan(left, right, color=ACCENT, alpha=0.08 if i % 2 == 0 else 0.0, linewidth=0, zorder=0)
            if axes is panels[0]:
                above = axes.get_xaxis_transform()
                axes.text((left + right) / 2, 1.02, name, transform=above, ha="center", fontsize=8.5,
                          color=MUTED)  # fmt: skip
    panels[-1].set_xlabel("pass over the training rows")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[-1].set_xlim(passes[0] - 0.5, passes[-1] + 0.5)
    return figure
