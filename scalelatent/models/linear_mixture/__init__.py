"""Mixtures of linear models (Hinton, Revow, Dayan, 1995), fitted by streamed EM."""

from __future__ import annotations

from scalelatent.contract.kinds import Kind

from .kernels import KERNELS

KINDS = (
    Kind(
        "linear_mixture",
        estimator="scalelatent.models.linear_mixture.estimator:LinearMixtureClassifier",
        parameters="scalelatent.models.linear_mixture.parameters:PARAMETERS",
        kernels=KERNELS,
        warm="scalelatent.models.linear_mixture",
        supervised=True,
        scorer="scalelatent.models.linear_mixture.scoring:RejectScorer",
        report="scalelatent.models.linear_mixture.report:section",
    ),
    Kind(
        "linear_density",
        estimator="scalelatent.models.linear_mixture.estimator:LinearMixture",
        parameters="scalelatent.models.linear_mixture.parameters:DENSITY_PARAMETERS",
        kernels=KERNELS,
        warm="scalelatent.models.linear_mixture",
        scorer="scalelatent.models.linear_mixture.scoring:DensityScorer",
        report="scalelatent.models.linear_mixture.report:density_section",
    ),
)
