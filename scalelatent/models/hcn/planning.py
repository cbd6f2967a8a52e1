"""What a fit of a hierarchical compositional network will need: memory, disk, seconds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.contract.learners import Block, LeafLearner, OnlineLearner
from scalelatent.contract.stats import Stats
from scalelatent.engine.backend import make_backend
from scalelatent.engine.checkpoints import KEEP_STATES
from scalelatent.engine.incremental import count_leaves
from scalelatent.engine.order import RowOrder
from scalelatent.engine.plan import Forecast
from scalelatent.models.hcn.model.filters import GREY_LEVELS
from scalelatent.models.hcn.model.layer import FLOPS_PER_PAIR
from scalelatent.models.hcn.model.layered import LayeredMessages
from scalelatent.models.hcn.model.leaves import KeptMessages
from scalelatent.models.hcn.model.templates import TemplateEvidence

from .fit import LEAST_LEAF_ROWS, PAIRS_WITH_MESSAGES, Network, NetworkLearner, fit_order
from .parameters import is_online, most_fits, n_epochs, warmup_rows
from .several import SeveralLayers
from .single import LOOKED_ROWS

if TYPE_CHECKING:
    from .estimator import HierarchicalCompositionalNetwork

# Of images that speed is measured with: share of ones, and sweeps where messages are kept.
PROBED_ONES, PROBED_SWEEPS = 0.15, 4
# Of the names and shapes of what is kept of a leaf.
LEAF_HEAD = 2**14
# Of one thread, before anything was measured.
PAIRS_PER_SECOND = 2e9


def plan(model: HierarchicalCompositionalNetwork, network: Network, told: Forecast) -> dict[str, Any]:
    """What a fit of these images would need."""
    train, held = told.train, told.held
    n, n_held, online = len(train), 0 if held is None else len(held), is_online(model)
    learner, order = network.learner(model, n, 0), fit_order(model, network, n, told.options)
    smaller = "lower the features of layers"
    remedy = f"{smaller}, or n_chains"
    if not online:
        remedy = f"set [engine] leaf_rows to {max(LEAST_LEAF_ROWS, order.chain_rows // 4)}, or online=True"
    state = 16 * network.n_weights
    told.add_steps(
        "learn", learner, order, 0, state, remedy, n_epochs=n_epochs(model, n), keeps_leaves=not online
    )
    name, look = network.look()
    told.add_stage(name, {"train" if held is None else "validation": look}, state, smaller)
    if model.template_passes and isinstance(network, SeveralLayers):
        said = TemplateEvidence(network.net, np.empty(0))
        told.add_stage("templates-from-images", {"train": said}, state, f"{smaller}, templates or n_jobs")
    row = _row_seconds(network, told, learner, order, online)
    # Decoding sweeps as online learning does.
    sweep = network.pairs * FLOPS_PER_PAIR / learner.flops_per_row() * row
    decoding = network.decoding_sweeps * sweep
    decoding *= 1 if online else PAIRS_WITH_MESSAGES / PAIRS_PER_SECOND
    one, each = told.epoch_seconds(order, row, 0.0), decoding / told.resources.slots
    epochs, restarts, warm = n_epochs(model, n), int(model.n_restarts), warmup_rows(model, n) * row
    fewest = min(epochs, int(model.patience or epochs) + 1)
    usual, least, most = (
        fits * (warm + passes * one)
        for fits, passes in ((restarts, epochs), (restarts, fewest), (most_fits(model), epochs))
    )
    told.add_seconds("learn", usual, least, most)
    if n_held:
        told.add_seconds("validation", restarts * epochs * n_held * each)
    told.add_seconds(name, 2 * restarts * (n_held or min(n, 2 * LOOKED_ROWS)) * each)
    if model.template_passes:
        told.add_seconds("templates-from-images", model.template_passes * n * each)
    told.out["pairs_per_second"] = network.pairs / row
    told.set_passes(one, fewest, epochs)
    told.out["bytes_per_image"] = network.online_bytes if online else network.kept_bytes
    shorter = "lower n_epochs, n_restarts or the features of layers"
    if online:
        return told.finish(shorter, checkpoint=state, predicting=decoding)
    # What a leaf changed in the beliefs of weights lies beside its messages; what no checkpoint needs goes
    # when the next one is written, an epoch later.
    leaves = n * network.kept_bytes + count_leaves(order) * (5 * network.n_weights + LEAF_HEAD)
    leaves *= min(epochs, KEEP_STATES + 2)
    # How many messages of several layers will be 0, and so not kept, is not known before.
    bound = isinstance(network, SeveralLayers)
    return told.finish(shorter, checkpoint=state, kept=leaves, kept_at_most=bound, predicting=decoding)


def _row_seconds(
    network: Network, told: Forecast, learner: NetworkLearner, order: RowOrder, online: bool
) -> float:
    """Seconds of a sweep over an image that is learned from, on one thread."""
    size, layer, sweeps = min(learner.batch_rows, order.n_rows), network.layer, 1 if online else PROBED_SWEEPS
    labelled = isinstance(network, SeveralLayers) and network.all_labelled

    def make() -> Callable[[], object]:
        x = (np.random.default_rng(0).random((size, math.prod(layer.seen))) < PROBED_ONES).astype(np.uint8)
        x *= 1 if layer.filters is None else GREY_LEVELS - 1
        # Of labelled images messages are fewer.
        codes = np.arange(size) % len(network.classes) if labelled and network.classes is not None else None
        block = Block(x, codes, None, 0, np.arange(size))
        # By the contract, so that neither asks whose state it is.
        chains: OnlineLearner = learner
        prepared = chains.prepare(learner.start(), make_backend("cpu"))
        if online:
            return lambda: chains.run_chain(prepared, block, Stats.zeros(learner.layout()))
        assert isinstance(learner, (KeptMessages, LayeredMessages))
        kept: LeafLearner = learner.alone(size, PROBED_SWEEPS)
        return lambda: kept.visit(prepared, block, None)

    what = f"hcn {'online' if online else 'kept'} {layer.image} {network.told()} {size} {labelled}"
    nominal = learner.flops_per_row() / FLOPS_PER_PAIR / (PAIRS_PER_SECOND if online else PAIRS_WITH_MESSAGES)
    return told.probe(what, make, nominal, rows=size * sweeps, threads=told.count_slots(order))
