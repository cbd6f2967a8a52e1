"""Versions of everything that can change a result or a speed."""

from __future__ import annotations

import platform
import sys
from importlib import metadata

__all__ = ["show_versions", "versions"]

_PACKAGES = (
    "numpy", "numba", "llvmlite", "scipy", "scikit-learn", "zarr", "numcodecs", "dask", "distributed",
    "bokeh", "fsspec", "pydantic", "typer", "rich", "threadpoolctl", "psutil", "matplotlib",
    "cupy-cuda12x", "cupy-cuda13x", "cupy",
)  # fmt: skip


def versions() -> dict[str, str | None]:
    """Return the versions of scalelatent, Python and the packages it stands on.

    Returns
    -------
    dict of str to (str or None)
        None where a package is not installed. Nothing is imported to find out.

    Examples
    --------
    >>> from scalelatent._versions import versions
    >>> sorted(versions())[:2]
    ['bokeh', 'cupy']
    """
    from . import __version__

    found: dict[str, str | None] = {
        "scalelatent": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def show_versions() -> None:
    """Print the versions that belong into a bug report.

    Examples
    --------
    >>> import scalelatent as sl
    >>> sl.show_versions()  # doctest: +ELLIPSIS
    scalelatent    0.1.0
    python         3...
    """
    for name, version in versions().items():
        if version is not None:
            sys.stdout.write(f"{name:<14} {version}\n")
