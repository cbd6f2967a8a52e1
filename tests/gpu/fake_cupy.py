"""Stand-in for the part of CuPy that the package uses, over numpy; :class:`emulation.Emulated` runs the
kernels.

It is as strict as CuPy: host and device arrays do not mix, nothing becomes a numpy array implicitly, and
kernels accept numpy scalars. New memory is filled with garbage, so that an uninitialised number is visible.

Streams run late: copies and launches stay in the queue of their stream until the host waits for that
stream, or until an operation of that stream needs a value. Memory records its last writing stream. Work
on another stream that is not ordered after that write is an error, because it would be a race on a GPU.
Devices are separate, too.

If CuPy is installed, a test checks that CuPy has all names of this stand-in.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
from numpy.lib.stride_tricks import as_strided

_local = threading.local()
COMPILED: list[str] = []  # Source texts of compiled kernels.
LAUNCHED: list[tuple[str, int]] = []  # (name of a kernel, product or download, pointer of its stream).
EXPRESSIONS: list[str] = []  # Array expressions of CuPy itself, each of which launches a kernel.
COPIED = {"set": 0, "get": 0}  # Bytes copied to and from the device.
WAITS: list[int] = []  # Pointers of streams for whose unfinished work the host waited.


class OutOfMemoryError(MemoryError):
    """Error of an allocation beyond the limit of the pool (cupy.cuda.memory.OutOfMemoryError)."""


_STATUS_TEXTS = {
    1: "cudaErrorInvalidValue: invalid argument",
    2: "cudaErrorMemoryAllocation: out of memory",
    35: "cudaErrorInsufficientDriver",
    700: "cudaErrorIllegalAddress: an illegal memory access was encountered",
}


class CUDARuntimeError(RuntimeError):
    """Stand-in for cupy.cuda.runtime.CUDARuntimeError."""

    def __init__(self, status: int) -> None:
        super().__init__(_STATUS_TEXTS[status])
        self.status = status


class CompileException(Exception):
    """Stand-in for cupy.cuda.compiler.CompileException."""


class CUDADriverError(CUDARuntimeError):
    """Stand-in for cupy.cuda.driver.CUDADriverError."""


class CUBLASError(RuntimeError):
    """Stand-in for cupy_backends.cuda.libs.cublas.CUBLASError."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class Device:
    """One of ``count`` devices; as a context, the device is current in this thread (cupy.cuda.Device)."""

    count = 1

    def __init__(self, device: int | None = None) -> None:
        self.id = runtime.getDevice() if device is None else device

    def use(self) -> Device:
        assert self.id < Device.count, f"there is no device {self.id}"
        _local.device = self.id
        return self

    def __enter__(self) -> Device:
        self._before = runtime.getDevice()
        return self.use()

    def __exit__(self, *error: object) -> None:
        Device(self._before).use()


class Stream:
    """Queue of work that runs late, when the host waits for it (cupy.cuda.Stream)."""

    _number = 0
    _lock = threading.RLock()  # One lock for all streams, because streams wait for each other.
    _all: ClassVar[weakref.WeakSet[Stream]] = weakref.WeakSet()

    def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
        Stream._number += 0 if null else 1
        self.ptr = 0 if null else Stream._number
        self.device_id = -1 if null else runtime.getDevice()
        self._issued = self._waited_for = 0
        self._pending: deque[tuple[int, Callable[[], None]]] = deque()
        # For each other stream, the number of its last work that new work of this stream must wait for.
        self._after: dict[Stream, int] = {}
        Stream._all.add(self)

    def use(self) -> Stream:
        assert self.device_id in (-1, runtime.getDevice()), "CuPy refuses a stream of another device"
        _streams()[runtime.getDevice()] = self
        return self

    def synchronize(self) -> None:
        if self._waited_for < self._issued:
            WAITS.append(self.ptr)
        self._wait(self._issued)

    def wait_event(self, event: Event) -> None:
        other, number = event._mark
        self._after[other] = max(self._after.get(other, 0), number)
        self._issue(lambda: other._run(number))

    def _is_ordered_after(self, other: Stream, number: int) -> bool:
        """Return whether new work of this stream runs after work number ``number`` of another stream."""
        return other is self or max(other._waited_for, self._after.get(other, 0)) >= number

    def _issue(self, work: Callable[[], None] | None = None) -> int:
        """Add work to the queue, or count work that is done at once (None), and return its number."""
        with self._lock:
            self._issued += 1
            if work is not None:
                self._pending.append((self._issued, work))
            return self._issued

    def _run(self, last: int) -> None:
        """Run the queued work up to and including number ``last``."""
        with self._lock:
            while self._pending and self._pending[0][0] <= last:
                self._pending.popleft()[1]()

    def _wait(self, last: int) -> None:
        """Run the queued work up to number ``last``, and record that the host waited for it."""
        self._run(last)
        self._waited_for = max(self._waited_for, last)


