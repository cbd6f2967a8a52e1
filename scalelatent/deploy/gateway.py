"""Clusters behind Dask Gateway, by one address: ``gateway+https://hub/services/dask-gateway#CLUSTER``."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any
from urllib.parse import urldefrag

from distributed import Client

from scalelatent.engine.threads import call_with_timeout
from scalelatent.errors import JobError

if TYPE_CHECKING:
    from dask_gateway import GatewayCluster

ASK_SECONDS = 15.0


class GatewayClient(Client):
    """A client that knows where the gateway shows the dashboard, which its scheduler does not."""

    def __init__(self, address: str, page: str, **options: Any) -> None:
        self._gateway_page = page
        super().__init__(address, **options)

    @property
    def dashboard_link(self) -> str:
        return self._gateway_page


def open_gateway(address: str, **options: Any) -> Client:
    """Connect to a cluster that runs, as the user that Dask's configuration names (``gateway.auth``)."""
    url, name = urldefrag(address.partition("+")[2])
    try:
        report = call_with_timeout(ASK_SECONDS, lambda: _ask(url, name))
    except TimeoutError:
        raise JobError(
            f"gateway {url} does not answer within {ASK_SECONDS:.0f} s: check its address"
        ) from None
    place, page = report.scheduler_address, report.dashboard_link or ""
    try:
        return call_with_timeout(
            ASK_SECONDS, lambda: GatewayClient(place, page, security=report.security, **options)
        )
    except (OSError, TimeoutError, ValueError, TypeError, RuntimeError) as error:
        raise JobError(
            f"cluster {name!r} of gateway {url} does not answer within {ASK_SECONDS:.0f} s: {error}; check "
            "that it still runs, and that Dask has the same version on both sides"
        ) from error


def _ask(url: str, name: str) -> GatewayCluster:
    """What a gateway tells of a cluster: its address, and the certificate that it takes."""
    try:
        from dask_gateway import Gateway
    except ImportError as error:
        raise JobError(
            f"clusters behind a gateway need a package that is not installed ({error.name or error}): pip "
            "install 'scalelatent[gateway]'"
        ) from error

    async def ask() -> tuple[set[str], GatewayCluster | None]:
        async with Gateway(url, asynchronous=True) as gateway:
            running = {report.name for report in await gateway.list_clusters(status="running")}
            return running, await gateway.get_cluster(name) if name in running else None

    try:
        running, report = asyncio.run(ask())
    except Exception as error:  # of its web client, of Dask Gateway, of its authentication
        raise JobError(
            f"gateway {url} does not answer as Dask Gateway ({type(error).__name__}: {error}); check its "
            "address, and gateway.auth in Dask's configuration"
        ) from error
    if report is not None:
        return report
    known = f"running are {', '.join(sorted(running))}" if running else "none of yours runs"
    raise JobError(
        f"gateway {url} has no cluster {name!r} that runs; {known}: start one with dask_gateway.Gateway"
        f"({url!r}).new_cluster(shutdown_on_close=False)"
    )
