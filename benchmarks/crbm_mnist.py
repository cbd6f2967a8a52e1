"""Measure the errors of conditional RBMs on corrupted MNIST, as Tables 1 and 2 of Ping and Ihler (2017) do.

    python benchmarks/crbm_mnist.py                                all learners, all tasks, 5 epochs each
    python benchmarks/crbm_mnist.py --tasks noisy10 --learners mle-bp,logistic
    python benchmarks/crbm_mnist.py --rate 0.05:3,0.01:2           three epochs at 0.05, two at 0.01
    python benchmarks/crbm_mnist.py --select 5000                  choose each learning rate first (see below)
    python benchmarks/crbm_mnist.py --full --run-dir RUN           50 epochs of mle-bp at 10 % noise, with
                                                                   checkpoints; the same command resumes it
    python benchmarks/crbm_mnist.py --full --run-dir RUN --until 10    interrupt it after epoch 10
    python benchmarks/crbm_mnist.py --full --run-dir RUN --tol 0.001   end the sweeps of a row when no belief
                                                                   changes by more (tolerance of the paper)
    python benchmarks/crbm_mnist.py --full --run-dir RUN --learners logistic --tasks noisy10,noisy20
        --select 10000 --patience 10 --tol 0.001                   cells of the paper's tables: 50 epochs
                                                                   (CD: 200), with a chosen learning rate
    python benchmarks/crbm_mnist.py --full --run-dir RUN --learners cd-1 --tasks noisy10 --from-logistic 20
        --rate 0.005:40,0.001:160 --patience 8                     CD from 20 epochs of logistic regression

Pixels above 127 are 1. The training rows are 0:50,000 and the validation rows 50,000:60,000 of the training
set; the test rows are all 10,000 test images. Each image is corrupted once, or in each epoch with --fresh.
Errors are those of the test images with the parameters of the epoch that has the smallest validation error.
"All" is the percentage of wrong pixels, and "Changed" the percentage of wrong pixels among the pixels that
the corruption changed.

--select N tries the rates 0.05, 0.02, 0.01 and 0.005 for --select-epochs epochs of N rows with sl.Search, and
uses the rate with the smallest validation error. Without --select, all learners use --rate. The JSON file has
one entry for each pair of task and learner, so that separate runs can measure them. --full skips the pairs
that the file has, and resumes interrupted ones. Needs SCALELATENT_DATA.
"""

from __future__ import annotations

import json
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from common import mnist, parser, write_part, write_png

import scalelatent as sl
from scalelatent.engine.callbacks import Callback
from scalelatent.kernels.corruption import corrupt

SHAPE = (28, 28)
TASKS: dict[str, dict[str, Any]] = {
    "noisy10": {"kind": "flip", "rate": 0.1},
    "noisy20": {"kind": "flip", "rate": 0.2},
    "occluded8": {"kind": "occlude", "size": (8, 8), "shape": SHAPE},
    "occluded12": {"kind": "occlude", "size": (12, 12), "shape": SHAPE},
}
LEARNERS: dict[str, dict[str, Any]] = {
    "logistic": {"learner": "logistic"},
    "cd-1": {"learner": "cd"},
    "cd-10": {"learner": "cd", "gibbs_steps": 10},
    "pcd": {"learner": "pcd"},
    "cd-percloss": {"learner": "cd-percloss"},
    "mle-mf": {"learner": "mle-mf"},
    "lssvm": {"learner": "lssvm"},
    "mssvm": {"learner": "mssvm"},
    "mle-bp": {"learner": "mle-bp"},
}
RATES = (0.05, 0.02, 0.01, 0.005)
# Learning rates of --from-logistic, as pairs (rate, epochs).
LOGISTIC_RATES = [(0.05, 8), (0.01, 8), (0.002, 4)]
# Errors in percent (All, Changed) in Tables 1 and 2 of Ping and Ihler (2017) after 50 epochs (cd: 200), by
# learner. The four pairs are the tasks noisy 10 %, noisy 20 %, occluded 8 x 8 and occluded 12 x 12 pixels.
PAPER = {
    "logistic": [(1.960, 12.531), (4.088, 12.609), (1.468, 61.304), (3.498, 53.971)],
    "cd-1": [(1.925, 12.229), (4.012, 12.597), (1.814, 63.130), (3.983, 58.376)],
    "cd-10": [(1.816, 11.103), (3.995, 11.271), (1.707, 67.925), (3.921, 63.237)],
    "cd-percloss": [(1.760, 11.121), (3.970, 10.876), (1.394, 45.684), (3.483, 35.755)],
    "mle-mf": [(1.862, 11.319), (3.917, 10.939), (1.492, 49.553), (3.477, 40.703)],
    "mle-bp": [(1.688, 10.718), (3.691, 10.409), (1.329, 39.785), (3.117, 36.233)],
    "lssvm": [(1.807, 11.565), (3.910, 11.175), (1.496, 44.037), (3.468, 39.140)],
    "mssvm": [(1.751, 11.023), (3.804, 10.627), (1.391, 41.829), (3.273, 35.712)],
}
# Learners for which --full measures and draws the errors of Figure 3 of Ping and Ihler (2017).
FIGURE_LEARNERS = ("mle-bp", "cd-10")
# Keys of a record of a fit's history that are printed and written to the results.
FIT_KEYS = ("pass", "objective", "train_error", "validation_error", "changed_error", "converged", "n_sweeps")


