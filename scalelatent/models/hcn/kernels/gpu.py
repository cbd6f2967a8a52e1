"""Message updates of all pixels in CuPy: launches of the CUDA kernels in ``gpu.cu``.

One thread block updates the belief-propagation messages of one chain (a sequence of minibatches that one task
learns), or decodes one image (infers its feature positions). Arrays stay on the device; only the numbers of
changed pixels return to the host. A thread block updates one pixel after another, so each update waits for
memory. Therefore the block holds its log odds in the fast shared memory if they fit there.
"""

from __future__ import annotations

from functools import cache, lru_cache

import cupy
import numpy as np

from scalelatent.kernels.cuda import Kernels, current_device
from scalelatent.kernels.streams import stage_word

from .units import FIXED_WEIGHT
from .windows import message_room, message_starts

_launch = Kernels(__package__, 256).launch


def _to_int32(*numbers: int) -> tuple[np.int32, ...]:
    return tuple(np.int32(n) for n in numbers)


def _find_message_starts(
    image_shape: tuple[int, ...], window_shape: tuple[int, ...], n_features: int
) -> cupy.ndarray:
    """Return the index of each pixel's first belief-propagation message in an array, int32, on the device."""
    # Each CUDA stream has its own copy: CuPy may reuse memory only in the stream that used it before.
    return _copy_message_starts(
        current_device(), cupy.cuda.get_current_stream().ptr, image_shape, window_shape, n_features
    )


@lru_cache(maxsize=64)
def _copy_message_starts(
    device: int, stream: int, image_shape: tuple[int, ...], window_shape: tuple[int, ...], n_features: int
) -> cupy.ndarray:
    return cupy.asarray(message_starts(image_shape, window_shape, n_features).astype(np.int32))


# Bytes of shared memory that a thread block uses in addition to the log odds of positions and weights.
_STATIC_BYTES = 1024
# Codes for what a kernel copies to shared memory: no log odds, those of weights (W), or those of weights and
# of positions (S). In gpu.cu, W_SHARED (1) and S_SHARED (2) are the bits of these codes.
_NONE, _W_SHARED, _BOTH_SHARED = 0, 1, 3


@cache
def _read_device_limits(device: int) -> tuple[int, int]:
    """Return two limits of a device: bytes of shared memory per thread block, number of multiprocessors."""
    properties = cupy.cuda.runtime.getDeviceProperties(device)
    return int(properties["sharedMemPerBlockOptin"]) - _STATIC_BYTES, int(properties["multiProcessorCount"])


def _choose_shared(blocks: int, places: int, weights: int) -> tuple[np.int32, int]:
    """Return the code of the log odds that a thread block copies to shared memory, and their bytes.

    The log odds of positions (S) are copied only if all ``blocks`` thread blocks can still run at the same
    time; those of weights alone are copied if they need at most an eighth of the shared memory. ``places``
    and ``weights`` are the numbers of positions and of weights of one thread block.
    """
    room, processors = _read_device_limits(current_device())
    both, alone = 4 * (places + weights), 4 * weights
    if both <= room and blocks <= processors * (room // both):
        return np.int32(_BOTH_SHARED), both
    return (np.int32(_W_SHARED), alone) if alone <= room // 8 else (np.int32(_NONE), 0)


def shuffled(seed: int, purpose: str, epoch: int, rows: np.ndarray, n: int) -> cupy.ndarray:
    """Return for each row number a random permutation of 0 to n - 1, int32 (rows, n), on the device."""
    out = cupy.empty((len(rows), n), dtype=np.int32)
    words = (np.uint64(x) for x in (seed, stage_word(purpose), epoch))
    numbers = cupy.asarray(np.ascontiguousarray(rows, np.int64))
    _launch("hcn_shuffle", (-(-len(rows) // 256),), *words, numbers, *_to_int32(len(rows), n), out)
    return out


def sweep(evidence: cupy.ndarray, order: cupy.ndarray, s: cupy.ndarray, w: cupy.ndarray) -> None:
    """Update log odds ``s`` and ``w`` in place by new messages of all pixels; see `reference.sweep`."""
    images = evidence.shape[1:]
    sizes = _to_int32(order.shape[1], *images, *w.shape[2:])
    shared, size = _choose_shared(len(order), s[0].size, w[0].size)
    _launch("hcn_sweep", (len(order),), evidence, order, *sizes, s, w, shared, shared_bytes=size)


def sweep_messages(
    evidence: cupy.ndarray, order: cupy.ndarray, s: cupy.ndarray, w: cupy.ndarray, to_s: cupy.ndarray,
    to_w: cupy.ndarray, held: cupy.ndarray, damping: float,
) -> np.ndarray:  # fmt: skip
    """Update all stored belief-propagation messages; return the number of changed pixels per chain.

    A chain is a sequence of minibatches, or a range of images, that one task learns. A pixel has changed if
    one of its messages has changed. `reference.sweep_messages` describes the arrays, which are on the device.
    """
    sizes = _to_int32(order.shape[1], *evidence.shape[1:], *w.shape[2:])
    begins = _find_message_starts(evidence.shape[3:], w.shape[2:4], w.shape[4])
    moved = cupy.empty(len(order), dtype=np.int32)
    messages = (to_s, to_w, held, np.int32(to_s.shape[3]), begins, np.float32(damping))
    name = "hcn_sweep_messages" if to_s.dtype == np.int16 else "hcn_sweep_wide_messages"
    shared, size = _choose_shared(len(order), s[0].size, w[0].size)
    _launch(name, (len(order),), evidence, order, *sizes, s, w, shared, *messages, moved, shared_bytes=size)
    return moved.get().astype(np.int64)


def decode_images(
    evidence: cupy.ndarray, order: cupy.ndarray, s: cupy.ndarray, w: cupy.ndarray, n_sweeps: int
) -> np.ndarray:
    """Add the messages of pixels to the prior log odds ``s`` of feature positions, in up to n_sweeps sweeps.

    Return for each image the number of pixels whose belief-propagation messages changed in the last sweep.
    ``w`` is on the host, and the other arrays are on the device; `reference.decode_images` describes them.
    """
    layout = evidence.shape[2:], w.shape[1:3], w.shape[3]
    begins, room = _find_message_starts(*layout), message_room(*layout)
    messages = cupy.zeros((*evidence.shape[:2], room), dtype=np.int16)
    hard = cupy.asarray(np.where(w, np.int32(FIXED_WEIGHT), np.int32(-FIXED_WEIGHT)))
    moved = cupy.empty(len(order), dtype=np.int32)
    sizes = _to_int32(order.shape[1], *evidence.shape[1:], *w.shape[1:])
    shared, size = _choose_shared(len(order), s[0].size, hard.size)
    rest = (s, hard, shared, messages, np.int32(room), begins, np.int32(n_sweeps))
    _launch("hcn_decode_images", (len(order),), evidence, order, *sizes, *rest, moved, shared_bytes=size)
    return moved.get().astype(np.int64)
