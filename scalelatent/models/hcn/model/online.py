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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from scalelatent.contract.learners import Backend, Block
from scalelatent.contract.stats import Layout, Stats
from scalelatent.contract.wants import Wants
from scalelatent.errors import DivergenceError
from scalelatent.kernels.arrays import Array
from scalelatent.models.hcn.kernels.exact import BELIEF_LIMIT, GRID

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


PreparedEvidence: TypeAlias = tuple[EvidenceState, Backend]
"""What chains begin with: the state, of whose beliefs each makes its own copy."""


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
        images = self.batch_rows * (4 * int(np.prod(self.layer.places)) + 12 * self.layer.n_pixels)
        # Evidence and orders of all rows of a chain, and what they are made of.
        each = 20 * self.layer.n_pixels
        return Wants(scratch=(images + 64 * int(np.prod(self.layer.weights_shape)), each))

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

    def prepare(self, state: EvidenceState, backend: Backend) -> PreparedEvidence:
        """The state: a chain makes its own copy of the beliefs."""
        return state, backend

    def run_chain(self, prepared: PreparedEvidence, block: Block, stats: Stats) -> None:
        """Add the evidence of some minibatches, taken one after another."""
        self.run_chains(prepared, [block], [stats])

    def run_chains(self, prepared: PreparedEvidence, blocks: Sequence[Block], stats: Sequence[Stats]) -> None:
        """Chains side by side: one launch for a minibatch of each.

        Raises
        ------
        DivergenceError
            Beliefs have grown beyond the range of sums.
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
        """Beliefs after the minibatches of chains of equally many rows: (chains, channels, h, w, F)."""
        layer, xp, rows = self.layer, backend.xp, len(blocks[0].x)
        sweep, orders = backend.kernel("hcn_sweep"), self._orders(blocks, backend.kernel("hcn_shuffled"))
        # Between the minibatches nothing goes to a device, or comes from it.
        beliefs = backend.asarray(np.stack([state.beliefs] * len(blocks)), np.float64)
        first, worst = backend.asarray(state.first, np.float64), 0
        evidence = xp.asarray(np.stack([layer.evidence_in(block) for block in blocks]))
        faded = (1 - self.forgetting) * first
        for a, order in zip(range(0, rows, self.batch_rows), orders, strict=True):
            part = xp.ascontiguousarray(evidence[:, a : a + self.batch_rows])
            n_images = part.shape[1]
            before = xp.rint(beliefs * GRID).astype(np.int32)
            s = backend.buffer("places", (len(blocks), n_images, *layer.places), np.int32)
            s[...] = int(layer.prior)
            w = before.copy()
            sweep(part, order, s, w)
            worst = xp.maximum(abs(w), worst)
            beliefs = self.forgetting * (beliefs + (w - before) / GRID) + faded  # as forget does
        largest = backend.to_host(worst).max(axis=(0, 1, 2, 3))
        if not layer.is_exact(largest):
            raise self._overflow(largest)
        return backend.to_host(beliefs)

    def _orders(self, blocks: Sequence[Block], shuffle: Callable[..., Array]) -> list[Array]:
        """Orders of the pixels of a minibatch of each chain (chains, pixels), one minibatch after another."""
        rows, size, out = len(blocks[0].x), self.batch_rows, []
        firsts = np.stack([rows_of(block)[::size] for block in blocks], axis=1)
        whole = rows // size
        for some, n_images in ((firsts[:whole], size), (firsts[whole:], rows % size)):
            if len(some):
                n = n_images * self.layer.n_pixels
                found = shuffle(self.seed, "hcn sweep", blocks[0].epoch, some.ravel(), n)
                found = found.reshape(*some.shape, n)
                out += [found[k] for k in range(len(some))]
        return out

    def _overflow(self, largest: np.ndarray) -> DivergenceError:
        feature, limit = int(largest.argmax()), BELIEF_LIMIT / GRID
        return DivergenceError(
            f"layer 1: beliefs in weights of feature {feature} have reached {largest[feature] / GRID:,.0f}, "
            f"and there is room below {limit:,.0f} only: lower forgetting (now {self.forgetting}) or "
            f"batch_size (now {self.batch_rows}), or raise p01 and p10"
        )

    def step(self, state: EvidenceState, stats: Stats, n_rows: int) -> EvidenceState:
        """Add the chains' evidence to what is left of the beliefs."""
        n = int(stats["minibatches"])
        beliefs = gathered(state.beliefs, state.first, self.forgetting, stats)
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


def forget(beliefs: np.ndarray, first: np.ndarray, share: float) -> np.ndarray:
    """share beliefs + (1 - share) first, each product rounded: the same on every machine."""
    return share * beliefs + (1 - share) * first


def gathered(beliefs: np.ndarray, first: np.ndarray, forgetting: float, stats: Stats) -> np.ndarray:
    """Beliefs after a step of chains, with what these have found."""
    decay = forgetting ** int(stats["minibatches"])
    scale = (1 - decay) / float(stats["weight"]) if decay < 1 else 1.0
    return forget(beliefs, first, decay) + scale * stats["evidence"]


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
