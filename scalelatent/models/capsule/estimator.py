"""Capsule regression as a scikit-learn estimator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from sklearn.utils import Tags

from scalelatent.engine.batch_loop import LoopResult
from scalelatent.estimators.base import SavedModelState
from scalelatent.estimators.classifier import StreamedClassifier
from scalelatent.estimators.fit_services import restored_on_failure
from scalelatent.estimators.fitted_attributes import CHANGE_IN_PLACE, FIT_AGAIN, FittedAttribute
from scalelatent.estimators.inputs import check_any_weight, is_in_memory
from scalelatent.estimators.onnx_graph import OnnxGraph
from scalelatent.kernels.streams import resolve_seed, stream
from scalelatent.models.capsule.model.em import CapsuleEM
from scalelatent.models.capsule.model.members import Members
from scalelatent.models.capsule.model.predict import CapsuleRows, RowFrame
from scalelatent.models.capsule.model.running import RowSums, RunningCapsule
from scalelatent.reductions.intercept import Intercept

from .fit import CAPSULE_DIM, ONLINE_PARAMETERS, fit_steps, plan, simplify_dims
from .onnx_export import add_scores, add_temperature
from .parameters import PARAMETERS, get_algorithm, get_max_passes
from .partial_fit import (
    READ_ROWS,
    apply_frame,
    begin_stream,
    check_rows,
    check_same_classes,
    continue_from,
    estimate_intercept,
    get_cpu_backend,
    resolve_row_weights,
    restore_stream,
    save_stream,
    sort_classes,
    stream_options,
)

if TYPE_CHECKING:
    from scalelatent.typing import LabelsLike, RandomState, RowsLike, WeightsLike


class CapsuleRegression(StreamedClassifier):
    """Classifier with a latent vector (capsule) per class, fitted by streamed EM.

    Each class has a capsule h_i = W_i x + b_i of ``capsule_dim`` numbers. The class with the longest vector
    wins, and a squashing function turns the lengths into probabilities. Rows are numpy arrays, memmaps, zarr
    or dask arrays, or a :class:`~scalelatent.Dataset` of any length. A fit in this process and a fit on a
    Dask cluster give the same bits.

    Parameters
    ----------
    capsule_dim : int, sequence of int or None
        Dimension d of the capsules, or one per class (only multiclass). None: 8, or as many as the columns
        and the rows of the smallest class allow (``capsule_dim_``).
    architecture : {"multiclass", "one_vs_all", "all_vs_all"} or None
        One model with a capsule per class; a binary model per class; or a binary model per pair of classes.
        All members share each pass over the rows. None: "one_vs_all", but "multiclass" for two classes or one
        dimension per class. "all_vs_all" often has the fewest errors; its probabilities are shares of votes.
    algorithm : {"stepwise", "em"} or None
        "stepwise": stepwise EM, one step per batch of rows; on MNIST it reaches the error of batch EM in a
        tenth of the time (benchmarks/choosing.py). "em": batch EM, as in the paper. None: batch EM if
        ``max_iter`` is given, else stepwise EM.
    projection : "auto", None or int
        Number of principal directions of the training rows on which all rows are projected first. With an
        intercept, the mean is subtracted before. "auto": 196 if rows are wider, else None.
    fit_intercept : bool, default True
        Subtract the mean of the training rows before the cast to float32, and learn a constant b_i of each
        capsule, so that classes on opposite sides of a point differ. The paper has no intercept.
    init : {"subspace", "random"}
        Start from the leading directions of each class (equation 2.28), or from Gaussian noise.
    init_scale : float, default 1.0
        With a random start, the standard deviation of the latent means of a row of mean length.
    momentum : float, default 0.9
        Momentum gamma in [0, 1), equation 2.27 of the paper.
    nu_schedule : "paper", None or sequence of (nu, patience)
        Rounds of thresholded EM with early stopping on the validation error, or on the training error without
        validation rows. None: plain EM until ``max_iter`` or ``tol``. Stepwise EM counts patience in epochs.
    max_iter : int or None
        Largest number of passes of batch EM. None: 2,000.
    n_epochs : int or None
        Largest number of passes of stepwise EM. None: as many as read 500,000 rows, at least 10 and at most
        50.
    batch_rows : int or None
        Rows per step of stepwise EM, a multiple of ``n_chains``. None: 1,024.
    n_chains : int, default 4
        Parts of a step that threads or workers compute independently. Another number changes the rounding of
        the result; the number of workers never does.
    kappa, t0 : float, default 0.6, 1000
        Stepwise EM: step t has the size (1 + t / t0) ** -kappa.
    tol : float or None
        End a round if the mean log-loss (nats) falls by less than this in a pass. None or 0 never ends a
        round.
    ridge : float or None
        rho, added to the diagonal of the second moments of the rows: W <- (W S + Delta)(S + rho I)^-1. None:
        a value with the effect of one more row of independent features (``ridge_``), which only matters for
        few rows. The paper has 0.
    temperature : float or None
        T of the class probabilities: P(y | x) to the power of 1 / T, normalised. None: the one with the
        smallest log-loss on the validation rows, or on at most 20,000 training rows. The probabilities of the
        paper (T = 1) are far too uncertain. The temperature changes no predicted class.
    class_weight : dict, "balanced" or None
        Weights of the classes, as in scikit-learn.
    warm_start : bool
        Start from the weights of the last fit.
    random_state : int, Generator, RandomState or None
        None draws a seed and stores it in ``seed_``.
    device : {"auto", "cpu", "gpu"}
        "auto" uses a GPU if there is one. On a cluster, workers with and without a GPU can share a fit; its
        result then depends, within a tolerance, on which worker computed which rows.
    n_jobs : int or None
        Number of threads of a fit in this process; it does not change the result. None: the number of
        ``joblib.parallel_config``, else all cores.

    Attributes
    ----------
    classes_ : ndarray, shape (n_classes,)
        Sorted class labels.
    W_ : ndarray of float64, shape (sum of dimensions, p)
        Stacked weights of the capsules of all members, on (projected) rows.
    intercept_ : ndarray of float64, shape (sum of dimensions,)
        Constants of all capsules; zeros without an intercept.
    mean_ : ndarray of float32, shape (features,), or None
        Mean of the training rows, which is subtracted first.
    architecture_ : str
        Architecture of the members.
    capsule_dim_ : int or list of int
        Dimension of all capsules, or one per class.
    capsule_dims_ : ndarray of int, shape (members, capsules)
        Dimension of each capsule.
    projection_ : ndarray of float64, shape (features, p), or None
        Directions of the projection.
    ridge_ : ndarray of float64, shape (p + 1,), or (p,) without an intercept
        Numbers that were added to the diagonal of the second moments.
    temperature_ : float
        Temperature of the class probabilities.
    n_iter_ : int
        Number of passes.
    history_ : list of dict
        One record per pass: objective (mean log-loss, nats), train_error, validation_error, seconds of the
        pass, rows, bytes_read, … Binary architectures have means over members: the objective,
        mean_member_train_error and mean_member_validation_error. Their validation_error is that of the joint
        decision of all members. Batch EM measures it in the first eight passes and then in every eighth pass;
        other records repeat the last value. They have no train_error. With the engine options
        ``report_steps`` or ``validate_steps``, stepwise EM adds a record at each such step, with the number
        of its pass; ``rows_seen`` distinguishes these records.
    best_validation_error_ : float or None
        Validation error of this model: ``1 - score`` of the validation rows.
    mean_member_validation_error_ : float or None
        Binary architectures: mean over members of the best validation error in the member's own problem.
    seed_ : int
        Seed of the fit.
    n_features_in_ : int
        Number of features of a row.

    Notes
    -----
    ``transform`` returns the latent means h = W V^T (x - mean) + b as float32, where V is the projection.
    Columns are sorted by class, or by member for the binary architectures.

    References
    ----------
    L. K. Saul, "Capsule regression", Neural Computation (2021).

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> x, y = load_digits(return_X_y=True)
    >>> m = CapsuleRegression(capsule_dim=4, max_iter=20, random_state=0).fit(x[:1000], y[:1000])
    >>> bool(m.score(x[1000:], y[1000:]) > 0.85)
    True
    """

    _kind = "capsule"
    _parameters = PARAMETERS
    _fitted_attribute = "W_"
    _shares_passes = True
    classes_ = FittedAttribute(FIT_AGAIN)
    W_ = FittedAttribute(CHANGE_IN_PLACE)
    intercept_ = FittedAttribute(CHANGE_IN_PLACE)
    capsule_dims_ = FittedAttribute(FIT_AGAIN)
    projection_ = FittedAttribute(FIT_AGAIN, of=lambda model: model._frame.projection)
    mean_ = FittedAttribute(FIT_AGAIN, of=lambda model: getattr(model._frame.intercept, "mean", None))
    temperature_ = FittedAttribute(FIT_AGAIN)
    ridge_ = FittedAttribute(FIT_AGAIN, of=lambda model: model._stream.ridge)
    best_validation_error_: float | None
    mean_member_validation_error_: float | None
    _members: Members
    _frame: RowFrame
    _stream: RunningCapsule

    def __init__(
        self,
        *,
        capsule_dim: int | Sequence[int] | None = None,
        architecture: str | None = None,
        algorithm: str | None = None,
        projection: str | int | None = "auto",
        fit_intercept: bool = True,
        init: str = "subspace",
        init_scale: float = 1.0,
        momentum: float = 0.9,
        nu_schedule: str | Sequence[tuple[float, int]] | None = "paper",
        max_iter: int | None = None,
        n_epochs: int | None = None,
        batch_rows: int | None = None,
        n_chains: int = 4,
        kappa: float = 0.6,
        t0: float = 1000.0,
        tol: float | None = None,
        ridge: float | None = None,
        temperature: float | None = None,
        class_weight: Mapping[Any, float] | str | None = None,
        warm_start: bool = False,
        random_state: RandomState = None,
        device: str = "auto",
        n_jobs: int | None = None,
    ) -> None:
        self.capsule_dim = capsule_dim
        self.architecture = architecture
        self.algorithm = algorithm
        self.projection = projection
        self.fit_intercept = fit_intercept
        self.init = init
        self.init_scale = init_scale
        self.momentum = momentum
        self.nu_schedule = nu_schedule
        self.max_iter = max_iter
        self.n_epochs = n_epochs
        self.batch_rows = batch_rows
        self.n_chains = n_chains
        self.kappa = kappa
        self.t0 = t0
        self.tol = tol
        self.ridge = ridge
        self.temperature = temperature
        self.class_weight = class_weight
        self.warm_start = warm_start
        self.random_state = random_state
        self.device = device
        self.n_jobs = n_jobs

    @property
    def capsule_dim_(self) -> int | list[int]:
        """Dimension of all capsules, or one per class."""
        return simplify_dims(self.capsule_dims_)

    @property
    def architecture_(self) -> str:
        """Architecture of the members."""
        return self._members.architecture

    # -- fit -------------------------------------------------------------------------------------------------

    _fit_steps = fit_steps
    _plan = plan

    def _deciding_parameters(self) -> dict[str, Any]:
        algorithm = get_algorithm(self)
        unused = ONLINE_PARAMETERS if algorithm == "em" else ("max_iter",)
        # Earlier versions had no intercept and did not record this parameter. Their runs can be resumed.
        if not self.fit_intercept:
            unused = (*unused, "fit_intercept")
        given = {name: value for name, value in super()._deciding_parameters().items() if name not in unused}
        given |= {"algorithm": algorithm}
        given |= {"max_iter": get_max_passes(self)} if algorithm == "em" else {}
        return given | {"capsule_dim": CAPSULE_DIM if self.capsule_dim is None else self.capsule_dim}

    def _keep(
        self,
        classes: np.ndarray,
        em: CapsuleEM,
        frame: RowFrame,
        result: LoopResult,
        w: np.ndarray,
        sums: tuple[np.ndarray, np.ndarray],
        decided: float | None,
    ) -> None:
        """Set the fitted attributes from the result of a fit.

        ``sums`` are the total weight and the number of rows of each class. ``decided`` is the validation
        error of the joint decision of binary members.
        """
        self._members, self._frame = em.members, frame
        self._set_fitted_attributes(classes_=classes, capsule_dims_=em.members.dims)
        self._set_weights(w)
        self.n_iter_ = result.state.iteration
        self.history_ = result.history
        self.best_validation_error_, self.mean_member_validation_error_ = decided, None
        if em.has_validation and em.members.n_members == 1:
            self.best_validation_error_ = float(result.state.best_error[0])
        elif em.has_validation:
            self.mean_member_validation_error_ = float(result.state.best_error.mean())
        # If all members learn from all classes, store only the sum of the second moments over the classes.
        whole = em.members.sees.all()
        moment = em.moment.sum(axis=0, keepdims=True) if whole else em.moment
        passes = self.n_iter_ * float(sums[1].sum())
        seen = max((float(r.get("rows_seen", passes)) for r in self.history_), default=passes)
        row_sums = RowSums(tuple(moment), *sums)
        self._stream = RunningCapsule(em.members, None, None, row_sums, 0.0, seen, em.ridge)

    def _set_weights(self, w: np.ndarray) -> None:
        """Set ``W_`` and ``intercept_`` from the weights of a fit.

        With an intercept, rows have one more column, a constant, and weights have one more column as well.
        """
        intercept = self._frame.intercept
        constants = np.zeros(len(w)) if intercept is None else w[:, -1] * intercept.constant
        self._set_fitted_attributes(W_=w if intercept is None else w[:, :-1].copy(), intercept_=constants)

    def _weights(self) -> np.ndarray:
        """Return the weights (D, p + 1) for rows with a constant column; ``W_`` if there is no intercept."""
        intercept = self._frame.intercept
        if intercept is None:
            return self.W_
        return np.column_stack([self.W_, self.intercept_ / intercept.constant])

    def _row_map(self, output: str) -> CapsuleRows:
        return CapsuleRows(self._members, self._weights(), self._frame, output, self.temperature_)

    def _add_prediction_nodes(self, graph: OnnxGraph) -> None:
        scores = add_scores(graph, self._row_map("probabilities"))
        graph.classes(add_temperature(graph, scores, self.temperature_), self.classes_)

    # -- partial_fit ------------------------------------------------------------------------------------

    def partial_fit(
        self,
        X: RowsLike,
        y: LabelsLike | None = None,
        classes: Any = None,
        *,
        sample_weight: WeightsLike | None = None,
    ) -> Self:
        """Learn from more rows immediately, in this process.

        The call continues a fit, a loaded model or earlier calls. A first call needs ``classes`` and does not
        project rows. It starts from the subspaces of its rows if there are enough rows of each class, else at
        random.

        A step is a step of stepwise EM without momentum, with the first threshold of ``nu_schedule``. Its
        size falls with the number of rows seen (``kappa``, ``t0``, ``batch_rows``). Second moments are those
        of all rows so far, with a prior that counts as one row per feature.

        Parameters
        ----------
        X : array-like, shape (n, features), or Dataset
            One row or more.
        y : array-like, shape (n,)
            Class labels; omitted for a Dataset, which has its own.
        classes : array-like or None
            All classes of this and later calls; needed in the first call.
        sample_weight : array-like, shape (n,), or None
            Weights of the rows.

        Returns
        -------
        self

        Raises
        ------
        ValueError
            ``classes`` is missing in the first call or differs later, a label is not among them, the number
            of features differs, or a parameter is out of range.
        DataError
            A value is NaN or infinite; the message names the row and the feature.

        Examples
        --------
        >>> import numpy as np, scalelatent as sl
        >>> rng = np.random.default_rng(0)
        >>> x, y = rng.normal(size=(200, 2)) * [[3.0, 0.3]], np.zeros(200, dtype=int)
        >>> x, y = np.concatenate([x, x[:, ::-1]]), np.concatenate([y, y + 1])
        >>> order, m = rng.permutation(400), sl.CapsuleRegression(capsule_dim=1, random_state=0)
        >>> for i in order:
        ...     m = m.partial_fit(x[i : i + 1], y[i : i + 1], classes=[0, 1])
        >>> bool(m.score(x, y) > 0.8)
        True
        """
        stream_options(self)
        if hasattr(self, "W_"):
            check_same_classes(classes, self.classes_)
        first = not hasattr(self, "W_")
        known = sort_classes(classes) if first else self.classes_
        with restored_on_failure(self):
            if not first:
                self._stream = self._stream.copy()  # the old stream is restored if this call raises
            if is_in_memory(X) and not hasattr(X, "tocsr"):
                check_any_weight(sample_weight)
                x, codes = check_rows(self, X, y, known, reset=first)
                self._learn(x, codes, sample_weight, known)
                return self
            ds = self._training_rows(X, y, sample_weight, reset=first)
            check_any_weight(ds.read_weight(0, len(ds)))
            for a in range(0, len(ds), READ_ROWS):
                b = min(a + READ_ROWS, len(ds))
                weight = ds.read_weight(a, b) if ds.has_weight else None
                rows = ds.read_x(a, b)
                rows = rows.reshape(b - a, -1) if isinstance(rows, np.ndarray) else rows.toarray()
                x, codes = check_rows(self, rows, ds.read_y(a, b), known, reset=False)
                self._learn(x, codes, weight, known)
        return self

    def _learn(
        self, x: np.ndarray, codes: np.ndarray, sample_weight: WeightsLike | None, classes: np.ndarray
    ) -> None:
        first = not hasattr(self, "W_")
        weight = resolve_row_weights(self.class_weight, sample_weight, codes, classes)
        if first:
            seed = resolve_seed(self.random_state)
            self._frame = RowFrame(estimate_intercept(x) if self.fit_intercept else None)
            x = apply_frame(self._frame, x)
            begun = begin_stream(self, x, codes, len(classes), stream(seed, "capsule-start"))
            self.seed_, self._stream, self._members = seed, begun, begun.members
            self.n_iter_, self.history_ = 0, []
            self._set_fitted_attributes(
                classes_=classes,
                capsule_dims_=begun.members.dims,
                temperature_=1.0 if self.temperature is None else float(self.temperature),
            )
        else:
            x = apply_frame(self._frame, x)
        running = self._stream
        if running.w is None:
            continue_from(running, self._weights())
        x = np.ascontiguousarray(x, dtype=np.float32)
        running.learn(x, codes, weight, stream_options(self), get_cpu_backend())
        assert running.average is not None
        self._set_weights(running.average)
        # The error rates that the fit measured do not apply to the new weights.
        self.best_validation_error_ = self.mean_member_validation_error_ = None

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.transformer_tags.preserves_dtype = ["float32"]
        # Without an intercept, classes on opposite sides of the origin cannot be separated.
        tags.classifier_tags.poor_score = not self.fit_intercept
        return tags

    # -- saving ----------------------------------------------------------------------------------------------

    def _state(self) -> SavedModelState:
        values, arrays = save_stream(self._stream)
        arrays |= {"W": self.W_, "dims": self._members.dims, "labels": self._members.labels}
        intercept, projection = self._frame.intercept, self._frame.projection
        if projection is not None:
            arrays["projection"] = projection
        if intercept is not None:
            arrays |= {"intercept": self.intercept_, "mean": intercept.mean}
            values["constant"] = intercept.constant
        values |= {
            "temperature": self.temperature_,
            "architecture": self._members.architecture,
            "classes": self.classes_.tolist(),
            "classes_dtype": self.classes_.dtype.str,
            "best_validation_error": self.best_validation_error_,
            "mean_member_validation_error": self.mean_member_validation_error_,
        }
        return values, arrays

    def _restore(self, values: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        self._members = Members(values["architecture"], arrays["dims"], arrays["labels"])
        intercept = Intercept(arrays["mean"], values["constant"]) if "mean" in arrays else None
        projection = arrays.get("projection")
        self._frame = RowFrame(intercept)
        if projection is not None:
            self._frame = RowFrame.from_projection(intercept, projection)
        self._set_fitted_attributes(
            classes_=np.array(values["classes"], dtype=values["classes_dtype"]),
            W_=arrays["W"],
            intercept_=arrays.get("intercept", np.zeros(len(arrays["W"]))),
            capsule_dims_=arrays["dims"],
            temperature_=values.get("temperature", 1.0),
        )
        self.fit_intercept = intercept is not None  # models of earlier versions have no intercept
        best = values["best_validation_error"]
        # Models of earlier versions store the mean error of the members as the error of an ensemble.
        means = self._members.n_members > 1 and "mean_member_validation_error" not in values
        self.best_validation_error_ = None if means else best
        self.mean_member_validation_error_ = best if means else values.get("mean_member_validation_error")
        self._stream = restore_stream(self._members, self._weights(), values, arrays)
