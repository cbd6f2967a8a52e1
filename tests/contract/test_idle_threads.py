"""Idle threads run parts of an M-step: results keep their order, errors are raised, threads do not nest."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from scalelatent.contract.idle_threads import allow_threads, run_parts


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_results_are_in_the_order_of_the_parts(threads):
    with allow_threads(threads):
        assert run_parts(lambda part: 10 * part, range(7)) == [0, 10, 20, 30, 40, 50, 60]
        assert run_parts(lambda part: part, []) == []


def test_threads_are_used_only_inside_allow_threads():
    both_running = threading.Barrier(2)  # The barrier opens only if two threads run at the same time.

    def run(part: int) -> int:
        both_running.wait(timeout=60)
        return threading.get_ident()

    with allow_threads(2):
        assert threading.get_ident() not in run_parts(run, range(2))
        # If a part starts further parts, the thread of this part runs all of them.
        inner = run_parts(lambda _: run_parts(lambda _: threading.get_ident(), range(3)), range(2))
    assert all(len(set(idents)) == 1 for idents in inner)
    assert set(run_parts(lambda _: threading.get_ident(), range(3))) == {threading.get_ident()}


def test_an_error_of_a_part_is_raised_and_parts_see_the_callers_context():
    def run(part: int) -> float:
        if part == 3:
            raise ValueError("part 3")
        return float(np.float64(1.0) / np.float64(part))

    with allow_threads(2), np.errstate(divide="ignore"), pytest.raises(ValueError, match="part 3"):
        run_parts(run, range(1000))
    with allow_threads(2), np.errstate(divide="raise"), pytest.raises(FloatingPointError):
        run_parts(run, range(2))
