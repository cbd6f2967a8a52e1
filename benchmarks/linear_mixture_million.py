"""Fit mixtures of linear models to a million infinite digits, out of core on a local cluster.

    python benchmarks/linear_mixture_million.py FOLDER [--parts digits,small,scale,rates]

Infinite digits are random deformations of MNIST rows 0:50000. A sub-class is a component of a class.

digits  For each number of sub-classes per class, two fits: of MNIST rows 0:50000 in this process, and of
        the infinite digits on worker processes. The results are the errors of both on rows 50000:60000 and
        on the test set.
small   The same two fits at 16 x 16 pixels (cropped by 2 and averaged) with 100 sub-classes per class. The
        settings were chosen for tangent distance, which ignores small shifts and rotations, on rows
        50000:60000. The results are the errors with tangent distance and without.
scale   Peak memory of the workers with a tenth, three tenths and all of the digits, compared with the
        prediction of `plan`: 100 sub-classes on workers of 2 GB, 500 on workers of 4 GB. --cache 0 turns
        off the row cache of the workers.
rates   Seconds of a pass over all digits with two threads of this process and with two workers, for 100 and
        500 sub-classes. The machine should be idle.

The dataset is written to FOLDER once; an interrupted fit of `digits` resumes. --timings adds seconds; the
machine should be idle. Needs SCALELATENT_DATA.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from common import infinite_digits, open_or_create, parser, write_part

import scalelatent as sl
from scalelatent.data import convert_dataset
from scalelatent.deploy.probes import peak_bytes
from scalelatent.models.linear_mixture.kernels.reference import TANGENTS


class PrintPasses(sl.Callback):
    """Callback that prints one line every five passes."""

    def on_pass_end(self, record: dict[str, Any]) -> None:
        if record["pass"] % 5 == 0:
            print({k: record[k] for k in ("pass", "objective", "phase", "seconds")}, flush=True)


def measure_errors(model: Any, held: Any, test: Any) -> dict[str, float]:
    """Return passes, validation and test errors, also with tangent distance if the model has tangents."""
    out = {"passes": model.n_iter_}
    for name, recognition in (("", "error"), ("_tangent_distance", "tangent-distance")):
        if recognition == "error" or model.tangents:
            model.set_params(recognition=recognition)
            out |= {
                f"validation_error{name}": round(1 - model.score(held), 4),
                f"test_error{name}": round(1 - model.score(test), 4),
            }
    return out


def measure(params: dict[str, Any], base: Any, train: Any, held: Any, test: Any, args: Any) -> dict[str, Any]:
    """Fit the MNIST rows ``base`` and the infinite digits ``train``; return the errors of both."""
    params, k = {"likelihood": "error"} | params | {"random_state": args.seed}, params["n_components"]
    few = sl.LinearMixtureClassifier(n_jobs=args.workers, **params).fit(base, validation=held)
    out: dict[str, Any] = {"rows": len(train), "of 50,000 rows": measure_errors(few, held, test)}
    print(k, out, flush=True)
    run = args.folder / f"mixture-{len(train)}-{k}-{params['n_dims']}-{train.n_features}"
    begin = time.perf_counter()
    with sl.cluster("local", workers=args.workers, memory_limit=args.memory_limit) as client:
        print(f"dashboard: {client.dashboard_link}", flush=True)
        model = sl.LinearMixtureClassifier(**params)
        resume = (run / "engine").exists()
        model.fit(train, validation=held, run_dir=run, resume=resume, callbacks=[PrintPasses()])
        peaks = client.run(peak_bytes)
    out["of all"] = measure_errors(model, held, test) | {
        "gb_read": round(sum(r["bytes_read"] for r in model.history_) / 1e9, 2),
        "dataset_gb": round(train.nbytes / 1e9, 2),
        "peak_worker_mib": round(max(peaks.values()) / 2**20),
        "peak_driver_mib": round(peak_bytes() / 2**20),
        "workers": args.workers,
        "resumed": resume,
    }
    if args.timings:
        out["of all"] |= {
            "seconds": round(time.perf_counter() - begin, 1),
            "median_seconds_a_pass": round(statistics.median(r["seconds"] for r in model.history_), 3),
        }
    print(k, out, flush=True)
    return out


# Parameters of the classifier in the part small; linear_mixture_paper.py chose them on held-out rows.
SMALL_PARAMS = {
    "n_components": 100,
    "n_dims": 10,
    "smoothing": 0.5,
    "likelihood": "code-cost",
    "tangents": TANGENTS,
    "tangent_smoothing": 0.6,
    "tol": 1e-4,
    "recognition_tangent_weight": 0.0,
}


def open_averaged_rows(folder: Path, ds: Any, name: str) -> Any:
    """Return the rows of a dataset at 16 x 16 pixels as a dataset; create it if it does not exist."""
    place = folder / f"{name}-16.zarr"
    return open_or_create(place, lambda: convert_dataset(ds, place, crop=2, resize=(16, 16)))


# Number of passes of a fit in the part rates; the passes that find first components are not timed.
PASSES = 4
# Memory limit of a worker, by the number of sub-classes of all classes.
MEMORY_LIMITS = {100: "2GB", 500: "4GB"}


def measure_peaks(k: int, train: Any, args: Any) -> None:
    """Write the measured and predicted peak memory of a worker with k sub-classes, for three row counts."""
    model = sl.LinearMixtureClassifier(n_components=k // 10, n_dims=args.dims, max_iter=3, tol=0)
    model.set_params(likelihood="error", random_state=args.seed)
    engine = {} if args.cache is None else {"cache": args.cache}
    about = {
        "memory_limit": MEMORY_LIMITS[k],
        "workers": args.workers,
        "dims": args.dims,
        "cache": args.cache,
    }
    out: dict[str, Any] = {"rows": [], "peak_worker_mib": [], "planned_mib": [], "passes": []}
    for rows in (len(train) // 10, 3 * len(train) // 10, len(train)):
        # Each fit has new workers, because a peak covers the whole life of a process.
        with sl.cluster("local", workers=args.workers, memory_limit=MEMORY_LIMITS[k]) as client:
            planned = model.plan(train[:rows], engine=engine)["peak_bytes_per_worker"]
            with TemporaryDirectory(dir=args.folder) as run:
                model.fit(train[:rows], run_dir=run, engine=engine)
            peak = max(client.run(peak_bytes).values())
        found = rows, round(peak / 2**20), round(planned / 2**20), model.n_iter_
        for name, value in zip(out, found, strict=True):
            out[name].append(value)
        print(k, MEMORY_LIMITS[k], dict(zip(out, found, strict=True)), flush=True)
        name = f"scale, {k}" + ("" if args.cache is None else f", cache {args.cache}")
        write_part(args.out, name, args.seed, out | about)


def measure_rates(k: int, train: Any, args: Any) -> dict[str, Any]:
    """Return the seconds of a pass with k sub-classes, by threads and by worker processes, from disk."""
    model = sl.LinearMixtureClassifier(n_components=k // 10, n_dims=args.dims, max_iter=PASSES, tol=0)
    model.set_params(likelihood="error", random_state=args.seed, n_jobs=args.workers)

    def compute_median_seconds() -> float:
        return statistics.median(r["seconds"] for r in model.history_ if r["phase"] == "em")

    model.fit(train)
    here = compute_median_seconds()
    with sl.cluster("local", workers=args.workers, memory_limit=MEMORY_LIMITS[k]) as client:
        model.fit(train, client=client)
    there = compute_median_seconds()
    out = {"rows": len(train), "workers": args.workers, "passes": PASSES}
    out |= {"seconds in process": here, "seconds of the workers": there, "of its rate": here / there}
    print(k, out, flush=True)
    return out


def main() -> None:
    arguments = parser(__doc__, "linear_mixture_million")
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--rows", type=int, default=1_000_000)
    arguments.add_argument("--parts", default="digits,scale")
    arguments.add_argument(
        "--components", default="10,20,50", help="numbers of sub-classes per class in the part digits"
    )
    arguments.add_argument(
        "--sub-classes",
        default="100,500",
        help="numbers of sub-classes of all classes in the parts scale and rates",
    )
    arguments.add_argument("--dims", type=int, default=12)
    arguments.add_argument("--workers", type=int, default=2)
    arguments.add_argument("--memory-limit", default="2GB")
    arguments.add_argument("--cache", help="value of engine={'cache': …} in the part scale")
    arguments.add_argument("--timings", action="store_true")
    args = arguments.parse_args()
    train, held, test = infinite_digits(args.folder, args.rows, args.seed)
    parts = args.parts.split(",")
    base = sl.open_dataset(args.folder / "train.zarr")[:50_000]
    for k in map(int, args.components.split(",") if "digits" in parts else ()):
        params = {"n_components": k, "n_dims": args.dims, "tol": 1e-4}
        write_part(args.out, f"k = {k}", args.seed, measure(params, base, train, held, test, args))
    if "small" in parts:
        named = {"base": base, f"digits-{args.rows}": train, "held": held, "test": test}
        rows = (open_averaged_rows(args.folder, ds, name) for name, ds in named.items())
        write_part(args.out, "16 x 16, k = 100", args.seed, measure(SMALL_PARAMS, *rows, args))
    for k in map(int, args.sub_classes.split(",") if "scale" in parts else ()):
        measure_peaks(k, train, args)
    for k in map(int, args.sub_classes.split(",") if "rates" in parts else ()):
        write_part(args.out, f"rates, {k}", args.seed, measure_rates(k, train, args))


if __name__ == "__main__":
    main()
