"""Import a folder of image files: several threads decode them, in order, one shard at a time."""

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

from .stream import PairedReader, RowReader, write_rows

if TYPE_CHECKING:
    from typing import Unpack

    from PIL import Image

    from .files import PathOrUrl
    from .stream import ImportOptions

IMAGE_SUFFIXES = {
    "BMP": (".bmp",),
    "GIF": (".gif",),
    "JPEG": (".jpg", ".jpeg", ".jpe"),
    "JPEG2000": (".jp2", ".j2k"),
    "PNG": (".png",),
    "PPM": (".ppm", ".pgm", ".pbm", ".pnm"),
    "TIFF": (".tif", ".tiff"),
    "WEBP": (".webp",),
}
"""Suffixes of the supported formats by Pillow's name; formats whose decoders start programs are absent."""

_SUFFIXES = {suffix for names in IMAGE_SUFFIXES.values() for suffix in names}
_INTEGER = re.compile(r"-?(0|[1-9]\d{0,17})")
# Number of images that a thread decodes at a time.
_BATCH_IMAGES = 32
_MAX_THREADS = 16
# Below this size opening a file costs more than decoding it, and only one thread at a time can open files.
_SMALL_FILE_BYTES = 8192
# Number of skipped files that the provenance names.
_MAX_SKIPPED_NAMES = 10


@dataclass
class ImageFolder:
    """Images below a folder, as folders and counts, so that millions of images need little memory."""

    root: Path
    folders: list[tuple[str, int]] = field(default_factory=list)
    """Folders that hold images, relative to the root, in order, and the number of images in each."""
    other: Counter[str] = field(default_factory=Counter)
    """Number of files of each suffix that is not an image suffix."""

    @property
    def n_files(self) -> int:
        return sum(count for _, count in self.folders)

    def classes(self) -> np.ndarray | None:
        """Return the sorted names of the folders directly below the root, as integers if all are integers.

        Return None if all images are directly in the root.
        """
        tops = {folder.split(os.sep)[0] for folder, _ in self.folders}
        if tops == {""}:
            return None
        if "" in tops:
            n = next(count for folder, count in self.folders if folder == "")
            raise DataError(
                f"image folder {self.root} holds {n} images next to {len(tops) - 1} folders of images, so "
                "they have no class; move them into a folder, or import all without labels with --no-labels "
                "(labels=False)"
            )
        if all(_INTEGER.fullmatch(name) for name in tops):
            numbers = np.array(sorted(map(int, tops)))
            return numbers.astype(np.min_scalar_type(int(numbers[-1]))) if numbers[0] >= 0 else numbers
        return np.array(sorted(tops))

    def files(self) -> Iterator[tuple[str, str]]:
        """Yield (name of the class folder, path relative to the root) of each image, in order."""
        for folder, count in self.folders:
            names, _, _ = _scan(self.root / folder)
            if len(names) != count:
                raise DataError(
                    f"image folder {self.root / folder} held {count} images when the import started and "
                    f"holds {len(names)} now; import again when nothing writes there"
                )
            top = folder.split(os.sep)[0]
            for name in names:
                yield top, os.path.join(folder, name)


def _list_images(root: PathOrUrl) -> ImageFolder:
    """List all images below a folder.

    The images directly in a folder come first, sorted by name; the images of its subfolders follow.
    """
    found = ImageFolder(Path(root))
    if not found.root.is_dir():
        problem = "is a file, not a folder" if found.root.exists() else "does not exist"
        raise DataError(f"image folder {found.root} {problem}; give the folder that holds the class folders")
    _walk(found, "", [os.path.realpath(found.root)])
    if not found.folders:
        others = ", ".join(f"{n} {suffix or 'without suffix'}" for suffix, n in found.other.most_common(5))
        raise DataError(
            f"image folder {found.root} holds no images, that is no files with the suffixes "
            f"{', '.join(sorted(_SUFFIXES))}; it holds {others or 'no files at all'}. Give the folder that "
            "holds the class folders"
        )
    return found


