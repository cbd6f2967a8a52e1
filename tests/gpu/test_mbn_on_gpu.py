"""Kernels of bootstrap networks on a device give the codes of the processor, for every row.

These tests are deselected without ``-m gpu``.
"""

from __future__ import annotations

import numpy as np
import pytest

from scalelatent.kernels.sparse_rows import CsrRows
from scalelatent.models.mbn.kernels import reference
from scalelatent.models.mbn.kernels.cpu import dense, sparse
from scalelatent.models.mbn.kernels.cpu import lists as by_lists

pytestmark = pytest.mark.gpu


@pytest.fixture
def gpu(real):
    from scalelatent.models.mbn.kernels import gpu

    return gpu


@pytest.mark.parametrize("metric", reference.METRICS)
@pytest.mark.parametrize("dtype", ["u1", "f4"])
@pytest.mark.parametrize(("n", "p", "k"), [(1, 5, 3), (3000, 784, 500), (20_000, 200, 5000)])
def test_codes_of_dense_rows_on_a_device_equal_the_processors(real, gpu, n, p, k, dtype, metric):
    rng = np.random.default_rng(n)
    x, w = ((rng.random((m, p)) * 255 + 1).astype(dtype) for m in (n, k))
    x[: n // 2] = w[rng.integers(0, k, n // 2)]
    columns = np.sort(rng.permutation(p)[: p // 2 + 1])
    want = dense.nearest(x, columns, dense.make_bank(w[:, columns], metric))
    bank = gpu.make_bank(w[:, columns], metric)
    for rows in (x, real.asarray(x)):
        np.testing.assert_array_equal(gpu.nearest(rows, columns, bank), want)


def test_ties_within_rounding_on_a_device_are_decided_as_on_a_processor(real, gpu):
    rng = np.random.default_rng(0)
    base = rng.normal(size=300) * 100
    w, x = ((base + rng.normal(size=(m, 300)) * 1e-2).astype("f4") for m in (3000, 10_000))
    columns = np.arange(300)
    want = dense.nearest(x, columns, dense.make_bank(w, "euclidean"))
    np.testing.assert_array_equal(gpu.nearest(x, columns, gpu.make_bank(w, "euclidean")), want)


@pytest.mark.parametrize("metric", reference.METRICS)
@pytest.mark.parametrize("k", [500, 9000])
def test_codes_of_sparse_rows_on_a_device_equal_the_processors(real, gpu, k, metric):
    rng = np.random.default_rng(k)
    share = np.minimum(1.0, 8.0 / np.arange(1, 1001))
    made = []
    for m in (5000, k):
        x = (rng.normal(size=(m, 1000)) * (rng.random((m, 1000)) < share)).astype("f4")
        x[:, 0] = 1.0
        rows, columns = np.nonzero(x)
        indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=m))])
        made.append(CsrRows(x[rows, columns], columns.astype("i4"), indptr, x.shape))
    x, w = made
    columns = np.sort(rng.permutation(1000)[:500])
    columns[0] = 0
    want = sparse.nearest_sparse(x, sparse.make_sparse_bank(w, columns, metric))
    np.testing.assert_array_equal(gpu.nearest_sparse(x, gpu.make_sparse_bank(w, columns, metric)), want)


@pytest.mark.parametrize(("below", "k"), [(8000, 4000), (20_000, 10_000), (62, 31)])
def test_nearest_codes_on_a_device_equal_the_processors(real, gpu, below, k):
    rng = np.random.default_rng(k)
    x, centroids = (rng.integers(0, below, (*m, 400)).astype("u2") for m in ((20_000,), (2, k)))
    units = rng.random((2, 400, below)) < 0.5
    want = by_lists.nearest_codes(x, by_lists.make_lists(centroids, units))
    lists = gpu.make_lists(centroids, units)
    for rows in (x, real.asarray(x.astype("i4"))):
        np.testing.assert_array_equal(gpu.nearest_codes(rows, lists), want)
