"""Fits of networks of several layers; the features of the top layer are called templates.

Each image has one template. With labels, each class has a number of templates; without labels, each template
is a cluster. A fit may try several seeds, learn clusters first if few rows have labels, and at the end learn
the templates again from images.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from scalelatent.contract.stats import Stats
from scalelatent.data import Dataset
from scalelatent.data.schema import encode_labels
from scalelatent.engine.batch_loop import LoopResult
from scalelatent.errors import DataError, warn_user
from scalelatent.estimators.inputs import check_classes
from scalelatent.estimators.steps import MappedRows, Step, Steps, SumStatistic
from scalelatent.kernels.streams import stream
from scalelatent.models.hcn.kernels.units import OFF_IMAGE, from_units
from scalelatent.models.hcn.model.hierarchy import Hierarchy
from scalelatent.models.hcn.model.layer import FeatureLayer, to_features
from scalelatent.models.hcn.model.multi_layer_learning import (
    SETTLED_PASSES,
    BatchNetworkLearner,
    LayeredState,
    OnlineNetworkLearner,
    row_bytes,
)
from scalelatent.models.hcn.model.templates import (
    RowCodes,
    TemplateCounts,
    TemplateEvidence,
    assign_classes,
    choose_first_images,
    list_template_classes,
)

from .fit import (
    choose_first_state,
    continues_last_fit,
    count_passes_per_write,
    learn_epochs,
    make_feature_layers,
)
from .parameters import (
    check_batch_parameters,
    choose_batch_size,
    choose_damping,
    choose_n_epochs,
    choose_pools,
    choose_template_passes,
    choose_weight_priors,
    count_max_fits,
    is_online,
)

if TYPE_CHECKING:
    from .estimator import HierarchicalCompositionalNetwork

LayeredFit: TypeAlias = "tuple[MultiLayer, LayeredState, list[dict[str, Any]], float]"
"""Result of one fit: network, state, history, and share of rows in a wrong class (NaN if not measured)."""

UNLABELLED = -1
# Largest number of random images among which a fit chooses the images with which its templates (features of
# the top layer) start.
MAX_CANDIDATES = 2**16
# Largest number of passes over all images in memory before batch learning writes the belief-propagation
# messages to disk and adds a record to the history.
MAX_PASSES_PER_WRITE = 10


def known_classes(ds: Dataset) -> np.ndarray:
    """Return the labels of a dataset without -1 (no label); raise a DataError if there are too many."""
    classes = ds.classes
    if classes is None:
        raise DataError(f"{ds.url or 'y'} has too many different labels for classes: give fewer classes")
    return classes if classes.dtype.kind == "U" else classes[classes != UNLABELLED]


def make_multi_layer(
    model: HierarchicalCompositionalNetwork, image: tuple[int, int, int], train: Dataset
) -> MultiLayer:
    """Return the untrained network that the parameters of the model describe.

    ``image`` is the (channels, height, width) of images. The classes are those of the training rows.
    """
    assert model.templates is not None
    per_class, classes = int(model.templates), None
    if train.has_y:
        check_classes(train, type(model).__name__)
        classes = known_classes(train)
        if not len(classes):
            raise DataError(
                f"{train.url or 'y'}: all labels are -1, which means no label: remove y (templates are then "
                "clusters), or label some rows"
            )
    elif is_online(model):
        raise DataError(
            f"{train.url or 'X'}: there are no labels, and online=True learns templates from labels alone: "
            "set online=False to learn clusters from stored messages, or give labels"
        )
    else:
        check_batch_parameters(model)
    network = build_multi_layer(model, make_feature_layers(model, image), classes, per_class)
    # ``train.classes`` are all labels of the whole dataset, even if ``train`` is a slice. If they do not
    # include -1, which `known_classes` removes, all rows have a label.
    all_labelled = classes is not None and train.classes is not None and len(classes) == len(train.classes)
    return replace(network, all_labelled=all_labelled)


def build_multi_layer(
    model: HierarchicalCompositionalNetwork,
    below: tuple[FeatureLayer, ...],
    classes: np.ndarray | None,
    per_class: int,
) -> MultiLayer:
    """Return a network that has the layers ``below``, and on top of them a layer of templates.

    Each of the labels ``classes`` has ``per_class`` templates. If ``classes`` is None, there are
    ``per_class`` templates, and each is a cluster. The lowest layer has the noise probabilities for
    predictions, which are ``read_noise``.
    """
    online = is_online(model, classes is not None)
    below = with_read_noise(below[0], model), *below[1:]
    high, wide, channels = below[-1].places
    coded = None if classes is None else list_template_classes(len(classes), per_class)
    top = replace(
        below[-1],
        image=(channels, high, wide),
        filters=None,
        n_features=per_class if coded is None else len(coded),
        window=(high, wide),
        p_weight=choose_weight_priors(model, online)[-1],
    )
    net = Hierarchy((*below, top), coded, choose_pools(model, online)[0], damping=choose_damping(model))
    return MultiLayer(net, classes, per_class)


def with_read_noise(low: FeatureLayer, model: HierarchicalCompositionalNetwork) -> FeatureLayer:
    """Return the lowest layer with the noise probabilities ``read_noise`` if set, otherwise unchanged."""
    if model.read_noise is None:
        return low
    p01, p10 = map(float, model.read_noise)
    return replace(low, p01=p01, p10=p10)


@dataclass(frozen=True, eq=False)
class MultiLayer:
    """Network of several layers of features, and of pools, which shift the pixels of features.

    Attributes
    ----------
    net : Hierarchy
        Layers, pools, and classes of the templates, which are the features of the last layer.
    labels : ndarray, shape (classes,), or None
        Labels of the classes; None if templates are clusters.
    per_class : int
        Number of templates per class; without classes, number of clusters.
    validation_classes : ndarray or None
        Labels of the classes of the validation rows, which measure the error of clusters.
    all_labelled : bool
        True if it is known that each training row has a label.
    """

    net: Hierarchy
    labels: np.ndarray | None
    per_class: int
    validation_classes: np.ndarray | None = None
    all_labelled: bool = False

    @property
    def classes(self) -> np.ndarray | None:
        """Sorted labels of the training rows, else of the validation rows; None if there are no labels."""
        return self.validation_classes if self.labels is None else self.labels

    @property
    def has_labels(self) -> bool:
        """True if the training rows have labels, which are the classes of the templates (top features)."""
        return self.labels is not None

    @property
    def prediction_labels(self) -> np.ndarray:
        """Labels that `predict` can return: classes, or numbers of clusters."""
        return np.arange(self.net.n_templates) if self.labels is None else self.labels

    @property
    def template_classes(self) -> np.ndarray:
        """Class of each template (feature of the top layer), as an index into ``prediction_labels``."""
        return np.arange(self.net.n_templates) if self.net.classes is None else np.array(self.net.classes)

    @property
    def layer(self) -> FeatureLayer:
        """Lowest layer of features; its images are the rows of the dataset."""
        return self.net.layers[0]

    @property
    def layers(self) -> tuple[FeatureLayer, ...]:
        """Layers of features, from the image up, without the top layer, whose features are the templates."""
        return self.net.layers[:-1]

    @property
    def image_bytes(self) -> int:
        """Bytes of memory of the belief-propagation messages of one image, for templates of all classes."""
        return row_bytes(self.net)

    @property
    def pools(self) -> list[np.ndarray]:
        """Log priors, in nats, of the shifts of pixels: for each layer an array (shifts, height, width)."""
        return [np.where(prior == OFF_IMAGE, -np.inf, from_units(prior)) for prior in self.net.priors]

    def learner(
        self, model: HierarchicalCompositionalNetwork, n_rows: int, seed: int
    ) -> OnlineNetworkLearner:
        """Return the learner for ``n_rows`` training images; ``seed`` decides all its random numbers."""
        low, *above = self.net.layers
        # The lowest layer of this network has the noise probabilities for predictions (`read_noise`).
        # Learning uses the noise probabilities p01 and p10 instead.
        low = replace(low, p01=float(model.p01), p10=float(model.p10))
        net = replace(self.net, layers=(low, *above), seed=seed)
        n_classes = 0 if self.classes is None else len(self.classes)
        online = is_online(model, self.has_labels)
        how: dict[str, Any] = {
            "forgetting": float(model.forgetting),
            "batch_rows": choose_batch_size(model, n_rows if online else None),
            "inner_iterations": int(model.inner_iterations),
            "patience": int(model.patience or 0),
            "n_classes": n_classes,
        }
        if online:
            return OnlineNetworkLearner(net, **how)
        how |= {
            "single_leaf_passes": min(MAX_PASSES_PER_WRITE, count_passes_per_write(self.net.pairs, n_rows)),
            "max_passes": choose_n_epochs(model, n_rows, online),
            "all_labelled": self.all_labelled,
        }
        return BatchNetworkLearner(net, **how, n_rows=n_rows)

    def describe(self) -> str:
        """Return a text with the layers, their sizes and the first ten classes, for messages to the user."""
        *below, top = self.net.layers
        parts = [
            f"{one.n_features} features of {' x '.join(map(str, one.weights_shape[:3]))}" for one in below
        ]
        parts.append(f"{top.n_features} templates of {' x '.join(map(str, top.weights_shape[:3]))}")
        of = "" if self.labels is None else f" of the classes {', '.join(map(str, self.labels[:10]))}"
        return " under ".join(parts) + of

    def features(self, values: np.ndarray) -> list[np.ndarray]:
        """Return for each layer its part of the vector ``values``: (features, channels, height, width)."""
        return [to_features(part) for part in self.net.split(values)]

    def codes(self, y: Any, n_rows: int) -> np.ndarray | None:
        """Return for each label ``y`` its index into ``prediction_labels``, or -1 for the label -1.

        One label stands for ``n_rows`` equal labels, and None gives None. Raise a DataError for labels that
        the network does not know, and for a wrong number of labels.
        """
        if y is None:
            return None
        labels = np.broadcast_to(y, n_rows) if np.ndim(y) == 0 else np.asarray(y)
        if labels.shape != (n_rows,):
            raise DataError(
                f"y has shape {labels.shape}: give a class for each of the {n_rows} images, or one for all"
            )
        return encode_labels(labels, self.prediction_labels, 0, "y", True)

    @property
    def labelled_net(self) -> Hierarchy:
        """Network with a class for each template; without labels, a template (top feature) is a class."""
        return replace(self.net, classes=tuple(self.template_classes.tolist()))

    def make_error_counts(self, ds: Dataset, beliefs: np.ndarray) -> tuple[TemplateCounts, np.ndarray]:
        """Return a reduction (sum over rows) that counts rows by class and template, and the classes.

        ``beliefs`` are the log odds of the weights. A row counts for the template (top feature) with the
        largest score. Raise a DataError if the rows have no labels.
        """
        if not ds.has_y:
            raise DataError(
                f"{ds.url or 'X'} has no labels to compare with: pass y, or a dataset with labels"
            )
        check_classes(ds, "HierarchicalCompositionalNetwork")
        classes = known_classes(ds) if self.labels is None else self.labels
        return TemplateCounts(self.net, len(classes), beliefs), classes

    def fit_steps(
        self, model: HierarchicalCompositionalNetwork, rows: Mapping[str, MappedRows], counts: Stats
    ) -> Steps:
        """Yield the steps of a fit after the pass that counts pixels; set fitted attributes of the model.

        ``counts`` are the counts of `PixelCounts` from that pass.
        """
        online = is_online(model, self.has_labels)
        sides = choose_pools(model, online)
        if len(sides) > 1 and continues_last_fit(model):
            sides = (model._multi_layer("net").net.side,)
        fits = []
        for number, side in enumerate(sides):
            network = replace(self, net=replace(self.net, side=side))
            fits.append((yield from network._fit_once(model, rows, counts, number, len(sides) > 1)))
        network, state, history, _ = min(fits, key=lambda fit: fit[-1])
        model._keep(network, state, history)
        if choose_template_passes(model, online) and (empty := int((~model.used_[-1]).sum())):
            p_weight = choose_weight_priors(model, online)[-1]
            warn_user(
                f"{empty} of {network.net.n_templates} templates have no weights: no image was assigned to "
                "them, or the evidence of their images is smaller than the cost of a weight by p_weight (of "
                f"templates now {p_weight:g}): give fewer templates or more images, or raise p_weight"
            )
        if not online and history[-1].get("weights_changed"):
            warn_user(
                f"{history[-1]['weights_changed']} weights still changed in the last pass: give more passes "
                "(n_epochs), another random_state, or more templates"
            )

    def _fit_once(
        self,
        model: HierarchicalCompositionalNetwork,
        rows: Mapping[str, MappedRows],
        counts: Stats,
        fit_number: int,
        measures_error: bool,
    ) -> Generator[Step, Any, LayeredFit]:
        """Yield the steps of a fit whose pools (which shift pixels) have one size; return the result.

        ``fit_number`` counts these fits. The result has the share of rows in a wrong class. The share is NaN
        unless ``measures_error``, or templates are learned again and there are validation rows.
        """
        online, suffix = is_online(model, self.has_labels), f"-{fit_number}" if fit_number else ""
        # If fewer than half of the rows have labels, first learn templates (features of the top layer) as
        # clusters. Then assign to each template the class of most of its rows, and learn with these classes.
        few = not online and self.labels is not None and 2 * counts["labelled"].sum() < counts["rows"]
        network = replace(self, net=replace(self.net, classes=None)) if few else self
        network, result, history = yield from network._fit_until_settled(model, rows, fit_number)
        if few:
            assert self.labels is not None
            found = TemplateCounts(network.net, len(self.labels), result.state.beliefs)
            labelled = yield SumStatistic("templates", found, rows["train"], self.labels)
            coded = assign_classes(labelled["templates"], self.per_class)
            network = replace(network, net=replace(network.net, classes=coded))
            learner = network.learner(model, len(rows["train"].dataset), network.net.seed)
            state = replace(learner.start(), beliefs=result.state.beliefs, first=result.state.first)
            result = yield from learn_epochs(model, network, learner, state, rows, network.net.seed, "labels")
            history = [
                *history,
                *({**record, "restart": history[-1]["restart"]} for record in result.history),
            ]
        beliefs, first, error = result.state.beliefs, result.state.first, float("nan")
        if passes := choose_template_passes(model, online):
            beliefs = yield from network._learn_templates_again(beliefs, first, rows["train"], passes, suffix)
        if measures_error or (passes and "validation" in rows):
            measured = rows.get("validation", rows["train"])
            errors, classes = network.make_error_counts(measured.dataset, beliefs)
            error = errors.error(
                (yield SumStatistic(f"templates-validated{suffix}", errors, measured, classes))
            )
        if passes and "validation" in rows:
            history = [*history[:-1], {**history[-1], "validation_error": error}]
        return network, LayeredState(beliefs, first, iteration=result.state.iteration), history, error

    def _learn_templates_again(
        self, beliefs: np.ndarray, first: np.ndarray, rows: MappedRows, passes: int, suffix: str
    ) -> Generator[Step, Any, np.ndarray]:
        """Yield passes that learn the templates (top layer) again; return the log odds of all weights.

        `.model.templates` describes the algorithm. ``beliefs`` and ``first`` are the present and the initial
        log odds, and ``suffix`` ends the names of the passes.
        """
        n, rng = len(rows.dataset), stream(self.net.seed, "hcn first images")
        numbers = rng.choice(n, min(n, MAX_CANDIDATES), replace=False)
        codes = np.zeros(len(numbers), int)
        if self.net.classes is not None:
            order = np.argsort(numbers)
            stats = yield SumStatistic(f"first-images{suffix}", RowCodes(numbers[order]), rows, self.labels)
            codes[order] = stats["codes"].astype(int) - 1
        # Start from the initial log odds of the templates (features of the top layer). The first pass assigns
        # one image to each template.
        size = self.net.layers[-1].n_weights
        learned = np.concatenate([beliefs[:-size], first[-size:]])
        images = choose_first_images(self.net, numbers, codes)
        for number in range(passes):
            evidence = TemplateEvidence(self.net, learned, *(images if number == 0 else (None, None)))
            stats = yield SumStatistic(f"templates-from-images-{number}{suffix}", evidence, rows, self.labels)
            learned = evidence.update_beliefs(first, stats)
        return learned

    def _fit_until_settled(
        self, model: HierarchicalCompositionalNetwork, rows: Mapping[str, MappedRows], number: int
    ) -> Generator[Step, Any, tuple[MultiLayer, LoopResult, list[dict[str, Any]]]]:
        """Yield the steps of fits from different seeds until a fit converges, or until the last allowed fit.

        The first seed is ``seed_`` plus ``number``. A warm start is one fit, with the seed of the earlier
        fit. Return the network and the result of the last fit, and the history of all fits.
        """
        n, history = len(rows["train"].dataset), list[dict[str, Any]]()
        is_warm = continues_last_fit(model)
        most = 1 if is_warm else count_max_fits(model, is_online(model, self.has_labels))
        for restart in range(number, number + most):
            # The seed decides the priors of the shifts in pools, and the weights of a fit depend on these
            # priors. Therefore a warm start needs the seed of the last fit.
            seed = model._multi_layer("net").net.seed if is_warm else model.seed_ + restart
            network = replace(self, net=replace(self.net, seed=seed))
            learner = network.learner(model, n, seed)
            state = yield from choose_first_state(model, network, learner.start(), restart)
            name = f"learn-{restart}" if restart else "learn"
            result = yield from learn_epochs(model, network, learner, state, rows, seed, name)
            history += [{**record, "restart": restart} for record in result.history]
            if result.state.quiet >= SETTLED_PASSES:
                break
        return network, result, history
