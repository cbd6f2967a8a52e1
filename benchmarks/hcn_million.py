"""Fit one epoch of a million letter images out of core on a local cluster, and compare with threads.

    python benchmarks/hcn_million.py FOLDER [--rows 1000000] [--parts fit,memory,flat,chains,killed]

Images of 24 x 24 show five of 26 letters, with 3 % of the pixels flipped; they are written to FOLDER once.
The network has 32 features of 8 x 6. A pair is a place of a feature and one of its weights; an image has
496,128 pairs. A step processes eight chains (sequences of --chain-batches minibatches of five images) in
parallel. The cluster has --workers workers of one thread.

fit     Seconds of the fit, also as a multiple of pairs / rate. The rate is the pairs per second of as many
        threads of this process on images in memory. It is measured before and after the fit, and the higher
        one counts. More results: letters found, peak memory.
memory  Peak memory of a worker with a tenth of the images.
flat    Peak memory with a tenth, three tenths and all of the images, with small shuffle buffers of 512 rows
        and without a cache of read rows.
chains  Rows per second of a fit of --part images on the cluster divided by the rate in this process, both
        with the same chains.
killed  Whether a fit of --part images on a cluster that loses a worker has the bits of a fit in one process.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from common import open_or_create, parser, write_part
from hcn_common import count_found

import scalelatent as sl
from scalelatent.contract.learners import Block
from scalelatent.contract.stats import Stats
from scalelatent.data import Dataset, make_images
from scalelatent.deploy.probes import peak_bytes
from scalelatent.engine.backend import make_backend
from scalelatent.generators.images import image_set_of
from scalelatent.models.hcn.model.evidence_learner import OnlineFeatureLearner
from scalelatent.models.hcn.model.layer import FeatureLayer

SETTINGS = {"p01": 1e-3, "p10": 1e-3, "p_weight": 0.3, "p_sparsity": 1e-4}
# Engine options of the part "flat": shuffle buffers of 4 x 128 rows, and no cache of rows.
SMALL_BUFFERS = {"run_rows": 128, "buffer_runs": 4, "cache": 0}
# Parameter ``forgetting``, number of features, their height and width, (channels, height, width) of images.
FORGETTING, FEATURES, WINDOW, IMAGE = 0.98, 32, (8, 6), (1, 24, 24)


def open_letters(folder: Path, rows: int, seed: int) -> Dataset:
    """Return the dataset of letter images in the folder; create it if it does not exist."""
    place = folder / f"letters-{rows}.zarr"
    found: Dataset = open_or_create(place, lambda: make_images(place, "letters", rows, seed=seed))
    return found


def make_estimator(args: Any, **more: Any) -> sl.HierarchicalCompositionalNetwork:
    return sl.HierarchicalCompositionalNetwork(
        [(FEATURES, WINDOW)],
        **SETTINGS,
        forgetting=FORGETTING,
        n_epochs=1,
        n_chains=8,
        chain_batches=args.chain_batches,
        random_state=args.seed,
        **more,
    )


def measure_thread_rate(ds: Dataset, args: Any, n_images: int = 2000) -> float:
    """Return how many pairs (place of a feature, weight) ``args.workers`` threads update per second."""
    learner = OnlineFeatureLearner(
        FeatureLayer(IMAGE, FEATURES, WINDOW, **SETTINGS), FORGETTING, 5, args.seed
    )
    backend, x = make_backend("cpu"), ds.read_x(0, n_images)
    state, size = learner.start(), 5 * args.chain_batches
    blocks = [
        Block(x[a : a + size], None, None, a, np.arange(a, a + size)) for a in range(0, n_images - size, size)
    ]

    def work(block: Block) -> None:
        learner.run_chain((state, backend), block, Stats.zeros(learner.layout()))

    with ThreadPoolExecutor(args.workers) as pool:
        list(pool.map(work, blocks[: args.workers]))
        begin = time.perf_counter()
        list(pool.map(work, blocks))
        return len(blocks) * size * learner.layer.pairs / (time.perf_counter() - begin)


def fit_on_cluster(ds: Dataset, args: Any, **more: Any) -> tuple[Any, float, dict[str, Any]]:
    """Fit on a new local cluster; return the model, the seconds and the peak memory in MiB."""
    model = make_estimator(args)
    with sl.cluster("local", workers=args.workers, memory_limit=args.memory_limit) as client:
        print(f"dashboard: {client.dashboard_link}", flush=True)
        before = max(client.run(peak_bytes).values())
        run = args.folder / f"run-{len(ds)}-{time.time_ns()}"
        begin = time.perf_counter()
        model.fit(ds, run_dir=run, **more)
        seconds = time.perf_counter() - begin
        peaks = client.run(peak_bytes)
    memory = {
        "peak_worker_mib": round(max(peaks.values()) / 2**20),
        "worker_before_mib": round(before / 2**20),
        "peak_driver_mib": round(peak_bytes() / 2**20),
    }
    return model, seconds, memory


def measure_fit(ds: Dataset, args: Any) -> dict[str, Any]:
    before = measure_thread_rate(ds, args)
    model, seconds, memory = fit_on_cluster(ds, args)
    fastest = max(before, measure_thread_rate(ds, args))
    pairs = len(ds) * model._network.layer.pairs
    return {
        "rows": len(ds),
        "pairs": pairs,
        "seconds": round(seconds, 1),
        "threads": args.workers,
        "pairs_per_second_of_threads": float(f"{fastest:.4g}"),
        "over_pairs_by_rate": round(seconds * fastest / pairs, 3),
        "letters_found": count_found(model.weights_[0], image_set_of(ds).features),
        "compression": round(model.compression_, 4),
        "dataset_mib": round(ds.nbytes / 2**20),
        **memory,
    }


def measure_memory(ds: Dataset, args: Any) -> dict[str, Any]:
    rows = len(ds) // 10
    return {"rows": rows, **fit_on_cluster(open_letters(args.folder, rows, args.seed), args)[2]}


def measure_memory_growth(ds: Dataset, args: Any) -> dict[str, Any]:
    peaks = {}
    for rows in (len(ds) // 10, 3 * len(ds) // 10, len(ds)):
        images = open_letters(args.folder, rows, args.seed)
        peaks[rows] = fit_on_cluster(images, args, engine=SMALL_BUFFERS)[2]["peak_worker_mib"]
    return {
        "engine": SMALL_BUFFERS,
        "peak_worker_mib": peaks,
        "largest_over_least": round(max(peaks.values()) / min(peaks.values()), 3),
    }


def compare_chains(ds: Dataset, args: Any) -> dict[str, Any]:
    part = ds[: args.part]
    model = make_estimator(args, n_jobs=args.workers)
    run = args.folder / f"part-{time.time_ns()}"
    begin = time.perf_counter()
    model.fit(part, run_dir=run)
    alone = time.perf_counter() - begin
    found, seconds, _ = fit_on_cluster(part, args)
    chain = (
        5 * args.chain_batches * model._network.layer.pairs / (measure_thread_rate(ds, args) / args.workers)
    )
    return {
        "rows": len(part),
        "seconds_of_a_chain": round(chain, 3),
        "in_process_seconds": round(alone, 1),
        "cluster_seconds": round(seconds, 1),
        "rate_of_in_process": round(alone / seconds, 3),
        "same_bits": bool(np.array_equal(found.beliefs_[0], model.beliefs_[0])),
    }


def kill_worker_in_fit(ds: Dataset, args: Any) -> dict[str, Any]:
    part = ds[: args.part]
    alone = make_estimator(args, n_jobs=args.workers).fit(part)
    with sl.cluster("local", workers=args.workers, memory_limit=args.memory_limit) as client:
        pids = sorted(client.run(os.getpid).values())

        class Kill(sl.Callback):
            """Callback that kills a worker two seconds after the fit starts to learn features."""

            done = False

            def on_stage(self, info: dict[str, Any]) -> None:
                if info["stage"] == "hcn_learn":
                    threading.Timer(2.0, self.kill_worker).start()

            def kill_worker(self) -> None:
                self.done = True
                os.kill(pids[0], signal.SIGKILL)

        kill = Kill()
        found = make_estimator(args).fit(part, callbacks=[kill])
        killed = kill.done  # False if the fit ended before the worker was killed.
    same = bool(np.array_equal(found.beliefs_[0], alone.beliefs_[0]))
    return {"rows": len(part), "killed": killed, "same_bits": same}


PART_FUNCTIONS = {
    "fit": measure_fit,
    "memory": measure_memory,
    "flat": measure_memory_growth,
    "chains": compare_chains,
    "killed": kill_worker_in_fit,
}


def main() -> None:
    arguments = parser(__doc__, "hcn_million")
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--rows", type=int, default=1_000_000)
    arguments.add_argument("--parts", default=",".join(PART_FUNCTIONS))
    arguments.add_argument(
        "--part", type=int, default=50_000, help="number of images in the parts chains and killed"
    )
    arguments.add_argument("--chain-batches", type=int, default=40, help="minibatches per chain")
    arguments.add_argument("--workers", type=int, default=2)
    arguments.add_argument("--memory-limit", default="3GB")
    args = arguments.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    ds = open_letters(args.folder, args.rows, args.seed)
    for name in args.parts.split(","):
        found = PART_FUNCTIONS[name](ds, args)
        print(name, found, flush=True)
        write_part(args.out, name, args.seed, found)


if __name__ == "__main__":
    main()
