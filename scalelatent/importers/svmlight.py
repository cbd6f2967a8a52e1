"""Import svmlight (libsvm) text, plain or gzip, with scikit-learn's parser, in blocks of whole lines.

The file is parsed once. Its rows go to a temporary file, and rows, entries, columns and labels are counted.
So an unusable file is refused before a dataset is written. The reader returns the rows of the temporary file.
"""

from __future__ import annotations

import io
import itertools
import os
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, NamedTuple

import numpy as np

from scalelatent.data.csr import canonical_csr, csr_of, index_dtype, stack
from scalelatent.data.dataset import Dataset
from scalelatent.data.write.batches import Progress
from scalelatent.errors import DataError

from .files import PathOrUrl, open_maybe_gzip
from .stream import PairedReader, RowReader, write_rows

if TYPE_CHECKING:
    from typing import Unpack

    from scipy.sparse import csr_array

    from .stream import ImportOptions

_BLOCK_BYTES = 1 << 20
_MAX_LINE_BYTES = 1 << 28


def import_svmlight(
    file: PathOrUrl,
    url: PathOrUrl,
    *,
    zero_based: bool | str = "auto",
    n_features: int | None = None,
    **options: Unpack[ImportOptions],
) -> Dataset:
    r"""Import svmlight text: lines of a label and pairs COLUMN:VALUE; memory is bounded.

    The folder of temporary files (TMPDIR) holds the rows during the import, 12 bytes per entry.

    If rows have several labels, `3,17 COLUMN:VALUE ...`, all labels become CSR multi-labels. Rows without any
    label become a dataset without labels. The columns of a row must ascend. 'qid:' and comments are skipped.

    Parameters
    ----------
    file : path
        Plain or gzip; the content decides which, not the name.
    url : str
        Dataset to write.
    zero_based : bool or 'auto'
        Whether columns count from 0; 'auto': yes if a column 0 occurs.
    n_features : int, optional
        Number of columns; by default up to the highest that occurs.
    **options
        See `import_npy`; `progress` is called with (0, rows so far) while rows are counted, and `shard_rows`
        is the number of rows of a row group.

    Returns
    -------
    Dataset
        CSR rows float64; labels int64 if all are whole numbers, else float64.

    Raises
    ------
    DataError
        A file that is missing, empty, truncated or no svmlight file (with the line); columns that contradict
        `zero_based` or `n_features`; labels in some rows only; NaN or infinity (with row and column); an
        output that exists. No dataset stays behind.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with open(f"{folder}/a.svm", "w") as text:
    ...         _ = text.write("1 1:0.5 4:2\n-1 2:1\n")
    ...     ds = import_svmlight(f"{folder}/a.svm", "memory://doc-svmlight", overwrite=True)
    >>> ds.read_x(0, 2).toarray().tolist(), ds.read_y(0, 2).tolist()
    ([[0.5, 0.0, 0.0, 2.0], [0.0, 1.0, 0.0, 0.0]], [1, -1])
    """
    name = f"svmlight file {os.fspath(file)}"
    with tempfile.TemporaryFile() as parsed:
        counts = _parse_and_count(file, name, options.get("progress"), parsed)
        x = _SvmlightReader(parsed, name, counts, _first_column(counts, zero_based, name), n_features)
        provenance = {"options": {"zero_based": x.first_column == 0}}
        y = _open_labels(x, counts)
        return write_rows(url, x, y, importer="svmlight", sources=[file], provenance=provenance, **options)


class _Block(NamedTuple):
    """Parsed rows and labels of some lines of the file."""

    rows: csr_array
    labels: np.ndarray
    """Labels of all rows, float64, one row after the other."""
    row_labels: np.ndarray
    """Number of labels of each row."""

    def write(self, parsed: IO[bytes]) -> None:
        for array in (self.rows.data, self.rows.indices, self.rows.indptr, self.labels, self.row_labels):
            np.save(parsed, array, allow_pickle=False)

    @classmethod
    def read(cls, parsed: IO[bytes]) -> _Block:
        data, indices, indptr, labels, row_labels = (np.load(parsed) for _ in range(5))
        return cls(csr_of(data, indices, indptr, int(indices.max(initial=0)) + 1), labels, row_labels)

    def split(self, rows: int) -> tuple[_Block, _Block]:
        """Split into two blocks: the first rows and the remaining rows."""
        labels = int(self.row_labels[:rows].sum())
        first = _Block(self.rows[:rows], self.labels[:labels], self.row_labels[:rows])
        return first, _Block(self.rows[rows:], self.labels[labels:], self.row_labels[rows:])


