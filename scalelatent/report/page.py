"""The HTML page: one file with embedded pictures, and the same pictures as PNG files."""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from scalelatent.storage.disk import Location, locate

from .style import png_bytes

if TYPE_CHECKING:
    from jinja2 import Template
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Picture:
    """Figure with title, caption and alternative text."""

    name: str  # name of the PNG file, without ``.png``
    title: str
    caption: str
    alt: str  # content of the figure as text, for readers who cannot see it
    figure: Figure
    wide: bool = False  # a narrow screen scrolls a wide figure, which has many small plots


@dataclass(frozen=True)
class Table:
    """Table of text cells with column names."""

    name: str
    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass
class Section:
    """Results on a page, which the ``report`` function of a kind of model returns."""

    subtitle: str
    headline: list[tuple[str, str]] = field(default_factory=list)  # the most important numbers
    numbers: list[tuple[str, str]] = field(default_factory=list)  # (name, value)
    pictures: list[Picture] = field(default_factory=list)
    interpretation: list[tuple[str, str]] = field(default_factory=list)  # (name, explanation) of a number
    snippet: str = ""  # Python code that applies the saved model, see `usage_snippet`


@dataclass
class Page:
    """Content of the HTML page of a report."""

    title: str
    results: Section
    notes: list[str] = field(default_factory=list)  # missing parts, and the reason
    # (section, [(key, value, origin)]) of the job; the origin says what set the value, such as "default".
    settings: list[tuple[str, list[tuple[str, str, str]]]] = field(default_factory=list)
    links: list[tuple[str, str]] = field(default_factory=list)  # (path, text)
    tables: list[Table] = field(default_factory=list)


def write_page(page: Page, folder: str | os.PathLike[str] | Location) -> str:
    """Write ``index.html`` and the pictures into a folder, each atomically; return the path of the page."""
    target = locate(folder)
    target.make()
    pictures: list[dict[str, Any]] = []
    for picture in page.results.pictures:
        png = png_bytes(picture.figure)
        target.write(f"{picture.name}.png", png)
        width, height = (int(v) for v in picture.figure.get_size_inches() * picture.figure.dpi)
        uri = "data:image/png;base64," + base64.b64encode(png).decode()
        pictures.append({"words": picture, "uri": uri, "width": width, "height": height})
    kept = {f"{picture.name}.png" for picture in page.results.pictures}
    for name in target.keys(""):
        if name.endswith(".png") and name not in kept:
            target.delete(name)
    text = _template().render(page=page, pictures=pictures)
    target.write("index.html", text.encode())
    return target.name_of("index.html")


@lru_cache(maxsize=1)
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = files("scalelatent.report").joinpath("template.html").read_text(encoding="utf-8")
    return environment.from_string(source)


def count(number: int, one: str, many: str | None = None) -> str:
    """Return a number with a noun, such as "1 row" or "2 rows"."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def join_words(words: Sequence[str]) -> str:
    """Return words as an enumeration: "a, b and c"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def duration(seconds: float) -> str:
    """Return a number of seconds as text, such as "12.5 s" or "3 min 20 s"."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds:.2g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
