"""The fit of a bootstrap network as steps, and what it will need."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from sklearn.exceptions import ConvergenceWarning

from scalelatent.contract.learners import Block
from scalelatent.contract.parameters import is_number
from scalelatent.contract.stats import Stats
from scalelatent.data import Dataset
from scalelatent.engine.backend import make_backend
from scalelatent.engine.mapwrite import COLUMN_BLOCK_BYTES
from scalelatent.engine.passes import FLOP_RATE, make_stage
from scalelatent.engine.plan import Forecast, Resources, process_bytes, stage_memory
from scalelatent.engine.rates import GATHER_RATE, RowShape
from scalelatent.engine.reading import AHEAD_BYTES, as_rows
from scalelatent.engine.rowsets import SHARD_BYTES
from scalelatent.errors import PlanError, warn_user
from scalelatent.estimators.session import FitSession, Place, tile_layout
from scalelatent.estimators.steps import (
    Begin,
    Collect,
    Derive,
    Encode,
    Gather,
    Learn,
    Remember,
    Rows,
    Step,
    Steps,
)
from scalelatent.kernels.arrays import HostRows
from scalelatent.kernels.streams import stream
from scalelatent.models.mbn.model.layers import (
    SHORT_CODES,
    ArraySets,
    Layer,
    make_layers,
    schedule,
)
from scalelatent.models.mbn.model.network import LayerCoder, ready_rows
from scalelatent.models.mbn.model.pca import (
    CodeCounts,
    Components,
    PcaState,
    StreamedPca,
    kernel_components,
)
from scalelatent.storage.disk import locate

from .decay import GRID, SAMPLE_ROWS, choose_decay

if TYPE_CHECKING:
    from .estimator import MultilayerBootstrapNetwork

# Up to so many rows the matrix of their inner products gives all components at once.
KERNEL_ROWS = 1024
# Components that a share of the variance is first looked for in, and at most.
FIRST_COMPONENTS, MOST_COMPONENTS = 32, 1024
# The sums of a pass that looks for a share are no larger, but for the first components.
SHARE_BYTES = 2**25
# Below so many clusterings NMI falls, on images and text alike.
FEW_CLUSTERINGS = 50
PROBE_ROWS, PROBE_CENTROIDS = 2048, 2048
STRIP_ROWS = 1024
# Passes until the components settle.
PCA_PASSES = 12
# Of a layer of which no centroid is read.
_NO_SETS = ArraySets(np.empty((0, 0)), 0)
# Small networks of all decays over a sample of the rows.
DECAY_SECONDS = 30.0


def layers_of(
    model: MultilayerBootstrapNetwork, train: Dataset, decay: float, seed: int
) -> tuple[Layer, ...]:
    """The layers of a network over some rows."""
    return make_layers(
        schedule(len(train), model.k1, decay, model.k_last, model.n_classes),
        n_rows=len(train),
        n_features=train.n_features,
        n_clusterings=int(model.n_clusterings),
        fraction=float(model.feature_fraction),
        metric=model.metric,
        csr=train.is_sparse,
        dtype=str(train.dtype),
        seed=seed,
    )


def fit_steps(model: MultilayerBootstrapNetwork, rows: Mapping[str, Rows]) -> Steps:
    """A whole fit, see :mod:`.steps`; sets the model's learned attributes."""
    all_rows = (
        "centroids of a bootstrap network are drawn from all rows; clean or leave out the bad ones first"
    )
    model.seed_, rows = yield Begin({"max_iter": None}, keeps_records=True, all_rows=all_rows)
    train = rows["train"].dataset
    decay = model.decay
    if decay == "auto":
        about = {"rows": min(SAMPLE_ROWS, len(train)), "tries": len(GRID)}
        chosen = yield Remember(
            "decay", lambda: {"decay": np.array(choose_decay(model, train, model.seed_))}, about
        )
        decay = float(chosen["decay"])
        model._check_chosen(decay)
    model.decay_ = float(decay)
    layers = layers_of(model, train, model.decay_, model.seed_)
    below: Rows | None = rows["train"]
    centroids, codes = [], {}
    for layer in layers:
        about = {"layer": layer.number, "layers": len(layers), "k": layer.k}
        sets = yield Gather(f"gather-l{layer.number}", layer, below, about)
        kept = model.keep_codes or layer is layers[-1]
        over = () if model.keep_codes or layer.number == 1 else (f"code-l{layer.number - 1}",)
        coder = LayerCoder(layer, sets, 0, layer.n_clusterings)
        below = yield Encode(f"code-l{layer.number}", coder, below, kept=kept, over=over, about=about)
        centroids.append(sets)
        if kept and below is not None:
            codes[layer.number] = below.dataset
    components: Components | None = None
    history: list[dict[str, Any]] = []
    if model.output == "pca":
        components, history = yield from pca_steps(model, layers[-1], codes[len(layers)], "pca")
    model._keep(layers, centroids, codes, components, history)


