"""Table of checks that find why a fit or a job would fail or be slow, on this machine or on a cluster.

`scalelatent doctor` runs all checks of this machine or of a cluster. `submit` runs the checks that the job
depends on. A check of a cluster reads the results of the probes (`scalelatent.deploy.probes`). Each check
yields findings, each with a fix.
"""

from __future__ import annotations

import importlib
import os
import platform
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from scalelatent.engine.cache import machine_memory
from scalelatent.errors import JobError
from scalelatent.storage.disk import is_local, locate
from scalelatent.storage.folder_probe import find_folder_problem

from .clusters import is_loopback
from .probes import ClusterView, Requirements, cupy_wheels, find_cache_problem, probe_cluster, usable_cpus
from .versions import MISSING, find_differences, format_differences, versions
from .warm import count_uncompiled

if TYPE_CHECKING:
    from distributed import Client

    from scalelatent.engine.backend import GpuMemory

GIB = 2**30
ANSWER_SECONDS = 60.0  # time limit for an answer of a worker
SKEW_SECONDS = 1.0  # largest tolerated difference between two clocks
LEAST_FREE_SHARE = 0.5  # with a smaller share of free memory, other processes seem to use the GPU
MAX_NAMED = 3  # a finding lists at most this many workers, and at most this many messages of workers
ONE_THREAD = "OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1"
CUDA_EXTRA = (
    "python -m pip install 'scalelatent[cuda12]' (or cuda13, if the driver supports it) in that environment; "
    "it includes the CUDA libraries and the headers of the compiler"
)
SHARED_STORAGE_ADVICE = (
    "move it to storage that this machine and all workers share: a shared file system, or s3://…"
)
CHOOSE_FOLDER = "choose another folder, or ask for write access"
LOCAL_CACHE = "export NUMBA_CACHE_DIR=/a/folder/on/a/local/disk"


@dataclass(frozen=True)
class Finding:
    """Result of a check."""

    check: str
    status: Literal["ok", "warn", "fail"]  # "warn": a fit is slower or at risk; "fail": a fit cannot work
    found: str
    fix: str = ""  # the next step; empty if the status is "ok"

    def refusal(self) -> JobError:
        """Return the error for a job that depends on this check."""
        between = "\n" if "\n" in self.found else ": "
        return JobError(f"{self.found}{between}{self.fix}")


def ok(found: str) -> Finding:
    return Finding("", "ok", found)


def warn(found: str, fix: str) -> Finding:
    return Finding("", "warn", found, fix)


def fail(found: str, fix: str) -> Finding:
    return Finding("", "fail", found, fix)


# -- this machine --------------------------------------------------------------------------------------------


