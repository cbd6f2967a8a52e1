"""The report of a conditional RBM: restored images, learning curves, convergence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from scalelatent.data import Dataset
from scalelatent.data.csr import concatenate
from scalelatent.data.feature_names import without_names
from scalelatent.engine.grid import space_ranges
from scalelatent.kernels.arrays import DenseOrCsr
from scalelatent.kernels.corruption import corrupt
from scalelatent.models.crbm.kernels.inference import CONVERGED
from scalelatent.report.figures import plot_learning
from scalelatent.report.interpretation import count_validation_rows, explain_error_gap, usage_snippet
from scalelatent.report.page import Picture, Section, count
from scalelatent.report.pictures import image_shape
from scalelatent.report.runfiles import RunFiles, check_features
from scalelatent.report.style import percent

from .fit import TEST_STAGE, make_corruption
from .report_figures import plot_convergence, plot_restored

if TYPE_CHECKING:
    from .estimator import ConditionalRBM

# The report predicts EDGE_UPDATES / (4 * edges * sweeps) rows, but MIN_ROWS to MAX_ROWS. The 4 counts reading
# and writing of two messages per edge and sweep. 1e10 updates take about a second on one core.
EDGE_UPDATES = 1e10
# Smallest and largest number of predicted rows, and number of ranges of the dataset that they come from.
MIN_ROWS, MAX_ROWS, N_RANGES = 50, 2000, 50
N_SHOWN_IMAGES = 10  # number of images in the picture of restored rows
# Names of the learners in the report.
LEARNERS = {
    "mle-bp": "maximum likelihood by belief propagation",
    "mle-mf": "maximum likelihood by mean field",
    "cd": "contrastive divergence",
    "pcd": "persistent contrastive divergence",
    "cd-percloss": "perceptron loss by contrastive divergence",
    "mssvm": "marginal structured SVM",
    "lssvm": "latent structured SVM",
    "logistic": "logistic regression",
}
# Inference of each learner in training. The other learners draw samples, or have no hidden units.
INFERENCES = {
    "mle-bp": "sum-product belief propagation",
    "mle-mf": "mean field",
    "mssvm": "loss-augmented mixed-product belief propagation",
    "lssvm": "loss-augmented max-product belief propagation",
}


def section(
    model: ConditionalRBM, data: Dataset | None, run: RunFiles, rows: str,
    progress: Callable[[int, int], None] | None,
) -> Section:  # fmt: skip
    """Return the section of an RBM's report: numbers, explanations and figures."""
    consequence = "restored images and their errors are left out"
    evidence = run.collect(data, consequence, partial(collect_rbm, model, progress=progress))
    if evidence is not None and evidence.shape is None:
        run.notes.append("The outputs are not images of the shape of the rows, so the page shows no images.")
    head, table = rbm_numbers(run, model, evidence, rows)
    pictures, words = rbm_pictures(run, model, evidence, rows), explain_numbers(run, model, evidence)
    if model._source == "plain":
        snippet = usage_snippet(
            run, model, "h = model.transform(v)  # v: array of zeros and ones; h: hidden units"
        )
    else:
        snippet = usage_snippet(run, model, gives="outputs, 0 or 1")
    return Section(describe_model(model), head, table, pictures, words, snippet)


@dataclass(frozen=True)
class RbmEvidence:
    """Data of the figures: a sample of rows and the model's predictions for them."""

    n_rows: int  # rows of the dataset
    v: np.ndarray  # true outputs, uint8 (n, outputs)
    predicted: np.ndarray  # predicted outputs, uint8 (n, outputs)
    x: np.ndarray | None  # rows x of the predictions; None for a plain RBM
    corrupted: bool  # True if ``x`` was made from ``v`` by the corruption that training uses
    shape: tuple[int, ...] | None  # shape of an image; None if outputs and inputs are not pixels of images

    @property
    def all_error(self) -> float:
        """Share of wrong values among all outputs of the sample."""
        return float((self.predicted != self.v).mean())

    @property
    def changed_error(self) -> float | None:
        """Share of wrong values among the outputs that differ from x; None if there are none."""
        if self.x is None or not (changed := self.x != self.v).any():
            return None
        return float((self.predicted != self.v)[changed].mean())


