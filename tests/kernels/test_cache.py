"""The processes of a machine share compiled kernels on disk."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from numba.core.codegen import CPUCodeLibrary, JitEngine

from scalelatent.kernels import jit

# Script that compiles 16 kernels of one function, which differ only in the enclosed ``number``. Reading the
# index of the cache takes 0.1 s, so that other processes change the index in between.
KERNELS = """
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from numba.core.caching import IndexDataCacheFile

from scalelatent.kernels.jit import kernel

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


# Script that prints results of kernels whose inner functions are closures of one factory.
CLOSURES = """
import sys
import numpy as np
from scalelatent.models.crbm.kernels.cpu import few_rows

left, x, less = (np.ones(shape, np.float32) for shape in ((3, 8), (3, 16), (8, 16)))
for name in sys.argv[1:]:
    out = np.zeros((8, 16), np.float32)
    if name == "add":
        few_rows.ascend_outer_difference(left, x, less, np.float32(1.5), less, out)
    else:
        few_rows.write_outer_difference(left, x, less, out)
    print(name, out.min(), out.max())
"""


def test_kernels_of_two_processes_keep_their_own_inner_functions(tmp_path: Path) -> None:
    """The first two processes compile equally many functions, to which numba would give the same names."""
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}

    def run(*names: str) -> list[str]:
        command = [sys.executable, "-c", CLOSURES, *names]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=True)
        return done.stdout.splitlines()

    alone = [*run("add"), *run("write")]
    assert alone == ["add 4.0 4.0", "write 2.0 2.0"]  # 1 + 1.5 (3 - 1), and 3 - 1
    assert run("add", "write") == alone


@pytest.mark.slow
def test_processes_that_compile_at_the_same_time_do_not_mix_up_kernels(tmp_path: Path) -> None:
    script = tmp_path / "kernels.py"
    script.write_text(KERNELS)
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}

    def start_process(seed: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, script, str(seed)]
        return subprocess.Popen(command, env=env, cwd=tmp_path, stdout=subprocess.PIPE)

    processes = [start_process(seed) for seed in range(3)]
    try:
        wrong = [process.communicate(timeout=120)[0] for process in processes]
        processes.append(start_process(3))
        wrong.append(processes[3].communicate(timeout=120)[0])
    finally:
        for process in processes:
            process.kill()
    assert wrong == [b"[]\n"] * 4


