"""Run a program with a stand-in for CuPy, which runs the CUDA source of kernels on a machine without a GPU.

    python benchmarks/gpu_emulated.py benchmarks/gpu_hcn.py --quick --out result.json
    python benchmarks/gpu_emulated.py -m pytest -m gpu tests/gpu

The stand-in is tests/gpu/fake_cupy.py. It needs a C++ compiler and Linux. The results are those of the CUDA
source, but its speed says nothing about a GPU. The environment variable GPU_EMULATED_FOLDER names a folder
for compiled kernels that several programs share.
"""

from __future__ import annotations

import os
import runpy
import shutil
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Name of a model, by the first word of the names of its kernels.
KERNEL_MODELS = {"capsule": "capsule", "mbn": "mbn", "crbm": "crbm", "hcn": "hcn", "lm": "linear_mixture"}
# Program that calls the C++ compiler, or copies the library of an earlier call with the same arguments.
COMPILER_PROGRAM = """#!{python}
import hashlib, os, shutil, subprocess, sys
arguments = sys.argv[1:]
place, source = arguments.index("-o"), arguments[-1]
with open(source, "rb") as file:
    key = hashlib.sha256(file.read() + repr(arguments[:place]).encode()).hexdigest()
kept = os.path.join({folder!r}, key + ".so")
if not os.path.exists(kept):
    made = kept + "." + str(os.getpid())
    status = subprocess.run([{compiler!r}, *arguments[:place], "-o", made, source]).returncode
    if status:
        sys.exit(status)
    os.replace(made, kept)
shutil.copy(kept, arguments[place + 1])
"""


class EmulatedKernels:
    """CUDA kernels on the processor, compiled for each model at the first launch of one of its kernels."""

    def __init__(self, emulation: Any, folder: Path) -> None:
        self._emulation, self._folder = emulation, folder
        self._lock, self._compiled = threading.Lock(), {}

    def compile(self, model: str) -> Any:
        """Return the kernels of one model; compile them first if this process has not done so yet."""
        from scalelatent.kernels.cuda import Kernels

        with self._lock:
            if model not in self._compiled:
                place = self._folder / model
                place.mkdir(parents=True, exist_ok=True)
                text = Kernels(f"scalelatent.models.{model}.kernels").text
                self._compiled[model] = self._emulation.Emulated(text, place)
            return self._compiled[model]

    def check(self, name: str, *arguments: Any) -> None:
        """Raise an error if the arguments of a launch do not fit the kernel's parameters."""
        self.compile(KERNEL_MODELS[name.partition("_")[0]]).check(name, *arguments)

    def launch(self, name: str, *arguments: Any) -> None:
        """Run a kernel on the processor."""
        self.compile(KERNEL_MODELS[name.partition("_")[0]]).launch(name, *arguments)


def install_stand_in(folder: Path) -> EmulatedKernels:
    """Replace CuPy in this process by the stand-in; compiled kernels are written to ``folder``."""
    sys.path.insert(0, str(ROOT / "tests" / "gpu"))
    import emulation
    import fake_cupy

    shared = os.environ.get("GPU_EMULATED_FOLDER")
    compiler = emulation.compiler()
    if compiler is None or not sys.platform.startswith("linux"):
        raise SystemExit("the stand-in for CuPy needs a C++ compiler (g++ or clang++) and Linux")
    if shared and not Path(compiler).is_relative_to(shared):
        wrapper = Path(shared) / "bin" / "g++"
        wrapper.parent.mkdir(parents=True, exist_ok=True)
        text = COMPILER_PROGRAM.format(python=sys.executable, folder=shared, compiler=compiler)
        partial = wrapper.with_name(f"{os.getpid()}.tmp")
        partial.write_text(text, encoding="utf-8")
        partial.chmod(0o755)
        partial.replace(wrapper)
        os.environ["PATH"] = f"{wrapper.parent}{os.pathsep}{os.environ['PATH']}"
    kernels = EmulatedKernels(emulation, folder)
    fake_cupy.install(kernels)
    return kernels


def main() -> None:
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    folder = Path(tempfile.mkdtemp(prefix="gpu_emulated_"))
    try:
        install_stand_in(folder)
        if sys.argv[1] == "-m":
            del sys.argv[:2]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            del sys.argv[0]
            sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
            runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
