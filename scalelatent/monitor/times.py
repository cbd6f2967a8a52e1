"""Conversion between times and their text in records, which is the same in all records."""

from __future__ import annotations

from datetime import UTC, datetime


def time_text(seconds: float | None = None) -> str:
    """Return a time, by default now, as ISO 8601 text in UTC, which all records use."""
    when = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return when.isoformat(timespec="milliseconds")


def epoch_seconds(value: str | float | None) -> float | None:
    """Return a time of a record as seconds since 1970. Records of earlier versions have numbers."""
    if isinstance(value, str):
        try:
            return datetime.fromisoformat(value).timestamp()
        except ValueError:
            return None
    return None if value is None or isinstance(value, bool) else float(value)
