"""Check and measure compositional networks on a GPU: bits of results, then rates of many chains, then a fit.

    python benchmarks/gpu_hcn.py --out gpu_hcn.json

The docstring of gpu_common.py describes what the script needs, its result file and its exit codes.

The checks compare all bits of results with those of a processor. Rates are pairs per second with all arrays
on the GPU, and as multiples of one core of this machine in the same run. A pair is a feature at a place of
the image and one of the feature's weights. Each thread block runs one chain: minibatches of five images of
letters, 24 x 24 pixels, with 32 features of 8 x 6, one minibatch after another. A step does what a worker
does for its chains: draw the random order in which pixels are updated, run the minibatches, discount the old
evidence for weights, and copy the new evidence to the host.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from gpu_common import (
    Task,
    choose_device,
    device_seconds,
    host_seconds,
    make_current_backend,
    run_script,
    script_parser,
)
from hcn_common import count_found

import scalelatent as sl
from scalelatent.contract.learners import Block
from scalelatent.engine.backend import CupyBackend, make_backend
from scalelatent.engine.chains import apply_step, run_chains
from scalelatent.generators.images import image_set
from scalelatent.models.hcn.kernels.pixel_order import shuffled
from scalelatent.models.hcn.kernels.windows import message_room
from scalelatent.models.hcn.model.evidence_learner import OnlineFeatureLearner
from scalelatent.models.hcn.model.layer import FeatureLayer

# Shapes that are checked: chains, images, (channels, height, width) of images, (height, width) of features,
# and number of features.
CHECK_SHAPES = [(1, 1, (1, 5, 5), (2, 3), 1), (2, 2, (1, 7, 6), (3, 2), 5), (1, 2, (2, 4, 5), (3, 4), 33)]
LARGE_SHAPE = (3, 2, (1, 24, 24), (8, 6), 32)
# Number of images in a minibatch, and number of minibatches in a chain (sequence of minibatches).
IMAGES, BATCHES = 5, 10


def main() -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="number of images of the fit")
    return run_script(parser.parse_args(), make_current_backend, list_checks, list_measurements)


def list_measurements(backend: CupyBackend, args: argparse.Namespace) -> Iterator[Task]:
    yield "rates", "sweeps by the number of chains", partial(measure_sweeps, backend, args)
    yield "rates", "a step of many chains", partial(measure_step, backend, args)
    yield "learned", "a fit", partial(measure_fit, args)


def draw_arrays(
    chains: int, images: int, image: Any, window: Any, features: int, seed: int
) -> dict[str, np.ndarray]:
    """Return random evidence and orders of pixels, beliefs of features and of weights, and messages of 0.

    Names, shapes and dtypes are those of arguments of the kernel ``sweep_messages``; beliefs are integers.
    """
    rng, (channels, height, width), (h, w) = np.random.default_rng(seed), image, window
    pixels = chains, images, channels, height, width
    room = message_room((height, width), window, features)
    evidence = np.where(rng.random(pixels) < 0.3, 1300, -1100) * (rng.random(pixels) > 0.1)
    s = rng.normal(-900, 300, (chains, images, height - h + 1, width - w + 1, features))
    weights = rng.normal(-150, 300, (chains, channels, h, w, features))
    n = images * channels * height * width
    return {
        "evidence": evidence.astype("i4"),
        "order": shuffled(seed, "benchmark", 0, np.arange(chains), n),
        "s": np.rint(s).astype("i4"),
        "w": np.rint(weights).astype("i4"),
        "to_s": np.zeros((chains, images, channels, room), "i2"),
        "to_w": np.zeros((chains, images, channels, room), "i2"),
        "held": np.zeros((chains, images, channels, height * width, h), "u1"),
    }


def list_checks(backend: CupyBackend, args: argparse.Namespace) -> Iterator[Task]:
    """Yield checks that compare the bits of results on the GPU with those on the CPU.

    The results are those of sweeps (rounds of messages), of decoding (inference of features), of random
    orders of pixels, of a learning step, and of a fit.
    """
    host = make_backend("cpu")
    for shape in CHECK_SHAPES if args.quick else [*CHECK_SHAPES, LARGE_SHAPE]:
        for name, damping in (("sweep", None), ("sweep_messages", 1.0), ("sweep_messages", 0.8)):
            call = partial(check_sweep, host, backend, shape, name, damping, args)
            yield "checks", f"{name} {damping or ''} of {shape}", call
        yield "checks", f"decode of {shape}", partial(check_decode, host, backend, shape, args)
    yield "checks", "orders", partial(check_orders, host, backend, args)
    yield "checks", "a step of chains", partial(check_step, host, backend, args)
    yield "checks", "a fit", partial(check_fit, args)


def check_sweep(
    host: Any, backend: Any, shape: Any, name: str, damping: float | None, args: argparse.Namespace
) -> dict[str, Any]:
    """Compare the bits of beliefs and messages after two sweeps (rounds of messages) on the GPU and CPU."""
    given = draw_arrays(*shape, args.seed)
    names = list(given)[: 4 if damping is None else 7]
    both = []
    for place in (host, backend):
        arrays = [place.xp.asarray(given[key].copy()) for key in names]
        moved = []
        for _ in range(2):
            more = () if damping is None else (damping,)
            moved.append(place.kernel(f"hcn_{name}")(*arrays, *more))
        both.append([*(place.to_host(a) for a in arrays), *(m for m in moved if m is not None)])
    return check_equal(f"{name} {damping or ''} of {shape}", *both)


def check_decode(host: Any, backend: Any, shape: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Compare the bits of features that three sweeps (rounds of messages) infer on the GPU and on the CPU."""
    given, rows, found = draw_arrays(*shape, args.seed), np.arange(shape[1]), []
    for place in (host, backend):
        s = place.xp.asarray(given["s"][0].copy())
        pixels = given["evidence"][0]
        order = shuffled(args.seed, "benchmark", 0, rows, pixels[0].size)
        moved = place.kernel("hcn_decode_images")(
            place.xp.asarray(pixels), place.xp.asarray(order), s, given["w"][0] > 0, 3
        )
        found.append([place.to_host(s), moved])
    return check_equal(f"decode of {shape}", *found)


