"""The scripts benchmarks/gpu_*.py run on a bare machine, and record the results of failed or stopped runs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
MODELS = ("capsule", "mbn", "crbm", "hcn", "linear_mixture")
# Packages that a bare GPU machine already has. gpu_all.sh downloads wheels of some others; `absent` returns
# the modules that are still missing.
BARE = {"numpy", "scipy", "numba", "llvmlite", "pytest", "packaging"}
# Modules by the name of their package, if the names differ.
MODULES = {"pillow": "PIL"}


def absent() -> set[str]:
    """Return required modules that a GPU machine lacks although it has the wheels of gpu_all.sh."""
    text = (BENCHMARKS / "gpu_all.sh").read_text(encoding="utf-8")
    wheels = set(re.search(r"^names=\((.*?)\)", text, re.MULTILINE | re.DOTALL)[1].split())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = {re.match(r"[\w-]+", requirement)[0] for requirement in project["dependencies"]}
    assert {"dask", "zarr", "scikit-learn"} <= wheels & required
    missing = required - wheels - BARE
    assert "matplotlib" in missing
    return {MODULES.get(name, name.replace("-", "_")) for name in missing}


PRELUDE = """
import runpy
import sys


class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in {absent!r}:
            raise ModuleNotFoundError(f'no {{name}} on a bare GPU machine', name=name)


sys.meta_path.insert(0, Absent())
sys.path.insert(0, {benchmarks!r})
"""
NO_CUPY = "sys.modules['cupy'] = None\n"
START_SCRIPT = """
script = f"{benchmarks}/gpu_{{sys.argv.pop(1)}}.py"
sys.argv[0] = script
runpy.run_path(script, run_name='__main__')
"""
STAND_IN = """
import gpu_emulated
from pathlib import Path

gpu_emulated.install_stand_in(Path(sys.argv.pop()))
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess:
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    program = PRELUDE.format(absent=absent(), benchmarks=str(BENCHMARKS)) + code
    program += START_SCRIPT.format(benchmarks=BENCHMARKS)
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=170, check=False, env=environment)


@pytest.fixture(autouse=True)
def _checkout():
    if not BENCHMARKS.exists():
        pytest.skip("benchmarks/ is not part of this copy")


@pytest.fixture
def emulates(load_helper):
    if load_helper("emulation").compiler() is None or not sys.platform.startswith("linux"):
        pytest.skip("the CUDA text on a processor needs a C++ compiler and Linux")


def test_without_a_gpu_a_benchmark_reports_it_and_writes_nothing(tmp_path):
    out = tmp_path / "result.json"
    done = run(NO_CUPY, "capsule", "--out", str(out))
    assert done.returncode == 3, done.stderr
    assert "no GPU checks were made" in done.stderr
    assert "CuPy" in done.stderr
    assert not out.exists()


@pytest.mark.slow
def test_capsule_runs_on_a_bare_gpu_machine(emulates, tmp_path):
    out = tmp_path / "sub" / "result.json"
    done = run(STAND_IN, "capsule", "--out", str(out), "--quick", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text(encoding="utf-8"))
    assert {"machine", "settings", "checks", "ceilings", "passes", "seconds"} <= set(result)
    assert all(check["passed"] for check in result["checks"])
    assert {line["rows"] for line in result["passes"]} == {"device float32", "host float32", "host uint8"}
    assert {line["nu"] for line in result["passes"]} == {0.0, 0.8}
    assert all(line["device_split"] for line in result["passes"])
    assert {"device", "cupy", "date", "scalelatent"} <= set(result["machine"])
    assert result["finished"]
    assert not result["errors"]
    assert not result["not_run"]


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS[1:])
def test_checks_run_on_a_bare_gpu_machine(emulates, model, tmp_path):
    """The test runs only the checks, because test_model_benchmarks.py runs the measurements of rates."""
    out = tmp_path / "result.json"
    done = run(STAND_IN, model, "--out", str(out), "--quick", "--checks-only", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text(encoding="utf-8"))
    assert all(check["passed"] for check in result["checks"])
    assert len(result["checks"]) >= 12


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_kernels_of_a_processor_pass_the_checks_at_full_size(model, tmp_path):
    """The checks accept correct float32 kernels, so a check that fails on a GPU shows a fault of the GPU."""
    out = tmp_path / "result.json"
    done = run("", model, "--out", str(out), "--kernels", "numba")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text(encoding="utf-8"))
    assert all(check["passed"] for check in result["checks"])


# -- runs that fail or are stopped ------------------------------------------------------------------------

SCRIPT = """
import json, sys, time
sys.path.insert(0, {benchmarks!r})
import gpu_common


def check(name):
    if name == "second":
        raise ValueError("the second check is broken")
    if name == "wait":
        print("waiting", flush=True)
        time.sleep(60)
    if name == "slow":
        time.sleep(0.3)
    return {{"name": name, "passed": True}}


def checks(card, args):
    for name in names:
        yield "checks", name, lambda name=name: check(name)


def measures(card, args):
    def two():
        yield {{"rate": 1}}
        yield {{"rate": 1 / 0}}

    yield "rates", "two rates", two
    yield "rates", "another rate", lambda: {{"rate": 3}}


class Card:
    xp = None


names = sys.argv.pop(1).split(",")
gpu_common.describe_gpu = lambda cupy: {{"device": "none"}}
args = gpu_common.script_parser("A test.").parse_args()
sys.exit(gpu_common.run_script(args, Card, checks, measures))
"""


