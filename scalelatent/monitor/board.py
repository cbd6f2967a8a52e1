"""State of all jobs on the scheduler, from their messages: workers, curves and events, in bounded memory."""

from __future__ import annotations

import time
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from .messages import (
    AFTER_FIT,
    ERRORS,
    MEASURED,
    clip,
    describe_part,
    describe_span,
    device_pool_of,
    read_number,
    read_number_or_none,
)
from .times import time_text

COLUMNS = ("objective", *ERRORS, *MEASURED, "rows_per_s", "mb_per_s", "nu", "round")
# Keys of a worker's message about the memory of its GPUs, in bytes: used, total, and used for rows.
GPU_MEMORY = ("gpu_used", "gpu_total", "gpu_rows")
ENDED_STATES = ("done", "failed", "cancelled")
# The process that drives a job sends a message every few seconds. Without a message for this time, the page
# shows the job as silent.
SILENT_SECONDS = 60.0
# Upper bounds per job: events, curves, points of a curve, and points of a curve of an old ended job.
MAX_EVENTS, MAX_STAGES, MAX_POINTS, MAX_OLD_POINTS = 60, 8, 400, 100
# Upper bounds: jobs, ended jobs that keep their workers and whole curves, lost workers, workers of a job.
MAX_JOBS, MAX_WHOLE_JOBS, MAX_LOST_WORKERS, MAX_WORKERS = 300, 20, 50, 1000
NAN = float("nan")
EARLY_SECONDS = 0.2  # a `SmoothedRate` has its first estimate after this time, before its window has passed
# Keys that every message may have; the other keys of an event message are the values of the event.
_HEADER_KEYS = ("kind", "run", "name", "event", "time")


class ThinnedCurve:
    """Columns of numbers over one increasing axis, with at most ``limit`` points.

    When the limit is reached, every other point is dropped, and from then on only every second (then fourth,
    eighth, …) new point is kept. The last point is always present.
    """

    __slots__ = ("_count", "_last_kept", "columns", "limit", "stride", "x")

    def __init__(self, columns: Sequence[str], limit: int = 400) -> None:
        self.limit = max(4, limit)
        self.stride, self._count, self._last_kept = 1, 0, True
        self.x = array("d")
        self.columns = {name: array("d") for name in columns}

    def __len__(self) -> int:
        return len(self.x)

    def add(self, x: float, values: Mapping[str, float | None]) -> None:
        """Append a point and drop earlier points at ``x`` or above, because a resumed run repeats passes."""
        if self.x and x <= self.x[-1]:
            earlier = bisect_left(self.x, x)
            self._truncate(earlier)
            self._count, self._last_kept = earlier * self.stride, True
        if not self._last_kept:
            self._truncate(len(self) - 1)
        self._push(x, values)
        self._last_kept = self._count % self.stride == 0
        self._count += 1
        if len(self.x) > self.limit:
            self.thin()

    def thin(self) -> None:
        """Drop every other point, but never the last point."""
        for column in (self.x, *self.columns.values()):
            last = column[-1]
            even = len(column) % 2 == 0
            column[:] = column[::2]
            if even:
                column.append(last)
        self.stride *= 2
        self._last_kept = self._last_kept and (self._count - 1) % self.stride == 0

    def to_dict(self) -> dict[str, list[float | None]]:
        """Return ``x`` and all columns that have a number, as lists for JSON with None for NaN."""
        out: dict[str, list[float | None]] = {"x": list(self.x)}
        for name, column in self.columns.items():
            if any(value == value for value in column):
                out[name] = [value if value == value else None for value in column]
        return out

    def last(self, name: str) -> float | None:
        return next((value for value in reversed(self.columns[name]) if value == value), None)

    def _push(self, x: float, values: Mapping[str, float | None]) -> None:
        self.x.append(x)
        for name, column in self.columns.items():
            value = values.get(name)
            column.append(NAN if value is None else value)

    def _truncate(self, points: int) -> None:
        for column in (self.x, *self.columns.values()):
            del column[points:]


