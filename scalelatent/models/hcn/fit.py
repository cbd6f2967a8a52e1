"""The fit of a hierarchical compositional network, of whatever form: checks, orders, steps, streams."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import numpy as np

from scalelatent.contract.learners import Reduction
from scalelatent.contract.stats import Stats
from scalelatent.data import Dataset
from scalelatent.data.read.sources import is_dask
from scalelatent.engine.batch_loop import LoopResult
from scalelatent.engine.callbacks import Callback
from scalelatent.engine.incremental import count_leaves
from scalelatent.engine.order import RowOrder
from scalelatent.errors import DataError, warn_user
from scalelatent.estimators.base import warn_reduced
from scalelatent.estimators.inputs import is_plain
from scalelatent.estimators.steps import Begin, Collect, LearnOnline, Remember, Rows, Step, Steps
from scalelatent.models.hcn.kernels.exact import from_grid, to_grid
from scalelatent.models.hcn.model.filters import EDGE, OrientedFilters
from scalelatent.models.hcn.model.layer import UNKNOWN, FeatureLayer
from scalelatent.models.hcn.model.layered import LayeredEvidence, LayeredState
from scalelatent.models.hcn.model.online import EvidenceLearner, EvidenceState

from .parameters import (
    WINDOW,
    batch_size,
    chain_batches,
    default_layers,
    is_online,
    is_several,
    layer_sizes,
    n_chains,
    n_epochs,
    warmup_rows,
    weight_priors,
)

if TYPE_CHECKING:
    from .estimator import HierarchicalCompositionalNetwork

ALL_ROWS = "images are taken in an order of their own, and none can be left out in its midst"
# Of a mask that are packed at once.
MASK_ROWS = 4096
# Records of a long epoch: points of the curve of weights against images seen.
REPORTS = 20
# Of a leaf, where its images are not given.
LEAF_BYTES, LEAST_LEAF_ROWS = 2**28, 5
# Seconds between visits of messages to the disk, at so many pairs a second of one thread.
VISIT_SECONDS, PAIRS_WITH_MESSAGES = 30.0, 1e9


NetworkLearner: TypeAlias = EvidenceLearner | LayeredEvidence
NetworkState: TypeAlias = EvidenceState | LayeredState
State = TypeVar("State", EvidenceState, LayeredState)


class Network(Protocol):
    """What is learned, and how: one layer of features (`single`), or several under classes (`several`)."""

    @property
    def classes(self) -> np.ndarray | None:
        """What rows are labelled by; None where labels are not read."""
        ...

    @property
    def layer(self) -> FeatureLayer:
        """The layer over the pixels."""
        ...

    @property
    def layers(self) -> tuple[FeatureLayer, ...]:
        """The layers of features, from the image up, without the templates."""
        ...

    @property
    def pairs(self) -> int:
        """Pairs of a weight and a place of an image, in all layers."""
        ...

    @property
    def n_weights(self) -> int:
        """Of all layers."""
        ...

    @property
    def image_bytes(self) -> int:
        """Bytes of the messages of an image, which say how many images a leaf has."""
        ...

    @property
    def kept_bytes(self) -> int:
        """Bytes that are kept of an image from visit to visit, at most."""
        ...

    @property
    def online_bytes(self) -> int:
        """Bytes of what an image of a minibatch takes."""
        ...

    @property
    def decoding_sweeps(self) -> float:
        """What it takes to use the network on an image, in sweeps over all pairs."""
        ...

    def look(self) -> tuple[str, Reduction]:
        """The pass over rows that a fit ends with, and its name."""
        ...

    def check(self, train: Dataset, held: Dataset | None) -> None:
        """Refuse rows that do not fit the layers or the classes."""
        ...

    def counts(self) -> Reduction:
        """What is counted of the rows before anything is learned: of pixels, and of labels."""
        ...

    def check_counts(self, train: Dataset, counts: Stats) -> None:
        """Refuse labels of which some are missing."""
        ...

    def learner(self, model: HierarchicalCompositionalNetwork, n_rows: int, seed: int) -> NetworkLearner:
        """The learner of a fit."""
        ...

    def last_state(self, model: HierarchicalCompositionalNetwork) -> NetworkState:
        """What the last fit came to, to go on from; a ValueError where that was of another form."""
        ...

    def told(self) -> str:
        """What the layers are, in words."""
        ...

    def features(self, values: np.ndarray) -> list[np.ndarray]:
        """Weights, or beliefs of them, as features (features, channels, h, w) of each layer."""
        ...

    def from_features(self, features: list[np.ndarray]) -> np.ndarray:
        """What :meth:`features` was made of."""
        ...

    def course(
        self, model: HierarchicalCompositionalNetwork, rows: Mapping[str, Rows], counts: Stats
    ) -> Steps:
        """The steps of a fit, after the first look at the rows; sets the learned attributes."""
        ...


# -- checks -----------------------------------------------------------------------------------------------


def image_of(shape: Sequence[int]) -> tuple[int, int, int]:
    """(channels, height, width) of (h, w) or (channels, h, w); a flat row is one line."""
    sides = tuple(int(side) for side in shape)
    return (*(1,) * (3 - len(sides)), *sides)  # type: ignore[return-value]


def image_shape(model: HierarchicalCompositionalNetwork, ds: Dataset, what: str) -> tuple[int, int, int]:
    """The shape of a dataset's images: its own, or of flat rows the parameter."""
    where, own, given = ds.url or what, tuple(ds.feature_shape), model.image_shape
    if given is None:
        if len(own) > 3:
            raise DataError(f"{where}: rows are {own}: give images (h, w) or (channels, h, w)")
        return image_of(own)
    if int(np.prod(given)) != ds.n_features or (len(own) > 1 and image_of(own) != image_of(given)):
        raise DataError(
            f"{where}: rows are {' x '.join(map(str, own))}, but image_shape={tuple(given)}: give images of "
            "this shape, or flat rows of as many pixels"
        )
    return image_of(given)


