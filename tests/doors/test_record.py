"""Damaged files of a run folder are rebuilt or skipped, or an error of one line names the file."""

from __future__ import annotations

import hashlib
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalelatent.errors import JobError, RunError, ScalelatentError
from scalelatent.jobs.control import restore_job
from scalelatent.jobs.runfolder import STATES, RunFolder, is_run_folder
from scalelatent.jobs.spec import DataSection, Job, JobSection
from scalelatent.storage.record import read_record, write_record

JOB = Job(
    JobSection(name="small", out="run", seed=3), DataSection(train="a.zarr"), "capsule", {"max_iter": 5}
)


def seal(head: Any, **arrays: np.ndarray) -> bytes:
    """Return the bytes of a record, a file of arrays and values, with any content and a valid checksum."""
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, head=np.frombuffer(text, np.uint8), **arrays)
    return buffer.getvalue() + hashlib.sha256(buffer.getvalue()).digest()


def seal_bytes(body: bytes) -> bytes:
    return body + hashlib.sha256(body).digest()


def make_record() -> bytes:
    return seal({"!dict": {"a": {"!array": "a0"}}}, a0=np.arange(3))


def flip_bit(record: bytes) -> bytes:
    return record[:50] + bytes([record[50] ^ 1]) + record[51:]


RECORDS: list[tuple[str, bytes, str]] = [
    ("no bytes", b"", "incomplete or changed"),
    ("half of it", make_record()[:100], "incomplete or changed"),
    ("a bit is flipped", flip_bit(make_record()), "incomplete or changed"),
    ("text", seal_bytes(b"text"), "holds no arrays"),
    ("nothing", seal_bytes(b""), "incomplete or changed"),
    ("no head", seal_bytes(b"PK\5\6" + bytes(18)), "not a tree of values"),
    ("a head that is no JSON", seal(b"{"), "not a tree of values"),
    ("a head that is no text", seal(b"\xff"), "not a tree of values"),
    ("a type without a colon", seal({"!type": "scalelatent.Stats", "fields": {}}), "does not know"),
    ("a type that is a number", seal({"!type": 3, "fields": {}}), "not one of scalelatent's"),
    ("a type of others", seal({"!type": "os:path", "fields": {}}), "not one of scalelatent's"),
    ("an unknown type", seal({"!type": "scalelatent.x:Y", "fields": {}}), "does not know"),
    ("no fields", seal({"!type": "scalelatent.contract.learners:Block"}), "not a tree of values (KeyError"),
    ("an array that lacks", seal({"!array": "a7"}), "not a tree of values (KeyError: 'a7')"),
    ("an array that is a list", seal({"!array": []}), "not a tree of values (TypeError"),
    ("a tuple of a number", seal({"!tuple": 3}), "not a tree of values (TypeError"),
    ("a dict of a number", seal({"!dict": 3}), "not a tree of values"),
    ("an object that is nothing", seal({"x": 3}), "not a tree of values (KeyError: '!type')"),
    ("nested 20,000 deep", seal(b"[" * 20_000 + b"]" * 20_000), "not a tree of values (RecursionError"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("content", "reported"), [row[1:] for row in RECORDS], ids=[row[0] for row in RECORDS]
)
def test_a_damaged_record_is_refused(tmp_path: Path, content: bytes, reported: str) -> None:
    (tmp_path / "state.rec").write_bytes(content)
    with pytest.raises(RunError) as refused:
        read_record(tmp_path, "state.rec")
    assert reported in str(refused.value)
    assert str(tmp_path / "state.rec") in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_undamaged_record_is_read(tmp_path: Path) -> None:
    (tmp_path / "state.rec").write_bytes(make_record())
    assert read_record(tmp_path, "state.rec")["a"].tolist() == [0, 1, 2]
    write_record(tmp_path, "state.rec", {"a": 1})
    assert read_record(tmp_path, "state.rec") == {"a": 1}


# -- JSON of a run folder ----------------------------------------------------------------------------------

DAMAGED = ["", "null", "[]", "{", "3", '"text"', "{}", '{"id": 3}', "\x00" * 100, "[" * 20_000]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Return the folder of a run that was interrupted after two passes."""
    made = RunFolder.create(tmp_path / "run", JOB)
    made.begin("running")
    made.event("state", state="running")
    made.event("fit_started", seed=3)
    for number in (1, 2):
        made.append("metrics.jsonl", {"pass": number, "objective": 1 / number})
    return made


@pytest.mark.parametrize("content", DAMAGED)
def test_damaged_state_is_rebuilt_from_the_logs(folder: RunFolder, content: str) -> None:
    (folder.path / "state.json").write_text(content) if content else (folder.path / "state.json").unlink()
    assert is_run_folder(folder.url)
    state = folder.read_state()
    assert state["state"] == "failed"
    assert (state["pass"], state["objective"], state["starts"]) == (2, 0.5, 1)
    assert re.fullmatch(r"small-[0-9a-f]{8}", state["id"])
    assert state["id"] == folder.id
    assert f"scalelatent resume {folder.url}" in state["error"]
    assert folder.begin("running") == 2
    assert json.loads((folder.path / "state.json").read_text())["state"] == "running"


@pytest.mark.parametrize("content", [text for text in DAMAGED if "{}" not in text and "id" not in text])
def test_the_error_of_a_damaged_job_names_the_next_step(
    folder: RunFolder, content: str, tmp_path: Path
) -> None:
    (folder.path / "job.json").write_text(content)
    assert folder.read_state()["state"] in STATES
    with pytest.raises(JobError) as refused:
        folder.read_job()
    assert f"{folder.path / 'job.json'} is damaged" in str(refused.value)
    assert f"scalelatent resume {folder.url} --job JOB.toml" in str(refused.value)
    file = tmp_path / "job.toml"
    file.write_text('[job]\nout = "x"\n[data]\ntrain = "a.zarr"\n[model]\nkind = "capsule"\nmax_iter = 5\n')
    restore_job(folder, file)
    job = folder.read_job()
    assert (job.job.out, job.job.seed, job.params["max_iter"]) == (folder.url, 3, 5)
    with pytest.raises(JobError, match="has an intact job.json; remove --job"):
        restore_job(folder, file)


@pytest.mark.parametrize("change", [{"model": 3}, {"job": {"zz": 1}}, {"engine": None}, {"origins": 3}])
def test_a_job_without_its_sections_is_damaged(folder: RunFolder, change: dict[str, Any]) -> None:
    (folder.path / "job.json").write_text(json.dumps(JOB.to_dict() | change))
    with pytest.raises(JobError, match=r"job.json is damaged, .* --job JOB.toml") as refused:
        folder.read_job()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("line", ["", "null", "{", "[1]", "3", "\x00" * 10])
def test_damaged_log_lines_are_skipped(folder: RunFolder, line: str) -> None:
    file = folder.path / "metrics.jsonl"
    file.write_text(line + "\n" + file.read_text())
    assert [record["pass"] for record in folder.records("metrics.jsonl")] == [1, 2]
    folder.keep_records("metrics.jsonl", 1)
    assert [record["pass"] for record in folder.records("metrics.jsonl")] == [1]


@pytest.mark.parametrize("name", ["progress.json", "cancel"])
@pytest.mark.parametrize("content", ["", "null", "[]", "3"])
def test_damaged_progress_and_cancel_files_count_as_empty(folder: RunFolder, name: str, content: str) -> None:
    from scalelatent.jobs.interrupt import read_cancel_request

    (folder.path / name).write_text(content)
    assert folder.read_progress() == {}
    assert read_cancel_request(folder) == ({} if name == "cancel" else None)


def test_the_error_names_a_lock_that_is_a_folder(folder: RunFolder) -> None:
    (folder.path / "lock").unlink(missing_ok=True)
    (folder.path / "lock").mkdir()
    assert folder.read_state()["state"] == "failed"
    with (
        pytest.raises(
            ScalelatentError, match=rf"cannot be locked: {folder.path}/lock: Is a directory.*remove"
        ),
        folder.lock(),
    ):
        raise AssertionError


@pytest.mark.parametrize("content", ["", "null", "[3]", "{"])
@pytest.mark.parametrize("name", ["identity.json", "quarantine.json"])
def test_a_damaged_identity_or_quarantine_file_is_refused(tmp_path: Path, name: str, content: str) -> None:
    from scalelatent.engine import quarantine
    from scalelatent.engine.checkpoints import EngineStore

    assert quarantine.FILE == "quarantine.json"
    store = EngineStore(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(RunError, match=f"{name} is damaged"):
        store.claim({"seed": 1}, True) if name == "identity.json" else quarantine.Quarantine("skip", store)
