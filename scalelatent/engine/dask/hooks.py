"""Functions that use private parts of Dask; no other module uses private parts.

If a version of Dask lacks such a part, the function returns a default, and the fit runs without one feature
(`test_hooks.py`).
"""

from __future__ import annotations

import asyncio
import copy
import functools
import importlib
import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future

    from distributed import Client, Scheduler, SchedulerPlugin, Security, Worker
    from distributed.scheduler import TaskState

logger = logging.getLogger("distributed.scalelatent")
_logged_features: set[str] = set()
_tested: set[str] = set()
_F = TypeVar("_F", bound=Callable[..., Any])
_TASK, _WORKER = "distributed.scheduler:TaskState", "distributed.scheduler:WorkerState"


def _guarded(without: str, default: Callable[[], object], *needs: str) -> Callable[[_F], _F]:
    """Return a decorator: if Dask lacks an attribute of ``needs``, the function returns ``default()``.

    ``without`` is the name, for the log, of the feature that a fit then lacks.
    """

    def wrap(function: _F) -> _F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if function.__name__ not in _tested:
                try:
                    # Dask passes the scheduler or worker as a keyword argument.
                    owner = next(iter([*args, *kwargs.values()]), None)
                    for need in needs:
                        _find(need, owner)
                except (AttributeError, ImportError) as error:
                    log_once(function.__name__, without, error)
                    return default()
                _tested.add(function.__name__)
            return function(*args, **kwargs)

        call.needs = needs  # type: ignore[attr-defined]
        return call  # type: ignore[return-value]

    return wrap


def _find(need: str, owner: object) -> None:
    """Raise an error if an attribute is missing: ``need`` of ``owner``, or "module:path" of a module."""
    module, _, path = need.rpartition(":")
    found = importlib.import_module(module) if module else owner
    for name in path.split("."):
        found = getattr(found, name)


def log_once(name: str, without: str, error: Exception) -> None:
    """Log, once per process, that this version of Dask does not allow the feature ``without``."""
    if name in _logged_features:
        return
    _logged_features.add(name)
    logger.warning(
        "scalelatent: this Dask (distributed %s) lacks what %s needs (%s: %s); continuing without %s",
        version("distributed"),
        name,
        type(error).__name__,
        error,
        without,
    )


# -- the scheduler's web server ------------------------------------------------------------------------------


@_guarded("a prefix of the dashboard's addresses", lambda: "/", "http_application.wildcard_router.rules")
def route_prefix(scheduler: Scheduler) -> str:
    """Return the path prefix of the dashboard: ``"/"``, or ``"/name/"`` with ``--dashboard-prefix``."""
    # The scheduler does not store the prefix; the route of its health check, which always exists, shows it.
    for rule in scheduler.http_application.wildcard_router.rules:
        pattern = getattr(getattr(rule.matcher, "regex", None), "pattern", "").lstrip("^").rstrip("$")
        if pattern.endswith("/health"):
            return str(pattern[: -len("health")])
    log_once("route_prefix", "a prefix of the dashboard's addresses", LookupError("no route /health"))
    return "/"


@_guarded("the page /scalelatent and /scalelatent.json", lambda: False, "http_application.add_handlers")
def add_routes(scheduler: Any, routes: Sequence[tuple[str, type, dict[str, Any]]]) -> bool:
    """Add pages to the scheduler's web server, unless they were added before; return True."""
    application = scheduler.http_application
    if not getattr(application, "_scalelatent_routes", False):
        prefix = route_prefix(scheduler)
        application.add_handlers(".*", [(prefix + path.lstrip("/"), *rest) for path, *rest in routes])
        application._scalelatent_routes = True
    return True


@_guarded("an entry in the dashboard's navigation bar", lambda: False, "http_application")
def add_page(scheduler: Scheduler, page: str) -> bool:
    """Add a page to the dashboard's navigation bar; return False if there is no dashboard (no bokeh)."""
    pages = _page_variables(scheduler).get("pages")
    if pages is None:
        return False
    if page not in pages:
        pages.append(page)
    return True


def _page_variables(scheduler: Any) -> dict[str, Any]:
    """Return the variables of the dashboard's templates; empty without bokeh or if Dask has moved them."""
    try:
        import bokeh  # noqa: F401
    except ImportError:
        return {}
    try:
        from distributed.dashboard.scheduler import template_variables
    except ImportError as error:
        log_once("template_variables", "an entry in the dashboard's navigation bar", error)
        return {}
    return dict(template_variables(scheduler))


