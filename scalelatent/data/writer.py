"""Writing a dataset's shards: in any order, one writer each; complete only when the last one is there."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.errors import DataError

from . import schema
from .layout import WRITE_CONFIG
from .store import Location, locate
from .stored import MARKERS, array, open_group, read_attrs

if TYPE_CHECKING:
    from .dataset import Dataset

__all__ = ["DatasetWriter", "explain_os_errors"]


class DatasetWriter:
    """Writes the shards of one dataset; made by `create_dataset` or, in another process, by `attach`.

    Different shards may be written by different threads and processes at the same time. A shard that is
    written twice with the same rows is the same file.
    """

    def __init__(self, location: Location) -> None:
        self._location = location
        self.attrs = read_attrs(location)
        group = open_group(location, read_only=False)

        def column(name: str) -> Any:
            if name != "x" and not location.has(f"{name}/zarr.json"):
                return None
            return array(group, name, location.url).with_config(WRITE_CONFIG)

        self._x, self._y, self._weight = column("x"), column("y"), column("weight")
        self._group = group

    @classmethod
    def attach(cls, url: str | os.PathLike[str]) -> DatasetWriter:
        """The writer of a dataset that was created before, in this or another process."""
        return cls(locate(url))

    def __reduce__(self) -> tuple[Any, ...]:
        return DatasetWriter.attach, (self.url,)

    @property
    def url(self) -> str:
        """Where the dataset lies."""
        return self._location.url

    @property
    def n_rows(self) -> int:
        """Rows of the whole dataset."""
        return int(self._x.shape[0])

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the rows."""
        return np.dtype(self._x.dtype)

    @property
    def y_dtype(self) -> np.dtype[Any] | None:
        """Type of the labels as they are stored."""
        return None if self._y is None else np.dtype(self._y.dtype)

    @property
    def weighted(self) -> bool:
        """Whether each row has a weight."""
        return self._weight is not None

    @property
    def shard_rows(self) -> int:
        """Rows of a shard."""
        return int((self._x.shards or self._x.chunks)[0])

    @property
    def n_shards(self) -> int:
        """Number of shards."""
        return -(-self.n_rows // self.shard_rows)

    def shard_bounds(self, shard: int) -> tuple[int, int]:
        """Rows `(start, stop)` of a shard."""
        if not 0 <= shard < self.n_shards:
            raise IndexError(f"{self.url} has shards 0 to {self.n_shards - 1}, not {shard}")
        return shard * self.shard_rows, min((shard + 1) * self.shard_rows, self.n_rows)

    def is_done(self, shard: int) -> bool:
        """Whether a shard is written; in a finished dataset, whether its content still has its digest."""
        self.shard_bounds(shard)
        if not self.attrs.complete:
            return self._marker(shard) is not None and all(self._location.has(k) for k in self._files(shard))
        return self._verify(shard)

    def write_shard(self, shard: int, x: np.ndarray, y: Any = None, weight: Any = None) -> None:
        """Write one whole shard; what an earlier attempt left of it is deleted first.

        Parameters
        ----------
        shard : int
            Number of the shard.
        x : ndarray (rows, *feature_shape) or (rows, n_features)
            All rows of the shard, of the dataset's dtype or one that fits into it.
        y : array-like (rows,), optional
            Labels, where the dataset has labels.
        weight : array-like (rows,), optional
            Weights, where the dataset has weights.

        Raises
        ------
        DataError
            Rows of another shape or type, NaN or infinity, an unknown label; or the disk is full, in which
            case this shard is removed and the others stay.
        """
        start, stop = self.shard_bounds(shard)
        rows = self._check_x(x, start, stop)
        labels, distinct = self._check_y(y, start, stop)
        weights = self._check_weight(weight, start, stop)
        digest = schema.shard_digest(rows, labels, weights)
        with self._all_or_nothing(shard, start, stop):
            for target, values in ((self._y, labels), (self._weight, weights), (self._x, rows)):
                if target is not None:
                    target[start:stop] = values
            marker = {"digest": digest.hex(), "labels": distinct}
            self._location.write(self._marker_key(shard), json.dumps(marker).encode())

    def finalize(self) -> Dataset:
        """Check that every shard is there, seal the dataset and open it.

        Raises
        ------
        DataError
            Shards are missing; the message counts them and names the first.
        """
        from .dataset import open_dataset

        markers = self._all_markers()
        if not self.attrs.complete:
            digests = np.array([list(bytes.fromhex(m["digest"])) for m in markers], dtype=np.uint8)
            classes = self._classes(markers)
            with explain_os_errors(self._location, "finishing the dataset"):
                self._group["digest"][...] = digests
                done = self.attrs.finished(self._fingerprint(digests, classes), classes)
                self._group.update_attributes(done.to_json())  # the last write: only now the dataset opens
            self.attrs = done
        self._location.delete_tree(MARKERS)
        return open_dataset(self.url)

    def _all_markers(self) -> list[dict[str, Any]]:
        if self.attrs.complete:
            return []
        markers = [self._marker(i) for i in range(self.n_shards)]
        missing = [i for i, m in enumerate(markers) if m is None]
        if missing:
            a, b = self.shard_bounds(missing[0])
            raise DataError(
                f"dataset {self.url} cannot be finished: {len(missing)} of {self.n_shards} shards are not "
                f"written, the first is shard {missing[0]} (rows {a}:{b}); write them, then finalize again"
            )
        return [m for m in markers if m is not None]

    def _classes(self, markers: list[dict[str, Any]]) -> list[Any] | None:
        if self._y is None or self.attrs.classes is not None:
            return self.attrs.classes
        found: set[Any] = set()
        for marker in markers:
            if marker["labels"] is None:
                return None
            found.update(marker["labels"])
        return sorted(found) if len(found) <= schema.MAX_CLASSES else None

    def _fingerprint(self, digests: np.ndarray, classes: list[Any] | None) -> str:
        head = [
            self.n_rows,
            list(self.attrs.feature_shape),
            self.dtype.str,
            classes,
            self.attrs.codes,
            self.shard_rows,
        ]
        return hashlib.sha256(json.dumps(head).encode() + digests.tobytes()).hexdigest()

    def _check_x(self, x: np.ndarray, start: int, stop: int) -> np.ndarray:
        what = f"{self.url}: rows {start}:{stop}"
        rows = np.asarray(x)
        shape = (stop - start, *self.attrs.feature_shape)
        if rows.shape not in (shape, (shape[0], schema.n_features(self.attrs.feature_shape))):
            raise DataError(f"{what} were given with shape {rows.shape}, but this shard has shape {shape}")
        if not np.can_cast(rows.dtype, self.dtype, "safe"):
            raise DataError(
                f"{what} are {rows.dtype}, which does not fit into the dataset's {self.dtype}; convert them"
            )
        schema.check_finite(rows, start, self.url)
        return np.ascontiguousarray(rows, dtype=self.dtype).reshape(shape)

    def _check_y(self, y: Any, start: int, stop: int) -> tuple[np.ndarray | None, list[Any] | None]:
        what = f"{self.url}: labels of rows {start}:{stop}"
        if (y is None) != (self._y is None):
            raise DataError(
                f"{what}: {'labels are needed' if y is None else 'the dataset was made without labels'}"
            )
        if y is None or self._y is None:
            return None, None
        labels = schema.as_labels(y, what)
        if len(labels) != stop - start:
            raise DataError(f"{what}: {len(labels)} labels for {stop - start} rows; give one label a row")
        distinct = schema.distinct_labels(labels, start, self.url)
        if self.attrs.classes is not None:
            codes = schema.encode_labels(labels, np.asarray(self.attrs.classes), start, self.url)
            if self.attrs.codes:
                return codes.astype(self._y.dtype), None
        stored = labels.astype(self._y.dtype)
        if not np.array_equal(stored, labels):
            i = int(np.flatnonzero(stored != labels)[0])
            raise DataError(
                f"{what}: label {labels[i]!r} of row {start + i} does not fit into {self._y.dtype}"
            )
        few = len(distinct) <= schema.MAX_CLASSES
        return stored, distinct.astype(self._y.dtype).tolist() if few else None

    def _check_weight(self, weight: Any, start: int, stop: int) -> np.ndarray | None:
        what = f"{self.url}: rows {start}:{stop}"
        if (weight is None) != (self._weight is None):
            raise DataError(
                f"{what}: {'weights are needed' if weight is None else 'the dataset has no weights'}"
            )
        return None if weight is None else schema.check_weight(weight, stop - start, what)

    def _marker_key(self, shard: int) -> str:
        return f"{MARKERS}/{shard:06d}.json"

    def _marker(self, shard: int) -> dict[str, Any] | None:
        raw = self._location.read(self._marker_key(shard))
        try:
            return None if raw is None else dict(json.loads(raw))
        except ValueError:
            return None

    def _files(self, shard: int) -> list[str]:
        keys = ["/".join(["x", "c", str(shard), *("0" for _ in self.attrs.feature_shape)])]
        return keys + [f"{a.name.strip('/')}/c/{shard}" for a in (self._y, self._weight) if a is not None]

    @contextlib.contextmanager
    def _all_or_nothing(self, shard: int, start: int, stop: int) -> Any:
        """Delete a shard's files before writing (never read-modify-write) and again if writing fails."""

        def remove() -> None:
            if not self.attrs.complete:
                self._location.delete(self._marker_key(shard))
            for key in self._files(shard):
                self._location.delete(key)

        with explain_os_errors(self._location, f"writing shard {shard} (rows {start}:{stop})"):
            remove()
            try:
                yield
            except BaseException:
                with contextlib.suppress(OSError):
                    remove()
                raise

    def _verify(self, shard: int) -> bool:
        from .dataset import open_dataset

        start, stop = self.shard_bounds(shard)
        try:
            columns = open_dataset(self.url)._columns
            parts = [
                None if c is None else c.read(start, stop) for c in (columns.x, columns.y, columns.weight)
            ]
        except DataError:
            return False
        return schema.shard_digest(*parts) == self._group["digest"][shard].tobytes()


@contextlib.contextmanager
def explain_os_errors(location: Location, doing: str) -> Any:
    """Turn an error of the file system into one that says what to do."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        free = location.free_bytes()
        room = "" if free is None else f" ({free / 1e6:,.0f} MB free)"
        reason = f"the disk is full or a quota is reached{room}" if full else f"{error.strerror or error}"
        step = "free some space" if full else "put that right"
        raise DataError(
            f"dataset {location.url}: {doing} failed: {reason}. The shards written before are intact; "
            f"{step}, then go on with --resume (resume=True)"
        ) from error
