"""Capsule regression as a scikit-learn estimator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from sklearn.base import clone

from scalelatent.deploy.clusters import current_client
from scalelatent.engine.batch_loop import LoopResult
from scalelatent.engine.callbacks import Callback
from scalelatent.engine.plan import find_resources
from scalelatent.estimators.base import StreamedEstimator, restore_params
from scalelatent.estimators.classifier import StreamedClassifier
from scalelatent.estimators.learned import FIT_AGAIN, IN_PLACE, Learned
from scalelatent.estimators.steps import Rows, Steps
from scalelatent.models.capsule.model.em import CapsuleEM
from scalelatent.models.capsule.model.members import Members
from scalelatent.models.capsule.model.predict import CapsuleRows
from scalelatent.models.capsule.model.running import RowSums, RunningCapsule

from .fit import fit_steps
from .online_fit import ONLINE_PARAMETERS
from .parameters import PARAMETERS
from .partial import PartialFit
from .plan import plan
from .settings import CAPSULE_DIM, plain_dim


class CapsuleRegression(PartialFit, StreamedClassifier, StreamedEstimator):
    """Classification by latent vectors of competing length, fitted by streamed EM.

    Each class has a capsule h_i = W_i x of ``capsule_dim`` numbers; the class whose vector is longest wins,
    and the squashing function turns lengths into probabilities. Fits numpy arrays, memmaps, zarr and dask
    arrays and :class:`~scalelatent.Dataset` rows of any number, in process or on a Dask cluster, with the
    same bits.

    Parameters
    ----------
    capsule_dim : int, sequence of int or None
        Dimension d of the capsules, or one for each class (multiclass). None: 8, or as many as columns and
        the rows of the smallest class allow (``capsule_dim_``).
    architecture : {"multiclass", "one_vs_all", "all_vs_all"}
        One model with a capsule a class; a binary model for each class; one for each pair of classes. All
        members share each pass.
    algorithm : {"em", "stepwise", "incremental", "passive_aggressive"}
        Batch EM; stepwise EM, a step after each batch of rows (most often the fastest by far: on MNIST the
        error of batch EM in a tenth of its time, benchmarks/choosing.py); incremental EM, which exchanges the
        contributions of leaves of rows kept in the run folder; passive-aggressive learning row by row. The
        last three make ``n_epochs`` passes at most.
    projection : "auto", None or int
        Reduce rows to so many uncentred principal directions of the training rows first. "auto": 196 where
        rows are wider, else None.
    init : {"subspace", "random"}
        Start from each class's leading directions (equation 2.28), or from Gaussian noise.
    init_scale : float, default 1.0
        Of the random start: standard deviation of the latent means of a row of mean length.
    momentum : float, default 0.9
        gamma in [0, 1) of equation 2.27. Incremental EM: 0 is exact, more takes the part of contributions
        that is stale back. Not used by passive-aggressive learning.
    nu_schedule : "paper", None or sequence of (nu, patience)
        Rounds of thresholded EM with early stopping on the validation error (training error without
        validation rows). None: plain EM until ``max_iter`` or ``tol``. Online algorithms count patience in
        epochs.
    max_iter : int, default 2000
        Largest number of passes of batch EM.
    n_epochs : int, default 10
        Largest number of passes of the online algorithms.
    batch_rows : int or None
        Rows of a step. None: 1,024; incremental EM: a 32nd of the rows, but leaves (a step has ``n_chains``)
        of at least four rows for each row of W, at least 256 and at most 65,536.
    n_chains : int, default 4
        Parts of a step that are computed independently, by threads or workers; a multiple of it must be
        ``batch_rows``. It changes the result (passive-aggressive: copies of W that are averaged), the number
        of workers never does.
    kappa, t0 : float, default 0.6, 1000
        Stepwise EM: step sizes (1 + t / t0) ** -kappa in step t.
    aggressiveness : float, default 1.0
        Passive-aggressive learning: C of PA-I, the cap on the change that one row makes, of a residual of
        length ``g`` by at most C.
    tol : float or None
        End a round when the mean log-loss (nats) falls by less than this in a pass; None or 0 never does.
    ridge : float, default 0
        rho, added to the diagonal of the second moments of the rows: W <- (W S + Delta)(S + rho I)^-1.
    class_weight : dict, "balanced" or None
        Weights of classes, as in scikit-learn.
    warm_start : bool
        Start from the weights of the last fit.
    random_state : int, Generator, RandomState or None
        None draws a seed and keeps it in ``seed_``. A seed never changes the speed.
    device : {"auto", "cpu", "gpu"}
        "auto" is the GPU where there is one; on a cluster workers with and without one share a fit, whose
        bits then depend, within a tolerance, on who computed which rows.
    n_jobs : int or None
        Threads of a fit in this process; None is what ``joblib.parallel_config`` says, else all cores. The
        result is the same for any number.

    Attributes
    ----------
    classes_ : ndarray, shape (n_classes,)
    W_ : ndarray of float64, shape (sum of dimensions, p)
        Weights of all members' capsules, one under the other, on (projected) rows.
    capsule_dim_ : int or list of int
        Of all capsules, or one for each class.
    capsule_dims_ : ndarray of int, shape (members, capsules)
    projection_ : ndarray of float64, shape (features, p), or None
    n_iter_ : int
        Passes.
    history_ : list of dict
        One record a pass: objective (mean log-loss, nats), train_error, validation_error, seconds of the
        pass, rows, bytes_read, … The binary architectures have means over members instead: the objective,
        mean_member_train_error, mean_member_validation_error. Their validation_error is that of what the
        members decide together, which batch EM measures in the first eight passes and every eighth from then
        on (between, the last one is repeated); there is no train_error. Of an online algorithm with engine
        options ``report_steps`` or ``validate_steps`` also one at each such step, with the number of the pass
        that it belongs to; ``rows_seen`` tells them apart.
    best_validation_error_ : float or None
        Validation error of this model: ``1 - score`` of the validation rows.
    mean_member_validation_error_ : float or None
        Of the binary architectures: mean over members of each one's best validation error in its own problem.
    seed_ : int
    n_features_in_ : int

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
    _shares_passes = True
    classes_ = Learned(FIT_AGAIN)
    W_ = Learned(IN_PLACE)
    capsule_dims_ = Learned(FIT_AGAIN)
    projection_ = Learned(FIT_AGAIN)
    _sign_of_fit = "W_"

    def __init__(
        self,
        *,
        capsule_dim: int | Sequence[int] | None = None,
        architecture: str = "multiclass",
        algorithm: str = "em",
        projection: str | int | None = "auto",
        init: str = "subspace",
        init_scale: float = 1.0,
        momentum: float = 0.9,
        nu_schedule: str | Sequence[tuple[float, int]] | None = "paper",
        max_iter: int = 2000,
        n_epochs: int = 10,
        batch_rows: int | None = None,
        n_chains: int = 4,
        kappa: float = 0.6,
        t0: float = 1000.0,
        aggressiveness: float = 1.0,
        tol: float | None = None,
        ridge: float = 0,
        class_weight: Mapping[Any, float] | str | None = None,
        warm_start: bool = False,
        random_state: Any = None,
        device: str = "auto",
        n_jobs: int | None = None,
    ) -> None:
        self.capsule_dim = capsule_dim
        self.architecture = architecture
        self.algorithm = algorithm
        self.projection = projection
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
        self.aggressiveness = aggressiveness
        self.tol = tol
        self.ridge = ridge
        self.class_weight = class_weight
        self.warm_start = warm_start
        self.random_state = random_state
        self.device = device
        self.n_jobs = n_jobs

    @property
    def capsule_dim_(self) -> int | list[int]:
        """Dimension of all capsules, or one for each class."""
        return plain_dim(self.capsule_dims_)

    # -- fit
    # --------------------------------------------------------------------------------------------------

    def fit(
        self,
        X: Any,
        y: Any = None,
        *,
        validation: Any = None,
        sample_weight: Any = None,
        client: Any = None,
        run_dir: Any = None,
        resume: bool = False,
        callbacks: Callback | Sequence[Callback] = (),
        engine: Mapping[str, Any] | None = None,
        verbose: bool | None = None,
    ) -> CapsuleRegression:
        """Fit by passes over the rows.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, features)
            numpy, memmap, zarr and dask arrays, scipy sparse rows, lists.
        y : array-like, shape (n,)
            Labels; a Dataset brings its own.
        validation : Dataset or (X, y) or None
            Rows for early stopping; without them the training error is watched.
        sample_weight : array-like, shape (n,), or None
        client : distributed.Client or None
            A cluster to run on; None takes the enclosing ``with sl.cluster(…)``, else this process.
        run_dir : path or None
            Folder for checkpoints, shared by all workers.
        resume : bool
            Go on with the fit that ``run_dir`` holds.
        callbacks : Callback or sequence
        engine : dict or None
            block_rows, leaf_rows, checkpoint_seconds, checkpoint_passes, scratch, keep_scratch, cache; of the
            online algorithms checkpoint_steps, report_steps, validate_steps, run_rows, buffer_runs.
        verbose : bool or None
            Show progress: a display that moves on a terminal and in a notebook, lines elsewhere. None: in a
            notebook alone.

        Returns
        -------
        self

        Raises
        ------
        DataError
            Rows or labels that cannot be used, naming dataset and row.
        ValueError
            A parameter out of range.
        PlanError
            What memory cannot hold.
        RunError
            The run folder holds another fit; the cluster has no workers.

        Warns
        -----
        LongFitWarning
            It would take over an hour: with the time, and what would shorten it.

        Examples
        --------
        See the class.
        """
        self._check_params()
        train = self._training_rows(X, y, sample_weight)
        held = self._validation_rows(validation)
        assert train.classes is not None
        resources = find_resources(client or current_client(), self.n_jobs, None)
        new = clone(self)
        new.seed_ = 0  # orders of rows of all seeds need the same
        self._check_plan(partial(plan, new, train, held, resources, dict(engine or {})))
        self._fit_by_steps(train, held, client, run_dir, resume, callbacks, engine, verbose)
        return self

    def _fit_steps(self, rows: Mapping[str, Rows]) -> Steps:
        return fit_steps(self, rows)

    def _what_decides(self) -> dict[str, Any]:
        """The parameters that decide the result: a resumed fit must have the same ones."""
        unused = ONLINE_PARAMETERS if self.algorithm == "em" else ("max_iter",)
        given = {name: value for name, value in super()._what_decides().items() if name not in unused}
        return given | {"capsule_dim": CAPSULE_DIM if self.capsule_dim is None else self.capsule_dim}

    def _keep(
        self,
        classes: np.ndarray,
        em: CapsuleEM,
        basis: np.ndarray | None,
        result: LoopResult,
        w: np.ndarray,
        weight: np.ndarray,
        count: np.ndarray,
        decided: float | None,
    ) -> None:
        self._members = em.members
        self._set_learned(classes_=classes, W_=w, capsule_dims_=em.members.dims, projection_=basis)
        self.n_iter_ = result.state.iteration
        self.history_ = result.history
        errors = result.state.best_error if em.has_validation else None
        self.best_validation_error_ = decided if errors is None or len(errors) > 1 else float(errors[0])
        self.mean_member_validation_error_ = (
            None if errors is None or len(errors) == 1 else float(errors.mean())
        )
        # Members that see every class need no more than the sum.
        whole = (em.members.labels >= 0).all()
        moment = em.moment.sum(axis=0, keepdims=True) if whole else em.moment
        self._sums, self._running = RowSums(tuple(moment), weight, count), None
        passes = self.n_iter_ * float(count.sum())
        self._seen_rows = max((float(r.get("rows_seen", passes)) for r in self.history_), default=passes)

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
        """What ``fit`` would need, from shapes and a probe of a second; nothing is fitted.

        Parameters
        ----------
        X, y, validation, client, engine
            As in :meth:`fit`.
        memory_limit : str, int or None
            Of a worker, for example ``"4GB"``; None asks the cluster or this process.

        Returns
        -------
        dict
            For each stage tasks a pass, tree depth (of an online algorithm steps and rows of an epoch), bytes
            of a statistic and memory by what holds it; peak bytes a worker and on a device, bytes of scratch
            and checkpoints, seconds a pass, fewest and most passes.

        Raises
        ------
        PlanError
            It cannot fit: naming the setting that would.

        Examples
        --------
        >>> x, y = np.random.default_rng(0).normal(size=(50, 4)), np.arange(50) % 2
        >>> CapsuleRegression(capsule_dim=2).plan(x, y)["stages"]["estep"]["statistic_bytes"]
        168
        """
        new = clone(self)  # rows of another width leave this model as it is
        new.seed_ = 0  # orders of rows of all seeds need the same
        train, held = new._training_rows(X, y, None), new._validation_rows(validation)
        resources = find_resources(client or current_client(), self.n_jobs, memory_limit)
        return plan(new, train, held, resources, dict(engine or {}))

    def _row_map(self, what: str) -> CapsuleRows:
        return CapsuleRows(self._members, self.W_, self.projection_, what)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.transformer_tags.preserves_dtype = ["float32"]
        # Capsules have no offset: classes that differ by their mean alone, around the origin, are not told
        # apart.
        tags.classifier_tags.poor_score = True
        return tags

    # -- disk
    # -------------------------------------------------------------------------------------------------

    def _to_saved(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        arrays = {"W": self.W_, "dims": self._members.dims, "labels": self._members.labels}
        # What partial_fit goes on from.
        running = self._running
        if running is not None:
            running.renew()  # so that this model and the saved one go on alike
            arrays["running_W"] = running.w
        sums = self._sums if running is None else running.sums
        if sums is not None:
            arrays |= {
                "moment": np.stack(sums.moment),
                "moment_weight": sums.weight,
                "moment_rows": sums.count,
            }
        if self.projection_ is not None:
            arrays["projection"] = self.projection_
        values = {
            "architecture": self._members.architecture,
            "classes": self.classes_.tolist(),
            "classes_dtype": self.classes_.dtype.str,
            "n_iter": self.n_iter_,
            "n_features_in": self.n_features_in_,
            "seed": self.seed_,
            "best_validation_error": self.best_validation_error_,
            "mean_member_validation_error": self.mean_member_validation_error_,
            "seen_rows": self._seen_rows if running is None else running.rows,
            "prior_variance": 0.0 if running is None else running.variance,
        }
        return values, arrays

    @classmethod
    def _from_saved(
        cls, params: dict[str, Any], values: dict[str, Any], arrays: dict[str, np.ndarray]
    ) -> CapsuleRegression:
        model = cls(**restore_params(params))
        model._members = Members(values["architecture"], arrays["dims"], arrays["labels"])
        model._set_learned(
            classes_=np.array(values["classes"], dtype=values["classes_dtype"]),
            W_=arrays["W"],
            capsule_dims_=arrays["dims"],
            projection_=arrays.get("projection"),
        )
        model.n_iter_, model.n_features_in_, model.seed_ = (
            values["n_iter"],
            values["n_features_in"],
            values["seed"],
        )
        best, model.history_ = values["best_validation_error"], []
        # Models of earlier versions have the mean over members in its place.
        means = model._members.n_members > 1 and "mean_member_validation_error" not in values
        model.best_validation_error_ = None if means else best
        model.mean_member_validation_error_ = best if means else values.get("mean_member_validation_error")
        model._seen_rows, model._running, model._sums = values.get("seen_rows", 0.0), None, None
        if "moment" in arrays:
            weight = arrays["moment_weight"]
            # Models of earlier versions have no count of the rows: as if these weighed 1.
            model._sums = RowSums(tuple(arrays["moment"]), weight, arrays.get("moment_rows", weight))
        if "running_W" in arrays:
            assert model._sums is not None
            model._running = RunningCapsule(
                model._members,
                arrays["running_W"],
                model.W_,
                model._sums,
                values["prior_variance"],
                values["seen_rows"],
            )
        return model
