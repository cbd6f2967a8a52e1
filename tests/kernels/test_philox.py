"""Philox, a generator of random numbers, gives the bits of numpy when numba compiles it."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from scalelatent.kernels.jit import kernel
from scalelatent.kernels.philox import mulhi, row_draws
from scalelatent.kernels.streams import stage_word


@kernel
def high_word(a, b):
    return mulhi(a, b)


U64 = st.integers(0, 2**64 - 1)


@settings(max_examples=100, deadline=None)
@given(a=U64, b=U64)
def test_high_words_of_products_are_exact(a: int, b: int) -> None:
    assert int(high_word(np.uint64(a), np.uint64(b))) == (a * b) >> 64


@settings(max_examples=50, deadline=None)
@given(seed=U64, row=st.integers(0, 2**50), epoch=U64, count=st.integers(1, 40))
def test_draws_of_a_row_equal_those_of_numpy(seed: int, row: int, epoch: int, count: int) -> None:
    out, word = np.zeros((1, count), np.uint32), stage_word("documents")
    row_draws(np.array([seed, word, epoch], np.uint64), np.array([row]), out)
    words = (count + 1) // 2
    counter, skipped = divmod(row * words, 4)
    numpy = np.random.Philox(
        key=np.array([seed, word], np.uint64), counter=np.array([counter, 0, 0, epoch], np.uint64)
    )
    expected = np.asarray(numpy.random_raw(skipped + words), "<u8")[skipped:].view("<u4")
    assert (out[0] == expected[:count]).all()
