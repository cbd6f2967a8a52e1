"""The E-step of mixtures of linear models: assign the rows of a block to components and sum their scatter.

:class:`MixtureState` holds everything that changes from pass to pass. :class:`MixturePass` computes, from a
state and rows, the sums that the M-step (`em.py`, `stepwise.py`) needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from scalelatent.contract.block_requirements import BlockRequirements
from scalelatent.contract.finite import find_nonfinite, find_too_large
from scalelatent.contract.learners import Backend, Block
from scalelatent.contract.stats import Layout, Stats
from scalelatent.kernels.arrays import Array
from scalelatent.models.linear_mixture.kernels import AnyBases, AnyScorer
from scalelatent.models.linear_mixture.kernels.reference import Groups, TangentSpec, group_rows, sort_by_code
from scalelatent.reductions.moments import NonFiniteError

from .components import DENSITY_LIKELIHOODS, Components, make_scores, scatter_maps

# Phases of a fit, in order; PHASES are their names in ``history_``.
START, SETTLE, MAIN, FINISH, DONE = range(5)
PHASES = ("k-means", "settle", "em", "finish")
# Responsibilities below this value count as 0.
LEAST_RESPONSIBILITY = 1e-6
# Number of rows whose scores soft assignment holds in memory at a time.
_SOFT_ROWS = 2048
# Mean number of rows per component in a block. Each block reads all bases and writes the scatter once. With
# only 20 rows per component, this memory traffic takes as long as the matrix products.
_ROWS_PER_COMPONENT = 64
# Smallest and largest number of rows of a block, and the largest bytes of its rows in float32.
_LEAST_BLOCK, _MOST_BLOCK, _BLOCK_BYTES = 2048, 32_768, 101_000_000
# Largest share of the computing time of a pass for merging the sums of leaves (groups of blocks). The sums of
# mixtures are large, so a smaller share would give fewer leaves than threads.
_MERGE_SHARE = 0.08


@dataclass(frozen=True)
class MixtureSettings:
    """Constants of a fit of a mixture.

    Attributes
    ----------
    n_features : int
    classes : ndarray of int, shape (K,)
        Class of each component, in ascending order.
    n_classes : int
        0 if rows have no labels; all components then belong to class 0.
    likelihood, assignment : str
    temperature : float
        sigma² of soft assignment in squared units of the features; 0: estimate sigma² in each pass.
    floor : float
        Smallest noise, in squared units of the features.
    tangent_spec : TangentSpec or None
    tangent_weight, finish_weight : float
        Weight of all kinds of tangents together relative to the rows: ``tangent_weight`` in all passes but
        the last phase, ``finish_weight`` in the last phase.
    """

    n_features: int
    classes: np.ndarray
    n_classes: int
    likelihood: str = "error"
    assignment: str = "hard"
    temperature: float = 0.0
    floor: float = 1e-12
    tangent_spec: TangentSpec | None = None
    tangent_weight: float = 0.0
    finish_weight: float = 0.0

    @property
    def n_components(self) -> int:
        """Number of components of all classes."""
        return len(self.classes)

    @property
    def n_tangents(self) -> int:
        """Number of kinds of tangents."""
        return 0 if self.tangent_spec is None else len(self.tangent_spec.names)

    @property
    def starts(self) -> np.ndarray:
        """Index of the first component of each class, then the number of components, int64 (classes + 1,)."""
        return np.searchsorted(self.classes, np.arange(max(self.n_classes, 1) + 1))


@dataclass(frozen=True)
class MixtureState:
    """State of a fit by EM between two passes.

    Attributes
    ----------
    components : Components
        Components of the model; the next pass projects the scatter on their bases.
    assigned_by : Components or None
        Components by which the next pass assigns rows: k-means centres in the first phase, the components at
        the end of EM in the last phase. None: ``components``.
    counts, errors : ndarray, shape (K,)
        Rows of each component, and their mean score, in the last pass.
    tangent_weights : ndarray, shape (K, tangents)
        Factors of the scatter of each kind of tangents.
    temperature : float
        sigma² of soft assignment in squared units of the features.
    objective, previous : float
        Mean score of a row (or -log-likelihood in nats) in the last pass and in the one before.
    phase, phase_pass, iteration : int
        Phase of the next pass, passes of this phase so far, passes of the fit so far.
    last_phase : int
        Phase of the last pass.
    refill_passes, n_refilled, n_dropped : int
        Passes that refilled components; components refilled and dropped so far.
    n_starving : int
        Components that starved in the last pass.
    """

    components: Components
    assigned_by: Components | None
    counts: np.ndarray
    errors: np.ndarray
    tangent_weights: np.ndarray
    temperature: float
    objective: float = np.inf
    previous: float = np.inf
    phase: int = START
    phase_pass: int = 0
    iteration: int = 0
    last_phase: int = START
    refill_passes: int = 0
    n_refilled: int = 0
    n_starving: int = 0
    n_dropped: int = 0


def initial_state(settings: MixtureSettings, components: Components, phase: int = START) -> MixtureState:
    """Return the state before the first pass; ``phase`` is MAIN if the components come from another fit."""
    zeros = np.zeros(settings.n_components)
    return MixtureState(
        components,
        assigned_by=components.with_n_dims(0) if phase == START else None,
        counts=zeros,
        errors=zeros,
        tangent_weights=np.zeros((settings.n_components, settings.n_tangents)),
        temperature=settings.temperature or float(np.mean(components.noise)),
        phase=phase,
    )


def responsibilities(scores: np.ndarray, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """Return responsibilities r (n, K) and the logs (n,) of their denominators.

    r is proportional to exp(-score / 2 sigma²), with ``temperature`` as sigma²; each row of r sums to 1.
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
class AssignmentRule:
    """Rule by which a pass assigns rows to components: the score of a row, and hard or soft assignment."""

    likelihood: str
    is_soft: bool