class _Memory:
    """Allocation on a device, with the last work that wrote to it and the later work that read it."""

    def __init__(self) -> None:
        self.device, self.readers = runtime.getDevice(), {}
        self.write()

    def check(self, writes: bool = False) -> None:
        """Refuse work of the current stream that may run before the last write, or writes before a read."""
        assert self.device == runtime.getDevice(), "memory of another device"
        stream = get_current_stream()
        ordered = stream._is_ordered_after(self.stream, self.number)
        assert ordered, f"race: stream {stream.ptr} uses what stream {self.stream.ptr} writes"
        for reader, number in self.readers.items() if writes else ():
            assert stream._is_ordered_after(reader, number), (
                f"race: stream {stream.ptr} writes what {reader.ptr} reads"
            )
        if not writes:
            self.readers[stream] = stream._issued

    def write(self) -> None:
        self.stream, self.readers = get_current_stream(), {}
        self.number = self.stream._issue()


class _Pool:
    def __init__(self) -> None:
        self.limit, self.used = 0, 0

    def get_limit(self) -> int:
        return self.limit

    def set_limit(self, size: int | None = None, fraction: float | None = None) -> None:
        self.limit = size or 0

    def total_bytes(self) -> int:
        return self.used

    used_bytes = total_bytes

    def free_all_blocks(self) -> None:
        pass


POOL = _Pool()


def _allocate(shape: Any, dtype: Any) -> np.ndarray:
    out = np.empty(shape, dtype)
    if POOL.limit and out.nbytes > POOL.limit:
        raise OutOfMemoryError(f"Out of memory allocating {out.nbytes:,} bytes")
    # Fill new memory with bytes that are NaN as floats and far out of range as integers.
    out.view(np.uint8).reshape(-1)[:] = 0x7F if out.dtype.kind in "iu" else 0xFF
    return out


class MemoryPointer:
    """Memory of a device array, to which page-locked memory can be copied (cupy.cuda.MemoryPointer)."""

    def __init__(self, a: ndarray) -> None:
        self.ptr, self._array = a._a.ctypes.data, a

    def copy_from_host_async(self, mem: int, size: int, stream: Stream | None = None) -> None:
        assert size == self._array.nbytes
        assert stream is get_current_stream()
        COPIED["set"] += size
        target = self._array._a.reshape(-1).view(np.uint8)

        def work() -> None:  # As on a GPU, a queued copy reads the memory when it runs.
            source = (np.ctypeslib.ctypes.c_char * size).from_address(mem)
            np.copyto(target, np.frombuffer(source, np.uint8))

        _enqueue(work, self._array)


