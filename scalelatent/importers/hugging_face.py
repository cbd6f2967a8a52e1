"""Import Hugging Face datasets from a disk: columns of numbers, or of images, which are decoded.

The Arrow files are read without the package ``datasets``. Even to open a folder, this package pickles with
``dill``, which fails for some of its versions on Python 3.14.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dask.system
import numpy as np

from scalelatent.data.dataset import Dataset
from scalelatent.data.read.frames import FrameColumns
from scalelatent.data.schema import n_features
from scalelatent.errors import DataError

from .arrow_tables import TableReader, arrow_errors, write_table
from .image_folder import ImageDecoder

if TYPE_CHECKING:
    from typing import Unpack

    import pyarrow

    from .files import PathOrUrl
    from .stream import ImportOptions

_BATCH_BYTES = 4 << 20
_MAX_BATCH_ROWS = 4096


def import_hf(
    folder: PathOrUrl,
    url: PathOrUrl,
    *,
    split: str | None = None,
    label: str | None = None,
    weight: str | None = None,
    features: Sequence[str] | None = None,
    size: tuple[int, int] | None = None,
    crop: bool = False,
    color: str | None = None,
    **options: Unpack[ImportOptions],
) -> Dataset:
    """Import a Hugging Face dataset that ``save_to_disk`` wrote; nothing is downloaded.

    Parameters
    ----------
    folder : path
        The folder. Needs pyarrow: ``pip install 'scalelatent[arrow]'``.
    url : str
        Dataset to write.
    split : str, optional
        Name of the split if there are several, for example ``train``.
    label : str, optional
        Column of labels; the names of a ``ClassLabel`` become the classes.
    weight : str, optional
        Column of row weights, finite and >= 0.
    features : sequence of str, optional
        Columns of a row, by default all others: numbers, or lists of a fixed size (`import_parquet`); or one
        column of images, which are decoded.
    size, crop, color
        Size and colour of images; see `import_images`.
    **options
        See `import_npy`.

    Returns
    -------
    Dataset
        Rows (n, features), or images (n, height, width) or (n, height, width, 3), uint8.

    Raises
    ------
    DataError
        A missing folder, split or column; a null; an image that cannot be read or has another shape than the
        first (with its row); an output that exists. No dataset stays behind.

    Examples
    --------
    ::

        datasets.load_dataset("mnist").save_to_disk("mnist-hf")
        import_hf("mnist-hf", "mnist.zarr", split="train", label="label")
    """
    source_name = f"Hugging Face dataset {os.fspath(folder)}"
    decoder = ImageDecoder(size, crop, color)
    with arrow_errors(source_name):
        source, features_json = _open(Path(folder), split, source_name)
        if not len(source):
            raise DataError(f"{source_name} holds no rows; nothing to import")
        others = [name for name in source.column_names if name not in (label, weight)]
        names = others if features is None else list(features)
        kinds = {name: value for name, value in features_json.items() if isinstance(value, dict)}
        images = [name for name in names if kinds.get(name, {}).get("_type") == "Image"]
        if images and len(names) > 1:
            raise DataError(
                f"{source_name}: column {images[0]!r} holds images, and there are others "
                f"({', '.join(names)}); name it alone with --features (features=), and the label with "
                "--label (label=)"
            )
        columns = FrameColumns(
            source.schema,
            source_name,
            label=label,
            weight=weight,
            features=[] if images else names,
        )
        # Only the type ClassLabel has names.
        label_names = None if label is None else kinds.get(label, {}).get("names")
        labels = np.array(label_names) if label_names else None
        x: _ColumnsReader = (
            _ImagesReader(source, columns, labels, images[0], decoder)
            if images
            else _ColumnsReader(source, columns, labels)
        )
        classes: np.ndarray | None = None if labels is None else np.unique(labels)
        if labels is None and x.label_type is not None and x.label_type.kind == "U":
            classes = np.unique(columns.labels(source.select([label])))
        return write_table(
            url,
            x,
            columns,
            importer="hf",
            sources=[folder],
            classes=classes,
            provenance={"split": split, "features": names, **decoder.provenance()},
            **options,
        )


def _open(folder: Path, split: str | None, source_name: str) -> tuple[pyarrow.Table, dict[str, Any]]:
    """Return the rows, which stay on disk, and the types of the columns as JSON."""
    import pyarrow

    if not folder.is_dir():
        raise DataError(f"{source_name} does not exist, or is no folder; check the path")
    try:
        if (folder / "dataset_dict.json").exists():
            splits = json.loads((folder / "dataset_dict.json").read_bytes())["splits"]
            if split is None or split not in splits:
                raise DataError(
                    f"{source_name} has the splits {', '.join(splits)}; choose one with --split (split=)"
                )
            folder = folder / split
        elif split is not None:
            raise DataError(f"{source_name} has no splits; leave --split out (split=None)")
        features = json.loads((folder / "dataset_info.json").read_bytes())["features"]
        names = [file["filename"] for file in json.loads((folder / "state.json").read_bytes())["_data_files"]]
        files = [pyarrow.memory_map(str(folder / name)) for name in names]
    except (OSError, KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(
            f"{source_name} cannot be read ({type(error).__name__}: {error}); give a folder that "
            "`save_to_disk` of the package datasets wrote"
        ) from error
    return pyarrow.concat_tables(pyarrow.ipc.open_stream(file).read_all() for file in files), features


class _ColumnsReader(TableReader):
    """Columns of numbers; `names` are the classes of label codes."""

    def __init__(
        self,
        source: pyarrow.Table,
        columns: FrameColumns,
        names: np.ndarray | None,
        image_columns: Sequence[str] = (),
        row_bytes: int | None = None,
    ) -> None:
        row_bytes = row_bytes or max(1, n_features(columns.feature_shape) * columns.dtype.itemsize)
        rows = max(1, min(_MAX_BATCH_ROWS, _BATCH_BYTES // row_bytes))
        selected = source.select([*columns.all_names, *image_columns])
        super().__init__(iter(selected.to_batches(rows)), columns, len(source))
        self._names = names
        if names is not None:
            self.label_type = names.dtype

    def labels_of(self, part: pyarrow.RecordBatch, first_row: int) -> np.ndarray:
        codes = super().labels_of(part, first_row)
        if self._names is None:
            return codes
        bad = np.flatnonzero((codes < 0) | (codes >= len(self._names)))
        if bad.size:
            raise DataError(
                f"{self.name}: the label of row {first_row + bad[0]} is {codes[bad[0]]}, but only 0 to "
                f"{len(self._names) - 1} have names; remove these rows"
            )
        return self._names[codes]


class _ImagesReader(_ColumnsReader):
    """A column of images of one shape, decoded by several threads."""

    def __init__(
        self,
        source: pyarrow.Table,
        columns: FrameColumns,
        names: np.ndarray | None,
        column: str,
        decoder: ImageDecoder,
    ) -> None:
        self._column, self._decoder, self.name = column, decoder, columns.name
        first = self._decode(source.column(column)[0].as_py(), 0)
        super().__init__(source, columns, names, [column], first.nbytes)
        self.shape, self.dtype = (len(source), *first.shape), first.dtype
        self._pool = ThreadPoolExecutor(dask.system.cpu_count(), "scalelatent-decode")

    def rows_of(self, part: pyarrow.RecordBatch, first_row: int) -> np.ndarray:
        out = np.empty((part.num_rows, *self.shape[1:]), self.dtype)

        def decode_into(i: int, image: Any) -> None:
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

    def _decode(self, image: Any, row: int) -> np.ndarray:
        where = f"{self.name}: row {row}, column {self._column!r}"
        if image is None:
            raise DataError(f"{where} is null; remove these rows")
        try:
            content = image["bytes"]
            return self._decoder(Path(image["path"]).read_bytes() if content is None else content)
        except Exception as error:  # decoders raise errors of many types for a damaged image
            raise DataError(f"{where} cannot be used as an image: {error}; remove that row") from error
