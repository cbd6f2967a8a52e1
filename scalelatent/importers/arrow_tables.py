"""Import Parquet and CSV files as streams of record batches; memory is bounded by a few batches."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import dask.system
import numpy as np

from scalelatent.data.dataset import Dataset
from scalelatent.data.read.frames import FrameColumns, import_pyarrow
from scalelatent.data.schema import as_classes, n_features
from scalelatent.errors import DataError
from scalelatent.storage.disk import is_local, locate
from scalelatent.storage.objects import ObjectLocation

from .files import PathOrUrl, refuse_web
from .image_folder import ImageDecoder
from .stream import PairedReader, RowReader, write_rows

if TYPE_CHECKING:
    from typing import Unpack

    import pyarrow
    import pyarrow.csv
    import pyarrow.dataset
    import pyarrow.fs

    from .stream import ImportOptions

_BATCH_BYTES = 4 << 20
_MAX_BATCH_ROWS = 65_536
_CSV_BLOCK_BYTES = 2 << 20
# Number of batches that are decoded ahead; each holds _BATCH_BYTES.
_BATCHES_AHEAD = 2


def import_parquet(
    source: PathOrUrl,
    url: PathOrUrl,
    *,
    label: str | None = None,
    weight: str | None = None,
    features: Sequence[str] | None = None,
    size: tuple[int, int] | None = None,
    crop: bool = False,
    color: str | None = None,
    **options: Unpack[ImportOptions],
) -> Dataset:
    """Import columns of Parquet files; memory is bounded by a row group's columns and a few shards.

    Parquet is also the format in which the Hugging Face Hub stores datasets. Their images are decoded.

    Parameters
    ----------
    source : str or path
        A file, a folder of files (also those in its folders, by name), or a pattern with ``*``. Columns are
        found by their names, so files may have them in different orders. Files are on a disk or in an object
        store (``s3://``, ``gs://``). Needs pyarrow: ``pip install 'scalelatent[arrow]'``.
    url : str
        Dataset to write.
    label : str, optional
        Column of labels: numbers or strings, also dictionary-encoded.
    weight : str, optional
        Column of row weights, finite and >= 0.
    features : sequence of str, optional
        Columns of a row, in this order; by default all others. Numbers, or lists of numbers of a fixed size;
        a single column of nested lists or tensors gives rows of that shape. Rows have the common dtype of
        their columns. Or one column of images, as image files in the field ``bytes`` of a struct.
    size, crop, color
        Size and colour of images; see `import_images`.
    **options
        See `import_npy`.

    Returns
    -------
    Dataset
        Rows (n, features), labels and weights; `feature_names` holds the names of the feature columns. Or
        images (n, height, width) or (n, height, width, 3).

    Raises
    ------
    DataError
        A missing file or column, columns that are not numeric, a null, NaN or infinity (with row and column),
        an image that cannot be read or has another shape than the first, a damaged file, an output that
        exists. No dataset stays behind.

    Examples
    --------
    >>> import tempfile, pyarrow as pa, pyarrow.parquet
    >>> table = pa.table({"w": [1.0, 2.0, 3.0], "h": [4.0, 5.0, 6.0], "kind": ["a", "b", "a"]})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pyarrow.parquet.write_table(table, f"{folder}/t.parquet")
    ...     import_parquet(f"{folder}/*.parquet", "memory://doc-parquet", label="kind", overwrite=True)
    <Dataset 3 rows x (2,) float64, 2 classes, 'memory://doc-parquet'>
    """
    decoder = ImageDecoder(size, crop, color)
    return _import_table("parquet", source, url, label, weight, features, decoder, options)


def import_csv(
    source: PathOrUrl,
    url: PathOrUrl,
    *,
    label: str | None = None,
    weight: str | None = None,
    features: Sequence[str] | None = None,
    **options: Unpack[ImportOptions],
) -> Dataset:
    r"""Import columns of CSV files with a header line; files may be compressed by gzip, bzip2 or zstd.

    The text is read twice, first to count its rows. Features are read as float64; `convert_dataset` changes
    the dtype.

    Parameters
    ----------
    source, url, label, weight, features, **options
        See `import_parquet`.

    Returns
    -------
    Dataset
        Rows (n, features) float64, labels and weights.

    Raises
    ------
    DataError
        As `import_parquet`; also text in a column of numbers.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "t.csv")
    ...     _ = file.write_text("w,h,kind\n1,2,a\n3,4.5,b\n")
    ...     import_csv(file, "memory://doc-csv", label="kind", overwrite=True).read_x(0, 2).tolist()
    [[1.0, 2.0], [3.0, 4.5]]
    """
    return _import_table("csv", source, url, label, weight, features, None, options)


def _import_table(
    kind: str,
    source: PathOrUrl,
    url: PathOrUrl,
    label: str | None,
    weight: str | None,
    features: Sequence[str] | None,
    decoder: ImageDecoder | None,
    options: ImportOptions,
) -> Dataset:
    source_name = f"{kind} {os.fspath(source)}"
    import_pyarrow(f"importing {source_name}")
    with _arrow_errors(source_name):
        table = _open_table(kind, os.fspath(source), source_name)
        image = _image_column(table.schema, label, weight, features, source_name)
        chosen = features if image is None else []
        columns = FrameColumns(table.schema, source_name, label=label, weight=weight, features=chosen)
        if kind == "csv":
            table = _as_numbers(table, columns)
            columns = FrameColumns(table.schema, source_name, label=label, weight=weight, features=chosen)
        n_rows, classes = _count_rows(table, columns, kind)
        provenance: dict[str, Any] = {"label": columns.label, "weight": columns.weight, "features": features}
        if image is None or decoder is None:
            x = _TableReader(_scan(table, columns, kind, columns.all_names), columns, n_rows)
        else:
            x = _ImagesReader(table, columns, n_rows, image, decoder)
            provenance |= {"features": [image], **decoder.provenance()}
        label_type = columns.label_type
        return write_rows(
            url,
            x,
            None if label_type is None else PairedReader(x, label_type, lambda: x.labels),
            weight=None if weight is None else PairedReader(x, np.dtype(np.float64), lambda: x.weights),
            importer=kind,
            sources=[source],
            classes=classes,
            provenance=provenance,
            feature_names=columns.feature_names or None,
            **options,
        )


def _image_column(
    schema: pyarrow.Schema,
    label: str | None,
    weight: str | None,
    features: Sequence[str] | None,
    source_name: str,
) -> str | None:
    """Return the only feature column if it holds images, or None if no feature column holds images."""
    types = import_pyarrow(source_name).types
    names = [n for n in schema.names if n not in (label, weight)] if features is None else list(features)
    kinds = {field.name: field.type for field in schema}
    images = [
        name
        for name in names
        if name in kinds and types.is_struct(kinds[name]) and kinds[name].get_field_index("bytes") >= 0
    ]
    if images and len(names) > 1:
        raise DataError(
            f"{source_name}: column {images[0]!r} holds images, and there are others ({', '.join(names)}); "
            "name it alone with --features (features=), and the label with --label (label=)"
        )
    return images[0] if images else None


@contextlib.contextmanager
def _arrow_errors(source_name: str) -> Iterator[None]:
    """Turn errors of Arrow into a `DataError` that names the file."""
    pa = import_pyarrow(source_name)
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{source_name} does not exist: {error}; check the path") from error
    except pa.ArrowException as error:
        raise DataError(
            f"{source_name} cannot be read: {error}; check that it is a whole file of that format"
        ) from error


def _open_table(kind: str, source: str, source_name: str) -> pyarrow.dataset.Dataset:
    """Return the files as one table, in the order of their names; only their schemas are read."""
    import pyarrow.dataset

    refuse_web(source, f"{kind} file")
    filesystem: pyarrow.fs.FileSystem | None = None
    if is_local(source):
        path = str(locate(source).local_path(""))
        names = sorted(glob.glob(path)) if glob.has_magic(path) and not os.path.exists(path) else [path]
    else:
        location = locate(source)
        assert isinstance(location, ObjectLocation)
        filesystem, root = location.filesystem
        names = sorted(filesystem.glob(root)) if glob.has_magic(root) else [root]
    if not names:
        raise DataError(f"{source_name}: no file matches; check the pattern")
    how: dict[str, Any] = {"format": _file_format(kind), "filesystem": filesystem}
    if len(names) == 1:
        names = sorted(pyarrow.dataset.dataset(names[0], **how).files)
    if not names:
        raise DataError(f"{source_name} is a folder without files; nothing to import")
    return pyarrow.dataset.dataset(names, **how)


def _file_format(
    kind: str, column_types: dict[str, pyarrow.DataType] | None = None
) -> pyarrow.dataset.FileFormat:
    import pyarrow.csv
    import pyarrow.dataset as tables

    if kind == "parquet":
        # Read pages when they are needed; otherwise Arrow holds several whole row groups.
        scan = tables.ParquetFragmentScanOptions(use_buffered_stream=True, pre_buffer=False)
        return tables.ParquetFileFormat(default_fragment_scan_options=scan)
    scan = tables.CsvFragmentScanOptions(
        convert_options=_csv_options(column_types),
        read_options=pyarrow.csv.ReadOptions(block_size=_CSV_BLOCK_BYTES),
    )
    return tables.CsvFileFormat(default_fragment_scan_options=scan)


def _as_numbers(table: pyarrow.dataset.Dataset, columns: FrameColumns) -> pyarrow.dataset.Dataset:
    """Return a CSV table whose features and weights are float64, whatever types Arrow guessed."""
    import pyarrow as pa
    import pyarrow.dataset

    names = [*columns.names, *([columns.weight] if columns.weight else [])]
    types = dict.fromkeys(names, pa.float64())
    return pyarrow.dataset.dataset(
        table.files, format=_file_format("csv", types), filesystem=table.filesystem
    )


def _scan(
    table: pyarrow.dataset.Dataset,
    columns: FrameColumns,
    kind: str,
    names: list[str],
    row_bytes: int | None = None,
) -> Iterator[pyarrow.RecordBatch]:
    """Return the record batches of some columns, in order; `row_bytes` is the size of a row in memory."""
    if kind == "csv":
        return _scan_csv(table, columns, names)
    row_bytes = row_bytes or max(1, n_features(columns.feature_shape) * columns.dtype.itemsize)
    batches: Iterator[pyarrow.RecordBatch] = table.to_batches(
        columns=names,
        batch_size=max(1, min(_MAX_BATCH_ROWS, _BATCH_BYTES // row_bytes)),
        batch_readahead=_BATCHES_AHEAD,
        fragment_readahead=1,
    )
    return batches


def _scan_csv(
    table: pyarrow.dataset.Dataset, columns: FrameColumns, names: list[str]
) -> Iterator[pyarrow.RecordBatch]:
    """Yield record batches from one reader per file, because a scan of the table keeps all parsed rows."""
    import pyarrow.csv

    types = {name: table.schema.field(name).type for name in columns.all_names}
    convert = _csv_options(types, names)
    read = pyarrow.csv.ReadOptions(block_size=_CSV_BLOCK_BYTES)
    for path in table.files:
        with table.filesystem.open_input_stream(path) as text:
            yield from pyarrow.csv.open_csv(text, read_options=read, convert_options=convert)


def _csv_options(
    types: dict[str, pyarrow.DataType] | None, names: list[str] | None = None
) -> pyarrow.csv.ConvertOptions:
    import pyarrow.csv

    return pyarrow.csv.ConvertOptions(column_types=types, include_columns=names, strings_can_be_null=True)


def _count_rows(
    table: pyarrow.dataset.Dataset, columns: FrameColumns, kind: str
) -> tuple[int, np.ndarray | None]:
    """Return the number of rows, and the sorted distinct labels if labels are strings."""
    found: set[str] = set()
    n_rows = 0
    if columns.label_type is not None and columns.label_type.kind == "U":
        for batch in _scan(table, columns, kind, [str(columns.label)]):
            found.update(columns.labels(batch, n_rows).tolist())
            n_rows += batch.num_rows
            as_classes(np.array(sorted(found)), columns.name)
    elif kind == "csv":
        n_rows = sum(batch.num_rows for batch in _scan(table, columns, kind, columns.all_names[:1]))
    else:
        n_rows = table.count_rows()
    if not n_rows:
        raise DataError(f"{columns.name} holds no rows; nothing to import")
    return n_rows, np.array(sorted(found)) if found else None


class _TableReader(RowReader):
    """Reader of the features of a table; `labels` and `weights` belong to the rows of the last `read`."""

    def __init__(self, batches: Iterator[pyarrow.RecordBatch], columns: FrameColumns, n_rows: int) -> None:
        self.name, self.dtype = columns.name, columns.dtype
        self.shape = (n_rows, *columns.feature_shape)
        self._columns, self._batches = columns, batches
        self._rest: pyarrow.RecordBatch | None = None
        self._next_row = 0
        self.labels, self.weights = np.empty(0), np.empty(0)

    def read(self, rows: int) -> np.ndarray:
        out = np.empty((rows, *self.shape[1:]), self.dtype)
        columns, labels, weights = self._columns, [], []
        filled = 0
        while filled < rows:
            batch = next(self._batches, None) if self._rest is None else self._rest
            if batch is None:
                raise DataError(
                    f"{self.name} holds {self._next_row} rows, but {self.n_rows} were counted; it changed "
                    "during the import: import it again"
                )
            part = batch.slice(0, rows - filled)
            self._rest = batch.slice(part.num_rows) if part.num_rows < batch.num_rows else None
            out[filled : filled + part.num_rows] = self.rows_of(part, self._next_row)
            if columns.label is not None:
                labels.append(columns.labels(part, self._next_row))
            if columns.weight is not None:
                weights.append(columns.weights(part, self._next_row))
            filled += part.num_rows
            self._next_row += part.num_rows
        self.labels = np.concatenate(labels) if labels else self.labels
        self.weights = np.concatenate(weights) if weights else self.weights
        return out

    def rows_of(self, part: pyarrow.RecordBatch, first_row: int) -> np.ndarray:
        """Return the features of a record batch; `first_row` is the number of its first row."""
        return self._columns.rows(part, first_row)

    def finish(self) -> None:
        if self._rest is not None or any(batch.num_rows for batch in self._batches):
            raise DataError(
                f"{self.name} holds more than the {self.n_rows} rows that were counted; it changed during "
                "the import: import it again"
            )

    def close(self) -> None:
        self._batches, self._rest = iter(()), None


class _ImagesReader(_TableReader):
    """Reader of a column of images of one shape, which several threads decode."""

    def __init__(
        self,
        table: pyarrow.dataset.Dataset,
        columns: FrameColumns,
        n_rows: int,
        column: str,
        decoder: ImageDecoder,
    ) -> None:
        self.name, self._column, self._decoder = columns.name, column, decoder
        first = self._decode(table.head(1, columns=[column]).column(column)[0].as_py(), 0)
        batches = _scan(table, columns, "parquet", [*columns.all_names, column], first.nbytes)
        super().__init__(batches, columns, n_rows)
        self.shape, self.dtype = (n_rows, *first.shape), first.dtype
        self._pool = ThreadPoolExecutor(dask.system.cpu_count(), "scalelatent-decode")

    def rows_of(self, part: pyarrow.RecordBatch, first_row: int) -> np.ndarray:
        out = np.empty((part.num_rows, *self.shape[1:]), self.dtype)

        def decode_into(i: int, image: dict[str, Any] | None) -> None:
            row = self._decode(image, first_row + i)
            if row.shape != out.shape[1:] or row.dtype != out.dtype:
                raise DataError(
                    f"{self.name}: the image of row {first_row + i} is {row.shape} {row.dtype}, but that of "
                    f"row 0 is {out.shape[1:]} {out.dtype}; bring all to one size with --size HxW "
                    "(size=(height, width)), to one kind with --gray or --rgb (color=)"
                )
            out[i] = row

        list(self._pool.map(decode_into, range(len(out)), part[self._column].to_pylist()))
        return out

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        super().close()

    def _decode(self, image: dict[str, Any] | None, row: int) -> np.ndarray:
        where = f"{self.name}: row {row}, column {self._column!r}"
        if image is None or image["bytes"] is None:
            raise DataError(f"{where} is null; remove these rows")
        try:
            return self._decoder(image["bytes"])
        except Exception as error:  # decoders raise errors of many types for a damaged image
            raise DataError(f"{where} cannot be used as an image: {error}; remove that row") from error