@_guarded(
    "the dashboard's frame around the page",
    lambda: (None, {}),
    "http_application",
    "distributed.http:__file__",
)
def page_frame(scheduler: Any) -> tuple[Path | None, dict[str, Any]]:
    """Return the folder of the dashboard's jinja2 templates (``base.html``) and their variables."""
    import distributed.http

    variables = _page_variables(scheduler)
    if not variables:
        return None, {}
    folder = Path(distributed.http.__file__).parent / "templates"
    text = (folder / "base.html").read_text(encoding="utf-8") if (folder / "base.html").exists() else ""
    if "{% block content %}" not in text:
        error = LookupError("no base.html with a block of its content")
        log_once("page_frame", "the dashboard's frame around the page", error)
        return None, {}
    return folder, variables


# -- events --------------------------------------------------------------------------------------------------


@_guarded("events from the time before the plugin was registered", tuple, "get_events")
def past_events(scheduler: Scheduler, topic: str) -> tuple[tuple[float, Any], ...]:
    """Return (seconds since the epoch, message) of each event of a topic that the scheduler still stores."""
    return tuple((float(when), message) for when, message in scheduler.get_events(topic))


class LostWorker(NamedTuple):
    """A worker that the scheduler removed: address, keys of its tasks, and True if the stop was planned."""

    worker: str
    keys: list[str]
    expected: bool


def lost_worker(topic: str, message: object) -> LostWorker | None:
    """Parse the scheduler's event of a removed worker (topic ``"all"``); return None for any other event."""
    # Only this event lists the tasks of the worker. When Dask calls `remove_worker` of a plugin, the tasks
    # are assigned to other workers already.
    if topic != "all" or not isinstance(message, Mapping) or message.get("action") != "remove-worker":
        return None
    if not {"worker", "processing-tasks"} <= message.keys():
        error = LookupError(f"the event has {', '.join(map(str, message))}")
        log_once("lost_worker", "a list of the tasks that a lost worker had", error)
        return None
    keys = sorted(map(str, message["processing-tasks"]))
    return LostWorker(str(message["worker"]), keys, bool(message.get("expected", False)))


@_guarded("messages to the dashboard page", lambda: False, "status", "loop", "scheduler")
def post_event(
    client: Any, topic: str, messages: Sequence[dict[str, Any]], pause: float = 0.0
) -> Future[None] | Literal[False]:
    """Log events on the scheduler without waiting for its answer; return False if not connected."""
    # `Client.log_event` waits for an answer, so a driver would block while the scheduler is unreachable.
    if client.scheduler is None or client.loop is None or client.status not in ("running", "connecting"):
        return False
    log_event = client.scheduler.log_event

    async def send() -> None:
        for message in messages:
            await log_event(topic=topic, msg=message)
        await asyncio.sleep(pause)

    return asyncio.run_coroutine_threadsafe(send(), client.loop.asyncio_loop)


# -- workers and tasks ---------------------------------------------------------------------------------------


_FACTS = ("name", "nthreads", "memory", "memory_limit", "resources", "host")


@_guarded(
    "memory and threads of workers on the page", dict, "workers", *(f"{_WORKER}.{name}" for name in _FACTS)
)
def worker_facts(scheduler: Scheduler) -> dict[str, dict[str, Any]]:
    """Return name, threads, memory and memory limit (bytes), GPUs and host of each worker, by address."""
    return {
        address: {
            "name": str(state.name),
            "threads": int(state.nthreads),
            "memory": int(state.memory.process),
            "memory_limit": int(state.memory_limit) or None,
            "gpus": state.resources.get("GPU", 0),
            "host": str(state.host),
        }
        for address, state in scheduler.workers.items()
    }


@_guarded("drivers that outlive any number of workers", lambda: False, "tasks", f"{_TASK}.suspicious")
def reset_suspicion(scheduler: Scheduler, key: Any) -> bool:
    """Set the number of workers that died with a task to 0, so that the scheduler runs the task again."""
    # The scheduler fails a task (KilledWorker) after `distributed.scheduler.allowed-failures` workers died
    # while they ran the task. A driver is a task that runs as long as its job, and does not cause deaths.
    task = scheduler.tasks.get(key)
    if task is None:
        return False
    # -1 instead of 0, because with allowed-failures = 0 the next dead worker would fail the task.
    task.suspicious = -1
    return True


