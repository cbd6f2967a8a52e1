r"""Compression: bits of a description of images by features, divided by the bits of the images.

The definition is from section 4.1 of Lázaro-Gredilla et al., "Hierarchical compositional feature
learning" (2016).

The description of the images X consists of the positions S of features, the weights W of the features, and
the pixels that differ from the reconstruction R. The compression is

.. math:: (E(S) + E(W) + E(X - R)) / E(X), \qquad E = N H(\text{share of ones}).

Here E is the number of bits of a binary array with N elements, and H is the entropy of one element in bits.
Features that no image uses are not in the description.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from scalelatent.contract.block_requirements import BlockRequirements
from scalelatent.contract.learners import Backend, Block
from scalelatent.contract.stats import Layout, Stats

from .decode import Decoder
from .layer import FLOPS_PER_PAIR, FeatureLayer, row_numbers

if TYPE_CHECKING:
    from .evidence_learner import EvidenceState


def count_bits(ones: npt.ArrayLike, n: npt.ArrayLike) -> np.ndarray:
    """Return the entropy in bits of ``n`` binary numbers of which ``ones`` are 1."""
    ones, n = np.asarray(ones, np.float64), np.asarray(n, np.float64)
    rest = n - ones
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = [np.where(part > 0, -part * np.log2(part / n), 0.0) for part in (ones, rest)]
    return terms[0] + terms[1]


@dataclass(frozen=True)
class DescriptionLength:
    """Counts of pixels and features in images, from which `compression` computes a ratio (a Reduction).

    A Reduction adds up counts over all rows. During learning, the weights of the features are those of the
    learner's state; otherwise they are those of the decoder.
    """

    decoder: Decoder
    every: int = 1  # use only the rows whose number is a multiple of this number

    @property
    def requirements(self) -> BlockRequirements:
        return self.decoder.requirements

    def layout(self) -> Layout:
        """Return the names and shapes of the counts.

        The counts are: rows, rows whose belief propagation converged, known pixels, pixels that are 1, and
        pixels that differ from the reconstruction. Two more counts for each feature are its positions in the
        images, and the pixels of 1 minus the pixels of 0 among those that only this feature covers.
        """
        n = (self.decoder.layer.n_features,)
        names = ("rows", "at_rest", "known", "ones", "errors")
        return Layout((*((name, ()) for name in names), ("placed", n), ("explained", n)))

    def flops_per_row(self) -> float:
        return FLOPS_PER_PAIR * self.decoder.layer.pairs * self.decoder.n_sweeps / self.every

    def prepare(self, state: EvidenceState | None, backend: Backend) -> tuple[Decoder, Backend]:
        return self.decoder if state is None else replace(self.decoder, weights=state.beliefs > 0), backend

    def accumulate(self, prepared: tuple[Decoder, Backend], block: Block, stats: Stats) -> None:
        decoder, backend = prepared
        rows = row_numbers(block)
        here = rows % self.every == 0
        if here.any():
            evidence = decoder.layer.read_evidence(block)[here]
            s, moved = decoder.decode(evidence, rows[here], backend)
            stats["at_rest"][...] += (moved == 0).sum()
            add_counts(decoder, evidence, s, backend, stats)


@dataclass(frozen=True)
class PixelCounts:
    """Counts of known pixels and of pixels of 1, summed over all rows (a Reduction).

    If ``n_classes`` is above 0, all rows and the labelled rows of each class are also counted.
    """

    layer: FeatureLayer
    n_classes: int = 0

    @property
    def requirements(self) -> BlockRequirements:
        return BlockRequirements(unlabelled=self.n_classes > 0)

    def layout(self) -> Layout:
        rows = (("labelled", (self.n_classes,)), ("rows", ())) if self.n_classes else ()
        return Layout((("known", ()), ("ones", ()), *rows))

    def flops_per_row(self) -> float:
        return 4.0 * self.layer.n_pixels

    def prepare(self, state: object, backend: Backend) -> None:
        return None

    def accumulate(self, prepared: None, block: Block, stats: Stats) -> None:
        evidence = self.layer.read_evidence(block)
        stats["known"][...] += (evidence != 0).sum()
        stats["ones"][...] += (evidence > 0).sum()
        if self.n_classes:
            stats["rows"][...] += len(block.x)
            if block.y is not None:
                stats["labelled"][...] += np.bincount(block.y[block.y >= 0], minlength=self.n_classes)


def add_counts(decoder: Decoder, evidence: np.ndarray, s: np.ndarray, backend: Backend, stats: Stats) -> None:
    """Add to ``stats`` the counts of some images, whose features are at the positions ``s``.

    ``evidence`` are the log odds of the pixels; their sign is the observed pixel, and 0 means unknown. The
    count ``explained`` of a feature is the number of pixels that only this feature covers and that are 1,
    minus the number of pixels that only this feature covers and that are 0.
    """
    cover_counts = decoder.cover_counts(s, backend)
    known, on = evidence != 0, evidence > 0
    stats["rows"][...] += len(s)
    stats["known"][...] += known.sum()
    stats["ones"][...] += on.sum()
    stats["errors"][...] += (known & (on != (cover_counts > 0))).sum()
    stats["placed"][...] += s.sum(axis=(0, 1, 2), dtype=np.int64)
    gains = np.where(known & (cover_counts == 1), np.where(on, 1, -1), 0)
    w = decoder.weights[:, ::-1, ::-1]
    _, h, width, _ = w.shape
    for n, r, c, f in np.argwhere(s):
        stats["explained"][f] += gains[n, :, r : r + h, c : c + width][w[..., f]].sum()


def count_total_bits(
    layer: FeatureLayer, weights: np.ndarray, stats: Stats, used: np.ndarray | None = None
) -> float:
    """Return the bits of a description of images: positions, features, and wrongly reconstructed pixels.

    ``stats`` are the counts of a `DescriptionLength`. The description has the features for which ``used`` is
    True, by default those with a position in an image. Without features, it has all pixels of the images.
    """
    used = stats["placed"] > 0 if used is None else used
    if not used.any():
        return float(count_bits(stats["ones"], stats["known"]))
    sent, high, wide = weights[..., used], *layer.places[:2]
    n_places = float(stats["rows"]) * high * wide * int(used.sum())
    errors = stats["errors"] + stats["explained"][~used].sum()
    errors = np.clip(errors, 0, stats["known"])
    placed = stats["placed"][used].sum()
    parts = (
        count_bits(placed, n_places),
        count_bits(sent.sum(), sent.size),
        count_bits(errors, stats["known"]),
    )
    return float(parts[0]) + float(parts[1]) + float(parts[2])


def compression(layer: FeatureLayer, weights: np.ndarray, stats: Stats) -> float:
    """Return the bits of `count_total_bits` divided by the bits of all pixels; NaN if pixels are equal."""
    whole = float(count_bits(stats["ones"], stats["known"]))
    return count_total_bits(layer, weights, stats) / whole if whole else float("nan")


def find_paying_features(layer: FeatureLayer, weights: np.ndarray, stats: Stats) -> np.ndarray:
    """Return True for each feature that shortens the description of the images, bool (features,).

    Features that cost more bits than they save are removed one by one, the worst first. The positions of
    features in ``stats`` were inferred with all features, so the caller must infer the positions again with
    the remaining features.
    """
    used = stats["placed"] > 0
    best = count_total_bits(layer, weights, stats, used)
    while used.any():
        found = []
        for f in np.flatnonzero(used):
            without = used.copy()
            without[f] = False
            found.append((count_total_bits(layer, weights, stats, without), f))
        least, f = min(found)
        if least >= best:
            break
        best, used[f] = least, False
    # A description without features may be the shortest even if no feature can be removed alone.
    return (
        used if best < count_total_bits(layer, weights, stats, np.zeros_like(used)) else np.zeros_like(used)
    )
