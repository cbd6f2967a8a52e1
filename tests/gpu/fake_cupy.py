"""As much of CuPy as the package uses, over numpy, with kernels run by :class:`emulation.Emulated`.

Strict where CuPy is: host and device arrays do not mix, nothing becomes a numpy array by itself, kernels
take numpy scalars. New memory is filled with garbage, so that an uninitialised number is seen. Where
CuPy is installed, a test holds these names against it.
"""

from __future__ import annotations

import sys
import threading
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

_local = threading.local()
LAUNCHED: list[tuple[str, int]] = []  # (kernel or product, pointer of its stream)


class OutOfMemoryError(MemoryError):
    """cupy.cuda.memory.OutOfMemoryError."""


class CUDARuntimeError(RuntimeError):
    """cupy.cuda.runtime.CUDARuntimeError."""


class CompileException(Exception):
    """cupy.cuda.compiler.CompileException."""


class CUDADriverError(RuntimeError):
    """cupy.cuda.driver.CUDADriverError."""


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


def _new(shape: Any, dtype: Any) -> np.ndarray:
    out = np.empty(shape, dtype)
    if POOL.limit and out.nbytes > POOL.limit:
        raise OutOfMemoryError(f"Out of memory allocating {out.nbytes:,} bytes")
    # Bytes that are NaN as floats and far out of range as integers.
    out.view(np.uint8).reshape(-1)[:] = 0x7F if out.dtype.kind in "iu" else 0xFF
    return out


class MemoryPointer:
    """cupy.cuda.MemoryPointer."""

    def __init__(self, a: np.ndarray) -> None:
        self.ptr, self._a = a.ctypes.data, a

    def copy_from_host_async(self, mem: int, size: int, stream: Stream | None = None) -> None:
        assert size == self._a.nbytes
        assert stream is not None
        source = (np.ctypeslib.ctypes.c_char * size).from_address(mem)
        np.copyto(self._a.reshape(-1).view(np.uint8), np.frombuffer(source, np.uint8))


class ndarray:
    """cupy.ndarray."""

    __array_ufunc__ = None  # numpy operators refuse it, as they refuse CuPy's arrays

    def __init__(self, a: np.ndarray) -> None:
        self._a = a

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    shape = property(lambda self: self._a.shape)
    dtype = property(lambda self: self._a.dtype)
    ndim = property(lambda self: self._a.ndim)
    size = property(lambda self: self._a.size)
    strides = property(lambda self: self._a.strides)
    itemsize = property(lambda self: self._a.itemsize)
    nbytes = property(lambda self: self._a.nbytes)
    flags = property(lambda self: self._a.flags)
    T = property(lambda self: ndarray(self._a.T))
    data = property(lambda self: MemoryPointer(self._a))

    def __len__(self) -> int:
        return len(self._a)

    def __getitem__(self, key: Any) -> ndarray:
        keys = tuple(
            k._a if isinstance(k, ndarray) else k for k in (key if isinstance(key, tuple) else (key,))
        )
        return ndarray(np.asarray(self._a[keys]))

    def __setitem__(self, key: Any, value: Any) -> None:
        assert isinstance(value, (ndarray, int, float)), "CuPy refuses host arrays here"
        self._a[key] = value._a.astype(self.dtype) if isinstance(value, ndarray) else value

    def __matmul__(self, other: Any) -> ndarray:
        _note("matmul")
        return ndarray(self._a @ _plain(other))

    def __float__(self) -> float:
        return float(self._a)

    def __int__(self) -> int:
        return int(self._a)

    def reshape(self, *shape: Any) -> ndarray:
        return ndarray(self._a.reshape(*shape))

    def ravel(self) -> ndarray:
        return ndarray(self._a.ravel())

    def astype(self, dtype: Any, copy: bool = True) -> ndarray:
        return ndarray(self._a.astype(dtype, copy=copy))

    def copy(self) -> ndarray:
        return ndarray(self._a.copy())

    def take(self, indices: Any, axis: int | None = None) -> ndarray:
        return ndarray(self._a.take(indices, axis=axis))

    def fill(self, value: Any) -> None:
        self._a.fill(value)

    def set(self, arr: np.ndarray, stream: Any = None) -> None:
        assert isinstance(arr, np.ndarray)
        assert arr.shape == self.shape
        assert arr.dtype == self.dtype
        self._a[...] = arr

    def get(self, stream: Any = None, order: str = "C", out: Any = None, blocking: bool = True) -> np.ndarray:
        _note("get")
        return self._a.copy()

    def __bool__(self) -> bool:
        return bool(self._a)

    def tolist(self) -> list:
        return self._a.tolist()


