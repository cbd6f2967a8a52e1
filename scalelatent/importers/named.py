"""Public datasets by name: downloaded once, checked, kept in a cache folder, imported."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalelatent.data.dataset import Dataset
from scalelatent.errors import DataError
from scalelatent.generators.bases import base_digits

from .files import cache_folder
from .idx import open_idx
from .stream import ArrayStream, Chain, Progress, write_rows

if TYPE_CHECKING:
    from typing import Unpack

    from scalelatent.data.schema import LayoutOptions


@dataclass(frozen=True)
class RemoteFile:
    """A file of a public dataset."""

    title: str
    """Its name."""
    checksum: str
    """What it has to be: algorithm and hexadecimal digits."""
    urls: tuple[str, ...]
    """Where it lies; asked in this order."""


def _pair(mirrors: tuple[str, ...], head: str, images: str, labels: str) -> tuple[RemoteFile, ...]:
    """Images and labels of a part."""
    names = (f"{head}-images-idx3-ubyte.gz", images), (f"{head}-labels-idx1-ubyte.gz", labels)
    return tuple(RemoteFile(name, checksum, tuple(m + name for m in mirrors)) for name, checksum in names)


_MNIST = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
_FASHION = (
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
)
_RCV1_TEST = (
    (5976069, "ed40f7e418d10484091b059703eeb95ae3199fe042891dcec4be6696b9968374"),
    (5976066, "87700668ae45d45d5ca1ef6ae9bd81ab0f5ec88cc95dcef9ae7838f727a13aa6"),
    (5976063, "48143ac703cbe33299f7ae9f4995db49a258690f60e5debbff8995c34841c7f5"),
    (5976060, "dfcb0d658311481523c6e6ca0c3f5a3e1d3d12cde5d7a8ce629a9006ec7dbb39"),
)
_RCV1_TRAIN = (5976057, "5468f656d0ba7a83afc7ad44841cf9a53048a5c083eedc005dcdb5cc768924ae")
_RCV1_TOPICS = (5976048, "2a98e5e5d8b770bded93afc8930d88299474317fe14181aee1466cc754d0d1c1")


def _rcv1(title: str, place: tuple[int, str]) -> RemoteFile:
    return RemoteFile(title, f"sha256:{place[1]}", (f"https://ndownloader.figshare.com/files/{place[0]}",))


def _rcv1_files() -> dict[str, tuple[RemoteFile, ...]]:
    """The topics of all stories, then the stories of a part."""
    topics = _rcv1("rcv1v2.topics.qrels.gz", _RCV1_TOPICS)
    test = (_rcv1(f"lyrl2004_vectors_test_pt{i}.dat.gz", place) for i, place in enumerate(_RCV1_TEST))
    return {
        "train": (topics, _rcv1("lyrl2004_vectors_train.dat.gz", _RCV1_TRAIN)),
        "test": (topics, *test),
    }


# Checksums: of MNIST taken from the original files, of Fashion-MNIST its authors', of RCV1 scikit-learn's.
ORIGINS: dict[str, dict[str, tuple[RemoteFile, ...]]] = {
    "mnist": {
        "train": _pair(
            _MNIST,
            "train",
            "sha256:440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "sha256:3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        ),
        "test": _pair(
            _MNIST,
            "t10k",
            "sha256:8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "sha256:f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
    },
    "fashion-mnist": {
        "train": _pair(
            _FASHION,
            "train",
            "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "md5:25c81989df183df01b3e8a0aad5dffbe",
        ),
        "test": _pair(
            _FASHION,
            "t10k",
            "md5:bef4ecab320f06d8554ea6380940ec79",
            "md5:bb300cfdad3c16e7a12a480ee83cd310",
        ),
    },
    "rcv1": _rcv1_files(),
}
"""Name -> part -> its files."""


PARTS = ("train", "test", "all")
_TIMEOUT_SECONDS = 30


NAMES = ("digits", *ORIGINS)
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
    **layout: Unpack[LayoutOptions],
) -> Dataset:
    """Import a public dataset by its name; what is not in the cache is downloaded and checked.

    Parameters
    ----------
    name : {'digits', 'mnist', 'fashion-mnist', 'rcv1'}
        scikit-learn's 1,797 digits 8 x 8, enlarged to gray values 0 to 255 (nothing is downloaded); MNIST and
        Fashion-MNIST, 70,000 images 28 x 28 of 10 classes, uint8; RCV1-v2, 804,414 news stories as weights of
        47,236 terms (CSR float64), with 103 topics as multi-labels.
    url : str
        Where the dataset goes.
    part : {'train', 'test', 'all'}
        60,000 rows, 10,000 rows, or both one after the other; of RCV1 23,149, 781,265, or both; digits have
        no parts and ignore it.
    cache : path, optional
        Folder of the downloads; by default that of the variable SCALELATENT_CACHE, else the user's cache.
    mirror : str, optional
        Address of a folder that holds the files, instead of the known ones.
    overwrite, progress, shuffle, **layout
        See `import_npy`.

    Returns
    -------
    Dataset
        Images (n, h, w) and labels; or CSR rows and multi-labels, the names of the topics in the provenance.

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
    if name == "rcv1":
        from .rcv1 import import_rcv1  # compiled kernels come with it

        return import_rcv1(paths, url, options={"part": part}, **common)
    with contextlib.ExitStack() as opened:
        streams = []
        for path in paths:
            stream = open_idx(path, f"file of {name}")
            opened.callback(stream.close)
            streams.append(stream)
        x, y = Chain(streams[::2]), Chain(streams[1::2])
        return write_rows(url, x, y, importer=name, sources=list(paths), options={"part": part}, **common)


