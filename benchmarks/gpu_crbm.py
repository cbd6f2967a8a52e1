"""Conditional RBMs on a GPU, all of it in one go: beliefs against the reference, then
rates.

    python benchmarks/gpu_crbm.py --out gpu_crbm.json

On the machine: CuPy, numpy, scipy, numba and this package on PYTHONPATH; nothing is downloaded, no setting of
the card is touched. Exit code 0: all checks passed; 1: the checks named in the result failed; 3: no GPU here,
and no result is written.

Rates are medians with the biases on the card. Beside each rate: the bytes that its sweeps move between the
multiprocessors and the second-level cache or memory (16 an edge), as bytes a second, and the seconds that the
paper's 50 epochs on MNIST would take at it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from gpu_common import device_seconds, machine

from scalelatent.engine.backend import find_kernel
from scalelatent.engine.device import CupyBackend
from scalelatent.errors import RunError
from scalelatent.models.crbm import reference
from scalelatent.models.crbm.reference import sigmoid

METHODS = ("sum_product", "mixed_product", "max_product", "mean_field")
PAPER_EDGES = 784 * 256 * 50_000 * sum(7 + epoch for epoch in range(1, 51))
BYTES_AN_EDGE = 16


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the result, JSON")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it runs")
    args = parser.parse_args()
    try:
        backend = CupyBackend()
    except RunError as error:
        print(f"no GPU checks were made: {error}", file=sys.stderr)
        return 3
    backend.stream.use()
    begin = time.perf_counter()
    result: dict[str, Any] = {"machine": machine(backend.xp)}
    result["settings"] = {key: value for key, value in vars(args).items() if key != "out"}
    result["checks"] = check_all(backend, args)
    failed = [check["name"] for check in result["checks"] if not check["passed"]]
    print(f"{len(result['checks'])} checks, {len(failed)} failed {failed or ''}", flush=True)
    shapes = (
        [(20, 10, 5)]
        if args.quick
        else [(784, 256, 20), (784, 256, 160), (784, 256, 1280), (10_000, 2000, 4)]
    )
    result["rates"] = [rate(backend, *shape, pairs, args) for shape in shapes for pairs in (False, True)]
    result["seconds"] = time.perf_counter() - begin
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{args.out}: {result['seconds']:.0f} s")
    return 1 if failed else 0


def draw(v: int, h: int, rows: int, scale: float, seed: int) -> tuple[np.ndarray, ...]:
    """W, bv, bh in float32."""
    rng = np.random.default_rng(seed)
    parts = rng.normal(size=(v, h)) * scale, rng.normal(size=(rows, v)), rng.normal(size=(rows, h))
    return tuple(part.astype(np.float32) for part in parts)


def check_all(backend: CupyBackend, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Beliefs, pairs and log Z of the card against the reference, and the same bits twice and in parts."""
    out = []
    shapes = [(1, 1, 1.0), (7, 3, 3.0), (40, 70, 0.3)] + (
        [] if args.quick else [(784, 256, 0.1), (33, 2000, 0.05)]
    )
    for v, h, scale in shapes:
        w, bv, bh = draw(v, h, 6, scale, args.seed)
        device = tuple(backend.asarray(b, np.float32) for b in (bv, bh))
        make = {name: find_kernel("crbm_make_coupling", name)(w) for name in ("cupy", "reference")}
        for method in METHODS:
            found = backend.kernel(f"crbm_{method}")(make["cupy"], *device, 8, None)
            want = getattr(reference, method)(make["reference"], bv, bh, 8)
            again = backend.kernel(f"crbm_{method}")(make["cupy"], *(b[2:5] for b in device), 8, None)
            worst = float(np.abs(sigmoid(backend.to_host(found.lv)) - sigmoid(want.lv)).max())
            same = bool((backend.to_host(found.lv)[2:5] == backend.to_host(again.lv)).all())
            out.append(line(f"{method} {v} x {h}", worst, 1e-5 if method != "max_product" else 1e-4))
            out.append({"name": f"{method} {v} x {h}, a part of the batch", "passed": same})
        pairs, wanted = backend.asarray(np.zeros((v, h)), np.float32), np.zeros((v, h))
        found = backend.kernel("crbm_sum_product_pairs")(make["cupy"], *device, 8, None, pairs)
        want = reference.sum_product_pairs(make["reference"], bv, bh, 8, None, wanted)
        out.append(line(f"pairs {v} x {h}", float(np.abs(backend.to_host(pairs) - wanted).max()), 1e-4))
        worst = float(np.abs(backend.to_host(found.log_z) / want.log_z - 1).max())
        out.append(line(f"Bethe {v} x {h}", worst, 1e-4))
    return out


def line(name: str, worst: float, most: float) -> dict[str, Any]:
    """A line of the result."""
    return {"name": name, "largest difference": worst, "passed": bool(worst <= most)}


def rate(
    backend: CupyBackend, v: int, h: int, rows: int, with_pairs: bool, args: argparse.Namespace
) -> dict[str, Any]:
    """Edge updates a second."""
    sweeps = 20
    w, bv, bh = draw(v, h, rows, 0.1 if v < 1000 else 0.01, args.seed)
    device = tuple(backend.asarray(b, np.float32) for b in (bv, bh))
    coupling = find_kernel("crbm_make_coupling", "cupy")(w)
    pairs = backend.asarray(np.zeros((v, h)), np.float32)
    name, more = ("sum_product_pairs", (pairs,)) if with_pairs else ("sum_product", ())
    run = backend.kernel(f"crbm_{name}")
    seconds = device_seconds(backend, lambda step: run(coupling, *device, sweeps, None, *more), args.repeats)
    edges = v * h * rows * sweeps / seconds
    found = {
        "kernel": name,
        "graph": f"{v} x {h}",
        "rows": rows,
        "sweeps": sweeps,
        "seconds": seconds,
        "edges_per_second": edges,
        "terabytes_per_second": edges * BYTES_AN_EDGE / 1e12,
        "paper's 50 epochs of MNIST, seconds": PAPER_EDGES / edges,
    }
    print(json.dumps(found), flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