def check_plain(ds: Dataset, what: str) -> None:
    """Refuse rows that are no images of a weight of 1."""
    where = ds.url or what
    if ds.is_sparse:
        raise DataError(f"{where}: sparse rows (CSR) are no images: give a dense array, (n, h, w)")
    if ds.has_weight:
        raise DataError(f"{where}: rows are weighted, but each image counts once: leave the weights out")
    if ds.has_targets:
        raise DataError(
            f"{where}: there are outputs beside the rows, and one layer learns images alone: leave them out"
        )


def check_rows(
    model: HierarchicalCompositionalNetwork,
    network: Network,
    train: Dataset,
    held: Dataset | None,
    *,
    streamed: bool = False,
) -> None:
    """Refuse rows that the learner cannot use, before any work; of a stream there are more to come."""
    check_plain(train, "X")
    where = train.url or "X"
    if held is not None:
        check_plain(held, "validation")
        other = image_shape(model, held, "validation")
        if other != network.layer.seen:
            raise DataError(
                f"{held.url or 'validation'}: images are {other}, but those to learn from "
                f"{network.layer.seen}"
            )
    elif model.patience is not None and not streamed:
        better = "classes" if is_several(model) else "compression"
        raise ValueError(
            f"patience={model.patience} waits for better {better}, but there are no validation rows: pass "
            "validation (in a job [data] validation), or leave patience out"
        )
    network.check(train, held)
    if streamed:
        return
    if goes_on(model):
        network.last_state(model)
    n = len(train)
    rows = step_rows(model, n)
    if is_online(model) and rows > n:
        raise DataError(
            f"{where}: a step of n_chains={n_chains(model, n)} x chain_batches={chain_batches(model, n)} x "
            f"batch_size={batch_size(model, n)} = {rows} images is larger than the data, {n}: lower one of "
            "them"
        )
    if (warm := warmup_rows(model, n)) > n:
        raise DataError(f"{where}: warmup_rows={warm}, but there are {n} images: lower it")