def fetch_named(
    name: str,
    *,
    part: str = "train",
    cache: str | os.PathLike[str] | None = None,
    mirror: str | None = None,
    progress: Progress | None = None,
) -> list[Path]:
    """Paths of a dataset's files in the cache; those that are not there are downloaded.

    Parameters
    ----------
    name : {'mnist', 'fashion-mnist', 'rcv1'}
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
    scalelatent.errors.DataError: no dataset 'mnits' is known by name; ... digits, mnist, fashion-mnist, rcv1
    """
    if name not in ORIGINS:
        raise DataError(f"no dataset {name!r} is known by name; the known ones are {', '.join(NAMES)}")
    if part not in PARTS:
        raise DataError(f"{name} has no part {part!r}; the parts are {', '.join(PARTS)}")
    folder = cache_folder(cache) / name
    parts = [ORIGINS[name][p] for p in (("train", "test") if part == "all" else (part,))]
    files = list(dict.fromkeys(file for files in parts for file in files))
    with _quiet_pooch():
        return [_fetch(name, folder, file, mirror, progress) for file in files]


def _fetch(name: str, folder: Path, file: RemoteFile, mirror: str | None, progress: Progress | None) -> Path:
    """One file, from the first place that has it as it should be."""
    import pooch

    problems = []
    for url in file.urls if mirror is None else (f"{mirror.rstrip('/')}/{file.title}",):
        # pooch writes aside, compares the checksum and renames: a torn download is never kept.
        download = pooch.HTTPDownloader(
            progressbar=_Bytes(progress) if progress else False, timeout=_TIMEOUT_SECONDS
        )
        try:
            return Path(pooch.retrieve(url, file.checksum, file.title, folder, downloader=download))
        except (OSError, ValueError) as error:  # of the network (requests); of the checksum
            problems.append(f"{url} ({_reason(error)})")
    raise DataError(
        f"{name}: {file.title} is not in the cache and could not be downloaded: {'; '.join(problems)}. "
        f"Without a network, download it elsewhere and put it into {folder}, then try again"
        f"{_by_hand(name, file)}. Another place that has it: --mirror URL (mirror=)"
    )


def _by_hand(name: str, file: RemoteFile) -> str:
    """The command that imports the files of the part, where there is one."""
    pair = next(files for files in ORIGINS[name].values() if file in files)
    if not all("idx" in each.title for each in pair):
        return ""
    return f", or scalelatent data import idx {' '.join(each.title for each in pair)} OUT.zarr"


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
        self._done = min(self._done + count, self.total)
        self._progress(self._done, self.total)

    def reset(self) -> None:
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


def _import_digits(url: str | os.PathLike[str], common: dict[str, Any]) -> Dataset:
    images, labels = base_digits()
    x, y = ArrayStream(images, "scikit-learn's digits"), ArrayStream(labels, "scikit-learn's digits")
    return write_rows(url, x, y, importer="digits", sources=["digits.csv.gz"], **common)
