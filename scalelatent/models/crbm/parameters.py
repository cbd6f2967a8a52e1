"""Parameters of conditional RBMs, and what those stand for that are None."""

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
    from scalelatent.data import Dataset

    from .estimator import ConditionalRBM

LEARNERS = ("mle-bp", "mle-mf", "cd", "pcd", "cd-percloss", "mssvm", "lssvm", "logistic")
INFERENCES = ("sum-product", "mixed-product", "max-product", "mean-field")
# Inferences whose messages can be damped, and the learners that train by one of them.
DAMPED, DAMPED_LEARNERS = ("sum-product", "max-product"), ("mle-bp", "lssvm")
# Learners that alone use a parameter.
USERS = {"loss": ("mssvm", "lssvm"), "gibbs_steps": ("cd", "pcd", "cd-percloss")}
# Of first weights: eight deviations are what messages bear.
MOST_SCALE = 5.0
# Rows of a gradient where none are asked for.
BATCH_SIZE = 20
# Default schedule (rate, rows, epochs): so many epochs at a rate, more where these show fewer rows; the last
# rate goes on (measured on scikit-learn's digits).
RATES = ((0.2, 5_600, 4), (0.1, 4_200, 3), (0.05, 1, 1))
# Epochs of the paper, and at most by default.
PAPER_EPOCHS = 50
# Default epochs where nothing is validated: as many as show this many rows, and at least ten.
SEEN_ROWS, FEWEST_EPOCHS = 20_000, 10
# By default a fit ends when epochs that show 4,000 rows, and at least 3 epochs, have each had a validation
# error that is not lower by .5 % than the best before (measured on scikit-learn's digits).
PATIENCE_ROWS, PATIENCE, LEAST_GAIN = 4_000, 3, 0.005
# From 100 rows on every tenth row is held out by default. Where that would be more than 10,000 rows, or 256
# MiB, 64 runs that lie evenly in the dataset are held out, so that few of its chunks are read for them.
LEAST_ROWS, HELD_EVERY, MOST_HELD, HELD_BYTES, HELD_RUNS = 100, 10, 10_000, 2**28, 64
# Of few rows a chain reads parameters more than it computes; of a small batch two threads want a chain each.
CHAIN_ROWS, LEAST_CHAIN_ROWS, MOST_CHAINS, LOCAL_CHAINS = 20, 10, 8, 4


