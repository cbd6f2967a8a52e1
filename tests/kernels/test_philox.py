"""The compiled Philox gives numpy's bits, and the engine's streams."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from scalelatent.kernels.jit import kernel
from scalelatent.kernels.philox import fill_random, mulhi
from scalelatent.kernels.streams import stage_word, stream


@kernel
def _high(a, b):
    return mulhi(a, b)


U64 = st.integers(0, 2**64 - 1)


@settings(max_examples=100, deadline=None)
@given(a=U64, b=U64)
def test_high_words_of_products_are_exact(a: int, b: int) -> None:
    assert int(_high(np.uint64(a), np.uint64(b))) == (a * b) >> 64


@settings(max_examples=50, deadline=None)
@given(seed=U64, row=U64, iteration=U64, count=st.integers(1, 20))
def test_words_equal_those_of_numpy_streams(seed: int, row: int, iteration: int, count: int) -> None:
    out = np.zeros(count, np.uint64)
    fill_random(*map(np.uint64, (seed, stage_word("documents"), row, iteration)), out)
    wanted = stream(seed, "documents", iteration, row).bit_generator.random_raw(count)
    assert (out == wanted).all()
