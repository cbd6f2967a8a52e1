"""Questions to a cluster, each with a bounded time: a worker or a scheduler that hangs must not hang us.

Law 8 needs it (every wait is bounded); Dask's own calls wait for ever.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from scalelatent.engine.threads import call_with_timeout
from scalelatent.errors import RunError

if TYPE_CHECKING:
    from distributed import Client, Scheduler

__all__ = ["address_of", "ask_every_worker", "ask_scheduler", "ask_workers", "worker_infos"]

# Of an answer: a bound, as patient as people are.
ASK_SECONDS = 30.0
# Answers of a worker that may have left; if it has not, its first task says what is wrong.
AWAY = (TimeoutError, ConnectionError)
# Beyond the time of each worker, for an event loop that hangs too: a bound.
LOOP_SECONDS = 5.0
# Calls at once. With one for each of 1,000 workers (simulated_cluster.py) not all answered in 60 s; in so
# many they did, on the same busy machine.
CALLS = 32

Answer = TypeVar("Answer")


def address_of(client: Client) -> str:
    """Address of a client's scheduler."""
    assert client.scheduler is not None
    return str(client.scheduler.address)


def worker_infos(client: Client) -> dict[str, dict[str, Any]]:
    """Address of each worker -> what the scheduler knows of it."""
    return _bounded(client, ASK_SECONDS, lambda: dict(client.scheduler_info(n_workers=-1)["workers"]))


def ask_scheduler(client: Client, function: Callable[..., Answer], *args: Any) -> Answer:
    """Call a function on the scheduler, which is its first argument; RunError without an answer in 30 s."""
    return _bounded(client, ASK_SECONDS, lambda: client.run_on_scheduler(_on_scheduler, function, args))


def _on_scheduler(
    function: Callable[..., Answer], args: tuple[object, ...], dask_scheduler: Scheduler | None = None
) -> Answer:
    return function(dask_scheduler, *args)


def ask_workers(
    client: Client,
    function: Callable[..., Answer],
    *args: Any,
    workers: Iterable[str] | None = None,
    seconds: float | None = None,
) -> dict[str, Answer | Exception]:
    """Call a function on workers, beside their tasks, each within its own time.

    Returns the answer of each worker by its address, or the exception that it raised; a `TimeoutError` of one
    that did not answer (30 s by default), which does not hide the others.
    """
    limit = ASK_SECONDS if seconds is None else seconds
    addresses = list(worker_infos(client) if workers is None else workers)

    async def ask(some: list[str]) -> dict[str, Any]:
        answer = client.run(function, *args, workers=some, on_error="return", asynchronous=True)
        try:
            found = await asyncio.wait_for(answer, limit)
            return {a: found.get(a, ConnectionError(f"worker {a} has left")) for a in some}
        except (TimeoutError, OSError) as error:
            if len(some) > 1:  # one that hangs does not hide the others
                return await ask_all([[address] for address in some])
            slow = isinstance(error, TimeoutError)
            return {some[0]: TimeoutError(f"no answer within {limit:g} s") if slow else error}

    async def ask_all(groups: list[list[str]]) -> dict[str, Any]:
        return {a: found for part in await asyncio.gather(*map(ask, groups)) for a, found in part.items()}

    size = -(-len(addresses) // CALLS)
    groups = [addresses[i : i + size] for i in range(0, len(addresses), size)] if addresses else []
    longest = limit * (2 if size > 1 else 1) + LOOP_SECONDS
    answers = _bounded(client, longest, lambda: client.sync(ask_all, groups))
    return {address: answers[address] for address in addresses}


def ask_every_worker(
    client: Client, function: Callable[..., Answer], *args: Any, seconds: float | None = None
) -> dict[str, Answer | Exception]:
    """Do as `ask_workers`; RunError, which names the silent ones, where not all answer."""
    limit = ASK_SECONDS if seconds is None else seconds
    answers = ask_workers(client, function, *args, seconds=limit)
    silent = [address for address, answer in answers.items() if isinstance(answer, TimeoutError)]
    if silent:
        infos, now = worker_infos(client), time.time()
        seen = {address: infos[address]["last_seen"] for address in silent if address in infos}
        told = [f"{a} (last heard of {now - seen[a]:.0f} s ago)" for a in sorted(seen, key=seen.__getitem__)]
        told += [f"{address} (which has left)" for address in silent if address not in seen]
        raise RunError(
            f"not all workers of {address_of(client)} answer within {limit:g} s; silent are: "
            f"{', '.join(told[:5])}: stop those that hang, and try again"
        )
    return answers


def _bounded(client: Client, seconds: float, call: Callable[[], Answer]) -> Answer:
    try:
        return call_with_timeout(seconds, call)
    except TimeoutError:
        raise RunError(
            f"the scheduler {address_of(client)} does not answer within {seconds:g} s: it hangs or is "
            "overloaded; look at its log, and try again"
        ) from None
