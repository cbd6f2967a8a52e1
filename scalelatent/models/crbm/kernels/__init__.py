"""Table of the kernels for inference in RBMs: the functions that implement them in numpy, numba and CuPy."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from . import gpu, reference
    from .cpu import coupling

# Couplings W of outputs and hidden units, in the form that the inference kernels of one backend read.
AnyCoupling: TypeAlias = "reference.PlainCoupling | coupling.Coupling | gpu.DeviceCoupling"

_MODULES = {
    "make_coupling": "coupling",
    "sum_product": "sum_product",
    "sum_product_pairs": "sum_product",
    "mixed_product": "mixed_product",
    "max_product": "max_product",
    "mean_field": "mean_field",
}
KERNELS = {
    f"crbm_{name}": {
        "reference": f"scalelatent.models.crbm.kernels.reference:{name}",
        "numba": f"scalelatent.models.crbm.kernels.cpu.{module}:{name}",
        "cupy": f"scalelatent.models.crbm.kernels.gpu:{name}",
    }
    for name, module in _MODULES.items()
}
# These kernels exist only for GPUs: they compute several chains (parts of a batch) in one launch, and take a
# gradient step with parameters that stay on the device.
for _name in ("add_chain_gradients", "ascend_chains"):
    KERNELS[f"crbm_{_name}"] = {"cupy": f"scalelatent.models.crbm.kernels.gpu:{_name}"}
