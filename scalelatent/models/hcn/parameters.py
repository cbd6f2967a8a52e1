"""Parameters of hierarchical compositional networks, and what those stand for that are None."""

from __future__ import annotations

from typing import Any

from scalelatent.contract.parameters import (
    DEVICE,
    N_JOBS,
    RANDOM_STATE,
    WARM_START,
    Flag,
    Number,
    Parameter,
    Parameters,
    Where,
    Whole,
    is_list,
    is_number,
    is_whole,
)

# From so many images on a step has several chains of several minibatches, after a warm-up.
MANY_ROWS, CHAINS, CHAIN_BATCHES, WARMUP_ROWS = 10_000, 8, 10, 4_000
# Images that a fit sees where no epochs are given, and sweeps of a batch fit.
SEEN_ROWS, SWEEPS = 3_000, 60


def is_layer(value: Any) -> bool:
    """Whether this is (features, (h, w))."""
    if not is_list(value) or len(value) != 2 or not is_whole(value[0]):
        return False
    return is_list(value[1]) and len(value[1]) == 2 and all(map(is_whole, value[1]))


def is_layers(value: Any) -> bool:
    """Whether this is a list of layers."""
    return is_list(value) and len(value) > 0 and all(map(is_layer, value))


def is_shape(value: Any) -> bool:
    """Whether this is None, (h, w) or (channels, h, w)."""
    return value is None or (is_list(value) and len(value) in (2, 3) and all(map(is_whole, value)))


def is_pixel(value: Any) -> bool:
    """Whether this is None, or a number that a pixel may be."""
    return value is None or is_number(value) or (isinstance(value, float) and value != value)


def n_chains(model: Any, n_rows: int) -> int:
    """Chains (batch: leaves) of a step: the parameter, or 1 of few images and 8 of many."""
    return int(model.n_chains or (CHAINS if n_rows >= MANY_ROWS else 1))


def chain_batches(model: Any, n_rows: int) -> int:
    """Minibatches that a chain takes: the parameter, or 1 of few images and 10 of many."""
    return int(model.chain_batches or (CHAIN_BATCHES if n_rows >= MANY_ROWS else 1))


def warmup_rows(model: Any, n_rows: int) -> int:
    """Images that come first, one minibatch a step."""
    if not model.online:
        return 0
    if model.warmup_rows is not None:
        return int(model.warmup_rows)
    serial = n_chains(model, n_rows) == chain_batches(model, n_rows) == 1
    return 0 if serial else min(WARMUP_ROWS, n_rows)


def n_epochs(model: Any, n_rows: int) -> int:
    """Epochs, or sweeps of a batch fit: the parameter, or as many as show 3,000 images, or 60."""
    if model.n_epochs is not None:
        return int(model.n_epochs)
    return max(1, -(-SEEN_ROWS // n_rows)) if model.online else SWEEPS


def _check_layers(model: Any) -> None:
    if len(model.layers) > 1:
        raise ValueError(
            f"layers has {len(model.layers)} entries: pooling between layers is not there yet, and neither "
            "are classes: give one (features, (h, w))"
        )


def _check_used(model: Any) -> None:
    """Refuse what is set for the other way of learning: it would change nothing."""
    if model.online and model.damping != 1:
        raise ValueError(
            f"damping={model.damping} is set, but online learning keeps no messages to damp: leave it out, "
            "or set online=False"
        )
    given = [name for name in ("chain_batches", "warmup_rows") if getattr(model, name) is not None]
    if not model.online and given:
        raise ValueError(f"{given[0]} is set, but belongs to online=True: leave it out")


def _optional(name: str, doc: str, least: int = 1, **more: Any) -> Parameter:
    return Parameter(name, None, Whole(least, also=(None,)), doc, **more)


def _chance(name: str, default: float, doc: str, below: float = 1.0) -> Parameter:
    give = f"give a number in (0, {below:g})"
    return Parameter(name, default, Number(give, above=0, below=below), doc)


PARAMETERS = Parameters(
    (
        Parameter(
            "layers",
            ((32, (8, 6)),),
            Where(is_layers, "give a list of (features, (height, width)), such as [(32, (8, 6))]"),
            "features and their size",
        ),
        _chance("p01", 1e-3, "chance that a pixel is 0 where a feature lies", 0.5),
        _chance("p10", 1e-3, "chance that a pixel is 1 where none does", 0.5),
        _chance("p_weight", 0.3, "prior chance of a pixel of a feature"),
        _chance("p_sparsity", 1e-4, "prior chance of a feature at a place"),
        Parameter("online", True, Flag(), "False: messages of all images are kept"),
        Parameter(
            "forgetting",
            0.98,
            Number("give a number in (0, 1], what is left of the evidence; 1 is all", above=0, most=1),
            "evidence that a minibatch leaves of those before",
        ),
        Parameter("batch_size", 5, Whole(), "images of a minibatch"),
        _optional(
            "n_epochs",
            "passes over the images, or sweeps of a batch fit; None: 3,000 images at least, 60 sweeps",
            decides=False,
            changes_on_resume=True,
        ),
        Parameter(
            "damping",
            1.0,
            Number("give a number in (0, 1], the weight of new messages; 1 is no damping", above=0, most=1),
            "weight of new messages of a batch fit",
        ),
        Parameter("n_restarts", 1, Whole(), "fits, of which the best by compression is kept"),
        _optional("n_chains", "chains of a step; None: 1, or 8 from 10,000 images on"),
        _optional("chain_batches", "minibatches of a chain; None: 1, or 10 from 10,000 images on"),
        _optional("warmup_rows", "images that come first, a minibatch a step; None: 4,000 before chains", 0),
        Parameter(
            "threshold", None, Number("give a number, or None for pixels of 0 and 1", also=(None,)),
            "pixels above it are 1",
        ),
        Parameter(
            "missing", None, Where(is_pixel, "give a number, NaN too, or None"), "value of unknown pixels"
        ),
        Parameter(
            "image_shape",
            None,
            Where(is_shape, "give (height, width) or (channels, height, width), or None"),
            "of flat rows",
        ),
        _optional("patience", "ends after so many epochs without better compression of validation rows"),
        WARM_START,
        RANDOM_STATE,
        DEVICE,
        N_JOBS,
    ),
    rules=(_check_layers, _check_used),
)  # fmt: skip
