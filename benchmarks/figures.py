"""Draw the figures of benchmarks/README.md from the files in results/.

    python benchmarks/figures.py [NAME ...]

The pictures are written to results/figures/; nothing is measured again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from common import RESULTS, write_png
from table_text import CLUSTERED, TASKS, read
from tables import RIVALS, rivals

import scalelatent as sl
from scalelatent.report.style import COLORS, INK, LINE, MUTED, new_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Colors of this package, of the methods that are compared with the package, and of a third series.
OURS, OTHER, THIRD = COLORS[0], COLORS[1], COLORS[4]
FIGURES: dict[str, Callable[[], Figure]] = {}


def register_figure(draw: Callable[[], Figure]) -> Callable[[], Figure]:
    """Add a function that draws a figure to FIGURES, under the function's name."""
    FIGURES[draw.__name__] = draw
    return draw


def draw_legend(axes: Any, **options: Any) -> None:
    """Draw the legend of the axes without a frame."""
    axes.legend(frameon=False, fontsize=9, **options)


@register_figure
def paper_errors() -> Figure:
    """Draw the errors of this package and of the papers of its models; for clusters, 100 - accuracy."""
    rows: list[tuple[str, float, float, float, float]] = []
    found = {(r["architecture"], r["capsule_dim"]): r for r in read("paper_capsule_dims")}
    rows.append(("capsules, MNIST, d = 2", 100 * found["multiclass", 2]["test_error"], 0, 6.21, 0))
    pixels = read("crbm_mnist")
    for learner, (task, name) in product(("mle-bp", "mssvm", "cd-10"), TASKS.items()):
        r = pixels[f"full/{task}/{learner}"]
        rows.append((f"{learner}, pixels, {name}", r["all"], 0, r["paper"]["all"], 0))
    for key, name in CLUSTERED.items():
        r = read("mbn_clustering")[key]
        if paper := r.get("paper"):
            ours, theirs = r["default"], paper["accuracy"]
            spread = ours.get("accuracy_spread", 0) if ours["seeds"] > 1 else 0
            label = f"bootstrap network, {name.split(',')[0]}"
            rows.append((label, 100 - ours["accuracy"], spread, 100 - theirs["mbn"], theirs["mbn_spread"]))
    for part, name, paper_error in (("clusters", "without labels", 0.6), ("supervised", "with labels", 0.07)):
        errors = [100 * fit["test_error"] for fit in read("hcn_traits")[part].values()]
        rows.append((f"compositional network, traits {name}", median(errors), 0, paper_error, 0))
    figure = new_figure(8.2, 1.4 + 0.25 * len(rows))
    axes = figure.subplots()
    style_axes(axes)
    for i, (_, ours, spread, paper_error, paper_spread) in enumerate(rows[::-1]):
        axes.plot([ours, paper_error], [i, i], color=LINE, lw=2, zorder=1)
        axes.errorbar(paper_error, i, xerr=paper_spread or None, fmt="D", mfc="white", color=OTHER, ms=7)
        axes.errorbar(ours, i, xerr=spread or None, fmt="o", color=OURS, ms=7)
    axes.set_yticks(range(len(rows)), [row[0] for row in rows[::-1]])
    axes.plot([], [], "o", color=OURS, label="scalelatent")
    axes.plot([], [], "D", mfc="white", color=OTHER, label="paper")
    axes.set_xlabel("error, % (bootstrap networks: 100 - clustering accuracy, default decay)")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    draw_legend(axes, loc="upper left")
    return figure


