"""Points of uneven density: shapes like those of the paper's Figures 5 and 6.

The paper's own point sets (Jain and Law, 2005; Chang and Yeung, 2008; Zahn, 1971) were drawn by hand; these
are drawn by seed, of the same kinds.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

__all__ = ["SHAPES", "outlier_example", "synthetic_points"]

Points = tuple[np.ndarray, np.ndarray]


def _gaussians(rng: np.random.Generator) -> Points:
    """Two dense classes and a sparse one."""
    spreads, sizes = (0.25, 0.5, 1.6), (150, 150, 150)
    centres = np.array([[0.0, 0.0], [3.0, 0.5], [1.0, 5.5]])
    parts = [c + s * rng.normal(size=(n, 2)) for c, s, n in zip(centres, spreads, sizes, strict=True)]
    return np.concatenate(parts), np.repeat(np.arange(3), sizes)


def _arc(rng: np.random.Generator, n: int, span: tuple[float, float], width: float) -> np.ndarray:
    angle = np.pi * rng.uniform(*span, n)
    return (1 + width * rng.normal(size=n))[:, None] * np.column_stack([np.cos(angle), np.sin(angle)])


def _crescents(rng: np.random.Generator) -> Points:
    """Two crescents, one three times as dense (Jain's)."""
    upper = _arc(rng, 100, (0, 1), 0.09)
    lower = _arc(rng, 280, (1, 2), 0.09) + np.array([1.0, 0.35])
    return np.concatenate([upper, lower]), np.repeat([0, 1], [100, 280])


def _path(rng: np.random.Generator) -> Points:
    """Two clouds within a ring that is open below (the path-based set)."""
    ring = 2.2 * _arc(rng, 130, (-0.35, 1.35), 0.06)
    clouds = [c + 0.42 * rng.normal(size=(100, 2)) for c in ((-0.95, 0.0), (0.95, 0.0))]
    return np.concatenate([ring, *clouds]), np.repeat(np.arange(3), [130, 100, 100])


def _compound(rng: np.random.Generator) -> Points:
    """Clusters within, beside and upon clusters (the compound set)."""
    parts = [
        np.array([0.0, 0.0]) + 0.35 * rng.normal(size=(60, 2)),
        1.5 * _arc(rng, 110, (0.0, 2.0), 0.05),
        np.array([-1.0, 5.2]) + 0.3 * rng.normal(size=(60, 2)),
        np.array([1.3, 5.2]) + 0.55 * rng.normal(size=(70, 2)),
        np.array([5.5, 2.6]) + 0.22 * rng.normal(size=(60, 2)),
        np.column_stack([rng.uniform(3.8, 7.2, 70), rng.uniform(0.4, 5.0, 70)]),
    ]
    return np.concatenate(parts), np.repeat(np.arange(6), [len(part) for part in parts])


_MAKERS: dict[str, Callable[[np.random.Generator], Points]] = {
    "Gaussian": _gaussians,
    "crescents": _crescents,
    "path-based": _path,
    "compound": _compound,
}

SHAPES = tuple(_MAKERS)
"""Names that `synthetic_points` knows."""


def synthetic_points(shape: str, seed: int = 0) -> Points:
    """Points in the plane and their classes.

    Parameters
    ----------
    shape : {"Gaussian", "crescents", "path-based", "compound"}
    seed : int

    Returns
    -------
    rows : ndarray of float32, shape (n, 2)
    classes : ndarray of int64, shape (n,)

    Examples
    --------
    >>> rows, classes = synthetic_points("crescents")
    >>> rows.shape, classes.tolist().count(0)
    ((380, 2), 100)
    """
    rows, classes = _MAKERS[shape](np.random.Generator(np.random.Philox(seed)))
    return rows.astype(np.float32), classes


def outlier_example(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Two Gaussian classes, and in the last row a point far from both (the paper's Figure 6).

    Returns
    -------
    rows : ndarray of float32, shape (201, 2)
    classes : ndarray of int64, shape (201,)
        That of the outlier is 0.

    Examples
    --------
    >>> rows, classes = outlier_example()
    >>> bool(np.linalg.norm(rows[-1]) > 10 * np.abs(rows[:-1]).max())
    True
    """
    rng = np.random.Generator(np.random.Philox(seed))
    rows = np.repeat([[-1.5, 0.0], [1.5, 0.0]], 100, axis=0) + 0.5 * rng.normal(size=(200, 2))
    rows = np.concatenate([rows, [[60.0, 60.0]]])
    return rows.astype(np.float32), np.append(np.repeat([0, 1], 100), 0)
