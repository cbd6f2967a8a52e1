"""Measure a pass of capsule regression on one thread, and divide its time by that of its matrix products.

    python benchmarks/capsule_pass.py

Capsule regression computes a vector of d numbers (a capsule) for each of ten classes; D is 10 d. A pass is an
E-step over all rows X, which are float32 in memory. For each d, one process measures in turn the pass, and
its products H = W X^T and Delta = H X alone, with the block size that is fastest for them. The M-step uses
only rows for which a wrong class has more than nu times the probability of the true class ("active" rows):
all rows with nu = 0; with nu = 0.8, as many as in a real fit. "numpy" is the same pass in numpy. A second
table compares the engine's pass with one in numpy as Saul (2021) describes it, both on two threads.
"""

from __future__ import annotations

import numpy as np
from common import data_folder, measure_medians, mnist, parser, write

from scalelatent.data import Dataset
from scalelatent.engine.backend import make_backend
from scalelatent.engine.inprocess import InProcessExecutor
from scalelatent.engine.passes import PassContext, Span, make_stage
from scalelatent.engine.reading import StopEvent
from scalelatent.engine.threads import single_threaded
from scalelatent.models.capsule.kernels.reference import posterior_ratios
from scalelatent.models.capsule.model.em import CapsuleEM, initial_state
from scalelatent.models.capsule.model.members import build_members
from scalelatent.models.capsule.model.start import subspace_start
from scalelatent.reductions.eigen import leading_eigenvectors
from scalelatent.reductions.moments import SecondMoments


def make_rows(n: int, p: int, seed: int) -> tuple[np.ndarray, np.ndarray, str]:
    """Return n rows of p features, their classes and a name: projected MNIST or, without its files, noise."""
    try:
        data_folder()
    except SystemExit:
        rng = np.random.default_rng(seed)
        y = rng.integers(0, 10, n)
        x = (rng.normal(size=(10, p))[y] + rng.normal(size=(n, p))).astype(np.float32)
        return x, y, "noise around ten means"
    x, y = mnist(slice(0, n))
    x = x.astype(np.float32)
    basis = leading_eigenvectors((x.T @ x).astype(np.float64), p)[1]
    return np.ascontiguousarray(x @ basis.astype(np.float32)), y.astype(np.int64), "MNIST, projected"


def make_products(x: np.ndarray, w: np.ndarray, block: int):
    """Return a function that computes H = W X^T and H X for weights W and blocks of rows of X."""
    h = np.empty((len(w), block), dtype=np.float32)
    delta = np.empty(w.shape, dtype=np.float32)

    def compute_products() -> None:
        for a in range(0, len(x), block):
            part = x[a : a + block]
            out = h[:, : len(part)]
            np.matmul(w, part.T, out=out if len(part) == block else None)
            np.matmul(out, part, out=delta)

    return compute_products


def make_plain_numpy_pass(x: np.ndarray, y: np.ndarray, w: np.ndarray, dims: np.ndarray):
    """Return a function that computes a pass (E-step over all rows x) in numpy, 10,000 rows at a time."""

    def compute_pass() -> None:
        delta = np.zeros(w.shape)
        for a in range(0, len(x), 10_000):
            h = w @ x[a : a + 10_000].T
            ratios, _ = posterior_ratios(h, y[a : a + 10_000], dims)
            delta += (np.repeat(ratios - 1, dims, axis=0) * h) @ x[a : a + 10_000]

    return compute_pass


def compute_paper_lambda(s: int, b: np.ndarray) -> np.ndarray:
    """Return the integral I_s(b) of Saul (2021) for a size s and numbers b, by his appendix's recursions.

    The recursions run forward from 0 to s where b > s, and backward from s + 64 to s elsewhere.
    """
    forward, backward = -np.expm1(-b), b / (b + s + 64)
    with np.errstate(all="ignore"):
        for k in range(s):
            forward = 1 - (k + 1) / b * forward
    for k in range(64):
        backward = b / (s + 64 - k) * (1 - backward)
    return np.where(b > s, forward, backward)


def make_paper_numpy_pass(x: np.ndarray, y: np.ndarray, w: np.ndarray, d: int):
    """Return a function that computes a pass (E-step over all rows x) in numpy as in Saul (2021)."""

    def compute_pass() -> np.ndarray:
        h = x @ w.T
        q = (h.reshape(len(x), 10, d) ** 2).sum(axis=2)
        total, rows_ = q.sum(axis=1), np.arange(len(x))
        lam0, lam1 = (compute_paper_lambda(5 * d + extra, total.astype(np.float64) / 2) for extra in (0, 1))
        f = q / total[:, None]
        p = lam0[:, None] * f + (1 - lam0)[:, None] / 10
        own = 2.0 * (np.arange(10) == y[:, None])
        top = (lam1 * f[rows_, y])[:, None] + (1 - lam1)[:, None] * (own + d) / (2 + 10 * d)
        return (np.repeat(top / p[rows_, y][:, None], d, axis=1) * h).T @ x

    return compute_pass


