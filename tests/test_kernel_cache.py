"""Compiled kernels on disk, which the processes of a machine share."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scalelatent import _numba

# Kernels of one function, told apart by what they enclose alone, as those of a factory are. An index that is
# read takes its time, so that others come in between.
KERNELS = """
import random
import sys
import time
from pathlib import Path

from numba.core.caching import IndexDataCacheFile

from scalelatent._numba import kernel

load = IndexDataCacheFile._load_index


def load_slowly(self):
    found = load(self)
    time.sleep(0.1)
    return found


def make(number):
    @kernel
    def plus(x):
        return x + number

    return plus


if __name__ == "__main__":
    IndexDataCacheFile._load_index = load_slowly
    numbers = list(range(16))
    random.Random(sys.argv[1]).shuffle(numbers)
    Path(f"{sys.argv[1]}.ready").touch()
    end = time.monotonic() + 60
    while len(list(Path().glob("*.ready"))) < 3 and time.monotonic() < end:
        time.sleep(0.001)
    print([number for number in numbers if make(number)(100) != 100 + number])
"""


@pytest.mark.slow
def test_processes_that_compile_at_once_leave_no_kernel_in_the_place_of_another(tmp_path: Path) -> None:
    script = tmp_path / "kernels.py"
    script.write_text(KERNELS)
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}

    def begin(seed: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, script, str(seed)]
        return subprocess.Popen(command, env=env, cwd=tmp_path, stdout=subprocess.PIPE)

    processes = [begin(seed) for seed in range(3)]
    try:
        wrong = [process.communicate(timeout=120)[0] for process in processes]
        processes.append(begin(3))
        wrong.append(processes[3].communicate(timeout=120)[0])
    finally:
        for process in processes:
            process.kill()
    assert wrong == [b"[]\n"] * 4


def test_a_process_that_does_not_let_go_of_the_lock_is_waited_for_once(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(_numba, "CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(_numba, "_patience", [0.1])
    with _numba._alone() as first:
        begin = time.monotonic()
        for _ in range(20):
            with _numba._alone() as second:
                assert (first, second) == (True, False)
        assert time.monotonic() - begin < 1.0
    with _numba._alone() as held:
        assert held


def test_a_process_forked_while_a_kernel_is_saved_does_not_keep_the_lock(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(_numba, "CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(_numba, "_patience", [0.1])
    files = []
    with _numba._alone():
        # What a child of a fork has: the same open file.
        lock = (tmp_path / "cache" / "lock").resolve()
        same = [fd for fd in Path("/proc/self/fd").iterdir() if fd.exists() and fd.resolve() == lock]
        files = [os.dup(int(fd.name)) for fd in same]
    try:
        assert files
        with _numba._alone() as held:
            assert held
    finally:
        for file in files:
            os.close(file)


def test_a_file_system_without_locks_keeps_kernels(tmp_path, monkeypatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(_numba, "CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("fcntl.flock", refuse)
    with _numba._alone() as held:
        assert held