def start(*arguments: str) -> subprocess.Popen:
    code = textwrap.dedent(SCRIPT.format(benchmarks=str(BENCHMARKS)))
    command = [sys.executable, "-c", code, *arguments]
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def test_a_failing_part_does_not_end_the_others(tmp_path):
    out = tmp_path / "result.json"
    process = start("first,second,third", "--out", str(out))
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 1, errors
    result = json.loads(out.read_text(encoding="utf-8"))
    error = "ValueError: the second check is broken"
    assert result["checks"] == [
        {"name": "first", "passed": True},
        {"name": "second", "passed": False, "error": error},
        {"name": "third", "passed": True},
    ]
    assert result["rates"] == [{"rate": 1}, {"rate": 3}]
    assert result["errors"] == [{"part": "two rates", "error": "ZeroDivisionError: division by zero"}]
    assert "3 checks, 1 failed ['second']" in output
    assert "Traceback" in errors


def test_a_killed_run_leaves_its_results(tmp_path):
    out = tmp_path / "result.json"
    process = start("first,wait", "--out", str(out))
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    result = json.loads(out.read_text(encoding="utf-8"))
    assert result["checks"] == [{"name": "first", "passed": True}]
    assert not result["finished"]


def test_a_time_budget_names_the_parts_that_did_not_run(tmp_path):
    out = tmp_path / "result.json"
    process = start("slow,first,third", "--out", str(out), "--seconds", "0.2")
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    result = json.loads(out.read_text(encoding="utf-8"))
    assert result["checks"] == [{"name": "slow", "passed": True}]
    assert result["not_run"] == ["first", "third", "two rates", "another rate"]
    assert not result["finished"]
    assert "0.2 s are over; not run: first, third, two rates, another rate" in output


def test_checks_or_rates_may_be_run_alone(tmp_path):
    out = tmp_path / "result.json"
    process = start("first", "--out", str(out), "--checks-only")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "rates" not in json.loads(out.read_text(encoding="utf-8"))
    process = start("first", "--out", str(out), "--rates-only")
    process.communicate(timeout=60)
    result = json.loads(out.read_text(encoding="utf-8"))
    assert not result["checks"]
    assert result["rates"]


# -- the script gpu_all.sh, which runs all parts ----------------------------------------------------------


@pytest.fixture
def parts():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import gpu_parts
    finally:
        sys.path.remove(str(BENCHMARKS))
    return gpu_parts


def test_parts_end_within_their_time_and_are_recorded_at_once(parts, tmp_path, capsys):
    runner = parts.ProgramRunner(tmp_path, "check", 60.0, emulate=False)
    assert runner.run("good", [sys.executable, "-c", "print('fine')"], 30)
    assert not runner.run("bad", [sys.executable, "-c", "import sys; print('broken'); sys.exit(4)"], 30)
    begin = time.perf_counter()
    # This part starts a child process, which must also end at the time limit of the part (5 s).
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(50)'])"
    assert not runner.run("slow", [sys.executable, "-c", child], 5)
    assert time.perf_counter() - begin < 20
    runner.seconds = 0.0
    assert not runner.run("late", [sys.executable, "-c", "pass"], 30)
    assert runner.finish() == 1
    good, bad, slow, late, last = parts.read_lines(tmp_path / "check.jsonl")
    assert good["passed"]
    assert bad["error"] == "exit status 4"
    assert bad["output"] == ["broken"]
    assert slow["error"] == "ended after its time limit of 5 s"
    assert late["skipped"] == "the time of the whole run is used up"
    assert last["failed"] == ["bad", "slow"]
    assert last["skipped_parts"] == ["late"]
    assert "fine" in (tmp_path / "check.log").read_text(encoding="utf-8")
    assert "FAILED  bad" in capsys.readouterr().out


def test_an_unfinished_line_is_ignored(parts, tmp_path):
    path = tmp_path / "lines.jsonl"
    parts.append_line(path, {"part": "first"})
    with path.open("a", encoding="utf-8") as file:
        file.write('{"part": "sec')
    assert parts.read_lines(path) == [{"part": "first"}]


def test_overlapping_intervals_count_once():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from gpu_fits import compute_union
    finally:
        sys.path.remove(str(BENCHMARKS))
    assert compute_union([]) == 0
    assert compute_union([(3.0, 4.0), (0.0, 1.0), (0.5, 2.0), (0.6, 0.7)]) == 3.0


def test_gpu_all_explains_its_use():
    done = subprocess.run(
        ["bash", str(BENCHMARKS / "gpu_all.sh")], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert "benchmarks/gpu_all.sh wheels" in done.stderr
    assert "set -euo" not in done.stderr


@pytest.mark.parametrize("command", ["check", "measure"])
def test_gpu_all_reports_a_missing_gpu(command, tmp_path):
    (tmp_path / "cupy.py").write_text("raise ImportError('there is no CuPy here')", encoding="utf-8")
    environment = dict(os.environ, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}", PYTHON=sys.executable)
    command = ["bash", str(BENCHMARKS / "gpu_all.sh"), command, "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "no GPU" in done.stderr


@pytest.mark.slow
def test_small_cases_launch_every_kernel(emulates, tmp_path):
    code = """
    import sys, tempfile
    from pathlib import Path
    sys.path.insert(0, sys.argv.pop(1))
    import gpu_emulated
    kernels = gpu_emulated.install_stand_in(Path(sys.argv.pop()))
    import fake_cupy, gpu_cases
    sys.argv += ["cases", "--few"]
    status = gpu_cases.main()
    launched = {name for name, _ in fake_cupy.LAUNCHED}
    missing = [name for model in gpu_emulated.KERNEL_MODELS.values() for name in kernels.compile(model).names
               if name not in launched]
    sys.exit(f"not launched: {missing}" if missing else status)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(BENCHMARKS), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
        env=dict(os.environ, PYTHONPATH=str(ROOT)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
