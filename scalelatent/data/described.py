"""What is known of a run of rows without reading any."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import labels, schema
from .columns import Columns
from .csr import index_dtype
from .preview import as_html
from .read.sources import is_csr

__all__ = ["Described"]

_SHOWN_CLASSES = 12


class Described:
    """The columns of a dataset, which of their rows it has, and what they are.

    Parameters
    ----------
    columns : Columns
    start, stop : int
        Rows of the columns; up to the last one by default.
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
    def is_sparse(self) -> bool:
        """Whether the rows are CSR: `read_x` then gives a `scipy.sparse.csr_array`."""
        return is_csr(self._columns.x)

    @property
    def nnz(self) -> int | None:
        """Stored entries of CSR rows, else None; for a slice of a stored dataset reads row pointers."""
        x: Any = self._columns.x
        return int(x.entries(self._start, self._stop)) if self.is_sparse else None

    @property
    def nbytes(self) -> int:
        """Bytes of the rows in memory: of CSR rows values, columns and row pointers."""
        if self.nnz is None:
            return self.n_rows * self.n_features * self.dtype.itemsize
        entry = self.dtype.itemsize + index_dtype(self.n_features).itemsize
        return self.nnz * entry + 8 * (self.n_rows + 1)

    @property
    def has_y(self) -> bool:
        """Whether there are labels, targets or multi-labels."""
        return self._columns.y is not None

    @property
    def y_kind(self) -> str | None:
        """'labels' (n,), 'targets' (n, v), 'multilabel' (CSR, n x v), or None where there is no `y`."""
        return self._columns.y_kind

    @property
    def has_targets(self) -> bool:
        """Whether a row has several outputs, targets or multi-labels, and `read_targets` reads them."""
        return self.y_kind not in (None, "labels")

    @property
    def n_targets(self) -> int | None:
        """Columns of targets or multi-labels, else None."""
        return (
            None
            if self.y_kind in (None, "labels")
            else int(labels.column(self._columns, self._what()).shape[1])
        )

    @property
    def has_weight(self) -> bool:
        """Whether the rows are weighted."""
        return self._columns.weight is not None

    @property
    def classes(self) -> np.ndarray | None:
        """Distinct labels in rising order, for a slice those of the whole dataset; None without labels, and
        for targets and multi-labels.
        """
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
        y = f", {found}" if (found := self._outputs()) else ""
        weight = ", weighted" if self.has_weight else ""
        part = "" if self._is_whole else f"rows {self._start:,}:{self._stop:,} of "
        place = f", {part}{self.url!r}" if self.url else ""
        rows = f"{self.n_rows:,} {'CSR ' if self.is_sparse else ''}rows"
        return f"<Dataset {rows} x {self.feature_shape} {self.dtype}{y}{weight}{place}>"

    def _repr_html_(self) -> str:
        return as_html("Dataset", self._summary())

    @property
    def _is_whole(self) -> bool:
        return (self._start, self._stop) == (0, self._columns.x.shape[0])

    def _outputs(self) -> str:
        """What `y` is, in a word or two; labels are not looked through for it."""
        if self.n_targets is not None:
            return f"{self.n_targets:,} {'targets' if self.y_kind == 'targets' else 'topics (multi-label)'}"
        if self.has_y and self._columns.classes_known and self.classes is not None:
            return f"{len(self.classes):,} classes"
        return "labels" if self.has_y else ""

    def _summary(self) -> dict[str, str]:
        """Names and values for a notebook; no rows are read."""
        from dask.utils import format_bytes

        x: Any = self._columns.x
        shape = " x ".join(map(str, self.feature_shape))
        out = {
            "rows": f"{self.n_rows:,}" + ("" if self._is_whole else f" ({self._start:,}:{self._stop:,})"),
            "features": f"{self.n_features:,}" + (f" ({shape})" if len(self.feature_shape) > 1 else ""),
            "type": f"{self.dtype}{', CSR' if self.is_sparse else ''}",
        }
        if self.is_sparse and self._is_whole and getattr(x, "knows_entries", False):
            out["entries"] = f"{x.nnz:,} ({100 * x.nnz / (self.n_rows * self.n_features):.3g} %)"
        elif not self.is_sparse:
            out["size"] = f"{format_bytes(self.nbytes)} in memory"
        if self.has_y:
            out["y"] = self._outputs()
        if self.y_kind == "labels" and self._columns.classes_known and self.classes is not None:
            names = self.classes[:_SHOWN_CLASSES].tolist()
            out["classes"] = ", ".join(map(str, names)) + (", …" if len(self.classes) > len(names) else "")
        if self.has_weight:
            out["weights"] = "one a row"
        out["place"] = self.url or "in memory"
        if self._columns.fingerprint and self._is_whole:
            out["fingerprint"] = self._columns.fingerprint[:12]
        return out

    def _what(self) -> str:
        return f"dataset {self.url}" if self.url else "the dataset"
