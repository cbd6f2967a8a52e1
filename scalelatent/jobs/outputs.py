"""Write predictions or latent variables of a dataset of any size as another dataset."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from scalelatent.data.store import locate
from scalelatent.errors import JobError

if TYPE_CHECKING:
    from scalelatent.data import Dataset

__all__ = ["write_rows"]


def write_rows(
    estimator: Any, method: str, dataset: Dataset, out: str, *, overwrite: bool = False
) -> Dataset:
    """Apply a method of a fitted estimator to every row, block by block.

    Parameters
    ----------
    estimator : fitted estimator
    method : {"predict", "transform"}
    dataset : Dataset
    out : str
        The dataset to write.
    overwrite : bool
        Replace a dataset that is there (and nothing but a dataset).

    Returns
    -------
    Dataset

    Raises
    ------
    JobError
        If ``out`` exists, or is the dataset being read; if the model has no such method.
    """
    from scalelatent.data import open_dataset

    if not hasattr(estimator, method):
        other = {"predict": "transform", "transform": "predict"}[method]
        raise JobError(
            f"a {type(estimator).__name__} has no {method}: `scalelatent {other} RUN DATA --out OUT` writes "
            "what it gives for each row"
        )

    place = locate(out)
    if not place.is_empty() or os.path.exists(place.url):
        if dataset.url is not None and _same(place.url, dataset.url):
            raise JobError(f"{out} is the dataset being read; choose another output")
        if not overwrite:
            raise JobError(f"output {out} exists; choose another one, or add --overwrite to replace it")
        open_dataset(out)  # an error here keeps us from removing what is no dataset
        place.clear()
    getattr(estimator, method)(dataset, out=out)
    return open_dataset(out)


def _same(out: str, source: str) -> bool:
    """Whether two addresses are one place, also through links."""
    local = os.path.exists(out) and os.path.exists(source)
    return os.path.samefile(out, source) if local else out == source
