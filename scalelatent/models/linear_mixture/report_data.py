"""Data of the report figures: one pass of rows through a fitted mixture, reduced to small arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.contract.learners import Backend, Block
from scalelatent.data import Dataset
from scalelatent.engine.backend import make_backend
from scalelatent.engine.reading import Meter, Reader, StopEvent, iter_blocks
from scalelatent.engine.threads import single_threaded
from scalelatent.report.classes import ClassifiedBlock, Confusion, Mistakes, Reliability
from scalelatent.report.runfiles import check_features

from .model.recognition import probabilities
from .output import MixtureRowMap

if TYPE_CHECKING:
    from .estimator import LinearMixture, LinearMixtureClassifier
    from .settings import AnyMixture

# Upper bound of a block of rows in bytes.
BLOCK_BYTES = 32 * 2**20
# Upper bound of the rows of a block.
MOST_ROWS = 4096
# Number of evenly spaced rows in the figure of rows and reconstructions.
N_EXAMPLES = 10
# Number of rows in the figure of the rows with the lowest density.
N_LEAST_LIKELY = 20


@dataclass
class ClassReportData:
    """Data of the figures of a classifier, collected in one pass over rows."""

    n_rows: int
    names: list[str]
    confusion: Confusion | None  # None if the rows have no labels
    reliability: Reliability | None  # None if the rows have no labels
    mistakes: Mistakes
    # One array per block: for each row the certainty of the predicted class, and whether this class is wrong
    certainties: list[np.ndarray] = field(default_factory=list)
    are_wrong: list[np.ndarray] = field(default_factory=list)
    # (n, features): one row of each class, less certain than the median
    examples: np.ndarray = field(default_factory=lambda: np.empty((0, 0)))
    # (n, classes): scores of the examples
    scores: np.ndarray = field(default_factory=lambda: np.empty((0, 0)))
    codes: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # classes of the examples
    # (n, classes, features): reconstructions of the examples by the best component of each class
    reconstructed: np.ndarray = field(default_factory=lambda: np.empty((0, 0, 0)))


@dataclass
class DensityReportData:
    """Data of the figures of a density, collected in one pass over rows."""

    n_rows: int
    log_likelihood: float  # mean, in nats per row
    examples: np.ndarray  # (n, features), evenly spaced rows
    reconstructed: np.ndarray  # the examples as their best components reconstruct them
    least_likely: np.ndarray  # (n, features): the least likely rows
    least_log_likelihoods: np.ndarray  # log-likelihoods of the least likely rows in nats
    least_row_indices: np.ndarray  # indices of the least likely rows in the dataset


def _read_blocks(model: AnyMixture, data: Dataset, classes: np.ndarray | None) -> Iterator[Block]:
    k = len(model.means_)
    row = data.n_features * (data.dtype.itemsize + 12) + 8 * k
    step = max(1, min(MOST_ROWS, BLOCK_BYTES // row))
    blocks = [(a, min(a + step, data.n_rows)) for a in range(0, data.n_rows, step)]
    with single_threaded():
        yield from iter_blocks(Reader(data, None, Meter(), classes), blocks, StopEvent())


def collect_classes(
    model: LinearMixtureClassifier, data: Dataset, *, progress: Callable[[int, int], None] | None = None
) -> ClassReportData:
    """Return the report data of a fitted classifier, from one pass over the rows."""
    check_features(data, model)
    m, labelled = len(model.classes_), data.has_y
    names = [str(c) for c in model.classes_.tolist()]
    confusion, reliability = (Confusion.empty(m), Reliability.empty()) if labelled else (None, None)
    out = ClassReportData(data.n_rows, names, confusion, reliability, Mistakes())
    backend, rows = make_backend(model.device), model._row_map("scores")
    prepared = rows.prepare(backend)
    first: dict[int, tuple[float, np.ndarray, np.ndarray]] = {}
    for block in _read_blocks(model, data, model.classes_ if labelled else None):
        scores = np.array(rows.apply(prepared, block))
        shares = probabilities(scores, model.temperature_)
        seen = ClassifiedBlock(
            block.start, block.x, block.y, scores.argmin(axis=1).astype(np.int32), shares, block.weight
        )
        certain = model._certainty(scores).astype(np.float32)
        if confusion is not None and reliability is not None:
            confusion.add(seen)
            reliability.add(seen)
            out.mistakes.add(seen)
            out.certainties.append(certain)
            out.are_wrong.append(seen.guess != seen.truth)
        _update_examples(first, seen, scores, certain)
        if progress is not None:
            progress(seen.start + len(seen.x), data.n_rows)
    out.codes = np.array(sorted(first), dtype=np.int64)
    out.examples = np.stack([first[c][1] for c in sorted(first)]).astype(np.float32)
    out.scores = np.stack([first[c][2] for c in sorted(first)])
    out.reconstructed = np.stack([_reconstruct(model, out.examples, c, backend) for c in range(m)], axis=1)
    return out


def _update_examples(
    first: dict[int, tuple[float, np.ndarray, np.ndarray]],
    seen: ClassifiedBlock,
    scores: np.ndarray,
    certain: np.ndarray,
) -> None:
    """Add an example of each class that has none: a row of this block with a certainty below the median."""
    for c in np.unique(seen.class_indices):
        if int(c) not in first:
            own = np.flatnonzero(seen.class_indices == c)
            i = own[np.argsort(certain[own], kind="stable")[len(own) // 3]]
            first[int(c)] = float(certain[i]), np.array(seen.x[i]), scores[i]


def _reconstruct(model: AnyMixture, x: np.ndarray, label: int, backend: Backend) -> np.ndarray:
    """Return the reconstructions of rows by the best component of the class ``label``; -1: of all classes."""
    rows: MixtureRowMap = replace(model._row_map("reconstructions"), label=label)
    return np.array(rows.apply(rows.prepare(backend), Block(x, None, None, 0)))


def collect_density(
    model: LinearMixture,
    data: Dataset,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> DensityReportData:
    """Return the report data of a fitted density, from one pass over the rows."""
    check_features(data, model)
    backend, rows = make_backend(model.device), model._row_map("log-likelihood")
    prepared = rows.prepare(backend)
    wanted = np.unique(np.arange(N_EXAMPLES) * data.n_rows // N_EXAMPLES)
    total = weighed = 0.0
    examples, least = [], list[tuple[float, int, np.ndarray]]()
    for block in _read_blocks(model, data, None):
        found = np.array(rows.apply(prepared, block))[:, 0]
        weight = np.ones(len(found)) if block.weight is None else block.weight
        total, weighed = total + float(found @ weight), weighed + float(weight.sum())
        inside = wanted[(wanted >= block.start) & (wanted < block.start + len(found))] - block.start
        examples += [np.array(block.x[i]) for i in inside]
        lowest = np.argsort(found, kind="stable")[:N_LEAST_LIKELY]
        least += [(float(found[i]), block.start + int(i), np.array(block.x[i])) for i in lowest]
        least = sorted(least, key=lambda row: row[:2])[:N_LEAST_LIKELY]
        if progress is not None:
            progress(block.start + len(found), data.n_rows)
    x = np.stack(examples).astype(np.float32)
    return DensityReportData(
        data.n_rows,
        total / weighed if weighed else float("nan"),
        x,
        _reconstruct(model, x, -1, backend),
        np.stack([row[2] for row in least]).astype(np.float32),
        np.array([row[0] for row in least]),
        np.array([row[1] for row in least]),
    )


def list_phases(model: AnyMixture, history: Sequence[dict[str, Any]]) -> list[tuple[int, int, str, bool]]:
    """Return the phases of a history: (first record, last record, name, whether the objective is in nats)."""
    names = [record.get("phase") or "steps" for record in history]
    edges = [i for i in range(len(names)) if i == 0 or names[i] != names[i - 1]] + [len(names)]
    dense = model.likelihood_ in ("ppca", "factor-analysis")
    nats = {"em": dense or model.assignment == "soft", "steps": dense}
    return [(a, b - 1, names[a], nats.get(names[a], False)) for a, b in pairwise(edges)]
