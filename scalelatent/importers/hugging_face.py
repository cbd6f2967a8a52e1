"""Hugging Face datasets on disk: their columns, and their images decoded."""

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

from .arrow_tables import TableRows, explained, write_table
from .image_folder import ImageDecoder, image_decoder
from .stream import Progress

if TYPE_CHECKING:
    from typing import Unpack

    import datasets
    import pyarrow

    from scalelatent.data.schema import LayoutOptions

_BATCH_BYTES = 4 << 20
_MAX_BATCH_ROWS = 4096


def import_hf(
    folder: str | os.PathLike[str],
    url: str | os.PathLike[str],
    *,
    split: str | None = None,
    label: str | None = None,
    weight: str | None = None,
    features: Sequence[str] | None = None,
    size: tuple[int, int] | None = None,
    crop: bool = False,
    color: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    shuffle: int | None = None,
    **layout: Unpack[LayoutOptions],
) -> Dataset:
    """Import a Hugging Face dataset that ``save_to_disk`` wrote; nothing is downloaded.

    Parameters
    ----------
    folder : path
        The folder. Needs datasets: ``pip install 'scalelatent[hf]'``.
    url : str
        Where the dataset goes.
    split : str, optional
        Which part of several, for example ``train``.
    label : str, optional
        Column of labels; of a ``ClassLabel`` its names are the classes.
    weight : str, optional
        Column of row weights, finite and >= 0.
    features : sequence of str, optional
        Columns of a row, by default all others: numbers, or lists of a fixed size (`import_parquet`); or one
        column of images, which are decoded.
    size, crop, color
        Of images; see `import_images`.
    overwrite, progress, shuffle, **layout
        See `import_npy`.

    Returns
    -------
    Dataset
        Rows (n, features), or images (n, height, width) or (n, height, width, 3), uint8.

    Raises
    ------
    DataError
        No such folder, split or column; a null; an image that cannot be read or is not like the first (with
        its row); an output that exists. No dataset is left behind.

    Examples
    --------
    ::

        datasets.load_dataset("mnist").save_to_disk("mnist-hf")
        import_hf("mnist-hf", "mnist.zarr", split="train", label="label")
    """
    what = f"Hugging Face dataset {os.fspath(folder)}"
    decoder = image_decoder(size, crop, color)
    with explained(what):
        found = _open(folder, split, what)
        beside = [name for name in (label, weight) if name is not None]
        schema = found.features.arrow_schema
        names = [n for n in found.column_names if n not in beside] if features is None else list(features)
        images = [name for name in names if type(found.features.get(name)).__name__ == "Image"]
        if images and len(names) > 1:
            raise DataError(
                f"{what}: column {images[0]!r} holds images, and there are others ({', '.join(names)}); "
                "name it alone with --features (features=), and the label with --label (label=)"
            )
        columns = FrameColumns(schema, what, label=label, weight=weight, features=[] if images else names)
        if not len(found):
            raise DataError(f"{what} holds no rows; nothing to import")
        names_of_label = None if label is None else getattr(found.features.get(label), "names", None)
        labels = np.array(names_of_label) if names_of_label else None
        x = (
            _Rows(found, columns, labels)
            if not images
            else _Images(found, columns, labels, images[0], decoder)
        )
        classes: np.ndarray | None = None if labels is None else np.unique(labels)
        if labels is None and x.label_type is not None and x.label_type.kind == "U":
            classes = np.unique(columns.labels(found.with_format("arrow").select_columns([label])[:]))
        told: dict[str, Any] = {
            "split": split,
            "features": names,
            "size": None if size is None else list(size),
        }
        told |= {"crop": crop, "color": color}
        how: dict[str, Any] = {"overwrite": overwrite, "progress": progress, "shuffle": shuffle, **layout}
        return write_table(
            url, x, columns, options=told, importer="hf", sources=[folder], classes=classes, **how
        )


def _open(folder: str | os.PathLike[str], split: str | None, what: str) -> datasets.Dataset:
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{what} needs datasets: install it with pip install 'scalelatent[hf]'") from error
    if not Path(folder).is_dir():
        raise DataError(f"{what} does not exist, or is no folder; check the path")
    found = datasets.load_from_disk(os.fspath(folder))
    if isinstance(found, datasets.Dataset):
        if split is not None:
            raise DataError(f"{what} has no splits; leave --split out (split=None)")
        return found
    if split not in found:
        raise DataError(f"{what} has the splits {', '.join(found)}; choose one with --split (split=)")
    return found[split]


class _Rows(TableRows):
    """Columns of numbers."""

    def __init__(
        self,
        found: datasets.Dataset,
        columns: FrameColumns,
        names: np.ndarray | None,
        more: Sequence[str] = (),
        row_bytes: int | None = None,
    ) -> None:
        size = row_bytes or max(1, n_features(columns.feature_shape) * columns.dtype.itemsize)
        rows = max(1, min(_MAX_BATCH_ROWS, _BATCH_BYTES // size))
        chosen = found.select_columns([*columns.all_names, *more]).with_format("arrow")
        super().__init__(chosen.iter(rows), columns, len(found))
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
                f"{self.name}: the label of row {first_row + bad[0]} is {codes[bad[0]]}, which has no name "
                f"(of {len(self._names)}); leave such rows out"
            )
        return self._names[codes]


class _Images(_Rows):
    """A column of images, decoded by threads; each is like the first."""

    def __init__(
        self,
        found: datasets.Dataset,
        columns: FrameColumns,
        names: np.ndarray | None,
        column: str,
        decoder: ImageDecoder,
    ) -> None:
        self._column, self._decoder, self._pool = column, decoder, None
        self.name = columns.what
        first = self._decoded(found.with_format("arrow")[:1][column][0].as_py(), 0)
        super().__init__(found, columns, names, [column], first.nbytes)
        self.shape, self.dtype = (len(found), *first.shape), first.dtype
        self._pool = ThreadPoolExecutor(dask.system.cpu_count(), "scalelatent-decode")

    def rows_of(self, part: pyarrow.RecordBatch, first_row: int) -> np.ndarray:
        out = np.empty((part.num_rows, *self.shape[1:]), self.dtype)

        def put(i: int, image: Any) -> None:
            row = self._decoded(image, first_row + i)
            if row.shape != out.shape[1:] or row.dtype != out.dtype:
                raise DataError(
                    f"{self.name}: the image of row {first_row + i} is {row.shape} {row.dtype}, but that of "
                    f"row 0 is {out.shape[1:]} {out.dtype}; bring all to one size with --size HxW "
                    "(size=(height, width)), to one kind with --gray or --rgb (color=)"
                )
            out[i] = row

        assert self._pool is not None
        list(self._pool.map(put, range(len(out)), part[self._column].to_pylist()))
        return out

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        super().close()

    def _decoded(self, image: Any, row: int) -> np.ndarray:
        where = f"{self.name}: row {row}, column {self._column!r}"
        if image is None:
            raise DataError(f"{where} is null; leave such rows out")
        try:
            content = image["bytes"]
            return self._decoder(Path(image["path"]).read_bytes() if content is None else content)
        except Exception as error:  # decoders raise whatever a damaged image leads to
            raise DataError(f"{where} cannot be used as an image: {error}; leave that row out") from error