def check_windows(
    model: HierarchicalCompositionalNetwork, image: tuple[int, int, int], train: Dataset
) -> None:
    """Refuse features that are larger than what they are placed on, and long flat rows without a shape."""
    (channels, height, width), where = image, train.url or "X"
    flat = len(train.feature_shape) == 1 and model.image_shape is None
    if model.layers is None and flat and width > math.prod(WINDOW):
        raise DataError(
            f"{where}: rows are flat, of {width} pixels, and features are chosen for flat rows of at most "
            f"{math.prod(WINDOW)}: set image_shape to the (height, width) of the images, or set layers"
        )
    if model.filters is not None and (channels > 1 or min(height, width) < model.filter_size):
        raise DataError(
            f"{where}: rows are {' x '.join(map(str, train.feature_shape))}, and filters of "
            f"{model.filter_size} x {model.filter_size} look at grey images (h, w) that are larger: set "
            "image_shape where rows are flat, or leave filters out"
        )
    for level, (_, (h, w)) in enumerate(layer_sizes(model, image)):
        if h > height or w > width:
            remedy = "make the features smaller"
            if flat and not level:
                remedy = "set image_shape (these rows are flat)"
            of = f" of layer {level + 1}" if level else ""
            on = f"the places of layer {level}" if level else "images"
            raise DataError(
                f"{where}: features{of} of {h} x {w} are larger than {on} of {height} x {width}: {remedy}"
            )
        height, width = height - h + 1, width - w + 1


def log_layers(model: HierarchicalCompositionalNetwork, image: tuple[int, int, int], train: Dataset) -> None:
    """Log, once, that default features were cut to the images."""
    [(n, window)] = default_layers(image)
    if model.layers is None and window != WINDOW:
        why = f"images of {train.url or 'X'} are {image[1]} x {image[2]}"
        warn_reduced("layers", f"[({n}, {window})]", f"[({n}, {WINDOW})]", why)


def make_layers(
    model: HierarchicalCompositionalNetwork, image: tuple[int, int, int]
) -> tuple[FeatureLayer, ...]:
    """The layers of features that the parameters ask for, from the image up."""
    found = []
    threshold, missing = (None if v is None else float(v) for v in (model.threshold, model.missing))
    filters = None
    if model.filters is not None:
        least = EDGE if threshold is None else threshold
        filters, threshold = OrientedFilters(int(model.filters), int(model.filter_size), least), None
        image = filters.n, image[1], image[2]
    for (n_features, window), p_weight in zip(layer_sizes(model, image), weight_priors(model), strict=False):
        priors = float(model.p01), float(model.p10), p_weight, float(model.p_sparsity)
        layer = FeatureLayer(image, n_features, window, *priors, threshold, missing, filters=filters)
        found.append(layer)
        high, wide, channels = layer.places
        image, filters = (channels, high, wide), None
    return tuple(found)


def goes_on(model: HierarchicalCompositionalNetwork) -> bool:
    """Whether a fit goes on from the one before."""
    return bool(model.warm_start) and model.__sklearn_is_fitted__()


def check_pixels(train: Dataset, counts: Stats) -> None:
    """Refuse images that say nothing."""
    known, ones = float(counts["known"]), float(counts["ones"])
    where = f"{train.url or 'X'} (n_samples = {len(train)}, n_features = {train.n_features})"
    if not known:
        raise DataError(f"{where}: all pixels are unknown (missing)")
    if ones in (0, known):
        raise DataError(
            f"{where}: all pixels are {int(ones > 0)}: there is nothing to learn; check threshold"
        )


def known_or_not(x: Any) -> Any:
    """Rows with `UNKNOWN` in place of NaN; lazily where they are read in pieces."""
    if np.dtype(x.dtype).kind != "f" or hasattr(x, "tocsr"):
        return x
    if is_dask(x):
        return x.map_blocks(_without_nan, dtype=x.dtype)
    if is_plain(x):
        return _without_nan(x)
    import dask.array as da

    return da.from_array(x).map_blocks(_without_nan, dtype=x.dtype)


def _without_nan(x: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(x), x.dtype.type(UNKNOWN), x)


