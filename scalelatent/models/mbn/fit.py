"""Fit of a bootstrap network: the steps that the session runs, and the forecast of time, memory and disk."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from sklearn.exceptions import ConvergenceWarning

from scalelatent.contract.learners import Block
from scalelatent.contract.stats import Stats
from scalelatent.data import Dataset
from scalelatent.engine.backend import make_backend
from scalelatent.engine.mapwrite import COLUMN_BLOCK_BYTES
from scalelatent.engine.passes import FLOP_RATE, make_stage
from scalelatent.engine.plan import Forecast, Resources, add_totals, process_bytes, stage_memory
from scalelatent.engine.rates import GATHER_RATE, RowShape
from scalelatent.engine.reading import AHEAD_BYTES, as_rows
from scalelatent.engine.rowsets import SHARD_BYTES, DrawnSets, StoredSets, UncopiedSets
from scalelatent.errors import PlanError, warn_user
from scalelatent.estimators.session import FitSession, LocationLike, tile_layout
from scalelatent.estimators.steps import (
    ComputeValue,
    EncodeRows,
    MappedRows,
    StartFit,
    Step,
    Steps,
    StoreArrays,
    StoreRowSets,
    SumStatistic,
    TrainBatch,
)
from scalelatent.kernels.arrays import HostRows
from scalelatent.kernels.streams import stream
from scalelatent.models.mbn.model.layers import (
    MAX_UINT16_CENTROIDS,
    ArraySets,
    Layer,
    choose_pools,
    make_layers,
    make_schedule,
)
from scalelatent.models.mbn.model.network import LayerCoder, convert_rows
from scalelatent.models.mbn.model.pca import CodeCounts, Components, PcaState, StreamedPca, run_kernel_pca
from scalelatent.storage.disk import locate

from .decay import DECAYS, SAMPLE_ROWS, choose_decay

if TYPE_CHECKING:
    from .estimator import MultilayerBootstrapNetwork

# Up to this number of rows, the principal components of the output are computed from the inner products of
# the rows, in memory. With more rows, they are computed in passes over the rows.
KERNEL_ROWS = 1024
# A fit with fewer clusterings per layer warns: with 25 instead of 100, the normalized mutual information of
# clusters and topics of documents falls from 52 to 44 %.
FEW_CLUSTERINGS = 50
# Largest numbers of rows and of centroids in the short computation by which `plan` measures the speed.
PROBE_ROWS, PROBE_CENTROIDS = 2048, 2048
# Number of rows that kernels/cpu/lists.py processes together, each with a buffer, for the forecast of memory.
STRIP_ROWS = 2048
# Typical number of passes over the rows until the principal components converge, for the forecast of time.
PCA_PASSES = 12
# Placeholder for the centroids of a layer in forecasts, which do not read centroids.
_NO_CENTROIDS = ArraySets(np.empty((0, 0)), 0)
# If decay="auto", `plan` forecasts the expected seconds for this decay, the one of the paper.
USUAL_DECAY = 0.5
# Typical seconds that a fit with decay="auto" needs to choose the decay.
DECAY_SECONDS = 5.0


def plan_layers(
    model: MultilayerBootstrapNetwork, train: Dataset, decay: float, seed: int
) -> tuple[Layer, ...]:
    """Return the layers of a network on the rows ``train``; ``decay`` is the ratio of their centroids."""
    return make_layers(
        make_schedule(len(train), model.k1, decay, model.k_last, model.n_classes),
        n_rows=len(train),
        n_features=train.n_features,
        n_clusterings=int(model.n_clusterings),
        fraction=float(model.feature_fraction),
        metric=model.metric,
        csr=train.is_sparse,
        dtype=str(train.dtype),
        seed=seed,
        n_pools=choose_pools(model.n_pools, len(train), train.n_features, int(model.n_clusterings)),
    )


def in_memory_bytes(model: MultilayerBootstrapNetwork, train: Dataset) -> int:
    """Return the bytes of the training rows and of their codes in all layers, at most, if kept in memory.

    The codes of a row are the numbers of its nearest centroids.
    """
    decay = DECAYS[-1] if model.decay == "auto" else float(model.decay)
    layers = plan_layers(model, train, decay, 0)
    codes = sum(layer.n_clusterings * np.dtype(layer.code_dtype).itemsize for layer in layers)
    return train.nbytes + len(train) * codes


def fit_steps(model: MultilayerBootstrapNetwork, rows: Mapping[str, MappedRows]) -> Steps:
    """Yield the steps of a fit, whose results the caller sends back; then set the fitted attributes."""
    all_rows = "a bootstrap network draws centroids from all rows: clean or remove the bad rows first"
    model.seed_, rows = yield StartFit({"max_iter": None}, all_rows=all_rows)
    train = rows["train"].dataset
    decay = model.decay
    if decay == "auto":
        about = {"rows": min(SAMPLE_ROWS, len(train)), "tries": len(DECAYS)}
        chosen = yield StoreArrays(
            "decay", lambda: {"decay": np.array(choose_decay(model, train, model.seed_))}, about
        )
        decay = float(chosen["decay"])
        model._check_decay(decay)
    model.decay_ = float(decay)
    layers = plan_layers(model, train, model.decay_, model.seed_)
    below: MappedRows | None = rows["train"]
    centroids, codes = [], {}
    for layer in layers:
        about = {"layer": layer.number, "layers": len(layers), "k": layer.k}
        sets: StoredSets | DrawnSets | UncopiedSets
        if layer.reads_codes_below and below is not None and below.dataset.is_stored:
            sets = UncopiedSets.make(layer, below.dataset)
        else:
            sets = yield StoreRowSets(f"gather-l{layer.number}", layer, below, about)
        kept = _keeps_codes(model, layers, layer.number)
        lower = layer.number - 1
        removes = (f"code-l{lower}",) if lower and not _keeps_codes(model, layers, lower) else ()
        coder = LayerCoder(layer, sets, 0, layer.n_clusterings)
        below = yield EncodeRows(
            f"code-l{layer.number}", coder, below, kept=kept, removes=removes, about=about
        )
        centroids.append(sets)
        if below is not None and (model.keep_codes or layer is layers[-1]):
            codes[layer.number] = below.dataset
    components: Components | None = None
    history: list[dict[str, Any]] = []
    if model.output == "pca":
        components, history = yield from pca_steps(model, layers[-1], codes[len(layers)], "pca")
    model._keep(layers, centroids, codes, components, history)


def _keeps_codes(model: MultilayerBootstrapNetwork, layers: Sequence[Layer], number: int) -> bool:
    """Return True if the codes of a layer stay in the run folder."""
    return model.keep_codes or number == len(layers) or layers[number].reads_codes_below


def pca_steps(
    model: MultilayerBootstrapNetwork, layer: Layer, codes: Dataset, name: str
) -> Generator[Step, Any, tuple[Components, list[dict[str, Any]]]]:
    """Yield the steps of a PCA of a layer's codes; return the components and one record per pass over rows.

    ``codes`` are the numbers of the nearest centroids of the training rows; ``name`` starts the steps' names.
    """
    count = int(model.n_components or model.n_classes or 2)
    if len(codes) <= KERNEL_ROWS:
        found = yield ComputeValue(_compute_all_components, (codes, layer.k, model.device))
        return _pad_components(found.take_first(count), count), []
    stats: Stats = yield SumStatistic(
        f"{name}-counts", CodeCounts(layer.n_clusterings, layer.k), MappedRows(codes)
    )
    learner = StreamedPca.create(np.array(stats["counts"]), len(codes), count)
    start = learner.start(stream(model.seed_, "mbn-pca"))
    result = yield TrainBatch(name, learner, start, {"train": MappedRows(codes)}, None, _refuse_prediction)
    _warn_unconverged(learner, result.state)
    return _pad_components(learner.components(result.state), count), result.history


def warn_few_clusterings(model: MultilayerBootstrapNetwork) -> None:
    if model.n_clusterings < FEW_CLUSTERINGS:
        warn_user(
            f"n_clusterings={model.n_clusterings}: with fewer than {FEW_CLUSTERINGS} clusterings rows hardly "
            "share codes above the first layer, and clusters are lost, above all in text: use 100 or more"
        )


def _warn_unconverged(learner: StreamedPca, state: PcaState) -> None:
    if state.iteration >= learner.max_iter and state.residual > learner.tol:
        warnings.warn(
            f"the {learner.n_components} components of the output have not converged in {learner.max_iter} "
            f"passes (residual {state.residual:.1e}, limit {learner.tol:.0e}): the last components may be "
            "mixed with others; fewer components (n_components) converge sooner",
            ConvergenceWarning,
            stacklevel=2,
        )


def _refuse_prediction(state: PcaState) -> NoReturn:
    raise NotImplementedError("a bootstrap network predicts nothing")


def _compute_all_components(codes: Dataset, k: int, device: str) -> Components:
    backend = make_backend("reference" if device == "reference" else "cpu")
    return run_kernel_pca(np.ascontiguousarray(codes.read_x(0, len(codes))), k, backend.kernel)


def _pad_components(found: Components, count: int) -> Components:
    """Return ``count`` components: add components of zeros, because rows of fewer dimensions have fewer."""
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
    """Return the principal components of ``codes``, the training rows' nearest centroids in a layer."""
    # Workers of a cluster cannot read codes in the memory of this process, so such codes are used here.
    here = not codes.is_stored
    with FitSession(model._kind, device=model.device, n_jobs=model.n_jobs, in_process=here) as session:
        session.begin(model.seed_, {}, {})
        components, _ = session.run_steps(
            pca_steps(model, model._layers[number - 1], codes, f"pca-l{number}")
        )
    return components


