"""benchmarks/gpu_mbn.py: what it does without a GPU, and that it runs to its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scalelatent.models.mbn import reference

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_mbn.py"
STAND_IN = f"""
import runpy
import sys
from pathlib import Path

sys.path[:0] = [{str(SCRIPT.parent)!r}, {str(Path(__file__).parent)!r}]
import emulation
import fake_cupy
text = Path({str(Path(reference.__file__).with_name("gpu.cu"))!r}).read_text(encoding='utf-8')
fake_cupy.install(emulation.Emulated(text, Path(sys.argv.pop())))
sys.argv[0] = 'gpu_mbn.py'
runpy.run_path({str(SCRIPT)!r}, run_name='__main__')
"""


def run(*command: str) -> subprocess.CompletedProcess:
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    command = (sys.executable, *command)
    return subprocess.run(command, capture_output=True, text=True, timeout=170, check=False, env=environment)


@pytest.fixture(autouse=True)
def _checkout():
    if not SCRIPT.exists():
        pytest.skip("benchmarks/ is not part of this copy")


@pytest.mark.slow
def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path):
    code = f"import sys, runpy; sys.modules['cupy'] = None; sys.argv[0] = {str(SCRIPT)!r}\n"
    code += (
        f"sys.path.insert(0, {str(SCRIPT.parent)!r}); runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    )
    done = run("-c", code, "--out", str(tmp_path / "result.json"))
    assert done.returncode == 3, done.stderr
    assert "no GPU checks were made" in done.stderr
    assert not (tmp_path / "result.json").exists()


@pytest.mark.slow
def test_it_runs_to_its_end(load_helper, tmp_path):
    if load_helper("emulation").compiler() is None or not sys.platform.startswith("linux"):
        pytest.skip("the CUDA text on a processor needs a C++ compiler and Linux")
    out = tmp_path / "sub" / "result.json"
    done = run("-c", STAND_IN, "--out", str(out), "--quick", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text(encoding="utf-8"))
    assert {"machine", "settings", "checks", "dense", "codes", "sparse", "seconds"} == set(result)
    assert all(check["passed"] for check in result["checks"])
    assert len(result["checks"]) >= 12
