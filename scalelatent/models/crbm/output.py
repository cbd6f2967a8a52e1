"""What a fitted conditional RBM says of rows: states, beliefs, errors, energies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from sklearn.utils.validation import check_is_fitted

from scalelatent.contract.learners import Block
from scalelatent.contract.wants import Targets, Wants
from scalelatent.data import Dataset
from scalelatent.engine.backend import make_backend
from scalelatent.engine.mapwrite import map_to_array
from scalelatent.engine.reading import Meter, Reader, naming
from scalelatent.errors import DataError
from scalelatent.estimators._sklearn import wrap_output
from scalelatent.estimators.base import is_dask_array
from scalelatent.models.crbm.kernels.inference import Inference
from scalelatent.models.crbm.model.energy import (
    CrbmShape,
    block_biases,
    hidden_logits,
    negative_free_energy,
)
from scalelatent.models.crbm.model.predict import CrbmOutput, CrbmScoring

from .fit import TEST_STAGE, targets_of
from .infer import Beliefs, infer_rows, sweeps_of, warn_missed

# Rows whose convergence is looked at where outputs are written to disk.
MOST_LOOKED_AT = 1024


@dataclass(frozen=True)
class _Watched(CrbmOutput):
    """Notes how many rows of each block did not meet the tolerance; for one process, and no record."""

    told: list[tuple[int, int]] = field(default_factory=list)

    def infer(self, prepared: Any, block: Block) -> Inference:
        found = super().infer(prepared, block)
        if self.tol is not None and found.change is not None:
            change = prepared[0].to_host(found.change)
            self.told.append((int((~(change <= self.tol)).sum()), len(change)))
        return found

    def warn(self, rows: str) -> None:
        """Warn where some rows did not meet the tolerance."""
        missed, seen = (sum(column) for column in zip(*self.told, strict=True)) if self.told else (0, 0)
        if missed:
            assert self.tol is not None
            warn_missed(self.tol, missed / seen, self.n_sweeps, rows)


def _places(n_rows: int) -> list[slice]:
    """All rows, or runs in four places of many."""
    if n_rows <= MOST_LOOKED_AT:
        return [slice(0, n_rows)]
    run = MOST_LOOKED_AT // 4
    return [slice(a, a + run) for a in ((n_rows - run) * k // 3 for k in range(4))]


class CrbmOutputs:
    """Predictions of :class:`.crbm.ConditionalRBM`.

    A class of its own, since scikit-learn would wrap whatever a transformer's own ``transform`` returns.
    """

    damping: float
    device: str
    n_jobs: int | None
    tol: float | None
    corruption: Any
    inference_: str
    n_features_in_: int
    n_sweeps_: int
    seed_: int
    _kind: str
    _map: Any
    _map_rows: Any
    _other_rows: Any
    _pairs: Any
    _shape: CrbmShape
    _source: str
    _theta: np.ndarray

    def predict(
        self,
        X: Any = None,
        *,
        n_sweeps: int | None = None,
        out: Any = None,
        client: Any = None,
        overwrite: bool = False,
        callbacks: Any = (),
    ) -> Any:
        """The most probable state of each output, by the inference of training.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, x)
            Of a plain RBM: None (one row), or rows of width 0.
        n_sweeps : int or None
            Sweeps; None: ``n_sweeps_``.
        out : url or None
            Write a dataset of them there instead of returning an array.
        client, overwrite, callbacks
            Where ``out`` is written from, whether it may be replaced, progress.

        Returns
        -------
        ndarray of uint8, shape (n, v); a lazy array for a dask array; a Dataset with ``out``

        Warns
        -----
        UserWarning
            ``tol`` was not met by some of the rows; with ``out``, of 1,024 that are looked at. A lazy array
            does not tell.

        Examples
        --------
        >>> import scalelatent as sl
        >>> v = np.eye(6, dtype="uint8").repeat(20, axis=0)
        >>> m = sl.ConditionalRBM(n_hidden=2, n_epochs=3, learning_rate=1.0, random_state=0).fit(v, v)
        >>> bool((m.predict(v) == v).all())
        True
        """
        return self._output(X, "states", n_sweeps, out, client, overwrite, callbacks)

    def predict_marginals(
        self,
        X: Any = None,
        *,
        n_sweeps: int | None = None,
        out: Any = None,
        client: Any = None,
        overwrite: bool = False,
        callbacks: Any = (),
    ) -> Any:
        """Beliefs of the outputs: how probable each is to be 1, by the inference of training.

        Parameters
        ----------
        X, n_sweeps, out, client, overwrite, callbacks
            As in :meth:`predict`.

        Returns
        -------
        ndarray of float32, shape (n, v); a lazy array for a dask array; a Dataset with ``out``
            Of "mixed-product" and "max-product" those of max-marginals, which order states and are no
            probabilities.

        Examples
        --------
        >>> import scalelatent as sl
        >>> v = np.eye(6, dtype="uint8").repeat(20, axis=0)
        >>> m = sl.ConditionalRBM(n_hidden=2, n_epochs=3, learning_rate=1.0, random_state=0).fit(v, v)
        >>> m.predict_marginals(v, n_sweeps=4).shape
        (120, 6)
        """
        return self._output(X, "marginals", n_sweeps, out, client, overwrite, callbacks)

    def transform(
        self, X: Any, *, out: Any = None, client: Any = None, overwrite: bool = False, callbacks: Any = ()
    ) -> Any:
        """Beliefs of the hidden units; of a plain RBM, whose rows are v, their probabilities given v.

        Parameters
        ----------
        X, out, client, overwrite, callbacks
            As in :meth:`predict`.

        Returns
        -------
        ndarray of float32, shape (n, h); a lazy array for a dask array; a Dataset with ``out``
            A data frame where ``set_output`` asks for one.

        Examples
        --------
        >>> import scalelatent as sl
        >>> v = np.eye(6, dtype="uint8").repeat(20, axis=0)
        >>> sl.ConditionalRBM(n_hidden=2, n_epochs=1, learner="cd").fit(None, v).transform(v).shape
        (120, 2)
        """
        what = "given" if self._source == "plain" else "hidden"
        h = self._map(X, (what, None), out, client, overwrite, callbacks)
        return wrap_output(self, h, X)

    @property
    def _n_features_out(self) -> int:
        return self._shape.n_hidden

    def score(self, X: Any, y: Any = None, sample_weight: Any = None, *, callbacks: Any = ()) -> float:
        """Share of outputs that are predicted right; streams over a Dataset.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, x)
        y : array-like or Dataset, shape (n, v)
            A Dataset with targets brings its own. A model that corrupts its rows corrupts clean ones that
            come without.
        sample_weight : array-like, shape (n,), or None
            How much each row counts; None: those of a Dataset, where it has some, else all alike.
        callbacks : Callback or sequence
            Told of progress.

        Returns
        -------
        float

        Raises
        ------
        DataError
            No outputs, of another width, or neither 0 nor 1; weights that sum to 0.

        Examples
        --------
        >>> import scalelatent as sl
        >>> v = np.eye(6, dtype="uint8").repeat(20, axis=0)
        >>> m = sl.ConditionalRBM(n_hidden=2, n_epochs=3, learning_rate=1.0, random_state=0).fit(v, v)
        >>> m.score(v, v), m.score(v, 1 - v)
        (1.0, 0.0)
        """
        return 1.0 - self.errors(X, y, sample_weight, callbacks=callbacks)["all"]

    def errors(
        self, X: Any, y: Any = None, sample_weight: Any = None, *, callbacks: Any = ()
    ) -> dict[str, float]:
        """The paper's errors: of all outputs, and of those that x has otherwise than v.

        Parameters
        ----------
        X, y, sample_weight, callbacks
            As in :meth:`score`.

        Returns
        -------
        dict
            ``all``, and ``changed``: NaN where x is not as wide as v, not of 0 and 1, or nowhere another.

        Examples
        --------
        >>> import scalelatent as sl
        >>> v = np.eye(6, dtype="uint8").repeat(20, axis=0)
        >>> m = sl.ConditionalRBM(n_hidden=2, n_epochs=3, learning_rate=1.0, random_state=0).fit(v, v)
        >>> m.errors(v, v)
        {'all': 0.0, 'changed': nan}
        """
        from scalelatent.estimators.session import FitSession
        from scalelatent.estimators.steps import Rows

        check_is_fitted(self)
        ds = self._pairs(X, y)
        if sample_weight is not None:
            ds = ds.with_weight(sample_weight)
        targets = self._test_targets(ds)
        how = self._shape, self.inference_, self.n_sweeps_, self.tol
        reduction = CrbmScoring(*how, targets, self._theta, float(self.damping))
        with FitSession(self._kind, device=self.device, n_jobs=self.n_jobs, callbacks=callbacks) as session:
            session.begin(0, {}, {})
            stats = session.collect("score", reduction, Rows(ds))
        if not stats["units"][1]:
            raise DataError(f"{ds.url or 'X'}: the weights of the rows sum to 0: none of them counts")
        wrong, changed = CrbmScoring.errors(stats)
        return {"all": wrong, "changed": changed}

    def infer(
        self,
        X: Any = None,
        *,
        inference: str | None = None,
        n_sweeps: int | None = None,
        tol: float | None = None,
        pairs: bool = False,
        log_z: bool = False,
    ) -> Beliefs:
        """Run an inference and see how it went.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, x)
            Results are held in memory.
        inference : str or None
            One of the parameter's, or "gibbs" (means over the second half of ``n_sweeps`` draws). None: that
            of training.
        n_sweeps : int or None
            None: ``n_sweeps_``.
        tol : float or None
            End a row's sweeps when no belief moves by more.
        pairs : bool
            The mean over rows of the pairs' beliefs P(v_i = 1, h_j = 1) too (sum-product).
        log_z : bool
            The Bethe estimate of each row's log partition function too (sum-product; exact for "logistic").

        Returns
        -------
        Beliefs

        Raises
        ------
        ValueError
            An inference that there is not, or that does not tell what was asked for; no sweeps.

        Warns
        -----
        UserWarning
            ``tol`` was not met by some of the rows.

        Examples
        --------
        >>> import scalelatent as sl
        >>> v = np.eye(6, dtype="uint8").repeat(20, axis=0)
        >>> m = sl.ConditionalRBM(n_hidden=2, n_epochs=3, random_state=0).fit(v, v)
        >>> found = m.infer(v, inference="sum-product", n_sweeps=20, log_z=True)
        >>> found.visible.shape, bool(found.converged.all()), found.log_z.shape
        ((120, 6), True, (120,))
        """
        check_is_fitted(self)
        how: dict[str, Any] = {
            "inference": inference,
            "n_sweeps": n_sweeps,
            "tol": tol,
            "pairs": pairs,
            "log_z": log_z,
        }
        return infer_rows(self, self._observed_rows(X), **how)

    def free_energy(self, X: Any, y: Any = None) -> np.ndarray:
        """F(v, x): minus the log of the sum over h of exp(-E(v, h, x)).

        Together with :meth:`infer`'s ``log_z`` it gives log p(v | x) = -F - log Z.

        Parameters
        ----------
        X, y
            As in :meth:`score`; results are held in memory.

        Returns
        -------
        ndarray of float64, shape (n,)

        Examples
        --------
        >>> import scalelatent as sl
        >>> v = np.eye(6, dtype="uint8").repeat(20, axis=0)
        >>> sl.ConditionalRBM(n_hidden=2, n_epochs=1, random_state=0).fit(v, v).free_energy(v, v).shape
        (120,)
        """
        check_is_fitted(self)
        ds, out, backend = self._pairs(X, y), [], make_backend("reference")
        reader = Reader(ds, None, Meter(), wants=Wants(csr=True, targets=self._test_targets(ds)))
        params = self._shape.split(self._theta.astype(np.float64))
        with naming(ds):
            for a in range(0, len(ds), 4096):
                x, y, weight = reader.read(a, min(a + 4096, len(ds)))
                block = reader.block(x, y, weight, a)
                _, b1, b2 = block_biases(self._shape, params, block, backend)
                v = np.asarray(block.y, dtype=np.float64)
                out.append(-negative_free_energy(v, b1, hidden_logits(params, v, b2), np))
        return np.concatenate(out)

    # -- how -------------------------------------------------------------------------------------------------

    def _test_targets(self, ds: Dataset) -> Targets:
        """Where the outputs of rows come from: clean ones that come alone are corrupted as test rows."""
        return targets_of(self, ds, self.seed_, TEST_STAGE)

    def _row_map(self, what: Any) -> CrbmOutput:
        name, n_sweeps = what
        sweeps = sweeps_of(self, n_sweeps)
        how = self._shape, self._theta, self.inference_, sweeps, self.tol
        return CrbmOutput(*how, name, float(self.damping))

    def _output(
        self, X: Any, what: str, n_sweeps: int | None, out: Any, client: Any, overwrite: bool, callbacks: Any
    ) -> Any:
        check_is_fitted(self)
        if self._source != "plain":
            return self._mapped(X, what, n_sweeps, out, client, overwrite, callbacks)
        if isinstance(X, Dataset) or out is not None or is_dask_array(X):
            raise DataError(
                "this is a plain RBM: it has no x to predict from, and all rows have the same beliefs; leave "
                "X out (transform takes rows v)"
            )
        from scalelatent.engine.threads import single_threaded

        block, row_map = Block(self._nothing(X), None, None, 0), self._watched_map(what, n_sweeps)
        with single_threaded():
            found = row_map.apply(row_map.prepare(make_backend(self.device)), block)
        row_map.warn("the rows")
        return found

    def _mapped(
        self, X: Any, what: str, n_sweeps: int | None, out: Any, client: Any, overwrite: bool, callbacks: Any
    ) -> Any:
        """Rows through a map, with a warning where they did not meet the tolerance."""
        if self.tol is None or self.inference_ == "independent" or is_dask_array(X):
            return self._map(X, (what, n_sweeps), out, client, overwrite, callbacks)
        ds, watched = self._other_rows(X), self._watched_map(what, n_sweeps)
        if out is None:
            found = self._map_rows(ds, watched, None, client, overwrite, callbacks)
        else:  # workers have maps of their own, which tell nothing: some rows are inferred twice
            found = self._map_rows(ds, self._row_map((what, n_sweeps)), out, client, overwrite, callbacks)
            for part in _places(len(ds)):
                map_to_array(watched, ds[part], self.device, self.n_jobs)
        some = out is not None and len(ds) > MOST_LOOKED_AT
        watched.warn(f"{MOST_LOOKED_AT} rows looked at" if some else "the rows")
        return found

    def _watched_map(self, what: str, n_sweeps: int | None) -> _Watched:
        return _Watched(**vars(self._row_map((what, n_sweeps))))

    def _nothing(self, X: Any) -> np.ndarray:
        """Rows of a plain RBM: None is one."""
        x = np.empty((1, 0), dtype=np.float32) if X is None else np.asarray(X)
        if x.ndim != 2 or x.shape[1]:
            raise DataError(
                f"X has shape {x.shape}, but this is a plain RBM, which has no x: leave X out, or give rows "
                "of width 0"
            )
        return x

    def _observed_rows(self, X: Any) -> Any:
        return self._nothing(X) if self._source == "plain" else self._other_rows(X)
