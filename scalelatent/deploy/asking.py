"""Questions to a cluster, each with a bounded time: a worker or a scheduler that hangs must not hang us."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from scalelatent.engine.threads import within
from scalelatent.errors import RunError

if TYPE_CHECKING:
    from distributed import Client

__all__ = ["ASK_SECONDS", "address_of", "ask_scheduler", "ask_workers"]

ASK_SECONDS, SILENT_SECONDS = 30.0, 5.0

Answer = TypeVar("Answer")


def address_of(client: Client) -> str:
    """Return the address of a client's scheduler."""
    assert client.scheduler is not None
    return str(client.scheduler.address)


def ask_scheduler(client: Client, function: Callable[..., Answer], *args: Any) -> Answer:
    """Call a function with the scheduler as its first argument, on the scheduler, within a bounded time.

    Raises
    ------
    RunError
        The scheduler does not answer within 30 seconds.
    """
    try:
        return within(ASK_SECONDS, lambda: client.run_on_scheduler(_on_scheduler, function, args))
    except TimeoutError:
        raise RunError(
            f"the scheduler {address_of(client)} does not answer within {ASK_SECONDS:g} s: it hangs or is "
            "overloaded; look at its log, and try again"
        ) from None


def _on_scheduler(function: Callable[..., Any], args: tuple[Any, ...], dask_scheduler: Any = None) -> Any:
    return function(dask_scheduler, *args)


def ask_workers(client: Client, function: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """Call a function on every worker, within a bounded time.

    Returns
    -------
    dict
        Address of the worker to its answer; to the exception where it raised one.

    Raises
    ------
    RunError
        Not all answer within 30 seconds; the message names those that were not heard of.
    """
    try:
        return dict(within(ASK_SECONDS, lambda: client.run(function, *args, on_error="return")))
    except TimeoutError:
        pass
    workers = within(ASK_SECONDS, lambda: client.scheduler_info(n_workers=-1))["workers"]
    silent = [
        f"{address} (last heard of {time.time() - worker['last_seen']:.0f} s ago)"
        for address, worker in sorted(workers.items(), key=lambda item: item[1]["last_seen"])
        if time.time() - worker["last_seen"] > SILENT_SECONDS
    ]
    raise RunError(
        f"not all workers of {address_of(client)} answer within {ASK_SECONDS:g} s; silent are: "
        f"{', '.join(silent[:5]) or 'none, so they are busy'}: stop those that hang, and try again"
    )
