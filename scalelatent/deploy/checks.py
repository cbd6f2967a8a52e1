"""One table of checks: what a fit or a job would fail of, or be slow by, on this machine or on a cluster.

`scalelatent doctor` runs all checks of a place, a job those that it depends on before it is sent. A check
looks at what the probes found (`scalelatent.deploy.probes`) and yields findings, each with its remedy.
"""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import socket
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from scalelatent.engine.cache import machine_memory
from scalelatent.errors import JobError
from scalelatent.storage.disk import is_local
from scalelatent.storage.folder_probe import folder_trouble

from .clusters import is_loopback
from .probes import ClusterView, Wanted, cache_trouble, cupy_wheels, look_at_cluster, usable_cpus
from .versions import MISSING, differences, table_of, versions
from .warm import cold_kernels

if TYPE_CHECKING:
    from distributed import Client

GIB = 2**30
ANSWER_SECONDS = 60.0
SKEW_SECONDS = 1.0
SHOWN = 3
PINNED = "OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 NUMBA_NUM_THREADS=1"
CUDA_EXTRA = (
    "python -m pip install 'scalelatent[cuda12]' (or cuda13, as the driver allows) in that environment: it "
    "brings the CUDA libraries and the compiler's headers"
)
SHARED = "put it on storage that this machine and all workers share: a shared file system, or s3://…"
LOCAL_CACHE = "export NUMBA_CACHE_DIR=/a/folder/on/a/local/disk"


@dataclass(frozen=True)
class Finding:
    """What a check found."""

    check: str
    status: Literal["ok", "warn", "fail"]  # "warn": slower, or with a risk; "fail": a fit will not work
    found: str
    fix: str = ""  # what to do; empty where all is well

    def to_dict(self) -> dict[str, str]:
        return asdict(self)

    def refusal(self) -> JobError:
        """The error of a job that depends on it."""
        between = "\n" if "\n" in self.found else ": "
        return JobError(f"{self.found}{between}{self.fix}")


def ok(found: str, hint: str = "") -> Finding:
    return Finding("", "ok", found, hint)


def warn(found: str, fix: str) -> Finding:
    return Finding("", "warn", found, fix)


def fail(found: str, fix: str) -> Finding:
    return Finding("", "fail", found, fix)


# -- this machine --------------------------------------------------------------------------------------------


def _python(folder: str) -> Iterator[Finding]:
    yield ok(f"{platform.python_version()} ({sys.executable})")


def _packages(folder: str) -> Iterator[Finding]:
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
        yield fail("; ".join(wrong), "python -m pip install --upgrade scalelatent")
    else:
        yield ok(", ".join(seen))


def _cpu(folder: str) -> Iterator[Finding]:
    import psutil

    usable, there = usable_cpus()
    cores = psutil.cpu_count(logical=False) or "?"
    text = f"{usable} of {there} logical CPUs usable, {cores} cores, {platform.machine()}"
    if usable < there:
        fix = (
            "affinity or a quota leaves this process some of them; check taskset, batch system or container "
            "if that is not meant"
        )
        yield warn(text, fix)
    else:
        yield ok(text)


def _memory(folder: str) -> Iterator[Finding]:
    import psutil

    limit, by = machine_memory()
    free = min(int(psutil.virtual_memory().available), limit)
    text = f"{limit / GIB:.1f} GiB (limit of {by}), {free / GIB:.1f} GiB free"
    yield warn(text, "end other programs, or fit with [cluster] workers = 1") if free < GIB else ok(text)


def _malloc(folder: str) -> Iterator[Finding]:
    """glibc keeps freed pages unless told not to before the process starts (distributed#5971)."""
    if platform.libc_ver()[0] != "glibc":
        yield ok("no glibc, nothing to trim")
    elif "MALLOC_TRIM_THRESHOLD_" in os.environ:
        yield ok(f"MALLOC_TRIM_THRESHOLD_={os.environ['MALLOC_TRIM_THRESHOLD_']}")
    else:
        yield ok(
            "MALLOC_TRIM_THRESHOLD_ is not set here; workers started by scalelatent get it from Dask's nanny",
            "workers started without a nanny: export MALLOC_TRIM_THRESHOLD_=65536 first",
        )


