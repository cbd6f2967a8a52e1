"""Scores from one pass agree with those of scikit-learn for all rows to nine digits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics

from scalelatent.contract.block_requirements import BlockRequirements
from scalelatent.contract.learners import Block
from scalelatent.data import Dataset
from scalelatent.engine.inprocess import InProcessExecutor
from scalelatent.engine.passes import make_stage
from scalelatent.reductions.confusion import SCORERS, ConfusionCounts


@dataclass(frozen=True)
class IdentityMap:
    """Map that returns the rows as they are, because the rows of this test are probabilities of classes."""

    requirements = BlockRequirements()

    def prepare(self, backend: Any) -> None:
        return None

    def apply(self, prepared: None, block: Block) -> np.ndarray:
        return block.x


@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true", "ignore:A single label was found")
@given(
    n=st.integers(1, 400), seed=st.integers(0, 2**32 - 1), weighted=st.booleans(), classes=st.integers(2, 5)
)
def test_scores_of_one_pass_agree_with_scikit_learns_scores_of_all_rows(
    n: int, seed: int, weighted: bool, classes: int
) -> None:
    rng = np.random.Generator(np.random.Philox(seed))
    p = rng.dirichlet(np.ones(classes), n)
    y = rng.integers(0, classes, n)
    weight = rng.uniform(0.1, 2, n) if weighted else None
    dataset = Dataset.from_arrays(p, y, sample_weight=weight)
    stage = make_stage(
        "score", {"train": ConfusionCounts(IdentityMap(), classes)}, {"train": dataset}, "cpu",
        np.arange(classes), block_rows=16, leaf_rows=32,
    )  # fmt: skip
    stats = InProcessExecutor(2).collect(stage, lambda done, total: None)["train"]
    guess = p.argmax(axis=1)
    expected = {
        "accuracy": metrics.accuracy_score(y, guess, sample_weight=weight),
        "balanced_accuracy": metrics.balanced_accuracy_score(y, guess, sample_weight=weight),
        "f1_macro": metrics.f1_score(y, guess, sample_weight=weight, average="macro"),
        "neg_log_loss": -metrics.log_loss(y, p, labels=range(classes), sample_weight=weight),
    }
    assert {name: score(stats) for name, score in SCORERS.items()} == pytest.approx(expected, rel=1e-9)