def _plain(a: Any) -> Any:
    """What numpy is given for an operand: device arrays and scalars, never a host array."""
    if isinstance(a, ndarray):
        return a._a
    if isinstance(a, (int, float, np.generic)):
        return a
    raise TypeError(f"Unsupported type {type(a)}")


def _operator(name: str) -> Any:
    def call(self: ndarray, *others: Any) -> Any:
        return ndarray(np.asarray(getattr(self._a, name)(*map(_plain, others))))

    return call


def _in_place(name: str) -> Any:
    def call(self: ndarray, other: Any) -> ndarray:
        getattr(self._a, name)(_plain(other))
        return self

    return call


def _reduction(name: str) -> Any:
    def call(self: ndarray, axis: int | None = None, dtype: Any = None) -> ndarray:
        more = {} if dtype is None else {"dtype": dtype}
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


class Stream:
    """cupy.cuda.Stream."""

    _next = 0

    def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
        Stream._next += 0 if null else 1
        self.ptr = 0 if null else Stream._next

    def use(self) -> Stream:
        _local.stream = self
        return self

    def synchronize(self) -> None:
        pass


_NULL = Stream(null=True)


def get_current_stream(device_id: int = -1) -> Stream:
    """cupy.cuda.get_current_stream."""
    return getattr(_local, "stream", _NULL)


class Event:
    """cupy.cuda.Event."""

    def __init__(self, block: bool = False, disable_timing: bool = False) -> None:
        self.time = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.time = time.perf_counter()

    def synchronize(self) -> None:
        pass


def get_elapsed_time(start_event: Event, end_event: Event) -> float:
    """cupy.cuda.get_elapsed_time, in ms."""
    return 1e3 * max(end_event.time - start_event.time, 1e-9)


class RawModule:
    """cupy.RawModule; :func:`install` sets the library."""

    library: Any = None

    def __init__(self, code: str | None = None, *, options: tuple[str, ...] = ()) -> None:
        assert isinstance(code, str)
        assert isinstance(options, tuple)

    def get_function(self, name: str) -> Any:
        return RawKernel(name)


class RawKernel:
    """cupy.RawKernel."""

    shared_size_bytes = 4160  # what a kernel declares: as much as any of ours
    max_dynamic_shared_size_bytes = 48 * 2**10 - shared_size_bytes
    preferred_shared_memory_carveout = -1

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], *, shared_mem: int = 0
    ) -> None:
        """Launch it."""
        _note(self.name)
        assert shared_mem <= self.max_dynamic_shared_size_bytes, "CUDA refuses to launch this"
        most = runtime.getDeviceProperties(0)["sharedMemPerBlockOptin"]
        assert self.max_dynamic_shared_size_bytes + self.shared_size_bytes <= most
        plain = tuple(a._a if isinstance(a, ndarray) else a for a in args)
        RawModule.library.launch(self.name, grid, block, plain, shared_mem)


def _note(what: str) -> None:
    LAUNCHED.append((what, get_current_stream().ptr))


def empty(shape: Any, dtype: Any = float) -> ndarray:
    """cupy.empty."""
    return ndarray(_new(shape, dtype))


def zeros(shape: Any, dtype: Any = float) -> ndarray:
    """cupy.zeros."""
    return ndarray(np.zeros(shape, dtype))


def asarray(a: Any, dtype: Any = None) -> ndarray:
    """cupy.asarray."""
    if isinstance(a, ndarray):
        return ndarray(np.asarray(a._a, dtype=dtype))
    out = np.array(a, dtype=dtype)  # a copy: the device has its own memory
    fresh = _new(out.shape, out.dtype)
    fresh[...] = out
    return ndarray(fresh)


def ascontiguousarray(a: ndarray, dtype: Any = None) -> ndarray:
    """cupy.ascontiguousarray."""
    return ndarray(np.ascontiguousarray(a._a, dtype=dtype))


def asnumpy(a: Any) -> np.ndarray:
    """cupy.asnumpy."""
    return a.get() if isinstance(a, ndarray) else np.asarray(a)


def take(a: ndarray, indices: ndarray, axis: int | None = None, out: ndarray | None = None) -> ndarray:
    """cupy.take."""
    assert out is not None
    assert out.dtype == a.dtype
    _note("take")
    np.take(a._a, indices._a, axis=axis, out=out._a, mode="wrap")
    return out


