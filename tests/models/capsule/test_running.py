"""Steps of a stream (partial_fit) of capsule regression equal direct computations of their formulas."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from scalelatent.contract.learners import Block
from scalelatent.engine.backend import make_backend
from scalelatent.models.capsule.kernels import reference
from scalelatent.models.capsule.model.members import build_members
from scalelatent.models.capsule.model.running import RunningCapsule, StreamOptions

from .conftest import ARCHITECTURES, CLASSES, P, make_case

OPTIONS = StreamOptions(nu=0.0, kappa=0.6, t0=1000.0, batch_rows=1024, ridge=0.0)


def start_stream(data: Any, rows: slice, init: str = "random") -> RunningCapsule:
    rng = np.random.Generator(np.random.Philox(2))
    return RunningCapsule.begin(data.em.members, data.x[rows], data.y[rows], init, 1.0, rng)


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("ridge", [0.0, 5.0])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_stream_steps_by_its_formula(rows: int, ridge: float, architecture: str) -> None:
    data = make_case(architecture)
    running, part = start_stream(data, slice(rows)), slice(rows)
    w, s0 = running.w, np.mean(data.x[part].astype(float) ** 2)
    running.learn(data.x[part], data.y[part], None, replace(OPTIONS, ridge=ridge), make_backend("cpu"))
    members = data.em.members
    for r in range(members.n_members):
        label = members.labels[r][data.y[part]]
        x, label = data.x[part][label >= 0].astype(float), label[label >= 0]
        at = slice(members.offsets[r], members.offsets[r + 1])
        expected = w[at]
        if len(x):
            ratios, _ = reference.posterior_ratios(expected @ x.T, label, members.dims[r])
            delta = ((np.repeat(ratios, members.dims[r], axis=0) - 1) * (expected @ x.T)) @ x / len(x)
            mean = (x.T @ x + (ridge + P * s0) * np.eye(P)) / (len(x) + P)
            move = (delta - ridge / len(x) * expected) @ np.linalg.inv(mean)
            # A step from fewer rows than features (P) is shortened in proportion to the rows. A model of two
            # classes counts only the rows of these classes.
            expected = expected + min(1, len(x) / P) * move
        np.testing.assert_allclose(running.w[at], expected, rtol=1e-3, atol=1e-4)


def test_a_stream_gives_the_same_result_in_one_call_and_in_batches() -> None:
    data, backend = make_case(), make_backend("cpu")
    one, two = start_stream(data, slice(30)), start_stream(data, slice(30))
    small = replace(OPTIONS, batch_rows=30)
    one.learn(data.x, data.y, data.weight, small, backend)
    for a in (0, 30, 60):
        rows = slice(a, a + 30)
        two.learn(data.x[rows], data.y[rows], data.weight[rows], small, backend)
    np.testing.assert_array_equal(one.average, two.average)
    np.testing.assert_allclose(one.sums.moment[0], data.em.moment.sum(axis=0), rtol=1e-9)
    np.testing.assert_allclose(one.sums.weight, data.totals, rtol=1e-12)
    np.testing.assert_array_equal(one.sums.count, data.counts)
    assert one.rows == 90


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_stream_learns(architecture: str) -> None:
    rng = np.random.Generator(np.random.Philox(8))
    y = rng.integers(0, CLASSES, 600).astype(np.int32)
    x = (rng.normal(size=(600, P)) * (0.2 + 3 * np.eye(P)[y])).astype(np.float32)
    members = build_members(architecture, CLASSES, 1)
    running = RunningCapsule.begin(members, x[:1], y[:1], "subspace", 1.0, rng)
    backend = make_backend("cpu")
    for i in range(600):
        running.learn(x[i : i + 1], y[i : i + 1], None, OPTIONS, backend)
    from scalelatent.models.capsule.model.predict import CapsuleRows, RowFrame

    scores = CapsuleRows(members, running.average, RowFrame(), "probabilities")
    found = scores.apply(scores.prepare(backend), Block(x, None, None, 0)).argmax(axis=1)
    assert (found == y).mean() > 0.85


def test_a_stream_starts_from_subspaces_if_it_has_enough_rows() -> None:
    data = make_case()
    from scalelatent.models.capsule.model.start import subspace_start

    counts = np.bincount(data.y).astype(float)
    x = data.x.astype(float)
    moment = np.stack([x[data.y == c].T @ x[data.y == c] for c in range(CLASSES)])
    expected = subspace_start(data.em.members, moment, counts)
    np.testing.assert_allclose(start_stream(data, slice(90), "subspace").w, expected, rtol=1e-9)
    few = start_stream(data, slice(2), "subspace").w
    np.testing.assert_array_equal(few, start_stream(data, slice(2), "random").w)


@pytest.mark.parametrize("architecture", ["multiclass", "all_vs_all"])
def test_one_row_moves_by_its_weight(architecture: str) -> None:
    data, backend = make_case(architecture), make_backend("cpu")
    moved = {}
    for weight in (1e-6, 1.0, 2.0):
        running = start_stream(data, slice(30))
        running.learn(data.x[:30], data.y[:30], None, OPTIONS, backend)
        w = running.w
        running.learn(data.x[30:31], data.y[30:31], np.array([weight]), OPTIONS, backend)
        moved[weight] = np.abs(running.w - w).max()
    assert 0 < moved[1e-6] < 1e-5 * moved[1.0]
    # The move is nearly proportional to the weight of the row, but not exactly, because the weight of the row
    # also raises the mean weight.
    np.testing.assert_allclose(moved[2.0], 2 * moved[1.0], rtol=0.2)


def test_rows_of_zeros_change_nothing() -> None:
    data = make_case()
    running = start_stream(data, slice(30))
    before = running.w
    running.learn(np.zeros((1, P), np.float32), np.zeros(1, np.int32), None, OPTIONS, make_backend("cpu"))
    np.testing.assert_array_equal(running.w, before)


@pytest.mark.parametrize("value", [1e38, np.inf, np.nan])
@pytest.mark.parametrize("architecture", ["multiclass", "all_vs_all"])
def test_a_stream_continues_after_rows_that_were_refused(architecture: str, value: float) -> None:
    data, backend = make_case(architecture), make_backend("cpu")
    running = start_stream(data, slice(30))
    running.learn(data.x[:30], data.y[:30], data.weight[:30], OPTIONS, backend)
    twin = copy.deepcopy(running)
    bad = np.full((2, P), value, np.float32)
    with pytest.raises(FloatingPointError, match="scale them" if value == 1e38 else "row 0 is not finite"):
        running.learn(bad, np.zeros(2, np.int32), None, OPTIONS, backend)
    for one in (running, twin):
        one.learn(data.x[30:60], data.y[30:60], data.weight[30:60], OPTIONS, backend)
    np.testing.assert_array_equal(running.w, twin.w)
    np.testing.assert_array_equal(running.average, twin.average)
    for mine, other in zip(running.sums.moment, twin.sums.moment, strict=True):
        np.testing.assert_array_equal(mine, other)
    assert running.rows == twin.rows
