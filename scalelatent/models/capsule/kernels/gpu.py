"""The part of the E-step between the two matrix products, in CuPy: launches of the kernels of ``gpu.cu``.

Memory bandwidth is the limit. Without a threshold, one kernel reads a row's latent means, computes its
factors and scales the latent means in place. It reads h twice and writes it once: 12 bytes per number in
float32, or 8 if the second read hits the second-level cache. A GPU with B bytes/s therefore processes up to B
/ (12 D) rows/s, which is 12 G rows/s for 3 TB/s and D = 20. With a threshold, h is read once for the factors,
and 8 bytes per row and member are written. Then only the active rows (rows that are not classified with a
margin) are read, scaled and moved to the front. The arithmetic on lengths is float64, about 150 operations
per row and member. The host waits once per block, for a copy of the sums and the moment together. With a
threshold it waits twice, because the number of active rows sets the size of the second product.

``gpu.cu`` fixes the order of every sum, so that all runs on one kind of GPU give the same bits. The work runs
on CuPy's current stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import cupy
import numpy as np

from scalelatent.contract.learners import Backend
from scalelatent.kernels.arrays import Array
from scalelatent.kernels.cuda import Kernels, current_device, multiply

from .estep import estep_by_products
from .squash import SquashTable, squash_table

_kernels = Kernels(__package__)
_launch, THREADS = _kernels.launch, _kernels.threads
_SUFFIX = {"float32": "f32", "float64": "f64"}
_NULL = np.uint64(0)  # a null pointer


def estep(
    backend: Backend, w: cupy.ndarray, x: cupy.ndarray, y: np.ndarray, weight: np.ndarray, dims: np.ndarray,
    labels: np.ndarray, nu: np.ndarray, table: SquashTable, train: bool,
) -> tuple[np.ndarray | None, np.ndarray]:  # fmt: skip
    """Return the residual moment (D, p), or None, and the sums (members, 3) of a block of rows."""
    classes, weights = _move_rows(backend, y, weight)
    if not train or not len(y) or (nu > 0).any():
        return estep_by_products(backend, w, x, classes, weights, dims, labels, nu, table, train)
    h, members, (total, p) = backend.matmul(w, x.T, "h"), len(dims), w.shape
    sums = 3 * members + 1
    out = backend.buffer("sums and moment", (sums + _ceil(total * p, 2),), np.float64)
    _compute_residuals(h, classes, weights, dims, labels, nu, table, out[:sums])
    multiply(h, x, out[sums:].view(np.float32)[: total * p].reshape(total, p))
    host = backend.to_host(out)
    moment = host[sums:].view(np.float32)[: total * p].reshape(total, p)
    return moment, host[: 3 * members].reshape(members, 3)


def _move_rows(backend: Backend, y: np.ndarray, weight: np.ndarray) -> tuple[cupy.ndarray, cupy.ndarray]:
    """Copy classes and weights of the rows to the device in one array, 12 bytes per row."""
    n = len(y)
    packed = np.empty((n, 3), dtype=np.int32)
    flat = packed.reshape(-1)
    flat[: 2 * n].view(np.float64)[:], flat[2 * n :] = weight, y
    moved = backend.asarray(packed, np.int32, "classes and weights").reshape(-1)
    return moved[2 * n :], moved[: 2 * n].view(np.float64)


def residuals(
    h: cupy.ndarray, y: Array, weight: Array, dims: np.ndarray, labels: np.ndarray, nu: np.ndarray,
    table: SquashTable,
) -> tuple[cupy.ndarray | None, np.ndarray]:  # fmt: skip
    """Replace the latent means h by the residuals of all members for one block; return active rows and sums.

    Active rows are those that a member does not classify with the margin of its threshold ``nu``.
    """
    n, members, thresholded = h.shape[1] if _check(h) else 0, len(dims), bool((nu > 0).any())
    if n == 0:
        return (cupy.empty(0, dtype=np.int32) if thresholded else None), np.zeros((members, 3))
    result = cupy.empty(3 * members + 1, dtype=np.float64)
    gather_active = _compute_residuals(h, y, weight, dims, labels, nu, table, result)
    host = result.get()
    totals = host[: 3 * members].reshape(members, 3)
    return (None if gather_active is None else gather_active(int(host[-1]))), totals


def _compute_residuals(
    h: cupy.ndarray, y: Array, weight: Array, dims: np.ndarray, labels: np.ndarray, nu: np.ndarray,
    table: SquashTable, result: cupy.ndarray,
) -> Callable[[int], cupy.ndarray] | None:  # fmt: skip
    """Write the sums of all members to ``result``, (3 members + 1,); without a threshold, replace h as well.

    With a threshold, the last number is the number of active rows (rows that are not classified with a
    margin). The returned function moves the residuals of these rows to the front of h, and returns their row
    numbers.
    """
    suffix, n, members, thresholded = _check(h), h.shape[1], len(dims), bool((nu > 0).any())
    wiring, table = _get_device_members(dims, labels, nu), _on_device(table, int(dims[0].sum()))
    y, weight = cupy.asarray(y, dtype=np.int32), cupy.asarray(weight, dtype=np.float64)
    blocks, sums = _ceil(n, THREADS), 3 * members
    partial = cupy.empty((sums, blocks), dtype=np.float64)
    counts, before = (cupy.empty(blocks, dtype=np.int32) for _ in range(2)) if thresholded else (_NULL, _NULL)
    rows = (h, np.int32(n), y)
    inputs = (
        *rows,
        weight,
        *wiring.arguments,
        np.int32(wiring.equal_dim),
        wiring.nu,
        *_table_arguments(table),
        partial,
    )
    if thresholded:
        factors, moved = cupy.empty((2 * members, n), dtype=h.dtype), cupy.empty(n, dtype=np.uint8)
        _launch(f"capsule_factors_{suffix}", (blocks,), *inputs, factors, moved, counts)
    else:
        _launch(f"capsule_dense_{suffix}", (blocks,), *inputs)
    _launch(
        "capsule_finish_f64",
        (sums + thresholded,),
        partial,
        np.int32(sums),
        np.int32(blocks),
        counts,
        before,
        result,
    )
    if not thresholded:
        return None

    def gather_active(count: int) -> cupy.ndarray:
        active = cupy.empty(count, dtype=np.int32)
        if count:
            _launch("capsule_compact_i32", (blocks,), moved, np.int32(n), before, active)
            _gather(suffix, rows, wiring, factors, active)
        return active

    return gather_active


def _gather(
    suffix: str,
    rows: tuple[cupy.ndarray, np.int32, cupy.ndarray],
    wiring: _DeviceMembers,
    factors: cupy.ndarray,
    active: cupy.ndarray,
) -> None:
    """Write the residuals of the rows with the numbers ``active`` to the front of h, which is ``rows[0]``.

    Residuals are first written to another array, because threads would overwrite rows that others still read.
    """
    h, count = rows[0], len(active)
    # The array is as large as h for any number of active rows, so that the memory pool can reuse its memory.
    moved = cupy.empty(h.size, dtype=h.dtype)[: len(h) * count].reshape(len(h), count)
    grid = (_ceil(count, THREADS), wiring.capsules)
    _launch(
        f"capsule_gather_{suffix}", grid, *rows, *wiring.arguments, factors, active, np.int32(count), moved
    )
    h[:, :count] = moved


def probabilities(h: cupy.ndarray, dims: np.ndarray, table: SquashTable | None = None) -> cupy.ndarray:
    """Return P(y | x) of one member, (capsules, rows), from latent means (D, rows), D = dims.sum()."""
    suffix, n, total = _check(h), h.shape[1], int(dims.sum())
    out = cupy.empty((len(dims), n), dtype=np.float64)
    if n:
        wiring = _get_device_members(dims[None], np.zeros((1, 0), dtype=np.int64), np.zeros(1))
        table = _on_device(squash_table(total) if table is None else table, total)
        shape = (np.int32(n), wiring.dims, np.int32(len(dims)), np.int32(total))
        _launch(
            f"capsule_probabilities_{suffix}", (_ceil(n, THREADS),), h, *shape, *_table_arguments(table), out
        )
    return out


# -- small arrays for every launch -------------------------------------------------------------------------


@dataclass(frozen=True)
class _DeviceMembers:
    """Dimensions, labels and thresholds nu of the members on the device, in the layout that gpu.cu reads."""

    dims: cupy.ndarray
    shape: tuple[np.int32, np.int32, np.int32]
    nu: cupy.ndarray
    capsules: int  # number of capsules of all members
    equal_dim: int  # dimension of every capsule; 0 if they differ

    @property
    def arguments(self) -> tuple[cupy.ndarray, np.int32, np.int32, np.int32]:
        return (self.dims, *self.shape)


def _get_device_members(dims: np.ndarray, labels: np.ndarray, nu: np.ndarray) -> _DeviceMembers:
    arrays = (
        np.ascontiguousarray(dims, np.int32),
        np.ascontiguousarray(labels, np.int32),
        np.ascontiguousarray(nu, np.float64),
    )
    # The CUDA stream is part of the key, because the memory pool must reuse memory in the same stream.
    return _copy_members(
        current_device(), cupy.cuda.get_current_stream().ptr, arrays[0].shape, *(a.tobytes() for a in arrays)
    )


@lru_cache(maxsize=256)
def _copy_members(
    device: int, stream: int, shape: tuple[int, int], dims_bytes: bytes, labels_bytes: bytes, nu_bytes: bytes
) -> _DeviceMembers:
    dims, labels = np.frombuffer(dims_bytes, np.int32).reshape(shape), np.frombuffer(labels_bytes, np.int32)
    starts = np.concatenate([[0], np.cumsum(dims.ravel())[:-1]])
    packed = np.concatenate([dims.ravel(), starts, dims.sum(axis=1), labels]).astype(np.int32)
    counts = (np.int32(shape[0]), np.int32(shape[1]), np.int32(len(labels) // shape[0]))
    equal = int(dims.flat[0]) if (dims == dims.flat[0]).all() else 0
    return _DeviceMembers(
        cupy.asarray(packed), counts, cupy.asarray(np.frombuffer(nu_bytes, np.float64)), dims.size, equal
    )


def _on_device(table: SquashTable, total_dim: int) -> SquashTable:
    """Return a table on the device; a backend copies its tables once and passes these copies."""
    if table.scale != total_dim / 2 + 1.0:
        raise ValueError(
            f"the table belongs to another dimension than {total_dim}: pass squash_table({total_dim})"
        )
    if isinstance(table.coefficients, cupy.ndarray):
        return table
    return replace(table, coefficients=cupy.asarray(table.coefficients))


def _table_arguments(table: SquashTable) -> tuple[cupy.ndarray, np.int32, np.float64]:
    return table.coefficients, np.int32(len(table.coefficients)), np.float64(table.scale)


def _check(h: cupy.ndarray) -> str:
    if (
        not isinstance(h, cupy.ndarray)
        or h.ndim != 2
        or h.dtype.name not in _SUFFIX
        or not h.flags.c_contiguous
    ):
        what = f"{h.dtype} {h.shape}" if hasattr(h, "dtype") else type(h).__name__
        raise ValueError(
            f"h is {what}, but the kernel needs a C-contiguous device array (dimensions, rows) of float32 or "
            "float64"
        )
    return _SUFFIX[h.dtype.name]


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
