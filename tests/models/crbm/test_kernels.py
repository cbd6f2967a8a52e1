"""The numba kernels for inference in RBMs equal the reference for many shapes, weights and batches."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from scalelatent.engine.backend import find_kernel
from scalelatent.models.crbm import KERNELS
from scalelatent.models.crbm.kernels.inference import Inference, WeightError
from scalelatent.models.crbm.kernels.reference import sigmoid

METHODS = ("sum_product", "mixed_product", "max_product", "mean_field")
# Numbers of units. Kernels process 8 or 16 units at a time, so some numbers are no multiple of 8.
WIDTHS = st.sampled_from([1, 3, 7, 8, 9, 16, 33])


def draw(
    seed: int, v: int, h: int, rows: int, largest: float, undecided: bool = True
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw couplings with max |W| = ``largest``, and biases; ``undecided`` makes P(unit = 1) close to 0.5."""
    rng = np.random.default_rng(seed)
    w = rng.normal(size=(v, h))
    w = (w * largest / np.abs(w).max()).astype("f4")
    bv, bh = rng.normal(size=(rows, v)), rng.normal(size=(rows, h))
    if undecided:
        bv, bh = bv - w.sum(axis=1) / 2, bh - w.sum(axis=0) / 2
    return w, bv.astype("f4"), bh.astype("f4")


def run(backend: str, name: str, w: np.ndarray, *args: Any) -> Any:
    return find_kernel(f"crbm_{name}", backend)(find_kernel("crbm_make_coupling", backend)(w), *args)


def assert_same_beliefs(found: Inference, want: Inference, atol: float) -> None:
    for got, wanted in ((found.lv, want.lv), (found.lh, want.lh)):
        assert got.dtype == np.float32
        assert_allclose(sigmoid(got.astype("f8")), sigmoid(wanted), rtol=0, atol=atol)
    assert_allclose(found.change, want.change, rtol=0, atol=2 * atol)
    assert_array_equal(found.sweeps, want.sweeps)


@pytest.mark.parametrize("name", METHODS)
@given(st.integers(0, 99), WIDTHS, WIDTHS, st.integers(0, 3), st.sampled_from([0.3, 2.0]))
def test_kernels_equal_the_reference(name: str, seed: int, v: int, h: int, rows: int, largest: float) -> None:
    w, bv, bh = draw(seed, v, h, rows, largest)
    found, want = (run(backend, name, w, bv, bh, 5) for backend in ("numba", "reference"))
    if name in ("mixed_product", "max_product"):  # Rounding may decide a unit whose log odds are almost 0.
        clear = np.abs(want.lv).min(axis=1, initial=np.inf) > 1e-4
        found, want = (
            Inference(*(getattr(f, k)[clear] for k in ("lv", "lh", "sweeps", "change")))
            for f in (found, want)
        )
    # A max-product message passes on the rounding error of its sender, so the errors grow with each sweep.
    assert_same_beliefs(found, want, 1e-4 if name == "max_product" else 1e-5)


@pytest.mark.parametrize("largest", [5.0, 10.0, 12.0, 20.0, 39.0])
@pytest.mark.parametrize("seed", range(3))
def test_large_weights_give_accurate_beliefs(largest: float, seed: int) -> None:
    """Beliefs P(unit = 1) near 0 and 1 are accurate, and products of messages do not overflow or become 0.

    The kernels store also P(unit = 0), because 1 - P(unit = 1) would lose a small probability in float32.
    """
    w, bv, bh = draw(seed, 60, 40, 3, largest, undecided=False)
    found, want = (run(backend, "sum_product", w, bv, bh, 10) for backend in ("numba", "reference"))
    assert_same_beliefs(found, want, 1e-5 if largest <= 5 else 1e-3)
    pairs = [np.zeros(w.shape, dtype) for dtype in ("f4", "f8")]
    with_pairs = run("numba", "sum_product_pairs", w, bv, bh, 10, None, pairs[0])
    wanted = run("reference", "sum_product_pairs", w, bv, bh, 10, None, pairs[1])
    assert_allclose(pairs[0], pairs[1], rtol=0, atol=3e-3)
    assert_allclose(with_pairs.log_z, wanted.log_z, rtol=1e-5)


@pytest.mark.parametrize("largest", [20.0, -20.0])
def test_weights_at_the_limit_do_not_overflow(largest: float) -> None:
    """All messages are as large (or small) as the weights permit, so their products are, too."""
    w = np.full((50, 30), largest, dtype="f4")
    bv, bh = np.full((1, 50), -10 * largest, "f4"), np.full((1, 30), -20 * largest, "f4")
    found, want = (run(backend, "sum_product", w, bv, bh, 6) for backend in ("numba", "reference"))
    assert_same_beliefs(found, want, 1e-3)
    assert np.isfinite(found.lv).all()


