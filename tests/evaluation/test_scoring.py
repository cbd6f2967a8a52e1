"""Scores computed block by block equal scikit-learn's; models without classes are scored by their output."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as reference

from scalelatent import Dataset
from scalelatent.errors import DataError, JobError
from scalelatent.evaluation import scoring
from scalelatent.evaluation.scoring import ClassScorer, score_dataset


class FixedProbabilities:
    """Model whose input rows are the probabilities that it predicts."""

    _kind = "capsule"

    def __init__(self, classes):
        self.classes_ = np.asarray(classes)
        self.n_features_in_ = len(self.classes_)

    def predict_proba(self, rows):
        return rows.read_x(0, len(rows))

    def predict(self, rows):
        return self.classes_[self.predict_proba(rows).argmax(axis=1)]


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 60), st.integers(2, 5), st.integers(1, 17), st.integers(0, 2**32 - 1))
def test_metrics_equal_those_of_scikit_learn(rows, n_classes, batch_rows, seed):
    rng = np.random.default_rng(seed)
    classes = np.array(["a", "b", "c", "d", "e"])[:n_classes]
    x = rng.dirichlet(np.ones(n_classes), rows)
    y = classes[rng.integers(n_classes, size=rows)]
    with patch.object(scoring, "BATCH_ROWS", batch_rows):
        got = score_dataset(FixedProbabilities(classes), Dataset.from_arrays(x, y), ClassScorer.metrics)
    guess = classes[x.argmax(axis=1)]
    assert got["accuracy"] == pytest.approx(reference.accuracy_score(y, guess))
    assert got["error"] == pytest.approx(1 - got["accuracy"])
    assert got["confusion"] == reference.confusion_matrix(y, guess, labels=classes).tolist()
    assert got["f1_macro"] == pytest.approx(reference.f1_score(y, guess, average="macro", zero_division=0))
    assert got["log_loss"] == pytest.approx(reference.log_loss(y, x, labels=classes))
    recall = [np.mean(guess[y == c] == c) for c in np.unique(y)]
    assert got["balanced_accuracy"] == pytest.approx(np.mean(recall))


def test_unknown_metrics_and_unusable_rows_are_refused():
    x, y = np.eye(3), np.array([0, 1, 2])
    model = FixedProbabilities([0, 1, 2])
    with pytest.raises(JobError, match="did you mean 'accuracy'"):
        score_dataset(model, Dataset.from_arrays(x, y), ["acuracy"])
    with pytest.raises(DataError, match="no labels"):
        score_dataset(model, Dataset.from_arrays(x))
    with pytest.raises(DataError, match=r"label .*7.* unknown to the model, whose classes are 0, 1, 2"):
        score_dataset(model, Dataset.from_arrays(x, np.array([0, 1, 7])))
    with pytest.raises(DataError, match="has 2 features per row, but the model was fitted to 3"):
        score_dataset(model, Dataset.from_arrays(x[:, :2], y))


class HalvedOutput:
    """Model without classes whose output is its input divided by two."""

    _kind, _output_metric = "mbn", "cosine"
    n_features_in_ = 3

    def transform(self, dataset):
        return dataset.read_x(0, len(dataset)) / 2


def test_a_model_without_classes_is_scored_by_its_output():
    x, y = np.eye(3).repeat(8, axis=0), np.repeat(["a", "b", "c"], 8)
    ds = Dataset.from_arrays(x, y)
    assert score_dataset(HalvedOutput(), ds)["accuracy"] == 1.0
    got = score_dataset(HalvedOutput(), ds, ["nmi", "retrieval"])
    assert (got["nmi"], got["restarts"]) == (1.0, 50)
    assert got["retrieval"]["accuracy"][:3] == [1.0, 1.0, 1.0]
    assert "accuracy" not in got
    topics = Dataset.from_arrays(x, (np.eye(3) > 0).repeat(8, axis=0).astype(float))
    assert score_dataset(HalvedOutput(), topics, ["retrieval"])["retrieval"] == got["retrieval"]
    with pytest.raises(DataError, match="instead of one class each.*use the metric retrieval"):
        score_dataset(HalvedOutput(), topics, ["nmi"])
    with pytest.raises(
        JobError, match=r"unknown metric 'log_loss' of HalvedOutput, which predicts no classes.*nmi"
    ):
        score_dataset(HalvedOutput(), ds, ["log_loss"])
    with pytest.raises(DataError, match="has no labels"):
        score_dataset(HalvedOutput(), Dataset.from_arrays(x), ["nmi"])


class CodeOutput:
    """Model whose output is codes, which can only be compared for equality."""

    _kind, _output_metric = "mbn", "overlap"
    n_features_in_ = 3

    def transform(self, dataset):
        return dataset.read_x(0, len(dataset)).astype(np.uint16)


def test_codes_are_ranked_by_the_codes_that_rows_share():
    """Rows of a class have the same last code. The share of equal codes finds them; the cosine would not."""
    rng = np.random.default_rng(0)
    y = np.arange(40) % 2
    x = np.column_stack([rng.permutation(40) * 100, rng.permutation(40) * 100, y + 1])
    ds = Dataset.from_arrays(x, y)
    assert score_dataset(CodeOutput(), ds)["retrieval"]["accuracy"][:4] == [1.0] * 4
    assert score_dataset(CodeOutput(), ds, ["retrieval"]) == score_dataset(CodeOutput(), ds)
    for name in ("nmi", "accuracy"):
        reported = (
            f"metric '{name}' clusters components.*codes.*use the metric retrieval, or fit with output='pca'"
        )
        with pytest.raises(JobError, match=reported):
            score_dataset(CodeOutput(), ds, ["retrieval", name])
