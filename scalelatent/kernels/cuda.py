"""A model's CUDA text, compiled at its first launch.

CuPy is imported by that launch: this module, and the text, can be had without it.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property
from importlib.resources import files
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, finalize

if TYPE_CHECKING:
    from types import ModuleType

    import cupy

_OPTIONS = ("--std=c++17",)


def has_cuda(package: str) -> bool:
    """Whether a package has a ``gpu.cu``."""
    return (files(package) / "gpu.cu").is_file()


class Kernels:
    """The kernels of ``gpu.cu`` in a package."""

    def __init__(self, package: str, threads: int = 128) -> None:
        self._package, self.threads = package, threads
        self._functions: dict[str, cupy.RawKernel] = {}
        self._roomy: set[str] = set()

    @cached_property
    def text(self) -> str:
        """The text of ``gpu.cu``."""
        return (files(self._package) / "gpu.cu").read_text(encoding="utf-8")

    @cached_property
    def _module(self) -> cupy.RawModule:
        import cupy

        # Compiled once a process and device; CuPy keeps the binary on disk for the next process.
        return cupy.RawModule(code=self.text, options=_OPTIONS)

    def compile(self) -> None:
        """Compile the text for the current device, unless CuPy's folder of compiled kernels has it."""
        self._module.compile()

    def launch(self, name: str, grid: tuple[int, ...], *arguments: object, shared_bytes: int = 0) -> None:
        """Start a kernel on CuPy's current stream, in blocks of ``threads`` threads."""
        function = self._functions.get(name)
        if function is None:
            function = self._functions[name] = self._module.get_function(name)
        if shared_bytes and name not in self._roomy:
            _give_room(function)
            self._roomy.add(name)
        function(grid, (self.threads,), arguments, shared_mem=shared_bytes)


_handles: WeakKeyDictionary[cupy.cuda.Stream, int] = WeakKeyDictionary()


def cublas_handle() -> int:
    """Return the cuBLAS handle of the current stream, which is made at its first use and ends with it.

    CuPy keeps one for each thread, and the engine's threads end with each pass.
    """
    import cupy
    from cupy_backends.cuda.libs import cublas

    stream = cupy.cuda.get_current_stream()
    if stream not in _handles:
        _handles[stream] = cublas.create()
        finalize(stream, _destroy, cublas, _handles[stream])
    return _handles[stream]


def _destroy(cublas: ModuleType, handle: int) -> None:
    with suppress(cublas.CUBLASError):  # after a crash of the card
        cublas.destroy(handle)


def _give_room(function: cupy.RawKernel) -> None:
    """Let a kernel have all the shared memory that a thread block can have: unless it says so, what it
    declares and what a launch gives it are 48 KiB together.
    """
    import cupy

    runtime = cupy.cuda.runtime
    most = runtime.getDeviceProperties(runtime.getDevice())["sharedMemPerBlockOptin"]
    function.max_dynamic_shared_size_bytes = most - function.shared_size_bytes
    function.preferred_shared_memory_carveout = 100  # percent: blocks beside each other, if they fit
