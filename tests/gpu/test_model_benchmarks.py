"""The GPU benchmarks of all models report a missing GPU, and run completely on the stand-in for CuPy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = {
    "mbn": {"dense", "codes", "sparse"},
    "crbm": {"rates", "steps"},
    "linear_mixture": {"scan", "projections", "passes"},
    "hcn": {"rates", "learned"},
}
STAND_IN = f"""
import runpy
import sys
from pathlib import Path

sys.path[:0] = [{str(ROOT / "benchmarks")!r}, {str(Path(__file__).parent)!r}]
import emulation
import fake_cupy
from scalelatent.kernels.cuda import Kernels
model, folder = sys.argv.pop(), Path(sys.argv.pop())
fake_cupy.install(emulation.Emulated(Kernels(f"scalelatent.models.{{model}}.kernels").text, folder))
sys.argv[0] = f"gpu_{{model}}.py"
runpy.run_path(f"{ROOT}/benchmarks/gpu_{{model}}.py", run_name='__main__')
"""


def run(*command: str) -> subprocess.CompletedProcess:
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    command = (sys.executable, *command)
    return subprocess.run(command, capture_output=True, text=True, timeout=170, check=False, env=environment)


@pytest.fixture(params=PARTS)
def model_name(request) -> str:
    if not (ROOT / "benchmarks").exists():
        pytest.skip("benchmarks/ is not part of this copy")
    return request.param


@pytest.mark.slow
def test_without_a_gpu_a_benchmark_reports_it_and_writes_nothing(model_name, tmp_path):
    script = ROOT / "benchmarks" / f"gpu_{model_name}.py"
    code = f"import sys, runpy; sys.modules['cupy'] = None; sys.argv[0] = {str(script)!r}\n"
    code += (
        f"sys.path.insert(0, {str(script.parent)!r}); runpy.run_path({str(script)!r}, run_name='__main__')"
    )
    done = run("-c", code, "--out", str(tmp_path / "result.json"))
    assert done.returncode == 3, done.stderr
    assert "no GPU checks were made" in done.stderr
    assert not (tmp_path / "result.json").exists()


@pytest.mark.slow
def test_a_benchmark_runs_to_its_end(load_helper, model_name, tmp_path):
    if load_helper("emulation").compiler() is None or not sys.platform.startswith("linux"):
        pytest.skip("the CUDA text on a processor needs a C++ compiler and Linux")
    out = tmp_path / "sub" / "result.json"
    done = run("-c", STAND_IN, "--out", str(out), "--quick", str(tmp_path), model_name)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text(encoding="utf-8"))
    assert {"machine", "settings", "checks", "seconds", *PARTS[model_name]} <= set(result)
    assert result["finished"]
    assert not result["errors"]
    assert not result["not_run"]
    assert all(check["passed"] for check in result["checks"])
    assert len(result["checks"]) >= 12
