"""Kernels of mixtures of linear models: names, and where their bodies are."""

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
        "add_moments",
        "add_tangents",
        "tangent_rows",
        "make_planes",
        "tangent_distance",
    )
}
