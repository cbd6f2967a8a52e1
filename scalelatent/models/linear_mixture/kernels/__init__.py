"""Kernels of mixtures of linear models: names, and where their bodies are."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from . import cpu, gpu, reference

# Scores and bases as the kernels of a backend make them, for its other kernels alone.
PackedScores: TypeAlias = "reference.Scorer | cpu.Scorer | gpu.Scorer"
PackedBases: TypeAlias = "reference.Bank | cpu.Bank | gpu.Bank"
PackedPlanes: TypeAlias = "reference.Scores | cpu.Planes | gpu.Planes"

KERNELS = {
    f"linear_mixture_{name}": {
        backend: f"scalelatent.models.linear_mixture.kernels.{module}:{name}"
        for backend, module in (("reference", "reference"), ("numba", "cpu"), ("cupy", "gpu"))
    }
    for name in (
        "make_scorer",
        "all_scores",
        "nearest",
        "nearest_own",
        "few_best",
        "make_bank",
        "add_images",
        "add_tangents",
        "tangent_rows",
        "make_planes",
        "tangent_distance",
    )
}
