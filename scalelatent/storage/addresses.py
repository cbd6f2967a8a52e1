"""Properties of an address that are known without opening it."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["file_name", "is_https"]


def is_https(path: str | os.PathLike[str]) -> bool:
    """Return whether a file is on a web server."""
    return os.fspath(path).lower().startswith(("https://", "http://"))


def file_name(path: str | os.PathLike[str]) -> str:
    """Return the last part of a path or address."""
    return Path(os.fspath(path).partition("#")[0] if is_https(path) else path).name