class PrintEpochs(Callback):
    """Callback that prints one line per epoch, and stops the fit after epoch ``until``."""

    def __init__(self, name: str, until: int | None = None) -> None:
        self.name, self.until, self._begin = name, until, time.perf_counter()

    def on_pass_end(self, record: dict[str, Any]) -> bool:
        """Print objective and errors of the epoch; return True after epoch ``until``, to stop the fit."""
        reported = " ".join(f"{k} {record[k]:.5g}" for k in FIT_KEYS if record.get(k) is not None)
        print(f"{self.name}: {reported} ({time.perf_counter() - self._begin:.0f} s)", flush=True)
        return record["pass"] == self.until


@cache
def load_binary_images(rows: int, held: int, tested: int) -> dict[str, np.ndarray]:
    """Return ``rows`` training, ``held`` validation and ``tested`` test images, binary (n, 784) uint8."""
    x, test = mnist()[0], mnist(part="test")[0]
    parts = {"train": x[:rows], "validation": x[50_000 : 50_000 + held], "test": test[:tested]}
    return {name: (part > 127).astype(np.uint8) for name, part in parts.items()}


def make_pairs(task: str, args: Any) -> dict[str, Any]:
    """Return (corrupted, clean) images of the training, validation and test rows."""
    out: dict[str, Any] = {}
    for name, v in load_binary_images(args.rows, args.validation_rows, args.test_rows).items():
        x = corrupt(v, np.arange(len(v)), seed=args.seed, stage=f"{task}-{name}", **TASKS[task])
        out[name] = (x, v)
    return out


def read_rates(text: str) -> float | list[tuple[float, int]]:
    """Parse the option --rate: a learning rate, or a schedule as a list of (rate, epochs)."""
    if ":" not in text:
        return float(text)
    return [(float(rate), int(epochs)) for rate, epochs in (part.split(":") for part in text.split(","))]


def make_model(task: str, learner: str, rate: Any, epochs: int, args: Any) -> sl.ConditionalRBM:
    """Return an unfitted estimator for a task (corruption) and a learner, with the command line's options."""
    return sl.ConditionalRBM(
        **LEARNERS[learner],
        n_hidden=args.hidden,
        learning_rate=rate,
        batch_size=args.batch,
        init_scale=args.init_scale,
        tol=args.tol,
        n_epochs=epochs,
        patience=args.patience,
        corruption=TASKS[task] if args.fresh else None,
        random_state=args.seed,
        n_jobs=args.jobs,
    )


