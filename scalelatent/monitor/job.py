"""What is known of one job from the messages of its driver and its workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from .parts import AFTER_FIT, ERRORS, part_of
from .series import Curve, Rate
from .times import time_text
from .worker_stats import Workers, clip, number, number_or_none, pool_of

__all__ = ["JobView"]

COLUMNS = ("objective", *ERRORS, "rows_per_s", "mb_per_s", "nu", "round")
ENDED = ("done", "failed", "cancelled")
# A driver speaks at least every few seconds; one that was not heard of for so long is not believed.
SILENT_SECONDS = 60.0
EVENTS, STAGES, POINTS, OLD_POINTS = 60, 8, 400, 100
_OWN = ("kind", "run", "name", "event", "time")


class JobView:
    """One job: feed it messages, ask for a summary or for everything.

    Parameters
    ----------
    run : str
        URL of the run folder, the identity of the job.

    Examples
    --------
    >>> job = JobView("runs/mnist")
    >>> job.feed({"kind": "state", "state": "running", "job": "mnist-1f", "model": "capsule"}, 100.0)
    >>> job.feed({"kind": "pass", "pass": 1, "objective": 0.5, "rows": 10, "seconds": 2}, 102.0)
    >>> summary = job.summary(103.0)
    >>> summary["id"], summary["state"], summary["pass"], summary["objective"]
    ('mnist-1f', 'running', 1, 0.5)
    """

    def __init__(self, run: str) -> None:
        self.run = run
        self.id = self.name = run.rstrip("/").rsplit("/", 1)[-1] or run
        self.model = self.driver = ""
        self.state, self.error = "running", ""
        self.report = ""
        self.layers = (0.0, 0.0)  # which one of how many, of a network
        self.submitted: float | None = None
        self.began: float | None = None
        self.ended: float | None = None
        self.seen = 0.0
        self.limit: float | None = None  # passes at most
        self.info: dict[str, Any] = {}
        self.stage = self.part = ""
        self.record: dict[str, Any] = {}
        self.curves: dict[str, Curve] = {}
        self.axes: dict[str, str] = {}
        self.workers = Workers()
        self.events: deque[dict[str, Any]] = deque(maxlen=EVENTS)
        self.rows_rate, self.byte_rate = Rate(), Rate()
        self.rows = self.bytes = 0.0
        self.spans_redone: dict[str, int] = {}
        self.quarantined = 0
        self.checkpoint: dict[str, Any] | None = None
        self.pass_seconds: float | None = None
        self._heard: dict[str, float] = {}
        self._at: tuple[str, float] = ("", -1.0)
        self.rows_done = self.rows_total = 0.0

    # -- messages --------------------------------------------------------------------------------------------

    def feed(self, message: Mapping[str, Any], now: float) -> None:
        """Take in a message; unknown kinds are passed over."""
        take = getattr(self, f"_on_{message.get('kind')}", None)
        if take is not None:
            self.seen = max(self.seen, now)
            take(message, now)

    def lose(self, worker: str, name: str, now: float, memory: float | None, keys: int) -> None:
        """A worker of the cluster was lost while this job ran."""
        known = worker in self.workers.rows
        if self.state != "running" or not (known or not self.workers.rows):
            return
        if self.workers.lose(worker):
            words = {"worker": name or worker, "tasks": keys}
            if memory:
                words["memory"] = f"{memory / 2**20:,.0f} MiB"
            self._note("worker_lost", words, now)

    def compact(self) -> None:
        """Keep of an old job what its row of the table and a small curve need."""
        self.workers.clear()
        for curve in self.curves.values():
            while len(curve) > OLD_POINTS:
                curve.thin()

    def _on_state(self, message: Mapping[str, Any], now: float) -> None:
        for key, length in (("name", 120), ("model", 120), ("driver", 120), ("report", 1000)):
            if message.get(key):
                setattr(self, key, clip(message[key], length))
        self.id = clip(message.get("job") or self.id, 120)
        for key in ("submitted", "began"):
            if number(message, key):
                setattr(self, key, number(message, key))
        if message.get("again") and self.state in ENDED:
            return
        state = clip(message.get("state") or self.state, 20)
        if state != self.state or not self.events:
            self._note(state, _some(message, ("error",)), now)
        self.state, self.error = state, clip(message.get("error") or "", 2000)
        if state in ENDED:
            self.ended = self.ended or now
        else:
            self.ended = None
            if state == "running":
                self.began = self.began or now

    def _on_progress(self, message: Mapping[str, Any], now: float) -> None:
        self._place(message)
        at = (self.stage, number(message, "pass"))
        done = number(message, "rows_done")
        if at != self._at:
            self._at = at
            # Rows that an interrupted pass had left are no part of the rate.
            self.rows_done = 0.0 if number(message, "rows_per_s") else done
        fresh, rate = max(0.0, done - self.rows_done), number(message, "rows_per_s")
        self.rows_rate.add(now, fresh, fresh / rate if rate else None)
        self.rows_done = done
        self.rows_total = number(message, "rows_total")

    def _place(self, message: Mapping[str, Any]) -> None:
        """Take in which stage it is, and of a network which layer."""
        self.stage, self.part = clip(message.get("stage") or self.stage, 80), clip(part_of(message), 80)
        if number(message, "layer"):
            self.layers = number(message, "layer"), number(message, "layers")

    def _on_pass(self, message: Mapping[str, Any], now: float) -> None:
        stage = self.stage = clip(message.get("stage") or self.stage, 80)
        self.part = clip(part_of(message), 80)
        rows, seconds, at = number(message, "rows"), number(message, "seconds"), number(message, "pass")
        read = number(message, "bytes_read")
        fresh_rows, fresh_bytes = self._count(message, "rows", rows), self._count(message, "bytes", read)
        told = self.rows_done if (stage, at) == self._at else 0.0
        self.rows_rate.add(now, max(0.0, fresh_rows - told), seconds or None)
        # Bytes are told by passes alone; spread over their time, a long pass does not look like a burst.
        self.byte_rate.add(now, fresh_bytes, seconds or None)
        self._at = (stage, at)
        self.rows_done = self.rows_total = max(self.rows_total, rows)
        values = {key: number_or_none(message, key) for key in COLUMNS}
        if seconds:
            # The first pass is no measure of the others: kernels are compiled in it.
            self.pass_seconds = 0.5 * ((self.pass_seconds or seconds) + seconds)
            values["rows_per_s"], values["mb_per_s"] = rows / seconds, read / 1e6 / seconds
        self.record = {key: value for key, value in values.items() if value is not None} | {"pass": int(at)}
        axis = "steps" if number(message, "steps") else "pass"
        curve = self._curve(stage, axis)
        curve.add(number(message, axis), values)

    def _on_span(self, message: Mapping[str, Any], now: float) -> None:
        self.workers.add(message, now)

    def _on_event(self, message: Mapping[str, Any], now: float) -> None:
        name = clip(message.get("name") or message.get("event") or "note", 60)
        values = {key: message[key] for key in list(message)[:20] if key not in _OWN}
        if name == "fit_started":
            self.info = {key: number(message, key) for key in ("rows", "features", "classes", "members")}
            self.limit = number_or_none(message, "max_iter")
        elif name == "stage":
            self._place(message)
            self.rows_done, self.rows_total = 0.0, number(message, "rows")
            if self.stage in AFTER_FIT:  # their rows are of another kind than those of passes
                self.rows_rate = Rate()
        elif name == "checkpoint":
            self.checkpoint = {"pass": number_or_none(message, "pass"), "time": now}
            return  # one a pass would push everything else out of the list
        elif name == "span_redone":
            pool = pool_of(message, "all")
            self.spans_redone[pool] = self.spans_redone.get(pool, 0) + int(number(message, "count", 1))
        elif name == "shard_quarantined":
            self.quarantined += 1
        elif (
            name == "worker_lost"
            and message.get("worker")
            and not self.workers.lose(clip(message["worker"], 200))
        ):
            return
        self._note(name, values, now)

    # -- what it looks like ----------------------------------------------------------------------------------

    def summary(self, now: float) -> dict[str, Any]:
        """One row of the table of jobs, fit for JSON."""
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
            **{key: self.record.get(key) for key in ("objective", *ERRORS, "nu")},
            "rows_per_s": rate or (None if running else self.record.get("rows_per_s")),
            "mb_per_s": (self.byte_rate.at(now) / 1e6 if rate else None) or None,
            "rows_done": int(self.rows_done),
            "rows_total": int(self.rows_total),
            "progress": self.rows_done / self.rows_total if self.rows_total else None,
            "overall": self._overall(),
            "report": self.report or None,
            **self._time_left(rate),
            **{key: _time(getattr(self, key)) for key in ("submitted", "began", "ended")},
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
        """The summary, curves, workers, pools and events."""
        curves = [
            {"stage": stage, "axis": self.axes[stage], **curve.to_dict()}
            for stage, curve in self.curves.items()
        ]
        return {
            **self.summary(now),
            "data": self.info,
            "curves": curves,
            "pools": self.workers.pools(now),
            "worker_rows": self.workers.to_list(now),
            "events": [{**event, "time": time_text(event["time"])} for event in self.events],
        }

    def _overall(self) -> float | None:
        """Share of the fit that is done, at least: convergence or patience may end it earlier."""
        if self.state == "done" or self.stage in AFTER_FIT:
            return 1.0
        part = self.rows_done / self.rows_total if self.rows_total else 0.0
        layer, layers = self.layers
        if layers:
            # Of the two parts of a layer, centroids and codes, the first one takes little.
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

    def _count(self, message: Mapping[str, Any], key: str, told: float) -> float:
        """Add to a sum; returns what was added."""
        # ``run_rows`` counts the passes too that were not told one by one; a new driver begins again at 0.
        total = number_or_none(message, f"run_{key}")
        if total is not None:
            before = self._heard.get(key, 0.0)
            told, self._heard[key] = (total - before if total >= before else total), total
        told = max(0.0, told)
        setattr(self, key, getattr(self, key) + told)
        return told

    def _curve(self, stage: str, axis: str) -> Curve:
        if stage not in self.curves:
            if len(self.curves) >= STAGES:
                oldest = next(iter(self.curves))
                del self.curves[oldest], self.axes[oldest]
            self.curves[stage], self.axes[stage] = Curve(COLUMNS, POINTS), axis
        return self.curves[stage]

    def _note(self, name: str, values: Mapping[str, Any], now: float) -> None:
        said = ((key, value) for key, value in values.items() if value is not None and value != "")
        text = ", ".join(
            _say(value) if key == name else f"{clip(key, 40).replace('_', ' ')} {_say(value)}"
            for key, value in said
        )
        self.events.append({"time": now, "name": name, "text": clip(text, 600)})


def _some(message: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: message[key] for key in keys if message.get(key)}


def _say(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return clip(value)


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else time_text(seconds)
