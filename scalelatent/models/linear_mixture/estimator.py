"""Mixtures of linear models as scikit-learn estimators: a classifier, and a density without labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from sklearn.base import DensityMixin
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted

from scalelatent.data import Dataset
from scalelatent.engine.plan import Forecast
from scalelatent.errors import DataError
from scalelatent.estimators.base import Saved, StreamedEstimator, What
from scalelatent.estimators.classifier import SCORE_ROWS, StreamedClassifier
from scalelatent.estimators.fit_services import restored_on_failure
from scalelatent.estimators.inputs import check_finite, check_some_weight, one_column
from scalelatent.estimators.learned import FIT_AGAIN, Learned
from scalelatent.estimators.onnx_graph import RowGraph
from scalelatent.estimators.session import CallbackList
from scalelatent.estimators.steps import Rows, Steps
from scalelatent.kernels.streams import resolve_seed, stream
from scalelatent.models.linear_mixture.kernels.reference import Frame
from scalelatent.models.linear_mixture.model import density
from scalelatent.models.linear_mixture.model.pancakes import Pancakes
from scalelatent.models.linear_mixture.model.recognise import confidence, probabilities, reject_curve

from .fit import ONLINE_PARAMETERS, check_n_dims, fit_steps, plan, recognising, shape_of
from .onnx_export import draw_probabilities
from .output import DENSE, Fitted, MixtureRows, density_of
from .parameters import DENSITY_PARAMETERS, PARAMETERS

if TYPE_CHECKING:
    from scalelatent.typing import ClientLike, LabelsLike, RandomState, RowsLike, WeightsLike

# Rows whose hidden features are filled in at a time.
COMPLETED_ROWS = 4096
# Rows that are learned at a time.
LEARNED_ROWS = 4096


class _LinearMixtures(StreamedEstimator):
    """What both have in common."""

    _fitted_attribute = "_fitted"
    _shares_passes = True
    _rounds_rows = True
    means_ = Learned(FIT_AGAIN, lambda model: model._fitted.pancakes.means)
    bases_ = Learned(FIT_AGAIN, lambda model: _own_columns(model, model._fitted.pancakes.bases))
    variances_ = Learned(FIT_AGAIN, lambda model: _own_columns(model, model._fitted.pancakes.values))
    noise_ = Learned(FIT_AGAIN, lambda model: model._fitted.pancakes.noise)
    weights_ = Learned(FIT_AGAIN, lambda model: model._fitted.pancakes.weights)
    component_classes_ = Learned(FIT_AGAIN, lambda model: model._fitted.classes)
    basis_ = Learned(FIT_AGAIN, lambda model: model._fitted.basis)
    n_dims_ = Learned(FIT_AGAIN, lambda model: model._fitted.pancakes.n_dims)
    recognition = "error"  # a parameter of the classifier alone
    _fitted: Fitted
    # None until a fit settles them from its rows.
    n_components: Any
    n_dims: Any

    def _check_rows(self, train: Dataset, held: Dataset | None) -> None:
        shape_of(self, train)
        check_n_dims(self, train.n_features)

    def _deciding_parameters(self) -> dict[str, Any]:
        unused = ONLINE_PARAMETERS if self.algorithm == "em" else ("max_iter", "tol")
        return {name: value for name, value in super()._deciding_parameters().items() if name not in unused}

    def _keep(
        self, fitted: Fitted, n_iter: int, history: list[dict[str, Any]], classes: np.ndarray | None
    ) -> None:
        """Take what a fit has found."""
        self._fitted = fitted
        self.n_iter_, self.history_ = n_iter, history
        if classes is not None:
            self._set_learned(classes_=classes)

    def _row_map(self, what: What) -> MixtureRows:
        name, label = what if isinstance(what, tuple) else (what, None)
        fitted = recognising(self, self._fitted)
        return MixtureRows(fitted, name, -1 if label is None else label)

    def encode(self, X: RowsLike, label: Any = None) -> tuple[np.ndarray, np.ndarray]:
        """Codes of rows under their best sub-classes.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, features)
        label : label of a class or None
            Of whose sub-classes; None: of all.

        Returns
        -------
        codes : ndarray of float64, shape (n, h)
            Coordinates along ``bases_[components]``; of factor analysis posterior means.
        components : ndarray of int, shape (n,)

        Examples
        --------
        See the class.
        """
        found = self._mapped_rows(X, ("codes", self._class_number(label)))
        return found[:, 1:], found[:, 0].astype(np.int64)

    def _learn_rows(
        self, X: RowsLike, y: LabelsLike | None, sample_weight: WeightsLike | None = None
    ) -> Self:
        if self._fitted.likelihood == "factor-analysis":
            raise ValueError(
                "likelihood='factor-analysis' has no step for some rows: fit again, or choose 'ppca'"
            )
        ds = self._training_rows(X, y, sample_weight, reset=False)
        check_some_weight(ds.read_weight(0, len(ds)))
        fitted, classes = self._fitted, getattr(self, "classes_", None)
        if len(ds) > LEARNED_ROWS:  # a later part may be refused
            fitted = replace(fitted, own=False)
        for first in range(0, len(ds), LEARNED_ROWS):
            stop = min(first + LEARNED_ROWS, len(ds))
            x = ds.read_x(first, stop)
            x = x if isinstance(x, np.ndarray) else x.toarray()
            check_finite(x, "X", first)
            codes = np.zeros(stop - first, dtype=np.int64)
            if classes is not None:
                labels = np.asarray(ds.read_y(first, stop))
                codes = np.searchsorted(classes, labels)
                new = classes[np.minimum(codes, len(classes) - 1)] != labels
                if new.any():
                    raise DataError(
                        f"label {labels[new][0]!s} is none of the classes {classes.tolist()} that the model "
                        "knows: fit again with rows of all classes"
                    )
            fitted = fitted.with_rows(x, codes, ds.read_weight(first, stop))
        self._fitted = fitted  # all rows, or none
        return self

    def _mapped_rows(self, X: RowsLike, what: What) -> np.ndarray:
        check_is_fitted(self)
        found = self._map(X, what)
        return np.asarray(found)

    def _class_number(self, label: Any) -> int | None:
        if label is None:
            return None
        check_is_fitted(self)
        classes = getattr(self, "classes_", None)
        if classes is None:
            raise DataError(f"label={label!r}: {type(self).__name__} has no classes; leave label out")
        found = np.flatnonzero(classes == label)
        if not len(found):
            raise DataError(f"label={label!r} is none of the classes {classes.tolist()}")
        return int(found[0])

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.transformer_tags.preserves_dtype = ["float32"]
        return tags

    # -- saving ----------------------------------------------------------------------------------------------

    def _state(self) -> Saved:
        f, now = self._fitted, self._fitted.pancakes
        arrays = {name: getattr(now, name) for name in ("means", "bases", "values", "noise", "weights")}
        arrays |= {"component_classes": f.classes, "priors": f.priors, "counts": f.counts}
        if f.basis is not None:
            arrays["basis"] = f.basis
        values: dict[str, Any] = {
            "n_dims": now.n_dims,
            "likelihood": f.likelihood,
            "temperature": f.temperature,
            "floor": f.floor,
            "frame": None,
        }
        if f.frame is not None:
            values["frame"] = [list(f.frame.names), list(f.frame.shape), f.frame.smoothing]
        if hasattr(self, "classes_"):
            values |= {"classes": self.classes_.tolist(), "classes_dtype": self.classes_.dtype.str}
        return values, arrays

    def _restore(self, values: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        parts = {name: arrays[name] for name in ("means", "bases", "values", "noise", "weights")}
        frame = values["frame"]
        if frame is not None:
            names, (height, width), smoothing = frame
            frame = Frame(tuple(names), (int(height), int(width)), float(smoothing))
        self._fitted = Fitted(
            Pancakes(**parts, n_dims=int(values["n_dims"])),
            arrays["component_classes"],
            arrays["priors"],
            values["likelihood"],
            float(values["temperature"]),
            arrays.get("basis"),
            frame,
            arrays["counts"],
            float(values["floor"]),
        )
        if "classes" in values:
            self._set_learned(classes_=np.array(values["classes"], dtype=values["classes_dtype"]))


def _own_columns(model: _LinearMixtures, columns: np.ndarray) -> np.ndarray:
    """Without the spare directions."""
    return columns[..., : model._fitted.pancakes.n_dims]


class LinearMixtureClassifier(_LinearMixtures, StreamedClassifier):
    """Classification by mixtures of linear models, fitted by streamed EM.

    Each class has ``n_components`` sub-classes: a mean and an orthonormal basis of ``n_dims`` directions in
    which moving is free. A row belongs to the sub-class that reconstructs it best; its class is the class of
    that. Fits arrays and :class:`~scalelatent.Dataset` rows of any number, in process or on a Dask cluster,
    with the same bits.

    Parameters
    ----------
    n_components : int, sequence of int or None
        Sub-classes of each class, or one number for each class. None takes one for each ``5 * (n_dims + 1)``
        rows of a class, at least 1 and at most 20.
    n_dims : int, float or None
        Dimensions h of each pancake; below 1 the share of the rows' variance that they hold, the same number
        for all, up to ``max_dims``. 0 is k-means. None takes one for each 16 features, at most 10.
    max_dims : int, default 40
    assignment : {"hard", "soft"}
        A row belongs to the best sub-class, or to each in proportion to exp(-score / 2 sigma²).
    likelihood : {"error", "code-cost", "ppca", "factor-analysis"}
        Score of a row: squared reconstruction error; that plus the cost of the code; -2 log density of
        probabilistic PCA or of factor analysis.
    tangents : sequence of str
        Of "shift-x", "shift-y", "rotation", "scaling", "hyperbolic-axis", "hyperbolic-diagonal", "thickness":
        small changes of images that leave their class as it is.
    temperature : float or None
        sigma² of soft assignments by the error; None learns it.
    noise_floor : float, default 1e-6
        Smallest noise, as a share of the mean variance of a feature. Classes by "ppca" and "factor-analysis"
        want about 0.3 where some features are constant in some sub-classes.
    tangent_weight, recognition_tangent_weight : float, default 0, 0.3
        Weight of all tangents against the rows, by their traces, in clustering and in the final bases.
    tangent_smoothing, smoothing : float, default 0.6, 0
        Standard deviation in pixels of the smoothing before derivatives, and of the rows themselves.
    algorithm : {"em", "stepwise"}
        Passes of EM, or a step of EM with forgetting after each batch of rows, from an EM on the sample.
    max_iter : int, default 30
        Most passes of EM after the start.
    tol : float or None, default 1e-4
        Relative fall of the error, or of -log-likelihood, that ends EM.
    n_epochs : int, default 3
        Passes of stepwise EM.
    batch_rows : int or None
        Rows of a step, rounded up to a multiple of 4; None: an eighth of the rows, at most 20 a sub-class or
        1,024.
    image_shape : (int, int) or None
        Height and width of the images that rows are; None takes those of the dataset.
    recognition : {"error", "tangent-distance"}
        Score of a row, or the least of it over small changes of the row along its own tangents. It may change
        after the fit; the temperature of probabilities stays that of the fit.
    warm_start : bool
        Go on from the pancakes of the last fit.
    random_state : int, Generator, RandomState or None
        None draws a seed and keeps it in ``seed_``.
    device : {"auto", "cpu", "gpu"}
    n_jobs : int or None
        Threads of a fit in this process; the result is the same for any number.

    Attributes
    ----------
    classes_ : ndarray, shape (n_classes,)
    means_ : ndarray of float64, shape (K, p)
        Of all sub-classes, class after class; those that starved and were dropped are left out.
    bases_ : ndarray of float64, shape (K, p, h)
        Orthonormal; of factor analysis the loadings.
    variances_ : ndarray of float64, shape (K, h)
        Variance along each direction; of factor analysis unused.
    noise_ : ndarray of float64, shape (K,), or (K, p) of factor analysis
        Variance in each other direction, or of each feature.
    weights_ : ndarray of float64, shape (K,)
        Share of the rows of its class.
    component_classes_ : ndarray of int, shape (K,)
        Number of the class of each sub-class in ``classes_``.
    n_dims_ : int
    basis_ : ndarray of float64, shape (features, p), or None
        What rows are multiplied by first, where they are smoothed.
    temperature_ : float
        Of class probabilities: the least log-loss of validation rows, else of training rows (at most about
        20,000), each by the mean and directions of its sub-class without it.
    n_iter_ : int
        Passes.
    history_ : list of dict
        One record a pass: objective (mean score of a row, or nats), phase ("k-means", "settle", "em",
        "finish"), sub-classes starved, refilled and dropped, directions ``cut`` for want of rows, …
    seed_ : int
    n_features_in_ : int

    Notes
    -----
    ``transform`` gives the scores of all K sub-classes, float32: the smaller, the better the row fits.

    References
    ----------
    G. E. Hinton, M. Revow, P. Dayan, "Recognizing handwritten digits using mixtures of linear models", NIPS 7
    (1995).

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> x, y = load_digits(return_X_y=True)
    >>> m = LinearMixtureClassifier(n_components=3, n_dims=6, random_state=0)
    >>> bool(m.fit(x[:1000], y[:1000]).score(x[1000:], y[1000:]) > 0.9)
    True
    """

    _kind = "linear_mixture"
    _parameters = PARAMETERS
    _without_labels = "LinearMixture is a density of rows without labels"
    classes_ = Learned(FIT_AGAIN)
    temperature_ = Learned(FIT_AGAIN, lambda model: model._fitted.temperature)

    def __init__(
        self,
        *,
        n_components: int | Sequence[int] | None = None,
        n_dims: int | float | None = None,
        max_dims: int = 40,
        assignment: str = "hard",
        likelihood: str = "error",
        tangents: Sequence[str] = (),
        temperature: float | None = None,
        noise_floor: float = 1e-6,
        tangent_weight: float = 0.0,
        recognition_tangent_weight: float = 0.3,
        tangent_smoothing: float = 0.6,
        smoothing: float = 0.0,
        algorithm: str = "em",
        max_iter: int = 30,
        tol: float | None = 1e-4,
        n_epochs: int = 3,
        batch_rows: int | None = None,
        image_shape: tuple[int, int] | None = None,
        recognition: str = "error",
        warm_start: bool = False,
        random_state: RandomState = None,
        device: str = "auto",
        n_jobs: int | None = None,
    ) -> None:
        self.n_components = n_components
        self.n_dims = n_dims
        self.max_dims = max_dims
        self.assignment = assignment
        self.likelihood = likelihood
        self.tangents = tangents
        self.temperature = temperature
        self.noise_floor = noise_floor
        self.tangent_weight = tangent_weight
        self.recognition_tangent_weight = recognition_tangent_weight
        self.tangent_smoothing = tangent_smoothing
        self.smoothing = smoothing
        self.algorithm = algorithm
        self.max_iter = max_iter
        self.tol = tol
        self.n_epochs = n_epochs
        self.batch_rows = batch_rows
        self.image_shape = image_shape
        self.recognition = recognition
        self.warm_start = warm_start
        self.random_state = random_state
        self.device = device
        self.n_jobs = n_jobs

    def _draw_prediction(self, graph: RowGraph) -> None:
        graph.classes(draw_probabilities(graph, self._row_map("probabilities")), self.classes_)

    def _fit_steps(self, rows: Mapping[str, Rows]) -> Steps:
        return fit_steps(self, rows, rows["train"].classes)

    def _plan(self, told: Forecast) -> dict[str, Any]:
        return plan(self, told, told.train.classes)

    def partial_fit(
        self,
        X: RowsLike,
        y: LabelsLike | None = None,
        classes: Any = None,
        *,
        sample_weight: WeightsLike | None = None,
    ) -> Self:
        """Learn from some more rows, at once and in this process.

        The first call of a model that was not fitted is :meth:`fit`. Later rows go to the nearest sub-class
        of their class, whose mean, basis and variances follow by incremental SVD: the mean exactly, the
        others as far as the spare directions hold them. Tangents and ``temperature_`` stay as they were.
        They change in place: copy ``means_`` and the like to keep what they were.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, features)
            One row or more; in the first call rows of every class, more than there are sub-classes.
        y : array-like, shape (n,); a Dataset brings its own
        classes : array-like or None
            All classes that will ever come; a class that is named more than once counts once, as in
            scikit-learn.
        sample_weight : array-like, shape (n,), or None
            Weight of each row, finite and at least 0. A row of weight 2 counts as two rows; a row of weight 0
            is not learned.

        Returns
        -------
        self

        Raises
        ------
        ValueError
            Factor analysis, which has no such step; other ``classes`` than those that the model knows.
        DataError
            A label that is none of the classes; NaN or infinite values, naming row and feature; weights that
            are 0 for all rows.

        Examples
        --------
        See the class.
        """
        self._check_params()
        if not hasattr(self, "_fitted"):
            with restored_on_failure(self):
                ds = self._training_rows(X, y, sample_weight)
                check_some_weight(ds.read_weight(0, len(ds)))
                labels = ds.read_y(0, len(ds))
                names = np.unique(labels if classes is None else classes)
                if (names.dtype.kind == "U") != (labels.dtype.kind == "U"):
                    both = f"y holds labels of type {labels.dtype}, classes={names.tolist()} of {names.dtype}"
                    raise DataError(f"{both}: give labels and classes both as numbers, or both as strings")
                missing = np.setdiff1d(names, labels)
                if len(missing):
                    raise DataError(
                        f"class {missing[0]!s} has no rows, and the first rows have to be of every class: "
                        "collect more of them"
                    )
            return self.fit(X, y, sample_weight=sample_weight)
        if classes is not None and not np.array_equal(np.unique(classes), self.classes_):
            raise ValueError(
                f"classes={np.unique(classes).tolist()} are not those that the model knows, "
                f"{self.classes_.tolist()}: leave classes out, or fit again"
            )
        return self._learn_rows(X, y, sample_weight)

    def decision_function(
        self,
        X: RowsLike,
        *,
        out: str | Path | None = None,
        client: ClientLike | None = None,
        overwrite: bool = False,
        callbacks: CallbackList = (),
    ) -> Any:
        """Minus the score of the best sub-class of each class: the larger, the better.

        Parameters
        ----------
        X, out, client, overwrite, callbacks
            As in :meth:`transform`.

        Returns
        -------
        ndarray of float32, shape (n, classes); of two classes (n,), the second less the first
            A lazy array for a dask array; with ``out`` a Dataset of these values, of two classes one column.

        Examples
        --------
        See the class.
        """
        found = self._map(X, "decisions", out, client, overwrite, callbacks)
        return found[:, 0] if out is None and len(self.classes_) == 2 else found

    def confidence(self, X: RowsLike) -> np.ndarray:
        """How sure the class of each row is.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, features)

        Returns
        -------
        ndarray of float64, shape (n,)
            1 - best / second error of the classes; of densities 1 - second / best probability. 0: two classes
            are alike.

        Examples
        --------
        See the class.
        """
        return self._certainty(self._mapped_rows(X, "scores"))

    def _certainty(self, scores: np.ndarray) -> np.ndarray:
        if self._fitted.likelihood not in DENSE:
            return confidence(scores)
        shares = probabilities(scores, self._fitted.temperature)
        if shares.shape[1] < 2:
            return np.ones(len(shares))
        two = np.sort(shares, axis=1)[:, -2:]
        return np.asarray(1.0 - two[:, 0] / two[:, 1])

    def reject_curve(self, X: RowsLike, y: LabelsLike | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Error rate of the rows that are left when the least certain are rejected.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, features)
        y : array-like, shape (n,); a Dataset brings its own

        Returns
        -------
        rejected : ndarray, shape (n,)
            Share of the rows.
        error : ndarray, shape (n,)

        Raises
        ------
        DataError
            No labels.

        Examples
        --------
        See the class.
        """
        check_is_fitted(self)
        ds = self._given_rows(X)
        if y is None and not ds.has_y:
            raise DataError(f"{ds.url or 'X'} has no labels: pass y, or a dataset with labels")
        given = None if y is None else np.asarray(one_column(y))
        if given is not None and len(given) != len(ds):
            raise DataError(f"y has {len(given)} entries for {len(ds)} rows: give one a row")
        certain, wrong = [], []
        for first in range(0, len(ds), SCORE_ROWS):
            stop = min(first + SCORE_ROWS, len(ds))
            scores = self._mapped_rows(ds[first:stop], "scores")
            truth = ds.read_y(first, stop) if given is None else given[first:stop]
            certain.append(self._certainty(scores))
            wrong.append(self.classes_[scores.argmin(axis=1)] != truth)
        return reject_curve(np.concatenate(certain), np.concatenate(wrong))

    def reconstruct(self, X: RowsLike, label: Any = None) -> np.ndarray:
        """Rows as their best sub-class gives them.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, features)
        label : label of a class or None
            Of whose sub-classes; None: of all.

        Returns
        -------
        ndarray of float32, shape (n, features)

        Examples
        --------
        See the class.
        """
        return self._mapped_rows(X, ("reconstructions", self._class_number(label)))


