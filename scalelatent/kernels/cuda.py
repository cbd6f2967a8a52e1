"""Launches of a model's CUDA kernels, which are compiled at the first launch, and matrix products of cuBLAS.

CuPy is only imported inside functions, so that machines without CuPy can import this module.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, finalize

import numpy as np

if TYPE_CHECKING:
    from types import ModuleType

    import cupy

_OPTIONS = ("--std=c++17",)
# CUDA's upper bound on the second size of a grid. Kernels that use blockIdx.y loop in steps of gridDim.y.
MAX_GRID_Y = 65_535


def has_cuda(package: str) -> bool:
    """Return True if a package has a file ``gpu.cu`` with CUDA kernels."""
    return (files(package) / "gpu.cu").is_file()


class Kernels:
    """CUDA kernels of the file ``gpu.cu`` in a package."""

    def __init__(self, package: str, threads: int = 128) -> None:
        self._package, self.threads = package, threads
        self._functions: dict[str, cupy.RawKernel] = {}
        # (kernel, device) for which more than 48 KiB of shared memory are allowed. `_functions` needs no
        # device in its key, because CuPy loads a function again for each device that launches the
        # function.
        self._with_more_memory: set[tuple[str, int]] = set()

    @cached_property
    def text(self) -> str:
        """CUDA source code of the kernels, the text of ``gpu.cu``."""
        return (files(self._package) / "gpu.cu").read_text(encoding="utf-8")

    @cached_property
    def _module(self) -> cupy.RawModule:
        import cupy

        # CuPy compiles the module once per process and GPU, and stores the binary on disk for later
        # processes.
        return cupy.RawModule(code=self.text, options=_OPTIONS)

    def compile(self) -> None:
        """Compile the text for the current device, unless CuPy's cache on disk contains it."""
        self._module.compile()

    def launch(self, name: str, grid: tuple[int, ...], *arguments: object, shared_bytes: int = 0) -> None:
        """Launch a kernel on CuPy's current stream, in blocks of ``threads`` threads."""
        function = self._functions.get(name)
        if function is None:
            function = self._functions[name] = self._module.get_function(name)
        if shared_bytes and (name, current_device()) not in self._with_more_memory:
            _allow_more_shared_memory(function)
            self._with_more_memory.add((name, current_device()))
        grid = (grid[0], *(min(size, MAX_GRID_Y) for size in grid[1:]))
        function(grid, (self.threads,), arguments, shared_mem=shared_bytes)


def current_device() -> int:
    """Return the number of the GPU that the calling thread uses."""
    import cupy

    return int(cupy.cuda.runtime.getDevice())


_handles: WeakKeyDictionary[cupy.cuda.Stream, int] = WeakKeyDictionary()


def cublas_handle() -> int:
    """Return the cuBLAS handle of the current stream, which is created at its first use.

    The handle is destroyed with the stream. CuPy keeps a handle per thread instead, but the engine's threads
    end with each pass.
    """
    import cupy
    from cupy_backends.cuda.libs import cublas

    stream = cupy.cuda.get_current_stream()
    if stream not in _handles:
        _handles[stream] = cublas.create()
        finalize(stream, _destroy, cublas, _handles[stream])
    return _handles[stream]


def _destroy(cublas: ModuleType, handle: int) -> None:
    with suppress(cublas.CUBLASError):  # the GPU may have crashed
        cublas.destroy(handle)


def _allow_more_shared_memory(function: cupy.RawKernel) -> None:
    """Allow a kernel all shared memory of a thread block.

    By default, the shared memory that the kernel declares and that a launch adds is limited to 48 KiB.
    """
    import cupy

    most = cupy.cuda.runtime.getDeviceProperties(current_device())["sharedMemPerBlockOptin"]
    function.max_dynamic_shared_size_bytes = most - function.shared_size_bytes
    function.preferred_shared_memory_carveout = (
        100  # percent, so that several thread blocks run at the same time if they fit
    )


def download(a: cupy.ndarray) -> np.ndarray:
    """Return a contiguous GPU array as a numpy array in page-locked memory, to which GPUs copy faster.

    CuPy keeps page-locked memory for the next copy. If no such memory is available, use ordinary memory.
    """
    import cupy

    try:
        memory = cupy.cuda.alloc_pinned_memory(a.nbytes)
    except cupy.cuda.runtime.CUDARuntimeError:
        return a.get()
    return a.get(out=np.ndarray(a.shape, a.dtype, buffer=memory))


def multiply(a: cupy.ndarray, b: cupy.ndarray, out: cupy.ndarray, tf32: bool = False) -> None:
    """Write the matrix product a b to ``out``, which is C-contiguous; all float32, or all float64.

    TF32 is used only with ``tf32``; CuPy's own products follow the environment variable CUPY_TF32. CuPy also
    copies an operand that is the first columns of a wider array, which cuBLAS reads without a copy.
    """
    import cupy
    from cupy_backends.cuda.libs import cublas

    if not a.shape[1]:
        out.fill(0)
    if not a.shape[1] or not out.size:
        return
    a, b = (m if matrix_layout(m.shape, m.strides, m.itemsize) else cupy.ascontiguousarray(m) for m in (a, b))
    call = gemm_call(a, b, out)
    double = out.dtype == np.float64
    kind = 1 if double else 0  # CUDA_R_64F, CUDA_R_32F
    single = cublas.CUBLAS_COMPUTE_32F_FAST_TF32 if tf32 else cublas.CUBLAS_COMPUTE_32F
    compute = cublas.CUBLAS_COMPUTE_64F if double else single
    one, zero = np.ones((), out.dtype), np.zeros((), out.dtype)
    left, right = (b.data.ptr, kind, call[5]), (a.data.ptr, kind, call[6])
    result = (out.data.ptr, kind, call[7], compute, cublas.CUBLAS_GEMM_DEFAULT)
    cublas.gemmEx(cublas_handle(), *call[:5], one.ctypes.data, *left, *right, zero.ctypes.data, *result)


def matrix_layout(shape: tuple[int, int], strides: tuple[int, int], itemsize: int) -> tuple[bool, int] | None:
    """Return (rows are contiguous, leading dimension) of a matrix, or None if BLAS needs a copy of it."""
    (rows, cols), (down, across) = shape, (s // itemsize for s in strides)
    if across == 1 and down >= cols:
        return True, down
    if down == 1 and across >= rows:
        return False, across
    return None


def gemm_call(a: Any, b: Any, out: Any) -> tuple[int, int, int, int, int, int, int, int]:
    """Return the arguments of a column-major BLAS for out = a b.

    They are the operations on b and on a (1 transposes), the columns and rows of out, the inner length, and
    the leading dimensions of b, a and out.
    """
    # out is C-contiguous, so BLAS computes its transpose, out^T = b^T a^T.
    (a_rows, lda), (b_rows, ldb) = (matrix_layout(m.shape, m.strides, m.itemsize) for m in (a, b))  # type: ignore[misc]
    return int(not b_rows), int(not a_rows), b.shape[1], a.shape[0], a.shape[1], ldb, lda, b.shape[1]
