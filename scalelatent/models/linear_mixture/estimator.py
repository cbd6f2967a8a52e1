"""Mixtures of linear models as scikit-learn estimators: a classifier, and a density without labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
from sklearn.base import DensityMixin
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted

from scalelatent.data import Dataset
from scalelatent.engine.plan import Forecast
from scalelatent.errors import DataError
from scalelatent.estimators.base import OutputName, SavedModelState, StreamedEstimator
from scalelatent.estimators.classifier import SCORE_ROWS, StreamedClassifier
from scalelatent.estimators.fit_services import restored_on_failure
from scalelatent.estimators.fitted_attributes import FIT_AGAIN, FittedAttribute
from scalelatent.estimators.gpu_results import follows_rows
from scalelatent.estimators.inputs import check_any_weight, check_finite, to_column
from scalelatent.estimators.onnx_graph import OnnxGraph
from scalelatent.estimators.session import CallbackList
from scalelatent.estimators.steps import MappedRows, Steps
from scalelatent.kernels.streams import resolve_seed, stream
from scalelatent.models.linear_mixture.kernels.reference import TangentSpec
from scalelatent.models.linear_mixture.model import density
from scalelatent.models.linear_mixture.model.components import DENSITY_LIKELIHOODS, Components
from scalelatent.models.linear_mixture.model.recognition import confidence, probabilities, reject_curve

from .fit import STEPWISE_PARAMETERS, apply_recognition, fit_steps, plan_fit
from .onnx_export import draw_probabilities
from .output import FittedMixture, MixtureRowMap, density_likelihood
from .parameters import DENSITY_PARAMETERS, PARAMETERS
from .settings import check_n_dims, find_image_shape

if TYPE_CHECKING:
    from scalelatent.typing import ClientLike, LabelsLike, RandomState, RowsLike, WeightsLike

_Class = TypeVar("_Class", bound=type)

# Number of rows in which `reconstruct` fills in hidden features at a time.
COMPLETION_BLOCK_ROWS = 4096
# Number of rows that `partial_fit` adds to the components at a time.
PARTIAL_FIT_BLOCK_ROWS = 4096

# Paragraphs that the docstrings of both classes have in common; `_share_docs` inserts them.
_SHARED_DOCS = {
    "parameters": """\
n_dims : int or None
        Directions h of each component; 0 is k-means.
        {n_dims}
    assignment : {{"hard", "soft"}}
        "hard": a row belongs to the component with the best score; "soft": to each in proportion to
        exp(-score / 2 sigma²).
    likelihood : {{"error", "code-cost", "ppca", "factor-analysis"}}{or_none}
        Score of a row: squared reconstruction error; that plus the cost of the code; -2 log density of
        probabilistic PCA or of factor analysis. {likelihood}
    tangents : sequence of str
        Small changes of images that do not change their class: some of "shift-x", "shift-y", "rotation",
        "scaling", "hyperbolic-axis", "hyperbolic-diagonal", "thickness".
    temperature : float or None
        sigma² of soft assignment, in squared units of the features; None estimates it.
    noise_floor : float, default 1e-6
        Smallest noise, as a share of the mean variance of a feature. Classifiers by "ppca" and
        "factor-analysis" need about 0.3 if some features are constant in some components.
    tangent_weight, recognition_tangent_weight : float, default 0, 0.3
        Weight of all tangents together relative to the rows: in clustering, and in the final bases.
    tangent_smoothing, smoothing : float, default 0.6, 0
        Standard deviation in pixels of the smoothing before the derivatives, and of that of the rows.
    algorithm : {{"em", "stepwise"}}
        "em": passes of EM. "stepwise": EM on a sample, then a step with forgetting after each batch of rows;
        it needs fewer passes and has a slightly larger error.
    max_iter : int, default 30
        Most passes of EM after k-means.
    tol : float or None, default 1e-3
        EM ends when the objective falls by less than this share in a pass. None and 0 take all passes.
    n_epochs : int, default 3
        Passes of stepwise EM.
    batch_rows : int or None
        Rows of a step of stepwise EM, rounded up to a multiple of 4. None: an eighth of the rows, at most
        1,024, or 20 per component if that is more.
    image_shape : (int, int) or None
        Height and width of the images that rows are; None takes those of the dataset.""",
    "last_parameters": """\
