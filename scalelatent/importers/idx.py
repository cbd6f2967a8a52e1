"""IDX files, the format of MNIST: plain or gzip, read as a stream.

The format: two zero bytes, a byte for the type, one for the number of axes, the axes as big-endian uint32,
the numbers.
"""

from __future__ import annotations

import math
import os
import zlib
from typing import IO, TYPE_CHECKING

import numpy as np

from scalelatent.data.dataset import Dataset
from scalelatent.errors import DataError

from .files import file_size, is_packed, open_maybe_gzip
from .stream import Progress, RowStream, write_rows

if TYPE_CHECKING:
    from typing import Unpack

    from scalelatent.data.schema import LayoutOptions

_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def import_idx(
    images: str | os.PathLike[str],
    labels: str | os.PathLike[str] | None,
    url: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
    shuffle: int | None = None,
    **layout: Unpack[LayoutOptions],
) -> Dataset:
    """Import IDX files, for example those of MNIST; memory is bounded by one shard.

    Parameters
    ----------
    images : path
        Images (n, ...), plain or gzip (told by the content, not by the name).
    labels : path or None
        Labels (n,).
    url : str
        Where the dataset goes.
    overwrite, progress, shuffle, **layout
        See `import_npy`.

    Returns
    -------
    Dataset
        Rows and labels in the types of the files.

    Raises
    ------
    DataError
        A file that is missing, cut short, too long, damaged or no IDX file; labels of another number; an
        output that exists. No dataset is left behind.

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
    x = open_idx(images, "image file")
    y = None
    try:
        y = None if labels is None else open_idx(labels, "label file")
        if len(x.shape) < 2:
            raise DataError(
                f"{x.name} has one axis, {x.shape}, so it holds labels, not images; give the image file "
                f"first, then the label file"
            )
        if y is not None and len(y.shape) != 1:
            raise DataError(
                f"{y.name} has {len(y.shape)} axes, {y.shape}, so it holds images, not labels; give the "
                f"image file first, then the label file"
            )
        sources = [images] if labels is None else [images, labels]
        return write_rows(
            url,
            x,
            y,
            importer="idx",
            sources=sources,
            overwrite=overwrite,
            progress=progress,
            shuffle=shuffle,
            **layout,
        )
    finally:
        for stream in (x, y):
            if stream is not None:
                stream.close()


def open_idx(path: str | os.PathLike[str], what: str) -> RowStream:
    """A stream over an IDX file whose header, and size where it is not compressed, have been checked."""
    file = open_maybe_gzip(path, what)
    name = f"{what} {os.fspath(path)}"
    try:
        shape, dtype, offset = _read_header(file, name)
        stream = RowStream(file, name, shape, dtype, offset)
        if not is_packed(file):
            stream.check_size(file_size(file))
        return stream
    except BaseException:
        file.close()
        raise


def _read_header(file: IO[bytes], name: str) -> tuple[tuple[int, ...], np.dtype, int]:
    """Shape, dtype and length of the header."""
    try:
        magic = file.read(4)
        if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in _TYPES or not 1 <= magic[3] <= 8:
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
        raise DataError(f"{name}: its header says shape {shape}, which is empty: nothing to import")
    return shape, np.dtype(_TYPES[magic[2]]), 4 + len(axes)
