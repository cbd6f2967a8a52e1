"""The fit of a hierarchical compositional network: checks, steps, streams, and what it will need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.contract.learners import Block
from scalelatent.contract.stats import Stats
from scalelatent.data import Dataset
from scalelatent.data.read.sources import is_dask
from scalelatent.engine.backend import make_backend
from scalelatent.engine.callbacks import Callback
from scalelatent.engine.chains import advance, run_chains
from scalelatent.engine.incremental import count_leaves
from scalelatent.engine.order import RowOrder
from scalelatent.engine.plan import Forecast, Resources, describe_steps, steps_memory
from scalelatent.engine.rates import cpu_seconds, rates
from scalelatent.engine.reading import Meter, Reader
from scalelatent.engine.threads import single_threaded
from scalelatent.errors import DataError, warn_user
from scalelatent.estimators.inputs import is_plain
from scalelatent.estimators.steps import Begin, Collect, LearnOnline, Remember, Rows, Steps
from scalelatent.models.hcn.kernels.exact import from_grid, to_grid
from scalelatent.models.hcn.model.batch import leaf_bytes
from scalelatent.models.hcn.model.compression import DescriptionLength, PixelCounts, compression, paying
from scalelatent.models.hcn.model.decode import SWEEPS, Decoder
from scalelatent.models.hcn.model.layer import UNKNOWN, FeatureLayer
from scalelatent.models.hcn.model.leaves import KeptMessages, LeafState
from scalelatent.models.hcn.model.online import EvidenceLearner, EvidenceState

from .parameters import chain_batches, n_chains, n_epochs, warmup_rows

if TYPE_CHECKING:
    from .estimator import HierarchicalCompositionalNetwork

ALL_ROWS = "images are taken in an order of their own, and none can be left out in its midst"
RUN_ROWS, BUFFER_RUNS = 1024, 16
# Of a mask that are packed at once.
MASK_ROWS = 4096
# Records of a long epoch: points of the curve of weights against images seen.
REPORTS = 20
# Share of the pixels that may move in the last sweep; images of which none at rest means little.
MOST_MOVED, FEW_ROWS = 0.9, 20
# Training images that compression is measured on, where there are no validation images.
LOOKED_ROWS = 1_000
# Of a leaf, where its images are not given; seconds between visits of its messages to the disk.
LEAF_BYTES, VISIT_SECONDS, LEAST_LEAF_ROWS = 2**28, 30.0, 5
# Of images that speed is measured with: share of ones, and sweeps where messages are kept.
PROBED_ONES, PROBED_SWEEPS = 0.15, 4
# Of one thread, before anything was measured.
PAIRS_PER_SECOND, PAIRS_WITH_MESSAGES = 2e9, 1e9


@dataclass(frozen=True)
class Found:
    """What a fit of one layer comes to.

    Attributes
    ----------
    state : EvidenceState
    history : list of dict
    used : ndarray of bool, shape (F,)
        Features that pay for their bits.
    compression : float
    rows, at_rest : int
        Images that it was measured on, and those of them that came to rest.
    """

    state: EvidenceState
    history: list[dict[str, Any]]
    used: np.ndarray
    compression: float
    rows: int
    at_rest: int


# -- checks -----------------------------------------------------------------------------------------------


def image_of(shape: Any) -> tuple[int, int, int]:
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


def make_layer(model: HierarchicalCompositionalNetwork, image: tuple[int, int, int]) -> FeatureLayer:
    """The layer that the parameters ask for."""
    n_features, (h, w) = model.layers[0]
    priors = model.p01, model.p10, model.p_weight, model.p_sparsity
    values = (None if v is None else float(v) for v in (model.threshold, model.missing))
    return FeatureLayer(image, int(n_features), (int(h), int(w)), *map(float, priors), *values)


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
    train: Dataset,
    held: Dataset | None,
    *,
    streamed: bool = False,
) -> None:
    """Refuse rows that the learner cannot use, before any work; of a stream there are more to come."""
    check_plain(train, "X")
    image, where = image_shape(model, train, "X"), train.url or "X"
    _, (h, w) = model.layers[0]
    if h > image[1] or w > image[2]:
        flat = len(train.feature_shape) == 1 and model.image_shape is None
        remedy = "set image_shape (these rows are flat)" if flat else "make the features smaller"
        raise DataError(
            f"{where}: features of {h} x {w} are larger than images of {image[1]} x {image[2]}: {remedy}"
        )
    if held is not None:
        check_plain(held, "validation")
        other = image_shape(model, held, "validation")
        if other != image:
            raise DataError(
                f"{held.url or 'validation'}: images are {other}, but those to learn from {image}"
            )
    elif model.patience is not None and not streamed:
        raise ValueError(
            f"patience={model.patience} waits for better compression, but there are no validation rows: pass "
            "validation (in a job [data] validation), or leave patience out"
        )
    if streamed:
        return
    n = len(train)
    rows = step_rows(model, n)
    if model.online and rows > n:
        raise DataError(
            f"{where}: a step of n_chains={n_chains(model, n)} x chain_batches={chain_batches(model, n)} x "
            f"batch_size={model.batch_size} = {rows} images is larger than the data, {n}: lower one of them"
        )
    if (warm := warmup_rows(model, n)) > n:
        raise DataError(f"{where}: warmup_rows={warm}, but there are {n} images: lower it")


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
    return int(model.batch_size) * chain_batches(model, n_rows) * n_chains(model, n_rows)


def row_order(
    model: HierarchicalCompositionalNetwork,
    n_rows: int,
    options: Mapping[str, Any],
    seed: int,
    *,
    chains: int,
) -> RowOrder:
    """Which images each step gets: of ``chains`` chains, or one minibatch a step where that is 0."""
    size = step_rows(model, n_rows) if chains else int(model.batch_size)
    buffer = int(options.get("buffer_runs") or BUFFER_RUNS)
    run = int(options.get("run_rows") or min(RUN_ROWS, n_rows // (buffer * max(chains, 1)) + 1))
    return RowOrder(n_rows, seed, size, n_chains=max(chains, 1), run_rows=run, buffer_runs=buffer)


def leaf_order(
    model: HierarchicalCompositionalNetwork, layer: FeatureLayer, n_rows: int, options: Mapping[str, Any]
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
    leaves = min(-(-n_rows * leaf_bytes(layer, 1) // LEAF_BYTES), max(1, n_rows // LEAST_LEAF_ROWS))
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


def make_learner(
    model: HierarchicalCompositionalNetwork, layer: FeatureLayer, n_rows: int, seed: int
) -> EvidenceLearner:
    """The learner of a fit."""
    common = layer, float(model.forgetting), int(model.batch_size), seed, int(model.patience or 0)
    if model.online:
        return EvidenceLearner(*common)
    alone = max(1, int(VISIT_SECONDS * PAIRS_WITH_MESSAGES / (layer.pairs * n_rows)))
    return KeptMessages(*common, float(model.damping), n_rows, alone, n_epochs(model, n_rows))


def fit_steps(model: HierarchicalCompositionalNetwork, rows: Mapping[str, Rows]) -> Steps:
    """A whole fit; sets the model's learned attributes."""
    train, n = rows["train"].dataset, len(rows["train"].dataset)
    layer = make_layer(model, image_shape(model, train, "X"))
    info = {"max_iter": n_epochs(model, n)}
    model.seed_, rows = yield Begin(info, keeps_records=not model.online, all_rows=ALL_ROWS)
    counts = yield Collect("pixels", PixelCounts(layer), rows["train"])
    check_pixels(train, counts)
    best: Found | None = None
    for restart in range(int(model.n_restarts)):
        found = yield from _one_fit(model, layer, rows, restart)
        if best is None or found.compression < best.compression:
            best = found
    assert best is not None
    model._keep(layer, best)
    warn_of_rest(best, layer, n)