def _read_text(file: PathOrUrl, name: str) -> Iterator[bytes]:
    """Yield the bytes of a file in blocks of whole lines."""
    rest, done = b"", 0
    with open_maybe_gzip(file, "svmlight file") as text:
        try:
            while part := text.read(_BLOCK_BYTES):
                done += len(part)
                lines, newline, tail = part.rpartition(b"\n")
                if newline:
                    yield rest + lines + newline
                    rest = b""
                rest += tail
                if len(rest) > _MAX_LINE_BYTES:
                    raise DataError(
                        f"{name} has a line of more than {_MAX_LINE_BYTES:,} bytes: not an svmlight file"
                    )
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(
                f"{name} is truncated or damaged after byte {done:,} of the text: {error}; download or copy "
                "it again"
            ) from error
    if rest:
        yield rest


def _parse(text: bytes) -> _Block:
    """Parse whole lines; raise `ValueError` or `OverflowError` if one is malformed."""
    from sklearn.datasets import load_svmlight_file

    # Columns stay as they are in the text. Lists of labels also represent rows without a label.
    rows, lists = load_svmlight_file(io.BytesIO(text), zero_based=True, multilabel=True)
    row_labels = np.fromiter(map(len, lists), np.int64, len(lists))
    labels = np.fromiter(itertools.chain.from_iterable(lists), np.float64, int(row_labels.sum()))
    return _Block(rows, labels, row_labels)


def _parse_blocks(file: PathOrUrl, name: str) -> Iterator[_Block]:
    """Yield the blocks of a file that have rows, in order."""
    lines_before = 0
    for text in _read_text(file, name):
        try:
            block = _parse(text)
        except (ValueError, OverflowError) as error:
            raise _malformed(text, lines_before, name) from error
        lines_before += text.count(b"\n")
        if block.rows.shape[0]:
            yield block


def _malformed(text: bytes, lines_before: int, name: str) -> DataError:
    """Return the error for the first malformed line of a block."""
    lines = text.split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            _parse(line)
        except (ValueError, OverflowError) as error:
            shown = line[:60].decode("utf-8", "backslashreplace")
            hint = " The file ends in this line: it may be cut short." if number == len(lines) else ""
            return DataError(
                f"{name}, line {lines_before + number}: {shown!r} is not LABEL COLUMN:VALUE … with ascending "
                f"columns of at least 0 ({error!s:.80}).{hint} Correct the line, or use another importer"
            )
    raise AssertionError(f"{name}: no line of a malformed block is malformed")


@dataclass
class _TextCounts:
    """Numbers of rows and entries of a whole file, and the ranges of its columns and labels."""

    rows: int = 0
    entries: int = 0
    columns: tuple[int, int] | None = None
    """Lowest and highest column, as they are in the text; None without entries."""
    bare_rows: int = 0
    """Number of rows without a label."""
    has_lists: bool = False
    """True if a row has several labels."""
    has_fractions: bool = False
    """True if a label is not a whole number."""
    lowest_label: float = np.inf
    highest_label: float = -np.inf

    def add(self, block: _Block) -> None:
        """Add the rows, entries, columns and labels of a block."""
        columns, labels = block.rows.indices, block.labels
        self.rows += block.rows.shape[0]
        self.entries += len(columns)
        if len(columns):
            low, high = self.columns or (int(columns[0]), int(columns[0]))
            self.columns = min(low, int(columns.min())), max(high, int(columns.max()))
        self.bare_rows += int(np.count_nonzero(block.row_labels == 0))
        self.has_lists |= bool((block.row_labels > 1).any())
        self.has_fractions |= bool((labels != np.trunc(labels)).any())
        self.lowest_label = min(self.lowest_label, labels.min(initial=np.inf))
        self.highest_label = max(self.highest_label, labels.max(initial=-np.inf))


