"""Conversion between times in seconds and their ISO 8601 text, which all logs and messages use."""

from __future__ import annotations

from datetime import UTC, datetime


def time_text(seconds: float | None = None) -> str:
    """Return a time in seconds since 1970, by default now, as ISO 8601 text in UTC."""
    when = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return when.isoformat(timespec="milliseconds")


def epoch_seconds(value: str | float | None) -> float | None:
    """Return a time as seconds since 1970: ISO 8601 text, or a number, which earlier versions wrote."""
    if isinstance(value, str):
        try:
            return datetime.fromisoformat(value).timestamp()
        except ValueError:
            return None
    return None if value is None or isinstance(value, bool) else float(value)