def _one_fit(
    model: HierarchicalCompositionalNetwork, layer: FeatureLayer, rows: Mapping[str, Rows], restart: int
) -> Any:
    """The steps of one restart; returns :class:`Found`."""
    n, seed = len(rows["train"].dataset), model.seed_ + restart  # restarts see other orders
    end = f"-{restart}" if restart else ""
    learner = make_learner(model, layer, n, seed)
    state = replace(learner, seed=model.seed_).start(restart)
    if restart == 0 and model.warm_start and hasattr(model, "beliefs_"):
        before = last_state(model, layer)
        given = yield Remember("start", {"beliefs": before.beliefs, "first": before.first})
        state = replace(state, beliefs=_on_grid(learner, given["beliefs"]), first=given["first"])
    if warm := warmup_rows(model, n):
        some = {"train": replace(rows["train"], dataset=rows["train"].dataset[:warm])}
        serial = replace(learner, patience=0)
        order = partial(row_order, model, warm, seed=seed, chains=0)
        result = yield LearnOnline(f"warmup{end}", serial, state, some, None, order, 1)
        state = EvidenceState(result.state.beliefs, result.state.first)
    order = partial(row_order, model, n, seed=seed, chains=n_chains(model, n))
    if not model.online:
        order = partial(leaf_order, model, layer, n)
    learn = LearnOnline(f"learn{end}", learner, state, rows, None, order, n_epochs(model, n))
    result = yield replace(learn, reports=REPORTS if model.online else 0, keeps_leaves=not model.online)
    looked = rows.get("validation", rows["train"])
    every = 1 if "validation" in rows else max(1, n // LOOKED_ROWS)
    weights = result.state.beliefs > 0
    length = DescriptionLength(Decoder(layer, weights, model.seed_), every)
    stats = yield Collect(f"features{end}", length, looked)
    used = paying(layer, weights, stats)
    kept = weights & used
    if (kept != weights).any():
        length = DescriptionLength(Decoder(layer, kept, model.seed_), every)
        stats = yield Collect(f"compression{end}", length, looked)
    at_rest = int(stats["rows"]), int(stats["at_rest"])
    return Found(result.state, result.history, used, compression(layer, kept, stats), *at_rest)


def _on_grid(learner: EvidenceLearner, beliefs: np.ndarray) -> np.ndarray:
    """Beliefs where messages are kept are whole units."""
    return from_grid(to_grid(beliefs)) if isinstance(learner, KeptMessages) else beliefs


def last_state(model: HierarchicalCompositionalNetwork, layer: FeatureLayer) -> EvidenceState:
    """What the last fit came to, to go on from."""
    if model._layer.weights_shape != layer.weights_shape:
        raise ValueError(
            f"the last fit was of {_told(model._layer)}, and these are {_told(layer)}: set layers back, or "
            "start again (warm_start=False)"
        )
    return model._stream


def _told(layer: FeatureLayer) -> str:
    h, w = layer.window
    return f"{layer.n_features} features of {layer.image[0]} x {h} x {w}"


class WeightsWatched(Callback):
    """Warns once where all weights are off, or on: after an epoch online, else in the end."""

    def __init__(self, model: HierarchicalCompositionalNetwork) -> None:
        self.model, self.told = model, False
        self.record: dict[str, Any] = {}

    def on_pass_end(self, record: dict[str, Any]) -> None:
        self.record = record
        if self.model.online:
            self._look()

    def on_fit_end(self, info: dict[str, Any]) -> None:
        self._look()

    def _look(self) -> None:
        record, share = self.record, self.record.get("share_on")
        if self.told or share not in (0.0, 1.0):
            return
        self.told = True
        now, move = ("off", "raise") if not share else ("on", "lower")
        warn_user(
            f"all weights are {now} after epoch {record['pass']}: {move} p_weight (now "
            f"{self.model.p_weight:g}) or p_sparsity (now {self.model.p_sparsity:g})"
        )


def warn_of_rest(found: Found, layer: FeatureLayer, n_rows: int) -> None:
    """Warn where little is at rest in the end."""
    state = found.state
    moved = state.last_moved / (n_rows * layer.n_pixels) if isinstance(state, LeafState) else 0.0
    if moved > MOST_MOVED:
        warn_user(
            f"messages of {moved:.0%} of the pixels still moved in the last sweep: give more sweeps "
            "(n_epochs), or a damping below 1"
        )
    elif found.rows >= FEW_ROWS and not found.at_rest:
        warn_user(
            f"none of {found.rows} images came to rest in {SWEEPS} sweeps under the features that were "
            "learned: raise p01 and p10 (images are noisier than these say), or give more features"
        )


# -- a stream of rows -------------------------------------------------------------------------------------


def learn_stream(learner: EvidenceLearner, state: EvidenceState, ds: Dataset, device: str) -> EvidenceState:
    """A step for each minibatch of images, in their order, in this process."""
    backend, reader = make_backend(device), Reader(ds, None, Meter(), wants=learner.wants)
    seen, size = state.rows, learner.batch_rows
    with single_threaded():
        for a in range(0, len(ds), size):
            b = min(a + size, len(ds))
            # Numbers of rows go on over calls: they key the random orders.
            x, y, weight = reader.read(a, b)
            numbers = np.arange(seen + a, seen + b, dtype=np.int64)
            block = reader.block(x, y, weight, seen + a, numbers, state.iteration)
            state = advance(learner, state, run_chains(learner, state, [block], backend), b - a)
    return state


# -- what it will need ------------------------------------------------------------------------------------


def plan(
    model: HierarchicalCompositionalNetwork,
    train: Dataset,
    held: Dataset | None,
    resources: Resources,
    options: dict[str, Any],
    *,
    measure: bool = True,
) -> dict[str, Any]:
    """What a fit of these images would need."""
    n, layer = len(train), make_layer(model, image_shape(model, train, "X"))
    learner, told = make_learner(model, layer, n, 0), Forecast("hcn", train, resources, options, measure)
    if model.online:
        order = row_order(model, n, options, 0, chains=n_chains(model, n))
        remedy = "lower the features of layers, or n_chains"
    else:
        order = leaf_order(model, layer, n, options)
        remedy = f"set [engine] leaf_rows to {max(LEAST_LEAF_ROWS, order.chain_rows // 4)}, or online=True"
    state, row_bytes = 16 * int(np.prod(layer.weights_shape)), train.nbytes // n
    memory = steps_memory(
        learner, order, train.n_features, resources, train, row_bytes, 0, state, not model.online
    )
    told.fits("learn", describe_steps(learner, order), memory, remedy)
    told.caches(None, n * row_bytes if train.is_stored else 0)
    looked = train if held is None else held
    length = DescriptionLength(Decoder(layer, np.zeros(layer.weights_shape, bool)))
    told.stage("compression", {"train": length}, {"train": looked}, state, "lower the features of layers")
    leaves = 0 if model.online else 2 * n * leaf_bytes(layer, 1)
    told.out["checkpoint_bytes"] = state
    told.out["bytes_per_image"] = 4 * int(np.prod(layer.places)) if model.online else leaf_bytes(layer, 1)
    return _timed(model, told, learner, order, 0 if held is None else len(held), leaves + 3 * state)


def _timed(
    model: HierarchicalCompositionalNetwork,
    told: Forecast,
    learner: EvidenceLearner,
    order: RowOrder,
    n_held: int,
    disk: int,
) -> dict[str, Any]:
    """The plan with its seconds."""
    n, layer, epochs = order.n_rows, learner.layer, n_epochs(model, order.n_rows)
    size, pixels = min(learner.batch_rows, n), layer.n_pixels

    def make() -> Any:
        backend, rng = make_backend("cpu"), np.random.default_rng(0)
        x = (rng.random((size, pixels)) < PROBED_ONES).astype(np.uint8)
        block = Block(x, None, None, 0, np.arange(size))
        prepared: Any = learner.prepare(learner.start(), backend)
        if isinstance(learner, KeptMessages):
            kept = replace(learner, n_rows=size, alone_sweeps=PROBED_SWEEPS)
            return lambda: kept.visit(prepared, block, None)
        return lambda: learner.run_chain(prepared, block, Stats.zeros(learner.layout()))

    what = (
        f"hcn {'online' if model.online else 'kept'} {layer.image} {layer.window} {layer.n_features} {size}"
    )
    slots, sweeps = min(told.resources.slots, order.n_chains), 1 if model.online else PROBED_SWEEPS
    row = layer.pairs / (PAIRS_PER_SECOND if model.online else PAIRS_WITH_MESSAGES)
    if told.measure:
        row = rates.get(f"{what} t{slots}", lambda: cpu_seconds(make, slots)) / size / sweeps
    # Decoding sweeps as online learning does.
    sweep = row if model.online else row * PAIRS_WITH_MESSAGES / PAIRS_PER_SECOND
    reading = told.reading(told.train) + told.gathering(told.train.nbytes / n)
    one = n * told.row_seconds(row, reading, slots)
    decoding = SWEEPS * sweep / told.resources.slots
    restarts = int(model.n_restarts)
    warm = warmup_rows(model, n) * row
    seconds = restarts * (warm + epochs * one)
    least = restarts * (warm + min(epochs, int(model.patience or epochs) + 1) * one)
    told.add("learn", seconds, least)
    if n_held:
        told.add("validation", restarts * epochs * n_held * decoding)
    told.add("compression", 2 * restarts * (n_held or min(n, 2 * LOOKED_ROWS)) * decoding)
    told.out["probe"] = {"pairs_per_second": layer.pairs / row}
    told.out["seconds_per_pass"] = one
    told.out["predicting_seconds_per_row"] = decoding
    told.out["passes"] = {"at_least": min(epochs, int(model.patience or epochs) + 1), "at_most": epochs}
    return told.told(disk, "lower n_epochs, n_restarts or the features of layers")
