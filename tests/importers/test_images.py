"""Folders of image files give images of one size with labels; every kind of bad file is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from scalelatent.data import Dataset, import_images, open_dataset
from scalelatent.errors import DataError

RNG = np.random.Generator(np.random.Philox(11))
GRAY = RNG.integers(0, 256, (40, 5, 4)).astype("u1")
RGB = RNG.integers(0, 256, (6, 5, 4, 3)).astype("u1")


def save(path: Path, pixels: np.ndarray, **how: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **how)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a folder of 20 images of class 'cat', 20 of class 'dog' (5 in a subfolder), and other files."""
    for i, pixels in enumerate(GRAY):
        kind = "cat" if i < 20 else "dog/old" if i < 25 else "dog"
        save(tmp_path / "in" / kind / f"{i:02}.png", pixels)
    (tmp_path / "in" / "notes.txt").write_text("mine")
    (tmp_path / "in" / "cat" / ".hidden.png").write_text("no image")
    return tmp_path / "in"


# Numbers of the images in the order of the rows: files of a folder come before files of its subfolders.
ORDER = [*range(20), *range(25, 40), *range(20, 25)]


def assert_nothing_at(path: Path) -> bool:
    with pytest.raises(DataError, match="does not exist"):
        open_dataset(path)
    return not path.exists()


@pytest.mark.parametrize("shard_rows", [7, 64])
def test_gray_images_in_class_folders_are_read(folder: Path, tmp_path: Path, shard_rows: int) -> None:
    calls: list[tuple[int, int]] = []
    ds = import_images(folder, tmp_path / "ds", shard_rows=shard_rows, progress=lambda *c: calls.append(c))
    assert ds.feature_shape == (5, 4)
    assert ds.dtype == np.uint8
    np.testing.assert_array_equal(ds.read_x(0, 40), GRAY[ORDER].reshape(40, -1))
    assert ds.read_y(0, 40).tolist() == ["cat"] * 20 + ["dog"] * 20
    assert calls[-1] == (40, 40)
    provenance = ds.attrs["provenance"]
    assert (
        provenance.items() >= {"importer": "images", "source": ["in"], "files": 40, "other_files": 1}.items()
    )
    assert "skipped" not in provenance


