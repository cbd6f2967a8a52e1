"""The nearest centroids of CSR rows by numba equal those of the reference in numpy and of dense rows."""

from __future__ import annotations

import numpy as np
import pytest

from scalelatent.kernels.jit import kernel
from scalelatent.models.mbn.kernels import reference
from scalelatent.models.mbn.kernels.cpu import dense, sparse
from tests.helpers import to_csr_rows

SHAPES = [(5, 3, 2, 2), (6, 7, 16, 7), (7, 9, 17, 4), (121, 30, 33, 15), (250, 196, 48, 98)]


@pytest.mark.parametrize("metric", reference.METRICS)
@pytest.mark.parametrize(("n", "p", "k", "q"), SHAPES)
def test_sparse_rows_have_the_centroids_of_dense_rows(n: int, p: int, k: int, q: int, metric: str) -> None:
    rng = np.random.default_rng(n)
    x, w = (rng.poisson(0.4, (m, p)).astype("f4") for m in (n, k))
    columns = np.sort(rng.permutation(p)[:q])
    # Each centroid gets an entry other than 0, because the cosine divides by the length of a centroid.
    w[:, columns[0]] += 1.0
    want = reference.nearest(x, columns, reference.make_bank(w[:, columns], metric))
    for module in (reference, sparse):
        got = module.nearest_sparse(to_csr_rows(x), module.make_sparse_bank(to_csr_rows(w), columns, metric))
        np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(dense.nearest(x, columns, dense.make_bank(w[:, columns], metric)), want)


@pytest.mark.parametrize("metric", reference.METRICS)
def test_columns_of_uneven_density_give_the_same_centroids(metric: str) -> None:
    """The kernel reads dense columns as arrays, and sparse columns as lists of their entries.

    Sums of fractions are rounded, and many centroids are nearly equal, so rounding decides many rows.
    """
    rng = np.random.default_rng(1)
    n, p, k = 300, 400, 150
    share = np.minimum(1.0, 8.0 / np.arange(1, p + 1))
    x, w = ((rng.normal(size=(m, p)) * (rng.random((m, p)) < share)).astype("f4") for m in (n, k))
    w[:60] = w[0] * (1 + 1e-7 * rng.normal(size=(60, 1))).astype("f4")
    x[:100] = w[0]
    columns = np.sort(rng.permutation(p)[:300])
    bank = sparse.make_sparse_bank(to_csr_rows(w), columns, metric)
    assert (bank.slot >= 0).sum() > 10
    assert len(bank.start) > 100
    got = sparse.nearest_sparse(to_csr_rows(x), bank)
    np.testing.assert_array_equal(got, dense.nearest(x, columns, dense.make_bank(w[:, columns], metric)))
    want = reference.nearest(x, columns, reference.make_bank(w[:, columns], metric))
    assert (got[100:] == want[100:]).all()
    plain = x[:, columns] @ w[:, columns].T
    plain = (
        plain - 0.5 * (w[:, columns] ** 2).sum(1)
        if metric == "euclidean"
        else plain / np.linalg.norm(w[:, columns], axis=1)
    )
    assert (plain.argmax(axis=1) != got[:, 0]).mean() > 0.2, "float32 alone would do: this test shows nothing"


@pytest.mark.parametrize("apart", [8, 16, 64, 1])
def test_nearly_equal_centroids_are_decided_in_float64(apart: int) -> None:
    """Float32 cannot distinguish two centroids with indices j and j + ``apart``; float64 can.

    The two centroids are in one or two panels (groups of 64 centroids), and in one or two lanes (positions
    in a vector register). If the centroids are equal, the first wins.
    """
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
        got = sparse.nearest_sparse(
            to_csr_rows(x), sparse.make_sparse_bank(to_csr_rows(w), np.arange(p), "euclidean")
        )
        scores = x.astype("f8") @ w.astype("f8").T - 0.5 * (w.astype("f8") ** 2).sum(axis=1)
        np.testing.assert_array_equal(got[:, 0], scores.argmax(axis=1))
        plain = x @ w.T - 0.5 * (w**2).sum(axis=1)
        wrong += int((plain.argmax(axis=1) != got[:, 0]).sum())
    assert wrong > 100, "float32 alone would do: this test shows nothing"


def draw_documents(rng: np.random.Generator, n: int, p: int) -> np.ndarray:
    """Return random word counts (n, p) in float32; the first columns have most of the counts."""
    return rng.poisson(np.minimum(3.0, 9.0 / np.arange(1, p + 1)), (n, p)).astype("f4")


