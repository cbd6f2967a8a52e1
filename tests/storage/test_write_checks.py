"""A write replaces datasets on request, and never its own input, links, or folders of other files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalelatent.data import Dataset, convert_dataset, create_dataset, open_dataset, shuffle_dataset
from scalelatent.errors import DataError
from scalelatent.storage.disk import LocalLocation, locate

X = np.arange(60.0).reshape(15, 4)


def _save(url: Any, x: np.ndarray = X, **options: Any) -> Dataset:
    return Dataset.from_arrays(x).save(url, **options)


@pytest.mark.parametrize("name", ["format_version_notes", "thesis"])
def test_a_folder_of_other_files_is_never_replaced(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "thesis.txt").write_text("years of work")
    with pytest.raises(DataError, match="is not a scalelatent dataset, so it is not replaced"):
        _save(tmp_path / name, overwrite=True)
    assert (tmp_path / name / "thesis.txt").exists()


def test_a_dataset_of_a_newer_version_is_replaced_on_request(tmp_path: Path) -> None:
    _save(tmp_path / "a")
    meta = (tmp_path / "a/zarr.json").read_text()
    (tmp_path / "a/zarr.json").write_text(meta.replace('"format_version": 1', '"format_version": 99'))
    with pytest.raises(DataError, match="exists; choose another output"):
        _save(tmp_path / "a")
    np.testing.assert_array_equal(_save(tmp_path / "a", X + 1, overwrite=True).read_x(0, 15), X + 1)


@pytest.mark.parametrize("how", ["convert", "shuffle", "save"])
def test_a_dataset_is_not_written_onto_itself_under_another_name(tmp_path: Path, how: str) -> None:
    ds = _save(tmp_path / "a.zarr")
    (tmp_path / "b.zarr").symlink_to(tmp_path / "a.zarr")
    (tmp_path / "folder").symlink_to(tmp_path)
    for other in (tmp_path / "b.zarr", tmp_path / "folder" / "a.zarr"):
        for source, out in ((ds, other), (open_dataset(other), tmp_path / "a.zarr")):
            with pytest.raises(DataError, match="cannot replace itself"):
                if how == "convert":
                    convert_dataset(source, out, overwrite=True)
                elif how == "shuffle":
                    shuffle_dataset(source, out, seed=1, overwrite=True)
                else:
                    source.save(out, overwrite=True)
    np.testing.assert_array_equal(open_dataset(tmp_path / "a.zarr").read_x(0, 15), X)


def test_an_output_that_contains_the_input_is_refused(tmp_path: Path) -> None:
    _save(tmp_path / "a.zarr")
    _save(tmp_path / "a.zarr/inner")
    for source in ("a.zarr/inner", "a.zarr/x"):
        with pytest.raises(DataError, match="cannot replace itself"):
            convert_dataset(tmp_path / source, tmp_path / "a.zarr", overwrite=True)
    assert open_dataset(tmp_path / "a.zarr/inner").n_rows == 15


def test_a_link_to_a_dataset_is_not_replaced(tmp_path: Path) -> None:
    _save(tmp_path / "a.zarr")
    (tmp_path / "b.zarr").symlink_to(tmp_path / "a.zarr")
    with pytest.raises(DataError, match=r"b\.zarr is a link to the dataset .*a\.zarr"):
        _save(tmp_path / "b.zarr", X + 1, overwrite=True)
    np.testing.assert_array_equal(open_dataset(tmp_path / "b.zarr").read_x(0, 15), X)


def test_a_link_to_an_empty_folder_is_written_through_and_stays(tmp_path: Path) -> None:
    (tmp_path / "big").mkdir()
    (tmp_path / "b.zarr").symlink_to(tmp_path / "big")
    with pytest.raises(DataError, match="row 2, column 1 is nan"):
        _save(tmp_path / "b.zarr", np.where(X == 9, np.nan, X))
    assert (tmp_path / "b.zarr").is_symlink()
    assert not list((tmp_path / "big").iterdir())
    _save(tmp_path / "b.zarr")
    np.testing.assert_array_equal(open_dataset(tmp_path / "big").read_x(0, 15), X)


@pytest.mark.parametrize("url", ["disk", "memory://guard-stopped"])
@pytest.mark.parametrize("n_deleted", [0, 1])
def test_an_interrupted_removal_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, n_deleted: int
) -> None:
    store = locate(url if "://" in url else tmp_path / url)
    store.clear()
    _save(store.url)
    delete_tree, left = type(store).delete_tree, [n_deleted]

    def stopped(self: Any, prefix: str) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        delete_tree(self, prefix)

    with monkeypatch.context() as patch:
        patch.setattr(type(store), "delete_tree", stopped)
        with pytest.raises(KeyboardInterrupt):
            _save(store.url, X + 1, overwrite=True)
    with pytest.raises(DataError, match="is being removed, or its removal was interrupted"):
        open_dataset(store.url)
    writer = create_dataset(store.url, 15, (4,), "f8", resume=n_deleted == 0)
    writer.write_shard(0, X + 1)
    np.testing.assert_array_equal(writer.finalize().read_x(0, 15), X + 1)


def test_an_output_on_a_full_disk_can_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _save(tmp_path / "a")

    def raise_disk_full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LocalLocation, "write", raise_disk_full)
    locate(tmp_path / "a").clear()
    assert not (tmp_path / "a").exists()


def test_a_resume_does_not_restart_a_finished_dataset(tmp_path: Path) -> None:
    """A dataset without the array `digest`, which is created last, may be unfinished and start again.

    A dataset that is marked as finished is not started again, even if this array was lost.
    """
    _save(tmp_path / "a")
    shutil.rmtree(tmp_path / "a/digest")
    with pytest.raises(DataError, match="a exists; choose another output"):
        create_dataset(tmp_path / "a", 15, (4,), "f8", resume=True)
    assert (tmp_path / "a/x/c/0/0").stat().st_size > X.nbytes


def test_a_failed_removal_does_not_hide_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(LocalLocation, "clear", refuse)
    with pytest.raises(DataError, match="row 2, column 1 is nan") as error:
        _save(tmp_path / "a", np.where(X == 9, np.nan, X))
    assert error.value.__notes__ == [
        f"The partial output could not be removed ([Errno 13] Permission denied): remove {tmp_path}/a "
        "yourself"
    ]


def test_the_error_of_a_full_disk_names_a_possible_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from scalelatent.data.write.shards import ShardWriter

    def raise_disk_full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ShardWriter, "_write_marker", raise_disk_full)
    with pytest.raises(
        DataError, match="free some space, then try again: the partial dataset is removed"
    ) as error:
        _save(tmp_path / "a")
    assert "--resume" not in str(error.value)
    assert not (tmp_path / "a").exists()


def _fill(path: Path, content: str) -> None:
    with locate(path).replacing() as target:
        target.write("x", content.encode())
        target.write("zarr.json", b"{}")


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_an_interrupted_replacement_leaves_one_dataset_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = tmp_path / "m"
    _fill(tmp_path / "linked" if kind == "link" else path, "old")
    if kind == "link":
        path.symlink_to(tmp_path / "linked")
    before = sorted(p.name for p in tmp_path.iterdir())
    replace, rmtree = os.replace, shutil.rmtree

    def refused(source: Any, target: Any) -> None:
        if str(target) == str(path) and not str(source).endswith(".old"):
            raise PermissionError(13, "Permission denied")
        replace(source, target)

    with monkeypatch.context() as patch:  # The new dataset cannot be moved to its path.
        patch.setattr(os, "replace", refused)
        with pytest.raises(PermissionError):
            _fill(path, "new")
    assert (path / "x").read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == before

    def interrupted(path: Any, *rest: Any, **options: Any) -> None:
        if kind != "link" and str(path).endswith(".old"):
            raise KeyboardInterrupt
        rmtree(path, *rest, **options)

    with monkeypatch.context() as patch:  # The removal of the old dataset is interrupted.
        patch.setattr(shutil, "rmtree", interrupted)
        try:
            _fill(path, "new")
        except KeyboardInterrupt:
            assert kind != "link"
    assert (path / "x").read_text() == "new"
    if kind == "link":
        assert (tmp_path / "linked" / "x").read_text() == "old"


def test_a_folder_with_only_the_partial_file_of_a_killed_writer_is_written(tmp_path: Path) -> None:
    """The library zarr writes `zarr.<hex>.partial` and renames it; SIGKILL in between leaves this file."""
    for name, resume in (("new.zarr", False), ("resumed.zarr", True)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "zarr.0123456789abcdef.partial").write_bytes(b"{")
        writer = create_dataset(tmp_path / name, 4, (2,), "u1", resume=resume)
        writer.write_shard(0, np.arange(8, dtype="u1").reshape(4, 2))
        writer.finish()
        assert open_dataset(tmp_path / name).read_x(0, 4).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
