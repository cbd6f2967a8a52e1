"""Run one part of gpu_check.py as a process: preflight, compile, cases, streams or bits.

    python benchmarks/gpu_cases.py cases

`preflight` describes the machine, and imports and compiles everything. `compile` compiles kernels. `cases`
launches every kernel on small inputs, and compares the results with the reference (numpy code on the CPU).
`streams` tests that kernels wait for copies of their inputs. `bits` writes digests (hashes) of results.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gpu_parts import HERE, MODELS, append_line

# Name of a small test case, results on the GPU, expected results, and the largest allowed difference.
Case = tuple[str, list[Any], list[Any], float]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("part", choices=("preflight", "compile", "cases", "streams", "bits"))
    parser.add_argument("--lines", type=Path, help="append results to this file of JSON lines")
    parser.add_argument("--env", type=Path, help="file for the description of the machine by preflight")
    parser.add_argument("--bits", type=Path, help="file for the digests of results by bits")
    parser.add_argument("--model", choices=MODELS, help="model to compile; all models by default")
    parser.add_argument("--quick", action="store_true", help="smaller inputs and fewer runs")
    parser.add_argument("--few", action="store_true", help="fewer inputs, each kernel at least once")
    parser.add_argument(
        "--no-pool", action="store_true", help="allocate each array by CUDA itself, for compute-sanitizer"
    )
    args = parser.parse_args()
    try:
        import cupy

        cupy.cuda.runtime.getDeviceProperties(0)
    except Exception as error:  # noqa: BLE001  there is no CuPy, no driver or no device
        print(f"no GPU: {error}", file=sys.stderr)
        return 3
    if args.no_pool:
        # CUDA then allocates each array by itself, so that compute-sanitizer detects reads beyond its end.
        cupy.cuda.set_allocator(None)
    return {
        "preflight": preflight,
        "compile": compile_model,
        "cases": check_cases,
        "streams": check_streams,
        "bits": write_digests,
    }[args.part](args)


def record(args: argparse.Namespace, name: str, passed: bool, **more: Any) -> bool:
    """Print the result of a check, and append it to the file ``--lines``; return whether it passed."""
    line = {"name": name, "passed": bool(passed), **more}
    print(json.dumps(line), flush=True)
    if args.lines:
        append_line(args.lines, line)
    return bool(passed)


def preflight(args: argparse.Namespace) -> int:
    """Describe the machine, import and compile everything, and launch one kernel in thread-block clusters."""
    import cupy

    begin = time.perf_counter()
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False)
        cards = (done.stdout or done.stderr).strip().splitlines()
    except (OSError, subprocess.TimeoutExpired) as error:
        cards = [f"nvidia-smi: {error}"]
    # The results shall not contain the unique identifier of a GPU.
    environment: dict[str, Any] = {"nvidia-smi -L": [card.split(" (UUID")[0] for card in cards]}
    from gpu_common import describe_gpu

    environment |= describe_gpu(cupy)
    failed = import_everything()
    environment["packages"] = read_package_versions()
    if args.env:
        args.env.write_text(json.dumps(environment, indent=1) + "\n", encoding="utf-8")
    passed = record(args, "imports", not failed, failed=failed, seconds=time.perf_counter() - begin)
    passed &= compile_all(args)
    passed &= launch_cluster(args)
    return 0 if passed else 1


def import_everything() -> list[str]:
    """Import the modules that fits and tests need; return the error of each import that fails."""
    import importlib

    failed = []
    names = ["distributed", "sklearn", "zarr"]
    names += ["scalelatent.engine.dask.executor", "scalelatent.jobs.runfolder"]
    for model in MODELS:
        names += [f"scalelatent.models.{model}", f"scalelatent.models.{model}.estimator"]
        names += [f"scalelatent.models.{model}.kernels.gpu"]
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001  the error is recorded
            failed.append(f"{name}: {type(error).__name__}: {error}")
    return failed


def read_package_versions() -> dict[str, str]:
    """Return the version of each installed package that may change results or speed."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("cupy-cuda13x", "cupy-cuda12x", "dask", "distributed", "zarr", "numcodecs", "scikit-learn"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def compile_all(args: argparse.Namespace) -> bool:
    """Compile the kernels of all models at the same time, with one process per model."""
    here = sys.argv[0]
    # If this process uses the CuPy stand-in, gpu_emulated.py has to start the other processes with it too.
    stand_in = [str(HERE / "gpu_emulated.py")] if "fake_cupy" in sys.modules else []

    def run(model: str) -> tuple[str, subprocess.CompletedProcess[str], float]:
        begin = time.perf_counter()
        command = [sys.executable, *stand_in, str(HERE / Path(here).name), "compile", "--model", model]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        return model, done, time.perf_counter() - begin

    passed = True
    with concurrent.futures.ThreadPoolExecutor(len(MODELS)) as pool:
        for model, done, seconds in pool.map(run, MODELS):
            error = {} if done.returncode == 0 else {"error": done.stderr.splitlines()[-10:]}
            passed &= record(args, f"compile {model}", done.returncode == 0, seconds=seconds, **error)
    return passed


