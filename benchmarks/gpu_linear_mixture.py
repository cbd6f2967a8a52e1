"""Check and measure mixtures of linear models on a GPU: kernels, a fit, then rates.

    python benchmarks/gpu_linear_mixture.py --out gpu_linear_mixture.json

Needs Python 3.12, CuPy, numpy, scipy, numba, this package on PYTHONPATH, and the packages that this package
imports; `benchmarks/gpu_all.sh wheels` downloads them for a machine without a network. The script downloads
nothing and changes no setting of the card. The exit code is 0 if all checks passed, 1 if a check failed or
a part raised an error (see the result), and 3 without a GPU, when no result is written.

The kernels are compared with the reference, and a fit with a fit on the processor. Rates are medians with
the rows on the card. The scan is compared with sgemm of the same rows and columns on the card, without
TF32. Images have 16 directions; one launch computes their products and sums, and the result also has the
bytes of the sums that are copied to the host. Passes have ten classes and blocks of the size that the
engine uses for a card; they include everything except reading.
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
    Part,
    card_device,
    card_stream,
    device_seconds,
    find_kernel,
    host_seconds,
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

CLASSES, DIMS, WIDTH = 10, 10, 16


def main() -> int:
    return run_script(script_parser(__doc__).parse_args(), card_stream, checks, measures)


def checks(_: CupyBackend, args: argparse.Namespace) -> Iterator[Part]:
    shapes = [(1, (3, 3), 1, 0), (40, (5, 6), 7, 3)] + ([] if args.quick else [(3000, (28, 28), 60, 12)])
    for shape in shapes:
        yield "checks", f"kernels, {shape[0]} rows", partial(check_kernels, *shape, args)
    yield "checks", "a fit beside that of a processor", partial(check_fit, args)


def measures(backend: CupyBackend, args: argparse.Namespace) -> Iterator[Part]:
    sizes = [(60, 16, 20)] if args.quick else [(65_536, p, k) for p in (256, 784) for k in (100, 500, 1000)]
    parts = {"scan": scan, "images": images, "passes": passes}
    for name, measure in parts.items():
        for size in sizes:
            call = partial(measure, backend, *size, args)
            yield name, f"{name}, {size[0]} rows, p = {size[1]}, K = {size[2]}", call


def kernel(name: str) -> Any:
    """Return a kernel of the card."""
    return find_kernel(f"linear_mixture_{name}", "cupy")


def made(k: int, p: int, h: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return random means and orthonormal bases."""
    rng = np.random.default_rng(seed)
    return rng.random((k, p)), np.linalg.qr(rng.normal(size=(k, p, h)))[0]


def line(name: str, worst: float, most: float) -> dict[str, Any]:
    """Return a line of the result, which passes if the difference is at most ``most``."""
    return {"name": name, "largest difference": worst, "passed": bool(worst <= most)}


def apart(found: Any, wanted: Any) -> float:
    """Return the largest difference, divided by the largest wanted value."""
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    return float(np.abs(found - wanted).max(initial=0.0) / max(np.abs(wanted).max(initial=0.0), 1e-12))


