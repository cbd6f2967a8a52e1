"""`plan` shows time, memory and disk space of a job, for the workers that the job will start."""

from __future__ import annotations

import re

import numpy as np
import pytest
from distributed.system import MEMORY_LIMIT
from typer.testing import CliRunner

from scalelatent import CapsuleRegression, Dataset
from scalelatent.cli import app
from scalelatent.engine import plan as engine_plan
from scalelatent.engine import rates as engine_rates
from scalelatent.engine.rates import Rates, rates
from scalelatent.errors import JobError, PlanError
from scalelatent.jobs import planning
from scalelatent.jobs.datasets import open_job_data
from scalelatent.jobs.planning import plan_job, plan_lines, worker_bytes
from scalelatent.jobs.resolve import load_job
from scalelatent.jobs.runner import as_job_error, build_estimator
from scalelatent.jobs.spec import ClusterSection


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("1GiB", 2**30),
        (2**30, 2**30),
        (0.5, MEMORY_LIMIT // 2),
        (None, MEMORY_LIMIT // 8),
        ("auto", MEMORY_LIMIT // 8),
        (0, 0),
    ],
)
def test_a_plan_reads_memory_limits_like_the_cluster_that_the_job_starts(limit, expected):
    assert worker_bytes(ClusterSection(workers=8, threads=1, memory_limit=limit)) == expected


def test_estimator_receives_the_job_values(job_paths, use_fake_estimator, monkeypatch):
    reported = {}

    def plan(self, train, **options):
        reported.update(options, rows=train.n_rows)
        return {"peak_bytes": 1}

    monkeypatch.setattr(planning, "build_estimator", lambda job: use_fake_estimator(**job.estimator_params()))
    monkeypatch.setattr(use_fake_estimator, "plan", plan)
    settings = ["cluster.workers=3", "cluster.threads=2", "cluster.memory_limit=1GiB"]
    assert plan_job(load_job(job_paths.job, settings=settings)) == {"peak_bytes": 1}
    workers = reported["client"].scheduler_info(n_workers=-1)["workers"]
    assert list(workers.values()) == [{"nthreads": 2, "memory_limit": 2**30}] * 3
    assert reported["memory_limit"] == 2**30
    assert reported["rows"] == 300
    assert reported["validation"].n_rows == 50
    plan_job(load_job(job_paths.job))
    assert reported["client"] is None
    assert reported["memory_limit"] is None


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
def test_plan_shows_which_devices_compute(job_paths, use_fake_estimator, monkeypatch, device, words):
    """If CPUs and GPUs share the rows, the plan also states how much results may differ."""
    from contextlib import nullcontext
    from types import SimpleNamespace

    found = {"a": {}, "b": {"resources": {"GPU": 1}}, "c": {"resources": {"GPU": 1}}}
    client = SimpleNamespace(scheduler_info=lambda n_workers: {"workers": found})
    monkeypatch.setattr(use_fake_estimator, "plan", lambda self, train, **options: {"peak_bytes": 1})
    monkeypatch.setattr(planning, "connect", lambda job, client, tell: nullcontext(client))
    monkeypatch.setattr(planning, "build_estimator", lambda job: use_fake_estimator())
    job = load_job(job_paths.job)
    monkeypatch.setattr(type(job), "estimator_params", lambda self: {"device": device})
    reported = plan_job(job, client=client)
    assert reported["devices"] == words
    assert ("within 1e-05" in reported.get("message", "")) == (device == "auto")


@pytest.fixture
def small_job(tmp_path):
    """Return the path of a job file with a projection, whose training rows are also its test rows."""
    x = np.random.default_rng(0).normal(size=(300, 210)).astype("float32")
    Dataset.from_arrays(x, np.arange(300) % 3).save(tmp_path / "rows.zarr")
    data = "".join(f"{name} = '{tmp_path}/rows.zarr'\n" for name in ("train", "test"))
    file = tmp_path / "job.toml"
    model = "kind = 'capsule'\ncapsule_dim = 2\nmax_iter = 2\n"
    file.write_text(f"[job]\nout = '{tmp_path}/run'\nseed = 0\n[data]\n{data}[model]\n{model}")
    return file


def test_a_job_is_planned_from_start_to_report(small_job):
    job = load_job(small_job)
    needs = plan_job(job)
    stages = list(needs["seconds"])
    assert stages[0] == "starting"
    assert stages[-3:] == ["saving", "scoring", "report"]
    assert {"svd", "project-train", "moments", "estep"} < set(stages)
    assert needs["expected_seconds"] == pytest.approx(sum(needs["seconds"].values()))
    fit = build_estimator(job).plan(open_job_data(job).train)
    assert needs["expected_seconds"] > fit["expected_seconds"]
    # The job needs more memory than its fit, because the figures of the report take more.
    assert needs["peak_bytes_per_worker"] > fit["peak_bytes_per_worker"]
    workers = plan_job(load_job(small_job, settings=["cluster.workers=2", "cluster.memory_limit=2GiB"]))
    assert workers["seconds"]["starting workers"] > 0


def test_plan_and_fit_print_the_same_summary_line(small_job):
    runner = CliRunner()
    planned = runner.invoke(app, ["plan", str(small_job)])
    assert planned.exit_code == 0, planned.output
    first = planned.stdout.splitlines()[0]
    assert re.fullmatch(r"plan: about \d+ s, [\d,]+ MiB a worker, \d+ MB of disk", first)
    done = runner.invoke(app, ["fit", str(small_job)])
    assert done.exit_code == 0, done.output
    assert first in done.output.splitlines()


def test_a_plan_begins_with_its_summary_and_has_at_most_forty_lines(small_job):
    lines = CliRunner().invoke(app, ["plan", str(small_job)]).stdout.splitlines()
    assert len(lines) <= 40
    assert lines[0].startswith("plan: about ")
    text = "\n".join(lines)
    for words in (
        "memory per worker",
        "disk bytes",
        "passes",
        "for a shorter fit  lower max_iter",
        "--details",
    ):
        assert words in text
    assert "  default" not in text
    assert "statistic bytes" not in text
    full = CliRunner().invoke(app, ["plan", str(small_job), "--details"]).stdout
    assert "model.momentum" in full
    assert "statistic bytes" in full


def test_fit_refuses_what_plan_refuses_and_leaves_no_folder(small_job):
    runner, small = CliRunner(), ["--set", "cluster.memory_limit=300MB"]
    reported = [runner.invoke(app, [verb, str(small_job), *small]) for verb in ("plan", "fit")]
    assert [one.exit_code for one in reported] == [2, 2]
    errors = [one.output.splitlines()[-1] for one in reported]
    assert errors[0] == errors[1]
    assert "would need" in errors[0]
    assert not (small_job.parent / "run").exists()


@pytest.mark.parametrize(
    ("reading", "cache", "said"), [(0.5, None, True), (0.5, 0.2, False), (0.01, None, False)]
)
def test_plan_shows_what_a_row_cache_would_save(tmp_path, monkeypatch, reading, cache, said):
    """The plan advises a cache if all rows fit into memory, reading takes time, and there is no cache."""
    for module in (engine_rates, engine_plan):
        monkeypatch.setattr(module, "SMALL_BYTES", 2**10)
        monkeypatch.setattr(module, "read_seconds", lambda dataset: reading)
    monkeypatch.setattr(engine_rates, "seconds_per_row", lambda work: 1.0)
    x = np.random.default_rng(0).normal(size=(500, 10)).astype(np.float32)
    ds = Dataset.from_arrays(x, np.arange(500) % 3).save(tmp_path / "d.zarr")
    reported = CapsuleRegression(capsule_dim=2).plan(ds, engine={} if cache is None else {"cache": cache})
    assert ("keeping_rows" in reported) is said
    if said:
        assert reported["keeping_rows"].startswith("a thread reads for 50 % of the time that it computes")


def test_plan_warns_about_a_long_fit():
    needs = {"summary": "about 3 h", "expected_seconds": 3 * 3600.0, "shorter": "lower k1"}
    assert plan_lines(needs) == [
        "plan: about 3 h",
        "warning: this fit would take about 3.0 h: to shorten it, lower k1",
    ]
    assert plan_lines({**needs, "expected_seconds": 60.0}) == ["plan: about 3 h"]
    assert plan_lines({**needs, "keeping_rows": "cache = 0.3"})[2] == "[engine] cache = 0.3"
    assert plan_lines({}) == []  # A plan without these keys prints no lines.


def test_rates_are_measured_again_on_request(small_job, monkeypatch):
    asked = []
    monkeypatch.setattr(Rates, "measure_again", lambda self: asked.append(self))
    for measure in ([], ["--measure"]):
        assert CliRunner().invoke(app, ["plan", str(small_job), "--json", *measure]).exit_code == 0
    assert asked == [rates]
