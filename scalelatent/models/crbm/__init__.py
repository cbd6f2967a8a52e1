"""Conditional restricted Boltzmann machines (Ping and Ihler, 2017), trained by belief propagation."""

from __future__ import annotations

from scalelatent.contract.kinds import Kind

from .kernels import KERNELS

KINDS = (
    Kind(
        "crbm",
        estimator="scalelatent.models.crbm.estimator:ConditionalRBM",
        parameters="scalelatent.models.crbm.parameters:PARAMETERS",
        kernels=KERNELS,
        warm="scalelatent.models.crbm",
        takes_targets=True,
        supervised=True,
        scorer="scalelatent.evaluation.scoring:TargetScorer",
        report="scalelatent.models.crbm.report:section",
        report_seconds=1.8,
    ),
)
