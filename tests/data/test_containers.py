"""Rows in containers of other libraries are read lazily, and give the bits of the same rows in numpy."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest

from scalelatent import CapsuleRegression, Dataset, MultilayerBootstrapNetwork
from scalelatent.data.read import sources
from scalelatent.errors import DataError

pa = pytest.importorskip("pyarrow")
pl = pytest.importorskip("polars")
xr = pytest.importorskip("xarray")

ROWS = np.random.default_rng(0).integers(0, 16, (90, 6)).astype("f4")
LABELS = np.arange(90) % 3
NAMES = [f"f{i}" for i in range(6)]


class CountedBlocks:
    """A dask array that counts the blocks that are computed."""

    def __init__(self, rows: np.ndarray, chunk: int) -> None:
        self.computed = 0
        self.array = da.from_array(rows, chunks=(chunk, *rows.shape[1:])).map_blocks(
            self._count, dtype=rows.dtype, meta=np.empty((0,) * rows.ndim, rows.dtype)
        )

    def _count(self, block: np.ndarray) -> np.ndarray:
        self.computed += 1
        return block


def make_model() -> Any:
    return CapsuleRegression(capsule_dim=2, max_iter=2, random_state=0, n_jobs=1)


@pytest.mark.parametrize("wrap", [lambda x: x, xr.DataArray], ids=["dask", "xarray"])
def test_no_block_is_computed_before_the_fit(wrap: Callable[[Any], Any]) -> None:
    counted, labels = CountedBlocks(ROWS, 10), CountedBlocks(LABELS, 10)
    ds = Dataset.from_arrays(wrap(counted.array), wrap(labels.array))
    assert (len(ds), ds.feature_shape, ds.y_kind) == (90, (6,), "labels")
    assert counted.computed == labels.computed == 0
    ds.read_x(10, 20)
    assert counted.computed == 1
    fitted = make_model().fit(wrap(counted.array), wrap(labels.array))
    np.testing.assert_array_equal(fitted.W_, make_model().fit(ROWS, LABELS).W_)
    before = counted.computed
    lazy = fitted.predict(wrap(counted.array))
    assert isinstance(lazy, da.Array)
    assert counted.computed == before
    np.testing.assert_array_equal(lazy.compute(), fitted.predict(ROWS))


def test_small_chunks_are_computed_together_and_large_ones_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed: list[int] = []
    compute = da.Array.compute

    def counting(array: da.Array, **how: Any) -> Any:
        computed.append(len(array))
        return compute(array, **how)

    monkeypatch.setattr(da.Array, "compute", counting)
    rows = np.random.default_rng(0).normal(size=(6000, 4))
    np.testing.assert_array_equal(
        Dataset.from_arrays(da.from_array(rows, chunks=4)).read_x(2, 5999), rows[2:5999]
    )
    assert computed == [5997]
    chunks = ((300, 300, 100, 2500, 1300, 700, 800), 4)
    monkeypatch.setattr(sources, "_MAX_READ_BYTES", 1000 * rows[0].nbytes)
    ds = Dataset.from_arrays(da.from_array(rows, chunks=chunks))
    assert ds.pieces() == [(0, 700), (700, 3200), (3200, 4500), (4500, 5200), (5200, 6000)]
    np.testing.assert_array_equal(ds.read_x(0, 6000), rows)
    assert computed[1:] == [700, 2500, 1300, 700, 800]


@pytest.mark.parametrize("shape", [(4, 3), (3, 4), (5, 4)])
def test_the_error_names_a_chunk_whose_shape_differs_from_the_array(shape: tuple[int, int]) -> None:
    def change_shape(block: np.ndarray, block_info: Any = None) -> np.ndarray:
        return np.zeros(shape) if block_info[0]["chunk-location"][0] == 3 else block

    rows = da.zeros((40, 4), chunks=4).map_blocks(change_shape, dtype=float, meta=np.empty((0, 4)))
    with pytest.raises(DataError, match=rf"the chunk of rows 12 to 15 .* has shape {re.escape(str(shape))}"):
        Dataset.from_arrays(rows).read_x(0, 40)


def open_dataarray(folder: Path) -> Any:
    """Write a file, and return an xarray DataArray that reads only the requested rows of the file."""
    xr.Dataset({"v": (("row", "feature"), ROWS)}).to_zarr(folder / "x.zarr")
    return xr.open_zarr(folder / "x.zarr", chunks=None)["v"]


def make_table() -> dict[str, np.ndarray]:
    return dict(zip(NAMES, ROWS.T, strict=True))


FORMS: dict[str, Callable[[Path], Any]] = {
    "xarray": lambda _: xr.DataArray(ROWS),
    "xarray over dask": lambda _: xr.DataArray(da.from_array(ROWS, chunks=25)),
    "xarray of a file": open_dataarray,
    "polars": lambda _: pl.DataFrame(make_table()),
    "polars lazy": lambda _: pl.DataFrame(make_table()).lazy(),
    "arrow": lambda _: pa.table(make_table()),
    "arrow in chunks": lambda _: pa.Table.from_batches(pa.table(make_table()).to_batches(max_chunksize=18)),
    "masked without masks": lambda _: np.ma.array(ROWS),
    "masked memmap": lambda folder: np.ma.array(write_memmap(folder), copy=False),
}


def write_memmap(folder: Path) -> np.memmap[Any, Any]:
    np.save(folder / "x.npy", ROWS)
    return np.load(folder / "x.npy", mmap_mode="r")


@pytest.mark.parametrize("form", FORMS)
def test_every_container_gives_the_same_bits(form: str, tmp_path: Path) -> None:
    given = FORMS[form](tmp_path)
    ds = Dataset.from_arrays(given)
    for a, b in ((0, 90), (17, 41), (40, 40)):
        np.testing.assert_array_equal(ds.read_x(a, b), ROWS[a:b])
    expected = make_model().fit(ROWS, LABELS)
    fitted = make_model().fit(given, LABELS)
    np.testing.assert_array_equal(fitted.W_, expected.W_)
    np.testing.assert_array_equal(np.asarray(fitted.predict(given)), expected.predict(ROWS))
    assert fitted.score(given, LABELS) == expected.score(ROWS, LABELS)


def test_a_masked_memmap_is_not_loaded(tmp_path: Path) -> None:
    from scalelatent.data.read.containers import opened

    assert isinstance(opened(FORMS["masked memmap"](tmp_path)), np.memmap)


def test_torch_tensors_are_rows() -> None:
    torch = pytest.importorskip("torch")
    given = torch.tensor(ROWS, requires_grad=True)
    expected = make_model().fit(ROWS, LABELS)
    fitted = make_model().fit(given, torch.tensor(LABELS))
    np.testing.assert_array_equal(fitted.W_, expected.W_)
    assert fitted.score(given, torch.tensor(LABELS)) == expected.score(ROWS, LABELS)
    shared = torch.tensor(ROWS)
    assert np.shares_memory(Dataset.from_arrays(shared).read_x(0, 90), shared.numpy())
    with pytest.raises(DataError, match=r"tensor of torch.bfloat16, a type that numpy lacks; .*float\(\)"):
        Dataset.from_arrays(shared.bfloat16())


def test_a_lazy_frame_computes_only_the_rows_that_are_read() -> None:
    seen: list[int] = []

    def record_length(column: Any) -> Any:
        seen.append(len(column))
        return column

    recorded = pl.col("f1").map_batches(record_length, return_dtype=pl.Float32, is_elementwise=True)
    lazy = pl.DataFrame(make_table()).lazy().with_columns(recorded)
    ds = Dataset.from_dataframe(lazy, features=NAMES[:2])
    assert not seen
    np.testing.assert_array_equal(ds.read_x(5, 9), ROWS[5:9, :2])
    assert sum(seen) == 4


def test_dask_frames_are_refused_with_advice() -> None:
    dd = pytest.importorskip("dask.dataframe")
    import pandas as pd

    frame = dd.from_pandas(pd.DataFrame(make_table()), npartitions=4)
    for use in (
        lambda: Dataset.from_arrays(frame),
        lambda: Dataset.from_dataframe(frame),
        lambda: make_model().fit(frame, LABELS),
        lambda: MultilayerBootstrapNetwork(decay=0.5, n_clusterings=2, k1=3).fit(frame),
    ):
        with pytest.raises(DataError, match=r"is a Dask DataFrame, .*to_dask_array\(lengths=True\)"):
            use()
    np.testing.assert_array_equal(
        make_model().fit(frame.to_dask_array(lengths=True), LABELS).W_, make_model().fit(ROWS, LABELS).W_
    )


@pytest.mark.parametrize("kind", ["pandas", "polars", "lazy", "arrow"])
def test_data_frames_are_rows(kind: str) -> None:
    import pandas as pd

    columns = {**make_table(), "weight": np.arange(90) % 4, "kind": np.array(["x", "yy", "z"])[LABELS]}
    frame: Any = {
        "pandas": lambda: pd.DataFrame(columns, index=np.arange(90)[::-1]).astype({"kind": "category"}),
        "polars": lambda: pl.DataFrame(columns).with_columns(pl.col("kind").cast(pl.Categorical)),
        "lazy": lambda: pl.DataFrame(columns).lazy(),
        "arrow": lambda: pa.table({**columns, "kind": pa.array(columns["kind"]).dictionary_encode()}),
    }[kind]()
    ds = Dataset.from_dataframe(frame, label="kind", weight="weight")
    np.testing.assert_array_equal(ds.read_x(3, 80), ROWS[3:80])
    assert ds.classes is not None
    assert ds.classes.tolist() == ["x", "yy", "z"]
    assert ds[4:].read_y(0, 3).tolist() == ["yy", "z", "x"]
    np.testing.assert_array_equal(ds.read_weight(0, 90), columns["weight"].astype(float))
    some = Dataset.from_dataframe(frame, label="kind", features=["f3", "f1"])
    np.testing.assert_array_equal(some.read_x(0, 90), ROWS[:, [3, 1]])


def test_lists_tensors_and_bools_are_features() -> None:
    images = ROWS.reshape(90, 2, 3)
    values = pa.FixedSizeListArray.from_arrays(pa.array(ROWS.ravel()), 6)
    inner = pa.FixedSizeListArray.from_arrays(pa.array(ROWS.ravel()), 3)
    nested = pa.FixedSizeListArray.from_arrays(inner, 2)
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(images)
    flags = ROWS[:, 0] > 5
    both = Dataset.from_dataframe(pa.table({"a": values, "b": ROWS[:, 1].astype("f8")}))
    np.testing.assert_array_equal(both.read_x(1, 5), np.c_[ROWS, ROWS[:, 1]][1:5])
    assert both.dtype == "f8"
    for column in (nested, tensors):
        ds = Dataset.from_dataframe(pa.table({"a": column}))
        assert ds.feature_shape == (2, 3)
        np.testing.assert_array_equal(ds.read_x(7, 9), ROWS[7:9])
    bools = Dataset.from_dataframe(pa.table({"a": flags, "b": ~flags}))
    assert bools.dtype == bool
    np.testing.assert_array_equal(bools.read_x(0, 90), np.c_[flags, ~flags])


def make_column(null_row: int) -> list[float | None]:
    return [None if i == null_row else 1.0 for i in range(9)]


REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "null": (lambda: pa.table({"a": np.zeros(9), "b": make_column(7)}), {}, r"row 7, column 'b' is null"),
    "null in a list": (
        lambda: pa.table({"a": pa.array([[1.0, v] for v in make_column(3)], pa.list_(pa.float64(), 2))}),
        {},
        r"row 3, column 'a' is null",
    ),
    "null label": (
        lambda: pa.table({"a": np.zeros(9), "y": pa.array(make_column(2))}),
        {"label": "y"},
        r"row 2, column 'y' is null",
    ),
    "text": (
        lambda: pa.table({"a": [1.0], "b": ["x"]}),
        {},
        r"column 'b' holds text, but features must be",
    ),
    "lists": (
        lambda: pa.table({"a": [[1.0], [1.0, 2.0]]}),
        {},
        r"column 'a' holds lists of varying size",
    ),
    "no such column": (lambda: pa.table({"a": [1.0]}), {"label": "z"}, r"no column 'z'; its columns are 'a'"),
    "no label": (
        lambda: pa.table({"a": [1.0], "b": [[1]]}),
        {"label": "b"},
        r"but labels must be numbers",
    ),
    "not exact": (
        lambda: pa.table({"a": [2**53 + 1], "b": [0.5]}),
        {},
        r"not all numbers of rows 0:1",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_tables_with_unsupported_columns_are_refused(case: str) -> None:
    make, how, message = REFUSED[case]
    with pytest.raises(DataError, match=message):
        Dataset.from_dataframe(make(), **how).read_x(0, 1 if case == "not exact" else len(make()))


def test_set_output_returns_polars_frames() -> None:
    model = make_model().fit(ROWS, LABELS).set_output(transform="polars")
    framed = model.transform(ROWS)
    assert isinstance(framed, pl.DataFrame)
    assert framed.columns == list(model.get_feature_names_out())
    np.testing.assert_array_equal(framed.to_numpy(), make_model().fit(ROWS, LABELS).transform(ROWS))
