"""Parameters of conditional RBMs, and the values that a fit uses for parameters that are None."""

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
# Learners that draw samples; only these learners accept the parameter ``gibbs_steps``.
SAMPLING_LEARNERS = ("cd", "pcd", "cd-percloss")
# Largest standard deviation of the initial weights. Inference in float32 needs |weights| of at most 40, which
# is eight times this number.
MAX_INIT_SCALE = 5.0
# Number of rows of a gradient for batch_size=None.
BATCH_SIZE = 20
# Learning rates for learning_rate=None, as (rate, rows, epochs): a fit uses a rate for as many epochs as
# process this number of rows, but at least this number of epochs and at most 50. It uses the last rate until
# its end. Measured on the digits of scikit-learn.
RATES = ((0.2, 5_600, 4), (0.1, 4_200, 3), (0.05, 1, 1))
# Number of epochs for n_epochs="paper" (Ping and Ihler, 2017), and upper bound for n_epochs=None.
PAPER_EPOCHS = 50
# With n_epochs=None, a fit without validation rows ends when it has processed 20,000 rows, after 10 to 50
# epochs: 50 for fewer than 100 rows, and fewer only for candidates of a search, which hold out no rows.
PROCESSED_ROWS, MIN_EPOCHS = 20_000, 10
# With validation rows, n_epochs=None and patience=None, each epoch should lower the best validation error by
# 0.5 %. After 4,000 rows and at least 3 epochs without such a fall, learning restarts from the best
# parameters at a lower rate. The fit ends if the error has not fallen by 0.5 % since the rate was last
# lowered. Measured on the digits of scikit-learn.
PATIENCE_ROWS, PATIENCE, MIN_GAIN = 4_000, 3, 0.005
# With at least 100 rows and n_epochs=None, a fit holds out every tenth row for validation. If a tenth is more
# than 10,000 rows or 256 MiB, it holds out that many in 64 evenly spaced ranges, so that it reads few chunks.
MIN_ROWS, HELD_PERIOD, MAX_HELD, HELD_BYTES, HELD_RANGES = 100, 10, 10_000, 2**28, 64
# A chain is a part of a batch. n_chains=None makes at most 8 chains; with local_steps it makes 4. A chain
# of fewer than 20 rows spends more time on reading parameters than on computing. A batch of 20 to 39 rows
# still has two chains of at least 10 rows, so that two threads have work.
CHAIN_ROWS, MIN_CHAIN_ROWS, MAX_CHAINS, LOCAL_CHAINS = 20, 10, 8, 4


