"""Corrupted images and their clean targets as datasets.

Noisy and occluded images are those of conditional RBMs (see corruption.py). Borders, patches of random
pixels, grids, lines across and deleted lines are, with flips, the six corruptions of Figure 12 in
Lázaro-Gredilla, Liu, Phoenix and George, "Hierarchical compositional feature learning" (2016); the paper does
not give their sizes, those here are ours. Images are made binary by a threshold of 127, or keep their grey
values. Row `i` comes from base `i` (modulo their number) and is a function of (seed, i) besides.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from scalelatent.data.dataset import Dataset, open_dataset
from scalelatent.data.write.create import check_room
from scalelatent.errors import DataError
from scalelatent.kernels import corruption_compiled as compiled
from scalelatent.kernels.corruption import check_corruption, draws_of
from scalelatent.kernels.random_words import check_seed
from scalelatent.storage.disk import locate
from scalelatent.storage.write_checks import contains

from .bases import base_name, check_base_rows, open_base
from .make import Progress, make_rows

_ROWS = 1024  # corrupted at a time, which bounds the random words in memory


class Corruption(NamedTuple):
    """A way to corrupt images uint8 (n, h, w) of 0 and ``on``, in place."""

    options: tuple[str, ...]
    n_draws: Callable[[dict[str, Any], int], int]
    """Of an image, from the options and its pixels."""
    apply: Callable[[np.ndarray, dict[str, Any], int, np.ndarray], None]
    """From the draws, the options, ``on`` and the images."""


def _chosen(draws: np.ndarray, images: np.ndarray) -> np.ndarray:
    """1 at as many different pixels of an image as there are draws, 0 elsewhere."""
    chosen = np.zeros((len(images), images[0].size), np.uint8)
    compiled.flip_exactly(np.ascontiguousarray(draws), chosen)
    return chosen.reshape(images.shape)


def _flip(draws: np.ndarray, p: dict[str, Any], on: int, images: np.ndarray) -> None:
    images ^= _chosen(draws, images) * np.uint8(on)


def _occlude(draws: np.ndarray, p: dict[str, Any], on: int, images: np.ndarray) -> None:
    compiled.occlude(draws, np.array([*p["patch"], p["value"] * on]), images)


def _border(draws: np.ndarray, p: dict[str, Any], on: int, images: np.ndarray) -> None:
    compiled.draw_border(draws, np.array([p["width"], on]), images)


def _scatter(draws: np.ndarray, p: dict[str, Any], on: int, images: np.ndarray) -> None:
    compiled.scatter(draws, np.array([*p["patch"], on]), images)


def _grid(draws: np.ndarray, p: dict[str, Any], on: int, images: np.ndarray) -> None:
    compiled.draw_grid(draws, np.array([p["pitch"], on]), images)


def _clutter(draws: np.ndarray, p: dict[str, Any], on: int, images: np.ndarray) -> None:
    compiled.draw_lines(draws, np.array([on]), images)


def _delete(draws: np.ndarray, p: dict[str, Any], on: int, images: np.ndarray) -> None:
    lines = 2 * p["lines"]
    compiled.erase_lines(np.ascontiguousarray(draws[:, :lines]), images)
    images *= 1 - _chosen(draws[:, lines:], images)


def _share_of(p: dict[str, Any], pixels: int) -> int:
    return round(p["share"] * pixels)


KINDS = {
    "noisy-digits": Corruption(("share",), _share_of, _flip),
    "occluded-digits": Corruption(("patch", "value"), lambda p, pixels: 2, _occlude),
    "bordered-digits": Corruption(("width",), lambda p, pixels: 4, _border),
    "patched-digits": Corruption(("patch",), lambda p, pixels: 2 + -(-math.prod(p["patch"]) // 32), _scatter),
    "gridded-digits": Corruption(("pitch",), lambda p, pixels: 2, _grid),
    "cluttered-digits": Corruption(("lines",), lambda p, pixels: 3 * p["lines"], _clutter),
    "deleted-digits": Corruption(
        ("share", "lines"), lambda p, pixels: 2 * p["lines"] + _share_of(p, pixels), _delete
    ),
}


class CorruptedImages:
    """Images of a base set, corrupted or clean; see `make.Generator`."""

    def __init__(self, base: Dataset, parameters: dict[str, Any]) -> None:
        self._base, self._p = base, parameters
        self._kind: str = parameters["importer"]
        self._first, last = parameters["base_rows"]
        self._n_bases = last - self._first
        self.columns: dict[str, Any] = {"feature_shape": base.feature_shape, "dtype": np.uint8}
        if base.has_y:
            self.columns["y_dtype"] = base.read_y(0, 1).dtype

    def rows(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Images of the rows `start:stop`, uint8 (stop - start, h, w), and the bases' labels."""
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
                if self._p["threshold"] is None:
                    out[part] = images
                else:
                    np.greater(images, self._p["threshold"], out=out[part].view(np.bool_))
                if labels is not None:
                    labels[part] = self._base.read_y(a, b)
                row += b - a
        for first in range(0, stop - start, _ROWS):
            self._corrupt(start + first, out[first : first + _ROWS])
        return out, labels

    def _corrupt(self, start: int, images: np.ndarray) -> None:
        if self._kind not in KINDS:
            return  # these are the clean ones
        kind, p, on = KINDS[self._kind], self._p, 255 if self._p["threshold"] is None else 1
        rows = np.arange(start, start + len(images))
        kind.apply(draws_of(rows, kind.n_draws(p, images[0].size), p["seed"], self._kind), p, on, images)


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
    width: int = 3,
    pitch: int = 7,
    lines: int = 3,
    threshold: int | None = 127,
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
    kind : str
        'noisy-digits': flip pixels. 'occluded-digits': set a patch to one value. 'bordered-digits': draw a
        border. 'patched-digits': draw a patch of random pixels. 'gridded-digits': draw a grid of lines.
        'cluttered-digits': draw lines from edge to edge. 'deleted-digits': turn rows, columns and pixels off.
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
        Of noisy and deleted images: share of the pixels that are flipped or off, exact in each image.
    patch : (int, int)
        Of occluded and patched images: height and width of the patch, which lies whole within the image.
    value : {0, 1}
        Of occluded images: what the patch is set to.
    width : int
        Of bordered images: greatest width of the border, in pixels; each side of an image draws its own.
    pitch : int
        Of gridded images: pixels from a line to the next; an image draws where the first ones lie.
    lines : int
        Of cluttered images: lines across. Of deleted ones: rows and columns of pixels that are off.
    threshold : int, optional
        A pixel above it is 1. None: grey values stay; what is drawn is 255, a flipped pixel 255 - v.
    seed : int
        Of the corruption, at least 0.
    n_jobs, resume, overwrite, progress, shard_rows
        See `make_digits`.

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

    where = locate(url)
    place, pure = where.url, locate(clean_url(where.url) if clean is None else clean)
    target = pure.url
    if contains(where, pure) or contains(pure, where):
        raise DataError(f"{place} cannot hold both the corrupted and the clean images; give another --clean")
    ds = open_base(base_name(base, place), place)
    open_base(base_name(base, target), target)  # the base is none of the two outputs
    first, last = check_base_rows(base_rows, ds.n_rows)
    if kind not in KINDS:
        raise DataError(f"there is no corruption {kind!r}; there are {', '.join(KINDS)}")
    given: dict[str, Any] = {
        "share": share,
        "patch": [int(p) for p in patch],
        "value": int(value),
        "width": int(width),
        "pitch": int(pitch),
        "lines": int(lines),
    }
    options = {name: given[name] for name in KINDS[kind].options}
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

    try:
        ds = open_dataset(url)
    except DataError:
        return False
    provenance = {k: v for k, v in ds.attrs["provenance"].items() if k != "scalelatent"}
    return ds.n_rows == n_rows and provenance == parameters