def most_components(layer: Layer) -> int:
    """Components that a share of the variance is looked for in at most."""
    # Twice as many columns are iterated as there are components.
    some = SHARE_BYTES // (16 * layer.n_clusterings * layer.k)
    return max(FIRST_COMPONENTS, min(some, MOST_COMPONENTS))


def pca_steps(
    model: MultilayerBootstrapNetwork, layer: Layer, codes: Dataset, name: str
) -> Generator[Step, Any, tuple[Components, list[dict[str, Any]]]]:
    """Principal components of a layer's codes, and records of the passes that they took."""
    wanted = model.n_components
    if wanted is None:
        wanted = model.n_classes or 2
    share = float(wanted) if is_number(wanted) and wanted < 1 else None
    if len(codes) <= KERNEL_ROWS:
        found = yield Derive(_all_components, (codes, layer.k, model.device))
        count = (found.reaching(share) or len(found.offset)) if share is not None else int(wanted)
        return _filled(found.first(count), count), []
    stats: Stats = yield Collect(f"{name}-counts", CodeCounts(layer.n_clusterings, layer.k), Rows(codes))
    history: list[dict[str, Any]] = []
    count, most = FIRST_COMPONENTS if share is not None else int(wanted), most_components(layer)
    while True:
        learner = StreamedPca.of(np.array(stats["counts"]), len(codes), count)
        start = learner.start(stream(model.seed_, "mbn-pca"))
        stage = name if share is None else f"{name}-{count}"
        result = yield Learn(stage, learner, start, {"train": Rows(codes)}, None, _no_predictor)
        history += result.history
        found = learner.components(result.state)
        if share is None:
            _warn_unsettled(learner, result.state)
            return _filled(found, count), history
        reached = found.reaching(share)
        if reached is not None or learner.n_components < count or count >= most:
            _warn_unsettled(learner, result.state)
            if reached is None and learner.n_components == count:
                _warn_short(share, found)
            return found.first(reached or len(found.offset)), history
        count = min(2 * count, most)


def warn_few_clusterings(model: MultilayerBootstrapNetwork) -> None:
    """Warn where too few clusterings vote for rows of one cluster to share a code above the first layer."""
    if model.n_clusterings < FEW_CLUSTERINGS:
        warn_user(
            f"n_clusterings={model.n_clusterings}: with fewer than {FEW_CLUSTERINGS} hardly two rows share a "
            "code above the first layer, and clusters are lost, those of text above all: take 100 or more"
        )


def _warn_unsettled(learner: StreamedPca, state: PcaState) -> None:
    if state.iteration >= learner.max_iter and state.residual > learner.tol:
        warnings.warn(
            f"the {learner.n_components} components of the output have not settled in {learner.max_iter} "
            f"passes (residual {state.residual:.1e}, wanted {learner.tol:.0e}): the last ones may be mixed "
            "with others; fewer settle sooner (n_components)",
            ConvergenceWarning,
            stacklevel=2,
        )


def _warn_short(share: float, found: Components) -> None:
    reached = found.variance.sum() / max(found.total_variance, 1e-300)
    warnings.warn(
        f"n_components={share:g} is not reached: {len(found.offset)} components, the most that a share is "
        f"looked for in, explain {reached:.3f} of the variance; give a smaller share, or a number of "
        "components",
        UserWarning,
        stacklevel=2,
    )


def _no_predictor(state: PcaState) -> NoReturn:
    raise NotImplementedError("a bootstrap network predicts nothing")


def _all_components(codes: Dataset, k: int, device: str) -> Components:
    backend = make_backend("reference" if device == "reference" else "cpu")
    return kernel_components(np.ascontiguousarray(codes.read_x(0, len(codes))), k, backend.kernel)


