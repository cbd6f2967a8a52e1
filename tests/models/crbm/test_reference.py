"""Inference by the reference kernels agrees with the enumeration of all states of small graphs."""

from __future__ import annotations

import importlib
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from scalelatent.models.crbm.kernels import reference
from scalelatent.models.crbm.kernels.reference import make_coupling, sigmoid


def enumerate_states(w: np.ndarray, bv: np.ndarray, bh: np.ndarray) -> dict[str, np.ndarray]:
    """Return exact P(unit = 1), P(both units = 1), log Z and best states, from all 2^(v + h) states."""
    v, h = w.shape
    states = np.array(list(product([0, 1], repeat=v + h)), dtype=float)
    vs, hs = states[:, :v], states[:, v:]
    energy = np.einsum("si,ij,sj->s", vs, w, hs) + vs @ bv + hs @ bh
    log_z = np.logaddexp.reduce(energy)
    p = np.exp(energy - log_z)
    of_v: dict[tuple, float] = {}
    for s in range(len(p)):
        of_v[tuple(vs[s])] = of_v.get(tuple(vs[s]), 0.0) + p[s]
    return {
        "tau_v": p @ vs,
        "tau_h": p @ hs,
        "pairs": np.einsum("s,si,sj->ij", p, vs, hs),
        "log_z": log_z,
        "map": states[p.argmax()],
        "marginal_map": np.array(max(of_v, key=lambda state: of_v[state])),
    }


def draw(seed: int, v: int, h: int, scale: float, rows: int = 1) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(v, h)) * scale, rng.normal(size=(rows, v)), rng.normal(size=(rows, h))


