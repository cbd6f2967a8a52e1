"""Requests to the scheduler and the workers of a cluster, each with a timeout.

Dask's own calls wait forever, so a hanging worker or scheduler would block the fit.
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

ASK_SECONDS = 30.0  # default seconds to wait for the answer of the scheduler or of a worker
# Errors that a call to a worker raises if the worker hangs or has left the cluster.
GONE_ERRORS = (TimeoutError, ConnectionError)
LOOP_SECONDS = 5.0  # extra seconds after a timeout, before the client's event loop counts as hanging
# Maximum number of concurrent calls to workers. With 1,000 calls at once, some of 1,000 workers did not
# answer within 60 s; with 32 calls all workers answered (simulated_cluster.py).
MAX_CONCURRENT_CALLS = 32

Answer = TypeVar("Answer")


def address_of(client: Client) -> str:
    """Return the address of a client's scheduler."""
    assert client.scheduler is not None
    return str(client.scheduler.address)


def worker_infos(client: Client) -> dict[str, dict[str, Any]]:
    """Return the scheduler's information about each worker, by address."""
    return _bounded(client, ASK_SECONDS, lambda: dict(client.scheduler_info(n_workers=-1)["workers"]))


def ask_scheduler(client: Client, function: Callable[..., Answer], *args: Any) -> Answer:
    """Call ``function(scheduler, *args)`` on the scheduler; raise a RunError after 30 s without an answer."""
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
    """Call a function on workers, without waiting for their tasks; each worker has ``seconds`` (default 30).

    Return, by address, the result of each worker or the exception that the function raised there. The entry
    of a worker that does not answer in time is a `TimeoutError`.
    """
    limit = ASK_SECONDS if seconds is None else seconds
    addresses = list(worker_infos(client) if workers is None else workers)

    async def ask(some: list[str]) -> dict[str, Any]:
        answer = client.run(function, *args, workers=some, on_error="return", asynchronous=True)
        try:
            found = await asyncio.wait_for(answer, limit)
            return {a: found.get(a, ConnectionError(f"worker {a} has left")) for a in some}
        except (TimeoutError, OSError) as error:
            if len(some) > 1:  # some worker hangs, so ask each worker alone
                return await ask_all([[address] for address in some])
            slow = isinstance(error, TimeoutError)
            return {some[0]: TimeoutError(f"no answer within {limit:g} s") if slow else error}

    async def ask_all(groups: list[list[str]]) -> dict[str, Any]:
        return {a: found for part in await asyncio.gather(*map(ask, groups)) for a, found in part.items()}

    size = -(-len(addresses) // MAX_CONCURRENT_CALLS)
    groups = [addresses[i : i + size] for i in range(0, len(addresses), size)] if addresses else []
    longest = limit * (2 if size > 1 else 1) + LOOP_SECONDS
    answers = _bounded(client, longest, lambda: client.sync(ask_all, groups))
    return {address: answers[address] for address in addresses}


def ask_every_worker(
    client: Client, function: Callable[..., Answer], *args: Any, seconds: float | None = None
) -> dict[str, Answer | Exception]:
    """Call a function on every worker like `ask_workers`; raise a RunError that names silent workers."""
    limit = ASK_SECONDS if seconds is None else seconds
    answers = ask_workers(client, function, *args, seconds=limit)
    silent = [address for address, answer in answers.items() if isinstance(answer, TimeoutError)]
    if silent:
        infos, now = worker_infos(client), time.time()
        last_seen = sorted((infos[address]["last_seen"], address) for address in silent if address in infos)
        names = [f"{address} (last seen {now - at:.0f} s ago)" for at, address in last_seen]
        names += [f"{address} (which has left)" for address in silent if address not in infos]
        raise RunError(
            f"not all workers of {address_of(client)} answer within {limit:g} s; without an answer: "
            f"{', '.join(names[:5])}. Stop the workers that hang, and try again"
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
