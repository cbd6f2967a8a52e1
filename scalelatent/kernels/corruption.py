"""Corruption of rows of zeros and ones: flipped bits, or an occluded patch of an image.

The corruptions are those of Ping and Ihler, "Belief propagation in conditional RBMs for structured
prediction" (2017), section 6. In noisy images 10 % or 20 % of the pixels are flipped; in occluded images a
patch of 8 x 8 or 12 x 12 pixels is set to 0. The corruption of a row depends only on (seed, stage, epoch,
row), so batches and processes do not change it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.errors import DataError

from .streams import stage_word

if TYPE_CHECKING:
    from collections.abc import Sequence

CORRUPTION_KINDS = ("flip", "occlude")


def check_corruption(
    kind: str, n_features: int, *, rate: float = 0.0, size: Sequence[int] = (0, 0),
    shape: Sequence[int] = (0, 0), value: int = 0,
) -> None:  # fmt: skip
    """Raise DataError if the options of a corruption do not fit rows with ``n_features`` features."""
    if kind not in CORRUPTION_KINDS:
        raise DataError(f"there is no corruption {kind!r}: use one of {', '.join(CORRUPTION_KINDS)}")
    if kind == "flip":
        if not 0 <= rate <= 1:
            raise DataError(f"the share of flipped pixels (rate) is {rate}: give a number between 0 and 1")
        if rate and not round(rate * n_features):
            raise DataError(
                f"the share of flipped pixels (rate) is {rate}, which rounds to none of the {n_features} "
                f"pixels of a row: give at least {1 / n_features:.2g}"
            )
        return
    height, width = (int(s) for s in shape)
    if height * width != n_features:
        raise DataError(
            f"shape={height} x {width} does not fit the {n_features} features of a row: give the height "
            "and width of the images, shape=(h, w)"
        )
    if not all(1 <= p <= s for p, s in zip(size, (height, width), strict=True)):
        raise DataError(
            f"patch is {size[0]} x {size[1]}, but it must fit into images of {height} x {width} pixels"
        )
    if value not in (0, 1):
        raise DataError(f"value is {value}: give 0 or 1, the values of a pixel")


def corrupt(v: np.ndarray, rows: np.ndarray, epoch: int = 0, *, kind: str, **how: Any) -> np.ndarray:
    """Return a corrupted copy of ``v``, rows of zeros and ones (n, features), with the numbers ``rows``."""
    out = np.array(v, np.uint8, order="C")
    corrupt_in_place(out, rows, epoch, kind=kind, **how)
    return out


def corrupt_in_place(
    out: np.ndarray, rows: np.ndarray, epoch: int = 0, *, kind: str, seed: int, stage: str, rate: float = 0.0,
    size: tuple[int, int] = (0, 0), shape: tuple[int, int] = (0, 0), value: int = 0,
) -> None:  # fmt: skip
    """Corrupt C-contiguous rows ``out`` of zeros and ones, uint8 (n, features), in place.

    ``rows`` are the numbers of the rows. The options are those of `check_corruption`.
    """
    from .corruption_compiled import flip_exactly, occlude

    n, p = out.shape
    draws = draw_for_rows(rows, 2 if kind == "occlude" else round(rate * p), seed, stage, epoch)
    if kind == "flip":
        flip_exactly(draws, out)
    else:
        occlude(draws, np.array([*size, value], np.int64), out.reshape(n, *shape))


def draw_for_rows(rows: np.ndarray, count: int, seed: int, stage: str, epoch: int = 0) -> np.ndarray:
    """Return ``count`` uniform random numbers for each of the row numbers ``rows``, uint32 (rows, count)."""
    from .philox import row_draws

    draws = np.empty((len(rows), count), np.uint32)
    key = np.array([seed % 2**64, stage_word(stage), epoch], np.uint64)
    row_draws(key, np.ascontiguousarray(rows, np.int64), draws)
    return draws