warm_start : bool, default False
        Continue from the components of the last fit.
    random_state : int, Generator, RandomState or None
        None draws a seed and keeps it in ``seed_``.
    device : {{"auto", "cpu", "gpu"}}
    n_jobs : int or None
        Threads of a fit in this process; the result does not depend on their number.""",
    "attributes": """\
means_ : ndarray of float64, shape (K, p)
        Means of all components, class by class. Components that starved and were dropped are not included.
    bases_ : ndarray of float64, shape (K, p, h)
        Orthonormal directions; in factor analysis the loadings.
    variances_ : ndarray of float64, shape (K, h)
        Variance along each direction; factor analysis does not use it.
    noise_ : ndarray of float64, shape (K,); (K, p) in factor analysis
        Variance in each other direction; in factor analysis the variance of each feature.
    weights_ : ndarray of float64, shape (K,)
        Share of the rows of the class.
    component_classes_ : ndarray of int, shape (K,)
        Index of the class of each component; 0 without labels.
    n_dims_ : int
    likelihood_ : str
        Score of a row that the fit used.
    basis_ : ndarray of float64, shape (p, p), or None
        Matrix by which rows are multiplied to smooth them.
    n_iter_ : int
        Passes.
    history_ : list of dict
        One record per pass: ``objective`` (mean score of a row, or -log-likelihood in nats), ``phase``
        ("k-means", "settle", "em", "finish"), components ``starved`` in the pass, components ``refilled`` and
        ``dropped`` so far, directions ``cut`` because rows do not span them, and times.
    seed_ : int
    n_features_in_ : int""",
}


def _share_docs(**sentences: str) -> Callable[[_Class], _Class]:
    """Return a decorator that inserts the shared parts into the docstring of a class.

    ``sentences`` describe the defaults of parameters that differ between the classes.
    """

    def insert(cls: _Class) -> _Class:
        # Python 3.13 removes the indentation of docstrings, earlier versions keep it.
        text = cleandoc(cls.__doc__ or "")
        for name, part in _SHARED_DOCS.items():
            text = text.replace(f"<{name}>", cleandoc(part.format(**sentences)))
        cls.__doc__ = text
        return cls

    return insert


class _LinearMixtures(StreamedEstimator):
    """Base class of the classifier and the density of mixtures of linear models."""

    _fitted_attribute = "_fitted"
    _shares_passes = True
    _rounds_rows = True
    means_ = FittedAttribute(FIT_AGAIN, lambda model: model._fitted.components.means)
    bases_ = FittedAttribute(FIT_AGAIN, lambda model: model._fitted.components.bases[..., : model.n_dims_])
    variances_ = FittedAttribute(
        FIT_AGAIN, lambda model: model._fitted.components.values[..., : model.n_dims_]
    )
    noise_ = FittedAttribute(FIT_AGAIN, lambda model: model._fitted.components.noise)
    weights_ = FittedAttribute(FIT_AGAIN, lambda model: model._fitted.components.weights)
    component_classes_ = FittedAttribute(FIT_AGAIN, lambda model: model._fitted.classes)
    basis_ = FittedAttribute(FIT_AGAIN, lambda model: model._fitted.matrix)
    n_dims_ = FittedAttribute(FIT_AGAIN, lambda model: model._fitted.components.n_dims)
    likelihood_ = FittedAttribute(FIT_AGAIN, lambda model: model._fitted.likelihood)
    recognition = "error"  # the density has no parameter `recognition`; the classifier overrides this default
    _fitted: FittedMixture
    # Parameters for which None stands for a value that a fit chooses from the training rows.
    n_components: Any
    n_dims: Any
    likelihood: Any

    def __init__(
        self,
        *,
        n_components: int | Sequence[int] | None = None,
        n_dims: int | None = None,
        assignment: str = "hard",
        likelihood: str | None = "error",
        tangents: Sequence[str] = (),
        temperature: float | None = None,
        noise_floor: float = 1e-6,
        tangent_weight: float = 0.0,
        recognition_tangent_weight: float = 0.3,
        tangent_smoothing: float = 0.6,
        smoothing: float = 0.0,
        algorithm: str = "em",
        max_iter: int = 30,
        tol: float | None = 1e-3,
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

    def _check_rows(self, train: Dataset, validation: Dataset | None) -> None:
        find_image_shape(self, train)
        check_n_dims(self, train.n_features)

    def _deciding_parameters(self) -> dict[str, Any]:
        unused = STEPWISE_PARAMETERS if self.algorithm == "em" else ("max_iter", "tol")
        return {name: value for name, value in super()._deciding_parameters().items() if name not in unused}

    def _keep(
        self, fitted: FittedMixture, n_iter: int, history: list[dict[str, Any]], classes: np.ndarray | None
    ) -> None:
        """Set the learned attributes of a fit."""
        self._fitted = fitted
        self.n_iter_, self.history_ = n_iter, history
        if classes is not None:
            self._set_fitted_attributes(classes_=classes)

    def _row_map(self, output: OutputName) -> MixtureRowMap:
        name, label = output if isinstance(output, tuple) else (output, None)
        return MixtureRowMap(apply_recognition(self, self._fitted), name, -1 if label is None else label)

    @follows_rows
    def encode(self, X: RowsLike, label: Any = None) -> tuple[np.ndarray, np.ndarray]:
        """Return the codes of rows under their best components.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, features)
        label : label of a class or None
            Use only the components of this class; None uses all components.

        Returns
        -------
        codes : ndarray of float64, shape (n, h)
            Coordinates along ``bases_[components]``; in factor analysis posterior means of the factors.
        components : ndarray of int, shape (n,)
        """
        found = self._mapped_rows(X, ("codes", self._class_number(label)))
        return found[:, 1:], found[:, 0].astype(np.int64)

    def _learn_rows(
        self, X: RowsLike, y: LabelsLike | None, sample_weight: WeightsLike | None = None
    ) -> Self:
        if self._fitted.likelihood == "factor-analysis":
            raise ValueError(
                "the fit used likelihood='factor-analysis', which cannot learn from single rows: fit again "
                "with all rows, or set another likelihood, such as 'error', before the fit"
            )
        ds = self._training_rows(X, y, sample_weight, reset=False)
        check_any_weight(ds.read_weight(0, len(ds)))
        fitted, classes = self._fitted, getattr(self, "classes_", None)
        if len(ds) > PARTIAL_FIT_BLOCK_ROWS:  # an error in a later part must leave the components as they are
            fitted = replace(fitted, owns_arrays=False)
        for first in range(0, len(ds), PARTIAL_FIT_BLOCK_ROWS):
            stop = min(first + PARTIAL_FIT_BLOCK_ROWS, len(ds))
            x = ds.read_x(first, stop)
            x = x if isinstance(x, np.ndarray) else x.toarray()
            check_finite(x, "X", first)
            codes = np.zeros(stop - first, dtype=np.int64)
            if classes is not None:
                labels = np.asarray(ds.read_y(first, stop))
                codes = np.searchsorted(classes, labels)
                is_new = classes[np.minimum(codes, len(classes) - 1)] != labels
                if is_new.any():
                    raise DataError(
                        f"label {labels[is_new][0]!s} is none of the classes {classes.tolist()} that the "
                        "model knows: fit again with rows of all classes"
                    )
            fitted = fitted.with_rows(x, codes, ds.read_weight(first, stop))
        self._fitted = fitted
        return self

    def _mapped_rows(self, X: RowsLike, output: OutputName) -> np.ndarray:
        check_is_fitted(self)
        return np.asarray(self._map(X, output))

    def _class_number(self, label: Any) -> int | None:
        if label is None:
            return None
        check_is_fitted(self)
        classes = getattr(self, "classes_", None)
        if classes is None:
            raise DataError(f"label={label!r}: {type(self).__name__} has no classes; leave label out")
        found = np.flatnonzero(classes == label)
        if not len(found):
            raise DataError(f"label={label!r} is none of the classes {classes.tolist()}: choose one of them")
        return int(found[0])

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.transformer_tags.preserves_dtype = ["float32"]
        return tags

    # -- saving ----------------------------------------------------------------------------------------------

    def _state(self) -> SavedModelState:
        f = self._fitted
        arrays = {
            **f.components.arrays(),
            "component_classes": f.classes,
            "priors": f.priors,
            "counts": f.counts,
        }
        if f.matrix is not None:
            arrays["basis"] = f.matrix
        values: dict[str, Any] = {
            "n_dims": f.components.n_dims,
            "likelihood": f.likelihood,
            "temperature": f.temperature,
            "floor": f.floor,
            "frame": None,
        }
        if (spec := f.tangent_spec) is not None:
            values["frame"] = [list(spec.names), list(spec.shape), spec.smoothing]
        if hasattr(self, "classes_"):
            values |= {"classes": self.classes_.tolist(), "classes_dtype": self.classes_.dtype.str}
        return values, arrays

    def _restore(self, values: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        parts = {name: arrays[name] for name in ("means", "bases", "values", "noise", "weights")}
        spec = None
        if values["frame"] is not None:
            names, (height, width), smoothing = values["frame"]
            spec = TangentSpec(tuple(names), (int(height), int(width)), float(smoothing))
        self._fitted = FittedMixture(
            Components(**parts, n_dims=int(values["n_dims"])),
            arrays["component_classes"],
            arrays["priors"],
            values["likelihood"],
            float(values["temperature"]),
            arrays.get("basis"),
            spec,
            arrays["counts"],
            float(values["floor"]),
        )
        if "classes" in values:
            self._set_fitted_attributes(classes_=np.array(values["classes"], dtype=values["classes_dtype"]))


@_share_docs(
    n_dims="None takes the number with the fewest errors in three-fold cross-validation of one\n"
    "        component per class on at most 400 rows of each class. It is at most one per 16 features\n"
    "        and at most 10. If classes have 60 rows or more, it is at most one per 20 rows, half the\n"
    "        number of features and 20. Several given components need 5 rows per direction each.",
    or_none=" or None",
    likelihood="None\n"
    "        takes factor analysis, or factor analysis with one component per class if ``n_components``\n"
    "        is None, where it has clearly fewer errors than the reconstruction error in three-fold\n"
    "        cross-validation on the rows that choose ``n_dims``. It takes the reconstruction error for\n"
    "        sparse rows and with ``tangents``. ``likelihood_`` is the choice.",
)
class LinearMixtureClassifier(_LinearMixtures, StreamedClassifier):
    """Classification by mixtures of linear models, fitted by streamed EM.

    Each class has ``n_components`` components: a mean and an orthonormal basis of ``n_dims`` directions in
    which a row may move freely. A row belongs to the component that reconstructs it best, and has the class
    of this component. Rows come from arrays or from a :class:`~scalelatent.Dataset` of any size, in one
    process or on a Dask cluster, and the result has the same bits.

    Parameters
    ----------
    n_components : int, sequence of int or None
        Components of each class, or one number for each class. None takes one per ``5 * (n_dims + 1)`` rows
        of a class, at least 1 and at most 20.
    <parameters>
    recognition : {"error", "tangent-distance"}
        Score of a row, or its minimum over small moves of the row along its own tangents, for the 10 best
        components. It may change after the fit; the temperature of probabilities stays that of the fit.
    <last_parameters>

    Attributes
    ----------
    classes_ : ndarray, shape (n_classes,)
    <attributes>
    temperature_ : float
        sigma² of class probabilities, with the least log-loss of validation rows. Without them at most about
        20,000 training rows are used, each as if it had been left out of the fit.

    Notes
    -----
    ``transform`` returns the scores of all K components, float32; a smaller score is a better fit.

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
    >>> rejected, error = m.reject_curve(x[1000:], y[1000:])
    >>> bool(error[40] < error[0])  # without the 40 least certain rows
    True
    >>> m.reconstruct(x[:2], label=3).shape, m.encode(x[:2])[0].shape
    ((2, 64), (2, 6))
    """

    _kind = "linear_mixture"
    _parameters = PARAMETERS
    _without_labels = "; LinearMixture is a density of rows without labels"
    classes_ = FittedAttribute(FIT_AGAIN)
    temperature_ = FittedAttribute(FIT_AGAIN, lambda model: model._fitted.temperature)

    def __init__(
        self,
        *,
        n_components: int | Sequence[int] | None = None,
        n_dims: int | None = None,
        assignment: str = "hard",
        likelihood: str | None = None,
        tangents: Sequence[str] = (),
        temperature: float | None = None,
        noise_floor: float = 1e-6,
        tangent_weight: float = 0.0,
        recognition_tangent_weight: float = 0.3,
        tangent_smoothing: float = 0.6,
        smoothing: float = 0.0,
        algorithm: str = "em",
        max_iter: int = 30,
        tol: float | None = 1e-3,
        n_epochs: int = 3,
        batch_rows: int | None = None,
        image_shape: tuple[int, int] | None = None,
        recognition: str = "error",
        warm_start: bool = False,
        random_state: RandomState = None,
        device: str = "auto",
        n_jobs: int | None = None,
    ) -> None:
        super().__init__(
            n_components=n_components,
            n_dims=n_dims,
            assignment=assignment,
            likelihood=likelihood,
            tangents=tangents,
            temperature=temperature,
            noise_floor=noise_floor,
            tangent_weight=tangent_weight,
            recognition_tangent_weight=recognition_tangent_weight,
            tangent_smoothing=tangent_smoothing,
            smoothing=smoothing,
            algorithm=algorithm,
            max_iter=max_iter,
            tol=tol,
            n_epochs=n_epochs,
            batch_rows=batch_rows,
            image_shape=image_shape,
            warm_start=warm_start,
            random_state=random_state,
            device=device,
            n_jobs=n_jobs,
        )
        self.recognition = recognition

    def _add_prediction_nodes(self, graph: OnnxGraph) -> None:
        graph.classes(draw_probabilities(graph, self._row_map("probabilities")), self.classes_)

    def _fit_steps(self, rows: Mapping[str, MappedRows]) -> Steps:
        return fit_steps(self, rows, rows["train"].classes)

    def _plan(self, forecast: Forecast) -> dict[str, Any]:
        return plan_fit(self, forecast, forecast.train.classes)

    def partial_fit(
        self,
        X: RowsLike,
        y: LabelsLike | None = None,
        classes: Any = None,
        *,
        sample_weight: WeightsLike | None = None,
    ) -> Self:
        """Learn from more rows, at once and in this process.

        The first call on a model that was not fitted is :meth:`fit`. Later rows are added to the nearest
        component of their class by incremental SVD. Its mean is exact. Its basis and variances are exact
        while its rows span at most the directions of the basis and of its spare columns. Tangents and
        ``temperature_`` do not change. The arrays change in place: copy ``means_`` and the others to keep
        their values.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, features)
            One row or more; in the first call rows of every class, more than there are components.
        y : array-like, shape (n,); a Dataset has its own
        classes : array-like or None
            All classes that will ever come. A class that is named more than once counts once, as in
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
            The likelihood is factor analysis, which has no such step; ``classes`` are not those of the model.
        DataError
            A label is none of the classes; a value is NaN or infinite (the error names row and feature); all
            weights are 0.
        """
        self._check_params()
        if not hasattr(self, "_fitted"):
            with restored_on_failure(self):
                ds = self._training_rows(X, y, sample_weight)
                check_any_weight(ds.read_weight(0, len(ds)))
                labels = ds.read_y(0, len(ds))
                names = np.unique(labels if classes is None else classes)
                if (names.dtype.kind == "U") != (labels.dtype.kind == "U"):
                    both = f"y holds labels of type {labels.dtype}, classes={names.tolist()} of {names.dtype}"
                    raise DataError(f"{both}: give labels and classes both as numbers, or both as strings")
                missing = np.setdiff1d(names, labels)
                if len(missing):
                    raise DataError(
                        f"class {missing[0]!s} has no rows, and the first rows must include every class: "
                        "collect more rows first"
                    )
            # If `likelihood` is None, `fit` may choose factor analysis, which cannot learn later rows.
            # Therefore the first call fits by the reconstruction error.
            given, self.likelihood = self.likelihood, self.likelihood or "error"
            try:
                return self.fit(X, y, sample_weight=sample_weight)
            finally:
                self.likelihood = given
        if classes is not None and not np.array_equal(np.unique(classes), self.classes_):
            raise ValueError(
                f"classes={np.unique(classes).tolist()} are not those that the model knows, "
                f"{self.classes_.tolist()}: leave classes out, or fit again"
            )
        return self._learn_rows(X, y, sample_weight)

    @follows_rows
    def decision_function(
        self,
        X: RowsLike,
        *,
        out: str | Path | None = None,
        client: ClientLike | None = None,
        overwrite: bool = False,
        callbacks: CallbackList = (),
    ) -> Any:
        """Return minus the score of the best component of each class: a larger value is a better fit.

        Parameters
        ----------
        X, out, client, overwrite, callbacks
            As in :meth:`transform`.

        Returns
        -------
        ndarray of float32, shape (n, classes); of two classes (n,), the second less the first
            A lazy array for a dask array; with ``out`` a Dataset of these values, of two classes one column.
        """
        found = self._map(X, "decisions", out, client, overwrite, callbacks)
        return found[:, 0] if out is None and len(self.classes_) == 2 else found

    @follows_rows
    def confidence(self, X: RowsLike) -> np.ndarray:
        """Return how certain the class of each row is.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, features)

        Returns
        -------
        ndarray of float64, shape (n,)
            1 - best / second best error of the classes; for densities 1 - second / best probability. 0 means
            that two classes fit equally well.
        """
        return self._certainty(self._mapped_rows(X, "scores"))

    def _certainty(self, scores: np.ndarray) -> np.ndarray:
        if self._fitted.likelihood not in DENSITY_LIKELIHOODS:
            return confidence(scores)
        shares = probabilities(scores, self._fitted.temperature)
        if shares.shape[1] < 2:
            return np.ones(len(shares))
        two = np.sort(shares, axis=1)[:, -2:]
        return np.asarray(1.0 - two[:, 0] / two[:, 1])

    def reject_curve(self, X: RowsLike, y: LabelsLike | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return the error of the remaining rows when the least certain rows are rejected.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, features)
        y : array-like, shape (n,); a Dataset has its own

        Returns
        -------
        rejected : ndarray, shape (n,)
            Share of rejected rows; :meth:`confidence` is their order.
        error : ndarray, shape (n,)
            Share of wrong rows among the others.

        Raises
        ------
        DataError
            There are no labels.
        """
        check_is_fitted(self)
        ds = self._given_rows(X)
        if y is None and not ds.has_y:
            raise DataError(f"{ds.url or 'X'} has no labels: pass y, or a dataset with labels")
        given = None if y is None else np.asarray(to_column(y))
        if given is not None and len(given) != len(ds):
            raise DataError(f"y has {len(given)} entries for {len(ds)} rows: give one per row")
        certain, wrong = [], []
        for first in range(0, len(ds), SCORE_ROWS):
            stop = min(first + SCORE_ROWS, len(ds))
            scores = self._mapped_rows(ds[first:stop], "scores")
            truth = ds.read_y(first, stop) if given is None else given[first:stop]
            certain.append(self._certainty(scores))
            wrong.append(self.classes_[scores.argmin(axis=1)] != truth)
        return reject_curve(np.concatenate(certain), np.concatenate(wrong))

    @follows_rows
    def reconstruct(self, X: RowsLike, label: Any = None) -> np.ndarray:
        """Return rows as their best component reconstructs them.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, features)
        label : label of a class or None
            Use only the components of this class; None uses all components.

        Returns
        -------
        ndarray of float32, shape (n, features)
        """
        return self._mapped_rows(X, ("reconstructions", self._class_number(label)))


