"""Quality of results: clustering and retrieval of a representation, errors of binary outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalelatent._lazy import attach

if TYPE_CHECKING:
    from .clustering import KMeansScores, clustering_accuracy, kmeans_scores, nmi
    from .output_scores import METRICS, score_clusters
    from .retrieval import RETRIEVAL_METRICS, RetrievalCurve, retrieval_accuracy, retrieval_levels
    from .structured import OutputErrors, occlusion_errors, output_errors

__all__ = [
    "METRICS",
    "RETRIEVAL_METRICS",
    "KMeansScores",
    "OutputErrors",
    "RetrievalCurve",
    "clustering_accuracy",
    "kmeans_scores",
    "nmi",
    "occlusion_errors",
    "output_errors",
    "retrieval_accuracy",
    "retrieval_levels",
    "score_clusters",
]

_WHERE = {
    ".clustering": ("KMeansScores", "clustering_accuracy", "kmeans_scores", "nmi"),
    ".output_scores": ("METRICS", "score_clusters"),
    ".retrieval": ("RETRIEVAL_METRICS", "RetrievalCurve", "retrieval_accuracy", "retrieval_levels"),
    ".structured": ("OutputErrors", "occlusion_errors", "output_errors"),
}

__getattr__, __dir__ = attach(__name__, _WHERE)