def _blas(folder: str) -> Iterator[Finding]:
    import numpy.linalg  # noqa: F401  loads the library that numpy multiplies with
    from threadpoolctl import threadpool_info

    pools = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
    usable, _ = usable_cpus()
    if not pools:
        yield warn("no BLAS found by threadpoolctl", "install numpy from PyPI or conda-forge")
    for pool in pools:
        library = f"{pool['internal_api']} {pool.get('version')} ({pool.get('architecture')})"
        text = f"{library}, {pool['num_threads']} threads"
        if pool["num_threads"] > usable:
            yield warn(f"{text} on {usable} usable CPUs", f"export OMP_NUM_THREADS={usable}")
        else:
            yield ok(f"{text}; one each during a fit")


def _numba(folder: str) -> Iterator[Finding]:
    import scalelatent.kernels.jit  # noqa: F401  settles where compiled kernels are kept

    import llvmlite.binding  # isort: skip
    import numba  # isort: skip

    settings: Any = numba.config  # filled when it is imported, which type checkers cannot see
    cpu = settings.CPU_NAME or llvmlite.binding.get_host_cpu_name()
    threads, layer = settings.NUMBA_NUM_THREADS, settings.THREADING_LAYER
    yield ok(f"{numba.__version__}, {threads} threads, layer {layer}, CPU {cpu}")
    if settings.DISABLE_JIT:
        yield warn("NUMBA_DISABLE_JIT is set", "unset NUMBA_DISABLE_JIT: kernels run a hundred times slower")


def _cache(folder: str) -> Iterator[Finding]:
    from scalelatent.kernels.cache_folder import CACHE

    trouble = cache_trouble()
    if trouble:
        yield warn(f"{trouble}; kernels are compiled again in every process", LOCAL_CACHE)
    else:
        yield ok(CACHE)


def _kernels(folder: str) -> Iterator[Finding]:
    """Whether a first fit waits for the compiler; asked of the files, nothing is compiled."""
    import numba

    if vars(numba.config)["DISABLE_JIT"]:
        return  # "numba" says so
    count, cold = cold_kernels()
    if cold:
        text = f"{cold} of {count} are yet to be compiled: first fits wait some seconds for theirs, once"
        yield warn(text, "scalelatent warm")
    else:
        yield ok(f"all {count} are compiled for this machine")


def _blosc(folder: str) -> Iterator[Finding]:
    import numcodecs.blosc as blosc

    yield ok(f"{blosc.get_nthreads()} threads; one during a fit")


def _zarr(folder: str) -> Iterator[Finding]:
    import zarr

    workers = zarr.config.get("threading.max_workers")
    tasks = zarr.config.get("async.concurrency")
    yield ok(f"{zarr.__version__}, async.concurrency {tasks}, threading.max_workers {workers}")


def _gpu(folder: str) -> Iterator[Finding]:
    from scalelatent.engine.backend import check_gpu

    wheels = [wheel.split()[0] for wheel in cupy_wheels()]
    cards = list(Path("/proc/driver/nvidia/gpus").glob("*"))
    if len(wheels) > 1:
        text, fix = f"CuPy found twice: {', '.join(wheels)}", f"pip uninstall {' '.join(wheels[1:])}"
        yield fail(text, fix)
    elif not wheels and cards:
        fix = "python -m pip install 'scalelatent[cuda12]' (or cuda13)"
        yield warn(f"{len(cards)} NVIDIA device(s), but no CuPy", fix)
    elif not wheels:
        yield ok("no NVIDIA device; fits run on the CPU")
    else:
        try:
            cupy = importlib.import_module("cupy")
            count = cupy.cuda.runtime.getDeviceCount()
            names = [cupy.cuda.runtime.getDeviceProperties(i)["name"].decode() for i in range(count)]
        except Exception as error:  # noqa: BLE001  a missing driver raises errors of CuPy's own
            text, fix = f"{wheels[0]} does not find a device: {error}", "check the driver with nvidia-smi"
            yield warn(text, fix)
            return
        trouble = [text for text in map(check_gpu, range(count)) if text]
        if trouble:
            yield fail(_list(trouble), CUDA_EXTRA)
        else:
            yield ok(f"{wheels[0]} {cupy.__version__}: {', '.join(names)}; each compiles and multiplies")


