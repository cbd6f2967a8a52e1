"""What a reader of a report needs beside its numbers: intervals, why errors differ, how to use the model."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from scalelatent.storage.disk import is_local

from .page import count
from .runfiles import RunFiles
from .style import percent

if TYPE_CHECKING:
    from scalelatent.estimators.base import StreamedEstimator

# Of the normal distribution, for 95 %.
_Z = 1.959964


def wilson(share: float, rows: float) -> tuple[float, float]:
    """The 95 % interval of a share of so many rows (Wilson, 1927)."""
    z2 = _Z * _Z / rows
    centre = (share + z2 / 2) / (1 + z2)
    half = _Z * math.sqrt(share * (1 - share) / rows + z2 / (4 * rows)) / (1 + z2)
    return max(0.0, centre - half), min(1.0, centre + half)


def error_text(error: float, rows: int | None, *, wrong: int | None = None) -> str:
    """An error with the rows that it was counted on and its 95 % interval; without these where unknown."""
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


def how_to_use(
    run: RunFiles, model: StreamedEstimator, line: str = "", *, verb: str = "predict", gives: str = "classes"
) -> str:
    """Python that loads the saved model and applies it to rows, with the paths of this run."""
    data: Mapping[str, Any] = run.job.get("data", {})
    rows = next((data[role] for role in ("test", "validation", "train") if data.get(role)), None)
    if rows is not None and str(rows).startswith("("):  # of a fit in Python: they lived in memory
        rows = None
    width = f"{model.n_features_in_} features"
    lines = [
        "import scalelatent as sl",
        "",
        f"model = sl.load_model({_path(run.place.name_of('model.zarr'))!r})",
    ]
    if line:
        lines.append(line)
    elif rows is None:
        lines.append(f"{verb}ed = model.{verb}(x)  # x: array (rows, {width}); {gives}")
    else:
        lines.append(f"rows = sl.open_dataset({_path(str(rows))!r})")
        lines.append(f"model.{verb}(rows[:10])  # {gives}; also of an array (rows, {width})")
    return "\n".join(lines)


def _path(url: str) -> str:
    return os.path.abspath(url) if is_local(url) else url