def pair_beliefs(
    coupling: Any, bv: np.ndarray, bh: np.ndarray, n_sweeps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return P(v_i = 1, h_j = 1) and log Z of each row, from one call per row."""
    pairs, log_z = np.zeros((len(bv), *coupling.w.shape)), np.zeros(len(bv))
    for row, total in enumerate(pairs):
        one = slice(row, row + 1)
        found = reference.sum_product_pairs(coupling, bv[one], bh[one], n_sweeps, None, total)
        log_z[row] = found.log_z[0]
    return pairs, log_z


def draw_tree(seed: int, v: int, h: int, scale: float) -> np.ndarray:
    """Return couplings W whose nonzero entries are the edges of a random tree (or several) of the units."""
    rng = np.random.default_rng(seed)
    w = np.zeros((v, h))
    seen: tuple[list[int], list[int]] = ([int(rng.integers(v))], [])
    rest = [(0, i) for i in range(v) if i != seen[0][0]] + [(1, j) for j in range(h)]
    for side, unit in [rest[k] for k in rng.permutation(len(rest))]:
        # If no unit of the other side was drawn before, this unit gets no edge: it starts another tree.
        if not seen[1 - side]:
            seen[side].append(unit)
            continue
        other = int(rng.choice(seen[1 - side]))
        w[(unit, other) if side == 0 else (other, unit)] = rng.normal() * scale
        seen[side].append(unit)
    return w


SIZES = st.integers(1, 5)
SWEEPS = 14  # Messages reach all units of a tree of ten units in fewer sweeps, so inference is exact.


@given(st.integers(0, 99), SIZES, SIZES, st.sampled_from([0.5, 3.0, 20.0]))
def test_inference_is_exact_on_trees(seed: int, v: int, h: int, scale: float) -> None:
    w = draw_tree(seed, v, h, scale)
    _, bv, bh = draw(seed, v, h, 1.0)
    want, pairs = enumerate_states(w, bv[0], bh[0]), np.zeros((v, h))
    found = reference.sum_product_pairs(make_coupling(w), bv, bh, SWEEPS, None, pairs)
    assert_allclose(sigmoid(found.lv[0]), want["tau_v"], rtol=1e-9, atol=1e-13)
    assert_allclose(sigmoid(found.lh[0]), want["tau_h"], rtol=1e-9, atol=1e-13)
    # Compare P(v_i = 1, h_j = 1) only where W is not 0. Elsewhere the result is P(v_i = 1) P(h_j = 1),
    # although both units depend on each other through the tree.
    edges = w != 0
    assert_allclose(pairs[edges], want["pairs"][edges], rtol=1e-9, atol=1e-13)
    assert_allclose(found.log_z[0], want["log_z"], rtol=1e-11, atol=1e-12)
    best = reference.max_product(make_coupling(w), bv, bh, SWEEPS)
    assert np.concatenate([best.lv[0] > 0, best.lh[0] > 0]).tolist() == want["map"].astype(bool).tolist()


@given(st.integers(0, 99), st.integers(1, 9), st.sampled_from([0.5, 3.0, 20.0]))
def test_inference_is_exact_with_one_hidden_unit(seed: int, v: int, scale: float) -> None:
    """The graph of one hidden unit is a star, on which inference is exact for any weights."""
    w, bv, bh = draw(seed, v, 1, scale)
    want = enumerate_states(w, bv[0], bh[0])
    found = reference.sum_product(make_coupling(w), bv, bh, 2)
    assert_allclose(sigmoid(found.lv[0]), want["tau_v"], rtol=1e-9, atol=1e-13)
    assert_allclose(pair_beliefs(make_coupling(w), bv, bh, 2)[1], want["log_z"], rtol=1e-11)


@settings(max_examples=15)
@given(st.integers(0, 99), st.integers(2, 7), st.integers(2, 5))
def test_inference_is_nearly_exact_for_weak_couplings(seed: int, v: int, h: int) -> None:
    """The shortest cycles of the graph have four edges, so the error is of the order of |W|^4."""
    w, bv, bh = draw(seed, v, h, 0.3, rows=2)
    coupling = make_coupling(w)
    found, mean = (run(coupling, bv, bh, 50) for run in (reference.sum_product, reference.mean_field))
    pairs, log_z = pair_beliefs(coupling, bv, bh, 50)
    mixed = reference.mixed_product(coupling, bv, bh, 50)
    for row in range(2):
        want = enumerate_states(w, bv[row], bh[row])
        assert_allclose(sigmoid(found.lv[row]), want["tau_v"], atol=1e-2)
        assert_allclose(sigmoid(found.lh[row]), want["tau_h"], atol=1e-2)
        assert_allclose(pairs[row], want["pairs"], atol=1e-2)
        assert_allclose(log_z[row], want["log_z"], atol=1e-2)
        assert_allclose(sigmoid(mean.lv[row]), want["tau_v"], atol=0.1)
        sure = np.abs(want["tau_v"] - 0.5) > 0.1
        assert ((mixed.lv[row] > 0) == want["marginal_map"])[sure].all()


def test_mixed_product_is_marginal_map_with_one_visible_unit() -> None:
    """Summing out the hidden units is exact if there is one visible unit."""
    for seed in range(20):
        w, bv, bh = draw(seed, 1, 5, 2.0)
        want = enumerate_states(w, bv[0], bh[0])
        found = reference.mixed_product(make_coupling(w), bv, bh, 3)
        assert (found.lv[0] > 0).tolist() == want["marginal_map"].astype(bool).tolist()


def test_pairwise_beliefs_agree_with_the_beliefs() -> None:
    """P(v_i = 1, h_j = 1) is below P(v_i = 1) and P(h_j = 1), and its sum over rows is added to ``total``."""
    w, bv, bh = draw(0, 6, 4, 0.5, rows=3)
    coupling = make_coupling(w)
    found, (pairs, _) = reference.sum_product(coupling, bv, bh, 200), pair_beliefs(coupling, bv, bh, 200)
    assert (pairs < np.minimum(sigmoid(found.lv)[:, :, None], sigmoid(found.lh)[:, None])).all()
    total = np.ones((6, 4), dtype=np.float32)
    reference.sum_product_pairs(coupling, bv, bh, 200, None, total)
    assert_allclose(total, 1 + pairs.sum(axis=0), rtol=1e-6)


def test_the_tolerance_ends_each_row_separately() -> None:
    w, bv, bh = draw(1, 8, 5, 0.5, rows=4)
    bv[1], bh[1] = bv[1] * 20, bh[1] * 20  # Large biases decide the units of row 1, so it needs fewer sweeps.
    found = reference.sum_product(make_coupling(w), bv, bh, 100, 1e-6)
    assert found.sweeps[1] < found.sweeps[0] < 100
    assert (found.change <= 1e-6).all()
    for row in range(4):
        alone = reference.sum_product(
            make_coupling(w), bv[row : row + 1], bh[row : row + 1], found.sweeps[row]
        )
        assert_allclose(alone.lv[0], found.lv[row], rtol=0)
        assert alone.change[0] == found.change[row]


def test_the_papers_matrix_form_gives_the_same_beliefs(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(__file__).parents[3] / "benchmarks"
    if not folder.is_dir():
        pytest.skip("benchmarks/ is not part of this copy")
    monkeypatch.syspath_prepend(str(folder))
    w, bv, bh = draw(2, 20, 12, 1.0)
    tau_v, tau_h = importlib.import_module("crbm_kernels").run_matrix_form(w, bv[0], bh[0], 9)
    found = reference.sum_product(make_coupling(w), bv, bh, 9)
    assert_allclose(sigmoid(found.lv[0]), tau_v, atol=1e-9)
    assert_allclose(sigmoid(found.lh[0]), tau_h, atol=1e-9)


@pytest.mark.parametrize(("sweeps", "tol"), [(0, None), (3, -1.0), (3, float("nan"))])
def test_invalid_settings_are_refused(sweeps: int, tol: float | None) -> None:
    with pytest.raises(ValueError, match=r"n_sweeps|tol"):
        reference.sum_product(
            make_coupling(np.zeros((2, 2))), np.zeros((1, 2)), np.zeros((1, 2)), sweeps, tol
        )
