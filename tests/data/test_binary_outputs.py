"""Binary outputs of rows come from y with several columns, from multi-labels, or from another dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse

from scalelatent.data import Dataset, open_dataset
from scalelatent.errors import DataError, ShardError

N, P, V = 60, 3, 5
RNG = np.random.Generator(np.random.Philox(3))
X, OUT = RNG.normal(size=(N, P)).astype("f4"), RNG.integers(0, 2, (N, V))


def give_outputs(kind: str) -> Any:
    """Return the outputs as a CSR array, or as an array of the dtype ``kind``."""
    return scipy.sparse.csr_array(OUT.astype("f4")) if kind == "csr" else OUT.astype(kind)


@pytest.mark.parametrize("kind", ["?", "u1", "i8", "f4", "f8", "csr"])
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_outputs_of_any_dtype_and_storage_are_zeros_and_ones(
    tmp_path: Path, kind: str, stored: bool, own: bool
) -> None:
    if own:
        ds = Dataset.from_arrays(X, give_outputs(kind))
        ds = ds.save(tmp_path / "both", shard_rows=20, chunk_rows=10) if stored else ds
    else:
        x, v = Dataset.from_arrays(X, np.arange(N) % 2), Dataset.from_arrays(give_outputs(kind))
        if stored:  # Outputs have other chunks than the rows (CSR has none).
            how = {} if kind == "csr" else {"chunk_rows": 7}
            x, v = x.save(tmp_path / "x", chunk_rows=10), v.save(tmp_path / "v", **how)
        ds = x.with_target(v)
    assert (ds.has_targets, ds.n_targets, ds.classes, ds.is_stored) == (True, V, None, stored)
    np.testing.assert_array_equal(ds.read_x(0, N), X)
    for a, b in ((0, N), (13, 29), (59, 60), (4, 4)):
        found = ds.read_targets(a, b)
        assert found.dtype == np.uint8
        np.testing.assert_array_equal(found, OUT[a:b])
    np.testing.assert_array_equal(ds[10:40][5:].read_targets(1, 3), OUT[16:18])


def test_a_pair_of_datasets_behaves_as_one_dataset(tmp_path: Path) -> None:
    """A pair (rows, outputs) keeps its outputs when it is opened from its spec, weighted or saved.

    Another pair has another fingerprint.
    """
    x = Dataset.from_arrays(X).save(tmp_path / "x")
    v = Dataset.from_arrays(OUT.astype("u1")).save(tmp_path / "v")
    pair = x[10:].with_target(v[:50])[5:30]
    again = Dataset.from_spec(pair.spec())
    assert again.fingerprint() == pair.fingerprint()
    np.testing.assert_array_equal(again.read_targets(0, 25), OUT[5:30])
    np.testing.assert_array_equal(again.read_x(0, 25), X[15:40])
    np.testing.assert_array_equal(pair.with_weight(np.ones(25)).read_targets(3, 4), OUT[8:9])
    saved = pair.save(tmp_path / "both")
    np.testing.assert_array_equal(saved.read_targets(0, 25), OUT[5:30])
    prints = [ds.fingerprint() for ds in (pair, x[15:40], x[15:40].with_target(v[15:40]), pair[1:])]
    assert len(set(prints)) == 4
    in_memory = Dataset.from_arrays(X)
    mixed = in_memory.with_target(v)
    assert mixed.fingerprint() not in (in_memory.fingerprint(), x.with_target(v).fingerprint())
    assert not mixed.is_stored
    assert not x.with_target(Dataset.from_arrays(OUT)).is_stored
    with pytest.raises(DataError, match="memory of this process"):
        mixed.spec()


def test_images_may_be_outputs(tmp_path: Path) -> None:
    images = RNG.integers(0, 2, (8, 4, 4)).astype("u1")
    ds = Dataset.from_arrays(images)
    assert ds.with_target(ds).n_targets == 16
    np.testing.assert_array_equal(ds.with_target(ds).read_targets(2, 8), images[2:].reshape(6, 16))
    np.testing.assert_array_equal(ds[1:].read_binary(2, 3), images[3:4].reshape(1, 16))


@pytest.mark.parametrize(("bad", "shown"), [(2, "2"), (-1, "-1"), (0.5, "0.5"), (255, "255")])
@pytest.mark.parametrize("sparse", [False, True])
def test_the_error_names_an_output_other_than_zero_and_one(
    tmp_path: Path, bad: float, shown: str, sparse: bool
) -> None:
    out = OUT.astype("u1" if bad == 255 else "f8")
    out[41, 3] = bad
    v = Dataset.from_arrays(scipy.sparse.csr_array(out) if sparse else out).save(tmp_path / "v.zarr")
    ds = Dataset.from_arrays(X).with_target(v)[20:]
    np.testing.assert_array_equal(ds.read_targets(0, 21), OUT[20:41])
    where = rf"v\.zarr: column 3 of row 41 is {shown}(\.0)?, but an output must be 0 or 1; make the outputs"
    with pytest.raises(DataError, match=where):
        ds.read_targets(20, 30)
    with pytest.raises(DataError, match=where):
        v[30:].read_binary(0, 20)
    with pytest.raises(DataError, match=r"^y of the dataset: column 3 of row 41"):
        Dataset.from_arrays(X, v.read_x(0, N))[20:].read_targets(0, 30)
    if not sparse and bad != 255:
        out[41, 3] = np.nan
        with pytest.raises(DataError, match="row 41 is nan"):
            Dataset.from_arrays(X, out).read_targets(0, N)


def test_missing_outputs_and_other_row_counts_are_refused(tmp_path: Path) -> None:
    v = Dataset.from_arrays(OUT).save(tmp_path / "v.zarr")
    with pytest.raises(DataError, match=r"has 59 rows, but its target of .*v\.zarr has 60: row i of"):
        Dataset.from_arrays(X[1:]).with_target(v)
    for y, has in ((None, "no outputs"), (np.arange(N), "one label per row")):
        with pytest.raises(DataError, match=rf"has {has}, but outputs must be zeros and ones .*with_target"):
            Dataset.from_arrays(X, y).read_targets(0, 1)


def test_a_damaged_shard_of_the_outputs_is_named_as_theirs(tmp_path: Path) -> None:
    """The error names the shard of the outputs, not the shard of the rows with the same number."""
    x = Dataset.from_arrays(X).save(tmp_path / "x.zarr", shard_rows=20)
    v = Dataset.from_arrays(OUT.astype("u1")).save(tmp_path / "v.zarr", shard_rows=20)
    shard = Path(v.shards(20, 21)[0][0])
    shard.write_bytes(shard.read_bytes()[:-9])
    ds = x.with_target(open_dataset(tmp_path / "v.zarr"))
    with pytest.raises(ShardError) as reported:
        ds.read_targets(25, 30)
    assert (reported.value.url, reported.value.start, reported.value.stop) == (v.url, 20, 40)


def test_dask_rows_take_lazy_outputs_only(tmp_path: Path) -> None:
    da = pytest.importorskip("dask.array")
    x = Dataset.from_arrays(da.from_array(X, chunks=(20, P)))
    found = x.with_target(Dataset.from_arrays(da.from_array(OUT, chunks=(30, V))))[10:].lazy(0, 5)
    assert found is not None
    np.testing.assert_array_equal(found[1].compute(), OUT[10:15])
    with pytest.raises(DataError, match="store both"):
        x.with_target(Dataset.from_arrays(OUT).save(tmp_path / "v")).lazy(0, 5)
