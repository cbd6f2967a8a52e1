"""If workers or drivers (processes of fits) die or shards are damaged, a resumed fit has the same bits."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask.array as da
import numpy as np
import pytest

from scalelatent import Callback, CapsuleRegression
from scalelatent.engine import batch_loop as loop
from scalelatent.engine.dask import executor
from scalelatent.errors import DataError, RunError


class EverySpan:
    """Progress reporter without a limit of its rate: it reports every span (row range of a task)."""

    def __init__(self, callbacks: Callback, stage: str, iteration: int) -> None:
        self._callbacks, self._stage, self._iteration = callbacks, stage, iteration

    def __call__(self, done: int, total: int) -> None:
        self._callbacks.on_progress(
            {"stage": self._stage, "pass": self._iteration, "rows_done": done, "rows_total": total}
        )


class CallAtProgress(Callback):
    """Callback that calls a function once, when a share of the rows of one pass is computed."""

    def __init__(self, number: int, share: float, action: Callable[[], None]) -> None:
        self.number, self.share, self.action, self.done = number, share, action, False

    def on_progress(self, info: dict[str, Any]) -> None:
        if (
            not self.done
            and info["pass"] == self.number
            and info["rows_done"] >= self.share * info["rows_total"]
        ):
            self.done = True
            self.action()


@pytest.fixture(autouse=True)
def report_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "Progress", EverySpan)


@pytest.mark.parametrize(("number", "share"), [(1, 0.0), (3, 0.5)])
def test_a_worker_killed_within_a_pass_changes_no_bit(
    mortal_cluster: Any,
    fit: Any,
    fit_alone: Any,
    assert_same: Any,
    worker_pids: Any,
    number: int,
    share: float,
    tmp_path: Path,
) -> None:
    victim = sorted(worker_pids(mortal_cluster).values())[number % 2]
    killer = CallAtProgress(number, share, lambda: os.kill(victim, signal.SIGKILL))
    model = fit(mortal_cluster, run_dir=tmp_path / "run", callbacks=killer)
    assert killer.done
    assert_same(model, fit_alone())


def test_sums_that_are_lost_before_the_driver_fetches_them_are_recomputed(
    mortal_cluster: Any,
    fit: Any,
    fit_alone: Any,
    assert_same: Any,
    worker_pids: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, fetched, killed = worker_pids(mortal_cluster), executor.DaskExecutor.fetched, list[str]()

    def kill(self: Any, future: Any, item: Any = None) -> Any:
        if future.status == "finished" and not killed:
            ((where,),) = mortal_cluster.who_has([future]).values()
            killed.append(where)
            os.kill(before[where], signal.SIGKILL)
            deadline = time.monotonic() + 20
            while where in mortal_cluster.nthreads() and time.monotonic() < deadline:
                time.sleep(0.05)
            assert where not in mortal_cluster.nthreads()
        return fetched(self, future, item)

    monkeypatch.setattr(executor.DaskExecutor, "fetched", kill)
    assert_same(fit(mortal_cluster), fit_alone())
    assert killed


def test_the_driver_reads_the_result_of_an_m_step_whose_event_is_lost_from_the_run_folder(
    client: Any, fit: Any, fit_alone: Any, assert_same: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor.DaskExecutor, "pass_report", lambda self, current: None)
    assert_same(fit(client), fit_alone())


@pytest.mark.slow
def test_killing_all_workers_within_a_pass_changes_no_bit(
    mortal_cluster: Any, fit: Any, fit_alone: Any, assert_same: Any, worker_pids: Any, tmp_path: Path
) -> None:
    before = set(worker_pids(mortal_cluster).values())

    def kill() -> None:
        for pid in before:
            os.kill(pid, signal.SIGKILL)

    model = fit(mortal_cluster, run_dir=tmp_path / "run", callbacks=CallAtProgress(3, 0.5, kill))
    assert_same(model, fit_alone())


@pytest.mark.slow
def test_joining_and_leaving_workers_change_no_bit(
    mortal_cluster: Any, fit: Any, fit_alone: Any, assert_same: Any
) -> None:
    more = CallAtProgress(2, 0.4, lambda: mortal_cluster.cluster.scale(3))
    less = CallAtProgress(4, 0.4, lambda: mortal_cluster.cluster.scale(2))
    assert_same(fit(mortal_cluster, callbacks=[more, less]), fit_alone())
    assert more.done
    assert less.done


@pytest.mark.parametrize("where", ["cluster", "here"])
def test_a_fit_resumes_on_a_cluster_or_in_one_process(
    client: Any, fit: Any, fit_alone: Any, assert_same: Any, tmp_path: Path, where: str, scheduler_tasks: Any
) -> None:
    """A fit interrupted on a cluster ends in this process, and the reverse; sums of the pass are stored."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    first, second = (client, None) if where == "cluster" else (None, client)
    engine = {"checkpoint_seconds": 0}
    with pytest.raises(KeyboardInterrupt):
        fit(first, run_dir=tmp_path, callbacks=CallAtProgress(3, 0.5, interrupt), engine=engine)
    assert list((tmp_path / "engine").glob("node-capsule_estep-000002-*")) != []
    if where == "cluster":
        assert scheduler_tasks(wait=5) == 0
    assert_same(fit(second, run_dir=tmp_path, resume=True, engine=engine), fit_alone())


