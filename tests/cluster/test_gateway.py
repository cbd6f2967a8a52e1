"""Clusters of Dask Gateway: a stand-in for its client, and its real server on loopback."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from distributed import Security

from scalelatent.cli.show import SchedulerOptions
from scalelatent.deploy.connection import dashboard_url, gateway_address, open_client
from scalelatent.engine.dask.hooks import scheduler_of
from scalelatent.errors import JobError
from scalelatent.jobs import control
from scalelatent.jobs.resolve import load_job
from scalelatent.jobs.runfolder import RunFolder
from scalelatent.jobs.submit import resubmit, submit_job
from tests.helpers import answers, digits_job, files_of, free_port, until

pytestmark = pytest.mark.cluster

HUB = "http://hub:8000/services/dask-gateway"


class FakeGateway:
    """The part of `dask_gateway.Gateway` that the package uses; its cluster ``mine`` is at `scheduler`."""

    scheduler = ""
    error: Exception | None = None

    def __init__(self, address: str, *, asynchronous: bool) -> None:
        assert asynchronous
        self.address = address

    async def __aenter__(self) -> FakeGateway:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def list_clusters(self, status: str) -> list[Any]:
        if self.error is not None:
            raise self.error
        assert status == "running"
        return [SimpleNamespace(name="mine")]

    async def get_cluster(self, name: str) -> Any:
        page = f"{self.address}/clusters/{name}/status"
        return SimpleNamespace(scheduler_address=self.scheduler, security=None, dashboard_link=page)


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> type[FakeGateway]:
    """Replace Dask Gateway by a stand-in."""
    package: Any = ModuleType("dask_gateway")
    package.Gateway = type("Gateway", (FakeGateway,), {})
    monkeypatch.setitem(sys.modules, "dask_gateway", package)
    return package.Gateway


def test_a_cluster_is_reached_through_its_gateway(gateway: type[FakeGateway], client: Any) -> None:
    gateway.scheduler = client.scheduler.address
    with open_client(gateway_address(HUB + "/", "mine")) as found:
        assert found.scheduler.address == client.scheduler.address
        assert dashboard_url(found) != ""
        assert found.dashboard_link == f"{HUB}/clusters/mine/status"


def test_a_cluster_that_is_not_running_is_refused(gateway: type[FakeGateway]) -> None:
    with pytest.raises(
        JobError, match=r"has no running cluster 'other'; running clusters: mine. Start one with"
    ):
        open_client(gateway_address(HUB, "other"))


def test_a_refusal_of_the_gateway_is_reported(gateway: type[FakeGateway]) -> None:
    gateway.error = PermissionError("401, message='Unauthorized'")
    with pytest.raises(
        JobError, match=r"\(PermissionError: 401.*and gateway.auth in the configuration of Dask"
    ):
        open_client(gateway_address(HUB, "mine"))


def test_a_gateway_may_be_given_by_its_address() -> None:
    with pytest.raises(JobError, match=r"gateway 'hub' is not an address; write for example https://"):
        SchedulerOptions(gateway=("hub", "mine")).settings()
    with pytest.raises(JobError, match="give only one of --gateway, --scheduler and --scheduler-file"):
        SchedulerOptions(gateway=(HUB, "mine"), scheduler="tcp://head:8786").settings()
    with pytest.raises(JobError, match="--gateway URL CLUSTER"):
        open_client("gateway://127.0.0.1:8000/mine")


def test_a_driver_connects_with_the_certificate_of_its_worker() -> None:
    """Workers of a gateway have no certificate for clients."""
    theirs = Security(tls_ca_file="ca", tls_worker_cert="cert", tls_worker_key="key")
    worker = SimpleNamespace(scheduler=SimpleNamespace(address="tls://127.0.0.1:1"), security=theirs)
    found: Any = scheduler_of(worker)[1]
    assert (found.tls_ca_file, found.tls_client_cert, found.tls_client_key) == ("ca", "cert", "key")
    assert theirs.get_tls_config_for_role("client")["cert"] is None
    worker.security = Security(tls_ca_file="ca", tls_worker_cert="cert", tls_client_cert="mine")
    assert scheduler_of(worker)[1] is worker.security


CONFIG = """
c.DaskGateway.backend_class = "dask_gateway_server.backends.local.UnsafeLocalBackend"
c.DaskGateway.authenticator_class = "dask_gateway_server.auth.SimpleAuthenticator"
c.Proxy.address = "127.0.0.1:{port}"
c.UnsafeLocalBackend.clusters_directory = {folder!r}
c.UnsafeLocalBackend.inherited_environment = ["PATH", "PYTHONPATH", "HOME", "NUMBA_CACHE_DIR"]
c.ClusterConfig.worker_cores = 1
c.ClusterConfig.worker_memory = "2 G"
c.ClusterConfig.scheduler_cmd = [{python!r}, "-m", "distributed.cli.dask_scheduler"]
c.ClusterConfig.worker_cmd = [{python!r}, "-m", "distributed.cli.dask_worker"]
"""


@pytest.fixture
def real_cluster(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Start the real server of Dask Gateway on loopback with one worker; return address and name."""
    pytest.importorskip("dask_gateway_server")
    dask_gateway = pytest.importorskip("dask_gateway")
    port = free_port()
    url, config, log = f"http://127.0.0.1:{port}", tmp_path / "config.py", (tmp_path / "server.log").open("w")
    config.write_text(CONFIG.format(port=port, folder=str(tmp_path), python=sys.executable))
    start = "from dask_gateway_server.app import main; main()"
    server = subprocess.Popen([sys.executable, "-c", start, "--config", config], stdout=log, stderr=log)
    try:
        until(lambda: answers(server, tmp_path / "server.log", f"{url}/api/health"))
        gateway = dask_gateway.Gateway(url)
        cluster = gateway.new_cluster(shutdown_on_close=False)
        try:
            cluster.scale(1)
            yield url, cluster.name
        finally:
            gateway.stop_cluster(cluster.name)
            cluster.close()
    finally:
        server.terminate()
        server.wait(60)
        log.close()


@pytest.mark.slow
@pytest.mark.timeout(400)
# The warning comes from a gateway that is closed twice.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_jobs_run_on_the_real_server(real_cluster: tuple[str, str], tmp_path: Path) -> None:
    job = load_job(
        digits_job(tmp_path, 30),
        settings=[f"job.out={tmp_path / 'run'}", *SchedulerOptions(gateway=real_cluster).settings()],
    )
    folder = RunFolder.open(submit_job(job, wait=60).run)
    until(lambda: len(folder.records("metrics.jsonl")) > 2)
    assert control.cancel_job(folder)["state"] == "cancelled"
    resubmit(folder.read_job(), folder, wait=60)  # The run folder alone is enough to submit the job again.
    until(lambda: folder.read_state()["state"] not in ("queued", "running"), 120)
    state = folder.read_state()
    assert (state["state"], state["error"]) == ("done", None)
    assert state["scheduler"] == gateway_address(*real_cluster)
    assert files_of(folder)