class SmoothedRate:
    """Rate of an amount per second, over the last few seconds."""

    __slots__ = ("_begin", "_last", "_sum", "value", "window")

    def __init__(self, window: float = 3.0) -> None:
        self.window = window
        self._begin: float | None = None
        self._last, self._sum, self.value = 0.0, 0.0, 0.0

    def add(self, now: float, amount: float, seconds: float | None = None) -> None:
        """Add an amount of rows or bytes, finished at the clock time ``now``, that took ``seconds``."""
        if self._begin is None or now - self._last > 10 * self.window:
            self._begin, self._sum = now - (seconds or 0.0), 0.0
            self._last = now
            if not seconds:
                return
        self._sum += amount
        self._last = now
        passed = now - self._begin
        full = passed >= self.window
        if full or (not self.value and passed >= min(EARLY_SECONDS, self.window)):
            fresh = self._sum / passed
            self.value = 0.5 * (self.value + fresh) if self.value and full else fresh
        if full:
            self._begin, self._sum = now, 0.0

    def at(self, now: float) -> float:
        """Return the rate at the time ``now``, or 0 if nothing was added for ten times ``window``."""
        return self.value if now - self._last <= 10 * self.window else 0.0


class WorkerShare:
    """Work that one worker has done for a job: rows, bytes, spans (tasks, one row range each) and times."""

    __slots__ = ("address", "bytes", "gpu_rows", "gpu_total", "gpu_used", "last", "lost", "name", "pool",
                 "rate", "rows", "rss", "seconds", "seen", "spans", "wait")  # fmt: skip

    def __init__(self, address: str) -> None:
        self.address, self.name, self.pool = address, address, "cpu"
        self.rows = self.bytes = self.spans = self.rss = 0
        self.gpu_used = self.gpu_total = self.gpu_rows = 0
        self.seconds = self.wait = self.seen = 0.0
        self.rate, self.last, self.lost = SmoothedRate(), "", False

    def add(self, message: Mapping[str, Any], now: float) -> None:
        rows, seconds = int(read_number(message, "rows")), read_number(message, "seconds")
        self.name = clip(message.get("name") or self.address, 80)
        self.pool = device_pool_of(message)
        self.rows += rows
        self.bytes += int(read_number(message, "bytes"))
        self.spans += int(read_number(message, "spans", 1))
        self.seconds += seconds
        self.wait += read_number(message, "wait_seconds")
        self.rss = int(read_number(message, "rss")) or self.rss
        if read_number(message, "gpu_total"):
            for key in GPU_MEMORY:
                setattr(self, key, int(read_number(message, key)))
        self.rate.add(now, rows, seconds)
        self.last, self.seen, self.lost = describe_span(message), now, False

    def to_dict(self, now: float) -> dict[str, Any]:
        return {
            "worker": self.address,
            "name": self.name,
            "pool": self.pool,
            "rows": self.rows,
            "rows_per_s": 0.0 if self.lost else self.rate.at(now),
            "bytes": self.bytes,
            "spans": self.spans,
            "span_seconds": self.seconds / self.spans if self.spans else None,
            "wait_share": self.wait / self.seconds if self.seconds else None,
            "rss": self.rss or None,
            **{key: getattr(self, key) if self.gpu_total else None for key in GPU_MEMORY},
            "last_span": self.last,
            "seconds_ago": round(now - self.seen, 1) if self.seen else None,
            "lost": self.lost,
        }


class JobWorkers:
    """The last active workers of a job, at most MAX_WORKERS, and sums over all its workers."""

    def __init__(self) -> None:
        self.rows: dict[str, WorkerShare] = {}
        self.pool_rows: dict[str, int] = {}
        self._lost: dict[str, None] = {}
        self.lost_total = 0

    def __len__(self) -> int:
        return sum(1 for worker in self.rows.values() if not worker.lost)

    def add(self, message: Mapping[str, Any], now: float) -> None:
        """Add rows, bytes and times from a worker's message to the totals of the worker and of its device."""
        address = clip(message.get("worker") or "?", 200)
        worker = self.rows.get(address)
        if worker is None:
            self._make_room()
            worker = self.rows[address] = WorkerShare(address)
        worker.add(message, now)
        self.pool_rows[worker.pool] = self.pool_rows.get(worker.pool, 0) + int(read_number(message, "rows"))

    def mark_lost(self, address: str) -> bool:
        """Mark a worker as lost; return False if it was marked before."""
        if address in self._lost:
            return False
        self._lost[address] = None
        if len(self._lost) > MAX_WORKERS:
            del self._lost[next(iter(self._lost))]
        self.lost_total += 1
        if address in self.rows:
            self.rows[address].lost = True
        return True

    def clear(self) -> None:
        """Discard the list of workers of an old job; keep the sums."""
        self.rows.clear()
        self._lost.clear()

    def pools(self, now: float) -> list[dict[str, Any]]:
        """Return workers, rows and rows per second, summed over CPU workers and over GPU workers."""
        out = {pool: {"pool": pool, "workers": 0, "rows": rows, "rows_per_s": 0.0}
               for pool, rows in sorted(self.pool_rows.items())}  # fmt: skip
        for worker in self.rows.values():
            if not worker.lost and worker.pool in out:
                out[worker.pool]["workers"] += 1  # type: ignore[operator]
                out[worker.pool]["rows_per_s"] += worker.rate.at(now)  # type: ignore[operator]
        return list(out.values())

    def _make_room(self) -> None:
        if len(self.rows) >= MAX_WORKERS:
            oldest = min(self.rows.values(), key=lambda w: (not w.lost, w.seen))
            del self.rows[oldest.address]


