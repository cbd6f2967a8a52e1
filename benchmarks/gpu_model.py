"""Estimate the work of GPU kernels and of passes over rows; print lower bounds and predictions of seconds.

    python benchmarks/gpu_model.py

This script runs without a GPU: it computes operations, bytes and launches from array sizes. A test compares
launches, copies, waits and matrix products with the calls that the CuPy stand-in in tests/gpu records. The
estimates are those of a second call, because the first call also copies tables that stay on the GPU. Array
expressions of CuPy itself (conversions, copies on the GPU) do not count as launches.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

# Rows of bootstrap networks and linear mixtures are multiplied in blocks (tiles) on the GPU; the product of a
# block has at most this many float32 numbers (rows times columns).
TILE = 2**26
# A conditional RBM with at least this many weights (edges of its graph) uses a cluster of thread blocks.
CLUSTER_EDGES = 2**14
# The kernels of conditional RBMs store at most this many bytes of messages of belief propagation at a time.
MESSAGE_BYTES = 2**28


@dataclass(frozen=True)
class Card:
    """Peak rates of a GPU according to its data sheet, and typical seconds of launches and waits."""

    name: str
    # Operations per second in float32 and in float64, without tensor cores.
    float32_rate: float
    float64_rate: float
    # Bytes per second of the GPU's memory, and of copies between the GPU and the host.
    memory_rate: float
    copy_rate: float
    # Divisions per second of the special-function units.
    division_rate: float
    # Operations per second on signed bytes, by tensor cores.
    int8_rate: float
    # Seconds to start a kernel or a copy, and of a wait of the host for a result: typical, not measured.
    launch_seconds: float = 2e-6
    wait_seconds: float = 10e-6


# Bytes per second at which one thread of the host copies or adds arrays: 113 MB took 19 ms on a CPU.
COPY_RATE = 6e9
# Number of host threads that copy rows to page-locked memory; equals COPY_THREADS of engine/backend.py.
COPY_THREADS = 5
CLOCK_HZ = 1.755e9
H100 = Card("H100 SXM", 67e12, 34e12, 3.35e12, 55e9, 132 * 16 * CLOCK_HZ, 1979e12)
H200 = Card("H200", 67e12, 34e12, 4.8e12, 55e9, 132 * 16 * CLOCK_HZ, 1979e12)


@dataclass(frozen=True)
class Work:
    """Estimated work of one function call on a GPU."""

    memory_bytes: float = 0  # bytes read and written in the GPU's memory; each array counts once per kernel
    flops: float = 0  # float32 operations of matrix products and other sums
    gemm_flops: float = 0  # operations of all matrix products
    int8_operations: float = 0  # operations of matrix products of signed bytes; not part of `flops`
    float64_flops: float = 0  # float64 operations
    divisions: float = 0
    launches: int = 0  # number of launched kernels, including matrix products and gathering of rows
    uploads: int = 0  # number of copies from the host to the GPU
    downloads: int = 0  # number of copies from the GPU to the host; the host waits for each
    copied_bytes: float = 0  # bytes of all uploads and downloads
    ahead_bytes: float = 0  # bytes of rows that are copied to the GPU while it computes
    host_seconds: float = 0  # seconds in which the host computes and the GPU is idle
    serial_seconds: float = 0  # seconds of a kernel that has to do its steps one after another

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __mul__(self, times: int) -> Work:
        return Work(*(getattr(self, f.name) * times for f in fields(self)))

    def seconds_by_resource(self, card: Card) -> dict[str, float]:
        """Return the smallest possible seconds of each resource (operations, memory, copies, launches)."""
        return {
            "float32 operations": self.flops / card.float32_rate,
            "float64 operations": self.float64_flops / card.float64_rate,
            "byte operations": self.int8_operations / card.int8_rate,
            "divisions": self.divisions / card.division_rate,
            "memory of the card": self.memory_bytes / card.memory_rate,
            "copies to and from the host": (self.copied_bytes + self.ahead_bytes) / card.copy_rate,
            "launches and waits": (self.launches + self.uploads) * card.launch_seconds
            + self.downloads * card.wait_seconds,
        }

    def card_seconds(self, card: Card) -> float:
        """Return the seconds of the kernels at peak rates, summed over resources, without copies or waits."""
        seconds = self.seconds_by_resource(card)
        return sum(v for key, v in seconds.items() if not key.startswith(("copies", "launches")))

    def predicted_seconds(self, card: Card) -> float:
        """Return the predicted seconds of the call.

        The prediction adds the seconds of kernels, waits, copies and work of the host. Only the copies of
        ``ahead_bytes``, to page-locked memory and then to the GPU, overlap with other work.
        """
        starts = (self.launches + self.uploads) * card.launch_seconds
        kernels = max(self.card_seconds(card) + self.serial_seconds, starts)
        waits = self.downloads * card.wait_seconds
        serial = kernels + waits + self.copied_bytes / card.copy_rate + self.host_seconds
        return max(serial, self.ahead_bytes / (COPY_THREADS * COPY_RATE), self.ahead_bytes / card.copy_rate)

    def find_bottleneck(self, card: Card) -> tuple[float, str]:
        """Return (seconds, name) of the resource that needs the most seconds: a lower bound of the call."""
        seconds = self.seconds_by_resource(card)
        name = max(seconds, key=lambda key: seconds[key])
        return seconds[name], name


def matrix_product(rows: int, columns: int, inner: int, item_bytes: int = 4) -> Work:
    """Return the work of a product (rows, inner) x (inner, columns) of ``item_bytes``-byte numbers."""
    flops = 2.0 * rows * columns * inner
    return Work(
        memory_bytes=item_bytes * (rows * inner + inner * columns + rows * columns),
        flops=flops,
        gemm_flops=flops,
        launches=1,
    )


def copy_rows_ahead(work: Work, row_bytes: float) -> Work:
    """Return ``work`` with ``row_bytes`` of rows copied while the GPU computes, instead of before."""
    return work + Work(copied_bytes=-row_bytes, ahead_bytes=row_bytes)


def copy_rows_first(work: Work, row_bytes: float) -> Work:
    """Return ``work`` of an earlier version: the host first copied ``row_bytes`` to page-locked memory."""
    return work + Work(host_seconds=row_bytes / COPY_RATE)


def capsule_residuals(n_rows: int, total_dim: int, members: int, active: int | None = None) -> Work:
    """Return the work of the kernel ``capsule_residuals`` for ``members`` models on the same rows.

    The models have ``total_dim`` latent means in total. ``active`` is the number of rows that change the
    weights, because a wrong class has more than nu times the probability of the true class. Only these rows
    are gathered. None means all rows (no threshold nu).
    """
    host = 8 * (3 * members + 1)
    common = Work(
        float64_flops=150.0 * n_rows * members, uploads=2, downloads=1, copied_bytes=12 * n_rows + host
    )
    labels = 12 * n_rows  # class and weight of each row
    if active is None:
        return common + Work(memory_bytes=12 * total_dim * n_rows + labels, launches=2)
    factors = 4 * total_dim * n_rows + labels + 8 * members * n_rows + n_rows
    gather = active * (8 * total_dim + 8 * members) + 8 * total_dim * active
    return common + Work(
        memory_bytes=factors + n_rows + (gather if active else 0), launches=4 if active else 2
    )


def capsule_block(
    n_rows: int,
    n_features: int,
    total_dim: int,
    members: int,
    active: int | None,
    item_bytes: int,
    on_card: bool = False,
) -> Work:
    """Return the work of an E-step of the capsule model on one block of rows.

    A stored feature has ``item_bytes`` bytes; ``active`` is the number of rows that change the weights, or
    None for all. ``on_card`` means that the rows are already on the GPU.
    """
    rows = active if active is not None else n_rows
    moved = Work() if on_card else Work(uploads=1, copied_bytes=float(n_rows) * n_features * item_bytes)
    if not on_card:
        moved += Work(
            memory_bytes=float(n_rows) * n_features * (item_bytes if item_bytes == 4 else 2 * item_bytes + 4)
        )
    out = (
        moved
        + matrix_product(total_dim, n_rows, n_features)
        + capsule_residuals(n_rows, total_dim, members, active)
    )
    out += Work(uploads=-1)  # Classes and weights of rows are in one upload, not in two.
    if active is not None and active:
        out += Work(memory_bytes=8.0 * active * n_features, launches=1)  # Gather the active rows.
    if rows:
        # If all rows are active, the sums and the product's result are copied to the host together.
        dense = active is None
        back = 8.0 * -(-total_dim * n_features // 2) if dense else 4.0 * total_dim * n_features
        out += matrix_product(total_dim, n_features, rows) + Work(
            downloads=0 if dense else 1, copied_bytes=back
        )
    return out


def earlier_capsule_block(
    n_rows: int,
    n_features: int,
    total_dim: int,
    members: int,
    active: int | None,
    item_bytes: int,
    on_card: bool = False,
) -> Work:
    """Return ``capsule_block`` of an earlier version: an upload more and, if all rows count, a download."""
    now = capsule_block(n_rows, n_features, total_dim, members, active, item_bytes, on_card)
    return now + Work(uploads=1, downloads=1 if active is None else 0)


def capsule_map_block(n_rows: int, n_features: int, total_dim: int, item_bytes: int) -> Work:
    """Return the work of computing the latent means of one block of rows.

    A stored feature has ``item_bytes`` bytes. The host waits twice: for the test whether all numbers are
    finite, and for the latent means.
    """
    stored = float(n_rows) * n_features * item_bytes
    moved = Work(
        memory_bytes=stored if item_bytes == 4 else 2 * stored + 4.0 * n_rows * n_features,
        uploads=1,
        copied_bytes=stored,
    )
    latents = 4.0 * n_rows * total_dim
    return (
        moved
        + matrix_product(total_dim, n_rows, n_features)
        + Work(memory_bytes=latents, downloads=2, copied_bytes=latents)
    )


def mbn_nearest(
    n_rows: int,
    n_features: int,
    n_columns: int,
    n_centroids: int,
    item_bytes: int,
    on_card: bool = True,
    with_bytes: bool = False,
) -> Work:
    """Return the work of ``mbn_nearest``, which finds nearest centroids by ``n_columns`` of the features.

    With ``with_bytes``, rows and centroids are bytes; both sizes of a product are padded to multiples of 16.
    """
    stored, width, inner = 4, n_centroids, n_columns
    if with_bytes:
        stored, width, inner = 1, -(-n_centroids // 16) * 16, -(-n_columns // 16) * 16
    tile = max(1, min(n_rows, TILE // width))
    tiles = math.ceil(n_rows / tile) if n_rows else 0
    products = 2.0 * n_rows * width * inner
    read = float(n_rows) * (n_features * item_bytes + 2 * stored * inner + 8 * width)
    moved = 0.0 if on_card else float(n_rows) * n_features * item_bytes
    return Work(
        memory_bytes=read + float(stored) * tiles * width * inner,
        flops=2.0 * n_rows * n_centroids + (0.0 if with_bytes else products),
        gemm_flops=products,
        int8_operations=products if with_bytes else 0.0,
        launches=3 * tiles,
        uploads=1 + (not on_card),
        downloads=1,
        copied_bytes=moved + 4 * n_columns + 4 * n_rows,
    )


# Seconds in which the host draws at random whether a clustering uses one centroid of the layer below, in an
# earlier version; measured on a busy CPU.
EARLIER_DRAW_SECONDS = 3.9e-9
# Estimated seconds of two steps of a thread block: it draws 128 numbers and compares each with the earlier
# ones, or it looks for marks in 128 places of a mask.
DRAW_SECONDS, MARK_SECONDS = 1e-6, 0.3e-6
# Seconds in which the host, in an earlier version, read one code of a centroid (2 bytes at an estimated
# 1 GB/s) and sorted it (measured on a busy CPU).
READ_SECONDS, SORT_SECONDS = 2e-9, 18.5e-9


def mbn_choose_masks(clusterings: int, n_codes: int, n_below: int) -> Work:
    """Return the work of ``mbn_choose_masks``, which draws half of the units for each clustering.

    A unit is one of ``n_below`` centroids of one of ``n_codes`` clusterings in the layer below.
    """
    units = float(n_codes) * n_below
    # A random byte selects each unit with the probability 1/2. The number of selected units is wrong by 0.4
    # sqrt(units) on average, and half of the random numbers of the correction change nothing.
    steps = math.ceil(0.8 * math.sqrt(units) / 128)
    # The generator takes 10 rounds of about 30 integer operations for 32 random bytes: about 10 per unit.
    return Work(
        memory_bytes=clusterings * units,
        flops=10 * clusterings * units,
        launches=2,
        serial_seconds=steps * DRAW_SECONDS,
    )


def mbn_choose_numbers(clusterings: int, n_rows: int, n_centroids: int) -> Work:
    """Return the work of ``mbn_choose_numbers``, which draws the rows that become centroids."""
    few = 16 * n_centroids < n_rows
    steps = math.ceil(n_centroids / 128) * DRAW_SECONDS * few + math.ceil(n_rows / 128) * MARK_SECONDS
    return Work(
        memory_bytes=clusterings * (2.0 * n_rows + 4.0 * n_centroids),
        launches=2 if few else 3,
        serial_seconds=steps,
    )


def mbn_make_lists(clusterings: int, n_codes: int, n_centroids: int, n_below: int) -> Work:
    """Return the work of ``mbn_make_lists``, which prepares the centroids of several clusterings.

    Each clustering has ``n_centroids`` centroids of ``n_codes`` codes; a code is the index of one of
    ``n_below`` centroids of the layer below. The codes, and the masks of those that a clustering uses, are on
    the GPU.
    """
    codes, units = 2.0 * clusterings * n_centroids * n_codes, float(clusterings) * n_codes * n_below
    lists = 4.0 * clusterings * n_codes * (n_below + 1) + 4.0 * clusterings * n_codes * n_centroids
    read = 7 * codes + units + 3 * lists  # int32 copies of the codes are read and written
    return Work(memory_bytes=read, launches=1)


def mbn_nearest_codes(n_rows: int, n_codes: int, clusterings: int = 1) -> Work:
    """Return the work of ``mbn_nearest_codes``: nearest of at most 65,536 centroids for rows on the GPU."""
    read, codes = 4.0 * n_rows * (n_codes + 1) * clusterings, 2.0 * n_rows * clusterings
    return Work(memory_bytes=read + codes, launches=1 if n_rows else 0, downloads=1, copied_bytes=codes)


def mbn_upper_group(n_rows: int, n_codes: int, n_centroids: int, n_below: int, clusterings: int) -> Work:
    """Return the work of several clusterings of an upper layer.

    The codes of all rows in the layer below are on the GPU. Centroids are drawn from these rows.
    """
    return (
        mbn_choose_numbers(clusterings, n_rows, n_centroids)
        + Work(memory_bytes=4.0 * clusterings * n_centroids * n_codes, launches=1)
        + mbn_choose_masks(clusterings, n_codes, n_below)
        + mbn_make_lists(clusterings, n_codes, n_centroids, n_below)
        + mbn_nearest_codes(n_rows, n_codes, clusterings)
    )


def earlier_mbn_upper_group(
    n_rows: int, n_codes: int, n_centroids: int, n_below: int, clusterings: int
) -> Work:
    """Return the work of ``mbn_upper_group`` in an earlier version.

    The host sorted the codes of centroids, and each clustering had a launch of its own.
    """
    host = (
        clusterings * n_codes * (n_below * EARLIER_DRAW_SECONDS + n_centroids * (READ_SECONDS + SORT_SECONDS))
    )
    lists = 4.0 * n_codes * (n_below + 1) + 4.0 * n_codes * (n_centroids + 16)
    count = Work(
        memory_bytes=4.0 * n_rows * (n_codes + 1) + 4.0 * n_rows,
        launches=1,
        uploads=2,
        copied_bytes=lists + 4.0 * n_rows,
    )
    return count * clusterings + Work(downloads=1, host_seconds=host)


def mbn_nearest_sparse(n_rows: int, entries: int, on_card: bool = True) -> Work:
    """Return the work of ``mbn_nearest_sparse``: nearest centroids of CSR rows with ``entries`` numbers."""
    rows = 8.0 * entries + 4 * (n_rows + 1)
    return Work(
        memory_bytes=rows + 4 * n_rows,
        launches=1 if n_rows else 0,
        uploads=0 if on_card else 3,
        downloads=1,
        copied_bytes=4 * n_rows + (0 if on_card else rows),
    )


def crbm_inference(visible: int, hidden: int, rows: int, sweeps: int, with_pairs: bool = False) -> Work:
    """Return the work of sum-product inference in conditional RBMs whose biases are on the GPU.

    Each sweep updates the messages of all visible x hidden edges of each row, with one division per edge.
    ``with_pairs`` adds the beliefs of pairs of units.
    """
    edges = float(visible) * hidden
    kept = edges >= CLUSTER_EDGES and 4 * math.ceil(visible / 8) * hidden <= 232_448 - 8192
    group = max(1, min(rows, int(MESSAGE_BYTES // (4 * edges)))) if with_pairs or not kept else max(rows, 1)
    groups = math.ceil(rows / group)
    messages = 0.0 if kept else 16.0 * edges * rows * sweeps
    pairs = 8.0 * edges * rows if with_pairs else 0.0
    return Work(
        # Messages of at most 50 MB stay in the second-level cache, so that they do not use the GPU's memory.
        memory_bytes=8 * edges
        + 8.0 * rows * (visible + hidden)
        + pairs
        + (messages if edges * rows * 4 > 50e6 else 0.0),
        flops=24.0 * edges * rows * sweeps,
        divisions=edges * rows * sweeps,
        launches=groups * (2 if with_pairs else 1),
    )


def crbm_step(visible: int, hidden: int, features: int, chains: int, rows: int, sweeps: int) -> Work:
    """Return the work of a learning step by belief propagation whose parameters stay on the GPU.

    A batch has ``chains`` parts of ``rows`` rows of ``features`` inputs. Launches include array expressions
    of CuPy. Only rows, outputs and measurements are copied.
    """
    edges, units, total = visible * hidden, visible + hidden, chains * rows
    parameters, factored = edges + units * (features + 1), total * (units + features) < units * features
    out = crbm_inference(visible, hidden, total, sweeps, with_pairs=True)
    out += Work(launches=14 + 4 * chains if factored else 12 + 6 * chains, uploads=3, downloads=1)
    products = 4.0 * total * (features * units + edges)
    gradients = 8.0 * chains * (edges if factored else parameters)
    read = 4.0 * chains * features * units + gradients + 8.0 * (edges + parameters)
    blocks = math.ceil(edges / 512) + math.ceil(units / 512) if factored else math.ceil(parameters / 512)
    copied = total * (4.0 * features + visible) + 4 * (chains + 1) + 4 * (3 * total + 1 + blocks)
    return out + Work(flops=products, memory_bytes=read, copied_bytes=copied)


def crbm_host_step(visible: int, hidden: int, features: int, chains: int, rows: int, sweeps: int) -> Work:
    """Return the work of a learning step in which the host updates the parameters, as with several workers.

    Parameters, rows and outputs are copied to or from the GPU. The work of the host is not included.
    """
    out = crbm_inference(visible, hidden, chains * rows, sweeps, with_pairs=True)
    out += Work(launches=13 + 4 * chains - out.launches, uploads=4, downloads=3)
    parameters, units = visible * hidden + (visible + hidden) * (features + 1), visible + hidden
    products = 2.0 * chains * rows * (features * units + 2 * visible * hidden)
    read = 4.0 * chains * (features * units + visible * hidden)
    copied = (
        4.0 * (parameters + chains * (visible * hidden + rows * (units + 3 + features)))
        + chains * rows * visible
    )
    return out + Work(flops=products, memory_bytes=read, copied_bytes=copied)


def earlier_crbm_step(visible: int, hidden: int, features: int, chains: int, rows: int, sweeps: int) -> Work:
    """Return the work of a step in an earlier version: the host ran the parts of a batch in turn."""
    alone = crbm_host_step(visible, hidden, features, 1, rows, sweeps)
    return (alone + Work(launches=42 - alone.launches, uploads=1, downloads=1)) * chains


def hcn_sweep(chains: int, images: int, pixels: int, places: int, weights: int, height: int = 8) -> Work:
    """Return the work of ``hcn_sweep``, one sweep (round of messages), with all arrays on the GPU.

    A chain of ``images`` updates their ``pixels`` one after another. Each image has beliefs of features at
    ``places``, and each chain has beliefs of ``weights``, for features of ``height`` rows.
    """
    read = 4.0 * chains * (2 * images * pixels + 2 * images * places + 2 * weights)
    shared = 4 * (images * places + weights) < 232_448 - 1024
    rounds = math.ceil(height / 8) * math.ceil(weights / height / 32)  # a warp updates every eighth row
    cycles = PIXEL_CYCLES + PAIRS_CYCLES * rounds
    seconds = (cycles if shared and chains <= 132 else cycles + CACHE_CYCLES) / CLOCK_HZ
    return Work(memory_bytes=read, launches=1, serial_seconds=images * pixels * seconds)


def earlier_hcn_sweep(chains: int, images: int, pixels: int, places: int, weights: int) -> Work:
    """Return the work of ``hcn_sweep`` in an earlier version, which kept no beliefs in shared memory."""
    now = hcn_sweep(chains, images, pixels, places, weights)
    return replace(now, serial_seconds=images * pixels * EARLIER_PIXEL_SECONDS)


def hcn_sweep_messages(
    chains: int, images: int, pixels: int, places: int, weights: int, max_messages: int, height: int = 8
) -> Work:
    """Return the work of ``hcn_sweep_messages``, a sweep that stores int16 messages of each image."""
    more = Work(
        memory_bytes=8.0 * chains * images * max_messages,
        downloads=1,
        copied_bytes=4.0 * chains,
    )
    return hcn_sweep(chains, images, pixels, places, weights, height) + more


def hcn_decode_images(
    images: int, pixels: int, places: int, weights: int, sweeps: int, max_messages: int
) -> Work:
    """Return the work of ``hcn_decode_images``, which infers features of images that are on the GPU."""
    read = 4.0 * (images * (pixels * 2 + 2 * places) + weights) + 4.0 * sweeps * images * max_messages
    return Work(memory_bytes=read, launches=1, uploads=1, downloads=1, copied_bytes=4.0 * (weights + images))


# Estimated cycles to update one pixel in a sweep. A round updates 32 pairs in each of 8 warps: 36 machine
# instructions (compute capability 9.0) for each of the two warps of a scheduler.
PAIRS_CYCLES = 72
# Cycles of a pixel for its barriers, its sums over warps and its first reads; and additional cycles if the
# beliefs are in the second-level cache instead of shared memory.
PIXEL_CYCLES, CACHE_CYCLES = 550, 1000
# Estimated seconds to update one pixel in the earlier version, whose pairs took 95 instructions.
EARLIER_PIXEL_SECONDS = 2e-6
# Largest number of bytes of the arrays of a kernel call, as in models/hcn/model/stored_messages.py.
KERNEL_CALL_BYTES = 2**31


def hcn_visit(
    leaves: int, images: int, pixels: int, places: int, weights: int, max_messages: int, feature_height: int
) -> Work:
    """Return the work of one sweep (round of messages) over several leaves (ranges of images) at once.

    Beliefs and messages are copied to the GPU and back. ``feature_height`` is in pixels.
    """
    arrays = (
        4 * images * places + 4 * weights + images * (4 * max_messages + pixels * feature_height)
    )  # beliefs of features and weights, messages, bytes of pixels
    together = max(1, KERNEL_CALL_BYTES // arrays)
    if leaves > together:
        whole = hcn_visit(together, images, pixels, places, weights, max_messages, feature_height) * (
            leaves // together
        )
        rest = leaves % together
        more = (
            hcn_visit(rest, images, pixels, places, weights, max_messages, feature_height) if rest else Work()
        )
        return whole + more
    once = Work(
        uploads=7,  # evidence, pixel order, both kinds of beliefs and of messages, and the bytes of pixels
        downloads=5,  # these arrays except evidence and pixel order
        copied_bytes=leaves * (2.0 * arrays + 8 * images * pixels),
    )
    return once + hcn_sweep_messages(leaves, images, pixels, places, weights, max_messages, feature_height)


def earlier_hcn_visit(
    leaves: int, images: int, pixels: int, places: int, weights: int, max_messages: int, feature_height: int
) -> Work:
    """Return the work of ``hcn_visit`` in an earlier version: one leaf (range of images) after the other."""
    more = Work(uploads=1, copied_bytes=4.0 * (pixels + 1))  # the position of each pixel's first message
    now = hcn_visit(1, images, pixels, places, weights, max_messages, feature_height)
    now = replace(now, serial_seconds=images * pixels * EARLIER_PIXEL_SECONDS)
    return (now + more) * leaves


def _linear_mixture_scores(n_rows: int, n_features: int, n_components: int, n_dims: int) -> Work:
    """Return the work of the scores of centred rows for all components of a class, and of the best score."""
    columns = n_components * (n_dims + 1)
    tile = max(1, min(max(TILE // columns, 1), n_rows)) if n_rows else 1
    tiles = math.ceil(n_rows / tile) if n_rows else 0
    flops = 2.0 * n_rows * n_features * columns
    read = 4.0 * n_rows * (n_features + 2 * columns + 2 * n_components) + 4.0 * tiles * columns * n_features
    return Work(memory_bytes=read, flops=flops + 2.0 * n_rows * columns, gemm_flops=flops, launches=3 * tiles)


def linear_mixture_nearest(
    n_rows: int, n_features: int, n_components: int, n_dims: int, on_card: bool = True
) -> Work:
    """Return the work of ``linear_mixture_nearest`` for one class whose components share a noise variance."""
    scores = _linear_mixture_scores(n_rows, n_features, n_components, n_dims)
    tiles = scores.launches // 3
    centred = Work(
        memory_bytes=12.0 * n_rows * n_features, launches=2 * tiles, uploads=0 if on_card else tiles
    )
    return (
        scores
        + centred
        + Work(downloads=1, copied_bytes=8.0 * n_rows + (0.0 if on_card else 4.0 * n_rows * n_features))
    )


def linear_mixture_scatter(
    n_rows: int,
    n_features: int,
    n_directions: int,
    n_components: int,
    grams: bool = False,
    on_card: bool = True,
) -> Work:
    """Return the work of ``linear_mixture_add_scatter``, which sums products of rows and their projections.

    ``grams`` adds the Gram matrices of the projections.
    """
    sums = (
        8.0 * n_components * ((n_directions + 2) * n_features + (n_directions * n_directions if grams else 0))
    )
    moved = 12.0 * n_rows + 4 * (n_components + 1) + (0.0 if on_card else 4.0 * n_rows * n_features)
    return Work(
        memory_bytes=4.0 * n_rows * (4 * n_features + 2 * n_directions)
        + 4.0 * n_components * n_directions * n_features
        + 2 * sums,
        flops=4.0 * n_rows * n_features * n_directions + 4.0 * n_rows * n_features,
        launches=3 + grams,
        uploads=1 + (not on_card),
        copied_bytes=moved,
    )


def linear_mixture_leaf(
    blocks: int, n_rows: int, n_features: int, n_components: int, n_dims: int, n_directions: int,
    classes: int = 1, item_bytes: int = 4, on_card: bool = False,
) -> Work:  # fmt: skip
    """Return the work of an E-step with hard assignment on one leaf (range of rows) of several blocks.

    Each class has the same number of components. The sums of the leaf are copied to the host once.
    """
    block = Work(
        memory_bytes=12.0 * n_rows * n_features,
        launches=2,
        uploads=1,
        downloads=1,
        copied_bytes=4.0 * n_rows + 8.0 * n_rows,
    )
    block += _linear_mixture_scores(n_rows // classes, n_features, n_components // classes, n_dims) * classes
    block += linear_mixture_scatter(n_rows, n_features, n_directions, n_components)
    if not on_card:
        block += Work(
            memory_bytes=2.0 * n_rows * n_features * item_bytes,
            uploads=1,
            copied_bytes=float(n_rows) * n_features * item_bytes,
        )
    sums = 8.0 * n_components * (n_directions + 2) * n_features
    return block * blocks + Work(downloads=1, copied_bytes=sums, host_seconds=sums / COPY_RATE)


def earlier_linear_mixture_leaf(
    blocks: int, n_rows: int, n_features: int, n_components: int, n_dims: int, n_directions: int,
    classes: int = 1, item_bytes: int = 4, on_card: bool = False,
) -> Work:  # fmt: skip
    """Return the work of ``linear_mixture_leaf`` in an earlier version.

    The sums were copied to the host after each block, and the host waited for each class.
    """
    now = linear_mixture_leaf(
        1, n_rows, n_features, n_components, n_dims, n_directions, classes, item_bytes, on_card
    )
    sums = 8.0 * n_components * (n_directions + 2) * n_features
    grams = 8.0 * n_components * n_directions * n_directions  # Gram matrices were always copied.
    more = Work(
        launches=2 * (classes - 1),
        uploads=2 * classes + 2,
        downloads=2 * classes,
        copied_bytes=grams + 4.0 * n_rows + 8.0 * classes,
        host_seconds=sums / COPY_RATE,  # The host adds the sums of each block in new memory.
    )
    return (now + more) * blocks


MakeWork = Callable[[], Work]
# Work of converting a block's uint8 rows, which stay on the GPU, to float32 in each pass. In an earlier
# version each pass copied the rows from the host.
CONVERSION_WORK = Work(memory_bytes=65_536 * 784 * 5.0)
# Arguments of mbn_upper_group: rows, codes per row, centroids, centroids in the layer below, clusterings.
MBN_SIZES = 60_000, 400, 2000, 4000, 32
# Arguments of mbn_nearest: 60,000 rows of 784 bytes, half of the columns, and a pool of 16,000 centroids.
MBN_POOL_SIZES = 60_000, 784, 392, 16_000, 1
# Arguments of hcn_sweep: 128 chains of 5 images of 24 x 24 pixels; 32 features of 8 x 6 at 17 x 19 places.
HCN_SWEEP_SIZES = 128, 5, 576, 19 * 17 * 32, 48 * 32
# Arguments of hcn_visit: 128 leaves (ranges of images) of 40 images of 28 x 28; 32 features of 5 x 5 pixels.
HCN_VISIT_SIZES = 128, 40, 784, 24 * 24 * 32, 25 * 32, 24 * 24 * 25 * 32 + 32, 5
# Arguments of crbm_step (outputs, hidden units, inputs, chains, rows of a chain, sweeps): default steps of 20
# rows, and steps of 1,280 rows.
CRBM_SMALL_SIZES, CRBM_LARGE_SIZES = (784, 256, 784, 2, 10, 32), (784, 256, 784, 64, 20, 32)
# Arguments of capsule_block for rows in float32 and in uint8, and the bytes of the uint8 rows.
CAPSULE_SIZES = 65_536, 784, 20, 1, None, 4
CAPSULE_UINT8_SIZES, CAPSULE_BYTES = (65_536, 784, 20, 1, None, 1), 65_536.0 * 784
# Arguments of linear_mixture_leaf as in a fit of 10 million rows: 20 blocks of 32,768 rows on the GPU, 1,000
# components of ten classes, 10 dimensions, 16 directions. MIXTURE_BYTES is the size of these rows.
MIXTURE_SIZES = 20, 32_768, 784, 1000, 10, 16, 10, 4, True
MIXTURE_BYTES = 20 * 32_768 * 784 * 4.0
EXAMPLES: dict[str, MakeWork] = {
    "capsule, D = 20, block of 65,536 uint8 rows": lambda: copy_rows_ahead(
        capsule_block(*CAPSULE_UINT8_SIZES), CAPSULE_BYTES
    ),
    "capsule, D = 20, 65,536 rows on the card": lambda: capsule_block(
        65_536, 784, 20, 1, None, 4, on_card=True
    ),
    "capsule, D = 20, 65,536 uint8 rows, pass 2": lambda: (
        capsule_block(*CAPSULE_SIZES, on_card=True) + CONVERSION_WORK
    ),
    "capsule map, D = 20, block of 65,536 uint8 rows": lambda: copy_rows_ahead(
        capsule_map_block(65_536, 784, 20, 1), CAPSULE_BYTES
    ),
    "capsule, D = 320, rows on the card": lambda: capsule_block(65_536, 784, 320, 1, None, 4, on_card=True),
    "mbn layer 1, k = 4,000, 60,000 rows": lambda: mbn_nearest(60_000, 784, 392, 4000, 1),
    "mbn layer 1, pool of 16,000, 60,000 uint8 rows": lambda: mbn_nearest(*MBN_POOL_SIZES, with_bytes=True),
    "mbn layer 2, 60,000 rows, 32 clusterings": lambda: mbn_upper_group(*MBN_SIZES),
    "crbm, 784 x 256, 20 rows, 32 sweeps": lambda: crbm_inference(784, 256, 20, 32),
    "crbm, 784 x 256, 1,280 rows, 32 sweeps": lambda: crbm_inference(784, 256, 1280, 32),
    "crbm step, 2 chains of 10 rows, 32 sweeps": lambda: crbm_step(*CRBM_SMALL_SIZES),
    "crbm step, 64 chains of 20 rows, 32 sweeps": lambda: crbm_step(*CRBM_LARGE_SIZES),
    "hcn sweep, 128 chains of 5 images": lambda: hcn_sweep(*HCN_SWEEP_SIZES),
    "hcn batch, 128 leaves of 40 images": lambda: hcn_visit(*HCN_VISIT_SIZES),
    "linear mixture, leaf of 655,360 rows, K = 1,000": lambda: linear_mixture_leaf(*MIXTURE_SIZES),
    "linear mixture, leaf, rows of the host": lambda: copy_rows_ahead(
        linear_mixture_leaf(*MIXTURE_SIZES[:-1]), MIXTURE_BYTES
    ),
}
# Work in an earlier version (commit e30a2cb5; d55ee17a for rows on the host), for examples that have changed
# since that version.
EARLIER: dict[str, MakeWork] = {
    "capsule, D = 20, 65,536 uint8 rows, pass 2": lambda: earlier_capsule_block(*CAPSULE_SIZES[:5], 1),
    "mbn layer 1, pool of 16,000, 60,000 uint8 rows": lambda: mbn_nearest(*MBN_POOL_SIZES),
    "mbn layer 2, 60,000 rows, 32 clusterings": lambda: earlier_mbn_upper_group(*MBN_SIZES),
    "crbm step, 2 chains of 10 rows, 32 sweeps": lambda: earlier_crbm_step(*CRBM_SMALL_SIZES),
    "crbm step, 64 chains of 20 rows, 32 sweeps": lambda: earlier_crbm_step(*CRBM_LARGE_SIZES),
    "hcn sweep, 128 chains of 5 images": lambda: earlier_hcn_sweep(*HCN_SWEEP_SIZES),
    "hcn batch, 128 leaves of 40 images": lambda: earlier_hcn_visit(*HCN_VISIT_SIZES),
    "capsule, D = 20, 65,536 rows on the card": lambda: earlier_capsule_block(
        65_536, 784, 20, 1, None, 4, on_card=True
    ),
    "linear mixture, leaf of 655,360 rows, K = 1,000": lambda: earlier_linear_mixture_leaf(*MIXTURE_SIZES),
    "capsule, D = 20, block of 65,536 uint8 rows": lambda: copy_rows_first(
        capsule_block(*CAPSULE_UINT8_SIZES), CAPSULE_BYTES
    ),
    "capsule map, D = 20, block of 65,536 uint8 rows": lambda: copy_rows_first(
        capsule_map_block(65_536, 784, 20, 1), CAPSULE_BYTES
    ),
    "linear mixture, leaf, rows of the host": lambda: copy_rows_first(
        linear_mixture_leaf(*MIXTURE_SIZES[:-1]), MIXTURE_BYTES
    ),
}


def predict_all() -> list[dict[str, float | str]]:
    """Return the prediction of each changed example on each GPU, for the earlier version and this one."""
    return [
        predict(name, EARLIER[name](), EXAMPLES[name](), card) for name in EARLIER for card in (H100, H200)
    ]


def count_cores() -> float:
    """Return how many processor cores have the predicted rate of the example of ``hcn_sweep`` on an H100."""
    chains, images, _, places, weights = HCN_SWEEP_SIZES
    # A place belongs to one of 32 features, and has a pair for each weight of that feature.
    pairs = chains * images * places * weights // 32
    kernels = json.loads((Path(__file__).parent / "results" / "hcn_kernels.json").read_text())["results"]
    rate = kernels["24 x 24, 32 features of 8 x 6"]["pairs_per_second"]["without messages"]
    return pairs / hcn_sweep(*HCN_SWEEP_SIZES).predicted_seconds(H100) / rate


def predict(name: str, before: Work, after: Work, card: Card) -> dict[str, float | str]:
    """Return the predicted seconds of a call before and after a change, with its launches and copies."""
    limit = after.card_seconds(card)
    out: dict[str, float | str] = {"example": name, "card": card.name, "limit_seconds": limit}
    for when, work in (("before", before), ("after", after)):
        seconds = work.predicted_seconds(card)
        out |= {f"{when}_seconds": seconds, f"{when}_share": limit / seconds}
        out |= {f"{when}_{key}": getattr(work, key) for key in ("launches", "uploads", "downloads")}
        out[f"{when}_copied_bytes"] = work.copied_bytes
    return out


def compare_with_bound(work: Work, seconds: float, card: Card = H100) -> dict[str, float | str]:
    """Return the lower bound of the seconds, its resource, and the bound divided by measured ``seconds``."""
    bound, resource = work.find_bottleneck(card)
    return {
        "bound_seconds": bound,
        "bound_by": resource,
        "share_of_bound": bound / seconds,
        "card": card.name,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="JSON file for the predictions of both versions")
    args = parser.parse_args()
    for name, make in EXAMPLES.items():
        for card in (H100, H200):
            seconds, resource = make().find_bottleneck(card)
            print(f"{name:50}{card.name:10}{1e3 * seconds:9.3f} ms  {resource}")
    print("predicted, earlier version -> this version: kernels' share of the seconds; waits of the host")
    found = predict_all()
    for line in found:
        shares = f"{line['before_share']:8.1%} -> {line['after_share']:6.1%}"
        waits = f"{line['before_downloads']} -> {line['after_downloads']}"
        print(f"{line['example']:50}{line['card']:10}{shares}  {waits}")
    if args.json:
        content = {"measured": False, "hcn_cores": round(count_cores(), 1), "predictions": found}
        args.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
