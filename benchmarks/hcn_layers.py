"""Measure compositional networks of several layers: time of a pass, fit on a cluster, stored messages.

    python benchmarks/hcn_layers.py [--parts pieces,cluster,kept]

pieces   Milliseconds of the operations of one pass over 20 images of two traits (shapes), on one thread: 4
         features of 13 x 13, two templates (combinations of features) per class, after ten passes. A tree
         joins all places and weights of features that meet in one pixel. Three comparisons follow: the
         factors between layers (ORs, pools) with the trees; the messages of trees to pixels with a bare loop
         of the same arithmetic in the first-level cache; and a forward pass of fixed weights with its
         convolutions as float64 matrix products.
cluster  An online epoch of --rows MNIST digits (16 features of 3 x 3 over 16 oriented filters, 8 templates
         per class): seconds of two threads in this process, seconds of two workers with one thread each,
         and whether the bits of the results are the same.
kept     The size of stored messages for MNIST digits (64 features, 32 templates per class, 16 oriented
         filters). Section 4.4 of the paper (Lázaro-Gredilla et al., 2016) leaves the size of the features
         open, so several are measured. The sets are the first 2 digits of each class in one leaf (range of
         rows) for twelve passes, and the first 40 in the default leaves for six passes. Each fit has a
         process of its own on one thread. The results are the largest size of the messages of one pass, the
         largest size of the run folder, the peak memory, and the predictions of `plan` for both.

The parts cluster and kept need SCALELATENT_DATA.
"""

from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import re
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numba
import numpy as np
from common import fastest, mnist, parser, write_part

import scalelatent as sl
from scalelatent.data import Dataset
from scalelatent.deploy.probes import peak_bytes
from scalelatent.engine.backend import make_backend
from scalelatent.generators.images import image_set
from scalelatent.models.hcn.kernels.cpu import pools, sweeps
from scalelatent.models.hcn.kernels.pixel_order import shuffled
from scalelatent.models.hcn.kernels.units import to_units
from scalelatent.models.hcn.model.hierarchy import INNER_ROUNDS, update_images

# Part "pieces": numbers of images of a pass, of passes before the measurement, and of measured repetitions.
IMAGES, WARMUP_PASSES, ROUNDS = 20, 10, 30
# Part "kept": (side of the features, p_weight). Section 4.4 of the paper does not say which values it used.
PAPER_SETTINGS = [(26, (0.001, 0.05)), (3, (0.001, 0.05)), (3, (0.01, 0.001))]
# Part "kept": (digits per class, passes) of the two fits with each of PAPER_SETTINGS.
FIT_SIZES = [(2, 12), (40, 6)]


@numba.njit(nogil=True, error_model="numpy", fastmath=False)
def compute_bare_messages(s: Any, w: Any, to_s: Any, to_w: Any, rounds: Any) -> Any:
    """Compute the message of a tree (all places and weights of a pixel) to its pixel ``rounds`` times.

    ``s`` and ``w`` are beliefs of places and weights; ``to_s`` and ``to_w`` are the messages to them.
    """
    zero, out = np.int32(0), np.int32(0)
    for _ in range(rounds):
        total = zero
        for k in range(len(s)):
            x, y = s[k] - to_s[k], w[k] - to_w[k]
            total += max(min(x + y, min(x, y)), zero)
        out ^= total
        s[0] = -s[0]
    return out


