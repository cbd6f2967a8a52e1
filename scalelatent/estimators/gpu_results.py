"""Return results on the GPU if the rows are on a GPU, otherwise on the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import numpy as np

from scalelatent.data.read.containers import is_on_gpu, opened
from scalelatent.engine.backend import computes_on_gpu
from scalelatent.errors import DataError

if TYPE_CHECKING:
    from .base import StreamedEstimator

P = ParamSpec("P")
R = TypeVar("R")


def follows_rows(method: Callable[P, R]) -> Callable[P, R]:
    """Return a method of an estimator with the same results, as CuPy arrays if its rows X are on a GPU.

    The method itself receives a copy of these rows on the host. Numbers in one array, or in a tuple of
    arrays, are copied to the GPU of the rows. All other results keep their kind: labels that are strings, the
    frames of ``set_output``, and datasets of ``out``.
    """

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        model = cast("StreamedEstimator", args[0])
        X = args[1] if len(args) > 1 else kwargs.get("X")
        if not is_on_gpu(X) or kwargs.get("out") is not None:
            return method(*args, **kwargs)
        _check_computes_on_gpu(model, X)
        others: dict[str, Any] = {name: value for name, value in kwargs.items() if name != "X"}
        found = cast("Any", method)(model, opened(X, "X"), *args[2:], **others)
        return cast(
            R,
            tuple(_move_to_gpu(a, X) for a in found) if isinstance(found, tuple) else _move_to_gpu(found, X),
        )

    return call


def _check_computes_on_gpu(model: StreamedEstimator, X: Any) -> None:
    """Raise DataError for rows on a GPU if the model computes on the CPU."""
    if computes_on_gpu(model.device):
        return
    found = f"X is a {type(X).__module__.partition('.')[0]}.{type(X).__name__} on a GPU, "
    name, device = type(model).__name__, model.device
    if device == "auto":
        raise DataError(
            f"{found}but CuPy finds no GPU here, so {name} computes on the CPU (device='auto'). Install the "
            "extra scalelatent[cuda12] or [cuda13], or pass a copy of X on the host"
        )
    raise DataError(
        f"{found}but {name} has device={device!r} and returns results on the host. Call "
        "set_params(device='auto'), or pass a copy of X on the host"
    )


def _move_to_gpu(found: Any, X: Any) -> Any:
    """Return an array of numbers as a CuPy array on the GPU of the rows; return other results unchanged."""
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "biuf":
        return found
    import cupy

    device = getattr(X, "device", None)  # cuDF has none: its frames are on the current GPU
    number = getattr(device, "id", getattr(device, "index", None))  # CuPy has "id", torch has "index"
    with cupy.cuda.Device(number):
        return cupy.asarray(found)
