"""CSR rows in the engine are read as dense blocks, one at a time, or as CSR blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from scalelatent.contract.block_requirements import BlockRequirements
from scalelatent.contract.learners import Block
from scalelatent.contract.stats import Layout, Stats
from scalelatent.data import Dataset
from scalelatent.engine.cache import PieceCache
from scalelatent.engine.grid import RowGrid
from scalelatent.engine.inprocess import InProcessExecutor
from scalelatent.engine.passes import Stage
from scalelatent.engine.reading import Meter, Reader, StopEvent, iter_blocks
from scalelatent.kernels.sparse_rows import CsrRows

X = sp.random_array((500, 30), density=0.1, rng=np.random.default_rng(0), format="csr").astype("f4")
DENSE = X.toarray()


class ColumnSums:
    """Reduction of column sums that also records the types and the largest size of its blocks."""

    def __init__(self, csr: bool = False) -> None:
        self.requirements = BlockRequirements(csr=csr)
        self.kinds: set[type] = set()
        self.largest = 0

    def layout(self) -> Layout:
        return Layout((("sums", (30,)),))

    def flops_per_row(self) -> float:
        return 30.0

    def prepare(self, state: Any, backend: Any) -> Any:
        return None

    def accumulate(self, prepared: Any, block: Block, stats: Stats) -> None:
        self.kinds.add(type(block.x))
        self.largest = max(self.largest, len(block.x))
        x = block.x.to_dense() if isinstance(block.x, CsrRows) else block.x
        assert x.dtype == np.float32
        stats["sums"][:] += x.sum(axis=0, dtype=np.float64)


def write_rows(tmp_path: Path, x: Any, **layout: Any) -> Dataset:
    return Dataset.from_arrays(x).save(tmp_path / "ds", overwrite=True, **layout)


@pytest.mark.parametrize("shard", [None, 7, 64, 500])
@pytest.mark.parametrize("csr", [True, False])
def test_blocks_equal_the_rows_for_any_shard_size(csr: bool, shard: int | None, tmp_path: Path) -> None:
    ds = Dataset.from_arrays(X) if shard is None else write_rows(tmp_path, X, shard_rows=shard)
    reader = Reader(ds, None, Meter(), requirements=BlockRequirements(csr=csr))
    blocks = [(a, min(a + 32, 500)) for a in range(0, 500, 32)]
    for (a, b), block in zip(blocks, iter_blocks(reader, blocks, StopEvent()), strict=True):
        assert isinstance(block.x, CsrRows) == csr
        rows = block.x.to_dense() if csr else block.x
        np.testing.assert_array_equal(rows, DENSE[a:b])
        assert rows.flags.c_contiguous
        assert len(block.x) == b - a


@pytest.mark.parametrize("accepts", [False, True])
def test_a_pass_over_csr_rows_gives_the_bits_of_dense_rows(accepts: bool, tmp_path: Path) -> None:
    grid = {"train": RowGrid(500, 16, 2)}
    work = ColumnSums(accepts)
    csr = write_rows(tmp_path, X, shard_rows=64)
    stage = Stage("sums", {"train": work}, {"train": csr}, grid, "cpu")
    cache = PieceCache(10**6)
    found = InProcessExecutor(2, cache=cache).collect(stage, lambda *_: None)["train"].vector
    dense = Stage("sums", {"train": ColumnSums()}, {"train": Dataset.from_arrays(DENSE)}, grid, "cpu")
    wanted = InProcessExecutor(1).collect(dense, lambda *_: None)["train"].vector
    assert (found == wanted).all()
    assert work.kinds == {CsrRows if accepts else np.ndarray}
    assert work.largest == 16  # A block has 16 rows, and one block at a time becomes dense.
    # The cache counts the bytes of CSR rows, not those of dense rows.
    assert 0 < cache.used < X.nnz * 8 + 500 * 8 + 8 * 20


def test_csr_rows_slice_join_and_densify() -> None:
    rows = CsrRows.from_scipy(X)
    assert rows.nbytes == X.data.nbytes + X.indices.nbytes + X.indptr.nbytes
    np.testing.assert_array_equal(rows[100:200].to_dense(), DENSE[100:200])
    assert np.shares_memory(rows[100:200].data, X.data)
    assert rows[7:3].shape == (0, 30)
    joined = CsrRows.concatenate([rows[3:10], rows[10:10], rows[10:30][5:]])
    np.testing.assert_array_equal(joined.to_dense(), np.concatenate([DENSE[3:10], DENSE[15:30]]))
    with pytest.raises(ValueError, match="step of a slice of CsrRows must be 1"):
        rows[::2]
