"""Small functions that start and end clusters handle addresses, TLS files, memory limits and timeouts."""

from __future__ import annotations

import dask
import distributed  # noqa: F401  The import sets the configuration of Dask.
import pytest

from scalelatent.deploy import clusters
from scalelatent.deploy.clusters import is_loopback
from scalelatent.deploy.connection import default_scheduler
from scalelatent.deploy.security import tls_options
from scalelatent.deploy.serving import read_scheduler_address
from scalelatent.deploy.worker_processes import check_dashboard_address, check_memory, tolerate_lost_workers
from scalelatent.errors import JobError


def test_loopback_addresses_are_recognised():
    hosts = ("127.0.0.1", "localhost", "[::1]", "0.0.0.0", "head")
    assert [is_loopback(host) for host in hosts] == [True, True, True, False, False]


def test_the_scheduler_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("SCALELATENT_CLUSTER__SCHEDULER", "tcp://head:8786")
    assert default_scheduler() == "tcp://head:8786"
    assert read_scheduler_address("tcp://head:8786", None, 1) == "tcp://head:8786"


def test_tls_files_become_options():
    options = ["--tls-ca-file", "/tls/ca.pem", "--tls-cert", "/tls/me.pem"]
    assert tls_options({"ca": "/tls/ca.pem", "cert": "/tls/me.pem"}) == options
    assert tls_options(None) == []


@pytest.mark.parametrize("limit", ["2GiB", 0.5, "auto", 0])
def test_valid_memory_limits_are_accepted(limit):
    assert check_memory(limit) == limit


@pytest.mark.parametrize("limit", ["-2GB", "much", -1])
def test_invalid_memory_limits_are_refused(limit):
    with pytest.raises(ValueError, match="is not an amount of memory; write for example '2GiB'"):
        check_memory(limit)


def test_an_invalid_dashboard_port_is_refused():
    check_dashboard_address("127.0.0.1:0")
    with pytest.raises(JobError, match=r"dashboard '127.0.0.1:99999': '99999' is not a port; give HOST:PORT"):
        check_dashboard_address("127.0.0.1:99999")


def test_a_cluster_waits_for_lost_workers():
    key = "distributed.deploy.lost-worker-timeout"
    before = dask.config.get(key)
    with tolerate_lost_workers():
        assert dask.config.get(key) == "1 hour"
    assert dask.config.get(key) == before


def test_processes_that_end_late_do_not_fail_finished_work(caplog):
    """If the processes of a cluster do not end in time, as on a busy machine, a warning reports it."""

    class Late:
        def close(self, timeout):
            raise TimeoutError

    clusters.close_cluster(Late())
    assert f"did not end within {clusters.CLOSE_SECONDS} s" in caplog.text
