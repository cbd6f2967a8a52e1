"""The estimator of conditional restricted Boltzmann machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
from sklearn.utils import ClassifierTags, Tags
from sklearn.utils.validation import check_is_fitted

from scalelatent.contract.block_requirements import Targets
from scalelatent.contract.learners import Block
from scalelatent.data import Dataset
from scalelatent.data.feature_names import frame_names
from scalelatent.data.read.containers import opened
from scalelatent.data.read.sources import is_dask
from scalelatent.data.schema import refuse_masked
from scalelatent.engine.backend import make_backend
from scalelatent.engine.chains import learn_stream
from scalelatent.engine.mapwrite import map_to_array
from scalelatent.engine.threads import single_threaded
from scalelatent.errors import DataError
from scalelatent.estimators.base import OutputName, SavedModelState, StreamedEstimator
from scalelatent.estimators.fit_services import restored_on_failure
from scalelatent.estimators.fitted_attributes import CHANGE_IN_PLACE, FittedAttribute
from scalelatent.estimators.gpu_results import follows_rows
from scalelatent.estimators.inputs import check_finite, check_frame, is_in_memory
from scalelatent.estimators.session import CallbackList, FitSession
from scalelatent.estimators.steps import MappedRows
from scalelatent.kernels.streams import resolve_seed, stream
from scalelatent.models.crbm.model.beliefs import choose_n_sweeps
from scalelatent.models.crbm.model.energy import CrbmShape
from scalelatent.models.crbm.model.online import CrbmLearner
from scalelatent.models.crbm.model.predict import CrbmOutput, CrbmScoring
from scalelatent.models.crbm.model.state import CrbmState

from .fit import (
    TEST_STAGE,
    check_batch,
    check_patience,
    check_rows,
    check_shape,
    choose_targets,
    fit_steps,
    hold_out,
    make_learner,
    make_shape,
    pack_parameters,
    plan,
    resize_state,
)
from .output import (
    MAX_CHECKED,
    Beliefs,
    CountingOutput,
    check_sweeps,
    choose_checked_rows,
    compute_free_energies,
    infer_rows,
)
from .parameters import PARAMETERS, choose_batch_size, choose_held_rows

if TYPE_CHECKING:
    from scalelatent.typing import ClientLike, LabelsLike, RandomState, RowsLike, ValidationLike, WeightsLike

# Advice in the error that an assignment to a learned attribute raises.
ASSIGNMENT_ADVICE = f"{CHANGE_IN_PLACE}, or make a model from your own weights: ConditionalRBM.from_weights"
_PARAMETER_NAMES = ("W", "Wvx", "Whx", "bv", "bh")


def _make_attribute(name: str) -> FittedAttribute:
    """Return a property of the estimator that reads the array ``name`` from the parameter vector."""
    return FittedAttribute(ASSIGNMENT_ADVICE, lambda model: getattr(model._shape.split(model._theta), name))


class ConditionalRBM(StreamedEstimator):
    """Conditional RBM that predicts binary outputs from observed rows, trained by belief propagation.

    For a row x, its outputs v and hidden units h, p(v, h | x) is proportional to exp(v'W h + v'Wvx x +
    h'Whx x + bv'v + bh'h): given x, each row has an RBM with its own biases and shared W. The model restores
    and completes images, and predicts multi-labels. Without x it is a plain RBM. Rows are numpy arrays,
    memmaps, zarr or dask arrays, scipy CSR matrices, or a :class:`~scalelatent.Dataset` of any length. A fit
    in this process and a fit on a Dask cluster give the same bits.

    Parameters
    ----------
    n_hidden : int, default 256
        Number of hidden units; the learner "logistic" has none.
    learner : {"mle-bp", "mle-mf", "cd", "pcd", "cd-percloss", "mssvm", "lssvm", "logistic"}
        How the intractable expectation of the gradient is approximated: sum-product belief propagation, mean
        field, contrastive divergence, persistent contrastive divergence (a Gibbs chain per row of a batch),
        perceptron loss with a sampling search, or loss-augmented inference of the maximum-margin learners by
        mixed-product or max-product belief propagation. "logistic" needs no approximation.
    inference : {"sum-product", "mixed-product", "max-product", "mean-field"} or None
        Inference of predictions and of the validation error. None: the inference with which the learner
        trains, which is recommended, or mean field for the sampling learners "cd", "pcd" and "cd-percloss".
    n_sweeps : int or None
        Sweeps (rounds of messages over all edges of the graph) of an inference, or their largest number if
        ``tol`` is set. None: 7 + k in epoch k, and in a prediction as many as in the best epoch.
    tol : float or None
        The inference of a row stops after a sweep in which no estimate of P(unit = 1) changed by more than
        ``tol``; training by "mle-bp" then makes one more sweep. None: always ``n_sweeps`` sweeps.
    gibbs_steps : int or None
        Gibbs steps of "cd", "pcd" and "cd-percloss"; other learners refuse it. None means 10 for
        "cd-percloss", and 1 for the other two.
    learning_rate : float, sequence of (rate, epochs), or None
        Factor of the mean gradient of a batch; the last rate of a sequence holds until the end. None: 0.2 for
        at least 4 epochs and 5,600 rows, then 0.1 for at least 3 epochs and 4,200 rows, then 0.05;
        ``partial_fit`` uses 0.05. Early stopping (``n_epochs=None``) lowers the rate further.
    momentum, weight_decay : float, default 0
        Momentum of the steps (below 1), and decay of the matrices W, Wvx and Whx.
    batch_size : int or None
        Number of rows of a gradient. None: 20, or fewer for a small dataset; if ``n_chains`` is set without
        ``local_steps``, a multiple of it.
    n_epochs : int, "paper" or None
        Passes over the rows. "paper": 50. None: at most 50, with early stopping. If no epoch lowers the best
        validation error by 0.5 % within 3 epochs and 4,000 rows, learning continues from the best parameters
        at a quarter of the rate. The fit ends when a lower rate brings no such fall; ``patience`` replaces
        this rule. Without ``validation``, a fit of at least 100 rows holds out every tenth row, but at most
        10,000 rows or 256 MiB; a fit of fewer rows takes 50 epochs. The validation error of a plain RBM is
        the share of outputs that are wrong if they are predicted from the hidden units given the row.
    n_chains : int or None
        Parts of a batch that threads or workers compute independently. Without ``local_steps``,
        ``batch_size`` must be a multiple of it, and None means one part per 20 rows, but two for 20 to 39
        rows, and at most 8. With ``local_steps``, None means 4, and the number changes the result; otherwise
        it changes only the rounding. Each part reads all parameters, so one is fastest on one thread.
    local_steps : int or None
        Each of ``n_chains`` parts takes this many steps, on its own batches of ``batch_size`` rows, before
        the parameters of all parts are averaged: for large clusters and slow networks. None: one step per
        batch. With ``n_chains=1`` the parameters stay on the GPU, or are updated in place on the CPU, which
        is fastest on one thread.
    patience : int or None
        End the fit after this many epochs without a better validation error. None: take all epochs or, if
        ``n_epochs`` is None, follow its rule. The parameters with the lowest error are kept in each case.
    init_scale : float, default 0.01
        Standard deviation of the initial W and Whx, at most 5; the other parameters start at 0.
    conditional : bool, default True
        False: a plain RBM of the rows ``X``, as :class:`sklearn.neural_network.BernoulliRBM`.
    corruption : dict or None
        Learn to restore clean rows v from corrupted rows x, which are drawn again in each epoch: ``{"kind":
        "flip", "rate": 0.1}`` (share of values) or ``{"kind": "occlude", "size": 8}`` (a square set to 0).
    warm_start : bool, default False
        Start from the parameters of the last fit. If the last fit had ``learner="logistic"``, hidden units
        with random weights are added; "cd" and "cd-percloss" have fewer errors from this start than from
        random weights.
    random_state : int, Generator, RandomState or None
        None draws a seed and keeps it in ``seed_``.
    device : {"auto", "cpu", "gpu"}
        "auto" uses a GPU if there is one, else the CPU.
    n_jobs : int or None
        Threads in this process; None: the setting of ``joblib.parallel_config``, else all cores. The result
        is the same for any number.

    Attributes
    ----------
    W_ : ndarray of float32, shape (v, h)
    Wvx_ : ndarray of float32, shape (v, x)
    Whx_ : ndarray of float32, shape (h, x)
    bv_ : ndarray of float32, shape (v,)
    bh_ : ndarray of float32, shape (h,)
    batch_size_ : int
        Number of rows of a gradient.
    n_sweeps_ : int
        Sweeps of a prediction.
    inference_ : str
        Inference of a prediction.
    n_iter_, best_epoch_ : int
        Number of epochs, and the epoch of these parameters: the best or, without validation rows, the last.
    history_ : list of dict
        One record per epoch: objective (log-loss in nats per output or, for learners without beliefs, energy
        gap), train_error (share of outputs that training predicts wrong), validation_error, changed_error
        (among outputs that differ from x), converged (share of rows), learning_rate, n_sweeps, …
    best_validation_error_ : float or None
        Share of wrong outputs; None without validation rows, and after ``partial_fit``.
    seed_ : int
    n_features_in_ : int

    Notes
    -----
    ``X`` are the observed rows and ``y`` the outputs v, 0 or 1: (n, v), dense, CSR, or a Dataset; ``X`` may
    be a Dataset with targets. With ``corruption`` ``X`` are the clean rows, and with ``conditional=False``
    the rows of a plain RBM (``y`` is ignored). If ``X`` is None or has width 0, ``y`` are these rows.
    ``validation`` has the same form. A resumed fit may change ``learning_rate`` and ``n_epochs``, unless the
    fit holds out rows (``n_epochs=None``).

    A fit standardises the columns of ``X`` unless all values are 0 or 1: units and offsets of columns do not
    change the predictions. The learned parameters are those for ``X`` as it is. ``partial_fit`` does not
    standardise columns, so scale them first.

    ``transform`` returns estimates of P(h = 1 | x), float32 (n, h); for a plain RBM it returns P(h = 1 | v).

    References
    ----------
    W. Ping, A. Ihler, "Belief propagation in conditional RBMs for structured prediction", AISTATS (2017).

    Examples
    --------
    Rows of 12 outputs with two patterns; a tenth of the inputs is flipped:

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
    _fitted_attribute = "_theta"
    W_ = _make_attribute("W")
    Wvx_ = _make_attribute("Wvx")
    Whx_ = _make_attribute("Whx")
    bv_ = _make_attribute("bv")
    bh_ = _make_attribute("bh")
    batch_size_: int
    best_epoch_: int
    best_validation_error_: float | None
    inference_: str
    n_sweeps_: int
    # The training data is "pairs" (rows x and their outputs v), "corruption" (outputs v, from which x is
    # made) or "plain" (rows v without x).
    _source: str = "pairs"
    _n_outputs: int
    # (rows, period): the fit holds out the last ``rows`` rows of each ``period`` rows for validation.
    _held: tuple[int, int] = (0, 1)
    _shape: CrbmShape
    _theta: np.ndarray
    _stream_state: CrbmState | None  # State from which the next partial_fit continues; None after fit or load

    def __init__(
        self,
        *,
        n_hidden: int = 256,
        learner: str = "mle-bp",
        inference: str | None = None,
        n_sweeps: int | None = None,
        tol: float | None = None,
        gibbs_steps: int | None = None,
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
        self.gibbs_steps = gibbs_steps
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

    def _make_pairs(self, X: Any, y: LabelsLike | None, *, reset: bool = False, name: str = "X") -> Dataset:
        """Return rows x with outputs v, or rows v alone, as a dataset; ``name`` is for error messages.

        With ``reset``, set the kind of the training data, ``_source``, by the arguments.
        """
        no_x = X is None or (not isinstance(X, Dataset) and getattr(X, "shape", (0, 1))[1:] == (0,))
        if not self.conditional and not no_x:
            y = None  # a plain RBM ignores y, as scikit-learn's transformers do
        if no_x and y is not None and X is not None:
            _check_counts(int(X.shape[0]), y)
        if no_x and not reset and self._source == "pairs":
            raise DataError("X is missing: the model was fitted on rows x and outputs v, so pass both")
        if reset:
            self._source = "pairs"
            if self.corruption is not None:
                self._source = "corruption"
            elif no_x or not self.conditional:
                self._source = "plain"
        stored_pairs = not reset and isinstance(X, Dataset) and X.has_targets
        if no_x or (self._source != "pairs" and y is None and not stored_pairs):
            X = y if no_x else X
            if X is None:
                raise DataError(
                    f"{type(self).__name__} received no rows: pass X and the outputs y, or y alone for a "
                    "plain RBM"
                )
            return self._open_outputs(X, reset, name)
        if self._source == "plain":
            raise DataError(
                f"{name}: this is a plain RBM, which learns rows alone, but there are outputs y as well: "
                "pass one of the two, or set conditional=True"
            )
        return self._pair_rows(X, y, reset, name)

    def _open_outputs(self, v: Any, reset: bool, name: str) -> Dataset:
        """Return rows v, which are the outputs, as a dataset; raise an error if they are not binary."""
        if not isinstance(v, Dataset):
            v = opened(v, name)
            names = frame_names(v)
            if is_in_memory(v):
                refuse_masked(v, name)
                check_frame(v, name)
                v = np.asarray(v) if not hasattr(v, "tocsr") else v
                if v.ndim == 2:
                    check_finite(v.tocsr() if hasattr(v, "tocsr") else v, "the rows v")
            v = Dataset.from_arrays(v, feature_names=names)
        if reset:
            self._n_outputs = v.n_features
        self._checked_features(v, name, reset)
        if not v.is_stored and v.lazy(0, 1) is None:
            v.read_binary(0, len(v))
        return v

    def _pair_rows(self, X: RowsLike, y: LabelsLike | None, reset: bool, name: str) -> Dataset:
        """Return rows x with their outputs y as a dataset; raise an error if they do not fit the model."""
        ds = self._given_rows(X, name=name, reset=reset)
        if y is not None:
            ds = ds.with_target(y if isinstance(y, Dataset) else _open_targets(y, len(ds)))
        if not ds.has_targets:
            raise DataError(
                f"{ds.url or name}: there are no outputs to learn from: pass y of shape (n, v) with 0 and 1, "
                "or a dataset with targets (Dataset.with_target, [data] target); for one column: "
                "y.reshape(-1, 1)"
            )
        if not reset and ds.n_targets != self._n_outputs:
            raise DataError(
                f"{ds.url or name}: each row has {ds.n_targets} outputs, but {type(self).__name__} has "
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
        return self._make_pairs(X, y, reset=reset)

    def _validation_dataset(self, X: RowsLike, y: LabelsLike | None) -> Dataset:
        return self._make_pairs(X, y, name="validation")

    def _validation_rows(self, validation: ValidationLike | None) -> Dataset | None:
        alone = self._source != "pairs" and not isinstance(validation, Dataset)
        if alone and getattr(validation, "ndim", 0) == 2:
            validation = None, validation
        return super()._validation_rows(validation)

    def _check_rows(self, train: Dataset, validation: Dataset | None) -> None:
        check_rows(self, train)
        check_batch(self, train)
        check_patience(self, validation is not None or choose_held_rows(self, train)[0] > 0)

    def _held_out(self, train: Dataset, validation: Dataset | None) -> Dataset | None:
        self._held = choose_held_rows(self, train) if validation is None else (0, 1)
        return hold_out(train, self._held) if self._held[0] else validation

    def _search_rows(self, X: RowsLike, y: LabelsLike | None, sample_weight: WeightsLike | None) -> Dataset:
        if sample_weight is not None:
            raise DataError(
                "sample_weight: a conditional RBM learns from all rows equally: leave out the weights"
            )
        return self._make_pairs(X, y, reset=True)

    def _search_fit(self, rows: Dataset, **how: Any) -> Self:
        plain = not rows.has_targets and self.corruption is None
        return self.fit(*((None, rows) if plain else (rows,)), **how)

    def _scored_rows(self, X: RowsLike, y: LabelsLike | None, sample_weight: WeightsLike | None) -> Dataset:
        ds = self._make_pairs(X, y)
        return ds if sample_weight is None else ds.with_weight(sample_weight)

    _fit_steps = fit_steps
    _plan = plan

    def _deciding_parameters(self) -> dict[str, Any]:
        return super()._deciding_parameters() | {"batch_size": choose_batch_size(self)}

    def _keep(self, learner: CrbmLearner, state: CrbmState, history: list[dict[str, Any]]) -> None:
        theta, epoch = learner.best_parameters(state)
        self._keep_parameters(learner.shape, theta, epoch)
        self.inference_ = learner.validation_inference
        self.n_iter_, self.history_ = state.iteration, history
        self.best_validation_error_ = float(state.best_error) if learner.has_validation else None

    def _keep_parameters(self, shape: CrbmShape, theta: np.ndarray, epoch: int) -> None:
        self._shape, self._theta = shape, theta
        self.best_epoch_ = epoch
        self.n_sweeps_ = choose_n_sweeps(None if self.n_sweeps is None else int(self.n_sweeps), epoch)
        self._stream_state = None

    def partial_fit(self, X: RowsLike, y: LabelsLike | None = None) -> Self:
        """Learn from more rows: one step per ``batch_size`` rows, in their order.

        Continues from a fit, a loaded model or earlier calls. Momentum and persistent Gibbs chains start
        again after a fit or a load, and if a changed parameter changes their size. The number of sweeps is
        that of the best epoch (``n_sweeps_``), or of epoch 1 if the model is new.

        Parameters
        ----------
        X : array-like, shape (n, x), Dataset or None
            At least one row.
        y : array-like or Dataset, shape (n, v)

        Returns
        -------
        self

        Raises
        ------
        DataError, ValueError
            As in :meth:`.ConditionalRBM.fit`; but a call may have fewer rows than a batch.

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
            ds = self._make_pairs(X, y, reset=first)
            check_rows(self, ds)
            if first:
                self.seed_ = resolve_seed(self.random_state)
                self._shape = make_shape(self, ds)
                self._theta = self._shape.start(stream(self.seed_, "crbm-start"), float(self.init_scale))
                self.n_iter_, self.history_ = 0, []
            learner = make_learner(self, ds, None, self.seed_)
            # For learning_rate=None use the last rate of the default schedule, whose first rates are larger.
            rates = learner.rates[-1:] if self.learning_rate is None else learner.rates
            size = choose_batch_size(self)
            learner = replace(learner, rates=rates, n_chains=1, chain_rows=size, local_steps=0)
            check_shape(self, learner.shape)
            self.inference_, self.batch_size_ = learner.validation_inference, choose_batch_size(self)
            epoch = 1 if first else self.best_epoch_
            state = None if first else self._stream_state
            if state is None:
                state = replace(learner.start(self._theta), iteration=epoch - 1)
            state = resize_state(learner, state)
            state = learn_stream(learner, state, ds, self.device, choose_batch_size(self), int(state.sums[2]))
            self._keep_parameters(learner.shape, state.theta, epoch)
            self.best_validation_error_ = None  # an earlier fit measured other parameters
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
        """Return a fitted model with the given parameters, for inference or further learning.

        Parameters
        ----------
        W : array-like, shape (v, h)
            For a :class:`sklearn.neural_network.BernoulliRBM` this is ``components_.T``.
        bv, bh : array-like, shape (v,) and (h,)
            Biases of the outputs and of the hidden units.
        Wvx, Whx : array-like, shape (v, x) and (h, x), or None
            Couplings of outputs and of hidden units to the observed rows. None means 0; if both are None, the
            model is a plain RBM.
        inference, n_sweeps
            Inference of predictions (not None), and its number of sweeps, as in the constructor.
        **params
            Other parameters of the constructor.

        Returns
        -------
        ConditionalRBM

        Raises
        ------
        DataError
            The shapes do not fit each other, values are not finite, or W is too large for messages in
            float32.
        ValueError
            A parameter of the constructor is out of range.

        Examples
        --------
        >>> m = ConditionalRBM.from_weights([[4.0], [4.0]], [-2, -2], [-2], Wvx=np.eye(2))
        >>> m.predict([[3.0, 0.0]])
        array([[1, 1]], dtype=uint8)
        """
        if inference is None:
            raise ValueError("inference=None is that of training, and this model has none: name an inference")
        params = {"n_hidden": max(np.shape(W)[-1:] or (1,))} | params
        plain = Wvx is None and Whx is None
        model = cls(inference=inference, n_sweeps=n_sweeps, conditional=not plain, **params)
        model._check_params()
        shape, theta = pack_parameters(W, bv, bh, Wvx, Whx)
        model._source, model._n_outputs = "plain" if plain else "pairs", shape.n_visible
        model.n_features_in_ = shape.n_visible if plain else shape.n_observed
        model.inference_, model.n_iter_, model.history_ = inference, 0, []
        model.best_validation_error_, model.seed_ = None, resolve_seed(model.random_state)
        model.batch_size_ = choose_batch_size(model)
        model._keep_parameters(shape, theta, 1)
        return model

    @property
    def _transformed(self) -> OutputName:  # type: ignore[override]
        return ("given" if self._source == "plain" else "hidden"), None

    @property
    def _n_features_out(self) -> int:
        return self._shape.n_hidden

    @follows_rows
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
        """Return the most probable value, 0 or 1, of each output, by the inference ``inference_``.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, x)
            For a plain RBM: None (one row), or rows of width 0.
        n_sweeps : int or None
            Sweeps (rounds of messages) of the inference. None: ``n_sweeps_``.
        out : path or URL, optional
            Write the states to a dataset there instead of returning an array.
        client, overwrite, callbacks
            Dask client of the cluster that writes ``out``, whether an existing ``out`` may be replaced, and
            callbacks that receive progress.

        Returns
        -------
        ndarray of uint8, shape (n, v); a lazy array for a dask array; a Dataset with ``out``

        Warns
        -----
        UserWarning
            Some rows did not meet ``tol``; with ``out``, some of at most 1,024 checked rows. There is no
            warning for a dask array.

        Examples
        --------
        >>> import scalelatent as sl
        >>> v = np.eye(6, dtype="uint8").repeat(20, axis=0)
        >>> m = sl.ConditionalRBM(n_hidden=2, n_epochs=3, learning_rate=1.0, random_state=0).fit(v, v)
        >>> bool((m.predict(v) == v).all())
        True
        """
        return self._map_output(X, "states", n_sweeps, out, client, overwrite, callbacks)

    @follows_rows
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
        """Return estimates of P(v_i = 1 | x), called beliefs, by the inference ``inference_``.

        Parameters
        ----------
        X, n_sweeps, out, client, overwrite, callbacks
            As in :meth:`predict`.

        Returns
        -------
        ndarray of float32, shape (n, v); a lazy array for a dask array; a Dataset with ``out``
            The beliefs of "mixed-product" and "max-product" are max-marginals: they order states, but are not
            probabilities.

        Examples
        --------
        >>> import scalelatent as sl
        >>> v = np.eye(6, dtype="uint8").repeat(20, axis=0)
        >>> m = sl.ConditionalRBM(n_hidden=2, n_epochs=3, learning_rate=1.0, random_state=0).fit(v, v)
        >>> m.predict_marginals(v, n_sweeps=4).shape
        (120, 6)
        """
        return self._map_output(X, "marginals", n_sweeps, out, client, overwrite, callbacks)

    def score(
        self,
        X: RowsLike,
        y: LabelsLike | None = None,
        sample_weight: WeightsLike | None = None,
        *,
        callbacks: CallbackList = (),
    ) -> float:
        """Return the share of outputs that are predicted correctly, from one pass over the rows.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, x)
        y : array-like or Dataset, shape (n, v)
            None: the targets of the Dataset ``X``. If there are none, a model with ``corruption`` takes the
            rows as outputs, and corrupts them to make the inputs.
        sample_weight : array-like, shape (n,), or None
            Weights of the rows. None: those of the Dataset, else equal weights.
        callbacks : Callback or sequence
            Callbacks that receive progress.

        Returns
        -------
        float

        Raises
        ------
        DataError
            There are no outputs, they have another width or are not binary, or the weights sum to 0.

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
        """Return the share of wrong outputs: of all outputs, and of those that differ between x and v.

        Parameters
        ----------
        X, y, sample_weight, callbacks
            As in :meth:`score`.

        Returns
        -------
        dict
            ``all`` and ``changed``. The latter is NaN if x has another width than v, is not binary, or equals
            v.

        Examples
        --------
        >>> import scalelatent as sl
        >>> v = np.eye(6, dtype="uint8").repeat(20, axis=0)
        >>> m = sl.ConditionalRBM(n_hidden=2, n_epochs=3, learning_rate=1.0, random_state=0).fit(v, v)
        >>> m.errors(v, v)
        {'all': 0.0, 'changed': nan}
        """
        check_is_fitted(self)
        ds = self._make_pairs(X, y)
        if sample_weight is not None:
            ds = ds.with_weight(sample_weight)
        targets = self._test_targets(ds)
        reduction = CrbmScoring(self._shape, self.inference_, self.n_sweeps_, self.tol, targets, self._theta)
        with FitSession(self._kind, device=self.device, n_jobs=self.n_jobs, callbacks=callbacks) as session:
            session.begin(0, {}, {})
            stats = session.collect("score", reduction, MappedRows(ds))
        if not stats["units"][1]:
            raise DataError(
                f"{ds.url or 'X'}: the weights of the rows sum to 0: give at least one positive weight"
            )
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
        """Return estimates of P(unit = 1), called beliefs, with the sweeps and convergence of each row.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, x)
        inference : str or None
            A value of the parameter ``inference``. None: ``inference_``.
        n_sweeps : int or None
            Largest number of sweeps (rounds of messages over all edges). None: ``n_sweeps_``.
        tol : float or None
            The inference of a row stops after a sweep in which no belief changed by more than ``tol``. None:
            it makes ``n_sweeps`` sweeps; the parameter ``tol`` of the model is not used.
        pairs : bool
            Return the mean over rows of P(v_i = 1, h_j = 1) as well (only by "sum-product").
        log_z : bool
            Return the Bethe estimate of each row's log partition function (only by "sum-product" and, exact,
            for "logistic").

        Returns
        -------
        Beliefs

        Raises
        ------
        ValueError
            An unknown inference, one that does not compute what was asked for, or ``n_sweeps`` below 1.

        Warns
        -----
        UserWarning
            Some rows did not meet ``tol``.

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
        rows = self._check_no_x(X) if self._source == "plain" else self._given_rows(X)
        return infer_rows(
            self, rows, inference=inference, n_sweeps=n_sweeps, tol=tol, pairs=pairs, log_z=log_z
        )

    @follows_rows
    def free_energy(self, X: RowsLike, y: LabelsLike | None = None) -> np.ndarray:
        """Return the free energy F(v, x) = -log sum_h exp(-E(v, h, x)) of each row, in nats.

        -E is the exponent in the formula of p(v, h | x), so log p(v | x) = -F - ``log_z`` of :meth:`infer`.

        Parameters
        ----------
        X, y
            As in :meth:`score`.

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
        ds = self._make_pairs(X, y)
        return compute_free_energies(self._shape, self._theta, ds, self._test_targets(ds))

    def _test_targets(self, ds: Dataset) -> Targets:
        """Return the source of the outputs of ``ds``: its targets or, without targets, its rows."""
        return choose_targets(self, ds, self.seed_, TEST_STAGE)

    def _row_map(self, output: tuple[str, int | None]) -> CrbmOutput:
        name, n_sweeps = output
        sweeps = check_sweeps(self, n_sweeps)
        return CrbmOutput(self._shape, self._theta, self.inference_, sweeps, self.tol, name)

    def _map_output(
        self,
        X: RowsLike,
        output: str,
        n_sweeps: int | None,
        out: str | Path | None,
        client: ClientLike | None,
        overwrite: bool,
        callbacks: CallbackList,
    ) -> Any:
        """Return the output of the name ``output`` for rows; warn if some rows did not meet ``tol``."""
        check_is_fitted(self)
        destination, X = (out, client, overwrite, callbacks), opened(X, "X")
        row_map = self._row_map((output, n_sweeps))
        counting, checked = CountingOutput(**vars(row_map)), "the rows"
        if self._source == "plain":
            if isinstance(X, Dataset) or out is not None or is_dask(X):
                raise DataError(
                    "this is a plain RBM: it has no x to predict from, and all rows have the same beliefs: "
                    "leave out X (transform takes rows v)"
                )
            block = Block(self._check_no_x(X), None, None, 0)
            with single_threaded():
                found = counting.apply(counting.prepare(make_backend(self.device)), block)
        elif self.tol is None or self.inference_ == "independent" or is_dask(X):
            return self._map(X, (output, n_sweeps), *destination)
        elif out is None:
            found = self._map_rows(self._given_rows(X), counting, *destination)
        else:
            # Workers do not report whether rows met the tolerance, so infer some rows again in this process.
            ds = self._given_rows(X)
            found = self._map_rows(ds, row_map, *destination)
            for part in choose_checked_rows(len(ds)):
                map_to_array(counting, ds[part], self.device, self.n_jobs)
            if len(ds) > MAX_CHECKED:
                checked = f"{MAX_CHECKED} checked rows"
        counting.warn(checked)
        return found

    def _check_no_x(self, X: RowsLike) -> np.ndarray:
        """Return rows of width 0, which a plain RBM takes as x; None gives one row."""
        x = np.empty((1, 0), dtype=np.float32) if X is None else np.asarray(X)
        if x.ndim != 2 or x.shape[1]:
            raise DataError(
                f"X has shape {x.shape}, but this is a plain RBM without x: leave out X, or give rows of "
                "width 0"
            )
        return x

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.target_tags.required = False
        tags.target_tags.single_output = False
        tags.target_tags.multi_output = True
        # Classifiers in scikit-learn predict one of several classes; here each of several outputs is 0 or 1.
        tags.classifier_tags = ClassifierTags(multi_class=False, multi_label=True)
        tags.transformer_tags.preserves_dtype = []
        return tags

    def _state(self) -> SavedModelState:
        arrays = {name: getattr(self, f"{name}_") for name in _PARAMETER_NAMES}
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
        theta = np.concatenate([arrays[name].reshape(-1) for name in _PARAMETER_NAMES]).astype(np.float32)
        self._source, self._n_outputs = values["source"], shape.n_visible
        self.inference_ = values["inference"]
        self.best_validation_error_ = values["best_validation_error"]
        self.batch_size_ = values.get("batch_size") or choose_batch_size(self)
        self._keep_parameters(shape, theta, values["best_epoch"])


def _check_counts(n_rows: int, y: Any) -> None:
    found = int(y.shape[0]) if hasattr(y, "shape") else len(y)
    if found != n_rows:
        raise DataError(f"X has {n_rows} rows, but y has {found}: give one row of outputs per row")


def _open_targets(y: LabelsLike | None, n_rows: int) -> Dataset:
    """Return outputs y, given as an array, as a dataset; raise DataError if they are not (n_rows, v)."""
    y = opened(y, "y")
    if is_in_memory(y) and not hasattr(y, "tocsr"):
        refuse_masked(y, "y")
        y = np.asarray(y)
    if len(getattr(y, "shape", ())) != 2:
        raise DataError(
            f"y has shape {getattr(y, 'shape', None)}: the outputs of a conditional RBM are rows of 0 and 1 "
            "of shape (n, v); for one column: y.reshape(-1, 1)"
        )
    _check_counts(n_rows, y)
    return Dataset.from_arrays(y)