# Instruction sets for which kernels and BLAS have special code.
FEATURES = ("avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "neon", "sve")


def _check_cpu(folder: str) -> Iterator[Finding]:
    import llvmlite.binding as llvm
    import psutil

    usable, there = usable_cpus()
    found = llvm.get_host_cpu_features()
    special = " ".join(name for name in FEATURES if found.get(name))
    text = (
        f"{usable} of {there} logical CPUs usable, {psutil.cpu_count(logical=False) or '?'} cores, "
        f"{llvm.get_host_cpu_name()} ({platform.machine()}) {special}"
    ).rstrip()
    if usable < there:
        fix = (
            "CPU affinity or a quota limits this process; if that is not intended, check taskset, the batch "
            "system or the container"
        )
        yield warn(text, fix)
    else:
        yield ok(text)


def _check_memory(folder: str) -> Iterator[Finding]:
    import psutil

    limit, by = machine_memory()
    free = min(int(psutil.virtual_memory().available), limit)
    text = f"{limit / GIB:.1f} GiB (limit of {by}), {free / GIB:.1f} GiB free"
    yield warn(text, "close other programs, or set [cluster] workers = 1") if free < GIB else ok(text)


def _check_blas(folder: str) -> Iterator[Finding]:
    import numpy.linalg  # noqa: F401  this import loads the BLAS library
    from threadpoolctl import threadpool_info

    pools = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
    usable, _ = usable_cpus()
    if not pools:
        yield warn("threadpoolctl finds no BLAS library", "install numpy from PyPI or conda-forge")
    for pool in pools:
        library = f"{pool['internal_api']} {pool.get('version')} ({pool.get('architecture')})"
        text = f"{library}, {pool['num_threads']} threads"
        if pool["num_threads"] > usable:
            yield warn(f"{text} on {usable} usable CPUs", f"export OMP_NUM_THREADS={usable}")
        else:
            yield ok(f"{text}; fits use one thread per worker thread")


def _check_numba(folder: str) -> Iterator[Finding]:
    import scalelatent.kernels.jit  # noqa: F401  this import sets the folder of compiled kernels

    # numba reads the folder at its import, so the next two imports must stay below the import above.
    import llvmlite.binding  # isort: skip
    import numba  # isort: skip

    settings: Any = numba.config  # numba sets its attributes at import, which type checkers cannot see
    compiler = f"LLVM {'.'.join(map(str, llvmlite.binding.llvm_version_info))}"
    svml = "with SVML" if getattr(settings, "USING_SVML", False) else "without SVML"
    threads, layer = settings.NUMBA_NUM_THREADS, settings.THREADING_LAYER
    yield ok(f"{numba.__version__}, {compiler} {svml}, {threads} threads, layer {layer}")
    if settings.DISABLE_JIT:
        fix = "unset NUMBA_DISABLE_JIT; it makes kernels a hundred times slower"
        yield warn("NUMBA_DISABLE_JIT is set", fix)


def _check_cache(folder: str) -> Iterator[Finding]:
    from scalelatent.kernels.cache_folder import CACHE_FOLDER

    problem = find_cache_problem()
    if problem:
        yield warn(f"{problem}; every process compiles the kernels again", LOCAL_CACHE)
    else:
        yield ok(CACHE_FOLDER)


def _check_kernels(folder: str) -> Iterator[Finding]:
    """Count the kernels that a first fit would compile, from the files of compiled kernels."""
    import numba

    if vars(numba.config)["DISABLE_JIT"]:
        return  # the check "numba" reports this setting
    count, cold = count_uncompiled()
    if cold:
        text = f"{cold} of {count} kernels are not compiled yet: the first fit waits some seconds for them"
        yield warn(text, "scalelatent warm")
    else:
        yield ok(f"all {count} kernels are compiled for this machine")


def _check_gpu(folder: str) -> Iterator[Finding]:
    from scalelatent.engine.backend import check_gpu, read_gpu_memory

    wheels = [wheel.split()[0] for wheel in cupy_wheels()]
    cards = list(Path("/proc/driver/nvidia/gpus").glob("*"))
    if len(wheels) > 1:
        text, fix = f"CuPy is installed twice: {', '.join(wheels)}", f"pip uninstall {' '.join(wheels[1:])}"
        yield fail(text, fix)
    elif not wheels and cards:
        fix = "python -m pip install 'scalelatent[cuda12]' (or cuda13)"
        yield warn(f"{len(cards)} NVIDIA GPU(s), but no CuPy", fix)
    elif not wheels:
        yield ok("no NVIDIA GPU; fits run on the CPU")
    else:
        try:
            cupy = importlib.import_module("cupy")
            count = cupy.cuda.runtime.getDeviceCount()
            names = [cupy.cuda.runtime.getDeviceProperties(i)["name"].decode() for i in range(count)]
        except Exception as error:  # noqa: BLE001  without a driver CuPy raises its own errors
            text, fix = f"{wheels[0]} finds no GPU: {error}", "check the driver with nvidia-smi"
            yield warn(text, fix)
            return
        problem = [text for text in map(check_gpu, range(count)) if text]
        if problem:
            yield fail(_join(problem), CUDA_EXTRA)
        else:
            runtime, driver = cupy.cuda.runtime.runtimeGetVersion(), cupy.cuda.runtime.driverGetVersion()
            yield ok(
                f"{wheels[0]}, CUDA runtime {runtime}, driver {driver}: {', '.join(names)}; each GPU "
                "compiles and computes"
            )
            for number, memory in enumerate(map(read_gpu_memory, range(count))):
                yield from _check_gpu_memory(number, memory)


def _check_gpu_memory(number: int, memory: GpuMemory) -> Iterator[Finding]:
    text = f"GPU {number}: {memory.describe()}"
    if memory.free < LEAST_FREE_SHARE * memory.total:
        fix = (
            "end the other work on this GPU (nvidia-smi lists it), or set CUDA_VISIBLE_DEVICES to another one"
        )
        yield Finding("gpu memory", "warn", text, fix)
    else:
        yield Finding("gpu memory", "ok", text)


def _check_folder(folder: str) -> Iterator[Finding]:
    problem = find_folder_problem(folder)
    if not is_local(folder):
        if problem:
            yield fail(problem, "fix this problem, or choose another folder")
        else:
            yield ok(f"{folder}: writing, reading, listing and deleting objects works")
        return
    path = Path(folder).absolute()
    if problem:
        yield fail(f"{path}: {problem}", CHOOSE_FOLDER)
        return
    free = locate(path).free_bytes() or 0
    text = f"{path} is writable, {free / GIB:.1f} GiB free"
    if free < GIB:
        yield warn(text, "free some space: a dataset of a million images takes 0.2 GiB or more")
    else:
        yield ok(text)


# -- a cluster -----------------------------------------------------------------------------------------------


def _check_workers(view: ClusterView) -> Iterator[Finding]:
    if view.silent:
        missing = any("No module named" in why for why in view.silent.values())
        fix = (
            "install scalelatent in the environment of these workers, and restart the workers"
            if missing
            else "read the logs of these workers; if they hang, end them with Client.retire_workers"
        )
        yield fail(f"no answer from {_show(view.silent)}: {_join(view.silent.values())}", fix)
    if not view.workers:
        if not view.silent:
            yield no_workers(view.address)
        return
    hosts, threads = view.by_host(), sum(view.values_of("threads").values())
    gpus = sum(view.values_of("offers_gpu").values())
    yield ok(f"workers: {len(view.workers)}, hosts: {len(hosts)}, threads: {threads}, with a GPU: {gpus}")
    alone = [address for address, nanny in view.values_of("nanny").items() if not nanny]
    if alone:
        text = f"{_show(alone)} without a nanny, which restarts a dead worker and limits its memory"
        yield Finding("nanny", "warn", text, "start workers with a nanny (the default of `dask worker`)")


def no_workers(address: str, waited: float = 0.0) -> Finding:
    """Return the finding for a cluster without workers, after waiting for some seconds."""
    none_joined = f", and none joined within {waited:g} s" if waited else ""
    wait = ", or wait longer with --wait SECONDS" if waited else ""
    fix = f"start workers (dask worker {address}){wait}; an adaptive cluster needs a minimum of one worker"
    return Finding("workers", "fail", f"the cluster {address} has no workers{none_joined}", fix)


def _check_versions(view: ClusterView) -> Iterator[Finding]:
    rows = find_differences(versions(), view.scheduler.get("versions", {}), view.versions)
    if not rows:
        yield ok("client, scheduler and workers have the same versions")
        return
    table = format_differences(rows)
    ours = next((row for row in rows if row.package == "scalelatent"), None)
    if ours is not None and MISSING in (ours.scheduler, *ours.workers):
        who = [*(["the scheduler"] if ours.scheduler == MISSING else []), *ours.workers.get(MISSING, [])]
        others = " and others" if len(who) > 5 else ""
        yield Finding(
            "package",
            "fail",
            f"scalelatent cannot be imported by {', '.join(who[:5])}{others} of the cluster {view.address}:\n"
            f"{table}",
            "Install scalelatent there, in the environment of Dask (pip install scalelatent), and restart "
            "Dask",
        )
        return
    yield fail(
        f"the versions of the cluster {view.address} differ from those of this environment:\n{table}",
        "Use one environment (or image) for all processes. To run in spite of the differences, add "
        "--allow-mismatch ([cluster] allow_mismatch = true); results may differ, and tasks may fail",
    )


def _check_trust(view: ClusterView) -> Iterator[Finding]:
    scheme, _, netloc = view.address.partition("://")
    if scheme == "tcp" and not is_loopback(netloc.rpartition(":")[0]):
        fix = "use TLS (scalelatent cluster up --tls, or cluster/tls), or a trusted network"
        yield warn(f"{view.address} has no TLS: anyone who can connect can run code on all workers", fix)
    else:
        yield ok(f"{view.address}: {'TLS' if scheme == 'tls' else 'loopback'}")


def _check_pages(view: ClusterView) -> Iterator[Finding]:
    bokeh = view.scheduler["versions"].get("bokeh")
    if not bokeh:
        fix = "python -m pip install 'bokeh>=3.4' in the environment of the scheduler, and restart it"
        yield warn("the scheduler has no dashboard, because bokeh is not installed", fix)
    elif not view.scheduler["dashboard"]:
        yield warn("the scheduler has no dashboard", "start it with --dashboard-address :8787")
    else:
        page = (
            "with the page Scalelatent"
            if view.scheduler["page"]
            else "the first job adds the page Scalelatent"
        )
        yield ok(f"bokeh {bokeh}, {page}")


def _check_threads(view: ClusterView) -> Iterator[Finding]:
    """Compare the threads of Dask and of numeric libraries with the cores of each host."""
    crowded = []
    for host, workers in view.by_host().items():
        cores, threads = max(facts["cores"] for facts in workers), sum(facts["threads"] for facts in workers)
        if threads > cores:
            crowded.append(f"{host} has {threads} worker threads on {cores} cores")
    if crowded:
        yield warn(_join(crowded), "start fewer workers or threads there: one thread per core")
    wide: dict[str, list[str]] = defaultdict(list)
    for address, pools in view.values_of("pools").items():
        if pools["BLAS"] > 1:
            wide[f"BLAS has {pools['BLAS']} threads"].append(address)
    for text, addresses in sorted(wide.items()):
        text = f"{text} in {_show(addresses)}; code outside fits uses all of them"
        yield warn(text, f"start the workers with a nanny, or with {ONE_THREAD}")
    if not crowded and not wide and view.workers:
        sizes = {
            ", ".join(f"{name} {threads or 'default'}" for name, threads in pools.items())
            for pools in view.values_of("pools").values()
        }
        yield ok(f"at most one worker thread per core; thread pools: {_join(sizes)}")


def _check_memory_limits(view: ClusterView) -> Iterator[Finding]:
    limits = view.values_of("memory_limit")
    free = [address for address, limit in limits.items() if not limit]
    if free:
        text = f"no memory limit for {_show(free)}: one worker can exhaust the memory of its host"
        yield warn(text, "start workers with --memory-limit auto, or a size such as 4GB")
    crowded = []
    for host, workers in view.by_host().items():
        allowed, memory = sum(facts["memory_limit"] or 0 for facts in workers), workers[0]["machine_bytes"]
        if allowed > 1.01 * memory:
            crowded.append(
                f"{host} has {memory / GIB:.1f} GiB and its workers may use {allowed / GIB:.1f} GiB"
            )
    if crowded:
        fix = (
            "lower --memory-limit, or start fewer workers there; the system kills processes without a "
            "message when its memory is full"
        )
        yield warn(_join(crowded), fix)
    if limits and not crowded and not free:
        low, high = min(limits.values()) / GIB, max(limits.values()) / GIB
        spread = f"{low:.1f} GiB" if high - low < 0.1 else f"{low:.1f} to {high:.1f} GiB"
        yield ok(f"{spread} per worker; the limits fit the memory of each host")


def _check_malloc_trim(view: ClusterView) -> Iterator[Finding]:
    untrimmed = [a for a, facts in view.workers.items() if facts["glibc"] and not facts["trim"]]
    if untrimmed:
        fix = "export MALLOC_TRIM_THRESHOLD_=65536 before the workers start, or start them with a nanny"
        text = f"MALLOC_TRIM_THRESHOLD_ is not set in {_show(untrimmed)}: freed memory is not returned"
        yield warn(text, fix)
    elif view.workers:
        yield ok("workers return freed memory to the system, except 32 MiB per active thread")


def _check_clock(view: ClusterView) -> Iterator[Finding]:
    off = {address: skew for address, skew in view.skews.items() if abs(skew) > SKEW_SECONDS}
    if off:
        worst = max(off.values(), key=abs)
        text = (
            f"clocks of {_show(off)} differ by up to {worst:+.1f} s, so locks of run folders may expire early"
        )
        yield warn(text, "synchronize the clocks with NTP (chrony or systemd-timesyncd)")
    elif view.workers:
        yield ok(f"all clocks are within {SKEW_SECONDS:.0f} s of the clock of this machine")


def _check_gpus(view: ClusterView) -> Iterator[Finding]:
    offer = {a: facts for a, facts in view.workers.items() if facts["offers_gpu"]}
    blind = [a for a, facts in offer.items() if not facts["gpus"]]
    wide = [a for a, facts in offer.items() if facts["threads"] > 1]
    twice = [a for a, facts in view.workers.items() if len(facts["cupy"]) > 1]
    idle = [a for a, facts in view.workers.items() if facts["gpus"] and not facts["offers_gpu"]]
    if blind:
        without = not any(offer[a]["cupy"] for a in blind)
        why = "CuPy is not installed" if without else "CuPy finds no GPU"
        fix = (
            "python -m pip install 'scalelatent[cuda12]' (or cuda13) there"
            if without
            else "check nvidia-smi and CUDA_VISIBLE_DEVICES there"
        )
        yield fail(f"{_show(blind)} with the resource GPU, but {why}", fix)
    broken = {a: facts["gpu_problem"] for a, facts in offer.items() if facts["gpus"] and facts["gpu_problem"]}
    if broken:
        yield fail(f"{_show(broken)} cannot compute on the GPU: {_join(broken.values())}", CUDA_EXTRA)
    if wide:
        text = f"{_show(wide)} with the resource GPU and several threads, which wait for each other"
        yield warn(text, "start one process with one thread per GPU: --nthreads 1 --resources GPU=1")
    if twice:
        yield fail(f"CuPy is installed twice in {_show(twice)}", "pip uninstall all but one of them")
    if idle:
        fix = (
            "start a GPU worker with --nthreads 1 --resources GPU=1 or with dask-cuda, or set "
            "CUDA_VISIBLE_DEVICES=-1"
        )
        yield warn(f"{_show(idle)} with an unused GPU, because the worker has no resource GPU", fix)
    if not (blind or broken or wide or twice or idle):
        memory = _join({facts["gpu_memory"]: None for facts in offer.values()})
        yield ok(
            f"{len(offer)} workers have a GPU and can compute on it; {memory}"
            if offer
            else "no worker has a GPU"
        )


def _check_caches(view: ClusterView) -> Iterator[Finding]:
    bad = {address: problem for address, problem in view.values_of("cache_problem").items() if problem}
    if bad:
        text = f"every process of {_show(bad)} compiles the kernels again ({_join(bad.values())})"
        yield warn(text, f"{LOCAL_CACHE} there")
    elif view.workers:
        yield ok("every worker can write it")


def _check_shared_folder(view: ClusterView) -> Iterator[Finding]:
    folder = view.requirements.folder
    if folder is None:
        yield ok("not checked: name the folder of your runs (doctor FOLDER) to check it on all workers")
        return
    if view.folder_problem:
        yield fail(f"{folder}: {view.folder_problem} (on this machine)", CHOOSE_FOLDER)
        return
    bad = {address: problem for address, problem in view.values_of("folder_problem").items() if problem}
    if bad:
        yield fail(
            f"{folder}: {_show(bad)} cannot use it ({_join(bad.values())})",
            SHARED_STORAGE_ADVICE,
        )
    elif view.workers:
        yield ok(f"{folder}: every worker can read and write there")


def _check_device(view: ClusterView) -> Iterator[Finding]:
    """Find a job whose tasks would wait forever for a GPU worker."""
    if view.requirements.device == "gpu" and not any(view.values_of("offers_gpu").values()):
        yield fail(
            f'the job requires device = "gpu", and none of the {len(view.workers)} workers of {view.address} '
            "has the resource GPU",
            f"start a worker on a machine with a GPU (dask worker {view.address} --nthreads 1 --resources "
            '"GPU=1"), or set [cluster] device = "auto" or "cpu"',
        )


def _check_datasets(view: ClusterView) -> Iterator[Finding]:
    for name, url in view.requirements.datasets.items():
        answers: dict[str, tuple[str, str]] = {
            address: found[name] for address, found in view.values_of("datasets").items()
        }
        blind = {address: problem for address, (problem, _) in answers.items() if problem}
        prints: dict[str, str] = {}
        for address, (_, fingerprint) in answers.items():
            prints.setdefault(fingerprint, address)
        if blind:
            here = is_local(url) and os.path.exists(url)
            nowhere = is_local(url) and not here
            also = (
                "; it exists on this machine"
                if here
                else "; it does not exist here either"
                if nowhere
                else ""
            )
            text = f"{name} = {url!r} cannot be opened by {_show(blind)} ({_join(blind.values())}{also})"
            yield fail(text, "check the path" if nowhere else SHARED_STORAGE_ADVICE)
        elif len(prints) > 1:
            who = ", ".join(prints.values())
            text = f"{name} = {url!r} is not the same dataset on all workers ({who} see different rows)"
            yield fail(
                text, "use one copy on storage that all workers share, or copy it again to each worker"
            )


def _check_scratch(view: ClusterView) -> Iterator[Finding]:
    for name, url in view.requirements.scratch.items():
        blind = {a: found[name] for a, found in view.values_of("scratch").items() if found[name]}
        if blind:
            text = f"{name} = {url!r} cannot be written by {_show(blind)} ({_join(blind.values())})"
            yield fail(text, SHARED_STORAGE_ADVICE)


def _show(workers: Iterable[str]) -> str:
    """Return the first MAX_NAMED addresses of workers and the number of further workers, as text."""
    names = sorted(workers)
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"worker{'s' if len(names) > 1 else ''} {', '.join(names[:MAX_NAMED])}{more}"


def _join(texts: Iterable[str]) -> str:
    """Return the first MAX_NAMED distinct texts and the number of further texts, joined to one text."""
    texts = sorted(set(texts))
    more = f"; and {len(texts) - MAX_NAMED} more" if len(texts) > MAX_NAMED else ""
    return "; ".join(texts[:MAX_NAMED]) + more


# -- the table -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """One check of `scalelatent doctor` or `submit`: its name, where it runs, and its function."""

    name: str
    where: Literal["here", "cluster"]
    # Yields findings; its argument is the folder of the runs ("here") or a `ClusterView` ("cluster").
    find: Callable[[Any], Iterator[Finding]]
    probes: tuple[str, ...] = ()  # names of the probes whose results the check reads

    def findings(self, subject: Any) -> Iterator[Finding]:
        """Run the check on `subject`; yield its findings, named like this check if they have no name."""
        for finding in self.find(subject):
            yield replace(finding, check=finding.check or self.name)


CHECKS = (
    Check("cpu", "here", _check_cpu),
    Check("memory", "here", _check_memory),
    Check("blas threads", "here", _check_blas),
    Check("numba", "here", _check_numba),
    Check("numba cache", "here", _check_cache),
    Check("kernels", "here", _check_kernels),
    Check("gpu", "here", _check_gpu),
    Check("folder", "here", _check_folder),
    Check("workers", "cluster", _check_workers, ("host",)),
    Check("versions", "cluster", _check_versions, ("versions",)),
    Check("trust", "cluster", _check_trust),
    Check("dashboard", "cluster", _check_pages, ("scheduler",)),
    Check("threads", "cluster", _check_threads, ("host", "cores", "pools")),
    Check("memory", "cluster", _check_memory_limits, ("host", "machine_bytes")),
    Check("malloc", "cluster", _check_malloc_trim, ("glibc", "trim")),
    Check("clock", "cluster", _check_clock, ("skew",)),
    Check("gpu", "cluster", _check_gpus, ("cupy", "gpus", "gpu_problem", "gpu_memory")),
    Check("numba cache", "cluster", _check_caches, ("cache_problem",)),
    Check("folder", "cluster", _check_shared_folder, ("folder_problem",)),
    Check("device", "cluster", _check_device),
    Check("datasets", "cluster", _check_datasets, ("datasets",)),
    Check("scratch", "cluster", _check_scratch, ("scratch",)),
)


def _chosen(where: str, only: Collection[str]) -> list[Check]:
    return [check for check in CHECKS if check.where == where and (not only or check.name in only)]


def _view_cluster(
    client: Client, checks: Iterable[Check], requirements: Requirements, seconds: float | None = None
) -> ClusterView:
    return probe_cluster(client, {name for check in checks for name in check.probes}, requirements, seconds)


def _run(checks: Iterable[Check], subject: Any, fix: str) -> list[Finding]:
    found: list[Finding] = []
    for check in checks:
        try:
            found.extend(check.findings(subject))
        except Exception as error:  # noqa: BLE001  the other checks must run if a package is broken
            found.append(Finding(check.name, "fail", f"{type(error).__name__}: {error}", fix))
    return found


def examine(folder: str | os.PathLike[str] = ".", *, only: Collection[str] = ()) -> list[Finding]:
    """Check this machine and the folder (or address in an object store) of the runs; return the findings."""
    return _run(_chosen("here", only), os.fspath(folder), "reinstall scalelatent")


def show_versions() -> None:
    """Print the information for a bug report: versions of packages, processor, BLAS, compiler, GPU.

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
    for finding in examine(only=("cpu", "blas threads", "numba", "numba cache", "gpu")):
        sys.stdout.write(f"{finding.check:<14} {finding.found}\n")


def examine_cluster(
    client: Client,
    folder: str | os.PathLike[str] | None = None,
    *,
    only: Collection[str] = (),
    seconds: float = ANSWER_SECONDS,
) -> list[Finding]:
    """Check a cluster and the folder of the runs. A worker without an answer in `seconds` is a finding."""
    where = None if folder is None else os.path.abspath(folder) if is_local(folder) else os.fspath(folder)
    checks = _chosen("cluster", only)
    view = _view_cluster(client, checks, Requirements(folder=where), seconds)
    return _run(checks, view, "read the log of the scheduler")


def require_checks(client: Client, only: Collection[str], requirements: Requirements) -> None:
    """Raise a `JobError` with the first finding of these checks that fails."""
    for finding in _collect_findings(client, only, requirements):
        if finding.status == "fail":
            raise finding.refusal()


def check_versions(
    client: Client, allow_mismatch: bool = False, print_line: Callable[[str], None] = lambda line: None
) -> None:
    """Refuse a cluster whose versions differ from the versions here; print them if a mismatch is allowed."""
    for finding in _collect_findings(client, ("versions",), Requirements()):
        if finding.check == "versions" and finding.status == "fail" and allow_mismatch:
            _, _, table = finding.found.partition("\n")
            print_line(f"versions differ, as --allow-mismatch allows:\n{table}")
        elif finding.status == "fail":
            raise finding.refusal()


def _collect_findings(client: Client, only: Collection[str], requirements: Requirements) -> Iterator[Finding]:
    checks = _chosen("cluster", only)
    view = _view_cluster(client, checks, requirements)
    for check in checks:
        yield from check.findings(view)