def _dashboard(folder: str) -> Iterator[Finding]:
    try:
        import bokeh
    except ImportError:
        yield warn("bokeh is missing", "python -m pip install 'bokeh>=3.4'")
        return
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", 8787))
            text = "port 8787 is free"
        except OSError:
            text = "port 8787 is in use; clusters take another one and print it"
    yield ok(f"bokeh {bokeh.__version__}, {text}")


def _loopback(folder: str) -> Iterator[Finding]:
    """A local cluster needs loopback, which some sandboxes forbid."""
    with socket.socket() as server, socket.socket() as client:
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        client.settimeout(5)
        try:
            client.connect(server.getsockname())
        except OSError as error:
            yield fail(f"no connection to 127.0.0.1: {error}", "allow loopback connections")
            return
    yield ok("127.0.0.1 connects")


def _folder(folder: str) -> Iterator[Finding]:
    trouble = folder_trouble(folder)
    if not is_local(folder):
        if trouble:
            yield fail(trouble, "put that right, or choose another folder")
        else:
            yield ok(f"{folder}: objects are written, read, listed and deleted")
        return
    path = Path(folder).absolute()
    if trouble:
        yield fail(f"{path}: {trouble}", "choose another folder, or ask for write access")
        return
    free = shutil.disk_usage(next(place for place in (path, *path.parents) if place.exists())).free
    text = f"{path} is writable, {free / GIB:.1f} GiB free"
    if free < GIB:
        yield warn(text, "make room: a dataset of a million images takes 0.2 GiB and more")
    else:
        yield ok(text)


# -- a cluster -----------------------------------------------------------------------------------------------


def _workers(view: ClusterView) -> Iterator[Finding]:
    if view.silent:
        missing = any("No module named" in why for why in view.silent.values())
        fix = (
            "install scalelatent in the environment that these workers run in, and start them again"
            if missing
            else "look at their logs; end them (Client.retire_workers) if they hang"
        )
        yield fail(f"no answer from {_some(view.silent)}: {_list(view.silent.values())}", fix)
    if not view.workers:
        if not view.silent:
            yield no_workers(view.address)
        return
    hosts, threads = view.by_host(), sum(view.of("threads").values())
    gpus = sum(view.of("offers_gpu").values())
    text = (
        f"{len(view.workers)} workers on {len(hosts)} host(s), {threads} threads, {gpus} of them offer a GPU"
    )
    yield ok(text)
    alone = [address for address, nanny in view.of("nanny").items() if not nanny]
    if alone:
        text = f"{_some(alone)} without one: nothing replaces a worker that dies, or limits its memory"
        yield Finding("nanny", "warn", text, "start workers with a nanny (the default of `dask worker`)")


def no_workers(address: str, waited: float = 0.0) -> Finding:
    """Of a cluster without workers, perhaps after waiting for some seconds."""
    none_came = f", and none came in {waited:g} s" if waited else ""
    wait = ", or give them longer with --wait SECONDS" if waited else ""
    fix = f"start some (dask worker {address}){wait}; an adaptive cluster needs a minimum of one worker"
    return Finding("workers", "fail", f"the cluster {address} has no workers{none_came}", fix)


