"""Map from the module names in records (files) that earlier versions wrote to the present modules."""

from __future__ import annotations

_CAPSULE, _CRBM, _MBN = "scalelatent.models.capsule", "scalelatent.models.crbm", "scalelatent.models.mbn"

MOVED_MODULES = {
    "scalelatent.models.base": "scalelatent.contract.learners",
    "scalelatent.models.csr": "scalelatent.kernels.sparse_rows",
    "scalelatent.models.stats": "scalelatent.contract.stats",
    "scalelatent.contract.requests": "scalelatent.contract.block_requirements",
    "scalelatent.models.targets": "scalelatent.contract.block_requirements",
    "scalelatent.contract.wants": "scalelatent.contract.block_requirements",
    "scalelatent.contract.targets": "scalelatent.contract.block_requirements",
    "scalelatent.data.grid": "scalelatent.engine.grid",
    "scalelatent.engine.joint": "scalelatent.search.joint",
    "scalelatent.engine.loop": "scalelatent.engine.batch_loop",
    "scalelatent.engine.tally": "scalelatent.reductions.confusion",
    "scalelatent.reductions.tally": "scalelatent.reductions.confusion",
    "scalelatent.engine.online": "scalelatent.engine.online_loop",
    f"{_CAPSULE}.moments": "scalelatent.reductions.moments",
    f"{_CAPSULE}.model": f"{_CAPSULE}.model.em",
    **{
        f"{_CAPSULE}.{name}": f"{_CAPSULE}.model.{name}"
        for name in ("members", "online", "predict", "running", "start")
    },
    f"{_CRBM}.inference": f"{_CRBM}.kernels.inference",
    f"{_CRBM}.learners": f"{_CRBM}.model.negative_phases",
    f"{_CRBM}.model": f"{_CRBM}.model.energy",
    f"{_CRBM}.update": f"{_CRBM}.kernels.update",
    **{f"{_CRBM}.{name}": f"{_CRBM}.model.{name}" for name in ("beliefs", "online", "predict", "state")},
    f"{_MBN}.model": f"{_MBN}.model.network",
    **{f"{_MBN}.{name}": f"{_MBN}.model.{name}" for name in ("compressive", "layers", "pca", "sampling")},
}
"""Old module name -> name of the module that now defines the types."""
