"""Check and measure mixtures of linear models on a GPU: kernels, a fit, then rates.

    python benchmarks/gpu_linear_mixture.py --out gpu_linear_mixture.json

The docstring of gpu_common.py describes what the script needs, its result file and its exit codes.

Kernels are compared with the numpy reference, and a fit with the same fit on the CPU. Rates are medians:

- "scan" finds the best component of each row. Its rate is compared with that of sgemm, the float32 matrix
  product, of the same sizes and without TF32. The rows are on the GPU.
- "projections" adds up products of rows and their projections to 16 directions per component. The rows are on
  the GPU; the sums of ten blocks are copied to the host together, and the result states their megabytes.
- "passes" are E-steps of ten classes, with the engine's block size for GPUs. Their time includes everything
  except reading the rows.
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
    host_seconds,
    make_current_backend,
    relative_error,
    run_script,
    script_parser,
)

import scalelatent as sl
from scalelatent.contract.learners import Block
from scalelatent.contract.stats import Stats
from scalelatent.engine.backend import CupyBackend
from scalelatent.models.linear_mixture.kernels import reference
from scalelatent.models.linear_mixture.kernels.reference import TANGENTS, TangentSpec, group_rows
from scalelatent.models.linear_mixture.model.e_step import MAIN, MixtureSettings, initial_state
from scalelatent.models.linear_mixture.model.em import MixtureEM
from scalelatent.models.linear_mixture.model.start import start_components

# Numbers of classes, of latent dimensions of a component, and of directions that an E-step projects rows to.
CLASSES, DIMS, DIRECTIONS = 10, 10, 16


def main() -> int:
    return run_script(
        script_parser(__doc__).parse_args(), make_current_backend, list_checks, list_measurements
    )


def list_checks(_: CupyBackend, args: argparse.Namespace) -> Iterator[Task]:
    shapes = [(1, (3, 3), 1, 0), (40, (5, 6), 7, 3)] + ([] if args.quick else [(3000, (28, 28), 60, 12)])
    for shape in shapes:
        yield "checks", f"kernels, {shape[0]} rows", partial(check_kernels, *shape, args)
    yield "checks", "a fit compared with the processor's", partial(check_fit, args)


def list_measurements(backend: CupyBackend, args: argparse.Namespace) -> Iterator[Task]:
    sizes = [(60, 16, 20)] if args.quick else [(65_536, p, k) for p in (256, 784) for k in (100, 500, 1000)]
    parts = {"scan": measure_scan, "projections": measure_projections, "passes": measure_passes}
    for name, measure in parts.items():
        for size in sizes:
            call = partial(measure, backend, *size, args)
            yield name, f"{name}, {size[0]} rows, p = {size[1]}, K = {size[2]}", call


def find_gpu_kernel(name: str) -> Any:
    """Return a kernel of this model on the GPU by the end of its name, such as "nearest"."""
    return find_kernel(f"linear_mixture_{name}", "cupy")


def draw_components(k: int, p: int, h: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return random means (k, p) and orthonormal bases (k, p, h) of k components."""
    rng = np.random.default_rng(seed)
    return rng.random((k, p)), np.linalg.qr(rng.normal(size=(k, p, h)))[0]


