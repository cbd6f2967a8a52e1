"""The HTML page: one file with its pictures inside, and the same pictures beside it."""

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
    """A figure with its words."""

    name: str  # of the PNG file, without ``.png``
    title: str
    caption: str
    alt: str  # what it shows, for those who do not see it
    figure: Figure
    wide: bool = False  # many small panels: on a narrow screen it is scrolled, not shrunk


@dataclass(frozen=True)
class Table:
    """Rows with a heading: all cells are text."""

    name: str
    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass
class Section:
    """A model's part of a report: what its kind's `report` makes of model, rows and run files."""

    subtitle: str
    headline: list[tuple[str, str]] = field(default_factory=list)
    numbers: list[tuple[str, str]] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    # what the numbers mean: (of what, in words)
    explained: list[tuple[str, str]] = field(default_factory=list)
    snippet: str = ""  # Python that applies the saved model, see :func:`.explained.how_to_use`


@dataclass
class Page:
    """The content of a page."""

    title: str
    subtitle: str
    notes: list[str] = field(default_factory=list)  # what is absent, and why
    # the few numbers a reader looks for: (name, value)
    headline: list[tuple[str, str]] = field(default_factory=list)
    numbers: list[tuple[str, str]] = field(default_factory=list)
    # what the numbers mean: (of what, in words)
    explained: list[tuple[str, str]] = field(default_factory=list)
    snippet: str = ""  # Python that loads and applies the model; empty for none
    pictures: list[Picture] = field(default_factory=list)
    # (section, [(key, value, origin)])
    settings: list[tuple[str, list[tuple[str, str, str]]]] = field(default_factory=list)
    links: list[tuple[str, str]] = field(default_factory=list)  # (path, text)
    tables: list[Table] = field(default_factory=list)


def write_page(page: Page, folder: str | os.PathLike[str] | Location) -> str:
    """Write ``index.html`` and the pictures into a folder, each in one step."""
    target = locate(folder)
    target.make()
    pictures: list[dict[str, Any]] = []
    for picture in page.pictures:
        png = png_bytes(picture.figure)
        target.write(f"{picture.name}.png", png)
        width, height = (int(v) for v in picture.figure.get_size_inches() * picture.figure.dpi)
        uri = "data:image/png;base64," + base64.b64encode(png).decode()
        pictures.append({"words": picture, "uri": uri, "width": width, "height": height})
    kept = {f"{picture.name}.png" for picture in page.pictures}
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
    """A number with its noun."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def listing(words: Sequence[str]) -> str:
    """Words as a sentence lists them."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def duration(seconds: float) -> str:
    """A time as people read it."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds:.2g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
