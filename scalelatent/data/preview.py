"""Show the first rows of a dataset as text, and its properties as a table in a notebook."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from scalelatent.kernels.arrays import DenseOrCsr

    from .dataset import Dataset

# Characters for pixel values, from low to high.
_RAMP = " .:-=+*#%@"
_NUMBERS = 8  # values of a row that are shown
_WIDTH = 28  # maximum characters in a line of an image


def first_rows(ds: Dataset, n_rows: int = 5) -> list[dict[str, Any]]:
    """Return the first rows of a dataset, with the first values of each row, as JSON-able records."""
    n = min(n_rows, len(ds))
    x = ds.read_x(0, n)
    y = ds.read_y(0, n) if ds.has_y else None
    weight = ds.read_weight(0, n)
    records = []
    for i in range(n):
        record: dict[str, Any] = {"row": ds.extent[0] + i}
        if y is not None:
            record |= _outputs(y, i)
        if weight is not None:
            record["weight"] = float(weight[i])
        record |= _numbers(x, i)
        if _is_image(ds.feature_shape):
            record["image"] = thumbnail(x[i].reshape(ds.feature_shape))
        records.append(record)
    return records


def _outputs(y: DenseOrCsr, i: int) -> dict[str, Any]:
    if not isinstance(y, np.ndarray):
        return {"targets": y.indices[y.indptr[i] : y.indptr[i + 1]][:_NUMBERS].tolist()}
    return {"label": y[i].item()} if y.ndim == 1 else {"targets": y[i, :_NUMBERS].tolist()}


def _numbers(x: DenseOrCsr, i: int) -> dict[str, Any]:
    if isinstance(x, np.ndarray):
        return {"values": x[i, :_NUMBERS].tolist()}
    a, b = int(x.indptr[i]), int(x.indptr[i + 1])
    shown = slice(a, min(b, a + _NUMBERS))
    return {"columns": x.indices[shown].tolist(), "values": x.data[shown].tolist(), "entries": b - a}


def _is_image(shape: tuple[int, ...]) -> bool:
    return (len(shape) == 2 or (len(shape) == 3 and shape[2] in (1, 3, 4))) and min(shape[:2]) > 1


def thumbnail(image: np.ndarray) -> list[str]:
    """Return an image (height, width[, channels]) as lines of text; larger values print darker."""
    gray = image.reshape(*image.shape[:2], -1)[..., :3].astype(np.float64).mean(axis=2)
    width = min(gray.shape[1], _WIDTH)
    # A character is about twice as high as wide.
    height = max(1, round(gray.shape[0] * width / gray.shape[1] / 2))
    rows = np.linspace(0, gray.shape[0], height + 1).astype(int)[:-1]
    columns = np.linspace(0, gray.shape[1], width + 1).astype(int)[:-1]
    small = np.add.reduceat(np.add.reduceat(gray, rows, axis=0), columns, axis=1)
    sizes = np.outer(np.diff([*rows, gray.shape[0]]), np.diff([*columns, gray.shape[1]]))
    small /= sizes
    low, high = small.min(), small.max()
    levels = (small - low) / (high - low or 1) * (len(_RAMP) - 1)
    return ["".join(_RAMP[level] for level in line) for line in np.rint(levels).astype(int)]


def shorten(values: np.ndarray, number: int = 12) -> str:
    """Return the first values, joined for display."""
    return ", ".join(map(str, values[:number].tolist())) + (", …" if len(values) > number else "")


def as_html(title: str, values: dict[str, str]) -> str:
    """Return names and values as an HTML table with a caption."""
    style = "style='text-align:left'"
    lines = "".join(
        f"<tr><th {style}>{html.escape(name)}</th><td {style}>{html.escape(text)}</td></tr>"
        for name, text in values.items()
    )
    return f"<table><caption>{html.escape(title)}</caption>{lines}</table>"
