"""Fit networks of two layers to images of two traits (Lázaro-Gredilla et al., 2016, section 4.3, Figure 7).

    python benchmarks/hcn_traits.py [--parts clusters,supervised,few,filled,leaves,flips,read] [--seeds 5]

An image has two traits: a square or a circle, and one of two diagonals. Together they make four patterns. The
network has features, and templates, which combine features. A seed draws 100 training images, 10,000 test
images and the first beliefs of the network. Each part has a result for each seed:

clusters    Test error without labels, with 4 templates over 4 features of 13 x 13. The training images
            decide which template is which pattern.
supervised  Test error with 2 templates for each of two categories, which depend on both traits.
few         Test error with one template per pattern, from 4 labelled and 96 unlabelled images.
filled      One half of each trait of 1,000 test images is hidden, and the network of `clusters` fills the
            hidden pixels. Results: the share of filled pixels within one pixel of a true one, the share of
            hidden pixels within one pixel of a filled one, and filled pixels divided by hidden ones.
leaves      `clusters` with 2, 5 and 20 leaves (ranges of images) whose messages change at the same time.
flips       `supervised` with 0 to 10 % of the training pixels flipped; the assumed noise p01 and p10 is this
            share (at least .001), and a fit has at most 200 passes. Two convolutional networks have the same
            images: one of the same form (pools, 4 linear features of 13 x 13, the best of 2 templates per
            class), and a standard one with ReLU. Their weight decay is chosen on 1,000 other images.
read        The network of `supervised` reads 2,000 test images with other assumed noise p01 and p10: test
            errors, and the share of images whose class differs from the class at (.001, .001). Section
            3.4.2 of the paper says that this share is 0.

CPU seconds are measured on one thread. Draws results/hcn_traits.png. The part flips needs torch.
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np
from common import parser, write_part
from hcn_common import arrange_tiles, compute_overlaps, draw_pictures
from scipy.ndimage import binary_dilation
from scipy.optimize import linear_sum_assignment

import scalelatent as sl
from scalelatent.data import Dataset
from scalelatent.generators.images import image_set

if TYPE_CHECKING:
    import torch

# Numbers of training images, of test images, and of images with hidden halves.
TRAINING, TEST, FILLED = 100, 10_000, 1_000
# Side of a trait and gap between traits, in pixels.
SIZE, GAP = 13, 2
PATTERNS = 4
ALL_PARTS = "clusters,supervised,few,filled,leaves,flips,read"
# Part leaves: damping by the number of leaves (ranges of images whose messages change at the same time).
DAMPING = {2: 0.1, 5: 0.1, 20: 0.05}
# Shares of flipped pixels, and the largest number of passes of a fit, in the part flips.
FLIPS, PASSES = (0.0, 0.001, 0.01, 0.03, 0.1), 200
# Assumed noise of test images in the part read: (p01, p10), the probabilities that noise turns an on pixel
# off, and an off pixel on.
NOISES = ((1e-3, 1e-3), (1e-2, 1e-2), (0.1, 0.1), (0.3, 0.3), (0.2, 1e-4), (1e-4, 0.2))
READ_IMAGES = 2_000
# Part flips: weight decays of the convolutional networks to choose from, and their number of epochs.
DECAYS, EPOCHS = (1e-4, 1e-1), 100


def make_rows(seed: int, labels: str, start: int, stop: int, **how: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return rows ``start`` to ``stop`` of the images and labels of a seed; training images come first."""
    x, y = image_set("traits", seed=seed, labels=labels, size=SIZE, gap=GAP, **how).rows(start, stop)
    assert y is not None
    return x, y.astype(np.int64)