def compile_model(args: argparse.Namespace) -> int:
    """Compile the kernels of ``--model``, or of all models, into the cache that all processes share."""
    if args.model is None:
        return 0 if compile_all(args) else 1
    if "fake_cupy" in sys.modules:
        sys.modules["fake_cupy"].RawModule.library.compile(args.model)
        return 0
    from scalelatent.kernels.cuda import Kernels

    Kernels(f"scalelatent.models.{args.model}.kernels")._module.compile()
    return 0


def launch_cluster(args: argparse.Namespace) -> bool:
    """Launch one kernel in clusters of thread blocks, and compare its beliefs with the reference."""
    from scalelatent.models.crbm.kernels import gpu, reference

    v = h = 128  # Numbers of visible and hidden units of the smallest graph that uses a cluster.
    w, bv, bh = draw_graph(v, h, 2, 0.1)
    found = gpu.sum_product(gpu.make_coupling(w), gpu.cupy.asarray(bv), gpu.cupy.asarray(bh), 4)
    want = reference.sum_product(reference.make_coupling(w), bv, bh, 4)
    kernel = gpu._choose_kernel("sum_product", v, h)[0]
    worst = float(np.abs(reference.sigmoid(found.lv.get()) - reference.sigmoid(want.lv)).max())
    return record(args, f"one launch of {kernel}", worst <= 1e-5, difference=worst)


def check_cases(args: argparse.Namespace) -> int:
    """Compare every kernel with the reference on small inputs.

    If the cases of a model raise an exception, the exception is recorded, and the next model's cases run.
    """
    passed = True
    for model, make in CASES.items():
        begin, count, wrong = time.perf_counter(), 0, []
        try:
            for name, found, want, limit in make(args.few):
                count += 1
                worst = max(compute_difference(a, b) for a, b in zip(found, want, strict=True))
                if not worst <= limit:
                    wrong.append(f"{name}: {worst:.3g} > {limit:g}")
        except Exception as error:  # noqa: BLE001  the error is recorded; other models continue
            from gpu_common import print_traceback

            wrong.append(print_traceback(error))
        seconds = round(time.perf_counter() - begin, 2)
        passed &= record(args, f"cases of {model}", not wrong, cases=count, wrong=wrong, seconds=seconds)
    return 0 if passed else 1


def compute_difference(found: Any, want: Any) -> float:
    """Return the largest difference over max(largest wanted value, 1); infinite for NaN or unequal shapes."""
    found, want = np.asarray(found, np.float64), np.asarray(want, np.float64)
    if found.shape != want.shape:
        return float("inf")
    if not found.size:
        return 0.0
    worst = float(np.abs(found - want).max())
    return float("inf") if np.isnan(worst) else worst / max(float(np.abs(want).max()), 1.0)


