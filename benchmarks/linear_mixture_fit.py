"""Measure passes, fits and recognition of mixtures of linear models, relative to BLAS.

    python benchmarks/linear_mixture_fit.py [--part pass]

Most times are divided by the time of BLAS on the same arrays in the same run. All parts except threads and
fits use one thread. The models have ten classes. A sub-class (component of a class) has h = 10 latent
dimensions, and an E-step projects its rows to 16 directions. A tangent of a row is the change of the image
under a small shift, rotation or scaling.

pass         An E-step of 60,000 rows in memory, including its sums in float64, divided by its matrix
             products. The products multiply the rows of a class with the columns of its sub-classes, and the
             rows of a sub-class with its basis and back. More results: the share of the M-step in the time of
             both steps, and the time that six tangents per row add, divided by the products of six times as
             many rows.
threads      Median seconds of a pass in a fit of 60,000 rows, with two threads and with one.
fits         Seconds of a fit of USPS with 200 sub-classes, and of MNIST averaged to 16 x 16 with 1,000. They
             are compared with the floating-point operations of their passes at the rate of sgemm (the
             float32 product of BLAS) in two threads.
recognition  Time of recognition with tangent distance for the ten best of 1,000 sub-classes, divided by the
             time without tangent distance.
wide         A pass over random rows of 3,072 features with 300 sub-classes, compared with its products.
row          Median milliseconds of `partial_fit` with one row: 100 sub-classes, 256 features, h = 12.
"""

from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from common import fastest, mnist16, parser, usps, write_part

import scalelatent as sl
from scalelatent.contract.learners import Block
from scalelatent.contract.stats import Stats
from scalelatent.engine.backend import make_backend
from scalelatent.engine.passes import choose_grid
from scalelatent.engine.rates import RowShape
from scalelatent.models.linear_mixture.kernels.reference import TANGENTS, TangentSpec
from scalelatent.models.linear_mixture.model.e_step import MAIN, MixtureSettings, initial_state
from scalelatent.models.linear_mixture.model.em import MixtureEM
from scalelatent.models.linear_mixture.model.start import start_components

# Numbers of classes, of latent dimensions, of directions to which an E-step projects a row, and of rows.
CLASSES, DIMS, DIRECTIONS, ROWS = 10, 10, 16, 60_000
# Height and width of images, by number of features.
SHAPES = {256: (16, 16), 784: (28, 28)}
# Numbers of rows that BLAS multiplies at a time; the fastest of them counts.
BLOCK_ROWS = (1024, 4096, 6000)


