"""RCV1-v2 (Lewis, Yang, Rose, Li 2004): svmlight files labelled by document numbers, and their topics."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.data.csr import csr_of
from scalelatent.data.dataset import Dataset
from scalelatent.errors import DataError

from .files import open_maybe_gzip
from .stream import Beside, Chain, RowReader, write_rows
from .svmlight import SvmRows, count_lines

if TYPE_CHECKING:
    from scipy.sparse import csr_array

N_TERMS = 47_236
DOCUMENT_MAX = int(np.iinfo(np.int32).max)


def import_rcv1(
    files: list[Path], url: str | os.PathLike[str], *, options: dict[str, Any], **how: Any
) -> Dataset:
    """Import the vectors `files[1:]` with the topics in `files[0]`; see `import_named`."""
    topics = Topics(files[0])
    with contextlib.ExitStack() as opened:
        streams = []
        for path in files[1:]:
            name = f"svmlight file {path}"
            rows = SvmRows(path, name, count_lines(path, name, None), 1, N_TERMS, np.dtype(np.float64))
            opened.callback(rows.close)
            streams.append(rows)
        x = _Documents(streams)
        y = topics.beside(x, lambda: x.documents)
        told = {**options, "topics": topics.names}
        return write_rows(url, x, y, importer="rcv1", sources=list(files), options=told, **how)


class Topics:
    """Topics of the documents: lines `TOPIC DOCUMENT 1`, in any order."""

    def __init__(self, path: Path, choose: Callable[[list[str]], list[str]] | None = None) -> None:
        self.name = f"topics {path}"
        numbers: dict[str, int] = {}
        pairs: list[np.ndarray] = []
        part: list[tuple[int, int]] = []
        line_number, lines = 0, open_maybe_gzip(path, "topics")
        try:
            with lines:
                for line in lines:
                    line_number += 1
                    if not line.strip():
                        continue
                    topic, document = _pair(line)
                    part.append((document, numbers.setdefault(topic, len(numbers))))
                    if len(part) == 65_536:
                        pairs.append(np.array(part, np.int32))
                        part = []
        except ValueError as error:
            raise DataError(
                f"{self.name} is damaged at line {line_number:,}: {error}; remove it and import again"
            ) from None
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(
                f"{self.name} is damaged after line {line_number:,}: {error}; remove it and import again"
            ) from error
        if not numbers:
            raise DataError(
                f"{self.name} holds no topic: lines are 'TOPIC DOCUMENT 1', as in rcv1-v2.topics.qrels; "
                "check the path, or remove the file and import again"
            )
        found = np.concatenate([*pairs, np.array(part, np.int32).reshape(-1, 2)])
        every = sorted(numbers)
        rank = np.empty(len(numbers), np.int32)
        for column, name in enumerate(every):
            rank[numbers[name]] = column
        self.names = every if choose is None else choose(every)
        chosen = set(self.names)
        self._chosen = (
            None if choose is None else np.array([i for i, name in enumerate(every) if name in chosen])
        )
        self._width = len(every)
        columns = rank[found[:, 1]]
        order = np.lexsort((columns, found[:, 0]))
        self._columns = columns[order]
        self._documents, first = np.unique(found[order, 0], return_index=True)
        self._pointers = np.append(first, len(order))

    def beside(self, x: RowReader, documents: Callable[[], np.ndarray]) -> Beside:
        """The topics of the documents that a reader of rows has read last."""
        return Beside(x, np.dtype(np.uint8), lambda: self.of(documents()), len(self.names), self.name)

    def of(self, documents: np.ndarray) -> csr_array:
        """Topics of documents, CSR uint8 (n, topics)."""
        at = self._find(documents)
        columns = [self._columns[self._pointers[i] : self._pointers[i + 1]] for i in at]
        pointers = np.concatenate([[0], np.cumsum([len(c) for c in columns])])
        found = np.concatenate(columns)
        every = csr_of(np.ones(len(found), np.uint8), found, pointers, self._width)
        return every if self._chosen is None else every[:, self._chosen]

    def _find(self, documents: np.ndarray) -> np.ndarray:
        at = np.minimum(np.searchsorted(self._documents, documents), len(self._documents) - 1)
        wrong = np.flatnonzero(self._documents[at] != documents)
        if wrong.size:
            raise DataError(
                f"{self.name} has no topic of document {int(documents[wrong[0]])}, which the vectors hold; "
                "the files do not belong together: remove them and import again"
            )
        return at


def _pair(line: bytes) -> tuple[str, int]:
    """(topic, document) of a line."""
    told = f"{line.decode('latin-1').strip()[:40]!r} where 'TOPIC DOCUMENT 1' was expected"
    try:
        topic, document, _ = line.decode("ascii").split()
        number = int(document)
    except ValueError:
        raise ValueError(told) from None
    if not 0 <= number <= DOCUMENT_MAX:
        raise ValueError(f"{told}, with a document of 0 to {DOCUMENT_MAX:,}")
    return topic, number


class _Documents(Chain):
    """Vectors of several files, one after another."""

    documents = np.empty(0)
    """Numbers of the documents of the last `read`."""

    def read(self, rows: int) -> csr_array:
        self._numbers: list[np.ndarray] = []
        found = super().read(rows)
        self.documents = np.concatenate(self._numbers)
        return found

    def _take(self, reader: RowReader, rows: int) -> csr_array:
        assert isinstance(reader, SvmRows)
        found = reader.read(rows)
        assert reader.read_labels is not None
        self._numbers.append(reader.read_labels[0])
        return found
