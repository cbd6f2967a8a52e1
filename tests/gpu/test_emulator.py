"""The emulator detects faults in the kernels of this file; sanitizers find none in those of the models."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).resolve().parent
# For each file of tests, a pytest expression (-k) for tests that together launch all kernels of its model.
TESTS = {
    "test_emulated": "d13 or unequal-float32 or probabilities",
    "test_crbm": "17-5 and (cluster-forward or kept and (sum or max)) or 9-40 or pairs[forward",
    "test_hcn": "emulated and shape2 or emulated and shape3 or orders",
    "test_linear_mixture_emulated": "scan or statistics or distance",
    "test_mbn_emulated": "dense_rows or sparse_rows or codes",
}
# Each of these kernels contains a macro, a word in capitals. With one definition of the macro the kernel is
# correct, with the other it has a fault.
KERNELS = """
extern "C" __global__ void __launch_bounds__(THREADS) race(int* out) {
    __shared__ int values[64];
    const int t = threadIdx.x;
    values[t] = t;
    BARRIER;
    out[t] = values[(t + 63) % 64];
}
extern "C" __global__ void __launch_bounds__(THREADS) lanes(int* out) {
    __shared__ int values[64];
    const int t = threadIdx.x;
    if (t >= 32) return;
    values[t] = t;
    WARP_BARRIER;
    out[t] = values[t ^ 1];
}
extern "C" __global__ void __launch_bounds__(THREADS) blocks(int* out) {
    if (threadIdx.x) return;
    out[blockIdx.x] = blockIdx.x && READS_OTHERS ? out[blockIdx.x - 1] + 1 : blockIdx.x;
}
template <class T>
__device__ __forceinline__ T shared_one() {
    __shared__ T value;
    if (blockIdx.x == 0 || EVERY_BLOCK) value = 1;
    __syncthreads();
    return value;
}
extern "C" __global__ void __launch_bounds__(THREADS) unwritten(float* a, double* b, int* c) {
    __shared__ int value;
    if (blockIdx.x == 0 || EVERY_BLOCK) value = 1;
    a[blockIdx.x] = shared_one<float>(), b[blockIdx.x] = shared_one<double>(), c[blockIdx.x] = value;
}
"""
SOUND = """
#define BARRIER __syncthreads()
#define WARP_BARRIER __syncwarp()
#define READS_OTHERS false
#define EVERY_BLOCK true
"""
FAULTY = """
#define BARRIER
#define WARP_BARRIER (void)0
#define READS_OTHERS true
#define EVERY_BLOCK false
"""


@pytest.fixture(scope="session")
def emulation(load_helper):
    emulation = load_helper("emulation")
    if emulation.compiler() is None or not sys.platform.startswith("linux"):
        pytest.skip("the CUDA text on a processor needs a C++ compiler and Linux")
    return emulation


def run(kernels, name: str, blocks: int, turns: str, *dtypes: str) -> list[list[float]]:
    """Launch a kernel on zeros, 64 numbers of each dtype, and return the arrays as lists."""
    kernels.turns = turns
    out = [np.zeros(64, dtype=dtype) for dtype in dtypes]
    kernels.launch(name, (blocks,), (64,), tuple(out))
    return [a.tolist() for a in out]


def test_an_order_of_turns_reveals_a_race(emulation, tmp_path_factory):
    for words in (SOUND, FAULTY):
        kernels = emulation.Emulated(words + KERNELS, tmp_path_factory.mktemp("emulator"))
        for name, blocks in (("race", 1), ("lanes", 1), ("blocks", 64)):
            found = [run(kernels, name, blocks, turns, "i4") for turns in emulation.TURNS]
            assert all(a == found[0] for a in found) == (words is SOUND), name


def test_shared_memory_of_another_block_is_not_visible(emulation, tmp_path_factory):
    for words, others in ((SOUND, [1.0, 1.0, 1]), (FAULTY, [np.nan, np.nan, -1])):
        kernels = emulation.Emulated(words + KERNELS, tmp_path_factory.mktemp("emulator"))
        found = run(kernels, "unwritten", 3, "forward", "f4", "f8", "i4")
        np.testing.assert_array_equal([a[:3] for a in found], [[1, other, other] for other in others])


# CUDA statements with a fault, by the name of the fault in the report of a sanitizer.
FAULTS = {
    "heap-buffer-overflow": "out[threadIdx.x + 1] = 0.0f",
    "insufficient space": "__shared__ float a[2]; out[0] = *(a + (threadIdx.x + gridDim.x))",
    "out of bounds": "float a[2] = {1, 2}; out[0] = a[gridDim.x + threadIdx.x]",
    "signed integer overflow": "out[0] = (static_cast<int>(threadIdx.x) + 1) * 0x7fffffff",
    "misaligned address": "out[0] = reinterpret_cast<double2*>(out + threadIdx.x)->x",
    "no fault": "out[threadIdx.x] = 0.0f",
}
LAUNCH_PROGRAM = f"""
import sys, pathlib
sys.path.insert(0, {str(HERE)!r})
import numpy as np
import emulation
out = np.zeros(64, dtype="f4")
emulation.Emulated(sys.argv[1], pathlib.Path(sys.argv[2])).launch("f", (1,), (64,), (out,))
print("no fault")
"""


@pytest.fixture(scope="session")
def sanitized(emulation):
    """Return a function that runs Python with arguments in a process that can load sanitized kernels."""
    more = emulation.sanitized_environment()
    if more is None:
        pytest.skip("the compiler has no sanitizers")
    environment = os.environ | more | {"PYTHONPATH": str(HERE.parents[1]), "PYTEST_ADDOPTS": ""}

    def python(*arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, *arguments]
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=170,
            check=False,
            env=environment,
            cwd=HERE.parents[1],
        )

    return python


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_sanitizers_detect_a_fault(sanitized, tmp_path, fault):
    text = f'extern "C" __global__ void __launch_bounds__(THREADS) f(float* out) {{ {FAULTS[fault]}; }}'
    done = sanitized("-c", LAUNCH_PROGRAM, text, str(tmp_path))
    assert fault in done.stdout + done.stderr
    assert (done.returncode == 0) == (fault == "no fault")


@pytest.mark.slow
@pytest.mark.parametrize("file", TESTS)
def test_sanitizers_find_nothing_in_the_kernels(sanitized, file, tmp_path):
    options = ("-n", "0", "-p", "no:cacheprovider", "-m", "not slow and not gpu", "--basetemp", str(tmp_path))
    done = sanitized("-m", "pytest", *options, "-k", TESTS[file], str(HERE / f"{file}.py"))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
