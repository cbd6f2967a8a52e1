"""What stands for a run on the command line: a run folder, or a saved model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from scalelatent.errors import JobError

from .runfolder import RunFolder, is_run_folder

__all__ = ["find_runs", "load_run", "model_info"]


def load_run(path: str | os.PathLike[str]) -> tuple[Any, RunFolder | None]:
    """Load the fitted model that a run folder or a saved model holds.

    Parameters
    ----------
    path : path
        A run folder, or what an estimator's ``save`` wrote.

    Returns
    -------
    estimator : fitted estimator
    folder : RunFolder or None
        None for a saved model.

    Raises
    ------
    JobError
        If nothing is there, or the run has no model yet.
    """
    from scalelatent.estimators import load_model

    if "://" in os.fspath(path):
        return load_model(os.fspath(path)), None
    if not Path(path).exists():
        raise JobError(
            f"{path} does not exist; RUN is a run folder or a saved model (looked in {Path.cwd()})"
        )
    if not is_run_folder(path):
        return load_model(os.fspath(path)), None
    folder = RunFolder.open(path)
    if not folder.model_path.is_dir():
        state = folder.read_state()["state"]
        todo = (
            "wait for it to end"
            if state == "running"
            else f"finish it with: scalelatent resume {folder.path}"
        )
        raise JobError(f"run {folder.path} has no model yet (state: {state}); {todo}")
    return load_model(str(folder.model_path)), folder


def find_runs(below: str | os.PathLike[str] = ".", *, depth: int = 3) -> list[RunFolder]:
    """Return the run folders below a folder, by path.

    Parameters
    ----------
    below : path
    depth : int
        How many folders deep to look.

    Returns
    -------
    list of RunFolder

    Examples
    --------
    >>> import tempfile
    >>> from scalelatent.jobs.runs import find_runs
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     find_runs(folder)
    []
    """
    if is_run_folder(below):
        return [RunFolder(below)]
    found: list[RunFolder] = []
    if depth == 0:
        return found
    try:
        inner = sorted(
            entry.path for entry in os.scandir(below) if entry.is_dir() and not entry.name.startswith(".")
        )
    except PermissionError:
        return found
    for path in inner:
        if not os.path.exists(os.path.join(path, "zarr.json")):  # a dataset may hold a million files
            found.extend(find_runs(path, depth=depth - 1))
    return found


def model_info(estimator: Any) -> dict[str, Any]:
    """Return what is worth knowing of a fitted model, as JSON-able values.

    Parameters
    ----------
    estimator : fitted estimator

    Returns
    -------
    dict
        ``model``, ``parameters``, ``learned`` (scalars, or shape and dtype of arrays).
    """
    learned = {}
    for name in sorted(vars(estimator)):
        if name.endswith("_") and not name.startswith("_"):
            learned[name] = _brief(getattr(estimator, name))
    parameters = {key: _brief(value) for key, value in estimator.get_params(deep=False).items()}
    return {"model": type(estimator).__name__, "parameters": parameters, "learned": learned}


def _brief(value: Any) -> Any:
    """A scalar or a short list as it is; anything larger by shape."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        if value.size <= 20:
            return value.tolist()
        return f"array {' x '.join(map(str, value.shape))}, {value.dtype}"
    if isinstance(value, dict):
        return {str(key): _brief(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_brief(item) for item in value] if len(value) <= 20 else f"{len(value)} entries"
    if isinstance(value, str | int | float | bool | type(None)):
        return value
    return str(value)
