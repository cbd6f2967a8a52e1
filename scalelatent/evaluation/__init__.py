"""How good an unsupervised representation is: clustering, retrieval, and the baselines to hold against it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalelatent._lazy import attach

if TYPE_CHECKING:
    from .baselines import lsa, pca
    from .clustering import KMeansScores, clustering_accuracy, kmeans_scores, nmi
    from .outputs import METRICS, score_output
    from .ranking import RETRIEVAL_METRICS
    from .retrieval import RetrievalCurve, retrieval_accuracy, retrieval_levels

__all__ = [
    "METRICS",
    "RETRIEVAL_METRICS",
    "KMeansScores",
    "RetrievalCurve",
    "clustering_accuracy",
    "kmeans_scores",
    "lsa",
    "nmi",
    "pca",
    "retrieval_accuracy",
    "retrieval_levels",
    "score_output",
]

_WHERE = {
    "METRICS": ".outputs",
    "RETRIEVAL_METRICS": ".ranking",
    "KMeansScores": ".clustering",
    "RetrievalCurve": ".retrieval",
    "clustering_accuracy": ".clustering",
    "kmeans_scores": ".clustering",
    "lsa": ".baselines",
    "nmi": ".clustering",
    "pca": ".baselines",
    "retrieval_accuracy": ".retrieval",
    "retrieval_levels": ".retrieval",
    "score_output": ".outputs",
}

__getattr__, __dir__ = attach(__name__, _WHERE)
