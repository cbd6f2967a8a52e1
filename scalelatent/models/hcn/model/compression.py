r"""How short a description of images features give.

Bits of the features, of what is placed where, and of what is left over, over those of the images themselves:

.. math:: (E(S) + E(W) + E(X - R)) / E(X), \qquad E = N H(\text{share of ones})

with N the numbers of an array and H the entropy of a bit; unused features are not sent (section 4.1).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from scalelatent.contract.learners import Backend, Block
from scalelatent.contract.stats import Layout, Stats
from scalelatent.contract.wants import Wants

from .decode import Decoder
from .layer import FLOPS_PER_PAIR, FeatureLayer, rows_of

if TYPE_CHECKING:
    from .online import EvidenceState

NOTHING = Wants()


def bits(ones: npt.ArrayLike, n: npt.ArrayLike) -> np.ndarray:
    """N H(ones / N): bits of N numbers, so many of which are 1."""
    ones, n = np.asarray(ones, np.float64), np.asarray(n, np.float64)
    rest = n - ones
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = [np.where(part > 0, -part * np.log2(part / n), 0.0) for part in (ones, rest)]
    return terms[0] + terms[1]


@dataclass(frozen=True)
class DescriptionLength:
    """Counts that a description length is made of (a :class:`~scalelatent.contract.learners.Reduction`).

    The state is that of an online learner, or None: then features are those of the decoder.
    """

    decoder: Decoder
    # Only each so-many-th row of the dataset is looked at.
    every: int = 1

    @property
    def wants(self) -> Wants:
        return self.decoder.wants

    def layout(self) -> Layout:
        """Rows, those at rest, known pixels, ones and errors among them; of each feature the places and what
        it explains.
        """
        n = (self.decoder.layer.n_features,)
        names = ("rows", "at_rest", "known", "ones", "errors")
        return Layout((*((name, ()) for name in names), ("placed", n), ("explained", n)))

    def flops_per_row(self) -> float:
        """Of the sweeps."""
        return FLOPS_PER_PAIR * self.decoder.layer.pairs * self.decoder.n_sweeps / self.every

    def prepare(self, state: EvidenceState | None, backend: Backend) -> tuple[Decoder, Backend]:
        """The decoder of the moment."""
        return self.decoder if state is None else replace(self.decoder, weights=state.beliefs > 0), backend

    def accumulate(self, prepared: tuple[Decoder, Backend], block: Block, stats: Stats) -> None:
        """Count in the block's rows."""
        decoder, backend = prepared
        rows = rows_of(block)
        here = rows % self.every == 0
        if here.any():
            evidence = decoder.layer.evidence_in(block)[here]
            s, moved = decoder.decode(evidence, rows[here], backend)
            stats["at_rest"][...] += (moved == 0).sum()
            count(decoder, evidence, s, backend, stats)


@dataclass(frozen=True)
class PixelCounts:
    """Known pixels and ones of rows (a :class:`~scalelatent.contract.learners.Reduction`)."""

    layer: FeatureLayer
    wants: Wants = NOTHING

    def layout(self) -> Layout:
        return Layout((("known", ()), ("ones", ())))

    def flops_per_row(self) -> float:
        return 4.0 * self.layer.n_pixels

    def prepare(self, state: object, backend: Backend) -> None:
        return None

    def accumulate(self, prepared: None, block: Block, stats: Stats) -> None:
        evidence = self.layer.evidence_in(block)
        stats["known"][...] += (evidence != 0).sum()
        stats["ones"][...] += (evidence > 0).sum()


def count(decoder: Decoder, evidence: np.ndarray, s: np.ndarray, backend: Backend, stats: Stats) -> None:
    """Add the counts of rows whose S is given.

    What a feature explains: pixels that would be wrong without it, less those that would be right.
    """
    layers = decoder.layers(s, backend)
    known, on = evidence != 0, evidence > 0
    stats["rows"][...] += len(s)
    stats["known"][...] += known.sum()
    stats["ones"][...] += on.sum()
    stats["errors"][...] += (known & (on != (layers > 0))).sum()
    stats["placed"][...] += s.sum(axis=(0, 1, 2), dtype=np.int64)
    worth = np.where(known & (layers == 1), np.where(on, 1, -1), 0)
    w = decoder.weights[:, ::-1, ::-1]
    _, h, width, _ = w.shape
    for n, r, c, f in np.argwhere(s):
        stats["explained"][f] += worth[n, :, r : r + h, c : c + width][w[..., f]].sum()


def length(layer: FeatureLayer, weights: np.ndarray, stats: Stats, used: np.ndarray | None = None) -> float:
    """Bits of the features that are used (all that are placed), of S and of the errors."""
    return sum(lengths(layer, weights, stats, used))


def lengths(
    layer: FeatureLayer, weights: np.ndarray, stats: Stats, used: np.ndarray | None = None
) -> tuple[float, float, float]:
    """As :func:`length`: bits of S, of the features and of the errors."""
    used = stats["placed"] > 0 if used is None else used
    if not used.any():
        return 0.0, 0.0, float(bits(stats["ones"], stats["known"]))
    sent, high, wide = weights[..., used], *layer.places[:2]
    n_places = float(stats["rows"]) * high * wide * int(used.sum())
    errors = stats["errors"] + stats["explained"][~used].sum()
    errors = np.clip(errors, 0, stats["known"])
    placed = stats["placed"][used].sum()
    parts = bits(placed, n_places), bits(sent.sum(), sent.size), bits(errors, stats["known"])
    return float(parts[0]), float(parts[1]), float(parts[2])


def compression(layer: FeatureLayer, weights: np.ndarray, stats: Stats) -> float:
    """Bits sent over the bits of the images; NaN where these are all 0 or all 1."""
    whole = float(bits(stats["ones"], stats["known"]))
    return length(layer, weights, stats) / whole if whole else float("nan")


def paying(layer: FeatureLayer, weights: np.ndarray, stats: Stats) -> np.ndarray:
    """Which features pay for their bits, bool (F,): one that costs more than it saves goes, the worst first.

    What a feature explains is counted beside all others, so rows are best decoded again with those that stay.
    """
    used = stats["placed"] > 0
    best = length(layer, weights, stats, used)
    while used.any():
        found = []
        for f in np.flatnonzero(used):
            without = used.copy()
            without[f] = False
            found.append((length(layer, weights, stats, without), f))
        least, f = min(found)
        if least >= best:
            break
        best, used[f] = least, False
    # One alone may not go where all together may.
    return used if best < length(layer, weights, stats, np.zeros_like(used)) else np.zeros_like(used)
