"""`scalelatent cluster up` starts processes on loopback, refuses bad options, and ends all processes."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import time

import psutil
import pytest

from scalelatent.deploy import clusters, serving
from scalelatent.deploy import worker_processes as workers
from scalelatent.deploy.security import make_certificates
from scalelatent.errors import JobError

pytestmark = pytest.mark.cluster


def test_cluster_up_prints_addresses_workers_and_next_commands(tls_cluster):
    assert tls_cluster["scheduler"].startswith("tls://127.0.0.1:")
    assert tls_cluster["dashboard"].startswith("http://127.0.0.1:")
    assert tls_cluster["warnings"] == []
    assert [worker["name"] for worker in tls_cluster["workers"]] == ["cpu-0", "gpu-0"]
    assert tls_cluster["workers"][1]["resources"] == {"GPU": 1}
    assert [worker["memory_bytes"] for worker in tls_cluster["workers"]] == [10**9, 10**9]
    doctor, submit = tls_cluster["next"]
    assert f"--scheduler {tls_cluster['scheduler']} --tls-ca-file {tls_cluster['tls']['ca']}" in doctor
    assert submit.startswith("scalelatent submit JOB.toml")


def test_everything_listens_on_loopback(tls_cluster):
    parent = psutil.Process(tls_cluster["pid"])
    processes = [parent, *parent.children(recursive=True)]
    listening = [
        c.laddr.ip for p in processes for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN
    ]
    assert len(listening) >= 7  # Scheduler, dashboard, 2 nannies, 2 workers, 1 or 2 pages.
    assert set(listening) == {"127.0.0.1"}


def test_workers_have_one_thread_per_pool_and_their_own_devices(tls_client):
    def environment():
        import os

        import numba

        from scalelatent.deploy.worker_processes import WORKER_ENVIRONMENT

        return {name: os.environ.get(name) for name in (*WORKER_ENVIRONMENT, "CUDA_VISIBLE_DEVICES")} | {
            "numba": str(numba.config.NUMBA_NUM_THREADS)
        }

    names = {a: w["name"] for a, w in tls_client.scheduler_info(n_workers=-1)["workers"].items()}
    found = {names[address]: env for address, env in tls_client.run(environment).items()}
    for env in found.values():
        assert {name: env[name] for name in workers.WORKER_ENVIRONMENT} == {
            n: str(v) for n, v in workers.WORKER_ENVIRONMENT.items()
        }
        assert env["numba"] == "1"
    assert found["cpu-0"]["CUDA_VISIBLE_DEVICES"] == "-1"
    assert found["gpu-0"]["CUDA_VISIBLE_DEVICES"] == "7"


def test_the_scheduler_has_time_limits_for_missing_workers_and_failures(tls_client):
    def settings(dask_scheduler):
        return dask_scheduler.no_workers_timeout, dask_scheduler.allowed_failures

    assert tls_client.run_on_scheduler(settings) == (300, 10)


def read_answer(address: str, context: ssl.SSLContext | None) -> bytes:
    """Return the first byte of a server, or b"" if the server closes the connection; raise if TLS fails."""
    host, port = address.split("://")[1].split(":")
    with socket.create_connection((host, int(port)), timeout=10) as plain:
        if context is None:
            plain.sendall(b"\0" * 64)
            return plain.recv(1)
        with context.wrap_socket(plain) as secret:
            return secret.recv(1)


def make_context(ca: str, cert: str | None = None, key: str | None = None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(ca)
    if cert is not None:
        context.load_cert_chain(cert, key)
    return context


@pytest.mark.parametrize("role", ["scheduler", "worker"])
def test_a_client_without_a_certificate_is_refused(tls_cluster, tmp_path, role):
    address = tls_cluster["scheduler"] if role == "scheduler" else tls_cluster["workers"][0]["address"]
    files = tls_cluster["tls"]
    assert read_answer(address, make_context(**files)) != b""  # With a certificate, the server answers.
    with pytest.raises(ssl.SSLError, match="(?i)certificate_required|certificate required"):
        read_answer(address, make_context(files["ca"]))
    other = make_certificates(tmp_path / "other")
    stranger = make_context(files["ca"], str(other["client-cert.pem"]), str(other["client-key.pem"]))
    with pytest.raises((ssl.SSLError, ConnectionError), match="(?i)unknown_ca|unknown ca|reset"):
        read_answer(address, stranger)
    try:
        assert read_answer(address, None)[:1] in (b"", b"\x15")  # The answer is empty, or a TLS alert.
    except ConnectionError:
        pass


def test_a_client_does_not_trust_another_cluster(tls_cluster, tmp_path):
    other = make_certificates(tmp_path / "other")
    files = (other["ca.pem"], other["client-cert.pem"], other["client-key.pem"])
    with pytest.raises(ssl.SSLError, match="CERTIFICATE_VERIFY_FAILED"):
        read_answer(tls_cluster["scheduler"], make_context(*map(str, files)))


def test_ctrl_c_ends_all_processes_of_the_cluster(running_cluster, tmp_path):
    file = tmp_path / "scheduler.json"
    with running_cluster("--workers", "2", "--scheduler-file", str(file)) as (process, reported):
        assert file.exists()
        assert reported["scheduler_file"] == str(file)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 2
        start_time = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)  # A terminal also sends the signal to the workers.
        _, errors = process.communicate(timeout=20)
    assert time.monotonic() - start_time < 15
    assert process.returncode == 0
    assert "all workers have ended" in errors
    assert "Traceback" not in errors
    _, alive = psutil.wait_procs(children, timeout=3)
    assert alive == []
    assert not file.exists()


@pytest.mark.slow
def test_a_killed_cluster_leaves_no_process(running_cluster):
    with running_cluster("--workers", "1") as (process, _):
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        _, alive = psutil.wait_procs(children, timeout=10)
        assert [child for child in alive if child.status() != psutil.STATUS_ZOMBIE] == []


def test_a_port_in_use_is_refused():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            JobError, match=f"no cluster could start on 127.0.0.1:{port} .*in use.*port 0 chooses a free port"
        ):
            clusters.start_cluster(workers=1, port=port, dashboard_address=None)


def test_more_gpus_than_the_machine_has_are_refused(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(JobError, match=r"gpus = 2, but this machine has 1 visible GPU\(s\)"):
        clusters.start_cluster(workers=1, gpus=2)


@pytest.mark.parametrize(
    "wrong", [{"workers": -1}, {"threads": 0}, {"gpus": -1}, {"port": -1}, {"workers": -1, "gpus": 1}]
)
def test_numbers_below_their_minimum_are_refused(wrong):
    with pytest.raises(JobError, match="give at least"):
        clusters.start_cluster(**wrong)


def test_an_invalid_amount_of_memory_is_refused():
    with pytest.raises(JobError, match="memory_limit = 'much': 'much' is not an amount of memory"):
        clusters.start_cluster(workers=1, memory_limit="much")


def test_a_cluster_for_fits_needs_a_worker():
    with (
        pytest.raises(JobError, match="workers = 0 and gpus = 0; start at least one worker"),
        clusters.cluster("local", workers=0),
    ):
        pass


def test_open_scheduler_without_tls_gives_a_warning():
    (open_to_all,) = serving._warnings({"host": "0.0.0.0"}, None)
    assert "WITHOUT TLS" in open_to_all
    assert "can run any code" in open_to_all
    assert list(serving._warnings({"host": "0.0.0.0"}, {"ca": "ca.pem"})) == []
    assert list(serving._warnings({"host": "localhost", "dashboard_address": "[::1]:0"}, None)) == []
    (page,) = serving._warnings({"dashboard_address": ":8787"}, None)
    assert "dashboard listens on all addresses" in page


def test_automatic_memory_is_divided_among_the_workers():
    from distributed.system import MEMORY_LIMIT

    assert workers.divide_memory("auto", 64) * 64 <= MEMORY_LIMIT
    assert workers.divide_memory("2GB", 64) == "2GB"
