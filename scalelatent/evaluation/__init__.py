"""How good results are: of a representation clustering and retrieval, with baselines to hold against it; of
predicted binary outputs the errors.
"""

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
    "METRICS": ".output_scores",
    "RETRIEVAL_METRICS": ".retrieval",
    "KMeansScores": ".clustering",
    "Neighbours": ".neighbours",
    "OutputErrors": ".structured",
    "RetrievalCurve": ".retrieval",
    "all_error": ".structured",
    "changed_error": ".structured",
    "clustering_accuracy": ".clustering",
    "kmeans_scores": ".clustering",
    "lsa": ".baselines",
    "nearest_neighbours": ".neighbours",
    "nmi": ".clustering",
    "occlusion_errors": ".structured",
    "output_errors": ".structured",
    "pca": ".baselines",
    "retrieval_accuracy": ".retrieval",
    "retrieval_levels": ".retrieval",
    "score_clusters": ".output_scores",
    "score_output": ".output_scores",
}

__getattr__, __dir__ = attach(__name__, _WHERE)