@register_figure
def memory() -> Figure:
    """Draw the peak memory of a worker against the number of rows of a fit."""
    capsule, mixture = read("streamed_pass")["memory"], read("linear_mixture_million")["scale, 100"]
    parts = read("hcn_million")["flat"]["peak_worker_mib"]
    figure = new_figure(6.4, 3.8)
    axes = figure.subplots()
    style_axes(axes)
    axes.plot(
        [1e5, 1e6],
        [capsule["peak_mib_100000"], capsule["peak_mib_1000000"]],
        "o-",
        color=OURS,
        label="capsules",
    )
    axes.plot([int(n) for n in parts], parts.values(), "s-", color=THIRD, label="compositional network")
    axes.plot(mixture["rows"], mixture["peak_worker_mib"], "^-", color=OTHER, label="linear mixture")
    axes.plot(mixture["rows"], mixture["planned_mib"], "^--", color=MUTED, label="linear mixture, planned")
    axes.set_xscale("log")
    axes.set_ylim(0, None)
    axes.set_xlabel("rows")
    axes.set_ylabel("peak memory of a worker, MiB")
    draw_legend(axes, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


@register_figure
def same_weights() -> Figure:
    """Draw digests (hashes) of the weights of the same fit on different numbers of threads and workers."""
    found = read("same_bits")["digests"]
    ways = list(next(iter(found.values())))
    figure = new_figure(8.2, 2.8)
    axes = figure.subplots()
    style_axes(axes, grid=False)
    for i, digests in enumerate(found.values()):
        for j, way in enumerate(ways):
            same = digests[way] == digests[ways[0]]
            axes.text(
                j, i, digests[way][:8], ha="center", va="center", family="monospace", fontsize=10, color=INK
            )
            box = {"facecolor": "#dcecfa" if same else "#f6d5cf", "edgecolor": "white"}
            axes.add_patch(_make_box(j, i, **box))
    axes.set_xlim(-0.5, len(ways) - 0.5)
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.set_xticks(range(len(ways)), ways)
    axes.set_yticks(range(len(found)), found)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    return figure


def _make_box(x: float, y: float, **style: Any) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.5, y - 0.5), 1, 1, zorder=0, **style)


@register_figure
def pass_cost() -> Figure:
    """Draw the seconds of an E-step of capsule regression, divided by those of its two matrix products."""
    table = read("capsule_pass")["table"]
    places = np.arange(len(table))
    figure = new_figure(6.4, 3.6)
    axes = figure.subplots()
    style_axes(axes)
    ours = [row["ratio nu=0"] for row in table]
    numpy = [row["ratio nu=0"] * row["times faster than numpy"] for row in table]
    axes.bar(places - 0.2, ours, 0.38, color=OURS, label="scalelatent")
    axes.bar(places + 0.2, numpy, 0.38, color=OTHER, label="the same in numpy, blocked")
    axes.axhline(1, color=INK, lw=1, ls="--", label="the two matrix products in BLAS")
    axes.set_xticks(places, [str(row["D"]) for row in table])
    axes.set_xlabel("total dimension D of the capsules")
    axes.set_ylabel("time of an E-step / products")
    axes.set_ylim(0, 5)
    draw_legend(axes)
    return figure


@register_figure
def libraries() -> Figure:
    """Draw the speed of this package divided by that of each other library on the same task."""
    peers, rbm = read("linear_mixture_peers"), read("crbm_kernels")
    dense = read("mbn_kernels")["dense"]
    ours = peers["kmeans"]["seconds"]
    fits = read("choosing")["algorithms"]
    mlp = next(fit for name, fit in fits.items() if name.endswith("error of stepwise"))
    bars = {
        "belief propagation in an RBM, against PGMax": rbm["pgmax"]["the kernel, times faster"],
        "belief propagation in an RBM, against matrix form": rbm["edges"]["times the matrix form"],
        "messages of parts, against PGMax": read("hcn_peers")["times faster than PGMax, two threads"][
            "ours, two threads"
        ],
        "factor analysers, against torch-mfa": peers["mfa"]["times"],
        "pass, p = 784, against full Gaussians (of higher likelihood)": peers["gaussian"]["784"]["times"],
        "factor analysis, against FactorAnalysis": peers["factors"]["times"],
        "k-means, against KMeans": ours["KMeans"] / ours["n_dims=0"],
        "nearest of 8,000 centroids, against faiss": dense[-1]["times faiss"],
        "k-means, against MiniBatchKMeans": ours["MiniBatchKMeans"] / ours["n_dims=0, stepwise"],
        "capsules, against an MLP of lower error": mlp["seconds"] / fits["stepwise"]["seconds"],
    }
    figure = new_figure(8.2, 3.8)
    axes = figure.subplots()
    style_axes(axes)
    bars = dict(sorted(bars.items(), key=lambda bar: -bar[1]))
    places = range(len(bars))[::-1]
    for place, times in zip(places, bars.values(), strict=True):
        axes.barh(place, times - 1, left=1, color=OURS if times >= 1 else OTHER)
        axes.text(max(times, 1) * 1.06, place, f"{times:.3g}", va="center", fontsize=9, color=INK)
    axes.axvline(1, color=INK, lw=1)
    axes.set_xscale("log")
    axes.set_xlim(0.5, 600)
    axes.set_yticks(places, bars)
    axes.set_xlabel("times as fast (left of 1: slower)")
    return figure


