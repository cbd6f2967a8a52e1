"""Candidates of a search: their parameters, the rows that they use, and the table of their scores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from sklearn.base import clone
from sklearn.model_selection import KFold, ParameterGrid, check_cv

from scalelatent.contract.kinds import find_kind
from scalelatent.data import Dataset
from scalelatent.data.read.selected import select_rows
from scalelatent.engine.reading import RowMask
from scalelatent.errors import DataError
from scalelatent.estimators.base import StreamedEstimator
from scalelatent.estimators.steps import ComputeValue, MappedRows, StartFit, Steps, first_step

if TYPE_CHECKING:
    import numpy.typing as npt

Split = tuple[np.ndarray, np.ndarray]


class Splitter(Protocol):
    """Object that splits rows into folds: a splitter of ``sklearn.model_selection``, or of the user."""

    def split(self, X: Any, y: Any = None, groups: Any = None) -> Iterable[tuple[Any, Any]]: ...


CrossValidation: TypeAlias = "int | Splitter | Iterable[tuple[npt.ArrayLike, npt.ArrayLike]] | None"
"""Folds: a number of folds, a splitter, or pairs (train, test) of row numbers or boolean masks."""


@dataclass
class Candidate:
    """One fit of a search: one set of parameters on one set of rows."""

    key: str  # name in stored results: number of the parameters and of the fold, such as "003-f1"
    number: int  # index of the parameters in the grid
    model: StreamedEstimator
    steps: Steps  # generator that yields the steps of the fit and receives their results
    rows: Mapping[str, MappedRows]  # rows of the fit: "train", and "validation" if they are given
    validation: MappedRows  # rows on which the fitted model is scored
    step: Any = None  # step of the fit that is to be executed next; None after the end of the fit
    passes: int = 0  # passes or epochs of the fit
    error: str | None = None  # error message of the fit if it diverged
    seconds: float = 0.0  # duration of the fit; a shared pass counts in equal parts for its candidates
    score_seconds: float = 0.0  # duration of the scoring of the fitted model


def check_estimator(estimator: object) -> None:
    """Raise a TypeError if ``estimator`` is not a scalelatent estimator whose parameters can be searched."""
    if not isinstance(estimator, StreamedEstimator) or find_kind(estimator._kind).python_only:
        raise TypeError(
            f"estimator={estimator!r}: Search needs an estimator object of scalelatent that job files know, "
            "such as CapsuleRegression(); for other estimators use sklearn.model_selection.GridSearchCV"
        )


def expand_param_grid(
    estimator: StreamedEstimator, given: Mapping[str, Iterable[Any]] | Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the parameters of each candidate, from a grid or from a list of candidates."""
    params = [dict(p) for p in (ParameterGrid(given) if isinstance(given, Mapping) else given)]
    if not params:
        raise ValueError("param_grid holds no candidate: give a dict of lists, or dicts of parameters")
    known = {entry.name: entry for entry in estimator._parameters}
    for candidate in params:
        for name in candidate:
            if name not in known or not known[name].searched:
                raise ValueError(
                    f"param_grid names {name!r}, which "
                    + (
                        "says where a fit runs: set it on the estimator or the search"
                        if name in known
                        else f"{type(estimator).__name__} has not; it has {', '.join(sorted(known))}"
                    )
                )
    return params


def find_folds(
    cv: Any, rows: Dataset, groups: npt.ArrayLike | None, *, shared: bool
) -> tuple[list[Split] | None, list[tuple[int, int]] | None]:
    """Return the folds of a cross-validation: (row numbers, None) or (None, ranges).

    Row numbers are one pair (train, test) per fold. Ranges are (start, stop) of the test rows of each fold;
    they are returned if ``shared`` is True (candidates share passes) and the test rows of each fold are
    contiguous.
    """
    n_rows, n = len(rows), 5 if cv is None else cv
    plain = isinstance(n, (int, np.integer)) and not isinstance(n, bool)
    splittable = not isinstance(n, str) and (hasattr(n, "split") or np.iterable(n))
    if (plain and not 2 <= n <= n_rows) or not (plain or splittable):
        raise ValueError(
            f"cv={cv!r}: give a number of folds from 2 to the number of rows (n_samples = {n_rows}), a "
            "splitter of sklearn.model_selection, or pairs (train, test) of row numbers"
        )
    if plain and shared:  # equal contiguous folds need no array of all row numbers
        return None, _split_evenly(int(n), n_rows)
    splits = _split_rows(KFold(int(n)) if plain else n, rows, groups)
    runs = _find_contiguous_folds(splits, n_rows) if shared else None
    return (splits, None) if runs is None else (None, runs)


