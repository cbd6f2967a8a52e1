"""Learning of networks of several layers: online, or in batches with stored messages.

Both ways use Algorithm 1 of Lázaro-Gredilla et al., "Hierarchical compositional feature learning" (2016). The
algorithm updates belief-propagation messages by a pass down from the class layer to the pixels and a pass up
to the class layer. The docstrings of `OnlineNetworkLearner` and `BatchNetworkLearner` list the steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TypeAlias, TypedDict

import numpy as np

from scalelatent.contract.block_requirements import BlockRequirements
from scalelatent.contract.learners import Backend, Block
from scalelatent.contract.stats import Layout, Stats
from scalelatent.models.hcn.kernels.units import from_units, to_units

from .evidence_learner import EvidenceLearner, LearnerState, forget, make_evidence_layout
from .hierarchy import Hierarchy, LayerMessages, update_images
from .layer import FLOPS_PER_PAIR, row_numbers
from .templates import TemplateCounts

# A fit has converged if no weight changed the sign of its log odds in this number of consecutive passes over
# all images. The error often oscillates and then drops suddenly, so a few passes are not enough.
SETTLED_PASSES = 20
# Fields of `LayerMessages` that are stored without zeros, because most of their entries are 0:
# belief-propagation messages of unknown pixels, and messages to weights that are off.
_SPARSE = ("to_s", "to_w", "held")


@dataclass(frozen=True)
class LayeredState(LearnerState):
    """State of a fit of several layers; ``beliefs`` and ``first`` are vectors of the weights of all layers.

    Attributes
    ----------
    moved, last_moved : int
        Number of images that changed their best template (feature of the top layer): in this epoch so far,
        and in the last complete epoch; -1 before the first epoch ends.
    error : float
        Share of the rows of the last validation in a wrong class; NaN before the first validation.
    passes, passed : int
        Number of passes (down and up) over the images of the last step, and over the images in all epochs.
    quiet : int
        Number of consecutive passes in which no weight changed the sign of its log odds while some weights
        were on.
    """

    moved: int = 0
    last_moved: int = -1
    error: float = float("nan")
    passes: int = 0
    passed: int = 0
    quiet: int = 0


PreparedLayers: TypeAlias = tuple[LayeredState, Backend]
"""State at the start of a step, and the backend (CPU or GPU). Each task copies the log odds of the state."""
Sparse: TypeAlias = dict[str, np.ndarray]
"""Result of :func:`to_sparse`: the shape of an array, one bit per number, and the nonzero numbers."""
StoredLayer: TypeAlias = dict[str, np.ndarray | Sparse]
"""The fields of the `LayerMessages` of a layer, by name; those in `_SPARSE` without their zeros."""


class StoredLeaf(TypedDict):
    """Data of a leaf (a fixed range of images) that is stored after each visit (update of its messages).

    ``layers`` has the belief-propagation messages of each layer, by the number of the layer. ``passes`` and
    ``visited`` are the numbers of passes of all visits and of the last visit. ``templates`` has the best
    template (top feature) of each image, and ``moved`` is the number of images whose best template changed in
    the last visit. ``change`` is the change of the log odds of weights by the last visit, in 1/256 nat.
    """

    layers: dict[str, StoredLayer]
    passes: np.int64
    visited: np.int64
    templates: np.ndarray
    change: Sparse
    moved: np.int64


@dataclass(frozen=True)
class OnlineNetworkLearner(EvidenceLearner[LayeredState]):
    """Online learning of several layers (an :class:`~scalelatent.contract.learners.OnlineLearner`).

    A task learns a sequence of minibatches (a chain), one after another. The algorithm is from section 4.2 of
    Lázaro-Gredilla et al. (2016):

    1. Create the initial belief-propagation messages for the images of the minibatch. If all images are
       labelled, only the templates (features of the top layer) of each image's class get messages.
    2. Update the messages by ``inner_iterations`` passes down and up over the minibatch; the first is only a
       pass up. Each pass up changes the log odds of the weights.
    3. Discard the messages. Their changes of the log odds remain.
    4. Forget: move the log odds by the share 1 - ``forgetting`` towards the initial log odds.
    5. After the last minibatch, return the evidence of the chain. A step adds the evidence of all chains to
       the log odds; the docstring of :mod:`.evidence_learner` has the formula.

    :class:`EvidenceLearner` describes ``forgetting``, ``batch_rows`` and ``patience``.

    Attributes
    ----------
    net : Hierarchy
    inner_iterations : int
        Number of passes over a minibatch.
    n_classes : int
        Number of classes of the validation rows.
    """

    net: Hierarchy
    forgetting: float = 0.95
    batch_rows: int = 20
    inner_iterations: int = 15
    patience: int = 0
    n_classes: int = 0

    @property
    def requirements(self) -> BlockRequirements:
        images = self.batch_rows * row_bytes(self.net)
        return BlockRequirements(scratch=(48 * self.net.n_weights + images, 0), unlabelled=True)

    def layout(self) -> Layout:
        return make_evidence_layout((self.net.n_weights,))

    def flops_per_row(self) -> float:
        return FLOPS_PER_PAIR * self.inner_iterations * self.net.pairs

    def start(self, restart: int = 0) -> LayeredState:
        """Return the state before the first step; its random log odds depend on seed and ``restart``."""
        first = self.net.first_beliefs(restart)
        return LayeredState(first, first)

    def run_chain(self, prepared: PreparedLayers, block: Block, stats: Stats) -> None:
        """Learn a block's minibatches in sequence; add the change of log odds beyond forgetting to stats."""
        state, backend = prepared
        beliefs, rows = state.beliefs, row_numbers(block)
        pixels, labels = self.net.layers[0].read_evidence(block), read_labels(self.net, block)
        for a in range(0, len(rows), self.batch_rows):
            x = pixels[a : a + self.batch_rows]
            y = None if labels is None else labels[a : a + self.batch_rows]
            # A template (feature of the top layer) of another class cannot be on, so a labelled image needs
            # no belief-propagation messages for it.
            if own_class_only := y is not None and bool((y >= 0).all()):
                by_class = np.argsort(y, kind="stable")
                x, y = x[by_class], y[by_class]
            kept, units = self.net.start(len(x), own_class_only), to_units(beliefs)
            for number in range(self.inner_iterations):
                key = block.epoch * self.inner_iterations + number
                units = units + update_images(
                    self.net, kept, units, x, y, int(rows[a]), number, backend, key=key
                )
            check_network_overflow(self.net, units)
            beliefs = forget(beliefs + from_units(units - to_units(beliefs)), state.first, self.forgetting)
        self.add_chain(state, beliefs, len(rows), stats)

    def end_epoch(self, state: LayeredState) -> LayeredState:
        is_quiet = not state.changed and bool((state.beliefs > 0).any())
        quiet = state.quiet + state.passes if is_quiet else 0
        passed = state.passed + state.passes
        ended = replace(state, moved=0, last_moved=state.moved, passed=passed, quiet=quiet)
        return super().end_epoch(ended)

    def validation(self) -> TemplateCounts:
        """Return a reduction that counts the validation rows by class and best template (top feature)."""
        return TemplateCounts(self.net, self.n_classes)

    def validated(self, state: LayeredState, stats: Stats) -> LayeredState:
        """Return the state with the validation error; ``stats`` are the counts of the validation rows."""
        error = self.validation().error(stats)
        state = replace(state, error=error)
        return replace(state, best=error, stale=-1) if error < state.best else state

    def summary(self, state: LayeredState) -> dict[str, float | int | list[int] | None]:
        """Return the record of an epoch; its objective is the validation error, or None if not measured."""
        known = None if np.isnan(state.error) else state.error
        on = [int((beliefs > 0).sum()) for beliefs in self.net.split(state.beliefs)]
        return {
            "objective": known,
            "weights_on": sum(on),
            "weights_on_by_layer": on,
            "weights_changed": state.changed if state.rows else state.last_changed,
            "share_on": sum(on) / self.net.n_weights,
            "validation_error": known,
        }


