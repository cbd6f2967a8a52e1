"""Write predictions or latent variables of a dataset of any size as another dataset."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

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
        If ``out`` exists, or is the dataset being read.
    """
    from scalelatent.data import open_dataset

    if "://" not in out and os.path.exists(out):
        if dataset.url is not None and os.path.exists(dataset.url) and os.path.samefile(out, dataset.url):
            raise JobError(f"{out} is the dataset being read; choose another output")
        if not overwrite:
            raise JobError(f"output {out} exists; choose another one, or add --overwrite to replace it")
        open_dataset(out)  # an error here keeps us from removing what is no dataset
        shutil.rmtree(out)
    getattr(estimator, method)(dataset, out=out)
    return open_dataset(out)
