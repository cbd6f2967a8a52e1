"""Texts avoid words that readers outside this project misunderstand; INSTEAD has better words."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
INSTEAD = {
    r"afresh|anew": "again",
    r"broken off|broke off": "interrupted",
    r"held against": "compared with",
    r"so many|so often": "the number itself, or N",
    r"told|tells?|tell": "report, show, give, distinguish, estimate",
    r"hears?|heard": "receive",
    r"go(?:es)? on": "continue",
    r"lies?": "is in, is stored in, is at",
    r"pancakes?": "component",
    r"begun": "started",
    r"mend(?:s|ed)?": "fix",
}
# First words of docstrings that are not sentences. A question may start with these words.
FRAGMENT = re.compile(r"^(?:Of|Those|What|Which|Whether|How|Where|That|With)\b(?!.*\?$)")
FOLDERS = ["scalelatent", "tests", "benchmarks", "cluster", ".ci"]
# All files except this one, which lists the words.
FILES = sorted(
    path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if path != Path(__file__).resolve()
)


def read_sentences(path: Path) -> list[tuple[int, str]]:
    """Return the line number and the text of each comment and string of a file."""
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)}
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    # A string that ends in ``.json`` is the name of a stored file, which keeps the words of earlier versions.
    return [(t.start[0], t.string) for t in tokens if t.type in kinds and not t.string.endswith('.json"')]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_comments_and_messages_use_plain_words(path: Path) -> None:
    found = [
        f"line {line}: {match[0]!r}; use {better}"
        for line, text in read_sentences(path)
        for words, better in INSTEAD.items()
        for match in re.finditer(rf"\b(?:{words})\b", text)
    ]
    assert found == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_are_sentences(path: Path) -> None:
    nodes = [
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    first = [(getattr(node, "lineno", 1), (ast.get_docstring(node) or "").split("\n")[0]) for node in nodes]
    assert [f"line {line}: {text}" for line, text in first if FRAGMENT.match(text)] == []
