"""Lists of the nearest centroids of a row, from which several clusterings take their codes.

Clusterings that share a pool of centroids use the same scores, but each may take only some of the centroids.
The steps for a row:

1. Keep the best scores in float32 in a falling list (:func:`insert_score`). It is so long that a clustering
   finds none of its centroids in the list with a probability below 1e-7.
2. Compute neighbours in the list again in float64, if their scores differ by less than rounding can change,
   and sort the list (:func:`sort_list`). Of equal scores the lower index comes first.
3. Give each clustering the first centroid of the list that it may take (:func:`assign_codes`), as far as no
   centroid outside the list can have a larger score. If this leaves a clustering without a code, the caller
   computes all scores of the row in float64.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable

import numpy as np

from scalelatent.kernels.jit import subkernel

# Largest probability that a list has no centroid of a clustering, and least length of a list. If lists were
# shorter, rows with several nearly equal scores would need all scores in float64.
_MISS_PROBABILITY, _LEAST_LENGTH = 1e-7, 4
# Code that marks a centroid as no member of a clustering.
NONE = np.iinfo(np.int32).max


def number_centroids(draws: np.ndarray | None, k: int) -> np.ndarray:
    """Return the code of each of k centroids in each clustering, int32 (centroids, clusterings).

    The code is the centroid's number among those that the clustering may take, which are true in ``draws``,
    bool (clusterings, centroids); None: one clustering takes all. The codes of other centroids are NONE.
    """
    draws = np.ones((1, k), dtype=bool) if draws is None else draws
    return np.where(draws, np.cumsum(draws, axis=1, dtype=np.int32) - 1, NONE).T.astype(np.int32, order="C")


def merge_equal(rows: Iterable[Hashable], codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merge equal centroids, because their scores could differ by rounding only and would fill the lists.

    ``rows`` are the contents of the centroids. Return the first index of each distinct centroid, and the
    codes of each distinct centroid: in each clustering the lowest code of the centroids that are equal to it.
    """
    first: dict[Hashable, int] = {}
    kept, group = np.unique([first.setdefault(row, i) for i, row in enumerate(rows)], return_inverse=True)
    if len(kept) == len(codes):
        return kept, codes
    merged = np.full((len(kept), codes.shape[1]), NONE, dtype=np.int32)
    np.minimum.at(merged, group, codes)
    return kept, merged


def list_length(codes: np.ndarray) -> int:
    """Return the length of the candidate lists, from the codes of the centroids in the clusterings."""
    taken = float((codes != NONE).mean(axis=0).min())
    needed = math.ceil(math.log(_MISS_PROBABILITY) / math.log1p(-taken)) if 0 < taken < 1 else 1
    return min(max(needed, _LEAST_LENGTH), len(codes))


@subkernel
def insert_score(best: np.ndarray, index: np.ndarray, score: np.float32, j: int) -> None:
    """Insert a score into a falling list, behind equal scores; the last entry is lost."""
    t = len(best) - 1
    while t > 0 and best[t - 1] < score:
        best[t], index[t] = best[t - 1], index[t - 1]
        t -= 1
    best[t], index[t] = score, j


@subkernel
def is_close(best: np.ndarray, t: int, gap: float) -> np.bool_ | bool:
    """Return whether rounding can have exchanged entry t of a list and the entry before or after it."""
    before = t > 0 and np.float64(best[t - 1]) - np.float64(best[t]) < gap
    return before or (t + 1 < len(best) and np.float64(best[t]) - np.float64(best[t + 1]) < gap)


@subkernel
def sort_list(scores: np.ndarray, index: np.ndarray) -> None:
    """Sort a nearly sorted list by falling scores, and equal scores by rising index."""
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
    """Write the code of each clustering; return False if entries of at least ``least`` do not suffice.

    Of equal scores the lowest code wins; ``before`` is scratch space for the codes from larger scores.
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
    """Write the code of each clustering from the scores of all centroids; ``best`` is scratch space."""
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
