"""Corrupted and clean images have the same order, exact amounts of corruption, and allowed bases only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.ndimage

from scalelatent.data import Dataset, make_corrupted, open_dataset
from scalelatent.errors import DataError
from scalelatent.generators.bases import load_base_digits
from scalelatent.generators.corrupted import url_of_clean_images
from scalelatent.generators.images import draw_uint32
from scalelatent.kernels.corruption_compiled import flip_exactly, occlude

IMAGES, LABELS = load_base_digits()
BITS = (IMAGES > 127).astype("u1")


def read_rows(ds: Dataset) -> np.ndarray:
    return ds.read_x(0, len(ds)).reshape(len(ds), *ds.feature_shape)


@pytest.mark.parametrize("share", [0.1, 0.2, 0.0, 1.0])
def test_noisy_images_flip_an_exact_share_of_pixels(tmp_path: Path, share: float) -> None:
    noisy, clean = make_corrupted(tmp_path / "n.zarr", "noisy-digits", share=share, shard_rows=500)
    assert clean.url == str(tmp_path / "n.clean.zarr")
    np.testing.assert_array_equal(read_rows(clean), BITS)
    np.testing.assert_array_equal(clean.read_y(0, len(clean)), LABELS)
    np.testing.assert_array_equal(noisy.read_y(0, len(noisy)), LABELS)
    changed = (read_rows(noisy) != BITS).reshape(len(BITS), -1)
    assert set(changed.sum(axis=1)) == {round(share * 64)}
    if share in (0.1, 0.2):  # Each pixel was drawn once per image, 1,797 times.
        assert np.abs(changed.mean(axis=0) - round(share * 64) / 64).max() < 0.04


def test_all_sets_of_flipped_pixels_are_equally_frequent() -> None:
    """Two of four bits are flipped in each of 12,000 rows; the six possible sets occur equally often."""
    bits = np.zeros((12_000, 4), np.uint8)
    flip_exactly(draw_uint32(0, "test", 0, 12_000, 2), bits)
    counts = np.unique(bits, axis=0, return_counts=True)[1]
    assert len(counts) == 6
    assert np.abs(counts - 2000).max() < 200
    again = np.zeros((7, 4), np.uint8)  # The flips of a row do not depend on earlier rows.
    flip_exactly(draw_uint32(0, "test", 500, 507, 2), again)
    np.testing.assert_array_equal(again, bits[500:507])


@pytest.mark.parametrize(("patch", "value"), [((3, 2), 0), ((8, 8), 0), ((4, 5), 1)])
def test_occluded_images_have_one_patch_of_the_value(
    tmp_path: Path, patch: tuple[int, int], value: int
) -> None:
    occluded, clean = make_corrupted(
        tmp_path / "o", "occluded-digits", patch=patch, value=value, clean=tmp_path / "c"
    )
    x = read_rows(occluded)
    for i in range(0, len(x), 97):
        windows = np.lib.stride_tricks.sliding_window_view(x[i], patch)
        explained = False
        for top, left in np.argwhere((windows == value).all(axis=(2, 3))):
            patched = BITS[i].copy()
            patched[top : top + patch[0], left : left + patch[1]] = value
            explained |= np.array_equal(patched, x[i])
        assert explained, i
    np.testing.assert_array_equal(read_rows(clean), BITS)


def test_all_positions_of_a_patch_are_equally_frequent() -> None:
    images = np.ones((12_000, 4, 5), np.uint8)
    occlude(draw_uint32(1, "test", 0, 12_000, 2), np.array([2, 3, 0]), images)
    assert (images.sum(axis=(1, 2)) == 14).all()
    corner = np.unique(images.reshape(12_000, -1).argmin(axis=1), return_counts=True)
    assert corner[0].tolist() == [0, 1, 2, 5, 6, 7, 10, 11, 12]
    assert np.abs(corner[1] - 12_000 / 9).max() < 200


DRAWN_KINDS = ["bordered-digits", "patched-digits", "gridded-digits", "cluttered-digits", "deleted-digits"]


def corrupt_blank_images(tmp_path: Path, kind: str, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Corrupt 400 images of value 0 and 400 of value 255 in the same way, and return both, as bits."""
    made = []
    for value in (0, 255):
        blank = tmp_path / f"{value}"
        Dataset.from_arrays(np.full((400, 12, 15), value, np.uint8)).save(blank, overwrite=True)
        made.append(read_rows(make_corrupted(tmp_path / "x", kind, base=blank, overwrite=True, **options)[0]))
    return made[0], made[1]


def test_borders_have_widths_within_the_limit(tmp_path: Path) -> None:
    drawn, whole = corrupt_blank_images(tmp_path, "bordered-digits", width=3)
    assert (whole == 1).all()
    widths = set()
    for image in drawn:
        inside = np.argwhere(image == 0)
        (top, left), (bottom, right) = inside.min(axis=0), inside.max(axis=0)
        assert image[top : bottom + 1, left : right + 1].sum() == 0
        widths.add((top, 11 - bottom, left, 14 - right))
    assert set(np.ravel(list(widths))) == {1, 2, 3}
    assert len(widths) > 70  # At least 71 of the 81 possible frames occur.


