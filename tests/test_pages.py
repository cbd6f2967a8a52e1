"""Pages of `.docs/` follow rules that Sphinx does not check; `.ci/run` builds the pages."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pytest
from typer.main import get_command

from scalelatent.cli import app

ROOT = Path(__file__).parents[1]
DOCS = ROOT / ".docs"
GENERATED = ("gallery/", "start/lessons/", "reference/api/", "reference/backreferences/", "_")
PAGES = {
    path.relative_to(DOCS).as_posix(): path.read_text(encoding="utf-8")
    for path in sorted(DOCS.rglob("*.md"))
    if not path.relative_to(DOCS).as_posix().startswith(GENERATED)
    and path.name not in ("changelog.md", "command_line.md")
}
SCRIPTS = sorted([*(DOCS / "lessons").glob("plot_*.py"), *(DOCS / "examples").glob("plot_*.py")])


@pytest.mark.parametrize("name", PAGES)
def test_page_opens_with_its_readers_or_shows_a_file_of_the_repository(name: str) -> None:
    text = PAGES[name]
    if shown := re.fullmatch(r"repository-file: (\S+)\n", text):
        assert (ROOT / shown[1]).is_file()
    else:
        assert re.search(r"^(This page is|These pages are) for ", text, re.MULTILINE)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_executed_page_opens_with_its_readers_and_shows_a_figure(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    assert re.search(r"^This (example|lesson) is for ", text, re.MULTILINE)
    assert "plt.show()" in text


def test_gallery_has_at_least_twelve_examples() -> None:
    assert sum(script.parent.name == "examples" for script in SCRIPTS) >= 12


def test_page_of_the_command_line_has_each_verb() -> None:
    code = "import command_line; print(command_line.write_page())"
    page = subprocess.run(
        [sys.executable, "-c", code],
        cwd=DOCS / "_ext",
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    for verb in ("fit", "submit", "resume", "data import images", "data make digits", "cluster up"):
        assert f"\n## scalelatent {verb}\n" in page


MARKDOWN = subprocess.run(
    ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False
).stdout.split()


@pytest.mark.skipif(not MARKDOWN, reason="no git checkout")
@pytest.mark.parametrize("name", [name for name in MARKDOWN if not name.startswith(".github/changes/")])
def test_links_of_pages_exist_in_a_checkout(name: str) -> None:
    """On a code host such as GitHub, links to files that only a build of the pages writes would be dead."""
    text = re.sub(
        r"^```.*?^```$", "", (ROOT / name).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    targets = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text))
    files = [target.partition("#")[0] for target in targets if not re.match(r"https?:|mailto:|#", target)]
    assert [file for file in files if not ((ROOT / name).parent / file).exists()] == []


def test_reference_page_names_objects_that_exist() -> None:
    modules = re.split(
        r"^\.\. currentmodule:: (\S+)$", (DOCS / "reference" / "python.rst").read_text(), flags=re.M
    )
    for module, text in zip(modules[1::2], modules[2::2], strict=True):
        names = re.findall(r"^   ([A-Za-z_][\w.]*)$", text, re.MULTILINE)
        for name in names:
            assert attrgetter(name)(importlib.import_module(module)) is not None


def test_pages_name_verbs_that_exist() -> None:
    pages = {name: text for name, text in PAGES.items() if not text.startswith("repository-file")}
    pages |= {name: (ROOT / name).read_text(encoding="utf-8") for name in MARKDOWN if "/changes/" not in name}
    found = 0
    for name, text in pages.items():
        for words in re.findall(r"`scalelatent ((?:[a-z][a-z0-9-]* ?)+)", text):
            command = get_command(app)
            for word in words.split():
                if not hasattr(command, "commands"):
                    break
                assert word in command.commands, f"{name} names `scalelatent {words}`"
                command = command.commands[word]
                found += 1
    assert found > 50
