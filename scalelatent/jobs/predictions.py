"""Write predictions or latent variables of a dataset of any size as another dataset."""

from __future__ import annotations

import inspect
import os
from typing import TYPE_CHECKING, Any

from scalelatent.errors import JobError
from scalelatent.storage.disk import locate

if TYPE_CHECKING:
    from scalelatent.data import Dataset

__all__ = ["write_rows"]


def write_rows(
    estimator: Any,
    method: str,
    dataset: Dataset,
    out: str,
    *,
    layer: int | None = None,
    overwrite: bool = False,
) -> Dataset:
    """Apply a method of a fitted estimator to every row, block by block."""
    from scalelatent.data import open_dataset

    kind = type(estimator).__name__
    if not hasattr(estimator, method):
        other = {"predict": "transform", "transform": "predict", "codes": "transform"}[method]
        raise JobError(
            f"a {kind} has no {method}: `scalelatent {other} RUN DATA --out OUT` writes what it gives for "
            "each row"
        )
    write = getattr(estimator, method)
    if layer is not None and "layer" not in inspect.signature(write).parameters:
        raise JobError(f"a {kind} has no layers: leave --layer out")
    place = locate(out)
    if not place.is_empty() or os.path.exists(place.url):
        if dataset.url is not None and _same(place.url, dataset.url):
            raise JobError(f"{out} is the dataset being read; choose another output")
        if not overwrite:
            raise JobError(f"output {out} exists; choose another one, or add --overwrite to replace it")
        open_dataset(out)  # an error here keeps us from removing what is not a dataset
    write(dataset, out=out, overwrite=overwrite, **({} if layer is None else {"layer": layer}))
    return open_dataset(out)


def _same(out: str, source: str) -> bool:
    """Whether two addresses are one place, also through links."""
    local = os.path.exists(out) and os.path.exists(source)
    return os.path.samefile(out, source) if local else out == source
