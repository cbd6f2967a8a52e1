"""Toy online learners by gradients (Logistic), row by row (Walk), by evidence (Evidence), and with Outputs.

Any change of the order of rows changes the last bits of their sums. The file is imported under the name
``scalelatent.online_toys``, because saved records may only contain types of scalelatent. The workers of a
cluster preload it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from scalelatent.contract.block_requirements import BlockRequirements, Targets
from scalelatent.contract.learners import Block
from scalelatent.contract.stats import Layout, Stats
from scalelatent.kernels.streams import stream

if __name__ == "online_toys":  # A worker that received this file imports it under this name.
    sys.modules.setdefault("scalelatent.online_toys", sys.modules[__name__])


@dataclass(frozen=True)
class Errors:
    """Reduction that counts rows that a state's weights misclassify, and sums the log-loss of all rows."""

    p: int
    k: int
    requirements = BlockRequirements()

    def layout(self) -> Layout:
        return Layout((("errors", ()), ("loss", ()), ("rows", ())))

    def flops_per_row(self) -> float:
        return 4.0 * self.p * self.k

    def prepare(self, state: Any, backend: Any) -> np.ndarray:
        return state["w"]

    def accumulate(self, w: np.ndarray, block: Block, stats: Stats) -> None:
        logits = _logits(block, w)
        stats["errors"][...] += (logits.argmax(axis=1) != block.y).sum()
        stats["loss"][...] += (_log_sum(logits) - logits[np.arange(len(logits)), block.y]).sum()
        stats["rows"][...] += len(logits)


@dataclass(frozen=True)
class Logistic:
    """Multinomial logistic regression by gradient steps with a decreasing learning rate."""

    p: int
    k: int
    rate: float = 0.5
    patience: int = 10**9
    requirements = BlockRequirements()

    def layout(self) -> Layout:
        return Layout((("gradient", (self.p + 1, self.k)), ("loss", ()), ("rows", ())))

    def flops_per_row(self) -> float:
        return 4.0 * self.p * self.k

    def prepare(self, state: Any, backend: Any) -> np.ndarray:
        return state["w"]

    def run_chain(self, w: np.ndarray, block: Block, stats: Stats) -> None:
        if not np.isfinite(block.x).all():
            bad = int(np.flatnonzero(~np.isfinite(block.x).all(axis=1))[0])
            raise ValueError(f"row {block.rows[bad]} is bad")
        x, logits = _ones(block), _logits(block, w)
        weight = np.ones(len(x)) if block.weight is None else block.weight
        rest = np.exp(logits - _log_sum(logits)[:, None])
        rest[np.arange(len(x)), block.y] -= 1.0
        stats["gradient"][...] += x.T @ (rest * weight[:, None])
        stats["loss"][...] += (_log_sum(logits) - logits[np.arange(len(x)), block.y]).sum()
        stats["rows"][...] += len(x)

    def step(self, state: Any, stats: Stats, n_rows: int) -> Any:
        assert stats["rows"] == n_rows
        rate = self.rate / (1.0 + state["steps"] / 50) ** 0.6
        w = state["w"] - rate * stats["gradient"] / n_rows
        return {**state, "w": w, "steps": state["steps"] + 1, "loss": float(stats["loss"]) / n_rows}

    def end_epoch(self, state: Any) -> Any:
        # The change at the end of an epoch has an effect on the weights, so a resume that repeats or omits it
        # is detected.
        return {**state, "w": state["w"] * (1.0 - 1e-3), "epochs": state["epochs"] + 1}

    def summary(self, state: Any) -> dict[str, Any]:
        error = state["error"] if state["seen"] else None
        return {"objective": state["loss"], "validation_error": error}

    def is_done(self, state: Any) -> bool:
        return state["worse"] >= self.patience

    def validation(self) -> Errors:
        return Errors(self.p, self.k)

    def validated(self, state: Any, stats: Stats) -> Any:
        error = float(stats["errors"] / stats["rows"])
        worse = state["worse"] + 1 if state["seen"] and error >= state["error"] else 0
        w = state["w"] * (1.0 + 1e-6 * float(stats["loss"]))
        return {**state, "w": w, "error": error, "seen": state["seen"] + 1, "worse": worse}

    def start(self) -> Any:
        w = np.zeros((self.p + 1, self.k))
        return {"w": w, "steps": 0, "loss": 0.0, "epochs": 0, "error": 1.0, "seen": 0, "worse": 0}


@dataclass(frozen=True)
class Walk:
    """Learner whose chains (parts of a step) each update a copy of the weights by noisy rows, one by one.

    The changes of the copies are averaged at the end of a step.
    """

    p: int
    k: int
    seed: int = 3
    requirements = BlockRequirements()

    def layout(self) -> Layout:
        return Layout((("moved", (self.p, self.k)), ("mistakes", ()), ("chains", ())))

    def flops_per_row(self) -> float:
        return 4.0 * self.p * self.k

    def prepare(self, state: Any, backend: Any) -> np.ndarray:
        return state["w"]

    def run_chain(self, w: np.ndarray, block: Block, stats: Stats) -> None:
        own = w.copy()
        for i, row in enumerate(block.rows):
            x = block.x[i].astype("f8") + 1e-3 * stream(self.seed, "toy", block.epoch, int(row)).normal()
            guess = int((x @ own).argmax())
            if guess != block.y[i]:
                step = 1.0 / (1.0 + x @ x)
                own[:, guess] -= step * x
                own[:, block.y[i]] += step * x
                stats["mistakes"][...] += 1
        stats["moved"][...] += own - w
        stats["chains"][...] += 1

    def step(self, state: Any, stats: Stats, n_rows: int) -> Any:
        w = state["w"] + stats["moved"] / stats["chains"]
        return {**state, "w": w, "mistakes": state["mistakes"] + float(stats["mistakes"])}

    def end_epoch(self, state: Any) -> Any:
        return state

    def summary(self, state: Any) -> dict[str, Any]:
        return {"objective": state["mistakes"]}

    def is_done(self, state: Any) -> bool:
        return False

    def start(self) -> Any:
        return {"w": np.zeros((self.p, self.k)), "mistakes": 0.0}


