"""Predictions of a conditional RBM for rows (probabilities or states of units), and their errors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scalelatent.contract.block_requirements import BlockRequirements, Targets
from scalelatent.contract.learners import Backend, Block
from scalelatent.contract.stats import Layout, Stats
from scalelatent.kernels.arrays import Array
from scalelatent.kernels.sparse_rows import CsrRows
from scalelatent.models.crbm.kernels.inference import Inference

from .beliefs import PreparedInference, choose_n_sweeps
from .columns import ColumnUnits
from .energy import CrbmShape, Observed, load_observed, sigmoid
from .state import CrbmState


@dataclass(frozen=True)
class CrbmScoring:
    """Count wrong outputs over rows with targets, a :class:`~scalelatent.contract.learners.Reduction`.

    The parameters are those of the :class:`.state.CrbmState` that ``prepare`` receives or, if it is None,
    ``theta``. If x is binary and as wide as the outputs v, outputs that differ from x are also counted alone:
    the Changed errors of Ping and Ihler (2017). Each row counts with its weight. With ``reconstructs`` the
    outputs of a plain RBM are predicted from the hidden units given the row itself.
    """

    shape: CrbmShape
    inference: str
    n_sweeps: int | None
    tol: float | None
    targets: Targets
    theta: np.ndarray | None = None
    reconstructs: bool = False
    # Shift and scale by which the fit standardises the columns of x; with None x is used unchanged
    units: ColumnUnits | None = None

    @property
    def requirements(self) -> BlockRequirements:
        return BlockRequirements(csr=True, targets=self.targets)

    def layout(self) -> Layout:
        """Return the fields ``units``, counts of outputs weighted by row, and ``strange``, a count of blocks.

        ``units`` are the numbers of wrong outputs, of all outputs, of wrong outputs that differ from x, and
        of outputs that differ from x. ``strange`` counts blocks whose x is as wide as v, but is not binary.
        """
        return Layout((("units", (4,)), ("strange", ())))

    def flops_per_row(self) -> float:
        shape = self.shape
        edges = 0 if self.reconstructs else shape.n_visible * shape.n_hidden
        return 2.0 * shape.n_weights + 16.0 * edges * (self.n_sweeps or 16)

    def prepare(self, state: CrbmState | None, backend: Backend) -> PreparedInference:
        if state is None:
            assert self.theta is not None
            theta, epoch = self.theta, 1
        else:
            theta, epoch = state.theta, state.iteration + 1
            if self.units is not None:
                theta = self.units.convert_to_original(self.shape, theta)
        inference = "independent" if self.reconstructs else self.inference
        n_sweeps = choose_n_sweeps(self.n_sweeps, epoch)
        return PreparedInference.make(self.shape, theta, inference, n_sweeps, self.tol, backend)

    def accumulate(self, prepared: PreparedInference, block: Block, stats: Stats) -> None:
        assert block.y is not None
        log_odds = _reconstruct(prepared, block) if self.reconstructs else prepared.run(block).lv
        wrong = (prepared.backend.to_host(log_odds) > 0) != (block.y > 0)
        weight = np.ones(len(wrong)) if block.weight is None else block.weight
        x = block.x
        if isinstance(x, CsrRows) and x.shape == block.y.shape:
            x = x.to_dense()
        # If x and v have different widths, there are no changed outputs.
        changed = np.zeros((len(wrong), 0), dtype=bool)
        if isinstance(x, np.ndarray) and x.shape == block.y.shape:
            strange = (x != 0) & (x != 1)
            stats["strange"][...] += strange.any()
            changed = (x != block.y) & ~strange
        both = wrong & changed if changed.size else changed
        n_wrong, n_both, n_changed = (weight @ units.sum(axis=1) for units in (wrong, both, changed))
        stats["units"][...] += [n_wrong, weight.sum() * wrong.shape[1], n_both, n_changed]

    @staticmethod
    def errors(stats: Stats) -> tuple[float, float]:
        """Return the share of wrong values among all outputs, and among outputs that differ from x.

        The second share is NaN if no output differs from x, or if x is not binary or not as wide as v.
        """
        wrong, units, both, changed = stats["units"].tolist()
        known = changed > 0 and not stats["strange"]
        return wrong / (units or 1.0), both / changed if known else float("nan")


def _reconstruct(prepared: PreparedInference, block: Block) -> Array:
    """Return the log odds of the outputs of a plain RBM, given the expected hidden units of the same rows."""
    params, backend = prepared.params, prepared.backend
    v = backend.asarray(block.y, np.float32, "v")
    return sigmoid(v @ params.W + params.bh, backend.xp) @ params.W.T + params.bv


def _check_states(block: Block, v: Observed, backend: Backend) -> None:
    """Raise ValueError that names the first value of the rows ``v`` that is NaN or outside [0, 1]."""
    bad = ~((v.x >= 0) & (v.x <= 1))
    if bool(bad.any()):
        row, at = (int(i[0]) for i in backend.xp.nonzero(bad))
        unit = at if v.columns is None else int(v.columns[at])
        raise ValueError(
            f"row {block.row_number(row)}, unit {unit} is {float(v.x[row, at]):g}, but units are 0 or 1 (or "
            "probabilities between)"
        )


@dataclass(frozen=True)
class CrbmOutput:
    """A :class:`~scalelatent.contract.learners.RowMap` that computes outputs of the model for each row."""

    requirements = BlockRequirements(csr=True)

    shape: CrbmShape
    theta: np.ndarray  # float32 parameter vector
    inference: str
    n_sweeps: int
    tol: float | None
    # "marginals": estimates of P(v = 1 | x); "states": the most probable outputs v, as uint8; "hidden":
    # estimates of P(h = 1 | x); "given": P(h = 1 | v) of a plain RBM, whose rows are v
    output_name: str

    def output(self) -> tuple[tuple[int, ...], str]:
        hidden = self.output_name in ("hidden", "given")
        width = self.shape.n_hidden if hidden else self.shape.n_visible
        return (width,), "uint8" if self.output_name == "states" else "float32"

    def prepare(self, backend: Backend) -> PreparedInference:
        inference = "independent" if self.output_name == "given" else self.inference
        return PreparedInference.make(self.shape, self.theta, inference, self.n_sweeps, self.tol, backend)

    def infer(self, prepared: PreparedInference, block: Block) -> Inference:
        return prepared.run(block)

    def apply(self, prepared: PreparedInference, block: Block) -> np.ndarray:
        backend, xp = prepared.backend, prepared.backend.xp
        if self.output_name == "given":
            v, params = load_observed(block.x, backend), prepared.params
            _check_states(block, v, backend)
            logits = v.x @ (params.W if v.columns is None else params.W[v.columns]) + params.bh
            return backend.to_host(sigmoid(logits, xp))
        found = self.infer(prepared, block)
        if self.output_name == "states":
            return backend.to_host(found.lv > 0).astype(np.uint8)
        return backend.to_host(sigmoid(found.lh if self.output_name == "hidden" else found.lv, xp))
