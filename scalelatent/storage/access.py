"""Storage options, which a location needs besides its address."""

from __future__ import annotations

import re
import threading
import uuid
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

SECRET_NAMES = re.compile(
    r"secret|token|passw|credential|signature|connection_string|authorization|bearer|cookie|(access|api)[-_]?key"
    r"|(^|[-_.])(key|sas|sig|auth)$",
    re.IGNORECASE,
)
"""Pattern of the names of options whose values must not be written or shown."""

_known: weakref.WeakValueDictionary[str, Access] = weakref.WeakValueDictionary()
_lock = threading.Lock()


class Access:
    """Storage options of fsspec, and a random identifier (`mark`).

    Run folders store only the identifier, because the options may contain secrets; pickles store both.
    """

    def __init__(self, mark: str, options: dict[str, Any]) -> None:
        self.mark, self.options = mark, options

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Access:
        """Return the `Access` with these storage options; equal options give the same object."""
        with _lock:
            for known in list(_known.values()):
                if known.options == options:
                    return known
            return _register(cls(uuid.uuid4().hex[:16], dict(options)))

    def __reduce__(self) -> tuple[object, ...]:
        return _received, (self.mark, self.options)

    def __repr__(self) -> str:
        return f"Access({self.mark}: {', '.join(self.options)})"

    def hide(self, text: str) -> str:
        """Return a text in which the secrets of the options are replaced by "…"."""
        for value in _secrets(self.options):
            text = text.replace(value, "…")
        return text


def known_access(mark: str) -> Access | None:
    """Return the `Access` with this identifier; None if this process does not have such an object."""
    return _known.get(mark)


def _register(access: Access) -> Access:
    _known[access.mark] = access
    return access


def _received(mark: str, options: dict[str, Any]) -> Access:
    with _lock:
        return _known.get(mark) or _register(Access(mark, options))


def _secrets(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _secrets(value)
        elif isinstance(value, str) and len(value) >= 4 and SECRET_NAMES.search(name):
            yield value
