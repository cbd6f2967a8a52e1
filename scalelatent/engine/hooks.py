"""The semi-private parts of Dask that scalelatent uses, each behind a guard."""

from __future__ import annotations

from typing import Any

__all__ = ["forgive", "keep_task", "task_state"]


def forgive(scheduler: Any, key: str) -> bool:
    """Let a task begin anew after its worker's death as if it were the first time.

    The scheduler gives a task up (``KilledWorker``) after ``distributed.scheduler.allowed-failures`` deaths.
    A driver runs as long as its job and holds no memory to speak of: what kills workers is not it.

    Returns
    -------
    bool
        Whether the scheduler knows the task.
    """
    try:
        task = scheduler.tasks.get(key)
        if task is None:
            return False
        if not isinstance(task.suspicious, int):
            return False
        # One below none: with allowed-failures 0 the first death would be one too many.
        task.suspicious = -1
    except AttributeError:
        return False
    return True


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


def task_state(scheduler: Any, key: str) -> str | None:
    """What the scheduler says of a task, such as ``"processing"``; None where it does not know it."""
    task = scheduler.tasks.get(key)
    return None if task is None else str(task.state)
