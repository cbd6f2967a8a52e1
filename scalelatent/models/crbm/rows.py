"""Rows of conditional RBMs: pairs of what is observed and what is to be predicted, or clean rows alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from scalelatent.data import Dataset
from scalelatent.data.schema import refuse_masked
from scalelatent.errors import DataError
from scalelatent.estimators.base import _CHECKS, check_finite, is_plain, validated


class CrbmRows:
    """What makes datasets of whatever was given, for :class:`.crbm.ConditionalRBM`."""

    conditional: bool
    corruption: Any
    _check_width: Any
    _n_outputs: int
    _set_width: Any
    _source: str
    fit: Any

    def _pairs(self, X: Any, y: Any, *, reset: bool = False, what: str = "X") -> Dataset:
        """Rows with their outputs, from whatever was given; with ``reset`` they say what is learned."""
        nothing = X is None or (not isinstance(X, Dataset) and getattr(X, "shape", (0, 1))[1:] == (0,))
        if not self.conditional and not nothing:
            y = None  # ignored, as by scikit-learn's transformers
        if nothing and y is not None and X is not None:
            _check_counts(int(X.shape[0]), y)
        if nothing and not reset and self._source == "pairs":
            raise DataError("X is missing: the model was fitted on rows x beside outputs v, so pass both")
        if reset:
            self._source = "pairs"
            if self.corruption is not None:
                self._source = "corruption"
            elif nothing or not self.conditional:
                self._source = "plain"
        stored_pairs = not reset and isinstance(X, Dataset) and X.has_targets
        if nothing or (self._source != "pairs" and y is None and not stored_pairs):
            X = y if nothing else X
            if X is None:
                raise DataError(
                    f"{type(self).__name__} was given no rows: pass X and the outputs y, or y alone for a "
                    "plain RBM"
                )
            return self._clean_rows(X, reset, what)
        if self._source == "plain":
            raise DataError(
                f"{what}: this is a plain RBM, which learns rows alone, and there are outputs beside them: "
                "pass one of the two, or set conditional=True"
            )
        return self._paired_rows(X, y, reset, what)

    def _clean_rows(self, v: Any, reset: bool, what: str) -> Dataset:
        """Rows that are outputs themselves."""
        if not isinstance(v, Dataset):
            if is_plain(v):
                refuse_masked(v, what)
                v = np.asarray(v) if not hasattr(v, "tocsr") else v
                if v.ndim == 2:
                    check_finite(v.tocsr() if hasattr(v, "tocsr") else v, "the rows v")
            v = Dataset.from_arrays(v)
        self._set_width(v.n_features) if reset else self._check_width(v, what)
        if reset:
            self._n_outputs = v.n_features
        if not v.is_stored and v.lazy(0, 1) is None:
            v.read_binary(0, len(v))
        return v

    def _paired_rows(self, X: Any, y: Any, reset: bool, what: str) -> Dataset:
        """Rows beside outputs."""
        if not isinstance(X, Dataset) and is_plain(X):
            X = validated(self, X, reset=reset, **_CHECKS)
            check_finite(X, what)
            ds = Dataset.from_arrays(X)
        else:
            ds = X if isinstance(X, Dataset) else Dataset.from_arrays(X)
            self._set_width(ds.n_features) if reset else self._check_width(ds, what)
        if y is not None:
            ds = ds.with_target(y if isinstance(y, Dataset) else _target_rows(y, len(ds)))
        if not ds.has_targets:
            raise DataError(
                f"{ds.url or what}: there are no outputs, rows of 0 and 1, to learn from: pass y of shape "
                "(n, v), or a dataset with targets (Dataset.with_target, [data] target); one column: "
                "y.reshape(-1, 1)"
            )
        if not reset and ds.n_targets != self._n_outputs:
            raise DataError(
                f"{ds.url or what}: there are {ds.n_targets} outputs a row, but {type(self).__name__} has "
                f"{self._n_outputs}"
            )
        if not ds.is_stored and ds.lazy(0, 1) is None:
            ds.read_targets(0, len(ds))
        if reset:
            self._n_outputs = int(ds.n_targets or 0)
        return ds

    def _validation_pairs(self, validation: Any) -> Dataset | None:
        if validation is None:
            return None
        if isinstance(validation, Dataset):
            return self._pairs(validation, None, what="validation")
        if self._source != "pairs" and getattr(validation, "ndim", 0) == 2:
            return self._pairs(None, validation, what="validation")
        try:
            X, y = validation
        except (TypeError, ValueError):
            raise DataError(
                f"validation={type(validation).__name__}: give a Dataset or a pair (X, y)"
            ) from None
        return self._pairs(X, y, what="validation")

    # -- searches

    def _search_rows(self, X: Any, y: Any, sample_weight: Any) -> Dataset:
        if sample_weight is not None:
            raise DataError("sample_weight: a conditional RBM takes each row alike: leave the weights out")
        return self._pairs(X, y, reset=True)

    def _search_fit(self, rows: Dataset, **how: Any) -> Any:
        plain = not rows.has_targets and self.corruption is None
        return self.fit(*((None, rows) if plain else (rows,)), **how)

    def _scored_rows(self, X: Any, y: Any, sample_weight: Any) -> Dataset:
        ds = self._pairs(X, y)
        return ds if sample_weight is None else ds.with_weight(sample_weight)

    def _validation_rows(self, validation: Any) -> Dataset | None:
        return self._validation_pairs(validation)


def _check_counts(n_rows: int, y: Any) -> None:
    found = int(y.shape[0]) if hasattr(y, "shape") else len(y)
    if found != n_rows:
        raise DataError(f"X has {n_rows} rows, but y has {found}: give one output row a row")


def _target_rows(y: Any, n_rows: int) -> Dataset:
    """Outputs that are arrays, as a dataset."""
    if is_plain(y) and not hasattr(y, "tocsr"):
        refuse_masked(y, "y")
        y = np.asarray(y)
    if len(getattr(y, "shape", ())) != 2:
        raise DataError(
            f"y has shape {getattr(y, 'shape', None)}: the outputs of a conditional RBM are rows of 0 and 1, "
            "(n, v); one column: y.reshape(-1, 1)"
        )
    _check_counts(n_rows, y)
    return Dataset.from_arrays(y)
