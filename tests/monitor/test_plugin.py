"""A scheduler serves page, JSON and metrics; drivers (tasks of the fits of jobs) survive lost workers."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask
import pytest

from scalelatent import monitor
from scalelatent.monitor import ClusterLog
from scalelatent.monitor.plugin import PLUGIN

from .conftest import start

pytestmark = pytest.mark.cluster


def list_messages(scheduler: Any, kind: str) -> list[dict[str, Any]]:
    return [message for _, message in scheduler.get_events("scalelatent") if message.get("kind") == kind]


def wait_for(condition: Any, seconds: float = 10.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return value


def test_the_page_is_in_the_frame_of_the_dashboard(watched: SimpleNamespace, get: Any) -> None:
    status, page = get(f"{watched.base}/scalelatent")
    assert status == 200
    assert 'href="scalelatent"' in page
    assert 'href="status"' in page
    assert "{%" not in page
    assert "https://cdn" not in page  # The page needs no internet access.
    status, page = get(f"{watched.base}/status")
    assert page.count('href="scalelatent"') == 1


def test_a_second_installation_changes_nothing(watched: SimpleNamespace, get: Any) -> None:
    before = watched.scheduler.plugins[PLUGIN]
    assert monitor.install(watched.client) == ""
    assert watched.scheduler.plugins[PLUGIN] is before
    assert get(f"{watched.base}/status")[1].count('href="scalelatent"') == 1


def test_run_is_published_from_start_to_end(watched: SimpleNamespace, jobs: Any, get: Any) -> None:
    run = "/runs/reported"
    with ClusterLog(
        watched.client, run, job="reported-01", model="capsule", name="reported", submitted=5.0
    ) as log:
        log.on_fit_start({"rows": 100, "max_iter": 4, "W": object()})
        for number in (1, 2):
            log.on_progress(
                {"stage": "em", "pass": number, "rows_done": 50, "rows_total": 100, "rows_per_s": 10}
            )
            log.on_pass_end({"stage": "em", "pass": number, "objective": 0.5, "rows": 100, "seconds": 0.1})
        answer = jobs(watched.base, "reported-01", until=lambda a: a.get("job", {}).get("pass"))
        assert answer["job"]["state"] == "running"
        assert answer["job"]["max_passes"] == 4
        assert answer["job"]["submitted"] == "1970-01-01T00:00:05.000+00:00"
        log.on_event({"event": "span_redone", "span": 3, "device": "cpu"})
        log.on_fit_end({"passes": 2, "seconds": 0.2})
    answer = jobs(watched.base, "reported-01", until=lambda a: a["job"]["state"] == "done")
    assert answer["job"]["run"] == run
    assert answer["job"]["rows"] == 200
    assert answer["job"]["curves"][0]["objective"][-1] == 0.5
    assert [e["name"] for e in answer["job"]["events"]] == [
        "running", "fit_started", "span_redone", "fit_ended", "done"
    ]  # fmt: skip
    metrics = get(f"{watched.base}/metrics")[1]
    for line in (
        'scalelatent_rows_total{job="reported-01",model="capsule",pool="all"} 200.0',
        'scalelatent_pass{job="reported-01",model="capsule",pool="all"} 2.0',
        'scalelatent_objective{job="reported-01",model="capsule",pool="all"} 0.5',
        'scalelatent_spans_redone_total{job="reported-01",model="capsule",pool="cpu"} 1.0',
    ):
        assert line in metrics
    assert "dask_scheduler_workers" in metrics


@pytest.mark.parametrize(
    ("error", "state"), [(KeyboardInterrupt(), "cancelled"), (ValueError("the third row is bad"), "failed")]
)
def test_interrupted_run_is_published_with_its_reason(
    watched: SimpleNamespace, jobs: Any, error: BaseException, state: str
) -> None:
    with (
        pytest.raises(type(error)),
        ClusterLog(watched.client, f"/runs/{state}", job=f"broken-{state}", model="capsule"),
    ):
        raise error
    job = jobs(watched.base, f"broken-{state}", until=lambda a: a["job"]["state"] != "running")["job"]
    assert job["state"] == state
    assert job["error"] == (str(error) or None)


def test_spans_come_from_the_workers(watched: SimpleNamespace, jobs: Any, get: Any) -> None:
    def work() -> None:
        from distributed import get_worker

        which = {"run": "/runs/spans", "stage": "em", "pass": 1, "part": "train", "span": 4, "rows": 300}
        how = {"seconds": 0.5, "device": "cpu", "worker": get_worker().address, "name": "w", "rss": 10**8}
        get_worker().log_event("scalelatent", {"kind": "span", **which, **how})

    watched.client.log_event("scalelatent", {"kind": "state", "run": "/runs/spans", "state": "running"})
    jobs(watched.base, "spans")
    watched.client.submit(work, pure=False).result(timeout=30)
    answer = jobs(watched.base, "spans", until=lambda a: "rows" in a["job"]["worker_rows"][0])
    (worker,) = answer["job"]["worker_rows"]
    assert worker["rows_per_s"] == pytest.approx(600)
    assert worker["last_span"] == "em, pass 1, span 4"
    assert worker["threads"] == 1
    assert worker["memory"] > 0
    assert (
        'scalelatent_rows_total{job="spans",model="",pool="cpu"} 300.0' in get(f"{watched.base}/metrics")[1]
    )


def test_unknown_jobs_and_a_removed_plugin_give_404(get: Any) -> None:
    from distributed import Client

    with start() as cluster, Client(cluster, timeout=30, set_as_default=False) as client:
        base = f"http://127.0.0.1:{cluster.scheduler.http_server.port}"
        assert get(f"{base}/scalelatent")[0] == 404
        assert monitor.install(client) == ""
        assert get(f"{base}/scalelatent.json?job=none")[0] == 404
        client.unregister_scheduler_plugin(PLUGIN)
        assert get(f"{base}/scalelatent.json")[0] == 404
        assert monitor.install(client) == ""
        assert get(f"{base}/scalelatent.json")[0] == 200
        assert get(f"{base}/status")[1].count('href="scalelatent"') == 1


def test_late_plugin_reads_earlier_messages(jobs: Any) -> None:
    from distributed import Client

    with start() as cluster, Client(cluster, timeout=30, set_as_default=False) as client:
        client.log_event("scalelatent", {"kind": "pass", "run": "/runs/early", "pass": 7, "objective": 0.25})
        assert monitor.install(client) == ""
        answer = jobs(f"http://127.0.0.1:{cluster.scheduler.http_server.port}")
        assert [(job["id"], job["pass"]) for job in answer["jobs"]] == [("early", 7)]


def compute_for_long(path: str) -> str:
    import os
    import time

    from distributed import secede

    secede()
    for _ in range(600):
        if os.path.exists(path):
            return "done"
        time.sleep(0.05)
    return "given up"


def test_lost_workers_are_reported_and_drivers_survive(tmp_path: Path) -> None:
    """The driver (task of a job's fit) survives three lost workers; Dask allows no failure of other tasks."""
    from distributed import Client, KilledWorker

    end = tmp_path / "end"
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 0}),
        start() as cluster,
        Client(cluster, timeout=30, set_as_default=False) as client,
    ):
        assert monitor.install(client) == ""
        scheduler = cluster.scheduler
        driver = client.submit(compute_for_long, str(end), key="scalelatent-job-x-1234", pure=False)
        other = client.submit(compute_for_long, str(end), key="other", pure=False)
        wait_for(lambda: find_worker_address(scheduler, "other"))
        for _ in range(3):
            victim = wait_for(lambda: find_worker_address(scheduler, driver.key))
            name = scheduler.workers[victim].name
            cluster.scale(n=len(cluster.workers) + 1)
            wait_for(lambda: len(scheduler.workers) > 1)
            client.sync(lose_worker, scheduler, victim)
            lost = list_messages(scheduler, "lost")[-1]
            assert lost["worker"] == victim
            assert lost["name"] == str(name)
            assert "scalelatent-job-x-1234" in lost["keys"]
            assert lost["expected"] is False
            assert lost["memory"] is None or lost["memory"] >= 0
        end.touch()
        assert driver.result(timeout=30) == "done"
        with pytest.raises(KilledWorker):
            other.result(timeout=30)
        assert len(list_messages(scheduler, "lost")) == 3
        board = scheduler.plugins[PLUGIN].board
        assert board.lost_total == 3
        assert board.lost[0]["tasks"] == ["other", "scalelatent-job-x-1234"]


