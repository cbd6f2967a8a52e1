"""Nearest centroids by numba and by the reference in numpy equal those of a search by brute force."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalelatent.models.mbn import KERNELS
from scalelatent.models.mbn.kernels import reference
from scalelatent.models.mbn.kernels.cpu import dense, lists, sparse
from tests.helpers import to_csr_rows

SHAPES = [(1, 1, 1, 1), (5, 3, 2, 2), (6, 7, 16, 7), (7, 9, 17, 4), (121, 30, 33, 15), (250, 196, 48, 98)]


def _draw(seed: int, n: int, p: int, dtype: str) -> np.ndarray:
    rng = np.random.Generator(np.random.Philox(seed))
    return (
        rng.integers(0, 256, (n, p)).astype(dtype) if dtype == "u1" else rng.normal(size=(n, p)).astype(dtype)
    )


def find_by_brute_force(x: np.ndarray, w: np.ndarray, metric: str) -> np.ndarray:
    x, w = x.astype("f8"), w.astype("f8")
    if metric == "cosine":
        x, w = (a / np.linalg.norm(a, axis=1, keepdims=True) for a in (x, w))
    return ((x[:, None] - w) ** 2).sum(axis=2).argmin(axis=1)


@pytest.mark.parametrize("metric", reference.METRICS)
@pytest.mark.parametrize("dtype", ["u1", "f4", "f8"])
@pytest.mark.parametrize(("n", "p", "k", "q"), SHAPES)
def test_dense_rows_have_the_nearest_centroids(
    n: int, p: int, k: int, q: int, dtype: str, metric: str
) -> None:
    x, columns = _draw(1, n, p, dtype), np.sort(np.random.default_rng(2).permutation(p)[:q])
    w = _draw(3, k, p, dtype)[:, columns]
    want = find_by_brute_force(x[:, columns], w, metric)
    for module in (reference, dense):
        got = module.nearest(x, columns, module.make_bank(w, metric))
        np.testing.assert_array_equal(got[:, 0], want)


def test_equal_centroids_go_to_the_lowest_index() -> None:
    x = _draw(0, 40, 12, "u1")
    w = np.concatenate([x[:20], x[:20], x[20:], x[20:]])
    for module in (reference, dense):
        got = module.nearest(x, np.arange(12), module.make_bank(w, "euclidean"))
        assert got.ravel().tolist() == [*range(20), *range(40, 60)]


def test_equally_far_centroids_of_integers_go_to_the_lowest_index() -> None:
    """All centroids have the same numbers in different orders, so all are equally far from a constant row."""
    rng = np.random.default_rng(0)
    w = np.stack([rng.permutation(np.arange(200, 230, dtype="u1")) for _ in range(50)])
    x, columns = np.full((3, 30), 250, dtype="u1"), np.arange(30)
    for metric in reference.METRICS:
        for module in (reference, dense):
            assert not module.nearest(x, columns, module.make_bank(w, metric)).any()
        for module in (reference, sparse):
            bank = module.make_sparse_bank(to_csr_rows(w), columns, metric)
            assert not module.nearest_sparse(to_csr_rows(x), bank).any()


def test_equally_far_centroids_of_floats_go_to_the_same_one_dense_and_sparse() -> None:
    """Rounding in float64 chooses one of several equally far centroids, for dense and sparse rows alike."""
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=30).astype("f4")
    w, columns = np.stack([rng.permutation(numbers) for _ in range(50)]), np.arange(30)
    x = np.repeat(rng.normal(size=(40, 1)).astype("f4"), 30, axis=1)
    got = dense.nearest(x, columns, dense.make_bank(w, "euclidean"))
    assert len(np.unique(got)) > 1, "the scores are exact, so index 0 always wins, and the test shows nothing"
    sparsely = sparse.nearest_sparse(
        to_csr_rows(x), sparse.make_sparse_bank(to_csr_rows(w), columns, "euclidean")
    )
    np.testing.assert_array_equal(got, sparsely)


def test_ties_within_rounding_are_decided_in_float64() -> None:
    """The scores of the centroids differ in the eighth digit, which float32 cannot represent."""
    rng = np.random.default_rng(0)
    base = rng.normal(size=200) * 100
    w = (base + rng.normal(size=(64, 200)) * 1e-2).astype("f4")
    x = (base + rng.normal(size=(90, 200)) * 1e-2).astype("f4")
    columns = np.arange(200)
    want = find_by_brute_force(x, w, "euclidean")
    plain = (x @ w.T - 0.5 * np.einsum("jc,jc->j", w, w)).argmax(axis=1)
    assert (plain != want).mean() > 0.2, "float32 alone is exact, so the test shows nothing"
    got = dense.nearest(x, columns, dense.make_bank(w, "euclidean"))
    np.testing.assert_array_equal(got[:, 0], want)


def test_few_rows_need_float64() -> None:
    """A second search in float64 is slow, so the bound of rounding errors must select few rows for it."""
    x, w = _draw(0, 500, 392, "f4"), _draw(1, 1000, 392, "f4")
    bank = dense.make_bank(w, "euclidean")
    scores = x.astype("f8") @ w.T.astype("f8") + bank.exact[1]
    top = np.sort(scores, axis=1)[:, -2:]
    slack = 2 * (bank.error[0] * np.linalg.norm(x, axis=1) + bank.error[1])
    assert 0 < (top[:, 1] - top[:, 0] < slack).mean() < 0.02


def test_the_bound_on_rounding_holds() -> None:
    x, w = _draw(0, 200, 300, "f4") * 50, _draw(1, 100, 300, "f4") * 50
    bank = dense.make_bank(w, "euclidean")
    single = (x @ w.T * bank.scale[:100] + bank.bias[:100]).astype("f8")
    exact = x.astype("f8") @ w.T.astype("f8") + bank.exact[1]
    bound = bank.error[0] * np.linalg.norm(x.astype("f8"), axis=1, keepdims=True) + bank.error[1]
    assert (np.abs(single - exact) <= bound).all()


@given(st.integers(1, 60), st.integers(1, 40), st.integers(1, 30), st.sampled_from(["u1", "f4"]), st.data())
def test_kernels_equal_the_reference_for_any_shape(n: int, p: int, k: int, dtype: str, data: Any) -> None:
    seed = data.draw(st.integers(0, 1000))
    columns = np.flatnonzero(np.random.default_rng(seed).random(p) < 0.7)
    columns = columns if len(columns) else np.array([0])
    x, w = _draw(seed, n, p, dtype), _draw(seed + 1, k, p, dtype)[:, columns]
    want = reference.nearest(x, columns, reference.make_bank(w, "euclidean"))
    np.testing.assert_array_equal(dense.nearest(x, columns, dense.make_bank(w, "euclidean")), want)


def test_a_centroid_of_zeros_has_the_cosine_0_with_every_row() -> None:
    w, x = np.array([[0.0, 0.0], [1.0, 2.0]]), np.array([[1.0, 1.0], [-1.0, -1.0], [0.0, 0.0]])
    for module in (reference, dense):
        got = module.nearest(x, np.arange(2), module.make_bank(w, "cosine"))
        assert got.ravel().tolist() == [1, 0, 0]
        with pytest.raises(ValueError, match="metric='manhattan' is not one of euclidean, cosine"):
            module.make_bank(w, "manhattan")


def to_one_hot(codes: np.ndarray, width: int) -> np.ndarray:
    return np.eye(width)[codes].reshape(len(codes), -1)


CODE_SHAPES = [
    (1, 1, 1, 1),
    (3, 2, 1, 5),
    (50, 7, 20, 10),
    (64, 12, 2, 9),
    (1100, 30, 130, 65),
    (40, 65, 64, 32),
    (530, 37, 90, 128),
    (70, 16, 300, 129),
    (33, 100, 31, 300),
]


@pytest.mark.parametrize("sets", [1, 3])
@pytest.mark.parametrize("dtype", ["u2", "u4"])
@pytest.mark.parametrize(("n", "v", "below", "k"), CODE_SHAPES)
def test_nearest_codes_equal_the_reference(n: int, v: int, below: int, k: int, dtype: str, sets: int) -> None:
    rng = np.random.default_rng(n + v)
    x = rng.integers(0, below, (n, v)).astype(dtype)
    centroids = rng.integers(0, below, (sets, k, v)).astype(dtype)
    units = rng.random((sets, v, below)) < 0.5
    products = [
        (to_one_hot(x, below) * units[s].reshape(-1)) @ to_one_hot(centroids[s], below).T for s in range(sets)
    ]
    want = np.stack([shared.argmax(axis=1) for shared in products], axis=1)
    for module in (reference, lists):
        got = module.nearest_codes(x, module.make_lists(centroids, units))
        assert got.dtype == np.int32
        np.testing.assert_array_equal(got, want)


def test_codes_without_a_shared_unit_are_0() -> None:
    x, centroids = np.zeros((5, 3), dtype="u2"), np.ones((2, 4, 3), dtype="u2")
    for module in (reference, lists):
        made = module.make_lists(centroids, np.ones((2, 3, 2), dtype=bool))
        assert not module.nearest_codes(x, made).any()


@pytest.mark.parametrize("clusterings", [20, 90])
def test_a_row_with_more_candidates_than_space_is_counted_separately(clusterings: int) -> None:
    """Half of the rows share most codes with all centroids, so their candidates exceed the buffer."""
    centroids = np.zeros((2, 300, clusterings), dtype="u2")
    centroids[:, 7:, 3] = 1
    centroids[1] = centroids[1, ::-1]
    x = np.random.default_rng(0).integers(0, 2, (64, clusterings)).astype("u2")
    x[::2] = 0
    units = np.ones((2, clusterings, 2), dtype=bool)
    want = reference.nearest_codes(x, reference.make_lists(centroids, units))
    assert 0 < (want == [7, 0]).all(axis=1).sum() < len(x)
    np.testing.assert_array_equal(lists.nearest_codes(x, lists.make_lists(centroids, units)), want)


def test_a_row_whose_short_lists_exceed_the_space_is_counted_separately() -> None:
    """A clustering has only 16 candidate centroids for a row, but those of 70 clusterings exceed the buffer.

    The candidates are the centroids with the code (cluster index) of the row in the clustering.
    """
    centroids = np.repeat(np.arange(100), 16)[:, None].repeat(70, axis=1).astype("u2")[None]
    units = np.ones((1, 70, 4000), dtype=bool)
    x = np.array([[3] * 70, [9] * 35 + [4] * 35, [200] * 70], dtype="u2")
    got = lists.nearest_codes(x, lists.make_lists(centroids, units))
    assert got.ravel().tolist() == [48, 64, 0]


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_every_kernel_has_three_functions(name: str) -> None:
    """Each kernel has functions for the reference, numba and CuPy.

    The test finds the functions in the source text, because CuPy may not be installed.
    """
    assert set(KERNELS[name]) == {"reference", "numba", "cupy"}
    for backend, path in KERNELS[name].items():
        module, function = path.split(":")
        text = Path(find_spec(module).origin).read_text(encoding="utf-8")  # type: ignore[union-attr,arg-type]
        assert f"\ndef {function}(" in text, f"{backend}: {path}"


@pytest.mark.slow
def test_more_centroids_than_short_codes_can_name() -> None:
    rng = np.random.default_rng(0)
    k = 2**16 + 3
    centroids = np.repeat(np.arange(k)[:, None], 3, axis=1).astype("u4")
    centroids[5] = centroids[k - 1]
    units = rng.random((1, 3, k)) < 0.9
    units[:, :, [2**16 + 1, k - 1]] = True
    x = np.array([[2**16 + 1] * 3, [k - 1] * 3], dtype="u4")
    got = lists.nearest_codes(x, lists.make_lists(centroids[None], units))
    assert got.ravel().tolist() == [2**16 + 1, 5]


@pytest.mark.parametrize("columns", [203, 204, 407, 812, 41_615, 41_616, 41_617])
def test_panels_of_very_wide_rows_are_divided(columns: int) -> None:
    """Rows are divided into panels (ranges of columns) of equal width, and no panel may be empty."""
    rng = np.random.default_rng(columns)
    # The rows differ mostly in their first column, whose values are large. So a kernel that reads beyond the
    # end of a row finds other centroids.
    x = (rng.random((80, columns)) < 3 / columns).astype(np.uint8)
    x[:, 0] = rng.integers(0, 255, 80)
    which = np.arange(columns, dtype=np.int32)
    want = reference.nearest(x, which, reference.make_bank(x[:70], "euclidean"))
    got = dense.nearest(x, which, dense.make_bank(x[:70], "euclidean"))
    np.testing.assert_array_equal(got, want)


@pytest.mark.skipif(not dense.DOTS, reason="the machine has no VNNI")
@pytest.mark.parametrize("metric", reference.METRICS)
@pytest.mark.parametrize("columns", [1, 3, 4, 5, 18, 392, 813, 1626])
def test_bytes_have_the_same_codes_with_integer_sums(
    columns: int, metric: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(columns)
    x, w = (rng.integers(low, 256, (n, columns)).astype("u1") for low, n in ((0, 130), (1, 300)))
    draws, which = _draw_clusterings(rng, 5, 300, 150), np.arange(columns)
    with_integers = dense.nearest(x, which, dense.make_bank(w, metric, draws))
    monkeypatch.setattr(dense, "DOTS", False)
    bank = dense.make_bank(w, metric, draws)
    np.testing.assert_array_equal(with_integers, dense.nearest(x, which, bank))
    np.testing.assert_array_equal(with_integers, dense.nearest(x.astype("f4"), which, bank))
    if metric == "euclidean":
        want = reference.nearest(x, which, reference.make_bank(w, metric, draws))
        np.testing.assert_array_equal(with_integers, want)


def test_the_largest_sums_of_bytes_do_not_overflow() -> None:
    """Rows of 255 have the largest products. The rows are the centroids: row i is nearest to centroid i."""
    columns = dense._MAX_BYTES
    w = np.full((40, columns), 255, dtype="u1")
    w[np.arange(40), np.arange(40)] = 0
    which = np.arange(columns)
    got = dense.nearest(w, which, dense.make_bank(w, "euclidean"))
    np.testing.assert_array_equal(got[:, 0], np.arange(40))


def test_rows_of_floats_have_codes_by_centroids_of_bytes() -> None:
    x, w = _draw(0, 50, 12, "f4"), _draw(1, 30, 12, "u1")
    want = dense.nearest(x, np.arange(12), dense.make_bank(w.astype("f4"), "euclidean"))
    np.testing.assert_array_equal(dense.nearest(x, np.arange(12), dense.make_bank(w, "euclidean")), want)


def _draw_clusterings(rng: np.random.Generator, clusterings: int, rows: int, k: int) -> np.ndarray:
    """Return bool (clusterings, rows): whether a row is one of the k centroids of a clustering."""
    draws = np.zeros((clusterings, rows), dtype=bool)
    for own in draws:
        own[rng.permutation(rows)[:k]] = True
    return draws


KINDS = {
    "bits": lambda rng, n, q: rng.integers(0, 2, (n, q)).astype("u1"),
    "bytes": lambda rng, n, q: rng.integers(0, 256, (n, q)).astype("u1"),
    "floats": lambda rng, n, q: rng.normal(size=(n, q)).astype("f4"),
    "whole numbers that float32 sums round": lambda rng, n, q: rng.integers(0, 9000, (n, q)).astype("f4"),
    "each row eight times": lambda rng, n, q: np.repeat(rng.normal(size=(-(-n // 8), q)), 8, 0)[:n],
}


@pytest.mark.parametrize("metric", reference.METRICS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("n", "q", "rows", "k", "clusterings"), [(3, 2, 2, 1, 1), (130, 17, 300, 150, 9), (50, 40, 70, 3, 20)]
)
def test_clusterings_that_share_a_pool_take_the_nearest_of_their_own_centroids(
    n: int, q: int, rows: int, k: int, clusterings: int, kind: str, metric: str
) -> None:
    """A pool is a set of centroids, of which each clustering uses some.

    The list of the nearest centroids of a row may contain no centroid of a clustering.
    """
    rng = np.random.default_rng(n)
    x, w = (KINDS[kind](rng, m, q).astype("u1" if kind[0] == "b" else "f4") + 1 for m in (n, rows))
    draws, columns = _draw_clusterings(rng, clusterings, rows, k), np.arange(q)
    got = dense.nearest(x, columns, dense.make_bank(w, metric, draws))
    assert got.shape == (n, clusterings)
    own = [find_by_brute_force(x, w[mine], metric) for mine in draws]
    want = reference.nearest(x, columns, reference.make_bank(w, metric, draws))
    bank = sparse.make_sparse_bank(to_csr_rows(w), columns, metric, draws)
    np.testing.assert_array_equal(sparse.nearest_sparse(to_csr_rows(x), bank), got)
    # Equal distances are rounded differently in float64, so compare distances, not indices of centroids.
    near = np.abs(
        compute_distances(x, w, metric, draws, got) - compute_distances(x, w, metric, draws, np.stack(own, 1))
    )
    assert near.max() <= 1e-12
    if metric == "euclidean":
        np.testing.assert_array_equal(got, want)


def compute_distances(
    x: np.ndarray, w: np.ndarray, metric: str, draws: np.ndarray, codes: np.ndarray
) -> np.ndarray:
    """Return squared distances of rows to their centroids, divided by max(1, squared length of the row)."""
    x, w = x.astype("f8"), w.astype("f8")
    if metric == "cosine":
        x, w = (a / np.linalg.norm(a, axis=1, keepdims=True) for a in (x, w))
    found = [((x - w[mine][own]) ** 2).sum(axis=1) for mine, own in zip(draws, codes.T, strict=True)]
    return np.stack(found, axis=1) / np.maximum((x**2).sum(axis=1, keepdims=True), 1)


def test_lists_are_so_long_that_a_clustering_seldom_misses() -> None:
    rng = np.random.default_rng(0)
    w = _draw(1, 2000, 30, "f4")
    half, few = (_draw_clusterings(rng, 10, 2000, k) for k in (1000, 250))
    assert dense.make_bank(w, "euclidean", half).length == 24
    assert dense.make_bank(w, "euclidean", few).length == 121
    assert dense.make_bank(w, "euclidean").length == 4
    assert len(dense.make_bank(np.repeat(w, 2, axis=0), "euclidean").codes) == 2000, (
        "equal centroids of floats are merged"
    )
    whole = np.repeat(_draw(1, 200, 30, "u1"), 2, axis=0)
    assert len(dense.make_bank(whole, "euclidean").codes) == 400, (
        "equal centroids of whole numbers are not merged, because their scores are exact"
    )
