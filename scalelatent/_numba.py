"""numba's settings, once for the whole package.

Kernels release the GIL and are serial: parallelism is Dask's, or ``n_jobs`` threads over spans.
``error_model="numpy"`` and the ``contract`` flag let LLVM vectorise divisions and form fused multiply-adds;
sums keep the order in which they are written, so that a kernel gives the same bits on every worker of one
kind of CPU.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba
import numpy as np

# float32 in this machine's widest vectors. No sum runs over lanes, so no bit of a result depends on it.
# SCALELATENT_LANES is for tests: it runs the kernels of other machines, in vectors that LLVM puts together.
LANES = int(
    os.environ.get("SCALELATENT_LANES", 16 if llvmlite.binding.get_host_cpu_features().get("avx512f") else 8)
)


def _sources_digest() -> str:
    # numba looks at the file of the outer function only: a kernel inlined from another file would stay as it
    # was. In data/ only some files hold kernels.
    root = Path(__file__).parent
    data = (f for f in root.glob("data/**/*.py") if b"_numba" in f.read_bytes())
    files = sorted([*root.glob("models/**/*.py"), *data, Path(__file__)])
    stamps = [(str(f.relative_to(root)), f.stat().st_mtime_ns, f.stat().st_size) for f in files]
    # numba's own key has the target of the compiler, and not what SCALELATENT_LANES says. Another version of
    # it would write over files of an index that it does not read.
    return hashlib.blake2b(repr((stamps, LANES, numba.__version__)).encode(), digest_size=5).hexdigest()


def _cache() -> str:
    given, digest = os.environ.get("NUMBA_CACHE_DIR"), _sources_digest()
    if given:
        return str(Path(given) / f"scalelatent-{digest}")
    name = f"numba-{platform.node() or 'host'}-{digest}"
    # Compiled kernels in a folder of this host: caches on shared file systems race and are slow (numba issues
    # 4807, 10128).
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(base) / "scalelatent" / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        user = os.getuid() if hasattr(os, "getuid") else 0
        folder = Path(tempfile.gettempdir()) / f"scalelatent-{user}" / name
    return str(folder)


CACHE = _cache()


# Seconds that a process waits to save kernels, until it has once waited in vain; the next process compiles
# anew what was not saved.
_patience = [10.0]
_POLL_SECONDS = 0.01


def _take(lock: Any) -> bool:
    """Lock a file that other processes lock too; False where one of them does not let go of it."""
    import fcntl

    begin = time.monotonic()
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() - begin >= _patience[0]:
                _patience[0] = 0.0
                return False
            time.sleep(_POLL_SECONDS)
        else:
            return True


@contextlib.contextmanager
def _alone() -> Iterator[bool]:
    """Whether to save a kernel: False while another process does. Where the system or the file system has no
    locks on files nobody is kept out.
    """
    held = True
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            Path(CACHE).mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open(Path(CACHE) / "lock", "ab"))
            held = _take(lock)
            if held:  # closing the file would not do: a process forked in the meantime has it open too
                stack.callback(fcntl.flock, lock, fcntl.LOCK_UN)
        yield held


def _saved_alone(dispatcher: Any) -> Any:
    """A dispatcher that takes turns with other processes at saving what it compiled.

    numba numbers the files of a function's specialisations in the order in which they are saved: of two
    processes at it at once one may write its code into the file that the other one's is listed with, and who
    loads it has another kernel, in silence.
    """
    save = dispatcher._cache.save_overload

    @functools.wraps(save)
    def alone(sig: Any, data: Any) -> None:
        with _alone() as held:
            if held:
                save(sig, data)

    dispatcher._cache.save_overload = alone
    return dispatcher


DEFAULTS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "cache": True, "fastmath": {"contract"}}


def kernel(function: Any, **options: Any) -> Any:
    """Compile a kernel with the package's settings, or with ``options`` of numba that differ.

    Examples
    --------
    >>> @kernel
    ... def twice(x):
    ...     return 2 * x
    >>> twice(2)
    4
    """
    # The place is fixed when the function is decorated; other packages keep theirs.
    config: Any = numba.config
    before, config.CACHE_DIR = config.CACHE_DIR, CACHE
    try:
        return _saved_alone(numba.njit(**DEFAULTS | options)(function))
    except RuntimeError:  # numba knows no cache for functions that lie in no file
        return numba.njit(**DEFAULTS | options | {"cache": False})(function)
    finally:
        config.CACHE_DIR = before


class part:  # noqa: N801  a decorator
    """A piece of other kernels: nothing is compiled, or kept on disk, for calls of it from Python.

    Examples
    --------
    >>> @part
    ... def plus_one(x):
    ...     return x + 1
    >>> kernel(lambda x: plus_one(x))(2)
    3
    """

    def __init__(self, function: Any) -> None:
        options = {"cache": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
        self._dispatcher: Any = numba.njit(**DEFAULTS | options)(function)
        functools.update_wrapper(self, function)

    @property
    def _numba_type_(self) -> Any:
        return self._dispatcher._numba_type_

    def __call__(self, *args: Any) -> Any:
        raise TypeError(f"{self._dispatcher.__name__} is a part of other kernels, which alone can call it")


def entry(*arguments: Any) -> Callable[[Any], Any]:
    """A kernel called from Python: compiled once, at its first call, for the given argument types.

    Left to itself numba compiles anew for read-only arrays (memmaps, cached rows) and for each memory layout,
    seconds each time. Arrays that a kernel does not write are declared by :func:`given`.

    Examples
    --------
    >>> @entry(given("f8", 1))
    ... def total(x):
    ...     return x.sum()
    >>> import numpy as np
    >>> float(total(np.frombuffer(np.ones(3).tobytes())))
    3.0
    """

    def wrap(function: Any) -> Any:
        dispatcher, lock = kernel(function), threading.Lock()
        done: list[bool] = []

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            if not done:
                with lock:
                    if not done:
                        dispatcher.compile(tuple(arguments))
                        dispatcher.disable_compile()
                        done.append(True)
            return dispatcher(*args)

        return call

    return wrap


def given(dtype: str, ndim: int) -> Any:
    """Type of a C-contiguous array that the kernel only reads; writable arrays are taken too."""
    return numba.types.Array(numba.from_dtype(np.dtype(dtype)), ndim, "C", readonly=True)


def filled(dtype: str, ndim: int) -> Any:
    """Type of a C-contiguous array that the kernel writes."""
    return numba.types.Array(numba.from_dtype(np.dtype(dtype)), ndim, "C")
