"""Fit bootstrap networks out of core on a local cluster, and compare with the rate of one process.

    python benchmarks/mbn_million.py FOLDER --parts digits,documents

V is the number of clusterings in a layer, and k1 the number of centroids in the first layer.

digits     1,000,000 infinite digits (random deformations) of MNIST rows 0:50000, V = 32, k1 = 2,000.
pools      Seconds of two fits of these digits: V = 32 where each clustering draws its own centroids, and
           V = 200 where clusterings share pools of random rows (the default).
documents  804,414 documents, resampled from the subset of RCV1-v2 (counts of the 2,000 most frequent
           terms): sparse rows, cosine metric, V = 32, k1 = 500.

The rate of one process is the rows per second of a fit of the first --part rows with as many threads as the
cluster has workers. It is measured before and after the fit on the cluster, and the higher one counts. The
datasets are written to FOLDER once; the same command resumes an interrupted fit. Needs SCALELATENT_DATA.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from common import infinite_digits, open_or_create, parser, rcv1_subset, write_part

import scalelatent as sl
from scalelatent.deploy.probes import peak_bytes


def open_documents(folder: Path, rows: int, seed: int) -> sl.Dataset:
    """Return the dataset of resampled documents; create it if it does not exist."""
    from scalelatent.data import make_documents

    base = folder / "rcv1-base.zarr"
    counts, topics, _ = rcv1_subset()
    open_or_create(base, lambda: sl.Dataset.from_arrays(counts, topics).save(str(base)))
    return make_documents(folder / f"documents-{rows}.zarr", rows, base=str(base), seed=seed, resume=True)


def measure(ds: sl.Dataset, args: Any, name: str, **params: Any) -> dict[str, Any]:
    """Fit --part rows in this process, all rows on a cluster, and the part again; return the rates."""
    pools = args.pools if args.pools in ("auto", "paper") else int(args.pools)
    params |= {"n_clusterings": args.clusterings, "n_pools": pools, "decay": 0.5, "random_state": args.seed}

    def time_in_process() -> float:
        model = sl.MultilayerBootstrapNetwork(**params, n_jobs=args.workers)
        run = args.folder / f"part-{name}-{time.time_ns()}"
        begin = time.perf_counter()
        model.fit(ds[: args.part], run_dir=run)
        return time.perf_counter() - begin

    before = time_in_process()
    run = args.folder / f"run-{name}-{len(ds)}"
    resumed = (run / "engine").exists()
    with sl.cluster("local", workers=args.workers, memory_limit=args.memory_limit) as client:
        print(f"dashboard: {client.dashboard_link}", flush=True)
        model = sl.MultilayerBootstrapNetwork(**params)
        begin = time.perf_counter()
        model.fit(ds, run_dir=run, resume=resumed)
        seconds = time.perf_counter() - begin
        peaks = client.run(peak_bytes)
        begin = time.perf_counter()
        with_output = model.transform(None, out=str(run / "z.zarr"), overwrite=True)
        transform = time.perf_counter() - begin
    alone = min(before, time_in_process())
    found = {
        "rows": len(ds),
        "ks": model.ks_,
        "seconds": round(seconds, 1),
        "resumed": resumed,
        "output_seconds": round(transform, 1),
        "output_columns": with_output.n_features,
        "rows_per_second": round(len(ds) / seconds, 1),
        "one_process_rows": args.part,
        "one_process_rows_per_second": round(args.part / alone, 1),
        "times_one_process": round((seconds / len(ds)) / (alone / args.part), 3),
        "peak_worker_mib": round(max(peaks.values()) / 2**20),
        "dataset_mib": round(ds.nbytes / 2**20),
        "workers": args.workers,
    }
    print(name, found, flush=True)
    return found


def compare_pools(ds: sl.Dataset, args: Any) -> dict[str, Any]:
    """Return the seconds of two fits on a cluster, and their ratio.

    One has 32 clusterings that draw their own centroids, the other 200 that share pools of random rows.
    """
    found: dict[str, Any] = {"rows": len(ds), "workers": args.workers}
    for name, clusterings, pools in (("paper", 32, "paper"), ("pools", 200, "auto")):
        model = sl.MultilayerBootstrapNetwork(
            k1=2000,
            n_classes=10,
            n_components=10,
            n_clusterings=clusterings,
            n_pools=pools,
            decay=0.5,
            random_state=args.seed,
        )
        with sl.cluster("local", workers=args.workers, memory_limit=args.memory_limit) as client:
            print(f"{name}: dashboard: {client.dashboard_link}", flush=True)
            begin = time.perf_counter()
            model.fit(ds, run_dir=args.folder / f"run-{name}-{len(ds)}-{time.time_ns()}")
            seconds = time.perf_counter() - begin
            peaks = client.run(peak_bytes)
        found[name] = {
            "clusterings": clusterings,
            "seconds": round(seconds, 1),
            "peak_worker_mib": round(max(peaks.values()) / 2**20),
        }
        print(name, found[name], flush=True)
    return found | {"times_paper": round(found["pools"]["seconds"] / found["paper"]["seconds"], 3)}


def main() -> None:
    arguments = parser(__doc__, "mbn_million")
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--parts", default="digits,documents")
    arguments.add_argument("--digits", type=int, default=1_000_000, help="number of infinite digits")
    arguments.add_argument("--documents", type=int, default=804_414, help="number of documents")
    arguments.add_argument("--part", type=int, default=100_000, help="number of rows that this process fits")
    arguments.add_argument("--clusterings", type=int, default=32)
    arguments.add_argument("--pools", default="auto", help="value of n_pools")
    arguments.add_argument("--workers", type=int, default=2)
    arguments.add_argument("--memory-limit", default="3GB")
    args = arguments.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for name in args.parts.split(","):
        if name == "digits":
            ds = infinite_digits(args.folder, args.digits, args.seed)[0]
            found = measure(ds, args, name, k1=2000, n_classes=10, n_components=10)
        elif name == "pools":
            found = compare_pools(infinite_digits(args.folder, args.digits, args.seed)[0], args)
        elif name == "documents":
            ds = open_documents(args.folder, args.documents, args.seed)
            found = measure(ds, args, name, k1=500, n_classes=82, n_components=5, metric="cosine")
        else:
            raise SystemExit(f"no part {name!r}; there are digits, pools, documents")
        write_part(args.out, name, args.seed, found)


if __name__ == "__main__":
    main()
