"""For an invalid job file, an error of one line names the key or the fault before work starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scalelatent.errors import JobError
from scalelatent.jobs.planning import plan_job
from scalelatent.jobs.resolve import load_job, parse_value

GOOD = {"job.out": '"run"', "data.train": '"a.zarr"', "model.kind": '"capsule"'}

# Invalid values of the job file: name of the case, "section.key", value as TOML text, words of the message.
VALUES: list[tuple[str, str, str, str]] = [
    ("unknown section", "modell.kind", '"x"', "unknown section [modell]; did you mean 'model'?"),
    ("key of data", "data.trian", '"x"', "unknown key 'trian' in [data]; did you mean 'train'?"),
    ("key of model", "model.capsul_dim", "4", "unknown key 'capsul_dim' in [model] (kind 'capsule'); did yo"),
    ("key of engine", "engine.block_row", "4", "unknown key 'block_row' in [engine]; did you mean 'block_ro"),
    ("key like none", "cluster.zzzz", "4", "unknown key 'zzzz' in [cluster]; valid are: allow_mismatch, dev"),
    ("rows with a dash", "data.train_rows", '"0-50"', "[data] train_rows = '0-50': '0-50' is not a range of"),
    ("rows from back to front", "data.train_rows", '"9:5"', "contains no row; the stop must be larger"),
    ("rows without a dataset", "data.validation_rows", '"0:5"', "validation_rows is given without [data] va"),
    ("rows that are a number", "data.train_rows", "5", "[data] train_rows = 5: input should be a valid stri"),
    ("no workers", "cluster.workers", "0", "[cluster] workers = 0: input should be greater than or equal to"),
    ("workers that are true", "cluster.workers", "true", "workers = True: must be a number, not true or"),
    ("threads that are true", "cluster.threads", "true", "threads = True: must be a number, not true or"),
    ("memory of words", "cluster.memory_limit", '"2 potatoes"', "'2 potatoes' is not an amount of memory; w"),
    ("memory below 0", "cluster.memory_limit", '"-2GB"', "'-2GB' is not an amount of memory; write for exam"),
    ("bytes below 0", "cluster.memory_limit", "-5", "-5 is not an amount of memory; write for example '2GiB"),
    ("memory without end", "cluster.memory_limit", "inf", "inf is not an amount of memory"),
    ("memory that is no number", "cluster.memory_limit", "nan", "nan is not an amount of memory"),
    ("memory that is true", "cluster.memory_limit", "true", "memory_limit = True: must be a number"),
    ("seed of words", "job.seed", '"many"', "[job] seed = 'many': input should be a valid integer"),
    ("seed that is true", "job.seed", "true", "[job] seed = True: must be a number, not true or false"),
    ("seed with a fraction", "job.seed", "1.5", "[job] seed = 1.5: input should be a valid integer"),
    ("seed below 0", "job.seed", "-1", "[job] seed = -1: input should be greater than or equal to 0"),
    ("seed of 40 digits", "job.seed", "1" * 40, "input should be less than 4294967296"),
    ("no out", "job.out", '" "', "[job] out = ' ': must not be empty"),
    ("NUL in out", "job.out", '"ru\\u0000n"', "[job] out contains a NUL character; remove it"),
    ("NUL in data", "data.train", '"a\\u0000.zarr"', "[data] train contains a NUL character; remove it"),
    ("out that is a list", "job.out", '["a"]', "[job] out = ['a']: input should be a valid string"),
    ("a long list", "job.seed", str(list(range(1000))), "[job] seed = [0, 1, 2, 3"),
    ("kind of no model", "model.kind", '"capsul"', "kind = 'capsul' is not a model; did you mean 'caps"),
    ("kind that is a number", "model.kind", "3", "[model] kind must be a word such as \"capsule\", not 3"),
    ("a table for a value", "job.name", "{a = 1}", "[job] name = {'a': 1}: input should be a valid string"),
    ("a secret", "job.aws_secret_access_key", '"x"', "looks like a credential; remove it"),
    ("a password", "data.train", '"s3://me:word@bucket/x"', "contains credentials: remove them"),
    ("bad shards", "engine.on_bad_shard", '"skpi"', "'stop' or 'skip', not 'skpi': did you mean 'skip'?"),
    ("seconds below 0", "engine.checkpoint_seconds", "-1", "checkpoint_seconds = -1: input should be greate"),
    ("mismatch of words", "cluster.allow_mismatch", '"perhaps"', "allow_mismatch = 'perhaps': input should"),
]  # fmt: skip

# Invalid job files: name of the case, bytes of the file, words of the error message.
FILES: list[tuple[str, bytes, str]] = [
    ("no section", b"job = 3\n", "'job' must be a section, [job], not a single value"),
    ("no train", b'[job]\nout = "r"\n[model]\nkind = "capsule"\n', "[data] train is missing"),
    ("no kind", b'[job]\nout = "r"\n[data]\ntrain = "a"\n', "[model] kind is missing; write for example"),
    ("nothing", b"", "[model] kind is missing"),
    ("half a line", b"[job\n", "is not valid TOML: "),
    ("twice", b"[job]\n[job]\n", "is not valid TOML: Cannot declare ('job',) twice"),
    ("no UTF-8", b"\xff\xfe", "cannot be read: 'utf-8' codec can't decode byte 0xff"),
    ("UTF-16", "[job]".encode("utf-16"), "save it as UTF-8"),
    ("nested 5,000 deep", b"x = " + b"[" * 5000 + b"]" * 5000, "is not valid TOML: it is nested too deep"),
    ("a number of 5,000 digits", b"x = " + b"9" * 5000, "is not valid TOML: a number has too many digits"),
    ("NUL", b"\0" * 10, "is not valid TOML: "),
    ("a key 5,000 deep", b"[" + b".".join([b"a"] * 5000) + b"]", "unknown section [a]"),
]  # fmt: skip

# Values that contradict each other: name of the case, values by "section.key", words of the error message.
CONTRADICTIONS: list[tuple[str, dict[str, str], str]] = [
    ("two clusters", {"cluster.workers": "2", "cluster.scheduler": '"tcp://h:1"'}, "scheduler and workers a"),
    ("two seeds", {"job.seed": "1", "model.random_state": "2"}, "seed = 1 and [model] random_state = 2 diff"),
    ("two devices", {"cluster.device": '"cpu"', "model.device": '"gpu"'}, "device = 'gpu' differ; give only"),
]  # fmt: skip


def write_job(folder: Path, values: dict[str, str]) -> Path:
    """Write a valid job file changed by ``values`` (TOML text by "section.key"), and return its path."""
    sections: dict[str, str] = {}
    for name, text in (GOOD | values).items():
        section, _, key = name.partition(".")
        sections[section] = sections.get(section, f"[{section}]\n") + f"{key} = {text}\n"
    file = folder / "job.toml"
    file.write_text("\n".join(sections.values()), encoding="utf-8")
    return file


def assert_refused(file: Path, reported: str) -> None:
    with pytest.raises(JobError) as error:
        load_job(file, environ={})
    message = str(error.value)
    assert reported in message
    assert "\n" not in message
    assert len(message) < 600
    assert os.listdir(file.parent) == [file.name]


@pytest.mark.parametrize(
    ("key", "text", "reported"), [row[1:] for row in VALUES], ids=[row[0] for row in VALUES]
)
def test_an_invalid_value_is_refused(tmp_path: Path, key: str, text: str, reported: str) -> None:
    assert_refused(write_job(tmp_path, {key: text}), reported)


@pytest.mark.parametrize(("content", "reported"), [row[1:] for row in FILES], ids=[row[0] for row in FILES])
def test_an_invalid_file_is_refused(tmp_path: Path, content: bytes, reported: str) -> None:
    (tmp_path / "job.toml").write_bytes(content)
    assert_refused(tmp_path / "job.toml", reported)


@pytest.mark.parametrize(
    ("values", "reported"), [row[1:] for row in CONTRADICTIONS], ids=[row[0] for row in CONTRADICTIONS]
)
def test_contradictory_values_are_refused(tmp_path: Path, values: dict[str, str], reported: str) -> None:
    assert_refused(write_job(tmp_path, values), reported)


@pytest.mark.parametrize(
    ("name", "reported"),
    [("no.toml", "does not exist"), (".", "is a folder"), ("a" * 300, "File name too long"), ("a\0", "null")],
)
def test_a_path_that_is_not_a_file_is_refused(tmp_path: Path, name: str, reported: str) -> None:
    with pytest.raises(JobError, match=reported):
        load_job(f"{tmp_path}/{name}")


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    file = write_job(tmp_path, {})
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert load_job(file, environ={}).kind == "capsule"


@pytest.mark.parametrize("text", ["[" * 5000, "9" * 5000, "{" * 5000])
def test_a_setting_that_is_not_toml_is_read_as_text(text: str) -> None:
    assert parse_value(text) == text


# Values that only a plan checks: name of the case, values by "section.key", words of the error message.
PLANS: list[tuple[str, dict[str, str], str]] = [
    ("100,000 workers", {"cluster.workers": "100000"}, "workers = 100000: at most "),
    ("any file as authority", {"cluster.tls_ca": '"job.toml"', "cluster.tls_cert": '"job.toml"'}, "is not a"),
    ("authority alone", {"cluster.tls_ca": '"job.toml"'}, "a certificate (--tls-cert) is missing"),
    ("a folder as authority", {"cluster.tls_ca": '"."', "cluster.tls_cert": '"."'}, "Is a directory"),
    ("data by ftp", {"data.train": '"ftp://host/x.zarr"'}, "addresses with 'ftp://' are not known here"),
    ("data of 300 characters", {"data.train": f'"{"a" * 300}"'}, "File name too long; shorten the name"),
    ("data that is not there", {}, "a.zarr does not exist"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "reported"), [row[1:] for row in PLANS], ids=[row[0] for row in PLANS])
def test_a_plan_refuses_values_that_cannot_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, str], reported: str
) -> None:
    from scalelatent.errors import ScalelatentError

    monkeypatch.chdir(tmp_path)
    job = load_job(write_job(tmp_path, values), environ={})
    with pytest.raises(ScalelatentError) as error:
        plan_job(job)
    assert reported in str(error.value)
    assert "\n" not in str(error.value)
