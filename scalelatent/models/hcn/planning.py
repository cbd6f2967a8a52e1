"""What a fit of a hierarchical compositional network will need: memory, disk, seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.contract.learners import Block
from scalelatent.contract.stats import Stats
from scalelatent.engine.backend import make_backend
from scalelatent.engine.order import RowOrder
from scalelatent.engine.plan import Forecast, describe_steps, steps_memory
from scalelatent.engine.rates import cpu_seconds, rates
from scalelatent.models.hcn.model.layer import FLOPS_PER_PAIR
from scalelatent.models.hcn.model.templates import TemplateEvidence

from .fit import LEAST_LEAF_ROWS, PAIRS_WITH_MESSAGES, Network, fit_order
from .parameters import is_online, most_fits, n_epochs, warmup_rows
from .several import SeveralLayers
from .single import LOOKED_ROWS

if TYPE_CHECKING:
    from .estimator import HierarchicalCompositionalNetwork

# Of images that speed is measured with: share of ones, and sweeps where messages are kept.
PROBED_ONES, PROBED_SWEEPS = 0.15, 4
# Of one thread, before anything was measured.
PAIRS_PER_SECOND = 2e9


def plan(model: HierarchicalCompositionalNetwork, network: Network, told: Forecast) -> dict[str, Any]:
    """What a fit of these images would need."""
    train, held, resources = told.train, told.held, told.resources
    n, online = len(train), is_online(model)
    learner, order = network.learner(model, n, 0), fit_order(model, network, n, told.options)
    remedy = "lower the features of layers, or n_chains"
    if not online:
        remedy = f"set [engine] leaf_rows to {max(LEAST_LEAF_ROWS, order.chain_rows // 4)}, or online=True"
    state, row_bytes = 16 * network.n_weights, train.nbytes // n
    memory = steps_memory(learner, order, train.n_features, resources, train, row_bytes, 0, state, not online)
    told.fits("learn", describe_steps(learner, order), memory, remedy)
    told.caches(None, n * row_bytes if train.is_stored else 0)
    name, look = network.look()
    looked = train if held is None else held
    told.stage(name, {"train": look}, {"train": looked}, state, "lower the features of layers")
    if model.template_passes and isinstance(network, SeveralLayers):
        said = {"train": TemplateEvidence(network.net, np.empty(0))}
        told.stage("templates-from-images", said, {"train": train}, state, "lower templates")
    leaves = 0 if online else 2 * n * network.image_bytes
    told.out["checkpoint_bytes"] = state
    told.out["bytes_per_image"] = network.online_bytes if online else network.image_bytes
    return _timed(model, network, told, learner, order, 0 if held is None else len(held), leaves + 3 * state)


def _timed(
    model: HierarchicalCompositionalNetwork,
    network: Network,
    told: Forecast,
    learner: Any,
    order: RowOrder,
    n_held: int,
    disk: int,
) -> dict[str, Any]:
    """The plan with its seconds."""
    n, layer, epochs, online = order.n_rows, network.layer, n_epochs(model, order.n_rows), is_online(model)
    size, pixels = min(learner.batch_rows, n), layer.n_pixels

    def make() -> Any:
        backend, rng = make_backend("cpu"), np.random.default_rng(0)
        x = (rng.random((size, pixels)) < PROBED_ONES).astype(np.uint8)
        block = Block(x, None, None, 0, np.arange(size))
        prepared: Any = learner.prepare(learner.start(), backend)
        if online:
            return lambda: learner.run_chain(prepared, block, Stats.zeros(learner.layout()))
        kept = learner.alone(size, PROBED_SWEEPS)
        return lambda: kept.visit(prepared, block, None)

    what = f"hcn {'online' if online else 'kept'} {layer.image} {network.told()} {size}"
    slots, sweeps = min(told.resources.slots, order.n_chains), 1 if online else PROBED_SWEEPS
    row = learner.flops_per_row() / FLOPS_PER_PAIR / (PAIRS_PER_SECOND if online else PAIRS_WITH_MESSAGES)
    if told.measure:
        row = rates.get(f"{what} t{slots}", lambda: cpu_seconds(make, slots)) / size / sweeps
    # Decoding sweeps as online learning does.
    sweep = network.pairs * FLOPS_PER_PAIR / learner.flops_per_row() * row
    sweep *= 1 if online else PAIRS_WITH_MESSAGES / PAIRS_PER_SECOND
    reading = told.reading(told.train) + told.gathering(told.train.nbytes / n)
    one = n * told.row_seconds(row, reading, slots)
    decoding = network.decoding_sweeps * sweep / told.resources.slots
    restarts, most = int(model.n_restarts), most_fits(model)
    warm = warmup_rows(model, n) * row
    fewest = min(epochs, int(model.patience or epochs) + 1)
    told.add(
        "learn",
        *(
            k * (warm + passes * one)
            for k, passes in ((restarts, epochs), (restarts, fewest), (most, epochs))
        ),
    )
    if n_held:
        told.add("validation", restarts * epochs * n_held * decoding)
    told.add(network.look()[0], 2 * restarts * (n_held or min(n, 2 * LOOKED_ROWS)) * decoding)
    if model.template_passes:
        told.add("templates-from-images", model.template_passes * n * decoding)
    told.out["probe"] = {"pairs_per_second": network.pairs / row}
    told.out["seconds_per_pass"] = one
    told.out["predicting_seconds_per_row"] = decoding
    told.out["passes"] = {"at_least": fewest, "at_most": epochs}
    return told.told(disk, "lower n_epochs, n_restarts or the features of layers")
