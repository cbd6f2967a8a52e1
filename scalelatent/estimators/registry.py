"""Model kinds by the name that job files and saved models use."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

from scalelatent.errors import JobError

KINDS = {"capsule": ("scalelatent.estimators.capsule", "CapsuleRegression")}


def get_estimator(kind: str) -> Any:
    """The estimator class of a kind.

    Raises
    ------
    JobError
        An unknown kind: naming the nearest.

    Examples
    --------
    >>> get_estimator("capsule").__name__
    'CapsuleRegression'
    """
    if kind not in KINDS:
        near = difflib.get_close_matches(kind, KINDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; there are: {', '.join(KINDS)}"
        raise JobError(f"[model] kind = {kind!r} is no model{hint}")
    module, name = KINDS[kind]
    return getattr(importlib.import_module(module), name)
