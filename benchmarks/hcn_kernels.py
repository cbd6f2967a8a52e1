"""Measure the rates of the compiled sweeps of compositional networks on one thread.

    python benchmarks/hcn_kernels.py

A feature is a small binary image of weights, which can be at many places of an image. A pair is a place and a
weight that meet in one pixel; the pairs of one pixel are a tree of the factor graph. A sweep updates the
messages between pixels, places and weights once, tree by tree. Rates are pairs per second of the fastest of
100 rounds (numpy: 5). The inputs are five letter images of 24 x 24 with 32 features of 8 x 6 (1,536 pairs per
tree), or of 14 x 14 with 5 features of 6 x 6 (180 pairs per tree), after 40 minibatches of learning. The
results for each size are:

rates    Rates of a sweep without stored messages, of the first sweep with stored messages, of five sweeps
         with stored messages after 30 or more (with and without damping), and of decoding (the search for the
         places of known features).
bounds   Two operations for comparison. The bare loop computes only the arithmetic of a pair, in arrays that
         fit into the first-level cache. Numpy's maximum reads the messages to places, two bytes per pair,
         which each sweep with stored messages has to read as well.
threads  The rate of two threads divided by the rate of one.
quiet    The shares of pairs, and of rows of pixels of features, that still send a message to a weight after
         the sweeps.

Two more results are the rate of the numpy reference on one image of 14 x 14, and counts of instructions in
the machine code of the sweeps: minima and maxima of whole vectors, divisions and calls.
"""

from __future__ import annotations

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import numba
import numpy as np
from common import fastest, parser, write

from scalelatent.generators.images import image_set
from scalelatent.kernels import jit
from scalelatent.kernels.arrays import aligned_empty
from scalelatent.models.hcn.kernels import reference
from scalelatent.models.hcn.kernels.cpu import sweeps
from scalelatent.models.hcn.kernels.pixel_order import shuffled
from scalelatent.models.hcn.kernels.units import to_units
from scalelatent.models.hcn.kernels.windows import message_room
from scalelatent.models.hcn.model.layer import FeatureLayer

# Number of images in a minibatch, and number of minibatches learned before the measurement.
IMAGES, WARMUP_BATCHES = 5, 40
# Decoding runs this many sweeps. It would stop at convergence, but no image converges in two sweeps.
DECODE_SWEEPS = 2
# Number of minibatches that each thread runs when the rate of two threads is compared with that of one.
BATCHES_PER_THREAD = 40
# One measurement of sweeps with stored messages runs this many in a row, because in a fit each sweep starts
# from the messages of the sweep before.
CONSECUTIVE_SWEEPS = 5
# Image side, letters, letters per image, number of features, and their height and width.
SIZES = {
    "24 x 24, 32 features of 8 x 6": (24, "ABCDEFGHIJKLMNOPQRSTUVWXYZ", 5, 32, (8, 6)),
    "14 x 14, 5 features of 6 x 6": (14, "TLX", 2, 5, (6, 6)),
}


@numba.njit(nogil=True, error_model="numpy")
def compute_bare_messages(s: Any, w: Any, b: Any, rounds: Any) -> None:
    """Compute the messages of one tree (all pairs of a pixel) ``rounds`` times.

    ``s`` and ``w`` are the beliefs of places and weights; ``b`` is the evidence of the pixel. The second
    largest value, which real messages need, is omitted: LLVM would not vectorise its loop.
    """
    zero = np.int32(0)
    for _ in range(rounds):
        total, first = zero, np.int32(-(2**29))
        for k in range(len(s)):
            t = min(s[k] + w[k], min(s[k], w[k]))
            total += max(t, zero)
            first = max(first, t)
        bound = max(zero, -first)
        for k in range(len(s)):
            x, y = s[k], w[k]
            t = min(x + y, min(x, y))
            g = min(b + total - max(t, zero), bound if t < first else b)
            s[k] = x + max(zero, y + g) - max(zero, y)
            w[k] = y + max(zero, x + g) - max(zero, x)
        b = -b


