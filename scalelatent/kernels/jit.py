"""Compilation of kernels by numba: settings, argument types, and the cache on disk.

Kernels release the GIL and are serial; Dask or ``n_jobs`` threads run ranges of rows in parallel.
``error_model="numpy"`` and the flag ``contract`` let LLVM vectorise divisions and form fused multiply-adds.
Sums keep the order of the source, so that results are bitwise identical on all workers with one kind of CPU.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import itertools
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llvmlite.binding
import numba
import numpy as np
from numba.core.bytecode import FunctionIdentity

from scalelatent import _file_locks

from .cache_folder import CACHE_FOLDER
from .compile_observers import report_compilation
from .subkernels import SubkernelCompiler

if TYPE_CHECKING:
    from numba import types

_FEATURES = llvmlite.binding.get_host_cpu_features()
# Number of float32 (lanes) in the widest vectors of this machine; it does not change the result of any sum.
# Tests set SCALELATENT_LANES to run the kernels of other machines, with vectors that LLVM emulates.
LANES = int(os.environ.get("SCALELATENT_LANES", 16 if _FEATURES.get("avx512f") else 8))
# True if the machine has the instruction (VNNI) that adds four products of bytes to each lane of a vector.
# Tests set SCALELATENT_DOTS=0 to run the kernels of other machines.
DOTS = bool(
    os.environ.get("SCALELATENT_DOTS") != "0" and _FEATURES.get("avx512vnni" if LANES == 16 else "avxvnni")
)


def _number_functions() -> None:
    """Start numba's numbers of compiled functions at a random number.

    The number is part of the name of a function in machine code. If all processes counted from 1, two of them
    could give the same name to different functions, such as two closures of one factory. A process that loads
    both kernels from disk would then call one function in place of the other, and get wrong results.
    """
    FunctionIdentity._unique_ids = itertools.count(secrets.randbits(62))


_number_functions()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_number_functions)

_ROOT = Path(__file__).parent.parent


# A family is a group of modules whose compiled kernels are in one folder on disk. The modules in these two
# folders of the package form one family, because they have few kernels.
_ROW_FOLDERS = ("generators", "importers")


def _family(module: str) -> str:
    """Return the family of a module, such as "mbn"; the compiled kernels of a family are in one folder."""
    package, *names = module.split(".")
    if package != _ROOT.name or not names:
        return "other"
    if names[0] == "models" and len(names) > 1:
        return names[1]
    return "data" if names[0] in _ROW_FOLDERS else names[0]


def _sources(family: str) -> list[Path]:
    """Return the source files whose functions can be compiled into kernels of a family (group of modules)."""
    shared = [*_ROOT.glob("kernels/*.py")]
    if (_ROOT / "models" / family).is_dir():
        rooms = [_ROOT / "models" / family / room for room in ("kernels", "model")]
        return [*shared, *(f for room in rooms for f in room.glob("**/*.py"))]
    folders = _ROW_FOLDERS if family == "data" else (family,) if (_ROOT / family).is_dir() else ("",)
    here = (f for folder in folders for f in (_ROOT / folder).glob("**/*.py"))
    return [*shared, *(f for f in here if b"kernels.jit" in f.read_bytes())]


@functools.cache
def _digest(family: str) -> str:
    # numba would load an old kernel if a function that the kernel calls has changed in another file. So the
    # name of the cache folder contains this digest of all source files. It excludes their times, so that a
    # package that is installed again finds its kernels.
    digest = hashlib.blake2b(digest_size=5)
    for file in sorted(set(_sources(family))):
        digest.update(repr((str(file.relative_to(_ROOT)), file.read_bytes())).encode())
    # numba's own key does not include LANES and DOTS. The digest includes numba's version, because another
    # version would overwrite files of an index that it cannot read.
    digest.update(repr((LANES, DOTS, numba.__version__)).encode())
    return digest.hexdigest()


# Kernels of other versions of the package are removed if they were not loaded for this many days.
KEEP_DAYS = 30.0
# A folder's modification time, which shows its last use, is updated at most once in this many days.
_TOUCHED_DAYS = 1.0
_FOLDER = r"[a-z_]+-[0-9a-f]{10}"


@functools.cache
def _find_kernel_folder(family: str) -> str:
    """Return the kernels' folder of a family (group of modules); set its modification time to now."""
    folder = Path(CACHE_FOLDER) / f"{family}-{_digest(family)}"
    with contextlib.suppress(OSError):
        if time.time() - folder.stat().st_mtime > _TOUCHED_DAYS * 86400:
            os.utime(folder)
    return str(folder)


