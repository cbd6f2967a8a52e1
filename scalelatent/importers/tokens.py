"""RCV1-v2 as words: the token files of LYRL2004 (Lewis, Yang, Rose, Li 2004) and their topics.

A token file has for each document the lines `.I NUMBER` and `.W`, lines of word stems, and a blank one; the
topic file (qrels) has lines `TOPIC NUMBER 1`. Both may be packed with gzip.
"""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from scalelatent.data.csr import csr_of
from scalelatent.data.dataset import Dataset
from scalelatent.errors import DataError

from .files import open_maybe_gzip
from .rcv1 import Topics
from .stream import Progress, RowReader, write_rows

if TYPE_CHECKING:
    from typing import Unpack

    from scipy.sparse import csr_array

    from scalelatent.data.schema import LayoutOptions

COUNT_MAX = int(np.iinfo(np.uint16).max)
LONGEST_NUMBER = 18  # digits that int64 holds


def leaf_topics(topics: Sequence[str]) -> list[str]:
    """Topics of RCV1 that have none below them, in the given order.

    The code of a topic begins with that of the one above it (C15, C151, C1511); above all are CCAT, ECAT,
    GCAT and MCAT. Of all 103 topics 82 are leaves.

    Parameters
    ----------
    topics : sequence of str
        Codes.

    Returns
    -------
    list of str

    Examples
    --------
    >>> leaf_topics(["C15", "C151", "C1511", "C16", "CCAT", "GPOL"])
    ['C1511', 'C16', 'GPOL']
    """
    return [
        topic
        for topic in topics
        if not topic.endswith("CAT")
        and not any(other != topic and other.startswith(topic) for other in topics)
    ]


def import_tokens(
    tokens: Sequence[str | os.PathLike[str]],
    topics: str | os.PathLike[str],
    url: str | os.PathLike[str],
    *,
    stems: int = 2000,
    leaves: bool = False,
    drop_empty: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    shuffle: int | None = None,
    **layout: Unpack[LayoutOptions],
) -> Dataset:
    """Import RCV1-v2 from its token files: counts of the commonest word stems, and topics.

    The files are read twice, line by line: once to find the commonest stems, once to write the rows; with
    `drop_empty` once more, to count the rows that stay. In memory are the vocabulary (300,000 stems), and the
    2.6 million pairs of the topic file.

    Parameters
    ----------
    tokens : sequence of path
        ``lyrl2004_tokens_train.dat``, ``lyrl2004_tokens_test_pt0.dat`` and so on, or their ``.gz``; rows come
        in this order.
    topics : path
        ``rcv1-v2.topics.qrels``, or its ``.gz``.
    url : str
        Where the dataset goes.
    stems : int
        Columns: so many stems that occur most often over all documents (of equals the first by the alphabet),
        in the order of the alphabet.
    leaves : bool
        Keep the topics without topics below them alone; documents may then have none.
    drop_empty : bool
        Leave out documents without any of the stems, which have no cosine (``metric="cosine"`` refuses them);
        the provenance counts them (`left_out`).
    overwrite, progress, shuffle, **layout
        See `import_npy`.

    Returns
    -------
    Dataset
        CSR rows of counts (uint16) and multi-labels; the provenance names stems and topics.

    Raises
    ------
    DataError
        A file that is damaged or of another format, naming its line; a document without topics; fewer stems
        than wanted; an output that exists. No dataset is left behind.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> text = ".I 7\\n.W\\noil oil price\\n\\n.I 9\\n.W\\nprice goal\\n"
    >>> _ = (folder / "tokens.dat").write_text(text)
    >>> _ = (folder / "topics").write_text("M14 7 1\\nMCAT 7 1\\nGSPO 9 1\\n")
    >>> ds = import_tokens([folder / "tokens.dat"], folder / "topics", "memory://doc-tokens", stems=2)
    >>> ds.read_x(0, 2).toarray().tolist(), ds.attrs["provenance"]["stems"]
    ([[2, 1], [0, 1]], ['oil', 'price'])
    """
    if stems < 1:
        raise DataError(f"stems={stems}: give a whole number of at least 1")
    files = [Path(path) for path in tokens]
    if not files:
        raise DataError("no token file was given: give lyrl2004_tokens_train.dat.gz, for example")
    of_documents = Topics(Path(topics), leaf_topics if leaves else None)
    x = _Counts(files, stems, drop_empty)
    try:
        y = of_documents.beside(x, lambda: x.documents)
        told = {"stems": x.stems, "topics": of_documents.names}
        return write_rows(
            url, x, y, importer="rcv1", sources=[*files, topics], options=told,
            overwrite=overwrite, progress=progress, shuffle=shuffle, **layout,
        )  # fmt: skip
    finally:
        x.close()


