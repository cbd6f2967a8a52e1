"""Choices of a classifier by cross-validation of a sample: number of directions, and the likelihood."""

from __future__ import annotations

import math
from copy import copy
from typing import TYPE_CHECKING

import numpy as np

from scalelatent.contract.idle_threads import run_parts
from scalelatent.contract.learners import Block
from scalelatent.contract.stats import Stats
from scalelatent.engine.backend import make_backend
from scalelatent.models.linear_mixture.model.choose_dims import FOLDS, count_wrong, draw_class_rows
from scalelatent.models.linear_mixture.model.e_step import MixtureState, initial_state
from scalelatent.models.linear_mixture.model.em import MixtureEM

from .output import FittedMixture, MixtureRowMap
from .sample import initialise
from .settings import (
    count_columns,
    count_components,
    make_learner,
    make_settings,
    set_n_components,
)

if TYPE_CHECKING:
    from .settings import AnyMixture

# The comparison of likelihoods drops a candidate after a fold if it has more wrong rows than the best
# candidate, by more than this many standard errors of the difference.
BEHIND_ERRORS = 2.0


def choose_n_dims(x: np.ndarray, codes: np.ndarray, most: int, seed: int) -> int:
    """Return the number of directions, at most ``most``, with the fewest errors in cross-validation."""
    if not most:
        return 0
    is_finite = np.isfinite(x).all(axis=1)  # the first pass raises an error for other rows
    return int(count_wrong(x[is_finite], codes[is_finite], most, seed).argmin())


def fit_in_memory(em: MixtureEM, state: MixtureState, block: Block, device: str) -> MixtureState:
    """Return the state after all passes over the rows of one block."""
    work, backend = em.reductions()["train"], make_backend("reference" if device == "reference" else "cpu")
    while not em.is_done(state):
        stats = Stats.zeros(work.layout())
        work.accumulate(work.prepare(state, backend), block, stats)
        state = em.update(state, {"train": stats})
    return state


def choose_likelihood(model: AnyMixture, x: np.ndarray, codes: np.ndarray, seed: int) -> AnyMixture:
    """Return the model with the likelihood that gives the fewest errors in cross-validation of the sample.

    The candidates are the reconstruction error and factor analysis, both with the parameters of the model. If
    it has no ``n_components``, factor analysis with one component per class is a candidate too. The candidate
    with the reconstruction error is returned, unless the best one has fewer wrong rows by more than one
    standard error.
    """
    candidates = [copy(model).set_params(likelihood=name) for name in ("error", "factor-analysis")]
    if model.n_components is None:
        candidates.append(copy(candidates[1]).set_params(n_components=1))
    is_finite = np.isfinite(x).all(axis=1)
    owners = draw_class_rows(np.where(is_finite, codes, -1), seed)
    most = 1 if model.n_components is None else int(count_components(model, len(owners)).max())
    if len(owners) < 2 or min(map(len, owners)) < FOLDS * max(most, 2):
        return candidates[0]
    rows = np.concatenate(owners)
    fold_of = np.concatenate([np.arange(len(own)) % FOLDS for own in owners])
    x, codes = x[rows], codes[rows]
    wrong, racing = np.zeros(len(candidates), dtype=int), list(range(len(candidates)))
    for fold in range(FOLDS):

        def count(one: int, is_learned: np.ndarray = fold_of != fold) -> int:
            return _count_wrong(candidates[one], x, codes, is_learned, seed)

        wrong[racing] += run_parts(count, racing)
        least = int(wrong[racing].min())
        racing = [
            one for one in racing if wrong[one] - least <= BEHIND_ERRORS * math.sqrt(wrong[one] + least)
        ]
    best = min(racing, key=lambda one: wrong[one])
    is_close = 0 in racing and wrong[0] - wrong[best] <= math.sqrt(wrong[0] + wrong[best])
    return candidates[0 if is_close else best]


def _count_wrong(
    model: AnyMixture, x: np.ndarray, codes: np.ndarray, is_learned: np.ndarray, seed: int
) -> int:
    """Fit the model to the rows ``is_learned``; return its number of wrong classes on the other rows."""
    p, counts = x.shape[1], np.bincount(codes[is_learned])
    model = set_n_components(model, counts, labelled=True, warn=False)
    sizes = count_components(model, len(counts))
    width = count_columns(int(model.n_dims), p)
    first, variance = initialise(x[is_learned], codes[is_learned], sizes, width, seed)
    settings = make_settings(model, sizes, len(counts), p, variance, None)
    learned = Block(x[is_learned], codes[is_learned].astype(np.int32), np.ones(is_learned.sum()), 0)
    try:
        state = fit_in_memory(
            make_learner(model, settings), initial_state(settings, first), learned, model.device
        )
    except (FloatingPointError, np.linalg.LinAlgError):
        return len(x)
    row_map = MixtureRowMap(FittedMixture.from_state(settings, state), "classes")
    backend = make_backend("reference" if model.device == "reference" else "cpu")
    found = row_map.apply(row_map.prepare(backend), Block(x[~is_learned], None, None, 0))
    return int((row_map.labels(found) != codes[~is_learned]).sum())
