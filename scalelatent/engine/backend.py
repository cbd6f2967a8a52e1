"""Backends: array library, kernels and buffers of one thread, on the CPU (numpy) or on a GPU (CuPy)."""

from __future__ import annotations

import logging
import math
import sys
import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakSet

import numpy as np

from scalelatent.contract.kinds import find_kernels, import_object, list_kernels
from scalelatent.contract.learners import Backend, Block, Table
from scalelatent.contract.parameters import DEVICES
from scalelatent.errors import DeviceLostError, DeviceMemoryError, RunError
from scalelatent.kernels.arrays import aligned_empty, check_same_width
from scalelatent.kernels.cuda import multiply

from .cache import PieceCache

if TYPE_CHECKING:
    from types import ModuleType

    import cupy
    import numpy.typing as npt

    from scalelatent.kernels.arrays import Array

_log = logging.getLogger(__name__)
_GIB = 2.0**30


@cache
def find_kernel(name: str, backend: str) -> Callable[..., Any]:
    """Return the function that computes the kernel ``name`` on a backend ("numba", "cupy", "reference")."""
    bodies = find_kernels(name)
    if bodies is None or backend not in bodies:
        known = list_kernels() if bodies is None else sorted(bodies)
        raise RunError(f"kernel {name!r} has no body for backend {backend!r}; there are: {', '.join(known)}")
    return import_object(bodies[backend])


