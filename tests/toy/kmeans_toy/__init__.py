"""K-means by streamed EM: a plug-in that scalelatent finds only by its entry point."""

from scalelatent.contract.kinds import Kind
from scalelatent.contract.parameters import (
    DEVICE,
    N_JOBS,
    RANDOM_STATE,
    Number,
    Parameter,
    Parameters,
    Whole,
)

PARAMETERS = Parameters(
    (
        Parameter("n_clusters", 8, Whole(), "centroids"),
        Parameter("max_iter", 20, Whole(), "most passes"),
        Parameter("tol", 0.0, Number("give a number of at least 0", least=0), "movement at which it stops"),
        RANDOM_STATE,
        DEVICE,
        N_JOBS,
    )
)
KIND = Kind(
    "kmeans",
    estimator="kmeans_toy.estimator:StreamedKMeans",
    parameters="kmeans_toy:PARAMETERS",
    kernels={
        "kmeans_assign": dict.fromkeys(("reference", "numba", "cupy"), "kmeans_toy.model:assign_to_centroids")
    },
    scorer="scalelatent.evaluation.scoring:OutputScorer",
)
