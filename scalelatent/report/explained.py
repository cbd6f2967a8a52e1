"""What a reader of a report needs beside its numbers: intervals, why errors differ, how to use the model."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from scalelatent.storage.disk import is_local

from .page import count
from .runfiles import RunFiles
from .style import percent

__all__ = [
    "calibration_text",
    "error_text",
    "how_to_use",
    "source_of",
    "validation_rows",
    "why_errors_differ",
    "wilson",
]

# Of the normal distribution, for 95 %.
_Z = 1.959964


def wilson(share: float, rows: float) -> tuple[float, float]:
    """The 95 % interval of a share of so many rows (Wilson, 1927).

    Examples
    --------
    >>> [round(end, 4) for end in wilson(0.05, 200)], [round(end, 3) for end in wilson(0.0, 100)]
    ([0.0274, 0.0896], [0.0, 0.037])
    """
    z2 = _Z * _Z / rows
    centre = (share + z2 / 2) / (1 + z2)
    half = _Z * math.sqrt(share * (1 - share) / rows + z2 / (4 * rows)) / (1 + z2)
    return max(0.0, centre - half), min(1.0, centre + half)


def error_text(error: float, rows: int | None, *, wrong: int | None = None) -> str:
    """An error with the rows that it was counted on and its 95 % interval; without these where unknown.

    Examples
    --------
    >>> error_text(0.05, 200, wrong=10)
    '5.00 % (10 of 200 rows; 95 % interval 2.74 to 8.96 %)'
    >>> error_text(0.05, None)
    '5.00 %'
    """
    if not rows or error != error:
        return percent(error)
    low, high = wilson(error, rows)
    counted = f"of {count(rows, 'row')}" if wrong is None else f"{wrong:,} of {count(rows, 'row')}"
    return f"{percent(error)} ({counted}; 95 % interval {100 * low:.2f} to {100 * high:.2f} %)"


def source_of(run: RunFiles, role: str) -> str | None:
    """Which rows a job takes for a role: a dataset and a range, or None."""
    data = run.job.get("data", {})
    if not data.get(role):
        return None
    rows = data.get(f"{role}_rows")
    return f"{data[role]}, rows {rows}" if rows else str(data[role])


def validation_rows(run: RunFiles) -> int | None:
    """How many validation rows a run had; None where that is not known."""
    rows = run.event("fit_started").get("validation_rows")
    if rows is None and isinstance(text := run.job.get("data", {}).get("validation_rows"), str):
        first, _, last = text.partition(":")
        rows = int(last) - int(first or 0) if last.isdecimal() and (first or "0").isdecimal() else None
    return int(rows) if rows else None


def why_errors_differ(run: RunFiles, passes: int, members: int = 1) -> str | None:
    """Why validation and test error differ; None unless the job has both."""
    data = run.job.get("data", {})
    validation, test = source_of(run, "validation"), source_of(run, "test")
    if validation is None or test is None:
        return None
    which = "The model is" if members == 1 else f"Each of the {members} members is"
    chosen = (
        f"{which} the best of {count(passes, 'pass', 'passes')} on the validation rows ({validation}), so "
        f"that the error there is a little too good; the test rows ({test}) had no part in the fit."
    )
    if data["validation"] == data["test"]:
        more = "Both are of one dataset, so that otherwise they differ by chance, as the intervals tell."
    else:
        more = (
            "They come from different sources, which may hold rows of different kinds (other writers, "
            "cameras, days): errors then differ by more than chance, and the test error is the one to "
            "expect of rows like the test rows."
        )
    return f"{chosen} {more}"


def how_to_use(run: RunFiles, model: Any) -> str:
    """Python that loads the saved model and applies it to rows, with the paths of this run."""
    data: Mapping[str, Any] = run.job.get("data", {})
    rows = next((data[role] for role in ("test", "validation", "train") if data.get(role)), None)
    if rows is not None and str(rows).startswith("("):  # of a fit in Python: they lived in memory
        rows = None
    kind = getattr(type(model), "_kind", "")
    network, width = kind == "mbn", f"{model.n_features_in_} features"
    verb, gives = ("transform", "components") if network else ("predict", "classes")
    if kind == "crbm":
        gives = "outputs, 0 or 1"
    lines = [
        "import scalelatent as sl",
        "",
        f"model = sl.load_model({_path(run.place.name_of('model.zarr'))!r})",
    ]
    if getattr(model, "_source", None) == "plain":
        return "\n".join([*lines, "h = model.transform(v)  # v: array of zeros and ones; h: hidden units"])
    if rows is None:
        return "\n".join([*lines, f"{verb}ed = model.{verb}(x)  # x: array (rows, {width}); {gives}"])
    return "\n".join(
        [
            *lines,
            f"rows = sl.open_dataset({_path(str(rows))!r})",
            f"model.{verb}(rows[:10])  # {gives}; also of an array (rows, {width})",
        ]
    )


def _path(url: str) -> str:
    return os.path.abspath(url) if is_local(url) else url


def calibration_text(kept: Any, architecture: str) -> str:
    """What the calibration error is, and what this one says."""
    total = max(float(kept.counts.sum()), 1e-300)
    promised, right = float(kept.confidence.sum()) / total, float(kept.hits.sum()) / total
    words = [
        "The mean distance, in percentage points, between the probability that the predicted class is given "
        "and the share of rows in which it is right, over ten bins of probability, weighted by their rows. "
        "At 0 % a probability of 90 % is right nine times in ten.",
        f"Here the predicted class is given {percent(promised)} on average and is right in {percent(right)} "
        f"of the rows: the model is {'too modest' if right >= promised else 'too sure'}.",
    ]
    if architecture == "one_vs_all":
        words.append(
            "In a one-versus-all model each class has a probability of its own; they are divided by their "
            "sum, which makes them small where many classes get some. They rank classes."
        )
    words.append(
        "It says nothing of which class wins. Before probabilities are used as such: "
        "sklearn.calibration.CalibratedClassifierCV."
    )
    return " ".join(words)
