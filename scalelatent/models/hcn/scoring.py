"""Metrics of compositional networks: compression for one layer, accuracy and error for several layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from scalelatent.data import Dataset
from scalelatent.errors import JobError, nearest
from scalelatent.evaluation.clustering import OnProgress
from scalelatent.evaluation.scoring import RowProgress, Scorer

if TYPE_CHECKING:
    from .estimator import HierarchicalCompositionalNetwork

_PART_METRICS, _CLASS_METRICS = ("compression", "score"), ("accuracy", "error")


class NetworkScorer(Scorer):
    """Scorer of networks: compression for one layer, shares of right and wrong classes for several layers."""

    metrics = (*_PART_METRICS, *_CLASS_METRICS)
    headline = ("error", "accuracy", "compression")

    def defaults(self, model: HierarchicalCompositionalNetwork) -> Sequence[str]:
        return _PART_METRICS[:1] if model.templates is None else _CLASS_METRICS

    def measure(
        self,
        model: HierarchicalCompositionalNetwork,
        dataset: Dataset,
        metrics: Sequence[str],
        progress: OnProgress | None,
    ) -> dict[str, Any]:
        known, kind = (
            (_PART_METRICS, "one layer") if model.templates is None else (_CLASS_METRICS, "templates")
        )
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
        self, model: HierarchicalCompositionalNetwork, dataset: Dataset, progress: OnProgress
    ) -> dict[str, Any]:
        if model.templates is not None and not dataset.has_y:
            return {}
        return self.measure(model, dataset, self.defaults(model), progress)
