"""Score by which a search compares candidates: one number for a model on some rows; greater is better."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING

from sklearn.base import is_classifier
from sklearn.metrics import get_scorer, get_scorer_names

from scalelatent.data import Dataset
from scalelatent.data.feature_names import without_names
from scalelatent.engine.cache import memory_limit
from scalelatent.errors import DataError
from scalelatent.estimators.base import OUTPUT_SHARE
from scalelatent.estimators.session import FitSession
from scalelatent.evaluation.output_scores import CLUSTER_METRICS, METRICS, score_clusters, score_retrieval
from scalelatent.reductions.confusion import SCORERS, ConfusionCounts

if TYPE_CHECKING:
    from scalelatent.estimators.base import StreamedEstimator


class Scoring:
    """Score of fitted models of one estimator class, selected by the parameter ``scoring`` of a search."""

    def __init__(self, estimator: StreamedEstimator, scoring: str | Callable[..., float] | None) -> None:
        self.shared: str | None = None  # name of a score that one pass can compute for all candidates
        self.clusters = False  # True if the score compares clusters with labels
        if is_classifier(estimator):
            self.given = "accuracy" if scoring is None else scoring
            known: tuple[str, ...] = tuple(SCORERS)
            if isinstance(self.given, str) and self.given in SCORERS:
                self.shared, self._score = self.given, _score_by_counts(self.given)
                return
        elif hasattr(estimator, "score"):
            self.given, known = "score" if scoring is None else scoring, ("score",)
            if isinstance(self.given, str) and self.given == "score":
                self._score = lambda model, rows: float(model.score(rows))
                return
        else:
            self.given, known = "nmi" if scoring is None else scoring, METRICS
            if isinstance(self.given, str):
                if self.given not in METRICS:
                    raise ValueError(
                        f"scoring={self.given!r} is not one of {', '.join(METRICS)}, nor a function of "
                        "(model, dataset) or (model, X, y)"
                    )
                self.clusters, self._score = True, _score_by_clusters(self.given)
                return
        if callable(self.given):
            self._score = _score_on_arrays(self.given) if _takes_arrays(self.given) else self.given
        elif isinstance(self.given, str) and self.given in get_scorer_names():
            self._score = _score_on_arrays(get_scorer(self.given))
        else:
            raise ValueError(
                f"scoring={self.given!r} is not one of {', '.join(known)}, no name of sklearn.metrics."
                "get_scorer_names(), nor a function of (model, dataset) or (model, X, y)"
            )

    def check(self, rows: Dataset) -> None:
        """Raise a DataError if the score compares clusters with labels, and ``rows`` have no labels."""
        if self.clusters and (not rows.has_y or rows.y_kind != "labels"):
            raise DataError(
                f"{rows.url or 'the rows'}: scoring={self.given!r} compares clusters with labels, and there "
                "are none: give y (labels that are only scored on), or scoring=a function of (model, dataset)"
            )

    def __call__(self, model: StreamedEstimator, rows: Dataset) -> float:
        return float(self._score(model, rows))


def _takes_arrays(function: Callable[..., float]) -> bool:
    """Return whether a scorer is called as (model, X, y), as in scikit-learn, not as (model, dataset)."""
    if not inspect.isfunction(function) and hasattr(function, "_score_func"):
        return True
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(one.kind in places for one in parameters) >= 3


def _score_on_arrays(scorer: Callable[..., float]) -> Callable[[StreamedEstimator, Dataset], float]:
    def score(model: StreamedEstimator, rows: Dataset) -> float:
        n = len(rows)
        needed = rows.nbytes + 8 * n
        if needed > OUTPUT_SHARE * memory_limit():
            raise DataError(
                f"{rows.url or 'the rows'}: scikit-learn's scorer takes them as an array of "
                f"{needed / 2**30:.1f} GiB: give fewer rows to score on, or scoring=a function of (model, "
                "dataset), which may read a few rows at a time"
            )
        x, model = rows.read_x(0, n), without_names(model)
        if not rows.has_y and not rows.has_targets:
            return float(scorer(model, x))
        y = rows.read_targets(0, n) if rows.has_targets else rows.read_y(0, n)
        weight = rows.read_weight(0, n) if _accepts_weights(scorer) else None
        return float(scorer(model, x, y) if weight is None else scorer(model, x, y, sample_weight=weight))

    return score


def _accepts_weights(scorer: Callable[..., float]) -> bool:
    """Return whether a scorer accepts ``sample_weight``, which some metrics do not."""
    metric = getattr(scorer, "_score_func", None)
    return metric is not None and "sample_weight" in inspect.signature(metric).parameters


def _score_by_counts(name: str) -> Callable[[StreamedEstimator, Dataset], float]:
    def score(model: StreamedEstimator, rows: Dataset) -> float:
        with FitSession("search", device=model.device, n_jobs=model.n_jobs, in_process=True) as session:
            session.begin(0, {}, {})
            counts = ConfusionCounts(model._row_map("probabilities"), len(model.classes_))
            return SCORERS[name](session.collect("score", counts, rows, model.classes_))

    return score


def _score_by_clusters(name: str) -> Callable[[StreamedEstimator, Dataset], float]:
    def score(model: StreamedEstimator, rows: Dataset) -> float:
        if name in CLUSTER_METRICS:
            return float(score_clusters(model, rows)[name])
        return float(score_retrieval(model, rows).accuracy[0])

    return score
