"""Connect to clusters of Dask Gateway, ``gateway+https://hub/services/dask-gateway#CLUSTER``."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any
from urllib.parse import urldefrag

from distributed import Client

from scalelatent.engine.threads import call_with_timeout
from scalelatent.errors import JobError

if TYPE_CHECKING:
    from dask_gateway import GatewayCluster

ASK_SECONDS = 15.0  # time limit for an answer of the gateway


class GatewayClient(Client):
    """Client with the dashboard address of the gateway, which the scheduler does not know."""

    def __init__(self, address: str, page: str, **options: Any) -> None:
        self._gateway_page = page
        super().__init__(address, **options)

    @property
    def dashboard_link(self) -> str:
        return self._gateway_page


def open_gateway(address: str, **options: Any) -> Client:
    """Connect to a running cluster as the user in the configuration of Dask (``gateway.auth``)."""
    url, name = urldefrag(address.partition("+")[2])
    try:
        report = call_with_timeout(ASK_SECONDS, lambda: _find_cluster(url, name))
    except TimeoutError:
        raise JobError(
            f"gateway {url} does not answer within {ASK_SECONDS:.0f} s; check its address"
        ) from None
    proxy, page = report.scheduler_address, report.dashboard_link or ""
    try:
        return call_with_timeout(
            ASK_SECONDS, lambda: GatewayClient(proxy, page, security=report.security, **options)
        )
    except (OSError, TimeoutError, ValueError, TypeError, RuntimeError) as error:
        raise JobError(
            f"cluster {name!r} of gateway {url} does not answer within {ASK_SECONDS:.0f} s: {error}; check "
            "that the cluster still runs, and that both sides have the same version of Dask"
        ) from error


def _find_cluster(url: str, name: str) -> GatewayCluster:
    """Return the report of a gateway about a running cluster, with address and certificates."""
    try:
        from dask_gateway import Gateway
    except ImportError as error:
        raise JobError(
            f"clusters of Dask Gateway need a package that is not installed ({error.name or error}); run: "
            "pip install 'scalelatent[gateway]'"
        ) from error

    async def find_cluster() -> tuple[set[str], GatewayCluster | None]:
        async with Gateway(url, asynchronous=True) as gateway:
            running = {report.name for report in await gateway.list_clusters(status="running")}
            return running, await gateway.get_cluster(name) if name in running else None

    try:
        running, report = asyncio.run(find_cluster())
    except Exception as error:  # the web client and the authentication raise errors of any type
        raise JobError(
            f"gateway {url} does not answer as Dask Gateway ({type(error).__name__}: {error}); check its "
            "address, and gateway.auth in the configuration of Dask"
        ) from error
    if report is not None:
        return report
    known = f"running clusters: {', '.join(sorted(running))}" if running else "you have no running cluster"
    raise JobError(
        f"gateway {url} has no running cluster {name!r}; {known}. Start one with dask_gateway.Gateway"
        f"({url!r}).new_cluster(shutdown_on_close=False)"
    )
