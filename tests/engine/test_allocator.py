"""A worker keeps freed memory if its environment has Dask's setting (65536), not one of the user."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from scalelatent.engine.dask.worker_side import reuse_freed_memory

# Program that prints the page faults of a hundred arrays of 4 MB before `reuse_freed_memory`, the result of
# this call, and the page faults after it.
PAGE_FAULTS_PROGRAM = """
import resource, numpy as np
from scalelatent.engine.dask.worker_side import reuse_freed_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(100):
        np.empty(500_000).fill(1.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults(), reuse_freed_memory(), (faults(), faults())[1])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_is_reused_without_page_faults() -> None:
    environ = {**os.environ, "MALLOC_TRIM_THRESHOLD_": "65536"}
    environ.pop("MALLOC_MMAP_THRESHOLD_", None)
    done = subprocess.run(
        [sys.executable, "-c", PAGE_FAULTS_PROGRAM], env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    before, changed, after = done.stdout.split()
    assert changed == "True"
    assert int(before) > 50_000  # Each of the hundred arrays has about 1,000 pages, and nothing was reused.
    assert int(after) < 5_000


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"MALLOC_TRIM_THRESHOLD_": "131072"},
        {"MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_MMAP_THRESHOLD_": "1"},
    ],
)
def test_allocator_settings_of_the_user_stay(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(name: object) -> None:
        raise AssertionError

    monkeypatch.setattr("ctypes.CDLL", never)
    assert reuse_freed_memory(environ) is False


def test_a_c_library_without_the_settings_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    assert reuse_freed_memory({"MALLOC_TRIM_THRESHOLD_": "65536"}) is False
