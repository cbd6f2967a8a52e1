"""Figures in reports of compositional networks: features, templates, learning curves, completed images.

The figures follow Figures 1, 3, 5, 6 and 7 of Lázaro-Gredilla et al., "Hierarchical compositional feature
learning" (2016).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.colors import hsv_to_rgb, to_rgb
from matplotlib.ticker import FuncFormatter

from scalelatent.errors import DataError
from scalelatent.report.figures import marker_style, read_column
from scalelatent.report.style import ACCENT, COLORS, INK, LINE, MUTED, WARN, new_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Largest number of features in the figure of all features, and in one row of this figure.
MAX_FEATURES, MAX_COLUMNS = 144, 16
# Largest number of rows (templates) and of columns (features) in the figure of templates by features.
MAX_GRID_SIDE = 12
# Largest number of classes in the figure of samples.
MAX_CLASSES = 10
# A figure shows features as numbers if an image has at most this number of features, else as dots.
MAX_NUMBERED = 12
_INK, _PALE, _WHITE = np.array(to_rgb(INK)), np.array(to_rgb(LINE)), np.ones(3)
_HIDDEN = np.array(to_rgb("#e9dcc3"))


def choose_color(feature: int) -> str:
    """Return the colour of the feature with this number; all figures of a report use this colour."""
    return COLORS[feature % len(COLORS)]


def make_direction_colors(n: int) -> np.ndarray:
    """Return a colour (red, green, blue) for each of ``n`` edge directions, (n, 3)."""
    return hsv_to_rgb([(k / n, 0.85, 0.85) for k in range(n)])


def plot_parts(
    images: np.ndarray, places: np.ndarray, weights: np.ndarray, made: np.ndarray, unknown: np.ndarray
) -> Figure:
    """Plot images, their features, the positions of the features, and reconstructions.

    The figure follows Figures 1, 3 and 5 of Lázaro-Gredilla et al. (2016). ``images``, reconstructions
    ``made`` and the masks ``unknown`` are bool (n, channels, height, width). ``places`` (n, HS, WS, F) is 1
    if one of F features is at one of HS x WS positions. ``weights`` are the features of h x w pixels, bool
    (F, channels, h, w).
    """
    shape, places_of = images.shape[1:], [np.argwhere(found) for found in places]
    pairs = list(zip(images, made, unknown, strict=True))
    figure, axes = _plot_image_rows(
        [
            ("image", [_color_image(image, missing) for image, _, missing in pairs]),
            ("features", [_paint_features(found, weights, shape) for found in places_of]),
            ("places", [np.ones((*shape[1:], 3)) for _ in images]),
            ("reconstruction", [_mark_differences(*one) for one in pairs]),
        ]
    )
    for place_axes, found in zip(axes[2], places_of, strict=True):
        _draw_places(place_axes, found, weights.shape, shape)
    return figure


def _plot_image_rows(
    rows: Sequence[tuple[str, Sequence[np.ndarray]]], title_inches: float = 0.1
) -> tuple[Figure, np.ndarray]:
    """Plot rows of colour images (height, width, 3) of equal size; return the figure and its axes.

    ``rows`` has (name, images) of each row, and ``title_inches`` is the height of titles.
    """
    n = len(rows[0][1])
    if not n:
        raise DataError("there are no images to draw: give at least one row")
    height, width = rows[0][1][0].shape[:2]
    side = float(np.clip(max(height, width) / 24, 1.25, max(1.25, 10.5 / n)))
    figure = new_figure(n * side + 0.5, len(rows) * side * height / width + title_inches)
    axes = figure.subplots(len(rows), n, squeeze=False)
    for row_axes, (name, images) in zip(axes, rows, strict=True):
        row_axes[0].set_ylabel(name, fontsize=9, color=INK)
        for image_axes, image in zip(row_axes, images, strict=True):
            _draw_image(image_axes, image)
    return figure, axes


def _draw_image(axes: Axes, image: np.ndarray) -> None:
    axes.imshow(image, interpolation="nearest")
    _draw_frame(axes)


def _draw_frame(axes: Axes, color: str = LINE, width: float = 0.8) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set(color=color, linewidth=width)


def _color_image(
    image: np.ndarray,
    unknown: np.ndarray | None = None,
    ink: np.ndarray = _INK,
    colors: np.ndarray | None = None,
) -> np.ndarray:
    """Return a binary image (channels, height, width) in colours, (height, width, 3).

    A pixel that is on has the colour ``ink``, or with several channels the mean colour of the channels that
    are on: ``colors`` (channels, 3), by default those of features. ``unknown`` pixels are beige.
    """
    out = np.broadcast_to(_WHITE, (*image.shape[1:], 3)).copy()
    on = image.any(axis=0)
    if len(image) == 1:
        out[on] = ink
    else:
        tones = np.array([to_rgb(choose_color(c)) for c in range(len(image))]) if colors is None else colors
        out[on] = np.einsum("chw,cz->hwz", image.astype(float), tones)[on] / image.sum(axis=0)[on, None]
    if unknown is not None:
        out[unknown.all(axis=0)] = _HIDDEN
    return out


def _paint_features(places_of: np.ndarray, weights: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Return an image of features in their colours, (height, width, 3); the colours of overlaps are mixed.

    ``places_of`` are the (row, column, feature) of the features, and ``shape`` is (channels, height, width)
    of the image.
    """
    total, hits = np.zeros((*shape[1:], 3)), np.zeros(tuple(shape[1:]))
    _, _, h, w = weights.shape
    for r, c, f in places_of:
        on = weights[f].any(axis=0)
        total[r : r + h, c : c + w][on] += to_rgb(choose_color(int(f)))
        hits[r : r + h, c : c + w] += on
    out = np.broadcast_to(_WHITE, total.shape).copy()
    out[hits > 0] = total[hits > 0] / hits[hits > 0][:, None]
    return out