class LinearMixture(DensityMixin, _LinearMixtures):
    """A density of rows: a mixture of linear models, fitted by streamed EM without labels.

    Of the likelihoods "ppca" and "factor-analysis" it is a mixture of Gaussians with covariances of low rank
    and noise; of the errors its densities are those of probabilistic PCA in the bases found.

    Parameters
    ----------
    n_components : int or None
        None takes one for each ``5 * (n_dims + 1)`` rows, at least 1 and at most 20.
    n_dims : int, float or None
        Dimensions h of each pancake; below 1 the share of the rows' variance that they hold, the same number
        for all, up to ``max_dims``. 0 is k-means. None takes half the number of features, at most 10.
    max_dims : int, default 40
    assignment : {"hard", "soft"}
        A row belongs to the best sub-class, or to each in proportion to exp(-score / 2 sigma²).
    likelihood : {"error", "code-cost", "ppca", "factor-analysis"}
        Score of a row: squared reconstruction error; that plus the cost of the code; -2 log density of
        probabilistic PCA or of factor analysis.
    tangents : sequence of str
        Of "shift-x", "shift-y", "rotation", "scaling", "hyperbolic-axis", "hyperbolic-diagonal", "thickness":
        small changes of images that leave their class as it is.
    temperature : float or None
        sigma² of soft assignments by the error; None learns it.
    noise_floor : float, default 1e-6
        Smallest noise, as a share of the mean variance of a feature.
    tangent_weight, recognition_tangent_weight : float, default 0, 0.3
        Weight of all tangents against the rows, by their traces, in clustering and in the final bases.
    tangent_smoothing, smoothing : float, default 0.6, 0
        Standard deviation in pixels of the smoothing before derivatives, and of the rows themselves.
    algorithm : {"em", "stepwise"}
        Passes of EM, or a step of EM with forgetting after each batch of rows, from an EM on the sample.
    max_iter : int, default 30
        Most passes of EM after the start.
    tol : float or None, default 1e-4
        Relative fall of the error, or of -log-likelihood, that ends EM.
    n_epochs : int, default 3
        Passes of stepwise EM.
    batch_rows : int or None
        Rows of a step, rounded up to a multiple of 4; None: an eighth of the rows, at most 20 a sub-class or
        1,024.
    image_shape : (int, int) or None
        Height and width of the images that rows are; None takes those of the dataset.
    warm_start : bool
        Go on from the pancakes of the last fit.
    random_state : int, Generator, RandomState or None
        None draws a seed and keeps it in ``seed_``.
    device : {"auto", "cpu", "gpu"}
    n_jobs : int or None
        Threads of a fit in this process; the result is the same for any number.

    Attributes
    ----------
    means_ : ndarray of float64, shape (K, p)
        Of all components; those that starved and were dropped are left out.
    bases_ : ndarray of float64, shape (K, p, h)
        Orthonormal; of factor analysis the loadings.
    variances_ : ndarray of float64, shape (K, h)
        Variance along each direction; of factor analysis unused.
    noise_ : ndarray of float64, shape (K,), or (K, p) of factor analysis
        Variance in each other direction, or of each feature.
    weights_ : ndarray of float64, shape (K,)
        Share of the rows of its class.
    component_classes_ : ndarray of int, shape (K,)
        Zeros.
    n_dims_ : int
    basis_ : ndarray of float64, shape (features, p), or None
        What rows are multiplied by first, where they are smoothed.
    n_iter_ : int
    history_ : list of dict
    seed_ : int
    n_features_in_ : int

    Notes
    -----
    ``transform`` gives the scores of all K components, float32: the smaller, the better the row fits.

    References
    ----------
    M. Tipping, C. Bishop, "Mixtures of probabilistic principal component analysers", Neural Computation 11
    (1999). Z. Ghahramani, G. Hinton, "The EM algorithm for mixtures of factor analyzers" (1996).

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> x = load_digits().data
    >>> d = LinearMixture(n_components=10, n_dims=5, likelihood="ppca", random_state=0)
    >>> d.fit(x).sample(3)[0].shape
    (3, 64)
    """

    _kind = "linear_density"
    _transformed = "latents"
    _parameters = DENSITY_PARAMETERS
    _validates = False

    def __init__(
        self,
        *,
        n_components: int | None = None,
        n_dims: int | float | None = None,
        max_dims: int = 40,
        assignment: str = "hard",
        likelihood: str = "error",
        tangents: Sequence[str] = (),
        temperature: float | None = None,
        noise_floor: float = 1e-6,
        tangent_weight: float = 0.0,
        recognition_tangent_weight: float = 0.3,
        tangent_smoothing: float = 0.6,
        smoothing: float = 0.0,
        algorithm: str = "em",
        max_iter: int = 30,
        tol: float | None = 1e-4,
        n_epochs: int = 3,
        batch_rows: int | None = None,
        image_shape: tuple[int, int] | None = None,
        warm_start: bool = False,
        random_state: RandomState = None,
        device: str = "auto",
        n_jobs: int | None = None,
    ) -> None:
        self.n_components = n_components
        self.n_dims = n_dims
        self.max_dims = max_dims
        self.assignment = assignment
        self.likelihood = likelihood
        self.tangents = tangents
        self.temperature = temperature
        self.noise_floor = noise_floor
        self.tangent_weight = tangent_weight
        self.recognition_tangent_weight = recognition_tangent_weight
        self.tangent_smoothing = tangent_smoothing
        self.smoothing = smoothing
        self.algorithm = algorithm
        self.max_iter = max_iter
        self.tol = tol
        self.n_epochs = n_epochs
        self.batch_rows = batch_rows
        self.image_shape = image_shape
        self.warm_start = warm_start
        self.random_state = random_state
        self.device = device
        self.n_jobs = n_jobs

    def _fit_steps(self, rows: Mapping[str, Rows]) -> Steps:
        return fit_steps(self, rows, None)

    def _plan(self, told: Forecast) -> dict[str, Any]:
        return plan(self, told, None)

    def _training_rows(
        self, X: RowsLike, y: LabelsLike | None, sample_weight: WeightsLike | None, *, reset: bool = True
    ) -> Dataset:
        # Labels are not looked at.
        return self._given_rows(X, None, sample_weight, reset=reset)

    def partial_fit(self, X: RowsLike, y: LabelsLike | None = None) -> Self:
        """Learn from some more rows, at once and in this process.

        The first call of a model that was not fitted is :meth:`fit`. Later rows go to the nearest component,
        whose mean, basis and variances follow by incremental SVD: the mean exactly, the others as far as the
        spare directions hold them. They change in place: copy ``means_`` and the like to keep what they were.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, features)
            One row or more; in the first call more than there are components. The weights of a Dataset count.
        y : ignored

        Returns
        -------
        self

        Raises
        ------
        ValueError
            Factor analysis, which has no such step.
        DataError
            NaN or infinite values, naming row and feature.

        Examples
        --------
        See the class.
        """
        self._check_params()
        return self._learn_rows(X, y) if hasattr(self, "_fitted") else self.fit(X)

    def predict(
        self,
        X: RowsLike,
        *,
        out: str | Path | None = None,
        client: ClientLike | None = None,
        overwrite: bool = False,
        callbacks: CallbackList = (),
    ) -> Any:
        """Best component of each row.

        Parameters
        ----------
        X, out, client, overwrite, callbacks
            As in :meth:`transform`.

        Returns
        -------
        ndarray of int32, shape (n,); a lazy array for a dask array; with ``out`` a Dataset of one column

        Examples
        --------
        See the class.
        """
        found = self._map(X, "components", out, client, overwrite, callbacks)
        return found if out is not None else found[:, 0]

    def predict_proba(self, X: RowsLike) -> np.ndarray:
        """Posterior of each component.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, features)

        Returns
        -------
        ndarray of float64, shape (n, K)

        Examples
        --------
        See the class.
        """
        return self._mapped_rows(X, "shares")

    def score_samples(self, X: RowsLike) -> np.ndarray:
        """Log-likelihood of each row, in nats.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, features)

        Returns
        -------
        ndarray of float64, shape (n,)
            Of the smoothed rows, where there is smoothing.

        Examples
        --------
        See the class.
        """
        return self._mapped_rows(X, "log-likelihood")[:, 0]

    def score(self, X: RowsLike, y: LabelsLike | None = None) -> float:
        """Mean log-likelihood of rows, in nats; weights of a Dataset count.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, features)
        y : ignored

        Returns
        -------
        float

        Examples
        --------
        See the class.
        """
        check_is_fitted(self)
        ds = self._given_rows(X)
        total = rows = 0.0
        for first in range(0, len(ds), SCORE_ROWS):
            stop = min(first + SCORE_ROWS, len(ds))
            found, weight = self.score_samples(ds[first:stop]), ds.read_weight(first, stop)
            total += float(found.sum() if weight is None else found @ weight)
            rows += float(len(found) if weight is None else weight.sum())
        return total / rows

    def sample(self, n_samples: int = 1, random_state: RandomState = None) -> tuple[np.ndarray, np.ndarray]:
        """New rows, drawn from the mixture.

        Parameters
        ----------
        n_samples : int
        random_state : int, Generator, RandomState or None
            None takes the seed of the fit.

        Returns
        -------
        X : ndarray of float32, shape (n_samples, features)
            Of smoothed rows, smooth ones.
        components : ndarray of int, shape (n_samples,)

        Examples
        --------
        See the class.
        """
        check_is_fitted(self)
        if int(n_samples) != n_samples or n_samples < 1:
            raise ValueError(f"n_samples={n_samples!r}: give a whole number of at least 1")
        seed = self.seed_ if random_state is None else resolve_seed(random_state)
        f = self._fitted
        rng = stream(seed, "linear-mixture-samples")
        rows, index = density.sample(f.pancakes, density_of(f.likelihood), int(n_samples), rng)
        return rows.astype(np.float32), index

    def reconstruct(self, X: RowsLike, observed: Any = None) -> np.ndarray:
        """Rows as their best component gives them, or with what is hidden filled in.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, features)
        observed : array-like of bool, features of them, or None
            Features that are seen. Others are replaced by their conditional means given the seen ones;
            their values are not looked at.

        Returns
        -------
        ndarray of float32, shape (n, features)

        Raises
        ------
        ValueError
            A mask of another width, or one that hides all.

        Examples
        --------
        See the class.
        """
        if observed is None:
            return self._mapped_rows(X, "reconstructions")
        check_is_fitted(self)
        f = self._fitted
        if f.basis is not None:
            raise ValueError("observed is of features, and this model is of smoothed rows: leave it out")
        ds = self._given_rows(X)
        parts = []
        for first in range(0, len(ds), COMPLETED_ROWS):
            x = ds.read_x(first, min(first + COMPLETED_ROWS, len(ds)))
            rows = np.asarray(x if isinstance(x, np.ndarray) else x.toarray(), dtype=np.float64)
            parts.append(density.complete(f.pancakes, density_of(f.likelihood), rows, observed)[0])
        return np.concatenate(parts).astype(np.float32)
