"""Times in records: one form for all of them."""

from __future__ import annotations

from datetime import UTC, datetime


def time_text(seconds: float | None = None) -> str:
    """Write a time, by default now, as all records do: ISO 8601 in UTC."""
    when = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return when.isoformat(timespec="milliseconds")


def epoch_seconds(value: str | float | None) -> float | None:
    """Read a time of a record as seconds since 1970, which records of earlier versions hold."""
    if isinstance(value, str):
        try:
            return datetime.fromisoformat(value).timestamp()
        except ValueError:
            return None
    return None if value is None or isinstance(value, bool) else float(value)
