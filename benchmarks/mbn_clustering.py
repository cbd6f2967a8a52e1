"""Cluster real data with bootstrap networks, and compare with Tables 3 and 4 of Zhang (2018).

    python benchmarks/mbn_clustering.py --parts wine,thyroid,umist,isolet1,coil20,mnist5000 [--seeds 10]
    python benchmarks/mbn_clustering.py --parts digits --pools auto  digits of scikit-learn, the default pools
    python benchmarks/mbn_clustering.py --parts mnist                all 70,000 images, k1 = 8,000, one seed
    python benchmarks/mbn_clustering.py --parts sweeps,k1            V, a (Figure 11) and k1 on 5,000 images
    python benchmarks/mbn_clustering.py --parts k1_mnist             k1 on 70,000 images, 100 clusterings
    python benchmarks/mbn_clustering.py --parts half_mnist --decays 0.5,0.7
                                                                     70,000 images, k1 = 35,000, 40 pools
    python benchmarks/mbn_clustering.py --parts spectral             spectral clustering of the paper's sets
    python benchmarks/mbn_clustering.py --parts plane                5,000 images in two dimensions, and each
                                                                     layer (Figures 8 and 16)
    python benchmarks/mbn_clustering.py --parts figures              figures of the measured parts, and of
                                                                     synthetic points (Figures 5, 6, 10, 11)

Each data set is clustered by k-means (the best of 50 starts by inertia) on four inputs: raw features; PCA
with 98 % of the variance; the same PCA, whitened, as in the paper; and the output of networks with as many
components as classes. The results are NMI and accuracy in percent, as mean and standard deviation over
--seeds networks; 3 seeds if a fit takes more than a minute. The decay of a network is the ratio of the
numbers of centroids in consecutive layers, k1 is the number in the first layer, V is the number of
clusterings in a layer, and a is the share of the features that a clustering uses. A pool is a set of random
rows from which several clusterings draw their centroids; the paper has none. The decays are those of
--decays, and decay="auto", which chooses one without labels.

In the part mnist all decays share one first layer. All sets but wine and digits need SCALELATENT_DATA. Below,
the first command measures "auto" again and keeps earlier decays, and the second adds seeds to earlier runs:

    python benchmarks/mbn_clustering.py --parts wine,thyroid,umist,isolet1,coil20,mnist5000
        --skip-baselines --skip-decays
    python benchmarks/mbn_clustering.py --parts mnist5000 --skip-baselines --decays 0.5,0.6,0.7 --more
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from common import RESULTS, data_folder, mnist, parser, write_part, write_png
from mbn_figures import (
    SHAPES,
    Sweep,
    outlier_example,
    plot_densities,
    plot_outlier,
    plot_sweeps,
    synthetic_points,
)
from sklearn.decomposition import PCA

import scalelatent as sl
from scalelatent.contract.learners import Block
from scalelatent.engine.backend import make_backend
from scalelatent.evaluation import kmeans_scores
from scalelatent.models.mbn.decay import code_rows
from scalelatent.models.mbn.fit import layer_components, plan_layers
from scalelatent.models.mbn.model.pca import CodeProjection
from scalelatent.models.mbn.report import collect_evidence
from scalelatent.models.mbn.report_figures import plot_layers, plot_output

PAPER_NETWORK: dict[str, Any] = {"n_pools": "paper", "decay": 0.5}
# To save time, a network whose fit takes over this number of seconds is fitted for only this number of seeds.
LONG_SECONDS, FEW_SEEDS = 60.0, 3
DECAYS = tuple(round(0.1 * i, 1) for i in range(1, 10))
# Tables 3 and 4 of Zhang (2018): NMI and accuracy in percent, each followed by its standard deviation. The
# methods are k-means on raw rows, k-means on PCA, networks with decay 0.5, and networks with the best decay.
PAPER: dict[str, dict[str, list[float]]] = {
    "isolet1": {"nmi": [77.21, 0.92, 56.74, 0.75, 77.89, 0.81, 77.97, 0.64],
                "accuracy": [61.47, 1.93, 38.62, 0.99, 61.13, 2.52, 62.50, 1.14]},
    "wine": {"nmi": [42.88, 0.0, 40.92, 0.0, 55.49, 4.07, 76.96, 3.24],
             "accuracy": [70.22, 0.0, 78.09, 0.0, 81.91, 2.61, 93.20, 1.77]},
    "thyroid": {"nmi": [49.46, 0.0, 49.46, 0.0, 68.80, 5.03, 75.78, 2.75],
                "accuracy": [86.05, 0.0, 86.05, 0.0, 93.02, 1.60, 94.51, 0.93]},
    "umist": {"nmi": [65.36, 1.21, 66.25, 1.10, 74.48, 1.91, 84.84, 1.98],
              "accuracy": [43.20, 1.66, 43.44, 1.92, 56.96, 3.73, 73.22, 4.02]},
    "mnist5000": {"nmi": [49.69, 0.14, 27.86, 0.08, 77.12, 0.35, 78.50, 0.84],
                  "accuracy": [52.64, 0.14, 34.49, 0.10, 82.36, 0.46, 87.06, 1.75]},
    "mnist": {"nmi": [50.32, 0.12, 28.05, 0.07, 91.36, 0.07],
              "accuracy": [53.48, 0.11, 35.14, 0.11, 96.64, 0.04]},
}  # fmt: skip
# NMI of spectral clustering in percent in Zhang (2018): with a fixed kernel width, and with the best width.
PAPER_SPECTRAL = {"isolet1": (75.51, 79.66), "wine": (41.58, 43.02), "thyroid": (39.63, 43.20),
                  "umist": (81.83, 84.66), "mnist5000": (62.06, 62.06)}  # fmt: skip
SET_TITLES = {"thyroid": "New-Thyroid", "wine": "Wine", "umist": "UMIST", "coil20": "COIL20",
         "isolet1": "Isolet1", "mnist5000": "MNIST (small)", "mnist": "MNIST"}  # fmt: skip


def load_rows(name: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows and the classes of a data set; the seed draws the images of "mnist5000"."""
    if name in ("wine", "digits"):
        from sklearn.datasets import load_digits, load_wine

        return (load_wine if name == "wine" else load_digits)(return_X_y=True)
    small = data_folder() / "small"
    if name in ("thyroid", "umist"):
        found = np.load(small / {"thyroid": "new_thyroid.npz", "umist": "umist.npz"}[name])
        return found["X"], found["y"]
    if name in ("coil20", "isolet1"):
        from scipy.io import loadmat

        found = loadmat(small / {"coil20": "COIL20.mat", "isolet1": "Isolet.mat"}[name])
        return found["X"], found["Y"].ravel()
    (x, y), (xt, yt) = mnist(), mnist(part="test")
    if name == "mnist":
        return np.concatenate([x, xt]), np.concatenate([y, yt])
    rng = np.random.default_rng(seed)  # "mnist5000" has 500 random images of each digit.
    rows = np.sort(np.concatenate([rng.permutation(np.flatnonzero(y == c))[:500] for c in range(10)]))
    return np.ascontiguousarray(x[rows]), y[rows]


