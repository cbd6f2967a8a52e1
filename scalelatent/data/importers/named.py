"""Public datasets by name: downloaded once, checked, kept in a cache folder, imported."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.errors import DataError

from .idx import open_idx
from .stream import Progress, Rows, write_rows

if TYPE_CHECKING:
    from scalelatent.data.dataset import Dataset

__all__ = ["NAMES", "PARTS", "fetch_named", "import_named"]

PARTS = ("train", "test", "all")
_TIMEOUT_SECONDS = 30


@dataclass(frozen=True)
class _Origin:
    """Where the files of a dataset lie, and what they have to be."""

    mirrors: tuple[str, ...]
    """Addresses of folders that hold the files; asked in this order."""
    files: dict[str, tuple[tuple[str, str], tuple[str, str]]]
    """Part -> (name, checksum) of its images and of its labels."""


# Checksums of MNIST were taken from the original files, those of Fashion-MNIST are its authors'.
_ORIGINS = {
    "mnist": _Origin(
        (
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        {
            "train": (
                (
                    "train-images-idx3-ubyte.gz",
                    "sha256:440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
                ),
                (
                    "train-labels-idx1-ubyte.gz",
                    "sha256:3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
                ),
            ),
            "test": (
                (
                    "t10k-images-idx3-ubyte.gz",
                    "sha256:8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
                ),
                (
                    "t10k-labels-idx1-ubyte.gz",
                    "sha256:f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
                ),
            ),
        },
    ),
    "fashion-mnist": _Origin(
        (
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
        ),
        {
            "train": (
                ("train-images-idx3-ubyte.gz", "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
                ("train-labels-idx1-ubyte.gz", "md5:25c81989df183df01b3e8a0aad5dffbe"),
            ),
            "test": (
                ("t10k-images-idx3-ubyte.gz", "md5:bef4ecab320f06d8554ea6380940ec79"),
                ("t10k-labels-idx1-ubyte.gz", "md5:bb300cfdad3c16e7a12a480ee83cd310"),
            ),
        },
    ),
}
NAMES = ("digits", *_ORIGINS)
"""Datasets that `import_named` knows."""


def import_named(
    name: str,
    url: str | os.PathLike[str],
    *,
    part: str = "train",
    cache: str | os.PathLike[str] | None = None,
    mirror: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    shuffle: int | None = None,
    **layout: Any,
) -> Dataset:
    """Import a public dataset by its name; what is not in the cache is downloaded and checked.

    Parameters
    ----------
    name : {'digits', 'mnist', 'fashion-mnist'}
        scikit-learn's 1,797 digits 8 x 8, enlarged to gray values 0 to 255 (nothing is downloaded); MNIST and
        Fashion-MNIST, 70,000 images 28 x 28 of 10 classes. All are uint8.
    url : str
        Where the dataset goes.
    part : {'train', 'test', 'all'}
        60,000 rows, 10,000 rows, or both one after the other; digits have no parts and ignore it.
    cache : path, optional
        Folder of the downloads; by default that of the variable SCALELATENT_CACHE, else the user's cache.
    mirror : str, optional
        Address of a folder that holds the files, instead of the known ones.
    overwrite, progress, shuffle, **layout
        See `import_hdf5`.

    Returns
    -------
    Dataset
        Images (n, h, w) and labels.

    Raises
    ------
    DataError
        A name that is not known; no mirror could be reached, or none had the right file (the message says how
        to go on without a network); an output that exists. No dataset is left behind.

    Examples
    --------
    >>> import_named("digits", "memory://doc-named", overwrite=True)
    <Dataset 1,797 rows x (8, 8) uint8, 10 classes, 'memory://doc-named'>
    """
    common: dict[str, Any] = {"overwrite": overwrite, "progress": progress, "shuffle": shuffle, **layout}
    if name == "digits":
        return _import_digits(url, common)
    paths = fetch_named(name, part=part, cache=cache, mirror=mirror)
    with contextlib.ExitStack() as opened:
        streams = []
        for path in paths:
            stream = open_idx(path, f"file of {name}")
            opened.callback(stream.close)
            streams.append(stream)
        x, y = _Chain(streams[::2]), _Chain(streams[1::2])
        return write_rows(url, x, y, importer=name, sources=list(paths), options={"part": part}, **common)


def fetch_named(
    name: str,
    *,
    part: str = "train",
    cache: str | os.PathLike[str] | None = None,
    mirror: str | None = None,
    progress: Progress | None = None,
) -> list[Path]:
    """Paths of a dataset's files in the cache, images and labels of each part; missing ones are downloaded.

    Parameters
    ----------
    name : {'mnist', 'fashion-mnist'}
        The dataset.
    part, cache, mirror
        See `import_named`.
    progress : callable, optional
        Called with (bytes done, bytes in all) of the file that is being downloaded.

    Raises
    ------
    DataError
        See `import_named`. What could not be downloaded whole is not kept.

    Examples
    --------
    >>> fetch_named("mnits")
    Traceback (most recent call last):
    scalelatent.errors.DataError: no dataset 'mnits' is known by name; ... digits, mnist, fashion-mnist
    """
    import pooch

    if name not in _ORIGINS:
        raise DataError(f"no dataset {name!r} is known by name; the known ones are {', '.join(NAMES)}")
    if part not in PARTS:
        raise DataError(f"{name} has no part {part!r}; the parts are {', '.join(PARTS)}")
    origin = _ORIGINS[name]
    folder = Path(cache or os.environ.get("SCALELATENT_CACHE") or pooch.os_cache("scalelatent"), name)
    mirrors = origin.mirrors if mirror is None else (mirror.rstrip("/") + "/",)
    pairs = [origin.files[p] for p in (("train", "test") if part == "all" else (part,))]
    with _quiet_pooch():
        return [_fetch(name, folder, file, pair, mirrors, progress) for pair in pairs for file in pair]


def _fetch(
    name: str,
    folder: Path,
    file: tuple[str, str],
    pair: tuple[tuple[str, str], tuple[str, str]],
    mirrors: tuple[str, ...],
    progress: Progress | None,
) -> Path:
    """One file, from the first mirror that has it as it should be."""
    import pooch

    title, checksum = file
    problems = []
    for mirror in mirrors:
        # pooch writes aside, compares the checksum and renames: a torn download is never kept.
        download = pooch.HTTPDownloader(
            progressbar=_Bytes(progress) if progress else False, timeout=_TIMEOUT_SECONDS
        )
        try:
            return Path(pooch.retrieve(mirror + title, checksum, title, folder, downloader=download))
        except (OSError, ValueError) as error:  # of the network (requests); of the checksum
            problems.append(f"{mirror}{title} ({_reason(error)})")
    files = " ".join(title for title, _ in pair)
    raise DataError(
        f"{name}: {title} is not in the cache and could not be downloaded: {'; '.join(problems)}. Without a "
        f"network, download it elsewhere, put it into {folder} and try again, or import the two files: "
        f"scalelatent data import idx {files} OUT.zarr. Another place that has them: --mirror URL (mirror=)"
    )


def _reason(error: Exception) -> str:
    from requests import exceptions

    if isinstance(error, exceptions.HTTPError) and error.response is not None:
        return f"the server answered {error.response.status_code} {error.response.reason}"
    if isinstance(error, exceptions.Timeout):
        return f"no answer within {_TIMEOUT_SECONDS} s"
    if isinstance(error, exceptions.ChunkedEncodingError):
        return "the connection broke off in the middle"
    if isinstance(error, exceptions.ConnectionError):
        return "no connection"
    if isinstance(error, ValueError):
        return "another file: its checksum is wrong"
    return str(error)


class _Bytes:
    """What pooch shows progress with."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._done = self.total = 0

    def update(self, count: int) -> None:
        """So many bytes more."""
        self._done = min(self._done + count, self.total)
        self._progress(self._done, self.total)

    def reset(self) -> None:
        """Begin anew."""
        self._done = 0

    def close(self) -> None:
        """Nothing to do."""


