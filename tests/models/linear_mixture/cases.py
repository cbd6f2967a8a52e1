"""Make rows near a few linear components, and run passes of EM in plain loops, without the engine."""

from __future__ import annotations

import numpy as np

from scalelatent.contract.learners import Block
from scalelatent.contract.stats import Stats
from scalelatent.engine.backend import make_backend
from scalelatent.models.linear_mixture.kernels import reference
from scalelatent.models.linear_mixture.kernels.reference import Scores
from scalelatent.models.linear_mixture.model.components import Components
from scalelatent.models.linear_mixture.model.e_step import MAIN, MixtureSettings, MixtureState, initial_state
from scalelatent.models.linear_mixture.model.em import MixtureEM
from scalelatent.models.linear_mixture.model.start import random_bases


def draw(seed: int, *shape: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(seed)).normal(size=shape)


def make_rows(n: int, p: int, k: int, h: int, seed: int = 0, noise: float = 0.3) -> np.ndarray:
    """Return n float32 rows of p features in [-1, 1], near k components (a mean and h directions each)."""
    rng = np.random.Generator(np.random.Philox(seed))
    which = rng.integers(k, size=n)
    means, bases = 2.0 * rng.normal(size=(k, p)), rng.normal(size=(k, p, h))
    codes = rng.normal(size=(n, h)) * np.linspace(2.0, 1.0, h)
    rows = means[which] + np.einsum("nph,nh->np", bases[which], codes) + noise * rng.normal(size=(n, p))
    return (rows / np.abs(rows).max()).astype(np.float32)


def draw_start(x: np.ndarray, k: int, h: int, q: int, likelihood: str, seed: int = 0) -> Components:
    """Return k components whose means are rows of x, from which a fit with the given likelihood starts.

    A component has q directions, of which h are used.
    """
    rng = np.random.Generator(np.random.Philox(seed))
    p, variance = x.shape[1], float(x.var(axis=0, dtype=np.float64).mean())
    means = x[rng.choice(len(x), k, replace=False)].astype(np.float64)
    bases = random_bases(k, p, q, seed)
    values, noise = np.full((k, q), 2 * variance), np.full(k, variance)
    if likelihood == "factor-analysis":
        bases, noise = bases * np.sqrt(variance), np.full((k, p), variance)
        bases[:, :, h:] = 0.0
    return Components(means, bases, values, noise, np.full(k, 1.0 / k), h)


def run_pass(
    em: MixtureEM, state: MixtureState, x: np.ndarray, y=None, backend: str = "reference", rows: int = 0
) -> Stats:
    """Return the sums of one pass over x, which reads ``rows`` rows at a time (0: all rows at once)."""
    device, work = make_backend("cpu" if backend == "numba" else backend), em.reductions()["train"]
    prepared, stats = work.prepare(state, device), Stats.zeros(work.layout())
    for a in range(0, len(x), rows or max(len(x), 1)):
        part = slice(a, a + (rows or len(x)))
        work.accumulate(prepared, Block(x[part], None if y is None else y[part], None, a), stats)
    return stats


def run_passes(em, state, x, y=None, n: int = 10, backend: str = "reference") -> list[MixtureState]:
    """Return the states of EM after each pass; stop after n passes, or earlier if the fit is done."""
    states = []
    while len(states) < n and not em.is_done(state):
        state = em.update(state, {"train": run_pass(em, state, x, y, backend)})
        states.append(state)
    return states


def make_main_em(x, k, h, likelihood="error", assignment="hard", q=0, start=None, **options):
    """Return an EM without classes and its initial state; it never stops and never replaces components."""
    p = x.shape[1]
    q = min(p, q or h)
    mixture = MixtureSettings(p, np.zeros(k, dtype=np.int64), 0, likelihood, assignment, **options)
    em = MixtureEM(mixture, h, q, tol=-1.0, max_iter=10**6, may_refill=False)
    start = draw_start(x, k, h, q, likelihood) if start is None else start
    return em, initial_state(mixture, start, MAIN)


def score_rows(scores: Scores, x: np.ndarray) -> np.ndarray:
    """Return the scores (n, k) of n rows under all k components; the smallest score is the best."""
    return reference.all_scores(reference.make_scorer(scores, np.array([0, len(scores.c)])), x, 0, 1)


def find_nearest(scores: Scores, x: np.ndarray, first: int, stop: int) -> np.ndarray:
    """Return for each row the component with the smallest score, of components ``first`` to ``stop - 1``."""
    return reference.nearest(reference.make_scorer(scores, np.array([first, stop])), x, 0, 1)[1][:, 0]
