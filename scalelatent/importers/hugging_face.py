"""Import Hugging Face datasets from a disk: columns of numbers, or of images, which are decoded."""

from __future__ import annotations

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

    import datasets
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
        The folder. Needs datasets: ``pip install 'scalelatent[hf]'``.
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
        source = _open(folder, split, source_name)
        if not len(source):
            raise DataError(f"{source_name} holds no rows; nothing to import")
        others = [name for name in source.column_names if name not in (label, weight)]
        names = others if features is None else list(features)
        images = [name for name in names if type(source.features.get(name)).__name__ == "Image"]
        if images and len(names) > 1:
            raise DataError(
                f"{source_name}: column {images[0]!r} holds images, and there are others "
                f"({', '.join(names)}); name it alone with --features (features=), and the label with "
                "--label (label=)"
            )
        columns = FrameColumns(
            source.features.arrow_schema,
            source_name,
            label=label,
            weight=weight,
            features=[] if images else names,
        )
        # Only the type ClassLabel has names.
        label_names = None if label is None else getattr(source.features.get(label), "names", None)
        labels = np.array(label_names) if label_names else None
        x: _ColumnsReader = (
            _ImagesReader(source, columns, labels, images[0], decoder)
            if images
            else _ColumnsReader(source, columns, labels)
        )
        classes: np.ndarray | None = None if labels is None else np.unique(labels)
        if labels is None and x.label_type is not None and x.label_type.kind == "U":
            classes = np.unique(columns.labels(source.with_format("arrow").select_columns([label])[:]))
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


def _open(folder: PathOrUrl, split: str | None, source_name: str) -> datasets.Dataset:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{source_name} needs datasets: install it with pip install 'scalelatent[hf]'"
        ) from error
    if not Path(folder).is_dir():
        raise DataError(f"{source_name} does not exist, or is no folder; check the path")
    found = datasets.load_from_disk(os.fspath(folder))
    if isinstance(found, datasets.Dataset):
        if split is not None:
            raise DataError(f"{source_name} has no splits; leave --split out (split=None)")
        return found
    if split not in found:
        raise DataError(f"{source_name} has the splits {', '.join(found)}; choose one with --split (split=)")
    return found[split]


class _ColumnsReader(TableReader):
    """Columns of numbers; `names` are the classes of label codes."""

    def __init__(
        self,
        source: datasets.Dataset,
        columns: FrameColumns,
        names: np.ndarray | None,
        image_columns: Sequence[str] = (),
        row_bytes: int | None = None,
    ) -> None:
        row_bytes = row_bytes or max(1, n_features(columns.feature_shape) * columns.dtype.itemsize)
        rows = max(1, min(_MAX_BATCH_ROWS, _BATCH_BYTES // row_bytes))
        selected = source.select_columns([*columns.all_names, *image_columns]).with_format("arrow")
        super().__init__(selected.iter(rows), columns, len(source))
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
        source: datasets.Dataset,
        columns: FrameColumns,
        names: np.ndarray | None,
        column: str,
        decoder: ImageDecoder,
    ) -> None:
        self._column, self._decoder, self.name = column, decoder, columns.what
        first = self._decode(source.with_format("arrow")[:1][column][0].as_py(), 0)
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
