"""Corrupted images and their clean targets as datasets.

Noisy and occluded images are those of conditional RBMs (see kernels/corruption.py). Borders, patches of
random pixels, grids, crossing lines and deleted lines are, with flips, the six corruptions of Figure 12 in
Lázaro-Gredilla, Liu, Phoenix and George, "Hierarchical compositional feature learning" (2016). The paper
gives no sizes; those here are ours. Images are made binary by a threshold of 127, or keep their grey
values. Row `i` derives from base `i` (modulo their number), and its corruption depends on (seed, i) only.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from scalelatent.data.dataset import Dataset, open_dataset
from scalelatent.data.write.batches import half_progress
from scalelatent.data.write.create import check_room
from scalelatent.errors import DataError
from scalelatent.kernels import corruption_compiled as compiled
from scalelatent.kernels.corruption import check_corruption, draw_for_rows
from scalelatent.kernels.streams import check_seed
from scalelatent.storage.disk import locate
from scalelatent.storage.write_checks import contains

from .bases import base_name, check_base_rows, open_base
from .make import make_rows

if TYPE_CHECKING:
    from typing import Unpack

    from .make import MakeOptions

# Number of rows that are corrupted at a time; it limits the memory for random numbers.
_BATCH_ROWS = 1024


class Corruption(NamedTuple):
    """Method that corrupts images uint8 (n, h, w) in place; their pixels are 0 and ``on`` (1 or 255)."""

    options: tuple[str, ...]
    """Names of its parameters in `make_corrupted`."""
    n_draws: Callable[[dict[str, Any], int], int]
    """Function of (options, number of pixels) that returns the number of random numbers of one image."""
    kernel: Callable[[np.ndarray, np.ndarray, np.ndarray], None]
    """Function of (random numbers, settings, images) that changes the images in place."""
    settings: Callable[[dict[str, Any], int], list[int]]
    """Function of (options, ``on``) that returns the settings of the kernel."""


def _random_pixels(draws: np.ndarray, images: np.ndarray) -> np.ndarray:
    """Return masks of the shape of `images`: 1 at random pixels, one pixel for each random number, else 0."""
    chosen = np.zeros((len(images), images[0].size), np.uint8)
    compiled.flip_exactly(np.ascontiguousarray(draws), chosen)
    return chosen.reshape(images.shape)


def _flip(draws: np.ndarray, settings: np.ndarray, images: np.ndarray) -> None:
    """Flip the bits ``settings[0]`` of random pixels in place, one pixel for each random number."""
    images ^= _random_pixels(draws, images) * np.uint8(settings[0])


def _delete(draws: np.ndarray, settings: np.ndarray, images: np.ndarray) -> None:
    """Set ``settings[0]`` rows, ``settings[0]`` columns and one pixel per further draw to 0, in place."""
    n_lines = 2 * settings[0]
    compiled.erase_lines(np.ascontiguousarray(draws[:, :n_lines]), images)
    images *= 1 - _random_pixels(draws[:, n_lines:], images)


def _count_share(p: dict[str, Any], pixels: int) -> int:
    return round(p["share"] * pixels)


CORRUPTIONS = {
    "noisy-digits": Corruption(("share",), _count_share, _flip, lambda p, on: [on]),
    "occluded-digits": Corruption(
        ("patch", "value"),
        lambda p, pixels: 2,
        compiled.occlude,
        lambda p, on: [*p["patch"], p["value"] * on],
    ),
    "bordered-digits": Corruption(
        ("width",), lambda p, pixels: 4, compiled.draw_border, lambda p, on: [p["width"], on]
    ),
    "patched-digits": Corruption(
        ("patch",),
        lambda p, pixels: 2 + -(-math.prod(p["patch"]) // 32),
        compiled.scatter,
        lambda p, on: [*p["patch"], on],
    ),
    "gridded-digits": Corruption(
        ("pitch",), lambda p, pixels: 2, compiled.draw_grid_lines, lambda p, on: [p["pitch"], on]
    ),
    "cluttered-digits": Corruption(
        ("lines",), lambda p, pixels: 3 * p["lines"], compiled.draw_lines, lambda p, on: [on]
    ),
    "deleted-digits": Corruption(
        ("share", "lines"),
        lambda p, pixels: 2 * p["lines"] + _count_share(p, pixels),
        _delete,
        lambda p, on: [p["lines"]],
    ),
}


class CorruptedImages:
    """`Generator` of copies, corrupted or clean, of the images of a base set."""

    def __init__(self, base: Dataset, parameters: dict[str, Any]) -> None:
        self._base, self._p = base, parameters
        self._kind: str = parameters["importer"]
        self._first, last = parameters["base_rows"]
        self._n_bases = last - self._first
        self.columns: dict[str, Any] = {"feature_shape": base.feature_shape, "dtype": np.uint8}
        if base.has_y:
            self.columns["y_dtype"] = base.read_y(0, 1).dtype

    def rows(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Return images uint8 (stop - start, h, w), and the labels of the base images that they copy."""
        shape = self._base.feature_shape
        out = np.empty((stop - start, *shape), np.uint8)
        labels = np.empty(stop - start, self.columns["y_dtype"]) if self._base.has_y else None
        row = start
        while row < stop:
            base = self._first + row % self._n_bases
            count = min(stop - row, self._first + self._n_bases - base)
            for a, b in self._base.pieces(base, base + count):  # each chunk of the base is read once
                part = slice(row - start, row - start + b - a)
                images = self._base.read_x(a, b).reshape(b - a, *shape)
                if self._p["threshold"] is None:
                    out[part] = images
                else:
                    np.greater(images, self._p["threshold"], out=out[part].view(np.bool_))
                if labels is not None:
                    labels[part] = self._base.read_y(a, b)
                row += b - a
        for first in range(0, stop - start, _BATCH_ROWS):
            self._corrupt(start + first, out[first : first + _BATCH_ROWS])
        return out, labels

    def _corrupt(self, start: int, images: np.ndarray) -> None:
        if self._kind not in CORRUPTIONS:  # the clean images
            return
        kind, p, on = CORRUPTIONS[self._kind], self._p, 255 if self._p["threshold"] is None else 1
        rows = np.arange(start, start + len(images))
        draws = draw_for_rows(rows, kind.n_draws(p, images[0].size), p["seed"], self._kind)
        kind.kernel(draws, np.array(kind.settings(p, on)), images)


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
    **options: Unpack[MakeOptions],
) -> tuple[Dataset, Dataset]:
    """Write corrupted images, and the clean images as a second dataset with the same order of rows.

    Parameters
    ----------
    url : str
        Dataset of the corrupted images.
    kind : str
        'noisy-digits': flip pixels. 'occluded-digits': set a patch to one value. 'bordered-digits': draw a
        border. 'patched-digits': draw a patch of random pixels. 'gridded-digits': draw a grid of lines.
        'cluttered-digits': draw lines from edge to edge. 'deleted-digits': turn rows, columns and pixels off.
    base : str
        'digits' (scikit-learn's) or the url of a dataset of uint8 images; its labels are copied.
    base_rows : (int, int), optional
        Bases `A:B` from which images derive; all by default.
    rows : int, optional
        Number of images, one of each base by default. More start again at base A with other corruptions.
    clean : str, optional
        Dataset of the clean images; by default next to `url`, with `.clean` in its name. If it already holds
        exactly these images it is kept, also with `overwrite`, so several corruptions can share it.
    share : float
        For noisy and deleted images: share of the pixels that are flipped or off, exact in each image.
    patch : (int, int)
        For occluded and patched images: height and width of the patch, which is whole inside the image.
    value : {0, 1}
        For occluded images: value of the pixels in the patch.
    width : int
        For bordered images: maximum width of the border, in pixels; each side of an image draws its own.
    pitch : int
        For gridded images: pixels from one line to the next; an image draws the position of its first lines.
    lines : int
        For cluttered images: number of crossing lines. For deleted images: number of rows, and of columns,
        that are off.
    threshold : int, optional
        A pixel above it becomes 1. None: keep grey values; drawn pixels are 255, a flipped pixel 255 - v.
    seed : int
        Seed of the corruption, at least 0.
    **options
        See `make_digits`.

    Returns
    -------
    corrupted, clean : Dataset
        A job file names the first as `train` and the second as `target`.

    Raises
    ------
    DataError
        A parameter out of range, a base that has no uint8 images, or an output that exists.

    Examples
    --------
    >>> noisy, clean = make_corrupted("memory://doc-noisy", "noisy-digits", overwrite=True)
    >>> np.unique((noisy.read_x(0, 100) != clean.read_x(0, 100)).sum(axis=1)).tolist()  # 10 % of 64
    [6]
    """
    location = locate(url)
    clean_location = locate(url_of_clean_images(location.url) if clean is None else clean)
    place, clean_place = location.url, clean_location.url
    if contains(location, clean_location) or contains(clean_location, location):
        raise DataError(f"{place} cannot hold both the corrupted and the clean images; give another --clean")
    ds = open_base(base_name(base, place), place)
    open_base(base_name(base, clean_place), clean_place)  # checks that the base is neither of the outputs
    first, last = check_base_rows(base_rows, ds.n_rows)
    if kind not in CORRUPTIONS:
        raise DataError(f"there is no corruption {kind!r}; the corruptions are {', '.join(CORRUPTIONS)}")
    values: dict[str, Any] = {
        "share": share,
        "patch": [int(p) for p in patch],
        "value": int(value),
        "width": int(width),
        "pitch": int(pitch),
        "lines": int(lines),
    }
    corruption = {name: values[name] for name in CORRUPTIONS[kind].options}
    _check_parameters(kind, corruption, threshold, seed, ds.feature_shape)

    def parameters(importer: str, at: str) -> dict[str, Any]:
        base_values = {"base": base_name(base, at), "base_fingerprint": ds.fingerprint()}
        return {"importer": importer, **base_values, "base_rows": [first, last], "threshold": threshold}

    def half_options(half: int) -> MakeOptions:
        """Return the options for the first (0) or the second (1) dataset, each half of the progress."""
        return {**options, "progress": half_progress(options.get("progress"), half)}

    n_rows = last - first if rows is None else rows
    if not options.get("resume"):
        check_room(location, options.get("overwrite", False))
    clean_parameters = parameters("clean-digits", clean_place)
    # Write the clean images first, so that a failure to write them is found before images are corrupted.
    clean_options = half_options(0)
    if _holds_rows(clean_place, n_rows, clean_parameters):
        clean_options = {**clean_options, "resume": True, "overwrite": False, "shard_rows": None}
    else:
        clean_options = {**clean_options, "resume": not options.get("overwrite", False)}
    cleaned = make_rows(clean_place, n_rows, clean_parameters, **clean_options)
    corrupted_parameters = {**parameters(kind, place), "seed": int(seed), **corruption}
    return make_rows(url, n_rows, corrupted_parameters, **half_options(1)), cleaned


