"""Workers as a job sees them: what each has computed, how fast, and those that were lost."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .series import Rate

__all__ = ["WorkerRows", "Workers"]

LIMIT = 1000
SPAN_FIELDS = ("stage", "pass", "part", "span")


class WorkerRows:
    """One worker's share of a job."""

    __slots__ = ("address", "bytes", "last", "lost", "name", "pool", "rate", "rows", "rss", "seconds",
                 "seen", "spans", "wait")  # fmt: skip

    def __init__(self, address: str) -> None:
        self.address, self.name, self.pool = address, address, "cpu"
        self.rows = self.bytes = self.spans = self.rss = 0
        self.seconds = self.wait = self.seen = 0.0
        self.rate, self.last, self.lost = Rate(), "", False

    def add(self, message: Mapping[str, Any], now: float) -> None:
        """Take in a span."""
        rows, seconds = int(number(message, "rows")), number(message, "seconds")
        self.name = clip(message.get("name") or self.address, 80)
        self.pool = pool_of(message)
        self.rows += rows
        self.bytes += int(number(message, "bytes"))
        self.spans += int(number(message, "spans", 1))
        self.seconds += seconds
        self.wait += number(message, "wait_seconds")
        self.rss = int(number(message, "rss")) or self.rss
        self.rate.add(now, rows, seconds)
        self.last, self.seen, self.lost = span_text(message), now, False

    def to_dict(self, now: float) -> dict[str, Any]:
        """For JSON."""
        return {
            "worker": self.address,
            "name": self.name,
            "pool": self.pool,
            "rows": self.rows,
            "rows_per_s": 0.0 if self.lost else self.rate.at(now),
            "bytes": self.bytes,
            "spans": self.spans,
            "span_seconds": self.seconds / self.spans if self.spans else None,
            "wait_share": self.wait / self.seconds if self.seconds else None,
            "rss": self.rss or None,
            "last_span": self.last,
            "seconds_ago": round(now - self.seen, 1) if self.seen else None,
            "lost": self.lost,
        }


class Workers:
    """All workers that a job was told of; at most ``LIMIT``, and sums of those that had to be dropped."""

    def __init__(self) -> None:
        self.rows: dict[str, WorkerRows] = {}
        self.pool_rows: dict[str, int] = {}
        self._lost: dict[str, None] = {}
        self.lost_total = 0

    def __len__(self) -> int:
        return sum(1 for worker in self.rows.values() if not worker.lost)

    def add(self, message: Mapping[str, Any], now: float) -> None:
        """Take in a span that a worker has computed."""
        address = clip(message.get("worker") or "?", 200)
        worker = self.rows.get(address)
        if worker is None:
            self._make_room()
            worker = self.rows[address] = WorkerRows(address)
        worker.add(message, now)
        self.pool_rows[worker.pool] = self.pool_rows.get(worker.pool, 0) + int(number(message, "rows"))

    def lose(self, address: str) -> bool:
        """A worker has gone; False where that was known."""
        if address in self._lost:
            return False
        self._lost[address] = None
        if len(self._lost) > LIMIT:
            del self._lost[next(iter(self._lost))]
        self.lost_total += 1
        if address in self.rows:
            self.rows[address].lost = True
        return True

    def clear(self) -> None:
        """Forget single workers, of a job that has long ended; the sums stay."""
        self.rows.clear()
        self._lost.clear()

    def pools(self, now: float) -> list[dict[str, Any]]:
        """Sums by kind of device."""
        out = {pool: {"pool": pool, "workers": 0, "rows": rows, "rows_per_s": 0.0}
               for pool, rows in sorted(self.pool_rows.items())}  # fmt: skip
        for worker in self.rows.values():
            if not worker.lost and worker.pool in out:
                out[worker.pool]["workers"] += 1  # type: ignore[operator]
                out[worker.pool]["rows_per_s"] += worker.rate.at(now)  # type: ignore[operator]
        return list(out.values())

    def to_list(self, now: float) -> list[dict[str, Any]]:
        """Each worker's share, in the order in which they came."""
        return [worker.to_dict(now) for worker in self.rows.values()]

    def _make_room(self) -> None:
        if len(self.rows) >= LIMIT:
            oldest = min(self.rows.values(), key=lambda w: (not w.lost, w.seen))
            del self.rows[oldest.address]


def number(message: Mapping[str, Any], key: str, default: float = 0.0) -> float:
    """A finite number of a message, which anyone may have sent.

    Examples
    --------
    >>> number({"rows": 5}, "rows"), number({"rows": "many"}, "rows")
    (5.0, 0.0)
    """
    value = message.get(key)
    if isinstance(value, (int, float)) and abs(value) <= 1e300:
        return float(value)
    return default


def number_or_none(message: Mapping[str, Any], key: str) -> float | None:
    """A finite number of a message, or None."""
    value = number(message, key, float("nan"))
    return value if value == value else None


def clip(value: Any, length: int = 300) -> str:
    """Text of bounded length.

    Examples
    --------
    >>> clip("a long word", 6)
    'a lon…'
    """
    text = str(value)
    return text if len(text) <= length else text[: length - 1] + "…"


def pool_of(message: Mapping[str, Any], unknown: str = "cpu") -> str:
    """Kind of device that a message tells of.

    Examples
    --------
    >>> pool_of({"device": "cupy"}), pool_of({"device": "cpu"}), pool_of({})
    ('gpu', 'cpu', 'cpu')
    """
    device = clip(message.get("device") or message.get("pool") or unknown, 20).lower()
    return {"cupy": "gpu", "cuda": "gpu", "numpy": "cpu", "numba": "cpu"}.get(device, device)


def span_text(message: Mapping[str, Any]) -> str:
    """A span in few words.

    Examples
    --------
    >>> span_text({"stage": "capsule_estep", "pass": 3, "part": "train", "span": 17})
    'capsule_estep, pass 3, span 17'
    """
    stage, number_, part, span = (message.get(key) for key in SPAN_FIELDS)
    words = [clip(stage, 60)] if stage else []
    if number_ is not None:
        words.append(f"pass {clip(number_, 12)}")
    if span is not None:
        words.append(f"{'validation ' if part == 'validation' else ''}span {clip(span, 40)}")
    return ", ".join(words)


def natural(name: str) -> tuple[Any, ...]:
    """Order names as people do: worker-2 before worker-10.

    Examples
    --------
    >>> sorted(["w-10", "w-2"], key=natural)
    ['w-2', 'w-10']
    """
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name))
