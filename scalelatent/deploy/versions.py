"""Versions of packages, and the comparison of versions in a cluster.

Dask sends functions by name. If client and workers have different versions, tasks fail late with unclear
errors, or give other results. Versions are therefore compared before a job is sent.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata

_PACKAGES = (
    "numpy", "numba", "llvmlite", "scipy", "scikit-learn", "zarr", "numcodecs", "dask", "distributed",
    "bokeh", "fsspec", "s3fs", "pydantic", "typer", "rich", "threadpoolctl", "psutil", "matplotlib", "pandas",
    "cupy-cuda12x", "cupy-cuda13x", "cupy",
)  # fmt: skip
COMPARED = ("scalelatent", "python", "numpy", "numba", "llvmlite", "zarr", "numcodecs", "dask", "distributed")
CUPY_WHEELS = ("cupy-cuda12x", "cupy-cuda13x", "cupy")
MISSING = "missing"


def versions() -> dict[str, str | None]:
    """Return the versions of scalelatent, Python and the dependencies, without importing them."""
    from scalelatent import __version__

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


@dataclass(frozen=True)
class Difference:
    """Package whose versions differ; ``here`` and ``scheduler`` are empty if only the workers use it."""

    package: str
    here: str
    scheduler: str
    workers: dict[str, list[str]] = field(default_factory=dict)  # workers by version


def find_differences(
    here: Mapping[str, str | None],
    scheduler: Mapping[str, str | None],
    workers: Mapping[str, Mapping[str, str | None]],
) -> list[Difference]:
    """Compare versions here, of a scheduler and of its workers; compare CuPy only among workers with CuPy."""
    ours, theirs = _relevant(here), _relevant(scheduler)
    each = {address: _relevant(found) for address, found in sorted(workers.items())}
    rows = []
    for package in COMPARED:
        there: dict[str, list[str]] = {}
        for address, found in each.items():
            there.setdefault(found[package], []).append(address)
        if {theirs[package], *there} - {ours[package]}:
            rows.append(Difference(package, ours[package], theirs[package], there))
    with_cupy: dict[str, list[str]] = {}
    for address, found in each.items():
        if found["cupy"] != MISSING:
            with_cupy.setdefault(found["cupy"], []).append(address)
    if len(with_cupy) > 1:
        rows.append(Difference("cupy", "", "", with_cupy))
    return rows


def _relevant(found: Mapping[str, str | None]) -> dict[str, str]:
    selected = {name: found.get(name) or MISSING for name in COMPARED}
    selected["python"] = ".".join(selected["python"].split(".")[:2])
    selected["cupy"] = next((found[name] or MISSING for name in CUPY_WHEELS if found.get(name)), MISSING)
    return selected


def format_differences(rows: list[Difference]) -> str:
    """Return differences as a table with one line per package."""
    lines = [("package", "here", "scheduler", "workers")]
    for row in rows:
        versions_of_workers = (
            f"{version} ({addresses[0] if len(addresses) == 1 else f'{len(addresses)} workers'})"
            for version, addresses in sorted(row.workers.items())
        )
        lines.append((row.package, row.here, row.scheduler, ", ".join(versions_of_workers)))
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    return "\n".join(
        "  ".join(f"{text:<{width}}" for text, width in zip(line, [*widths, 0], strict=True)).rstrip()
        for line in lines
    )
