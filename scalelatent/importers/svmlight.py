"""svmlight (libsvm) text files, plain or gzip, read as a stream in two passes.

The first pass looks at every line: how many rows and entries there are, which columns, what kind of labels.
So a file that cannot be read is refused before anything is written. The second reads the numbers.

scikit-learn's `load_svmlight_file` in blocks and processes would not serve: one process parses a quarter of
what this import, both passes and the writing included, does on two cores (`python benchmarks/import_rates.py
--only svmlight`: "import / read"). It also counts no rows first, takes no block of gzip, keeps labels as
floats, and does not tell the number of a line that is wrong.
"""

from __future__ import annotations

import os
import zlib
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import dask.system
import numpy as np

from scalelatent.data.csr import canonical, csr_of
from scalelatent.data.dataset import Dataset
from scalelatent.data.layout import GROUP_BYTES, choose_csr_layout
from scalelatent.data.write.batches import in_order
from scalelatent.errors import DataError

from . import svmlight_kernels as kernels
from .files import open_maybe_gzip
from .stream import Progress, RowReader, write_rows

if TYPE_CHECKING:
    from typing import Unpack

    import numpy.typing as npt
    from scipy.sparse import csr_array

    from scalelatent.data.schema import LayoutOptions
    from scalelatent.kernels.arrays import DenseOrCsr

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
    found = Counts()
    for text, parsed in parse_blocks(file, name, keep=False):
        check_lines(text, parsed, found.lines, name)
        found.add(parsed.state, kernels.STATE)
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
    """Raise what the kernel found wrong with a line; `lines` is how many come before the block."""
    found = dict(zip(kernels.STATE, parsed.state.tolist(), strict=True))
    if not found["error"]:
        return
    raw = bytes(text[found["at"] : found["at"] + 41])
    shown = (raw.split(None, 1) or [b""])[0].decode("utf-8", "backslashreplace")
    shown = shown if len(shown) <= 40 else shown[:40] + "…"
    problem = {
        kernels.BAD_LABEL: f"{shown!r} is not a label: a number, or numbers with commas between",
        kernels.BAD_COLUMN: f"{shown!r} is not an entry COLUMN:VALUE with a whole COLUMN of at least 0",
        kernels.NO_VALUE: f"entry {shown!r} has no value after the colon",
        kernels.BAD_VALUE: f"the value of entry {shown!r} is not a number",
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
                        f"{name} has a line of more than {_MAX_LINE_BYTES:,} bytes: not an svmlight file"
                    )
                continue
            block, rest = rest + part[:cut], part[cut:]
            if block or not part:
                last = block if part else block + rest
                if last:
                    yield np.frombuffer(last, np.uint8)
            if not part:
                return


def parse_blocks(file: str | os.PathLike[str], name: str, *, keep: bool) -> Generator[Block]:
    """Blocks of a file with what they hold, in order, parsed by threads a few blocks ahead."""

    threads = min(dask.system.cpu_count(), _MAX_THREADS)

    def parse(_: int, block: np.ndarray) -> Block:
        return block, _parse(block, keep)

    return in_order(_text_blocks(file, name), parse, threads, "scalelatent-svmlight", ahead=threads)


Block = tuple[np.ndarray, Parsed]
"""Text, and what it holds."""


