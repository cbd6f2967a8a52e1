"""Run programs as parts of gpu_check.py and gpu_measure.py: one process each, with a time limit."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
MODELS = ("capsule", "mbn", "crbm", "hcn", "linear_mixture")
# The result of a failed program includes this number of lines from the end of its output.
QUOTED_LINES = 15
# With --emulate, time limits are multiplied by this factor, because a processor then runs the CUDA code.
EMULATED_TIME_FACTOR = 10


def append_line(path: Path, line: dict[str, Any]) -> None:
    """Append a JSON line to a file in one write, and flush it to disk."""
    with open(path, "ab", buffering=0) as file:
        file.write((json.dumps(line) + "\n").encode())
        os.fsync(file.fileno())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON lines of a file, or none if it does not exist; an unfinished last line is ignored."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


class ProgramRunner:
    """Runner of programs one after another, within a total time of ``seconds`` and a time limit for each.

    The output of the programs is appended to the file ``log``. The result of each program is one line of the
    file ``lines``; the program itself may append more lines.
    """

    def __init__(self, out: Path, name: str, seconds: float, emulate: bool) -> None:
        self.time_factor = EMULATED_TIME_FACTOR if emulate else 1
        self.out, self.seconds, self.emulate = out, seconds * self.time_factor, emulate
        self.lines, self.log = out / f"{name}.jsonl", out / f"{name}.log"
        out.mkdir(parents=True, exist_ok=True)
        for path in (self.lines, self.log):
            path.unlink(missing_ok=True)
        self._begin = time.perf_counter()

    @property
    def seconds_left(self) -> float:
        """Seconds that remain of the total time of all programs."""
        return self.seconds - (time.perf_counter() - self._begin)

    def record(self, part: str, **line: Any) -> dict[str, Any]:
        """Append the result of a program or check to the file of results, print it, and return its line."""
        found = {"part": part, **line}
        append_line(self.lines, found)
        state = "skipped" if "skipped" in found else "passed" if found.get("passed") else "FAILED"
        seconds = f" ({found['seconds']:.1f} s)" if "seconds" in found else ""
        reason = found.get("skipped") or found.get("error") or ""
        print(f"{state:8}{part}{seconds}{': ' + reason if reason else ''}", flush=True)
        return found

    def make_command(self, *arguments: str) -> list[str]:
        """Return the command that runs a Python script or module, with the CuPy stand-in if emulating."""
        return [sys.executable, *([str(HERE / "gpu_emulated.py")] if self.emulate else []), *arguments]

    def run(self, part: str, command: list[str], seconds: float, prefix: Iterable[str] = ()) -> bool:
        """Run a command for at most ``seconds`` and record its result; return True if its exit status was 0.

        ``prefix`` holds the words of a command that runs this command, such as compute-sanitizer.
        """
        limit = min(seconds * self.time_factor, self.seconds_left)
        if limit < 5:
            self.record(part, skipped="the time of the whole run is used up")
            return False
        begin = time.perf_counter()
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                [*prefix, *command],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                start_new_session=True,
            )
            try:
                status: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                try:  # This also kills the processes that the program has started.
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
                process.wait()
            output.seek(0)
            text = output.read().decode(errors="replace")
        with open(self.log, "a", encoding="utf-8") as log:
            log.write(f"== {part}\n{text}\n")
        line: dict[str, Any] = {"passed": status == 0, "seconds": round(time.perf_counter() - begin, 2)}
        if status is None:
            line["error"] = f"ended after its time limit of {limit:.0f} s"
        elif status:
            line["error"] = f"exit status {status}"
        if status != 0:
            line["output"] = text.splitlines()[-QUOTED_LINES:]
        self.record(part, **line)
        return status == 0

    def finish(self) -> int:
        """Print the names of failed programs, and append a summary; return the exit status."""
        lines = read_lines(self.lines)
        failed = [line.get("part") or line.get("name") for line in lines if line.get("passed") is False]
        skipped = [line["part"] for line in lines if "skipped" in line]
        seconds = time.perf_counter() - self._begin
        summary = f"{len(lines)} results in {seconds:.0f} s, {len(failed)} failed, {len(skipped)} skipped"
        self.record("all", passed=not failed, seconds=round(seconds, 1), failed=failed, skipped_parts=skipped)
        print(f"{summary}; see {self.lines}", flush=True)
        for name in failed:
            print(f"failed: {name}", flush=True)
        return 1 if failed else 0


def parse(doc: str, seconds: float) -> argparse.Namespace:
    """Parse the options of gpu_check.py or gpu_measure.py; ``seconds`` is the default total time."""
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    default = os.environ.get("OUT") or HERE / "results" / "gpu"
    parser.add_argument("--out", type=Path, default=Path(default), help="folder of the results")
    parser.add_argument(
        "--seconds", type=float, default=seconds, help="total seconds; ten times as many with --emulate"
    )
    parser.add_argument(
        "--emulate", action="store_true", help="rehearse at tiny sizes on a processor, with the CuPy stand-in"
    )
    return parser.parse_args()


@contextmanager
def temporary_caches() -> Iterator[Path]:
    """Yield a temporary folder for compiled kernels, so that programs do not change the user's caches."""
    with tempfile.TemporaryDirectory(prefix="scalelatent_gpu_") as folder:
        os.environ["CUPY_CACHE_DIR"] = str(Path(folder) / "cupy")
        os.environ["GPU_EMULATED_FOLDER"] = folder
        os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(folder) / "numba"))
        yield Path(folder)
