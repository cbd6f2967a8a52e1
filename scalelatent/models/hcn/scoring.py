"""How short a description of images a fitted network gives, as a score of runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scalelatent.data import Dataset
from scalelatent.evaluation.clustering import Progress
from scalelatent.evaluation.scoring import RowsTold, Scorer, Told


class CompressionScorer(Scorer):
    """Of images, which need no labels."""

    metrics = ("compression", "score")
    default = headline = ("compression",)

    def measure(
        self, model: Any, dataset: Dataset, metrics: Sequence[str], batch_rows: int, progress: Progress | None
    ) -> dict[str, Any]:
        score = model.score(dataset, callbacks=() if progress is None else RowsTold(progress))
        return {name: {"score": score, "compression": 1.0 - score}[name] for name in metrics}

    def test_scores(self, model: Any, dataset: Dataset, progress: Told) -> dict[str, Any]:
        return self.score(model, dataset, progress=progress)
