"""Fits of hierarchical compositional networks: checks of rows, orders of rows, and steps of a fit."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from scalelatent.contract.stats import Stats
from scalelatent.data import Dataset
from scalelatent.data.read.sources import is_dask
from scalelatent.engine.batch_loop import LoopResult
from scalelatent.engine.callbacks import Callback
from scalelatent.engine.incremental import count_leaves
from scalelatent.engine.order import RowOrder
from scalelatent.errors import DataError, warn_user
from scalelatent.estimators.base import warn_reduced
from scalelatent.estimators.inputs import check_classes, is_in_memory
from scalelatent.estimators.steps import (
    MappedRows,
    StartFit,
    Step,
    Steps,
    StoreArrays,
    SumStatistic,
    TrainOnline,
)
from scalelatent.models.hcn.kernels.units import from_units, to_units
from scalelatent.models.hcn.model.compression import PixelCounts
from scalelatent.models.hcn.model.evidence_learner import EvidenceState, OnlineFeatureLearner
from scalelatent.models.hcn.model.filters import MIN_STEP, OrientedFilters
from scalelatent.models.hcn.model.layer import UNKNOWN, FeatureLayer
from scalelatent.models.hcn.model.multi_layer_learning import LayeredState, OnlineNetworkLearner

from .parameters import (
    FEATURE_SIZE,
    LAYERED_FEATURE_SIZE,
    choose_batch_size,
    choose_chain_batches,
    choose_layer_sizes,
    choose_n_chains,
    choose_n_epochs,
    choose_warmup_rows,
    choose_weight_priors,
    default_layers,
    has_templates,
    is_online,
)

if TYPE_CHECKING:
    from .estimator import HierarchicalCompositionalNetwork
    from .multi_layer import MultiLayer
    from .single_layer import SingleLayer

# Number of rows of a mask of known pixels that are read and packed into bits at a time.
MASK_ROWS = 4096
# Largest number of records in the history per epoch of an online fit.
REPORTS_PER_EPOCH = 20
# Batch learning stores belief-propagation messages, and updates those of one range of images (leaf) at a
# time. This is the target size of a range in bytes, if the job option [engine] leaf_rows is not set.
LEAF_BYTES = 2**28
# Smallest number of images in a range (leaf) in batch learning, because smaller ranges would learn different
# features independently of each other.
MIN_LEAF_ROWS = 5
# If all images are in one range (leaf), batch learning updates their belief-propagation messages in memory
# for about this many seconds before it writes the messages to disk.
WRITE_SECONDS = 30.0
# Assumed speed of one thread in batch learning, in pairs (feature position, weight) per second. A pixel
# updates two belief-propagation messages per pair, and batch learning stores both.
STORED_PAIR_RATE = 1e9


Network: TypeAlias = "SingleLayer | MultiLayer"
"""Network of one or of several layers; `MultiLayer` documents the properties and methods of both types."""
NetworkLearner: TypeAlias = OnlineFeatureLearner | OnlineNetworkLearner
NetworkState: TypeAlias = EvidenceState | LayeredState
State = TypeVar("State", EvidenceState, LayeredState)


def to_image_shape(shape: Sequence[int]) -> tuple[int, int, int]:
    """Return the shape (channels, height, width) of images (h, w), (channels, h, w) or flat rows (pixels,).

    A flat row is an image with one channel and the height 1.
    """
    sides = tuple(int(side) for side in shape)
    return (*(1,) * (3 - len(sides)), *sides)  # type: ignore[return-value]


def choose_image_shape(
    model: HierarchicalCompositionalNetwork, ds: Dataset, name: str
) -> tuple[int, int, int]:
    """Return the shape (channels, height, width) of the images of a dataset.

    The parameter ``image_shape`` gives the shape of flat rows; without it, they are images of height 1. Raise
    a DataError if the parameter does not fit the rows, or if rows have more than three axes.
    """
    where, own, given = ds.url or name, tuple(ds.feature_shape), model.image_shape
    if given is None:
        if len(own) > 3:
            raise DataError(f"{where}: rows have shape {own}: give images (h, w) or (channels, h, w)")
        return to_image_shape(own)
    if int(np.prod(given)) != ds.n_features or (
        len(own) > 1 and to_image_shape(own) != to_image_shape(given)
    ):
        raise DataError(
            f"{where}: rows are {' x '.join(map(str, own))}, but image_shape={tuple(given)}: give images of "
            "this shape, or flat rows with this number of pixels"
        )
    return to_image_shape(given)


def check_images(ds: Dataset, name: str) -> None:
    """Raise a DataError if rows are sparse, or have sample weights or targets, which networks do not use."""
    where = ds.url or name
    if ds.is_sparse:
        raise DataError(f"{where}: sparse rows (CSR) are not images: give a dense array, (n, h, w)")
    if ds.has_weight:
        raise DataError(f"{where}: rows are weighted, but each image counts once: remove the weights")
    if ds.has_targets:
        raise DataError(
            f"{where}: the dataset has outputs for the rows, but networks learn from images alone: remove "
            "the outputs"
        )


def check_rows(
    model: HierarchicalCompositionalNetwork,
    network: Network,
    train: Dataset,
    validation: Dataset | None,
    *,
    streamed: bool = False,
) -> None:
    """Raise an error if the fit cannot use the training rows or the validation rows.

    ``streamed`` is True in `partial_fit`, which may get fewer rows per call than a step of a fit learns.
    """
    check_images(train, "X")
    where = train.url or "X"
    if validation is not None:
        check_images(validation, "validation")
        if has_templates(model):
            if not validation.has_y:
                raise DataError(
                    f"validation{f' ({validation.url})' if validation.url else ''} has no labels, but a "
                    "network with templates is validated by its errors: give rows with labels"
                )
            check_classes(validation, type(model).__name__)
        other = choose_image_shape(model, validation, "validation")
        if other != network.layer.input_shape:
            raise DataError(
                f"{validation.url or 'validation'}: images have shape {other}, but the training images have "
                f"shape {network.layer.input_shape}: give images of one shape"
            )
    elif model.patience is not None and not streamed:
        better = "classes" if has_templates(model) else "compression"
        raise ValueError(
            f"patience={model.patience} waits for better {better}, but there are no validation rows: pass "
            "validation (in a job [data] validation), or remove patience"
        )
    if streamed:
        return
    if continues_last_fit(model):
        find_last_state(model, network)
    n, online = len(train), is_online(model, network.has_labels)
    rows = count_step_rows(model, n)
    if online and rows > n:
        raise DataError(
            f"{where}: a step of n_chains={choose_n_chains(model, n)} x "
            f"chain_batches={choose_chain_batches(model, n)} x batch_size={choose_batch_size(model, n)} = "
            f"{rows} images is larger than the data, {n}: lower one of the three"
        )
    if (warm := choose_warmup_rows(model, n, online)) > n:
        raise DataError(f"{where}: warmup_rows={warm}, but there are {n} images: lower warmup_rows")


def check_feature_sizes(
    model: HierarchicalCompositionalNetwork, image: tuple[int, int, int], train: Dataset
) -> None:
    """Raise a DataError if features or filters are larger than images, or if the image shape is unknown."""
    (channels, height, width), where = image, train.url or "X"
    flat = len(train.feature_shape) == 1 and model.image_shape is None
    if model.layers is None and flat and width > math.prod(FEATURE_SIZE):
        raise DataError(
            f"{where}: rows are flat, of {width} pixels, and default features exist for flat rows of at most "
            f"{math.prod(FEATURE_SIZE)}: set image_shape to the (height, width) of the images, or set layers"
        )
    if model.filters is not None and (channels > 1 or min(height, width) < model.filter_size):
        raise DataError(
            f"{where}: rows are {' x '.join(map(str, train.feature_shape))}, and filters of "
            f"{model.filter_size} x {model.filter_size} need larger grey images (h, w): set image_shape for "
            "flat rows, or remove filters"
        )
    for level, (_, (h, w)) in enumerate(choose_layer_sizes(model, image)):
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


def warn_small_features(
    model: HierarchicalCompositionalNetwork, image: tuple[int, int, int], train: Dataset
) -> None:
    """Warn the user if the default features have another size because the images are small."""
    [(n, window)] = default_layers(model, image)
    whole = LAYERED_FEATURE_SIZE if has_templates(model) else FEATURE_SIZE
    if model.layers is None and window != whole:
        why = f"images of {train.url or 'X'} are {image[1]} x {image[2]}"
        warn_reduced("layers", f"[({n}, {window})]", f"[({n}, {whole})]", why)


def make_feature_layers(
    model: HierarchicalCompositionalNetwork, image: tuple[int, int, int]
) -> tuple[FeatureLayer, ...]:
    """Return the layers of features that the parameters describe, from the image up, without templates."""
    found = []
    threshold, missing = (None if v is None else float(v) for v in (model.threshold, model.missing))
    filters = None
    if model.filters is not None:
        least = MIN_STEP if threshold is None else threshold
        filters, threshold = OrientedFilters(int(model.filters), int(model.filter_size), least), None
        image = filters.n, image[1], image[2]
    for (n_features, window), p_weight in zip(
        choose_layer_sizes(model, image), choose_weight_priors(model), strict=False
    ):
        priors = float(model.p01), float(model.p10), p_weight, float(model.p_sparsity)
        layer = FeatureLayer(image, n_features, window, *priors, threshold, missing, filters=filters)
        found.append(layer)
        high, wide, channels = layer.places
        image, filters = (channels, high, wide), None
    return tuple(found)


def continues_last_fit(model: HierarchicalCompositionalNetwork) -> bool:
    """Return True if the fit starts from the result of the last fit (a warm start)."""
    return bool(model.warm_start) and model.__sklearn_is_fitted__()


def find_last_state(model: HierarchicalCompositionalNetwork, network: Network) -> NetworkState:
    """Return the state at the end of the last fit, from which a warm start or `partial_fit` continues.

    Raise a ValueError if the layers or classes of the last fit differ from those of ``network``.
    """
    last = model._network.describe()
    before, now = (None if one.classes is None else one.classes.tolist() for one in (model._network, network))
    same_classes = before == now
    if last != network.describe() or not same_classes:
        text = network.describe() + ("" if same_classes else ", with other classes")
        raise ValueError(
            f"the last fit was of {last}, and these are {text}: set layers, templates and classes back, or "
            "start again (warm_start=False)"
        )
    return model._stream


def check_counts(network: Network, train: Dataset, counts: Stats) -> None:
    """Raise a DataError if nothing can be learned from the training rows.

    ``counts`` are the counts of `PixelCounts` for the training rows. Nothing can be learned if all pixels are
    unknown, if all known pixels are equal, or if a class has no rows.
    """
    known, ones = float(counts["known"]), float(counts["ones"])
    where = f"{train.url or 'X'} (n_samples = {len(train)}, n_features = {train.n_features})"
    if not known:
        raise DataError(f"{where}: all pixels are unknown (missing)")
    if ones in (0, known):
        raise DataError(
            f"{where}: all pixels are {int(ones > 0)}: there is nothing to learn; check threshold"
        )
    if network.has_labels and not counts["labelled"].all():
        assert network.classes is not None
        missing = network.classes[int(np.argmin(counts["labelled"]))]
        raise DataError(
            f"{train.url or 'y'}: class {missing.item()!r} has no rows here, so its templates cannot be "
            "learned: give rows of each class (a slice has the classes of its whole dataset)"
        )


def replace_nan(x: Any) -> Any:
    """Replace NaN in dense float rows by the number `UNKNOWN`, lazily if ``x`` is not in memory."""
    if np.dtype(x.dtype).kind != "f" or hasattr(x, "tocsr"):
        return x
    if is_in_memory(x):
        return _replace_nan(x)
    import dask.array as da

    return (x if is_dask(x) else da.from_array(x)).map_blocks(_replace_nan, dtype=x.dtype)


def _replace_nan(x: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(x), x.dtype.type(UNKNOWN), x)


def pack_mask(known: Any, n_rows: int, layer: FeatureLayer) -> np.ndarray:
    """Return the mask ``known``, an array or Dataset with a bool per pixel, as bits: uint8 (rows, bytes)."""
    if is_in_memory(known) and not isinstance(known, Dataset):
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


def count_step_rows(model: HierarchicalCompositionalNetwork, n_rows: int) -> int:
    """Return the number of images of one step (update of the weights) of online learning."""
    return (
        choose_batch_size(model, n_rows)
        * choose_chain_batches(model, n_rows)
        * choose_n_chains(model, n_rows)
    )


def make_leaf_order(
    model: HierarchicalCompositionalNetwork, image_bytes: int, n_rows: int, options: Mapping[str, Any]
) -> RowOrder:
    """Return the ranges of images (leaves) that the steps of batch learning update, as a `RowOrder`.

    ``image_bytes`` are the bytes of the belief-propagation messages of one image. ``leaf_rows`` in
    ``options`` is the number of images of a range; by default a range needs at most about ``LEAF_BYTES``. A
    step updates up to ``n_chains`` ranges in parallel.
    """
    given = options.get("leaf_rows")
    if given is None:
        leaves = min(-(-n_rows * image_bytes // LEAF_BYTES), max(1, n_rows // MIN_LEAF_ROWS))
        rows = -(-n_rows // leaves)
    else:
        rows = int(given)
        leaves = -(-n_rows // rows)
    chains = min(choose_n_chains(model, n_rows), leaves)
    while True:
        order = RowOrder(n_rows, 0, chains * rows, n_chains=chains, shuffle=False)
        smallest = min(order.chain_rows, order.step_rows(order.n_steps - 1) // order.n_chains)
        if count_leaves(order) == 1 or smallest >= MIN_LEAF_ROWS:
            return order
        if given is not None:
            raise DataError(
                f"{n_rows} images would be {count_leaves(order)} ranges (leaves), one of only {smallest}: "
                f"ranges of fewer than {MIN_LEAF_ROWS} images learn independently of each other; set another "
                "[engine] leaf_rows, or online=True"
            )
        rows += 1
        chains = min(chains, -(-n_rows // rows))


def count_passes_per_write(pairs: int, n_rows: int) -> int:
    """Return the number of passes over ``n_rows`` images between two writes of their messages to disk.

    The number applies if the belief-propagation messages of all images are in memory. The passes take about
    ``WRITE_SECONDS``, so that writing is a small part of the time. ``pairs`` is the number of pairs (feature
    position, weight) per image.
    """
    return max(1, int(WRITE_SECONDS * STORED_PAIR_RATE / (pairs * n_rows)))


def make_fit_order(
    model: HierarchicalCompositionalNetwork,
    network: Network,
    n_rows: int,
    options: Mapping[str, Any],
    *,
    seed: int = 0,
) -> RowOrder:
    """Return the order in which a fit reads images: shuffled if online, in fixed ranges in batch learning."""
    if is_online(model, network.has_labels):
        size, chains = count_step_rows(model, n_rows), choose_n_chains(model, n_rows)
        return RowOrder.choose(n_rows, seed, size, chains, options)
    return make_leaf_order(model, network.image_bytes, n_rows, options)


def fit_steps(
    model: HierarchicalCompositionalNetwork, network: Network, rows: Mapping[str, MappedRows]
) -> Steps:
    """Yield the steps of a fit, which the engine runs; set the fitted attributes of the model.

    ``rows`` are the rows for training and, if given, for validation.
    """
    train = rows["train"].dataset
    n = len(train)
    online = is_online(model, network.has_labels)
    info = {"max_iter": choose_n_epochs(model, n, online)}
    if network.classes is not None:
        info["classes"] = len(network.classes)
    why = "the fit shuffles the images itself, so no images can be excluded from the middle of the dataset"
    model.seed_, rows = yield StartFit(info, keeps_records=not online, all_rows=why)
    n_classes = len(network.classes) if network.has_labels and network.classes is not None else 0
    pixels = PixelCounts(network.layer, n_classes)
    counts = yield SumStatistic("pixels", pixels, rows["train"], network.classes)
    check_counts(network, train, counts)
    model.batch_size_ = choose_batch_size(model, n if online else None)
    default = choose_batch_size(model)
    if model.batch_size_ < default:
        why = f"the number of images in {train.url or 'X'} is {n}"
        warn_reduced("batch_size", model.batch_size_, default, why)
    yield from network.fit_steps(model, rows, counts)


def choose_first_state(
    model: HierarchicalCompositionalNetwork, network: Network, state: State, restart: int
) -> Generator[Step, Any, State]:
    """Return the state from which the fit starts: ``state``, or for a warm start the state of the last fit.

    For a warm start, yield the step that stores the log odds in the run folder, so that a resumed fit can
    load the log odds. ``restart`` is the number of the fit; only fit 0 starts from the state of the last fit.
    """
    if restart or not continues_last_fit(model):
        return state
    before = find_last_state(model, network)
    given = yield StoreArrays("start", {"beliefs": before.beliefs, "first": before.first})
    beliefs = given["beliefs"]
    if not is_online(model, network.has_labels):
        # Batch learning adds multiples of 1/256 nat. Round the log odds to such multiples for exact sums.
        beliefs = from_units(to_units(beliefs))
    return replace(state, beliefs=beliefs, first=given["first"])


def learn_epochs(
    model: HierarchicalCompositionalNetwork,
    network: Network,
    learner: NetworkLearner,
    state: NetworkState,
    rows: Mapping[str, MappedRows],
    seed: int,
    name: str,
) -> Generator[Step, Any, LoopResult]:
    """Yield the steps of the warm-up and of the epochs of a fit; return the result.

    The warm-up learns the first images (see `choose_warmup_rows`), one minibatch per step. ``seed`` decides
    the order of the images. ``name`` is the name of the epochs in the records of the run, such as "learn-1".
    """
    online = is_online(model, network.has_labels)
    n, end = len(rows["train"].dataset), name.removeprefix("learn")
    if warm := choose_warmup_rows(model, n, online):
        some = {"train": replace(rows["train"], dataset=rows["train"].dataset[:warm])}
        serial = replace(learner, patience=0)
        one_batch = partial(RowOrder.choose, warm, seed, choose_batch_size(model, warm), 1)
        result = yield TrainOnline(f"warmup{end}", serial, state, some, network.classes, one_batch, 1)
        state = replace(state, beliefs=result.state.beliefs, first=result.state.first)
    order = partial(make_fit_order, model, network, n, seed=seed)
    epochs = choose_n_epochs(model, n, online)
    step = TrainOnline(name, learner, state, rows, network.classes, order, epochs)
    found: LoopResult = yield replace(
        step, reports=REPORTS_PER_EPOCH if online else 0, keeps_leaves=not online
    )
    return found


class UniformWeightsWarning(Callback):
    """Callback that warns once in a fit if all weights are off, or if all weights are on.

    The callback checks the weights after each epoch if ``online`` is True, or None without ``templates``.
    Otherwise it checks them only at the end of the fit.
    """

    def __init__(self, model: HierarchicalCompositionalNetwork) -> None:
        self.model, self.has_warned = model, False
        self.record: dict[str, Any] = {}

    def on_pass_end(self, record: dict[str, Any]) -> None:
        self.record = record
        if is_online(self.model):
            self.on_fit_end({})

    def on_fit_end(self, info: dict[str, Any]) -> None:
        share = self.record.get("share_on")
        if self.has_warned or share not in (0.0, 1.0):
            return
        self.has_warned = True
        now, move = ("off", "raise") if not share else ("on", "lower")
        layer, more = "", f" or p_sparsity (now {self.model.p_sparsity:g})"
        if has_templates(self.model):
            layer, more = ", of the first layer", ""
        warn_user(
            f"all weights are {now} after epoch {self.record['pass']}: {move} p_weight (now "
            f"{choose_weight_priors(self.model)[0]:g}{layer}){more}"
        )
