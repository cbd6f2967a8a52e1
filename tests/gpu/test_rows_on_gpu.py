"""Rows of passes stay on the GPU, or a thread copies them there while the GPU computes on earlier rows."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import scalelatent as sl
from scalelatent.contract.learners import Block
from scalelatent.engine import backend as backends
from scalelatent.engine import mapwrite
from scalelatent.engine.cache import PieceCache
from scalelatent.engine.passes import PassContext, Span, make_stage
from scalelatent.engine.reading import StopEvent, Stopped, iter_blocks
from scalelatent.errors import DataError
from scalelatent.models.capsule.model.em import CapsulePass, initial_state
from scalelatent.models.capsule.model.members import build_members

N, P, BLOCK = 20_000, 6, 2048
BLOCKS = -(-N // BLOCK)


class Passes:
    """Passes of a capsule model over 20,000 rows in ten blocks, with a record of all copies of rows."""

    def __init__(self, fake, monkeypatch, stored="f4", stored_at=None) -> None:
        members, rng = build_members("multiclass", 4, 3), np.random.default_rng(0)
        self.x = (rng.random((N, P)) * 255).astype(stored)
        data = sl.Dataset.from_arrays(self.x, np.arange(N, dtype=np.int32) % 4)
        if stored_at is not None:
            data.save(str(stored_at))
        dataset = data if stored_at is None else sl.open_dataset(str(stored_at))
        work = CapsulePass(members, P, np.array([0.0]), None, train=True)
        self.state = initial_state(rng.normal(size=(members.total_dim, P)) / 1000, 1)
        self.stage = make_stage("toy", {"train": work}, {"train": dataset}, "gpu", data.classes,
                                block_rows=BLOCK)  # fmt: skip
        self.backend, self.fake = backends.CupyBackend(), fake
        self.copies: list[tuple[int, int]] = []  # Each copy of rows: (bytes, pointer of its stream).
        copy = fake.MemoryPointer.copy_from_host_async

        def count(pointer, mem, size, stream=None):
            if size % (P * self.x.itemsize) == 0 and size != 12 * BLOCK:
                self.copies.append((size, stream.ptr))
            copy(pointer, mem, size, stream)

        monkeypatch.setattr(fake.MemoryPointer, "copy_from_host_async", count)

    def run(self, stop: StopEvent | None = None) -> tuple[bytes, int]:
        """Run a pass; return its sums as bytes, and the number of bytes that were copied to the GPU."""
        self.copies.clear()
        self.fake.WAITS.clear()
        self.fake.COPIED.update(set=0, get=0)
        context = PassContext(self.stage, self.state, self.backend, PieceCache(0))
        span = Span("train", self.stage.grids["train"].depth, 0)
        vector = context.run_span(span, stop or StopEvent())
        return vector[:-2].tobytes(), self.fake.COPIED["set"]


# Lower and upper bound of the bytes that a pass copies besides rows: class and weight of a row have 12 bytes,
# and the weights of the model have less than 5000 bytes.
OTHER_BYTES = 12 * N, 12 * N + 5000


@pytest.mark.parametrize("stored", ["f4", "u1"])
@pytest.mark.parametrize("in_memory", [True, False])
def test_rows_stay_on_the_gpu_between_passes(fake, monkeypatch, tmp_path, stored, in_memory):
    passes = Passes(fake, monkeypatch, stored, None if in_memory else tmp_path / "rows.zarr")
    found = [passes.run() for _ in range(3)]
    assert found[1] == found[2]
    assert OTHER_BYTES[0] <= found[1][1] < OTHER_BYTES[1]
    assert found[0][0] == found[1][0]
    # Only the first pass copies rows, each row once.
    assert 0 <= found[0][1] - found[1][1] - passes.x.nbytes < 10**5
    assert passes.backend.kept_rows.used == passes.x.nbytes + 4 * N
    passes.backend.release_memory()
    assert (passes.backend.kept_rows.used, passes.backend.kept_rows.limit) == (0, 0)


@pytest.mark.parametrize("stored", ["f4", "u1"])
def test_other_rows_are_copied_on_another_stream(fake, monkeypatch, stored):
    """Rows that do not stay on the GPU give the same bits, and the host waits once per block, for sums."""
    kept = Passes(fake, monkeypatch, stored).run()[0]
    monkeypatch.setattr(backends, "ROWS_SHARE", 0.0)
    # A stripe is the part of a block that one thread copies; with 2048 bytes, several threads copy a block.
    monkeypatch.setattr(backends, "STRIPE_BYTES", BLOCK)
    passes = Passes(fake, monkeypatch, stored)
    assert passes.run()[0] == kept  # The first pass also copies tables, so its bytes are not compared.
    for _ in range(2):
        sums, copied = passes.run()
        assert sums == kept
        assert OTHER_BYTES[0] <= copied - passes.x.nbytes < OTHER_BYTES[1]
        assert sum(size for size, _ in passes.copies) == passes.x.nbytes
        assert {stream for _, stream in passes.copies} == {passes.backend._copy_stream.ptr}
        assert [stream == passes.backend.stream.ptr for stream in fake.WAITS] == BLOCKS * [True]
    assert passes.backend.kept_rows.used == 0


def test_copies_do_not_wait_for_the_computation(fake, monkeypatch):
    monkeypatch.setattr(backends, "ROWS_SHARE", 0.0)
    passes = Passes(fake, monkeypatch)
    want, accumulate, copy_ahead = passes.run()[0], CapsulePass.accumulate, backends.CupyBackend.copy_ahead
    copied, computing = [threading.Event() for _ in range(BLOCKS)], []

    def compute(self, prepared, block, stats):
        number = block.start // BLOCK
        computing.append(number)
        # While a block is computed, the rows of the next block are copied, and no rows after those.
        assert copied[min(number + 1, BLOCKS - 1)].wait(30)
        assert not any(event.is_set() for event in copied[number + 2 :])
        accumulate(self, prepared, block, stats)

    def copy(self, owner, number, *more):
        copy_ahead(self, owner, number, *more)
        copied[number].set()

    monkeypatch.setattr(CapsulePass, "accumulate", compute)
    monkeypatch.setattr(backends.CupyBackend, "copy_ahead", copy)
    assert passes.run()[0] == want
    assert computing == list(range(BLOCKS))


def test_a_gpu_keeps_the_rows_that_fit(fake, monkeypatch):
    """The GPU has memory for three blocks: they are copied once, the other blocks in each pass."""
    want = Passes(fake, monkeypatch).run()[0]
    row_bytes = 4 * P + 4
    monkeypatch.setattr(backends, "ROWS_SHARE", 3.5 * BLOCK * row_bytes / 2**30)
    fake.POOL.limit = 2**30
    passes = Passes(fake, monkeypatch)
    monkeypatch.setattr(backends, "_ON_DEVICE", {0: {passes.backend}})
    for missing in (N, N - 3 * BLOCK, N - 3 * BLOCK):
        assert passes.run()[0] == want
        assert sum(size for size, _ in passes.copies) == 4 * P * missing
        assert passes.backend.kept_rows.used == 3 * BLOCK * row_bytes


def test_rows_are_copied_from_pageable_memory_if_none_can_be_locked(fake, monkeypatch):
    want = Passes(fake, monkeypatch).run()[0]
    monkeypatch.setattr(backends, "ROWS_SHARE", 0.0)
    passes = Passes(fake, monkeypatch)

    def fail(size):
        raise MemoryError(size)

    monkeypatch.setattr(fake.cuda, "alloc_pinned_memory", fail)
    assert passes.run()[0] == want
    assert passes.copies == []


def test_a_cancelled_pass_stops_the_copies(fake, monkeypatch):
    monkeypatch.setattr(backends, "ROWS_SHARE", 0.0)
    passes = Passes(fake, monkeypatch)
    want, accumulate, stop = passes.run()[0], CapsulePass.accumulate, StopEvent()

    def compute(self, prepared, block, stats):
        accumulate(self, prepared, block, stats)
        if block.start == BLOCK:
            stop.set()

    with monkeypatch.context() as patch:
        patch.setattr(CapsulePass, "accumulate", compute)
        with pytest.raises(Stopped):
            passes.run(stop)
    for thread in threading.enumerate():
        if thread.name.startswith("scalelatent-copy"):
            thread.join(30)
            assert not thread.is_alive()
    assert passes.run()[0] == want


def test_a_thread_of_a_cancelled_pass_copies_nothing(fake, monkeypatch):
    """If a read of a cancelled pass returns after the next pass has started, its rows are not copied."""
    passes = Passes(fake, monkeypatch)
    backend, block = passes.backend, Block(passes.x, None, None, 0)
    backend.start_pass()
    cancelled, owner = backend.begin_copies(), backend.begin_copies()
    with ThreadPoolExecutor(2) as pool:
        backend.copy_ahead(cancelled, 0, "key", block, pool)
        assert passes.copies == []
        backend.copy_ahead(owner, 0, "key", block, pool)
    assert [size for size, _ in passes.copies] == [passes.x.nbytes]


@pytest.fixture(params=["capsule", "mixture"])
def mapped(request, fake, emulate, monkeypatch):
    """Return a fitted model, its rows, and a list of (bytes, stream) of all copies of its 16 blocks."""
    x = np.random.default_rng(0).random((16 * BLOCK, 12)).astype("f4")
    options = {"random_state": 0, "n_jobs": 1, "device": "cpu", "max_iter": 2}
    if request.param == "capsule":
        model = sl.CapsuleRegression(capsule_dim=2, **options).fit(x, np.arange(len(x)) % 3)
    else:
        fake.RawModule.library = emulate("linear_mixture")
        model = sl.LinearMixture(n_components=2, n_dims=1, **options).fit(x)
    monkeypatch.setattr(mapwrite, "choose_map_block_rows", lambda *_: BLOCK)
    copies, copy = [], fake.MemoryPointer.copy_from_host_async

    def count(pointer, mem, size, stream=None):
        copies.append((size, stream.ptr))
        copy(pointer, mem, size, stream)

    monkeypatch.setattr(fake.MemoryPointer, "copy_from_host_async", count)
    return model.set_params(device="gpu"), x, copies


@pytest.mark.parametrize("written", [False, True])
def test_maps_copy_the_next_block_on_another_stream(mapped, fake, monkeypatch, tmp_path, written):
    """Copies on two streams give the results of one stream, with the same copies and number of waits."""
    model, x, copies = mapped

    def transform(name):
        copies.clear()
        fake.WAITS.clear()
        out = model.transform(x, out=tmp_path / name) if written else model.transform(x)
        return (out.read_x(0, len(x)) if written else out), len(fake.WAITS), list(copies)

    found, waits, ahead = transform("ahead.zarr")
    assert [size for size, _ in ahead] == 16 * [x.nbytes // 16]
    assert not {stream for _, stream in ahead} & set(fake.WAITS)
    monkeypatch.setattr(mapwrite, "iter_gpu_blocks", lambda *args, **_: iter_blocks(*args[:3]))
    expected, earlier_waits, before = transform("before.zarr")
    assert [size for size, _ in before] == 16 * [x.nbytes // 16]
    assert {stream for _, stream in before} <= set(fake.WAITS)
    np.testing.assert_array_equal(found, expected)
    assert waits == earlier_waits


def test_a_map_of_one_block_copies_no_other(mapped, fake):
    model, x, copies = mapped
    model.transform(x[:BLOCK])
    assert {stream for _, stream in copies} <= set(fake.WAITS)


def test_a_map_on_the_gpu_names_a_bad_row(mapped):
    model, x, _ = mapped
    bad = sl.Dataset.from_arrays(x.copy())
    bad.read_x(0, len(x))[5000, 3] = np.nan
    with pytest.raises(DataError, match="row 5000, feature 3"):
        model.transform(bad)
