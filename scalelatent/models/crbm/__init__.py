"""Conditional RBMs (Ping and Ihler, 2017): inference by belief propagation, each row a graph of its own.

Names of the kernels and where their bodies are, read by the engine's backend table.
"""

_BODIES = {
    "reference": "scalelatent.models.crbm.reference",
    "numba": "scalelatent.models.crbm.cpu",
}
KERNELS = {
    f"crbm_{name}": {backend: f"{module}:{name}" for backend, module in _BODIES.items()}
    for name in (
        "make_coupling",
        "sum_product",
        "sum_product_pairs",
        "bethe",
        "mixed_product",
        "max_product",
        "mean_field",
    )
}
KERNELS["crbm_pairwise"] = {"reference": "scalelatent.models.crbm.reference:pairwise"}
