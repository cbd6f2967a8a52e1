"""InfiniteDigits derives each image from its seed and index alone, by deforming a real digit (a base).

Images come only from the bases in ``base_rows``, and shards may be written in any order.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalelatent.data import Dataset, InfiniteDigits, make_digits, open_dataset
from scalelatent.errors import DataError
from scalelatent.generators.bases import load_base_digits
from scalelatent.generators.digit_kernels import render
from scalelatent.generators.digits import N_FIELDS, N_TEST, gaussian_taps, seeded_fields
from scalelatent.generators.make import make_shard as make_digits_shard


def render_reference(
    images: np.ndarray,
    base: np.ndarray,
    k1: np.ndarray,
    k2: np.ndarray,
    fields: np.ndarray,
    smooth: np.ndarray,
    derive: np.ndarray,
    alpha: np.float32,
    out: np.ndarray,
) -> None:
    """Write images to ``out`` by the float32 operations of the compiled kernel, in its order."""
    height, width = images.shape[1:]
    radius = len(smooth) // 2
    half, top, zero = np.float32(0.5), np.float32(255), np.float32(0)
    for i in range(len(out)):
        image = images[base[i]]
        if k1[i] < 0:
            out[i] = image
            continue
        padded = np.pad(image.astype(np.float32), radius)
        smoothed = np.zeros((height + 2 * radius, width), np.float32)
        sloped = np.zeros((height + 2 * radius, width), np.float32)
        for u in range(len(smooth)):
            smoothed += smooth[u] * padded[:, u : u + width]
            sloped += derive[u] * padded[:, u : u + width]
        t_x = np.zeros((height, width), np.float32)
        t_y = np.zeros((height, width), np.float32)
        for v in range(len(smooth)):
            t_x += smooth[v] * sloped[v : v + height]
            t_y += derive[v] * smoothed[v : v + height]
        value = image.astype(np.float32) + alpha * (fields[k1[i]] * t_x + fields[k2[i]] * t_y)
        out[i] = np.floor(np.minimum(np.maximum(value, zero), top) + half).astype(np.uint8)


def test_the_compiled_kernel_equals_its_reference() -> None:
    rng = np.random.Generator(np.random.Philox(5))
    images = rng.integers(0, 256, (6, 9, 11)).astype("u1")
    base = rng.integers(0, 6, 40)
    k1, k2 = rng.integers(-1, 20, 40), rng.integers(0, 20, 40)
    fields = rng.standard_normal((20, 9, 11)).astype("f4")
    smooth, derive = gaussian_taps(0.9, 3)
    for alpha in (1, 0.5, 3):
        plain, fast = np.empty((40, 9, 11), np.uint8), np.empty((40, 9, 11), np.uint8)
        arguments = (images, base, k1, k2, fields, smooth, derive, np.float32(alpha))
        render_reference(*arguments, plain)
        render(*arguments, fast)
        np.testing.assert_array_equal(plain, fast)
        np.testing.assert_array_equal(plain[k1 < 0], images[base[k1 < 0]])


def test_tangents_are_derivatives_of_the_smoothed_image() -> None:
    """If all pixels move by 1 along an axis, an image changes by the derivative of its smoothed version."""
    ndimage = pytest.importorskip("scipy.ndimage")
    image = np.zeros((1, 16, 16), np.uint8)
    image[0, 4:12, 5:10] = 90
    fields = np.stack([np.ones((16, 16)), np.zeros((16, 16))]).astype("f4")
    for order, (k1, k2) in (((0, 1), (0, 1)), ((1, 0), (1, 0))):
        out = np.empty((1, 16, 16), np.uint8)
        one = np.float32(1)
        number = np.array([0])
        render(image, number, np.array([k1]), np.array([k2]), fields, *gaussian_taps(1.0, 4), one, out)
        tangent = ndimage.gaussian_filter(image[0].astype(float), 1.0, order=order, mode="constant", radius=4)
        assert np.abs(out[0] - np.clip(image[0] + tangent, 0, 255)).max() <= 1.0


def test_fields_are_smooth_and_seeded() -> None:
    fields = seeded_fields(0, 28, 28)
    assert fields.shape == (N_FIELDS, 28, 28)
    assert 1.4 < fields.std() < 1.6
    assert np.abs(np.diff(fields, axis=2)).std() < 0.3
    assert not np.array_equal(fields, seeded_fields(1, 28, 28))
    assert float(fields[3, 2, 1]) == float(seeded_fields.__wrapped__(0, 28, 28)[3, 2, 1])


@settings(max_examples=40, deadline=None)
@given(start=st.integers(N_TEST, 2**41), count=st.integers(0, 20), cut=st.integers(0, 20))
def test_image_is_a_function_of_its_index(start: int, count: int, cut: int) -> None:
    digits = InfiniteDigits(*load_base_digits())
    x, y = digits.rows(start, start + count)
    cut = min(cut, count)
    parts = [digits.rows(start, start + cut), digits.rows(start + cut, start + count)]
    np.testing.assert_array_equal(x, np.concatenate([p[0] for p in parts]))
    np.testing.assert_array_equal(y, np.concatenate([p[1] for p in parts]))
    assert y.tolist() == [load_base_digits()[1][digits.base_of(i)] for i in range(start, start + count)]


def test_indices_have_the_published_numbering() -> None:
    digits = InfiniteDigits(*load_base_digits())
    for i in (N_TEST, 70_001, 8_000_000, 2**35 + 12345):
        k1, k2 = digits.fields_of(np.array([i]))
        assert k1[0] == (i * 131_071 % 2**32) % 1521
        assert k2[0] == (k1[0] + 1 + 2 * i) % 1522


def test_first_indices_are_the_bases_unchanged() -> None:
    images, labels = load_base_digits()
    digits = InfiniteDigits(images, labels, base_rows=(100, 600))
    x, y = digits.rows(N_TEST, N_TEST + 501)
    np.testing.assert_array_equal(x[:500], images[100:600])
    np.testing.assert_array_equal(y[:500], labels[100:600])
    assert digits.base_of(N_TEST + 500) == 100
    assert not np.array_equal(x[500], images[100])


def test_no_row_derives_from_an_excluded_base(tmp_path: Path) -> None:
    """If images and labels of the excluded bases change, the written rows and labels stay the same."""
    images, labels = load_base_digits()
    a, b = 200, 500
    Dataset.from_arrays(images, labels).save(tmp_path / "clean")
    spoilt, wrong = 255 - images, (labels + 1) % 10
    spoilt[a:b], wrong[a:b] = images[a:b], labels[a:b]
    Dataset.from_arrays(spoilt, wrong).save(tmp_path / "spoilt")
    made = [
        make_digits(tmp_path / f"from-{n}", 2000, base=tmp_path / n, base_rows=(a, b))
        for n in ("clean", "spoilt")
    ]
    for ds in made:
        np.testing.assert_array_equal(ds.read_x(0, 2000), made[0].read_x(0, 2000))
        np.testing.assert_array_equal(ds.read_y(0, 2000), labels[a + np.arange(2000) % (b - a)])
    assert made[0].attrs["provenance"]["base_rows"] == [a, b]


def read_files(ds: Dataset) -> tuple[bytes, bytes]:
    return ds.read_x(0, len(ds)).tobytes(), ds.read_y(0, len(ds)).tobytes()


def test_the_bits_do_not_depend_on_shards_threads_and_processes(tmp_path: Path) -> None:
    one = make_digits(tmp_path / "1", 3000, n_jobs=1, seed=4)
    two = make_digits(tmp_path / "2", 3000, n_jobs=3, seed=4, shard_rows=256)
    assert read_files(one) == read_files(two)
    # This process creates the dataset; another process then makes its shards in another order.
    from scalelatent.data import DatasetWriter, create_dataset

    provenance = {k: v for k, v in one.attrs["provenance"].items() if k != "scalelatent"}
    options: dict[str, Any] = {"y_dtype": "u1", "shard_rows": 500, "provenance": provenance}
    create_dataset(tmp_path / "3", 3000, (8, 8), "u1", **options)
    code = "import sys; from scalelatent.generators.make import make_shard as make\n"
    code += "for i in (4, 2, 0): make(sys.argv[1], i)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "3")], timeout=120, check=True)
    for shard in (1, 3, 5, 0):
        make_digits_shard(tmp_path / "3", shard)
    assert read_files(DatasetWriter.attach(tmp_path / "3").finalize()) == read_files(one)


SLOW_PROGRAM = """
import sys, time
import scalelatent.generators.digits as digits
import scalelatent.generators.make as make
write = make._write_shard
def slow(writer, shard):
    write(writer, shard)
    time.sleep(0.2)
