"""From rows to beliefs, states and errors of a conditional RBM."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import numpy as np

from scalelatent.contract.learners import Backend, Block
from scalelatent.contract.stats import Layout, Stats
from scalelatent.contract.wants import Targets, Wants
from scalelatent.kernels.arrays import Array
from scalelatent.kernels.sparse_rows import CsrRows
from scalelatent.models.crbm.kernels import AnyCoupling
from scalelatent.models.crbm.kernels.inference import Inference

from .beliefs import couple, infer
from .energy import CrbmShape, Observed, block_biases, observe, sigmoid
from .state import CrbmState

FIRST_SWEEPS = 7


def sweeps_in(n_sweeps: int | None, epoch: int) -> int:
    """Sweeps of an inference in an epoch, counted from 1: 7 + epoch unless fixed (the paper's section 6)."""
    return FIRST_SWEEPS + epoch if n_sweeps is None else n_sweeps


def run_inference(
    shape: CrbmShape,
    theta: Array,
    coupling: AnyCoupling | None,
    block: Block,
    how: tuple[str, int, float | None, float],
    backend: Backend,
) -> Inference:
    """Beliefs of rows under parameters on the backend; ``how`` is (inference, sweeps, tol, damping)."""
    _, b1, b2 = block_biases(shape, shape.split(theta), block, backend)
    inference, n_sweeps, tol, damping = how
    return infer(inference, coupling, b1, b2, n_sweeps, tol, backend, damping=damping)


class PreparedScoring(NamedTuple):
    """Parameters, what inference needs of W, and its sweeps."""

    backend: Backend
    theta: Array
    coupling: AnyCoupling | None
    n_sweeps: int


@dataclass(frozen=True)
class CrbmScoring:
    """Wrong units over rows with targets (a :class:`~..base.Reduction`).

    The state is a :class:`.online.CrbmState`, or None where ``theta`` is given. Units that x has otherwise
    than v are counted apart where x is as wide as v and of 0 and 1: the paper's Changed errors. A row counts
    as much as its weight.
    """

    shape: CrbmShape
    inference: str
    n_sweeps: int | None
    tol: float | None
    targets: Targets
    theta: np.ndarray | None = None
    damping: float = 1.0

    @property
    def wants(self) -> Wants:
        return Wants(csr=True, targets=self.targets)

    def layout(self) -> Layout:
        """Wrong and all units, wrong and all changed ones, rows that are not of 0 and 1."""
        return Layout((("units", (4,)), ("strange", ())))

    def flops_per_row(self) -> float:
        shape = self.shape
        edges = shape.n_visible * shape.n_hidden
        return 2.0 * shape.n_weights + 16.0 * edges * (self.n_sweeps or 16)

    def prepare(self, state: CrbmState | None, backend: Backend) -> PreparedScoring:
        epoch = 1 if state is None else state.iteration + 1
        theta = backend.asarray(self.theta if state is None else state.theta, np.float32)
        coupling = None
        if self.shape.n_hidden and self.inference != "independent":
            coupling = couple(self.shape.split(theta).W, backend)
        return PreparedScoring(backend, theta, coupling, sweeps_in(self.n_sweeps, epoch))

    def accumulate(self, prepared: PreparedScoring, block: Block, stats: Stats) -> None:
        backend, theta, coupling, n_sweeps = prepared
        assert block.y is not None
        how = self.inference, n_sweeps, self.tol, self.damping
        found = run_inference(self.shape, theta, coupling, block, how, backend)
        wrong = (backend.to_host(found.lv) > 0) != (block.y > 0)
        weight = np.ones(len(wrong)) if block.weight is None else block.weight
        x = block.x
        if isinstance(x, CsrRows) and x.shape == block.y.shape:
            x = x.to_dense()
        changed = np.zeros((len(wrong), 0), dtype=bool)
        if isinstance(x, np.ndarray) and x.shape == block.y.shape:
            strange = (x != 0) & (x != 1)
            stats["strange"][...] += strange.any()
            changed = (x != block.y) & ~strange
        of_changed = wrong & changed if changed.size else changed
        every = weight.sum() * wrong.shape[1]
        of_wrong, of_both, of_x = (weight @ units.sum(axis=1) for units in (wrong, of_changed, changed))
        stats["units"][...] += [of_wrong, every, of_both, of_x]

    @staticmethod
    def errors(stats: Stats) -> tuple[float, float]:
        """(share of wrong units, share among changed ones or NaN)."""
        wrong, units, of_changed, changed = stats["units"].tolist()
        known = changed > 0 and not stats["strange"]
        return wrong / (units or 1.0), of_changed / changed if known else float("nan")


def _check_given(block: Block, v: Observed, xp: ModuleType) -> None:
    """Refuse rows v that are neither states nor probabilities."""
    bad = ~((v.x >= 0) & (v.x <= 1))  # of NaN, too
    if bool(bad.any()):
        row, at = (int(i[0]) for i in xp.nonzero(bad))
        unit = at if v.columns is None else int(v.columns[at])
        raise ValueError(
            f"row {block.row_number(row)}, unit {unit} is {float(v.x[row, at]):g}, but units are 0 or 1 (or "
            "probabilities between)"
        )


class PreparedOutput(NamedTuple):
    """Parameters, and what inference needs of W."""

    backend: Backend
    theta: Array
    coupling: AnyCoupling | None


@dataclass(frozen=True)
class CrbmOutput:
    """Outputs of rows (a :class:`~..base.RowMap`)."""

    wants = Wants(csr=True)

    shape: CrbmShape
    # float32 (parameters,)
    theta: np.ndarray
    inference: str
    n_sweeps: int
    # float or None
    tol: float | None
    # "marginals": beliefs of v, float32 (rows, v); "states": the most probable ones, uint8 (rows, v);
    # "hidden": beliefs of h under the same inference, float32 (rows, h); "given": h given v
    what: str
    damping: float = 1.0

    def output(self) -> tuple[tuple[int, ...], str]:
        hidden = self.what in ("hidden", "given")
        width = self.shape.n_hidden if hidden else self.shape.n_visible
        return (width,), "uint8" if self.what == "states" else "float32"

    def prepare(self, backend: Backend) -> PreparedOutput:
        theta = backend.asarray(self.theta, np.float32)
        coupling = None
        if self.shape.n_hidden and self.inference != "independent" and self.what != "given":
            coupling = couple(self.shape.split(theta).W, backend)
        return PreparedOutput(backend, theta, coupling)

    def infer(self, prepared: PreparedOutput, block: Block) -> Inference:
        backend, theta, coupling = prepared
        how = self.inference, self.n_sweeps, self.tol, self.damping
        return run_inference(self.shape, theta, coupling, block, how, backend)

    def apply(self, prepared: PreparedOutput, block: Block) -> np.ndarray:
        backend, theta, _ = prepared
        xp = backend.xp
        if self.what == "given":
            params = self.shape.split(theta)
            v = observe(block.x, backend)
            _check_given(block, v, xp)
            logits = v.x @ (params.W if v.columns is None else params.W[v.columns]) + params.bh
            return backend.to_host(sigmoid(logits, xp))
        found = self.infer(prepared, block)
        if self.what == "states":
            return backend.to_host(found.lv > 0).astype(np.uint8)
        return backend.to_host(sigmoid(found.lh if self.what == "hidden" else found.lv, xp))
