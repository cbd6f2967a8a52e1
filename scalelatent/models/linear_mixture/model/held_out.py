"""Scores that rows of a fit would have had without them: a mean and bases downdated by one row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .pancakes import Pancakes
from .steps import TINY

# Sub-classes of fewer rows would not be there without one of them.
_LEAST_ROWS = 2.0


@dataclass(frozen=True)
class FittedRows:
    """The pancakes of a fit, and the rows that each had.

    Attributes
    ----------
    pancakes : Pancakes
    counts : ndarray, shape (K,)
    likelihood : str
    """

    pancakes: Pancakes
    counts: np.ndarray
    likelihood: str

    def held_out(
        self,
        x: np.ndarray,
        index: np.ndarray,
        scores: np.ndarray,
        of_class: np.ndarray,
        first: int,
        by_tangents: bool,
    ) -> np.ndarray:
        """Best score (n,) of each row by the sub-classes of its class, its own one without the row.

        ``scores`` are those with it, by sub-class ``index``; ``of_class`` (n, sub-classes) those of all that
        the class has, from number ``first`` on, which are without tangents.
        """
        each = np.arange(len(x))
        plain = of_class[each, index - first]
        others = of_class.copy()
        others[each, index - first] = np.inf
        second = others.min(axis=1)
        scale = np.ones(len(x))
        if by_tangents:  # they make all scores smaller, those of others about as much
            scale = scores / np.maximum(plain, TINY)
        out = np.empty(len(x))
        for q in np.unique(index):
            rows = np.flatnonzero(index == q)
            out[rows] = scores[rows] + scale[rows] * self._growth(x[rows], int(q))
        return np.minimum(out, second * scale)

    def _growth(self, x: np.ndarray, q: int) -> np.ndarray:
        """By how much the scores of rows grow that their sub-class never saw."""
        now, n = self.pancakes, float(self.counts[q])
        if n < _LEAST_ROWS:
            return np.full(len(x), np.inf)
        h, z = now.n_dims, x - now.means[q]
        if self.likelihood == "factor-analysis":
            share = min((h + 1) / n, 0.5)
            return float(1.0 / (1.0 - share) ** 2 - 1.0) * (z * z / now.noise[q]).sum(axis=1)
        bases, values, noise = now.bases[q], now.values[q], float(now.noise[q])
        p, width = bases.shape
        code = z @ bases
        rest = np.maximum((z * z).sum(axis=1) - (code * code).sum(axis=1), 0.0)
        # In the bases, the spare ones too, and along what they leave of the row.
        beyond = max(noise * (p - h) - values[h:].sum(), 0.0) / max(p - width, 1)
        full = np.concatenate([code, np.sqrt(rest)[:, None]], axis=1)
        spread = np.concatenate([np.tile(values, (len(x), 1)), (rest / n + beyond)[:, None]], axis=1)
        without = -full[:, :, None] * full[:, None, :] * (n / (n - 1.0))
        without[:, np.arange(width + 1), np.arange(width + 1)] += n * spread
        found, turn = np.linalg.eigh(without / (n - 1.0))
        ways, variances = turn[:, :, width + 1 - h :], found[:, width + 1 - h :]
        moved = full * (n / (n - 1.0))
        new = np.einsum("nwh,nw->nh", ways, moved)
        error = (full * full).sum(axis=1) - (code[:, :h] ** 2).sum(axis=1)
        new_error = (moved * moved).sum(axis=1) - (new * new).sum(axis=1)
        if self.likelihood != "ppca":
            return np.maximum(new_error - error, 0.0)
        inside = (code[:, :h] ** 2 / np.maximum(values[:h], noise)).sum(axis=1)
        new_inside = (new**2 / np.maximum(variances, noise)).sum(axis=1)
        return np.maximum((new_error - error) / noise + new_inside - inside, 0.0)
