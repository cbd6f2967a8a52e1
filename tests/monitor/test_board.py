"""The board (state of all jobs) shows valid messages, ignores invalid ones, and takes little memory."""

from __future__ import annotations

import gc
import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalelatent.monitor.board import JobBoard
from scalelatent.monitor.handlers import snapshot, to_json


def feed_fit(board: JobBoard, run: str, passes: int, begin: float = 1000.0, **more: Any) -> float:
    """Send the messages of a running job with passes of 2 s; return the time of the last message."""
    now = begin
    who = {"job": run[-6:], "name": "fit", "model": "capsule", "driver": "tcp://a:1"}
    board.update({"kind": "state", "run": run, "state": "running", **who}, now)
    board.update({"kind": "event", "run": run, "name": "fit_started", "rows": 1000, "max_iter": 100}, now)
    for number in range(1, passes + 1):
        now += 2.0
        cost = {"rows": 1000, "seconds": 2.0, "bytes_read": 8_000_000}
        measured = {"objective": 1 / number, "validation_error": 0.5 / number}
        message = {"kind": "pass", "run": run, "stage": "capsule_estep", "pass": number, **measured, **cost}
        board.update({**message, **more}, now)
    return now


def make_span(run: str, worker: str, **more: Any) -> dict[str, Any]:
    which = {"stage": "capsule_estep", "pass": 3, "part": "train", "span": 7, "rows": 500, "bytes": 392_000}
    who = {"device": "cpu", "worker": worker, "name": worker[-2:], "rss": 1 << 28}
    return {"kind": "span", "run": run, **which, "seconds": 1.0, "wait_seconds": 0.25, **who, **more}


def test_board_shows_rates_and_remaining_time() -> None:
    board = JobBoard()
    now = feed_fit(board, "runs/mnist1", 10)
    so_far = {"pass": 11, "rows_done": 250, "rows_total": 1000, "rows_per_s": 500}
    board.update({"kind": "progress", "run": "runs/mnist1", "stage": "capsule_estep", **so_far}, now + 0.5)
    (job,) = board.summary(now + 0.5)
    assert (job["id"], job["state"], job["pass"], job["max_passes"]) == ("mnist1", "running", 10, 100)
    assert job["objective"] == pytest.approx(0.1)
    assert job["rows"] == 10_000
    assert job["rows_per_s"] == pytest.approx(500, rel=0.1)
    assert job["mb_per_s"] == pytest.approx(4.0, rel=0.2)
    assert job["progress"] == pytest.approx(0.25)
    assert job["pass_seconds_left"] == pytest.approx(1.5, rel=0.1)
    assert job["seconds_left"] == pytest.approx(89.75 * 2.0)
    curve = board.jobs["runs/mnist1"].detail(now)["curves"][0]
    assert curve["x"] == list(range(1, 11))
    assert curve["validation_error"][1] == 0.25


def test_board_shows_the_memory_of_gpus() -> None:
    board, card = JobBoard(), {"gpu_used": 3 << 30, "gpu_total": 80 << 30, "gpu_rows": 1 << 30}
    now = feed_fit(board, "runs/a", 2)
    board.update(make_span("runs/a", "tcp://h:w1", device="cupy", **card), now)
    board.update(make_span("runs/a", "tcp://h:w2"), now)
    first, second = board.jobs["runs/a"].detail(now)["worker_rows"]
    assert {key: first[key] for key in card} == card
    assert {second[key] for key in card} == {None}


def test_steps_after_the_fit_are_separate_stages() -> None:
    board = JobBoard()
    now = feed_fit(board, "runs/a", 10)
    board.update({"kind": "event", "run": "runs/a", "name": "fit_ended", "passes": 10}, now)
    board.update({"kind": "event", "run": "runs/a", "name": "stage", "stage": "scoring", "rows": 500}, now)
    job = board.summary(now)[0]
    assert (job["stage"], job["rows_done"], job["rows_total"]) == ("scoring", 0, 500)
    assert job["progress"] == 0
    assert job["seconds_left"] is None
    reported = {"kind": "progress", "run": "runs/a", "stage": "scoring", "pass": 0, "rows_per_s": 50.0}
    board.update({**reported, "rows_done": 100, "rows_total": 500}, now + 2)
    board.update({**reported, "rows_done": 250, "rows_total": 500}, now + 5)
    job = board.summary(now + 5)[0]
    assert job["progress"] == 0.5
    assert job["seconds_left"] == pytest.approx(5.0, rel=0.5)


