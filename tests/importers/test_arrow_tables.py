"""Imported Parquet and CSV files give the rows of their table, and the images in it."""

from __future__ import annotations

import gzip
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import scalelatent.data as data
from scalelatent.errors import DataError

pa = pytest.importorskip("pyarrow")
import pyarrow.csv  # noqa: E402
import pyarrow.parquet  # noqa: E402

N = 2_000
ROWS = np.random.default_rng(1).integers(0, 256, (N, 5)).astype("u1")
NAMES = [f"p{i}" for i in range(5)]
KINDS = np.array(["ant", "bee", "cat"])[np.arange(N) % 3]
WEIGHTS = (np.arange(N) % 7 + 1) / 2


def make_table(**more: Any) -> Any:
    return pa.table({**dict(zip(NAMES, ROWS.T, strict=True)), **more})


def _write(kind: str, table: Any, path: Path) -> Path:
    write: dict[str, Callable[[], Any]] = {
        "parquet": lambda: pyarrow.parquet.write_table(table, path, row_group_size=300),
        "csv": lambda: pyarrow.csv.write_csv(table, path),
    }
    write[kind]()
    return path


def _run(kind: str, source: Any, out: Any, **how: Any) -> data.Dataset:
    run: Any = {"parquet": data.import_parquet, "csv": data.import_csv}[kind]
    return run(source, out, **how)


def _check(ds: data.Dataset, dtype: str) -> None:
    np.testing.assert_array_equal(ds.read_x(0, N), ROWS)
    assert ds.dtype == dtype
    assert ds.classes is not None
    assert ds.classes.tolist() == ["ant", "bee", "cat"]
    assert ds.read_y(0, N).tolist() == KINDS.tolist()
    np.testing.assert_array_equal(ds.read_weight(0, N), WEIGHTS)


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_columns_of_several_files_are_found_by_name(kind: str, tmp_path: Path) -> None:
    """The first file sets the order of the columns; a file with other columns is refused."""
    (tmp_path / "t").mkdir()
    whole = make_table(kind=KINDS, weight=WEIGHTS)
    _write(kind, whole.slice(0, 700), tmp_path / "t" / "a")
    _write(kind, whole.slice(700).select(["kind", *NAMES[::-1], "weight"]), tmp_path / "t" / "b")
    ds = _run(kind, tmp_path / "t", tmp_path / "d", label="kind", weight="weight")
    _check(ds, "float64" if kind == "csv" else "uint8")
    assert ds.feature_names is not None
    assert ds.feature_names.tolist() == NAMES
    some = _run(kind, tmp_path / "t", tmp_path / "e", features=["p3", "p0"])
    assert some.feature_names is not None
    assert some.feature_names.tolist() == ["p3", "p0"]
    np.testing.assert_array_equal(some.read_x(0, N), ROWS[:, [3, 0]])
    _write(kind, whole.drop_columns(["p2"]), tmp_path / "t" / "c")
    with pytest.raises(DataError, match="p2"):
        _run(kind, tmp_path / "t", tmp_path / "f", label="kind", weight="weight")
    assert not (tmp_path / "f").exists()


@pytest.mark.parametrize("kind", ["parquet", "csv"])
@pytest.mark.parametrize("where", ["file", "folder", "glob"])
def test_rows_labels_and_weights_are_those_of_the_table(kind: str, where: str, tmp_path: Path) -> None:
    table = make_table(w=WEIGHTS, kind=KINDS)
    parts = [table] if where == "file" else [table.slice(0, 700), table.slice(700, 1), table.slice(701)]
    (tmp_path / "in").mkdir()
    for number, part in enumerate(parts):
        _write(kind, part, tmp_path / "in" / f"{number}.{kind}")
    source = tmp_path / "in" / {"file": f"0.{kind}", "folder": "", "glob": f"[0-9].{kind}"}[where]
    ds = _run(kind, source, tmp_path / "ds", label="kind", weight="w", shard_rows=512)
    _check(ds, "f8" if kind == "csv" else "u1")
    assert ds.attrs["provenance"]["label"] == "kind"
    assert str(tmp_path) not in str(ds.attrs["provenance"])


def test_compressed_text_is_read_with_columns_by_name(tmp_path: Path) -> None:
    plain = _write("csv", make_table(kind=KINDS), tmp_path / "t.csv").read_bytes()
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(plain))
    ds = data.import_csv(tmp_path / "t.csv.gz", tmp_path / "ds", label="kind", features=["p3", "p0"])
    np.testing.assert_array_equal(ds.read_x(0, N), ROWS[:, [3, 0]])


