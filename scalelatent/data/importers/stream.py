"""What all importers share: rows read in order from a file, and their way into a dataset."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from scalelatent.data.schema import check_finite, n_features
from scalelatent.data.store import locate
from scalelatent.errors import DataError

if TYPE_CHECKING:
    from scalelatent.data.dataset import Dataset

__all__ = ["Progress", "RowStream", "open_file", "write_rows"]

Progress = Callable[[int, int], None]
"""Called with (rows done, rows in all)."""

_READ_BYTES = 1 << 20
_MAX_ROW_BYTES = 1 << 30


def open_file(path: str | os.PathLike[str], what: str) -> IO[bytes]:
    """Open a file to read, or say what is wrong with it."""
    try:
        return open(path, "rb")
    except FileNotFoundError as error:
        raise DataError(f"{what} {os.fspath(path)} does not exist; check the path") from error
    except OSError as error:
        raise DataError(
            f"{what} {os.fspath(path)} cannot be read: {error.strerror}; check the path"
        ) from error


class RowStream:
    """Rows of one dtype and shape, read in order from an open file; memory is bounded by one `read`.

    Parameters
    ----------
    file : file
        Positioned at the first row; `close` closes it.
    name : str
        What to call it in messages.
    shape : tuple of int
        (n_rows, *feature_shape).
    dtype : dtype
        Type of the numbers in the file, in the file's byte order.
    offset : int
        Bytes before the first row.
    """

    def __init__(
        self, file: IO[bytes], name: str, shape: tuple[int, ...], dtype: np.dtype[Any], offset: int
    ) -> None:
        self.name, self.shape, self.dtype = name, shape, dtype
        self._file = file
        self._start = self._offset = offset
        self._row_bytes = n_features(shape[1:]) * dtype.itemsize
        if shape[0] < 1 or self._row_bytes < 1:
            raise DataError(
                f"{name}: its header says shape {shape}, which holds no numbers; nothing to import"
            )
        if self._row_bytes > _MAX_ROW_BYTES:
            raise DataError(
                f"{name}: its header says shape {shape}, that is {self._row_bytes:,} bytes a row; the "
                f"header is damaged, or each row has to be cut into several (limit {_MAX_ROW_BYTES:,})"
            )

    @property
    def n_rows(self) -> int:
        """Number of rows the header promises."""
        return self.shape[0]

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
        """The next rows, in native byte order."""
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
        """Close the file."""
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

    def _truncated(self, found: int) -> Any:
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


def write_rows(
    url: str | os.PathLike[str],
    x: Any,
    y: Any,
    *,
    importer: str,
    sources: list[str | os.PathLike[str]],
    classes: np.ndarray | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    options: dict[str, Any] | None = None,
    **layout: Any,
) -> Dataset:
    """Write the rows of a stream `x`, and labels of a stream `y` or None, to a dataset.

    A stream has `name`, `shape`, `n_rows`, `dtype`, `read(rows)`, `finish()` and, where its rows are CSR,
    `nnz`. A stream `y` of one axis, or of one column, holds labels; a wider one targets, a CSR one
    multi-labels. What a stream says in `notes` at its end is kept in the provenance. Whatever goes wrong on
    the way, no dataset is left at `url`.
    """
    from scalelatent.data.create import create_dataset
    from scalelatent.data.csr import check_values

    if y is not None and y.n_rows != x.n_rows:
        raise DataError(
            f"{x.name} holds {x.n_rows} rows, but {y.name} holds {y.n_rows} labels; give the two files (or "
            f"arrays) that belong together"
        )
    # Names only: the folders of the machine that imported are nobody's business later on.
    provenance = {"importer": importer, "source": [Path(s).name for s in sources], **(options or {})}
    writer = create_dataset(
        url,
        x.n_rows,
        x.shape[1:],
        x.dtype.newbyteorder("="),
        **_y_options(y, classes),
        nnz=getattr(x, "nnz", None),
        provenance=provenance,
        overwrite=overwrite,
        **layout,
    )
    try:
        for i in range(writer.n_shards):
            a, b = writer.shard_bounds(i)
            rows = x.read(b - a)
            (check_finite if isinstance(rows, np.ndarray) else check_values)(rows, a, x.name)
            labels = None if y is None else y.read(b - a)
            if writer.attrs.y_kind == "labels" and labels is not None:
                labels = labels.reshape(b - a)
            writer.write_shard(i, rows, labels)
            del rows, labels  # before the next shard is read: one shard in memory, not two
            if progress is not None:
                progress(b, x.n_rows)
        for stream in (x, y):
            if stream is not None:
                stream.finish()
                writer.note(getattr(stream, "notes", {}))
        return writer.finalize()
    except BaseException:
        locate(url).clear()
        raise


def _y_options(y: Any, classes: np.ndarray | None) -> dict[str, Any]:
    """Arguments of `create_dataset` for what a stream `y` holds."""
    if y is None:
        return {}
    dtype = y.dtype.newbyteorder("=")
    if hasattr(y, "nnz"):
        return {"y_dtype": dtype, "y_kind": "multilabel", "n_targets": y.shape[1]}
    if len(y.shape) == 2 and y.shape[1] > 1:
        return {"y_dtype": dtype, "y_kind": "targets", "n_targets": y.shape[1]}
    return {"y_dtype": dtype if classes is None else None, "classes": classes}
