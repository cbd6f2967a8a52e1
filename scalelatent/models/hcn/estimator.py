"""Hierarchical compositional networks as a scikit-learn estimator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted

from scalelatent.data import Dataset
from scalelatent.data.read.containers import opened
from scalelatent.engine.backend import make_backend
from scalelatent.engine.callbacks import Callbacks
from scalelatent.engine.plan import Resources
from scalelatent.engine.threads import single_threaded
from scalelatent.errors import DataError, warn_user
from scalelatent.estimators.base import Saved, StreamedEstimator
from scalelatent.estimators.companions import FitCall
from scalelatent.estimators.inputs import check_finite, image_rows, is_plain
from scalelatent.estimators.learned import FIT_AGAIN, Learned
from scalelatent.estimators.session import CallbackList, FitSession
from scalelatent.estimators.steps import Rows, Steps
from scalelatent.kernels.streams import draw_seed, resolve_seed
from scalelatent.models.hcn.model.compression import DescriptionLength, compression
from scalelatent.models.hcn.model.decode import BeliefMap, Decoder, PlaceMap, ReconstructionMap
from scalelatent.models.hcn.model.layer import FeatureLayer, from_features, to_features
from scalelatent.models.hcn.model.online import EvidenceState
from scalelatent.models.hcn.model.sampling import sample
from scalelatent.storage.disk import Location

from .fit import (
    Found,
    WeightsWatched,
    check_plain,
    check_rows,
    fit_steps,
    image_of,
    image_shape,
    known_or_not,
    last_state,
    learn_stream,
    make_layer,
    make_learner,
    packed,
    plan,
)
from .output import PlaceBeliefs
from .parameters import PARAMETERS

if TYPE_CHECKING:
    from distributed import Client


class HierarchicalCompositionalNetwork(StreamedEstimator):
    """Features that binary images are made of, learned without labels by max-product message passing.

    An image is features at some places, joined by OR and seen through noise; weights of features are latent
    variables, and evidence on them is gathered image by image. There is one layer for now.

    Parameters
    ----------
    layers : list of (int, (int, int)), default ((32, (8, 6)),)
        Features and their (height, width), for each layer; one for now.
    p01, p10 : float, default 1e-3
        Chance that a pixel is 0 where a feature lies, and 1 where none does.
    p_weight, p_sparsity : float, default 0.3 and 1e-4
        Prior chance of a pixel of a feature, and of a feature at a place.
    online : bool, default True
        Take images once, forgetting those before. False: the messages of all images are kept, in the run
        folder.
    forgetting : float, default 0.98
        Share of the evidence that a minibatch leaves of those before; 1 forgets nothing.
    batch_size : int, default 5
        Images of a minibatch.
    n_epochs : int or None
        Passes over the images, or sweeps where messages are kept. None: as many as show 3,000 images, or 60.
    damping : float, default 1
        Weight of new messages, where they are kept; 1 is no damping.
    n_restarts : int, default 1
        Fits from different beliefs, of which the best by compression is kept.
    n_chains, chain_batches : int or None
        Chains of a step, which know nothing of each other, and minibatches that each takes; they change the
        result. None: 1 and 1, from 10,000 images on 8 and 10. Where messages are kept: leaves of a step.
    warmup_rows : int or None
        Images that come first, a minibatch a step. None: 4,000 before several chains.
    threshold : float or None
        Pixels above it are 1. None: pixels are 0 and 1.
    missing : float or None
        Value of pixels that are unknown, in training and after.
    image_shape : (int, int) or (int, int, int) or None
        (height, width) or (channels, height, width) of flat rows.
    patience : int or None
        End after so many epochs without better compression of the validation images.
    warm_start : bool
        Start from the beliefs of the last fit.
    random_state : int, Generator, RandomState or None
    device : {"auto", "cpu", "gpu"}
    n_jobs : int or None
        Threads of a fit in this process; the result is the same for any number.

    Attributes
    ----------
    weights_ : list of ndarray of bool, shape (features, channels, h, w)
        For each layer.
    beliefs_ : list of ndarray of float64, shape (features, channels, h, w)
        Log odds of the weights.
    used_ : list of ndarray of bool, shape (features,)
        Features that pay for their bits; of ``partial_fit`` those with a weight.
    compression_ : float
        Bits of features, places and errors over those of the images: of the validation images, else of at
        least 1,000 training images spread over all. NaN after ``partial_fit``.
    history_ : list of dict
        One record an epoch, of epochs of 400 steps and more 20: weights_on, weights_changed (signs, in the
        epoch), share_on; of the validation images compression and rows_at_rest.
    n_iter_ : int
    seed_ : int
    n_features_in_ : int
        Pixels.

    Notes
    -----
    ``transform`` gives S, uint8 (n, HS, WS, features) of HS = height - h + 1 and WS = width - w + 1: 1 where
    a feature's upper left corner lies. Features that are not used lie nowhere.

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
    """

    _kind = "hcn"
    _parameters = PARAMETERS
    _sign_of_fit = "_beliefs"
    _transformed = "places"
    _takes_images = True
    weights_ = Learned(FIT_AGAIN, lambda model: [to_features(model._beliefs > 0)])
    beliefs_ = Learned(FIT_AGAIN, lambda model: [to_features(model._beliefs)])
    compression_: float
    used_: list[np.ndarray]
    _layer: FeatureLayer
    # Log odds as the kernels have them; what a stream goes on from.
    _beliefs: np.ndarray
    _stream: EvidenceState

    def __init__(
        self,
        layers: Sequence[tuple[int, tuple[int, int]]] = ((32, (8, 6)),),
        *,
        p01: float = 1e-3,
        p10: float = 1e-3,
        p_weight: float = 0.3,
        p_sparsity: float = 1e-4,
        online: bool = True,
        forgetting: float = 0.98,
        batch_size: int = 5,
        n_epochs: int | None = None,
        damping: float = 1.0,
        n_restarts: int = 1,
        n_chains: int | None = None,
        chain_batches: int | None = None,
        warmup_rows: int | None = None,
        threshold: float | None = None,
        missing: float | None = None,
        image_shape: Sequence[int] | None = None,
        patience: int | None = None,
        warm_start: bool = False,
        random_state: Any = None,
        device: str = "auto",
        n_jobs: int | None = None,
    ) -> None:
        self.layers = layers
        self.p01 = p01
        self.p10 = p10
        self.p_weight = p_weight
        self.p_sparsity = p_sparsity
        self.online = online
        self.forgetting = forgetting
        self.batch_size = batch_size
        self.n_epochs = n_epochs
        self.damping = damping
        self.n_restarts = n_restarts
        self.n_chains = n_chains
        self.chain_batches = chain_batches
        self.warmup_rows = warmup_rows
        self.threshold = threshold
        self.missing = missing
        self.image_shape = image_shape
        self.patience = patience
        self.warm_start = warm_start
        self.random_state = random_state
        self.device = device
        self.n_jobs = n_jobs

    # -- rows ------------------------------------------------------------------------------------------------

    def _given_rows(
        self,
        X: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        what: str = "X",
        reset: bool = False,
        least_rows: int = 1,
    ) -> Dataset:
        X = opened(X, what)
        if is_plain(X):
            X = self._plain_images(X, what, reset)
        how: dict[str, Any] = {"what": what, "reset": reset, "least_rows": least_rows}
        ds = super()._given_rows(X, None, sample_weight, **how)
        check_plain(ds, what)
        if not reset and hasattr(self, "_beliefs") and len(ds.feature_shape) > 1 and what == "X":
            self._check_image(ds.feature_shape, ds.url or "X")
        return ds

    def _plain_images(self, X: Any, what: str, reset: bool) -> Any:
        """Rows in memory whose shape is that of images; refuses one image alone, and images of images."""
        if (n := getattr(X, "ndim", 0)) > 4:
            raise DataError(f"{what} has {n} dimensions: give images (n, h, w) or (n, channels, h, w)")
        if reset:
            return X
        shape = image_rows(X)
        if what != "X":  # learned from with others: their shape is compared with that of those
            images = shape is not None and isinstance(X, np.ndarray) and 0 not in shape
            return Dataset.from_arrays(self._checked_values(X, what)) if images else X
        own = self._layer.image if hasattr(self, "_beliefs") else ()
        if shape is not None:
            if own:
                self._check_image(shape[1:], what)
        elif own and getattr(X, "shape", ()) == own[1:] != (own[1], self.n_features_in_):
            raise DataError(f"{what} is one image, {own[1]} x {own[2]}: give {what}[None], which is a row")
        return X

    def _checked_values(self, X: Any, what: str) -> Any:
        X = self._lazy_values(X)
        check_finite(X, what)
        return X

    def _lazy_values(self, X: Any) -> Any:
        """NaN becomes a number where it means unknown: datasets hold finite rows."""
        if self.missing is None or self.missing == self.missing:
            return X
        return known_or_not(X)

    def _training_rows(self, X: Any, y: Any, sample_weight: Any, *, reset: bool = True) -> Dataset:
        ds = self._given_rows(X, None, sample_weight, reset=reset)
        if y is not None or ds.has_y:
            where = f"{ds.url}: " if ds.url else ""
            warn_user(
                f"{where}labels y are not learned from: one layer learns without labels (networks of several "
                "layers, which are not there yet, will take them); leave y out"
            )
        return ds

    def _check_image(self, shape: tuple[int, ...], where: str) -> None:
        """Refuse images of another shape than those of the fit."""
        if image_of(shape) != self._layer.image:
            raise DataError(
                f"{where}: images are {shape}, but {type(self).__name__} was fitted on {self._layer.image}"
            )

    def _map_dask(self, X: Any, what: Any) -> Any:
        if X.ndim > 2:
            self._check_image(X.shape[1:], "X")
        return super()._map_dask(X, what)

    def _validation_rows(self, validation: Any) -> Dataset | None:
        if validation is not None and not isinstance(validation, (Dataset, tuple)):
            validation = validation, None
        return super()._validation_rows(validation)

    def _check_rows(self, train: Dataset, held: Dataset | None) -> None:
        check_rows(self, train, held)

    # -- fit -------------------------------------------------------------------------------------------------

    def _fit(self, X: Any, y: Any, sample_weight: Any, validation: Any, call: FitCall) -> Self:
        watched = [*Callbacks(call.callbacks).callbacks, WeightsWatched(self)]
        return super()._fit(X, y, sample_weight, validation, replace(call, callbacks=watched))

    def _fit_steps(self, rows: Mapping[str, Rows]) -> Steps:
        return fit_steps(self, rows)

    def _plan(
        self,
        train: Dataset,
        held: Dataset | None,
        resources: Resources,
        options: dict[str, Any],
        *,
        measure: bool,
    ) -> dict[str, Any]:
        return plan(self, train, held, resources, options, measure=measure)

    def _keep(self, layer: FeatureLayer, found: Found) -> None:
        state = found.state
        self._keep_beliefs(layer, EvidenceState(state.beliefs, state.first, iteration=state.iteration))
        self.used_, self.compression_ = [found.used], found.compression
        self.history_, self.n_iter_ = found.history, state.iteration

    def _keep_beliefs(self, layer: FeatureLayer, state: EvidenceState) -> None:
        self._layer, self._beliefs, self._stream = layer, state.beliefs, state

    def partial_fit(self, X: Any, y: Any = None) -> Self:
        """Learn from some more images, at once: a step for each ``batch_size`` of them, in their order.

        Goes on from a fit, from a loaded model or from earlier calls.

        Parameters
        ----------
        X : array-like, shape (n, h, w), (n, channels, h, w) or (n, pixels), or Dataset
            One image or more.
        y : ignored
            There are no labels to learn: a warning says so.

        Returns
        -------
        self

        Raises
        ------
        DataError, ValueError
            As in :meth:`fit`, and with ``online=False``.
        """
        self._check_params()
        if not self.online:
            raise ValueError("partial_fit learns online: set online=True")
        first = not hasattr(self, "_beliefs")
        ds = self._training_rows(X, y, None, reset=first)
        if first:
            check_rows(self, ds, None, streamed=True)
            self.seed_ = resolve_seed(self.random_state)
            layer = make_layer(self, image_shape(self, ds, "X"))
        else:
            layer = make_layer(self, self._layer.image)
        learner = make_learner(self, layer, len(ds), self.seed_)
        state = learner.start() if first else last_state(self, layer)
        state = learn_stream(learner, state, ds, self.device)
        if first:
            self.n_iter_, self.history_ = 0, []
        self._keep_beliefs(layer, state)
        has_weight: np.ndarray = np.any(state.beliefs > 0, axis=(0, 1, 2))
        self.used_, self.compression_ = [has_weight], float("nan")
        return self

    # -- outputs ---------------------------------------------------------------------------------------------

    def _decoder(self) -> Decoder:
        return Decoder(self._layer, (self._beliefs > 0) & self.used_[0], self.seed_)

    @property
    def _n_features_out(self) -> int:
        return int(np.prod(self._layer.places))

    def _row_map(self, what: Any) -> Any:
        maps = {"places": PlaceMap, "beliefs": BeliefMap, "reconstruction": ReconstructionMap}
        name, known = what if isinstance(what, tuple) else (what, None)
        if name == "filled":
            return ReconstructionMap(self._decoder(), True, known)
        return maps[name](self._decoder())

    def reconstruct(
        self,
        X: Any,
        *,
        out: str | Path | None = None,
        client: Client | None = None,
        overwrite: bool = False,
        callbacks: CallbackList = (),
    ) -> Any:
        """Images without their noise: what the features that lie in them make.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, h, w), (n, channels, h, w) or (n, pixels)
        out, client, overwrite, callbacks
            As in :meth:`transform`.

        Returns
        -------
        ndarray of uint8, shape (n, channels, h, w); a Dataset with ``out``
        """
        return self._map(X, "reconstruction", out, client, overwrite, callbacks)

    def inpaint(
        self,
        X: Any,
        known: Any = None,
        *,
        out: str | Path | None = None,
        client: Client | None = None,
        overwrite: bool = False,
        callbacks: CallbackList = (),
    ) -> Any:
        """Images with their unknown pixels made up; known ones stay.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, h, w), (n, channels, h, w) or (n, pixels)
        known : array-like of bool, shape of ``X``, or Dataset, or None
            Which pixels are known; a bit of each is held in memory. None: those that are not ``missing``.
        out, client, overwrite, callbacks
            As in :meth:`transform`.

        Returns
        -------
        ndarray of uint8, shape (n, channels, h, w); a lazy array for a dask array; a Dataset with ``out``

        Raises
        ------
        DataError
            A mask of another shape, or none where ``missing`` is None.
        """
        check_is_fitted(self)
        if known is None and self._layer.missing is None:
            raise DataError("inpaint: which pixels are unknown? Give known, or set missing before fit")
        what: Any = "filled" if known is None else ("filled", packed(known, len(X), self._layer))
        return self._map(X, what, out, client, overwrite, callbacks)

    def infer(self, X: Any) -> PlaceBeliefs:
        """Beliefs of S, and how far they came to rest; held in memory.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, h, w), (n, channels, h, w) or (n, pixels)

        Returns
        -------
        PlaceBeliefs
        """
        found = self._map(X, "beliefs")
        places = found[:, :-1].reshape(len(found), *self._layer.places)
        return PlaceBeliefs(places, found[:, -1], found[:, -1] == 1)

    def sample(self, n_samples: int = 1, *, noise: bool = True, random_state: Any = None) -> np.ndarray:
        """Images drawn from the model.

        Parameters
        ----------
        n_samples : int
        noise : bool
            Flip pixels by p01 and p10.
        random_state : int, Generator, RandomState or None

        Returns
        -------
        ndarray of uint8, shape (n_samples, channels, h, w)
        """
        check_is_fitted(self)
        if n_samples < 1:
            raise ValueError(f"n_samples={n_samples}: give a whole number of at least 1")
        seed = draw_seed() if random_state is None else resolve_seed(random_state)
        with single_threaded():
            return sample(self._decoder(), seed, 0, int(n_samples), make_backend(self.device), noise)

    def score(
        self, X: Any, y: Any = None, sample_weight: Any = None, *, callbacks: CallbackList = ()
    ) -> float:
        """1 - compression of these images: the share of their bits that the features save.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, h, w), (n, channels, h, w) or (n, pixels)
        y : ignored
        sample_weight : None
            Each image counts once.
        callbacks : Callback or sequence
            Told of progress.

        Returns
        -------
        float
            NaN where all pixels are 0, or all are 1.
        """
        check_is_fitted(self)
        ds, decoder = self._given_rows(X, y, sample_weight), self._decoder()
        with FitSession(self._kind, device=self.device, n_jobs=self.n_jobs, callbacks=callbacks) as session:
            session.begin(0, {}, {})
            stats = session.collect("score", DescriptionLength(decoder), Rows(ds))
        return 1.0 - compression(self._layer, decoder.weights, stats)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        tags.input_tags.sparse = False
        tags.transformer_tags.preserves_dtype = []
        return tags

    # -- saving ----------------------------------------------------------------------------------------------

    def _state(self) -> Saved:
        stream = self._stream
        values = {
            "image": list(self._layer.image),
            "layer": [self._layer.n_features, *self._layer.window],
            "compression": None if np.isnan(self.compression_) else self.compression_,
            "rows": stream.rows,
            "steps": stream.steps,
            "iteration": stream.iteration,
        }
        arrays = {
            "beliefs": to_features(self._beliefs),
            "first": to_features(stream.first),
            "used": self.used_[0],
        }
        return values, arrays

    def _restore(
        self,
        values: dict[str, Any],
        arrays: dict[str, np.ndarray],
        place: Location | None,
        run: Location | None,
    ) -> None:
        n_features, h, w = values["layer"]
        layer = replace(make_layer(self, image_of(values["image"])), n_features=n_features, window=(h, w))
        beliefs, first = from_features(arrays["beliefs"]), from_features(arrays["first"])
        where = {name: values[name] for name in ("rows", "steps", "iteration")}
        self._keep_beliefs(layer, EvidenceState(beliefs, first, **where))
        self.used_ = [arrays["used"].astype(bool)]
        self.compression_ = float("nan") if values["compression"] is None else values["compression"]
