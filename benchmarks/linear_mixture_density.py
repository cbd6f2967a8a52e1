"""Fit mixtures of linear models as densities of MNIST, and measure their log-likelihood.

    python benchmarks/linear_mixture_density.py [--parts likelihood,beside,clusters,figures] [--size 16]

likelihood  Log-likelihood of test rows for several numbers of components and of latent dimensions, fitted
            on 60,000 rows.
beside      Log-likelihood of test rows at 16 x 16 pixels after thirty passes over 20,000 rows, for --seeds
            starts. This package's mixtures are compared with scikit-learn's GaussianMixture (diagonal
            covariances; full covariances after PCA, with equal noise in the other directions), and with
            torch-mfa (--mfa is the path of its mfa.py; needs torch).
clusters    NMI and accuracy of the components as clusters of the 60,000 images at 16 x 16, compared with
            k-means.
figures     Random samples, and digits with a hidden lower half that the model fills, after a fit on 20,000
            rows.

Log-likelihoods are means in nats per row. Pixels are made continuous: (value + u) / 256 with u uniform in
[0, 1). With --size 16 the rows are averages of these pixels at 16 x 16. Needs SCALELATENT_DATA.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import mnist, mnist16, parser, shrink_to_16x16, write_part, write_png
from linear_mixture_peers import fit_mfa, score_mfa
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from sklearn.mixture import GaussianMixture

import scalelatent as sl
from scalelatent.evaluation.clustering import clustering_accuracy, nmi
from scalelatent.report.style import new_figure

LIKELIHOODS = ("ppca", "factor-analysis")


def add_uniform_noise(part: str, args: Any) -> np.ndarray:
    """Return MNIST rows in [0, 1) with uniform noise of one grey level; --size 16 shrinks them to 16 x 16."""
    x, _ = mnist(part=part)
    noise = np.random.default_rng((args.seed, part == "test")).random(x.shape, dtype=np.float32)
    x = (x.astype(np.float32) + noise) / 256
    return x if args.size == 28 else shrink_to_16x16(x)


def make_density(seed: int, jobs: int, **params: Any) -> Any:
    """Return an unfitted linear mixture; ``params`` are its parameters that are not the default."""
    # The stored results were measured with tol=1e-4.
    return sl.LinearMixture(**{"random_state": seed, "n_jobs": jobs, "tol": 1e-4} | params)


def measure_likelihoods(args: Any) -> list[dict[str, Any]]:
    """Return the log-likelihoods of training and test rows under mixtures of several sizes."""
    x, test = add_uniform_noise("train", args), add_uniform_noise("test", args)
    sizes = [(k, 10) for k in (1, 10, 50, 100, 200)] + [(50, h) for h in (0, 5, 20, 40)]
    runs = [(kind, k, h) for kind in LIKELIHOODS for k, h in sizes if kind == "ppca" or k <= 50]
    out = []
    for kind, k, h in runs:
        d = make_density(args.seed, args.jobs, n_components=k, n_dims=h, likelihood=kind).fit(x)
        found = float(d.score_samples(test).mean())
        out.append(
            {
                "likelihood": kind,
                "n_components": k,
                "n_dims": h,
                "train": round(float(d.score_samples(x[:10_000]).mean()), 1),
                "test": round(found, 1),
                "pixels": x.shape[1],
                "passes": d.n_iter_,
            }
        )
        if args.size == 28:  # A value 0 to 255 has 8 bits more than the value in [0, 1) that is used here.
            out[-1]["bits_a_pixel"] = round(8 - found / np.log(2) / 784, 3)
        print(out[-1], flush=True)
        write_part(
            args.out, f"likelihood_{args.size}", args.seed, out
        )  # An interrupted run keeps its results so far.
    return out


# Numbers of training rows, of passes, and of principal components in the part beside.
BESIDE_ROWS, PASSES, PCA_DIMS = 20_000, 30, 40


def compare_likelihoods(args: Any) -> list[dict[str, Any]]:
    """Return the log-likelihoods of test rows under this package's mixtures and those of other libraries."""
    args = argparse.Namespace(**{**vars(args), "size": 16})
    x, test = add_uniform_noise("train", args)[:BESIDE_ROWS], add_uniform_noise("test", args)
    pca = PCA(PCA_DIMS, random_state=args.seed).fit(x)

    def squared_residuals(rows: np.ndarray) -> np.ndarray:
        return ((rows - pca.inverse_transform(pca.transform(rows))) ** 2).sum(axis=1)

    def fit_ours(seed: int, k: int, h: int) -> float:
        d = make_density(
            seed,
            args.jobs,
            n_components=k,
            n_dims=h,
            likelihood="ppca",
            assignment="soft",
            max_iter=PASSES,
            tol=0,
        )
        return float(d.fit(x).score_samples(test).mean())

    def fit_diagonal_covariances(seed: int) -> float:
        return float(
            GaussianMixture(50, covariance_type="diag", max_iter=PASSES, random_state=seed).fit(x).score(test)
        )

    def fit_full_covariances(seed: int) -> float:
        mixture = GaussianMixture(10, max_iter=PASSES, random_state=seed).fit(pca.transform(x))
        left = x.shape[1] - PCA_DIMS
        noise = squared_residuals(x).mean() / left
        outside = -0.5 * (left * np.log(2 * np.pi * noise) + squared_residuals(test).mean() / noise)
        return float(mixture.score(pca.transform(test)) + outside)

    ways: dict[str, Callable[[int], float]] = {
        "ours, K = 50, h = 6": lambda seed: fit_ours(seed, 50, 6),
        "ours, K = 10, h = 40": lambda seed: fit_ours(seed, 10, 40),
        "GaussianMixture(50, 'diag')": fit_diagonal_covariances,
        f"GaussianMixture(10, 'full') after PCA({PCA_DIMS})": fit_full_covariances,
    }
    if args.mfa is not None:
        ways["torch-mfa, K = 50, h = 6"] = lambda seed: score_mfa(
            fit_mfa(args.mfa, x, 50, 6, PASSES, seed), test
        )
    out = []
    for name, way in ways.items():
        found = [way(args.seed + seed) for seed in range(args.seeds)]
        out.append(
            {"model": name, "rows": len(x), "passes": PASSES, "test": [round(value, 2) for value in found]}
        )
        print(out[-1], flush=True)
        write_part(args.out, "beside", args.seed, out)
    return out


