"""Mixtures of linear models by stepwise EM on images, and row by row by incremental SVD.

Incremental EM, which replaces what a leaf said before, is left out: images under older bases cannot be taken
back from those under new ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from scalelatent.contract.learners import Backend, Block
from scalelatent.contract.stats import Layout, Stats
from scalelatent.contract.wants import Wants
from scalelatent.errors import DivergenceError

from .em import MAIN, Mixture, MixturePass, MixtureState, PreparedMixture, initial_state
from .pancakes import Pancakes, image_bases
from .steps import TINY, factor_step, orthonormal, power_step

# Of a row's length so much must lie outside of a basis to give it a direction.
_OWN = 1e-6


@dataclass(frozen=True)
class StepwiseState:
    """Everything that changes from step to step."""

    now: MixtureState  # its pancakes, in the main phase
    mass: np.ndarray  # (K,), running share of all rows
    steps: int
    epoch: int
    sums: np.ndarray  # objective and weight of the epoch so far
    objective: float  # of the last epoch, measured while the pancakes moved


def model_spread(pancakes: Pancakes, likelihood: str) -> np.ndarray:
    """Mean square of the rows that the pancakes stand for."""
    h, p = pancakes.n_dims, pancakes.means.shape[1]
    if likelihood == "factor-analysis":
        return pancakes.noise + (pancakes.bases[:, :, :h] ** 2).sum(axis=2)
    return pancakes.values[:, :h].sum(axis=1) + (p - h) * pancakes.noise


def model_image(pancakes: Pancakes, likelihood: str, maps: np.ndarray) -> np.ndarray:
    """C B of the covariances C that the pancakes stand for, (K, p, q)."""
    if likelihood != "factor-analysis":
        return pancakes.bases * pancakes.values[:, None, :]
    loadings = pancakes.bases
    codes = np.swapaxes(loadings, 1, 2) @ maps
    return loadings @ codes + pancakes.noise[:, :, None] * maps


def stepwise_state(mixture: Mixture, now: Pancakes, mass: np.ndarray) -> StepwiseState:
    """State before the first step; ``mass`` (K,) are rows or shares of them."""
    if mixture.likelihood == "ppca":  # batch EM leaves the spare directions where they are
        values = now.values.copy()
        values[:, now.n_dims :] = now.noise[:, None]
        now = replace(now, bases=orthonormal(now.bases, now.bases), values=values)
    state = initial_state(mixture, now, MAIN)
    share = np.maximum(mass, TINY) / max(float(mass.sum()), TINY)
    return StepwiseState(state, share, 0, 0, np.zeros(2), np.inf)


@dataclass(frozen=True)
class StepwiseMixture:
    """Stepwise EM with forgetting: C B = (1 - eta) B Lambda + eta times the image of the batch."""

    # O. Cappé, E. Moulines, "On-line expectation-maximization algorithm for latent data models" (2009).
    # eta = (step + t0) ** -kappa, of steps from 0. On held-out digits kappa from .6 to .9 and t0 from 1 to 8
    # differ by less than their seeds (benchmarks/README.md).
    mixture: Mixture
    width: int
    kappa: float = 0.7
    t0: float = 2.0
    n_epochs: int = 3

    @property
    def _work(self) -> MixturePass:
        return MixturePass(self.mixture, self.width)

    @property
    def wants(self) -> Wants:
        """Scratch of a chain."""
        return Wants(scratch=self._work.wants.scratch)

    def layout(self) -> Layout:
        """As of a pass."""
        return self._work.layout()

    def flops_per_row(self) -> float:
        """As of a pass."""
        return self._work.flops_per_row()

    def prepare(self, state: StepwiseState, backend: Backend) -> PreparedMixture:
        """Pack scores and bases."""
        return self._work.prepare(state.now, backend)

    def run_chain(self, prepared: PreparedMixture, block: Block, stats: Stats) -> None:
        """Add the rows of a chain."""
        self._work.accumulate(prepared, block, stats)

    def step(self, state: StepwiseState, stats: Stats, n_rows: int) -> StepwiseState:
        """A new state after a batch; refuses an objective that is not finite."""
        m, now = self.mixture, state.now.now
        if not np.isfinite(stats["sums"]).all():
            raise DivergenceError(
                f"the objective is not finite in step {state.steps + 1}: scale the features"
            )
        eta = (state.steps + self.t0) ** -self.kappa
        count = np.array(stats["count"])
        rows = max(float(stats["sums"][2]), TINY)
        mass = (1.0 - eta) * state.mass + eta * count / rows
        share = np.minimum(eta * count / (rows * np.maximum(mass, TINY)), 1.0)  # of the batch in each
        n = np.maximum(count, TINY)
        shift = stats["total"] / n[:, None]
        maps = image_bases(now, m.likelihood)
        a, code = share[:, None, None], np.einsum("kp,kpq->kq", shift, maps)
        image = np.swapaxes(stats["image"], 1, 2) / n[:, None, None]
        centred = (1.0 - a) * model_image(now, m.likelihood, maps) + a * image
        centred -= a * a * shift[:, :, None] * code[:, None, :]
        before = model_spread(now, m.likelihood)  # as the image, of what the pancakes stand for
        wide = before.ndim == 2
        one = share[:, None] if wide else share
        square = stats["square"] / (n[:, None] if wide else n)
        moved = shift * shift if wide else (shift * shift).sum(axis=1)
        spread = np.maximum((1.0 - one) * before + one * square - one * one * moved, 0.0)
        found = self._maximise(now, maps, spread, centred)
        touched = count > 0
        means = now.means + share[:, None] * shift
        bases, values, noise = (
            np.where(touched.reshape(-1, *[1] * (new.ndim - 1)), new, old)
            for new, old in zip(found, (now.bases, now.values, now.noise), strict=True)
        )
        per_class = np.add.reduceat(mass, m.starts[:-1])[m.classes]
        weights = np.where(now.weights > 0, np.maximum(mass, TINY) / np.maximum(per_class, TINY), 0.0)
        pancakes = Pancakes(means, bases, values, noise, weights, now.n_dims)
        inner = replace(state.now, now=pancakes, counts=count)
        sums = state.sums + np.array([stats["sums"][0], rows])
        return replace(state, now=inner, mass=mass, steps=state.steps + 1, sums=sums)

    def _maximise(
        self, now: Pancakes, maps: np.ndarray, spread: np.ndarray, centred: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        floor, h, p = self.mixture.floor, now.n_dims, self.mixture.n_features
        if self.mixture.likelihood == "factor-analysis":
            loadings, noise = factor_step(now.bases, maps, spread, centred, floor)
            return loadings, now.values, noise
        # Of probabilistic PCA too: a step of its EM, of which a batch is a share, moves little.
        bases, values = power_step(now.bases, centred)
        noise = np.maximum((spread - values[:, :h].sum(axis=1)) / max(p - h, 1), floor)
        return bases, values, noise

    def end_epoch(self, state: StepwiseState) -> StepwiseState:
        """The epoch's mean objective; the sums begin again."""
        objective = float(state.sums[0] / max(state.sums[1], TINY))
        return replace(state, objective=objective, epoch=state.epoch + 1, sums=np.zeros(2))

    def summary(self, state: StepwiseState) -> dict[str, float | int | None]:
        """Scalars of the epoch."""
        return {"pass": state.epoch, "steps": state.steps, "objective": state.objective}

    def is_done(self, state: StepwiseState) -> bool:
        """After the last epoch."""
        return state.epoch >= self.n_epochs


