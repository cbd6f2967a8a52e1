"""The shell."""

from functools import partial

import numpy as np
from sklearn.base import TransformerMixin

from scalelatent.data import Dataset
from scalelatent.deploy.clusters import current_client
from scalelatent.engine.plan import Forecast, find_resources
from scalelatent.estimators.base import StreamedEstimator
from scalelatent.estimators.steps import Begin, Learn, Remember
from scalelatent.kernels.streams import stream

from . import PARAMETERS
from .model import KMeansEM, Nearness, State


class StreamedKMeans(TransformerMixin, StreamedEstimator):
    _kind, _parameters, _sign_of_fit, _validates = "kmeans", PARAMETERS, "centroids_", False

    def __init__(self, *, n_clusters=8, max_iter=20, tol=0.0, random_state=None, device="auto", n_jobs=None):
        self.n_clusters, self.max_iter, self.tol = n_clusters, max_iter, tol
        self.random_state, self.device, self.n_jobs = random_state, device, n_jobs

    def fit(self, X, y=None, *, validation=None, client=None, run_dir=None, resume=False, callbacks=(),
            engine=None, verbose=None):  # fmt: skip
        self._check_params()
        train = self._search_rows(X, y, None)
        resources = find_resources(client or current_client(), self.n_jobs, None)
        self._check_plan(partial(self._plan, train, resources, engine))
        self._fit_by_steps(train, None, client, run_dir, resume, callbacks, engine, verbose)
        return self

    def plan(self, X, y=None, *, validation=None, client=None, memory_limit=None, engine=None):
        self._check_params()
        resources = find_resources(client or current_client(), self.n_jobs, memory_limit)
        return self._plan(self._scored_rows(X, y, None), resources, engine, measure=True)

    def transform(self, X, *, out=None, client=None, overwrite=False, callbacks=()):
        return self._map(X, "nearness", out, client, overwrite, callbacks)

    def _scored_rows(self, X, y, sample_weight):
        return X if isinstance(X, Dataset) else Dataset.from_arrays(X, y)

    def _search_rows(self, X, y, sample_weight):
        rows = self._scored_rows(X, y, sample_weight)
        self._set_width(rows.n_features)
        return rows

    def _plan(self, train, resources, engine, measure):
        told = Forecast("kmeans", train, resources, engine or {}, measure)
        held = 8 * self.n_clusters * train.n_features
        stage = told.stage("estep", self._learner(train), {"train": train}, 4 * held, "lower n_clusters")
        told.add("estep", self.max_iter * told.a_pass(stage, {}))
        return told.told(4 * held, "lower max_iter")

    def _learner(self, rows):
        return KMeansEM(self.n_clusters, rows.n_features, self.max_iter, self.tol)

    def _fit_steps(self, rows):
        self.seed_, rows = yield Begin({"max_iter": self.max_iter})
        train = rows["train"].dataset
        some = np.sort(stream(self.seed_, "kmeans-start").choice(len(train), self.n_clusters, replace=False))
        first = yield Remember("start", lambda: {"x": np.concatenate([train.read_x(i, i + 1) for i in some])})
        state = State(first["x"].astype(np.float64))
        result = yield Learn("estep", self._learner(train), state, rows, None, self._row_map)
        self.centroids_, self.history_ = result.state.centroids, result.history
        self.n_iter_ = result.state.iteration

    def _row_map(self, what):
        return Nearness(self.centroids_)

    def _to_saved(self):
        return {"seed": self.seed_, "passes": self.n_iter_}, {"centroids": self.centroids_}

    @classmethod
    def _from_saved(cls, params, values, arrays):
        model = cls(**params)
        model.seed_, model.n_iter_, model.centroids_ = values["seed"], values["passes"], arrays["centroids"]
        model.n_features_in_ = model.centroids_.shape[1]
        return model