def isfinite(a: ndarray) -> ndarray:
    """cupy.isfinite."""
    return ndarray(np.isfinite(a._a))


def matmul(a: ndarray, b: ndarray, out: ndarray | None = None) -> ndarray:
    """cupy.matmul."""
    _note("matmul")
    found = np.matmul(a._a, b._a, out=None if out is None else out._a)
    return ndarray(found) if out is None else out


def subtract(a: Any, b: Any, out: ndarray | None = None) -> ndarray:
    """cupy.subtract."""
    found = np.subtract(_plain(a), _plain(b), out=None if out is None else out._a)
    return ndarray(found) if out is None else out


def concatenate(parts: list[ndarray]) -> ndarray:
    """cupy.concatenate."""
    return ndarray(np.concatenate([part._a for part in parts]))


def nonzero(a: ndarray) -> tuple[ndarray, ...]:
    """cupy.nonzero."""
    return tuple(ndarray(found) for found in np.nonzero(a._a))


def _elementwise(name: str) -> Any:
    def call(*args: Any) -> ndarray:
        return ndarray(np.asarray(getattr(np, name)(*map(_plain, args))))

    return call


ELEMENTWISE = ("exp", "log", "tanh", "where", "maximum", "logaddexp", "zeros_like", "rint")
for _name in ELEMENTWISE:
    globals()[_name] = _elementwise(_name)


def gemm_ex(handle: int, transa: int, transb: int, *numbers: int) -> None:
    """cublasGemmEx on host memory, column-major as there."""
    m, n, k, _alpha, a, a_type, lda, b, b_type, ldb, _beta, c, c_type, ldc, compute, _algo = numbers
    _note("gemm")
    kind = np.dtype(np.float64 if c_type == 1 else np.float32)
    assert a_type == b_type == c_type
    assert {1: 70}.get(c_type, 68) == compute or (c_type == 0 and compute == 77)
    assert lda >= (k if transa else m)
    assert ldb >= (n if transb else k)
    assert ldc >= m

    def matrix(pointer: int, rows: int, cols: int, ld: int) -> np.ndarray:
        count = ld * (cols - 1) + rows
        raw = (np.ctypeslib.ctypes.c_char * (count * kind.itemsize)).from_address(pointer)
        flat = np.frombuffer(raw, kind)
        return as_strided(flat, (rows, cols), (kind.itemsize, ld * kind.itemsize))

    left = matrix(a, k, m, lda).T if transa else matrix(a, m, k, lda)
    right = matrix(b, n, k, ldb).T if transb else matrix(b, k, n, ldb)
    matrix(c, m, n, ldc)[...] = left @ right


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
    getDeviceCount=lambda: 1,
    getDevice=lambda: 0,
    getDeviceProperties=_properties,
    memGetInfo=lambda: (8 * 2**30, 8 * 2**30),
    runtimeGetVersion=lambda: 0,
    driverGetVersion=lambda: 0,
    deviceSynchronize=lambda: None,
)
cuda = SimpleNamespace(
    Stream=Stream,
    Event=Event,
    MemoryPointer=MemoryPointer,
    get_current_stream=get_current_stream,
    get_elapsed_time=get_elapsed_time,
    alloc_pinned_memory=lambda size: bytearray(size),
    runtime=runtime,
    memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
    driver=SimpleNamespace(CUDADriverError=CUDADriverError),
    compiler=SimpleNamespace(CompileException=CompileException),
    device=SimpleNamespace(get_cublas_handle=lambda: 1),
)
cublas = SimpleNamespace(
    gemmEx=gemm_ex,
    CUBLAS_COMPUTE_32F=68,
    CUBLAS_COMPUTE_64F=70,
    CUBLAS_COMPUTE_32F_FAST_TF32=77,
    CUBLAS_GEMM_DEFAULT=-1,
)
# What stands for CuPy: module -> names. A test compares them with the real one.
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
    "cupy.cuda.device": list(vars(cuda.device)),
    "cupy_backends.cuda.libs.cublas": list(vars(cublas)),
}


def get_default_memory_pool() -> _Pool:
    """cupy.get_default_memory_pool."""
    return POOL


def install(library: Any) -> dict[str, ModuleType | None]:
    """Put the fake in the place of CuPy; the return value is what :func:`remove` needs."""
    RawModule.library = library
    POOL.limit = 0
    LAUNCHED.clear()
    _local.stream = _NULL
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
    """Undo :func:`install`."""
    for name, module in before.items():
        if module is None:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = module


__version__ = "0 (emulated)"
