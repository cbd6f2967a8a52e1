"""Hyperparameter search whose candidates share each pass over the rows."""

from __future__ import annotations

import hashlib
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.base import BaseEstimator, MetaEstimatorMixin, clone
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted

from scalelatent.data import Dataset
from scalelatent.deploy.clusters import use_client
from scalelatent.engine.callbacks import Callback
from scalelatent.engine.plan import find_resources
from scalelatent.errors import DataError, ScalelatentError
from scalelatent.estimators.base import StreamedEstimator
from scalelatent.estimators.fit_services import FitCall, fit_callbacks, restored_on_failure
from scalelatent.estimators.session import FitSession, restore_row_ranges
from scalelatent.estimators.steps import MappedRows
from scalelatent.kernels.streams import resolve_seed
from scalelatent.reductions.confusion import SCORERS
from scalelatent.storage.disk import locate

from .apart import fit_separately
from .candidates import (
    Candidate,
    Split,
    check_candidate,
    check_estimator,
    expand_param_grid,
    find_folds,
    make_candidates,
    make_score_table,
    make_separate_candidates,
)
from .criterion import Scoring
from .joint_fit import ComputedValues, SharedFit

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path
    from typing import Literal

    import numpy.typing as npt
    from sklearn.utils import Tags

    from scalelatent.typing import ClientLike, LabelsLike, RandomState, RowsLike, ValidationLike, WeightsLike

    from .candidates import CrossValidation

# Attributes that a fit sets. A new fit first removes the attributes of an earlier fit.
_LEARNED = (
    "cv_results_", "best_index_", "best_params_", "best_score_", "best_estimator_", "n_splits_", "n_passes_",
    "seed_", "scoring_", "n_features_in_", "feature_names_in_", "refit_time_",
)  # fmt: skip


def _estimator_has(name: str) -> Callable[[Search], bool]:
    """Return a check, for ``available_if``, whether the estimator of a search has the method ``name``."""
    return lambda search: hasattr(search.estimator, name)


