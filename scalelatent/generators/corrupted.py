"""Corrupted images and their clean targets, for conditional RBMs, as datasets (see corruption.py).

Images are made binary by a threshold of 127. Row `i` comes from base `i` (modulo their number) and is a
function of (seed, i) besides.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.errors import DataError

if TYPE_CHECKING:
    from scalelatent.data.dataset import Dataset

    from .make import Progress

__all__ = ["CorruptedImages", "clean_url", "from_provenance", "make_corrupted"]

KINDS = {"noisy-digits": "flip", "occluded-digits": "occlude"}
_ROWS = 1024  # corrupted at a time, which bounds the random words in memory


class CorruptedImages:
    """Binary images of a base set, corrupted or clean; see `make.Generator`."""

    def __init__(self, base: Dataset, parameters: dict[str, Any]) -> None:
        self._base, self._p = base, parameters
        self._kind: str = parameters["importer"]
        self._first, last = parameters["base_rows"]
        self._n_bases = last - self._first
        self.columns: dict[str, Any] = {"feature_shape": base.feature_shape, "dtype": np.uint8}
        if base.has_y:
            self.columns["y_dtype"] = base.read_y(0, 1).dtype

    def rows(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Images of the rows `start:stop`, uint8 (stop - start, h, w) of 0 and 1, and the bases' labels."""
        shape = self._base.feature_shape
        out = np.empty((stop - start, *shape), np.uint8)
        labels = np.empty(stop - start, self.columns["y_dtype"]) if self._base.has_y else None
        row = start
        while row < stop:
            base = self._first + row % self._n_bases
            count = min(stop - row, self._first + self._n_bases - base)
            for a, b in self._base.pieces(base, base + count):  # each chunk of the base is decoded once
                part = slice(row - start, row - start + b - a)
                images = self._base.read_x(a, b).reshape(b - a, *shape)
                np.greater(images, self._p["threshold"], out=out[part].view(np.bool_))
                if labels is not None:
                    labels[part] = self._base.read_y(a, b)
                row += b - a
        for first in range(0, stop - start, _ROWS):
            self._corrupt(start + first, out[first : first + _ROWS])
        return out, labels

    def _corrupt(self, start: int, images: np.ndarray) -> None:
        from scalelatent.kernels.corruption import corrupt_in_place

        if self._kind in KINDS:  # else these are the clean ones
            rows, how = np.arange(start, start + len(images)), _how(self._p, images.shape[1:])
            corrupt_in_place(
                images.reshape(len(images), -1), rows, **how, stage=self._kind, seed=self._p["seed"]
            )


