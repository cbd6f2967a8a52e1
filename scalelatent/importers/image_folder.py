"""A folder of image files: decoded by several threads, in order, a shard at a time."""

from __future__ import annotations

import io
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dask.system
import numpy as np

from scalelatent.data.dataset import Dataset
from scalelatent.errors import DataError

from .stream import Beside, Progress, RowReader, write_rows

if TYPE_CHECKING:
    from typing import Unpack

    from PIL import Image

    from scalelatent.data.schema import LayoutOptions

FORMATS = {
    "BMP": (".bmp",),
    "GIF": (".gif",),
    "JPEG": (".jpg", ".jpeg", ".jpe"),
    "JPEG2000": (".jp2", ".j2k"),
    "PNG": (".png",),
    "PPM": (".ppm", ".pgm", ".pbm", ".pnm"),
    "TIFF": (".tif", ".tiff"),
    "WEBP": (".webp",),
}
"""Pillow's names of the formats that are read, and how their files are called; none that runs programs."""

_SUFFIXES = {suffix for names in FORMATS.values() for suffix in names}
_NUMBER = re.compile(r"-?(0|[1-9]\d{0,17})")
_NAMES = 65_536  # file names kept as Python strings at a time


@dataclass
class ImageFolder:
    """The images below a folder: names of folders and counts, so that a folder of millions costs little."""

    root: Path
    """The folder."""
    folders: list[tuple[str, int]] = field(default_factory=list)
    """Folders that hold images, relative to the root, in order, and how many each holds."""
    other: Counter[str] = field(default_factory=Counter)
    """Suffixes of the files that are not images by their names, and how many there are of each."""

    @property
    def n_files(self) -> int:
        return sum(count for _, count in self.folders)

    def classes(self) -> np.ndarray | None:
        """Names of the folders right below the root, sorted; numbers where all are written as numbers."""
        tops = {folder.split(os.sep)[0] for folder, _ in self.folders}
        if tops == {""}:
            return None
        if "" in tops:
            n = next(count for folder, count in self.folders if folder == "")
            raise DataError(
                f"image folder {self.root} holds {n} images beside {len(tops) - 1} folders of images, so "
                "they have no class; move them into a folder, or import all without labels with --no-labels "
                "(labels=False)"
            )
        if all(_NUMBER.fullmatch(name) for name in tops):
            numbers = np.array(sorted(map(int, tops)))
            return numbers.astype(np.min_scalar_type(int(numbers[-1]))) if numbers[0] >= 0 else numbers
        return np.array(sorted(tops))

    def files(self) -> Iterator[tuple[str, str]]:
        """(name of the class folder, path relative to the root) of each image, in order."""
        for folder, count in self.folders:
            names, _, _ = _scan(self.root / folder)
            if len(names) != count:
                raise DataError(
                    f"image folder {self.root / folder} held {count} images when the import began and holds "
                    f"{len(names)} now; import again when nothing writes there"
                )
            top = folder.split(os.sep)[0]
            for name in names:
                yield top, os.path.join(folder, os.fsdecode(bytes(name)))


def list_images(root: str | os.PathLike[str]) -> ImageFolder:
    """The images below a folder, those of a folder by name before those of the folders in it."""
    found = ImageFolder(Path(root))
    if not found.root.is_dir():
        problem = "is a file, not a folder" if found.root.exists() else "does not exist"
        raise DataError(f"image folder {found.root} {problem}; give the folder that holds the class folders")
    _walk(found, "", [os.path.realpath(found.root)])
    if not found.folders:
        others = ", ".join(f"{n} {suffix or 'without suffix'}" for suffix, n in found.other.most_common(5))
        raise DataError(
            f"image folder {found.root} holds no images, that is no files named "
            f"{', '.join(sorted(_SUFFIXES))}; it holds {others or 'no files at all'}. Give the folder that "
            "holds the class folders"
        )
    return found


def _walk(found: ImageFolder, folder: str, above: list[str]) -> None:
    try:
        names, inner, other = _scan(found.root / folder)
    except OSError as error:
        raise DataError(
            f"image folder {found.root / folder} cannot be read: {error.strerror}; check its permissions"
        ) from error
    found.other.update(other)
    if len(names):
        found.folders.append((folder, len(names)))
    for name in inner:
        path = os.path.join(folder, name)
        real = os.path.realpath(found.root / path)
        if real not in above:  # a link to a folder above it would have no end
            _walk(found, path, [*above, real])


