"""Interpretation of the numbers of a report: intervals, differences of errors, use of the model."""

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

_Z = 1.959964  # 97.5 % quantile of the normal distribution, for 95 % intervals


def wilson_interval(share: float, rows: float) -> tuple[float, float]:
    """Return the 95 % interval of a share that was counted on a number of rows (Wilson, 1927)."""
    z2 = _Z * _Z / rows
    centre = (share + z2 / 2) / (1 + z2)
    half = _Z * math.sqrt(share * (1 - share) / rows + z2 / (4 * rows)) / (1 + z2)
    return max(0.0, centre - half), min(1.0, centre + half)


def format_error(error: float, rows: int | None, *, wrong: int | None = None) -> str:
    """Return an error as text, with its number of rows and 95 % interval if the number is known."""
    if not rows or error != error:
        return percent(error)
    low, high = wilson_interval(error, rows)
    counted = f"of {count(rows, 'row')}" if wrong is None else f"{wrong:,} of {count(rows, 'row')}"
    return f"{percent(error)} ({counted}; 95 % interval {100 * low:.2f} to {100 * high:.2f} %)"


def _source_text(run: RunFiles, role: str) -> str | None:
    """Return the dataset and row range of a job's 'train', 'validation' or 'test' rows as text, or None."""
    data = run.job.get("data", {})
    if not data.get(role):
        return None
    rows = data.get(f"{role}_rows")
    return f"{data[role]}, rows {rows}" if rows else str(data[role])


def count_validation_rows(run: RunFiles) -> int | None:
    """Return the number of validation rows of a run, or None if the number is unknown."""
    rows = run.event("fit_started").get("validation_rows")
    if rows is None and isinstance(text := run.job.get("data", {}).get("validation_rows"), str):
        first, _, last = text.partition(":")
        rows = int(last) - int(first or 0) if last.isdecimal() and (first or "0").isdecimal() else None
    return int(rows) if rows else None


def explain_error_gap(run: RunFiles, passes: int, members: int = 1) -> str | None:
    """Return a text that explains why validation and test error differ; None if one of them is missing."""
    data = run.job.get("data", {})
    validation, test = _source_text(run, "validation"), _source_text(run, "test")
    if validation is None or test is None:
        return None
    which = "The model is" if members == 1 else f"Each of the {members} members is"
    chosen = (
        f"{which} the best of {count(passes, 'pass', 'passes')} on the validation rows ({validation}), so "
        f"the validation error is slightly too low. The fit did not use the test rows ({test})."
    )
    if data["validation"] == data["test"]:
        more = (
            "Both are rows of one dataset, so that the remaining difference is by chance; the intervals show "
            "its size."
        )
    else:
        more = (
            "The rows come from different sources, which may differ in kind (other writers, cameras, days). "
            "The errors then differ by more than chance. Expect the test error for rows like the test rows."
        )
    return f"{chosen} {more}"


def usage_snippet(
    run: RunFiles, model: StreamedEstimator, line: str = "", *, verb: str = "predict", gives: str = "classes"
) -> str:
    """Return Python code that loads the saved model of this run and applies it to rows."""
    data: Mapping[str, Any] = run.job.get("data", {})
    rows = next((data[role] for role in ("test", "validation", "train") if data.get(role)), None)
    if rows is not None and str(rows).startswith("("):  # a placeholder: the rows were in memory
        rows = None
    width = f"{model.n_features_in_} features"
    lines = [
        "import scalelatent as sl",
        "",
        f"model = sl.load_model({_make_absolute(run.place.name_of('model.zarr'))!r})",
    ]
    if line:
        lines.append(line)
    elif rows is None:
        lines.append(f"{verb}ed = model.{verb}(x)  # x: array (rows, {width}); {gives}")
    else:
        lines.append(f"rows = sl.open_dataset({_make_absolute(str(rows))!r})")
        lines.append(f"model.{verb}(rows[:10])  # {gives}; also accepts an array (rows, {width})")
    return "\n".join(lines)


def _make_absolute(url: str) -> str:
    return os.path.abspath(url) if is_local(url) else url
