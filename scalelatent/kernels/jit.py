"""numba's settings, once for the whole package.

Kernels release the GIL and are serial: parallelism is Dask's, or ``n_jobs`` threads over spans.
``error_model="numpy"`` and the ``contract`` flag let LLVM vectorise divisions and form fused multiply-adds;
sums keep the order in which they are written, so that a kernel gives the same bits on every worker of one
kind of CPU.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llvmlite.binding
import numba
import numpy as np

from scalelatent import _file_locks

from .cache_folder import CACHE
from .compile_observers import report_compilation
from .parts import PartCompiler

if TYPE_CHECKING:
    from numba import types

# float32 in this machine's widest vectors. No sum runs over lanes, so no bit of a result depends on it.
# SCALELATENT_LANES is for tests: it runs the kernels of other machines, in vectors that LLVM puts together.
LANES = int(
    os.environ.get("SCALELATENT_LANES", 16 if llvmlite.binding.get_host_cpu_features().get("avx512f") else 8)
)


_ROOT = Path(__file__).parent.parent


# One family: a program that makes or imports rows needs few of either.
_MAKERS_OF_ROWS = ("generators", "importers")


def _family(module: str) -> str:
    """Which kernels share a folder: those of a model, of what models share, of another package."""
    package, *names = module.split(".")
    if package != _ROOT.name or not names:
        return "other"
    if names[0] == "models" and len(names) > 1:
        return names[1]
    return "data" if names[0] in _MAKERS_OF_ROWS else names[0]


def _sources(family: str) -> list[Path]:
    """The files that kernels of a family can come from. Of other folders only some files hold kernels."""
    shared = [*_ROOT.glob("kernels/*.py")]
    if (_ROOT / "models" / family).is_dir():
        rooms = [_ROOT / "models" / family / room for room in ("kernels", "model")]
        return [*shared, *(f for room in rooms for f in room.glob("**/*.py"))]
    folders = _MAKERS_OF_ROWS if family == "data" else (family,) if (_ROOT / family).is_dir() else ("",)
    here = (f for folder in folders for f in (_ROOT / folder).glob("**/*.py"))
    return [*shared, *(f for f in here if b"kernels.jit" in f.read_bytes())]


@functools.cache
def _digest(family: str) -> str:
    # numba looks at the file of the outer function only: a kernel inlined from another file would stay as it
    # was. Contents, not times: the same version installed again has the same kernels.
    digest = hashlib.blake2b(digest_size=5)
    for file in sorted(set(_sources(family))):
        digest.update(repr((str(file.relative_to(_ROOT)), file.read_bytes())).encode())
    # numba's own key has the target of the compiler, and not what SCALELATENT_LANES says. Another version of
    # it would write over files of an index that it does not read.
    digest.update(repr((LANES, numba.__version__)).encode())
    return digest.hexdigest()


# Kernels of other versions that were not loaded for so long are removed.
KEEP_DAYS = 30.0
_TOUCHED_DAYS = 1.0
_FOLDER = r"[a-z_]+-[0-9a-f]{10}"


@functools.cache
def _folder(family: str) -> str:
    """Where the kernels of a family lie; that they are in use is noted once a day."""
    folder = Path(CACHE) / f"{family}-{_digest(family)}"
    with contextlib.suppress(OSError):
        if time.time() - folder.stat().st_mtime > _TOUCHED_DAYS * 86400:
            os.utime(folder)
    return str(folder)


def remove_unused(days: float = KEEP_DAYS) -> list[str]:
    """Remove kernels of other versions that were not loaded for some days; returns their folders.

    A process that runs with such a version finds none of them and compiles its own.
    """
    base, before, removed = Path(CACHE), time.time() - days * 86400, []
    # Earlier versions had one folder for all kernels, beside this one.
    found = [(base, _FOLDER), (base.parent, re.escape(base.name) + "-[0-9a-f]{10}")]
    for place, name in found:
        with contextlib.suppress(OSError):
            for folder in place.iterdir():
                if not re.fullmatch(name, folder.name) or folder.is_symlink() or not folder.is_dir():
                    continue
                if folder.stat().st_mtime < before:
                    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
                    folder.rename(aside)  # at once: no process finds half of it
                    shutil.rmtree(aside, ignore_errors=True)
                    removed.append(str(folder))
    return removed


# Seconds that a process waits to save kernels, until it has once waited in vain; the next process compiles
# again what was not saved.
_patience = [10.0]
# Seconds that it waits for another process to compile what it needs; then it compiles that itself.
_compile_patience = [120.0]


@contextlib.contextmanager
def _alone(name: str = "lock", patience: list[float] | None = None) -> Iterator[bool]:
    """Whether to save a kernel, or to compile that of the name: False while another process does."""
    held, patience = True, _patience if patience is None else patience
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            Path(CACHE).mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open(Path(CACHE) / name, "ab")).fileno()
            held = _file_locks.take(lock, patience[0]) is not False
            if held:
                stack.callback(_file_locks.give_back, lock)
            else:
                patience[0] = 0.0
        yield held


def _saved_alone(dispatcher: Any) -> Any:
    """A dispatcher that takes turns with other processes at saving what it compiled.

    numba numbers the files of a function's specialisations in the order in which they are saved: of two
    processes at it at once one may write its code into the file that the other one's is listed with, and who
    loads it has another kernel, in silence.
    """
    save = dispatcher._cache.save_overload

    @functools.wraps(save)
    def alone(sig: object, data: object) -> None:
        with _alone() as held:
            if held:
                save(sig, data)
                _clean()

    dispatcher._cache.save_overload = alone
    return dispatcher


@functools.cache
def _clean() -> None:
    """Remove what is not used, once a process."""
    remove_unused()


DEFAULTS: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",
    "cache": True,
    "fastmath": {"contract"},
    "no_cfunc_wrapper": True,  # no C code calls a kernel
}


# numba has one setting of the place for all threads, and writes to the working folder where it is empty.
_placing = threading.Lock()


@contextlib.contextmanager
def _placed(folder: str) -> Iterator[None]:
    """Have functions that are decorated meanwhile keep what is compiled in a folder."""
    config: Any = numba.config
    with _placing:
        before, config.CACHE_DIR = config.CACHE_DIR, folder
        try:
            yield
        finally:
            config.CACHE_DIR = before


def kernel(function: Callable[..., Any], **options: Any) -> Any:
    """Compile a kernel with the package's settings, or with ``options`` of numba that differ."""
    # The place is fixed when the function is decorated; other packages keep theirs.
    family = _family(function.__module__)
    try:
        with _placed(_folder(family)):
            dispatcher: Any = _saved_alone(numba.njit(**DEFAULTS | options)(function))
    except RuntimeError:  # numba knows no cache for functions that lie in no file
        return numba.njit(**DEFAULTS | options | {"cache": False})(function)
    if family != "other":
        # The folder's name stands for what the file holds; numba would take another time of it for a change.
        with contextlib.suppress(AttributeError):
            dispatcher._cache._cache_file._source_stamp = _digest(family)
    return dispatcher


