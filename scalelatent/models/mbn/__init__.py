"""Multilayer bootstrap networks (Zhang, 2018): layers of random clusterings whose outputs are integer codes.

Names of the kernels and where their bodies are, read by the engine's backend table.
"""

KERNELS = {
    "mbn_bank": {
        "reference": "scalelatent.models.mbn.reference:make_bank",
        "numba": "scalelatent.models.mbn.cpu.dense:make_bank",
    },
    "mbn_nearest": {
        "reference": "scalelatent.models.mbn.reference:nearest",
        "numba": "scalelatent.models.mbn.cpu.dense:nearest",
    },
    "mbn_sparse_bank": {
        "reference": "scalelatent.models.mbn.reference:make_sparse_bank",
        "numba": "scalelatent.models.mbn.cpu.sparse:make_sparse_bank",
    },
    "mbn_nearest_sparse": {
        "reference": "scalelatent.models.mbn.reference:nearest_sparse",
        "numba": "scalelatent.models.mbn.cpu.sparse:nearest_sparse",
    },
    "mbn_lists": {
        "reference": "scalelatent.models.mbn.reference:make_lists",
        "numba": "scalelatent.models.mbn.cpu.overlap:make_lists",
    },
    "mbn_nearest_codes": {
        "reference": "scalelatent.models.mbn.reference:nearest_codes",
        "numba": "scalelatent.models.mbn.cpu.overlap:nearest_codes",
    },
}
