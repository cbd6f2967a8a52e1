"""Search for the nearest centroid of a row in several clusterings that share centroids.

All clusterings have the same candidates for centroids, and each clustering uses some of them. The score of a
row and a centroid is larger if the centroid is nearer. The steps for a row:

1. Keep the centroids with the best float32 scores in a list, the best first (:func:`insert_score`). The list
   is so long that the probability that it contains no centroid of a clustering is below 1e-7.
2. If rounding can have exchanged two neighbours in the list, compute their scores again in float64. Then sort
   the list (:func:`sort_list`); of equal scores the lower index comes first.
3. Assign the row to the first centroid of each clustering in the list (:func:`assign_codes`). If a centroid
   outside the list could be nearer, the caller computes all scores of the row in float64.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable

import numpy as np

from scalelatent.kernels.jit import subkernel

# Largest probability that the list of the nearest centroids of a row has no centroid of a clustering; least
# length of the list. With a shorter list, more rows with nearly equal scores would need float64 scores.
_MISS_PROBABILITY, _LEAST_LENGTH = 1e-7, 4
# Placeholder for the number of a centroid within a clustering to which it does not belong.
NONE = np.iinfo(np.int32).max


def number_centroids(draws: np.ndarray | None, k: int) -> np.ndarray:
    """Return the number of each of k centroids within each clustering, int32 (centroids, clusterings).

    Each clustering numbers its centroids from 0; other centroids have the number NONE. ``draws``, bool
    (clusterings, centroids), is true for the centroids of each clustering; if it is None, one clustering has
    all centroids.
    """
    draws = np.ones((1, k), dtype=bool) if draws is None else draws
    return np.where(draws, np.cumsum(draws, axis=1, dtype=np.int32) - 1, NONE).T.astype(np.int32, order="C")


def merge_equal(rows: Iterable[Hashable], codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merge equal centroids, because their equal scores would fill a row's list of nearest centroids.

    ``rows`` are the contents of the centroids, and ``codes`` (centroids, clusterings) are their numbers
    within each clustering. Return the first index of each distinct centroid, and the lowest number of all
    centroids that are equal to it in each clustering.
    """
    first: dict[Hashable, int] = {}
    kept, group = np.unique([first.setdefault(row, i) for i, row in enumerate(rows)], return_inverse=True)
    if len(kept) == len(codes):
        return kept, codes
    merged = np.full((len(kept), codes.shape[1]), NONE, dtype=np.int32)
    np.minimum.at(merged, group, codes)
    return kept, merged


def list_length(codes: np.ndarray) -> int:
    """Return how many of its nearest centroids a row keeps, so that each clustering has one of them.

    ``codes`` (centroids, clusterings) is NONE if a centroid does not belong to a clustering.
    """
    share = float((codes != NONE).mean(axis=0).min())
    needed = math.ceil(math.log(_MISS_PROBABILITY) / math.log1p(-share)) if 0 < share < 1 else 1
    return min(max(needed, _LEAST_LENGTH), len(codes))


@subkernel
def insert_score(best: np.ndarray, index: np.ndarray, score: np.float32, j: int) -> None:
    """Insert the score of centroid j into the scores ``best``, which fall; drop the last score.

    ``index`` has the centroids of the scores. The new score is placed after equal scores.
    """
    t = len(best) - 1
    while t > 0 and best[t - 1] < score:
        best[t], index[t] = best[t - 1], index[t - 1]
        t -= 1
    best[t], index[t] = score, j


@subkernel
def is_close(best: np.ndarray, t: int, gap: float) -> np.bool_ | bool:
    """Return True if rounding can have exchanged the falling scores t and t - 1, or t and t + 1, of ``best``.

    Rounding cannot exchange scores that differ by ``gap`` or more.
    """
    before = t > 0 and np.float64(best[t - 1]) - np.float64(best[t]) < gap
    return before or (t + 1 < len(best) and np.float64(best[t]) - np.float64(best[t + 1]) < gap)


@subkernel
def sort_list(scores: np.ndarray, index: np.ndarray) -> None:
    """Sort ``scores`` and their centroids ``index`` by falling score; of equal scores, by rising index."""
    for t in range(1, len(scores)):
        score, j, at = scores[t], index[t], t
        while at > 0 and (scores[at - 1] < score or (scores[at - 1] == score and index[at - 1] > j)):
            scores[at], index[at] = scores[at - 1], index[at - 1]
            at -= 1
        scores[at], index[at] = score, j


@subkernel
def assign_codes(
    scores: np.ndarray, index: np.ndarray, least: float, codes: np.ndarray, before: np.ndarray,
    out: np.ndarray,
) -> bool:  # fmt: skip
    """Write the number of a row's nearest centroid in each clustering to ``out``.

    ``scores`` and ``index`` are the row's candidates, the best first; ``codes`` are the numbers of all
    centroids within each clustering. Only scores of at least ``least`` count; return False if a clustering
    has no candidate with such a score. Of equal scores the lowest number wins. ``before`` is scratch space.
    """
    for p in range(len(out)):
        out[p] = NONE
    for t in range(len(scores)):
        if scores[t] < least:
            return False
        if t == 0 or scores[t] != scores[t - 1]:
            for p in range(len(out)):
                before[p] = out[p]
        mine, missing = codes[index[t]], 0
        for p in range(len(out)):
            out[p] = min(out[p], mine[p]) if before[p] == NONE else out[p]
            missing += out[p] == NONE
        if missing == 0 and (t + 1 == len(scores) or scores[t + 1] != scores[t]):
            return True
    return False


@subkernel
def assign_best_codes(scores: np.ndarray, codes: np.ndarray, best: np.ndarray, out: np.ndarray) -> None:
    """Write the number of a row's nearest centroid in each clustering to ``out``, from all ``scores``.

    ``codes`` are the numbers of the centroids within each clustering. ``best`` is scratch space.
    """
    for p in range(len(out)):
        best[p], out[p] = -np.inf, NONE
    for j in range(len(codes)):
        mine = codes[j]
        for p in range(len(out)):
            if mine[p] != NONE:
                if scores[j] > best[p]:
                    best[p], out[p] = scores[j], mine[p]
                elif scores[j] == best[p]:
                    out[p] = min(out[p], mine[p])
