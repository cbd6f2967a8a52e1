"""Measure the errors of compositional networks on few MNIST digits, clean and corrupted (Figures 9 and 12).

    python benchmarks/hcn_digits.py [--parts hcn,layers,rivals] [--seeds 3]

The paper is Lázaro-Gredilla et al. (2016). Fits use the first 40 training digits of each class. Oriented
filters turn grey values into edges. A network first learns features and templates (prototypes of a class,
made of features) in one online epoch. Then it learns the templates again, at first each from one digit, in
`--template-passes` passes over the digits.

Errors are shares of 10,000 test digits or of held-out digits, clean or corrupted. Six corruptions flip 10 %
of the pixels, add a border of up to 3 pixels, a patch of 8 x 8 random pixels, a grid with a pitch of 7 pixels
or three crossing lines, or delete 10 % of the pixels and three rows or columns. All settings were chosen on
held-out training digits (from row 50,000 on), which no fit uses. The parts, of which all but rivals fit a
network for each seed, are:

hcn      Errors with the `read_noise` (assumed noise of images to classify) that is best on 400 held-out
         digits, and the CPU seconds of a fit on one thread. Another result is the number of edges that the
         templates draw without noise, divided by the number of edges in the training digits.
objects  Labels and positions of two test digits in one image of 28 x 64 pixels. The class layer of the
         fitted network is replaced (`with_classes`, section 2.4); nothing is fitted again.
more     Test errors of templates that are learned from 40 to 600 digits per class, with unchanged features.
trial    Errors of the setting of the command line on 400 held-out digits.
layers   Errors of variants on 400 held-out digits. A pool lets a feature shift by a pixel. The variants have
         pools with equally likely shifts, no pools, the templates of the online epoch, or fixed features: a
         single edge, or an edge at any place of 3 x 3 pixels.
noise    Errors on 2,000 held-out digits with two values of the assumed noise: the noise of the fit, and
         --read-noise. Each value is used to learn templates, and each to classify images.
thin     Templates that are learned with other assumed noise, so that they have fewer weights: the edges that
         they draw, and the smallest error on 400 held-out digits over several values of `read_noise`.
rivals   Other classifiers, fitted on the same digits, with settings chosen on 2,000 held-out digits: nearest
         neighbours by grey values; the digit whose edges match best; logistic regression on the largest edge
         in each 3 x 3 pixels; a convolutional network of the same form (pools, features of 3 x 3, the best
         template of each class); and a standard convolutional network with ReLU.
pictures Draws results/hcn_digits.png (features), hcn_digits_templates.png and hcn_digits_corrupted.png.

The part rivals also draws the first weights of both convolutional networks (hcn_digits_form.png and
hcn_digits_standard.png). Needs SCALELATENT_DATA and torch.
"""

from __future__ import annotations

import argparse
import copy
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import mnist, parser, write_part
from hcn_common import arrange_tiles, draw_pictures
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier

import scalelatent as sl
from scalelatent.contract.learners import Block
from scalelatent.contract.stats import Stats
from scalelatent.data import Dataset
from scalelatent.engine.backend import make_backend
from scalelatent.generators.corrupted import CorruptedImages
from scalelatent.kernels.streams import stream
from scalelatent.models.hcn.model.filters import OrientedFilters
from scalelatent.models.hcn.model.layer import from_features
from scalelatent.models.hcn.model.templates import TemplateEvidence, choose_first_images