@contextlib.contextmanager
def _quiet_pooch() -> Iterator[None]:
    """No log lines between ours."""
    import pooch

    logger = pooch.get_logger()
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


class _Chain:
    """Rows of several streams of one shape and type, one after another."""

    def __init__(self, streams: list[Rows] | list[Any]) -> None:
        self._streams = streams
        self._at = self._taken = 0
        self.name = " and ".join(stream.name for stream in streams)
        self.dtype = streams[0].dtype
        self.n_rows = sum(stream.n_rows for stream in streams)
        self.shape = (self.n_rows, *streams[0].shape[1:])

    def read(self, rows: int) -> np.ndarray:
        """The next rows."""
        parts = []
        while rows:
            stream = self._streams[self._at]
            part = stream.read(min(rows, stream.n_rows - self._taken))
            parts.append(part)
            rows -= len(part)
            self._taken += len(part)
            if self._taken == stream.n_rows and self._at + 1 < len(self._streams):
                self._at, self._taken = self._at + 1, 0
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def finish(self) -> None:
        """Check the end of each."""
        for stream in self._streams:
            stream.finish()

    def close(self) -> None:
        """Close all."""
        for stream in self._streams:
            stream.close()


def _import_digits(url: str | os.PathLike[str], common: dict[str, Any]) -> Dataset:
    from scalelatent.data.digits import base_digits

    from .stream import ArrayRows

    images, labels = base_digits()
    x, y = ArrayRows(images, "scikit-learn's digits"), ArrayRows(labels, "scikit-learn's digits")
    return write_rows(url, x, y, importer="digits", sources=["digits.csv.gz"], **common)
