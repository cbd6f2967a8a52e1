"""Multilayer bootstrap networks (Zhang, 2018): layers of random clusterings with integer codes."""

from __future__ import annotations

from scalelatent.contract.kinds import Kind

from .kernels import KERNELS

# The estimators of this folder, for the table of all models in `scalelatent.models`.
KINDS = (
    Kind(
        "mbn",
        estimator="scalelatent.models.mbn.estimator:MultilayerBootstrapNetwork",
        parameters="scalelatent.models.mbn.parameters:PARAMETERS",
        kernels=KERNELS,
        warm="scalelatent.models.mbn",
        scorer="scalelatent.evaluation.scoring:OutputScorer",
        report="scalelatent.models.mbn.report:section",
        report_seconds=3.5,
        report_rows=2000,
        scoring_seconds=2e-4,  # seconds per row of the k-means that scores the output
    ),
    Kind(
        "compressive",
        estimator="scalelatent.models.mbn.compressive:CompressiveMBN",
        parameters="scalelatent.models.mbn.parameters:COMPRESSIVE",
        scorer="scalelatent.evaluation.scoring:OutputScorer",
        # A job cannot fit this model: it imitates a fitted network, which a job file has no way to name.
        python_only=(
            "scalelatent.CompressiveMBN().fit(X, network.transform(X)) learns the output of a network that a "
            'job of kind = "mbn" has fitted'
        ),
    ),
)