def make_corrupted(
    url: str | os.PathLike[str],
    kind: str,
    *,
    base: str | os.PathLike[str] = "digits",
    base_rows: tuple[int, int] | None = None,
    rows: int | None = None,
    clean: str | os.PathLike[str] | None = None,
    share: float = 0.1,
    patch: tuple[int, int] = (8, 8),
    value: int = 0,
    threshold: int = 127,
    seed: int = 0,
    n_jobs: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    shard_rows: int | None = None,
) -> tuple[Dataset, Dataset]:
    """Write corrupted images, and the clean ones as a dataset of its own, row for row.

    Parameters
    ----------
    url : str
        Where the corrupted images go.
    kind : {'noisy-digits', 'occluded-digits'}
        Flip pixels, or set a patch to one value.
    base : str
        'digits' (scikit-learn's) or the url of a dataset of uint8 images; labels are taken over.
    base_rows : (int, int), optional
        Bases `A:B`; all by default. No row derives from another.
    rows : int, optional
        Number of images, one of each base by default. More begin again at base A with other corruptions.
    clean : str, optional
        Where the clean images go; by default beside `url`, with `.clean` in its name. A dataset there that
        holds just these images is kept, also with `overwrite`, so several corruptions may share it.
    share : float
        Of noisy images: share of the pixels that are flipped, in each image exactly so many.
    patch : (int, int)
        Of occluded images: height and width of the patch, which lies whole within the image.
    value : {0, 1}
        Of occluded images: what the patch is set to.
    threshold : int
        A pixel above it is 1.
    seed : int
        Of the corruption, at least 0.
    n_jobs, resume, overwrite, progress, shard_rows
        See `make.make_rows`.

    Returns
    -------
    corrupted, clean : Dataset
        A job file names the first as `train` and the second as `target`.

    Raises
    ------
    DataError
        A parameter that cannot be, a base without such images, or an output that exists.

    Examples
    --------
    >>> noisy, clean = make_corrupted("memory://doc-noisy", "noisy-digits", overwrite=True)
    >>> np.unique((noisy.read_x(0, 100) != clean.read_x(0, 100)).sum(axis=1)).tolist()  # 10 % of 64
    [6]
    """
    from scalelatent.data.write.create import check_room
    from scalelatent.storage.disk import locate
    from scalelatent.storage.guard import clears_too

    from .bases import base_name, check_base_rows, open_base
    from .make import make_rows

    where = locate(url)
    place, pure = where.url, locate(clean_url(where.url) if clean is None else clean)
    target = pure.url
    if clears_too(where, pure) or clears_too(pure, where):
        raise DataError(f"{place} cannot hold both the corrupted and the clean images; give another --clean")
    ds = open_base(base_name(base, place), place)
    open_base(base_name(base, target), target)  # the base is none of the two outputs
    first, last = check_base_rows(base_rows, ds.n_rows)
    options: dict[str, Any] = {"share": share}
    if kind == "occluded-digits":
        options = {"patch": [int(p) for p in patch], "value": int(value)}
    _check(kind, options, threshold, seed, ds.feature_shape)

    def parameters(name: str, at: str) -> dict[str, Any]:
        common = {"base": base_name(base, at), "base_fingerprint": ds.fingerprint()}
        return {"importer": name, **common, "base_rows": [first, last], "threshold": threshold}

    n_rows = last - first if rows is None else rows
    if not resume:
        check_room(where, overwrite)
    say = progress or (lambda done, total: None)
    wanted = parameters("clean-digits", target)
    kept = _holds(target, n_rows, wanted)
    cleaned = make_rows(  # first: a target that may not be written is found before hours of the other
        target,
        n_rows,
        wanted,
        n_jobs=n_jobs,
        resume=kept or not overwrite,
        overwrite=overwrite and not kept,
        progress=lambda done, total: say(done // 2, total),
        shard_rows=None if kept else shard_rows,
    )
    corrupted = make_rows(
        url,
        n_rows,
        {**parameters(kind, place), "seed": int(seed), **options},
        n_jobs=n_jobs,
        resume=resume,
        overwrite=overwrite,
        progress=lambda done, total: say((total + done) // 2, total),
        shard_rows=shard_rows,
    )
    return corrupted, cleaned


def _holds(url: str, n_rows: int, parameters: dict[str, Any]) -> bool:
    """Whether a finished dataset holds the rows of these parameters."""
    from scalelatent.data import open_dataset

    try:
        ds = open_dataset(url)
    except DataError:
        return False
    provenance = {k: v for k, v in ds.attrs["provenance"].items() if k != "scalelatent"}
    return ds.n_rows == n_rows and provenance == parameters


def _how(parameters: dict[str, Any], shape: tuple[int, ...]) -> dict[str, Any]:
    """The arguments of `corrupt` that parameters of a dataset stand for."""
    kind = KINDS[parameters["importer"]]
    if kind == "flip":
        return {"kind": kind, "rate": parameters["share"]}
    return {"kind": kind, "size": tuple(parameters["patch"]), "shape": shape, "value": parameters["value"]}


def _check(kind: str, options: dict[str, Any], threshold: int, seed: int, shape: tuple[int, ...]) -> None:
    from scalelatent.kernels.corruption import check_corruption
    from scalelatent.kernels.random_words import check_seed

    if kind not in KINDS:
        raise DataError(f"there is no corruption {kind!r}; there are {', '.join(KINDS)}")
    check_corruption(n_features=int(np.prod(shape)), **_how({"importer": kind, **options}, shape))
    if not 0 <= threshold <= 255:
        raise DataError(f"threshold is {threshold}, but grey values are 0 to 255")
    check_seed(seed)


def clean_url(url: str) -> str:
    """Where the clean images lie beside the corrupted ones."""
    folder, slash, name = url.rstrip("/").rpartition("/")
    stem, dot, suffix = name.rpartition(".")
    return folder + slash + (f"{stem}.clean.{suffix}" if dot and stem else f"{name}.clean")


def from_provenance(provenance: dict[str, Any], url: str) -> CorruptedImages:
    """The generator of a dataset with this provenance."""
    from .bases import open_base

    return CorruptedImages(open_base(provenance["base"], url, provenance["base_fingerprint"]), provenance)