def _scan(folder: Path) -> tuple[np.ndarray, list[str], Counter[str]]:
    """Sorted names of a folder's images and of the folders in it, and the suffixes of the other files."""
    parts: list[np.ndarray] = []
    names: list[bytes] = []
    inner: list[str] = []
    other: Counter[str] = Counter()
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            suffix = os.path.splitext(entry.name)[1].lower()
            if entry.is_dir():
                inner.append(entry.name)
            elif suffix not in _SUFFIXES:
                other[suffix] += 1
            else:
                names.append(os.fsencode(entry.name))
                if len(names) == _NAMES:
                    parts.append(np.array(names))
                    names = []
    if names:
        parts.append(np.array(names))
    return np.sort(np.concatenate(parts)) if parts else np.array([], "S1"), sorted(inner), other


_BATCH = 32  # images a thread decodes at a time
_MAX_THREADS = 16
_SMALL_FILE = 8192
"""Below so many bytes opening costs more than decoding, and only one thread at a time can do that."""
_MAX_NAMED = 10  # skipped files named in the provenance


def import_images(
    folder: str | os.PathLike[str],
    url: str | os.PathLike[str],
    *,
    size: tuple[int, int] | None = None,
    crop: bool = False,
    color: str | None = None,
    labels: bool = True,
    skip_bad: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    shuffle: int | None = None,
    **layout: Unpack[LayoutOptions],
) -> Dataset:
    """Import a folder of image files; memory is bounded by a few shards and the file names of one folder.

    A row is an image, upright as its EXIF tag says: (h, w) where it is gray, (h, w, 3) in colour; uint8, or
    uint16 for 16-bit gray. Images come in the order of their paths, so class by class: most online learners
    want `shuffle`.

    Parameters
    ----------
    folder : path
        Images (BMP, GIF, JPEG, JPEG 2000, PNG, PPM, TIFF, WebP) in folders whose names are the classes, at
        any depth below them; or right in `folder`, and then without labels.
    url : str
        Where the dataset goes.
    size : (int, int), optional
        Height and width that every image is resized to (bilinear, over the whole area of a pixel); by default
        all have to have one size.
    crop : bool
        Cut out the middle of an image of another shape than `size` before resizing; by default it is
        stretched.
    color : {'gray', 'rgb'}, optional
        Make all images gray, or coloured; transparency is left out. By default they stay what they are, and
        all have to be of one kind.
    labels : bool
        Whether the folders right below `folder` are the classes. They are numbers if all are written as
        numbers (without leading zeros), else strings.
    skip_bad : bool
        Leave out images that cannot be read, or are not like the first one, and count them in the provenance
        (`skipped`); by default the first such image is an error that names it.
    overwrite, progress, shuffle, **layout
        See `import_npy`.

    Returns
    -------
    Dataset
        The images; its provenance counts the files, those skipped, and those that are not images by name.

    Raises
    ------
    DataError
        A folder that is missing, empty or without images; an image that cannot be read or is not like the
        first; images beside class folders; an output that exists. No dataset is left behind.

    Examples
    --------
    >>> import os, tempfile
    >>> from PIL import Image
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for kind in ("cat", "dog"):
    ...         os.mkdir(f"{folder}/{kind}")
    ...         Image.new("RGB", (40, 30)).save(f"{folder}/{kind}/1.png")
    ...     import_images(folder, "memory://doc-images", size=(3, 4), color="gray", overwrite=True)
    <Dataset 2 rows x (3, 4) uint8, 2 classes, 'memory://doc-images'>
    """
    decoder = image_decoder(size, crop, color)
    found = list_images(folder)
    classes = found.classes() if labels else None
    options: dict[str, Any] = {"size": None if size is None else list(size), "crop": crop, "color": color}
    options |= {"files": found.n_files, "other_files": sum(found.other.values())}
    x = _Images(found, decoder, skip_bad)
    try:
        return write_rows(
            url,
            x,
            None if classes is None else Beside(x, classes.dtype, lambda: x.labels_read(classes.dtype)),
            importer="images",
            sources=[found.root.resolve()],
            classes=classes if classes is not None and classes.dtype.kind == "U" else None,
            options=options,
            overwrite=overwrite,
            progress=progress,
            shuffle=shuffle,
            **layout,
        )
    finally:
        x.close()


