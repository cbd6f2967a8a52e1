"""Estimate the work of each GPU kernel and pass from its sizes, and print lower bounds of its time on a
card.

    python benchmarks/gpu_model.py

The bounds are those of typical sizes. A test compares launches, copies, waits and products with the counts
of the stand-in for CuPy. The model covers calls after the first, so that tables that stay on the card are
not counted. Array expressions of CuPy itself (conversions, copies on the card) do not count as launches.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

# Number of products that a tile of rows has in the kernels of mbn and linear_mixture.
TILE = 2**26
# Edges from which a graph uses a cluster of thread blocks; bytes of messages that are in memory at a time.
CLUSTER_EDGES, MESSAGE_BYTES = 2**14, 2**28


@dataclass(frozen=True)
class Card:
    """Peak rates of a card, per second."""

    name: str
    # Operations in float32 and float64, without tensor cores.
    flops: float
    flops64: float
    # Bytes of the card's memory, and of copies to and from the host.
    memory: float
    host: float
    # Divisions by the special-function units.
    divisions: float
    # Seconds to start a kernel or a copy, and to wait for a result on the host: typical values, not measured.
    launch_seconds: float = 2e-6
    wait_seconds: float = 10e-6


# Bytes per second at which one thread of the host copies or adds sums: measured on a CPU, 113 MB in 19 ms.
HOST_RATE = 6e9
COPY_THREADS = 5  # as in engine/backend.py
H100 = Card("H100 SXM", 67e12, 34e12, 3.35e12, 55e9, 132 * 16 * 1.755e9)
H200 = Card("H200", 67e12, 34e12, 4.8e12, 55e9, 132 * 16 * 1.755e9)


@dataclass(frozen=True)
class Work:
    """Work of a call. Bytes are those of the GPU's memory; each array counts once per kernel."""

    bytes: float = 0
    flops: float = 0  # float32 operations of matrix products and other sums
    gemm_flops: float = 0  # float32 operations of matrix products alone
    flops64: float = 0
    divisions: float = 0
    launches: int = 0  # number of launches: kernels, matrix products, and gathering of rows
    uploads: int = 0  # copies to the card
    downloads: int = 0  # copies to the host; the host waits for each
    copied_bytes: float = 0
    ahead_bytes: float = 0  # copied to the card by a thread while the card computes
    host_seconds: float = 0  # estimated work of the host that nothing overlaps
    serial_seconds: float = 0  # estimated work whose parts wait for each other

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __mul__(self, times: int) -> Work:
        return Work(*(getattr(self, f.name) * times for f in fields(self)))

    def seconds(self, card: Card) -> dict[str, float]:
        """Return the smallest seconds that each resource needs."""
        return {
            "float32 operations": self.flops / card.flops,
            "float64 operations": self.flops64 / card.flops64,
            "divisions": self.divisions / card.divisions,
            "memory of the card": self.bytes / card.memory,
            "copies to and from the host": (self.copied_bytes + self.ahead_bytes) / card.host,
            "launches and waits": (self.launches + self.uploads) * card.launch_seconds
            + self.downloads * card.wait_seconds,
        }

    def limit(self, card: Card) -> float:
        """Return the smallest seconds of the card's own work, if kernels follow one another."""
        seconds = self.seconds(card)
        return sum(v for key, v in seconds.items() if not key.startswith(("copies", "launches")))

    def predicted(self, card: Card) -> float:
        """Return the predicted seconds: the limit, copies, waits and work of the host follow one another.

        Only copies ahead overlap them; threads first copy these rows to page-locked memory.
        """
        starts = (self.launches + self.uploads) * card.launch_seconds
        kernels = max(self.limit(card), self.serial_seconds, starts)
        waits = self.downloads * card.wait_seconds
        serial = kernels + waits + self.copied_bytes / card.host + self.host_seconds
        return max(serial, self.ahead_bytes / (COPY_THREADS * HOST_RATE), self.ahead_bytes / card.host)

    def bound(self, card: Card) -> tuple[float, str]:
        """Return the lower bound of the seconds, and the resource that sets it."""
        seconds = self.seconds(card)
        name = max(seconds, key=lambda key: seconds[key])
        return seconds[name], name