@register_figure
def rows_read() -> Figure:
    """Draw the smallest validation error so far of algorithms of capsule regression against the rows read."""
    fits = read("online_capsule")["fits"]
    names = {
        "em": "batch EM",
        "stepwise": "stepwise EM",
        "passive_aggressive": "passive-aggressive",
        "incremental": "incremental EM",
    }
    figure = new_figure(6.8, 3.8)
    axes = figure.subplots()
    style_axes(axes)
    for (key, name), color in zip(names.items(), (INK, OURS, OTHER, THIRD), strict=True):
        seen, _, best = np.array(fits[key]["curve"]).T
        axes.plot(seen, 100 * best, color=color, lw=1.8, label=name)
    axes.set_xscale("log")
    axes.set_ylim(4, 12)
    axes.set_xlabel("rows read")
    axes.set_ylabel("best validation error so far, %")
    draw_legend(axes)
    return figure


@register_figure
def overlap() -> Figure:
    """Draw the seconds of reading and computing: each alone, both together, and on a Dask cluster."""
    streamed = read("streamed_pass")
    figure = new_figure(8.2, 3.2)
    left, right = figure.subplots(1, 2)
    for axes, table, bars in (
        (
            left,
            streamed["overlap"],
            {"read_only_s": "reading", "compute_only_s": "computing", "pass_s": "both"},
        ),
        (right, streamed["dask"], {"in_process_s": "one process, 2 threads", "cluster_s": "2 Dask workers"}),
    ):
        style_axes(axes)
        places = np.arange(len(table))
        width = 0.8 / len(bars)
        colors = (MUTED, OTHER, OURS)[-len(bars) :]
        for i, ((key, name), color) in enumerate(zip(bars.items(), colors, strict=True)):
            shift = (i - (len(bars) - 1) / 2) * width
            axes.bar(places + shift, [row[key] for row in table], 0.9 * width, color=color, label=name)
        axes.set_xticks(places, [f"D = {row['D']}" for row in table])
        draw_legend(axes)
    left.set_ylabel("seconds per pass, 1,000,000 rows")
    return figure


@register_figure
def workers() -> Figure:
    """Draw the scheduler's CPU time per span (rows of a task), and the shortest span for half a core."""
    found = read("simulated_cluster")
    counts, costs = [], []
    for part, r in found.items():
        if part.startswith("batch "):
            beats = r["idle_scheduler_share"] * r["seconds_per_pass"]
            counts.append(r["workers"])
            costs.append(1e3 * (r["scheduler_cpu_seconds_per_pass"] - beats) / r["spans"])
    figure = new_figure(8.2, 3.2)
    left, right = figure.subplots(1, 2)
    for axes, values, label in (
        (left, costs, "scheduler, ms of CPU per span"),
        (right, [2 * n * ms / 1e3 for n, ms in zip(counts, costs, strict=True)], "shortest span, s"),
    ):
        style_axes(axes)
        axes.plot(counts, values, "o-", color=OURS)
        axes.set_xscale("log")
        axes.set_xticks(counts, [f"{n:,}" for n in counts])
        axes.minorticks_off()
        axes.set_xlabel("workers")
        axes.set_ylabel(label)
    left.set_ylim(0, None)
    right.set_yscale("log")
    right.set_title("if the scheduler may use half a core", fontsize=10)
    return figure


@register_figure
def predicted() -> Figure:
    """Draw the time and memory of jobs that the command plan predicts against the measured ones."""
    jobs = read("plan_accuracy")["jobs"].values()
    figure = new_figure(8.2, 3.6)
    for axes, reported, took, unit, scale in (
        (*figure.subplots(1, 2)[:1], "told_seconds", "seconds", "s", 1.0),
        (figure.axes[1], "told_peak_bytes", "peak_bytes", "MiB", 2.0**20),
    ):
        style_axes(axes)
        x = np.array([job[reported] for job in jobs]) / scale
        y = np.array([job[took] for job in jobs]) / scale
        line = np.array([0.8 * min(x.min(), y.min()), 1.2 * max(x.max(), y.max())])
        axes.fill_between(line, line / 1.5, line * 1.5, color="#dcecfa", label="within 1.5 times")
        axes.plot(line, line, color=INK, lw=1, ls="--")
        axes.plot(x, y, "o", color=OURS)
        axes.set_xscale("log")
        axes.set_yscale("log")
        ticks = [5, 10, 20, 50] if unit == "s" else [300, 500, 800]
        axes.set_xticks(ticks, ticks)
        axes.set_yticks(ticks, ticks)
        axes.minorticks_off()
        axes.set_xlim(*line)
        axes.set_ylim(*line)
        axes.set_xlabel(f"predicted {'time' if unit == 's' else 'peak memory'}, {unit}")
        axes.set_ylabel(f"measured, {unit}")
    draw_legend(axes, loc="upper left")
    return figure


