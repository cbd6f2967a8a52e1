"""Capsule regression (Saul, 2021): latent vectors of competing length, fitted by EM.

Names of the kernels and where their bodies are, read by the engine's backend table.
"""

KERNELS = {
    "capsule_estep": {
        "reference": "scalelatent.models.capsule.estep:estep_by_products",
        "numba": "scalelatent.models.capsule.cpu:estep",
        "cupy": "scalelatent.models.capsule.estep:estep_by_products",
    },
    "capsule_residuals": {
        "reference": "scalelatent.models.capsule.reference:residuals",
        "numba": "scalelatent.models.capsule.cpu:residuals",
        "cupy": "scalelatent.models.capsule.gpu:residuals",
    },
    "capsule_walk": {
        # Row after row: a device has nothing to do in parallel, so the walk stays on the host.
        "reference": "scalelatent.models.capsule.reference:walk",
        "numba": "scalelatent.models.capsule.walk:walk",
        "cupy": "scalelatent.models.capsule.walk:walk",
    },
    "capsule_probabilities": {
        "reference": "scalelatent.models.capsule.reference:probabilities",
        "numba": "scalelatent.models.capsule.reference:probabilities",
        "cupy": "scalelatent.models.capsule.gpu:probabilities",
    },
}
