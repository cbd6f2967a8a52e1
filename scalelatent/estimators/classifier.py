"""Prediction of all classifiers: arrays give arrays, dask arrays stay lazy, datasets stream to disk."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import ClassifierMixin, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted, column_or_1d

from scalelatent.data.schema import refuse_mixed
from scalelatent.engine.batch_loop import Progress
from scalelatent.engine.callbacks import Callback, Callbacks
from scalelatent.errors import DataError

from ._sklearn import wrap_output
from .base import check_labels, is_plain

SCORE_ROWS = 2**20


class _StreamedTransform:
    """``transform`` whose arrays follow ``set_output``; lazy arrays and datasets stay what they are.

    A class of its own, since scikit-learn would wrap whatever a transformer's own ``transform`` returns.
    """

    _map: Any
    _row_map: Any

    def transform(
        self, X: Any, *, out: Any = None, client: Any = None, overwrite: bool = False, callbacks: Any = ()
    ) -> Any:
        """Latent means h = W x, capsule by capsule.

        Parameters
        ----------
        X, out, client, overwrite, callbacks
            As in :meth:`StreamedClassifier.predict_proba`.

        Returns
        -------
        ndarray of float32, shape (n, sum of dimensions); a lazy array for a dask array; a Dataset with
        ``out``
            Class by class in the order of ``classes_`` (member by member for the binary architectures). A
            data frame where ``set_output`` asks for one.

        Examples
        --------
        >>> import numpy as np, scalelatent as sl
        >>> x, y = np.random.default_rng(0).normal(size=(50, 4)), np.arange(50) % 2
        >>> m = sl.CapsuleRegression(capsule_dim=3, max_iter=2).fit(x, y)
        >>> m.transform(x).shape, m.get_feature_names_out()[0]
        ((50, 6), 'capsuleregression0')
        """
        h = self._map(X, "latents", out, client, overwrite, callbacks)
        return wrap_output(self, h, X)

    @property
    def _n_features_out(self) -> int:
        return int(self._row_map("latents").output()[0][0])


class StreamedClassifier(
    _StreamedTransform, ClassNamePrefixFeaturesOutMixin, ClassifierMixin, TransformerMixin
):
    """``predict_proba``, ``predict``, ``transform`` and ``score`` for estimators that give a row map.

    The row map of ``"probabilities"`` gives scores whose largest is the predicted class, ``"classes"`` the
    same with labels for a dataset, ``"latents"`` the transform.
    """

    classes_: Any
    _other_rows: Any
    _check_kind: Any

    def predict_proba(
        self, X: Any, *, out: Any = None, client: Any = None, overwrite: bool = False, callbacks: Any = ()
    ) -> Any:
        """Class probabilities.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, features)
        out : url or None
            Write a dataset of them there instead of returning an array.
        client, overwrite, callbacks
            Where ``out`` is written from, whether it may be replaced, progress.

        Returns
        -------
        ndarray of float64, shape (n, classes); a lazy array for a dask array; a Dataset with ``out``
            All-versus-all gives shares of votes.

        Examples
        --------
        >>> import numpy as np, scalelatent as sl
        >>> x, y = np.random.default_rng(0).normal(size=(50, 4)), np.arange(50) % 2
        >>> p = sl.CapsuleRegression(capsule_dim=2, max_iter=2).fit(x, y).predict_proba(x)
        >>> p.shape, bool(np.allclose(p.sum(axis=1), 1))
        ((50, 2), True)
        """
        return self._map(X, "probabilities", out, client, overwrite, callbacks)

    def predict(
        self, X: Any, *, out: Any = None, client: Any = None, overwrite: bool = False, callbacks: Any = ()
    ) -> Any:
        """Predicted classes.

        With ``out``, a dataset whose ``x`` are the class probabilities and whose ``y`` are the predicted
        classes.

        Parameters
        ----------
        X, out, client, overwrite, callbacks
            As in :meth:`predict_proba`.

        Returns
        -------
        ndarray, shape (n,); a lazy array for a dask array; a Dataset with ``out``

        Examples
        --------
        >>> import numpy as np, scalelatent as sl
        >>> x, y = np.random.default_rng(0).normal(size=(50, 4)), np.array(["a", "b"])[np.arange(50) % 2]
        >>> sl.CapsuleRegression(capsule_dim=2, max_iter=2).fit(x, y).predict(x).shape
        (50,)
        """
        scores = self._map(
            X, "probabilities" if out is None else "classes", out, client, overwrite, callbacks
        )
        if out is not None:
            return scores
        if isinstance(scores, np.ndarray):
            return self.classes_[scores.argmax(axis=1)]
        return scores.map_blocks(_labels_of, self.classes_, drop_axis=1, dtype=self.classes_.dtype)

    def score(self, X: Any, y: Any = None, sample_weight: Any = None, *, callbacks: Any = ()) -> float:
        """Share of rows whose class is predicted; streams over a Dataset.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, features)
        y : array-like, shape (n,); a Dataset brings its own
        sample_weight : array-like, shape (n,), or None
        callbacks : Callback or sequence
            Told of progress.

        Returns
        -------
        float

        Raises
        ------
        DataError
            No labels, or targets in their place; weights that sum to 0.
        ValueError
            ``y`` or ``sample_weight`` with more than one column.

        Examples
        --------
        >>> import numpy as np, scalelatent as sl
        >>> x, y = np.eye(4).repeat(5, axis=0), np.arange(4).repeat(5)
        >>> sl.CapsuleRegression(capsule_dim=1, max_iter=5).fit(x, y).score(x, y)
        1.0
        """
        check_is_fitted(self)
        ds = self._other_rows(X)
        if y is None:
            if not ds.has_y:
                raise DataError(
                    f"{ds.url or 'X'} has no labels to score against: pass y, or a dataset with labels"
                )
            self._check_kind(ds)
        given = {"y": _one_column(y), "sample_weight": _one_column(sample_weight)}
        for name, column in given.items():
            if column is not None and len(column) != len(ds):
                raise DataError(f"{name} has {len(column)} entries for {len(ds)} rows: give one a row")
        right = total = 0.0
        told = Progress(Callbacks(callbacks), "score", 0)
        for first in range(0, len(ds), SCORE_ROWS):
            stop = min(first + SCORE_ROWS, len(ds))
            truth, weight = (None if c is None else np.asarray(c[first:stop]) for c in given.values())
            truth = ds.read_y(first, stop) if truth is None else truth
            weight = ds.read_weight(first, stop) if weight is None else weight.astype(float)
            part = _Part(told, first, len(ds))
            hit = (self.predict(ds[first:stop], callbacks=part) == truth).astype(float)
            right += float(hit.sum() if weight is None else hit @ weight)
            total += float(len(hit) if weight is None else weight.sum())
        if total == 0:
            raise DataError(
                f"the weights of {ds.url or 'the rows'} sum to 0, so there is no share of them to give: pass "
                "sample_weight above 0 for some rows"
            )
        return right / total


class _Part(Callback):
    """Tells how far the whole is by how far a part of its rows is."""

    def __init__(self, told: Progress, first: int, total: int) -> None:
        self._told, self._first, self._total = told, first, total

    def on_progress(self, info: dict[str, Any]) -> None:
        """Tell it."""
        self._told(self._first + info["rows_done"], self._total)


def _one_column(values: Any) -> Any:
    """One value a row; what is read in pieces (zarr, dask, memmap) stays what it is."""
    if values is None or not is_plain(values):
        return values
    refuse_mixed(values, "y")
    kind = np.asarray(values).dtype.kind
    if kind == "c":
        raise ValueError(
            f"Complex data not supported: {np.shape(values)} labels or weights are complex numbers"
        )
    column = column_or_1d(values)
    if kind == "O":
        check_labels(column)
    return column


def _labels_of(scores: np.ndarray, classes: np.ndarray) -> np.ndarray:
    return classes[scores.argmax(axis=1)]
