"""Quality of results: clustering and retrieval of a representation, scores of models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalelatent._lazy import attach

if TYPE_CHECKING:
    from .clustering import KMeansScores, clustering_accuracy, kmeans_scores, nmi
    from .output_scores import METRICS, score_clusters
    from .retrieval import RETRIEVAL_METRICS, RetrievalCurve, retrieval_accuracy, retrieval_levels

__all__ = [
    "METRICS",
    "RETRIEVAL_METRICS",
    "KMeansScores",
    "RetrievalCurve",
    "clustering_accuracy",
    "kmeans_scores",
    "nmi",
    "retrieval_accuracy",
    "retrieval_levels",
    "score_clusters",
]

_WHERE = {
    ".clustering": ("KMeansScores", "clustering_accuracy", "kmeans_scores", "nmi"),
    ".output_scores": ("METRICS", "score_clusters"),
    ".retrieval": ("RETRIEVAL_METRICS", "RetrievalCurve", "retrieval_accuracy", "retrieval_levels"),
}

__getattr__, __dir__ = attach(__name__, _WHERE)