def check_kernels(
    n: int, shape: tuple[int, int], k: int, h: int, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Compare each kernel with the reference for n images, k components and h latent dimensions."""
    p, name = shape[0] * shape[1], f"{n} rows, {shape[0]} x {shape[1]}, K = {k}, h = {h}"
    rng = np.random.default_rng(args.seed)
    x, (means, bases) = rng.random((n, p), dtype=np.float32), draw_components(k, p, h, args.seed)
    scores = reference.error_scores(means, bases, means.mean(axis=0))
    starts = np.array([0, k // 2, k])
    ours, theirs = find_gpu_kernel("make_scorer")(scores, starts), reference.make_scorer(scores, starts)
    wanted = reference.all_scores(theirs, x, 0, 2)
    found = find_gpu_kernel("all_scores")(ours, x, 0, 2)
    yield check_error(f"scores, {name}", relative_error(found, wanted), 1e-5)
    best, index = find_gpu_kernel("nearest")(ours, x, 1, 2)
    chosen = wanted[np.arange(n), index[:, 0]] - wanted[:, k // 2 :].min(axis=1)
    worst = float(chosen.max(initial=0.0)) / float(np.abs(wanted).max())
    worst = max(worst, relative_error(best[:, 0], wanted[:, k // 2 :].min(axis=1)))
    yield check_error(f"best of a run, {name}", worst, 1e-5)
    groups = group_rows(rng.integers(0, k, n), k, rng.random(n))
    wide, spec = np.linalg.qr(rng.normal(size=(k, p, min(8, p))))[0], TangentSpec(TANGENTS, shape, 0.6)
    q, factors, sums = wide.shape[2], rng.random((k, len(TANGENTS))), []
    for body in (find_gpu_kernel, lambda name: getattr(reference, name)):
        shapes = (k, p), (k,), (k, q, p), (k, q, q), (k, len(TANGENTS))
        fields, tangent = [np.zeros(shape) for shape in shapes], np.zeros((k, q, p))
        leaf = body("open_sums")(*fields)
        packed = body("pack_bases")(means, wide, False)
        body("add_scatter")(packed, x, groups, *tuple(leaf)[:4])
        body("close_sums")(leaf, *fields)
        alone = [np.zeros_like(field) for field in fields[:2]] + [tangent, np.zeros((0, 0, 0)), fields[4]]
        leaf = body("open_sums")(*alone)
        still = body("pack_bases")(np.zeros((k, p)), wide, False)
        body("add_tangent_scatter")(still, x, groups, spec, factors, *(tuple(leaf)[i] for i in (2, 4)))
        body("close_sums")(leaf, *alone)
        tangent_scores, tangents = (
            body("pack_tangent_scores")(scores),
            body("tangent_rows")(x, shape, TANGENTS[:6], 0.6),
        )
        candidates = np.tile(np.arange(min(k, 3), dtype=np.int32), (n, 1))
        far = body("tangent_distance")(tangent_scores, x, tangents, candidates)
        sums.append([*fields[:4], tangent, fields[4], tangents, far])
    names = "sums, squares, images, grams, images of tangents, their squares, tangents"
    for what, found, want in zip([*names.split(", "), "tangent distances"], *sums, strict=True):
        yield check_error(f"{what}, {name}", relative_error(found, want), 1e-4)


def check_fit(args: argparse.Namespace) -> dict[str, Any]:
    """Compare the objective of a short fit on the GPU with that of the same fit on the CPU."""
    rng, (n, p) = np.random.default_rng(args.seed), (200, 20) if args.quick else (5000, 196)
    y = np.arange(n) % 2
    x = (rng.normal(size=(n, 4)) @ rng.normal(size=(4, p)) + 3.0 * y[:, None]).astype(np.float32)
    x /= np.abs(x).max()
    options: dict[str, Any] = {"n_components": 3, "n_dims": 3, "likelihood": "error", "max_iter": 3}
    reported = [
        sl.LinearMixtureClassifier(device=device, n_jobs=1, random_state=0, **options).fit(x, y).history_
        for device in ("cpu", choose_device())
    ]
    error = relative_error(reported[1][-1]["objective"], reported[0][-1]["objective"])
    return check_error("a fit compared with the processor's", error, 1e-3)


def measure_scan(backend: CupyBackend, n: int, p: int, k: int, args: argparse.Namespace) -> dict[str, Any]:
    """Measure finding the best of k components of n rows of p features, and sgemm of the same sizes."""
    xp, rng = backend.xp, np.random.default_rng(args.seed)
    x, columns = backend.asarray(rng.random((n, p)), np.float32), k * (DIMS + 1)
    scores = reference.error_scores(*draw_components(k, p, DIMS, args.seed), np.full(p, 0.5))
    scorer, nearest = find_gpu_kernel("make_scorer")(scores, np.array([0, k])), find_gpu_kernel("nearest")
    w = backend.asarray(rng.random((columns, p)), np.float32)
    # The kernels score this number of rows at a time, so that at most 2^26 scores are in memory.
    tile_rows = max(min(n, 2**26 // columns), 1)
    seconds = device_seconds(backend, lambda step: nearest(scorer, x, 0, 1), args.repeats)
    product = device_seconds(backend, lambda step: xp.matmul(x[:tile_rows], w.T), args.repeats)
    flops = 2.0 * p * columns
    found = {
        "features": p,
        "components": k,
        "columns": columns,
        "rows": n,
        "teraflops": n * flops / seconds / 1e12,
        "sgemm_teraflops": tile_rows * flops / product / 1e12,
        "share_of_sgemm": n * product / (tile_rows * seconds),
    }
    print(json.dumps(found), flush=True)
    return found


def measure_projections(
    backend: CupyBackend, n: int, p: int, k: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Measure sums of products of n rows and their projections to directions of k components."""
    rng = np.random.default_rng(args.seed)
    x, (means, bases) = (
        backend.asarray(rng.random((n, p)), np.float32),
        draw_components(k, p, min(DIRECTIONS, p), args.seed),
    )
    groups, q = group_rows(rng.integers(0, k, n), k), min(DIRECTIONS, p)
    packed = find_gpu_kernel("pack_bases")(means, bases, False)
    shapes = (k, p), (k,), (k, q, p), (0, 0, 0), (0, 0)
    fields = [np.zeros(shape) for shape in shapes]

    def sum_leaf() -> None:
        """Compute the sums of one leaf (range of rows), which has ten blocks."""
        sums = find_gpu_kernel("open_sums")(*fields)
        for _ in range(10):
            find_gpu_kernel("add_scatter")(packed, x, groups, *tuple(sums)[:4])
        find_gpu_kernel("close_sums")(sums, *fields)

    seconds = host_seconds(sum_leaf, args.repeats) / 10
    found = {
        "features": p,
        "components": k,
        "rows": n,
        "rows_per_second": n / seconds,
        "teraflops": 4.0 * n * p * q / seconds / 1e12,
        "megabytes_to_host": 8 * k * (q + 2) * p / 1e6,
    }
    print(json.dumps(found), flush=True)
    return found


def measure_passes(backend: CupyBackend, n: int, p: int, k: int, args: argparse.Namespace) -> dict[str, Any]:
    """Measure an E-step of ten classes, with the rows on the host."""
    rng = np.random.default_rng(args.seed)
    x, y = rng.random((n, p), dtype=np.float32), (np.arange(n) % CLASSES).astype(np.int32)
    mixture = MixtureSettings(p, np.repeat(np.arange(CLASSES), k // CLASSES), CLASSES)
    work = MixtureEM(mixture, min(DIMS, p - 1), min(DIRECTIONS, p)).reductions()["train"]
    start = start_components(x[:k].astype(np.float64), min(DIRECTIONS, p), 0).with_n_dims(min(DIMS, p - 1))
    state = initial_state(mixture, start, MAIN)

    def run_once() -> None:
        work.accumulate(work.prepare(state, backend), Block(x, y, None, 0), Stats.zeros(work.layout()))

    seconds = host_seconds(run_once, max(args.repeats // 2, 1))
    found = {"features": p, "components": k, "rows": n, "rows_per_second": n / seconds}
    print(json.dumps(found), flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
