"""Parameters of capsule regression."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scalelatent.contract.parameters import (
    DEVICE,
    N_JOBS,
    RANDOM_STATE,
    WARM_START,
    Anything,
    Choice,
    Flag,
    Items,
    Number,
    Parameter,
    Parameters,
    Satisfies,
    Whole,
    is_list,
    is_number,
)

if TYPE_CHECKING:
    from .estimator import CapsuleRegression

# Largest number of passes of batch EM for max_iter=None.
MAX_PASSES = 2000
# Former values of ``algorithm``. Until version 0.3 they are accepted with a warning; the fit uses stepwise
# EM, which had the lower test error.
DEPRECATED_ALGORITHMS = ("incremental", "passive_aggressive")


def get_algorithm(model: CapsuleRegression) -> str:
    """Return the algorithm: the parameter, or batch EM if its number of passes is given, else stepwise EM."""
    if model.algorithm in DEPRECATED_ALGORITHMS:
        return "stepwise"
    return model.algorithm or ("stepwise" if model.max_iter is None else "em")


def get_max_passes(model: CapsuleRegression) -> int:
    """Return the largest number of passes of batch EM."""
    return MAX_PASSES if model.max_iter is None else int(model.max_iter)


def is_schedule(value: Any) -> bool:
    """Return True if the value is "paper", None or a list of rounds (nu, patience)."""
    if value is None or isinstance(value, str):
        return value in (None, "paper")
    return (
        is_list(value)
        and len(value) > 0
        and all(is_list(pair) and len(pair) == 2 and all(map(is_number, pair)) for pair in value)
        and all(0 <= nu < 1 <= patience for nu, patience in value)
    )


def _check_chains(model: CapsuleRegression) -> None:
    if model.batch_rows is not None and model.batch_rows % model.n_chains:
        raise ValueError(
            f"batch_rows={model.batch_rows} is not a multiple of n_chains={model.n_chains}: set batch_rows "
            f"to {-(-model.batch_rows // model.n_chains) * model.n_chains}"
        )


PARAMETERS = Parameters(
    (
        Parameter(
            "capsule_dim",
            None,
            Items(Whole(), "dimensions must be whole numbers of at least 1", one=True, also=(None,)),
            "dimension of the capsules, or one per class",
        ),
        Parameter(
            "architecture",
            None,
            Choice((None, "multiclass", "one_vs_all", "all_vs_all")),
            "one model, or a binary model per class or per pair of classes; none: a model per class if there "
            "are three or more",
        ),
        Parameter(
            "algorithm", None, Choice((None, "em", "stepwise", *DEPRECATED_ALGORITHMS)), "learning algorithm"
        ),
        Parameter(
            "projection",
            "auto",
            Whole(also=("auto", None), give="give 'auto', None or a number of directions, at least 1"),
            "number of principal directions to which rows are reduced first",
        ),
        Parameter("fit_intercept", True, Flag(), "subtract the mean of the rows and fit a constant"),
        Parameter("init", "subspace", Choice(("subspace", "random")), "start of the weights"),
        Parameter(
            "init_scale",
            1.0,
            Number("give a number above 0", above=0),
            "standard deviation of the latent means at a random start",
        ),
        Parameter(
            "momentum",
            0.9,
            Number("give a number in [0, 1)", least=0, below=1),
            "momentum, gamma of the paper",
        ),
        Parameter(
            "nu_schedule",
            "paper",
            Satisfies(
                is_schedule,
                "give 'paper', None (plain EM), or pairs (nu, patience) with 0 <= nu < 1 and patience >= 1",
            ),
            "rounds (nu, patience) of thresholded EM",
        ),
        Parameter("max_iter", None, Whole(also=(None,)), "largest number of passes of batch EM"),
        Parameter("n_epochs", None, Whole(also=(None,)), "largest number of passes of stepwise EM"),
        Parameter("batch_rows", None, Whole(also=(None,)), "rows per step of stepwise EM"),
        Parameter("n_chains", 4, Whole(), "number of independent parts of a step"),
        Parameter(
            "kappa",
            0.6,
            Number("give a number in [0, 1]; 0 keeps the step size", least=0, most=1),
            "stepwise EM: exponent of the step sizes (1 + t / t0) ** -kappa",
        ),
        Parameter(
            "t0",
            1000.0,
            Number("give a number above 0", above=0),
            "stepwise EM: steps after which the step size falls, see kappa",
        ),
        Parameter(
            "tol",
            None,
            Number("give a number of at least 0, or None", least=0, also=(None,)),
            "end a round if the log-loss falls by less",
        ),
        Parameter(
            "ridge",
            None,
            Number("give a number of at least 0, or None", least=0, also=(None,)),
            "added to the diagonal of the second moments",
        ),
        Parameter(
            "temperature",
            None,
            Number("give a number above 0, or None to choose it", above=0, also=(None,)),
            "temperature of the class probabilities",
        ),
        Parameter("class_weight", None, Anything(), "weights of the classes, or 'balanced'"),
        WARM_START,
        RANDOM_STATE,
        DEVICE,
        N_JOBS,
    ),
    rules=(_check_chains,),
    removed={"aggressiveness": 1.0},
    removed_from_fit=("aggressiveness",),
)
