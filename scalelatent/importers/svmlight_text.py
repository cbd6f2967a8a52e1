"""The text of svmlight files: cut into blocks of whole lines, which threads parse."""

from __future__ import annotations

import os
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from scalelatent.errors import DataError

from .files import open_maybe_gzip
from .stream import Progress

__all__ = ["Block", "Counts", "Parsed", "check_lines", "count_lines", "parse_blocks"]

_BLOCK_BYTES = 1 << 20
_MAX_LINE_BYTES = 1 << 28
_MAX_THREADS = 4


@dataclass
class Counts:
    """What the first pass finds."""

    rows: int = 0
    entries: int = 0
    labels: int = 0
    slow: int = 0
    lines: int = 0
    lowest: int = np.iinfo(np.int64).max
    highest: int = -1
    commas: int = 0
    bare: int = 0
    fractions: int = 0
    error: int = 0
    at: int = 0
    lowest_label: int = np.iinfo(np.int64).max
    highest_label: int = np.iinfo(np.int64).min
    density: float = 0.0
    """Most entries a row of any block of the file."""

    def add(self, state: np.ndarray, names: tuple[str, ...]) -> None:
        """Take in the counters of a block."""
        more = dict(zip(names, state.tolist(), strict=True))
        for key in ("rows", "entries", "labels", "lines", "commas", "bare", "fractions"):
            setattr(self, key, getattr(self, key) + more[key])
        self.lowest, self.highest = min(self.lowest, more["lowest"]), max(self.highest, more["highest"])
        self.lowest_label = min(self.lowest_label, more["lowest_label"])
        self.highest_label = max(self.highest_label, more["highest_label"])
        self.density = max(self.density, more["entries"] / max(more["rows"], 1))


def count_lines(file: str | os.PathLike[str], name: str, progress: Progress | None) -> Counts:
    """The first pass."""
    from .svmlight_kernels import N_STATE, STATE

    assert len(STATE) == N_STATE
    found = Counts()
    for text, parsed in parse_blocks(file, name, keep=False):
        check_lines(text, parsed, found.lines, name)
        found.add(parsed.state, STATE)
        if progress is not None:
            progress(0, found.rows)
    if not found.rows:
        raise DataError(f"{name} holds no rows: it is empty, or has blank lines and comments only")
    return found


@dataclass
class Parsed:
    """What a block of text holds."""

    state: np.ndarray
    data: np.ndarray
    cols: np.ndarray
    counts: np.ndarray
    labels: np.ndarray
    label_counts: np.ndarray

    @property
    def lines(self) -> int:
        """Lines of the block."""
        return int(self.state[4])

    def columns(self) -> tuple[np.ndarray, ...]:
        """The arrays: values, columns, entries of rows, labels, labels of rows."""
        return self.data, self.cols, self.counts, self.labels, self.label_counts

    def split(self, rows: int) -> tuple[Parsed, Parsed]:
        """The first rows, and the others."""
        a, b = int(self.counts[:rows].sum()), int(self.label_counts[:rows].sum())
        cuts = (a, a, rows, b, rows)
        pairs = list(zip(self.columns(), cuts, strict=True))
        first, rest = [column[:cut] for column, cut in pairs], [column[cut:] for column, cut in pairs]
        return Parsed(self.state, *first), Parsed(self.state, *rest)


