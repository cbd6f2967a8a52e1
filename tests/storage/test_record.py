"""Records (bytes of nested values, with a checksum) are read back, refuse damage, and never use pickle."""

from __future__ import annotations

import builtins
import errno
import hashlib
import io
import json
import os
import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from scalelatent.contract.parameters import Anything
from scalelatent.engine.grid import RowGrid
from scalelatent.errors import RunError
from scalelatent.models.capsule.model.em import CapsuleState, initial_state
from scalelatent.models.capsule.model.members import build_members
from scalelatent.models.capsule.model.predict import CalibrationPass, CapsuleRows, RowFrame
from scalelatent.reductions.intercept import Intercept
from scalelatent.storage import disk as store
from scalelatent.storage.record import dumps, loads, read_record, write_record

ARRAYS = hnp.arrays(
    dtype=st.sampled_from(["f4", "f8", "i4", "i8", "u1", "?", "U3", "c16"]),
    shape=hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)
LEAVES = st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats() | st.text(max_size=8) | ARRAYS
KEYS = st.text(max_size=6) | st.sampled_from(["!array", "!dict", "!type", "!tuple", "fields", "head", "a0"])
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=12,
)


def is_same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return (
            isinstance(b, np.ndarray)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and a.tobytes() == b.tobytes()
        )
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(is_same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(is_same, a, b))
    return bool(a == b or (a != a and b != b))


@given(TREES)
def test_values_are_read_back_unchanged(tree: Any) -> None:
    assert is_same(loads(dumps(tree)), tree)


@given(TREES)
def test_the_same_tree_gives_the_same_bytes(tree: Any) -> None:
    assert dumps(tree) == dumps(tree)


def test_dataclasses_of_the_package_are_read_back() -> None:
    members = build_members("all_vs_all", 4, 2)
    state = initial_state(np.arange(72.0).reshape(24, 3), 6)
    got = loads(dumps({"members": members, "state": state, "grid": RowGrid(10, 2, 2)}))
    assert isinstance(got["state"], CapsuleState)
    for name, value in vars(state).items():
        assert is_same(getattr(got["state"], name), value)
    assert loads(dumps(Anything())) == Anything()  # The class Anything has no fields.
    assert is_same(got["members"].labels, members.labels)
    assert got["grid"] == RowGrid(10, 2, 2)


def test_named_tuples_keep_their_type_within_dataclasses_of_a_task() -> None:
    frame = RowFrame(Intercept(np.arange(3, dtype=np.float32), 2.0), np.eye(4))
    rows = CapsuleRows(build_members("multiclass", 2, 2), np.ones((4, 4)), frame, "probabilities")
    got = loads(dumps({"reduction": CalibrationPass(rows, np.ones(3), None, 1), "plain": (1, 2)}))
    kept = got["reduction"].rows.frame
    assert isinstance(kept, RowFrame)
    assert is_same(kept.matrix, frame.matrix)
    assert kept.intercept.constant == 2.0
    assert got["plain"] == (1, 2)
    assert type(got["plain"]) is tuple


def test_numpy_scalars_become_numbers() -> None:
    assert loads(dumps([np.float64(0.1), np.int32(3), np.bool_(True)])) == [0.1, 3, True]


@pytest.mark.parametrize(
    "bad",
    [object(), {1: 2}, b"bytes", {1, 2}, 1j, np.array([object()]), [print], type("T", (), {})()],
    ids=["object", "int keys", "bytes", "set", "complex", "objects", "function", "class"],
)
def test_other_types_are_refused(bad: Any) -> None:
    with pytest.raises(TypeError, match="a record holds"):
        dumps({"ok": 1, "bad": bad})


SMALL = {"a": np.arange(3, dtype="i2"), "b": "x"}


def test_a_record_of_any_shorter_length_is_refused() -> None:
    data = dumps(SMALL)
    for length in range(len(data)):
        with pytest.raises(RunError, match="incomplete or changed"):
            loads(data[:length])


def test_a_record_with_any_flipped_byte_is_refused() -> None:
    data = dumps(SMALL)
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1 << position % 8
        with pytest.raises(RunError, match="incomplete or changed"):
            loads(bytes(changed))


@pytest.mark.parametrize("tail", [b"\0", b"more", b"\0" * 32])
def test_a_record_with_extra_bytes_is_refused(tail: bytes) -> None:
    with pytest.raises(RunError, match="incomplete or changed"):
        loads(dumps(SMALL) + tail)


def forge_record(head: Any, **arrays: Any) -> bytes:
    """Return a record with the given content and a valid checksum, as an attacker could make it."""
    buffer = io.BytesIO()
    np.savez(buffer, head=np.frombuffer(json.dumps(head).encode(), np.uint8), **arrays)
    return buffer.getvalue() + hashlib.sha256(buffer.getvalue()).digest()


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "subprocess:Popen",
        "scalelatentx.evil:Thing",
        "builtins:eval",
        "scalelatent.engine.checkpoints:os",
        "scalelatent.engine.checkpoints:EngineStore",
        "scalelatent.storage.record:dumps",
        "scalelatent.nothing:Thing",
        "scalelatent.engine.grid:Gone",
    ],
)
def test_foreign_and_unknown_types_are_refused(name: str) -> None:
    with pytest.raises(RunError, match=name):
        loads(forge_record({"!type": name, "fields": {}}))


