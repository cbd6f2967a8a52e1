"""Repeat the experiments of the capsule paper (Saul, 2021).

    python benchmarks/paper_capsule.py dims|architectures|convergence|starts|latents [--data SET]

dims           Test error for each capsule dimension d (Figure 5, multiclass).
architectures  The same test errors for one_vs_all and all_vs_all (Figure 5).
convergence    Log-loss and training error of four updates, d = 4, 1,000 passes (Figures 6 and 7): with and
               without momentum, with and without the threshold nu.
starts         The subspace start (PCA) and 20 random starts per noise level, d = 4, 1,000 passes (Figure 8).
latents        Fits with d = 2 and d = 8: draws capsule vectors of test rows (Figure 2), and, for each element
               of each capsule, the training row that it responds to most (Figure 4).

--data is "mnist" (default), "usps", or a folder with the datasets train.zarr and test.zarr. In dims,
architectures and latents the last sixth of the training rows is the validation set (MNIST: rows 50,000 to
60,000); convergence and starts use all training rows. Test rows are only used for test errors, and for the
picture of latents. For Fashion-MNIST, import its four files:

    cd FASHION
    scalelatent data import idx train-images-idx3-ubyte.gz train-labels-idx1-ubyte.gz train.zarr
    scalelatent data import idx t10k-images-idx3-ubyte.gz t10k-labels-idx1-ubyte.gz test.zarr
    python benchmarks/paper_capsule.py dims --data FASHION

"mnist" and "usps" need SCALELATENT_DATA.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, mnist, parser, usps, write, write_png

import scalelatent as sl

# Parameters with which the estimator has the model and the algorithm of Saul (2021).
PAPER: dict[str, Any] = {"architecture": "multiclass", "algorithm": "em", "fit_intercept": False, "ridge": 0}
# Dimensions of a capsule in the experiments dims and architectures, as in Figure 5.
DIMS = (1, 2, 4, 8, 16)
DATA_SETS = {"mnist": mnist, "usps": usps}
# Part "starts": number of random starts for each noise level, and the noise levels (standard deviations of
# the capsule vectors at the start).
N_STARTS, SCALES = 20, (0.1, 1.0, 10.0)


def open_datasets(data: str) -> tuple[sl.Dataset, sl.Dataset]:
    """Return training and test datasets, by name or from a folder."""
    if data in DATA_SETS:
        train, test = (sl.Dataset.from_arrays(*DATA_SETS[data](part=part)) for part in ("train", "test"))
        return train, test
    train, test = (sl.open_dataset(Path(data) / f"{part}.zarr") for part in ("train", "test"))
    return train, test


def fit_and_score(a: argparse.Namespace, **params: Any) -> tuple[sl.CapsuleRegression, dict[str, Any]]:
    """Fit five sixths of the training rows, and validate on the rest; return the model, and its results."""
    rows, test = open_datasets(a.data)
    train, held = rows[: 5 * len(rows) // 6], rows[5 * len(rows) // 6 :]
    begin = time.perf_counter()
    how = {**PAPER, **params}
    model = sl.CapsuleRegression(random_state=a.seed, n_jobs=a.jobs, max_iter=a.passes, **how)
    model.fit(train, validation=held)
    seconds = time.perf_counter() - begin
    record = {
        **params,
        "architecture": how["architecture"],
        "test_error": round(1 - model.score(test), 4),
        "validation_error": round(float(np.mean(model.predict(held) != held.read_y(0, len(held)))), 4),
        "passes": model.n_iter_,
        "seconds": round(seconds, 1),
        "median_seconds_per_pass": float(np.median([r["seconds"] for r in model.history_])),
        "final_log_loss": round(model.history_[-1]["objective"], 4),
    }
    print(record, flush=True)
    return model, record


def run_settings(
    a: argparse.Namespace,
    settings: list[dict[str, Any]],
    measure_setting: Callable[[dict[str, Any]], dict[str, Any]],
) -> list[dict[str, Any]]:
    """Return the results of all settings; those in the file --partial are not computed again."""
    done = json.loads(a.partial.read_text()) if a.partial and a.partial.exists() else []
    for setting in settings[len(done) :]:
        done.append(measure_setting(setting))
        if a.partial:
            a.partial.write_text(json.dumps(done))
    return done


def measure_dims(a: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the results of multiclass fits for each capsule dimension (Figure 5)."""
    return run_settings(a, [{"capsule_dim": d} for d in a.dims], lambda one: fit_and_score(a, **one)[1])


