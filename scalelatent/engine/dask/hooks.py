"""The semi-private parts of Dask that scalelatent uses, all of them, each behind a guard.

They are no documented interface. Where a version of Dask lacks one, it is said once in the log and the
program goes on without what hangs on it; ``tests/monitor/test_hooks.py`` tells when that happens. Nothing
else in scalelatent reaches into a scheduler, a worker or a client beyond their documentation.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

__all__ = [
    "LostWorker",
    "add_page",
    "add_routes",
    "bind",
    "forgive",
    "keep_still",
    "keep_task",
    "last_chance",
    "loads",
    "lost_worker",
    "page_frame",
    "past_events",
    "post_event",
    "route_prefix",
    "running_tasks",
    "say_once",
    "spans_at",
    "task_state",
    "task_wanted",
    "topic_handler",
    "worker_facts",
]

logger = logging.getLogger("distributed.scalelatent")
_said: set[str] = set()
_F = TypeVar("_F", bound=Callable[..., Any])
_MISSING = (AttributeError, ImportError, KeyError, IndexError, TypeError, ValueError)


def _guarded(without: str, default: Callable[[], Any]) -> Callable[[_F], _F]:
    """Answer ``default()`` where Dask has changed, and say once what the program then goes without."""

    def wrap(function: _F) -> _F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except _MISSING as error:
                say_once(function.__name__, without, error)
                return default()

        return call  # type: ignore[return-value]

    return wrap


def say_once(name: str, without: str, error: Exception) -> None:
    """Say, once a process, what the program goes without."""
    if name in _said:
        return
    _said.add(name)
    logger.warning(
        "scalelatent: this Dask (distributed %s) lacks what %s needs (%s: %s); going on without %s",
        version("distributed"),
        name,
        type(error).__name__,
        error,
        without,
    )


# -- the scheduler's web server ------------------------------------------------------------------------------


@_guarded("a prefix of the dashboard's addresses", lambda: "/")
def route_prefix(scheduler: Any) -> str:
    """What the dashboard's addresses begin with: ``"/"``, or ``"/name/"`` (``--dashboard-prefix``).

    The scheduler does not keep it; the route of its health check, which every version has, tells.
    """
    for rule in scheduler.http_application.wildcard_router.rules:
        pattern = rule.matcher.regex.pattern.lstrip("^").rstrip("$")
        if pattern.endswith("/health"):
            return str(pattern[: -len("health")])
    raise KeyError("no route /health")


@_guarded("the page /scalelatent and /scalelatent.json", lambda: False)
def add_routes(scheduler: Any, routes: Sequence[tuple[str, type, dict[str, Any]]]) -> bool:
    """Add routes to the scheduler's web server, once.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    routes : list of (path, tornado handler, arguments of its ``initialize``)
        Paths without the dashboard's prefix.

    Returns
    -------
    bool
        Whether they are there; False where Dask has no such thing.
    """
    application = scheduler.http_application
    if not getattr(application, "_scalelatent_routes", False):
        prefix = route_prefix(scheduler)
        application.add_handlers(".*", [(prefix + path.lstrip("/"), *rest) for path, *rest in routes])
        application._scalelatent_routes = True
    return True


@_guarded("an entry in the dashboard's navigation bar", lambda: False)
def add_page(scheduler: Any, page: str) -> bool:
    """Add a page to the dashboard's navigation bar; False where there is no dashboard (no bokeh)."""
    try:
        import bokeh  # noqa: F401
    except ImportError:
        return False
    from distributed.dashboard.scheduler import template_variables

    pages = template_variables(scheduler)["pages"]
    if page not in pages:
        pages.append(page)
    return True


@_guarded("the dashboard's frame around the page", lambda: (None, {}))
def page_frame(scheduler: Any) -> tuple[Path | None, dict[str, Any]]:
    """Folder of the dashboard's jinja2 templates (``base.html``), and what they show beside a page.

    Without bokeh there is no navigation bar, and the folder is None.
    """
    try:
        import bokeh  # noqa: F401
    except ImportError:
        return None, {}
    import distributed.http
    from distributed.dashboard.scheduler import template_variables

    folder = Path(distributed.http.__file__).parent / "templates"
    text = (folder / "base.html").read_text(encoding="utf-8") if (folder / "base.html").exists() else ""
    if "{% block content %}" not in text:
        raise KeyError("no base.html with a block of its content")
    return folder, dict(template_variables(scheduler))


