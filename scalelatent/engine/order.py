"""Choose the rows of each minibatch in a random order that reads long contiguous ranges."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from scalelatent.kernels.streams import stream

from .grid import space_ranges

if TYPE_CHECKING:
    from scalelatent.data.dataset import Dataset

# :func:`measure_sortedness` reads the labels of this many ranges with this many rows each.
SAMPLED_PLACES, SAMPLED_ROWS = 64, 256
SORTED = 0.5  # a fit warns of rows whose sortedness by label is at least this

_Rows = TypeVar("_Rows", int, np.ndarray)
Permute = Callable[[int, int, int, int], np.ndarray]


@dataclass(frozen=True)
class RowOrder:
    """Rows of each chain (part of a minibatch) in each step, as a function of epoch, step and seed.

    1. Split the rows into *runs*, which are contiguous ranges of ``run_rows`` rows.
    2. Concatenate the runs of an epoch in random order.
    3. Split this sequence into one segment per chain, and each segment into buffers of ``buffer_runs`` runs.
    4. Permute the rows within each buffer.
    5. Take the rows of successive steps from the result. Every row occurs once per epoch; only the last step
       may have fewer rows, which are divided among the chains.
    """

    n_rows: int
    seed: int
    batch_rows: int
    n_chains: int = 1
    run_rows: int = 1024
    buffer_runs: int = 16
    shuffle: bool = True
    # (rows, period): of every ``period`` rows, the last ``rows`` rows are held out; ``n_rows`` excludes them.
    held: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        for name in ("n_rows", "batch_rows", "n_chains", "run_rows", "buffer_runs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: give a whole number of at least 1")
        if self.batch_rows % self.n_chains:
            raise ValueError(
                f"batch_rows={self.batch_rows} is not a multiple of n_chains={self.n_chains}: set batch_rows "
                f"to {-(-self.batch_rows // self.n_chains) * self.n_chains}"
            )

    @classmethod
    def choose(
        cls,
        n_rows: int,
        seed: int,
        batch_rows: int,
        n_chains: int,
        options: Mapping[str, Any],
        held: tuple[int, int] = (0, 1),
    ) -> RowOrder:
        """Return an order whose ``run_rows`` and ``buffer_runs`` are the user's ``options``, or defaults."""
        buffer = int(options.get("buffer_runs") or cls.buffer_runs)
        # With few rows, runs are shorter, so that each chain (part of a batch) has enough runs for a buffer.
        run = int(options.get("run_rows") or min(cls.run_rows, n_rows // (buffer * n_chains) + 1))
        return cls(n_rows, seed, batch_rows, n_chains, run, buffer, held=held)

    @property
    def n_steps(self) -> int:
        return -(-self.n_rows // self.batch_rows)

    @property
    def n_runs(self) -> int:
        """Number of runs (contiguous ranges of ``run_rows`` rows) of the dataset; the last may be shorter."""
        return -(-self.n_rows // self.run_rows)

    @property
    def chain_rows(self) -> int:
        """Number of rows of a chain (part of a minibatch) in every step except the last."""
        return self.batch_rows // self.n_chains

    @property
    def buffer_rows(self) -> int:
        """Number of rows of a buffer, within which rows are permuted."""
        return self.run_rows * self.buffer_runs

    def step_rows(self, step: int) -> int:
        """Return the number of rows of the minibatch of a step."""
        return min(self.batch_rows, self.n_rows - step * self.batch_rows)

    def locate_chain(self, chain: int) -> tuple[int, int]:
        """Return (first position, number of rows) of a chain's part of the shuffled rows of an epoch."""
        last_rows = self.step_rows(self.n_steps - 1)
        share, more = divmod(last_rows, self.n_chains)
        whole = (self.n_steps - 1) * self.chain_rows
        return chain * (whole + share) + min(chain, more), whole + share + (chain < more)

    def places(self, chain: int, first_step: int, last_step: int) -> tuple[int, int]:
        """Return (start, stop): positions of the rows of these steps in the shuffled rows of a chain."""
        length = self.locate_chain(chain)[1]
        return min(first_step * self.chain_rows, length), min(last_step * self.chain_rows, length)

    def rows(self, epoch: int, step: int, chain: int = 0) -> np.ndarray:
        """Return the dataset indices (int64) of the rows that one chain of a minibatch reads, in order."""
        if not (0 <= step < self.n_steps and 0 <= chain < self.n_chains and epoch >= 0):
            raise IndexError(
                f"epoch {epoch}, step {step}, chain {chain}: there are {self.n_steps} steps of "
                f"{self.n_chains} chains"
            )
        return self.to_dataset_rows(self.rows_at(epoch, chain, *self.places(chain, step, step + 1)))

    def rows_at(
        self, epoch: int, chain: int, first: int, last: int, permute: Permute | None = None
    ) -> np.ndarray:
        """Return row numbers (int64) at the positions ``first:last`` of a chain (part of each minibatch).

        The numbers do not count held-out rows; `to_dataset_rows` converts them to indices in the dataset.
        """
        begin, length = self.locate_chain(chain)
        if not self.shuffle or first >= last:
            return np.arange(begin + first, begin + max(first, last), dtype=np.int64)
        size, parts = self.buffer_rows, []
        for low in range(first // size * size, last, size):
            permuted = (permute or permutation)(self.seed, epoch, begin + low, min(size, length - low))
            parts.append(permuted[max(first - low, 0) : last - low] + np.int64(begin + low))
        places, gap = np.concatenate(parts), self.n_runs * self.run_rows - self.n_rows
        runs, short = _shuffle_runs(self.n_runs, self.seed, epoch)
        # The last run of the dataset is short; shift later positions as if this run had ``run_rows`` rows.
        places += gap * (places >= (short + 1) * self.run_rows - gap)
        return runs[places // self.run_rows] * self.run_rows + places % self.run_rows

    def runs_at(self, epoch: int, chain: int, first: int, last: int) -> np.ndarray:
        """Return the runs (ranges of rows) with positions ``first:last`` of a chain (part of minibatches)."""
        begin, length = self.locate_chain(chain)
        if first >= last:
            return np.zeros(0, dtype=np.int64)
        if not self.shuffle:
            return np.arange((begin + first) // self.run_rows, (begin + last - 1) // self.run_rows + 1)
        low = begin + first // self.buffer_rows * self.buffer_rows
        high = begin + min(-(-last // self.buffer_rows) * self.buffer_rows, length) - 1
        runs, short = _shuffle_runs(self.n_runs, self.seed, epoch)
        gap = self.n_runs * self.run_rows - self.n_rows
        end = (short + 1) * self.run_rows - gap
        low, high = (place + gap * (place >= end) for place in (low, high))
        return runs[low // self.run_rows : high // self.run_rows + 1]

    def bounds_of_run(self, run: int) -> tuple[int, int]:
        """Return (start, stop), the dataset's row numbers of a run (range of ``run_rows`` rows)."""
        last = min((run + 1) * self.run_rows, self.n_rows) - 1
        return self.to_dataset_rows(run * self.run_rows), self.to_dataset_rows(last) + 1

    def to_dataset_rows(self, rows: _Rows) -> _Rows:
        """Convert row indices that skip held-out rows to row indices of the dataset."""
        spared, period = self.held
        return rows + spared * (rows // (period - spared)) if spared else rows


def held_rows(held: tuple[int, int], n_rows: int) -> np.ndarray:
    """Return the indices (int64) of the held-out rows.

    ``held`` is (rows held out per period, rows in a period); they are the last rows of each period.
    """
    spared, period = held
    rows = np.arange(period - spared, n_rows, period)[:, None] + np.arange(spared)
    return rows[rows < n_rows]


@lru_cache(maxsize=4)
def _shuffle_runs(n_runs: int, seed: int, epoch: int) -> tuple[np.ndarray, int]:
    """Return all runs (ranges of rows) in random order, and the position of the last, shorter run."""
    runs = stream(seed, "order-runs", epoch).permutation(n_runs)
    runs.flags.writeable = False
    return runs, int(np.flatnonzero(runs == n_runs - 1)[0])


def permutation(seed: int, epoch: int, place: int, size: int) -> np.ndarray:
    """Return the random order (int32) of the rows of the buffer that starts at position ``place``."""
    return stream(seed, "order-rows", epoch, place).permutation(size).astype(np.int32)


def measure_sortedness(dataset: Dataset) -> float:
    """Return how far the rows are sorted by label, from 0 (random order) to 1 (each class contiguous)."""
    n = len(dataset)
    if not dataset.has_y or n < 2:
        return 0.0
    parts = [dataset.read_y(a, b) for a, b in space_ranges(n, SAMPLED_PLACES * SAMPLED_ROWS, SAMPLED_PLACES)]
    if getattr(parts[0], "ndim", 2) != 1:
        return 0.0
    same = sum(int((y[1:] == y[:-1]).sum()) for y in parts) / (len(parts) * (len(parts[0]) - 1))
    _, counts = np.unique(np.concatenate(parts), return_counts=True)
    total = counts.sum()
    by_chance = float((counts * (counts - 1)).sum() / (total * (total - 1)))
    # If all rows were read, even sorted rows have neighbours with different labels where a class ends.
    at_most = (total - len(counts)) / (total - 1) if len(parts) == 1 else 1.0
    if len(counts) == 1 or at_most <= by_chance:
        return 0.0
    return float(np.clip((same - by_chance) / (at_most - by_chance), 0.0, 1.0))


def warn_if_sorted(dataset: Dataset, order: RowOrder) -> float:
    """Return `measure_sortedness`, or 0 if ``order`` shuffles all rows; warn if sorted rows stay together."""
    if order.shuffle and order.buffer_rows >= order.locate_chain(0)[1] and order.n_chains == 1:
        return 0.0
    value = measure_sortedness(dataset)
    if value < SORTED:
        return value
    mixed = (
        f"a batch mixes {order.n_chains * order.buffer_runs} runs of {order.run_rows} rows"
        if order.shuffle
        else "shuffle=False keeps this order"
    )
    advised_runs = max(2 * order.buffer_runs, 64)
    warnings.warn(
        f"{dataset.url or 'the rows'}: rows are sorted by label (sortedness {value:.2f} of 1) and {mixed}, "
        "so batches may contain few of the classes. Shuffle the dataset once (`scalelatent data shuffle IN "
        f"OUT --seed 0`, or --shuffle at its import), or mix more runs: buffer_runs={advised_runs} or more",
        UserWarning,
        stacklevel=2,
    )
    return value
