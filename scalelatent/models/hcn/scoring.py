"""How short a description of images a fitted network gives, as a score of runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scalelatent.data import Dataset
from scalelatent.evaluation.clustering import Progress
from scalelatent.evaluation.scoring import RowsTold, Scorer, Told, refuse_unknown


class CompressionScorer(Scorer):
    """Of images, which need no labels."""

    metrics = ("compression", "score")
    headline = ("compression",)

    def score(
        self,
        model: Any,
        dataset: Dataset,
        metrics: Sequence[str] | None = None,
        *,
        batch_rows: int = 16384,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        metrics = ("compression",) if metrics is None else metrics
        refuse_unknown(metrics, self.metrics)
        score = model.score(dataset, callbacks=() if progress is None else RowsTold(progress))
        return {name: {"score": score, "compression": 1.0 - score}[name] for name in metrics}

    def test_scores(self, model: Any, dataset: Dataset, progress: Told) -> dict[str, Any]:
        return self.score(model, dataset, progress=progress)
