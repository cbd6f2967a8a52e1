"""Table of the kernels of mixtures of linear models: name, backend, function."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from . import cpu, gpu, reference

# Types of packed parameters. One kernel of a backend packs them for other kernels of this backend.
AnyScorer: TypeAlias = "reference.Scorer | cpu.Scorer | gpu.Scorer"
AnyBases: TypeAlias = "reference.PackedBases | cpu.PackedBases | gpu.PackedBases"
AnyTangentScores: TypeAlias = "reference.Scores | cpu.PackedTangentScores | gpu.PackedTangentScores"

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
        "select_best",
        "pack_bases",
        "open_sums",
        "close_sums",
        "add_scatter",
        "add_tangent_scatter",
        "tangent_rows",
        "pack_tangent_scores",
        "tangent_distance",
    )
}
