"""Conditional restricted Boltzmann machines as a scikit-learn estimator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
from sklearn.utils import ClassifierTags, Tags
from sklearn.utils.validation import check_is_fitted

from scalelatent.contract.learners import Block
from scalelatent.contract.wants import Targets
from scalelatent.data import Dataset
from scalelatent.data.read.containers import opened
from scalelatent.data.read.sources import is_dask
from scalelatent.data.schema import refuse_masked
from scalelatent.engine.backend import make_backend
from scalelatent.engine.chains import learn_stream
from scalelatent.engine.mapwrite import map_to_array
from scalelatent.engine.threads import single_threaded
from scalelatent.errors import DataError
from scalelatent.estimators.base import Saved, StreamedEstimator, What
from scalelatent.estimators.companions import restored_on_failure
from scalelatent.estimators.inputs import check_finite, is_plain, validated
from scalelatent.estimators.learned import IN_PLACE, Learned
from scalelatent.estimators.session import CallbackList, FitSession
from scalelatent.estimators.steps import Rows
from scalelatent.kernels.streams import resolve_seed, stream
from scalelatent.models.crbm.model.energy import CrbmShape
from scalelatent.models.crbm.model.online import CrbmLearner
from scalelatent.models.crbm.model.predict import CrbmOutput, CrbmScoring, sweeps_in
from scalelatent.models.crbm.model.state import CrbmState

from .fit import (
    TEST_STAGE,
    check_batch,
    check_patience,
    check_rows,
    check_shape,
    fit_steps,
    fitting_state,
    given_parameters,
    hold_out,
    make_learner,
    plan,
    shape_of,
    targets_of,
)
from .output import (
    MOST_LOOKED_AT,
    Beliefs,
    WatchedOutput,
    free_energies,
    infer_rows,
    places_of,
    sweeps_of,
)
from .parameters import PARAMETERS, batch_size, choose_held_rows

if TYPE_CHECKING:
    from scalelatent.typing import ClientLike, LabelsLike, RandomState, RowsLike, ValidationLike, WeightsLike

OF_YOUR_OWN = f"{IN_PLACE}, or make a model of weights of your own: ConditionalRBM.from_weights"
_FIELDS = ("W", "Wvx", "Whx", "bv", "bh")


def _parameter(name: str) -> Learned:
    return Learned(OF_YOUR_OWN, lambda model: getattr(model._shape.split(model._theta), name))


class ConditionalRBM(StreamedEstimator):
    """Binary outputs of any width from observed rows, by a conditional RBM trained by belief propagation.

    p(v, h | x) is proportional to exp(v'W h + v'Wvx x + h'Whx x + bv'v + bh'h): given x, an RBM of its own
    for each row. Denoises and completes images, predicts multi-labels or any other structured output. Fits
    numpy arrays, memmaps, zarr and dask arrays, scipy CSR and :class:`~scalelatent.Dataset` rows of any
    number, in process or on a Dask cluster, with the same bits. Without x it is a plain RBM.

    Parameters
    ----------
    n_hidden : int, default 256
    learner : {"mle-bp", "mle-mf", "cd", "pcd", "cd-percloss", "mssvm", "lssvm", "logistic"}
        What takes the place of the intractable expectation: sum-product belief propagation, mean field,
        contrastive divergence, its persistent chains (one for each place of a batch), a search that draws h
        for the perceptron loss, loss-augmented inference of the maximum-margin learners by mixed- or
        max-product belief propagation. "logistic" has no hidden units.
    inference : {"sum-product", "mixed-product", "max-product", "mean-field"} or None
        What predicts. None: the learner's own (mean field for the Gibbs learners); training and test should
        match.
    n_sweeps : int or None
        Sweeps of an inference. None: 7 + epoch, epochs counted from 1; predictions take those of the epoch
        that is kept.
    tol : float or None
        End the sweeps of a row when no belief moved by more; learning takes one sweep more, which leaves the
        pair beliefs behind. None: always ``n_sweeps``.
    damping : float, default 1
        Weight of the new messages of "sum-product" and "max-product", in (0, 1], in training and prediction;
        the rest is that of the sweep before. 1: no damping. Max-product often settles with 0.5 only.
    gibbs_steps : int or None
        k of the Gibbs learners, and steps of the search of "cd-percloss"; refused for others. None: 1, of the
        latter 10.
    loss : "hamming" or array-like, shape (v,) or (2, v)
        Of "mssvm" and "lssvm", refused for others: 1 for each wrong output, or what each costs; two rows are
        the costs of an output that is wrongly 1, and wrongly 0.
    learning_rate : float, sequence of (rate, epochs), or None
        Of the mean gradient of a batch. None: .2 for 4 epochs, or as many as show 5,600 rows,
        .1 for 3, or as many as show 4,200, then .05; ``partial_fit`` takes .05.
    momentum, weight_decay : float, default 0
        The decay is that of the three matrices.
    batch_size : int or None
        Rows of a gradient. None: 20, or what fewer rows and ``n_chains`` allow (``batch_size_``).
    n_epochs : int, "paper" or None
        Passes over the rows. "paper": 50. None: at most 50; the fit ends when epochs that show 4,000
        rows, and at least 3, have each had a validation error that is not at least .5 % lower than the best
        before. Without ``validation``, and from 100 rows on, every tenth row is held out for that (of many,
        10,000 rows in 64 runs). A plain RBM, which predicts nothing, and fewer rows take as many epochs as
        show 20,000 rows, from 10 to 50.
    n_chains : int or None
        Parts of a batch that are computed independently, by threads or workers; ``batch_size`` is a multiple
        of it. None: one for twenty rows, two from 20 rows on, at most 8; 1 reads the parameters least, and is
        best for one thread. It changes bits of rounding only, the number of workers none; with
        ``local_steps`` it changes the result.
    local_steps : int or None
        Chains take so many steps by themselves, on batches of ``batch_size`` rows of their own, then their
        parameters are averaged: for large clusters, and slow networks. None: a step a batch. With
        ``n_chains=1`` nothing is averaged: the steps of one chain, whose parameters stay on the card of a GPU
        for so many, and are climbed where they lie on a CPU, the fastest way on one thread.
    patience : int or None
        End after so many epochs without a better validation error, which needs validation rows, or
        ``n_epochs=None``, which holds some out. None: all epochs. The parameters that did best on the
        validation rows are kept either way.
    init_scale : float, default 0.01
        Standard deviation of the first W and Whx, at most 5; all else begins at 0.
    conditional : bool, default True
        False: a plain RBM of the rows ``X``, as :class:`sklearn.neural_network.BernoulliRBM` is one.
    corruption : dict or None
        Learn to restore: rows are clean v, and x is made of them again in each epoch. ``{"kind": "flip",
        "rate": 0.1}`` or ``{"kind": "occlude", "size": 8}`` (a square patch set to 0).
    warm_start : bool
        Start from the parameters of the last fit.
    random_state : int, Generator, RandomState or None
        None draws a seed and keeps it in ``seed_``. A seed never changes the speed.
    device : {"auto", "cpu", "gpu"}
    n_jobs : int or None
        Threads of a fit in this process; None is what ``joblib.parallel_config`` says, else all cores. The
        result is the same for any number.

    Attributes
    ----------
    W_ : ndarray of float32, shape (v, h)
    Wvx_ : ndarray of float32, shape (v, x)
    Whx_ : ndarray of float32, shape (h, x)
    bv_ : ndarray of float32, shape (v,)
    bh_ : ndarray of float32, shape (h,)
    batch_size_ : int
        Rows of a gradient.
    n_sweeps_ : int
        Sweeps of a prediction.
    inference_ : str
        What predicts.
    n_iter_, best_epoch_ : int
        Epochs, and the one whose parameters these are.
    history_ : list of dict
        One record an epoch: objective (log-loss of the outputs' beliefs, nats an output, or of the other
        learners their energy gap), train_error (of the negative phase), validation_error, changed_error
        (among outputs that x has otherwise), converged (share of rows), learning_rate, n_sweeps, …
    best_validation_error_ : float or None
    seed_ : int
    n_features_in_ : int

    Notes
    -----
    ``X`` are the observed rows and ``y`` the outputs v, 0 or 1: (n, v), dense, CSR multi-labels, or a
    Dataset; a Dataset ``X`` with targets brings its own. With ``corruption`` ``X`` are the clean rows, with
    ``conditional=False`` those of a plain RBM (``y`` is ignored); so are the rows ``y`` where ``X`` is None
    or of width 0. ``validation`` is of the same form. A resumed fit may have another ``learning_rate`` or
    ``n_epochs``, which hold from there on; one that holds rows out keeps ``n_epochs=None``.

    ``transform`` gives the beliefs of the hidden units, float32 (n, h); of a plain RBM, whose rows are v,
    their probabilities given v.

    References
    ----------
    W. Ping, A. Ihler, "Belief propagation in conditional RBMs for structured prediction", AISTATS (2017).

    Examples
    --------
    Rows of 12 outputs, two patterns; a tenth of the inputs is flipped:

    >>> rng = np.random.default_rng(0)
    >>> v = np.repeat([[1] * 6 + [0] * 6, [0] * 6 + [1] * 6], 100, axis=0).astype("uint8")
    >>> x = v ^ (rng.random(v.shape) < 0.1)
    >>> m = ConditionalRBM(n_hidden=4, n_epochs=5, learning_rate=0.5, random_state=0).fit(x, v)
    >>> m.predict(x).shape, bool(m.score(x, v) > 0.99)
    ((200, 12), True)
    """

    _kind = "crbm"
    _rounds_rows = True
    _parameters = PARAMETERS
    _sign_of_fit = "_theta"
    W_ = _parameter("W")
    Wvx_ = _parameter("Wvx")
    Whx_ = _parameter("Whx")
    bv_ = _parameter("bv")
    bh_ = _parameter("bh")
    batch_size_: int
    best_epoch_: int
    best_validation_error_: float | None
    inference_: str
    n_sweeps_: int
    # Where outputs come from: pairs of rows, clean rows that are corrupted, or rows themselves.
    _source: str = "pairs"
    _n_outputs: int
    # (rows, period): these last rows of each period of the training rows are held out to end the fit.
    _held: tuple[int, int] = (0, 1)
    _shape: CrbmShape
    _theta: np.ndarray
    # What a stream goes on from beside the parameters; None after a fit or a load.
    _stream_state: CrbmState | None

    def __init__(
        self,
        *,
        n_hidden: int = 256,
        learner: str = "mle-bp",
        inference: str | None = None,
        n_sweeps: int | None = None,
        tol: float | None = None,
        damping: float = 1.0,
        gibbs_steps: int | None = None,
        loss: npt.ArrayLike = "hamming",
        learning_rate: float | Sequence[tuple[float, int]] | None = None,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        batch_size: int | None = None,
        n_epochs: int | str | None = None,
        n_chains: int | None = None,
        local_steps: int | None = None,
        patience: int | None = None,
        init_scale: float = 0.01,
        conditional: bool = True,
        corruption: Mapping[str, Any] | None = None,
        warm_start: bool = False,
        random_state: RandomState = None,
        device: str = "auto",
        n_jobs: int | None = None,
    ) -> None:
        self.n_hidden = n_hidden
        self.learner = learner
        self.inference = inference
        self.n_sweeps = n_sweeps
        self.tol = tol
        self.damping = damping
        self.gibbs_steps = gibbs_steps
        self.loss = loss
        self.learning_rate = learning_rate
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.batch_size = batch_size
        self.n_epochs = n_epochs
        self.n_chains = n_chains
        self.local_steps = local_steps
        self.patience = patience
        self.init_scale = init_scale
        self.conditional = conditional
        self.corruption = corruption
        self.warm_start = warm_start
        self.random_state = random_state
        self.device = device
        self.n_jobs = n_jobs

    # -- rows ------------------------------------------------------------------------------------------------

    def _pairs(self, X: Any, y: LabelsLike | None, *, reset: bool = False, what: str = "X") -> Dataset:
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
        given = None
        if not isinstance(v, Dataset):
            given = v = opened(v, what)
            if is_plain(v):
                refuse_masked(v, what)
                v = np.asarray(v) if not hasattr(v, "tocsr") else v
                if v.ndim == 2:
                    check_finite(v.tocsr() if hasattr(v, "tocsr") else v, "the rows v")
            v = Dataset.from_arrays(v)
        if reset:
            self._set_width(v.n_features)
            self._n_outputs = v.n_features
        self._checked_width(v, what)
        if hasattr(given, "columns"):
            validated(self, given, what=what, reset=reset, skip_check_array=True, ensure_2d=False)
        if not v.is_stored and v.lazy(0, 1) is None:
            v.read_binary(0, len(v))
        return v

    def _paired_rows(self, X: RowsLike, y: LabelsLike | None, reset: bool, what: str) -> Dataset:
        """Rows beside outputs."""
        ds = self._given_rows(X, what=what, reset=reset)
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

    def _training_rows(
        self, X: RowsLike, y: LabelsLike | None, sample_weight: WeightsLike | None, *, reset: bool = True
    ) -> Dataset:
        return self._pairs(X, y, reset=reset)

    def _held_rows(self, X: RowsLike, y: LabelsLike | None) -> Dataset:
        return self._pairs(X, y, what="validation")

    def _validation_rows(self, validation: ValidationLike | None) -> Dataset | None:
        alone = self._source != "pairs" and not isinstance(validation, Dataset)
        if alone and getattr(validation, "ndim", 0) == 2:
            validation = None, validation
        return super()._validation_rows(validation)

    def _check_rows(self, train: Dataset, held: Dataset | None) -> None:
        check_rows(self, train)
        check_batch(self, train)
        check_patience(self, held is not None or choose_held_rows(self, train)[0] > 0)

    def _held_out(self, train: Dataset, held: Dataset | None) -> Dataset | None:
        self._held = choose_held_rows(self, train) if held is None else (0, 1)
        return hold_out(train, self._held) if self._held[0] else held

    def _search_rows(self, X: RowsLike, y: LabelsLike | None, sample_weight: WeightsLike | None) -> Dataset:
        if sample_weight is not None:
            raise DataError("sample_weight: a conditional RBM takes each row alike: leave the weights out")
        return self._pairs(X, y, reset=True)

    def _search_fit(self, rows: Dataset, **how: Any) -> Self:
        plain = not rows.has_targets and self.corruption is None
        return self.fit(*((None, rows) if plain else (rows,)), **how)

    def _scored_rows(self, X: RowsLike, y: LabelsLike | None, sample_weight: WeightsLike | None) -> Dataset:
        ds = self._pairs(X, y)
        return ds if sample_weight is None else ds.with_weight(sample_weight)

    # -- fit -------------------------------------------------------------------------------------------------

    _fit_steps = fit_steps
    _plan = plan

    def _what_decides(self) -> dict[str, Any]:
        return super()._what_decides() | {"batch_size": batch_size(self)}

    def _keep(self, learner: CrbmLearner, state: CrbmState, history: list[dict[str, Any]]) -> None:
        theta, epoch = learner.weights(state)
        self._keep_parameters(learner.shape, theta, epoch)
        self.inference_ = learner.validation_inference
        self.n_iter_, self.history_ = state.iteration, history
        self.best_validation_error_ = float(state.best_error) if learner.has_validation else None

    def _keep_parameters(self, shape: CrbmShape, theta: np.ndarray, epoch: int) -> None:
        self._shape, self._theta = shape, theta
        self.best_epoch_ = epoch
        self.n_sweeps_ = sweeps_in(None if self.n_sweeps is None else int(self.n_sweeps), epoch)
        self._stream_state = None

    def partial_fit(self, X: RowsLike, y: LabelsLike | None = None) -> Self:
        """Learn from some more rows, at once: a step for each ``batch_size`` of them, in their order.

        Goes on from a fit, from a loaded model or from earlier calls; velocity and persistent chains begin
        again after a fit, and where a changed parameter changes their size. Sweeps stay those of the epoch
        reached (``n_sweeps_``).

        Parameters
        ----------
        X : array-like, shape (n, x), Dataset or None
            One row or more.
        y : array-like or Dataset, shape (n, v)

        Returns
        -------
        self

        Raises
        ------
        DataError, ValueError
            As in :meth:`.ConditionalRBM.fit`; a call may have fewer rows than a batch.

        Examples
        --------
        >>> import scalelatent as sl
        >>> rng = np.random.default_rng(0)
        >>> m = sl.ConditionalRBM(n_hidden=2, learning_rate=0.5, random_state=0)
        >>> for _ in range(20):
        ...     x = rng.integers(0, 2, (20, 6)).astype("uint8")
        ...     m = m.partial_fit(x, 1 - x)
        >>> bool(m.score(x, 1 - x) > 0.9)
        True
        """
        with restored_on_failure(self):
            self._check_params()
            first = not hasattr(self, "W_")
            ds = self._pairs(X, y, reset=first)
            check_rows(self, ds)
            if first:
                self.seed_ = resolve_seed(self.random_state)
                self._shape = shape_of(self, ds)
                self._theta = self._shape.start(stream(self.seed_, "crbm-start"), float(self.init_scale))
                self.n_iter_, self.history_ = 0, []
            learner = make_learner(self, ds, None, self.seed_)
            # A stream goes on at the last rate of the default schedule.
            rates = learner.rates[-1:] if self.learning_rate is None else learner.rates
            size = batch_size(self)
            learner = replace(learner, rates=rates, n_chains=1, chain_rows=size, local_steps=0)
            check_shape(self, learner.shape)
            self.inference_, self.batch_size_ = learner.validation_inference, batch_size(self)
            epoch = 1 if first else self.best_epoch_
            state = None if first else self._stream_state
            if state is None:
                state = replace(learner.start(self._theta), iteration=epoch - 1)
            state = fitting_state(learner, state)
            state = learn_stream(learner, state, ds, self.device, batch_size(self), int(state.sums[2]))
            self._keep_parameters(learner.shape, state.theta, epoch)
            self.best_validation_error_ = None  # that of a fit was of other parameters
            self._stream_state = state
        return self

    @classmethod
    def from_weights(
        cls,
        W: npt.ArrayLike,
        bv: npt.ArrayLike,
        bh: npt.ArrayLike,
        *,
        Wvx: npt.ArrayLike | None = None,
        Whx: npt.ArrayLike | None = None,
        inference: str = "sum-product",
        n_sweeps: int = 20,
        **params: Any,
    ) -> Self:
        """A fitted model with parameters that were made elsewhere, for inference, or to learn on from.

        Parameters
        ----------
        W : array-like, shape (v, h)
            Of :class:`sklearn.neural_network.BernoulliRBM` ``components_.T``.
        bv, bh : array-like, shape (v,) and (h,)
            Biases of the outputs and of the hidden units.
        Wvx, Whx : array-like, shape (v, x) and (h, x), or None
            What the observed rows do to them; one of the two may be None, which is 0. Both None: a plain RBM.
        inference, n_sweeps
            Of predictions, as in the constructor.
        **params
            Other parameters of the constructor.

        Returns
        -------
        ConditionalRBM

        Raises
        ------
        DataError
            Shapes that do not belong together, non-finite values, couplings beyond what messages in float32
            bear.
        ValueError
            A parameter out of range.

        Examples
        --------
        >>> m = ConditionalRBM.from_weights([[4.0], [4.0]], [-2, -2], [-2], Wvx=np.eye(2))
        >>> m.predict([[3.0, 0.0]])
        array([[1, 1]], dtype=uint8)
        """
        params = {"n_hidden": max(np.shape(W)[-1:] or (1,))} | params
        plain = Wvx is None and Whx is None
        model = cls(inference=inference, n_sweeps=n_sweeps, conditional=not plain, **params)
        model._check_params()
        shape, theta = given_parameters(W, bv, bh, Wvx, Whx)
        model._source, model._n_outputs = "plain" if plain else "pairs", shape.n_visible
        model.n_features_in_ = shape.n_visible if plain else shape.n_observed
        model.inference_, model.n_iter_, model.history_ = inference, 0, []
        model.best_validation_error_, model.seed_ = None, resolve_seed(model.random_state)
        model.batch_size_ = batch_size(model)
        model._keep_parameters(shape, theta, 1)
        return model

    # -- outputs ---------------------------------------------------------------------------------------------

    @property
    def _transformed(self) -> What:  # type: ignore[override]
        return ("given" if self._source == "plain" else "hidden"), None

    @property
    def _n_features_out(self) -> int:
        return self._shape.n_hidden

    def predict(
        self,
        X: RowsLike = None,
        *,
        n_sweeps: int | None = None,
        out: str | Path | None = None,
        client: ClientLike | None = None,
        overwrite: bool = False,
        callbacks: CallbackList = (),
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
        X: RowsLike = None,
        *,
        n_sweeps: int | None = None,
        out: str | Path | None = None,
        client: ClientLike | None = None,
        overwrite: bool = False,
        callbacks: CallbackList = (),
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

    def score(
        self,
        X: RowsLike,
        y: LabelsLike | None = None,
        sample_weight: WeightsLike | None = None,
        *,
        callbacks: CallbackList = (),
    ) -> float:
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
        self,
        X: RowsLike,
        y: LabelsLike | None = None,
        sample_weight: WeightsLike | None = None,
        *,
        callbacks: CallbackList = (),
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
        X: RowsLike = None,
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
        rows = self._nothing(X) if self._source == "plain" else self._given_rows(X)
        return infer_rows(
            self, rows, inference=inference, n_sweeps=n_sweeps, tol=tol, pairs=pairs, log_z=log_z
        )

    def free_energy(self, X: RowsLike, y: LabelsLike | None = None) -> np.ndarray:
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
        ds = self._pairs(X, y)
        return free_energies(self._shape, self._theta, ds, self._test_targets(ds))

    def _test_targets(self, ds: Dataset) -> Targets:
        """Where the outputs of rows come from: clean ones that come alone are corrupted as test rows."""
        return targets_of(self, ds, self.seed_, TEST_STAGE)

    def _row_map(self, what: tuple[str, int | None]) -> CrbmOutput:
        name, n_sweeps = what
        sweeps = sweeps_of(self, n_sweeps)
        how = self._shape, self._theta, self.inference_, sweeps, self.tol
        return CrbmOutput(*how, name, float(self.damping))

    def _output(
        self,
        X: RowsLike,
        what: str,
        n_sweeps: int | None,
        out: str | Path | None,
        client: ClientLike | None,
        overwrite: bool,
        callbacks: CallbackList,
    ) -> Any:
        """Rows through a map, with a warning where they did not meet the tolerance."""
        check_is_fitted(self)
        to, X = (out, client, overwrite, callbacks), opened(X, "X")
        row_map = self._row_map((what, n_sweeps))
        watched, told = WatchedOutput(**vars(row_map)), "the rows"
        if self._source == "plain":
            if isinstance(X, Dataset) or out is not None or is_dask(X):
                raise DataError(
                    "this is a plain RBM: it has no x to predict from, and all rows have the same beliefs; "
                    "leave X out (transform takes rows v)"
                )
            block = Block(self._nothing(X), None, None, 0)
            with single_threaded():
                found = watched.apply(watched.prepare(make_backend(self.device)), block)
        elif self.tol is None or self.inference_ == "independent" or is_dask(X):
            return self._map(X, (what, n_sweeps), *to)
        elif out is None:
            found = self._map_rows(self._given_rows(X), watched, *to)
        else:  # workers have maps of their own, which tell nothing: some rows are inferred twice
            ds = self._given_rows(X)
            found = self._map_rows(ds, row_map, *to)
            for part in places_of(len(ds)):
                map_to_array(watched, ds[part], self.device, self.n_jobs)
            if len(ds) > MOST_LOOKED_AT:
                told = f"{MOST_LOOKED_AT} rows looked at"
        watched.warn(told)
        return found

    def _nothing(self, X: RowsLike) -> np.ndarray:
        """Rows of a plain RBM: None is one."""
        x = np.empty((1, 0), dtype=np.float32) if X is None else np.asarray(X)
        if x.ndim != 2 or x.shape[1]:
            raise DataError(
                f"X has shape {x.shape}, but this is a plain RBM, which has no x: leave X out, or give rows "
                "of width 0"
            )
        return x

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.target_tags.required = False
        tags.target_tags.single_output = False
        tags.target_tags.multi_output = True
        # Not a classifier, which has one column of classes; but each output is 0 or 1.
        tags.classifier_tags = ClassifierTags(multi_class=False, multi_label=True)
        tags.transformer_tags.preserves_dtype = []
        return tags

    # -- saving ----------------------------------------------------------------------------------------------

    def _state(self) -> Saved:
        arrays = {name: getattr(self, f"{name}_") for name in _FIELDS}
        values = {
            "source": self._source,
            "shape": [self._shape.n_visible, self._shape.n_hidden, self._shape.n_observed],
            "inference": self.inference_,
            "batch_size": self.batch_size_,
            "best_epoch": self.best_epoch_,
            "best_validation_error": self.best_validation_error_,
        }
        return values, arrays

    def _restore(self, values: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        shape = CrbmShape(*values["shape"])
        theta = np.concatenate([arrays[name].reshape(-1) for name in _FIELDS]).astype(np.float32)
        self._source, self._n_outputs = values["source"], shape.n_visible
        self.inference_ = values["inference"]
        self.best_validation_error_ = values["best_validation_error"]
        self.batch_size_ = values.get("batch_size") or batch_size(self)
        self._keep_parameters(shape, theta, values["best_epoch"])


def _check_counts(n_rows: int, y: Any) -> None:
    found = int(y.shape[0]) if hasattr(y, "shape") else len(y)
    if found != n_rows:
        raise DataError(f"X has {n_rows} rows, but y has {found}: give one output row a row")


def _target_rows(y: LabelsLike | None, n_rows: int) -> Dataset:
    """Outputs that are arrays, as a dataset."""
    y = opened(y, "y")
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