def time_pieces(seed: int) -> dict[str, Any]:
    """Return milliseconds of the operations of a pass and of the compared operations, and the ratios."""
    x, y = image_set("traits", seed=seed).rows(0, IMAGES)
    params: dict[str, Any] = {"layers": [(4, 13)], "templates": 2, "online": False, "random_state": seed}
    net = sl.HierarchicalCompositionalNetwork(n_epochs=1, **params).fit(x, y)._network.net
    backend = make_backend("cpu")
    pixels = net.layers[0].compute_evidence(x.reshape(IMAGES, -1)).reshape(IMAGES, *net.layers[0].image)
    labels, messages, units = y.astype(int), net.start(IMAGES), to_units(net.first_beliefs())
    for number in range(WARMUP_PASSES):
        units = units + update_images(net, messages, units, pixels, labels, 0, number, backend)
    weights = net.split(units.copy())
    fixed = [w > 0 for w in weights]
    belows = [pixels, messages[0].from_below]
    mades = [pools.pass_trees_down(m.s, w, m.to_s, m.to_w) for m, w in zip(messages, weights, strict=True)]
    orders = [shuffled(seed, "benchmark", 0, np.zeros(1), IMAGES * layer.n_pixels) for layer in net.layers]
    levels = range(len(net.layers))

    def send_up() -> None:
        for i in levels:
            pools.pass_pools_up(belows[i], net.priors[i], messages[i].down, messages[i].evidence, net.damping)

    def send_down() -> None:
        for i in levels:
            pools.pass_pools_down(belows[i], net.priors[i], mades[i], messages[i].down, INNER_ROUNDS)

    def sweep_trees() -> None:
        for m, w, order in zip(messages, weights, orders, strict=True):
            given = m.evidence, order[0], m.s, w, m.to_s, m.to_w, m.held
            sweeps.sweep_messages(*(a[None] for a in given), 1.0)

    def pass_trees_down() -> None:
        for m, w in zip(messages, weights, strict=True):
            pools.pass_trees_down(m.s, w, m.to_s, m.to_w)

    # The bare loop uses trees of the first layer's size; trees of the last layer have one place per feature.
    pairs = IMAGES * sum(layer.pairs for layer in net.layers)
    tree = int(np.prod(net.layers[0].window)) * net.layers[0].n_features
    rng = np.random.default_rng(seed)
    flat = [rng.integers(-2000, 1000, tree).astype(np.int32) for _ in range(4)]
    windows, flats = [], []
    for m, w, layer in zip(messages, fixed, net.layers, strict=True):
        views = np.lib.stride_tricks.sliding_window_view(m.evidence, layer.window, axis=(2, 3))
        rows = np.moveaxis(views, 1, 3).reshape(-1, int(np.prod(w.shape[:3])))
        windows.append(rows.astype(np.float64))
        flats.append(w[:, ::-1, ::-1].reshape(-1, layer.n_features).astype(np.float64))
    ways = {
        "ORs and pools, up": send_up,
        "ORs and pools, down": send_down,
        "trees of places and weights": sweep_trees,
        "trees to what they make": pass_trees_down,
        "a bare loop of that": lambda: compute_bare_messages(*flat, pairs // tree),
        "a forward pass": lambda: net.template_scores(fixed, pixels, backend),
        "its convolutions as products": lambda: [a @ b for a, b in zip(windows, flats, strict=True)],
    }
    for way in ways.values():
        way()
    seconds = fastest(ways, rounds=ROUNDS)
    reported = {name: round(1000 * value, 3) for name, value in seconds.items()}
    both = seconds["ORs and pools, up"] + seconds["ORs and pools, down"]
    return {
        "images": IMAGES,
        "milliseconds": reported,
        "ORs and pools over trees": round(both / seconds["trees of places and weights"], 2),
        "trees to what they make over the bare loop": round(
            seconds["trees to what they make"] / seconds["a bare loop of that"], 2
        ),
        "a forward pass over its products": round(
            seconds["a forward pass"] / seconds["its convolutions as products"], 2
        ),
    }


def compare_cluster(rows: int, seed: int) -> dict[str, Any]:
    """Compare an online epoch with two threads of this process and with two workers: seconds and bits."""
    x, y = mnist()
    ds = Dataset.from_arrays(x[:rows].reshape(-1, 28, 28), y[:rows])
    params: dict[str, Any] = {
        "layers": [(16, 3)], "templates": 8, "filters": 16, "p01": 0.05, "p10": 1e-4, "online": True,
        "batch_size": 10, "inner_iterations": 5, "damping": 0.1, "n_epochs": 1, "n_chains": 8,
        "chain_batches": 2, "warmup_rows": 0, "p_weight": (0.25, 1e-20), "template_passes": 0,
        "random_state": seed,
    }  # fmt: skip
    models = [sl.HierarchicalCompositionalNetwork(n_jobs=2, **params) for _ in range(2)]
    with sl.cluster("local", workers=2, memory_limit="3GB") as client:
        for model in models:  # The first fit compiles the kernels and starts the workers.
            model.fit(ds[:160], client=None if model is models[0] else client)
        begin = time.perf_counter()
        models[0].fit(ds)
        here = time.perf_counter() - begin
        begin = time.perf_counter()
        models[1].fit(ds, client=client)
        there = time.perf_counter() - begin
    same = all(np.array_equal(*pair) for pair in zip(*(m.beliefs_ for m in models), strict=True))
    return {
        "rows": rows,
        "seconds of two threads": round(here, 2),
        "seconds of two workers": round(there, 2),
        "of their rate": round(here / there, 3),
        "the same bits": same,
    }


class LeafBytes(sl.Callback):
    """Callback that records the size of the message files in a run folder, one per leaf (range of images).

    ``largest_bytes`` is the largest total of all files at a checkpoint, ``most_files`` the largest number of
    files of a pass, and ``bytes_by_pass`` has the bytes of each pass.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.largest_bytes, self.most_files, self.bytes_by_pass = folder, 0, 0, dict[int, int]()

    def on_checkpoint(self, info: dict[str, Any]) -> None:
        found = defaultdict[int, list[int]](list)
        for file in self.folder.rglob("leaf-*.rec"):
            found[int(re.findall(r"-(\d+)-", file.name)[-1])].append(file.stat().st_size)
        self.largest_bytes = max(self.largest_bytes, sum(map(sum, found.values())))
        self.most_files = max([self.most_files, *map(len, found.values())])
        self.bytes_by_pass |= {k: sum(sizes) for k, sizes in found.items()}


def measure_kept_messages(
    side: int, p_weight: tuple[float, float], digits_per_class: int, passes: int, seed: int
) -> dict[str, Any]:
    """Fit one network; return the size of its messages and run folder, its peak memory, and predictions."""
    warnings.simplefilter("ignore")  # The fit ends before it converges, and warns about that.
    x, y = mnist(slice(0, 5000))
    rows = np.sort(np.concatenate([np.flatnonzero(y == code)[:digits_per_class] for code in range(10)]))
    ds = Dataset.from_arrays(x[rows].reshape(-1, 28, 28), y[rows])
    engine: dict[str, Any] = {"leaf_rows": len(rows)} if digits_per_class == FIT_SIZES[0][0] else {}
    m = sl.HierarchicalCompositionalNetwork(
        [(64, side)], templates=32, filters=16, filter_size=5, p01=0.2, p10=1e-4, damping=0.1,
        p_weight=p_weight, online=False, n_epochs=passes, random_state=seed, n_jobs=1,
    )  # fmt: skip
    reported = m.plan(ds, engine=engine)
    with tempfile.TemporaryDirectory() as run:
        leaves = LeafBytes(Path(run))
        begin = time.perf_counter()
        m.fit(ds, run_dir=run, engine=engine, callbacks=leaves)
        seconds = time.perf_counter() - begin
    most, pairs = max(leaves.bytes_by_pass.values()), m._network.net.pairs
    return {
        "features": f"{side} x {side}",
        "p_weight": p_weight,
        "digits": len(rows),
        "leaves": leaves.most_files,
        "passes": passes,
        "pairs an image": pairs,
        "eight bytes a pair, gb": round(8 * pairs * len(rows) / 1e9, 2),
        "kept gb": round(most / 1e9, 3),
        "kept bytes a pair": round(most / len(rows) / pairs, 3),
        "kept gb by pass": [round(size / 1e9, 3) for size in leaves.bytes_by_pass.values()],
        "run folder gb": round(leaves.largest_bytes / 1e9, 2),
        "run folder predicted gb": round(reported["disk_bytes"] / 1e9, 2),
        "peak gb": round(peak_bytes() / 1e9, 2),
        "peak predicted gb": round(reported["peak_bytes_per_worker"] / 1e9, 2),
        "weights on": m.history_[-1]["weights_on_by_layer"],
        "seconds": round(seconds),
    }


def measure_all_fits(seed: int) -> list[dict[str, Any]]:
    """Return the results of fits with all FIT_SIZES and PAPER_SETTINGS, each in a new process."""
    found = []
    for size in FIT_SIZES:
        for reading in PAPER_SETTINGS:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
                found.append(alone.submit(measure_kept_messages, *reading, *size, seed).result())
            print(found[-1], flush=True)
    return found


def main() -> None:
    arguments = parser(__doc__, "hcn_layers")
    arguments.add_argument(
        "--parts", default="pieces,cluster", help="parts to run, separated by commas; also: kept"
    )
    arguments.add_argument("--rows", type=int, default=640, help="number of digits in the part cluster")
    args = arguments.parse_args()
    parts: dict[str, Callable[[], Any]] = {
        "pieces": lambda: time_pieces(args.seed),
        "cluster": lambda: compare_cluster(args.rows, args.seed),
        "kept": lambda: measure_all_fits(args.seed),
    }
    for part in args.parts.split(","):
        found = parts[part]()
        print(part, found, flush=True)
        write_part(args.out, part, args.seed, found)


if __name__ == "__main__":
    main()
