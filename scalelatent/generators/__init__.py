"""Sets of rows that are made, not imported: which there are, by the name that provenance keeps.

A generator is an object with `columns`, the arguments of `create_dataset` that describe its rows, and
`rows(start, stop)`, a pure function of its parameters that gives rows and labels (or None). Each function
below makes one from a dataset's provenance; to add a set, write one and enter it here.
"""

from __future__ import annotations

__all__ = ["GENERATORS"]

_IMAGES = "scalelatent.generators.images:from_provenance"
_CORRUPTED = "scalelatent.generators.corrupted:from_provenance"

GENERATORS: dict[str, str] = {
    "digits": "scalelatent.generators.digits:from_provenance",
    "documents": "scalelatent.generators.documents:from_provenance",
    "bars": _IMAGES,
    "symbols": _IMAGES,
    "letters": _IMAGES,
    "text": _IMAGES,
    "traits": _IMAGES,
    "clean-digits": _CORRUPTED,
    "noisy-digits": _CORRUPTED,
    "occluded-digits": _CORRUPTED,
    "bordered-digits": _CORRUPTED,
    "patched-digits": _CORRUPTED,
    "gridded-digits": _CORRUPTED,
    "cluttered-digits": _CORRUPTED,
    "deleted-digits": _CORRUPTED,
}
"""Name of a set -> module:function(provenance, url) that makes its generator."""
