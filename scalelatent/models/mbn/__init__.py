"""Multilayer bootstrap networks (Zhang, 2018): layers of random clusterings whose outputs are integer codes.

Names of the kernels and where their bodies are, read by the engine's backend table.
"""

_DENSE = "scalelatent.models.mbn.cpu.dense"
_SPARSE = "scalelatent.models.mbn.cpu.sparse"
_OVERLAP = "scalelatent.models.mbn.cpu.overlap"
_REFERENCE = "scalelatent.models.mbn.reference"

KERNELS = {
    "mbn_make_bank": {"reference": f"{_REFERENCE}:make_bank", "numba": f"{_DENSE}:make_bank"},
    "mbn_nearest": {"reference": f"{_REFERENCE}:nearest", "numba": f"{_DENSE}:nearest"},
    "mbn_make_sparse_bank": {
        "reference": f"{_REFERENCE}:make_sparse_bank",
        "numba": f"{_SPARSE}:make_sparse_bank",
    },
    "mbn_nearest_sparse": {"reference": f"{_REFERENCE}:nearest_sparse", "numba": f"{_SPARSE}:nearest_sparse"},
    "mbn_make_lists": {"reference": f"{_REFERENCE}:make_lists", "numba": f"{_OVERLAP}:make_lists"},
    "mbn_nearest_codes": {"reference": f"{_REFERENCE}:nearest_codes", "numba": f"{_OVERLAP}:nearest_codes"},
}

# Sums of a few numbers a code, bound by memory and under a hundredth of a fit: workers with a device compute
# them on the host, where their order is fixed.
_ONEHOT, _HOST = "scalelatent.models.mbn.onehot", "scalelatent.models.mbn.cpu.onehot"

KERNELS |= {
    f"mbn_{name}": {
        "reference": f"{_ONEHOT}:{name}",
        "numba": f"{_HOST}:{name}",
        "cupy": f"{_HOST}:{name}",
    }
    for name in ("gather_sum", "scatter_add", "count_matches")
}
