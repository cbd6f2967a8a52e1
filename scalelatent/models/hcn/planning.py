"""Estimate the memory, disk space and seconds of a fit of a hierarchical compositional network."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from scalelatent.contract.learners import Block, OnlineLearner, Reduction, StoredRangeLearner
from scalelatent.contract.stats import Stats
from scalelatent.engine.backend import make_backend
from scalelatent.engine.checkpoints import KEEP_STATES
from scalelatent.engine.incremental import count_leaves
from scalelatent.engine.order import RowOrder
from scalelatent.engine.plan import Forecast
from scalelatent.models.hcn.model.compression import DescriptionLength
from scalelatent.models.hcn.model.decode import DECODE_SWEEPS, Decoder
from scalelatent.models.hcn.model.filters import GREY_LEVELS
from scalelatent.models.hcn.model.hierarchy import Hierarchy
from scalelatent.models.hcn.model.layer import FLOPS_PER_PAIR, FeatureLayer
from scalelatent.models.hcn.model.multi_layer_learning import BatchNetworkLearner, stored_bytes
from scalelatent.models.hcn.model.stored_messages import BatchFeatureLearner
from scalelatent.models.hcn.model.templates import TemplateCounts, TemplateEvidence

from .fit import MIN_LEAF_ROWS, STORED_PAIR_RATE, Network, NetworkLearner, make_fit_order
from .multi_layer import MultiLayer
from .parameters import (
    choose_n_epochs,
    choose_pools,
    choose_template_passes,
    choose_warmup_rows,
    count_max_fits,
    is_online,
)
from .single_layer import MEASURED_ROWS

if TYPE_CHECKING:
    from .estimator import HierarchicalCompositionalNetwork

# Share of the pixels of 1 in the random images with which a plan measures the speed of learning.
PROBE_SHARE_OF_ONES = 0.15
# Number of updates of all belief-propagation messages with which a plan measures the speed of batch learning.
PROBE_SWEEPS = 4
# Bytes of the names and shapes of arrays in the file with the stored messages of a range of images (leaf).
LEAF_HEADER_BYTES = 2**14
# Speed of online learning that a plan assumes before it measures the speed, in pairs (feature position,
# weight) per second and thread. A pixel updates two belief-propagation messages per pair.
ONLINE_PAIR_RATE = 2e9


def plan(model: HierarchicalCompositionalNetwork, network: Network, forecast: Forecast) -> dict[str, Any]:
    """Return the plan of a fit: bytes of memory and disk, and seconds."""
    train, validation = forecast.train, forecast.validation
    n, n_held = len(train), 0 if validation is None else len(validation)
    online = is_online(model, network.has_labels)
    epochs, warmup_rows = choose_n_epochs(model, n, online), choose_warmup_rows(model, n, online)
    learner, order = network.learner(model, n, 0), make_fit_order(model, network, n, forecast.options)
    smaller = "lower the features of layers"
    remedy = f"{smaller}, or n_chains"
    if not online:
        remedy = f"set [engine] leaf_rows to {max(MIN_LEAF_ROWS, order.chain_rows // 4)}, or online=True"
    if isinstance(network, MultiLayer):
        net: FeatureLayer | Hierarchy = network.net
        n_classes = 1 if network.classes is None else len(network.classes)
        name, reduction = "templates", cast("Reduction", TemplateCounts(network.net, n_classes))
        image_bytes = network.image_bytes if online else stored_bytes(network.net, network.all_labelled)
        decoding_sweeps = 1  # scores need one pass up, which takes as long as one update of all messages
    else:
        net, nothing = network.layer, np.zeros(network.layer.weights_shape, bool)
        name, reduction = "compression", DescriptionLength(Decoder(network.layer, nothing))
        image_bytes = 4 * math.prod(network.layer.places) if online else network.image_bytes
        decoding_sweeps = DECODE_SWEEPS
    state = 16 * net.n_weights
    forecast.add_steps("learn", learner, order, 0, state, remedy, n_epochs=epochs, keeps_leaves=not online)
    forecast.add_stage(name, {"train" if validation is None else "validation": reduction}, state, smaller)
    template_passes = choose_template_passes(model, online)
    if template_passes and isinstance(network, MultiLayer):
        evidence = TemplateEvidence(network.net, np.empty(0))
        forecast.add_stage(
            "templates-from-images", {"train": evidence}, state, f"{smaller}, templates or n_jobs"
        )
    row = _row_seconds(network, forecast, learner, order, online)
    # Seconds of one sweep, which updates the belief-propagation messages of all pixels of an image once.
    # Decoding an image (inference of feature positions) is as fast per sweep as online learning.
    sweep = net.pairs * FLOPS_PER_PAIR / learner.flops_per_row() * row
    decoding = decoding_sweeps * sweep
    decoding *= 1 if online else STORED_PAIR_RATE / ONLINE_PAIR_RATE
    one, each = forecast.epoch_seconds(order, row, 0.0), decoding / forecast.resources.slots
    restarts, warm = int(model.n_restarts) * len(choose_pools(model, online)), warmup_rows * row
    fewest = min(epochs, int(model.patience or epochs) + 1)
    most_fits = max(restarts, count_max_fits(model, online))
    usual, least, most = (
        fits * (warm + passes * one)
        for fits, passes in ((restarts, epochs), (restarts, fewest), (most_fits, epochs))
    )
    forecast.add_seconds("learn", usual, least, most)
    if n_held:
        forecast.add_seconds("validation", restarts * epochs * n_held * each)
    forecast.add_seconds(name, 2 * restarts * (n_held or min(n, 2 * MEASURED_ROWS)) * each)
    if template_passes:
        forecast.add_seconds("templates-from-images", restarts * template_passes * n * each)
    forecast.out["pairs_per_second"] = net.pairs / row
    forecast.set_passes(one, fewest, epochs)
    forecast.out["bytes_per_image"] = image_bytes
    shorter = "lower n_epochs, n_restarts or the features of layers"
    if online:
        return forecast.finish_plan(shorter, checkpoint=state, predicting=decoding)
    # The file of a range of images (leaf) also stores the last change of the log odds of weights. The files
    # of an old checkpoint are deleted one epoch later, when the next checkpoint is written.
    leaves = n * image_bytes + count_leaves(order) * (5 * net.n_weights + LEAF_HEADER_BYTES)
    leaves *= min(epochs, KEEP_STATES + 2)
    # Networks of several layers do not store messages of pixels to features if they are 0. A plan does not
    # know how many are 0, so the bytes on disk are an upper bound.
    bound = isinstance(network, MultiLayer)
    return forecast.finish_plan(
        shorter, checkpoint=state, kept=leaves, kept_at_most=bound, predicting=decoding
    )


def _row_seconds(
    network: Network, forecast: Forecast, learner: NetworkLearner, order: RowOrder, online: bool
) -> float:
    """Return the seconds of one thread per image: for one epoch, or one update of all stored messages."""
    size, layer, sweeps = min(learner.batch_rows, order.n_rows), network.layer, 1 if online else PROBE_SWEEPS
    labelled = isinstance(network, MultiLayer) and network.all_labelled

    def make_probe() -> Callable[[], object]:
        drawn = np.random.default_rng(0).random((size, math.prod(layer.input_shape)))
        x = (drawn < PROBE_SHARE_OF_ONES).astype(np.uint8)
        x *= 1 if layer.filters is None else GREY_LEVELS - 1
        # A labelled image has no belief-propagation messages for templates (top features) of other classes.
        codes = np.arange(size) % len(network.classes) if labelled and network.classes is not None else None
        block = Block(x, codes, None, 0, np.arange(size))
        # For the type checker: the state has another type for one layer than for several. `OnlineLearner`
        # and `StoredRangeLearner` without type arguments accept both.
        chains: OnlineLearner = learner
        prepared = chains.prepare(learner.start(), make_backend("cpu"))
        if online:
            return lambda: chains.run_chain(prepared, block, Stats.zeros(learner.layout()))
        kept: StoredRangeLearner
        if isinstance(learner, BatchNetworkLearner):
            most = max(PROBE_SWEEPS, learner.max_passes)
            kept = replace(learner, n_rows=size, single_leaf_passes=PROBE_SWEEPS, max_passes=most)
        else:
            assert isinstance(learner, BatchFeatureLearner)
            kept = replace(learner, n_rows=size, single_leaf_sweeps=PROBE_SWEEPS)
        return lambda: kept.visit(prepared, block, None)

    what = f"hcn {'online' if online else 'kept'} {layer.image} {network.describe()} {size} {labelled}"
    nominal = learner.flops_per_row() / FLOPS_PER_PAIR / (ONLINE_PAIR_RATE if online else STORED_PAIR_RATE)
    return forecast.probe(what, make_probe, nominal, rows=size * sweeps, threads=forecast.count_slots(order))