class ndarray:
    """Array on a device, stored as a numpy array with a record of the last work on it (cupy.ndarray)."""

    __array_ufunc__ = None  # None makes numpy's operators refuse this array, like CuPy's.

    def __init__(self, a: np.ndarray, memory: _Memory | None = None) -> None:
        self._a, self._memory = a, memory or _Memory()

    def _view(self, a: np.ndarray) -> ndarray:
        return ndarray(a, self._memory if np.may_share_memory(a, self._a) else None)

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    shape = property(lambda self: self._a.shape)
    dtype = property(lambda self: self._a.dtype)
    ndim = property(lambda self: self._a.ndim)
    size = property(lambda self: self._a.size)
    strides = property(lambda self: self._a.strides)
    itemsize = property(lambda self: self._a.itemsize)
    nbytes = property(lambda self: self._a.nbytes)
    device = property(lambda self: Device(self._memory.device))
    flags = property(lambda self: self._a.flags)
    T = property(lambda self: self._view(self._a.T))
    data = property(lambda self: MemoryPointer(self))

    def __len__(self) -> int:
        return len(self._a)

    def __getitem__(self, key: Any) -> ndarray:
        keys = key if isinstance(key, tuple) else (key,)
        if any(isinstance(k, (ndarray, np.ndarray, list)) for k in keys):
            _finish_queue(self, *keys)
        keys = tuple(k._a if isinstance(k, ndarray) else k for k in keys)
        return self._view(np.asarray(self._a[keys]))

    def __setitem__(self, key: Any, value: Any) -> None:
        assert isinstance(value, (ndarray, int, float)), "CuPy refuses host arrays here"
        EXPRESSIONS.append("copy")
        _finish_queue(value, writes=(self,))
        self._a[key] = value._a.astype(self.dtype) if isinstance(value, ndarray) else value

    def __matmul__(self, other: Any) -> ndarray:
        _record_launch("matmul")
        _finish_queue(self, other)
        return ndarray(self._a @ _unwrap(other))

    def _read_value(self) -> np.ndarray:
        """Return the value that the host reads, after waiting for the current stream."""
        _finish_queue(self)
        get_current_stream().synchronize()
        return self._a

    def __float__(self) -> float:
        return float(self._read_value())

    def __int__(self) -> int:
        return int(self._read_value())

    def reshape(self, *shape: Any) -> ndarray:
        if not np.may_share_memory(self._a.reshape(*shape), self._a):
            _finish_queue(self)  # A copy reads the array; a view does not.
        return self._view(self._a.reshape(*shape))

    def ravel(self) -> ndarray:
        return self.reshape(-1)

    def astype(self, dtype: Any, copy: bool = True) -> ndarray:
        _finish_queue(self)
        return self._view(self._a.astype(dtype, copy=copy))

    def copy(self) -> ndarray:
        _finish_queue(self)
        return ndarray(self._a.copy())

    def take(self, indices: Any, axis: int | None = None) -> ndarray:
        _finish_queue(self, indices)
        return ndarray(self._a.take(indices, axis=axis))

    def fill(self, value: Any) -> None:
        EXPRESSIONS.append("fill")
        _enqueue(lambda: self._a.fill(value), self)

    def set(self, arr: np.ndarray, stream: Any = None) -> None:
        assert isinstance(arr, np.ndarray)
        assert arr.shape == self.shape
        assert arr.dtype == self.dtype
        _copy_to_device(self, arr)

    def get(self, stream: Any = None, order: str = "C", out: Any = None, blocking: bool = True) -> np.ndarray:
        _record_launch("get")
        COPIED["get"] += self.nbytes
        with self.device:  # As in CuPy, the device of the array is current.
            value = self._read_value()
        if out is None:
            return value.copy()
        assert out.dtype == self.dtype
        assert out.flags.c_contiguous
        out[...] = value
        return out

    def view(self, dtype: Any) -> ndarray:
        _finish_queue(self)
        return self._view(self._a.view(dtype))

    def __bool__(self) -> bool:
        return bool(self._read_value())

    def tolist(self) -> list:
        return self._read_value().tolist()


def _unwrap(a: Any) -> Any:
    """Return the numpy array inside a device array, or the scalar as it is; refuse host arrays."""
    if isinstance(a, ndarray):
        return a._a
    if isinstance(a, (int, float, np.generic)):
        return a
    raise TypeError(f"Unsupported type {type(a)}")


def _operator(name: str) -> Any:
    def call(self: ndarray, *others: Any) -> Any:
        EXPRESSIONS.append(name)
        _finish_queue(self, *others)
        return ndarray(np.asarray(getattr(self._a, name)(*map(_unwrap, others))))

    return call


def _in_place(name: str) -> Any:
    def call(self: ndarray, other: Any) -> ndarray:
        EXPRESSIONS.append(name)
        _finish_queue(other, writes=(self,))
        getattr(self._a, name)(_unwrap(other))
        return self

    return call


def _reduction(name: str) -> Any:
    def call(self: ndarray, axis: int | None = None, dtype: Any = None) -> ndarray:
        more = {} if dtype is None else {"dtype": dtype}
        EXPRESSIONS.append(name)
        _finish_queue(self)
        return ndarray(np.asarray(getattr(self._a, name)(axis=axis, **more)))

    return call


for _name in ("add", "sub", "mul", "truediv", "radd", "rsub", "rmul", "rtruediv", "neg",
              "abs"):  # fmt: skip
    setattr(ndarray, f"__{_name}__", _operator(f"__{_name}__"))
for _name in ("and", "or", "invert", "lt", "le", "gt", "ge", "eq", "ne"):
    setattr(ndarray, f"__{_name}__", _operator(f"__{_name}__"))
for _name in ("iadd", "isub", "imul"):
    setattr(ndarray, f"__{_name}__", _in_place(f"__{_name}__"))
for _name in ("sum", "max", "min", "prod", "any", "all"):
    setattr(ndarray, _name, _reduction(_name))
