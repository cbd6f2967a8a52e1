"""The components of a mixture of linear models, and the scores of rows under them."""

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
# Likelihoods whose scores are densities: each component is a Gaussian with its own noise variance.
DENSITY_LIKELIHOODS = ("ppca", "factor-analysis")
# Lower bound of the noise variance, in squared units of the features, for rows that do not vary.
LEAST_FLOOR = 1e-12
_ARRAYS = ("means", "bases", "values", "noise", "weights")


@dataclass(frozen=True)
class Components:
    """Parameters of K linear models; the components of one class have consecutive indices.

    Attributes
    ----------
    means : ndarray, shape (K, p)
    bases : ndarray, shape (K, p, q)
        Orthonormal columns; in factor analysis the loadings. The first ``n_dims`` columns belong to the
        model. The other columns are spare: they let the first columns converge in fewer passes.
    values : ndarray, shape (K, q)
        Variances of the rows along the columns of ``bases``; factor analysis does not use them.
    noise : ndarray, shape (K,) or (K, p)
        Variance in each direction outside of the model; in factor analysis the variance of each feature.
    weights : ndarray, shape (K,)
        Share of the rows of the class; 0 for a component that was dropped.
    n_dims : int
    """

    means: np.ndarray
    bases: np.ndarray
    values: np.ndarray
    noise: np.ndarray
    weights: np.ndarray
    n_dims: int

    def with_n_dims(self, n_dims: int) -> Components:
        """Return the components with ``n_dims`` columns of ``bases`` as the directions of the model."""
        return replace(self, n_dims=n_dims)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays in a dict; the keys are their names in saved models and run folders."""
        return {name: getattr(self, name) for name in _ARRAYS}

    def copy(self) -> Components:
        """Return a copy of the components whose arrays share no memory with these."""
        return Components(**{name: a.copy() for name, a in self.arrays().items()}, n_dims=self.n_dims)

    def select(self, which: slice | np.ndarray) -> Components:
        """Return the components with the indices, or in the slice, ``which``."""
        return Components(**{name: a[which] for name, a in self.arrays().items()}, n_dims=self.n_dims)

    def overwrite(self, which: np.ndarray, part: Components) -> None:
        """Overwrite the components with the indices ``which`` in place by the components of ``part``."""
        for name, array in self.arrays().items():
            array[which] = getattr(part, name)


def count_missing_directions(counts: np.ndarray, n_dims: int) -> np.ndarray:
    """Return how many of the ``n_dims`` directions the rows of each component do not span, int64 (K,).

    n rows span n - 1 directions; ``counts`` (K,) are the rows of each component.
    """
    # Counts are sums of weights, which rounding may leave slightly below a whole number.
    return np.clip(n_dims - np.maximum(np.floor(counts + 1e-6) - 1, 0), 0, n_dims).astype(np.int64)


def remove_missing_directions(components: Components, counts: np.ndarray, likelihood: str) -> Components:
    """Return components with zeros in place of the directions that their rows do not span.

    ``counts`` (K,) are the rows of each component; n rows span n - 1 directions. Components of factor
    analysis are returned unchanged.
    """
    h = components.n_dims
    missing = count_missing_directions(counts, h)
    if likelihood == "factor-analysis" or not missing.any():
        return components
    bases, values = components.bases.copy(), components.values.copy()
    for q in np.flatnonzero(missing):
        last = slice(h - int(missing[q]), h)
        bases[q, :, last] = 0.0
        if likelihood == "ppca":
            values[q, last] = components.noise[q]
    return replace(components, bases=bases, values=values)


def shared_noise(components: Components) -> float:
    """Return the mean noise of the components, weighted by their shares of the rows."""
    weights = components.weights
    return float((weights * components.noise).sum() / max(weights.sum(), np.finfo(float).tiny))


def make_scores(components: Components, likelihood: str, priors: np.ndarray | None = None) -> Scores:
    """Return the parameters of the score of each component; the score of a dropped component is infinite.

    Parameters
    ----------
    components : Components
    likelihood : str
        One of `LIKELIHOODS`.
    priors : ndarray, shape (K,), or None
        Share of the rows of each component's class; None if scores are compared within one class only.
    """
    h, means, noise = components.n_dims, components.means, components.noise
    bases, values = components.bases[:, :, :h], components.values[:, :h]
    is_alive = components.weights > 0
    centre = components.weights @ means / max(components.weights.sum(), np.finfo(float).tiny)
    weights = np.where(is_alive, components.weights, 1.0)
    if priors is not None:
        weights = weights * priors
    if likelihood == "error":
        scores = error_scores(means, bases, centre)
    elif likelihood == "code-cost":
        scores = code_cost_scores(means, bases, values, shared_noise(components), centre)
    elif likelihood == "ppca":
        scores = ppca_scores(means, bases, values, noise, weights, centre)
    else:
        scores = factor_scores(means, bases, noise, weights, centre)
    return replace(scores, c=np.where(is_alive, scores.c, np.inf))


def score_few_rows(components: Components, likelihood: str, x: np.ndarray) -> np.ndarray:
    """Return the scores (n, K) of a few rows (n, p), for all likelihoods but factor analysis.

    The kernels compute the same scores from the result of :func:`make_scores`. For a few rows, `make_scores`
    would take longer than the scores themselves.
    """
    h, noise, values = components.n_dims, components.noise, components.values[:, : components.n_dims]
    z = x[None, :, :] - components.means[:, None, :]
    squares = (z @ components.bases[:, :, :h]) ** 2
    lengths = np.einsum("knp,knp->nk", z, z)
    if likelihood == "error":
        return lengths - squares.sum(axis=2).T
    if likelihood == "code-cost":
        noise = np.full(len(values), shared_noise(components))
    out = lengths - (squares * shrinkage(values, noise)[:, None, :]).sum(axis=2).T
    if likelihood == "ppca":
        out = out / noise + ppca_constants(x.shape[1], values, noise, components.weights)
    return out


def scatter_maps(components: Components, likelihood: str) -> np.ndarray:
    """Return matrices B (K, p, q); an M-step needs S B, their products with the scatter S of the rows.

    B are the bases. In factor analysis B is beta', where beta maps a centred row to the posterior means of
    its factors.
    """
    if likelihood != "factor-analysis":
        return components.bases
    loadings, noise = components.bases, components.noise
    scaled = loadings / noise[:, :, None]
    m = np.eye(loadings.shape[2]) + np.swapaxes(loadings, 1, 2) @ scaled
    return divide_by(scaled, m)


def divide_by(wide: np.ndarray, matrices: np.ndarray) -> np.ndarray:
    """Return ``wide`` (K, p, q) times the inverses of symmetric positive definite ``matrices`` (K, q, q).

    Two products with the inverse of the Cholesky factor are faster than LAPACK's solver if ``wide`` has many
    rows p, and more exact than one product with the inverse of the matrix.
    """
    try:
        inverse = np.linalg.inv(np.linalg.cholesky(matrices))
    except np.linalg.LinAlgError:  # rounding has left a matrix that is not positive definite
        return np.swapaxes(np.linalg.solve(matrices, np.swapaxes(wide, 1, 2)), 1, 2)
    return (wide @ np.swapaxes(inverse, 1, 2)) @ inverse