class HostBackend:
    """numpy arrays, and numba kernels or (``name="reference"``) the reference kernels in float64.

    Buffers are reused by name, because new memory pages for each block cost more than the kernel that fills
    them. Each instance therefore belongs to one thread.
    """

    xp: ModuleType = np
    gpu_errors: tuple[type[Exception], ...] = ()  # empty, because only GPU libraries have such errors
    device = "cpu"

    def __init__(self, name: str = "numba") -> None:
        self.name = name
        self.row_limits: dict[str, int] = {}  # stays empty, because only GPUs halve blocks
        self._buffers: dict[str, np.ndarray] = {}

    def kernel(self, name: str) -> Callable[..., Any]:
        return find_kernel(name, self.name)

    def buffer(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> np.ndarray:
        size = math.prod(shape)
        kept = self._buffers.get(name)
        if kept is None or kept.size < size or kept.dtype != dtype:
            kept = self._buffers[name] = aligned_empty((size,), dtype)
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
        check_same_width(a.shape[1], b.shape[0])
        return np.matmul(a, b, out=self.buffer(name, (a.shape[0], b.shape[1]), a.dtype))

    def copy_table(self, table: Table) -> Table:
        return table

    def to_host(self, a: np.ndarray) -> np.ndarray:
        return a

    def release_memory(self) -> None:
        """Do nothing, because the buffers of the CPU are small."""

    def name_error(self, error: Exception) -> Exception:
        return error


def gpu_count() -> int:
    """Return the number of CUDA devices that CuPy can use; 0 without CuPy or driver."""
    try:
        import cupy

        return int(cupy.cuda.runtime.getDeviceCount())
    except Exception:  # noqa: BLE001  CuPy, driver or device is missing
        return 0


def resolve_device(device: str) -> str:
    """Return ``"cpu"`` or ``"gpu"``: where this process computes if ``device`` is requested."""
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


def computes_on_gpu(device: str) -> bool:
    """Return True if a backend of this process for ``device`` computes on a GPU."""
    return device not in ("cpu", "reference") and resolve_device(device) == "gpu"


def check_gpu(device_id: int = 0) -> str:
    """Return the reason why a GPU cannot multiply matrices or run a kernel; "" if the GPU can do both."""
    try:
        backend = CupyBackend(device_id=device_id)
        a = backend.asarray(np.array([[1, 2], [3, 4]]), np.float32)
        found = backend.to_host(backend.xp.maximum(backend.matmul(a, a, "product"), 8))
    except Exception as error:  # noqa: BLE001  libraries and drivers may raise anything
        return f"{type(error).__name__}: {error}" if not isinstance(error, RunError) else str(error)
    is_right = found.tolist() == [[8, 10], [15, 22]]
    return "" if is_right else f"GPU {backend.device}: a product is {found.tolist()}"


@dataclass(frozen=True)
class GpuMemory:
    """Memory of one GPU in bytes, and its upper bounds in this process."""

    total: int
    free: int
    limit: int  # memory that CuPy's pool may use
    uses_rmm: bool  # RMM allocates the memory of CuPy, and CuPy's limit has no effect

    @property
    def row_limit(self) -> int:
        """Bytes of rows that all backends of this GPU may keep between passes."""
        return int(ROWS_SHARE * self.limit)

    def describe(self) -> str:
        """Return the free memory, the limit and the share of rows as text."""
        owner = "which RMM allocates" if self.uses_rmm else "CuPy's limit, see CUPY_GPU_MEMORY_LIMIT"
        return (
            f"{self.free / _GIB:.1f} of {self.total / _GIB:.1f} GiB free, {self.limit / _GIB:.1f} GiB for "
            f"fits ({owner}), {self.row_limit / _GIB:.1f} GiB of these for rows"
        )


def read_gpu_memory(device_id: int = 0) -> GpuMemory:
    """Return the memory of a GPU of this process; raise a RunError without CuPy or GPU."""
    cupy, _ = _import_cupy()
    with cupy.cuda.Device(device_id):
        free, total = cupy.cuda.runtime.memGetInfo()
        return GpuMemory(total, free, _choose_pool_limit(cupy), _uses_rmm(cupy))


def read_used_gpu_memory() -> dict[str, int]:
    """Return the used and total bytes of this process's GPUs, and the bytes of rows kept between passes.

    The result is empty if this process has no backend on a GPU.
    """
    out = {"gpu_used": 0, "gpu_total": 0, "gpu_rows": 0}
    with suppress(RuntimeError):  # the GPU is lost, or another thread makes its backend now
        for device_id, backends in _ON_DEVICE.items():
            if kept := [backend.kept_rows.used for backend in backends]:
                memory = read_gpu_memory(device_id)
                out["gpu_used"] += memory.total - memory.free
                out["gpu_total"] += memory.total
                out["gpu_rows"] += sum(kept)
    return out if out["gpu_total"] else {}


def make_backend(device: str, slot: int = 0) -> Backend:
    """Return a new backend for ``"cpu"``, ``"gpu"`` or ``"reference"``; each thread needs its own.

    ``slot`` is the index of the thread in its process; the threads are distributed evenly over the GPUs.
    """
    if device == "reference":
        return HostBackend("reference")
    if resolve_device(device) == "gpu":
        return CupyBackend(device_id=slot % gpu_count())
    return HostBackend()


@contextmanager
def keep_current_device() -> Iterator[None]:
    """Restore the calling thread's current CUDA device and stream on exit."""
    cupy = sys.modules.get("cupy")
    before = (cupy.cuda.Device(), cupy.cuda.get_current_stream()) if cupy and gpu_count() else None
    try:
        yield
    finally:
        if before is not None:
            for current in before:
                current.use()


# Share of CuPy's memory limit for rows that all backends of a GPU keep between passes.
ROWS_SHARE = 0.4
_ON_DEVICE: dict[int, WeakSet[CupyBackend]] = {}  # backends of this process, by the number of their GPU
# Number of threads of a backend that copy rows to page-locked memory, at 6 GB/s each
# (benchmarks/gpu_model.py), and the smallest number of bytes that is worth a thread.
COPY_THREADS, STRIPE_BYTES = 5, 2**21
STAGED_BYTES = 2**16  # arrays of at least this size are copied to the GPU through page-locked memory
# Codes of cudaErrorMemoryAllocation, and of the two errors of cublasCreate on a GPU without free memory. The
# GPU can still be used after these errors.
_NO_MEMORY, _CUBLAS_NO_MEMORY = 2, (1, 3)
POOL_SHARE, POOL_SPARE = 0.9, 512 * 2**20  # CuPy's pool may use this share of the free memory, minus 512 MiB
_NATIVE = "?bhilqBHILQefd"  # characters of the dtypes that CuPy supports


def _copy_by_threads(target: np.ndarray, source: np.ndarray, pool: Executor) -> None:
    """Copy rows between host arrays; one thread would copy more slowly than the bus to the GPU."""
    stripes = max(1, min(COPY_THREADS, source.nbytes // STRIPE_BYTES, len(source)))
    cuts = [len(source) * i // stripes for i in range(stripes + 1)]
    copies = [pool.submit(np.copyto, target[a:b], source[a:b]) for a, b in pairwise(cuts[1:])]
    np.copyto(target[: cuts[1]], source[: cuts[1]])
    for copied in copies:
        copied.result()


class _AheadCopy:
    """Rows of one block that are copied to the GPU before the computation asks for them."""

    def __init__(self, cupy: ModuleType) -> None:
        self._cupy = cupy
        self._pinned = np.empty(0, np.uint8)  # page-locked memory that the GPU reads during a copy
        self.buffer: Any = None  # memory of rows that the GPU does not keep
        self.source: Any = None  # host array of which ``rows`` is a copy
        self.rows: Any = None
        self.filled, self.used = (cupy.cuda.Event(disable_timing=True) for _ in range(2))

    def fill(
        self, x: np.ndarray, stream: cupy.cuda.Stream, pool: Executor, rows: cupy.ndarray | None = None
    ) -> None:
        """Copy ``x`` to the GPU array ``rows``, or to this object's buffer on the GPU if ``rows`` is None."""
        self.source = self.rows = None
        self.filled.synchronize()
        if self._pinned.nbytes < x.nbytes:
            memory = self._cupy.cuda.alloc_pinned_memory(x.nbytes)
            self._pinned = np.ndarray((x.nbytes,), np.uint8, buffer=memory)
        if rows is None:
            stream.wait_event(self.used)
            if self.buffer is None or self.buffer.nbytes < x.nbytes:
                self.used.synchronize()
                self.buffer = None  # frees its memory for the new buffer
                self.buffer = self._cupy.empty(x.nbytes, np.uint8)
            rows = self.buffer[: x.nbytes].view(x.dtype).reshape(x.shape)
        view = self._pinned[: x.nbytes].view(x.dtype).reshape(x.shape)
        _copy_by_threads(view, x, pool)
        rows.data.copy_from_host_async(view.ctypes.data, x.nbytes, stream)
        self.filled.record(stream)
        self.source, self.rows = x, rows


class CupyBackend:
    """CuPy arrays and CUDA kernels, with the methods of :class:`~.backend.HostBackend`.

    All work runs on the backend's own device and non-blocking stream, except the copies of `copy_ahead`. Each
    method and each use of `xp` makes both current in the calling thread, and `to_host` waits for the stream.
    The stream has its own cuBLAS handle, so work of other threads does not change matrix products.
    """

    name = "cupy"

    def __init__(self, tf32: bool = False, device_id: int = 0) -> None:
        self._cupy, self._cublas = _import_cupy()
        self.tf32 = tf32
        self._device = self._cupy.cuda.Device(device_id)
        self._device.use()
        self.stream = self._cupy.cuda.Stream(non_blocking=True)
        self.device = _device_name(self._cupy)  # read now, because it may be unreadable after an error
        nvtx = self._cupy.cuda.nvtx
        self._nvtx = nvtx if nvtx.available else None  # named ranges, which Nsight Systems shows
        self._buffers: dict[str, cupy.ndarray] = {}
        self._staging: dict[str, tuple[np.ndarray, cupy.cuda.Event]] = {}
        self._tables: dict[int, tuple[Any, Any]] = {}
        self._rows = 0
        self._copy_stream = self._cupy.cuda.Stream(non_blocking=True)
        self._copies = tuple(_AheadCopy(self._cupy) for _ in range(2))
        self._copy_lock = threading.Lock()  # held while a copy is filled or memory is released
        self._copy_owner: object = None
        self.kept_rows, self._has_room = PieceCache(0), True
        _ON_DEVICE.setdefault(device_id, WeakSet()).add(self)
        self.row_limits: dict[str, int] = {}
        # If RMM allocates the memory of CuPy, a lack of memory raises a plain MemoryError.
        runtime, driver = self._cupy.cuda.runtime.CUDARuntimeError, self._cupy.cuda.driver.CUDADriverError
        self.gpu_errors: tuple[type[Exception], ...] = (DeviceMemoryError, MemoryError, runtime, driver)
        self._cupy.get_default_memory_pool().set_limit(size=_choose_pool_limit(self._cupy))

    @property
    def xp(self) -> ModuleType:
        """CuPy, after this backend's device and stream were made current in the calling thread."""
        self._make_current()
        return self._cupy

    # -- methods for models ----------------------------------------------------------------------------------

    def kernel(self, name: str) -> Callable[..., Any]:
        """Return the kernel's CuPy function, which runs on this backend's stream and raises its errors."""
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
                del kept  # frees its memory for the new buffer
                kept = self._buffers[name] = self._cupy.empty(size, dtype=dtype)
        return kept[:size].reshape(shape)

    def asarray(self, a: Array, dtype: npt.DTypeLike, name: str | None = None) -> cupy.ndarray:
        dtype = np.dtype(dtype)
        with self._work("moving an array to the GPU"):
            if isinstance(a, self._cupy.ndarray):
                return self._convert(a, dtype, name)
            for copy in self._copies:
                if copy.source is a:
                    self._rows = len(a)
                    self.stream.wait_event(copy.filled)
                    return self._convert(copy.rows, dtype, name)
            if name is None:
                return self._cupy.asarray(np.ascontiguousarray(a, dtype=dtype))
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
        """Return a copy of some rows of ``a`` in the buffer ``name``; indices are on the host or the GPU."""
        out = self.buffer(name, (len(rows), *a.shape[1:]), a.dtype)
        if out.size:
            with self._work("gathering rows"):
                self._cupy.take(a, self._cupy.asarray(rows), axis=0, out=out)
        return out

    def matmul(self, a: cupy.ndarray, b: cupy.ndarray, name: str) -> cupy.ndarray:
        """Return the product of matrices ``a`` and ``b`` in the buffer ``name``; float32 or float64."""
        check_same_width(a.shape[1], b.shape[0])
        out = self.buffer(name, (a.shape[0], b.shape[1]), a.dtype)
        with self._work("a matrix product"):
            multiply(a, b, out, self.tf32)
        return out

    def copy_table(self, table: Table) -> Table:
        """Return a copy of a table with its arrays on the device; each table is copied only once."""
        kept = self._tables.get(id(table))
        if kept is None:
            if len(self._tables) >= 64:
                self._tables.clear()
            arrays = {f.name: getattr(table, f.name) for f in fields(table)} if is_dataclass(table) else {}
            with self._work("moving a table to the GPU"):
                moved = {key: self._cupy.asarray(a) for key, a in arrays.items() if isinstance(a, np.ndarray)}
            # The original table is kept too, so that no other object gets its id, which is the key.
            kept = self._tables[id(table)] = table, replace(cast(Any, table), **moved) if moved else table
        found: Table = kept[1]
        return found

    def to_host(self, a: Array) -> np.ndarray:
        if isinstance(a, np.ndarray):
            return a
        with self._work("work on the GPU"):
            host = a.get()
            self.stream.synchronize()
        return host

    def start_pass(self) -> None:
        """Set the bytes of rows that this backend may keep on its GPU between passes (:data:`ROWS_SHARE`)."""
        self._make_current()
        if self._has_room:
            limit = self._cupy.get_default_memory_pool().get_limit()
            self.kept_rows.resize(int(ROWS_SHARE * limit / len(_ON_DEVICE[self._device.id])))
        self.kept_rows.start_pass()

    def begin_copies(self) -> object:
        """Return the token of a new pass; with the token of an earlier pass, `copy_ahead` copies nothing."""
        self._make_current()
        with self._copy_lock:
            for copy in self._copies:
                copy.source = None
                copy.used.record(self.stream)
            self._copy_owner = object()
            return self._copy_owner

    def copy_ahead(
        self, owner: object, number: int, key: Hashable | None, block: Block, pool: Executor
    ) -> None:
        """Copy the rows of the next block to the GPU, in their stored dtype, for a later call of `asarray`.

        A thread of ``pool`` calls this method while the GPU computes on the previous block. Copies run on a
        separate stream, alternately from two page-locked buffers, which all threads of ``pool`` fill. The GPU
        keeps the rows if they have a key and there is room for them.
        """
        x, copy = block.x, self._copies[number % 2]
        if not isinstance(x, np.ndarray) or x.dtype.char not in _NATIVE or not x.dtype.isnative:
            return
        # An error is ignored here: the computing thread copies the rows and raises the error with advice.
        with self._copy_lock, suppress(*self.gpu_errors):
            if (
                owner is not self._copy_owner or self.row_limits
            ):  # after a block was halved, memory has no room for two blocks
                return
            self._device.use()
            self._copy_stream.use()
            size = sum(a.nbytes for a in (x, block.y, block.weight) if a is not None)
            if key is not None and self.kept_rows.make_room(size):
                copy.fill(x, self._copy_stream, pool, self._cupy.empty(x.shape, x.dtype))
                # Copies, because labels and weights may be views of larger arrays.
                y, weight = (None if a is None else a.copy() for a in (block.y, block.weight))
                self.kept_rows.put(key, (copy.rows, y, weight))
            else:
                copy.fill(x, self._copy_stream, pool)

    def finish_block(self, number: int) -> None:
        """Let `copy_ahead` reuse the buffer of block ``number`` when the GPU has finished with its rows."""
        copy = self._copies[number % 2]
        self._make_current()
        if copy.source is not None:
            self.stream.wait_event(copy.filled)  # later passes use rows on the GPU without waiting
            copy.used.record(self.stream)
            copy.source = None

    def release_memory(self) -> None:
        self._make_current()
        self._has_room = False  # after its memory was full once, a GPU keeps no more rows
        with self._copy_lock:
            self._copy_stream.synchronize()
            self.stream.synchronize()
            for copy in self._copies:
                copy.source = copy.rows = copy.buffer = None
            self.kept_rows.resize(0)
            self._buffers.clear()
        self._cupy.get_default_memory_pool().free_all_blocks()

    def name_error(self, error: Exception) -> Exception:
        """Return an error that names the GPU in place of an error that an expression of a model raised."""
        return self._named(error, "a block")

    # -- implementation --------------------------------------------------------------------------------------

    def _convert(self, a: cupy.ndarray, dtype: np.dtype, name: str | None) -> cupy.ndarray:
        if a.dtype == dtype and a.flags.c_contiguous:
            return a
        if name is None:
            return self._cupy.ascontiguousarray(a.astype(dtype))
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
        try:
            pinned, done = self._pinned(name, out.nbytes)
        except (self._cupy.cuda.runtime.CUDARuntimeError, MemoryError) as error:
            if not isinstance(self._named(error, "page-locked memory"), DeviceMemoryError):
                raise
            # The host has no more memory that can be page-locked, so copy from slower pageable memory.
            _warn_pageable(self.device)
            out.set(np.ascontiguousarray(a, dtype=dtype))
            return out
        view = pinned[: out.nbytes].view(dtype).reshape(a.shape)
        np.copyto(view, a, casting="unsafe")
        out.data.copy_from_host_async(view.ctypes.data, out.nbytes, self.stream)
        done.record(self.stream)
        return out

    def _pinned(self, name: str, nbytes: int) -> tuple[np.ndarray, cupy.cuda.Event]:
        """Return (page-locked bytes that no copy is reading, event to record after the next copy)."""
        kept = self._staging.get(name)
        if kept is not None:
            kept[1].synchronize()
        if kept is None or kept[0].nbytes < nbytes:
            self._staging.pop(name, None)
            del kept  # frees its memory for the new buffer
            memory = self._cupy.cuda.alloc_pinned_memory(nbytes)
            event = self._cupy.cuda.Event(disable_timing=True)
            kept = self._staging[name] = np.ndarray((nbytes,), np.uint8, buffer=memory), event
        return kept

    def _make_current(self) -> None:
        self._device.use()  # before the stream, because CuPy refuses a stream of another device
        self.stream.use()

    @contextmanager
    def _work(self, what: str) -> Iterator[None]:
        """Run the ``with`` statement on this backend's stream, and name the GPU in its errors."""
        self._make_current()
        if self._nvtx is not None:
            self._nvtx.RangePush(f"scalelatent: {what}")
        try:
            yield
        except Exception as error:
            named = self._named(error, what)
            if named is error:
                raise
            raise named from error
        finally:
            if self._nvtx is not None:
                self._nvtx.RangePop()

    def _named(self, error: Exception, what: str) -> Exception:
        """Return an error with advice for the user instead of a CuPy error; return other errors unchanged."""
        cuda = self._cupy.cuda
        no_memory: tuple[int, ...] = ()
        if isinstance(error, (cuda.runtime.CUDARuntimeError, cuda.driver.CUDADriverError)):
            no_memory = (_NO_MEMORY,)
        elif isinstance(error, self._cublas.CUBLASError):
            no_memory = _CUBLAS_NO_MEMORY
        elif type(error) in (MemoryError, cuda.memory.OutOfMemoryError):  # numpy's memory error is a subclass
            return DeviceMemoryError(self._memory_message(what))
        elif isinstance(error, (cuda.compiler.CompileException, ImportError)):
            return RunError(
                f"GPU {self.device}: the CUDA text of {what} does not compile here: {error}. Install the "
                "extra scalelatent[cuda12] or [cuda13] that fits the driver, which brings the compiler too, "
                "or use device='cpu'"
            )
        else:
            return error
        if self._is_lost():
            return DeviceLostError(
                f"GPU {self.device}: {what} failed: {error}. The GPU refuses all further work of this "
                "process: restart the process (a worker with a nanny is restarted) and resume the run. If it "
                "happens again, look for Xid in the kernel log (dmesg), or use device='cpu' and report it"
            )
        if error.status in no_memory:
            return DeviceMemoryError(self._memory_message(what))
        return RunError(
            f"GPU {self.device}: {what} failed: {error}. Use device='cpu' and report it, with the output of "
            "`scalelatent doctor`"
        )

    def _is_lost(self) -> bool:
        # After an error that destroyed the process's context, every later CUDA call fails.
        try:
            self._cupy.cuda.runtime.deviceSynchronize()
        except self._cupy.cuda.runtime.CUDARuntimeError:
            return True
        return False

    def _memory_message(self, what: str) -> str:
        pool = self._cupy.get_default_memory_pool()
        free, total = self._cupy.cuda.runtime.memGetInfo()
        # A resumed run may use another device, but not another block_rows or model.
        message = (
            f"GPU {self.device}: no memory for {what}: this process holds {pool.used_bytes() / _GIB:.2f} GiB "
            f"of its limit of {pool.get_limit() / _GIB:.2f}, and {free / _GIB:.2f} of the GPU's "
            f"{total / _GIB:.2f} GiB are free. End other work on this GPU, or use device='cpu' ([cluster] "
            "device), then resume the run; or start again in another folder with"
        )
        if self._rows >= 512:
            smaller = 2 ** (self._rows.bit_length() - 2)
            return f"{message} [engine] block_rows = {smaller} (blocks have {self._rows} rows)"
        return f"{message} a smaller model (blocks are small already: {self._rows} rows)"


def _import_cupy() -> tuple[ModuleType, ModuleType]:
    """Return CuPy and its cuBLAS module; raise a RunError if one of them or a CUDA device is missing."""
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
        from cupy_backends.cuda.libs import cublas
    except ImportError as error:
        raise RunError(
            f"the GPU backend needs CuPy and the CUDA libraries, and one of them is missing ({error}): "
            "install the extra scalelatent[cuda12] or [cuda13] that fits the driver, which brings them all, "
            "or use device='cpu'"
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
    return cupy, cublas


@cache
def _warn_pageable(device: str) -> None:
    """Warn once per GPU that rows are copied from pageable memory."""
    _log.warning(
        "GPU %s: no page-locked host memory for the rows; they are copied more slowly from pageable memory. "
        "Give this process more memory, or raise the limit of locked memory (ulimit -l)",
        device,
    )


def _choose_pool_limit(cupy: ModuleType) -> int:
    """Return the bytes that CuPy's pool may use on this GPU: the user's limit, or most of the free memory."""
    pool = cupy.get_default_memory_pool()
    if limit := int(pool.get_limit()):
        return limit
    free, _ = cupy.cuda.runtime.memGetInfo()
    return max(int(POOL_SHARE * (free + pool.total_bytes())) - POOL_SPARE, 2**20)


def _uses_rmm(cupy: ModuleType) -> bool:
    """Return whether RMM allocates the memory of CuPy, as on workers of dask-cuda with an RMM pool."""
    return str(cupy.cuda.get_allocator().__module__).startswith("rmm")


def _device_name(cupy: ModuleType) -> str:
    number = cupy.cuda.runtime.getDevice()
    name = cupy.cuda.runtime.getDeviceProperties(number)["name"]
    return f"{number} ({name.decode() if isinstance(name, bytes) else name})"
