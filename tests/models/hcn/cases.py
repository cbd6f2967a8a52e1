"""Random inputs of HCN kernels, slow computations that kernels must agree with, and learning in loops."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from scalelatent.contract.learners import Block
from scalelatent.contract.stats import Stats
from scalelatent.engine.backend import HostBackend
from scalelatent.models.hcn.kernels import KERNELS
from scalelatent.models.hcn.kernels.windows import message_room
from scalelatent.models.hcn.model.evidence_learner import EvidenceState, OnlineFeatureLearner


def enumerate_messages(allowed: Callable[..., float], incoming: np.ndarray) -> np.ndarray:
    """Return the max-product messages of a factor to its binary variables, by trying all configurations.

    A message to a variable is the largest score if the variable is 1 minus the largest score if it is 0. The
    message from this variable is not part of the score. ``allowed`` returns the log of the factor for a
    configuration.
    """
    n = len(incoming)
    best = np.full((n, 2), -np.inf)
    for values in itertools.product((0, 1), repeat=n):
        score = allowed(*values)
        for i in range(n):
            rest = sum(m * v for j, (m, v) in enumerate(zip(incoming, values, strict=True)) if j != i)
            best[i, values[i]] = max(best[i, values[i]], score + rest)
    return best[:, 1] - best[:, 0]


def log_indicator(condition: bool) -> float:
    return 0.0 if condition else -np.inf


def log_and_factor(a: int, b: int, below: int) -> float:
    return log_indicator(below == (a and b))


def log_or_factor(*values: int) -> float:
    return log_indicator(values[-1] == max(values[:-1]))


def draw_sweep(
    seed: int,
    chains: int,
    images: int,
    image: tuple[int, int, int],
    window: tuple[int, int],
    n_features: int,
    mean_belief: float = -300,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return random evidence (some pixels missing), orders of pixels, and beliefs S and W, in 1/256 nat.

    S are bits: a feature is at a position; their beliefs are normal with mean ``mean_belief``. W are bits: a
    pixel of a feature is on.
    """
    rng = np.random.default_rng(seed)
    n_channels, height, width = image
    h, w = window
    pixels = (chains, images, n_channels, height, width)
    evidence = np.where(rng.random(pixels) < 0.3, 1300, -1100) * (rng.random(pixels) > 0.1)
    n = images * n_channels * height * width
    order = np.stack([rng.permutation(n) for _ in range(chains)])
    s = rng.normal(mean_belief, 300, size=(chains, images, height - h + 1, width - w + 1, n_features))
    weights = rng.normal(-150, 300, size=(chains, n_channels, h, w, n_features))
    return (
        evidence.astype("i4"), order.astype("i4"), np.rint(s).astype("i4"), np.rint(weights).astype("i4")
    )  # fmt: skip


def make_zero_messages(evidence: np.ndarray, w: np.ndarray) -> list[np.ndarray]:
    """Return arrays of zero messages between pixels and bits S and W, as the kernels of HCN store them.

    The first array has the messages to S (positions of features), the second the messages to W (pixels of
    features): one number for each pair of a position and a feature's pixel that meet in a pixel of the image.
    The third array marks the rows of features that have a message to W.
    """
    images, channels, sides = evidence.shape[:2], evidence.shape[2], evidence.shape[3:]
    size = message_room(sides, w.shape[2:4], w.shape[4])
    to_s, to_w = (np.zeros((*images, channels, size), np.int16) for _ in range(2))
    return [to_s, to_w, np.zeros((*images, channels, int(np.prod(sides)), w.shape[2]), np.uint8)]


class Kernels(HostBackend):
    """CPU backend that finds only the kernels of compositional networks, by name."""

    def kernel(self, name: str) -> Callable[..., Any]:
        module, function = KERNELS[name][self.name].split(":")
        return getattr(importlib.import_module(module), function)


def compute_overlap(features: np.ndarray, truth: np.ndarray) -> float:
    """Return the largest intersection over union (0 to 1) of ``truth`` and any feature, moved anywhere."""
    best, (h, w) = 0.0, truth.shape
    for feature in features:
        rows, cols = np.nonzero(feature)
        if not len(rows):
            continue
        part = feature[rows.min() : rows.max() + 1, cols.min() : cols.max() + 1]
        room = np.zeros((h + 2 * part.shape[0], w + 2 * part.shape[1]), bool)
        room[part.shape[0] : part.shape[0] + h, part.shape[1] : part.shape[1] + w] = truth
        for r in range(room.shape[0] - part.shape[0] + 1):
            for c in range(room.shape[1] - part.shape[1] + 1):
                both = (room[r : r + part.shape[0], c : c + part.shape[1]] & part).sum()
                best = max(best, both / (truth.sum() + part.sum() - both))
    return best


def learn_online(
    learner: OnlineFeatureLearner,
    x: np.ndarray,
    epochs: int,
    backend: Any,
    chains: int = 1,
    minibatches: int = 1,
) -> EvidenceState:
    """Return the learner's state after ``epochs`` epochs over the rows x in random order."""
    state, rng = learner.start(), np.random.default_rng(learner.seed)
    size = chains * minibatches * learner.batch_rows
    for epoch in range(epochs):
        order = rng.permutation(len(x))
        for first in range(0, len(x), size):
            state = run_one_step(learner, state, x, order[first : first + size], epoch, backend, chains)
        state = learner.end_epoch(state)
    return state


def run_one_step(
    learner: OnlineFeatureLearner,
    state: EvidenceState,
    x: np.ndarray,
    rows: np.ndarray,
    epoch: int,
    backend: Any,
    chains: int = 1,
) -> EvidenceState:
    """Return the learner's state after one step with ``rows``, split into ``chains`` independent parts."""
    prepared, total = learner.prepare(state, backend), Stats.zeros(learner.layout())
    for chain, part in enumerate(np.array_split(rows, chains)):
        if len(part):
            stats = Stats.zeros(learner.layout())
            learner.run_chain(prepared, Block(x[part], None, None, 0, part, epoch, chain), stats)
            total = total.merge(stats)
    return learner.step(state, total, len(rows))
