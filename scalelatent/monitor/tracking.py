"""Tracking of runs with MLflow: parameters, metrics by pass, figures, the model."""

from __future__ import annotations

import math
import os
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalelatent.engine.callbacks import Callback
from scalelatent.errors import JobError, warn_user
from scalelatent.storage.disk import is_local, locate
from scalelatent.storage.location import Location

if TYPE_CHECKING:
    from mlflow.entities import Metric

RUN_TAG = "scalelatent.run"
# Limits of MLflow: parameters per request, metrics per request, and characters of a parameter value.
PARAMS_AT_ONCE, METRICS_AT_ONCE, VALUE_LETTERS = 100, 1000, 6000
# Seconds that a run waits at its end for a server that answers no call; a guess, not measured.
CLOSE_SECONDS = 60.0
# A warning quotes at most this many characters of an MLflow error, which may contain a whole request.
ERROR_LETTERS = 300
# This variable stops MLflow from printing addresses to standard output, which other programs may read.
SILENCE = "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"
_STATUS = {"done": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}


class MlflowTracking(Callback):
    """Log a run to MLflow: the values of the job, metrics by pass, then scores, the report and the model.

    A separate thread sends all data in order, so that a slow or missing server delays no pass. The first
    error gives a warning. At its end, a run waits while the server answers, and at most a minute for one that
    does not. A resumed run continues its earlier MLflow run. The entry in a job file is ``[[callbacks]]``
    with ``kind = "mlflow"``; the process that drives the job sends the data.

    Parameters
    ----------
    uri : str, optional
        Tracking server or store, for example ``http://host:5000``. By default the value of
        ``MLFLOW_TRACKING_URI``, otherwise ``mlflow.db`` with its files in ``mlruns``, next to the run folder
        (for a fit without a job: in the current folder).
    experiment : str
        Name of the experiment, which is created if it does not exist.
    model : bool
        Send the fitted model.

    Raises
    ------
    JobError
        MLflow is not installed.

    Examples
    --------
    >>> import scalelatent as sl
    >>> from scalelatent.monitor.tracking import MlflowTracking
    >>> tracking = MlflowTracking("http://head:5000")  # doctest: +SKIP
    >>> sl.CapsuleRegression().fit(ds, callbacks=[tracking])  # doctest: +SKIP
    """

    def __init__(self, uri: str | None = None, experiment: str = "scalelatent", model: bool = True) -> None:
        try:
            from mlflow import MlflowClient
            from mlflow.entities import Metric, Param
        except ImportError as error:
            raise JobError(
                f"tracking with MLflow needs a package that is not installed ({error.name or error}); run: "
                "pip install 'scalelatent[mlflow]'"
            ) from error
        os.environ.setdefault(SILENCE, "true")
        self._make: Any = MlflowClient
        self._metric, self._param = Metric, Param
        self.uri, self.experiment, self.model = uri, experiment, model
        self._client: Any = None
        self._place = uri
        self._run_id: str | None = None
        self._metrics: queue.SimpleQueue[Metric] = queue.SimpleQueue()
        self._sender: _Sender | None = None
        self._of_job = False
        self._passes = 0
        self._warned = False

    def on_run_start(self, info: dict[str, Any]) -> None:
        """Start an MLflow run with the values of the job, or resume an earlier one."""
        self._of_job = True
        run = str(info["run"])
        folder = os.path.dirname(run) if is_local(run) else None
        self._begin(folder, str(info["name"]), dict(info["values"]), {RUN_TAG: str(info["id"])})

    def on_fit_start(self, info: dict[str, Any]) -> None:
        """Start an MLflow run if the fit does not belong to a job."""
        if not self._of_job:
            values = {
                key: value for key, value in info.items() if isinstance(value, str | int | float | None)
            }
            self._begin(os.getcwd(), str(info.get("stage") or "fit"), values, {})

    def on_event(self, info: dict[str, Any]) -> None:
        """Continue the count of passes if the fit resumes an earlier one; MLflow gets it as metrics' step."""
        if info.get("event") == "resumed":
            self._passes = len(info.get("history") or ())

    def on_pass_end(self, record: dict[str, Any]) -> None:
        self._passes += 1
        self._send_metrics({key: value for key, value in record.items() if key != "pass"}, self._passes)

    def on_fit_end(self, info: dict[str, Any]) -> None:
        """End the MLflow run if the fit does not belong to a job."""
        if not self._of_job:
            self._end("FINISHED")

    def on_run_end(self, info: dict[str, Any]) -> None:
        """Send scores, report and model, and end the MLflow run with the state of the job."""
        self._send_metrics(info["scores"], self._passes)
        for name in ("report", "model"):
            if info[name] is not None and (name == "report" or self.model):
                self._put_files(str(info[name]), name)
        if info["error"]:
            self._put(lambda: self._client.set_tag(self._run_id, "scalelatent.error", info["error"][:500]))
        self._end(_STATUS.get(info["state"]))

    def _begin(self, folder: str | None, name: str, values: dict[str, Any], tags: dict[str, str]) -> None:
        self._sender, self._run_id, self._metrics = _Sender(), None, queue.SimpleQueue()
        self._passes, self._warned = 0, False
        self._put(lambda: self._open(folder, name, values, tags), always=True)

    def _open(self, folder: str | None, name: str, values: dict[str, Any], tags: dict[str, str]) -> None:
        """Create or find the experiment and the run, and send the parameters. Runs on the sender thread."""
        uri, files = self.uri or os.environ.get("MLFLOW_TRACKING_URI"), None
        if uri is None:
            if folder is None:
                raise JobError(
                    "the run folder is in an object store, next to which MLflow cannot create a local store; "
                    "give uri, the address of a tracking server"
                )
            uri, files = f"sqlite:///{folder}/mlflow.db", Path(folder, "mlruns").as_uri()
        self._place = uri
        self._client = client = self._make(tracking_uri=uri)
        found = client.get_experiment_by_name(self.experiment)
        place = client.create_experiment(self.experiment, files) if found is None else found.experiment_id
        if tags:
            same = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
            earlier = client.search_runs([place], same)
            if earlier:
                self._run_id = earlier[0].info.run_id
                client.update_run(self._run_id, status="RUNNING")
                return
        self._run_id = run_id = client.create_run(place, run_name=name, tags=tags).info.run_id
        params = [self._param(key, str(value)[:VALUE_LETTERS]) for key, value in values.items()]
        for a in range(0, len(params), PARAMS_AT_ONCE):
            client.log_batch(run_id, params=params[a : a + PARAMS_AT_ONCE])

    def _send_metrics(self, values: Mapping[str, Any], step: int) -> None:
        now = int(time.time() * 1000)
        for key, value in values.items():
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                self._metrics.put(self._metric(key, float(value), now, step))
        self._put(self._send_waiting)

    def _send_waiting(self) -> None:
        """Send at most 1000 waiting metrics, of one or more passes, in one call, on the sender thread."""
        metrics: list[Metric] = []
        while len(metrics) < METRICS_AT_ONCE and not self._metrics.empty():
            metrics.append(self._metrics.get())
        if metrics:
            self._client.log_batch(self._run_id, metrics=metrics)

    def _put_files(self, url: str, name: str) -> None:
        """Send each file of a folder by one call; for a model in an object store, send only its address."""
        place = locate(url)
        top = place.local_path("")
        if top is None:
            self._put(lambda: self._client.set_tag(self._run_id, f"scalelatent.{name}", url))
            for key in place.keys("") if name == "report" else ():
                self._put(partial(self._send_copy, place, key, name))
            return
        for folder, _, files in os.walk(top):
            below = os.path.normpath(os.path.join(name, os.path.relpath(folder, top)))
            for file in files:
                self._put(partial(self._send_file, os.path.join(folder, file), below))

    def _send_copy(self, place: Location, key: str, name: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, key).write_bytes(place.read(key) or b"")
            self._send_file(os.path.join(folder, key), name)

    def _send_file(self, path: str, below: str) -> None:
        self._client.log_artifact(self._run_id, path, below)

    def _end(self, status: str | None) -> None:
        if self._sender is None:
            return
        if status is not None:
            self._put(lambda: self._client.set_terminated(self._run_id, status))
        answered = self._sender.close(CLOSE_SECONDS)
        self._warn_of_error()
        if not answered:
            self._warn(
                f"no answer for {CLOSE_SECONDS:.0f} s; the run is complete, but its last data is not in "
                "MLflow"
            )
        self._sender = None

    def _put(self, call: Callable[[], object], *, always: bool = False) -> None:
        if self._sender is None:
            return
        self._warn_of_error()
        # Skip the call if MLflow could not create the run.
        self._sender.put(call if always else lambda: self._run_id and call())

    def _warn_of_error(self) -> None:
        if self._sender is not None and self._sender.error is not None:
            text = " ".join(str(self._sender.error).split())
            short = text if len(text) <= ERROR_LETTERS else text[:ERROR_LETTERS] + " …"
            rest = "the fit continues, and further errors are not reported"
            self._warn(f"{type(self._sender.error).__name__}: {short}; {rest}")

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            warn_user(f"tracking with MLflow ({self._place or 'local'}): {what}")


class _Sender:
    """Thread that makes calls to MLflow in the order in which they were added."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        # Clock time in seconds of the first call after the last success; None if the last call succeeded.
        self._tried_since: float | None = None
        self._given_up = False
        self._thread = threading.Thread(target=self._work, name="scalelatent-tracking", daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], object]) -> None:
        self._calls.put(call)

    def close(self, seconds: float) -> bool:
        """Wait for the remaining calls; return False if no call succeeds for this many seconds."""
        self._calls.put(None)
        began = time.monotonic()  # count the time from here, because a call may have failed long before
        while self._thread.is_alive() and not self._given_up:
            since = self._tried_since
            self._given_up = since is not None and time.monotonic() - max(since, began) > seconds
            self._thread.join(0.1)
        return not self._given_up

    def _work(self) -> None:
        while (call := self._calls.get()) is not None and not self._given_up:
            self._tried_since = self._tried_since or time.monotonic()
            try:
                call()
                self._tried_since = None
            except Exception as error:  # noqa: BLE001  the fit continues after any error
                self.error = self.error or error
