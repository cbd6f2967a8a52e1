"""The importers of IDX, npy and npz files read all dtypes and labels, and refuse every kind of bad file."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalelatent.data import Dataset, import_idx, import_npy, import_npz, open_dataset
from scalelatent.errors import DataError

IMAGES = np.random.Generator(np.random.Philox(3)).integers(0, 256, (50, 5, 4)).astype("u1")
LABELS = (np.arange(50) % 7).astype("u1")
_CODES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}


def make_idx_bytes(array: np.ndarray) -> bytes:
    head = struct.pack(f">BBBB{array.ndim}I", 0, 0, _CODES[array.dtype.str[1:]], array.ndim, *array.shape)
    return head + array.astype(array.dtype.newbyteorder(">")).tobytes()


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "images").write_bytes(make_idx_bytes(IMAGES))
    (tmp_path / "labels").write_bytes(make_idx_bytes(LABELS))
    return tmp_path / "images", tmp_path / "labels"


def _pack(path: Path) -> Path:
    # The name does not end with .gz, so the importer must find by the content that the file is gzip.
    packed = path.with_suffix(".bin")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    return packed


@pytest.mark.parametrize("packed", [False, True])
def test_idx_rows_and_labels_are_read(files: tuple[Path, Path], tmp_path: Path, packed: bool) -> None:
    images, labels = map(_pack, files) if packed else files
    calls: list[tuple[int, int]] = []
    ds = import_idx(images, labels, tmp_path / "ds", shard_rows=20, progress=lambda *c: calls.append(c))
    np.testing.assert_array_equal(ds.read_x(0, 50), IMAGES.reshape(50, -1))
    np.testing.assert_array_equal(ds.read_y(0, 50), LABELS)
    assert ds.feature_shape == (5, 4)
    assert ds.dtype == np.uint8
    assert ds.classes.tolist() == list(range(7))
    assert calls == [(20, 50), (40, 50), (50, 50)]
    provenance = ds.attrs["provenance"]
    assert provenance["importer"] == "idx"
    assert provenance["source"] == [images.name, labels.name]
    assert str(tmp_path) not in str(provenance)
    assert not import_idx(images, None, tmp_path / "rows").has_y


@pytest.mark.parametrize("kind", ["i1", "i2", "i4", "f4", "f8"])
def test_idx_files_of_all_dtypes_are_read(tmp_path: Path, kind: str) -> None:
    rows = (IMAGES % 100).astype(kind)
    (tmp_path / "x").write_bytes(make_idx_bytes(rows))
    ds = import_idx(tmp_path / "x", None, tmp_path / "ds")
    assert ds.dtype == np.dtype(kind)
    np.testing.assert_array_equal(ds.read_x(0, 50), rows.reshape(50, -1))


def assert_refused(tmp_path: Path, *message: str, images: Any, labels: Any = None) -> None:
    with pytest.raises(DataError) as error:
        import_idx(images, labels, tmp_path / "out", shard_rows=20)
    for part in message:
        assert part in str(error.value)
    with pytest.raises(DataError, match="does not exist"):
        open_dataset(tmp_path / "out")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("keep", [0, 3, 9, 16, 400, 1015])
def test_truncated_idx_files_are_refused(
    files: tuple[Path, Path], tmp_path: Path, packed: bool, keep: int
) -> None:
    path = tmp_path / "short"
    path.write_bytes(files[0].read_bytes()[:keep])
    source = _pack(path) if packed else path
    what = {0: "expected, found nothing", 3: "found 00 00 08", 9: "found 5"}
    expected = what.get(keep, f"needs 1,016 bytes with its header, but it ends at byte {keep:,}")
    assert_refused(tmp_path, str(source), expected, images=source)


def test_truncated_and_damaged_gzip_is_refused(files: tuple[Path, Path], tmp_path: Path) -> None:
    content = gzip.compress(files[0].read_bytes())
    path = tmp_path / "cut.gz"
    path.write_bytes(content[: len(content) // 2])
    assert_refused(tmp_path, str(path), "is truncated", "needs 1,016 bytes", images=path)
    path.write_bytes(content[:12])
    assert_refused(tmp_path, str(path), "damaged in its header", images=path)
    path.write_bytes(content[:-8] + b"\0\0\0\0" + content[-4:])
    assert_refused(
        tmp_path, str(path), "is damaged after byte 1,016", "download or copy it again", images=path
    )


@pytest.mark.parametrize("packed", [False, True])
def test_trailing_bytes_are_refused(files: tuple[Path, Path], tmp_path: Path, packed: bool) -> None:
    path = tmp_path / "long"
    path.write_bytes(files[0].read_bytes() + b"abc")
    source = _pack(path) if packed else path
    assert_refused(tmp_path, str(source), "an end at byte 1,016", "at least 3 bytes follow", images=source)


def test_wrong_missing_and_swapped_files_are_refused(files: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(b"\x89PNG....")
    assert_refused(
        tmp_path, str(path), "at byte 0", "00 00 08 03 for images", "found 89 50 4e 47", images=path
    )
    assert_refused(
        tmp_path, "image file", "nowhere does not exist; check the path", images=tmp_path / "nowhere"
    )
    assert_refused(tmp_path, "label file", "does not exist", images=files[0], labels=tmp_path / "nowhere")
    assert_refused(tmp_path, "it holds labels, not images", images=files[1], labels=files[0])
    assert_refused(tmp_path, "it holds images, not labels", images=files[0], labels=files[0])
    path.write_bytes(struct.pack(">BBBB3I", 0, 0, 8, 3, 0, 5, 4))
    assert_refused(tmp_path, "shape (0, 5, 4), which is empty", images=path)
    path.write_bytes(gzip.compress(struct.pack(">BBBB3I", 0, 0, 8, 3, 9, 2**31, 2**31)))
    assert_refused(tmp_path, "bytes a row; the header is damaged", images=path)


def test_another_number_of_labels_is_refused(files: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "few").write_bytes(make_idx_bytes(LABELS[:49]))
    assert_refused(
        tmp_path, str(files[0]), "holds 50 rows", "holds 49 labels", images=files[0], labels=tmp_path / "few"
    )


def test_an_existing_output_stays_without_overwrite(files: tuple[Path, Path], tmp_path: Path) -> None:
    import_idx(*files, tmp_path / "ds")
    with pytest.raises(DataError, match="--overwrite"):
        import_idx(files[0], None, tmp_path / "ds")
    assert open_dataset(tmp_path / "ds").has_y
    assert not import_idx(files[0], None, tmp_path / "ds", overwrite=True).has_y


def test_a_bad_file_leaves_the_dataset_to_be_replaced(files: tuple[Path, Path], tmp_path: Path) -> None:
    import_idx(*files, tmp_path / "ds")
    (tmp_path / "cut").write_bytes(files[0].read_bytes()[:-1])
    with pytest.raises(DataError, match="truncated"):
        import_idx(tmp_path / "cut", None, tmp_path / "ds", overwrite=True)
    assert len(open_dataset(tmp_path / "ds")) == 50


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("kind", ["u1", "f4", ">f8", "?", "i8"])
def test_npy_rows_and_labels_are_read(tmp_path: Path, order: str, kind: str) -> None:
    rows = np.asarray(IMAGES.astype(kind), order=order)  # type: ignore[call-overload]
    np.save(tmp_path / "x.npy", rows)
    np.save(tmp_path / "y.npy", LABELS.astype("i8")[:, None])
    ds = import_npy(tmp_path / "x.npy", tmp_path / "ds", y=tmp_path / "y.npy", shard_rows=15)
    np.testing.assert_array_equal(ds.read_x(0, 50), rows.reshape(50, -1))
    np.testing.assert_array_equal(ds.read_y(0, 50), LABELS)
    assert ds.attrs["provenance"]["source"] == ["x.npy", "y.npy"]


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("names", [("x", "y"), ("X", "Y"), ("pixels", "kind")])
def test_npz_rows_and_labels_are_read(tmp_path: Path, save: Any, names: tuple[str, str]) -> None:
    words = np.array(["ab", "c", "ddd", "e", "f"])[LABELS % 5]
    save(tmp_path / "a.npz", **{names[0]: IMAGES, names[1]: words, "other": np.zeros(3)})
    keys = {} if names[0] in "xX" else {"x": names[0], "y": names[1]}
    ds = import_npz(tmp_path / "a.npz", tmp_path / "ds", **keys, shard_rows=15)  # type: ignore[arg-type]
    np.testing.assert_array_equal(ds.read_x(0, 50), IMAGES.reshape(50, -1))
    assert ds.read_y(0, 50).tolist() == words.tolist()
    assert ds.classes.tolist() == ["ab", "c", "ddd", "e", "f"]


def assert_npz_refused(tmp_path: Path, message: str, path: Path, **keys: Any) -> None:
    with pytest.raises(DataError, match=message) as error:
        import_npz(path, tmp_path / "out", **keys)
    assert str(path) in str(error.value)
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())


def test_missing_and_ambiguous_npz_arrays_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, data=IMAGES, target=LABELS)
    assert_npz_refused(tmp_path, r"has no array 'x'; it holds data, target: name one with --x KEY", path)
    assert_npz_refused(tmp_path, r"has no array 'label'.*--y KEY", path, x="data", y="label")
    assert not import_npz(path, tmp_path / "ds", x="data").has_y
    np.savez(path, x=IMAGES, X=IMAGES)
    assert_npz_refused(tmp_path, "has 2 arrays that could be 'x'", path)


def test_bad_npz_archives_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, x=IMAGES, y=LABELS[:40])
    assert_npz_refused(tmp_path, "holds 50 rows, but .* holds 40 labels", path)
    np.savez(path, x=np.array([[1, "a", None]], dtype=object))
    assert_npz_refused(tmp_path, r"array 'x' holds Python objects.*any code", path)
    np.savez(path, x=IMAGES, y=np.array(["a"] * 50, dtype=object))
    assert_npz_refused(tmp_path, "array 'y' holds Python objects", path)
    np.savez(path, x=IMAGES.astype(complex))
    assert_npz_refused(tmp_path, "complex numbers", path)
    np.savez(path, x=LABELS)
    assert_npz_refused(tmp_path, r"shape \(50,\); rows x features are needed", path)
    np.savez(path, x=np.asfortranarray(IMAGES))
    assert_npz_refused(tmp_path, "Fortran order.*ascontiguousarray", path)
    np.savez_compressed(path, x=IMAGES)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    assert_npz_refused(tmp_path, "not an npz archive, or is truncated", path)
    damaged = bytearray(content)
    damaged[len(content) // 2] ^= 0xFF
    path.write_bytes(damaged)
    assert_npz_refused(tmp_path, "damaged", path)
    path.write_text("nothing")
    assert_npz_refused(tmp_path, "not an npz archive", path)


def test_bad_npy_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, IMAGES)
    content = path.read_bytes()
    size = f"{len(content):,}"
    for bad, message in (
        (content[:-7], f"needs {size} bytes with its header, but it ends at byte {len(content) - 7:,}"),
        (content + b"1", f"an end at byte {size}, but at least 1 bytes follow"),
        (content[:40], "damaged at byte 0"),
        (b"", "damaged at byte 0"),
        (b"PK" + content, "not an npy array"),
    ):
        path.write_bytes(bad)
        with pytest.raises(DataError, match=message):
            import_npy(path, tmp_path / "out")
    with pytest.raises(DataError, match=r"rows .*none\.npy does not exist"):
        import_npy(tmp_path / "none.npy", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_the_error_names_the_position_of_nan_or_infinity(tmp_path: Path, bad: float) -> None:
    rows = IMAGES.astype("f4")
    rows[33, 2, 1] = bad
    np.save(tmp_path / "x.npy", rows)
    with pytest.raises(DataError, match=r"x\.npy: row 33, column 9 is (nan|-inf)"):
        import_npy(tmp_path / "x.npy", tmp_path / "out", shard_rows=10)
    with pytest.raises(DataError, match="does not exist"):
        open_dataset(tmp_path / "out")


@pytest.mark.realdata
def test_rows_of_mnist_are_those_of_the_files(data_root: Path, tmp_path: Path) -> None:
    folder = data_root / "mnist"
    ds = import_idx(
        folder / "t10k-images-idx3-ubyte.gz", folder / "t10k-labels-idx1-ubyte.gz", tmp_path / "mnist"
    )
    assert (len(ds), ds.feature_shape, ds.classes.tolist()) == (10_000, (28, 28), list(range(10)))
    assert np.bincount(ds.read_codes(0, 10_000)).tolist() == [
        980,
        1135,
        1032,
        1010,
        982,
        892,
        958,
        1028,
        974,
        1009,
    ]


@pytest.mark.parametrize("names", ["a.npz", "b.npz"])
def test_an_npz_array_with_a_damaged_start_is_refused(tmp_path: Path, names: str) -> None:
    """The header before an array is damaged; the directory at the end of the archive stays intact."""
    np.savez(tmp_path / names, x=np.eye(4), y=np.arange(4))
    content = bytearray((tmp_path / names).read_bytes())
    at = 0 if names == "a.npz" else content.index(b"PK\3\4", 4)
    content[at : at + 4] = b"????"
    (tmp_path / names).write_bytes(content)
    with pytest.raises(DataError, match=rf"{names}, array '[xy]' is damaged at its start: .*again"):
        import_npz(tmp_path / names, tmp_path / "ds")
    assert not (tmp_path / "ds").exists()


def test_labels_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    labels = np.array([b"a", b"b", b"\xe9t\xe9", b"a"])
    np.savez(tmp_path / "a.npz", x=np.eye(4), y=labels)
    for use in (
        lambda: import_npz(tmp_path / "a.npz", tmp_path / "ds"),
        lambda: Dataset.from_arrays(np.eye(4), labels),
    ):
        with pytest.raises(DataError, match=r"the label of row 2 is b'\\xe9t\\xe9', which is not UTF-8 text"):
            use()
    assert not (tmp_path / "ds").exists()