def make_capsule_cases(few: bool) -> Iterator[Case]:
    """Yield cases of the capsule model: residuals (posterior mean minus latent mean), probabilities.

    The threshold nu selects rows for which a wrong class has more than nu times the true class's probability.
    """
    from scalelatent.models.capsule.kernels import gpu, reference
    from scalelatent.models.capsule.kernels.squash import squash_table
    from scalelatent.models.capsule.model.members import build_members

    rng = np.random.default_rng(0)
    ensembles = [("multiclass", 4, [1, 9, 2, 5]), ("one_vs_all", 5, 3)]
    for dtype, limit in (("float32", 3e-6), ("float64", 1e-9)):
        for ensemble in ensembles[: 1 if few else None]:
            members = build_members(*ensemble)
            n, m = 300, members.n_members
            h = (rng.normal(size=(members.total_dim, n)) * np.exp(rng.normal(size=n))).astype(dtype)
            y, weight = rng.integers(0, members.n_classes, n).astype("i4"), rng.gamma(1.0, size=n)
            table = squash_table(int(members.dims[0].sum()))
            for nu in (0.0, 0.8):
                rest = y, weight, members.dims, members.labels, np.full(m, nu)
                wanted = h.astype("f8")
                active, sums = reference.residuals(wanted, *rest)
                device = gpu.cupy.asarray(h.copy())
                chosen, reported = gpu.residuals(device, *rest, table)
                name = f"residuals of {ensemble[0]}, {dtype}, nu = {nu}"
                rows = np.arange(n) if active is None else active
                ours = np.arange(n) if chosen is None else chosen.get()
                # Rounding to float32 may move up to three rows to the other side of the threshold nu.
                if len(np.setxor1d(rows, ours)) > (3 if dtype == "float32" else 0):
                    yield f"{name}: active rows", [ours], [rows], 0.0
                    continue
                _, at, want_at = np.intersect1d(ours, rows, return_indices=True)
                yield name, [device.get()[:, at]], [wanted[:, want_at]], limit
                yield f"{name}: log-likelihood", [reported[:, 0]], [sums[:, 0]], limit
            first = np.ascontiguousarray(h[: int(members.dims[0].sum())])
            p = gpu.probabilities(gpu.cupy.asarray(first), members.dims[0], table).get()
            yield f"probabilities, {dtype}", [p], [reference.probabilities(first, members.dims[0])], limit


def make_mbn_cases(few: bool) -> Iterator[Case]:
    """Yield cases of nearest centroids for dense rows, CSR rows, and rows of codes (indices of centroids).

    The GPU and the numpy reference must find the same centroids, and GPU and CPU must draw the same numbers.
    """
    from scalelatent.kernels.sparse_rows import CsrRows
    from scalelatent.models.mbn.kernels import gpu, reference
    from scalelatent.models.mbn.kernels.cpu import draws
    from scalelatent.models.mbn.model.sampling import make_key

    rng = np.random.default_rng(0)
    for dtype in ("u1", "f4"):
        for n, p, k in [(9, 70, 40)] if few else [(1, 3, 1), (9, 70, 40), (50, 33, 200)]:
            x, w = ((rng.random((m, p)) * 254 + 1).astype(dtype) for m in (n, k))
            columns = np.arange(0, p, 2)
            packed = gpu.make_bank(w[:, columns], "euclidean")
            want = reference.nearest(x, columns, reference.make_bank(w[:, columns], "euclidean"))
            yield f"nearest, {dtype}, k = {k}", [gpu.nearest(x, columns, packed)], [want], 0.0
    base = rng.normal(size=100) * 100
    x, w = ((base + rng.normal(size=(m, 100)) * 1e-2).astype("f4") for m in (20, 64))
    want = reference.nearest(x, np.arange(100), reference.make_bank(w, "euclidean"))
    found = gpu.nearest(x, np.arange(100), gpu.make_bank(w, "euclidean"))
    yield "nearest, nearly equal distances", [found], [want], 0.0

    def sparse(n: int) -> CsrRows:
        dense = rng.integers(1, 6, (n, 60)) * (rng.random((n, 60)) < 0.2)
        rows, columns = np.nonzero(dense)
        pointers = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=n))]).astype("i4")
        return CsrRows(dense[rows, columns].astype("f4"), columns.astype("i4"), pointers, dense.shape)

    x, w, columns = sparse(12), sparse(40), np.arange(0, 60, 2)
    found = gpu.nearest_sparse(x, gpu.make_sparse_bank(w, columns, "cosine"))
    want = reference.nearest_sparse(x, reference.make_sparse_bank(w, columns, "cosine"))
    yield "nearest_sparse", [found], [want], 0.0
    x, centroids = rng.integers(0, 60, (12, 20)).astype("u2"), rng.integers(0, 60, (2, 30, 20)).astype("u2")
    units = rng.random((2, 20, 60)) < 0.5
    found = gpu.nearest_codes(x, gpu.make_lists(centroids, units))
    yield "nearest_codes", [found], [reference.nearest_codes(x, reference.make_lists(centroids, units))], 0.0
    for n, m in [(900, 450)] if few else [(33, 1), (900, 450), (9001, 700)]:
        draw = make_key(7, "units"), 3, 30, 5, n, m
        yield f"draws of {m} of {n} codes", [gpu.choose_masks(*draw).get()], [draws.choose_masks(*draw)], 0.0
    for by_mask in (False, True):
        rows = make_key(7, "rows"), 2, 5, 3, 9001, 500, by_mask
        want = draws.choose_numbers(*rows)
        yield f"500 of 9,001 rows, {by_mask=}", [gpu.choose_numbers(*rows).get()], [want], 0.0
    many = np.arange(2**16 + 5, dtype="u4")[None, :, None]  # 65,541 centroids need codes of 32 bits
    x, units = np.array([[2**16 + 3], [7]]), np.ones((1, 1, 2**16 + 5), dtype=bool)
    yield "nearest_codes, k > 65,536", [gpu.nearest_codes(x, gpu.make_lists(many, units))], [x], 0.0


