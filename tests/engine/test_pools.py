"""Who may take part in a fit, how fast each is believed to be, and when the queue goes by that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scalelatent.engine.dask.cluster_pass import key_of
from scalelatent.engine.dask.link import ClusterMember
from scalelatent.engine.dask.pools import (
    GPU_GUESS,
    POOLED,
    Pace,
    Pools,
    Speeds,
    all_offer_gpu,
    costs,
    devices_event,
)
from scalelatent.engine.dask.window import Window
from scalelatent.engine.dask.worker_side import PaceReports
from scalelatent.engine.grid import RowGrid
from scalelatent.engine.passes import Span
from scalelatent.errors import RunError

THREADS = {"a": 1, "b": 1, "c": 1}
ROWS = {"train": 800, "validation": 100}


class Link:
    address = "tcp://head:8786"

    def __init__(self, **gpus: int) -> None:
        self.gpus, self.asked = gpus, 0

    def members(self) -> dict[str, ClusterMember]:
        self.asked += 1
        return {name: ClusterMember(1, True, name, "host", 0, 0, gpus) for name, gpus in self.gpus.items()}

    def call(self, what: str, function: Any, *args: Any, **more: Any) -> Any:
        return function(*args, **more)


def _stage() -> Any:
    reduction = SimpleNamespace(flops_per_row=lambda: 6e6, layout=lambda: SimpleNamespace(nbytes=1000))
    return SimpleNamespace(
        name="toy_estep",
        grids={part: RowGrid(n, 10, 1) for part, n in ROWS.items()},
        reductions=dict.fromkeys(ROWS, reduction),
    )


def _told(worker: str, pace: float, part: str = "train", device: str = "numba") -> dict[str, Any]:
    return {"stage": "toy_estep", "part": part, "worker": worker, "pace": pace, "device": device}


# -- who takes part ------------------------------------------------------------------------------------------


def test_a_fit_on_cards_leaves_the_other_workers_out() -> None:
    pools = Pools(Link(a=0, b=1, c=0))
    pools.compute_on("gpu", THREADS)
    assert pools.chosen(THREADS) == {"b": 1}
    assert pools.bound  # nor may Dask give its tasks to the others
    assert pools.gpus == {"b"}


def test_where_all_have_cards_nothing_is_bound() -> None:
    pools = Pools(Link(a=1, b=1, c=1))
    pools.compute_on("gpu", THREADS)
    assert pools.chosen(THREADS) == THREADS
    assert not pools.bound


def test_no_card_at_all_is_refused_with_the_way_out() -> None:
    with pytest.raises(RunError, match=r"none of the 3 workers of tcp://head:8786 offers the resource GPU: .*"
                       r"--resources .GPU=1.*cluster up --gpus 1.*device='auto' or 'cpu'"):  # fmt: skip
        Pools(Link(a=0, b=0, c=0)).compute_on("gpu", THREADS)


@pytest.mark.parametrize(("device", "asked"), [("cpu", 0), ("reference", 0), ("auto", 1)])
def test_all_take_part_in_other_fits(device: str, asked: int) -> None:
    """And the scheduler is asked what they offer only where it matters, and once."""
    link = Link(a=0, b=1, c=0)
    pools = Pools(link)
    pools.compute_on(device, THREADS)
    for _ in range(3):
        assert pools.chosen(THREADS) == THREADS
    assert link.asked == asked
    assert pools.offers(THREADS) == ({"cpu": 2, "gpu": 1} if device == "auto" else {"cpu": 3})
    assert not pools.bound


def test_a_worker_that_joins_is_looked_at() -> None:
    link = Link(a=1)
    pools = Pools(link)
    pools.compute_on("gpu", {"a": 1})
    link.gpus = {"a": 1, "b": 0, "c": 1}
    assert pools.chosen(THREADS) == {"a": 1, "c": 1}
    assert pools.bound


# -- speeds --------------------------------------------------------------------------------------------------


def test_nothing_known_means_alike_and_a_card_a_guess() -> None:
    assert Pace().speeds(_stage(), THREADS, frozenset()).alike
    found = Pace().speeds(_stage(), THREADS, frozenset("c"))
    assert found.speeds == {"a": 1.0, "b": 1.0, "c": GPU_GUESS}
    assert found.row_seconds == {"train": 1e-4, "validation": 1e-4}


def test_speeds_are_what_was_told() -> None:
    pace = Pace()
    for worker, seconds in (("a", 2e-3), ("b", 2e-3), ("c", 1e-4)):
        pace.receive(_told(worker, seconds))
    found = pace.speeds(_stage(), THREADS, frozenset())
    assert found.speeds == pytest.approx({"a": 1.0, "b": 1.0, "c": 20.0})
    assert found.row_seconds["train"] == 2e-3
    assert not found.alike
    # Against the reference of a pass that has begun, speeds of later news count in its seconds.
    pace.receive(_told("a", 1e-3))
    again = pace.speeds(_stage(), THREADS, frozenset(), found.row_seconds)
    assert again.speeds == pytest.approx({"a": 2.0, "b": 1.0, "c": 20.0})


def test_the_parts_of_a_pass_count_by_their_rows() -> None:
    pace = Pace()
    for part, (slow, fast) in {"train": (2e-3, 1e-3), "validation": (2e-3, 4e-3)}.items():
        pace.receive(_told("a", slow, part))
        pace.receive(_told("b", fast, part))
    speeds = pace.speeds(_stage(), {"a": 1, "b": 1}, frozenset()).speeds
    a, b = 800 * 2 + 100 * 2, 800 * 1 + 100 * 4
    assert speeds["b"] / speeds["a"] == pytest.approx(a / b)


def test_who_was_not_measured_is_as_fast_as_its_like() -> None:
    pace = Pace()
    pace.receive(_told("a", 1e-3))
    pace.receive(_told("c", 1e-4))
    speeds = pace.speeds(_stage(), {**THREADS, "d": 1}, frozenset("cd")).speeds
    assert speeds["b"] == pytest.approx(speeds["a"])
    assert speeds["d"] == pytest.approx(speeds["c"])


def test_who_gets_nothing_for_long_is_tried_again() -> None:
    """It may have become faster, and only a span can tell."""
    pace = Pace()
    pace.receive(_told("a", 1e-2))
    pace.receive(_told("b", 1e-3))

    def speed() -> float:
        found = pace.speeds(_stage(), {"a": 1, "b": 1}, frozenset()).speeds
        return found["a"] / found["b"]

    assert speed() == pytest.approx(0.1)
    for _ in range(100):
        pace.record_pass({"b"}, {"a": 1, "b": 1})
    assert 0.2 < speed() < 0.5
    pace.record_pass({"a", "b"}, {"a": 1, "b": 1})
    assert speed() == pytest.approx(0.1)


def test_a_moment_of_standing_still_is_no_speed() -> None:
    news, key = PaceReports(), ("fit", "estep", "train")
    told = [news.averaged(key, pace) for pace in (50.0, 1.0, 1.0, 100.0, 1.0, 1.0, 1.0, 1.0)]
    assert told[:3] == [None, 1.0, None]  # the first compiles
    assert max(pace for pace in told if pace) < 2.0
    assert [pace for pace in told if pace][-1] < 1.3


def test_steady_workers_tell_their_pace_once() -> None:
    news = PaceReports()
    rng = np.random.default_rng(0)
    told = [news.averaged(("fit", "e", "train"), pace) for pace in 1 + 0.1 * rng.random(1000)]
    assert sum(pace is not None for pace in told) == 1
    assert news.averaged(("another fit", "e", "train"), 1.0) is None


# -- the window ----------------------------------------------------------------------------------------------


class Future:
    status = "pending"

    def release(self) -> None:
        self.status = "released"


@pytest.fixture
def case() -> Any:
    sent: list[Any] = []
    link = Link(a=0, b=0, c=0)
    pools = Pools(link)
    for worker, seconds in (("a", 1e-2), ("b", 1e-2), ("c", 5e-4)):
        pools.pace.receive(_told(worker, seconds))
        pools.pace.receive(_told(worker, seconds, "validation"))
    on_scheduler: list[str] = []
    client = SimpleNamespace(run_on_scheduler=lambda call, function, args: on_scheduler.append(*args))
    futures: dict[Span, Future] = {}

    def send(batch: Any, last: bool) -> Any:
        sent.append((batch, last))
        new = {span: Future() for span, _ in batch}
        futures.update(new)
        return new

    executor: Any = SimpleNamespace(
        pools=pools, threads=THREADS, client=client, span_seconds=lambda name: None
    )
    stage = _stage()

    def window(kept: frozenset[Span] = frozenset()) -> Window:
        return Window(THREADS, spans, send, costs(executor, stage, kept))

    spans = [Span(part, 1, i) for part in ROWS for i in range(RowGrid(ROWS[part], 10, 1).n_nodes(1))]
    return SimpleNamespace(
        pools=pools, sent=sent, futures=futures, spans=spans, on_scheduler=on_scheduler, stage=stage,
        window=window,
    )  # fmt: skip


def test_workers_alike_keep_the_plain_window(case: Any) -> None:
    case.pools.pace = Pace()
    assert not case.window().unequal
    assert case.on_scheduler == []


def test_passes_too_short_to_gain_keep_it_too(case: Any) -> None:
    for worker, seconds in (("a", 2e-3), ("b", 2e-3), ("c", 1e-4)):
        for part in ROWS:
            case.pools.pace.receive(_told(worker, seconds, part))
    assert not case.pools.speeds(case.stage, THREADS).alike
    assert not case.window().unequal


def test_a_pool_hands_out_all_leaves_and_stops_dasks_stealing(case: Any) -> None:
    kept = frozenset(case.spans[:2])
    for _ in range(2):
        window = case.window(kept)
    assert window.unequal
    assert case.on_scheduler == ["toy_estep_pool"]  # once
    assert window.seconds == pytest.approx(900 * 1e-2 / 22, rel=0.2)
    window.open()
    assert window.all_sent  # so short a pass is one message
    ((batch, last),) = case.sent
    assert last
    assert kept <= {span for span, _ in batch}  # what was left finished is never cut
    grids = case.stage.grids
    for part in ROWS:
        there = [
            i
            for span, _ in batch
            if span.part == part
            for i in grids[part].node_leaves(span.level, span.index)
        ]
        assert sorted(there) == list(range(grids[part].n_leaves))
    for future in case.futures.values():
        future.status = "finished"
    assert len(window.poll()) == len(batch)
    assert not window.pending
    assert window.participants == {"a", "b", "c"}


def test_spans_of_a_lost_worker_are_dealt_anew(case: Any) -> None:
    case.pools.pace.receive(_told("c", 1.0))  # long passes, handed out bit by bit
    case.pools.pace.receive(_told("a", 10.0))
    case.pools.pace.receive(_told("b", 10.0))
    window = case.window()
    assert window.unequal
    window.open()
    assert not window.all_sent
    window.refresh({"a": 1, "b": 1})
    while not window.all_sent or window.pending:
        for span, (future, _) in list(window.pending.items())[:1]:
            assert span in case.futures
            future.status = "finished"
        assert window.poll()
    later = {worker for batch, _ in case.sent[1:] for _, worker in batch}
    assert later == {"a", "b"}
    assert [last for _, last in case.sent][:-1] == [False] * (len(case.sent) - 1)
    assert case.sent[-1][1]


def test_a_window_that_is_called_off_hands_out_no_more(case: Any) -> None:
    case.pools.pace.receive(_told("c", 1.0))
    window = case.window()
    assert window.unequal
    window.open()
    window.cancel()
    assert window.poll() == []
    assert {future.status for future in case.futures.values()} == {"released"}


def test_tasks_of_a_pool_have_a_name_of_their_own() -> None:
    """By the first word Dask knows how long a task takes, and which ones it is to leave alone."""
    from dask.utils import key_split

    key = key_of(SimpleNamespace(name="capsule_estep"), POOLED, 6, "s0042", "ab12cd")
    assert key == "capsule_estep_pool-it0007-s0042-ab12cd"
    assert key_split(key) == "capsule_estep_pool"


def test_speeds_within_a_factor_of_two_are_alike() -> None:
    assert Speeds({}, {"a": 1.0, "b": 1.9}).alike
    assert not Speeds({}, {"a": 1.0, "b": 2.1}).alike


# -- what is told --------------------------------------------------------------------------------------------


def test_a_mixed_pool_is_told_with_its_tolerance_and_once() -> None:
    pools = Pools(Link(a=0, b=1))
    events: list[dict[str, Any]] = []
    callbacks: Any = SimpleNamespace(on_event=events.append)
    pools.compute_on("auto", {"a": 1, "b": 1})
    pools.report_devices(pools.offers({"a": 1, "b": 1}), callbacks)
    pools.pace.receive(_told("a", 1.0))
    pools.pace.receive(_told("b", 0.1, device="cupy"))
    pools.report_devices(pools.count_computing_workers(), callbacks)
    (event,) = events
    assert event["devices"] == "cpu 1 worker, gpu 1 worker"
    assert "within 1e-05" in event["message"]
    assert "message" not in devices_event({"gpu": 4})
    assert devices_event({"cpu": 1}, {"cpu": 2})["devices"] == "cpu 1 of 2 workers (the others had no work)"
    assert devices_event({"cpu": 2}, {"cpu": 1})["devices"] == "cpu 2 workers"  # one has left


@pytest.mark.parametrize(
    ("workers", "all_cards"), [([], False), ([{"GPU": 1.0}], True), ([{"GPU": 1.0}, {}], False)]
)
def test_only_a_cluster_of_cards_is_one(workers: list[dict[str, float]], all_cards: bool) -> None:
    """Blocks as large as a card wants them would leave processors beside it idle."""
    known = {str(i): {"resources": offered} for i, offered in enumerate(workers)}
    client: Any = SimpleNamespace(scheduler_info=lambda n_workers: {"workers": known})
    assert all_offer_gpu(client) is all_cards