ndarray.__hash__ = None  # type: ignore[assignment]


_NULL = Stream.__new__(Stream)


def _streams() -> dict[int, Stream]:
    """Return the current streams of this thread by device."""
    if not hasattr(_local, "streams"):
        _local.streams = {}
    return _local.streams


def get_current_stream(device_id: int = -1) -> Stream:
    return _streams().get(runtime.getDevice() if device_id == -1 else device_id, _NULL)


def _finish_queue(*operands: Any, writes: tuple[ndarray, ...] = ()) -> None:
    """Check the operands of an operation that is computed at once, and run the stream's queued work first."""
    stream = get_current_stream()
    for operand in operands:
        if isinstance(operand, ndarray):
            operand._memory.check()
    for operand in writes:
        operand._memory.check(writes=True)
    stream._run(stream._issued)
    for operand in writes:
        operand._memory.write()


def _enqueue(work: Callable[[], None], writes: ndarray, reads: tuple[Any, ...] = ()) -> None:
    """Check that no operand is in use on another stream, and add the operation to the current queue."""
    for operand in (writes, *reads):
        if isinstance(operand, ndarray):
            operand._memory.check(writes=True)
    get_current_stream()._issue(work)
    for operand in (writes, *reads):  # A kernel may write any operand, so each one counts as written.
        if isinstance(operand, ndarray):
            operand._memory.write()


def _copy_to_device(target: ndarray, source: np.ndarray) -> None:
    COPIED["set"] += source.nbytes
    sent = source.copy()  # The caller may change pageable memory as soon as the call returns.
    _enqueue(lambda: np.copyto(target._a, sent), target)


class Event:
    """Mark after the work that a stream has when the event is recorded (cupy.cuda.Event)."""

    def __init__(self, block: bool = False, disable_timing: bool = False) -> None:
        self.time, self._mark = 0.0, (_NULL, 0)

    def record(self, stream: Stream | None = None) -> None:
        self.time = time.perf_counter()
        stream = get_current_stream() if stream is None else stream
        self._mark = stream, stream._issued

    def synchronize(self) -> None:
        self._mark[0]._wait(self._mark[1])


def get_elapsed_time(start_event: Event, end_event: Event) -> float:
    """Return the milliseconds between two events (cupy.cuda.get_elapsed_time)."""
    return 1e3 * max(end_event.time - start_event.time, 1e-9)


class RawModule:
    """CUDA text, whose kernels come from the emulated ``library`` that a test installs (cupy.RawModule)."""

    library: Any = None

    def __init__(self, code: str | None = None, *, options: tuple[str, ...] = ()) -> None:
        assert isinstance(code, str)
        self.code = code
        assert isinstance(options, tuple)

    def compile(self, log_stream: Any = None) -> None:
        COMPILED.append(self.code)

    def get_function(self, name: str) -> Any:
        return RawKernel(name)


class RawKernel:
    """Kernel by name; a call adds the emulated kernel to the queue of the stream (cupy.RawKernel)."""

    shared_size_bytes = 4160  # Largest static shared memory of a kernel of this package, in bytes.
    max_dynamic_shared_size_bytes = 48 * 2**10 - shared_size_bytes
    preferred_shared_memory_carveout = -1

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], *, shared_mem: int = 0
    ) -> None:
        """Record the launch, check its arguments, and add it to the queue of the current stream."""
        _record_launch(self.name)
        assert shared_mem <= self.max_dynamic_shared_size_bytes, "CUDA refuses to launch this"
        most = runtime.getDeviceProperties(0)["sharedMemPerBlockOptin"]
        assert self.max_dynamic_shared_size_bytes + self.shared_size_bytes <= most
        plain = tuple(a._a if isinstance(a, ndarray) else a for a in args)
        library = RawModule.library
        library.check(self.name, grid, block, plain)
        work = partial(library.launch, self.name, grid, block, plain, shared_mem)
        _enqueue(work, args[0], args[1:])


def _record_launch(what: str) -> None:
    LAUNCHED.append((what, get_current_stream().ptr))


def empty(shape: Any, dtype: Any = float) -> ndarray:
    return ndarray(_allocate(shape, dtype))


def zeros(shape: Any, dtype: Any = float) -> ndarray:
    return ndarray(np.zeros(shape, dtype))


