"""`doctor`: look at this machine the way a fit will, and name the fix of what would go wrong.

Each check is a small function that returns findings; a check that cannot run is itself a finding, so the
doctor always finishes.
"""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import socket
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from scalelatent.engine.cache import machine_memory as memory_limit
from scalelatent.errors import ScalelatentError
from scalelatent.storage.disk import is_local, locate

from .warm import cold_kernels

__all__ = ["Finding", "examine", "is_cupy", "memory_limit", "write_problem"]

MIB = 2**20
GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """One thing the doctor saw.

    Attributes
    ----------
    check : str
        What was looked at.
    status : {"ok", "warn", "fail"}
        ``warn``: works, but slower or with a risk; ``fail``: a fit will not work.
    found : str
    fix : str
        What to do; empty where all is well.
    """

    check: str
    status: str
    found: str
    fix: str = ""

    def to_dict(self) -> dict[str, str]:
        """Return the finding as a JSON-able dict."""
        return asdict(self)


def examine(folder: str | os.PathLike[str] = ".") -> list[Finding]:
    """Run every local check.

    Parameters
    ----------
    folder : path or str
        Where runs will be written; checked for space and write access, or an object store's address: for
        credentials, and for writing, reading, listing and deleting.

    Returns
    -------
    list of Finding

    Examples
    --------
    >>> from scalelatent.deploy.doctor import examine
    >>> {finding.status for finding in examine()} <= {"ok", "warn", "fail"}
    True
    """
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("python", _python),
        ("packages", _packages),
        ("cpu", _cpu),
        ("memory", _memory),
        ("malloc", _malloc),
        ("blas threads", _blas),
        ("numba", _numba),
        ("kernels", _kernels),
        ("blosc threads", _blosc),
        ("zarr", _zarr),
        ("gpu", _gpu),
        ("dashboard", _dashboard),
        ("loopback", _loopback),
        ("folder", lambda: _folder(Path(folder)) if is_local(folder) else _store(os.fspath(folder))),
    ]
    found: list[Finding] = []
    for name, check in checks:
        try:
            found.extend(check())
        except Exception as error:  # noqa: BLE001  the doctor must finish whatever a broken package raises
            fix = "choose another folder" if name == "folder" else "reinstall scalelatent"
            found.append(Finding(name, "fail", f"{type(error).__name__}: {error}", fix))
    return found


def _python() -> Iterator[Finding]:
    yield Finding("python", "ok", f"{platform.python_version()} ({sys.executable})")


