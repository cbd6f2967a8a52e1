"""What all importers share: rows read in order from a file, and their way into a dataset."""

from __future__ import annotations

import contextlib
import os
import uuid
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any, NamedTuple, NoReturn

import dask.system
import numpy as np

from scalelatent.data.csr import check_values, stack
from scalelatent.data.dataset import Dataset
from scalelatent.data.schema import (
    as_classes,
    as_labels,
    check_finite,
    check_rows_dtype,
    n_features,
)
from scalelatent.data.write.batches import MAX_THREADS, RowBatch, write_shards
from scalelatent.data.write.batches import Progress as Progress
from scalelatent.data.write.create import check_room, check_rows_fit, removed_on_failure
from scalelatent.data.write.shuffle import shuffle_dataset
from scalelatent.data.write.writer import DatasetWriter, create_dataset
from scalelatent.errors import DataError
from scalelatent.storage.disk import Location, file_name, locate
from scalelatent.storage.write_checks import scratch

if TYPE_CHECKING:
    from typing import Unpack

    from scalelatent.data.schema import LayoutOptions, OutputOptions
    from scalelatent.kernels.arrays import DenseOrCsr

_READ_BYTES = 1 << 20
_MAX_ROW_BYTES = 1 << 30
_WAITING_BYTES = 64 << 20
LABEL_ROWS = 65_536  # labels looked through at a time


class RowReader:
    """What an importer reads from: an array (n, ...) handed out in order."""

    name: str
    """What to call it in messages."""
    shape: tuple[int, ...]
    """(n_rows, *feature_shape), as promised."""
    dtype: np.dtype
    sparse: bool = False
    """Whether `read` gives scipy CSR."""
    nnz: int | None = None
    """Entries of CSR rows, where they are known before."""

    @property
    def n_rows(self) -> int:
        return self.shape[0]

    @property
    def notes(self) -> dict[str, Any]:
        """What was only learned by reading, for the provenance."""
        return {}

    def read(self, rows: int) -> DenseOrCsr:
        """The next rows, in native byte order; fewer only at the end of a source that leaves some out."""
        raise NotImplementedError

    def finish(self) -> None:
        """Refuse what follows the last row."""

    def close(self) -> None:
        """Let go of files and threads; those that others opened stay open."""


class Beside(RowReader):
    """What belongs to the rows that another reader has read last: labels, weights, topics of another file."""

    def __init__(
        self,
        rows: RowReader,
        dtype: np.dtype,
        taken: Callable[[], DenseOrCsr],
        width: int | None = None,
        name: str | None = None,
    ) -> None:
        self.name, self.dtype, self._taken = name or rows.name, dtype, taken
        self.shape = rows.shape[:1] if width is None else (rows.n_rows, width)
        self.sparse = width is not None

    def read(self, rows: int) -> DenseOrCsr:
        found = self._taken()
        assert found.shape[0] == rows
        return found


class Chain(RowReader):
    """Rows of several readers of one width and type, one after another."""

    def __init__(self, readers: Sequence[RowReader]) -> None:
        self._readers = readers
        self._at = self._done = 0
        self.name = " and ".join(reader.name for reader in readers)
        self.dtype, self.sparse = readers[0].dtype, readers[0].sparse
        self.shape = (sum(reader.n_rows for reader in readers), *readers[0].shape[1:])
        self.nnz = sum(reader.nnz or 0 for reader in readers) if self.sparse else None

    def read(self, rows: int) -> DenseOrCsr:
        parts = []
        while rows:
            reader = self._readers[self._at]
            parts.append(self._take(reader, min(rows, reader.n_rows - self._done)))
            count = parts[-1].shape[0]
            rows, self._done = rows - count, self._done + count
            if self._done == reader.n_rows and self._at + 1 < len(self._readers):
                self._at, self._done = self._at + 1, 0
        if self.sparse:
            return stack(parts)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _take(self, reader: RowReader, rows: int) -> DenseOrCsr:
        return reader.read(rows)

    def finish(self) -> None:
        for reader in self._readers:
            reader.finish()

    def close(self) -> None:
        for reader in self._readers:
            reader.close()


class Streams(NamedTuple):
    """What a dataset is written from."""

    x: RowReader
    y: RowReader | None
    weight: RowReader | None


