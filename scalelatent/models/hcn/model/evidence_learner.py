r"""Online learning of one layer of features: each image updates the weights once, and no message is stored.

A chain is a sequence of minibatches that one task learns. The task has its own copy w of the log odds b of
the weights W. For each minibatch, it computes the belief-propagation messages of all pixels once, in a random
order, and then forgets: :math:`w \leftarrow \lambda w + (1 - \lambda) b_0`. Here :math:`b_0` are the initial
log odds and :math:`\lambda` is the parameter ``forgetting``. After m minibatches the task returns the
evidence of the chain, which is the change of w beyond forgetting:

.. math:: e = w - (\lambda^m b + (1 - \lambda^m) b_0).

A step learns several chains in parallel. They have n minibatches in total, and chain k has m_k. The step sets

.. math:: b \leftarrow \lambda^n b + (1 - \lambda^n) b_0 + c \sum e, \qquad
    c = \frac{1 - \lambda^n}{\sum_k (1 - \lambda^{m_k})}.

The factor c gives n minibatches in parallel chains the weight of n minibatches in one chain. Without c,
chains of ten minibatches made the log odds three times as large, and features were lost. With one chain of
one minibatch (c = 1) the step is the rule in section 4.2 of Lázaro-Gredilla et al., "Hierarchical
compositional feature learning" (2016).

About every 20 minibatches, `center_features` moves each feature to the middle of its h x w weights. The
model describes the same images if a feature and its positions S move together. Without this move, a feature
that starts at the edge of its window stays incomplete: this happened to one letter in a tenth of the fits
with five letters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Self, TypeAlias, TypeVar

import numpy as np

from scalelatent.contract.block_requirements import BlockRequirements
from scalelatent.contract.learners import Backend, Block
from scalelatent.contract.stats import Layout, Stats
from scalelatent.kernels.arrays import Array
from scalelatent.models.hcn.kernels.units import UNITS_PER_NAT

from .compression import DescriptionLength, compression
from .decode import Decoder
from .layer import FLOPS_PER_PAIR, FeatureLayer, row_numbers

# Number of minibatches after which a fit moves each feature to the middle of its window.
CENTER_EVERY = 20


@dataclass(frozen=True)
class LearnerState:
    """State of a fit between two steps: log odds of the weights, and counts of the progress.

    Attributes
    ----------
    beliefs, first : ndarray of float64
        Log odds of the weights in nats: now, and before the first image.
    changed, last_changed : int
        Number of weights that steps turned on or off (their log odds changed sign): in this epoch so far, and
        in the last complete epoch. A weight counts once for each such step.
    best : float
        Smallest compression (one layer) or error (several layers) of the validation rows after any epoch;
        infinity before the first validation.
    iteration, steps, rows, stale : int
        Number of epochs, of steps, of training rows read in this epoch, and of epochs since ``best`` changed.
    """

    beliefs: np.ndarray
    first: np.ndarray
    changed: int = 0
    last_changed: int = 0
    best: float = float("inf")
    iteration: int = 0
    steps: int = 0
    rows: int = 0
    stale: int = 0

    def complete_step(self, beliefs: np.ndarray, n_rows: int) -> Self:
        """Return the state after a step over ``n_rows`` images that changed the log odds to ``beliefs``."""
        changed = self.changed + int(((beliefs > 0) != (self.beliefs > 0)).sum())
        return replace(self, beliefs=beliefs, changed=changed, steps=self.steps + 1, rows=self.rows + n_rows)


State = TypeVar("State", bound=LearnerState)


class EvidenceLearner(Generic[State]):
    """Base class of the learners of one and of several layers: steps, epochs, and the end of learning.

    Attributes
    ----------
    forgetting : float
        Share of earlier changes of the log odds that remains after a minibatch.
    batch_rows : int
        Number of images of a minibatch.
    patience : int
        Number of epochs without a smaller ``best`` of the state after which learning ends; 0 means never.
    """

    forgetting: float
    batch_rows: int
    patience: int

    def prepare(self, state: State, backend: Backend) -> tuple[State, Backend]:
        return state, backend

    def add_chain(self, state: State, beliefs: np.ndarray, n_rows: int, stats: Stats) -> None:
        """Add to ``stats`` the evidence of a chain (a sequence of minibatches that one task learns).

        The chain has ``n_rows`` images. The chain started from the log odds of ``state``, and ``beliefs`` are
        the log odds at its end. The evidence is the change of the log odds beyond forgetting.
        """
        n = -(-n_rows // self.batch_rows)
        share = self.forgetting**n
        stats["evidence"][...] += beliefs - forget(state.beliefs, state.first, share)
        stats["minibatches"][...] += n
        stats["weight"][...] += 1 - share

    def step(self, state: State, stats: Stats, n_rows: int) -> State:
        """Return the state after a step, which forgets and adds evidence as in the module docstring."""
        decay = self.forgetting ** int(stats["minibatches"])
        scale = (1 - decay) / float(stats["weight"]) if decay < 1 else 1.0
        beliefs = forget(state.beliefs, state.first, decay) + scale * stats["evidence"]
        return state.complete_step(beliefs, n_rows)

    def end_epoch(self, state: State) -> State:
        """Return the state at the end of an epoch, whose counts become those of the last complete epoch."""
        state = replace(state, changed=0, last_changed=state.changed, rows=0)
        return replace(state, iteration=state.iteration + 1, stale=state.stale + 1)

    def is_done(self, state: State) -> bool:
        """Return True after ``patience`` > 0 epochs without a better validation result, otherwise False."""
        return bool(self.patience and np.isfinite(state.best) and state.stale >= self.patience)


@dataclass(frozen=True)
class EvidenceState(LearnerState):
    """State of a fit of one layer: ``beliefs`` and ``first`` (channels, h, w, F), F features of h x w pixels.

    Attributes
    ----------
    compression : float
        Compression of the validation rows in the last validation; NaN before the first validation.
    rest : float
        Share of the validation rows whose messages converged in the last validation; NaN before the first.
    """

    compression: float = float("nan")
    rest: float = float("nan")


PreparedEvidence: TypeAlias = tuple[EvidenceState, Backend]
"""State at the start of a step, and the backend (CPU or GPU). Each task copies the log odds of the state."""


@dataclass(frozen=True)
class OnlineFeatureLearner(EvidenceLearner[EvidenceState]):
    """Online learning of one layer of features (an :class:`~scalelatent.contract.learners.OnlineLearner`).

    :class:`EvidenceLearner` describes ``forgetting``, ``batch_rows`` and ``patience``.

    Attributes
    ----------
    layer : FeatureLayer
    seed : int
        Seed of the initial log odds and of the random orders of pixels.
    """

    layer: FeatureLayer
    forgetting: float
    batch_rows: int
    seed: int
    patience: int = 0

    @property
    def requirements(self) -> BlockRequirements:
        images = self.batch_rows * (4 * int(np.prod(self.layer.places)) + 12 * self.layer.n_pixels)
        # Bytes per image of a block of rows: log odds and random orders of pixels, and intermediate arrays.
        each = 20 * self.layer.n_pixels
        return BlockRequirements(scratch=(images + 64 * self.layer.n_weights, each))

    def layout(self) -> Layout:
        return make_evidence_layout(self.layer.weights_shape)

    def flops_per_row(self) -> float:
        return FLOPS_PER_PAIR * self.layer.pairs

    def start(self, restart: int = 0) -> EvidenceState:
        """Return the state before the first step; its random log odds depend on seed and ``restart``."""
        first = self.layer.first_beliefs(self.seed, restart)
        return EvidenceState(first, first)

    def run_chain(self, prepared: PreparedEvidence, block: Block, stats: Stats) -> None:
        """Learn a block's minibatches in sequence; add the change of log odds beyond forgetting to stats."""
        self.run_chains(prepared, [block], [stats])

    def run_chains(self, prepared: PreparedEvidence, blocks: Sequence[Block], stats: Sequence[Stats]) -> None:
        """Learn several chains in parallel; add the evidence of each chain to its element of ``stats``.

        A chain is the sequence of the minibatches of a block. Its evidence is the change of log odds beyond
        forgetting. One kernel call updates the messages of one minibatch of each block.

        Raises
        ------
        DivergenceError
            If log odds of weights have become too large for exact sums.
        """
        state, backend = prepared
        for rows in sorted({len(block.x) for block in blocks}):
            which = [k for k, block in enumerate(blocks) if len(block.x) == rows]
            learned = self._learn_chains(state, backend, [blocks[k] for k in which])
            for k, beliefs in zip(which, learned, strict=True):
                self.add_chain(state, beliefs, rows, stats[k])

    def _learn_chains(self, state: EvidenceState, backend: Backend, blocks: Sequence[Block]) -> np.ndarray:
        """Return the log odds of the weights after each chain (the minibatches of a block, in sequence).

        All blocks have equal numbers of images. The result is in nats, (blocks, channels, h, w, F): F is the
        number of features, and h x w is their size in pixels.
        """
        layer, xp, rows = self.layer, backend.xp, len(blocks[0].x)
        sweep = backend.kernel("hcn_sweep")
        orders = self._shuffle_pixels(blocks, backend.kernel("hcn_shuffled"))
        # All arrays stay on the device from one minibatch to the next.
        beliefs = backend.asarray(np.stack([state.beliefs] * len(blocks)), np.float64)
        first, largest = backend.asarray(state.first, np.float64), 0
        evidence = xp.asarray(np.stack([layer.read_evidence(block) for block in blocks]))
        for a, order in zip(range(0, rows, self.batch_rows), orders, strict=True):
            part = xp.ascontiguousarray(evidence[:, a : a + self.batch_rows])
            n_images = part.shape[1]
            before = xp.rint(beliefs * UNITS_PER_NAT).astype(np.int32)
            s = backend.buffer("places", (len(blocks), n_images, *layer.places), np.int32)
            s[...] = int(layer.prior)
            w = before.copy()
            sweep(part, order, s, w)
            largest = xp.maximum(abs(w), largest)
            beliefs = forget(beliefs + (w - before) / UNITS_PER_NAT, first, self.forgetting)
        remedy = f"forgetting (now {self.forgetting}) or batch_size (now {self.batch_rows})"
        layer.check_overflow(backend.to_host(largest).max(axis=0), 1, f"{remedy}, or raise p01 and p10")
        return backend.to_host(beliefs)

    def _shuffle_pixels(self, blocks: Sequence[Block], shuffle: Callable[..., Array]) -> list[Array]:
        """Return for each minibatch an array (blocks, pixels): a random order of its pixels in each block.

        One call of ``shuffle`` draws the orders of all minibatches with ``batch_rows`` images, and another
        call draws the orders of the last minibatch if it has fewer images.
        """
        rows, size, out = len(blocks[0].x), self.batch_rows, []
        firsts = np.stack([row_numbers(block)[::size] for block in blocks], axis=1)
        whole = rows // size
        for some, n_images in ((firsts[:whole], size), (firsts[whole:], rows % size)):
            if len(some):
                n = n_images * self.layer.n_pixels
                found = shuffle(self.seed, "hcn sweep", blocks[0].epoch, some.ravel(), n)
                found = found.reshape(*some.shape, n)
                out += [found[k] for k in range(len(some))]
        return out

    def step(self, state: EvidenceState, stats: Stats, n_rows: int) -> EvidenceState:
        """Return the state after a step; about every 20 minibatches, center features in their windows."""
        state = super().step(state, stats, n_rows)
        if state.steps % max(1, CENTER_EVERY // max(1, int(stats["minibatches"]))) == 0:
            state = replace(state, beliefs=center_features(state.beliefs, state.first))
        return state

    def validation(self) -> DescriptionLength:
        """Return the reduction (sum over rows) whose counts give the compression of the validation rows."""
        return DescriptionLength(Decoder(self.layer, np.zeros(self.layer.weights_shape, bool), self.seed))

    def validated(self, state: EvidenceState, stats: Stats) -> EvidenceState:
        """Return the state with the compression of the validation rows, from their counts ``stats``."""
        found = compression(self.layer, state.beliefs > 0, stats)
        state = replace(state, compression=found, rest=float(stats["at_rest"] / stats["rows"]))
        return replace(state, best=found, stale=-1) if found < state.best else state

    def summary(self, state: EvidenceState) -> dict[str, float | int | None]:
        """Return the record of an epoch; its objective is the compression of validation rows, or None."""
        on = int((state.beliefs > 0).sum())
        known = None if np.isnan(state.compression) else state.compression
        return {
            "objective": known,
            "weights_on": on,
            "weights_changed": state.changed if state.rows else state.last_changed,
            "share_on": on / state.beliefs.size,
            "compression": known,
            "rows_at_rest": None if np.isnan(state.rest) else state.rest,
        }


def make_evidence_layout(weights_shape: tuple[int, ...]) -> Layout:
    """Return the fields of the statistic of a step of online learning, for weights of this shape.

    The fields are the evidence (change of the log odds in nats) for each weight, the number of minibatches,
    and the sum over chains of 1 - forgetting^m. A chain is a sequence of m minibatches that one task learns.
    """
    return Layout((("evidence", weights_shape), ("minibatches", ()), ("weight", ())))


def forget(beliefs: np.ndarray, first: np.ndarray, share: float) -> np.ndarray:
    """Return the weighted mean of log odds (weight ``share``) and initial log odds (weight 1 - ``share``)."""
    return share * beliefs + (1 - share) * first


def center_features(beliefs: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Return the log odds of weights after each feature is moved to the middle of its window.

    Both arrays have the shape (channels, h, w, F): F features in windows of h x w weights. A moved feature
    leaves a margin of its window, whose weights get their initial log odds ``first``.
    """
    _, height, width, _ = beliefs.shape
    lines: list[np.ndarray] = [np.any(beliefs > 0, axis=others) for others in ((0, 2), (0, 1))]
    # Move a feature by half of the difference between its two opposite margins. A margin is the rows or
    # columns at one side of the window in which all weights are off. A feature without weights does not move.
    down, right = (((a[::-1].argmax(axis=0) - a.argmax(axis=0)) / 2).astype(int) for a in lines)
    if not (down.any() or right.any()):
        return beliefs
    out = beliefs.copy()
    for f in np.flatnonzero(down | right):
        i, j = int(down[f]), int(right[f])
        to = np.s_[:, max(i, 0) : height + min(i, 0), max(j, 0) : width + min(j, 0), f]
        out[..., f] = first[..., f]
        out[to] = beliefs[:, max(-i, 0) : height - max(i, 0), max(-j, 0) : width - max(j, 0), f]
    return out
