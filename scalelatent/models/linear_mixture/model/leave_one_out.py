"""Scores that training rows would have if their components had been fitted without them.

A component reconstructs the rows that it was fitted to too well, so their scores would give a wrong
temperature of probabilities. Therefore each row is removed from the mean and the directions of its component
(a downdate).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from .components import Components
from .m_steps import TINY

# Smallest number of rows of a component from which a row can be removed.
_LEAST_ROWS = 2.0
# Number of rows whose scatter matrices are in memory at a time.
_BLOCK_ROWS = 1024


@dataclass(frozen=True)
class LeaveOneOut:
    """Scores of training rows under components that were fitted without the scored row.

    The removal of a row from a component is exact if all columns of its basis, spare columns included, span
    the rows of the component. In factor analysis it is an estimate.

    Attributes
    ----------
    components : Components
    counts : ndarray, shape (K,)
        Number of rows of each component.
    likelihood : str
    """

    components: Components
    counts: np.ndarray
    likelihood: str

    def best_scores(
        self,
        x: np.ndarray,
        index: np.ndarray,
        scores: np.ndarray,
        of_class: np.ndarray,
        first: int,
        by_tangents: bool,
    ) -> np.ndarray:
        """Return the best score (n,) of each row in its class, as if no component had learned the row.

        Parameters
        ----------
        x : ndarray, shape (n, p)
            Rows of one class.
        index : ndarray of int, shape (n,)
            Best component of each row.
        scores : ndarray, shape (n,)
            Score of each row under its best component.
        of_class : ndarray, shape (n, components)
            Scores without tangents under all components of the class, which are ``first``, ``first + 1``, ….
        by_tangents : bool
            Whether ``scores`` are tangent distances.
        """
        each = np.arange(len(x))
        plain = of_class[each, index - first]
        others = of_class.copy()
        others[each, index - first] = np.inf
        second = others.min(axis=1)
        scale = np.ones(len(x))
        if by_tangents:  # tangents lower the scores of all components by about the same factor
            scale = scores / np.maximum(plain, TINY)
        return np.minimum(scores + scale * self._increase_scores(x, index), second * scale)

    def _increase_scores(self, x: np.ndarray, index: np.ndarray) -> np.ndarray:
        """Return the increase of the score of each row if its component ``index`` is fitted without the row.

        The increase is infinite for rows of components with too few rows.
        """
        components, n = self.components, self.counts[index].astype(np.float64)
        out = np.full(len(x), np.inf)
        has_rows = n >= _LEAST_ROWS
        if self.likelihood == "factor-analysis":
            x, index, n = x[has_rows], index[has_rows], n[has_rows]
            z, share = x - components.means[index], np.minimum((components.n_dims + 1) / n, 0.5)
            growth = 1.0 / (1.0 - share) ** 2 - 1.0
            out[has_rows] = growth * (z * z / components.noise[index]).sum(axis=1)
            return out
        rows = np.flatnonzero(has_rows)
        rows = rows[np.argsort(index[rows], kind="stable")]  # so that a component needs one matrix product
        for a in range(0, len(rows), _BLOCK_ROWS):
            some = rows[a : a + _BLOCK_ROWS]
            out[some] = self._increase_sorted_scores(x[some], index[some], n[some])
        return out

    def _increase_sorted_scores(self, x: np.ndarray, index: np.ndarray, n: np.ndarray) -> np.ndarray:
        """Return the increases of the scores of rows sorted by component; each component has n >= 2 rows."""
        components, h = self.components, self.components.n_dims
        _, p, width = components.bases.shape
        values, noise = components.values[index], components.noise[index]
        code, square = np.empty((len(x), width)), np.empty(len(x))
        edges = [0, *(np.flatnonzero(np.diff(index)) + 1), len(index)]
        for a, b in pairwise(edges):
            z = x[a:b] - components.means[index[a]]
            code[a:b], square[a:b] = z @ components.bases[index[a]], (z * z).sum(axis=1)
        rest = np.maximum(square - (code * code).sum(axis=1), 0.0)
        # Coordinates of a row: along all columns of the basis, and along its residual outside of them.
        outside = np.maximum(noise * (p - h) - values[:, h:].sum(axis=1), 0.0) / max(p - width, 1)
        full = np.concatenate([code, np.sqrt(rest)[:, None]], axis=1)
        variances = np.concatenate([values, (rest / n + outside)[:, None]], axis=1)
        # Without the row the mean moves, so that the row is n / (n - 1) times as far from it.
        factor = n / (n - 1.0)
        without = full[:, :, None] * full[:, None, :] * -factor[:, None, None]
        without[:, np.arange(width + 1), np.arange(width + 1)] += n[:, None] * variances
        new_values, rotation = np.linalg.eigh(without / (n - 1.0)[:, None, None])
        directions, new_values = rotation[:, :, width + 1 - h :], new_values[:, width + 1 - h :]
        moved = full * factor[:, None]
        new_code = np.einsum("nwh,nw->nh", directions, moved)
        error = (full * full).sum(axis=1) - (code[:, :h] ** 2).sum(axis=1)
        new_error = (moved * moved).sum(axis=1) - (new_code * new_code).sum(axis=1)
        if self.likelihood != "ppca":
            return np.maximum(new_error - error, 0.0)
        inside = (code[:, :h] ** 2 / np.maximum(values[:, :h], noise[:, None])).sum(axis=1)
        new_inside = (new_code**2 / np.maximum(new_values, noise[:, None])).sum(axis=1)
        return np.maximum((new_error - error) / noise + new_inside - inside, 0.0)
