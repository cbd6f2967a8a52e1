"""Capsule regression (Saul, 2021): a classifier with a latent vector per class, fitted by EM."""

from __future__ import annotations

from scalelatent.contract.kinds import Kind

from .kernels import KERNELS

KINDS = (
    Kind(
        "capsule",
        estimator="scalelatent.models.capsule.estimator:CapsuleRegression",
        parameters="scalelatent.models.capsule.parameters:PARAMETERS",
        kernels=KERNELS,
        warm="scalelatent.models.capsule",
        supervised=True,
        report="scalelatent.models.capsule.report:section",
        report_seconds=2.1,
    ),
)
