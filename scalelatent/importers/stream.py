"""Row readers, the common interface of all importers, and `write_rows`, which writes a dataset from them."""

from __future__ import annotations

import contextlib
import uuid
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any, NamedTuple, NoReturn

import dask.system
import numpy as np

from scalelatent.data.csr import canonical_csr, check_finite
from scalelatent.data.dataset import Dataset
from scalelatent.data.schema import (
    LayoutOptions,
    as_classes,
    as_labels,
    check_rows_dtype,
    n_features,
)
from scalelatent.data.write.batches import MAX_THREADS, Progress, RowBatch, half_progress, write_shards
from scalelatent.data.write.create import check_room, check_rows_fit, remove_on_failure
from scalelatent.data.write.shuffle import shuffle_dataset
from scalelatent.data.write.writer import DatasetWriter, create_dataset
from scalelatent.errors import DataError, warn_user
from scalelatent.storage.disk import Location, file_name, locate
from scalelatent.storage.write_checks import scratch

if TYPE_CHECKING:
    from typing import Unpack

    from scipy.sparse import csr_array

    from scalelatent.data.schema import OutputOptions
    from scalelatent.kernels.arrays import DenseOrCsr

    from .files import PathOrUrl

_READ_BYTES = 1 << 20
_MAX_ROW_BYTES = 1 << 30
# Maximum bytes of the shards that wait in memory to be written.
_WAITING_BYTES = 64 << 20
# Number of labels that are read at a time to find the classes.
LABEL_ROWS = 65_536


class ImportOptions(LayoutOptions, total=False):
    """Keyword arguments that all importers share; `import_npy` documents them."""

    overwrite: bool
    progress: Progress | None
    shuffle: int | None


class RowReader:
    """Reader of the rows (n, ...) of a file or an array; `read` returns the next rows, in order."""

    name: str
    """Name of the source in messages."""
    shape: tuple[int, ...]
    """(n_rows, *feature_shape) as the source declares it."""
    dtype: np.dtype
    sparse: bool = False
    """True if `read` returns scipy CSR arrays."""
    nnz: int | None = None
    """Number of stored entries of CSR rows, if known before they are read."""

    @property
    def n_rows(self) -> int:
        return self.shape[0]

    @property
    def notes(self) -> dict[str, Any]:
        """Provenance that is known only after all rows were read."""
        return {}

    def read(self, rows: int) -> DenseOrCsr:
        """Return the next rows in native byte order; fewer only at the end of a source that skips rows."""
        raise NotImplementedError

    def finish(self) -> None:
        """Raise `DataError` if the source continues after its last row."""

    def close(self) -> None:
        """Close the files, and end the threads, that this reader uses."""


class CsrReader(RowReader):
    """Reader of CSR rows that sorts columns, adds entries of the same column, and counts both repairs."""

    sparse = True
    _next_row = _rows_sorted = _entries_added = 0

    @property
    def notes(self) -> dict[str, int]:
        counts = {"rows_sorted": self._rows_sorted, "entries_added": self._entries_added}
        return {name: count for name, count in counts.items() if count}

    def canonical_rows(self, data: np.ndarray, columns: np.ndarray, pointers: np.ndarray) -> csr_array:
        """Return the next rows in canonical form: columns sorted, entries of the same column added."""
        rows, n_sorted, n_added = canonical_csr(
            data, columns, pointers, self.shape[1], self._next_row, self.name
        )
        self._next_row += rows.shape[0]
        self._rows_sorted += n_sorted
        self._entries_added += n_added
        return rows


class PairedReader(RowReader):
    """Reader of the labels, weights or topics of the rows that another reader read last."""

    def __init__(
        self,
        rows: RowReader,
        dtype: np.dtype,
        read_last: Callable[[], DenseOrCsr],
        width: int | None = None,
        name: str | None = None,
    ) -> None:
        self.name, self.dtype, self._read_last = name or rows.name, dtype, read_last
        self.shape = rows.shape[:1] if width is None else (rows.n_rows, width)
        self.sparse = width is not None

    def read(self, rows: int) -> DenseOrCsr:
        values = self._read_last()
        assert values.shape[0] == rows
        return values