def check_kernels(
    n: int, shape: tuple[int, int], k: int, h: int, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Compare each kernel with the reference."""
    p, name = shape[0] * shape[1], f"{n} rows, {shape[0]} x {shape[1]}, K = {k}, h = {h}"
    rng = np.random.default_rng(args.seed)
    x, (means, bases) = rng.random((n, p), dtype=np.float32), made(k, p, h, args.seed)
    scores = reference.error_scores(means, bases, means.mean(axis=0))
    starts = np.array([0, k // 2, k])
    ours, theirs = kernel("make_scorer")(scores, starts), reference.make_scorer(scores, starts)
    wanted = reference.all_scores(theirs, x, 0, 2)
    yield line(f"scores, {name}", apart(kernel("all_scores")(ours, x, 0, 2), wanted), 1e-5)
    best, index = kernel("nearest")(ours, x, 1, 2)
    chosen = wanted[np.arange(n), index[:, 0]] - wanted[:, k // 2 :].min(axis=1)
    worst = float(chosen.max(initial=0.0)) / float(np.abs(wanted).max())
    yield line(f"best of a run, {name}", max(worst, apart(best[:, 0], wanted[:, k // 2 :].min(axis=1))), 1e-5)
    groups = group_rows(rng.integers(0, k, n), k, rng.random(n))
    wide, spec = np.linalg.qr(rng.normal(size=(k, p, min(8, p))))[0], TangentSpec(TANGENTS, shape, 0.6)
    q, factors, sums = wide.shape[2], rng.random((k, len(TANGENTS))), []
    for body in (kernel, lambda name: getattr(reference, name)):
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
        yield line(f"{what}, {name}", apart(found, want), 1e-4)


def check_fit(args: argparse.Namespace) -> dict[str, Any]:
    """Compare the objective of a short fit on the card and on a processor."""
    rng, (n, p) = np.random.default_rng(args.seed), (200, 20) if args.quick else (5000, 196)
    y = np.arange(n) % 2
    x = (rng.normal(size=(n, 4)) @ rng.normal(size=(4, p)) + 3.0 * y[:, None]).astype(np.float32)
    x /= np.abs(x).max()
    options: dict[str, Any] = {"n_components": 3, "n_dims": 3, "likelihood": "error", "max_iter": 3}
    reported = [
        sl.LinearMixtureClassifier(device=device, n_jobs=1, random_state=0, **options).fit(x, y).history_
        for device in ("cpu", card_device())
    ]
    return line(
        "a fit beside that of a processor",
        apart(reported[1][-1]["objective"], reported[0][-1]["objective"]),
        1e-3,
    )


def scan(backend: CupyBackend, n: int, p: int, k: int, args: argparse.Namespace) -> dict[str, Any]:
    """Measure the scan of all components, and sgemm."""
    xp, rng = backend.xp, np.random.default_rng(args.seed)
    x, columns = backend.asarray(rng.random((n, p)), np.float32), k * (DIMS + 1)
    scores = reference.error_scores(*made(k, p, DIMS, args.seed), np.full(p, 0.5))
    scorer, nearest = kernel("make_scorer")(scores, np.array([0, k])), kernel("nearest")
    w = backend.asarray(rng.random((columns, p)), np.float32)
    # The kernels compute products in tiles of this size.
    tile = max(min(n, 2**26 // columns), 1)
    seconds = device_seconds(backend, lambda step: nearest(scorer, x, 0, 1), args.repeats)
    product = device_seconds(backend, lambda step: xp.matmul(x[:tile], w.T), args.repeats)
    flops = 2.0 * p * columns
    found = {
        "p": p,
        "K": k,
        "columns": columns,
        "rows": n,
        "teraflops": n * flops / seconds / 1e12,
        "sgemm teraflops": tile * flops / product / 1e12,
        "share of sgemm": n * product / (tile * seconds),
    }
    print(json.dumps(found), flush=True)
    return found


def images(backend: CupyBackend, n: int, p: int, k: int, args: argparse.Namespace) -> dict[str, Any]:
    """Measure the images of rows in sub-classes of equal size."""
    rng = np.random.default_rng(args.seed)
    x, (means, bases) = backend.asarray(rng.random((n, p)), np.float32), made(k, p, min(WIDTH, p), args.seed)
    groups, q = group_rows(rng.integers(0, k, n), k), min(WIDTH, p)
    packed = kernel("pack_bases")(means, bases, False)
    shapes = (k, p), (k,), (k, q, p), (0, 0, 0), (0, 0)
    fields = [np.zeros(shape) for shape in shapes]

    def leaf() -> None:
        """Add up the sums of ten blocks, as for one leaf (range of rows)."""
        sums = kernel("open_sums")(*fields)
        for _ in range(10):
            kernel("add_scatter")(packed, x, groups, *tuple(sums)[:4])
        kernel("close_sums")(sums, *fields)

    seconds = host_seconds(leaf, args.repeats) / 10
    found = {
        "p": p,
        "K": k,
        "rows": n,
        "rows/s": n / seconds,
        "teraflops": 4.0 * n * p * q / seconds / 1e12,
        "megabytes back": 8 * k * (q + 2) * p / 1e6,
    }
    print(json.dumps(found), flush=True)
    return found


def passes(backend: CupyBackend, n: int, p: int, k: int, args: argparse.Namespace) -> dict[str, Any]:
    """Measure an E-step of ten classes, with the rows on the host."""
    rng = np.random.default_rng(args.seed)
    x, y = rng.random((n, p), dtype=np.float32), (np.arange(n) % CLASSES).astype(np.int32)
    mixture = MixtureSettings(p, np.repeat(np.arange(CLASSES), k // CLASSES), CLASSES)
    work = MixtureEM(mixture, min(DIMS, p - 1), min(WIDTH, p)).reductions()["train"]
    start = start_components(x[:k].astype(np.float64), min(WIDTH, p), 0).with_n_dims(min(DIMS, p - 1))
    state = initial_state(mixture, start, MAIN)

    def one() -> None:
        work.accumulate(work.prepare(state, backend), Block(x, y, None, 0), Stats.zeros(work.layout()))

    seconds = host_seconds(one, max(args.repeats // 2, 1))
    found = {"p": p, "K": k, "rows": n, "rows/s": n / seconds}
    print(json.dumps(found), flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
