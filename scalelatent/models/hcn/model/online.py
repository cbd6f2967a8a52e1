r"""Learning features online: every tree of an image is updated once, and only beliefs of W are kept.

A chain takes minibatches one after another on its own copy w of the beliefs b: messages of all trees of the
minibatch in one random order, then forgetting, :math:`w \leftarrow \lambda w + (1 - \lambda) b_0`. After m of
them it returns what it has found,

.. math:: e = w - (\lambda^m b + (1 - \lambda^m) b_0),

and a step of chains that took n minibatches in all, chain k of them m_k, sets

.. math:: b \leftarrow \lambda^n b + (1 - \lambda^n) b_0 + c \sum e, \qquad
    c = \frac{1 - \lambda^n}{\sum_k (1 - \lambda^{m_k})}.

Side by side n minibatches then weigh what they weigh one after another: without c chains of ten leave beliefs
three times as large, and lose features. One chain (c = 1) of one minibatch is the paper's rule (section 4.2).

Every 20 minibatches features are moved to the middle of their windows: moved together, W and S make the same
images. Without it a feature that began at the edge of its window stays cut off there (a letter in a tenth of
the fits of five), and the rest of it is learned by another one, or not at all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from scalelatent.contract.learners import Block
from scalelatent.contract.stats import Layout, Stats
from scalelatent.contract.wants import Wants
from scalelatent.errors import DivergenceError
from scalelatent.models.hcn.kernels.exact import BELIEF_LIMIT, GRID, to_grid
from scalelatent.models.hcn.kernels.order import shuffled

from .compression import DescriptionLength, compression
from .decode import Decoder
from .layer import FLOPS_PER_PAIR, FeatureLayer, rows_of

# Minibatches from one look to the next at whether features lie in the middle of their windows.
CENTRED = 20


@dataclass(frozen=True)
class EvidenceState:
    """Beliefs of W between steps.

    Attributes
    ----------
    beliefs, first : ndarray of float64, shape (channels, h, w, F)
        Now, and before anything was seen; in nats, as the kernels have them.
    changed : int
        Weights that changed sign in the epoch.
    last_changed : int
        And in the epoch before.
    compression, best : float
        Of the validation rows: last, and the least so far; NaN and infinity before they were looked at.
    rest : float
        Share of the validation rows that came to rest; NaN before.
    iteration, steps, rows, stale : int
        Epochs, steps, rows of the epoch, epochs since the best one.
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


