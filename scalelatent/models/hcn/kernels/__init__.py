"""Table of kernels: for each name its implementations in numpy, numba and CuPy, which give identical bits."""

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
        # Only the kernels in sweeps have a version for GPUs. The kernels in pools and placements run on the
        # host.
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