def test_patches_contain_random_pixels(tmp_path: Path) -> None:
    low, high = corrupt_blank_images(
        tmp_path, "patched-digits", patch=(6, 7)
    )  # A patch of 42 pixels needs more random bits than one draw has.
    hidden = low == high
    seen = np.argwhere(~hidden)  # Pixels outside of the patches do not change.
    assert (low[tuple(seen.T)] == 0).all()
    for image in hidden:
        rows, columns = np.flatnonzero(image.any(axis=1)), np.flatnonzero(image.any(axis=0))
        assert (len(rows), len(columns), image.sum()) == (6, 7, 42)
    assert abs(low[hidden].mean() - 0.5) < 0.02


def test_grids_have_lines_at_the_pitch(tmp_path: Path) -> None:
    drawn, whole = corrupt_blank_images(tmp_path, "gridded-digits", pitch=4)
    assert (whole == 1).all()
    for image in drawn:
        rows, columns = np.flatnonzero(image.all(axis=1)), np.flatnonzero(image.all(axis=0))
        assert set(np.diff(rows)) == set(np.diff(columns)) == {4}
        assert image.sum() == 180 - (12 - len(rows)) * (15 - len(columns))
    assert len({image.tobytes() for image in drawn}) == 16


@pytest.mark.parametrize("lines", [1, 2])
def test_lines_cross_the_image(tmp_path: Path, lines: int) -> None:
    drawn, whole = corrupt_blank_images(tmp_path, "cluttered-digits", lines=lines)
    assert (whole == 1).all()
    for image in drawn:
        assert image.any(axis=1).all() or image.any(axis=0).all()
        assert image.sum() <= lines * (12 + 15)
    if lines == 1:  # One line has no gaps, so its pixels are connected.
        assert all(scipy.ndimage.label(image, np.ones((3, 3)))[1] == 1 for image in drawn)
    assert (drawn.mean(axis=0) > 0).all()


def test_rows_columns_and_pixels_are_deleted(tmp_path: Path) -> None:
    low, high = corrupt_blank_images(tmp_path, "deleted-digits", share=0, lines=1)
    assert not low.any()
    gone = {(tuple(np.flatnonzero(~i.any(axis=1))), tuple(np.flatnonzero(~i.any(axis=0)))) for i in high}
    assert gone == {((row,), ()) for row in range(12)} | {((), (column,)) for column in range(15)}
    assert set((1 - high).sum(axis=(1, 2))) == {12, 15}
    _, high = corrupt_blank_images(tmp_path, "deleted-digits", share=0.2, lines=0)
    assert set((1 - high).sum(axis=(1, 2))) == {36}


@pytest.mark.parametrize("kind", ["noisy-digits", "occluded-digits", *DRAWN_KINDS])
def test_grey_values_are_kept(tmp_path: Path, kind: str) -> None:
    Dataset.from_arrays(IMAGES[:300], LABELS[:300]).save(tmp_path / "base")
    from_grey, clean = make_corrupted(
        tmp_path / "g", kind, base=tmp_path / "base", threshold=None, patch=(3, 4)
    )
    np.testing.assert_array_equal(read_rows(clean), IMAGES[:300])
    binary, _ = make_corrupted(tmp_path / "b", kind, base=tmp_path / "base", patch=(3, 4))
    grey, at = read_rows(from_grey), read_rows(from_grey) == IMAGES[:300]
    assert 0 < at.mean() < 1
    flipped = grey[~at] == 255 - IMAGES[:300][~at]
    assert (flipped if kind == "noisy-digits" else np.isin(grey[~at], (0, 255))).all()
    np.testing.assert_array_equal(
        (grey > 127)[~at], read_rows(binary)[~at]
    )  # Grey and binary images with one seed have changes at the same pixels.
    np.testing.assert_array_equal(read_rows(binary)[at], BITS[:300][at])


@pytest.mark.parametrize("kind", DRAWN_KINDS)
def test_a_row_is_a_function_of_its_number(tmp_path: Path, kind: str) -> None:
    many, _ = make_corrupted(
        tmp_path / "m", kind, base_rows=(0, 100), rows=3000, patch=(3, 3), shard_rows=700
    )
    few, _ = make_corrupted(
        tmp_path / "f", kind, base_rows=(0, 100), rows=1500, patch=(3, 3), shard_rows=1500
    )
    np.testing.assert_array_equal(read_rows(many)[:1500], read_rows(few))
    assert not np.array_equal(read_rows(many)[:100], read_rows(many)[100:200])
    other, _ = make_corrupted(tmp_path / "o", kind, base_rows=(0, 100), patch=(3, 3), seed=1)
    assert not np.array_equal(read_rows(other), read_rows(many)[:100])


