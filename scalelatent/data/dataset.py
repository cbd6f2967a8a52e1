"""Datasets: rows `x`, labels `y` and weights, in memory or stored, with one interface to read them."""

from __future__ import annotations

import functools
import hashlib
import os
import socket
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.errors import DataError
from scalelatent.storage.storage_options import find_location, locate_recorded

from . import schema
from .columns import DatasetColumns, OffsetColumn, PairedRows, as_binary, label_source
from .csr import index_dtype, unpack_csr
from .export import as_dask
from .feature_names import as_names, frame_names
from .read.containers import frame_parts, opened
from .read.segments import earlier_columns
from .read.sources import ArrayRows, DaskRows, as_source
from .read.stored import open_columns
from .write.create import copy_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence
    from typing import Unpack

    import dask.array as da

    from scalelatent.data.schema import LayoutOptions
    from scalelatent.kernels.arrays import DenseOrCsr
    from scalelatent.storage.access import Access
    from scalelatent.storage.location import Location
    from scalelatent.typing import FrameLike, LabelsLike, RowsLike, WeightsLike

_HASH_ROWS = 4096  # rows per hash update; a fixed number, because the hash of CSR rows depends on it


class Dataset:
    """Contiguous rows with optional labels and weights.

    Use `Dataset.from_arrays` (in memory) or `open_dataset` (stored); the constructor is private.
    `ds[a:b]` is a dataset too, and it shares all state with `ds`, including the classes.

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

    # Spec and storage options of an unpickled dataset that is not open yet; None for other datasets.
    _spec_and_accesses: tuple[schema.DatasetSpec, tuple[Access, ...]] | None = None

    def __init__(self, columns: DatasetColumns, start: int = 0, stop: int | None = None) -> None:
        self._columns = columns
        self._start = start
        self._stop = columns.x.shape[0] if stop is None else stop

    @classmethod
    def from_arrays(
        cls,
        x: RowsLike,
        y: LabelsLike | None = None,
        *,
        sample_weight: WeightsLike | None = None,
        feature_names: Sequence[str] | np.ndarray | None = None,
    ) -> Dataset:
        """Return a dataset over arrays without a copy; lazy arrays are read when their rows are read.

        Parameters
        ----------
        x : array-like (n, ...) or scipy sparse (n, p)
            Rows of real numbers: numpy array, memmap, zarr array, dask array, xarray.DataArray, polars lazy
            frame, Arrow table, torch tensor, CSR `X` of a backed AnnData, or any object that slices like a
            numpy array. Arrays of CuPy, cuDF and torch on a GPU are copied to the host. Sparse rows stay CSR;
            columns are sorted, and duplicate entries are added.
        y : array-like (n,) or (n, v), or scipy sparse (n, v), optional
            Labels (n,): numbers or strings. Targets (n, v): numbers. Multi-labels: sparse (n, v).
        sample_weight : array-like (n,), optional
            Weights of the rows, finite and >= 0.
        feature_names : sequence of str, optional
            One name per feature, for rows with one axis; by default the names of the columns of a data frame.

        Returns
        -------
        Dataset
            A dataset in memory; `read_x` returns rows with prod(x.shape[1:]) features.

        Raises
        ------
        DataError
            If there are no rows, `x` has one dimension, a value is not a real number, or `x`, `y` and
            `sample_weight` have different lengths.
        """
        x, sample_weight = opened(x), opened(sample_weight, "sample_weight")
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
            raise DataError(
                f"x has {n_rows} rows, but y has {labels.shape[0]} (shape {labels.shape}): give one per row"
            )
        weight = (
            None if sample_weight is None else schema.check_weight(sample_weight, n_rows, "sample_weight")
        )
        if feature_names is None:
            feature_names = frame_names(x)
        names = as_names(feature_names, source.shape[1:], "x")
        return cls(
            DatasetColumns(source, labels, None if weight is None else ArrayRows(weight), feature_names=names)
        )

    @classmethod
    def from_dataframe(
        cls,
        frame: FrameLike | dict[str, Any],
        *,
        label: str | None = None,
        weight: str | None = None,
        features: Sequence[str] | None = None,
    ) -> Dataset:
        """Return a dataset over the columns of a data frame; each read combines the columns into rows.

        Parameters
        ----------
        frame : pandas.DataFrame, polars.DataFrame, polars.LazyFrame, pyarrow.Table
            Or any frame with Arrow's interface (``__arrow_c_stream__``). Each read executes a lazy frame for
            its rows; if this is slow, write the frame to Parquet and import the file. Requires pyarrow:
            ``pip install 'scalelatent[arrow]'``.
        label : str, optional
            Column of labels: numbers, strings or categories.
        weight : str, optional
            Column of row weights, finite and >= 0.
        features : sequence of str, optional
            Feature columns in this order; by default all other columns. They contain numbers, or lists of
            numbers of a fixed size. The dtype of the rows is the common dtype of these columns.

        Returns
        -------
        Dataset
            Rows (n, features), in memory, or lazy for a lazy frame. `feature_names` holds the names of the
            feature columns, unless some columns hold lists.

        Raises
        ------
        DataError
            If a column does not exist, is not numeric or contains a null (the message names row and column),
            or the frame is a Dask DataFrame, whose number of rows is unknown.

        Examples
        --------
        >>> import pandas as pd
        >>> frame = pd.DataFrame({"w": [1.0, 2.0, 3.0], "h": [4, 5, 6], "kind": ["a", "b", "a"]})
        >>> ds = Dataset.from_dataframe(frame, label="kind")
        >>> ds, ds.read_x(1, 3).tolist(), ds.feature_names.tolist()
        (<Dataset 3 rows x (2,) float64, labels>, [[2.0, 5.0], [3.0, 6.0]], ['w', 'h'])
        """
        x, y, weights = frame_parts(frame, label, weight, features)
        return cls.from_arrays(x, y, sample_weight=weights)

    @classmethod
    def from_spec(cls, spec: schema.DatasetSpec) -> Dataset:
        """Open the rows that `spec` describes, in any process; raise DataError if the rows have changed."""
        url, mark = spec["url"], spec.get("access")
        stamp = locate_recorded(url, mark).stamp("zarr.json")
        if stamp is None:
            raise DataError(
                f"dataset {url} does not exist, or process {os.getpid()} on {socket.gethostname()} cannot "
                "see it (it may be in memory or on the disk of another machine): restore it, or save it with "
                "Dataset.save where every process can read it, and open it there"
            )
        ds = _open_cached(url, mark, stamp)
        if ds.fingerprint() != spec["fingerprint"]:
            then = earlier_columns(ds._columns, spec["fingerprint"])
            ds = ds if then is None else cls(then)
        if ds.fingerprint() != spec["fingerprint"]:
            raise DataError(
                f"dataset {spec['url']} has changed since this job started or this model was fitted "
                f"(fingerprint {ds.fingerprint()[:12]}, expected {spec['fingerprint'][:12]}); restore it, or "
                "start the job or fit the model again"
            )
        ds = ds[spec["start"] : spec["stop"]]
        ds = ds.without_labels() if spec.get("without_labels") else ds
        return ds.with_target(cls.from_spec(spec["target"])) if "target" in spec else ds

    @functools.cached_property
    def _columns(self) -> DatasetColumns:
        """Columns of an unpickled dataset, which is opened at its first use."""
        assert self._spec_and_accesses is not None
        return Dataset.from_spec(self._spec_and_accesses[0])._columns

    def __reduce__(self) -> tuple[object, ...]:
        if self._spec_and_accesses is not None:
            return _reopen, self._spec_and_accesses
        if not self.is_stored:
            return Dataset, (self._columns, self._start, self._stop)
        return _reopen, (self.spec(), self.accesses)

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return self._stop - self._start

    @property
    def n_features(self) -> int:
        """Number of values in one row."""
        return schema.n_features(self.feature_shape)

    @property
    def feature_shape(self) -> tuple[int, ...]:
        """Shape of one row before `read_x` flattens it, for example (28, 28)."""
        return self._columns.x.shape[1:]

    @property
    def feature_names(self) -> np.ndarray | None:
        """Names of the features, str objects (n_features,), or None if the source of the rows has no names.

        A model that is fitted on this dataset keeps them in ``feature_names_in_``, and refuses rows whose
        names differ.
        """
        return self._columns.feature_names

    @property
    def dtype(self) -> np.dtype:
        """Type of the rows, in native byte order."""
        return self._columns.x.dtype.newbyteorder("=")

    @property
    def is_sparse(self) -> bool:
        """True if the rows are CSR, so that `read_x` returns a `scipy.sparse.csr_array`."""
        return self._columns.x.sparse

    @property
    def nnz(self) -> int | None:
        """Number of stored entries of CSR rows, else None; a slice of a stored dataset reads row pointers."""
        return self._columns.x.count_entries(self._start, self._stop) if self.is_sparse else None

    @property
    def nbytes(self) -> int:
        """Bytes of the rows in memory; for CSR rows the sum of values, column indices and row pointers."""
        if self.nnz is None:
            return self.n_rows * self.n_features * self.dtype.itemsize
        entry = self.dtype.itemsize + index_dtype(self.n_features).itemsize
        return self.nnz * entry + 8 * (self.n_rows + 1)

    @property
    def has_y(self) -> bool:
        """True if the dataset has labels, targets or multi-labels."""
        return self._columns.y is not None

    @property
    def y_kind(self) -> str | None:
        """Kind of `y`: 'labels' (n,), 'targets' (n, v), 'multilabel' (CSR, n x v), or None without `y`."""
        return self._columns.y_kind

    @property
    def has_targets(self) -> bool:
        """True if `y` holds targets or multi-labels, which `read_targets` reads."""
        return self.y_kind not in (None, "labels")

    @property
    def n_targets(self) -> int | None:
        """Number of columns of the targets or multi-labels; None if the dataset has neither."""
        return int(self._columns.require_y(self._name()).shape[1]) if self.has_targets else None

    @property
    def has_weight(self) -> bool:
        """True if each row has a weight."""
        return self._columns.weight is not None

    @property
    def classes(self) -> np.ndarray | None:
        """Sorted distinct labels of the whole dataset, also for a slice; None without labels."""
        return self._columns.classes

    @property
    def url(self) -> str | None:
        """Address of the stored dataset; None for arrays in memory."""
        return self._columns.url

    @property
    def place(self) -> Location | None:
        """Location of the stored dataset, including its storage options; None for arrays in memory."""
        return self._columns.place

    @property
    def places(self) -> tuple[Location, ...]:
        """Locations of the stored dataset and of the dataset that `with_target` paired with it."""
        places = () if self.place is None else (self.place,)
        paired = self._columns.paired
        return places if paired is None else (*places, *paired.dataset.places)

    @property
    def accesses(self) -> tuple[Access, ...]:
        """Storage options that other processes need, besides addresses, to open all `places`."""
        return tuple(place.access for place in self.places if place.access is not None)

    @property
    def attrs(self) -> dict[str, Any]:
        """Attributes of a stored dataset (see `schema.DatasetAttrs`); empty for arrays in memory."""
        return {} if self._columns.attrs is None else self._columns.attrs.to_json()

    @property
    def is_stored(self) -> bool:
        """True if another process can open the dataset from its `spec`."""
        return self._columns.shared

    @property
    def reads_at_once(self) -> int:
        """Best number of row ranges to read in parallel: 1 from memory or a disk, more over a network."""
        return self._columns.x.reads_at_once

    @property
    def known_finite(self) -> bool:
        """True if the rows cannot hold NaN or infinity: integers, or stored rows that the writer checked."""
        return self.dtype.kind != "f" or self._columns.attrs is not None

    def __len__(self) -> int:
        return self.n_rows

    def __getitem__(self, rows: slice) -> Dataset:
        if not isinstance(rows, slice):
            raise TypeError(
                f"a Dataset is sliced by rows, ds[a:b], not by {type(rows).__name__}; read_x reads rows"
            )
        start, stop, step = rows.indices(self.n_rows)
        if step != 1:
            raise DataError(f"ds[{rows.start}:{rows.stop}:{step}]: rows must be contiguous: use step 1")
        if stop <= start:
            raise DataError(
                f"ds[{rows.start}:{rows.stop}] of a dataset with {self.n_rows} rows contains no row"
            )
        return Dataset(self._columns, self._start + start, self._start + stop)

    def pieces(self, start: int = 0, stop: int | None = None) -> list[tuple[int, int]]:
        """Split rows into ranges (start, stop) that end where chunks end; one range for rows in memory."""
        stop = self.n_rows if stop is None else stop
        a, b = self._to_source_rows(start, stop)
        return [(u - self._start, v - self._start) for u, v in self._columns.x.pieces(a, b)]

    @property
    def extent(self) -> tuple[int, int]:
        """Range (start, stop) of the rows of this slice in the whole stored dataset or the whole arrays."""
        return self._start, self._stop

    def shards(self, start: int, stop: int) -> list[tuple[str, int, int]]:
        """Return (file, first row, one past the last row) of each shard of rows `start:stop`."""
        return self._columns.x.shards(*self._to_source_rows(start, stop))

    def read_x(self, start: int, stop: int) -> DenseOrCsr:
        """Return the rows `start:stop`, each flattened to one axis.

        Parameters
        ----------
        start, stop : int
            Row numbers of this dataset, 0 <= start <= stop <= n_rows.

        Returns
        -------
        ndarray or scipy.sparse.csr_array (stop - start, n_features)
            Rows in the stored dtype. A CSR dataset gives CSR rows with ascending columns. Rows in memory are
            returned as a view; do not write to it.

        Raises
        ------
        DataError
            If a shard is missing or damaged; the message names its file and rows.
        """
        a, b = self._to_source_rows(start, stop)
        rows = self._columns.x.read(a, b)
        return rows if self.is_sparse else rows.reshape(b - a, self.n_features)

    def read_y(self, start: int, stop: int) -> DenseOrCsr:
        """Return the labels, targets or multi-labels of the rows `start:stop` as they were passed in.

        Parameters
        ----------
        start, stop : int
            Row numbers of this dataset.

        Returns
        -------
        ndarray (stop - start,), ndarray (stop - start, v) or scipy.sparse.csr_array (stop - start, v)
            Labels, targets or multi-labels (see `y_kind`).

        Raises
        ------
        DataError
            If there is no `y`, or its file is missing or damaged.
        """
        return self._columns.read_y(*self._to_source_rows(start, stop), self._name())

    def read_codes(
        self, start: int, stop: int, classes: np.ndarray | None = None, *, unlabelled: bool = False
    ) -> np.ndarray:
        """Return the index of each label in `classes` (default: the dataset's own), int32 (stop - start,).

        A label outside `classes` raises a DataError; `unlabelled` maps the label -1 to the index -1 instead.
        """
        rows, whole = self._to_source_rows(start, stop), (self._start, self._stop)
        return self._columns.read_codes(rows, classes, self._name(), whole, unlabelled)

    def read_targets(self, start: int, stop: int) -> np.ndarray:
        """Return the binary outputs (0 or 1) of the rows `start:stop`, uint8 (stop - start, n_targets).

        The outputs are targets, multi-labels, or the rows that `with_target` paired. The result may be a view
        of arrays in memory; do not write to the result.
        """
        return self._columns.read_targets(*self._to_source_rows(start, stop), self._name())

    def read_binary(self, start: int, stop: int) -> np.ndarray:
        """Return the rows `start:stop` as zeros and ones, uint8 (stop - start, n_features)."""
        return as_binary(self.read_x(start, stop), self._start + start, self._name())

    def read_weight(self, start: int, stop: int) -> np.ndarray | None:
        """Return the weights of the rows `start:stop`, float64, or None if the rows have no weights."""
        a, b = self._to_source_rows(start, stop)
        return None if self._columns.weight is None else self._columns.weight.read(a, b)

    def y_options(self) -> schema.OutputOptions:
        """Return the arguments of `create_dataset` for a new dataset with the same kind of `y`."""
        return self._columns.y_options(self._name())

    def lazy(self, start: int, stop: int) -> tuple[da.Array, da.Array | DenseOrCsr | None] | None:
        """Return rows (a dask array) and labels (or None); return None if the rows are no dask array."""
        if not isinstance(self._columns.x, DaskRows):
            return None
        a, b = self._to_source_rows(start, stop)
        y = self._columns.y
        if isinstance(y, PairedRows):
            found = y.slice_rows(a, b).lazy(0, b - a)
            if found is None and y.dataset.is_stored:
                raise DataError(
                    f"{self._name()} is a dask array, but its target is the stored dataset {y.dataset.url}: "
                    "store both with Dataset.save, or pass both as dask arrays"
                )
            return self._columns.x.lazy(a, b), y.read(a, b) if found is None else found[0]
        labels = y.lazy(a, b) if isinstance(y, DaskRows) else None if y is None else y.read(a, b)
        return self._columns.x.lazy(a, b), labels

    def with_weight(self, weight: WeightsLike) -> Dataset:
        """Return the same rows with new weights (n_rows,), which stay in memory."""
        weights = schema.check_weight(weight, self.n_rows, "weight")
        return Dataset(self._columns.with_weight(OffsetColumn(weights, self._start)), self._start, self._stop)

    def with_target(self, target: Dataset) -> Dataset:
        """Return the same rows with row i of `target` as the outputs of row i; nothing is copied.

        Parameters
        ----------
        target : Dataset
            Dataset with the same number of rows, which replace the labels of this dataset. Models with binary
            outputs require zeros and ones.

        Returns
        -------
        Dataset
            Dataset whose `read_y` and `read_targets` return (rows, v), where v is `target.n_features`.

        Raises
        ------
        DataError
            If the numbers of rows differ.

        Examples
        --------
        >>> x, v = Dataset.from_arrays(np.zeros((5, 3))), Dataset.from_arrays(np.eye(5))
        >>> both = x.with_target(v)
        >>> both, both[3:].read_targets(0, 1).tolist()
        (<Dataset 5 rows x (3,) float64, 5 targets>, [[0, 0, 0, 1, 0]])
        """
        if target.n_rows != self.n_rows:
            there = f" of {target.url}" if target.url else ""
            raise DataError(
                f"{self._name()} has {self.n_rows} rows, but its target{there} has {target.n_rows}: row i of "
                "the target belongs to row i of the dataset; use the same rows of both, ds[a:b]"
            )
        paired = PairedRows(target, self._start, self._columns.x.shape[0])
        return Dataset(self._columns.with_target(paired), self._start, self._stop)

    def without_labels(self) -> Dataset:
        """Return the same rows without labels or targets, for example to fit clusters; nothing is copied.

        Examples
        --------
        >>> ds = Dataset.from_arrays(np.zeros((4, 3)), [0, 1, 0, 1])
        >>> ds.without_labels()
        <Dataset 4 rows x (3,) float64>
        """
        return Dataset(self._columns.without_y(), self._start, self._stop) if self.has_y else self

    def fingerprint(self) -> str:
        """Return the SHA-256 of content and row range, in hexadecimal; only arrays in memory are read."""
        own, paired = self._own_fingerprint(), self._columns.paired
        if paired is None:
            return own
        other = paired.slice_rows(self._start, self._stop).fingerprint()
        return hashlib.sha256(f"{own} target {other}".encode()).hexdigest()

    def _own_fingerprint(self) -> str:
        """Return the fingerprint without the rows of the dataset that `with_target` paired with this one."""
        whole = self._columns.fingerprint
        if self._columns.attrs is None:
            return _hash_rows(self)
        if self._columns.weight_is_own:
            whole = hashlib.sha256(f"{whole}+{_hash_weight(self)}".encode()).hexdigest()
        if self._columns.y_is_dropped:
            whole = hashlib.sha256(f"{whole} without labels".encode()).hexdigest()
        if (self._start, self._stop) == (0, self._columns.x.shape[0]):
            return whole
        return hashlib.sha256(f"{whole}[{self._start}:{self._stop}]".encode()).hexdigest()

    def spec(self) -> schema.DatasetSpec:
        """Return a JSON-able spec with which any process opens these rows; DataError for rows in memory."""
        if not self.is_stored:
            raise DataError(
                f"{self._name()} is in the memory of this process, so no other process can open it; write it "
                "where all processes can read it, with Dataset.save('rows.zarr'), and use the dataset that "
                "save returns"
            )
        assert self.url is not None
        spec: schema.DatasetSpec = {
            "url": self.url,
            "start": self._start,
            "stop": self._stop,
            "fingerprint": self._columns.fingerprint,
        }
        if self.place is not None and self.place.access is not None:
            spec["access"] = self.place.access.mark
        if self._columns.y_is_dropped:
            spec["without_labels"] = True
        paired = self._columns.paired
        return (
            spec if paired is None else {**spec, "target": paired.slice_rows(self._start, self._stop).spec()}
        )

    def save(
        self,
        url: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        progress: Callable[[int, int], None] | None = None,
        **layout: Unpack[LayoutOptions],
    ) -> Dataset:
        """Write the rows to a new stored dataset, one shard at a time, and open the new dataset.

        Parameters
        ----------
        url : str
            Path or address of the new dataset; an existing dataset is an error unless `overwrite`.
        overwrite : bool, default False
            Replace an existing dataset at `url`.
        progress : callable, optional
            Function that is called with (rows done, total rows).
        **layout
            Arguments `chunk_rows`, `shard_rows` and `compressor` of `create_dataset`.

        Returns
        -------
        Dataset
            The stored dataset.

        Raises
        ------
        DataError
            If `url` has content that may not be replaced, or the rows cannot be read or written.

        Examples
        --------
        >>> ds = Dataset.from_arrays(np.eye(3), [0, 1, 0])
        >>> ds.save("memory://doc-save", overwrite=True)
        <Dataset 3 rows x (3,) float64, 2 classes, 'memory://doc-save'>
        """
        copy_rows(self, url, overwrite=overwrite, progress=progress, **layout)
        return open_dataset(url)

    def to_dask(self) -> tuple[da.Array, da.Array | None, da.Array | None]:
        """Return the columns as dask arrays; rows are read only when the arrays are computed.

        Returns
        -------
        x : dask.array.Array (n, ...)
            Rows, one block per chunk on disk. Each task of a stored dataset opens the dataset where it runs.
        y : dask.array.Array (n,) or (n, v), or None
            Labels or targets.
        weight : dask.array.Array (n,) or None
            Weights, float64.

        Raises
        ------
        DataError
            If a column is CSR.

        Examples
        --------
        >>> x, y, _ = Dataset.from_arrays(np.eye(4), [0, 1, 0, 1]).to_dask()
        >>> x.mean(axis=0).compute().tolist(), y.compute().tolist()
        ([0.25, 0.25, 0.25, 0.25], [0, 1, 0, 1])
        """
        return as_dask(self)

    def __repr__(self) -> str:
        y = f", {outputs}" if (outputs := self._outputs()) else ""
        weight = ", weighted" if self.has_weight else ""
        part = "" if self._is_whole else f"rows {self._start:,}:{self._stop:,} of "
        place = f", {part}{self.url!r}" if self.url else ""
        rows = f"{self.n_rows:,} {'CSR ' if self.is_sparse else ''}rows"
        return f"<Dataset {rows} x {self.feature_shape} {self.dtype}{y}{weight}{place}>"

    @property
    def _is_whole(self) -> bool:
        return (self._start, self._stop) == (0, self._columns.x.shape[0])

    def _outputs(self) -> str:
        """Return text that describes `y`, such as "10 classes", without a pass over the labels."""
        if self.n_targets is not None:
            return f"{self.n_targets:,} {'targets' if self.y_kind == 'targets' else 'topics (multi-label)'}"
        are_known = self._columns.attrs is not None or "classes" in self._columns.__dict__
        if self.has_y and are_known and self.classes is not None:
            return f"{len(self.classes):,} classes"
        return "labels" if self.has_y else ""

    def _name(self) -> str:
        return f"dataset {self.url}" if self.url else "the dataset"

    def _to_source_rows(self, start: int, stop: int) -> tuple[int, int]:
        """Convert rows of this slice to rows of the whole dataset; raise an IndexError for rows outside."""
        if not 0 <= start <= stop <= self.n_rows:
            raise IndexError(f"rows {start}:{stop} are outside of the rows 0:{self.n_rows} of {self._name()}")
        return self._start + start, self._start + stop


def open_dataset(
    url: str | os.PathLike[str] | Location, *, storage_options: Mapping[str, Any] | None = None
) -> Dataset:
    """Open a stored dataset.

    Parameters
    ----------
    url : str or path-like
        A local path, `file:///path`, `s3://bucket/key`, `az://container/key`, `memory://name`, or another
        address.
    storage_options : dict, optional
        Options of fsspec's file system for the address, for example ``{"anon": True}`` or
        ``{"endpoint_url": …, "key": …, "secret": …}`` for `s3://`; by default the environment has them.
        Options are sent to the workers of a Dask cluster and are part of a pickled dataset, but they are
        never written to a run folder or a model.

    Returns
    -------
    Dataset
        The stored rows; only metadata are read.

    Raises
    ------
    DataError
        If there is no dataset, its format version is newer, its writer did not finish, or its metadata are
        damaged.

    Examples
    --------
    >>> import numpy as np
    >>> rows = Dataset.from_arrays(np.zeros((4, 3), "u1"), [0, 1, 0, 1])
    >>> _ = rows.save("memory://doc-open", overwrite=True)
    >>> open_dataset("memory://doc-open")
    <Dataset 4 rows x (3,) uint8, 2 classes, 'memory://doc-open'>
    """
    return Dataset(DatasetColumns(**open_columns(find_location(url, storage_options))))


def _reopen(spec: schema.DatasetSpec, accesses: tuple[Access, ...]) -> Dataset:
    """Return an unpickled dataset that is opened at its first use, with the storage options `accesses`."""
    # An error while Dask unpickles would close the connection of a worker instead of failing the task. A
    # scheduler also unpickles datasets that it only forwards, so nothing is opened here.
    ds = Dataset.__new__(Dataset)
    ds._spec_and_accesses, ds._start, ds._stop = (spec, accesses), spec["start"], spec["stop"]
    return ds


@functools.lru_cache(maxsize=16)
def _open_cached(url: str, mark: str | None, stamp: Hashable) -> Dataset:
    """Open a dataset; return the same object again until `stamp`, that of its metadata file, changes."""
    return open_dataset(locate_recorded(url, mark))


def _hash_rows(ds: Dataset) -> str:
    """Return the SHA-256 of the rows, labels and weights in memory, in hexadecimal, from one pass."""
    digest = hashlib.sha256(f"{ds.n_rows} {ds.feature_shape} {ds.dtype.str}".encode())
    source = ds._columns.x
    if ds.is_sparse:
        digest.update(b"csr")
    if isinstance(source, DaskRows):
        # Hash the name of a dask array, because its content would have to be computed, in a full pass.
        digest.update(f"dask {source.token} {ds._start}".encode())
    for a, b in [] if isinstance(source, DaskRows) else ds.pieces():
        for u in range(a, b, _HASH_ROWS):
            _hash_into(digest, ds.read_x(u, min(u + _HASH_ROWS, b)))
    if ds.has_y and ds._columns.paired is None:
        y = ds.read_y(0, ds.n_rows)
        kind = "" if ds.y_kind == "labels" else f" {ds.y_kind} {ds.n_targets}"
        digest.update(f"y {y.dtype.str}{kind}".encode())
        _hash_into(digest, y)
    if not ds.has_weight:
        return digest.hexdigest()
    return f"{digest.hexdigest()[:32]}{_hash_weight(ds)[:32]}"


def _hash_weight(ds: Dataset) -> str:
    return hashlib.sha256(np.ascontiguousarray(ds.read_weight(0, ds.n_rows)).tobytes()).hexdigest()


def _hash_into(digest: hashlib._Hash, rows: DenseOrCsr) -> None:
    parts = (rows,) if isinstance(rows, np.ndarray) else unpack_csr(rows)
    for part in parts:
        digest.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