def _documents_of(path: Path) -> Iterator[tuple[int, list[str]]]:
    """(number, stems) of each document of a token file."""
    what = f"token file {path}"
    number, line_number, expected = -1, 0, ".I"
    words: list[str] = []

    def wrong(line: str) -> DataError:
        return DataError(
            f"{what} is damaged at line {line_number:,}: {line.strip()[:40]!r} where {expected} was "
            "expected; documents are '.I NUMBER', '.W' and lines of stems. Download or copy it again"
        )

    with open_maybe_gzip(path, "token file") as file:
        try:
            for raw in file:
                line_number += 1
                line = raw.decode("latin-1")
                if line.startswith(".I"):
                    if expected == ".W":
                        raise wrong(line)
                    if number >= 0:
                        yield number, words
                    parts = line.split()
                    # int() refuses a superscript, which is a digit but not decimal.
                    if len(parts) != 2 or not parts[1].isdecimal() or len(parts[1]) > LONGEST_NUMBER:
                        expected = "'.I NUMBER'"
                        raise wrong(line)
                    number, words, expected = int(parts[1]), [], ".W"
                elif expected == ".W":
                    if line.strip() != ".W":
                        raise wrong(line)
                    expected = "stems or .I"
                elif line.strip():
                    if number < 0:
                        raise wrong(line)
                    words += line.split()
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(
                f"{what} is damaged after line {line_number:,}: {error}; download or copy it again"
            ) from error
    if expected == ".W":
        raise wrong("the end of the file")
    if number >= 0:
        yield number, words


class _Counts(RowReader):
    """Counts of the commonest stems of each document, or of each that has some."""

    sparse = True

    def __init__(self, files: list[Path], wanted: int, drop_empty: bool) -> None:
        self.name = " and ".join(f"token file {path}" for path in files)
        self.dtype = np.dtype(np.uint16)
        total: Counter[str] = Counter()
        holding: Counter[str] = Counter()
        n_rows = 0
        for path in files:
            for _, words in _documents_of(path):
                total.update(words)
                holding.update(set(words))
                n_rows += 1
        if not n_rows:
            raise DataError(f"{self.name} holds no document; there is nothing to import")
        if len(total) < wanted:
            raise DataError(
                f"{self.name}: {wanted:,} stems are wanted, but there are {len(total):,} different ones; "
                "give a lower number of stems"
            )
        commonest = sorted(total, key=lambda stem: (-total[stem], stem))[:wanted]
        self.stems = sorted(commonest)
        self.nnz = sum(holding[stem] for stem in self.stems)
        self.documents = np.empty(0, np.int64)
        """Numbers of the documents of the last `read`."""
        self._columns = {stem: column for column, stem in enumerate(self.stems)}
        self._left_out: int | None = None
        if drop_empty:
            # CSR datasets do not shrink: how many rows there are has to be known before.
            kept = sum(1 for _ in self._documents(files, drop_empty))
            self._left_out, n_rows = n_rows - kept, kept
        self.shape = (n_rows, wanted)
        self._stream = self._documents(files, drop_empty)

    def _documents(self, files: list[Path], drop_empty: bool) -> Generator[tuple[int, list[str]], None, None]:
        for path in files:
            for number, words in _documents_of(path):
                if not (drop_empty and self._columns.keys().isdisjoint(words)):
                    yield number, words

    def read(self, rows: int) -> csr_array:
        numbers, columns, counts, pointers = [], [], [], [0]
        for _ in range(rows):
            document = next(self._stream, None)
            if document is None:
                self._changed()
            number, words = document  # type: ignore[misc]
            held = Counter(map(self._columns.get, words))
            held.pop(None, None)
            entries = sorted(held.items())
            numbers.append(number)
            columns += [column for column, _ in entries]
            counts += [min(count, COUNT_MAX) for _, count in entries]
            pointers.append(len(columns))
        self.documents = np.array(numbers, np.int64)
        values = np.array(counts, self.dtype)
        return csr_of(values, np.array(columns, np.int64), np.array(pointers), self.shape[1])

    @property
    def notes(self) -> dict[str, int]:
        """How many documents were left out, for the provenance."""
        return {} if self._left_out is None else {"left_out": self._left_out}

    def finish(self) -> None:
        if next(self._stream, None) is not None:
            self._changed()

    def close(self) -> None:
        self._stream.close()

    def _changed(self) -> NoReturn:
        raise DataError(f"{self.name} changed while it was read; import it again when nothing writes to it")
