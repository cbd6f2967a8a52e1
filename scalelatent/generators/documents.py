"""Endless documents: rows of counts, each drawn from the word counts of a base document.

Row `i` has the length of its base row, and its words are drawn independently with the frequencies of the
base: a multinomial resampling (the bootstrap of a document's words). Base and draws depend on the seed and
`i` only.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.data import csr
from scalelatent.data.dataset import Dataset
from scalelatent.errors import DataError
from scalelatent.kernels.streams import check_seed, stage_word
from scalelatent.storage.disk import locate

from .bases import base_name, check_base_rows, open_stored_base
from .make import ShiftedGenerator, generator_of, make_rows

if TYPE_CHECKING:
    from typing import Unpack

    from scipy.sparse import csr_array

    from scalelatent.kernels.arrays import DenseOrCsr

    from .make import MakeOptions

STAGE = "documents"
# The number of entries of all rows, which determines the rows per row group, is estimated from this number
# of rows.
_SAMPLE_ROWS = 1024


class ResampledDocuments:
    """An endless set of documents; document `i` depends on the seed and `i` only.

    Document `i` derives from base row `A + i % (B - A)`. Its word `k` is drawn with random number `k` of the
    Philox stream of (seed, "documents", 0, i).

    Parameters
    ----------
    base : Dataset
        CSR rows of counts: whole numbers of at least 0, of any dtype. All rows are checked once.
    seed : int
        At least 0.
    base_rows : (int, int), optional
        Use only these base rows, `A:B`; all by default. No other base row is ever read.

    Raises
    ------
    DataError
        Rows that are not CSR or not counts (with row and column), or base rows out of range.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp
    >>> from scalelatent.data import Dataset
    >>> counts = sp.csr_array(np.array([[3, 0, 1], [0, 5, 0]]))
    >>> documents = ResampledDocuments(Dataset.from_arrays(counts, ["a", "b"]), seed=1)
    >>> x, y = documents.rows(1_000_000, 1_000_003)
    >>> x.toarray().tolist(), y.tolist()
    ([[2, 0, 2], [0, 5, 0], [4, 0, 0]], ['a', 'b', 'a'])
    """

    def __init__(self, base: Dataset, *, seed: int = 0, base_rows: tuple[int, int] | None = None) -> None:
        self.name = f"base {base.url}" if base.url else "the base"
        if not base.is_sparse:
            raise DataError(
                f"{self.name} has dense rows; documents are made from CSR rows of counts: import them with "
                "`scalelatent data import csr` or svmlight"
            )
        self.seed = check_seed(seed)
        self.base_rows = check_base_rows(base_rows, base.n_rows)
        self._base = base
        self.dtype = np.min_scalar_type(self._check_counts())

    @property
    def n_features(self) -> int:
        return self._base.n_features

    def base_of(self, index: np.ndarray) -> np.ndarray:
        """Return the row, in the whole base set, of the base document from which each index derives."""
        a, b = self.base_rows
        return a + np.asarray(index) % (b - a)

    def rows(self, start: int, stop: int) -> tuple[csr_array, DenseOrCsr | None]:
        """Return the documents `start:stop`, CSR counts (stop - start, n_features), and their labels or None.

        Labels, targets or multi-labels are those of the base documents. Indices are 0 to 2**63 - 1.
        """
        if not 0 <= start <= stop < 2**63:
            raise DataError(f"documents {start}:{stop}: indices are 0 to 2**63 - 1, in rising order")
        a, b = self.base_rows
        parts, labels, row = [], [], start
        while row < stop:  # read each range of base rows once; memory grows only with the requested documents
            first = a + row % (b - a)
            uses_all = stop - row >= b - a
            count = stop - row if uses_all else min(stop - row, b - first)
            low, high = (a, b) if uses_all else (first, first + count)
            local = (first - low + np.arange(count)) % (high - low)
            parts.append(self._draw(self._base.read_x(low, high), local, row))
            if self._base.has_y:
                labels.append(self._base.read_y(low, high)[local])
            row += count
        if not parts:
            empty = self._base.read_x(a, a).astype(self.dtype)
            return empty, self._base.read_y(a, a) if self._base.has_y else None
        return csr.stack(parts), csr.concatenate(labels) if labels else None

    def _draw(self, base: csr_array, local: np.ndarray, first: int) -> csr_array:
        """Draw documents `first`, `first + 1`, …, one for each number of a row of `base` in `local`."""
        from .document_kernels import resample  # numba takes a second to load

        pointers = base.indptr.astype(np.int64, copy=False)
        base_counts = base.data.astype(np.int64, copy=False)
        entries = _entries_of(pointers, local)
        counts, row_entries = np.empty(len(entries), np.uint64), np.empty(len(local), np.int64)
        key = np.uint64(self.seed), np.uint64(stage_word(STAGE))
        resample(base_counts, pointers, local, np.uint64(first), *key, counts, row_entries)
        columns = base.indices[entries].astype(csr.index_dtype(self.n_features), copy=False)
        drawn = counts > 0
        indptr = np.concatenate([[0], np.cumsum(row_entries)])
        return csr.csr_of(counts[drawn].astype(self.dtype), columns[drawn], indptr, self.n_features)

    def _check_counts(self) -> int:
        """Raise `DataError` if a base value is not a count; return the number of words of the longest row."""
        a, b = self.base_rows
        longest = 0
        for first, last in self._base.pieces(a, b):
            x = self._base.read_x(first, last)
            assert not isinstance(x, np.ndarray), "documents are CSR rows"
            values = x.data
            wrong = (values < 0) | (values != np.floor(values)) if values.dtype.kind == "f" else values < 0
            if wrong.any():
                entry = int(np.flatnonzero(wrong)[0])
                row, column = csr.place_of(x, entry)
                raise DataError(
                    f"{self.name}: row {first + row}, column {column} is {values[entry]}, which is no "
                    "count; documents are drawn from whole numbers of at least 0 (word counts, not weights): "
                    "import those, for example with `data import csr --values tf`"
                )
            totals = np.add.reduceat(np.append(values.astype(np.float64), 0), x.indptr[:-1])
            totals[np.diff(x.indptr) == 0] = 0
            longest = max(longest, int(totals.max()))
        if longest >= 2**53:
            raise DataError(f"{self.name} has a row of {longest} words; at most 2**53 can be drawn")
        return longest


def _entries_of(pointers: np.ndarray, local: np.ndarray) -> np.ndarray:
    """Return the indices of the entries of the rows `local`, one row after the other."""
    counts = np.diff(pointers)[local]
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(pointers[local] - (ends - counts), counts)


def make_documents(
    url: str | os.PathLike[str],
    rows: int,
    *,
    base: str | os.PathLike[str],
    base_rows: tuple[int, int] | None = None,
    start: int = 0,
    seed: int = 0,
    **options: Unpack[MakeOptions],
) -> Dataset:
    """Write resampled documents to a CSR dataset, several row groups at a time.

    Parameters
    ----------
    url : str
        Dataset to write.
    rows : int
        Number of documents.
    base : str
        Url of a dataset of CSR counts; its labels, targets or multi-labels are copied.
    base_rows : (int, int), optional
        Base rows `A:B` from which documents derive; all by default.
    start : int
        Index of the first document.
    seed
        See `ResampledDocuments`.
    **options
        See `make_digits`; shards are row groups.

    Returns
    -------
    Dataset
        Counts, unsigned integers of the smallest dtype that holds the longest document.

    Raises
    ------
    DataError
        The output exists, the base has no CSR counts, or the disk is full.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp
    >>> from scalelatent.data import Dataset
    >>> counts = sp.csr_array(np.array([[3, 0, 1], [0, 5, 0]]))
    >>> _ = Dataset.from_arrays(counts, [0, 1]).save("memory://doc-base", overwrite=True)
    >>> make_documents("memory://doc-documents", 500, base="memory://doc-base", overwrite=True)
    <Dataset 500 CSR rows x (3,) uint8, 2 classes, 'memory://doc-documents'>
    """
    place = locate(url).url
    if start < 0:
        raise DataError(f"start is {start}, but documents begin at index 0")
    name = base_name(base, place)
    source = open_stored_base(name, place)
    parameters: dict[str, Any] = {
        "importer": "documents",
        "base": name,
        "start": start,
        "seed": seed,
        "base_fingerprint": source.fingerprint(),
        "base_rows": list(check_base_rows(base_rows, source.n_rows)),
    }
    n_sample = min(rows, _SAMPLE_ROWS)
    sample = generator_of(parameters, place).rows(0, n_sample)[0]
    assert not isinstance(sample, np.ndarray), "documents are CSR rows"
    return make_rows(url, rows, parameters, nnz=sample.nnz * rows // max(n_sample, 1), **options)


def from_provenance(p: dict[str, Any], url: str) -> ShiftedGenerator:
    """Return the generator of the dataset of documents that has the provenance `p`."""
    base = open_stored_base(p["base"], url, p["base_fingerprint"])
    documents = ResampledDocuments(base, seed=p["seed"], base_rows=p["base_rows"])
    columns = {"feature_shape": (documents.n_features,), "dtype": documents.dtype, **base.y_options()}
    return ShiftedGenerator(documents.rows, p["start"], columns)
