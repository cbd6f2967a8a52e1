"""Style of the figures of executed pages: readable at the size of the page, safe for colour-blind readers."""

from __future__ import annotations

import matplotlib as mpl
import matplotlib.pyplot as plt

from scalelatent.report.style import COLORS


def reset_figures(gallery_conf: dict, fname: str) -> None:
    """Close all figures and set the style before each page, so that no page depends on another."""
    plt.close("all")
    mpl.rcdefaults()
    mpl.rcParams.update(
        {
            "figure.figsize": (7.5, 3.4),
            "figure.dpi": 100,
            "figure.constrained_layout.use": True,
            "font.size": 10,
            "axes.titlesize": 10,
            "axes.prop_cycle": mpl.cycler(color=COLORS),
            "axes.edgecolor": "#868d96",
            "axes.grid": False,
            "image.cmap": "gray_r",
            "legend.frameon": False,
        }
    )
