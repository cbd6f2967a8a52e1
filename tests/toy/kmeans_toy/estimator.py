"""StreamedKMeans, the estimator of the plug-in, with the methods that scalelatent calls."""

import numpy as np

from scalelatent.estimators.base import StreamedEstimator
from scalelatent.estimators.steps import StartFit, StoreArrays, TrainBatch
from scalelatent.kernels.streams import stream

from . import PARAMETERS
from .model import KMeansEM, NearnessMap, State


class StreamedKMeans(StreamedEstimator):
    _kind, _parameters, _fitted_attribute, _validates = "kmeans", PARAMETERS, "centroids_", False

    def __init__(self, *, n_clusters=8, max_iter=20, tol=0.0, random_state=None, device="auto", n_jobs=None):
        self.n_clusters, self.max_iter, self.tol = n_clusters, max_iter, tol
        self.random_state, self.device, self.n_jobs = random_state, device, n_jobs

    def _learner(self, rows):
        return KMeansEM(self.n_clusters, rows.n_features, self.max_iter, self.tol)

    def _plan(self, reported):
        nbytes = 8 * self.n_clusters * reported.train.n_features
        stage = reported.add_stage("estep", self._learner(reported.train), 4 * nbytes, "lower n_clusters")
        rates = reported.measure_rates(stage, State(np.zeros((self.n_clusters, reported.train.n_features))))
        reported.add_passes(
            "estep", reported.pass_seconds(stage, rates), {"at_least": 1, "at_most": self.max_iter}
        )
        return reported.finish_plan("lower max_iter", checkpoint=nbytes)

    def _fit_steps(self, rows):
        self.seed_, rows = yield StartFit({"max_iter": self.max_iter})
        train = rows["train"].dataset
        some = np.sort(stream(self.seed_, "kmeans-start").choice(len(train), self.n_clusters, replace=False))
        first = yield StoreArrays(
            "start", lambda: {"x": np.concatenate([train.read_x(i, i + 1) for i in some])}
        )
        state = State(first["x"].astype(np.float64))
        result = yield TrainBatch("estep", self._learner(train), state, rows, None, self._row_map)
        self.centroids_, self.history_ = result.state.centroids, result.history
        self.n_iter_ = result.state.iteration

    def _row_map(self, output):
        return NearnessMap(self.centroids_)

    def _state(self):
        return {}, {"centroids": self.centroids_}

    def _restore(self, values, arrays):
        self.centroids_ = arrays["centroids"]