def test_fields_of_another_version_are_refused() -> None:
    with pytest.raises(RunError, match="RowGrid"):
        loads(
            forge_record({"!type": "scalelatent.engine.grid:RowGrid", "fields": {"n_rows": 3, "colour": 1}})
        )


def test_pickled_arrays_are_not_loaded() -> None:
    bomb = np.array([PickleBomb()], dtype=object)
    with pytest.raises((RunError, ValueError), match="allow_pickle"):
        loads(forge_record({"!array": "a0"}, a0=bomb))
    assert not PickleBomb.went_off


class PickleBomb:
    went_off = False

    def __reduce__(self) -> Any:
        return record_explosion, ()


def record_explosion() -> None:
    PickleBomb.went_off = True


def test_pickle_is_never_called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("pickle was called")

    for name in ("dump", "dumps", "load", "loads"):
        monkeypatch.setattr(pickle, name, refuse)
    write_record(tmp_path, "a.rec", {"s": initial_state(np.zeros((2, 2)), 1)})
    assert read_record(tmp_path, "a.rec")["s"].iteration == 0


@pytest.mark.parametrize("durable", [True, False])
def test_records_are_written_to_files_and_read_back(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "a.rec"
    assert write_record(path.parent, path.name, SMALL, durable=durable) == path.stat().st_size
    write_record(path.parent, path.name, {"b": 2}, durable=durable)
    assert read_record(path.parent, path.name) == {"b": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["a.rec"]


@pytest.mark.parametrize("content", [None, b"", b"PK\3\4"])
def test_the_error_names_an_unreadable_file(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "a.rec"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RunError, match=r"a\.rec"):
        read_record(path.parent, path.name)


@pytest.mark.parametrize("call", ["open", "write", "fsync", "replace"])
def test_the_error_of_a_full_disk_names_the_file_and_the_older_record_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "a.rec"
    write_record(path.parent, path.name, {"old": 1})

    def raise_disk_full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def leaky(*args: Any, **kwargs: Any) -> Any:
        file = builtins.open(*args, **kwargs)  # noqa: SIM115  The caller closes the file.
        if call == "write":
            file = io.BufferedWriter(FullDiskFile(file.name), 16)
        return file

    if call in ("fsync", "replace"):
        monkeypatch.setattr(os, call, raise_disk_full)
    else:
        monkeypatch.setattr(store, "open", raise_disk_full if call == "open" else leaky, raising=False)
    with pytest.raises(RunError, match=r"cannot write .*a\.rec.*No space left.*Free some space"):
        write_record(path.parent, path.name, {"new": np.arange(50)})
    monkeypatch.undo()
    assert read_record(path.parent, path.name) == {"old": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.rec"]


class FullDiskFile(io.RawIOBase):
    """File on a full disk, where opening succeeds and writing fails."""

    def __init__(self, name: str) -> None:
        self._file = builtins.open(name, "wb", buffering=0)  # noqa: SIM115

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._file.fileno()

    def write(self, data: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        self._file.close()
        super().close()


def test_an_array_in_several_places_is_written_once() -> None:
    a = np.arange(5000.0)
    tree = {"x": a, "y": (a, a[:10]), "z": [a.copy(), a[::2]]}
    data = dumps(tree)
    assert len(data) < 2.7 * a.nbytes
    back = loads(data)
    assert back["x"] is back["y"][0]
    assert back["x"] is not back["z"][0]
    for got, expected in zip((back["x"], *back["y"], *back["z"]), (a, a, a[:10], a, a[::2]), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_threads_parse_headers_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's parser, which reads headers of arrays, may fail in two threads (python/cpython#106905)."""
    from concurrent.futures import ThreadPoolExecutor

    from scalelatent.storage import record

    inside, most = [], []
    true_load = np.load

    def load(*args: Any, **how: Any) -> Any:
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.002)
        try:
            return true_load(*args, **how)
        finally:
            inside.pop()

    monkeypatch.setattr(record.np, "load", load)
    data = dumps({"a": np.arange(3)})
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: loads(data)["a"].sum(), range(32)))
    assert found == [3] * 32
    assert max(most) == 1


def test_fields_missing_in_an_earlier_record_get_their_defaults() -> None:
    from scalelatent.models.capsule.model.em import initial_state
    from scalelatent.storage.record import _build_value

    state = initial_state(np.zeros((2, 3)), 1)
    fields = {name: value for name, value in vars(state).items() if name != "decision_error"}
    head = {"!type": "scalelatent.models.capsule.model.em:CapsuleState", "fields": fields}
    assert np.isnan(_build_value(head, {}).decision_error)
    with pytest.raises(RunError, match="does not know"):
        _build_value(head | {"fields": {k: v for k, v in fields.items() if k != "stale"}}, {})
    with pytest.raises(RunError, match="does not know"):
        _build_value(head | {"fields": fields | {"other": 1}}, {})
