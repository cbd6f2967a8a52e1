"""Logs of lines, on a disk or in an object store; after a killed writer only complete lines are read."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Sequence
from typing import BinaryIO

from .disk import Location

# Maximum bytes of a segment, an object with some lines of a log; an append rewrites the last segment.
SEGMENT_BYTES = 64 << 10


class LineLog:
    """A log of lines with one writer process, whose threads may append at the same time."""

    def __init__(self, location: Location, key: str) -> None:
        self._location, self._key = location, key
        self._folder, _, self._name = key.rpartition("/")
        self._tail: tuple[int, bytes] | None = None  # (number, content) of the log's last segment, an object
        self._lock = threading.RLock()

    def append(self, line: bytes) -> None:
        """Append `line`, which does not contain a newline."""
        with self._lock:
            self._append(line + b"\n")

    def _append(self, line: bytes) -> None:
        path = self._location.local_path(self._key)
        if path is not None:
            _append_to_file(path, line)
            return
        if self._tail is None:
            number = self._count_segments() - 1
            last = self._location.read(self._segment(number)) if number >= 0 else None
            self._tail = (max(number, 0), last or b"")
        number, content = self._tail
        if content and len(content) + len(line) > SEGMENT_BYTES:
            number, content = number + 1, b""
        self._location.write(self._segment(number), content + line)
        self._tail = (number, content + line)

    def lines(self) -> list[bytes]:
        """Return the complete lines without their newlines; empty if there is no log."""
        if self._location.local_path(self._key) is not None:
            content = self._location.read(self._key) or b""
        else:
            parts = [self._segment(number) for number in range(self._count_segments())]
            content = b"".join(self._location.read_ranges(parts))
        return [line for line in content.split(b"\n")[:-1] if line]

    def exists(self) -> bool:
        """Return whether there is a log; it may be empty."""
        return self._location.has(self._key)

    def rewrite(self, lines: Sequence[bytes]) -> None:
        """Replace all lines, for example to drop the last lines."""
        content = b"".join(line + b"\n" for line in lines)
        if self._location.local_path(self._key) is not None:
            self._location.write(self._key, content, durable=True)
            return
        parts = _pack_segments(lines)
        for number in reversed(range(len(parts), self._count_segments())):
            self._location.delete(self._segment(number))
        for number, part in reversed(list(enumerate(parts))):
            if self._location.read(self._segment(number)) != part:
                self._location.write(self._segment(number), part)
        self._tail = (len(parts) - 1, parts[-1])

    def _segment(self, number: int) -> str:
        return self._key if number == 0 else f"{self._key}.{number:06d}"

    def _count_segments(self) -> int:
        """Return the number of segments (objects with lines of the log) before the first missing number."""
        names = set(self._location.keys(self._folder))
        numbers = {0} if self._name in names else set()
        found = (re.fullmatch(re.escape(self._name) + r"\.(\d{6,})", name) for name in names)
        numbers |= {int(m[1]) for m in found if m}
        count = 0
        while count in numbers:
            count += 1
        return count


def _pack_segments(lines: Sequence[bytes]) -> list[bytes]:
    """Return the contents of the objects (segments) that would result from appending the lines one by one."""
    parts = [b""]
    for line in lines:
        if parts[-1] and len(parts[-1]) + len(line) + 1 > SEGMENT_BYTES:
            parts.append(b"")
        parts[-1] += line + b"\n"
    return parts


def _append_to_file(path: str, line: bytes) -> None:
    with open(path, "a+b") as file:
        if end := file.seek(0, os.SEEK_END):
            file.seek(end - 1)
            if file.read(1) != b"\n":  # a killed writer left an incomplete line
                file.truncate(_last_line_end(file, end))
        file.write(line)


def _last_line_end(file: BinaryIO, end: int) -> int:
    """Return the offset after the last newline; lines are short, so the last MiB contains a newline."""
    start = max(0, end - (1 << 20))
    file.seek(start)
    return start + file.read(end - start).rfind(b"\n") + 1
