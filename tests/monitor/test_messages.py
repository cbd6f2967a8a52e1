"""Fields of messages, which any client may send, are read with defaults and shown as texts."""

from __future__ import annotations

import numpy as np

from scalelatent.monitor.messages import (
    clip,
    describe_part,
    describe_span,
    device_pool_of,
    natural_sort_key,
    read_number,
    scalars,
)
from scalelatent.monitor.progress import describe_record, format_duration
from scalelatent.monitor.times import epoch_seconds, time_text


def test_invalid_fields_are_read_as_defaults() -> None:
    assert read_number({"rows": 5}, "rows") == 5.0
    assert read_number({"rows": "many"}, "rows") == read_number({"rows": float("inf")}, "rows") == 0.0
    assert clip("a long word", 6) == "a lon…"
    assert [device_pool_of(reported) for reported in ({"device": "cupy"}, {"device": "cpu"}, {})] == [
        "gpu",
        "cpu",
        "cpu",
    ]
    assert scalars({"pass": np.int64(3), "objective": float("nan"), "W": np.zeros(3)}) == {"pass": 3}


def test_spans_are_described_in_words() -> None:
    span = {"stage": "capsule_estep", "pass": 3, "part": "train", "span": 17}
    assert describe_span(span) == "capsule_estep, pass 3, span 17"
    assert describe_span(span | {"part": "validation"}).endswith("validation span 17")
    assert (
        describe_span({"stage": "crbm_learn", "pass": 2, "part": "train", "step": 9})
        == "crbm_learn, pass 2, step 9"
    )
    assert describe_span({"stage": "mbn_code", "part": "output", "shard": 0}) == "mbn_code, shard 0"
    assert describe_span({"part": "validation"}) == ""
    assert describe_part({"stage": "code-l3", "layer": 3, "layers": 7, "k": 250}) == "layer 3 of 7, k = 250"
    assert describe_part({"tries": 9}) == "up to 9 values tried"
    assert describe_part({"stage": "em"}) == ""
    assert sorted(["w-10", "w-2"], key=natural_sort_key) == ["w-2", "w-10"]
    assert [format_duration(s) for s in (4.21, 75, 7384)] == ["4.2 s", "1 min 15 s", "2 h 03 min"]
    reported = describe_record({"pass": 3, "objective": 0.51234, "train_error": 0.125})
    assert reported == [("pass", "3"), ("objective", "0.51234"), ("train error", "12.50 %")]
    reported = describe_record({"weights_on": 1200, "weights_changed": None, "rows_at_rest": 0.9})
    assert reported == [("weights on", "1,200"), ("rows at rest", "90.00 %")]


def test_times_are_written_in_one_form_and_read_in_two() -> None:
    assert time_text(0.25) == "1970-01-01T00:00:00.250+00:00"
    assert [epoch_seconds(v) for v in (time_text(0.25), 0.25, None, "soon")] == [0.25, 0.25, None, None]
