"""The method `plan`, the command `doctor` and the dashboard page show the memory of GPUs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

import scalelatent as sl
from scalelatent.deploy import checks
from scalelatent.engine.backend import CupyBackend, read_gpu_memory, read_used_gpu_memory

GIB = 2**30


@pytest.fixture
def rows():
    rng = np.random.default_rng(0)
    return rng.normal(size=(600, 8)).astype("f4"), np.arange(600) % 3


def test_limits_of_a_gpu_are_named(fake, monkeypatch):
    fake.POOL.limit = 5 * GIB
    memory = read_gpu_memory()
    assert (memory.total, memory.free, memory.limit, memory.row_limit) == (
        8 * GIB,
        8 * GIB,
        5 * GIB,
        2 * GIB,
    )
    text = "8.0 of 8.0 GiB free, 5.0 GiB for fits (CuPy's limit, see CUPY_GPU_MEMORY_LIMIT), 2.0 GiB of"
    assert memory.describe().startswith(text)
    monkeypatch.setattr(fake.cuda, "get_allocator", lambda: SimpleNamespace(__module__="rmm.allocators.cupy"))
    assert "(which RMM allocates)" in read_gpu_memory().describe()


def test_the_doctor_warns_of_a_gpu_that_other_processes_fill(fake, monkeypatch):
    (ok,) = checks._check_gpu_memory(0, read_gpu_memory())
    assert (ok.check, ok.status) == ("gpu memory", "ok")
    monkeypatch.setattr(fake.runtime, "memGetInfo", lambda: (GIB, 8 * GIB))
    (full,) = checks._check_gpu_memory(1, read_gpu_memory())
    assert full.status == "warn"
    assert full.found.startswith("GPU 1: 1.0 of 8.0 GiB free")
    assert "nvidia-smi" in full.fix


def test_a_plan_states_the_rows_that_stay_on_gpus(fake, rows):
    fake.Device.count = 2
    fake.POOL.limit = GIB
    model = sl.CapsuleRegression(device="auto", capsule_dim=2, algorithm="em")
    found = model.plan(*rows)["gpu_rows"]
    row_bytes = 600 * (8 * 4 + 4)  # Each row has 8 features and a class code, of four bytes each.
    assert (found["gpus"], found["row_bytes"], found["kept_share"]) == (2, row_bytes, 1.0)
    assert found["room_bytes"] == 2 * int(0.4 * GIB)
    assert "no row is copied to a GPU from pass 2 on" in found["summary"]
    fake.POOL.limit = row_bytes // 2
    found = model.plan(*rows)["gpu_rows"]
    assert found["kept_share"] == pytest.approx(0.4, abs=0.01)
    assert "(40%) stay on 2 GPUs; the others are copied to a GPU in each pass" in found["summary"]
    assert "gpu_rows" not in model.set_params(device="cpu").plan(*rows)
    stepwise = sl.CapsuleRegression(device="auto", capsule_dim=2, algorithm="stepwise")
    assert "gpu_rows" not in stepwise.plan(*rows)  # Stepwise EM copies the rows of each step.


def test_workers_report_the_memory_of_their_gpu(fake, monkeypatch, rows):
    from scalelatent.engine.dask.worker_side import WorkReports

    sent = []
    worker = SimpleNamespace(
        address="tcp://a", name="a", log_event=lambda topic, message: sent.append(message)
    )
    reports = WorkReports()
    reports._waiting["key"] = {"kind": "span"}
    reports._flush(worker)
    assert "gpu_total" not in sent[0]
    backend = CupyBackend()
    backend.start_pass()
    block = SimpleNamespace(x=rows[0], y=None, weight=None)
    with ThreadPoolExecutor(2) as pool:
        backend.copy_ahead(backend.begin_copies(), 0, "key", block, pool)
    monkeypatch.setattr(fake.runtime, "memGetInfo", lambda: (6 * GIB, 8 * GIB))
    reports._waiting["key"] = {"kind": "span"}
    reports._flush(worker)
    keys = ("gpu_used", "gpu_total", "gpu_rows")
    assert [sent[1][key] for key in keys] == [2 * GIB, 8 * GIB, rows[0].nbytes]
    monkeypatch.setattr(fake.runtime, "memGetInfo", _lost_gpu(fake))
    assert read_used_gpu_memory() == {}


def _lost_gpu(fake):
    def fail():
        raise fake.CUDARuntimeError(700)

    return fail