def _versions(view: ClusterView) -> Iterator[Finding]:
    rows = differences(versions(), view.scheduler.get("versions", {}), view.versions)
    if not rows:
        yield ok("client, scheduler and workers agree")
        return
    table = table_of(rows)
    ours = next((row for row in rows if row.package == "scalelatent"), None)
    if ours is not None and MISSING in (ours.scheduler, *ours.workers):
        who = [*(["the scheduler"] if ours.scheduler == MISSING else []), *ours.workers.get(MISSING, [])]
        others = " and others" if len(who) > 5 else ""
        yield Finding(
            "package",
            "fail",
            f"scalelatent cannot be imported by {', '.join(who[:5])}{others} of the cluster {view.address}:\n"
            f"{table}",
            "Install it there in the environment that Dask runs in (pip install scalelatent), and restart it",
        )
        return
    yield fail(
        f"the cluster {view.address} has other versions than this environment:\n{table}",
        "Use one environment (or image) for all of them; or add --allow-mismatch ([cluster] allow_mismatch = "
        "true) to run all the same, where results may have other bits, or tasks may fail",
    )


def _trust(view: ClusterView) -> Iterator[Finding]:
    scheme, _, place = view.address.partition("://")
    if scheme == "tcp" and not is_loopback(place.rpartition(":")[0]):
        fix = "scalelatent cluster up --tls, or cluster/tls; or a trusted network"
        yield warn(f"{view.address} has no TLS: anyone who reaches it can run code on all workers", fix)
    else:
        yield ok(f"{view.address}: {'TLS' if scheme == 'tls' else 'loopback'}")


def _scheduler(view: ClusterView) -> Iterator[Finding]:
    limit, deaths = view.scheduler["no_workers_timeout"], view.scheduler["allowed_failures"]
    text = f"no-workers-timeout {f'{limit:.0f} s' if limit else 'none'}, allowed-failures {deaths}"
    fixes = []
    if not limit:
        fixes.append("DASK_DISTRIBUTED__SCHEDULER__NO_WORKERS_TIMEOUT=5min (now such tasks wait for ever)")
    if deaths < 10:
        fixes.append(
            "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES=10 (all tasks of a dead worker count as suspect)"
        )
    fix = f"start the scheduler with {' and '.join(fixes)}" if fixes else ""
    yield Finding("scheduler", "warn" if fixes else "ok", text, fix)


def _pages(view: ClusterView) -> Iterator[Finding]:
    bokeh = view.scheduler["versions"].get("bokeh")
    if not bokeh:
        fix = "python -m pip install 'bokeh>=3.4' where the scheduler runs, and start it again"
        yield warn("the scheduler has no bokeh, so no pages", fix)
    elif not view.scheduler["dashboard"]:
        yield warn("the scheduler serves none", "start it with --dashboard-address :8787")
    elif not view.scheduler["page"]:
        text = "no page scalelatent on the dashboard yet; the first job adds it"
        yield warn(text, "from the start: dask scheduler --preload scalelatent.monitor.preload")
    else:
        yield ok(f"bokeh {bokeh}, with the page scalelatent")


def _threads(view: ClusterView) -> Iterator[Finding]:
    """Threads of Dask times threads of libraries, against the cores of each host."""
    crowded = []
    for host, workers in view.by_host().items():
        cores, threads = max(told["cores"] for told in workers), sum(told["threads"] for told in workers)
        if threads > cores:
            crowded.append(f"{host} has {threads} worker threads on {cores} cores")
    if crowded:
        yield warn(_list(crowded), "start fewer workers or threads there: one thread for each core")
    wide: dict[str, list[str]] = defaultdict(list)
    for address, pools in view.of("pools").items():
        for library in ("BLAS", "numba"):  # Blosc takes one outside of the main thread, zarr one in a fit
            if pools[library] > 1:
                wide[f"{library} keeps {pools[library]} threads"].append(address)
    for text, addresses in sorted(wide.items()):
        text = f"{text} in {_some(addresses)}; code besides fits takes all"
        yield warn(text, f"start the workers with {PINNED} (a nanny sets all but the last by itself)")
    if not crowded and not wide and view.workers:
        told = {
            ", ".join(f"{name} {threads or 'default'}" for name, threads in pools.items())
            for pools in view.of("pools").values()
        }
        yield ok(f"no more than cores; pools: {_list(told)}")


