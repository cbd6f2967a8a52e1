"""The memory of rows is used again when no reference to it is left, and never before."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import scalelatent as sl
from scalelatent.data import create_dataset
from scalelatent.data.read.chunks import MAX_FREE, RecyclingAllocator

ROWS, WIDTH, CHUNK = 8 * 1024, 64, 1024  # A chunk has 256 KiB.
F4 = np.dtype("f4")


def write_rows(tmp_path) -> tuple[np.ndarray, sl.Dataset]:
    x = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
    writer = create_dataset(tmp_path / "d.zarr", ROWS, (WIDTH,), "f4", chunk_rows=CHUNK, shard_rows=4 * CHUNK)
    for shard in range(writer.n_shards):
        a, b = writer.shard_bounds(shard)
        writer.write_shard(shard, x[a:b])
    return x, writer.finalize()


def test_memory_of_deleted_rows_is_reused(tmp_path):
    x, ds = write_rows(tmp_path)
    addresses = set()
    for a in range(0, ROWS, CHUNK):
        rows = ds.read_x(a, a + CHUNK)
        np.testing.assert_array_equal(rows, x[a : a + CHUNK])
        addresses.add(rows.ctypes.data)
        del rows
    assert len(addresses) == 1


def test_rows_stay_while_a_view_of_them_exists(tmp_path):
    x, ds = write_rows(tmp_path)
    starts = range(0, ROWS, CHUNK)
    rows = ds.read_x(0, CHUNK)
    held = {
        "view": rows[3:5],
        "column": rows.T[1],
        "buffer": memoryview(rows[7]),
        "bytes": rows.view(np.uint8)[9:],
    }
    wanted = {name: np.array(view) for name, view in held.items()}
    for last in list(held):
        for a in starts:
            np.testing.assert_array_equal(ds.read_x(a, a + CHUNK), x[a : a + CHUNK])
        for name, view in held.items():
            np.testing.assert_array_equal(np.asarray(view), wanted[name])
        del held[last]
        if last == "view":
            del rows


def test_threads_never_share_the_memory_of_rows(tmp_path):
    x, ds = write_rows(tmp_path)
    wrong: list[int] = []

    def read(seed: int) -> None:
        rng, held = np.random.default_rng(seed), []
        for _ in range(200):
            a = int(rng.integers(0, ROWS // CHUNK)) * CHUNK
            held.append((a, ds.read_x(a, a + CHUNK)))
            if len(held) > rng.integers(1, 6):
                b, rows = held.pop(int(rng.integers(0, len(held))))
                if not np.array_equal(rows, x[b : b + CHUNK]):
                    wrong.append(b)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read, range(4)))  # ``list`` raises the first error of a thread.
    assert not wrong


def test_little_memory_is_kept_and_none_is_pickled(tmp_path):
    _, ds = write_rows(tmp_path)
    held = [ds.read_x(a, a + CHUNK) for a in range(0, ROWS, CHUNK)]
    del held
    memory = ds._columns.x._memory
    assert len(memory._free) == MAX_FREE
    assert len(pickle.dumps(memory)) < 1000
    # A request for another size releases the kept memory blocks of the old size.
    again = memory.empty((2 * CHUNK, WIDTH), F4)
    assert again.shape == (2 * CHUNK, WIDTH)
    assert not memory._free


def test_recycled_arrays_have_the_shape_and_dtype_of_numpys_empty():
    memory = RecyclingAllocator()
    for shape in ((0, 3), (7,), (2**17, 4), (2**23, 4), ()):
        array = memory.empty(shape, F4)
        assert (array.shape, array.dtype) == (shape, F4)
        assert array.flags.c_contiguous
        assert array.flags.writeable
