"""Check and measure compositional networks on a GPU: bits, then rates of many chains, then a fit.

    python benchmarks/gpu_hcn.py --out gpu_hcn.json

Needs Python 3.12, CuPy, numpy, scipy, numba, this package on PYTHONPATH, and the packages that this package
imports; `benchmarks/gpu_all.sh wheels` downloads them for a machine without a network. The script downloads
nothing and changes no setting of the card. The exit code is 0 if all checks passed, 1 if a check failed or
a part raised an error (see the result), and 3 without a GPU, when no result is written.

The checks compare all bits with those of a processor. Rates are pairs per second (a pair is a place and a
weight that meet in a pixel) with all arrays on the card; they are compared with one core of this machine in
the same run. Each thread block runs one chain of five letter images of 24 x 24 with 32 features of 8 x 6. A
step is what a worker does: draw orders, run the minibatches of each chain one after another, forget, and
copy the evidence to the host. The fit has 128 chains of ten minibatches and reads the images from memory.
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
    Part,
    card_device,
    card_stream,
    device_seconds,
    host_seconds,
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

SHAPES = [(1, 1, (1, 5, 5), (2, 3), 1), (2, 2, (1, 7, 6), (3, 2), 5), (1, 2, (2, 4, 5), (3, 4), 33)]
LARGE = (3, 2, (1, 24, 24), (8, 6), 32)  # chains, images, (channels, height, width), window, features
IMAGES, BATCHES = 5, 10


def main() -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="number of images of the fit")
    return run_script(parser.parse_args(), card_stream, check_all, measures)


def measures(backend: CupyBackend, args: argparse.Namespace) -> Iterator[Part]:
    yield "rates", "sweeps by the number of chains", partial(rates, backend, args)
    yield "rates", "a step of many chains", partial(many_chains, backend, args)
    yield "learned", "a fit", partial(learned, args)


# -- checks -----------------------------------------------------------------------------------------------


def draw(
    chains: int, images: int, image: Any, window: Any, features: int, seed: int
) -> dict[str, np.ndarray]:
    """Return evidence, orders and beliefs of S and W in whole units, without messages."""
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


def check_all(backend: CupyBackend, args: argparse.Namespace) -> Iterator[Part]:
    """Compare the bits of the card with those of a processor."""
    host = make_backend("cpu")
    for shape in SHAPES if args.quick else [*SHAPES, LARGE]:
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
    """Compare the bits of two sweeps."""
    given = draw(*shape, args.seed)
    names = list(given)[: 4 if damping is None else 7]
    both = []
    for place in (host, backend):
        arrays = [place.xp.asarray(given[key].copy()) for key in names]
        moved = []
        for _ in range(2):
            more = () if damping is None else (damping,)
            moved.append(place.kernel(f"hcn_{name}")(*arrays, *more))
        both.append([*(place.to_host(a) for a in arrays), *(m for m in moved if m is not None)])
    return same(f"{name} {damping or ''} of {shape}", *both)


def check_decode(host: Any, backend: Any, shape: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Compare the bits of three sweeps of decoding."""
    given, rows, found = draw(*shape, args.seed), np.arange(shape[1]), []
    for place in (host, backend):
        s = place.xp.asarray(given["s"][0].copy())
        pixels = given["evidence"][0]
        order = shuffled(args.seed, "benchmark", 0, rows, pixels[0].size)
        moved = place.kernel("hcn_decode_images")(
            place.xp.asarray(pixels), place.xp.asarray(order), s, given["w"][0] > 0, 3
        )
        found.append([place.to_host(s), moved])
    return same(f"decode of {shape}", *found)


