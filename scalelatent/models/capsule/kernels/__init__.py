"""Table of the kernels of capsule regression: the functions that implement them in numpy, numba and CuPy."""

KERNELS = {
    "capsule_estep": {
        "reference": "scalelatent.models.capsule.kernels.estep:estep_by_products",
        "numba": "scalelatent.models.capsule.kernels.cpu:estep",
        "cupy": "scalelatent.models.capsule.kernels.gpu:estep",
    },
    "capsule_residuals": {
        "reference": "scalelatent.models.capsule.kernels.reference:residuals",
        "numba": "scalelatent.models.capsule.kernels.cpu:residuals",
        "cupy": "scalelatent.models.capsule.kernels.gpu:residuals",
    },
    "capsule_probabilities": {
        "reference": "scalelatent.models.capsule.kernels.reference:probabilities",
        "numba": "scalelatent.models.capsule.kernels.reference:probabilities",
        "cupy": "scalelatent.models.capsule.kernels.gpu:probabilities",
    },
}
