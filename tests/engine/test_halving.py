"""If a GPU runs out of memory, blocks are split in halves.

No row counts twice, and one event reports the split. Blocks too short to split raise the memory error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scalelatent.contract.block_requirements import BlockRequirements
from scalelatent.contract.learners import Block
from scalelatent.engine import inprocess
from scalelatent.engine.backend import DeviceMemoryError, HostBackend
from scalelatent.engine.cache import PieceCache
from scalelatent.engine.halving import LEAST_ROWS, apply_block, fill_block, split_rows
from scalelatent.engine.inprocess import InProcessExecutor
from scalelatent.engine.mapwrite import map_to_array
from scalelatent.engine.passes import Span, make_stage
from scalelatent.engine.reading import StopEvent
from scalelatent.errors import RunError
from scalelatent.kernels.sparse_rows import CsrRows
from tests.helpers import HookLog


class SmallGpuBackend(HostBackend):
    """Stand-in for the backend of a GPU that has memory for blocks of at most ``room`` rows.

    The reductions and maps of this file raise a memory error for more; ``name_error`` translates MemoryError.
    """

    gpu_errors = (DeviceMemoryError, MemoryError)
    device = "0 (stand-in)"

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room, self.released = room, 0

    def release_memory(self) -> None:
        self.released += 1

    def name_error(self, error: Exception) -> Exception:
        return DeviceMemoryError(f"no memory for a block: {error}")


class InterruptedSums:
    """Reduction that has already added a block to its sums when the backend's memory runs out."""

    def __init__(self, sums: Any) -> None:
        self.sums, self.seen = sums, list[int]()
        self.requirements, self.layout, self.flops_per_row = (
            sums.requirements,
            sums.layout,
            sums.flops_per_row,
        )

    def prepare(self, state: Any, backend: Any) -> Any:
        return backend, self.sums.prepare(state, backend)

    def accumulate(self, prepared: Any, block: Block, stats: Any) -> None:
        backend, inner = prepared
        self.seen.append(len(block.x))
        self.sums.accumulate(inner, block, stats)
        room = getattr(backend, "room", 10**9)
        if len(block.x) > room:
            raise MemoryError(f"{len(block.x)} rows")


