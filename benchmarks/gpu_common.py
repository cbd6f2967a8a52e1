"""What the gpu_*.py scripts share: their course, timers, rows, passes without the engine, the machine."""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from scalelatent.contract.learners import Block
from scalelatent.contract.stats import Stats
from scalelatent.engine.backend import CupyBackend
from scalelatent.errors import RunError
from scalelatent.models.capsule.model.em import CapsuleEM, initial_state
from scalelatent.models.capsule.model.members import Members
from scalelatent.models.capsule.model.start import schedule_arrays, subspace_start
from scalelatent.reductions.moments import SecondMoments

CLASSES = 10


def script_parser(doc: str) -> argparse.ArgumentParser:
    """The options of all scripts."""
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the result, JSON")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes: shows that it runs, measures nothing"
    )
    return parser


def card_stream() -> CupyBackend:
    """A backend whose stream is this thread's."""
    backend = CupyBackend()
    backend.stream.use()
    return backend


def run_script(
    args: argparse.Namespace,
    make: Callable[[], Any],
    check: Callable[[Any, argparse.Namespace], list[dict[str, Any]]],
    measure: Callable[[Any, argparse.Namespace], dict[str, Any]],
) -> int:
    """Checks, then measurements, then the file; the exit status: 1 where a check fails, 3 without a GPU."""
    try:
        card = make()
    except RunError as error:
        print(f"no GPU checks were made: {error}", file=sys.stderr)
        return 3
    begin = time.perf_counter()
    result: dict[str, Any] = {"machine": machine(card.xp)}
    result["settings"] = {key: value for key, value in vars(args).items() if key != "out"}
    result["checks"] = check(card, args)
    failed = [check["name"] for check in result["checks"] if not check["passed"]]
    print(f"{len(result['checks'])} checks, {len(failed)} failed {failed or ''}", flush=True)
    result |= measure(card, args)
    result["seconds"] = time.perf_counter() - begin
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{args.out}: {result['seconds']:.0f} s")
    return 1 if failed else 0


def machine(cupy: Any) -> dict[str, Any]:
    """What it ran on; no host name."""
    number = cupy.cuda.runtime.getDevice()
    card = cupy.cuda.runtime.getDeviceProperties(number)
    import numba
    import scipy

    import scalelatent

    return {
        "device": card["name"].decode() if isinstance(card["name"], bytes) else card["name"],
        "compute_capability": f"{card['major']}.{card['minor']}",
        "multiprocessors": card["multiProcessorCount"],
        "l2_bytes": card["l2CacheSize"],
        "memory_bytes": card["totalGlobalMem"],
        "cuda_driver": cupy.cuda.runtime.driverGetVersion(),
        "cuda_runtime": cupy.cuda.runtime.runtimeGetVersion(),
        "cupy": cupy.__version__,
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "numba": numba.__version__,
        "scalelatent": scalelatent.__version__,
        "python": platform.python_version(),
        "processor": platform.machine(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }


class TimedBackend(CupyBackend):
    """Events around every step: where the device's time goes, gaps while it waits for the host included."""

    def __init__(self) -> None:
        super().__init__()
        self._events: list[tuple[str, Any, Any]] = []

    def _timed(self, what: str, call: Any) -> Any:
        begin, end = self.xp.cuda.Event(), self.xp.cuda.Event()
        begin.record(self.stream)
        result = call()
        end.record(self.stream)
        self._events.append((what, begin, end))
        return result

    def kernel(self, name: str) -> Any:
        body = super().kernel(name)
        if name != "capsule_residuals":  # the step around it is timed by its parts
            return body
        return lambda *args: self._timed("residuals", lambda: body(*args))

    def asarray(self, a: Any, dtype: Any, name: str | None = None) -> Any:
        return self._timed("rows to the card", lambda: super(TimedBackend, self).asarray(a, dtype, name))

    def take(self, a: Any, rows: Any, name: str) -> Any:
        return self._timed("gather", lambda: super(TimedBackend, self).take(a, rows, name))

    def matmul(self, a: Any, b: Any, name: str) -> Any:
        what = "H = W X^T" if name == "h" else "Delta = G X"
        return self._timed(what, lambda: super(TimedBackend, self).matmul(a, b, name))

    def to_host(self, a: Any) -> np.ndarray:
        return self._timed("Delta to the host", lambda: super(TimedBackend, self).to_host(a))

    def forget(self) -> None:
        """Drop what was timed so far."""
        self._events.clear()

    def split(self) -> dict[str, float]:
        """Seconds of each step."""
        self.stream.synchronize()
        out: dict[str, float] = {}
        for what, begin, end in self._events:
            out[what] = out.get(what, 0.0) + self.xp.cuda.get_elapsed_time(begin, end) / 1e3
        return out


def device_seconds(backend: CupyBackend, call: Any, repeats: int) -> float:
    """Median seconds of a call by device events, after two warm-ups; the call is given its number."""
    cupy, times = backend.xp, []
    backend.stream.use()
    for step in range(repeats + 2):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record(backend.stream)
        call(step)
        end.record(backend.stream)
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(begin, end) / 1e3)
    return statistics.median(times[2:])


