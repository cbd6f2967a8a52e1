"""The page JOB.md equals the text that the code makes, and the jobs in the README are valid."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from scalelatent.jobs.job_schema import job_page
from scalelatent.jobs.resolve import resolve

ROOT = Path(__file__).parents[2]


def test_page_matches_the_code() -> None:
    page = ROOT / "scalelatent" / "jobs" / "JOB.md"
    assert page.read_text(encoding="utf-8") == job_page(), "run `python -m scalelatent.jobs.job_schema`"


def test_jobs_of_the_readme_are_valid() -> None:
    blocks = re.findall(r"```toml\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        resolve(tomllib.loads(block))
