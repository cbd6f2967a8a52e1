"""Sweeps over AND-OR trees in CuPy: launches of the kernels of ``gpu.cu``, one thread block per chain or row.

Arrays are on the device and are changed there; only the counts of changed trees return to the host.
"""

from __future__ import annotations

import cupy
import numpy as np

from scalelatent.kernels.cuda import Kernels
from scalelatent.kernels.streams import stage_word

from .units import HARD
from .windows import MESSAGE_ROOM, message_starts

_launch = Kernels(__package__, 256).launch


def _sizes(*numbers: int) -> tuple[np.int32, ...]:
    return tuple(np.int32(n) for n in numbers)


def _begins(image: tuple[int, ...], window: tuple[int, ...], n_features: int) -> tuple[cupy.ndarray, int]:
    """Return the positions of the messages of each pixel, on the device, and the number of messages."""
    begins = message_starts(image, window, n_features)
    return cupy.asarray(begins.astype(np.int32)), int(begins[-1])


def shuffled(seed: int, purpose: str, epoch: int, rows: np.ndarray, n: int) -> cupy.ndarray:
    """See :func:`..pixel_order.shuffled`; on the device."""
    out = cupy.empty((len(rows), n), dtype=np.int32)
    words = (np.uint64(x) for x in (seed, stage_word(purpose), epoch))
    numbers = cupy.asarray(np.ascontiguousarray(rows, np.int64))
    _launch("hcn_shuffle", (-(-len(rows) // 256),), *words, numbers, *_sizes(len(rows), n), out)
    return out


def sweep(evidence: cupy.ndarray, order: cupy.ndarray, s: cupy.ndarray, w: cupy.ndarray) -> None:
    """See :func:`..reference.sweep`; all int32, on the device."""
    images = evidence.shape[1:]
    sizes = _sizes(order.shape[1], *images, *w.shape[2:])
    _launch("hcn_sweep", (len(order),), evidence, order, *sizes, s, w)


def sweep_messages(
    evidence: cupy.ndarray, order: cupy.ndarray, s: cupy.ndarray, w: cupy.ndarray, to_s: cupy.ndarray,
    to_w: cupy.ndarray, held: cupy.ndarray, damping: float,
) -> np.ndarray:  # fmt: skip
    """See :func:`..reference.sweep_messages`; int32, uint8, and messages of int16 or int32, on the device."""
    sizes = _sizes(order.shape[1], *evidence.shape[1:], *w.shape[2:])
    begins, _ = _begins(evidence.shape[3:], w.shape[2:4], w.shape[4])
    moved = cupy.empty(len(order), dtype=np.int32)
    kept = (to_s, to_w, held, np.int32(to_s.shape[3]), begins, np.float32(damping))
    name = "hcn_sweep_messages" if to_s.dtype == np.int16 else "hcn_sweep_wide_messages"
    _launch(name, (len(order),), evidence, order, *sizes, s, w, *kept, moved)
    return moved.get().astype(np.int64)


def decode(
    evidence: cupy.ndarray, order: cupy.ndarray, s: cupy.ndarray, w: cupy.ndarray, n_sweeps: int
) -> np.ndarray:
    """See :func:`..reference.decode`; int32, and bool on the host, the rest on the device."""
    begins, pairs = _begins(evidence.shape[2:], w.shape[1:3], w.shape[3])
    room = pairs + MESSAGE_ROOM
    kept = cupy.zeros((*evidence.shape[:2], room), dtype=np.int16)
    hard = cupy.asarray(np.where(w, np.int32(HARD), np.int32(-HARD)))
    moved = cupy.empty(len(order), dtype=np.int32)
    sizes = _sizes(order.shape[1], *evidence.shape[1:], *w.shape[1:])
    rest = (s, hard, kept, np.int32(room), begins, np.int32(n_sweeps))
    _launch("hcn_decode", (len(order),), evidence, order, *sizes, *rest, moved)
    return moved.get().astype(np.int64)