@_share_docs(n_dims="None takes half the number of features, at most 10.", or_none="", likelihood="")
class LinearMixture(DensityMixin, _LinearMixtures):
    """Density of rows without labels: a mixture of linear models, fitted by streamed EM.

    With likelihood "ppca" or "factor-analysis" it is a mixture of Gaussians whose covariances are a low-rank
    matrix plus noise. With the other likelihoods the density is that of probabilistic PCA in the fitted
    bases.

    Parameters
    ----------
    n_components : int or None
        None takes one per ``10 * (n_dims + 1)`` rows, at least 1 and at most 20.
    <parameters>
    <last_parameters>

    Attributes
    ----------
    <attributes>

    Notes
    -----
    ``transform`` returns the scores of all K components, float32; a smaller score is a better fit.

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
    >>> bool(abs(d.score(x) - d.score_samples(x).mean()) < 1e-6)
    True
    """

    _kind = "linear_density"
    _transformed = "latents"
    _parameters = DENSITY_PARAMETERS
    _validates = False

    def _fit_steps(self, rows: Mapping[str, MappedRows]) -> Steps:
        return fit_steps(self, rows, None)

    def _plan(self, forecast: Forecast) -> dict[str, Any]:
        return plan_fit(self, forecast, None)

    def _training_rows(
        self, X: RowsLike, y: LabelsLike | None, sample_weight: WeightsLike | None, *, reset: bool = True
    ) -> Dataset:
        return self._given_rows(X, None, sample_weight, reset=reset)

    def partial_fit(self, X: RowsLike, y: LabelsLike | None = None) -> Self:
        """Learn from more rows, at once and in this process.

        The first call on a model that was not fitted is :meth:`fit`. Later rows are added to the nearest
        component by incremental SVD. Its mean is exact. Its basis and variances are exact while its rows span
        at most the directions of the basis, spare ones included. The arrays change in place: copy ``means_``
        and the others to keep their values.

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
            The likelihood is factor analysis, which has no such step.
        DataError
            A value is NaN or infinite; the error names row and feature.
        """
        self._check_params()
        return self._learn_rows(X, y) if hasattr(self, "_fitted") else self.fit(X)

    @follows_rows
    def predict(
        self,
        X: RowsLike,
        *,
        out: str | Path | None = None,
        client: ClientLike | None = None,
        overwrite: bool = False,
        callbacks: CallbackList = (),
    ) -> Any:
        """Return the best component of each row.

        Parameters
        ----------
        X, out, client, overwrite, callbacks
            As in :meth:`transform`.

        Returns
        -------
        ndarray of int32, shape (n,); a lazy array for a dask array; with ``out`` a Dataset of one column
        """
        found = self._map(X, "components", out, client, overwrite, callbacks)
        return found if out is not None else found[:, 0]

    @follows_rows
    def predict_proba(self, X: RowsLike) -> np.ndarray:
        """Return the posterior probability of each component, float64 (n, K).

        Parameters
        ----------
        X : Dataset or array-like, shape (n, features)
        """
        return self._mapped_rows(X, "shares")

    @follows_rows
    def score_samples(self, X: RowsLike) -> np.ndarray:
        """Return the log-likelihood of each row in nats, float64 (n,); of the smoothed rows, with smoothing.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, features)
        """
        return self._mapped_rows(X, "log-likelihood")[:, 0]

    def score(self, X: RowsLike, y: LabelsLike | None = None) -> float:
        """Return the mean log-likelihood of rows in nats; the weights of a Dataset count.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, features)
        y : ignored
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
        """Draw new rows from the mixture.

        Parameters
        ----------
        n_samples : int
        random_state : int, Generator, RandomState or None
            None takes the seed of the fit.

        Returns
        -------
        X : ndarray of float32, shape (n_samples, features)
            With smoothing these are smooth rows.
        components : ndarray of int, shape (n_samples,)

        Raises
        ------
        ValueError
            ``n_samples`` is no whole number of at least 1.
        """
        check_is_fitted(self)
        if int(n_samples) != n_samples or n_samples < 1:
            raise ValueError(f"n_samples={n_samples!r}: give a whole number of at least 1")
        seed = self.seed_ if random_state is None else resolve_seed(random_state)
        f = self._fitted
        rng = stream(seed, "linear-mixture-samples")
        rows, index = density.sample(f.components, density_likelihood(f.likelihood), int(n_samples), rng)
        return rows.astype(np.float32), index

    @follows_rows
    def reconstruct(self, X: RowsLike, observed: Any = None) -> np.ndarray:
        """Return rows as their best component reconstructs them, or with hidden features filled in.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, features)
        observed : array-like of bool, one per feature, or None
            False for hidden features. They are replaced by their conditional means given the others; their
            values are not used.

        Returns
        -------
        ndarray of float32, shape (n, features)

        Raises
        ------
        ValueError
            The mask has another width, or hides all features; or the model smooths its rows.
        """
        if observed is None:
            return self._mapped_rows(X, "reconstructions")
        check_is_fitted(self)
        f = self._fitted
        if f.matrix is not None:
            raise ValueError(
                f"observed is given, but this model smooths its rows (smoothing={self.smoothing}), which "
                "mixes hidden and observed features: leave observed out, or fit with smoothing=0"
            )
        ds = self._given_rows(X)
        parts = []
        for first in range(0, len(ds), COMPLETION_BLOCK_ROWS):
            x = ds.read_x(first, min(first + COMPLETION_BLOCK_ROWS, len(ds)))
            rows = np.asarray(x if isinstance(x, np.ndarray) else x.toarray(), dtype=np.float64)
            likelihood = density_likelihood(f.likelihood)
            parts.append(density.complete(f.components, likelihood, rows, observed)[0])
        return np.concatenate(parts).astype(np.float32)