def product(m: int, n: int, k: int, item: int = 4) -> Work:
    """Return the work of a matrix product (m, k) x (k, n) in float32."""
    flops = 2.0 * m * n * k
    return Work(bytes=item * (m * k + k * n + m * n), flops=flops, gemm_flops=flops, launches=1)


def rows_ahead(work: Work, row_bytes: float) -> Work:
    """Return work whose rows are copied to the card while the card computes, instead of before."""
    return work + Work(copied_bytes=-row_bytes, ahead_bytes=row_bytes)


def rows_before(work: Work, row_bytes: float) -> Work:
    """Return work that first copies its rows to page-locked memory, as an earlier version did."""
    return work + Work(host_seconds=row_bytes / HOST_RATE)


# -- capsule ----------------------------------------------------------------------------------------------


def capsule_residuals(n: int, total_dim: int, members: int, active: int | None = None) -> Work:
    """Return the work of ``capsule_residuals``; ``active`` rows pass the threshold (None: no threshold)."""
    host = 8 * (3 * members + 1)
    common = Work(flops64=150.0 * n * members, uploads=2, downloads=1, copied_bytes=12 * n + host)
    rows = 12 * n  # class and weight
    if active is None:
        return common + Work(bytes=12 * total_dim * n + rows, launches=2)
    factors = 4 * total_dim * n + rows + 8 * members * n + n
    gather = active * (8 * total_dim + 8 * members) + 8 * total_dim * active
    return common + Work(bytes=factors + n + (gather if active else 0), launches=4 if active else 2)


