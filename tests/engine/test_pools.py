"""A pool (the workers of one fit) chooses workers, measures their speeds, and divides tasks by speed."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scalelatent.engine.dask import hooks, link
from scalelatent.engine.dask.cluster_pass import key_of
from scalelatent.engine.dask.pools import (
    GPU_GUESS,
    POOLED,
    Pace,
    Pools,
    Speeds,
    all_use_gpu,
    devices_event,
    estimate_costs,
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

    def find_gpus(self) -> dict[str, str]:
        self.asked += 1
        return {name: "used" if gpus else "none" for name, gpus in self.gpus.items()}

    def call(self, what: str, function: Any, *args: Any, **more: Any) -> Any:
        return function(*args, **more)


def _stage() -> Any:
    reduction = SimpleNamespace(flops_per_row=lambda: 6e6, layout=lambda: SimpleNamespace(nbytes=1000))
    return SimpleNamespace(
        name="toy_estep",
        grids={part: RowGrid(n, 10, 1) for part, n in ROWS.items()},
        reductions=dict.fromkeys(ROWS, reduction),
    )


def _make_report(worker: str, pace: float, part: str = "train", device: str = "numba") -> dict[str, Any]:
    return {"stage": "toy_estep", "part": part, "worker": worker, "pace": pace, "device": device}


# -- workers that take part in a fit -------------------------------------------------------------------------


def test_a_fit_on_gpus_excludes_the_cpu_workers() -> None:
    pools = Pools(Link(a=0, b=1, c=0))
    pools.compute_on("gpu", THREADS)
    assert pools.chosen(THREADS) == {"b": 1}
    assert pools.bound  # Dask must not move tasks to other workers.
    assert pools.gpus == {"b"}


def test_tasks_are_not_restricted_if_all_workers_have_gpus() -> None:
    pools = Pools(Link(a=1, b=1, c=1))
    pools.compute_on("gpu", THREADS)
    assert pools.chosen(THREADS) == THREADS
    assert not pools.bound


def test_a_cluster_without_gpus_is_refused_with_advice() -> None:
    with pytest.raises(RunError, match=r"none of the 3 workers of tcp://head:8786 offers the resource GPU: .*"
                       r"--resources .GPU=1.*cluster up --gpus 1.*device='auto' or 'cpu'"):  # fmt: skip
        Pools(Link(a=0, b=0, c=0)).compute_on("gpu", THREADS)


def test_workers_with_an_unused_gpu_are_reported(caplog: Any) -> None:
    cluster = Link()
    cluster.find_gpus = lambda: {"a": "unused", "b": "used", "c": "unused"}  # type: ignore[method-assign]
    Pools(cluster).compute_on("auto", THREADS)
    assert "2 of 3 workers of tcp://head:8786 see a GPU" in caplog.text
    assert "--nthreads 1 --resources GPU=1" in caplog.text
    with pytest.raises(RunError, match="`dask cuda worker tcp://head:8786`"):
        Pools(Link(a=0, b=0, c=0)).compute_on("gpu", THREADS)


def test_workers_of_dask_cuda_compute_on_their_gpu(monkeypatch: Any) -> None:
    """Workers without the resource GPU that see a GPU are asked whether dask-cuda started them."""
    seen = {"gpu": {"name": "H100"}}
    known = {"a": seen, "b": seen | {"resources": {"GPU": 1}}, "c": {"resources": {"CPU": 1}}, "d": seen}
    client: Any = SimpleNamespace(scheduler_info=lambda n_workers: {"workers": known})
    asked = []

    def answer(client: Any, function: Any, workers: Any) -> dict[str, Any]:
        asked.append((function, workers))
        return {"a": True, "d": TimeoutError("no answer")}

    monkeypatch.setattr(link, "ask_workers", answer)
    assert link.find_gpus(client) == {"a": "used", "b": "used", "c": "none", "d": "unused"}
    assert asked == [(hooks.offers_gpu, ["a", "d"])]
    worker: Any = SimpleNamespace(nanny="tcp://n", state=SimpleNamespace(total_resources={}))
    assert not hooks.offers_gpu(worker)
    monkeypatch.setitem(sys.modules, "dask_cuda.initialize", SimpleNamespace())
    assert hooks.offers_gpu(worker)
    worker.nanny = None  # This worker shares a process, which imported dask-cuda for another cluster.
    assert not hooks.offers_gpu(worker)


@pytest.mark.parametrize(("device", "asked"), [("cpu", 0), ("reference", 0), ("auto", 1)])
def test_all_workers_take_part_in_fits_on_cpus(device: str, asked: int) -> None:
    """The scheduler is asked once for the resources of its workers, and only if they matter."""
    cluster = Link(a=0, b=1, c=0)
    pools = Pools(cluster)
    pools.compute_on(device, THREADS)
    for _ in range(3):
        assert pools.chosen(THREADS) == THREADS
    assert cluster.asked == asked
    assert pools.offers(THREADS) == ({"cpu": 2, "gpu": 1} if device == "auto" else {"cpu": 3})
    assert not pools.bound


def test_a_joining_worker_is_checked_for_gpus() -> None:
    cluster = Link(a=1)
    pools = Pools(cluster)
    pools.compute_on("gpu", {"a": 1})
    cluster.gpus = {"a": 1, "b": 0, "c": 1}
    assert pools.chosen(THREADS) == {"a": 1, "c": 1}
    assert pools.bound


# -- measured speeds of workers ------------------------------------------------------------------------------


def test_unmeasured_workers_are_equal_and_gpus_have_an_assumed_speed() -> None:
    assert Pace().speeds(_stage(), THREADS, frozenset()).are_equal
    found = Pace().speeds(_stage(), THREADS, frozenset("c"))
    assert found.speeds == {"a": 1.0, "b": 1.0, "c": GPU_GUESS}
    assert found.row_seconds == {"train": 1e-4, "validation": 1e-4}


def test_speeds_are_those_that_workers_reported() -> None:
    pace = Pace()
    for worker, seconds in (("a", 2e-3), ("b", 2e-3), ("c", 1e-4)):
        pace.receive(_make_report(worker, seconds))
    found = pace.speeds(_stage(), THREADS, frozenset())
    assert found.speeds == pytest.approx({"a": 1.0, "b": 1.0, "c": 20.0})
    assert found.row_seconds["train"] == 2e-3
    assert not found.are_equal
    # During a pass, speeds stay relative to the reference speed of its start, although worker a gets faster.
    pace.receive(_make_report("a", 1e-3))
    again = pace.speeds(_stage(), THREADS, frozenset(), found.row_seconds)
    assert again.speeds == pytest.approx({"a": 2.0, "b": 1.0, "c": 20.0})


def test_speeds_in_the_parts_of_a_pass_are_weighted_by_rows() -> None:
    pace = Pace()
    for part, (slow, fast) in {"train": (2e-3, 1e-3), "validation": (2e-3, 4e-3)}.items():
        pace.receive(_make_report("a", slow, part))
        pace.receive(_make_report("b", fast, part))
    speeds = pace.speeds(_stage(), {"a": 1, "b": 1}, frozenset()).speeds
    a, b = 800 * 2 + 100 * 2, 800 * 1 + 100 * 4
    assert speeds["b"] / speeds["a"] == pytest.approx(a / b)


def test_an_unmeasured_worker_has_the_speed_of_similar_workers() -> None:
    pace = Pace()
    pace.receive(_make_report("a", 1e-3))
    pace.receive(_make_report("c", 1e-4))
    speeds = pace.speeds(_stage(), {**THREADS, "d": 1}, frozenset("cd")).speeds
    assert speeds["b"] == pytest.approx(speeds["a"])
    assert speeds["d"] == pytest.approx(speeds["c"])


def test_a_worker_without_work_for_long_is_measured_again() -> None:
    """The assumed speed of an idle worker rises, so that it gets a task, which measures its speed."""
    pace = Pace()
    pace.receive(_make_report("a", 1e-2))
    pace.receive(_make_report("b", 1e-3))

    def speed() -> float:
        found = pace.speeds(_stage(), {"a": 1, "b": 1}, frozenset()).speeds
        return found["a"] / found["b"]

    assert speed() == pytest.approx(0.1)
    for _ in range(100):
        pace.record_pass({"b"}, {"a": 1, "b": 1})
    assert 0.2 < speed() < 0.5
    pace.record_pass({"a", "b"}, {"a": 1, "b": 1})
    assert speed() == pytest.approx(0.1)


def test_a_short_pause_of_a_worker_does_not_count_as_its_speed() -> None:
    reports, key = PaceReports(), ("fit", "estep", "train")
    reported = [reports.averaged(key, pace) for pace in (50.0, 1.0, 1.0, 100.0, 1.0, 1.0, 1.0, 1.0)]
    assert reported[:3] == [None, 1.0, None]  # The first report is ignored, because it includes compilation.
    assert max(pace for pace in reported if pace) < 2.0
    assert [pace for pace in reported if pace][-1] < 1.3


def test_workers_of_steady_speed_report_it_once() -> None:
    reports = PaceReports()
    rng = np.random.default_rng(0)
    reported = [reports.averaged(("fit", "e", "train"), pace) for pace in 1 + 0.1 * rng.random(1000)]
    assert sum(pace is not None for pace in reported) == 1
    assert reports.averaged(("another fit", "e", "train"), 1.0) is None


# -- distribution of tasks to workers of different speed -----------------------------------------------------


class Future:
    status = "pending"

    def release(self) -> None:
        self.status = "released"


@pytest.fixture
def case() -> Any:
    sent: list[Any] = []
    pools = Pools(Link(a=0, b=0, c=0))
    for worker, seconds in (("a", 1e-2), ("b", 1e-2), ("c", 5e-4)):
        pools.pace.receive(_make_report(worker, seconds))
        pools.pace.receive(_make_report(worker, seconds, "validation"))
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
        return Window(THREADS, spans, send, estimate_costs(executor, stage, kept))

    spans = [Span(part, 1, i) for part in ROWS for i in range(RowGrid(ROWS[part], 10, 1).n_nodes(1))]
    return SimpleNamespace(
        pools=pools, sent=sent, futures=futures, spans=spans, on_scheduler=on_scheduler, stage=stage,
        window=window,
    )  # fmt: skip


def test_homogeneous_workers_keep_the_plain_window(case: Any) -> None:
    case.pools.pace = Pace()
    assert not case.window().unequal
    assert case.on_scheduler == []


def test_short_passes_keep_the_plain_window(case: Any) -> None:
    for worker, seconds in (("a", 2e-3), ("b", 2e-3), ("c", 1e-4)):
        for part in ROWS:
            case.pools.pace.receive(_make_report(worker, seconds, part))
    assert not case.pools.speeds(case.stage, THREADS).are_equal
    assert not case.window().unequal


def test_a_pool_sends_all_leaves_and_disables_dasks_stealing(case: Any) -> None:
    kept = frozenset(case.spans[:2])
    for _ in range(2):
        window = case.window(kept)
    assert window.unequal
    assert case.on_scheduler == ["toy_estep_pool"]  # Two passes send one request to the scheduler.
    assert window.seconds == pytest.approx(900 * 1e-2 / 22, rel=0.2)
    window.open()
    assert window.all_sent  # A pass that takes less than a second is sent in one message.
    ((batch, last),) = case.sent
    assert last
    # Spans (row ranges of tasks) that an interrupted pass has finished are never split.
    assert kept <= {span for span, _ in batch}
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


def test_spans_of_a_lost_worker_are_distributed_again(case: Any) -> None:
    case.pools.pace.receive(_make_report("c", 1.0))  # A long pass is sent in several messages.
    case.pools.pace.receive(_make_report("a", 10.0))
    case.pools.pace.receive(_make_report("b", 10.0))
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


def test_a_cancelled_window_sends_nothing(case: Any) -> None:
    case.pools.pace.receive(_make_report("c", 1.0))
    window = case.window()
    assert window.unequal
    window.open()
    window.cancel()
    assert window.poll() == []
    assert {future.status for future in case.futures.values()} == {"released"}


def test_tasks_of_a_pool_have_their_own_name_prefix() -> None:
    """Dask estimates the duration of tasks by this prefix, and does not move tasks with it to other
    workers.
    """
    from dask.utils import key_split

    key = key_of(SimpleNamespace(name="capsule_estep"), POOLED, 6, "s0042", "ab12cd")
    assert key == "capsule_estep_pool-it0007-s0042-ab12cd"
    assert key_split(key) == "capsule_estep_pool"


def test_speeds_within_a_factor_of_two_count_as_equal() -> None:
    assert Speeds({}, {"a": 1.0, "b": 1.9}).are_equal
    assert not Speeds({}, {"a": 1.0, "b": 2.1}).are_equal


# -- reports of the devices that compute --------------------------------------------------------------------


def test_a_mixed_pool_is_reported_once_with_its_tolerance() -> None:
    pools = Pools(Link(a=0, b=1))
    events: list[dict[str, Any]] = []
    callbacks: Any = SimpleNamespace(on_event=events.append)
    pools.compute_on("auto", {"a": 1, "b": 1})
    pools.report_devices(pools.offers({"a": 1, "b": 1}), callbacks)
    pools.pace.receive(_make_report("a", 1.0))
    pools.pace.receive(_make_report("b", 0.1, device="cupy"))
    pools.report_devices(pools.count_computing_workers(), callbacks)
    (event,) = events
    assert event["devices"] == "cpu 1 worker, gpu 1 worker"
    assert "within 1e-05" in event["message"]
    assert "message" not in devices_event({"gpu": 4})
    assert devices_event({"cpu": 1}, {"cpu": 2})["devices"] == "cpu 1 of 2 workers (the others had no work)"
    # One of the two workers has left the cluster.
    assert devices_event({"cpu": 2}, {"cpu": 1})["devices"] == "cpu 2 workers"


@pytest.mark.parametrize(
    ("workers", "all_on_gpu"), [([], False), ([{"GPU": 1.0}], True), ([{"GPU": 1.0}, {}], False)]
)
def test_large_gpu_blocks_need_a_cluster_of_gpus_only(
    workers: list[dict[str, float]], all_on_gpu: bool
) -> None:
    """Large blocks are fast on a GPU, but there are too few large blocks to use CPU workers as well."""
    known = {str(i): {"resources": offered} for i, offered in enumerate(workers)}
    client: Any = SimpleNamespace(scheduler_info=lambda n_workers: {"workers": known})
    assert all_use_gpu(client) is all_on_gpu