def _limits(view: ClusterView) -> Iterator[Finding]:
    limits = view.of("memory_limit")
    free = [address for address, limit in limits.items() if not limit]
    if free:
        text = f"no limit for {_some(free)}: a worker that grows takes its host with it"
        yield warn(text, "start workers with --memory-limit auto, or a size such as 4GB")
    crowded = []
    for host, workers in view.by_host().items():
        promised, there = sum(told["memory_limit"] or 0 for told in workers), workers[0]["machine_bytes"]
        if promised > 1.01 * there:
            crowded.append(
                f"{host} has {there / GIB:.1f} GiB and its workers may use {promised / GIB:.1f} GiB"
            )
    if crowded:
        fix = (
            "lower --memory-limit, or start fewer workers there: the system kills what exceeds its memory, "
            "without a message"
        )
        yield warn(_list(crowded), fix)
    if limits and not crowded and not free:
        low, high = min(limits.values()) / GIB, max(limits.values()) / GIB
        spread = f"{low:.1f} GiB" if high - low < 0.1 else f"{low:.1f} to {high:.1f} GiB"
        yield ok(f"{spread} for each worker; no host promises more than it has")


def _trim(view: ClusterView) -> Iterator[Finding]:
    untrimmed = [a for a, told in view.workers.items() if told["glibc"] and not told["trim"]]
    if untrimmed:
        fix = "export MALLOC_TRIM_THRESHOLD_=65536 before the workers start, or start them with a nanny"
        yield warn(f"MALLOC_TRIM_THRESHOLD_ is not set in {_some(untrimmed)}: memory is kept", fix)
    elif view.workers:
        yield ok("workers give freed pages back, all but 32 MiB a thread at work")


def _clock(view: ClusterView) -> Iterator[Finding]:
    off = {address: skew for address, skew in view.skews.items() if abs(skew) > SKEW_SECONDS}
    if off:
        worst = max(off.values(), key=abs)
        text = f"{_some(off)} off by up to {worst:+.1f} s: leases of run folders suffer"
        yield warn(text, "keep the clocks together with NTP (chrony or systemd-timesyncd)")
    elif view.workers:
        yield ok(f"all within {SKEW_SECONDS:.0f} s of this machine's")


def _gpus(view: ClusterView) -> Iterator[Finding]:
    offer = {a: told for a, told in view.workers.items() if told["offers_gpu"]}
    blind = [a for a, told in offer.items() if not told["gpus"]]
    wide = [a for a, told in offer.items() if told["threads"] > 1]
    twice = [a for a, told in view.workers.items() if len(told["cupy"]) > 1]
    idle = [a for a, told in view.workers.items() if told["gpus"] and not told["offers_gpu"]]
    if blind:
        without = not any(offer[a]["cupy"] for a in blind)
        why = "no CuPy" if without else "CuPy finds no device"
        fix = (
            "python -m pip install 'scalelatent[cuda12]' (or cuda13) there"
            if without
            else "check nvidia-smi and CUDA_VISIBLE_DEVICES there"
        )
        yield fail(f"a GPU is offered by {_some(blind)}, but {why}", fix)
    broken = {a: told["card_trouble"] for a, told in offer.items() if told["gpus"] and told["card_trouble"]}
    if broken:
        yield fail(f"{_some(broken)} cannot compute on the GPU: {_list(broken.values())}", CUDA_EXTRA)
    if wide:
        text = f"a GPU is offered by {_some(wide)} with several threads, which wait for each other"
        yield warn(text, "one process and one thread for each device: --nthreads 1 --resources GPU=1")
    if twice:
        yield fail(f"CuPy twice in {_some(twice)}", "pip uninstall all but one of them")
    if idle:
        fix = "start a worker for it with --nthreads 1 --resources GPU=1, or hide it: CUDA_VISIBLE_DEVICES=-1"
        yield warn(f"a device is seen by {_some(idle)} and not offered: jobs leave it idle", fix)
    if not (blind or broken or wide or twice or idle):
        yield ok(
            f"{len(offer)} workers offer a device and compute on it" if offer else "no worker offers one"
        )