class part:
    """A piece of other kernels: nothing is compiled, or kept on disk, for calls of it from Python."""

    def __init__(self, function: Callable[..., Any]) -> None:
        options = {"cache": False, "no_cpython_wrapper": True, "pipeline_class": PartCompiler}
        self._dispatcher: Any = numba.njit(**DEFAULTS | options)(function)
        functools.update_wrapper(self, function)

    @property
    def _numba_type_(self) -> types.Type:
        return self._dispatcher._numba_type_

    def __call__(self, *args: object) -> Any:
        """Refused: only kernels call it."""
        raise TypeError(f"{self._dispatcher.__name__} is a part of other kernels, which alone can call it")


# All entries of the modules that were imported, by family.
_entries: dict[str, list[tuple[Any, tuple[types.Type, ...]]]] = {}


def entries(family: str) -> list[tuple[str, bool]]:
    """Name of each entry of a family whose modules were imported, and whether it lies on disk compiled."""
    return [
        (_name(dispatcher), _is_saved(dispatcher, types)) for dispatcher, types in _entries.get(family, [])
    ]


def compile_entry(family: str, number: int) -> None:
    """Have one of :func:`entries` on disk."""
    _load_or_compile(*_entries[family][number])


def _is_saved(dispatcher: Any, arguments: tuple[types.Type, ...]) -> bool:
    cache = dispatcher._cache
    file = getattr(cache, "_cache_file", None)
    if file is None:  # nothing of it is kept
        return False
    data = file._load_index().get(cache._index_key(tuple(arguments), dispatcher.targetctx.codegen()))
    return data is not None and os.path.exists(file._data_path(data))


def _name(dispatcher: Any) -> str:
    function = dispatcher.py_func
    return f"{function.__module__.removeprefix(_ROOT.name + '.')}.{function.__qualname__}"


def _load_or_compile(dispatcher: Any, arguments: tuple[types.Type, ...]) -> None:
    """Have a kernel ready. One process of a machine compiles it, while the others wait and load it."""
    cache, name = dispatcher._cache, _name(dispatcher)
    load = cache.load_overload
    with contextlib.ExitStack() as stack:

        @functools.wraps(load)
        def wait_and_load(sig: object, context: object) -> object:
            found = load(sig, context)
            if found is None:
                stack.enter_context(report_compilation(name))
                key = hashlib.blake2b(repr((name, cache.cache_path, sig)).encode(), digest_size=5)
                stack.enter_context(_alone(f"{key.hexdigest()}.lock", _compile_patience))
                found = load(sig, context)
            return found

        cache.load_overload = wait_and_load
        stack.callback(setattr, cache, "load_overload", load)
        # The compiler makes many objects that stay. The collector would look through all objects of the
        # process again and again, a tenth of the seconds of a compilation, and find next to nothing.
        if gc.isenabled():
            gc.disable()
            stack.callback(gc.enable)
        dispatcher.compile(tuple(arguments))


def entry(*arguments: types.Type, **options: Any) -> Callable[[Any], Any]:
    """A kernel called from Python: compiled once, at its first call, for the given argument types; options as
    of `kernel`.

    Left to itself numba compiles again for read-only arrays (memmaps, cached rows) and each memory layout,
    seconds each time. Arrays that a kernel does not write are declared by :func:`given`.
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


def given(dtype: str, ndim: int) -> types.Array:
    """Type of a C-contiguous array that the kernel only reads; writable arrays are taken too."""
    return numba.types.Array(numba.from_dtype(np.dtype(dtype)), ndim, "C", readonly=True)


def filled(dtype: str, ndim: int) -> types.Array:
    """Type of a C-contiguous array that the kernel writes."""
    return numba.types.Array(numba.from_dtype(np.dtype(dtype)), ndim, "C")
