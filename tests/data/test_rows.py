"""Small functions check, convert and select rows, labels, outputs and checksums of chunks."""

from __future__ import annotations

import numpy as np
import pytest
from crc32c import crc32c
from scipy.sparse import csr_array

from scalelatent.data import Dataset
from scalelatent.data.checksums import chunk_crcs
from scalelatent.data.columns import as_binary
from scalelatent.data.csr import canonical_csr
from scalelatent.data.csr_store import shard_bytes
from scalelatent.data.read.chunk_files import DamagedFileError, index_entry
from scalelatent.data.read.selected import select_rows
from scalelatent.data.read.sources import ArrayRows, RowSource, as_source
from scalelatent.data.schema import check_label_values, refuse_masked
from scalelatent.data.write.batches import RowBatch
from scalelatent.errors import DataError


def test_labels_of_mixed_types_are_refused() -> None:
    with pytest.raises(
        DataError, match=r"y has labels of mixed types. The label of row 1 is 'a' \(str\), and row 0 is 0"
    ):
        check_label_values([0, "a"], "y")
    check_label_values([0, 1.5], "y")


def test_masked_entries_are_refused() -> None:
    with pytest.raises(DataError, match=r"row 1, feature 1 is masked \(1 of 4 entries are"):
        refuse_masked(np.ma.masked_greater([[1, 2], [3, 9]], 8), "x")


def test_binary_outputs_become_zeros_and_ones() -> None:
    assert as_binary(np.array([[0.0, 1.0]]), 0, "x").tolist() == [[0, 1]]
    assert as_binary(csr_array([[0, 1], [1, 0]]), 0, "x").tolist() == [[0, 1], [1, 0]]
    with pytest.raises(DataError, match="dataset d: column 1 of row 7 is 255, but an output must be 0 or 1"):
        as_binary(np.array([[0, 255]]), 7, "dataset d")
    with pytest.raises(DataError, match="column 1 of row 8 is 2"):
        as_binary(csr_array([[1, 0], [0, 2]]), 7, "dataset d")


def test_entries_of_one_row_and_column_are_added() -> None:
    x, *counts = canonical_csr(np.array([1, 2, 4]), np.array([1, 0, 1]), np.array([0, 3]), 2, 0, "x")
    assert (x.toarray().tolist(), counts) == ([[2, 5]], [1, 1])


def test_checksums_of_a_shard_are_those_of_its_chunks() -> None:
    found = chunk_crcs(shard_bytes(np.arange(4, dtype="u1"), 2, None), 2)
    assert found == [crc32c(bytes([0, 1])), crc32c(bytes([2, 3]))]


def test_a_chunk_that_was_never_written_is_damage() -> None:
    index = np.array([[0, 90], [2**64 - 1, 2**64 - 1]], dtype="<u8")
    assert index_entry(index, 0) == (0, 90)
    with pytest.raises(DamagedFileError, match="chunk 1 was never written"):
        index_entry(index, 1)


def test_rows_are_taken_by_index() -> None:
    ds = Dataset.from_arrays(np.arange(10.0)[:, None], list("abababaaaa"))
    some = select_rows(ds, [7, 1, 2])
    assert some.read_x(0, 3).ravel().tolist() == [1.0, 2.0, 7.0]
    assert some.read_y(0, 3).tolist() == ["b", "a", "a"]


def test_a_batch_is_converted_to_bytes() -> None:
    batch = RowBatch(np.arange(6.0).reshape(3, 2), np.array(["a", "b", "c"]))
    assert RowBatch.from_bytes(batch.take(np.array([2, 0])).to_bytes()).y.tolist() == ["c", "a"]


def test_a_source_of_dense_rows_has_no_number_of_entries() -> None:
    source: RowSource = as_source(np.eye(3))
    assert isinstance(source, ArrayRows)
    assert (source.sparse, source.reads_at_once, source.layout, source.shards(0, 3)) == (False, 1, None, [])
    assert (source.pieces(0, 3), source.pieces(1, 1)) == ([(0, 3)], [])
    with pytest.raises(TypeError, match="ArrayRows holds dense rows"):
        _ = source.nnz