def _filled(found: Components, count: int) -> Components:
    """As many components as were asked for: where rows lie in fewer dimensions, the last ones are zeros."""
    missing = count - len(found.offset)
    if missing <= 0:
        return found
    table = np.concatenate([found.table, np.zeros((*found.table.shape[:2], missing))], axis=2)
    zeros = np.zeros(missing)
    return Components(
        table,
        np.concatenate([found.offset, zeros]),
        np.concatenate([found.variance, zeros]),
        found.total_variance,
    )


def layer_components(model: MultilayerBootstrapNetwork, number: int, codes: Dataset) -> Components:
    """Components of a lower layer, which the fit did not need, from the codes that it kept."""
    # No worker of an enclosing cluster sees codes in memory.
    here = not codes.is_stored
    with FitSession(model._kind, device=model.device, n_jobs=model.n_jobs, in_process=here) as session:
        session.begin(model.seed_, {}, {})
        components, _ = session.answer(pca_steps(model, model._layers[number - 1], codes, f"pca-l{number}"))
    return components


# -- what it will need ------------------------------------------------------------------------------------


def plan(model: MultilayerBootstrapNetwork, told: Forecast) -> dict[str, Any]:
    if model.decay != "auto":
        return _plan(model, told, float(model.decay))
    chosen = _largest_that_fits(model, told.train, told.resources)
    return {"decay": chosen, **_plan(model, told, chosen)}


def _largest_that_fits(model: MultilayerBootstrapNetwork, train: Dataset, resources: Resources) -> float:
    """Of the decays that "auto" tries."""
    refused: ValueError | None = None
    for decay in reversed(GRID):
        try:
            _plan(model, Forecast("mbn", train, None, resources, {}, measure=False), decay)
        except ValueError as error:  # no room, or layers that cannot be
            refused = error
        else:
            return decay
    assert refused is not None
    raise refused


def check_room(
    model: MultilayerBootstrapNetwork,
    train: Dataset,
    resources: Resources,
    places: tuple[Place, Place | None] | None,
    decay: float,
) -> None:
    """Refuse a fit that memory or disk has no room for."""
    try:
        told = _plan(model, Forecast("mbn", train, None, resources, {}, measure=False), decay)
        if places is not None:
            check_disk(told, *places)
    except ValueError as error:
        if model.decay != "auto":
            raise
        raise PlanError(f"{error}; decay='auto' has chosen {decay:g}: a smaller decay needs less") from None


