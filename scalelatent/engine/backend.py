"""The backend table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from scalelatent.contract.kinds import find_kernels, kernel_names, load
from scalelatent.contract.learners import Backend, Table
from scalelatent.contract.parameters import DEVICES
from scalelatent.errors import RunError
from scalelatent.kernels.cuda import multiply
from scalelatent.kernels.vectors import aligned

if TYPE_CHECKING:
    from types import ModuleType

    import cupy
    import numpy.typing as npt

    from scalelatent.kernels.arrays import Array


class DeviceMemoryError(RunError):
    """The memory of a card has ended: naming the card, what was wanted, and what to set."""


@cache
def find_kernel(name: str, backend: str) -> Callable[..., Any]:
    """The body of a kernel for a backend."""
    bodies = find_kernels(name)
    if bodies is None or backend not in bodies:
        there = kernel_names() if bodies is None else sorted(bodies)
        raise RunError(f"kernel {name!r} has no body for backend {backend!r}; there are: {', '.join(there)}")
    return load(bodies[backend])


class HostBackend:
    """numpy arrays, and numba kernels or (``name="reference"``) the reference kernels in float64."""

    # Buffers are kept by name and used again, since fresh pages for each block cost more than the kernel on
    # them. So an instance belongs to one thread.

    xp: ModuleType = np
    # What means that a card's memory has ended, see :mod:`.halving`: nothing does here.
    memory_errors: tuple[type[Exception], ...] = ()
    device = "cpu"

    def __init__(self, name: str = "numba") -> None:
        self.name = name
        self.row_limits: dict[str, int] = {}
        self._buffers: dict[str, np.ndarray] = {}

    def kernel(self, name: str) -> Callable[..., Any]:
        return find_kernel(name, self.name)

    def buffer(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> np.ndarray:
        size = math.prod(shape)
        kept = self._buffers.get(name)
        if kept is None or kept.size < size or kept.dtype != dtype:
            kept = self._buffers[name] = aligned((size,), dtype)
        return kept[:size].reshape(shape)

    def asarray(self, a: np.ndarray, dtype: npt.DTypeLike, name: str | None = None) -> np.ndarray:
        dtype = np.dtype(np.float64) if self.name == "reference" else np.dtype(dtype)
        if a.dtype == dtype and a.flags.c_contiguous:
            return a
        if name is None:
            return np.ascontiguousarray(a, dtype=dtype)
        out = self.buffer(name, a.shape, dtype)
        np.copyto(out, a, casting="unsafe")
        return out

    def take(self, a: np.ndarray, rows: np.ndarray, name: str) -> np.ndarray:
        out = self.buffer(name, (len(rows), *a.shape[1:]), a.dtype)
        return np.take(a, rows, axis=0, out=out, mode="clip")

    def matmul(self, a: np.ndarray, b: np.ndarray, name: str) -> np.ndarray:
        return np.matmul(a, b, out=self.buffer(name, (a.shape[0], b.shape[1]), a.dtype))

    def table(self, table: Table) -> Table:
        return table

    def to_host(self, a: np.ndarray) -> np.ndarray:
        return a

    def release_memory(self) -> None:
        """Nothing: there is enough."""

    def memory_error(self, error: Exception) -> Exception:
        return error


def gpu_count() -> int:
    """CUDA devices that CuPy can use here; 0 without CuPy or driver."""
    try:
        import cupy

        return int(cupy.cuda.runtime.getDeviceCount())
    except Exception:  # noqa: BLE001  no CuPy, no driver, no device: all mean 0 here
        return 0


def resolve_device(device: str) -> str:
    """``"cpu"`` or ``"gpu"`` for this process."""
    if device not in DEVICES:
        raise ValueError(f"device={device!r} is not one of {', '.join(DEVICES)}")
    if device == "auto":
        return "gpu" if gpu_count() else "cpu"
    if device == "gpu" and not gpu_count():
        raise RunError(
            "device='gpu', but CuPy finds no CUDA device here: install an extra (scalelatent[cuda12] or "
            "[cuda13]) on a machine with a GPU, or use device='cpu'"
        )
    return device


def make_backend(device: str) -> Backend:
    """A backend of this process for ``"cpu"``, ``"gpu"`` or ``"reference"``; one for each thread."""
    if device == "reference":
        return HostBackend("reference")
    if resolve_device(device) == "gpu":
        return CupyBackend()
    return HostBackend()


STAGED_BYTES = 2**16  # smaller copies are not worth page-locked memory
_NO_MEMORY = 2  # cudaErrorMemoryAllocation: the card goes on, only this did not fit
POOL_SHARE, POOL_SPARE = 0.9, 512 * 2**20
_NATIVE = "?bhilqBHILQefd"


class CupyBackend:
    """CuPy arrays and CUDA kernels; the methods of :class:`~.backend.HostBackend`."""

    # Everything runs on the instance's own non-blocking stream, the calling thread's current one from its
    # first method on; to_host waits for it. cuBLAS keeps a handle a thread, so one thread's products give the
    # same bits whatever the others do. The pool of the process is limited to 90 % of the memory that was free
    # less 512 MiB, unless CUPY_GPU_MEMORY_LIMIT or the caller has set a limit.

    name = "cupy"

    def __init__(self, tf32: bool = False) -> None:
        self.xp = _import_cupy()
        self.tf32 = tf32
        self.stream = self.xp.cuda.Stream(non_blocking=True)
        self.device = _device_name(self.xp)  # asked now: after an error the card may not answer
        self._buffers: dict[str, cupy.ndarray] = {}
        self._staging: dict[str, tuple[np.ndarray, cupy.cuda.Event]] = {}
        self._tables: dict[int, tuple[Any, Any]] = {}
        self._rows = 0
        self.row_limits: dict[str, int] = {}
        self.memory_errors: tuple[type[Exception], ...] = (
            DeviceMemoryError,
            self.xp.cuda.memory.OutOfMemoryError,
        )
        _limit_pool(self.xp)

    # -- what the models call
    # -------------------------------------------------------------------------------------------

    def kernel(self, name: str) -> Callable[..., Any]:
        """The kernel's CuPy body, on this backend's stream and with this backend's errors."""
        body = find_kernel(name, self.name)

        def call(*args: Any) -> Any:
            with self._work(f"the kernel {name}"):
                return body(*args)

        return call

    def buffer(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> cupy.ndarray:
        size = int(np.prod(shape))
        kept = self._buffers.get(name)
        if kept is None or kept.size < size or kept.dtype != dtype:
            with self._work(f"the buffer {name!r} of {size * np.dtype(dtype).itemsize / 2**20:.1f} MiB"):
                self._buffers.pop(name, None)
                del kept  # its memory may serve the new one
                kept = self._buffers[name] = self.xp.empty(size, dtype=dtype)
        return kept[:size].reshape(shape)

    def asarray(self, a: Array, dtype: npt.DTypeLike, name: str | None = None) -> cupy.ndarray:
        dtype = np.dtype(dtype)
        with self._work("moving an array to the card"):
            if isinstance(a, self.xp.ndarray):
                return self._convert(a, dtype, name)
            if name is None:
                return self.xp.asarray(np.ascontiguousarray(a, dtype=dtype))
            self._rows = len(a)
            moved = (
                a.dtype
                if a.dtype.char in _NATIVE and a.dtype.isnative and a.dtype.itemsize <= dtype.itemsize
                else dtype
            )
            if moved == dtype:
                return self._upload(a, dtype, name, self.buffer(name, a.shape, dtype))
            stored = self._upload(a, moved, name, self.buffer(f"{name}.stored", a.shape, moved))
            return self._convert(stored, dtype, name)

    def take(self, a: cupy.ndarray, rows: Array, name: str) -> cupy.ndarray:
        """Rows of ``a`` in a named buffer; ``rows`` on the host or on the device."""
        out = self.buffer(name, (len(rows), *a.shape[1:]), a.dtype)
        if out.size:
            with self._work("gathering rows"):
                self.xp.take(a, self.xp.asarray(rows), axis=0, out=out)
        return out

    def matmul(self, a: cupy.ndarray, b: cupy.ndarray, name: str) -> cupy.ndarray:
        """Matrix product in a named buffer; float32 or float64."""
        out = self.buffer(name, (a.shape[0], b.shape[1]), a.dtype)
        with self._work("a matrix product"):
            multiply(a, b, out, self.tf32)
        return out

    def table(self, table: Table) -> Table:
        """A table with its arrays on the device; kept, so that a table is moved once."""
        kept = self._tables.get(id(table))
        if kept is None:
            if len(self._tables) >= 64:
                self._tables.clear()
            arrays = {f.name: getattr(table, f.name) for f in fields(table)} if is_dataclass(table) else {}
            with self._work("moving a table to the card"):
                moved = {key: self.xp.asarray(a) for key, a in arrays.items() if isinstance(a, np.ndarray)}
            # The table itself is kept too: its id stays taken.
            kept = self._tables[id(table)] = table, replace(cast(Any, table), **moved) if moved else table
        found: Table = kept[1]
        return found

    def to_host(self, a: Array) -> np.ndarray:
        if isinstance(a, np.ndarray):
            return a
        with self._work("work on the card"):
            host = a.get()
            self.stream.synchronize()
        return host

    def release_memory(self) -> None:
        self._buffers.clear()
        self.stream.synchronize()
        self.xp.get_default_memory_pool().free_all_blocks()

    def memory_error(self, error: Exception) -> Exception:
        """In our words: memory that ended in an expression of a model's own."""
        return (
            error
            if isinstance(error, DeviceMemoryError)
            else DeviceMemoryError(self._memory_message("a block"))
        )

    # -- how -------------------------------------------------------------------------------------------------

    def _convert(self, a: cupy.ndarray, dtype: np.dtype, name: str | None) -> cupy.ndarray:
        if a.dtype == dtype and a.flags.c_contiguous:
            return a
        if name is None:
            return self.xp.ascontiguousarray(a.astype(dtype))
        out = self.buffer(name, a.shape, dtype)
        out[...] = a
        return out

    def _upload(self, a: np.ndarray, dtype: np.dtype, name: str, out: cupy.ndarray) -> cupy.ndarray:
        """Copy a host array, converted to ``dtype``, to ``out`` on the device."""
        if not out.size:
            return out
        if out.nbytes < STAGED_BYTES:
            out.set(np.ascontiguousarray(a, dtype=dtype))
            return out
        pinned, done = self._pinned(name, out.nbytes)
        view = pinned[: out.nbytes].view(dtype).reshape(a.shape)
        np.copyto(view, a, casting="unsafe")
        out.data.copy_from_host_async(view.ctypes.data, out.nbytes, self.stream)
        done.record(self.stream)
        return out

    def _pinned(self, name: str, nbytes: int) -> tuple[np.ndarray, cupy.cuda.Event]:
        """Page-locked bytes that no copy reads any more, and the event that tells so."""
        kept = self._staging.get(name)
        if kept is not None:
            kept[1].synchronize()
        if kept is None or kept[0].nbytes < nbytes:
            memory = self.xp.cuda.alloc_pinned_memory(nbytes)
            event = self.xp.cuda.Event(disable_timing=True)
            kept = self._staging[name] = np.ndarray((nbytes,), np.uint8, buffer=memory), event
        return kept

    @contextmanager
    def _work(self, what: str) -> Iterator[None]:
        """The stream is the thread's current one; errors of the card are named."""
        cuda = self.xp.cuda
        self.stream.use()
        try:
            yield
        except cuda.memory.OutOfMemoryError as error:
            raise DeviceMemoryError(self._memory_message(what)) from error
        except (cuda.runtime.CUDARuntimeError, cuda.driver.CUDADriverError) as error:
            if getattr(error, "status", None) == _NO_MEMORY:
                raise DeviceMemoryError(self._memory_message(what)) from error
            raise RunError(
                f"GPU {self.device}: {what} failed: {error}. After such an error the card's state in this "
                "process is lost: start the worker again and resume; if it comes back, use device='cpu' and "
                "report it"
            ) from error
        except cuda.compiler.CompileException as error:
            raise RunError(
                f"GPU {self.device}: the CUDA text of {what} does not compile here: {error}. Install a CuPy "
                "whose CUDA knows this card (extras cuda12, cuda13), or use device='cpu'"
            ) from error

    def _memory_message(self, what: str) -> str:
        pool = self.xp.get_default_memory_pool()
        free, total = self.xp.cuda.runtime.memGetInfo()
        gib = 2.0**30
        now = (
            f"GPU {self.device}: no memory for {what}: this process holds {pool.used_bytes() / gib:.2f} GiB "
            f"of its limit of {pool.get_limit() / gib:.2f}, and {free / gib:.2f} of the card's "
            f"{total / gib:.2f} GiB are free"
        )
        # A run's block_rows and model are fixed; where it computes is not.
        now += (
            ". End other work on this card, or use device='cpu' ([cluster] device), then resume the run; or "
        )
        if self._rows >= 512:
            smaller = 2 ** (self._rows.bit_length() - 2)
            return (
                f"{now}start again in another folder with [engine] block_rows = {smaller} (blocks have "
                f"{self._rows} rows)"
            )
        return (
            f"{now}start again in another folder with fewer or smaller capsules (blocks are small already: "
            f"{self._rows} rows)"
        )


def _import_cupy() -> ModuleType:
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
    except ImportError as error:
        raise RunError(
            f"the GPU backend needs CuPy, which cannot be imported here ({error}): install the extra "
            "scalelatent[cuda12] or [cuda13] that fits the driver, or use device='cpu'"
        ) from error
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise RunError(
            f"CuPy finds no CUDA device here ({error}): check nvidia-smi and CUDA_VISIBLE_DEVICES, or use "
            "device='cpu'"
        ) from error
    if not count:
        raise RunError(
            "CuPy finds no CUDA device here: check nvidia-smi and CUDA_VISIBLE_DEVICES, or use device='cpu'"
        )
    return cupy


def _limit_pool(cupy: ModuleType) -> None:
    pool = cupy.get_default_memory_pool()
    if not pool.get_limit():
        free, _ = cupy.cuda.runtime.memGetInfo()
        pool.set_limit(size=max(int(POOL_SHARE * (free + pool.total_bytes())) - POOL_SPARE, 2**20))


def _device_name(cupy: ModuleType) -> str:
    number = cupy.cuda.runtime.getDevice()
    name = cupy.cuda.runtime.getDeviceProperties(number)["name"]
    return f"{number} ({name.decode() if isinstance(name, bytes) else name})"