def compare_clusters(args: Any) -> None:
    """Write NMI and accuracy of components and of k-means as clusters, for each number of components."""
    x, y = mnist16()
    for k in map(int, args.components.split(",")):
        ways: dict[str, Callable[[int], np.ndarray]] = {
            "scikit-learn's KMeans": lambda s, k=k: KMeans(k, n_init=1, random_state=s).fit_predict(x)
        }
        sizes: dict[str, dict[str, Any]] = {f"h = {h}": {"n_dims": h} for h in (0, 3, 10, 20)}
        sizes["h = 10, own noise, soft"] = {"n_dims": 10, "likelihood": "ppca", "assignment": "soft"}
        for name, own in sizes.items():
            ways[name] = lambda s, k=k, own=own: (
                make_density(s, args.jobs, n_components=k, **own).fit(x).predict(x)
            )
        out: dict[str, Any] = {}
        for name, labels in ways.items():
            found = [
                (nmi(y, clusters), clustering_accuracy(y, clusters))
                for clusters in map(labels, range(args.seeds))
            ]
            mean, sd = np.mean(found, axis=0), np.std(found, axis=0, ddof=min(1, args.seeds - 1))
            out[f"{name}, {k}"] = {
                key: {"mean": round(float(m), 4), "sd": round(float(s), 4)}
                for key, m, s in zip(("nmi", "accuracy"), mean, sd, strict=True)
            }
            print(name, k, out[f"{name}, {k}"], flush=True)
            write_part(args.out, f"clusters_{k}", args.seed, out)


def draw_figures(args: Any) -> dict[str, Any]:
    """Draw samples, and digits with a filled lower half, into two PNG files."""
    x, _ = mnist()
    test = mnist(part="test")[0][:16] / np.float32(255)
    x = x[:20_000] / np.float32(255)
    d = make_density(args.seed, args.jobs, n_components=100, n_dims=12, likelihood="ppca").fit(x)
    names = ["linear_mixture_samples.png", "linear_mixture_halves.png"]
    figure = new_figure(8, 2.2)
    drawn, _ = d.sample(32, random_state=args.seed)
    arrange_tiles(figure, [drawn[:16], drawn[16:]])
    write_png(figure, args.out.parent / names[0])
    seen = np.arange(784) < 392
    figure = new_figure(8, 3.2)
    arrange_tiles(figure, [test, np.where(seen, test, 0.5), d.reconstruct(test, observed=seen)])
    write_png(figure, args.out.parent / names[1])
    return {"drawn": names, "rows": len(x), "n_components": 100, "n_dims": 12}


def arrange_tiles(figure: Any, lines: list[np.ndarray]) -> None:
    axes = figure.subplots(len(lines), len(lines[0]))
    for row, line in zip(axes, lines, strict=True):
        for ax, one in zip(row, line, strict=True):
            ax.imshow(one.reshape(28, 28), cmap="gray_r", vmin=0, vmax=1)
            ax.axis("off")


def main() -> None:
    parts: dict[str, Callable[[Any], Any]] = {
        "likelihood": measure_likelihoods,
        "beside": compare_likelihoods,
        "clusters": compare_clusters,
        "figures": draw_figures,
    }
    arguments = parser(__doc__, "linear_mixture_density")
    arguments.add_argument("--parts", default=",".join(parts))
    arguments.add_argument(
        "--seeds", type=int, default=5, help="number of starts in the parts beside and clusters"
    )
    arguments.add_argument("--components", default="10,50", help="numbers of components in the part clusters")
    arguments.add_argument(
        "--size", type=int, default=28, choices=(16, 28), help="side of the images in the part likelihood"
    )
    arguments.add_argument(
        "--mfa", type=Path, help="path of mfa.py of torch-mfa; without it, beside has no torch-mfa"
    )
    arguments.add_argument("--jobs", type=int, default=1)
    args = arguments.parse_args()
    wanted = args.parts.split(",")
    if unknown := [name for name in wanted if name not in parts]:
        raise SystemExit(f"no part {', '.join(unknown)}; there are {', '.join(parts)}")
    for name in wanted:
        if found := parts[name](args):
            write_part(args.out, f"{name}_{args.size}" if name == "likelihood" else name, args.seed, found)


if __name__ == "__main__":
    main()
