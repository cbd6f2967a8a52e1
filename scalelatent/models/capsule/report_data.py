"""What the figures of a capsule model are drawn from: one pass of rows through it, down to small arrays.

What stays of a block is a confusion matrix, sums, an evenly spaced sample of latents and the few rows that
are shown as pictures, so memory does not grow with the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from scalelatent.contract.learners import Block
from scalelatent.data import Dataset
from scalelatent.engine.backend import make_backend
from scalelatent.engine.reading import Meter, Reader, StopEvent, iter_blocks
from scalelatent.engine.threads import single_threaded
from scalelatent.models.capsule.model.members import Members
from scalelatent.models.capsule.model.predict import CapsuleRows, Weights
from scalelatent.report.classes import ClassifiedBlock, Confusion, Mistakes, Reliability
from scalelatent.report.runfiles import check_width

if TYPE_CHECKING:
    from .estimator import CapsuleRegression

__all__ = ["ReportData", "collect_report_data"]

BLOCK_BYTES = 32 * 2**20
MAX_BLOCK_ROWS = 4096
SAMPLE_ROWS = 5000
SAMPLE_POINTS = 120_000


@dataclass(frozen=True)
class ReportData:
    """What the figures of a run are drawn from."""

    n_rows: int
    class_names: list[str]
    labelled: bool  # else ``codes`` everywhere are predicted classes
    feature_shape: tuple[int, ...]
    wiring: Wiring
    confusion: Confusion | None  # None without labels
    reliability: Reliability | None  # None without labels, and for all-versus-all, whose scores are votes
    sample: Sample | None  # None for all-versus-all
    votes: Votes | None  # of all-versus-all
    confident: Confident
    prototypes: Prototypes
    mistakes: Mistakes


def collect_report_data(
    model: CapsuleRegression,
    data: Dataset,
    *,
    sample_rows: int | None = None,
    block_bytes: int = BLOCK_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> ReportData:
    """Stream rows through a fitted capsule model."""
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
    return ReportData(data.n_rows, names, data.has_y, data.feature_shape, wiring, *kept)


def block_rows(n_features: int, itemsize: int, total_dim: int, n_classes: int, block_bytes: int) -> int:
    """Rows of a block that, with latents and scores, stays within ``block_bytes``."""
    # The row itself and in float32; latents in float32 and, twice, in float64; scores and votes.
    row = n_features * (itemsize + 4) + total_dim * 20 + n_classes * 32
    return max(1, min(MAX_BLOCK_ROWS, block_bytes // row))


def _rows_seen(
    model: CapsuleRegression, data: Dataset, wiring: Wiring, block_bytes: int
) -> Iterator[RowsSeen]:
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


def _see(block: Block, latents: CapsuleRows, scores: CapsuleRows, prepared: Weights) -> RowsSeen:
    # Copies: a backend's buffers are used again by its next product.
    h = np.array(latents.apply(prepared, block))
    score = np.array(scores.apply(prepared, block))
    guess = scores.labels(score).astype(np.int32)
    return RowsSeen(block.start, block.x, block.y, guess, score, block.weight, h)


@dataclass(frozen=True)
class Wiring:
    """The columns of ``transform`` that belong to each class."""

    architecture: str
    # of each class: (columns of the member, columns of the capsule); m - 1 in all-versus-all
    capsules: tuple[tuple[tuple[slice, slice], ...], ...]
    # int64 (members, 2), classes of each member's two capsules; empty unless all-versus-all
    pairs: np.ndarray
    total_dim: int  # columns of ``transform``

    @property
    def n_classes(self) -> int:
        return len(self.capsules)

    @property
    def dims(self) -> list[int]:
        """Capsule dimension of each class."""
        return [own[0][1].stop - own[0][1].start for own in self.capsules]


def wiring_of(model: CapsuleRegression) -> Wiring:
    """Read the wiring of a fitted :class:`~scalelatent.CapsuleRegression`."""
    # Of the fit: the parameter may have been set to something else since.
    members: Members = model._members
    capsules: list[list[tuple[slice, slice]]] = [[] for _ in range(members.n_classes)]
    for r in range(members.n_members):
        whole = slice(int(members.offsets[r]), int(members.offsets[r + 1]))
        edges = whole.start + np.concatenate([[0], np.cumsum(members.dims[r])])
        for c in range(members.n_classes):
            i = members.labels[r, c]
            # The other capsule of a one-versus-all member stands for all other classes together: it is no
            # one's own.
            if i < 0 or (members.architecture == "one_vs_all" and r != c):
                continue
            capsules[c].append((whole, slice(int(edges[i]), int(edges[i + 1]))))
    pairs = np.empty((0, 2), dtype=np.int64)
    if members.architecture == "all_vs_all":
        pairs = np.array([[np.flatnonzero(row == i)[0] for i in (0, 1)] for row in members.labels])
    return Wiring(members.architecture, tuple(map(tuple, capsules)), pairs, members.total_dim)


def squashed(latents: np.ndarray, member: slice, capsule: slice) -> np.ndarray:
    r"""Squash the latents of one capsule: :math:`\Psi_i = h_i / \sqrt{\sum_j |h_j|^2}` (equation 3.1)."""
    h = latents[:, member].astype(np.float64)
    length = np.sqrt(np.einsum("nd,nd->n", h, h))
    return latents[:, capsule] / np.maximum(length, np.finfo(float).tiny)[:, None]


@dataclass(frozen=True)
class RowsSeen(ClassifiedBlock):
    """A block of rows with their latents."""

    h: np.ndarray  # float32 (n, total_dim)


@dataclass
class Sample:
    """Squashed latents of evenly spaced rows."""

    wiring: Wiring
    rows: np.ndarray  # int64 (k,)
    codes: np.ndarray  # int32 (k,)
    # of each class float32 (k, dimension): the squashed vectors of its capsule (equation 3.1)
    points: list[np.ndarray]

    @classmethod
    def empty(cls, wiring: Wiring, n_rows: int, sample_rows: int) -> Sample:
        k = max(1, min(n_rows, sample_rows))
        rows = np.arange(k, dtype=np.int64) * n_rows // k
        return cls(wiring, rows, np.zeros(k, np.int32), [np.zeros((k, d), np.float32) for d in wiring.dims])

    def add(self, seen: RowsSeen) -> None:
        """Keep those of the block's rows that were chosen."""
        first, last = np.searchsorted(self.rows, [seen.start, seen.start + len(seen.x)])
        here = self.rows[first:last] - seen.start
        self.codes[first:last] = seen.codes[here]
        for points, ((member, capsule),) in zip(self.points, self.wiring.capsules, strict=True):
            points[first:last] = squashed(seen.h[here], member, capsule)


