"""The CUDA kernels of bootstrap networks compile, and give the reference's codes on a processor."""

from __future__ import annotations

import importlib
from dataclasses import replace

import numpy as np
import pytest

from scalelatent.kernels.cuda import Kernels
from scalelatent.kernels.sparse_rows import CsrRows
from scalelatent.models.mbn.kernels import reference
from scalelatent.models.mbn.kernels.cpu import dense, draws
from scalelatent.models.mbn.model.sampling import make_key
from tests.helpers import to_csr_rows

KERNELS = {
    "mbn_gather_f32",
    "mbn_gather_u8",
    "mbn_take_f32",
    "mbn_take_u8",
    "mbn_sparse",
    "mbn_draw",
    "mbn_complete",
    "mbn_list_marked",
    "mbn_lists",
    "mbn_count_u16",
    "mbn_count_i32",
}


@pytest.fixture(scope="session")
def emulated(emulate):
    return emulate("mbn")


@pytest.fixture(scope="session")
def cuda_text() -> str:
    return Kernels("scalelatent.models.mbn.kernels").text


@pytest.fixture
def gpu(fake):
    return importlib.import_module("scalelatent.models.mbn.kernels.gpu")


@pytest.mark.parametrize("metric", reference.METRICS)
@pytest.mark.parametrize("dtype", ["u1", "f4", "f8"])
@pytest.mark.parametrize(("n", "p", "k", "q"), [(1, 1, 1, 1), (5, 40, 31, 33), (9, 70, 40, 64)])
def test_codes_of_dense_rows_equal_the_reference(fake, gpu, n, p, k, q, dtype, metric):
    rng = np.random.default_rng(n)
    x, w = ((rng.random((m, p)) * 255 + 1).astype(dtype) for m in (n, k))
    columns = np.sort(rng.permutation(p)[:q])
    want = reference.nearest(x, columns, reference.make_bank(w[:, columns], metric))
    bank = gpu.make_bank(w[:, columns], metric)
    for rows in (x, fake.asarray(x)):
        got = gpu.nearest(rows, columns, bank)
        assert isinstance(got, np.ndarray)
        assert got.dtype == np.int32
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", ["u1", "f4"])
@pytest.mark.parametrize(("rows", "k"), [(20, 5), (90, 45), (90, 1)])
def test_clusterings_that_share_a_pool_have_the_codes_of_a_processor(gpu, rows, k, dtype):
    """Clusterings draw their centroids from one pool of rows; each row has a short list of candidates.

    If no centroid of a clustering is among a row's candidates, as for k = 1, the host codes the row.
    """
    rng = np.random.default_rng(rows + k)
    x, w = ((rng.normal(size=(m, 12)) * 40 + 128).astype(dtype) for m in (30, rows))
    w[7] = w[3]
    draws = np.zeros((6, rows), dtype=bool)
    for own in draws:
        own[rng.permutation(rows)[:k]] = True
    columns = np.arange(12)
    want = dense.nearest(x, columns, dense.make_bank(w, "euclidean", draws))
    np.testing.assert_array_equal(gpu.nearest(x, columns, gpu.make_bank(w, "euclidean", draws)), want)
    bank = gpu.make_sparse_bank(to_csr_rows(w), columns, "euclidean", draws)
    np.testing.assert_array_equal(gpu.nearest_sparse(to_csr_rows(x), bank), want)


def test_tiles_of_rows_and_no_rows_are_encoded(gpu, monkeypatch):
    monkeypatch.setattr(gpu, "MAX_SCORES", 50)
    rng = np.random.default_rng(0)
    x, w = (rng.integers(0, 256, (m, 20), dtype=np.uint8) for m in (23, 10))
    columns = np.arange(20)
    bank = gpu.make_bank(w, "euclidean")
    want = reference.nearest(x, columns, reference.make_bank(w, "euclidean"))
    np.testing.assert_array_equal(gpu.nearest(x, columns, bank), want)
    assert len(gpu.nearest(x[:0], columns, bank)) == 0


@pytest.mark.parametrize("metric", reference.METRICS)
@pytest.mark.parametrize(("low", "high"), [(0, 256), (0, 2), (254, 256)])
def test_products_of_bytes_are_exact_integers_and_give_the_codes_of_floats(fake, gpu, low, high, metric):
    rng = np.random.default_rng(high)
    x, w = (rng.integers(low, high, (m, 5000), dtype=np.uint8) for m in (9, 50))
    x[:, 0] = w[:, 0] = 1  # The cosine of a row of zeros is undefined.
    w[30], x[4], x[5] = w[2], w[30], 255
    columns = np.arange(5000)
    bytes_bank, floats_bank = gpu.make_bank(w, metric), gpu.make_bank(w.astype("f4"), metric)
    assert bytes_bank.w.dtype == np.int8
    assert bytes_bank.w.shape == (64, 5008)
    want = reference.nearest(x, columns, reference.make_bank(w, metric))
    assert want[4, 0] == 2, "equals go to the lowest index"
    for rows, bank in [(x, bytes_bank), (x.astype("f4"), bytes_bank), (x, floats_bank)]:
        fake.LAUNCHED.clear()
        np.testing.assert_array_equal(gpu.nearest(rows, columns, bank), want)
        name = "mbn_take_u8" if rows.dtype == "u1" and bank is bytes_bank else "mbn_take_f32"
        assert name in {launched for launched, _ in fake.LAUNCHED}