def _caches(view: ClusterView) -> Iterator[Finding]:
    bad = {address: trouble for address, trouble in view.of("cache_trouble").items() if trouble}
    if bad:
        text = f"no compiled kernels are kept by {_some(bad)} ({_list(bad.values())}): every process compiles"
        yield warn(text, f"{LOCAL_CACHE} there")
    elif view.workers:
        yield ok("writable for every worker")


def _shared_folder(view: ClusterView) -> Iterator[Finding]:
    folder = view.wanted.folder
    if folder is None:
        yield ok("not looked at: name the folder of your runs to have it tried by all workers")
        return
    if view.trouble:
        fix = "choose another folder, or ask for write access"
        yield fail(f"{folder}: {view.trouble} (on this machine)", fix)
        return
    bad = {address: trouble for address, trouble in view.of("folder_trouble").items() if trouble}
    if bad:
        yield fail(f"{folder}: {_some(bad)} cannot use it ({_list(bad.values())})", SHARED)
    elif view.workers:
        yield ok(f"{folder}: every worker sees it, writes and reads there")


def _device(view: ClusterView) -> Iterator[Finding]:
    """A task whose resource no worker offers would wait for ever."""
    if view.wanted.device == "gpu" and not any(view.of("offers_gpu").values()):
        yield fail(
            f'the job asks for device = "gpu", and none of the {len(view.workers)} workers of {view.address} '
            "offers GPU",
            f"start one on a machine that has one (dask worker {view.address} --nthreads 1 --resources "
            '"GPU=1"), or set [cluster] device = "auto" or "cpu"',
        )


def _datasets(view: ClusterView) -> Iterator[Finding]:
    for name, url in view.wanted.datasets.items():
        seen: dict[str, tuple[str, str]] = {a: told[name] for a, told in view.of("datasets").items()}
        blind = {address: trouble for address, (trouble, _) in seen.items() if trouble}
        prints: dict[str, str] = {}
        for address, (_, fingerprint) in seen.items():
            prints.setdefault(fingerprint, address)
        if blind:
            here = is_local(url) and os.path.exists(url)
            nowhere = is_local(url) and not here
            also = ", but exists here" if here else ", nor here" if nowhere else ""
            text = f"{name} = {url!r} cannot be opened by {_some(blind)} ({_list(blind.values())}{also})"
            yield fail(text, "check the path" if nowhere else SHARED)
        elif len(prints) > 1:
            who = ", ".join(prints.values())
            text = f"{name} = {url!r} is not the same dataset on all workers ({who} see different rows)"
            yield fail(text, "put one copy on storage that all workers share, or copy it again to each")


def _scratch(view: ClusterView) -> Iterator[Finding]:
    for name, url in view.wanted.scratch.items():
        blind = {a: told[name] for a, told in view.of("scratch").items() if told[name]}
        if blind:
            text = f"{name} = {url!r} cannot be written by {_some(blind)} ({_list(blind.values())})"
            yield fail(text, SHARED)


def _some(workers: Iterable[str]) -> str:
    names = sorted(workers)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"worker{'s' if len(names) > 1 else ''} {', '.join(names[:SHOWN])}{more}"


def _list(texts: Iterable[str]) -> str:
    texts = sorted(set(texts))
    more = f"; and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return "; ".join(texts[:SHOWN]) + more


# -- the table -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """A row of the table."""

    name: str
    where: Literal["here", "cluster"]
    # yields findings from the folder of the runs, or a `ClusterView`
    judge: Callable[[Any], Iterator[Finding]]
    asks: tuple[str, ...] = ()  # what it needs of `look_at_cluster`

    def findings(self, given: Any) -> Iterator[Finding]:
        """What the judge finds, under the name of the check unless it gives another."""
        for finding in self.judge(given):
            yield replace(finding, check=finding.check or self.name)


