"""The inference kernels in CuPy: launches of ``gpu.cu`` with a thread block or a cluster per graph.

GPUs of compute capability 9.0 or later have clusters of thread blocks. There eight blocks work on a large
graph, and keep its messages in shared memory if they fit. Otherwise the messages are in global memory, for as
many graphs at a time as fit ``MESSAGE_BYTES``. A sweep reads messages three times, writes them once, and
reads exp(W) twice; the second read of both comes from the first-level cache. So an edge costs 16 bytes of
second-level cache, two dozen operations and one division. Biases are not checked: a row with a NaN bias has
NaN in its log odds.

In a learning step the graphs of all chains (parts of a batch) are computed together. Each chain sums its
gradient row by row, so that the bits of a chain do not depend on the other chains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import cupy
import numpy as np

from scalelatent.kernels.arrays import Array
from scalelatent.kernels.cuda import Kernels, current_device

from .inference import (
    BLOCKS,
    MESSAGE_BYTES,
    Inference,
    check_graphs,
    check_pairs,
    choose_limits,
    largest_magnitude,
)

THREADS, TOGETHER = 512, 8  # threads of a thread block, and rows of a block of crbm_positive in gpu.cu
# A graph with at least this many edges is computed by a cluster of thread blocks. Only the size of the graph
# decides this, so the result of a row is bit-identical in every batch.
CLUSTER_EDGES = 2**14
HELD_UNITS = 256  # largest h for which the beliefs of hidden units stay in registers during a sweep
_STATIC_BYTES = 8192  # bytes of shared memory that the kernels use besides the messages
_LEAST_PROCESSORS = 16  # a GPU with fewer multiprocessors may be unable to run eight blocks at once
_NULL = np.uint64(0)  # a null pointer
_kernels = Kernels(__package__, THREADS)
_launch = _kernels.launch


@dataclass(frozen=True)
class DeviceCoupling:
    """Couplings W on the device, prepared once for all rows that share W."""

    # float32 (v, h): W and exp(W)
    w: cupy.ndarray
    a: cupy.ndarray
    # Number of messages that are multiplied before mantissa and exponent are split, and upper bound of |log
    # odds| when beliefs are computed
    factors: int
    limit: float


def make_coupling(w: Array, largest: float | None = None) -> DeviceCoupling:
    """Copy the couplings W to the device and compute exp(W); ``w`` may be on the host or on the device.

    ``largest`` is max |W|, if the caller knows it; otherwise the host waits for this number.
    """
    w = cupy.ascontiguousarray(cupy.asarray(w, dtype=np.float32))
    factors, limit = choose_limits(largest_magnitude(w) if largest is None else largest)
    return DeviceCoupling(w, cupy.exp(w), factors, limit)


@cache
def _read_properties(device: int) -> tuple[bool, int]:
    """Return (whether the device has clusters, bytes of shared memory for a block's messages)."""
    properties = cupy.cuda.runtime.getDeviceProperties(device)
    has_clusters = properties["major"] >= 9 and properties["multiProcessorCount"] >= _LEAST_PROCESSORS
    return has_clusters, int(properties["sharedMemPerBlockOptin"]) - _STATIC_BYTES


def _choose_kernel(method: str, v: int, h: int) -> tuple[str, int, int]:
    """Return (name of the kernel, thread blocks per graph, bytes of messages in a block's shared memory)."""
    has_clusters, room = _read_properties(current_device())
    if v * h < CLUSTER_EDGES or not has_clusters:
        return f"crbm_{method}", 1, 0
    kept = 4 * -(-v // BLOCKS) * h
    if method in ("sum_product", "max_product") and kept <= room:
        held = "_held" if method == "sum_product" and h <= HELD_UNITS else ""
        return f"crbm_{method}{held}_kept", BLOCKS, kept
    return f"crbm_{method}_cluster", BLOCKS, 0


def _run(
    method: str, coupling: DeviceCoupling, bv: Array, bh: Array, n_sweeps: int, tol: float | None = None,
    pairs: cupy.ndarray | None = None,
) -> Inference:  # fmt: skip
    """Run the inference ``method`` for rows with biases ``bv`` and ``bh``; the results are on the device.

    The pair beliefs are added to ``pairs``, a C-contiguous array on the device, if it is given.
    """
    v, h = coupling.w.shape
    if pairs is None:
        return _run_groups(method, coupling, bv, bh, n_sweeps, tol)
    check_pairs(pairs.shape, (v, h))

    def add(first: int, graphs: int, c: cupy.ndarray, th: cupy.ndarray) -> None:
        adding = "crbm_add_pairs_f4" if pairs.dtype == np.float32 else "crbm_add_pairs_f8"
        _launch(adding, (_ceil(v * h),), c, th, np.int32(graphs), np.int32(v), np.int32(h), pairs)

    return _run_groups(method, coupling, bv, bh, n_sweeps, tol, add)


def _run_groups(
    method: str, coupling: DeviceCoupling, bv: Array, bh: Array, n_sweeps: int, tol: float | None,
    use_pairs: Callable[[int, int, cupy.ndarray, cupy.ndarray], None] | None = None,
) -> Inference:  # fmt: skip
    """Run an inference for as many graphs at a time as fit into ``MESSAGE_BYTES``.

    After each group, ``use_pairs`` receives its first graph, the number of graphs, P(v = 1 | h = 1) of each
    edge and the beliefs of the hidden units.
    """
    (v, h), rows, with_pairs = coupling.w.shape, len(bv), use_pairs is not None
    check_graphs((v, h), bv.shape, bh.shape, n_sweeps, tol)
    bv, bh = (cupy.ascontiguousarray(cupy.asarray(b, dtype=np.float32)) for b in (bv, bh))
    lv, lh = (cupy.empty((rows, n), dtype=np.float32) for n in (v, h))
    sweeps, change = cupy.empty(rows, dtype=np.int32), cupy.empty(rows, dtype=np.float32)
    log_z = cupy.empty(rows, dtype=np.float64)
    multiplied = method in ("sum_product", "mixed_product")
    matrices = (coupling.a if multiplied else coupling.w), coupling.w
    name, blocks, kept = _choose_kernel(method, v, h)
    stored = method in ("sum_product", "max_product") and not kept
    group = max(1, min(rows, MESSAGE_BYTES // (4 * v * h))) if stored or with_pairs else max(rows, 1)
    m = cupy.empty((group, v, h) if stored else (1, 1, 1), dtype=np.float32)
    c = cupy.empty((group, v, h), dtype=np.float32) if with_pairs else _NULL
    tv, th, uh = (cupy.empty((group, n), dtype=np.float32) for n in (v, h, h))
    exchanged = (
        cupy.empty((group, blocks, h), dtype=np.float32),
        cupy.empty((group, blocks), dtype=np.float32),
        cupy.empty((group, blocks), dtype=np.float64),
    )
    stop = np.float32(-1.0 if tol is None else tol)
    settings = np.int32(n_sweeps), stop, np.int32(coupling.factors), np.float32(coupling.limit)
    for first in range(0, rows, group):
        part = slice(first, first + group)
        results = lv[part], lh[part], sweeps[part], change[part], c, log_z[part]
        inputs = *matrices, np.int32(v), np.int32(h), bv[part], bh[part], *settings
        graphs = len(bv[part])
        _launch(name, (graphs * blocks,), *inputs, m, tv, th, uh, *results, *exchanged, shared_bytes=kept)
        if use_pairs is not None:
            use_pairs(first, graphs, c, th)
    return Inference(lv, lh, sweeps, change, log_z if with_pairs else None)


sum_product = sum_product_pairs = partial(_run, "sum_product")
mixed_product, max_product, mean_field = (
    partial(_run, method) for method in ("mixed_product", "max_product", "mean_field")
)


def add_chain_gradients(
    method: str, coupling: DeviceCoupling, seen: cupy.ndarray, bv: cupy.ndarray, bh: cupy.ndarray,
    starts: np.ndarray, n_sweeps: int, tol: float | None, gradients: cupy.ndarray, dv: cupy.ndarray,
    dh: cupy.ndarray, measures: cupy.ndarray, biases: cupy.ndarray | None,
) -> None:  # fmt: skip
    """Compute both phases of several chains (parts of a batch) at once, by sum-product or mean field.

    ``seen`` (rows, v) are the outputs of the rows, and chain c has the rows ``starts[c]:starts[c + 1]``. The
    gradient of W of each chain is added to the first v h numbers of its row of ``gradients``. The function
    writes v minus beliefs to ``dv``, positive minus negative phase to ``dh``, and the sums of both over the
    rows of each chain to ``biases`` (a view of ``gradients``) if given. It writes loss, wrong units and the
    largest change of a belief in the last sweep of each row to ``measures``, (3, rows).
    """
    (v, h), rows, chains = coupling.w.shape, len(seen), len(starts) - 1
    # largest |log odds| whose exponential fits float32
    sizes, limit = (np.int32(v), np.int32(h)), np.float32(87.0)
    positive, edges = cupy.empty((rows, h), dtype=np.float32), (_ceil(v * h), chains)
    device_starts, stride = cupy.asarray(starts.astype(np.int32)), np.int32(gradients.shape[1])
    _launch(
        "crbm_positive",
        (-(-rows // TOGETHER),),
        coupling.w,
        seen,
        bh,
        np.int32(rows),
        *sizes,
        limit,
        positive,
    )

    def add(first: int, graphs: int, c: cupy.ndarray | np.uint64, th: cupy.ndarray | np.uint64) -> None:
        of_rows = c, th, seen, positive, dv, dh, device_starts, np.int32(chains)
        group = np.int32(first), np.int32(graphs)
        _launch("crbm_chain_weights", edges, *of_rows, *group, *sizes, stride, gradients)

    by_pairs = method == "sum_product"
    found = _run_groups(method, coupling, bv, bh, n_sweeps, tol, add if by_pairs else None)
    inputs = found.lv, found.lh, seen, positive, np.int32(rows)
    _launch("crbm_negative", (rows,), *inputs, *sizes, limit, dv, dh, measures)
    measures[2] = found.change
    if not by_pairs:
        add(0, rows, _NULL, _NULL)
    if biases is not None:
        summed = dv, dh, device_starts, np.int32(chains)
        _launch("crbm_chain_biases", (_ceil(v + h), chains), *summed, *sizes, stride, biases)


def ascend_chains(
    sizes: tuple[int, int, int], theta: cupy.ndarray, gradients: cupy.ndarray, rate: float,
    factors: tuple[cupy.ndarray, cupy.ndarray, cupy.ndarray] | None,
) -> tuple[cupy.ndarray, cupy.ndarray]:  # fmt: skip
    """Take a gradient step (no momentum, no decay) over all parts of a batch; its bits equal the host's.

    ``sizes`` are the numbers of units of v, h and x. ``gradients`` (parts, stride) are the gradients of all
    parameters or, with ``factors`` (dv, dh and x of all rows), of W only. Return the next parameters, and
    float32 numbers whose largest is max |W|, or not finite if a coupling or bias is not finite.
    """
    v, h, x = sizes
    edges, weights, step = v * h, v * h + x * (v + h), np.float32(rate)
    next_theta = cupy.empty(theta.shape, dtype=np.float32)
    count = theta.size if factors is None else edges
    blocks = _ceil(count)
    largest = cupy.empty(blocks + (_ceil(v + h) if factors else 0), dtype=np.float32)
    bits = largest.view(np.int32)
    shape = np.int32(len(gradients)), np.int32(gradients.shape[1]), np.int32(edges)
    ends = np.int32(edges if factors else weights), np.int32(count)
    _launch("crbm_ascend", (blocks,), theta, gradients, *shape, *ends, step, next_theta, bits)
    if factors is not None:
        dv, dh, seen = factors
        rows, first = np.int32(len(seen)), edges
        for left, units in ((dv, v), (dh, h)):
            part = slice(first, first := first + units * x)
            outer = left, seen, rows, np.int32(units), np.int32(x), step
            _launch("crbm_ascend_outer", (_ceil(units * x),), theta[part], *outer, next_theta[part])
        given = theta[weights:], dv, dh, rows, np.int32(v), np.int32(h), step
        _launch("crbm_ascend_biases", (_ceil(v + h),), *given, next_theta[weights:], bits[blocks:])
    return next_theta, largest


def _ceil(threads: int) -> int:
    return -(-threads // THREADS)