def find_worker_address(scheduler: Any, key: str) -> str | None:
    task = scheduler.tasks.get(key)
    return None if task is None else getattr(task.processing_on, "address", None)


async def lose_worker(scheduler: Any, address: str) -> None:
    await scheduler.remove_worker(address, stimulus_id="test", expected=False)


def test_a_worker_that_is_retired_is_not_lost() -> None:
    from distributed import Client

    with start() as cluster, Client(cluster, timeout=30, set_as_default=False) as client:
        assert monitor.install(client) == ""
        client.retire_workers(list(cluster.scheduler.workers))
        wait_for(lambda: list_messages(cluster.scheduler, "lost"))
        assert list_messages(cluster.scheduler, "lost")[0]["expected"] is True
        assert cluster.scheduler.plugins[PLUGIN].board.lost_total == 0


def test_thousands_of_passes_cost_the_driver_little(watched: SimpleNamespace, jobs: Any) -> None:
    log = ClusterLog(watched.client, "/runs/fast", job="fast-1", model="capsule")
    begin = time.monotonic()
    for number in range(1, 2001):
        log.on_progress({"stage": "em", "pass": number, "rows_done": 100, "rows_total": 100})
        log.on_pass_end(
            {"stage": "em", "pass": number, "objective": 1 / number, "rows": 100, "seconds": 0.001}
        )
        log.on_checkpoint({"pass": number, "path": "p", "seconds": 0.0})
    seconds = time.monotonic() - begin
    assert seconds < 2.0  # Each of 2,000 passes may cost 1 ms.
    assert log.flush(10)
    assert len(log._waiting) <= 200
    job = jobs(watched.base, "fast-1", until=lambda a: a.get("job", {}).get("pass") == 2000)["job"]
    assert job["rows"] == 200_000
    messages = [m for _, m in watched.scheduler.get_events("scalelatent") if m.get("run") == "/runs/fast"]
    assert len(messages) < 20 + 100 * seconds


