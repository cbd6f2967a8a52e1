"""Show the properties of a dataset or a model as a table in a notebook."""

from __future__ import annotations

import html

import numpy as np


def shorten(values: np.ndarray, number: int = 12) -> str:
    """Return the first `number` values as text, joined by commas."""
    return ", ".join(map(str, values[:number].tolist())) + (", …" if len(values) > number else "")


def as_html(title: str, values: dict[str, str]) -> str:
    """Return names and values as an HTML table with a caption."""
    style = "style='text-align:left'"
    lines = "".join(
        f"<tr><th {style}>{html.escape(name)}</th><td {style}>{html.escape(text)}</td></tr>"
        for name, text in values.items()
    )
    return f"<table><caption>{html.escape(title)}</caption>{lines}</table>"