class RunningSpan(NamedTuple):
    """Task of a span (range of rows) on a worker; ``reads`` gives the rows of the shards that it reads."""

    key: str
    worker: str
    reads: tuple[str, int, int]


# Feature that a fit lacks, in the log, if Dask lacks an attribute that the functions below need.
_DEATH_LIMIT = "a limit of three on the workers that die while they read the same rows"


@_guarded(
    _DEATH_LIMIT, list, "workers", "tasks", f"{_TASK}.annotations", f"{_TASK}.processing_on",
    f"{_TASK}.state", f"{_WORKER}.processing", f"{_WORKER}.address",
)  # fmt: skip
def running_spans(scheduler: Scheduler, keys: Iterable[str] | None = None) -> list[RunningSpan]:
    """Return the tasks of spans (ranges of rows) on all workers, or only the tasks ``keys``."""
    if keys is None:
        tasks = [task for worker in scheduler.workers.values() for task in worker.processing]
    else:
        known = (scheduler.tasks.get(key) for key in keys)
        tasks = [task for task in known if task is not None and task.state == "processing"]
    notes = [(task, task.processing_on, (task.annotations or {}).get("scalelatent")) for task in tasks]
    return [
        RunningSpan(str(task.key), str(worker.address), (str(note[0]), int(note[1]), int(note[2])))
        for task, worker, note in notes
        if worker is not None and note is not None
    ]


@_guarded(_DEATH_LIMIT, lambda: None, "tasks", "allowed_failures", f"{_TASK}.suspicious")
def isolate_suspects(scheduler: Scheduler, keys: Iterable[str]) -> None:
    """Let the scheduler fail these tasks if their worker dies, whatever `allowed-failures` is."""
    for task in _known(scheduler, keys):
        task.suspicious = max(task.suspicious, int(scheduler.allowed_failures))


def _known(scheduler: Scheduler, keys: Iterable[str]) -> list[TaskState]:
    """Return the tasks of these keys, without the tasks that were released in the meantime."""
    return [task for key in keys if (task := scheduler.tasks.get(key)) is not None]


@_guarded(_DEATH_LIMIT, dict, "running", f"{_WORKER}.address", f"{_WORKER}.processing", f"{_WORKER}.nthreads")
def loads(scheduler: Scheduler) -> dict[str, float]:
    """Return the number of tasks per thread of each running worker, by address."""
    return {str(worker.address): len(worker.processing) / worker.nthreads for worker in scheduler.running}


@_guarded(_DEATH_LIMIT, list, "tasks", f"{_TASK}.loose_restrictions", f"{_TASK}.worker_restrictions")
def bind(scheduler: Scheduler, keys: Iterable[str], worker: str | None) -> list[str]:
    """Let only ``worker`` run these tasks; None: let all workers run them. Return keys of changed tasks."""
    found = [t for t in _known(scheduler, keys) if t.loose_restrictions == (worker is not None)]
    for task in found:
        task.loose_restrictions = worker is None
        if worker is not None:
            task.worker_restrictions = {worker}
    return [str(task.key) for task in found]


@_guarded("waiting for cancelled tasks", list, "active_keys")
def running_tasks(worker: Worker) -> list[str]:
    """Return the keys of the tasks that a worker runs, including cancelled tasks."""
    return [str(key) for key in worker.active_keys]


@_guarded(
    "exclusion of tasks from work stealing",
    lambda: False,
    "extensions",
    "distributed.stealing:fast_tasks",
)
def disable_stealing(scheduler: Scheduler, name: str) -> bool:
    """Exclude tasks with this name prefix (`distributed.utils.key_split`) from Dask's work stealing."""
    # Work stealing assumes one duration for all tasks with the same prefix. It would move a task to an idle
    # slow worker although a fast worker would finish the task sooner.
    from distributed import stealing

    if "stealing" in scheduler.extensions:
        stealing.fast_tasks.add(name)
    return True


