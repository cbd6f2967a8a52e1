"""Tiny conditional RBMs, their exact likelihoods by enumeration of all states, and learners for tests."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from scalelatent.contract.block_requirements import Targets
from scalelatent.contract.learners import Block
from scalelatent.contract.stats import Stats
from scalelatent.engine.backend import make_backend
from scalelatent.models.crbm.model.energy import CrbmShape, Params
from scalelatent.models.crbm.model.negative_phases import LEARNERS
from scalelatent.models.crbm.model.online import CrbmLearner
from scalelatent.models.crbm.model.state import CrbmState


def list_states(n: int) -> np.ndarray:
    """Return all 2^n states of n binary units, one per row."""
    return np.array(list(itertools.product([0.0, 1.0], repeat=n)))


def log_joint(params: Params, x: np.ndarray) -> np.ndarray:
    """Return the log of p(v, h | x), not normalised, for each state of v (rows) and of h (columns)."""
    p = Params(**{k: np.asarray(a, dtype=np.float64) for k, a in vars(params).items()})
    v, h = list_states(len(p.bv)), list_states(len(p.bh))
    b1, b2 = p.bv + p.Wvx @ x, p.bh + p.Whx @ x
    return v @ p.W @ h.T + (v @ b1)[:, None] + (h @ b2)[None, :]


def log_sum(a: np.ndarray, axis: int | None = None) -> Any:
    return np.logaddexp.reduce(a, axis=axis) if axis is not None else np.logaddexp.reduce(a.reshape(-1))


def index_of(v: np.ndarray) -> int:
    return int("".join(str(int(unit)) for unit in v), 2)


def log_likelihood(params: Params, x: np.ndarray, v: np.ndarray) -> float:
    """Return the sum over rows of log p(v | x)."""
    total = 0.0
    for row, target in zip(x, v, strict=True):
        joint = log_joint(params, row)
        total += float(log_sum(joint[index_of(target)]) - log_sum(joint))
    return total


def make_learner(shape: CrbmShape, name: str, **more: Any) -> CrbmLearner:
    options: dict[str, Any] = {
        "rates": np.array([0.1]), "momentum": 0.0, "weight_decay": 0.0, "n_sweeps": 60, "tol": None,
        "gibbs_steps": 2, "n_chains": 1,
        "chain_rows": 8, "local_steps": 0, "seed": 3, "patience": 0, "has_validation": False,
        "targets": Targets(), "validation_targets": Targets(),
        "validation_inference": LEARNERS[name].inference,
    }  # fmt: skip
    return CrbmLearner(shape, name, **(options | more))


def make_rows(shape: CrbmShape, n: int, seed: int = 0) -> Block:
    """Return a block of ``n`` rows: normal noise as x, and random binary outputs."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, shape.n_observed)).astype(np.float32)
    v = rng.integers(0, 2, (n, shape.n_visible)).astype(np.uint8)
    return Block(x, v, None, 0, rng.permutation(100)[:n])


def make_theta(shape: CrbmShape, seed: int = 1, scale: float = 0.7) -> np.ndarray:
    return (scale * np.random.default_rng(seed).normal(size=shape.n_parameters)).astype(np.float32)


def chain_stats(learner: CrbmLearner, state: CrbmState, block: Block, device: str = "reference") -> Stats:
    """Return the statistics that a chain (part of a batch) with the rows of ``block`` adds."""
    stats = Stats.zeros(learner.layout(), len(block.x))
    learner.run_chain(learner.prepare(state, make_backend(device)), block, stats)
    return stats


def gradient(learner: CrbmLearner, theta: np.ndarray, block: Block, device: str = "reference") -> np.ndarray:
    """Return the gradient of all parameters, summed over the rows of a block."""
    stats = chain_stats(learner, learner.start(theta), block, device)
    return gradient_of_factors(stats) if learner.factored else learner.gradient(stats)


def gradient_of_factors(stats: Any) -> np.ndarray:
    """Return the gradient of all parameters from that of W and from the factors dv, dh and x of the others.

    dv are the outputs minus their expectations in the model, and dh is the same for hidden units.
    """
    w, dv, dh, x = (stats[name] for name in ("W", "dv", "dh", "x"))
    parts = w, dv.T @ x, dh.T @ x, dv.sum(axis=0), dh.sum(axis=0)
    return np.concatenate([part.reshape(-1) for part in parts])


def central_differences(function: Any, theta: np.ndarray, step: float = 1e-5) -> np.ndarray:
    """Return the gradient of ``function`` at ``theta``, approximated by central differences in float64."""
    theta, out = theta.astype(np.float64), np.zeros(len(theta))
    for i in range(len(theta)):
        up, down = theta.copy(), theta.copy()
        up[i] += step
        down[i] -= step
        out[i] = (function(up) - function(down)) / (2 * step)
    return out
