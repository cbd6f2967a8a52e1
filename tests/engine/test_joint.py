"""Joint passes, in which several fits (members) share rows: each member has the sums that it has alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalelatent.contract.block_requirements import BlockRequirements
from scalelatent.contract.learners import Block
from scalelatent.engine.batch_loop import fit_batches
from scalelatent.engine.callbacks import Callback, Callbacks
from scalelatent.engine.checkpoints import EngineStore
from scalelatent.engine.inprocess import InProcessExecutor
from scalelatent.engine.passes import make_stage
from scalelatent.engine.plan import PROCESS_BYTES, Resources
from scalelatent.engine.reading import RowMask
from scalelatent.errors import PlanError
from scalelatent.reductions.moments import SecondMoments
from scalelatent.search.joint import (
    JointReduction,
    MemberReduction,
    MemberRows,
    make_joint_stage,
    make_joint_sums,
)
from scalelatent.search.joint_loop import (
    Member,
    count_array_bytes,
    estimate_peak_bytes,
    fit_joint,
    group_members,
)
from tests.helpers import InterruptAt

HOOKS = ("stage", "pass_end", "checkpoint")

GRID = {"block_rows": 8, "leaf_rows": 16}


def run_alone(toy: SimpleNamespace, learner: Any, rows: dict[str, Any]) -> Any:
    stage = make_stage("toy_estep", learner, rows, "cpu", np.arange(8), **GRID)
    return fit_batches(InProcessExecutor(1), stage, toy.start(), callbacks=Callbacks())


def run_jointly(members: dict[str, Member], jobs: int = 1, log: Any = (), **more: Any) -> Any:
    store = more.get("store")
    return fit_joint(
        InProcessExecutor(jobs, store, 0), "toy", members,
        callbacks=Callbacks(log), classes=np.arange(8), grid=GRID, **more,
    )  # fmt: skip


@given(
    n=st.integers(1, 200),
    start=st.integers(0, 200),
    length=st.integers(0, 200),
    first=st.integers(0, 250),
    rows=st.integers(1, 64),
)
def test_a_mask_and_its_opposite_see_each_row_once(
    n: int, start: int, length: int, first: int, rows: int
) -> None:
    block = Block(np.arange(rows)[:, None], np.arange(rows), np.full(rows, 2.0), first)
    seen = np.zeros(rows)
    inside = RowMask(start, start + length, 1).apply(block)
    if inside is not None:
        assert inside.start == first + inside.x[0, 0]
        np.testing.assert_array_equal(inside.x[:, 0], inside.y)
        seen[inside.x[:, 0]] += 2
    outside = RowMask(start, start + length, 0).apply(block)
    if outside is not None:
        assert outside.x is block.x
        seen += outside.weight
    np.testing.assert_array_equal(seen, 2)
    np.testing.assert_array_equal(block.weight, 2)


@given(
    n=st.integers(1, 700),
    cuts=st.lists(st.tuples(st.integers(0, 700), st.integers(0, 300)), max_size=3),
    jobs=st.integers(1, 3),
)
def test_one_pass_computes_many_reductions(toy: SimpleNamespace, n: int, cuts: list[Any], jobs: int) -> None:
    train, other = toy.rows(n, seed=3), toy.rows(n + 5, p=2, seed=4)
    masks = [RowMask(a, a + b, 0) for a, b in cuts]
    wanted = [(toy.Sums(3), MemberRows(train)), (toy.Sums(2), MemberRows(other))]
    wanted += [(toy.Sums(3), MemberRows(train, mask)) for mask in masks]
    stage, places = make_joint_sums("toy", wanted, "cpu", np.arange(8), **GRID)
    assert set(stage.grids) == {"train", "train2"}
    found = InProcessExecutor(jobs).collect(stage, lambda done, total: None)
    got = [stage.reductions[part].split(found[part])[slot] for part, slot in places]
    for (reduction, part), stats in zip(wanted, got, strict=True):
        dataset = part.dataset
        if part.mask is not None:
            weight = np.ones(len(dataset))
            weight[part.mask.start : part.mask.stop] = 0
            dataset = dataset.with_weight(weight)
        alone = make_stage("toy", {"train": reduction}, {"train": dataset}, "cpu", np.arange(8), **GRID)
        expected = InProcessExecutor(1).collect(alone, lambda done, total: None)["train"]
        np.testing.assert_array_equal(stats.vector, expected.vector)


def test_members_of_every_kind_learn_the_same_as_in_separate_fits(toy: SimpleNamespace) -> None:
    train, held, wide = toy.rows(900, seed=1), toy.rows(130, seed=2), toy.rows(400, p=5, seed=5)
    rows = {"train": MemberRows(train), "validation": MemberRows(held)}
    members = {
        "a": Member(toy.Wander(3, 4), toy.start(), {"train": MemberRows(train)}),
        "b": Member(toy.Wander(3, 7, True), toy.start(), rows),
        "c": Member(toy.Wander(3, 7, True), toy.start(), rows),
        "d": Member(toy.Wander(5, 2), toy.start(), {"train": MemberRows(wide)}),
    }

    class CandidateCounts(Callback):
        shared: list[int] = []  # noqa: RUF012

        def on_pass_end(self, record: dict[str, Any]) -> None:
            self.shared.append(record["candidates"])

    counts = CandidateCounts()
    for jobs in (1, 3):
        found = run_jointly(members, jobs, counts)
        assert list(found) == list(members)
        for key, member in members.items():
            alone = run_alone(toy, member.learner, {k: part.dataset for k, part in member.rows.items()})
            np.testing.assert_array_equal(found[key].state["trail"], alone.state["trail"])
            assert [r["objective"] for r in found[key].history] == [r["objective"] for r in alone.history]
            assert found[key].done
    assert counts.shared == [4, 4, 3, 3, 2, 2, 2] * 2


def test_a_failing_member_does_not_end_the_others(toy: SimpleNamespace) -> None:
    class FailingLearner(toy.Wander):  # type: ignore[misc,name-defined]
        def update(self, state: Any, stats: Any) -> Any:
            if state["iteration"] == 2:
                raise FloatingPointError("too large")
            return super().update(state, stats)

    train = toy.rows(200)
    found = run_jointly(
        {
            "a": Member(toy.Wander(3, 5), toy.start(), {"train": MemberRows(train)}),
            "b": Member(FailingLearner(3, 5), toy.start(), {"train": MemberRows(train)}),
        }
    )
    assert found["b"].error == "too large"
    assert (len(found["b"].history), found["b"].done) == (2, True)
    assert found["a"].error is None
    np.testing.assert_array_equal(
        found["a"].state["trail"], run_alone(toy, toy.Wander(3, 5), {"train": train}).state["trail"]
    )


def test_members_stop_at_a_pass_and_continue_later(toy: SimpleNamespace) -> None:
    train = toy.rows(300)
    members = {str(n): Member(toy.Wander(3, n), toy.start(), {"train": MemberRows(train)}) for n in (2, 6, 9)}
    half = run_jointly(members, until=4)
    assert {k: (o.done, o.state["iteration"]) for k, o in half.items()} == {
        "2": (True, 2), "6": (False, 4), "9": (False, 4),
    }  # fmt: skip
    rest = {k: Member(members[k].learner, half[k].state, members[k].rows) for k in ("6", "9")}
    whole = run_jointly(rest, first=4)
    for n in (6, 9):
        alone = run_alone(toy, toy.Wander(3, n), {"train": train})
        np.testing.assert_array_equal(whole[str(n)].state["trail"], alone.state["trail"])
        assert [r["pass"] for r in whole[str(n)].history] == list(range(5, n + 1))


@pytest.mark.parametrize("at", range(11))
def test_an_interrupted_joint_fit_resumes(toy: SimpleNamespace, tmp_path: Path, at: int) -> None:
    train = toy.rows(300)
    members = {str(n): Member(toy.Wander(3, n), toy.start(), {"train": MemberRows(train)}) for n in (2, 3, 5)}
    store = EngineStore(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run_jointly(members, log=InterruptAt(at, *HOOKS), store=store, checkpoint_passes=2)
    found = run_jointly(members, 2, store=store)
    for n in (2, 3, 5):
        alone = run_alone(toy, toy.Wander(3, n), {"train": train})
        np.testing.assert_array_equal(found[str(n)].state["trail"], alone.state["trail"])
        assert [r["objective"] for r in found[str(n)].history] == [r["objective"] for r in alone.history]
    assert not list(tmp_path.glob("state-*"))
    again = run_jointly(
        members, log=InterruptAt(0, *HOOKS), store=store
    )  # The passes are finished, so the resumed fit reports nothing.
    np.testing.assert_array_equal(again["5"].state["trail"], found["5"].state["trail"])


def test_members_are_grouped_so_that_a_joint_pass_fits_in_memory(toy: SimpleNamespace) -> None:
    train = toy.rows(4000)
    members = {
        str(n): Member(toy.Wander(3, n), toy.start(), {"train": MemberRows(train)}) for n in range(1, 9)
    }
    roomy = Resources(1, 1, 2**34)
    assert group_members("toy", members, roomy, "cpu", "less", **GRID) == [list(members)]
    stage = make_joint_stage("toy", {k: (m.learner, m.rows) for k, m in members.items()}, "cpu", None, **GRID)
    peak = sum(estimate_peak_bytes(stage, roomy, 0).values())
    tight = Resources(1, 1, int((peak - 1000) / 0.6))
    groups = group_members("toy", members, tight, "cpu", "less", **GRID)
    assert [key for group in groups for key in group] == list(members)
    assert len(groups) == 2
    with pytest.raises(PlanError, match="toy would need"):
        group_members("toy", members, Resources(1, 1, PROCESS_BYTES), "cpu", "less", **GRID)


def test_the_same_array_counts_once_in_the_memory_plan() -> None:
    a = np.zeros((10, 10))
    assert count_array_bytes([a, {"x": a}, a[:5]]) == 800 + 400


def test_uint8_rows_are_converted_to_float32_for_all_members() -> None:
    calls: list[np.dtype[Any]] = []

    class Backend:
        def asarray(self, a: np.ndarray, dtype: Any, name: str | None = None) -> np.ndarray:
            return a.astype(dtype)

    class DtypeRecorder:
        requirements = BlockRequirements()

        def layout(self) -> Any:
            from scalelatent.contract.stats import Layout

            return Layout((("n", ()),))

        def prepare(self, state: Any, backend: Any) -> None:
            return None

        def accumulate(self, prepared: Any, block: Block, stats: Any) -> None:
            calls.append(block.x.dtype)

    from scalelatent.contract.stats import Stats

    joint = JointReduction(tuple(MemberReduction(str(i), "train", DtypeRecorder(), None) for i in range(2)))
    for dtype, seen in ((np.uint8, np.float32), (np.float64, np.float64), (np.int32, np.int32)):
        calls.clear()
        block = Block(np.ones((3, 2), dtype), None, None, 0)
        joint.accumulate(joint.prepare(None, Backend()), block, Stats.zeros(joint.layout()))
        assert calls == [seen, seen]


def test_a_worker_keeps_one_stage_of_a_fit(toy: SimpleNamespace, tmp_path: Path) -> None:
    """When a member ends, a new stage (description of a pass) follows; a worker keeps only the newest."""
    from scalelatent.engine.dask import pass_tasks as tasks

    rows = toy.rows(40).save(tmp_path / "rows")
    store = EngineStore(tmp_path / "run")
    for n in (3, 2, 1):
        stage = replace(toy.stage(rows), name=f"search-{n}_estep", work={"train": SecondMoments(3)})
        store.save_stage(stage)
        assert tasks.load_stage(store.ref, stage.name).name == stage.name
        for iteration in range(3):
            store.save_state(stage.name, iteration, {"shift": float(iteration)}, durable=False)
            state = tasks.task_params(store.ref, stage.name, iteration).state
            assert state == {"shift": float(iteration)}
    own = {slot: key for slot, (key, _) in tasks._recent._kept.items() if slot[0] == store.ref}
    # The worker keeps the stage, but no state (parameters), which each task brings along.
    assert own == {(store.ref, "stage"): ("search-1_estep", ())}
    tasks._recent.forget(store.ref)
    assert not [slot for slot in tasks._recent._kept if slot[0] == store.ref]


def test_members_with_one_form_of_blocks_share_the_rows_they_read(toy: SimpleNamespace) -> None:
    """Members (fits of a joint pass) that want the same form of blocks (dense or CSR) share each read.

    Each of the two amounts of scratch memory is the largest that any member needs.
    """

    class NeedsScratchMemory(toy.Sums):
        requirements = BlockRequirements(scratch=(5, 1))

    class NeedsMoreThreadMemory(toy.Sums):
        requirements = BlockRequirements(scratch=(2, 3))

    rows = MemberRows(toy.rows(200))
    wanted = [(work(3), rows) for work in (toy.Sums, NeedsScratchMemory, NeedsMoreThreadMemory)]
    stage, _ = make_joint_sums("sums", wanted, "cpu", None, block_rows=8, leaf_rows=16)
    assert [reduction.requirements for reduction in stage.reductions.values()] == [
        BlockRequirements(scratch=(5, 3))
    ]


class BlockRecorder:
    """Reduction that records (first row, number of rows and of labels, sum of weights) of each block."""

    def __init__(self, size: int) -> None:
        self.requirements, self.seen = BlockRequirements(block_rows=size), []  # type: ignore[var-annotated]

    def layout(self) -> Any:
        from scalelatent.contract.stats import Layout

        return Layout((("n", ()),))

    def flops_per_row(self) -> float:
        return 1.0

    def prepare(self, state: Any, backend: Any) -> None:
        return None

    def accumulate(self, prepared: Any, block: Block, stats: Any) -> None:
        assert block.y is not None
        weight = len(block.x) if block.weight is None else block.weight.sum()
        self.seen.append((block.start, len(block.x), len(block.y), float(weight)))


def test_members_with_different_block_sizes_share_the_rows_they_read(toy: SimpleNamespace) -> None:
    """Members (fits of a joint pass) share each read, which has the largest block size of all.

    Each member gets blocks of its own size.
    """
    rows, classes = toy.rows(100), np.arange(8)
    for mask in (None, RowMask(30, 50, 0)):
        alone, together = [BlockRecorder(n) for n in (4, 16, 8)], [BlockRecorder(n) for n in (4, 16, 8)]
        for work in alone:
            stage, _ = make_joint_sums("alone", [(work, MemberRows(rows, mask))], "cpu", classes)
            InProcessExecutor(1).collect(stage, lambda *_: None)
        wanted = [(work, MemberRows(rows, mask)) for work in together]
        stage, places = make_joint_sums("joint", wanted, "cpu", classes)
        assert [name for name, _ in places] == ["train"] * 3
        assert stage.grids["train"].block_rows == 16
        InProcessExecutor(1).collect(stage, lambda *_: None)
        assert [sorted(work.seen) for work in together] == [sorted(work.seen) for work in alone]
        assert {n for _, n, *_ in alone[0].seen} == {4}
