"""What a search is once it is fitted: the best of its candidates."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.utils.validation import check_is_fitted

from scalelatent.engine.tally import SCORERS, ScoreTally
from scalelatent.errors import DataError

from .session import FitSession


class BestOfSearch:
    """Gives what is asked of a search to its best estimator."""

    best_estimator_: Any
    scoring_: Any
    n_jobs: int | None

    def _best(self) -> Any:
        check_is_fitted(self, "results_")
        if not hasattr(self, "best_estimator_"):
            raise AttributeError("the search has no best_estimator_: fit it with refit=True")
        return self.best_estimator_

    @property
    def classes_(self) -> np.ndarray:
        """Classes of the best estimator."""
        return self._best().classes_

    @property
    def n_features_in_(self) -> int:
        """Features of the rows."""
        return self._best().n_features_in_

    def predict(self, X: Any, **where: Any) -> Any:
        """``best_estimator_.predict``.

        Examples
        --------
        See the class.
        """
        return self._best().predict(X, **where)

    def predict_proba(self, X: Any, **where: Any) -> Any:
        """``best_estimator_.predict_proba``.

        Examples
        --------
        See the class.
        """
        return self._best().predict_proba(X, **where)

    def transform(self, X: Any, **where: Any) -> Any:
        """``best_estimator_.transform``.

        Examples
        --------
        See the class.
        """
        return self._best().transform(X, **where)

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """Score of the best estimator by ``scoring``.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, features)
        y : array-like, shape (n,); a Dataset brings its own
        sample_weight : array-like, shape (n,), or None

        Returns
        -------
        float

        Examples
        --------
        See the class.
        """
        best = self._best()
        ds = best._other_rows(X, y, sample_weight)
        if not ds.has_y:
            raise DataError(
                f"{ds.url or 'X'} has no labels to score against: pass y, or a dataset with labels"
            )
        if callable(self.scoring_):
            return float(self.scoring_(best, ds))
        with FitSession("search", device=best.device, n_jobs=self.n_jobs) as session:
            session.begin(0, {}, {})
            tally = ScoreTally(best._row_map("probabilities"), len(best.classes_))
            return SCORERS[self.scoring_](session.collect("score", tally, ds, best.classes_))
