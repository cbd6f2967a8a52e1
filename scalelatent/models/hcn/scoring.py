"""How well a network tells images: bits of their description, or of networks with templates classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from scalelatent.data import Dataset
from scalelatent.errors import JobError, nearest
from scalelatent.evaluation.clustering import Progress
from scalelatent.evaluation.scoring import RowProgress, Scorer

if TYPE_CHECKING:
    from .estimator import HierarchicalCompositionalNetwork

_OF_PARTS, _OF_CLASSES = ("compression", "score"), ("accuracy", "error")


class NetworkScorer(Scorer):
    """Of images: compression, which needs no labels; of a network with templates classes, or clusters."""

    metrics = (*_OF_PARTS, *_OF_CLASSES)
    headline = ("error", "accuracy", "compression")

    def defaults(self, model: HierarchicalCompositionalNetwork) -> Sequence[str]:
        return _OF_PARTS[:1] if model.templates is None else _OF_CLASSES

    def measure(
        self,
        model: HierarchicalCompositionalNetwork,
        dataset: Dataset,
        metrics: Sequence[str],
        batch_rows: int,
        progress: Progress | None,
    ) -> dict[str, Any]:
        known, kind = (_OF_PARTS, "one layer") if model.templates is None else (_OF_CLASSES, "templates")
        for name in metrics:
            if name not in known:
                raise JobError(f"unknown metric {name!r} of a network with {kind}; {nearest(name, known)}")
        score = model.score(dataset, callbacks=() if progress is None else RowProgress(progress))
        found = {
            "score": score,
            "compression": 1.0 - score,
            "accuracy": score,
            "error": round(1.0 - score, 12),
        }
        return {name: found[name] for name in metrics}

    def test_scores(
        self, model: HierarchicalCompositionalNetwork, dataset: Dataset, progress: Progress
    ) -> dict[str, Any]:
        if model.templates is not None and not dataset.has_y:
            return {}
        return self.score(model, dataset, progress=progress)
