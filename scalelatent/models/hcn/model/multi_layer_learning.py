"""Learning of several layers: online, or in batches with stored messages.

Both use Algorithm 1 of Lázaro-Gredilla et al., "Hierarchical compositional feature learning" (2016), which
updates messages by a pass down from the class layer to the pixels and a pass up to the class layer. The
docstrings of `OnlineNetworkLearner` and `BatchNetworkLearner` list the steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import TypeAlias, TypedDict

import numpy as np

from scalelatent.contract.block_requirements import BlockRequirements
from scalelatent.contract.learners import Backend, Block
from scalelatent.contract.stats import Layout, Stats
from scalelatent.errors import DivergenceError
from scalelatent.models.hcn.kernels.units import BELIEF_LIMIT, UNITS_PER_NAT, from_units, to_units
from scalelatent.models.hcn.kernels.windows import message_room

from .evidence_learner import add_evidence, forget
from .hierarchy import Hierarchy, LayerMessages, update_images
from .layer import FLOPS_PER_PAIR, row_numbers
from .templates import TemplateCounts

# A fit has converged if no log odds of a weight changed sign in this number of consecutive passes. The error
# often oscillates and then drops suddenly, so a few passes without a change are not enough.
SETTLED_PASSES = 20
_PARTS = tuple(field.name for field in fields(LayerMessages))
# Names of the arrays that are stored without their zeros. Most of their messages are 0: those of unknown
# pixels, and those for weights that are off.
_SPARSE = ("to_s", "to_w", "held")


@dataclass(frozen=True)
class LayeredState:
    """Log odds of all weights between two steps of a fit, and its progress.

    Attributes
    ----------
    beliefs, first : ndarray of float64, shape (weights,)
        Log odds of the weights of all layers in nats: now, and before any image.
    changed, last_changed : int
        Number of weights that changed sign: in this epoch so far, and in the epoch before.
    moved, last_moved : int
        Number of images that changed their template: in this epoch so far, and in the epoch before.
    error, best : float
        Share of validation rows in a wrong class: in the last validation, and the smallest; NaN and infinity
        before the first validation.
    iteration, steps, rows, stale : int
        Number of epochs, of steps, of rows in this epoch, and of epochs since the smallest error.
    passes, passed, quiet : int
        Number of passes (down and up) over the images of the last step, and in all epochs; number of
        consecutive passes in which no weight changed its sign while some weights were on.
    """

    beliefs: np.ndarray
    first: np.ndarray
    changed: int = 0
    last_changed: int = 0
    moved: int = 0
    last_moved: int = -1
    error: float = float("nan")
    best: float = float("inf")
    iteration: int = 0
    steps: int = 0
    rows: int = 0
    stale: int = 0
    passes: int = 0
    passed: int = 0
    quiet: int = 0


PreparedLayers: TypeAlias = tuple[LayeredState, Backend]
"""State at the start of a step, and the backend. Each task of the step copies the log odds of the state."""
Sparse: TypeAlias = dict[str, np.ndarray]
"""An array without its zeros, see :func:`to_sparse`."""
StoredLayer: TypeAlias = dict[str, np.ndarray | Sparse]
"""The stored `LayerMessages` of a layer, see :func:`pack_messages`."""


class StoredLeaf(TypedDict):
    """Stored data of a leaf (a fixed range of images) after an update of its messages.

    It has the messages of each layer, the numbers of all passes and of those of the last update, the best
    template of each image, the last change of the log odds of weights, and the number of images whose best
    template changed.
    """

    layers: dict[str, StoredLayer]
    passes: np.int64
    visited: np.int64
    templates: np.ndarray
    change: Sparse
    moved: np.int64


@dataclass(frozen=True)
class OnlineNetworkLearner:
    """Online learning of several layers (an :class:`~scalelatent.contract.learners.OnlineLearner`).

    A task learns a sequence of minibatches (a chain), one after another. The algorithm is from section 4.2 of
    Lázaro-Gredilla et al. (2016):

    1. Start with the initial messages for the images of the minibatch. If all images are labelled, only the
       templates of each image's class get messages.
    2. Update the messages by ``inner_iterations`` passes down and up over the minibatch. Each pass changes
       the log odds of the weights.
    3. Discard the messages. The evidence that they added to the log odds remains.
    4. Forget: move the log odds by the share 1 - ``forgetting`` towards the initial log odds.
    5. After the last minibatch, return the evidence of all minibatches. A step adds the evidence of all tasks
       to the log odds, see :mod:`.evidence_learner`.

    Attributes
    ----------
    net : Hierarchy
    forgetting : float
        Share of the earlier evidence that remains after a minibatch.
    batch_rows : int
        Number of images of a minibatch.
    inner_iterations : int
        Number of passes over a minibatch.
    patience : int
        Learning ends after this number of epochs without a smaller validation error; 0: it runs all epochs.
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
    def n_weights(self) -> int:
        """Number of weights of all layers."""
        return sum(int(np.prod(layer.weights_shape)) for layer in self.net.layers)

    @property
    def requirements(self) -> BlockRequirements:
        images = self.batch_rows * row_bytes(self.net)
        return BlockRequirements(scratch=(48 * self.n_weights + images, 0), unlabelled=True)

    def layout(self) -> Layout:
        """Return the fields of the statistic of a step.

        They are the evidence for each weight in nats, the number of minibatches, and their weight: the sum
        over all chains of 1 - forgetting^m. A chain is a sequence of m minibatches that one task learns.
        """
        return Layout((("evidence", (self.n_weights,)), ("minibatches", ()), ("weight", ())))

    def flops_per_row(self) -> float:
        """Return the number of floating-point operations per image, for all passes over a minibatch."""
        return FLOPS_PER_PAIR * self.inner_iterations * sum(layer.pairs for layer in self.net.layers)

    def start(self, restart: int = 0) -> LayeredState:
        """Return the state before the first step."""
        first = self.net.first_beliefs(restart)
        return LayeredState(first, first)

    def prepare(self, state: LayeredState, backend: Backend) -> PreparedLayers:
        return state, backend

    def run_chain(self, prepared: PreparedLayers, block: Block, stats: Stats) -> None:
        """Learn the minibatches of a block one after another; add their evidence for weights to ``stats``."""
        state, backend = prepared
        beliefs, rows = state.beliefs, row_numbers(block)
        pixels, labels = self.net.layers[0].read_evidence(block), labels_of(self.net, block)
        for a in range(0, len(rows), self.batch_rows):
            x = pixels[a : a + self.batch_rows]
            y = None if labels is None else labels[a : a + self.batch_rows]
            # Templates of other classes cannot be on, so labelled images need no messages for them.
            if own_class_only := y is not None and bool((y >= 0).all()):
                by_class = np.argsort(y, kind="stable")
                x, y = x[by_class], y[by_class]
            kept, units = self.net.start(len(x), own_class_only), to_units(beliefs)
            for number in range(self.inner_iterations):
                key = block.epoch * self.inner_iterations + number
                units = units + update_images(
                    self.net, kept, units, x, y, int(rows[a]), number, backend, key=key
                )
            check_exact(self.net, units)
            beliefs = forget(beliefs + from_units(units - to_units(beliefs)), state.first, self.forgetting)
        n = -(-len(rows) // self.batch_rows)
        left = self.forgetting**n
        stats["evidence"][...] += beliefs - forget(state.beliefs, state.first, left)
        stats["minibatches"][...] += n
        stats["weight"][...] += 1 - left

    def step(self, state: LayeredState, stats: Stats, n_rows: int) -> LayeredState:
        """Return the state after a step: forget, and add the evidence of all minibatches to the log odds."""
        beliefs = add_evidence(state.beliefs, state.first, self.forgetting, stats)
        return count_step(state, beliefs, 0, n_rows)

    def end_epoch(self, state: LayeredState) -> LayeredState:
        """Return the state at the end of an epoch: the counts of the epoch are 0 again."""
        fresh = replace(state, changed=0, moved=0, rows=0, last_changed=state.changed, last_moved=state.moved)
        still = not state.changed and bool((state.beliefs > 0).any())
        quiet = state.quiet + state.passes if still else 0
        fresh = replace(fresh, passed=state.passed + state.passes, quiet=quiet)
        return replace(fresh, iteration=state.iteration + 1, stale=state.stale + 1)

    def validation(self) -> TemplateCounts:
        """Return the reduction that counts the validation rows by class and best template."""
        return TemplateCounts(self.net, self.n_classes)

    def validated(self, state: LayeredState, stats: Stats) -> LayeredState:
        """Return the state with the validation error, from the counts ``stats`` of the validation rows."""
        error = self.validation().error(stats)
        state = replace(state, error=error)
        return replace(state, best=error, stale=-1) if error < state.best else state

    def summary(self, state: LayeredState) -> dict[str, float | int | list[int] | None]:
        """Return the record of an epoch; the validation error is the objective."""
        known = None if np.isnan(state.error) else state.error
        on = [int((beliefs > 0).sum()) for beliefs in self.net.split(state.beliefs)]
        return {
            "objective": known,
            "weights_on": sum(on),
            "weights_on_by_layer": on,
            "weights_changed": state.changed if state.rows else state.last_changed,
            "share_on": sum(on) / self.n_weights,
            "validation_error": known,
        }

    def is_done(self, state: LayeredState) -> bool:
        """Return True after ``patience`` epochs without a smaller validation error."""
        return bool(self.patience and np.isfinite(state.best) and state.stale >= self.patience)


@dataclass(frozen=True)
class BatchNetworkLearner(OnlineNetworkLearner):
    """Batch learning of several layers (a `scalelatent.contract.learners.StoredRangeLearner`).

    It is Algorithm 1 of Lázaro-Gredilla et al. (2016). The run folder stores the messages of all images. A
    visit is an update of the messages of one leaf, a fixed range of images:

    1. Load the messages of the leaf, or start with the initial messages. If all images of the leaf are
       labelled, sort them by class; the templates of other classes then need no messages.
    2. Run a pass down from the class layer to the pixels. Messages change; log odds of weights do not. The
       first visit skips this pass.
    3. Run a pass up from the pixels to the class layer. The log odds of weights change with the messages.
    4. Store the messages without their zeros, the template of each image, and the change of the log odds.
    5. Add the changes of all leaves of a step to the log odds. Learning ends when no weight has changed sign
       in ``SETTLED_PASSES`` passes, or after ``max_passes``.

    Attributes
    ----------
    n_rows : int
        Number of images in all leaves.
    single_leaf_passes : int
        Number of passes down and up per visit if a single leaf holds all images. With several leaves a visit
        has one pass, because the other leaves also change the log odds.
    max_passes : int
        Upper bound of the passes over a leaf in all visits.
    all_labelled : bool
        True if each row has a label. Then messages are stored only for the templates of the images' own
        classes.
    """

    n_rows: int = 1
    single_leaf_passes: int = 1
    max_passes: int = 1_000_000
    all_labelled: bool = False

    @property
    def requirements(self) -> BlockRequirements:
        # An update needs memory for the old and the new messages in sparse form, the bytes read from disk,
        # and the joined bytes to write. The memory of the messages in dense form is released before the
        # write.
        each = 5 * stored_bytes(self.net, self.all_labelled)
        return BlockRequirements(scratch=(48 * self.n_weights, each), unlabelled=True)

    def layout(self) -> Layout:
        return Layout((("evidence", (self.n_weights,)), ("moved", ()), ("passes", ())))

    def flops_per_row(self) -> float:
        """Return the number of floating-point operations per image and pass."""
        return FLOPS_PER_PAIR * sum(layer.pairs for layer in self.net.layers)

    def make_single_leaf_learner(self, n_rows: int, passes: int) -> BatchNetworkLearner:
        """Return the learner for one range (leaf) of ``n_rows`` images, with ``passes`` passes per update."""
        most = max(passes, self.max_passes)
        return replace(self, n_rows=n_rows, single_leaf_passes=passes, max_passes=most)

    def start(self, restart: int = 0) -> LayeredState:
        """Return the state before the first step; log odds are multiples of 1/256 nat, as messages are."""
        first = self.net.first_beliefs(restart)
        return LayeredState(from_units(to_units(first)), first)

    def visit(self, prepared: PreparedLayers, block: Block, kept: StoredLeaf | None) -> StoredLeaf:
        """Update the messages of one leaf (a fixed range of images), and return the data to store.

        ``kept`` is the data that the last update returned, or None before the first update. ``block`` has the
        images. The update is one pass down and up; for a single leaf, ``single_leaf_passes`` of them.
        """
        (state, backend), n = prepared, len(block.x)
        pixels, labels = self.net.layers[0].read_evidence(block), labels_of(self.net, block)
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

    def exchange(
        self, prepared: PreparedLayers, kept: StoredLeaf | None, new: StoredLeaf, stats: Stats
    ) -> None:
        stats["evidence"][...] += from_units(to_dense(new["change"]))
        stats["moved"][...] += new["moved"]
        stats["passes"][...] += len(new["templates"]) * new["visited"]

    def summary(self, state: LayeredState) -> dict[str, float | int | list[int] | None]:
        """Return the record of an epoch, including the number of images that changed their template."""
        moved = state.moved if state.rows else max(0, state.last_moved)
        return super().summary(state) | {"rows_moved": moved}

    def is_done(self, state: LayeredState) -> bool:
        """Return True if weights no longer change, after ``max_passes``, or as in online learning."""
        return state.quiet >= SETTLED_PASSES or state.passed >= self.max_passes or super().is_done(state)

    def step(self, state: LayeredState, stats: Stats, n_rows: int) -> LayeredState:
        """Return the state after a step: add the changes by all updated images to the log odds of weights."""
        beliefs = state.beliefs + stats["evidence"]
        check_exact(self.net, to_units(np.clip(beliefs, -(2.0**22), 2.0**22)))
        state = replace(state, passes=round(float(stats["passes"]) / n_rows))
        return count_step(state, beliefs, int(stats["moved"]), n_rows)


def count_step(state: LayeredState, beliefs: np.ndarray, moved: int, n_rows: int) -> LayeredState:
    """Return the state with the new log odds ``beliefs``, and with the counts of this step added."""
    changed = int(((beliefs > 0) != (state.beliefs > 0)).sum())
    return replace(
        state,
        beliefs=beliefs,
        changed=state.changed + changed,
        moved=state.moved + moved,
        steps=state.steps + 1,
        rows=state.rows + n_rows,
    )


def labels_of(net: Hierarchy, block: Block) -> np.ndarray | None:
    """Return the class of each row of a block, below 0 if unknown; None if templates are clusters."""
    return None if net.classes is None else block.y


def to_sparse(values: np.ndarray) -> Sparse:
    """Return an array in sparse form: its shape, one bit per number (1 if nonzero), the nonzero numbers."""
    there = values != 0
    return {"shape": np.array(values.shape), "there": np.packbits(there), "values": values[there]}


def to_dense(kept: Sparse | np.ndarray) -> np.ndarray:
    """Return the array that :func:`to_sparse` converted, or a copy of an array that was not converted."""
    if isinstance(kept, np.ndarray):
        return kept.copy()
    out = np.zeros(kept["shape"], kept["values"].dtype)
    out[np.unpackbits(kept["there"], count=out.size).view(bool).reshape(out.shape)] = kept["values"]
    return out


def pack_messages(messages: LayerMessages) -> StoredLayer:
    """Return the messages of a layer in the form in which they are stored, some of them without zeros."""
    return {k: to_sparse(v) if k in _SPARSE else v for k, v in vars(messages).items()}


def unpack_messages(kept: StoredLeaf) -> list[LayerMessages]:
    """Return copies of the stored messages of each layer."""
    layers = (kept["layers"][str(level)] for level in range(len(kept["layers"])))
    return [LayerMessages(**{name: to_dense(part[name]) for name in _PARTS}) for part in layers]


def row_bytes(net: Hierarchy, own_class_only: bool = False) -> int:
    """Return the bytes of the messages of an image in memory.

    If ``own_class_only``, the top layer has messages only for the templates of the image's class.
    """
    return sum(whole + 4 * pairs + lines for whole, pairs, lines in _list_layer_sizes(net, own_class_only))


def stored_bytes(net: Hierarchy, all_labelled: bool = False) -> int:
    """Return an upper bound of the bytes on disk per image; it is exact if no message is 0."""
    own_class_only = all_labelled and net.classes is not None
    bits = sum(pairs + lines for _, pairs, lines in _list_layer_sizes(net, own_class_only))
    return row_bytes(net, own_class_only) + bits // 8 + 1


def _list_layer_sizes(net: Hierarchy, own_class_only: bool) -> Iterator[tuple[int, int, int]]:
    """Yield three sizes per image for each layer.

    They are the bytes of the arrays that are stored with their zeros, the number of messages of pixels, and
    the number of lines of the windows of all pixels.
    """
    for layer in net.message_layers(own_class_only):
        (channels, height, width), (h, _) = layer.image, layer.window
        room = message_room((height, width), layer.window, layer.n_features)
        whole = 8 * int(np.prod(layer.places)) + layer.n_pixels * (4 + 4 * net.side**2)
        yield whole, 2 * channels * room, layer.n_pixels * h


def check_exact(net: Hierarchy, units: np.ndarray) -> None:
    """Raise an error if log odds of weights, in units of 1/256 nat, are too large for exact int32 sums.

    Raises
    ------
    DivergenceError
    """
    for level, (layer, w) in enumerate(zip(net.layers, net.split(units), strict=True), 1):
        if not layer.is_exact(w):
            feature = int(np.abs(w).max(axis=(0, 1, 2)).argmax())
            raise DivergenceError(
                f"layer {level}: beliefs in the weights of feature {feature} have reached "
                f"{np.abs(w).max() / UNITS_PER_NAT:,.0f} nats; the limit of exact sums is "
                f"{BELIEF_LIMIT / UNITS_PER_NAT:,.0f}: lower damping, or raise p01 and p10"
            )
