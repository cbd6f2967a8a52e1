"""Shared functions of the gpu_*.py scripts, which check and measure a model on a GPU.

Each script needs Python 3.12, CuPy, numpy, scipy, numba, this package on PYTHONPATH, and the packages that
this package imports; `benchmarks/gpu_all.sh wheels` downloads them for a machine without a network. The
scripts download nothing and change no setting of the GPU. The exit code is 0 if all checks passed, 1 if a
check failed or raised an exception, and 3 without a GPU; in the last case no result is written.

The result of a script is one JSON file. It is replaced after each check and each measurement, so that an
interrupted or failed run keeps its results so far.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from scalelatent.contract.learners import Block
from scalelatent.contract.stats import Stats
from scalelatent.engine.backend import CupyBackend, HostBackend
from scalelatent.engine.backend import find_kernel as find_engine_kernel
from scalelatent.errors import RunError
from scalelatent.models.capsule.model.em import CapsuleEM, initial_state
from scalelatent.models.capsule.model.members import Members
from scalelatent.models.capsule.model.start import parse_schedule, subspace_start
from scalelatent.reductions.moments import SecondMoments

CLASSES = 10


def script_parser(doc: str) -> argparse.ArgumentParser:
    """Return an argument parser with the options of all gpu_*.py scripts."""
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the result")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--quick", action="store_true", help="use tiny sizes to test the script; the rates mean nothing"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        help="start no check or measurement after this number of seconds; the result names those that did not"
        " run",
    )
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--checks-only", action="store_true", help="check results, and measure nothing")
    only.add_argument("--rates-only", action="store_true", help="measure, and check nothing")
    parser.add_argument(
        "--kernels",
        choices=("cupy", "numba"),
        default="cupy",
        help="numba: use kernels of the processor instead of the GPU, to test the checks without a GPU",
    )
    return parser


# Value of the option --kernels of the running script: "cupy" for the GPU, "numba" for a processor.
_kernels = "cupy"


def find_kernel(name: str, backend: str) -> Callable[..., Any]:
    """Return a kernel (function of a model) of a backend; --kernels numba replaces "cupy" by "numba"."""
    return find_engine_kernel(name, _kernels if backend == "cupy" else backend)


def choose_device() -> str:
    """Return the parameter ``device`` of fits: "gpu", or "cpu" with --kernels numba."""
    return "gpu" if _kernels == "cupy" else "cpu"


def make_gpu_backend(**options: Any) -> Any:
    """Return an engine backend (it calls kernels) of the GPU or, with --kernels numba, of the processor."""
    return CupyBackend(**options) if _kernels == "cupy" else HostBackend()


def make_current_backend() -> Any:
    """Return an engine backend of the GPU whose stream is the current stream of this thread."""
    backend = make_gpu_backend()
    if isinstance(backend, CupyBackend):
        backend.stream.use()
    return backend


class Report:
    """Result of a script, written to its JSON file after each change."""

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self.path, self.content, self._begin = path, content, time.perf_counter()
        path.parent.mkdir(parents=True, exist_ok=True)
        self.write()

    @property
    def seconds(self) -> float:
        """Seconds since the report was created."""
        return time.perf_counter() - self._begin

    def append(self, key: str, line: Any) -> None:
        """Append a line (dictionary) to the list ``key`` of the result, and write the file."""
        self.content.setdefault(key, []).append(line)
        self.write()

    def write(self) -> None:
        """Replace the file in one step, so that a reader sees either the old or the new content."""
        self.content["seconds"] = self.seconds
        partial = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        partial.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")
        partial.replace(self.path)


# A check or a measurement: the name of its list in the result, its own name, and a function that returns one
# line (dictionary) of that list, or several lines.
Task = tuple[str, str, Callable[[], Any]]


def run_script(
    args: argparse.Namespace,
    make_backend: Callable[[], Any],
    list_checks: Callable[[Any, argparse.Namespace], Iterable[Task]],
    list_measurements: Callable[[Any, argparse.Namespace], Iterable[Task]],
) -> int:
    """Run the checks, then the measurements, and write the result; return the exit status.

    ``list_checks`` and ``list_measurements`` receive the backend that ``make_backend`` returns. The status is
    0 if all went well, 1 if a check failed or a task raised an exception, and 3 without a GPU. After an
    exception, the next task runs. No task starts after ``args.seconds`` seconds; the result names those that
    did not run.
    """
    global _kernels
    _kernels = args.kernels
    try:
        backend = make_backend()
    except RunError as error:
        print(f"no GPU checks were made: {error}", file=sys.stderr)
        return 3
    settings = {key: value for key, value in vars(args).items() if key != "out"}
    where = describe_gpu(backend.xp) if _kernels == "cupy" else read_versions()
    report = Report(
        args.out,
        {
            "machine": where,
            "settings": settings,
            "finished": False,
            "checks": [],
            "errors": [],
            "not_run": [],
        },
    )
    if not args.rates_only:
        run_tasks(report, list_checks(backend, args), args.seconds)
        failed = [check["name"] for check in report.content["checks"] if not check["passed"]]
        print(f"{len(report.content['checks'])} checks, {len(failed)} failed {failed or ''}", flush=True)
    if not args.checks_only and _kernels == "cupy":
        run_tasks(report, list_measurements(backend, args), args.seconds)
    if report.content["not_run"]:
        print(f"{args.seconds:g} s are over; not run: {', '.join(report.content['not_run'])}", flush=True)
    report.content["finished"] = not report.content["not_run"]
    report.write()
    print(f"written to {args.out} after {report.seconds:.0f} s", flush=True)
    failed = [check for check in report.content["checks"] if not check["passed"]]
    return 1 if failed or report.content["errors"] else 0


def run_tasks(report: Report, tasks: Iterable[Task], seconds: float | None) -> None:
    """Run tasks one after another, recording each line at once; start none after ``seconds`` seconds."""
    try:
        for key, name, call in tasks:
            if seconds is not None and report.seconds > seconds:
                report.content["not_run"].append(name)
            else:
                run_task(report, key, name, call)
    except Exception as error:  # noqa: BLE001  recorded: data that several tasks use could not be made
        report.append("errors", {"part": "preparation", "error": print_traceback(error)})
    report.write()


def run_task(report: Report, key: str, name: str, call: Callable[[], Any]) -> None:
    """Run one check or measurement; if it raises an exception, record the exception as its failure."""
    try:
        lines = call()
        for line in [lines] if isinstance(lines, dict) else lines:
            report.append(key, line)
    except Exception as error:  # noqa: BLE001  recorded as a failure; the next task runs
        message = print_traceback(error)
        if key == "checks":
            report.append("checks", {"name": name, "passed": False, "error": message})
        else:
            report.append("errors", {"part": name, "error": message})


def print_traceback(error: Exception) -> str:
    """Print the traceback of an exception, and return the last line of the traceback."""
    traceback.print_exception(error)
    return traceback.format_exception_only(error)[-1].strip()


def read_versions() -> dict[str, Any]:
    """Return the versions of this package and its dependencies, the processor's architecture and the date."""
    import numba
    import scipy

    import scalelatent

    return {
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "numba": numba.__version__,
        "scalelatent": scalelatent.__version__,
        "python": platform.python_version(),
        "processor": platform.machine(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }


def describe_gpu(cupy: Any) -> dict[str, Any]:
    """Return properties of the current GPU and versions of the software, without the name of the host."""
    number = cupy.cuda.runtime.getDevice()
    card = cupy.cuda.runtime.getDeviceProperties(number)
    return {
        "device": card["name"].decode() if isinstance(card["name"], bytes) else card["name"],
        "compute_capability": f"{card['major']}.{card['minor']}",
        "multiprocessors": card["multiProcessorCount"],
        "l2_bytes": card["l2CacheSize"],
        "memory_bytes": card["totalGlobalMem"],
        "cuda_driver": cupy.cuda.runtime.driverGetVersion(),
        "cuda_runtime": cupy.cuda.runtime.runtimeGetVersion(),
        "cupy": cupy.__version__,
        **read_versions(),
    }


class TimedBackend(CupyBackend):
    """GPU backend that times each kernel and copy of a pass by CUDA events, including waits for the host."""

    def __init__(self) -> None:
        super().__init__()
        self._events: list[tuple[str, Any, Any]] = []

    def _time_step(self, what: str, call: Any) -> Any:
        begin, end = self.xp.cuda.Event(), self.xp.cuda.Event()
        begin.record(self.stream)
        result = call()
        end.record(self.stream)
        self._events.append((what, begin, end))
        return result

    def kernel(self, name: str) -> Any:
        body = super().kernel(name)
        if name != "capsule_residuals":  # A capsule pass runs only this kernel, and products.
            return body
        return lambda *args: self._time_step("residuals", lambda: body(*args))

    def asarray(self, a: Any, dtype: Any, name: str | None = None) -> Any:
        return self._time_step("rows to the card", lambda: super(TimedBackend, self).asarray(a, dtype, name))

    def take(self, a: Any, rows: Any, name: str) -> Any:
        return self._time_step("gather", lambda: super(TimedBackend, self).take(a, rows, name))

    def matmul(self, a: Any, b: Any, name: str) -> Any:
        what = "H = W X^T" if name == "h" else "Delta = G X"
        return self._time_step(what, lambda: super(TimedBackend, self).matmul(a, b, name))

    def to_host(self, a: Any) -> np.ndarray:
        return self._time_step("Delta to the host", lambda: super(TimedBackend, self).to_host(a))

    def discard_events(self) -> None:
        """Discard all times measured so far."""
        self._events.clear()

    def step_seconds(self) -> dict[str, float]:
        """Return the total seconds of each kind of step, such as copies of rows or matrix products."""
        self.stream.synchronize()
        out: dict[str, float] = {}
        for what, begin, end in self._events:
            out[what] = out.get(what, 0.0) + self.xp.cuda.get_elapsed_time(begin, end) / 1e3
        return out


def device_seconds(backend: CupyBackend, call: Any, repeats: int) -> float:
    """Return the median seconds of a call by CUDA events, after two calls that are not timed.

    ``call`` receives the number of the call, from 0.
    """
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
    """Return the median seconds of a call that waits for its results, after one call that is not timed."""
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def check_error(name: str, error: float, limit: float) -> dict[str, Any]:
    """Return a line of the result: a check that passes if the error is at most the limit, but not for NaN."""
    return {"name": name, "largest difference": float(error), "limit": limit, "passed": bool(error <= limit)}


def relative_error(found: Any, wanted: Any) -> float:
    """Return the largest absolute difference over the largest absolute ``wanted`` value (at least 1e-12)."""
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    return float(np.abs(found - wanted).max(initial=0.0) / max(np.abs(wanted).max(initial=0.0), 1e-12))


def make_rows(n: int, p: int, seed: int) -> dict[str, np.ndarray]:
    """Return random pixel-like rows (n, p) as uint8 and as float32 in [0, 1], and their classes y."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, CLASSES, n).astype(np.int32)
    means = rng.normal(size=(CLASSES, p)) * 18 + 110
    x = np.empty((n, p), dtype=np.uint8)
    for first in range(0, n, 65536):
        part = slice(first, min(first + 65536, n))
        noise = rng.standard_normal((part.stop - first, p), dtype=np.float32) * 45
        x[part] = np.clip(noise + means[y[part]], 0, 255)
    return {"uint8": x, "float32": x.astype(np.float32) / 255, "y": y}


def scale_for_bytes(state: Any) -> Any:
    """Return a capsule model's state for rows in [0, 255], from its state (weights) for the rows / 255."""
    return replace(state, w=state.w / 255)


def make_blocks(x: Any, y: np.ndarray, block_rows: int) -> list[Block]:
    """Return blocks of ``block_rows`` rows of x with their labels y; x is on the host or on the GPU."""
    return [
        Block(x[a : a + block_rows], y[a : a + block_rows], None, a) for a in range(0, len(y), block_rows)
    ]


def run_pass(reduction: Any, state: Any, backend: Any, blocks: list[Block]) -> Stats:
    """Return the sums over all blocks that ``reduction`` (such as an E-step) computes at the given state."""
    stats = Stats.zeros(reduction.layout())
    prepared = reduction.prepare(state, backend)
    for block in blocks:
        reduction.accumulate(prepared, block, stats)
    return stats


def run_pass_in_threads(reduction: Any, state: Any, backends: list[Any], blocks: list[Block]) -> None:
    """Run a reduction (such as an E-step) over all blocks, divided among one thread per backend."""
    work = [
        threading.Thread(target=run_pass, args=(reduction, state, backend, blocks[t :: len(backends)]))
        for t, backend in enumerate(backends)
    ]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join(timeout=300)


def fit_state(members: Members, data: dict[str, np.ndarray], passes: int, backend: Any) -> Any:
    """Return the capsule model's state (weights) after ``passes`` EM steps from subspaces of the classes."""
    x, y = data["float32"], data["y"]
    moments = run_pass(SecondMoments(x.shape[1], CLASSES), None, backend, make_blocks(x, y, 4096))
    nu, patience, scheduled = parse_schedule(None)
    em = CapsuleEM(members, moments["moment"], nu, patience, scheduled, 0.0, 0.0, 0.0, passes + 1, None, 0)
    state = initial_state(subspace_start(members, moments["moment"], moments["weight"]), members.n_members)
    for _ in range(passes):
        state = em.update(
            state, {"train": run_pass(em.reductions()["train"], state, backend, make_blocks(x, y, 4096))}
        )
    return state
