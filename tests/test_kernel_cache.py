"""Compiled kernels on disk, which the processes of a machine share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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

    together = [begin(seed) for seed in range(3)]
    wrong = [process.communicate(timeout=120)[0] for process in together]
    wrong.append(begin(3).communicate(timeout=120)[0])
    assert wrong == [b"[]\n"] * 4