def capsule_block(
    n: int, p: int, total_dim: int, members: int, active: int | None, item: int, on_card: bool = False
) -> Work:
    """Return the work of one block of an E-step of multiclass members; ``item`` bytes a stored feature."""
    rows = active if active is not None else n
    moved = Work() if on_card else Work(uploads=1, copied_bytes=float(n) * p * item)
    if not on_card:
        moved += Work(bytes=float(n) * p * (item if item == 4 else 2 * item + 4))
    out = moved + product(total_dim, n, p) + capsule_residuals(n, total_dim, members, active)
    out += Work(uploads=-1)  # classes and weights are copied together
    if active is not None and active:
        out += Work(bytes=8.0 * active * p, launches=1)  # active rows are gathered
    if rows:
        # Without a threshold, sums and moment are copied together.
        dense = active is None
        back = 8.0 * -(-total_dim * p // 2) if dense else 4.0 * total_dim * p
        out += product(total_dim, p, rows) + Work(downloads=0 if dense else 1, copied_bytes=back)
    return out


def earlier_capsule_block(
    n: int, p: int, total_dim: int, members: int, active: int | None, item: int, on_card: bool = False
) -> Work:
    """Return the work of this block in an earlier version, which copied sums before the second product."""
    now = capsule_block(n, p, total_dim, members, active, item, on_card)
    return now + Work(uploads=1, downloads=1 if active is None else 0)


def capsule_map_block(n: int, p: int, total_dim: int, item: int) -> Work:
    """Return the work of one block of a map to latent means; ``item`` bytes per stored feature.

    The host waits for the check of finite numbers, and for the latent means.
    """
    stored = float(n) * p * item
    moved = Work(bytes=stored if item == 4 else 2 * stored + 4.0 * n * p, uploads=1, copied_bytes=stored)
    latents = 4.0 * n * total_dim
    return moved + product(total_dim, n, p) + Work(bytes=latents, downloads=2, copied_bytes=latents)


# -- bootstrap networks -----------------------------------------------------------------------------------


def mbn_nearest(n: int, p: int, q: int, k: int, item: int, on_card: bool = True) -> Work:
    """Return the work of ``mbn_nearest``: n rows, q of p columns, k centroids."""
    tile = max(1, min(n, TILE // k))
    tiles = math.ceil(n / tile) if n else 0
    flops = 2.0 * n * k * q
    read = float(n) * (p * item + 8 * q + 8 * k) + 4.0 * tiles * k * q
    moved = 0.0 if on_card else float(n) * p * item
    return Work(
        bytes=read,
        flops=flops + 2.0 * n * k,
        gemm_flops=flops,
        launches=3 * tiles,
        uploads=1 + (not on_card),
        downloads=1,
        copied_bytes=moved + 4 * q + 4 * n,
    )


# Seconds of the host to draw one unit (a centroid of the layer below) for a clustering, and to read one code
# of a centroid (estimated at 1 GB/s). In an earlier implementation, draws were slower, and the host sorted
# codes into lists. Draws and sorting were measured on a busy CPU.
DRAW_SECONDS, READ_SECONDS = 0.73e-9, 2e-9
EARLIER_DRAW_SECONDS, SORT_SECONDS = 3.9e-9, 18.5e-9


def mbn_make_lists(sets: int, v: int, k: int, below: int) -> Work:
    """Return the work of ``mbn_make_lists``: k centroids of each set, v codes of ``below`` centroids each."""
    codes, units = 2.0 * sets * k * v, float(sets) * v * below
    lists = 4.0 * sets * v * (below + 1) + 4.0 * sets * v * k
    read = 7 * codes + units + 3 * lists  # codes become int32
    return Work(bytes=read, launches=1, uploads=2, copied_bytes=codes + units)


def mbn_nearest_codes(n: int, v: int, sets: int = 1) -> Work:
    """Return the work of ``mbn_nearest_codes``: n rows of v codes on the card, up to 65,536 centroids."""
    read, codes = 4.0 * n * (v + 1) * sets, 2.0 * n * sets
    return Work(bytes=read + codes, launches=1 if n else 0, downloads=1, copied_bytes=codes)


def mbn_upper_group(n: int, v: int, k: int, below: int, sets: int) -> Work:
    """Return the work of a group of clusterings of an upper layer on n rows, the host's draws included."""
    host = sets * v * (below * DRAW_SECONDS + k * READ_SECONDS)
    return mbn_make_lists(sets, v, k, below) + mbn_nearest_codes(n, v, sets) + Work(host_seconds=host)


def earlier_mbn_upper_group(n: int, v: int, k: int, below: int, sets: int) -> Work:
    """Return the work of this group in the earlier implementation: the host made lists, one launch each."""
    host = sets * v * (below * EARLIER_DRAW_SECONDS + k * (READ_SECONDS + SORT_SECONDS))
    lists = 4.0 * v * (below + 1) + 4.0 * v * (k + 16)
    count = Work(bytes=4.0 * n * (v + 1) + 4.0 * n, launches=1, uploads=2, copied_bytes=lists + 4.0 * n)
    return count * sets + Work(downloads=1, host_seconds=host)


def mbn_nearest_sparse(n: int, entries: int, on_card: bool = True) -> Work:
    """Return the work of ``mbn_nearest_sparse``: n CSR rows with ``entries`` numbers in all."""
    rows = 8.0 * entries + 4 * (n + 1)
    return Work(
        bytes=rows + 4 * n,
        launches=1 if n else 0,
        uploads=0 if on_card else 3,
        downloads=1,
        copied_bytes=4 * n + (0 if on_card else rows),
    )


# -- conditional RBMs -------------------------------------------------------------------------------------


def crbm_inference(v: int, h: int, rows: int, sweeps: int, with_pairs: bool = False) -> Work:
    """Return the work of sum-product on graphs of v x h, biases on the card; one division per edge and
    sweep.
    """
    edges = float(v) * h
    kept = edges >= CLUSTER_EDGES and 4 * math.ceil(v / 8) * h <= 232_448 - 8192
    group = max(1, min(rows, int(MESSAGE_BYTES // (4 * edges)))) if with_pairs or not kept else max(rows, 1)
    groups = math.ceil(rows / group)
    messages = 0.0 if kept else 16.0 * edges * rows * sweeps
    pairs = 8.0 * edges * rows if with_pairs else 0.0
    return Work(
        # Messages of graphs that fit the second-level cache do not reach memory: see the table of README.md.
        bytes=8 * edges + 8.0 * rows * (v + h) + pairs + (messages if edges * rows * 4 > 50e6 else 0.0),
        flops=24.0 * edges * rows * sweeps,
        divisions=edges * rows * sweeps,
        launches=groups * (2 if with_pairs else 1),
    )


def crbm_step(v: int, h: int, x: int, chains: int, rows: int, sweeps: int) -> Work:
    """Return the work of a step of belief propagation on a GPU, which keeps the parameters.

    Launches include array expressions of CuPy. Only rows, outputs and measurements are copied.
    """
    edges, units, total = v * h, v + h, chains * rows
    parameters, factored = edges + units * (x + 1), total * (units + x) < units * x
    out = crbm_inference(v, h, total, sweeps, with_pairs=True)
    out += Work(launches=14 + 4 * chains if factored else 12 + 6 * chains, uploads=3, downloads=1)
    products = 4.0 * total * (x * units + edges)
    gradients = 8.0 * chains * (edges if factored else parameters)
    read = 4.0 * chains * x * units + gradients + 8.0 * (edges + parameters)
    blocks = math.ceil(edges / 512) + math.ceil(units / 512) if factored else math.ceil(parameters / 512)
    copied = total * (4.0 * x + v) + 4 * (chains + 1) + 4 * (3 * total + 1 + blocks)
    return out + Work(flops=products, bytes=read, copied_bytes=copied)


def crbm_host_step(v: int, h: int, x: int, chains: int, rows: int, sweeps: int) -> Work:
    """Return the work of a step that the host takes, as for several workers: each chain returns factors.

    Parameters, rows and outputs are copied to or from the card. The work of the host is not included.
    """
    out = crbm_inference(v, h, chains * rows, sweeps, with_pairs=True)
    out += Work(launches=13 + 4 * chains - out.launches, uploads=4, downloads=3)
    parameters, units = v * h + (v + h) * (x + 1), v + h
    products = 2.0 * chains * rows * (x * units + 2 * v * h)
    read = 4.0 * chains * (x * units + v * h)
    copied = 4.0 * (parameters + chains * (v * h + rows * (units + 3 + x))) + chains * rows * v
    return out + Work(flops=products, bytes=read, copied_bytes=copied)


def earlier_crbm_step(v: int, h: int, x: int, chains: int, rows: int, sweeps: int) -> Work:
    """Return the work of this step in an earlier version: by the host, one chain after the other."""
    alone = crbm_host_step(v, h, x, 1, rows, sweeps)
    return (alone + Work(launches=42 - alone.launches, uploads=1, downloads=1)) * chains


# -- compositional networks -------------------------------------------------------------------------------


def hcn_sweep(chains: int, images: int, pixels: int, places: int, weights: int) -> Work:
    """Return the work of ``hcn_sweep`` with arrays on the GPU.

    A chain computes its trees, one per pixel of each image, one after another; this takes ``serial_seconds``.
    """
    read = 4.0 * chains * (2 * images * pixels + 2 * images * places + 2 * weights)
    shared = 4 * (images * places + weights) < 232_448 - 1024
    tree = SHARED_TREE_SECONDS if shared and chains <= 132 else TREE_SECONDS
    return Work(bytes=read, launches=1, serial_seconds=images * pixels * tree)


def earlier_hcn_sweep(chains: int, images: int, pixels: int, places: int, weights: int) -> Work:
    """Return the work of :func:`hcn_sweep` in an earlier version: beliefs in the second-level cache."""
    now = hcn_sweep(chains, images, pixels, places, weights)
    return replace(now, serial_seconds=images * pixels * TREE_SECONDS)


def hcn_sweep_messages(chains: int, images: int, pixels: int, places: int, weights: int, room: int) -> Work:
    """Return the work of ``hcn_sweep_messages`` with int16 messages, at most ``room`` of them an image."""
    more = Work(
        bytes=8.0 * chains * images * room,
        downloads=1,
        copied_bytes=4.0 * chains,
    )
    return hcn_sweep(chains, images, pixels, places, weights) + more


def hcn_decode_images(images: int, pixels: int, places: int, weights: int, sweeps: int, room: int) -> Work:
    """Return the work of ``hcn_decode_images`` with evidence, orders and beliefs on the card."""
    read = 4.0 * (images * (pixels * 2 + 2 * places) + weights) + 4.0 * sweeps * images * room
    return Work(bytes=read, launches=1, uploads=1, downloads=1, copied_bytes=4.0 * (weights + images))


# Estimated seconds of a tree, which waits for the tree before it. Beliefs are in the second-level cache, or
# in shared memory.
TREE_SECONDS, SHARED_TREE_SECONDS = 2e-6, 1e-6


KERNEL_CALL_BYTES = 2**31  # as in models/hcn/model/stored_messages.py


def hcn_visit(
    leaves: int, images: int, pixels: int, places: int, weights: int, room: int, lines: int
) -> Work:
    """Return the work of a visit of leaves at the same time, one sweep: messages are copied to the card and
    back.

    ``lines`` is the height of a feature.
    """
    arrays = 4 * images * places + 4 * weights + images * (4 * room + pixels * lines)  # s, w, messages, held
    together = max(1, KERNEL_CALL_BYTES // arrays)
    if leaves > together:
        whole = hcn_visit(together, images, pixels, places, weights, room, lines) * (leaves // together)
        rest = leaves % together
        more = hcn_visit(rest, images, pixels, places, weights, room, lines) if rest else Work()
        return whole + more
    once = Work(
        uploads=7,  # evidence, w, s, messages to s and to w, held, order
        downloads=5,
        copied_bytes=leaves * (2.0 * arrays + 8 * images * pixels),
    )
    return once + hcn_sweep_messages(leaves, images, pixels, places, weights, room)


def earlier_hcn_visit(
    leaves: int, images: int, pixels: int, places: int, weights: int, room: int, lines: int
) -> Work:
    """Return the work of these visits in an earlier version: one leaf (range of images) after the other."""
    more = Work(uploads=1, copied_bytes=4.0 * (pixels + 1))  # offsets of the messages of each pixel
    return (hcn_visit(1, images, pixels, places, weights, room, lines) + more) * leaves


# -- mixtures of linear models ----------------------------------------------------------------------------


def _mixture_scores(n: int, p: int, k: int, dims: int) -> Work:
    """Return the work of the scores of n centred rows under k components of one class, and their smallest."""
    columns = k * (dims + 1)
    tile = max(1, min(max(TILE // columns, 1), n)) if n else 1
    tiles = math.ceil(n / tile) if n else 0
    flops = 2.0 * n * p * columns
    read = 4.0 * n * (p + 2 * columns + 2 * k) + 4.0 * tiles * columns * p
    return Work(bytes=read, flops=flops + 2.0 * n * columns, gemm_flops=flops, launches=3 * tiles)


def linear_mixture_nearest(n: int, p: int, k: int, dims: int, on_card: bool = True) -> Work:
    """Return the work of ``linear_mixture_nearest`` over one class of k components with a common noise."""
    scores = _mixture_scores(n, p, k, dims)
    tiles = scores.launches // 3
    centred = Work(bytes=12.0 * n * p, launches=2 * tiles, uploads=0 if on_card else tiles)
    return scores + centred + Work(downloads=1, copied_bytes=8.0 * n + (0.0 if on_card else 4.0 * n * p))


def linear_mixture_scatter(n: int, p: int, q: int, k: int, grams: bool = False, on_card: bool = True) -> Work:
    """Return the work of ``linear_mixture_add_scatter``: n rows in k groups, q directions."""
    sums = 8.0 * k * ((q + 2) * p + (q * q if grams else 0))
    moved = 12.0 * n + 4 * (k + 1) + (0.0 if on_card else 4.0 * n * p)
    return Work(
        bytes=4.0 * n * (4 * p + 2 * q) + 4.0 * k * q * p + 2 * sums,
        flops=4.0 * n * p * q + 4.0 * n * p,
        launches=3 + grams,
        uploads=1 + (not on_card),
        copied_bytes=moved,
    )


def linear_mixture_leaf(
    blocks: int, n: int, p: int, k: int, dims: int, q: int, classes: int = 1, item: int = 4,
    on_card: bool = False,
) -> Work:  # fmt: skip
    """Return the work of a leaf of blocks of n rows, hard assignment: k components, equal for all classes.

    The sums of the leaf are copied to the host once.
    """
    block = Work(bytes=12.0 * n * p, launches=2, uploads=1, downloads=1, copied_bytes=4.0 * n + 8.0 * n)
    block += _mixture_scores(n // classes, p, k // classes, dims) * classes
    block += linear_mixture_scatter(n, p, q, k)
    if not on_card:
        block += Work(bytes=2.0 * n * p * item, uploads=1, copied_bytes=float(n) * p * item)
    sums = 8.0 * k * (q + 2) * p
    return block * blocks + Work(downloads=1, copied_bytes=sums, host_seconds=sums / HOST_RATE)


def earlier_mixture_leaf(
    blocks: int, n: int, p: int, k: int, dims: int, q: int, classes: int = 1, item: int = 4,
    on_card: bool = False,
) -> Work:  # fmt: skip
    """Return the work of this leaf in an earlier version: sums to the host per block, waits per class."""
    now = linear_mixture_leaf(1, n, p, k, dims, q, classes, item, on_card)
    sums, grams = 8.0 * k * (q + 2) * p, 8.0 * k * q * q  # The gram matrices were always copied.
    more = Work(
        launches=2 * (classes - 1),
        uploads=2 * classes + 2,
        downloads=2 * classes,
        copied_bytes=grams + 4.0 * n + 8.0 * classes,
        host_seconds=sums / HOST_RATE,  # The memory is pageable, and each block gets new pages.
    )
    return (now + more) * blocks


# -- bounds -----------------------------------------------------------------------------------------------

Make = Callable[[], Work]
# The GPU keeps rows of uint8 and converts them to float32 in each pass. In the earlier version each pass
# copied the rows from the host.
_KEPT_ROWS = Work(bytes=65_536 * 784 * 5.0)
_MBN = 60_000, 400, 2000, 4000, 32  # rows, clusterings and k of both layers, clusterings in a group
_HCN_SWEEP = 128, 5, 576, 19 * 17 * 32, 48 * 32
# 128 leaves of 40 images of 28 x 28 pixels; 32 features of 5 x 5.
_HCN_VISIT = 128, 40, 784, 24 * 24 * 32, 25 * 32, 24 * 24 * 25 * 32 + 32, 5
# Default steps of 20 rows, and steps of 1,280 rows: conditional RBMs of 784 outputs from 784 features.
_CRBM_SMALL, _CRBM_LARGE = (784, 256, 784, 2, 10, 32), (784, 256, 784, 64, 20, 32)
_CAPSULE = 65_536, 784, 20, 1, None, 4
_CAPSULE_ROWS, _CAPSULE_BYTES = (65_536, 784, 20, 1, None, 1), 65_536.0 * 784
_MIXTURE_BYTES = 20 * 32_768 * 784 * 4.0
# A leaf of 20 blocks on the card, as for 10 million rows: K = 1,000 components of ten classes, 10 dimensions,
# 16 directions.
_MIXTURE = 20, 32_768, 784, 1000, 10, 16, 10, 4, True
EXAMPLES: dict[str, Make] = {
    "capsule, D = 20, block of 65,536 uint8 rows": lambda: rows_ahead(
        capsule_block(*_CAPSULE_ROWS), _CAPSULE_BYTES
    ),
    "capsule, D = 20, 65,536 rows on the card": lambda: capsule_block(
        65_536, 784, 20, 1, None, 4, on_card=True
    ),
    "capsule, D = 20, 65,536 uint8 rows, pass 2": lambda: capsule_block(*_CAPSULE, on_card=True) + _KEPT_ROWS,
    "capsule map, D = 20, block of 65,536 uint8 rows": lambda: rows_ahead(
        capsule_map_block(65_536, 784, 20, 1), _CAPSULE_BYTES
    ),
    "capsule, D = 320, rows on the card": lambda: capsule_block(65_536, 784, 320, 1, None, 4, on_card=True),
    "mbn layer 1, k = 4,000, 60,000 rows": lambda: mbn_nearest(60_000, 784, 392, 4000, 1),
    "mbn layer 2, 60,000 rows, 32 clusterings": lambda: mbn_upper_group(*_MBN),
    "crbm, 784 x 256, 20 rows, 32 sweeps": lambda: crbm_inference(784, 256, 20, 32),
    "crbm, 784 x 256, 1,280 rows, 32 sweeps": lambda: crbm_inference(784, 256, 1280, 32),
    "crbm step, 2 chains of 10 rows, 32 sweeps": lambda: crbm_step(*_CRBM_SMALL),
    "crbm step, 64 chains of 20 rows, 32 sweeps": lambda: crbm_step(*_CRBM_LARGE),
    "hcn sweep, 128 chains of 5 images": lambda: hcn_sweep(*_HCN_SWEEP),
    "hcn batch, 128 leaves of 40 images": lambda: hcn_visit(*_HCN_VISIT),
    "linear mixture, leaf of 655,360 rows, K = 1,000": lambda: linear_mixture_leaf(*_MIXTURE),
    "linear mixture, leaf, rows of the host": lambda: rows_ahead(
        linear_mixture_leaf(*_MIXTURE[:-1]), _MIXTURE_BYTES
    ),
}
# Work of an earlier version (commit e30a2cb5; rows on the host: d55ee17a), for examples that changed since.
EARLIER: dict[str, Make] = {
    "capsule, D = 20, 65,536 uint8 rows, pass 2": lambda: earlier_capsule_block(*_CAPSULE[:5], 1),
    "mbn layer 2, 60,000 rows, 32 clusterings": lambda: earlier_mbn_upper_group(*_MBN),
    "crbm step, 2 chains of 10 rows, 32 sweeps": lambda: earlier_crbm_step(*_CRBM_SMALL),
    "crbm step, 64 chains of 20 rows, 32 sweeps": lambda: earlier_crbm_step(*_CRBM_LARGE),
    "hcn sweep, 128 chains of 5 images": lambda: earlier_hcn_sweep(*_HCN_SWEEP),
    "hcn batch, 128 leaves of 40 images": lambda: earlier_hcn_visit(*_HCN_VISIT),
    "capsule, D = 20, 65,536 rows on the card": lambda: earlier_capsule_block(
        65_536, 784, 20, 1, None, 4, on_card=True
    ),
    "linear mixture, leaf of 655,360 rows, K = 1,000": lambda: earlier_mixture_leaf(*_MIXTURE),
    "capsule, D = 20, block of 65,536 uint8 rows": lambda: rows_before(
        capsule_block(*_CAPSULE_ROWS), _CAPSULE_BYTES
    ),
    "capsule map, D = 20, block of 65,536 uint8 rows": lambda: rows_before(
        capsule_map_block(65_536, 784, 20, 1), _CAPSULE_BYTES
    ),
    "linear mixture, leaf, rows of the host": lambda: rows_before(
        linear_mixture_leaf(*_MIXTURE[:-1]), _MIXTURE_BYTES
    ),
}


def predictions() -> list[dict[str, float | str]]:
    """Return predicted seconds and shares of the card's limit, before and after; nothing is measured."""
    return [
        _prediction(name, EARLIER[name](), EXAMPLES[name](), card)
        for name in EARLIER
        for card in (H100, H200)
    ]


def _prediction(name: str, before: Work, after: Work, card: Card) -> dict[str, float | str]:
    limit = after.limit(card)
    out: dict[str, float | str] = {"example": name, "card": card.name, "limit_seconds": limit}
    for when, work in (("before", before), ("after", after)):
        seconds = work.predicted(card)
        out |= {f"{when}_seconds": seconds, f"{when}_share": limit / seconds}
        out |= {f"{when}_{key}": getattr(work, key) for key in ("launches", "uploads", "downloads")}
        out[f"{when}_copied_bytes"] = work.copied_bytes
    return out


def share(work: Work, seconds: float, card: Card = H100) -> dict[str, float | str]:
    """Return the lower bound of a measured time, and the bound divided by the measured time."""
    bound, resource = work.bound(card)
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
    parser.add_argument("--json", type=Path, help="file for the predictions before and after")
    args = parser.parse_args()
    for name, make in EXAMPLES.items():
        for card in (H100, H200):
            seconds, resource = make().bound(card)
            print(f"{name:50}{card.name:10}{1e3 * seconds:9.3f} ms  {resource}")
    print("predicted, not measured: shares of the limit before and after, waits before and after")
    found = predictions()
    for one in found:
        shares = f"{one['before_share']:8.1%} -> {one['after_share']:6.1%}"
        waits = f"{one['before_downloads']} -> {one['after_downloads']}"
        print(f"{one['example']:50}{one['card']:10}{shares}  {waits}")
    if args.json:
        args.json.write_text(json.dumps({"measured": False, "predictions": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
