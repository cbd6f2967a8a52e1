"""Uses of the Gaussians of a mixture: codes, reconstructions, samples, values of hidden features."""

from __future__ import annotations

import numpy as np

from .components import Components
from .m_steps import TINY

LOG_2PI = float(np.log(2 * np.pi))


def gaussians(components: Components, likelihood: str) -> tuple[np.ndarray, np.ndarray]:
    """Return loadings L (K, p, h) and noise (K, p) of the covariances L L' + diag(noise)."""
    h = components.n_dims
    if likelihood == "factor-analysis":
        return components.bases[:, :, :h], components.noise
    scale = np.sqrt(np.maximum(components.values[:, :h] - components.noise[:, None], 0.0))
    p = components.means.shape[1]
    return components.bases[:, :, :h] * scale[:, None, :], np.repeat(components.noise[:, None], p, axis=1)


def main_directions(components: Components, likelihood: str, q: int) -> np.ndarray:
    """Return the directions (h, p) of component q by decreasing variance.

    The length of a direction is the standard deviation of the rows along this direction.
    """
    h, bases = components.n_dims, components.bases[q]
    if likelihood == "factor-analysis":
        u, s, _ = np.linalg.svd(bases[:, :h], full_matrices=False)
        return (u * s).T
    order = np.argsort(-components.values[q, :h], kind="stable")
    return (bases[:, order] * np.sqrt(np.maximum(components.values[q, order], 0.0))).T


def codes(components: Components, likelihood: str, x: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Return the codes (n, h) of rows (n, p) under the components ``index`` (n,).

    A code is the coordinates along the bases, or in factor analysis the posterior mean of the factors.
    """
    h = components.n_dims
    out = np.empty((len(x), h))
    maps = None if likelihood != "factor-analysis" else gaussians(components, likelihood)
    for q in np.unique(index):
        rows = np.flatnonzero(index == q)
        z = x[rows].astype(np.float64) - components.means[q]
        if maps is None:
            out[rows] = z @ components.bases[q][:, :h]
        else:
            out[rows] = _posterior(maps[0][q], maps[1][q], z)[0]
    return out


def reconstruct(components: Components, code: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Return reconstructions (n, p) of rows from their codes (n, h) under the components ``index`` (n,)."""
    bases = components.bases[:, :, : components.n_dims]
    out = components.means[index]
    for q in np.unique(index):
        rows = np.flatnonzero(index == q)
        out[rows] += code[rows] @ bases[q].T
    return out


def sample(
    components: Components, likelihood: str, n: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Draw rows (n, p) from the mixture; return the rows and their components (n,)."""
    loadings, noise = gaussians(components, likelihood)
    index = rng.choice(len(components.weights), size=n, p=components.weights / components.weights.sum())
    factors = rng.normal(size=(n, loadings.shape[2]))
    rest = rng.normal(size=(n, loadings.shape[1]))
    out = components.means[index] + np.sqrt(noise[index]) * rest
    for q in np.unique(index):
        rows = np.flatnonzero(index == q)
        out[rows] += factors[rows] @ loadings[q].T
    return out, index


def _posterior(loadings: np.ndarray, noise: np.ndarray, z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the posterior means (n, h) of the factors of centred rows ``z``, and -2 log densities (n,)."""
    h = loadings.shape[1]
    scaled = loadings / noise[:, None]
    m = np.eye(h) + loadings.T @ scaled
    right = z @ scaled
    factors = np.linalg.solve(m, right.T).T
    square = ((z * z) / noise).sum(axis=1) - (factors * right).sum(axis=1)
    return factors, square + z.shape[1] * LOG_2PI + np.log(noise).sum() + np.linalg.slogdet(m)[1]


def complete(
    components: Components, likelihood: str, x: np.ndarray, observed: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Fill in hidden features by their conditional means given the observed features.

    Parameters
    ----------
    components : Components
    likelihood : str
    x : ndarray, shape (n, p)
    observed : ndarray of bool, shape (p,)

    Returns
    -------
    filled : ndarray of float64, shape (n, p)
    log_density : ndarray of float64, shape (n,)
        Log density of the observed features, in nats.

    Raises
    ------
    ValueError
        The mask has another width, or hides all features.
    """
    p = components.means.shape[1]
    observed = np.asarray(observed, dtype=bool).ravel()
    if len(observed) != p:
        raise ValueError(
            f"observed has {len(observed)} entries, and the rows have {p} features: give one bool per feature"
        )
    if not observed.any():
        raise ValueError("observed is False for all features: set it to True for at least one feature")
    loadings, noise = gaussians(components, likelihood)
    alive = np.flatnonzero(components.weights > 0)
    seen = x[:, observed].astype(np.float64)
    logs, found = np.empty((len(x), len(alive))), np.empty((len(alive), len(x), p - observed.sum()))
    for i, q in enumerate(alive):
        mean = components.means[q]
        factors, score = _posterior(loadings[q][observed], noise[q][observed], seen - mean[observed])
        logs[:, i] = -0.5 * score + np.log(max(components.weights[q], TINY))
        found[i] = mean[~observed] + factors @ loadings[q][~observed].T
    top = logs.max(axis=1, keepdims=True)
    shares = np.exp(logs - top)
    total = shares.sum(axis=1, keepdims=True)
    out = x.astype(np.float64)
    out[:, ~observed] = np.einsum("nk,knp->np", shares / total, found)
    return out, (top + np.log(total))[:, 0]
