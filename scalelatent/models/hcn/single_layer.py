"""Fits of a network of one layer: restarts, selection of useful features, compression of the images."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from scalelatent.contract.stats import Stats
from scalelatent.errors import warn_user
from scalelatent.estimators.steps import MappedRows, Step, Steps, SumStatistic
from scalelatent.models.hcn.model.compression import DescriptionLength, compression, find_paying_features
from scalelatent.models.hcn.model.decode import DECODE_SWEEPS, Decoder
from scalelatent.models.hcn.model.evidence_learner import EvidenceState, OnlineFeatureLearner
from scalelatent.models.hcn.model.layer import FeatureLayer, to_features
from scalelatent.models.hcn.model.stored_messages import BatchFeatureLearner, LeafState, leaf_bytes

from .fit import choose_first_state, count_passes_per_write, learn_epochs
from .parameters import choose_batch_size, choose_damping, choose_n_epochs, is_online

if TYPE_CHECKING:
    from .estimator import HierarchicalCompositionalNetwork

# A fit that stores belief-propagation messages (online=False) warns if those of more than this share of the
# pixels changed in the last sweep, which updates the messages of all pixels once.
MAX_MOVED_SHARE = 0.9
# At its end, a fit decodes images (infers the positions of their features) to measure compression. It warns
# that no image converged only if it decoded at least this number of images.
MIN_ROWS_TO_WARN = 20
# A fit without validation images measures compression on evenly spaced training images: on all if there are
# fewer than twice this number, otherwise on at least this number.
MEASURED_ROWS = 1_000


class SingleLayerFit(NamedTuple):
    """Result of one of the ``n_restarts`` fits, which start from different random weights."""

    state: EvidenceState
    history: list[dict[str, Any]]
    used: np.ndarray  # bool (features,), True for features that save more bits than they cost
    compression: float
    rows: int  # number of images on which compression was measured
    at_rest: int  # number of these images whose belief-propagation messages converged


@dataclass(frozen=True)
class SingleLayer:
    """Network of one layer; `.multi_layer.MultiLayer` documents its properties and methods."""

    layer: FeatureLayer
    classes: None = None
    has_labels: bool = False

    @property
    def layers(self) -> tuple[FeatureLayer]:
        return (self.layer,)

    @property
    def image_bytes(self) -> int:
        return leaf_bytes(self.layer, 1)

    def learner(
        self, model: HierarchicalCompositionalNetwork, n_rows: int, seed: int
    ) -> OnlineFeatureLearner:
        layer = self.layer
        common = (
            layer,
            float(model.forgetting),
            choose_batch_size(model, n_rows if is_online(model) else None),
            seed,
            int(model.patience or 0),
        )
        if is_online(model):
            return OnlineFeatureLearner(*common)
        sweeps, most = count_passes_per_write(layer.pairs, n_rows), choose_n_epochs(model, n_rows, False)
        return BatchFeatureLearner(*common, choose_damping(model), n_rows, sweeps, most)

    def describe(self) -> str:
        h, w = self.layer.window
        return f"{self.layer.n_features} features of {self.layer.image[0]} x {h} x {w}"

    def features(self, values: np.ndarray) -> list[np.ndarray]:
        return [to_features(values)]

    def fit_steps(
        self, model: HierarchicalCompositionalNetwork, rows: Mapping[str, MappedRows], counts: Stats
    ) -> Steps:
        best: SingleLayerFit | None = None
        for restart in range(int(model.n_restarts)):
            found = yield from self._fit_once(model, rows, restart)
            if best is None or found.compression < best.compression:
                best = found
        assert best is not None
        state = best.state
        kept = EvidenceState(state.beliefs, state.first, iteration=state.iteration)
        model._keep(self, kept, best.history, [best.used], best.compression)
        warn_unsettled(best, self.layer, len(rows["train"].dataset))

    def _fit_once(
        self, model: HierarchicalCompositionalNetwork, rows: Mapping[str, MappedRows], restart: int
    ) -> Generator[Step, Any, SingleLayerFit]:
        """Yield the steps of fit number ``restart``; return the result of this fit.

        Fits with different numbers differ in their initial weights and in their random orders of updates.
        """
        n, seed = len(rows["train"].dataset), model.seed_ + restart
        end, layer = f"-{restart}" if restart else "", self.layer
        learner = self.learner(model, n, seed)
        start = replace(learner, seed=model.seed_).start(restart)
        state = yield from choose_first_state(model, self, start, restart)
        result = yield from learn_epochs(model, self, learner, state, rows, seed, f"learn{end}")
        measured = rows.get("validation", rows["train"])
        every = 1 if "validation" in rows else max(1, n // MEASURED_ROWS)
        weights = result.state.beliefs > 0
        length = DescriptionLength(Decoder(layer, weights, model.seed_), every)
        stats = yield SumStatistic(f"features{end}", length, measured)
        used = find_paying_features(layer, weights, stats)
        kept = weights & used
        if (kept != weights).any():
            length = DescriptionLength(Decoder(layer, kept, model.seed_), every)
            stats = yield SumStatistic(f"compression{end}", length, measured)
        at_rest = int(stats["rows"]), int(stats["at_rest"])
        return SingleLayerFit(result.state, result.history, used, compression(layer, kept, stats), *at_rest)


def warn_unsettled(found: SingleLayerFit, layer: FeatureLayer, n_rows: int) -> None:
    """Warn if messages of over 90 % of the pixels changed in the last sweep, or if no image converged."""
    state = found.state
    moved = state.last_moved / (n_rows * layer.n_pixels) if isinstance(state, LeafState) else 0.0
    if moved > MAX_MOVED_SHARE:
        warn_user(
            f"messages of {moved:.0%} of the pixels still changed in the last sweep: give more sweeps "
            "(n_epochs), or a damping below 1"
        )
    elif found.rows >= MIN_ROWS_TO_WARN and not found.at_rest:
        warn_user(
            f"none of {found.rows} images converged in {DECODE_SWEEPS} sweeps with the learned features: "
            "raise p01 and p10 (the images are noisier than these values), or give more features"
        )
