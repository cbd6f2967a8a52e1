"""Principal components of one-hot codes, by EM or by inner products, equal those of numpy's SVD."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from scalelatent.contract.learners import Block
from scalelatent.contract.stats import Stats
from scalelatent.engine.backend import find_kernel, make_backend
from scalelatent.models.mbn.model import pca
from scalelatent.models.mbn.model.pca import (
    LANCZOS_ROWS,
    CodeCounts,
    CodeProjection,
    Components,
    StreamedPca,
    compute_coordinates,
    run_kernel_pca,
)

V, K, N = 12, 7, 150


@pytest.fixture(scope="module")
def row_codes() -> np.ndarray:
    """Return cluster indices (N, V): 60 % of a row's are those of its group (one of five), others random."""
    rng = np.random.default_rng(0)
    kinds, own = rng.integers(0, 5, N), rng.integers(0, K, (5, V))
    return np.where(rng.random((N, V)) < 0.6, own[kinds], rng.integers(0, K, (N, V))).astype(np.uint16)


@pytest.fixture(scope="module")
def numpy_svd(row_codes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the centred one-hot rows of the codes, and their components and variances by numpy."""
    h = np.eye(K)[row_codes].reshape(N, -1)
    h -= h.mean(axis=0)
    _, s, vt = np.linalg.svd(h, full_matrices=False)
    signs = np.sign(vt[np.arange(len(vt)), np.abs(vt).argmax(axis=1)])
    return h, vt * signs[:, None], s**2 / N


def compute_streamed_pca(codes: np.ndarray, d: int, **options: Any) -> tuple[StreamedPca, Any]:
    backend = make_backend("cpu")
    counts = Stats.zeros(CodeCounts(V, K).layout())
    CodeCounts(V, K).accumulate(None, Block(codes, None, None, 0), counts)
    learner = StreamedPca.create(counts["counts"], len(codes), d, **options)
    state = learner.start(np.random.default_rng(0))
    while not learner.is_done(state):
        reduction = learner.reductions()["train"]
        stats, prepared = Stats.zeros(reduction.layout()), reduction.prepare(state, backend)
        for start in range(0, len(codes), 40):
            reduction.accumulate(prepared, Block(codes[start : start + 40], None, None, start), stats)
        state = learner.update(state, {"train": stats})
    return learner, state


def assert_close_components(found: Components, codes: np.ndarray, svd: Any, d: int, tol: float) -> None:
    h, vt, variance = svd
    np.testing.assert_allclose(found.variance[:d], variance[:d], rtol=tol)
    np.testing.assert_allclose(found.table.reshape(-1, found.table.shape[2])[:, :d].T, vt[:d], atol=20 * tol)
    assert found.total_variance == pytest.approx(variance.sum())
    projection = CodeProjection.from_components(found.take_first(d))
    got = projection.apply(projection.prepare(make_backend("cpu")), Block(codes, None, None, 0))
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, h @ vt[:d].T, atol=200 * tol)


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_components_of_few_rows_come_from_their_inner_products(
    row_codes: np.ndarray, numpy_svd: Any, device: str
) -> None:
    found = run_kernel_pca(row_codes, K, make_backend(device).kernel)
    assert len(found.offset) == V * (K - 1)
    assert_close_components(found, row_codes, numpy_svd, 6, 1e-7)


def test_components_of_many_rows_come_from_em(row_codes: np.ndarray, numpy_svd: Any) -> None:
    learner, state = compute_streamed_pca(row_codes, 5, tol=1e-6)
    assert 2 < state.iteration < 200
    assert_close_components(learner.components(state), row_codes, numpy_svd, 5, 1e-6)
    reported = learner.summary(state)
    assert reported["objective"] == pytest.approx(1 - numpy_svd[2][:5].sum() / numpy_svd[2].sum())
    # With tol=0 the fit ends after ``max_iter`` passes.
    assert compute_streamed_pca(row_codes, 5, tol=0.0, max_iter=3)[1].iteration == 3


def test_equal_rows_and_too_many_components_give_zeros() -> None:
    same = np.ones((30, V), dtype=np.uint16)
    for found in (
        run_kernel_pca(same, K, make_backend("cpu").kernel),
        (lambda learner, state: learner.components(state))(*compute_streamed_pca(same, 3, max_iter=5)),
    ):
        assert not found.variance.any()
        assert np.isfinite(found.table).all()
        assert found.total_variance == 0
    two = np.tile(np.array([[0], [1]], dtype=np.uint16), (15, V))
    learner, state = compute_streamed_pca(two, 10)
    found = learner.components(state)
    np.testing.assert_allclose(found.variance[1:], 0, atol=1e-12)
    assert found.variance[0] == pytest.approx(found.total_variance)


def test_coordinates_equal_those_of_one_hot_rows(row_codes: np.ndarray) -> None:
    kernel = partial(find_kernel, backend="numba")
    hot = np.eye(K)[row_codes].reshape(N, -1)
    u, s, _ = np.linalg.svd(hot - hot.mean(axis=0), full_matrices=False)
    found = compute_coordinates(row_codes, 2, kernel)
    np.testing.assert_allclose(np.abs(found), np.abs(u[:, :2] * s[:2]), atol=1e-8)
    assert (found[np.abs(found).argmax(axis=0), [0, 1]] > 0).all()
    assert compute_coordinates(row_codes[:1], 2, kernel).tolist() == [[0, 0]]


@pytest.mark.parametrize("kind", ["random", "two rows", "one row"])
def test_coordinates_of_many_rows_need_no_full_decomposition(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = partial(find_kernel, backend="numba")
    n = LANCZOS_ROWS + 50
    codes = np.random.default_rng(0).integers(0, K, (n, V)).astype(np.uint16)
    codes[: n // 2, : V // 2] = 0  # The first direction distinguishes two halves of the rows.
    if kind != "random":
        codes = codes[[0, n - 1] if kind == "two rows" else [0, 0]][np.arange(n) % 2]
    hot = np.eye(K)[codes].reshape(n, -1)
    u, s, _ = np.linalg.svd(hot - hot.mean(axis=0), full_matrices=False)
    whole: list[int] = []
    monkeypatch.setattr(
        pca, "find_eigenvectors", lambda c, d, k, real=pca.find_eigenvectors: whole.append(d) or real(c, d, k)
    )
    found = compute_coordinates(codes, 2, kernel)
    np.testing.assert_allclose(np.abs(found), np.abs(u[:, :2] * s[:2]), atol=1e-6)
    if kind == "random":
        assert not whole


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@pytest.mark.parametrize("name", ["gather_sum", "scatter_add", "count_matches"])
def test_kernels_of_components_equal_the_reference(row_codes: np.ndarray, name: str, dtype: Any) -> None:
    h, rng = np.eye(K)[row_codes].reshape(N, -1), np.random.default_rng(3)
    table, y = rng.normal(size=(V, K, 4)), rng.normal(size=(N, 4))
    for backend in ("reference", "numba"):
        kernel = find_kernel(f"mbn_{name}", backend)
        if name == "gather_sum":
            np.testing.assert_allclose(
                kernel(row_codes.astype(dtype), table), h @ table.reshape(-1, 4), atol=1e-12
            )
        elif name == "count_matches":
            np.testing.assert_array_equal(kernel(row_codes.astype(dtype)), h @ h.T)
            np.testing.assert_array_equal(kernel(row_codes[:3].astype(dtype), row_codes), h[:3] @ h.T)
        else:
            total = table.copy()
            kernel(row_codes.astype(dtype), y, total)
            np.testing.assert_allclose(total.reshape(-1, 4), table.reshape(-1, 4) + h.T @ y, atol=1e-12)