@dataclass(frozen=True)
class BatchNetworkLearner(OnlineNetworkLearner):
    """Batch learning of several layers (a `scalelatent.contract.learners.StoredRangeLearner`).

    The algorithm is Algorithm 1 of Lázaro-Gredilla et al. (2016). The run folder stores the
    belief-propagation messages of all images. A leaf is a fixed range of images, and a visit updates the
    messages of one leaf:

    1. Load the messages of the leaf, or create the initial messages. If all images of the leaf are labelled,
       sort them by class; the templates (top features) of other classes then need no messages.
    2. Run a pass down from the class layer to the pixels. This pass changes messages, but not the log odds of
       weights. It is omitted in the first pass over the leaf.
    3. Run a pass up from the pixels to the class layer. This pass changes messages and log odds of weights.
    4. Store the messages without their zeros, the best template of each image, and the change of the log
       odds.

    A step visits several leaves in parallel, and adds their changes to the log odds. Learning ends when no
    weight changed the sign of its log odds in `SETTLED_PASSES` passes, after ``max_passes``, or by patience.

    Attributes
    ----------
    n_rows : int
        Number of images in all leaves.
    single_leaf_passes : int
        Number of passes down and up per visit if a single leaf holds all images. With several leaves a visit
        has one pass, because the other leaves also change the log odds.
    max_passes : int
        Upper bound of the number of passes over a leaf, summed over all visits.
    all_labelled : bool
        True if each row is known to have a label; then messages need less memory (see 1).
    """

    n_rows: int = 1
    single_leaf_passes: int = 1
    max_passes: int = 1_000_000
    all_labelled: bool = False

    @property
    def requirements(self) -> BlockRequirements:
        # A visit (update of the messages of a range of images, a leaf) holds these messages up to five times:
        # as read from disk, before and after the update, and twice as bytes to write. The arrays that include
        # zeros are released before the write.
        each = 5 * stored_bytes(self.net, self.all_labelled)
        return BlockRequirements(scratch=(48 * self.net.n_weights, each), unlabelled=True)

    def layout(self) -> Layout:
        return Layout((("evidence", (self.net.n_weights,)), ("moved", ()), ("passes", ())))

    def flops_per_row(self) -> float:
        return FLOPS_PER_PAIR * self.net.pairs

    def start(self, restart: int = 0) -> LayeredState:
        """Return the state before the first step, with log odds rounded to multiples of 1/256 nat.

        All changes by belief-propagation messages are also such multiples, so the sums are exact.
        """
        first = self.net.first_beliefs(restart)
        return LayeredState(from_units(to_units(first)), first)

    def visit(self, prepared: PreparedLayers, block: Block, kept: StoredLeaf | None) -> StoredLeaf:
        """Update the belief-propagation messages of one leaf (range of images); return the data to store.

        ``block`` has the images. ``kept`` is the data that the last visit stored; None in the first visit.
        """
        (state, backend), n = prepared, len(block.x)
        pixels, labels = self.net.layers[0].read_evidence(block), read_labels(self.net, block)
        if kept is None:
            messages = self.net.start(n, labels is not None and bool((labels >= 0).all()))
            done, before = 0, np.full(n, -1)
        else:
            messages, done, before = unpack_messages(kept), int(kept["passes"]), kept["templates"]
        first, beliefs, ranks = int(row_numbers(block)[0]), to_units(state.beliefs), None
        if self.net.is_own_class_only(messages[-1]):
            assert labels is not None
            by_class = np.argsort(labels, kind="stable")
            pixels, labels, ranks = pixels[by_class], labels[by_class], np.argsort(by_class)
        units, passes = beliefs, self.single_leaf_passes if n == self.n_rows else 1
        passes = min(passes, self.max_passes - done)
        for number in range(done, done + passes):
            units = units + update_images(
                self.net, messages, units, pixels, labels, first, number, backend, ranks=ranks
            )
        templates = (messages[-1].s - messages[-1].above).reshape(n, -1).argmax(axis=1)
        return {
            "layers": {str(level): pack_messages(m) for level, m in enumerate(messages)},
            "passes": np.int64(done + passes),
            "visited": np.int64(passes),
            "templates": templates,
            "change": to_sparse(units - beliefs),
            "moved": np.int64((templates != before).sum()),
        }

    def replace_contribution(
        self, prepared: PreparedLayers, kept: StoredLeaf | None, new: StoredLeaf, stats: Stats
    ) -> None:
        stats["evidence"][...] += from_units(to_dense(new["change"]))
        stats["moved"][...] += new["moved"]
        stats["passes"][...] += len(new["templates"]) * new["visited"]

    def summary(self, state: LayeredState) -> dict[str, float | int | list[int] | None]:
        """Return the record of an epoch, with the number of images that changed their best top feature."""
        moved = state.moved if state.rows else max(0, state.last_moved)
        return super().summary(state) | {"rows_moved": moved}

    def is_done(self, state: LayeredState) -> bool:
        """Return True if the weights have converged, after ``max_passes``, or because of ``patience``."""
        return state.quiet >= SETTLED_PASSES or state.passed >= self.max_passes or super().is_done(state)

    def step(self, state: LayeredState, stats: Stats, n_rows: int) -> LayeredState:
        """Return the state after a step: log odds get the changes by all leaves (ranges of images)."""
        beliefs = state.beliefs + stats["evidence"]
        check_network_overflow(self.net, to_units(np.clip(beliefs, -(2.0**22), 2.0**22)))
        passes, moved = round(float(stats["passes"]) / n_rows), state.moved + int(stats["moved"])
        return replace(state, passes=passes, moved=moved).complete_step(beliefs, n_rows)


