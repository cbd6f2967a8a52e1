"""A resumed batch fit has the bits of an uninterrupted one, after an interrupt, a kill or a full disk."""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scalelatent.engine import batch_loop as loop
from scalelatent.engine import passes
from scalelatent.engine.batch_loop import LoopResult, fit_batches
from scalelatent.engine.cache import PieceCache
from scalelatent.engine.callbacks import Callback, Callbacks
from scalelatent.engine.checkpoints import EngineStore
from scalelatent.engine.inprocess import InProcessExecutor
from scalelatent.engine.passes import PassContext, Span, is_worth_saving
from scalelatent.errors import ScalelatentError
from tests.helpers import InterruptAt

PASSES = 3
Toy = SimpleNamespace


def _fit(
    toy: Toy, folder: Path | None, callback: Callback | None = None, jobs: int = 1, seconds: float = 0
) -> LoopResult:
    stage = toy.stage(toy.rows(150), passes=PASSES, validation=toy.rows(40, seed=1))
    store = None if folder is None else EngineStore(folder)
    executor = InProcessExecutor(jobs, store, seconds, PieceCache(0))
    return fit_batches(
        executor,
        stage,
        toy.start(),
        callbacks=Callbacks(callback or ()),
        store=store,
        checkpoint_seconds=seconds,
    )


@pytest.fixture(scope="module")
def uninterrupted(toy: Toy) -> np.ndarray:
    """Return the totals of all passes (``trail``) of an uninterrupted fit."""
    trail = _fit(toy, None).state["trail"]
    assert len(set(trail)) == PASSES
    return trail


@pytest.fixture
def computed_spans(monkeypatch: pytest.MonkeyPatch) -> list[Span]:
    """Return a list of the spans (row ranges of tasks) that are computed from now on."""
    spans: list[Span] = []
    original = PassContext.run_span

    def run_span(self: PassContext, span: Span, stop: Any) -> np.ndarray:
        vector = original(self, span, stop)
        spans.append(span)
        return vector

    monkeypatch.setattr(PassContext, "run_span", run_span)
    return spans


class EverySpan:
    """Progress reporter without a limit of its rate: it reports every span (row range of a task)."""

    def __init__(self, callbacks: Callback, stage: str, iteration: int) -> None:
        self._report = lambda done, total: callbacks.on_progress(
            {"pass": iteration, "rows_done": done, "rows_total": total}
        )

    def __call__(self, done: int, total: int) -> None:
        self._report(done, total)


def test_an_interrupt_after_any_span_changes_no_bit(
    toy: Toy,
    uninterrupted: np.ndarray,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    computed_spans: list[Span],
) -> None:
    monkeypatch.setattr(loop, "Progress", EverySpan)
    # There are ten training and three validation leaves (ranges of rows); each becomes a task.
    monkeypatch.setattr(passes, "list_spans", use_leaf_spans)
    _fit(toy, tmp_path / "count")
    total = len(computed_spans)
    assert total == PASSES * 13
    reported = PASSES * (13 + 1)
    for after in range(reported):
        folder = tmp_path / str(after)
        computed_spans.clear()
        with pytest.raises(KeyboardInterrupt):
            _fit(toy, folder, InterruptAt(after, "progress"))
        first = len(computed_spans)
        result = _fit(toy, folder)
        np.testing.assert_array_equal(result.state["trail"], uninterrupted)
        assert [r["pass"] for r in result.history] == [1, 2, 3]
        assert len(computed_spans) == total, (
            f"interrupted after {first} spans, {len(computed_spans) - first} came on top"
        )


def use_leaf_spans(stage: Any, workers: int, task_seconds: float = 0.0) -> list[Span]:
    return [Span(part, 0, i) for part, grid in stage.grids.items() for i in range(grid.n_nodes(0))]


