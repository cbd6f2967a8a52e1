"""Measure how many letters online learning finds (Lázaro-Gredilla et al., 2016, section 4.2, Figure 6).

    python benchmarks/hcn_online.py [--parts five,alphabet,curves]

five      Images of 24 x 24 show five of the letters AKSTX at random places, with 3 % of the pixels flipped;
          the network has 6 features of 8 x 6. Three fits are compared: 30 images in batch mode (damping .8,
          100 passes), the same 30 images online for 100 epochs (minibatches of 5, forgetting .95), and 3,000
          images online for one epoch. The last one is also run with eight chains, which learn in parallel,
          and both online fits with the best of three restarts. Ten seeds change the images and the first
          beliefs. A letter is found if its largest overlap (intersection over union) with a feature is at
          least .9. The settings were chosen on other seeds (100 to 129). Draws results/hcn_online.png.
alphabet  All 26 letters, 32 features, forgetting .98, one epoch of --rows images.
curves    Number of letters found against the number of images, for all 26 letters: with forgetting from .9
          to 1, and with parallel chains of one or ten minibatches. Draws results/hcn_online_curves.png.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from common import parser, write_part, write_png
from hcn_common import (
    MIN_IOU,
    arrange_tiles,
    compute_overlaps,
    compute_true_compression,
    count_found,
    draw_pictures,
)

import scalelatent as sl
from scalelatent.contract.learners import Block
from scalelatent.data import Dataset
from scalelatent.engine.backend import make_backend
from scalelatent.engine.chains import apply_step, run_chains
from scalelatent.generators.images import ImageSet, image_set
from scalelatent.models.hcn.model.evidence_learner import OnlineFeatureLearner
from scalelatent.models.hcn.model.layer import FeatureLayer, to_features

SETTINGS = {"p01": 1e-3, "p10": 1e-3, "p_weight": 0.3, "p_sparsity": 1e-4}
# Number of images and parameters of each fit that the part "five" compares, by its name.
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "30 images, messages kept": (30, {"online": False, "damping": 0.8, "n_epochs": 100}),
    "30 images, 100 times": (30, {"n_epochs": 100}),
    "3,000 images, once": (3000, {"n_epochs": 1}),
    "3,000 images, once, 8 chains": (
        3000, {"n_epochs": 1, "n_chains": 8, "chain_batches": 1, "warmup_rows": 600}
    ),
    "30 images, 100 times, best of 3": (30, {"n_epochs": 100, "n_restarts": 3}),
    "3,000 images, once, best of 3": (3000, {"n_epochs": 1, "n_restarts": 3}),
}  # fmt: skip
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def make_letters(alphabet: str, seed: int) -> ImageSet:
    return image_set("letters", alphabet=alphabet, count=5, size=(24, 24), noise=0.03, seed=seed)


def report_letters(
    model: sl.HierarchicalCompositionalNetwork, images: ImageSet, n: int, seed: int
) -> dict[str, Any]:
    """Return the found and the missing letters of a fitted model, and its compression."""
    best = compute_overlaps(model.weights_[0], images.features)
    return {
        "seed": seed,
        "found": int((best >= MIN_IOU).sum()),
        "missing": {c: round(float(v), 2) for c, v in zip(images.names, best, strict=True) if v < MIN_IOU},
        "features_used": int(model.used_[0].sum()),
        "compression": round(model.compression_, 4),
        "truth": round(compute_true_compression(images, min(n, 1000)), 4),
    }


def summarise_seeds(fits: list[dict[str, Any]], kinds: int) -> dict[str, Any]:
    """Return the results of all seeds and their medians; ``kinds`` is the number of letters in the images."""
    found = [fit["found"] for fit in fits]
    return {
        "kinds": kinds,
        "found": {"median": float(np.median(found)), "least": min(found)},
        "seeds_with_all": found.count(kinds),
        "over_truth": round(float(np.median([fit["compression"] / fit["truth"] for fit in fits])), 3),
        "fits": fits,
    }


def find_five_letters(args: Any) -> dict[str, Any]:
    seeds, out, drawn = range(args.seed, args.seed + args.seeds), {}, {}
    for name, (n, how) in WAYS.items():
        fits = []
        for seed in seeds:
            images = make_letters("AKSTX", seed)
            ds = Dataset.from_arrays(images.rows(0, n)[0])
            model = sl.HierarchicalCompositionalNetwork(
                [(6, (8, 6))], **SETTINGS, forgetting=0.95, **how, random_state=seed, n_jobs=1
            ).fit(ds)
            fits.append(report_letters(model, images, n, seed))
            drawn.setdefault(name, arrange_tiles(model.weights_[0][:, 0], 3))
        out[name] = summarise_seeds(fits, 5)
        print(name, {k: v for k, v in out[name].items() if k != "fits"}, flush=True)
    x = 1 - make_letters("AKSTX", args.seed).rows(0, 2)[0]
    figures = [("(a)", x[0]), ("(b)", x[1])]
    figures += [(f"({mark}) {name}", drawn[name]) for mark, name in zip("cde", WAYS, strict=False)]
    draw_pictures(args.out.with_suffix(".png"), [figures])
    return {"settings": SETTINGS, "ways": out}


def find_alphabet(args: Any) -> dict[str, Any]:
    fits, n = [], args.rows
    for seed in range(args.seed, args.seed + args.seeds):
        images = make_letters(ALPHABET, seed)
        model = sl.HierarchicalCompositionalNetwork(
            [(32, (8, 6))], **SETTINGS, forgetting=0.98, n_epochs=1, random_state=seed, n_jobs=1
        ).fit(Dataset.from_arrays(images.rows(0, n)[0]))
        fits.append(report_letters(model, images, n, seed))
        print("alphabet", fits[-1], flush=True)
    return {"settings": SETTINGS, "rows": n, **summarise_seeds(fits, len(ALPHABET))}


def measure_curve(
    seed: int, rows: int, forgetting: float, chains: int, batches: int, warm_rows: int
) -> list[list[int]]:
    """Return the number of letters found about 20 times during one fit, as pairs [images, letters].

    A step has ``chains`` chains of ``batches`` minibatches, after ``warm_rows`` images in one chain.
    """
    images = make_letters(ALPHABET, seed)
    layer = FeatureLayer((1, *images.image_shape), 32, (8, 6), **SETTINGS)
    learner, backend = OnlineFeatureLearner(layer, forgetting, 5, seed), make_backend("cpu")
    state, seen, out, every = learner.start(), 0, [], rows // 20
    while seen < rows:
        serial = seen < warm_rows
        size, n = (5, 1) if serial else (5 * batches, chains)
        x = images.rows(seen, seen + n * size)[0].reshape(n * size, -1)
        numbers = np.arange(seen, seen + n * size)
        parts = [slice(k * size, (k + 1) * size) for k in range(n)]
        blocks = [Block(x[part], None, None, seen + part.start, numbers[part]) for part in parts]
        state = apply_step(learner, state, run_chains(learner, state, blocks, backend), n * size)
        seen += n * size
        if seen // every > (seen - n * size) // every:
            out.append([seen, count_found(to_features(state.beliefs > 0), images.features)])
    return out


def measure_curves(args: Any) -> dict[str, Any]:
    seeds, out = range(args.seed, args.seed + args.curve_seeds), {}
    ways = {f"forgetting {v:g}": (v, 1, 1, 0) for v in (0.9, 0.95, 0.98, 0.99, 1.0)}
    ways |= {f"{k} chains of {m}": (0.98, k, m, 2000) for k, m in ((8, 1), (8, 10), (32, 1))}
    for name, way in ways.items():
        runs = [measure_curve(seed, args.rows, *way) for seed in seeds]
        least = min(map(len, runs))
        found = np.mean([[n for _, n in run[:least]] for run in runs], axis=0)
        out[name] = {
            "images": [seen for seen, _ in runs[0][:least]],
            "found": [round(float(v), 2) for v in found],
            "last": [run[-1][1] for run in runs],
        }
        print(name, out[name]["last"], flush=True)
    draw_curves(out, args.out.with_name(f"{args.out.stem}_curves.png"))
    return {"settings": SETTINGS, "seeds": len(seeds), "ways": out}


def draw_curves(found: dict[str, Any], path: Any) -> None:
    from scalelatent.report.style import COLORS, new_figure, style_axes

    figure = new_figure(9, 3.4)
    halves = [name for name in found if "chains" not in name], ["forgetting 0.98"]
    halves[1].extend(name for name in found if "chains" in name)
    for axes, names in zip(figure.subplots(1, 2, sharey=True), halves, strict=True):
        style_axes(axes)
        for name, color in zip(names, COLORS, strict=False):
            label = "one chain" if axes.get_subplotspec().colspan.start and "chains" not in name else name
            axes.plot(found[name]["images"], found[name]["found"], color=color, label=label)
        axes.set_xlabel("images seen")
        axes.legend(frameon=False, fontsize=8, loc="center right")
    figure.axes[0].set_ylabel("letters found, of 26")
    write_png(figure, path)
    print(f"drawn to {path}", flush=True)


def main() -> None:
    arguments = parser(__doc__, "hcn_online")
    arguments.add_argument("--parts", default="five,alphabet,curves")
    arguments.add_argument(
        "--seeds", type=int, default=10, help="number of fits in the parts five and alphabet"
    )
    arguments.add_argument("--curve-seeds", type=int, default=3, help="number of fits in the part curves")
    arguments.add_argument(
        "--rows", type=int, default=6000, help="number of images in the parts alphabet and curves"
    )
    args = arguments.parse_args()
    for name in args.parts.split(","):
        write_part(
            args.out,
            name,
            args.seed,
            {"five": find_five_letters, "alphabet": find_alphabet, "curves": measure_curves}[name](args),
        )


if __name__ == "__main__":
    main()
