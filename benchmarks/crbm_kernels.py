"""Measure the inference kernels (compiled functions) of conditional RBMs on one thread.

    python benchmarks/crbm_kernels.py [--pgmax PYTHON]

edges     Edge updates per second in float32 on a graph of 784 x 256 units; one update sends both messages of
          an edge in one sweep over the graph. The methods are sum-product, sum-product with beliefs of pairs,
          and the other inference methods. The rates are compared with a loop that only computes the two
          divisions per edge, with the paper's matrix form in numpy, and with two threads.
large     Seconds and memory (in multiples of the weights W) of one row on a graph of 10,000 x 2,000 units,
          for four standard deviations of W: sweeps until no belief changes by more than 1e-3, at most 200.
          Ten sweeps on 1,000 x 500 units are compared with the 0.5 s of the paper.
threads   The rate of two threads divided by the rate of one, measured in turn: for sum-product on graphs of
          four sizes (messages and weights exceed the second-level cache between 392 and 784 units), and for
          divisions in the first-level cache, which show the best that the machine can do.
accuracy  Largest difference between a belief (probability of a unit) after ten sweeps in float32 and in
          float64, by the largest |W|. The float64 reference passes logarithms of messages.

The paper is Ping and Ihler (2017), "Belief propagation in conditional RBMs for structured prediction".
--pgmax also measures the library PGMax on the same graph, with a Python interpreter that has pgmax and jax;
it needs one or two minutes more.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import numba
import numpy as np
from common import fastest, parser, write

from scalelatent.engine.backend import find_kernel
from scalelatent.models.crbm.kernels.reference import sigmoid

# Numbers of visible and hidden units, of rows in a call of a kernel, and of belief-propagation sweeps.
V, H, ROWS, SWEEPS = 784, 256, 20, 10
# Python program for --pgmax that prints the edge updates per second of the library PGMax.
PGMAX_PROGRAM = """
import importlib.metadata
import json, sys, time
import jax, jax.lib
if not hasattr(jax.lib, "xla_bridge"):
    import types
    jax.lib.xla_bridge = types.SimpleNamespace(get_backend=lambda *a: jax.devices()[0].client)
    sys.modules["jax.lib.xla_bridge"] = jax.lib.xla_bridge
import numpy as np
from pgmax import fgraph, fgroup, infer, vgroup
v, h, sweeps, seed = map(int, sys.argv[1:])
rng = np.random.default_rng(seed)
w = rng.normal(size=(v, h)) * 0.1
bv, bh = rng.normal(size=v), rng.normal(size=h)
hidden, visible = (vgroup.NDVarArray(num_states=2, shape=(n,)) for n in (h, v))
graph = fgraph.FactorGraph(variable_groups=[hidden, visible])
unary = [fgroup.EnumFactorGroup(variables_for_factors=[[group[k]] for k in range(len(b))],
         factor_configs=np.arange(2)[:, None], log_potentials=np.stack([np.zeros(len(b)), b], axis=1))
         for group, b in ((hidden, bh), (visible, bv))]
potentials = np.zeros((v * h, 2, 2))
potentials[:, 1, 1] = w.T.ravel()
edges = [[hidden[j], visible[i]] for j in range(h) for i in range(v)]
pairs = fgroup.PairwiseFactorGroup(variables_for_factors=edges, log_potential_matrix=potentials)
graph.add_factors([*unary, pairs])
bp = infer.build_inferer(graph.bp_state, backend="bp")
run = jax.jit(lambda a: bp.run(a, num_iters=sweeps, damping=0.0, temperature=1.0))
arrays = bp.init()
jax.block_until_ready(run(arrays))
times = []
for _ in range(20):
    begin = time.perf_counter()
    jax.block_until_ready(run(arrays))
    times.append(time.perf_counter() - begin)
