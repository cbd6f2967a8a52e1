"""Check and measure conditional RBMs on a GPU: beliefs, a fit, then rates of inference and learning.

    python benchmarks/gpu_crbm.py --out gpu_crbm.json

The docstring of gpu_common.py describes what the script needs, its result file and its exit codes.

Beliefs (probabilities of units) are compared with the numpy reference, and a fit on the GPU with a fit on the
CPU. Rates of inference are medians with the biases on the GPU. Each rate comes with three more numbers:

- the bytes per second that messages move between the multiprocessors and the second-level cache or memory: 16
  bytes per edge and sweep, or 4 if messages stay in shared memory;
- the seconds of 50 epochs on MNIST at this rate, as in Ping and Ihler (2017);
- its divisions as a share of the rate of the special-function units, 16 per clock and multiprocessor.

Learning runs steps of 20 rows with 32 sweeps, about the mean of that paper's fit. Each step copies the
parameters, or they stay on the GPU for 64 steps.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from gpu_common import (
    Task,
    check_error,
    choose_device,
    device_seconds,
    find_kernel,
    make_current_backend,
    run_script,
    script_parser,
)

import scalelatent as sl
from scalelatent.engine.backend import CupyBackend
from scalelatent.models.crbm.kernels import reference
from scalelatent.models.crbm.kernels.reference import sigmoid

METHODS = ("sum_product", "mixed_product", "max_product", "mean_field")
PAPER_EPOCHS, PAPER_ROWS, MEAN_SWEEPS = 50, 50_000, 32
# Edge updates of the fit of Ping and Ihler (2017) on MNIST: 784 x 256 units, 7 + e sweeps in epoch e.
PAPER_EDGES = 784 * 256 * PAPER_ROWS * sum(7 + epoch for epoch in range(1, PAPER_EPOCHS + 1))
# Divisions that the special-function units of one multiprocessor start per clock.
DIVISIONS_PER_CLOCK = 16


def main() -> int:
    return run_script(
        script_parser(__doc__).parse_args(), make_current_backend, list_checks, list_measurements
    )


def list_checks(backend: CupyBackend, args: argparse.Namespace) -> Iterator[Task]:
    shapes = [(1, 1, 1.0), (7, 3, 3.0), (40, 70, 0.3)]
    for shape in shapes if args.quick else [*shapes, (784, 256, 0.1), (33, 2000, 0.05)]:
        yield "checks", f"graphs of {shape[0]} x {shape[1]}", partial(check_graph, backend, *shape, args)
    yield "checks", "a fit compared with the processor's", partial(check_fit, args)


def list_measurements(backend: CupyBackend, args: argparse.Namespace) -> Iterator[Task]:
    full = [(784, 256, 20), (784, 256, 160), (784, 256, 1280), (10_000, 2000, 4)]
    for shape in [(20, 10, 5)] if args.quick else full:
        for pairs in (False, True):
            name = f"inference, {shape[0]} x {shape[1]}, {shape[2]} rows{', with pairs' if pairs else ''}"
            yield "rates", name, partial(measure_inference, backend, *shape, pairs, args)
    sizes = (20, 10, 2) if args.quick else (784, 256, 64)
    yield "steps", "steps of learning", partial(measure_steps, *sizes, args)


def draw_graph(v: int, h: int, rows: int, scale: float, seed: int) -> tuple[np.ndarray, ...]:
    """Return random float32 weights (v, h), and biases of v visible and h hidden units for each row."""
    rng = np.random.default_rng(seed)
    parts = rng.normal(size=(v, h)) * scale, rng.normal(size=(rows, v)), rng.normal(size=(rows, h))
    return tuple(part.astype(np.float32) for part in parts)


def check_graph(
    backend: CupyBackend, v: int, h: int, scale: float, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Compare beliefs (probabilities of units and pairs) and log partition function with the reference.

    The graph has v visible and h hidden units. The beliefs of rows 2:5 must also have the same bits if the
    batch has only these rows.
    """
    out = []
    w, bv, bh = draw_graph(v, h, 6, scale, args.seed)
    device = tuple(backend.asarray(b, np.float32) for b in (bv, bh))
    make = {name: find_kernel("crbm_make_coupling", name)(w) for name in ("cupy", "reference")}
    for method in METHODS:
        sweeps, bound = (3, compute_max_product_bound(w, bv, bh, 3)) if method == "max_product" else (8, 1e-5)
        found = backend.kernel(f"crbm_{method}")(make["cupy"], *device, sweeps, None)
        want = getattr(reference, method)(make["reference"], bv, bh, sweeps)
        again = backend.kernel(f"crbm_{method}")(make["cupy"], *(b[2:5] for b in device), sweeps, None)
        worst = float(np.abs(sigmoid(backend.to_host(found.lv)) - sigmoid(want.lv)).max())
        same = bool((backend.to_host(found.lv)[2:5] == backend.to_host(again.lv)).all())
        out.append(check_error(f"{method} {v} x {h}", worst, bound))
        out.append({"name": f"{method} {v} x {h}, a part of the batch", "passed": same})
    pairs, wanted = backend.asarray(np.zeros((v, h)), np.float32), np.zeros((v, h))
    found = backend.kernel("crbm_sum_product_pairs")(make["cupy"], *device, 8, None, pairs)
    want = reference.sum_product_pairs(make["reference"], bv, bh, 8, None, wanted)
    out.append(check_error(f"pairs {v} x {h}", float(np.abs(backend.to_host(pairs) - wanted).max()), 1e-4))
    worst = float(np.abs(backend.to_host(found.log_z) / want.log_z - 1).max())
    out.append(check_error(f"Bethe {v} x {h}", worst, 1e-4))
    return out