def read_labels(net: Hierarchy, block: Block) -> np.ndarray | None:
    """Return the class of each row, below 0 if unknown; None if the network or the block has no classes."""
    return None if net.classes is None else block.y


def to_sparse(values: np.ndarray) -> Sparse:
    """Return the shape of an array, one bit per number (1 if it is not 0), and the nonzero numbers."""
    there = values != 0
    return {"shape": np.array(values.shape), "there": np.packbits(there), "values": values[there]}


def to_dense(kept: Sparse | np.ndarray) -> np.ndarray:
    """Return the array from the result of :func:`to_sparse`, or return a copy if ``kept`` is an array."""
    if isinstance(kept, np.ndarray):
        return kept.copy()
    out = np.zeros(kept["shape"], kept["values"].dtype)
    out[np.unpackbits(kept["there"], count=out.size).view(bool).reshape(out.shape)] = kept["values"]
    return out


def pack_messages(messages: LayerMessages) -> StoredLayer:
    """Return the fields of `LayerMessages` of a layer, by name; the fields in `_SPARSE` are without zeros."""
    return {k: to_sparse(v) if k in _SPARSE else v for k, v in vars(messages).items()}


def unpack_messages(kept: StoredLeaf) -> list[LayerMessages]:
    """Return copies of the stored belief-propagation messages of each layer, as dense arrays."""
    layers = (kept["layers"][str(level)] for level in range(len(kept["layers"])))
    return [LayerMessages(**{name: to_dense(value) for name, value in part.items()}) for part in layers]