def time_two_threads(x: np.ndarray, y: np.ndarray, d: int) -> dict[str, float]:
    """Return the milliseconds of a pass (E-step over all rows x) on two threads, in numpy and in the engine.

    A class has a vector (capsule) of ``d`` numbers.
    """
    members, dataset = build_members("multiclass", 10, d), Dataset.from_arrays(x, y)
    moment = np.stack([np.eye(x.shape[1])] * 10)
    learner = CapsuleEM(members, moment, np.zeros(1), np.array([10**9]), 1, 0.9, 0.0, 0.0, 10**9, None, 0)
    w = np.random.default_rng(0).normal(size=(10 * d, x.shape[1])) * 0.002
    stage = make_stage("capsule_estep", learner, {"train": dataset}, "cpu", dataset.classes)
    executor, state = InProcessExecutor(2), initial_state(w, 1)

    x_float64 = x.astype(np.float64)
    plain = {
        "numpy": make_paper_numpy_pass(x, y, w.astype(np.float32), d),
        "numpy float64": make_paper_numpy_pass(x_float64, y, w, d),
    }
    times = measure_medians(plain, 7)
    with single_threaded():
        ours = {"pass": lambda: executor.step(stage, 0, state, lambda done, total: None)}
        times |= measure_medians(ours, 15)
    out = {"D": 10 * d, **{f"{k} ms": round(1e3 * v, 1) for k, v in times.items()}}
    out["times faster"] = round(times["numpy"] / times["pass"], 1)
    return {**out, "times faster than float64": round(times["numpy float64"] / times["pass"], 1)}


def measure(x: np.ndarray, y: np.ndarray, d: int) -> dict[str, float]:
    """Return a line of the first table: the milliseconds of each method, and their ratios.

    A class has a vector (capsule) of ``d`` numbers.
    """
    members = build_members("multiclass", 10, d)
    dataset = Dataset.from_arrays(x, y)
    moments = SecondMoments(x.shape[1], 10)
    backend = make_backend("cpu")
    stage = make_stage("capsule_moments", {"train": moments}, {"train": dataset}, "cpu", dataset.classes)
    depth = stage.grids["train"].depth
    stats = PassContext(stage, None, backend, None).run_span(Span("train", depth, 0), StopEvent())
    moment = stats[: 10 * x.shape[1] ** 2].reshape(10, x.shape[1], x.shape[1])
    weight = np.bincount(y, minlength=10).astype(float)
    out: dict[str, float] = {"D": members.total_dim}
    learner = CapsuleEM(members, moment, np.array([0.8]), np.array([10**9]), 1, 0.9, 0.0, 0.0, 10**9, None, 0)
    state = initial_state(subspace_start(members, moment, weight), 1)
    estep = make_stage("capsule_estep", learner, {"train": dataset}, "cpu", dataset.classes)
    span = Span("train", estep.grids["train"].depth, 0)
    for _ in range(20):
        vector = PassContext(estep, state, backend, None).run_span(span, StopEvent())
        from scalelatent.contract.stats import Stats

        state = learner.update(state, {"train": Stats(estep.reductions["train"].layout(), vector[:-2])})
    out["active_share_nu_0.8"] = round(float(state.active[0]), 4)

    def make_pass(nu: float):
        em = CapsuleEM(members, moment, np.array([nu]), np.array([10**9]), 1, 0.9, 0.0, 0.0, 10**9, None, 0)
        fixed = make_stage("capsule_estep", em, {"train": dataset}, "cpu", dataset.classes)
        return lambda: PassContext(fixed, state, backend, None).run_span(span, StopEvent())

    w = state.w.astype(np.float32)
    candidates = {f"products {b}": make_products(x, w, b) for b in (512, 1024, 2048, 4096)}
    best = min((t, name) for name, t in measure_medians(candidates, 5).items())[1]
    passes = {"pass": make_pass(0.0), "pass nu=0.8": make_pass(0.8)}
    times = measure_medians({"products": candidates[best], **passes})
    out["block_of_products"] = int(best.split()[1])
    for name, seconds in times.items():
        out[f"{name} ms"] = round(1e3 * seconds, 2)
    out["ratio nu=0"] = round(times["pass"] / times["products"], 3)
    out["ratio nu=0.8"] = round(times["pass nu=0.8"] / times["products"], 3)
    out["products GF/s"] = round(4 * len(x) * w.size / times["products"] / 1e9, 1)
    plain = make_plain_numpy_pass(x, y, w, members.dims[0])
    slow = measure_medians({"numpy": plain, "pass": passes["pass"]}, 3)
    out["numpy ms"] = round(1e3 * slow["numpy"], 1)
    out["times faster than numpy"] = round(slow["numpy"] / slow["pass"], 1)
    return out


def main() -> None:
    args = parser(__doc__, "capsule_pass")
    args.add_argument("--rows", type=int, default=50_000)
    args.add_argument("--features", type=int, default=196)
    args.add_argument("--dims", type=int, nargs="+", default=[2, 4, 8, 16, 32])
    a = args.parse_args()
    x, y, what = make_rows(a.rows, a.features, a.seed)
    with single_threaded():
        square = np.random.default_rng(0).normal(size=(2048, 2048)).astype(np.float32)
        peak = 2 * 2048**3 / measure_medians({"sgemm": lambda: square @ square}, 5)["sgemm"] / 1e9
        print(f"{what}, {x.shape}; float32 product of 2,048 x 2,048 numbers: {peak:.0f} GF/s")
        table = [measure(x, y, d) for d in a.dims]
    both = [time_two_threads(x, y, d) for d in a.dims]
    for line in table + both:
        print(line)
    write(
        a.out,
        a.seed,
        {"rows": what, "shape": x.shape, "sgemm GF/s": round(peak, 1), "table": table, "two threads": both},
    )


if __name__ == "__main__":
    main()