@pytest.fixture
def run(toy: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(room: int | None, rows: int = 3000, block: int = 512, threads: int = 1) -> Any:
        work, log, cards = InterruptedSums(toy.stage(toy.rows(8)).reductions["train"]), HookLog(), list[Any]()

        def make(device: str, slot: int = 0) -> Any:
            cards.append(HostBackend() if room is None else SmallGpuBackend(room))
            return cards[-1]

        monkeypatch.setattr(inprocess, "make_backend", make)
        stage = make_stage(
            "toy_sums",
            {"train": work},
            {"train": toy.rows(rows)},
            "cpu",
            block_rows=block,
            leaf_rows=2 * block,
        )
        executor = InProcessExecutor(threads, cache=PieceCache(0), callbacks=log)
        out = [executor.collect(stage, lambda done, total: None)["train"].vector for _ in range(2)]
        return SimpleNamespace(vectors=out, seen=work.seen, events=log.infos("event"), cards=cards)

    return run


@pytest.mark.parametrize(("room", "limit"), [(511, 256), (256, 256), (255, 128), (LEAST_ROWS, LEAST_ROWS)])
def test_blocks_are_halved_until_they_fit_and_no_row_counts_twice(run: Any, room: int, limit: int) -> None:
    whole, cut = run(None), run(room)
    np.testing.assert_allclose(cut.vectors[0], whole.vectors[0], rtol=1e-12)
    (card,) = cut.cards
    assert card.row_limits == {"toy_sums/train": limit}
    # The second pass tries no block above the limit, because the backend remembers the limit of the first.
    tries = [n for n in cut.seen if n > limit]
    assert len(tries) == card.released == int(np.log2(512 // limit))
    np.testing.assert_array_equal(*cut.vectors)


def test_repeated_splits_are_reported_in_one_event(run: Any) -> None:
    (event,) = run(200).events
    assert (event["event"], event["stage"], event["part"], event["rows"]) == (
        "blocks_cut", "toy_sums", "train", 128,
    )  # fmt: skip
    assert "block_rows = 128" in event["message"]


def test_threads_with_equal_gpus_give_equal_bits(run: Any) -> None:
    """Each of two threads has a GPU; the result does not depend on which thread computes a leaf (fixed
    range of rows).
    """
    one, two = run(200), run(200, threads=2)
    for a, b in zip(one.vectors, two.vectors, strict=True):
        np.testing.assert_array_equal(a, b)


def test_blocks_that_are_too_short_to_split_raise_the_memory_error(run: Any) -> None:
    with pytest.raises(DeviceMemoryError, match="no memory for a block: 64 rows"):
        run(LEAST_ROWS - 1)


def test_blocks_are_not_split_if_host_memory_runs_out(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SmallGpuBackend, "gpu_errors", ())
    with pytest.raises(RunError, match="out of memory on rows of the given arrays: 512 rows"):
        run(100)


def test_parts_of_a_split_block_keep_labels_weights_and_rows() -> None:
    rng = np.random.default_rng(0)
    dense = (rng.random((10, 4)) < 0.5) * 1.0
    counts = np.concatenate([[0], np.cumsum((dense != 0).sum(axis=1))])
    sparse = CsrRows(dense[dense != 0], np.nonzero(dense)[1], counts, dense.shape)
    for x in (dense, sparse):
        block = Block(x, np.arange(10), np.arange(10.0), 70, np.arange(10)[::-1], 3)
        parts = list(split_rows(block, 4))
        assert [len(part.x) for part in parts] == [4, 4, 2]
        rows = [part.x if isinstance(part.x, np.ndarray) else part.x.to_dense() for part in parts]
        np.testing.assert_array_equal(np.concatenate(rows), dense)
        for name in ("y", "weight", "rows"):
            np.testing.assert_array_equal(
                np.concatenate([getattr(part, name) for part in parts]), getattr(block, name)
            )
        assert [part.start for part in parts] == [70, 74, 78]
        assert {part.epoch for part in parts} == {3}
        assert list(split_rows(block, None)) == [block]


def test_blocks_of_a_map_are_split(toy: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    from scalelatent.engine import mapwrite

    card = SmallGpuBackend(100)

    class Doubled:
        requirements = BlockRequirements()

        def output(self) -> tuple[tuple[int, ...], str]:
            return (toy.rows(8).n_features,), "f8"

        def prepare(self, backend: Any) -> Any:
            return backend

        def apply(self, backend: Any, block: Block) -> np.ndarray:
            if len(block.x) > backend.room:
                raise DeviceMemoryError("full")
            return 2.0 * block.x

    monkeypatch.setattr(mapwrite, "make_backend", lambda device, slot=0: card)
    rows = toy.rows(700)
    np.testing.assert_array_equal(map_to_array(Doubled(), rows, "cpu", 1), 2.0 * rows.read_x(0, 700))
    assert max(card.row_limits.values()) <= 100
    card.room = 1
    with pytest.raises(DeviceMemoryError, match="full"):
        apply_block(card, "map", Doubled(), card, Block(rows.read_x(0, 400), None, None, 0))


class StagedMap:
    """Row map that writes its output column by column; column i has i times the first feature of a row.

    Memory runs out in the last column of a block that is too large.
    """

    requirements, last = BlockRequirements(), None

    def __init__(self, width: int, first: int = 0) -> None:
        self.width, self.first, self.seen = width, first, list[tuple[int, int]]()

    def stages(self) -> tuple[StagedMap]:
        return (self,)

    def output(self) -> tuple[tuple[int, ...], str]:
        return (self.width,), "f8"

    def row_bytes(self) -> int:
        return 8

    column_group = 1

    def select_columns(self, first: int, stop: int) -> StagedMap:
        part = StagedMap(stop - first, self.first + first)
        part.seen = self.seen
        return part

    def prepare(self, backend: Any) -> Any:
        return backend

    def apply(self, backend: Any, block: Block) -> np.ndarray:
        raise NotImplementedError

    def fill(self, backend: Any, block: Block, out: np.ndarray) -> Iterator[None]:
        self.seen.append((block.start, len(block.x)))
        for i in range(self.width):
            if len(block.x) > backend.room and i == self.width - 1:
                raise MemoryError(f"{len(block.x)} rows")
            out[:, i] = (self.first + i) * block.x[:, 0]
            yield


def test_blocks_of_a_map_in_stages_are_split(
    toy: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from scalelatent.engine import mapwrite

    rows = toy.rows(700)
    want = rows.read_x(0, 700)[:, :1] * np.arange(3)
    card = SmallGpuBackend(100)
    monkeypatch.setattr(mapwrite, "make_backend", lambda device, slot=0: card)
    np.testing.assert_array_equal(map_to_array(StagedMap(3), rows, "cpu", 1), want)
    assert card.row_limits == {"map": 88}
    assert card.released == 3
    # A map that writes a dataset reports the split, too. It does not compute columns again that were finished
    # before memory ran out.
    monkeypatch.setattr(inprocess, "make_backend", lambda device, slot=0: SmallGpuBackend(200))
    log, coder = HookLog(), StagedMap(3)
    executor = InProcessExecutor(1, cache=PieceCache(0), callbacks=log)
    task = mapwrite.start_map("toy_codes", rows, coder, tmp_path / "out", "cpu", shard_rows=350)
    written = mapwrite.map_rows(executor, task, lambda done, total: None)
    np.testing.assert_array_equal(written.read_x(0, 700), want)
    assert coder.seen == [(0, 350), (0, 175), (175, 175), (350, 175), (525, 175)]
    (event,) = log.infos("event")
    assert (event["event"], event["stage"], event["part"], event["rows"]) == (
        "blocks_cut", "toy_codes", "", 175,
    )  # fmt: skip
    assert "it computes 175 rows of toy_codes at a time" in event["message"]


def test_a_map_in_stages_resumes_where_memory_ran_out() -> None:
    """If memory runs out within a block, its finished rows stay.

    Blocks that are too short to split raise an error.
    """
    card, coder, out = SmallGpuBackend(400), StagedMap(2), np.zeros((400, 2))
    card.row_limits["map"] = 200
    block = Block(np.arange(400.0)[:, None], None, None, 30)
    filling = fill_block(card, "map", coder, card, block, out)
    for _ in range(3):
        next(filling)
    card.room = 120
    for _ in filling:
        pass
    np.testing.assert_array_equal(out, block.x * [0, 1])
    assert coder.seen == [(30, 200), (230, 200), (230, 100), (330, 100)]
    card.room = 1
    with pytest.raises(DeviceMemoryError, match="no memory for a block: 100 rows"):
        list(fill_block(card, "map", coder, card, replace(block, x=block.x[:100]), out[:100]))


def test_codes_of_a_bootstrap_network_are_the_same_from_split_blocks() -> None:
    import scalelatent as sl

    x = np.random.default_rng(0).integers(0, 9, (300, 12)).astype("u1")
    model = sl.MultilayerBootstrapNetwork(
        decay=0.5, n_clusterings=7, n_classes=3, random_state=0, n_jobs=1
    ).fit(x)
    for what in ("output", "codes"):
        network = model._row_map(what)
        wanted = network.apply(network.prepare(HostBackend()), Block(x, None, None, 0))
        card, out = SmallGpuBackend(10**9), np.zeros_like(wanted)
        card.row_limits["map"] = 67
        for _ in fill_block(card, "map", network, network.prepare(card), Block(x, None, None, 0), out):
            pass
        np.testing.assert_array_equal(out, wanted)


def test_a_span_continues_reading_after_a_split(toy: SimpleNamespace) -> None:
    """The rows of a split leaf (a fixed range of rows) are read again, and the next leaf starts at its first
    row.
    """
    from scalelatent.engine.passes import PassContext

    work = InterruptedSums(toy.stage(toy.rows(8)).reductions["train"])
    data = toy.rows(1000)
    stage = make_stage("toy_sums", {"train": work}, {"train": data}, "cpu", block_rows=128, leaf_rows=256)
    whole, cut = (
        PassContext(stage, None, backend, None).run_span(Span("train", 1, 0), StopEvent())
        for backend in (HostBackend(), SmallGpuBackend(100))
    )
    np.testing.assert_allclose(cut[:-1], whole[:-1], rtol=1e-12)
    assert cut[-2] == whole[-2] == 1000