class BinaryReader(RowReader):
    """Reader of an open binary file that holds rows of one dtype and shape, one after the other."""

    def __init__(
        self,
        file: IO[bytes],
        name: str,
        shape: tuple[int, ...],
        dtype: np.dtype,
        offset: int,
        *,
        allow_empty: bool = False,
    ) -> None:
        self.name, self.shape, self.dtype = name, shape, dtype
        self._file = file
        self._start = self._offset = offset
        self._row_bytes = n_features(shape[1:]) * dtype.itemsize
        if shape[0] < (0 if allow_empty else 1) or self._row_bytes < 1:
            raise DataError(f"{name}: its header declares shape {shape}, which is empty: nothing to import")
        if self._row_bytes > _MAX_ROW_BYTES:
            raise DataError(
                f"{name}: its header declares shape {shape}, that is {self._row_bytes:,} bytes a row; the "
                f"header is damaged, or each row must be cut into several (limit {_MAX_ROW_BYTES:,})"
            )

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole file, including its header."""
        return self._start + self.n_rows * self._row_bytes

    def check_size(self, found: int) -> None:
        """Raise `DataError` if the bytes of the file differ from those that its header declares."""
        if found < self.total_bytes:
            self._refuse_truncated(found)
        if found > self.total_bytes:
            self._refuse_extra_bytes(found - self.total_bytes)

    def read(self, rows: int) -> np.ndarray:
        raw = np.empty(rows * self._row_bytes, np.uint8)
        filled = 0
        while filled < len(raw):
            part = self._read_bytes(min(_READ_BYTES, len(raw) - filled))
            if not part:
                self._refuse_truncated(self._offset)
            raw[filled : filled + len(part)] = np.frombuffer(part, np.uint8)
            filled += len(part)
        values = raw.view(self.dtype).reshape(rows, *self.shape[1:])
        return values.astype(self.dtype.newbyteorder("="), copy=False)

    def finish(self) -> None:
        """Raise `DataError` if bytes follow the last row; at the end a packed file checks its checksum."""
        rest = self._read_bytes(_READ_BYTES)
        if rest:
            self._refuse_extra_bytes(len(rest))

    def close(self) -> None:
        self._file.close()

    def _read_bytes(self, count: int) -> bytes:
        try:
            part = self._file.read(count)
        except EOFError:
            self._refuse_truncated(self._offset)
        except (OSError, zlib.error, zipfile.BadZipFile) as error:
            raise DataError(
                f"{self.name} is damaged after byte {self._offset:,} of its content: {error}; "
                f"download or copy it again"
            ) from error
        self._offset += len(part)
        return part

    def _refuse_truncated(self, found: int) -> NoReturn:
        raise DataError(
            f"{self.name} is truncated: shape {self.shape} of {self.dtype} needs {self.total_bytes:,} bytes "
            f"with its header, but it ends at byte {found:,} (in row "
            f"{max(0, found - self._start) // self._row_bytes:,}); download or copy it again"
        )

    def _refuse_extra_bytes(self, count: int) -> None:
        raise DataError(
            f"{self.name} continues after its last row: its header declares shape {self.shape} and an end at "
            f"byte {self.total_bytes:,}, but at least {count:,} bytes follow; the header is wrong, or it is "
            "another kind of file"
        )


class ArrayReader(RowReader):
    """Reader of an array in memory, or of any object with shape and dtype that slices like an array."""

    def __init__(self, values: np.ndarray, name: str) -> None:
        self.name, self.shape, self.dtype = name, values.shape, values.dtype
        if 0 in values.shape:
            raise DataError(f"{name} has shape {values.shape}, which is empty: nothing to import")
        self._values = values
        self._next_row = 0

    def read(self, rows: int) -> np.ndarray:
        part = np.ascontiguousarray(self._values[self._next_row : self._next_row + rows])
        self._next_row += len(part)
        return part if part.dtype.isnative else part.astype(part.dtype.newbyteorder("="))

    def close(self) -> None:
        self._values = self._values[:0]


def import_rows(
    open_x: Callable[[], RowReader],
    open_y: Callable[[], RowReader] | None,
    url: PathOrUrl,
    **options: Any,
) -> Dataset:
    """Write rows and labels like `write_rows`, after a check of their shapes and dtypes.

    Labels that are strings are read twice: first to find the classes, then to write them.
    """
    with contextlib.ExitStack() as opened:
        x = open_x()
        opened.callback(x.close)
        check_rows_dtype(x.dtype, x.name)
        if len(x.shape) < 2:
            raise DataError(f"{x.name} has shape {x.shape}; rows x features are needed: at least two axes")
        if open_y is None:
            return write_rows(url, x, None, **options)
        y = open_y()
        opened.callback(y.close)
        if len(y.shape) > 2:
            raise DataError(
                f"{y.name} has shape {y.shape}; labels must be one per row, shape (n,), or targets of shape "
                "(n, v)"
            )
        if len(y.shape) == 2 and y.shape[1] > 1:
            check_rows_dtype(y.dtype, y.name)
        if y.dtype.kind in "US":
            options["classes"] = _find_classes(y)
            y = open_y()
        return write_rows(url, x, y, **options)


def _find_classes(y: RowReader) -> np.ndarray:
    """Return the sorted distinct labels of a reader of strings, after reading it to its end."""
    found: set[str] = set()
    for a in range(0, y.n_rows, LABEL_ROWS):
        part = y.read(min(LABEL_ROWS, y.n_rows - a)).reshape(-1)
        found.update(as_labels(part, y.name, a).tolist())
        as_classes(np.array(sorted(found)), y.name)
    return np.array(sorted(found))


class _Readers(NamedTuple):
    """Readers of the three columns of a dataset."""

    x: RowReader
    y: RowReader | None
    weight: RowReader | None


def write_rows(
    url: PathOrUrl,
    x: RowReader,
    y: RowReader | None,
    *,
    weight: RowReader | None = None,
    importer: str,
    sources: Sequence[PathOrUrl],
    classes: np.ndarray | None = None,
    provenance: dict[str, Any] | None = None,
    feature_names: Sequence[str] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    shuffle: int | None = None,
    **layout: Unpack[LayoutOptions],
) -> Dataset:
    """Write rows, labels and weights from their readers to a dataset, then close the readers.

    `importer`, the names of the files in `sources`, and the values in `provenance` become the provenance of
    the dataset. If anything fails, Ctrl-C included, no dataset stays behind.
    """
    readers = _Readers(x, y, weight)
    with contextlib.ExitStack() as opened:
        for reader in readers:
            if reader is not None:
                opened.callback(reader.close)
        if y is not None and y.n_rows != x.n_rows:
            raise DataError(
                f"{x.name} holds {x.n_rows} rows, but {y.name} holds {y.n_rows} labels; give the two files "
                "(or arrays) that belong together"
            )
        # The provenance keeps file names without the folders, because datasets move to other machines.
        names = [file_name(source) for source in sources]
        columns: dict[str, Any] = {
            "dtype": x.dtype.newbyteorder("="),
            "nnz": x.nnz,
            "provenance": {"importer": importer, "source": names, **(provenance or {})},
            "weighted": weight is not None,
            "feature_names": feature_names,
            **_y_options(y, classes),
        }
        place = locate(url)
        if shuffle is None:
            written = _write(place, readers, columns | layout, overwrite, progress)
        else:
            written = _write_shuffled(place, shuffle, readers, columns, layout, overwrite, progress)
    _warn_of_fractions(written)
    return written


def _warn_of_fractions(ds: Dataset) -> None:
    """Warn if labels are numbers with a fraction (such as 0.5), which classifiers refuse."""
    found = ds.classes
    if found is None or found.dtype.kind != "f" or not (fractions := found[found % 1 != 0]).size:
        return
    warn_user(
        f"{ds.url}: the labels are {len(found):,} different numbers, some with a fraction, such as "
        f"{fractions[0]}. Classifiers refuse such labels. If these numbers are not classes, import the rows "
        "again with another column of labels (label=, --label), or without labels"
    )


def _y_options(y: RowReader | None, classes: np.ndarray | None) -> OutputOptions:
    """Return the arguments of `create_dataset` for the labels or targets of a reader."""
    if y is None:
        return {}
    dtype = y.dtype.newbyteorder("=")
    if y.sparse:
        return {"y_dtype": dtype, "y_kind": "multilabel", "n_targets": y.shape[1]}
    if len(y.shape) == 2 and y.shape[1] > 1:
        return {"y_dtype": dtype, "y_kind": "targets", "n_targets": y.shape[1]}
    return {"y_dtype": None if dtype.kind in "US" else dtype, "classes": classes}


def _write_shuffled(
    location: Location,
    seed: int,
    readers: _Readers,
    columns: dict[str, Any],
    layout: LayoutOptions,
    overwrite: bool,
    progress: Progress | None,
) -> Dataset:
    """Write the rows in order to a temporary dataset next to `location`, then shuffle them into place."""
    # Check the free space before reading: the temporary dataset takes as much space as the shuffled one.
    check_room(location, overwrite, resumable=False)
    compression = {"compressor": layout["compressor"]} if "compressor" in layout else {}
    x = readers.x
    check_rows_fit(location, x.n_rows, x.shape[1:], x.dtype, columns["nnz"], copies=2, **compression)
    temporary = locate(f"{location.url}.unshuffled-{uuid.uuid4().hex[:8]}")
    with scratch(temporary):
        first, second = half_progress(progress, 0), half_progress(progress, 1)
        ordered = _write(temporary, readers, columns | layout, False, first)
        return shuffle_dataset(
            ordered, location.url, seed=seed, overwrite=overwrite, progress=second, **layout
        )


def _write(
    location: Location,
    readers: _Readers,
    arguments: dict[str, Any],
    overwrite: bool,
    progress: Progress | None,
) -> Dataset:
    """Write the rows to a dataset; remove it if anything fails, Ctrl-C included."""
    check_room(location, overwrite, resumable=False)
    x = readers.x
    writer = create_dataset(location.url, x.n_rows, x.shape[1:], overwrite=overwrite, **arguments)
    with remove_on_failure(writer):
        _copy(writer, readers, progress)
        for reader in readers:
            if reader is not None:
                reader.finish()
                writer.note(reader.notes)
        return writer.finalize()


def _row_bytes(x: RowReader) -> int:
    """Return the size of a row in bytes, at least 1; for CSR rows the mean size."""
    if x.nnz is None:
        return max(1, n_features(x.shape[1:]) * x.dtype.itemsize)
    return max(1, x.nnz * (x.dtype.itemsize + 4) // x.n_rows)


def _copy(writer: DatasetWriter, readers: _Readers, progress: Progress | None) -> None:
    """Read the rows shard by shard, while other threads hash, compress and write the shards read before."""
    shard_bytes = writer.shard_rows * _row_bytes(readers.x)
    threads = min(dask.system.cpu_count(), MAX_THREADS, max(1, _WAITING_BYTES // shard_bytes))
    # One more shard than cores waits to be written, so that no core waits for the reader.
    write_shards(writer, _shards(writer, readers), progress, threads=threads + 1)


def _shards(writer: DatasetWriter, readers: _Readers) -> Iterator[RowBatch]:
    """Yield the rows of each shard; shrink the dataset if the source skipped rows."""
    shard = 0
    while shard < writer.n_shards:
        a, b = writer.shard_bounds(shard)
        batch = [_next_rows(readers, a, b, writer.attrs.y_kind)]
        if len(batch[0]) < b - a:
            writer.shrink(a + len(batch[0]))
            if not len(batch[0]):
                return
        yield batch.pop()  # keep no reference: the rows are freed as soon as their thread has written them
        shard += 1


def _next_rows(readers: _Readers, start: int, stop: int, y_kind: str | None) -> RowBatch:
    """Return the next rows with their labels and weights, checked; `start` is the number of the first."""
    x, y, weight = readers
    rows = x.read(stop - start)
    check_finite(rows, start, x.name)
    n = rows.shape[0]
    if n == 0:
        return RowBatch(rows)
    labels = None if y is None else y.read(n)
    if labels is not None and y_kind == "labels":
        labels = labels.reshape(n)
    return RowBatch(rows, labels, None if weight is None else weight.read(n))
