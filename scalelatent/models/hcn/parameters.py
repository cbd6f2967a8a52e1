"""Parameters of hierarchical compositional networks, and the default values that replace None."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scalelatent.contract.parameters import (
    DEVICE,
    N_JOBS,
    RANDOM_STATE,
    WARM_START,
    Flag,
    Items,
    Number,
    Parameter,
    Parameters,
    Satisfies,
    Whole,
    is_list,
    is_number,
    is_whole,
)

if TYPE_CHECKING:
    from .estimator import HierarchicalCompositionalNetwork

# Default number of features of a single layer.
N_FEATURES = 32
# Default (height, width) of a feature of a single layer, in pixels.
FEATURE_SIZE = (8, 6)
# Default number of images per minibatch.
BATCH_SIZE = 5
# By default, an online fit of at least this number of training images learns several chains in parallel. A
# chain is a sequence of minibatches that one task learns.
MANY_ROWS = 10_000
# Default number of chains (sequences of minibatches) that a step learns in parallel, from MANY_ROWS images.
CHAINS = 8
# Default number of minibatches that one task learns in sequence (a chain), for MANY_ROWS or more images.
CHAIN_BATCHES = 10
# Default number of images of the warm-up, in which a fit learns one minibatch after the other, before it
# learns several minibatches in parallel.
WARMUP_ROWS = 4_000
# Smallest number of images, summed over all epochs, in an online fit of one layer if n_epochs is None.
MIN_ROWS_SEEN = 3_000
# Smallest number of images, summed over all epochs, in an online fit of several layers if n_epochs is None.
MIN_LAYERED_ROWS_SEEN = 1_000
# Largest number of sweeps of a fit of one layer that stores messages (online=False), if n_epochs is None. A
# sweep updates the belief-propagation messages of all pixels once.
MAX_SWEEPS = 60
# Largest number of passes over the images in one attempt of a fit of several layers that stores
# belief-propagation messages (online=False), if n_epochs is None.
MAX_PASSES = 300
# Largest number of attempts of a fit of several layers with online=False, if n_epochs is None. After an
# attempt that has not converged, the fit starts again from another seed.
MAX_ATTEMPTS = 5
# Prior probability that a weight of a single layer is on, if p_weight is None.
P_WEIGHT = 0.3
# Prior probability that a weight is on in networks of several layers, if p_weight is None.
LAYERED_P_WEIGHT = 0.25
# Prior probability that a weight of a template (a feature of the top layer) is on, if p_weight is None and
# online is False.
STORED_TEMPLATES_P_WEIGHT = 1e-20
# Default number of features of the layer below the templates, which are the features of the top layer. More
# or larger features did not lower the classification error on images of binary digits.
LAYERED_FEATURES = 8
# Default (height, width), in pixels, of a feature of the layer below the templates (top layer).
LAYERED_FEATURE_SIZE = (3, 3)
# Number of passes at the end of an online fit that learn the templates (features of the top layer) again, if
# template_passes is None. More passes did not lower the classification error on images of binary digits.
TEMPLATE_PASSES = 3
# Sides of pools, in pixels, that an online fit without filters tries if pool is None; the fit with the
# smaller error is the result. Other fits use the first side. A pool shifts pixels of features: side 3 allows
# shifts by one pixel, and side 1 no shifts. Shifts help if parts of an object vary in position, but make the
# classes of very small images (digits of 8 x 8 pixels) too similar.
POOL_SIDES = (3, 1)
# Damping of belief propagation in a network of several layers, if damping is None: the weight of a new
# message in the average of the new and the old message. With 1 there is no damping.
LAYERED_DAMPING = 0.2


def is_layer(value: Any) -> bool:
    """Return True if ``value`` is (number of features, (height, width) or side of a feature in pixels)."""
    if not is_list(value) or len(value) != 2 or not is_whole(value[0]):
        return False
    size = value[1]
    return is_whole(size) or (is_list(size) and len(size) == 2 and all(map(is_whole, size)))


def is_layer_list(value: Any) -> bool:
    """Return True if ``value`` is None, or has for each layer (number of features, size of a feature)."""
    return value is None or (is_list(value) and len(value) > 0 and all(map(is_layer, value)))


def is_shape(value: Any) -> bool:
    """Return True if ``value`` is None, (height, width) or (channels, height, width)."""
    return value is None or (is_list(value) and len(value) in (2, 3) and all(map(is_whole, value)))


def is_missing_value(value: Any) -> bool:
    """Return True if the parameter ``missing`` may have this value: None, a number, or NaN."""
    return value is None or is_number(value) or (isinstance(value, float) and value != value)


def is_odd_side(value: Any) -> bool:
    """Return True if ``value`` is an odd whole number: pools and filters have a pixel in the middle."""
    return is_whole(value) and value % 2 == 1


def is_filter_count(value: Any) -> bool:
    """Return True if ``value`` is None or a positive even number: each filter has an opposite filter."""
    return value is None or (is_whole(value) and value > 0 and value % 2 == 0)


def is_noise_pair(value: Any) -> bool:
    """Return True if ``value`` is None, or two noise probabilities (p01, p10) above 0 and below 0.5."""
    return value is None or (
        is_list(value) and len(value) == 2 and all(is_number(p) and 0 < p < 0.5 for p in value)
    )


def default_layers(
    model: HierarchicalCompositionalNetwork, image: tuple[int, int, int]
) -> list[tuple[int, tuple[int, int]]]:
    """Return the default of ``layers``, which is one layer, for images (channels, height, width).

    Under a top layer of templates, features have 3 x 3 pixels, or fewer in smaller images. Otherwise,
    features have 8 x 6 pixels. In images that are less than 8 pixels high, features are as high as the image,
    and wider, so that a feature has up to 48 pixels.
    """
    _, height, width = image
    if has_templates(model):
        h, w = LAYERED_FEATURE_SIZE
        return [(LAYERED_FEATURES, (min(h, height), min(w, width)))]
    high = min(FEATURE_SIZE[0], height)
    return [(N_FEATURES, (high, min(FEATURE_SIZE[0] * FEATURE_SIZE[1] // high, width)))]


def choose_layer_sizes(
    model: HierarchicalCompositionalNetwork, image: tuple[int, int, int]
) -> list[tuple[int, tuple[int, int]]]:
    """Return (number of features, (height, width)) of each layer below the templates, from ``layers``."""
    if model.layers is None:
        return default_layers(model, image)
    size: Any  # (height, width), or one number if height and width are equal
    found = []
    for n, size in model.layers:
        h, w = size if is_list(size) else (size, size)
        found.append((int(n), (int(h), int(w))))
    return found


def has_templates(model: HierarchicalCompositionalNetwork) -> bool:
    """Return True for a network of several layers; each feature of its top layer is a template of a class."""
    return model.templates is not None


def is_online(model: HierarchicalCompositionalNetwork, has_labels: bool = False) -> bool:
    """Return the parameter ``online``, or its default: True if learning is online.

    By default learning is online, except if a network of several layers has no labels: then it learns
    clusters from stored belief-propagation messages.
    """
    return has_labels or not has_templates(model) if model.online is None else bool(model.online)


def choose_pools(model: HierarchicalCompositionalNetwork, online: bool) -> tuple[int, ...]:
    """Return the sides, in pixels, of pools (which shift pixels) that a fit tries: ``pool``, or a default."""
    if model.pool is not None:
        return (int(model.pool),)
    return POOL_SIDES if has_templates(model) and online and model.filters is None else POOL_SIDES[:1]


def choose_template_passes(model: HierarchicalCompositionalNetwork, online: bool) -> int:
    """Return the passes at the end of a fit that learn the templates (features of the top layer) again."""
    if model.template_passes is not None:
        return int(model.template_passes)
    return TEMPLATE_PASSES if has_templates(model) and online else 0


def choose_damping(model: HierarchicalCompositionalNetwork) -> float:
    """Return the damping of belief propagation, the weight of new messages: ``damping``, or its default."""
    if model.damping is not None:
        return float(model.damping)
    return LAYERED_DAMPING if has_templates(model) else 1.0


def count_layers(model: HierarchicalCompositionalNetwork) -> int:
    """Return the number of layers of features, without the top layer of templates."""
    return 1 if model.layers is None else len(model.layers)


def choose_weight_priors(model: HierarchicalCompositionalNetwork, online: bool = True) -> tuple[float, ...]:
    """Return the prior probability that a weight is on, for each layer; the layer of templates is last."""
    given: Any = model.p_weight
    n = count_layers(model) + has_templates(model)
    if given is None:
        if not has_templates(model):
            return (P_WEIGHT,)
        return *(LAYERED_P_WEIGHT,) * (n - 1), LAYERED_P_WEIGHT if online else STORED_TEMPLATES_P_WEIGHT
    return tuple(map(float, given)) if is_list(given) else (float(given),) * n


def choose_n_chains(model: HierarchicalCompositionalNetwork, n_rows: int) -> int:
    """Return the number of minibatch sequences or image ranges per step: ``n_chains``, or its default."""
    return int(model.n_chains or (CHAINS if n_rows >= MANY_ROWS else 1))


def choose_chain_batches(model: HierarchicalCompositionalNetwork, n_rows: int) -> int:
    """Return the number of minibatches that a task learns in sequence: ``chain_batches``, or its default."""
    return int(model.chain_batches or (CHAIN_BATCHES if n_rows >= MANY_ROWS else 1))


def choose_batch_size(model: HierarchicalCompositionalNetwork, n_rows: int | None = None) -> int:
    """Return the number of images per minibatch: ``batch_size``, or by default 5, or fewer for few images.

    ``n_rows`` is the number of training images. If it is None, the default is always 5.
    """
    if model.batch_size is not None:
        return int(model.batch_size)
    if n_rows is None:
        return BATCH_SIZE
    return max(
        1, min(BATCH_SIZE, n_rows // (choose_chain_batches(model, n_rows) * choose_n_chains(model, n_rows)))
    )


def choose_warmup_rows(model: HierarchicalCompositionalNetwork, n_rows: int, online: bool) -> int:
    """Return the number of images of the warm-up: ``warmup_rows``, or at most 4,000 by default.

    A step of the warm-up learns one minibatch, and later steps learn ``n_chains`` x ``chain_batches``. The
    number is 0 in batch learning (``online`` is False), and by default if later steps learn one minibatch.
    """
    if not online:
        return 0
    if model.warmup_rows is not None:
        return int(model.warmup_rows)
    serial = choose_n_chains(model, n_rows) == choose_chain_batches(model, n_rows) == 1
    return 0 if serial else min(WARMUP_ROWS, n_rows)


def choose_n_epochs(model: HierarchicalCompositionalNetwork, n_rows: int, online: bool) -> int:
    """Return the largest number of epochs, or of passes in batch learning: ``n_epochs``, or its default."""
    if model.n_epochs is not None:
        return int(model.n_epochs)
    if online:
        # A dataset smaller than 5 images (BATCH_SIZE) gets as many epochs as a dataset of 5 images.
        seen = MIN_LAYERED_ROWS_SEEN if has_templates(model) else MIN_ROWS_SEEN
        return -(-seen // max(n_rows, BATCH_SIZE))
    return MAX_PASSES if has_templates(model) else MAX_SWEEPS


def count_max_fits(model: HierarchicalCompositionalNetwork, online: bool) -> int:
    """Return the largest number of fits from different seeds.

    The number is ``n_restarts``, or ``MAX_ATTEMPTS`` in batch learning of several layers without
    ``n_epochs``, where a fit starts again from another seed until the fit converges.
    """
    if has_templates(model) and not online and model.n_epochs is None:
        return MAX_ATTEMPTS
    return int(model.n_restarts)


def _check_layers(model: HierarchicalCompositionalNetwork) -> None:
    n = count_layers(model)
    if n > 1 and not has_templates(model):
        raise ValueError(
            f"layers has {n} entries, but several layers need a class layer on top: set templates to the "
            "number of templates per class (without labels, of clusters), or give one (features, (h, w))"
        )
    given: Any = model.p_weight
    if is_list(given) and len(given) != n + has_templates(model):
        over = " and one for the templates" if has_templates(model) else ""
        raise ValueError(
            f"p_weight={given!r} has {len(given)} entries: give a number, or one for each "
            f"of the {n} layers{over}"
        )


def _check_combinations(model: HierarchicalCompositionalNetwork) -> None:
    """Raise a ValueError for a parameter that has no effect, or is not allowed, with the other parameters."""
    several, online = has_templates(model), is_online(model, has_labels=True)
    if online and not several and model.damping not in (None, 1):
        raise ValueError(
            f"damping={model.damping} is set, but online learning stores no messages to damp: remove "
            "damping, or set online=False"
        )
    if not online:
        check_batch_parameters(model)
    for name in ("pool", "inner_iterations", "template_passes", "read_noise"):
        if not several and getattr(model, name) != PARAMETERS[name].default:
            raise ValueError(
                f"{name} is set, but a network without a class layer has no pools and no templates: set "
                "templates, or remove it"
            )
    if model.filters is None and model.filter_size != PARAMETERS["filter_size"].default:
        raise ValueError(
            f"filter_size={model.filter_size} is set, but filters is None: set filters, or remove it"
        )
    if model.filters is not None:
        if model.missing is not None:
            raise ValueError(
                f"missing={model.missing} is set, but filters need all grey values: remove missing"
            )
        if model.threshold is not None and not 0 < model.threshold <= 255:
            raise ValueError(
                f"threshold={model.threshold}: with filters it is the smallest step in grey levels: give a "
                "number in (0, 255]"
            )
        if not several:
            raise ValueError(f"filters={model.filters} is set, but filters need templates: set templates")
    if several and model.n_restarts != 1:
        raise ValueError(
            f"n_restarts={model.n_restarts} is set, but restarts are compared by compression, which networks "
            "with templates do not have: remove n_restarts (a fit that does not converge starts again anyway)"
        )


def check_batch_parameters(model: HierarchicalCompositionalNetwork) -> None:
    """Raise a ValueError for a set parameter that has an effect in online learning only (online=True)."""
    for name in ("chain_batches", "warmup_rows", "inner_iterations"):
        if getattr(model, name) != PARAMETERS[name].default:
            raise ValueError(f"{name} is set, but belongs to online=True: remove it, or set online=True")


def _make_optional(name: str, doc: str, least: int = 1, **more: Any) -> Parameter:
    return Parameter(name, None, Whole(least, also=(None,)), doc, **more)


def _make_probability(name: str, default: float, doc: str, below: float = 1.0) -> Parameter:
    give = f"give a number in (0, {below:g})"
    return Parameter(name, default, Number(give, above=0, below=below), doc)


PARAMETERS = Parameters(
    (
        Parameter(
            "layers",
            None,
            Satisfies(
                is_layer_list, "give a list of (features, (height, width)), such as [(32, (8, 6))], or None"
            ),
            "features and their size for each layer, from the image up; None: 32 of 8 x 6, with templates 8 "
            "of 3 x 3, or smaller",
        ),
        Parameter(
            "templates", None, Whole(1, also=(None,)),
            "templates per class, or clusters without labels; None: one layer without a class layer",
            later=True,
        ),
        Parameter(
            "pool", None,
            Satisfies(lambda v: v is None or is_odd_side(v), "give an odd number of at least 1, or None"),
            "side of the pools between layers in pixels, odd; None: 3, online without filters 3 or 1, "
            "whichever has fewer errors", later=True,
        ),
        _make_probability("p01", 1e-3, "probability that a pixel under a feature is 0", 0.5),
        _make_probability("p10", 1e-3, "probability that a pixel under no feature is 1", 0.5),
        Parameter(
            "p_weight",
            None,
            Items(
                Number("", above=0, below=1),
                "give a number in (0, 1), or one for each layer and the templates",
                one=True,
                also=(None,),
            ),
            "prior probability that a weight is on; None: 0.3; with templates 0.25, and 1e-20 for templates "
            "of stored messages",
        ),
        _make_probability("p_sparsity", 1e-4, "prior probability of a feature at a place, without templates"),
        Parameter(
            "online",
            None,
            Flag("give True, False or None", also=(None,)),
            "True: online learning; False: store the messages of all images; None: False for templates "
            "without labels",
        ),
        Parameter(
            "forgetting",
            0.98,
            Number("give a number in (0, 1]; 1 forgets nothing", above=0, most=1),
            "share of the evidence of earlier images that remains after a minibatch",
        ),
        _make_optional("batch_size", "images per minibatch; None: 5, or fewer for few images"),
        _make_optional(
            "n_epochs",
            "epochs; None: epochs that show at least 3,000 images, with templates 1,000; with stored "
            "messages 60 sweeps, with templates 300 passes",
            decides=False,
            changes_on_resume=True,
        ),
        Parameter(
            "damping",
            None,
            Number(
                "give a number in (0, 1]; 1 means no damping",
                above=0,
                most=1,
                also=(None,),
            ),
            "weight of a new message in the average of the new and the old message; None: 1, with templates "
            "0.2",
        ),
        Parameter(
            "inner_iterations", 5, Whole(), "passes over a minibatch, with templates", later=True
        ),
        Parameter(
            "template_passes", None, Whole(0, also=(None,)),
            "passes at the end that learn the templates again, each from an image of its class; None: 3, "
            "with stored messages 0", later=True,
        ),
        Parameter(
            "read_noise", None, Satisfies(is_noise_pair, "give (p01, p10), both in (0, 0.5), or None"),
            "with templates, p01 and p10 after learning; None: p01 and p10", later=True,
        ),
        Parameter("n_restarts", 1, Whole(), "number of fits; the one with the smallest compression is kept"),
        _make_optional("n_chains", "chains of minibatches per step; None: 1, or 8 from 10,000 images on"),
        _make_optional("chain_batches", "minibatches per chain; None: 1, or 10 from 10,000 images on"),
        _make_optional(
            "warmup_rows",
            "images that one chain learns before several chains learn in parallel; None: 4,000",
            0,
        ),
        Parameter(
            "threshold", None, Number("give a number, or None for pixels of 0 and 1", also=(None,)),
            "pixels above it are 1; with filters: smallest step in grey levels, None: 64",
        ),
        Parameter(
            "missing", None, Satisfies(is_missing_value, "give a number, NaN or None"),
            "value of unknown pixels",
        ),
        Parameter(
            "filters", None, Satisfies(is_filter_count, "give an even number of directions, or None"),
            "number of oriented filters, which make channels of grey images", later=True,
        ),
        Parameter(
            "filter_size", 3, Satisfies(is_odd_side, "give an odd number: a filter has a middle"),
            "side of a filter in pixels, odd", later=True,
        ),
        Parameter(
            "image_shape",
            None,
            Satisfies(is_shape, "give (height, width) or (channels, height, width), or None"),
            "shape of the images if rows are flat",
        ),
        _make_optional("patience", "end after this many epochs without a better validation result"),
        WARM_START,
        RANDOM_STATE,
        DEVICE,
        N_JOBS,
    ),
    rules=(_check_layers, _check_combinations),
    removed={"pool_spread": 0.9, "inner_rounds": 5, "n_candidates": 0},
)  # fmt: skip
