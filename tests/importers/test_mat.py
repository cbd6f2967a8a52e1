"""MATLAB files of all versions give the right axes and labels; every kind of bad file is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import scipy.sparse
from scipy.io import savemat

from scalelatent.data import Dataset, import_mat
from scalelatent.errors import DataError

X = np.random.Generator(np.random.Philox(4)).normal(size=(31, 6))
Y = np.arange(31) % 4 + 1.0


def save_version_73(path: Path, variables: dict[str, Any]) -> None:
    """Write a file as MATLAB does with -v7.3: 512 bytes of header, then HDF5 with axes in reverse order."""
    with h5py.File(path, "w", userblock_size=512) as file:
        for name, value in variables.items():
            if isinstance(value, list):  # A list becomes a cell array of strings.
                file[name] = np.empty((1, len(value)), h5py.ref_dtype)
                file[name].attrs["MATLAB_class"] = np.bytes_("cell")
            elif isinstance(value, str):  # A text becomes a matrix of characters.
                file[name] = np.array([[ord(c) for c in line] for line in value.split("\n")], "u2").T
                file[name].attrs["MATLAB_class"] = np.bytes_("char")
            else:
                file[name] = np.asarray(value).T
                file[name].attrs["MATLAB_class"] = np.bytes_("double")
    with open(path, "r+b") as raw:
        raw.write(b"MATLAB 7.3 MAT-file, Platform: GLNXA64, HDF5 schema 1.00 .".ljust(124) + b"\x00\x02IM")


def save(path: Path, version: str, variables: dict[str, Any]) -> Path:
    if version == "7.3":
        save_version_73(path, variables)
        return path
    given = {}
    for name, value in variables.items():
        if isinstance(value, list):
            given[name] = np.array(value, dtype=object)[:, None]
        elif isinstance(value, str):
            given[name] = np.array(value.split("\n"))
        else:
            given[name] = value
    savemat(path, given, format="4" if version == "4" else "5", do_compression=version == "7")
    return path


VERSIONS = ["4", "5", "7", "7.3"]


def read_rows(ds: Dataset) -> np.ndarray:
    return ds.read_x(0, len(ds))


def assert_refused(path: Path, message: str, **how: Any) -> None:
    out = path.parent / "out"
    with pytest.raises(DataError, match=message) as error:
        import_mat(path, out, **how)
    assert str(path) in str(error.value)
    assert not out.exists()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("names", [("x", "y"), ("X", "Y"), ("fea", "gnd")])
def test_rows_and_labels_of_all_versions_are_read(
    tmp_path: Path, version: str, names: tuple[str, str]
) -> None:
    path = save(tmp_path / "a.mat", version, {names[0]: X, names[1]: Y[:, None], "other": np.eye(2)})
    keys = {} if names[0] in "xX" else {"x": "fea", "y": "gnd"}
    ds = import_mat(path, tmp_path / "ds", **keys, shard_rows=8)  # type: ignore[arg-type]
    np.testing.assert_array_equal(read_rows(ds), X)
    assert ds.dtype == np.float64
    labels = ds.read_y(0, 31)
    assert labels.dtype.kind in "iu"  # MATLAB stores integers as doubles; the importer restores them.
    assert labels.tolist() == Y.tolist()
    assert ds.attrs["provenance"].items() >= {"importer": "mat", "x": names[0], "y": names[1]}.items()


@pytest.mark.parametrize("version", VERSIONS)
def test_numeric_labels_of_every_kind_are_read(tmp_path: Path, version: str) -> None:
    path = save(tmp_path / "a.mat", version, {"x": X, "y": Y[None, :]})
    assert import_mat(path, tmp_path / "row").read_y(0, 31).tolist() == Y.tolist()
    path = save(tmp_path / "a.mat", version, {"x": X, "y": Y[:, None] + 0.5})
    assert import_mat(path, tmp_path / "halves").classes.tolist() == [1.5, 2.5, 3.5, 4.5]
    path = save(tmp_path / "a.mat", version, {"x": X, "y": Y[:, None] * 1e12})
    assert import_mat(path, tmp_path / "large").classes.tolist() == [
        10**12,
        2 * 10**12,
        3 * 10**12,
        4 * 10**12,
    ]


@pytest.mark.parametrize("version", VERSIONS)
def test_targets_are_read(tmp_path: Path, version: str) -> None:
    targets = np.stack([Y, Y * 2], 1)
    ds = import_mat(save(tmp_path / "a.mat", version, {"x": X, "y": targets}), tmp_path / "ds", shard_rows=8)
    assert (ds.y_kind, ds.read_y(0, 1).dtype) == ("targets", np.float64)
    np.testing.assert_array_equal(ds.read_y(0, 31), targets)


@pytest.mark.parametrize("version", ["5", "7", "7.3"])
def test_rows_along_the_last_axis_are_read(tmp_path: Path, version: str) -> None:
    images = np.random.Generator(np.random.Philox(4)).integers(0, 256, (5, 4, 3, 31)).astype("u1")
    path = save(tmp_path / "a.mat", version, {"X": images, "y": Y[:, None]})
    ds = import_mat(path, tmp_path / "ds", rows_last=True, shard_rows=8)
    assert ds.feature_shape == (5, 4, 3)
    np.testing.assert_array_equal(read_rows(ds), np.moveaxis(images, -1, 0).reshape(31, -1))
    assert_refused(path, r"has 5 rows along its first axis, but there are 31 labels.*add --rows-last")
    first = np.moveaxis(images, -1, 0)
    path = save(tmp_path / "a.mat", version, {"X": first, "y": Y[:, None]})
    np.testing.assert_array_equal(read_rows(import_mat(path, tmp_path / "first")), first.reshape(31, -1))
    assert_refused(
        path, r"along its last axis, but there are 31 labels.*leave --rows-last out", rows_last=True
    )


@pytest.mark.parametrize("version", ["5", "7", "7.3"])
def test_bad_variables_are_refused(tmp_path: Path, version: str) -> None:
    path = tmp_path / "a.mat"
    assert_refused(
        save(path, version, {"data": X}), r"has no array 'x'; it holds data .*: name one with --x KEY"
    )
    assert_refused(save(path, version, {"x": X, "X": X}), "has 2 arrays that could be 'x'")
    assert_refused(save(path, version, {"x": X, "y": Y[:30, None]}), "holds 31 rows, but .* holds 30 labels")
    cube = np.zeros((31, 2, 2))
    assert_refused(
        save(path, version, {"x": X, "y": cube}), r"'y' has shape \(31, 2, 2\); labels must be one per"
    )
    assert_refused(save(path, version, {"x": X, "y": X + 1j}), "'y'.*must be real numbers")
    assert_refused(save(path, version, {"x": X + 1j}), "rows must be real numbers")
    for words in (["ab"] * 31, "\n".join(["ab"] * 31)):
        message = r"'{}' holds text or cells.*\[names, ~, y\] = unique\(y\)"
        assert_refused(save(path, version, {"x": words}), message.format("x"))
        assert_refused(save(path, version, {"x": X, "y": words}), message.format("y"))
    bad = X.copy()
    bad[17, 3] = np.nan
    assert_refused(save(path, version, {"x": bad}), "variable 'x': row 17, column 3 is nan")


def test_empty_variables_are_refused(tmp_path: Path) -> None:
    savemat(tmp_path / "a.mat", {"x": np.zeros((0, 4))})
    assert_refused(tmp_path / "a.mat", r"'x' has shape \(0, 4\), which is empty")
    # For an empty array, MATLAB stores the shape in place of the array, and this attribute.
    save_version_73(tmp_path / "b.mat", {"x": np.zeros(2)})
    with h5py.File(tmp_path / "b.mat", "r+") as file:
        file["x"].attrs["MATLAB_empty"] = np.uint8(1)
    assert_refused(tmp_path / "b.mat", "'x' is empty; nothing to import")


def test_sparse_matrices_are_refused(tmp_path: Path) -> None:
    message = r"'x' is a sparse matrix; .*`scalelatent data import csr`.*x = full\(x\)"
    savemat(tmp_path / "a.mat", {"x": scipy.sparse.csc_array(X)})
    assert_refused(tmp_path / "a.mat", message)
    save_version_73(tmp_path / "b.mat", {})
    with h5py.File(tmp_path / "b.mat", "r+") as file:
        file["x/data"], file["x/ir"], file["x/jc"] = [1.0], [0], [0, 1]
        file["x"].attrs["MATLAB_sparse"] = np.uint64(3)
    assert_refused(tmp_path / "b.mat", message)


@pytest.mark.parametrize("version", ["5", "7", "7.3"])
def test_bad_files_are_refused(tmp_path: Path, version: str) -> None:
    path = save(tmp_path / "a.mat", version, {"x": X.repeat(30, 0), "y": Y.repeat(30)[:, None]})
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 3])
    assert_refused(path, "truncated.*download or copy it again")
    path.write_bytes(b"")
    assert_refused(path, "is empty; download or copy it again")
    path.write_text("x = [1 2 3];" * 100)
    assert_refused(path, "is no MATLAB file")
    assert_refused(tmp_path / "none.mat", "MATLAB file .*none.mat does not exist; check the path")


def test_a_damaged_compressed_variable_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "a.mat", "7", {"x": X})
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    assert_refused(path, "truncated or damaged: .*download or copy it again")


def test_hdf5_files_of_other_programs_are_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.mat", "w") as file:
        file["x"] = X
    assert_refused(tmp_path / "a.mat", "MATLAB did not write.*`scalelatent data import hdf5`")


@pytest.mark.realdata
@pytest.mark.parametrize(
    ("name", "shape", "classes"), [("COIL20", (1440, 1024), 20), ("Isolet", (1560, 617), 26)]
)
def test_rows_of_real_files_are_read(
    data_root: Path, tmp_path: Path, name: str, shape: tuple[int, int], classes: int
) -> None:
    ds = import_mat(data_root / "small" / f"{name}.mat", tmp_path / "ds")
    assert (len(ds), ds.n_features) == shape
    assert ds.classes.tolist() == list(range(1, classes + 1))
    assert set(np.bincount(ds.read_codes(0, len(ds)))) == {shape[0] // classes}
