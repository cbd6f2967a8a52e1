"""Hierarchical compositional networks (Lázaro-Gredilla et al., 2016): features of binary images."""

from __future__ import annotations

from scalelatent.contract.kinds import Kind

from .kernels import KERNELS

KINDS = (
    Kind(
        "hcn",
        estimator="scalelatent.models.hcn.estimator:HierarchicalCompositionalNetwork",
        parameters="scalelatent.models.hcn.parameters:PARAMETERS",
        kernels=KERNELS,
        warm="scalelatent.models.hcn",
        scorer="scalelatent.models.hcn.scoring:NetworkScorer",
        report="scalelatent.models.hcn.report:section",
        report_rows=1000,
    ),
)
