r"""Online learning of one layer of features: each pixel is updated once per image, without stored messages.

A chain is a sequence of minibatches that one task learns, with its own copy w of the log odds b of the
weights W. For each minibatch the task updates the messages of all pixels once, in a random order, and then
forgets: :math:`w \leftarrow \lambda w + (1 - \lambda) b_0` with the initial log odds :math:`b_0` and the
parameter ``forgetting`` as :math:`\lambda`. After m minibatches the task returns the evidence of the chain

.. math:: e = w - (\lambda^m b + (1 - \lambda^m) b_0).

The chains of a step have n minibatches in total, and chain k has m_k. The step sets

.. math:: b \leftarrow \lambda^n b + (1 - \lambda^n) b_0 + c \sum e, \qquad
    c = \frac{1 - \lambda^n}{\sum_k (1 - \lambda^{m_k})}.

The factor c gives n minibatches in parallel chains the weight of n minibatches in one chain. Without c,
chains of ten minibatches make log odds three times as large and lose features. One chain (c = 1) of one
minibatch is the rule in section 4.2 of Lázaro-Gredilla et al., "Hierarchical compositional feature learning"
(2016).

Every 20 minibatches each feature is moved to the middle of its window. Moving W and S together leaves the
images unchanged. Without the move, a feature that starts at the edge of its window stays cut off: this
happened to one letter in a tenth of the fits with five letters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from scalelatent.contract.block_requirements import BlockRequirements
from scalelatent.contract.learners import Backend, Block
from scalelatent.contract.stats import Layout, Stats
from scalelatent.errors import DivergenceError
from scalelatent.kernels.arrays import Array
from scalelatent.models.hcn.kernels.units import BELIEF_LIMIT, UNITS_PER_NAT

from .compression import DescriptionLength, compression
from .decode import Decoder
from .layer import FLOPS_PER_PAIR, FeatureLayer, row_numbers

# Each feature is moved to the middle of its window (h x w pixels) after this many minibatches.
CENTER_EVERY = 20


@dataclass(frozen=True)
class EvidenceState:
    """Log odds of the weights W between two steps of a fit, and its progress.

    Attributes
    ----------
    beliefs, first : ndarray of float64, shape (channels, h, w, F)
        Log odds now, and before any image; in nats. h x w is the size of a feature, F the number of features.
    changed, last_changed : int
        Number of weights that changed sign: in this epoch so far, and in the epoch before.
    compression, best : float
        Compression of the validation rows: the last and the smallest one; NaN and infinity before the first
        validation.
    rest : float
        Share of validation rows whose messages converged; NaN before the first validation.
    iteration, steps, rows, stale : int
        Number of epochs, of steps, of rows in this epoch, and of epochs since the smallest compression.
    """

    beliefs: np.ndarray
    first: np.ndarray
    changed: int = 0
    last_changed: int = 0
    compression: float = float("nan")
    best: float = float("inf")
    rest: float = float("nan")
    iteration: int = 0
    steps: int = 0
    rows: int = 0
    stale: int = 0


PreparedEvidence: TypeAlias = tuple[EvidenceState, Backend]
"""State at the start of a step, and the backend. Each task of the step copies the log odds of the state."""


@dataclass(frozen=True)
class OnlineFeatureLearner:
    """Online learning of one layer of features (an :class:`~scalelatent.contract.learners.OnlineLearner`).

    Attributes
    ----------
    layer : FeatureLayer
    forgetting : float
        Share of the earlier evidence that remains after a minibatch.
    batch_rows : int
        Number of images of a minibatch.
    seed : int
    patience : int
        Learning ends after this number of epochs without a smaller compression of the validation rows; 0: it
        runs all epochs.
    """

    layer: FeatureLayer
    forgetting: float
    batch_rows: int
    seed: int
    patience: int = 0

    @property
    def requirements(self) -> BlockRequirements:
        images = self.batch_rows * (4 * int(np.prod(self.layer.places)) + 12 * self.layer.n_pixels)
        # Bytes per image of a task: log odds and random orders of the pixels, and intermediate arrays.
        each = 20 * self.layer.n_pixels
        return BlockRequirements(scratch=(images + 64 * int(np.prod(self.layer.weights_shape)), each))

    def layout(self) -> Layout:
        """Return the fields of the statistic of a step.

        They are the evidence for each weight in nats, the number of minibatches, and their weight: the sum
        over all chains of 1 - forgetting^m. A chain is a sequence of m minibatches that one task learns.
        """
        return Layout((("evidence", self.layer.weights_shape), ("minibatches", ()), ("weight", ())))

    def flops_per_row(self) -> float:
        """Return the number of floating-point operations per image."""
        return FLOPS_PER_PAIR * self.layer.pairs

    def start(self, restart: int = 0) -> EvidenceState:
        """Return the state before the first step."""
        first = self.layer.first_beliefs(self.seed, restart)
        return EvidenceState(first, first)

    def prepare(self, state: EvidenceState, backend: Backend) -> PreparedEvidence:
        return state, backend

    def run_chain(self, prepared: PreparedEvidence, block: Block, stats: Stats) -> None:
        """Learn the minibatches of a block one after another; add their evidence for weights to ``stats``."""
        self.run_chains(prepared, [block], [stats])

    def run_chains(self, prepared: PreparedEvidence, blocks: Sequence[Block], stats: Sequence[Stats]) -> None:
        """Learn several blocks in parallel, each a sequence of minibatches (a chain); see :meth:`run_chain`.

        One kernel launch updates the messages of one minibatch of each block.

        Raises
        ------
        DivergenceError
            If log odds of weights have become too large for exact sums.
        """
        state, backend = prepared
        for rows in sorted({len(block.x) for block in blocks}):
            which = [k for k, block in enumerate(blocks) if len(block.x) == rows]
            n = -(-rows // self.batch_rows)
            left = self.forgetting**n
            before = forget(state.beliefs, state.first, left)
            for k, beliefs in zip(
                which, self._chains(state, backend, [blocks[k] for k in which]), strict=True
            ):
                stats[k]["evidence"][...] += beliefs - before
                stats[k]["minibatches"][...] += n
                stats[k]["weight"][...] += 1 - left

    def _chains(self, state: EvidenceState, backend: Backend, blocks: Sequence[Block]) -> np.ndarray:
        """Learn chains (sequences of minibatches, one per block); return the log odds of W after each chain.

        All blocks have equal numbers of images. The result is in nats, (blocks, channels, h, w, F): F is the
        number of features, and h x w is their size.
        """
        layer, xp, rows = self.layer, backend.xp, len(blocks[0].x)
        sweep, orders = backend.kernel("hcn_sweep"), self._orders(blocks, backend.kernel("hcn_shuffled"))
        # All arrays stay on the device from one minibatch to the next.
        beliefs = backend.asarray(np.stack([state.beliefs] * len(blocks)), np.float64)
        first, worst = backend.asarray(state.first, np.float64), 0
        evidence = xp.asarray(np.stack([layer.read_evidence(block) for block in blocks]))
        faded = (1 - self.forgetting) * first
        for a, order in zip(range(0, rows, self.batch_rows), orders, strict=True):
            part = xp.ascontiguousarray(evidence[:, a : a + self.batch_rows])
            n_images = part.shape[1]
            before = xp.rint(beliefs * UNITS_PER_NAT).astype(np.int32)
            s = backend.buffer("places", (len(blocks), n_images, *layer.places), np.int32)
            s[...] = int(layer.prior)
            w = before.copy()
            sweep(part, order, s, w)
            worst = xp.maximum(abs(w), worst)
            beliefs = self.forgetting * (beliefs + (w - before) / UNITS_PER_NAT) + faded  # as forget does
        largest = backend.to_host(worst).max(axis=(0, 1, 2, 3))
        if not layer.is_exact(largest):
            raise self._overflow(largest)
        return backend.to_host(beliefs)

    def _orders(self, blocks: Sequence[Block], shuffle: Callable[..., Array]) -> list[Array]:
        """Return the random order of the pixels of each block for each minibatch: arrays (blocks, pixels)."""
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

    def _overflow(self, largest: np.ndarray) -> DivergenceError:
        feature, limit = int(largest.argmax()), BELIEF_LIMIT / UNITS_PER_NAT
        return DivergenceError(
            f"layer 1: beliefs in the weights of feature {feature} have reached "
            f"{largest[feature] / UNITS_PER_NAT:,.0f} nats; the limit of exact sums is {limit:,.0f}: lower "
            f"forgetting (now {self.forgetting}) or batch_size (now {self.batch_rows}), or raise p01 and p10"
        )

    def step(self, state: EvidenceState, stats: Stats, n_rows: int) -> EvidenceState:
        """Return the state after a step: forget, and add the evidence of all minibatches to the log odds."""
        n = int(stats["minibatches"])
        beliefs = add_evidence(state.beliefs, state.first, self.forgetting, stats)
        changed = int(((beliefs > 0) != (state.beliefs > 0)).sum())
        if (state.steps + 1) % max(1, CENTER_EVERY // max(1, n)) == 0:
            beliefs = center_features(beliefs, state.first)
        return replace(
            state,
            beliefs=beliefs,
            changed=state.changed + changed,
            steps=state.steps + 1,
            rows=state.rows + n_rows,
        )

    def end_epoch(self, state: EvidenceState) -> EvidenceState:
        """Return the state at the end of an epoch: the counts of the epoch are 0 again."""
        fresh = replace(state, changed=0, last_changed=state.changed, rows=0)
        return replace(fresh, iteration=state.iteration + 1, stale=state.stale + 1)

    def validation(self) -> DescriptionLength:
        """Return the reduction that counts what the compression of the validation rows needs."""
        return DescriptionLength(Decoder(self.layer, np.zeros(self.layer.weights_shape, bool), self.seed))

    def validated(self, state: EvidenceState, stats: Stats) -> EvidenceState:
        """Return the state with the compression of the validation rows, from their counts ``stats``."""
        found = compression(self.layer, state.beliefs > 0, stats)
        state = replace(state, compression=found, rest=float(stats["at_rest"] / stats["rows"]))
        return replace(state, best=found, stale=-1) if found < state.best else state

    def summary(self, state: EvidenceState) -> dict[str, float | int | None]:
        """Return the record of an epoch; the compression of the validation rows is the objective."""
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

    def is_done(self, state: EvidenceState) -> bool:
        """Return True after ``patience`` epochs without a smaller compression."""
        return bool(self.patience and np.isfinite(state.best) and state.stale >= self.patience)


def forget(beliefs: np.ndarray, first: np.ndarray, share: float) -> np.ndarray:
    """Return the weighted mean of log odds (weight ``share``) and initial log odds (weight 1 - ``share``)."""
    return share * beliefs + (1 - share) * first


def add_evidence(beliefs: np.ndarray, first: np.ndarray, forgetting: float, stats: Stats) -> np.ndarray:
    """Return the log odds of weights after a step: forget, then add the evidence in ``stats``."""
    decay = forgetting ** int(stats["minibatches"])
    scale = (1 - decay) / float(stats["weight"]) if decay < 1 else 1.0
    return forget(beliefs, first, decay) + scale * stats["evidence"]


def center_features(beliefs: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Return the log odds of weights with each feature moved to the middle of its window.

    The region of the window that a moved feature no longer covers gets the initial log odds ``first``.
    """
    _, height, width, _ = beliefs.shape
    lines: list[np.ndarray] = [np.any(beliefs > 0, axis=others) for others in ((0, 2), (0, 1))]
    # A feature moves by half of the difference of its margins; a feature without weights does not move.
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
