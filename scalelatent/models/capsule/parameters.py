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

MAX_PASSES = 2000
ONLINE = ("stepwise", "incremental", "passive_aggressive")


def algorithm_of(model: CapsuleRegression) -> str:
    """The algorithm: the parameter, or batch EM where its number of passes is given, else stepwise EM."""
    return model.algorithm or ("stepwise" if model.max_iter is None else "em")


def max_passes(model: CapsuleRegression) -> int:
    """Largest number of passes of batch EM."""
    return MAX_PASSES if model.max_iter is None else int(model.max_iter)


def is_schedule(value: Any) -> bool:
    """Whether this is "paper", None or rounds (nu, patience)."""
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


def _check_device(model: CapsuleRegression) -> None:
    if model.algorithm == "passive_aggressive" and model.device == "gpu":
        raise ValueError(
            "device='gpu': algorithm='passive_aggressive' goes row by row and runs on the processor; leave "
            "device='auto', or use algorithm='stepwise'"
        )


PARAMETERS = Parameters(
    (
        Parameter(
            "capsule_dim",
            None,
            Items(Whole(), "dimensions are whole numbers of at least 1", one=True, also=(None,)),
            "dimension of the capsules, or one for each class",
        ),
        Parameter(
            "architecture",
            "multiclass",
            Choice(("multiclass", "one_vs_all", "all_vs_all")),
            "one model, or binary models for each class or each pair",
        ),
        Parameter("algorithm", None, Choice((None, "em", *ONLINE)), "how it learns"),
        Parameter(
            "projection",
            "auto",
            Whole(also=("auto", None), give="give 'auto', None or a number of directions, at least 1"),
            "principal directions that rows are reduced to first",
        ),
        Parameter("fit_intercept", True, Flag(), "subtract the mean and fit a constant"),
        Parameter("init", "subspace", Choice(("subspace", "random")), "first weights"),
        Parameter(
            "init_scale", 1.0, Number("give a number above 0", above=0), "deviation of random first weights"
        ),
        Parameter("momentum", 0.9, Number("give a number in [0, 1)", least=0, below=1), "gamma of the paper"),
        Parameter(
            "nu_schedule",
            "paper",
            Satisfies(
                is_schedule,
                "give 'paper', None (plain EM), or pairs (nu, patience) with 0 <= nu < 1 and patience >= 1",
            ),
            "rounds (nu, patience) of thresholded EM",
        ),
        Parameter("max_iter", None, Whole(also=(None,)), "most passes of batch EM"),
        Parameter("n_epochs", None, Whole(also=(None,)), "most passes of the online algorithms"),
        Parameter("batch_rows", None, Whole(also=(None,)), "rows of a step"),
        Parameter("n_chains", 4, Whole(), "independent parts of a step"),
        Parameter(
            "kappa",
            0.6,
            Number("give a number in [0, 1]; 0 keeps the step size", least=0, most=1),
            "stepwise EM: step sizes (1 + t / t0) ** -kappa",
        ),
        Parameter("t0", 1000.0, Number("give a number above 0", above=0), "see kappa"),
        Parameter(
            "aggressiveness", 1.0, Number("give a number above 0", above=0), "C of passive-aggressive steps"
        ),
        Parameter(
            "tol",
            None,
            Number("give a number of at least 0, or None", least=0, also=(None,)),
            "ends a round when the log-loss falls by less",
        ),
        Parameter(
            "ridge",
            None,
            Number("give a number of at least 0, or None", least=0, also=(None,)),
            "rho, on second moments",
        ),
        Parameter(
            "temperature",
            None,
            Number("give a number above 0, or None to choose it", above=0, also=(None,)),
            "of class probabilities",
        ),
        Parameter("class_weight", None, Anything(), "weights of classes, or 'balanced'"),
        WARM_START,
        RANDOM_STATE,
        DEVICE,
        N_JOBS,
    ),
    rules=(_check_chains, _check_device),
)
