"""Mixtures of linear models by EM over passes of the rows.

G. Hinton, M. Revow, P. Dayan, "Recognizing handwritten digits using mixtures of linear models" (NIPS 7,
1995). Each class has some components; a component q has a mean mu_q and a basis of a few directions. In each
pass:

1. *Assign* (`e_step.py`). E_iq is the squared distance of row i from the plane of component q, or another
   score. A row belongs to the component of its class with the least E_iq (hard), or to each component q of
   its class with the responsibility r_iq = exp(-E_iq / 2 sigma²) / sum_q' exp(-E_iq' / 2 sigma²) (soft).
2. *Move the means*: mu_q = sum_i r_iq x_i / sum_i r_iq.
3. *Turn the bases* towards the leading eigenvectors of S_q = sum_i r_iq (x_i - mu_q)(x_i - mu_q)' and, with
   tangents t of the rows, of S_q + lambda² sum_i r_iq t_i t_i'. The paper computes these eigenvectors; one
   power step per pass needs only S_q times the basis, and no p x p matrix for p features (`m_steps.py`).
   lambda² is the weight of the tangents. sigma² becomes the mean squared residual per direction outside of
   the planes.
4. *Refill* components that starve, which means that too few rows belong to them (`refill.py`).
5. *Advance the phase*: k-means, whose centres assign the rows; a few passes of hard assignment by the error,
   if the model uses another likelihood or soft assignment; EM until the objective falls by less than ``tol``;
   and last passes that keep the assignments while the bases converge with ``recognition_tangent_weight``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from scalelatent.contract.idle_threads import run_parts
from scalelatent.contract.stats import Stats
from scalelatent.errors import DivergenceError

from .components import DENSITY_LIKELIHOODS, Components, count_missing_directions, scatter_maps
from .e_step import (
    DONE,
    FINISH,
    MAIN,
    PHASES,
    SETTLE,
    START,
    MixturePass,
    MixtureSettings,
    MixtureState,
    assignment_rule,
)
from .m_steps import TINY, centre_scatter, factor_step, power_step, ppca_step
from .refill import refill_starving

# Number of last passes, in which the bases converge for fixed assignments.
FINISHING_PASSES = 6
# Number of rows assumed for a component without rows, so that its share of the rows stays above 0.
_NO_ROW = 1e-12
# Bytes of the bases of the components that one task of the M-step updates together; they fit the second-level
# cache.
_CACHE_BYTES = 500_000


@dataclass(frozen=True)
class MixtureEM:
    """Batch learner of mixtures: M-steps, refills of components with few rows, phases, and the stop rule.

    Attributes
    ----------
    settings : MixtureSettings
    n_dims : int
        Directions of a component after the first phase, which is k-means.
    width : int
        Columns of a basis: ``n_dims`` directions and some spare columns, which speed up convergence.
    start_passes, settle_passes, max_iter, finish_passes : int
        Largest number of passes of each phase.
    tol : float
        The main phase ends when the objective falls by less than this share.
    may_refill : bool
        Whether components that starve are refilled or dropped.
    """

    settings: MixtureSettings
    n_dims: int
    width: int
    start_passes: int = 5
    settle_passes: int = 0
    finish_passes: int = FINISHING_PASSES
    max_iter: int = 30
    tol: float = 1e-3
    may_refill: bool = True

    def reductions(self) -> dict[str, MixturePass]:
        """Return the E-step, the only reduction of a pass; it sums over the training rows."""
        return {"train": MixturePass(self.settings, self.width)}

    def is_done(self, state: MixtureState) -> bool:
        """Return True after the last pass of the last phase."""
        return state.phase == DONE

    def summary(self, state: MixtureState) -> dict[str, float | int | str]:
        """Return the record of the last pass, one entry of the estimator's ``history_``."""
        components = state.components
        missing = count_missing_directions(state.counts, components.n_dims)[components.weights > 0]
        return {
            "pass": state.iteration,
            "objective": state.objective,
            "phase": PHASES[state.last_phase],
            "n_dims": components.n_dims,
            "starved": state.n_starving,
            "refilled": state.n_refilled,
            "dropped": state.n_dropped,
            "cut": int(missing.sum()),
        }

    def update(self, state: MixtureState, stats: Mapping[str, Stats]) -> MixtureState:
        """Return the state after the M-step: new means and bases, refilled components, and the next phase.

        Raises
        ------
        DivergenceError
            The objective is not finite.
        """
        train, rule = stats["train"], assignment_rule(self.settings, state)
        weight = max(float(train["sums"][2]), TINY)
        objective = float(train["sums"][0]) / weight
        p, h = self.settings.n_features, state.components.n_dims
        if rule.is_soft and rule.likelihood not in DENSITY_LIKELIHOODS:
            # The objective is -log of a Gaussian with variance sigma² in the p - h directions outside of a
            # component's plane. This term is the logarithm of its normalising constant.
            objective += 0.5 * (p - h) * float(np.log(2 * np.pi * state.temperature))
        if not np.isfinite(objective):
            raise DivergenceError(
                f"the objective is {objective} in pass {state.iteration + 1}: scale the features to about 1"
            )
        components, mean_squares = self._maximise(state, train)
        count = np.array(train["count"])
        state = replace(
            state,
            components=components,
            # Row weights with a mean below 1 (for example weights that sum to 1) are scaled to a mean of 1.
            counts=count * max(1.0, float(train["sums"][1]) / weight),
            errors=train["error"] / np.maximum(count, TINY),
            previous=state.objective,
            objective=objective,
            iteration=state.iteration + 1,
            last_phase=state.phase,
            phase_pass=state.phase_pass + 1,
            n_starving=0,
        )
        if rule.is_soft and not self.settings.temperature:
            noise = components.noise.reshape(len(count), -1).mean(axis=1)
            temperature = max(float(count @ noise / max(count.sum(), TINY)), self.settings.floor)
            state = replace(state, temperature=temperature)
        if self.may_refill and state.phase != FINISH:
            state = refill_starving(self.settings, state)
        return self._advance(state, mean_squares)

    def _maximise(self, state: MixtureState, train: Stats) -> tuple[Components, np.ndarray]:
        """Return the components after the M-step, and mean squared lengths (K, 1 + tangents).

        Column 0 is for the centred rows of each component, and each other column is for a kind of tangents.
        """
        s, old = self.settings, state.components
        count = np.array(train["count"])
        per_class = np.add.reduceat(count, s.starts[:-1])[s.classes]
        shares = np.maximum(count, _NO_ROW) / np.maximum(per_class, _NO_ROW)
        likelihood = s.likelihood if state.phase == MAIN else "error"
        is_last = state.phase == FINISH and state.phase_pass + 1 >= self.finish_passes
        noise = np.empty(old.means.shape if likelihood == "factor-analysis" else count.shape)
        new = replace(
            old,
            means=np.empty_like(old.means),
            bases=np.empty_like(old.bases),
            values=np.empty_like(old.values),
            noise=noise,
            weights=np.where(old.weights > 0, shares, 0.0),
        )
        mean_squares = np.empty((len(count), 1 + s.n_tangents))

        def fill(part: slice) -> None:
            found = self._maximise_part(old.select(part), likelihood, train, part, is_last)
            for to, array in zip((new.means, new.bases, new.values, noise, mean_squares), found, strict=True):
                to[part] = array

        at_once = max(_CACHE_BYTES // (8 * old.bases[:1].size), 1)
        run_parts(fill, [slice(a, a + at_once) for a in range(0, len(count), at_once)])
        is_empty = count <= 0
        for name in ("means", "bases", "values", "noise"):
            to, before = getattr(new, name), getattr(old, name)
            if to.ndim == before.ndim:
                to[is_empty] = before[is_empty]
        return new, mean_squares

    def _maximise_part(
        self, old: Components, likelihood: str, train: Stats, part: slice, is_last: bool
    ) -> tuple[np.ndarray, ...]:
        """Return means, bases, values, noise and mean squared lengths of the components ``part``."""
        s, h, count = self.settings, old.n_dims, np.array(train["count"][part])
        n, maps = np.maximum(count, TINY), scatter_maps(old, likelihood)
        shift, mean_square, projected, code = centre_scatter(
            count, train["total"][part], train["square"][part], train["scatter"][part], maps
        )
        row_square = mean_square if mean_square.ndim == 1 else mean_square.sum(axis=1)
        mean_squares, rows_alone = row_square[:, None], None
        if s.tangent_spec is not None:
            mean_squares = np.concatenate([mean_squares, train["trace"][part] / n[:, None]], axis=1)
            rows_alone = train["gram"][part] / n[:, None, None] - code[:, :, None] * code[:, None, :]
        if likelihood == "ppca":
            bases, values, noise = ppca_step(
                old.bases[:, :, :h], old.values[:, :h], old.noise, row_square, projected[:, :, :h], s.floor
            )
            # A step of probabilistic PCA does not change the spare directions.
            bases = np.concatenate([bases, old.bases[:, :, h:]], axis=2)
            values = np.concatenate([values, old.values[:, h:]], axis=1)
        elif likelihood == "factor-analysis":
            bases, noise = factor_step(old.bases, maps, mean_square, projected, s.floor)
            values = old.values
        else:
            bases, values = power_step(old.bases, projected, rows_alone, is_last)
            noise = self._mean_noise(values, row_square, h)
        return old.means + shift, bases, values, noise, mean_squares

    def _mean_noise(self, values: np.ndarray, mean_square: np.ndarray, h: int) -> np.ndarray:
        """Return the noise (K,) of each component: the mean variance outside of its first h directions.

        The noise is at least ``settings.floor``. ``mean_square`` is the variance in all directions together.
        """
        outside = (mean_square - values[:, :h].sum(axis=1)) / max(self.settings.n_features - h, 1)
        return np.maximum(outside, self.settings.floor)

    def _advance(self, state: MixtureState, mean_squares: np.ndarray) -> MixtureState:
        """Return the state with the phase, and the weights of tangents, of the next pass."""
        s, phase = self.settings, state.phase
        is_density = s.likelihood in DENSITY_LIKELIHOODS
        fall = state.previous - state.objective
        has_converged = (
            state.phase_pass > 1 and fall < self.tol * max(abs(state.previous), TINY) and not state.n_starving
        )
        if phase == START:
            has_ended = state.phase_pass >= self.start_passes or has_converged
            is_other = is_density or s.assignment == "soft"
            following = SETTLE if is_other and self.settle_passes else MAIN
        elif phase == SETTLE:
            has_ended, following = state.phase_pass >= self.settle_passes, MAIN
        elif phase == MAIN:
            has_ended = state.phase_pass >= self.max_iter or has_converged
            following = DONE if is_density or not self.finish_passes else FINISH
        else:
            has_ended, following = state.phase_pass >= self.finish_passes, DONE
        components, assigned_by = state.components, state.assigned_by
        if has_ended:
            if phase == START:
                components = self._use_directions(components)
            assigned_by = components if following == FINISH else None
            if following == MAIN:
                components = self._as_likelihood(components)
            phase = following
        elif phase == START:
            assigned_by = components.with_n_dims(0)
        weight = s.finish_weight if phase == FINISH else s.tangent_weight
        return replace(
            state,
            components=components,
            assigned_by=assigned_by,
            phase=phase,
            phase_pass=0 if has_ended else state.phase_pass,
            tangent_weights=_weigh_tangents(weight, mean_squares),
        )

    def _use_directions(self, components: Components) -> Components:
        """Return components whose first ``n_dims`` directions belong to the model, with their noise."""
        inside = components.values[:, : components.n_dims].sum(axis=1)
        mean_square = components.noise * (self.settings.n_features - components.n_dims) + inside
        noise = self._mean_noise(components.values, mean_square, self.n_dims)
        return replace(components, n_dims=self.n_dims, noise=noise)

    def _as_likelihood(self, components: Components) -> Components:
        """Convert components of the reconstruction error to start values for the likelihood of the fit."""
        h, noise = components.n_dims, components.noise
        if self.settings.likelihood == "ppca":
            return replace(components, values=np.maximum(components.values, noise[:, None]))
        if self.settings.likelihood == "factor-analysis":
            squares = np.maximum(components.values - noise[:, None], 1e-3 * noise[:, None])
            squares[:, h:] = 0.0
            noise = np.repeat(noise[:, None], self.settings.n_features, axis=1)
            return replace(components, bases=components.bases * np.sqrt(squares)[:, None, :], noise=noise)
        return components


def _weigh_tangents(weight: float, mean_squares: np.ndarray) -> np.ndarray:
    """Return the factors (K, tangents) of the scatter of each kind of tangents.

    With these factors all tangents together weigh ``weight`` times as much as the rows, in equal shares.
    ``mean_squares`` (K, 1 + tangents) are the mean squared lengths of centred rows and of each kind of
    tangents.
    """
    kinds = mean_squares.shape[1] - 1
    if not kinds:
        return np.zeros((len(mean_squares), 0))
    factors = weight / kinds * mean_squares[:, :1] / np.maximum(mean_squares[:, 1:], TINY)
    return np.where(mean_squares[:, 1:] > 0, factors, 0.0)