def test_bytes_whose_sums_of_products_exceed_int32_are_multiplied_as_floats(gpu):
    w = np.full((2, 33_026), 255, dtype=np.uint8)
    w[0, 0] = 254
    assert gpu.make_bank(w, "euclidean").w.dtype == np.float32
    bank = gpu.make_bank(w[:, 1:], "euclidean")
    assert bank.w.dtype == np.int8
    np.testing.assert_array_equal(gpu.nearest(w, np.arange(33_025), bank), [[0], [0]])


def test_ties_within_rounding_are_decided_as_on_a_processor(fake, gpu):
    rng = np.random.default_rng(0)
    base = rng.normal(size=200) * 100
    w = (base + rng.normal(size=(64, 200)) * 1e-2).astype("f4")
    x = (base + rng.normal(size=(90, 200)) * 1e-2).astype("f4")
    w[50] = w[3]
    x[:20] = w[40:60]
    columns = np.arange(200)
    got = gpu.nearest(x, columns, gpu.make_bank(w, "euclidean"))
    np.testing.assert_array_equal(got, dense.nearest(x, columns, dense.make_bank(w, "euclidean")))
    assert got[10] == 3, "equals go to the lowest index"
    plain = (x @ w.T - 0.5 * np.einsum("jc,jc->j", w, w)).argmax(axis=1)
    assert (plain != got[:, 0]).mean() > 0.2, "float32 alone would do: this test shows nothing"


def test_rows_whose_squares_exceed_float32_have_the_same_codes(gpu):
    rng = np.random.default_rng(8)
    w = rng.normal(size=(150, 40)).astype("f4") + 3.0
    w[75:] = w[:75] + (1e-7 * rng.normal(size=(75, 40))).astype("f4")
    x = (1e-24 * (w[rng.integers(0, 150, 100)] + 0.1 * rng.normal(size=(100, 40)))).astype("f4")
    columns = np.arange(40)
    want = dense.nearest(x, columns, dense.make_bank(w, "cosine"))
    np.testing.assert_array_equal(gpu.nearest(x, columns, gpu.make_bank(w, "cosine")), want)


@pytest.mark.parametrize("metric", reference.METRICS)
@pytest.mark.parametrize("k", [7, 4500])
def test_codes_of_sparse_rows_equal_the_reference(gpu, k, metric):
    rng = np.random.default_rng(k)
    x, w = (rng.poisson(0.3, (m, 30)).astype("f4") for m in (12, k))
    columns = np.sort(rng.permutation(30)[:20])
    # Give each centroid an entry other than 0, because the cosine of a centroid of zeros is undefined.
    w[:, columns[0]] += 1.0
    x[3] = 0.0
    x[5, columns] = w[k - 1, columns]
    want = reference.nearest(x, columns, reference.make_bank(w[:, columns], metric))
    bank = gpu.make_sparse_bank(to_csr_rows(w), columns, metric)
    np.testing.assert_array_equal(gpu.nearest_sparse(to_csr_rows(x), bank), want)
    assert len(gpu.nearest_sparse(to_csr_rows(x)[:0], bank)) == 0


@pytest.mark.parametrize("dtype", ["u2", "u4"])
@pytest.mark.parametrize(("n", "v", "below", "k"), [(1, 1, 1, 1), (20, 150, 9, 12), (6, 7, 4000, 5000)])
def test_nearest_codes_equal_the_reference(fake, gpu, n, v, below, k, dtype):
    rng = np.random.default_rng(v)
    x, centroids = (rng.integers(0, below, (*m, v)).astype(dtype) for m in ((n,), (2, k)))
    x[0] = centroids[-1, -1]
    units = rng.random((2, v, below)) < 0.5
    want = reference.nearest_codes(x, reference.make_lists(centroids, units))
    lists = gpu.make_lists(centroids, units)
    for rows in (x, fake.asarray(x.astype("i4"))):
        found = gpu.nearest_codes(rows, lists)
        assert found.dtype == np.uint16
        np.testing.assert_array_equal(found, want)
    assert len(gpu.nearest_codes(x[:0], lists)) == 0


def test_lists_made_on_the_device_have_the_members_of_those_of_a_processor(gpu):
    rng, (sets, k, v, below) = np.random.default_rng(2), (3, 200, 5, 140)
    codes, units = rng.integers(0, below, (sets, k, v)).astype("u2"), rng.random((sets, v, below)) < 0.5
    lists = gpu.make_lists(codes, units)
    start, members = lists.start.get(), lists.members.get()
    for s, i, c in np.ndindex(sets, v, below):
        found = members[s, i, start[s, i, c] : start[s, i, c + 1]]
        want = np.flatnonzero(codes[s, :, i] == c) if units[s, i, c] else []
        np.testing.assert_array_equal(np.sort(found), want)