class RowStream(RowReader):
    """Rows of one dtype and shape, read in order from an open file; memory is bounded by one `read`."""

    def __init__(
        self, file: IO[bytes], name: str, shape: tuple[int, ...], dtype: np.dtype, offset: int
    ) -> None:
        self.name, self.shape, self.dtype = name, shape, dtype
        self._file = file
        self._start = self._offset = offset
        self._row_bytes = n_features(shape[1:]) * dtype.itemsize
        if shape[0] < 1 or self._row_bytes < 1:
            raise DataError(f"{name}: its header says shape {shape}, which is empty: nothing to import")
        if self._row_bytes > _MAX_ROW_BYTES:
            raise DataError(
                f"{name}: its header says shape {shape}, that is {self._row_bytes:,} bytes a row; the "
                f"header is damaged, or each row has to be cut into several (limit {_MAX_ROW_BYTES:,})"
            )

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole file, header included."""
        return self._start + self.n_rows * self._row_bytes

    def check_size(self, found: int) -> None:
        """Compare the size of the file with what its header promises, before anything is written."""
        if found < self.total_bytes:
            self._truncated(found)
        if found > self.total_bytes:
            self._trailing(found - self.total_bytes)

    def read(self, rows: int) -> np.ndarray:
        raw = np.empty(rows * self._row_bytes, np.uint8)
        filled = 0
        while filled < len(raw):
            part = self._bytes(min(_READ_BYTES, len(raw) - filled))
            if not part:
                self._truncated(self._offset)
            raw[filled : filled + len(part)] = np.frombuffer(part, np.uint8)
            filled += len(part)
        values = raw.view(self.dtype).reshape(rows, *self.shape[1:])
        return values.astype(self.dtype.newbyteorder("="), copy=False)

    def finish(self) -> None:
        """Check that the file ends after its last row; a compressed file then checks its checksum, too."""
        rest = self._bytes(_READ_BYTES)
        if rest:
            self._trailing(len(rest))

    def close(self) -> None:
        self._file.close()

    def _bytes(self, count: int) -> bytes:
        try:
            part = self._file.read(count)
        except EOFError:
            self._truncated(self._offset)
        except (OSError, zlib.error, zipfile.BadZipFile) as error:
            raise DataError(
                f"{self.name} is damaged after byte {self._offset:,} of its content: {error}; "
                f"download or copy it again"
            ) from error
        self._offset += len(part)
        return part

    def _truncated(self, found: int) -> NoReturn:
        raise DataError(
            f"{self.name} is truncated: shape {self.shape} of {self.dtype} needs {self.total_bytes:,} bytes "
            f"with its header, but it ends at byte {found:,} (in row "
            f"{max(0, found - self._start) // self._row_bytes:,}); download or copy it again"
        )

    def _trailing(self, count: int) -> None:
        raise DataError(
            f"{self.name} goes on after its last row: its header promises shape {self.shape} and an end at "
            f"byte {self.total_bytes:,}, but at least {count:,} bytes follow; the header is wrong, or it is "
            "another kind of file"
        )


class ArrayStream(RowReader):
    """Rows of an array in memory."""

    def __init__(self, values: np.ndarray, name: str) -> None:
        self.name, self.shape, self.dtype = name, values.shape, values.dtype
        if 0 in values.shape:
            raise DataError(f"{name} has shape {values.shape}, which is empty: nothing to import")
        self._values = values
        self._next = 0

    def read(self, rows: int) -> np.ndarray:
        part = np.ascontiguousarray(self._values[self._next : self._next + rows])
        self._next += len(part)
        return part if part.dtype.isnative else part.astype(part.dtype.newbyteorder("="))

    def close(self) -> None:
        self._values = self._values[:0]


def import_rows(
    open_x: Callable[[], RowReader],
    open_y: Callable[[], RowReader] | None,
    url: str | os.PathLike[str],
    **options: Any,
) -> Dataset:
    """Check the arrays, look through string labels for their classes, then `write_rows`."""
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
                f"{y.name} has shape {y.shape}; labels have to be one per row, shape (n,), or targets of "
                "shape (n, v)"
            )
        if len(y.shape) == 2 and y.shape[1] > 1:
            check_rows_dtype(y.dtype, y.name)
        if y.dtype.kind not in "US":
            return write_rows(url, x, y, **options)
        classes = string_classes(y)
        again = open_y()
        opened.callback(again.close)
        return write_rows(url, x, again, classes=classes, **options)


def string_classes(y: RowReader) -> np.ndarray:
    """The distinct labels of a stream, read to its end."""
    found: set[str] = set()
    for a in range(0, y.n_rows, LABEL_ROWS):
        part = y.read(min(LABEL_ROWS, y.n_rows - a)).reshape(-1)
        found.update(as_labels(part, y.name, a).tolist())
        as_classes(np.array(sorted(found)), y.name)
    return np.array(sorted(found))


def write_rows(
    url: str | os.PathLike[str],
    x: RowReader,
    y: RowReader | None,
    *,
    weight: RowReader | None = None,
    importer: str,
    sources: list[str | os.PathLike[str]],
    classes: np.ndarray | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    options: dict[str, Any] | None = None,
    shuffle: int | None = None,
    **layout: Unpack[LayoutOptions],
) -> Dataset:
    """Write the rows of a stream `x`, labels of a stream `y` and weights, or None, to a dataset."""
    if y is not None and y.n_rows != x.n_rows:
        raise DataError(
            f"{x.name} holds {x.n_rows} rows, but {y.name} holds {y.n_rows} labels; give the two files (or "
            f"arrays) that belong together"
        )
    # Names only: the folders of the machine that imported do not belong in a dataset.
    provenance = {"importer": importer, "source": [file_name(s) for s in sources], **(options or {})}
    columns: dict[str, Any] = {
        "dtype": x.dtype.newbyteorder("="),
        "nnz": x.nnz,
        "provenance": provenance,
        "weighted": weight is not None,
        **_y_options(y, classes),
    }
    streams = Streams(x, y, weight)
    if shuffle is None:
        return _write(locate(url), streams, columns | layout, overwrite, progress)
    return _write_shuffled(locate(url), shuffle, streams, columns, layout, overwrite, progress)


def _y_options(y: RowReader | None, classes: np.ndarray | None) -> OutputOptions:
    """Arguments of `create_dataset` for what a stream `y` holds."""
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
    streams: Streams,
    columns: dict[str, Any],
    layout: LayoutOptions,
    overwrite: bool,
    progress: Progress | None,
) -> Dataset:
    """Write the rows in order to a dataset beside the wanted one, then shuffle them into place."""

    def half(first: int) -> Progress | None:
        """Each of the two steps is half of the way."""
        return None if progress is None else lambda done, n: progress((first * n + done) // 2, n)

    # Now, not after the rows were read: what they are shuffled from lies beside them until the end.
    check_room(location, overwrite, resumable=False)
    packed = {"compressor": layout["compressor"]} if "compressor" in layout else {}
    x = streams.x
    check_rows_fit(location, x.n_rows, x.shape[1:], x.dtype, columns["nnz"], copies=2, **packed)
    aside = locate(f"{location.url}.unshuffled-{uuid.uuid4().hex[:8]}")
    with scratch(aside):
        ordered = _write(aside, streams, columns | layout, False, half(0))
        return shuffle_dataset(
            ordered, location.url, seed=seed, overwrite=overwrite, progress=half(1), **layout
        )


def _write(
    location: Location,
    streams: Streams,
    arguments: dict[str, Any],
    overwrite: bool,
    progress: Progress | None,
) -> Dataset:
    """Write the rows to a dataset; on any failure, Ctrl-C as well, nothing stays."""

    check_room(location, overwrite, resumable=False)
    x = streams.x
    writer = create_dataset(location.url, x.n_rows, x.shape[1:], overwrite=overwrite, **arguments)
    with removed_on_failure(writer):
        _copy(writer, streams, progress)
        for stream in streams:
            if stream is not None:
                stream.finish()
                writer.note(stream.notes)
        return writer.finalize()


def _row_bytes(x: RowReader) -> int:
    """Bytes of a row, of a CSR row on the average."""
    if x.nnz is None:
        return max(1, n_features(x.shape[1:]) * x.dtype.itemsize)
    return max(1, x.nnz * (x.dtype.itemsize + 4) // x.n_rows)


def _copy(writer: DatasetWriter, streams: Streams, progress: Progress | None) -> None:
    """Read shards in this thread while others hash, pack and write those before; a few are in memory."""
    shard_bytes = writer.shard_rows * _row_bytes(streams.x)

    threads = min(dask.system.cpu_count(), MAX_THREADS, max(1, _WAITING_BYTES // shard_bytes))
    # One shard more than cores waits to be written, so that no core waits for one to be read.
    write_shards(writer, _shards(writer, streams), progress, threads=threads + 1)


def _shards(writer: DatasetWriter, streams: Streams) -> Iterator[RowBatch]:
    """The rows of each shard; fewer than promised where the source left some out."""
    i = 0
    while i < writer.n_shards:
        a, b = writer.shard_bounds(i)
        batch = [_next_rows(streams, a, b, writer.attrs.y_kind)]
        if len(batch[0]) < b - a:
            writer.shrink(a + len(batch[0]))
            if not len(batch[0]):
                return
        yield batch.pop()  # and hold it no longer: the thread that writes it does, as long as it is needed
        i += 1


def _next_rows(streams: Streams, start: int, stop: int, y_kind: str | None) -> RowBatch:
    """The next rows and as many labels, checked; `start` is the number of the first."""
    x, y, weight = streams
    rows = x.read(stop - start)
    (check_finite if isinstance(rows, np.ndarray) else check_values)(rows, start, x.name)
    n = rows.shape[0]
    if n == 0:
        return RowBatch(rows)
    labels = None if y is None else y.read(n)
    if labels is not None and y_kind == "labels":
        labels = labels.reshape(n)
    return RowBatch(rows, labels, None if weight is None else weight.read(n))