def fit_model(
    model: sl.ConditionalRBM | sl.Search,
    rows: dict[str, Any],
    name: str,
    args: Any,
    limit: int | None = None,
    **how: Any,
) -> None:
    """Fit a model or a search to the first ``limit`` image pairs (None: all); print errors of each epoch."""
    x, v = (part[:limit] for part in rows["train"])
    given = (v, None) if args.fresh else (x, v)
    held = sl.Dataset.from_arrays(*rows["validation"]) if args.fresh else rows["validation"]
    until = how.pop("until", None)
    model.fit(*given, validation=held, callbacks=[PrintEpochs(name, until)], **how)


def choose_rate(
    task: str, learner: str, rows: dict[str, Any], args: Any, folder: Path | None = None
) -> tuple[float, dict[str, float]]:
    """Return the learning rate with the smallest validation error, and the error of each rate in percent."""
    model = make_model(task, learner, None, args.select_epochs, args)
    search = sl.Search(model, {"learning_rate": RATES})
    resume = folder is not None and folder.exists()
    fit_model(search, rows, f"{task} {learner} rates", args, args.select, run_dir=folder, resume=resume)
    scores = search.cv_results_["mean_test_score"]
    return search.best_params_["learning_rate"], {
        str(rate): round(100 * (1 - float(score)), 3) for rate, score in zip(RATES, scores, strict=True)
    }


def compute_errors(model: sl.ConditionalRBM, rows: dict[str, Any], task: str, learner: str) -> dict[str, Any]:
    """Return a fitted model's errors on the test images in percent, with its settings and history."""
    x, v = rows["test"]
    begin = time.perf_counter()
    errors = model.errors(sl.Dataset.from_arrays(x, v))
    seconds = time.perf_counter() - begin
    out: dict[str, Any] = {
        "all": round(100 * errors["all"], 3),
        "changed": round(100 * errors["changed"], 3),
        "validation_all": round(100 * float(model.best_validation_error_), 3),
        "epochs": model.n_iter_,
        "best_epoch": model.best_epoch_,
        "learning_rate": model.learning_rate,
        "batch_size": model.batch_size,
        "init_scale": model.init_scale,
        "tol": model.tol,
        "fit_seconds": round(sum(r.get("seconds") or 0.0 for r in model.history_), 1),
        "predict_rows_a_second": round(len(x) / seconds),
        "rows": {name: len(part[1]) for name, part in rows.items()},
        "history": [{k: r[k] for k in FIT_KEYS if r.get(k) is not None} for r in model.history_],
    }
    if learner in PAPER:
        out["paper"] = dict(zip(("all", "changed"), PAPER[learner][list(TASKS).index(task)], strict=True))
    return out


def run_comparison(task: str, learner: str, args: Any) -> dict[str, Any]:
    """Return the errors of a learner (way to train) on a task (way to corrupt), or why the fit failed."""
    rows = make_pairs(task, args)
    rate, tried = args.rate, {}
    if args.select:
        rate, tried = choose_rate(task, learner, rows, args)
    model = make_model(task, learner, rate, args.epochs, args)
    try:
        fit_model(model, rows, f"{task} {learner}", args)
    except FloatingPointError as error:
        return {"failed": str(error), "learning_rate": rate}
    found = compute_errors(model, rows, task, learner)
    return found | ({"rates_tried": tried} if tried else {})