def _draw_places(axes: Axes, places_of: np.ndarray, features: tuple[int, ...], shape: Sequence[int]) -> None:
    h, w = features[2:]
    axes.set(xlim=(-0.5, shape[2] - 0.5), ylim=(shape[1] - 0.5, -0.5), aspect="equal")
    for r, c, f in places_of:
        x, y = c + (w - 1) / 2, r + (h - 1) / 2
        if len(places_of) <= MAX_NUMBERED:
            words: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8, "fontweight": "bold"}
            axes.text(x, y, str(f), color=choose_color(int(f)), **words)
        else:
            axes.plot(x, y, marker="o", markersize=4, color=choose_color(int(f)), linestyle="none")
    _draw_frame(axes)


def _mark_differences(image: np.ndarray, made: np.ndarray, unknown: np.ndarray) -> np.ndarray:
    """Return the image ``made`` in colours: pixels on only in ``image`` are blue, only in ``made`` red."""
    out = _color_image(made)
    missed, added = ((a & ~b & ~unknown).any(axis=0) for a, b in ((image, made), (made, image)))
    out[missed], out[added] = to_rgb(ACCENT), to_rgb(WARN)
    return out


def plot_features(
    weights: np.ndarray, used: np.ndarray, rates: np.ndarray | None = None, colors: np.ndarray | None = None
) -> Figure:
    """Plot at most `MAX_FEATURES` features with their numbers; features that the model uses are dark.

    ``weights`` are F features of h x w pixels, bool (F, channels, h, w), and ``used`` (F,) is True for
    features that the model uses. ``rates`` (F,) is the mean number of positions of each feature per image,
    which is written below the feature. ``colors`` (channels, 3) are the colours of the channels; by default
    those of the features of the layer below.
    """
    shown = np.arange(len(weights))
    if len(weights) > MAX_FEATURES:  # show the most frequent features
        frequency = used.astype(float) if rates is None else rates
        shown = _find_largest(frequency, MAX_FEATURES)
    across = min(len(shown), max(8, min(MAX_COLUMNS, math.ceil(math.sqrt(2 * len(shown))))))
    lines = -(-len(shown) // across)
    ratio = weights.shape[2] / weights.shape[3]
    figure = new_figure(max(0.72 * across, 2), lines * (0.6 * min(max(ratio, 0.5), 2) + 0.42) + 0.1)
    for k, axes in enumerate(np.ravel(figure.subplots(lines, across, squeeze=False))):
        if k >= len(shown):
            axes.set_axis_off()
            continue
        f = int(shown[k])
        axes.imshow(
            _color_image(weights[f], None, _INK if used[f] else _PALE, colors), interpolation="nearest"
        )
        _draw_frame(axes, choose_color(f) if used[f] else LINE, 1.6 if used[f] else 0.8)
        label = "not used" if not used[f] else "" if rates is None else f"{rates[f]:.2g}"
        color = choose_color(f) if used[f] else MUTED
        axes.set_title(f"{f}", fontsize=8, color=color, pad=2, fontweight="bold" if used[f] else None)
        axes.set_xlabel(label, fontsize=8, color=INK if used[f] else MUTED, labelpad=1)
    return figure


def plot_weight_counts(records: Sequence[Mapping[str, Any]], warmup_images: int = 0) -> Figure:
    """Plot weights that are on, weights that change sign, and compression against the images seen.

    See Figure 6 of Lázaro-Gredilla et al. (2016). ``records`` are the records of a history, and
    ``warmup_images`` is the number of images that the fit saw in the warm-up, before the first record.
    """
    known = [record for record in records if record.get("weights_on") is not None]
    if not known:
        raise DataError("no record of the history has weights_on: give the history of a fit")
    compressed = any(record.get("compression") is not None for record in known)
    figure = new_figure(8, 5.2 if compressed else 3.2)
    panels = figure.subplots(1 + compressed, 1, sharex=True, squeeze=False)[:, 0]
    seen, point = warmup_images + read_column(known, "rows_seen"), marker_style(known)
    on, changed = read_column(known, "weights_on"), count_sign_changes(known)
    panels[0].plot(seen, on, color=INK, linewidth=1.6, label="on", **point)
    panels[0].plot(seen, changed, color=ACCENT, linewidth=1.4, label="change sign per 100 images", **point)
    panels[0].set_ylabel("weights")
    panels[0].set_ylim(bottom=0)
    panels[0].legend(fontsize=9, frameon=True, framealpha=0.9, edgecolor="none", labelcolor=INK)
    if compressed:
        panels[1].plot(seen, 100 * read_column(known, "compression"), color=WARN, linewidth=1.6, **point)
        panels[1].set_ylabel("compression of the\nvalidation images, %")
    panels[-1].set_xlabel("images seen")
    panels[-1].xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    for axes in panels:
        style_axes(axes)
    return figure


def count_sign_changes(records: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Return for each record the number of sign changes of weights since the last record, per 100 images."""
    out, before = [], (None, 0.0, 0.0)
    for epoch, changed, seen in zip(
        *(read_column(records, name) for name in ("pass", "weights_changed", "rows_seen")), strict=True
    ):
        counted = changed - (before[1] if before[0] == epoch else 0)
        out.append(100 * counted / (seen - before[2]) if seen > before[2] else np.nan)
        before = epoch, changed, seen
    return np.array(out)


def plot_filled(images: np.ndarray, known: np.ndarray, filled: np.ndarray) -> Figure:
    """Plot images, their ``known`` pixels, and the completed images; all are (n, channels, height, width)."""
    return _plot_image_rows(
        [
            ("image", [_color_image(image) for image in images]),
            ("given", [_color_image(*one) for one in zip(images & known, ~known, strict=True)]),
            ("filled in", [_color_image(image) for image in filled]),
        ]
    )[0]


def plot_edges(images: np.ndarray, edges: np.ndarray, made: np.ndarray) -> Figure:
    """Plot grey images, their edges in the colours of their directions, and reconstructed edges.

    ``images`` are uint8 (n, height, width); the first image is the key to the colours. ``edges`` are bool
    (n, filters, height, width), True for the filter that is on at a pixel. ``made`` (n - 1, filters, height,
    width) are the reconstructed edges of all images but the first.
    """
    colors = make_direction_colors(edges.shape[1])
    figure, axes = _plot_image_rows(
        [
            ("image", [np.repeat(image[:, :, None], 3, axis=2) for image in images]),
            ("edges", [_color_image(image, colors=colors) for image in edges]),
            ("made", [_color_image(image, colors=colors) for image in (np.zeros_like(edges[0]), *made)]),
        ],
        0.3,
    )
    axes[0, 0].set_title("key", fontsize=9, color=INK, pad=2)
    return figure


def plot_templates(weights: np.ndarray, names: Sequence[str]) -> tuple[Figure, tuple[int, int]]:
    """Plot the positions of features (columns) in templates (rows); both numbers are at most `MAX_GRID_SIDE`.

    ``weights`` is bool (templates, F, HS, WS), True if a template (feature of the top layer) has one of the F
    features of the layer below at one of HS x WS positions. ``names`` are the names of the templates. Return
    the figure and its numbers of rows and columns.
    """
    counts = weights.sum(axis=(2, 3))
    lines, columns = (_find_largest(counts.sum(axis=1 - axis), MAX_GRID_SIDE) for axis in (0, 1))
    wide = min(1.25, 10 / len(columns))
    high = max(0.25, wide * weights.shape[2] / weights.shape[3])
    figure = new_figure(wide * len(columns) + 1, (high + 0.08) * len(lines) + 0.3)
    axes = figure.subplots(len(lines), len(columns), squeeze=False)
    for r, template in enumerate(lines):
        label_style: dict[str, Any] = {"rotation": 0, "ha": "right", "va": "center"}
        axes[r, 0].set_ylabel(f"{template}: {names[template]}", fontsize=8, color=INK, **label_style)
        for c, feature in enumerate(columns):
            color = choose_color(int(feature))
            _draw_image(
                axes[r, c], _color_image(weights[template, feature][None], None, np.array(to_rgb(color)))
            )
            if r == 0:
                axes[r, c].set_title(f"{feature}", fontsize=8, color=color, pad=2, fontweight="bold")
    return figure, (len(lines), len(columns))


def _find_largest(counts: np.ndarray, n: int) -> np.ndarray:
    """Return the indices of the ``n`` largest numbers of ``counts``, in ascending order."""
    return np.sort(np.argsort(-counts, kind="stable")[:n])


def plot_samples(images: np.ndarray, names: Sequence[str], colors: np.ndarray | None = None) -> Figure:
    """Plot rows of images, bool (rows, n, channels, height, width), with the name of each row.

    ``colors`` (channels, 3) are the colours of the channels; by default those of features.
    """
    found = ([_color_image(image, colors=colors) for image in line] for line in images)
    return _plot_image_rows(list(zip(names, found, strict=True)))[0]
