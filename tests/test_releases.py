"""The conda recipe and the files of `.github` have the versions and requirements of pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

from scalelatent import __version__

ROOT = Path(__file__).parents[1]


def test_the_conda_recipe_has_the_requirements_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    recipe = yaml.safe_load((ROOT / "cluster" / "conda" / "recipe.yaml").read_text())
    run = [text.replace(" ", "") for text in recipe["requirements"]["run"]]
    assert run == [f"python{project['requires-python']}", *project["dependencies"]]
    assert recipe["package"]["version"] == __version__
    script = "scalelatent = " + project["scripts"]["scalelatent"]
    assert recipe["build"]["python"]["entry_points"] == [script]


def test_the_citation_names_the_version() -> None:
    text = (ROOT / ".github" / "CITATION.cff").read_text(encoding="utf-8")
    citation = yaml.safe_load(text)
    assert citation["version"] == __version__
    assert citation["license"] == "BSD-3-Clause"


def test_workflows_run_the_check_on_every_python_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    reported = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    check = yaml.safe_load((ROOT / ".github" / "workflows" / "check.yml").read_text())
    assert check["jobs"]["check"]["strategy"]["matrix"]["python"] == reported
    assert {"run": ".ci/run"}.items() <= check["jobs"]["check"]["steps"][-1].items()


def test_changes_are_of_a_kind_that_a_release_gathers() -> None:
    """A release ignores a change note of an unknown kind, because towncrier skips the file silently."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]
    kinds = "|".join(kind["directory"] for kind in settings["type"])
    names = [path.name for path in (ROOT / settings["directory"]).glob("*")]
    assert [name for name in names if not re.fullmatch(rf"(\+[\w-]+|\d+)\.({kinds})(\.\d+)?\.md", name)] == []