def _parse_and_count(file: PathOrUrl, name: str, progress: Progress | None, parsed: IO[bytes]) -> _TextCounts:
    """Parse a whole file once: return its numbers of rows and entries, and write the blocks to `parsed`.

    `progress` is called with (0, rows so far).
    """
    counts = _TextCounts()
    for block in _parse_blocks(file, name):
        counts.add(block)
        try:
            block.write(parsed)
        except OSError as error:
            raise DataError(
                f"{name}: its rows do not fit into the folder of temporary files, {tempfile.gettempdir()} "
                f"({error}); set the environment variable TMPDIR to a folder with more room"
            ) from error
        if progress is not None:
            progress(0, counts.rows)
    if not counts.rows:
        raise DataError(f"{name} holds no rows: it is empty, or has blank lines and comments only")
    parsed.seek(0)
    return counts


def _first_column(counts: _TextCounts, zero_based: bool | str, name: str) -> int:
    """Return the number of the first column in the file: 0 or 1."""
    if zero_based not in (True, False, "auto"):
        raise DataError(f"zero_based is {zero_based!r}, but it must be True, False or 'auto'")
    has_zero = counts.columns is not None and counts.columns[0] == 0
    if zero_based is False and has_zero:
        raise DataError(
            f"{name} has entries in column 0, so its columns do not count from 1: use zero_based='auto'"
        )
    return int(not (has_zero if zero_based == "auto" else zero_based))


def _open_labels(x: _SvmlightReader, counts: _TextCounts) -> PairedReader | None:
    """Return a reader of the labels, or None if no row has one."""
    name = f"labels of {x.name}"
    if counts.has_lists:
        if counts.has_fractions or counts.lowest_label < 0:
            raise DataError(
                f"{x.name} has rows with several labels, which must be whole numbers of at least 0; correct "
                "them, or keep one label a row"
            )
        width = int(counts.highest_label) + 1
        return PairedReader(
            x, np.dtype(np.uint8), lambda: _as_multilabels(*x.labels_read, width, name), width, name
        )
    if counts.bare_rows == counts.rows:
        return None
    if counts.bare_rows:
        raise DataError(
            f"{x.name}: {counts.bare_rows} of {counts.rows} rows have no label; label these rows, or remove "
            "them"
        )
    dtype = np.dtype(np.float64 if counts.has_fractions else np.int64)
    return PairedReader(x, dtype, lambda: x.labels_read[0].astype(dtype, copy=False), name=name)


def _as_multilabels(labels: np.ndarray, row_labels: np.ndarray, width: int, name: str) -> csr_array:
    """Return multi-labels, CSR uint8 (n, width) of ones, from all labels and the number of labels per row."""
    pointers = np.concatenate([[0], np.cumsum(row_labels)])
    ones = np.ones(len(labels), np.uint8)
    rows, _, _ = canonical_csr(ones, labels.astype(np.int64), pointers, width, 0, name)
    rows.data[:] = 1  # a label that occurs twice in a row counts once
    return rows


class _SvmlightReader(RowReader):
    """Reader of CSR rows from the temporary file of parsed blocks.

    `labels_read` holds the labels of the rows that `read` returned last, and the number of labels per row.
    """

    sparse = True

    def __init__(
        self, parsed: IO[bytes], name: str, counts: _TextCounts, first_column: int, n_features: int | None
    ) -> None:
        self.name, self.dtype, self.first_column = name, np.dtype(np.float64), first_column
        highest = first_column if counts.columns is None else counts.columns[1]
        width = highest - first_column + 1
        if n_features is not None and n_features < width:
            raise DataError(
                f"{name} has entries in column {highest} (counted from {first_column}), which needs {width} "
                f"features, not {n_features}; give n_features={width} or more"
            )
        self.nnz = counts.entries
        self.shape = (counts.rows, n_features or width)
        self._parsed = parsed
        self._rest = _parse(b"")
        self.labels_read: tuple[np.ndarray, np.ndarray]

    def read(self, rows: int) -> csr_array:
        blocks = [self._rest]
        while (missing := rows - sum(block.rows.shape[0] for block in blocks)) > 0:
            blocks.append(_Block.read(self._parsed))
        last = blocks.pop()
        last, self._rest = last.split(last.rows.shape[0] + missing)
        parts, labels, row_labels = zip(*blocks, last, strict=True)
        self.labels_read = np.concatenate(labels), np.concatenate(row_labels)
        joined, width = stack(list(parts)), self.shape[1]
        columns = (joined.indices - self.first_column).astype(index_dtype(width), copy=False)
        return csr_of(joined.data, columns, joined.indptr, width)