class JobView:
    """State of one job, identified by the URL of its run folder and updated by messages."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.id = self.name = run.rstrip("/").rsplit("/", 1)[-1] or run
        self.model = self.driver = ""
        self.state, self.error = "running", ""
        self.report = ""
        self.layers = (0.0, 0.0)  # for a multilayer network: current layer, number of layers
        self.submitted: float | None = None
        self.began: float | None = None
        self.ended: float | None = None
        self.seen = 0.0
        self.limit: float | None = None  # upper bound on the number of passes
        self.info: dict[str, Any] = {}
        self.stage = self.part = ""
        self.record: dict[str, Any] = {}
        self.curves: dict[str, ThinnedCurve] = {}
        self.axes: dict[str, str] = {}
        self.workers = JobWorkers()
        self.events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self.rows_rate, self.byte_rate = SmoothedRate(), SmoothedRate()
        self.rows = self.bytes = 0.0
        self.spans_redone: dict[str, int] = {}
        self.quarantined = 0
        self.checkpoint: dict[str, Any] | None = None
        self.pass_seconds: float | None = None
        self._totals: dict[str, float] = {}
        self._at: tuple[str, float] = ("", -1.0)
        self.rows_done = self.rows_total = 0.0

    # -- messages --------------------------------------------------------------------------------------------

    def update(self, message: Mapping[str, Any], now: float) -> None:
        """Update this job's state from a message of its driver or of a worker; ignore unknown kinds."""
        handle = getattr(self, f"_on_{message.get('kind')}", None)
        if handle is not None:
            self.seen = max(self.seen, now)
            handle(message, now)

    def mark_lost(self, worker: str, name: str, now: float, memory: float | None, keys: int) -> None:
        """Record that the cluster lost a worker while this job was running."""
        known = worker in self.workers.rows
        if self.state != "running" or not (known or not self.workers.rows):
            return
        if self.workers.mark_lost(worker):
            words = {"worker": name or worker, "tasks": keys}
            if memory:
                words["memory"] = f"{memory / 2**20:,.0f} MiB"
            self._append_event("worker_lost", words, now)

    def compact(self) -> None:
        """Shorten the curves of an old job and discard its workers; keep its row in the table of jobs."""
        self.workers.clear()
        for curve in self.curves.values():
            while len(curve) > MAX_OLD_POINTS:
                curve.thin()

    def _on_state(self, message: Mapping[str, Any], now: float) -> None:
        for key, length in (("name", 120), ("model", 120), ("driver", 120), ("report", 1000)):
            if message.get(key):
                setattr(self, key, clip(message[key], length))
        self.id = clip(message.get("job") or self.id, 120)
        for key in ("submitted", "began"):
            # A new driver process that replaces a lost one continues its fit, so the start time stays.
            is_continued = key == "began" and self.began is not None and self.state not in ENDED_STATES
            if read_number(message, key) and not is_continued:
                setattr(self, key, read_number(message, key))
        if message.get("again") and self.state in ENDED_STATES:
            return
        state = clip(message.get("state") or self.state, 20)
        if state != self.state or not self.events:
            self._append_event(state, {"error": message.get("error")}, now)
        self.state, self.error = state, clip(message.get("error") or "", 2000)
        if state in ENDED_STATES:
            self.ended = self.ended or now
        else:
            self.ended = None
            if state == "running":
                self.began = self.began or now

    def _on_progress(self, message: Mapping[str, Any], now: float) -> None:
        self._store_stage(message)
        at = (self.stage, read_number(message, "pass"))
        done = read_number(message, "rows_done")
        if at != self._at:
            self._at = at
            # The rows that a resumed pass had finished before its interruption do not count for the rate.
            self.rows_done = 0.0 if read_number(message, "rows_per_s") else done
        fresh, rate = max(0.0, done - self.rows_done), read_number(message, "rows_per_s")
        self.rows_rate.add(now, fresh, fresh / rate if rate else None)
        self.rows_done = done
        self.rows_total = read_number(message, "rows_total")

    def _store_stage(self, message: Mapping[str, Any]) -> None:
        """Store the stage of the fit and, for a multilayer network, the layer that a message names."""
        self.stage, self.part = clip(message.get("stage") or self.stage, 80), clip(describe_part(message), 80)
        if read_number(message, "layer"):
            self.layers = read_number(message, "layer"), read_number(message, "layers")

    def _on_pass(self, message: Mapping[str, Any], now: float) -> None:
        stage = self.stage = clip(message.get("stage") or self.stage, 80)
        self.part = clip(describe_part(message), 80)
        rows, seconds, at = (
            read_number(message, "rows"),
            read_number(message, "seconds"),
            read_number(message, "pass"),
        )
        read = read_number(message, "bytes_read")
        fresh_rows = self._add_to_sum(message, "rows", rows)
        fresh_bytes = self._add_to_sum(message, "bytes", read)
        reported = self.rows_done if (stage, at) == self._at else 0.0
        self.rows_rate.add(now, max(0.0, fresh_rows - reported), seconds or None)
        # Only pass records report bytes. Spread them over the pass, so that a long pass is not a burst.
        self.byte_rate.add(now, fresh_bytes, seconds or None)
        self._at = (stage, at)
        self.rows_done = self.rows_total = max(self.rows_total, rows)
        values = {key: read_number_or_none(message, key) for key in COLUMNS}
        if seconds:
            # Average with later passes, because the first pass includes the compilation of kernels.
            self.pass_seconds = 0.5 * ((self.pass_seconds or seconds) + seconds)
            values["rows_per_s"], values["mb_per_s"] = rows / seconds, read / 1e6 / seconds
        self.record = {key: value for key, value in values.items() if value is not None} | {"pass": int(at)}
        axis = "steps" if read_number(message, "steps") else "pass"
        curve = self._curve(stage, axis)
        curve.add(read_number(message, axis), values)

    def _on_span(self, message: Mapping[str, Any], now: float) -> None:
        self.workers.add(message, now)

    def _on_event(self, message: Mapping[str, Any], now: float) -> None:
        name = clip(message.get("name") or message.get("event") or "note", 60)
        values = {key: message[key] for key in list(message)[:20] if key not in _HEADER_KEYS}
        if name == "fit_started":
            self.info = {key: read_number(message, key) for key in ("rows", "features", "classes", "members")}
            self.limit = read_number_or_none(message, "max_iter")
        elif name == "stage":
            self._store_stage(message)
            self.rows_done, self.rows_total = 0.0, read_number(message, "rows")
            # Scoring and the report read rows at another speed than passes, so their rate starts from zero.
            if self.stage in AFTER_FIT:
                self.rows_rate = SmoothedRate()
        elif name == "checkpoint":
            self.checkpoint = {"pass": read_number_or_none(message, "pass"), "time": now}
            return  # a checkpoint in each pass would displace all other events from the bounded list
        elif name == "span_redone":
            pool = device_pool_of(message, "all")
            self.spans_redone[pool] = self.spans_redone.get(pool, 0) + int(read_number(message, "count", 1))
        elif name == "shard_quarantined":
            self.quarantined += 1
        elif (
            name == "worker_lost"
            and message.get("worker")
            and not self.workers.mark_lost(clip(message["worker"], 200))
        ):
            return
        self._append_event(name, values, now)

    # -- output ----------------------------------------------------------------------------------------------

    def summary(self, now: float) -> dict[str, Any]:
        """Return the values of this job in the table of all jobs, as JSON values."""
        running = self.state == "running"
        silent = now - self.seen if running and now - self.seen > SILENT_SECONDS else None
        rate = self.rows_rate.at(now) if running and silent is None else 0.0
        end = self.ended or now
        return {
            "id": self.id,
            "name": self.name,
            "model": self.model,
            "run": self.run,
            "state": self.state,
            "error": self.error or None,
            "silent_seconds": silent,
            "driver": self.driver or None,
            "stage": self.stage or None,
            "part": self.part or None,
            "pass": self.record.get("pass"),
            "max_passes": self.limit,
            **{key: self.record.get(key) for key in ("objective", *ERRORS, *MEASURED, "nu")},
            "rows_per_s": rate or (None if running else self.record.get("rows_per_s")),
            "mb_per_s": (self.byte_rate.at(now) / 1e6 if rate else None) or None,
            "rows_done": int(self.rows_done),
            "rows_total": int(self.rows_total),
            "progress": self.rows_done / self.rows_total if self.rows_total else None,
            "overall": self._finished_share(),
            "report": self.report or None,
            **self._time_left(rate),
            **{key: _iso_time(getattr(self, key)) for key in ("submitted", "began", "ended")},
            "seconds": max(0.0, end - self.began) if self.began else None,
            "rows": int(self.rows),
            "workers": len(self.workers),
            "workers_lost": self.workers.lost_total,
            "spans_redone": sum(self.spans_redone.values()),
            "shards_quarantined": self.quarantined,
            "checkpoint_pass": self.checkpoint and self.checkpoint["pass"],
            "checkpoint_seconds_ago": now - self.checkpoint["time"] if self.checkpoint else None,
        }

    def detail(self, now: float) -> dict[str, Any]:
        """Return all data of this job for JSON: summary, curves, workers, kinds of devices, events."""
        curves = [
            {"stage": stage, "axis": self.axes[stage], **curve.to_dict()}
            for stage, curve in self.curves.items()
        ]
        return {
            **self.summary(now),
            "data": self.info,
            "curves": curves,
            "pools": self.workers.pools(now),
            "worker_rows": [worker.to_dict(now) for worker in self.workers.rows.values()],
            "events": [{**event, "time": time_text(event["time"])} for event in self.events],
        }

    def _finished_share(self) -> float | None:
        """Return a lower bound on the finished share of the fit, which convergence may end earlier."""
        if self.state == "done" or self.stage in AFTER_FIT:
            return 1.0
        part = self.rows_done / self.rows_total if self.rows_total else 0.0
        layer, layers = self.layers
        if layers:
            # A layer of a bootstrap network has two stages: "gather" reads its centroids, "code" computes
            # the codes. The stage "gather" is short, so it counts as no progress.
            within = part if "code" in self.stage else float("gather" not in self.stage)
            return min(1.0, (layer - 1.0 + within) / layers)
        if not self.limit:
            return None
        done = float(self.record.get("pass", 0.0))
        within = part if self._at[1] > done else 0.0
        return min(1.0, (done + within) / self.limit)

    def _time_left(self, rate: float) -> dict[str, float | None]:
        if self.state != "running":
            return {"pass_seconds_left": None, "seconds_left": None}
        rest = max(0.0, self.rows_total - self.rows_done)
        in_pass = rest / rate if rate and rest else None
        at_most = None
        if self.stage in AFTER_FIT:
            at_most = in_pass
        elif self.limit is not None and self.pass_seconds is not None and "pass" in self.record:
            passes = max(0.0, self.limit - self.record["pass"])
            done = self.rows_done / self.rows_total if rest and self.rows_total else 0.0
            at_most = max(0.0, passes - done) * self.pass_seconds
        return {"pass_seconds_left": in_pass, "seconds_left": at_most}

    def _add_to_sum(self, message: Mapping[str, Any], key: str, amount: float) -> float:
        """Add the rows or bytes of a pass to the sum; return the amount that was added."""
        # ``run_rows`` counts all rows since the driver process began; a new driver process counts from 0.
        total = read_number_or_none(message, f"run_{key}")
        if total is not None:
            before = self._totals.get(key, 0.0)
            amount, self._totals[key] = (total - before if total >= before else total), total
        amount = max(0.0, amount)
        setattr(self, key, getattr(self, key) + amount)
        return amount

    def _curve(self, stage: str, axis: str) -> ThinnedCurve:
        if stage not in self.curves:
            if len(self.curves) >= MAX_STAGES:
                oldest = next(iter(self.curves))
                del self.curves[oldest], self.axes[oldest]
            self.curves[stage], self.axes[stage] = ThinnedCurve(COLUMNS, MAX_POINTS), axis
        return self.curves[stage]

    def _append_event(self, name: str, values: Mapping[str, Any], now: float) -> None:
        shown = ((key, value) for key, value in values.items() if value is not None and value != "")
        words = {"why": "because"}
        text = ", ".join(
            _format_value(value)
            if key == name
            else f"{words.get(key) or clip(key, 40).replace('_', ' ')} {_format_value(value)}"
            for key, value in shown
        )
        self.events.append({"time": now, "name": name, "text": clip(text, 600)})