make._write_shard = slow
digits.make_digits(sys.argv[1], 6000, shard_rows=250, n_jobs=2)
"""


def test_resume_after_kill_gives_the_same_dataset(tmp_path: Path) -> None:
    target = tmp_path / "killed"
    process = subprocess.Popen([sys.executable, "-c", SLOW_PROGRAM, str(target)])
    deadline = time.monotonic() + 60
    while len(list(target.glob("_shards/*.json"))) < 4:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=30)
    with pytest.raises(DataError, match=r"incomplete.*`scalelatent data repair .*killed`"):
        open_dataset(target)
    with pytest.raises(DataError, match=r"unfinished.*--resume"):
        make_digits(target, 6000)
    for changed, name in (({"seed": 9}, "seed was 0, now 9"), ({"base_rows": (0, 9)}, "base_rows")):
        with pytest.raises(DataError, match=name):
            make_digits(target, 6000, resume=True, **changed)  # type: ignore[arg-type]
    before = {p.name: p.stat().st_mtime_ns for p in target.glob("_shards/*.json")}
    written = {p: (target / "x/c" / str(int(p[:6])) / "0/0").stat().st_mtime_ns for p in before}
    ds = make_digits(target, 6000, resume=True)
    for marker, stamp in written.items():
        assert (target / "x/c" / str(int(marker[:6])) / "0/0").stat().st_mtime_ns == stamp
    assert read_files(ds) == read_files(make_digits(tmp_path / "whole", 6000))
    assert not (target / "_shards").exists()


def test_a_lost_shard_is_made_again(tmp_path: Path) -> None:
    ds = make_digits(tmp_path / "ds", 2000, shard_rows=500)
    whole = read_files(ds)
    (tmp_path / "ds/x/c/2/0/0").unlink()
    with pytest.raises(DataError, match=r"data repair .*ds` makes the lost shards again"):
        ds.read_x(1200, 1300)
    assert read_files(make_digits(tmp_path / "ds", 2000, resume=True)) == whole


def test_progress_rises_to_the_number_of_rows(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    make_digits(tmp_path / "ds", 1000, shard_rows=300, progress=lambda *c: calls.append(c), n_jobs=2)
    assert calls[-1] == (1000, 1000)
    assert [c[0] for c in calls] == sorted(c[0] for c in calls)


def test_a_changed_base_is_refused(tmp_path: Path) -> None:
    make_digits(tmp_path / "base", 500)
    from scalelatent.data import create_dataset

    provenance = dict(make_digits(tmp_path / "a", 500, base=tmp_path / "base").attrs["provenance"])
    provenance.pop("scalelatent")
    create_dataset(tmp_path / "b", 500, (8, 8), "u1", y_dtype="u1", provenance=provenance)
    make_digits(tmp_path / "base", 400, overwrite=True)
    with pytest.raises(DataError, match=r"its base \.\./base has changed"):
        make_digits_shard(tmp_path / "b", 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base_rows": (5, 5)}, "base rows 5:5 are not inside 0:1797"),
        ({"base_rows": (0, 1798)}, "--base-rows A:B"),
        ({"start": 5}, "begin at index 10000"),
        ({"rows": 0}, "0 rows"),
        ({"base": "nowhere"}, "nowhere does not exist"),
    ],
)
def test_parameters_out_of_range_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=message):
        make_digits(tmp_path / "ds", **{"rows": 10, **change})
    assert not (tmp_path / "ds").exists()


def test_bad_bases_are_refused(tmp_path: Path) -> None:
    images, labels = load_base_digits()
    with pytest.raises(DataError, match="uint8"):
        InfiniteDigits(images.astype("f4"), labels)
    with pytest.raises(DataError, match="one label an image"):
        InfiniteDigits(images, labels[:5])
    with pytest.raises(DataError, match="indices begin at 10000"):
        InfiniteDigits(images, labels).rows(0, 5)
    Dataset.from_arrays(images.astype("f4"), labels).save(tmp_path / "floats")
    with pytest.raises(DataError, match="uint8 images"):
        make_digits(tmp_path / "ds", 10, base=tmp_path / "floats")


def test_built_in_digits_are_those_of_scikit_learn() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    digits = datasets.load_digits()
    images, labels = load_base_digits()
    np.testing.assert_array_equal(images, np.rint(digits.images * (255 / 16)))
    np.testing.assert_array_equal(labels, digits.target)
