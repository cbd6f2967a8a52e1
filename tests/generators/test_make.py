"""All generators protect their bases, use threads, check seeds, and repair lost shards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from typer.testing import CliRunner

from scalelatent.data import (
    Dataset,
    InfiniteDigits,
    append_rows,
    make_corrupted,
    make_digits,
    make_documents,
    make_images,
    open_dataset,
    repair_dataset,
    shuffle_dataset,
)
from scalelatent.errors import DataError
from scalelatent.generators import digits as fields
from scalelatent.generators.bases import load_base_digits
from scalelatent.generators.make import make_rows

IMAGES, LABELS = load_base_digits()
COUNTS = sp.csr_array(np.random.default_rng(0).integers(0, 4, (40, 12)))


def write_bases(folder: Path) -> None:
    Dataset.from_arrays(IMAGES[:60], LABELS[:60]).save(folder / "images")
    Dataset.from_arrays(COUNTS, [f"{'bd'[i % 2]}" for i in range(40)]).save(folder / "counts")


MAKERS: dict[str, tuple[str, Callable[..., Any]]] = {
    "digits": ("images", lambda out, base, **how: make_digits(out, 100, base=base, **how)),
    "documents": ("counts", lambda out, base, **how: make_documents(out, 100, base=base, **how)),
    "noisy": ("images", lambda out, base, **how: make_corrupted(out, "noisy-digits", base=base, **how)),
}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("name", ["itself", "link"])
def test_a_base_is_not_replaced_by_rows_made_from_it(tmp_path: Path, maker: str, name: str) -> None:
    write_bases(tmp_path)
    base, make = MAKERS[maker]
    before = open_dataset(tmp_path / base)
    out = tmp_path / base
    if name == "link":
        out = tmp_path / "link"
        out.symlink_to(tmp_path / base)
    with pytest.raises(DataError, match="cannot replace itself"):
        make(out, tmp_path / base, overwrite=True)
    after = open_dataset(tmp_path / base)
    assert after.fingerprint() == before.fingerprint()
    assert (after.read_x(0, 40) != before.read_x(0, 40)).sum() == 0


def test_a_base_is_not_replaced_by_clean_images_made_from_it(tmp_path: Path) -> None:
    write_bases(tmp_path)
    with pytest.raises(DataError, match="cannot replace itself"):
        make_corrupted(
            tmp_path / "out",
            "noisy-digits",
            base=tmp_path / "images",
            clean=tmp_path / "images",
            overwrite=True,
        )
    assert open_dataset(tmp_path / "images").n_rows == 60
    (tmp_path / "out").mkdir()
    (tmp_path / "same").symlink_to(tmp_path / "out")
    with pytest.raises(DataError, match="cannot hold both"):
        make_corrupted(tmp_path / "out", "noisy-digits", clean=tmp_path / "same")


def test_existing_outputs_are_found_before_rows_are_made(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "thesis.txt").write_text("")
    calls: list[int] = []
    with pytest.raises(DataError, match="c exists and is not a scalelatent dataset"):
        make_corrupted(
            tmp_path / "n", "noisy-digits", clean=tmp_path / "c", progress=lambda *c: calls.append(c[0])
        )
    assert not calls
    assert not (tmp_path / "n").exists()
    make_digits(tmp_path / "n", 10)
    with pytest.raises(DataError, match="n exists"):
        make_corrupted(tmp_path / "n", "noisy-digits")
    assert not (tmp_path / "n.clean").exists()


def test_overwrite_keeps_shared_clean_images_unless_they_change(tmp_path: Path) -> None:
    def stamps() -> list[int]:
        return [p.stat().st_mtime_ns for p in sorted((tmp_path / "c").rglob("*")) if p.is_file()]

    _, clean = make_corrupted(tmp_path / "n", "noisy-digits", clean=tmp_path / "c", shard_rows=500)
    before = stamps()
    how: dict[str, Any] = {"clean": tmp_path / "c", "overwrite": True}
    _, same = make_corrupted(tmp_path / "n", "noisy-digits", share=0.2, shard_rows=900, **how)
    assert stamps() == before
    assert same.fingerprint() == clean.fingerprint()
    _, other = make_corrupted(tmp_path / "n", "noisy-digits", threshold=99, **how)
    assert other.fingerprint() != clean.fingerprint()


def test_corrupting_decodes_each_chunk_of_the_base_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from scalelatent.data.read.chunks import StoredRows

    big = np.tile(IMAGES, (3, 1, 1))
    Dataset.from_arrays(big, np.tile(LABELS, 3)).save(tmp_path / "base", chunk_rows=4096)
    plain, _ = make_corrupted(
        "memory://corrupt-plain", "noisy-digits", base=tmp_path / "base", overwrite=True
    )
    decoded: list[int] = []
    decode = StoredRows._decode

    def counting(self: StoredRows, file: Any, start: int, stop: int, *rest: Any) -> None:
        if len(self.shape) == 3:
            decoded.append(start // self.chunk_rows)
        decode(self, file, start, stop, *rest)

    monkeypatch.setattr(StoredRows, "_decode", counting)
    make_rows(tmp_path / "m", len(big), list_parameters(plain), shard_rows=len(big))
    assert sorted(decoded) == [0, 1]


def list_parameters(ds: Dataset) -> dict[str, Any]:
    return {k: v for k, v in ds.attrs["provenance"].items() if k != "scalelatent"}


@pytest.mark.parametrize("n_jobs", [0, -1])
def test_less_than_one_thread_is_refused(tmp_path: Path, n_jobs: int) -> None:
    with pytest.raises(DataError, match=f"n_jobs is {n_jobs}, but it must be at least 1"):
        make_digits(tmp_path / "ds", 10, n_jobs=n_jobs)
    assert not (tmp_path / "ds").exists()


def test_all_usable_cores_are_used_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from scalelatent.generators import make

    pools: list[int] = []

    class Pool(make.ThreadPoolExecutor):  # type: ignore[name-defined,misc]
        def __init__(self, threads: int) -> None:
            pools.append(threads)
            super().__init__(threads)

    monkeypatch.setattr(make, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr("dask.system.cpu_count", lambda: 3)
    make_images(tmp_path / "a", "bars", 10)
    make_images(tmp_path / "b", "bars", 10, n_jobs=2)
    assert pools == [3, 2]


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_seeds_out_of_range_are_refused(tmp_path: Path, seed: int) -> None:
    ds = Dataset.from_arrays(COUNTS).save(tmp_path / "counts")
    for make in (
        lambda out: make_digits(out, 10, seed=seed),
        lambda out: make_images(out, "bars", 10, seed=seed),
        lambda out: make_corrupted(out, "noisy-digits", seed=seed),
        lambda out: make_documents(out, 10, base=tmp_path / "counts", seed=seed),
        lambda out: shuffle_dataset(ds, out, seed=seed),
    ):
        with pytest.raises(DataError, match=f"seed is {seed}: give a whole number from 0 to"):
            make(tmp_path / "ds")
    assert [p.name for p in tmp_path.iterdir()] == ["counts"]


def test_only_the_base_rows_that_are_used_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Dataset.from_arrays(IMAGES[:1000], LABELS[:1000]).save(tmp_path / "base")
    read: list[tuple[int, int]] = []
    read_x = Dataset.read_x

    def reading(self: Dataset, a: int, b: int) -> Any:
        read.append((a, b))
        return read_x(self, a, b)

    monkeypatch.setattr(Dataset, "read_x", reading)
    ds = make_digits(tmp_path / "ds", 300, base=tmp_path / "base", base_rows=(40, 50))
    assert read == [(40, 50)]
    digits = InfiniteDigits(IMAGES, LABELS, base_rows=(40, 50))
    x, y = digits.rows(10_000, 10_300)
    np.testing.assert_array_equal(ds.read_x(0, 300), x.reshape(300, 64))
    np.testing.assert_array_equal(ds.read_y(0, 300), y)


def test_fields_of_large_images_are_made_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fields.seeded_fields.__wrapped__(5, 9, 7)
    largest = [0]
    smooth = fields.smooth_fields

    def smoothing(noise: np.ndarray, taps: np.ndarray) -> np.ndarray:
        largest[0] = max(largest[0], len(noise))
        return smooth(noise, taps)

    monkeypatch.setattr(fields, "smooth_fields", smoothing)
    monkeypatch.setattr(fields, "_MAX_NOISE_VALUES", 5_000)
    np.testing.assert_array_equal(fields.seeded_fields.__wrapped__(5, 9, 7), whole)
    assert 0 < largest[0] < 50
    with pytest.raises(DataError, match=r"600 x 400 pixels: .* take 1,461 MB .* scale the images down"):
        fields.seeded_fields(0, 600, 400)


def lose_files(folder: Path) -> None:
    """Remove one of the files of rows of a dataset, and truncate another."""
    files = sorted(p for p in (folder / "x").rglob("0") if p.is_file())
    files[1].unlink()
    files[2].write_bytes(files[2].read_bytes()[:-3])


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("grown", [False, True])
def test_repair_makes_lost_shards_again(tmp_path: Path, maker: str, grown: bool) -> None:
    write_bases(tmp_path)
    base, make = MAKERS[maker]
    made = make(tmp_path / "ds", tmp_path / base, shard_rows=20)
    ds = made[0] if isinstance(made, tuple) else made
    if grown:
        # The appended class sorts before the strings of documents, which changes the codes of their classes.
        y = "aaaaa" if maker == "documents" else [11] * 5
        x = ds.read_x(0, 5)
        more = Dataset.from_arrays(
            x if maker == "documents" else x.reshape(5, 8, 8), np.array(list(y), ds.read_y(0, 1).dtype)
        )
        ds = append_rows(tmp_path / "ds", more)
    before = ds.fingerprint()
    x, y = ds.read_x(0, ds.n_rows), ds.read_y(0, ds.n_rows)
    lose_files(tmp_path / "ds")
    with pytest.raises(DataError, match=r"`scalelatent data repair .*ds` makes the lost shards again"):
        ds.read_x(0, ds.n_rows)
    shown = CliRunner().invoke(make_app(), ["data", "repair", str(tmp_path / "ds"), "--json"])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["rows"] == ds.n_rows
    ds = open_dataset(tmp_path / "ds")
    assert ds.fingerprint() == before
    assert (ds.read_x(0, ds.n_rows) != x).sum() == 0
    np.testing.assert_array_equal(ds.read_y(0, ds.n_rows), y)


def make_app() -> Any:
    from scalelatent.cli import app

    return app


def test_repair_completes_an_interrupted_dataset(tmp_path: Path) -> None:
    def stop(done: int, rows: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_corrupted(tmp_path / "n", "noisy-digits", shard_rows=300, progress=stop)
    with pytest.raises(DataError, match=r"incomplete.*`scalelatent data repair .*n\.clean`"):
        open_dataset(tmp_path / "n.clean")
    ds = repair_dataset(tmp_path / "n.clean", n_jobs=2)
    np.testing.assert_array_equal(ds.read_x(0, 9), IMAGES[:9].reshape(9, 64) > 127)


def test_imported_rows_cannot_be_made_again(tmp_path: Path) -> None:
    Dataset.from_arrays(IMAGES).save(tmp_path / "ds")
    with pytest.raises(DataError, match="was not made by a generator"):
        repair_dataset(tmp_path / "ds")