def measure_kmeans(
    x: np.ndarray, y: np.ndarray, seeds: int, restarts: int, jobs: int | None
) -> dict[str, Any]:
    """Return NMI and accuracy of k-means on the rows x, over seeds of k-means."""
    scores = [kmeans_scores(x, y, restarts=restarts, random_state=s, n_jobs=jobs) for s in range(seeds)]
    return summarise([(score.nmi, score.accuracy) for score in scores])


def summarise(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    """Return mean and standard deviation in percent of pairs (NMI, accuracy)."""
    values = 100 * np.array(pairs)
    return {
        "nmi": round(float(values[:, 0].mean()), 2),
        "nmi_spread": round(float(values[:, 0].std()), 2),
        "accuracy": round(float(values[:, 1].mean()), 2),
        "accuracy_spread": round(float(values[:, 1].std()), 2),
        "seeds": len(pairs),
    }


def merge_summaries(earlier: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Return the means and the standard deviations over the seeds of two results of ``summarise``."""
    counts = np.array([earlier["seeds"], found["seeds"]], dtype=float)
    out = {"seeds": int(counts.sum())}
    for key in ("nmi", "accuracy"):
        means = np.array([earlier[key], found[key]])
        squares = means**2 + np.array([earlier[f"{key}_spread"], found[f"{key}_spread"]]) ** 2
        mean = float(counts @ means / counts.sum())
        spread = max(float(counts @ squares / counts.sum()) - mean**2, 0.0) ** 0.5
        out |= {key: round(mean, 2), f"{key}_spread": round(spread, 2)}
    return found | out


def measure_networks(
    x: np.ndarray,
    y: np.ndarray,
    seeds: int,
    restarts: int,
    jobs: int | None,
    earlier: dict[str, Any] | None = None,
    **params: Any,
) -> dict[str, Any]:
    """Fit networks with several seeds to rows x with classes y; return their NMI, accuracy and seconds.

    ``earlier`` is the result of a previous run; its seeds are not fitted again.
    """
    c, pairs, seconds, chosen, ks = len(np.unique(y)), [], [], [], []
    first = earlier["seeds"] if earlier else 0
    if first >= seeds and earlier:
        return earlier
    for seed in range(first, seeds):
        if seconds and seed >= FEW_SEEDS and min(seconds) > LONG_SECONDS:
            break
        begin = time.perf_counter()
        model = sl.MultilayerBootstrapNetwork(
            **(PAPER_NETWORK | params), n_components=c, n_classes=c, random_state=seed, n_jobs=jobs
        )
        z = model.fit_transform(x)
        seconds.append(time.perf_counter() - begin)
        score = kmeans_scores(z, y, restarts=restarts, random_state=seed, n_jobs=jobs)
        pairs.append((score.nmi, score.accuracy))
        chosen.append(model.decay_)
        ks = model.ks_
    found = summarise(pairs) | {"seconds_per_fit": round(float(np.median(seconds)), 2)}
    if earlier:
        found, chosen = merge_summaries(earlier, found), [*earlier.get("chosen", []), *chosen]
    if params.get("decay") == "auto":
        return found | {"chosen": chosen}
    return found | {"ks": [int(k) for k in ks]}


def project_codes(model: Any, layers: Any, codes: np.ndarray, seed: int) -> np.ndarray:
    """Return the network's output from the codes (numbers of nearest centroids) of the last layer."""
    model.seed_, model._layers = seed, layers
    components = layer_components(model, len(layers), sl.Dataset.from_arrays(codes))
    projection = CodeProjection.from_components(components)
    return projection.apply(projection.prepare(make_backend("cpu")), Block(codes, None, None, 0))


class FirstLayer:
    """First layer that networks of several decays share, with its codes (nearest centroids) of all rows."""

    def __init__(self, x: np.ndarray, args: Any, **params: Any) -> None:
        fixed = {"n_components": 10, "n_classes": 10, "random_state": args.seed}
        self.params = {"n_pools": "paper"} | params | fixed
        self.train, self.jobs = sl.Dataset.from_arrays(np.ascontiguousarray(x)), args.jobs
        begin = time.perf_counter()
        self.codes = code_rows(self._layers(0.5)[0], x, x, args.jobs, "auto")
        self.seconds = time.perf_counter() - begin
        print(f"first layer: {self.seconds:.0f} s", flush=True)

    def _model(self, decay: float) -> Any:
        return sl.MultilayerBootstrapNetwork(decay=decay, n_jobs=self.jobs, **self.params)

    def _layers(self, decay: float) -> Any:
        seed = int(self.params["random_state"])
        return plan_layers(self._model(decay), self.train, decay, seed)

    def compute_output(self, decay: float) -> tuple[np.ndarray, list[int]]:
        """Return the output of a network with this decay, and the number of centroids of each layer."""
        layers, codes = self._layers(decay), self.codes
        for layer in layers[1:]:
            codes = code_rows(layer, codes, codes, self.jobs, "auto")
        z = project_codes(self._model(decay), layers, codes, int(self.params["random_state"]))
        return z, [layer.k for layer in layers]

    def measure_network(self, y: np.ndarray, decay: float, restarts: int) -> dict[str, Any]:
        """Return NMI, accuracy and seconds of the network with this decay."""
        begin = time.perf_counter()
        z, ks = self.compute_output(decay)
        above = time.perf_counter() - begin
        seed = self.params["random_state"]
        score = kmeans_scores(z, y, restarts=restarts, random_state=seed, n_jobs=self.jobs)
        return summarise([(score.nmi, score.accuracy)]) | {
            "seconds_of_first_layer": round(self.seconds, 2),
            "seconds_above_it": round(above, 2),
            "ks": ks,
        }


def measure_data_set(name: str, args: Any) -> dict[str, Any]:
    """Return the results of k-means on raw features, PCA and networks of all decays, for one data set."""
    x, y = load_rows(name, args.seed)
    common = (y, args.seeds, args.restarts, args.jobs)
    out: dict[str, Any] = {"rows": len(x), "features": x.shape[1], "classes": len(np.unique(y))}
    out = read_earlier_results(args.out, name) | out
    rows = x.astype(np.float32 if x.dtype == np.uint8 else np.float64)
    if not args.skip_baselines:
        few = (y, 1 if len(x) > 20_000 else args.seeds, min(10, args.restarts), args.jobs)
        options = few if len(x) > 2000 else common
        out["raw"] = measure_kmeans(rows, *options)
        for key, whiten in (("pca", False), ("pca_whitened", True)):
            out[key] = measure_kmeans(
                PCA(0.98, svd_solver="full", whiten=whiten).fit_transform(rows), *options
            )
    params: dict[str, Any] = {"n_clusterings": args.clusterings, "k1": 8000 if name == "mnist" else None}
    params["n_pools"] = int(args.pools) if args.pools.isdigit() else args.pools
    decays = tuple(float(d) for d in args.decays.split(","))
    out.setdefault("decays", {})
    first = FirstLayer(x, args, **params) if name == "mnist" and not args.skip_decays else None
    for decay in decays if not args.skip_decays else ():
        if first is not None:
            found = first.measure_network(y, decay, args.restarts)
        else:
            earlier = out["decays"].get(str(decay)) if args.more else None
            found = measure_networks(x, *common, earlier, decay=decay, **params)
        out["decays"][str(decay)] = found
        print(name, decay, found, flush=True)
        write_part(args.out, name, args.seed, out)  # An interrupted run keeps the decays so far.
    if name == "mnist" and not args.skip_auto:
        out["auto"] = measure_choices(x, out["classes"], args)
    elif not args.skip_auto:
        earlier = out.get("auto") if args.more else None
        out["auto"] = measure_networks(x, *common, earlier, decay="auto", **params) | {
            "seconds_to_choose": measure_choices(x, out["classes"], args, 1)["seconds_to_choose"]
        }
    print(name, "auto", out.get("auto"), flush=True)
    if len(out["decays"]) > 1:
        best = max(out["decays"].items(), key=lambda item: item[1]["nmi"])
        out["best"] = {"decay": float(best[0]), **best[1]}
    if "0.5" in out["decays"]:
        out["default"] = out["decays"]["0.5"]
    if name == "mnist" and str(chosen := out.get("auto", {}).get("chosen", [None])[0]) in out["decays"]:
        # MNIST has one network per decay, with the first seed, so "auto" gets the result of its first choice.
        out["auto"] |= {key: out["decays"][str(chosen)][key] for key in ("nmi", "accuracy", "seeds")}
    for other in ("best", "default"):
        if other in out and "nmi" in out.get("auto", {}):
            out["auto"][f"nmi_above_{other}"] = round(out["auto"]["nmi"] - out[other]["nmi"], 2)
    if name in PAPER:
        columns = ("raw", "raw_spread", "pca", "pca_spread", "mbn", "mbn_spread", "best", "best_spread")
        out["paper"] = {k: dict(zip(columns, v, strict=False)) for k, v in PAPER[name].items()}
    return out


def measure_choices(x: np.ndarray, classes: int, args: Any, seeds: int = 10) -> dict[str, Any]:
    """Return the decays that "auto" chooses with several seeds, and the seconds of a choice."""
    from scalelatent.models.mbn.decay import choose_decay

    model = sl.MultilayerBootstrapNetwork(n_classes=classes, n_clusterings=args.clusterings, n_jobs=args.jobs)
    train = sl.Dataset.from_arrays(np.ascontiguousarray(x))
    chosen, seconds = [], []
    for seed in range(args.seed, args.seed + seeds):
        begin = time.perf_counter()
        chosen.append(choose_decay(model, train, seed))
        seconds.append(time.perf_counter() - begin)
    return {"chosen": chosen, "seconds_to_choose": round(float(np.median(seconds)), 2)}


def read_earlier_results(path: Any, name: str) -> dict[str, Any]:
    """Return the results of earlier runs on a data set; this run replaces those that it repeats."""
    parts = json.loads(path.read_text())["parts"] if path.exists() else {}
    if name not in parts:
        return {}
    result = dict(parts[name]["result"])
    return result | {"earlier_commands": [*result.get("earlier_commands", []), parts[name]["command"]]}


def embed_spectrally(distances: np.ndarray, width: float, d: int) -> np.ndarray:
    """Return the spectral embedding (rows, d) of Ng, Jordan and Weiss (2002): scaled leading eigenvectors.

    The kernel is a Gaussian of the distances (rows, rows) with this width.
    """
    from scipy.linalg import eigh

    weights = np.exp(-(distances**2) / (2 * width**2))
    np.fill_diagonal(weights, 0)
    scale = 1 / np.sqrt(np.maximum(weights.sum(axis=1), 1e-300))
    n = len(weights)
    u = eigh(scale[:, None] * weights * scale, subset_by_index=[n - d, n - 1])[1]
    return u / np.maximum(np.linalg.norm(u, axis=1, keepdims=True), 1e-300)


def measure_spectral(args: Any) -> dict[str, Any]:
    """Return scores of spectral clustering with the kernel width of the paper, and with the best width.

    The paper's width is 2^-4 times the mean distance of two rows. The paper gives neither the formula of the
    kernel nor whether a row is its own neighbour. This function uses the formula of Ng et al.:
    exp(-d^2 / 2 width^2) with zeros on the diagonal.
    """
    from scipy.spatial.distance import pdist, squareform

    found = {}
    for name, paper in PAPER_SPECTRAL.items():
        x, y = load_rows(name, args.seed)
        seeds, classes = args.seeds if len(x) <= 2000 else 1, len(np.unique(y))
        distances = squareform(pdist(x.astype(np.float64)))
        mean = distances.sum() / (len(x) * (len(x) - 1))
        by_width = {
            str(power): measure_kmeans(
                embed_spectrally(distances, 2.0**power * mean, classes), y, seeds, args.restarts, args.jobs
            )
            for power in range(-4, 5)
        }
        best = max(by_width.items(), key=lambda item: item[1]["nmi"])
        found[name] = {"fixed": by_width["-4"], "best": {"power": int(best[0]), **best[1]}, "paper": paper}
        print(name, found[name], flush=True)
    return found


def sweep_parameters(args: Any) -> dict[str, Any]:
    """Return scores for numbers V of clusterings, and for shares a of the features (Figure 11)."""
    x, y = load_rows("mnist5000", args.seed)
    common = (y, FEW_SEEDS, args.restarts, args.jobs)
    out: dict[str, Any] = {"V": {}, "a": {}}
    for v in (1, 5, 10, 25, 50, 100, 200, 400):
        out["V"][str(v)] = measure_networks(x, *common, n_clusterings=v)
        print("V", v, out["V"][str(v)], flush=True)
    for a in (0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0):
        out["a"][str(a)] = measure_networks(x, *common, n_clusterings=100, feature_fraction=a)
        print("a", a, out["a"][str(a)], flush=True)
    return out


def compare_k1(args: Any) -> dict[str, Any]:
    """Return scores on 5,000 images for values of k1 (number of centroids in the first layer).

    571 is the same share of the rows as the paper's 8,000 of 70,000. 2,500 is the default.
    """
    x, y = load_rows("mnist5000", args.seed)
    out = {}
    for k1 in (286, 571, 1250, 2500):
        out[str(k1)] = measure_networks(
            x, y, FEW_SEEDS, args.restarts, args.jobs, n_clusterings=args.clusterings, k1=k1
        )
        print("k1", k1, out[str(k1)], flush=True)
    return out


def compare_k1_on_all_images(args: Any) -> dict[str, Any]:
    """Return scores on 70,000 images for two values of k1 (number of centroids in the first layer).

    8,000 is the paper's value, 35,000 the default. 400 clusterings as in the paper would take hours.
    """
    x, y = load_rows("mnist", args.seed)
    out = {}
    for k1 in (8000, 35_000):
        first = FirstLayer(x, args, n_clusterings=100, k1=k1)
        out[str(k1)] = first.measure_network(y, 0.5, args.restarts)
        print("k1", k1, out[str(k1)], flush=True)
    return out


def measure_half_of_rows(args: Any) -> dict[str, Any]:
    """Return scores of networks whose first layer has as many centroids as half of the 70,000 images.

    The clusterings of a layer draw their centroids from 40 pools of random rows, which saves time.
    """
    x, y = load_rows("mnist", args.seed)
    out = read_earlier_results(args.out, "half_mnist")
    first = FirstLayer(x, args, n_clusterings=args.clusterings, k1=len(x) // 2, n_pools=40)
    for decay in map(float, args.decays.split(",")):
        found = first.measure_network(y, decay, args.restarts)
        out[f"{args.clusterings} clusterings, decay {decay}"] = found
        print(args.clusterings, decay, found, flush=True)
        write_part(args.out, "half_mnist", args.seed, out)
    return out


def draw_figures(args: Any) -> dict[str, Any]:
    """Draw the figures of the parts whose results the JSON file has, and those of synthetic points."""
    parts = json.loads(args.out.read_text())["parts"] if args.out.exists() else {}
    drawn: list[str] = []

    def draw(figure: Any, name: str) -> None:
        write_png(figure, RESULTS / f"mbn_{name}.png")
        drawn.append(f"mbn_{name}.png")

    by_decay = [
        make_sweep(title, parts[name]["result"]["decays"], parts[name]["result"].get("auto"))
        for name, title in SET_TITLES.items()
        if len(parts.get(name, {}).get("result", {}).get("decays", {})) > 1
    ]
    if by_decay:
        draw(plot_sweeps(by_decay, "decay"), "decay")
    if "sweeps" in parts:
        found = parts["sweeps"]["result"]
        draw(plot_sweeps([make_sweep("MNIST (small)", found["V"])], "clusterings V", logarithmic=True), "V")
        draw(plot_sweeps([make_sweep("MNIST (small)", found["a"])], "share of the features a"), "a")

    def output(x: np.ndarray, c: int) -> np.ndarray:
        network = sl.MultilayerBootstrapNetwork(
            **PAPER_NETWORK, n_clusterings=args.clusterings, feature_fraction=1.0, n_classes=c, n_components=2
        )
        return network.set_params(random_state=args.seed).fit_transform(x)

    examples = []
    for shape in SHAPES:
        x, y = synthetic_points(shape, args.seed)
        examples.append((shape, x, output(x, len(np.unique(y))), y))
    draw(plot_densities(examples), "densities")
    x, y = outlier_example(args.seed)
    draw(plot_outlier(x, PCA(2, svd_solver="full").fit_transform(x), output(x, 2), y, len(x) - 1), "outlier")
    return {"drawn": drawn}


def draw_plane(args: Any) -> dict[str, Any]:
    """Draw 2,500 of 5,000 images as points in the plane, from the network's output and from each layer."""
    x, y = load_rows("mnist5000", args.seed)
    data = sl.Dataset.from_arrays(x, y)
    model = sl.MultilayerBootstrapNetwork(
        **PAPER_NETWORK, n_clusterings=args.clusterings, n_classes=10, n_components=2, n_jobs=args.jobs
    )
    shown = collect_evidence(model.set_params(random_state=args.seed).fit(data), data, sample_rows=2500)
    assert shown.clusters is not None
    write_png(plot_output(shown.output, shown.codes, shown.class_names), RESULTS / "mbn_plane.png")
    titles = [f"layer {i}: k = {k:,}" for i, k in enumerate(shown.ks, 1)]
    write_png(plot_layers(shown.layers, titles, shown.codes, shown.class_names), RESULTS / "mbn_layers.png")
    return {"ks": shown.ks} | {key: round(100 * shown.clusters[key], 2) for key in ("nmi", "accuracy")}


def make_sweep(title: str, found: dict[str, Any], auto: dict[str, Any] | None = None) -> Any:
    found = dict(sorted(found.items(), key=lambda item: float(item[0])))
    columns = [
        [value[key] / 100 for value in found.values()]
        for key in ("nmi", "accuracy", "nmi_spread", "accuracy_spread")
    ]
    marked = None if auto is None else float(np.quantile(auto["chosen"], 0.5, method="lower"))
    return Sweep(title, [float(value) for value in found], *columns, marked)


def main() -> None:
    parts: dict[str, Callable[[Any], dict[str, Any]]] = {
        name: lambda args, name=name: measure_data_set(name, args)  # type: ignore[misc]
        for name in ("wine", "thyroid", "umist", "isolet1", "coil20", "digits", "mnist5000", "mnist")
    }
    parts |= {
        "spectral": measure_spectral,
        "sweeps": sweep_parameters,
        "k1": compare_k1,
        "k1_mnist": compare_k1_on_all_images,
        "half_mnist": measure_half_of_rows,
        "plane": draw_plane,
        "figures": draw_figures,
    }
    arguments = parser(__doc__, "mbn_clustering")
    arguments.add_argument("--parts", default="wine,thyroid,umist", help=f"of {', '.join(parts)}")
    arguments.add_argument("--seeds", type=int, default=10, help="networks of each setting")
    arguments.add_argument("--restarts", type=int, default=50, help="starts of k-means")
    arguments.add_argument("--decays", default=",".join(map(str, DECAYS)))
    arguments.add_argument("--clusterings", type=int, default=400)
    arguments.add_argument("--pools", default="paper", help="n_pools of the networks")
    arguments.add_argument("--jobs", type=int, default=None)
    for skipped in ("baselines", "decays", "auto"):
        arguments.add_argument(
            f"--skip-{skipped}", action="store_true", help="do not measure; an earlier result stays"
        )
    arguments.add_argument(
        "--more", action="store_true", help="add seeds to those of earlier runs, up to --seeds"
    )
    args = arguments.parse_args()
    wanted = args.parts.split(",")
    if "mnist" in wanted and args.more:
        raise SystemExit(
            "The part mnist has one network per decay: remove --more, or remove mnist from --parts."
        )
    if unknown := [name for name in wanted if name not in parts]:
        raise SystemExit(f"no part {', '.join(unknown)}; there are {', '.join(parts)}")
    for name in wanted:
        write_part(args.out, name, args.seed, parts[name](args))


if __name__ == "__main__":
    main()
