"""Measure the time of a training step of a conditional RBM, and its share outside belief propagation.

    python benchmarks/crbm_steps.py [--parts share,products,threads,cluster,local]

share     Milliseconds of a step and of belief propagation in it, on one thread, with batches of 20, 40 and
          160 rows; both are timed in the same fit, so that other work on the machine affects both. The number
          of sweeps is --sweeps, and 32: the mean over 50 epochs of 8 to 57 sweeps. Three kinds of
          chains (sequences of minibatches that run in parallel) are compared: the estimator's default, where
          each chain computes gradients at shared parameters; one chain; and one chain that runs 16 steps on
          parameters in place, with the same result.
products  Milliseconds of the matrix products of a step between the rows of a batch and the parameters, on one
          thread: in this package, in OpenBLAS, and for comparison a copy of the parameters.
threads   Rows per second of two threads and of one.
cluster   Rows per second of a local cluster of two workers with one thread each, and of two threads in this
          process, with batches of 160 rows.
local     Test errors of local steps (chains that update their own parameters, which are then averaged), each
          after the same number of rows.

All parts use 784 visible and 256 hidden units, and all except "products" MNIST with 10 % noise. The rows are
in memory, and on disk for the cluster. Each result of the first four parts is the best of several rounds; in
all of these parts except "share", the compared methods run in turn. A rate is that of the fastest segment of
a fit (rows between two progress reports). Needs SCALELATENT_DATA.
"""

from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import argparse
import contextvars
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import mnist, parser, write_part

import scalelatent as sl
from scalelatent.engine.backend import make_backend
from scalelatent.engine.callbacks import Callback
from scalelatent.kernels.arrays import aligned_empty
from scalelatent.kernels.corruption import corrupt
from scalelatent.models.crbm.kernels.products import ascend_outer, write_affine_map
from scalelatent.models.crbm.kernels.update import StepArrays, StepRates, ascend

# Mean number of sweeps of belief propagation over 50 epochs, of which the first has 8 and the last 57.
MEAN_SWEEPS = 32
# Steps that a chain (sequence of minibatches) runs on its own parameters before the chains are averaged.
LOCAL_STEPS = 16
# Measured numbers of rows in a minibatch.
BATCHES = (20, 40, 160)


class ReportTimes(Callback):
    """Callback that stores the rows and seconds of each progress report of a fit.

    ``after_first_report`` is called after the first report, which includes starting threads and compiling.
    """

    def __init__(self, after_first_report: Callable[[], Any] = lambda: None) -> None:
        self.rows, self.seconds, self._before = list[int](), list[float](), after_first_report

    def on_report(self, record: dict[str, Any]) -> None:
        """Store the rows and seconds of a progress report."""
        if not record["rows"]:
            return
        self.rows.append(record["rows"])
        self.seconds.append(record["seconds"])
        if len(self.rows) == 1:
            self._before()

    on_pass_end = on_report  # The end of an epoch reports the rows since the last report.

    @property
    def rate(self) -> float:
        """Rows per second of the fastest report except the first."""
        pairs = zip(self.rows[1:], self.seconds[1:], strict=True)
        return max(rows / seconds for rows, seconds in pairs)


def make_digit_pairs(rows: int, seed: int, part: str = "train") -> tuple[np.ndarray, np.ndarray]:
    """Return MNIST images with 10 % flipped pixels, and the clean images, both (rows, 784) uint8."""
    v = (mnist(slice(0, rows), part)[0] > 127).astype(np.uint8)
    x = corrupt(v, np.arange(len(v)), kind="flip", rate=0.1, seed=seed, stage=f"steps-{part}")
    return x, v