class Search(MetaEstimatorMixin, BaseEstimator):
    """Search over parameters of an estimator, like scikit-learn's `GridSearchCV`, for any number of rows.

    Candidates of :class:`CapsuleRegression` and of mixtures of linear models share each pass, because reading
    rows from disk takes most of the time. Each block is read and decoded once and given to all candidates
    (and all contiguous folds) that are still trained. A candidate that has stopped costs nothing any more.
    Candidates whose statistics differ much in size may need leaves (groups of blocks) of different sizes;
    rows are then read once per leaf size. Candidates of other kinds, and folds that are not contiguous, are
    fitted one after the other, each on all cores or the whole cluster. The model of a candidate is identical,
    bit by bit, to a fit of its parameters alone.

    Candidates with different projections are trained on different rows. Each projection is computed once for
    the whole search, and candidates with the same projection share the projected rows.

    Parameters
    ----------
    estimator : estimator
        An estimator of scalelatent. The search never changes it.
    param_grid : dict of str to sequence, or iterable of dict
        A grid, of which every combination is a candidate, or the candidates themselves, each a dict of
        parameters. `sklearn.model_selection.ParameterGrid` and `ParameterSampler` are such iterables.
    cv : int, splitter, iterable of (train, test) or None
        Cross-validation, used if ``fit`` gets no validation rows. A number of folds n (None: 5) means
        ``KFold(n)``: folds are contiguous rows and are not stratified. Rows that are sorted by class
        therefore need a splitter that shuffles. A data set of one row is scored on that row.
    scoring : str, callable or None
        Score to maximise: a name of ``sklearn.metrics.get_scorer_names()``, a scorer
        ``scoring(model, X, y)``, or a function ``scoring(model, dataset)``. Rows have weights if
        scikit-learn's metric supports weights. For classifiers "accuracy", "balanced_accuracy", "f1_macro"
        and "neg_log_loss" are computed in one shared pass. A bootstrap network is scored by "nmi",
        "accuracy" (of clusters) or "retrieval" (of the nearest row), which need labels. None means accuracy
        for a classifier, "nmi" for a bootstrap network, and ``score`` of the estimator for other models.
    refit : bool
        After cross-validation, fit the best parameters on all rows. With validation rows the best candidate
        is fitted already.
    halving : bool
        Successive halving: after ``min_passes`` passes the worse half of the candidates stops, after twice as
        many half of the rest, and so on. Candidates share passes, and are compared by ``scoring``, a name
        that one pass computes. Candidates with online algorithms, which have few passes, are not stopped.
    min_passes : int
        Passes before the first comparison of halving.
    error_score : "raise" or float
        Score of a candidate that diverges.
    memory_limit : str, int or None
        Memory of a process, for example ``"4GB"``. None asks the cluster or this process. Candidates whose
        statistics do not fit into memory together are trained in groups.
    n_jobs : int or None
        Threads in this process, for the refit as well. None uses ``joblib.parallel_config`` or, without it,
        all cores; the refit then uses ``n_jobs`` of the estimator.
    random_state : int, Generator, RandomState or None
        Seed of candidates whose ``random_state`` is None.

    Attributes
    ----------
    cv_results_ : dict
        As in scikit-learn: ``params``, ``param_*``, ``split*_test_score``, ``mean_test_score``,
        ``std_test_score``, ``rank_test_score``, ``mean_fit_time``, ``std_fit_time``, ``mean_score_time``,
        ``std_score_time`` in seconds; the time of a shared pass is divided among its candidates. Also
        ``n_passes`` and ``error`` of each candidate. ``results_`` is an alias.
    best_index_ : int
        Index of the best candidate in ``cv_results_``.
    best_params_ : dict
        Parameters of the best candidate.
    best_score_ : float
        Mean test score of the best candidate.
    best_estimator_ : estimator
        The fitted best candidate.
    n_splits_ : int
        Number of folds; 1 with validation rows.
    n_passes_ : int
        Passes over the rows during the search, without the refit.
    refit_time_ : float
        Seconds of the refit, after cross-validation.
    seed_ : int
        Seed of the search.
    scoring_ : str or callable
        The scoring that was used.
    n_features_in_ : int
        Number of features of the rows.
    feature_names_in_ : ndarray of str, shape (features,)
        Names of the features, if ``X`` has column names.

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> import scalelatent as sl
    >>> x, y = load_digits(return_X_y=True)
    >>> search = sl.Search(sl.CapsuleRegression(max_iter=10, random_state=0), {"capsule_dim": [1, 4]}, cv=3)
    >>> search = search.fit(x[:600], y[:600])
    >>> search.best_params_, len(search.cv_results_["mean_test_score"])
    ({'capsule_dim': 4}, 2)
    """

    def __init__(
        self,
        estimator: StreamedEstimator,
        param_grid: Mapping[str, Iterable[Any]] | Iterable[Mapping[str, Any]],
        *,
        cv: CrossValidation = None,
        scoring: str | Callable[..., float] | None = None,
        refit: bool = True,
        halving: bool = False,
        min_passes: int = 8,
        error_score: float | Literal["raise"] = np.nan,
        memory_limit: str | int | None = None,
        n_jobs: int | None = None,
        random_state: RandomState = None,
    ) -> None:
        self.estimator = estimator
        self.param_grid = param_grid
        self.cv = cv
        self.scoring = scoring
        self.refit = refit
        self.halving = halving
        self.min_passes = min_passes
        self.error_score = error_score
        self.memory_limit = memory_limit
        self.n_jobs = n_jobs
        self.random_state = random_state

    # -- fit ---------------------------------------------------------------------------------------------

    def fit(
        self,
        X: RowsLike,
        y: LabelsLike | None = None,
        *,
        validation: ValidationLike | None = None,
        sample_weight: WeightsLike | None = None,
        groups: npt.ArrayLike | None = None,
        client: ClientLike | None = None,
        run_dir: str | Path | None = None,
        resume: bool = False,
        callbacks: Callback | Sequence[Callback] = (),
        engine: Mapping[str, Any] | None = None,
        verbose: bool | None = None,
    ) -> Search:
        """Fit all candidates and, after cross-validation, fit the best parameters on all rows.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, features)
            Rows.
        y : array-like, shape (n,), or (n, v) for a conditional RBM, or None
            Labels or outputs. A Dataset ``X`` contains its own. A bootstrap network uses labels only for
            its score.
        validation : Dataset or (X, y) or None
            Rows for early stopping and for the scores. None uses ``cv``.
        sample_weight : array-like, shape (n,), or None
            Weights of the rows.
        groups : array-like, shape (n,), or None
            Groups of the rows, for splitters that need them.
        client, run_dir, resume, callbacks, engine, verbose
            As in ``fit`` of the estimator. The record of ``on_pass_end`` describes the best candidate so far;
            ``candidates`` is the number of candidates that share the pass, ``members`` has all records.

        Returns
        -------
        self

        Raises
        ------
        DataError
            Rows or labels are invalid, or all rows of a class are in one fold.
        ValueError
            A parameter is out of range; the message names the candidate.
        RunError
            The run folder contains another search.
        PlanError
            A single candidate does not fit into memory.

        Examples
        --------
        See the class.
        """
        check_estimator(self.estimator)
        with use_client(client) as found:
            call = FitCall(self, {}, run_dir, resume, callbacks, engine or {}, verbose, found)
            with restored_on_failure(self), fit_callbacks(call) as everyone:
                return self._fit(X, y, validation, sample_weight, groups, call, everyone)

    def _fit(
        self,
        X: RowsLike,
        y: LabelsLike | None,
        validation: ValidationLike | None,
        sample_weight: WeightsLike | None,
        groups: npt.ArrayLike | None,
        call: FitCall,
        callbacks: Callback,
    ) -> Search:
        for name in _LEARNED:
            self.__dict__.pop(name, None)
        if isinstance(self.error_score, str) and self.error_score != "raise":
            raise ValueError(f"error_score={self.error_score!r}: give 'raise' or a number")
        params, scoring = expand_param_grid(self.estimator, self.param_grid), self._make_scoring()
        base = clone(self.estimator)
        train = base._search_rows(X, y, sample_weight)
        validation_rows = base._validation_rows(validation)
        if validation_rows is None and self.cv is None and len(train) == 1:
            validation_rows = train
        watched = {"train": train}
        if validation_rows is not None:
            watched["validation"] = validation_rows
        watched = restore_row_ranges(watched, call.run_dir if call.resume else None)
        train, validation_rows = watched["train"], watched.get("validation")
        scoring.check(train if validation_rows is None else validation_rows)
        splits, folds = None, None
        if validation_rows is None:
            splits, folds = find_folds(self.cv, train, groups, shared=base._shares_passes)
        call.rows.update(watched)
        self.n_splits_ = len(splits or folds or (validation_rows,))
        where = {"client": call.client, "resume": call.resume, "callbacks": callbacks, "engine": call.engine}
        run_dir = call.run_dir
        if base._shares_passes and splits is None:
            candidates, scores = self._fit_together(base, params, watched, folds, scoring, run_dir, where)
        else:
            candidates, scores = self._fit_separately(base, params, watched, splits, scoring, run_dir, where)
        self._report_failed(candidates)
        self._set_results(params, candidates, scores)
        if validation_rows is not None:
            self.best_estimator_ = next(one.model for one in candidates if one.number == self.best_index_)
        elif self.refit:
            best = clone(base).set_params(**self.best_params_)
            if self.n_jobs is not None:
                best.set_params(n_jobs=self.n_jobs)
            if best.random_state is None:
                best.set_params(random_state=self.seed_)
            location = locate(run_dir).at("refit").url if run_dir is not None else None
            began = time.perf_counter()
            self.best_estimator_ = best._search_fit(train, run_dir=location, **where)
            self.refit_time_ = time.perf_counter() - began
        # Set these attributes last, so that an interrupted search does not count as fitted.
        self.n_features_in_ = base.n_features_in_
        if hasattr(base, "feature_names_in_"):
            self.feature_names_in_ = base.feature_names_in_
        return self

    def _fit_together(
        self,
        base: StreamedEstimator,
        params: Sequence[dict[str, Any]],
        watched: Mapping[str, Dataset],
        folds: Sequence[tuple[int, int]] | None,
        scoring: Scoring,
        run_dir: str | Path | None,
        where: Mapping[str, Any],
    ) -> tuple[list[Candidate], dict[str, float]]:
        """Fit candidates that share each pass; return the candidates and their scores by key."""
        memo = ComputedValues()
        # Check all candidates before anything is written.
        candidates = make_candidates(base, params, watched, folds)
        begins = [check_candidate(one, params[one.number], memo) for one in candidates]
        rungs = self._list_rungs(len(params))
        with FitSession(
            "search",
            run_dir=run_dir,
            device=base.device,
            n_jobs=self.n_jobs,
            defaults={"estimator": base._parameters.defaults_of_other_versions()},
            **where,
        ) as session:
            self.seed_, visible = session.start_fit(
                begins,
                self._choose_random_state(base),
                self._deciding_parameters(base, params),
                watched,
                candidates=len(params),
                splits=self.n_splits_,
            )
            shared = SharedFit(
                session,
                find_resources(session.client, self.n_jobs, self.memory_limit),
                SCORERS[scoring.shared or "accuracy"],
                rungs,
                memo,
            )
            answers = {}
            for one in candidates:
                one.rows = {
                    name: MappedRows(visible[name], mask=rows.mask) for name, rows in one.rows.items()
                }
                mask = one.validation.mask
                one.validation = MappedRows(visible["validation" if mask is None else "train"], mask=mask)
                own = one.model.random_state
                answers[one.key] = (self.seed_ if own is None else resolve_seed(own), one.rows)
            shared.run(candidates, answers)
            scores = self._score_candidates(shared, candidates, scoring)
            session.remove_leftovers()
        self.n_passes_ = shared.n_passes
        return candidates, scores

    def _fit_separately(
        self,
        base: StreamedEstimator,
        params: Sequence[dict[str, Any]],
        watched: Mapping[str, Dataset],
        splits: Sequence[Split] | None,
        scoring: Scoring,
        run_dir: str | Path | None,
        where: Mapping[str, Any],
    ) -> tuple[list[Candidate], dict[str, float]]:
        """Fit candidates one after the other; return the candidates and their scores by key."""
        if self.halving:
            raise ValueError(
                "halving=True compares candidates after shared passes, but these "
                f"{'folds are not contiguous' if base._shares_passes else 'models are fitted one by one'}: "
                "set halving=False"
            )
        candidates = make_separate_candidates(
            base, params, watched["train"], watched.get("validation"), splits
        )
        decides = self._deciding_parameters(base, params)
        if splits is not None:
            digest = hashlib.sha256(b"".join(rows.tobytes() for split in splits for rows in split))
            decides["folds"] = digest.hexdigest()
        own = {**where, "client": None, "engine": None}
        with FitSession(
            "search",
            in_process=True,
            run_dir=run_dir,
            device=base.device,
            n_jobs=self.n_jobs,
            defaults={"estimator": base._parameters.defaults_of_other_versions()},
            **own,
        ) as session:
            self.seed_ = session.begin(self._choose_random_state(base), decides, watched)
            session.notify_start(
                watched["train"], candidates=len(params), splits=self.n_splits_, seed=self.seed_
            )
            scores = fit_separately(
                candidates,
                session,
                scoring,
                self.seed_,
                keeps_best=splits is None,
                client=where["client"],
                run_dir=run_dir,
                n_jobs=self.n_jobs,
                engine=where["engine"],
            )
            session.remove_leftovers()
        self.n_passes_ = sum(one.passes for one in candidates)
        return candidates, scores

    def _choose_random_state(self, base: StreamedEstimator) -> RandomState:
        return base.random_state if self.random_state is None else self.random_state

    def fit_transform(self, X: RowsLike, y: LabelsLike | None = None, **fit: Any) -> Any:
        """Fit the search, then return ``best_estimator_.transform`` of the same rows.

        Examples
        --------
        See the class.
        """
        return self.fit(X, y, **fit).transform(X)

    def _make_scoring(self) -> Scoring:
        scoring = Scoring(self.estimator, self.scoring)
        self.scoring_ = scoring.given
        if self.halving and scoring.shared is None and self.estimator._shares_passes:
            raise ValueError(
                "halving=True compares candidates during the fit, when no complete model exists that a "
                f"function could score: give scoring as one of {', '.join(SCORERS)}, or set halving=False"
            )
        return scoring

    def _list_rungs(self, n: int) -> list[int]:
        if not self.halving:
            return []
        if not isinstance(self.min_passes, (int, np.integer)) or self.min_passes < 1:
            raise ValueError(f"min_passes={self.min_passes!r}: give a whole number of passes, at least 1")
        return [int(self.min_passes) * 2**i for i in range(max(0, math.ceil(math.log2(n))))]

    def _deciding_parameters(
        self, base: StreamedEstimator, params: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        """Return the settings that must be equal in an interrupted search and the search that resumes it."""
        own = {name: getattr(self, name) for name in ("halving", "min_passes", "error_score")}
        scoring = getattr(self.scoring_, "__qualname__", self.scoring_)
        of_base = base._deciding_parameters()
        return {
            **own,
            "scoring": scoring,
            "splits": self.n_splits_,
            "estimator": of_base,
            "candidates": params,
        }

    def _score_candidates(
        self, shared: SharedFit, candidates: Sequence[Candidate], scoring: Scoring
    ) -> dict[str, float]:
        sound, began = [one for one in candidates if one.error is None], time.perf_counter()
        if scoring.shared is None:
            scores = {one.key: scoring(one.model, one.validation.pieces()[0]) for one in sound}
        else:
            maps = {one.key: one.model._row_map("probabilities") for one in sound}
            scores = shared.scores(sound, "score", maps)
        for one in sound:
            one.score_seconds = (time.perf_counter() - began) / len(sound)
        return scores

    def _report_failed(self, candidates: Sequence[Candidate]) -> None:
        for one in candidates:
            if one.error is not None:
                text = f"candidate {one.number} ({one.key}) ended after {one.passes} passes: {one.error}"
                if isinstance(self.error_score, str):
                    raise ScalelatentError(text)
                warnings.warn(f"{text}; its score is {self.error_score}", UserWarning, stacklevel=4)

    def _set_results(
        self, params: Sequence[dict[str, Any]], candidates: Sequence[Candidate], scores: Mapping[str, float]
    ) -> None:
        self.cv_results_ = make_score_table(params, candidates, scores, self.n_splits_, self.error_score)
        mean = self.cv_results_["mean_test_score"]
        if not np.isfinite(mean).any():
            raise ScalelatentError(
                f"none of the {len(params)} candidates has a score; the first one ended with: "
                f"{self.cv_results_['error'][0]}"
            )
        self.best_index_ = int(np.where(np.isnan(mean), -np.inf, mean).argmax())
        self.best_params_, self.best_score_ = params[self.best_index_], float(mean[self.best_index_])

    # -- the best candidate ----------------------------------------------------------------------------------

    def _require_best_estimator(self) -> Any:
        check_is_fitted(self, "cv_results_")
        if not hasattr(self, "best_estimator_"):
            raise AttributeError("the search has no best_estimator_: fit it with refit=True")
        return self.best_estimator_

    @property
    def results_(self) -> dict[str, Any]:
        """Scores and times of all candidates: another name of ``cv_results_``."""
        return self.cv_results_

    @property
    def classes_(self) -> np.ndarray:
        """Classes of the best estimator."""
        return self._require_best_estimator().classes_

    @available_if(_estimator_has("predict"))
    def predict(self, X: RowsLike, **where: Any) -> Any:
        """Return ``best_estimator_.predict`` of rows.

        Examples
        --------
        See the class.
        """
        return self._require_best_estimator().predict(X, **where)

    @available_if(_estimator_has("predict_proba"))
    def predict_proba(self, X: RowsLike, **where: Any) -> Any:
        """Return ``best_estimator_.predict_proba`` of rows.

        Examples
        --------
        See the class.
        """
        return self._require_best_estimator().predict_proba(X, **where)

    @available_if(_estimator_has("transform"))
    def transform(self, X: RowsLike, **where: Any) -> Any:
        """Return ``best_estimator_.transform`` of rows.

        Examples
        --------
        See the class.
        """
        return self._require_best_estimator().transform(X, **where)

    def score(
        self, X: RowsLike, y: LabelsLike | None = None, sample_weight: WeightsLike | None = None
    ) -> float:
        """Return the score of the best estimator, computed by ``scoring``.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, features)
            Rows to score.
        y : array-like, shape (n,), or (n, v) for a conditional RBM, or None
            Labels or outputs. None uses those of a Dataset ``X``.
        sample_weight : array-like, shape (n,), or None
            Weights of the rows.

        Returns
        -------
        float
            The score; larger is better.

        Examples
        --------
        See the class.
        """
        best = self._require_best_estimator()
        rows = best._scored_rows(X, y, sample_weight)
        scoring = Scoring(best, self.scoring)
        scoring.check(rows)
        if hasattr(best, "classes_") and not rows.has_y:
            raise DataError(
                f"{rows.url or 'X'} has no labels to score against: pass y, or a dataset with labels"
            )
        return scoring(best, rows)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        own = self.estimator.__sklearn_tags__()
        tags.estimator_type, tags.classifier_tags = own.estimator_type, own.classifier_tags
        tags.target_tags, tags.input_tags = own.target_tags, own.input_tags
        tags.transformer_tags = own.transformer_tags
        return tags
