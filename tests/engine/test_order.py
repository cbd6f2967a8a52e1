"""The order of rows has every row once per epoch, and depends on its parameters and the epoch alone."""

from __future__ import annotations

import tracemalloc
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalelatent.data import Dataset
from scalelatent.engine import order as module
from scalelatent.engine.order import RowOrder, held_rows, measure_sortedness, warn_if_sorted


@st.composite
def draw_orders(draw: st.DrawFn) -> RowOrder:
    chains = draw(st.integers(1, 6))
    return RowOrder(
        n_rows=draw(st.integers(1, 400)),
        seed=draw(st.integers(0, 3)),
        batch_rows=chains * draw(st.integers(1, 40)),
        n_chains=chains,
        run_rows=draw(st.integers(1, 50)),
        buffer_runs=draw(st.integers(1, 5)),
        shuffle=draw(st.booleans()),
        held=draw(st.sampled_from([(0, 1), (1, 2), (1, 10), (3, 20), (7, 8)])),
    )


@given(draw_orders(), st.integers(0, 3))
def test_every_row_comes_once_per_epoch(order: RowOrder, epoch: int) -> None:
    rows = [order.rows(epoch, s, c) for s in range(order.n_steps) for c in range(order.n_chains)]
    assert all(r.dtype == np.int64 for r in rows)
    spared, period = order.held
    learned = [row for row in range(8 * order.n_rows) if row % period < period - spared]
    np.testing.assert_array_equal(np.sort(np.concatenate(rows)), learned[: order.n_rows])
    n = order.to_dataset_rows(order.n_rows - 1) + 1
    assert sorted([*learned[: order.n_rows], *held_rows(order.held, n)]) == list(range(n))


@given(draw_orders(), st.integers(0, 3))
def test_batches_are_full_except_the_last_whose_rows_spread_over_chains(order: RowOrder, epoch: int) -> None:
    for step in range(order.n_steps):
        sizes = [len(order.rows(epoch, step, c)) for c in range(order.n_chains)]
        assert sum(sizes) == order.step_rows(step)
        if step < order.n_steps - 1:
            assert set(sizes) == {order.chain_rows}
        else:
            assert 1 <= sum(sizes) <= order.batch_rows
            assert max(sizes) - min(sizes) <= 1


@given(draw_orders(), st.integers(0, 3), st.data())
def test_random_access_to_steps_equals_a_scan(order: RowOrder, epoch: int, data: st.DataObject) -> None:
    chain = data.draw(st.integers(0, order.n_chains - 1))
    whole = order.rows_at(epoch, chain, 0, order.locate_chain(chain)[1])
    first = data.draw(st.integers(0, order.n_steps - 1))
    last = data.draw(st.integers(first, order.n_steps))
    a, b = order.places(chain, first, last)
    np.testing.assert_array_equal(order.rows_at(epoch, chain, a, b), whole[a:b])


