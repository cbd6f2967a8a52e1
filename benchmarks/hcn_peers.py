"""Compare four implementations of message passing (Lázaro-Gredilla et al., 2016).

    python benchmarks/hcn_peers.py [--pgmax PYTHON] [--timings]

Each of five seeds has twenty images of 14 x 14 with two of the letters T, L and X, and 3 % of the pixels
flipped. The network has five features of 8 x 6. Its factor graph has one AND for each pair of a feature's
place and weight, and one OR for each pixel; the pairs of a pixel are a tree. All implementations run at most
100 iterations from the same beliefs of the weights, with a damping of .5 if they store messages.

ours         Algorithm 1 of the paper in this package: one tree after the other, two leaves (ranges) of ten
             images, two threads.
ours online  The same number of epochs in one chain of minibatches of five images, without stored messages,
             on one thread.
numpy        Numpy arrays: all trees at once, from the messages of the iteration before, on one thread.
PGMax        All factors at once, temperature 0, two threads. --pgmax names a Python interpreter with pgmax
             and jax. The graph needs a minute to build and compile, and a seed some seconds.

The results are the letters found (overlap of at least .9) and the compression of the images, for each seed.
The compression uses only features that shorten the description of the images. --timings adds pairs per
second of all iterations; the machine should be idle.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import numpy as np
from common import parser, write
from hcn_common import count_found

from scalelatent.contract.learners import Block
from scalelatent.contract.stats import Stats
from scalelatent.engine.backend import make_backend
from scalelatent.engine.chains import apply_step, run_chains
from scalelatent.generators.images import ImageSet, image_set
from scalelatent.models.hcn.kernels.units import from_units, to_units
from scalelatent.models.hcn.model.compression import DescriptionLength, compression, find_paying_features
from scalelatent.models.hcn.model.decode import Decoder
from scalelatent.models.hcn.model.evidence_learner import OnlineFeatureLearner
from scalelatent.models.hcn.model.layer import FeatureLayer, from_features, log_odds, to_features
from scalelatent.models.hcn.model.stored_messages import LeafMessages, start_leaf, visit_leaves

ROWS, SEEDS, ITERATIONS, DAMPING = 20, 5, 100, 0.5
LAYER = FeatureLayer((1, 14, 14), 5, (8, 6), 1e-2, 1e-2, 0.3, 1e-3)
# Number of pairs (place of a feature, weight) in all images of a seed; rates are pairs per second.
PAIRS = ROWS * LAYER.pairs
# Program that builds the factor graph of the images for PGMax and runs it, from the evidence, first beliefs
# and prior in one file. It writes the beliefs of the weights to another file, and prints seconds, number of
# pairs and versions.
PGMAX = """
import importlib.metadata, json, os, sys, time
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
import jax, jax.lib
if not hasattr(jax.lib, "xla_bridge"):
    import types
    jax.lib.xla_bridge = types.SimpleNamespace(get_backend=lambda *a: jax.devices()[0].client)
    sys.modules["jax.lib.xla_bridge"] = jax.lib.xla_bridge
import numpy as np
from pgmax import fgraph, fgroup, infer, vgroup
given, out, iterations, damping = *sys.argv[1:3], int(sys.argv[3]), float(sys.argv[4])
x, first, prior = (np.load(given)[name] for name in ("x", "first", "prior"))
(seeds, rows, height, width), (h, w, features) = x.shape, first.shape[1:]
high, wide = height - h + 1, width - w + 1
s = vgroup.NDVarArray(num_states=2, shape=(rows, high, wide, features))
weights = vgroup.NDVarArray(num_states=2, shape=(h, w, features))
pixels = vgroup.NDVarArray(num_states=2, shape=x.shape[1:])
trees = [
    [
        ((n, r, c, f), (i - r, j - c, f))
        for r in range(max(0, i - h + 1), min(high - 1, i) + 1)
        for c in range(max(0, j - w + 1), min(wide - 1, j) + 1)
        for f in range(features)
    ]
    for n, i, j in np.ndindex(x.shape[1:])
]
pairs = sum(map(len, trees))
both = vgroup.NDVarArray(num_states=2, shape=(pairs,))
graph, numbers, ands, ors = fgraph.FactorGraph([s, weights, pixels, both]), iter(range(pairs)), [], []
for pixel, tree in zip(np.ndindex(x.shape[1:]), trees):
    outputs = [both[next(numbers)] for _ in tree]
    ands += [[s[of_s], weights[of_w], t] for (of_s, of_w), t in zip(tree, outputs)]
    ors.append([*outputs, pixels[pixel]])
graph.add_factors([fgroup.ANDFactorGroup(ands), fgroup.ORFactorGroup(ors)])
bp = infer.build_inferer(graph.bp_state, backend="bp")
run = jax.jit(lambda a: bp.run(a, num_iters=iterations, damping=damping, temperature=0.0))
def evidence(a):
    return np.stack([np.zeros_like(a), a], axis=-1)
