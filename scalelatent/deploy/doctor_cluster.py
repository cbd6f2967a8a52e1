"""`doctor --scheduler`: look at a cluster the way a job will, and name the fix of what would go wrong."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scalelatent.errors import ScalelatentError
from scalelatent.storage.disk import is_local, locate

from .clusters import is_loopback
from .doctor import GIB, Finding
from .probes import look_at_scheduler, look_at_worker

if TYPE_CHECKING:
    from distributed import Client

__all__ = ["examine_cluster"]

ANSWER_SECONDS = 60.0
SKEW_SECONDS = 1.0
SHOWN = 3
PINNED = "OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 NUMBA_NUM_THREADS=1"


@dataclass(frozen=True)
class Seen:
    """What a cluster answered.

    Attributes
    ----------
    scheduler : dict
        As `look_at_scheduler` tells it.
    workers : dict of str to dict
        By address, as `look_at_worker` tells them, with ``skew`` (seconds; 0 within the time of the call).
    silent : dict of str to str
        Address to why a worker did not answer.
    """

    address: str
    scheduler: dict[str, Any]
    workers: dict[str, dict[str, Any]]
    silent: dict[str, str]


def examine_cluster(
    client: Client, folder: str | os.PathLike[str] | None = None, *, seconds: float = ANSWER_SECONDS
) -> list[Finding]:
    """Ask the scheduler and every worker, and say what is wrong.

    Parameters
    ----------
    client : distributed.Client
    folder : path or str, optional
        Where runs will be written: every worker must see what is written here, and write there itself.
    seconds : float
        How long a worker may take to answer; one that does not is a finding.

    Returns
    -------
    list of Finding

    Examples
    --------
    >>> from scalelatent.deploy.doctor_cluster import examine_cluster
    >>> examine_cluster(client, "/shared/runs")  # doctest: +SKIP
    [Finding(check='workers', status='ok', found='4 workers on 2 hosts, ...), ...]
    """
    where = None if folder is None else os.path.abspath(folder) if is_local(folder) else os.fspath(folder)
    token, trouble = _leave_token(where)
    try:
        seen = _ask(client, where if trouble is None else None, token, seconds)
    finally:
        if token is not None and where is not None:
            with suppress(OSError, ScalelatentError):
                locate(where).delete(token)
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("workers", lambda: _workers(seen)),
        ("versions", lambda: _versions(client)),
        ("scheduler", lambda: _scheduler(seen)),
        ("dashboard", lambda: _dashboard(seen)),
        ("threads", lambda: _threads(seen)),
        ("memory", lambda: _memory(seen)),
        ("malloc", lambda: _malloc(seen)),
        ("clock", lambda: _clock(seen)),
        ("gpu", lambda: _gpu(seen)),
        ("numba cache", lambda: _cache(seen)),
        ("folder", lambda: _folder(seen, where, trouble)),
    ]
    found: list[Finding] = []
    for name, check in checks:
        try:
            found.extend(check())
        except Exception as error:  # noqa: BLE001  the doctor must finish whatever a broken cluster answers
            text = f"{type(error).__name__}: {error}"
            found.append(Finding(name, "fail", text, "look at the scheduler's log"))
    return found


def _leave_token(folder: str | None) -> tuple[str | None, str | None]:
    """Write a file for the workers to see; its name, and what went wrong."""
    if folder is None:
        return None, None
    token = f".doctor-{uuid.uuid4().hex[:8]}"
    try:
        place = locate(folder)
        place.make()
        place.write(token, b"doctor")
    except (OSError, ScalelatentError) as error:
        return None, getattr(error, "strerror", None) or str(error)
    return token, None


def _ask(client: Client, folder: str | None, token: str | None, seconds: float) -> Seen:
    """Ask everyone at once, each within its own time: one that hangs must not hide the others."""
    addresses = list(client.scheduler_info(n_workers=-1)["workers"])

    async def one(address: str) -> Any:
        async def run(function: Any, *args: Any) -> Any:
            answer = client.run(function, *args, workers=[address], on_error="return", asynchronous=True)
            return (await asyncio.wait_for(answer, seconds))[address]  # type: ignore[arg-type]

        try:
            began = time.time()
            theirs = await run(time.time)
            ended = time.time()
            told = await run(look_at_worker, folder, token)
        except (TimeoutError, OSError, KeyError) as error:
            return str(error) or f"no answer within {seconds:.0f} s"
        if isinstance(told, BaseException) or isinstance(theirs, BaseException):
            return f"{type(told).__name__}: {told}"
        skew = max(0.0, theirs - ended) - max(0.0, began - theirs)
        return told | {"skew": skew}

    async def all_of_them() -> list[Any]:
        return list(await asyncio.gather(*map(one, addresses)))

    answers = dict(zip(addresses, client.sync(all_of_them), strict=True))
    return Seen(
        str(client.scheduler_info(n_workers=0)["address"]),
        client.run_on_scheduler(look_at_scheduler),
        {address: told for address, told in answers.items() if isinstance(told, dict)},
        {address: told for address, told in answers.items() if isinstance(told, str)},
    )


def _workers(seen: Seen) -> Iterator[Finding]:
    if seen.silent:
        missing = any("No module named" in why for why in seen.silent.values())
        fix = (
            "install scalelatent in the environment that these workers run in, and start them again"
            if missing
            else "look at their logs; end them (Client.retire_workers) if they hang"
        )
        reasons = "; ".join(sorted(set(seen.silent.values()))[:SHOWN])
        yield Finding("workers", "fail", f"{_some(seen.silent)} did not answer: {reasons}", fix)
    if not seen.workers:
        if not seen.silent:
            fix = f"start some: dask worker {seen.address} --nthreads 1; an adaptive cluster needs minimum=1"
            yield Finding("workers", "fail", "none", fix)
        return
    hosts = _by_host(seen)
    threads = sum(told["threads"] for told in seen.workers.values())
    gpus = sum(told["offers_gpu"] for told in seen.workers.values())
    text = (
        f"{len(seen.workers)} workers on {len(hosts)} host(s), {threads} threads, {gpus} of them offer a GPU"
    )
    yield Finding("workers", "ok", text)
    alone = [address for address, told in seen.workers.items() if not told["nanny"]]
    if alone:
        yield Finding(
            "nanny", "warn", f"{_some(alone)} without one: nobody replaces a worker that dies, or limits it",
            "start workers with a nanny (the default of `dask worker`)",
        )  # fmt: skip


def _versions(client: Client) -> Iterator[Finding]:
    from .handshake import differences, table_of

    rows = differences(client)
    if rows:
        yield Finding(
            "versions", "fail", "they differ:\n" + table_of(rows),
            "use one environment (or image) for all of them, or submit with --allow-mismatch",
        )  # fmt: skip
    else:
        yield Finding("versions", "ok", "client, scheduler and workers agree")


def _scheduler(seen: Seen) -> Iterator[Finding]:
    told = seen.scheduler
    scheme, _, place = seen.address.partition("://")
    if scheme == "tcp" and not is_loopback(place.rpartition(":")[0]):
        yield Finding(
            "trust", "warn", f"{seen.address} has no TLS: whoever reaches it can run code on all workers",
            "scalelatent cluster up --tls, or cluster/tls; or a network where everybody is trusted",
        )  # fmt: skip
    else:
        yield Finding("trust", "ok", f"{seen.address}: {'TLS' if scheme == 'tls' else 'loopback'}")
    limit, deaths = told["no_workers_timeout"], told["allowed_failures"]
    text = f"no-workers-timeout {f'{limit:.0f} s' if limit else 'none'}, allowed-failures {deaths}"
    fixes = []
    if not limit:
        fixes.append("DASK_DISTRIBUTED__SCHEDULER__NO_WORKERS_TIMEOUT=5min (now such tasks wait for ever)")
    if deaths < 10:
        fixes.append(
            "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES=10 (workers that die blame their neighbours)"
        )
    fix = f"start the scheduler with {' and '.join(fixes)}" if fixes else ""
    yield Finding("scheduler", "warn" if fixes else "ok", text, fix)


def _dashboard(seen: Seen) -> Iterator[Finding]:
    told = seen.scheduler
    if not told["bokeh"]:
        fix = "python -m pip install 'bokeh>=3.4' where the scheduler runs, and start it again"
        yield Finding("dashboard", "warn", "the scheduler has no bokeh, so no pages", fix)
    elif not told["dashboard"]:
        yield Finding(
            "dashboard", "warn", "the scheduler serves none", "start it with --dashboard-address :8787"
        )
    elif not told["page"]:
        yield Finding(
            "dashboard", "warn", "no page scalelatent on the dashboard yet; the first job adds it",
            "from the start: dask scheduler --preload scalelatent.monitor.preload",
        )  # fmt: skip
    else:
        yield Finding("dashboard", "ok", f"bokeh {told['bokeh']}, with the page scalelatent")


def _threads(seen: Seen) -> Iterator[Finding]:
    """Threads of Dask times threads of libraries, against the cores of each host."""
    crowded = {}
    for host, workers in _by_host(seen).items():
        cores, threads = max(told["cores"] for told in workers), sum(told["threads"] for told in workers)
        if threads > cores:
            crowded[host] = f"{host} has {threads} worker threads on {cores} cores"
    if crowded:
        fix = "start fewer workers or threads there: one thread for each core"
        yield Finding("threads", "warn", _list(crowded.values()), fix)
    wide: dict[str, list[str]] = defaultdict(list)
    for address, told in seen.workers.items():
        for library in ("BLAS", "numba"):  # Blosc takes one outside of the main thread, zarr one in a fit
            if told["pools"][library] > 1:
                wide[f"{library} keeps {told['pools'][library]} threads"].append(address)
    for text, addresses in sorted(wide.items()):
        fix = f"start the workers with {PINNED} (a nanny sets all but the last by itself)"
        yield Finding("threads", "warn", f"{text} in {_some(addresses)}; code besides fits takes all", fix)
    if not crowded and not wide and seen.workers:
        pools = sorted({_pools_of(told["pools"]) for told in seen.workers.values()})
        yield Finding("threads", "ok", f"no more than cores; pools: {_list(pools)}")


def _pools_of(pools: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {threads or 'default'}" for name, threads in pools.items())


def _memory(seen: Seen) -> Iterator[Finding]:
    limits = [told["memory_limit"] for told in seen.workers.values() if told["memory_limit"]]
    free = [address for address, told in seen.workers.items() if not told["memory_limit"]]
    if free:
        yield Finding(
            "memory", "warn", f"{_some(free)} without a limit: a worker that grows takes its host with it",
            "start workers with --memory-limit auto, or a size such as 4GB",
        )  # fmt: skip
    crowded = {}
    for host, workers in _by_host(seen).items():
        promised, there = sum(told["memory_limit"] or 0 for told in workers), workers[0]["machine_bytes"]
        if promised > 1.01 * there:
            crowded[host] = (
                f"{host} has {there / GIB:.1f} GiB and its workers may use {promised / GIB:.1f} GiB"
            )
    if crowded:
        fix = "lower --memory-limit, or start fewer workers there: the system kills what exceeds it, untold"
        yield Finding("memory", "warn", _list(crowded.values()), fix)
    if limits and not crowded and not free:
        low, high = min(limits) / GIB, max(limits) / GIB
        spread = f"{low:.1f} GiB" if high - low < 0.1 else f"{low:.1f} to {high:.1f} GiB"
        yield Finding("memory", "ok", f"{spread} for each worker; no host promises more than it has")


def _malloc(seen: Seen) -> Iterator[Finding]:
    """glibc keeps freed pages unless told not to before the process starts (distributed#5971)."""
    untrimmed = [a for a, told in seen.workers.items() if told["glibc"] and not told["trim"]]
    if untrimmed:
        yield Finding(
            "malloc", "warn", f"MALLOC_TRIM_THRESHOLD_ is not set in {_some(untrimmed)}: memory is kept",
            "export MALLOC_TRIM_THRESHOLD_=65536 before the workers start, or start them with a nanny",
        )  # fmt: skip
    elif seen.workers:
        yield Finding("malloc", "ok", "workers give freed pages back, all but 32 MiB a thread at work")


def _clock(seen: Seen) -> Iterator[Finding]:
    off = {a: told["skew"] for a, told in seen.workers.items() if abs(told["skew"]) > SKEW_SECONDS}
    if off:
        worst = max(off.values(), key=abs)
        yield Finding(
            "clock", "warn", f"{_some(off)} off by up to {worst:+.1f} s: leases of run folders suffer",
            "keep the clocks together with NTP (chrony or systemd-timesyncd)",
        )  # fmt: skip
    elif seen.workers:
        yield Finding("clock", "ok", f"all within {SKEW_SECONDS:.0f} s of this machine's")


def _gpu(seen: Seen) -> Iterator[Finding]:
    offer = {a: told for a, told in seen.workers.items() if told["offers_gpu"]}
    blind = [a for a, told in offer.items() if not told["gpus"]]
    wide = [a for a, told in offer.items() if told["threads"] > 1]
    twice = [a for a, told in seen.workers.items() if len(told["cupy"]) > 1]
    idle = [a for a, told in seen.workers.items() if told["gpus"] and not told["offers_gpu"]]
    if blind:
        without = not any(offer[a]["cupy"] for a in blind)
        why = "no CuPy" if without else "CuPy finds no device"
        fix = (
            "python -m pip install 'scalelatent[cuda12]' (or cuda13) there"
            if without
            else "check nvidia-smi and CUDA_VISIBLE_DEVICES there"
        )
        yield Finding("gpu", "fail", f"{_some(blind)} offer a GPU, but {why}", fix)
    if wide:
        yield Finding(
            "gpu", "warn", f"{_some(wide)} offer a GPU and have several threads, which wait for each other",
            "one process and one thread for each device: --nthreads 1 --resources GPU=1",
        )  # fmt: skip
    if twice:
        yield Finding("gpu", "fail", f"CuPy twice in {_some(twice)}", "pip uninstall all but one of them")
    if idle:
        yield Finding(
            "gpu", "warn", f"{_some(idle)} see a device that they do not offer: jobs leave it idle",
            "start a worker for it with --nthreads 1 --resources GPU=1, or hide it: CUDA_VISIBLE_DEVICES=-1",
        )  # fmt: skip
    if not (blind or wide or twice or idle):
        text = f"{len(offer)} workers offer a device and find it" if offer else "no worker offers one"
        yield Finding("gpu", "ok", text)


def _cache(seen: Seen) -> Iterator[Finding]:
    bad = {a: told["cache_trouble"] for a, told in seen.workers.items() if told["cache_trouble"]}
    if bad:
        text = (
            f"{_some(bad)} keep no compiled kernels ({_list(set(bad.values()))}): every process compiles anew"
        )
        yield Finding("numba cache", "warn", text, "export NUMBA_CACHE_DIR=/a/folder/on/a/local/disk there")
    elif seen.workers:
        yield Finding("numba cache", "ok", "writable for every worker")


def _folder(seen: Seen, folder: str | None, trouble: str | None) -> Iterator[Finding]:
    if folder is None:
        yield Finding(
            "folder", "ok", "not looked at: name the folder of your runs to have it tried by all workers"
        )
        return
    if trouble is not None:
        fix = "choose another folder, or ask for write access"
        yield Finding("folder", "fail", f"{folder}: {trouble} (on this machine)", fix)
        return
    bad = {a: told["folder_trouble"] for a, told in seen.workers.items() if told["folder_trouble"]}
    if bad:
        yield Finding(
            "folder", "fail", f"{folder}: {_some(bad)} cannot use it ({_list(set(bad.values()))})",
            "put it on storage that this machine and all workers share: a shared file system, or s3://…",
        )  # fmt: skip
    elif seen.workers:
        yield Finding("folder", "ok", f"{folder}: every worker sees it, writes and reads there")


def _by_host(seen: Seen) -> dict[str, list[dict[str, Any]]]:
    hosts: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for told in seen.workers.values():
        hosts[told["host"]].append(told)
    return hosts


def _some(workers: Iterable[str] | Mapping[str, Any]) -> str:
    names = sorted(workers)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{len(names)} worker(s) ({', '.join(names[:SHOWN])}{more})"


def _list(texts: Iterable[str]) -> str:
    texts = sorted(texts)
    more = f"; and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return "; ".join(texts[:SHOWN]) + more
