"""Versions and settings of everything that can change a result or a speed."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator
from importlib import metadata

__all__ = ["environment", "show_versions", "versions"]

_PACKAGES = (
    "numpy", "numba", "llvmlite", "scipy", "scikit-learn", "zarr", "numcodecs", "dask", "distributed",
    "bokeh", "fsspec", "s3fs", "pydantic", "typer", "rich", "threadpoolctl", "psutil", "matplotlib", "pandas",
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
    >>> from scalelatent.deploy.versions import versions
    >>> sorted(versions())[:2]
    ['bokeh', 'cupy']
    """
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


def environment() -> dict[str, str]:
    """Return what else decides bits and speed: processor, thread pools, compiler, GPU, codecs, cluster.

    Unlike :func:`versions` this loads the libraries that it asks.

    Returns
    -------
    dict of str to str
        A probe that fails says so in its value.

    Examples
    --------
    >>> from scalelatent.deploy.versions import environment
    >>> sorted(environment())
    ['blas', 'cluster', 'codecs', 'compiler', 'cpu', 'gpu', 'threads', 'zarr config']
    """
    probes: dict[str, Callable[[], Iterator[str]]] = {
        "cpu": _cpu,
        "threads": _threads,
        "blas": _blas,
        "compiler": _compiler,
        "gpu": _gpu,
        "zarr config": _zarr,
        "codecs": _codecs,
        "cluster": _cluster,
    }
    found = {}
    for name, probe in probes.items():
        try:
            found[name] = ", ".join(probe())
        except Exception as error:  # noqa: BLE001  a report of a broken installation must not break
            found[name] = f"not known ({type(error).__name__}: {error})"
    return found


def show_versions() -> None:
    """Print what belongs into a bug report: versions, processor, thread pools, compiler, GPU, codecs.

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


# Instruction sets that kernels and BLAS choose their code by.
_FEATURES = ("avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "neon", "sve")


def _cpu() -> Iterator[str]:
    import llvmlite.binding as llvm
    from dask.system import cpu_count

    yield f"{llvm.get_host_cpu_name()} ({platform.machine()})"
    features = llvm.get_host_cpu_features()
    yield " ".join(name for name in _FEATURES if features.get(name)) or "no vector instructions known"
    yield f"{cpu_count()} of {os.cpu_count()} cores usable"


def _threads() -> Iterator[str]:
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
    for name in names:
        yield f"{name}={os.environ.get(name, '')}" if name in os.environ else f"{name} not set"


def _blas() -> Iterator[str]:
    import numpy.linalg  # noqa: F401  loads the library that numpy multiplies with
    import scipy.linalg  # noqa: F401
    from threadpoolctl import threadpool_info

    for pool in threadpool_info():
        yield (
            f"{pool['internal_api']} {pool.get('version')} {pool.get('architecture', '')}".rstrip()
            + f" ({os.path.basename(pool['filepath'])}), {pool['num_threads']} threads"
        )


def _compiler() -> Iterator[str]:
    from scalelatent.kernels.jit import CACHE  # settles where compiled kernels are kept

    import llvmlite.binding as llvm  # isort: skip
    import numba  # isort: skip

    settings = vars(numba.config)  # filled when it is imported
    yield f"LLVM {'.'.join(map(str, llvm.llvm_version_info))}"
    yield f"SVML {'in use' if settings.get('USING_SVML') else 'not in use'}"
    yield f"{settings.get('NUMBA_NUM_THREADS')} threads"
    yield f"compiled kernels in {CACHE}"
    if settings.get("DISABLE_JIT"):
        yield "NUMBA_DISABLE_JIT is set"


def _gpu() -> Iterator[str]:
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


def _zarr() -> Iterator[str]:
    import zarr

    for name in ("codec_pipeline.path", "async.concurrency", "threading.max_workers"):
        yield f"{name} {zarr.config.get(name)}"


def _codecs() -> Iterator[str]:
    import numcodecs.blosc
    import zarr.codecs

    yield from sorted(name.removesuffix("Codec") for name in zarr.codecs.__all__ if name.endswith("Codec"))
    yield f"Blosc with {' '.join(numcodecs.blosc.list_compressors())}"


def _cluster() -> Iterator[str]:
    from .clusters import current_client

    client = current_client()
    if client is None:
        yield "none: fits run in this process"
        return
    threads = client.nthreads()
    yield f"{client.scheduler.address}, {len(threads)} workers, {sum(threads.values())} threads"