def run_full_fit(task: str, learner: str, args: Any) -> dict[str, Any]:
    """Run a fit of --full with checkpoints in a folder of --run-dir, and return its errors.

    For the learners of FIGURE_LEARNERS, also return errors by the size of an occluding square, and draw
    figures.
    """
    folder = Path(args.run_dir) / f"{task}-{learner}"
    rows = make_pairs(task, args)
    rate, tried = args.rate, {}
    if args.select:
        rate, tried = choose_rate(task, learner, rows, args, folder / "rates")
    epochs = count_full_epochs(learner, args)
    wanted = make_model(task, learner, rate, epochs, args).set_params(warm_start=args.from_logistic > 0)
    model, resume = wanted, (folder / "engine").exists()
    if args.from_logistic and not resume:
        model = make_model(task, "logistic", LOGISTIC_RATES, args.from_logistic, args)
        fit_model(model.set_params(patience=None), rows, f"{task} logistic", args)
        model.set_params(**wanted.get_params())
    how: dict[str, Any] = {"run_dir": folder, "resume": resume, "until": args.until}
    fit_model(model, rows, f"{task} {learner}", args, engine={"checkpoint_seconds": 60}, **how)
    model.save(folder / "model.zarr", overwrite=True)
    found = compute_errors(model, rows, task, learner) | {
        "patience": args.patience,
        "until": args.until,
        "from_logistic": args.from_logistic,
        "rates_tried": tried,
    }
    if learner in FIGURE_LEARNERS:
        some = rows["test"][1][: args.occlusion_rows]
        found["occlusion"] = compute_occlusion_errors(model, some, args.seed)
        place = args.out.parent / f"crbm_{task}"
        draw_occlusion_errors(args.out, task, learner, found["occlusion"], f"{place}_occlusion.png")
        if learner == "mle-bp":
            draw_figures(model, rows, place)
    return found


def compute_occlusion_errors(
    model: sl.ConditionalRBM, v: np.ndarray, seed: int
) -> dict[str, dict[str, float]]:
    """Return the errors in percent of restoring images with an occluded square, by its side in pixels.

    This repeats Figure 3 of Ping and Ihler (2017).
    """
    found = {}
    for side in range(0, 29, 4):
        how: dict[str, Any] = {"kind": "flip", "rate": 0.0}
        if side:
            how = {"kind": "occlude", "size": (side, side), "shape": SHAPE}
        x = corrupt(v, np.arange(len(v)), seed=seed, stage=f"occlusion-{side}", **how)
        wrong, changed = model.predict(x) != v, x != v
        found[str(side)] = {"all": round(100 * float(wrong.mean()), 3)}
        if changed.any():
            found[str(side)]["changed"] = round(100 * float(wrong[changed].mean()), 3)
    return found


def count_full_epochs(learner: str, args: Any) -> int:
    """Return the epochs of --full: --full-epochs, or 50 (cd learners: 200) as in Ping and Ihler (2017)."""
    return args.full_epochs or (200 if learner.startswith("cd-") else 50)


def has_complete_result(path: Path, part: str) -> bool:
    """Return True if the file has the result ``part`` of a fit that was not stopped by --until."""
    parts = json.loads(path.read_text())["parts"] if path.exists() else {}
    return part in parts and parts[part]["result"].get("until") is None


def draw_occlusion_errors(path: Path, task: str, learner: str, levels: dict[str, Any], place: str) -> None:
    """Draw the errors by size of the occluding square: those of this run (``levels``) and those in a file."""
    from scalelatent.report.style import ACCENT, INK, new_figure, style_axes

    parts = json.loads(path.read_text())["parts"] if path.exists() else {}
    kept = {name: parts.get(f"full/{task}/{name}", {}).get("result", {}) for name in FIGURE_LEARNERS}
    figure = new_figure(8, 3.6)
    axes = figure.subplots()
    for name, line in zip(FIGURE_LEARNERS, ("-", "--"), strict=True):
        shown = levels if name == learner else kept[name].get("occlusion", {})
        for key, color in (("all", INK), ("changed", ACCENT)):
            errors = {int(side): level[key] for side, level in shown.items() if key in level}
            if errors:
                label = f"{name}, {key} pixels"
                axes.plot(list(errors), list(errors.values()), line, color=color, marker="o", label=label)
    axes.set(xlabel="side of the occluding square, pixels", ylabel="error, %", ylim=(0, None))
    axes.legend(frameon=False)
    style_axes(axes)
    write_png(figure, place)


def draw_figures(model: sl.ConditionalRBM, rows: dict[str, Any], place: Path) -> None:
    """Draw figures as in Ping and Ihler (2017) to PNG files whose paths begin with ``place``."""
    from scalelatent.models.crbm.report_figures import plot_convergence, plot_restored
    from scalelatent.report.figures import plot_learning

    x, v = (part[:7] for part in rows["test"])
    lines = {"original": v, "given": x, "restored": model.predict(x)}
    figures = {"restored": plot_restored(lines, SHAPE), "learning": plot_learning(model.history_)}
    if any(r.get("converged") is not None for r in model.history_):
        figures["convergence"] = plot_convergence(model.history_)
    for name, figure in figures.items():
        write_png(figure, f"{place}_{name}.png")