CHECKS = (
    Check("python", "here", _python),
    Check("packages", "here", _packages),
    Check("cpu", "here", _cpu),
    Check("memory", "here", _memory),
    Check("malloc", "here", _malloc),
    Check("blas threads", "here", _blas),
    Check("numba", "here", _numba),
    Check("numba cache", "here", _cache),
    Check("kernels", "here", _kernels),
    Check("blosc threads", "here", _blosc),
    Check("zarr", "here", _zarr),
    Check("gpu", "here", _gpu),
    Check("dashboard", "here", _dashboard),
    Check("loopback", "here", _loopback),
    Check("folder", "here", _folder),
    Check("workers", "cluster", _workers, ("host",)),
    Check("versions", "cluster", _versions, ("versions",)),
    Check("trust", "cluster", _trust),
    Check("scheduler", "cluster", _scheduler, ("scheduler",)),
    Check("dashboard", "cluster", _pages, ("scheduler",)),
    Check("threads", "cluster", _threads, ("host", "cores", "pools")),
    Check("memory", "cluster", _limits, ("host", "machine_bytes")),
    Check("malloc", "cluster", _trim, ("glibc", "trim")),
    Check("clock", "cluster", _clock, ("skew",)),
    Check("gpu", "cluster", _gpus, ("cupy", "gpus", "card_trouble")),
    Check("numba cache", "cluster", _caches, ("cache_trouble",)),
    Check("folder", "cluster", _shared_folder, ("folder_trouble",)),
    Check("device", "cluster", _device),
    Check("datasets", "cluster", _datasets, ("datasets",)),
    Check("scratch", "cluster", _scratch, ("scratch",)),
)


def _chosen(where: str, only: Collection[str]) -> list[Check]:
    return [check for check in CHECKS if check.where == where and (not only or check.name in only)]


def _asked(checks: Iterable[Check]) -> set[str]:
    return {name for check in checks for name in check.asks}


def _judged(checks: Iterable[Check], given: Any, fix: str) -> list[Finding]:
    found: list[Finding] = []
    for check in checks:
        try:
            found.extend(check.findings(given))
        except Exception as error:  # noqa: BLE001  the doctor must finish whatever a broken package raises
            found.append(Finding(check.name, "fail", f"{type(error).__name__}: {error}", fix))
    return found


def examine(folder: str | os.PathLike[str] = ".", *, only: Collection[str] = ()) -> list[Finding]:
    """Check this machine, and the folder (or object store's address) where runs will be written."""
    return _judged(_chosen("here", only), os.fspath(folder), "reinstall scalelatent")


def examine_cluster(
    client: Client,
    folder: str | os.PathLike[str] | None = None,
    *,
    only: Collection[str] = (),
    seconds: float = ANSWER_SECONDS,
) -> list[Finding]:
    """Check a cluster; a worker that does not answer within `seconds` is a finding."""
    where = None if folder is None else os.path.abspath(folder) if is_local(folder) else os.fspath(folder)
    checks = _chosen("cluster", only)
    view = look_at_cluster(client, _asked(checks), Wanted(folder=where), seconds)
    return _judged(checks, view, "look at the scheduler's log")


def require(client: Client, only: Collection[str], wanted: Wanted | None = None) -> None:
    """Refuse a job for the first of these checks that fails, with what was found, and the remedy."""
    for finding in _found(client, only, wanted or Wanted()):
        if finding.status == "fail":
            raise finding.refusal()


def check_versions(
    client: Client, allow_mismatch: bool = False, tell: Callable[[str], None] = lambda line: None
) -> None:
    """Refuse a cluster whose versions differ from those here, or, where a mismatch is allowed, tell them."""
    for finding in _found(client, ("versions",), Wanted()):
        if finding.check == "versions" and finding.status == "fail" and allow_mismatch:
            _, _, table = finding.found.partition("\n")
            tell(f"versions differ, which --allow-mismatch allows:\n{table}")
        elif finding.status == "fail":
            raise finding.refusal()


def _found(client: Client, only: Collection[str], wanted: Wanted) -> Iterator[Finding]:
    checks = _chosen("cluster", only)
    view = look_at_cluster(client, _asked(checks), wanted)
    for check in checks:
        yield from check.findings(view)
