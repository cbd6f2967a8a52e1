"""What a search is once it is fitted: the best of its candidates, and a table of all."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any

import numpy as np
from sklearn import get_config
from sklearn.utils import estimator_html_repr
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted

from scalelatent.errors import DataError

from .comparing_by import Scoring

SHOWN = 20


def _gives(name: str) -> Callable[[Any], bool]:
    """Whether the kind of estimator that is searched has a method."""

    def check(search: Any) -> bool:
        getattr(search.estimator, name)  # its own AttributeError says what there is not
        return True

    return check


class BestOfSearch:
    """Gives what is asked of a search to its best estimator."""

    best_estimator_: Any
    cv_results_: dict[str, Any]
    estimator: Any
    scoring: Any
    n_jobs: int | None

    def _best(self) -> Any:
        check_is_fitted(self, "cv_results_")
        if not hasattr(self, "best_estimator_"):
            raise AttributeError("the search has no best_estimator_: fit it with refit=True")
        return self.best_estimator_

    @property
    def results_(self) -> dict[str, Any]:
        """Another name of ``cv_results_``."""
        return self.cv_results_

    @property
    def classes_(self) -> np.ndarray:
        """Classes of the best estimator."""
        return self._best().classes_

    @available_if(_gives("predict"))
    def predict(self, X: Any, **where: Any) -> Any:
        """``best_estimator_.predict``.

        Examples
        --------
        See the class.
        """
        return self._best().predict(X, **where)

    @available_if(_gives("predict_proba"))
    def predict_proba(self, X: Any, **where: Any) -> Any:
        """``best_estimator_.predict_proba``.

        Examples
        --------
        See the class.
        """
        return self._best().predict_proba(X, **where)

    @available_if(_gives("transform"))
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
        y : array-like, shape (n,), or (n, v) for a conditional RBM; a Dataset brings its own
        sample_weight : array-like, shape (n,), or None

        Returns
        -------
        float

        Examples
        --------
        See the class.
        """
        best = self._best()
        rows = best._scored_rows(X, y, sample_weight)
        scoring = Scoring(best, self.scoring)
        scoring.check(rows)
        if hasattr(best, "classes_") and not rows.has_y:
            raise DataError(
                f"{rows.url or 'X'} has no labels to score against: pass y, or a dataset with labels"
            )
        return scoring(best, rows)

    def _repr_html_(self) -> str:
        """The search as scikit-learn draws it; once fitted, its best candidates under it."""
        drawn = str(estimator_html_repr(self))
        if not hasattr(self, "cv_results_"):
            return drawn
        found = self.cv_results_
        best_first = np.argsort(found["rank_test_score"], kind="stable")
        rows = "".join(
            f"<tr><td>{found['rank_test_score'][i]}</td><td>{escape(_told(found['params'][i]))}</td>"
            f"<td>{found['mean_test_score'][i]:.4g}</td><td>{found['std_test_score'][i]:.2g}</td>"
            f"<td>{found['mean_fit_time'][i]:.2f}</td></tr>"
            for i in best_first[:SHOWN]
        )
        more = f"<p>{len(best_first) - SHOWN} more in cv_results_</p>" if len(best_first) > SHOWN else ""
        head = "<tr><th>rank</th><th>parameters</th><th>score</th><th>± folds</th><th>seconds a fit</th></tr>"
        return f"{drawn}<table>{head}{rows}</table>{more}"

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, str]:
        told = {"text/plain": repr(self)}
        return told | ({"text/html": self._repr_html_()} if get_config()["display"] == "diagram" else {})


def _told(params: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in params.items()) or "as the estimator"
