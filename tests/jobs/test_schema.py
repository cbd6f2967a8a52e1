"""The JSON schema of job files, and the page JOB.md."""

from __future__ import annotations

import copy
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from scalelatent.cli import main
from scalelatent.jobs.job_schema import job_page, job_schema

jsonschema = pytest.importorskip("jsonschema")
ROOT = Path(__file__).parents[2]
JOB = {
    "job": {"out": "run"},
    "data": {"train": "a.zarr"},
    "model": {"kind": "capsule", "capsule_dim": 8, "tol": "none", "nu_schedule": [[0.8, 3]]},
}


def wrong(job: Any) -> list[str]:
    """Return the paths of the values that the schema refuses."""
    found = jsonschema.Draft202012Validator(job_schema()).iter_errors(job)
    return [".".join(map(str, error.absolute_path)) for error in found]


def with_key(section: str, key: str, value: Any) -> dict[str, Any]:
    job = copy.deepcopy(JOB)
    job.setdefault(section, {})[key] = value
    return job


def test_page_matches_the_code() -> None:
    page = ROOT / "scalelatent" / "jobs" / "JOB.md"
    assert page.read_text(encoding="utf-8") == job_page(), "run `python -m scalelatent.jobs.job_schema`"


def test_jobs_of_the_readme_are_valid() -> None:
    blocks = re.findall(r"```toml\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    assert [wrong(tomllib.loads(block)) for block in blocks] == [[]] * len(blocks)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("model", "capsule_dim", [2, 4]),
        ("model", "capsule_dim", "none"),
        ("job", "seed", "none"),
        ("cluster", "memory_limit", "2GiB"),
        ("search", "grid", {"momentum": [0, 0.5]}),
    ],
)
def test_the_schema_accepts_valid_jobs(section: str, key: str, value: Any) -> None:
    assert wrong(with_key(section, key, value)) == []


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("model", "momentum", 1.5),
        ("model", "capsul_dim", 8),
        ("model", "kind", "capsules"),
        ("model", "architecture", "binary"),
        ("data", "trian", "b.zarr"),
        ("engine", "block_rows", 0),
        ("search", "grid", []),
    ],
)
def test_the_schema_refuses_invalid_jobs(section: str, key: str, value: Any) -> None:
    assert wrong(with_key(section, key, value))


def test_the_command_prints_and_writes_the_schema(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for arguments in ([], ["--json"], ["--out", str(tmp_path / "job.json")]):
        with pytest.raises(SystemExit) as ended:
            main(["schema", *arguments])
        assert not ended.value.code
        reported = capsys.readouterr().out
        found = reported if "--out" not in arguments else (tmp_path / "job.json").read_text(encoding="utf-8")
        assert json.loads(found) == job_schema()
