"""The CUDA files compile for the supported GPUs by NVRTC, and that of capsules by nvcc, without a device."""

from __future__ import annotations

import ctypes
import re
import shutil
import struct
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

import scalelatent.models
from scalelatent.kernels.cuda import Kernels

ARCHITECTURES = ("sm_80", "sm_90")
# Upper bound of local memory, in bytes per thread. The driver reserves this memory, outside CuPy's pool, for
# each of the about 300,000 threads that a GPU can run at once; 64 bytes per thread are 20 MB.
LOCAL_BYTES = 64
# CuPy passes these options to NVRTC, besides those of the package.
OPTIONS = ["--std=c++17", "-ftz=true", "--device-as-default-execution-space"]
MODELS = sorted(
    path.parents[1].name for path in Path(scalelatent.models.__path__[0]).glob("*/kernels/gpu.cu")
)


def find_nvrtc() -> ctypes.CDLL | None:
    """Return the library NVRTC of a wheel (nvidia-cuda-nvrtc) or of an installed toolkit, or None."""
    folders: list[Path] = []
    spec = find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        folders += sorted(Path(root).glob("*/lib"))
    nvcc = shutil.which("nvcc")
    if nvcc:
        folders += [Path(nvcc).resolve().parents[1] / name for name in ("lib64", "lib")]
    folders += [Path("/usr/local/cuda/lib64")]
    for folder in folders:
        for library in sorted(folder.glob("libnvrtc.so*")):
            # The library finds its built-in headers only if it is loaded by its full path.
            try:
                return ctypes.CDLL(str(library))
            except OSError:
                continue
    try:
        return ctypes.CDLL("libnvrtc.so")
    except OSError:
        return None


def compile_by_nvrtc(library: ctypes.CDLL, text: str, options: list[str]) -> tuple[int, str, bytes]:
    """Compile a CUDA text; return NVRTC's status, its log and the binary."""
    program = ctypes.c_void_p()
    assert library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"gpu.cu", 0, None, None) == 0
    flags = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
    status = library.nvrtcCompileProgram(program, len(options), flags)

    def fetch(kind: str) -> bytes:
        size = ctypes.c_size_t()
        getattr(library, f"nvrtcGet{kind}Size")(program, ctypes.byref(size))
        out = ctypes.create_string_buffer(size.value)
        getattr(library, f"nvrtcGet{kind}")(program, out)
        return out.raw

    log = fetch("ProgramLog").rstrip(b"\0").decode()
    binary = b"" if status else fetch("CUBIN")
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return status, log, binary


@pytest.fixture(scope="module")
def nvrtc() -> ctypes.CDLL:
    library = find_nvrtc()
    if library is None:
        pytest.skip("no NVRTC here: pip install nvidia-cuda-nvrtc, or a CUDA toolkit")
    return library


@pytest.fixture
def kernels(load_helper, cuda_text) -> list[str]:
    """Return the names of the kernels in the CUDA file of capsules."""
    names = load_helper("emulation").kernel_names(cuda_text)
    assert len(names) == 10
    return names


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("model", MODELS)
def test_nvrtc_compiles_every_cuda_file(nvrtc, load_helper, model, architecture):
    text = Kernels(f"scalelatent.models.{model}.kernels").text
    names = load_helper("emulation").kernel_names(text)
    assert len(names) > 1
    status, log, binary = compile_by_nvrtc(nvrtc, text, [f"--gpu-architecture={architecture}", *OPTIONS])
    assert status == 0, log
    assert "warning" not in log, log
    for name in names:
        # Clusters of thread blocks need a GPU of compute capability 9.0.
        clustered = name.endswith(("_cluster", "_kept"))
        assert (name.encode() in binary) == (not clustered or architecture >= "sm_90")
    used = read_local_bytes(binary)
    assert set(used) == {name for name in names if name.encode() in binary}
    assert max(used.values()) <= LOCAL_BYTES, used


def test_the_check_of_local_memory_detects_an_array_with_a_computed_index(nvrtc):
    body = "int b[90]; for (int i = 0; i < 90; ++i) b[a[i]] = i; *a = b[*a];"
    text = f'extern "C" __global__ void f(int* a) {{ {body} }}'
    _, _, binary = compile_by_nvrtc(nvrtc, text, ["--gpu-architecture=sm_90", *OPTIONS])
    assert 360 <= read_local_bytes(binary)["f"] < 400


def read_local_bytes(binary: bytes) -> dict[str, int]:
    """Return the bytes of local memory per thread of each kernel in a compiled module (64-bit ELF)."""
    (table,), (count,) = struct.unpack_from("<Q", binary, 40), struct.unpack_from("<H", binary, 60)
    headers = [struct.unpack_from("<4xI16xQQI", binary, table + 64 * n) for n in range(count)]
    parts = [binary[offset : offset + size] for _, offset, size, _ in headers]
    symbols = next(n for n, header in enumerate(headers) if header[0] == 2)  # The type 2 is SHT_SYMTAB.
    names, found = parts[headers[symbols][3]], {}
    for info in (part for part, header in zip(parts, headers, strict=True) if header[0] == 0x70000000):
        at = 0
        # Each entry has a form, an attribute, and a value of 2 bytes or the length of the data after it.
        while at < len(info):
            form, attribute, length = struct.unpack_from("<BBH", info, at)
            if (form, attribute) == (4, 0x12):  # EIATTR_MIN_STACK_SIZE has a symbol and a size.
                symbol, stack = struct.unpack_from("<II", info, at + 4)
                (name,) = struct.unpack_from("<I", parts[symbols], 24 * symbol)
                found[names[name : names.index(b"\0", name)].decode()] = stack
            at += 4 + (length if form == 4 else 0)
    return found


def test_nvrtc_reports_an_error_in_the_file(nvrtc, cuda_text):
    broken = cuda_text.replace("lambda0 = fma(", "lambda0 = fam(", 1)
    assert broken != cuda_text
    status, log, _ = compile_by_nvrtc(nvrtc, broken, ["--gpu-architecture=sm_90", *OPTIONS])
    assert status != 0
    assert "fam" in log


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_thread_spills_registers(cuda_text, kernels, architecture, tmp_path):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc here")
    source = tmp_path / "gpu.cu"
    source.write_text(cuda_text, encoding="utf-8")
    command = [
        nvcc,
        "-std=c++17",
        f"-arch={architecture}",
        "-cubin",
        "-Xptxas",
        "-v",
        "-o",
        str(tmp_path / "gpu.cubin"),
        str(source),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    entry = r"entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill.*?Used (\d+) registers"
    report = {name: tuple(map(int, facts)) for name, *facts in re.findall(entry, done.stderr, re.DOTALL)}
    assert set(report) == set(kernels)
    for name, (frame, spilled, registers) in report.items():
        if name.startswith(("capsule_factors_f64", "capsule_dense_f64")):
            continue  # A fit uses float32; only checks use these kernels.
        # A kernel with 64 registers per thread runs 1,024 threads on a multiprocessor, enough to hide the
        # time of loads.
        assert (frame, spilled, registers <= 64) == (0, 0, True), name
