"""The models: one folder each, with everything that is its own.

``model/`` is the mathematics (no Dask, no zarr, no files), ``kernels/`` its bodies (`reference`, the oracle;
numba; CuPy), the files beside them are the shell. A folder's ``KINDS`` are what it tells the rest of the
package (:class:`scalelatent.contract.kinds.Kind`); every folder here is found.
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