@given(st.integers(0, 99), WIDTHS, WIDTHS, st.sampled_from([None, 1e-3]), st.sampled_from(["f4", "f8"]))
def test_pair_beliefs_equal_the_reference(seed: int, v: int, h: int, tol: float | None, dtype: str) -> None:
    w, bv, bh = draw(seed, v, h, 3, 1.0)
    found, want = np.ones((v, h), dtype), np.ones((v, h))
    inferred = run("numba", "sum_product_pairs", w, bv, bh, 8, tol, found)
    wanted = run("reference", "sum_product_pairs", w, bv, bh, 8, tol, want)
    assert_allclose(found, want, rtol=0, atol=1e-5)
    assert_allclose(inferred.log_z, wanted.log_z, rtol=0, atol=1e-6 * (v + h) * 8)
    assert_array_equal(inferred.sweeps, wanted.sweeps)
    plain = run("numba", "sum_product", w, bv, bh, 8, tol)
    assert_array_equal(plain.change, inferred.change, strict=True)
    assert plain.log_z is None
    # After a row has reached the tolerance, the kernel that computes P(v = 1, h = 1) makes one more sweep.
    assert_array_equal(inferred.sweeps, np.minimum(plain.sweeps + (tol is not None), 8))
    for row, sweeps in enumerate(inferred.sweeps):
        alone = run("numba", "sum_product", w, bv[row : row + 1], bh[row : row + 1], int(sweeps))
        assert_array_equal(alone.lv[0], inferred.lv[row], strict=True)
        assert_array_equal(alone.lh[0], inferred.lh[row], strict=True)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("tol", [None, 1e-3])
def test_a_row_does_not_depend_on_the_others(name: str, tol: float | None) -> None:
    """The bits do not depend on the batch of a row or on its position in the batch."""
    w, bv, bh = draw(0, 45, 29, 150, 0.5)
    bv[:50] *= 10  # With large biases, rows need different numbers of sweeps to reach the tolerance.
    whole = run("numba", name, w, bv, bh, 12, tol)
    assert tol is None or len(set(whole.sweeps)) > 1
    for rows in (slice(0, 1), slice(3, 5), slice(60, 149), slice(149, 150)):
        part = run("numba", name, w, bv[rows], bh[rows], 12, tol)
        for field in ("lv", "lh", "sweeps", "change"):
            assert_array_equal(getattr(part, field), getattr(whole, field)[rows], strict=True)


def test_pairs_of_a_split_batch_equal_those_of_the_whole() -> None:
    w, bv, bh = draw(1, 20, 12, 9, 1.0)
    whole, parts = np.zeros((20, 12), "f4"), np.zeros((20, 12), "f4")
    run("numba", "sum_product_pairs", w, bv, bh, 5, None, whole)
    for rows in (slice(0, 1), slice(1, 6), slice(6, 9)):
        run("numba", "sum_product_pairs", w, bv[rows], bh[rows], 5, None, parts)
    assert_array_equal(whole, parts, strict=True)


@pytest.mark.parametrize("tol", [None, 1e-3])
def test_inference_on_a_large_graph_takes_the_planned_memory(tol: float | None) -> None:
    """Inference stores exp(W) and messages, both of the size of W, and uses less than four times the size."""
    v, h = 2000, 512
    rng = np.random.default_rng(0)
    w, bv, bh = (rng.normal(size=shape).astype("f4") for shape in ((v, h), (1, v), (1, h)))
    w *= np.float32(0.01)
    run, make = (find_kernel(f"crbm_{name}", "numba") for name in ("sum_product", "make_coupling"))
    # The first call compiles, and its memory is not measured.
    run(make(w[:9, :9]), bv[:, :9], bh[:, :9], 1, tol)
    tracemalloc.start()
    try:
        run(make(w), bv, bh, 3, tol)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 2 * w.nbytes < peak < 4 * w.nbytes


def test_inputs_are_not_changed() -> None:
    w, bv, bh = draw(2, 9, 5, 2, 1.0)
    for a in (w, bv, bh):
        a.flags.writeable = False
    for name in METHODS:
        run("numba", name, w, bv, bh, 3)
        run("numba", name, w, bv.astype("f8")[:, ::1], np.asfortranarray(bh), 3)


@pytest.mark.parametrize("backend", ["reference", "numba"])
def test_inconsistent_shapes_are_refused(backend: str) -> None:
    w, bv, bh = draw(3, 9, 5, 2, 1.0)
    for name in METHODS:
        with pytest.raises(ValueError, match=r"\(rows, 9\) and \(rows, 5\)"):
            run(backend, name, w, bh, bv, 3)
    with pytest.raises(ValueError, match="shape"):
        run("numba", "sum_product_pairs", w, bv, bh, 3, None, np.zeros((5, 9)))


@pytest.mark.parametrize("bad", [np.nan, np.inf, 41.0])
def test_weights_above_40_and_values_that_are_not_finite_are_refused(bad: float) -> None:
    w, bv, bh = draw(4, 4, 3, 2, 1.0)
    w[1, 1] = bad
    with pytest.raises(WeightError, match=r"lower the learning rate"):
        find_kernel("crbm_make_coupling", "numba")(w)
    if not np.isfinite(bad):
        bv[1, 2] = bad
        for name in METHODS:
            with pytest.raises(WeightError, match="row 1"):
                run("numba", name, np.ones((4, 3)), bv, bh, 3)


def test_every_kernel_has_callable_functions() -> None:
    for name, bodies in KERNELS.items():
        for backend in bodies:
            if backend != "cupy":
                assert callable(find_kernel(name, backend))