@dataclass(frozen=True)
class Evidence:
    """Learner of log-odds that fade with each minibatch.

    A step adds the evidence of all its chains (parts). The old log-odds fade by ``forgetting ** n``, where n
    is the number of minibatches of all chains.
    """

    p: int
    minibatch: int = 2
    forgetting: float = 0.9
    requirements = BlockRequirements()

    def layout(self) -> Layout:
        return Layout((("evidence", (self.p,)), ("minibatches", ())))

    def flops_per_row(self) -> float:
        return 10.0 * self.p

    def prepare(self, state: Any, backend: Any) -> np.ndarray:
        return state["belief"]

    def run_chain(self, prior: np.ndarray, block: Block, stats: Stats) -> None:
        belief = prior.copy()
        for a in range(0, len(block.x), self.minibatch):
            seen = np.tanh(block.x[a : a + self.minibatch].astype("f8")).sum(axis=0)
            belief = self.forgetting * belief + seen * (1.0 - np.tanh(belief / 10) ** 2)
            stats["minibatches"][...] += 1
        stats["evidence"][:] += belief - prior

    def step(self, state: Any, stats: Stats, n_rows: int) -> Any:
        # Each minibatch of each chain (part of a step) makes the old log-odds fade once.
        kept = self.forgetting ** float(stats["minibatches"])
        belief = kept * state["belief"] + stats["evidence"] + (1 - kept) * 0.01
        return {"belief": belief, "trail": float(belief.sum())}

    def end_epoch(self, state: Any) -> Any:
        return state

    def summary(self, state: Any) -> dict[str, Any]:
        return {"objective": state["trail"]}

    def is_done(self, state: Any) -> bool:
        return False

    def start(self) -> Any:
        return {"belief": np.zeros(self.p), "trail": 0.0}


def _ones(block: Block) -> np.ndarray:
    return np.hstack([block.x.astype("f8"), np.ones((len(block.x), 1))])


def _logits(block: Block, w: np.ndarray) -> np.ndarray:
    return _ones(block) @ w


def _log_sum(logits: np.ndarray) -> np.ndarray:
    top = logits.max(axis=1)
    return top + np.log(np.exp(logits - top[:, None]).sum(axis=1))


@dataclass(frozen=True)
class Outputs:
    """Toy learner that sums products of transformed inputs with outputs, and a weighted sum of the outputs.

    The transform depends on row number and epoch, the weights on row number and chain (part of a step), so
    the sums differ if rows are exchanged.
    """

    p: int
    v: int
    targets: Targets
    validation_targets: Targets | None = None

    @property
    def requirements(self) -> BlockRequirements:
        return BlockRequirements(targets=self.targets)

    def layout(self) -> Layout:
        return Layout((("products", (self.p, self.v)), ("seen", (self.v,)), ("rows", ())))

    def flops_per_row(self) -> float:
        return 4.0 * self.p * self.v

    def prepare(self, state: Any, backend: Any) -> float:
        return 1.0 if state is None else float(state["scale"])

    def accumulate(self, scale: float, block: Block, stats: Stats) -> None:
        rows = np.arange(block.start, block.start + len(block.x)) if block.rows is None else block.rows
        assert block.y is not None
        assert block.y.dtype == np.uint8
        x = np.sin(block.x[:, : self.p].astype("f8") * scale + rows[:, None] + block.epoch)
        stats["products"][:] += x.T @ block.y[:, : self.v]
        stats["seen"][:] += (block.y * (rows[:, None] % 7 + block.chain + 0.1)).sum(axis=0)
        stats["rows"][...] += len(block.y)

    def run_chain(self, scale: float, block: Block, stats: Stats) -> None:
        self.accumulate(scale, block, stats)

    def step(self, state: Any, stats: Stats, n_rows: int) -> Any:
        assert stats["rows"] == n_rows
        mean = stats.vector / n_rows
        return {"scale": 1.0 + np.tanh(mean.sum()), "sums": state["sums"] + mean, "error": state["error"]}

    def end_epoch(self, state: Any) -> Any:
        return state

    def summary(self, state: Any) -> dict[str, Any]:
        return {"objective": float(state["scale"])}

    def is_done(self, state: Any) -> bool:
        return False

    def validation(self) -> Outputs:
        return Outputs(self.p, self.v, self.validation_targets or self.targets)

    def validated(self, state: Any, stats: Stats) -> Any:
        return {**state, "error": state["error"] + float(stats.vector.sum())}

    def start(self) -> Any:
        return {"scale": 1.0, "sums": np.zeros(self.layout().size), "error": 0.0}


@dataclass(frozen=True)
class Concatenation:
    """A row map that concatenates the input and the output of a row."""

    p: int
    v: int
    targets: Targets

    @property
    def requirements(self) -> BlockRequirements:
        return BlockRequirements(targets=self.targets)

    def output(self) -> tuple[tuple[int, ...], str]:
        return (self.p + self.v,), "uint8"

    def prepare(self, backend: Any) -> None:
        return None

    def apply(self, prepared: None, block: Block) -> np.ndarray:
        assert block.y is not None
        return np.hstack([block.x[:, : self.p], block.y])
