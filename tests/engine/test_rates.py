"""Rates (speeds of a machine) are measured once, stored, and measured again if they are outdated."""

from __future__ import annotations

import errno
import json
import threading
import time
from pathlib import Path

import pytest

from scalelatent.engine import rates as module
from scalelatent.engine.rates import Rates, cpu_seconds


def fail_if_called() -> float:
    raise AssertionError("was measured again")


def test_a_rate_is_measured_once_by_any_process(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "rates.json"
    assert Rates(path).get("a", lambda: 1.5) == 1.5
    other = Rates(path)
    assert other.get("b", lambda: 2.5) == 2.5
    assert (Rates(path).get("a", fail_if_called), Rates(path).get("b", fail_if_called)) == (1.5, 2.5)


@pytest.mark.parametrize("change", ["version", "cpu", "age", "torn", "asked"])
def test_rates_are_measured_again_if_outdated_damaged_or_requested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    rates = Rates(tmp_path / "rates.json")
    rates.get("a", lambda: 1.0)
    if change == "version":
        monkeypatch.setattr(module, "__version__", "99.0")
    elif change == "cpu":
        monkeypatch.setattr(module, "_cpu_name", lambda: "another processor")
    elif change == "age":
        later = time.time() + module.STALE_SECONDS + 1
        monkeypatch.setattr(module.time, "time", lambda: later)
    elif change == "torn":
        rates.path.write_text(rates.path.read_text()[:-9])
    again = Rates(rates.path)
    if change == "asked":
        again.measure_again()
    assert again.get("a", lambda: 2.0) == 2.0
    assert again.get("a", fail_if_called) == 2.0
    assert set(json.loads(rates.path.read_text())["rates"]) == {"a"}


def test_rates_are_measured_if_they_cannot_be_stored(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    rates = Rates(tmp_path / "file" / "rates.json")
    assert rates.get("a", lambda: 1.0) == rates.get("a", fail_if_called) == 1.0


def test_sleeping_does_not_count_as_cpu_seconds() -> None:
    def make():
        return lambda: time.sleep(0.002)  # Sleeping uses no CPU time.

    assert cpu_seconds(make, 2, 0.001) < 0.0015


def test_a_failing_thread_does_not_block_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "usable_cores", lambda: 2)
    calls = iter([lambda: None, lambda: 1 / 0])
    found: list[BaseException] = []

    def run() -> None:
        try:
            cpu_seconds(lambda: next(calls), 2, 0.001)
        except ZeroDivisionError as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert found


def test_a_plan_needs_no_folder_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "rates", Rates(tmp_path / "rates.json"))
    monkeypatch.setattr(module.tempfile, "TemporaryDirectory", no_cache_folder)
    assert module.scratch_rates() == module.NOMINAL_SCRATCH


def no_cache_folder(**how: str) -> None:
    raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")
