"""Hierarchical compositional networks (Lázaro-Gredilla et al., 2016): the parts that binary images are made of.

Names of the kernels and where their bodies are, read by the engine's backend table. All bodies give the same
bits.
"""

KERNELS = {
    f"hcn_{name}": {
        "reference": f"scalelatent.models.hcn.kernels.reference:{name}",
        "numba": f"scalelatent.models.hcn.kernels.cpu.{module}:{name}",
    }
    for name, module in {
        "sweep": "sweeps",
        "sweep_messages": "sweeps",
        "decode": "sweeps",
        "prune": "placements",
        "cover": "placements",
    }.items()
}
