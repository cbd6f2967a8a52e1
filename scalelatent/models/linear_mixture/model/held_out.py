"""Scores that rows of a fit would have had without them: a mean and bases downdated by one row."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from .pancakes import Pancakes
from .steps import TINY

# Sub-classes of fewer rows would not be there without one of them.
_LEAST_ROWS = 2.0
# Rows whose moments lie in memory at a time.
_ROWS = 1024


@dataclass(frozen=True)
class FittedRows:
    """The pancakes of a fit, and the rows that each had."""

    pancakes: Pancakes
    counts: np.ndarray  # (K,)
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
        return np.minimum(scores + scale * self._growth(x, index), second * scale)

    def _growth(self, x: np.ndarray, index: np.ndarray) -> np.ndarray:
        """By how much the scores of rows grow that their sub-classes ``index`` never saw."""
        now, n = self.pancakes, self.counts[index].astype(np.float64)
        out = np.full(len(x), np.inf)
        many = n >= _LEAST_ROWS
        if self.likelihood == "factor-analysis":
            x, index, n = x[many], index[many], n[many]
            z, share = x - now.means[index], np.minimum((now.n_dims + 1) / n, 0.5)
            out[many] = (1.0 / (1.0 - share) ** 2 - 1.0) * (z * z / now.noise[index]).sum(axis=1)
            return out
        # Rows of one sub-class stand together for its products; the rest is of all rows at once.
        rows = np.flatnonzero(many)
        rows = rows[np.argsort(index[rows], kind="stable")]
        for a in range(0, len(rows), _ROWS):
            some = rows[a : a + _ROWS]
            out[some] = self._growth_of(x[some], index[some], n[some])
        return out

    def _growth_of(self, x: np.ndarray, index: np.ndarray, n: np.ndarray) -> np.ndarray:
        """As :meth:`_growth`, of rows in the order of their sub-classes, which have at least two rows."""
        now, h = self.pancakes, self.pancakes.n_dims
        _, p, width = now.bases.shape
        values, noise = now.values[index], now.noise[index]
        code, square = np.empty((len(x), width)), np.empty(len(x))
        edges = [0, *(np.flatnonzero(np.diff(index)) + 1), len(index)]
        for a, b in pairwise(edges):
            z = x[a:b] - now.means[index[a]]
            code[a:b], square[a:b] = z @ now.bases[index[a]], (z * z).sum(axis=1)
        rest = np.maximum(square - (code * code).sum(axis=1), 0.0)
        # In the bases, the spare ones too, and along what they leave of the row.
        beyond = np.maximum(noise * (p - h) - values[:, h:].sum(axis=1), 0.0) / max(p - width, 1)
        full = np.concatenate([code, np.sqrt(rest)[:, None]], axis=1)
        spread = np.concatenate([values, (rest / n + beyond)[:, None]], axis=1)
        more = n / (n - 1.0)
        without = full[:, :, None] * full[:, None, :] * -more[:, None, None]
        without[:, np.arange(width + 1), np.arange(width + 1)] += n[:, None] * spread
        found, turn = np.linalg.eigh(without / (n - 1.0)[:, None, None])
        ways, variances = turn[:, :, width + 1 - h :], found[:, width + 1 - h :]
        moved = full * more[:, None]
        new = np.einsum("nwh,nw->nh", ways, moved)
        error = (full * full).sum(axis=1) - (code[:, :h] ** 2).sum(axis=1)
        new_error = (moved * moved).sum(axis=1) - (new * new).sum(axis=1)
        if self.likelihood != "ppca":
            return np.maximum(new_error - error, 0.0)
        inside = (code[:, :h] ** 2 / np.maximum(values[:, :h], noise[:, None])).sum(axis=1)
        new_inside = (new**2 / np.maximum(variances, noise[:, None])).sum(axis=1)
        return np.maximum((new_error - error) / noise + new_inside - inside, 0.0)
