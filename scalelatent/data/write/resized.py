"""Images without their border, or of another size: each new pixel is the mean of the area it covers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from scalelatent.data import schema
from scalelatent.data.read.sources import WrappedRows
from scalelatent.errors import DataError

if TYPE_CHECKING:
    from scalelatent.data.read.sources import RowSource

__all__ = ["ResizedRows"]


class ResizedRows(WrappedRows):
    """Images, grey or in colour, cropped and then resized by means over areas, which are floats."""

    def __init__(self, source: RowSource, crop: int, size: tuple[int, int] | None, what: str) -> None:
        if source.sparse:
            raise DataError(
                f"{what}: CSR rows are no images to crop or resize; convert them to dense ones first"
            )
        self._shape = _image_shape(source.shape[1:], what)
        height, width = (side - 2 * crop for side in self._shape[:2])
        if crop < 0 or min(height, width) < 1:
            raise DataError(
                f"{what}: crop={crop} leaves nothing of images of {self._shape[0]}x{self._shape[1]}: give a "
                f"number from 0 to {(min(self._shape[:2]) - 1) // 2}"
            )
        self._crop, self._maps, self._what = crop, None, what
        dtype = source.dtype
        if size is not None:
            if min(size) < 1:
                raise DataError(f"{what}: resize={size[0]}x{size[1]} has no pixel: give two numbers above 0")
            self._maps = _areas(height, size[0]), _areas(width, size[1])
            height, width = size
            dtype = np.dtype("f8" if dtype == np.float64 else "f4")
        super().__init__(source, (source.shape[0], height, width, *self._shape[2:]), dtype)

    def read(self, start: int, stop: int) -> np.ndarray:
        rows = np.asarray(self._source.read(start, stop)).reshape(stop - start, *self._shape)
        height, width = self._shape[:2]
        rows = rows[:, self._crop : height - self._crop, self._crop : width - self._crop]
        if self._maps is None:
            return np.ascontiguousarray(rows)
        schema.check_finite(rows, start, self._what)
        down, across = self._maps
        planes = rows if rows.ndim == 3 else np.moveaxis(rows, 3, 1)
        found = down @ planes.astype(np.float64) @ across.T
        found = found if rows.ndim == 3 else np.moveaxis(found, 1, 3)
        return np.ascontiguousarray(found, dtype=self.dtype)


def _image_shape(shape: tuple[int, ...], what: str) -> tuple[int, ...]:
    """Height, width and perhaps channels of images; a square for features in a line."""
    if len(shape) in (2, 3):
        return tuple(shape)
    if len(shape) == 1 and (side := math.isqrt(shape[0])) ** 2 == shape[0]:
        return (side, side)
    raise DataError(
        f"{what}: rows of shape {tuple(shape)} are no images to crop or resize; import them with their "
        "height and width"
    )


def _areas(old: int, new: int) -> np.ndarray:
    """Matrix (new, old): the share that each old pixel has in the stretch that a new one covers."""
    edges = np.arange(new + 1) * (old / new)
    starts = np.arange(old)
    shared = np.minimum(edges[1:, None], starts + 1) - np.maximum(edges[:-1, None], starts)
    shared = np.maximum(shared, 0.0)
    return shared / shared.sum(axis=1, keepdims=True)
