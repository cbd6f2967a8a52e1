"""Hooks are functions that use private names of Dask; a name that Dask lacks gives a warning, no error."""

from __future__ import annotations

import ast
import logging
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scalelatent.engine.dask import hooks
from tests.helpers import wait_for

pytestmark = pytest.mark.cluster


@pytest.fixture(autouse=True)
def _forget_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "_logged_features", set())
    monkeypatch.setattr(hooks, "_tested", set())


@pytest.fixture
def warnings_of_hooks(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    logger = logging.getLogger("distributed.scalelatent")
    logger.addHandler(caplog.handler)  # Dask's loggers do not propagate messages.
    caplog.set_level(logging.WARNING)

    def lines() -> list[str]:
        return sorted({r.message for r in caplog.records if r.name == "distributed.scalelatent"})

    yield lines
    logger.removeHandler(caplog.handler)


def call_on_scheduler(watched: SimpleNamespace, function: Callable[[Any], Any]) -> Any:
    async def call() -> Any:
        return function(watched.scheduler)

    return watched.client.sync(call)


# -- hooks of the installed Dask -----------------------------------------------------------------------------


def test_routes_have_the_prefix_of_the_dashboard(watched: SimpleNamespace, get: Any) -> None:
    from tornado.web import RequestHandler

    class Hello(RequestHandler):
        def get(self) -> None:
            self.write("hello")

    scheduler = watched.scheduler
    assert hooks.route_prefix(scheduler) == "/"
    del scheduler.http_application._scalelatent_routes
    assert call_on_scheduler(watched, lambda s: hooks.add_routes(s, [("/hello", Hello, {})])) is True
    assert get(f"{watched.base}/hello") == (200, "hello")
    rules = len(scheduler.http_application.default_router.rules)
    # Existing routes are not added twice.
    assert hooks.add_routes(scheduler, [("/hello", Hello, {})]) is True
    assert len(scheduler.http_application.default_router.rules) == rules


def test_pages_have_the_frame_of_the_dashboard(watched: SimpleNamespace, warnings_of_hooks: Any) -> None:
    assert hooks.add_page(watched.scheduler, "scalelatent") is True
    folder, variables = hooks.page_frame(watched.scheduler)
    assert (folder / "base.html").exists()
    assert variables["pages"].count("scalelatent") == 1
    assert {"url", "name"} <= set(variables["plots"][0])
    assert warnings_of_hooks() == []


def test_past_events_are_returned(watched: SimpleNamespace) -> None:
    watched.client.log_event("scalelatent-test", {"a": 1})
    ((when, message),) = hooks.past_events(watched.scheduler, "scalelatent-test")
    assert message == {"a": 1}
    assert when > 1e9
    assert hooks.past_events(watched.scheduler, "nothing on this topic") == ()


def test_events_are_posted_in_order_without_waiting(watched: SimpleNamespace) -> None:
    sent = hooks.post_event(watched.client, "scalelatent-order", [{"n": n} for n in range(20)])
    sent.result(timeout=10)
    assert [m["n"] for _, m in hooks.past_events(watched.scheduler, "scalelatent-order")] == list(range(20))


def test_facts_of_workers_are_read(watched: SimpleNamespace, warnings_of_hooks: Any) -> None:
    (facts,) = hooks.worker_facts(watched.scheduler).values()
    assert facts["threads"] == 1
    assert facts["memory"] > 1e6
    assert facts["memory_limit"] is None  # The cluster was started without a limit.
    assert facts["gpus"] == 0
    assert facts["host"] == "127.0.0.1"
    assert warnings_of_hooks() == []


def test_suspicion_of_a_task_is_reset(watched: SimpleNamespace) -> None:
    future = watched.client.submit(int, 3, key="scalelatent-job-reset_suspicion", pure=False)
    future.result(timeout=30)
    task = watched.scheduler.tasks["scalelatent-job-reset_suspicion"]
    task.suspicious = 3
    assert hooks.reset_suspicion(watched.scheduler, "scalelatent-job-reset_suspicion") is True
    assert task.suspicious < 0
    assert hooks.reset_suspicion(watched.scheduler, "no such task") is False


def test_running_spans_are_listed_and_bound(watched: SimpleNamespace, warnings_of_hooks: Any) -> None:
    import dask

    (worker,) = hooks.loads(watched.scheduler)
    with dask.annotate(scalelatent=("fit/train", 0, 40), workers=[worker], allow_other_workers=True):
        span = watched.client.submit(time.sleep, 1.0, key="span", pure=False)
    other = watched.client.submit(time.sleep, 1.0, key="other", pure=False)
    wait_for(lambda: hooks.task_state(watched.scheduler, "other") == "processing")
    assert hooks.running_spans(watched.scheduler) == [("span", worker, ("fit/train", 0, 40))]
    assert hooks.running_spans(watched.scheduler, ["span", "other", "no such task"])[0].key == "span"
    assert hooks.loads(watched.scheduler)[worker] > 0
    hooks.isolate_suspects(watched.scheduler, ["span"])
    assert watched.scheduler.tasks["span"].suspicious == watched.scheduler.allowed_failures
    assert hooks.bind(watched.scheduler, ["span", "other"], "tcp://b:1") == ["span"]
    assert watched.scheduler.tasks["span"].worker_restrictions == {"tcp://b:1"}
    assert hooks.bind(watched.scheduler, ["span"], None) == ["span"]
    assert watched.scheduler.tasks["span"].loose_restrictions is True
    watched.client.cancel([span, other])
    assert warnings_of_hooks() == []


def test_running_tasks_of_a_worker_are_counted(watched: SimpleNamespace, warnings_of_hooks: Any) -> None:
    from scalelatent.engine.dask.trial import count_running_tasks

    def busy(dask_worker: Any = None) -> int:
        return count_running_tasks("busy", dask_worker)

    future = watched.client.submit(time.sleep, 1.0, key="a-busy-task", pure=False)
    deadline = time.monotonic() + 10
    while not any(watched.client.run(busy).values()):
        assert time.monotonic() < deadline
    future.result(timeout=30)
    assert not any(watched.client.run(busy).values())
    assert warnings_of_hooks() == []


def test_a_held_task_survives_its_client(watched: SimpleNamespace) -> None:
    from distributed import Client

    key = "kept-task"
    with Client(watched.scheduler.address, timeout=30, set_as_default=False) as other:
        future = other.submit(int, 7, key=key, pure=False)
        future.result(timeout=30)
        assert call_on_scheduler(watched, lambda s: hooks.hold_task(s, key)) is True
        assert call_on_scheduler(watched, lambda s: hooks.hold_task(s, "no such task")) is False
    assert key in watched.scheduler.tasks
    call_on_scheduler(watched, lambda s: s.client_releases_keys([key], "fire-and-forget"))


def test_tasks_with_a_name_are_not_stolen(watched: SimpleNamespace) -> None:
    from distributed import stealing

    def ratio(scheduler: Any) -> Any:
        task = SimpleNamespace(prefix=SimpleNamespace(name="toy_estep_pool"), dependencies=set())
        return scheduler.extensions["stealing"].steal_time_ratio(task)

    try:
        assert call_on_scheduler(watched, ratio) == (0, 0)
        assert call_on_scheduler(watched, lambda s: hooks.disable_stealing(s, "toy_estep_pool")) is True
        assert call_on_scheduler(watched, ratio) == (None, None)
    finally:
        stealing.fast_tasks.discard("toy_estep_pool")


def test_the_event_of_a_removed_worker_is_read(warnings_of_hooks: Any) -> None:
    """The test makes the event itself; test_plugin.py tests that a scheduler sends this event."""
    event = {"action": "remove-worker", "worker": "tcp://a:1", "processing-tasks": {"k2", "k1", ("t", 0)},
             "expected": False, "stimulus_id": "s"}  # fmt: skip
    lost = hooks.lost_worker("all", event)
    assert (lost.worker, lost.keys, lost.expected) == ("tcp://a:1", ["('t', 0)", "k1", "k2"], False)
    assert hooks.lost_worker("all", {"action": "add-worker", "worker": "tcp://a:1"}) is None
    assert hooks.lost_worker("tcp://a:1", event) is None
    assert warnings_of_hooks() == []


# -- hooks whose names are missing in Dask -------------------------------------------------------------------

NOTHING = SimpleNamespace()
CHANGED = {
    "route_prefix": (lambda: hooks.route_prefix(NOTHING), "/"),
    "add_routes": (lambda: hooks.add_routes(NOTHING, [("/a", object, {})]), False),
    "add_page": (lambda: hooks.add_page(NOTHING, "a"), False),
    "page_frame": (lambda: hooks.page_frame(NOTHING), (None, {})),
    "past_events": (lambda: hooks.past_events(NOTHING, "a"), ()),
    "lost_worker": (lambda: hooks.lost_worker("all", {"action": "remove-worker", "worker": "w"}), None),
    "post_event": (lambda: hooks.post_event(NOTHING, "a", [{}]), False),
    "worker_facts": (lambda: hooks.worker_facts(NOTHING), {}),
    "hold_task": (lambda: hooks.hold_task(NOTHING, "k"), False),
    "reset_suspicion": (lambda: hooks.reset_suspicion(NOTHING, "k"), False),
    "running_spans": (lambda: hooks.running_spans(NOTHING), []),
    "loads": (lambda: hooks.loads(NOTHING), {}),
    "isolate_suspects": (lambda: hooks.isolate_suspects(NOTHING, ["k"]), None),
    "bind": (lambda: hooks.bind(NOTHING, ["k"], "a"), []),
    "running_tasks": (lambda: hooks.running_tasks(NOTHING), []),
    "is_task_needed": (lambda: hooks.is_task_needed(NOTHING, "k"), True),
    "topic_handler": (lambda: hooks.topic_handler(NOTHING, "a"), None),
    "disable_stealing": (lambda: hooks.disable_stealing(NOTHING, "k"), False),
    "offers_gpu": (lambda: hooks.offers_gpu(NOTHING), False),
    "call_later": (lambda: hooks.call_later(NOTHING, 0.0, print), None),
    "idle_seconds": (lambda: hooks.idle_seconds(NOTHING), 0.0),
    "task_state": (lambda: hooks.task_state(NOTHING, "k"), None),
}


@pytest.mark.parametrize("name", CHANGED)
def test_missing_hook_warns_once_and_is_skipped(name: str, warnings_of_hooks: Any) -> None:
    call, instead = CHANGED[name]
    assert call() == instead
    (line,) = warnings_of_hooks()
    assert line.startswith("scalelatent: this Dask (distributed 2")
    assert f"lacks what {name} needs" in line
    assert "continuing without" in line
    assert call() == instead
    assert warnings_of_hooks() == [line]


def test_missing_attributes_of_dask_classes_are_found_before_first_use(
    monkeypatch: pytest.MonkeyPatch, warnings_of_hooks: Any
) -> None:
    from distributed.scheduler import TaskState

    tasks = SimpleNamespace(tasks={"k": SimpleNamespace(suspicious=3)})
    with monkeypatch.context() as patch:
        patch.delattr(TaskState, "suspicious")
        assert hooks.reset_suspicion(tasks, "k") is False
    assert tasks.tasks["k"].suspicious == 3
    (line,) = warnings_of_hooks()
    assert "lacks what reset_suspicion needs (AttributeError" in line


def test_own_errors_are_raised_and_not_mistaken_for_a_changed_dask(warnings_of_hooks: Any) -> None:
    broken = SimpleNamespace(running=[SimpleNamespace(address="a", processing=None, nthreads=1)])
    with pytest.raises(TypeError):
        hooks.loads(broken)
    with pytest.raises(ValueError, match="not enough"):
        hooks.past_events(SimpleNamespace(get_events=lambda topic: [(1.0,)]), "topic")
    assert warnings_of_hooks() == []


def test_released_tasks_are_skipped(warnings_of_hooks: Any) -> None:
    scheduler = SimpleNamespace(tasks={}, allowed_failures=3)
    assert hooks.bind(scheduler, ["gone"], "tcp://b:1") == []
    hooks.isolate_suspects(scheduler, ["gone"])
    assert warnings_of_hooks() == []


def test_all_hooks_are_tested_here() -> None:
    functions = {name: value for name, value in vars(hooks).items() if not name.startswith("_")}
    guarded = {name for name, value in functions.items() if hasattr(value, "__wrapped__")}
    assert guarded <= set(CHANGED)


def test_plugin_works_without_any_hook(monkeypatch: pytest.MonkeyPatch, warnings_of_hooks: Any) -> None:
    import asyncio

    from scalelatent.monitor.plugin import ScalelatentPlugin

    plugin = ScalelatentPlugin()
    asyncio.run(plugin.start(SimpleNamespace(workers={}, plugins={}, tasks={})))
    plugin.log_event("scalelatent", {"kind": "pass", "run": "r", "pass": 1, "objective": 0.5})
    plugin.log_event("all", {"action": "remove-worker"})
    plugin.remove_worker(SimpleNamespace(tasks={"scalelatent-job-1": NOTHING}), "tcp://a:1")
    assert plugin.board.jobs["r"].record["objective"] == 0.5
    assert len(warnings_of_hooks()) >= 3
    asyncio.run(plugin.close())


# Names in the documentation of Dask, by object: a client, the worker of a task, the scheduler of a plugin.
DOCUMENTED = {
    "client": "address asynchronous cancel close compute current dashboard_link get get_events get_metadata"
    " get_versions log_event nthreads processing register_plugin run run_on_scheduler scheduler_info"
    " set_metadata submit subscribe_topic unsubscribe_topic wait_for_workers",
    "worker": "address get_current_task log_event name",
    "scheduler": "address log_event plugins tasks workers",
}
# These names are not documented, but every version has them: the state of a client, and `sync`, which waits
# for a coroutine.
STEADY = {"client": "scheduler status sync", "worker": "", "scheduler": ""}
# This one private name is used outside of hooks.py, because the cache may not import code that imports Dask.
ELSEWHERE = {("engine/cache.py", "worker", "memory_manager")}
# These names are not checked, because other objects named client, worker or scheduler have them, too.
PLAIN = "connect get items partition settimeout"


def _owner(node: ast.expr) -> str | None:
    """Return "client", "worker" or "scheduler" if an expression names such an object, else None.

    Examples are ``self._client``, ``dask_worker`` and ``get_worker()``.
    """
    if isinstance(node, ast.Call):
        node = node.func
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    name = name.removeprefix("get_").removeprefix("_").removeprefix("dask_")
    return name if name in DOCUMENTED else None


def test_no_other_module_uses_private_names_of_dask() -> None:
    package, found = Path(hooks.__file__).parents[2], set()
    for file in package.rglob("*.py"):
        path = file.relative_to(package).as_posix()
        # The file hooks.py may use private names of Dask. In board.py, a worker is a row of the board.
        if path in ("engine/dask/hooks.py", "monitor/board.py") or "distributed" not in file.read_text():
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            owner = _owner(node.value) if isinstance(node, ast.Attribute) else None
            if owner and node.attr not in f"{DOCUMENTED[owner]} {STEADY[owner]} {PLAIN}".split():
                found.add((path, owner, node.attr))
    assert found == ELSEWHERE
