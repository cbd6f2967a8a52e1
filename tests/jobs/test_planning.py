"""`plan` counts the workers a job will start, with the memory Dask will give them."""

from __future__ import annotations

import pytest
from dask.system import CPU_COUNT
from distributed.system import MEMORY_LIMIT

from scalelatent.errors import JobError, PlanError
from scalelatent.jobs import planning
from scalelatent.jobs.planning import plan_job, worker_bytes
from scalelatent.jobs.refusals import as_job_error
from scalelatent.jobs.resolve import load_job
from scalelatent.jobs.spec import ClusterSection


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("1GiB", 2**30), (2**30, 2**30), (0.5, MEMORY_LIMIT // 2), (None, None), ("auto", None)],
)
def test_memory_limits_are_read_as_dask_reads_them(limit, expected):
    cluster = ClusterSection(workers=2, threads=1, memory_limit=limit)
    assert worker_bytes(cluster) == (int(MEMORY_LIMIT / CPU_COUNT) if expected is None else expected)


def test_what_the_estimator_is_told(workplace, fake, monkeypatch):
    told = {}

    def plan(self, train, **options):
        told.update(options, rows=train.n_rows)
        return {"peak_bytes": 1}

    monkeypatch.setattr(planning, "build_estimator", lambda job: fake(**job.estimator_params()))
    monkeypatch.setattr(fake, "plan", plan)
    settings = ["cluster.workers=3", "cluster.threads=2", "cluster.memory_limit=1GiB"]
    assert plan_job(load_job(workplace.job, settings=settings)) == {"peak_bytes": 1}
    workers = told["client"].scheduler_info(n_workers=-1)["workers"]
    assert list(workers.values()) == [{"nthreads": 2, "memory_limit": 2**30}] * 3
    assert told["memory_limit"] == 2**30
    assert told["rows"] == 300
    assert told["validation"].n_rows == 50
    plan_job(load_job(workplace.job))
    assert told["client"] is None
    assert told["memory_limit"] is None


def test_refusals_pass_and_bare_errors_become_job_errors():
    with pytest.raises(PlanError, match="too much"), as_job_error():
        raise PlanError("too much")
    with pytest.raises(JobError, match=r"^\[model\] capsule_dim=0"), as_job_error():
        raise ValueError("capsule_dim=0: give more")
    with pytest.raises(ZeroDivisionError), as_job_error():
        raise ZeroDivisionError
    with pytest.raises(ValueError, match="a bug"), as_job_error(unless=lambda: True):
        raise ValueError("a bug")


@pytest.mark.parametrize(
    ("device", "words"),
    [("auto", "cpu 1 worker, gpu 2 workers"), ("gpu", "gpu 2 workers"), ("cpu", "cpu 3 workers")],
)
def test_plan_tells_which_devices_compute(workplace, fake, monkeypatch, device, words):
    """And that a mixed pool's result depends on who computed what."""
    from contextlib import nullcontext
    from types import SimpleNamespace

    found = {"a": {}, "b": {"resources": {"GPU": 1}}, "c": {"resources": {"GPU": 1}}}
    client = SimpleNamespace(scheduler_info=lambda n_workers: {"workers": found})
    monkeypatch.setattr(fake, "plan", lambda self, train, **options: {"peak_bytes": 1})
    monkeypatch.setattr(planning, "connect", lambda job, client, tell: nullcontext(client))
    monkeypatch.setattr(planning, "build_estimator", lambda job: fake())
    job = load_job(workplace.job)
    monkeypatch.setattr(type(job), "estimator_params", lambda self: {"device": device})
    told = plan_job(job, client=client)
    assert told["devices"] == words
    assert ("within 1e-05" in told.get("message", "")) == (device == "auto")
