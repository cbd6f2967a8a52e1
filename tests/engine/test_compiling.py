"""A fit, its progress display and its workers report that they wait for the compiler of kernels."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from scalelatent.engine.callbacks import COMPILING, Callback, kernel_event
from scalelatent.engine.dask import worker_side
from scalelatent.engine.dask.scheduler_listener import KERNELS
from scalelatent.estimators.session import FitSession
from scalelatent.kernels import compile_observers
from scalelatent.monitor.progress import ProgressDisplay
from tests.helpers import make_fresh_kernel


class EventLog(Callback):
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def on_event(self, info: dict[str, Any]) -> None:
        self.events.append(info)


def test_a_fit_receives_compiler_events_only_while_it_runs() -> None:
    log = EventLog()
    with FitSession("test", device="cpu", n_jobs=1, callbacks=[log]):
        kernel = make_fresh_kernel()
        assert kernel(1) == kernel(1) == 2
    make_fresh_kernel()(1)
    assert [event["event"] for event in log.events] == ["compiling_kernels", "kernel_compiled"]
    assert log.events[0]["message"] == COMPILING
    assert log.events[1]["seconds"] >= 0


def test_progress_reports_the_compilation_of_kernels_once() -> None:
    show = ProgressDisplay(Console(file=io.StringIO(), width=100))
    show.on_fit_start({"rows": 10})
    for kernel in ("a", "b"):
        show.on_event(kernel_event(kernel, None))
        show.on_event(kernel_event(kernel, 1.0))
    assert show.console.file.getvalue() == f"{COMPILING}\n"


def test_a_terminal_shows_the_compilation_until_it_ends() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    with ProgressDisplay(console) as show:
        show.on_fit_start({"rows": 10})

        def shown() -> str:
            with console.capture() as capture:
                console.print(show._render())
            return capture.get()

        assert COMPILING not in shown()
        show.on_event(kernel_event("a", None, worker="tcp://a"))
        show.on_event(kernel_event("a", None, worker="tcp://b"))
        show.on_event(kernel_event("a", 1.0, worker="tcp://a"))
        assert COMPILING in shown()
        show.on_event(kernel_event("a", 1.0, worker="tcp://b"))
        assert COMPILING not in shown()


def test_a_worker_reports_compilation_to_every_driver(monkeypatch) -> None:
    reported: list[tuple[str, dict[str, Any]]] = []
    worker = SimpleNamespace(
        address="tcp://w:1", log_event=lambda topic, message: reported.append((topic, message))
    )
    monkeypatch.setattr(worker_side, "current_worker", lambda: worker)
    monkeypatch.setattr(compile_observers, "_observers", [])
    worker_side.report_kernels()
    make_fresh_kernel()(1)
    assert [topic for topic, _ in reported] == [KERNELS] * 2
    assert reported[0][1]["worker"] == "tcp://w:1"
    assert [message["event"] for _, message in reported] == ["compiling_kernels", "kernel_compiled"]