def test_a_restarted_scheduler_learns_the_job_of_running_passes(
    watched: SimpleNamespace, jobs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = ClusterLog(watched.client, "/runs/late", job="late-77", model="capsule")
    watched.scheduler.plugins[PLUGIN].board.jobs.clear()
    log.on_event({"event": "note"})
    log.on_wait()  # Only the first of these two calls sends a message.
    log.on_wait()
    jobs(watched.base, "late-77", until=lambda a: a["job"]["model"] == "capsule")
    assert len([m for m in list_messages(watched.scheduler, "state") if m["run"] == "/runs/late"]) == 1
    monkeypatch.setattr("scalelatent.monitor.publish.INTRODUCE_SECONDS", 0.0)
    log.on_wait()
    assert log.flush(10)
    assert len([m for m in list_messages(watched.scheduler, "state") if m["run"] == "/runs/late"]) == 2


def test_a_dead_scheduler_neither_stops_nor_fails_a_run() -> None:
    from distributed import Client

    cluster = start()
    client = Client(cluster, timeout=5, set_as_default=False)
    try:
        log = ClusterLog(client, "/runs/orphan", job="orphan")
        log.state("running")
        assert log.flush(10)
        cluster.close(timeout=30)
        begin = time.monotonic()
        for number in range(1000):
            log.on_event({"event": "note", "number": number})
        assert time.monotonic() - begin < 5
        assert len(log._waiting) <= 200
        log.flush(0.2)
    finally:
        client.close(timeout=5)
    assert "does not accept the page" in monitor.install(client)


PRELOADED = """
import asyncio
from distributed import Scheduler
async def main():
    where = {"host": "127.0.0.1", "port": 0, "dashboard_address": "127.0.0.1:0"}
    preload = "scalelatent.monitor.preload"
    async with Scheduler(http_prefix="/behind/a-proxy", preload=preload, **where) as scheduler:
        from tornado.httpclient import AsyncHTTPClient
        base = f"http://127.0.0.1:{scheduler.http_server.port}/behind/a-proxy"
        for path in ("scalelatent", "scalelatent.json", "status"):
            answer = await AsyncHTTPClient().fetch(f"{base}/{path}")
            print(answer.code, b'href="scalelatent"' in answer.body or answer.body[:20])
asyncio.run(main())
"""


@pytest.mark.parametrize("bokeh", [True, False])
def test_the_preload_works_behind_a_prefix_and_without_bokeh(bokeh: bool) -> None:
    code = PRELOADED if bokeh else "import sys\nsys.modules['bokeh'] = None\n" + PRELOADED
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    if bokeh:
        assert lines == ["200 True", "200 b'{\"format_version\":2,'", "200 True"]
    else:  # Without bokeh, the page lacks Dask's bar.
        assert lines[:2] == ["200 b'<!DOCTYPE html>\\n<htm'", "200 b'{\"format_version\":2,'"]
    assert "scalelatent: this Dask" not in done.stderr


def test_the_report_of_a_run_is_served(watched: SimpleNamespace, jobs: Any, get: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "report").mkdir(parents=True)
    (run / "report" / "index.html").write_text("<p>a report")
    with ClusterLog(watched.client, str(run), job="served-1", model="capsule"):
        pass
    jobs(watched.base, "served-1")
    at = f"{watched.base}/scalelatent/report?job="
    assert get(at + "served-1")[0] == 404  # The folder is no run folder yet.
    (run / "job.json").write_text("{}")
    assert get(at + "served-1") == (200, "<p>a report")
    assert get(at + "other") == (404, "unknown job")
    (run / "report" / "index.html").unlink()
    status, text = get(at + "served-1")
    assert status == 404
    assert str(run / "report" / "index.html") in text
