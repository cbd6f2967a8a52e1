"""Binary image sets for hierarchical compositional networks: shapes at random places, with noise.

The sets are those of Lázaro-Gredilla, Liu, Phoenix and George, "Hierarchical compositional feature learning"
(2016), sections 4.1 to 4.3: two bars (25 crossings), symbols, letters (clean or noisy), a page of text, and
two traits. The paper gives no sizes; those here are ours. Each image, and the places of its shapes, depends
on (seed, row) only.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.data.dataset import Dataset
from scalelatent.errors import DataError
from scalelatent.kernels.streams import check_seed, random_words

from . import glyphs
from .make import MakeOptions, make_rows

if TYPE_CHECKING:
    import numpy.typing as npt

DEFAULTS: dict[str, dict[str, Any]] = {
    "bars": {"noise": 0.03, "crosses": 5, "length": 5},
    "symbols": {"noise": 0.0, "size": [64, 64], "count": 16},
    "letters": {"noise": 0.03, "size": [24, 24], "count": 5, "alphabet": "ABCDEFGHIJKLMNOPQRSTUVWXYZ"},
    "text": {"noise": 0.0, "size": [72, 128]},
    "traits": {"noise": 0.001, "size": 13, "gap": 2, "together": False, "labels": "category"},
}
"""Options of each set with their defaults; its keys are the kinds of sets."""
GREY_OPTIONS = ("blur", "grain")
"""Options of the image set 'traits' that make its images grey; both are 0 (not grey) by default."""
# Smallest height and width, in pixels, of the drawings in the image set 'traits'. One drawing is a square
# with four holes, which needs this number of pixels.
_MIN_TRAIT = 5
# Number of rows that are made at a time.
_BATCH_ROWS = 1024

_WORDS = """
THE OF AND TO IN A IS THAT FOR IT AS WAS WITH BE BY ON NOT HE HIS BUT AT ARE THIS HAVE FROM HAD THEY
WHICH ONE YOU WERE HER ALL THERE WOULD THEIR WE HIM BEEN HAS WHEN WHO WILL MORE NO IF OUT SO SAID
WHAT UP ITS ABOUT INTO THAN THEM CAN ONLY OTHER NEW SOME COULD TIME THESE TWO MAY THEN DO FIRST ANY
MY NOW SUCH LIKE OUR OVER MAN ME EVEN MOST MADE AFTER ALSO DID MANY BEFORE MUST THROUGH YEARS WHERE
MUCH YOUR WAY WELL DOWN SHOULD BECAUSE EACH JUST THOSE PEOPLE HOW TOO LITTLE STATE GOOD VERY MAKE
WORLD STILL OWN SEE WORK LONG GET HERE BETWEEN BOTH LIFE BEING UNDER NEVER DAY SAME ANOTHER KNOW
WHILE LAST MIGHT GREAT OLD YEAR OFF COME SINCE AGAINST GO CAME RIGHT USED TAKE THREE QUIZ JAZZ EXACT
BOX FIX JUDGE QUICK ZERO
"""
VOCABULARY = tuple(_WORDS.split())
"""Words of the text pages, most frequent first."""


def parameters_of(kind: str, seed: int, options: dict[str, Any]) -> dict[str, Any]:
    """Return all parameters of a set as JSON values.

    The drawings of its shapes are included, so that a later change of the font does not change the images.
    """
    if kind not in DEFAULTS:
        raise DataError(f"there is no image set {kind!r}; the sets are {', '.join(DEFAULTS)}")
    given = {k: v for k, v in options.items() if v is not None}
    known = [*DEFAULTS[kind], *(GREY_OPTIONS if kind == "traits" else ())]
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise DataError(f"{kind} has no option {unknown[0]!r}; it has {', '.join(known)}")
    p: dict[str, Any] = {"importer": kind, "seed": int(seed), **DEFAULTS[kind], **given}
    check_seed(seed)
    if not 0 <= p["noise"] <= 1:
        raise DataError(f"noise is {p['noise']}, but the probability of a flipped pixel must be 0 to 1")
    for name in ("crosses", "length", "count", "gap"):
        if name in p and not (name != "gap") <= p[name] <= 1000:
            raise DataError(f"{name} is {p[name]}, but it must be {int(name != 'gap')} to 1000")
    if kind == "traits":
        p["size"] = int(p["size"])
        if not _MIN_TRAIT <= p["size"] <= 1000:
            raise DataError(f"size is {p['size']}, but traits are {_MIN_TRAIT} to 1000 pixels wide")
        grey = {name: int(p.pop(name, 0)) for name in GREY_OPTIONS}
        if not (0 <= grey["blur"] <= 100 and 0 <= grey["grain"] <= 255):
            raise DataError(
                f"blur is {grey['blur']} and grain {grey['grain']}, but images are blurred 0 to 100 times, "
                "and their grey values change by 0 to 255"
            )
        if any(grey.values()):
            p |= grey
    elif "size" in p:
        p["size"] = [int(s) for s in p["size"]]
    return {**p, "features": _features(kind, p)}


def _features(kind: str, p: dict[str, Any]) -> dict[str, list[str]]:
    if kind == "bars":
        return glyphs.draw_bars(p["length"])
    if kind == "symbols":
        return glyphs.SYMBOLS
    if kind == "traits":
        return glyphs.draw_traits(p["size"])
    wanted = p.get("alphabet", "".join(glyphs.LETTERS)).upper()
    absent = [c for c in wanted if c not in glyphs.LETTERS]
    if absent or not wanted or len(set(wanted)) < len(wanted):
        raise DataError(f"alphabet is {wanted!r}, but it must be different letters A to Z")
    return {c: glyphs.LETTERS[c] for c in wanted}


class ImageSet:
    """An endless set of binary images; row `i` depends on the parameters and `i` only.

    `image_set` makes it from parameters, and `image_set_of` from a dataset.

    Examples
    --------
    >>> letters = image_set("letters", alphabet="HI", noise=0.0)
    >>> x, _ = letters.rows(1000, 1002)
    >>> x.shape, letters.names, letters.features.shape
    ((2, 24, 24), ['H', 'I'], (2, 7, 5))
    >>> letters.truth(1000, 1002).shape  # feature, top and left of five letters in each image
    (2, 5, 3)
    """

    image_shape: tuple[int, int]
    """(height, width)."""

    def __init__(self, parameters: dict[str, Any]) -> None:
        self.kind: str = parameters["importer"]
        self.parameters = parameters
        self.seed, self.noise = int(parameters["seed"]), float(parameters["noise"])
        self.names: list[str] = list(parameters["features"])
        shapes = glyphs.draw_bitmaps(parameters["features"])
        self._sizes = np.array([b.shape for b in shapes], dtype=np.int64)
        self.features = np.zeros((len(shapes), *self._sizes.max(axis=0)), np.uint8)
        """Features, uint8 (n_features, h, w); smaller ones are padded with zeros."""
        for feature, bits in zip(self.features, shapes, strict=True):
            feature[: bits.shape[0], : bits.shape[1]] = bits
        self._n_draws = 0
        """Random numbers for each row, without those that decide which pixels the noise flips."""

    @property
    def columns(self) -> dict[str, Any]:
        return {"feature_shape": self.image_shape, "dtype": np.uint8}

    @property
    def n_pixels(self) -> int:
        return math.prod(self.image_shape)

    def rows(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Return images uint8 (stop - start, h, w) of 0 and 1, and labels or None."""
        return self._make_images(start, stop, self.noise)

    def clean(self, start: int, stop: int) -> np.ndarray:
        """Return the images of `rows` without noise."""
        return self._make_images(start, stop, 0.0)[0]

    def truth(self, start: int, stop: int) -> np.ndarray:
        """Return the shapes in each image, int16 (stop - start, count, 3).

        The three numbers are the index of a drawing in `features`, its top row and its left column; the index
        is -1 for no shape.
        """
        return np.concatenate([self._choose_placements(self._draws(a, b)) for a, b in _batches(start, stop)])

    def _make_images(self, start: int, stop: int, noise: float) -> tuple[np.ndarray, np.ndarray | None]:
        from .image_kernels import flip

        out = np.empty((stop - start, *self.image_shape), np.uint8)
        labels = np.empty(stop - start, np.uint8) if "y_dtype" in self.columns else None
        threshold = np.array([round(noise * 2**32)], np.uint64)
        for a, b in _batches(start, stop):
            draws, images = self._draws(a, b), out[a - start : b - start]
            self._render(draws, images)
            if noise:
                flip(np.ascontiguousarray(draws[:, -self.n_pixels :]), threshold, images.reshape(b - a, -1))
            if labels is not None:
                labels[a - start : b - start] = self._compute_labels(draws)
        return out, labels

    def _render(self, draws: np.ndarray, out: np.ndarray) -> None:
        from .image_kernels import draw_features

        draw_features(self._choose_placements(draws), self.features, out)

    def _draws(self, start: int, stop: int) -> np.ndarray:
        """Return uniform random uint32 (rows, draws); with noise, the last draws decide which pixels flip."""
        count = self._n_draws + (self.n_pixels if self.noise else 0)
        return draw_uint32(self.seed, self.kind, start, stop, count)

    def _choose_placements(self, draws: np.ndarray) -> np.ndarray:
        """Return the shapes and places in each image, chosen by the random numbers `draws`; see `truth`."""
        raise NotImplementedError

    def _compute_labels(self, draws: np.ndarray) -> np.ndarray:
        """Return the labels of rows from their draws; only sets with labels have this method."""
        raise NotImplementedError


