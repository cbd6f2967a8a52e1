"""Check and create the ``[[callbacks]]`` of jobs, from this package or entry points of other packages."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from scalelatent.contract.kinds import import_object
from scalelatent.engine.callbacks import Callback, Unfailing
from scalelatent.errors import JobError, nearest

CALLBACK_ENTRY_POINTS = "scalelatent.callbacks"
OWN_CALLBACKS = {"mlflow": "scalelatent.monitor.tracking:MlflowTracking"}
# Type and description of each key of a callback in a job file, for JOB.md.
CALLBACK_KEYS = {
    "mlflow": {
        "uri": (
            "text",
            "Tracking server or store. By default `MLFLOW_TRACKING_URI` of the process that drives the run, "
            "otherwise `mlflow.db` and `mlruns` next to the run folder.",
        ),
        "experiment": ("text", "Name of the experiment, which is created if it does not exist."),
        "model": ("true, false", "Send the fitted model."),
    }
}


def check_callbacks(given: object, where: str) -> tuple[dict[str, Any], ...]:
    """Return the tables of ``[[callbacks]]``; refuse unknown names and keys."""
    if not isinstance(given, Sequence) or not all(isinstance(table, Mapping) for table in given):
        raise JobError(f'{where}: write [[callbacks]], with two brackets, and for example kind = "mlflow"')
    for table in given:
        name = table.get("kind")
        if not isinstance(name, str):
            raise JobError(f'{where}: [[callbacks]] kind is missing; write for example kind = "mlflow"')
        keys = [key for key in table if key != "kind"]
        known = inspect.signature(_class_of(name, where)).parameters
        for key in keys:
            if key not in known:
                raise JobError(
                    f"{where}: unknown key {key!r} in [[callbacks]] (kind {name!r}); {nearest(key, known)}"
                )
    return tuple(dict(table) for table in given)


def make_callbacks(tables: Sequence[Mapping[str, Any]]) -> Unfailing:
    """Return the callbacks of a job, wrapped so that their errors do not end the fit."""
    made = []
    for table in tables:
        keys = {key: value for key, value in table.items() if key != "kind"}
        try:
            made.append(_class_of(table["kind"], "job")(**keys))
        except (TypeError, ValueError) as error:
            raise JobError(f"[[callbacks]] kind {table['kind']!r}: {error}") from error
    return Unfailing(made)


def find_callback_problem(tables: Sequence[Mapping[str, Any]]) -> str:
    """Return why this process cannot create the callbacks of a job; return an empty text if it can."""
    try:
        make_callbacks(tables)
    except JobError as error:
        return str(error)
    return ""


def _class_of(name: str, where: str) -> type[Callback]:
    if name in OWN_CALLBACKS:
        found = import_object(OWN_CALLBACKS[name])
    else:
        points: dict[str, EntryPoint] = {
            point.name: point for point in entry_points(group=CALLBACK_ENTRY_POINTS)
        }
        if name not in points:
            near = nearest(name, [*OWN_CALLBACKS, *points])
            raise JobError(
                f"{where}: [[callbacks]] kind = {name!r} is unknown; {near}; other packages can add "
                f"callbacks with the entry point {CALLBACK_ENTRY_POINTS}"
            )
        try:
            found = points[name].load()
        except Exception as error:  # code of other packages may raise anything
            raise JobError(
                f"{where}: [[callbacks]] kind = {name!r} ({points[name].value}) cannot be imported: "
                f"{type(error).__name__}: {error}; repair or update its package, or remove the callback"
            ) from error
    if not (isinstance(found, type) and issubclass(found, Callback)):
        raise JobError(f"{where}: [[callbacks]] kind = {name!r} is not a subclass of scalelatent.Callback")
    return found
