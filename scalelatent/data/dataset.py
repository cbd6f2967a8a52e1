"""Datasets: rows `x`, labels `y` and weights, in memory or on disk, behind one small reading interface."""

from __future__ import annotations

import functools
import hashlib
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.errors import DataError

from . import schema
from .columns import Columns, Shifted, label_source
from .sources import ArrayRows, DaskRows, RowSource, as_source
from .store import locate

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Dataset", "open_dataset"]

_HASH_ROWS = 4096  # rows hashed or looked through at a time


class Dataset:
    """A run of rows with optional labels and weights.

    Make one with `Dataset.from_arrays` (in memory) or `open_dataset` (stored); the constructor is private.
    `ds[a:b]` is a dataset too and shares everything with `ds`, its classes included.

    Examples
    --------
    >>> import numpy as np
    >>> ds = Dataset.from_arrays(np.arange(12.0).reshape(6, 2), ["a", "b", "a", "b", "a", "b"])
    >>> len(ds), ds.n_features, ds.classes.tolist()
    (6, 2, ['a', 'b'])
    >>> ds[2:4].read_x(0, 2)
    array([[4., 5.],
           [6., 7.]])
    >>> ds[2:4].read_codes(0, 2)
    array([0, 1], dtype=int32)
    """

    def __init__(
        self,
        columns: Columns,
        start: int = 0,
        stop: int | None = None,
    ) -> None:
        self._columns = columns
        self._start = start
        self._stop = columns.x.shape[0] if stop is None else stop

    @classmethod
    def from_arrays(cls, x: Any, y: Any = None, *, sample_weight: Any = None) -> Dataset:
        """A dataset over arrays; nothing is copied, and lazy arrays are read when their rows are.

        Parameters
        ----------
        x : array-like (n, ...)
            Rows: numpy array, memmap, zarr array, dask array, anything that slices. Real numbers.
        y : array-like (n,), optional
            Labels: numbers or strings.
        sample_weight : array-like (n,), optional
            Weights of the rows, finite and >= 0.

        Returns
        -------
        Dataset
            A dataset in memory; `read_x` gives rows of prod(x.shape[1:]) features.

        Raises
        ------
        DataError
            No rows, one dimension, no real numbers, or columns of different lengths.
        """
        source = as_source(x)
        if len(source.shape) < 2:
            raise DataError(
                f"x has shape {source.shape}; rows x features are needed. Reshape your data: x.reshape(-1, "
                f"1) for one feature, x.reshape(1, -1) for one row"
            )
        n_rows = source.shape[0]
        if n_rows == 0 or 0 in source.shape[1:]:
            raise DataError(f"x has shape {source.shape}: at least one row and one feature are needed")
        schema.check_rows_dtype(source.dtype, "x")
        labels = None if y is None else label_source(y)
        if labels is not None and labels.shape[0] != n_rows:
            raise DataError(f"x has {n_rows} rows, but y has {labels.shape[0]} labels: give one label a row")
        weight = (
            None if sample_weight is None else schema.check_weight(sample_weight, n_rows, "sample_weight")
        )
        return cls(Columns(source, labels, None if weight is None else ArrayRows(weight)))

    @classmethod
    def from_spec(cls, spec: dict[str, Any]) -> Dataset:
        """Open again what `spec` described, in this or another process.

        Raises
        ------
        DataError
            The dataset is gone, or its content is no longer the one described.
        """
        ds = _open_cached(spec["url"], locate(spec["url"]).stamp("zarr.json"))
        if ds.fingerprint() != spec["fingerprint"]:
            raise DataError(
                f"dataset {spec['url']} has changed since this job began (fingerprint "
                f"{ds.fingerprint()[:12]}, expected {spec['fingerprint'][:12]}); restore it, or start the "
                "job anew"
            )
        return ds[spec["start"] : spec["stop"]]

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return self._stop - self._start

    @property
    def n_features(self) -> int:
        """Numbers in a row."""
        return schema.n_features(self.feature_shape)

    @property
    def feature_shape(self) -> tuple[int, ...]:
        """Shape of one row as it is stored, for example (28, 28)."""
        return self._columns.x.shape[1:]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the rows, in native byte order."""
        return self._columns.x.dtype.newbyteorder("=")

    @property
    def has_y(self) -> bool:
        """Whether there are labels."""
        return self._columns.y is not None

    @property
    def has_weight(self) -> bool:
        """Whether the rows are weighted."""
        return self._columns.weight is not None

    @property
    def classes(self) -> np.ndarray | None:
        """Distinct labels in rising order, for a slice those of the whole dataset; None without labels."""
        return self._columns.classes

    @property
    def url(self) -> str | None:
        """Where it is stored, or None."""
        return self._columns.url

    @property
    def attrs(self) -> dict[str, Any]:
        """Attributes of a stored dataset (see `schema.DatasetAttrs`); empty for arrays."""
        return {} if self._columns.attrs is None else self._columns.attrs.to_json()

    @property
    def is_stored(self) -> bool:
        """Whether another process can open it from its `spec`."""
        return self._columns.shared

    @property
    def reads_at_once(self) -> int:
        """How many pieces it pays to read at the same time: 1 from memory or a disk, more over a network."""
        return int(getattr(self._columns.x, "reads_at_once", 1))

    @property
    def known_finite(self) -> bool:
        """Whether the rows hold no NaN or infinity for certain: integers, and all that our writer checked."""
        return self.dtype.kind != "f" or self._columns.attrs is not None

    def __len__(self) -> int:
        return self.n_rows

    def __repr__(self) -> str:
        labels = (
            f", {len(self.classes)} classes"
            if self._columns.classes_known and self.classes is not None
            else ""
        )
        place = f", {self.url!r}" if self.url else ""
        return f"<Dataset {self.n_rows:,} rows x {self.feature_shape} {self.dtype}{labels}{place}>"

    def __getitem__(self, rows: slice) -> Dataset:
        if not isinstance(rows, slice):
            raise TypeError(
                f"a Dataset is sliced by rows, ds[a:b], not by {type(rows).__name__}; read_x reads rows"
            )
        start, stop, step = rows.indices(self.n_rows)
        if step != 1:
            raise DataError(f"ds[{rows.start}:{rows.stop}:{step}]: rows have to be contiguous, step 1")
        if stop <= start:
            raise DataError(f"ds[{rows.start}:{rows.stop}] of a dataset of {self.n_rows} rows holds no row")
        return Dataset(self._columns, self._start + start, self._start + stop)

    def pieces(self, start: int = 0, stop: int | None = None) -> list[tuple[int, int]]:
        """Rows `start:stop` cut into natural read units: chunks, clipped; one piece for arrays in memory."""
        stop = self.n_rows if stop is None else stop
        a, b = self._rows(start, stop)
        return [(u - self._start, v - self._start) for u, v in self._columns.x.pieces(a, b)]

    def read_x(self, start: int, stop: int) -> np.ndarray:
        """Rows `start:stop`, flattened.

        Parameters
        ----------
        start, stop : int
            Row numbers of this dataset, 0 <= start <= stop <= n_rows.

        Returns
        -------
        ndarray (stop - start, n_features)
            In the stored dtype. A view where the rows are in memory: do not write to it.

        Raises
        ------
        DataError
            A shard that is missing or damaged; the message names its file and rows.
        """
        a, b = self._rows(start, stop)
        return self._columns.x.read(a, b).reshape(b - a, self.n_features)

    def read_y(self, start: int, stop: int) -> np.ndarray:
        """Labels of the rows `start:stop` as they were given, (stop - start,)."""
        a, b = self._rows(start, stop)
        stored = self._labels().read(a, b)
        if not self._columns.coded:
            return schema.as_labels(stored, "y")
        assert self.classes is not None
        return self.classes[self._checked_codes(stored, a)]

    def read_codes(self, start: int, stop: int, classes: np.ndarray | None = None) -> np.ndarray:
        """Index of each label in `classes` (by default the dataset's own), int32 (stop - start,).

        Raises
        ------
        DataError
            No labels, or a label that is none of the classes; the message names its row.
        """
        a, b = self._rows(start, stop)
        stored = self._labels()
        if self._columns.coded and classes is None:
            return self._checked_codes(stored.read(a, b), a)
        known = self.classes if classes is None else np.asarray(classes)
        if known is None:
            raise DataError(
                f"{self._what()} has more than {schema.MAX_CLASSES} distinct labels: they are no classes"
            )
        if isinstance(stored, ArrayRows) and not self._columns.coded:
            # Labels in memory are looked up once, not every pass.
            key = (known.dtype.str, known.tobytes(), self._start, self._stop)
            return self._columns.remembered(key, lambda: self._encode(known, 0, self.n_rows))[start:stop]
        return self._encode(known, start, stop)

    def _encode(self, known: np.ndarray, start: int, stop: int) -> np.ndarray:
        return schema.encode_labels(self.read_y(start, stop), known, self._start + start, self._what())

    def read_weight(self, start: int, stop: int) -> np.ndarray | None:
        """Weights of the rows `start:stop`, float64, or None where rows are not weighted."""
        a, b = self._rows(start, stop)
        return None if self._columns.weight is None else self._columns.weight.read(a, b)

    def lazy(self, start: int, stop: int) -> tuple[Any, Any] | None:
        """Rows and labels as dask arrays where `x` is one, else None; labels may be in memory, or absent."""
        if not isinstance(self._columns.x, DaskRows):
            return None
        a, b = self._rows(start, stop)
        y = self._columns.y
        labels = y.lazy(a, b) if isinstance(y, DaskRows) else None if y is None else y.read(a, b)
        return self._columns.x.lazy(a, b), labels

    def with_weight(self, weight: Any) -> Dataset:
        """The same rows with other weights, (n_rows,), kept in memory."""
        weights = schema.check_weight(weight, self.n_rows, "weight")
        return Dataset(self._columns.reweighted(Shifted(weights, self._start)), self._start, self._stop)

    def fingerprint(self) -> str:
        """SHA-256 of content and row range, in hexadecimal; free for stored rows, a pass over arrays."""
        whole = self._columns.fingerprint
        if self._columns.attrs is None:
            return self._hash_rows()
        if self._columns.weight_is_own:
            whole = hashlib.sha256(f"{whole}+{self._hash_weight()}".encode()).hexdigest()
        if (self._start, self._stop) == (0, self._columns.x.shape[0]):
            return whole
        return hashlib.sha256(f"{whole}[{self._start}:{self._stop}]".encode()).hexdigest()

    def spec(self) -> dict[str, Any]:
        """What another process needs to open these rows, JSON-able.

        Raises
        ------
        DataError
            The rows, or their weights, lie in this process's memory only.
        """
        if not self.is_stored:
            raise DataError(
                f"{self._what()} lies in the memory of this process, so no other process can open it; write "
                "it to a place that all processes see with Dataset.save('rows.zarr') and use what that "
                "returns"
            )
        return {
            "url": self.url,
            "start": self._start,
            "stop": self._stop,
            "fingerprint": self._columns.fingerprint,
        }

    def save(
        self,
        url: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        progress: Callable[[int, int], None] | None = None,
        **layout: Any,
    ) -> Dataset:
        """Write the rows to a new stored dataset, a shard at a time, and open it.

        Parameters
        ----------
        url : str
            Where to; an existing dataset there is an error unless `overwrite`.
        overwrite : bool
            Replace a dataset that lies there.
        progress : callable, optional
            Called with (rows done, rows in all).
        **layout
            `chunk_rows`, `shard_rows`, `compressor` of `create_dataset`.

        Returns
        -------
        Dataset
            The stored rows.
        """
        from .create import copy_rows

        return copy_rows(self, url, overwrite=overwrite, progress=progress, **layout)

    def _rows(self, start: int, stop: int) -> tuple[int, int]:
        if not 0 <= start <= stop <= self.n_rows:
            raise IndexError(f"rows {start}:{stop} do not lie in 0:{self.n_rows} of {self._what()}")
        return self._start + start, self._start + stop

    def _what(self) -> str:
        return f"dataset {self.url}" if self.url else "the dataset"

    def _labels(self) -> RowSource:
        if self._columns.y is None:
            raise DataError(
                f"{self._what()} has no labels; give y, or import the rows together with their labels"
            )
        return self._columns.y

    def _checked_codes(self, codes: np.ndarray, first_row: int) -> np.ndarray:
        assert self.classes is not None
        if codes.size and not (codes.min() >= 0 and codes.max() < len(self.classes)):
            i = int(np.flatnonzero((codes < 0) | (codes >= len(self.classes)))[0])
            raise DataError(
                f"{self._what()}: the label of row {first_row + i} is code {codes[i]}, but there are "
                f"{len(self.classes)} classes; import the data again"
            )
        return codes.astype(np.int32)

    def _hash_rows(self) -> str:
        digest = hashlib.sha256(f"{self.n_rows} {self.feature_shape} {self.dtype.str}".encode())
        if isinstance(self._columns.x, DaskRows):
            # Computing the array to hash it would cost as much as a pass; its name stands for its content.
            digest.update(f"dask {self._columns.x.token} {self._start}".encode())
        for a, b in [] if isinstance(self._columns.x, DaskRows) else self.pieces():
            for u in range(a, b, _HASH_ROWS):
                digest.update(np.ascontiguousarray(self.read_x(u, min(u + _HASH_ROWS, b))).data)
        if self.has_y:
            y = self.read_y(0, self.n_rows)
            digest.update(f"y {y.dtype.str}".encode() + np.ascontiguousarray(y).tobytes())
        return (
            digest.hexdigest()
            if not self.has_weight
            else f"{digest.hexdigest()[:32]}{self._hash_weight()[:32]}"
        )

    def _hash_weight(self) -> str:
        return hashlib.sha256(np.ascontiguousarray(self.read_weight(0, self.n_rows)).tobytes()).hexdigest()


def open_dataset(url: str | os.PathLike[str]) -> Dataset:
    """Open a stored dataset.

    Parameters
    ----------
    url : str or path-like
        A local path, `file:///path`, `s3://bucket/key`, `memory://name`, or another address; see `locate`.

    Returns
    -------
    Dataset
        Its rows; nothing but metadata is read.

    Raises
    ------
    DataError
        Nothing there, no dataset, a newer format version, a writer that never finished, or damaged metadata.

    Examples
    --------
    >>> import numpy as np
    >>> rows = Dataset.from_arrays(np.zeros((4, 3), "u1"), [0, 1, 0, 1])
    >>> _ = rows.save("memory://doc-open", overwrite=True)
    >>> open_dataset("memory://doc-open")
    <Dataset 4 rows x (3,) uint8, 2 classes, 'memory://doc-open'>
    """
    from .stored import open_columns

    return Dataset(Columns(**open_columns(locate(url))))


@functools.lru_cache(maxsize=16)
def _open_cached(url: str, stamp: Any) -> Dataset:
    """A dataset opened once per process and content of its metadata file; tasks ask for it many times."""
    return open_dataset(url)