def asarray(a: Any, dtype: Any = None) -> ndarray:
    if isinstance(a, ndarray):
        return ascontiguousarray(a, dtype) if dtype is not None and a.dtype != dtype else a
    out = ndarray(_allocate(np.shape(a), dtype or np.asarray(a).dtype))
    _copy_to_device(out, np.asarray(a, dtype=out.dtype))
    return out


def ascontiguousarray(a: ndarray, dtype: Any = None) -> ndarray:
    _finish_queue(a)
    return a._view(np.ascontiguousarray(a._a, dtype=dtype))


def asnumpy(a: Any) -> np.ndarray:
    return a.get() if isinstance(a, ndarray) else np.asarray(a)


def take(a: ndarray, indices: ndarray, axis: int | None = None, out: ndarray | None = None) -> ndarray:
    assert out is not None
    assert out.dtype == a.dtype
    _record_launch("take")
    _finish_queue(a, indices, writes=(out,))
    np.take(a._a, indices._a, axis=axis, out=out._a, mode="wrap")
    return out


def isfinite(a: ndarray) -> ndarray:
    _finish_queue(a)
    return ndarray(np.isfinite(a._a))


def matmul(a: ndarray, b: ndarray, out: ndarray | None = None) -> ndarray:
    _record_launch("matmul")
    _finish_queue(a, b, writes=() if out is None else (out,))
    found = np.matmul(a._a, b._a, out=None if out is None else out._a)
    return ndarray(found) if out is None else out


def subtract(a: Any, b: Any, out: ndarray | None = None) -> ndarray:
    EXPRESSIONS.append("subtract")
    _finish_queue(a, b, writes=() if out is None else (out,))
    found = np.subtract(_unwrap(a), _unwrap(b), out=None if out is None else out._a)
    return ndarray(found) if out is None else out


def concatenate(parts: list[ndarray]) -> ndarray:
    EXPRESSIONS.append("concatenate")
    _finish_queue(*parts)
    return ndarray(np.concatenate([part._a for part in parts]))


def nonzero(a: ndarray) -> tuple[ndarray, ...]:
    return tuple(ndarray(found) for found in np.nonzero(a._read_value()))


def _elementwise(name: str) -> Any:
    def call(*args: Any) -> ndarray:
        EXPRESSIONS.append(name)
        _finish_queue(*args)
        return ndarray(np.asarray(getattr(np, name)(*map(_unwrap, args))))

    return call


ELEMENTWISE = ("exp", "log", "tanh", "where", "maximum", "logaddexp", "zeros_like", "rint")
for _name in ELEMENTWISE:
    globals()[_name] = _elementwise(_name)


def gemm_ex(handle: int, transa: int, transb: int, *numbers: int) -> None:
    """Multiply matrices in host memory as cublasGemmEx does, in column-major order."""
    m, n, k, _alpha, a, a_type, lda, b, b_type, ldb, _beta, c, c_type, ldc, compute, _algo = numbers
    assert HANDLES.get(handle) == runtime.getDevice(), "no cuBLAS handle of this device"
    _record_launch("gemm")
    stream = get_current_stream()
    stream._run(stream._issued)
    kind, result = {0: ("f4", "f4"), 1: ("f8", "f8"), 3: ("i1", "i4")}[a_type]
    assert a_type == b_type
    assert (c_type, compute) in {0: [(0, 68), (0, 77)], 1: [(1, 70)], 3: [(10, 72)]}[a_type]
    if (
        a_type == 3
    ):  # cuBLAS and tensor cores accept only these sizes, addresses and operations for signed bytes
        assert not any(size % 4 for size in (m, k, lda, ldb, ldc, a, b, c))
        assert (transa, transb) == (1, 0)
    assert lda >= (k if transa else m)
    assert ldb >= (n if transb else k)
    assert ldc >= m

    def matrix(pointer: int, rows: int, cols: int, ld: int, dtype: str = kind) -> np.ndarray:
        count, size = ld * (cols - 1) + rows, np.dtype(dtype).itemsize
        raw = (np.ctypeslib.ctypes.c_char * (count * size)).from_address(pointer)
        return as_strided(np.frombuffer(raw, dtype), (rows, cols), (size, ld * size))

    left = matrix(a, k, m, lda).T if transa else matrix(a, m, k, lda)
    right = matrix(b, n, k, ldb).T if transb else matrix(b, k, n, ldb)
    product = np.matmul(left, right, dtype=result)
    matrix(c, m, n, ldc, result)[...] = product


HANDLES: dict[int, int] = {}  # Device of each cuBLAS handle.


