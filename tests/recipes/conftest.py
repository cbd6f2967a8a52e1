"""Fixtures that run `scalelatent cluster up` in a separate process, with or without TLS."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def start_cluster(*options: str, **environ: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Start `scalelatent cluster up`, yield its process and the JSON it printed, and end it by SIGTERM."""
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
    process = subprocess.Popen(
        [sys.executable, "-m", "scalelatent", "cluster", "up", "--json", *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | {"PYTHONPATH": path} | environ,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        text = ""
        for line in process.stdout:
            text += line
            if line.startswith("}"):
                break
        assert text, process.communicate(timeout=30)[1]
        yield process, json.loads(text)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                assert process.wait(30) == 0, "SIGTERM did not end the cluster regularly"
            finally:
                process.kill()
        process.communicate(timeout=30)


@pytest.fixture(scope="session")
def running_cluster() -> Callable[..., Any]:
    return start_cluster


@pytest.fixture(scope="session")
def tls_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Start a cluster with TLS: one CPU worker, and one worker that declares a GPU which does not exist."""
    pytest.importorskip("cryptography")
    folder = tmp_path_factory.mktemp("tls")
    options = ("--workers", "1", "--gpus", "1", "--memory-limit", "1GB", "--tls", "--tls-folder", str(folder))
    with start_cluster(*options, CUDA_VISIBLE_DEVICES="7,8") as (process, reported):
        yield reported | {"process": process}


@pytest.fixture(scope="session")
def tls_client(tls_cluster: dict[str, Any]) -> Iterator[Any]:
    from distributed import Client

    from scalelatent.deploy.security import make_security

    with Client(
        tls_cluster["scheduler"],
        security=make_security(**tls_cluster["tls"]),
        timeout=30,
        set_as_default=False,
    ) as client:
        yield client