def plan(model: MultilayerBootstrapNetwork, forecast: Forecast) -> dict[str, Any]:
    """Return the forecast of the time, memory and disk of a fit.

    For decay="auto", the expected seconds are those of the decay 0.5, and memory and disk those of the
    largest decay that fits them. The range of seconds is that from the smallest decay to this largest one.
    """
    if model.decay != "auto":
        return _plan_fit(model, forecast, float(model.decay))
    largest = _find_largest_decay(model, forecast.train, forecast.resources)
    usual = min(USUAL_DECAY, largest)
    out = _plan_fit(model, forecast, usual)
    smallest, same, most = (
        _plan_fit(model, Forecast("mbn", forecast.train, None, forecast.resources, {}, measure=False), decay)
        for decay in (DECAYS[0], usual, largest)
    )
    rate = out["expected_seconds"] / same["expected_seconds"]
    for name in ("peak_bytes_per_worker", "scratch_bytes", "run_bytes", "disk_bytes"):
        out[name] += most[name] - same[name]
    out |= {"decay": usual, "largest_decay": largest, "disk_bytes_are": "at most"}
    return add_totals(out, rate * smallest["expected_seconds"], rate * most["expected_seconds"])


def _find_largest_decay(model: MultilayerBootstrapNetwork, train: Dataset, resources: Resources) -> float:
    """Return the largest decay that "auto" tries and whose fit has enough memory and disk; else raise."""
    refused: ValueError | None = None
    for decay in reversed(DECAYS):
        try:
            _plan_fit(model, Forecast("mbn", train, None, resources, {}, measure=False), decay)
        except ValueError as error:  # too little memory, or k1 is too small for this decay
            refused = error
        else:
            return decay
    assert refused is not None
    raise refused