def _packages() -> Iterator[Finding]:
    """Compare what is installed with what the package asks for."""
    from packaging.requirements import Requirement

    wrong, seen = [], []
    for text in metadata.requires("scalelatent") or []:
        need = Requirement(text)
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(need.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{need.name} is missing")
            continue
        seen.append(f"{need.name} {version}")
        if version not in need.specifier:
            wrong.append(f"{need.name} {version} is not {need.specifier}")
    if wrong:
        yield Finding("packages", "fail", "; ".join(wrong), "python -m pip install --upgrade scalelatent")
    else:
        yield Finding("packages", "ok", ", ".join(seen))


def _cpu() -> Iterator[Finding]:
    import psutil
    from dask.system import cpu_count

    there, usable = psutil.cpu_count() or 1, cpu_count()
    cores = psutil.cpu_count(logical=False) or "?"
    text = f"{usable} of {there} logical CPUs usable, {cores} cores, {platform.machine()}"
    if usable < there:
        fix = (
            "affinity or a quota leaves this process some of them; check taskset, batch system or container "
            "if that is not meant"
        )
        yield Finding("cpu", "warn", text, fix)
    else:
        yield Finding("cpu", "ok", text)


def _memory() -> Iterator[Finding]:
    import psutil

    limit, by = memory_limit()
    free = min(int(psutil.virtual_memory().available), limit)
    text = f"{limit / GIB:.1f} GiB (limit of {by}), {free / GIB:.1f} GiB free"
    if free < GIB:
        yield Finding("memory", "warn", text, "end other programs, or fit with [cluster] workers = 1")
    else:
        yield Finding("memory", "ok", text)


def _malloc() -> Iterator[Finding]:
    """glibc keeps freed pages unless told not to before the process starts (distributed#5971)."""
    if platform.libc_ver()[0] != "glibc":
        yield Finding("malloc", "ok", "no glibc, nothing to trim")
    elif "MALLOC_TRIM_THRESHOLD_" in os.environ:
        yield Finding("malloc", "ok", f"MALLOC_TRIM_THRESHOLD_={os.environ['MALLOC_TRIM_THRESHOLD_']}")
    else:
        yield Finding(
            "malloc", "ok",
            "MALLOC_TRIM_THRESHOLD_ is not set here; workers started by scalelatent get it from Dask's nanny",
            "workers started without a nanny: export MALLOC_TRIM_THRESHOLD_=65536 first",
        )  # fmt: skip


def _blas() -> Iterator[Finding]:
    import numpy as np
    from dask.system import cpu_count
    from threadpoolctl import threadpool_info

    np.dot(np.ones((2, 2)), np.ones((2, 2)))  # loads the library that numpy multiplies with
    pools = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
    usable = cpu_count()
    if not pools:
        yield Finding(
            "blas threads", "warn", "no BLAS found by threadpoolctl", "install numpy from PyPI or conda-forge"
        )
    for pool in pools:
        library = f"{pool['internal_api']} {pool.get('version')} ({pool.get('architecture')})"
        text = f"{library}, {pool['num_threads']} threads"
        if pool["num_threads"] > usable:
            yield Finding(
                "blas threads", "warn", f"{text} on {usable} usable CPUs", f"export OMP_NUM_THREADS={usable}"
            )
        else:
            yield Finding("blas threads", "ok", f"{text}; one each during a fit")


def _numba() -> Iterator[Finding]:
    import scalelatent.kernels.jit  # noqa: F401  settles where compiled kernels are kept

    import numba  # isort: skip

    settings: Any = numba.config  # filled when it is imported, which type checkers cannot see

    layer = settings.THREADING_LAYER
    cpu = settings.CPU_NAME or _llvm_cpu()
    threads = settings.NUMBA_NUM_THREADS
    yield Finding("numba", "ok", f"{numba.__version__}, {threads} threads, layer {layer}, CPU {cpu}")
    if settings.DISABLE_JIT:
        yield Finding(
            "numba",
            "warn",
            "NUMBA_DISABLE_JIT is set",
            "unset NUMBA_DISABLE_JIT: kernels run a hundred times slower",
        )
    from scalelatent.kernels.jit import CACHE

    folder = Path(CACHE)
    problem = write_problem(folder)
    if problem is None:
        yield Finding("numba cache", "ok", str(folder))
    else:
        text = f"{folder}: {problem}; kernels are compiled anew in every process"
        yield Finding("numba cache", "warn", text, "export NUMBA_CACHE_DIR=/a/folder/on/a/local/disk")


def _kernels() -> Iterator[Finding]:
    """Whether a first fit waits for the compiler; asked of the files, nothing is compiled."""
    import numba

    if vars(numba.config)["DISABLE_JIT"]:
        return  # "numba" says so
    count, cold = cold_kernels()
    if cold:
        text = f"{cold} of {count} are yet to be compiled: first fits wait some seconds for theirs, once"
        yield Finding("kernels", "warn", text, "scalelatent warm")
    else:
        yield Finding("kernels", "ok", f"all {count} are compiled for this machine")


def _llvm_cpu() -> str:
    import llvmlite.binding

    return str(llvmlite.binding.get_host_cpu_name())


def _blosc() -> Iterator[Finding]:
    import numcodecs.blosc as blosc

    yield Finding("blosc threads", "ok", f"{blosc.get_nthreads()} threads; one during a fit")


def _zarr() -> Iterator[Finding]:
    import zarr

    workers = zarr.config.get("threading.max_workers")
    tasks = zarr.config.get("async.concurrency")
    text = f"{zarr.__version__}, async.concurrency {tasks}, threading.max_workers {workers}"
    yield Finding("zarr", "ok", text)


def _gpu() -> Iterator[Finding]:
    wheels = sorted({d.metadata["Name"].lower() for d in metadata.distributions() if is_cupy(d)})
    cards = sorted(Path("/proc/driver/nvidia/gpus").glob("*"))
    if len(wheels) > 1:
        yield Finding(
            "gpu", "fail", f"CuPy found twice: {', '.join(wheels)}", f"pip uninstall {' '.join(wheels[1:])}"
        )
        return
    if not wheels:
        if cards:
            yield Finding("gpu", "warn", f"{len(cards)} NVIDIA device(s), but no CuPy",
                          "python -m pip install 'scalelatent[cuda12]' (or cuda13)")  # fmt: skip
        else:
            yield Finding("gpu", "ok", "no NVIDIA device; fits run on the CPU")
        return
    try:
        cupy = importlib.import_module("cupy")
        count = cupy.cuda.runtime.getDeviceCount()
        names = [cupy.cuda.runtime.getDeviceProperties(i)["name"].decode() for i in range(count)]
    except Exception as error:  # noqa: BLE001  a missing driver raises errors of CuPy's own
        yield Finding(
            "gpu", "warn", f"{wheels[0]} does not find a device: {error}", "check the driver with nvidia-smi"
        )
        return
    yield Finding("gpu", "ok", f"{wheels[0]} {cupy.__version__}: {', '.join(names)}")


def is_cupy(distribution: Any) -> bool:
    """Tell whether an installed distribution is one of CuPy's wheels."""
    name = (distribution.metadata["Name"] or "").lower()
    return name == "cupy" or name.startswith(("cupy-cuda", "cupy-rocm"))


def _dashboard() -> Iterator[Finding]:
    try:
        import bokeh
    except ImportError:
        yield Finding("dashboard", "warn", "bokeh is missing", "python -m pip install 'bokeh>=3.4'")
        return
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", 8787))
            text = "port 8787 is free"
        except OSError:
            text = "port 8787 is in use; clusters take another one and print it"
    yield Finding("dashboard", "ok", f"bokeh {bokeh.__version__}, {text}")


def _loopback() -> Iterator[Finding]:
    """A local cluster speaks over loopback; sandboxes sometimes forbid even that."""
    with socket.socket() as server, socket.socket() as client:
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        client.settimeout(5)
        try:
            client.connect(server.getsockname())
        except OSError as error:
            yield Finding(
                "loopback", "fail", f"no connection to 127.0.0.1: {error}", "allow loopback connections"
            )
            return
    yield Finding("loopback", "ok", "127.0.0.1 connects")


def _folder(folder: Path) -> Iterator[Finding]:
    folder = folder.absolute()
    problem = write_problem(folder)
    if problem is not None:
        yield Finding(
            "folder", "fail", f"{folder}: {problem}", "choose another folder, or ask for write access"
        )
        return
    free = shutil.disk_usage(_existing(folder)).free
    text = f"{folder} is writable, {free / GIB:.1f} GiB free"
    if free < GIB:
        yield Finding(
            "folder", "warn", text, "make room: a dataset of a million images takes 0.2 GiB and more"
        )
    else:
        yield Finding("folder", "ok", text)


def _store(url: str) -> Iterator[Finding]:
    """Write, read, list and delete one object: what a run does there."""
    probe = f".doctor-{uuid.uuid4().hex[:8]}"
    try:
        place = locate(url)
        place.write(probe, b"doctor")
        try:
            works = place.read(probe) == b"doctor" and probe in place.keys("")
        finally:
            place.delete(probe)
    except (ScalelatentError, OSError) as error:
        yield Finding("folder", "fail", str(error), "put that right, or choose another folder")
        return
    if works:
        yield Finding("folder", "ok", f"{place.url}: objects are written, read, listed and deleted")
    else:
        yield Finding("folder", "fail", f"{place.url}: what is written is not read", "choose another store")


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder


def write_problem(folder: Path) -> str | None:
    """Try to write a file; None if it works. Permissions lie (root, read-only mounts), writing does not."""
    place = _existing(folder)
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"\0" * 4096)
    except OSError as error:
        return error.strerror or str(error)
    return None