def test_order_and_bits_do_not_depend_on_threads(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    prints = set()
    for cores in (1, 5):
        monkeypatch.setattr("dask.system.cpu_count", lambda n=cores: n)
        prints.add(import_images(folder, tmp_path / str(cores)).fingerprint())
    assert len(prints) == 1


@pytest.mark.parametrize(
    ("names", "expected", "kind"),
    [(("10", "9", "0"), [0, 9, 10], "u1"), (("-1", "3"), [-1, 3], "i8"), (("00", "01"), ["00", "01"], "U2")],
)
def test_classes_are_integers_if_folder_names_are_plain_integers(
    tmp_path: Path, names: tuple[str, ...], expected: list[Any], kind: str
) -> None:
    for name in names:
        save(tmp_path / "in" / name / "a.png", GRAY[0])
    ds = import_images(tmp_path / "in", tmp_path / "ds")
    assert ds.classes.tolist() == expected
    assert ds.read_y(0, len(names)).dtype == np.dtype(kind)
    assert sorted(ds.read_y(0, len(names)).tolist()) == expected


def test_images_without_classes_are_read(folder: Path, tmp_path: Path) -> None:
    assert not import_images(folder / "cat", tmp_path / "flat").has_y
    ds = import_images(folder, tmp_path / "nested", labels=False)
    assert not ds.has_y
    assert len(ds) == 40
    save(folder / "stray.png", GRAY[0])
    with pytest.raises(DataError, match=r"holds 1 images next to 2 folders of images.*--no-labels"):
        import_images(folder, tmp_path / "out")
    assert len(import_images(folder, tmp_path / "all", labels=False)) == 41


def test_links_to_parent_folders_are_not_followed(folder: Path, tmp_path: Path) -> None:
    os.symlink(folder, folder / "cat" / "again")
    assert len(import_images(folder, tmp_path / "ds")) == 40


def write_image(tmp_path: Path, pixels: np.ndarray, name: str = "a.png", **how: Any) -> Dataset:
    save(tmp_path / "one" / name, pixels)
    return import_images(tmp_path / "one", tmp_path / "ds", overwrite=True, **how)


def test_gray_colour_and_16_bit_images_are_read(tmp_path: Path) -> None:
    ds = write_image(tmp_path, RGB[0])
    assert ds.feature_shape == (5, 4, 3)
    np.testing.assert_array_equal(ds.read_x(0, 1), RGB[0].reshape(1, -1))
    ds = write_image(tmp_path, RGB[0], color="gray")
    luma = RGB[0] @ [0.299, 0.587, 0.114]
    assert np.abs(ds.read_x(0, 1).reshape(5, 4) - luma).max() <= 1
    ds = write_image(tmp_path, GRAY[0], color="rgb")
    np.testing.assert_array_equal(ds.read_x(0, 1).reshape(5, 4, 3), np.repeat(GRAY[0][..., None], 3, 2))
    deep = RNG.integers(0, 65536, (5, 4)).astype("u2")
    ds = write_image(tmp_path, deep)
    assert ds.dtype == np.uint16
    np.testing.assert_array_equal(ds.read_x(0, 1), deep.reshape(1, -1))
    ds = write_image(tmp_path, GRAY[0] > 128)
    assert set(np.unique(ds.read_x(0, 1))) == {0, 255}


def test_palette_images_become_colour(tmp_path: Path) -> None:
    image = Image.fromarray(RGB[0]).quantize(256)
    (tmp_path / "one").mkdir()
    image.save(tmp_path / "one" / "a.gif")
    ds = import_images(tmp_path / "one", tmp_path / "ds")
    np.testing.assert_array_equal(ds.read_x(0, 1).reshape(5, 4, 3), np.asarray(image.convert("RGB")))


def test_ambiguous_images_and_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.png has transparency; choose --gray or --rgb.*--skip-bad"):
        write_image(tmp_path, np.dstack([RGB[0], GRAY[0]]))
    assert write_image(tmp_path, np.dstack([RGB[0], GRAY[0]]), color="rgb").feature_shape == (5, 4, 3)
    with pytest.raises(DataError, match="is gray of more than 8 bits .* which has no colour"):
        write_image(tmp_path, GRAY[0].astype("u2"), color="rgb")
    for how, message in (
        ({"size": (0, 3)}, r"size is \(0, 3\), but it must be \(height, width\)"),
        ({"color": "grey"}, "color is 'grey', but it must be 'gray', 'rgb' or None"),
        ({"crop": True}, "crop needs a size"),
    ):
        with pytest.raises(DataError, match=message):
            write_image(tmp_path, GRAY[0], **how)


def test_images_are_resized_and_cropped(tmp_path: Path) -> None:
    wide = np.zeros((10, 30), "u1")
    wide[:, 10:20] = 200  # Only the middle third of the image is bright.
    stretched = write_image(tmp_path, wide, size=(2, 3)).read_x(0, 1).reshape(2, 3)
    assert stretched[0, 1] > 140
    assert stretched[0, 0] < 50
    cropped = write_image(tmp_path, wide, size=(2, 2), crop=True).read_x(0, 1)
    assert cropped.min() > 140
    deep = write_image(tmp_path, wide.astype("u2") * 300, size=(2, 3))
    assert deep.dtype == np.uint16
    assert deep.read_x(0, 1)[0, 1] > 40_000
    ds = write_image(tmp_path, np.dstack([wide] * 3), size=(2, 3), color="gray")
    assert ds.feature_shape == (2, 3)
    assert ds.attrs["provenance"].items() >= {"size": [2, 3], "crop": False, "color": "gray"}.items()


def test_large_jpegs_are_decoded_at_reduced_size_with_the_same_picture(tmp_path: Path) -> None:
    ramp = np.add.outer(np.linspace(0, 200, 640), np.linspace(0, 50, 480)).astype("u1")
    small = (
        write_image(tmp_path, np.dstack([ramp] * 3), "a.jpg", size=(16, 12)).read_x(0, 1).reshape(16, 12, 3)
    )
    exact = ramp.reshape(16, 40, 12, 40).mean((1, 3))
    assert np.abs(small - exact[..., None]).max() < 4


def test_images_are_rotated_by_their_exif_tag(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # The value 6 of this tag means a rotation by 90 degrees.
    (tmp_path / "one").mkdir()
    Image.fromarray(GRAY[0]).save(tmp_path / "one" / "a.png", exif=exif)
    ds = import_images(tmp_path / "one", tmp_path / "ds")
    np.testing.assert_array_equal(ds.read_x(0, 1).reshape(4, 5), np.rot90(GRAY[0], -1))


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:60])


BAD_IMAGES = {
    "truncated": (_truncate, r"33\.png cannot be read: .*trunc"),
    "empty": (lambda path: path.write_bytes(b""), r"33\.png cannot be read: it is none of BMP, GIF, JPEG"),
    "of another type": (lambda path: path.write_text("hello"), r"33\.png cannot be read: it is none of BMP"),
    "of another size": (
        lambda path: save(path, np.zeros((6, 4), "u1")),
        r"33\.png is 6 x 4 gray uint8, but the first image, cat/00\.png, is 5 x 4 gray uint8; .*--size HxW",
    ),
    "coloured": (
        lambda path: save(path, RGB[0]),
        r"33\.png is 5 x 4 colour uint8, but the first image, cat/00\.png, is 5 x 4 gray uint8; .*--gray or",
    ),
}


