"""Drawings, as text, of the shapes in binary image sets: bars, letters, symbols, squares, circles."""

from __future__ import annotations

import numpy as np

from scalelatent.errors import DataError

_LETTER_ROWS = """
.###. ####. .###. ####. ##### ##### .###. #...# ### ....# #...# #.... #...#
#...# #...# #...# #...# #.... #.... #...# #...# .#. ....# #..#. #.... ##.##
#...# #...# #.... #...# #.... #.... #.... #...# .#. ....# #.#.. #.... #.#.#
##### ####. #.... #...# ####. ####. #.### ##### .#. ....# ##... #.... #.#.#
#...# #...# #.... #...# #.... #.... #...# #...# .#. ....# #.#.. #.... #...#
#...# #...# #...# #...# #.... #.... #...# #...# .#. #...# #..#. #.... #...#
#...# ####. .###. ####. ##### #.... .###. #...# ### .###. #...# ##### #...#

#...# .###. ####. .###. ####. .#### ##### #...# #...# #...# #...# #...# #####
##..# #...# #...# #...# #...# #.... ..#.. #...# #...# #...# #...# #...# ....#
##..# #...# #...# #...# #...# #.... ..#.. #...# #...# #...# .#.#. .#.#. ...#.
#.#.# #...# ####. #...# ####. .###. ..#.. #...# #...# #.#.# ..#.. ..#.. ..#..
#..## #...# #.... #.#.# #.#.. ....# ..#.. #...# .#.#. #.#.# .#.#. ..#.. .#...
#..## #...# #.... #..#. #..#. ....# ..#.. #...# .#.#. ##.## #...# ..#.. #....
#...# .###. #.... .##.# #...# ####. ..#.. .###. ..#.. #...# #...# ..#.. #####
"""

_SYMBOL_ROWS = """
..###.. #######  ...#...  ...#... ..###.. #.....# .##.##. ..###..
.#...#. #.....#  ...#...  ..#.#.. ..###.. .#...#. ####### .#...#.
#.....# #.....#  ..#.#..  .#...#. ####### ..#.#.. ####### #.....#
#..#..# #.....#  ..#.#..  #.....# ####### ...#... ####### #.....#
#.....# #.....#  .#...#.  .#...#. ####### ..#.#.. .#####. .#...#.
.#...#. #.....#  .#...#.  ..#.#.. ..###.. .#...#. ..###.. ...#...
..###.. #######  #######  ...#... ..###.. #.....# ...#... .#####.
"""
_SYMBOL_NAMES = ("target", "square", "triangle", "diamond", "plus", "saltire", "heart", "ring")


def draw_bitmaps(drawings: dict[str, list[str]]) -> list[np.ndarray]:
    """Return drawings as arrays uint8 (height, width), in which `#` is 1."""
    for name, lines in drawings.items():
        if not lines or not lines[0] or {len(line) for line in lines} != {len(lines[0])}:
            raise DataError(f"the drawing of feature {name!r} has no lines, or lines of different lengths")
        if set("".join(lines)) - {"#", "."}:
            raise DataError(f"the drawing of feature {name!r} has other signs than '#' and '.'")
    return [np.array([[c == "#" for c in line] for line in d], np.uint8) for d in drawings.values()]


def parse_drawings(names: tuple[str, ...] | str, rows: str) -> dict[str, list[str]]:
    """Return the lines of each drawing by name, from blocks of drawings that are separated by blank lines."""
    columns: list[list[str]] = []
    for block in rows.strip().split("\n\n"):
        columns += [list(c) for c in zip(*(line.split() for line in block.splitlines()), strict=True)]
    return dict(zip(names, columns, strict=True))


def draw_bars(length: int) -> dict[str, list[str]]:
    """Return the drawings of a horizontal and a vertical bar of `length` pixels."""
    return {"horizontal": ["#" * length], "vertical": ["#"] * length}


def draw_traits(size: int) -> dict[str, list[str]]:
    """Return four drawings of `size` x `size` pixels: square with four holes, circle, and both diagonals."""
    y, x = np.indices((size, size)) - (size - 1) / 2
    middle = np.arange(size) == size // 2
    edge = middle | (np.arange(size) % (size - 1) == 0)
    drawn = {
        "square": edge[:, None] | edge,
        "circle": np.abs(np.hypot(y, x) - (size - 1) / 2) < 0.5,
        "forward": x == -y,
        "backward": x == y,
    }
    return {name: ["".join(".#"[int(bit)] for bit in row) for row in rows] for name, rows in drawn.items()}


LETTERS = parse_drawings("ABCDEFGHIJKLMNOPQRSTUVWXYZ", _LETTER_ROWS)
"""Capital letters, 7 rows of 5 (I: 3) columns."""
SYMBOLS = parse_drawings(_SYMBOL_NAMES, _SYMBOL_ROWS)
"""Eight symbols of 7 x 7 pixels."""
