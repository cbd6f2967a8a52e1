"""Learning networks of several layers: Algorithm 1 with kept messages, and online, where none is kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import TypeAlias, TypedDict

import numpy as np

from scalelatent.contract.learners import Backend, Block
from scalelatent.contract.stats import Layout, Stats
from scalelatent.contract.wants import Wants
from scalelatent.errors import DivergenceError
from scalelatent.models.hcn.kernels.exact import BELIEF_LIMIT, GRID, from_grid, to_grid
from scalelatent.models.hcn.kernels.windows import message_room

from .hierarchy import Hierarchy, LayerMessages, learn
from .layer import FLOPS_PER_PAIR, rows_of
from .online import forget, gathered
from .templates import TemplateCounts

# Passes in which no weight changes before a fit is at its end: errors swing, and then fall at once.
SETTLED = 20
_PARTS = tuple(field.name for field in fields(LayerMessages))
# Those of which most is 0: quiet trees say nothing, and weights that are off hold nothing up.
_SPARSE = ("to_s", "to_w", "held")


@dataclass(frozen=True)
class LayeredState:
    """Beliefs of all weights between steps.

    Attributes
    ----------
    beliefs, first : ndarray of float64, shape (weights,)
        Of all layers, now and before anything was seen, in nats.
    changed, last_changed : int
        Weights that changed sign: in the epoch, and in the one before.
    moved, last_moved : int
        Images that came to another template (of those that they have messages of), of both.
    error, best : float
        Share of the validation rows in a wrong class: last, and the least; NaN and infinity before.
    iteration, steps, rows, stale : int
        Epochs, steps, rows of the epoch, epochs since the best one.
    passes, passed, quiet : int
        Passes of the last visits; of all; and in a row without a weight that changed sign, while some were
        on.
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
"""What chains begin with: the state, of whose beliefs each makes its own copy."""
Sparse: TypeAlias = dict[str, np.ndarray]
"""An array without its zeros, see :func:`to_sparse`."""
KeptLayer: TypeAlias = dict[str, np.ndarray | Sparse]
"""The `LayerMessages` of a layer, see :func:`kept_of`."""


class KeptLayers(TypedDict):
    """What is kept of a leaf: the messages of each layer, and what their last visit changed."""

    layers: dict[str, KeptLayer]
    passes: np.int64
    visited: np.int64
    templates: np.ndarray
    change: Sparse
    moved: np.int64


