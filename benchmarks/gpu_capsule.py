"""Check and measure the capsule model on a GPU: kernels, passes and fits against the reference, then rates.

    python benchmarks/gpu_capsule.py --out gpu_capsule.json

The docstring of gpu_common.py describes what the script needs, its result file and its exit codes.

The model has one capsule (short vector) per class. The reference is numpy code on the CPU. Rates are medians
over repeats, after a first run that compiles the kernels. Inputs are random and larger than the caches of the
GPU. A pass is one E-step over all blocks of rows; its time includes the copies of parameters and sums, as in
a fit, and is divided by the time of its two matrix products alone, of the same shapes and in the same run.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

# Rates of the CPU are those of one thread. BLAS reads these variables when numpy loads it.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import numpy as np
from gpu_common import (
    CLASSES,
    Task,
    TimedBackend,
    check_error,
    device_seconds,
    fit_state,
    host_seconds,
    make_blocks,
    make_gpu_backend,
    make_rows,
    relative_error,
    run_pass,
    run_pass_in_threads,
    run_script,
    scale_for_bytes,
    script_parser,
)

from scalelatent.engine.backend import CupyBackend, HostBackend
from scalelatent.models.capsule.kernels import reference
from scalelatent.models.capsule.kernels.squash import squash_table
from scalelatent.models.capsule.model.em import CapsulePass
from scalelatent.models.capsule.model.members import Members, build_members

CAPSULE_DIMS = (2, 4, 8, 16, 32)
SMALL_BLOCK = 2048  # number of rows of a block (one call of a kernel) on a CPU
# Largest allowed error of results on the GPU, divided by the largest true value, by the dtype of a kernel or
# the precision of matrix products. "threshold" is the limit for sums of the rows that pass the threshold nu:
# a wrong class has more than nu times the probability of the true class.
LIMITS = {"float64": 1e-9, "float32": 1e-5, "tf32": 1e-2, "threshold": 1e-3}
# Largest allowed number of rows that rounding to float32 moves to the other side of the threshold nu.
MAX_MOVED_ROWS = 3


def main() -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--rows", type=int, default=2**20)
    parser.add_argument("--features", type=int, default=196)
    parser.add_argument("--block-rows", type=int, default=2**16)
    args = parser.parse_args()
    if args.quick:
        args.rows, args.block_rows, args.repeats, args.features = 200, 128, 1, 24
    return run_script(args, Backends, list_checks, list_measurements)


def list_checks(backends: Backends, args: argparse.Namespace) -> Iterator[Task]:
    yield from check_kernels(backends, args)
    yield from check_passes(backends, args)
    yield from check_fits(backends, args)


def list_measurements(backends: Backends, args: argparse.Namespace) -> Iterator[Task]:
    yield "ceilings", "ceilings", partial(measure_upper_bounds, backends, args)
    data = make_rows(args.rows, args.features, args.seed)
    resident = backends.float32.asarray(data["float32"], np.float32)
    for capsule_dim in CAPSULE_DIMS[: 1 if args.quick else None]:
        for nu in (0.0, 0.8):
            call = partial(measure_passes, backends, data, resident, capsule_dim, nu, args)
            yield "passes", f"passes, d = {capsule_dim}, nu = {nu}", call


class Backends:
    """Engine backends (they call kernels on a device), created once because each keeps its GPU memory.

    Matrix products of ``float32`` and ``tf32`` have that precision; ``timed`` measures the kernels and copies
    of a pass; ``threads`` are four backends for passes with four threads.
    """

    def __init__(self) -> None:
        self.float32, self.tf32 = make_gpu_backend(), make_gpu_backend(tf32=True)
        if isinstance(self.float32, CupyBackend):
            self.timed, self.threads = TimedBackend(), [CupyBackend() for _ in range(4)]
        self.xp = self.float32.xp


def check_kernels(backends: Backends, args: argparse.Namespace) -> Iterator[Task]:
    """Yield checks of the kernels against the reference, for several sizes, dtypes and thresholds nu.

    The kernels compute residuals (posterior mean minus latent mean) and class probabilities. An ensemble has
    one member (model) for all classes, or one for each class. nu selects the rows that change the weights.
    """
    ensembles: list[tuple[str, int, Any]] = [("multiclass", 2, 1), ("multiclass", CLASSES, 2)]
    ensembles += [("multiclass", CLASSES, 32), ("multiclass", 4, [1, 9, 2, 5]), ("one_vs_all", CLASSES, 4)]
    sizes = (0, 1, 31, 128, 129, 1000, 20_011)[: 5 if args.quick else None]
    for (architecture, classes, dim), dtype, nu in product(
        ensembles[: 2 if args.quick else None], ("float32", "float64"), (0.0, 0.8)
    ):
        members = build_members(architecture, classes, dim)
        if dtype == "float64" and isinstance(backends.float32, HostBackend):
            continue  # The kernels of --kernels numba accept float32 only.
        name = f"kernels {architecture} {classes} classes d={dim} {dtype} nu={nu}"

        def call(name: str = name, members: Members = members, dtype: str = dtype, nu: float = nu) -> Any:
            rng = np.random.default_rng(args.seed)
            errors = [compare_kernels(backends.float32, members, dtype, nu, rows, rng) for rows in sizes]
            return check_error(name, max(errors, key=lambda e: np.inf if np.isnan(e) else e), LIMITS[dtype])

        yield "checks", name, call


def compare_kernels(
    backend: CupyBackend, members: Members, dtype: str, nu: float, rows: int, rng: np.random.Generator
) -> float:
    """Return the largest relative error of residuals, sums and probabilities of random latent means.

    The error is infinite if the bits of two runs differ, or if more than MAX_MOVED_ROWS rows are on the other
    side of the threshold nu on class probabilities, or have another predicted class.
    """
    h = (rng.normal(size=(members.total_dim, rows)) * np.exp(rng.normal(size=rows))).astype(dtype)
    h[:, : rows // 20] = 0.0
    y, weight = rng.integers(0, members.n_classes, rows).astype(np.int32), rng.gamma(1.0, size=rows)
    arguments = (y, weight, members.dims, members.labels, np.full(members.n_members, nu))
    table = backend.copy_table(squash_table(int(members.dims[0].sum())))
    want = h.astype(np.float64)
    want_active, want_sums = reference.residuals(want, *arguments)
    runs = []
    for _ in range(2):
        device = backend.xp.asarray(h.copy())
        active, sums = backend.kernel("capsule_residuals")(device, *arguments, table)
        host = np.arange(rows) if active is None else backend.to_host(active)
        runs.append((backend.to_host(device)[:, : len(host)], sums, host))
    got, sums, active = runs[0]
    if any(one.tobytes() != two.tobytes() for one, two in zip(*runs, strict=True)):
        return np.inf
    want_active = np.arange(rows) if want_active is None else want_active
    both, at, want_at = np.intersect1d(active, want_active, return_indices=True)
    if len(active) + len(want_active) - 2 * len(both) > MAX_MOVED_ROWS:
        return np.inf
    if np.abs(sums[:, 1] - want_sums[:, 1]).max() > MAX_MOVED_ROWS * weight.max(initial=0.0):
        return np.inf
    first = h[: members.dims[0].sum()]
    p = backend.to_host(
        backend.kernel("capsule_probabilities")(backend.xp.asarray(first.copy()), members.dims[0], table)
    )
    return max(
        relative_error(got[:, at], want[:, want_at]),
        relative_error(sums[:, 0], want_sums[:, 0]),
        relative_error(p, reference.probabilities(first, members.dims[0])),
    )


def check_passes(backends: Backends, args: argparse.Namespace) -> Iterator[Task]:
    """Yield checks of the sums of a pass (E-step over all rows) against float64 on the CPU.

    The checks differ in the model, in the dtype of rows, and in the threshold nu that selects rows.
    """
    data = make_rows(min(args.rows, 20_000), args.features, args.seed + 1)
    for architecture in ("multiclass", "all_vs_all", "one_vs_all")[: 2 if args.quick else None]:
        members = build_members(architecture, CLASSES, 4)
        fitted = fit_state(members, data, 3, HostBackend())
        for nu, stored in product((0.0, 0.8), ("float32", "uint8")):
            call = partial(compare_pass, backends, members, fitted, data, stored, nu, args)
            yield "checks", f"pass {architecture} {stored} nu={nu}", call


def compare_pass(
    backends: Backends,
    members: Members,
    fitted: Any,
    data: dict[str, np.ndarray],
    stored: str,
    nu: float,
    args: argparse.Namespace,
) -> Iterator[dict[str, Any]]:
    """Compare the sums of a pass whose products are in float32 or TF32 with sums in float64 on the CPU."""
    state = fitted if stored == "float32" else scale_for_bytes(fitted)
    reduction = CapsulePass(members, args.features, np.array([nu]), None, train=True)
    rows = data[stored], data["y"]
    want = run_pass(reduction, state, HostBackend("reference"), make_blocks(*rows, SMALL_BLOCK))
    for kind, backend in (("float32", backends.float32), ("tf32", backends.tf32)):
        got = run_pass(reduction, state, backend, make_blocks(*rows, args.block_rows))
        limit = max(LIMITS[kind], LIMITS["threshold"] if nu else 0.0)
        name = f"pass {members.architecture} {stored} nu={nu} products in {kind}"
        yield check_error(name, relative_error(got["delta"], want["delta"]), limit)


def check_fits(backends: Backends, args: argparse.Namespace) -> Iterator[Task]:
    """Yield checks that weights and log-loss after a few EM steps are nearly the same on GPU and CPU."""
    data = make_rows(min(args.rows, 20_000), args.features, args.seed + 2)
    for architecture in ("multiclass", "one_vs_all", "all_vs_all")[: 1 if args.quick else None]:
        members = build_members(architecture, CLASSES, 2)

        def call(architecture: str = architecture, members: Members = members) -> Iterator[dict[str, Any]]:
            passes = 3 if args.quick else 10
            host, gpu = (fit_state(members, data, passes, b) for b in (HostBackend(), backends.float32))
            yield check_error(f"fit {architecture}: weights", relative_error(gpu.w, host.w), 1e-3)
            yield check_error(
                f"fit {architecture}: log-loss", relative_error(gpu.objective, host.objective), 1e-4
            )

        yield "checks", f"fit {architecture}", call


def measure_upper_bounds(backends: Backends, args: argparse.Namespace) -> dict[str, float]:
    """Return rates that limit a pass over rows: of copies on the GPU and to it, and of matrix products."""
    cupy, out = backends.float32.xp, {}
    source = cupy.zeros(2**16 if args.quick else 2**28, dtype=np.float32)
    source.fill(1.5)
    target = cupy.empty(source.shape, dtype=np.float32)

    def copy(_: int) -> None:
        target[...] = source

    out["copy_bytes_per_second"] = 2 * source.nbytes / device_seconds(backends.float32, copy, args.repeats)
    rows = np.ones((source.size // 1024, 256), dtype=np.float32)
    seconds = host_seconds(
        lambda: backends.float32.to_host(backends.float32.asarray(rows, np.float32, "x")[:1]), args.repeats
    )
    # The time includes the copy of the rows into page-locked memory.
    out["upload_bytes_per_second"] = rows.nbytes / seconds
    side = 64 if args.quick else 8192
    square = cupy.asarray(np.random.default_rng(args.seed).normal(size=(side, side)).astype(np.float32))
    for name, backend in (("sgemm", backends.float32), ("tf32", backends.tf32)):
        seconds = device_seconds(
            backend, lambda _, b=backend: b.matmul(square, square, "square"), args.repeats
        )
        out[f"{name}_flop_per_second"] = 2 * side**3 / seconds
    return out


def measure_passes(
    backends: Backends,
    data: dict[str, np.ndarray],
    resident: Any,
    capsule_dim: int,
    nu: float,
    args: argparse.Namespace,
) -> Iterator[dict[str, Any]]:
    """Measure passes (E-steps over all rows) on the GPU and on the CPU.

    A class has a vector (capsule) of ``capsule_dim`` numbers. A row counts in the M-step if a wrong class has
    more than ``nu`` times the probability of the true class.
    """
    members = build_members("multiclass", CLASSES, capsule_dim)
    few = {key: a[: min(len(a), 20_000)] for key, a in data.items()}
    state = fit_state(members, few, 10, backends.float32)
    sources = {
        "device float32": (resident, state),
        "host float32": (data["float32"], state),
        "host uint8": (data["uint8"], scale_for_bytes(state)),
    }
    sizes = sorted({min(SMALL_BLOCK, args.block_rows), args.block_rows})
    alone = {size: measure_products(backends, resident, state.w, size, args.repeats) for size in sizes}
    reduction = CapsulePass(members, args.features, np.array([nu]), None, train=True)
    blocks = make_blocks(few["float32"], few["y"], SMALL_BLOCK)
    host = HostBackend()
    one_thread = host_seconds(lambda b=blocks, r=reduction, h=host: run_pass(r, state, h, b), 3)
    for (source, (x, weights)), size in product(sources.items(), sizes):
        blocks = make_blocks(x, data["y"], size)
        call = partial(run_pass, reduction, weights, backends.float32, blocks)
        seconds = host_seconds(call, args.repeats)
        run_pass(reduction, weights, backends.timed, blocks)
        backends.timed.discard_events()
        stats = run_pass(reduction, weights, backends.timed, blocks)
        line: dict[str, Any] = {"total_dim": members.total_dim, "nu": nu, "rows": source, "block_rows": size}
        line |= {
            "seconds": seconds,
            "rows_per_second": len(x) / seconds,
            "device_split": backends.timed.step_seconds(),
        }
        line["active_share"] = float(stats["sums"][0, 2]) / len(x)
        line |= alone[size]
        for kind in ("sgemm", "tf32"):
            line[f"pass_over_{kind}"] = seconds * alone[size][f"{kind}_rows_per_second"] / len(x)
        if source.startswith("host"):
            call = partial(run_pass_in_threads, reduction, weights, backends.threads, blocks)
            line["rows_per_second_4_threads"] = len(x) / host_seconds(call, args.repeats)
        line["processor_rows_per_second_one_thread"] = len(few["y"]) / one_thread
        print_pass(line)
        yield line


def measure_products(
    backends: Backends, x: Any, w: np.ndarray, block_rows: int, repeats: int
) -> dict[str, float]:
    """Measure H = W X^T and then H X for weights W and a block of rows X on the GPU, in float32 and TF32."""
    out: dict[str, float] = {}
    starts = range(0, len(x) - block_rows + 1, block_rows)
    for kind, backend in (("sgemm", backends.float32), ("tf32", backends.tf32)):
        weights = backend.asarray(w, np.float32)

        def both(step: int, backend: CupyBackend = backend, weights: Any = weights) -> None:
            first = starts[step % len(starts)]
            rows = x[first : first + block_rows]
            backend.matmul(backend.matmul(weights, rows.T, "h"), rows, "delta")

        seconds = device_seconds(backend, both, max(repeats, min(len(starts), 100)))
        out[f"{kind}_rows_per_second"] = block_rows / seconds
        out[f"{kind}_flop_per_second"] = 4.0 * w.size * block_rows / seconds
    return out


def print_pass(line: dict[str, Any]) -> None:
    print(
        f"D {line['total_dim']:4d}  nu {line['nu']:.1f}  active {line['active_share']:4.2f}"
        f"  {line['rows']:14s} blocks {line['block_rows']:6d}"
        f" {line['rows_per_second'] / 1e6:9.2f} M rows/s  pass/sgemm {line['pass_over_sgemm']:6.2f}"
        f"  pass/tf32 {line['pass_over_tf32']:6.2f}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
