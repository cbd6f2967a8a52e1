"""What stands for a run on the command line: a run folder, or a saved model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from scalelatent.errors import JobError, StoreError
from scalelatent.storage.disk import is_local, locate

from .runfolder import RunFolder, is_run_folder

__all__ = ["find_runs", "load_run", "model_info"]


def load_run(path: str | os.PathLike[str]) -> tuple[Any, RunFolder | None]:
    """Load the fitted model that a run folder or a saved model holds."""
    from scalelatent.engine.saved_models import load_model

    place = locate(path)
    if is_local(place.url) and not os.path.exists(place.url):
        raise JobError(
            f"{path} does not exist; RUN is a run folder or a saved model (looked in {Path.cwd()})"
        )
    if not is_run_folder(place.url):
        return load_model(place.url), None
    folder = RunFolder.open(place.url)
    if not folder.has_model:
        state = folder.read_state()["state"]
        todo = (
            "wait for it to end" if state == "running" else f"finish it with: scalelatent resume {folder.url}"
        )
        raise JobError(f"run {folder.url} has no model yet (state: {state}); {todo}")
    return load_model(folder.url), folder


def find_runs(below: str | os.PathLike[str] = ".", *, depth: int = 3) -> list[RunFolder]:
    """Return the run folders below a folder, by path."""
    try:
        if is_run_folder(below):
            return [RunFolder(below)]
    except StoreError:  # a folder of somebody else
        return []
    if not is_local(below):
        names = locate(below).keys("") if depth else []
        inner = [f"{os.fspath(below).rstrip('/')}/{name}" for name in names]
        return [folder for url in inner for folder in find_runs(url, depth=0)]
    found: list[RunFolder] = []
    if depth == 0:
        return found
    try:
        inner = sorted(entry.path for entry in os.scandir(below) if not entry.name.startswith("."))
    except OSError:
        return found
    for path in filter(os.path.isdir, inner):  # not a link that leads in a circle
        if not os.path.exists(os.path.join(path, "zarr.json")):  # a dataset may hold a million files
            found.extend(find_runs(path, depth=depth - 1))
    return found


def model_info(estimator: Any) -> dict[str, Any]:
    """Return what is worth knowing of a fitted model, as JSON-able values."""
    from scalelatent.estimators.learned import brief, learned_of

    parameters = {key: brief(value) for key, value in estimator.get_params(deep=False).items()}
    return {"model": type(estimator).__name__, "parameters": parameters, "learned": learned_of(estimator)}
