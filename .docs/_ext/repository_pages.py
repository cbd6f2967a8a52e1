"""Pages whose text is a Markdown file of the repository, so that each text exists once.

A page that consists of the line `repository-file: PATH` shows that file. Links to files that are pages too
become links between pages; links to other files become their path in the repository. Links of any page to an
example or a lesson name its source, so that they also work in a checkout; they become links to its page.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINE = re.compile(r"^repository-file: (\S+)$", re.MULTILINE)
# Folders of scripts, and the folders in which the build writes their pages.
BUILT = {"examples": "gallery", "lessons": "start/lessons"}
SCRIPT = re.compile(r"\]\(((?:\.\./)*)(examples|lessons)/(\w+)\.(?:py|rst)\)")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def _find_pages(srcdir: Path) -> dict[Path, str]:
    """Return {file of the repository: page that shows it}."""
    pages = {}
    for page in srcdir.rglob("*.md"):
        if found := LINE.search(page.read_text(encoding="utf-8")):
            pages[ROOT / found[1]] = page.relative_to(srcdir).as_posix()
    return pages


def _link_script(match: re.Match[str]) -> str:
    name = "index" if match[3] == "GALLERY_HEADER" else match[3]
    return f"]({match[1]}{BUILT[match[2]]}/{name}.rst)"


def _show(app, docname: str, content: list[str]) -> None:
    content[0] = SCRIPT.sub(_link_script, content[0])
    found = LINE.search(content[0])
    if not found:
        return
    file = ROOT / found[1]
    srcdir = Path(app.srcdir)
    folder = srcdir / Path(docname).parent
    folders = [srcdir / name for name in BUILT]
    pages = _find_pages(srcdir)

    def link(match: re.Match[str]) -> str:
        is_image, text, target = match[1], match[2], match[3]
        if re.match(r"https?:|mailto:", target):
            return match[0]
        path, _, anchor = target.partition("#")
        linked = Path(os.path.normpath(file.parent / path)) if path else file
        if is_image:
            return f"![{text}]({os.path.relpath(linked, folder)})"
        if linked.parent in folders and linked.suffix == ".py":
            place = os.path.relpath(srcdir / BUILT[linked.parent.name] / f"{linked.stem}.rst", folder)
            return f"[{text}]({place})"
        if linked in pages:
            place = os.path.relpath(srcdir / pages[linked], folder)
            return f"[{text}]({place}{'#' + anchor if anchor else ''})"
        name = linked.relative_to(ROOT).as_posix()
        return text if text.strip("`") == name else f"{text} (`{name}`)"

    blocks = re.split(r"(^```.*?^```$)", file.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    text = "".join(block if block.startswith("```") else LINK.sub(link, block) for block in blocks)
    content[0] = LINE.sub(lambda _: text, content[0])


def _write_changes(app) -> None:
    """Write the page of changes: those since the last release, then those of releases."""
    from textwrap import dedent

    draft = subprocess.run(
        [sys.executable, "-m", "towncrier", "build", "--draft", "--version=next", "--date=none"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    _, _, old = (ROOT / ".github" / "CHANGELOG.md").read_text(encoding="utf-8").partition("<!-- towncrier")
    opening = dedent(
        """\
        # Changelog

        This page is for users who update. It lists what changed in each release, the newest first.
        """
    )
    text = f"{opening}\n{draft}\n{old.partition('-->')[2]}"
    path = Path(app.srcdir) / "changelog.md"
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def setup(app) -> dict:
    app.connect("builder-inited", _write_changes, priority=100)
    app.connect("source-read", _show)
    return {"parallel_read_safe": True}
