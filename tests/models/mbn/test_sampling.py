"""Random draws without replacement have exact sizes, equal probabilities and independent streams."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalelatent.models.mbn.model.sampling import choose_masks, choose_numbers, make_key


@given(st.integers(1, 5000), st.data())
def test_draws_are_distinct_sorted_and_of_the_requested_size(n: int, data: st.DataObject) -> None:
    m = data.draw(st.integers(0, n))
    chosen = choose_numbers(3, "rows", 1, 0, n=n, m=m)
    assert chosen.dtype == np.int64
    assert len(chosen) == m
    assert (np.diff(chosen) > 0).all()
    assert m == 0 or (0 <= chosen[0] <= chosen[-1] < n)
    masks = choose_masks(3, "units", 1, 6, 3, n=n, m=m)
    assert masks.sum(axis=1).tolist() == [m] * 3
    for mask, which in zip(masks, (6, 7, 8), strict=True):
        np.testing.assert_array_equal(mask, _draw_in_numpy(3, "units", 1, which, n, m))


@pytest.mark.parametrize(("n", "m"), [(1000, 0), (17, 1), (1000, 62), (10**9, 5000)])
def test_few_numbers_are_the_first_different_numbers_of_the_stream(n: int, m: int) -> None:
    counter = np.array([0, 0, 4, 2], dtype=np.uint64)
    stream = np.random.Philox(key=make_key(3, "rows"), counter=counter).random_raw(2 * m + 9) % np.uint64(n)
    want = sorted(list(dict.fromkeys(stream.tolist()))[:m])
    assert choose_numbers(3, "rows", 2, 4, n=n, m=m).tolist() == want


def _draw_in_numpy(seed: int, purpose: str, layer: int, which: int, n: int, m: int) -> np.ndarray:
    counter = np.array([0, 0, which, layer], dtype=np.uint64)
    bits = np.random.Philox(key=make_key(seed, purpose), counter=counter)
    mask = bits.random_raw(-(-n // 8)).astype("<u8").view(np.uint8)[:n] < round(256 * m / n)
    while surplus := int(mask.sum()) - m:
        drawn = (bits.random_raw(2 * abs(surplus) + 8) % np.uint64(n)).astype(int)
        chosen = list(dict.fromkeys(drawn[mask[drawn] == (surplus > 0)].tolist()))[: abs(surplus)]
        mask[chosen] = surplus < 0
    return mask


@pytest.mark.parametrize(("n", "m"), [(40, 2), (40, 13), (40, 20), (40, 39), (200, 3)])
def test_each_number_and_each_pair_is_equally_probable(n: int, m: int) -> None:
    """Small m tests the algorithm that draws numbers without duplicates, large m the algorithm with masks."""
    draws = 6000
    member = np.zeros((draws, n))
    for i in range(draws):
        member[i, choose_numbers(11, "rows", 1, i, n=n, m=m)] = 1
    p, pair = m / n, m * (m - 1) / (n * (n - 1))
    # The limit is five standard deviations of the share of a number (5.5 for a pair), because the test takes
    # the most extreme of n shares (of n^2 / 2 shares of pairs).
    assert np.abs(member.mean(axis=0) - p).max() < 5 * np.sqrt(p * (1 - p) / draws)
    together = (member.T @ member / draws)[np.triu_indices(n, 1)]
    assert np.abs(together - pair).max() < 5.5 * np.sqrt(pair * (1 - pair) / draws)
    # The sum of squared deviations of all numbers has a chi-squared distribution of n - 1 degrees of freedom.
    chi2 = ((member.sum(axis=0) - draws * p) ** 2 / (draws * p * (1 - p))).sum() * (n - 1) / n
    assert abs(chi2 - (n - 1)) < 5 * np.sqrt(2 * (n - 1))


def test_streams_differ_in_every_part_of_their_key() -> None:
    draws = {
        tuple(choose_numbers(seed, what, layer, which, n=200, m=m).tolist())
        for seed in (0, 1, 2**40)
        for what in ("rows", "columns", "units")
        for layer in (1, 2)
        for which in (0, 1)
        for m in (3, 100)
    }
    assert len(draws) == 72


def test_draws_never_change_between_versions() -> None:
    """Saved networks depend on these numbers, so they may never change."""
    assert choose_numbers(7, "rows", 2, 5, n=1000, m=5).tolist() == EXPECTED_FEW
    assert choose_numbers(7, "columns", 1, 0, n=12, m=6).tolist() == EXPECTED_HALF


EXPECTED_FEW = [254, 431, 436, 486, 843]
EXPECTED_HALF = [1, 3, 4, 6, 7, 11]
