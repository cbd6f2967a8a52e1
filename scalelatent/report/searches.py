"""A search in a report: a table of its candidates, and a figure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .page import Picture, Table, count
from .style import COLORS, new_figure, quiet_axes

__all__ = ["candidates_picture", "candidates_table"]

# Candidates that a figure shows: the best ones.
DRAWN = 30


def candidates_table(search: Mapping[str, Any]) -> Table:
    """All candidates, the best first."""
    rows = [
        [
            str(one["rank"]),
            _words(one["params"]),
            one["error"] or "none" if one["score"] is None else f"{one['score']:.4f}",
            "" if one["spread"] is None else f"{one['spread']:.4f}",
            str(one["passes"]),
            f"{one['fit_seconds']:.1f}",
        ]
        for one in _sorted(search)
    ]
    head = ["rank", "parameters", str(search["scoring"]), "deviation over folds", "passes", "seconds a fit"]
    return Table("candidates", f"The search: {count(len(rows), 'candidate')}", head, rows)


def candidates_picture(search: Mapping[str, Any]) -> Picture:
    """Scores of the best candidates, with those of their folds."""
    shown = [one for one in _sorted(search) if one["score"] is not None][:DRAWN]
    figure = new_figure(7.2, 1.2 + 0.28 * len(shown))
    axes = figure.subplots()
    at = np.arange(len(shown))
    for place, one in enumerate(shown):
        folds = [score for score in one["scores"] if score is not None]
        axes.plot(folds, [place] * len(folds), "o", color=COLORS[0], alpha=0.35, markersize=4)
        axes.plot(one["score"], place, "D", color=COLORS[1] if place == 0 else COLORS[0], markersize=6)
    axes.set_yticks(at, [_words(one["params"])[:60] for one in shown], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(str(search["scoring"]))
    quiet_axes(axes)
    of_all = "" if len(shown) == len(search["candidates"]) else f" of {len(search['candidates'])}"
    by = "validation rows" if search["folds"] == 1 else f"{search['folds']} folds"
    caption = f"{count(len(shown), 'candidate')}{of_all}, the best on top: scores on {by}, and their mean."
    alt = f"Best: {_words(shown[0]['params'])} with {shown[0]['score']:.4f}." if shown else "No scores."
    return Picture("candidates", "Candidates of the search", caption, alt, figure)


def _sorted(search: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return sorted(search["candidates"], key=lambda one: one["rank"])


def _words(params: Mapping[str, Any]) -> str:
    told = ", ".join(f"{name} = {'none' if v is None else v}" for name, v in params.items())
    return told or "as the model"