def add_rows(
    pancakes: Pancakes,
    counts: np.ndarray,
    x: np.ndarray,
    index: np.ndarray,
    weight: np.ndarray,
    floor: float = 0.0,
) -> np.ndarray:
    """Change pancakes of the errors, in place, by rows (m, p) of weights (m,) above 0; ``index`` (m,) has the
    sub-class of each row. Return the new weight of the rows of each sub-class (K,).

    Means are exact; bases and variances come of the incremental SVD of D. Ross, J. Lim, R.-S. Lin and M.-H.
    Yang, "Incremental learning for robust visual tracking" (2008): exact while the width holds the rank.
    """
    means, bases, values, noise = pancakes.means, pancakes.bases, pancakes.values, pancakes.noise
    counts, h, p = np.array(counts, dtype=np.float64), pancakes.n_dims, means.shape[1]
    for q in np.unique(index):
        own = index == q
        rows, shares = x[own].astype(np.float64), weight[own]
        n, m = counts[q], shares.sum()
        centre = (shares / m) @ rows
        gap, inside = centre - means[q], np.sqrt(shares)[:, None] * (rows - centre)
        bend = n * m / (n + m)
        full = n * (values[q][:h].sum() + (p - h) * noise[q]) + (inside**2).sum() + bend * (gap @ gap)
        new = (
            np.sqrt(bend) * gap[None]
            if len(rows) == 1
            else np.concatenate([inside, np.sqrt(bend) * gap[None]])
        )
        basis, singular = _with_rows(bases[q], np.sqrt(n * values[q]), new)
        found = min(bases.shape[2], len(singular))
        bases[q][:, :found] = basis[:, :found]
        values[q][:] = 0.0
        values[q][:found] = singular[:found] ** 2 / (n + m)
        means[q] += m / (n + m) * gap
        counts[q] = n + m
        noise[q] = max((full / (n + m) - values[q][:h].sum()) / max(p - h, 1), floor)
    return counts


def _with_rows(basis: np.ndarray, singular: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Right singular vectors and singular values of rows singular basis' and some more."""
    width = basis.shape[1]
    if len(rows) == 1 and width < len(basis):
        code = rows[0] @ basis
        rest = rows[0] - basis @ code
        again = rest @ basis  # what rounding left
        rest, code = rest - basis @ again, code + again
        length = np.sqrt(rest @ rest)
        if length > _OWN * np.sqrt(code @ code):
            core = np.zeros((width + 1, width + 1))
            core[np.arange(width), np.arange(width)] = singular
            core[width, :width], core[width, width] = code, length
            _, found, right = np.linalg.svd(core)
            return np.column_stack([basis, rest / length]) @ right.T, found
    _, found, right = np.linalg.svd(np.concatenate([singular[:, None] * basis.T, rows]), full_matrices=False)
    return right.T, found
