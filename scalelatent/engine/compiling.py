"""What a fit says while kernels are compiled, which happens once for a machine and version."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from scalelatent.kernels.jit import observed

from .callbacks import Callback

COMPILING = "compiling kernels (once for this machine)"


def kernel_event(kernel: str, seconds: float | None, **where: Any) -> dict[str, Any]:
    """The event that tells of a kernel that is compiled, before (no seconds) or after.

    Examples
    --------
    >>> kernel_event("models.capsule.cpu._tiled_estep", None)["message"]
    'compiling kernels (once for this machine)'
    >>> kernel_event("models.capsule.cpu._tiled_estep", 5.04)
    {'event': 'kernel_compiled', 'kernel': 'models.capsule.cpu._tiled_estep', 'seconds': 5.0}
    """
    if seconds is None:
        return {"event": "compiling_kernels", "kernel": kernel, **where, "message": COMPILING}
    return {"event": "kernel_compiled", "kernel": kernel, **where, "seconds": round(seconds, 1)}


@contextmanager
def telling_of_kernels(callbacks: Callback) -> Iterator[None]:
    """Tell callbacks of kernels that this process compiles, by the thread that does so."""
    with observed(lambda kernel, seconds: callbacks.on_event(kernel_event(kernel, seconds))):
        yield
