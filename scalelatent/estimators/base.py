"""What all estimators share: inputs of every kind, prediction that streams, saving."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
from sklearn import get_config
from sklearn.base import BaseEstimator
from sklearn.utils import estimator_html_repr
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from scalelatent._above import ask
from scalelatent.contract.parameters import Parameters
from scalelatent.data import Dataset
from scalelatent.data.schema import refuse_masked, refuse_mixed
from scalelatent.deploy.clusters import current_client
from scalelatent.engine.cache import memory_limit
from scalelatent.engine.callbacks import Callback, Callbacks
from scalelatent.engine.companions import FitCall, accompanied
from scalelatent.engine.plan import LONG_SECONDS, long_fit
from scalelatent.errors import DataError, LongFitWarning, warn_user
from scalelatent.storage.disk import Location, locate

from ._sklearn import check_weights
from .learned import learned_table

logger = logging.getLogger("scalelatent")
OUTPUT_SHARE = 0.3
FLOAT32_MAX = np.finfo(np.float32).max
_CHECKS: dict[str, Any] = {
    "accept_sparse": "csr",
    "accept_large_sparse": True,
    "dtype": "numeric",
    "order": "C",
    "ensure_all_finite": False,
}


def check_labels(y: Any) -> None:
    """scikit-learn's check of labels, and which label is none where they are Python objects.

    Raises
    ------
    ValueError
    """
    found = np.asarray(y)
    if found.dtype.kind == "O":
        kinds = [str if isinstance(label, str) else Real for label in found.ravel()[:1]]
        for row, label in enumerate(found.ravel()):
            if not isinstance(label, kinds[0]):
                other = "" if label is None or row == 0 else f", and row 0 is {found.ravel()[0]!r:.40}"
                raise ValueError(
                    f"Unknown label type: unknown. The label of row {row} is {label!r:.40} "
                    f"({type(label).__name__}){other}; labels are all whole numbers or all strings, one a row"
                )
    check_classification_targets(found)


def is_dask_array(x: Any) -> bool:
    """Whether ``x`` is a dask array, without importing dask."""
    return type(x).__module__.split(".")[0] == "dask" and hasattr(x, "dask")


def is_plain(x: Any) -> bool:
    """Arrays and lists that scikit-learn validates; everything else is read in blocks."""
    lazy = (
        isinstance(x, (Dataset, np.memmap))
        or is_dask_array(x)
        or type(x).__module__.split(".")[0] in ("zarr", "h5py")
    )
    return not lazy


def validated(estimator: BaseEstimator, *arrays: Any, **checks: Any) -> Any:
    """What scikit-learn's ``validate_data`` returns; it would drop the mask of a masked array in silence, and
    print the whole array where it refuses one.

    Raises
    ------
    DataError
        A masked entry, naming its row and feature.
    ValueError
        As scikit-learn's, in one line.
    """
    for array, name in zip(arrays, "Xy", strict=False):
        refuse_masked(array, name)
    try:
        return validate_data(estimator, *arrays, **checks)
    except (ValueError, TypeError) as error:
        if "\n" not in str(error):
            raise
        odd = [a for a in arrays if "Complex" in str(error) and np.iscomplexobj(a)]
        raise type(error)(in_one_line(str(error), (odd or arrays)[0])) from None


def in_one_line(text: str, array: Any) -> str:
    """What scikit-learn says of an array, with its shape and type in place of its values.

    Examples
    --------
    >>> in_one_line("Complex data not supported\\n[1.+1.j]\\n", np.array([1 + 1j]))
    'Complex data not supported: an array of shape (1,), complex128'
    """
    try:
        shown = np.asarray(array)
        what = f"an array of shape {shown.shape}, {shown.dtype}"
    except ValueError:
        what = f"a {type(array).__name__}"
    first, _, rest = text.partition("\n")
    advice = rest[rest.index("Reshape your data") :] if "Reshape your data" in rest else ""
    return f"{first.rstrip(':. ')}: {what}{f'. {advice}' if advice else ''}"


class StreamedEstimator(BaseEstimator):
    """Base class of the estimators.

    Subclasses set ``_kind`` and give ``_row_map(what)``.
    """

    _kind = ""
    _parameters: Parameters
    # Learned by every fit that came to its end, and by no other.
    _sign_of_fit = ""

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, self._sign_of_fit)

    def _training_rows(self, X: Any, y: Any, sample_weight: Any, *, reset: bool = True) -> Dataset:
        """A Dataset from whatever ``fit`` was given; without ``reset`` one of the fitted width.

        Raises
        ------
        DataError
            No labels, or labels given twice.
        ValueError
            What scikit-learn's checks refuse.
        """
        if isinstance(X, Dataset):
            ds = _weighed(X, y, sample_weight)
        elif is_plain(X):
            if y is None:
                raise ValueError(f"{type(self).__name__} requires y to be passed, but the target y is None")
            refuse_mixed(y, "y")
            X, y = validated(self, X, y, reset=reset, **_CHECKS)
            check_finite(X, "X")
            check_labels(y)
            if sample_weight is not None:
                refuse_masked(sample_weight, "sample_weight")
                sample_weight = check_weights(sample_weight, X)
            ds = Dataset.from_arrays(X, y, sample_weight=sample_weight)
        else:
            ds = Dataset.from_arrays(X, y, sample_weight=sample_weight)
        if not reset:
            self._check_width(ds, "X")
        elif not is_plain(X):  # else validate_data did it
            self._set_width(ds.n_features)
        if not ds.has_y:
            raise DataError(
                f"{ds.url or 'the rows'}: there are no labels, and {type(self).__name__} learns from "
                "labels; import them with the rows (`scalelatent data import idx IMAGES LABELS …`), or "
                "pass y"
            )
        self._check_kind(ds)
        return ds

    def _check_kind(self, ds: Dataset) -> None:
        """Refuse targets, multi-labels and labels with fractions, which no classifier here learns from."""
        if ds.y_kind not in ("labels", None):
            raise DataError(
                f"{ds.url or 'y'}: there are {ds.n_targets} {ds.y_kind} columns a row, but "
                f"{type(self).__name__} learns from one label a row: pass y of shape (n,) (one column: "
                "y.ravel())"
            )
        classes = ds.classes
        if classes is not None and classes.dtype.kind == "f" and (broken := classes[classes % 1 != 0]).size:
            raise DataError(
                f"{ds.url or 'y'}: unknown label type: continuous. {broken[0]} is a number with a fraction, "
                f"one of {len(classes)} different ones, but {type(self).__name__} learns from classes: give "
                "whole numbers or strings"
            )

    def _check_width(self, ds: Dataset, what: str) -> None:
        if ds.n_features != self.n_features_in_:
            raise DataError(
                f"{what}{f' ({ds.url})' if ds.url else ''} has {ds.n_features} features, but "
                f"{type(self).__name__} was fitted on {self.n_features_in_}"
            )

    def _set_width(self, n_features: int) -> None:
        self.n_features_in_ = n_features
        if hasattr(self, "feature_names_in_"):
            del self.feature_names_in_

    def _other_rows(self, X: Any, y: Any = None, sample_weight: Any = None, what: str = "X") -> Dataset:
        """Rows to predict or validate on, checked against the fitted width."""
        if isinstance(X, Dataset):
            ds = _weighed(X, y, sample_weight)
        elif is_plain(X):
            X = validated(self, X, reset=False, **_CHECKS)
            check_finite(X, what)
            ds = Dataset.from_arrays(X, y, sample_weight=sample_weight)
        else:
            ds = Dataset.from_arrays(X, y, sample_weight=sample_weight)
        self._check_width(ds, what)
        return ds

    def _validation_rows(self, validation: Any) -> Dataset | None:
        if validation is None:
            return None
        if isinstance(validation, Dataset):
            ds = self._other_rows(validation, what="validation")
        else:
            try:
                X, y = validation
            except (TypeError, ValueError):
                raise DataError(
                    f"validation={type(validation).__name__}: give a Dataset or a pair (X, y)"
                ) from None
            ds = self._other_rows(X, y, what="validation")
        if not ds.has_y:
            raise DataError(
                f"validation{f' ({ds.url})' if ds.url else ''} has no labels: give rows with labels"
            )
        self._check_kind(ds)
        return ds

    # -- searches

    # Candidates of a search share each pass; else they are fitted one after the other.
    _shares_passes = False
    # ``fit`` takes validation rows.
    _validates = True

    @property
    def _output_metric(self) -> str:
        """How rows of ``transform`` are compared: "cosine", or by the codes that they share ("overlap")."""
        return "cosine"

    def _search_rows(self, X: Any, y: Any, sample_weight: Any) -> Dataset:
        """Rows of a search, with all that candidates learn and are scored by."""
        return self._training_rows(X, y, sample_weight)

    def _search_fit(self, rows: Dataset, **how: Any) -> Any:
        """``fit`` of such rows."""
        return self.fit(rows, **how)  # type: ignore[attr-defined]

    def _scored_rows(self, X: Any, y: Any, sample_weight: Any) -> Dataset:
        """Rows to score this fitted model on."""
        return self._other_rows(X, y, sample_weight)

    # -- fit
    # --------------------------------------------------------------------------------------------------

    def _fit_steps(self, rows: Any) -> Any:
        """The fit as steps (see :mod:`.steps`) over rows ``"train"`` and ``"validation"``."""
        raise NotImplementedError

    def _check_params(self) -> None:
        """Refuse parameters out of range, by a ValueError."""
        self._parameters.check(self)

    def _what_decides(self) -> dict[str, Any]:
        """The parameters that decide the result: a resumed fit must have the same ones."""
        return self._parameters.deciding(self.get_params(deep=False))

    def _check_plan(self, plan: Callable[..., dict[str, Any]]) -> None:
        """Refuse a fit that does not fit, by the plan's own check, and tell of one that takes long.

        Parameters
        ----------
        plan : callable
            The model's plan, with ``measure`` left open. Nothing is measured for a fit that is surely short.

        Warns
        -----
        LongFitWarning
            It would take over an hour.
        """
        told = plan(measure=False)
        if told["expected_seconds"] > LONG_SECONDS / 10:
            told = plan(measure=True)
        if text := long_fit(told):
            warn_user(text, LongFitWarning)

    def _fit_by_steps(
        self,
        train: Dataset,
        held: Dataset | None,
        client: Any,
        run_dir: Any,
        resume: bool,
        callbacks: Any,
        engine: Any,
        verbose: bool | None,
        records: str | None = None,
    ) -> None:
        """Serve this estimator's steps alone, in this process or on a cluster; ``records`` is a folder for
        them where there is no ``run_dir``.
        """
        from .session import rows_as_begun

        watched = {"train": train} if held is None else {"train": train, "validation": held}
        watched = rows_as_begun(watched, run_dir if resume else None)
        call = FitCall(
            self, watched, run_dir, resume, callbacks, engine or {}, verbose, client or current_client()
        )
        with accompanied(call) as everyone:
            self._serve_steps(watched, client, run_dir or records, resume, everyone, engine)
            self._fitted_rows = {name: ds.spec() for name, ds in watched.items() if ds.is_stored}

    def _serve_steps(
        self,
        watched: dict[str, Dataset],
        client: Any,
        run_dir: Any,
        resume: bool,
        callbacks: Callback,
        engine: Any,
    ) -> None:
        from .session import FitSession
        from .steps import Rows, first_step

        train = watched["train"]
        given = {name: Rows(ds) for name, ds in watched.items()}
        steps = self._fit_steps(given)
        begin = first_step(steps)
        with FitSession(
            self._kind,
            client=client,
            run_dir=run_dir,
            resume=resume,
            callbacks=callbacks,
            device=self.device,
            n_jobs=self.n_jobs,
            engine=engine,
        ) as session:
            session.check_skipping(begin.all_rows)
            if begin.keeps_records:
                session.keep_records()
            seed = session.begin(self.random_state, self._what_decides(), watched)
            more = {"validation_rows": len(watched["validation"])} if "validation" in watched else {}
            session.announce(train, **begin.info, **more, seed=seed)
            rows = {name: Rows(session.visible(name, ds)) for name, ds in watched.items()}
            session.answer(steps, (seed, rows))
            session.finish()
        seconds = sum(record["seconds"] for record in self.history_)
        session.callbacks.on_fit_end({"passes": self.n_iter_, "pass_seconds": seconds})

    # -- outputs as large as the data
    # -------------------------------------------------------------------------

    def _row_map(self, what: str) -> Any:
        raise NotImplementedError

    def _map(
        self,
        X: Any,
        what: str,
        out: Any,
        client: Any,
        overwrite: bool,
        callbacks: Callback | Sequence[Callback],
    ) -> Any:
        """Rows through ``_row_map(what)``: an array, a lazy dask array, or a Dataset at ``out``."""
        check_is_fitted(self)
        if is_dask_array(X):
            return self._map_dask(X, what)
        return self._map_rows(self._other_rows(X), self._row_map(what), out, client, overwrite, callbacks)

    def _map_rows(
        self, ds: Dataset, row_map: Any, out: Any, client: Any, overwrite: bool, callbacks: Any
    ) -> Any:
        """Rows of a dataset through a map: an array, or a Dataset at ``out``."""
        if out is not None:
            return self._map_stored(ds, row_map, out, client, overwrite, callbacks)
        shape, dtype = row_map.output()
        self._check_room(len(ds) * int(np.prod(shape)) * np.dtype(dtype).itemsize, len(ds))
        from scalelatent.engine.batch_loop import Progress
        from scalelatent.engine.mapwrite import map_to_array

        told = Progress(Callbacks(callbacks), f"{self._kind}_{row_map.what}", 0)
        return map_to_array(row_map, ds, self.device, self.n_jobs, told)

    @staticmethod
    def _check_room(nbytes: int, rows: int) -> None:
        """Refuse a result that memory cannot hold."""
        if nbytes > OUTPUT_SHARE * memory_limit():
            raise DataError(
                f"the result would take {nbytes / 2**30:.1f} GiB of memory ({rows} rows): pass "
                "out='RESULT.zarr' to write it to disk as it is made"
            )

    def _map_dask(self, X: Any, what: str) -> Any:
        import dask.array as da

        if X.shape[1] != self.n_features_in_:
            raise DataError(
                f"X has {X.shape[1]} features, but {type(self).__name__} was fitted on {self.n_features_in_}"
            )
        row_map = self._row_map(what)
        (width,), dtype = row_map.output()
        X = X.rechunk({1: -1})
        return da.map_blocks(_map_block, X, row_map, self.device, dtype=dtype, chunks=(X.chunks[0], (width,)))

    def _map_stored(
        self, ds: Dataset, row_map: Any, out: Any, client: Any, overwrite: bool, callbacks: Any
    ) -> Dataset:
        from scalelatent.engine.batch_loop import Progress
        from scalelatent.engine.mapwrite import map_rows, parted_layout, start_map

        from .session import FitSession

        with FitSession(
            self._kind, device=self.device, n_jobs=self.n_jobs, client=client, callbacks=callbacks
        ) as session:
            session.begin(0, {}, {})
            ds = session.visible("rows", ds)
            name = f"{self._kind}_{row_map.what}"
            task = start_map(
                name,
                ds,
                row_map,
                locate(out).url,
                self.device,
                classes=getattr(self, "classes_", None),
                overwrite=overwrite,
                **parted_layout(ds, row_map),
            )
            return map_rows(session.executor, task, Progress(session.callbacks, name, 0))

    def _set_learned(self, **learned: Any) -> None:
        """Attributes that are :class:`.learned.Learned`."""
        self.__dict__.update(learned)

    def _repr_html_(self) -> str:
        """The estimator as scikit-learn draws it; once fitted, what it has learned under it."""
        return str(estimator_html_repr(self)) + learned_table(self)

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, str]:
        told = {"text/plain": repr(self)}
        return told | ({"text/html": self._repr_html_()} if get_config()["display"] == "diagram" else {})

    # -- report
    # -----------------------------------------------------------------------------------------------

    def report(self, folder: str | Path, *, data: Any = None) -> str:
        """Write a page about the fitted model: its numbers, how it learned, what it does with some rows.

        Parameters
        ----------
        folder : path or str
            Where ``report/index.html`` and its figures go; made where it is missing. Of a run folder the
            page tells the settings and the course of the fit, too.
        data : Dataset, array-like of shape (n, features), or (X, y), optional
            Rows to show. None takes those that the run folder names, else stored validation or training
            rows of the fit; rows that were in memory are not known any more.

        Returns
        -------
        str
            Path or address of the page.

        Raises
        ------
        NotFittedError
            There was no fit.
        DataError
            There is no report for this kind of model.

        Examples
        --------
        >>> import tempfile, numpy as np, scalelatent as sl
        >>> x, y = np.random.default_rng(0).normal(size=(60, 5)), np.arange(60) % 2
        >>> m = sl.CapsuleRegression(capsule_dim=2, max_iter=3).fit(x, y)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     m.report(folder, data=(x, y)).removeprefix(folder)
        '/report/index.html'
        """
        check_is_fitted(self)
        return str(ask("report")(self, folder, data))

    # -- saving
    # -----------------------------------------------------------------------------------------------

    def _to_saved(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        raise NotImplementedError

    def _beside_saved(self) -> Callable[[Location], dict[str, str]] | None:
        """What writes the datasets of a saved model (see :func:`.persist.save_model`), where it has some."""
        return None

    def save(self, url: str | Path, *, overwrite: bool = False) -> None:
        """Write the fitted model: a zarr group and JSON, no pickle.

        Parameters
        ----------
        url : str or path
            A folder to make: a path, ``s3://bucket/model.zarr`` or another address.
        overwrite : bool
            Replace what lies there.

        Raises
        ------
        DataError
            It exists, or cannot be written.

        Examples
        --------
        See :func:`scalelatent.load_model`.
        """
        from .persist import save_model

        check_is_fitted(self)
        values, arrays = self._to_saved()
        if hasattr(self, "feature_names_in_"):
            values["feature_names_in"] = [str(name) for name in self.feature_names_in_]
        params, beside = _plain_params(self.get_params(deep=False)), self._beside_saved()
        save_model(url, self._kind, params, values, arrays, overwrite=overwrite, beside=beside)


@lru_cache(maxsize=256)
def tell_cut(name: str, value: int, default: int, why: str) -> None:
    """Say, once, that a default was cut to what the rows allow."""
    logger.warning(
        "%s=None is %d here, not %d: %s; a number that you give is never cut", name, value, default, why
    )


def _weighed(ds: Dataset, y: Any, sample_weight: Any) -> Dataset:
    """A given Dataset with the given weights; it brings its own labels."""
    if y is not None:
        raise DataError(
            "y was given beside a Dataset, which brings its own labels: leave y out, or give arrays"
        )
    return ds if sample_weight is None else ds.with_weight(sample_weight)


def check_finite(x: Any, what: str, first: int = 0, largest: float = float(FLOAT32_MAX)) -> None:
    """Like scikit-learn's check, but of the numbers in float32, and naming the first bad row and feature;
    rows count from ``first``, and may have to be below ``largest``.

    Raises
    ------
    DataError
        NaN, an infinite value, or one beyond float32.

    Examples
    --------
    >>> check_finite(np.array([[1.0, 1e39]]), "X")
    Traceback (most recent call last):
    scalelatent.errors.DataError: X contains a value beyond float32, in which rows are computed on: row 0, ...
    """
    if x.dtype.kind != "f":
        return
    sparse = not isinstance(x, np.ndarray)
    values = x.data if sparse else x
    # A NaN anywhere is the smallest and the largest.
    if not values.size or (float(values.min()) >= -largest and float(values.max()) <= largest):
        return
    bad = ~(np.abs(values) <= np.float64(largest))  # of Python's type it would be rounded to the rows'
    if sparse:
        at = int(np.flatnonzero(bad)[0])
        row, feature = int(np.searchsorted(x.indptr, at, side="right")) - 1, int(x.indices[at])
        value = values[at]
    else:
        row, feature = map(int, np.argwhere(bad)[0])
        value = values[row, feature]
    kind = "a value beyond float32, in which rows are computed on"
    if abs(value) <= FLOAT32_MAX:
        kind = f"a value beyond {largest:g}, whose products are beyond float32"
    if not np.isfinite(value):
        kind = "NaN" if np.isnan(value) else "an infinite value (inf)"
    remedy = "Scale the rows" if np.isfinite(value) else "Clean these rows, or leave them out"
    raise DataError(f"{what} contains {kind}: row {first + row}, feature {feature} is {value}. {remedy}")


def _map_block(x: np.ndarray, row_map: Any, device: str) -> np.ndarray:
    from scalelatent.engine.mapwrite import map_to_array

    return map_to_array(row_map, Dataset.from_arrays(x), device, 1)


def _plain_params(params: dict[str, Any]) -> dict[str, Any]:
    """Constructor parameters as JSON; a generator as random_state is not stored (``seed_`` is)."""
    out = {}
    for name, value in params.items():
        if name in ("n_jobs", "device"):  # where a model was fitted is no part of it
            continue
        if isinstance(value, np.generic):
            value = value.item()
        elif isinstance(value, np.ndarray):
            value = value.tolist()
        elif name == "random_state" and not isinstance(value, (int, type(None))):
            value = None
        elif isinstance(value, dict):
            # JSON keys are strings: a mapping is kept as pairs.
            value = {"pairs": [[k.item() if isinstance(k, np.generic) else k, v] for k, v in value.items()]}
        out[name] = value
    return out


def restore_params(params: dict[str, Any]) -> dict[str, Any]:
    """The inverse of what ``save`` did to constructor parameters."""
    pairs = {k: dict(map(tuple, v["pairs"])) for k, v in params.items() if isinstance(v, dict)}
    return {**params, **pairs}