def draw_uint32(seed: int, purpose: str, start: int, stop: int, count: int) -> np.ndarray:
    """Return `count` uniform draws of each of the rows `start:stop`, uint32 (rows, count)."""
    words = -(-count // 2)
    flat = random_words(seed, purpose, start * words, (stop - start) * words)
    halves = flat.astype("<u8", copy=False).view("<u4").astype(np.uint32, copy=False)
    return np.ascontiguousarray(halves.reshape(stop - start, 2 * words)[:, :count])


def _batches(start: int, stop: int) -> list[tuple[int, int]]:
    return [(a, min(a + _BATCH_ROWS, stop)) for a in range(start, stop, _BATCH_ROWS)]


def _scale_draws(draws: np.ndarray, n: npt.ArrayLike) -> np.ndarray:
    """Map uniform uint32 draws to uniform integers from 0 to n - 1, int64."""
    return ((draws.astype(np.uint64) * np.asarray(n, np.uint64)) >> np.uint64(32)).astype(np.int64)


class ScatteredShapes(ImageSet):
    """Image sets 'symbols' and 'letters': random shapes at random places, completely inside the image."""

    def __init__(self, parameters: dict[str, Any]) -> None:
        super().__init__(parameters)
        self.image_shape = _image_shape(parameters["size"], self._sizes.max(axis=0), self.kind)
        self._count = int(parameters["count"])
        self._n_draws = 3 * self._count

    def _choose_placements(self, draws: np.ndarray) -> np.ndarray:
        feature, top, left = np.moveaxis(draws[:, : self._n_draws].reshape(len(draws), self._count, 3), 2, 0)
        chosen = _scale_draws(feature, len(self.names))
        room = np.array(self.image_shape) - self._sizes[chosen] + 1
        return np.stack(
            [chosen, _scale_draws(top, room[..., 0]), _scale_draws(left, room[..., 1])], axis=2
        ).astype("i2")


class CrossedBars(ImageSet):
    """Image set 'bars': a grid of crosses. Each of the two bars of a cross has one of `length` positions."""

    def __init__(self, parameters: dict[str, Any]) -> None:
        super().__init__(parameters)
        self._side, self._length = int(parameters["crosses"]), int(parameters["length"])
        self.image_shape = (self._side * (self._length + 2),) * 2
        self._n_draws = -(-(self._side**2) // self._length**2) * self._length**2

    def _choose_placements(self, draws: np.ndarray) -> np.ndarray:
        kinds = self._length**2
        # Sorting random draws shuffles all combinations; equal draws keep their order.
        deals = draws[:, : self._n_draws].reshape(len(draws), -1, kinds)
        pattern = np.argsort(deals, axis=2, kind="stable").reshape(len(draws), -1)[:, : self._side**2]
        cell = np.arange(self._side**2)
        top, left = (1 + (self._length + 2) * at for at in divmod(cell, self._side))
        across, down = divmod(pattern, self._length)
        ones = np.ones_like(pattern)
        horizontal = np.stack([0 * ones, top + across, left * ones], axis=2)
        vertical = np.stack([ones, top * ones, left + down], axis=2)
        return np.concatenate([horizontal, vertical], axis=1).astype("i2")


class TextPages(ImageSet):
    """Image set 'text': pages of lines of common English words, with frequencies by Zipf's law."""

    def __init__(self, parameters: dict[str, Any]) -> None:
        super().__init__(parameters)
        self.image_shape = _image_shape(parameters["size"], self._sizes.max(axis=0) + 2, self.kind)
        number = {name: i for i, name in enumerate(self.names)}
        weights = np.array([2**40 // rank for rank in range(1, len(VOCABULARY) + 1)], dtype=object)
        cumulative = np.cumsum(weights)
        # Cumulative probabilities are integers, identical on every machine. The last one, 2**32 - 1,
        # is dropped, so that the largest draw, which equals it, selects the last word.
        self._likelihood = np.array([c * (2**32 - 1) // cumulative[-1] for c in cumulative], np.uint32)[:-1]
        self._letters = np.array([number[c] for word in VOCABULARY for c in word], np.int64)
        self._starts = np.cumsum([0, *map(len, VOCABULARY)]).astype(np.int64)
        lines = -(-self.image_shape[0] // self._pitch)
        self._capacity = lines * (self.image_shape[1] // 4 + 1)
        self._n_draws = lines * (self.image_shape[1] // 7 + 2)

    @property
    def _pitch(self) -> int:
        return int(self._sizes[:, 0].max()) + 2

    def _choose_placements(self, draws: np.ndarray) -> np.ndarray:
        from .image_kernels import typeset

        out = np.empty((len(draws), self._capacity, 3), np.int16)
        page = np.array([*self.image_shape, self._pitch])
        drawn = np.ascontiguousarray(draws[:, : self._n_draws])
        typeset(drawn, self._likelihood, self._starts, self._letters, self._sizes, page, out)
        return out


class TwoTraits(ImageSet):
    """Image set 'traits': images of two shapes, first a square or a circle, and second one of two diagonals.

    Grey images (appendix B of Lázaro-Gredilla et al., 2016) are blurred binary images with random noise.
    """

    _CLASSES = ("category", "pattern")

    def __init__(self, parameters: dict[str, Any]) -> None:
        super().__init__(parameters)
        size = int(self._sizes.max())
        self._left = 0 if parameters["together"] else size + int(parameters["gap"])
        self.image_shape = (size + 4, size + 4 + self._left)
        self._by_pattern = parameters["labels"] == "pattern"
        if parameters["labels"] not in self._CLASSES:
            raise DataError(f"labels is {parameters['labels']!r}, but it must be one of {self._CLASSES}")
        self._n_draws = 4 + self.n_pixels
        self._grey = [int(parameters.get(name, 0)) for name in GREY_OPTIONS]

    def rows(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Return images uint8 (stop - start, h, w) of 0 and 1, or grey, and labels."""
        from .image_kernels import make_grey

        out, labels = super().rows(start, stop)
        if any(self._grey):
            for a, b in _batches(start, stop):
                draws = draw_uint32(self.seed, "grain of traits", a, b, self.n_pixels)
                make_grey(draws, np.array(self._grey), out[a - start : b - start])
        return out, labels

    @property
    def columns(self) -> dict[str, Any]:
        return {**super().columns, "y_dtype": np.uint8}

    def _compute_labels(self, draws: np.ndarray) -> np.ndarray:
        """Return the label of each row: pattern (0 to 3), or category (0 or 1, the XOR of both shapes)."""
        shape, diagonal = _scale_draws(draws[:, :2], 2).T
        return 2 * shape + diagonal if self._by_pattern else shape ^ diagonal

    def _choose_placements(self, draws: np.ndarray) -> np.ndarray:
        which = _scale_draws(draws[:, :2], 2) + np.array([0, 2])
        way = _scale_draws(draws[:, 2:4], 9)
        left = np.array([0, self._left]) + 1 + way % 3
        return np.stack([which, 1 + way // 3, left], axis=2).astype("i2")

    def _render(self, draws: np.ndarray, out: np.ndarray) -> None:
        from .image_kernels import jitter_pixels

        whole = np.empty_like(out)
        super()._render(draws, whole)
        jitter_pixels(np.ascontiguousarray(draws[:, 4 : 4 + self.n_pixels]), whole, out)


_SETS: dict[str, type[ImageSet]] = {
    "bars": CrossedBars,
    "symbols": ScatteredShapes,
    "letters": ScatteredShapes,
    "text": TextPages,
    "traits": TwoTraits,
}


def make_images(
    url: str | os.PathLike[str],
    kind: str,
    rows: int,
    *,
    seed: int = 0,
    **options: Any,
) -> Dataset:
    """Write a binary image set to a dataset: uint8 images of 0 and 1, or grey; only 'traits' has labels.

    Parameters
    ----------
    url : str
        Dataset to write.
    kind, seed
        See `image_set`.
    rows : int
        Number of images; a longer set begins with the same images.
    **options
        Options of the set, see `image_set`, and of all functions that make datasets, see `make_digits`.

    Returns
    -------
    Dataset
        Images; `image_set_of` returns the shapes in the images and their places.

    Raises
    ------
    DataError
        As `image_set`; the output exists, or the disk is full.

    Examples
    --------
    >>> make_images("memory://doc-letters", "letters", 1000, alphabet="ABC", overwrite=True)
    <Dataset 1,000 rows x (24, 24) uint8, 'memory://doc-letters'>
    """
    how = {name: options.pop(name) for name in MakeOptions.__annotations__ if name in options}
    return make_rows(url, rows, parameters_of(kind, seed, options), **how)


def _image_shape(size: Any, smallest: np.ndarray, kind: str) -> tuple[int, int]:
    """Return height and width; raise `DataError` if they are too small or too large."""
    height, width = (int(s) for s in size)
    if height < smallest[0] or width < smallest[1]:
        raise DataError(
            f"{kind} of size {height} x {width}: its features need at least {smallest[0]} x {smallest[1]} "
            "pixels"
        )
    if max(height, width) > 8192:
        raise DataError(f"{kind} of size {height} x {width}: at most 8192 pixels a side can be made")
    return height, width


def image_set(kind: str, *, seed: int = 0, **options: Any) -> ImageSet:
    """Return an endless set of binary images.

    Parameters
    ----------
    kind : {'bars', 'symbols', 'letters', 'text', 'traits'}
        Name of the set.
    seed : int
        At least 0.
    **options
        Options of the set; `DEFAULTS` has their defaults. All sets: `noise`, the probability of a flipped
        pixel. bars: `crosses` on a side, `length`. symbols, letters: `size` (height, width), `count` in an
        image; letters: `alphabet`. text: `size`. traits: `size` of a trait, `gap` between them, `together`
        (in one place), `labels` 'category' or 'pattern'; for grey images of 0 to 255 `blur`, the number of
        blurs over 3 x 3 pixels, and `grain`, the largest random change of a grey value.

    Returns
    -------
    ImageSet

    Raises
    ------
    DataError
        An unknown set or option, or a value out of range.

    Examples
    --------
    >>> for line in image_set("bars", crosses=1, noise=0).rows(4, 5)[0][0, 1:-1, 1:-1]:
    ...     print("".join("-#"[bit] for bit in line))
    ---#-
    ---#-
    #####
    ---#-
    ---#-
    """
    return from_provenance(parameters_of(kind, seed, options), "")


def from_provenance(provenance: dict[str, Any], url: str) -> ImageSet:
    return _SETS[provenance["importer"]](provenance)


def image_set_of(ds: Dataset) -> ImageSet:
    """Return the image set that `make_images` wrote to a dataset, with the shapes in each image (`truth`).

    Raises
    ------
    DataError
        The dataset is not one that `make_images` made.

    Examples
    --------
    >>> from scalelatent.data import make_images
    >>> ds = make_images("memory://doc-truth", "traits", 20, overwrite=True)
    >>> image_set_of(ds).names
    ['square', 'circle', 'forward', 'backward']
    """
    provenance = ds.attrs.get("provenance", {})
    if provenance.get("importer") not in _SETS:
        raise DataError(
            f"{ds.url or 'the dataset'} holds no binary image set (its provenance has the importer "
            f"{provenance.get('importer')!r}); make one with `scalelatent data make letters`"
        )
    return from_provenance(provenance, str(ds.url))
