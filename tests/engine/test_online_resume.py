"""A resumed online fit has the bits of an uninterrupted one, after an interrupt, a kill or a full disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from scalelatent.data import Dataset
from scalelatent.engine import batch_loop as loop
from scalelatent.engine.batch_loop import LoopResult
from scalelatent.engine.callbacks import Callback
from scalelatent.engine.chains import ChainRunner
from scalelatent.errors import ScalelatentError
from tests.helpers import InterruptAt

from .test_online import K, P, assert_same, fit, make_blobs
from .test_resume import EverySpan, FailingDisk, ProcessKilled

STEPS, EPOCHS = 5, 2


def run(
    learner: Any, folder: Path | None, callback: Any = (), jobs: int = 1, seconds: float = 30, **more: Any
) -> LoopResult:
    held = Dataset.from_arrays(*make_blobs(40, 1)) if hasattr(learner, "validation") else None
    return fit(
        learner, Dataset.from_arrays(*make_blobs(100)), validation=held, folder=folder, callback=callback,
        jobs=jobs, epochs=EPOCHS, checkpoint_seconds=seconds, validate_steps=2, report_steps=3, **more,
    )  # fmt: skip


class InterruptStep:
    """Patch that lets ``left`` steps run, and then raises KeyboardInterrupt before the next step starts."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.left, self.steps = 10**9, 0
        original = ChainRunner.step

        def counted(runner: ChainRunner, epoch: int, step: int, state: Any, *check: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
            self.steps += 1
            return original(runner, epoch, step, state, *check)

        patch.setattr(ChainRunner, "step", counted)


@pytest.mark.parametrize("kind", ["Logistic", "Walk", "Evidence"])
def test_an_interrupt_in_any_step_changes_no_bit(
    online: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    learner = getattr(online, kind)(*((P,) if kind == "Evidence" else (P, K)))
    whole = run(learner, None)
    interrupt = InterruptStep(monkeypatch)
    for after in range(STEPS * EPOCHS):
        interrupt.left, interrupt.steps = after, 0
        with pytest.raises(KeyboardInterrupt):
            run(learner, tmp_path / str(after), jobs=1 + after % 3)
        interrupt.left = 10**9
        result = run(learner, tmp_path / str(after), jobs=1 + (after + 1) % 3)
        assert_same(result.state, whole.state)
        assert interrupt.steps == STEPS * EPOCHS  # No step was repeated.
        assert [r["steps"] for r in result.history] == [r["steps"] for r in whole.history]
        assert [r["objective"] for r in result.history] == [r["objective"] for r in whole.history]


@pytest.mark.parametrize("seconds", [0, 30])
def test_an_interrupt_in_any_hook_changes_no_bit(
    online: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """Each call of a callback is interrupted once: between steps, in a validation, or at a checkpoint."""
    monkeypatch.setattr(loop, "Progress", EverySpan)
    monkeypatch.setattr("scalelatent.engine.online_loop.Progress", EverySpan)
    learner = online.Logistic(P, K)
    whole = run(learner, None)
    count = InterruptAt(10**9)
    run(learner, tmp_path / "count", count, seconds=seconds)
    assert count.calls > 25
    for left in range(count.calls):
        folder = tmp_path / str(left)
        with pytest.raises(KeyboardInterrupt):
            run(learner, folder, InterruptAt(left), seconds=seconds)
        result = run(learner, folder, seconds=seconds)
        assert_same(result.state, whole.state)
        assert [r["steps"] for r in result.history] == [r["steps"] for r in whole.history], left
        assert [r["objective"] for r in result.history] == [r["objective"] for r in whole.history]
        read_again = run(learner, folder, seconds=seconds)
        assert read_again.history == result.history
        assert_same(read_again.state, whole.state)


@pytest.mark.parametrize("how", ["killed", "full"])
@pytest.mark.slow
def test_a_failure_of_any_write_changes_no_bit(online: Any, tmp_path: Path, how: str) -> None:
    error: BaseException = (
        ProcessKilled() if how == "killed" else OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    )
    learner = online.Logistic(P, K)
    whole = run(learner, None)
    count = FailingDisk(tmp_path / "count", 10**9, error)
    with count.mounted():
        run(learner, tmp_path / "count", seconds=0)
    assert count.calls > 3 * STEPS * EPOCHS
    for fail_at in range(count.calls):
        folder = tmp_path / str(fail_at)
        with (
            FailingDisk(folder, fail_at, error).mounted(),
            pytest.raises((ProcessKilled, ScalelatentError)) as raised,
        ):
            run(learner, folder, seconds=0)
        if how == "full":
            assert "No space left" in str(raised.value)
            assert str(folder) in str(raised.value)
        result = run(learner, folder, seconds=0)
        assert_same(result.state, whole.state)
        assert [r["steps"] for r in result.history] == [r["steps"] for r in whole.history]


def test_a_resumed_fit_asks_whether_it_is_done_only_at_the_end_of_an_epoch(
    online: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An uninterrupted fit asks its learner only at the end of an epoch whether the fit is done."""
    learner = online.Logistic(P, K, patience=1)
    whole = run(learner, None)
    interrupt = InterruptStep(monkeypatch)
    for after in range(int(whole.state["steps"])):
        interrupt.left = after
        with pytest.raises(KeyboardInterrupt):
            run(learner, tmp_path / str(after))
        interrupt.left = 10**9
        assert_same(run(learner, tmp_path / str(after)).state, whole.state)


def test_more_epochs_continue_from_the_last_one(online: Any, tmp_path: Path) -> None:
    learner, rows = online.Walk(P, K), Dataset.from_arrays(*make_blobs(100))
    whole = fit(learner, rows, epochs=4)
    fit(learner, rows, epochs=2, folder=tmp_path)
    again = fit(learner, rows, epochs=4, folder=tmp_path)
    assert_same(again.state, whole.state)
    assert [r["pass"] for r in again.history] == [1, 2, 3, 4]


def test_a_damaged_checkpoint_is_replaced_by_the_one_before(online: Any, tmp_path: Path) -> None:
    learner, rows = online.Walk(P, K), Dataset.from_arrays(*make_blobs(100))
    whole = fit(learner, rows, folder=tmp_path, checkpoint_steps=1)
    newest = max(tmp_path.glob("state-toy_step-*.rec"))
    newest.write_bytes(newest.read_bytes()[:200])
    events: list[str] = []

    class Listen(Callback):
        def on_event(self, info: dict[str, Any]) -> None:
            events.append(info["event"])

    again = fit(learner, rows, folder=tmp_path, callback=Listen())
    assert_same(again.state, whole.state)
    assert events == ["checkpoint_unreadable", "resumed"]
    assert [r["pass"] for r in again.history] == [1, 2]