def _split_evenly(n_folds: int, n_rows: int) -> list[tuple[int, int]]:
    """Return the (start, stop) range of the test rows of each fold of scikit-learn's ``KFold(n_folds)``."""
    size, longer = divmod(n_rows, n_folds)
    return list(pairwise(k * size + min(k, longer) for k in range(n_folds + 1)))


def _split_rows(cv: Any, rows: Dataset, groups: npt.ArrayLike | None) -> list[Split]:
    """Return row numbers (train, test) of each fold, for every ``cv`` that scikit-learn accepts."""
    n_rows = len(rows)
    if not hasattr(cv, "split"):
        cv = list(cv)
        if odd := [pair for pair in cv if not hasattr(pair, "__len__") or len(pair) != 2]:
            raise ValueError(f"cv: {odd[0]!r:.60} is not a fold: give pairs (train, test) of row numbers")
    y = rows.read_y(0, n_rows) if rows.has_y and not rows.has_targets else None
    found = check_cv(cv).split(np.zeros((n_rows, 1)), y, groups)
    splits = [(_to_row_numbers(train, n_rows), _to_row_numbers(test, n_rows)) for train, test in found]
    if not splits:
        raise ValueError(f"cv={cv!r} gives no fold: give pairs (train, test) of row numbers")
    return splits


def _to_row_numbers(given: npt.ArrayLike, n_rows: int) -> np.ndarray:
    """Return row numbers in ascending order; ``given`` are row numbers or a boolean mask of all rows."""
    numbers = np.atleast_1d(given)
    numbers = np.flatnonzero(numbers) if numbers.dtype == bool else np.sort(numbers)
    if not len(numbers) or numbers[0] < 0 or numbers[-1] >= n_rows or not np.diff(numbers).all():
        raise ValueError(
            f"cv: a fold has {len(numbers)} rows, {numbers[:1].tolist()} to {numbers[-1:].tolist()}: give "
            f"some of the rows 0 to {n_rows - 1}, each once"
        )
    return numbers


def _find_contiguous_folds(splits: Sequence[Split], n_rows: int) -> list[tuple[int, int]] | None:
    """Return (start, stop) of the test rows of each fold, or None if a fold is not contiguous.

    A fold is contiguous if its test rows are one range, and its training rows are all other rows.
    """
    runs = []
    for train, test in splits:
        first, stop = int(test[0]), int(test[-1]) + 1
        others = np.concatenate([np.arange(first), np.arange(stop, n_rows)])
        if stop - first != len(test) or not np.array_equal(train, others):
            return None
        runs.append((first, stop))
    return runs


def make_candidates(
    base: StreamedEstimator,
    params: Iterable[dict[str, Any]],
    watched: Mapping[str, Dataset],
    folds: Sequence[tuple[int, int]] | None,
) -> list[Candidate]:
    """Return one candidate for each set of parameters and each fold, sorted by set of parameters."""
    out = []
    # All candidates of a fold get the same `MappedRows` objects. The cache of computed values compares these
    # objects by their id, so the candidates share the values.
    whole = {name: MappedRows(ds) for name, ds in watched.items()}
    sets: list[tuple[dict[str, MappedRows], MappedRows]] = (
        [(whole, whole["validation"])]
        if folds is None
        else [
            (
                {"train": MappedRows(watched["train"], mask=RowMask(a, b, 0))},
                MappedRows(watched["train"], mask=RowMask(a, b, 1)),
            )
            for a, b in folds
        ]
    )
    for number, own in enumerate(params):
        for k, (rows, validation) in enumerate(sets):
            model = clone(base).set_params(**own)
            for name in ("n_features_in_", "feature_names_in_"):
                if hasattr(base, name):
                    setattr(model, name, getattr(base, name))
            key = f"{number:03d}" if folds is None else f"{number:03d}-f{k}"
            out.append(Candidate(key, number, model, model._fit_steps(rows), rows, validation))
    return out