def test_the_board_shows_the_progress_of_the_whole_fit() -> None:
    board = JobBoard()
    now = feed_fit(board, "runs/a", 10)  # 10 of 100 passes are done.
    reported = {"kind": "progress", "run": "runs/a", "stage": "capsule_estep", "rows_total": 1000}
    board.update({**reported, "pass": 11, "rows_done": 500}, now)
    assert board.summary(now)[0]["overall"] == pytest.approx(0.105)
    board.update({"kind": "event", "run": "runs/a", "name": "stage", "stage": "report"}, now)
    assert board.summary(now)[0]["overall"] == 1.0


def test_the_board_shows_the_progress_of_a_bootstrap_network() -> None:
    board, where = JobBoard(), {"run": "runs/n", "layer": 3, "layers": 4, "k": 250}
    board.update({"kind": "state", "run": "runs/n", "state": "running"}, 0.0)
    assert board.summary(0.0)[0]["overall"] is None
    for stage, rows, overall in (("mbn_gather-l3", 50, 0.5), ("mbn_code-l3", 50, 0.625)):
        reported = {"kind": "progress", "stage": stage, "pass": 0, "rows_done": rows, "rows_total": 100}
        board.update({**reported, **where}, 1.0)
        assert board.summary(1.0)[0]["overall"] == overall


def test_board_shows_rounds_of_nu_and_the_report() -> None:
    board = JobBoard()
    now = feed_fit(board, "runs/a", 0)
    for number in (1, 2, 3):
        record = {"pass": number, "stage": "capsule_estep", "objective": 0.5, "nu": 0.5 * (number < 3)}
        board.update({"kind": "pass", "run": "runs/a", "round": 1 + (number == 3), **record}, now)
    done = {"kind": "state", "run": "runs/a", "state": "done", "report": "/runs/a/report/index.html"}
    assert board.summary(now)[0]["report"] is None
    board.update(done, now)
    reported = board.jobs["runs/a"].detail(now)
    assert reported["report"] == "/runs/a/report/index.html"
    assert reported["curves"][0]["round"] == [1, 1, 2]
    assert reported["overall"] == 1.0


def test_board_shows_the_layer_number() -> None:
    board, layer = JobBoard(), {"stage": "mbn_code-l3", "layer": 3, "layers": 7, "k": 1250}
    board.update({"kind": "event", "run": "r", "name": "stage", "rows": 500, **layer}, 10.0)
    (job,) = board.summary(10.0)
    assert (job["stage"], job["part"]) == ("mbn_code-l3", "layer 3 of 7, k = 1,250")
    assert "layer 3, layers 7, k 1,250" in board.jobs["r"].detail(10.0)["events"][-1]["text"]
    # A board that was started within a layer knows the number of the layer from a report of progress.
    late = JobBoard()
    late.update({"kind": "progress", "run": "r", "rows_done": 5, "rows_total": 10, **layer}, 11.0)
    assert late.summary(11.0)[0]["part"] == "layer 3 of 7, k = 1,250"
    board.update({"kind": "pass", "run": "r", "stage": "mbn_pca", "pass": 1}, 12.0)
    assert board.summary(12.0)[0]["part"] is None


def test_rows_of_unreported_passes_are_counted_once() -> None:
    board = JobBoard()
    # The last message has fewer rows, because the process of the fit was restarted and counts from 0.
    for run_rows in (1000, 5000, 5000, 9000, 2000):
        board.update({"kind": "pass", "run": "r", "pass": 1, "rows": 1000, "run_rows": run_rows})
    assert board.jobs["r"].rows == 11_000


def test_a_resumed_job_runs_again_and_repeats_passes() -> None:
    board = JobBoard()
    now = feed_fit(board, "r", 10)
    board.update({"kind": "state", "run": "r", "state": "cancelled"}, now)
    assert board.summary(now + 5)[0]["seconds"] == pytest.approx(20)
    feed_fit(board, "r", 3, begin=now + 10)
    (job,) = board.summary(now + 16)
    assert (job["state"], job["ended"], job["pass"]) == ("running", None, 3)
    assert board.jobs["r"].detail(now)["curves"][0]["x"] == [1, 2, 3]


def test_a_job_whose_driver_is_replaced_keeps_its_begin() -> None:
    board = JobBoard()
    now = feed_fit(board, "r", 10)
    # A second process of the job reports its start, but the job started with the first and has not ended.
    board.update({"kind": "state", "run": "r", "state": "running", "began": now}, now)
    board.update({"kind": "state", "run": "r", "state": "done"}, now + 5)
    assert board.summary(now + 9)[0]["seconds"] == pytest.approx(25)


