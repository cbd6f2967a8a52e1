"""Corrupted rows of zeros and ones: flipped bits, or a patch of an image that is gone.

After Ping and Ihler, "Belief propagation in conditional RBMs for structured prediction" (2017), section 6: of
noisy images 10 % or 20 % of the pixels are flipped, in occluded ones a patch of 8 x 8 or 12 x 12 pixels is
set to 0. What becomes of a row is a pure function of (seed, stage, epoch, row), in any batch or process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.errors import DataError

from .random_words import stage_word

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["KINDS", "check_corruption", "corrupt", "corrupt_in_place", "draws_of"]

KINDS = ("flip", "occlude")


def check_corruption(
    kind: str, n_features: int, *, rate: float = 0.0, size: Sequence[int] = (0, 0),
    shape: Sequence[int] = (0, 0), value: int = 0,
) -> None:  # fmt: skip
    """Refuse a corruption that cannot be, for rows of so many features; see `corrupt`."""
    if kind not in KINDS:
        raise DataError(f"there is no corruption {kind!r}; there are {', '.join(KINDS)}")
    if kind == "flip":
        if not 0 <= rate <= 1:
            raise DataError(f"the share of flipped pixels (rate) is {rate}, but it lies in 0 to 1")
        if rate and not round(rate * n_features):
            raise DataError(
                f"the share of flipped pixels (rate) is {rate}, which is none of the {n_features} of a row: "
                f"give at least {1 / n_features:.2g}"
            )
        return
    height, width = (int(s) for s in shape)
    if height * width != n_features:
        raise DataError(
            f"a patch lies in an image, and {height} x {width} pixels are not the {n_features} numbers of a "
            "row: give the height and width of the images, shape=(h, w)"
        )
    if not all(1 <= p <= s for p, s in zip(size, (height, width), strict=True)):
        raise DataError(
            f"patch is {size[0]} x {size[1]}, but it has to lie in images of {height} x {width} pixels"
        )
    if value not in (0, 1):
        raise DataError(f"value is {value}, but a pixel is 0 or 1")


def corrupt(v: np.ndarray, rows: np.ndarray, epoch: int = 0, *, kind: str, **how: Any) -> np.ndarray:
    """A corrupted copy of rows of zeros and ones."""
    out = np.array(v, np.uint8, order="C")
    corrupt_in_place(out, rows, epoch, kind=kind, **how)
    return out


def corrupt_in_place(
    out: np.ndarray, rows: np.ndarray, epoch: int = 0, *, kind: str, seed: int, stage: str, rate: float = 0.0,
    size: tuple[int, int] = (0, 0), shape: tuple[int, int] = (0, 0), value: int = 0,
) -> None:  # fmt: skip
    """What `corrupt` does, to `out` itself, which is C-contiguous."""
    from .corruption_compiled import flip_exactly, occlude

    n, p = out.shape
    draws = draws_of(rows, 2 if kind == "occlude" else round(rate * p), seed, stage, epoch)
    if kind == "flip":
        flip_exactly(draws, out)
    else:
        occlude(draws, np.array([*size, value], np.int64), out.reshape(n, *shape))


def draws_of(rows: np.ndarray, count: int, seed: int, stage: str, epoch: int = 0) -> np.ndarray:
    """Uniform draws of each of some rows, uint32 (rows, count)."""
    from .philox import row_draws

    draws = np.empty((len(rows), count), np.uint32)
    key = np.array([seed % 2**64, stage_word(stage), epoch], np.uint64)
    row_draws(key, np.ascontiguousarray(rows, np.int64), draws)
    return draws
