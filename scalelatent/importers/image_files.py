"""Which files of a folder are images, in which order, and which class each belongs to."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from scalelatent.errors import DataError

__all__ = ["FORMATS", "ImageFolder", "list_images"]

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
    """Suffixes of the files that are no images by their names, and how many there are of each."""

    @property
    def n_files(self) -> int:
        """Number of images."""
        return sum(count for _, count in self.folders)

    def classes(self) -> np.ndarray | None:
        """Names of the folders right below the root, sorted; numbers where all are written as numbers.

        None where the images lie in the root itself.

        Raises
        ------
        DataError
            Images lie in the root and in folders.
        """
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
        """(name of the class folder, path relative to the root) of each image, in order.

        Raises
        ------
        DataError
            Files came or went since the folder was listed.
        """
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
    """The images below a folder, those of a folder by name before those of the folders in it.

    Hidden files and folders (whose names begin with a dot) are passed over.

    Raises
    ------
    DataError
        No such folder, one that cannot be read, or one without images.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name in ("b.png", "a.png", "notes.txt"):
    ...         pathlib.Path(folder, name).touch()
    ...     found = list_images(folder)
    ...     [path for _, path in found.files()], dict(found.other)
    (['a.png', 'b.png'], {'.txt': 1})
    """
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
    """Sorted names of a folder's images and of the folders in it, and the suffixes of the other files.

    Images' names are bytes in an array, which is compact: a folder may hold millions.
    """
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
