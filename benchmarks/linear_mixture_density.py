"""Mixtures of linear models as densities of MNIST: python benchmarks/linear_mixture_density.py

likelihood  log-likelihood of test rows against the number of components and of dimensions
clusters    NMI and accuracy of the components as clusters, beside k-means, of MNIST at 16 x 16 pixels
figures     samples, and digits whose lower half is hidden and filled in, by a model of 20,000 rows

The others of 60,000 rows. Likelihoods are of pixels made continuous, (value + u) / 256 with u uniform
in [0, 1), in nats a row; with --size 16 of their averages at 16 x 16. Needs SCALELATENT_DATA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from common import averaged, mnist, mnist16, parser, write_part
from sklearn.cluster import KMeans

import scalelatent as sl
from scalelatent.evaluation.clustering import clustering_accuracy, nmi
from scalelatent.report.style import new_figure, write_png

LIKELIHOODS = ("ppca", "factor-analysis")


def continuous(part: str, args: Any) -> np.ndarray:
    """Pixels with uniform noise of their own width."""
    x, _ = mnist(part=part)
    noise = np.random.default_rng((args.seed, part == "test")).random(x.shape, dtype=np.float32)
    x = (x.astype(np.float32) + noise) / 256
    return x if args.size == 28 else averaged(x)


def density(seed: int, jobs: int, **params: Any) -> Any:
    """A density, not yet fitted."""
    return sl.LinearMixture(random_state=seed, n_jobs=jobs, **params)


def likelihood(args: Any) -> list[dict[str, Any]]:
    """Test rows under mixtures of several sizes."""
    x, test = continuous("train", args), continuous("test", args)
    sizes = [(k, 10) for k in (1, 10, 50, 100, 200)] + [(50, h) for h in (0, 5, 20, 40)]
    runs = [(kind, k, h) for kind in LIKELIHOODS for k, h in sizes if kind == "ppca" or k <= 50]
    out = []
    for kind, k, h in runs:
        d = density(args.seed, args.jobs, n_components=k, n_dims=h, likelihood=kind).fit(x)
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
        if args.size == 28:  # of values 0 … 255: a pixel is 256 times as wide
            out[-1]["bits_a_pixel"] = round(8 - found / np.log(2) / 784, 3)
        print(out[-1], flush=True)
        write_part(
            args.out, f"likelihood_{args.size}", args.seed, out
        )  # long runs lose nothing where they are stopped
    return out


def clusters(args: Any) -> None:
    """Components against labels, over seeds; a part of each number of them."""
    x, y = mnist16()
    for k in map(int, args.components.split(",")):
        ways: dict[str, Callable[[int], np.ndarray]] = {
            "scikit-learn's KMeans": lambda s, k=k: KMeans(k, n_init=1, random_state=s).fit_predict(x)
        }
        sizes: dict[str, dict[str, Any]] = {f"h = {h}": {"n_dims": h} for h in (0, 3, 10, 20)}
        sizes["h = 10, own noise, soft"] = {"n_dims": 10, "likelihood": "ppca", "assignment": "soft"}
        for name, own in sizes.items():
            ways[name] = lambda s, k=k, own=own: (
                density(s, args.jobs, n_components=k, **own).fit(x).predict(x)
            )
        out: dict[str, Any] = {}
        for name, labels in ways.items():
            found = [(nmi(y, of), clustering_accuracy(y, of)) for of in map(labels, range(args.seeds))]
            mean, sd = np.mean(found, axis=0), np.std(found, axis=0, ddof=min(1, args.seeds - 1))
            out[f"{name}, {k}"] = {
                key: {"mean": round(float(m), 4), "sd": round(float(s), 4)}
                for key, m, s in zip(("nmi", "accuracy"), mean, sd, strict=True)
            }
            print(name, k, out[f"{name}, {k}"], flush=True)
            write_part(args.out, f"clusters_{k}", args.seed, out)


def figures(args: Any) -> dict[str, Any]:
    """Samples, and digits with their lower half filled in."""
    x, _ = mnist()
    test = mnist(part="test")[0][:16] / np.float32(255)
    x = x[:20_000] / np.float32(255)
    d = density(args.seed, args.jobs, n_components=100, n_dims=12, likelihood="ppca").fit(x)
    names = ["linear_mixture_samples.png", "linear_mixture_halves.png"]
    figure = new_figure(8, 2.2)
    drawn, _ = d.sample(32, random_state=args.seed)
    _tiles(figure, [drawn[:16], drawn[16:]])
    write_png(figure, args.out.parent / names[0])
    seen = np.arange(784) < 392
    figure = new_figure(8, 3.2)
    _tiles(figure, [test, np.where(seen, test, 0.5), d.reconstruct(test, observed=seen)])
    write_png(figure, args.out.parent / names[1])
    return {"drawn": names, "rows": len(x), "n_components": 100, "n_dims": 12}


def _tiles(figure: Any, lines: list[np.ndarray]) -> None:
    axes = figure.subplots(len(lines), len(lines[0]))
    for row, line in zip(axes, lines, strict=True):
        for ax, one in zip(row, line, strict=True):
            ax.imshow(one.reshape(28, 28), cmap="gray_r", vmin=0, vmax=1)
            ax.axis("off")


def main() -> None:
    """Each part by itself."""
    parts: dict[str, Callable[[Any], Any]] = {
        "likelihood": likelihood,
        "clusters": clusters,
        "figures": figures,
    }
    arguments = parser(__doc__, "linear_mixture_density")
    arguments.add_argument("--parts", default=",".join(parts))
    arguments.add_argument("--seeds", type=int, default=5)
    arguments.add_argument("--components", default="10,50", help="of clusters")
    arguments.add_argument("--size", type=int, default=28, choices=(16, 28), help="of likelihood")
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
