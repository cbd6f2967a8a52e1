"""`check_dataset` reads a whole dataset and names each missing, damaged or changed file and table."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from scalelatent.data import Dataset, append_rows, create_dataset, open_dataset
from scalelatent.data.check import DatasetCheck, check_dataset
from scalelatent.errors import DataError

from .test_seals import N, P, _save, make_arrays, remove_checksum_table


def list_files(found: DatasetCheck, root: Path) -> list[tuple[str, int, int]]:
    return [(str(Path(bad.file).relative_to(root)), bad.start, bad.stop) for bad in found.bad]


@pytest.mark.parametrize("kind", ["ints", "floats", "targets", "tiled", "csr"])
@pytest.mark.parametrize("before", [False, True])
def test_undamaged_datasets_of_all_kinds_pass_the_check(kind: str, before: bool, tmp_path: Path) -> None:
    _save(kind, 1, str(tmp_path / "a"))
    if before:
        remove_checksum_table(tmp_path / "a")
    reported: list[tuple[int, int]] = []
    found = check_dataset(tmp_path / "a", n_jobs=2, progress=lambda done, n: reported.append((done, n)))
    assert (found.bad, found.rows, found.checksums) == ((), N, not before)
    assert found.shards == (6 if kind == "tiled" else 3)
    assert reported == [(20, N), (40, N), (60, N)]
    assert found.seconds > 0 < found.bytes


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(
    ("kind", "keys"),
    [("ints", ["x/c/1/0", "y/c/1"]), ("tiled", ["x/c/1/1"]), ("csr", ["x/000001/data/c/0"])],
)
def test_shards_of_another_dataset_are_reported(
    kind: str, keys: list[str], before: bool, tmp_path: Path
) -> None:
    """A dataset of an earlier version has no checksums of chunks, only one digest per shard (20 rows). The
    check then names the first file of the rows of a bad shard, not every bad file.
    """
    for name, seed in (("a", 1), ("b", 2)):
        _save(kind, seed, str(tmp_path / name))
    if before:
        remove_checksum_table(tmp_path / "a")
    for key in keys:
        shutil.copyfile(tmp_path / "b" / key, tmp_path / "a" / key)
    found = check_dataset(tmp_path / "a")
    expected = [(key.split("/data")[0] if before else key, 20, 40) for key in keys]
    if before and kind == "tiled":
        expected = [("x/c/1/0", 20, 40)]
    assert list_files(found, tmp_path / "a") == expected[: 1 if before else None]


def test_missing_and_damaged_shards_do_not_stop_the_check(tmp_path: Path) -> None:
    _save("ints", 1, str(tmp_path / "a"))
    append_rows(tmp_path / "a", Dataset.from_arrays(**make_arrays("ints", 3)))
    segment = next(tmp_path.glob("a/append-*"))
    (tmp_path / "a/x/c/0/0").unlink()
    raw = bytearray((tmp_path / "a/weight/c/2").read_bytes())
    raw[5] ^= 1
    (tmp_path / "a/weight/c/2").write_bytes(raw)
    (segment / "y/c/0").unlink()
    found = check_dataset(tmp_path / "a")
    assert list_files(found, tmp_path / "a") == [
        ("x/c/0/0", 0, 20),
        ("weight/c/2", 40, 60),
        (f"{segment.name}/y/c/0", 60, 120),
    ]


@pytest.mark.parametrize("table", ["digest", "crc"])
def test_tables_of_another_dataset_are_reported_and_the_rest_is_checked(table: str, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        _save("ints", seed, str(tmp_path / name))
    shutil.copytree(tmp_path / "b" / table, tmp_path / "a" / table, dirs_exist_ok=True)
    (tmp_path / "a/x/c/2/0").unlink()
    found = check_dataset(tmp_path / "a")
    assert list_files(found, tmp_path / "a") == [(table, 0, N), ("x/c/2/0", 40, 60)]
    with pytest.raises(DataError):
        open_dataset(tmp_path / "a")


def test_an_unfinished_dataset_fails_the_check(tmp_path: Path) -> None:
    create_dataset(tmp_path / "a", N, (P,), "u1")
    with pytest.raises(DataError, match="incomplete"):
        check_dataset(tmp_path / "a")


def test_the_command_reports_damaged_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import json

    from scalelatent.cli import main

    def run(*options: str) -> tuple[Any, str]:
        with pytest.raises(SystemExit) as ended:
            main(["data", "check", str(tmp_path / "a"), *options])
        return ended.value.code or 0, capsys.readouterr().out

    _save("ints", 1, str(tmp_path / "a"))
    code, text = run()
    assert code == 0
    assert "60 rows in 3 shards" in text
    assert " s: no damage" in text
    (tmp_path / "a/x/c/2/0").unlink()
    code, text = run()
    assert code == 1
    assert "1 damaged\n" in text
    assert "x/c/2/0 (rows 40:60 of 'x') is missing" in text
    code, text = run("--json")
    reported = json.loads(text)
    assert code == 1
    assert (reported["rows"], reported["shards"], reported["seconds"] > 0) == (60, 3, True)
    assert (reported["bad"][0]["file"], reported["bad"][0]["start"]) == (str(tmp_path / "a/x/c/2/0"), 40)
