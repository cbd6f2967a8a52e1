"""What is freed in a worker is kept, unless a user has said how much."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from scalelatent.engine.dask.worker_side import keep_pages

# Prints the faults of a hundred arrays of 4 MB, one after another, before and after.
FAULTS = """
import resource, numpy as np
from scalelatent.engine.dask.worker_side import keep_pages
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(100):
        np.empty(500_000).fill(1.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults(), keep_pages(), (faults(), faults())[1])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_arrays_come_without_fresh_pages() -> None:
    environ = {**os.environ, "MALLOC_TRIM_THRESHOLD_": "65536"}
    environ.pop("MALLOC_MMAP_THRESHOLD_", None)
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    before, changed, after = done.stdout.split()
    assert changed == "True"
    assert int(before) > 50_000  # a thousand pages each
    assert int(after) < 5_000


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"MALLOC_TRIM_THRESHOLD_": "131072"},
        {"MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_MMAP_THRESHOLD_": "1"},
    ],
)
def test_what_a_user_has_set_stays(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def never(name: object) -> None:
        raise AssertionError

    monkeypatch.setattr("ctypes.CDLL", never)
    assert keep_pages(environ) is False


def test_another_c_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    assert keep_pages({"MALLOC_TRIM_THRESHOLD_": "65536"}) is False
