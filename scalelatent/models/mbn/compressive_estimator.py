"""A small network in the place of a bootstrap network: learned from its outputs, fast to predict with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from scalelatent.contract.parameters import is_list
from scalelatent.data import Dataset
from scalelatent.engine.callbacks import Callback
from scalelatent.engine.companions import FitCall, accompanied
from scalelatent.engine.threads import resolve_jobs
from scalelatent.errors import DataError
from scalelatent.estimators._sklearn import wrap_output
from scalelatent.estimators.base import (
    _CHECKS,
    StreamedEstimator,
    check_finite,
    is_plain,
    restore_params,
    validated,
)
from scalelatent.models.mbn.model.compressive import NetworkRows

from .compressive_scales import check_rows, surely_fine
from .parameters import COMPRESSIVE

__all__ = ["CompressiveMBN"]

SCORE_ROWS = 2**16


class CompressiveMBN(ClassNamePrefixFeaturesOutMixin, TransformerMixin, StreamedEstimator):
    """Compressive multilayer bootstrap network: a feed-forward network learns rows -> output of an MBN.

    A bootstrap network predicts slowly, since each row is held against all centroids. The network here learns
    what it put out for its training rows, and predicts in its place (the paper's sections 2.4 and 5.6).

    Parameters
    ----------
    hidden : sequence of int
        Rectified linear units of each hidden layer; the paper's is (2048, 2048).
    n_epochs : int
        Times that each row is seen.
    batch_size : int
        Rows of a step.
    learning_rate : float
        Of Adam at the first step; falls to 0 along half a cosine.
    random_state : int, Generator, RandomState or None
        Decides the first weights and the order of rows.
    device : {"auto", "cpu", "gpu"}
        "auto" learns on a GPU where PyTorch finds one, and predicts on one where CuPy does.
    n_jobs : int or None
        Threads; None is what ``joblib.parallel_config`` says, else all cores.

    Attributes
    ----------
    coefs_ : list of ndarray of float32, shape (inputs, outputs) each
    intercepts_ : list of ndarray of float32, shape (outputs,) each
    n_iter_ : int
        Epochs.
    history_ : list of dict
        A record an epoch: ``objective`` is the mean squared error of the training rows, and
        ``validation_error`` that of the validation rows after it, both divided by the variance of the
        outputs.
    seed_ : int
    n_features_in_ : int

    Notes
    -----
    ``fit`` needs PyTorch (``pip install 'scalelatent[torch]'``); a fitted or loaded network predicts with
    numpy or CuPy alone. On one machine and with one number of threads a fit gives the same bits again.

    References
    ----------
    Zhang, X.-L. (2018). Multilayer bootstrap networks. Neural Networks 103, 29-43.

    Examples
    --------
    >>> import numpy as np, scalelatent as sl
    >>> x = np.random.default_rng(0).normal(size=(500, 4)).astype("float32")
    >>> z = np.column_stack([x[:, 0] * x[:, 1], np.abs(x[:, 2])])
    >>> small = sl.CompressiveMBN(hidden=(64,), n_epochs=3, n_jobs=1, random_state=0)
    >>> small.fit(x, z).transform(x).shape
    (500, 2)
    """

    _kind = "compressive"
    _parameters = COMPRESSIVE
    _sign_of_fit = "coefs_"

    def __init__(
        self,
        *,
        hidden: Sequence[int] = (2048, 2048),
        n_epochs: int = 30,
        batch_size: int = 256,
        learning_rate: float = 1e-3,
        random_state: Any = None,
        device: str = "auto",
        n_jobs: int | None = None,
    ) -> None:
        self.hidden = hidden
        self.n_epochs = n_epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.random_state = random_state
        self.device = device
        self.n_jobs = n_jobs

    def fit(
        self,
        X: Any,
        y: Any = None,
        *,
        validation: Any = None,
        run_dir: Any = None,
        resume: bool = False,
        callbacks: Callback | Sequence[Callback] = (),
        engine: Mapping[str, Any] | None = None,
        verbose: bool | None = None,
    ) -> CompressiveMBN:
        """Learn from rows and what a bootstrap network put out for them.

        Rows are read as they are needed, in an order that the seed decides; a few thousand are in memory as
        they are stored, and a batch as numbers (of sparse rows too). Scales are taken of at most 16,384 rows,
        a few megabytes at a time.
        Learns in this process, also within ``with sl.cluster(…)``: steps follow each other too closely to
        be shared out. Job files do not fit it.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, features)
            Its labels are not looked at.
        y : Dataset or array-like, shape (n, outputs)
            The output of the same rows: what ``transform`` returned, or the dataset that it wrote.
        validation : pair of the same, optional
            Their error is told after each epoch.
        run_dir : path, optional
            Keep each epoch as a checkpoint there.
        resume : bool
            Go on with the fit that ``run_dir`` holds; the result is that of an undisturbed fit.
        callbacks : Callback or sequence of Callback
        engine : mapping, optional
            Options of the engine; none changes the result.
        verbose : bool or None
            Show progress: a display that moves on a terminal and in a notebook, lines elsewhere. None: in a
            notebook alone.

        Returns
        -------
        self

        Raises
        ------
        RunError
            No PyTorch; ``device="gpu"`` without a GPU; ``run_dir`` holds another fit.
        DataError
            No output, or one of another number of rows; NaN or infinity, also among the validation rows.
        ValueError
            A parameter that makes no sense.

        Examples
        --------
        See the class.
        """
        from scalelatent.estimators.session import rows_as_begun

        from .compressive_fit import import_torch, torch_device

        self._check_params()
        sizes: Any = self.hidden
        hidden = tuple(int(size) for size in (sizes if is_list(sizes) else [sizes]))
        torch = import_torch()
        torch_device(torch, self.device)
        rows, outputs = self._pairs(X, y, "X", reset=True)
        held = None if validation is None else self._held(validation, outputs.n_features)
        watched = {"rows": rows, "output": outputs}
        if held is not None:
            watched |= {"validation rows": held[0], "validation output": held[1]}
        watched = rows_as_begun(watched, run_dir if resume else None)
        call = FitCall(self, watched, run_dir, resume, callbacks, engine or {}, verbose)
        with accompanied(call) as everyone:
            self._learn(torch, hidden, watched, run_dir, resume, everyone, engine)
        return self

    def _learn(
        self,
        torch: Any,
        hidden: tuple[int, ...],
        watched: dict[str, Dataset],
        run_dir: Any,
        resume: bool,
        callbacks: Callback,
        engine: Mapping[str, Any] | None,
    ) -> None:
        from scalelatent.estimators.session import FitSession

        from .compressive_fit import Trainer, Training, torch_threads, train

        rows, outputs = watched["rows"], watched["output"]
        held = None
        if "validation rows" in watched:
            held = watched["validation rows"], watched["validation output"]
        with FitSession(
            self._kind,
            in_process=True,
            run_dir=run_dir,
            resume=resume,
            callbacks=callbacks,
            device=self.device,
            n_jobs=self.n_jobs,
            engine=engine,
        ) as session:
            decides = {
                "hidden": list(hidden),
                "n_epochs": self.n_epochs,
                "batch_size": self.batch_size,
                "learning_rate": self.learning_rate,
            }
            seed = session.begin(self.random_state, decides, watched)
            session.announce(rows, seed=seed, max_iter=self.n_epochs)
            training = Training(
                hidden, int(self.n_epochs), int(self.batch_size), float(self.learning_rate), seed
            )
            with torch_threads(torch, resolve_jobs(self.n_jobs)):
                trainer = Trainer(training, rows, outputs, self.device)
                store = session.store if run_dir is not None else None
                history = train(trainer, rows, outputs, held, session.callbacks, store)
            self.coefs_, self.intercepts_ = trainer.network()
            session.finish()
        self.seed_, self.history_, self.n_iter_ = seed, history, len(history)
        seconds = sum(record["seconds"] for record in history)
        session.callbacks.on_fit_end({"passes": self.n_iter_, "pass_seconds": seconds})

    def _pairs(self, X: Any, y: Any, what: str, *, reset: bool) -> tuple[Dataset, Dataset]:
        """Rows, and the outputs that belong to them, as datasets."""
        if y is None:
            raise DataError(
                f"{type(self).__name__} learns from rows and their outputs: pass y=mbn.transform(X), or the "
                "dataset that transform(X, out=...) wrote"
            )
        if isinstance(X, Dataset) or not is_plain(X):
            rows = X if isinstance(X, Dataset) else Dataset.from_arrays(X)
            if reset:
                self._set_width(rows.n_features)
        else:
            X = validated(self, X, reset=reset, **_CHECKS)
            check_finite(X, what)
            rows = Dataset.from_arrays(X)
        self._check_width(rows, what)
        if not isinstance(y, Dataset):
            if is_plain(y):
                y = np.asarray(y)
                if y.ndim != 2 or y.dtype.kind not in "buif":
                    raise DataError(
                        f"the output has shape {y.shape} and type {y.dtype}: give numbers (n, outputs), what "
                        "transform of a bootstrap network returns"
                    )
                check_finite(y, "the output")
            y = Dataset.from_arrays(y)
        if len(y) != len(rows):
            raise DataError(f"the output has {len(y)} rows for {len(rows)} rows of {what}: give one for each")
        return rows, y

    def _held(self, validation: Any, width: int) -> tuple[Dataset, Dataset]:
        try:
            X, y = validation
        except (TypeError, ValueError):
            raise DataError(f"validation={type(validation).__name__}: give a pair (rows, output)") from None
        rows, outputs = self._pairs(X, y, "validation", reset=False)
        if outputs.n_features != width:
            raise DataError(
                f"validation: the output has {outputs.n_features} columns, that of the training rows {width}"
            )
        # Of the training rows the objective tells; an error of the validation rows would be nan in silence.
        for dataset, what in ((rows, "the validation X"), (outputs, "the validation output")):
            if not surely_fine(dataset):
                check_rows(dataset, what)
        return rows, outputs

    def transform(
        self, X: Any, *, out: Any = None, client: Any = None, overwrite: bool = False, callbacks: Any = ()
    ) -> Any:
        """What the bootstrap network would have put out, as far as the small one has learned it.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, features)
        out : url or None
            Write a dataset there instead of returning an array.
        client, overwrite, callbacks
            Where ``out`` is written from, whether it may be replaced, progress.

        Returns
        -------
        ndarray of float32, shape (n, outputs); a lazy array for a dask array; a Dataset with ``out``

        Raises
        ------
        DataError
            Rows of another width, NaN, a result that does not fit into memory.

        Examples
        --------
        See the class.
        """
        z = self._map(X, "output", out, client, overwrite, callbacks)
        return wrap_output(self, z, X)

    def score(self, X: Any, y: Any) -> float:
        """Share of the outputs' variance that the network explains; streams over Datasets.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, features)
        y : Dataset or array-like, shape (n, outputs)

        Returns
        -------
        float
            ``1 - sum |z - f(x)|^2 / sum |z - mean|^2``; at most 1.

        Raises
        ------
        DataError
            As ``fit``; outputs that are all the same.

        Examples
        --------
        See the class.
        """
        check_is_fitted(self)
        rows, outputs = self._pairs(X, y, "X", reset=False)
        off, first, second = 0.0, np.zeros(outputs.n_features), 0.0
        # Around one of them, lest the variance drown in the squares.
        origin = outputs.read_x(0, 1).astype(np.float64)[0]
        for a in range(0, len(rows), SCORE_ROWS):
            b = min(a + SCORE_ROWS, len(rows))
            z = outputs.read_x(a, b).astype(np.float64) - origin
            off += float(((self._map(rows[a:b], "output", None, None, False, ()) - origin - z) ** 2).sum())
            first += z.sum(axis=0)
            second += float((z**2).sum())
        spread = second - float(first @ first) / len(rows)
        if spread <= 0:
            raise DataError("the outputs are all the same: there is no variance to explain")
        return 1.0 - off / spread

    def _row_map(self, what: str) -> NetworkRows:
        return NetworkRows(tuple(self.coefs_), tuple(self.intercepts_))

    @property
    def _n_features_out(self) -> int:
        return len(self.intercepts_[-1])

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.target_tags.required = True
        tags.transformer_tags.preserves_dtype = ["float32"]
        return tags

    def _to_saved(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        arrays = {f"coef_{i}": w for i, w in enumerate(self.coefs_)}
        arrays |= {f"intercept_{i}": b for i, b in enumerate(self.intercepts_)}
        values = {"n_iter": self.n_iter_, "n_features_in": self.n_features_in_, "seed": self.seed_}
        return values, arrays

    @classmethod
    def _from_saved(
        cls, params: dict[str, Any], values: dict[str, Any], arrays: dict[str, np.ndarray]
    ) -> CompressiveMBN:
        model = cls(**restore_params(params))
        layers = range(len(arrays) // 2)
        model.coefs_ = [arrays[f"coef_{i}"] for i in layers]
        model.intercepts_ = [arrays[f"intercept_{i}"] for i in layers]
        model.n_iter_, model.n_features_in_, model.seed_ = (
            values["n_iter"],
            values["n_features_in"],
            values["seed"],
        )
        model.history_ = []
        return model
