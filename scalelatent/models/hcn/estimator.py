"""Hierarchical compositional networks (Lázaro-Gredilla et al., 2016) as a scikit-learn estimator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias, cast

import numpy as np
from sklearn.base import clone
from sklearn.utils import Tags
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted

from scalelatent.contract.learners import OnlineLearner, OutputMap, Reduction
from scalelatent.contract.stats import Stats
from scalelatent.data import Dataset
from scalelatent.data.read.containers import opened
from scalelatent.engine.backend import make_backend
from scalelatent.engine.callbacks import Callbacks
from scalelatent.engine.chains import learn_stream
from scalelatent.engine.plan import Forecast
from scalelatent.engine.threads import single_threaded
from scalelatent.errors import DataError, warn_user
from scalelatent.estimators.base import SavedModelState, StreamedEstimator
from scalelatent.estimators.classifier import predict_classes
from scalelatent.estimators.fit_services import FitCall, restored_on_failure
from scalelatent.estimators.fitted_attributes import FIT_AGAIN, FittedAttribute
from scalelatent.estimators.gpu_results import follows_rows
from scalelatent.estimators.inputs import find_image_shape, is_in_memory
from scalelatent.estimators.session import CallbackList, FitSession
from scalelatent.estimators.steps import MappedRows, Steps
from scalelatent.kernels.streams import draw_seed, resolve_seed
from scalelatent.models.hcn.model.compression import DescriptionLength, compression
from scalelatent.models.hcn.model.decode import BeliefMap, Decoder, PlaceMap, ReconstructionMap
from scalelatent.models.hcn.model.evidence_learner import EvidenceState
from scalelatent.models.hcn.model.layer import from_features, to_features
from scalelatent.models.hcn.model.multi_layer_learning import LayeredState
from scalelatent.models.hcn.model.multi_layer_maps import ClassMap, CompletionMap, FixedNetwork, ScoreMap
from scalelatent.models.hcn.model.sampling import add_noise, draw_images

from .fit import (
    Network,
    NetworkState,
    UniformWeightsWarning,
    check_feature_sizes,
    check_images,
    check_rows,
    choose_image_shape,
    find_last_state,
    fit_steps,
    make_feature_layers,
    pack_mask,
    replace_nan,
    to_image_shape,
    warn_small_features,
)
from .multi_layer import MultiLayer, build_multi_layer, known_classes, make_multi_layer, with_read_noise
from .object_finder import ObjectFinder
from .output import PlaceBeliefs
from .parameters import (
    FEATURE_SIZE,
    N_FEATURES,
    PARAMETERS,
    choose_batch_size,
    choose_damping,
    choose_weight_priors,
    has_templates,
    is_online,
)
from .planning import plan
from .single_layer import SingleLayer

if TYPE_CHECKING:
    from collections.abc import Sized

    import dask.array as da

    from scalelatent.typing import ClientLike, LabelsLike, RandomState, RowsLike, ValidationLike, WeightsLike

# Arguments of the output of `inpaint`: a mask with one bit per pixel, 1 if the pixel is known (or None), and
# the index of the class of each row, below 0 if unknown (or None, if all classes are unknown).
InpaintArguments: TypeAlias = tuple[np.ndarray | None, np.ndarray | None]


class HierarchicalCompositionalNetwork(StreamedEstimator):
    """Parts of binary images, learned by max-product message passing.

    A part (feature) is placed at some positions of an image. Overlapping features are joined by OR, and the
    pixels are observed through noise. The weights of features are binary latent variables. Learning sums the
    evidence of the images for each weight, as log odds, and uses no gradients. With ``templates``, there is a
    layer above the features: the pixels of a template are positions of features, and a pool may shift each of
    these pixels. Each image has one template: one of the templates of its class, or without labels its
    cluster.

    Parameters
    ----------
    layers : list of (int, (int, int)) or (int, int), or None
        Number of features and their (height, width), or side, for each layer from the image up. The default
        is one layer of 32 features of 8 x 6, or with templates of 8 features of 3 x 3; smaller for small
        images. Without templates, default features are as high as images of fewer than 8 rows of pixels, and
        wider instead; for flat rows of at most 48 pixels they have the width of a row. The chosen sizes are
        in ``layers_``.
    templates : int or None
        Number of templates per class; without labels, the number of clusters. By default there is one layer
        of features, and no class layer.
    pool : int or None
        Side of the pools between layers in pixels, odd; 1 allows no shifts. The default is 3, except that
        online learning without ``filters`` runs two fits, with 3 and with 1, and keeps the fit with fewer
        errors on the validation images, or on the training images if there are no others. :meth:`partial_fit`
        uses 3.
    p01, p10 : float, default 1e-3
        Probability that a pixel under a feature is 0, and that a pixel under no feature is 1.
    p_weight : float, list of float, or None
        Prior probability that a weight is on, or one for each layer and the templates. The default is 0.3;
        with templates 0.25, and 1e-20 for templates that are learned from stored messages.
    p_sparsity : float, default 1e-4
        Prior probability of a feature at a place; only without templates.
    online : bool or None
        If True, learn from each image once per epoch and forget earlier images. If False, store the
        belief-propagation messages of all images in the run folder. The default is False for templates
        without labels, else True.
    forgetting : float, default 0.98
        Share of the evidence of earlier images that remains after a minibatch; 1 forgets nothing.
    batch_size : int or None
        Images per minibatch. The default is 5, or fewer for few images; the chosen number is ``batch_size_``.
    n_epochs : int or None
        Passes over the images. By default, online learning makes passes that show at least 3,000 images, with
        templates 1,000. With stored messages, the default is at most 60 sweeps (passes). With templates and
        stored messages, it is at most 300 passes, after which a fit that has not converged starts again from
        another seed (5 attempts).
    damping : float or None
        Weight of a new message in the average of the new and the old message, for stored messages and for
        messages between layers; 1 means no damping. The default is 1, with templates 0.2.
    inner_iterations : int, default 5
        Passes over a minibatch in online learning with templates.
    template_passes : int or None
        Passes at the end of a fit that learn the templates again, while the features stay fixed. Each
        template starts as an image of its class; then each image is assigned to its best template. With 0
        there are no such passes. The default is 3, with stored messages 0.
    read_noise : (float, float) or None
        With templates: the probabilities (p01, p10) after learning, for ``template_passes``, predictions and
        samples. The default is (``p01``, ``p10``). The parameter may be changed after a fit.
    n_restarts : int, default 1
        Number of fits from different initial weights; the result is the fit with the smallest compression.
    n_chains, chain_batches : int or None
        Number of chains per step, and of minibatches per chain; both change the result. A chain is a sequence
        of minibatches that one task learns. The defaults are 1 and 1, or 8 and 10 from 10,000 images on. With
        stored messages, ``n_chains`` is the number of ranges of images that a step updates in parallel.
    warmup_rows : int or None
        Number of first images of a fit that one chain learns, before several chains learn in parallel. The
        default is 4,000 if ``n_chains`` or ``chain_batches`` is above 1.
    threshold : float or None
        Pixels with values above the threshold count as 1; by default pixels are 0 and 1. With filters: the
        smallest step in grey levels that turns a filter on, by default 64. Blurred strokes need a smaller
        step.
    missing : float or None
        Value of unknown pixels, in training and afterwards; may be NaN.
    filters : int or None
        With templates: number of oriented edge filters, such as 16. Rows are then grey images from 0 to 255,
        and each filter makes one binary channel (appendix B of the reference). At each pixel the filter with
        the largest response is on, if the response reaches ``threshold``. ``reconstruct`` and ``sample``
        return these channels.
    filter_size : int, default 3
        Side of a filter in pixels, odd. A single flipped pixel is an edge for filters of 3 x 3, but not for
        larger ones.
    image_shape : (int, int) or (int, int, int) or None
        Shape of the images, (height, width) or (channels, height, width), if rows are flat.
    patience : int or None
        A fit ends after this number of epochs without a smaller compression, or with templates a smaller
        error, of the validation images.
    warm_start : bool
        If True, a fit starts from the weights of the last fit.
    random_state : int, Generator, RandomState or None
    device : {"auto", "cpu", "gpu"}
    n_jobs : int or None
        Threads of a fit in this process; the result is identical for any number.

    Attributes
    ----------
    layers_ : list of (int, (int, int))
        Number of features and their (height, width) for each layer, without the templates.
    batch_size_ : int
        Images per minibatch.
    weights_ : list of ndarray of bool, shape (features, channels, h, w)
        Weights of each layer; the templates are last.
    beliefs_ : list of ndarray of float64, shape (features, channels, h, w)
        Log odds of the weights, in nats.
    used_ : list of ndarray of bool, shape (features,)
        True for features that save more bits than they cost; with templates, and after ``partial_fit``, for
        features with at least one weight that is on.
    compression_ : float
        Bits of the features, their positions and the wrong pixels, divided by the bits of the images
        (section 4.1 of the reference), for the validation images or for up to 2,000 training images. NaN
        after ``partial_fit``, and with templates.
    pools_ : list of ndarray of float64, shape (shifts, height, width)
        With templates: log priors, in nats, of the shifts of each pixel of each layer, drawn from the seed;
        -inf for a shift that leaves the image.
    classes_ : ndarray, shape (n_classes,)
        With templates: sorted labels, or numbers of clusters.
    template_classes_ : ndarray, shape (templates,)
        With templates: class of each template.
    history_ : list of dict
        One record per epoch, and up to 20 for a long epoch. Keys: ``weights_on``; ``weights_changed``
        (changes of the sign of the log odds of a weight in this epoch); ``share_on``; ``compression`` of the
        validation images and ``rows_at_rest`` (share of them whose messages converged). With templates:
        ``weights_on_by_layer``, ``rows_moved`` (images that changed their template), ``validation_error`` and
        ``restart`` (number of the attempt).
    n_iter_ : int
        Number of records.
    seed_ : int
    n_features_in_ : int
        Number of pixels.

    Notes
    -----
    ``transform`` returns the positions of features S, uint8 (n, HS, WS, features) with HS = height - h + 1
    and WS = width - w + 1. A 1 is at the position of the upper left corner of a feature; unused features are
    at no position. With templates, ``transform`` returns the template scores of one forward pass, float64
    (n, templates), in nats.

    With templates, a numeric label of -1 marks a row without a label. If messages are stored and fewer than
    half of the rows have a label, templates are first learned as clusters of all rows.

    References
    ----------
    M. Lázaro-Gredilla et al., "Hierarchical compositional feature learning", arXiv:1611.02252 (2016).

    Examples
    --------
    >>> from scalelatent.data import make_images
    >>> letters = make_images("memory://doc-hcn", "letters", 300, alphabet="AKSTX", overwrite=True)
    >>> m = HierarchicalCompositionalNetwork([(6, (8, 6))], random_state=0).fit(letters)
    >>> m.weights_[0].shape, bool(m.compression_ < 0.6)
    ((6, 1, 8, 6), True)
    >>> m.transform(letters[:10]).shape
    (10, 17, 19, 6)
    >>> traits = make_images("memory://doc-traits", "traits", 60, size=5, gap=1, overwrite=True)
    >>> m = HierarchicalCompositionalNetwork([(4, 5)], templates=2, n_epochs=10, random_state=0).fit(traits)
    >>> [w.shape[0] for w in m.weights_], m.template_classes_.tolist(), m.predict(traits[:10]).shape
    ([4, 4], [0, 0, 1, 1], (10,))
    """

    _kind = "hcn"
    _parameters = PARAMETERS
    _fitted_attribute = "_stream"
    _takes_images = True
    layers_ = FittedAttribute(
        FIT_AGAIN, lambda model: [(layer.n_features, layer.window) for layer in model._network.layers]
    )
    weights_ = FittedAttribute(FIT_AGAIN, lambda model: model._network.features(model._stream.beliefs > 0))
    beliefs_ = FittedAttribute(FIT_AGAIN, lambda model: model._network.features(model._stream.beliefs))
    pools_ = FittedAttribute(FIT_AGAIN, lambda model: model._multi_layer("pools_").pools)
    classes_ = FittedAttribute(FIT_AGAIN, lambda model: model._multi_layer("classes_").prediction_labels)
    template_classes_ = FittedAttribute(
        FIT_AGAIN, lambda model: model.classes_[model._multi_layer("template_classes_").template_classes]
    )
    batch_size_: int
    compression_: float
    used_: list[np.ndarray]
    _network: Network
    # State of learning after the last fit, from which partial_fit and warm starts continue.
    _stream: NetworkState

    def __init__(
        self,
        layers: Sequence[tuple[int, int | tuple[int, int]]] | None = None,
        *,
        templates: int | None = None,
        pool: int | None = None,
        p01: float = 1e-3,
        p10: float = 1e-3,
        p_weight: float | Sequence[float] | None = None,
        p_sparsity: float = 1e-4,
        online: bool | None = None,
        forgetting: float = 0.98,
        batch_size: int | None = None,
        n_epochs: int | None = None,
        damping: float | None = None,
        inner_iterations: int = 5,
        template_passes: int | None = None,
        read_noise: tuple[float, float] | None = None,
        n_restarts: int = 1,
        n_chains: int | None = None,
        chain_batches: int | None = None,
        warmup_rows: int | None = None,
        threshold: float | None = None,
        missing: float | None = None,
        filters: int | None = None,
        filter_size: int = 3,
        image_shape: Sequence[int] | None = None,
        patience: int | None = None,
        warm_start: bool = False,
        random_state: RandomState = None,
        device: str = "auto",
        n_jobs: int | None = None,
    ) -> None:
        self.layers = layers
        self.templates = templates
        self.pool = pool
        self.p01 = p01
        self.p10 = p10
        self.p_weight = p_weight
        self.p_sparsity = p_sparsity
        self.online = online
        self.forgetting = forgetting
        self.batch_size = batch_size
        self.n_epochs = n_epochs
        self.damping = damping
        self.inner_iterations = inner_iterations
        self.template_passes = template_passes
        self.read_noise = read_noise
        self.n_restarts = n_restarts
        self.n_chains = n_chains
        self.chain_batches = chain_batches
        self.warmup_rows = warmup_rows
        self.threshold = threshold
        self.missing = missing
        self.filters = filters
        self.filter_size = filter_size
        self.image_shape = image_shape
        self.patience = patience
        self.warm_start = warm_start
        self.random_state = random_state
        self.device = device
        self.n_jobs = n_jobs

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
        X, y = opened(X, name), y if has_templates(self) else None
        if is_in_memory(X):
            X = self._prepare_images(X, y, name, reset)
            y = None if isinstance(X, Dataset) else y
        how: dict[str, Any] = {"name": name, "reset": reset, "least_rows": least_rows}
        ds = super()._given_rows(X, y, sample_weight, **how)
        check_images(ds, name)
        if not reset and hasattr(self, "_stream") and len(ds.feature_shape) > 1 and name == "X":
            self._check_image(ds.feature_shape, ds.url or "X")
        return ds

    def _prepare_images(self, X: Any, y: LabelsLike | None, name: str, reset: bool) -> Any:
        """Check the shape of images in memory; return validation images as a dataset, other rows unchanged.

        Raise a DataError for images of another shape than in the fit, and for a single image.
        """
        if (n := getattr(X, "ndim", 0)) > 4:
            raise DataError(f"{name} has {n} dimensions: give images (n, h, w) or (n, channels, h, w)")
        if reset:
            return X
        shape = find_image_shape(X)
        if name != "X":  # validation rows; check_rows compares their shape with the shape of X
            images = shape is not None and isinstance(X, np.ndarray) and 0 not in shape
            return Dataset.from_arrays(self._checked_values(X, name), y) if images else X
        own = self._network.layer.input_shape if hasattr(self, "_stream") else ()
        if shape is not None:
            if own:
                self._check_image(shape[1:], name)
        elif own and getattr(X, "shape", ()) == own[1:] != (own[1], self.n_features_in_):
            raise DataError(f"{name} is one image, {own[1]} x {own[2]}: give {name}[None], which is one row")
        return X

    def _checked_values(self, X: RowsLike, name: str) -> Any:
        return super()._checked_values(self._lazy_values(X), name)

    def _lazy_values(self, X: RowsLike) -> Any:
        """Replace NaN in rows by a finite number if ``missing`` is NaN, because datasets hold no NaN."""
        if self.missing is None or self.missing == self.missing:
            return X
        return replace_nan(X)

    def _training_rows(
        self, X: RowsLike, y: LabelsLike | None, sample_weight: WeightsLike | None, *, reset: bool = True
    ) -> Dataset:
        ds = self._given_rows(X, y, sample_weight, reset=reset)
        if not has_templates(self) and (y is not None or ds.has_y):
            where = f"{ds.url}: " if ds.url else ""
            warn_user(
                f"{where}labels y are not learned from, because there is no class layer: set templates, or "
                "remove y"
            )
        return ds

    def _check_image(self, shape: tuple[int, ...], where: str) -> None:
        """Raise a DataError if images of this shape differ from the images of the fit.

        ``where`` names the images in the message.
        """
        own = self._network.layer.input_shape
        if to_image_shape(shape) != own:
            raise DataError(
                f"{where}: images are {shape}, but {type(self).__name__} was fitted on {own}: give images of "
                "that shape"
            )

    def _map_dask(self, X: da.Array, output: Any) -> Any:
        if X.ndim > 2:
            self._check_image(X.shape[1:], "X")
        return super()._map_dask(X, output)

    def _validation_rows(self, validation: ValidationLike | None) -> Dataset | None:
        if validation is not None and not isinstance(validation, (Dataset, tuple)):
            validation = validation, None
        return super()._validation_rows(validation)

    def _make_network(self, train: Dataset, validation: Dataset | None = None) -> Network:
        """Return the network that the parameters describe, for the images of the training rows."""
        image = choose_image_shape(self, train, "X")
        check_feature_sizes(self, image, train)
        warn_small_features(self, image, train)
        if not has_templates(self):
            return SingleLayer(make_feature_layers(self, image)[0])
        network = make_multi_layer(self, image, train)
        held_classes = known_classes(validation) if validation is not None and validation.has_y else None
        return replace(network, validation_classes=held_classes)

    def _check_rows(self, train: Dataset, validation: Dataset | None) -> None:
        check_images(train, "X")
        check_rows(self, self._make_network(train, validation), train, validation)

    def _deciding_parameters(self) -> dict[str, Any]:
        """Return the parameters that decide the result; defaults replace None if they depend on no rows."""
        found: dict[str, Any] = {"damping": choose_damping(self), "batch_size": choose_batch_size(self)}
        if not has_templates(self):  # with templates, the defaults of these parameters depend on labels
            found["online"] = is_online(self)
            found["layers"] = ((N_FEATURES, FEATURE_SIZE),) if self.layers is None else self.layers
            found["p_weight"] = choose_weight_priors(self)[0] if self.p_weight is None else self.p_weight
        return super()._deciding_parameters() | found

    def _fit(
        self,
        X: RowsLike,
        y: LabelsLike | None,
        sample_weight: WeightsLike | None,
        validation: ValidationLike | None,
        call: FitCall,
    ) -> Self:
        watched = [*Callbacks(call.callbacks).callbacks, UniformWeightsWarning(self)]
        return super()._fit(X, y, sample_weight, validation, replace(call, callbacks=watched))

    def _fit_steps(self, rows: Mapping[str, MappedRows]) -> Steps:
        validation = rows["validation"].dataset if "validation" in rows else None
        return fit_steps(self, self._make_network(rows["train"].dataset, validation), rows)

    def _plan(self, forecast: Forecast) -> dict[str, Any]:
        return plan(self, self._make_network(forecast.train, forecast.validation), forecast)

    def _keep(
        self,
        network: Network,
        state: NetworkState,
        history: list[dict[str, Any]] | None = None,
        used: list[np.ndarray] | None = None,
        compression: float = float("nan"),
    ) -> None:
        """Set the fitted attributes; without ``used``, all features with a weight that is on are used."""
        on = network.features(state.beliefs > 0)
        self._network, self._stream, self.compression_ = network, state, compression
        self.used_ = [np.any(part, axis=(1, 2, 3)) for part in on] if used is None else used
        if history is not None:
            self.history_, self.n_iter_ = history, len(history)

    def _multi_layer(self, name: str) -> MultiLayer:
        """Return the network; raise an AttributeError for ``name`` if the network has only one layer."""
        if not isinstance(self._network, MultiLayer):
            raise AttributeError(name)
        return self._network

    @property
    def _network_for_reading(self) -> MultiLayer:
        """Fitted network with the present noise probabilities ``read_noise``, or if None with the fitted."""
        network = self._multi_layer("net")
        PARAMETERS["read_noise"].check(self.read_noise)
        low, *above = network.net.layers
        return replace(network, net=replace(network.net, layers=(with_read_noise(low, self), *above)))

    def partial_fit(self, X: RowsLike, y: LabelsLike | None = None) -> Self:
        """Learn online from more images: one step per ``batch_size`` images, in their order.

        Learning continues from a fit, a loaded model or earlier calls, without ``template_passes``.

        Parameters
        ----------
        X : array-like, shape (n, h, w), (n, channels, h, w) or (n, pixels), or Dataset
            At least one image.
        y : array-like, shape (n,), or None
            With templates: classes, -1 for no label; the first call must contain all classes. Without
            templates, y is ignored with a warning.

        Returns
        -------
        self

        Raises
        ------
        DataError, ValueError
            If :meth:`fit` would refuse the images or the parameters, or if ``online=False``.
        """
        self._check_params()
        if not is_online(self, has_labels=True):
            raise ValueError("partial_fit learns online, but online=False: set online=True")
        with restored_on_failure(self):
            first = not hasattr(self, "_stream")
            ds = self._training_rows(X, y, None, reset=first)
            network = self._make_network(ds) if first else self._network
            if not is_online(self, network.has_labels):
                raise DataError("partial_fit learns templates from labels alone: give y")
            if first:
                check_rows(self, network, ds, None, streamed=True)
                self.seed_ = resolve_seed(self.random_state)
            elif not has_templates(self):
                network = SingleLayer(make_feature_layers(self, self._network.layer.image)[0])
            size = choose_batch_size(self)  # not smaller in a call with few images, because more calls follow
            learner = replace(network.learner(self, len(ds), self.seed_), batch_rows=size)
            state = learner.start() if first else find_last_state(self, network)
            # For the type checker only: `learner` is a union of the learners of one and of several layers,
            # and `learn_stream` needs one type for both.
            any_learner: OnlineLearner = learner
            state = learn_stream(any_learner, state, ds, self.device, size, state.rows, network.classes)
            self._keep(network, state, [] if first else None)
            self.batch_size_ = size
        return self

    def _decoder(self) -> Decoder:
        return Decoder(self._network.layer, (self._stream.beliefs > 0) & self.used_[0], self.seed_)

    @property
    def _transformed(self) -> str:  # type: ignore[override]
        return "scores" if has_templates(self) else "places"

    @property
    def _n_features_out(self) -> int:
        return int(np.prod(self._row_map(self._transformed).output()[0]))

    def _row_map(self, output: str | tuple[str, InpaintArguments]) -> OutputMap:
        name, (known, codes) = output if isinstance(output, tuple) else (output, (None, None))
        if isinstance(self._network, MultiLayer):
            fixed = FixedNetwork(self._network_for_reading.labelled_net, self._stream.beliefs)
            if name == "filled":
                return CompletionMap(fixed, True, known, codes)
            of_rows: dict[str, OutputMap] = {
                "scores": ScoreMap(fixed),
                "probabilities": ClassMap(fixed),
                "classes": ClassMap(fixed, True),
                "reconstruction": CompletionMap(fixed),
            }
            return of_rows[name]
        if name == "filled":
            return ReconstructionMap(self._decoder(), True, known)
        maps = {"places": PlaceMap, "beliefs": BeliefMap, "reconstruction": ReconstructionMap}
        return maps[name](self._decoder())

    @available_if(has_templates)
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
        """Return the score of each class, the largest score of its templates; only with ``templates``.

        Parameters
        ----------
        X, out, client, overwrite, callbacks
            Images, and options for the output, which :meth:`transform` explains.

        Returns
        -------
        ndarray of float64, shape (n, classes); a lazy array for a dask array; a Dataset with ``out``
            Scores in nats, in the order of ``classes_``.
        """
        return self._map(X, "probabilities", out, client, overwrite, callbacks)

    @available_if(has_templates)
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
        """Return the class, or the number of the cluster, of each image; only with ``templates``.

        With ``out``, the rows of the dataset have the scores of the classes as ``x`` and the class as ``y``.

        Parameters
        ----------
        X, out, client, overwrite, callbacks
            Images, and options for the output, which :meth:`transform` explains.

        Returns
        -------
        ndarray, shape (n,); a lazy array for a dask array; a Dataset with ``out``
        """
        return predict_classes(self, X, out, client, overwrite, callbacks)

    @follows_rows
    def reconstruct(
        self,
        X: RowsLike,
        *,
        out: str | Path | None = None,
        client: ClientLike | None = None,
        overwrite: bool = False,
        callbacks: CallbackList = (),
    ) -> Any:
        """Return images without noise: a pixel is 1 if an inferred feature covers it.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, h, w), (n, channels, h, w) or (n, pixels)
        out, client, overwrite, callbacks
            Options for the output, which :meth:`transform` explains.

        Returns
        -------
        ndarray of uint8, shape (n, channels, h, w); a Dataset with ``out``
        """
        return self._map(X, "reconstruction", out, client, overwrite, callbacks)

    @follows_rows
    def inpaint(
        self,
        X: RowsLike,
        known: Any = None,
        y: LabelsLike | None = None,
        *,
        out: str | Path | None = None,
        client: ClientLike | None = None,
        overwrite: bool = False,
        callbacks: CallbackList = (),
    ) -> Any:
        """Return images with inferred values of unknown pixels; known pixels do not change.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, h, w), (n, channels, h, w) or (n, pixels)
        known : array-like of bool, shape of ``X``, or Dataset, or None
            True for known pixels; the mask needs one bit of memory per pixel. Without a mask, only pixels
            with the value ``missing`` are unknown.
        y : label, or array-like, shape (n,), or None
            With templates: classes of the images; -1 for an unknown class. By default all are unknown.
        out, client, overwrite, callbacks
            Options for the output, which :meth:`transform` explains.

        Returns
        -------
        ndarray of uint8, shape (n, channels, h, w); a lazy array for a dask array; a Dataset with ``out``

        Raises
        ------
        DataError
            If the mask has another shape than the images, if there is neither a mask nor ``missing``, or if
            the fit did not have a label.
        """
        check_is_fitted(self)
        if self._network.layer.filters is not None:
            raise DataError(
                f"filters={self.filters}: inpaint needs pixels, but filters keep only edges: use reconstruct"
            )
        if known is None and self._network.layer.missing is None:
            raise DataError("inpaint: no pixels are marked as unknown: give known, or set missing before fit")
        n_rows = len(cast("Sized", X))
        bits = None if known is None else pack_mask(known, n_rows, self._network.layer)
        codes = None
        if isinstance(self._network, MultiLayer):
            codes = self._network.codes(y, n_rows)
        elif y is not None:
            raise DataError("inpaint: y is given, but without templates there are no classes: remove y")
        output: Any = "filled", (bits, codes)  # all other outputs are names without arguments
        return self._map(X, output, out, client, overwrite, callbacks)

    @available_if(has_templates)
    def with_classes(self, image_shape: tuple[int, int], *, n_objects: int = 2) -> ObjectFinder:
        """Return a finder of several objects in one image; only with ``templates``.

        The finder uses this network with a class layer that allows several templates per image. The finder
        learns nothing (section 2.4 of Lázaro-Gredilla et al., 2016).

        Parameters
        ----------
        image_shape : (int, int)
            Height and width of the images in which to find objects, at least those of the images of the fit.
        n_objects : int, default 2
            Largest number of objects per image. The frames of two objects do not overlap; a frame has the
            size of the images of the fit.

        Returns
        -------
        ObjectFinder
            Its ``predict`` and ``decision_function`` run in this process; on a cluster use
            ``client.submit(finder.predict, images)``. A finder cannot be saved: save the network, and call
            ``with_classes`` of the loaded network.

        Raises
        ------
        DataError
            If the images are smaller than those of the fit.

        Examples
        --------
        >>> import numpy as np
        >>> from scalelatent.data import make_images
        >>> traits = make_images("memory://doc-objects", "traits", 60, size=5, gap=1, overwrite=True)
        >>> m = HierarchicalCompositionalNetwork([(4, 5)], templates=2, n_epochs=10, random_state=0)
        >>> two = m.fit(traits).with_classes((9, 32))
        >>> found = two.predict(np.zeros((3, 9, 32)))  # empty images
        >>> found.labels.tolist(), found.positions.shape
        ([[-1, -1], [-1, -1], [-1, -1]], (3, 2, 2))
        """
        check_is_fitted(self)
        return ObjectFinder.from_network(
            self._network_for_reading, self._stream.beliefs, image_shape, n_objects, self.device
        )

    @available_if(lambda model: not has_templates(model))
    def infer(self, X: RowsLike) -> PlaceBeliefs:
        """Return the log odds of the features at all positions of images; only without ``templates``.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, h, w), (n, channels, h, w) or (n, pixels)

        Returns
        -------
        PlaceBeliefs
            Log odds, and convergence of belief propagation for each image, as arrays in memory.
        """
        check_is_fitted(self)
        found = self._map(X, "beliefs")
        places = found[:, :-1].reshape(len(found), *self._network.layer.places)
        return PlaceBeliefs(places, found[:, -1], found[:, -1] == 1)

    def sample(
        self,
        n_samples: int = 1,
        y: LabelsLike | None = None,
        *,
        noise: bool = True,
        random_state: RandomState = None,
    ) -> np.ndarray:
        """Draw images from the model.

        Parameters
        ----------
        n_samples : int
        y : label, or array-like, shape (n_samples,), or None
            With templates: classes of the images; the class of an image is random if it is None or -1.
        noise : bool
            If True, flip pixels with the probabilities ``p01`` and ``p10``, or with templates ``read_noise``.
        random_state : int, Generator, RandomState or None

        Returns
        -------
        ndarray of uint8, shape (n_samples, channels, h, w)
        """
        check_is_fitted(self)
        if n_samples < 1:
            raise ValueError(f"n_samples={n_samples}: give a whole number of at least 1")
        seed = draw_seed() if random_state is None else resolve_seed(random_state)
        if isinstance(self._network, MultiLayer):
            network = self._network_for_reading
            codes = network.codes(y, int(n_samples))
            weights = [part > 0 for part in network.net.split(self._stream.beliefs)]
            drawn = network.labelled_net.draw(weights, int(n_samples), codes, seed)
            return add_noise(network.layer, drawn, seed) if noise else drawn.astype(np.uint8)
        if y is not None:
            raise DataError("sample: y is given, but without templates there are no classes: remove y")
        with single_threaded():
            return draw_images(self._decoder(), seed, 0, int(n_samples), make_backend(self.device), noise)

    def score(
        self,
        X: RowsLike,
        y: LabelsLike | None = None,
        sample_weight: WeightsLike | None = None,
        *,
        callbacks: CallbackList = (),
    ) -> float:
        """Return the share of correctly classified images; without templates, return 1 - compression.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, h, w), (n, channels, h, w) or (n, pixels)
        y : array-like, shape (n,), or None
            With templates: classes, -1 for no label; by default the labels of the Dataset ``X``. If templates
            are clusters, the class of a cluster is the class of most of its images. Ignored without
            templates.
        sample_weight : None
            Must be None, because each image counts once.
        callbacks : Callback or sequence
            Called with the progress of the pass over the images.

        Returns
        -------
        float
            NaN if no image has a class, or without templates if all pixels are equal.

        Raises
        ------
        DataError
            If there are templates but no labels.
        """
        check_is_fitted(self)
        ds = self._given_rows(X, y, sample_weight)
        if isinstance(self._network, MultiLayer):
            errors, classes = self._network_for_reading.make_error_counts(ds, self._stream.beliefs)
            return 1.0 - errors.error(self._collect(errors, ds, classes, callbacks))
        decoder = self._decoder()
        stats = self._collect(DescriptionLength(decoder), ds, None, callbacks)
        return 1.0 - compression(self._network.layer, decoder.weights, stats)

    def _collect(
        self, reduction: Reduction, ds: Dataset, classes: np.ndarray | None, callbacks: CallbackList
    ) -> Stats:
        with FitSession(self._kind, device=self.device, n_jobs=self.n_jobs, callbacks=callbacks) as session:
            session.begin(0, {}, {})
            return session.collect("score", reduction, MappedRows(ds), classes)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        tags.input_tags.sparse = False
        tags.transformer_tags.preserves_dtype = []
        return tags

    def _state(self) -> SavedModelState:
        network, stream = self._network, self._stream
        values: dict[str, Any] = {
            "image": list(self._network.layer.input_shape),
            "batch_size": self.batch_size_,
            "rows": stream.rows,
            "steps": stream.steps,
            "iteration": stream.iteration,
        }
        if isinstance(network, MultiLayer):
            sizes = [[layer.n_features, *layer.window] for layer in network.layers]
            labels = network.labels
            values |= {
                "layers": sizes,
                "templates": network.per_class,
                "pools_seed": network.net.seed,
                "pool": network.net.side,
                "template_codes": None if network.net.classes is None else list(network.net.classes),
                "classes": None if labels is None else labels.tolist(),
                "classes_dtype": None if labels is None else labels.dtype.str,
            }
            return values, {"beliefs": stream.beliefs, "first": stream.first}
        values |= {
            "layer": [self._network.layer.n_features, *self._network.layer.window],
            "compression": None if np.isnan(self.compression_) else self.compression_,
        }
        arrays = {
            "beliefs": to_features(stream.beliefs),
            "first": to_features(stream.first),
            "used": self.used_[0],
        }
        return values, arrays

    def _restore(self, values: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        where = {name: values[name] for name in ("rows", "steps", "iteration")}
        image = to_image_shape(values["image"])
        self.batch_size_ = values.get("batch_size") or choose_batch_size(self)
        if "templates" in values:
            self._restore_multi_layer(values, arrays, image, where)
            return
        n_features, h, w = values["layer"]
        layer = replace(make_feature_layers(self, image)[0], n_features=n_features, window=(h, w))
        state = EvidenceState(from_features(arrays["beliefs"]), from_features(arrays["first"]), **where)
        compression = float("nan") if values["compression"] is None else values["compression"]
        self._keep(SingleLayer(layer), state, None, [arrays["used"].astype(bool)], compression)

    def _restore_multi_layer(
        self,
        values: dict[str, Any],
        arrays: dict[str, np.ndarray],
        image: tuple[int, int, int],
        where: dict[str, int],
    ) -> None:
        like = clone(self).set_params(layers=[(n, (h, w)) for n, h, w in values["layers"]])
        like.pool = values.get("pool", like.pool)
        labels = None if values["classes"] is None else np.array(values["classes"], values["classes_dtype"])
        network = build_multi_layer(like, make_feature_layers(like, image), labels, values["templates"])
        codes = None if values["template_codes"] is None else tuple(values["template_codes"])
        net = replace(network.net, seed=values["pools_seed"], classes=codes)
        state = LayeredState(arrays["beliefs"], arrays["first"], **where)
        self._keep(replace(network, net=net), state)
