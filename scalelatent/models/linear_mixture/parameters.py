"""Tables of the parameters of mixtures of linear models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scalelatent.contract.parameters import (
    DEVICE,
    N_JOBS,
    RANDOM_STATE,
    WARM_START,
    Choice,
    Items,
    Number,
    Parameter,
    Parameters,
    Satisfies,
    Whole,
    is_list,
    is_whole,
)

from .kernels.reference import TANGENTS
from .model.components import DENSITY_LIKELIHOODS, LIKELIHOODS

if TYPE_CHECKING:
    from .estimator import LinearMixtureClassifier
    from .settings import AnyMixture


def _are_tangents(value: Any) -> bool:
    return is_list(value) and len(set(value)) == len(value) and all(name in TANGENTS for name in value)


def _is_shape(value: Any) -> bool:
    return value is None or (is_list(value) and len(value) == 2 and all(map(is_whole, value)))


def _check_tangents(model: AnyMixture) -> None:
    if len(model.tangents) and model.likelihood in DENSITY_LIKELIHOODS:
        raise ValueError(
            f"likelihood={model.likelihood!r}: tangents are fitted with the reconstruction error; choose "
            "'error' or 'code-cost', or leave tangents out"
        )


def _check_steps(model: AnyMixture) -> None:
    if model.algorithm == "stepwise" and len(model.tangents) and model.tangent_weight:
        raise ValueError(
            f"tangent_weight={model.tangent_weight}: stepwise EM clusters without tangents; set "
            "tangent_weight=0, or choose algorithm='em'"
        )


def _check_recognition(model: LinearMixtureClassifier) -> None:
    if model.recognition == "tangent-distance" and not len(model.tangents):
        raise ValueError(
            "recognition='tangent-distance' needs tangents: set for example "
            "tangents=('shift-x', 'shift-y', 'rotation', 'scaling')"
        )


_NOT_NEGATIVE = Number("give a number of at least 0", least=0)


def _make_shared(components: Parameter, likelihood: Parameter) -> tuple[Parameter, ...]:
    return (
        components,
        Parameter("n_dims", None, Whole(0, also=(None,)), "directions of a component"),
        Parameter(
            "assignment",
            "hard",
            Choice(("hard", "soft")),
            "a row belongs to one component, or in part to each",
        ),
        likelihood,
        Parameter(
            "tangents",
            (),
            Satisfies(_are_tangents, f"give some of {', '.join(map(repr, TANGENTS))}, each once"),
            "small changes of an image that do not change its class",
        ),
        Parameter(
            "temperature",
            None,
            Number("give a number above 0, or None to estimate it", above=0, also=(None,)),
            "sigma² of soft assignments",
        ),
        Parameter(
            "noise_floor",
            1e-6,
            Number("give a number of at least 0", least=0),
            "smallest noise, as a share of the mean variance of a feature",
        ),
        Parameter("tangent_weight", 0.0, _NOT_NEGATIVE, "weight of tangents in clustering, relative to rows"),
        Parameter(
            "recognition_tangent_weight",
            0.3,
            _NOT_NEGATIVE,
            "weight of tangents in the final bases",
        ),
        Parameter("tangent_smoothing", 0.6, _NOT_NEGATIVE, "smoothing before derivatives, in pixels"),
        Parameter("smoothing", 0.0, _NOT_NEGATIVE, "smoothing of the rows, in pixels"),
        Parameter("algorithm", "em", Choice(("em", "stepwise")), "passes of EM, or steps after batches"),
        Parameter("max_iter", 30, Whole(), "most passes of EM after k-means"),
        Parameter(
            "tol",
            1e-3,
            Number("give a number of at least 0, or None", least=0, also=(None,)),
            "EM ends when its objective falls by a smaller share in a pass",
        ),
        Parameter("n_epochs", 3, Whole(), "passes of stepwise EM"),
        Parameter("batch_rows", None, Whole(also=(None,)), "rows of a step of stepwise EM"),
        Parameter(
            "image_shape",
            None,
            Satisfies(_is_shape, "give (height, width), or None for that of the dataset"),
            "height and width of the images",
        ),
    )


_LAST_PARAMETERS = (WARM_START, RANDOM_STATE, DEVICE, N_JOBS)

# Former parameters with their defaults. No other value of them lowered the error on held-out rows.
_REMOVED = {
    "max_dims": 40,
    "tangent_assignment": False,
    "projection": None,
    "init": "k-means++",
    "statistics": "auto",
    "n_chains": 4,
    "kappa": 0.7,
    "t0": 2.0,
}
# Former parameters that changed only the fit of a model, not the predictions of a fitted model.
_REMOVED_FROM_FIT = ("max_dims", "init", "statistics", "n_chains", "kappa", "t0")

PARAMETERS = Parameters(
    (
        *_make_shared(
            Parameter(
                "n_components",
                None,
                Items(
                    Whole(),
                    "give a whole number of at least 1, or one for each class",
                    one=True,
                    also=(None,),
                ),
                "components of each class, or one number for each class",
            ),
            Parameter(
                "likelihood",
                None,
                Choice((None, *LIKELIHOODS)),
                "score of a row under a component; None: error or factor-analysis, by cross-validation",
            ),
        ),
        Parameter(
            "recognition",
            "error",
            Choice(("error", "tangent-distance")),
            "score that classifies rows",
        ),
        *_LAST_PARAMETERS,
    ),
    rules=(_check_tangents, _check_steps, _check_recognition),
    removed={**_REMOVED, "n_candidates": 10},
    removed_from_fit=_REMOVED_FROM_FIT,
)
DENSITY_PARAMETERS = Parameters(
    (
        *_make_shared(
            Parameter("n_components", None, Whole(also=(None,)), "components"),
            Parameter("likelihood", "error", Choice(LIKELIHOODS), "score of a row under a component"),
        ),
        *_LAST_PARAMETERS,
    ),
    rules=(_check_tangents, _check_steps),
    removed=_REMOVED,
    removed_from_fit=_REMOVED_FROM_FIT,
)