class OnePass:
    """One E-step over n random rows of p features with k sub-classes, and its matrix products in BLAS."""

    def __init__(self, n: int, p: int, k: int, tangents: bool, rng: np.random.Generator) -> None:
        self.x, self.y = rng.random((n, p), dtype=np.float32), (np.arange(n) % CLASSES).astype(np.int32)
        spec = TangentSpec(TANGENTS[:6], SHAPES[p], 0.6) if tangents else None
        mixture = MixtureSettings(p, np.repeat(np.arange(CLASSES), k // CLASSES), CLASSES, tangent_spec=spec)
        self.em, self.k = MixtureEM(mixture, DIMS, DIRECTIONS), k
        chosen = np.argsort(np.arange(k) % CLASSES, kind="stable")
        start = start_components(self.x[chosen].astype(np.float64), DIRECTIONS, 0).with_n_dims(DIMS)
        self.state = replace(
            initial_state(mixture, start, MAIN), tangent_weights=np.full((k, mixture.n_tangents), 0.1)
        )
        self.work, self.backend = self.em.reductions()["train"], make_backend("cpu")
        self.block = choose_grid(RowShape(n, p, False), self.work).block_rows
        self.stats = self.run()
        # After one update, the sub-classes differ in size, as in a fit.
        self.state = self.em.update(self.state, {"train": self.stats})

    def run(self) -> Stats:
        """Run the E-step over all rows; keep and return its statistics (sums over rows)."""
        prepared, stats = self.work.prepare(self.state, self.backend), Stats.zeros(self.work.layout())
        for a in range(0, len(self.x), self.block):
            part = slice(a, a + self.block)
            self.work.accumulate(prepared, Block(self.x[part], self.y[part], None, a), stats)
        self.stats = stats
        return stats

    def maximise(self) -> None:
        """Run the M-step on the statistics of the last E-step; its result is discarded: only time counts."""
        self.em.update(self.state, {"train": self.stats})

    def multiply_all(self, block: int) -> None:
        """Run all matrix products of an E-step, ``block`` rows at a time."""
        self.multiply_class_rows(block)
        self.multiply_component_rows(1)

    def multiply_class_rows(self, block: int) -> None:
        """Multiply the rows of each class with h + 1 columns per sub-class, ``block`` rows at a time."""
        n, columns_per_class = len(self.x), self.k // CLASSES * (DIMS + 1)
        columns = self.state.components.means.astype(np.float32).repeat(DIMS + 1, axis=0)
        out, n_class = np.empty((block, columns_per_class), np.float32), n // CLASSES
        for c in range(CLASSES):
            w = columns[c * columns_per_class : (c + 1) * columns_per_class].T
            for a in range(0, n_class, block):
                rows = self.x[c * n_class + a : c * n_class + min(a + block, n_class)]
                np.matmul(rows, w, out=out[: len(rows)])

    def multiply_component_rows(self, times: int) -> None:
        """Multiply ``times`` as many rows as each sub-class has with its basis and back."""
        counts = np.maximum(self.stats["count"].astype(int) // (-(-len(self.x) // self.block)), 1)
        bases, image = (
            self.state.components.bases.astype(np.float32),
            np.empty((DIRECTIONS, self.x.shape[1]), np.float32),
        )
        made = self.x[: times * counts.max()]
        for _ in range(-(-len(self.x) // self.block)):
            for q, count in enumerate(counts):
                rows = made[: times * count]
                np.matmul((rows @ bases[q]).T, rows, out=image)


def measure_passes(rng: np.random.Generator, rounds: int, quick: bool) -> list[dict[str, Any]]:
    """Return times of E-steps and of tangents in multiples of their products, and the M-step's share."""
    found = []
    for p in (256,) if quick else (256, 784):
        for k in (100,) if quick else (100, 500, 1000):
            n = 6000 if quick else ROWS
            one, six = (OnePass(n, p, k, tangents, rng) for tangents in (False, True))
            ways: dict[str, Any] = {"pass": one.run, "tangents": six.run, "M-step": one.maximise}
            ways["images"], ways["six"] = (
                partial(e.multiply_component_rows, n) for e, n in ((one, 1), (six, 6))
            )
            ways |= {f"scores {b}": partial(one.multiply_class_rows, b) for b in BLOCK_ROWS}
            took = fastest(ways, rounds)
            products = took["images"] + min(took[f"scores {b}"] for b in BLOCK_ROWS)
            more = took["tangents"] - took["pass"]
            found.append(
                {
                    "p": p,
                    "K": k,
                    "rows": n,
                    "seconds": took["pass"],
                    "rows/s": n / took["pass"],
                    "times its products": took["pass"] / products,
                    "six tangents, times their products": more / took["six"],
                    "M-step, share of both": took["M-step"] / (took["M-step"] + took["pass"]),
                }
            )
            print(found[-1], flush=True)
    return found


def compare_threads(rng: np.random.Generator, rounds: int, quick: bool) -> list[dict[str, Any]]:
    """Return the seconds of a pass in fits with one thread and with two."""
    found, n = [], 6000 if quick else ROWS
    for p, k in ((256, 100), (256, 1000)):
        x, y = rng.random((n, p), dtype=np.float32), np.arange(n) % CLASSES
        seconds: dict[int, list[float]] = {1: [], 2: []}
        for _ in range(max(rounds // 2, 1)):
            for jobs, reported in seconds.items():
                model = sl.LinearMixtureClassifier(
                    n_components=k // CLASSES if not quick else 2,
                    n_dims=DIMS,
                    likelihood="error",
                    max_iter=3,
                    tol=0.0,
                    n_jobs=jobs,
                    random_state=0,
                ).fit(x, y)
                reported.append(float(np.median([r["seconds"] for r in model.history_[-4:]])))
        one, two = min(seconds[1]), min(seconds[2])
        found.append({"p": p, "K": k, "seconds by one": one, "seconds by two": two, "times": one / two})
        print(found[-1], flush=True)
    return found


def measure_sgemm(jobs: int, p: int, rounds: int) -> float:
    """Return the operations per second of ``jobs`` threads that each multiply 2,048 rows by 1,100 columns."""
    rows, columns = 2048, 1100
    x, w = np.ones((rows, p), np.float32), np.ones((p, columns), np.float32)
    out = [np.empty((rows, columns), np.float32) for _ in range(jobs)]
    with ThreadPoolExecutor(jobs) as pool:

        def multiply_in_threads() -> None:
            list(pool.map(lambda to: np.matmul(x, w, out=to), out))

        return jobs * 2.0 * rows * columns * p / fastest({"": multiply_in_threads}, rounds + 1)[""]


def measure_fits(rng: np.random.Generator, rounds: int, quick: bool) -> list[dict[str, Any]]:
    """Return the seconds of fits of real digits, and the seconds that sgemm needs for as many operations."""
    found = []
    for name, read, k in (("USPS", usps, 20), ("MNIST 16 x 16", mnist16, 100)):
        x, y = read()
        if quick:
            x, y = x[:2000], y[:2000]
        rate = measure_sgemm(2, 256, rounds)
        best: dict[str, Any] = {"seconds": np.inf}
        for _ in range(1 if quick else 2):
            begin = time.perf_counter()
            model = sl.LinearMixtureClassifier(
                n_components=k, n_dims=DIMS, likelihood="error", n_jobs=2, random_state=0, tol=1e-4
            ).fit(x, y)
            seconds = time.perf_counter() - begin
            flops = 0.0
            for record in model.history_:
                columns = k * (record["n_dims"] + 1)
                flops += 2.0 * len(x) * 256 * columns + 4.0 * len(x) * 256 * DIRECTIONS
            if seconds < best["seconds"]:
                best = {
                    "rows": name,
                    "K": CLASSES * k,
                    "passes": len(model.history_),
                    "seconds": seconds,
                    "seconds of the passes": sum(r["seconds"] for r in model.history_),
                    "at the rate of sgemm": flops / rate,
                    "sgemm GF/s, two threads": rate / 1e9,
                }
        found.append(best)
        print(best, flush=True)
    return found


def measure_recognition(rng: np.random.Generator, rounds: int, quick: bool) -> list[dict[str, Any]]:
    """Return the rates of recognition with tangent distance and without."""
    n, k = (2000, 10) if quick else (20_000, 100)
    x, y = rng.random((n, 256), dtype=np.float32).reshape(n, 16, 16), np.arange(n) % CLASSES
    common: dict[str, Any] = {
        "n_components": k,
        "n_dims": DIMS,
        "max_iter": 1,
        "n_jobs": 1,
        "random_state": 0,
    }
    models = {
        name: sl.LinearMixtureClassifier(
            recognition=name,
            image_shape=(16, 16),
            tangents=TANGENTS[:6],
            recognition_tangent_weight=0.0,
            **common,
        ).fit(x.reshape(n, 256), y)
        for name in ("error", "tangent-distance")
    }
    some = x[: min(n, 4000)].reshape(-1, 256)
    ways = {name: partial(model.decision_function, some) for name, model in models.items()}
    for way in ways.values():
        way()
    took = fastest(ways, rounds)
    found = {
        "K": CLASSES * k,
        "rows/s": len(some) / took["error"],
        "rows/s, tangent distance": len(some) / took["tangent-distance"],
        "times": took["tangent-distance"] / took["error"],
    }
    print(found, flush=True)
    return [found]


def measure_wide_rows(rng: np.random.Generator, rounds: int, quick: bool) -> list[dict[str, Any]]:
    """Return the rate of a pass over rows of 3,072 features as a share of the rate of its matrix products."""
    n = 2000 if quick else 30_000
    one = OnePass(n, 3072, 300, False, rng)
    ways: dict[str, Any] = {"pass": one.run} | {f"{b}": partial(one.multiply_all, b) for b in BLOCK_ROWS[:2]}
    took = fastest(ways, rounds)
    share = min(took[f"{b}"] for b in BLOCK_ROWS[:2]) / took["pass"]
    found = {"p": 3072, "K": 300, "rows/s": n / took["pass"], "share of its products' rate": share}
    print(found, flush=True)
    return [found]


def measure_single_rows(rng: np.random.Generator, rounds: int, quick: bool) -> list[dict[str, Any]]:
    """Return the median milliseconds of `partial_fit` with one row, for a classifier and a density."""
    x, y = rng.random((2000, 256), dtype=np.float32), np.arange(2000) % CLASSES
    common: dict[str, Any] = {
        "n_dims": 12,
        "likelihood": "error",
        "max_iter": 2,
        "n_jobs": 1,
        "random_state": 0,
    }
    classifier = sl.LinearMixtureClassifier(n_components=10, **common).fit(x, y)
    density = sl.LinearMixture(n_components=100, **common).fit(x)
    found = []
    for name, learn in (
        ("LinearMixtureClassifier", lambda i: classifier.partial_fit(x[i : i + 1], y[i : i + 1])),
        ("LinearMixture", lambda i: density.partial_fit(x[i : i + 1])),
    ):
        times = []
        for i in range(20 if quick else 500):
            begin = time.perf_counter()
            learn(i)
            times.append(time.perf_counter() - begin)
        found.append(
            {"model": name, "K": 100, "p": 256, "n_dims": 12, "ms a row": 1e3 * float(np.median(times))}
        )
        print(found[-1], flush=True)
    return found


PART_FUNCTIONS = {
    "pass": measure_passes,
    "threads": compare_threads,
    "fits": measure_fits,
    "recognition": measure_recognition,
    "wide": measure_wide_rows,
    "row": measure_single_rows,
}


def main() -> None:
    arguments = parser(__doc__, "linear_mixture_fit")
    arguments.add_argument("--rounds", type=int, default=4)
    arguments.add_argument(
        "--part", choices=tuple(PART_FUNCTIONS), help="run this part only; fits need SCALELATENT_DATA"
    )
    arguments.add_argument(
        "--quick", action="store_true", help="use tiny sizes to test the script; write nothing"
    )
    args = arguments.parse_args()
    for name, measure in PART_FUNCTIONS.items():
        if args.part in (None, name):
            result = measure(np.random.default_rng(args.seed), args.rounds, args.quick)
            rounded = [
                {a: round(b, 4) if isinstance(b, float) else b for a, b in one.items()} for one in result
            ]
            if not args.quick:
                write_part(args.out, name, args.seed, rounded)


if __name__ == "__main__":
    main()