def import_svmlight(
    file: str | os.PathLike[str],
    url: str | os.PathLike[str],
    *,
    zero_based: bool | str = "auto",
    n_features: int | None = None,
    multilabel: bool | None = None,
    dtype: npt.DTypeLike = np.float64,
    overwrite: bool = False,
    progress: Progress | None = None,
    shuffle: int | None = None,
    **layout: Unpack[LayoutOptions],
) -> Dataset:
    """Import svmlight text, lines of ``LABEL COLUMN:VALUE COLUMN:VALUE``; memory is bounded.

    Several labels of a row, `3,17 COLUMN:VALUE ...`, make CSR multi-labels; rows without any label make a
    dataset without labels. Columns in any order are sorted, entries of the same place added (the provenance
    says of how many), 'qid:' and comments passed over.

    Parameters
    ----------
    file : path
        Plain or gzip (told by the content, not by the name).
    url : str
        Where the dataset goes.
    zero_based : bool or 'auto'
        Whether columns count from 0; 'auto': where a column 0 occurs.
    n_features : int, optional
        Number of columns; by default up to the highest that occurs.
    multilabel : bool, optional
        Whether labels are lists; by default where a comma occurs.
    dtype : dtype
        Type of the values: float64 keeps all that is written, float32 takes half the room.
    overwrite, progress, shuffle, **layout
        See `import_npy`; `progress` is called with (0, rows so far) while rows are counted, and `shard_rows`
        are the rows of a row group.

    Returns
    -------
    Dataset
        CSR rows; labels int64 where all are whole numbers, else float64.

    Raises
    ------
    DataError
        A file that is missing, empty, cut short or no svmlight file (with the line); columns that do not fit
        `zero_based` or `n_features`; labels of some rows only; NaN or infinity (with row and column); an
        output that exists. No dataset is left behind.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with open(f"{folder}/a.svm", "w") as text:
    ...         _ = text.write("1 1:0.5 4:2\\n-1 2:1\\n")
    ...     ds = import_svmlight(f"{folder}/a.svm", "memory://doc-svmlight", overwrite=True)
    >>> ds.read_x(0, 2).toarray().tolist(), ds.read_y(0, 2).tolist()
    ([[0.5, 0.0, 0.0, 2.0], [0.0, 1.0, 0.0, 0.0]], [1, -1])
    """
    kind = np.dtype(dtype)
    if kind not in (np.float32, np.float64):
        raise DataError(f"dtype is {dtype!r}, but values of text are read as 'float64' or 'float32'")
    name = f"svmlight file {os.fspath(file)}"
    found = count_lines(file, name, progress)
    x = SvmRows(file, name, found, _base(found, zero_based, name), n_features, kind)
    y = _labels(x, found, multilabel)
    if layout.get("shard_rows") is None:
        layout["shard_rows"] = _group_rows(found, kind)
    options = {"zero_based": x.first_column == 0, "dtype": str(x.dtype)}
    try:
        return write_rows(
            url,
            x,
            y,
            importer="svmlight",
            sources=[file],
            options={"options": options},
            overwrite=overwrite,
            progress=progress,
            shuffle=shuffle,
            **layout,
        )
    finally:
        x.close()


def _base(found: Counts, zero_based: bool | str, name: str) -> int:
    """The number of the first column: 0 or 1."""
    if zero_based not in (True, False, "auto"):
        raise DataError(f"zero_based is {zero_based!r}, but it has to be True, False or 'auto'")
    if zero_based is False and found.lowest == 0:
        raise DataError(
            f"{name} has entries in column 0, so its columns do not count from 1: use zero_based='auto'"
        )
    return int(found.lowest > 0) if zero_based == "auto" else int(not zero_based)


def _group_rows(found: Counts, dtype: np.dtype) -> int:
    """Rows of a row group: by their mean, and not too large where rows are long."""
    rows = choose_csr_layout(found.rows, found.entries, dtype).shard_rows
    while rows > 1 and rows * found.density * (dtype.itemsize + 4) > 4 * GROUP_BYTES:
        rows //= 2
    return rows


def _labels(x: SvmRows, found: Counts, multilabel: bool | None) -> SvmLabels | None:
    several = found.commas > 0 if multilabel is None else multilabel
    if several:
        if found.fractions or (found.labels and found.lowest_label < 0):
            raise DataError(
                f"{x.name} has rows with several labels, which have to be whole numbers of at least 0; "
                "correct them, or keep one label a row"
            )
        return SvmLabels(x, np.dtype(np.uint8), (found.rows, max(found.highest_label + 1, 1)), found.labels)
    if found.commas:
        raise DataError(
            f"{x.name} has rows with several labels; import it with multilabel=True (--multilabel)"
        )
    if found.bare == found.rows:
        return None
    if found.bare:
        raise DataError(
            f"{x.name}: {found.bare} of {found.rows} rows have no label; label or drop them, or, where rows "
            "may have none or one of several, import with multilabel=True (--multilabel)"
        )
    return SvmLabels(x, np.dtype(np.float64 if found.fractions else np.int64), (found.rows,), None)


