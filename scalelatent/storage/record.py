"""Records: small trees of dataclasses, named tuples and arrays as one checksummed file. No pickle."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import io
import json
import threading
import zipfile
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np

from scalelatent.errors import RunError

from .disk import Location, locate
from .old_names import MOVED_MODULES

MODELS = "scalelatent.models"
"""Group of entry points with which packages declare their models."""

_DIGEST_BYTES = 32
# Only one thread at a time may read arrays. NumPy parses headers with Python's parser, where two threads
# may get "SystemError: AST constructor recursion depth mismatch" in some releases of Python (gh-106905).
_read_lock = threading.Lock()


def dumps(tree: object) -> bytes:
    """Return the bytes of a tree of dataclasses, dicts, lists, tuples, arrays, numbers, strings and None.

    Named tuples keep their type.
    """
    arrays: dict[str, np.ndarray] = {}
    head = _flatten(tree, arrays, {})
    text = np.frombuffer(json.dumps(head).encode(), dtype=np.uint8)
    buffer = io.BytesIO()
    members: dict[str, Any] = {"head": text, **arrays}
    np.savez(buffer, **members)  # NumPy before 2.2 would take allow_pickle for the name of an array.
    body = buffer.getvalue()
    return body + hashlib.sha256(body).digest()


def loads(data: bytes) -> Any:
    """Return the tree from the bytes of :func:`dumps`; raise `RunError` if the checksum differs."""
    body, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if len(data) <= _DIGEST_BYTES or hashlib.sha256(body).digest() != digest:
        raise RunError("the record is incomplete or changed: its checksum is wrong")
    with _read_lock, _open_arrays(body) as arrays:
        # Read each array once, because every access to an npz file makes another copy of the array.
        try:
            return _build_value(
                json.loads(arrays["head"].tobytes()), {name: arrays[name] for name in arrays.files}
            )
        except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise RunError(
                f"the record is not a tree of values ({type(error).__name__}: {error}): resume with the "
                "version that wrote it, or start again"
            ) from None


def write_record(location: str | Path | Location, name: str, tree: object, *, durable: bool = True) -> int:
    """Write a record as one complete file; return its size in bytes."""
    location, data = locate(location), dumps(tree)
    try:
        location.write(name, data, durable=durable)
    except OSError as error:
        raise RunError(
            f"cannot write {location.name_of(name)} ({len(data)} bytes): {error}. Free some space or correct "
            "the problem, then resume the run; earlier checkpoints are kept"
        ) from error
    return len(data)


def read_record(location: str | Path | Location, name: str) -> Any:
    """Read a record and return its tree; raise `RunError` if it is missing or damaged."""
    location = locate(location)
    try:
        data = location.read(name)
        if data is None:
            raise RunError("there is no such file")
        return loads(data)
    except (RunError, OSError) as error:
        raise RunError(f"{location.name_of(name)}: {error}") from error


def same_array(array: np.ndarray) -> tuple[object, ...]:
    """Return a key that is equal for equal views of the same memory, as long as the array exists."""
    return array.__array_interface__["data"][0], array.shape, array.strides, array.dtype.str


def _open_arrays(body: bytes) -> Any:
    try:
        return np.load(io.BytesIO(body), allow_pickle=False)
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise RunError(f"the record holds no arrays ({error}): start again") from None


def _flatten(value: object, arrays: dict[str, np.ndarray], names: dict[object, str]) -> object:
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise TypeError("a record holds arrays of numbers and strings, not of Python objects")
        name = names.setdefault(same_array(value), f"a{len(arrays)}")
        arrays[name] = value
        return {"!array": name}
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if (known := _fields(type(value))) is not None:
        fields = {name: _flatten(getattr(value, name), arrays, names) for name in known}
        return {"!type": f"{type(value).__module__}:{type(value).__qualname__}", "fields": fields}
    if isinstance(value, tuple):
        return {"!tuple": [_flatten(v, arrays, names) for v in value]}
    if isinstance(value, list):
        return [_flatten(v, arrays, names) for v in value]
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        return {"!dict": {k: _flatten(v, arrays, names) for k, v in value.items()}}
    raise TypeError(f"a record holds dataclasses, arrays and plain values, not {type(value).__name__}")


def _fields(cls: object) -> dict[str, bool] | None:
    """Map each field of a dataclass or named tuple to True if it has a default; None for other types."""
    if not isinstance(cls, type):
        return None
    if dataclasses.is_dataclass(cls):
        return {f.name: f.default is not dataclasses.MISSING for f in dataclasses.fields(cls)}
    if issubclass(cls, tuple) and hasattr(cls, "_fields") and hasattr(cls, "_field_defaults"):
        return {name: name in cls._field_defaults for name in cls._fields}
    return None


def _is_trusted(module: str) -> bool:
    """Return whether records may name types of a module: only scalelatent and packages with models."""
    package = module.partition(".")[0]
    if package == "scalelatent":
        return True
    return any(point.module.partition(".")[0] == package for point in entry_points(group=MODELS))


def _build_value(head: Any, arrays: Any) -> Any:
    if isinstance(head, list):
        return [_build_value(v, arrays) for v in head]
    if not isinstance(head, dict):
        return head
    if "!array" in head:
        return arrays[head["!array"]]
    if "!tuple" in head:
        return tuple(_build_value(v, arrays) for v in head["!tuple"])
    if "!dict" in head:
        return {k: _build_value(v, arrays) for k, v in head["!dict"].items()}
    module, _, name = str(head["!type"]).partition(":")
    if not _is_trusted(module):
        raise RunError(
            f"the record names the type {head['!type']!r}, which is not one of scalelatent's, nor of a "
            f"package that declares models here (entry points {MODELS})"
        )
    try:
        cls = getattr(importlib.import_module(MOVED_MODULES.get(module, module)), name)
    except (ImportError, AttributeError):
        cls = None
    fields = {k: _build_value(v, arrays) for k, v in head["fields"].items()}
    known = _fields(cls)
    # Records of earlier versions lack fields that were added later; each added field has a default.
    lacking = {name for name in known or {} if name not in fields}
    if known is None or not set(fields) <= set(known) or not all(known[name] for name in lacking):
        raise RunError(
            f"the record holds {head['!type']!r} with the fields {', '.join(fields)}, which this version "
            "of scalelatent does not know: resume with the version that wrote it, or start again"
        )
    return cls(**fields)