def host_seconds(call: Any, repeats: int) -> float:
    """Median seconds of a call that ends with its work done, after one warm-up."""
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def make_rows(n: int, p: int, seed: int) -> dict[str, np.ndarray]:
    """Overlapping classes of pixel-like rows, as bytes and as float32 in [0, 1]."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, CLASSES, n).astype(np.int32)
    means = rng.normal(size=(CLASSES, p)) * 18 + 110
    x = np.empty((n, p), dtype=np.uint8)
    for first in range(0, n, 65536):
        part = slice(first, min(first + 65536, n))
        noise = rng.standard_normal((part.stop - first, p), dtype=np.float32) * 45
        x[part] = np.clip(noise + means[y[part]], 0, 255)
    return {"uint8": x, "float32": x.astype(np.float32) / 255, "y": y}


def for_bytes(state: Any) -> Any:
    """The state whose latents of the bytes are those of the rows in [0, 1]."""
    return replace(state, w=state.w / 255)


def split(x: Any, y: np.ndarray, block_rows: int) -> list[Block]:
    """Blocks over rows on the host or on the device."""
    return [
        Block(x[a : a + block_rows], y[a : a + block_rows], None, a) for a in range(0, len(y), block_rows)
    ]


def run_pass(reduction: Any, state: Any, backend: Any, blocks: list[Block]) -> Stats:
    """What a task does with its span."""
    stats = Stats.zeros(reduction.layout())
    prepared = reduction.prepare(state, backend)
    for block in blocks:
        reduction.accumulate(prepared, block, stats)
    return stats


def threaded_pass(reduction: Any, state: Any, backends: list[Any], blocks: list[Block]) -> None:
    """The pass by several threads with a backend each, so that copies run beside kernels."""
    work = [
        threading.Thread(target=run_pass, args=(reduction, state, backend, blocks[t :: len(backends)]))
        for t, backend in enumerate(backends)
    ]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join(timeout=300)


def start(members: Members, data: dict[str, np.ndarray], passes: int, backend: Any) -> Any:
    """The state after a subspace start and a few passes of plain EM."""
    x, y = data["float32"], data["y"]
    moments = run_pass(SecondMoments(x.shape[1], CLASSES), None, backend, split(x, y, 4096))
    nu, patience, scheduled = schedule_arrays(None)
    em = CapsuleEM(members, moments["moment"], nu, patience, scheduled, 0.0, 0.0, 0.0, passes + 1, None, 0)
    state = initial_state(subspace_start(members, moments["moment"], moments["weight"]), members.n_members)
    for _ in range(passes):
        state = em.update(
            state, {"train": run_pass(em.reductions()["train"], state, backend, split(x, y, 4096))}
        )
    return state