class SvmRows(RowReader):
    """The rows of a file, read in order by the second pass."""

    sparse = True

    def __init__(
        self,
        file: str | os.PathLike[str],
        name: str,
        found: Counts,
        first_column: int,
        n_features: int | None,
        dtype: np.dtype,
    ) -> None:
        self.name, self.dtype, self.first_column = name, dtype, first_column
        width = max(found.highest - first_column + 1, 1)
        if n_features is not None and n_features < width:
            raise DataError(
                f"{name} has entries in column {found.highest} (counted from {first_column}), which needs "
                f"{width} features, not {n_features}; give n_features={width} or more"
            )
        self.nnz = found.entries
        self.shape = (found.rows, n_features or width)
        self._file = file
        self._parts: deque[Parsed] = deque()
        self._blocks: Generator[Block] | None = None
        self._row = self._lines = self._unsorted = self._added = 0
        self.read_labels: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def notes(self) -> dict[str, int]:
        """What had to be put right."""
        found = {"rows_sorted": self._unsorted, "entries_added": self._added}
        return {name: count for name, count in found.items() if count}

    def read(self, rows: int) -> csr_array:
        """The next rows, in canonical form; their labels lie in `read_labels` until the next call."""
        parts = list(self._take(rows))
        data, columns, counts, labels, label_counts = (
            np.concatenate([part.columns()[k] for part in parts]) for k in range(5)
        )
        if self.first_column:
            columns = columns - self.first_column
        self.read_labels = labels, label_counts
        with np.errstate(over="ignore"):  # infinity is refused, with its place
            values = data.astype(self.dtype, copy=False)
        pointers = np.concatenate([[0], np.cumsum(counts)])
        found, unsorted, added = canonical(values, columns, pointers, self.shape[1], self._row, self.name)
        self._unsorted, self._added = self._unsorted + unsorted, self._added + added
        self._row += rows
        return found

    def _take(self, rows: int) -> Iterator[Parsed]:
        if self._blocks is None:
            self._blocks = parse_blocks(self._file, self.name, keep=True)
        while rows:
            if not self._parts:
                block = next(self._blocks, None)
                if block is None:
                    self._changed()
                else:
                    check_lines(*block, self._lines, self.name)
                    self._lines += block[1].lines
                    self._parts.append(block[1])
            part = self._parts.popleft()
            if len(part.counts) > rows:
                part, rest = part.split(rows)
                self._parts.appendleft(rest)
            rows -= len(part.counts)
            yield part

    def finish(self) -> None:
        if any(len(part.counts) for part in self._parts):
            self._changed()
        for _, parsed in self._blocks or ():
            if len(parsed.counts):
                self._changed()

    def close(self) -> None:
        if self._blocks is not None:
            self._blocks.close()

    def _changed(self) -> NoReturn:
        raise DataError(f"{self.name} changed while it was read; import it again when nothing writes to it")


class SvmLabels(RowReader):
    """The labels that belong to the rows read last."""

    def __init__(self, rows: SvmRows, dtype: np.dtype, shape: tuple[int, ...], entries: int | None) -> None:
        self.name, self.dtype, self.shape = f"labels of {rows.name}", dtype, shape
        self._rows, self.nnz, self.sparse = rows, entries, entries is not None

    def read(self, rows: int) -> DenseOrCsr:
        assert self._rows.read_labels is not None
        labels, counts = self._rows.read_labels
        if len(self.shape) == 1:
            return labels.astype(self.dtype, copy=False)
        pointers = np.concatenate([[0], np.cumsum(counts)])
        ones = np.ones(len(labels), self.dtype)
        found, _, added = canonical(ones, labels.astype(np.int64), pointers, self.shape[1], 0, self.name)
        # A label given twice is given once.
        return (
            csr_of(np.ones(found.nnz, self.dtype), found.indices, found.indptr, self.shape[1])
            if added
            else found
        )
