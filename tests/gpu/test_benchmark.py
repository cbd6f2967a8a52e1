"""benchmarks/gpu_capsule.py: what it may import, what it does without a GPU, that it runs to its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_capsule.py"
CUDA_FILE = ROOT / "scalelatent" / "models" / "capsule" / "kernels" / "gpu.cu"
# A bare GPU machine has numpy, scipy, numba and CuPy; anything else that is asked for fails there, and here.
ABSENT = (
    "zarr dask distributed sklearn pydantic typer rich bokeh fsspec psutil threadpoolctl matplotlib jinja2"
)
BARE = f"""
import runpy
import sys
from pathlib import Path

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {ABSENT!r}.split():
            raise ModuleNotFoundError(f'no {{name}} on a bare GPU machine', name=name)

sys.meta_path.insert(0, Absent())
sys.path[:0] = [{str(SCRIPT.parent)!r}, {str(Path(__file__).parent)!r}]
"""
NO_CUPY = "sys.modules['cupy'] = None\n"
STAND_IN = f"""
import emulation
import fake_cupy
text = Path({str(CUDA_FILE)!r}).read_text(encoding='utf-8')
fake_cupy.install(emulation.Emulated(text, Path(sys.argv[-1])))
del sys.argv[-1]
"""
START = f"sys.argv[0] = 'gpu_capsule.py'\nrunpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"


def run(code: str, *arguments: str) -> subprocess.CompletedProcess:
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=170, check=False, env=environment)


@pytest.fixture(autouse=True)
def _checkout():
    if not SCRIPT.exists():
        pytest.skip("benchmarks/ is not part of this copy")


def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path):
    out = tmp_path / "result.json"
    done = run(BARE + NO_CUPY + START, "--out", str(out))
    assert done.returncode == 3, done.stderr
    assert "no GPU checks were made" in done.stderr
    assert "CuPy" in done.stderr
    assert not out.exists()


@pytest.mark.slow
def test_it_runs_on_what_a_bare_gpu_machine_has(emulated, tmp_path):
    out = tmp_path / "sub" / "result.json"
    done = run(BARE + STAND_IN + START, "--out", str(out), "--quick", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text(encoding="utf-8"))
    assert {"machine", "settings", "checks", "ceilings", "passes", "seconds"} == set(result)
    assert all(check["passed"] for check in result["checks"])
    assert {line["rows"] for line in result["passes"]} == {"device float32", "host float32", "host uint8"}
    assert {line["nu"] for line in result["passes"]} == {0.0, 0.8}
    assert all(line["device_split"] for line in result["passes"])
    assert {"device", "cupy", "date", "scalelatent"} <= set(result["machine"])
