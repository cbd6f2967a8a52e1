"""One pass of the rows through a fitted capsule model, down to the small arrays that figures are drawn from.

Rows come in blocks of bounded size; what stays is a confusion matrix, sums, an evenly spaced sample of
latents and the few rows that are shown as pictures. Memory therefore does not grow with the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from scalelatent.contract.learners import Block
from scalelatent.data import Dataset
from scalelatent.engine.backend import make_backend
from scalelatent.engine.reading import Meter, Reader, StopEvent, iter_blocks
from scalelatent.engine.threads import single_threaded
from scalelatent.report.sampled import check_width

from .report_tallies import (
    Confident,
    Confusion,
    Mistakes,
    Prototypes,
    Reliability,
    RowsSeen,
    Sample,
    Votes,
)
from .report_wiring import Wiring, wiring_of

__all__ = ["Evidence", "collect_evidence"]

BLOCK_BYTES = 32 * 2**20
MAX_BLOCK_ROWS = 4096
SAMPLE_ROWS = 5000
SAMPLE_POINTS = 120_000


@dataclass(frozen=True)
class Evidence:
    """What the figures of a run are drawn from.

    Attributes
    ----------
    n_rows : int
    class_names : list of str
    labelled : bool
        Whether the rows had labels; else ``codes`` everywhere are predicted classes.
    feature_shape : tuple of int
    wiring : Wiring
    confusion : Confusion or None
        None without labels.
    reliability : Reliability or None
        None without labels, and for all-versus-all, whose scores are votes.
    sample : Sample or None
        None for all-versus-all.
    votes : Votes or None
        Of all-versus-all.
    confident, prototypes, mistakes
        Rows to show.
    """

    n_rows: int
    class_names: list[str]
    labelled: bool
    feature_shape: tuple[int, ...]
    wiring: Wiring
    confusion: Confusion | None
    reliability: Reliability | None
    sample: Sample | None
    votes: Votes | None
    confident: Confident
    prototypes: Prototypes
    mistakes: Mistakes


def collect_evidence(
    model: Any,
    data: Dataset,
    *,
    sample_rows: int | None = None,
    block_bytes: int = BLOCK_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> Evidence:
    """Stream rows through a fitted capsule model.

    Parameters
    ----------
    model : CapsuleRegression
        Fitted.
    data : Dataset
        Of the model's width; labels, where there are some, must be the model's classes.
    sample_rows : int, optional
        Rows in the latent scatter, evenly spaced; by default up to 5,000, fewer where there are many classes.
    block_bytes : int
        Memory of one block with everything computed from it.
    progress : callable, optional
        Called with rows done and rows in all.

    Returns
    -------
    Evidence

    Raises
    ------
    DataError
        Another width than the model's, an unknown label (its row is named), rows that cannot be read.

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> from scalelatent import CapsuleRegression
    >>> x, y = load_digits(return_X_y=True)
    >>> model = CapsuleRegression(capsule_dim=2, max_iter=10, random_state=0).fit(x[:1000], y[:1000])
    >>> evidence = collect_evidence(model, Dataset.from_arrays(x[1000:], y[1000:]))
    >>> int(evidence.confusion.counts.sum()), len(evidence.sample.points)
    (797, 10)
    """
    check_width(data, model.n_features_in_)
    wiring, m = wiring_of(model), len(model.classes_)
    votes_only = wiring.architecture == "all_vs_all"
    if sample_rows is None:
        sample_rows = min(SAMPLE_ROWS, SAMPLE_POINTS // m)
    confusion = Confusion.empty(m) if data.has_y else None
    reliability = Reliability.empty() if data.has_y and not votes_only else None
    sample = None if votes_only else Sample.empty(wiring, data.n_rows, sample_rows)
    votes = Votes.empty(wiring) if votes_only else None
    confident = Confident.empty(m, data.n_features, data.dtype)
    prototypes = Prototypes.empty(wiring, data.n_features, data.dtype)
    mistakes = Mistakes()
    kept = (confusion, reliability, sample, votes, confident, prototypes, mistakes)
    for seen in _rows_seen(model, data, wiring, block_bytes):
        for tally in kept:
            if tally is not None:
                tally.add(seen)
        if progress is not None:
            progress(seen.start + len(seen.x), data.n_rows)
    names = [str(c) for c in model.classes_.tolist()]
    return Evidence(data.n_rows, names, data.has_y, data.feature_shape, wiring, *kept)


def block_rows(n_features: int, itemsize: int, total_dim: int, n_classes: int, block_bytes: int) -> int:
    """Rows of a block that, with latents and scores, stays within ``block_bytes``.

    Examples
    --------
    >>> block_rows(784, 1, 80, 10, 2**25)
    4096
    >>> block_rows(1_000_000, 4, 80, 10, 2**25)
    4
    """
    # The row itself and in float32; latents in float32 and, twice, in float64; scores and votes.
    row = n_features * (itemsize + 4) + total_dim * 20 + n_classes * 32
    return max(1, min(MAX_BLOCK_ROWS, block_bytes // row))


def _rows_seen(model: Any, data: Dataset, wiring: Wiring, block_bytes: int) -> Any:
    """Blocks with their latents and scores."""
    step = block_rows(data.n_features, data.dtype.itemsize, wiring.total_dim, wiring.n_classes, block_bytes)
    blocks = [(a, min(a + step, data.n_rows)) for a in range(0, data.n_rows, step)]
    backend = make_backend(model.device)
    latents, scores = model._row_map("latents"), model._row_map("probabilities")
    with single_threaded():
        prepared = latents.prepare(backend)
        reader = Reader(data, None, Meter(), model.classes_)
        for block in iter_blocks(reader, blocks, StopEvent()):
            yield _see(block, latents, scores, prepared)


def _see(block: Block, latents: Any, scores: Any, prepared: Any) -> RowsSeen:
    # Copies: a backend's buffers are used again by its next product.
    h = np.array(latents.apply(prepared, block))
    score = np.array(scores.apply(prepared, block))
    guess = scores.labels(score).astype(np.int32)
    return RowsSeen(block.start, block.x, block.y, guess, score, h, block.weight)
