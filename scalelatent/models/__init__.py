"""Models, one folder each.

In a folder, ``model/`` holds the mathematics, without Dask, zarr or files. ``kernels/`` holds the reference,
numba and CuPy bodies. The other files connect both with the estimator, the engine and the report. ``KINDS``
of a folder declares its models (:class:`scalelatent.contract.kinds.Kind`).
"""

from __future__ import annotations

import importlib
import pkgutil

from scalelatent.contract.kinds import Kind

KINDS: tuple[Kind, ...] = tuple(
    kind
    for info in pkgutil.iter_modules(__path__)
    if info.ispkg
    for kind in importlib.import_module(f"{__name__}.{info.name}").KINDS
)