@given(draw_orders(), st.integers(0, 3))
def test_rows_of_a_step_are_in_its_row_ranges(order: RowOrder, epoch: int) -> None:
    for chain in range(order.n_chains):
        for step in range(order.n_steps):
            rows = order.rows(epoch, step, chain)
            runs = order.runs_at(epoch, chain, *order.places(chain, step, step + 1))
            ranges = [order.bounds_of_run(run) for run in runs.tolist()]
            assert all(any(a <= row < b for a, b in ranges) for row in rows)
            if order.shuffle and len(rows):
                # The rows of a step are in at most this number of buffers. A buffer has whole ranges of rows,
                # except for a cut range at each end.
                buffers = -(-len(rows) // order.buffer_rows) + 1
                assert len(set(runs.tolist())) <= buffers * (order.buffer_runs + 2)
    end = order.to_dataset_rows(order.n_rows - 1) + 1
    assert all(0 <= a < b <= end for a, b in map(order.bounds_of_run, range(order.n_runs)))


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    def of(seed: int, epoch: int) -> list[int]:
        module._shuffle_runs.cache_clear()
        return RowOrder(1000, seed, 1000, run_rows=50, buffer_runs=4).rows(epoch, 0).tolist()

    assert of(0, 0) == of(0, 0)
    assert len({tuple(of(*key)) for key in ((0, 0), (0, 1), (1, 0), (1, 1))}) == 4


def test_the_order_never_changes_between_versions() -> None:
    """The numbers are those of the first release, because later versions resume stored runs."""
    order = RowOrder(23, seed=7, batch_rows=8, n_chains=2, run_rows=4, buffer_runs=2)
    assert [order.rows(1, s, c).tolist() for s in range(3) for c in range(2)] == FIRST_RELEASE


FIRST_RELEASE = [[16, 3, 20, 0], [15, 11, 14, 4], [2, 1, 21, 22], [8, 10, 13, 9], [18, 19, 12, 17], [7, 6, 5]]


def test_a_batch_has_few_neighbouring_rows() -> None:
    """A batch has rows from all ranges of a buffer, and a buffer has ranges from the whole dataset."""
    order = RowOrder(2**20, seed=0, batch_rows=256)
    rows = order.rows(0, 5)
    runs, counts = np.unique(rows // 1024, return_counts=True)
    assert len(runs) == 16
    assert counts.max() < 40  # The mean of the counts is 16.
    places = np.sort(np.unique(order.rows_at(0, 0, 0, 2**20)[: 2**14] // 1024))
    assert places.std() > 200  # Uniform draws of 1,024 ranges have a standard deviation of 296.
    assert (np.diff(rows) == 1).mean() < 0.02


def test_the_first_and_the_last_row_are_early_as_often_as_late() -> None:
    """The mean position of each of the two rows over 600 epochs is near the middle."""
    order = RowOrder(330, seed=0, batch_rows=330, run_rows=32, buffer_runs=2)
    for row in (0, 329):
        places = [int(np.flatnonzero(order.rows(e, 0) == row)[0]) for e in range(600)]
        assert abs(np.mean(places) - 164.5) < 4 * 330 / np.sqrt(12 * 600)


def test_a_step_of_a_billion_rows_is_cheap() -> None:
    """The order needs memory only for its ranges of rows, and computes any step without the steps before."""
    import time

    order = RowOrder(10**9, seed=0, batch_rows=4096, n_chains=4)
    module._shuffle_runs.cache_clear()
    tracemalloc.start()
    order.rows(3, 200_000, 2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * 8 * order.n_runs + 2**20
    begin = time.perf_counter()
    for step in range(0, 200_000, 10_000):
        order.rows(3, step, 1)
    assert (time.perf_counter() - begin) / 20 < 0.02


def test_without_shuffling_rows_keep_their_order() -> None:
    order = RowOrder(10, seed=0, batch_rows=4, n_chains=2, shuffle=False)
    assert [order.rows(e, s, 0).tolist() for e in range(2) for s in range(3)] == [[0, 1], [2, 3], [4]] * 2
    assert [order.rows(0, s, 1).tolist() for s in range(3)] == [[5, 6], [7, 8], [9]]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"n_rows": 0}, "n_rows=0: give a whole number of at least 1"),
        ({"batch_rows": 0}, "batch_rows=0"),
        ({"n_chains": 0}, "n_chains=0"),
        ({"run_rows": -1}, "run_rows=-1"),
        ({"buffer_runs": 0}, "buffer_runs=0"),
        (
            {"batch_rows": 10, "n_chains": 4},
            "batch_rows=10 is not a multiple of n_chains=4: set batch_rows to 12",
        ),
    ],
)
def test_invalid_sizes_of_an_order_are_refused(options: dict[str, int], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        RowOrder(**{"n_rows": 10, "seed": 0, "batch_rows": 2, **options})


@pytest.mark.parametrize("place", [(0, 5, 0), (0, -1, 0), (0, 0, 2), (-1, 0, 0)])
def test_a_step_beyond_the_last_is_refused(place: tuple[int, int, int]) -> None:
    with pytest.raises(IndexError, match="there are 5 steps of 2 chains"):
        RowOrder(10, 0, 2, n_chains=2).rows(*place)


# -- detection of sorted datasets ----------------------------------------------------------------------------


def make_labelled_rows(y: np.ndarray) -> Dataset:
    return Dataset.from_arrays(np.zeros((len(y), 1), "u1"), y)


@pytest.mark.parametrize("n", [50, 5000, 200_000])
@pytest.mark.parametrize("names", [False, True])
def test_sortedness_of_sorted_and_shuffled_labels(n: int, names: bool) -> None:
    rng = np.random.Generator(np.random.Philox(0))
    y = rng.choice(10, n, p=np.arange(1, 11) / 55)
    y = np.array([f"class {i}" for i in range(10)])[y] if names else y
    assert measure_sortedness(make_labelled_rows(y)) < (0.3 if n == 50 else 0.05)
    assert measure_sortedness(make_labelled_rows(np.sort(y))) > 0.95
    assert measure_sortedness(make_labelled_rows(np.sort(y)[::-1])) > 0.95


def test_sortedness_of_rows_that_are_partly_sorted() -> None:
    rng = np.random.Generator(np.random.Philox(0))
    y = np.sort(rng.integers(0, 4, 100_000))
    loose = np.where(rng.random(len(y)) < 0.5, rng.integers(0, 4, len(y)), y)
    assert 0.1 < measure_sortedness(make_labelled_rows(loose)) < 0.5


@pytest.mark.parametrize(
    "y", [None, np.zeros(100, int), np.arange(100)], ids=["none", "one class", "targets"]
)
def test_sortedness_is_zero_for_labels_without_order(y: np.ndarray | None) -> None:
    assert measure_sortedness(Dataset.from_arrays(np.zeros((100, 1)), y)) == 0.0


def test_sortedness_reads_few_labels_and_no_rows() -> None:
    looked = []

    class Watched:
        has_y, url = True, None

        def __len__(self) -> int:
            return 10**9

        def read_y(self, a: int, b: int) -> np.ndarray:
            looked.append(b - a)
            return np.full(b - a, a > 5 * 10**8)

    assert measure_sortedness(Watched()) == 1.0
    assert sum(looked) < 20_000


def test_a_sorted_dataset_gives_a_warning() -> None:
    rows = make_labelled_rows(np.repeat([0, 1, 2], 3000))
    order = RowOrder(9000, 0, 100, run_rows=100, buffer_runs=4)
    match = (
        r"sorted by label \(sortedness 1.00 of 1\).*mixes 4 runs of 100 rows.*"
        r"`scalelatent data shuffle IN OUT --seed 0`.*buffer_runs=64"
    )
    with pytest.warns(UserWarning, match=match):
        assert warn_if_sorted(rows, order) == 1.0
    with pytest.warns(UserWarning, match="shuffle=False keeps this order"):
        warn_if_sorted(rows, RowOrder(9000, 0, 100, shuffle=False))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert warn_if_sorted(rows, RowOrder(9000, 0, 100)) == 0.0  # One buffer mixes all rows.
        assert warn_if_sorted(make_labelled_rows(np.arange(9000) % 3), order) == 0.0