def main() -> None:
    arguments = parser(__doc__, "crbm_mnist")
    arguments.add_argument("--tasks", default=None, help=f"from {', '.join(TASKS)}; with --full: noisy10")
    arguments.add_argument(
        "--learners", default=None, help=f"from {', '.join(LEARNERS)}; with --full: mle-bp"
    )
    arguments.add_argument("--epochs", type=int, default=5)
    arguments.add_argument("--rows", type=int, default=50_000, help="training images")
    arguments.add_argument("--validation-rows", type=int, default=10_000)
    arguments.add_argument("--test-rows", type=int, default=10_000)
    arguments.add_argument("--hidden", type=int, default=256)
    arguments.add_argument("--batch", type=int, default=20)
    arguments.add_argument(
        "--init-scale", type=float, default=0.01, help="standard deviation of the first weights"
    )
    arguments.add_argument("--tol", type=float, help="end the sweeps of a row when no belief changes by more")
    arguments.add_argument(
        "--rate", type=read_rates, default=0.05, help="learning rate, or a schedule RATE:EPOCHS,RATE:EPOCHS"
    )
    arguments.add_argument(
        "--select", type=int, default=0, help="number of rows that choose the learning rate; 0: use --rate"
    )
    arguments.add_argument(
        "--select-epochs", type=int, default=2, help="epochs of each rate that --select tries"
    )
    arguments.add_argument("--fresh", action="store_true", help="corrupt training images in each epoch")
    arguments.add_argument("--jobs", type=int, default=None)
    arguments.add_argument("--full", action="store_true", help="run long fits, with checkpoints in --run-dir")
    arguments.add_argument(
        "--full-epochs",
        type=int,
        help="epochs of --full; default: 50, and 200 for cd-1, cd-10 and cd-percloss",
    )
    arguments.add_argument(
        "--patience", type=int, help="end a fit this number of epochs after its best epoch"
    )
    arguments.add_argument(
        "--from-logistic",
        type=int,
        default=0,
        help="with --full: start from this number of epochs of logistic regression; 0: from random weights",
    )
    arguments.add_argument("--until", type=int, default=None, help="stop a fit of --full after this epoch")
    arguments.add_argument("--run-dir", default=None, help="folder of the run folders of --full")
    arguments.add_argument(
        "--occlusion-rows",
        type=int,
        default=1000,
        help="number of test images for the errors by size of occlusion",
    )
    args = arguments.parse_args()
    if args.full and args.run_dir is None:
        raise SystemExit("--full writes checkpoints: set --run-dir FOLDER")
    if args.from_logistic and (args.select or not args.full):
        raise SystemExit("--from-logistic needs --full and --rate, not --select")
    tasks = (args.tasks or ("noisy10" if args.full else ",".join(TASKS))).split(",")
    learners = (args.learners or ("mle-bp" if args.full else ",".join(LEARNERS))).split(",")
    for name, known in ((tasks, TASKS), (learners, LEARNERS)):
        if unknown := [n for n in name if n not in known]:
            raise SystemExit(f"unknown: {', '.join(unknown)}; use some of {', '.join(known)}")
    for task in tasks:
        for learner in learners:
            run, part = (
                (run_full_fit, f"full/{task}/{learner}")
                if args.full
                else (run_comparison, f"{task}/{learner}")
            )
            if args.full and has_complete_result(args.out, part):
                print(f"{part}: the result is already in {args.out}", flush=True)
                continue
            found = run(task, learner, args)
            write_part(args.out, part, args.seed, found)
            print(
                f"{part}: errors {found.get('all')} % (changed pixels {found.get('changed')} %)", flush=True
            )


if __name__ == "__main__":
    main()
