"""What parameters that are numbers may be."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any


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