def fit_network(
    seed: int, templates: int, x: np.ndarray, y: np.ndarray | None, leaves: int = 1, **how: Any
) -> tuple[Any, dict[str, Any]]:
    """Fit a network to images x, with labels y or without; return the network and its results."""
    model = sl.HierarchicalCompositionalNetwork(
        [(4, SIZE)],
        templates=templates,
        online=False,
        n_chains=leaves,
        random_state=seed,
        n_jobs=1,
        **how,
    )
    begin = time.process_time()
    model.fit(Dataset.from_arrays(x, y), engine={"leaf_rows": TRAINING // leaves})
    seconds = time.process_time() - begin
    last, traits = model.history_[-1], image_set("traits", size=SIZE).features
    return model, {
        "records": len(model.history_),
        "restarts": int(last["restart"]),
        "settled": not last["weights_changed"],
        "cpu_seconds": round(seconds, 1),
        "weights_on": last["weights_on_by_layer"],
        "overlaps": np.round(compute_overlaps(model.weights_[0], traits), 2).tolist(),
    }


def compute_error(found: np.ndarray, true: np.ndarray) -> float:
    """Return the share of images whose class in ``found`` differs from that in ``true``."""
    return round(float((found != true).mean()), 6)


def fit_clusters(seed: int, **how: Any) -> tuple[Any, dict[str, Any]]:
    """Fit a network without labels; return it and its results. Training images name its clusters."""
    x, y = make_rows(seed, "pattern", 0, TRAINING)
    model, reported = fit_network(seed, PATTERNS, x, None, **how)
    counts = np.zeros((PATTERNS, PATTERNS), int)
    np.add.at(counts, (model.predict(x), y), 1)
    pattern_of_cluster = linear_sum_assignment(-counts)[1]
    test, true = make_rows(seed, "pattern", TRAINING, TRAINING + TEST)
    errors = {
        "test_error": compute_error(pattern_of_cluster[model.predict(test)], true),
        "training_error": compute_error(pattern_of_cluster[model.predict(x)], y),
    }
    return model, errors | reported


def fit_with_labels(seed: int, labels: str, n_labelled: int) -> dict[str, Any]:
    """Fit a network with labels of ``n_labelled`` images (all, or one per pattern); return its results."""
    x, y = make_rows(seed, labels, 0, TRAINING)
    if n_labelled < TRAINING:
        first = [np.flatnonzero(y == code)[0] for code in range(n_labelled)]
        y[np.setdiff1d(np.arange(TRAINING), first)] = -1
    model, reported = fit_network(seed, 2 if labels == "category" else 1, x, y)
    test, true = make_rows(seed, labels, TRAINING, TRAINING + TEST)
    return {"test_error": compute_error(model.predict(test), true), **reported}


def compare_read_noise(seed: int) -> dict[str, Any]:
    """Classify test images by one network with several values of its assumed noise.

    Return the errors, and the shares of images whose class differs from the class at the first value.
    """
    x, y = make_rows(seed, "category", 0, TRAINING)
    model, reported = fit_network(seed, 2, x, y)
    test, true = make_rows(seed, "category", TRAINING, TRAINING + READ_IMAGES)
    found = {
        f"{p01:g}, {p10:g}": model.set_params(read_noise=(p01, p10)).predict(test) for p01, p10 in NOISES
    }
    first = next(iter(found.values()))
    return {
        "errors": {name: compute_error(classes, true) for name, classes in found.items()},
        "changed": {name: compute_error(classes, first) for name, classes in found.items()},
        **reported,
    }


def make_networks() -> dict[str, torch.nn.Module]:
    """Return untrained convolutional networks that score two categories, by name."""
    import torch  # Only the part flips needs torch.

    nn, relu = torch.nn, torch.nn.ReLU()
    pool, half = nn.MaxPool2d(3, 1, 1), nn.MaxPool2d(3, 2, 1)
    best = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.MaxPool3d((1, 1, 2)), nn.Flatten())
    same = pool, nn.Conv2d(1, 4, SIZE), pool, nn.Flatten(), nn.LazyLinear(4), best
    low, high = (nn.Conv2d(1, 32, 3), relu, half), (nn.Conv2d(32, 64, 3), relu, half)
    top = nn.Flatten(), nn.LazyLinear(128), relu, nn.Linear(128, 2)
    return {"same form": nn.Sequential(*same), "standard": nn.Sequential(*low, *high, *top)}


def train_network(seed: int, name: str, x: np.ndarray, y: np.ndarray, decay: float) -> torch.nn.Module:
    """Train a convolutional network by name, on images x with classes y, with cross-entropy."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    net, given = make_networks()[name], torch.tensor(x[:, None], dtype=torch.float32)
    net(given[:1])
    steps = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=decay)
    for _ in range(EPOCHS):
        for part in torch.randperm(len(given)).split(10):
            steps.zero_grad()
            torch.nn.functional.cross_entropy(net(given[part]), torch.tensor(y[part.numpy()])).backward()
            steps.step()
    return net


def predict_categories(net: torch.nn.Module, x: np.ndarray) -> np.ndarray:
    """Return the categories of images x that a convolutional network predicts."""
    import torch

    with torch.no_grad():
        return net(torch.tensor(x[:, None], dtype=torch.float32)).argmax(dim=1).numpy()


def compare_flips(seed: int, share: float) -> dict[str, Any]:
    """Return test errors of networks whose training images have a share of flipped pixels."""
    x, y = make_rows(seed, "category", 0, TRAINING, noise=share)
    test, true = make_rows(seed, "category", TRAINING, TRAINING + TEST)
    others = make_rows(seed, "category", TRAINING + TEST, TRAINING + TEST + 1_000)
    noise = max(share, 1e-3)
    model, reported = fit_network(seed, 2, x, y, p01=noise, p10=noise, n_epochs=PASSES)
    errors = {"compositional": compute_error(model.predict(test), true)}
    for name in make_networks():
        nets = [train_network(seed, name, x, y, decay) for decay in DECAYS]
        net = min(nets, key=lambda net: compute_error(predict_categories(net, others[0]), others[1]))
        errors[name] = compute_error(predict_categories(net, test), true)
    return {"errors": errors, **reported}


def draw_masks(n: int, shape: tuple[int, int], seed: int) -> np.ndarray:
    """Return masks (n, h, w) of known pixels; they hide half of each trait: upper, lower, left or right."""
    known, rng = np.ones((n, *shape), bool), np.random.default_rng(seed)
    middle, width = 1 + SIZE // 2, SIZE + 3
    for given in known:
        for begin in (0, SIZE + GAP):
            trait, half = given[:, begin : begin + width], rng.integers(4)
            cut = middle + 1
            hidden = [np.s_[:cut], np.s_[cut:], np.s_[:, :cut], np.s_[:, cut:]][half]
            trait[hidden] = False
    return known


def fill_hidden_halves(seed: int, model: Any) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Hide half of each trait, and fill it; return how well filled and true pixels agree, and pictures."""
    x, _ = make_rows(seed, "pattern", TRAINING, TRAINING + FILLED)
    known, true = draw_masks(FILLED, x.shape[1:], seed), x.astype(bool)
    whole = model.inpaint(x, known)[:, 0].astype(bool)
    made, hidden = whole & ~known, true & ~known
    near_true, near_made = (binary_dilation(images, np.ones((1, 3, 3))) for images in (true, whole))
    shown = [np.where(known, 1.0 - x, 0.8), 1.0 - whole, 1.0 - x]
    return {
        "filled_near_a_true_pixel": round(float(near_true[made].mean()), 4),
        "hidden_near_a_filled_pixel": round(float(near_made[hidden].mean()), 4),
        "filled_of_hidden": round(float(made.sum() / hidden.sum()), 3),
    }, [picture[:PATTERNS] for picture in shown]


def draw_figure(path: Any, model: Any, shown: list[np.ndarray]) -> None:
    """Draw features, templates and filled images into a PNG file."""
    templates, features = model.weights_[-1], model.weights_[0]
    over = templates.reshape(-1, *templates.shape[2:])
    lines = [
        [
            ("features", arrange_tiles(features[:, 0], 2)),
            ("templates x features", arrange_tiles(over, len(features))),
        ]
    ]
    names = ("half of each trait hidden", "filled in", "the test image")
    lines.append([(name, arrange_tiles(1 - images, 1)) for name, images in zip(names, shown, strict=True)])
    draw_pictures(path, lines)


def main() -> None:
    arguments = parser(__doc__, "hcn_traits")
    arguments.add_argument("--parts", default=ALL_PARTS, help="parts to run, separated by commas")
    arguments.add_argument("--seeds", type=int, default=5, help="number of seeds, from --seed on")
    args = arguments.parse_args()
    parts = args.parts.split(",")
    reported: dict[str, dict[str, Any]] = defaultdict(dict)

    def record(part: str, seed: int, found: dict[str, Any]) -> None:
        reported[part][str(seed)] = found
        print(part, seed, found, flush=True)
        write_part(args.out, part, args.seed, reported[part])

    for seed in range(args.seed, args.seed + args.seeds):
        if {"clusters", "filled"} & set(parts):
            model, found = fit_clusters(seed)
            if "clusters" in parts:
                record("clusters", seed, found)
            if "filled" in parts:
                share, shown = fill_hidden_halves(seed, model)
                record("filled", seed, share)
                if seed == args.seed:
                    draw_figure(args.out.with_suffix(".png"), model, shown)
        if "supervised" in parts:
            record("supervised", seed, fit_with_labels(seed, "category", TRAINING))
        if "few" in parts:
            record("few", seed, fit_with_labels(seed, "pattern", PATTERNS))
        if "leaves" in parts:
            for leaves, damping in DAMPING.items():
                record(f"{leaves} leaves", seed, fit_clusters(seed, leaves=leaves, damping=damping)[1])
        if "read" in parts:
            record("read", seed, compare_read_noise(seed))
        if "flips" in parts:
            for share in FLIPS:
                record(f"flips {share:g}", seed, compare_flips(seed, share))


if __name__ == "__main__":
    main()