def test_the_reason_of_an_event_is_a_clause() -> None:
    board = JobBoard()
    board.update(
        {"kind": "event", "run": "r", "name": "span_redone", "span": 2, "why": "its worker was lost"}
    )
    assert board.jobs["r"].detail(0.0)["events"][-1]["text"] == "span 2, because its worker was lost"


def test_a_state_that_is_only_repeated_does_not_wake_an_ended_job() -> None:
    board = JobBoard()
    now = feed_fit(board, "r", 2)
    board.update({"kind": "state", "run": "r", "state": "failed", "error": "disk full"}, now)
    board.update({"kind": "state", "run": "r", "state": "running", "again": True, "job": "r-1"}, now + 1)
    (job,) = board.summary(now + 2)
    assert (job["id"], job["state"], job["error"]) == ("r-1", "failed", "disk full")


def test_driver_without_messages_is_silent() -> None:
    board = JobBoard()
    now = feed_fit(board, "r", 3)
    assert board.summary(now + 30)[0]["silent_seconds"] is None
    silent = board.summary(now + 90)[0]
    assert silent["silent_seconds"] == pytest.approx(90)
    assert silent["rows_per_s"] is None


def test_the_board_shows_workers_device_pools_and_lost_workers() -> None:
    board = JobBoard()
    now = feed_fit(board, "r", 2)
    for second in range(6):
        board.update(make_span("r", "tcp://h:w1"), now + second)
        board.update(make_span("r", "tcp://h:g1", device="gpu", rows=5000), now + second)
    job = board.jobs["r"]
    detail = job.detail(now + 5)
    assert [w["name"] for w in detail["worker_rows"]] == ["w1", "g1"]
    pools = {p["pool"]: p for p in detail["pools"]}
    assert pools["gpu"]["rows"] == 30_000
    assert pools["cpu"]["rows_per_s"] == pytest.approx(500, rel=0.25)
    assert detail["worker_rows"][0]["last_span"] == "capsule_estep, pass 3, span 7"
    assert detail["worker_rows"][0]["wait_share"] == pytest.approx(0.25)
    lost = {"kind": "lost", "worker": "tcp://h:w1", "name": "w1", "keys": ["a", "b"], "memory": 2**30}
    board.update(lost, now + 6)
    # The fit reports the same loss, which must not count twice.
    board.update({"kind": "event", "run": "r", "name": "worker_lost", "worker": "tcp://h:w1"}, now + 7)
    detail = job.detail(now + 8)
    assert detail["workers_lost"] == 1
    assert detail["workers"] == 1
    assert [w["lost"] for w in detail["worker_rows"]] == [True, False]
    assert [e["text"] for e in detail["events"] if e["name"] == "worker_lost"] == [
        "worker w1, tasks 2, memory 1,024 MiB"
    ]
    board.update(make_span("r", "tcp://h:w1"), now + 9)  # The worker is reachable again.
    assert not any(w["lost"] for w in job.detail(now + 9)["worker_rows"])


def test_spans_in_one_message_are_counted_individually() -> None:
    board = JobBoard()
    feed_fit(board, "r", 1)
    board.update(make_span("r", "tcp://h:w1", device="cupy", spans=4, rows=4000, seconds=4.0), 1000.0)
    (worker,) = board.jobs["r"].detail(1000.0)["worker_rows"]
    assert (worker["spans"], worker["rows"], worker["span_seconds"], worker["pool"]) == (4, 4000, 1.0, "gpu")


def test_spans_create_no_job_and_inner_fits_belong_to_their_run() -> None:
    board = JobBoard()
    board.update(make_span("/tmp/records", "tcp://h:w1"), 1000.0)
    assert not board.jobs  # A span creates no job, because nobody would report its end.
    feed_fit(board, "/runs/search", 1)
    for run in ("/runs/search/candidates/a=1", "/runs/search", "/runs/searching"):
        board.update(make_span(run, "tcp://h:w1"), 1001.0)
    assert list(board.jobs) == ["/runs/search"]
    assert board.jobs["/runs/search"].detail(1001.0)["worker_rows"][0]["spans"] == 2


def test_retired_workers_and_workers_of_other_jobs_are_not_lost() -> None:
    board = JobBoard()
    feed_fit(board, "r", 1)
    board.update(make_span("r", "tcp://h:w1"))
    board.update({"kind": "lost", "worker": "tcp://h:w1", "expected": True, "keys": []})
    board.update({"kind": "lost", "worker": "tcp://h:zz", "keys": []})
    assert board.lost_total == 1
    assert board.jobs["r"].workers.lost_total == 0


