"""A GPU worker has one process and one thread per GPU, and each process sees only its GPU."""

from __future__ import annotations

from typing import Any

import pytest

from scalelatent.deploy.worker_processes import visible_gpus, worker_specs
from scalelatent.errors import JobError


@pytest.fixture
def specs(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, GPU-7f,MIG-1")
    found = worker_specs(2, 3, 2, "1GB", {"host": "127.0.0.1"})
    return {name: spec["options"] for name, spec in found.items()}


def test_each_gpu_has_a_worker(specs: dict[str, dict[str, Any]]) -> None:
    assert list(specs) == ["cpu-0", "cpu-1", "gpu-0", "gpu-1"]
    cards = {name: (o["nthreads"], o["resources"], o["env"]) for name, o in specs.items() if "gpu" in name}
    assert cards == {
        "gpu-0": (1, {"GPU": 1}, {"CUDA_VISIBLE_DEVICES": "4"}),
        "gpu-1": (1, {"GPU": 1}, {"CUDA_VISIBLE_DEVICES": "GPU-7f"}),
    }


def test_cpu_workers_see_and_offer_no_gpu(specs: dict[str, dict[str, Any]]) -> None:
    for name in ("cpu-0", "cpu-1"):
        assert specs[name]["nthreads"] == 3
        assert "resources" not in specs[name]
        assert specs[name]["env"] == {"CUDA_VISIBLE_DEVICES": "-1"}


def test_without_gpu_workers_the_environment_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert worker_specs(1, 1, 0, "1GB", {})["cpu-0"]["options"]["env"] == {}


@pytest.mark.parametrize(("named", "seen"), [("", []), ("-1", []), ("0", ["0"]), ("1,0", ["1", "0"])])
def test_visible_gpus_are_those_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, named: str, seen: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert visible_gpus() == seen
    with pytest.raises(JobError, match=rf"this machine has {len(seen)} visible GPU"):
        worker_specs(0, 1, len(seen) + 1, "1GB", {})