def check_resources(
    model: MultilayerBootstrapNetwork,
    train: Dataset,
    resources: Resources,
    places: tuple[LocationLike, LocationLike | None] | None,
    decay: float,
) -> None:
    """Raise PlanError or ValueError if a fit with this decay needs more memory or disk than is available.

    ``places`` are the run folder and the scratch folder, or None to skip the check of the disk.
    """
    try:
        forecast = _plan_fit(model, Forecast("mbn", train, None, resources, {}, measure=False), decay)
        if places is not None:
            check_disk(forecast, *places)
    except ValueError as error:
        if model.decay != "auto":
            raise
        raise PlanError(f"{error}; decay='auto' has chosen {decay:g}: a smaller decay needs less") from None


def _plan_fit(model: MultilayerBootstrapNetwork, forecast: Forecast, decay: float) -> dict[str, Any]:
    """Return the forecast of the time, memory and disk of a fit with this decay."""
    train, resources, sets = forecast.train, forecast.resources, int(model.n_clusterings)
    layers = plan_layers(model, train, decay, 0)
    n, row_bytes = len(train), max(1, train.nbytes // len(train))
    out, codes, centroids, tasks = forecast.out, [], 0, 0
    out["layers"], out["predicting_seconds"], out["predicting_seconds_per_row"] = {}, 0.0, 0.0
    if model.decay == "auto":
        forecast.add_seconds("choosing decay", DECAY_SECONDS)
    for layer in layers:
        set_bytes, code_size = _count_centroid_bytes(layer, train), np.dtype(layer.code_dtype).itemsize
        tiles = tile_layout(n, row_bytes, LayerCoder(layer, _NO_CENTROIDS, 0, sets))
        memory = _estimate_memory(layer, train, set_bytes, row_bytes, tiles, resources)
        forecast.check_memory(f"layer {layer.number} (k = {layer.k})", memory, _suggest_remedy(layer))
        strips = -(-n // tiles["shard_rows"])
        count = strips * -(-sets // tiles["tile_columns"])
        per_row, per_set = _estimate_code_seconds(forecast, layer, train)
        coding = sets * (n * per_row + strips * per_set) / min(resources.slots, count)
        coding += forecast.pass_overhead(count)
        copied = 0 if layer.reads_codes_below else layer.n_sets * set_bytes
        gathering = 0.0
        if copied:
            gathering = _estimate_gather_seconds(forecast, n * row_bytes, copied)
            forecast.add_seconds(f"gather-l{layer.number}", gathering)
        forecast.add_seconds(f"code-l{layer.number}", coding)
        out["predicting_seconds"] += sets * per_set / resources.slots
        out["predicting_seconds_per_row"] += sets * per_row / resources.slots
        codes.append(n * sets * code_size)
        out["layers"][f"l{layer.number}"] = {
            "k": layer.k,
            "tasks": count,
            "centroid_bytes": copied,
            "code_bytes": codes[-1],
            "seconds": gathering + coding,
        }
        centroids += copied
        tasks, row_bytes = tasks + count, sets * code_size
    every = sum(layer["seconds"] for layer in out["layers"].values())
    forecast.set_passes(every / len(layers), len(layers), len(layers))  # a fit reads rows once per layer
    if model.output == "pca":
        _add_pca(forecast, model, layers[-1], n)
    # A layer reads the codes (output) of the layer below, so the scratch folder has the codes of two layers
    # at a time. Codes that stay are in the run folder, those of the last layer among them.
    below = list(zip(codes[:-1], layers[:-1], strict=True))
    lower = [0 if _keeps_codes(model, layers, layer.number) else size for size, layer in below]
    forecast.scratch = max((sum(lower[i : i + 2]) for i in range(len(lower))), default=0)
    stored = centroids + sum(codes[:-1]) - sum(lower)
    out["tasks"], out["run_bytes"] = tasks, stored + codes[-1]
    forecast.add_cache(max(train.nbytes if train.is_stored else 0, *codes))
    shorter = f"lower k1 (it is {layers[0].k}) or n_clusterings (it is {sets})"
    return forecast.finish_plan(shorter, kept=stored + max(0, codes[-1] + sum(lower[-1:]) - forecast.scratch))


def _estimate_gather_seconds(forecast: Forecast, dataset_bytes: int, nbytes: int) -> float:
    """Return the seconds to read a dataset and to write ``nbytes`` of its rows as centroids."""
    if not forecast.measure:
        return 0.0
    write, read = forecast.scratch_rates()
    shards = max(1, -(-nbytes // SHARD_BYTES))
    # To write one shard (a file of centroids), a task reads all rows and keeps the centroids of this shard.
    seconds = nbytes * (write + 2 / GATHER_RATE) + shards * dataset_bytes * read
    return seconds / min(forecast.resources.slots, shards)


def _estimate_code_seconds(forecast: Forecast, layer: Layer, train: Dataset) -> tuple[float, float]:
    """Return seconds for one clustering: to find one row's nearest centroid; to prepare the centroids."""
    if not forecast.measure:
        return layer.flops_per_row() / FLOP_RATE, layer.preparation_flops() / FLOP_RATE
    n = min(PROBE_ROWS, len(train))
    k, below = min(layer.k, PROBE_CENTROIDS, n), min(layer.k_below, PROBE_CENTROIDS)
    small = replace(layer, k=k, n_rows=n, k_below=below, pool_rows=min(layer.rows_per_set, 2 * k, n))
    name = f"mbn_layer {layer.metric} {layer.csr} {layer.dtype} {layer.width}x{layer.k_below} {k} {n}"
    name += f" {layer.share}"

    def prepare_coding(rows: int) -> Callable[[], np.ndarray]:
        if layer.number == 1:
            x: HostRows = as_rows(train.read_x(0, n))
        else:
            x = np.random.default_rng(0).integers(0, below, (n, layer.width)).astype(layer.dtype)
        sets = DrawnSets(small, x)
        backend = make_backend("cpu")
        some = convert_rows(small, backend, x[:rows] if rows < n else x)
        return lambda: small.compute_codes(backend, some, sets, 0, small.group_size)

    few, grown = max(1, n // 8), layer.rows_per_set / small.rows_per_set
    whole = forecast.probe(name, partial(prepare_coding, n), 0.0, rows=layer.group_size)
    if layer.csr and layer.number == 1:  # the time per row includes the time to prepare the centroids
        return whole / n * grown, 0.0
    part = forecast.probe(f"{name} few", partial(prepare_coding, few), 0.0, rows=layer.group_size)
    per_row = max(whole - part, 0.1 * whole) / (n - few) if n > few else whole
    per_set = max(part - few * per_row, 0.0)
    # The time per row grows with the number of centroids in the first layer, which compares a row with all of
    # them, but not in upper layers, which read only those with the same codes.
    return per_row * (grown if layer.number == 1 else 1.0), per_set * grown


def check_disk(forecast: Mapping[str, Any], run_dir: LocationLike, scratch: LocationLike | None) -> None:
    """Raise PlanError if a fit needs more disk than is free in its run folder or its scratch folder."""
    needs = [("centroids and codes", run_dir, "disk_bytes", "run_dir ([job] out)")]
    if scratch is not None:
        needs = [
            ("centroids and the codes that stay", run_dir, "run_bytes", "run_dir ([job] out)"),
            ("codes of lower layers", scratch, "scratch_bytes", "scratch ([job] scratch)"),
        ]
    for content, place, key, setting in needs:
        free = locate(place).free_bytes()
        if free is not None and free < forecast[key]:
            raise PlanError(
                f"{content} would take {forecast[key] / 2**30:,.1f} GiB of disk, and {locate(place).url} has "
                f"{free / 2**30:,.1f} GiB left: choose another {setting}, or lower k1 or n_clusterings"
            )


def _count_centroid_bytes(layer: Layer, train: Dataset) -> int:
    """Return the bytes on disk of one set of centroids, which one or several clusterings use."""
    if layer.csr:
        assert train.nnz is not None
        entry = train.nbytes / max(train.nnz, 1)
        return int(layer.rows_per_set * (train.nnz / len(train) * layer.fraction * entry + 8))
    return int(layer.rows_per_set * layer.output()[0][0] * np.dtype(layer.dtype).itemsize)


def _count_converted_bytes(layer: Layer, train: Dataset, rows: int) -> int:
    """Return the bytes of ``rows`` rows converted to float32 or int32 for the kernels; 0 if not converted."""
    if layer.number > 1 or layer.dtype == "float32" or (layer.dtype == "uint8" and not layer.csr):
        return 0
    entries = (train.nnz or 0) / len(train) if layer.csr else layer.width
    return int(4 * entries * rows)


def _estimate_memory(
    layer: Layer,
    train: Dataset,
    centroids: int,
    row_bytes: int,
    tiles: Mapping[str, int],
    resources: Resources,
) -> dict[str, int]:
    """Return the peak memory in bytes of a worker that computes the codes (output) of a layer, by purpose."""
    threads = resources.threads
    at_once = 1 if layer.number == 1 else layer.group_size
    if layer.number > 1:
        # The terms are the arrays of kernels/cpu/lists.py. First, for each clustering: its centroids, a copy
        # sorted by their codes below, and masks of the codes that it uses. Second: the first index of each
        # code, and scratch space for masks. Third: buffers of the rows that are processed together.
        word = 2 if layer.k * at_once < MAX_UINT16_CENTROIDS else 4
        ready = layer.width * at_once * (3 * word * layer.k + layer.k_below)
        ready += layer.width * layer.k_below * (8 + word)
        ready += int(STRIP_ROWS * word * layer.width * at_once * min(2 * layer.k / layer.k_below, 8))
    elif layer.csr:
        ready = 3 * centroids + 8 * layer.rows_per_set * layer.share
    else:
        # Two float32 copies of the centroids, and their int32 numbers in each clustering.
        ready = 8 * layer.rows_per_set * (layer.n_columns + layer.share)
    code_bytes = tiles["tile_columns"] * np.dtype(layer.code_dtype).itemsize
    rows = max(COLUMN_BLOCK_BYTES, tiles["shard_rows"] * (row_bytes + code_bytes)) + row_bytes
    purpose, nbytes = "centroids being gathered", threads * max(centroids, min(SHARD_BYTES, 16 * centroids))
    if layer.reads_codes_below:  # twice, because a process reads these codes before it drops older ones
        purpose, nbytes = "codes of the layer below", len(train) * row_bytes
    return {
        "process": process_bytes(resources),
        "rows of a task": threads * (2 * rows + _count_converted_bytes(layer, train, tiles["shard_rows"])),
        "centroids in use": threads * (at_once * centroids + ready),
        purpose: 2 * nbytes,
    }


def _add_pca(forecast: Forecast, model: MultilayerBootstrapNetwork, layer: Layer, n: int) -> None:
    """Add the memory and the seconds of the PCA of n rows of the last layer's output to the forecast."""
    if n <= KERNEL_ROWS:
        forecast.add_eigenvectors("pca", n, 2)
        return
    count, threads = int(model.n_components or model.n_classes or 2), forecast.resources.threads
    learner = StreamedPca.create(np.zeros((layer.n_clusterings, layer.k)), n, count)
    codes = RowShape(n, layer.n_clusterings)
    stage = make_stage("mbn_pca", learner, {"train": codes}, "cpu")
    nbytes, rows = stage.reductions["train"].layout().nbytes, stage.grids["train"].block_rows
    memory = stage_memory(stage, forecast.resources, codes, 6 * nbytes)
    piece = min(COLUMN_BLOCK_BYTES, n * layer.n_clusterings * np.dtype(layer.code_dtype).itemsize)
    memory["codes read ahead"] = threads * (2 * piece + max(piece, AHEAD_BYTES))
    remedy = (
        f"lower n_components (it is {count}), or k_last so that the last layer has fewer than {layer.k} "
        "centroids"
    )
    forecast.check_memory("the output", memory, remedy)
    if not forecast.measure:
        return

    def draw_block() -> Block:
        x = np.random.default_rng(0).integers(0, layer.k, (rows, layer.n_clusterings))
        return Block(x.astype(layer.code_dtype), None, None, 0)

    counts = replace(stage, name="mbn_counts", work={"train": CodeCounts(layer.n_clusterings, layer.k)})
    counting, a_pass = (
        forecast.pass_seconds(
            one, forecast.measure_rates(one, state, draw_block, about=f" {layer.code_dtype}")
        )
        for one, state in ((counts, None), (stage, learner.start(np.random.default_rng(0))))
    )
    forecast.add_seconds("pca-counts", counting)
    forecast.add_seconds("pca", PCA_PASSES * a_pass, 5 * a_pass, 4 * PCA_PASSES * a_pass)


def _suggest_remedy(layer: Layer) -> str:
    if layer.number == 1:
        return f"lower k1 (it is {layer.k}), or feature_fraction"
    return "lower k1 or n_clusterings"
