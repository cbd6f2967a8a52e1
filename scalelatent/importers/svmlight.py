"""Import svmlight (libsvm) text, plain or gzip, in two passes over the file.

The first pass parses all lines and counts rows, entries, columns and kinds of labels, so that an unusable
file is refused before anything is written. The second pass parses the numbers again and keeps them.

scikit-learn's `load_svmlight_file` in blocks of bytes is not used, because it is too slow: with two processes
it parsed 106 MB/s of text, and the kernel here 908 MB/s (528 MB/s for both passes together). It also refuses
columns that are not sorted, reads no blocks of gzip files, and does not name the malformed line.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import dask.system
import numpy as np

from scalelatent.data.csr import canonical
from scalelatent.data.dataset import Dataset
from scalelatent.data.layout import GROUP_BYTES, choose_csr_layout
from scalelatent.data.write.batches import Progress, map_in_order
from scalelatent.errors import DataError

from . import svmlight_kernels as kernels
from .files import PathOrUrl, open_maybe_gzip
from .stream import CsrReader, PairedReader, write_rows

if TYPE_CHECKING:
    from typing import Unpack

    import numpy.typing as npt
    from scipy.sparse import csr_array

    from .stream import ImportOptions

_BLOCK_BYTES = 1 << 20
_MAX_LINE_BYTES = 1 << 28
_MAX_THREADS = 4
_SUMS = ("rows", "entries", "labels", "lines", "commas", "bare", "fractions")

Counts = dict[str, Any]
"""Counters of `svmlight_kernels.STATE` by name, of one block or of a whole file."""


@dataclass
class ParsedBlock:
    """Counters and arrays of one block of text; the arrays are empty in the first pass."""

    text: np.ndarray
    counts: Counts
    arrays: tuple[np.ndarray, ...]
    """Values, columns, entries of each row, labels, labels of each row."""

    @property
    def n_rows(self) -> int:
        return len(self.arrays[2])

    def split(self, rows: int) -> tuple[ParsedBlock, ParsedBlock]:
        """Split into two blocks: the first rows and the remaining rows."""
        _, _, row_entries, _, row_labels = self.arrays
        entries, labels = int(row_entries[:rows].sum()), int(row_labels[:rows].sum())
        cuts = list(zip(self.arrays, (entries, entries, rows, labels, rows), strict=True))
        first, rest = tuple(array[:cut] for array, cut in cuts), tuple(array[cut:] for array, cut in cuts)
        return ParsedBlock(self.text, self.counts, first), ParsedBlock(self.text, self.counts, rest)


def count_lines(file: PathOrUrl, name: str, progress: Progress | None) -> Counts:
    """Return the counters of a whole file: the first pass.

    `progress` is called with (0, rows so far). The counter `density` of the result is the mean number of
    entries per row in the block where it is largest.
    """
    total = {**_name_counters(kernels.new_state()), "density": 0.0}
    for block in parse_blocks(file, name, keep=False):
        found = block.counts
        check_lines(block, total["lines"], name)
        total |= {key: total[key] + found[key] for key in _SUMS}
        total |= {key: min(total[key], found[key]) for key in ("lowest", "lowest_label")}
        total |= {key: max(total[key], found[key]) for key in ("highest", "highest_label")}
        total["density"] = max(total["density"], found["entries"] / max(found["rows"], 1))
        if progress is not None:
            progress(0, total["rows"])
    if not total["rows"]:
        raise DataError(f"{name} holds no rows: it is empty, or has blank lines and comments only")
    return total


def _name_counters(state: np.ndarray) -> Counts:
    return dict(zip(kernels.STATE, state.tolist(), strict=True))


def _parse(text: np.ndarray, keep: bool) -> ParsedBlock:
    """Parse whole lines; without `keep` the result has counters only."""
    state = kernels.new_state()
    size = len(text) if keep else 0
    # An entry takes at least 3 bytes and a space, a row at least a newline. Unused memory costs nothing.
    data, cols = np.empty(size // 4 + 1), np.empty(size // 4 + 1, np.int64)
    row_entries, labels = np.empty(size // 2 + 1, np.int64), np.empty(size // 2 + 1)
    row_labels, undecided = np.empty(size // 2 + 1, np.int64), np.empty(2 * (size // 20 + 1), np.int64)
    arrays = data, cols, row_entries, labels, row_labels
    kernels.parse_lines(text, len(text), keep, *arrays, undecided, state)
    counts = _name_counters(state)
    if not keep:
        return ParsedBlock(text, counts, tuple(array[:0] for array in arrays))
    for index, position in undecided[: 2 * counts["undecided"]].reshape(-1, 2).tolist():
        value = float(_token(text, position))
        if index >= 0:
            data[index] = value
        else:
            labels[-1 - index] = value
    entries, rows, n_labels = counts["entries"], counts["rows"], counts["labels"]
    # Copy the used parts, so that the long arrays are freed.
    used = zip(arrays, (entries, entries, rows, n_labels, rows), strict=True)
    return ParsedBlock(text, counts, tuple(array[:count].copy() for array, count in used))


def _token(text: np.ndarray, position: int) -> str:
    return bytes(text[position : position + 2000]).split(None, 1)[0].split(b"#")[0].split(b",")[0].decode()


def check_lines(block: ParsedBlock, lines_before: int, name: str) -> None:
    """Raise `DataError` for the malformed line that the kernel found, with its number in the file."""
    if not block.counts["error"]:
        return
    position = block.counts["position"]
    raw = bytes(block.text[position : position + 41])
    shown = (raw.split(None, 1) or [b""])[0].decode("utf-8", "backslashreplace")
    shown = shown if len(shown) <= 40 else shown[:40] + "…"
    problem = {
        kernels.BAD_LABEL: f"{shown!r} is not a label: a number, or numbers with commas between",
        kernels.BAD_COLUMN: f"{shown!r} is not an entry COLUMN:VALUE with a whole COLUMN of at least 0",
        kernels.NO_VALUE: f"entry {shown!r} has no value after the colon",
        kernels.BAD_VALUE: f"the value of entry {shown!r} is not a number",
    }.get(block.counts["error"], "it does not fit into the memory that was reserved; please report this")
    is_last = block.text[position:].tobytes().find(b"\n") < 0
    hint = " The file ends in this line: it may be cut short." if is_last else ""
    raise DataError(
        f"{name}, line {lines_before + block.counts['lines'] + 1}: {problem}.{hint} Correct the line, or use "
        "another importer"
    )


def _read_blocks(file: PathOrUrl, name: str) -> Iterator[np.ndarray]:
    """Yield the bytes of a file in blocks of whole lines."""
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
            cut = part.rfind(b"\n") + 1 if part else 0
            block, rest = (rest + part[:cut], part[cut:]) if cut else (b"", rest + part)
            if len(rest) > _MAX_LINE_BYTES:
                raise DataError(
                    f"{name} has a line of more than {_MAX_LINE_BYTES:,} bytes: not an svmlight file"
                )
            if not part:
                block = rest  # a last line without a newline
            if block:
                yield np.frombuffer(block, np.uint8)
            if not part:
                return


def parse_blocks(file: PathOrUrl, name: str, *, keep: bool) -> Generator[ParsedBlock]:
    """Yield the parsed blocks of a file, in order; threads parse a few blocks ahead."""

    threads = min(dask.system.cpu_count(), _MAX_THREADS)

    def parse(_: int, block: np.ndarray) -> ParsedBlock:
        return _parse(block, keep)

    return map_in_order(_read_blocks(file, name), parse, threads, "scalelatent-svmlight", ahead=threads)


def import_svmlight(
    file: PathOrUrl,
    url: PathOrUrl,
    *,
    zero_based: bool | str = "auto",
    n_features: int | None = None,
    multilabel: bool | None = None,
    dtype: npt.DTypeLike = np.float64,
    **options: Unpack[ImportOptions],
) -> Dataset:
    """Import svmlight text, `LABEL COLUMN:VALUE COLUMN:VALUE ... # comment`; memory is bounded.

    Several labels in a row, `3,17 COLUMN:VALUE ...`, become CSR multi-labels; rows without any label become a
    dataset without labels. Columns in any order are sorted and entries of the same place are added; the
    provenance counts both. 'qid:' and comments are skipped.

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
    multilabel : bool, optional
        Whether labels are lists; by default if a comma occurs.
    dtype : dtype
        Dtype of the values: float64 keeps all digits, float32 takes half the space.
    **options
        See `import_npy`; `progress` is called with (0, rows so far) while rows are counted, and `shard_rows`
        is the number of rows of a row group.

    Returns
    -------
    Dataset
        CSR rows; labels int64 if all are whole numbers, else float64.

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
    ...         _ = text.write("1 1:0.5 4:2\\n-1 2:1\\n")
    ...     ds = import_svmlight(f"{folder}/a.svm", "memory://doc-svmlight", overwrite=True)
    >>> ds.read_x(0, 2).toarray().tolist(), ds.read_y(0, 2).tolist()
    ([[0.5, 0.0, 0.0, 2.0], [0.0, 1.0, 0.0, 0.0]], [1, -1])
    """
    values_dtype = np.dtype(dtype)
    if values_dtype not in (np.float32, np.float64):
        raise DataError(f"dtype is {dtype!r}, but values of text are read as 'float64' or 'float32'")
    name = f"svmlight file {os.fspath(file)}"
    counts = count_lines(file, name, options.get("progress"))
    x = SvmlightReader(file, name, counts, _first_column(counts, zero_based, name), n_features, values_dtype)
    y = _open_labels(x, counts, multilabel)
    if options.get("shard_rows") is None:
        options["shard_rows"] = _choose_group_rows(counts, values_dtype)
    provenance = {"options": {"zero_based": x.first_column == 0, "dtype": str(x.dtype)}}
    return write_rows(url, x, y, importer="svmlight", sources=[file], provenance=provenance, **options)


def _first_column(counts: Counts, zero_based: bool | str, name: str) -> int:
    """Return the number of the first column: 0 or 1."""
    if zero_based not in (True, False, "auto"):
        raise DataError(f"zero_based is {zero_based!r}, but it must be True, False or 'auto'")
    if zero_based is False and counts["lowest"] == 0:
        raise DataError(
            f"{name} has entries in column 0, so its columns do not count from 1: use zero_based='auto'"
        )
    return int(counts["lowest"] > 0) if zero_based == "auto" else int(not zero_based)


def _choose_group_rows(counts: Counts, dtype: np.dtype) -> int:
    """Return the number of rows in a row group, from the mean row size; fewer if one block has long rows."""
    rows = choose_csr_layout(counts["rows"], counts["entries"], dtype).shard_rows
    while rows > 1 and rows * counts["density"] * (dtype.itemsize + 4) > 4 * GROUP_BYTES:
        rows //= 2
    return rows


def _open_labels(x: SvmlightReader, counts: Counts, multilabel: bool | None) -> PairedReader | None:
    """Return a reader of the labels, or None if no row has one."""
    name = f"labels of {x.name}"
    if counts["commas"] > 0 if multilabel is None else multilabel:
        if counts["fractions"] or (counts["labels"] and counts["lowest_label"] < 0):
            raise DataError(
                f"{x.name} has rows with several labels, which must be whole numbers of at least 0; correct "
                "them, or keep one label a row"
            )
        width = max(counts["highest_label"] + 1, 1)
        return PairedReader(
            x, np.dtype(np.uint8), lambda: _as_multilabels(*x.labels_read, width, name), width, name
        )
    if counts["commas"]:
        raise DataError(
            f"{x.name} has rows with several labels; import it with multilabel=True (--multilabel)"
        )
    if counts["bare"] == counts["rows"]:
        return None
    if counts["bare"]:
        raise DataError(
            f"{x.name}: {counts['bare']} of {counts['rows']} rows have no label; label or drop them, or, if "
            "rows may have none or several, import with multilabel=True (--multilabel)"
        )
    dtype = np.dtype(np.float64 if counts["fractions"] else np.int64)
    return PairedReader(x, dtype, lambda: x.labels_read[0].astype(dtype, copy=False), name=name)


def _as_multilabels(labels: np.ndarray, row_labels: np.ndarray, width: int, name: str) -> csr_array:
    """Return rows of ones, CSR uint8 (n, width), from labels and their number in each row."""
    pointers = np.concatenate([[0], np.cumsum(row_labels)])
    ones = np.ones(len(labels), np.uint8)
    rows, _, _ = canonical(ones, labels.astype(np.int64), pointers, width, 0, name)
    rows.data[:] = 1  # a label that occurs twice in a row counts once
    return rows


class SvmlightReader(CsrReader):
    """CSR rows of a file: the second pass.

    `labels_read` holds the labels of the rows of the last `read`, and their number in each row.
    """

    def __init__(
        self,
        file: PathOrUrl,
        name: str,
        counts: Counts,
        first_column: int,
        n_features: int | None,
        dtype: np.dtype,
    ) -> None:
        self.name, self.dtype, self.first_column = name, dtype, first_column
        highest = counts["highest"]
        width = max(highest - first_column + 1, 1)
        if n_features is not None and n_features < width:
            raise DataError(
                f"{name} has entries in column {highest} (counted from {first_column}), which needs {width} "
                f"features, not {n_features}; give n_features={width} or more"
            )
        self.nnz = counts["entries"]
        self.shape = (counts["rows"], n_features or width)
        self._blocks = parse_blocks(file, name, keep=True)
        self._rest = _parse(np.empty(0, np.uint8), keep=True)
        self._lines = 0
        self.labels_read: tuple[np.ndarray, np.ndarray]

    def read(self, rows: int) -> csr_array:
        blocks = [self._rest]
        while (missing := rows - sum(block.n_rows for block in blocks)) > 0:
            block = next(self._blocks, None) or self._refuse_changed()
            check_lines(block, self._lines, self.name)
            self._lines += block.counts["lines"]
            blocks.append(block)
        last = blocks.pop()
        last, self._rest = last.split(last.n_rows + missing)
        arrays = zip(*(block.arrays for block in [*blocks, last]), strict=True)
        data, columns, row_entries, labels, row_labels = (np.concatenate(parts) for parts in arrays)
        if self.first_column:
            columns = columns - self.first_column
        self.labels_read = labels, row_labels
        with np.errstate(over="ignore"):  # `write_rows` refuses infinity with its place
            values = data.astype(self.dtype, copy=False)
        return self.canonical_rows(values, columns, np.concatenate([[0], np.cumsum(row_entries)]))

    def finish(self) -> None:
        if self._rest.n_rows or any(block.n_rows for block in self._blocks):
            self._refuse_changed()

    def close(self) -> None:
        self._blocks.close()

    def _refuse_changed(self) -> NoReturn:
        raise DataError(f"{self.name} changed while it was read; import it again when nothing writes to it")
