"""Callback that reports the progress of a run to the scheduler, for the dashboard page.

Messages are Dask events on the topic ``"scalelatent"`` (`distributed.Client.log_event`). Each message is a
flat dict with ``kind``, ``run`` (the URL of the run folder) and further keys:

=========  ===============================================================================================
kind       further keys
=========  ===============================================================================================
state      job (its id), name, model, state, error, submitted, began (s since the epoch), driver; again (a
           repeated message, which does not restart an ended job); report (its address) for a done job
pass       pass, stage, objective, train_error, validation_error, seconds, rows, bytes_read, …: the scalars
           of the pass record; run_rows and run_bytes: sums since this driver began
progress   stage, pass, rows_done, rows_total, rows_per_s; for a layer of a network: layer, layers, k
span       from the workers: stage, part, pass and span (pass and step for steps, shard for outputs), rows,
           bytes, seconds, wait_seconds, device, worker (address), name, rss; a message for several spans
           contains sums, and their number in ``spans``
event      name (checkpoint, span_redone, shard_quarantined, worker_lost, …) and its scalars
=========  ===============================================================================================

The scheduler plugin sends messages of the kind "lost", without ``run``, about lost workers: worker (address),
name, keys (of its tasks), n_keys, memory, memory_limit (both in bytes), expected (True after a retirement).
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import CancelledError
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from scalelatent.engine.callbacks import Callback
from scalelatent.engine.dask import hooks

from .messages import TOPIC, scalars

if TYPE_CHECKING:
    from concurrent.futures import Future

    from distributed import Client

PROGRESS_SECONDS = 0.5  # minimum time between two progress messages
# Minimum seconds between two batches of messages; maximum number of passes whose records are in one batch.
BATCH_SECONDS, BATCH_PASSES = 0.1, 5
CHECKPOINT_SECONDS = 1.0  # minimum time between two checkpoint messages
# Seconds between repeated state messages, with which a restarted scheduler shows the job again.
INTRODUCE_SECONDS = 15.0
MAX_WAITING_MESSAGES = 200  # upper bound on messages that wait to be sent


class ClusterLog(Callback):
    """Callback that publishes a run on the scheduler by a few small messages a second, without waiting.

    As a context manager it also publishes the states: running, then done, failed or cancelled. If passes are
    very short, it sends the records of at most five passes per 0.1 s; the sums of rows and bytes include all
    passes. While the scheduler is away, the oldest messages are dropped; the run folder has all records.
    """

    tells_cluster = True

    def __init__(
        self,
        client: Client,
        run: str,
        *,
        job: str | None = None,
        model: str | None = None,
        name: str | None = None,
        submitted: float | None = None,
        driver: str | None = None,
    ) -> None:
        self.client, self.run = client, str(run)
        known = {"job": job, "model": model, "name": name, "submitted": submitted, "driver": driver}
        self._known = {key: value for key, value in known.items() if value is not None}
        self._state: dict[str, Any] = {"state": "running"}
        self._sent_at: dict[str, float] = {}
        self._rows = self._bytes = 0
        self._waiting: deque[dict[str, Any]] = deque(maxlen=MAX_WAITING_MESSAGES)
        self._sending: Future[None] | None = None
        # The lock is reentrant, because a message that is sent at once calls `_on_sent` in the same thread.
        self._lock = threading.RLock()

    def __enter__(self) -> ClusterLog:
        self._known.setdefault("driver", f"{socket.gethostname()}:{os.getpid()}")
        self.state("running", began=time.time())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.state("done")
        elif issubclass(kind, KeyboardInterrupt):
            self.state("cancelled")
        else:
            self.state("failed", error=f"{error}" or kind.__name__)
        self.flush()

    # -- states ----------------------------------------------------------------------------------------------

    def state(self, state: str, error: str | None = None, **more: object) -> None:
        """Publish the state of the job: queued, running, done, failed or cancelled."""
        self._state |= {"state": state, "error": error, **scalars(more)}
        self._publish_state()

    def flush(self, timeout: float = 2.0) -> bool:
        """Wait at most ``timeout`` seconds until all messages are sent; return whether they are."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            with self._lock:
                if self._sending is None and not self._waiting:
                    return True
            time.sleep(0.01)
        return False

    # -- hooks of the fit ------------------------------------------------------------------------------------

    def on_fit_start(self, info: dict[str, Any]) -> None:
        self._publish_state()
        self._publish_event("fit_started", info)

    def on_stage(self, info: dict[str, Any]) -> None:
        self._publish_event("stage", info)

    def on_wait(self) -> None:
        """Repeat the state message every 15 s while the fit waits, so that the driver does not seem lost."""
        if self._is_due("state", INTRODUCE_SECONDS):
            self._publish_state(again=True)

    def on_progress(self, info: dict[str, Any]) -> None:
        """Publish the progress of the pass, at most twice a second."""
        self.on_wait()
        if self._is_due("progress", PROGRESS_SECONDS):
            self._send({"kind": "progress", **scalars(info)})

    def on_pass_end(self, record: dict[str, Any]) -> bool | None:
        self._publish_record(record)
        return None

    def on_report(self, record: dict[str, Any]) -> bool | None:
        self._publish_record(record)
        return None

    def on_checkpoint(self, info: dict[str, Any]) -> None:
        """Publish the checkpoint, at most once a second."""
        if self._is_due("checkpoint", CHECKPOINT_SECONDS):
            self._publish_event("checkpoint", info)

    def on_event(self, info: dict[str, Any]) -> None:
        self._publish_event(str(info.get("event", "note")), info)

    def on_fit_end(self, info: dict[str, Any]) -> None:
        """Publish the end of the fit. The job may continue, with scores and a report."""
        self._publish_event("fit_ended", info)
        self.flush()

    # -- messages --------------------------------------------------------------------------------------------

    def _publish_record(self, record: Mapping[str, Any]) -> None:
        self._rows += int(record.get("rows") or 0)
        self._bytes += int(record.get("bytes_read") or 0)
        self.on_wait()
        self._send({"kind": "pass", **scalars(record), "run_rows": self._rows, "run_bytes": self._bytes})

    def _publish_state(self, again: bool = False) -> None:
        self._sent_at["state"] = time.monotonic()
        # `run_record.publish_state` also publishes the end of a run. With ``again``, the board ignores a
        # repeated state that arrives after the end.
        more = {"again": True} if again else {}
        self._send({"kind": "state", **self._known, **self._state, **more})

    def _publish_event(self, name: str, info: Mapping[str, Any]) -> None:
        self._send({"kind": "event", **scalars(info), "name": name})

    def _is_due(self, what: str, seconds: float) -> bool:
        now = time.monotonic()
        if now - self._sent_at.get(what, -math.inf) < seconds:
            return False
        self._sent_at[what] = now
        return True

    def _send(self, message: dict[str, Any]) -> None:
        with self._lock:
            if message["kind"] in ("pass", "progress") and self._waiting:
                self._thin(message["kind"], message.get("stage"))
            self._waiting.append({**message, "run": self.run})
            self._push()

    def _thin(self, kind: str, stage: object) -> None:
        """Drop waiting messages that a newer message replaces: all progress, and all but the last passes."""
        passes = [m for m in self._waiting if m["kind"] == "pass" and m.get("stage") == stage]
        old = [id(m) for m in passes[: -(BATCH_PASSES - 1)]] if kind == "pass" else []
        old += [id(m) for m in self._waiting if m["kind"] == "progress"]
        if old:
            self._waiting = deque((m for m in self._waiting if id(m) not in old), MAX_WAITING_MESSAGES)

    def _push(self) -> None:
        """Give waiting messages to the event loop of the client, unless the loop still sends earlier ones."""
        if self._sending is None and self._waiting:
            messages = list(self._waiting)
            self._waiting.clear()
            sending = hooks.post_event(self.client, TOPIC, messages, BATCH_SECONDS)
            if sending:
                self._sending = sending
                sending.add_done_callback(self._on_sent)

    def _on_sent(self, sending: Future[None]) -> None:
        with self._lock:
            with suppress(Exception, CancelledError):  # `distributed` itself reports a lost scheduler
                sending.result()
            self._sending = None
            self._push()
