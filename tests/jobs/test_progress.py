"""The progress of a fit is printed in lines, or shown on a terminal."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from scalelatent.monitor.progress import ProgressDisplay, describe_record, format_duration


def make_console(**options):
    return Console(file=io.StringIO(), width=160, **options)


def make_record(number, **more):
    values = {"pass": number, "stage": "em", "objective": 1.5, "train_error": 0.25, "validation_error": 0.5}
    return values | {"rows": 2000, "seconds": 0.5, "nu": 8, "round": 2} | more


def test_without_a_terminal_progress_is_printed_in_lines():
    show = ProgressDisplay(make_console(), every_passes=10)
    show.on_fit_start({"rows": 2000, "max_iter": 25})
    for number in range(1, 26):
        show.on_progress({"stage": "em", "pass": number, "rows_done": 10, "rows_total": 2000})
        show.on_pass_end(make_record(number))
    show.on_fit_end({})
    lines = show.console.file.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1", "10", "20", "25"]
    assert "train error 25.00 %" in lines[0]
    assert "validation error 50.00 %" in lines[0]
    assert "nu 8" in lines[0]
    assert "4,000" in lines[0]


def test_long_passes_print_progress():
    show = ProgressDisplay(make_console(), every_seconds=0)
    show.on_fit_start({})
    show.on_progress({"stage": "moments", "pass": 1, "rows_done": 10, "rows_total": 2000})
    assert show.console.file.getvalue() == "moments, pass 1: 10 of 2,000 rows\n"


def test_a_terminal_shows_the_pass_and_the_time_left():
    show = ProgressDisplay(make_console(force_terminal=True))
    with show:
        show.on_fit_start({"max_iter": 21})
        show.on_progress(
            {"stage": "em", "pass": 2, "rows_done": 500, "rows_total": 2000, "rows_per_s": 4000.0}
        )
        show.on_pass_end(make_record(1))
        plain = make_console()
        plain.print(show._render())
        text = plain.file.getvalue()
    assert "pass 2" in text
    assert "500/2,000 rows" in text
    assert "at most 10 s left" in text
    assert "objective 1.50000" in text
    assert show._live is None


LAYER = {"stage": "mbn_code-l3", "layer": 3, "layers": 7, "k": 250}


def test_a_layer_is_shown_with_its_number_on_a_terminal():
    with ProgressDisplay(make_console(force_terminal=True)) as show:
        show.on_fit_start({"began": time.time() - 90})
        show.on_stage({**LAYER, "rows": 60})
        plain = make_console()
        plain.print(show._render())
        show.on_progress({**LAYER, "pass": 0, "rows_done": 20, "rows_total": 60})
        plain.print(show._render())
    lines = plain.file.getvalue().splitlines()
    assert all(line.startswith("mbn_code-l3, layer 3 of 7, k = 250 ") for line in lines)
    assert all("1 min 3" in line for line in lines)  # The fit began 90 s ago.
    assert "20/60 rows" in lines[1]


def test_a_layer_is_shown_with_its_number_in_lines():
    show = ProgressDisplay(make_console(), every_seconds=0)
    show.on_fit_start({})
    show.on_stage({"stage": "mbn_decay", "rows": 1000, "tries": 9})
    show.on_stage({**LAYER, "rows": 60})
    show.on_progress({**LAYER, "pass": 0, "rows_done": 20, "rows_total": 60})
    show.on_event({"event": "layer_written", **LAYER, "rows": 60, "seconds": 2.0})
    assert show.console.file.getvalue().splitlines() == [
        "mbn_decay, up to 9 values tried on 1,000 rows",
        "mbn_code-l3, layer 3 of 7, k = 250: 20 of 60 rows",
        "mbn_code-l3, layer 3 of 7, k = 250: 60 rows in 2.0 s, 0.0 s so far",
    ]


def test_an_error_above_that_of_guessing_is_explained():
    show = ProgressDisplay(make_console(), every_passes=1)
    show.on_fit_start({"classes": 3})
    for number, error in ((1, 0.96), (2, 0.6)):
        show.on_pass_end(make_record(number, train_error=error))
    first, second = show.console.file.getvalue().splitlines()
    assert first.endswith("remark the first weights are often worse than guessing")
    assert "remark" not in second


def test_progress_without_a_pass_shows_nothing():
    plain = make_console()
    plain.print(ProgressDisplay(plain)._render())
    assert describe_record({}) == []


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0 s"), (9.99, "10.0 s"), (59.6, "1 min 00 s"), (3600, "1 h 00 min")]
)
def test_durations_are_written_in_readable_units(seconds, text):
    assert format_duration(seconds) == text


def test_steps_after_the_fit_have_their_own_remaining_time():
    with ProgressDisplay(make_console(force_terminal=True)) as show:
        show.on_fit_start({"max_iter": 100, "began": time.time()})
        show.on_pass_end(make_record(3))
        plain = make_console()
        plain.print(show._render())
        show.on_fit_end({})
        show.on_stage({"stage": "scoring", "rows": 1000})
        plain.print(show._render())
        show.on_progress(
            {"stage": "scoring", "pass": 0, "rows_done": 250, "rows_total": 1000, "rows_per_s": 50}
        )
        plain.print(show._render())
        assert show._live is not None
    fit, begun, _, halfway, _ = [line for line in plain.file.getvalue().splitlines() if line][1:]
    assert "pass 3" in fit
    assert begun.startswith("scoring ")
    assert "0/1,000 rows" in begun
    assert "left" not in begun
    assert "250/1,000 rows" in halfway
    assert "15 s left" in halfway
    assert "at most" not in halfway


def test_stages_after_the_fit_are_printed():
    with ProgressDisplay(make_console()) as show:
        show.on_fit_start({})
        show.on_pass_end(make_record(1))
        show.on_fit_end({})
        show.on_stage({"stage": "saving"})
        show.on_stage({"stage": "scoring", "rows": 1000})
    assert show.console.file.getvalue().splitlines()[1:] == ["saving", "scoring on 1,000 rows"]


def test_a_fit_continues_when_the_reader_of_its_lines_has_ended():
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    show = ProgressDisplay(Console(file=Gone(), width=160), every_passes=1)
    show.on_fit_start({})
    for number in (1, 2):
        show.on_pass_end(make_record(number))
    assert show.console.quiet


@pytest.mark.parametrize("announced", [False, True])
def test_compiling_is_announced_once(announced):
    show = ProgressDisplay(make_console(), announced=announced)
    for kernel in ("a", "b"):
        show.on_event({"event": "compiling_kernels", "kernel": kernel, "message": "compiling kernels"})
    assert show.console.file.getvalue().count("compiling kernels") == (0 if announced else 1)
