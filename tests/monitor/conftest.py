"""Fixtures that start a scheduler with the page Scalelatent in this process, and read its pages and JSON."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest


def start(**more: Any) -> Any:
    from distributed import LocalCluster

    return LocalCluster(
        n_workers=1, threads_per_worker=1, processes=False, host="127.0.0.1", protocol="tcp://",
        dashboard_address="127.0.0.1:0", memory_limit=0, silence_logs=50, **more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def watched() -> Iterator[SimpleNamespace]:
    """Start a cluster with the page Scalelatent; yield cluster, client, scheduler and dashboard address."""
    from distributed import Client

    from scalelatent import monitor

    with start() as cluster, Client(cluster, timeout=30, set_as_default=False) as client:
        client.wait_for_workers(1, timeout=30)
        assert monitor.install(client) == ""
        yield SimpleNamespace(
            cluster=cluster,
            client=client,
            scheduler=cluster.scheduler,
            base=f"http://127.0.0.1:{cluster.scheduler.http_server.port}",
        )


def fetch(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.fixture(scope="session")
def get() -> Callable[[str], tuple[int, str]]:
    return fetch


@pytest.fixture(scope="session")
def jobs() -> Callable[..., dict[str, Any]]:
    """Return a function that waits until a condition on `/scalelatent.json` is true, and returns the JSON."""

    def ask(
        base: str, job: str | None = None, until: Callable[[Any], Any] = lambda _: True
    ) -> dict[str, Any]:
        deadline = time.monotonic() + 10
        while True:
            status, text = fetch(f"{base}/scalelatent.json{f'?job={job}' if job else ''}")
            answer = json.loads(text)
            if status == 200 and until(answer):
                return answer
            assert time.monotonic() < deadline, text[:2000]
            time.sleep(0.05)

    return ask