class _Unusable(Exception):
    """An image that can be read, but makes no row; says why."""


class _Unlike(_Unusable):
    """An image that is not like the first one; says what it is."""


def image_decoder(size: tuple[int, int] | None, crop: bool, color: str | None) -> ImageDecoder:
    """The decoder of these wishes; refuses those that have no meaning."""
    if color not in (None, "gray", "rgb"):
        raise DataError(f"color is {color!r}, but it has to be 'gray', 'rgb' or None")
    if size is not None and (len(size) != 2 or min(size) < 1):
        raise DataError(f"size is {size!r}, but it has to be (height, width), both at least 1")
    if crop and size is None:
        raise DataError("crop needs a size: --size HxW (size=(height, width))")
    return ImageDecoder(size, crop, color)


@dataclass(frozen=True)
class ImageDecoder:
    """Makes the array of a row from the bytes of an image file."""

    size: tuple[int, int] | None
    crop: bool
    color: str | None

    def __call__(self, content: bytes) -> np.ndarray:
        from PIL import Image, ImageOps

        with Image.open(io.BytesIO(content), formats=list(FORMATS)) as opened:
            if self.size is not None or self.color == "gray":
                self._draft(opened)
            image: Image.Image = opened
            if "exif" in opened.info or opened.format == "TIFF":
                image = ImageOps.exif_transpose(opened)
            image = self._resize(self._recolor(image))
            return np.asarray(image)

    def _draft(self, image: Image.Image) -> None:
        """Let the JPEG decoder leave out colour, and what is finer than half a wanted pixel: less work."""
        side = None if self.size is None else 2 * max(self.size)
        image.draft("L" if self.color == "gray" else None, None if side is None else (side, side))

    def _recolor(self, image: Image.Image) -> Image.Image:
        if image.mode in ("I", "F") or image.mode.startswith("I;16"):
            if self.color == "rgb":
                raise _Unusable(
                    f"is gray of more than 8 bits (Pillow's mode {image.mode}), which has no colour"
                )
            return image
        if self.color is not None:
            return image.convert("L" if self.color == "gray" else "RGB")
        if image.has_transparency_data:
            raise _Unusable(
                "has transparency; choose --gray or --rgb (color='gray' or 'rgb') to leave it out"
            )
        return image if image.mode in ("L", "RGB") else image.convert("L" if image.mode == "1" else "RGB")

    def _resize(self, image: Image.Image) -> Image.Image:
        from PIL import Image, ImageOps

        if self.size is None or (image.height, image.width) == self.size:
            return image
        wanted = self.size[1], self.size[0]
        if image.mode.startswith("I;16"):  # Pillow interpolates 8 and 32 bits
            return self._resize(image.convert("I")).convert("I;16")
        if self.crop:
            return ImageOps.fit(image, wanted, Image.Resampling.BILINEAR)
        return image.resize(wanted, Image.Resampling.BILINEAR)