def _plan(model: MultilayerBootstrapNetwork, told: Forecast, decay: float) -> dict[str, Any]:
    """The plan of one decay."""
    train, resources, sets = told.train, told.resources, int(model.n_clusterings)
    layers = layers_of(model, train, decay, 0)
    n, row_bytes = len(train), max(1, train.nbytes // len(train))
    out, codes, centroids, tasks = told.out, [], 0, 0
    out["layers"], out["predicting_seconds"], out["predicting_seconds_per_row"] = {}, 0.0, 0.0
    if model.decay == "auto":
        told.add_seconds("choosing decay", DECAY_SECONDS)
    for layer in layers:
        of_a_set, code_size = _centroid_bytes(layer, train), np.dtype(layer.code_dtype).itemsize
        tiles = tile_layout(n, row_bytes, LayerCoder(layer, _NO_SETS, 0, sets))
        memory = _memory(layer, train, of_a_set, row_bytes, tiles, resources)
        told.check_memory(f"layer {layer.number} (k = {layer.k})", memory, _remedy(layer))
        strips = -(-n // tiles["shard_rows"])
        count = strips * -(-sets // tiles["tile_columns"])
        per_row, per_set = _code_seconds(told, layer, train)
        coding = sets * (n * per_row + strips * per_set) / min(resources.slots, count)
        coding += told.pass_overhead(count)
        gathering = _gather_seconds(told, n * row_bytes, sets * of_a_set)
        told.add_seconds(f"gather-l{layer.number}", gathering)
        told.add_seconds(f"code-l{layer.number}", coding)
        out["predicting_seconds"] += sets * per_set / resources.slots
        out["predicting_seconds_per_row"] += sets * per_row / resources.slots
        codes.append(n * sets * code_size)
        out["layers"][f"l{layer.number}"] = {
            "k": layer.k,
            "tasks": count,
            "centroid_bytes": sets * of_a_set,
            "code_bytes": codes[-1],
            "seconds": gathering + coding,
        }
        centroids, tasks, row_bytes = centroids + sets * of_a_set, tasks + count, sets * code_size
    every = sum(layer["seconds"] for layer in out["layers"].values())
    told.set_passes(every / len(layers), len(layers), len(layers))  # one a layer
    if model.output == "pca":
        _output(told, model, layers[-1], n)
    kept = sum(codes) if model.keep_codes else codes[-1]
    # Each layer reads the codes of the one below; the last ones stay, all others lie in scratch.
    lower = [] if model.keep_codes else codes[:-1]
    told.scratch = max((sum(lower[i : i + 2]) for i in range(len(lower))), default=0)
    out["tasks"], out["run_bytes"] = tasks, centroids + kept
    told.add_cache(max(train.nbytes if train.is_stored else 0, *codes))
    shorter = f"lower k1 (it is {layers[0].k}) or n_clusterings (it is {sets})"
    return told.finish(shorter, kept=centroids + max(0, kept + sum(lower[-1:]) - told.scratch))


def _gather_seconds(told: Forecast, dataset_bytes: int, nbytes: int) -> float:
    """Seconds of picking the rows that become centroids, and of writing them."""
    if not told.measure:
        return 0.0
    write, read = told.scratch_rates()
    shards = max(1, -(-nbytes // SHARD_BYTES))
    # Each shard looks at all rows; those of its sets are picked one by one.
    seconds = nbytes * (write + 2 / GATHER_RATE) + shards * dataset_bytes * read
    return seconds / min(told.resources.slots, shards)


def _code_seconds(told: Forecast, layer: Layer, train: Dataset) -> tuple[float, float]:
    """Seconds of a clustering of a layer: of a row, and of putting up its centroids."""
    if not told.measure:
        return layer.flops_per_row() / FLOP_RATE, layer.set_flops() / FLOP_RATE
    n = min(PROBE_ROWS, len(train))
    k, below = min(layer.k, PROBE_CENTROIDS, n), min(layer.k_below, PROBE_CENTROIDS)
    what = f"mbn_layer {layer.metric} {layer.csr} {layer.dtype} {layer.width}x{layer.k_below} {k} {n}"

    def make(rows: int) -> Callable[[], np.ndarray]:
        small = replace(layer, k=k, n_rows=n, k_below=below)
        if layer.number == 1:
            x: HostRows = as_rows(train.read_x(0, n))
        else:
            x = np.random.default_rng(0).integers(0, below, (n, layer.width)).astype(layer.dtype)
        sets = [small.take(which, x, small.rows(which)) for which in range(small.together)]
        backend = make_backend("cpu")
        some = ready_rows(small, backend, x[:rows] if rows < n else x)
        return lambda: small.codes(backend, some, sets, 0)

    few, grown = max(1, n // 8), layer.k / k
    whole = told.probe(what, partial(make, n), 0.0, rows=layer.together)
    if layer.csr and layer.number == 1:  # the rows that are there, all at once
        return whole / n * grown, 0.0
    part = told.probe(f"{what} few", partial(make, few), 0.0, rows=layer.together)
    per_row = max(whole - part, 0.1 * whole) / (n - few) if n > few else whole
    per_set = max(part - few * per_row, 0.0)
    # Of the first layer a row meets all centroids; above it those that share a unit, which are as many.
    return per_row * (grown if layer.number == 1 else 1.0), per_set * grown


def check_disk(told: Mapping[str, Any], run_dir: Place, scratch: Place | None) -> None:
    """Refuse a fit that its folders have no room for."""
    needs = [("centroids and codes", run_dir, "disk_bytes", "run_dir ([job] out)")]
    if scratch is not None:
        needs = [
            ("centroids and the codes that stay", run_dir, "run_bytes", "run_dir ([job] out)"),
            ("codes of lower layers", scratch, "scratch_bytes", "scratch ([job] scratch)"),
        ]
    for what, place, key, setting in needs:
        free = locate(place).free_bytes()
        if free is not None and free < told[key]:
            raise PlanError(
                f"{what} would take {told[key] / 2**30:,.1f} GiB of disk, and {locate(place).url} has "
                f"{free / 2**30:,.1f} GiB left: choose another {setting}, or lower k1 or n_clusterings"
            )


def _centroid_bytes(layer: Layer, train: Dataset) -> int:
    """Of one clustering, as they are stored."""
    if layer.csr:
        assert train.nnz is not None
        entry = train.nbytes / max(train.nnz, 1)
        return int(layer.k * train.nnz / len(train) * layer.fraction * entry) + 8 * layer.k
    return int(layer.k * layer.output()[0][0] * np.dtype(layer.dtype).itemsize)


def _converted(layer: Layer, train: Dataset, rows: int) -> int:
    """Bytes of a task's rows as the first layer's kernels take them; 0 where they are stored so."""
    if layer.number > 1 or layer.dtype == "float32" or (layer.dtype == "uint8" and not layer.csr):
        return 0
    entries = (train.nnz or 0) / len(train) if layer.csr else layer.width
    return int(4 * entries * rows)


def _memory(
    layer: Layer,
    train: Dataset,
    centroids: int,
    row_bytes: int,
    tiles: Mapping[str, int],
    resources: Resources,
) -> dict[str, int]:
    threads = resources.threads
    at_once = layer.together
    if layer.number > 1:
        # Of each clustering codes side by side and as lists, and units, of which one's are being drawn
        # as bytes; where the lists of each code begin; what the rows of a strip meet (cpu/lists.py).
        word = 2 if layer.k * at_once < SHORT_CODES else 4
        ready = layer.width * at_once * (3 * word * layer.k + layer.k_below)
        ready += layer.width * layer.k_below * (8 + word)
        ready += int(STRIP_ROWS * word * layer.width * at_once * min(2 * layer.k / layer.k_below, 8))
    elif layer.csr:
        ready = 3 * centroids
    else:
        # Packed in float32, and once more while it is being packed.
        ready = 8 * layer.k * layer.n_columns
    # Of very many rows tiles are larger.
    code_bytes = tiles["tile_columns"] * np.dtype(layer.code_dtype).itemsize
    rows = max(COLUMN_BLOCK_BYTES, tiles["shard_rows"] * (row_bytes + code_bytes)) + row_bytes
    return {
        "process": process_bytes(resources),
        "rows of a task": threads * (2 * rows + _converted(layer, train, tiles["shard_rows"])),
        "centroids of the clusterings at work": threads * (at_once * centroids + ready),
        "centroids while they are gathered": 2 * threads * max(centroids, min(SHARD_BYTES, 16 * centroids)),
    }


def _output(told: Forecast, model: MultilayerBootstrapNetwork, layer: Layer, n: int) -> None:
    """Add the passes of the output's EM-PCA."""
    if n <= KERNEL_ROWS:
        told.add_eigenvectors("pca", n, 2)
        return
    wanted, threads = model.n_components or model.n_classes or 2, told.resources.threads
    count = most_components(layer) if wanted < 1 else int(wanted)
    learner = StreamedPca.of(np.zeros((layer.n_clusterings, layer.k)), n, count)
    codes = RowShape(n, layer.n_clusterings)
    stage = make_stage("mbn_pca", learner, {"train": codes}, "cpu")
    nbytes, rows = stage.reductions["train"].layout().nbytes, stage.grids["train"].block_rows
    memory = stage_memory(stage, told.resources, codes, 6 * nbytes)
    piece = min(COLUMN_BLOCK_BYTES, n * layer.n_clusterings * np.dtype(layer.code_dtype).itemsize)
    memory["codes read ahead"] = threads * (2 * piece + max(piece, AHEAD_BYTES))
    share = f"give n_components a number (the share {wanted:g} may take {count})"
    fewer = share if wanted < 1 else f"lower n_components (it is {count})"
    remedy = f"{fewer}, or k_last so that the last layer has fewer than {layer.k} centroids"
    told.check_memory("the output", memory, remedy)
    if not told.measure:
        return

    def block() -> Block:
        x = np.random.default_rng(0).integers(0, layer.k, (rows, layer.n_clusterings))
        return Block(x.astype(layer.code_dtype), None, None, 0)

    counts = replace(stage, name="mbn_counts", work={"train": CodeCounts(layer.n_clusterings, layer.k)})
    counting, a_pass = (
        told.pass_seconds(one, told.measure_rates(one, state, block, about=f" {layer.code_dtype}"))
        for one, state in ((counts, None), (stage, learner.start(np.random.default_rng(0))))
    )
    told.add_seconds("pca-counts", counting)
    told.add_seconds("pca", PCA_PASSES * a_pass, 5 * a_pass, 4 * PCA_PASSES * a_pass)


def _remedy(layer: Layer) -> str:
    if layer.number == 1:
        return f"lower k1 (it is {layer.k}), or feature_fraction"
    return "lower k1 or n_clusterings"