def collect_rbm(
    model: ConditionalRBM, data: Dataset, *, sample_rows: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> RbmEvidence:  # fmt: skip
    """Predict the outputs of evenly spaced rows with a fitted conditional RBM."""
    plain = model._source == "plain"
    check_features(data, model)
    model = without_names(model)  # arrays have no feature names, so a model with names would warn
    pieces = space_ranges(
        len(data), _choose_sample_rows(model) if sample_rows is None else sample_rows, N_RANGES
    )
    corrupted = model._source == "corruption" and not data.has_targets
    read = data.read_binary if corrupted or plain else data.read_targets
    v = np.concatenate([read(a, b) for a, b in pieces])
    x = None if plain else _read_inputs(model, data, pieces, v, corrupted)
    if progress is not None:
        progress(0, len(v))
    predicted = np.asarray(model.predict(np.zeros((len(v), 0), np.uint8) if x is None else x))
    if progress is not None:
        progress(len(v), len(v))
    same = x is not None and isinstance(x, np.ndarray) and x.shape == v.shape
    shape = image_shape(data.feature_shape) if same or plain else None
    return RbmEvidence(len(data), v, predicted, x if same else None, corrupted, shape)


def _read_inputs(
    model: ConditionalRBM, data: Dataset, pieces: list[tuple[int, int]], v: np.ndarray, corrupted: bool
) -> DenseOrCsr:
    """Return the inputs x of the sampled rows: stored rows, or the outputs ``v`` after corruption."""
    if not corrupted:
        return concatenate([data.read_x(a, b) for a, b in pieces])
    rows = np.concatenate([np.arange(a, b) for a, b in pieces])
    # Corrupt with the parameters of training, but with other random numbers.
    how = make_corruption(model.corruption, data, model.seed_, TEST_STAGE)
    names = "kind", "rate", "size", "shape", "seed", "stage"
    return corrupt(v, rows, **{name: getattr(how, name) for name in names})


def _choose_sample_rows(model: ConditionalRBM) -> int:
    edges = max(1, model.W_.size) * max(1, model.n_sweeps_)
    return int(np.clip(EDGE_UPDATES / (4 * edges), MIN_ROWS, MAX_ROWS))


def describe_model(model: ConditionalRBM) -> str:
    """Return the text under the title: model, numbers of outputs and hidden units, and learner."""
    n_visible, n_hidden = model.W_.shape
    hidden = f" and {count(n_hidden, 'hidden unit')}" if n_hidden else ""
    name = "Restricted Boltzmann machine" if model._source == "plain" else "Conditional RBM"
    return f"{name}, {count(n_visible, 'output')}{hidden}, {LEARNERS.get(model.learner, model.learner)}"


def rbm_numbers(
    run: RunFiles, model: ConditionalRBM, evidence: RbmEvidence | None, rows: str
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return the numbers at the top of the page and those of the table, as (label, value)."""
    head: list[tuple[str, str]] = []
    table: list[tuple[str, str]] = []
    if evidence is not None:
        table.append((f"{rows} rows", f"{evidence.n_rows:,}"))
        sampled = len(evidence.v) < evidence.n_rows
        if sampled:
            table.append(("rows predicted for this page", f"{len(evidence.v):,}, evenly spaced"))
        part = f" of {count(len(evidence.v), 'row')}" if sampled else ""
        if model._source != "plain":
            error, of = evidence.all_error, part
            # If the run recorded the error of all test rows, show it instead of that of the sample.
            if sampled and rows == "test" and "test_error" in run.event("scored"):
                error, of = run.event("scored")["test_error"], ""
            head.append((f"{rows} error{of}", percent(error)))
            spread = _format_interval(evidence, error, evidence.n_rows if of != part else len(evidence.v))
            table.append((f"{rows} error{of}, all outputs", f"{percent(error)} ({spread})"))
            name, wrong = _score_baseline(evidence)
            head.append((name + part, percent(wrong)))
            means = (
                "x is returned unchanged" if evidence.x is not None else "each output's more frequent value"
            )
            table.append((f"error of {name}{part}: {means}", percent(wrong)))
        if (changed := evidence.changed_error) is not None:
            head.append((f"error where changed{part}", percent(changed)))
            table.append((f"{rows} error{part}, outputs changed in x", percent(changed)))
    if model.best_validation_error_ is not None:
        held = count_validation_rows(run)
        counted = f" (all outputs of {count(held, 'row')})" if held else ""
        table.append(("best validation error", f"{percent(model.best_validation_error_)}{counted}"))
        table.append(("epoch of these parameters", f"{model.best_epoch_:,}"))
    head.append(("epochs", f"{model.n_iter_:,}"))
    table.append(("epochs", f"{model.n_iter_:,}"))
    if run.history and run.history[-1].get("converged") is not None:
        table.append(("rows that converged in the last epoch", percent(run.history[-1]["converged"])))
    seconds = sum(record.get("seconds") or 0.0 for record in run.history)
    trained = sum(record.get("rows") or 0 for record in run.history)
    if seconds > 0:
        head.append(("rows per second", f"{trained / seconds:,.0f}"))
        table.append(("rows per second", f"{trained / seconds:,.0f}"))
    if run.event("fit_started").get("rows"):
        table.append(("training rows", f"{run.event('fit_started')['rows']:,}"))
    table.append(("predicts by", f"{model.inference_}, {count(model.n_sweeps_, 'sweep')}"))
    table.append(("learned weights", f"{model.W_.size + model.Wvx_.size + model.Whx_.size:,}"))
    largest = np.abs(model.W_).max(initial=0.0)
    table.append(("largest weight between outputs and hidden units", f"{largest:.2f}"))
    table.append(("seed", str(model.seed_)))
    return head, table


def _format_interval(evidence: RbmEvidence, error: float, rows: int) -> str:
    """Return the number of rows and a 95 % interval of the error, as text.

    The width follows from the spread of the errors of single rows, because outputs of a row are dependent.
    """
    own = (evidence.predicted != evidence.v).mean(axis=1)
    half = 1.96 * float(own.std(ddof=1)) / rows**0.5 if len(own) > 1 else float("nan")
    if not half > 0:
        return f"of {count(rows, 'row')}"
    low, high = max(0.0, error - half), min(1.0, error + half)
    return f"of {count(rows, 'row')}; 95 % interval {100 * low:.2f} to {100 * high:.2f} %"


def _score_baseline(evidence: RbmEvidence) -> tuple[str, float]:
    """Return name and error of a prediction without a model: x or, without x, the more frequent values."""
    if evidence.x is not None:
        return "doing nothing", float((evidence.x != evidence.v).mean())
    ones = evidence.v.mean(axis=0)
    return "ignoring x", float(np.minimum(ones, 1 - ones).mean())


def explain_numbers(
    run: RunFiles, model: ConditionalRBM, evidence: RbmEvidence | None
) -> list[tuple[str, str]]:
    """Return explanations of the numbers, as (heading, text)."""
    found = []
    if differ := explain_error_gap(run, model.n_iter_):
        found.append(("Validation and test error", differ))
    if evidence is None or model._source == "plain":
        return found
    if evidence.x is not None:
        text = (
            "The share of outputs that differ between x and v: the error of a model that returns x "
            "unchanged. A model is useful if its error of all outputs is lower. The error where changed "
            "counts only these outputs: doing nothing gets 100 % of them wrong."
        )
        found.append(("Doing nothing", text))
    text = (
        "These rows are a sample. The interval contains the model's error on all rows of the same kind in 95 "
        "of 100 cases. It follows from the spread of the errors of single rows, because the outputs of a row "
        "are not independent."
    )
    found.append(("95 % interval", text))
    return found


def rbm_pictures(
    run: RunFiles, model: ConditionalRBM, evidence: RbmEvidence | None, rows: str
) -> list[Picture]:
    """Return the figures that the evidence and the history allow, in the order on the page."""
    found = []
    if evidence is not None and evidence.shape is not None and evidence.x is not None:
        found.append(_restored_picture(evidence, evidence.x, evidence.shape, rows))
    if run.history:
        found.append(_learning_picture(run, model))
    if any(record.get("converged") is not None for record in run.history):
        found.append(_convergence_picture(run, model))
    return found


def _restored_picture(evidence: RbmEvidence, x: np.ndarray, shape: tuple[int, ...], rows: str) -> Picture:
    some = np.linspace(0, len(x) - 1, min(N_SHOWN_IMAGES, len(x))).astype(int)
    images = {"original": evidence.v[some], "given": x[some], "restored": evidence.predicted[some]}
    wrong = (images["restored"] != images["original"]).sum(axis=1)
    words = (
        f"Evenly spaced {rows} rows: the true outputs, the input of the model, and its prediction (Figure 2 "
        "of the paper)."
    )
    if evidence.corrupted:
        words += " The inputs were corrupted as in training, with other random numbers."
    alt = (
        f"{count(len(some), 'image')} in three lines; restored with {int(wrong.min())} to {int(wrong.max())} "
        f"wrong pixels of {images['original'].shape[1]}."
    )
    return Picture("restored", "Restored images", words, alt, plot_restored(images, shape), wide=True)


def _learning_picture(run: RunFiles, model: ConditionalRBM) -> Picture:
    beliefs = model.learner in ("mle-bp", "mle-mf", "logistic")
    unit = "log-loss of the beliefs, nats per output" if beliefs else "energy gap per output"
    held = any(record.get("validation_error") is not None for record in run.history)
    words = (
        f"Above: {unit}, measured during training. Below: wrong outputs of the negative phase in training"
        f"{', and of the validation rows' if held else ''}."
    )
    key = "validation_error" if held else "train_error"
    errors = [percent(r[key]) for r in (run.history[0], run.history[-1]) if r.get(key) is not None]
    epochs = len({record["pass"] for record in run.history})
    alt = f"Two curves over {count(epochs, 'epoch')}"
    alt += f"; error {errors[0]} first, {errors[-1]} last." if errors else "."
    return Picture(
        "learning",
        "Objective and error against epochs",
        words,
        alt,
        plot_learning(run.history, unit, "epoch"),
    )


def _convergence_picture(run: RunFiles, model: ConditionalRBM) -> Picture:
    shares = [record["converged"] for record in run.history if record.get("converged") is not None]
    words = (
        f"Share of the training rows none of whose beliefs changed by more than {model.tol or CONVERGED:g} "
        f"in the last sweep of {INFERENCES[model.learner]} (Figure 4 of the paper). The model learns from "
        "rows that did not converge as well."
    )
    alt = f"From {percent(shares[0])} in the first epoch to {percent(shares[-1])} in the last."
    return Picture("convergence", "Rows that converged", words, alt, plot_convergence(run.history))