# Number of classes, default number of training digits per class, and side of a digit in pixels.
CLASSES, DIGITS_PER_CLASS, SIDE = 10, 40, 28
# Held-out training rows, which no fit uses: settings of the other classifiers are chosen on the first range,
# and those of compositional networks on the second one, which is a part of the first.
RIVAL_CHOICE_ROWS, NETWORK_CHOICE_ROWS = slice(50_000, 52_000), slice(50_000, 50_400)
CORRUPTIONS: dict[str, dict[str, Any]] = {
    "flips": {"importer": "noisy-digits", "share": 0.1},
    "border": {"importer": "bordered-digits", "width": 3},
    "patches": {"importer": "patched-digits", "patch": [8, 8]},
    "grid": {"importer": "gridded-digits", "pitch": 7},
    "line clutter": {"importer": "cluttered-digits", "lines": 3},
    "deletion": {"importer": "deleted-digits", "share": 0.1, "lines": 3},
}
# Digits whose templates the part "pictures" draws.
DRAWN_CLASSES = (2, 5)
# Pairs (p01, p10): the probabilities that noise turns an on pixel off, and that noise turns an off pixel on.
# The classifier by matching edges chooses one of these pairs, and the part "thin" adds them to READ_NOISES.
NOISE_PAIRS = [(p01, p10) for p01 in (0.01, 0.05, 0.2) for p10 in (1e-3, 1e-2)]
# Pairs (p01, p10) from which the noise that a network assumes in images to classify (`read_noise`) is chosen.
READ_NOISES = [(0.2, p10) for p10 in (1e-4, 2e-4, 5e-4, 1e-3)]
# Pairs (p01, p10) with which the part "thin" learns templates: the default, and four for fewer weights.
THIN_NOISES = [(0.2, 1e-4), (0.05, 1e-3), (0.01, 3e-3), (1e-3, 3e-3), (1e-3, 0.03)]
# Width in pixels of an image with two digits.
WIDE_WIDTH = 64
# Parts of the benchmark that run unless --parts names others.
DEFAULT_PARTS = "hcn,layers,objects,noise,thin,pictures,rivals"
Predict = Callable[[np.ndarray], np.ndarray]


def load_digits(rows: slice, part: str = "train") -> tuple[np.ndarray, np.ndarray]:
    """Return grey images (n, 28, 28) uint8 and labels of a range of MNIST rows."""
    x, y = mnist(rows, part)
    return x.reshape(-1, SIDE, SIDE), y.astype(np.int64)


def select_first_digits(n: int = DIGITS_PER_CLASS) -> tuple[np.ndarray, np.ndarray]:
    """Return the first n training digits of each class, in the order of the file."""
    x, y = load_digits(slice(0, max(5_000, 12 * CLASSES * n)))
    chosen = np.sort(np.concatenate([np.flatnonzero(y == code)[:n] for code in range(CLASSES)]))
    return x[chosen], y[chosen]


def corrupt_images(x: np.ndarray, name: str, seed: int) -> np.ndarray:
    """Return images with the named corruption, which the seed draws; "clean" returns them unchanged."""
    if name == "clean":
        return x
    how = {**CORRUPTIONS[name], "seed": seed, "threshold": None, "base_rows": [0, len(x)]}
    return CorruptedImages(Dataset.from_arrays(x), how).rows(0, len(x))[0]


def make_network(args: Any, seed: int) -> sl.HierarchicalCompositionalNetwork:
    """Return an unfitted network with the settings of the command line."""
    return sl.HierarchicalCompositionalNetwork(
        [(args.features, args.feature_size)],
        templates=args.templates,
        filters=args.filters,
        filter_size=args.filter_size,
        p01=args.p01,
        p10=args.p10,
        p_weight=args.p_weight,
        online=True,
        forgetting=args.forgetting,
        batch_size=args.batch_size,
        n_epochs=args.epochs,
        damping=args.damping,
        inner_iterations=args.inner_iterations,
        template_passes=0,
        random_state=seed,
        n_jobs=1,
    )


def measure_errors(predict: Predict, args: Any, held_out: bool = False) -> dict[str, float]:
    """Return the error rates on test digits, or on held-out training digits, clean and corrupted."""
    x, y = load_digits(NETWORK_CHOICE_ROWS) if held_out else load_digits(slice(0, args.test_rows), "test")
    found = {}
    for name in ("clean", *CORRUPTIONS):
        n = args.test_rows if name == "clean" else args.corrupted_rows
        reported = predict(corrupt_images(x[:n], name, args.seed))
        found[name] = round(float((reported != y[:n]).mean()), 4)
    found["mean of corruptions"] = round(float(np.mean([found[name] for name in CORRUPTIONS])), 4)
    return found