def test_events_count_redone_spans_and_quarantined_shards() -> None:
    board = JobBoard()
    feed_fit(board, "r", 1)
    board.update({"kind": "event", "run": "r", "name": "span_redone", "device": "gpu", "count": 3})
    board.update({"kind": "event", "run": "r", "name": "span_redone", "span": 4})
    board.update({"kind": "event", "run": "r", "name": "shard_quarantined", "shard": "x/c/3/0"})
    job = board.jobs["r"]
    assert job.spans_redone == {"gpu": 3, "all": 1}
    (row,) = board.summary()
    assert (row["spans_redone"], row["shards_quarantined"]) == (4, 1)


def test_minibatch_learners_are_drawn_against_steps() -> None:
    board = JobBoard()
    for steps in (10, 20, 30):
        board.update({"kind": "pass", "run": "r", "stage": "em", "pass": 1, "steps": steps, "objective": 1.0})
    (curve,) = board.jobs["r"].detail(0.0)["curves"]
    assert (curve["axis"], curve["x"]) == ("steps", [10, 20, 30])


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
NAMES = (
    "kind run pass stage rows seconds objective state error worker name keys memory rows_done rows_total "
    "rows_per_s max_iter steps span device run_rows job bytes_read expected submitted count event"
)
KEYS = st.sampled_from(NAMES.split())


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["state", "pass", "progress", "span", "event", "lost", "other"]),
            st.dictionaries(KEYS, ANYTHING),
        ),
        max_size=6,
    ),
    ANYTHING,
)
def test_no_message_breaks_the_board(messages: list[tuple[str, dict[str, Any]]], junk: Any) -> None:
    board = JobBoard()
    board.update(junk)
    for kind, message in messages:
        board.update({"run": "r", **message, "kind": kind}, now=1000.0)
    for run in list(board.jobs):
        json.loads(to_json(snapshot(board, {}, run, now=1001.0)))


def test_texts_are_clipped() -> None:
    board = JobBoard()
    board.update(
        {"kind": "state", "run": "r" * 5000, "name": "n" * 10**6, "error": "e" * 10**6, "state": "failed"}
    )
    assert len(to_json(snapshot(board, {}, "r" * 999 + "…"))) < 10_000


def test_the_size_of_a_job_hardly_depends_on_its_passes() -> None:
    """A job takes less than 40 kB on the board, and hardly more with 800 passes than with 100."""

    def measure_job_bytes(passes: int) -> float:
        tracemalloc.start()
        try:
            board = JobBoard(jobs=10, whole_jobs=5)
            for job in range(12):
                run = f"runs/{job:06d}"
                now = feed_fit(board, run, passes, begin=1000.0 + job)
                for worker in range(10):
                    board.update(make_span(run, f"tcp://h:{worker}"), now)
                    board.update({"kind": "event", "run": run, "name": "span_redone", "span": worker}, now)
                board.update({"kind": "state", "run": run, "state": "done"}, now)
            assert len(board.jobs) == 10
            assert "runs/000000" not in board.jobs
            assert sum(bool(job.workers.rows) for job in board.jobs.values()) == 5
            gc.collect()
            # Count only memory of the board and its messages, because threads of earlier tests allocate, too.
            patterns = "*scalelatent/monitor/*", "*test_board*"
            ours = [tracemalloc.Filter(True, pattern) for pattern in patterns]
            kept = tracemalloc.take_snapshot().filter_traces(ours)
            return sum(trace.size for trace in kept.traces) / 10
        finally:
            tracemalloc.stop()

    short, long = measure_job_bytes(100), measure_job_bytes(800)
    assert short > 5e3
    assert long < 40e3
    assert long < 1.5 * short


def test_a_job_keeps_a_bounded_number_of_workers_and_losses() -> None:
    board = JobBoard()
    feed_fit(board, "r", 1)
    for number in range(2500):
        board.update(make_span("r", f"tcp://h:{number}"), 2000.0 + number)
        board.update({"kind": "lost", "worker": f"tcp://h:{number}", "keys": ["k"] * 1000}, 2000.0 + number)
    job = board.jobs["r"]
    assert len(job.workers.rows) <= 1000
    assert job.workers.lost_total == 2500
    assert job.workers.pool_rows == {"cpu": 2500 * 500}
    answer = snapshot(board, {}, "r", now=5000.0)["job"]
    assert len(answer["worker_rows"]) == 50
    assert len(answer["worker_rows"]) + answer["worker_rows_hidden"] == len(job.workers.rows)
    board.update(make_span("r", "tcp://h:0"), 5000.0)
    assert len(board.lost) <= 50
    assert len(board.lost[0]["tasks"]) == 50
