"""Numbers over time in bounded memory: curves that thin themselves out, and rates."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

__all__ = ["Curve", "Rate"]

NAN = float("nan")
EARLY = 0.2


class Curve:
    """Columns of numbers against one growing axis; never more than ``limit`` points.

    When the limit is reached every other point is dropped, and from then on only every second, fourth, …
    new one is kept. The last point is always there.

    Parameters
    ----------
    columns : sequence of str
    limit : int
        Points kept, at least 4.

    Examples
    --------
    >>> curve = Curve(["objective"], limit=4)
    >>> for number in range(1, 10):
    ...     curve.add(number, {"objective": 1 / number})
    >>> list(curve.x)
    [1.0, 5.0, 9.0]
    """

    __slots__ = ("_count", "_last_kept", "columns", "limit", "stride", "x")

    def __init__(self, columns: Sequence[str], limit: int = 400) -> None:
        self.limit = max(4, limit)
        self.stride, self._count, self._last_kept = 1, 0, True
        self.x = array("d")
        self.columns = {name: array("d") for name in columns}

    def __len__(self) -> int:
        return len(self.x)

    def add(self, x: float, values: Mapping[str, float | None]) -> None:
        """Append a point; what lies at ``x`` or behind it is dropped (a resumed run repeats passes)."""
        if self.x and x <= self.x[-1]:
            self._cut(x)
        if not self._last_kept:
            self._pop()
        self._push(x, values)
        self._last_kept = self._count % self.stride == 0
        self._count += 1
        if len(self.x) > self.limit:
            self.thin()

    def thin(self) -> None:
        """Drop every other point but the last."""
        for column in (self.x, *self.columns.values()):
            last = column[-1]
            even = len(column) % 2 == 0
            column[:] = column[::2]
            if even:
                column.append(last)
        self.stride *= 2
        self._last_kept = self._last_kept and (self._count - 1) % self.stride == 0

    def to_dict(self) -> dict[str, list[float | None]]:
        """Columns as lists fit for JSON, ``x`` among them; those without a number are left out."""
        out: dict[str, list[float | None]] = {"x": list(self.x)}
        for name, column in self.columns.items():
            if any(value == value for value in column):
                out[name] = [value if value == value else None for value in column]
        return out

    def last(self, name: str) -> float | None:
        """The last number of a column."""
        return next((value for value in reversed(self.columns[name]) if value == value), None)

    def _push(self, x: float, values: Mapping[str, float | None]) -> None:
        self.x.append(x)
        for name, column in self.columns.items():
            value = values.get(name)
            column.append(NAN if value is None else value)

    def _pop(self) -> None:
        for column in (self.x, *self.columns.values()):
            column.pop()

    def _cut(self, x: float) -> None:
        keep = sum(1 for earlier in self.x if earlier < x)
        for column in (self.x, *self.columns.values()):
            del column[keep:]
        self._count, self._last_kept = keep * self.stride, True


class Rate:
    """Something per second, over the last few seconds.

    Parameters
    ----------
    window : float
        Seconds that are counted together.

    Examples
    --------
    >>> rate = Rate(window=2)
    >>> for second in range(10):
    ...     rate.add(second, 100)
    >>> rate.at(10), rate.at(100)
    (100.0, 0.0)
    """

    __slots__ = ("_begin", "_last", "_sum", "value", "window")

    def __init__(self, window: float = 3.0) -> None:
        self.window = window
        self._begin: float | None = None
        self._last, self._sum, self.value = 0.0, 0.0, 0.0

    def add(self, now: float, amount: float, seconds: float | None = None) -> None:
        """Count an amount that was done by ``now``; ``seconds`` is what the first one took."""
        if self._begin is None or now - self._last > 10 * self.window:
            self._begin, self._sum = now - (seconds or 0.0), 0.0
            self._last = now
            if not seconds:
                return
        self._sum += amount
        self._last = now
        passed = now - self._begin
        full = passed >= self.window
        if full or (
            not self.value and passed >= min(EARLY, self.window)
        ):  # a first word before the window is full
            fresh = self._sum / passed
            self.value = 0.5 * (self.value + fresh) if self.value and full else fresh
        if full:
            self._begin, self._sum = now, 0.0

    def at(self, now: float) -> float:
        """The rate, 0 where nothing was heard of for ten windows."""
        return self.value if now - self._last <= 10 * self.window else 0.0
