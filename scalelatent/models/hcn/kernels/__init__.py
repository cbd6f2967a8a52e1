"""Table of kernels: for each name its implementations in numpy, numba and CuPy, which give identical bits."""

from __future__ import annotations

_HERE = __name__
_MODULES = {
    "sweep": "sweeps",
    "sweep_messages": "sweeps",
    "decode": "sweeps",
    "raise_pools": "pools",
    "lower_pools": "pools",
    "lower_trees": "pools",
    "lower_features": "pools",
    "cover": "placements",
    "improve": "placements",
}
KERNELS = {
    f"hcn_{name}": {
        "reference": f"{_HERE}.reference:{name}",
        "numba": f"{_HERE}.cpu.{module}:{name}",
        # Only sweeps have a device kernel; greedy placement is sequential and runs on the host.
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
