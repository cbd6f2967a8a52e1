"""First weights of a fit, and the schedule of rounds: thresholds nu, each with its patience."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scalelatent.reductions.eigen import leading_eigenvectors, unit_scale

from .members import Members

PAPER_SCHEDULE: tuple[tuple[float, int], ...] = ((0.8, 128), (0.6, 64), (0.4, 32), (0.2, 16), (0.0, 8))
"""Rounds (threshold nu, patience in passes) of section 3.1."""

# Patience in passes of the only round of plain EM, which therefore never ends.
FOREVER = 2**62
# A capsule gets initial weights only in directions whose mean square over its rows is above this share of the
# largest mean square.
LEAST_SHARE = 1e-6
# An eigenvalue below this share of the largest has fewer than six correct digits in float64.
CONDITION = 1e-10


def subspace_start(members: Members, moment: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return W (D, p) from the leading eigenpairs of each capsule's rows (Saul, 2021, equation 2.28).

    ``moment`` (classes, p, p) and ``weight`` (classes,) are the second moments and the total weights of the
    classes. If the rows of a class have fewer directions than its capsule, the remaining rows of W are zero;
    this does not depend on the units of the features. Rows of a class get latents of mean squared length 1
    from their own capsule and often longer latents from other capsules, so the error rates of the first
    passes are above the error rate of guessing.
    """
    unit = unit_scale(moment.sum(axis=0))
    w = np.zeros((members.total_dim, moment.shape[1]))
    pairs: dict[tuple[bytes, int], np.ndarray] = {}
    for r in range(members.n_members):
        row = members.offsets[r]
        for i, d in enumerate(members.dims[r]):
            classes = np.flatnonzero(members.labels[r] == i)
            key = (classes.tobytes(), int(d))
            if key not in pairs:
                own = moment[classes].sum(axis=0) / weight[classes].sum()
                values, vectors = leading_eigenvectors(own * unit * unit[:, None], int(d))
                rank = max(int((values > LEAST_SHARE * values[0]).sum()), 1)
                plain = leading_eigenvectors(own, rank)
                if plain[0][-1] > CONDITION * plain[0][0]:
                    values, vectors = plain
                else:  # the units of the features differ too much for eigenvectors in float64
                    values, vectors = values[:rank], vectors[:, :rank] * unit[:, None]
                pairs[key] = (vectors / np.sqrt(rank * np.maximum(values, np.finfo(float).tiny))).T
            w[row : row + len(pairs[key])] = pairs[key]
            row += d
    return w


def random_start(
    members: Members, moment: np.ndarray, weight: np.ndarray, scale: float, rng: np.random.Generator
) -> np.ndarray:
    """Return Gaussian weights (D, p); latents of a row of mean length have standard deviation ``scale``."""
    length = np.trace(moment.sum(axis=0)) / weight.sum()
    return (
        rng.normal(size=(members.total_dim, moment.shape[1])) * scale / np.sqrt(length if length > 0 else 1.0)
    )


def parse_schedule(
    nu_schedule: str | Sequence[tuple[float, int]] | None,
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return (nu, patience, scheduled) from the parameter of the estimator; plain EM has ``scheduled`` 0."""
    if nu_schedule is None:
        return np.zeros(1), np.array([FOREVER]), 0
    pairs = PAPER_SCHEDULE if isinstance(nu_schedule, str) else nu_schedule
    nu, patience = (np.array(column) for column in zip(*pairs, strict=True))
    return nu.astype(np.float64), patience.astype(np.int64), 1
