"""Versions and settings that affect results or speed, and the comparison of versions in a cluster.

Dask sends functions by name. With different versions on both sides, tasks fail late with unclear errors, or
give other results. Versions are therefore compared before a job is sent.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
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
    """Package with different versions; ``here`` and ``scheduler`` are empty if only workers need it."""

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


def environment() -> dict[str, str]:
    """Return settings of CPU and libraries that affect results or speed; import the libraries."""
    probes: dict[str, Callable[[], Iterator[str]]] = {
        "cpu": _describe_cpu,
        "threads": _describe_threads,
        "blas": _describe_blas,
        "compiler": _describe_compiler,
        "gpu": _describe_gpu,
    }
    found = {}
    for name, probe in probes.items():
        try:
            found[name] = ", ".join(probe())
        except Exception as error:  # noqa: BLE001  a broken package must not prevent the report
            found[name] = f"unknown ({type(error).__name__}: {error})"
    return found


def show_versions() -> None:
    """Print the information for a bug report: versions, processor, thread pools, compiler, GPU.

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
    sys.stdout.write("\n")
    for name, value in environment().items():
        sys.stdout.write(f"{name:<14} {value}\n")


# Instruction sets for which kernels and BLAS have special code.
_FEATURES = ("avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "neon", "sve")


def _describe_cpu() -> Iterator[str]:
    import llvmlite.binding as llvm
    from dask.system import cpu_count

    yield f"{llvm.get_host_cpu_name()} ({platform.machine()})"
    features = llvm.get_host_cpu_features()
    yield " ".join(name for name in _FEATURES if features.get(name)) or "no vector instructions known"
    yield f"{cpu_count()} of {os.cpu_count()} cores usable"


def _describe_threads() -> Iterator[str]:
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
    for name in names:
        yield f"{name}={os.environ.get(name, '')}" if name in os.environ else f"{name} not set"


def _describe_blas() -> Iterator[str]:
    import numpy.linalg  # noqa: F401  these imports load the BLAS libraries
    import scipy.linalg  # noqa: F401
    from threadpoolctl import threadpool_info

    for pool in threadpool_info():
        yield (
            f"{pool['internal_api']} {pool.get('version')} {pool.get('architecture', '')}".rstrip()
            + f" ({os.path.basename(pool['filepath'])}), {pool['num_threads']} threads"
        )


def _describe_compiler() -> Iterator[str]:
    from scalelatent.kernels.cache_folder import (
        CACHE_FOLDER,  # this import sets the folder of compiled kernels
    )

    # numba reads the folder at its import, so the next two imports must stay below the import above.
    import llvmlite.binding as llvm  # isort: skip
    import numba  # isort: skip

    settings = vars(numba.config)  # `vars`, because type checkers do not know attributes that numba sets
    yield f"LLVM {'.'.join(map(str, llvm.llvm_version_info))}"
    yield f"SVML {'in use' if settings.get('USING_SVML') else 'not in use'}"
    yield f"{settings.get('NUMBA_NUM_THREADS')} threads"
    yield f"compiled kernels in {CACHE_FOLDER}"
    if settings.get("DISABLE_JIT"):
        yield "NUMBA_DISABLE_JIT is set"


def _describe_gpu() -> Iterator[str]:
    try:
        import cupy
    except ImportError:
        yield "no CuPy"
        return
    runtime = cupy.cuda.runtime
    yield f"CUDA runtime {runtime.runtimeGetVersion()}, driver {runtime.driverGetVersion()}"
    for i in range(runtime.getDeviceCount()):
        card = runtime.getDeviceProperties(i)
        yield f"{card['name'].decode()} ({card['totalGlobalMem'] / 2**30:.0f} GiB)"
