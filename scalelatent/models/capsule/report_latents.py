"""The squashed latent vectors of each class's capsule, as the paper draws them in Figures 2 and 3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.patches import Circle

from scalelatent.report.pictures import draw_image, tone_of
from scalelatent.report.style import INK, LINE, MUTED, class_style, new_figure, short_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["leading_plane", "plot_latents"]

_GOLDEN = 0.6180339887498949


def leading_plane(points: np.ndarray, own: np.ndarray) -> tuple[np.ndarray, float]:
    """Project squashed vectors on the two directions in which those of the own class are longest.

    Directions go through the origin, where the probability is zero: nothing is centred, and the image stays
    in the unit circle.

    Parameters
    ----------
    points : ndarray, shape (n, dimension)
        dimension >= 2.
    own : ndarray of bool, shape (n,)
        Rows of the capsule's class; where there are none, all rows count.

    Returns
    -------
    plane : ndarray, shape (n, 2)
        The points themselves where the dimension is 2.
    share : float
        Share of the own rows' summed squared length that lies in the plane.

    Examples
    --------
    >>> plane, share = leading_plane(np.diag([0.6, 0.8, 0.1]), np.ones(3, bool))
    >>> plane.round(2).tolist(), round(share, 3)
    ([[0.0, 0.6], [0.8, 0.0], [0.0, 0.0]], 0.99)
    """
    if points.shape[1] == 2:
        return points, 1.0
    used = points[own] if own.any() else points
    values, vectors = np.linalg.eigh(used.T.astype(np.float64) @ used)
    leading = vectors[:, :-3:-1]
    # Eigenvectors have no sign of their own: the own class lies to the right and above.
    leading = leading * np.where((used @ leading).sum(axis=0) < 0, -1, 1)
    total = values.sum()
    return points @ leading, float(values[-2:].sum() / total) if total > 0 else 1.0


def plot_latents(
    points: Sequence[np.ndarray],
    codes: np.ndarray,
    names: Sequence[str],
    *,
    images: np.ndarray | None = None,
    has_image: np.ndarray | None = None,
    shape: tuple[int, ...] | None = None,
) -> Figure:
    """A panel for each capsule: squashed vectors in the unit circle, coloured by class.

    Parameters
    ----------
    points : sequence of ndarray, each of shape (n, dimension of the capsule)
        Squashed vectors (equation 3.1) of the same n rows in each capsule. Dimension 2 is drawn as it is,
        more by its two leading directions, 1 as a strip with a lane for each class.
    codes : ndarray of int, shape (n,)
        Class of each row.
    names : sequence of str
    images : ndarray, shape (classes, features), optional
        The row shown in the corner of each panel.
    has_image : ndarray of bool, shape (classes,), optional
        Where there is such a row; None: everywhere.
    shape : tuple of int, optional
        Of an image.

    Returns
    -------
    Figure
        The first ``len(points)`` axes are the panels; in each, the last collection holds the rows of the
        panel's own class.

    Examples
    --------
    >>> points = [np.array([[0.9, 0.1], [0.1, 0.0]]), np.array([[0.0, 0.2], [-0.8, 0.5]])]
    >>> figure = plot_latents(points, np.array([0, 1]), ["cat", "dog"])
    >>> figure.axes[1].collections[-1].get_offsets().tolist()
    [[-0.8, 0.5]]
    """
    m = len(points)
    columns = m if m <= 5 else 5
    rows = -(-m // columns)
    figure = new_figure(2.3 * columns, 2.5 * rows)
    panels = np.ravel(figure.subplots(rows, columns, squeeze=False))
    shown = None
    if images is not None and shape is not None:
        there = np.ones(m, dtype=bool) if has_image is None else has_image
        shown = images, there, shape, tone_of(images[there])
    for c, axes in enumerate(panels):
        axes.set_axis_off()
        if c >= m:
            continue
        if points[c].shape[1] == 1:
            _strip(axes, points[c][:, 0], codes, c, m)
        else:
            _disc(axes, points[c], codes, c)
        color, marker = class_style(c)
        # A point behind the name is the legend: the panels name all classes.
        axes.text(
            0.09, 1.01, short_name(names[c]), transform=axes.transAxes, va="center", fontsize=11, color=INK
        )
        axes.plot(
            0.04, 1.013, transform=axes.transAxes, marker=marker, color=color, markersize=7, clip_on=False
        )
        if shown is not None and shown[1][c]:
            # Where the circle leaves a corner free.
            corner = axes.inset_axes((0.82, 0.84, 0.2, 0.2))
            draw_image(corner, shown[0][c], *shown[2:])
            for side in corner.spines.values():
                side.set(color=LINE, linewidth=0.8)
    return figure


def _disc(axes: Axes, points: np.ndarray, codes: np.ndarray, c: int) -> None:
    plane, share = leading_plane(points, codes == c)
    axes.add_patch(Circle((0, 0), 1, facecolor="none", edgecolor=MUTED, linewidth=0.9, zorder=3))
    axes.plot([-1, 1], [0, 0], color=LINE, linewidth=0.6, zorder=0)
    axes.plot([0, 0], [-1, 1], color=LINE, linewidth=0.6, zorder=0)
    _scatter(axes, plane[:, 0], plane[:, 1], codes, c)
    if points.shape[1] > 2:
        axes.text(1.0, -1.0, f"{100 * share:.0f} %", ha="right", va="bottom", fontsize=8.5, color=MUTED)
    axes.set(xlim=(-1.06, 1.06), ylim=(-1.06, 1.06), aspect="equal")


def _strip(axes: Axes, values: np.ndarray, codes: np.ndarray, c: int, m: int) -> None:
    """One number has no plane: a lane for each class, the same jitter in every drawing."""
    jitter = (np.arange(len(values)) * _GOLDEN) % 1 - 0.5
    axes.axhspan(c - 0.5, c + 0.5, color=LINE, alpha=0.35, linewidth=0, zorder=0)
    for edge in (-1, 0, 1):
        axes.plot([edge, edge], [-0.5, m - 0.5], color=MUTED if edge else LINE, linewidth=0.8, zorder=0)
    _scatter(axes, values, codes + 0.8 * jitter, codes, c)
    # Room above the lanes for name and image.
    axes.set(xlim=(-1.06, 1.06), ylim=(m - 0.4, -0.6 - 0.22 * m))


def _scatter(axes: Axes, x: np.ndarray, y: np.ndarray, codes: np.ndarray, c: int) -> None:
    """Other classes first and faint, in row order, so that none always lies on top; the own class last."""
    many = len(codes) > 1500
    own = codes == c
    styles = [class_style(int(code)) for code in range(int(codes.max(initial=0)) + 1)]
    colors = np.array([style[0] for style in styles])
    markers = np.array([style[1] for style in styles])
    look: dict[str, Any] = {"linewidths": 0, "zorder": 1}
    for marker in dict.fromkeys(markers):
        part = ~own & (markers[codes] == marker)
        if part.any():
            axes.scatter(
                x[part],
                y[part],
                s=3.5 if many else 9,
                c=colors[codes[part]],
                marker=marker,
                alpha=0.45,
                **look,
            )
    color, marker = class_style(c)
    axes.scatter(
        x[own], y[own], s=5 if many else 12, c=color, marker=marker, alpha=0.75, linewidths=0, zorder=2
    )
