"""Turn results of results/ into cells and Markdown tables; used by tables.py and papers.py."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable
from typing import Any

from common import RESULTS

# Functions that return the Markdown of a table, and column names separated by |, both by table name.
TABLES: dict[str, Callable[[], str]] = {}
HEADS: dict[str, str] = {}
# Names of data sets on the pages, by their parts of results/mbn_clustering.json.
CLUSTERED = {
    "wine": "Wine",
    "thyroid": "New-Thyroid",
    "umist": "UMIST",
    "isolet1": "Isolet1",
    "coil20": "COIL20",
    "mnist5000": "MNIST (small), 5,000 images",
    "mnist": "MNIST, 70,000 images, k1 = 8,000",
}
# Names of corruptions on the pages, by their parts of results/crbm_mnist.json.
TASKS = {
    "noisy10": "10 % flipped",
    "noisy20": "20 % flipped",
    "occluded8": "8 x 8 occluded",
    "occluded12": "12 x 12 occluded",
}


def as_table(columns: str) -> Callable[[Callable[[], Iterable[Iterable[Any]]]], Callable[[], str]]:
    """Return a decorator for functions that yield the rows of a table; it adds the function to TABLES.

    ``columns`` has the column names, separated by |. The decorated function returns the table as Markdown.
    """

    def wrap(rows: Callable[[], Iterable[Iterable[Any]]]) -> Callable[[], str]:
        def text() -> str:
            names = columns.split("|")
            lines = [[name.strip() for name in names], ["---"] * len(names), *rows()]
            cells = (" | ".join(str(cell) for cell in line) for line in lines)
            return "".join(re.sub(" +", " ", f"| {line} |") + "\n" for line in cells)

        TABLES[rows.__name__], HEADS[rows.__name__] = text, columns
        return text

    return wrap


def read(name: str) -> Any:
    """Return the results in results/NAME.json; they are a dictionary by part if the file has parts."""
    content = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    if "parts" in content:
        return {part: found["result"] for part, found in content["parts"].items()}
    return content["results"]


def percent(share: float, digits: int = 2) -> str:
    """Return a share, such as 0.25, as text in percent."""
    return f"{100 * share:.{digits}f} %"


def mean_of(found: dict[str, float]) -> str:
    """Return the mean and the standard deviation over seeds in percent, as text."""
    return f"{100 * found['mean']:.2f}" + (f" ± {100 * found['sd']:.2f}" if found.get("sd") else "")


def over_seeds(shares: list[float]) -> str:
    """Return the median of shares in percent and, for several shares, the smallest and the largest."""
    reported = percent(statistics.median(shares), 1)
    return reported if len(shares) == 1 else f"{reported} ({100 * min(shares):.1f} - {100 * max(shares):.1f})"