@pytest.mark.parametrize(
    ("n", "m"), [(1, 1), (8, 8), (8, 0), (33, 1), (5000, 2500), (5000, 4999), (9001, 700)]
)
def test_draws_on_the_device_equal_those_of_a_processor(fake, gpu, n, m):
    key = make_key(7, "units")
    masks = gpu.choose_masks(key, 3, 30, 40, n, m)
    assert isinstance(masks, fake.ndarray)
    assert masks.dtype == np.bool_
    want = draws.choose_masks(key, 3, 30, 40, n, m)
    assert (want.sum(axis=1) == m).all()
    np.testing.assert_array_equal(masks.get(), want)


@pytest.mark.parametrize("by_mask", [False, True])
@pytest.mark.parametrize(("n", "m"), [(1, 1), (70, 3), (300, 299), (9001, 500), (60_000, 2000)])
def test_numbers_that_a_device_draws_equal_those_of_a_processor(gpu, n, m, by_mask):
    key = make_key(7, "rows")
    found = gpu.choose_numbers(key, 2, 5, 3, n, m, by_mask).get()
    want = draws.choose_numbers(key, 2, 5, 3, n, m, by_mask)
    np.testing.assert_array_equal(found, want)
    assert all(len(np.unique(found[i * m : (i + 1) * m])) == m for i in range(3))


def test_more_centroids_than_16_bits_have_codes_of_32_bits(gpu):
    codes = np.arange(2**16 + 5, dtype="u4")[None, :, None]
    lists = gpu.make_lists(codes, np.ones((1, 1, 2**16 + 5), dtype=bool))
    found = gpu.nearest_codes(np.array([[2**16 + 3], [7]]), lists)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, [[2**16 + 3], [7]])


def test_codes_without_a_shared_unit_are_0(gpu):
    x, centroids = np.zeros((5, 3), dtype="u2"), np.ones((1, 4, 3), dtype="u2")
    assert not gpu.nearest_codes(x, gpu.make_lists(centroids, np.ones((1, 3, 2), dtype=bool))).any()


def test_every_kernel_is_launched_with_its_declared_arguments(fake, gpu, emulated, cuda_text):
    x = np.eye(4, dtype=np.float32)
    for rows in (x, x.astype(np.uint8)):
        gpu.nearest(rows, np.arange(4), gpu.make_bank(rows, "euclidean"))
    gpu.nearest_sparse(to_csr_rows(x), gpu.make_sparse_bank(to_csr_rows(x), np.arange(4), "cosine"))
    units = gpu.choose_masks(make_key(0, "units"), 2, 0, 1, 8, 4).reshape(1, 4, 2)
    gpu.choose_numbers(make_key(0, "rows"), 2, 0, 1, 90, 3, False)
    lists = gpu.make_lists(x[None].astype("u2"), units)
    gpu.nearest_codes(x.astype("u2"), lists)
    gpu.nearest_codes(x.astype("u2"), replace(lists, members=fake.zeros((1, 4, 2**16 + 1), "i4")))
    assert {name for name, _ in fake.LAUNCHED} >= set(emulated.names) == KERNELS
    assert f"constexpr int THREADS = {gpu.THREADS};" in cuda_text


@pytest.mark.parametrize("csr", [False, True])
@pytest.mark.parametrize("dtype", ["i1", "u1", "u2", "f4", "f8"])
def test_a_block_is_converted_once_for_all_clusterings_of_a_layer(fake, dtype, csr):
    """The rows of a block are converted once per layer, not per clustering; HostBackend gives equal codes."""
    from scalelatent.contract.learners import Block
    from scalelatent.engine.backend import CupyBackend, HostBackend
    from scalelatent.models.mbn.model.layers import ArraySets, make_layers
    from scalelatent.models.mbn.model.network import LayerCoder, convert_rows

    x = np.random.default_rng(1).integers(1, 99, (40, 9)).astype(dtype)
    options = {"n_features": 9, "n_clusterings": 4, "fraction": 0.6, "metric": "euclidean", "seed": 3}
    layers = make_layers([12, 6], n_rows=40, csr=csr, dtype=str(x.dtype), **options)
    rows = replace(to_csr_rows(x), data=to_csr_rows(x).data.astype(dtype)) if csr else x
    for layer in layers:
        parts = [layer.take(which, rows, layer.rows(which)) for which in range(4)]
        joined = CsrRows.concatenate(parts) if isinstance(parts[0], CsrRows) else np.concatenate(parts)
        coder = LayerCoder(layer, ArraySets(joined, layer.k), 0, 4)
        card, host = (
            coder.apply(coder.prepare(backend), Block(rows, None, None, 0))
            for backend in (CupyBackend(), HostBackend())
        )
        np.testing.assert_array_equal(card, host)
        moved = convert_rows(layer, CupyBackend(), rows)
        parts = (moved.data, moved.indices, moved.indptr) if isinstance(moved, CsrRows) else (moved,)
        assert all(isinstance(part, fake.ndarray) for part in parts)
        first = "u1" if dtype == "u1" and not csr else "f4"
        assert parts[0].dtype == ("i4" if layer.number > 1 else first)
        rows = host
