"""Table of the kernels (compiled functions) of bootstrap networks, with a function for each backend."""

_MODULES = {
    "mbn_make_bank": "dense",
    "mbn_nearest": "dense",
    "mbn_make_sparse_bank": "sparse",
    "mbn_nearest_sparse": "sparse",
    "mbn_make_lists": "lists",
    "mbn_nearest_codes": "lists",
}
KERNELS = {
    name: {
        "reference": f"scalelatent.models.mbn.kernels.reference:{name.removeprefix('mbn_')}",
        "numba": f"scalelatent.models.mbn.kernels.cpu.{module}:{name.removeprefix('mbn_')}",
        "cupy": f"scalelatent.models.mbn.kernels.gpu:{name.removeprefix('mbn_')}",
    }
    for name, module in _MODULES.items()
}

# The reference backend (numpy) draws with the compiled functions, because the results are the same.
_DRAWS = "scalelatent.models.mbn.kernels.cpu.draws"
KERNELS |= {
    f"mbn_{name}": {
        "reference": f"{_DRAWS}:{name}",
        "numba": f"{_DRAWS}:{name}",
        "cupy": f"scalelatent.models.mbn.kernels.gpu:{name}",
    }
    for name in ("choose_masks", "choose_numbers")
}

# Kernels of the PCA of the output. They take less than 1 % of a fit, so workers with a GPU also run them on
# the CPU, where sums are added in a fixed order and the result is always the same.
_ONEHOT, _HOST = "scalelatent.kernels.onehot", "scalelatent.kernels.onehot_compiled"

KERNELS |= {
    f"mbn_{name}": {
        "reference": f"{_ONEHOT}:{name}",
        "numba": f"{_HOST}:{name}",
        "cupy": f"{_HOST}:{name}",
    }
    for name in ("gather_sum", "scatter_add", "count_matches")
}
