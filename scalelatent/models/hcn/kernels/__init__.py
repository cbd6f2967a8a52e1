"""Table of the kernels: for each name the functions in numpy, numba and CuPy, which return identical bits."""

from __future__ import annotations

_HERE = __name__
_MODULES = {
    "sweep": "sweeps",
    "sweep_messages": "sweeps",
    "decode_images": "sweeps",
    "pass_pools_up": "pools",
    "pass_pools_down": "pools",
    "pass_trees_down": "pools",
    "pass_features_down": "pools",
    "cover": "placements",
    "improve": "placements",
}
KERNELS = {
    f"hcn_{name}": {
        "reference": f"{_HERE}.reference:{name}",
        "numba": f"{_HERE}.cpu.{module}:{name}",
        # Only the kernels of the module `sweeps` have a version for GPUs. With a GPU, the kernels of `pools`
        # and `placements` run on the CPU.
        "cupy": f"{_HERE}.gpu:{name}" if module == "sweeps" else f"{_HERE}.cpu.{module}:{name}",
    }
    for name, module in _MODULES.items()
} | {
    "hcn_shuffled": {
        "reference": f"{_HERE}.pixel_order:shuffled",
        "numba": f"{_HERE}.pixel_order:shuffled",
        "cupy": f"{_HERE}.gpu:shuffled",
    }
}