def measure_rates(
    size: int, alphabet: str, count: int, features: int, window: tuple[int, int], seed: int
) -> dict:
    """Return pairs (place, weight) per second of all sweeps, their ratios, and shares that send messages."""
    letters = image_set("letters", alphabet=alphabet, count=count, size=(size, size), noise=0.03, seed=seed)
    layer = FeatureLayer((1, size, size), features, window, 1e-3, 1e-3, 0.3, 1e-4)
    evidence = layer.compute_evidence(letters.rows(0, IMAGES)[0].reshape(IMAGES, -1))[None]
    order = shuffled(seed, "benchmark", 0, np.zeros(1), evidence.size)
    image_orders = shuffled(seed, "benchmark", 0, np.arange(IMAGES), layer.n_pixels)
    w = to_units(layer.first_beliefs(seed))[None]
    for epoch in range(WARMUP_BATCHES):  # Start the measurement from weights in the middle of learning.
        rows = letters.rows(IMAGES * epoch, IMAGES * epoch + IMAGES)[0].reshape(IMAGES, -1)
        given = layer.compute_evidence(rows)[None], order, layer.prior_beliefs(IMAGES)[None], w
        sweeps.sweep(*given)
    room = message_room((size, size), window, features)
    before = layer.prior_beliefs(IMAGES)[None], w.copy()
    s, beliefs = (aligned_empty(a.shape, np.int32) for a in before)
    states = [tuple(a.copy() for a in before) for _ in range(2)]
    stored = {
        damping: (
            *(a.copy() for a in before),
            *(np.zeros((1, IMAGES, 1, room), np.int16) for _ in range(2)),
            np.zeros((1, IMAGES, 1, size * size, window[0]), np.uint8),
        )
        for damping in (1.0, 0.8)
    }
    first_state = [a.copy() for a in stored[1.0]]
    pool = ThreadPoolExecutor(2)

    def sweep_without_messages(state: tuple[np.ndarray, ...]) -> None:
        for a, b in zip(state, before, strict=True):
            a[...] = b
        sweeps.sweep(evidence, order, *state)

    def first_sweep() -> None:
        for a, b in zip(first_state, (*before, 0, 0, 0), strict=True):
            a[...] = b
        sweeps.sweep_messages(evidence, order, *first_state, 1.0)

    def sweep_with_messages(damping: float) -> None:
        for _ in range(CONSECUTIVE_SWEEPS):
            sweeps.sweep_messages(evidence, order, *stored[damping], damping)

    def decode() -> None:
        sweeps.decode_images(evidence[0], image_orders, layer.prior_beliefs(IMAGES), w[0] > 0, DECODE_SWEEPS)

    def sweep_often(state: tuple[np.ndarray, ...]) -> None:
        for _ in range(BATCHES_PER_THREAD):
            sweep_without_messages(state)

    pairs, tree = IMAGES * layer.pairs, window[0] * window[1] * features
    flat = [np.random.default_rng(seed).integers(-2000, 1000, tree).astype(np.int32) for _ in range(2)]
    rounds = pairs // tree
    ways = {
        "bare": lambda: compute_bare_messages(*flat, np.int32(-1300), rounds),
        "without messages": lambda: sweep_without_messages((s, beliefs)),
        "first sweep with messages": first_sweep,
        "with messages": lambda: sweep_with_messages(1.0),
        "with messages, damped": lambda: sweep_with_messages(0.8),
        "reading messages to places": lambda: stored[1.0][2].max(),
        "decoding": decode,
        "one thread, some at a time": lambda: sweep_often(states[0]),
        "two threads, without messages": lambda: list(pool.map(sweep_often, states)),
    }
    for way in ways.values():
        way()
    for damping, state in stored.items():
        for _ in range(30):
            sweeps.sweep_messages(evidence, order, *state, damping)
    seconds = fastest(ways, rounds=100)
    done = {
        "bare": rounds * tree,
        "one thread, some at a time": BATCHES_PER_THREAD * pairs,
        "two threads, without messages": 2 * BATCHES_PER_THREAD * pairs,
        "decoding": DECODE_SWEEPS * pairs,
        "with messages": CONSECUTIVE_SWEEPS * pairs,
        "with messages, damped": CONSECUTIVE_SWEEPS * pairs,
    }
    found = {name: float(f"{done.get(name, pairs) / seconds[name]:.3g}") for name in ways}
    return {
        "pairs a tree": tree,
        "pairs_per_second": found,
        "time without messages over that of the bare loop": round(
            found["bare"] / found["without messages"], 2
        ),
        "rate with messages over that without": round(found["with messages"] / found["without messages"], 2),
        "share of lines with a message to a weight": round(float((stored[1.0][4] != 0).mean()), 4),
        "share of pairs with a message to a weight": round(float((stored[1.0][3] != 0).mean()), 4),
        "two threads over one": round(
            found["two threads, without messages"] / found["one thread, some at a time"], 2
        ),
    }


def measure_numpy_rate(seed: int) -> float:
    """Return the pairs per second of the numpy reference on one image."""
    layer = FeatureLayer((1, 14, 14), 5, (6, 6), 1e-3, 1e-3, 0.3, 1e-4)
    x = (np.random.default_rng(seed).random((1, layer.n_pixels)) < 0.2).astype(np.uint8)
    order = shuffled(seed, "benchmark", 0, np.zeros(1), layer.n_pixels)
    state = layer.prior_beliefs(1)[None], to_units(layer.first_beliefs(seed))[None]
    way = {"numpy": lambda: reference.sweep(layer.compute_evidence(x)[None], order, *state)}
    return float(f"{layer.pairs / fastest(way, rounds=5)['numpy']:.3g}")


def count_instructions() -> dict[str, dict[str, int]]:
    """Return the numbers of minima, maxima, divisions and calls in the machine code of each sweep."""
    words = ("vpminsd", "vpmaxsd", "vdiv", "idiv", "call")
    out = {}
    for dispatcher, types in jit._entries["hcn"]:
        name = dispatcher.py_func.__name__
        if name in ("_sweep", "_sweep_messages", "_decode"):
            fresh = numba.njit(**jit.DEFAULTS | {"cache": False})(dispatcher.py_func)
            fresh.compile(tuple(types))
            (text,) = fresh.inspect_asm().values()
            out[name.strip("_")] = {word: len(re.findall(rf"\b{word}", text)) for word in words}
    return out


def main() -> None:
    arguments = parser(__doc__, "hcn_kernels")
    arguments.add_argument("--no-write", action="store_true", help="print the results and do not write them")
    args = arguments.parse_args()
    results: dict[str, Any] = {name: measure_rates(*size, args.seed) for name, size in SIZES.items()}
    results["numpy, pairs a second"] = measure_numpy_rate(args.seed)
    results["instructions"] = count_instructions()
    print(json.dumps(results, indent=1))
    if not args.no_write:
        write(args.out, args.seed, results)


if __name__ == "__main__":
    main()