@pytest.mark.parametrize("what", BAD_IMAGES)
def test_a_bad_image_is_refused_or_skipped(folder: Path, tmp_path: Path, what: str) -> None:
    spoil, message = BAD_IMAGES[what]
    spoil(folder / "dog" / "33.png")
    with pytest.raises(DataError, match=message) as error:
        import_images(folder, tmp_path / "out", shard_rows=8)
    assert str(folder / "dog") in str(error.value)
    assert "--skip-bad (skip_bad=True)" in str(error.value)
    assert assert_nothing_at(tmp_path / "out")

    spoil(folder / "cat" / "00.png" if what in ("truncated", "empty") else folder / "dog" / "39.png")
    ds = import_images(folder, tmp_path / "out", shard_rows=8, skip_bad=True)
    left_out = {33, 0 if what in ("truncated", "empty") else 39}
    kept = [i for i in ORDER if i not in left_out]
    np.testing.assert_array_equal(ds.read_x(0, 38), GRAY[kept].reshape(38, -1))
    assert ds.read_y(0, 38).tolist() == ["cat" if i < 20 else "dog" for i in kept]
    skipped = ds.attrs["provenance"]["skipped"]
    unlike = 2 if what in ("of another size", "coloured") else 0
    assert (skipped["unreadable"], skipped["unlike_first"]) == (2 - unlike, unlike)
    assert "dog/33.png" in skipped["first"]


def test_the_first_of_several_bad_images_is_named(folder: Path, tmp_path: Path) -> None:
    for i in (21, 8, 36, 17):
        (folder / ("cat" if i < 20 else "dog/old" if i < 25 else "dog") / f"{i:02}.png").write_bytes(b"")
    for _ in range(3):
        with pytest.raises(DataError, match=r"cat/08\.png cannot be read"):
            import_images(folder, tmp_path / "out")


@pytest.mark.parametrize("n_bad", [32, 8, 1])
def test_skipped_images_shrink_or_empty_the_last_shards(folder: Path, tmp_path: Path, n_bad: int) -> None:
    """Skipped images make the last shards shorter or unnecessary; the dataset has the other images."""
    for i in ORDER[40 - n_bad :]:
        (folder / ("cat" if i < 20 else "dog/old" if i < 25 else "dog") / f"{i:02}.png").write_bytes(b"")
    ds = import_images(folder, tmp_path / "ds", skip_bad=True, chunk_rows=4, shard_rows=8)
    n = 40 - n_bad
    assert len(ds) == len(open_dataset(tmp_path / "ds")) == n
    np.testing.assert_array_equal(ds.read_x(0, n), GRAY[ORDER[:n]].reshape(n, -1))
    copied = Dataset.from_arrays(ds.read_x(0, n), ds.read_y(0, n)).save(tmp_path / "copy", overwrite=True)
    assert copied.read_y(0, n).tolist() == ds.read_y(0, n).tolist()


def test_a_folder_of_bad_images_only_is_refused(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.png").write_bytes(b"no")
    with pytest.raises(DataError, match=r"a\.png cannot be read: it is none of"):
        import_images(tmp_path, tmp_path / "out")
    with pytest.raises(DataError, match=r"none of its images can be used; the first, a\.png cannot be read"):
        import_images(tmp_path, tmp_path / "out", skip_bad=True)
    assert assert_nothing_at(tmp_path / "out")


def test_a_first_image_that_differs_from_most_is_refused(folder: Path, tmp_path: Path) -> None:
    save(folder / "cat" / "00.png", np.zeros((9, 9), "u1"))
    with pytest.raises(DataError, match=r"39 images are not like the first, cat/00\.png, and only 1 are"):
        import_images(folder, tmp_path / "out", skip_bad=True)
    assert assert_nothing_at(tmp_path / "out")


def test_folders_without_images_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere does not exist; give the folder that holds the class"):
        import_images(tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "in").mkdir()
    with pytest.raises(DataError, match=r"holds no images.*\.jpg.*it holds no files at all"):
        import_images(tmp_path / "in", tmp_path / "out")
    (tmp_path / "in" / "a.csv").touch()
    with pytest.raises(DataError, match=r"it holds 1 \.csv"):
        import_images(tmp_path / "in", tmp_path / "out")
    with pytest.raises(DataError, match=r"a\.csv is a file, not a folder"):
        import_images(tmp_path / "in" / "a.csv", tmp_path / "out")
    assert assert_nothing_at(tmp_path / "out")


@pytest.mark.parametrize("change", ["more", "fewer"])
def test_a_folder_that_changes_during_the_import_is_refused(
    folder: Path, tmp_path: Path, change: str
) -> None:
    def interfere(done: int, total: int) -> None:
        if done == 5 and change == "more":
            save(folder / "dog" / "new.png", GRAY[0])
        elif done == 5:
            (folder / "dog" / "30.png").unlink()

    with pytest.raises(DataError, match=r"dog held 15 images when the import started and holds 1[46] now"):
        import_images(folder, tmp_path / "out", shard_rows=5, progress=interfere)
    assert assert_nothing_at(tmp_path / "out")


def test_a_failed_import_leaves_the_dataset_to_be_replaced(folder: Path, tmp_path: Path) -> None:
    import_images(folder, tmp_path / "ds")
    with pytest.raises(DataError, match="--overwrite"):
        import_images(folder / "cat", tmp_path / "ds")
    (folder / "cat" / "00.png").write_bytes(b"")
    with pytest.raises(DataError, match="cannot be read"):
        import_images(folder, tmp_path / "ds", overwrite=True)
    assert len(open_dataset(tmp_path / "ds")) == 40
