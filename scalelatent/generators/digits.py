"""Deformed copies of labelled base images (as in infinite MNIST): an endless set, by index, and its writer.

The method is that of Loosli, Canu and Bottou, "Training invariant support vector machines using selective
sampling" (2007): image `i` is a base image plus its tangent images, weighted by two smooth random
displacement fields; base and fields depend on `i` only. Here a seed makes the fields, which are not the
published ones.
"""

from __future__ import annotations

import functools
import math
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.data.dataset import Dataset
from scalelatent.errors import DataError
from scalelatent.kernels.streams import check_seed
from scalelatent.storage.disk import locate

from .bases import base_name, check_base_rows, open_base
from .make import ShiftedGenerator, make_rows

if TYPE_CHECKING:
    from typing import Unpack

    from .make import MakeOptions

N_FIELDS = 1522
"""Number of displacement fields, as in the infinite MNIST of Loosli, Canu and Bottou (2007)."""
N_TEST = 10_000
"""First index of a training image; in the numbering of infinite MNIST, lower indices are the test images."""
MAX_FIELD_BYTES = 1 << 30
"""Maximum bytes of the displacement fields of one image size; 419 x 419 pixels are the largest size."""
# Maximum number of random values in memory while the displacement fields are made.
_MAX_NOISE_VALUES = 1 << 20

# Standard deviation, in pixels of a 28 x 28 image, of the Gaussian that smooths displacement fields; like the
# next two lengths it scales with the image.
_FIELD_SIGMA_PIXELS = 4.0
# Root mean square displacement along each axis, in pixels: digits bend visibly and stay legible. On MNIST
# (40,000 deformed images of 4,000 bases), a nearest-neighbour classifier has a validation error of 7.8 % at 0
# pixels, 6.4 % at 1.0, 6.3 % at 1.5 and 6.2 % at 2.5; from 2 pixels on, digits have visible halos.
_DISPLACEMENT_PIXELS = 1.5
TANGENT_SIGMA = 1.0
# Minimum sigma of a derivative filter, in pixels; narrower filters do not approximate a derivative.
MIN_SIGMA = 0.5