def batch_size(model: ConditionalRBM, n_rows: int | None = None) -> int:
    """Rows of a gradient: the parameter, or twenty, cut to what ``n_rows`` and ``n_chains`` allow."""
    if model.batch_size is not None:
        return int(model.batch_size)
    unit = 1 if model.local_steps else int(model.n_chains or 1)
    parts = int(model.local_steps) * int(model.n_chains or LOCAL_CHAINS) if model.local_steps else 1
    size = BATCH_SIZE if n_rows is None else min(BATCH_SIZE, n_rows // parts)
    return max(size // unit, 1) * unit


def stops_early(model: ConditionalRBM) -> bool:
    """Whether the fit ends when the validation error no longer falls; a plain RBM predicts nothing."""
    return model.n_epochs is None and model._source != "plain"


def choose_held_rows(model: ConditionalRBM, train: Dataset) -> tuple[int, int]:
    """(rows, period): these last rows of each period are held out where no validation rows are given."""
    n = len(train)
    if not stops_early(model) or n < LEAST_ROWS:
        return 0, 1
    most = min(MOST_HELD, HELD_BYTES // max(train.nbytes // n, 1))
    if n <= HELD_EVERY * most:
        return 1, HELD_EVERY
    return max(most // HELD_RUNS, 1), n // HELD_RUNS


def epochs_to_show(n_rows: int, shown: int, least: int) -> int:
    """Epochs over ``n_rows`` rows that show at least ``shown`` rows, from ``least`` to 50."""
    return min(max(-(-shown // n_rows), least), PAPER_EPOCHS)


def n_epochs(model: ConditionalRBM, n_rows: int, has_validation: bool) -> int:
    """Most epochs of a fit of ``n_rows`` rows: the parameter, 50, or fewer where nothing is validated."""
    if model.n_epochs == "paper" or (stops_early(model) and has_validation):
        return PAPER_EPOCHS
    if model.n_epochs is not None:
        return int(model.n_epochs)
    return epochs_to_show(n_rows, SEEN_ROWS, FEWEST_EPOCHS)


def n_chains(model: ConditionalRBM, n_rows: int | None = None) -> int:
    """Chains of a step: the parameter, or about one for twenty rows of a batch (of local steps 4)."""
    if model.n_chains is not None:
        return int(model.n_chains)
    if model.local_steps:
        return LOCAL_CHAINS
    size = batch_size(model, n_rows)
    most = min(max(size // CHAIN_ROWS, min(size // LEAST_CHAIN_ROWS, 2), 1), MOST_CHAINS)
    return next(chains for chains in range(most, 0, -1) if size % chains == 0)


def step_rows(model: ConditionalRBM, n_rows: int) -> int:
    """Rows of a step over all chains."""
    size = batch_size(model, n_rows)
    return size * int(model.local_steps) * n_chains(model, n_rows) if model.local_steps else size


def is_rates(value: Any) -> bool:
    """Whether this is None, a learning rate, or a schedule of pairs (rate, epochs)."""
    if value is None:
        return True
    if not is_list(value):
        return is_number(value) and value > 0
    pairs = [tuple(pair) if is_list(pair) else () for pair in value]
    fits = all(len(pair) == 2 and is_number(pair[0]) and pair[0] > 0 and is_whole(pair[1]) for pair in pairs)
    return fits and bool(pairs)


def _check_corruption(model: ConditionalRBM) -> None:
    if model.corruption is not None and not model.conditional:
        raise ValueError(
            "conditional=False has no x to corrupt, but corruption is set: leave one of the two out"
        )


def _check_used(model: ConditionalRBM) -> None:
    """Refuse what is set for other learners: it would change nothing."""
    hamming = isinstance(model.loss, str) and model.loss == "hamming"
    for name, is_set in (("loss", not hamming), ("gibbs_steps", model.gibbs_steps is not None)):
        if is_set and model.learner not in USERS[name]:
            raise ValueError(
                f"{name} is set, but learner={model.learner!r} does not use it: leave {name} out, or choose "
                f"one of {', '.join(map(repr, USERS[name]))}"
            )
    if model.damping != 1 and model.learner not in DAMPED_LEARNERS and model.inference not in DAMPED:
        raise ValueError(
            f"damping is set, but learner={model.learner!r} with inference={model.inference!r} does not use "
            f"it: leave it out, or choose inference={' or '.join(map(repr, DAMPED))}"
        )


def _check_chains(model: ConditionalRBM) -> None:
    size, chains = batch_size(model), n_chains(model)
    if not model.local_steps and size % chains:
        raise ValueError(
            f"batch_size={size} is not a multiple of n_chains={chains}: set batch_size to "
            f"{max(size // chains, 1) * chains}"
        )


def _optional(name: str, doc: str) -> Parameter:
    return Parameter(name, None, Whole(also=(None,)), doc)


PARAMETERS = Parameters(
    (
        Parameter("n_hidden", 256, Whole(), "hidden units"),
        Parameter("learner", "mle-bp", Choice(LEARNERS), "stands for the intractable expectation"),
        Parameter("inference", None, Choice((None, *INFERENCES)), "predicts; None: the learner's own"),
        _optional("n_sweeps", "sweeps of an inference; None: 7 + epoch"),
        Parameter(
            "tol",
            None,
            Number("give a number above 0, or None for a fixed number of sweeps", above=0, also=(None,)),
            "ends the sweeps of a row when no belief moved by more",
        ),
        Parameter(
            "damping",
            1.0,
            Number("give a number in (0, 1], the weight of new messages; 1 is none", above=0, most=1),
            "weight of new messages",
            later=True,
        ),
        _optional("gibbs_steps", "k of the Gibbs learners"),
        Parameter("loss", "hamming", Anything(), "what wrong outputs cost the maximum-margin learners"),
        Parameter(
            "learning_rate",
            None,
            Satisfies(
                is_rates,
                "give a number above 0, or a schedule of pairs (rate, epochs) such as [(0.05, 30), (0.01, "
                "20)], or None",
            ),
            "of the mean gradient of a batch, or pairs (rate, epochs); None: .2, falling to .05",
            decides=False,
            changes_on_resume=True,
        ),
        Parameter("momentum", 0.0, Number("give a number in [0, 1)", least=0, below=1), "of the gradient"),
        Parameter(
            "weight_decay",
            0.0,
            Number("give a finite number of at least 0", least=0),
            "of the three matrices",
        ),
        _optional("batch_size", "rows of a gradient; None: 20"),
        Parameter(
            "n_epochs",
            None,
            Whole(also=(None, "paper"), give="give a whole number of at least 1, 'paper' (50), or None"),
            "passes over the rows; None: until validation rows, or a held-out tenth, no longer gain",
            decides=False,
            changes_on_resume=True,
        ),
        _optional("n_chains", "independent parts of a batch"),
        _optional("local_steps", "steps that chains take by themselves before they are averaged"),
        _optional("patience", "ends after so many epochs without a better validation error"),
        Parameter(
            "init_scale",
            0.01,
            Number(
                f"give a number from 0 to {MOST_SCALE:g}; messages in float32 do not bear larger first "
                "weights",
                least=0,
                most=MOST_SCALE,
            ),
            "deviation of the first W and Whx",
        ),
        Parameter(
            "conditional",
            True,
            Flag("give True, or False for a plain RBM"),
            "False: a plain RBM of the rows",
            later=True,
        ),
        Parameter("corruption", None, Anything(), "inputs are made of clean rows, in each epoch"),
        WARM_START,
        RANDOM_STATE,
        DEVICE,
        N_JOBS,
    ),
    rules=(_check_corruption, _check_used, _check_chains),
)