def _check(
    kind: str, options: dict[str, Any], threshold: int | None, seed: int, shape: tuple[int, ...]
) -> None:
    least, most = int(kind == "cluttered-digits"), max(shape)
    if kind == "noisy-digits":
        check_corruption("flip", math.prod(shape), rate=options["share"])
    elif not 0 <= options.get("share", 0) <= 1:
        raise DataError(f"share is {options['share']}, but the share of pixels that are off lies in 0 to 1")
    if "patch" in options:
        value = options.get("value", 0)
        check_corruption("occlude", math.prod(shape), size=options["patch"], shape=shape, value=value)
    if "width" in options and not 1 <= options["width"] <= min(shape) // 2:
        raise DataError(
            f"width is {options['width']}, but a border of images of {shape[0]} x {shape[1]} pixels is 1 to "
            f"{min(shape) // 2} wide"
        )
    if "pitch" in options and not 2 <= options["pitch"] <= most:
        raise DataError(f"pitch is {options['pitch']}, but lines lie 2 to {most} pixels apart")
    if "lines" in options and not least <= options["lines"] <= most:
        raise DataError(f"lines is {options['lines']}, but {kind} have {least} to {most} of them")
    if threshold is not None and not 0 <= threshold <= 255:
        raise DataError(f"threshold is {threshold}, but grey values are 0 to 255")
    check_seed(seed)


def clean_url(url: str) -> str:
    """Where the clean images lie beside the corrupted ones."""
    folder, slash, name = url.rstrip("/").rpartition("/")
    stem, dot, suffix = name.rpartition(".")
    return folder + slash + (f"{stem}.clean.{suffix}" if dot and stem else f"{name}.clean")


def from_provenance(provenance: dict[str, Any], url: str) -> CorruptedImages:
    """The generator of a dataset with this provenance."""

    return CorruptedImages(open_base(provenance["base"], url, provenance["base_fingerprint"]), provenance)
