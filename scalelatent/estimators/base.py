"""Base class of all estimators: ``fit``, ``plan``, ``transform``, ``report`` and ``save``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin, clone
from sklearn.utils.validation import check_is_fitted

from scalelatent._registry import find_registered
from scalelatent.contract.learners import OutputMap, RowMap
from scalelatent.contract.parameters import Parameters
from scalelatent.data import Dataset
from scalelatent.data.feature_names import check_names, frame_names
from scalelatent.data.read.containers import opened
from scalelatent.data.read.sources import is_dask
from scalelatent.data.write.create import check_room
from scalelatent.deploy.clusters import use_client
from scalelatent.engine.backend import gpu_count, read_gpu_memory
from scalelatent.engine.batch_loop import Progress
from scalelatent.engine.cache import memory_limit as process_memory
from scalelatent.engine.callbacks import Callbacks
from scalelatent.engine.mapwrite import choose_map_layout, map_rows, map_to_array, start_map
from scalelatent.engine.plan import LONG_SECONDS, Forecast, Resources, find_resources, long_fit
from scalelatent.engine.saved_models import encode_params, restore_params, save_model
from scalelatent.errors import DataError, LongFitWarning, warn_user
from scalelatent.storage.disk import Location, locate
from scalelatent.storage.write_checks import check_not_own_input

from ._sklearn import wrap_output
from .fit_services import FitCall, fit_callbacks, restored_on_failure
from .gpu_results import follows_rows
from .inputs import (
    VALIDATION_OPTIONS,
    add_weights,
    check_finite,
    find_image_shape,
    is_in_memory,
    rows_and_labels,
    validate_rows,
    warn_of_rounding,
)
from .onnx_graph import OnnxGraph
from .session import CallbackList, FitSession, LocationLike, restore_row_ranges
from .steps import MappedRows, Steps, first_step

if TYPE_CHECKING:
    import dask.array as da
    from distributed import Client

    from scalelatent.kernels.arrays import DenseOrCsr
    from scalelatent.typing import ClientLike, LabelsLike, RandomState, RowsLike, ValidationLike, WeightsLike

OUTPUT_SHARE = 0.3  # largest share of the memory of the process that one result in memory may take
logger = logging.getLogger("scalelatent")

# Output of a model: a name, or a name and a number that selects a variant, for example a layer.
OutputName = str | tuple[str, int | None]
# Fitted parameters of a model as `save` stores them: JSON values by name, arrays by name.
SavedModelState = tuple[dict[str, Any], dict[str, np.ndarray]]


class StreamedEstimator(  # type: ignore[call-arg]
    ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator, auto_wrap_output_keys=None
):
    """Base class of the estimators.

    A model sets ``_kind``, ``_parameters`` and ``_fitted_attribute`` and implements :meth:`_fit_steps`,
    :meth:`_plan`, :meth:`_row_map`, :meth:`_state` and :meth:`_restore`. A model whose input needs its own
    checks or conversions overrides :meth:`_training_rows`, :meth:`_validation_dataset` and
    :meth:`_check_rows`.
    """

    _kind: ClassVar[str] = ""
    _parameters: ClassVar[Parameters]
    # Name of an attribute that every completed fit sets, and an interrupted fit does not set.
    _fitted_attribute: ClassVar[str] = ""
    # Name of the output that ``transform`` returns, an argument of `_row_map`.
    _transformed: OutputName = "output"
    # True: the candidates of a search share passes over the rows. False: each candidate is fitted alone.
    _shares_passes: ClassVar[bool] = False
    # True: ``fit`` accepts validation rows.
    _validates: ClassVar[bool] = True
    # True: rows become float32 before their mean is subtracted, so ``fit`` warns if digits get lost.
    _rounds_rows: ClassVar[bool] = False
    # True: arrays (n, h, w) and (n, channels, h, w) are accepted; each pixel of an image is a feature.
    _takes_images: ClassVar[bool] = False

    device: str
    n_jobs: int | None
    random_state: RandomState
    n_features_in_: int
    n_iter_: int
    seed_: int
    history_: list[dict[str, Any]]

    def __init_subclass__(cls, **kwargs: object) -> None:
        own = vars(cls).get("transform")
        super().__init_subclass__(**kwargs)
        if own is not None:
            # Undo scikit-learn's wrapper of `transform`, which cannot handle a Dataset as the result.
            cls.transform = own  # type: ignore[method-assign]

    @property
    def _output_metric(self) -> str:
        """Similarity of two output rows: "cosine", or "overlap" (the number of equal codes)."""
        return "cosine"

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, self._fitted_attribute)

    # -- hooks of a model ------------------------------------------------------------------------------------

    def _fit_steps(self, rows: Mapping[str, MappedRows]) -> Steps:
        """Yield the steps of the fit, such as passes over the rows ``"train"`` and ``"validation"``."""
        raise NotImplementedError

    def _plan(self, forecast: Forecast, /) -> dict[str, Any]:
        """Add the stages (work over rows) of a fit of ``forecast.train`` to the forecast; return the plan."""
        raise NotImplementedError

    def _row_map(self, output: Any) -> OutputMap:
        """Return the map from rows to the output with the name ``output``."""
        raise NotImplementedError

    def _state(self) -> SavedModelState:
        """Return the fitted parameters for ``save``."""
        raise NotImplementedError

    def _restore(self, values: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Set the fitted parameters from ``values`` and ``arrays``, which `_state` returned before a save."""
        raise NotImplementedError

    def _restore_at(self, saved: SavedModelState, location: Location | None, run: Location | None) -> None:
        """Set the fitted parameters of a saved model; models that also saved datasets override this method.

        ``location`` is the folder of the saved model. ``run`` is the run folder that contains it, or None.
        """
        self._restore(*saved)

    def _training_rows(
        self, X: RowsLike, y: LabelsLike | None, sample_weight: WeightsLike | None, *, reset: bool = True
    ) -> Dataset:
        """Return the training dataset of the rows, labels and weights that ``fit`` was given."""
        return self._given_rows(X, y, sample_weight, reset=reset)

    def _validation_dataset(self, X: RowsLike, y: LabelsLike | None) -> Dataset:
        """Return the validation dataset of the rows and labels that ``fit`` was given."""
        return self._given_rows(X, y, name="validation")

    def _check_rows(self, train: Dataset, validation: Dataset | None) -> None:
        """Raise an error for rows that this model cannot learn from, before any work."""

    def _held_out(self, train: Dataset, validation: Dataset | None) -> Dataset | None:
        """Return the given validation rows, or rows of ``train`` that the fit excludes from training."""
        return validation

    def _check_params(self) -> None:
        """Raise ValueError if a constructor parameter or a combination of parameters is not allowed."""
        self._parameters.check(self)

    def _deciding_parameters(self) -> dict[str, Any]:
        """Return the parameters that determine the result; a resumed fit must have the same values."""
        return self._parameters.select_deciding(self.get_params(deep=False))

    def _open_run_dir(
        self, train: Dataset, resources: Resources, call: FitCall
    ) -> AbstractContextManager[LocationLike | None]:
        """Return a context manager that yields the folder for the files of a fit, or None for no folder."""
        return nullcontext(call.run_dir)

    # -- rows ------------------------------------------------------------------------------------------------

    def _given_rows(
        self,
        X: RowsLike,
        y: LabelsLike | None = None,
        sample_weight: WeightsLike | None = None,
        *,
        name: str = "X",
        reset: bool = False,
        least_rows: int = 1,
    ) -> Dataset:
        """Return the given rows as a dataset.

        With ``reset`` the rows set ``n_features_in_`` and ``feature_names_in_``; otherwise they must match.
        """
        rows = opened(X, name)
        if isinstance(rows, Dataset):
            ds = add_weights(rows, y, sample_weight)
        elif is_in_memory(rows):
            shape = find_image_shape(rows) if self._takes_images else None
            if shape is not None:  # asanyarray keeps the mask of a masked array, which a later check refuses
                rows = np.asanyarray(rows).reshape(shape[0], int(np.prod(shape[1:])))
            names = frame_names(rows)
            rows = validate_rows(
                self, rows, name=name, reset=reset, ensure_min_samples=least_rows, **VALIDATION_OPTIONS
            )
            rows = self._checked_values(rows, name)
            rows = rows if shape is None else rows.reshape(shape)
            ds = Dataset.from_arrays(rows, y, sample_weight=sample_weight, feature_names=names)
            self._check_width(ds.n_features, name)
            return ds
        else:
            names = frame_names(rows)
            rows = self._lazy_values(rows)
            ds = Dataset.from_arrays(rows, y, sample_weight=sample_weight, feature_names=names)
        return self._checked_features(ds, name, reset)

    def _checked_values(self, X: DenseOrCsr, name: str) -> DenseOrCsr:
        """Return rows ``X`` that are in memory; raise an error for values that no model can learn from."""
        check_finite(X, name)
        return X

    def _lazy_values(self, X: RowsLike) -> RowsLike:
        """Return a lazy array of rows with this model's conversions; the base class converts nothing."""
        return X

    def _check_width(self, width: int, name: str) -> None:
        if width != self.n_features_in_:
            raise DataError(
                f"{name} has {width} features, but {type(self).__name__} was fitted on {self.n_features_in_}"
            )

    def _checked_features(self, ds: Dataset, name: str, reset: bool) -> Dataset:
        """Return ``ds``; store the number and names of features (``reset``), or compare with those stored."""
        if reset:
            self.n_features_in_ = ds.n_features
            self.__dict__.pop("feature_names_in_", None)
            if ds.feature_names is not None:
                self.feature_names_in_ = ds.feature_names
        self._check_width(ds.n_features, f"{name} ({ds.url})" if ds.url else name)
        check_names(self, ds.feature_names)
        return ds

    def _validation_rows(self, validation: ValidationLike | None) -> Dataset | None:
        return None if validation is None else self._validation_dataset(*rows_and_labels(validation))

    def _search_rows(self, X: RowsLike, y: LabelsLike | None, sample_weight: WeightsLike | None) -> Dataset:
        """Return the dataset of a search, which all candidates are trained and scored on."""
        return self._training_rows(X, y, sample_weight)

    def _search_fit(self, rows: Dataset, **how: Any) -> Self:
        """Fit this model on ``rows``, a dataset that `_search_rows` has prepared for a search."""
        return self.fit(rows, **how)

    def _scored_rows(self, X: RowsLike, y: LabelsLike | None, sample_weight: WeightsLike | None) -> Dataset:
        """Return the dataset that a search scores this fitted model on."""
        return self._given_rows(X, y, sample_weight)

    # -- fit -------------------------------------------------------------------------------------------------

    def fit(
        self,
        X: RowsLike,
        y: LabelsLike | None = None,
        *,
        validation: ValidationLike | None = None,
        client: ClientLike | None = None,
        run_dir: str | Path | None = None,
        resume: bool = False,
        callbacks: CallbackList = (),
        engine: Mapping[str, Any] | None = None,
        verbose: bool | None = None,
    ) -> Self:
        """Fit by passes over the rows, in this process or on a Dask cluster.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, features)
            Rows: NumPy, memmap, zarr and Dask arrays, ``xarray.DataArray``, torch tensors, SciPy sparse
            arrays, data frames or lists. Lazy arrays are read in blocks.
        y : array-like, shape (n,) or (n, outputs), or Dataset, or None
            Labels or outputs, for models that learn from them. A Dataset ``X`` contains its own.
        validation : Dataset or (X, y) or None
            Rows for early stopping; the fit keeps the parameters with the best validation result.
        sample_weight : array-like, shape (n,), or None
            Weights of the rows, for estimators that accept weights.
        client : distributed.Client, cluster or None
            Dask cluster to run on: a client, or a cluster object such as ``LocalCluster``, ``KubeCluster`` or
            ``SLURMCluster``. None uses the enclosing ``with sl.cluster(…)`` or, without one, this process.
        run_dir : path or None
            Folder for checkpoints; all workers must be able to write to it.
        resume : bool
            Continue the fit in ``run_dir``.
        callbacks : Callback or sequence of Callback
            Objects that are notified of passes, steps and events.
        engine : dict or None
            Options of the engine: block_rows, leaf_rows, checkpoint_seconds, checkpoint_passes, scratch,
            keep_scratch, cache, on_bad_shard; for online learning also checkpoint_steps, report_steps,
            validate_steps, run_rows, buffer_runs.
        verbose : bool or None
            Show progress: a live display on a terminal and in a notebook with ipywidgets, lines elsewhere.
            None shows it in notebooks only.

        Returns
        -------
        self

        Raises
        ------
        DataError
            Rows, labels or outputs are invalid; the message names the dataset and the row.
        ValueError
            A parameter is out of range.
        DivergenceError
            Weights have grown beyond float32. It is also a FloatingPointError.
        PlanError
            The fit needs more memory or disk than there is.
        RunError
            The run folder contains another fit, or the cluster has no workers.

        Warns
        -----
        LongFitWarning
            The fit would take more than an hour; the message says how to shorten it.
        DataConversionWarning
            The standard deviation of a feature is hardly larger than the rounding of its values to float32,
            and the model does not subtract the mean first.

        Examples
        --------
        See the class.
        """
        with use_client(client) as found:
            call = FitCall(self, {}, run_dir, resume, callbacks, engine or {}, verbose, found)
            return self._fit(X, y, None, validation, call)

    def _fit(
        self,
        X: RowsLike,
        y: LabelsLike | None,
        sample_weight: WeightsLike | None,
        validation: ValidationLike | None,
        call: FitCall,
    ) -> Self:
        with restored_on_failure(self):
            self._check_params()
            train = self._training_rows(X, y, sample_weight)
            if validation is not None and not self._validates:
                raise DataError(
                    f"validation rows were given, but {type(self).__name__} learns without labels and has "
                    "nothing to validate: leave them out ([data] validation)"
                )
            validation_rows = self._validation_rows(validation)
            self._check_rows(train, validation_rows)
            if self._rounds_rows:
                warn_of_rounding(self, train)
            validation_rows = self._held_out(train, validation_rows)
            resources = find_resources(call.client, self.n_jobs, None)
            self._check_plan(train, validation_rows, resources, call.engine)
            given = {"train": train}
            if validation_rows is not None:
                given["validation"] = validation_rows
            call.rows.update(restore_row_ranges(given, call.run_dir if call.resume else None))
            with self._open_run_dir(train, resources, call) as run_dir, fit_callbacks(call) as callbacks:
                self._run_fit(call, run_dir, callbacks)
                self._fitted_rows = {name: ds.spec() for name, ds in call.rows.items() if ds.is_stored}
        return self

    def _check_plan(
        self, train: Dataset, validation: Dataset | None, resources: Resources, engine: Mapping[str, Any]
    ) -> None:
        """Raise PlanError if a fit exceeds memory or disk; warn if it would take more than an hour.

        The speed is measured only for fits that an estimate without measurements calls long.
        """
        plan = self._plan(Forecast(self._kind, train, validation, resources, engine, measure=False))
        if plan["expected_seconds"] > LONG_SECONDS / 10:
            plan = self._plan(Forecast(self._kind, train, validation, resources, engine, measure=True))
        if text := long_fit(plan):
            warn_user(text, LongFitWarning)

    def _run_fit(self, call: FitCall, run_dir: LocationLike | None, callbacks: Callbacks) -> None:
        """Run the steps of a fit on the rows of ``call``, and notify the callbacks of its start and end."""
        steps = self._fit_steps({name: MappedRows(ds) for name, ds in call.rows.items()})
        start = first_step(steps)
        with FitSession(
            self._kind,
            client=call.client,
            run_dir=run_dir,
            resume=call.resume,
            callbacks=callbacks,
            device=self.device,
            n_jobs=self.n_jobs,
            engine=call.engine,
            defaults=self._parameters.defaults_of_other_versions(),
        ) as session:
            validation = call.rows.get("validation")
            more = {} if validation is None else {"validation_rows": len(validation)}
            params = self._deciding_parameters()
            seed, rows = session.start_fit([start], self.random_state, params, call.rows, **more)
            session.run_steps(steps, (seed, {name: MappedRows(ds) for name, ds in rows.items()}))
            session.remove_leftovers()
        seconds = sum(record["seconds"] for record in self.history_)
        session.callbacks.on_fit_end({"passes": self.n_iter_, "pass_seconds": seconds})

    def plan(
        self,
        X: RowsLike,
        y: LabelsLike | None = None,
        *,
        validation: ValidationLike | None = None,
        client: ClientLike | None = None,
        memory_limit: str | int | None = None,
        engine: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Estimate the resources of ``fit`` from shapes and a probe of a few seconds; nothing is fitted.

        Parameters
        ----------
        X, y, validation, client, engine
            As in :meth:`fit`.
        memory_limit : str, int or None
            Memory of a worker, for example ``"4GB"``. None asks the cluster or this process.

        Returns
        -------
        dict
            ``stages``: rows, tasks or steps, bytes of a statistic and memory by purpose, for each stage.
            Peak bytes per worker; bytes of scratch, disk and checkpoints. ``seconds`` by
            activity, their sum ``expected_seconds``, and ``seconds_per_pass``. ``passes``: ``at_least``,
            ``expected`` and ``at_most``. ``gpu_rows``: bytes and share of the rows that stay on GPUs
            between passes, for models that keep them. Some models add more entries.

        Raises
        ------
        PlanError
            The fit needs more memory or disk than there is; the message names a setting that would fit.

        Examples
        --------
        >>> import scalelatent as sl
        >>> x, y = np.random.default_rng(0).normal(size=(50, 4)), np.arange(50) % 2
        >>> sl.CapsuleRegression(capsule_dim=2).plan(x, y)["stages"]["moments"]["statistic_bytes"]
        448
        """
        new = clone(self)  # so that rows of another width do not change this model
        new._check_params()
        train = new._training_rows(X, y, None)
        validation_rows = new._validation_rows(validation) if self._validates else None
        new._check_rows(train, validation_rows)
        validation_rows = new._held_out(train, validation_rows)
        with use_client(client) as found:
            resources = replace(
                find_resources(found, self.n_jobs, memory_limit),
                gpu_rows=_find_gpu_row_limits(found, self.device),
            )
        return new._plan(Forecast(self._kind, train, validation_rows, resources, engine or {}, measure=True))

    # -- outputs with one row per input row ------------------------------------------------------------------

    @follows_rows
    def transform(
        self,
        X: RowsLike,
        *,
        out: str | Path | None = None,
        client: ClientLike | None = None,
        overwrite: bool = False,
        callbacks: CallbackList = (),
    ) -> Any:
        """Compute the latent representation of rows, which the class documentation describes.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, features)
        out : path, url or None
            Write a dataset at this path or URL instead of returning an array.
        client : distributed.Client, cluster or None
            Cluster that writes ``out``. None uses the enclosing ``with sl.cluster(…)``, or this process.
        overwrite : bool
            Replace an existing dataset at ``out``.
        callbacks : Callback or sequence of Callback
            Objects that are notified of progress.

        Returns
        -------
        ndarray, shape (n, width); a lazy array for a dask array; a Dataset with ``out``
            A data frame if ``set_output`` requests one. A CuPy array if ``X`` is on a GPU (an array of CuPy
            or torch, a frame of cuDF), and so for all methods that return arrays of numbers for rows ``X``.

        Raises
        ------
        DataError
            Rows are invalid or have another number of features, or the result does not fit into memory.

        Examples
        --------
        >>> import scalelatent as sl
        >>> x, y = np.random.default_rng(0).normal(size=(50, 4)), np.arange(50) % 2
        >>> m = sl.CapsuleRegression(capsule_dim=3, max_iter=2).fit(x, y)
        >>> m.transform(x).shape, m.get_feature_names_out()[0]
        ((50, 6), 'capsuleregression0')
        """
        return wrap_output(self, self._map(X, self._transformed, out, client, overwrite, callbacks), X)

    @property
    def _n_features_out(self) -> int:
        return int(self._row_map(self._transformed).output()[0][0])

    def _map(
        self,
        X: RowsLike,
        output: OutputName,
        out: str | Path | None = None,
        client: ClientLike | None = None,
        overwrite: bool = False,
        callbacks: CallbackList = (),
    ) -> Any:
        """Apply ``_row_map(output)`` to rows; return an array, a lazy dask array, or a Dataset at ``out``."""
        check_is_fitted(self)
        rows = opened(X, "X")
        if is_dask(rows):
            return self._map_dask(rows, output)
        row_map = self._row_map(output)
        return self._map_rows(self._given_rows(rows), row_map, out, client, overwrite, callbacks)

    def _map_rows(
        self,
        ds: Dataset,
        row_map: OutputMap,
        out: str | Path | None = None,
        client: ClientLike | None = None,
        overwrite: bool = False,
        callbacks: CallbackList = (),
    ) -> Any:
        """Apply a map to the rows of a dataset; return an array, or a Dataset at ``out``."""
        name = f"{self._kind}_{row_map.output_name}"
        if out is not None:
            check_not_own_input(out, ds.place)
            check_room(locate(out), overwrite, resumable=False)
        else:
            shape, dtype = row_map.output()
            self._check_room(len(ds) * int(np.prod(shape)) * np.dtype(dtype).itemsize, len(ds))
            progress = Progress(Callbacks(callbacks), name, 0)
            return map_to_array(row_map, ds, self.device, self.n_jobs, progress)
        with FitSession(
            self._kind, device=self.device, n_jobs=self.n_jobs, client=client, callbacks=callbacks
        ) as session:
            session.begin(0, {}, {})
            ds = session.make_visible("rows", ds)
            task = start_map(
                name,
                ds,
                row_map,
                locate(out).url,
                self.device,
                classes=getattr(self, "classes_", None),
                overwrite=overwrite,
                **choose_map_layout(ds, row_map),
            )
            return map_rows(session.executor, task, Progress(session.callbacks, name, 0))

    @staticmethod
    def _check_room(nbytes: int, rows: int) -> None:
        """Raise DataError for a result of ``nbytes`` that memory cannot hold."""
        if nbytes > OUTPUT_SHARE * process_memory():
            raise DataError(
                f"the result would take {nbytes / 2**30:.1f} GiB of memory ({rows} rows): pass "
                "out='RESULT.zarr' to write it to disk as it is made"
            )

    def _map_dask(self, X: da.Array, output: OutputName) -> Any:
        from dask.array import map_blocks

        self._check_width(int(np.prod(X.shape[1:])), "X")
        row_map = self._row_map(output)
        shape, dtype = row_map.output()
        X = X.rechunk(dict.fromkeys(range(1, X.ndim), -1))
        return map_blocks(
            _map_block,
            self._lazy_values(X),
            row_map,
            self.device,
            dtype=dtype,
            chunks=(X.chunks[0], *((side,) for side in shape)),
            drop_axis=list(range(1, X.ndim)),
            new_axis=list(range(1, 1 + len(shape))),
            meta=np.empty((0,) * (1 + len(shape)), dtype),
        )

    # -- display ---------------------------------------------------------------------------------------------

    def _set_fitted_attributes(self, **learned: object) -> None:
        """Set fitted attributes, given as keyword arguments, that users can only read."""
        self.__dict__.update(learned)

    def report(self, folder: str | Path, *, data: ValidationLike | RowsLike | None = None) -> str:
        """Write a page about the fitted model: its numbers, the course of the fit, results on some rows.

        Parameters
        ----------
        folder : path or str
            Folder for ``report/index.html`` and its figures; it is created if it is missing. For a run
            folder, the page also shows the settings and the history of the fit.
        data : Dataset, array-like of shape (n, features), or (X, y), optional
            Rows to evaluate. None uses the rows that the run folder names, or the stored validation or
            training rows of the fit. Rows that were in memory during the fit are not available.

        Returns
        -------
        str
            Path or address of the page.

        Raises
        ------
        NotFittedError
            The model is not fitted.
        DataError
            This kind of model has no report.

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
        return str(find_registered("report")(self, folder, data))

    # -- saving ----------------------------------------------------------------------------------------------

    def save(self, url: str | Path, *, overwrite: bool = False) -> None:
        """Write the fitted model as a zarr group and JSON, without pickle.

        Parameters
        ----------
        url : str or path
            Folder to create: a path, or a URL such as ``s3://bucket/model.zarr``.
        overwrite : bool
            Replace an existing model.

        Raises
        ------
        DataError
            The folder exists already, or cannot be written.

        Examples
        --------
        See :func:`scalelatent.load_model`.
        """
        check_is_fitted(self)
        values, arrays = self._to_saved()
        if hasattr(self, "feature_names_in_"):
            values["feature_names_in"] = [str(name) for name in self.feature_names_in_]
        params, beside = encode_params(self.get_params(deep=False)), self._beside_saved()
        save_model(url, self._kind, params, values, arrays, overwrite=overwrite, write_datasets=beside)

    def to_onnx(self, path: str | Path) -> None:
        """Write the prediction as an ONNX graph, for runtimes without this package.

        The input is ``x``, float32 (rows, features). The outputs of a classifier are ``label`` (rows) and
        ``probabilities``, float32 (rows, classes), or ``scores`` if it has only `decision_function`. The
        output of a regression model is ``output``, float32.

        Parameters
        ----------
        path : str or path
            The file to write.

        Raises
        ------
        DataError
            This kind of model has no graph, or ``onnx`` is not installed (``pip install
            'scalelatent[onnx]'``).

        Examples
        --------
        >>> import scalelatent as sl
        >>> from sklearn.datasets import load_digits
        >>> x, y = load_digits(return_X_y=True)
        >>> m = sl.CapsuleRegression(capsule_dim=2, max_iter=3).fit(x, y)
        >>> m.to_onnx("digits.onnx")  # doctest: +SKIP
        >>> import onnxruntime  # doctest: +SKIP
        >>> session = onnxruntime.InferenceSession("digits.onnx")  # doctest: +SKIP
        >>> labels, probabilities = session.run(None, {"x": x.astype("f4")})  # doctest: +SKIP
        """
        check_is_fitted(self)
        graph = OnnxGraph(self.n_features_in_)
        self._add_prediction_nodes(graph)
        graph.save(path, repr(self))

    def _add_prediction_nodes(self, graph: OnnxGraph) -> None:
        """Add the operators of the prediction to the graph; this default is for models without a graph."""
        raise DataError(
            f"to_onnx: predictions of a {type(self).__name__} have no ONNX graph: save the "
            "model, and predict with this package"
        )

    def _beside_saved(self) -> Callable[[Location], dict[str, str]] | None:
        """Return a function that writes datasets into the folder of a saved model; None without datasets."""
        return None

    def _to_saved(self) -> SavedModelState:
        values, arrays = self._state()
        common = {"n_iter": self.n_iter_, "n_features_in": self.n_features_in_, "seed": self.seed_}
        return common | values, arrays

    @classmethod
    def _from_saved(
        cls,
        params: dict[str, Any],
        values: dict[str, Any],
        arrays: dict[str, np.ndarray],
        location: Location | None = None,
        run: Location | None = None,
    ) -> Self:
        try:
            params = cls._parameters.drop_removed(restore_params(params), fitted=True)
        except ValueError as error:
            raise DataError(f"{location.url if location else 'this model'} was saved with {error}") from None
        model = cls(**params)
        model.n_iter_, model.n_features_in_ = values["n_iter"], values["n_features_in"]
        model.seed_, model.history_ = values["seed"], []
        model._restore_at((values, arrays), location, run)
        if "feature_names_in" in values:
            model.feature_names_in_ = np.array(values["feature_names_in"], dtype=object)
        return model


def _find_gpu_row_limits(client: Client | None, device: str) -> tuple[int, ...]:
    """Return, for each GPU of a fit, the bytes of rows that it may keep between passes."""
    if device not in ("auto", "gpu"):
        return ()
    if client is None:
        return tuple(read_gpu_memory(device_id).row_limit for device_id in range(gpu_count()))
    from scalelatent.engine.dask.pools import find_gpu_row_limits

    return find_gpu_row_limits(client)


def _map_block(x: np.ndarray, row_map: RowMap, device: str, block_info: Any = None) -> np.ndarray:
    start = block_info[0]["array-location"][0][0]
    first = int(start) if start == start else 0  # the start is NaN if the chunk sizes are unknown
    return map_to_array(row_map, Dataset.from_arrays(x), device, 1, first_row=first)


@lru_cache(maxsize=256)
def warn_reduced(name: str, value: int | str, default: int | str, why: str) -> None:
    """Warn once that a default value was reduced to the largest value that the rows allow."""
    logger.warning(
        f"{name} is {value} instead of its default {default}, because {why}; {name}= sets another value"
    )