def find_edges(x: np.ndarray, args: Any) -> np.ndarray:
    """Return the edges of images, bool (images, filters, 28, 28)."""
    return OrientedFilters(args.filters, args.filter_size).find_edges(np.ascontiguousarray(x))


def spread_edges(on: np.ndarray) -> np.ndarray:
    """Return whether an edge is on in the 3 x 3 pixels around each pixel: bool (images, filters, h, w)."""
    wide = np.pad(on, ((0, 0), (0, 0), (1, 1), (1, 1)))
    rows = wide[:, :, :-2] | wide[:, :, 1:-1] | wide[:, :, 2:]
    return rows[..., :-2] | rows[..., 1:-1] | rows[..., 2:]


def compare_drawn_edges(model: Any, x: np.ndarray, args: Any) -> float:
    """Return the edges per image that templates draw without noise, divided by those per training digit."""
    made = model.sample(args.drawn, noise=False, random_state=args.seed).reshape(args.drawn, -1)
    made = made[made.any(axis=1)]  # A template without weights draws an empty image.
    return round(float(made.sum() / len(made) / (find_edges(x, args).sum() / len(x))), 3)


def measure_density(model: Any, x: np.ndarray, y: np.ndarray, args: Any) -> dict[str, Any]:
    """Return edges per digit, counts and mean weights of used features and templates, and training error."""
    edges_per_image = find_edges(x, args).sum() / len(x)
    features, templates = (w.reshape(len(w), -1).sum(axis=1) for w in model.weights_)
    return {
        "training_error": round(1 - model.score(Dataset.from_arrays(x, y)), 4),
        "edges_of_a_digit": round(float(edges_per_image), 1),
        "edges_drawn_over_those": compare_drawn_edges(model, x, args),
        "features_used": int((features > 0).sum()),
        "weights_of_a_used_feature": round(float(features[features > 0].mean()), 1),
        "templates_used": int((templates > 0).sum()),
        "weights_of_a_used_template": round(float(templates[templates > 0].mean()), 1),
    }


class ConvolutionalForm(torch.nn.Module):
    """Torch module that computes class scores from edges.

    A standard one has two convolutions with ReLU. The other one has the form of a compositional network:
    pools (shifts by a pixel), linear features, and the best template of each class.
    """

    def __init__(self, args: Any, standard: bool) -> None:
        super().__init__()
        self.standard, n = standard, args.features
        self.low = torch.nn.Conv2d(args.filters, n, 3)
        if standard:
            self.high = torch.nn.Conv2d(n, n, 3)
            self.top = torch.nn.Sequential(
                torch.nn.Flatten(),
                torch.nn.Linear(n * 4, 128),
                torch.nn.ReLU(),
                torch.nn.Linear(128, CLASSES),
            )
        else:
            self.top = torch.nn.Linear(n * (SIDE - 2) ** 2, CLASSES * args.templates)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.standard:
            x = torch.nn.functional.max_pool2d(torch.relu(self.low(x)), 3)
            return self.top(torch.nn.functional.max_pool2d(torch.relu(self.high(x)), 3))
        x = self.low(torch.nn.functional.max_pool2d(x, 3, 1, 1))
        x = self.top(torch.nn.functional.max_pool2d(x, 3, 1, 1).flatten(1))
        return x.unflatten(1, (CLASSES, -1)).amax(dim=2)