def _holds_rows(url: str, n_rows: int, parameters: dict[str, Any]) -> bool:
    """Return whether a complete dataset holds the rows of these parameters."""
    try:
        ds = open_dataset(url)
    except DataError:
        return False
    provenance = {k: v for k, v in ds.attrs["provenance"].items() if k != "scalelatent"}
    return ds.n_rows == n_rows and provenance == parameters


def _check_parameters(
    kind: str, options: dict[str, Any], threshold: int | None, seed: int, shape: tuple[int, ...]
) -> None:
    """Raise `DataError` for a parameter out of range."""
    min_lines, max_lines = int(kind == "cluttered-digits"), max(shape)
    if kind == "noisy-digits":
        check_corruption("flip", math.prod(shape), rate=options["share"])
    elif not 0 <= options.get("share", 0) <= 1:
        raise DataError(f"share is {options['share']}, but the share of pixels that are off must be 0 to 1")
    if "patch" in options:
        value = options.get("value", 0)
        check_corruption("occlude", math.prod(shape), size=options["patch"], shape=shape, value=value)
    if "width" in options and not 1 <= options["width"] <= min(shape) // 2:
        raise DataError(
            f"width is {options['width']}, but a border of images of {shape[0]} x {shape[1]} pixels is 1 to "
            f"{min(shape) // 2} wide"
        )
    if "pitch" in options and not 2 <= options["pitch"] <= max_lines:
        raise DataError(f"pitch is {options['pitch']}, but lines must be 2 to {max_lines} pixels apart")
    if "lines" in options and not min_lines <= options["lines"] <= max_lines:
        raise DataError(f"lines is {options['lines']}, but {kind} need {min_lines} to {max_lines} lines")
    if threshold is not None and not 0 <= threshold <= 255:
        raise DataError(f"threshold is {threshold}, but grey values are 0 to 255")
    check_seed(seed)


def url_of_clean_images(url: str) -> str:
    """Return the default url of the clean images: the url of the corrupted images, with `.clean` in it."""
    folder, slash, name = url.rstrip("/").rpartition("/")
    stem, dot, suffix = name.rpartition(".")
    return folder + slash + (f"{stem}.clean.{suffix}" if dot and stem else f"{name}.clean")


def from_provenance(provenance: dict[str, Any], url: str) -> CorruptedImages:
    """Return the generator of a dataset of corrupted or clean images from its provenance."""
    return CorruptedImages(open_base(provenance["base"], url, provenance["base_fingerprint"]), provenance)