def _format_value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return clip(value)


def _iso_time(seconds: float | None) -> str | None:
    return None if seconds is None else time_text(seconds)


class JobBoard:
    """State of all jobs on a scheduler, by run folder.

    At ``limit`` jobs a new job replaces the job that ended first. Only the last ``whole_jobs`` ended jobs
    keep their lists of workers.
    """

    def __init__(self, jobs: int = MAX_JOBS, whole_jobs: int = MAX_WHOLE_JOBS) -> None:
        self.limit, self.whole_jobs = jobs, whole_jobs
        self.jobs: dict[str, JobView] = {}
        self.lost: deque[dict[str, Any]] = deque(maxlen=MAX_LOST_WORKERS)
        self.lost_total = 0

    def update(self, message: object, now: float | None = None) -> None:
        """Update a job from a message (see `scalelatent.monitor.publish`); ignore unknown messages."""
        now = time.time() if now is None else now
        if not isinstance(message, Mapping):
            return
        if message.get("kind") == "lost":
            self._record_lost_worker(message, now)
        elif message.get("run") and message.get("kind") == "span":
            job = self._find_working_job(clip(message["run"], 1000))
            if job is not None:
                job.update(message, now)
        elif message.get("run") and message.get("kind") in ("state", "pass", "progress", "event"):
            job = self._find_or_add_job(clip(message["run"], 1000))
            was = job.state
            job.update(message, now)
            if job.state in ENDED_STATES and was not in ENDED_STATES:
                self._compact()

    def find(self, name: str) -> JobView | None:
        """Return a job by its id or its run folder, or None."""
        return self.jobs.get(name) or next((job for job in self.jobs.values() if job.id == name), None)

    def summary(self, now: float | None = None) -> list[dict[str, Any]]:
        """Return a row per job: jobs that have not ended first, then the latest start first."""
        now = time.time() if now is None else now
        order = sorted(
            self.jobs.values(), key=lambda job: (job.state in ENDED_STATES, -(job.began or job.seen))
        )
        return [job.summary(now) for job in order]

    def _find_or_add_job(self, run: str) -> JobView:
        job = self.jobs.get(run)
        if job is None:
            if len(self.jobs) >= self.limit:
                first = min(
                    self.jobs.values(), key=lambda j: (j.state not in ENDED_STATES, j.ended or j.seen)
                )
                del self.jobs[first.run]
            job = self.jobs[run] = JobView(run)
        return job

    def _find_working_job(self, run: str) -> JobView | None:
        """Return the job whose run folder is ``run``, or contains ``run`` (a candidate's folder); or None."""
        around = (job for known, job in self.jobs.items() if run.startswith(f"{known.rstrip('/')}/"))
        return self.jobs.get(run) or next(around, None)

    def _compact(self) -> None:
        ended = sorted((job for job in self.jobs.values() if job.ended), key=lambda job: -(job.ended or 0.0))
        for job in ended[self.whole_jobs :]:
            job.compact()

    def _record_lost_worker(self, message: Mapping[str, Any], now: float) -> None:
        if message.get("expected"):
            return
        self.lost_total += 1
        address, name = clip(message.get("worker") or "?", 200), clip(message.get("name") or "", 80)
        memory, keys = message.get("memory"), message.get("keys")
        memory = float(memory) if isinstance(memory, (int, float)) else None
        keys = [clip(key, 120) for key in keys[:50]] if isinstance(keys, (list, tuple)) else []
        self.lost.append({"time": now, "worker": address, "name": name, "memory": memory, "tasks": keys})
        for job in self.jobs.values():
            job.mark_lost(address, name, now, memory, len(keys))
