"""Rows that kill their worker are reported after the third lost worker, or excluded on request."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Client, WorkerPlugin

from scalelatent import Callback, open_dataset
from scalelatent.errors import RunError
from scalelatent.jobs.resolve import resolve
from scalelatent.jobs.runfolder import RunFolder
from scalelatent.jobs.submit import submit_job
from tests.helpers import InterruptAt, wait_for

# Rows of the shard x/c/3/0, and the rows among them that kill a worker. Two spans (row ranges of tasks) read
# the shard.
SHARD, CHUNK = (3600, 4800), (3900, 4200)


class KillingShard(WorkerPlugin):
    """Worker plugin that kills a worker that reads any of ``rows`` while the file ``mark`` exists.

    It imitates a codec that crashes on a chunk. The scheduler also installs the plugin on later workers.
    """

    name = "poison"

    def __init__(self, mark: str, rows: tuple[int, int]) -> None:
        self.mark, self.rows = mark, rows

    def setup(self, worker: Any) -> None:
        from scalelatent.data.read.chunks import StoredRows

        mark, (first, last), original = self.mark, self.rows, StoredRows.read

        def read(source: Any, start: int, stop: int) -> Any:
            mine = source._name == "x" and "/train" in str(source._location.url)
            if mine and start < last and stop > first and os.path.exists(mark):
                with open(f"{mark}.deaths", "a") as file:
                    file.write(f"{os.getpid()}\n")
                os._exit(1)
            return original(source, start, stop)

        StoredRows.read = read  # type: ignore[method-assign]


class EventRecorder(Callback):
    def __init__(self) -> None:
        self.reported: list[dict[str, Any]] = []
        self.passes: list[int] = []

    def on_event(self, info: dict[str, Any]) -> None:
        self.reported.append(info)

    def on_pass_end(self, record: dict[str, Any]) -> None:
        self.passes.append(record["pass"])

    def infos(self, name: str) -> list[dict[str, Any]]:
        return [info for info in self.reported if info["event"] == name]


class KillFromPass(EventRecorder):
    """Callback that creates the file ``mark`` in pass ``number`` or later; then CHUNK kills its reader."""

    def __init__(self, number: int, mark: Path) -> None:
        super().__init__()
        self._number, self._mark = number, mark

    def on_progress(self, info: dict[str, Any]) -> None:
        if info["stage"] == "capsule_estep" and info["pass"] >= self._number and not self._mark.exists():
            self._mark.touch()


def reports_reads_of_the_chunk(text: str) -> bool:
    """Return True if the rows that the message names as being read are all in CHUNK, the killing rows."""
    start, stop = map(int, re.search(r"while reading rows (\d+):(\d+)", text).groups())
    return CHUNK[0] <= start < stop <= CHUNK[1]


@pytest.fixture(scope="module")
def kill_mark(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("poison") / "mark"


@pytest.fixture(scope="module")
def workers(kill_mark: Path, start_other_cluster: Any) -> Iterator[Client]:
    """Start three workers, of which one dies if it reads rows CHUNK while the file ``kill_mark`` exists."""
    with (
        # By default, a LocalCluster abandons a worker that is absent 15 s after one of its deaths.
        dask.config.set({"distributed.deploy.lost-worker-timeout": "1 hour"}),
        start_other_cluster(3) as cluster,
        Client(cluster, timeout=30, set_as_default=False) as client,
    ):
        client.wait_for_workers(3, timeout=60)
        client.register_plugin(KillingShard(str(kill_mark), CHUNK))
        yield client


@pytest.fixture
def killing_cluster(workers: Client) -> Client:
    """Return the client of ``workers`` after workers that died in an earlier test are replaced."""
    workers.wait_for_workers(3, timeout=60)
    return workers


@pytest.fixture
def count_deaths(kill_mark: Path) -> Iterator[Callable[[], int]]:
    """Return a function that counts the workers that the killing rows have killed in this test."""
    file = Path(f"{kill_mark}.deaths")
    file.unlink(missing_ok=True)
    yield lambda: len(file.read_text().split()) if file.exists() else 0
    kill_mark.unlink(missing_ok=True)


@pytest.mark.parametrize("where", ["collect", "pass"])
def test_the_error_names_a_shard_that_killed_three_workers(
    killing_cluster: Any,
    fit: Any,
    fit_alone: Any,
    assert_same: Any,
    kill_mark: Path,
    count_deaths: Any,
    tmp_path: Path,
    where: str,
) -> None:
    events = EventRecorder() if where == "collect" else KillFromPass(3, kill_mark)
    if where == "collect":
        kill_mark.touch()
    with pytest.raises(RunError) as raised:
        fit(killing_cluster, run_dir=tmp_path, callbacks=events)
    assert count_deaths() <= 3
    text = str(raised.value)
    assert "train/x/c/3/0 (rows 3600:4800)" in text
    for word in ("was with 3 workers", "127.0.0.1", "in use at its peak"):
        assert word in text
    assert reports_reads_of_the_chunk(text)
    for step in ("scalelatent data check DATA", "memory_limit", "on_bad_shard", "resume"):
        assert step in text
    assert len(events.infos("worker_lost")) == 3
    assert not list((tmp_path / "engine").glob("trial-*"))
    if where == "pass":
        assert events.passes == [1, 2]
    kill_mark.unlink()
    killing_cluster.wait_for_workers(3, timeout=60)
    again = EventRecorder()
    assert_same(fit(killing_cluster, run_dir=tmp_path, resume=True, callbacks=again), fit_alone())
    assert again.passes == ([3, 4, 5] if where == "pass" else [1, 2, 3, 4, 5])


def exclude_rows(rows: SimpleNamespace) -> np.ndarray:
    weight = np.ones(len(rows.x))
    weight[SHARD[0] : SHARD[1]] = 0
    return weight


def test_a_shard_that_kills_workers_is_excluded_on_request(
    killing_cluster: Any,
    fit: Any,
    assert_same: Any,
    rows: Any,
    kill_mark: Path,
    count_deaths: Any,
    tmp_path: Path,
) -> None:
    """All stages continue without the shard, and a resumed fit excludes it even if it can be read again."""
    kill_mark.touch()
    events, options = EventRecorder(), {"projection": 20, "engine": {"on_bad_shard": "skip"}}
    with pytest.raises(KeyboardInterrupt):
        fit(killing_cluster, run_dir=tmp_path, callbacks=[events, InterruptAt(2, "pass_end")], **options)
    assert count_deaths() == 3
    (reported,) = events.infos("shard_quarantined")
    assert reported["shard"].endswith("train/x/c/3/0")
    assert (reported["first_row"], reported["stop_row"], reported["rows"], reported["deaths"]) == (
        *SHARD,
        1200,
        3,
    )
    assert reported["stage"] == "capsule_svd"
    kill_mark.unlink()
    killing_cluster.wait_for_workers(3, timeout=60)
    model = fit(killing_cluster, run_dir=tmp_path, resume=True, projection=20)
    assert_same(model, fit(x=rows.train, sample_weight=exclude_rows(rows), projection=20))
    assert count_deaths() == 3


def test_a_damaged_shard_is_excluded_at_once(
    killing_cluster: Any, fit: Any, assert_same: Any, rows: Any, count_deaths: Any, tmp_path: Path
) -> None:
    shutil.copytree(rows.folder / "train", tmp_path / "rows")
    (tmp_path / "rows" / "x" / "c" / "3" / "0").unlink()
    events, train = EventRecorder(), open_dataset(tmp_path / "rows")
    skip = {"on_bad_shard": "skip"}
    model = fit(killing_cluster, x=train, run_dir=tmp_path / "run", callbacks=events, engine=skip)
    assert_same(model, fit(x=rows.train, sample_weight=exclude_rows(rows)))
    (reported,) = events.infos("shard_quarantined")
    assert (reported["rows"], reported["deaths"]) == (1200, 0)
    assert "is missing" in reported["why"]
    assert count_deaths() == 0


class RemoveShard(EventRecorder):
    """Callback that removes the file ``shard`` at the end of the third pass."""

    def __init__(self, shard: Path) -> None:
        super().__init__()
        self.shard = shard

    def on_pass_end(self, record: dict[str, Any]) -> None:
        super().on_pass_end(record)
        if len(self.passes) == 3:
            self.shard.unlink()


def test_a_shard_that_is_damaged_during_short_passes_is_excluded(
    killing_cluster: Any, fit: Any, rows: Any, tmp_path: Path
) -> None:
    """For the driver (process of the fit), a short pass fails at its M-step; the error must name rows."""
    shutil.copytree(rows.folder / "train", tmp_path / "rows")
    shard = tmp_path / "rows" / "x" / "c" / "3" / "0"
    events, train = RemoveShard(shard), open_dataset(tmp_path / "rows")
    skip = {"on_bad_shard": "skip", "cache": 0}
    fit(killing_cluster, x=train, run_dir=tmp_path / "run", callbacks=events, engine=skip)
    (reported,) = events.infos("shard_quarantined")
    assert (reported["rows"], reported["deaths"]) == (1200, 0)
    assert events.passes == [1, 2, 3, 4, 5]


def test_an_online_fit_refuses_to_exclude_shards_before_it_starts(fit: Any, tmp_path: Path) -> None:
    skip = {"on_bad_shard": "skip"}
    with pytest.raises(ValueError, match=r"on_bad_shard = 'skip' is for fits by passes.*algorithm = 'em'"):
        fit(run_dir=tmp_path, algorithm="stepwise", engine=skip)
    assert not list((tmp_path / "engine").glob("*"))
    with pytest.raises(ValueError, match="did you mean 'skip'"):
        fit(engine={"on_bad_shard": "skipp"})


@pytest.mark.timeout(240)
def test_a_restarted_driver_counts_the_deaths_of_its_only_worker(
    start_other_cluster: Any, rows: Any, kill_mark: Path, count_deaths: Any, tmp_path: Path
) -> None:
    """The process of the fit dies with its only worker; its successor reads earlier deaths from disk."""
    stored = {
        "job": {"out": str(tmp_path / "run"), "seed": 0},
        "data": {"train": str(rows.folder / "train")},
        "model": {
            "kind": "capsule",
            "capsule_dim": 2,
            "max_iter": 2000,
            "projection": "none",
            "nu_schedule": "none",
        },
        "engine": {"block_rows": 64, "leaf_rows": 128},
    }
    with start_other_cluster(1) as cluster, Client(cluster, timeout=30, set_as_default=False) as client:
        client.wait_for_workers(1, timeout=60)
        client.register_plugin(KillingShard(str(kill_mark), CHUNK))
        folder = RunFolder.open(submit_job(resolve(stored, environ={}), client=client).run)
        wait_for(lambda: len(folder.records("metrics.jsonl")) > 1)
        kill_mark.touch()
        # While the process of the fit is restarted, the state of the job is "failed" with `driver_lost`.
        ended = wait_for(
            lambda: (now := folder.read_state())["state"] == "failed" and not now.get("driver_lost") and now,
            seconds=120,
        )
    assert "train/x/c/3/0 (rows 3600:4800)" in ended["error"]
    assert reports_reads_of_the_chunk(ended["error"])
    assert count_deaths() == 3
    assert not list((tmp_path / "run" / "engine").glob("trial-*"))
