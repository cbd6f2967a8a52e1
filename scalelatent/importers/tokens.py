"""Import RCV1-v2 as counts of word stems: the token files of LYRL2004 (Lewis, Yang, Rose, Li 2004).

A token file holds for each document the lines `.I NUMBER` and `.W`, lines of word stems, and a blank line.
The topics are in a file of lines `TOPIC NUMBER 1`. Both files can be packed with gzip.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from scalelatent.data.csr import csr_of
from scalelatent.data.dataset import Dataset
from scalelatent.errors import DataError

from .files import PathOrUrl, read_lines
from .rcv1 import Topics
from .stream import RowReader, write_rows

if TYPE_CHECKING:
    from typing import Unpack

    from scipy.sparse import csr_array

    from .stream import ImportOptions

_MAX_COUNT = int(np.iinfo(np.uint16).max)
# Every number of at most this many digits fits into int64.
_MAX_DIGITS = 18


def leaf_topics(topics: Sequence[str]) -> list[str]:
    """Return the leaves of RCV1's tree of topics, in the given order.

    The code of a topic begins with that of its parent (C15, C151, C1511); the roots are CCAT, ECAT, GCAT and
    MCAT. Of all 103 topics, 82 are leaves.

    Parameters
    ----------
    topics : sequence of str
        Codes.

    Returns
    -------
    list of str
        Codes without children among `topics`.

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
    tokens: Sequence[PathOrUrl],
    topics: PathOrUrl,
    url: PathOrUrl,
    *,
    stems: int = 2000,
    leaves: bool = False,
    drop_empty: bool = False,
    **options: Unpack[ImportOptions],
) -> Dataset:
    r"""Import RCV1-v2 from its token files: counts of the most frequent word stems, and topics.

    The files are read twice, line by line: first to find the most frequent stems, then to write the rows;
    with `drop_empty` once more, to count the remaining rows. Memory holds the vocabulary (300,000 stems) and
    the 2.6 million pairs of the topic file.

    Parameters
    ----------
    tokens : sequence of path
        ``lyrl2004_tokens_train.dat``, ``lyrl2004_tokens_test_pt0.dat`` and so on, or their ``.gz``; rows come
        in this order.
    topics : path
        ``rcv1-v2.topics.qrels``, or its ``.gz``.
    url : str
        Dataset to write.
    stems : int
        Number of columns: the stems with the most occurrences in all documents (ties by the alphabet), in the
        order of the alphabet.
    leaves : bool
        Keep only topics without children; documents may then have no topic.
    drop_empty : bool
        Exclude documents without any of the stems, which have no cosine (``metric="cosine"`` refuses them);
        the provenance counts them (`left_out`).
    **options
        See `import_npy`.

    Returns
    -------
    Dataset
        CSR rows of counts (uint16) and multi-labels; the provenance names stems and topics.

    Raises
    ------
    DataError
        A file that is damaged or of another format (with its line); a document without topics; fewer stems
        than `stems`; an output that exists. No dataset stays behind.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> text = ".I 7\n.W\noil oil price\n\n.I 9\n.W\nprice goal\n"
    >>> _ = (folder / "tokens.dat").write_text(text)
    >>> _ = (folder / "topics").write_text("M14 7 1\nMCAT 7 1\nGSPO 9 1\n")
    >>> ds = import_tokens([folder / "tokens.dat"], folder / "topics", "memory://doc-tokens", stems=2)
    >>> ds.read_x(0, 2).toarray().tolist(), ds.attrs["provenance"]["stems"]
    ([[2, 1], [0, 1]], ['oil', 'price'])
    """
    if stems < 1:
        raise DataError(f"stems={stems}: give a whole number of at least 1")
    files = [Path(path) for path in tokens]
    if not files:
        raise DataError("no token file was given: give lyrl2004_tokens_train.dat.gz, for example")
    document_topics = Topics(Path(topics), leaf_topics if leaves else None)
    x = _StemCountsReader(files, stems, drop_empty)
    y = document_topics.paired_with(x, lambda: x.documents)
    provenance = {"stems": x.stems, "topics": document_topics.names}
    sources = [*files, topics]
    return write_rows(url, x, y, importer="rcv1", sources=sources, provenance=provenance, **options)


