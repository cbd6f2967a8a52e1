"""Matrix products by tiles (small blocks) equal those of numpy, and ignore values beyond the inputs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalelatent.kernels import tiles
from scalelatent.kernels.jit import kernel

ROWS = [1, 2, 7, 8, 9, 15, 16, 127, 128]
WIDTHS = [1, 7, 8, 9, 11, 16, 23, 24, 25, 31, 32, 47, 48, 49, 55, 196]


@kernel
def compute_latents(packed, x, out):
    tiles.compute_latents(packed, x, out)


@kernel
def _add_moment(g, n, x, out):
    tiles.add_moment(g, n, x, out)


def draw_rows(seed: int, *shape: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(seed)).normal(size=shape).astype("f4")


def compute_padded_latents(w: np.ndarray, x: np.ndarray) -> np.ndarray:
    packed = tiles.packed_matrix(w)
    columns = -(-len(x) // tiles.ROWS) * tiles.ROWS
    out = np.full((tiles.padded_size(len(w)), columns), np.nan, dtype="f4")
    compute_latents(packed, x, out)
    # Latents of padded dimensions are 0, or NaN (zero times NaN) for a row of x with a NaN.
    assert not np.nan_to_num(out[len(w) :, : len(x)]).any()
    return out[: len(w), : len(x)]


def compute_moment(g: np.ndarray, n: int, x: np.ndarray, out: np.ndarray) -> np.ndarray:
    out = out.copy()
    _add_moment(g, n, x, out)
    return out


def assert_close(got: np.ndarray, a: np.ndarray, b: np.ndarray, plus: float | np.ndarray = 0.0) -> None:
    # A float32 sum of K terms rounds K times, each time by at most 6e-8 of the sum of absolute terms.
    exact = a.astype("f8") @ b.astype("f8") + plus
    bound = 6e-8 * (a.shape[1] + 2) * (np.abs(a).astype("f8") @ np.abs(b).astype("f8") + np.abs(plus))
    assert (np.abs(got - exact) <= bound + 1e-30).all()


@pytest.mark.parametrize("dims", [1, 2, 3, 7, 8, 9, 16, 17, 20, 23, 24, 25, 40, 41, 64, 79, 80, 81, 96, 97])
@pytest.mark.parametrize("p", WIDTHS)
def test_latents_equal_numpys_products(dims: int, p: int) -> None:
    for n in ROWS:
        w, x = draw_rows(1, dims, p), draw_rows(n, n, p)
        assert_close(compute_padded_latents(w, x), w, x.T)


@pytest.mark.parametrize("dims", [1, 2, 3, 4, 5, 6, 7, 8, 9, 20, 63, 97])
@pytest.mark.parametrize("p", WIDTHS)
def test_moments_equal_numpys_products(dims: int, p: int) -> None:
    for n in ROWS:
        g, x, start = draw_rows(1, dims, n), draw_rows(n, n, p), draw_rows(3, dims, p)
        assert_close(compute_moment(g, n, x, start), g, x, start.astype("f8"))


@given(st.integers(1, 100), st.integers(1, 70), st.integers(1, 40), st.integers(0, 60), st.integers(0, 10**6))
def test_values_beyond_the_given_columns_do_not_matter(
    dims: int, p: int, n: int, more: int, seed: int
) -> None:
    """Columns of g beyond the first n are NaN, rows of x are infinite; they must not change the results."""
    g, x = draw_rows(seed, dims, n + more), draw_rows(seed + 1, n + more, p)
    clean = compute_moment(
        np.ascontiguousarray(g[:, :n]), n, np.ascontiguousarray(x[:n]), np.zeros((dims, p), "f4")
    )
    g[:, n:], x[n:] = np.nan, np.inf
    np.testing.assert_array_equal(compute_moment(g, n, x, np.zeros((dims, p), "f4")), clean)
    w = draw_rows(seed + 2, dims, p)
    np.testing.assert_array_equal(
        compute_padded_latents(w, x[:n]), compute_padded_latents(w, np.ascontiguousarray(x[:n]))
    )
    assert np.isfinite(compute_padded_latents(w, x[:n])).all()


@given(st.integers(1, 100), st.integers(1, 70), st.integers(1, 128), st.integers(0, 10**6))
def test_bits_do_not_depend_on_the_alignment_of_arrays(dims: int, p: int, n: int, seed: int) -> None:
    w, x, g = draw_rows(seed, dims, p), draw_rows(seed + 1, n, p), draw_rows(seed + 2, dims, n)
    h, moment = compute_padded_latents(w, x), compute_moment(g, n, x, w)
    for shift in (1, 3, 5):
        moved = np.empty(x.size + 16, dtype="f4")[shift : shift + x.size].reshape(x.shape)
        moved[...] = x
        np.testing.assert_array_equal(compute_padded_latents(w, moved), h)
        np.testing.assert_array_equal(compute_moment(g, n, moved, w), moment)


@given(st.integers(1, 100), st.integers(1, 40), st.integers(2, 128), st.integers(0, 10**6))
def test_a_row_has_the_same_latents_at_any_position(dims: int, p: int, n: int, seed: int) -> None:
    w, x = draw_rows(seed, dims, p), draw_rows(seed + 1, n, p)
    whole = compute_padded_latents(w, x)
    for cut in (1, n // 2):
        np.testing.assert_array_equal(compute_padded_latents(w, x[cut:]), whole[:, cut:])


def test_a_bad_row_changes_only_its_own_column() -> None:
    w, x = draw_rows(1, 20, 30), draw_rows(2, 50, 30)
    clean = compute_padded_latents(w, x)
    x[13, 4] = np.nan
    got = compute_padded_latents(w, x)
    assert np.isnan(got[:, 13]).all()
    np.testing.assert_array_equal(np.delete(got, 13, axis=1), np.delete(clean, 13, axis=1))


@pytest.mark.parametrize(
    ("dims", "x", "expected"),
    [
        (1, np.zeros((3, 8), "f4"), True),
        (tiles.MAX_DIMS, np.zeros((0, 8), "f4"), True),
        (tiles.MAX_DIMS + 1, np.zeros((3, 8), "f4"), False),
        (0, np.zeros((3, 8), "f4"), False),
        (4, np.zeros((3, 1), "f4"), True),
        (4, np.zeros((3, 0), "f4"), False),
        (4, np.zeros((3, tiles.MAX_FEATURES + 1), "f4"), False),
        (4, np.zeros((3, 8), "f8"), False),
        (4, np.zeros((8, 3), "f4").T, False),
        (4, np.zeros((6, 8), "f4")[::2], False),
    ],
)
def test_can_multiply_accepts_only_supported_arrays(dims: int, x: np.ndarray, expected: bool) -> None:
    assert tiles.can_multiply(dims, x) is expected