seconds, found = [], []
for k in range(seeds):
    known = {s: np.full(s.shape, prior), pixels: x[k], weights: first[k]}
    arrays = bp.init(evidence_updates={group: evidence(a) for group, a in known.items()})
    if not k:
        jax.block_until_ready(run(arrays))
    begin = time.perf_counter()
    ends = jax.block_until_ready(run(arrays))
    seconds.append(time.perf_counter() - begin)
    beliefs = bp.get_beliefs(ends)[weights]
    found.append(np.asarray(beliefs[..., 1] - beliefs[..., 0]))
np.save(out, np.stack(found))
versions = {name: importlib.metadata.version(name) for name in ("pgmax", "jax")}
print(json.dumps({"seconds": seconds, "pairs": pairs, "versions": versions}))
"""


def run_ours(evidence: np.ndarray, first: np.ndarray, seed: int) -> tuple[np.ndarray, int]:
    """Run sweeps until no message changes, at most ITERATIONS; return beliefs of the weights, and sweeps."""
    backend, beliefs, half = make_backend("cpu"), to_units(first), ROWS // 2
    leaves = [start_leaf(LAYER, half) for _ in range(2)]

    def sweep(k: int) -> tuple[LeafMessages, np.ndarray]:
        rows = evidence[half * k : half * (k + 1)]
        return visit_leaves([leaves[k]], rows[None], beliefs, [half * k], seed, 1, DAMPING, backend)[0]

    with ThreadPoolExecutor(2) as pool:
        for _ in range(ITERATIONS):
            visits = list(pool.map(sweep, range(2)))
            leaves = [leaf for leaf, _ in visits]
            beliefs = beliefs + visits[0][1] + visits[1][1]
            if not any(leaf.moved for leaf in leaves):
                break
    return from_units(beliefs), leaves[0].sweeps


def run_online(x: np.ndarray, first: np.ndarray, seed: int) -> tuple[np.ndarray, int]:
    """Return beliefs of the weights after 100 epochs of one chain with minibatches of five images."""
    backend, learner = make_backend("cpu"), OnlineFeatureLearner(LAYER, 0.95, 5, seed)
    state = learner.start(seed)
    for epoch in range(ITERATIONS):
        order = np.random.default_rng((seed, epoch)).permutation(ROWS)
        for a in range(0, ROWS, 5):
            rows = order[a : a + 5]
            block = Block(x[rows], None, None, 0, rows, epoch)
            state = apply_step(learner, state, run_chains(learner, state, [block], backend), 5)
    return state.beliefs, ITERATIONS


class ParallelMessages:
    """Message passing that updates all messages at once, in numpy arrays.

    Messages are arrays with one value per pair (place of a feature, weight), in the order of the pixels.
    """

    def __init__(self) -> None:
        (_, height, width), (h, w), (high, wide, features) = LAYER.image, LAYER.window, LAYER.places
        s, weights, sizes = [], [], []
        of_s = np.arange(high * wide * features).reshape(high, wide, features)
        of_w = np.arange(h * w * features).reshape(h, w, features)
        for y, x in np.ndindex(height, width):
            r, c = (
                np.arange(max(0, at - side + 1), min(places - 1, at) + 1)
                for at, side, places in ((y, h, high), (x, w, wide))
            )
            s.append(of_s[np.ix_(r, c)].ravel())
            weights.append(of_w[np.ix_(y - r, x - c)].ravel())
            sizes.append(len(s[-1]))
        n = of_s.size
        self.s = np.concatenate([k * n + part for k in range(ROWS) for part in s])
        self.w = np.tile(np.concatenate(weights), ROWS)
        self.sizes = np.tile(sizes, ROWS)
        self.begins = np.concatenate([[0], np.cumsum(self.sizes)[:-1]])
        self.n = ROWS * n

    def __call__(self, evidence: np.ndarray, first: np.ndarray, seed: int) -> tuple[np.ndarray, int]:
        """Return beliefs of the weights, in the order in which this package stores them, and iterations."""
        prior, zero = np.float32(log_odds(LAYER.p_sparsity)), np.float32(0)
        first = first[0, ::-1, ::-1].astype(np.float32)
        b = np.repeat(from_units(evidence).astype(np.float32).ravel(), self.sizes)
        s, w = np.full(self.n, prior), first.ravel()
        to_s, to_w = np.zeros_like(b), np.zeros_like(b)
        for _ in range(ITERATIONS):
            in_s, in_w = s[self.s] - to_s, w[self.w] - to_w
            t = np.minimum(in_s + in_w, np.minimum(in_s, in_w))
            positive = np.maximum(t, zero)
            total, top = np.add.reduceat(positive, self.begins), np.maximum.reduceat(t, self.begins)
            largest = t == np.repeat(top, self.sizes)
            others = np.maximum.reduceat(np.where(largest, np.float32(-np.inf), t), self.begins)
            second = np.where(np.add.reduceat(largest.astype(np.int32), self.begins) > 1, top, others)
            best = np.where(largest, *(np.repeat(x, self.sizes) for x in (second, top)))
            g = np.minimum(b + np.repeat(total, self.sizes) - positive, np.maximum(zero, -best))
            to_s += np.float32(DAMPING) * (np.maximum(zero, in_w + g) - np.maximum(zero, in_w) - to_s)
            to_w += np.float32(DAMPING) * (np.maximum(zero, in_s + g) - np.maximum(zero, in_s) - to_w)
            s = prior + np.bincount(self.s, to_s, self.n).astype(np.float32)
            w = first.ravel() + np.bincount(self.w, to_w, first.size).astype(np.float32)
        return np.ascontiguousarray(w.reshape(first.shape)[None, ::-1, ::-1]), ITERATIONS


def score_features(beliefs: np.ndarray, x: np.ndarray, letters: ImageSet) -> dict[str, float]:
    """Return the number of letters found, and the compression with the features that shorten the code."""
    weights, backend = beliefs > 0, make_backend("cpu")
    for _ in range(2):
        reduction = DescriptionLength(Decoder(LAYER, weights))
        stats = Stats.zeros(reduction.layout())
        reduction.accumulate(reduction.prepare(None, backend), Block(x, None, None, 0), stats)
        found = compression(LAYER, weights, stats)
        weights = weights & find_paying_features(LAYER, weights, stats)
    return {"letters": count_found(to_features(weights), letters.features), "compression": round(found, 3)}


def run_pgmax(python: str, given: dict[str, np.ndarray]) -> dict[str, Any]:
    """Run PGMax for all seeds; return beliefs of the weights, seconds and versions, or an error message."""
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder) / "given.npz", **given)
        files = [str(Path(folder) / name) for name in ("given.npz", "found.npy")]
        command = [python, "-c", PGMAX, *files, str(ITERATIONS), str(DAMPING)]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=900, env=environment, check=False
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines()
            return {"failed": lines[-1] if lines else done.returncode}
        return {"beliefs": np.load(files[1]), **json.loads(done.stdout.splitlines()[-1])}


def measure_rate(seconds: list[float], iterations: list[int]) -> float:
    """Return the pairs per second of the fastest seed, from seconds and iterations of each seed."""
    return float(f"{max(PAIRS * n / t for t, n in zip(seconds, iterations, strict=True)):.3g}")


def main() -> None:
    arguments = parser(__doc__, "hcn_peers")
    arguments.add_argument("--pgmax", metavar="PYTHON", help="interpreter with pgmax and jax")
    arguments.add_argument(
        "--timings", action="store_true", help="write rates as well; the machine should be idle"
    )
    args = arguments.parse_args()
    sets = [
        image_set("letters", alphabet="TLX", count=2, size=(14, 14), noise=0.03, seed=args.seed + k)
        for k in range(SEEDS)
    ]
    images = [letters.rows(0, ROWS)[0].reshape(ROWS, -1) for letters in sets]
    evidence = [LAYER.compute_evidence(x) for x in images]
    first = [LAYER.first_beliefs(args.seed + k) for k in range(SEEDS)]
    graph = ParallelMessages()
    assert len(graph.s) == PAIRS
    ways: dict[str, Callable[[int], tuple[np.ndarray, int]]] = {
        "ours, two threads": lambda k: run_ours(evidence[k], first[k], args.seed + k),
        "ours online, one thread": lambda k: run_online(images[k], first[k], args.seed + k),
        "numpy, one thread": lambda k: graph(evidence[k], first[k], args.seed + k),
    }
    results: dict[str, Any] = {"pairs of an iteration": PAIRS, "ways": {}}
    rates = {}
    for name, way in ways.items():
        way(0)  # The first call compiles the kernels.
        reported, seconds, iterations = [], [], []
        for k in range(SEEDS):
            begin = time.perf_counter()
            beliefs, done = way(k)
            seconds.append(time.perf_counter() - begin)
            iterations.append(done)
            reported.append(score_features(beliefs, images[k], sets[k]) | {"iterations": done})
        results["ways"][name], rates[name] = reported, measure_rate(seconds, iterations)
        print(name, reported, flush=True)
    if args.pgmax:
        given = {
            "x": np.stack([from_units(b)[:, 0] for b in evidence]),
            "first": np.stack([b[0, ::-1, ::-1] for b in first]),
            "prior": np.float64(from_units(LAYER.prior)),
        }
        name, found = "PGMax, two threads", run_pgmax(args.pgmax, given)
        if "failed" in found:
            results["pgmax"] = found
        else:
            assert found["pairs"] == PAIRS
            results["ways"][name] = reported = [
                score_features(from_features(np.moveaxis(b, -1, 0)[:, None]), x, letters)
                | {"iterations": ITERATIONS}
                for b, x, letters in zip(found["beliefs"], images, sets, strict=True)
            ]
            results["versions"] = found["versions"]
            rates[name] = measure_rate(found["seconds"], [ITERATIONS] * SEEDS)
            print(name, reported, flush=True)
    if args.timings:
        results["pairs_per_second"] = rates
        for other in (name for name in rates if not name.startswith("ours")):
            results[f"times faster than {other}"] = {
                name: round(rates[name] / rates[other], 1) for name in rates if name.startswith("ours")
            }
    print(json.dumps(results, indent=1))
    write(args.out, args.seed, results)


if __name__ == "__main__":
    sys.exit(main())
