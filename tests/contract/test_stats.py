"""``Stats``, the sums of any model over blocks of rows, obey the laws of addition and scaling."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalelatent.contract.stats import Layout, Stats

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
LAYOUTS = st.lists(SHAPES, min_size=1, max_size=4).map(
    lambda shapes: Layout(tuple((f"field{i}", shape) for i, shape in enumerate(shapes)))
)


def _draw(layout: Layout, seed: int) -> Stats:
    # Numbers of very different size make the order of summation visible in the last bits.
    rng = np.random.Generator(np.random.Philox(seed))
    return Stats(layout, rng.normal(size=layout.size) * 10.0 ** rng.integers(-8, 8, layout.size))


@given(LAYOUTS, st.integers(0, 2**32))
def test_merge_is_associative_and_commutative_and_has_an_identity(layout: Layout, seed: int) -> None:
    a, b, c = (_draw(layout, seed + i) for i in range(3))
    largest = np.abs([a.vector, b.vector, c.vector]).max(axis=0)
    np.testing.assert_array_equal(a.merge(b).vector, b.merge(a).vector)
    # Each of the two sums has two float64 additions. An addition rounds by at most 2**-53 of its result,
    # which is at most 3 times the largest number.
    difference = np.abs(a.merge(b).merge(c).vector - a.merge(b.merge(c)).vector)
    assert (difference <= 4 * 3 * 2.0**-53 * largest).all()
    np.testing.assert_array_equal(a.merge(Stats.zeros(layout)).vector, a.vector)
    assert a.merge(b).layout == layout


@given(LAYOUTS, st.integers(0, 2**32))
def test_merge_and_scale_do_not_change_their_inputs(layout: Layout, seed: int) -> None:
    a, b = _draw(layout, seed), _draw(layout, seed + 1)
    before = a.vector.copy(), b.vector.copy()
    merged, scaled = a.merge(b), a.scale(0.5)
    merged.vector += 1
    scaled.vector += 1
    np.testing.assert_array_equal(a.vector, before[0])
    np.testing.assert_array_equal(b.vector, before[1])


@given(LAYOUTS, st.integers(0, 2**32), st.integers(-8, 8))
def test_scaling_is_linear(layout: Layout, seed: int, power: int) -> None:
    a, b, factor = _draw(layout, seed), _draw(layout, seed + 1), 2.0**power  # Products with factor are exact.
    np.testing.assert_array_equal(
        a.merge(b).scale(factor).vector, a.scale(factor).merge(b.scale(factor)).vector
    )
    np.testing.assert_array_equal(a.scale(1.0).vector, a.vector)


@given(LAYOUTS, st.integers(0, 2**32))
def test_fields_are_views_that_tile_the_vector_in_order(layout: Layout, seed: int) -> None:
    stats = _draw(layout, seed)
    fields = [stats[name] for name, _ in layout.fields]
    assert [f.shape for f in fields] == [shape for _, shape in layout.fields]
    np.testing.assert_array_equal(np.concatenate([f.ravel() for f in fields]), stats.vector)
    assert layout.size == sum(prod(shape) for _, shape in layout.fields)
    assert layout.nbytes == stats.vector.nbytes
    for field in fields:
        field[...] = 7
    assert (stats.vector == 7).all()


@pytest.mark.parametrize(
    "vector", [np.zeros(3), np.zeros(5), np.zeros((2, 2)), np.zeros(4, np.float32), np.zeros(4, int)]
)
def test_a_vector_of_another_shape_or_dtype_is_refused(vector: np.ndarray) -> None:
    with pytest.raises(ValueError, match="float64 vector of 4 numbers"):
        Stats(Layout((("a", (2, 2)),)), vector)


def test_an_unknown_field_is_an_error() -> None:
    with pytest.raises(KeyError, match="other"):
        Stats.zeros(Layout((("a", ()),)))["other"]


def test_an_unaligned_vector_is_copied_and_an_aligned_one_is_kept() -> None:
    layout = Layout((("total", (2, 3)),))
    odd = np.frombuffer(bytearray(8 * layout.size + 1), dtype=np.float64, offset=1, count=layout.size)
    assert not odd.flags.aligned
    assert Stats(layout, odd)["total"].flags.aligned
    even = np.zeros(layout.size)
    assert Stats(layout, even).vector is even
