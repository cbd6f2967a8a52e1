"""The backend table: (kernel, backend) -> function, and the few array operations that differ between host and
device.

A worker is one kind of thing: numba kernels over numpy, or CuPy. Nothing falls back in silence: a device that
was asked for and is not there is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from scalelatent.contract.kinds import find_kernels, kernel_names, load
from scalelatent.contract.parameters import DEVICES
from scalelatent.errors import RunError
from scalelatent.kernels.vectors import aligned


class DeviceMemoryError(RunError):
    """The memory of a card has ended: naming the card, what was wanted, and what to set."""


@cache
def find_kernel(name: str, backend: str) -> Callable[..., Any]:
    """The body of a kernel for a backend.

    Raises
    ------
    RunError
        No such kernel, or no body for that backend: naming what there is.

    Examples
    --------
    >>> find_kernel("capsule_residuals", "reference").__name__
    'residuals'
    """
    bodies = find_kernels(name)
    if bodies is None or backend not in bodies:
        there = kernel_names() if bodies is None else sorted(bodies)
        raise RunError(f"kernel {name!r} has no body for backend {backend!r}; there are: {', '.join(there)}")
    return load(bodies[backend])


class HostBackend:
    """numpy arrays and numba kernels (``name="numba"``), or the reference kernels in float64
    (``name="reference"``).

    Buffers are kept by name and used again for every block: fresh pages for each block cost more than the
    kernel on them. An instance therefore belongs to one thread.
    """

    xp = np
    # What means that a card's memory has ended, see :mod:`.halving`: nothing does here.
    memory_errors: tuple[type[Exception], ...] = ()

    def __init__(self, name: str = "numba") -> None:
        self.name = name
        self.row_limits: dict[str, int] = {}
        self._buffers: dict[str, np.ndarray] = {}

    def kernel(self, name: str) -> Callable[..., Any]:
        """The kernel's body for this backend."""
        return find_kernel(name, self.name)

    def buffer(self, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Scratch of this shape, valid until the same name is asked for again."""
        size = math.prod(shape)
        kept = self._buffers.get(name)
        if kept is None or kept.size < size or kept.dtype != dtype:
            kept = self._buffers[name] = aligned((size,), dtype)
        return kept[:size].reshape(shape)

    def asarray(self, a: np.ndarray, dtype: Any, name: str | None = None) -> np.ndarray:
        """``a`` as a contiguous array of ``dtype``: itself where it is one already, else a copy (in the named
        buffer).
        """
        dtype = np.dtype(np.float64) if self.name == "reference" else np.dtype(dtype)
        if a.dtype == dtype and a.flags.c_contiguous:
            return a
        if name is None:
            return np.ascontiguousarray(a, dtype=dtype)
        out = self.buffer(name, a.shape, dtype)
        np.copyto(out, a, casting="unsafe")
        return out

    def take(self, a: np.ndarray, rows: np.ndarray, name: str) -> np.ndarray:
        """Rows of ``a`` in a named buffer."""
        out = self.buffer(name, (len(rows), *a.shape[1:]), a.dtype)
        return np.take(a, rows, axis=0, out=out, mode="clip")

    def matmul(self, a: np.ndarray, b: np.ndarray, name: str) -> np.ndarray:
        """Matrix product in a named buffer."""
        return np.matmul(a, b, out=self.buffer(name, (a.shape[0], b.shape[1]), a.dtype))

    def table(self, table: Any) -> Any:
        """A table of a kernel, where the kernel wants it."""
        return table

    def to_host(self, a: np.ndarray) -> np.ndarray:
        """The same array: it is on the host."""
        return a


def gpu_count() -> int:
    """CUDA devices that CuPy can use here; 0 without CuPy or driver.

    Examples
    --------
    >>> gpu_count() >= 0
    True
    """
    try:
        import cupy

        return int(cupy.cuda.runtime.getDeviceCount())
    except Exception:  # noqa: BLE001  no CuPy, no driver, no device: all mean 0 here
        return 0


def resolve_device(device: str) -> str:
    """``"cpu"`` or ``"gpu"`` for this process.

    Raises
    ------
    RunError
        ``device="gpu"`` without a usable GPU.
    ValueError
        An unknown name.

    Examples
    --------
    >>> resolve_device("cpu")
    'cpu'
    """
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


def make_backend(device: str) -> Any:
    """A backend of this process for ``"cpu"``, ``"gpu"`` or ``"reference"``; one for each thread.

    Examples
    --------
    >>> make_backend("cpu").name
    'numba'
    """
    if device == "reference":
        return HostBackend("reference")
    if resolve_device(device) == "gpu":
        from .device import CupyBackend

        return CupyBackend()
    return HostBackend()
