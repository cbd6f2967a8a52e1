"""Fits of one layer of features, without classes: restarts, features that pay, compression."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.contract.stats import Stats
from scalelatent.data import Dataset
from scalelatent.errors import warn_user
from scalelatent.estimators.steps import Collect, Rows, Step, Steps
from scalelatent.models.hcn.model.batch import leaf_bytes
from scalelatent.models.hcn.model.compression import DescriptionLength, PixelCounts, compression, paying
from scalelatent.models.hcn.model.decode import SWEEPS, Decoder
from scalelatent.models.hcn.model.layer import FeatureLayer, from_features, to_features
from scalelatent.models.hcn.model.leaves import KeptMessages, LeafState
from scalelatent.models.hcn.model.online import EvidenceLearner, EvidenceState

from .fit import first_state, learn, visit_passes
from .parameters import batch_size, damping, is_online, n_epochs

if TYPE_CHECKING:
    from .estimator import HierarchicalCompositionalNetwork

# Share of the pixels that may move in the last sweep; images of which none at rest means little.
MOST_MOVED, FEW_ROWS = 0.9, 20
# Training images that compression is measured on, where there are no validation images.
LOOKED_ROWS = 1_000


@dataclass(frozen=True)
class Found:
    """What a fit of one layer comes to.

    Attributes
    ----------
    state : EvidenceState
    history : list of dict
    used : ndarray of bool, shape (F,)
        Features that pay for their bits.
    compression : float
    rows, at_rest : int
        Images that it was measured on, and those of them that came to rest.
    """

    state: EvidenceState
    history: list[dict[str, Any]]
    used: np.ndarray
    compression: float
    rows: int
    at_rest: int


@dataclass(frozen=True)
class OneLayer:
    """One layer of features (a :class:`~.fit.Network`)."""

    layer: FeatureLayer
    classes: None = None

    @property
    def layers(self) -> tuple[FeatureLayer]:
        return (self.layer,)

    @property
    def pairs(self) -> int:
        return self.layer.pairs

    @property
    def n_weights(self) -> int:
        return int(np.prod(self.layer.weights_shape))

    @property
    def image_bytes(self) -> int:
        return leaf_bytes(self.layer, 1)

    @property
    def kept_bytes(self) -> int:
        return self.image_bytes

    @property
    def online_bytes(self) -> int:
        return 4 * int(np.prod(self.layer.places))

    @property
    def decoding_sweeps(self) -> float:
        return SWEEPS

    def look(self) -> tuple[str, DescriptionLength]:
        nothing = np.zeros(self.layer.weights_shape, bool)
        return "compression", DescriptionLength(Decoder(self.layer, nothing))

    def check(self, train: Dataset, held: Dataset | None) -> None:
        """There is nothing more to refuse."""

    def counts(self) -> PixelCounts:
        return PixelCounts(self.layer)

    def check_counts(self, train: Dataset, counts: Stats) -> None:
        """There are no labels."""

    def learner(self, model: HierarchicalCompositionalNetwork, n_rows: int, seed: int) -> EvidenceLearner:
        layer = self.layer
        common = layer, float(model.forgetting), batch_size(model, n_rows), seed, int(model.patience or 0)
        if is_online(model):
            return EvidenceLearner(*common)
        alone = visit_passes(layer.pairs, n_rows)
        return KeptMessages(*common, damping(model), n_rows, alone, n_epochs(model, n_rows))

    def last_state(self, model: HierarchicalCompositionalNetwork) -> EvidenceState:
        before = model._network
        if not isinstance(before, OneLayer) or before.layer.weights_shape != self.layer.weights_shape:
            raise ValueError(
                f"the last fit was of {before.told()}, and these are {self.told()}: set layers back, or "
                "start again (warm_start=False)"
            )
        assert isinstance(model._stream, EvidenceState)
        return model._stream

    def told(self) -> str:
        """Features and their size, in words."""
        h, w = self.layer.window
        return f"{self.layer.n_features} features of {self.layer.image[0]} x {h} x {w}"

    def features(self, values: np.ndarray) -> list[np.ndarray]:
        """Weights, or beliefs of them, as features of the layer."""
        return [to_features(values)]

    def from_features(self, features: list[np.ndarray]) -> np.ndarray:
        """What :meth:`features` was made of."""
        return from_features(features[0])

    def course(
        self, model: HierarchicalCompositionalNetwork, rows: Mapping[str, Rows], counts: Stats
    ) -> Steps:
        best: Found | None = None
        for restart in range(int(model.n_restarts)):
            found = yield from self._one_fit(model, rows, restart)
            if best is None or found.compression < best.compression:
                best = found
        assert best is not None
        state = best.state
        kept = EvidenceState(state.beliefs, state.first, iteration=state.iteration)
        model._keep(self, kept, [best.used], best.history, best.compression)
        warn_of_rest(best, self.layer, len(rows["train"].dataset))

    def _one_fit(
        self, model: HierarchicalCompositionalNetwork, rows: Mapping[str, Rows], restart: int
    ) -> Generator[Step, Any, Found]:
        """The steps of one restart."""
        n, seed = len(rows["train"].dataset), model.seed_ + restart  # restarts see other orders
        end, layer = f"-{restart}" if restart else "", self.layer
        learner = self.learner(model, n, seed)
        begun = replace(learner, seed=model.seed_).start(restart)
        state = yield from first_state(model, self, begun, restart)
        result = yield from learn(model, self, learner, state, rows, seed, f"learn{end}")
        looked = rows.get("validation", rows["train"])
        every = 1 if "validation" in rows else max(1, n // LOOKED_ROWS)
        weights = result.state.beliefs > 0
        length = DescriptionLength(Decoder(layer, weights, model.seed_), every)
        stats = yield Collect(f"features{end}", length, looked)
        used = paying(layer, weights, stats)
        kept = weights & used
        if (kept != weights).any():
            length = DescriptionLength(Decoder(layer, kept, model.seed_), every)
            stats = yield Collect(f"compression{end}", length, looked)
        at_rest = int(stats["rows"]), int(stats["at_rest"])
        return Found(result.state, result.history, used, compression(layer, kept, stats), *at_rest)


def warn_of_rest(found: Found, layer: FeatureLayer, n_rows: int) -> None:
    """Warn where little is at rest in the end."""
    state = found.state
    moved = state.last_moved / (n_rows * layer.n_pixels) if isinstance(state, LeafState) else 0.0
    if moved > MOST_MOVED:
        warn_user(
            f"messages of {moved:.0%} of the pixels still moved in the last sweep: give more sweeps "
            "(n_epochs), or a damping below 1"
        )
    elif found.rows >= FEW_ROWS and not found.at_rest:
        warn_user(
            f"none of {found.rows} images came to rest in {SWEEPS} sweeps under the features that were "
            "learned: raise p01 and p10 (images are noisier than these say), or give more features"
        )
