"""Quality of results: clustering and retrieval of a representation, baselines, errors of binary outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalelatent._lazy import attach

if TYPE_CHECKING:
    from .baselines import lsa, pca
    from .clustering import KMeansScores, clustering_accuracy, kmeans_scores, nmi
    from .neighbours import Neighbours, nearest_neighbours
    from .output_scores import METRICS, score_clusters, score_output
    from .retrieval import RETRIEVAL_METRICS, RetrievalCurve, retrieval_accuracy, retrieval_levels
    from .structured import OutputErrors, all_error, changed_error, occlusion_errors, output_errors

__all__ = [
    "METRICS",
    "RETRIEVAL_METRICS",
    "KMeansScores",
    "Neighbours",
    "OutputErrors",
    "RetrievalCurve",
    "all_error",
    "changed_error",
    "clustering_accuracy",
    "kmeans_scores",
    "lsa",
    "nearest_neighbours",
    "nmi",
    "occlusion_errors",
    "output_errors",
    "pca",
    "retrieval_accuracy",
    "retrieval_levels",
    "score_clusters",
    "score_output",
]

_WHERE = {
    ".baselines": ("lsa", "pca"),
    ".clustering": ("KMeansScores", "clustering_accuracy", "kmeans_scores", "nmi"),
    ".neighbours": ("Neighbours", "nearest_neighbours"),
    ".output_scores": ("METRICS", "score_clusters", "score_output"),
    ".retrieval": ("RETRIEVAL_METRICS", "RetrievalCurve", "retrieval_accuracy", "retrieval_levels"),
    ".structured": ("OutputErrors", "all_error", "changed_error", "occlusion_errors", "output_errors"),
}

__getattr__, __dir__ = attach(__name__, _WHERE)
