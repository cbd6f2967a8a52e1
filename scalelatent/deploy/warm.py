"""Kernels compiled ahead: once for a machine and version, in several processes."""

from __future__ import annotations

import asyncio
import difflib
import importlib
import json
import pkgutil
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from scalelatent.contract.kinds import known_kinds
from scalelatent.engine.threads import resolve_jobs
from scalelatent.errors import JobError

if TYPE_CHECKING:
    from distributed import Client

WARM_SECONDS = 600.0

OnKernel = Callable[[int, int], None]


def families() -> dict[str, str]:
    """Families of kernels and the package of each."""
    of_models = (kind.warm for kind in known_kinds().values() if kind.warm)
    return {package.rpartition(".")[2]: package for package in of_models} | {
        "kernels": "scalelatent.kernels",
        "data": "scalelatent.generators",
        "evaluation": "scalelatent.evaluation",
    }


def _chosen(kinds: Iterable[str]) -> list[str]:
    known = families()
    chosen = list(dict.fromkeys(kinds)) or list(known)
    for kind in chosen:
        if kind not in known:
            near = difflib.get_close_matches(kind, known, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise JobError(f"there are no kernels {kind!r}{hint}; there are {', '.join(known)}")
    return chosen


def _missing(kinds: Iterable[str]) -> tuple[int, list[tuple[str, int, str]]]:
    """Number of kernels, and (family, number, name) of those that are not compiled here."""
    count, missing = 0, []
    for kind in kinds:
        package = importlib.import_module(families()[kind])
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            # What needs CuPy, or a package that is not there, has no kernels for the CPU.
            if "gpu" not in module.name:
                importlib.import_module(module.name)
        of_kind = _of_family(kind)
        count += len(of_kind)
        missing += [(kind, number, name) for number, name, saved in of_kind if not saved]
    return count, missing


def _jit_family(kind: str) -> str:
    """What `scalelatent.kernels.jit` calls a family: other packages share one."""
    return kind if families()[kind].startswith("scalelatent.") else "other"


def _of_family(kind: str) -> list[tuple[int, str, bool]]:
    """(number, name, whether it lies on disk compiled) of the kernels of a family that were imported."""
    from scalelatent.kernels import jit

    family = _jit_family(kind)
    prefix = f"{families()[kind]}." if family == "other" else ""
    found = enumerate(jit.entries(family))
    return [(number, name, saved) for number, (name, saved) in found if name.startswith(prefix)]


def cold_kernels() -> tuple[int, int]:
    """Number of kernels, and of those that this machine has yet to compile; compiles none."""
    count, missing = _missing(families())
    return count, len(missing)


def warm(
    kinds: Iterable[str] = (), *, processes: int | None = None, on_kernel: OnKernel | None = None
) -> dict[str, Any]:
    """Compile the kernels that this machine does not have yet, in several processes (default: all cores)."""
    from scalelatent.kernels.cache_folder import CACHE

    begin, (count, missing) = time.monotonic(), _missing(_chosen(kinds))
    todo, done, lock, failed = deque(missing), 0, threading.Lock(), list[str]()
    children: list[subprocess.Popen[str]] = []
    ended = threading.Event()

    def work() -> None:
        nonlocal done
        # Errors go where those of this process go. Ctrl-C reaches this process alone; it ends the others.
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(
            [sys.executable, "-m", __name__], **pipes, text=True, start_new_session=True
        ) as child:
            children.append(child)
            if ended.is_set():  # while it was started, and so was not among those that were killed
                child.kill()
                return
            assert child.stdin is not None
            assert child.stdout is not None
            while todo and not failed:
                try:
                    kind, number, name = todo.popleft()
                except IndexError:
                    break
                child.stdin.write(json.dumps([kind, number]) + "\n")
                child.stdin.flush()
                if not child.stdout.readline():
                    failed.append(name)
                    break
                with lock:
                    done += 1
                    if on_kernel is not None:
                        on_kernel(done, len(missing))
            child.stdin.close()

    threads = [
        threading.Thread(target=work, name=f"scalelatent-warm-{n}")
        for n in range(min(resolve_jobs(processes), len(missing)))
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            # Some libraries (polars) let waits go on after a signal: Ctrl-C would be heard when all is done.
            while thread.is_alive():
                thread.join(0.2)
    except BaseException:
        ended.set()
        todo.clear()
        for child in children:
            child.kill()
        raise
    if failed:
        raise JobError(f"kernel {failed[0]} does not compile here: its process ended; see the lines above")
    cuda = _warm_card(_chosen(kinds))
    seconds = round(time.monotonic() - begin, 1)
    compiled = [name for *_, name in missing]
    return {"kernels": count, "compiled": compiled, "cuda": cuda, "seconds": seconds, "folder": CACHE}


def _warm_card(kinds: Iterable[str]) -> list[str]:
    """Compile the CUDA texts of these families for the card of this process, all at once; their names."""
    from scalelatent.engine.backend import gpu_count
    from scalelatent.kernels.cuda import Kernels, has_cuda

    if not gpu_count():
        return []
    packages = {kind: f"{families()[kind]}.kernels" for kind in kinds}
    there = {kind: name for kind, name in packages.items() if find_spec(name) and has_cuda(name)}
    with ThreadPoolExecutor(max(len(there), 1), "scalelatent-nvrtc") as pool:
        for _ in pool.map(lambda package: Kernels(package).compile(), there.values()):
            pass
    return list(there)


def warm_cluster(client: Client, kinds: Iterable[str] = ()) -> dict[str, dict[str, Any]]:
    """Run `warm` on one worker of every host of a cluster; return what it returned by host.

    A worker that offers a card compiles for it too, and is chosen before others.
    """
    chosen = _chosen(kinds)
    workers = client.scheduler_info(n_workers=-1)["workers"]
    if not workers:
        raise JobError("the cluster has no workers: start some, then warm them")
    ranked = sorted(workers, key=lambda a: (not workers[a].get("resources", {}).get("GPU"), a), reverse=True)
    of_host = {workers[address]["host"]: address for address in ranked}
    found = client.run(_warm_here, chosen, workers=sorted(of_host.values()), on_error="return")
    for host, address in of_host.items():
        if isinstance(found.get(address), BaseException) or address not in found:
            raise JobError(
                f"kernels were not compiled on {host}: {found.get(address)!r}; "
                f"see the log of worker {address}"
            )
    return {host: found[address] for host, address in sorted(of_host.items())}


async def _warm_here(kinds: list[str]) -> dict[str, Any]:
    # In a thread: the worker goes on answering.
    return await asyncio.wait_for(asyncio.to_thread(warm, kinds), WARM_SECONDS)


def _compile_what_is_asked_for() -> None:
    from scalelatent.kernels import jit

    imported = set()
    for line in sys.stdin:
        kind, number = json.loads(line)
        if kind not in imported:
            imported.add(kind)
            _missing([kind])
        jit.compile_entry(_jit_family(kind), number)
        sys.stdout.write("done\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _compile_what_is_asked_for()
