"""Generated image sets derive images, and the places of their features, from seed and row alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.ndimage
from hypothesis import given, settings
from hypothesis import strategies as st

from scalelatent.data import DatasetWriter, image_set, image_set_of, make_images, open_dataset
from scalelatent.errors import DataError
from scalelatent.generators import GENERATORS
from scalelatent.generators.glyphs import LETTERS, SYMBOLS, draw_bitmaps, draw_traits
from scalelatent.generators.images import DEFAULTS, VOCABULARY, ImageSet
from scalelatent.generators.make import generator_of, make_shard

KINDS = sorted(DEFAULTS)
OPTIONS: dict[str, dict[str, Any]] = {
    "bars": {"crosses": 3, "length": 4},
    "symbols": {"size": (20, 31), "count": 6},
    "letters": {"size": (17, 23), "count": 4},
    "text": {"size": (30, 70)},
    "traits": {},
}


def make_set(kind: str, **options: Any) -> ImageSet:
    return image_set(kind, **{"seed": 3, "noise": 0.05, **OPTIONS[kind], **options})


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    start=st.integers(0, 2**40),
    count=st.integers(1, 12),
    cut=st.integers(0, 12),
    noise=st.sampled_from([0.0, 0.1]),
)
def test_image_is_a_function_of_its_row(kind: str, start: int, count: int, cut: int, noise: float) -> None:
    images = make_set(kind, noise=noise)
    x, y = images.rows(start, start + count)
    middle = start + min(cut, count)
    parts = [images.rows(start, middle), images.rows(middle, start + count)]
    np.testing.assert_array_equal(x, np.concatenate([p[0] for p in parts]))
    assert x.dtype == np.uint8
    assert set(np.unique(x)) <= {0, 1}
    if y is not None:
        np.testing.assert_array_equal(y, np.concatenate([p[1] for p in parts if p[1] is not None]))
    np.testing.assert_array_equal(
        images.truth(start, start + count)[-1], images.truth(start + count - 1, start + count)[0]
    )


@pytest.mark.parametrize("kind", ["bars", "symbols", "letters", "text"])
def test_clean_images_are_their_placed_features(kind: str) -> None:
    """An image without noise is the union (OR) of its features at their places, all completely inside."""
    images = make_set(kind)
    sizes = [b.shape for b in draw_bitmaps(images.parameters["features"])]
    height, width = images.image_shape
    found = images.clean(100, 140)
    for image, placed in zip(found, images.truth(100, 140), strict=True):
        expected = np.zeros((height, width), np.uint8)
        for feature, top, left in placed[placed[:, 0] >= 0]:
            h, w = sizes[feature]
            assert 0 <= top <= height - h
            assert 0 <= left <= width - w
            expected[top : top + h, left : left + w] |= images.features[feature, :h, :w]
        np.testing.assert_array_equal(image, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_noise_flips_its_share_of_independent_pixels(kind: str) -> None:
    images = make_set(kind, noise=0.05)
    flipped = images.rows(0, 2000)[0] != images.clean(0, 2000)
    n = flipped.size
    assert abs(flipped.mean() - 0.05) < 5 * np.sqrt(0.05 * 0.95 / n)
    by_pixel = flipped.mean(axis=0)
    assert by_pixel.min() > 0.05 - 6 * np.sqrt(0.05 * 0.95 / 2000)
    assert by_pixel.max() < 0.05 + 6 * np.sqrt(0.05 * 0.95 / 2000)
    neighbours = (flipped[:, :, 1:] & flipped[:, :, :-1]).mean()
    assert abs(neighbours - 0.05**2) < 5 * np.sqrt(0.05**2 / n)
    np.testing.assert_array_equal(make_set(kind, noise=0.0).rows(5, 9)[0].shape, images.clean(5, 9).shape)


def test_places_and_features_are_uniform() -> None:
    images = make_set("letters", size=(9, 8), count=1, alphabet="AIZ", noise=0.0)
    truth = images.truth(0, 30_000)[:, 0]
    assert np.abs(np.bincount(truth[:, 0]) / 30_000 - 1 / 3).max() < 0.015
    tops = np.bincount(truth[:, 1]) / 30_000
    assert len(tops) == 3
    assert np.abs(tops - 1 / 3).max() < 0.015
    narrow = truth[truth[:, 0] == 1]  # The narrow letter I has 6 places, others have 4.
    assert sorted(np.unique(narrow[:, 2])) == list(range(6))
    assert sorted(np.unique(truth[truth[:, 0] == 0][:, 2])) == list(range(4))


def test_bars_cross_in_all_25_ways_once() -> None:
    images = image_set("bars", noise=0)
    x, _ = images.rows(0, 3)
    assert images.image_shape == (35, 35)
    orders = []
    for image in x:
        cells = [image[7 * i : 7 * i + 7, 7 * j : 7 * j + 7] for i in range(5) for j in range(5)]
        for cell in cells:
            assert cell.sum() == 9
            assert cell[0].sum() == cell[6].sum() == cell[:, 0].sum() == cell[:, 6].sum() == 0
        assert len({cell.tobytes() for cell in cells}) == 25
        orders.append(b"".join(cell.tobytes() for cell in cells))
    assert len(set(orders)) == 3


def test_text_is_made_of_words_that_fit() -> None:
    images = image_set("text", size=(40, 100))
    counts: dict[str, int] = {}
    for placed in images.truth(0, 50):
        placed = placed[placed[:, 0] >= 0]
        line: list[tuple[str, int]] = []
        end = 0
        for feature, top, left in [*placed, (-1, -1, -1)]:
            if line and (feature < 0 or top != line[0][1] or left > end + 1):
                word = "".join(letter for letter, _ in line)
                counts[word] = counts.get(word, 0) + 1
                line = []
            if feature >= 0:
                letter = images.names[feature]
                line.append((letter, top))
                end = left + len(images.parameters["features"][letter][0])
    assert set(counts) <= set(VOCABULARY)
    assert max(counts, key=counts.__getitem__) == "THE"
    assert len(counts) > 100


def test_grey_traits_are_the_binary_ones_blurred() -> None:
    binary, labels = image_set("traits", seed=3).rows(0, 2000)
    grey, same = image_set("traits", seed=3, blur=1).rows(0, 2000)
    np.testing.assert_array_equal(same, labels)
    side = np.array([1, 2, 1]) / 4
    mixed = scipy.ndimage.convolve(255.0 * binary, np.multiply.outer(side, side)[None], mode="constant")
    assert np.abs(grey - mixed).max() <= 0.5
    twice = scipy.ndimage.convolve(np.float64(grey), np.multiply.outer(side, side)[None], mode="constant")
    assert np.abs(image_set("traits", seed=3, blur=2).rows(0, 2000)[0] - twice).max() <= 0.5
    grains = image_set("traits", seed=3, blur=1, grain=20).rows(0, 2000)[0].astype(int) - grey
    inside = (grey > 20) & (grey < 235)
    assert set(grains[inside]) == set(range(-20, 21))
    assert abs(grains[inside].mean()) < 0.2
    np.testing.assert_array_equal(image_set("traits", seed=3, grain=0).rows(7, 9)[0], binary[7:9])
    np.testing.assert_array_equal(image_set("traits", seed=3, blur=1).rows(1500, 1507)[0], grey[1500:1507])
    assert image_set("traits", blur=0).parameters == image_set("traits").parameters


def test_traits_are_samples_of_their_network() -> None:
    images = image_set("traits", noise=0.0, labels="pattern")
    n = 4000
    x, pattern = images.rows(0, n)
    category = image_set("traits", noise=0.0).rows(0, n)[1]
    assert pattern is not None
    assert category is not None
    np.testing.assert_array_equal(category, (pattern >> 1) ^ (pattern & 1))
    assert np.abs(np.bincount(pattern) / n - 0.25).max() < 0.03
    truth = images.truth(0, n)
    np.testing.assert_array_equal(truth[:, 0, 0], pattern >> 1)
    np.testing.assert_array_equal(truth[:, 1, 0], 2 + (pattern & 1))
    for trait, left in ((0, 1), (1, 16)):
        for axis, first in ((1, 1), (2, left)):
            moved = np.bincount(truth[:, trait, axis] - (first - 1)) / n
            assert len(moved) <= 4
            assert np.abs(moved[moved > 0] - 1 / 3).max() < 0.03
    # The network moves pixels by at most 1, so each active pixel is near a pixel of the clean image.
    for i in range(50):
        shape, diagonal = truth[i]
        clean = np.zeros(images.image_shape, np.uint8)
        for feature, top, left in (shape, diagonal):
            clean[top : top + 13, left : left + 13] |= images.features[feature]
        near = np.zeros_like(clean)
        padded = np.pad(clean, 1)
        for dy in range(3):
            for dx in range(3):
                near |= padded[dy : dy + clean.shape[0], dx : dx + clean.shape[1]]
        assert not (x[i] & ~near & 1).any()
        assert 0.5 * clean.sum() < x[i].sum() <= clean.sum()
    together = image_set("traits", together=True)
    assert together.image_shape == (17, 17)


def test_pixels_move_in_nine_directions_equally_often() -> None:
    from scalelatent.generators.image_kernels import jitter_pixels
    from scalelatent.generators.images import draw_uint32

    images = np.zeros((9000, 5, 5), np.uint8)
    images[:, 2, 2] = 1
    out = np.empty_like(images)
    jitter_pixels(draw_uint32(0, "test", 0, 9000, 25), images, out)
    assert (out.sum(axis=(1, 2)) == 1).all()
    where = out.mean(axis=0)[1:4, 1:4]
    assert np.abs(where - 1 / 9).max() < 0.015


def test_drawings_are_distinct_and_fill_their_boxes() -> None:
    assert "".join(LETTERS) == "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    for drawing in draw_bitmaps(LETTERS):
        assert drawing.shape in ((7, 5), (7, 3))
        assert drawing.any(axis=0).all()  # No column is empty, so letters fill their boxes.
        assert drawing[[0, -1]].any(axis=1).all()
    assert {b.shape for b in draw_bitmaps(SYMBOLS)} == {(7, 7)}
    for size in (5, 13, 16):
        assert {b.shape for b in draw_bitmaps(draw_traits(size))} == {(size, size)}
    for table in (LETTERS, SYMBOLS, draw_traits(5), draw_traits(13)):
        assert len({b.tobytes() for b in draw_bitmaps(table)}) == len(table)
    np.testing.assert_array_equal(draw_bitmaps(draw_traits(9))[2], draw_bitmaps(draw_traits(9))[3][:, ::-1])
    with pytest.raises(DataError, match="lines of different lengths"):
        draw_bitmaps({"a": ["#", "##"]})
    with pytest.raises(DataError, match="other signs"):
        draw_bitmaps({"a": ["x"]})


@pytest.mark.parametrize("kind", KINDS)
def test_datasets_contain_the_rows_of_their_set(tmp_path: Path, kind: str) -> None:
    options = OPTIONS[kind]
    ds = make_images(tmp_path / "a", kind, 300, seed=3, shard_rows=64, n_jobs=2, **options)
    images = image_set_of(ds)
    x, y = images.rows(0, 300)
    np.testing.assert_array_equal(ds.read_x(0, 300).reshape(x.shape), x)
    assert (y is not None) == ds.has_y
    if y is not None:
        np.testing.assert_array_equal(ds.read_y(0, 300), y)
    longer = make_images(tmp_path / "b", kind, 310, seed=3, **options)
    np.testing.assert_array_equal(longer.read_x(0, 300), ds.read_x(0, 300))
    other = make_images(tmp_path / "c", kind, 300, seed=4, **options)
    assert not np.array_equal(other.read_x(0, 300), ds.read_x(0, 300))
    (tmp_path / "a/x/c/2/0/0").unlink()
    with pytest.raises(DataError, match="data repair .*/a` makes the lost shards again"):
        ds.read_x(0, 300)
    again = make_images(tmp_path / "a", kind, 300, seed=3, shard_rows=64, resume=True, **options)
    np.testing.assert_array_equal(again.read_x(0, 300).reshape(x.shape), x)


def test_shards_are_made_in_any_order_from_the_provenance(tmp_path: Path) -> None:
    whole = make_images(tmp_path / "whole", "letters", 200, shard_rows=64, alphabet="XYZ")
    from scalelatent.data import create_dataset

    provenance = {k: v for k, v in whole.attrs["provenance"].items() if k != "scalelatent"}
    create_dataset(tmp_path / "parts", 200, (24, 24), "u1", shard_rows=64, provenance=provenance)
    for shard in (3, 1, 0, 2, 1):
        make_shard(tmp_path / "parts", shard)
    ds = DatasetWriter.attach(tmp_path / "parts").finalize()
    assert ds.fingerprint() == whole.fingerprint()
    assert image_set_of(open_dataset(tmp_path / "parts")).names == ["X", "Y", "Z"]


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("faces", {}, "no image set 'faces'; the sets are bars, symbols"),
        ("bars", {"alphabet": "A"}, "bars has no option 'alphabet'; it has noise, crosses, length"),
        ("letters", {"alphabet": "AÄ"}, "different letters A to Z"),
        ("letters", {"alphabet": "AA"}, "different letters A to Z"),
        ("letters", {"size": (6, 30)}, "size 6 x 30: its features need at least 7 x 5"),
        ("text", {"size": (9000, 30)}, "at most 8192"),
        ("letters", {"count": 0}, "count is 0, but it must be 1 to 1000"),
        ("letters", {"noise": 1.5}, "noise is 1.5"),
        ("letters", {"seed": -1}, "seed is -1"),
        ("traits", {"labels": "colour"}, "labels is 'colour'"),
        ("traits", {"blur": 101}, "blur is 101 and grain 0, but images are blurred 0 to 100 times"),
        ("traits", {"grain": 256}, "grain 256, but"),
        ("traits", {"size": 4}, "size is 4, but traits are 5 to 1000 pixels wide"),
        ("letters", {"rows": 0}, "0 rows"),
    ],
)
def test_parameters_out_of_range_are_refused(
    tmp_path: Path, kind: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        make_images(tmp_path / "ds", kind, **{"rows": 5, **options})
    assert not (tmp_path / "ds").exists()


def test_imported_datasets_have_no_image_set(tmp_path: Path) -> None:
    from scalelatent.data import Dataset

    ds = Dataset.from_arrays(np.eye(3)).save(tmp_path / "ds")
    with pytest.raises(DataError, match="holds no binary image set"):
        image_set_of(ds)
    with pytest.raises(DataError, match="was not made by a generator"):
        generator_of({"importer": "npz"}, "here")
    assert set(DEFAULTS) < set(GENERATORS)