# -- events --------------------------------------------------------------------------------------------------


@_guarded("events of before the plugin was there", tuple)
def past_events(scheduler: Any, topic: str) -> tuple[tuple[float, Any], ...]:
    """(seconds since the epoch, message) of a topic, as far as the scheduler has kept them."""
    return tuple((float(when), message) for when, message in scheduler.get_events(topic))


class LostWorker:
    """What the scheduler tells when it removes a worker.

    Attributes
    ----------
    worker : str
        Address.
    keys : list of str
        Tasks that were being processed on it.
    expected : bool
        It was asked to go, or said that it goes.
    """

    __slots__ = ("expected", "keys", "worker")

    def __init__(self, worker: str, keys: Iterable[Any], expected: bool) -> None:
        self.worker, self.expected = worker, expected
        self.keys = sorted(str(key) for key in keys)


@_guarded("knowing which tasks a lost worker had", lambda: None)
def lost_worker(topic: str, message: Any) -> LostWorker | None:
    """Read the scheduler's event of a removed worker (topic ``"all"``); None for any other event.

    Only this event tells the tasks: when plugins hear of it by ``remove_worker``, they are elsewhere already.
    """
    if topic != "all" or not isinstance(message, Mapping) or message.get("action") != "remove-worker":
        return None
    return LostWorker(
        str(message["worker"]), list(message["processing-tasks"]), bool(message.get("expected", False))
    )


@_guarded("messages to the dashboard page", lambda: False)
def post_event(client: Any, topic: str, messages: Sequence[dict[str, Any]], pause: float = 0.0) -> Any:
    """Log events without waiting for the scheduler.

    ``Client.log_event`` waits for an answer: a driver would stand still while a scheduler is away.

    Parameters
    ----------
    client : distributed.Client
    topic : str
    messages : list of dict
        Sent in order.
    pause : float
        Seconds after the last one, before they count as sent: whoever waits for that sends no more often.

    Returns
    -------
    concurrent.futures.Future or False
        Done when all are sent; False where it cannot be done.
    """
    log_event = client.scheduler.log_event

    async def send() -> None:
        for message in messages:
            await log_event(topic=topic, msg=message)
        await asyncio.sleep(pause)

    if client.loop is None or client.status not in ("running", "connecting"):
        return False
    return asyncio.run_coroutine_threadsafe(send(), client.loop.asyncio_loop)


# -- workers and tasks ---------------------------------------------------------------------------------------


@_guarded("memory and threads of workers on the page", dict)
def worker_facts(scheduler: Any) -> dict[str, dict[str, Any]]:
    """Address of each worker -> name, threads, memory and its limit (bytes), GPUs offered, host."""
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


@_guarded("drivers that outlive any number of workers", lambda: False)
def forgive(scheduler: Any, key: str) -> bool:
    """Let a task begin anew after its worker's death as if it were the first time.

    The scheduler gives a task up (``KilledWorker``) after ``distributed.scheduler.allowed-failures`` deaths.
    A driver runs as long as its job and holds no memory to speak of: what kills workers is not it.

    Returns
    -------
    bool
        Whether the scheduler knows the task.
    """
    task = scheduler.tasks.get(key)
    if task is None:
        return False
    if not isinstance(task.suspicious, int):
        raise TypeError("suspicious is no number")
    # One below none: with allowed-failures 0 the first death would be one too many.
    task.suspicious = -1
    return True


class SpanAt(NamedTuple):
    """A span that a worker has, or had when it died.

    Attributes
    ----------
    key : str
    worker : str
        Its address.
    reads : (str, int, int)
        See :data:`.graph.Reads`.
    """

    key: str
    worker: str
    reads: tuple[str, int, int]


