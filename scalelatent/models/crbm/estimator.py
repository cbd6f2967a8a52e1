"""Conditional restricted Boltzmann machines as a scikit-learn estimator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self

import numpy as np
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin, clone
from sklearn.utils import ClassifierTags

from scalelatent.deploy.clusters import current_client
from scalelatent.engine.callbacks import Callback
from scalelatent.engine.plan import find_resources
from scalelatent.estimators.base import StreamedEstimator, restore_params
from scalelatent.estimators.learned import IN_PLACE, Learned
from scalelatent.estimators.steps import Rows, Steps
from scalelatent.kernels.streams import resolve_seed
from scalelatent.models.crbm.model.energy import CrbmShape
from scalelatent.models.crbm.model.online import CrbmLearner
from scalelatent.models.crbm.model.predict import sweeps_in
from scalelatent.models.crbm.model.state import CrbmState

from .fit import (
    check_batch,
    check_patience,
    check_rows,
    fit_steps,
    given_parameters,
)
from .output import CrbmOutputs
from .parameters import PARAMETERS, batch_size
from .partial import CrbmPartial
from .plan import plan
from .rows import CrbmRows

OF_YOUR_OWN = f"{IN_PLACE}, or make a model of weights of your own: ConditionalRBM.from_weights"
_FIELDS = ("W", "Wvx", "Whx", "bv", "bh")


class ConditionalRBM(
    CrbmOutputs, CrbmPartial, CrbmRows, ClassNamePrefixFeaturesOutMixin, TransformerMixin, StreamedEstimator
):
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
    learning_rate : float or sequence of (rate, epochs)
        Of the mean gradient of a batch.
    momentum, weight_decay : float, default 0
        The decay is that of the three matrices.
    batch_size : int or None
        Rows of a gradient. None: 20, or what fewer rows and ``n_chains`` allow (``batch_size_``).
    n_epochs : int, default 50
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
        End after so many epochs without a better validation error, which needs validation rows. None: all
        epochs. What did best on the validation rows is kept either way.
    init_scale : float, default 0.01
        Standard deviation of the first W and Whx, at most 5; all else begins at 0.
    conditional : bool, default True
        False: a plain RBM of the rows ``X``, as :class:`sklearn.neural_network.BernoulliRBM` is one.
    corruption : dict or None
        Learn to restore: rows are clean v, and x is made of them anew in each epoch. ``{"kind": "flip",
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
    _parameters = PARAMETERS
    W_ = Learned(OF_YOUR_OWN, lambda model: model._shape.split(model._theta).W)
    Wvx_ = Learned(OF_YOUR_OWN, lambda model: model._shape.split(model._theta).Wvx)
    Whx_ = Learned(OF_YOUR_OWN, lambda model: model._shape.split(model._theta).Whx)
    bv_ = Learned(OF_YOUR_OWN, lambda model: model._shape.split(model._theta).bv)
    bh_ = Learned(OF_YOUR_OWN, lambda model: model._shape.split(model._theta).bh)
    _sign_of_fit = "_theta"
    # A job may name datasets of outputs beside those of the rows.
    takes_targets = True
    # Where outputs come from: pairs of rows, clean rows that are corrupted, or rows themselves.
    _source = "pairs"

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
        loss: Any = "hamming",
        learning_rate: float | Sequence[tuple[float, int]] = 0.05,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        batch_size: int | None = None,
        n_epochs: int = 50,
        n_chains: int | None = None,
        local_steps: int | None = None,
        patience: int | None = None,
        init_scale: float = 0.01,
        conditional: bool = True,
        corruption: Mapping[str, Any] | None = None,
        warm_start: bool = False,
        random_state: Any = None,
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

    # -- fit
    # --------------------------------------------------------------------------------------------------

    def fit(
        self,
        X: Any,
        y: Any = None,
        *,
        validation: Any = None,
        client: Any = None,
        run_dir: Any = None,
        resume: bool = False,
        callbacks: Callback | Sequence[Callback] = (),
        engine: Mapping[str, Any] | None = None,
        verbose: bool | None = None,
    ) -> ConditionalRBM:
        """Fit by minibatches.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, x), or None
            Observed rows. With ``corruption`` the clean rows, with ``conditional=False`` those of a plain
            RBM; so are the rows ``y`` where X is None, or of width 0.
        y : array-like or Dataset, shape (n, v)
            The outputs v, 0 or 1: dense, or CSR multi-labels. A Dataset with targets brings its own.
            Ignored with ``conditional=False``.
        validation : Dataset or (X, y) or None
            Rows for early stopping.
        client : distributed.Client or None
            A cluster to run on; None takes the enclosing ``with sl.cluster(…)``, else this process.
        run_dir : path or None
            Folder for checkpoints, shared by all workers.
        resume : bool
            Go on with the fit that ``run_dir`` holds; with another ``learning_rate`` or ``n_epochs`` these
            hold from there on.
        callbacks : Callback or sequence
        engine : dict or None
            block_rows, leaf_rows, checkpoint_seconds, checkpoint_steps, report_steps, validate_steps,
            run_rows, buffer_runs, scratch, keep_scratch, cache.
        verbose : bool or None
            Show progress: a display that moves on a terminal and in a notebook, lines elsewhere. None: in a
            notebook alone.

        Returns
        -------
        self

        Raises
        ------
        DataError
            Rows that cannot be used, naming dataset and row: outputs beside 0 and 1, other numbers of rows,
            NaN, a batch larger than the data, a learner that needs x when there is none.
        ValueError
            A parameter out of range.
        DivergenceError
            Weights have grown beyond float32: naming the epoch and the learning rate to try. It is also a
            FloatingPointError.
        PlanError
            What memory cannot hold.
        RunError
            The run folder holds another fit; the cluster has no workers.

        Warns
        -----
        LongFitWarning
            It would take over an hour: with the time, and what would shorten it.
        UserWarning
            ``tol`` was not met by some of the rows.

        Examples
        --------
        >>> v = np.eye(6, dtype="uint8").repeat(20, axis=0)
        >>> m = ConditionalRBM(n_hidden=2, n_epochs=3, random_state=0).fit(1 - v, v, validation=(1 - v, v))
        >>> m.n_iter_, m.W_.shape, m.Wvx_.shape
        (3, (6, 2), (6, 6))
        """
        self._check_params()
        train = self._pairs(X, y, reset=True)
        held = self._validation_pairs(validation)
        check_rows(self, train)
        check_batch(self, train)
        check_patience(self, held)
        resources = find_resources(client or current_client(), self.n_jobs, None)
        new = clone(self)
        new.seed_, new._source = 0, self._source  # orders of rows of all seeds need the same
        self._check_plan(partial(plan, new, train, held, resources, dict(engine or {})))
        self._fit_by_steps(train, held, client, run_dir, resume, callbacks, engine, verbose)
        return self

    def _fit_steps(self, rows: Mapping[str, Rows]) -> Steps:
        return fit_steps(self, rows)

    def _what_decides(self) -> dict[str, Any]:
        """The parameters that decide the result: a resumed fit must have the same ones."""
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

    def plan(
        self,
        X: Any,
        y: Any = None,
        *,
        validation: Any = None,
        client: Any = None,
        memory_limit: str | int | None = None,
        engine: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """What ``fit`` would need, from shapes and a probe of some seconds; nothing is fitted.

        Parameters
        ----------
        X, y, validation, client, engine
            As in :meth:`fit`.
        memory_limit : str, int or None
            Of a worker, for example ``"4GB"``; None asks the cluster or this process.

        Returns
        -------
        dict
            Of the steps and of validation: rows, steps, bytes of a statistic and memory by what holds it;
            peak bytes a worker, bytes of a checkpoint, seconds of an epoch and of all.

        Raises
        ------
        PlanError
            It cannot fit: naming the setting that would.

        Examples
        --------
        >>> v = np.eye(12, dtype="uint8").repeat(5, axis=0)
        >>> told = ConditionalRBM(n_hidden=3, batch_size=10).plan(v, v)
        >>> told["stages"]["learn"]["steps_per_pass"]
        6
        """
        new = clone(self)  # rows of another width leave this model as it is
        new.seed_ = 0  # orders of rows of all seeds need the same
        self._check_params()
        train = new._pairs(X, y, reset=True)
        held = new._validation_pairs(validation)
        check_rows(new, train)
        check_batch(new, train)
        check_patience(new, held)
        resources = find_resources(client or current_client(), self.n_jobs, memory_limit)
        return plan(new, train, held, resources, dict(engine or {}))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.target_tags.required = False
        tags.target_tags.single_output = False
        tags.target_tags.multi_output = True
        # Not a classifier, which has one column of classes; but each output is 0 or 1.
        tags.classifier_tags = ClassifierTags(multi_class=False, multi_label=True)
        tags.transformer_tags.preserves_dtype = []
        return tags

    @classmethod
    def from_weights(
        cls,
        W: Any,
        bv: Any,
        bh: Any,
        *,
        Wvx: Any = None,
        Whx: Any = None,
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

    # -- disk
    # -------------------------------------------------------------------------------------------------

    def _to_saved(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        arrays = {name: getattr(self, f"{name}_") for name in _FIELDS}
        values = {
            "source": self._source,
            "shape": [self._shape.n_visible, self._shape.n_hidden, self._shape.n_observed],
            "inference": self.inference_,
            "batch_size": self.batch_size_,
            "n_iter": self.n_iter_,
            "best_epoch": self.best_epoch_,
            "n_features_in": self.n_features_in_,
            "seed": self.seed_,
            "best_validation_error": self.best_validation_error_,
        }
        return values, arrays

    @classmethod
    def _from_saved(
        cls, params: dict[str, Any], values: dict[str, Any], arrays: dict[str, np.ndarray]
    ) -> Self:
        model = cls(**restore_params(params))
        shape = CrbmShape(*values["shape"])
        theta = np.concatenate([arrays[name].reshape(-1) for name in _FIELDS]).astype(np.float32)
        model._source, model._n_outputs = values["source"], shape.n_visible
        model.inference_, model.n_iter_, model.seed_ = values["inference"], values["n_iter"], values["seed"]
        model.n_features_in_, model.history_ = values["n_features_in"], []
        model.best_validation_error_ = values["best_validation_error"]
        model.batch_size_ = values.get("batch_size") or batch_size(model)
        model._keep_parameters(shape, theta, values["best_epoch"])
        return model
