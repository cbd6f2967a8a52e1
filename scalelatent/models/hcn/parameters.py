"""Parameters of hierarchical compositional networks, and what those stand for that are None."""

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

# Defaults: features of a layer, their (height, width), and images of a minibatch.
N_FEATURES, WINDOW, BATCH_SIZE = 32, (8, 6), 5
# From so many images on a step has several chains of several minibatches, after a warm-up.
MANY_ROWS, CHAINS, CHAIN_BATCHES, WARMUP_ROWS = 10_000, 8, 10, 4_000
# Images that a fit sees where no epochs are given, and sweeps of a batch fit.
SEEN_ROWS, SWEEPS = 3_000, 60
# Of several layers with kept messages: passes of an attempt, after which another begins that would settle.
PASSES, ATTEMPTS = 300, 5
# Prior chance of a weight of one layer; of several that of features, and of templates.
ONE_LAYER, FEATURES, TEMPLATES = 0.3, 0.25, 1e-20
SEVERAL_DAMPING = 0.2


def is_layer(value: Any) -> bool:
    """Whether this is (features, (h, w)), or (features, side)."""
    if not is_list(value) or len(value) != 2 or not is_whole(value[0]):
        return False
    size = value[1]
    return is_whole(size) or (is_list(size) and len(size) == 2 and all(map(is_whole, size)))


def is_layers(value: Any) -> bool:
    """Whether this is None, or a list of layers."""
    return value is None or (is_list(value) and len(value) > 0 and all(map(is_layer, value)))


def is_shape(value: Any) -> bool:
    """Whether this is None, (h, w) or (channels, h, w)."""
    return value is None or (is_list(value) and len(value) in (2, 3) and all(map(is_whole, value)))


def is_pixel(value: Any) -> bool:
    """Whether this is None, or a number that a pixel may be."""
    return value is None or is_number(value) or (isinstance(value, float) and value != value)


def is_pool(value: Any) -> bool:
    """Whether this is the side of a pool, which has a middle."""
    return is_whole(value) and value % 2 == 1


def is_filters(value: Any) -> bool:
    """Whether this is None, or a number of directions of which each has its opposite."""
    return value is None or (is_whole(value) and value > 0 and value % 2 == 0)


def is_noise(value: Any) -> bool:
    """Whether this is None, or (p01, p10)."""
    return value is None or (
        is_list(value) and len(value) == 2 and all(is_number(p) and 0 < p < 0.5 for p in value)
    )