def check_orders(host: Any, backend: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Compare the random orders in which pixels are updated, drawn on the GPU and on the CPU."""
    numbers = args.seed, "hcn sweep", 3, np.array([0, 7, 2**40]), 40 if args.quick else 2880
    return check_equal("orders", *([p.to_host(p.kernel("hcn_shuffled")(*numbers))] for p in (host, backend)))


def check_step(host: Any, backend: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Compare the beliefs of weights after a step of three chains of minibatches on the GPU and the CPU."""
    learner, state, blocks = start_step(3, 2 if args.quick else BATCHES, args)
    return check_equal("a step of chains", *([run_step(learner, state, blocks, p)] for p in (host, backend)))


def check_fit(args: argparse.Namespace) -> dict[str, Any]:
    """Compare the beliefs of weights after a whole fit on the GPU and on the CPU."""
    fits = [
        [make_model(device, 2, args).fit(draw_letters(60 if args.quick else 200, args)).beliefs_[0]]
        for device in ("cpu", choose_device())
    ]
    return check_equal("a fit", *fits)


def check_equal(name: str, want: list[np.ndarray], found: list[np.ndarray]) -> dict[str, Any]:
    """Return a line of the result: a check that passes if all arrays are equal."""
    return {"name": name, "passed": all(bool(np.array_equal(a, b)) for a, b in zip(want, found, strict=True))}


def make_layer(args: argparse.Namespace) -> FeatureLayer:
    """Return a layer of features for images of letters: its sizes and its prior parameters."""
    if args.quick:
        return FeatureLayer((1, 9, 8), 3, (8, 6), 1e-3, 1e-3, 0.3, 1e-4)
    return FeatureLayer((1, 24, 24), 32, (8, 6), 1e-3, 1e-3, 0.3, 1e-4)


def draw_letters(n: int, args: argparse.Namespace) -> np.ndarray:
    """Return n random binary images of letters, of the size that ``make_layer`` expects."""
    size = make_layer(args).image[1:]
    count = 1 if args.quick else 5
    return image_set("letters", size=size, count=count, noise=0.03, seed=args.seed).rows(0, n)[0]


def start_step(
    chains: int, batches: int, args: argparse.Namespace
) -> tuple[OnlineFeatureLearner, Any, list[Block]]:
    """Return a learner, its state after a few minibatches, and a block of rows per chain of minibatches."""
    size = 2 if args.quick else IMAGES
    learner, host = OnlineFeatureLearner(make_layer(args), 0.98, size, args.seed), make_backend("cpu")
    x = draw_letters(chains * batches * size, args).reshape(chains * batches * size, -1)
    rows = np.arange(len(x)).reshape(chains, -1)
    blocks = [Block(x[part], None, None, 0, part, 0, k) for k, part in enumerate(rows)]
    state = learner.start()
    for a in range(0, min(len(x), 40 * size), size):
        block = Block(x[a : a + size], None, None, 0, np.arange(a, a + size), 0)
        state = apply_step(learner, state, run_chains(learner, state, [block], host), size)
    return learner, state, blocks


def run_step(learner: OnlineFeatureLearner, state: Any, blocks: list[Block], backend: Any) -> np.ndarray:
    """Return the beliefs of weights after one step, in which each block of rows is a chain of minibatches."""
    rows = sum(len(block.x) for block in blocks)
    return apply_step(learner, state, run_chains(learner, state, blocks, backend), rows).beliefs


def make_model(device: str, chains: int, args: argparse.Namespace) -> sl.HierarchicalCompositionalNetwork:
    """Return an unfitted network with the sizes of ``make_layer``, and ``chains`` chains of minibatches."""
    layer, batches = make_layer(args), 2 if args.quick else BATCHES
    return sl.HierarchicalCompositionalNetwork(
        layers=[(layer.n_features, layer.window)], p01=1e-3, p10=1e-3, p_weight=0.3, p_sparsity=1e-4,
        forgetting=0.98, batch_size=5, n_epochs=1, n_chains=chains, chain_batches=batches,
        warmup_rows=10 if args.quick else None, device=device, n_jobs=1, random_state=args.seed,
    )  # fmt: skip


def measure_sweeps(backend: CupyBackend, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure pairs per second for several numbers of chains on the GPU, and for one chain on one core.

    A chain is a sequence of minibatches. A pair is a weight of a feature at one place of an image.
    """
    host, layer = make_backend("cpu"), make_layer(args)
    learner, state, blocks = start_step(2 if args.quick else 264, 1, args)
    pairs = layer.pairs * len(blocks[0].x)
    one: dict[str, float] = {}
    for chains in [1, 2] if args.quick else [1, 8, 32, 128, 264]:
        evidence = np.stack([layer.read_evidence(block) for block in blocks[:chains]])
        w = np.stack([np.rint(state.beliefs * 256).astype("i4")] * chains)
        s = np.stack([layer.prior_beliefs(len(blocks[0].x))] * chains)
        order = shuffled(args.seed, "benchmark", 0, np.arange(chains), evidence[0].size)
        room = message_room(layer.image[1:], layer.window, layer.n_features)
        kept = [np.zeros((*evidence.shape[:3], room), "i2") for _ in range(2)]
        kept.append(np.zeros((*evidence.shape[:3], layer.n_pixels, layer.window[0]), "u1"))
        found: dict[str, Any] = {"chains": chains}
        if chains == 1:
            times = time_sweeps(host, evidence, order, s, w, kept, args)
            one = {name: pairs / seconds for name, seconds in times}
            found["one core"] = one
        arrays = [backend.xp.asarray(a) for a in (evidence, order, s, w, *kept)]
        for name in ("sweep", "sweep_messages"):
            some = arrays[:4] if name == "sweep" else [*arrays, 1.0]
            kernel = backend.kernel(f"hcn_{name}")
            seconds = device_seconds(backend, lambda _, k=kernel, a=some: k(*a), args.repeats)
            found[name] = chains * pairs / seconds
            found[f"{name}, times one core"] = found[name] / one[name]
        seconds = host_seconds(
            lambda c=chains: run_step(learner, state, blocks[:c], backend), max(1, args.repeats // 2)
        )
        found["a step of one minibatch"] = chains * pairs / seconds
        print(json.dumps(found), flush=True)
        yield found


def measure_step(backend: CupyBackend, args: argparse.Namespace) -> dict[str, Any]:
    """Measure pairs per second in a step of 128 chains of ten minibatches, on the GPU and on one core."""
    host, layer = make_backend("cpu"), make_layer(args)
    learner, state, blocks = start_step(2 if args.quick else 128, 2 if args.quick else BATCHES, args)
    n = sum(len(block.x) for block in blocks)
    both = [host_seconds(lambda p=p: run_step(learner, state, blocks, p), 1) for p in (host, backend)]
    seconds_of = dict(zip(("one core", "the card"), both, strict=True))
    found = {"a step of minibatches": len(blocks), **{k: n * layer.pairs / v for k, v in seconds_of.items()}}
    found["times one core"] = both[0] / both[1]
    print(json.dumps(found), flush=True)
    return found


def time_sweeps(
    host: Any, evidence: Any, order: Any, s: Any, w: Any, kept: Any, args: argparse.Namespace
) -> Any:
    """Yield the name and the seconds of each kernel for a sweep (round of messages), on one core of the CPU.

    ``sweep`` computes messages without storing them; ``sweep_messages`` stores them between sweeps.
    """
    for name in ("sweep", "sweep_messages"):
        arrays = [a.copy() for a in (evidence, order, s, w, *(kept if name != "sweep" else ()))]
        more = (1.0,) if name != "sweep" else ()
        call, given = host.kernel(f"hcn_{name}"), [*arrays, *more]
        yield name, host_seconds(lambda call=call, given=given: call(*given), args.repeats)


def measure_fit(args: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of a fit, pairs (weight and place of a feature) per second, and letters found."""
    n = 60 if args.quick else args.rows
    model, x = make_model("gpu", 2 if args.quick else 128, args), draw_letters(n, args)
    begin = time.perf_counter()
    model.fit(x)
    seconds = time.perf_counter() - begin
    kinds = image_set("letters").features.astype(bool)
    found = {
        "images": n,
        "seconds": seconds,
        "pairs_per_second": n * make_layer(args).pairs / seconds,
        "letters found": count_found(model.weights_[0], kinds),
        "compression": model.compression_,
    }
    print(json.dumps(found), flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
