"""Handlers of the scheduler's web server: the page ``/scalelatent``, its JSON, and reports."""

from __future__ import annotations

import json
import math
import time
import weakref
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tornado.web import HTTPError, RequestHandler

from scalelatent.engine.dask import hooks
from scalelatent.errors import ScalelatentError
from scalelatent.storage.disk import is_local, locate

from .board import JobBoard
from .messages import natural_sort_key
from .times import time_text

if TYPE_CHECKING:
    import jinja2
    from distributed import Scheduler

FOLDER = Path(__file__).parent / "page"
FORMAT_VERSION = 2
# Seconds for which a JSON answer is reused, so that several open pages share one computation.
FRESH_SECONDS = 0.4
REPORT_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; sandbox"
MAX_WORKERS, MAX_LOST_WORKERS = 200, 50  # upper bounds on the workers and lost workers in an answer
_bodies: weakref.WeakKeyDictionary[JobBoard, dict[str | None, tuple[float, str]]] = (
    weakref.WeakKeyDictionary()
)


class _Handler(RequestHandler):
    def initialize(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler

    @property
    def board(self) -> JobBoard:
        plugin = self.scheduler.plugins.get("scalelatent")
        board = getattr(plugin, "board", None)
        if board is None:
            raise HTTPError(404, reason="the scalelatent plugin is no longer on this scheduler")
        return board


class PageHandler(_Handler):
    """Handler of the page ``/scalelatent``, in the frame of the Dask dashboard."""

    def get(self) -> None:
        _ = self.board
        folder, variables = hooks.page_frame(self.scheduler)
        self.set_header("Content-Type", "text/html; charset=utf-8")
        self.set_header("Cache-Control", "no-store")
        self.write(render(str(folder) if folder else None, variables))


class JsonHandler(_Handler):
    """Handler of ``/scalelatent.json``; ``?job=ID`` adds all data of one job."""

    def get(self) -> None:
        job = self.get_query_argument("job", None)
        board = self.board
        if job is not None and board.find(job) is None:
            self.set_status(404)
            self.write({"error": f"no job {job!r} on this scheduler"})
            return
        self.set_header("Content-Type", "application/json")
        self.set_header("Cache-Control", "no-store")
        self.write(_cached_answer(self.scheduler, board, job))


class ReportHandler(_Handler):
    """Handler of the report of the job ``?job=ID``, if this machine can read the run folder of the job."""

    def get(self) -> None:
        """Send the report page; its policy forbids scripts and external files."""
        job = self.board.find(self.get_query_argument("job", ""))
        page = None if job is None else report_of(job.run)
        if page is None:
            self.set_status(404)
            self.set_header("Content-Type", "text/plain; charset=utf-8")
            where = "" if job is None else job.report or f"{job.run}/report/index.html"
            self.write(f"this machine cannot read the report: {where}" if where else "unknown job")
            return
        self.set_header("Content-Type", "text/html; charset=utf-8")
        self.set_header("Cache-Control", "no-store")
        self.set_header("Content-Security-Policy", REPORT_POLICY)
        self.write(page)


def report_of(run: str) -> bytes | None:
    """Return the page of a report, or None; skip object stores, whose reads would block the event loop."""
    if not is_local(run):
        return None
    folder = locate(run)
    try:
        return folder.read("report/index.html") if folder.has("job.json") else None
    except (OSError, ScalelatentError):
        return None


ROUTES: list[tuple[str, type[RequestHandler]]] = [
    ("/scalelatent", PageHandler),
    ("/scalelatent.json", JsonHandler),
    ("/scalelatent/report", ReportHandler),
]


def snapshot(
    board: JobBoard, workers: dict[str, dict[str, Any]], job: str | None = None, now: float | None = None
) -> dict[str, Any]:
    """Return the content of ``/scalelatent.json``: all jobs and, unless ``job`` is None, details of one job.

    Times are ISO 8601 text, durations are seconds, sizes are bytes, and unknown values are null.
    """
    now = time.time() if now is None else now
    out: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "time": time_text(now),
        "cluster": {
            "workers": len(workers),
            "threads": sum(facts["threads"] for facts in workers.values()),
            "gpus": sum(facts["gpus"] for facts in workers.values()),
            "workers_lost": board.lost_total,
            "lost": list(board.lost)[-10:],
        },
        "jobs": board.summary(now),
    }
    found = board.find(job) if job is not None else None
    if found is not None:
        out["job"] = found.detail(now)
        rows = out["job"]["worker_rows"]
        if not rows and found.state == "running":  # no worker has reported rows yet
            rows.extend({"worker": address, "pool": "gpu" if facts["gpus"] else "cpu", "lost": False}
                        for address, facts in workers.items())  # fmt: skip
        for row in rows:
            row.update(workers.get(row["worker"], {}))
        rows.sort(key=lambda row: (row["lost"], natural_sort_key(row["name"])))
        out["job"]["worker_rows_hidden"] = _truncate_workers(rows)
    return out


def _truncate_workers(rows: list[dict[str, Any]]) -> int:
    """Truncate a list of workers that ends with the lost workers; return the number of removed workers."""
    there = sum(not row["lost"] for row in rows)
    hidden = max(0, there - MAX_WORKERS) + max(0, len(rows) - there - MAX_LOST_WORKERS)
    rows[:] = rows[: min(there, MAX_WORKERS)] + rows[there:][-MAX_LOST_WORKERS:]
    return hidden


def _cached_answer(scheduler: Scheduler, board: JobBoard, job: str | None) -> str:
    """Return all jobs, and details of ``job`` unless it is None, as JSON text; reuse it for FRESH_SECONDS."""
    kept = _bodies.setdefault(board, {})
    now = time.monotonic()
    if job not in kept or now - kept[job][0] > FRESH_SECONDS:
        for old in [key for key, (at, _) in kept.items() if now - at > FRESH_SECONDS]:
            del kept[old]
        kept[job] = (now, to_json(snapshot(board, hooks.worker_facts(scheduler), job)))
    return kept[job][1]


def to_json(value: object) -> str:
    """Return JSON text with rounded numbers, and null for NaN and infinity."""
    return json.dumps(_round_numbers(value), separators=(",", ":"), allow_nan=False)


def _round_numbers(value: object) -> object:
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return round(value, 3) if abs(value) >= 1e6 else float(f"{value:.7g}")
    if isinstance(value, dict):
        return {key: _round_numbers(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_round_numbers(item) for item in value]
    return value


def render(folder: str | None, variables: dict[str, Any]) -> str:
    """Return the page as HTML. ``folder`` contains Dask's ``base.html``; None makes a page without it."""
    return str(_template(folder).render(**variables))


@lru_cache(maxsize=2)
def _template(folder: str | None) -> jinja2.Template:
    from jinja2 import Environment, FileSystemLoader

    folders = [str(FOLDER)] + ([folder] if folder else [])
    environment = Environment(loader=FileSystemLoader(folders), autoescape=True)
    return environment.get_template("page.html" if folder else "alone.html")