def _walk(found: ImageFolder, folder: str, parents: list[str]) -> None:
    """Add the images of a folder and of the folders in it; `parents` are the real paths up to the root."""
    try:
        names, inner, other = _scan(found.root / folder)
    except OSError as error:
        raise DataError(
            f"image folder {found.root / folder} cannot be read: {error.strerror}; check its permissions"
        ) from error
    found.other.update(other)
    if names:
        found.folders.append((folder, len(names)))
    for name in inner:
        path = os.path.join(folder, name)
        real = os.path.realpath(found.root / path)
        if real not in parents:  # following a link to a parent folder would not end
            _walk(found, path, [*parents, real])


def _scan(folder: Path) -> tuple[list[str], list[str], Counter[str]]:
    """Return the sorted names of a folder's images and subfolders, and the suffixes of its other files."""
    images: list[str] = []
    inner: list[str] = []
    other: Counter[str] = Counter()
    with os.scandir(folder) as entries:
        for entry in entries:
            suffix = os.path.splitext(entry.name)[1].lower()
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                inner.append(entry.name)
            elif suffix in _SUFFIXES:
                images.append(entry.name)
            else:
                other[suffix] += 1
    return sorted(images, key=os.fsencode), sorted(inner), other


def import_images(
    folder: PathOrUrl,
    url: PathOrUrl,
    *,
    size: tuple[int, int] | None = None,
    crop: bool = False,
    color: str | None = None,
    labels: bool = True,
    skip_bad: bool = False,
    **options: Unpack[ImportOptions],
) -> Dataset:
    """Import a folder of image files; memory is bounded by a few shards and the file names of one folder.

    A row is an image, rotated as its EXIF tag requires: (h, w) if it is gray, (h, w, 3) in colour; uint8, or
    uint16 for 16-bit gray. Images come in the order of their paths, so class by class: use `shuffle` before
    online learning.

    Parameters
    ----------
    folder : path
        Images (BMP, GIF, JPEG, JPEG 2000, PNG, PPM, TIFF, WebP) in folders whose names are the classes, at
        any depth below them; or directly in `folder`, and then without labels.
    url : str
        Dataset to write.
    size : (int, int), optional
        Height and width that every image is resized to (bilinear, over the whole area of a pixel); by default
        all images must have one size.
    crop : bool
        Cut out the middle of an image of another shape than `size` before resizing; by default it is
        stretched.
    color : {'gray', 'rgb'}, optional
        Convert all images to gray or to colour, and drop transparency. By default all images must be of one
        kind.
    labels : bool
        Whether the folders directly below `folder` are the classes. They are integers if all names are
        integers (without leading zeros), else strings.
    skip_bad : bool
        Skip images that cannot be read or differ from the first one in shape or dtype, and count them in the
        provenance (`skipped`); by default the first such image raises an error that names it.
    **options
        See `import_npy`.

    Returns
    -------
    Dataset
        Images; the provenance counts the files, the skipped images, and the files without an image suffix.

    Raises
    ------
    DataError
        A folder that is missing, empty or without images; an image that cannot be read or differs from the
        first in shape or dtype; images next to class folders; an output that exists. No dataset stays behind.

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
    decoder = ImageDecoder(size, crop, color)
    found = _list_images(folder)
    classes = found.classes() if labels else None
    counts = {"files": found.n_files, "other_files": sum(found.other.values())}
    x = _FolderReader(found, decoder, skip_bad)
    return write_rows(
        url,
        x,
        None if classes is None else PairedReader(x, classes.dtype, lambda: x.labels_read(classes.dtype)),
        importer="images",
        sources=[found.root.resolve()],
        classes=classes if classes is not None and classes.dtype.kind == "U" else None,
        provenance={**decoder.provenance(), **counts},
        **options,
    )


class _UnusableImage(Exception):
    """Error for an image that can be read, but cannot become a row; its message is the end of a sentence."""


class _DifferentImage(_UnusableImage):
    """Error for an image that differs from the first one in shape or dtype, which its message states."""


@dataclass(frozen=True)
class ImageDecoder:
    """Callable object that converts the bytes of an image file to the array of a row."""

    size: tuple[int, int] | None
    crop: bool
    color: str | None

    def __post_init__(self) -> None:
        if self.color not in (None, "gray", "rgb"):
            raise DataError(f"color is {self.color!r}, but it must be 'gray', 'rgb' or None")
        if self.size is not None and (len(self.size) != 2 or min(self.size) < 1):
            raise DataError(f"size is {self.size!r}, but it must be (height, width), both at least 1")
        if self.crop and self.size is None:
            raise DataError("crop needs a size: --size HxW (size=(height, width))")

    def provenance(self) -> dict[str, Any]:
        """Return the parameters as JSON values."""
        return {"size": self.size and list(self.size), "crop": self.crop, "color": self.color}

    def __call__(self, content: bytes) -> np.ndarray:
        from PIL import Image, ImageOps

        with Image.open(io.BytesIO(content), formats=list(IMAGE_SUFFIXES)) as opened:
            if self.size is not None or self.color == "gray":
                self._draft(opened)
            image: Image.Image = opened
            if "exif" in opened.info or opened.format == "TIFF":
                image = ImageOps.exif_transpose(opened)
            image = self._resize(self._recolor(image))
            return np.asarray(image)

    def _draft(self, image: Image.Image) -> None:
        """Let the JPEG decoder skip unused colours, and details that the resized image cannot show."""
        side = None if self.size is None else 2 * max(self.size)
        image.draft("L" if self.color == "gray" else None, None if side is None else (side, side))

    def _recolor(self, image: Image.Image) -> Image.Image:
        if image.mode in ("I", "F") or image.mode.startswith("I;16"):
            if self.color == "rgb":
                raise _UnusableImage(
                    f"is gray of more than 8 bits (Pillow's mode {image.mode}), which has no colour"
                )
            return image
        if self.color is not None:
            return image.convert("L" if self.color == "gray" else "RGB")
        if image.has_transparency_data:
            raise _UnusableImage(
                "has transparency; choose --gray or --rgb (color='gray' or 'rgb') to drop it"
            )
        return image if image.mode in ("L", "RGB") else image.convert("L" if image.mode == "1" else "RGB")

    def _resize(self, image: Image.Image) -> Image.Image:
        from PIL import Image, ImageOps

        if self.size is None or (image.height, image.width) == self.size:
            return image
        width_height = self.size[1], self.size[0]
        if image.mode.startswith("I;16"):  # Pillow interpolates 8 and 32 bits only
            return self._resize(image.convert("I")).convert("I;16")
        if self.crop:
            return ImageOps.fit(image, width_height, Image.Resampling.BILINEAR)
        return image.resize(width_height, Image.Resampling.BILINEAR)


class _FolderReader(RowReader):
    """Reader of the images of a folder; all rows have the shape and dtype of the first usable image."""

    def __init__(self, found: ImageFolder, decoder: ImageDecoder, skip_bad: bool) -> None:
        self.name = f"image folder {found.root}"
        self._root, self._decoder, self._skip_bad = found.root, decoder, skip_bad
        self._files = found.files()
        self._first, first = self._find_first(found.files())
        is_small = (self._root / self._first).stat().st_size < _SMALL_FILE_BYTES
        self._pool = ThreadPoolExecutor(
            min(dask.system.cpu_count(), 2 if is_small else _MAX_THREADS), "scalelatent-decode"
        )
        self.shape, self.dtype = (found.n_files, *first.shape), first.dtype
        self._n_read = self._n_unreadable = self._n_different = 0
        self._skipped: list[str] = []
        self._class_names: list[str] = []

    def read(self, rows: int) -> np.ndarray:
        out = np.empty((rows, *self.shape[1:]), self.dtype)
        self._class_names = []
        filled = 0
        while filled < rows:
            files = list(itertools.islice(self._files, rows - filled))
            if not files:
                break
            filled += self._decode(files, out[filled : filled + len(files)])
        self._n_read += filled
        return out[:filled]

    def labels_read(self, dtype: np.dtype) -> np.ndarray:
        """Return the labels of the images of the last `read`."""
        names = self._class_names
        return np.array(names if dtype.kind == "U" else [int(n) for n in names], dtype)

    def finish(self) -> None:
        """Raise `DataError` if most images differ from the first one, so that few were imported."""
        if self._n_different > self._n_read:
            raise DataError(
                f"{self.name}: {self._n_different} images are not like the first, {self._first}, and only "
                f"{self._n_read} are; give one size with --size HxW (size=(height, width)) or one kind with "
                "--gray or --rgb (color=), or remove the first image"
            )

    @property
    def notes(self) -> dict[str, Any]:
        if not self._skip_bad:
            return {}
        counts = {"unreadable": self._n_unreadable, "unlike_first": self._n_different}
        return {"skipped": {**counts, "first": self._skipped}}

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _find_first(self, files: Iterator[tuple[str, str]]) -> tuple[str, np.ndarray]:
        """Return path and array of the first image that can be used."""
        problem = ""
        for _, path in files:
            try:
                return path, self._load(path)
            except Exception as error:  # decoders raise errors of many types for a damaged file
                problem = problem or f"{path} {_describe_error(error)}"
                if not self._skip_bad:
                    raise self._refusal(path, error) from error
        raise DataError(f"{self.name}: none of its images can be used; the first, {problem}")

    def _load(self, path: str) -> np.ndarray:
        return self._decoder((self._root / path).read_bytes())

    def _decode(self, files: list[tuple[str, str]], out: np.ndarray) -> int:
        """Decode files into the first rows of `out`; skip unusable files; return the number of rows."""
        batches = [range(a, min(a + _BATCH_IMAGES, len(files))) for a in range(0, len(files), _BATCH_IMAGES)]
        skipped: set[int] = set()
        for errors in self._pool.map(lambda batch: self._decode_batch(files, batch, out), batches):
            for i, error in errors.items():
                if not self._skip_bad:
                    raise self._refusal(files[i][1], error) from error
                self._count_skipped(files[i][1], error)
            skipped |= errors.keys()
        good = [i for i in range(len(files)) if i not in skipped]
        self._class_names += [files[i][0] for i in good]
        if skipped:
            out[: len(good)] = out[good]
        return len(good)

    def _decode_batch(
        self, files: list[tuple[str, str]], batch: range, out: np.ndarray
    ) -> dict[int, Exception]:
        """Decode some of the files, each into its row of `out`; return the errors by row."""
        errors: dict[int, Exception] = {}
        for i in batch:
            try:
                row = self._load(files[i][1])
                if row.shape != self.shape[1:] or row.dtype != self.dtype:
                    raise _DifferentImage(_describe(row.shape, row.dtype))
                out[i] = row
            except Exception as error:  # noqa: BLE001 - decoders raise errors of many types
                errors[i] = error
        return errors

    def _count_skipped(self, path: str, error: Exception) -> None:
        if isinstance(error, _UnusableImage):
            self._n_different += 1
        else:
            self._n_unreadable += 1
        if len(self._skipped) < _MAX_SKIPPED_NAMES:
            self._skipped.append(path)

    def _refusal(self, path: str, error: Exception) -> DataError:
        head = f"image {self._root / path} {_describe_error(error)}"
        rest = "skip such images with --skip-bad (skip_bad=True)"
        if isinstance(error, _DifferentImage):
            return DataError(
                f"{head}, but the first image, {self._first}, is {_describe(self.shape[1:], self.dtype)}; "
                "bring all to one size with --size HxW (size=(height, width)), to one kind with --gray or "
                f"--rgb (color=), or {rest}"
            )
        return DataError(f"{head}; replace it, or {rest}")


def _describe_error(error: Exception) -> str:
    from PIL import UnidentifiedImageError

    if isinstance(error, _DifferentImage):
        return f"is {error}"
    if isinstance(error, _UnusableImage):
        return str(error)
    if isinstance(error, UnidentifiedImageError):
        return f"cannot be read: it is none of {', '.join(IMAGE_SUFFIXES)}"
    return f"cannot be read: {error}"


def _describe(shape: tuple[int, ...], dtype: np.dtype) -> str:
    kind = "colour" if len(shape) == 3 else "gray"
    return f"{shape[0]} x {shape[1]} {kind} {dtype}"