def test_a_column_that_starts_with_integers_is_read_as_floats(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b,y\n" + "1,2,0\n" * 5000 + "1.5,2,1\n")
    ds = data.import_csv(tmp_path / "t.csv", tmp_path / "ds", label="y")
    assert ds.read_x(5000, 5001).tolist() == [[1.5, 2.0]]
    assert ds.classes is not None
    assert ds.classes.tolist() == [0, 1]


def test_lists_wide_tables_and_dictionaries_are_read(tmp_path: Path) -> None:
    wide = np.random.default_rng(2).normal(size=(60, 1500)).astype("f4")
    dictionary = pa.array(KINDS[:60]).dictionary_encode()
    by_column = pa.table({**{f"c{i}": wide[:, i] for i in range(1500)}, "y": dictionary})
    by_list = pa.table(
        {"v": pa.FixedSizeListArray.from_arrays(pa.array(wide.ravel()), 1500), "y": dictionary}
    )
    for name, table in (("wide", by_column), ("list", by_list)):
        path = _write("parquet", table, tmp_path / f"{name}.parquet")
        ds = data.import_parquet(path, tmp_path / name, label="y")
        np.testing.assert_array_equal(ds.read_x(0, 60), wide)
        assert ds.read_y(0, 60).tolist() == KINDS[:60].tolist()


PIXELS = np.random.default_rng(0).integers(0, 256, (60, 6, 5)).astype("u1")


def make_images(path: Path, images: list[np.ndarray], **more: Any) -> Path:
    """Write a Parquet file of PNG images as the Hugging Face Hub does, in row groups of 7 rows."""
    column = []
    for pixels in images:
        out = io.BytesIO()
        Image.fromarray(pixels).save(out, "png")
        column.append({"bytes": out.getvalue(), "path": None})
    table = pa.table({"image": column, "label": np.arange(len(images)) % 3, **more})
    pyarrow.parquet.write_table(table, path, row_group_size=7)
    return path


def test_images_are_decoded(tmp_path: Path) -> None:
    path = make_images(tmp_path / "t.parquet", list(PIXELS), w=np.arange(60) / 4)
    ds = data.import_parquet(path, tmp_path / "ds", label="label", weight="w", shard_rows=17)
    assert ds.feature_shape == (6, 5)
    assert ds.feature_names is None
    np.testing.assert_array_equal(ds.read_x(0, 60), PIXELS.reshape(60, -1))
    np.testing.assert_array_equal(ds.read_y(0, 60), np.arange(60) % 3)
    np.testing.assert_array_equal(ds.read_weight(0, 60), np.arange(60) / 4)


def test_images_of_several_sizes_and_other_columns_are_refused(tmp_path: Path) -> None:
    path = make_images(tmp_path / "t.parquet", [*PIXELS[:9], PIXELS[9, :3]])
    with pytest.raises(DataError, match=r"image of row 9 is \(3, 5\) uint8, but that of row 0 is \(6, 5\)"):
        data.import_parquet(path, tmp_path / "ds", label="label")
    ds = data.import_parquet(path, tmp_path / "ds", label="label", size=(3, 5), color="rgb")
    assert ds.feature_shape == (3, 5, 3)
    with pytest.raises(DataError, match=r"'image' holds images, and there are others \(image, label\)"):
        data.import_parquet(path, tmp_path / "other")
    none = pa.table({"image": pa.array([None], pa.struct({"bytes": pa.binary()}))})
    pyarrow.parquet.write_table(none, path)
    with pytest.raises(DataError, match=r"row 0, column 'image' is null"):
        data.import_parquet(path, tmp_path / "other")
    damaged = pa.table({"image": [{"bytes": b"no image"}]})
    pyarrow.parquet.write_table(damaged, path)
    with pytest.raises(DataError, match=r"row 0, column 'image' cannot be used as an image"):
        data.import_parquet(path, tmp_path / "other")


def test_shuffled_tables_equal_shuffled_datasets(tmp_path: Path) -> None:
    path = _write("parquet", make_table(w=WEIGHTS, y=np.arange(N) % 3), tmp_path / "t.parquet")
    ds = data.import_parquet(path, tmp_path / "ds", label="y", weight="w", shuffle=3)
    whole = data.Dataset.from_arrays(ROWS, np.arange(N) % 3, sample_weight=WEIGHTS)
    other = data.shuffle_dataset(whole.save(tmp_path / "whole"), tmp_path / "other", seed=3)
    np.testing.assert_array_equal(ds.read_x(0, N), other.read_x(0, N))
    np.testing.assert_array_equal(ds.read_weight(0, N), other.read_weight(0, N))


def table_with_null(column: str, row: int) -> Any:
    values: list[Any] = list(range(N))
    values[row] = None
    table = make_table(y=np.arange(N))
    return table.set_column(table.schema.names.index(column), column, pa.array(values))


REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "null": (lambda: table_with_null("p2", 1234), {}, r"row 1234, column 'p2' is null"),
    "null label": (lambda: table_with_null("y", 1700), {"label": "y"}, r"row 1700, column 'y' is null"),
    "no column": (make_table, {"label": "q"}, r"no column 'q'; its columns are 'p0', 'p1', 'p2', 'p3', 'p4'"),
    "text": (lambda: make_table(kind=KINDS), {}, r"column 'kind' holds text, but features must be numbers"),
    "negative weight": (lambda: make_table(w=-WEIGHTS), {"weight": "w"}, r"weight of row 0 is -0.5"),
    "nothing": (lambda: make_table().slice(0, 0), {}, r"holds no rows; nothing to import"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_table_leaves_nothing(case: str, tmp_path: Path) -> None:
    make, how, message = REFUSED[case]
    path = _write("parquet", make(), tmp_path / "t.parquet")
    with pytest.raises(DataError, match=message):
        data.import_parquet(path, tmp_path / "ds", **how)
    assert not (tmp_path / "ds").exists()


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_missing_and_damaged_files_are_refused(kind: str, tmp_path: Path) -> None:
    for source in ("no", "no*"):
        with pytest.raises(DataError, match=r"does not exist|no file matches"):
            _run(kind, tmp_path / source, tmp_path / "ds")
    content = _write(kind, make_table(), tmp_path / "t").read_bytes()
    (tmp_path / "t").write_bytes(content[: len(content) // 2] + (b"x,y" if kind == "csv" else b""))
    with pytest.raises(DataError, match=rf"{kind} .*cannot be read"):
        _run(kind, tmp_path / "t", tmp_path / "ds")


def test_tables_in_memory_stores_are_read(tmp_path: Path) -> None:
    """The test reads from the memory store of fsspec, which has the interface of all its stores."""
    import fsspec

    path = _write("parquet", make_table(w=WEIGHTS, kind=KINDS), tmp_path / "t.parquet")
    fsspec.filesystem("memory").pipe_file("/tables/a.parquet", path.read_bytes())
    for source in ("memory://tables/a.parquet", "memory://tables", "memory://tables/*.parquet"):
        _check(data.import_parquet(source, tmp_path / "ds", label="kind", weight="w", overwrite=True), "u1")


def test_importers_read_from_stores(tmp_path: Path) -> None:
    """Importers of npy, npz, idx, HDF5 and svmlight read files in a store as they read files on a disk."""
    import fsspec
    import h5py

    store = fsspec.filesystem("memory")
    np.save(tmp_path / "x.npy", ROWS)
    np.savez_compressed(tmp_path / "x.npz", x=ROWS, y=KINDS)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = ROWS
    images = ROWS[:, :4].reshape(N, 2, 2)
    head = bytes([0, 0, 8, 3]) + b"".join(v.to_bytes(4, "big") for v in (N, 2, 2))
    (tmp_path / "x.gz").write_bytes(gzip.compress(head + images.tobytes()))
    (tmp_path / "x.svm").write_text("1 1:2 3:4\n0 2:1\n")
    for name in ("x.npy", "x.npz", "x.h5", "x.gz", "x.svm"):
        store.pipe_file(f"/files/{name}", (tmp_path / name).read_bytes())
    at = "memory://files/x"
    for ds in (
        data.import_npy(f"{at}.npy", tmp_path / "a"),
        data.import_npz(f"{at}.npz", tmp_path / "b"),
        data.import_hdf5(f"{at}.h5", tmp_path / "c"),
    ):
        np.testing.assert_array_equal(ds.read_x(0, N), ROWS)
    ds = data.import_idx(f"{at}.gz", None, tmp_path / "d")
    np.testing.assert_array_equal(ds.read_x(0, N), ROWS[:, :4])
    assert data.import_svmlight(f"{at}.svm", tmp_path / "e").read_x(0, 2).toarray().tolist() == [
        [2, 0, 4],
        [0, 1, 0],
    ]
    with pytest.raises(DataError, match=r"memory://files/y.npy does not exist"):
        data.import_npy("memory://files/y.npy", tmp_path / "f")


def test_files_on_a_web_server_are_refused(tmp_path: Path) -> None:
    for run in (data.import_npy, data.import_parquet):
        with pytest.raises(DataError, match="is on a web server; download it, and import the copy"):
            run("https://host/x", tmp_path / "ds")


def test_the_command_imports_tables(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from scalelatent.cli import app

    path = _write("parquet", make_table(w=WEIGHTS, kind=KINDS), tmp_path / "t.parquet")
    how = ["--label", "kind", "--weight", "w", "--features", "p0,p4"]
    done = CliRunner().invoke(app, ["data", "import", "parquet", str(path), str(tmp_path / "ds"), *how])
    assert done.exit_code == 0, done.output
    np.testing.assert_array_equal(data.open_dataset(tmp_path / "ds").read_x(0, N), ROWS[:, [0, 4]])


@pytest.mark.parametrize("shuffle", [None, 0])
def test_labels_that_are_measurements_give_a_warning(shuffle: int | None, tmp_path: Path) -> None:
    path = _write(
        "parquet", make_table(price=np.arange(N) + 0.5, whole=np.arange(N) % 3 * 1.0), tmp_path / "t"
    )
    with pytest.warns(
        UserWarning, match=r"d: the labels are 2,000 different numbers, .* such as 0\.5\. Class"
    ):
        ds = _run("parquet", path, tmp_path / "d", label="price", features=NAMES, shuffle=shuffle)
    assert ds.classes is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _run("parquet", path, tmp_path / "e", label="whole", features=NAMES)