def draw_graph(v: int, h: int, rows: int, scale: float) -> tuple[np.ndarray, ...]:
    """Return random float32 weights (v, h), and biases of v visible and h hidden units for each row."""
    rng = np.random.default_rng(v + h)
    parts = rng.normal(size=(v, h)) * scale, rng.normal(size=(rows, v)), rng.normal(size=(rows, h))
    return tuple(part.astype("f4") for part in parts)


def make_crbm_cases(few: bool) -> Iterator[Case]:
    """Yield cases of conditional RBMs: beliefs (probabilities of units), gradients, and parameters.

    Inference runs in three ways: one thread block per row, a cluster of thread blocks that keeps messages in
    shared memory ("kept"), and a cluster with messages in the GPU's memory.
    """
    from scalelatent.models.crbm.kernels import gpu, reference

    edges, static = gpu.CLUSTER_EDGES, gpu._STATIC_BYTES
    ways = {"one block": (edges, static), "kept": (0, static), "cluster": (0, 2**20)}
    try:
        for way, (gpu.CLUSTER_EDGES, gpu._STATIC_BYTES) in ways.items():
            gpu._read_properties.cache_clear()
            # A warp's registers hold beliefs of HELD_UNITS hidden units; a wider graph works without them.
            wide = [(3, gpu.HELD_UNITS + 4)] if way == "kept" else []
            for v, h in [(17, 40), *wide] if few else [(1, 1), (17, 40), (30, 5), *wide]:
                w, bv, bh = draw_graph(v, h, 2, 0.5)
                for method in ("sum_product", "mixed_product", "max_product", "mean_field"):
                    # Max-product magnifies rounding errors in each sweep, so its limit is larger.
                    sweeps, limit = (2, 1e-3) if method == "max_product" else (4, 1e-5)
                    ours, theirs = gpu.make_coupling(w), reference.make_coupling(w)
                    device = gpu.cupy.asarray(bv), gpu.cupy.asarray(bh)
                    found = getattr(gpu, method)(ours, *device, sweeps)
                    want = getattr(reference, method)(theirs, bv, bh, sweeps)
                    beliefs = [reference.sigmoid(a.get()) for a in (found.lv, found.lh)]
                    wanted = [reference.sigmoid(a) for a in (want.lv, want.lh)]
                    yield f"{method}, {v} x {h}, {way}", beliefs, wanted, limit
                for dtype in ("f4", "f8"):
                    pairs, wanted = gpu.cupy.asarray(np.ones((v, h), dtype)), np.ones((v, h))
                    gpu.sum_product_pairs(ours, *device, 4, None, pairs)
                    reference.sum_product_pairs(theirs, bv, bh, 4, None, wanted)
                    yield f"pairs, {v} x {h}, {dtype}, {way}", [pairs.get()], [wanted], 2e-5
    finally:
        gpu.CLUSTER_EDGES, gpu._STATIC_BYTES = edges, static
        gpu._read_properties.cache_clear()
    for method in ("sum_product", "mean_field"):
        yield f"gradients of chains, {method}", *compute_chain_gradients(method), 2e-4
    for factored in (False, True):
        yield f"parameters after a step, factored={factored}", *compute_next_parameters(factored), 1e-5


