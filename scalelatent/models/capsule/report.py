"""Figures of what was collected from the rows, with captions and words for those who do not see them."""

# ruff: noqa: RUF001  the Greek letters of the paper

from __future__ import annotations

import numpy as np

from scalelatent.report.figures import plot_confusion, plot_reliability, plot_votes
from scalelatent.report.page import Picture, count
from scalelatent.report.pictures import (
    MAX_ELEMENTS,
    classes_across,
    image_shape,
    plot_mistakes,
    plot_prototypes,
)
from scalelatent.report.style import percent

from .report_collect import Evidence
from .report_latents import leading_plane, plot_latents

__all__ = ["evidence_pictures"]


def evidence_pictures(evidence: Evidence, rows: str) -> list[Picture]:
    """All figures of the rows, in the order of the page.

    Parameters
    ----------
    evidence : Evidence
    rows : str
        What the rows are: "test", "validation", "training".

    Returns
    -------
    list of Picture
    """
    found = [_latents(evidence, rows) if evidence.sample is not None else _votes(evidence, rows)]
    found.append(_prototypes(evidence, rows))
    if evidence.confusion is not None:
        found.append(_confusion(evidence, rows))
    mistakes = _mistakes(evidence, rows)
    if mistakes is not None:
        found.append(mistakes)
    if evidence.reliability is not None:
        found.append(_reliability(evidence, rows))
    return found


def _latents(evidence: Evidence, rows: str) -> Picture:
    sample, wiring = evidence.sample, evidence.wiring
    assert sample is not None
    shape = image_shape(evidence.feature_shape)
    figure = plot_latents(
        sample.points, sample.codes, evidence.class_names,
        images=evidence.confident.x, has_image=evidence.confident.rows >= 0, shape=shape,
    )  # fmt: skip
    k, large = len(sample.rows), max(wiring.dims) > 2
    which = "all" if k == evidence.n_rows else f"{k:,} evenly spaced of {evidence.n_rows:,}"
    own = "class of a row" if evidence.labelled else "predicted class of a row"
    words = [
        "Squashed latent vectors Ψ_i = h_i / √(Σ_j |h_j|²) of each class's capsule (equation 3.1), "
        f"{which} {rows} rows, coloured by the {own}; the panels' names are the legend. The nearer a "
        "vector comes to the circle, the surer the model is of that class."
    ]
    if wiring.architecture == "one_vs_all":
        words.append("Each panel is the first capsule of a model of its own (its class against all others).")
    if large:
        shares = [
            leading_plane(p, sample.codes == c)[1] for c, p in enumerate(sample.points) if p.shape[1] > 2
        ]
        words.append(
            "Capsules have more than two dimensions: drawn are the two leading directions of each, those "
            f"in which the vectors of its own class are longest; they hold {100 * min(shares):.0f} to "
            f"{100 * max(shares):.0f} % of the squared length (in the corner)."
        )
    if min(wiring.dims) == 1:
        words.append(
            "A capsule of dimension 1 is a strip from -1 to 1 with a lane for each class; its own lane "
            "is shaded."
        )
    if shape is not None:
        words.append("In the corner: the most confidently recognised image of the class.")
    length = [np.linalg.norm(p[sample.codes == c], axis=1) for c, p in enumerate(sample.points)]
    typical = np.median(np.concatenate(length)) if sum(map(len, length)) else float("nan")
    alt = (
        f"{count(wiring.n_classes, 'panel')}, one for each class: points inside the unit circle. Half of "
        f"the rows lie further than {typical:.2f} from the centre in the panel of their own class."
    )
    return Picture(
        "latents", "Latent vectors of each class", " ".join(words), alt, figure, wide=wiring.n_classes > 3
    )


def _votes(evidence: Evidence, rows: str) -> Picture:
    votes, names = evidence.votes, evidence.class_names
    assert votes is not None
    wins = votes.pair_wins
    m = len(names)
    caption = (
        f"The {m * (m - 1) // 2} members of an all-versus-all model each know two classes, so there is no "
        f"one latent space to draw; these are their votes on the {rows} rows. Left: of the {m - 1} votes "
        "a class can get, the share it gets from rows of each true class. Right: rows of the true class "
        "that the member for the pair gives to the other class."
    )
    alt = "Two matrices of classes: shares of votes, and rows lost to each other class."
    if np.isfinite(wins).any():
        i, j = np.unravel_index(np.nanargmin(wins), wins.shape)
        alt += (
            f" The weakest pair: {percent(1 - wins[i, j])} of the rows of class {names[i]} are lost to "
            f"class {names[j]}."
        )
    return Picture(
        "votes", "Votes of the members", caption, alt, plot_votes(votes.shares, wins, names), wide=m > 5
    )