def fit_one_epoch(
    rows: sl.Dataset,
    args: Any,
    batch: int,
    jobs: int,
    client: Any = None,
    after_first_report: Callable[[], Any] = lambda: None,
    sweeps: int | None = None,
    chains: int | None = None,
    local_steps: int | None = None,
) -> ReportTimes:
    """Fit one epoch, and return the times of its progress reports.

    If given, ``sweeps`` and ``chains`` (parallel sequences of minibatches) replace those of the command line.
    A chain runs ``local_steps`` on its own parameters; with None, all chains share the parameters.
    """
    step_rows = batch * (local_steps or 1)
    steps = max(1 if local_steps else 2, args.segment_rows // step_rows)
    n = step_rows * steps * (args.segments + 1)
    if n > len(rows):
        raise SystemExit(f"--rows {len(rows)} is too small for all segments; set --rows {n} or more")
    parts = ReportTimes(after_first_report)
    model = sl.ConditionalRBM(
        n_hidden=args.hidden,
        batch_size=batch,
        n_chains=chains or args.chains,
        local_steps=local_steps,
        n_sweeps=sweeps or args.sweeps,
        n_epochs=1,
        learning_rate=0.05,
        random_state=args.seed,
        n_jobs=jobs,
    )
    with tempfile.TemporaryDirectory(dir=args.folder) as place:
        folder = None if client is None else Path(place) / "run"
        model.fit(rows[:n], run_dir=folder, client=client, callbacks=[parts], engine={"report_steps": steps})
    return parts


def measure_rate(rows: sl.Dataset, args: Any, batch: int, jobs: int, client: Any = None) -> float:
    """Return the rows per second of a fit in its fastest segment (rows between two progress reports)."""
    return fit_one_epoch(rows, args, batch, jobs, client).rate


@contextmanager
def time_kernels() -> Iterator[dict[str, float]]:
    """Yield a dictionary that sums the seconds of each kernel (compiled function) inside the context."""
    seconds: dict[str, float] = {}
    backend = type(make_backend("cpu"))
    get_kernel = backend.kernel

    def kernel(self: Any, name: str) -> Callable[..., Any]:
        run = get_kernel(self, name)

        def timed(*args: Any) -> Any:
            begin = time.perf_counter()
            try:
                return run(*args)
            finally:
                seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - begin

        return timed

    backend.kernel = kernel  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        backend.kernel = get_kernel  # type: ignore[method-assign]


def measure_share(args: Any) -> list[dict[str, Any]]:
    """Return the milliseconds of a training step and of its belief propagation on one thread.

    There is a line for each number of sweeps (rounds of messages), setting of chains (parallel sequences of
    minibatches), and number of rows in a minibatch.
    """
    rows, out = sl.Dataset.from_arrays(*make_digit_pairs(args.rows, args.seed)), []
    chains_and_local = dict.fromkeys(((args.chains, None), (1, None), (1, LOCAL_STEPS)))
    settings = (args.sweeps, MEAN_SWEEPS), chains_and_local, BATCHES
    for sweeps, (chains, local_steps), batch in itertools.product(*settings):
        best: dict[str, Any] = {"share_outside": 1.0}
        options = {"sweeps": sweeps, "chains": chains, "local_steps": local_steps}
        for _ in range(args.rounds):
            with time_kernels() as kernels:
                parts = fit_one_epoch(rows, args, batch, 1, after_first_report=kernels.clear, **options)
            steps, seconds = sum(parts.rows[1:]) / batch, sum(parts.seconds[1:])
            propagation = kernels["crbm_sum_product_pairs"]
            edges = sweeps * batch * 784 * args.hidden
            found = {
                "batch": batch,
                **options,
                "chains": chains or "default",
                "ms_a_step": round(1e3 * seconds / steps, 3),
                "ms_propagation": round(1e3 * propagation / steps, 3),
                "ms_coupling": round(1e3 * kernels["crbm_make_coupling"] / steps, 3),
                "edge_updates_a_second": round(edges * steps / propagation),
                "share_outside": round(1 - propagation / seconds, 4),
            }
            best = min(best, found, key=lambda line: line["share_outside"])
        out.append(best)
        print(best, flush=True)
    return out


def time_with_cold_caches(args: Any, *functions: Callable[[], Any]) -> list[float]:
    """Return the smallest seconds of each function.

    Before each call, three arrays of the size of the weights are written, as by belief propagation, so that
    the processor's caches do not have the function's arguments.
    """
    arrays, best = [np.zeros((784, args.hidden), np.float32) for _ in range(3)], [np.inf] * len(functions)
    for _ in range(40 * args.rounds):
        for i, function in enumerate(functions):
            for array in arrays:
                array += 1
            begin = time.perf_counter()
            function()
            best[i] = min(best[i], time.perf_counter() - begin)
    return best


def compare_products(args: Any) -> list[dict[str, Any]]:
    """Return milliseconds of products of 10 to 160 rows with the parameters, by this package and OpenBLAS."""
    rng, units, out = np.random.default_rng(args.seed), 784 + args.hidden, []

    def draw(*shape: int) -> np.ndarray:
        filled = aligned_empty(shape)
        rng.standard_normal(shape, dtype=np.float32, out=filled)
        return filled

    theta, new, bias, none = draw(units, 784), draw(units, 784), draw(units), np.zeros((0, 784), np.float32)
    step_arrays, step_rates = StepArrays(theta, none, new, none), StepRates(1e-3, 0.0, 0.0)
    for rows in (10, 20, 40, 80, 160):
        x, left, biases = draw(rows, 784), draw(rows, units), draw(rows, units)

        def multiply_with_openblas(x: Any = x, biases: Any = biases) -> None:
            np.matmul(x, theta.T, out=biases)
            np.add(biases, bias, out=biases)

        def ascend_with_openblas(x: Any = x, left: Any = left) -> None:
            ascend(step_arrays.slice_part(slice(None), -1), np.matmul(left.T, x).reshape(-1), 0, step_rates)

        seconds = time_with_cold_caches(
            args,
            partial(write_affine_map, x, theta, bias, biases, np),
            multiply_with_openblas,
            partial(ascend_outer, step_arrays, left, x, step_rates),
            ascend_with_openblas,
            partial(np.copyto, new, theta),
        )
        names = ("biases", "biases_openblas", "ascend", "climb_openblas", "copy")
        out.append(
            {"rows": rows, **{f"ms_{k}": round(1e3 * s, 3) for k, s in zip(names, seconds, strict=True)}}
        )
        print(out[-1], flush=True)
    return out


def compare_threads(args: Any) -> list[dict[str, Any]]:
    """Return the rows per second of one and of two threads, for each number of rows in a minibatch."""
    rows, out = sl.Dataset.from_arrays(*make_digit_pairs(args.rows, args.seed)), []
    for batch in BATCHES:
        best = {1: 0.0, 2: 0.0}
        for _ in range(args.rounds):
            for jobs in best:
                best[jobs] = max(best[jobs], measure_rate(rows, args, batch, jobs))
        out.append({"batch": batch, "rows_a_second": {str(k): round(r) for k, r in best.items()}})
        out[-1]["speedup"] = round(best[2] / best[1], 3)
        print(out[-1], flush=True)
    return out


def compare_cluster(args: Any) -> dict[str, Any]:
    """Return the rows per second of two workers with one thread each, and of two threads of this process."""
    # On a cluster, each progress report writes the state of the fit. With at least 6,400 rows between two
    # reports, this time is negligible.
    rows_and_segments = {"segment_rows": max(args.segment_rows, 6400), "segments": min(args.segments, 2)}
    args = argparse.Namespace(**vars(args) | rows_and_segments)
    with (
        tempfile.TemporaryDirectory(dir=args.folder) as place,
        sl.cluster("local", workers=2, threads=1) as client,
    ):
        rows = sl.Dataset.from_arrays(*make_digit_pairs(args.rows, args.seed)).save(Path(place) / "rows.zarr")
        best = {"in_process": 0.0, "dask": 0.0}
        for _ in range(args.rounds):
            # In a new context the open cluster is not the default, so that the fit runs in this process.
            best["in_process"] = max(
                best["in_process"], contextvars.Context().run(measure_rate, rows, args, 160, 2)
            )
            best["dask"] = max(best["dask"], measure_rate(rows, args, 160, 2, client))
    found = {name: round(r) for name, r in best.items()}
    return {"batch": 160, "rows_a_second": found, "ratio": round(best["dask"] / best["in_process"], 3)}


def compare_local_steps(args: Any) -> list[dict[str, Any]]:
    """Return test errors in percent for several numbers of chains and of local steps.

    A chain (sequence of minibatches) runs local steps on its own parameters; then the chains are averaged.
    """
    x, v = make_digit_pairs(args.local_rows, args.seed)
    test, out = make_digit_pairs(args.test_rows, args.seed, "test"), []
    for chains, steps in ((1, None), (2, 1), (2, 10), (2, 50), (4, 10), (4, 50), (16, 10)):
        if 20 * chains * (steps or 1) > len(x):
            print(f"{chains} chains of {steps} steps need more than {len(x)} rows: skipped", flush=True)
            continue
        params = {} if steps is None else {"n_chains": chains, "local_steps": steps}
        begin = time.perf_counter()
        model = sl.ConditionalRBM(
            n_hidden=args.hidden,
            n_epochs=args.local_epochs,
            learning_rate=0.05,
            random_state=args.seed,
            **params,
        ).fit(x, v)
        errors = model.errors(*test)
        out.append(
            {
                "chains": chains,
                "local_steps": steps,
                "all": round(100 * errors["all"], 3),
                "changed": round(100 * errors["changed"], 3),
                "seconds": round(time.perf_counter() - begin, 1),
                "rows": len(x),
                "epochs": args.local_epochs,
            }
        )
        print(out[-1], flush=True)
    return out


def main() -> None:
    parts: dict[str, Callable[[Any], Any]] = {
        "share": measure_share,
        "products": compare_products,
        "threads": compare_threads,
        "cluster": compare_cluster,
        "local": compare_local_steps,
    }
    arguments = parser(__doc__, "crbm_steps")
    arguments.add_argument("--parts", default=",".join(parts))
    arguments.add_argument("--rows", type=int, default=20_000)
    arguments.add_argument("--hidden", type=int, default=256)
    arguments.add_argument("--sweeps", type=int, default=10, help="sweeps of belief propagation per step")
    arguments.add_argument(
        "--chains", type=int, default=None, help="chains per step; default: that of the estimator"
    )
    arguments.add_argument("--segment-rows", type=int, default=640, help="rows of a timed segment")
    arguments.add_argument("--segments", type=int, default=4, help="number of timed segments per fit")
    arguments.add_argument("--rounds", type=int, default=3, help="rounds of fits; the best counts")
    arguments.add_argument("--local-rows", type=int, default=10_000, help="training images of the part local")
    arguments.add_argument("--local-epochs", type=int, default=3)
    arguments.add_argument("--test-rows", type=int, default=2000)
    arguments.add_argument("--folder", default=None, help="folder of temporary datasets and run folders")
    args = arguments.parse_args()
    for name in args.parts.split(","):
        if name not in parts:
            raise SystemExit(f"unknown part {name}; use some of {', '.join(parts)}")
        write_part(args.out, name, args.seed, parts[name](args))


if __name__ == "__main__":
    main()
