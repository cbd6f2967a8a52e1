"""Data of the figures of a capsule model, collected in one pass of rows through the model.

The result consists of a confusion matrix, sums, the latents of evenly spaced rows, and a few rows to draw.
Memory therefore does not grow with the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from scalelatent.data import Dataset
from scalelatent.engine.backend import make_backend
from scalelatent.engine.reading import Meter, Reader, StopEvent, iter_blocks
from scalelatent.engine.threads import single_threaded
from scalelatent.models.capsule.model.members import Members
from scalelatent.report.classes import ClassifiedBlock, Confusion, Mistakes, Reliability
from scalelatent.report.runfiles import check_features

if TYPE_CHECKING:
    from .estimator import CapsuleRegression

# Bytes of a block with its latents and scores, and largest number of rows of a block.
BLOCK_BYTES, MAX_BLOCK_ROWS = 32 * 2**20, 4096
# Largest number of rows whose latents are drawn, and of points in all panels together.
SAMPLE_ROWS, SAMPLE_POINTS = 5000, 120_000


@dataclass(frozen=True)
class ReportData:
    """Data of the figures of one run."""

    n_rows: int
    class_names: list[str]
    labelled: bool  # False: all class codes are predicted classes
    feature_shape: tuple[int, ...]
    members: Members
    confusion: Confusion | None  # None without labels
    reliability: Reliability | None  # None without labels, and for all-versus-all, whose scores are votes
    sample: Sample | None  # None for all-versus-all, whose members have no common latent space
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
    """Return the data of the figures, from one pass over the rows; raise DataError for another width."""
    check_features(data, model)
    # Use the members of the fit, because the parameter ``architecture`` may have been changed since the fit.
    members, m = model._members, len(model.classes_)
    votes_only = members.architecture == "all_vs_all"
    if sample_rows is None:
        sample_rows = min(SAMPLE_ROWS, SAMPLE_POINTS // m)
    parts = (
        Confusion.empty(m) if data.has_y else None,
        Reliability.empty() if data.has_y and not votes_only else None,
        None if votes_only else Sample.empty(members, data.n_rows, sample_rows),
        Prototypes.empty(members, data.n_features, data.dtype),
        Mistakes(),
    )
    for block in _read_blocks(model, data, block_bytes):
        for part in parts:
            if part is not None:
                part.add(block)
        if progress is not None:
            progress(block.start + len(block.x), data.n_rows)
    names = [str(c) for c in model.classes_.tolist()]
    return ReportData(data.n_rows, names, data.has_y, data.feature_shape, members, *parts)


def count_block_rows(n_features: int, itemsize: int, total_dim: int, n_classes: int, block_bytes: int) -> int:
    """Return the rows of a block that, with latents and scores, needs at most ``block_bytes``."""
    # Bytes of a row: features as stored and in float32; latents once in float32 and twice in float64; scores
    # and votes.
    row = n_features * (itemsize + 4) + total_dim * 20 + n_classes * 32
    return max(1, min(MAX_BLOCK_ROWS, block_bytes // row))


@dataclass(frozen=True)
class LatentBlock(ClassifiedBlock):
    """Block of rows with their classes and latents."""

    h: np.ndarray  # latent means of the rows, float32 (n, D)


def _read_blocks(model: CapsuleRegression, data: Dataset, block_bytes: int) -> Iterator[LatentBlock]:
    """Yield the rows block by block with their latents and scores."""
    members = model._members
    step = count_block_rows(
        data.n_features, data.dtype.itemsize, members.total_dim, members.n_classes, block_bytes
    )
    ranges = [(a, min(a + step, data.n_rows)) for a in range(0, data.n_rows, step)]
    latents, scores = model._row_map("latents"), model._row_map("probabilities")
    with single_threaded():
        prepared = latents.prepare(make_backend(model.device))
        reader = Reader(data, None, Meter(), model.classes_)
        for block in iter_blocks(reader, ranges, StopEvent()):
            # Copy both arrays, because the next product overwrites the buffers of the backend.
            h, score = np.array(latents.apply(prepared, block)), np.array(scores.apply(prepared, block))
            guess = scores.labels(score).astype(np.int32)
            yield LatentBlock(block.start, block.x, block.y, guess, score, block.weight, h)


def squash_latents(h: np.ndarray, member: slice, capsule: slice) -> np.ndarray:
    r"""Return the squashed latents of a capsule, :math:`h_i / \sqrt{\sum_j |h_j|^2}` (equation 3.1)."""
    whole = h[:, member].astype(np.float64)
    length = np.sqrt(np.einsum("nd,nd->n", whole, whole))
    return h[:, capsule] / np.maximum(length, np.finfo(float).tiny)[:, None]


@dataclass
class Sample:
    """Squashed latents of evenly spaced rows."""

    members: Members
    rows: np.ndarray  # int64 (k,)
    codes: np.ndarray  # int32 (k,)
    points: list[np.ndarray]  # for each class the squashed latents of its capsule, float32 (k, dimension)

    @classmethod
    def empty(cls, members: Members, n_rows: int, sample_rows: int) -> Sample:
        k = max(1, min(n_rows, sample_rows))
        rows = np.arange(k, dtype=np.int64) * n_rows // k
        points = [np.zeros((k, d), np.float32) for d in members.class_dims]
        return cls(members, rows, np.zeros(k, np.int32), points)

    def add(self, block: LatentBlock) -> None:
        """Keep the rows of the block that belong to the sample."""
        first, last = np.searchsorted(self.rows, [block.start, block.start + len(block.x)])
        here = self.rows[first:last] - block.start
        self.codes[first:last] = block.class_indices[here]
        for points, ((member, capsule),) in zip(self.points, self.members.class_capsules, strict=True):
            points[first:last] = squash_latents(block.h[here], member, capsule)


@dataclass
class Prototypes:
    """For each element of each capsule, the row to whose class probability it contributes most (eq. 3.2)."""

    members: Members
    rows: np.ndarray  # row numbers, int64 (classes, largest dimension); -1: no such element, or no row
    score: np.ndarray  # (h_ia / |h|)^2 of element a of capsule i; all-versus-all: mean over members
    x: np.ndarray  # features of the rows, (classes, largest dimension, features)

    @classmethod
    def empty(cls, members: Members, n_features: int, dtype: np.dtype) -> Prototypes:
        shape = (members.n_classes, max(members.class_dims))
        return cls(
            members, np.full(shape, -1), np.full(shape, -np.inf), np.zeros((*shape, n_features), dtype)
        )

    def add(self, block: LatentBlock) -> None:
        """Keep the rows with the largest scores so far; of rows with equal scores, the first one."""
        for c in np.unique(block.class_indices):
            own = np.flatnonzero(block.class_indices == c)
            h, capsules = block.h[own], self.members.class_capsules[c]
            share = np.mean([squash_latents(h, *capsule) ** 2 for capsule in capsules], axis=0)
            best = np.argmax(share, axis=0)
            for a, i in enumerate(best):
                if share[i, a] > self.score[c, a]:
                    self.score[c, a], self.rows[c, a] = share[i, a], block.start + own[i]
                    self.x[c, a] = block.x[own[i]]