@pytest.mark.parametrize("jobs", [2, 3])
def test_a_resume_with_any_number_of_threads_changes_no_bit(
    toy: Toy, uninterrupted: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    monkeypatch.setattr(loop, "Progress", EverySpan)
    monkeypatch.setattr(passes, "list_spans", use_leaf_spans)
    for after in range(1, 40, 5):
        with pytest.raises(KeyboardInterrupt):
            _fit(toy, tmp_path / str(after), InterruptAt(after, "progress"), jobs)
        result = _fit(toy, tmp_path / str(after), jobs=4 - jobs)
        np.testing.assert_array_equal(result.state["trail"], uninterrupted)


def test_a_resume_with_spans_of_another_level_changes_no_bit(
    toy: Toy, uninterrupted: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resume with another number of workers would choose other spans (row ranges of tasks).

    If spans of the interrupted pass are stored, their division is used.
    """
    monkeypatch.setattr(loop, "Progress", EverySpan)
    monkeypatch.setattr(passes, "list_spans", use_leaf_spans)
    with pytest.raises(KeyboardInterrupt):
        _fit(toy, tmp_path, InterruptAt(6, "progress"))
    monkeypatch.undo()
    assert len(EngineStore(tmp_path).nodes("toy_estep", 0)) == 6
    np.testing.assert_array_equal(_fit(toy, tmp_path).state["trail"], uninterrupted)


def test_a_damaged_span_is_recomputed(
    toy: Toy,
    uninterrupted: np.ndarray,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    computed_spans: list[Span],
) -> None:
    monkeypatch.setattr(loop, "Progress", EverySpan)
    monkeypatch.setattr(passes, "list_spans", use_leaf_spans)
    with pytest.raises(KeyboardInterrupt):
        _fit(toy, tmp_path, InterruptAt(6, "progress"))
    for i, path in enumerate(sorted(tmp_path.glob("node-*"))[:3]):
        path.write_bytes(path.read_bytes()[: i * 30])
    computed_spans.clear()
    np.testing.assert_array_equal(_fit(toy, tmp_path).state["trail"], uninterrupted)
    assert len(computed_spans) == PASSES * 13 - 3


def test_short_spans_are_not_stored_and_a_resume_repeats_the_pass(
    toy: Toy, uninterrupted: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "Progress", EverySpan)
    with pytest.raises(KeyboardInterrupt):
        _fit(toy, tmp_path, InterruptAt(5, "progress"), seconds=1000)
    assert list(tmp_path.glob("node-*")) == []
    np.testing.assert_array_equal(_fit(toy, tmp_path, seconds=1000).state["trail"], uninterrupted)


def test_spans_are_stored_if_recomputing_takes_longer_than_writing() -> None:
    assert is_worth_saving(0.0, 10**9, 0)
    assert is_worth_saving(1.0, 10**6, 30)  # Writing takes 2 ms and saves a second of computation.
    assert not is_worth_saving(0.001, 10**6, 30)
    # Writing a file takes longer than 0.1 ms, however small the file is.
    assert not is_worth_saving(1e-4, 100, 30)


@pytest.mark.parametrize("damage", ["torn", "missing", "history"])
def test_a_resume_survives_a_damaged_folder(
    toy: Toy, uninterrupted: np.ndarray, tmp_path: Path, damage: str
) -> None:
    class Stop(Callback):
        def on_pass_end(self, record: dict[str, Any]) -> None:
            if record["pass"] == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _fit(toy, tmp_path, Stop())
    newest = Path(EngineStore(tmp_path).state_path("toy_estep", 2))
    if damage == "torn":
        newest.write_bytes(newest.read_bytes()[:100])
    elif damage == "missing":
        newest.unlink()
    else:
        path = tmp_path / "history-toy_estep.jsonl"
        path.write_text(path.read_text()[:-10])
    events: list[dict[str, Any]] = []

    class Listen(Callback):
        def on_event(self, info: dict[str, Any]) -> None:
            events.append(info)

    result = _fit(toy, tmp_path, Listen())
    np.testing.assert_array_equal(result.state["trail"], uninterrupted)
    assert [e["event"] for e in events] == (["checkpoint_unreadable"] if damage == "torn" else []) + [
        "resumed"
    ]
    assert [r["pass"] for r in result.history] == [1, 2, 3]


@pytest.mark.parametrize("lines", [0, 1, 2])
def test_no_pass_is_missing_from_the_history(
    toy: Toy, uninterrupted: np.ndarray, tmp_path: Path, lines: int
) -> None:
    """After a fit is killed, a cluster may finish two more passes, whose states lack a line of history."""

    class Stop(Callback):
        def on_pass_end(self, record: dict[str, Any]) -> None:
            if record["pass"] == 2:
                raise KeyboardInterrupt

    undisturbed = _fit(toy, tmp_path / "whole").history
    with pytest.raises(KeyboardInterrupt):
        _fit(toy, tmp_path / "run", Stop())
    path = tmp_path / "run" / "history-toy_estep.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:lines]))
    result = _fit(toy, tmp_path / "run")
    assert [(r["pass"], r["objective"], r["rows"]) for r in result.history] == [
        (r["pass"], r["objective"], r["rows"]) for r in undisturbed
    ]
    np.testing.assert_array_equal(result.state["trail"], uninterrupted)


# -- the disk fails, or the process is killed, at every single write -----------------------------------------


class ProcessKilled(BaseException):
    """Exception that imitates SIGKILL: code that catches Exception does not catch it."""


class FailingDisk:
    """Disk on which ``fail_at`` changes of a folder (opens for writing, writes, renames) work; more fail."""

    def __init__(self, folder: Path, fail_at: int, error: BaseException) -> None:
        self.folder, self.fail_at, self.error, self.calls = str(folder), fail_at, error, 0
        self._open, self._replace = builtins.open, os.replace

    def step(self) -> None:
        self.calls += 1
        if self.calls > self.fail_at:
            raise self.error

    def open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not str(file).startswith(self.folder) or not set(mode) & set("wax"):
            return self._open(file, mode, *args, **kwargs)
        self.step()
        return TornFile(self, self._open(file, mode, *args, **kwargs))

    def replace(self, source: Any, target: Any) -> None:
        if str(target).startswith(self.folder):
            self.step()
        self._replace(source, target)

    @contextmanager
    def mounted(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(builtins, "open", self.open)
            patch.setattr(io, "open", self.open)
            patch.setattr(os, "replace", self.replace)
            yield


class TornFile:
    """File on a FailingDisk; a write that fails has written half of its data."""

    def __init__(self, disk: FailingDisk, file: Any) -> None:
        self._disk, self._file = disk, file

    def write(self, data: Any) -> Any:
        try:
            self._disk.step()
        except BaseException:
            self._file.write(data[: len(data) // 2])
            self._file.flush()
            raise
        return self._file.write(data)

    def __enter__(self) -> TornFile:
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@pytest.mark.parametrize("how", ["killed", "full"])
def test_a_failure_of_any_write_of_a_batch_fit_changes_no_bit(
    toy: Toy, uninterrupted: np.ndarray, tmp_path: Path, how: str
) -> None:
    error: BaseException = (
        ProcessKilled() if how == "killed" else OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    )
    count = FailingDisk(tmp_path / "count", 10**9, error)
    with count.mounted():
        _fit(toy, tmp_path / "count")
    assert count.calls > 3 * PASSES * 3
    for fail_at in range(count.calls):
        folder = tmp_path / str(fail_at)
        with (
            FailingDisk(folder, fail_at, error).mounted(),
            pytest.raises((ProcessKilled, ScalelatentError)) as raised,
        ):
            _fit(toy, folder)
        if how == "full":
            assert "No space left" in str(raised.value)
            assert str(folder) in str(raised.value)
        result = _fit(toy, folder)
        np.testing.assert_array_equal(result.state["trail"], uninterrupted)
        assert [r["pass"] for r in result.history] == [1, 2, 3]
