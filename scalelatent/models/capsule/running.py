r"""Capsule regression on a stream of rows whose number is unknown: what ``partial_fit`` does.

There is no pass before the first step, so the second moments are those of the rows so far, with a prior that
fades:

.. math::

    \bar S = \frac{S + \rho I + p s_0 I}{n + p}, \qquad s_0 = \text{mean squared feature of the first rows}

as if p rows of independent features had been seen; so it has full rank from the first row on. A batch of b
rows moves W by

.. math::  W \leftarrow W + \eta \min(1, b/p) \frac{1}{b} (\Delta_{batch} - \frac{b}{n} \rho W) \bar S^{-1},
           \qquad \eta = (1 + t/t_0)^{-\kappa}

without momentum, t being rows seen over the rows of a batch. One row is thereby moved at most about as far as
its posterior mean: :math:`x^T \bar S^{-1} x` is p on average. Passive-aggressive steps are those of
:mod:`.passive`. The model that predicts is the running average of W, as in :mod:`.online`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from scalelatent.models.base import Block, Stats

from .members import Members
from .model import CapsulePass
from .online import AVERAGE_POWER
from .squash import squash_table
from .start import random_start, subspace_start
from .walk import walk

# The inverse is renewed once the rows behind it have grown by so much.
RENEW = 0.05


@lru_cache(maxsize=8)
def _kinds(labels: bytes, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """(kinds of members by the classes that they see, kind of each member)."""
    masks = np.frombuffer(labels, dtype=np.int64).reshape(shape) >= 0
    kinds, which = np.unique(masks, axis=0, return_inverse=True)
    return kinds, which.ravel()


@dataclass(frozen=True)
class _Weights:
    """As much of a state as an E-step reads."""

    w: np.ndarray
    finished: np.ndarray
    round: np.ndarray


@dataclass(frozen=True)
class StreamOptions:
    """Settings of a stream; parameters of :class:`scalelatent.CapsuleRegression` of the same names.

    ``nu`` is the threshold of the schedule's first round, ``passive`` the choice of the algorithm.
    """

    passive: bool
    nu: float
    kappa: float
    t0: float
    batch_rows: int
    ridge: float
    aggressiveness: float


@dataclass
class RunningCapsule:
    """Weights and second moments of a stream. Changed in place by :meth:`learn`.

    Attributes
    ----------
    members : Members
    w, average : ndarray of float64, shape (D, p)
        Current weights, and their running average, which predicts.
    moment : ndarray of float64, shape (1 or classes, p, p)
        Sum of weight x x^T; of each class where members see some classes only.
    weight : ndarray of float64, shape (classes,)
        Sum of row weights of each class.
    variance : float
        s0 of the prior; 0 without a prior (after a fit).
    rows : float
        Rows that W has seen, those of a fit included.
    """

    members: Members
    w: np.ndarray
    average: np.ndarray
    moment: np.ndarray
    weight: np.ndarray
    variance: float
    rows: float
    _inverses: dict[int, tuple[float, np.ndarray]] = field(default_factory=dict, repr=False)

    @classmethod
    def begin(
        cls, members: Members, x: np.ndarray, codes: np.ndarray, init: str, scale: float, rng: Any
    ) -> RunningCapsule:
        """From the first rows: the subspace start where each capsule has enough of them, else a random one.

        Parameters
        ----------
        x : ndarray, shape (rows, p)
        codes : ndarray of int, shape (rows,)
        init, scale
            Parameters ``init`` and ``init_scale``.
        rng : numpy.random.Generator
        """
        x = np.asarray(x, dtype=np.float64)
        p, m = x.shape[1], members.n_classes
        counts = np.bincount(codes, minlength=m)
        needed = [
            (counts[members.labels[r] == i].sum(), d)
            for r in range(members.n_members)
            for i, d in enumerate(members.dims[r])
        ]
        if init == "subspace" and all(d <= min(count, p) for count, d in needed):
            moment = np.stack([x[codes == c].T @ x[codes == c] for c in range(m)])
            w = subspace_start(members, moment, counts.astype(np.float64))
        else:
            w = random_start(members, (x.T @ x)[None], np.array([float(len(x))]), scale, rng)
        groups = 1 if (members.labels >= 0).all() else m
        variance = float(np.mean(x * x))
        moment = np.zeros((groups, p, p))
        return cls(members, w, w.copy(), moment, np.zeros(m), variance if variance > 0 else 1.0, 0.0)

    def learn(
        self,
        x: np.ndarray,
        codes: np.ndarray,
        weight: np.ndarray | None,
        options: StreamOptions,
        backend: Any,
    ) -> None:
        """Learn from rows, batch by batch in their order.

        Parameters
        ----------
        x : ndarray of float32, shape (rows, p)
        codes : ndarray of int32, shape (rows,)
        weight : ndarray of float64, shape (rows,), or None
        options : StreamOptions
        backend : object
            Of the processor, see :mod:`scalelatent.engine.backend`.

        Raises
        ------
        FloatingPointError
            The weights have grown beyond float32.
        """
        for a in range(0, len(x), options.batch_rows):
            rows = slice(a, a + options.batch_rows)
            own = None if weight is None else weight[rows]
            self._learn_batch(x[rows], codes[rows], own, options, backend)

    def renew(self) -> None:
        """Forget the inverses: the next step takes that of all rows so far."""
        self._inverses.clear()

    def _learn_batch(
        self,
        x: np.ndarray,
        codes: np.ndarray,
        weight: np.ndarray | None,
        options: StreamOptions,
        backend: Any,
    ) -> None:
        self._add_moments(x, codes, weight)
        p = x.shape[1]
        if options.passive:
            w = self._walked(x, codes, weight, options)
        else:
            eta = (1.0 + self.rows / options.batch_rows / options.t0) ** -options.kappa
            w = self._stepped(x, codes, weight, options, eta * min(1.0, len(x) / p), backend)
        if not np.isfinite(w).all():
            raise FloatingPointError(
                "the weights are not finite after these rows: features are too large for float32; scale them"
            )
        self.w, self.rows = w, self.rows + len(x)
        rate = min(1.0, (1.0 + AVERAGE_POWER) * len(x) / (self.rows + AVERAGE_POWER * len(x)))
        self.average = self.average + rate * (w - self.average)

    def _add_moments(self, x: np.ndarray, codes: np.ndarray, weight: np.ndarray | None) -> None:
        x64 = x.astype(np.float64)
        np.add.at(self.weight, codes, 1.0 if weight is None else weight)
        if len(self.moment) == 1:
            self.moment[0] += x64.T @ (x64 if weight is None else x64 * weight[:, None])
            return
        for c in np.unique(codes):
            part = x64[codes == c]
            self.moment[c] += part.T @ (part if weight is None else part * weight[codes == c][:, None])

    def _inverse(self, kind: int, mask: np.ndarray, ridge: float) -> np.ndarray:
        """Inverse mean second moments of the classes in a mask; renewed now and then, not at each row."""
        p = self.w.shape[1]
        prior = float(p) if self.variance > 0 else 0.0
        seen = float(self.weight[mask].sum()) + prior
        kept = self._inverses.get(kind)
        if kept is not None and seen < kept[0] * (1.0 + RENEW):
            return kept[1]
        s = self.moment[0] if len(self.moment) == 1 else self.moment[mask].sum(axis=0)
        s = s + (ridge + prior * self.variance + 1e-8 * np.trace(s) / p) * np.eye(p)
        values, vectors = np.linalg.eigh(s / max(seen, np.finfo(float).tiny))
        # As in batch EM: directions that no row has are left out.
        found = values > 1e-10 * max(values[-1], np.finfo(float).tiny)
        inverse = (vectors[:, found] / values[found]) @ vectors[:, found].T
        self._inverses[kind] = seen, inverse
        return inverse

    def _stepped(
        self,
        x: np.ndarray,
        codes: np.ndarray,
        weight: np.ndarray | None,
        options: StreamOptions,
        rate: float,
        backend: Any,
    ) -> np.ndarray:
        members, p = self.members, x.shape[1]
        estep = CapsulePass(members, p, np.array([options.nu]), None, True)
        zero = np.zeros(members.n_members, dtype=np.int64)
        prepared = estep.prepare(_Weights(self.w, zero, zero), backend)  # type: ignore[arg-type]
        stats = Stats.zeros(estep.layout())
        estep.accumulate(prepared, Block(x, codes, weight, 0), stats)
        kinds, which = _kinds(members.labels.tobytes(), members.labels.shape)
        w, one = self.w.copy(), x[0].astype(np.float64) if len(x) == 1 else None
        for r in np.flatnonzero(stats["sums"][:, 3] > 0):
            rows = slice(int(members.offsets[r]), int(members.offsets[r + 1]))
            kind = int(which[r])
            delta = stats["delta"][rows] / stats["sums"][r, 3]
            if options.ridge > 0:
                delta -= options.ridge / self.weight[kinds[kind]].sum() * self.w[rows]
            if not delta.any():
                continue
            inverse = self._inverse(kind, kinds[kind], options.ridge)
            if one is not None and options.ridge == 0:
                # One row's Delta is g x^T: a product of p^2 in place of one of D p^2.
                g = delta @ one / (one @ one)
                w[rows] += rate * np.outer(g, inverse @ one)
            else:
                w[rows] += rate * (delta @ inverse)
        return w

    def _walked(
        self, x: np.ndarray, codes: np.ndarray, weight: np.ndarray | None, options: StreamOptions
    ) -> np.ndarray:
        members, w = self.members, self.w.copy()
        kinds, which = _kinds(members.labels.tobytes(), members.labels.shape)
        ones = np.ones(len(x)) if weight is None else weight
        for r in range(members.n_members):
            labels = members.labels[r][codes]
            seen = labels >= 0
            if not seen.any():
                continue
            rows = slice(int(members.offsets[r]), int(members.offsets[r + 1]))
            inverse = self._inverse(int(which[r]), kinds[which[r]], options.ridge)
            table = squash_table(int(members.dims[r].sum()))
            w[rows] += walk(
                w[rows], x[seen], labels[seen], ones[seen], members.dims[r], inverse,
                options.nu, options.aggressiveness, table,
            )[0]  # fmt: skip
        return w
