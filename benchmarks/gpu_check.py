"""Check results on a GPU within a fixed time: `benchmarks/gpu_all.sh check`.

The parts run in this order: a preflight (GPU, versions, imports, compilation), small cases of all kernels,
the tests marked `gpu`, copies and kernels on different CUDA streams, equal bits of results in two processes,
compute-sanitizer, and the checks of the gpu_*.py scripts. If one part fails or exceeds its time limit, the
next part runs; without a GPU, only the preflight runs.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

from gpu_parts import HERE, MODELS, ProgramRunner, append_line, parse, temporary_caches

# Expression for pytest's option -k with --emulate: tests that the CuPy stand-in runs in half a minute. It
# excludes large sizes and tests of workers that need a real GPU.
EMULATED_TESTS = (
    "not mbn_on_gpu and not residuals and not 2000 and not 784 and not 3000 and not 1000"
    " and not mixed_pool and not max_product and not whole_fits"
)
# Tools of compute-sanitizer that detect wrong memory accesses, data races and wrong synchronisation.
SANITIZER_TOOLS = ("memcheck", "racecheck", "synccheck")
CASES = str(HERE / "gpu_cases.py")


def main() -> int:
    args = parse(__doc__, seconds=395)
    runner = ProgramRunner(args.out.resolve(), "check", args.seconds, args.emulate)
    with temporary_caches() as folder:
        return check(runner, folder)


def check(runner: ProgramRunner, folder: Path) -> int:
    """Run all parts of the check; return the exit status: 0, 1 if a part failed, or 3 without a GPU."""
    lines = ["--lines", str(runner.lines)]
    quick = ["--quick"] if runner.emulate else []
    environment = ["--env", str(runner.out / "env.json")]
    ready = runner.run("preflight", runner.make_command(CASES, "preflight", *lines, *environment), 75)
    if not ready and "no GPU:" in runner.log.read_text(encoding="utf-8"):
        print("there is no GPU: nothing was checked", file=sys.stderr)
        return 3
    runner.run("small cases of all kernels", runner.make_command(CASES, "cases", *lines), 40)
    run_tests(runner)
    runner.run("streams", runner.make_command(CASES, "streams", *lines, *quick), 45)
    compare_bits(runner, folder, quick)
    for tool in SANITIZER_TOOLS:
        sanitize(runner, tool)
    for model in MODELS:
        check_script(runner, model, folder)
    return runner.finish()


def run_tests(runner: ProgramRunner) -> None:
    """Run the tests marked ``gpu`` as one part; with --emulate, only EMULATED_TESTS."""
    limit = str(90 * runner.time_factor)
    options = ["-m", "gpu", "-n", "0", "--timeout", limit, "-q", "-p", "no:cacheprovider"]
    options += [f"--junitxml={runner.out / 'junit.xml'}", "tests/gpu"]
    if runner.emulate:
        options += ["-k", EMULATED_TESTS]
    runner.run("tests", runner.make_command("-m", "pytest", *options), 150)


def compare_bits(runner: ProgramRunner, folder: Path, quick: list[str]) -> None:
    """Run the same computations in two processes, and compare all bits of their results."""
    found = []
    for number in (1, 2):
        path = folder / f"bits{number}.json"
        name = f"bits of results, process {number}"
        if not runner.run(name, runner.make_command(CASES, "bits", "--bits", str(path), *quick), 40):
            return
        found.append(json.loads(path.read_text(encoding="utf-8")))
    different = [name for name in found[0] if found[0][name] != found[1].get(name)]
    counts = {"cases": len(found[0]), "different": different}
    runner.record("identical bits in two processes", passed=not different, **counts)


def sanitize(runner: ProgramRunner, tool: str) -> None:
    """Run the small cases of all kernels under a tool of compute-sanitizer, if it is installed."""
    toolkit = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=f"{toolkit}/bin")
    if runner.emulate or program is None:
        why = "compute-sanitizer needs a real GPU" if runner.emulate else "compute-sanitizer is not installed"
        runner.record(tool, skipped=why)
        return
    # The tool must not report failed calls of CUDA: CuPy expects some, and raises exceptions for others.
    prefix = [program, "--tool", tool, "--error-exitcode", "99", "--report-api-errors", "no"]
    runner.run(tool, runner.make_command(CASES, "cases", "--no-pool", "--few"), 60, prefix)


def check_script(runner: ProgramRunner, model: str, folder: Path) -> None:
    """Run the checks of ``gpu_MODEL.py``, and copy their lines to the file of results."""
    out = folder / f"gpu_{model}.json"
    limit = 60.0
    script_seconds = max(min(limit * runner.time_factor, runner.seconds_left) - 8, 1)
    options = ["--checks-only", "--out", str(out), "--seconds", str(round(script_seconds))]
    options += ["--quick"] if runner.emulate else []
    runner.run(f"gpu_{model}.py", runner.make_command(str(HERE / f"gpu_{model}.py"), *options), limit)
    if out.exists():
        result = json.loads(out.read_text(encoding="utf-8"))
        for line in result["checks"]:
            append_line(runner.lines, {"script": f"gpu_{model}.py", **line})
        for name in result["not_run"]:
            runner.record(f"gpu_{model}.py: {name}", skipped="the time of the script was used up")


if __name__ == "__main__":
    sys.exit(main())
