"""The inference kernels in CuPy: launches of ``gpu.cu`` with a thread block or a cluster per row's graph.

GPUs of compute capability 9.0 or later have clusters of thread blocks. There eight blocks work on a large
graph, and keep its messages in shared memory if they fit. Otherwise the messages are in global memory, for as
many graphs at a time as fit ``MESSAGE_BYTES``. A sweep (round of messages over all edges) reads messages
three times, writes them once, and reads exp(W) twice; the second reads come from the first-level cache. So an
edge costs 16 bytes of second-level cache, two dozen operations and one division. Biases are not checked: a
row with a NaN bias has NaN in its log odds.

In a learning step one launch infers the rows of all chains (parts of a batch). Each chain sums its gradient
row by row, so that the bits of a chain do not depend on the other chains.
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
    find_largest_magnitude,
)

THREADS = 512  # threads of a thread block; the same number as in gpu.cu
POSITIVE_ROWS = 8  # rows that a thread block of the kernel crbm_positive computes, as in gpu.cu
# A graph with at least this many edges is computed by a cluster of thread blocks. Only the size of the graph
# decides this, so the result of a row is bit-identical in every batch.
CLUSTER_EDGES = 2**14
HELD_UNITS = 256  # largest number of hidden units whose beliefs P(h = 1) fit the registers of a warp
_STATIC_BYTES = 8192  # bytes of shared memory that the kernels use besides the messages
_LEAST_PROCESSORS = 16  # a GPU with fewer multiprocessors may be unable to run eight blocks at once
_NULL = np.uint64(0)  # the null pointer, for an array that a kernel does not use
_kernels = Kernels(__package__, THREADS)
_launch = _kernels.launch


@dataclass(frozen=True)
class DeviceCoupling:
    """Couplings W on the device, prepared once for all rows that share W."""

    w: cupy.ndarray  # W, float32 (visible, hidden units)
    exp_w: cupy.ndarray  # exp(W), float32
    factors: int  # Number of messages that are multiplied before mantissa and exponent are split
    limit: float  # Upper bound of |log odds| when P(unit = 1) is computed


def make_coupling(w: Array, largest: float | None = None) -> DeviceCoupling:
    """Copy the couplings W to the device and compute exp(W); ``w`` may be on the host or on the device.

    ``largest`` is max |W|, if the caller knows it; otherwise the host waits for this number.
    """
    w = cupy.ascontiguousarray(cupy.asarray(w, dtype=np.float32))
    factors, limit = choose_limits(find_largest_magnitude(w) if largest is None else largest)
    return DeviceCoupling(w, cupy.exp(w), factors, limit)


@cache
def _read_properties(device: int) -> tuple[bool, int]:
    """Return whether a device has clusters, and the bytes of shared memory for a thread block's messages."""
    properties = cupy.cuda.runtime.getDeviceProperties(device)
    has_clusters = properties["major"] >= 9 and properties["multiProcessorCount"] >= _LEAST_PROCESSORS
    return has_clusters, int(properties["sharedMemPerBlockOptin"]) - _STATIC_BYTES


