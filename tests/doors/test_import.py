"""If a file cannot be imported, an error of one line names the file, and no output is left."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from scalelatent.cli import main

X, Y = np.arange(60, dtype=np.uint8).reshape(10, 6), np.arange(10) % 2


def write_good_npz(path: Path) -> None:
    np.savez(path, x=X, y=Y)
    path.with_name(path.name + ".npz").rename(path)


def write_good_npy(path: Path) -> None:
    with open(path, "wb") as file:
        np.save(file, X)


def write_good_hdf5(path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        file["x"], file["y"] = X, Y


def write_good_mat(path: Path) -> None:
    from scipy.io import savemat

    with open(path, "wb") as file:
        savemat(file, {"x": X, "y": Y})


GOOD = {"npz": write_good_npz, "npy": write_good_npy, "hdf5": write_good_hdf5, "mat": write_good_mat}


def truncate_to_two_thirds(write_file: Callable[[Path], None]) -> Callable[[Path], None]:
    def write_truncated(path: Path) -> None:
        write_file(path)
        path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])

    return write_truncated


# Invalid files: name of the case, and a function that creates the file. Every importer refuses each file.
FILES: list[tuple[str, Callable[[Path], object]]] = [
    ("nothing there", lambda path: None),
    ("no bytes", lambda path: path.write_bytes(b"")),
    ("text", lambda path: path.write_text("to be or not to be\n" * 20)),
    ("noise", lambda path: path.write_bytes(np.random.default_rng(0).bytes(5000))),
    ("noise that was packed", lambda path: path.write_bytes(gzip.compress(b"\xff\0" * 3000))),
    ("half of a packed file", lambda path: path.write_bytes(gzip.compress(bytes(9000))[:20])),
    ("a folder", lambda path: path.mkdir()),
    ("a link in a circle", lambda path: path.symlink_to(path.name)),
    ("a zip of nothing", lambda path: path.write_bytes(b"PK\5\6" + bytes(18))),
]

IMPORTERS = ("npz", "npy", "svmlight", "hdf5", "mat", "csr", "images", "idx")


def assert_refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["data", "import", *arguments])
    output = capsys.readouterr()
    # The first test of a process compiles kernels, because each test has its own cache folder. The line that
    # reports the compilation is not part of the error.
    lines = [line for line in output.err.splitlines() if not line.startswith("compiling kernels")]
    assert ended.value.code == 2, output.err
    assert len(lines) == 1, output.err
    assert lines[0].startswith("error: ")
    assert len(lines[0]) < 900
    return lines[0]


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("SCALELATENT_DEBUG", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))


@pytest.mark.parametrize("importer", IMPORTERS)
@pytest.mark.parametrize("put", [row[1] for row in FILES], ids=[row[0] for row in FILES])
def test_files_of_another_format_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], importer: str, put: Callable[[Path], object]
) -> None:
    if importer == "hdf5":
        pytest.importorskip("h5py")
    put(tmp_path / "file")
    more = ["labels"] if importer == "idx" else []
    assert "file" in assert_refused(capsys, importer, "file", *more, "out.zarr")
    assert not os.path.lexists("out.zarr")


@pytest.mark.parametrize("importer", GOOD)
def test_a_truncated_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], importer: str
) -> None:
    truncate_to_two_thirds(GOOD[importer])(tmp_path / "file")
    assert "file" in assert_refused(capsys, importer, "file", "out.zarr")
    assert not os.path.lexists("out.zarr")


# Arrays that are not rows and labels: name of the case, saved arrays, words of the error message.
ARRAYS: list[tuple[str, dict[str, object], str]] = [
    ("fewer labels", {"x": X, "y": Y[:9]}, "9"),
    ("no rows", {"x": X[:0], "y": Y[:0]}, "nothing to import"),
    ("no x", {"data": X}, "'x'"),
    ("complex rows", {"x": X + 1j}, "complex"),
    ("rows of words", {"x": np.array([["a", "b"]])}, "x"),
    ("rows of objects", {"x": np.array([[None, 1]], dtype=object)}, "object"),
    ("rows of dates", {"x": np.zeros((3, 3), "M8[s]")}, "datetime64"),
    ("one number", {"x": np.float64(3)}, "x"),
    ("a NaN", {"x": np.where(X == 7, np.nan, X)}, "row 1, column 1"),
    ("labels without a number", {"x": X, "y": np.where(Y == 1, np.nan, Y)}, "row 1"),
    ("complex labels", {"x": X, "y": Y + 1j}, "complex"),
]  # fmt: skip


@pytest.mark.parametrize(("arrays", "reported"), [row[1:] for row in ARRAYS], ids=[row[0] for row in ARRAYS])
def test_arrays_that_are_not_rows_are_refused(
    capsys: pytest.CaptureFixture[str], arrays: dict[str, object], reported: str
) -> None:
    np.savez("file.npz", **arrays)  # type: ignore[arg-type]
    assert reported in assert_refused(capsys, "npz", "file.npz", "out.zarr")
    assert not os.path.lexists("out.zarr")


@pytest.mark.parametrize(
    "out", ["file.npz", "file.npz/x", "loop", "a" * 300, "nul\0", "ftp://host/x", "s3://"]
)
def test_an_impossible_output_is_refused(capsys: pytest.CaptureFixture[str], out: str) -> None:
    np.savez("file.npz", x=X, y=Y)
    os.symlink("loop", "loop")
    before = Path("file.npz").read_bytes()
    assert_refused(capsys, "npz", "file.npz", out)
    assert Path("file.npz").read_bytes() == before


def test_the_message_for_an_existing_output_names_overwrite(capsys: pytest.CaptureFixture[str]) -> None:
    np.savez("file.npz", x=X, y=Y)
    with pytest.raises(SystemExit):
        main(["data", "import", "npz", "file.npz", "out.zarr"])
    capsys.readouterr()
    message = assert_refused(capsys, "npz", "file.npz", "out.zarr")
    assert "--overwrite" in message
    assert "--resume" not in message


@pytest.mark.parametrize(("dtype", "least"), [("f4", 2 * 10**6 * 24), ("u1", 2 * 10**6 * 6 // 256)])
def test_a_shuffle_needs_space_for_two_copies(
    dtype: str, least: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from scalelatent.storage.disk import LocalLocation

    np.save("rows.npy", np.zeros((10**6, 6), dtype))
    monkeypatch.setattr(LocalLocation, "free_bytes", lambda self: least - 1)
    reported = assert_refused(capsys, "npy", "rows.npy", "rows.zarr", "--shuffle", "1")
    assert "2 copies of 1,000,000 rows of shape (6,)" in reported
    assert "free there; choose another place" in reported
    assert not [path for path in Path().iterdir() if path.name.startswith("rows.zarr")]
