"""Write the shards of a dataset in any order; each shard has one writer at a time."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np

from scalelatent.data import schema
from scalelatent.data.checksums import (
    chunk_crcs,
    fingerprint_of,
    shard_digest,
    split_crcs,
    write_crcs,
)
from scalelatent.data.csr import check_finite, is_sparse
from scalelatent.data.csr_store import CsrGroups
from scalelatent.data.layout import WRITE_CONFIG, packing_of, tile_columns_of
from scalelatent.data.read.sources import CsrSource
from scalelatent.data.read.stored import (
    MARKER_FOLDER,
    has_column,
    open_array,
    own_columns,
    read_attrs,
    write_attrs,
)
from scalelatent.errors import DataError
from scalelatent.storage.disk import Location, locate
from scalelatent.storage.write_checks import explain_os_errors

if TYPE_CHECKING:
    import zarr

    from scalelatent.data.schema import CrcTable, Label
    from scalelatent.kernels.arrays import DenseOrCsr
    from scalelatent.typing import LabelsLike, RowsLike, WeightsLike


Column: TypeAlias = "zarr.Array | CsrGroups"


class ShardWriter:
    """Writer of the shards of one dataset; other threads and processes may write other shards."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self.attrs = read_attrs(location)
        import zarr

        from scalelatent.storage.zarrstore import WatchedStore

        store = WatchedStore(location.zarr_store(read_only=False), self._record_crcs)
        group = zarr.open_group(store, mode="r+", zarr_format=3)

        kinds = {"x": self.attrs.x_kind == "csr", "y": self.attrs.y_kind == "multilabel"}

        def column(name: str) -> Column:
            if kinds.get(name):
                return CsrGroups(location, group, name)
            return open_array(group, name, location.url).with_config(WRITE_CONFIG)

        def optional(name: str) -> Column | None:
            return column(name) if has_column(location, self.attrs, name) else None

        self._x, self._y, self._weight = column("x"), optional("y"), optional("weight")
        self._tile = None if kinds["x"] else tile_columns_of(self._x)
        self._group = group
        self._rewritten: dict[int, dict[str, list[int]]] = {}
        self._found_crcs: dict[str, list[int]] = {}  # file -> checksums of its chunks
        self._shard_chunks = {  # dense column -> chunks per shard; None if a shard is a chunk
            name: None if a.shards is None else a.shards[0] // a.chunks[0]
            for name, a in self._columns().items()
            if not isinstance(a, CsrGroups)
        }
        self.next_step = "resume with --resume (resume=True): the shards written before are intact"
        """Last step in the error message about a full disk; each caller sets its own."""
        self.is_only_writer = False
        """True if no other writer ever wrote here, so that a shard needs no deletion before the write."""

    @classmethod
    def attach(cls, url: str | os.PathLike[str]) -> Self:
        """Return a writer of a dataset that this or another process has created."""
        return cls(locate(url))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self).attach, (self.url,)

    @property
    def url(self) -> str:
        return self._location.url

    @property
    def n_rows(self) -> int:
        return int(self._x.shape[0])

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self._x.dtype)

    @property
    def y_dtype(self) -> np.dtype | None:
        """Stored dtype of the labels, or None without labels."""
        return None if self._y is None else np.dtype(self._y.dtype)

    @property
    def weighted(self) -> bool:
        """True if each row has a weight."""
        return self._weight is not None

    @property
    def shard_rows(self) -> int:
        return int((self._x.shards or self._x.chunks)[0])

    @property
    def n_tiles(self) -> int:
        """Number of tiles: groups of columns with separate shards; 1 if a shard holds whole rows."""
        return 1 if self._tile is None else -(-int(self._x.shape[1]) // self._tile)

    @property
    def n_shards(self) -> int:
        """Number of shards, which are numbered along the columns first and then along the rows."""
        return -(-self.n_rows // self.shard_rows) * self.n_tiles

    def shard_bounds(self, shard: int) -> tuple[int, int]:
        """Return the rows `(start, stop)` of a shard."""
        if not 0 <= shard < self.n_shards:
            raise IndexError(f"{self.url} has shards 0 to {self.n_shards - 1}, not {shard}")
        first = shard // self.n_tiles * self.shard_rows
        return first, min(first + self.shard_rows, self.n_rows)

    def shard_columns(self, shard: int) -> tuple[int, int]:
        """Return the columns `(start, stop)` of a shard: all columns, unless shards also split columns."""
        if self._tile is None:
            return 0, schema.n_features(self.attrs.feature_shape)
        first = shard % self.n_tiles * self._tile
        return first, min(first + self._tile, int(self._x.shape[1]))

    def is_done(self, shard: int) -> bool:
        """Return whether a shard is written, or, in a finished dataset, whether its digest still matches."""
        self.shard_bounds(shard)
        if not self.attrs.complete:
            marker = self._read_marker(shard)
            return marker is not None and all(self._location.has(k) for k in self._files(shard, marker))
        return self._verify(shard)

    def missing(self) -> list[int]:
        return [shard for shard in range(self.n_shards) if not self.is_done(shard)]

    def write_shard(
        self,
        shard: int,
        x: RowsLike,
        y: LabelsLike | None = None,
        weight: WeightsLike | None = None,
    ) -> None:
        """Write one whole shard, after deleting the files that an earlier attempt left.

        Parameters
        ----------
        shard : int
            Number of the shard.
        x : ndarray (rows, *feature_shape) or (rows, n_features), or scipy sparse (rows, n_features)
            All rows of the shard (in a tile only its columns), in the dtype of the dataset or a dtype that
            fits into it. Sparse for a CSR dataset, with columns in any order.
        y : array-like (rows,), (rows, n_targets) or scipy sparse (rows, n_targets), optional
            Labels, targets or multi-labels; required if the dataset has them.
        weight : array-like (rows,), optional
            Weights; required if the dataset has weights.

        Raises
        ------
        DataError
            If the rows have another shape or dtype, contain NaN or infinity, or have an unknown label; if the
            disk is full (this shard is then removed, and the others stay); or if the dataset is finished and
            these rows differ from its rows.
        """
        start, stop = self.shard_bounds(shard)
        first, last = self.shard_columns(shard)
        flat = stop - start, last - first
        shape = flat if self._tile is not None else (stop - start, *self.attrs.feature_shape)
        rows = _check_and_cast(self._x, x, [shape, flat], start, f"{self.url}: rows {start}:{stop}")
        labels, distinct = self._encode_y(y, start, stop)
        weights = self._encode_weight(weight, start, stop)
        digest = shard_digest(rows, labels, weights)
        if self.attrs.complete and digest != self._expected_digest(shard):
            raise DataError(
                f"dataset {self.url} is finished, and its rows {start}:{stop} differ from the given rows. A "
                "finished dataset cannot be changed: write another one, or replace this one with --overwrite "
                "(overwrite=True)"
            )
        with self._delete_shard_on_error(shard, start, stop):
            for target, values in ((self._y, labels), (self._weight, weights), (self._x, rows)):
                if target is not None and self._tile is None:
                    target[start:stop] = values
                elif target is not None and not isinstance(target, CsrGroups):
                    target[start:stop, first:last] = values
            entries = {f"{name}_nnz": int(c.nnz) for name, c in (("x", rows), ("y", labels)) if is_sparse(c)}
            crcs = self._pop_crcs(shard)
            if self.attrs.complete:
                self._rewritten[shard] = crcs
            else:
                self._write_marker(
                    shard, {"digest": digest.hex(), "labels": distinct, "crc": crcs, **entries}
                )

    def _encode_y(
        self, y: LabelsLike | None, start: int, stop: int
    ) -> tuple[DenseOrCsr | None, list[Label] | None]:
        """Check `y` of the rows `start:stop`; return the stored form and, for labels, the distinct labels."""
        name = (
            f"{self.url}: {'labels' if self.attrs.y_kind == 'labels' else 'targets'} of rows {start}:{stop}"
        )
        if (y is None) != (self._y is None):
            raise DataError(
                f"{name} are {'missing: pass y' if y is None else 'not part of this dataset: leave out y'}"
            )
        if y is None or self._y is None:
            return None, None
        if self.attrs.y_kind != "labels":
            return _check_and_cast(self._y, y, [(stop - start, self._y.shape[1])], start, name), None
        labels, dtype = schema.as_labels(y, name), np.dtype(self._y.dtype)
        if len(labels) != stop - start:
            raise DataError(f"{name}: {len(labels)} labels for {stop - start} rows; give one label per row")
        distinct = schema.distinct_labels(labels, start, self.url)
        known = self.attrs.own_classes
        if known is not None:
            codes = schema.encode_labels(labels, np.asarray(known), start, self.url)
            if self.attrs.codes:
                return codes.astype(dtype), None
        stored = labels.astype(dtype)
        if not np.array_equal(stored, labels):
            i = int(np.flatnonzero(stored != labels)[0])
            raise DataError(f"{name}: label {labels[i]!r} of row {start + i} does not fit into {dtype}")
        few = len(distinct) <= schema.MAX_CLASSES
        return stored, distinct.astype(dtype).tolist() if few else None

    def _encode_weight(self, weight: WeightsLike | None, start: int, stop: int) -> np.ndarray | None:
        name = f"{self.url}: weights of rows {start}:{stop}"
        if (weight is None) != (self._weight is None):
            raise DataError(
                f"{name} are {'missing: pass weight' if weight is None else 'not part of this dataset'}"
            )
        return None if weight is None else schema.check_weight(weight, stop - start, name, start)

    def shrink(self, n_rows: int) -> None:
        """Reduce the number of rows to `n_rows`; shards that end at or before row `n_rows` stay unchanged."""
        last = n_rows // self.shard_rows * self.n_tiles
        if not 1 <= n_rows <= self.n_rows:
            raise DataError(
                f"dataset {self.url} has {self.n_rows} rows; it cannot shrink to {n_rows}; give 1 "
                f"to {self.n_rows}"
            )
        written = [i for i in range(last, self.n_shards) if self._read_marker(i) is not None]
        if n_rows < self.n_rows and written:
            raise DataError(
                f"dataset {self.url} cannot shrink to {n_rows} rows: shard {written[0]}, which begins at row "
                f"{written[0] * self.shard_rows}, is already written"
            )
        with explain_os_errors(self._location, f"shrinking it to {n_rows} rows", self.next_step):
            for column in (self._x, self._y, self._weight):
                if isinstance(column, CsrGroups):
                    raise DataError(f"dataset {self.url} has CSR rows; only dense datasets can shrink")
                if column is not None:
                    column.resize((n_rows, *column.shape[1:]))
            self._group["digest"].resize((self.n_shards, 16))

    def note(self, values: dict[str, Any]) -> None:
        """Add `values` to the provenance of the dataset; call this after the last row and before `finish`."""
        if values:
            self.attrs = replace(self.attrs, provenance={**self.attrs.provenance, **values})

    def finish(self) -> None:
        """Check that every shard is written, write digests and checksums, and mark the dataset complete."""
        markers = self._all_markers()
        if not self.attrs.complete:
            digests = np.array([list(bytes.fromhex(m["digest"])) for m in markers], dtype=np.uint8)
            classes = self._classes(markers)
            with explain_os_errors(self._location, "finishing the dataset", self.next_step):
                self._group["digest"][...] = digests
                for name, column in (("x", self._x), ("y", self._y)):
                    if isinstance(column, CsrGroups):
                        column.write_entry_counts([m[f"{name}_nnz"] for m in markers])
                crcs = {
                    name: np.array([crc for m in markers for crc in m["crc"][name]], np.uint32)
                    for name in self._columns()
                }
                crc = self._write_crcs(crcs)
                kinds = self.dtype, self.y_dtype
                fingerprint = fingerprint_of(
                    self.attrs, self.n_rows, *kinds, self.shard_rows, classes, digests
                )
                done = replace(self.attrs, fingerprint=fingerprint, classes=classes, crc=crc, complete=True)
                # This write is the last one, because it lets readers open the dataset.
                write_attrs(self._location, done)
            self.attrs = done
        elif self._rewritten and self.attrs.crc is not None:
            self._update_crc_table()
        self._location.delete_tree(MARKER_FOLDER)

    def _read_marker(self, shard: int) -> dict[str, Any] | None:
        """Return the marker of a shard (digest, labels, checksums); None if it is missing or damaged."""
        raw = self._location.read(_marker_key(shard))
        return None if raw is None else _parse_marker(raw)

    def _write_marker(self, shard: int, marker: dict[str, Any]) -> None:
        """Write the marker of a shard, after the last file of the shard."""
        self._location.write(_marker_key(shard), json.dumps(marker).encode())

    def _all_markers(self) -> list[dict[str, Any]]:
        """Return the markers of all shards; raise a `DataError` if a shard is not written."""
        if self.attrs.complete:
            return []
        names = set(self._location.keys(MARKER_FOLDER))
        shards = [i for i in range(self.n_shards) if os.path.basename(_marker_key(i)) in names]
        texts = self._location.read_ranges([_marker_key(i) for i in shards])
        found = zip(shards, map(_parse_marker, texts), strict=True)
        markers = {i: marker for i, marker in found if marker is not None}
        missing = [i for i in range(self.n_shards) if i not in markers]
        if missing:
            a, b = self.shard_bounds(missing[0])
            raise DataError(
                f"dataset {self.url} cannot be finished: {len(missing)} of {self.n_shards} shards are not "
                f"written, the first is shard {missing[0]} (rows {a}:{b}); write them, then finalize again"
            )
        return list(markers.values())

    def _classes(self, markers: list[dict[str, Any]]) -> list[Label] | None:
        if self._y is None or self.attrs.classes is not None or self.attrs.y_kind != "labels":
            return self.attrs.classes
        classes: set[Label] = set()
        for marker in markers:
            if marker["labels"] is None:
                return None
            classes.update(marker["labels"])
        return sorted(classes) if len(classes) <= schema.MAX_CLASSES else None

    def _record_crcs(self, key: str, data: np.ndarray) -> None:
        """Remember the checksums of the chunks in `data`, which zarr will write to the file `key`."""
        name, _, rest = key.partition("/")
        if name in self._shard_chunks and rest.startswith("c/"):
            self._found_crcs[key] = chunk_crcs(data, self._shard_chunks[name])

    def _pop_crcs(self, shard: int) -> dict[str, list[int]]:
        """Remove and return the checksums of the chunks of a shard that was just written, by column."""
        return {
            name: (
                column.crcs.pop(shard)
                if isinstance(column, CsrGroups)
                else self._found_crcs.pop(self._shard_key(name, shard))
            )
            for name, column in self._columns().items()
        }

    def _write_crcs(self, parts: dict[str, np.ndarray]) -> CrcTable:
        packing = {
            name: column.packing if isinstance(column, CsrGroups) else packing_of(column)
            for name, column in self._columns().items()
        }
        return write_crcs(self._group, parts, packing, self.shard_rows)

    def _update_crc_table(self) -> None:
        """Update the checksums of rewritten shards, because another compressor may have packed the rows."""
        columns = own_columns(self._location, replace(self.attrs, crc=None))
        assert self.attrs.crc is not None
        parts = split_crcs(self._location, self.attrs.crc)
        if parts is None:  # the table is lost, so all shards were rewritten
            parts = {name: np.zeros(column.n_crcs, np.uint32) for name, column in columns.items()}
        for name, column in columns.items():
            if len(parts.get(name, ())) != column.n_crcs:
                return  # other software repacked the chunks, so the table does not fit
            for shard, crcs in self._rewritten.items():
                parts[name][column.crcs_of(shard)] = crcs[name]
        self.attrs = replace(self.attrs, crc=self._write_crcs(parts))
        write_attrs(self._location, self.attrs)

    def _columns(self) -> dict[str, Column]:
        columns = {"x": self._x, "y": self._y, "weight": self._weight}
        return {name: column for name, column in columns.items() if column is not None}

    def _files(self, shard: int, marker: dict[str, Any]) -> list[str]:
        """Return the keys (paths in the dataset) of the files of a written shard."""
        keys: list[str] = []
        for name, column in self._columns().items():
            if isinstance(column, CsrGroups):
                keys += column.keys(shard, marker.get(f"{name}_nnz", 0))
            else:
                keys.append(self._shard_key(name, shard))
        return keys

    def _shard_key(self, name: str, shard: int) -> str:
        """Return the key of the file that holds a shard of the array `name`."""
        row, tile = divmod(shard, self.n_tiles)
        rest = self._columns()[name].shape[1:]
        return "/".join([name, "c", str(row), *(str(tile) for _ in rest)])

    def _paths_to_delete(self, shard: int) -> list[str]:
        """Return the keys to delete before a shard is written: folders of row groups, files of arrays."""
        return [
            column.folder(shard) if isinstance(column, CsrGroups) else self._shard_key(name, shard)
            for name, column in self._columns().items()
        ]

    @contextlib.contextmanager
    def _delete_shard_on_error(self, shard: int, start: int, stop: int) -> Iterator[None]:
        """Delete a shard's old files before the ``with`` statement, and new ones if the statement fails."""

        def remove() -> None:
            if not self.attrs.complete:
                self._location.delete(_marker_key(shard))
            for key in self._paths_to_delete(shard):
                self._location.delete_tree(key)

        doing = f"writing shard {shard} (rows {start}:{stop})"
        with explain_os_errors(self._location, doing, self.next_step):
            if not self.is_only_writer:
                remove()
            try:
                yield
            except BaseException:
                with contextlib.suppress(OSError):
                    remove()
                raise

    def _verify(self, shard: int) -> bool:
        try:
            columns = own_columns(self._location, self.attrs)
            bounds, tile = self.shard_bounds(shard), shard % self.n_tiles
            parts: list[DenseOrCsr] = [column.read_tile(*bounds, tile) for column in columns.values()]
        except DataError:
            return False
        return shard_digest(*parts) == self._expected_digest(shard)

    def _expected_digest(self, shard: int) -> bytes:
        """Return the expected digest of a shard of a finished dataset."""
        return bytes(self._group["digest"][shard].tobytes())


def _marker_key(shard: int) -> str:
    """Return the key of the marker: a file that exists from the write of a shard until `finish`."""
    return f"{MARKER_FOLDER}/{shard:06d}.json"


def _parse_marker(raw: bytes) -> dict[str, Any] | None:
    try:
        return dict(json.loads(raw))
    except ValueError:
        return None


def _check_and_cast(
    column: Column, values: RowsLike | LabelsLike, shapes: list[tuple[int, ...]], start: int, name: str
) -> DenseOrCsr:
    """Check rows or targets that begin at row `start`; return them in the dtype of the column.

    The result has the shape `shapes[0]`, which is that of the shard; the other `shapes` are also accepted.
    """
    if is_sparse(values) != isinstance(column, CsrGroups):
        kind, step = "dense", "pass x.toarray()"
        if isinstance(column, CsrGroups):
            kind, step = "CSR", "pass a scipy sparse array"
        raise DataError(f"{name} were given as {type(values).__name__}, but this column is {kind}; {step}")
    given: CsrSource | np.ndarray
    if is_sparse(values):
        given = CsrSource(values, name, start)
    else:
        schema.refuse_masked(values, name, start)
        given = np.asarray(values)
    shape, dtype = given.shape, given.dtype
    if shape not in shapes:
        raise DataError(f"{name} were given with shape {shape}, but this shard has shape {shapes[0]}")
    if not np.can_cast(dtype, column.dtype, "safe"):
        raise DataError(
            f"{name} are {dtype}, which does not fit into the dataset's {column.dtype}; convert them"
        )
    rows = given.read(0, shape[0]) if isinstance(given, CsrSource) else given
    check_finite(rows, start, name)
    if not isinstance(rows, np.ndarray):
        return rows.astype(column.dtype, copy=False)
    return np.ascontiguousarray(rows, dtype=column.dtype).reshape(shapes[0])