def compute_chain_gradients(method: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return gradients of three chains (parts of a batch), from the GPU and from the reference.

    The gradients are those of the weights, by chain, and of the biases of both kinds of units, by row.
    """
    from scalelatent.models.crbm.kernels import gpu, reference

    xp, (v, h), starts, sweeps = gpu.cupy, (17, 40), np.array([0, 5, 6, 19]), 4
    rows, rng = int(starts[-1]), np.random.default_rng(0)
    w, bv, bh = draw_graph(v, h, rows, 0.2)
    seen = (rng.random((rows, v)) < 0.4).astype("f4")
    flat = xp.zeros((3, v * h + v + h), "f4")
    dv, dh, measures = (xp.empty(shape, "f4") for shape in ((rows, v), (rows, h), (3, rows)))
    gpu.add_chain_gradients(
        method, gpu.make_coupling(w), *map(xp.asarray, (seen, bv, bh)), starts, sweeps, None,
        flat, dv, dh, measures, flat.reshape(-1)[v * h :],
    )  # fmt: skip
    wanted, coupling = np.zeros((3, v, h)), reference.make_coupling(w)
    found = reference.sum_product(coupling, bv, bh, sweeps)
    if method == "mean_field":
        found = reference.mean_field(coupling, bv, bh, sweeps)
    on, hidden = reference.sigmoid(found.lv), reference.sigmoid(found.lh)
    positive = reference.sigmoid(seen.astype(float) @ w + bh)
    for c, (a, b) in enumerate(itertools.pairwise(starts)):
        pairs = on[a:b].T @ hidden[a:b]
        if method == "sum_product":
            pairs = np.zeros((v, h))
            reference.sum_product_pairs(coupling, bv[a:b], bh[a:b], sweeps, None, pairs)
        wanted[c] = seen[a:b].T @ positive[a:b] - pairs
    gradients = flat.get()[:, : v * h].reshape(3, v, h)
    return [gradients, dv.get(), dh.get()], [wanted, seen - on, positive - hidden]


def compute_next_parameters(factored: bool) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the parameters after a step and the largest absolute weight, from the GPU and as expected.

    With ``factored``, the kernels multiply the gradients of the units' biases with the inputs of all rows.
    """
    from scalelatent.models.crbm.kernels import gpu

    (v, h, x), rows, rate, rng = (17, 40, 5), 19, 0.1, np.random.default_rng(1)
    edges, size = v * h, v * h + x * (v + h) + v + h
    theta = rng.normal(size=size).astype("f4")
    gradients = rng.normal(size=(3, edges if factored else size)).astype("f4")
    factors = [rng.normal(size=(rows, units)).astype("f4") for units in (v, h, x)]
    change = gradients.sum(axis=0, dtype=float)
    if factored:
        dv, dh, seen = factors
        change = np.concatenate([change, (dv.T @ seen).ravel(), (dh.T @ seen).ravel(), dv.sum(0), dh.sum(0)])
    on_gpu = [gpu.cupy.asarray(a) for a in (theta, gradients, *factors)]
    given = tuple(on_gpu[2:]) if factored else None
    found, largest = gpu.ascend_chains((v, h, x), *on_gpu[:2], rate, given)
    wanted = theta + rate * change
    most = np.abs(wanted[:edges]).max(keepdims=True)
    return [found.get(), largest.get().max(keepdims=True)], [wanted, most]


def make_hcn_cases(few: bool) -> Iterator[Case]:
    """Yield cases of compositional networks: sweeps (rounds of messages), decoding and random pixel orders.

    Sweeps run with and without stored messages. The bits of results must equal those of the numpy reference.
    """
    from gpu_hcn import CHECK_SHAPES, draw_arrays

    from scalelatent.models.hcn.kernels import gpu, reference
    from scalelatent.models.hcn.kernels.pixel_order import shuffled

    copy_to_gpu = gpu.cupy.asarray
    for shape in CHECK_SHAPES[1 : 2 if few else None]:
        given = draw_arrays(*shape, 0)
        fixed = given["evidence"], given["order"]
        for kind in ("none", "i2", "i4"):
            names = ["s", "w"] if kind == "none" else ["s", "w", "to_s", "to_w", "held"]
            want = [given[name].copy() for name in names]
            if kind == "i4":
                want[2:4] = [a.astype("i4") for a in want[2:4]]
            found = [copy_to_gpu(a.copy()) for a in want]
            run = "sweep" if kind == "none" else "sweep_messages"
            more = () if kind == "none" else (0.8,)
            getattr(reference, run)(*fixed, *want, *more)
            getattr(gpu, run)(*(copy_to_gpu(a) for a in fixed), *found, *more)
            yield f"{run}, messages {kind}, {shape}", [a.get() for a in found], want, 0.0
        rows, evidence, want = np.arange(shape[1]), given["evidence"][0], given["s"][0].copy()
        order = shuffled(0, "check", 0, rows, evidence[0].size)
        found = copy_to_gpu(want.copy())
        moved = gpu.decode_images(copy_to_gpu(evidence), copy_to_gpu(order), found, given["w"][0] > 0, 3)
        wanted = reference.decode_images(evidence, order, want, given["w"][0] > 0, 3)
        yield f"decode, {shape}", [found.get(), moved], [want, wanted], 0.0
    numbers = 7, "check", 2**33 + 1, np.array([5, 2**40]), 300
    yield "orders", [gpu.shuffled(*numbers).get()], [shuffled(*numbers)], 0.0


def make_linear_mixture_cases(few: bool) -> Iterator[Case]:
    """Yield cases of linear mixtures: scores, sums, tangents (small changes of images) and distances."""
    from scalelatent.models.linear_mixture.kernels import gpu, reference
    from scalelatent.models.linear_mixture.kernels.reference import TANGENTS, TangentSpec, group_rows

    shape, p, h, q = (6, 7), 42, 3, 8
    for n, k in [(20, 10)] if few else [(1, 1), (20, 10), (60, 150)]:
        rng = np.random.default_rng(n)
        means, bases = rng.normal(size=(k, p)), rng.normal(size=(k, p, q)) / np.sqrt(p)
        x, starts = rng.normal(size=(n, p)).astype("f4"), np.array([0, k // 2, k])
        groups = group_rows(rng.integers(0, k, n), k, rng.random(n))
        spec, factors, candidates = (
            TangentSpec(TANGENTS, shape, 0.6),
            rng.random((k, 7)),
            rng.integers(0, k, (n, 3)),
        )
        for own in (False, True):
            noise = np.exp(rng.normal(size=(k, p)))
            if own:
                scores = reference.factor_scores(
                    means, bases[:, :, :h], noise, np.full(k, 1 / k), np.zeros(p)
                )
            else:
                scores = reference.error_scores(means, np.linalg.qr(bases)[0][:, :, :h], means.mean(axis=0))
            results = []
            for body in (gpu, reference):
                scorer = body.make_scorer(scores, starts)
                shapes = (k, p), (k, p) if own else (k,), (k, q, p), (k, q, q), (k, 7)
                fields = [np.zeros(shape) for shape in shapes]
                sums = body.open_sums(*fields)
                total, square, scatter, gram, trace = sums
                body.add_scatter(body.pack_bases(means, bases, own), x, groups, total, square, scatter, gram)
                still = body.pack_bases(0 * means, bases, False)
                body.add_tangent_scatter(still, x, groups, spec, factors, scatter, trace)
                body.close_sums(sums, *fields)
                rows = body.tangent_rows(x, shape, TANGENTS, 0.6)
                planes = body.pack_tangent_scores(scores)
                far = body.tangent_distance(planes, x, rows, candidates.astype("i4"))
                best = body.nearest(scorer, x, 0, 2)[0]
                if k < 2:  # The first of the two classes has no component, so that it has no best score.
                    best = best[:, 1:]
                scan = body.all_scores(scorer, x, 0, 2), best
                results.append([*scan, *fields, rows, far])
            name = f"{n} rows, K = {k}, {'noise by feature' if own else 'one noise'}"
            yield name, *results, 1e-4


CASES: dict[str, Callable[[bool], Iterator[Case]]] = {
    "capsule": make_capsule_cases,
    "mbn": make_mbn_cases,
    "crbm": make_crbm_cases,
    "hcn": make_hcn_cases,
    "linear_mixture": make_linear_mixture_cases,
}


def check_streams(args: argparse.Namespace) -> int:
    """Test in new threads that kernels wait for copies of their inputs while the null stream is busy.

    A copy on CUDA's null stream would wait for the work on that stream, and a kernel on the backend's own
    stream would not wait for the copy. The inputs change in each run, so that such a kernel cannot find the
    right values in memory of an earlier run.
    """
    import cupy

    from scalelatent.engine.backend import CupyBackend, make_backend
    from scalelatent.models.hcn.model.decode import Decoder
    from scalelatent.models.hcn.model.layer import FeatureLayer
    from scalelatent.models.hcn.model.stored_messages import start_leaf, visit_leaves

    runs, kinds, n = (4, 2, 2) if args.quick else (300, 8, 16)
    size = (9, 8) if args.quick else (24, 24)
    layer = FeatureLayer((1, *size), 3, (8, 6), 1e-3, 1e-3, 0.3, 1e-4)
    rng, host, rows = np.random.default_rng(0), make_backend("cpu"), np.arange(n)
    decoder = Decoder(layer, rng.random((1, 8, 6, 3)) < 0.3, n_sweeps=2)
    beliefs = np.rint(rng.normal(-150, 300, (1, 8, 6, 3))).astype("i4")

    def decode(evidence: np.ndarray, backend: Any) -> list[np.ndarray]:
        return [np.asarray(a) for a in decoder.beliefs(evidence, rows, backend)]

    def sweep(evidence: np.ndarray, backend: Any) -> list[np.ndarray]:
        leaves = [start_leaf(layer, n)]
        leaf, change = visit_leaves(leaves, evidence[None], beliefs, [0], 0, 2, 0.8, backend)[0]
        return [leaf.s, leaf.to_s, leaf.to_w, leaf.held, change]

    inputs = [
        np.where(rng.random((n, 1, *size)) < 0.3, np.int32(1300), np.int32(-1100)).astype("i4")
        for _ in range(kinds)
    ]
    busy_array = cupy.zeros(2**14 if args.quick else 2**28, dtype=np.float32)
    backends: list[Any] = []
    creating_thread = threading.Thread(target=lambda: backends.append(CupyBackend()))
    creating_thread.start()
    creating_thread.join()
    passed = True
    for name, call in (("Decoder.beliefs", decode), ("visit", sweep)):
        want = [call(evidence, host) for evidence in inputs]
        wrong: list[int] = []
        errors: list[str] = []

        def work(
            run: int, call: Any = call, want: Any = want, wrong: Any = wrong, errors: Any = errors
        ) -> None:
            try:
                found = call(inputs[run % kinds], backends[0])
                pairs = zip(found, want[run % kinds], strict=True)
                if not all(np.array_equal(a, b) for a, b in pairs):
                    wrong.append(run)
            except Exception as error:  # noqa: BLE001  the error is recorded
                errors.append(f"{type(error).__name__}: {error}")

        for run in range(runs):
            for _ in range(8):
                busy_array.fill(float(run))
            thread = threading.Thread(target=work, args=(run,))
            thread.start()
            thread.join()
            if len(errors) > 3:
                break
        counts: dict[str, Any] = {"runs": runs, "wrong": len(wrong), "errors": errors[:3]}
        passed &= record(args, f"{name} with a busy null stream", not wrong and not errors, **counts)
    return 0 if passed else 1


def write_digests(args: argparse.Namespace) -> int:
    """Write hashes of the results of all cases and two fits; gpu_check.py compares those of two processes."""
    digests: dict[str, str] = {}
    for model, make in CASES.items():
        for name, found, _, _ in make(args.quick):
            digests[f"{model}: {name}"] = hash_arrays(found)
    digests |= hash_fits(args.quick)
    args.bits.write_text(json.dumps(digests, indent=1), encoding="utf-8")
    return 0


def hash_arrays(arrays: list[Any]) -> str:
    """Return the SHA-256 hash of the bytes of the arrays."""
    found = hashlib.sha256()
    for a in arrays:
        found.update(np.ascontiguousarray(a).tobytes())
    return found.hexdigest()


def hash_fits(quick: bool) -> dict[str, str]:
    """Return hashes of a capsule model's weights and of a mixture's objectives, both fitted on the GPU."""
    import scalelatent as sl

    rng, (n, p) = np.random.default_rng(1), (200, 12) if quick else (20_000, 196)
    y = np.arange(n) % 4
    x = (rng.normal(size=(n, p)) + y[:, None]).astype("f4")
    # One thread is faster for small data, and gives the same bits as several.
    common: dict[str, Any] = {"device": "gpu", "random_state": 0, "n_jobs": 1}
    capsule = sl.CapsuleRegression(architecture="multiclass", capsule_dim=2, max_iter=3, **common).fit(x, y)
    mixture = sl.LinearMixtureClassifier(
        n_components=2, n_dims=2, likelihood="error", max_iter=2, **common
    ).fit(x / 10, y)
    objective = np.array([record["objective"] for record in mixture.history_], dtype=np.float64)
    return {"capsule fit": hash_arrays([capsule.W_]), "linear mixture fit": hash_arrays([objective])}


if __name__ == "__main__":
    sys.exit(main())