@register_figure
def robustness() -> Figure:
    """Draw the test errors of compositional networks and of other methods on clean and corrupted digits."""
    found = read("hcn_digits")
    fits = [fit["errors"] for fit in found["hcn"].values()]
    table = {"compositional network": {key: median(e[key] for e in fits) for key in fits[0]}}
    for name, fit in found.items():
        if name.startswith("rival "):
            table[name.removeprefix("rival ")] = fit["errors"]
    columns = list(fits[0])
    figure = new_figure(8.2, 3.4)
    axes = figure.subplots()
    style_axes(axes, grid=False)
    errors = np.array([[100 * row[key] for key in columns] for row in table.values()])
    axes.imshow(errors, cmap="Blues", vmin=0, vmax=90, aspect="auto")
    for (i, j), value in np.ndenumerate(errors):
        dark = value > 45
        axes.text(j, i, f"{value:.1f}", ha="center", va="center", fontsize=10, color="white" if dark else INK)
    axes.set_xticks(range(len(columns)), [name.replace("mean of corruptions", "mean") for name in columns])
    axes.set_yticks(range(len(table)), table)
    axes.tick_params(length=0)
    axes.xaxis.tick_top()
    axes.set_title("test error, %", fontsize=10)
    return figure


# Key of the plotted score, label of its axis, and True if the axis is logarithmic, for each task that
# rivals.py measures.
QUALITY = {
    "classification": ("error", "test error, %", True),
    "density": ("auc_class", "AUC of a class that was left out, %", False),
    "clustering": ("nmi", "NMI, %", False),
    "denoising": ("error", "wrong pixels, %", True),
    "labels": ("f1", "micro F1, %", False),
    "parts": ("found", "kinds found, %", False),
}


def draw_rivals(task: str) -> Figure:
    """Draw quality against CPU seconds, one plot per data set; filled markers are models of this package."""
    key, label, is_log = QUALITY[task]
    found = {
        name: {
            method: [r for r in seeds if key in r]
            for method, seeds in methods.items()
            if any(key in r for r in seeds)
        }
        for name, methods in rivals(task).items()
    }
    rows = -(-len(found) // 4)
    columns = -(-len(found) // rows)
    colors = dict(zip(RIVALS[task], COLORS, strict=False))
    shown = dict.fromkeys(method for methods in found.values() for method in methods)
    # The pages that show the figure are 7.7 inches wide, so a wider figure would have text below 8 points.
    legend_columns = max(2, columns - 1)
    legend_height = 0.22 * -(-len(shown) // legend_columns) + 0.3
    figure = new_figure(min(max(2.5 * columns, 6.4), 7.7), 2.1 * rows + legend_height)
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, (name, methods) in zip(panels, found.items(), strict=False):
        style_axes(axes)
        axes.set_title(name, fontsize=9)
        for method, seeds in methods.items():
            color = colors[method]
            is_ours = hasattr(sl, method.split(",")[0])
            values = [r[key] for r in seeds]
            axes.errorbar(
                median(max(r["cpu_seconds"], 1e-3) for r in seeds),
                np.mean(values),
                yerr=np.std(values) or None,
                fmt="o" if is_ours else "D",
                mfc=color if is_ours else "white",
                color=color,
                ms=7 if is_ours else 5,
            )
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter("")
        if is_log:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("{x:g}")
            axes.tick_params(which="minor", labelsize=8)
    for axes in panels[len(found) :]:
        axes.set_visible(False)
    for method in shown:
        is_ours = hasattr(sl, method.split(",")[0])
        color = colors[method]
        fill = color if is_ours else "white"
        panels[0].plot([], [], "o" if is_ours else "D", color=color, mfc=fill, label=method)
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        loc="outside upper center",
        ncols=legend_columns,
        frameon=False,
        fontsize=9,
    )
    figure.supxlabel("CPU seconds of choice, fit and answer, one thread", fontsize=9)
    figure.supylabel(label, fontsize=9)
    return figure


for _task in QUALITY:
    FIGURES[f"rivals_{_task}"] = partial(draw_rivals, _task)


def main() -> None:
    """Draw the named figures, or all figures if no name is given."""
    folder = Path(RESULTS) / "figures"
    folder.mkdir(exist_ok=True)
    for name in sys.argv[1:] or FIGURES:
        write_png(FIGURES[name](), folder / f"{name}.png")
        print(f"written to results/figures/{name}.png", flush=True)


if __name__ == "__main__":
    main()
