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

__all__ = ["Page", "Picture", "Section", "Table", "write_page"]


@dataclass(frozen=True)
class Picture:
    """A figure with its words.

    Attributes
    ----------
    name : str
        Of the PNG file, without ``.png``.
    title, caption, alt : str
        Heading, what it shows, and the same in words for those who do not see it.
    figure : matplotlib.figure.Figure
    wide : bool
        Many small panels: on a narrow screen it is scrolled, not shrunk.
    """

    name: str
    title: str
    caption: str
    alt: str
    figure: Figure
    wide: bool = False


@dataclass(frozen=True)
class Table:
    """Rows with a heading: all cells are text."""

    name: str
    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass
class Section:
    """A model's part of a report: what its kind's `report` makes of model, rows and run files.

    Attributes
    ----------
    subtitle : str
        What the model is, in a line.
    headline, numbers : list of (str, str)
        As of a `Page`.
    pictures : list of Picture
    explained : list of (str, str)
        What the numbers mean: (of what, in words).
    snippet : str
        Python that applies the saved model, see :func:`.explained.how_to_use`.
    """

    subtitle: str
    headline: list[tuple[str, str]] = field(default_factory=list)
    numbers: list[tuple[str, str]] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    explained: list[tuple[str, str]] = field(default_factory=list)
    snippet: str = ""


@dataclass
class Page:
    """Everything a page says.

    Attributes
    ----------
    title, subtitle : str
    notes : list of str
        What is absent, and why.
    headline : list of (str, str)
        The few numbers a reader looks for: (name, value).
    numbers : list of (str, str)
    explained : list of (str, str)
        What the numbers mean: (of what, in words).
    snippet : str
        Python that loads and applies the model; empty for none.
    pictures : list of Picture
    settings : list of (section, [(key, value, origin)])
    links : list of (path, text)
    tables : list of Table
    """

    title: str
    subtitle: str
    notes: list[str] = field(default_factory=list)
    headline: list[tuple[str, str]] = field(default_factory=list)
    numbers: list[tuple[str, str]] = field(default_factory=list)
    explained: list[tuple[str, str]] = field(default_factory=list)
    snippet: str = ""
    pictures: list[Picture] = field(default_factory=list)
    settings: list[tuple[str, list[tuple[str, str, str]]]] = field(default_factory=list)
    links: list[tuple[str, str]] = field(default_factory=list)
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
