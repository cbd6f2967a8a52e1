"""What a mixture of linear models consists of, and the scores that follow from it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from scalelatent.models.linear_mixture.kernels.reference import (
    Scores,
    code_cost_scores,
    error_scores,
    factor_scores,
    ppca_constants,
    ppca_scores,
    shrinkage,
)

LIKELIHOODS = ("error", "code-cost", "ppca", "factor-analysis")


@dataclass(frozen=True)
class Pancakes:
    """K linear models, sub-classes of a class side by side."""

    means: np.ndarray  # (K, p)
    # (K, p, q), orthonormal; of factor analysis the loadings. The first ``n_dims`` directions are the model,
    # others are spare: they are carried along so that these settle sooner.
    bases: np.ndarray
    values: np.ndarray  # (K, q), variances of the rows along the directions; unused by factor analysis
    noise: np.ndarray  # (K,) variance in every other direction; of factor analysis (K, p), of each feature
    weights: np.ndarray  # (K,), share of the rows of its class; 0 of a sub-class that was dropped
    n_dims: int

    def cut(self, n_dims: int) -> Pancakes:
        """The same with fewer (or more of its spare) directions in the model."""
        return replace(self, n_dims=n_dims)

    def copy(self) -> Pancakes:
        """The same in arrays of its own."""
        arrays = (self.means, self.bases, self.values, self.noise, self.weights)
        means, bases, values, noise, weights = (array.copy() for array in arrays)
        return Pancakes(means, bases, values, noise, weights, self.n_dims)

    def part(self, which: slice | np.ndarray) -> Pancakes:
        """Some of them."""
        arrays = (self.means, self.bases, self.values, self.noise, self.weights)
        means, bases, values, noise, weights = (array[which] for array in arrays)
        return Pancakes(means, bases, values, noise, weights, self.n_dims)

    def set_part(self, which: np.ndarray, part: Pancakes) -> None:
        """Write some of them, in place."""
        for name in ("means", "bases", "values", "noise", "weights"):
            getattr(self, name)[which] = getattr(part, name)


def directions_cut(counts: np.ndarray, n_dims: int) -> np.ndarray:
    """How many directions (K,) sub-classes have less than the others: n rows span n - 1."""
    # Weights of rows that nearly sum to a whole number are it.
    return np.clip(n_dims - np.maximum(np.floor(counts + 1e-6) - 1, 0), 0, n_dims).astype(np.int64)


def cut_directions(pancakes: Pancakes, counts: np.ndarray, likelihood: str) -> Pancakes:
    """The same with 0 for directions that the rows of a sub-class do not span; loadings are as they were."""
    h = pancakes.n_dims
    cut = directions_cut(counts, h)
    if likelihood == "factor-analysis" or not cut.any():
        return pancakes
    bases, values = pancakes.bases.copy(), pancakes.values.copy()
    for q in np.flatnonzero(cut):
        gone = slice(h - int(cut[q]), h)
        bases[q, :, gone] = 0.0
        if likelihood == "ppca":
            values[q, gone] = pancakes.noise[q]
    return replace(pancakes, bases=bases, values=values)


def shared_noise(pancakes: Pancakes, alive: np.ndarray) -> float:
    """Mean of the noise over all rows."""
    weights = np.where(alive, pancakes.weights, 0.0)
    return float((weights * pancakes.noise).sum() / max(weights.sum(), np.finfo(float).tiny))


def scores_of(pancakes: Pancakes, likelihood: str, priors: np.ndarray | None = None) -> Scores:
    """The score under a likelihood; ``priors`` (K,) of classes, or None where all rows have one class.

    Dropped sub-classes have infinite scores.
    """
    h, means = pancakes.n_dims, pancakes.means
    bases, values = pancakes.bases[:, :, :h], pancakes.values[:, :h]
    alive = pancakes.weights > 0
    centre = pancakes.weights @ means / max(pancakes.weights.sum(), np.finfo(float).tiny)
    weights = np.where(alive, pancakes.weights, 1.0)
    if priors is not None:
        weights = weights * priors
    if likelihood == "error":
        scores = error_scores(means, bases, centre)
    elif likelihood == "code-cost":
        scores = code_cost_scores(means, bases, values, shared_noise(pancakes, alive), centre)
    elif likelihood == "ppca":
        scores = ppca_scores(means, bases, values, pancakes.noise, weights, centre)
    elif likelihood == "factor-analysis":
        scores = factor_scores(means, bases, pancakes.noise, weights, centre)
    else:
        raise ValueError(f"likelihood={likelihood!r} is not one of {', '.join(LIKELIHOODS)}")
    return replace(scores, c=np.where(alive, scores.c, np.inf))


def few_scores(pancakes: Pancakes, likelihood: str, x: np.ndarray) -> np.ndarray:
    """Scores (n, K) of a few rows, as of :func:`scores_of`, without the columns that many rows are worth; not
    of factor analysis.
    """
    h, noise, values = pancakes.n_dims, pancakes.noise, pancakes.values[:, : pancakes.n_dims]
    z = x[None, :, :] - pancakes.means[:, None, :]
    squares = (z @ pancakes.bases[:, :, :h]) ** 2
    lengths = np.einsum("knp,knp->nk", z, z)
    if likelihood == "error":
        return lengths - squares.sum(axis=2).T
    if likelihood == "code-cost":
        noise = np.full(len(values), shared_noise(pancakes, pancakes.weights > 0))
    out = lengths - (squares * shrinkage(values, noise)[:, None, :]).sum(axis=2).T
    if likelihood == "ppca":
        out = out / noise + ppca_constants(x.shape[1], values, noise, pancakes.weights)
    return out


def image_bases(pancakes: Pancakes, likelihood: str) -> np.ndarray:
    """The maps (K, p, q) whose images an M-step needs: the bases, or the posterior means of factors."""
    if likelihood != "factor-analysis":
        return pancakes.bases
    loadings, noise = pancakes.bases, pancakes.noise
    scaled = loadings / noise[:, :, None]
    m = np.eye(loadings.shape[2]) + np.swapaxes(loadings, 1, 2) @ scaled
    return over(scaled, m)


def over(wide: np.ndarray, matrices: np.ndarray) -> np.ndarray:
    """Wide matrices (K, p, q) times the inverses of symmetric positive ones (K, q, q), by Cholesky: LAPACK
    solves for few columns at a time, and an inverse itself is less exact.
    """
    try:
        inverse = np.linalg.inv(np.linalg.cholesky(matrices))
    except np.linalg.LinAlgError:  # one of them is not, by rounding
        return np.swapaxes(np.linalg.solve(matrices, np.swapaxes(wide, 1, 2)), 1, 2)
    return (wide @ np.swapaxes(inverse, 1, 2)) @ inverse