def compute_max_product_bound(w: np.ndarray, bv: np.ndarray, bh: np.ndarray, sweeps: int) -> float:
    """Return an upper bound of the difference between max-product beliefs in float32 and in float64.

    Max-product magnifies rounding errors in each sweep. Rounding a message to float32 has about the effect of
    changing a weight by one unit in the last place. The bound is 1e-5 plus 4 times the change of beliefs by
    such changes of all weights.
    """
    rng, found = np.random.default_rng(0), []
    for share in (0, 1, 1):
        changes = share * rng.integers(-1, 2, w.shape) * np.spacing(np.maximum(np.abs(w), np.float32(1)))
        found.append(reference.max_product(reference.make_coupling(w + changes), bv, bh, sweeps))
    return 1e-5 + 4 * max(float(np.abs(sigmoid(f.lv) - sigmoid(found[0].lv)).max()) for f in found[1:])


def draw_stripes(v: int, rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return noisy and clean binary images of random stripes, both (rows, v) uint8."""
    rng = np.random.default_rng(seed)
    clean = ((np.arange(v) + rng.integers(0, 8, (rows, 1))) % 8 < 3).astype(np.uint8)
    return clean ^ (rng.random(clean.shape) < 0.1), clean


def make_model(device: str, h: int, local_steps: int | None, sweeps: int, seed: int) -> sl.ConditionalRBM:
    """Return an estimator that learns by belief propagation from one chain (sequence) of minibatches.

    The GPU keeps the parameters for ``local_steps`` steps; with None, each step copies them.
    """
    return sl.ConditionalRBM(
        n_hidden=h, learner="mle-bp", n_sweeps=sweeps, batch_size=20, n_epochs=2, n_chains=1,
        local_steps=local_steps, device=device, n_jobs=1, random_state=seed,
    )  # fmt: skip


def check_fit(args: argparse.Namespace) -> dict[str, Any]:
    """Compare the parameters of a short fit on the GPU with those of the same fit on the CPU."""
    sizes = (20, 10, 60) if args.quick else (196, 128, 400)
    x, clean = draw_stripes(sizes[0], sizes[2], args.seed)
    fits = [
        make_model(device, sizes[1], 3, 4, args.seed).fit(x, clean) for device in ("cpu", choose_device())
    ]
    worst = max(float(np.abs(getattr(fits[0], k) - getattr(fits[1], k)).max()) for k in ("W_", "Wvx_", "bv_"))
    return check_error("a fit compared with the processor's", worst, 1e-4)


def measure_steps(v: int, h: int, local_steps: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return seconds of a training step if each step copies the parameters, and if the GPU keeps them."""
    sweeps = 2 if args.quick else MEAN_SWEEPS
    x, clean = draw_stripes(v, 20 * local_steps * (2 if args.quick else 20), args.seed)
    found: dict[str, Any] = {"graph": f"{v} x {h}", "rows": 20, "sweeps": sweeps, "local_steps": local_steps}
    for name, local in (("seconds", None), ("seconds_on_the_card", local_steps)):
        history = make_model("gpu", h, local, sweeps, args.seed).fit(x, clean).history_
        found[name] = history[-1]["seconds"] / (len(x) / 20)  # The second epoch compiles nothing.
    found["edges_per_second"] = v * h * 20 * sweeps / found["seconds_on_the_card"]
    epochs = PAPER_EPOCHS * PAPER_ROWS / 20
    found["paper's 50 epochs of MNIST, seconds"] = epochs * found["seconds_on_the_card"]
    print(json.dumps(found), flush=True)
    return found


def measure_inference(
    backend: CupyBackend, v: int, h: int, rows: int, with_pairs: bool, args: argparse.Namespace
) -> dict[str, Any]:
    """Return the edge updates per second of sum-product inference, with or without beliefs of pairs."""
    sweeps = 20
    w, bv, bh = draw_graph(v, h, rows, 0.1 if v < 1000 else 0.01, args.seed)
    device = tuple(backend.asarray(b, np.float32) for b in (bv, bh))
    coupling = find_kernel("crbm_make_coupling", "cupy")(w)
    pairs = backend.asarray(np.zeros((v, h)), np.float32)
    name, more = ("sum_product_pairs", (pairs,)) if with_pairs else ("sum_product", ())
    run = backend.kernel(f"crbm_{name}")
    seconds = device_seconds(backend, lambda step: run(coupling, *device, sweeps, None, *more), args.repeats)
    edges = v * h * rows * sweeps / seconds
    from scalelatent.models.crbm.kernels import gpu

    kernel, _, kept = gpu._choose_kernel("sum_product", v, h)
    card = backend.xp.cuda.runtime.getDeviceProperties(backend.xp.cuda.runtime.getDevice())
    divisions = DIVISIONS_PER_CLOCK * card["multiProcessorCount"] * 1e3 * card["clockRate"]
    found = {
        "kernel": f"{kernel} and pairs" if with_pairs else kernel,
        "graph": f"{v} x {h}",
        "rows": rows,
        "sweeps": sweeps,
        "seconds": seconds,
        "edges_per_second": edges,
        "terabytes_per_second": edges * (4 if kept else 16) / 1e12,
        "share_of_divisions": edges / divisions,
        "paper's 50 epochs of MNIST, seconds": PAPER_EDGES / edges,
    }
    print(json.dumps(found), flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
