"""The Gaussians of a mixture: densities, codes, samples, and rows whose other part is known."""

from __future__ import annotations

import numpy as np

from .pancakes import Pancakes
from .steps import TINY

LOG_2PI = float(np.log(2 * np.pi))


def gaussians(pancakes: Pancakes, likelihood: str) -> tuple[np.ndarray, np.ndarray]:
    """Loadings (K, p, h) and noise (K, p) of each sub-class as a Gaussian L L' + diag(noise)."""
    h = pancakes.n_dims
    if likelihood == "factor-analysis":
        return pancakes.bases[:, :, :h], pancakes.noise
    scale = np.sqrt(np.maximum(pancakes.values[:, :h] - pancakes.noise[:, None], 0.0))
    p = pancakes.means.shape[1]
    return pancakes.bases[:, :, :h] * scale[:, None, :], np.repeat(pancakes.noise[:, None], p, axis=1)


def main_directions(pancakes: Pancakes, likelihood: str, q: int) -> np.ndarray:
    """Directions (h, p) of a sub-class, the widest first, as long as one standard deviation along them."""
    h, bases = pancakes.n_dims, pancakes.bases[q]
    if likelihood == "factor-analysis":
        u, s, _ = np.linalg.svd(bases[:, :h], full_matrices=False)
        return (u * s).T
    order = np.argsort(-pancakes.values[q, :h], kind="stable")
    return (bases[:, order] * np.sqrt(np.maximum(pancakes.values[q, order], 0.0))).T


def codes(pancakes: Pancakes, likelihood: str, x: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Codes (n, h) of rows under their sub-classes: coordinates, or posterior means of factors."""
    h = pancakes.n_dims
    out = np.empty((len(x), h))
    maps = None if likelihood != "factor-analysis" else gaussians(pancakes, likelihood)
    for q in np.unique(index):
        rows = np.flatnonzero(index == q)
        z = x[rows].astype(np.float64) - pancakes.means[q]
        if maps is None:
            out[rows] = z @ pancakes.bases[q][:, :h]
        else:
            out[rows] = _posterior(maps[0][q], maps[1][q], z)[0]
    return out


def reconstruct(pancakes: Pancakes, code: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Rows (n, p) of codes in the units of their sub-classes."""
    bases = pancakes.bases[:, :, : pancakes.n_dims]
    out = pancakes.means[index]
    for q in np.unique(index):
        rows = np.flatnonzero(index == q)
        out[rows] += code[rows] @ bases[q].T
    return out


def sample(
    pancakes: Pancakes, likelihood: str, n: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Rows (n, p) drawn from the mixture, and their sub-classes."""
    loadings, noise = gaussians(pancakes, likelihood)
    index = rng.choice(len(pancakes.weights), size=n, p=pancakes.weights / pancakes.weights.sum())
    factors = rng.normal(size=(n, loadings.shape[2]))
    rest = rng.normal(size=(n, loadings.shape[1]))
    out = pancakes.means[index] + np.sqrt(noise[index]) * rest
    for q in np.unique(index):
        rows = np.flatnonzero(index == q)
        out[rows] += factors[rows] @ loadings[q].T
    return out, index


def _posterior(loadings: np.ndarray, noise: np.ndarray, z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means of the factors (n, h) of centred rows, and -2 log of their density."""
    h = loadings.shape[1]
    scaled = loadings / noise[:, None]
    m = np.eye(h) + loadings.T @ scaled
    right = z @ scaled
    factors = np.linalg.solve(m, right.T).T
    square = ((z * z) / noise).sum(axis=1) - (factors * right).sum(axis=1)
    return factors, square + z.shape[1] * LOG_2PI + np.log(noise).sum() + np.linalg.slogdet(m)[1]


def complete(
    pancakes: Pancakes, likelihood: str, x: np.ndarray, observed: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(rows with the features that are not observed at their means given the others, log density of the
    others (n,)): the mean over sub-classes of the Gaussians' conditional means.

    Raises
    ------
    ValueError
        A mask of another width, or one that hides all.
    """
    p = pancakes.means.shape[1]
    observed = np.asarray(observed, dtype=bool).ravel()
    if len(observed) != p:
        raise ValueError(
            f"observed has {len(observed)} features, the rows {p}: give one truth value for each"
        )
    if not observed.any():
        raise ValueError("observed hides all features: at least one has to be seen")
    loadings, noise = gaussians(pancakes, likelihood)
    alive = np.flatnonzero(pancakes.weights > 0)
    seen = x[:, observed].astype(np.float64)
    logs, found = np.empty((len(x), len(alive))), np.empty((len(alive), len(x), p - observed.sum()))
    for i, q in enumerate(alive):
        mean = pancakes.means[q]
        factors, score = _posterior(loadings[q][observed], noise[q][observed], seen - mean[observed])
        logs[:, i] = -0.5 * score + np.log(max(pancakes.weights[q], TINY))
        found[i] = mean[~observed] + factors @ loadings[q][~observed].T
    top = logs.max(axis=1, keepdims=True)
    shares = np.exp(logs - top)
    total = shares.sum(axis=1, keepdims=True)
    out = x.astype(np.float64)
    out[:, ~observed] = np.einsum("nk,knp->np", shares / total, found)
    return out, (top + np.log(total))[:, 0]