def _read_documents(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield (number, stems) of each document of a token file."""
    number, line_number, expected = -1, 0, ".I"
    words: list[str] = []

    def malformed(line_number: int, line: str) -> DataError:
        return DataError(
            f"token file {path} is damaged at line {line_number:,}: {line.strip()[:40]!r} where {expected} "
            "was expected; documents are '.I NUMBER', '.W' and lines of stems. Download or copy it again"
        )

    for line_number, raw in read_lines(path, "token file"):
        line = raw.decode("latin-1")
        if line.startswith(".I"):
            if expected == ".W":
                raise malformed(line_number, line)
            if number >= 0:
                yield number, words
            parts = line.split()
            # A superscript is a digit, but not a decimal, and int() refuses it.
            if len(parts) != 2 or not parts[1].isdecimal() or len(parts[1]) > _MAX_DIGITS:
                expected = "'.I NUMBER'"
                raise malformed(line_number, line)
            number, words, expected = int(parts[1]), [], ".W"
        elif expected == ".W":
            if line.strip() != ".W":
                raise malformed(line_number, line)
            expected = "stems or .I"
        elif line.strip():
            if number < 0:
                raise malformed(line_number, line)
            words += line.split()
    if expected == ".W":
        raise malformed(line_number, "the end of the file")
    if number >= 0:
        yield number, words


class _StemCountsReader(RowReader):
    """Counts of the most frequent stems in each document, or in each that has some.

    `documents` holds the numbers of the documents of the last `read`.
    """

    sparse = True

    def __init__(self, files: list[Path], n_stems: int, drop_empty: bool) -> None:
        self.name = " and ".join(f"token file {path}" for path in files)
        self.dtype = np.dtype(np.uint16)
        n_occurrences: Counter[str] = Counter()
        n_documents: Counter[str] = Counter()
        n_rows = 0
        for path in files:
            for _, words in _read_documents(path):
                n_occurrences.update(words)
                n_documents.update(set(words))
                n_rows += 1
        if not n_rows:
            raise DataError(f"{self.name} holds no document; there is nothing to import")
        if len(n_occurrences) < n_stems:
            raise DataError(
                f"{self.name}: {n_stems:,} stems are needed, but there are {len(n_occurrences):,} different "
                "ones; give a lower number of stems"
            )
        self.stems = sorted(sorted(n_occurrences, key=lambda stem: (-n_occurrences[stem], stem))[:n_stems])
        self.nnz = sum(n_documents[stem] for stem in self.stems)
        self.documents = np.empty(0, np.int64)
        self._columns = {stem: column for column, stem in enumerate(self.stems)}
        self._n_excluded: int | None = None
        if drop_empty:
            # Count the rows before writing, because a CSR dataset cannot shrink afterwards.
            n_kept = sum(1 for _ in self._read_kept(files, drop_empty))
            self._n_excluded, n_rows = n_rows - n_kept, n_kept
        self.shape = (n_rows, n_stems)
        self._stream = self._read_kept(files, drop_empty)

    def _read_kept(self, files: list[Path], drop_empty: bool) -> Iterator[tuple[int, list[str]]]:
        """Yield (number, stems) of the documents of all files, without excluded ones."""
        for path in files:
            for number, words in _read_documents(path):
                if not (drop_empty and self._columns.keys().isdisjoint(words)):
                    yield number, words

    def read(self, rows: int) -> csr_array:
        numbers, columns, counts, pointers = [], [], [], [0]
        for _ in range(rows):
            number, words = next(self._stream, None) or self._refuse_changed()
            stems = Counter(map(self._columns.get, words))
            del stems[None]  # words that are not among the chosen stems
            entries = sorted(stems.items())
            numbers.append(number)
            columns += [column for column, _ in entries]
            counts += [min(count, _MAX_COUNT) for _, count in entries]
            pointers.append(len(columns))
        self.documents = np.array(numbers, np.int64)
        values = np.array(counts, self.dtype)
        return csr_of(values, np.array(columns, np.int64), np.array(pointers), self.shape[1])

    @property
    def notes(self) -> dict[str, int]:
        return {} if self._n_excluded is None else {"left_out": self._n_excluded}

    def finish(self) -> None:
        if next(self._stream, None) is not None:
            self._refuse_changed()

    def _refuse_changed(self) -> NoReturn:
        raise DataError(f"{self.name} changed while it was read; import it again when nothing writes to it")