class _Images(RowReader):
    """The images of a folder; like the first one that can be read."""

    def __init__(self, found: ImageFolder, decoder: ImageDecoder, skip_bad: bool) -> None:
        self.name = f"image folder {found.root}"
        self._root, self._decoder, self._skip_bad = found.root, decoder, skip_bad
        self._files = found.files()
        self._first, first = self._find_first(found.files())

        small = (self._root / self._first).stat().st_size < _SMALL_FILE
        self._pool = ThreadPoolExecutor(
            min(dask.system.cpu_count(), 2 if small else _MAX_THREADS), "scalelatent-decode"
        )
        self.shape, self.dtype = (found.n_files, *first.shape), first.dtype
        self._kept = self._unreadable = self._unlike = 0
        self._skipped: list[str] = []
        self.classes_read: list[str] = []
        """Class folders of the images of the last `read`."""

    def read(self, rows: int) -> np.ndarray:
        out = np.empty((rows, *self.shape[1:]), self.dtype)
        self.classes_read = []
        filled = 0
        while filled < rows:
            files = list(itertools.islice(self._files, rows - filled))
            if not files:
                break
            filled += self._decode(files, out[filled : filled + len(files)])
        self._kept += filled
        return out[:filled]

    def labels_read(self, dtype: np.dtype) -> np.ndarray:
        names = self.classes_read
        return np.array(names if dtype.kind == "U" else [int(n) for n in names], dtype)

    def finish(self) -> None:
        """Refuse a first image that nearly all others differ from."""
        if self._unlike > self._kept:
            raise DataError(
                f"{self.name}: {self._unlike} images are not like the first, {self._first}, and only "
                f"{self._kept} are; give one size with --size HxW (size=(height, width)) or one kind with "
                "--gray or --rgb (color=), or remove the first image"
            )

    @property
    def notes(self) -> dict[str, Any]:
        """Which images were skipped, for the provenance."""
        if not self._skip_bad:
            return {}
        counts = {"unreadable": self._unreadable, "unlike_first": self._unlike}
        return {"skipped": {**counts, "first": self._skipped}}

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _find_first(self, files: Iterator[tuple[str, str]]) -> tuple[str, np.ndarray]:
        problem = ""
        for _, path in files:
            try:
                return path, self._load(path)
            except Exception as error:  # decoders raise whatever a damaged file leads to
                problem = problem or f"{path} {_reason(error)}"
                if not self._skip_bad:
                    raise self._refusal(path, error) from error
        raise DataError(f"{self.name}: none of its images can be used; the first, {problem}")

    def _load(self, path: str) -> np.ndarray:
        return self._decoder((self._root / path).read_bytes())

    def _decode(self, files: list[tuple[str, str]], out: np.ndarray) -> int:
        """Decode files into consecutive rows; return how many there are."""
        batches = [range(a, min(a + _BATCH, len(files))) for a in range(0, len(files), _BATCH)]
        bad: dict[int, Exception] = {}
        for errors in self._pool.map(lambda batch: self._decode_batch(files, batch, out), batches):
            for i, error in errors.items():
                if not self._skip_bad:
                    raise self._refusal(files[i][1], error) from error
                self._skip(files[i][1], error)
            bad |= errors
        good = [i for i in range(len(files)) if i not in bad]
        self.classes_read += [files[i][0] for i in good]
        if bad:
            out[: len(good)] = out[good]
        return len(good)

    def _decode_batch(
        self, files: list[tuple[str, str]], batch: range, out: np.ndarray
    ) -> dict[int, Exception]:
        bad: dict[int, Exception] = {}
        for i in batch:
            try:
                row = self._load(files[i][1])
                if row.shape != self.shape[1:] or row.dtype != self.dtype:
                    raise _Unlike(_describe(row.shape, row.dtype))
                out[i] = row
            except Exception as error:  # noqa: BLE001 - decoders raise whatever damaged files lead to
                bad[i] = error
        return bad

    def _skip(self, path: str, error: Exception) -> None:
        if isinstance(error, _Unusable):
            self._unlike += 1
        else:
            self._unreadable += 1
        if len(self._skipped) < _MAX_NAMED:
            self._skipped.append(path)

    def _refusal(self, path: str, error: Exception) -> DataError:
        head = f"image {self._root / path} {_reason(error)}"
        rest = "leave such images out with --skip-bad (skip_bad=True)"
        if isinstance(error, _Unlike):
            return DataError(
                f"{head}, but the first image, {self._first}, is {_describe(self.shape[1:], self.dtype)}; "
                "bring all to one size with --size HxW (size=(height, width)), to one kind with --gray or "
                f"--rgb (color=), or {rest}"
            )
        return DataError(f"{head}; replace it, or {rest}")


def _reason(error: Exception) -> str:
    from PIL import UnidentifiedImageError

    if isinstance(error, _Unlike):
        return f"is {error}"
    if isinstance(error, _Unusable):
        return str(error)
    if isinstance(error, UnidentifiedImageError):
        return f"cannot be read: it is none of {', '.join(FORMATS)}"
    return f"cannot be read: {error}"


def _describe(shape: tuple[int, ...], dtype: np.dtype) -> str:
    kind = "colour" if len(shape) == 3 else "gray"
    return f"{shape[0]} x {shape[1]} {kind} {dtype}"
