"""Compile kernels before the first fit, once per machine and version, in several processes."""

from __future__ import annotations

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
from typing import Any

from scalelatent.contract.kinds import load_all_kinds
from scalelatent.engine.threads import resolve_jobs
from scalelatent.errors import JobError, nearest

OnKernel = Callable[[int, int], None]


def kernel_families() -> dict[str, str]:
    """Return the package that contains each family (group) of compiled kernels, by name of the family."""
    of_models = (kind.warm for kind in load_all_kinds().values() if kind.warm)
    return {package.rpartition(".")[2]: package for package in of_models} | {
        "kernels": "scalelatent.kernels",
        "data": "scalelatent.generators",
    }


def _chosen(kinds: Iterable[str]) -> list[str]:
    known = kernel_families()
    chosen = list(dict.fromkeys(kinds)) or list(known)
    for kind in chosen:
        if kind not in known:
            raise JobError(f"there are no kernels {kind!r}; {nearest(kind, known)}")
    return chosen


def _find_uncompiled(kinds: Iterable[str]) -> tuple[int, list[tuple[str, int, str]]]:
    """Return the number of kernels, and (family, index, name) of each kernel without a compiled file."""
    count, missing = 0, []
    for kind in kinds:
        package = importlib.import_module(kernel_families()[kind])
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            # GPU modules need CuPy, and have no kernels for the CPU.
            if "gpu" not in module.name:
                importlib.import_module(module.name)
        of_kind = _list_kernels(kind)
        count += len(of_kind)
        missing += [(kind, number, name) for number, name, saved in of_kind if not saved]
    return count, missing


def _jit_family(kind: str) -> str:
    """Return the name under which a family is registered: "other" for packages outside scalelatent."""
    return kind if kernel_families()[kind].startswith("scalelatent.") else "other"


def _list_kernels(kind: str) -> list[tuple[int, str, bool]]:
    """Return (number, name, whether its compiled file exists) of the imported kernels of a family."""
    from scalelatent.kernels import jit

    family = _jit_family(kind)
    prefix = f"{kernel_families()[kind]}." if family == "other" else ""
    found = enumerate(jit.entries(family))
    return [(number, name, saved) for number, (name, saved) in found if name.startswith(prefix)]


def count_uncompiled() -> tuple[int, int]:
    """Return the number of all kernels, and the number of kernels without a compiled file on this machine."""
    count, missing = _find_uncompiled(kernel_families())
    return count, len(missing)


def warm(
    kinds: Iterable[str] = (), *, processes: int | None = None, on_kernel: OnKernel | None = None
) -> dict[str, Any]:
    """Compile the missing kernels in several processes, by default one per core; return a summary."""
    from scalelatent.kernels.cache_folder import CACHE_FOLDER

    begin, (count, missing) = time.monotonic(), _find_uncompiled(_chosen(kinds))
    todo, done, lock, failed = deque(missing), 0, threading.Lock(), list[str]()
    children: list[subprocess.Popen[str]] = []
    ended = threading.Event()

    def work() -> None:
        nonlocal done
        # A new session keeps Ctrl-C away from the child; this process kills its children instead.
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(
            [sys.executable, "-m", __name__], **pipes, text=True, start_new_session=True
        ) as child:
            children.append(child)
            if ended.is_set():  # the children were killed while this child started
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
            # After polars is imported, a wait without timeout delays Ctrl-C until the wait ends.
            while thread.is_alive():
                thread.join(0.2)
    except BaseException:
        ended.set()
        todo.clear()
        for child in children:
            child.kill()
        raise
    if failed:
        raise JobError(
            f"the process that compiled kernel {failed[0]} ended; see its error in the lines above"
        )
    cuda = _compile_for_gpu(_chosen(kinds))
    seconds = round(time.monotonic() - begin, 1)
    compiled = [name for *_, name in missing]
    return {"kernels": count, "compiled": compiled, "cuda": cuda, "seconds": seconds, "folder": CACHE_FOLDER}


def _compile_for_gpu(kinds: Iterable[str]) -> list[str]:
    """Compile the CUDA kernels of some families (groups) of kernels; return the families that have any."""
    from scalelatent.engine.backend import gpu_count
    from scalelatent.kernels.cuda import Kernels, has_cuda

    if not gpu_count():
        return []
    packages = {kind: f"{kernel_families()[kind]}.kernels" for kind in kinds}
    there = {kind: name for kind, name in packages.items() if find_spec(name) and has_cuda(name)}
    with ThreadPoolExecutor(max(len(there), 1), "scalelatent-nvrtc") as pool:
        for _ in pool.map(lambda package: Kernels(package).compile(), there.values()):
            pass
    return list(there)


def _compile_requested() -> None:
    """Compile the kernels whose family and number arrive on standard input, one per line."""
    from scalelatent.kernels import jit

    imported = set()
    for line in sys.stdin:
        kind, number = json.loads(line)
        if kind not in imported:
            imported.add(kind)
            _find_uncompiled([kind])
        jit.compile_entry(_jit_family(kind), number)
        sys.stdout.write("done\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _compile_requested()
