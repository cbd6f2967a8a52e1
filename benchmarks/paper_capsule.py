"""The paper's experiments on MNIST: python benchmarks/paper_capsule.py dims|architectures|convergence|starts

dims           test error against capsule dimension (Figure 5, multiclass), default parameters, paper's
protocol architectures  one_vs_all and all_vs_all at d = 4 convergence    Figures 6 and 7: four variants of
the update, d = 4, 1,000 passes over all 60,000 rows starts         Figure 8: subspace start against 20 random
starts for each noise level, d = 4, 1,000 passes

Training rows 0:50000, validation rows 50000:60000, test rows never seen. Needs SCALELATENT_DATA.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, mnist, parser, write

import scalelatent as sl

STARTS_PASSES = 1000


# The paper's model, and its algorithm.
PAPER: dict[str, Any] = {"algorithm": "em", "fit_intercept": False, "ridge": 0}


def datasets() -> tuple[sl.Dataset, sl.Dataset, sl.Dataset]:
    """Training, validation and test rows of the paper's protocol."""
    (x, y), (xt, yt) = mnist(), mnist(part="test")
    make = sl.Dataset.from_arrays
    return make(x[:50_000], y[:50_000]), make(x[50_000:], y[50_000:]), make(xt, yt)


def fit_and_score(seed: int, jobs: int | None, **params: Any) -> dict[str, Any]:
    """One fit by the paper's protocol."""
    train, held, test = datasets()
    begin = time.perf_counter()
    model = sl.CapsuleRegression(random_state=seed, n_jobs=jobs, **PAPER, **params)
    model.fit(train, validation=held)
    seconds = time.perf_counter() - begin
    record = {
        **params,
        "architecture": params.get("architecture", "multiclass"),
        "test_error": round(1 - model.score(test), 4),
        "validation_error": round(float(np.mean(model.predict(held) != held.read_y(0, len(held)))), 4),
        "passes": model.n_iter_,
        "seconds": round(seconds, 1),
        "median_seconds_per_pass": float(np.median([r["seconds"] for r in model.history_])),
        "final_log_loss": round(model.history_[-1]["objective"], 4),
    }
    print(record, flush=True)
    return record


def dims(seed: int, jobs: int | None) -> list[dict[str, Any]]:
    """Figure 5, multiclass."""
    return [fit_and_score(seed, jobs, capsule_dim=d) for d in (1, 2, 4, 8, 16)]


def architectures(seed: int, jobs: int | None) -> list[dict[str, Any]]:
    """Members of two classes."""
    return [fit_and_score(seed, jobs, capsule_dim=4, architecture=a) for a in ("one_vs_all", "all_vs_all")]


def convergence(seed: int, jobs: int | None) -> list[dict[str, Any]]:
    """Figures 6 and 7: normalised log-loss and training error of four updates."""
    x, y = mnist()
    data, out = sl.Dataset.from_arrays(x, y), []
    for momentum in (0.0, 0.9):
        for nu in (0.0, 0.8):
            schedule = None if nu == 0 else [(nu, 10**6)]
            model = sl.CapsuleRegression(
                **PAPER,
                capsule_dim=4,
                momentum=momentum,
                nu_schedule=schedule,
                max_iter=1000,
                random_state=seed,
                n_jobs=jobs,
            ).fit(data)
            curve = model.history_
            out.append(
                {
                    "momentum": momentum,
                    "nu": nu,
                    "log_loss": [round(r["objective"] / np.log(10), 5) for r in curve],
                    "train_error": [round(r["train_error"], 5) for r in curve],
                    "seconds": round(sum(r["seconds"] for r in curve), 1),
                }
            )
            print(
                momentum,
                nu,
                out[-1]["log_loss"][-1],
                out[-1]["train_error"][-1],
                out[-1]["seconds"],
                flush=True,
            )
    return out


def starts(seed: int, jobs: int | None, partial: Path | None = None) -> list[dict[str, Any]]:
    """Figure 8: lowest training error within 1,000 passes; standard deviations of h at the start as noise
    levels.

    The update is that of the main experiments in its first round: momentum 0.9, nu = 0.8.
    """
    x, y = mnist()
    data = sl.Dataset.from_arrays(x, y)
    projected = (
        sl.CapsuleRegression(capsule_dim=1, max_iter=1, **PAPER).fit(data).projection_.astype(np.float32)
    )
    data = sl.Dataset.from_arrays(x.astype(np.float32) @ projected, y)
    settings: list[dict[str, Any]] = [{"init": "subspace"}]
    settings += [
        {"init": "random", "init_scale": s, "random_state": seed + i}
        for s in (0.1, 1.0, 10.0)
        for i in range(20)
    ]
    done = json.loads(partial.read_text()) if partial and partial.exists() else []
    for one in settings[len(done) :]:
        model = sl.CapsuleRegression(
            **PAPER, capsule_dim=4, nu_schedule=[(0.8, 10**6)], max_iter=STARTS_PASSES, n_jobs=jobs, **one
        ).fit(data)
        errors = [r["train_error"] for r in model.history_]
        done.append(
            {**one, "lowest_train_error": round(min(errors), 5), "at_pass": int(np.argmin(errors)) + 1}
        )
        print(done[-1], flush=True)
        if partial:
            partial.write_text(json.dumps(done))
    return done


def draw(experiment: str, results: list[dict[str, Any]], folder: Path) -> None:
    """The figure of an experiment, beside its numbers."""
    from matplotlib.figure import Figure

    path = folder / f"paper_capsule_{experiment}.png"
    if experiment in ("dims", "architectures"):
        from scalelatent.report.comparison import plot_error_by_dimension

        plot_error_by_dimension(results, path)
        return
    figure = Figure(figsize=(9, 4), layout="constrained")
    if experiment == "convergence":
        axes = figure.subplots(1, 2)
        for one in results:
            style = {"color": "C0" if one["momentum"] else "k", "ls": "--" if one["nu"] else "-"}
            label = f"momentum {one['momentum']}, nu {one['nu']}"
            for ax, key in zip(axes, ("log_loss", "train_error"), strict=True):
                ax.loglog(range(1, len(one[key]) + 1), one[key], label=label, **style)
                ax.set(
                    xlabel="pass",
                    ylabel={"log_loss": "log-loss / log 10", "train_error": "training error"}[key],
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


EXPERIMENTS = {"dims": dims, "architectures": architectures, "convergence": convergence, "starts": starts}


def main() -> None:
    """Run one experiment and write its figures."""
    args = parser(__doc__, "paper_capsule")
    args.add_argument("experiment", choices=EXPERIMENTS)
    args.add_argument("--jobs", type=int, default=None, help="threads; all cores by default")
    args.add_argument(
        "--partial",
        type=Path,
        default=None,
        help="starts: file of finished results, from which a later run resumes",
    )
    a = args.parse_args()
    more = {"partial": a.partial} if a.experiment == "starts" else {}
    results = EXPERIMENTS[a.experiment](a.seed, a.jobs, **more)
    out = RESULTS / f"paper_capsule_{a.experiment}.json" if a.out.stem == "paper_capsule" else a.out
    draw(a.experiment, results, out.parent)
    write(out, a.seed, results)


if __name__ == "__main__":
    main()
