"""The order of rows in minibatch learning."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from scalelatent.kernels.streams import stream

from .grid import spaced

if TYPE_CHECKING:
    from scalelatent.data.dataset import Dataset

# Labels looked at by :func:`sortedness`: this many places of this many neighbours.
SAMPLED_PLACES, SAMPLED_ROWS = 64, 256
SORTED = 0.5

_Rows = TypeVar("_Rows", int, np.ndarray)
Permute = Callable[[int, int, int, int], np.ndarray]


@dataclass(frozen=True)
class RowOrder:
    """Which rows each chain of each step gets."""

    # The runs of an epoch, in their random order, are one long sequence of all rows. It is cut into a segment
    # for each chain, each segment into buffers whose rows are permuted, and batches are cut from what
    # results. Every row comes once an epoch; only the last step may have fewer rows, and these are spread
    # over the chains.

    n_rows: int
    seed: int
    batch_rows: int
    n_chains: int = 1
    run_rows: int = 1024
    buffer_runs: int = 16
    shuffle: bool = True
    # (rows, period): the last so many rows of each period are held out, and n_rows counts the others.
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
    def chosen(
        cls,
        n_rows: int,
        seed: int,
        batch_rows: int,
        n_chains: int,
        options: Mapping[str, Any],
        held: tuple[int, int] = (0, 1),
    ) -> RowOrder:
        """With the runs that ``[engine]`` asks for, or those that suit the rows."""
        buffer = int(options.get("buffer_runs") or cls.buffer_runs)
        # Few rows: shorter runs, so that each chain gets some from all over and permutes all it has.
        run = int(options.get("run_rows") or min(cls.run_rows, n_rows // (buffer * n_chains) + 1))
        return cls(n_rows, seed, batch_rows, n_chains, run, buffer, held=held)

    @property
    def n_steps(self) -> int:
        return -(-self.n_rows // self.batch_rows)

    @property
    def n_runs(self) -> int:
        """Runs of the dataset; the last may be shorter."""
        return -(-self.n_rows // self.run_rows)

    @property
    def chain_rows(self) -> int:
        """Rows of a chain in a step, but for the last step."""
        return self.batch_rows // self.n_chains

    @property
    def buffer_rows(self) -> int:
        """Rows that are permuted together."""
        return self.run_rows * self.buffer_runs

    def step_rows(self, step: int) -> int:
        """Rows of a step over all chains."""
        return min(self.batch_rows, self.n_rows - step * self.batch_rows)

    def segment(self, chain: int) -> tuple[int, int]:
        """(first place, rows) of a chain in the sequence of an epoch."""
        rest = self.step_rows(self.n_steps - 1)
        share, more = divmod(rest, self.n_chains)
        whole = (self.n_steps - 1) * self.chain_rows
        return chain * (whole + share) + min(chain, more), whole + share + (chain < more)

    def places(self, chain: int, first_step: int, last_step: int) -> tuple[int, int]:
        """Places (within the chain's segment) of the steps ``first_step:last_step``."""
        length = self.segment(chain)[1]
        return min(first_step * self.chain_rows, length), min(last_step * self.chain_rows, length)

    def rows(self, epoch: int, step: int, chain: int = 0) -> np.ndarray:
        """Return the row numbers of a chain in a step, in their order."""
        if not (0 <= step < self.n_steps and 0 <= chain < self.n_chains and epoch >= 0):
            raise IndexError(
                f"epoch {epoch}, step {step}, chain {chain}: there are {self.n_steps} steps of "
                f"{self.n_chains} chains"
            )
        return self.numbers(self.rows_at(epoch, chain, *self.places(chain, step, step + 1)))

    def rows_at(
        self, epoch: int, chain: int, first: int, last: int, permute: Permute | None = None
    ) -> np.ndarray:
        """Return the rows at the places ``first:last`` of a chain's segment, int64; held-out rows are not
        counted (see `numbers`).
        """
        begin, length = self.segment(chain)
        if not self.shuffle or first >= last:
            return np.arange(begin + first, begin + max(first, last), dtype=np.int64)
        size, parts = self.buffer_rows, []
        for low in range(first // size * size, last, size):
            permuted = (permute or permutation)(self.seed, epoch, begin + low, min(size, length - low))
            parts.append(permuted[max(first - low, 0) : last - low] + np.int64(begin + low))
        places, gap = np.concatenate(parts), self.n_runs * self.run_rows - self.n_rows
        runs, short = _runs(self.n_runs, self.seed, epoch)
        # As if the short run were whole: what comes after its end moves by what it lacks.
        places += gap * (places >= (short + 1) * self.run_rows - gap)
        return runs[places // self.run_rows] * self.run_rows + places % self.run_rows

    def runs_at(self, epoch: int, chain: int, first: int, last: int) -> np.ndarray:
        """Numbers of the runs that the buffers around the places ``first:last`` of a chain draw from."""
        begin, length = self.segment(chain)
        if first >= last:
            return np.zeros(0, dtype=np.int64)
        if not self.shuffle:
            return np.arange((begin + first) // self.run_rows, (begin + last - 1) // self.run_rows + 1)
        low = begin + first // self.buffer_rows * self.buffer_rows
        high = begin + min(-(-last // self.buffer_rows) * self.buffer_rows, length) - 1
        runs, short = _runs(self.n_runs, self.seed, epoch)
        gap = self.n_runs * self.run_rows - self.n_rows
        end = (short + 1) * self.run_rows - gap
        low, high = (place + gap * (place >= end) for place in (low, high))
        return runs[low // self.run_rows : high // self.run_rows + 1]

    def run_range(self, run: int) -> tuple[int, int]:
        """Return the rows ``(start, stop)`` of the dataset that a run lies in."""
        last = min((run + 1) * self.run_rows, self.n_rows) - 1
        return self.numbers(run * self.run_rows), self.numbers(last) + 1

    def numbers(self, rows: _Rows) -> _Rows:
        """Return the numbers in the dataset of rows that were counted without those held out."""
        spared, period = self.held
        return rows + spared * (rows // (period - spared)) if spared else rows


def held_rows(held: tuple[int, int], n_rows: int) -> np.ndarray:
    """Return the numbers of the rows of a dataset that an order with ``held`` leaves out, int64."""
    spared, period = held
    rows = np.arange(period - spared, n_rows, period)[:, None] + np.arange(spared)
    return rows[rows < n_rows]


@lru_cache(maxsize=4)
def _runs(n_runs: int, seed: int, epoch: int) -> tuple[np.ndarray, int]:
    """Runs of an epoch in their order, and where in it the last (short) run comes."""
    runs = stream(seed, "order-runs", epoch).permutation(n_runs)
    runs.flags.writeable = False
    return runs, int(np.flatnonzero(runs == n_runs - 1)[0])


def permutation(seed: int, epoch: int, place: int, size: int) -> np.ndarray:
    """Order of the rows of the buffer that begins at a place of the sequence, int32."""
    return stream(seed, "order-rows", epoch, place).permutation(size).astype(np.int32)


class Permutations:
    """:func:`permutation` that remembers the last few: steps in their order draw from one buffer for long."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._kept: OrderedDict[tuple[int, int, int, int], np.ndarray] = OrderedDict()

    def __call__(self, seed: int, epoch: int, place: int, size: int) -> np.ndarray:
        """As :func:`permutation`."""
        key = seed, epoch, place, size
        if key not in self._kept:
            while len(self._kept) >= self._size:
                self._kept.popitem(last=False)
            self._kept[key] = permutation(*key)
        self._kept.move_to_end(key)
        return self._kept[key]


def sortedness(dataset: Dataset) -> float:
    """How far the rows are sorted by label: 0 as in a random order, 1 where all of a class lie together."""
    n = len(dataset)
    if not dataset.has_y or n < 2:
        return 0.0
    parts = [dataset.read_y(a, b) for a, b in spaced(n, SAMPLED_PLACES * SAMPLED_ROWS, SAMPLED_PLACES)]
    if getattr(parts[0], "ndim", 2) != 1:
        return 0.0
    same = sum(int((y[1:] == y[:-1]).sum()) for y in parts) / (len(parts) * (len(parts[0]) - 1))
    _, counts = np.unique(np.concatenate(parts), return_counts=True)
    seen = counts.sum()
    by_chance = float((counts * (counts - 1)).sum() / (seen * (seen - 1)))
    # Where all labels were seen, sorted ones still have a border between classes.
    at_most = (seen - len(counts)) / (seen - 1) if len(parts) == 1 else 1.0
    if len(counts) == 1 or at_most <= by_chance:
        return 0.0
    return float(np.clip((same - by_chance) / (at_most - by_chance), 0.0, 1.0))


def warn_if_sorted(dataset: Dataset, order: RowOrder) -> float:
    """Warn where rows are sorted by label and the order of rows cannot make up for it."""
    if order.shuffle and order.buffer_rows >= order.segment(0)[1] and order.n_chains == 1:
        return 0.0
    value = sortedness(dataset)
    if value < SORTED:
        return value
    mixed = (
        f"a batch mixes {order.n_chains * order.buffer_runs} runs of {order.run_rows} rows"
        if order.shuffle
        else "shuffle=False visits them as they are"
    )
    wanted = max(2 * order.buffer_runs, 64)
    warnings.warn(
        f"{dataset.url or 'the rows'}: rows are sorted by label (sortedness {value:.2f} of 1) and {mixed}, "
        "so batches may hold few of the classes. Shuffle the dataset once (`scalelatent data shuffle IN OUT "
        f"--seed 0`, or --shuffle at its import), or mix more of it: buffer_runs={wanted} or more",
        UserWarning,
        stacklevel=2,
    )
    return value