def remove_unused(days: float = KEEP_DAYS) -> list[str]:
    """Remove folders of kernels that were not loaded for ``days`` days; return their paths.

    If a running process still uses such a folder, it compiles the kernels again.
    """
    base, before, removed = Path(CACHE_FOLDER), time.time() - days * 86400, []
    # Earlier versions of the package had one folder for all kernels, in the parent of CACHE_FOLDER.
    found = [(base, _FOLDER), (base.parent, re.escape(base.name) + "-[0-9a-f]{10}")]
    for place, name in found:
        with contextlib.suppress(OSError):
            for folder in place.iterdir():
                if not re.fullmatch(name, folder.name) or folder.is_symlink() or not folder.is_dir():
                    continue
                if folder.stat().st_mtime < before:
                    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
                    folder.rename(aside)  # in one step, so that no process finds an incomplete folder
                    shutil.rmtree(aside, ignore_errors=True)
                    removed.append(str(folder))
    return removed


# Seconds that a process waits for the lock before it saves a kernel. After a timeout the process does not
# wait again (0 seconds). Kernels that it does not save are compiled again by the next process.
_save_timeout = [10.0]
# Seconds that a process waits while another process compiles the same kernel. Afterwards the waiting process
# compiles the kernel itself.
_compile_timeout = [120.0]


@contextlib.contextmanager
def _hold_lock(name: str = "lock", timeout: list[float] | None = None) -> Iterator[bool]:
    """Hold a lock file in the ``with`` block; yield False if another process holds it until the timeout.

    ``timeout`` holds the seconds, which become 0 after a timeout.
    """
    held, timeout = True, _save_timeout if timeout is None else timeout
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            Path(CACHE_FOLDER).mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open(Path(CACHE_FOLDER) / name, "ab")).fileno()
            held = _file_locks.lock_file(lock, timeout[0]) is not False
            if held:
                stack.callback(_file_locks.unlock_file, lock)
            else:
                timeout[0] = 0.0
        yield held


def _save_one_at_a_time(dispatcher: Any) -> Any:
    """Return the dispatcher, changed so that only one process saves kernels at a time.

    numba numbers the files of a function's specialisations in the order in which they are saved. If two
    processes save at the same time, one may write its code into the file of the other, and later processes
    silently load another kernel.
    """
    save = dispatcher._cache.save_overload

    @functools.wraps(save)
    def save_with_lock(sig: object, data: object) -> None:
        with _hold_lock() as held:
            if held:
                save(sig, data)
                _remove_unused_kernels_once()

    dispatcher._cache.save_overload = save_with_lock
    return dispatcher


# Removes compiled kernels that were not loaded for `KEEP_DAYS`, at most once per process.
_remove_unused_kernels_once = functools.cache(remove_unused)


DEFAULTS: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",
    "cache": True,
    "fastmath": {"contract"},
    "no_cfunc_wrapper": True,  # no C code calls a kernel
}


# Protects numba's setting of the cache folder, which is the same for all threads.
_cache_folder_lock = threading.Lock()


@contextlib.contextmanager
def _use_cache_folder(folder: str) -> Iterator[None]:
    """Let functions that are decorated in the ``with`` block cache their kernels in a folder."""
    config: Any = numba.config
    with _cache_folder_lock:
        before, config.CACHE_DIR = config.CACHE_DIR, folder
        try:
            yield
        finally:
            config.CACHE_DIR = before


def kernel(function: Callable[..., Any], **options: Any) -> Any:
    """Return a function compiled with the package's settings; ``options`` replace settings of numba."""
    # numba reads the setting of the cache folder when it decorates a function. It is only set for that time,
    # so that functions of other packages keep their cache folder.
    family = _family(function.__module__)
    try:
        with _use_cache_folder(_find_kernel_folder(family)):
            dispatcher: Any = _save_one_at_a_time(numba.njit(**DEFAULTS | options)(function))
    except RuntimeError:  # numba cannot cache functions without a file
        return numba.njit(**DEFAULTS | options | {"cache": False})(function)
    if family != "other":
        # numba stores the source file's modification time and compiles again if it changes. The digest of the
        # sources replaces the time, so that a reinstalled version with the same sources loads its kernels.
        with contextlib.suppress(AttributeError):
            dispatcher._cache._cache_file._source_stamp = _digest(family)
    return dispatcher


