"""Parts of a step on lent threads: the order of what they make, their errors, no threads in threads."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from scalelatent.contract.idle import in_parts, lend


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_results_are_in_the_order_of_the_parts(threads):
    with lend(threads):
        assert in_parts(lambda part: 10 * part, range(7)) == [0, 10, 20, 30, 40, 50, 60]
        assert in_parts(lambda part: part, []) == []


def test_threads_are_used_where_they_are_lent_and_nowhere_else():
    meet = threading.Barrier(2)  # passed by two threads at a time only

    def run(part: int) -> int:
        meet.wait(timeout=60)
        return threading.get_ident()

    with lend(2):
        assert threading.get_ident() not in in_parts(run, range(2))
        # Parts of a part stay on its thread.
        inner = in_parts(lambda _: in_parts(lambda _: threading.get_ident(), range(3)), range(2))
    assert all(len(set(idents)) == 1 for idents in inner)
    assert set(in_parts(lambda _: threading.get_ident(), range(3))) == {threading.get_ident()}


def test_an_error_of_a_part_is_raised_and_parts_see_the_callers_context():
    def run(part: int) -> float:
        if part == 3:
            raise ValueError("part 3")
        return float(np.float64(1.0) / np.float64(part))

    with lend(2), np.errstate(divide="ignore"), pytest.raises(ValueError, match="part 3"):
        in_parts(run, range(1000))
    with lend(2), np.errstate(divide="raise"), pytest.raises(FloatingPointError):
        in_parts(run, range(2))
