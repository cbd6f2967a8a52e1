"""The numba kernels of compositional networks give the bits of the reference kernels in numpy."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import get_ident

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from scalelatent.kernels.streams import stage_word
from scalelatent.models.hcn.kernels import reference
from scalelatent.models.hcn.kernels.cpu import placements, sweeps
from scalelatent.models.hcn.kernels.pixel_order import shuffled
from scalelatent.models.hcn.kernels.windows import count_pairs, message_starts
from tests.models.hcn.cases import draw_sweep, make_zero_messages

# Each case has the number of chains, images per chain, (channels, height, width) of images, (height, width)
# of features, and number of features. A chain is a sequence of images that a kernel processes independently.
SHAPES = [
    (1, 1, (1, 5, 5), (2, 3), 1),
    (2, 2, (1, 7, 6), (3, 2), 5),
    (1, 2, (3, 6, 7), (6, 7), 19),
    (1, 1, (16, 4, 5), (2, 2), 17),
    (1, 3, (1, 9, 8), (1, 1), 33),
    (1, 1, (1, 6, 9), (4, 5), 32),
]


# Mean beliefs of S (a feature is at a position). A kernel skips ranges of pairs (a position and a pixel of a
# feature) with low beliefs: none with the first value, some with the second, and most with the third.
MEAN_BELIEFS = [-300, -900, -2000]


@pytest.mark.parametrize("mean_belief", MEAN_BELIEFS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_sweep_gives_the_bits_of_the_reference(shape, mean_belief) -> None:
    evidence, order, s, w = draw_sweep(1, *shape, mean_belief)
    for _ in range(3):
        want_s, want_w = s.astype("f8"), w.astype("f8")
        reference.sweep(evidence, order, want_s, want_w)
        sweeps.sweep(evidence, order, s, w)
        assert_array_equal(s, want_s)
        assert_array_equal(w, want_w)


def check_messages(sweep, shape, damping, mean_belief) -> None:
    evidence, order, s, w = draw_sweep(2, *shape, mean_belief)
    want = [s.astype("f8"), w.astype("f8"), *make_zero_messages(evidence, w)]
    found = [s, w, *make_zero_messages(evidence, w)]
    for _ in range(5):
        moved = sweep(evidence, order, *found, damping)
        assert_array_equal(moved, reference.sweep_messages(evidence, order, *want, damping))
        for a, b in zip(found, want, strict=True):
            assert_array_equal(a, b)


@pytest.mark.parametrize(("damping", "mean_belief"), [*zip([1.0, 0.8, 0.3], MEAN_BELIEFS, strict=True)])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_sweep_with_messages_gives_the_bits_of_the_reference(shape, damping, mean_belief) -> None:
    check_messages(sweeps.sweep_messages, shape, damping, mean_belief)


def sweep_wrongly(evidence, order, s, w, to_s, to_w, held, damping) -> np.ndarray:
    """Update wrongly: the log odds of bits keep the contributions (messages) of the previous update."""
    held[...] = 0
    return sweeps.sweep_messages(evidence, order, s, w, to_s, to_w, held, damping)


def test_old_messages_to_weights_are_subtracted() -> None:
    with pytest.raises(AssertionError):
        check_messages(sweep_wrongly, SHAPES[1], 1.0, -900)


@pytest.mark.parametrize(("n_sweeps", "mean_belief"), [*zip([1, 10, 10], MEAN_BELIEFS, strict=True)])
@pytest.mark.parametrize("shape", SHAPES)
def test_decoding_gives_the_bits_of_the_reference(shape, n_sweeps, mean_belief) -> None:
    evidence, _, s, w = draw_sweep(3, *shape, mean_belief)
    order = shuffled(0, "test", 0, np.arange(len(s[0])), evidence[0, 0].size)
    want = s[0].astype("f8")
    moved = reference.decode_images(evidence[0], order, want, w[0] > 0, n_sweeps)
    assert_array_equal(sweeps.decode_images(evidence[0], order, s[0], w[0] > 0, n_sweeps), moved)
    assert_array_equal(s[0], want)


@pytest.mark.parametrize("shape", [*SHAPES[:4], (1, 2, (1, 4, 3), (1, 1), 33)])
def test_placements_give_the_bits_of_the_reference(shape) -> None:
    evidence, _, s, w = draw_sweep(4, *shape)
    placed, on = (s[0] > 100).astype("u1"), w[0] > 0
    assert_array_equal(placements.cover(placed, on), reference.cover(placed, on))
    for cost in (300.0, 3000.0):
        found = placements.improve(evidence[0], placed, on, cost)
        assert_array_equal(found, reference.improve(evidence[0], placed, on, cost))
        assert (found != placed).any()


def test_beliefs_equal_priors_plus_messages_after_many_updates() -> None:
    evidence, _, s, w = draw_sweep(5, 1, 2, (2, 6, 7), (3, 2), 5)
    priors, messages = (s.copy(), w.copy()), make_zero_messages(evidence, w)
    for epoch in range(1000):
        order = shuffled(0, "test", epoch, np.zeros(1), evidence.size)
        sweeps.sweep_messages(evidence, order, s, w, *messages, 0.7)
    sums = [prior.astype("f8") for prior in priors]
    begins = message_starts((6, 7), (3, 2), 5)
    for index in range(evidence.size):
        of = reference.find_pairs(index, evidence[0], sums[0][0], sums[1][0])[1:]
        n, a, y, x = np.unravel_index(index, evidence[0].shape)
        for part, m in zip(of, messages[:2], strict=True):
            run = m[0, n, a, begins[y * 7 + x] : begins[y * 7 + x + 1]]
            part += run.reshape(part.shape)
    assert_array_equal(s, sums[0])
    assert_array_equal(w, sums[1])
    assert (messages[0] != 0).any()


def test_pixels_without_evidence_send_zero() -> None:
    evidence, order, s, w = draw_sweep(6, 1, 1, (1, 6, 6), (3, 3), 4)
    before = s.copy(), w.copy()
    sweeps.sweep(0 * evidence, order, s, w)
    assert_array_equal(s, before[0])
    assert_array_equal(w, before[1])
    to_s, to_w = reference.pass_tree_up(s.ravel()[:9], w.ravel()[:9], 0.0)
    assert not to_s.any()
    assert not to_w.any()


def test_any_number_of_threads_gives_the_same_bits() -> None:
    evidence, order, s, w = draw_sweep(7, 8, 2, (1, 9, 8), (3, 4), 19, -900)
    found = []
    for threads in (1, 2, 4):
        states = s.copy(), w.copy(), *make_zero_messages(evidence, w)
        with ThreadPoolExecutor(threads) as pool:
            for kernel, n, more in ((sweeps.sweep, 2, ()), (sweeps.sweep_messages, 5, (0.8,))):

                def run(k: int, kernel=kernel, n=n, more=more, states=states) -> None:
                    kernel(evidence[k : k + 1], order[k : k + 1], *(a[k : k + 1] for a in states[:n]), *more)

                list(pool.map(run, range(8)))
        found.append(states)
    for a, b, c in zip(*found, strict=True):
        assert_array_equal(a, b)
        assert_array_equal(a, c)


def test_message_starts_count_the_pairs_of_each_pixel() -> None:
    counts = message_starts((24, 24), (8, 6), 32)
    assert counts[-1] == count_pairs((24, 24), (8, 6), 32)
    assert np.diff(counts).max() == 1536


def shuffle_by_thread(seed: int, purpose: str, epoch: int, rows: np.ndarray, n: int) -> np.ndarray:
    return shuffled(seed + get_ident(), purpose, epoch, rows, n)


def check_shuffled_order(order) -> None:
    first, second = (ThreadPoolExecutor(1) for _ in range(2))
    given = (7, "sweep", 2, np.array([5, 11]), 300)
    with first, second:
        orders = [pool.submit(order, *given).result() for pool in (first, second)]
    assert_array_equal(*orders)


def test_orders_depend_on_seed_epoch_and_row_alone() -> None:
    check_shuffled_order(shuffled)
    with pytest.raises(AssertionError):
        check_shuffled_order(shuffle_by_thread)
    found = shuffled(7, "sweep", 2, np.array([5, 11]), 300)
    assert_array_equal(np.sort(found, axis=1), np.tile(np.arange(300), (2, 1)))
    for other in ((8, "sweep", 2), (7, "decode", 2), (7, "sweep", 3)):
        assert (shuffled(*other, np.array([5]), 300)[0] != found[0]).any()


def test_orders_are_a_shuffle_by_philox() -> None:
    key = np.array([7, stage_word("sweep")], np.uint64)
    drawn = np.random.Philox(key=key, counter=np.array([0, 0, 5, 2], np.uint64)).random_raw(9)
    want = list(range(10))
    for i, word in zip(range(9, 0, -1), drawn, strict=True):
        j = ((int(word) >> 32) * (i + 1)) >> 32
        want[i], want[j] = want[j], want[i]
    assert shuffled(7, "sweep", 2, np.array([5]), 10)[0].tolist() == want
