"""Import IDX files, the format of MNIST, plain or gzip, as a stream.

An IDX file holds two zero bytes, one byte for the type, one byte for the number of axes, the length of each
axis as big-endian uint32, and the numbers.
"""

from __future__ import annotations

import math
import os
import zlib
from typing import IO, TYPE_CHECKING

import numpy as np

from scalelatent.data.dataset import Dataset
from scalelatent.errors import DataError

from .files import PathOrUrl, file_size, is_gzip, open_maybe_gzip
from .stream import BinaryReader, import_rows

if TYPE_CHECKING:
    from typing import Unpack

    from .stream import ImportOptions

_DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def import_idx(
    images: PathOrUrl, labels: PathOrUrl | None, url: PathOrUrl, **options: Unpack[ImportOptions]
) -> Dataset:
    """Import IDX files, for example those of MNIST; memory is bounded by one shard.

    Parameters
    ----------
    images : path
        Images (n, ...), plain or gzip; the content decides which, not the name.
    labels : path or None
        Labels (n,).
    url : str
        Dataset to write.
    **options
        See `import_npy`.

    Returns
    -------
    Dataset
        Rows and labels in the dtypes of the files.

    Raises
    ------
    DataError
        A file that is missing, truncated, too long, damaged or no IDX file; another number of labels than
        images; an output that exists. No dataset stays behind.

    Examples
    --------
    >>> import numpy as np, tempfile, os
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "images.idx")
    ...     with open(path, "wb") as file:
    ...         _ = file.write(bytes([0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 2]) + bytes([1, 2, 3, 4]))
    ...     import_idx(path, None, "memory://doc-idx", overwrite=True).read_x(0, 2)
    array([[1, 2],
           [3, 4]], dtype=uint8)
    """
    return import_rows(
        lambda: _open_part(images, "image"),
        None if labels is None else lambda: _open_part(labels, "label"),
        url,
        importer="idx",
        sources=[images] if labels is None else [images, labels],
        **options,
    )


def _open_part(path: PathOrUrl, part: str) -> BinaryReader:
    """Return a reader of the "image" or the "label" file; raise `DataError` if the two were swapped."""
    reader = open_idx(path, f"{part} file")
    axes = len(reader.shape)
    if (axes > 1) == (part == "image"):
        return reader
    reader.close()
    holds, needed = ("images", "labels") if axes > 1 else ("labels", "images")
    raise DataError(
        f"{reader.name} has {axes} {'axes' if axes > 1 else 'axis'}, {reader.shape}, so it holds {holds}, "
        f"not {needed}; give the image file first, then the label file"
    )


def open_idx(path: PathOrUrl, kind: str) -> BinaryReader:
    """Return a reader of an IDX file, after a check of its header and, for a plain file, of its size."""
    file = open_maybe_gzip(path, kind)
    name = f"{kind} {os.fspath(path)}"
    try:
        shape, dtype, offset = _read_header(file, name)
        reader = BinaryReader(file, name, shape, dtype, offset)
        if not is_gzip(file):
            reader.check_size(file_size(file))
        return reader
    except BaseException:
        file.close()
        raise


def _read_header(file: IO[bytes], name: str) -> tuple[tuple[int, ...], np.dtype, int]:
    """Return the shape, the dtype and the length of the header in bytes."""
    try:
        magic = file.read(4)
        if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in _DTYPES or not 1 <= magic[3] <= 8:
            raise DataError(
                f"{name} is no IDX file: at byte 0 the magic number 00 00 TT NN (type TT 08, 09, 0b, 0c, 0d "
                f"or 0e, NN axes; 00 00 08 03 for images, 00 00 08 01 for labels) was expected, found "
                f"{magic.hex(' ') or 'nothing'}; give the original file, or use another importer"
            )
        axes = file.read(4 * magic[3])
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(f"{name} is damaged in its header: {error}; download or copy it again") from error
    if len(axes) < 4 * magic[3]:
        raise DataError(
            f"{name} is truncated: at byte 4, {4 * magic[3]} bytes of axis lengths were expected, found "
            f"{len(axes)}; download or copy it again"
        )
    shape = tuple(int(v) for v in np.frombuffer(axes, ">u4"))
    if math.prod(shape) == 0:
        raise DataError(f"{name}: its header declares shape {shape}, which is empty: nothing to import")
    return shape, np.dtype(_DTYPES[magic[2]]), 4 + len(axes)