def test_rows_beyond_the_bases_have_other_corruptions(tmp_path: Path) -> None:
    noisy, clean = make_corrupted(
        tmp_path / "n", "noisy-digits", base_rows=(100, 400), rows=1000, seed=5, shard_rows=256
    )
    base = 100 + np.arange(1000) % 300
    np.testing.assert_array_equal(read_rows(clean), BITS[base])
    np.testing.assert_array_equal(noisy.read_y(0, 1000), LABELS[base])
    x = read_rows(noisy)
    assert not np.array_equal(x[:300] != BITS[100:400], x[300:600] != BITS[100:400])
    few, _ = make_corrupted(tmp_path / "m", "noisy-digits", base_rows=(100, 400), rows=450, seed=5)
    np.testing.assert_array_equal(read_rows(few), x[:450])
    other, _ = make_corrupted(
        tmp_path / "o",
        "noisy-digits",
        base_rows=(100, 400),
        rows=450,
        seed=6,
        clean=url_of_clean_images(str(few.url)),
    )
    assert not np.array_equal(read_rows(other), x[:450])


def test_no_row_derives_from_an_excluded_base(tmp_path: Path) -> None:
    spoilt = 255 - IMAGES
    spoilt[200:500] = IMAGES[200:500]
    Dataset.from_arrays(IMAGES, LABELS).save(tmp_path / "clean")
    Dataset.from_arrays(spoilt, (LABELS + 1) % 10).save(tmp_path / "spoilt")
    made = [
        make_corrupted(tmp_path / f"from-{n}", "noisy-digits", base=tmp_path / n, base_rows=(200, 500))[0]
        for n in ("clean", "spoilt")
    ]
    np.testing.assert_array_equal(read_rows(made[0]), read_rows(made[1]))


def test_several_corruptions_share_the_clean_images(tmp_path: Path) -> None:
    _, clean = make_corrupted(tmp_path / "n", "noisy-digits", clean=tmp_path / "c")
    stamp = (tmp_path / "c/zarr.json").stat().st_mtime_ns
    _, same = make_corrupted(tmp_path / "o", "occluded-digits", clean=tmp_path / "c", patch=(2, 2))
    assert (tmp_path / "c/zarr.json").stat().st_mtime_ns == stamp
    assert same.fingerprint() == clean.fingerprint()
    with pytest.raises(DataError, match=r"c was started with other arguments .*threshold was 127, now 99"):
        make_corrupted(tmp_path / "p", "noisy-digits", clean=tmp_path / "c", threshold=99)
    with pytest.raises(DataError, match="n exists"):
        make_corrupted(tmp_path / "n", "noisy-digits", clean=tmp_path / "c")
    again, _ = make_corrupted(tmp_path / "n", "noisy-digits", clean=tmp_path / "c", resume=True)
    assert again.fingerprint() == open_dataset(tmp_path / "n").fingerprint()


def test_bases_without_labels_give_rows_without_labels(tmp_path: Path) -> None:
    Dataset.from_arrays(IMAGES[:50]).save(tmp_path / "base")
    noisy, clean = make_corrupted(tmp_path / "n", "noisy-digits", base=tmp_path / "base")
    assert not noisy.has_y
    assert not clean.has_y
    np.testing.assert_array_equal(read_rows(clean), BITS[:50])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "blurred-digits"}, "no corruption 'blurred-digits'"),
        ({"share": 1.2}, "is 1.2: give a number"),
        (
            {"kind": "occluded-digits", "patch": (9, 2)},
            "patch is 9 x 2, but it must fit into images of 8 x 8",
        ),
        ({"kind": "occluded-digits", "value": 2}, "value is 2"),
        ({"kind": "patched-digits", "patch": (2, 9)}, "patch is 2 x 9, but"),
        ({"kind": "bordered-digits", "width": 5}, "width is 5, but a border of images of 8 x 8 .* is 1 to 4"),
        ({"kind": "gridded-digits", "pitch": 1}, "pitch is 1, but lines must be 2 to 8 pixels apart"),
        ({"kind": "cluttered-digits", "lines": 0}, "lines is 0, but cluttered-digits need 1 to 8"),
        ({"kind": "deleted-digits", "lines": -1}, "lines is -1, but deleted-digits need 0 to 8"),
        ({"kind": "deleted-digits", "share": 1.1}, "share is 1.1, but the share of pixels that are off"),
        ({"threshold": 256}, "threshold is 256"),
        ({"seed": -1}, "seed is -1"),
        ({"base_rows": (5, 2000)}, "base rows 5:2000 are not inside 0:1797"),
        ({"base": "nowhere"}, "nowhere does not exist"),
        ({"base": "floats"}, "uint8 images"),
        ({"clean": "ds"}, "cannot hold both"),
        ({"rows": 0}, "0 rows"),
    ],
)
def test_parameters_out_of_range_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Dataset.from_arrays(IMAGES[:9].astype("f4")).save(tmp_path / "floats")
    arguments = {"kind": "noisy-digits", **change}
    with pytest.raises(DataError, match=message):
        make_corrupted(tmp_path / "ds", **arguments)
    assert not (tmp_path / "ds").exists()
