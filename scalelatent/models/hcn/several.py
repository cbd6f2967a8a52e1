"""Fits of several layers under a class layer: attempts, few labels, classes of templates."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.contract.stats import Stats
from scalelatent.data import Dataset
from scalelatent.data.schema import encode_labels
from scalelatent.engine.batch_loop import LoopResult
from scalelatent.errors import DataError, warn_user
from scalelatent.estimators.inputs import check_classes
from scalelatent.estimators.steps import Collect, Rows, Step, Steps
from scalelatent.kernels.streams import stream
from scalelatent.models.hcn.kernels.exact import ABSENT, from_grid
from scalelatent.models.hcn.model.compression import PixelCounts
from scalelatent.models.hcn.model.hierarchy import Hierarchy
from scalelatent.models.hcn.model.layer import FeatureLayer, from_features, to_features
from scalelatent.models.hcn.model.layered import (
    SETTLED,
    LayeredEvidence,
    LayeredMessages,
    LayeredState,
    kept_bytes,
    row_bytes,
)
from scalelatent.models.hcn.model.templates import (
    LabelledPixels,
    RowCodes,
    TemplateCounts,
    TemplateEvidence,
    assigned,
    class_layer,
    first_images,
)

from .fit import first_state, goes_on, learn, make_layers, visit_passes
from .parameters import batch_size, damping, is_online, most_fits, n_epochs, weight_priors

if TYPE_CHECKING:
    from .estimator import HierarchicalCompositionalNetwork

UNLABELLED = -1
# Images that are looked at for those that templates begin with.
CANDIDATES = 2**16
# Of the messages of one leaf: what comes of a pass is looked at so often.
MOST_PASSES = 10


def known_classes(ds: Dataset) -> np.ndarray:
    """Labels of the classes; -1 is none."""
    classes = ds.classes
    if classes is None:
        raise DataError(f"{ds.url or 'y'} has too many different labels to be classes: give fewer")
    return classes if classes.dtype.kind == "U" else classes[classes != UNLABELLED]


def make_several(
    model: HierarchicalCompositionalNetwork, image: tuple[int, int, int], train: Dataset
) -> SeveralLayers:
    """The network that the parameters ask for, with the classes of these rows."""
    assert model.templates is not None
    per_class, classes = int(model.templates), None
    if is_online(model) and not train.has_y:
        raise DataError(
            f"{train.url or 'X'}: there are no labels, and online=True learns templates by labels alone: "
            "clusters come apart over many passes over kept messages; set online=False, or give labels"
        )
    if train.has_y:
        check_classes(train, type(model).__name__)
        classes = known_classes(train)
        if not len(classes):
            raise DataError(
                f"{train.url or 'y'}: all labels are -1, which is none: leave y out (templates are clusters "
                "then), or label some rows"
            )
    network = several_of(model, make_layers(model, image), classes, per_class)
    # Those of a slice are the classes of its whole dataset.
    every = classes is not None and train.classes is not None and len(classes) == len(train.classes)
    return replace(network, all_labelled=every)


def several_of(
    model: HierarchicalCompositionalNetwork,
    below: tuple[FeatureLayer, ...],
    classes: np.ndarray | None,
    per_class: int,
) -> SeveralLayers:
    """A network of these layers, with templates over them; it reads images by the noise for that."""
    below = as_read(below[0], model), *below[1:]
    high, wide, channels = below[-1].places
    coded = None if classes is None else class_layer(len(classes), per_class)
    top = replace(
        below[-1],
        image=(channels, high, wide),
        filters=None,
        n_features=per_class if coded is None else len(coded),
        window=(high, wide),
        p_weight=weight_priors(model)[-1],
    )
    net = Hierarchy(
        (*below, top),
        coded,
        int(model.pool),
        damping=damping(model),
    )
    return SeveralLayers(net, classes, per_class)


def as_read(low: FeatureLayer, model: HierarchicalCompositionalNetwork) -> FeatureLayer:
    """The layer over the pixels, by the noise that images are read with."""
    if model.read_noise is None:
        return low
    p01, p10 = map(float, model.read_noise)
    return replace(low, p01=p01, p10=p10)


@dataclass(frozen=True, eq=False)
class SeveralLayers:
    """Several layers of features and pools, the last of templates (a :class:`~.fit.Network`).

    Attributes
    ----------
    net : Hierarchy
    labels : ndarray, shape (classes,), or None
        Labels of the classes; None: templates are clusters.
    per_class : int
        Templates of a class, or clusters.
    validated : ndarray or None
        Labels of the validation rows, where templates are clusters.
    all_labelled : bool
        Whether it is known that each training row has a label.
    """

    net: Hierarchy
    labels: np.ndarray | None
    per_class: int
    validated: np.ndarray | None = None
    all_labelled: bool = False

    @property
    def classes(self) -> np.ndarray | None:
        return self.validated if self.labels is None else self.labels

    @property
    def predicted(self) -> np.ndarray:
        """What rows are told to be: classes, or the numbers of clusters."""
        return np.arange(self.net.n_templates) if self.labels is None else self.labels

    @property
    def template_classes(self) -> np.ndarray:
        """Position in ``predicted`` of each template."""
        return np.arange(self.net.n_templates) if self.net.classes is None else np.array(self.net.classes)

    @property
    def layer(self) -> FeatureLayer:
        return self.net.layers[0]

    @property
    def layers(self) -> tuple[FeatureLayer, ...]:
        return self.net.layers[:-1]

    @property
    def pairs(self) -> int:
        return sum(layer.pairs for layer in self.net.layers)

    @property
    def n_weights(self) -> int:
        return sum(int(np.prod(layer.weights_shape)) for layer in self.net.layers)

    @property
    def image_bytes(self) -> int:
        return row_bytes(self.net)

    @property
    def pools(self) -> list[np.ndarray]:
        """Log priors of the shifts of each layer's pools, in nats."""
        return [np.where(prior == ABSENT, -np.inf, from_grid(prior)) for prior in self.net.priors]

    @property
    def online_bytes(self) -> int:
        return self.image_bytes

    @property
    def kept_bytes(self) -> int:
        return kept_bytes(self.net, self.all_labelled)

    @property
    def decoding_sweeps(self) -> float:
        return 1.0  # a forward pass

    def look(self) -> tuple[str, TemplateCounts]:
        return "templates", TemplateCounts(self.net, 1 if self.classes is None else len(self.classes))

    def check(self, train: Dataset, held: Dataset | None) -> None:
        if held is not None:
            if not held.has_y:
                raise DataError(
                    f"validation{f' ({held.url})' if held.url else ''} has no labels, and errors are what a "
                    "network with templates is validated by: give rows with labels"
                )
            check_classes(held, "HierarchicalCompositionalNetwork")

    def counts(self) -> LabelledPixels | PixelCounts:
        pixels = PixelCounts(self.layer)
        return pixels if self.labels is None else LabelledPixels(pixels, len(self.labels))

    def check_counts(self, train: Dataset, counts: Stats) -> None:
        if self.labels is not None and not counts["labelled"].all():
            missing = self.labels[int(np.argmin(counts["labelled"]))]
            raise DataError(
                f"{train.url or 'y'}: class {missing.item()!r} has no rows here, and its templates nothing "
                "to learn from: give rows of each class (labels of a slice are those of its whole dataset)"
            )

    def learner(self, model: HierarchicalCompositionalNetwork, n_rows: int, seed: int) -> LayeredEvidence:
        low, *above = self.net.layers
        # Learned by its own noise, however images are read.
        low = replace(low, p01=float(model.p01), p10=float(model.p10))
        net = replace(self.net, layers=(low, *above), seed=seed)
        n_classes = 0 if self.classes is None else len(self.classes)
        how: dict[str, Any] = {
            "forgetting": float(model.forgetting),
            "batch_rows": batch_size(model, n_rows),
            "inner_iterations": int(model.inner_iterations),
            "patience": int(model.patience or 0),
            "n_classes": n_classes,
        }
        if is_online(model):
            return LayeredEvidence(net, **how)
        alone = min(MOST_PASSES, visit_passes(self.pairs, n_rows))
        passes = n_epochs(model, n_rows)
        how |= {"alone_passes": alone, "most_passes": passes, "all_labelled": self.all_labelled}
        return LayeredMessages(net, **how, n_rows=n_rows)

    def last_state(self, model: HierarchicalCompositionalNetwork) -> LayeredState:
        before = model._network
        if not isinstance(before, SeveralLayers) or before.told() != self.told():
            raise ValueError(
                f"the last fit was of {before.told()}, and these are {self.told()}: set layers, templates "
                "and classes back, or start again (warm_start=False)"
            )
        assert isinstance(model._stream, LayeredState)
        return model._stream

    def told(self) -> str:
        """Layers, templates and classes, in words."""
        *below, top = self.net.layers
        parts = [
            f"{one.n_features} features of {' x '.join(map(str, one.weights_shape[:3]))}" for one in below
        ]
        parts.append(f"{top.n_features} templates of {' x '.join(map(str, top.weights_shape[:3]))}")
        of = "" if self.labels is None else f" of the classes {', '.join(map(str, self.labels[:10]))}"
        return " under ".join(parts) + of

    def features(self, values: np.ndarray) -> list[np.ndarray]:
        """Weights, or beliefs of them, as features of each layer; the templates last."""
        return [to_features(part) for part in self.net.split(values)]

    def from_features(self, features: list[np.ndarray]) -> np.ndarray:
        """What :meth:`features` was made of."""
        return np.concatenate([from_features(part).ravel() for part in features])

    def codes(self, y: Any, n_rows: int) -> np.ndarray | None:
        """Position in ``predicted`` of each label that is given, -1 of none; refuses others."""
        if y is None:
            return None
        labels = np.broadcast_to(y, n_rows) if np.ndim(y) == 0 else np.asarray(y)
        if labels.shape != (n_rows,):
            raise DataError(
                f"y has shape {labels.shape}: give a class for each of the {n_rows} images, or one"
            )
        return encode_labels(labels, self.predicted, 0, "y", True)

    @property
    def telling(self) -> Hierarchy:
        """The network with a class for each cluster too."""
        codes = tuple(self.template_classes.tolist())
        return replace(self.net, classes=codes)

    def scoring(self, ds: Dataset, beliefs: np.ndarray) -> tuple[TemplateCounts, np.ndarray]:
        """What counts the errors in rows, and the classes of these."""
        if not ds.has_y:
            raise DataError(
                f"{ds.url or 'X'} has no labels to score against: pass y, or a dataset with labels"
            )
        check_classes(ds, "HierarchicalCompositionalNetwork")
        classes = known_classes(ds) if self.labels is None else self.labels
        return TemplateCounts(self.net, len(classes), beliefs), classes

    def course(
        self, model: HierarchicalCompositionalNetwork, rows: Mapping[str, Rows], counts: Stats
    ) -> Steps:
        online = is_online(model)
        few = not online and self.labels is not None and 2 * counts["labelled"].sum() < counts["rows"]
        begun = replace(self, net=replace(self.net, classes=None)) if few else self
        network, result, history = yield from begun._attempts(model, rows)
        if few:
            assert self.labels is not None
            found = TemplateCounts(network.net, len(self.labels), result.state.beliefs)
            labelled = yield Collect("templates", found, rows["train"], self.labels)
            coded = assigned(labelled["templates"], self.per_class)
            network = replace(network, net=replace(network.net, classes=coded))
            learner = network.learner(model, len(rows["train"].dataset), network.net.seed)
            state = replace(learner.start(), beliefs=result.state.beliefs, first=result.state.first)
            result = yield from learn(model, network, learner, state, rows, network.net.seed, "labels")
            history = [
                *history,
                *({**record, "restart": history[-1]["restart"]} for record in result.history),
            ]
        beliefs, first = result.state.beliefs, result.state.first
        if model.template_passes:
            beliefs = yield from network._from_images(beliefs, first, rows["train"], model.template_passes)
            empty = int((~np.any(network.net.split(beliefs)[-1] > 0, axis=(0, 1, 2))).sum())
            if empty:
                warn_user(
                    f"{empty} of {network.net.n_templates} templates have no weights: no image came to them, "
                    "or what their images say does not pay for p_weight (of templates now "
                    f"{weight_priors(model)[-1]:g}): give fewer templates or more images, or raise p_weight"
                )
            if "validation" in rows:
                said, classes = network.scoring(rows["validation"].dataset, beliefs)
                counted = yield Collect("templates-validated", said, rows["validation"], classes)
                history = [*history[:-1], {**history[-1], "validation_error": said.error(counted)}]
        state = LayeredState(beliefs, first, iteration=result.state.iteration)
        used = [np.any(part, axis=(1, 2, 3)) for part in network.features(state.beliefs > 0)]
        model._keep(network, state, used, history)
        last = history[-1]
        if not online and last.get("weights_changed"):
            warn_user(
                f"{last['weights_changed']} weights still changed in the last pass: give more passes "
                "(n_epochs), another random_state, or more templates"
            )

    def _from_images(
        self, beliefs: np.ndarray, first: np.ndarray, rows: Rows, passes: int
    ) -> Generator[Step, Any, np.ndarray]:
        """Beliefs with templates learned afresh from images, under the features as they are."""
        n, rng = len(rows.dataset), stream(self.net.seed, "hcn first images")
        numbers = rng.choice(n, min(n, CANDIDATES), replace=False)
        codes = np.zeros(len(numbers), int)
        if self.net.classes is not None:
            order = np.argsort(numbers)
            told = yield Collect("first-images", RowCodes(numbers[order]), rows, self.labels)
            codes[order] = told["codes"].astype(int) - 1
        # Templates are to begin anew: no image has one before.
        begun = np.concatenate(
            [beliefs[: -self.net.split(first)[-1].size], self.net.split(first)[-1].ravel()]
        )
        images = first_images(self.net, numbers, codes)
        for number in range(passes):
            said = TemplateEvidence(self.net, begun, *(images if number == 0 else (None, None)))
            stats = yield Collect(f"templates-from-images-{number}", said, rows, self.labels)
            begun = said.learned(first, stats)
        return begun

    def _attempts(
        self, model: HierarchicalCompositionalNetwork, rows: Mapping[str, Rows]
    ) -> Generator[Step, Any, tuple[SeveralLayers, LoopResult, list[dict[str, Any]]]]:
        """Fits from other seeds, until one settles: its network, what it came to, records of all."""
        n, history = len(rows["train"].dataset), list[dict[str, Any]]()
        on = goes_on(model)
        for restart in range(1 if on else most_fits(model)):
            # What was learned goes with the pools of then.
            seed = model._of_several("net").net.seed if on else model.seed_ + restart
            network = replace(self, net=replace(self.net, seed=seed))
            learner = network.learner(model, n, seed)
            state = yield from first_state(model, network, learner.start(), restart)
            name = f"learn-{restart}" if restart else "learn"
            result = yield from learn(model, network, learner, state, rows, seed, name)
            history += [{**record, "restart": restart} for record in result.history]
            if result.state.quiet >= SETTLED:
                break
        return network, result, history