@dataclass(frozen=True)
class EvidenceLearner:
    """Online learning of one layer of features (an :class:`~scalelatent.contract.learners.OnlineLearner`).

    Attributes
    ----------
    layer : FeatureLayer
    forgetting : float
        lambda: what a minibatch leaves of the evidence before it.
    batch_rows : int
        Images of a minibatch.
    seed : int
    patience : int
        Epochs without a better compression of the validation rows before the end; 0: all epochs.
    """

    kind = "scalelatent.models.hcn.model.online:EvidenceLearner"

    layer: FeatureLayer
    forgetting: float
    batch_rows: int
    seed: int
    patience: int = 0

    @property
    def wants(self) -> Wants:
        images = self.batch_rows * (8 * int(np.prod(self.layer.places)) + 24 * self.layer.n_pixels)
        return Wants(scratch=(images + 48 * int(np.prod(self.layer.weights_shape)), 0))

    def layout(self) -> Layout:
        """Evidence, the minibatches that it comes from, and what they weigh: the sum of 1 - lambda^m."""
        return Layout((("evidence", self.layer.weights_shape), ("minibatches", ()), ("weight", ())))

    def flops_per_row(self) -> float:
        """Of all pairs of an image."""
        return FLOPS_PER_PAIR * self.layer.pairs

    def start(self, restart: int = 0) -> EvidenceState:
        """State before the first step."""
        first = self.layer.first_beliefs(self.seed, restart)
        return EvidenceState(first, first)

    def prepare(self, state: EvidenceState, backend: Any) -> tuple[EvidenceState, Any]:
        """The state: a chain makes its own copy of the beliefs."""
        return state, backend

    def run_chain(self, prepared: tuple[EvidenceState, Any], block: Block, stats: Stats) -> None:
        """Add the evidence of some minibatches, taken one after another."""
        self.run_chains(prepared, [block], [stats])

    def run_chains(
        self, prepared: tuple[EvidenceState, Any], blocks: list[Block], stats: list[Stats]
    ) -> None:
        """Chains side by side: one launch a minibatch of each.

        Raises
        ------
        DivergenceError
            Beliefs have grown beyond the range of sums.
        """
        state, backend = prepared
        beliefs = [state.beliefs] * len(blocks)
        longest = max(len(block.x) for block in blocks)
        for first in range(0, longest, self.batch_rows):
            parts = [slice(first, min(first + self.batch_rows, len(block.x))) for block in blocks]
            for size in sorted({max(0, part.stop - part.start) for part in parts} - {0}):
                which = [k for k, part in enumerate(parts) if part.stop - part.start == size]
                found = self._minibatches(
                    backend, [(blocks[k], parts[k]) for k in which], [beliefs[k] for k in which]
                )
                for k, change in zip(which, found, strict=True):
                    beliefs[k] = forget(beliefs[k] + change / GRID, state.first, self.forgetting)
        for block, belief, out in zip(blocks, beliefs, stats, strict=True):
            n = -(-len(block.x) // self.batch_rows)
            left = self.forgetting**n
            out["evidence"][...] += belief - forget(state.beliefs, state.first, left)
            out["minibatches"][...] += n
            out["weight"][...] += 1 - left

    def _minibatches(
        self, backend: Any, parts: list[tuple[Block, slice]], beliefs: list[np.ndarray]
    ) -> np.ndarray:
        """What a minibatch of each chain adds to the beliefs, in units."""
        layer, n = self.layer, parts[0][1].stop - parts[0][1].start
        evidence = np.stack([layer.evidence_in(cut(block, part)) for block, part in parts])
        orders = [
            shuffled(self.seed, "hcn sweep", block.epoch, rows_of(block)[part][:1], n * layer.n_pixels)
            for block, part in parts
        ]
        before = np.stack([to_grid(belief) for belief in beliefs])
        s, w = (
            backend.xp.asarray(a).copy()
            for a in (np.broadcast_to(layer.prior, (len(parts), n, *layer.places)), before)
        )
        backend.kernel("hcn_sweep")(
            backend.xp.asarray(evidence), backend.xp.asarray(np.concatenate(orders)), s, w
        )
        after = backend.to_host(w)
        if not layer.is_exact(after):
            raise self._overflow(after)
        return after - before

    def _overflow(self, w: np.ndarray) -> DivergenceError:
        feature = int(np.abs(w).max(axis=(0, 1, 2, 3)).argmax())
        limit = BELIEF_LIMIT / GRID
        return DivergenceError(
            f"layer 1: beliefs in weights of feature {feature} have reached {np.abs(w).max() / GRID:,.0f}, "
            f"and there is room below {limit:,.0f} only: lower forgetting (now {self.forgetting}) or "
            f"batch_size (now {self.batch_rows}), or raise p01 and p10"
        )

    def step(self, state: EvidenceState, stats: Stats, n_rows: int) -> EvidenceState:
        """Add the chains' evidence to what is left of the beliefs."""
        n = int(stats["minibatches"])
        decay = self.forgetting**n
        scale = (1 - decay) / float(stats["weight"]) if decay < 1 else 1.0
        beliefs = forget(state.beliefs, state.first, decay) + scale * stats["evidence"]
        changed = int(((beliefs > 0) != (state.beliefs > 0)).sum())
        if (state.steps + 1) % max(1, CENTRED // max(1, n)) == 0:
            beliefs = centred(beliefs, state.first)
        return replace(
            state,
            beliefs=beliefs,
            changed=state.changed + changed,
            steps=state.steps + 1,
            rows=state.rows + n_rows,
        )

    def end_epoch(self, state: EvidenceState) -> EvidenceState:
        """Count from 0 again."""
        begun = replace(state, changed=0, last_changed=state.changed, rows=0)
        return replace(begun, iteration=state.iteration + 1, stale=state.stale + 1)

    def validation(self) -> DescriptionLength:
        """Description length of the validation rows under the features of the moment."""
        return DescriptionLength(Decoder(self.layer, np.zeros(self.layer.weights_shape, bool), self.seed))

    def validated(self, state: EvidenceState, stats: Stats) -> EvidenceState:
        """Take in what the validation rows said."""
        found = compression(self.layer, state.beliefs > 0, stats)
        state = replace(state, compression=found, rest=float(stats["at_rest"] / stats["rows"]))
        return replace(state, best=found, stale=-1) if found < state.best else state

    def summary(self, state: EvidenceState) -> dict[str, float | int | None]:
        """Weights that are on, and that changed sign in the epoch; of validation rows the compression, which
        is the objective, and the share at rest.
        """
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
        """Validation rows have not been told shorter for too long."""
        return bool(self.patience and np.isfinite(state.best) and state.stale >= self.patience)


def cut(block: Block, part: slice) -> Block:
    """Some rows of a block."""
    rows = None if block.rows is None else block.rows[part]
    return replace(block, x=block.x[part], y=None, weight=None, start=block.start + part.start, rows=rows)


def forget(beliefs: np.ndarray, first: np.ndarray, share: float) -> np.ndarray:
    """share beliefs + (1 - share) first, each product rounded: the same on every machine."""
    return share * beliefs + (1 - share) * first


def centred(beliefs: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Features with room to the middle of their windows moved there; the first beliefs follow behind."""
    _, height, width, _ = beliefs.shape
    lines: list[np.ndarray] = [np.any(beliefs > 0, axis=others) for others in ((0, 2), (0, 1))]
    # Half of what there is more room behind than before; none for a feature without weights.
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
