"""Table of the generators: sets of rows that depend only on parameters, such as a seed, and the row number.

A generator has the attribute `columns`, the arguments of `create_dataset` that describe its rows, and the
method `rows(start, stop)`, which returns rows and labels (or None). Each function in `GENERATORS` makes a
generator from the provenance of a dataset. To add a set, write such a function and enter it in the table.
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
"""Function of (provenance, url) that makes a generator, as "module:name", by the name of the set."""
