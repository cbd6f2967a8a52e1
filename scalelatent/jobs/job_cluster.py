"""Connect to the cluster that a job names, and read the peak memory of its workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from scalelatent.deploy.clusters import cluster
from scalelatent.deploy.connection import dashboard_line, open_client
from scalelatent.deploy.probes import peak_bytes
from scalelatent.deploy.security import make_security
from scalelatent.engine.dask.timed_calls import ask_workers

from .spec import ClusterSection, Job

if TYPE_CHECKING:
    from distributed import Client, Security


def security_of(section: ClusterSection) -> Security | None:
    """Return the TLS settings for the scheduler from the job, or else from Dask's configuration."""
    return make_security(ca=section.tls_ca, cert=section.tls_cert, key=section.tls_key)


def check_certificates(section: ClusterSection) -> None:
    """Refuse unusable certificates of a job, even if no scheduler needs them."""
    if any(file is not None for file in (section.tls_ca, section.tls_cert, section.tls_key)):
        security_of(section)


@contextmanager
def connect(
    job: Job, client: Client | None = None, print_line: Callable[[str], None] = lambda line: None
) -> Iterator[Client | None]:
    """Yield `client`, else a client of the job's scheduler or of its new local cluster, else None."""
    section = job.cluster
    check_certificates(section)
    if client is not None:
        yield client
    elif section.scheduler is not None:
        with open_client(section.scheduler, security_of(section)) as found:
            print_line(dashboard_line(found))
            yield found
    elif section.workers is not None:
        options = {"threads": section.threads, "memory_limit": section.memory_limit}
        given: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
        with cluster("local", workers=section.workers, **given) as started:
            print_line(dashboard_line(started))
            yield started
    else:
        yield None


def read_peak_bytes(client: Client) -> int | None:
    """Return the largest peak memory of any worker, in bytes, or None if no worker answers in time."""
    try:
        peaks = ask_workers(client, peak_bytes).values()
    except Exception:  # noqa: BLE001  the fit has succeeded, so an error of Dask must not fail the job
        return None
    return max((peak for peak in peaks if isinstance(peak, int)), default=None)
