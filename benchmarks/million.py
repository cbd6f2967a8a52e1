"""Fit capsules for all pairs of classes to a million infinite digits, out of core on a local cluster.

    python benchmarks/million.py FOLDER             d = 4
    python benchmarks/million.py FOLDER --dim 16    as the paper; written to million_d16.json

Infinite digits are random deformations of MNIST rows 0:50000. The script writes the dataset to FOLDER, starts
worker processes, fits and scores. The validation rows are MNIST rows 50000:60000. The results are errors,
passes, seconds of all passes, bytes read and the largest resident size of a worker. An interrupted run
resumes. Needs SCALELATENT_DATA.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
from common import infinite_digits, parser, write

import scalelatent as sl
from scalelatent.deploy.probes import peak_bytes


class PrintPasses(sl.Callback):
    """Callback that prints a line every twenty passes."""

    def on_pass_end(self, record: dict[str, Any]) -> None:
        if record["pass"] % 20 == 0:
            keys = ("pass", "objective", "train_error", "validation_error", "active_members", "seconds")
            print({k: record[k] for k in keys}, flush=True)


def main() -> None:
    args = parser(__doc__, "million")
    args.add_argument("folder", type=Path)
    args.add_argument("--rows", type=int, default=1_000_000)
    args.add_argument("--dim", type=int, default=4, help="dimensions of a capsule")
    args.add_argument("--workers", type=int, default=2)
    args.add_argument("--memory-limit", default="3GB")
    a = args.parse_args()
    out = a.out if a.dim == 4 else a.out.with_name(f"{a.out.stem}_d{a.dim}.json")
    begin = time.perf_counter()
    train, held, test = infinite_digits(a.folder, a.rows, a.seed)
    print(f"{a.rows} images in {time.perf_counter() - begin:.1f} s", flush=True)
    paper = {"algorithm": "em", "fit_intercept": False, "ridge": 0}
    model = sl.CapsuleRegression(capsule_dim=a.dim, architecture="all_vs_all", random_state=a.seed, **paper)
    run = a.folder / f"run-{a.rows}-d{a.dim}"
    with sl.cluster("local", workers=a.workers, memory_limit=a.memory_limit) as client:
        print(f"dashboard: {client.dashboard_link}", flush=True)
        model.fit(
            train, validation=held, run_dir=run, resume=(run / "engine").exists(), callbacks=[PrintPasses()]
        )
        peaks = client.run(peak_bytes)
    results = {
        "rows": a.rows,
        "capsule_dim": a.dim,
        "workers": a.workers,
        "test_error": round(1 - model.score(test), 4),
        "validation_error": round(float(np.mean(model.predict(held) != held.read_y(0, len(held)))), 4),
        "train_error": round(1 - model.score(train), 6),
        "passes": model.n_iter_,
        "seconds": round(sum(r["seconds"] for r in model.history_), 1),
        "median_seconds_per_pass": round(float(np.median([r["seconds"] for r in model.history_])), 3),
        "gb_read": round(sum(r["bytes_read"] for r in model.history_) / 1e9, 2),
        "peak_worker_mib": round(max(peaks.values()) / 2**20),
        "peak_driver_mib": round(peak_bytes() / 2**20),
    }
    print(results)
    model.save(a.folder / f"model-{a.rows}-d{a.dim}.zarr", overwrite=True)
    write(out, a.seed, results)


if __name__ == "__main__":
    main()
