"""What lower layers may ask of higher ones: the face of the package says by which name, and where it lies."""

from __future__ import annotations

import importlib
from typing import Any

_WHERE: dict[str, tuple[str, str]] = {}


def offer(what: str, module: str, name: str) -> None:
    """Say where something lies; it is imported when it is first asked for."""
    _WHERE[what] = module, name


def ask(what: str) -> Any:
    """What was offered by a name; a LookupError where nothing was."""
    if what not in _WHERE:
        raise LookupError(f"{what}: nothing was offered by this name; `import scalelatent` first")
    module, name = _WHERE[what]
    return getattr(importlib.import_module(module), name)