def packed(known: Any, n_rows: int, layer: FeatureLayer) -> np.ndarray:
    """A mask of pixels as bits, uint8 (rows, bytes); refuses one that is not of these rows."""
    if is_plain(known) and not isinstance(known, Dataset):
        known = np.asarray(known)
        if known.ndim < 2:
            raise DataError(f"known is {known!r:.40}: give a bool for each pixel, {(n_rows, *layer.image)}")
    ds = known if isinstance(known, Dataset) else Dataset.from_arrays(known)
    shapes = {(layer.n_pixels,), layer.image, layer.image[layer.image[0] == 1 :]}
    if len(ds) != n_rows or tuple(ds.feature_shape) not in shapes or ds.dtype.kind not in "bui":
        raise DataError(
            f"known has shape {(len(ds), *ds.feature_shape)}, {ds.dtype}: give a bool for each pixel, "
            f"{(n_rows, *layer.image)}"
        )
    out = np.empty((n_rows, -(-layer.n_pixels // 8)), np.uint8)
    for a in range(0, n_rows, MASK_ROWS):
        part = slice(a, min(a + MASK_ROWS, n_rows))
        out[part] = np.packbits(ds.read_x(part.start, part.stop) != 0, axis=1)
    return out


# -- steps ------------------------------------------------------------------------------------------------


def step_rows(model: HierarchicalCompositionalNetwork, n_rows: int) -> int:
    """Images of a step over all chains."""
    return batch_size(model, n_rows) * chain_batches(model, n_rows) * n_chains(model, n_rows)


def row_order(
    model: HierarchicalCompositionalNetwork,
    n_rows: int,
    options: Mapping[str, Any],
    seed: int,
    *,
    chains: int,
) -> RowOrder:
    """Which images each step gets: of ``chains`` chains, or one minibatch a step where that is 0."""
    size = step_rows(model, n_rows) if chains else batch_size(model, n_rows)
    return RowOrder.choose(n_rows, seed, size, max(chains, 1), options)


def make_leaf_order(
    model: HierarchicalCompositionalNetwork, image_bytes: int, n_rows: int, options: Mapping[str, Any]
) -> RowOrder:
    """Leaves of a batch fit: one while its messages are small, else so many for each step."""
    wanted = n_chains(model, n_rows)
    if (rows := options.get("leaf_rows")) is not None:
        chains = min(wanted, -(-n_rows // int(rows)))
        order = _leaves_of(n_rows, chains * int(rows), chains)
        if (least := _least_leaf(order)) < LEAST_LEAF_ROWS and count_leaves(order) > 1:
            raise DataError(
                f"{n_rows} images would be {count_leaves(order)} leaves, the smallest of {least}: leaves of "
                f"fewer than {LEAST_LEAF_ROWS} images learn apart from each other; set another [engine] "
                "leaf_rows, or online=True"
            )
        return order
    leaves = min(-(-n_rows * image_bytes // LEAF_BYTES), max(1, n_rows // LEAST_LEAF_ROWS))
    chains = min(wanted, leaves)
    rows = -(-n_rows // leaves)
    order = _leaves_of(n_rows, chains * rows, chains)
    while count_leaves(order) > 1 and _least_leaf(order) < LEAST_LEAF_ROWS:
        rows += 1
        chains = min(chains, -(-n_rows // rows))
        order = _leaves_of(n_rows, chains * rows, chains)
    return order


def _leaves_of(n_rows: int, step_rows: int, chains: int) -> RowOrder:
    return RowOrder(n_rows, 0, step_rows, n_chains=chains, shuffle=False)


def _least_leaf(order: RowOrder) -> int:
    """Images of the smallest leaf."""
    return min(order.chain_rows, order.step_rows(order.n_steps - 1) // order.n_chains)


def visit_passes(pairs: int, n_rows: int) -> int:
    """Passes over the messages of a leaf that is all images, before they go to the disk."""
    return max(1, int(VISIT_SECONDS * PAIRS_WITH_MESSAGES / (pairs * n_rows)))


def fit_order(
    model: HierarchicalCompositionalNetwork,
    network: Network,
    n_rows: int,
    options: Mapping[str, Any],
    *,
    seed: int = 0,
) -> RowOrder:
    """Which images each step of a fit gets."""
    if is_online(model):
        return row_order(model, n_rows, options, seed, chains=n_chains(model, n_rows))
    return make_leaf_order(model, network.image_bytes, n_rows, options)


def fit_steps(model: HierarchicalCompositionalNetwork, network: Network, rows: Mapping[str, Rows]) -> Steps:
    """A whole fit; sets the model's learned attributes."""
    train = rows["train"].dataset
    n = len(train)
    info = {"max_iter": n_epochs(model, n)}
    if network.classes is not None:
        info["classes"] = len(network.classes)
    model.seed_, rows = yield Begin(info, keeps_records=not is_online(model), all_rows=ALL_ROWS)
    counts = yield Collect("pixels", network.counts(), rows["train"], network.classes)
    check_pixels(train, counts)
    network.check_counts(train, counts)
    model.batch_size_, default = batch_size(model, n), batch_size(model)
    if model.batch_size_ < default:
        why = f"the number of images in {train.url or 'X'} is {n}"
        warn_reduced("batch_size", model.batch_size_, default, why)
    yield from network.course(model, rows, counts)


def first_state(
    model: HierarchicalCompositionalNetwork, network: Network, state: State, restart: int
) -> Generator[Step, Any, State]:
    """The state that a fit begins with: a given one, or that of the fit before."""
    if restart or not goes_on(model):
        return state
    before = network.last_state(model)
    given = yield Remember("start", {"beliefs": before.beliefs, "first": before.first})
    beliefs = given["beliefs"]
    # Where messages are kept beliefs are whole units, as these are.
    beliefs = beliefs if is_online(model) else from_grid(to_grid(beliefs))
    return replace(state, beliefs=beliefs, first=given["first"])


def learn(
    model: HierarchicalCompositionalNetwork,
    network: Network,
    learner: NetworkLearner,
    state: NetworkState,
    rows: Mapping[str, Rows],
    seed: int,
    name: str,
) -> Generator[Step, Any, LoopResult]:
    """Epochs from a state, after a warm-up where there is one."""
    n, online, end = len(rows["train"].dataset), is_online(model), name.removeprefix("learn")
    if warm := warmup_rows(model, n):
        some = {"train": replace(rows["train"], dataset=rows["train"].dataset[:warm])}
        serial = replace(learner, patience=0)
        order = partial(row_order, model, warm, seed=seed, chains=0)
        result = yield LearnOnline(f"warmup{end}", serial, state, some, network.classes, order, 1)
        state = replace(state, beliefs=result.state.beliefs, first=result.state.first)
    order = partial(fit_order, model, network, n, seed=seed)
    step = LearnOnline(name, learner, state, rows, network.classes, order, n_epochs(model, n))
    found: LoopResult = yield replace(step, reports=REPORTS if online else 0, keeps_leaves=not online)
    return found


class WeightsWatched(Callback):
    """Warns once where all weights are off, or on: after an epoch online, else in the end."""

    def __init__(self, model: HierarchicalCompositionalNetwork) -> None:
        self.model, self.told = model, False
        self.record: dict[str, Any] = {}

    def on_pass_end(self, record: dict[str, Any]) -> None:
        self.record = record
        if is_online(self.model):
            self._look()

    def on_fit_end(self, info: dict[str, Any]) -> None:
        self._look()

    def _look(self) -> None:
        record, share = self.record, self.record.get("share_on")
        if self.told or share not in (0.0, 1.0):
            return
        self.told = True
        now, move = ("off", "raise") if not share else ("on", "lower")
        # Places of a network with templates have no prior of their own.
        several = is_several(self.model)
        more = "" if several else f" or p_sparsity (now {self.model.p_sparsity:g})"
        warn_user(
            f"all weights are {now} after epoch {record['pass']}: {move} p_weight (now "
            f"{weight_priors(self.model)[0]:g}{', of the first layer' if several else ''}){more}"
        )
