"""All importers write in parallel, shuffle on request, and remove incomplete datasets."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

import scalelatent.data as data
from scalelatent.data import Dataset, import_images, import_npy, open_dataset
from scalelatent.errors import DataError
from scalelatent.importers.stream import ArrayReader, import_rows

ROWS = np.random.Generator(np.random.Philox(5)).integers(0, 256, (90, 6)).astype("u1")
LABELS = np.array(["b", "a", "c"])[np.arange(90) % 3]


def _write(url: Path, rows: Any = None, **how: Any) -> Dataset:
    x = ArrayReader(ROWS, "rows") if rows is None else rows
    return import_rows(
        lambda: x,
        lambda: ArrayReader(LABELS, "labels"),
        url,
        importer="test",
        sources=["a/b"],
        shard_rows=10,
        **how,
    )


def list_files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def test_rows_labels_progress_and_provenance_are_written(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    ds = _write(tmp_path / "ds", progress=lambda *c: calls.append(c), provenance={"kind": 3})
    np.testing.assert_array_equal(ds.read_x(0, 90), ROWS)
    assert ds.read_y(0, 90).tolist() == LABELS.tolist()
    assert calls == [(10 * i, 90) for i in range(1, 10)]
    assert ds.attrs["provenance"].items() >= {"importer": "test", "source": ["b"], "kind": 3}.items()


def test_the_bits_do_not_depend_on_the_number_of_threads(tmp_path: Path, monkeypatch: Any) -> None:
    prints = set()
    for cores in (1, 2, 7):
        monkeypatch.setattr("dask.system.cpu_count", lambda n=cores: n)
        prints.add(_write(tmp_path / str(cores)).fingerprint())
    assert len(prints) == 1


def test_at_most_one_shard_more_than_threads_is_in_memory(tmp_path: Path, monkeypatch: Any) -> None:
    """The shards that are read and not yet written are at most one more than the writing threads."""
    monkeypatch.setattr("dask.system.cpu_count", lambda: 3)
    gate, reads = threading.Semaphore(0), []

    class Counted(ArrayReader):
        def read(self, rows: int) -> np.ndarray:
            reads.append(rows)
            # With three writing threads, the fifth shard must not be read before one shard is written.
            if len(reads) == 5:
                assert written.is_set()
            return super().read(rows)

    written = threading.Event()
    original = data.DatasetWriter.write_shard

    def write_slowly(self: Any, shard: int, *columns: Any) -> None:
        gate.acquire(timeout=0.2)
        original(self, shard, *columns)
        written.set()

    monkeypatch.setattr(data.DatasetWriter, "write_shard", write_slowly)
    _write(tmp_path / "ds", Counted(ROWS, "rows"))
    assert len(reads) == 9


@pytest.fixture
def recorded_shuffles(monkeypatch: Any) -> list[dict[str, Any]]:
    """Replace the shuffle by a reversal of the rows, and return a list of the arguments of each call."""
    calls: list[dict[str, Any]] = []

    def shuffle_dataset(source: Any, url: str, *, overwrite: bool, progress: Any, **how: Any) -> Dataset:
        calls.append({"source": source.url, "url": url, "overwrite": overwrite, **how})
        n = source.n_rows
        reverse = Dataset.from_arrays(source.read_x(0, n)[::-1], source.read_y(0, n)[::-1])
        if progress is not None:
            progress(n // 2, n)
            progress(n, n)
        if how["seed"] == 666:
            raise DataError("the shuffle fails")
        return reverse.save(url, overwrite=overwrite)

    monkeypatch.setattr("scalelatent.importers.stream.shuffle_dataset", shuffle_dataset)
    return calls


def test_shuffled_rows_replace_the_temporary_dataset(
    tmp_path: Path, recorded_shuffles: list[dict[str, Any]]
) -> None:
    calls: list[tuple[int, int]] = []
    ds = _write(tmp_path / "ds", shuffle=7, progress=lambda *c: calls.append(c))
    np.testing.assert_array_equal(ds.read_x(0, 90), ROWS[::-1])
    assert ds.read_y(0, 90).tolist() == LABELS[::-1].tolist()
    (call,) = recorded_shuffles
    assert call["source"].startswith(str(tmp_path / "ds.unshuffled-"))
    assert (call["seed"], call["shard_rows"], call["url"]) == (7, 10, str(tmp_path / "ds"))
    assert [p.name for p in tmp_path.iterdir()] == ["ds"]
    assert calls[0] == (5, 90)
    assert calls[-1] == (90, 90)
    assert calls == sorted(calls)


def test_failed_shuffle_leaves_nothing(tmp_path: Path, recorded_shuffles: list[dict[str, Any]]) -> None:
    with pytest.raises(DataError, match="the shuffle fails"):
        _write(tmp_path / "ds", shuffle=666)
    assert list_files(tmp_path) == []


def test_failed_import_with_shuffle_leaves_nothing(
    tmp_path: Path, recorded_shuffles: list[dict[str, Any]]
) -> None:
    rows = ROWS.astype("f4")
    rows[55, 2] = np.nan
    with pytest.raises(DataError, match="row 55, column 2 is nan"):
        _write(tmp_path / "ds", ArrayReader(rows, "rows"), shuffle=7)
    assert list_files(tmp_path) == []
    assert recorded_shuffles == []


def test_shuffle_refuses_an_existing_output_before_it_reads(
    tmp_path: Path, recorded_shuffles: list[dict[str, Any]]
) -> None:
    _write(tmp_path / "ds")
    before = list_files(tmp_path)
    with pytest.raises(DataError, match="--overwrite"):
        _write(tmp_path / "ds", None, shuffle=7)
    assert list_files(tmp_path) == before
    assert recorded_shuffles == []
    _write(tmp_path / "ds", shuffle=7, overwrite=True)
    np.testing.assert_array_equal(open_dataset(tmp_path / "ds").read_x(0, 90), ROWS[::-1])


@pytest.mark.parametrize("failing", [0, 4, 8])
def test_a_shard_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: Any, failing: int
) -> None:
    original = data.DatasetWriter.write_shard

    def write(self: Any, shard: int, *columns: Any) -> None:
        if shard == failing:
            raise DataError("no room")
        original(self, shard, *columns)

    monkeypatch.setattr(data.DatasetWriter, "write_shard", write)
    with pytest.raises(DataError, match="no room"):
        _write(tmp_path / "ds")
    assert list_files(tmp_path) == []


def make_sources(folder: Path) -> dict[str, Any]:
    """Return, by name of the importer, a function that imports files of ROWS ("digits" makes other rows)."""
    np.save(folder / "x.npy", ROWS)
    np.savez(folder / "x.npz", x=ROWS)
    savemat(folder / "x.mat", {"x": ROWS})
    with h5py.File(folder / "x.h5", "w") as file:
        file["x"] = ROWS
    (folder / "x.idx").write_bytes(bytes([0, 0, 8, 2, 0, 0, 0, 90, 0, 0, 0, 6]) + ROWS.tobytes())
    (folder / "images").mkdir()
    for i, row in enumerate(ROWS):
        Image.fromarray(row.reshape(2, 3)).save(folder / "images" / f"{i:03}.png")
    return {
        "npy": lambda *a, **k: import_npy(folder / "x.npy", *a, **k),
        "npz": lambda *a, **k: data.import_npz(folder / "x.npz", *a, **k),
        "mat": lambda *a, **k: data.import_mat(folder / "x.mat", *a, **k),
        "hdf5": lambda *a, **k: data.import_hdf5(folder / "x.h5", *a, **k),
        "idx": lambda *a, **k: data.import_idx(folder / "x.idx", None, *a, **k),
        "images": lambda *a, **k: import_images(folder / "images", *a, **k),
        "digits": lambda *a, **k: data.import_named("digits", *a, **k),
    }


@pytest.mark.parametrize("kind", ["npy", "npz", "mat", "hdf5", "idx", "images", "digits"])
def test_ctrl_c_during_an_import_leaves_nothing(tmp_path: Path, kind: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    run = make_sources(tmp_path / "in")[kind]
    run(tmp_path / "first", shard_rows=10)  # This import starts threads that stay, so they are counted below.
    threads = threading.active_count()

    def interrupt(done: int, total: int) -> None:
        if done >= total / 2:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "out" / "ds", shard_rows=10, progress=interrupt)
    assert list_files(tmp_path / "out") == []
    assert threading.active_count() <= threads, [t.name for t in threading.enumerate()]
    # Nothing of the interrupted import prevents another import.
    ds = run(tmp_path / "out" / "ds", shard_rows=10)
    assert kind == "digits" or np.array_equal(ds.read_x(0, 90), ROWS)


@pytest.mark.parametrize(
    "wrong", [{"shard_rows": 0}, {"compressor": "zip"}, {"chunk_rows": 3, "shard_rows": 7}]
)
def test_a_wrong_option_leaves_the_dataset_to_be_replaced(tmp_path: Path, wrong: dict[str, Any]) -> None:
    np.save(tmp_path / "x.npy", ROWS)
    before = import_npy(tmp_path / "x.npy", tmp_path / "ds").fingerprint()
    with pytest.raises(DataError):
        import_npy(tmp_path / "x.npy", tmp_path / "ds", overwrite=True, **wrong)
    assert open_dataset(tmp_path / "ds").fingerprint() == before


def test_too_many_distinct_strings_are_refused_by_all_writers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All functions that write rows have the same limit of classes and the same message."""
    monkeypatch.setattr("scalelatent.data.schema.MAX_CLASSES", 20)
    names = np.array([f"row {i}" for i in range(90)])
    np.savez(tmp_path / "a.npz", x=ROWS, y=names)
    mine = Dataset.from_arrays(ROWS, names)
    data.create_dataset(tmp_path / "numbers", 90, (6,), "u1", y_dtype="i8", classes=range(90))
    few = Dataset.from_arrays(ROWS[:10], names[:10]).save(tmp_path / "few")
    assert mine.classes is None
    np.testing.assert_array_equal(mine.read_y(0, 90), names)
    for write in (
        lambda: data.import_npz(tmp_path / "a.npz", tmp_path / "ds"),
        lambda: mine.save(tmp_path / "ds"),
        lambda: data.shuffle_dataset(mine, tmp_path / "ds", seed=1),
        lambda: data.create_dataset(tmp_path / "ds", 90, (6,), "u1", classes=names),
        lambda: data.append_rows(tmp_path / "few", mine),
        lambda: data.append_rows(tmp_path / "few", mine[5:25]),
    ):
        with pytest.raises(DataError, match="more than 20 distinct labels that are strings.*not classes"):
            write()
    assert not (tmp_path / "ds").exists()
    assert open_dataset(tmp_path / "few").fingerprint() == few.fingerprint()


def test_many_distinct_numbers_make_no_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scalelatent.data.schema.MAX_CLASSES", 20)
    mine = Dataset.from_arrays(ROWS, np.arange(90))
    assert mine.classes is None
    ds = mine.save(tmp_path / "ds")
    assert ds.classes is None
    np.testing.assert_array_equal(
        data.append_rows(tmp_path / "ds", mine).read_y(80, 100), [*range(80, 90), *range(10)]
    )
    with pytest.raises(DataError, match="has more than 20 distinct labels"):
        mine.read_codes(0, 90)
