"""Nearest centroids: numba against the reference, and both against brute force."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalelatent.models.csr import CsrRows
from scalelatent.models.mbn import KERNELS, reference
from scalelatent.models.mbn.cpu import dense, lists, sparse

SHAPES = [(1, 1, 1, 1), (5, 3, 2, 2), (6, 7, 16, 7), (7, 9, 17, 4), (121, 30, 33, 15), (250, 196, 48, 98)]


def _draw(seed: int, n: int, p: int, dtype: str) -> np.ndarray:
    rng = np.random.Generator(np.random.Philox(seed))
    return (
        rng.integers(0, 256, (n, p)).astype(dtype) if dtype == "u1" else rng.normal(size=(n, p)).astype(dtype)
    )


def _brute(x: np.ndarray, w: np.ndarray, metric: str) -> np.ndarray:
    x, w = x.astype("f8"), w.astype("f8")
    if metric == "cosine":
        x, w = (a / np.linalg.norm(a, axis=1, keepdims=True) for a in (x, w))
    return ((x[:, None] - w) ** 2).sum(axis=2).argmin(axis=1)


@pytest.mark.parametrize("metric", reference.METRICS)
@pytest.mark.parametrize("dtype", ["u1", "f4", "f8"])
@pytest.mark.parametrize(("n", "p", "k", "q"), SHAPES)
def test_dense(n: int, p: int, k: int, q: int, dtype: str, metric: str) -> None:
    x, columns = _draw(1, n, p, dtype), np.sort(np.random.default_rng(2).permutation(p)[:q])
    w = _draw(3, k, p, dtype)[:, columns]
    want = _brute(x[:, columns], w, metric)
    np.testing.assert_array_equal(reference.nearest(x, columns, reference.make_bank(w, metric)), want)
    np.testing.assert_array_equal(dense.nearest(x, columns, dense.make_bank(w, metric)), want)


def test_equal_centroids_go_to_the_lowest_index() -> None:
    x = _draw(0, 40, 12, "u1")
    w = np.concatenate([x[:20], x[:20], x[20:], x[20:]])
    for module in (reference, dense):
        got = module.nearest(x, np.arange(12), module.make_bank(w, "euclidean"))
        assert got.tolist() == [*range(20), *range(40, 60)]


def test_equally_far_centroids_of_integers_go_to_the_lowest_index() -> None:
    """The same numbers in another order, before a row of one number: all are equally far."""
    rng = np.random.default_rng(0)
    w = np.stack([rng.permutation(np.arange(200, 230, dtype="u1")) for _ in range(50)])
    x, columns = np.full((3, 30), 250, dtype="u1"), np.arange(30)
    for metric in reference.METRICS:
        for module in (reference, dense):
            assert not module.nearest(x, columns, module.make_bank(w, metric)).any()
        for module in (reference, sparse):
            bank = module.make_sparse_bank(_csr(w), columns, metric)
            assert not module.nearest_sparse(_csr(x), bank).any()


def test_equally_far_centroids_of_floats_go_to_the_same_one_dense_and_sparse() -> None:
    """Float64 rounds their sums: which one wins is said nowhere, that it is the same everywhere is."""
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=30).astype("f4")
    w, columns = np.stack([rng.permutation(numbers) for _ in range(50)]), np.arange(30)
    x = np.repeat(rng.normal(size=(40, 1)).astype("f4"), 30, axis=1)
    got = dense.nearest(x, columns, dense.make_bank(w, "euclidean"))
    assert len(set(got)) > 1, "exact sums would have given 0 everywhere: this test shows nothing"
    sparsely = sparse.nearest_sparse(_csr(x), sparse.make_sparse_bank(_csr(w), columns, "euclidean"))
    np.testing.assert_array_equal(got, sparsely)


def test_what_rounding_leaves_in_question_is_decided_in_float64() -> None:
    """Centroids that float32 cannot tell apart: their scores differ in the eighth digit."""
    rng = np.random.default_rng(0)
    base = rng.normal(size=200) * 100
    w = (base + rng.normal(size=(64, 200)) * 1e-2).astype("f4")
    x = (base + rng.normal(size=(90, 200)) * 1e-2).astype("f4")
    columns = np.arange(200)
    want = _brute(x, w, "euclidean")
    plain = (x @ w.T - 0.5 * np.einsum("jc,jc->j", w, w)).argmax(axis=1)
    assert (plain != want).mean() > 0.2, "float32 alone would do: this test shows nothing"
    np.testing.assert_array_equal(dense.nearest(x, columns, dense.make_bank(w, "euclidean")), want)


def test_rows_in_doubt_are_few() -> None:
    """The second scan is for exceptions: the bound on rounding must not be so wide that it is the rule."""
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
def test_any_shape(n: int, p: int, k: int, dtype: str, data: Any) -> None:
    seed = data.draw(st.integers(0, 1000))
    columns = np.flatnonzero(np.random.default_rng(seed).random(p) < 0.7)
    columns = columns if len(columns) else np.array([0])
    x, w = _draw(seed, n, p, dtype), _draw(seed + 1, k, p, dtype)[:, columns]
    want = reference.nearest(x, columns, reference.make_bank(w, "euclidean"))
    np.testing.assert_array_equal(dense.nearest(x, columns, dense.make_bank(w, "euclidean")), want)


def test_a_centroid_of_zeros_has_the_cosine_0_with_every_row() -> None:
    w, x = np.array([[0.0, 0.0], [1.0, 2.0]]), np.array([[1.0, 1.0], [-1.0, -1.0], [0.0, 0.0]])
    for module in (reference, dense):
        assert module.nearest(x, np.arange(2), module.make_bank(w, "cosine")).tolist() == [1, 0, 0]
        with pytest.raises(ValueError, match="metric='manhattan' is not one of euclidean, cosine"):
            module.make_bank(w, "manhattan")


def _csr(x: np.ndarray) -> CsrRows:
    rows, columns = np.nonzero(x)
    indptr = np.zeros(len(x) + 1, dtype=np.int64)
    np.cumsum(np.bincount(rows, minlength=len(x)), out=indptr[1:])
    return CsrRows(x[rows, columns].astype("f4"), columns.astype("i4"), indptr, x.shape)


@pytest.mark.parametrize("metric", reference.METRICS)
@pytest.mark.parametrize(("n", "p", "k", "q"), SHAPES[1:])
def test_sparse_equals_dense(n: int, p: int, k: int, q: int, metric: str) -> None:
    rng = np.random.default_rng(n)
    x, w = (rng.poisson(0.4, (m, p)).astype("f4") for m in (n, k))
    columns = np.sort(rng.permutation(p)[:q])
    w[:, columns[0]] += 1.0  # no centroid without an entry: that has no cosine
    want = reference.nearest(x, columns, reference.make_bank(w[:, columns], metric))
    for module in (reference, sparse):
        got = module.nearest_sparse(_csr(x), module.make_sparse_bank(_csr(w), columns, metric))
        np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(dense.nearest(x, columns, dense.make_bank(w[:, columns], metric)), want)


@pytest.mark.parametrize("metric", reference.METRICS)
def test_sparse_rows_of_uneven_columns(metric: str) -> None:
    """Dense columns, columns with postings, and both bounds on rounding: numbers whose sums round, and
    centroids that float32 cannot tell apart.
    """
    rng = np.random.default_rng(1)
    n, p, k = 300, 400, 150
    share = np.minimum(1.0, 8.0 / np.arange(1, p + 1))
    x, w = ((rng.normal(size=(m, p)) * (rng.random((m, p)) < share)).astype("f4") for m in (n, k))
    w[:60] = w[0] * (1 + 1e-7 * rng.normal(size=(60, 1))).astype("f4")
    x[:100] = w[0]
    columns = np.sort(rng.permutation(p)[:300])
    bank = sparse.make_sparse_bank(_csr(w), columns, metric)
    assert (bank.slot >= 0).sum() > 10
    assert len(bank.start) > 100
    got = sparse.nearest_sparse(_csr(x), bank)
    np.testing.assert_array_equal(got, dense.nearest(x, columns, dense.make_bank(w[:, columns], metric)))
    want = reference.nearest(x, columns, reference.make_bank(w[:, columns], metric))
    assert (got[100:] == want[100:]).all()
    plain = x[:, columns] @ w[:, columns].T
    plain = (
        plain - 0.5 * (w[:, columns] ** 2).sum(1)
        if metric == "euclidean"
        else plain / np.linalg.norm(w[:, columns], axis=1)
    )
    assert (plain.argmax(axis=1) != got).mean() > 0.2, "float32 alone would do: this test shows nothing"


@pytest.mark.parametrize("apart", [8, 16, 64, 1])
def test_two_centroids_that_float32_cannot_tell_apart(apart: int) -> None:
    """In one lane of one panel, in one lane of two, and side by side; and of equal ones the first."""
    rng, p, k, n = np.random.default_rng(apart), 40, 150, 200
    wrong = 0
    for trial in range(20):
        w = rng.normal(size=(k, p)).astype("f4") + 30.0
        j = int(rng.integers(0, 64 - apart)) if apart < 64 else int(rng.integers(0, 64))
        w[j] = rng.normal(size=p).astype("f4")
        w[j + apart] = w[j] if trial == 0 else w[j] + (1e-7 * rng.normal(size=p)).astype("f4")
        if rng.random() < 0.5:
            w[[j, j + apart]] = w[[j + apart, j]]
        x = w[j] + rng.normal(size=(n, p)).astype("f4")
        got = sparse.nearest_sparse(_csr(x), sparse.make_sparse_bank(_csr(w), np.arange(p), "euclidean"))
        scores = x.astype("f8") @ w.astype("f8").T - 0.5 * (w.astype("f8") ** 2).sum(axis=1)
        np.testing.assert_array_equal(got, scores.argmax(axis=1))
        plain = x @ w.T - 0.5 * (w**2).sum(axis=1)
        wrong += int((plain.argmax(axis=1) != got).sum())
    assert wrong > 100, "float32 alone would do: this test shows nothing"


def _documents(rng: np.random.Generator, n: int, p: int) -> np.ndarray:
    """Counts, of which few columns hold most."""
    return rng.poisson(np.minimum(3.0, 9.0 / np.arange(1, p + 1)), (n, p)).astype("f4")


@pytest.mark.parametrize("metric", reference.METRICS)
@pytest.mark.parametrize("k", [5, 128, 300])
def test_counts(k: int, metric: str) -> None:
    """Sums of int16: several panels, both kinds of columns, counts below zero, and ties."""
    rng = np.random.default_rng(k)
    n, p = 400, 500
    x, w = _documents(rng, n, p), _documents(rng, k, p)
    x[:50], w[: k // 5] = -x[:50], -w[: k // 5]
    w[k // 2 :] = 3 * w[k - k // 2 - 1 :: -1][: k - k // 2]  # under the cosine ties, but for rounding
    w[-2:] = w[1]
    columns = np.sort(rng.permutation(p)[:400])
    w[:, columns[0]] += w.any(axis=1) == 0
    bank = sparse.make_sparse_bank(_csr(w), columns, metric)
    assert bank.panels.dtype == bank.value.dtype == np.int16
    assert min((bank.slot >= 0).sum(), len(bank.start)) > 20 or k == 5
    want = reference.nearest_sparse(_csr(x), reference.make_sparse_bank(_csr(w), columns, metric))
    got = sparse.nearest_sparse(_csr(x), bank)
    densely = dense.nearest(x, columns, dense.make_bank(w[:, columns], metric))
    np.testing.assert_array_equal(got, densely)
    np.testing.assert_array_equal(got, want)
    if metric == "euclidean":
        products = x[:, columns].astype("f8") @ w[:, columns].T - 0.5 * (w[:, columns] ** 2).sum(axis=1)
        ties = (products == products.max(axis=1, keepdims=True)).sum(axis=1) > 1
        assert ties.mean() > 0.02


@pytest.mark.parametrize("metric", reference.METRICS)
def test_rows_that_are_no_counts_among_counts(metric: str) -> None:
    """Fractions, values beyond int16 and int32, and counts whose sums are beyond int16."""
    rng = np.random.default_rng(3)
    x, w = _documents(rng, 64, 80), _documents(rng, 200, 80)
    x[::7] *= 0.5
    x[1::7] *= 20_000
    x[2::7] *= 3e9
    x[3::7, :4] = 4000
    x[4, 0], x[11, 0], x[18, 0] = 32_767, 32_768, -(2.0**31)
    columns = np.arange(0, 80, 2)
    w[:, 0] += 1
    bank = sparse.make_sparse_bank(_csr(w), columns, metric)
    assert bank.panels.dtype == np.int16
    want = reference.nearest_sparse(_csr(x), reference.make_sparse_bank(_csr(w), columns, metric))
    got = sparse.nearest_sparse(_csr(x), bank)
    np.testing.assert_array_equal(got, want)
    densely = dense.nearest(x, columns, dense.make_bank(w[:, columns], metric))
    np.testing.assert_array_equal(got, densely)


@pytest.mark.parametrize("many", [1, 200])
def test_counts_at_the_ends_of_int16(many: int) -> None:
    """A sum that came round would turn the nearest centroid; of many centroids the column has postings."""
    w = np.zeros((many + 1, 4), dtype="f4")
    w[0, :2] = 1.0
    ends = [32_767, 32_768, 65_535, 65_536, -32_767, -32_768, -32_769, -65_536]
    x = np.array([*([end, 0, 0, 0] for end in ends), *([end - 9, 9, 0, 0] for end in ends)], dtype="f4")
    bank = sparse.make_sparse_bank(_csr(w), np.arange(4), "euclidean")
    assert bank.panels.dtype == np.int16
    assert (len(bank.start) > 1) == (many == 200)
    want = [0 if row.sum() > 0 else 1 for row in x]
    assert sparse.nearest_sparse(_csr(x), bank).tolist() == want


@pytest.mark.parametrize("scale", [1e-24, 1e-35])
def test_rows_whose_squares_float32_does_not_hold(scale: float) -> None:
    rng = np.random.default_rng(8)
    w = rng.normal(size=(150, 40)).astype("f4") + 3.0
    w[75:] = w[:75] + (1e-7 * rng.normal(size=(75, 40))).astype("f4")
    x = (scale * (w[rng.integers(0, 150, 200)] + 0.1 * rng.normal(size=(200, 40)))).astype("f4")
    exact = w.astype("f8") / np.linalg.norm(w.astype("f8"), axis=1, keepdims=True)
    want = (x.astype("f8") @ exact.T).argmax(axis=1)
    columns = np.arange(40)
    sparsely = sparse.nearest_sparse(_csr(x), sparse.make_sparse_bank(_csr(w), columns, "cosine"))
    densely = dense.nearest(x, columns, dense.make_bank(w, "cosine"))
    assert (sparsely == want).all()
    assert (densely == want).all()


def test_a_column_that_a_clustering_does_not_see_may_be_anything() -> None:
    """Of the others, rows that are no counts are decided one by one."""
    x = np.array([[0.5, 2.0, 3.0], [1e9, 2.5, 0.0], [0.0, 20_000.0, 0.0]], dtype="f4")
    bank = sparse.make_sparse_bank(_csr(np.array([[0, 4.0, 0], [0, 0, 2.0]])), np.arange(1, 3), "euclidean")
    room = np.empty((1, 4), np.int64), np.empty((1, 4), np.int16), np.empty(4, np.int64), np.empty(4, "i2")
    told = []
    for row in x:
        one = _csr(row[None])
        *counts, length = sparse._sort_out(one.data, one.indices, bank.slot, bank.most, 256, 0, *room)
        told.append((*map(int, counts), bool(length >= 0)))
    assert told == [(2, 0, True), (1, 0, False), (1, 0, False)]
    assert sparse.nearest_sparse(_csr(x), bank).tolist() == [1, 0, 0]


@pytest.mark.parametrize("value", [0.5, 2.0**15, 30_000.0])
def test_centroids_that_are_no_counts(value: float) -> None:
    rng = np.random.default_rng(4)
    x, w = _documents(rng, 64, 80), _documents(rng, 200, 80)
    w[:3, :5] = value
    bank = sparse.make_sparse_bank(_csr(w), np.arange(80), "euclidean")
    assert bank.panels.dtype == np.float32
    want = reference.nearest_sparse(_csr(x), reference.make_sparse_bank(_csr(w), np.arange(80), "euclidean"))
    np.testing.assert_array_equal(sparse.nearest_sparse(_csr(x), bank), want)


def test_a_centroid_far_beyond_the_others_among_counts() -> None:
    """One of many may have sums beyond int16, and half of its square need be no number of float32."""
    rng = np.random.default_rng(5)
    x, w = _documents(rng, 200, 80), _documents(rng, 1200, 80)
    w[7, 70:] = 3000 + np.arange(10)
    x[0], x[1], x[2] = w[7], 100 * x[2], w[7] // 100
    bank = sparse.make_sparse_bank(_csr(w), np.arange(80), "euclidean")
    assert bank.panels.dtype == np.int16
    want = reference.nearest_sparse(_csr(x), reference.make_sparse_bank(_csr(w), np.arange(80), "euclidean"))
    assert want[0] == 7
    np.testing.assert_array_equal(sparse.nearest_sparse(_csr(x), bank), want)


def test_sparse_rows_and_centroids_without_entries() -> None:
    x = _csr(np.array([[0.0, 0, 0], [0, 3, 0], [0, 0, 0]]))
    w = _csr(np.array([[0.0, 2, 0], [0, 0, 0]]))
    for module in (reference, sparse):
        bank = module.make_sparse_bank(w, np.arange(3), "euclidean")
        assert module.nearest_sparse(x, bank).tolist() == [1, 0, 1]


def _one_hot(codes: np.ndarray, width: int) -> np.ndarray:
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
def test_codes(n: int, v: int, below: int, k: int, dtype: str, sets: int) -> None:
    rng = np.random.default_rng(n + v)
    x = rng.integers(0, below, (n, v)).astype(dtype)
    centroids = rng.integers(0, below, (sets, k, v)).astype(dtype)
    units = rng.random((sets, v, below)) < 0.5
    products = [
        (_one_hot(x, below) * units[s].reshape(-1)) @ _one_hot(centroids[s], below).T for s in range(sets)
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
def test_a_row_that_meets_more_than_there_is_room_for(clusterings: int) -> None:
    """All centroids share all codes with half of the rows."""
    centroids = np.zeros((2, 300, clusterings), dtype="u2")
    centroids[:, 7:, 3] = 1
    centroids[1] = centroids[1, ::-1]
    x = np.random.default_rng(0).integers(0, 2, (64, clusterings)).astype("u2")
    x[::2] = 0
    units = np.ones((2, clusterings, 2), dtype=bool)
    want = reference.nearest_codes(x, reference.make_lists(centroids, units))
    assert 0 < (want == [7, 0]).all(axis=1).sum() < len(x)
    np.testing.assert_array_equal(lists.nearest_codes(x, lists.make_lists(centroids, units)), want)


def test_a_row_that_is_over_by_short_lists_alone() -> None:
    """Sixteen centroids of each clustering: no list is longer than what is copied, and the room ends all the
    same.
    """
    centroids = np.repeat(np.arange(100), 16)[:, None].repeat(70, axis=1).astype("u2")[None]
    units = np.ones((1, 70, 4000), dtype=bool)
    x = np.array([[3] * 70, [9] * 35 + [4] * 35, [200] * 70], dtype="u2")
    got = lists.nearest_codes(x, lists.make_lists(centroids, units))
    assert got.ravel().tolist() == [48, 64, 0]


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_every_kernel_has_three_bodies(name: str) -> None:
    """Function names are checked where the module can be imported; the CuPy one needs CuPy."""
    assert set(KERNELS[name]) == {"reference", "numba", "cupy"}
    for backend, place in KERNELS[name].items():
        module, function = place.split(":")
        text = Path(find_spec(module).origin).read_text(encoding="utf-8")  # type: ignore[union-attr,arg-type]
        assert f"\ndef {function}(" in text, f"{backend}: {place}"


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
def test_rows_so_wide_that_a_panel_comes_in_parts(columns: int) -> None:
    """Parts of equal width may be fewer than were asked for: none may be empty."""
    rng = np.random.default_rng(columns)
    # Near each other, but for a large first column: what is read beyond a row shows.
    x = (rng.random((80, columns)) < 3 / columns).astype(np.uint8)
    x[:, 0] = rng.integers(0, 255, 80)
    which = np.arange(columns, dtype=np.int32)
    want = reference.nearest(x, which, reference.make_bank(x[:70], "euclidean"))
    got = dense.nearest(x, which, dense.make_bank(x[:70], "euclidean"))
    np.testing.assert_array_equal(got, want)
