"""How a fit begins: first weights and the schedule of rounds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scalelatent.reductions.eigen import leading_eigenvectors

from .members import Members

PAPER_SCHEDULE: tuple[tuple[float, int], ...] = ((0.8, 128), (0.6, 64), (0.4, 32), (0.2, 16), (0.0, 8))
FOREVER = 2**62


def subspace_start(members: Members, moment: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """W from the leading eigenpairs of each capsule's rows (equation 2.28)."""
    w = np.empty((members.total_dim, moment.shape[1]))
    pairs: dict[tuple[bytes, int], np.ndarray] = {}
    for r in range(members.n_members):
        row = members.offsets[r]
        for i, d in enumerate(members.dims[r]):
            classes = np.flatnonzero(members.labels[r] == i)
            key = (classes.tobytes(), int(d))
            if key not in pairs:
                values, vectors = leading_eigenvectors(
                    moment[classes].sum(axis=0) / weight[classes].sum(), int(d)
                )
                # A class of few or repeated rows has directions without variance: a floor keeps their rows of
                # W finite.
                floor = max(values[0], np.finfo(float).tiny) * 1e-6
                pairs[key] = (vectors / np.sqrt(np.maximum(values, floor))).T / np.sqrt(d)
            w[row : row + d] = pairs[key]
            row += d
    return w


def random_start(
    members: Members, moment: np.ndarray, weight: np.ndarray, scale: float, rng: np.random.Generator
) -> np.ndarray:
    """Gaussian W such that h has standard deviation ``scale`` for a row of mean length."""
    length = np.trace(moment.sum(axis=0)) / weight.sum()
    return (
        rng.normal(size=(members.total_dim, moment.shape[1])) * scale / np.sqrt(length if length > 0 else 1.0)
    )


def schedule_arrays(
    nu_schedule: str | Sequence[tuple[float, int]] | None,
) -> tuple[np.ndarray, np.ndarray, int]:
    """(nu, patience, scheduled) from the estimator's parameter."""
    if nu_schedule is None:
        return np.zeros(1), np.array([FOREVER]), 0
    pairs = PAPER_SCHEDULE if isinstance(nu_schedule, str) and nu_schedule == "paper" else nu_schedule
    try:
        nu, patience = (np.array(column) for column in zip(*pairs, strict=True))
        good = bool(len(nu)) and bool(((nu >= 0) & (nu < 1) & (patience >= 1)).all())
    except (TypeError, ValueError):
        good = False
    if not good:
        raise ValueError(
            f"nu_schedule={nu_schedule!r}: give 'paper', None (plain EM), or pairs (nu, patience) with 0 "
            "<= nu < 1 and patience >= 1"
        )
    return nu.astype(np.float64), patience.astype(np.int64), 1
