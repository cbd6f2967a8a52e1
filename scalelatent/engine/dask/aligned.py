"""Arrays that another process has sent, at addresses of their type.

Messages hold arrays one behind the other, at any byte. numpy works on them, but its matrix products then go
by loops of its own in place of BLAS: slower, and with other bits than on the worker that made them.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np


def aligned(tree: Any) -> Any:
    """A tree of dataclasses, dicts, lists and tuples, with arrays copied that do not lie at such an address.

    An array that the tree holds in several places stays one.

    Examples
    --------
    >>> odd = np.frombuffer(b"." + np.arange(3.0).tobytes(), dtype="f8", offset=1)
    >>> odd.flags.aligned, aligned({"a": odd})["a"].flags.aligned
    (False, True)
    """
    return _aligned(tree, {})


def _aligned(tree: Any, seen: dict[int, np.ndarray]) -> Any:
    if isinstance(tree, np.ndarray):
        return seen.setdefault(id(tree), np.require(tree, requirements="A"))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        old = {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree)}
        new = {name: _aligned(value, seen) for name, value in old.items()}
        if all(new[name] is old[name] for name in old):
            return tree
        tree = copy.copy(tree)
        for name, value in new.items():
            object.__setattr__(tree, name, value)  # frozen ones too
        return tree
    if type(tree) is dict:
        return {key: _aligned(value, seen) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_make"):
        return tree._make(_aligned(value, seen) for value in tree)
    if type(tree) in (list, tuple):
        return type(tree)(_aligned(value, seen) for value in tree)
    return tree