@dataclass(frozen=True, eq=False)
class ConvolutionalNetwork:
    """Convolutional network that classifies grey images."""

    net: ConvolutionalForm
    args: Any

    @classmethod
    def trained(
        cls, x: np.ndarray, y: np.ndarray, args: Any, *, standard: bool, decay: float
    ) -> ConvolutionalNetwork:
        """Return a network trained on images x with classes y, by cross-entropy with weight decay."""
        torch.manual_seed(args.seed)
        net, given = ConvolutionalForm(args, standard), torch.tensor(find_edges(x, args), dtype=torch.float32)
        steps = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=decay)
        for _ in range(args.cnn_epochs):
            for rows in torch.randperm(len(given)).split(40):
                steps.zero_grad()
                torch.nn.functional.cross_entropy(net(given[rows]), torch.tensor(y)[rows]).backward()
                steps.step()
        return cls(net, args)

    @torch.no_grad()
    def __call__(self, images: np.ndarray) -> np.ndarray:
        parts = np.array_split(images, max(1, len(images) // 250))
        on = (torch.tensor(find_edges(part, self.args), dtype=torch.float32) for part in parts)
        return np.concatenate([self.net(part).argmax(dim=1).numpy() for part in on])


def place_side_by_side(n: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return n images of two test digits, both labels, and the column at which the second digit starts."""
    x, y = load_digits(slice(0, 2 * n), "test")
    wide, begins = np.zeros((n, SIDE, WIDE_WIDTH), np.uint8), stream(seed, "two digits").integers(SIDE, 37, n)
    for row, at in enumerate(begins):
        wide[row, :, :SIDE], wide[row, :, at : at + SIDE] = x[row], x[n + row]
    return wide, np.stack([y[:n], y[n:]], axis=1), begins


def classify_side_by_side(model: Any, args: Any) -> dict[str, float]:
    """Return shares: images with both digits right, right digits, columns within 2 pixels, exact searches."""
    wide, y, begins = place_side_by_side(args.wide_rows, args.seed)
    found = model.with_classes((SIDE, WIDE_WIDTH)).predict(wide)
    order = np.argsort(found.positions[:, :, 1], axis=1)
    labels = np.take_along_axis(found.labels, order, axis=1)
    columns = np.take_along_axis(found.positions[:, :, 1], order, axis=1)
    near = np.abs(columns - np.stack([np.zeros_like(begins), begins], axis=1)) <= 2
    return {
        "both_right": round(float((labels == y).all(axis=1).mean()), 4),
        "right": round(float((labels == y).mean()), 4),
        "within_two_pixels": round(float(near.mean()), 4),
        "search_was_exact": round(float(found.exact.mean()), 4),
    }


def fit_neighbours(x: np.ndarray, y: np.ndarray, k: int) -> Predict:
    """Return a classifier by the k nearest digits in grey values."""
    model = KNeighborsClassifier(k, algorithm="brute").fit(x.reshape(len(x), -1) / 255.0, y)
    return lambda images: model.predict(images.reshape(len(images), -1) / 255.0)


def fit_exemplars(x: np.ndarray, y: np.ndarray, args: Any, p01: float, p10: float) -> Predict:
    """Return a classifier by the training digit whose edges explain an image best.

    Noise removes an edge with probability p01, and adds one with p10. Edges may shift by up to two pixels.
    """
    off, on = np.log(p01 / (1 - p10)), np.log((1 - p01) / p10)
    training_edges = find_edges(x, args).reshape(len(x), -1).astype(np.float32)

    def predict(images: np.ndarray) -> np.ndarray:
        found = []
        for part in np.array_split(images, max(1, len(images) // 500)):
            near = spread_edges(spread_edges(find_edges(part, args))).reshape(len(part), -1)
            found.append((np.where(near, on, off).astype(np.float32) @ training_edges.T).argmax(axis=1))
        return y[np.concatenate(found)]

    return predict


def fit_logistic(x: np.ndarray, y: np.ndarray, args: Any, penalty: float) -> Predict:
    """Return a classifier by logistic regression; ``penalty`` is scikit-learn's C (larger: weaker penalty).

    Its features say whether each filter has an edge in each square of 3 x 3 pixels.
    """

    def pooled(images: np.ndarray) -> np.ndarray:
        return (
            spread_edges(find_edges(images, args))[:, :, 1::3, 1::3]
            .reshape(len(images), -1)
            .astype(np.float32)
        )

    model = LogisticRegression(C=penalty, max_iter=300).fit(pooled(x), y)
    return lambda images: model.predict(pooled(images))


def list_rivals(
    x: np.ndarray, y: np.ndarray, args: Any
) -> Iterator[tuple[str, list[tuple[str, Callable[[], Predict]]]]]:
    """Yield (name, settings) of each other classifier; a setting is a name and a function that fits it."""
    yield "the nearest digit", [(f"k = {k}", lambda k=k: fit_neighbours(x, y, k)) for k in (1, 3)]
    yield (
        "each digit a template",
        [(f"p01 {a:g}, p10 {b:g}", lambda a=a, b=b: fit_exemplars(x, y, args, a, b)) for a, b in NOISE_PAIRS],
    )
    yield (
        "logistic regression",
        [(f"C = {c:g}", lambda c=c: fit_logistic(x, y, args, c)) for c in (0.01, 0.1, 1)],
    )
    for name, standard in (("convolutional, same form", False), ("convolutional, standard", True)):
        fit = functools.partial(ConvolutionalNetwork.trained, x, y, args, standard=standard)
        yield name, [(f"decay {decay:g}", functools.partial(fit, decay=decay)) for decay in args.decays]


def choose_read_noise(model: Any) -> tuple[str, float, Predict]:
    """Choose the assumed noise by the error on 400 held-out digits; return its name, error and classifier."""
    return choose_setting([set_read_noise(model, *noise) for noise in READ_NOISES], NETWORK_CHOICE_ROWS)


def choose_setting(
    settings: list[tuple[str, Callable[[], Predict]]], rows: slice = RIVAL_CHOICE_ROWS
) -> tuple[str, float, Predict]:
    """Fit all settings (name, function); return name, error and classifier of the best on held-out digits."""
    x, y = load_digits(rows)
    found = []
    for name, fit in settings:
        predict = fit()
        found.append((name, round(float((predict(x) != y).mean()), 4), predict))
        print(f"  {name}: {found[-1][1]}", flush=True)
    return min(found, key=lambda setting: setting[1])


def replace_pools(model: Any, **pools: Any) -> Any:
    """Return a network with the same weights whose pools (shifts of features by a pixel) are changed.

    ``pools`` has fields of the network: ``spread`` 0 makes all shifts equally likely, ``side`` 1 allows none.
    """
    other, network = copy.copy(model), model._network
    other._network = replace(network, net=replace(network.net, **pools))
    return other


def fit_over_features(model: Any, features: np.ndarray, x: np.ndarray, y: np.ndarray, args: Any) -> Any:
    """Return a copy of a network with templates learned from digits x over ``features``, at read noise."""
    network = model._network
    low, top = network.net.layers
    p01, p10 = args.read_noise
    low = replace(low, n_features=len(features), p01=p01, p10=p10)
    net = replace(
        network.net,
        layers=(low, replace(top, image=(len(features), *top.image[1:]), p_weight=args.p_weight[1])),
    )
    first = net.first_beliefs()
    reported, beliefs = from_features(features).ravel(), first.copy()
    beliefs[: len(reported)] = np.where(reported, 1.0, -1.0)
    numbers = stream(net.seed, "hcn first images").choice(len(x), len(x), replace=False)
    images, backend = choose_first_images(net, numbers, y[numbers]), make_backend("cpu")
    flat = x.reshape(len(x), -1)
    for number in range(args.template_passes):
        evidence = TemplateEvidence(net, beliefs, *(images if number == 0 else (None, None)))
        stats = Stats.zeros(evidence.layout())
        for a in range(0, len(x), 40):
            block = Block(flat[a : a + 40], y[a : a + 40], None, a)
            evidence.accumulate(evidence.prepare(None, backend), block, stats)
        beliefs = evidence.update_beliefs(first, stats)
    other = copy.copy(model)
    other._network = replace(network, net=net)
    other._stream = replace(model._stream, beliefs=beliefs, first=first)
    return other


def make_fixed_features(filters: int) -> dict[str, np.ndarray]:
    """Return two sets of features: an edge of one filter in the middle of 3 x 3 pixels, or at any of them."""
    edge, anywhere = (np.zeros((filters, filters, 3, 3), bool) for _ in range(2))
    channels = np.arange(filters)
    edge[channels, channels, 1, 1] = anywhere[channels, channels] = True
    return {"an edge each": edge, "an edge anywhere": anywhere}


def set_read_noise(model: Any, p01: float, p10: float) -> tuple[str, Callable[[], Predict]]:
    """Return a name, and a function that returns the classifier with the assumed noise (``p01``, ``p10``)."""
    other = copy.copy(model).set_params(read_noise=(p01, p10))
    return f"p01 {p01:g}, p10 {p10:g}", lambda: other.predict


def draw_channels(on: np.ndarray, args: Any) -> np.ndarray:
    """Return sums of the filters of edges (n, channels, h, w) as images from 0 to 1; 0.5 means no edge."""
    half = OrientedFilters(args.filters, args.filter_size).weights
    kernels = torch.tensor(np.concatenate([half, -half])[:, None], dtype=torch.float32)
    drawn = torch.nn.functional.conv_transpose2d(torch.tensor(on, dtype=torch.float32), kernels)[:, 0].numpy()
    most = np.abs(drawn).max(axis=(1, 2), keepdims=True)
    return 0.5 + 0.5 * drawn / np.where(most > 0, most, 1)


def find_template_edges(model: Any, templates: np.ndarray) -> np.ndarray:
    """Return the edges that templates draw without shifts, bool (templates, channels, 28, 28)."""
    features, over = (torch.tensor(w.astype(np.float32)) for w in model.weights_)
    return (torch.nn.functional.conv_transpose2d(over[templates], features) > 0).numpy()


def draw_figures(args: Any, model: Any) -> None:
    """Draw the features, the templates of two classes, and corrupted digits, into PNG files."""
    features = model.weights_[0]
    used = features[features.reshape(len(features), -1).any(axis=1)]
    line = [(f"{len(used)} features of {len(features)}", arrange_tiles(1 - draw_channels(used, args), 8))]
    draw_pictures(args.out.with_suffix(".png"), [line])
    shown = []
    for code in DRAWN_CLASSES:
        chosen = np.flatnonzero(model.template_classes_ == code)
        drawn = draw_channels(find_template_edges(model, chosen), args)
        shown.append((f"{len(chosen)} templates of {code}", arrange_tiles(1 - drawn, 8)))
    draw_pictures(args.out.with_name(f"{args.out.stem}_templates.png"), [shown])
    x, _ = load_digits(slice(0, 8), "test")
    row = [
        (name, arrange_tiles(corrupt_images(x, name, args.seed) / 255, 2)) for name in ("clean", *CORRUPTIONS)
    ]
    draw_pictures(args.out.with_name(f"{args.out.stem}_corrupted.png"), [row[:4], row[4:]])


def load_or_fit(
    args: Any, seed: int, x: np.ndarray, y: np.ndarray
) -> tuple[sl.HierarchicalCompositionalNetwork, dict[str, float]]:
    """Fit a network, and return it with its CPU seconds; return a saved one, with {}, if --models has it."""
    place = args.models and args.models / f"digits-{seed}"
    if place and place.exists():
        return sl.load_model(place), {}
    begin = time.process_time()
    model = make_network(args, seed).fit(Dataset.from_arrays(x, y))
    seconds = {"cpu_seconds": round(time.process_time() - begin, 1)}
    if place:
        model.save(place)
    return model, seconds


def describe_setting(args: Any) -> str:
    """Return the options of a network as text; the text is part of a key of the result file."""
    names = ("each", "features", "feature_size", "templates", "filters", "filter_size")
    names += ("p01", "p10", "p_weight", "forgetting", "batch_size", "epochs", "damping", "inner_iterations")
    names += ("template_passes", "read_noise")
    return ", ".join(f"{name} {getattr(args, name)}" for name in names)


def main() -> None:
    arguments = parser(__doc__, "hcn_digits")
    arguments.add_argument(
        "--parts", default=DEFAULT_PARTS, help="parts to run, separated by commas; also: trial, more"
    )
    arguments.add_argument("--seeds", type=int, default=3, help="number of networks, from --seed on")
    arguments.add_argument("--test-rows", type=int, default=10_000, help="number of clean test digits")
    arguments.add_argument(
        "--corrupted-rows", type=int, default=10_000, help="number of test digits with each corruption"
    )
    arguments.add_argument("--features", type=int, default=32)
    arguments.add_argument("--feature-size", type=int, default=3)
    arguments.add_argument("--templates", type=int, default=32)
    arguments.add_argument("--filters", type=int, default=16)
    arguments.add_argument("--filter-size", type=int, default=5)
    arguments.add_argument("--p01", type=float, default=0.05)
    arguments.add_argument("--p10", type=float, default=1e-3)
    arguments.add_argument("--p-weight", type=float, nargs=2, default=[0.01, 0.001])
    arguments.add_argument("--forgetting", type=float, default=0.98)
    arguments.add_argument("--batch-size", type=int, default=10)
    arguments.add_argument("--epochs", type=int, default=1)
    arguments.add_argument("--damping", type=float, default=0.1)
    arguments.add_argument("--inner-iterations", type=int, default=10)
    arguments.add_argument("--template-passes", type=int, default=5)
    arguments.add_argument("--read-noise", type=float, nargs=2, default=[0.2, 1e-4])
    arguments.add_argument(
        "--more",
        type=int,
        nargs="+",
        default=[40, 100, 300, 600],
        help="training digits per class in the part more",
    )
    arguments.add_argument("--rivals", help="run only the other classifiers whose names contain this text")
    arguments.add_argument(
        "--models", type=Path, help="folder of fitted networks: existing ones are loaded, new ones are saved"
    )
    arguments.add_argument("--each", type=int, default=DIGITS_PER_CLASS, help="training digits per class")
    arguments.add_argument("--wide-rows", type=int, default=500, help="number of images with two digits")
    arguments.add_argument(
        "--drawn", type=int, default=64, help="images drawn from the templates to count edges"
    )
    arguments.add_argument(
        "--decays",
        type=float,
        nargs="+",
        default=[1e-4, 1e-1],
        help="weight decays of the convolutional networks to choose from",
    )
    arguments.add_argument("--cnn-epochs", type=int, default=30)
    args = arguments.parse_args()
    parts, (x, y) = args.parts.split(","), select_first_digits(args.each)
    reported: dict[str, dict[str, Any]] = {part: {} for part in parts}

    def record(part: str, name: str, found: dict[str, Any]) -> None:
        reported.setdefault(part, {})[name] = found
        print(part, name, found, flush=True)
        write_part(args.out, part, args.seed, reported[part])

    if "rivals" in parts:
        for name, settings in list_rivals(x, y, args):
            if args.rivals and args.rivals not in name:
                continue
            how, held, predict = choose_setting(settings)
            found = {"errors": measure_errors(predict, args), "setting": how, "held_out_error": held}
            print(name, found, flush=True)
            write_part(args.out, f"rival {name}", args.seed, found)
            if isinstance(predict, ConvolutionalNetwork):
                first = predict.net.low.weight.detach().numpy()
                picture = (f"first weights, {name}", arrange_tiles(1 - draw_channels(first, args), 8))
                place = "standard" if predict.net.standard else "form"
                draw_pictures(args.out.with_name(f"{args.out.stem}_{place}.png"), [[picture]])
    for seed in range(args.seed, args.seed + args.seeds):
        if not {"hcn", "objects", "more", "layers", "noise", "thin", "pictures", "trial"} & set(parts):
            break
        joint, seconds = load_or_fit(args, seed, x, y)

        @functools.cache
        def fit_templates(joint: Any = joint) -> Any:
            return fit_over_features(joint, joint.weights_[0], x, y, args) if args.template_passes else joint

        if "trial" in parts:
            model = fit_templates()
            found = {
                "errors": measure_errors(model.predict, args, True),
                **measure_density(model, x, y, args),
                **seconds,
            }
            print(found, flush=True)
            write_part(args.out, f"trial {describe_setting(args)}", args.seed, found)
        if "hcn" in parts:
            found = {**measure_density(fit_templates(), x, y, args), **seconds}
            setting, held, predict = choose_read_noise(fit_templates())
            begin = time.process_time()
            found |= {"setting": setting, "held_out_error": held, "errors": measure_errors(predict, args)}
            rows = args.test_rows + len(CORRUPTIONS) * args.corrupted_rows
            found["cpu_milliseconds_an_image"] = round((time.process_time() - begin) / rows * 1e3, 2)
            n, side = args.features, args.feature_size
            suffix = "" if (n, side) == (32, 3) else f", {n} features of {side} x {side}"
            record(f"hcn{suffix}", str(seed), found)
        if "objects" in parts:
            record("objects", str(seed), classify_side_by_side(fit_templates(), args))
        if "more" in parts:
            found = {}
            for digits_per_class in args.more:
                mx, my = select_first_digits(digits_per_class)
                read = fit_over_features(joint, joint.weights_[0], mx, my, args)
                setting, held, predict = choose_read_noise(read)
                tx, ty = load_digits(slice(0, args.test_rows), "test")
                found[f"{digits_per_class} digits of a class"] = {
                    "test_error": round(float((predict(tx) != ty).mean()), 4),
                    "edges_drawn_over_those": compare_drawn_edges(read, mx, args),
                    "setting": setting,
                    "held_out_error": held,
                }
                record("more", str(seed), found)
        if "pictures" in parts and seed == args.seed:
            draw_figures(args, fit_templates())
        if "layers" in parts:
            model = fit_templates()
            even, none = replace_pools(model, spread=0.0), replace_pools(model, side=1)
            tx, ty = load_digits(NETWORK_CHOICE_ROWS)
            kinds = {"pools of the fit": model, "even pools": even, "no pools": none}
            if args.template_passes:
                kinds["templates learned with the features"] = joint
                # If weights of templates were less likely, each would cost more bits than its edge saves.
                likely = argparse.Namespace(**vars(args) | {"p_weight": (args.p_weight[0], 0.5)})
                for name, features in make_fixed_features(args.filters).items():
                    kinds[name] = fit_over_features(joint, features, x, y, likely)
            errors = {name: round(float((way.predict(tx) != ty).mean()), 4) for name, way in kinds.items()}
            record("layers", str(seed), errors)
        if "noise" in parts:
            fit, read = (args.p01, args.p10), tuple(args.read_noise)
            (hx, hy), found = load_digits(RIVAL_CHOICE_ROWS), {}
            for learned_by in (fit, read):
                noise = argparse.Namespace(**vars(args) | {"read_noise": learned_by})
                model = fit_over_features(joint, joint.weights_[0], x, y, noise)
                for read_by in (fit, read):
                    _, predict = set_read_noise(model, *read_by)
                    key = "templates by {:g}, {:g}; images by {:g}, {:g}".format(*learned_by, *read_by)
                    found[key] = round(float((predict()(hx) != hy).mean()), 4)
            record("noise", str(seed), found)
        if "thin" in parts:
            found = {}
            for p01, p10 in THIN_NOISES:
                noise = argparse.Namespace(**vars(args) | {"read_noise": (p01, p10)})
                thin = fit_over_features(joint, joint.weights_[0], x, y, noise)
                how, held, _ = choose_setting(
                    [set_read_noise(thin, *one) for one in (*NOISE_PAIRS, *READ_NOISES[:-1])],
                    NETWORK_CHOICE_ROWS,
                )
                found[f"p01 {p01:g}, p10 {p10:g}"] = {
                    "edges_drawn_over_those": compare_drawn_edges(thin, x, args),
                    "weights_of_a_template": round(float(thin.weights_[1].sum() / len(thin.weights_[1])), 1),
                    "setting": how,
                    "held_out_error": held,
                }
            record("thin", str(seed), found)


if __name__ == "__main__":
    main()
