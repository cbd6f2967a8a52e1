"""Mixtures of linear models by streamed EM: statistics of a pass, M-steps, refills, stop rule.

G. Hinton, M. Revow, P. Dayan, "Recognizing handwritten digits using mixtures of linear models" (1995).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from scalelatent.contract.finite import find_nonfinite, find_too_large
from scalelatent.contract.idle_threads import run_parts
from scalelatent.contract.learners import Backend, Block
from scalelatent.contract.stats import Layout, Stats
from scalelatent.contract.wants import Wants
from scalelatent.errors import DivergenceError
from scalelatent.kernels.arrays import Array
from scalelatent.models.linear_mixture.kernels import PackedBases, PackedScores
from scalelatent.models.linear_mixture.kernels.reference import (
    Frame,
    Groups,
    group_rows,
    sorted_runs,
)
from scalelatent.reductions.moments import NonFiniteError

from .pancakes import Pancakes, directions_cut, image_bases, scores_of
from .steps import TINY, centre_images, factor_step, power_step, ppca_step

LEAST_RESPONSIBILITY = 1e-6
# Stands for the rows of a sub-class that has none.
_NO_ROW = 1e-12
MOST_REFILLS = 3
FINISHING_PASSES = 6
# Rows of soft scores at a time.
_SOFT_ROWS = 2048
START, SETTLE, MAIN, FINISH, DONE = range(5)
# What the history calls the phase of a pass.
PHASES = ("k-means", "settle", "em", "finish")
# What a block has of a sub-class, on average; its rows and bytes.
_ROWS_OF_A_GROUP = 64
_LEAST_BLOCK, _MOST_BLOCK, _BLOCK_BYTES = 2048, 32_768, 101_000_000
_MERGE_SHARE = 0.08
# Bytes of the bases that an M-step works on at a time.
_CACHE_BYTES = 500_000


@dataclass(frozen=True)
class Mixture:
    """Constants of a fit.

    Attributes
    ----------
    n_features : int
    classes : ndarray of int, shape (K,)
        Class of each sub-class, in rising order.
    n_classes : int
        0: rows have no labels, all are of one class.
    likelihood, assignment : str
    temperature : float
        sigma² of soft rows; 0 is learned.
    floor : float
        Smallest noise, absolute.
    frame : Frame or None
        Tangents.
    tangent_weight, finish_weight : float
        Of the tangents of all kinds together in clustering and in the finishing passes, relative to the rows.
    """

    n_features: int
    classes: np.ndarray
    n_classes: int
    likelihood: str = "error"
    assignment: str = "hard"
    temperature: float = 0.0
    floor: float = 1e-12
    frame: Frame | None = None
    tangent_weight: float = 0.0
    finish_weight: float = 0.0

    @property
    def n_components(self) -> int:
        """Sub-classes of all classes."""
        return len(self.classes)

    @property
    def n_tangents(self) -> int:
        """Kinds of tangents."""
        return 0 if self.frame is None else len(self.frame.names)

    @property
    def starts(self) -> np.ndarray:
        """First sub-class of each class, and their number."""
        return np.searchsorted(self.classes, np.arange(max(self.n_classes, 1) + 1))


@dataclass(frozen=True)
class MixtureState:
    """Everything that changes from pass to pass.

    Attributes
    ----------
    now : Pancakes
        Under which images are taken.
    held : Pancakes or None
        Those that rows are assigned by, where they are others: k-means centres at the start, the clustering
        in the finishing passes.
    counts, errors : ndarray, shape (K,)
        Rows, and mean score of a row, of the last pass.
    tangent_weights : ndarray, shape (K, tangents)
        Factors of the tangents' squares.
    temperature : float
    objective, previous : float
        Mean score of a row (or -log-likelihood in nats) in the last two passes of a phase.
    phase, phase_pass, iteration : int
    passed : int
        Phase of the last pass.
    refills, refilled, starved, dropped : int
        Passes with refills and sub-classes refilled so far; starving in the last pass; dropped.
    """

    now: Pancakes
    held: Pancakes | None
    counts: np.ndarray
    errors: np.ndarray
    tangent_weights: np.ndarray
    temperature: float
    objective: float
    previous: float
    phase: int
    phase_pass: int
    iteration: int
    refills: int = 0
    refilled: int = 0
    starved: int = 0
    dropped: int = 0
    passed: int = START


def initial_state(mixture: Mixture, now: Pancakes, phase: int = START) -> MixtureState:
    """State before the first pass; MAIN where the pancakes come from a fit."""
    k = mixture.n_components
    held = now.cut(0) if phase == START else None
    nothing = np.zeros(k)
    tangents = np.zeros((k, mixture.n_tangents))
    temperature = mixture.temperature or float(np.mean(now.noise))
    none = nothing, nothing, tangents
    return MixtureState(now, held, *none, temperature, np.inf, np.inf, phase, 0, 0)


def responsibilities(scores: np.ndarray, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """(r, log sum exp) of scores over sub-classes, r in proportion to exp(-score / 2 sigma²); those under
    1e-6 are 0.
    """
    exponent = np.asarray(scores, dtype=np.float64) * (-0.5 / temperature)
    top = exponent.max(axis=1, keepdims=True)
    r = np.exp(exponent - top)
    total = r.sum(axis=1, keepdims=True)
    r /= total
    r[r < LEAST_RESPONSIBILITY] = 0.0
    r /= r.sum(axis=1, keepdims=True)
    return r, (top + np.log(total))[:, 0]


@dataclass(frozen=True)
class Assigner:
    """How the rows of a pass are assigned: the likelihood of the score, softly or not."""

    likelihood: str
    soft: bool


def assigner(mixture: Mixture, state: MixtureState) -> Assigner:
    """Of the phase: all starts are hard, by the error."""
    if state.phase in (START, SETTLE):
        return Assigner("error", False)
    return Assigner(mixture.likelihood, mixture.assignment == "soft")


@dataclass(frozen=True)
class PreparedMixture:
    """Parameters of a pass as the kernels want them."""

    backend: Backend
    scorer: PackedScores
    bank: PackedBases
    tangent_bank: PackedBases | None
    assigner: Assigner
    temperature: float
    tangent_weights: np.ndarray


@dataclass(frozen=True)
class MixturePass:
    """E-step over a block: the :class:`~scalelatent.contract.learners.Reduction` of mixtures.

    Statistics: ``count`` (K,), ``error`` (K,), ``total`` (K, p), ``square`` and ``image``; ``sums`` (3,):
    scores (or -log-likelihood), rows, weight. With tangents ``gram``, images of the rows alone in the bases,
    and ``trace`` (K, tangents).
    """

    mixture: Mixture
    width: int

    @property
    def wants(self) -> Wants:
        """Blocks with some rows of each sub-class, and leaves in parallel although the statistic is large."""
        m = self.mixture
        k, p, q = m.n_components, m.n_features, self.width
        most = min(_BLOCK_BYTES // (4 * p), _MOST_BLOCK)
        block = _LEAST_BLOCK
        while block < _ROWS_OF_A_GROUP * k and 2 * block <= most:
            block *= 2
        # Scores and bases in float64 on the way to float32, packed; rows in float32.
        packed = 16 * k * p * (q + 2)
        if m.likelihood == "factor-analysis" or m.assignment == "soft":
            packed += 16 * k * p * q  # loadings over the noise of pixels; rows of many sub-classes
        together = 0  # bytes of rows that are scored under all sub-classes of their class
        if m.assignment == "soft":
            together = _SOFT_ROWS * (4 * p + 20 * int(np.diff(m.starts).max()))
        return Wants(block_rows=block, merge_share=_MERGE_SHARE, scratch=(packed + together, 4 * p + 80))

    def layout(self) -> Layout:
        """Fields of the statistic."""
        m, k, p, q = self.mixture, self.mixture.n_components, self.mixture.n_features, self.width
        fields: list[tuple[str, tuple[int, ...]]] = [
            ("sums", (3,)),
            ("count", (k,)),
            ("error", (k,)),
            ("total", (k, p)),
            ("square", (k, p) if m.likelihood == "factor-analysis" else (k,)),
            ("image", (k, q, p)),
        ]
        if m.frame is not None:
            fields += [("gram", (k, q, q)), ("trace", (k, m.n_tangents))]
        return Layout(tuple(fields))

    def flops_per_row(self) -> float:
        """Scores of the own class, and images of about one sub-class."""
        m = self.mixture
        p, per_class = m.n_features, m.n_components / max(m.n_classes, 1)
        images = 4.0 * p * self.width * (1 + m.n_tangents)
        return 2.0 * p * per_class * (self.width + 1) + images

    def prepare(self, state: MixtureState, backend: Backend) -> PreparedMixture:
        """Pack scores and bases."""
        m, how = self.mixture, assigner(self.mixture, state)
        judge = state.now if state.held is None else state.held
        scorer = backend.kernel("linear_mixture_make_scorer")(scores_of(judge, how.likelihood), m.starts)
        family = m.likelihood if state.phase == MAIN else "error"
        make, bases = backend.kernel("linear_mixture_make_bank"), image_bases(state.now, family)
        bank = make(state.now.means, bases, m.likelihood == "factor-analysis")
        still = None if m.frame is None else make(np.zeros_like(state.now.means), bases, False)
        scale = state.temperature if how.soft and how.likelihood in ("error", "code-cost") else 1.0
        return PreparedMixture(backend, scorer, bank, still, how, scale, state.tangent_weights)

    def accumulate(self, prepared: PreparedMixture, block: Block, stats: Stats) -> None:
        """Add a block; a row meets the sub-classes of its own class.

        Raises
        ------
        NonFiniteError
            Naming the row and the feature.
        """
        backend, classes = prepared.backend, max(self.mixture.n_classes, 1)
        with np.errstate(over="ignore"):  # what is beyond float32 is told below, by row and feature
            x = backend.asarray(block.x, np.float32, "x")
        if place := find_too_large(block):
            raise NonFiniteError(place)
        weight = np.ones(len(block.x)) if block.weight is None else block.weight
        codes = block.y if self.mixture.n_classes else np.zeros(len(block.x), dtype=np.int32)
        assert codes is not None
        order, edges = sorted_runs(codes, classes)
        groups, score, total = self._assign(prepared, x, weight, order, edges)
        if not np.isfinite(total):
            raise NonFiniteError(find_nonfinite(block) or f"scores of rows {block.start} and on overflow")
        stats["sums"][...] += total, (weight > 0).sum(), weight.sum()
        filled = np.diff(groups.starts) > 0
        for name, shares in (("count", groups.weights), ("error", score)):
            sums = np.add.reduceat(np.append(shares, 0.0), groups.starts[:-1])
            stats[name][...] += np.where(filled, sums, 0.0)
        self._add(prepared, x, groups, stats)

    def _assign(
        self, prepared: PreparedMixture, x: Array, weight: np.ndarray, order: np.ndarray, edges: np.ndarray
    ) -> tuple[Groups, np.ndarray, float]:
        """Groups of the rows, which ``order`` and ``edges`` name by class, their weighted scores, and the sum
        of the objective.
        """
        if prepared.assigner.soft:
            return self._assign_softly(prepared, x, weight, order, edges)
        find = prepared.backend.kernel("linear_mixture_nearest_own")
        best, index = find(prepared.scorer, x, order, edges)
        scores = best.astype(np.float64) * weight
        groups = group_rows(index, 0, self.mixture.n_components, weight)
        half = 0.5 if prepared.assigner.likelihood in ("ppca", "factor-analysis") else 1.0
        return groups, scores[groups.rows], half * float(scores.sum())

    def _assign_softly(
        self, prepared: PreparedMixture, x: Array, weight: np.ndarray, order: np.ndarray, edges: np.ndarray
    ) -> tuple[Groups, np.ndarray, float]:
        """As :meth:`_assign`: rows with all sub-classes of which they are to a part."""
        nothing = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0)
        shared, total = [nothing], 0.0
        for c, own in self._pieces(order, edges):
            scores = self._all_scores(prepared, x, own, c)
            r, log_sums = responsibilities(scores, prepared.temperature)
            total -= float(weight[own] @ log_sums)
            rows, members = np.nonzero(r)
            shares = r[rows, members] * weight[own[rows]]
            shared.append(
                (own[rows], members + self.mixture.starts[c], shares, shares * scores[rows, members])
            )
        rows, members, shares, errors = (np.concatenate(parts) for parts in zip(*shared, strict=True))
        by_member, starts = sorted_runs(members, self.mixture.n_components)
        return Groups(0, starts, rows[by_member], shares[by_member]), errors[by_member], total

    def _pieces(self, order: np.ndarray, edges: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """(class, some of its rows): so many as have all their scores in memory."""
        for c, (first, stop) in enumerate(pairwise(edges)):
            for a in range(first, stop, _SOFT_ROWS):
                yield c, order[a : min(a + _SOFT_ROWS, stop)]

    def _all_scores(self, prepared: PreparedMixture, x: Array, rows: np.ndarray, run: int) -> np.ndarray:
        """Scores of some rows of a class by its sub-classes."""
        backend = prepared.backend
        part = x if len(rows) == len(x) else backend.take(x, rows, "class")
        score = backend.kernel("linear_mixture_all_scores")
        return np.asarray(score(prepared.scorer, part, run, run + 1), dtype=np.float64)

    def _add(self, prepared: PreparedMixture, x: Array, groups: Groups, stats: Stats) -> None:
        m, backend = self.mixture, prepared.backend
        gram = stats["gram"] if m.frame is not None else np.zeros((0, 0, 0))
        add = backend.kernel("linear_mixture_add_images")
        add(prepared.bank, x, groups, stats["total"], stats["square"], stats["image"], gram)
        if m.frame is not None:
            add = backend.kernel("linear_mixture_add_tangents")
            add(
                prepared.tangent_bank,
                x,
                groups,
                m.frame,
                prepared.tangent_weights,
                stats["image"],
                stats["trace"],
            )


@dataclass(frozen=True)
class MixtureEM:
    """The batch learner: M-steps, refills, phases, stop rule.

    Attributes
    ----------
    mixture : Mixture
    n_dims : int
        With ``share`` above 0 the most: chosen at the end of the first phase.
    share : float
        Of the data's variance.
    width : int
        Directions of the images: n_dims and some spare.
    start_passes, settle_passes : int
        Of k-means, and hard passes by the error before a likelihood.
    finish_passes : int
    max_iter : int
        Passes of the main phase.
    tol : float
        Relative fall of the objective under which the main phase ends.
    most_refills : int
        Passes that may refill; later sub-classes that starve are dropped. Below 0 none is touched.
    """

    mixture: Mixture
    n_dims: int
    width: int
    share: float = 0.0
    start_passes: int = 5
    settle_passes: int = 0
    finish_passes: int = FINISHING_PASSES
    max_iter: int = 30
    tol: float = 1e-4
    most_refills: int = MOST_REFILLS

    def reductions(self) -> dict[str, MixturePass]:
        """The E-step over the training rows."""
        return {"train": MixturePass(self.mixture, self.width)}

    def is_done(self, state: MixtureState) -> bool:
        """True after the last finishing pass."""
        return state.phase == DONE

    def summary(self, state: MixtureState) -> dict[str, float | int | str]:
        """Scalars of the last pass."""
        return {
            "pass": state.iteration,
            "objective": state.objective,
            "phase": PHASES[state.passed],
            "n_dims": state.now.n_dims,
            "starved": state.starved,
            "refilled": state.refilled,
            "dropped": state.dropped,
            "cut": int(directions_cut(state.counts, state.now.n_dims)[state.now.weights > 0].sum()),
        }

    def update(self, state: MixtureState, stats: Mapping[str, Stats]) -> MixtureState:
        """M-step and the rest of the schedule; a pure function.

        Raises
        ------
        DivergenceError
            The objective is not finite.
        """
        train, how = stats["train"], assigner(self.mixture, state)
        rows = max(float(train["sums"][2]), TINY)
        objective = float(train["sums"][0]) / rows
        p, h = self.mixture.n_features, state.now.n_dims
        if how.soft and how.likelihood in ("error", "code-cost"):  # a density across the pancakes
            objective += 0.5 * (p - h) * float(np.log(2 * np.pi * state.temperature))
        if not np.isfinite(objective):
            raise DivergenceError(
                f"the objective is {objective} in pass {state.iteration + 1}: scale the features to about 1"
            )
        last = state.phase == FINISH and state.phase_pass + 1 >= self.finish_passes
        now, traces = self._maximise(state, train, last)
        count = np.array(train["count"])
        state = replace(
            state,
            now=now,
            # Weights below 1 on average, such as weights that sum to 1, are scaled to count rows.
            counts=count * max(1.0, float(train["sums"][1]) / rows),
            errors=train["error"] / np.maximum(count, TINY),
            previous=state.objective,
            objective=objective,
            iteration=state.iteration + 1,
            passed=state.phase,
            phase_pass=state.phase_pass + 1,
            starved=0,
        )
        if how.soft and not self.mixture.temperature:
            state = replace(state, temperature=max(self._residual(now, count), self.mixture.floor))
        if state.phase in (START, SETTLE, MAIN):
            state = self._refill(state)
        return self._schedule(state, traces)

    def _residual(self, now: Pancakes, count: np.ndarray) -> float:
        return float(count @ now.noise.reshape(len(count), -1).mean(axis=1) / max(count.sum(), TINY))

    def _maximise(self, state: MixtureState, train: Stats, last: bool) -> tuple[Pancakes, np.ndarray]:
        """(the next pancakes, mean squares of the rows (K,) and of each tangent (K, 1 + tangents))."""
        m, now = self.mixture, state.now
        count = np.array(train["count"])
        there = count > 0
        family = m.likelihood if state.phase == MAIN else "error"
        per_class = np.add.reduceat(count, m.starts[:-1])[m.classes]
        weights = np.where(now.weights > 0, np.maximum(count, _NO_ROW) / np.maximum(per_class, _NO_ROW), 0.0)
        # Sub-classes whose matrices stay in the second-level cache, at a time.
        some = max(_CACHE_BYTES // (8 * now.bases[:1].size), 1)
        noise_shape = now.means.shape if family == "factor-analysis" else count.shape
        shapes = now.means.shape, now.bases.shape, now.values.shape, noise_shape
        found = [np.empty(shape) for shape in (*shapes, (len(count), 1 + m.n_tangents))]

        def fill(part: slice) -> None:
            new = self._maximise_images(now.part(part), family, train, part, last)
            for to, array in zip(found, new, strict=True):
                to[part] = array

        run_parts(fill, [slice(a, a + some) for a in range(0, len(count), some)])
        means, bases, values, noise, traces = found
        for new, old in ((means, now.means), (bases, now.bases), (values, now.values), (noise, now.noise)):
            if new.ndim == old.ndim and not there.all():
                new[~there] = old[~there]
        return Pancakes(means, bases, values, noise, weights, now.n_dims), traces

    def _maximise_images(
        self, now: Pancakes, family: str, train: Stats, part: slice, last: bool
    ) -> tuple[np.ndarray, ...]:
        """Means, bases, values, noise, and mean squares as of :meth:`_maximise`, of some sub-classes."""
        m, h = self.mixture, now.n_dims
        count, bases = np.array(train["count"][part]), image_bases(now, family)
        n = np.maximum(count, TINY)
        shift, spread, centred, code = centre_images(
            count, train["total"][part], train["square"][part], train["image"][part], bases
        )
        full = spread if spread.ndim == 1 else spread.sum(axis=1)
        traces, rows_alone = full[:, None], None
        if m.frame is not None:
            traces = np.concatenate([traces, train["trace"][part] / n[:, None]], axis=1)
            rows_alone = train["gram"][part] / n[:, None, None] - code[:, :, None] * code[:, None, :]
        if family == "ppca":
            bases, values, noise = ppca_step(
                bases[:, :, :h], now.values[:, :h], now.noise, full, centred[:, :, :h], m.floor
            )
            bases, values, noise = self._with_spare(now, bases, values, noise)
        elif family == "factor-analysis":
            bases, noise = factor_step(now.bases, bases, spread, centred, m.floor)
            values = now.values
        else:
            bases, values, noise = self._power(now, centred, full, rows_alone, last)
        return now.means + shift, bases, values, noise, traces

    def _power(
        self,
        now: Pancakes,
        centred: np.ndarray,
        full: np.ndarray,
        rows_alone: np.ndarray | None,
        last: bool,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A block power step, or (``last``) only the rotation, whose values are those of its bases."""
        bases, values = power_step(now.bases, centred, rows_alone, last)
        return bases, values, self._noise(values, full, now.n_dims)

    def _with_spare(
        self, now: Pancakes, bases: np.ndarray, values: np.ndarray, noise: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The spare directions, which probabilistic PCA leaves where they are."""
        h = bases.shape[2]
        spare = np.concatenate([bases, now.bases[:, :, h:]], axis=2)
        return spare, np.concatenate([values, now.values[:, h:]], axis=1), noise

    def _noise(self, values: np.ndarray, full: np.ndarray, h: int) -> np.ndarray:
        left = (full - values[:, :h].sum(axis=1)) / max(self.mixture.n_features - h, 1)
        return np.maximum(left, self.mixture.floor)

    def _refill(self, state: MixtureState) -> MixtureState:
        """Give sub-classes that starve half of the one with the largest error of their class, cut across its
        first direction; drop those that starve once more.
        """
        m, now, count = self.mixture, state.now, state.counts
        starving = (now.weights > 0) & (count < self._least(state))
        if self.most_refills < 0 or not starving.any():
            return state
        means, bases, values = now.means.copy(), now.bases.copy(), now.values.copy()
        noise, weights, refilled, dropped = now.noise.copy(), now.weights.copy(), 0, 0
        # Not the same sub-class for two: what it has left is halved with each.
        mass = np.where(starving | (weights <= 0), -np.inf, count * np.abs(state.errors))
        for q in np.flatnonzero(starving):
            own = np.where(m.classes == m.classes[q], mass, -np.inf)
            donor = int(own.argmax())
            if state.refills >= self.most_refills or not np.isfinite(own[donor]):
                if (weights[m.classes == m.classes[q]] > 0).sum() > 1:
                    weights[q] = 0.0
                    dropped += 1
                continue
            way, length = _first_direction(now, donor)
            step = np.sqrt(2.0 / np.pi) * length * way
            means[q], means[donor] = now.means[donor] + step, now.means[donor] - step
            bases[q], values[q], noise[q] = bases[donor], values[donor], noise[donor]
            weights[q] = weights[donor] = max(0.5 * weights[donor], TINY)
            mass[donor] = -np.inf
            refilled += 1
        return replace(
            state,
            now=replace(now, means=means, bases=bases, values=values, noise=noise, weights=weights),
            refills=state.refills + (refilled > 0),
            refilled=state.refilled + refilled,
            dropped=state.dropped + dropped,
            starved=int(starving.sum()),
        )

    def _least(self, state: MixtureState) -> np.ndarray:
        """Rows under which a sub-class starves: a tenth of an even share, at least 2, at most what its
        directions need.
        """
        m = self.mixture
        per_class = np.add.reduceat(state.counts, m.starts[:-1]) / np.diff(m.starts)
        return np.clip(0.1 * per_class, 2.0, max(2.0, state.now.n_dims + 1.0))[m.classes]

    def _schedule(self, state: MixtureState, traces: np.ndarray) -> MixtureState:
        m, phase = self.mixture, state.phase
        soft_or_dense = m.assignment == "soft" or m.likelihood in ("ppca", "factor-analysis")
        least = self.tol * max(abs(state.previous), TINY)
        settled = state.phase_pass > 1 and state.previous - state.objective < least and not state.starved
        if phase == START:
            ended = state.phase_pass >= self.start_passes or settled
            following = SETTLE if soft_or_dense and self.settle_passes else MAIN
        elif phase == SETTLE:
            ended, following = state.phase_pass >= self.settle_passes, MAIN
        elif phase == MAIN:
            ended = state.phase_pass >= self.max_iter or settled
            dense = m.likelihood in ("ppca", "factor-analysis")
            following = DONE if dense or not self.finish_passes else FINISH
        else:
            ended, following = state.phase_pass >= self.finish_passes, DONE
        now, held = state.now, state.held
        if phase == START and not ended:
            held = now.cut(0)
        if ended:
            if phase == START:
                now = self._with_dims(state)
            held = now if following == FINISH else None
            if following == MAIN:
                now = self._enter(now)
            phase = following
        weight = m.finish_weight if phase == FINISH else m.tangent_weight
        return replace(
            state,
            now=now,
            held=held if phase != DONE else None,
            phase=phase,
            phase_pass=0 if ended else state.phase_pass,
            tangent_weights=_spread_weight(weight, traces),
        )

    def _with_dims(self, state: MixtureState) -> Pancakes:
        """The pancakes with their dimensions: given, or so many as have the share of the variance."""
        now, p = state.now, self.mixture.n_features
        full = now.noise * (p - now.n_dims) + now.values[:, : now.n_dims].sum(axis=1)
        h = self.n_dims
        if self.share:
            h = choose_dims(state.counts, now.values[:, : self.n_dims], full, self.share)
        return replace(now, n_dims=h, noise=self._noise(now.values, full, h))

    def _enter(self, now: Pancakes) -> Pancakes:
        """Pancakes of the errors become those of the likelihood."""
        h, p = now.n_dims, self.mixture.n_features
        if self.mixture.likelihood == "ppca":
            return replace(now, values=np.maximum(now.values, now.noise[:, None]))
        if self.mixture.likelihood == "factor-analysis":
            squares = np.maximum(now.values - now.noise[:, None], 1e-3 * now.noise[:, None])
            squares[:, h:] = 0.0
            noise = np.repeat(now.noise[:, None], p, axis=1)
            return replace(now, bases=now.bases * np.sqrt(squares)[:, None, :], noise=noise)
        return now


def _first_direction(pancakes: Pancakes, q: int) -> tuple[np.ndarray, float]:
    """Direction of a sub-class in which its rows differ most, and their standard deviation along it."""
    lengths = np.sqrt((pancakes.bases[q] ** 2).sum(axis=0))
    if pancakes.noise.ndim == 2:
        j = int(lengths.argmax())
        return pancakes.bases[q, :, j] / max(lengths[j], TINY), float(lengths[j])
    j = int(pancakes.values[q].argmax())
    return pancakes.bases[q, :, j], float(np.sqrt(pancakes.values[q, j]))


def _spread_weight(weight: float, traces: np.ndarray) -> np.ndarray:
    """Factors (K, tangents) by which all tangents together weigh so much as the rows, each kind the same."""
    kinds = traces.shape[1] - 1
    if not kinds:
        return np.zeros((len(traces), 0))
    factors = weight / kinds * traces[:, :1] / np.maximum(traces[:, 1:], TINY)
    return np.where(traces[:, 1:] > 0, factors, 0.0)


def choose_dims(counts: np.ndarray, values: np.ndarray, full: np.ndarray, share: float) -> int:
    """Fewest directions, the same for all sub-classes, that hold a share of the rows' variance.

    Raises
    ------
    ValueError
        All directions that there are hold less.
    """
    held = np.cumsum(counts @ values) / max(float(counts @ full), TINY)
    enough = np.flatnonzero(held >= share)
    if not len(enough):
        raise ValueError(
            f"n_dims={share:g}: {values.shape[1]} directions hold {held[-1] if len(held) else 0:.3f} of the "
            "variance; raise max_dims, or lower n_dims"
        )
    return int(enough[0]) + 1
