"""The options of the binary image sets, and all that follows from them: what a dataset's provenance keeps."""

from __future__ import annotations

from typing import Any

from scalelatent.errors import DataError
from scalelatent.kernels.random_words import check_seed

from . import glyphs

__all__ = ["DEFAULTS", "VOCABULARY", "parameters_of"]

DEFAULTS: dict[str, dict[str, Any]] = {
    "bars": {"noise": 0.03, "crosses": 5, "length": 5},
    "symbols": {"noise": 0.0, "size": [64, 64], "count": 16},
    "letters": {"noise": 0.03, "size": [24, 24], "count": 5, "alphabet": "ABCDEFGHIJKLMNOPQRSTUVWXYZ"},
    "text": {"noise": 0.0, "size": [72, 128]},
    "traits": {"noise": 0.001, "gap": 3, "together": False, "labels": "category"},
}
"""Options of each set; also its kinds."""

_WORDS = """
THE OF AND TO IN A IS THAT FOR IT AS WAS WITH BE BY ON NOT HE HIS BUT AT ARE THIS HAVE FROM HAD THEY
WHICH ONE YOU WERE HER ALL THERE WOULD THEIR WE HIM BEEN HAS WHEN WHO WILL MORE NO IF OUT SO SAID
WHAT UP ITS ABOUT INTO THAN THEM CAN ONLY OTHER NEW SOME COULD TIME THESE TWO MAY THEN DO FIRST ANY
MY NOW SUCH LIKE OUR OVER MAN ME EVEN MOST MADE AFTER ALSO DID MANY BEFORE MUST THROUGH YEARS WHERE
MUCH YOUR WAY WELL DOWN SHOULD BECAUSE EACH JUST THOSE PEOPLE HOW TOO LITTLE STATE GOOD VERY MAKE
WORLD STILL OWN SEE WORK LONG GET HERE BETWEEN BOTH LIFE BEING UNDER NEVER DAY SAME ANOTHER KNOW
WHILE LAST MIGHT GREAT OLD YEAR OFF COME SINCE AGAINST GO CAME RIGHT USED TAKE THREE QUIZ JAZZ EXACT
BOX FIX JUDGE QUICK ZERO
"""
VOCABULARY = tuple(_WORDS.split())
"""Words of the text pages, commonest first."""


def parameters_of(kind: str, seed: int, options: dict[str, Any]) -> dict[str, Any]:
    """All that decides a set, JSON-able, its features included: a later font makes no other images."""
    if kind not in DEFAULTS:
        raise DataError(f"there is no image set {kind!r}; there are {', '.join(DEFAULTS)}")
    given = {k: v for k, v in options.items() if v is not None}
    unknown = sorted(set(given) - set(DEFAULTS[kind]))
    if unknown:
        raise DataError(f"{kind} has no option {unknown[0]!r}; it has {', '.join(DEFAULTS[kind])}")
    p: dict[str, Any] = {"importer": kind, "seed": int(seed), **DEFAULTS[kind], **given}
    check_seed(seed)
    if not 0 <= p["noise"] <= 1:
        raise DataError(f"noise is {p['noise']}, but the chance of a flipped pixel lies in 0 to 1")
    for name in ("crosses", "length", "count", "gap"):
        if name in p and not (name != "gap") <= p[name] <= 1000:
            raise DataError(f"{name} is {p[name]}, but it has to be {int(name != 'gap')} to 1000")
    if "size" in p:
        p["size"] = [int(s) for s in p["size"]]
    return {**p, "features": _features(kind, p)}


def _features(kind: str, p: dict[str, Any]) -> dict[str, list[str]]:
    if kind == "bars":
        return glyphs.bar(p["length"])
    if kind in ("symbols", "traits"):
        return glyphs.SYMBOLS if kind == "symbols" else glyphs.TRAITS
    wanted = p.get("alphabet", "".join(glyphs.LETTERS)).upper()
    absent = [c for c in wanted if c not in glyphs.LETTERS]
    if absent or not wanted or len(set(wanted)) < len(wanted):
        raise DataError(f"alphabet is {wanted!r}, but it has to be different letters A to Z")
    return {c: glyphs.LETTERS[c] for c in wanted}
