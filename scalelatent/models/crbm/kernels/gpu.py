"""The inference kernels in CuPy: launches of the kernels of ``gpu.cu``, a thread block or a cluster a graph.

Where the card has clusters of thread blocks (compute capability 9.0 on), eight blocks work on a large graph,
and its messages stay in their shared memory where they fit. Otherwise messages lie in global memory, for as
many graphs as fit ``MESSAGE_BYTES``, however many rows there are: a sweep reads them three times and writes
them once, and reads A twice, the second time both out of the first-level cache: 16 bytes an edge of
second-level cache beside two dozen operations and one division. Biases are not checked: a row with a
NaN bias has NaN among its log odds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import cupy
import numpy as np

from scalelatent.kernels.arrays import Array
from scalelatent.kernels.cuda import Kernels, current_device

from .inference import BLOCKS, MESSAGE_BYTES, Inference, check_graphs, limits_of

THREADS = 512  # of a thread block, as in gpu.cu
# Graphs of so many edges are worth a cluster; by the graph alone, so that the batch does not change a bit.
CLUSTER_EDGES = 2**14
_STATIC_BYTES = 8192  # of shared memory, for what the kernels have beside messages
_LEAST_PROCESSORS = 16  # slices of a card with fewer may not have room for eight blocks at once
_NULL = np.uint64(0)  # a null pointer
_kernels = Kernels(__package__, THREADS)
_launch = _kernels.launch


@dataclass(frozen=True)
class DeviceCoupling:
    """Couplings on the device."""

    # w, a: float32 (v, h): W and exp(W)
    w: cupy.ndarray
    a: cupy.ndarray
    # factors, limit: As of :class:`.cpu.coupling.Coupling`
    factors: int
    limit: float


def make_coupling(w: Array) -> DeviceCoupling:
    """See :func:`.reference.make_coupling`; ``w`` on the host or on the device, where it stays."""
    w = cupy.ascontiguousarray(cupy.asarray(w, dtype=np.float32))
    factors, limit = limits_of(w)
    return DeviceCoupling(w, cupy.exp(w), factors, limit)


def sum_product(
    coupling: DeviceCoupling,
    bv: Array,
    bh: Array,
    n_sweeps: int,
    tol: float | None = None,
    damping: float = 1.0,
) -> Inference:
    """See :func:`.reference.sum_product`; results lie on the device."""
    return _run("sum_product", coupling, bv, bh, n_sweeps, tol, damping=damping)


def sum_product_pairs(
    coupling: DeviceCoupling, bv: Array, bh: Array, n_sweeps: int, tol: float | None, pairs: cupy.ndarray,
    damping: float = 1.0,
) -> Inference:  # fmt: skip
    """See :func:`.reference.sum_product_pairs`; ``pairs`` on the device, C-contiguous."""
    if pairs.shape != coupling.w.shape:
        raise ValueError(f"pairs of shape {pairs.shape} are wanted in the shape of W, {coupling.w.shape}")
    return _run("sum_product", coupling, bv, bh, n_sweeps, tol, pairs, damping)


def bethe(
    coupling: DeviceCoupling, bv: Array, bh: Array, n_sweeps: int, tol: float | None = None
) -> cupy.ndarray:
    pairs = cupy.empty(coupling.w.shape, dtype=np.float32)
    return _run("sum_product", coupling, bv, bh, n_sweeps, tol, pairs).log_z


def mixed_product(
    coupling: DeviceCoupling, bv: Array, bh: Array, n_sweeps: int, tol: float | None = None
) -> Inference:
    return _run("mixed_product", coupling, bv, bh, n_sweeps, tol)


def max_product(
    coupling: DeviceCoupling,
    bv: Array,
    bh: Array,
    n_sweeps: int,
    tol: float | None = None,
    damping: float = 1.0,
) -> Inference:
    return _run("max_product", coupling, bv, bh, n_sweeps, tol, damping=damping)


def mean_field(
    coupling: DeviceCoupling, bv: Array, bh: Array, n_sweeps: int, tol: float | None = None
) -> Inference:
    return _run("mean_field", coupling, bv, bh, n_sweeps, tol)


@cache
def _card(device: int) -> tuple[bool, int]:
    """(it has clusters of thread blocks, bytes of shared memory for a block's messages)."""
    told = cupy.cuda.runtime.getDeviceProperties(device)
    has_clusters = told["major"] >= 9 and told["multiProcessorCount"] >= _LEAST_PROCESSORS
    return has_clusters, int(told["sharedMemPerBlockOptin"]) - _STATIC_BYTES


def _way(method: str, v: int, h: int) -> tuple[str, int, int]:
    """(kernel, thread blocks of a graph, bytes of messages that a block keeps)."""
    has_clusters, room = _card(current_device())
    if v * h < CLUSTER_EDGES or not has_clusters:
        return f"crbm_{method}", 1, 0
    kept = 4 * -(-v // BLOCKS) * h
    if method in ("sum_product", "max_product") and kept <= room:
        return f"crbm_{method}_kept", BLOCKS, kept
    return f"crbm_{method}_cluster", BLOCKS, 0


def _run(
    method: str, coupling: DeviceCoupling, bv: Array, bh: Array, n_sweeps: int, tol: float | None,
    pairs: cupy.ndarray | None = None, damping: float = 1.0,
) -> Inference:  # fmt: skip
    (v, h), rows = coupling.w.shape, len(bv)
    check_graphs((v, h), bv.shape, bh.shape, n_sweeps, tol, damping)
    bv, bh = (cupy.ascontiguousarray(cupy.asarray(b, dtype=np.float32)) for b in (bv, bh))
    lv, lh = (cupy.empty((rows, n), dtype=np.float32) for n in (v, h))
    sweeps, change = cupy.empty(rows, dtype=np.int32), cupy.empty(rows, dtype=np.float32)
    log_z = cupy.empty(rows, dtype=np.float64)
    multiplied = method in ("sum_product", "mixed_product")
    matrices = (coupling.a if multiplied else coupling.w), coupling.w
    name, blocks, kept = _way(method, v, h)
    stored = method in ("sum_product", "max_product") and not kept
    group = max(1, min(rows, MESSAGE_BYTES // (4 * v * h))) if stored or pairs is not None else max(rows, 1)
    m = cupy.empty((group, v, h) if stored else (1, 1, 1), dtype=np.float32)
    c = _NULL if pairs is None else cupy.empty((group, v, h), dtype=np.float32)
    tv, th, uh = (cupy.empty((group, n), dtype=np.float32) for n in (v, h, h))
    told = (
        cupy.empty((group, blocks, h), dtype=np.float32),
        cupy.empty((group, blocks), dtype=np.float32),
        cupy.empty((group, blocks), dtype=np.float64),
    )
    limit, factors = np.float32(coupling.limit), np.int32(coupling.factors)
    stop = np.float32(-1.0 if tol is None else tol)
    settings = np.int32(n_sweeps), stop, np.float32(damping), factors, limit
    for first in range(0, rows, group):
        part = slice(first, first + group)
        results = lv[part], lh[part], sweeps[part], change[part], c, log_z[part]
        inputs = *matrices, np.int32(v), np.int32(h), bv[part], bh[part], *settings
        graphs = len(bv[part])
        _launch(name, (graphs * blocks,), *inputs, m, tv, th, uh, *results, *told, shared_bytes=kept)
        if pairs is not None:
            adding = "crbm_add_pairs_f4" if pairs.dtype == np.float32 else "crbm_add_pairs_f8"
            sizes = np.int32(graphs), np.int32(v), np.int32(h)
            _launch(adding, (-(-v * h // THREADS),), c, th, *sizes, pairs)
    return Inference(lv, lh, sweeps, change, None if pairs is None else log_z)
