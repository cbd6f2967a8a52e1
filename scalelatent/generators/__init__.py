"""Generators: sets of rows that are functions of a seed and the row number, by the name in their provenance.

A generator has the attribute `columns`, the arguments of `create_dataset` that describe its rows, and the
method `rows(start, stop)`, which returns rows and labels (or None) and depends on its parameters only. Each
function below makes a generator from the provenance of a dataset. To add a set, write such a function and
enter it here.
"""

from __future__ import annotations

_IMAGE_SETS = ("bars", "symbols", "letters", "text", "traits")
_CORRUPTED_SETS = (
    "clean-digits",
    "noisy-digits",
    "occluded-digits",
    "bordered-digits",
    "patched-digits",
    "gridded-digits",
    "cluttered-digits",
    "deleted-digits",
)

GENERATORS: dict[str, str] = {
    "digits": "scalelatent.generators.digits:from_provenance",
    "documents": "scalelatent.generators.documents:from_provenance",
    **dict.fromkeys(_IMAGE_SETS, "scalelatent.generators.images:from_provenance"),
    **dict.fromkeys(_CORRUPTED_SETS, "scalelatent.generators.corrupted:from_provenance"),
}
"""Name of a set -> module:function(provenance, url) that makes its generator."""
