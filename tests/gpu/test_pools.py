"""A pool of CPU workers and a GPU worker learns what one process learns, within a tolerance.

A block that does not fit in the memory of the GPU is split in halves. These tests are deselected without
``-m gpu``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scalelatent as sl
from scalelatent.engine.backend import make_backend
from scalelatent.engine.dask.pools import TOLERANCE
from scalelatent.engine.passes import PassContext, Span, make_stage, split_vector
from scalelatent.engine.reading import StopEvent
from scalelatent.models.capsule.model.em import CapsulePass, initial_state
from scalelatent.models.capsule.model.members import build_members
from tests.helpers import HookLog

pytestmark = pytest.mark.gpu
OPTIONS: dict[str, Any] = {"capsule_dim": 3, "projection": None, "nu_schedule": None, "random_state": 0}
# Largest allowed difference of the weights of a fit with a GPU and of a fit on CPUs after PASSES passes,
# relative to the largest weight. The sums of both differ by at most TOLERANCE in each pass, which adds up.
WEIGHT_TOLERANCE, PASSES = 1e-3, 5


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Any:
    rng = np.random.default_rng(7)
    y = np.arange(60_000) % 4
    x = rng.normal(size=(len(y), 40)).astype(np.float32) + 2.0 * (y[:, None] == np.arange(40) % 4)
    return sl.Dataset.from_arrays(x, y).save(tmp_path_factory.mktemp("pool") / "rows", chunk_rows=2000)


def _sums(data: Any, backend: Any, rows: int = 8192) -> dict[str, np.ndarray]:
    members = build_members("multiclass", 4, 3)
    w = np.random.default_rng(5).normal(size=(members.total_dim, 40)) / 4
    work = {"train": CapsulePass(members, 40, np.array([0.0]), None, train=True)}
    stage = make_stage(
        "capsule_sums", work, {"train": data}, "cpu", data.classes, block_rows=rows, leaf_rows=rows
    )
    context = PassContext(stage, initial_state(w, members.n_members), backend, None)
    grid = stage.grids["train"]
    stats, _, _ = split_vector(stage, "train", context.run_span(Span("train", grid.depth, 0), StopEvent()))
    return {name: np.array(stats[name]) for name in ("sums", "rows", "delta")}


def test_sums_of_a_pass_agree_within_the_stated_tolerance(real: Any, data: Any) -> None:
    card, host = _sums(data, make_backend("gpu")), _sums(data, make_backend("cpu"))
    for name in ("rows", "delta"):
        scale = np.abs(host[name]).max()
        np.testing.assert_allclose(card[name], host[name], rtol=0, atol=TOLERANCE * scale, err_msg=name)
    # Column 0 of the sums has the log-likelihood. The other columns count errors and rows beyond a threshold,
    # so rounding changes these counts by a few rows.
    np.testing.assert_allclose(card["sums"][:, 0], host["sums"][:, 0], rtol=TOLERANCE)
    np.testing.assert_allclose(card["sums"][:, 1:], host["sums"][:, 1:], rtol=1e-3)


def test_a_mixed_pool_learns_what_one_process_learns(real: Any, data: Any) -> None:
    log = HookLog()
    with sl.cluster("local", workers=2, gpus=1, dashboard_address=None) as client:
        fits = {
            device: sl.CapsuleRegression(device=device, max_iter=PASSES, **OPTIONS).fit(
                data, client=client, callbacks=[log] if device == "auto" else ()
            )
            for device in ("auto", "cpu", "gpu")
        }
    alone = sl.CapsuleRegression(device="cpu", max_iter=PASSES, **OPTIONS).fit(data)
    np.testing.assert_array_equal(fits["cpu"].W_, alone.W_)
    for device in ("auto", "gpu"):
        scale = np.abs(alone.W_).max()
        np.testing.assert_allclose(fits[device].W_, alone.W_, rtol=0, atol=WEIGHT_TOLERANCE * scale)
        got, want = (model.history_[-1]["objective"] for model in (fits[device], alone))
        np.testing.assert_allclose(got, want, rtol=10 * TOLERANCE)
    reported = [event for event in log.infos("event") if event["event"] == "devices"]
    assert reported[0]["devices"] == "cpu 2 workers, gpu 1 worker"
    assert "depend" in reported[0]["message"]


def test_a_full_gpu_computes_in_halves(real: Any, data: Any, tmp_path: Path) -> None:
    backend, pool = make_backend("gpu"), real.get_default_memory_pool()
    want = _sums(data, make_backend("gpu"))
    before = pool.get_limit()
    pool.free_all_blocks()
    pool.set_limit(size=pool.total_bytes() + 2**20)  # A block of 8192 rows needs more, 1.3 MB.
    try:
        got = _sums(data, backend)
    finally:
        pool.set_limit(size=before)
    assert 0 < backend.row_limits["capsule_sums/train"] < 8192
    for name in ("rows", "delta"):
        scale = np.abs(want[name]).max()
        np.testing.assert_allclose(got[name], want[name], rtol=0, atol=TOLERANCE * scale)