def measure_architectures(a: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the results of one_vs_all and all_vs_all for each capsule dimension (Figure 5)."""
    kinds = ("one_vs_all", "all_vs_all")
    settings = [{"capsule_dim": d, "architecture": kind} for kind in kinds for d in a.dims]
    return run_settings(a, settings, lambda one: fit_and_score(a, **one)[1])


def measure_convergence(a: argparse.Namespace) -> list[dict[str, Any]]:
    """Return log-loss and training error after each pass, with and without momentum and threshold nu."""
    data, _ = open_datasets(a.data)

    def fit_update(one: dict[str, Any]) -> dict[str, Any]:
        model = sl.CapsuleRegression(
            **PAPER,
            capsule_dim=4,
            momentum=one["momentum"],
            nu_schedule=[(one["nu"], 10**6)] if one["nu"] else None,
            max_iter=a.passes or 1000,
            random_state=a.seed,
            n_jobs=a.jobs,
        ).fit(data)
        curve = model.history_
        found = {
            **one,
            "log_loss": [round(r["objective"] / np.log(len(model.classes_)), 5) for r in curve],
            "train_error": [round(r["train_error"], 5) for r in curve],
            "seconds": round(sum(r["seconds"] for r in curve), 1),
        }
        print(one, found["log_loss"][-1], found["train_error"][-1], found["seconds"], flush=True)
        return found

    return run_settings(a, [{"momentum": m, "nu": nu} for m in (0.0, 0.9) for nu in (0.0, 0.8)], fit_update)


def measure_starts(a: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the lowest training error within 1,000 passes for several starts (Figure 8).

    The updates have momentum 0.9 and the threshold nu = 0.8, as at the start of the paper's main experiments.
    """
    data, _ = open_datasets(a.data)
    n = len(data)
    x, y = data.read_x(0, n).reshape(n, -1).astype(np.float32), data.read_y(0, n)
    first = sl.CapsuleRegression(capsule_dim=1, max_iter=1, **PAPER).fit(data)
    if first.projection_ is not None:
        x = x @ first.projection_.astype(np.float32)
    data = sl.Dataset.from_arrays(x, y)
    settings: list[dict[str, Any]] = [{"init": "subspace"}]
    settings += [
        {"init": "random", "init_scale": s, "random_state": a.seed + i}
        for s in SCALES
        for i in range(a.starts)
    ]

    def fit_start(one: dict[str, Any]) -> dict[str, Any]:
        schedule, passes = [(0.8, 10**6)], a.passes or 1000
        model = sl.CapsuleRegression(
            **PAPER, capsule_dim=4, nu_schedule=schedule, max_iter=passes, n_jobs=a.jobs, **one
        ).fit(data)
        errors = [r["train_error"] for r in model.history_]
        found = {**one, "lowest_train_error": round(min(errors), 5), "at_pass": int(np.argmin(errors)) + 1}
        print(found, flush=True)
        return found

    return run_settings(a, settings, fit_start)


def draw_latents(a: argparse.Namespace) -> list[dict[str, Any]]:
    """Draw capsule vectors of test rows (d = 2), and the best training row of each element (d = 8)."""
    from scalelatent.models.capsule.report_data import collect_report_data
    from scalelatent.models.capsule.report_figures import plot_latents, plot_prototypes

    train, test = open_datasets(a.data)
    flat, in_plane = fit_and_score(a, capsule_dim=2)
    shown = collect_report_data(flat, test)
    assert shown.sample is not None
    write_png(
        plot_latents(shown.sample.points, shown.sample.codes, shown.class_names),
        get_picture_path(a, "latents"),
    )
    deep, in_space = fit_and_score(a, capsule_dim=8)
    kept = collect_report_data(deep, train[: 5 * len(train) // 6])
    side = round(kept.prototypes.x.shape[-1] ** 0.5)
    figure = plot_prototypes(kept.prototypes.x, kept.prototypes.rows >= 0, kept.class_names, (side, side))
    write_png(figure, get_picture_path(a, "prototypes"))
    return [in_plane, in_space]


def get_picture_path(a: argparse.Namespace, name: str) -> Path:
    """Return the path of a picture, with the name of the data set unless it is MNIST."""
    other = "" if a.data == "mnist" else f"_{Path(a.data).name.lower()}"
    return RESULTS / f"paper_capsule_{name}{other}.png"


def draw_experiment(experiment: str, results: list[dict[str, Any]], path: Path) -> None:
    """Draw the results of an experiment into a PNG file, like the figure of Saul (2021)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    if experiment in ("dims", "architectures"):
        ax = figure.subplots()
        for architecture in dict.fromkeys(one["architecture"] for one in results):
            own = [one for one in results if one["architecture"] == architecture]
            dimensions = [one["capsule_dim"] for one in own]
            ax.semilogx(
                dimensions, [100 * one["test_error"] for one in own], "o-", base=2, label=architecture
            )
        ax.set(xlabel="capsule dimension d", ylabel="test error, %", ylim=(0, None))
        ax.legend(frameon=False)
    elif experiment == "convergence":
        axes = figure.subplots(1, 2)
        for one in results:
            style = {"color": "C0" if one["momentum"] else "k", "ls": "--" if one["nu"] else "-"}
            label = f"momentum {one['momentum']}, nu {one['nu']}"
            for ax, key in zip(axes, ("log_loss", "train_error"), strict=True):
                ax.loglog(range(1, len(one[key]) + 1), one[key], label=label, **style)
                ax.set(
                    xlabel="pass",
                    ylabel={
                        "log_loss": "log-loss / log of the number of classes",
                        "train_error": "training error",
                    }[key],
                )
        axes[0].legend(frameon=False)
    else:
        ax = figure.subplots()
        scales = sorted({r["init_scale"] for r in results if r["init"] == "random"})
        groups = [
            [100 * r["lowest_train_error"] for r in results if r.get("init_scale") == s] for s in scales
        ]
        ax.boxplot(groups, tick_labels=[f"random, {s:g}" for s in scales])
        ax.axhline(100 * results[0]["lowest_train_error"], color="C3", label="subspace start")
        ax.set(ylabel="lowest training error, %", xlabel="standard deviation of h at the start")
        ax.legend(frameon=False)
    figure.savefig(path, dpi=120)


EXPERIMENTS = {
    "dims": measure_dims,
    "architectures": measure_architectures,
    "convergence": measure_convergence,
    "starts": measure_starts,
    "latents": draw_latents,
}


def main() -> None:
    args = parser(__doc__, "paper_capsule")
    args.add_argument("experiment", choices=EXPERIMENTS)
    args.add_argument("--data", default="mnist", help=f"{' or '.join(DATA_SETS)}, or a folder")
    args.add_argument("--jobs", type=int, default=None, help="threads; all cores by default")
    args.add_argument("--dims", type=lambda text: [int(d) for d in text.split(",")], default=DIMS)
    args.add_argument(
        "--passes", type=int, default=None, help="largest number of passes; None: as in the paper"
    )
    args.add_argument("--starts", type=int, default=N_STARTS, help="random starts for each noise level")
    args.add_argument(
        "--partial", type=Path, help="JSON file of finished results, from which a later run resumes"
    )
    a = args.parse_args()
    results = EXPERIMENTS[a.experiment](a)
    out = get_picture_path(a, a.experiment).with_suffix(".json") if a.out.stem == "paper_capsule" else a.out
    if a.experiment != "latents":
        draw_experiment(a.experiment, results, out.with_suffix(".png"))
    write(out, a.seed, results)


if __name__ == "__main__":
    main()