@_guarded("jobs that outlive the client that submits them", lambda: False, "tasks", "client_desires_keys")
def hold_task(scheduler: Scheduler, key: Any) -> bool:
    """Keep a task running when its client disconnects, as `distributed.fire_and_forget` does."""
    # The message that a client wants a result can reach the scheduler before the task itself. The scheduler
    # ignores the message then, and it forgets the task when the client disconnects.
    if key not in scheduler.tasks:
        return False
    scheduler.client_desires_keys([key], "fire-and-forget")
    return True


@_guarded("reports of drivers that wait for a worker", lambda: None, "tasks", f"{_TASK}.state")
def task_state(scheduler: Scheduler, key: str) -> str | None:
    """Return the scheduler's state of a task, such as ``"processing"``; None if the task is unknown."""
    task = scheduler.tasks.get(key)
    return None if task is None else str(task.state)


@_guarded("clusters that end when no job is left", lambda: 0.0, "check_idle")
def idle_seconds(scheduler: Scheduler) -> float:
    """Return the seconds since the scheduler's idle check found no more tasks; 0 if there are tasks."""
    since = scheduler.check_idle()
    return time.time() - since if since else 0.0


@_guarded("cancellation of running tasks", lambda: True, "state.tasks")
def is_task_needed(worker: Worker, key: Any) -> bool:
    """Return True if the scheduler still needs a task that runs on this worker."""
    task = worker.state.tasks.get(key)
    return task is not None and task.state != "cancelled"


@_guarded("the user's own handlers of Dask events", lambda: None, "_event_handlers")
def topic_handler(client: Client, topic: str) -> Callable[[tuple[float, Any]], object] | None:
    """Return the handler of a client for events of a topic; None if the client is not subscribed."""
    return client._event_handlers.get(topic)


@_guarded("GPUs of workers", lambda: False, "state.total_resources", "nanny")
def offers_gpu(dask_worker: Worker) -> bool:
    """Return True if a worker offers the resource ``GPU``, or if dask-cuda has started the worker."""
    # dask-cuda loads this module in each worker process that it starts, and gives the process one GPU.
    of_dask_cuda = dask_worker.nanny is not None and "dask_cuda.initialize" in sys.modules
    return of_dask_cuda or bool(dask_worker.state.total_resources.get("GPU"))


@_guarded("reports of finished tasks", lambda: None, "loop.add_callback", "loop.call_later")
def call_later(worker: Worker, seconds: float, function: Callable[..., object], *args: object) -> None:
    """Call a function in a worker's event loop, from any of its threads."""
    worker.loop.add_callback(worker.loop.call_later, seconds, function, *args)


# -- settings of a cluster: these functions have no default if Dask has changed ------------------------------


def worker_settings(worker: Worker) -> dict[str, Any]:
    """Return name, threads, memory limit (bytes), nanny, GPU and folder of a worker."""
    return {
        "name": str(worker.name),
        "threads": worker.state.nthreads,
        "memory_limit": worker.memory_manager.memory_limit,
        "nanny": worker.nanny is not None,
        "offers_gpu": offers_gpu(worker),
        "local_directory": worker.local_directory,
    }


def scheduler_settings(scheduler: Scheduler) -> dict[str, Any]:
    """Return whether a scheduler has a dashboard, and whether the dashboard has the page /scalelatent."""
    return {
        "dashboard": "dashboard" in scheduler.services,
        "page": any("scalelatent" in str(name) for name in scheduler.plugins),
    }


def page_address(scheduler: Any) -> tuple[str, int]:
    """Return the host and the port on which the dashboard listens."""
    return str(scheduler.http_server.address), int(scheduler.http_server.port)


def scheduler_of(worker: Worker) -> tuple[str, Security]:
    """Return the address of a worker's scheduler and the security settings that a client of it needs."""
    security: Any = worker.security
    if security.tls_worker_cert is not None and security.tls_client_cert is None:
        # A worker of Dask Gateway has only its own certificate, so its clients must use this certificate too.
        security = copy.copy(security)
        security.tls_client_cert, security.tls_client_key = security.tls_worker_cert, security.tls_worker_key
    return str(worker.scheduler.address), security


async def add_plugin(scheduler: Scheduler, plugin: SchedulerPlugin, name: str) -> None:
    """Register a plugin on a scheduler, unless it is registered already."""
    await scheduler.register_scheduler_plugin(plugin, name=name, idempotent=True)