@dataclass
class Votes:
    """Votes of an all-versus-all model."""

    wiring: Wiring
    wins: np.ndarray  # int64 (classes, members): rows of each class for which a member's first class won
    rows: np.ndarray  # int64 (classes,)

    @classmethod
    def empty(cls, wiring: Wiring) -> Votes:
        m = wiring.n_classes
        return cls(wiring, np.zeros((m, len(wiring.pairs)), np.int64), np.zeros(m, np.int64))

    def add(self, seen: RowsSeen) -> None:
        m, members = self.wins.shape
        square = np.square(seen.h, dtype=np.float64)
        # All members have two capsules of one dimension, stacked: one reshape gives every length.
        length = square.reshape(len(square), members, 2, -1).sum(axis=3)
        first = (length[:, :, 0] >= length[:, :, 1]).astype(np.float64)
        one_hot = np.zeros((len(square), m))
        one_hot[np.arange(len(square)), seen.codes] = 1
        self.wins += (one_hot.T @ first).astype(np.int64)
        self.rows += np.bincount(seen.codes, minlength=m)

    @property
    def shares(self) -> np.ndarray:
        """(classes, classes): of the m - 1 votes a class can get, its share from rows of each true class."""
        m, total = len(self.rows), np.maximum(self.rows, 1)[:, None]
        got = np.zeros((m, m))
        for r, (a, b) in enumerate(self.wiring.pairs):
            got[:, a] += self.wins[:, r]
            got[:, b] += self.rows - self.wins[:, r]
        return np.where(self.rows[:, None] > 0, got / total / (m - 1), np.nan)

    @property
    def pair_wins(self) -> np.ndarray:
        """(classes, classes): of rows of class i, the share that member {i, j} gives to i; else NaN."""
        out = np.full((len(self.rows),) * 2, np.nan)
        for r, (a, b) in enumerate(self.wiring.pairs):
            out[a, b] = self.wins[a, r] / self.rows[a] if self.rows[a] else np.nan
            out[b, a] = 1 - self.wins[b, r] / self.rows[b] if self.rows[b] else np.nan
        return out


@dataclass
class Confident:
    """The most confidently recognised row of each class."""

    rows: np.ndarray  # int64 (classes,), -1 where the class has no row
    score: np.ndarray  # float64 (classes,)
    x: np.ndarray  # (classes, features)

    @classmethod
    def empty(cls, n_classes: int, n_features: int, dtype: np.dtype) -> Confident:
        return cls(
            np.full(n_classes, -1), np.full(n_classes, -np.inf), np.zeros((n_classes, n_features), dtype)
        )

    def add(self, seen: RowsSeen) -> None:
        """Keep better rows; of equals the first."""
        for c in np.unique(seen.codes):
            own = np.flatnonzero(seen.codes == c)
            best = own[seen.score[own, c].argmax()]
            if seen.score[best, c] > self.score[c]:
                self.rows[c], self.score[c], self.x[c] = seen.start + best, seen.score[best, c], seen.x[best]


@dataclass
class Prototypes:
    """For each element of a capsule the row that it contributes most to (equation 3.2)."""

    wiring: Wiring
    rows: np.ndarray  # int64 (classes, largest dimension), -1 where there is no such element, or no row
    score: np.ndarray  # (h_ia / |h|)^2, in all-versus-all the mean over the members that know the class
    x: np.ndarray  # (classes, largest dimension, features)

    @classmethod
    def empty(cls, wiring: Wiring, n_features: int, dtype: np.dtype) -> Prototypes:
        shape = (wiring.n_classes, max(wiring.dims))
        return cls(wiring, np.full(shape, -1), np.full(shape, -np.inf), np.zeros((*shape, n_features), dtype))

    def add(self, seen: RowsSeen) -> None:
        """Keep better rows; of equals the first."""
        for c in np.unique(seen.codes):
            own = np.flatnonzero(seen.codes == c)
            h, capsules = seen.h[own], self.wiring.capsules[c]
            share = np.mean([squashed(h, *capsule) ** 2 for capsule in capsules], axis=0)
            best = np.argmax(share, axis=0)
            for a, i in enumerate(best):
                if share[i, a] > self.score[c, a]:
                    self.score[c, a], self.rows[c, a] = share[i, a], seen.start + own[i]
                    self.x[c, a] = seen.x[own[i]]
