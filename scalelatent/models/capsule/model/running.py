r"""Capsule regression on a stream of rows of unknown length: the mathematics of ``partial_fit``.

There is no pass over the rows before the first step. The second moments are therefore those of the rows so
far, with a prior that fades:

.. math::

    \bar S = \frac{S + \rho + p s_0 I}{n + p}, \qquad s_0 = \text{mean squared feature of the first rows}

The prior counts as p rows of independent features, so that :math:`\bar S` has full rank from the first row
on. A batch of b rows moves W by

.. math::  W \leftarrow W + \eta \min(1, b/p) \frac{1}{b} (\Delta_{batch} - \frac{b}{n} \rho W) \bar S^{-1},
           \qquad \eta = (1 + t/t_0)^{-\kappa}

without momentum. Here t is the number of rows so far divided by the rows of a batch, n is the weight of all
rows, and weights are divided by their mean so far (:func:`.online.batch_scale`). A single row moves at most
about as far as its posterior mean, because :math:`x^T \bar S^{-1} x` is p on average. Predictions use the
running average of W, as in :mod:`.online`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

from scalelatent.contract.learners import Backend, Block
from scalelatent.contract.stats import Stats
from scalelatent.errors import DivergenceError
from scalelatent.reductions.eigen import invert_on_rows

from .em import NO_ROWS, RELATIVE_JITTER, CapsulePass, initial_state
from .members import Members
from .online import AVERAGE_POWER, batch_scale
from .start import random_start, subspace_start

# The inverse of the second moments is computed again as soon as the summed row weight has grown by this
# share.
RENEW_SHARE = 0.05


@dataclass(frozen=True)
class StreamOptions:
    """Settings of ``partial_fit``, named like the parameters of :class:`scalelatent.CapsuleRegression`."""

    nu: float  # first threshold nu of the schedule
    kappa: float
    t0: float  # steps after which the step size falls
    batch_rows: int  # rows per step
    ridge: float | None  # None: the ridge of the fit that ``partial_fit`` continues


@dataclass(frozen=True)
class RowSums:
    """Sums over the rows so far, never changed in place, so that the old sums survive a failed step."""

    # Sum of weight x x^T over the rows, a tuple of float64 (p, p): one matrix for all rows, or one per class
    # if some members do not learn from all classes.
    moment: tuple[np.ndarray, ...]
    weight: np.ndarray  # sum of the row weights of each class, float64 (classes,)
    count: np.ndarray  # number of rows of each class whose weight is above 0, float64 (classes,)

    def add_rows(self, block: Block) -> RowSums:
        """Return new sums that include more rows."""
        assert block.y is not None
        x, n, weight = block.x.astype(np.float64), len(self.weight), block.weight
        moment, whole = list(self.moment), len(self.moment) == 1
        for c in [0] if whole else np.unique(block.y):
            rows = slice(None) if whole else block.y == c
            part = x[rows]
            more = part.T @ (part if weight is None else part * weight[rows][:, None])
            more += moment[c]
            moment[c] = more
        count = _count_rows(block, n)
        own = count if weight is None else np.bincount(block.y, weight, minlength=n)
        return RowSums(tuple(moment), self.weight + own, self.count + count)

    def second_moment(self, classes: np.ndarray) -> np.ndarray:
        """Return the second moments (p, p) of the classes in a mask, bool (classes,)."""
        parts = self.moment if len(self.moment) == 1 else [self.moment[c] for c in np.flatnonzero(classes)]
        return np.sum(parts, axis=0)


@dataclass
class RunningCapsule:
    """Weights and second moments of a stream (all rows of ``partial_fit``), which may continue a fit.

    Arrays are replaced, never changed in place, and only after complete batches.
    """

    members: Members
    # Current weights and their running average, with which the model predicts, float64 (D, p). Both are None
    # after a fit, because the stream then starts from the weights of the model.
    w: np.ndarray | None
    average: np.ndarray | None
    sums: RowSums | None  # None if the model was saved by a version that did not save them
    variance: float  # variance s_0 of the prior; 0 after a fit, which needs no prior
    rows: float  # rows that the weights have seen, in all passes of a fit and in the stream
    ridge: np.ndarray  # ridge of each column in the fit, float64 (p,); zeros if there was no fit
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
    ) -> Self:
        """Return a stream with weights from subspaces of the first rows or, with too few rows, at random."""
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
        groups = 1 if members.sees.all() else m
        sums = RowSums((np.zeros((p, p)),) * groups, np.zeros(m), np.zeros(m))
        return cls(members, w, w.copy(), sums, float(np.mean(x * x)) or 1.0, 0.0, np.zeros(p))

    def copy(self) -> Self:
        """Return a copy that learns independently of this object."""
        return replace(self, _inverses=dict(self._inverses))

    def learn(
        self,
        x: np.ndarray,
        codes: np.ndarray,
        weight: np.ndarray | None,
        options: StreamOptions,
        backend: Backend,
    ) -> None:
        """Learn from float32 rows (rows, p), batch by batch in their order."""
        if not np.isfinite(x).all():
            row = int(np.flatnonzero(~np.isfinite(x).all(axis=1))[0])
            raise FloatingPointError(
                f"row {row} is not finite in float32: remove the row, or scale the features"
            )
        for a in range(0, len(x), options.batch_rows):
            rows = slice(a, a + options.batch_rows)
            own = None if weight is None else weight[rows]
            self._learn_batch(Block(x[rows], codes[rows], own, 0), options, backend)

    def discard_inverses(self) -> None:
        """Discard the inverse second moments; the next step computes them from all rows so far."""
        self._inverses.clear()

    def _learn_batch(self, block: Block, options: StreamOptions, backend: Backend) -> None:
        assert self.w is not None
        assert self.average is not None
        assert self.sums is not None
        before = self.sums, dict(self._inverses)
        try:
            self.sums = self.sums.add_rows(block)
            w = self._em_step(self.w, self.sums, block, options, backend)
            _check_finite(w)
        except BaseException:
            self.sums, self._inverses = before
            raise
        n = len(block.x)
        self.w, self.rows = w, self.rows + n
        rate = min(1.0, (1.0 + AVERAGE_POWER) * n / (self.rows + AVERAGE_POWER * n))
        self.average = self.average + rate * (w - self.average)

    def _inverse(self, sums: RowSums, class_set: int, ridge: np.ndarray) -> np.ndarray:
        """Return the inverse mean second moments of a set of classes.

        The inverse is computed again only after the row weight has grown by ``RENEW_SHARE``, so the latest
        rows may be missing.
        """
        p, mask = len(self.ridge), self.members.class_sets[class_set]
        prior = float(p) if self.variance > 0 else 0.0
        seen = float(sums.weight[mask].sum()) + prior
        kept = self._inverses.get(class_set)
        if kept is not None and seen < kept[0] * (1.0 + RENEW_SHARE):
            return kept[1]
        s = sums.second_moment(mask)
        s = s + (ridge + prior * self.variance + RELATIVE_JITTER * np.trace(s) / p) * np.eye(p)
        inverse = invert_on_rows(s / max(seen, np.finfo(float).tiny), NO_ROWS)
        self._inverses[class_set] = seen, inverse
        return inverse

    def _em_step(
        self, w: np.ndarray, sums: RowSums, block: Block, options: StreamOptions, backend: Backend
    ) -> np.ndarray:
        """Return the weights after a step of stepwise EM."""
        members, x, p = self.members, block.x, block.x.shape[1]
        estep = CapsulePass(members, p, np.array([options.nu]), None, True)
        prepared = estep.prepare(initial_state(w, members.n_members), backend)
        stats = Stats.zeros(estep.layout())
        estep.accumulate(prepared, block, stats)
        _check_finite(stats["sums"])
        ridge = self.ridge if options.ridge is None else np.full(p, options.ridge)
        new, one = w.copy(), x[0].astype(np.float64) if len(x) == 1 else None
        eta = (1.0 + self.rows / options.batch_rows / options.t0) ** -options.kappa
        counts = _count_rows(block, len(sums.count))
        for r in map(int, np.flatnonzero(stats["sums"][:, 3] > 0)):
            rows, class_set = members.rows_of(r), int(members.class_set_of[r])
            mask = members.class_sets[class_set]
            seen = float(counts[mask].sum())
            rate = eta * min(1.0, seen / p)
            total = float(sums.weight[mask].sum())
            mean = total / float(sums.count[mask].sum())
            delta = stats["delta"][rows] * batch_scale(float(stats["sums"][r, 3]), seen, mean, p)
            if ridge.any():
                delta -= ridge / total * w[rows]
            if not delta.any():
                continue
            inverse = self._inverse(sums, class_set, ridge)
            if one is not None and not ridge.any():
                # With a single row, Delta is the outer product of a vector g and the row x. Computing g first
                # needs p^2 products instead of D p^2.
                g = delta @ one / (one @ one)
                new[rows] += rate * np.outer(g, inverse @ one)
            else:
                new[rows] += rate * (delta @ inverse)
        return new


def _count_rows(block: Block, n_classes: int) -> np.ndarray:
    """Return the number of rows of each class whose weight is above 0."""
    assert block.y is not None
    codes = block.y if block.weight is None else block.y[block.weight > 0]
    return np.bincount(codes, minlength=n_classes)


def _check_finite(values: np.ndarray) -> None:
    if not np.isfinite(values).all():
        raise DivergenceError(
            "the weights would not be finite after these rows, which were ignored: their features are too "
            "large for float32, or have another scale than earlier rows; scale them to about 1 and try again"
        )
