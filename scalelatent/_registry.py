"""Objects of higher layers that lower layers call: registered by name, and imported at the first call."""

from __future__ import annotations

import importlib
from typing import Any

_REGISTERED: dict[str, tuple[str, str]] = {}


def register(name: str, module: str, attribute: str) -> None:
    """Register an attribute of a module under a name, without importing the module."""
    _REGISTERED[name] = module, attribute


def find_registered(name: str) -> Any:
    """Return the object that was registered under a name; raise LookupError if there is none."""
    if name not in _REGISTERED:
        raise LookupError(f"no object is registered as {name!r}; run `import scalelatent` first")
    module, attribute = _REGISTERED[name]
    return getattr(importlib.import_module(module), attribute)