def gaussian_taps(sigma: float, radius: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a Gaussian and its derivative as correlation filters, float32 (2 * radius + 1)."""
    offsets = range(-radius, radius + 1)
    weights = [math.exp(-0.5 * (u / sigma) ** 2) for u in offsets]
    total = math.fsum(weights)
    slope = math.fsum(w * u * u for w, u in zip(weights, offsets, strict=True))
    smooth = np.array([w / total for w in weights], np.float32)
    derive = np.array([w * u / slope for w, u in zip(weights, offsets, strict=True)], np.float32)
    return smooth, derive


def smooth_fields(noise: np.ndarray, taps: np.ndarray) -> np.ndarray:
    """Smooth float32 noise (n, h + 2 r, w + 2 r) along both axes to (n, h, w), without border effects."""
    height, width = (s - len(taps) + 1 for s in noise.shape[1:])
    across = np.zeros((*noise.shape[:2], width), np.float32)
    for u, tap in enumerate(taps):
        across += tap * noise[:, :, u : u + width]
    out = np.zeros((len(noise), height, width), np.float32)
    for v, tap in enumerate(taps):
        out += tap * across[:, v : v + height]
    return out


@functools.lru_cache(maxsize=4)
def seeded_fields(seed: int, height: int, width: int) -> np.ndarray:
    """Return displacement fields (white noise smoothed by a Gaussian), float32 (1522, h, w), in pixels."""
    field_bytes = 4 * N_FIELDS * height * width
    if field_bytes > MAX_FIELD_BYTES:
        raise DataError(
            f"base images are {height} x {width} pixels: their {N_FIELDS} displacement fields take "
            f"{field_bytes / 1e6:,.0f} MB of memory, and {MAX_FIELD_BYTES / 1e6:,.0f} MB is the limit; scale "
            "the images down"
        )
    scale = min(height, width) / 28
    sigma = _FIELD_SIGMA_PIXELS * scale
    radius = math.ceil(3 * sigma)
    taps, _ = gaussian_taps(sigma, radius)
    noise_shape = (height + 2 * radius, width + 2 * radius)
    generator = np.random.Philox(key=np.array([check_seed(seed), 0], dtype=np.uint64))
    deviation = math.sqrt(1 / 12) * math.fsum(float(t) ** 2 for t in taps)
    fields = np.empty((N_FIELDS, height, width), np.float32)
    # A few fields at a time, because the noise takes much more memory than the fields.
    step = max(1, _MAX_NOISE_VALUES // math.prod(noise_shape))
    for first in range(0, N_FIELDS, step):
        out = fields[first : first + step]
        bits = generator.random_raw(len(out) * math.prod(noise_shape)).reshape(len(out), *noise_shape)
        noise = (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24) - np.float32(0.5)
        np.multiply(smooth_fields(noise, taps), np.float32(_DISPLACEMENT_PIXELS * scale / deviation), out=out)
    fields.flags.writeable = False
    return fields


class InfiniteDigits:
    """An endless set of deformed base images; image `i` depends on the seed and `i` only.

    The first `B - A` indices, from `N_TEST` on, return the base images `A:B` unchanged. A later index `i`
    returns a deformed copy of base image `A + (i - N_TEST) % (B - A)`.

    Parameters
    ----------
    base_images : uint8 (n, h, w)
        Base images.
    base_labels : (n,)
        Labels of the base images.
    seed : int
        Seed of the displacement fields.
    base_rows : (int, int), optional
        Use only these bases, `A:B`; all by default. No other base is ever read.
    alpha : float
        Strength of the deformation.

    Raises
    ------
    DataError
        Images that are not uint8 (n, h, w), another number of labels than images, or bases out of range.

    Examples
    --------
    >>> from scalelatent.generators.bases import load_base_digits
    >>> images, labels = load_base_digits()
    >>> digits = InfiniteDigits(images, labels, base_rows=(0, 1000))
    >>> x, y = digits.rows(1_000_000, 1_000_003)
    >>> x.shape, bool((y == labels[digits.base_of(np.arange(1_000_000, 1_000_003))]).all())
    ((3, 8, 8), True)
    """

    def __init__(
        self,
        base_images: np.ndarray,
        base_labels: np.ndarray,
        *,
        seed: int = 0,
        base_rows: tuple[int, int] | None = None,
        alpha: float = 1.0,
    ) -> None:
        images, labels = np.asarray(base_images), np.asarray(base_labels)
        if images.ndim != 3 or images.dtype != np.uint8 or len(images) == 0:
            raise DataError(
                f"base images have shape {images.shape} and dtype {images.dtype}; uint8 (n, height, width) "
                "is needed"
            )
        if labels.shape != (len(images),):
            raise DataError(
                f"{len(images)} base images, but labels of shape {labels.shape}: one label an image"
            )
        self.base_rows = check_base_rows(base_rows, len(images))
        a, b = self.base_rows
        self._images, self._labels = np.ascontiguousarray(images[a:b]), labels[a:b]
        self.seed, self._alpha = check_seed(seed), np.float32(alpha)
        height, width = self.image_shape
        self._fields = seeded_fields(seed, height, width)
        sigma = max(MIN_SIGMA, TANGENT_SIGMA * min(height, width) / 28)
        self._smooth, self._derive = gaussian_taps(sigma, math.ceil(3 * sigma))

    @property
    def image_shape(self) -> tuple[int, int]:
        return self._images.shape[1], self._images.shape[2]

    def base_of(self, index: np.ndarray) -> np.ndarray:
        """Return the row, in the whole base set, of the base image from which each index derives."""
        a, b = self.base_rows
        return a + (np.asarray(index) - N_TEST) % (b - a)

    def fields_of(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers (k1, k2) of the two displacement fields of each index.

        The formula is that of the infinite-MNIST program of Loosli, Canu and Bottou (2007).
        """
        i = np.asarray(index, dtype=np.uint64)
        n_fields = np.uint64(len(self._fields))
        k1 = (i * np.uint64(131_071)) % np.uint64(2**32) % (n_fields - np.uint64(1))
        k2 = (k1 + np.uint64(1) + np.uint64(2) * i) % n_fields
        return k1.astype(np.int64), k2.astype(np.int64)

    def rows(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return images uint8 (stop - start, h, w) and labels (stop - start,) of the indices `start:stop`.

        Raises
        ------
        DataError
            An index below `N_TEST`.
        """
        from .digit_kernels import render  # numba takes a second to load

        if start < N_TEST or stop < start:
            raise DataError(
                f"infinite digits {start}:{stop}: indices begin at {N_TEST}; lower indices are the test "
                "images, which no training set may hold"
            )
        index = np.arange(start, stop)
        base = self.base_of(index) - self.base_rows[0]
        k1, k2 = self.fields_of(index)
        k1 = np.where(index < N_TEST + len(self._images), -1, k1)  # the first images are unchanged bases
        out = np.empty((stop - start, *self.image_shape), np.uint8)
        render(self._images, base, k1, k2, self._fields, self._smooth, self._derive, self._alpha, out)
        return out, self._labels[base]


def make_digits(
    url: str | os.PathLike[str],
    rows: int,
    *,
    base: str | os.PathLike[str] = "digits",
    base_rows: tuple[int, int] | None = None,
    start: int | None = None,
    seed: int = 0,
    alpha: float = 1.0,
    **options: Unpack[MakeOptions],
) -> Dataset:
    """Write deformed copies of labelled base images (as in infinite MNIST), several shards at a time.

    Parameters
    ----------
    url : str
        Dataset to write.
    rows : int
        Number of images.
    base : str
        'digits' (scikit-learn's, their values 0 to 16 stretched to 0 to 255) or the url of a dataset of
        uint8 images with labels.
    base_rows : (int, int), optional
        Bases `A:B` from which images derive; all by default.
    start : int, optional
        First index; `N_TEST` by default, so that the first rows are the bases unchanged.
    seed, alpha
        See `InfiniteDigits`.
    **options
        Options of all functions that make datasets. `n_jobs` (int): threads, each of which writes its own
        shards; all cores by default. `resume` (bool): keep existing shards of an interrupted call with the
        same arguments. `overwrite` (bool): replace the dataset at `url`. `progress` (callable): called with
        (rows done, total rows). `shard_rows` (int): rows of a shard.

    Returns
    -------
    Dataset
        Images uint8, and their labels.

    Raises
    ------
    DataError
        The output exists, the base has no uint8 images with labels, or the disk is full.

    Examples
    --------
    >>> make_digits("memory://doc-digits", 500, base_rows=(0, 100), overwrite=True)
    <Dataset 500 rows x (8, 8) uint8, 10 classes, 'memory://doc-digits'>
    """
    if start is not None and start < N_TEST:
        raise DataError(
            f"start is {start}, but infinite digits begin at index {N_TEST}; lower indices are the test "
            "images, which no training set may hold"
        )
    place = locate(url).url
    ds = open_base(base_name(base, place), place)
    parameters: dict[str, Any] = {
        "importer": "digits",
        "base": base_name(base, place),
        "start": N_TEST if start is None else start,
        "seed": seed,
        "alpha": alpha,
        "base_fingerprint": ds.fingerprint(),
        "base_rows": list(check_base_rows(base_rows, ds.n_rows)),
    }
    return make_rows(url, rows, parameters, **options)


def from_provenance(p: dict[str, Any], url: str) -> ShiftedGenerator:
    """Return the generator of a dataset of `make_digits`, whose provenance is `p`."""
    ds = open_base(p["base"], url, p["base_fingerprint"])
    if not ds.has_y:
        raise DataError(f"base {ds.url} has no labels; infinite digits need images with labels")
    a, b = p["base_rows"]
    labels = ds.read_y(a, b)
    digits = InfiniteDigits(
        ds.read_x(a, b).reshape(b - a, *ds.feature_shape),
        labels,
        seed=p["seed"],
        alpha=p["alpha"],
    )
    columns = {"feature_shape": digits.image_shape, "dtype": np.uint8, "y_dtype": labels.dtype}
    return ShiftedGenerator(digits.rows, p["start"], columns)
