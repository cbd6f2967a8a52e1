"""Import RCV1-v2 (Lewis, Yang, Rose, Li 2004): svmlight files labelled by document numbers, and topics."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from scalelatent.data.csr import csr_of
from scalelatent.data.dataset import Dataset
from scalelatent.errors import DataError

from .files import PathOrUrl, read_lines
from .stream import ConcatenatedReader, PairedReader, RowReader, write_rows
from .svmlight import SvmlightReader, count_lines

if TYPE_CHECKING:
    from scipy.sparse import csr_array

    from .stream import ImportOptions

N_TERMS = 47_236
MAX_DOCUMENT = int(np.iinfo(np.int32).max)
# Number of pairs (document, topic) that are Python objects at a time.
_BATCH_PAIRS = 65_536


def import_rcv1(files: list[Path], url: PathOrUrl, part: str, options: ImportOptions) -> Dataset:
    """Import the vectors in `files[1:]` with the topics in `files[0]`; see `import_named`."""
    topics = Topics(files[0])
    readers = []
    for path in files[1:]:
        name = f"svmlight file {path}"
        counts = count_lines(path, name, None)
        readers.append(SvmlightReader(path, name, counts, 1, N_TERMS, np.dtype(np.float64)))
    x = _VectorsReader(readers)
    y = topics.paired_with(x, lambda: x.documents)
    provenance = {"part": part, "topics": topics.names}
    return write_rows(url, x, y, importer="rcv1", sources=files, provenance=provenance, **options)


class Topics:
    """Topics of documents, from a file of lines `TOPIC DOCUMENT 1` in any order.

    `choose` returns the topics to keep from the sorted names of all topics.
    """

    def __init__(self, path: Path, choose: Callable[[list[str]], list[str]] | None = None) -> None:
        self.name = f"topics {path}"
        numbers: dict[str, int] = {}
        batches: list[np.ndarray] = []
        batch: list[tuple[int, int]] = []
        for line_number, line in read_lines(path, "topics"):
            if not line.strip():
                continue
            try:
                topic, document = _parse_line(line)
            except ValueError as error:
                raise DataError(
                    f"{self.name} is damaged at line {line_number:,}: {error}; remove it and import again"
                ) from None
            batch.append((document, numbers.setdefault(topic, len(numbers))))
            if len(batch) == _BATCH_PAIRS:
                batches.append(np.array(batch, np.int32))
                batch = []
        if not numbers:
            raise DataError(
                f"{self.name} holds no topic: lines are 'TOPIC DOCUMENT 1', as in rcv1-v2.topics.qrels; "
                "check the path, or remove the file and import again"
            )
        pairs = np.concatenate([*batches, np.array(batch, np.int32).reshape(-1, 2)])
        all_names = sorted(numbers)
        self.names = all_names if choose is None else choose(all_names)
        # Column of each topic, by the number of the topic; -1 for topics that are not chosen.
        columns = {name: column for column, name in enumerate(self.names)}
        column_of = np.array([columns.get(name, -1) for name in numbers], np.int32)[pairs[:, 1]]
        order = np.lexsort((column_of, pairs[:, 0]))
        self._columns = column_of[order]
        self._documents, first = np.unique(pairs[order, 0], return_index=True)
        self._pointers = np.append(first, len(order))

    def paired_with(self, x: RowReader, documents: Callable[[], np.ndarray]) -> PairedReader:
        """Return a reader of the topics of the rows that `x` read last; `documents` returns their numbers."""
        return PairedReader(
            x, np.dtype(np.uint8), lambda: self.topics_of(documents()), len(self.names), self.name
        )

    def topics_of(self, documents: np.ndarray) -> csr_array:
        """Return the topics of documents, CSR uint8 (n, topics)."""
        index = np.minimum(np.searchsorted(self._documents, documents), len(self._documents) - 1)
        missing = np.flatnonzero(self._documents[index] != documents)
        if missing.size:
            raise DataError(
                f"{self.name} has no topic of document {int(documents[missing[0]])}, which the vectors hold; "
                "the files do not belong together: remove them and import again"
            )
        rows = [self._columns[self._pointers[i] : self._pointers[i + 1]] for i in index]
        rows = [row[row >= 0] for row in rows]
        pointers = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
        columns = np.concatenate(rows)
        return csr_of(np.ones(len(columns), np.uint8), columns, pointers, len(self.names))


def _parse_line(line: bytes) -> tuple[str, int]:
    """Return (topic, document) of a line; raise `ValueError` with the reason if it is malformed."""
    problem = f"{line.decode('latin-1').strip()[:40]!r} where 'TOPIC DOCUMENT 1' was expected"
    try:
        topic, document, _ = line.decode("ascii").split()
        number = int(document)
    except ValueError:
        raise ValueError(problem) from None
    if not 0 <= number <= MAX_DOCUMENT:
        raise ValueError(f"{problem}, with a document of 0 to {MAX_DOCUMENT:,}")
    return topic, number


class _VectorsReader(ConcatenatedReader):
    """Vectors of several files; `documents` holds the numbers of the documents of the last `read`."""

    documents = np.empty(0)

    def read(self, rows: int) -> csr_array:
        self._parts: list[np.ndarray] = []
        vectors = super().read(rows)
        self.documents = np.concatenate(self._parts)
        return vectors

    def read_part(self, reader: RowReader, rows: int) -> csr_array:
        assert isinstance(reader, SvmlightReader)
        vectors = reader.read(rows)
        self._parts.append(reader.labels_read[0])
        return vectors
