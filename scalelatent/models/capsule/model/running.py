r"""Capsule regression on a stream of rows whose number is unknown: what ``partial_fit`` does.

There is no pass before the first step, so the second moments are those of the rows so far, with a prior that
fades:

.. math::

    \bar S = \frac{S + \rho + p s_0 I}{n + p}, \qquad s_0 = \text{mean squared feature of the first rows}

as if p rows of independent features had been seen; so it has full rank from the first row on. A batch of b
rows moves W by

.. math::  W \leftarrow W + \eta \min(1, b/p) \frac{1}{b} (\Delta_{batch} - \frac{b}{n} \rho W) \bar S^{-1},
           \qquad \eta = (1 + t/t_0)^{-\kappa}

without momentum, t being rows seen over the rows of a batch; n is the weight of all rows, and weights are
measured by their mean so far (:func:`.online.row_share`). One row is thereby moved at most about as far
as its posterior mean: :math:`x^T \bar S^{-1} x` is p on average. Passive-aggressive steps are those of
:mod:`.passive`. The model that predicts is the running average of W, as in :mod:`.online`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from scalelatent.contract.learners import Backend, Block
from scalelatent.contract.stats import Stats
from scalelatent.errors import DivergenceError
from scalelatent.models.capsule.kernels.squash import squash_table
from scalelatent.reductions.eigen import inverse_on_rows

from .em import CapsulePass
from .members import Members
from .online import AVERAGE_POWER, row_share
from .start import random_start, subspace_start

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
    iteration: int = 0


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
    # None: that of the fit which the stream goes on from
    ridge: float | None
    aggressiveness: float


@dataclass(frozen=True)
class RowSums:
    """Sums over the rows so far. Never changed in place, so that a step that fails leaves the old ones."""

    # tuple of float64 (p, p): sum of weight x x^T of all rows; of each class where members
    # see some classes only
    moment: tuple[np.ndarray, ...]
    # float64 (classes,): sum of row weights of each class
    weight: np.ndarray
    # float64 (classes,): rows of each class whose weight is above 0
    count: np.ndarray

    def added(self, x: np.ndarray, codes: np.ndarray, weight: np.ndarray | None) -> RowSums:
        """These sums and those of some more rows, (rows, p)."""
        x, n = x.astype(np.float64), len(self.weight)
        moment, whole = list(self.moment), len(self.moment) == 1
        for c in [0] if whole else np.unique(codes):
            rows = slice(None) if whole else codes == c
            part = x[rows]
            more = part.T @ (part if weight is None else part * weight[rows][:, None])
            more += moment[c]
            moment[c] = more
        count = _count(codes, weight, n)
        own = count if weight is None else np.bincount(codes, weight, minlength=n)
        return RowSums(tuple(moment), self.weight + own, self.count + count)

    def second_moment(self, classes: np.ndarray) -> np.ndarray:
        """Of the classes in a mask, bool (classes,); shape (p, p)."""
        parts = self.moment if len(self.moment) == 1 else [self.moment[c] for c in np.flatnonzero(classes)]
        return np.sum(parts, axis=0)


@dataclass
class RunningCapsule:
    """Weights and second moments of a stream. :meth:`learn` replaces them, after whole batches only."""

    members: Members
    # w, average: float64 (D, p): current weights, and their running average, which predicts
    w: np.ndarray
    average: np.ndarray
    # Of the rows so far, those of a fit included
    sums: RowSums
    # S0 of the prior; 0 without a prior (after a fit)
    variance: float
    # Rows that W has seen, those of a fit included
    rows: float
    # float64 (p,): rho of each column in the fit before; zeros without a fit, where the prior serves
    ridge: np.ndarray
    _inverses: dict[int, tuple[float, np.ndarray]] = field(default_factory=dict, repr=False)

    @classmethod
    def begin(
        cls,
        members: Members,
        x: np.ndarray,
        codes: np.ndarray,
        init: str,
        scale: float,
        rng: np.random.Generator,
    ) -> RunningCapsule:
        """From the first rows: the subspace start where each capsule has enough, else a random one."""
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
        sums = RowSums((np.zeros((p, p)),) * groups, np.zeros(m), np.zeros(m))
        return cls(members, w, w.copy(), sums, variance if variance > 0 else 1.0, 0.0, np.zeros(p))

    def learn(
        self,
        x: np.ndarray,
        codes: np.ndarray,
        weight: np.ndarray | None,
        options: StreamOptions,
        backend: Backend,
    ) -> None:
        """Learn from rows, batch by batch in their order."""
        if not np.isfinite(x).all():
            row = int(np.flatnonzero(~np.isfinite(x).all(axis=1))[0])
            raise FloatingPointError(
                f"row {row} is not finite in float32: leave it out, or scale the features"
            )
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
        backend: Backend,
    ) -> None:
        before = self.sums, dict(self._inverses)
        try:
            self.sums = self.sums.added(x, codes, weight)
            if options.passive:
                w = self._walked(x, codes, weight, options, backend)
            else:
                w = self._stepped(x, codes, weight, options, backend)
            _check(w)
        except BaseException:
            self.sums, self._inverses = before
            raise
        self.w, self.rows = w, self.rows + len(x)
        rate = min(1.0, (1.0 + AVERAGE_POWER) * len(x) / (self.rows + AVERAGE_POWER * len(x)))
        self.average = self.average + rate * (w - self.average)

    def _ridge(self, options: StreamOptions) -> np.ndarray:
        return self.ridge if options.ridge is None else np.full(self.w.shape[1], options.ridge)

    def _inverse(self, kind: int, mask: np.ndarray, ridge: np.ndarray) -> np.ndarray:
        """Inverse mean second moments of the classes in a mask; renewed now and then, not at each row."""
        p = self.w.shape[1]
        prior = float(p) if self.variance > 0 else 0.0
        seen = float(self.sums.weight[mask].sum()) + prior
        kept = self._inverses.get(kind)
        if kept is not None and seen < kept[0] * (1.0 + RENEW):
            return kept[1]
        s = self.sums.second_moment(mask)
        s = s + (ridge + prior * self.variance + 1e-8 * np.trace(s) / p) * np.eye(p)
        inverse = inverse_on_rows(s / max(seen, np.finfo(float).tiny), 1e-10)
        self._inverses[kind] = seen, inverse
        return inverse

    def _stepped(
        self,
        x: np.ndarray,
        codes: np.ndarray,
        weight: np.ndarray | None,
        options: StreamOptions,
        backend: Backend,
    ) -> np.ndarray:
        members, p = self.members, x.shape[1]
        estep: CapsulePass[_Weights] = CapsulePass(members, p, np.array([options.nu]), None, True)
        zero = np.zeros(members.n_members, dtype=np.int64)
        prepared = estep.prepare(_Weights(self.w, zero, zero), backend)
        stats = Stats.zeros(estep.layout())
        estep.accumulate(prepared, Block(x, codes, weight, 0), stats)
        _check(stats["sums"])
        kinds, which = _kinds(members.labels.tobytes(), members.labels.shape)
        ridge = self._ridge(options)
        w, one = self.w.copy(), x[0].astype(np.float64) if len(x) == 1 else None
        eta = (1.0 + self.rows / options.batch_rows / options.t0) ** -options.kappa
        counts = _count(codes, weight, len(self.sums.count))
        for r in np.flatnonzero(stats["sums"][:, 3] > 0):
            rows = slice(int(members.offsets[r]), int(members.offsets[r + 1]))
            kind, mask = int(which[r]), kinds[which[r]]
            seen = float(counts[mask].sum())
            rate = eta * min(1.0, seen / p)
            total = float(self.sums.weight[mask].sum())
            mean = total / float(self.sums.count[mask].sum())
            delta = stats["delta"][rows] * row_share(float(stats["sums"][r, 3]), seen, mean, p)
            if ridge.any():
                delta -= ridge / total * self.w[rows]
            if not delta.any():
                continue
            inverse = self._inverse(kind, kinds[kind], ridge)
            if one is not None and not ridge.any():
                # One row's Delta is g x^T: a product of p^2 in place of one of D p^2.
                g = delta @ one / (one @ one)
                w[rows] += rate * np.outer(g, inverse @ one)
            else:
                w[rows] += rate * (delta @ inverse)
        return w

    def _walked(
        self,
        x: np.ndarray,
        codes: np.ndarray,
        weight: np.ndarray | None,
        options: StreamOptions,
        backend: Backend,
    ) -> np.ndarray:
        members, w, walk = self.members, self.w.copy(), backend.kernel("capsule_walk")
        kinds, which = _kinds(members.labels.tobytes(), members.labels.shape)
        ones = np.ones(len(x)) if weight is None else weight
        for r in range(members.n_members):
            labels = members.labels[r][codes]
            seen = labels >= 0
            if not seen.any():
                continue
            rows = slice(int(members.offsets[r]), int(members.offsets[r + 1]))
            inverse = self._inverse(int(which[r]), kinds[which[r]], self._ridge(options))
            table = squash_table(int(members.dims[r].sum()))
            moved, sums = walk(
                w[rows], x[seen], labels[seen], ones[seen], members.dims[r], inverse,
                options.nu, options.aggressiveness, table,
            )  # fmt: skip
            _check(sums)
            w[rows] += moved
        return w


def _count(codes: np.ndarray, weight: np.ndarray | None, n_classes: int) -> np.ndarray:
    return np.bincount(codes if weight is None else codes[weight > 0], minlength=n_classes)


def _check(values: np.ndarray) -> None:
    if not np.isfinite(values).all():
        raise DivergenceError(
            "the weights are not finite after these rows, which are left out: their features are too large "
            "for float32, or of another scale than those before; scale them to about 1, then go on"
        )