def make_separate_candidates(
    base: StreamedEstimator,
    params: Sequence[Mapping[str, Any]],
    train: Dataset,
    validation: Dataset | None,
    splits: Sequence[Split] | None,
) -> list[Candidate]:
    """Check each set of parameters; return one candidate for each set and each fold, for separate fits."""
    sets: list[tuple[Dataset, Dataset | None]] = [(train, validation)]
    if splits is not None:
        sets = [(select_rows(train, learned), select_rows(train, scored)) for learned, scored in splits]
    out = []
    for number, own in enumerate(params):
        model = clone(base).set_params(**own)
        try:
            model._check_params()
        except ValueError as error:
            raise ValueError(f"candidate {number} {dict(own)!r}: {error}") from error
        for k, (rows, scored) in enumerate(sets):
            key = f"{number:03d}" if splits is None else f"{number:03d}-f{k}"
            assert scored is not None
            train_rows, scored_rows = {"train": MappedRows(rows)}, MappedRows(scored)
            out.append(Candidate(key, number, clone(model), _no_steps(), train_rows, scored_rows))
    return out


def _no_steps() -> Steps:
    yield from ()


def check_candidate(
    one: Candidate, params: Mapping[str, Any], derive: Callable[[ComputeValue], object]
) -> StartFit:
    """Run the input checks of a candidate; return the first step of its fit. Errors name the fold."""
    try:
        return first_step(one.steps, derive)
    except (ValueError, DataError) as error:
        where = f"candidate {one.number} {dict(params)!r}"
        if (mask := one.validation.mask) is not None:
            where += (
                f" without rows {mask.start} to {mask.stop - 1} (a fold; rows sorted by class must be "
                "shuffled first)"
            )
        raise type(error)(f"{where}: {error}") from error


def make_score_table(
    params: Sequence[dict[str, Any]],
    candidates: Sequence[Candidate],
    scores: Mapping[str, float],
    n_splits: int,
    error_score: float | str,
) -> dict[str, Any]:
    """Return the ``cv_results_`` of a search: one entry per set of parameters in each column."""
    failed = np.nan if isinstance(error_score, str) else error_score
    per_split = np.array([scores.get(one.key, failed) for one in candidates], dtype=float)
    per_split = per_split.reshape(len(params), n_splits)
    mean = per_split.mean(axis=1)
    out: dict[str, Any] = {"params": list(params)}
    for name, column in ("fit_time", "seconds"), ("score_time", "score_seconds"):
        times = np.array([getattr(one, column) for one in candidates]).reshape(len(params), n_splits)
        out[f"mean_{name}"], out[f"std_{name}"] = times.mean(axis=1), times.std(axis=1)
    for name in sorted({name for p in params for name in p}):
        column = np.ma.masked_all(len(params), dtype=object)
        for i, p in enumerate(params):
            if name in p:
                column[i] = p[name]
        out[f"param_{name}"] = column
    for k in range(n_splits):
        out[f"split{k}_test_score"] = per_split[:, k]
    out["mean_test_score"], out["std_test_score"] = mean, per_split.std(axis=1)
    # Equal scores share the better rank, as in scikit-learn; candidates without a score are last.
    filled = np.where(np.isnan(mean), -np.inf, mean)
    out["rank_test_score"] = np.array([1 + int((filled > value).sum()) for value in filled])
    of_number: list[list[Candidate]] = [[] for _ in params]
    for one in candidates:
        of_number[one.number].append(one)
    out["n_passes"] = np.array([max(one.passes for one in own) for own in of_number])
    out["error"] = [next((one.error for one in own if one.error), None) for own in of_number]
    return out
