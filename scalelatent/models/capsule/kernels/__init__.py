"""The E-step and the walk of capsule regression: reference, numba, CuPy."""

KERNELS = {
    "capsule_estep": {
        "reference": "scalelatent.models.capsule.kernels.estep:estep_by_products",
        "numba": "scalelatent.models.capsule.kernels.cpu:estep",
        "cupy": "scalelatent.models.capsule.kernels.estep:estep_by_products",
    },
    "capsule_residuals": {
        "reference": "scalelatent.models.capsule.kernels.reference:residuals",
        "numba": "scalelatent.models.capsule.kernels.cpu:residuals",
        "cupy": "scalelatent.models.capsule.kernels.gpu:residuals",
    },
    "capsule_walk": {
        # Row after row: a device has nothing to do in parallel, so the walk stays on the host.
        "reference": "scalelatent.models.capsule.kernels.reference:walk",
        "numba": "scalelatent.models.capsule.kernels.walk:walk",
        "cupy": "scalelatent.models.capsule.kernels.walk:walk",
    },
    "capsule_probabilities": {
        "reference": "scalelatent.models.capsule.kernels.reference:probabilities",
        "numba": "scalelatent.models.capsule.kernels.reference:probabilities",
        "cupy": "scalelatent.models.capsule.kernels.gpu:probabilities",
    },
}