class subkernel:
    """Decorator for functions that only kernels call; they are compiled only as parts of kernels."""

    def __init__(self, function: Callable[..., Any]) -> None:
        options = {"cache": False, "no_cpython_wrapper": True, "pipeline_class": SubkernelCompiler}
        self._dispatcher: Any = numba.njit(**DEFAULTS | options)(function)
        functools.update_wrapper(self, function)

    @property
    def _numba_type_(self) -> types.Type:
        return self._dispatcher._numba_type_

    def __call__(self, *args: object) -> Any:
        """Raise TypeError, because Python code cannot call a subkernel."""
        raise TypeError(f"{self._dispatcher.__name__} can be called only by other kernels")


# (numba dispatcher, argument types) of each kernel of imported modules that Python calls, by family.
_entries: dict[str, list[tuple[Any, tuple[types.Type, ...]]]] = {}


def entries(family: str) -> list[tuple[str, bool]]:
    """Return (name, is compiled on disk) of all kernels of a family that Python calls in imported modules."""
    return [
        (_name(dispatcher), _is_saved(dispatcher, types)) for dispatcher, types in _entries.get(family, [])
    ]


def compile_entry(family: str, number: int) -> None:
    """Compile and save the kernel with this index in :func:`entries`, unless it is on disk."""
    _load_or_compile(*_entries[family][number])


def _is_saved(dispatcher: Any, arguments: tuple[types.Type, ...]) -> bool:
    cache = dispatcher._cache
    file = getattr(cache, "_cache_file", None)
    if file is None:  # the kernel is not cached
        return False
    data = file._load_index().get(cache._index_key(tuple(arguments), dispatcher.targetctx.codegen()))
    return data is not None and os.path.exists(file._data_path(data))


def _name(dispatcher: Any) -> str:
    function = dispatcher.py_func
    return f"{function.__module__.removeprefix(_ROOT.name + '.')}.{function.__qualname__}"


def _load_or_compile(dispatcher: Any, arguments: tuple[types.Type, ...]) -> None:
    """Load a kernel from disk, or compile it for these argument types.

    If several processes of a machine need the kernel, one compiles it while the others wait and then load it.
    """
    cache, name = dispatcher._cache, _name(dispatcher)
    load = cache.load_overload
    with contextlib.ExitStack() as stack:

        @functools.wraps(load)
        def wait_and_load(sig: object, context: object) -> object:
            found = load(sig, context)
            if found is None:
                stack.enter_context(report_compilation(name))
                key = hashlib.blake2b(repr((name, cache.cache_path, sig)).encode(), digest_size=5)
                stack.enter_context(_hold_lock(f"{key.hexdigest()}.lock", _compile_timeout))
                found = load(sig, context)
            return found

        cache.load_overload = wait_and_load
        stack.callback(setattr, cache, "load_overload", load)
        # The compiler creates many objects, and keeps them. The garbage collector would scan them many times
        # and free almost nothing, which takes a tenth of the compilation.
        if gc.isenabled():
            gc.disable()
            stack.callback(gc.enable)
        dispatcher.compile(tuple(arguments))


def entry(*arguments: types.Type, **options: Any) -> Callable[[Any], Any]:
    """Return a decorator for kernels that Python calls.

    A kernel is compiled at its first call, for the types ``arguments``. Without these types, numba would
    compile the kernel again for read-only arrays (memmaps, cached rows) and for each memory layout, which
    takes seconds. Use :func:`in_array` for arrays that the kernel only reads, and :func:`out_array` for
    arrays that it writes. ``options`` are those of :func:`kernel`.
    """

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        dispatcher, lock = kernel(function, **options), threading.Lock()
        done: list[bool] = []

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            if not done:
                with lock:
                    if not done:
                        _load_or_compile(dispatcher, arguments)
                        dispatcher.disable_compile()
                        done.append(True)
            return dispatcher(*args)

        _entries.setdefault(_family(function.__module__), []).append((dispatcher, arguments))
        return call

    return wrap


def in_array(dtype: str, ndim: int) -> types.Array:
    """Return the type of a C-contiguous array that the kernel only reads; it accepts writable arrays."""
    return numba.types.Array(numba.from_dtype(np.dtype(dtype)), ndim, "C", readonly=True)


def out_array(dtype: str, ndim: int) -> types.Array:
    """Return the type of a C-contiguous array that the kernel writes, and may also read."""
    return numba.types.Array(numba.from_dtype(np.dtype(dtype)), ndim, "C")