@dataclass(frozen=True)
class LayeredEvidence:
    """Online learning of several layers (an :class:`~scalelatent.contract.learners.OnlineLearner`).

    A minibatch gets some passes up and down with messages of its own, which are dropped; then beliefs forget.

    Attributes
    ----------
    net : Hierarchy
    forgetting : float
        lambda: what a minibatch leaves of the evidence before it.
    batch_rows : int
        Images of a minibatch.
    inner_iterations : int
        Passes over a minibatch.
    patience : int
        Epochs without a smaller error of the validation rows before the end; 0: all epochs.
    n_classes : int
        Classes of the validation rows.
    """

    kind = "scalelatent.models.hcn.model.layered:LayeredEvidence"

    net: Hierarchy
    forgetting: float = 0.95
    batch_rows: int = 20
    inner_iterations: int = 15
    patience: int = 0
    n_classes: int = 0

    @property
    def n_weights(self) -> int:
        """Of all layers."""
        return sum(int(np.prod(layer.weights_shape)) for layer in self.net.layers)

    @property
    def wants(self) -> Wants:
        images = self.batch_rows * row_bytes(self.net)
        return Wants(scratch=(48 * self.n_weights + images, 0), unlabelled=True)

    def layout(self) -> Layout:
        """Evidence, the minibatches that it comes from, and what they weigh."""
        return Layout((("evidence", (self.n_weights,)), ("minibatches", ()), ("weight", ())))

    def flops_per_row(self) -> float:
        """Of all pairs of an image in all passes."""
        return FLOPS_PER_PAIR * self.inner_iterations * sum(layer.pairs for layer in self.net.layers)

    def start(self, restart: int = 0) -> LayeredState:
        """State before the first step."""
        first = self.net.first_beliefs(restart)
        return LayeredState(first, first)

    def prepare(self, state: LayeredState, backend: Backend) -> PreparedLayers:
        """The state: a chain makes its own copy of the beliefs."""
        return state, backend

    def run_chain(self, prepared: PreparedLayers, block: Block, stats: Stats) -> None:
        """Add the evidence of some minibatches, taken one after another."""
        state, backend = prepared
        beliefs, rows = state.beliefs, rows_of(block)
        pixels, labels = self.net.layers[0].evidence_in(block), labels_of(self.net, block)
        for a in range(0, len(rows), self.batch_rows):
            x = pixels[a : a + self.batch_rows]
            y = None if labels is None else labels[a : a + self.batch_rows]
            # The templates of other classes stay silent: nothing is kept of them.
            if of_class := y is not None and bool((y >= 0).all()):
                by_class = np.argsort(y, kind="stable")
                x, y = x[by_class], y[by_class]
            kept, units = self.net.start(len(x), of_class), to_grid(beliefs)
            for number in range(self.inner_iterations):
                key = block.epoch * self.inner_iterations + number
                units = units + learn(self.net, kept, units, x, y, int(rows[a]), number, backend, key=key)
            check_exact(self.net, units)
            beliefs = forget(beliefs + from_grid(units - to_grid(beliefs)), state.first, self.forgetting)
        n = -(-len(rows) // self.batch_rows)
        left = self.forgetting**n
        stats["evidence"][...] += beliefs - forget(state.beliefs, state.first, left)
        stats["minibatches"][...] += n
        stats["weight"][...] += 1 - left

    def step(self, state: LayeredState, stats: Stats, n_rows: int) -> LayeredState:
        """Add the chains' evidence to what is left of the beliefs."""
        beliefs = gathered(state.beliefs, state.first, self.forgetting, stats)
        return moved_on(state, beliefs, 0, n_rows)

    def end_epoch(self, state: LayeredState) -> LayeredState:
        """Count from 0 again."""
        begun = replace(state, changed=0, moved=0, rows=0, last_changed=state.changed, last_moved=state.moved)
        still = not state.changed and bool((state.beliefs > 0).any())
        quiet = state.quiet + state.passes if still else 0
        begun = replace(begun, passed=state.passed + state.passes, quiet=quiet)
        return replace(begun, iteration=state.iteration + 1, stale=state.stale + 1)

    def validation(self) -> TemplateCounts:
        """Templates of the validation rows under the weights of the moment."""
        return TemplateCounts(self.net, self.n_classes)

    def validated(self, state: LayeredState, stats: Stats) -> LayeredState:
        """Take in what the validation rows said."""
        error = self.validation().error(stats)
        state = replace(state, error=error)
        return replace(state, best=error, stale=-1) if error < state.best else state

    def summary(self, state: LayeredState) -> dict[str, float | int | list[int] | None]:
        """Weights that are on in each layer, and that changed sign; the validation error, which is the
        objective.
        """
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
        """Validation rows have not been told better for too long."""
        return bool(self.patience and np.isfinite(state.best) and state.stale >= self.patience)


@dataclass(frozen=True)
class LayeredMessages(LayeredEvidence):
    """Algorithm 1 (a :class:`~scalelatent.contract.learners.LeafLearner`).

    Attributes
    ----------
    n_rows : int
        Images of all leaves.
    alone_passes : int
        Passes of a visit where one leaf is all: nothing comes from others between two of them.
    most_passes : int
        Of all visits of a leaf.
    all_labelled : bool
        Whether each row has a label: then messages are those of the templates of its class.
    """

    n_rows: int = 1
    alone_passes: int = 1
    most_passes: int = 1_000_000
    all_labelled: bool = False

    @property
    def wants(self) -> Wants:
        # What was kept and what is kept, each with its bytes on the way from and to the disk, which are put
        # together of those of its arrays; messages as they are worked with are gone by then.
        each = 5 * kept_bytes(self.net, self.all_labelled)
        return Wants(scratch=(48 * self.n_weights, each), unlabelled=True)

    def layout(self) -> Layout:
        return Layout((("evidence", (self.n_weights,)), ("moved", ()), ("passes", ())))

    def flops_per_row(self) -> float:
        """Of all pairs of an image in a pass."""
        return FLOPS_PER_PAIR * sum(layer.pairs for layer in self.net.layers)

    def alone(self, n_rows: int, passes: int) -> LayeredMessages:
        """The learner of so many rows that are one leaf, with so many passes of a visit."""
        return replace(self, n_rows=n_rows, alone_passes=passes, most_passes=max(passes, self.most_passes))

    def start(self, restart: int = 0) -> LayeredState:
        """Before the first step; beliefs are whole units, as messages are."""
        first = self.net.first_beliefs(restart)
        return LayeredState(from_grid(to_grid(first)), first)

    def visit(self, prepared: PreparedLayers, block: Block, kept: KeptLayers | None) -> KeptLayers:
        """The leaf's messages after some passes, and what these change in the beliefs of W."""
        (state, backend), n = prepared, len(block.x)
        pixels, labels = self.net.layers[0].evidence_in(block), labels_of(self.net, block)
        if kept is None:
            # Templates of other classes stay silent: nothing is kept of them where all classes are known.
            messages = self.net.start(n, labels is not None and bool((labels >= 0).all()))
            begun, before = 0, np.full(n, -1)
        else:
            messages, begun, before = messages_of(kept), int(kept["passes"]), kept["templates"]
        first, beliefs, ranks = int(rows_of(block)[0]), to_grid(state.beliefs), None
        if self.net.is_narrow(messages[-1]):
            assert labels is not None
            by_class = np.argsort(labels, kind="stable")
            pixels, labels, ranks = pixels[by_class], labels[by_class], np.argsort(by_class)
        units, wanted = beliefs, self.alone_passes if n == self.n_rows else 1
        passes = min(wanted, self.most_passes - begun)
        for number in range(begun, begun + passes):
            found = learn(self.net, messages, units, pixels, labels, first, number, backend, ranks=ranks)
            units = units + found
        templates = (messages[-1].s - messages[-1].above).reshape(n, -1).argmax(axis=1)
        return {
            "layers": {str(level): kept_of(m) for level, m in enumerate(messages)},
            "passes": np.int64(begun + passes),
            "visited": np.int64(passes),
            "templates": templates,
            "change": to_sparse(units - beliefs),
            "moved": np.int64((templates != before).sum()),
        }

    def exchange(
        self, prepared: PreparedLayers, kept: KeptLayers | None, new: KeptLayers, stats: Stats
    ) -> None:
        stats["evidence"][...] += from_grid(to_dense(new["change"]))
        stats["moved"][...] += new["moved"]
        stats["passes"][...] += len(new["templates"]) * new["visited"]

    def summary(self, state: LayeredState) -> dict[str, float | int | list[int] | None]:
        """Images that came to another template, too."""
        moved = state.moved if state.rows else max(0, state.last_moved)
        return super().summary(state) | {"rows_moved": moved}

    def is_done(self, state: LayeredState) -> bool:
        """No weight has changed for long, or validation rows have not been told better."""
        return state.quiet >= SETTLED or state.passed >= self.most_passes or super().is_done(state)

    def step(self, state: LayeredState, stats: Stats, n_rows: int) -> LayeredState:
        """Add what messages to W have changed."""
        beliefs = state.beliefs + stats["evidence"]
        check_exact(self.net, to_grid(np.clip(beliefs, -(2.0**22), 2.0**22)))
        state = replace(state, passes=round(float(stats["passes"]) / n_rows))
        return moved_on(state, beliefs, int(stats["moved"]), n_rows)


def moved_on(state: LayeredState, beliefs: np.ndarray, moved: int, n_rows: int) -> LayeredState:
    """The state after a step."""
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
    """Class of each row, below 0 where it is not known; None where templates are clusters."""
    return None if net.classes is None else block.y


def to_sparse(values: np.ndarray) -> Sparse:
    """Which numbers of an array are not 0, a bit each, and these numbers."""
    there = values != 0
    return {"shape": np.array(values.shape), "there": np.packbits(there), "values": values[there]}


def to_dense(kept: Sparse | np.ndarray) -> np.ndarray:
    """The array of :func:`to_sparse`; earlier versions kept it as it is."""
    if isinstance(kept, np.ndarray):
        return kept.copy()
    out = np.zeros(kept["shape"], kept["values"].dtype)
    out[np.unpackbits(kept["there"], count=out.size).view(bool).reshape(out.shape)] = kept["values"]
    return out


def kept_of(messages: LayerMessages) -> KeptLayer:
    """What is kept of messages from visit to visit: all of them, those of which most is 0 without their 0."""
    return {k: to_sparse(v) if k in _SPARSE else v for k, v in vars(messages).items()}


def messages_of(kept: KeptLayers) -> list[LayerMessages]:
    """The messages of each layer that a visit left, as copies."""
    layers = (kept["layers"][str(level)] for level in range(len(kept["layers"])))
    return [LayerMessages(**{name: to_dense(part[name]) for name in _PARTS}) for part in layers]


def row_bytes(net: Hierarchy, of_class: bool = False) -> int:
    """Bytes of the messages of an image, of all templates or of those of a class."""
    return sum(whole + 4 * pairs + lines for whole, pairs, lines in _sizes(net, of_class))


def kept_bytes(net: Hierarchy, all_labelled: bool = False) -> int:
    """Bytes that are kept of an image from visit to visit, at most: as if no message were 0."""
    of_class = all_labelled and net.classes is not None
    bits = sum(pairs + lines for _, pairs, lines in _sizes(net, of_class))
    return row_bytes(net, of_class) + bits // 8 + 1


def _sizes(net: Hierarchy, of_class: bool) -> Iterator[tuple[int, int, int]]:
    """Of an image in each layer: bytes of what is kept whole, messages of trees, lines of windows."""
    for layer in net.with_messages(of_class):
        (channels, height, width), (h, _) = layer.image, layer.window
        room = message_room((height, width), layer.window, layer.n_features)
        whole = 8 * int(np.prod(layer.places)) + layer.n_pixels * (4 + 4 * net.side**2)
        yield whole, 2 * channels * room, layer.n_pixels * h


def check_exact(net: Hierarchy, units: np.ndarray) -> None:
    """Refuse beliefs beyond the range of exact sums.

    Raises
    ------
    DivergenceError
    """
    for level, (layer, w) in enumerate(zip(net.layers, net.split(units), strict=True), 1):
        if not layer.is_exact(w):
            feature = int(np.abs(w).max(axis=(0, 1, 2)).argmax())
            raise DivergenceError(
                f"layer {level}: beliefs in weights of feature {feature} have reached "
                f"{np.abs(w).max() / GRID:,.0f}, and there is room below {BELIEF_LIMIT / GRID:,.0f} only: "
                "lower damping, or raise p01 and p10"
            )