def _prototypes(evidence: Evidence, rows: str) -> Picture:
    kept, shape = evidence.prototypes, image_shape(evidence.feature_shape)
    present = np.asarray(kept.rows >= 0)
    own = "of the class" if evidence.labelled else "predicted as the class"
    words = [
        f"For class i and element α: the {rows} row {own} whose probability gets its largest contribution "
        "from element α of the class's latent vector, where |h_iα| / |h| is largest (equation 3.2)."
    ]
    if evidence.wiring.architecture == "all_vs_all":
        words.append(
            f"The {evidence.wiring.n_classes - 1} members that know a class are taken together: the mean "
            "of (h_iα / |h|)² counts."
        )
    if shape is None:
        words.append("Rows are drawn as curves over their features.")
    if present.shape[1] > MAX_ELEMENTS:
        words.append(f"The first {MAX_ELEMENTS} of {present.shape[1]} elements.")
    missing = [evidence.class_names[c] for c in np.flatnonzero(~present.any(axis=1))]
    if missing:
        words.append(f"No row of class {', '.join(missing)}.")
    best = np.sqrt(kept.score[present])
    alt = (
        f"A grid of {count(present.shape[0], 'class', 'classes')} by {count(present.shape[1], 'element')} "
        f"of {'images' if shape else 'curves'}."
    )
    if best.size:
        alt += f" The elements' shares |h_iα| / |h| range from {best.min():.2f} to {best.max():.2f}."
    figure = plot_prototypes(kept.x, present, evidence.class_names, shape)
    wide = classes_across(*present.shape) or present.shape[1] > 6
    return Picture("prototypes", "Prototypes of each class", " ".join(words), alt, figure, wide=wide)


def _confusion(evidence: Evidence, rows: str) -> Picture:
    confusion, names = evidence.confusion, evidence.class_names
    assert confusion is not None
    off = confusion.counts - np.diag(np.diag(confusion.counts))
    caption = (
        f"Rows of each true class by predicted class, {rows} rows; the bars are each class's error. "
        "Mistakes have a colour scale of their own."
    )
    alt = f"Confusion matrix of {count(len(names), 'class', 'classes')}: {percent(confusion.error)} wrong."
    if off.any():
        i, j = np.unravel_index(off.argmax(), off.shape)
        often = f"Most often, {names[i]} is taken for {names[j]} ({count(int(off[i, j]), 'row')})."
        caption, alt = f"{caption} {often}", f"{alt} {often}"
    return Picture(
        "confusion",
        "Confusion matrix",
        caption,
        alt,
        plot_confusion(confusion.counts, names),
        wide=len(names) > 12,
    )


def _mistakes(evidence: Evidence, rows: str) -> Picture | None:
    found, shape, names = evidence.mistakes.found, image_shape(evidence.feature_shape), evidence.class_names
    if shape is None or not found:
        return None
    truth, guess = [names[row[2]] for row in found], [names[row[3]] for row in found]
    figure = plot_mistakes(
        np.stack([row[4] for row in found]), truth, guess, [row[0] for row in found], shape
    )
    score = "share of votes" if evidence.wiring.architecture == "all_vs_all" else "probability"
    numbers = ", ".join(str(row[1]) for row in found)
    caption = (
        f"The {rows} rows that are wrong with the highest {score}: true → predicted class. Row numbers: "
        f"{numbers}."
    )
    alt = (
        "Images predicted wrong: "
        + ", ".join(f"{t} taken for {g}" for t, g in zip(truth, guess, strict=True))
        + "."
    )
    return Picture("mistakes", "Surest mistakes", caption, alt, figure, wide=len(found) > 5)


def _reliability(evidence: Evidence, rows: str) -> Picture:
    kept = evidence.reliability
    assert kept is not None
    caption = (
        f"How often the predicted class is right, by the probability it was given, {rows} rows. On the "
        "dashed line a probability says what it promises; the mean distance is "
        f"{percent(kept.calibration_error)}. Above the line the model is too modest, below too sure."
    )
    alt = (
        f"Reliability curve; calibration error {percent(kept.calibration_error)}, log-loss "
        f"{kept.log_loss:.3f} nats."
    )
    return Picture(
        "reliability",
        "Reliability of the probabilities",
        caption,
        alt,
        plot_reliability(kept.counts, kept.confidence, kept.hits),
    )