rate = v * h * sweeps / min(times)
versions = {"pgmax": importlib.metadata.version("pgmax"), "jax": jax.__version__}
print(json.dumps({"edges_per_second": rate, "threads": "all cores", **versions}))
"""


@numba.njit(fastmath=True, error_model="numpy", nogil=True)
def bare_divisions(a: Any, r: Any, sweeps: int) -> None:
    """Compute only the two divisions of belief propagation per edge of the graph and sweep (round).

    ``a`` is exp(W) of the weights W, and ``r`` the messages, both (visible units, hidden units).
    """
    t, u = np.float32(0.3), np.float32(0.7)
    for _ in range(sweeps):
        for i in range(a.shape[0]):
            for j in range(a.shape[1]):
                x = (a[i, j] * t + r[i, j] * u) / (t + r[i, j] * u)
                r[i, j] = (a[i, j] * t + x * u) / (t + x * u)


def draw_graph(v: int, h: int, rows: int, scale: float, seed: int) -> tuple[np.ndarray, ...]:
    """Return random float32 weights (v, h), and biases of v visible and h hidden units for each row."""
    rng = np.random.default_rng(seed)
    parts = rng.normal(size=(v, h)) * scale, rng.normal(size=(rows, v)), rng.normal(size=(rows, h))
    return tuple(part.astype(np.float32) for part in parts)


def run_matrix_form(
    w: np.ndarray, bv: np.ndarray, bh: np.ndarray, n_sweeps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Run sum-product on one graph by the matrix form of Ping and Ihler (2017), equations 13, 14, 16 and 17.

    Return the probabilities of visible and of hidden units, in the precision of the weights ``w``. The form
    is accurate if no weight exceeds 10 in absolute value.
    """

    def sigma(x: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-x))

    a = np.exp(w)
    to_h, tau_h = np.full_like(w, 0.5), sigma(bh)
    for _ in range(n_sweeps):
        one, two = (1 - to_h) * tau_h, to_h * (1 - tau_h)
        to_v = sigma(np.log((a * one + two) / (one + two)))
        tau_v = sigma(bv + np.log(to_v / (1 - to_v)).sum(axis=1))
        one, two = (1 - to_v) * tau_v[:, None], to_v * (1 - tau_v)[:, None]
        to_h = sigma(np.log((a * one + two) / (one + two)))
        tau_h = sigma(bh + np.log(to_h / (1 - to_h)).sum(axis=0))
    return tau_v, tau_h


