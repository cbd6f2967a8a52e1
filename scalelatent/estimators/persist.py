"""Models on disk: a zarr group of arrays with JSON attributes. No pickle, no times, no host names."""

from __future__ import annotations

import hashlib
import json
import shutil
import uuid
from pathlib import Path
from typing import Any

import numpy as np

from scalelatent.errors import DataError

FORMAT, FORMAT_VERSION = "scalelatent-model", 1


def save_model(
    url: str | Path,
    kind: str,
    params: dict[str, Any],
    values: dict[str, Any],
    arrays: dict[str, np.ndarray],
    *,
    overwrite: bool = False,
) -> None:
    """Write a model aside, then rename it: a model that is there is whole.

    Raises
    ------
    DataError
        Something lies there and ``overwrite`` is False, or the disk cannot be written.
    """
    import zarr

    path = Path(url)
    if path.exists() and not overwrite:
        raise DataError(f"{path} exists: choose another place, or pass overwrite=True to replace it")
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        group = zarr.create_group(aside)
        for name, array in arrays.items():
            group.create_array(name, data=np.ascontiguousarray(array))
        attrs = {
            "digests": {name: _digest(array) for name, array in arrays.items()},
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "kind": kind,
            "params": params,
            "values": values,
        }
        group.attrs.update(json.loads(json.dumps(attrs)))
        if path.exists():
            shutil.rmtree(path)
        aside.rename(path)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise DataError(
            f"cannot write the model {path}: {error}; free space or choose another place, then save again"
        ) from error


def read_model(url: str | Path) -> tuple[str, dict[str, Any], dict[str, Any], dict[str, np.ndarray]]:
    """(kind, params, values, arrays) of a saved model.

    Raises
    ------
    DataError
        Missing, no model, or of a newer format.
    """
    import zarr

    path = Path(url)
    if not (path / "zarr.json").exists():
        raise DataError(
            f"{path} is no saved model: give a folder that `save` wrote, or a run folder's model.zarr"
        )
    try:
        group = zarr.open_group(path, mode="r")
        attrs: dict[str, Any] = dict(group.attrs)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is damaged: its zarr.json cannot be read ({error}); save the model again"
        ) from error
    if attrs.get("format") != FORMAT:
        raise DataError(
            f"{path} is a zarr group, but no saved model (its format is {attrs.get('format')!r}, not "
            f"{FORMAT!r})"
        )
    if attrs["format_version"] > FORMAT_VERSION:
        raise DataError(
            f"{path} has model format {attrs['format_version']}, this scalelatent reads up to "
            f"{FORMAT_VERSION}: upgrade scalelatent"
        )
    arrays = {name: np.asarray(array[...]) for name, array in group.arrays()}
    # zarr reads a chunk that is gone as zeros: a model that predicts, and wrongly.
    for name, digest in attrs["digests"].items():
        if name not in arrays or _digest(arrays[name]) != digest:
            raise DataError(
                f"{path} is damaged: its array {name!r} is not the one that was saved; save it again"
            )
    return attrs["kind"], attrs["params"], attrs["values"], arrays


def _digest(array: np.ndarray) -> str:
    head = f"{array.dtype.str} {array.shape} ".encode()
    return hashlib.sha256(head + np.ascontiguousarray(array).tobytes()).hexdigest()


def load_model(url: str | Path) -> Any:
    """A fitted estimator from a saved model or from a run folder that holds one.

    Parameters
    ----------
    url : str or path
        What ``save`` wrote, or a run folder.

    Returns
    -------
    estimator

    Raises
    ------
    DataError
        Missing, no model, or of a newer format.

    Examples
    --------
    >>> import tempfile, numpy as np, scalelatent as sl
    >>> x, y = np.random.default_rng(0).normal(size=(60, 5)), np.arange(60) % 2
    >>> place = tempfile.mkdtemp() + "/model.zarr"
    >>> m = sl.CapsuleRegression(capsule_dim=2, max_iter=3).fit(x, y)
    >>> m.save(place)
    >>> bool((sl.load_model(place).predict(x) == m.predict(x)).all())
    True
    """
    from .registry import get_estimator

    path = Path(url)
    if (path / "model.zarr").exists():
        path = path / "model.zarr"
    kind, params, values, arrays = read_model(path)
    return get_estimator(kind)._from_saved(params, values, arrays)
