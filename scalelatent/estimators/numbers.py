"""What parameters that are numbers may be."""

from __future__ import annotations

import logging
import math
from functools import lru_cache
from numbers import Real
from typing import Any

logger = logging.getLogger("scalelatent")


def is_number(value: Any) -> bool:
    """Whether a parameter is a finite number (a bool is none).

    Examples
    --------
    >>> is_number(0.5), is_number(True), is_number(float("nan"))
    (True, False, False)
    """
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def is_whole(value: Any) -> bool:
    """Whether a parameter is a whole number of at least 1.

    Examples
    --------
    >>> is_whole(3), is_whole(3.0), is_whole(2.5), is_whole(0)
    (True, True, False, False)
    """
    return is_number(value) and int(value) == value and value >= 1


@lru_cache(maxsize=256)
def tell_cut(name: str, value: int, default: int, why: str) -> None:
    """Say, once, that a default was cut to what the rows allow."""
    logger.warning(
        "%s=None is %d here, not %d: %s; a number that you give is never cut", name, value, default, why
    )
