"""What a bootstrap network will need, before anything runs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from scalelatent.data import Dataset
from scalelatent.data.store import locate
from scalelatent.engine.ahead import AHEAD_BYTES
from scalelatent.engine.backend import make_backend
from scalelatent.engine.mapwrite import PARTED_BYTES, parted_rows
from scalelatent.engine.passes import make_stage
from scalelatent.engine.plan import (
    MAX_TASKS,
    Resources,
    RowShape,
    cache_bytes,
    check_fits,
    process_bytes,
    stage_memory,
)
from scalelatent.engine.reading import as_rows
from scalelatent.engine.rowsets import SHARD_BYTES
from scalelatent.engine.threads import single_threaded
from scalelatent.errors import PlanError
from scalelatent.models.mbn.layers import SHORT_CODES, Layer
from scalelatent.models.mbn.model import LayerCoder, ready_rows
from scalelatent.models.mbn.pca import StreamedPca

from .layer_steps import tile_layout
from .mbn_decay import GRID
from .mbn_fit import KERNEL_ROWS, layers_of, most_components

# Operations a second that a core is taken to do where nothing was measured.
FLOP_RATE = 6e10
PROBE_ROWS, PROBE_CENTROIDS = 1024, 1024
STRIP_ROWS = 1024


def plan(
    model: Any, train: Dataset, resources: Resources, *, measured: bool = False, decay: float | None = None
) -> dict[str, Any]:
    """What a fit of these rows would need; see :meth:`.MultilayerBootstrapNetwork.plan`.

    Parameters
    ----------
    decay : float or None
        What "auto" has chosen. None: as the model says, and where that is "auto" the largest that fits of
        those that it tries, which has the most layers.

    Raises
    ------
    ValueError
        A schedule or a fraction that cannot be.
    PlanError
        It cannot fit.
    """
    chosen = model.decay if decay is None else decay
    if chosen == "auto":
        chosen, told = _largest_that_fits(model, train, resources)
    else:
        told = _plan(model, train, float(chosen), resources)
    if measured:
        scale = FLOP_RATE * _probe(layers_of(model, train, float(chosen), 0)[0], train)
        for layer in told["layers"].values():
            layer["seconds"] *= scale
    told["expected_seconds"] = sum(layer["seconds"] for layer in told["layers"].values())
    return told


def _largest_that_fits(model: Any, train: Dataset, resources: Resources) -> tuple[float, dict[str, Any]]:
    """(decay, plan) of the decays that "auto" tries."""
    refused: ValueError | None = None
    for decay in reversed(GRID):
        try:
            return decay, {"decay": decay, **_plan(model, train, decay, resources)}
        except ValueError as error:  # no room, or layers that cannot be
            refused = error
    assert refused is not None
    raise refused


def check_room(
    model: Any, train: Dataset, resources: Resources, places: tuple[Any, Any] | None, decay: float
) -> None:
    """Refuse a fit that memory or disk has no room for.

    Parameters
    ----------
    places : (run folder, scratch) or None
        See :func:`check_disk`. None: a resumed fit has taken part of it already.
    decay : float
        The model's, or what "auto" has chosen.

    Raises
    ------
    PlanError
        Naming what would help.
    """
    try:
        told = plan(model, train, resources, decay=decay)
        if places is not None:
            check_disk(told, *places)
    except ValueError as error:
        if model.decay != "auto":
            raise
        raise PlanError(f"{error}; decay='auto' has chosen {decay:g}: a smaller decay needs less") from None


def _plan(model: Any, train: Dataset, decay: float, resources: Resources) -> dict[str, Any]:
    """The plan of one decay; its seconds at :data:`FLOP_RATE`."""
    layers = layers_of(model, train, decay, 0)
    n, row_bytes = len(train), max(1, train.nbytes // len(train))
    slots = resources.workers * resources.threads
    out: dict[str, Any] = {"layers": {}, "resources": vars(resources)}
    peak = tasks = 0
    for layer in layers:
        centroid_bytes = _centroid_bytes(layer, train)
        memory = _memory(layer, train, centroid_bytes, row_bytes, resources)
        peak = max(
            peak, check_fits(f"layer {layer.number} (k = {layer.k})", memory, resources, _remedy(layer))
        )
        coder = LayerCoder(layer, None, 0, layer.n_clusterings)
        tiles = tile_layout(n, row_bytes, coder)
        strips = -(-n // tiles["shard_rows"])
        count = strips * -(-layer.n_clusterings // tiles["tile_columns"])
        flops = layer.n_clusterings * (n * layer.flops_per_row() + strips * layer.set_flops())
        code_bytes = n * layer.n_clusterings * np.dtype(layer.code_dtype).itemsize
        out["layers"][f"l{layer.number}"] = {
            "k": layer.k,
            "tasks": count,
            "centroid_bytes": layer.n_clusterings * centroid_bytes,
            "code_bytes": code_bytes,
            "seconds": flops / FLOP_RATE / min(slots, count),
        }
        if count > MAX_TASKS:
            raise PlanError(
                f"layer {layer.number} would make {count} tasks, above {MAX_TASKS}: fit fewer rows, or lower "
                "n_clusterings or k1"
            )
        tasks, row_bytes = tasks + count, layer.n_clusterings * np.dtype(layer.code_dtype).itemsize
    if model.output == "pca":
        peak = max(peak, _output_peak(model, layers[-1], n, resources))
    told = list(out["layers"].values())
    codes = [layer["code_bytes"] for layer in told]
    kept = sum(codes) if model.keep_codes else codes[-1]
    # Each layer reads the codes of the one below; the last ones stay, all others lie in scratch.
    lower = [] if model.keep_codes else codes[:-1]
    scratch = max((sum(lower[i : i + 2]) for i in range(len(lower))), default=0)
    at_once = max(scratch, kept + sum(lower[-1:]))
    centroids = sum(layer["centroid_bytes"] for layer in told)
    out["tasks"] = tasks
    out["cache_bytes"] = cache_bytes(resources, max(train.nbytes if train.is_stored else 0, *codes))
    out["peak_bytes_per_worker"] = peak + out["cache_bytes"]
    out["disk_bytes"] = centroids + at_once
    out["run_bytes"], out["scratch_bytes"] = centroids + kept, scratch
    return out


def check_disk(told: Mapping[str, Any], run_dir: Any, scratch: Any) -> None:
    """Refuse a fit that its folders have no room for.

    Parameters
    ----------
    told : dict
        The plan.
    run_dir : path or url
    scratch : path, url or None
        Where codes of lower layers go; None is the run folder.

    Raises
    ------
    PlanError
        Naming the folder and what would help.
    """
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


def _converted(layer: Layer, train: Dataset, row_bytes: int) -> int:
    """Bytes of a task's rows as the first layer's kernels take them; 0 where they are stored so."""
    if layer.number > 1 or layer.dtype == "float32" or (layer.dtype == "uint8" and not layer.csr):
        return 0
    entries = (train.nnz or 0) / len(train) if layer.csr else layer.width
    rows = min(len(train), parted_rows(row_bytes, LayerCoder(layer, None, 0, layer.n_clusterings)))
    return int(4 * entries * rows)


def _memory(
    layer: Layer, train: Dataset, centroids: int, row_bytes: int, resources: Resources
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
    rows = PARTED_BYTES + row_bytes
    return {
        "process": process_bytes(threads),
        "rows of a task": threads * (2 * rows + _converted(layer, train, row_bytes)),
        "centroids of the clusterings at work": threads * (at_once * centroids + ready),
        "centroids while they are gathered": 2 * threads * max(centroids, min(SHARD_BYTES, 16 * centroids)),
    }


def _output_peak(model: Any, layer: Layer, n: int, resources: Resources) -> int:
    """Peak bytes of a worker in the passes of the output's EM-PCA."""
    if n <= KERNEL_ROWS:
        return 0
    wanted = model.n_components or model.n_classes or 2
    count = most_components(layer) if wanted < 1 else int(wanted)
    learner = StreamedPca.of(np.zeros((layer.n_clusterings, layer.k)), n, count)
    stage = make_stage("mbn_pca", learner, {"train": RowShape(n, layer.n_clusterings)}, "cpu")
    memory = stage_memory(stage, resources, None, 6 * learner.reductions()["train"].layout().nbytes)
    piece = min(PARTED_BYTES, n * layer.n_clusterings * np.dtype(layer.code_dtype).itemsize)
    memory["codes read ahead"] = resources.threads * (2 * piece + max(piece, AHEAD_BYTES))
    share = f"give n_components a number (the share {wanted:g} may take {count})"
    fewer = share if wanted < 1 else f"lower n_components (it is {count})"
    remedy = f"{fewer}, or k_last so that the last layer has fewer than {layer.k}"
    return check_fits("the output", memory, resources, f"{remedy} centroids")


def _remedy(layer: Layer) -> str:
    if layer.number == 1:
        return f"lower k1 (it is {layer.k}), or feature_fraction"
    return "lower k1 or n_clusterings"


def _probe(layer: Layer, train: Dataset) -> float:
    """Seconds of an operation of the first layer on one core, by a clustering of some rows."""
    x = as_rows(train.read_x(0, min(PROBE_ROWS, len(train))))
    k = min(layer.k, PROBE_CENTROIDS, len(x))
    small = Layer(**{**vars(layer), "k": k, "n_rows": len(x)})
    centroids = small.take(0, x, small.rows(0))
    backend, best = make_backend("cpu"), np.inf
    ready = ready_rows(small, backend, x)
    with single_threaded():
        for _ in range(3):
            begin = time.perf_counter()
            small.codes(backend, ready, [centroids], 0)
            best = min(best, time.perf_counter() - begin)
    return best / (len(x) * small.flops_per_row() + small.set_flops())