def test_a_process_waits_only_once_for_a_lock_that_is_never_released(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(jit, "CACHE_FOLDER", str(tmp_path / "cache"))
    monkeypatch.setattr(jit, "_save_timeout", [0.1])
    with jit._hold_lock() as first:
        start_time = time.monotonic()
        for _ in range(20):
            with jit._hold_lock() as second:
                assert (first, second) == (True, False)
        assert time.monotonic() - start_time < 1.0
    with jit._hold_lock() as held:
        assert held


def test_a_process_forked_while_a_kernel_is_saved_does_not_keep_the_lock(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(jit, "CACHE_FOLDER", str(tmp_path / "cache"))
    monkeypatch.setattr(jit, "_save_timeout", [0.1])
    files = []
    with jit._hold_lock():
        # A forked child inherits the open lock file. Duplicate the file descriptor to imitate the child.
        lock = (tmp_path / "cache" / "lock").resolve()
        same = [fd for fd in Path("/proc/self/fd").iterdir() if fd.exists() and fd.resolve() == lock]
        files = [os.dup(int(fd.name)) for fd in same]
    try:
        assert files
        with jit._hold_lock() as held:
            assert held
    finally:
        for file in files:
            os.close(file)


def test_a_file_system_without_locks_keeps_kernels(tmp_path, monkeypatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(jit, "CACHE_FOLDER", str(tmp_path / "cache"))
    monkeypatch.setattr("fcntl.flock", refuse)
    with jit._hold_lock() as held:
        assert held


def test_python_cannot_call_a_subkernel() -> None:
    @jit.subkernel
    def twice(x):
        return 2 * x

    with pytest.raises(TypeError, match="twice can be called only by other kernels"):
        twice(1)


def test_a_subkernel_is_compiled_only_inside_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    add = JitEngine.add_module
    monkeypatch.setattr(
        JitEngine, "add_module", lambda self, module: made.append(module.name) or add(self, module)
    )

    @jit.subkernel
    def first_of(x, n):
        if n > len(x):
            raise IndexError("fewer numbers than were asked for")
        return x[:n].sum()

    def sum_of(x, n):
        return first_of(x, n)

    sum_of = jit.kernel(sum_of, cache=False)
    x = np.arange(5.0)
    assert sum_of(x, 3) == 3.0
    with pytest.raises(IndexError, match="fewer numbers than were asked for"):
        sum_of(x, 6)
    assert any("sum_of" in name for name in made)
    assert not any("first_of" in name for name in made)


def test_the_garbage_collector_pauses_while_a_kernel_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    @jit.entry(jit.in_array("f8", 1), cache=False)
    def total(x):
        return x.sum()

    seen: list[bool] = []
    finalize = CPUCodeLibrary.finalize
    monkeypatch.setattr(
        CPUCodeLibrary, "finalize", lambda self: seen.append(gc.isenabled()) or finalize(self)
    )
    assert gc.isenabled()
    assert total(np.ones(3)) == 3.0
    assert seen
    assert not any(seen)
    assert gc.isenabled()


# Script that prints the reported compilations of two kernels; a pause of 1 s lets other processes catch up.
TWO_KERNELS = """
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from numba import int64

import scalelatent.kernels.jit as kernels
from scalelatent.kernels.jit import entry
from scalelatent.kernels.compile_observers import observe_compilation


@entry(int64)
def plus(x):
    return x + 1


@entry(int64)
def minus(x):
    return x - 1


if __name__ == "__main__":
    dispatcher = kernels._entries["other"][0][0]
    compiled = dispatcher._compiler.compile

    def slowly(*args):
        Path(__file__).with_name(f"compiled-{os.getpid()}").touch()
        time.sleep(1.0)
        return compiled(*args)

    dispatcher._compiler.compile = slowly
    events = []
    with observe_compilation(lambda name, seconds: events.append((name, seconds is None))):
        print(plus(1), minus(1))
    print(sorted(set(name for name, _ in events)), len(events))
"""


def start_script(tmp_path: Path) -> subprocess.Popen[str]:
    script = tmp_path / "two_kernels.py"
    if not script.exists():
        script.write_text(TWO_KERNELS)
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    return subprocess.Popen([sys.executable, script], env=env, stdout=subprocess.PIPE, text=True)


def test_compiled_kernels_are_reported_and_loaded_kernels_are_not(tmp_path: Path) -> None:
    first, _ = start_script(tmp_path).communicate(timeout=120)
    second, _ = start_script(tmp_path).communicate(timeout=120)
    assert first.splitlines() == ["2 0", "['__main__.minus', '__main__.plus'] 4"]
    assert second.splitlines() == ["2 0", "[] 0"]


@pytest.mark.slow
def test_one_process_compiles_a_kernel_and_the_others_wait_and_load_it(tmp_path: Path) -> None:
    processes = [start_script(tmp_path) for _ in range(3)]
    out = [process.communicate(timeout=120)[0].splitlines()[0] for process in processes]
    assert out == ["2 0"] * 3
    assert len(list(tmp_path.glob("compiled-*"))) == 1


def test_kernels_of_a_model_stay_valid_when_another_model_or_a_file_time_changes(
    tmp_path, monkeypatch
) -> None:
    root = tmp_path / "scalelatent"
    for name in (
        "kernels/tiles.py",
        "models/a/kernels/cpu.py",
        "models/b/kernels/cpu/dense.py",
        "importers/k.py",
        "importers/other.py",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(
            "x = 1\n" if "other" in name else "from scalelatent.kernels.jit import kernel\n"
        )
    monkeypatch.setattr(jit, "_ROOT", root)

    def digests() -> dict[str, str]:
        jit._digest.cache_clear()
        return {family: jit._digest(family) for family in ("a", "b", "data", "kernels")}

    try:
        before = digests()
        os.utime(root / "models/a/kernels/cpu.py", (1, 1))
        (root / "importers/other.py").write_text("x = 2\n")
        assert digests() == before
        (root / "models/a/kernels/cpu.py").write_text("from scalelatent.kernels.jit import entry\n")
        changed = digests()
        assert {family for family in before if changed[family] != before[family]} == {"a"}
        (root / "kernels/tiles.py").write_text("from scalelatent.kernels.jit import entry\n")
        assert {family for family, d in digests().items() if d == changed[family]} == set()
    finally:
        jit._digest.cache_clear()


@pytest.mark.parametrize(
    ("module", "family"),
    [
        ("scalelatent.kernels.tiles", "kernels"),
        ("scalelatent.models.capsule.kernels.cpu", "capsule"),
        ("scalelatent.models.mbn.kernels.cpu.dense", "mbn"),
        ("scalelatent.generators.image_kernels", "data"),
        ("somewhere.else", "other"),
        ("scalelatent", "other"),
    ],
)
def test_kernels_of_a_family_share_a_folder(module: str, family: str) -> None:
    assert jit._family(module) == family


def test_kernels_that_were_not_loaded_for_a_month_are_removed(tmp_path, monkeypatch) -> None:
    base = tmp_path / "numba-host"
    monkeypatch.setattr(jit, "CACHE_FOLDER", str(base))
    old, new = ("capsule-0123456789", "mbn-0123456789"), ("capsule-9876543210", "notes", "capsule-2")
    month = time.time() - 31 * 86400
    for name in (*old, *new):
        (base / name / "files").mkdir(parents=True)
    earlier = tmp_path / "numba-host-0123456789"  # Earlier versions had one folder for all kernels.
    earlier.mkdir()
    for folder in (*(base / name for name in old), base / "notes", base / "capsule-2", earlier, base):
        os.utime(folder, (month, month))
    removed = jit.remove_unused()
    assert sorted(Path(folder).name for folder in removed) == [*old, earlier.name]
    assert sorted(path.name for path in base.iterdir()) == sorted(new)


def test_threads_that_define_kernels_at_the_same_time_use_the_right_folders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread that finishes first must not reset the cache folder of the other thread."""
    folders, before = [], numba.config.CACHE_DIR
    both_started = threading.Barrier(2)

    def define_slowly(**options: Any) -> Any:
        with suppress(threading.BrokenBarrierError):
            both_started.wait(0.2)
        if options.pop("later"):
            time.sleep(0.2)
        folders.append(numba.config.CACHE_DIR)
        return lambda function: function

    monkeypatch.setattr(jit.numba, "njit", define_slowly)
    monkeypatch.setattr(jit, "_save_one_at_a_time", lambda dispatcher: dispatcher)
    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(jit.kernel, compute_abs, later=later) for later in (False, True)]
    assert [future.result()(-2) for future in made] == [2, 2]
    assert folders == [jit._find_kernel_folder("other")] * 2
    assert before == numba.config.CACHE_DIR


def compute_abs(x: int) -> int:
    return abs(x)