def assignment_rule(settings: MixtureSettings, state: MixtureState) -> AssignmentRule:
    """Return the assignment rule of the next pass.

    Before the main phase, rows are assigned to one component by the reconstruction error. From the main phase
    on, ``settings`` decides.
    """
    if state.phase in (START, SETTLE):
        return AssignmentRule("error", False)
    return AssignmentRule(settings.likelihood, settings.assignment == "soft")


@dataclass(frozen=True)
class PreparedPass:
    """Bases and score parameters of the components in one pass, packed for the kernels of a backend."""

    backend: Backend
    scorer: AnyScorer
    bases: AnyBases
    tangent_bases: AnyBases | None
    rule: AssignmentRule
    temperature: float
    tangent_weights: np.ndarray


@dataclass(frozen=True)
class MixturePass:
    """E-step over a block: the :class:`~scalelatent.contract.learners.Reduction` of mixtures.

    The sums run over rows x with responsibilities r and residuals R = x - mean; B is the basis (p, q) of a
    component, and t are the tangents of a row:

    =========== ====================== ===================================================================
    ``sums``    (3,)                   scores (or -log-likelihoods), rows of positive weight, their weight
    ``count``   (K,)                   r
    ``error``   (K,)                   r times the score
    ``total``   (K, p)                 r R
    ``square``  (K,) or (K, p)         r |R|²; in factor analysis r R∘R
    ``scatter`` (K, q, p)              r (B'R) R', and the same of weighted tangents
    ``gram``    (K, q, q)              r (B'R) (B'R)', of rows alone; only with tangents
    ``trace``   (K, tangents)          r |t|² of each kind of tangents t; only with tangents
    =========== ====================== ===================================================================
    """

    settings: MixtureSettings
    width: int

    @property
    def requirements(self) -> BlockRequirements:
        """Requirements: rows per block, share of the time for merging sums, bytes of scratch memory."""
        s = self.settings
        k, p, q = s.n_components, s.n_features, self.width
        most = min(_BLOCK_BYTES // (4 * p), _MOST_BLOCK)
        block = _LEAST_BLOCK
        while block < _ROWS_PER_COMPONENT * k and 2 * block <= most:
            block *= 2
        # The parameters of scores and the bases exist in float64 and packed in float32 at the same time.
        packed = 16 * k * p * (q + 2)
        if s.likelihood == "factor-analysis" or s.assignment == "soft":
            packed += 16 * k * p * q  # loadings divided by the noise; lists of rows of several components
        soft = 0
        if s.assignment == "soft":
            soft = _SOFT_ROWS * (4 * p + 20 * int(np.diff(s.starts).max()))
        scratch = packed + soft, 4 * p + 80
        return BlockRequirements(
            block_rows=block, merge_share=_MERGE_SHARE, scratch=scratch, reads_on_gpu=True
        )

    def layout(self) -> Layout:
        """Return the names and shapes of the sums, which the class docstring lists."""
        s, k, p, q = self.settings, self.settings.n_components, self.settings.n_features, self.width
        fields: list[tuple[str, tuple[int, ...]]] = [
            ("sums", (3,)),
            ("count", (k,)),
            ("error", (k,)),
            ("total", (k, p)),
            ("square", (k, p) if s.likelihood == "factor-analysis" else (k,)),
            ("scatter", (k, q, p)),
        ]
        if s.tangent_spec is not None:
            fields += [("gram", (k, q, q)), ("trace", (k, s.n_tangents))]
        return Layout(tuple(fields))

    def flops_per_row(self) -> float:
        """Return the floating-point operations per row: scores in one class, and scatter of one component."""
        s = self.settings
        p, per_class = s.n_features, s.n_components / max(s.n_classes, 1)
        scatter = 4.0 * p * self.width * (1 + s.n_tangents)
        return 2.0 * p * per_class * (self.width + 1) + scatter

    def prepare(self, state: MixtureState, backend: Backend) -> PreparedPass:
        """Pack the bases of the components in ``state`` and the parameters of their scores for a backend."""
        s, rule, components = self.settings, assignment_rule(self.settings, state), state.components
        assigners = components if state.assigned_by is None else state.assigned_by
        scorer = backend.kernel("linear_mixture_make_scorer")(
            make_scores(assigners, rule.likelihood), s.starts
        )
        pack = backend.kernel("linear_mixture_pack_bases")
        maps = scatter_maps(components, s.likelihood if state.phase == MAIN else "error")
        bases = pack(components.means, maps, s.likelihood == "factor-analysis")
        # The scatter of tangents is taken about 0, so the means that are packed with their bases are 0.
        tangent_bases = None if s.tangent_spec is None else pack(np.zeros_like(components.means), maps, False)
        is_density = rule.likelihood in DENSITY_LIKELIHOODS
        temperature = state.temperature if rule.is_soft and not is_density else 1.0
        return PreparedPass(backend, scorer, bases, tangent_bases, rule, temperature, state.tangent_weights)

    def accumulate(self, prepared: PreparedPass, block: Block, stats: Stats) -> None:
        """Add to ``stats`` the sums over the rows of a block."""
        sums = self.make_leaf_sums(prepared, stats)
        self.add_block(prepared, block, stats, sums)
        self.add_leaf_sums(prepared, stats, sums)

    def make_leaf_sums(self, prepared: PreparedPass, stats: Stats) -> Iterable[Array]:
        """Return the arrays for the large sums (scatter and others) of a leaf, which is a group of blocks.

        On a GPU the arrays stay in its memory until :meth:`add_leaf_sums`.
        """
        return prepared.backend.kernel("linear_mixture_open_sums")(*self._large_fields(stats))

    def add_leaf_sums(self, prepared: PreparedPass, stats: Stats, sums: Iterable[Array]) -> None:
        """Add the large sums of a leaf, the result of :meth:`make_leaf_sums`, to ``stats`` on the host."""
        prepared.backend.kernel("linear_mixture_close_sums")(sums, *self._large_fields(stats))

    def _large_fields(self, stats: Stats) -> list[np.ndarray]:
        fields = [stats["total"], stats["square"], stats["scatter"]]
        has_tangents = self.settings.tangent_spec is not None
        return fields + (
            [stats["gram"], stats["trace"]] if has_tangents else [np.zeros((0, 0, 0)), np.zeros((0, 0))]
        )

    def add_block(self, prepared: PreparedPass, block: Block, stats: Stats, sums: Iterable[Array]) -> None:
        """Add the small sums of a block to ``stats``, and the large sums (scatter and others) to ``sums``.

        Rows are assigned to components of their own class.

        Raises
        ------
        NonFiniteError
            A value is NaN, infinite or beyond float32; the error names the row and the feature.
        """
        backend, n_classes = prepared.backend, max(self.settings.n_classes, 1)
        with np.errstate(over="ignore"):  # `find_too_large` names the value that overflows float32
            x = backend.asarray(block.x, np.float32, "x")
        if place := find_too_large(block):
            raise NonFiniteError(place)
        weight = np.ones(len(block.x)) if block.weight is None else block.weight
        codes = block.y if self.settings.n_classes else np.zeros(len(block.x), dtype=np.int32)
        assert codes is not None
        order, edges = sort_by_code(codes, n_classes)
        assign = self._assign_softly if prepared.rule.is_soft else self._assign
        groups, scores, total = assign(prepared, x, weight, order, edges)
        if not np.isfinite(total):
            raise NonFiniteError(
                find_nonfinite(block) or f"the scores of rows from {block.start} on overflow"
            )
        stats["sums"][...] += total, (weight > 0).sum(), weight.sum()
        has_rows = np.diff(groups.starts) > 0
        for name, shares in (("count", groups.weights), ("error", scores)):
            by_group = np.add.reduceat(np.append(shares, 0.0), groups.starts[:-1])
            stats[name][...] += np.where(has_rows, by_group, 0.0)
        r_sums, square, scatter, gram, trace = sums
        add = backend.kernel("linear_mixture_add_scatter")
        add(prepared.bases, x, groups, r_sums, square, scatter, gram)
        if (spec := self.settings.tangent_spec) is not None:
            add_tangents = backend.kernel("linear_mixture_add_tangent_scatter")
            weights = prepared.tangent_weights
            add_tangents(prepared.tangent_bases, x, groups, spec, weights, scatter, trace)

    def _assign(
        self, prepared: PreparedPass, x: Array, weight: np.ndarray, order: np.ndarray, edges: np.ndarray
    ) -> tuple[Groups, np.ndarray, float]:
        """Return the rows grouped by component, their weighted scores, and the sum of the objective.

        ``order[edges[c]:edges[c + 1]]`` are the rows of class c.
        """
        find = prepared.backend.kernel("linear_mixture_nearest_own")
        best, index = find(prepared.scorer, x, order, edges)
        scores = best.astype(np.float64) * weight
        groups = group_rows(index, self.settings.n_components, weight)
        half = 0.5 if prepared.rule.likelihood in DENSITY_LIKELIHOODS else 1.0
        return groups, scores[groups.rows], half * float(scores.sum())

    def _assign_softly(
        self, prepared: PreparedPass, x: Array, weight: np.ndarray, order: np.ndarray, edges: np.ndarray
    ) -> tuple[Groups, np.ndarray, float]:
        """Return the rows grouped by component, their weighted scores, and the sum of the objective.

        By soft assignment a row is in the groups of all components of its class that have a responsibility
        above 0 for the row.
        """
        nothing = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0)
        parts, total = [nothing], 0.0
        score = prepared.backend.kernel("linear_mixture_all_scores")
        for c, own in _split_classes(order, edges):
            part = x if len(own) == len(x) else prepared.backend.take(x, own, "class")
            scores = np.asarray(score(prepared.scorer, part, c, c + 1), dtype=np.float64)
            r, log_sums = responsibilities(scores, prepared.temperature)
            total -= float(weight[own] @ log_sums)
            rows, members = np.nonzero(r)
            shares = r[rows, members] * weight[own[rows]]
            parts.append(
                (own[rows], members + self.settings.starts[c], shares, shares * scores[rows, members])
            )
        rows, members, shares, errors = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        by_member, starts = sort_by_code(members, self.settings.n_components)
        return Groups(starts, rows[by_member], shares[by_member]), errors[by_member], total


def _split_classes(order: np.ndarray, edges: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield pairs (class, rows) with at most `_SOFT_ROWS` rows of the class."""
    for c, (first, stop) in enumerate(pairwise(edges)):
        for a in range(first, stop, _SOFT_ROWS):
            yield c, order[a : min(a + _SOFT_ROWS, stop)]
