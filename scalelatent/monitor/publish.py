"""The callback that tells the scheduler how a run goes on, for the dashboard page.

Messages are events of Dask on the topic ``"scalelatent"`` (`distributed.Client.log_event`): flat dicts with
``kind`` and ``run``, the URL of the run folder, and

=========  ===============================================================================================
kind       further keys
=========  ===============================================================================================
state      job (its id), name, model, state, error, submitted, began (s since the epoch), driver; again where
           it is only repeated: an ended job does not run again by it; report (its address) of a done one
pass       pass, stage, objective, train_error, validation_error, seconds, rows, bytes_read, …: the scalars
           of the pass record; run_rows and run_bytes: sums since this driver began
progress   stage, pass, rows_done, rows_total, rows_per_s; of a network's layer: layer, layers, k
span       from the workers: stage, part, pass and span (of steps pass and step, of an output shard), rows,
           bytes, seconds, wait_seconds, device, worker (address), name, rss; where several are told
           together sums, ``spans`` their number
event      name (checkpoint, span_redone, shard_quarantined, worker_lost, …) and its scalars
=========  ===============================================================================================

The plugin itself adds, without ``run``: joined (worker, name) and lost (worker, name, keys, n_keys, memory,
memory_limit, expected).
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

PROGRESS_SECONDS = 0.5
BATCH_SECONDS, BATCH_PASSES = 0.1, 5
CHECKPOINT_SECONDS = 1.0
# Within this time a scheduler that was restarted, or has just got the page, knows whose passes those are.
INTRODUCE_SECONDS = 15.0
WAITING = 200


class ClusterLog(Callback):
    """Publish a run on the scheduler, a few small messages a second, without waiting for it.

    As a context it tells the states too: running, and then done, failed or cancelled. Of very short passes
    five in 0.1 s are told; the numbers of the others are in the sums. While the scheduler is away messages
    are dropped, the oldest first: the run folder is the truth.
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
        self._told: dict[str, float] = {}
        self._rows = self._bytes = 0
        self._waiting: deque[dict[str, Any]] = deque(maxlen=WAITING)
        self._sending: Future[None] | None = None
        # Reentrant: what is sent at once calls back at once.
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
        """Tell the state of the job: queued, running, done, failed or cancelled."""
        self._state |= {"state": state, "error": error, **scalars(more)}
        self._introduce()

    def flush(self, timeout: float = 2.0) -> bool:
        """Wait until all is sent, at most so many seconds; True where it is."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            with self._lock:
                if self._sending is None and not self._waiting:
                    return True
            time.sleep(0.01)
        return False

    # -- hooks of the fit ------------------------------------------------------------------------------------

    def on_fit_start(self, info: dict[str, Any]) -> None:
        self._introduce()
        self._event("fit_started", info)

    def on_stage(self, info: dict[str, Any]) -> None:
        self._event("stage", info)

    def on_wait(self) -> None:
        """Tell every 15 s that the driver is there, however long a span takes."""
        if self._due("state", INTRODUCE_SECONDS):
            self._introduce(again=True)

    def on_progress(self, info: dict[str, Any]) -> None:
        """Tell how far the pass is, at most twice a second."""
        self.on_wait()
        if self._due("progress", PROGRESS_SECONDS):
            self._send({"kind": "progress", **scalars(info)})

    def on_pass_end(self, record: dict[str, Any]) -> bool | None:
        self._record(record)
        return None

    def on_report(self, record: dict[str, Any]) -> bool | None:
        self._record(record)
        return None

    def on_checkpoint(self, info: dict[str, Any]) -> None:
        """Tell of the checkpoint, at most once a second."""
        if self._due("checkpoint", CHECKPOINT_SECONDS):
            self._event("checkpoint", info)

    def on_event(self, info: dict[str, Any]) -> None:
        self._event(str(info.get("event", "note")), info)

    def on_fit_end(self, info: dict[str, Any]) -> None:
        """Tell that the fit is over (not the job: it may still score and report)."""
        self._event("fit_ended", info)
        self.flush()

    # -- messages --------------------------------------------------------------------------------------------

    def _record(self, record: Mapping[str, Any]) -> None:
        self._rows += int(record.get("rows") or 0)
        self._bytes += int(record.get("bytes_read") or 0)
        self.on_wait()
        self._send({"kind": "pass", **scalars(record), "run_rows": self._rows, "run_bytes": self._bytes})

    def _introduce(self, again: bool = False) -> None:
        self._told["state"] = time.monotonic()
        # The end of the run may be told by another way, which overtakes this one.
        more = {"again": True} if again else {}
        self._send({"kind": "state", **self._known, **self._state, **more})

    def _event(self, name: str, info: Mapping[str, Any]) -> None:
        self._send({"kind": "event", **scalars(info), "name": name})

    def _due(self, what: str, seconds: float) -> bool:
        now = time.monotonic()
        if now - self._told.get(what, -math.inf) < seconds:
            return False
        self._told[what] = now
        return True

    def _send(self, message: dict[str, Any]) -> None:
        with self._lock:
            if message["kind"] in ("pass", "progress") and self._waiting:
                self._thin(message["kind"], message.get("stage"))
            self._waiting.append({**message, "run": self.run})
            self._push()

    def _thin(self, kind: str, stage: object) -> None:
        """Drop what a new pass or progress makes old while it waits: progress, and all but a few passes."""
        passes = [m for m in self._waiting if m["kind"] == "pass" and m.get("stage") == stage]
        old = [id(m) for m in passes[: -(BATCH_PASSES - 1)]] if kind == "pass" else []
        old += [id(m) for m in self._waiting if m["kind"] == "progress"]
        if old:
            self._waiting = deque((m for m in self._waiting if id(m) not in old), WAITING)

    def _push(self) -> None:
        """Hand what waits to the client's event loop, unless it is still busy with what it got before."""
        if self._sending is None and self._waiting:
            messages = list(self._waiting)
            self._waiting.clear()
            sending = hooks.post_event(self.client, TOPIC, messages, BATCH_SECONDS)
            if sending:
                self._sending = sending
                sending.add_done_callback(self._sent)

    def _sent(self, sending: Future[None]) -> None:
        with self._lock:
            with suppress(
                Exception, CancelledError
            ):  # a scheduler that is away; `distributed` says so itself
                sending.result()
            self._sending = None
            self._push()
