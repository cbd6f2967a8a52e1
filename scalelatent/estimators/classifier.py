"""Base class of classifiers: checks of labels and weights, predicted classes, scores."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from sklearn.base import ClassifierMixin
from sklearn.utils.validation import check_is_fitted

from scalelatent.data import Dataset
from scalelatent.data.feature_names import frame_names
from scalelatent.data.read.containers import opened
from scalelatent.data.schema import check_label_values, refuse_masked
from scalelatent.deploy.clusters import use_client
from scalelatent.engine.batch_loop import Progress
from scalelatent.engine.callbacks import Callback, Callbacks
from scalelatent.errors import DataError

from .base import StreamedEstimator
from .fit_services import FitCall
from .gpu_results import follows_rows
from .inputs import (
    VALIDATION_OPTIONS,
    check_classes,
    check_finite,
    check_labels,
    check_weights,
    is_in_memory,
    to_column,
    validate_rows,
)
from .session import CallbackList

if TYPE_CHECKING:
    from scalelatent.typing import ClientLike, LabelsLike, RowsLike, ValidationLike, WeightsLike

SCORE_ROWS = 2**20  # rows that ``score`` predicts at a time


class StreamedClassifier(ClassifierMixin, StreamedEstimator):
    """Base class of classifiers.

    The row map ``"probabilities"`` returns one score per class, and the largest marks the predicted class.
    The row map ``"classes"`` adds the labels for a dataset, and ``"latents"`` is the map of ``transform``.
    """

    _transformed = "latents"
    _without_labels = ""  # end of error messages: "; " and how to learn from rows without labels
    classes_: np.ndarray

    def fit(
        self,
        X: RowsLike,
        y: LabelsLike | None = None,
        *,
        validation: ValidationLike | None = None,
        sample_weight: WeightsLike | None = None,
        client: ClientLike | None = None,
        run_dir: str | Path | None = None,
        resume: bool = False,
        callbacks: CallbackList = (),
        engine: Mapping[str, Any] | None = None,
        verbose: bool | None = None,
    ) -> Self:
        with use_client(client) as found:
            call = FitCall(self, {}, run_dir, resume, callbacks, engine or {}, verbose, found)
            return self._fit(X, y, sample_weight, validation, call)

    fit.__doc__ = StreamedEstimator.fit.__doc__

    def _training_rows(
        self, X: RowsLike, y: LabelsLike | None, sample_weight: WeightsLike | None, *, reset: bool = True
    ) -> Dataset:
        rows, labels = opened(X, "X"), opened(y, "y")
        sample_weight = opened(sample_weight, "sample_weight")
        if is_in_memory(rows):
            if labels is None:
                name = type(self).__name__
                raise ValueError(
                    f"{name} requires y to be passed, but the target y is None{self._without_labels}"
                )
            check_label_values(labels, "y")
            names = frame_names(rows)
            rows, labels = validate_rows(self, rows, labels, reset=reset, **VALIDATION_OPTIONS)
            check_finite(rows, "X")
            check_labels(labels)
            if sample_weight is not None:
                refuse_masked(sample_weight, "sample_weight")
                if np.asarray(sample_weight).dtype.kind == "c":
                    raise ValueError(
                        "Complex data not supported: sample_weight holds complex numbers. Give real numbers"
                    )
                sample_weight = check_weights(sample_weight, len(labels))
            ds = Dataset.from_arrays(rows, labels, sample_weight=sample_weight, feature_names=names)
        else:
            ds = self._given_rows(rows, labels, sample_weight, reset=reset)
        if not ds.has_y:
            remedy = "pass y"
            if isinstance(X, Dataset):
                remedy = (
                    "give a dataset with labels: Dataset.from_arrays(x, y), or import the rows with their "
                    "labels (images: one folder per class; tables: --label COLUMN; arrays: --y)"
                )
            raise DataError(
                f"{ds.url or 'the rows'}: there are no labels, and {type(self).__name__} learns from "
                f"labels; {remedy}{self._without_labels}"
            )
        check_classes(ds, type(self).__name__)
        return ds

    def _validation_dataset(self, X: RowsLike, y: LabelsLike | None) -> Dataset:
        ds = super()._validation_dataset(X, y)
        if not ds.has_y:
            raise DataError(
                f"validation{f' ({ds.url})' if ds.url else ''} has no labels: give rows with labels"
            )
        check_classes(ds, type(self).__name__)
        return ds

    @follows_rows
    def predict_proba(
        self,
        X: RowsLike,
        *,
        out: str | Path | None = None,
        client: ClientLike | None = None,
        overwrite: bool = False,
        callbacks: CallbackList = (),
    ) -> Any:
        """Compute class probabilities.

        Parameters
        ----------
        X, out, client, overwrite, callbacks
            As in :meth:`transform`.

        Returns
        -------
        ndarray of float64, shape (n, classes); a lazy array for a dask array; a Dataset with ``out``
            Each row sums to 1. The architecture "all_vs_all" of capsules gives shares of votes.

        Examples
        --------
        >>> import numpy as np, scalelatent as sl
        >>> x, y = np.random.default_rng(0).normal(size=(50, 4)), np.arange(50) % 2
        >>> p = sl.CapsuleRegression(capsule_dim=2, max_iter=2).fit(x, y).predict_proba(x)
        >>> p.shape, bool(np.allclose(p.sum(axis=1), 1))
        ((50, 2), True)
        """
        return self._map(X, "probabilities", out, client, overwrite, callbacks)

    @follows_rows
    def predict(
        self,
        X: RowsLike,
        *,
        out: str | Path | None = None,
        client: ClientLike | None = None,
        overwrite: bool = False,
        callbacks: CallbackList = (),
    ) -> Any:
        """Predict the class of each row.

        If ``out`` is given, the result is a dataset whose ``x`` are the class probabilities and whose ``y``
        are the predicted classes.

        Parameters
        ----------
        X, out, client, overwrite, callbacks
            As in :meth:`transform`.

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
        return predict_classes(self, X, out, client, overwrite, callbacks)

    def score(
        self,
        X: RowsLike,
        y: LabelsLike | None = None,
        sample_weight: WeightsLike | None = None,
        *,
        callbacks: CallbackList = (),
    ) -> float:
        """Return the accuracy: the weighted share of rows whose class is predicted. Stream over a Dataset.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, features)
            Rows to predict.
        y : array-like, shape (n,), or None
            True classes. None uses the labels of a Dataset.
        sample_weight : array-like, shape (n,), or None
            Weights of the rows.
        callbacks : Callback or sequence of Callback
            Objects that are notified of progress.

        Returns
        -------
        float
            Accuracy between 0 and 1.

        Raises
        ------
        DataError
            The rows have no labels, or the weights sum to 0.
        ValueError
            ``y`` or ``sample_weight`` has more than one column.

        Examples
        --------
        >>> import numpy as np, scalelatent as sl
        >>> x, y = np.eye(4).repeat(5, axis=0), np.arange(4).repeat(5)
        >>> sl.CapsuleRegression(capsule_dim=1, max_iter=5).fit(x, y).score(x, y)
        1.0
        """
        check_is_fitted(self)
        ds = self._given_rows(X)
        if y is None:
            if not ds.has_y:
                raise DataError(
                    f"{ds.url or 'X'} has no labels to score against: pass y, or a dataset with labels"
                )
            check_classes(ds, type(self).__name__)
        given = {"y": to_column(y), "sample_weight": to_column(sample_weight)}
        for name, column in given.items():
            if column is not None and len(column) != len(ds):
                raise DataError(f"{name} has {len(column)} entries for {len(ds)} rows: give one a row")
        right = total = 0.0
        progress = Progress(Callbacks(callbacks), "score", 0)
        for first in range(0, len(ds), SCORE_ROWS):
            stop = min(first + SCORE_ROWS, len(ds))
            truth, weight = (None if c is None else np.asarray(c[first:stop]) for c in given.values())
            truth = ds.read_y(first, stop) if truth is None else truth
            weight = ds.read_weight(first, stop) if weight is None else weight.astype(float)
            part = _RangeProgress(progress, first, len(ds))
            hit = (self.predict(ds[first:stop], callbacks=part) == truth).astype(float)
            right += float(hit.sum() if weight is None else hit @ weight)
            total += float(len(hit) if weight is None else weight.sum())
        if total == 0:
            raise DataError(
                f"the weights of {ds.url or 'the rows'} sum to 0, so the accuracy is undefined: pass a "
                "sample_weight above 0 for at least one row"
            )
        return right / total


def predict_classes(
    model: StreamedEstimator,
    X: RowsLike,
    out: str | Path | None,
    client: ClientLike | None,
    overwrite: bool,
    callbacks: CallbackList,
) -> Any:
    """Return the class of the largest score of each row or, with ``out``, a Dataset of scores and classes."""
    output = "probabilities" if out is None else "classes"
    scores = model._map(X, output, out, client, overwrite, callbacks)
    if out is not None:
        return scores
    if isinstance(scores, np.ndarray):
        return _pick_labels(scores, model.classes_)
    return scores.map_blocks(_pick_labels, model.classes_, drop_axis=1, dtype=model.classes_.dtype)


class _RangeProgress(Callback):
    """Callback that converts the progress of one range of rows into the progress of all rows."""

    def __init__(self, progress: Progress, first: int, total: int) -> None:
        self._progress, self._first, self._total = progress, first, total

    def on_progress(self, info: dict[str, Any]) -> None:
        self._progress(self._first + info["rows_done"], self._total)


def _pick_labels(scores: np.ndarray, classes: np.ndarray) -> np.ndarray:
    return classes[scores.argmax(axis=1)]
