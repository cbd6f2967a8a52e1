"""Mixtures of linear models by stepwise EM: an M-step with forgetting after each batch of rows.

O. Cappé, E. Moulines, "On-line expectation-maximization algorithm for latent data models" (2009).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from scalelatent.contract.block_requirements import BlockRequirements
from scalelatent.contract.learners import Backend, Block
from scalelatent.contract.stats import Layout, Stats
from scalelatent.errors import DivergenceError

from .components import Components, scatter_maps
from .e_step import MAIN, MixturePass, MixtureSettings, MixtureState, PreparedPass, initial_state
from .m_steps import TINY, factor_step, orthonormalise, power_step


@dataclass(frozen=True)
class StepwiseState:
    """State of a fit by stepwise EM between two steps.

    Attributes
    ----------
    mixture : MixtureState
        Components, and the other values that EM over passes has in its state.
    mass : ndarray, shape (K,)
        Running share of all rows that belong to each component.
    steps, epoch : int
        Completed steps and epochs.
    sums : ndarray, shape (2,)
        Objective and weight of the rows of this epoch so far.
    objective : float
        Mean objective of the rows in the last epoch, in which the components changed after each step.
    """

    mixture: MixtureState
    mass: np.ndarray
    steps: int
    epoch: int
    sums: np.ndarray
    objective: float


def model_mean_square(components: Components, likelihood: str) -> np.ndarray:
    """Return the mean squared length of a centred row of each component, (K,).

    In factor analysis it is the mean square of each feature, (K, p).
    """
    h, p = components.n_dims, components.means.shape[1]
    if likelihood == "factor-analysis":
        return components.noise + (components.bases[:, :, :h] ** 2).sum(axis=2)
    return components.values[:, :h].sum(axis=1) + (p - h) * components.noise


def model_scatter(components: Components, likelihood: str, maps: np.ndarray) -> np.ndarray:
    """Return C B (K, p, q): covariances C (K, p, p) of the components times ``maps`` B (K, p, q)."""
    if likelihood != "factor-analysis":
        return components.bases * components.values[:, None, :]
    loadings = components.bases
    codes = np.swapaxes(loadings, 1, 2) @ maps
    return loadings @ codes + components.noise[:, :, None] * maps


def initial_stepwise_state(
    settings: MixtureSettings, components: Components, mass: np.ndarray
) -> StepwiseState:
    """Return the state before the first step.

    ``mass`` (K,) are the numbers, or the shares, of the rows of each component.
    """
    if settings.likelihood == "ppca":  # batch EM does not update the spare directions
        values = components.values.copy()
        values[:, components.n_dims :] = components.noise[:, None]
        bases = orthonormalise(components.bases, components.bases)
        components = replace(components, bases=bases, values=values)
    share = np.maximum(mass, TINY) / max(float(mass.sum()), TINY)
    return StepwiseState(initial_state(settings, components, MAIN), share, 0, 0, np.zeros(2), np.inf)


@dataclass(frozen=True)
class StepwiseMixture:
    """Online learner of mixtures: each step averages the statistics of the model and of a batch of rows.

    The projected scatter becomes (1 - eta) C B plus eta times that of the batch, with the covariances C of
    the components and their bases B.

    Attributes
    ----------
    settings : MixtureSettings
        Without tangents.
    width : int
        Number of columns of the projected scatter.
    kappa, t0 : float
        They set the weight of a batch, eta = (step + t0) ** -kappa. On held-out digits, kappa from 0.6 to 0.9
        and t0 from 1 to 8 change the error less than seeds do (benchmarks/README.md).
    n_epochs : int
    """

    settings: MixtureSettings
    width: int
    kappa: float = 0.7
    t0: float = 2.0
    n_epochs: int = 3

    @property
    def _pass(self) -> MixturePass:
        return MixturePass(self.settings, self.width)

    @property
    def requirements(self) -> BlockRequirements:
        """Requirement of a step: bytes of scratch memory for a chain, which is a part of a batch."""
        return BlockRequirements(scratch=self._pass.requirements.scratch)

    def layout(self) -> Layout:
        """Return the names and shapes of the sums, which equal the sums of an EM pass."""
        return self._pass.layout()

    def flops_per_row(self) -> float:
        """Return the number of floating-point operations per row, the same as in an EM pass."""
        return self._pass.flops_per_row()

    def prepare(self, state: StepwiseState, backend: Backend) -> PreparedPass:
        """Pack the bases of the components and the parameters of their scores for a backend."""
        return self._pass.prepare(state.mixture, backend)

    def run_chain(self, prepared: PreparedPass, block: Block, stats: Stats) -> None:
        """Add to ``stats`` the sums over the rows ``block`` of a chain, which is a part of a batch."""
        self._pass.accumulate(prepared, block, stats)

    def step(self, state: StepwiseState, stats: Stats, n_rows: int) -> StepwiseState:
        """Return the state after the M-step of a batch with the sums ``stats``.

        Raises
        ------
        DivergenceError
            The objective is not finite.
        """
        s, old = self.settings, state.mixture.components
        if not np.isfinite(stats["sums"]).all():
            raise DivergenceError(
                f"the objective is not finite in step {state.steps + 1}: scale the features to about 1"
            )
        eta = (state.steps + self.t0) ** -self.kappa
        count = np.array(stats["count"])
        weight = max(float(stats["sums"][2]), TINY)
        mass = (1.0 - eta) * state.mass + eta * count / weight
        # Weight of the batch in the new sums of each component, from 0 to 1.
        share = np.minimum(eta * count / (weight * np.maximum(mass, TINY)), 1.0)
        n = np.maximum(count, TINY)
        shift, maps = stats["total"] / n[:, None], scatter_maps(old, s.likelihood)
        projected = self._blend_scatter(old, stats, share, shift, maps)
        mean_square = self._blend_squares(old, stats, share, shift)
        bases, values, noise = self._maximise(old, maps, mean_square, projected)
        has_rows = count > 0
        bases, values, noise = (
            np.where(has_rows.reshape(-1, *[1] * (new.ndim - 1)), new, before)
            for new, before in ((bases, old.bases), (values, old.values), (noise, old.noise))
        )
        per_class = np.add.reduceat(mass, s.starts[:-1])[s.classes]
        weights = np.where(old.weights > 0, np.maximum(mass, TINY) / np.maximum(per_class, TINY), 0.0)
        means = old.means + share[:, None] * shift
        mixture = replace(
            state.mixture,
            components=Components(means, bases, values, noise, weights, old.n_dims),
            counts=count,
        )
        sums = state.sums + np.array([stats["sums"][0], weight])
        return replace(state, mixture=mixture, mass=mass, steps=state.steps + 1, sums=sums)

    def _blend_scatter(
        self, old: Components, stats: Stats, share: np.ndarray, shift: np.ndarray, maps: np.ndarray
    ) -> np.ndarray:
        """Return the average projected scatter (K, p, q) of components and batch, about the new means."""
        n, a = np.maximum(stats["count"], TINY), share[:, None, None]
        code = np.einsum("kp,kpq->kq", shift, maps)
        batch = np.swapaxes(stats["scatter"], 1, 2) / n[:, None, None]
        projected = (1.0 - a) * model_scatter(old, self.settings.likelihood, maps) + a * batch
        projected -= a * a * shift[:, :, None] * code[:, None, :]
        return projected

    def _blend_squares(
        self, old: Components, stats: Stats, share: np.ndarray, shift: np.ndarray
    ) -> np.ndarray:
        """Return the average mean squares of components and batch, about the new means."""
        before, squares = model_mean_square(old, self.settings.likelihood), shift * shift
        n = np.maximum(stats["count"], TINY)
        if before.ndim == 2:
            share, n = share[:, None], n[:, None]
        else:
            squares = squares.sum(axis=1)
        mean_square = (1.0 - share) * before + share * (stats["square"] / n) - share * share * squares
        return np.maximum(mean_square, 0.0)

    def _maximise(
        self, old: Components, maps: np.ndarray, mean_square: np.ndarray, projected: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        floor, h, p = self.settings.floor, old.n_dims, self.settings.n_features
        if self.settings.likelihood == "factor-analysis":
            loadings, noise = factor_step(old.bases, maps, mean_square, projected, floor)
            return loadings, old.values, noise
        # Probabilistic PCA also uses a power step here, because its EM step would hardly change the bases if
        # the weight eta of a batch is small.
        bases, values = power_step(old.bases, projected)
        noise = np.maximum((mean_square - values[:, :h].sum(axis=1)) / max(p - h, 1), floor)
        return bases, values, noise

    def end_epoch(self, state: StepwiseState) -> StepwiseState:
        """Return the state with the mean objective of the epoch and with empty sums."""
        objective = float(state.sums[0] / max(state.sums[1], TINY))
        return replace(state, objective=objective, epoch=state.epoch + 1, sums=np.zeros(2))

    def summary(self, state: StepwiseState) -> dict[str, float | int | None]:
        """Return the record of the last epoch, one entry of the estimator's ``history_``."""
        return {"pass": state.epoch, "steps": state.steps, "objective": state.objective}

    def is_done(self, state: StepwiseState) -> bool:
        """Return True after the last epoch."""
        return state.epoch >= self.n_epochs