def _parse(text: np.ndarray, keep: bool) -> Parsed:
    """The rows of whole lines; with `keep` false only counters."""
    from scalelatent.importers import svmlight_kernels as kernels

    state = kernels.new_state()
    size = len(text) if keep else 0
    # An entry takes at least 3 bytes and a space, a row a newline; memory that is not written costs nothing.
    data, cols = np.empty(size // 4 + 1), np.empty(size // 4 + 1, np.int64)
    counts, labels = np.empty(size // 2 + 1, np.int64), np.empty(size // 2 + 1)
    label_counts, slow = np.empty(size // 2 + 1, np.int64), np.empty(2 * (size // 20 + 1), np.int64)
    kernels.parse_lines(text, len(text), keep, data, cols, counts, labels, label_counts, slow, state)
    found = dict(zip(kernels.STATE, state.tolist(), strict=True))
    if not keep:
        nothing = counts[:0]
        return Parsed(state, data[:0], nothing, nothing, labels[:0], nothing)
    for entry, place in slow[: 2 * found["slow"]].reshape(-1, 2).tolist():
        value = float(_token(text, place))
        if entry >= 0:
            data[entry] = value
        else:
            labels[-1 - entry] = value
    entries, rows, n_labels = found["entries"], found["rows"], found["labels"]
    # Copies of what is used: the arrays are as long as the text might have needed.
    kept = (data[:entries], cols[:entries], counts[:rows], labels[:n_labels], label_counts[:rows])
    return Parsed(state, *(column.copy() for column in kept))


def _token(text: np.ndarray, place: int) -> str:
    return bytes(text[place : place + 2000]).split(None, 1)[0].split(b"#")[0].split(b",")[0].decode()


def check_lines(text: np.ndarray, parsed: Parsed, lines: int, name: str) -> None:
    """Raise what the kernel found wrong with a line; `lines` is how many come before the block.

    Raises
    ------
    DataError
        Naming the line and what stands there.
    """
    from scalelatent.importers import svmlight_kernels as kernels

    found = dict(zip(kernels.STATE, parsed.state.tolist(), strict=True))
    if not found["error"]:
        return
    raw = bytes(text[found["at"] : found["at"] + 41])
    shown = (raw.split(None, 1) or [b""])[0].decode("utf-8", "backslashreplace")
    shown = shown if len(shown) <= 40 else shown[:40] + "…"
    problem = {
        kernels.BAD_LABEL: f"{shown!r} is no label: a number, or numbers with commas between",
        kernels.BAD_COLUMN: f"{shown!r} is no entry COLUMN:VALUE with a whole COLUMN of at least 0",
        kernels.NO_VALUE: f"entry {shown!r} has no value after the colon",
        kernels.BAD_VALUE: f"the value of entry {shown!r} is no number",
    }.get(found["error"], "it does not fit into the memory that was set aside; please report this")
    line = lines + found["lines"] + 1
    last = text[found["at"] :].tobytes().find(b"\n") < 0
    ends = " The file ends in this line: it may be cut short." if last else ""
    raise DataError(
        f"{name}, line {line}: {problem}.{ends} Correct the line, or give another kind of importer"
    )


def _text_blocks(file: str | os.PathLike[str], name: str) -> Iterator[np.ndarray]:
    """The bytes of a file, cut after newlines."""
    with open_maybe_gzip(file, "svmlight file") as text:
        rest, done = b"", 0
        while True:
            try:
                part = text.read(_BLOCK_BYTES)
            except EOFError as error:
                raise DataError(
                    f"{name} is truncated: its gzip data end at byte {done:,} of the text; download or "
                    "copy it again"
                ) from error
            except (OSError, zlib.error) as error:
                raise DataError(
                    f"{name} is damaged after byte {done:,} of the text: {error}; copy it again"
                ) from error
            done += len(part)
            cut = part.rfind(b"\n") + 1
            if part and not cut:
                rest += part
                if len(rest) > _MAX_LINE_BYTES:
                    raise DataError(
                        f"{name} has a line of more than {_MAX_LINE_BYTES:,} bytes; this is no svmlight file"
                    )
                continue
            block, rest = rest + part[:cut], part[cut:]
            if block or not part:
                last = block if part else block + rest
                if last:
                    yield np.frombuffer(last, np.uint8)
            if not part:
                return


def parse_blocks(file: str | os.PathLike[str], name: str, *, keep: bool) -> Iterator[Block]:
    """Blocks of a file with what they hold, in order, parsed by threads a few blocks ahead."""
    from dask.system import cpu_count

    threads = min(cpu_count(), _MAX_THREADS)
    waiting: deque[Any] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="scalelatent-svmlight") as pool:
        try:
            for block in _text_blocks(file, name):
                waiting.append((block, pool.submit(_parse, block, keep)))
                if len(waiting) > threads:
                    block, future = waiting.popleft()
                    yield block, future.result()
            while waiting:
                block, future = waiting.popleft()
                yield block, future.result()
        finally:
            for _, future in waiting:
                future.cancel()


Block = tuple[np.ndarray, Parsed]
"""Text, and what it holds."""