@pytest.mark.parametrize("metric", reference.METRICS)
@pytest.mark.parametrize("k", [5, 128, 300])
def test_counts_give_the_centroids_of_the_reference(k: int, metric: str) -> None:
    """Counts are summed in int16. The data have dense and sparse columns, negative counts and ties."""
    rng = np.random.default_rng(k)
    n, p = 400, 500
    x, w = draw_documents(rng, n, p), draw_documents(rng, k, p)
    x[:50], w[: k // 5] = -x[:50], -w[: k // 5]
    w[k // 2 :] = 3 * w[k - k // 2 - 1 :: -1][: k - k // 2]  # Multiples have equal cosines.
    w[-2:] = w[1]
    columns = np.sort(rng.permutation(p)[:400])
    w[:, columns[0]] += w.any(axis=1) == 0
    bank = sparse.make_sparse_bank(to_csr_rows(w), columns, metric)
    assert bank.panels.dtype == bank.value.dtype == np.int16
    assert min((bank.slot >= 0).sum(), len(bank.start)) > 20 or k == 5
    want = reference.nearest_sparse(
        to_csr_rows(x), reference.make_sparse_bank(to_csr_rows(w), columns, metric)
    )
    got = sparse.nearest_sparse(to_csr_rows(x), bank)
    densely = dense.nearest(x, columns, dense.make_bank(w[:, columns], metric))
    np.testing.assert_array_equal(got, densely)
    np.testing.assert_array_equal(got, want)
    if metric == "euclidean":
        products = x[:, columns].astype("f8") @ w[:, columns].T - 0.5 * (w[:, columns] ** 2).sum(axis=1)
        ties = (products == products.max(axis=1, keepdims=True)).sum(axis=1) > 1
        assert ties.mean() > 0.02


@pytest.mark.parametrize("metric", reference.METRICS)
def test_rows_that_are_not_counts_are_decided_among_counts(metric: str) -> None:
    """The rows have fractions, values beyond int16 and int32, and counts whose sums exceed int16."""
    rng = np.random.default_rng(3)
    x, w = draw_documents(rng, 64, 80), draw_documents(rng, 200, 80)
    x[::7] *= 0.5
    x[1::7] *= 20_000
    x[2::7] *= 3e9
    x[3::7, :4] = 4000
    x[4, 0], x[11, 0], x[18, 0] = 32_767, 32_768, -(2.0**31)
    columns = np.arange(0, 80, 2)
    w[:, 0] += 1
    bank = sparse.make_sparse_bank(to_csr_rows(w), columns, metric)
    assert bank.panels.dtype == np.int16
    want = reference.nearest_sparse(
        to_csr_rows(x), reference.make_sparse_bank(to_csr_rows(w), columns, metric)
    )
    got = sparse.nearest_sparse(to_csr_rows(x), bank)
    np.testing.assert_array_equal(got, want)
    densely = dense.nearest(x, columns, dense.make_bank(w[:, columns], metric))
    np.testing.assert_array_equal(got, densely)


@pytest.mark.parametrize("many", [1, 200])
def test_counts_at_the_limits_of_int16_do_not_overflow(many: int) -> None:
    """An overflow of int16 would change the nearest centroid.

    If there are many centroids, the kernel reads columns as lists of entries.
    """
    w = np.zeros((many + 1, 4), dtype="f4")
    w[0, :2] = 1.0
    ends = [32_767, 32_768, 65_535, 65_536, -32_767, -32_768, -32_769, -65_536]
    x = np.array([*([end, 0, 0, 0] for end in ends), *([end - 9, 9, 0, 0] for end in ends)], dtype="f4")
    bank = sparse.make_sparse_bank(to_csr_rows(w), np.arange(4), "euclidean")
    assert bank.panels.dtype == np.int16
    assert (len(bank.start) > 1) == (many == 200)
    want = [0 if row.sum() > 0 else 1 for row in x]
    assert sparse.nearest_sparse(to_csr_rows(x), bank).ravel().tolist() == want


@pytest.mark.parametrize("scale", [1e-24, 1e-35])
def test_rows_whose_squares_vanish_in_float32_are_decided(scale: float) -> None:
    rng = np.random.default_rng(8)
    w = rng.normal(size=(150, 40)).astype("f4") + 3.0
    w[75:] = w[:75] + (1e-7 * rng.normal(size=(75, 40))).astype("f4")
    x = (scale * (w[rng.integers(0, 150, 200)] + 0.1 * rng.normal(size=(200, 40)))).astype("f4")
    exact = w.astype("f8") / np.linalg.norm(w.astype("f8"), axis=1, keepdims=True)
    want = (x.astype("f8") @ exact.T).argmax(axis=1)
    columns = np.arange(40)
    sparsely = sparse.nearest_sparse(
        to_csr_rows(x), sparse.make_sparse_bank(to_csr_rows(w), columns, "cosine")
    )
    densely = dense.nearest(x, columns, dense.make_bank(w, "cosine"))
    assert (sparsely[:, 0] == want).all()
    assert (densely[:, 0] == want).all()


@kernel
def split_entries(data, indices, slot, most, size, i, places, values, thin, weights):
    return sparse._split_entries(data, indices, slot, most, size, i, places, values, thin, weights)


def test_columns_that_a_clustering_does_not_use_may_have_any_value() -> None:
    """Only values in columns that the clustering uses can send a row to the slower sums in float64.

    These sums are for rows with a fraction, or whose sum of |value| times the column's largest centroid value
    exceeds 32,767 (int16): 20,000 * 4 does. ``split_entries`` returns the numbers of entries in dense and
    sparse columns, and an upper bound of the norm of the entries, or -1 for such a row.
    """
    x = np.array([[0.5, 2.0, 3.0], [1e9, 2.5, 0.0], [0.0, 20_000.0, 0.0]], dtype="f4")
    bank = sparse.make_sparse_bank(
        to_csr_rows(np.array([[0, 4.0, 0], [0, 0, 2.0]])), np.arange(1, 3), "euclidean"
    )
    room = np.empty((1, 4), np.int64), np.empty((1, 4), np.int16), np.empty(4, np.int64), np.empty(4, "i2")
    reported = []
    for row in x:
        one = to_csr_rows(row[None])
        *counts, length = split_entries(one.data, one.indices, bank.slot, bank.column_maxima, 256, 0, *room)
        reported.append((*map(int, counts), bool(length >= 0)))
    assert reported == [(2, 0, True), (1, 0, False), (1, 0, False)]
    assert sparse.nearest_sparse(to_csr_rows(x), bank).ravel().tolist() == [1, 0, 0]


@pytest.mark.parametrize("value", [0.5, 2.0**15, 30_000.0])
def test_centroids_may_be_other_numbers_than_counts(value: float) -> None:
    rng = np.random.default_rng(4)
    x, w = draw_documents(rng, 64, 80), draw_documents(rng, 200, 80)
    w[:3, :5] = value
    bank = sparse.make_sparse_bank(to_csr_rows(w), np.arange(80), "euclidean")
    assert bank.panels.dtype == np.float32
    want = reference.nearest_sparse(
        to_csr_rows(x), reference.make_sparse_bank(to_csr_rows(w), np.arange(80), "euclidean")
    )
    np.testing.assert_array_equal(sparse.nearest_sparse(to_csr_rows(x), bank), want)


def test_a_very_large_centroid_among_counts_is_decided() -> None:
    """Among many centroids of small counts, one may have sums beyond int16 and inexact float32 squares."""
    rng = np.random.default_rng(5)
    x, w = draw_documents(rng, 200, 80), draw_documents(rng, 1200, 80)
    w[7, 70:] = 3000 + np.arange(10)
    x[0], x[1], x[2] = w[7], 100 * x[2], w[7] // 100
    bank = sparse.make_sparse_bank(to_csr_rows(w), np.arange(80), "euclidean")
    assert bank.panels.dtype == np.int16
    want = reference.nearest_sparse(
        to_csr_rows(x), reference.make_sparse_bank(to_csr_rows(w), np.arange(80), "euclidean")
    )
    assert want[0] == 7
    np.testing.assert_array_equal(sparse.nearest_sparse(to_csr_rows(x), bank), want)


def test_rows_and_centroids_without_entries_are_zeros() -> None:
    x = to_csr_rows(np.array([[0.0, 0, 0], [0, 3, 0], [0, 0, 0]]))
    w = to_csr_rows(np.array([[0.0, 2, 0], [0, 0, 0]]))
    for module in (reference, sparse):
        bank = module.make_sparse_bank(w, np.arange(3), "euclidean")
        assert module.nearest_sparse(x, bank).ravel().tolist() == [1, 0, 1]