def check_orders(host: Any, backend: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Compare random orders of pixels."""
    numbers = args.seed, "hcn sweep", 3, np.array([0, 7, 2**40]), 40 if args.quick else 2880
    return same("orders", *([p.to_host(p.kernel("hcn_shuffled")(*numbers))] for p in (host, backend)))


def check_step(host: Any, backend: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Compare the beliefs after a step of three chains."""
    learner, state, blocks = job(3, 2 if args.quick else BATCHES, args)
    return same("a step of chains", *([step(learner, state, blocks, p)] for p in (host, backend)))


def check_fit(args: argparse.Namespace) -> dict[str, Any]:
    """Compare the beliefs after whole fits."""
    fits = [
        [model_of(device, 2, args).fit(letters(60 if args.quick else 200, args)).beliefs_[0]]
        for device in ("cpu", card_device())
    ]
    return same("a fit", *fits)


def same(name: str, want: list[np.ndarray], found: list[np.ndarray]) -> dict[str, Any]:
    """Return a line of the result, which passes if all arrays are equal."""
    return {"name": name, "passed": all(bool(np.array_equal(a, b)) for a, b in zip(want, found, strict=True))}


# -- the job ----------------------------------------------------------------------------------------------


def layer_of(args: argparse.Namespace) -> FeatureLayer:
    """Return a layer for 26 letters."""
    if args.quick:
        return FeatureLayer((1, 9, 8), 3, (8, 6), 1e-3, 1e-3, 0.3, 1e-4)
    return FeatureLayer((1, 24, 24), 32, (8, 6), 1e-3, 1e-3, 0.3, 1e-4)


def letters(n: int, args: argparse.Namespace) -> np.ndarray:
    """Return n images with letters."""
    size = layer_of(args).image[1:]
    count = 1 if args.quick else 5
    return image_set("letters", size=size, count=count, noise=0.03, seed=args.seed).rows(0, n)[0]


def job(chains: int, batches: int, args: argparse.Namespace) -> tuple[OnlineFeatureLearner, Any, list[Block]]:
    """Return a partly trained learner, its state, and the blocks of a step of chains of minibatches."""
    size = 2 if args.quick else IMAGES
    learner, host = OnlineFeatureLearner(layer_of(args), 0.98, size, args.seed), make_backend("cpu")
    x = letters(chains * batches * size, args).reshape(chains * batches * size, -1)
    rows = np.arange(len(x)).reshape(chains, -1)
    blocks = [Block(x[part], None, None, 0, part, 0, k) for k, part in enumerate(rows)]
    state = learner.start()
    for a in range(0, min(len(x), 40 * size), size):
        block = Block(x[a : a + size], None, None, 0, np.arange(a, a + size), 0)
        state = apply_step(learner, state, run_chains(learner, state, [block], host), size)
    return learner, state, blocks


def step(learner: OnlineFeatureLearner, state: Any, blocks: list[Block], backend: Any) -> np.ndarray:
    """Return the beliefs after a step."""
    rows = sum(len(block.x) for block in blocks)
    return apply_step(learner, state, run_chains(learner, state, blocks, backend), rows).beliefs


def model_of(device: str, chains: int, args: argparse.Namespace) -> sl.HierarchicalCompositionalNetwork:
    """Return the estimator of the fits."""
    layer, batches = layer_of(args), 2 if args.quick else BATCHES
    return sl.HierarchicalCompositionalNetwork(
        layers=[(layer.n_features, layer.window)], p01=1e-3, p10=1e-3, p_weight=0.3, p_sparsity=1e-4,
        forgetting=0.98, batch_size=5, n_epochs=1, n_chains=chains, chain_batches=batches,
        warmup_rows=10 if args.quick else None, device=device, n_jobs=1, random_state=args.seed,
    )  # fmt: skip


# -- rates ------------------------------------------------------------------------------------------------


def rates(backend: CupyBackend, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure pairs per second for several numbers of chains, and on one core."""
    host, layer = make_backend("cpu"), layer_of(args)
    learner, state, blocks = job(2 if args.quick else 264, 1, args)
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
            one = {name: pairs / seconds for name, seconds in cores(host, evidence, order, s, w, kept, args)}
            found["one core"] = one
        arrays = [backend.xp.asarray(a) for a in (evidence, order, s, w, *kept)]
        for name in ("sweep", "sweep_messages"):
            some = arrays[:4] if name == "sweep" else [*arrays, 1.0]
            kernel = backend.kernel(f"hcn_{name}")
            seconds = device_seconds(backend, lambda _, k=kernel, a=some: k(*a), args.repeats)
            found[name] = chains * pairs / seconds
            found[f"{name}, times one core"] = found[name] / one[name]
        seconds = host_seconds(
            lambda c=chains: step(learner, state, blocks[:c], backend), max(1, args.repeats // 2)
        )
        found["a step of one minibatch"] = chains * pairs / seconds
        print(json.dumps(found), flush=True)
        yield found


def many_chains(backend: CupyBackend, args: argparse.Namespace) -> dict[str, Any]:
    """Measure a step of many chains of minibatches on the card and on one core."""
    host, layer = make_backend("cpu"), layer_of(args)
    learner, state, blocks = job(2 if args.quick else 128, 2 if args.quick else BATCHES, args)
    n = sum(len(block.x) for block in blocks)
    both = [host_seconds(lambda p=p: step(learner, state, blocks, p), 1) for p in (host, backend)]
    seconds_of = dict(zip(("one core", "the card"), both, strict=True))
    found = {"a step of minibatches": len(blocks), **{k: n * layer.pairs / v for k, v in seconds_of.items()}}
    found["times one core"] = both[0] / both[1]
    print(json.dumps(found), flush=True)
    return found


def cores(host: Any, evidence: Any, order: Any, s: Any, w: Any, kept: Any, args: argparse.Namespace) -> Any:
    """Yield the seconds of each sweep of a chain on one core."""
    for name in ("sweep", "sweep_messages"):
        arrays = [a.copy() for a in (evidence, order, s, w, *(kept if name != "sweep" else ()))]
        more = (1.0,) if name != "sweep" else ()
        call, given = host.kernel(f"hcn_{name}"), [*arrays, *more]
        yield name, host_seconds(lambda call=call, given=given: call(*given), args.repeats)


def learned(args: argparse.Namespace) -> dict[str, Any]:
    """Fit with many chains; return letters found, seconds and pairs per second."""
    n = 60 if args.quick else args.rows
    model, x = model_of("gpu", 2 if args.quick else 128, args), letters(n, args)
    begin = time.perf_counter()
    model.fit(x)
    seconds = time.perf_counter() - begin
    kinds = image_set("letters").features.astype(bool)
    found = {
        "images": n,
        "seconds": seconds,
        "pairs_per_second": n * layer_of(args).pairs / seconds,
        "letters found": count_found(model.weights_[0], kinds),
        "compression": model.compression_,
    }
    print(json.dumps(found), flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