def default_layers(image: tuple[int, int, int]) -> list[tuple[int, tuple[int, int]]]:
    """Return one layer for images (channels, height, width): its features are cut to lower images, and are as
    much wider, up to the width of the image.
    """
    height = min(WINDOW[0], image[1])
    return [(N_FEATURES, (height, min(WINDOW[0] * WINDOW[1] // height, image[2])))]


def layer_sizes(
    model: HierarchicalCompositionalNetwork, image: tuple[int, int, int]
) -> list[tuple[int, tuple[int, int]]]:
    """(features, (height, width)) of each layer: the parameter, or what suits the images."""
    if model.layers is None:
        return default_layers(image)
    size: Any  # (height, width), or both in one
    found = []
    for n, size in model.layers:
        h, w = size if is_list(size) else (size, size)
        found.append((int(n), (int(h), int(w))))
    return found


def is_several(model: HierarchicalCompositionalNetwork) -> bool:
    """Whether there is a class layer, and so templates over the features."""
    return model.templates is not None


def is_online(model: HierarchicalCompositionalNetwork) -> bool:
    """Whether images are taken once: the parameter, or where there is one layer alone."""
    return not is_several(model) if model.online is None else bool(model.online)


def damping(model: HierarchicalCompositionalNetwork) -> float:
    """Weight of new messages: the parameter, or 1, and .2 between layers."""
    if model.damping is not None:
        return float(model.damping)
    return SEVERAL_DAMPING if is_several(model) else 1.0


def n_layers(model: HierarchicalCompositionalNetwork) -> int:
    """Number of layers of features."""
    return 1 if model.layers is None else len(model.layers)


def weight_priors(model: HierarchicalCompositionalNetwork) -> tuple[float, ...]:
    """Prior chance of a weight of each layer, of the templates last."""
    given: Any = model.p_weight
    n = n_layers(model) + is_several(model)
    if given is None:
        if not is_several(model):
            return (ONE_LAYER,)
        return *(FEATURES,) * (n - 1), TEMPLATES
    return tuple(map(float, given)) if is_list(given) else (float(given),) * n


def n_chains(model: HierarchicalCompositionalNetwork, n_rows: int) -> int:
    """Chains (batch: leaves) of a step: the parameter, or 1 of few images and 8 of many."""
    return int(model.n_chains or (CHAINS if n_rows >= MANY_ROWS else 1))


def chain_batches(model: HierarchicalCompositionalNetwork, n_rows: int) -> int:
    """Minibatches that a chain takes: the parameter, or 1 of few images and 10 of many."""
    return int(model.chain_batches or (CHAIN_BATCHES if n_rows >= MANY_ROWS else 1))


def batch_size(model: HierarchicalCompositionalNetwork, n_rows: int | None = None) -> int:
    """Images of a minibatch: the parameter, or five, cut to what ``n_rows`` allow all chains of a step."""
    if model.batch_size is not None:
        return int(model.batch_size)
    if n_rows is None or not is_online(model):
        return BATCH_SIZE
    return max(1, min(BATCH_SIZE, n_rows // (chain_batches(model, n_rows) * n_chains(model, n_rows))))


def warmup_rows(model: HierarchicalCompositionalNetwork, n_rows: int) -> int:
    """Images that come first, one minibatch a step."""
    if not is_online(model):
        return 0
    if model.warmup_rows is not None:
        return int(model.warmup_rows)
    serial = n_chains(model, n_rows) == chain_batches(model, n_rows) == 1
    return 0 if serial else min(WARMUP_ROWS, n_rows)


def n_epochs(model: HierarchicalCompositionalNetwork, n_rows: int) -> int:
    """Epochs, or sweeps of a batch fit: the parameter, or as many as show 3,000 images, or 60; of several
    layers 300.
    """
    if model.n_epochs is not None:
        return int(model.n_epochs)
    if is_online(model):
        # Of fewer images than a minibatch has, as many minibatches as of others.
        return -(-SEEN_ROWS // max(n_rows, BATCH_SIZE))
    return PASSES if is_several(model) else SWEEPS


def most_fits(model: HierarchicalCompositionalNetwork) -> int:
    """Fits of a fit: restarts, or attempts until one of several layers with kept messages settles."""
    if is_several(model) and not is_online(model) and model.n_epochs is None:
        return ATTEMPTS
    return int(model.n_restarts)


def _check_layers(model: HierarchicalCompositionalNetwork) -> None:
    n = n_layers(model)
    if n > 1 and not is_several(model):
        raise ValueError(
            f"layers has {n} entries, and over the last there is no class layer: set templates, to those of "
            "a class (without labels, to the number of clusters), or give one (features, (h, w))"
        )
    given: Any = model.p_weight
    if is_list(given) and len(given) != n + is_several(model):
        over = " and one for the templates" if is_several(model) else ""
        raise ValueError(
            f"p_weight={given!r} has {len(given)} entries: give a number, or one for each "
            f"of the {n} layers{over}"
        )


def _check_used(model: HierarchicalCompositionalNetwork) -> None:
    """Refuse what is set for the other way of learning: it would change nothing."""
    several, online = is_several(model), is_online(model)
    if online and not several and model.damping not in (None, 1):
        raise ValueError(
            f"damping={model.damping} is set, but online learning keeps no messages to damp: leave it out, "
            "or set online=False"
        )
    given = [name for name in ("chain_batches", "warmup_rows") if getattr(model, name) is not None]
    if not online and given:
        raise ValueError(f"{given[0]} is set, but belongs to online=True: leave it out")
    for name in ("pool", "inner_iterations", "template_passes", "read_noise"):
        if not several and getattr(model, name) != PARAMETERS[name].default:
            raise ValueError(
                f"{name} is set, but one layer without a class layer has no pools and no templates: set "
                "templates, or leave it out"
            )
    if model.filters is None and model.filter_size != PARAMETERS["filter_size"].default:
        raise ValueError(f"filter_size={model.filter_size} is set, but there are no filters: set filters")
    if model.filters is not None:
        if model.missing is not None:
            raise ValueError(f"missing={model.missing} is set, but filters look at grey values: leave it out")
        if model.threshold is not None and not 0 < model.threshold <= 255:
            raise ValueError(
                f"threshold={model.threshold}: filters are on from a step of so many grey levels: give a "
                "number in (0, 255]"
            )
        if not several:
            raise ValueError(f"filters={model.filters} is set, but belongs to several layers: set templates")
    if several and not online and model.inner_iterations != PARAMETERS["inner_iterations"].default:
        raise ValueError("inner_iterations is set, but belongs to online=True: leave it out")
    if several and model.n_restarts != 1:
        raise ValueError(
            f"n_restarts={model.n_restarts} is set, but it chooses by compression, which networks with "
            "templates do not have: leave it out (fits that do not settle begin again by themselves)"
        )


def _optional(name: str, doc: str, least: int = 1, **more: Any) -> Parameter:
    return Parameter(name, None, Whole(least, also=(None,)), doc, **more)


def _chance(name: str, default: float, doc: str, below: float = 1.0) -> Parameter:
    give = f"give a number in (0, {below:g})"
    return Parameter(name, default, Number(give, above=0, below=below), doc)


PARAMETERS = Parameters(
    (
        Parameter(
            "layers",
            None,
            Satisfies(
                is_layers, "give a list of (features, (height, width)), such as [(32, (8, 6))], or None"
            ),
            "features and their size, from the image up; None: 32 of 8 x 6, cut to the images",
        ),
        Parameter(
            "templates", None, Whole(1, also=(None,)),
            "of a class; without labels, clusters; None: one layer, without a class layer", later=True,
        ),
        Parameter(
            "pool", 3, Satisfies(is_pool, "give an odd number of at least 1: a pool has a middle"),
            "side of the pools between layers, in pixels", later=True,
        ),
        _chance("p01", 1e-3, "chance that a pixel is 0 where a feature lies", 0.5),
        _chance("p10", 1e-3, "chance that a pixel is 1 where none does", 0.5),
        Parameter(
            "p_weight",
            None,
            Items(
                Number("", above=0, below=1),
                "give a number in (0, 1), or one for each layer and the templates",
                one=True,
                also=(None,),
            ),
            "prior chance of a pixel of a feature; None: .3; of several layers .25, and of templates 1e-20",
        ),
        _chance("p_sparsity", 1e-4, "prior chance of a feature at a place, in one layer"),
        Parameter(
            "online",
            None,
            Flag("give True, False or None", also=(None,)),
            "False: messages of all images are kept; None: so with templates alone",
        ),
        Parameter(
            "forgetting",
            0.98,
            Number("give a number in (0, 1], what is left of the evidence; 1 is all", above=0, most=1),
            "evidence that a minibatch leaves of those before",
        ),
        _optional("batch_size", "images of a minibatch; None: 5, cut to the images"),
        _optional(
            "n_epochs",
            "passes over the images, or sweeps of a batch fit; None: 3,000 images at least, 60 sweeps, of "
            "several layers 300",
            decides=False,
            changes_on_resume=True,
        ),
        Parameter(
            "damping",
            None,
            Number(
                "give a number in (0, 1], the weight of new messages; 1 is no damping",
                above=0,
                most=1,
                also=(None,),
            ),
            "weight of new messages of a batch fit, and of those between layers; None: 1, between layers .2",
        ),
        Parameter(
            "inner_iterations", 15, Whole(), "passes up and down of a minibatch of several layers", later=True
        ),
        Parameter(
            "template_passes", 0, Whole(0),
            "passes in the end that learn templates afresh, each from an image of its class", later=True,
        ),
        Parameter(
            "read_noise", None, Satisfies(is_noise, "give (p01, p10), both in (0, 0.5), or None"),
            "p01 and p10 of images that are read after learning; None: those of learning", later=True,
        ),
        Parameter("n_restarts", 1, Whole(), "fits, of which the best by compression is kept"),
        _optional("n_chains", "chains of a step; None: 1, or 8 from 10,000 images on"),
        _optional("chain_batches", "minibatches of a chain; None: 1, or 10 from 10,000 images on"),
        _optional("warmup_rows", "images that come first, a minibatch a step; None: 4,000 before chains", 0),
        Parameter(
            "threshold", None, Number("give a number, or None for pixels of 0 and 1", also=(None,)),
            "pixels above it are 1; with filters: the least step of grey levels, None: 64",
        ),
        Parameter(
            "missing", None, Satisfies(is_pixel, "give a number, NaN too, or None"), "value of unknown pixels"
        ),
        Parameter(
            "filters", None, Satisfies(is_filters, "give an even number of directions, or None"),
            "oriented filters that make channels of grey images", later=True,
        ),
        Parameter(
            "filter_size", 3, Satisfies(is_pool, "give an odd number: a filter has a middle"),
            "side of a filter, in pixels", later=True,
        ),
        Parameter(
            "image_shape",
            None,
            Satisfies(is_shape, "give (height, width) or (channels, height, width), or None"),
            "of flat rows",
        ),
        _optional("patience", "ends after so many epochs without better compression of validation rows"),
        WARM_START,
        RANDOM_STATE,
        DEVICE,
        N_JOBS,
    ),
    rules=(_check_layers, _check_used),
    removed={"pool_spread": 0.9, "inner_rounds": 5, "n_candidates": 0},
)  # fmt: skip