def _create() -> int:
    HANDLES[len(HANDLES) + 1] = runtime.getDevice()
    return len(HANDLES)


def _synchronize() -> None:
    for stream in list(Stream._all):
        stream.synchronize()


def _properties(device: int) -> dict[str, Any]:
    return {
        "name": b"emulated",
        "multiProcessorCount": 132,
        "l2CacheSize": 2**20,
        "totalGlobalMem": 2**30,
        "major": 9,
        "minor": 0,
        "sharedMemPerBlockOptin": 2**17,
        "clockRate": 10**6,
    }


runtime = SimpleNamespace(
    CUDARuntimeError=CUDARuntimeError,
    getDeviceCount=lambda: Device.count,
    getDevice=lambda: getattr(_local, "device", 0),
    getDeviceProperties=_properties,
    memGetInfo=lambda: (8 * 2**30, 8 * 2**30),
    runtimeGetVersion=lambda: 0,
    driverGetVersion=lambda: 0,
    deviceSynchronize=_synchronize,
)
cuda = SimpleNamespace(
    Device=Device,
    Stream=Stream,
    Event=Event,
    MemoryPointer=MemoryPointer,
    get_current_stream=get_current_stream,
    get_elapsed_time=get_elapsed_time,
    alloc_pinned_memory=lambda size: bytearray(size),
    get_allocator=lambda: _allocate,
    runtime=runtime,
    memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
    driver=SimpleNamespace(CUDADriverError=CUDADriverError),
    compiler=SimpleNamespace(CompileException=CompileException),
)
RANGES: list[str] = []  # Names of NVTX ranges in the order of their starts; "" is an end.
cuda.nvtx = SimpleNamespace(available=True, RangePush=RANGES.append, RangePop=lambda: RANGES.append(""))
cublas = SimpleNamespace(
    gemmEx=gemm_ex,
    create=_create,
    destroy=lambda handle: None,
    CUBLASError=CUBLASError,
    CUBLAS_COMPUTE_32F=68,
    CUBLAS_COMPUTE_64F=70,
    CUBLAS_COMPUTE_32I=72,
    CUBLAS_COMPUTE_32F_FAST_TF32=77,
    CUBLAS_GEMM_DEFAULT=-1,
)
_NULL.__init__(null=True)
# The stand-in has these names, by module of CuPy. A test checks that CuPy has the names, too.
NAMES = {
    "cupy": [
        "ndarray",
        "empty",
        "zeros",
        "asarray",
        "ascontiguousarray",
        "asnumpy",
        "take",
        "isfinite",
        "matmul",
        "subtract",
        "concatenate",
        "nonzero",
        *ELEMENTWISE,
        "RawModule",
        "RawKernel",
        "get_default_memory_pool",
    ],
    "cupy.cuda": [name for name in vars(cuda) if not isinstance(getattr(cuda, name), SimpleNamespace)],
    "cupy.cuda.runtime": list(vars(runtime)),
    "cupy.cuda.memory": list(vars(cuda.memory)),
    "cupy.cuda.driver": list(vars(cuda.driver)),
    "cupy.cuda.compiler": list(vars(cuda.compiler)),
    "cupy.cuda.nvtx": list(vars(cuda.nvtx)),
    "cupy_backends.cuda.libs.cublas": list(vars(cublas)),
}


def get_default_memory_pool() -> _Pool:
    return POOL


def install(library: Any) -> dict[str, ModuleType | None]:
    """Replace CuPy by the stand-in; return the state that :func:`remove` needs."""
    RawModule.library = library
    POOL.limit = 0
    LAUNCHED.clear()
    EXPRESSIONS.clear()
    WAITS.clear()
    COPIED.update(set=0, get=0)
    Device.count, _local.device = 1, 0
    _streams().clear()
    me = sys.modules[__name__]
    chain: dict[str, Any] = {
        "cupy": me,
        "cupy_backends": ModuleType("cupy_backends"),
        "cupy_backends.cuda": ModuleType("c"),
    }
    chain |= {"cupy_backends.cuda.libs": ModuleType("l"), "cupy_backends.cuda.libs.cublas": cublas}
    chain["cupy_backends.cuda.libs"].cublas = cublas
    return {
        name: (sys.modules.get(name), sys.modules.__setitem__(name, module))[0]
        for name, module in chain.items()
    }


def remove(before: dict[str, ModuleType | None]) -> None:
    """Restore the modules that :func:`install` replaced."""
    for name, module in before.items():
        if module is None:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = module


__version__ = "0 (emulated)"