DRIVER_PROGRAM = """
import sys
from distributed import Client
from scalelatent import Callback, CapsuleRegression, open_dataset
class PrintPasses(Callback):
    def on_pass_end(self, record):
        print(record["pass"], flush=True)
if __name__ == "__main__":
    scheduler, train, validation, run = sys.argv[1:]
    with Client(scheduler, timeout=30) as client:
        CapsuleRegression(capsule_dim=2, max_iter=20, random_state=0, projection=None, nu_schedule=None).fit(
            open_dataset(train), validation=open_dataset(validation), client=client, run_dir=run,
            callbacks=[PrintPasses()],
            engine={"block_rows": 64, "leaf_rows": 128})
"""


def test_a_fit_resumes_after_its_driver_was_killed(
    client: Any,
    fit: Any,
    fit_alone: Any,
    assert_same: Any,
    rows: SimpleNamespace,
    tmp_path: Path,
    scheduler_tasks: Any,
) -> None:
    client.wait_for_workers(2, timeout=60)
    process = subprocess.Popen(
        [
            sys.executable, "-c", DRIVER_PROGRAM, client.scheduler.address,
            str(rows.folder / "train"), str(rows.folder / "validation"), str(tmp_path),
        ],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) >= 7:
                break
        time.sleep(0.02)  # In 20 ms the process starts the next pass, so the kill interrupts a pass.
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait(30)
        process.stdout.close()
    passes: list[int] = []

    class Count(Callback):
        def on_pass_end(self, record: dict[str, Any]) -> None:
            passes.append(record["pass"])

    options = {"max_iter": 20, "nu_schedule": None}
    model = fit(client, run_dir=tmp_path, resume=True, callbacks=Count(), **options)
    assert passes[0] >= 7  # Passes of the killed process are not repeated.
    assert passes[-1] == 20
    assert_same(model, fit_alone(**options))
    assert scheduler_tasks(wait=10) == 0  # Tasks of the dead process are released, too.


@pytest.mark.parametrize("how", ["removed", "corrupted"])
def test_a_fit_on_a_cluster_resumes_after_a_shard_was_restored(
    client: Any,
    fit: Any,
    fit_alone: Any,
    assert_same: Any,
    rows: SimpleNamespace,
    tmp_path: Path,
    how: str,
    scheduler_tasks: Any,
) -> None:
    import shutil

    from scalelatent import open_dataset

    shutil.copytree(rows.folder / "train", tmp_path / "train")
    shard = tmp_path / "train" / "x" / "c" / "3" / "0"
    content = shard.read_bytes()

    def damage() -> None:
        shard.unlink()
        if how == "corrupted":
            shard.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))

    with pytest.raises(
        DataError, match=r"shard file .*x/c/3/0 \(rows 3600:4800 of 'x'\).*Restore that file"
    ) as raised:
        fit(
            client,
            x=open_dataset(tmp_path / "train"),
            run_dir=tmp_path / "run",
            callbacks=CallAtProgress(3, 0.0, damage),
        )
    assert str(tmp_path / "train") in str(raised.value)
    del raised  # The traceback refers to the futures of the pass, which would keep their tasks.
    gc.collect()
    assert scheduler_tasks(wait=5) == 0
    shard.write_bytes(content)
    passes: list[int] = []

    class Count(Callback):
        def on_pass_end(self, record: dict[str, Any]) -> None:
            passes.append(record["pass"])

    model = fit(
        client, x=open_dataset(tmp_path / "train"), run_dir=tmp_path / "run", resume=True, callbacks=Count()
    )
    assert_same(model, fit_alone())
    # The workers may have finished the third pass before the file was removed; pass 3 is then not repeated.
    assert passes in ([3, 4, 5], [4, 5])


