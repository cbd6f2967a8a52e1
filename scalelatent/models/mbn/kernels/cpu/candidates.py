"""Lists of the nearest centroids of a row, from which several clusterings take their codes.

The clusterings share a pool of centroids, and each clustering consists of some centroids of the pool. The
score of a row and a centroid is larger if the centroid is nearer. The steps for a row:

1. Keep the best scores in float32 in a list in falling order (:func:`insert_score`). The list is so long that
   the probability that it contains no centroid of a clustering is below 1e-7.
2. If rounding can have exchanged two neighbours in the list, compute their scores again in float64. Then sort
   the list (:func:`sort_list`); of equal scores the lower index comes first.
3. Give each clustering its first centroid in the list (:func:`assign_codes`), unless a centroid outside the
   list could have a larger score. If a clustering gets no code, the caller computes all scores of the row in
   float64.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable

import numpy as np

from scalelatent.kernels.jit import subkernel

# Largest probability that the list of a row has no centroid of a clustering, and least length of the list.
# With a shorter list, rows with several nearly equal scores would need all scores in float64.
_MISS_PROBABILITY, _LEAST_LENGTH = 1e-7, 4
# Code of a centroid that does not belong to a clustering.
NONE = np.iinfo(np.int32).max


def number_centroids(draws: np.ndarray | None, k: int) -> np.ndarray:
    """Return the code of each of k centroids in each clustering, int32 (centroids, clusterings).

    ``draws``, bool (clusterings, centroids), is true for the centroids of each clustering; None: one
    clustering has all centroids. Each clustering numbers its centroids from 0. A centroid that does not
    belong to a clustering has the code NONE in it.
    """
    draws = np.ones((1, k), dtype=bool) if draws is None else draws
    return np.where(draws, np.cumsum(draws, axis=1, dtype=np.int32) - 1, NONE).T.astype(np.int32, order="C")


def merge_equal(rows: Iterable[Hashable], codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merge equal centroids, because their equal scores would fill a row's list of nearest centroids.

    ``rows`` are the contents of the centroids, and ``codes`` (centroids, clusterings) are their codes. Return
    the first index of each distinct centroid, and its code in each clustering: the lowest code of all
    centroids that are equal to it.
    """
    first: dict[Hashable, int] = {}
    kept, group = np.unique([first.setdefault(row, i) for i, row in enumerate(rows)], return_inverse=True)
    if len(kept) == len(codes):
        return kept, codes
    merged = np.full((len(kept), codes.shape[1]), NONE, dtype=np.int32)
    np.minimum.at(merged, group, codes)
    return kept, merged


def list_length(codes: np.ndarray) -> int:
    """Return the number of centroids in the list of each row, from their ``codes`` in each clustering."""
    taken = float((codes != NONE).mean(axis=0).min())
    needed = math.ceil(math.log(_MISS_PROBABILITY) / math.log1p(-taken)) if 0 < taken < 1 else 1
    return min(max(needed, _LEAST_LENGTH), len(codes))


@subkernel
def insert_score(best: np.ndarray, index: np.ndarray, score: np.float32, j: int) -> None:
    """Insert the score of centroid j into the falling list ``best``, behind equal scores; drop the last."""
    t = len(best) - 1
    while t > 0 and best[t - 1] < score:
        best[t], index[t] = best[t - 1], index[t - 1]
        t -= 1
    best[t], index[t] = score, j


@subkernel
def is_close(best: np.ndarray, t: int, gap: float) -> np.bool_ | bool:
    """Return True if rounding can have exchanged score t of a list and the score before or after it.

    Rounding cannot exchange scores that differ by ``gap`` or more.
    """
    before = t > 0 and np.float64(best[t - 1]) - np.float64(best[t]) < gap
    return before or (t + 1 < len(best) and np.float64(best[t]) - np.float64(best[t + 1]) < gap)


@subkernel
def sort_list(scores: np.ndarray, index: np.ndarray) -> None:
    """Sort a list of centroids by falling scores, and centroids of equal scores by rising index."""
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
    """Write the code of a row in each clustering to ``out``, from its sorted list of candidate centroids.

    Only scores of at least ``least`` count; return False if a clustering gets no code from them. Of equal
    scores the lowest code wins. ``before`` is scratch space for the codes from larger scores.
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
    """Write the code of a row in each clustering to ``out``, from the scores of all centroids.

    ``best`` is scratch space for the largest score of each clustering.
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