def choose_batch_size(model: ConditionalRBM, n_rows: int | None = None) -> int:
    """Return ``batch_size``; None: 20, or another number if ``n_rows`` or a given ``n_chains`` needs it."""
    if model.batch_size is not None:
        return int(model.batch_size)
    unit = 1 if model.local_steps else int(model.n_chains or 1)
    parts = int(model.local_steps) * int(model.n_chains or LOCAL_CHAINS) if model.local_steps else 1
    size = BATCH_SIZE if n_rows is None else min(BATCH_SIZE, n_rows // parts)
    return max(size // unit, 1) * unit


def stops_early(model: ConditionalRBM) -> bool:
    """Return whether ``n_epochs`` is None: the validation error, if it is measured, decides when to stop."""
    return model.n_epochs is None


def choose_held_rows(model: ConditionalRBM, train: Dataset) -> tuple[int, int]:
    """Return (rows, period): the fit holds out the last ``rows`` of each ``period`` rows; (0, 1) for none."""
    n = len(train)
    if not stops_early(model) or n < MIN_ROWS:
        return 0, 1
    most = min(MAX_HELD, HELD_BYTES // max(train.nbytes // n, 1))
    if n <= HELD_PERIOD * most:
        return 1, HELD_PERIOD
    return max(most // HELD_RANGES, 1), n // HELD_RANGES


def count_epochs(n_rows: int, processed: int, least: int) -> int:
    """Return how many epochs of ``n_rows`` rows process ``processed`` rows, from ``least`` to 50."""
    return min(max(-(-processed // n_rows), least), PAPER_EPOCHS)


def choose_n_epochs(model: ConditionalRBM, n_rows: int, has_validation: bool) -> int:
    """Return the number of epochs of a fit of ``n_rows`` rows, or its upper bound if the fit stops early."""
    if model.n_epochs == "paper" or (stops_early(model) and has_validation):
        return PAPER_EPOCHS
    if model.n_epochs is not None:
        return int(model.n_epochs)
    return count_epochs(n_rows, PROCESSED_ROWS, MIN_EPOCHS)


def choose_n_chains(model: ConditionalRBM, n_rows: int | None = None) -> int:
    """Return the number of chains, ``n_chains``; None: 4 with local steps, else 1 to 8, one per 20 rows."""
    if model.n_chains is not None:
        return int(model.n_chains)
    if model.local_steps:
        return LOCAL_CHAINS
    size = choose_batch_size(model, n_rows)
    most = min(max(size // CHAIN_ROWS, min(size // MIN_CHAIN_ROWS, 2), 1), MAX_CHAINS)
    return next(chains for chains in range(most, 0, -1) if size % chains == 0)


def count_step_rows(model: ConditionalRBM, n_rows: int) -> int:
    """Return the rows of one step: a batch or, with ``local_steps``, all batches of all chains."""
    size = choose_batch_size(model, n_rows)
    return size * int(model.local_steps) * choose_n_chains(model, n_rows) if model.local_steps else size


def is_rates(value: Any) -> bool:
    """Return whether the value is None, a learning rate above 0, or a sequence of (rate, epochs)."""
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
            "conditional=False has no x to corrupt, but corruption is set: leave out one of the two"
        )


def _check_gibbs_steps(model: ConditionalRBM) -> None:
    if model.gibbs_steps is not None and model.learner not in SAMPLING_LEARNERS:
        raise ValueError(
            f"gibbs_steps is set, but learner={model.learner!r} does not use it: leave gibbs_steps out, or "
            f"choose one of {', '.join(map(repr, SAMPLING_LEARNERS))}"
        )


def _check_chains(model: ConditionalRBM) -> None:
    size, chains = choose_batch_size(model), choose_n_chains(model)
    if not model.local_steps and size % chains:
        raise ValueError(
            f"batch_size={size} is not a multiple of n_chains={chains}: set batch_size to "
            f"{max(size // chains, 1) * chains}"
        )


def _make_optional(name: str, doc: str) -> Parameter:
    return Parameter(name, None, Whole(also=(None,)), doc)


PARAMETERS = Parameters(
    (
        Parameter("n_hidden", 256, Whole(), "hidden units"),
        Parameter("learner", "mle-bp", Choice(LEARNERS), "how the intractable expectation is approximated"),
        Parameter(
            "inference",
            None,
            Choice((None, *INFERENCES)),
            "inference of predictions; None: the learner's own",
        ),
        _make_optional("n_sweeps", "sweeps of an inference; None: 7 + epoch"),
        Parameter(
            "tol",
            None,
            Number("give a number above 0, or None for a fixed number of sweeps", above=0, also=(None,)),
            "a row stops sweeping when no belief has changed by more",
        ),
        _make_optional("gibbs_steps", "Gibbs steps of the sampling learners"),
        Parameter(
            "learning_rate",
            None,
            Satisfies(
                is_rates,
                "give a number above 0, or a schedule of pairs (rate, epochs) such as [(0.05, 30), (0.01, "
                "20)], or None",
            ),
            "factor of the mean gradient of a batch, or pairs (rate, epochs); None: 0.2, falling to 0.05",
            decides=False,
            changes_on_resume=True,
        ),
        Parameter(
            "momentum", 0.0, Number("give a number in [0, 1)", least=0, below=1), "momentum of the steps"
        ),
        Parameter(
            "weight_decay",
            0.0,
            Number("give a finite number of at least 0", least=0),
            "decay of the three matrices",
        ),
        _make_optional("batch_size", "rows of a gradient; None: 20"),
        Parameter(
            "n_epochs",
            None,
            Whole(also=(None, "paper"), give="give a whole number of at least 1, 'paper' (50), or None"),
            "passes over the rows; None: until the error on validation rows, or on a held-out tenth, stops "
            "falling",
            decides=False,
            changes_on_resume=True,
        ),
        _make_optional("n_chains", "independent parts of a batch"),
        _make_optional("local_steps", "steps of each chain before the chains are averaged"),
        _make_optional("patience", "epochs without a better validation error that end the fit"),
        Parameter(
            "init_scale",
            0.01,
            Number(
                f"give a number from 0 to {MAX_INIT_SCALE:g}; larger initial weights are too large for "
                "messages in float32",
                least=0,
                most=MAX_INIT_SCALE,
            ),
            "standard deviation of the initial W and Whx",
        ),
        Parameter(
            "conditional",
            True,
            Flag("give True, or False for a plain RBM"),
            "False: a plain RBM of the rows",
            later=True,
        ),
        Parameter("corruption", None, Anything(), "corruption that makes the inputs from clean rows"),
        WARM_START,
        RANDOM_STATE,
        DEVICE,
        N_JOBS,
    ),
    rules=(_check_corruption, _check_gibbs_steps, _check_chains),
    removed={"damping": 1.0, "loss": "hamming"},
    removed_from_fit=("loss",),
)