@_guarded("finding the rows that workers die of before a fourth does", list)
def spans_at(scheduler: Any, keys: Iterable[str] | None = None) -> list[SpanAt]:
    """Spans that workers have; with ``keys``, which a lost worker had, those that are to be computed anew.

    Tasks with the annotation ``scalelatent`` (see :class:`~.graph.Graph`).
    """
    if keys is None:
        tasks = [task for worker in scheduler.workers.values() for task in worker.processing]
    else:
        known = (scheduler.tasks.get(key) for key in keys)
        tasks = [task for task in known if task is not None and task.state == "processing"]
    notes = [(task, (task.annotations or {}).get("scalelatent")) for task in tasks]
    return [
        SpanAt(str(task.key), str(task.processing_on.address), (str(note[0]), int(note[1]), int(note[2])))
        for task, note in notes
        if note is not None
    ]


@_guarded("finding the rows that workers die of before a fourth does", lambda: None)
def last_chance(scheduler: Any, keys: Iterable[str]) -> None:
    """Fail spans at the next death of a worker that has them, whatever Dask allows."""
    for key in keys:
        task = scheduler.tasks[key]
        if not isinstance(task.suspicious, int):
            raise TypeError("suspicious is no number")
        task.suspicious = max(task.suspicious, int(scheduler.allowed_failures))


@_guarded("finding the rows that workers die of before a fourth does", dict)
def loads(scheduler: Any) -> dict[str, float]:
    """Address of each worker that takes tasks -> tasks that it has for each of its threads."""
    return {str(worker.address): len(worker.processing) / worker.nthreads for worker in scheduler.running}


@_guarded("finding the rows that workers die of before a fourth does", list)
def bind(scheduler: Any, keys: Iterable[str], worker: str | None) -> list[str]:
    """Have tasks whose worker was lost computed by another one, and by no third; None: by any again.

    Returns
    -------
    list of str
        Those of them for which that is news.
    """
    found = [key for key in keys if scheduler.tasks[key].loose_restrictions == (worker is not None)]
    for key in found:
        scheduler.tasks[key].loose_restrictions = worker is None
        if worker is not None:
            scheduler.tasks[key].worker_restrictions = {worker}
    return found


@_guarded("waiting for tasks that are called off", list)
def running_tasks(worker: Any) -> list[str]:
    """Keys of the tasks that a worker runs, wanted or not."""
    return [str(key) for key in worker.active_keys]


@_guarded("slow workers that take no spans from fast ones", lambda: False)
def keep_still(dask_scheduler: Any, name: str) -> bool:
    """Keep Dask's work stealing from tasks whose names begin so (see `distributed.utils.key_split`).

    Stealing knows one duration for all tasks of a name, on whatever worker: to an idle slow worker it would
    move what a fast one is through with much sooner.
    """
    from distributed import stealing

    if "stealing" in dask_scheduler.extensions:
        stealing.fast_tasks.add(name)
    return True


@_guarded("jobs that outlive the client that submits them", lambda: False)
def keep_task(scheduler: Any, key: str) -> bool:
    """Let a task go on when the client that submitted it leaves, as `distributed.fire_and_forget` does.

    That one is a message which overtakes the task it is about (a graph is unpacked aside, and a key that is
    not known yet is passed over): a client that submits and leaves would lose the task.

    Returns
    -------
    bool
        Whether the scheduler knows the task by now; if not, ask again.
    """
    if key not in scheduler.tasks:
        return False
    scheduler.client_desires_keys([key], "fire-and-forget")
    return True


@_guarded("word of drivers that wait for a worker", lambda: None)
def task_state(scheduler: Any, key: str) -> str | None:
    """What the scheduler says of a task, such as ``"processing"``; None where it does not know it."""
    task = scheduler.tasks.get(key)
    return None if task is None else str(task.state)


@_guarded("tasks that stop in their midst once they are not wanted", lambda: True)
def task_wanted(worker: Any, key: Any) -> bool:
    """Whether the scheduler still wants a task that runs on this worker."""
    task = worker.state.tasks.get(key)
    return task is not None and task.state != "cancelled"


@_guarded("handlers of Dask events that a user has set before", lambda: None)
def topic_handler(client: Any, topic: str) -> Any:
    """What a client does with events of a topic; None where nobody asked for them."""
    return client._event_handlers.get(topic)