def test_the_error_names_bad_pixels_that_a_worker_found(client: Any, rows: SimpleNamespace) -> None:
    import numpy as np

    x = rows.x.astype("f4")
    x[4321, 7] = np.nan
    with pytest.raises(ValueError, match="row 4321, (column|feature) 7"):
        CapsuleRegression(capsule_dim=1, max_iter=1).fit(x, rows.y, client=client)


# -- clusters that cannot run a fit --------------------------------------------------------------------------


def test_a_cluster_without_workers_is_reported_at_once(fit: Any, start_other_cluster: Any) -> None:
    from distributed import Client

    with start_other_cluster(0) as cluster, Client(cluster, timeout=30) as client:
        begin = time.monotonic()
        with pytest.raises(
            RunError, match=r"tcp://127\.0\.0\.1:\d+ has no workers: start some \(`dask worker tcp"
        ):
            fit(client)
        assert time.monotonic() - begin < 5


def test_a_folder_that_workers_do_not_see_is_refused(
    client: Any, fit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheduler_tasks: Any
) -> None:
    gc.collect()
    # A worker on another machine that cannot see the folder would give this answer.
    monkeypatch.setattr(executor, "find_folder_problem", lambda folder, mark: "they do not see it")
    with pytest.raises(
        RunError,
        match=r"worker\(s\) tcp://.*, tcp://.* do not see the run folder .*: put it on storage.*\(run_dir",
    ):
        fit(client, run_dir=tmp_path / "run")
    assert scheduler_tasks(wait=5) == 0
    assert list((tmp_path / "run" / "engine").glob(".seen-*")) == []


@pytest.mark.slow
def test_a_fit_ends_if_the_last_worker_does_not_come_back(
    fit: Any,
    fit_alone: Any,
    assert_same: Any,
    start_other_cluster: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from distributed import Client

    monkeypatch.setattr(executor, "STALL_SECONDS", 2.0)
    with start_other_cluster(1) as cluster, Client(cluster, timeout=30) as client:
        client.wait_for_workers(1, timeout=60)
        leave = CallAtProgress(3, 0.3, lambda: cluster.scale(0))
        begin = time.monotonic()
        with pytest.raises(RunError, match=r"no workers are left.*Start workers, then resume the run"):
            # Enough passes that the fit is still running when the worker leaves.
            fit(client, run_dir=tmp_path / "run", callbacks=leave, max_iter=60)
        assert time.monotonic() - begin < 60
    assert_same(fit(run_dir=tmp_path / "run", resume=True, max_iter=60), fit_alone(max_iter=60))


def test_a_dask_array_of_a_module_that_the_workers_lack_is_refused(
    client: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """Without the refusal, Dask would close the worker's connection again and again; no fit would end."""
    (tmp_path / "lab_tiles.py").write_text("def doubled(block):\n    return 2 * block\n")
    monkeypatch.syspath_prepend(tmp_path)
    doubled = importlib.import_module("lab_tiles").doubled
    x = da.ones((40, 3), chunks=(10, 3)).map_blocks(doubled)
    with pytest.raises(DataError, match=r"cannot load the functions .*'lab_tiles'.*client\.upload_file"):
        CapsuleRegression(max_iter=2).fit(x, np.arange(40) % 2, client=client)