def _choose_kernel(method: str, v: int, h: int) -> tuple[str, int, int]:
    """Return the name of the kernel, the thread blocks per graph, and the bytes of messages in a block.

    The last number is 0 if shared memory holds no messages. ``v`` and ``h`` are the numbers of units.
    """
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

    If ``pairs``, a C-contiguous array on the device, is given, add P(v_i = 1, h_j = 1) of all rows to it.
    """
    v, h = coupling.w.shape
    if pairs is None:
        return _run_groups(method, coupling, bv, bh, n_sweeps, tol)
    check_pairs(pairs.shape, (v, h))

    def add_pairs(first: int, graphs: int, v_given_h: cupy.ndarray, h_on: cupy.ndarray) -> None:
        kernel = "crbm_add_pairs_f4" if pairs.dtype == np.float32 else "crbm_add_pairs_f8"
        sizes = np.int32(graphs), np.int32(v), np.int32(h)
        _launch(kernel, (_count_blocks(v * h),), v_given_h, h_on, *sizes, pairs)

    return _run_groups(method, coupling, bv, bh, n_sweeps, tol, add_pairs)


def _run_groups(
    method: str, coupling: DeviceCoupling, bv: Array, bh: Array, n_sweeps: int, tol: float | None,
    use_pairs: Callable[[int, int, cupy.ndarray, cupy.ndarray], None] | None = None,
) -> Inference:  # fmt: skip
    """Run an inference; if it stores messages or pairs, as many graphs at a time as ``MESSAGE_BYTES`` allows.

    After each group, ``use_pairs`` receives the index of its first graph, the number of graphs,
    P(v_i = 1 | h_j = 1) and P(h_j = 1).
    """
    (v, h), rows, with_pairs = coupling.w.shape, len(bv), use_pairs is not None
    check_graphs((v, h), bv.shape, bh.shape, n_sweeps, tol)
    bv, bh = (cupy.ascontiguousarray(cupy.asarray(b, dtype=np.float32)) for b in (bv, bh))
    lv, lh = (cupy.empty((rows, n), dtype=np.float32) for n in (v, h))
    sweeps, change = cupy.empty(rows, dtype=np.int32), cupy.empty(rows, dtype=np.float32)
    log_z = cupy.empty(rows, dtype=np.float64)
    multiplied = method in ("sum_product", "mixed_product")
    matrices = (coupling.exp_w if multiplied else coupling.w), coupling.w
    name, blocks, kept = _choose_kernel(method, v, h)
    stored = method in ("sum_product", "max_product") and not kept
    group = max(1, min(rows, MESSAGE_BYTES // (4 * v * h))) if stored or with_pairs else max(rows, 1)
    m = cupy.empty((group, v, h) if stored else (1, 1, 1), dtype=np.float32)
    v_given_h = cupy.empty((group, v, h), dtype=np.float32) if with_pairs else _NULL
    v_on, h_on, h_off = (cupy.empty((group, n), dtype=np.float32) for n in (v, h, h))
    exchanged = (
        cupy.empty((group, blocks, h), dtype=np.float32),
        cupy.empty((group, blocks), dtype=np.float32),
        cupy.empty((group, blocks), dtype=np.float64),
    )
    stop = np.float32(-1.0 if tol is None else tol)
    settings = np.int32(n_sweeps), stop, np.int32(coupling.factors), np.float32(coupling.limit)
    for first in range(0, rows, group):
        part = slice(first, first + group)
        results = lv[part], lh[part], sweeps[part], change[part], v_given_h, log_z[part]
        inputs = *matrices, np.int32(v), np.int32(h), bv[part], bh[part], *settings
        graphs = len(bv[part])
        arrays = *inputs, m, v_on, h_on, h_off, *results, *exchanged
        _launch(name, (graphs * blocks,), *arrays, shared_bytes=kept)
        if use_pairs is not None:
            use_pairs(first, graphs, v_given_h, h_on)
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
    """Compute the gradients of several chains (parts of a batch) at once, by sum-product or mean field.

    ``seen`` are the outputs of the rows, and chain c has the rows ``starts[c]:starts[c + 1]``. The gradient
    of W of each chain is added to the start of its row of ``gradients``. The function writes outputs minus
    their expectations in the model to ``dv``, the same difference of hidden units to ``dh``, and the sums of
    both over the rows of each chain to ``biases`` (a view of ``gradients``) if given. It writes loss, wrong
    outputs and the largest change of P(unit = 1) in the last sweep of each row to ``measures``, (3, rows).
    """
    (v, h), rows, chains = coupling.w.shape, len(seen), len(starts) - 1
    # The exponential of larger |log odds| than the limit does not fit float32.
    sizes, limit = (np.int32(v), np.int32(h)), np.float32(87.0)
    positive, weight_grid = cupy.empty((rows, h), dtype=np.float32), (_count_blocks(v * h), chains)
    device_starts, stride = cupy.asarray(starts.astype(np.int32)), np.int32(gradients.shape[1])
    _launch(
        "crbm_positive",
        (-(-rows // POSITIVE_ROWS),),
        coupling.w,
        seen,
        bh,
        np.int32(rows),
        *sizes,
        limit,
        positive,
    )

    def add_weights(
        first: int, graphs: int, v_given_h: cupy.ndarray | np.uint64, h_on: cupy.ndarray | np.uint64
    ) -> None:
        of_rows = v_given_h, h_on, seen, positive, dv, dh, device_starts, np.int32(chains)
        group = np.int32(first), np.int32(graphs)
        _launch("crbm_chain_weights", weight_grid, *of_rows, *group, *sizes, stride, gradients)

    by_pairs = method == "sum_product"
    found = _run_groups(method, coupling, bv, bh, n_sweeps, tol, add_weights if by_pairs else None)
    inputs = found.lv, found.lh, seen, positive, np.int32(rows)
    _launch("crbm_negative", (rows,), *inputs, *sizes, limit, dv, dh, measures)
    measures[2] = found.change
    if not by_pairs:
        add_weights(0, rows, _NULL, _NULL)
    if biases is not None:
        summed = dv, dh, device_starts, np.int32(chains)
        _launch("crbm_chain_biases", (_count_blocks(v + h), chains), *summed, *sizes, stride, biases)


def ascend_chains(
    sizes: tuple[int, int, int], theta: cupy.ndarray, gradients: cupy.ndarray, rate: float,
    factors: tuple[cupy.ndarray, cupy.ndarray, cupy.ndarray] | None,
) -> tuple[cupy.ndarray, cupy.ndarray]:  # fmt: skip
    """Take a gradient step without momentum or decay on the device; its bits are those of a step on the host.

    ``sizes`` are the numbers of outputs, hidden units and columns of x. ``gradients`` has a row for each part
    of the batch: the gradient of all parameters or, with ``factors``, of W only. ``factors`` are dv, dh and x
    of all rows, whose products dv^T x and dh^T x are the other gradients. Return the next parameters, and
    float32 numbers whose largest is max |W|, or not finite if a coupling or bias is not finite.
    """
    v, h, x = sizes
    edges, weights, step = v * h, v * h + x * (v + h), np.float32(rate)
    next_theta = cupy.empty(theta.shape, dtype=np.float32)
    count = theta.size if factors is None else edges
    blocks = _count_blocks(count)
    largest = cupy.empty(blocks + (_count_blocks(v + h) if factors else 0), dtype=np.float32)
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
            _launch("crbm_ascend_outer", (_count_blocks(units * x),), theta[part], *outer, next_theta[part])
        given = theta[weights:], dv, dh, rows, np.int32(v), np.int32(h), step
        _launch("crbm_ascend_biases", (_count_blocks(v + h),), *given, next_theta[weights:], bits[blocks:])
    return next_theta, largest


def _count_blocks(threads: int) -> int:
    return -(-threads // THREADS)