def row_bytes(net: Hierarchy, own_class_only: bool = False) -> int:
    """Return the bytes of the belief-propagation messages of an image in memory.

    If ``own_class_only``, an image has no messages for templates of other classes in the top layer.
    """
    return sum(entries * size for _, entries, size in _list_arrays(net, own_class_only))


def stored_bytes(net: Hierarchy, all_labelled: bool = False) -> int:
    """Return the bytes of an image's stored belief-propagation messages, an upper bound if some are 0."""
    own_class_only = all_labelled and net.classes is not None
    bits = sum(entries for name, entries, _ in _list_arrays(net, own_class_only) if name in _SPARSE)
    return row_bytes(net, own_class_only) + bits // 8 + 1


def _list_arrays(net: Hierarchy, own_class_only: bool) -> list[tuple[str, int, int]]:
    """Return for each array of `LayerMessages` its name, number of entries per image, and bytes per entry."""
    arrays = (item for messages in net.start(0, own_class_only) for item in vars(messages).items())
    return [(name, math.prod(value.shape[1:]), value.itemsize) for name, value in arrays]


def check_network_overflow(net: Hierarchy, units: np.ndarray) -> None:
    """Raise a DivergenceError if log odds ``units`` of weights (1/256 nat) could overflow int32 sums."""
    for level, (layer, w) in enumerate(zip(net.layers, net.split(units), strict=True), 1):
        layer.check_overflow(w, level, "damping, or raise p01 and p10")