def measure_edge_rates(seed: int) -> dict[str, Any]:
    """Return the edge updates per second of each inference method, bare divisions and the matrix form."""
    w, bv, bh = draw_graph(V, H, ROWS, 0.1, seed)
    coupling, pairs = find_kernel("crbm_make_coupling", "numba")(w), np.zeros((V, H), dtype=np.float32)
    methods = ("sum_product", "mixed_product", "max_product", "mean_field")
    bodies = {name: find_kernel(f"crbm_{name}", "numba") for name in methods}
    run, with_pairs = bodies["sum_product"], find_kernel("crbm_sum_product_pairs", "numba")
    a, messages = np.exp(w), np.ones_like(w)
    pool, halves = ThreadPoolExecutor(2), (slice(0, ROWS // 2), slice(ROWS // 2, None))
    calls = {name: lambda body=body: body(coupling, bv, bh, SWEEPS) for name, body in bodies.items()} | {
        "sum_product and pairs": lambda: with_pairs(coupling, bv, bh, SWEEPS, None, pairs),
        "bare divisions": lambda: bare_divisions(a, messages, SWEEPS * ROWS),
        "matrix form": lambda: run_matrix_form(w, bv[0], bh[0], SWEEPS),
        "two threads": lambda: list(pool.map(lambda part: run(coupling, bv[part], bh[part], SWEEPS), halves)),
    }
    for call in calls.values():
        call()
    seconds = fastest(calls, rounds=200)
    rows = dict.fromkeys(calls, ROWS) | {"matrix form": 1}
    rates = {name: rows[name] * V * H * SWEEPS / seconds[name] for name in calls}
    kernel = rates["sum_product"]
    return {
        "edges_per_second": {name: float(f"{rate:.4g}") for name, rate in rates.items()},
        "times the matrix form": round(kernel / rates["matrix form"], 1),
        "time over that of the bare divisions": round(rates["bare divisions"] / kernel, 2),
        "pair beliefs cost, in sweeps": round(
            SWEEPS * (seconds["sum_product and pairs"] / seconds["sum_product"] - 1), 2
        ),
        "two threads over one": round(rates["two threads"] / kernel, 2),
    }


def compare_two_threads(seed: int) -> dict[str, Any]:
    """Return the edge updates per second of one thread and the gain from a second, by size of graph."""
    run, make = (find_kernel(f"crbm_{name}", "numba") for name in ("sum_product", "make_coupling"))
    pool, calls, edges = ThreadPoolExecutor(2), {}, {}

    def run_twice(call: Any) -> Any:
        return lambda: list(pool.map(call, range(2)))

    for v in (98, 196, 392, V):
        w, bv, bh = draw_graph(v, H, ROWS, 0.1, seed)
        arguments = make(w), bv, bh, SWEEPS * V // v
        name = f"sum-product {v} x {H}"
        calls[name] = lambda arguments=arguments: run(*arguments)
        calls[f"{name}, two"] = run_twice(lambda _, arguments=arguments: run(*arguments))
        edges[name] = ROWS * v * H * (SWEEPS * V // v)
    a, messages = np.ones((8, H), np.float32), [np.ones((8, H), np.float32) for _ in range(2)]
    name, sweeps = "divisions", ROWS * SWEEPS * V // 8
    calls[name] = lambda: bare_divisions(a, messages[0], sweeps)
    calls[f"{name}, two"] = run_twice(lambda slot: bare_divisions(a, messages[slot], sweeps))
    edges[name] = 8 * H * sweeps
    for call in calls.values():
        call()
    seconds = fastest(calls, rounds=100)
    return {
        name: {
            "edges_per_second": float(f"{edges[name] / seconds[name]:.4g}"),
            "two threads over one": round(2 * seconds[name] / seconds[f"{name}, two"], 2),
        }
        for name in edges
    }


def time_large_graphs(seed: int) -> dict[str, Any]:
    """Return seconds and memory of inference on graphs of 1,000 x 500 and of 10,000 x 2,000 units."""
    run, make = (find_kernel(f"crbm_{name}", "numba") for name in ("sum_product", "make_coupling"))
    out: dict[str, Any] = {}
    large = [(10_000, 2000, scale, 200, 1e-3) for scale in (0.01, 0.05, 0.1, 0.2)]
    for v, h, scale, sweeps, tol in ((1000, 500, 0.1, 10, None), *large):
        w, bv, bh = draw_graph(v, h, 1, scale, seed)
        run(make(w[:9, :9]), bv[:, :9], bh[:, :9], 1)  # The first call compiles the kernels.
        tracemalloc.start()
        coupling = make(w)
        coupling.exp_w  # noqa: B018  A fit computes this array once for many batches.
        run(coupling, bv, bh, 1)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        times = []
        for _ in range(10):
            begin = time.perf_counter()
            found = run(coupling, bv, bh, sweeps, tol)
            times.append(time.perf_counter() - begin)
        name = f"{v} x {h}" if tol is None else f"{v} x {h}, couplings of {scale}"
        out[name] = {
            "seconds": round(min(times), 5),
            "sweeps": int(found.sweeps[0]),
            "change": float(found.change[0]),
            "edges_per_second": float(f"{v * h * int(found.sweeps[0]) / min(times):.4g}"),
            "message matrices of memory": round(peak / (4 * v * h), 2),
        }
    out["1000 x 500"]["times faster than the paper's 0.5 s"] = round(0.5 / out["1000 x 500"]["seconds"], 1)
    return out


def measure_accuracy(seed: int) -> dict[str, Any]:
    """Return the largest error of beliefs (probabilities of units) in float32, by the largest |weight|.

    "log form of rounded inputs" is the error of the float64 reference for inputs with an error of 2^-24.
    """
    out = {}
    for largest in (0.5, 1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0):
        worst = {"kernel": 0.0, "log form of rounded inputs": 0.0}
        for draw_number in range(6):
            w, bv, bh = draw_graph(60, 40, 3, 1.0, seed + draw_number)
            w = (w * largest / np.abs(w).max()).astype(np.float32)
            rng = np.random.default_rng(seed)
            rounded = [b * (1 + 2.0**-24 * rng.choice([-1, 1], b.shape)) for b in (w, bv, bh)]
            want = run_sum_product("reference", w, bv, bh)
            for name, found in (
                ("kernel", run_sum_product("numba", w, bv, bh)),
                ("log form of rounded inputs", run_sum_product("reference", *rounded)),
            ):
                for x, y in ((found.lv, want.lv), (found.lh, want.lh)):
                    difference = np.abs(sigmoid(x.astype(np.float64)) - sigmoid(y)).max()
                    worst[name] = max(worst[name], float(f"{difference:.2g}"))
        out[f"{largest:g}"] = worst
    return out


def run_sum_product(backend: str, w: np.ndarray, bv: np.ndarray, bh: np.ndarray) -> Any:
    """Return the beliefs after SWEEPS sweeps with the kernels of ``backend``: "numba" or "reference"."""
    coupling = find_kernel("crbm_make_coupling", backend)(w)
    return find_kernel("crbm_sum_product", backend)(coupling, bv, bh, SWEEPS)


def time_pgmax(python: str, seed: int) -> dict[str, Any]:
    """Return the edge updates per second of PGMax on a graph of the same size, or its error message."""
    command = [python, "-c", PGMAX_PROGRAM, str(V), str(H), str(SWEEPS), str(seed)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment, check=False)
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else done.returncode}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    arguments = parser(__doc__, "crbm_kernels")
    arguments.add_argument("--pgmax", metavar="PYTHON", help="interpreter with pgmax and jax")
    args = arguments.parse_args()
    results: dict[str, Any] = {"edges": measure_edge_rates(args.seed)}
    print(json.dumps(results["edges"], indent=1), flush=True)
    results["threads"] = compare_two_threads(args.seed)
    results["large"], results["accuracy"] = time_large_graphs(args.seed), measure_accuracy(args.seed)
    if args.pgmax:
        results["pgmax"] = found = time_pgmax(args.pgmax, args.seed)
        if "edges_per_second" in found:
            kernel = results["edges"]["edges_per_second"]["sum_product"]
            found["the kernel, times faster"] = round(kernel / found["edges_per_second"], 1)
    print(json.dumps({name: results[name] for name in results if name != "edges"}, indent=1))
    write(args.out, args.seed, results)


if __name__ == "__main__":
    main()
