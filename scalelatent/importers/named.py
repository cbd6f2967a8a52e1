"""Import public datasets by name: download their files once, check them, and keep them in a cache folder."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scalelatent.data.dataset import Dataset
from scalelatent.errors import DataError
from scalelatent.generators.bases import load_base_digits

from .files import PathOrUrl
from .idx import open_idx
from .stream import ArrayReader, import_rows, write_rows

if TYPE_CHECKING:
    from typing import Unpack

    from .stream import ImportOptions


@dataclass(frozen=True)
class RemoteFile:
    """File of a public dataset."""

    title: str
    """Name of the file."""
    checksum: str
    """Algorithm and hexadecimal digits, for example "md5:8d4f…"."""
    urls: tuple[str, ...]
    """Addresses, in the order in which they are tried."""


_MNIST = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
_FASHION = (
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
)


def _make_idx_pair(mirrors: tuple[str, ...], prefix: str, images: str, labels: str) -> tuple[RemoteFile, ...]:
    """Return the IDX files of images and labels; `images` and `labels` are their checksums."""
    names = (f"{prefix}-images-idx3-ubyte.gz", images), (f"{prefix}-labels-idx1-ubyte.gz", labels)
    return tuple(RemoteFile(name, checksum, tuple(m + name for m in mirrors)) for name, checksum in names)


# The checksums of MNIST are those of the original files; those of Fashion-MNIST are from its authors.
PUBLIC_FILES: dict[str, dict[str, tuple[RemoteFile, ...]]] = {
    "mnist": {
        "train": _make_idx_pair(
            _MNIST,
            "train",
            "sha256:440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "sha256:3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        ),
        "test": _make_idx_pair(
            _MNIST,
            "t10k",
            "sha256:8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "sha256:f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
    },
    "fashion-mnist": {
        "train": _make_idx_pair(
            _FASHION,
            "train",
            "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "md5:25c81989df183df01b3e8a0aad5dffbe",
        ),
        "test": _make_idx_pair(
            _FASHION,
            "t10k",
            "md5:bef4ecab320f06d8554ea6380940ec79",
            "md5:bb300cfdad3c16e7a12a480ee83cd310",
        ),
    },
}
"""Files of each public dataset, by its name and by part ("train" or "test"): images, then labels."""

DATASET_NAMES = ("digits", *PUBLIC_FILES)
"""Datasets that `import_named` imports."""

DATASET_PARTS = ("train", "test")
_TIMEOUT_SECONDS = 30


def import_named(
    name: str,
    url: PathOrUrl,
    *,
    part: str = "train",
    cache: PathOrUrl | None = None,
    mirror: str | None = None,
    **options: Unpack[ImportOptions],
) -> Dataset:
    """Import a public dataset by its name; files that are not in the cache are downloaded and checked.

    Parameters
    ----------
    name : {'digits', 'mnist', 'fashion-mnist'}
        scikit-learn's 1,797 digits 8 x 8, scaled to gray values 0 to 255 (nothing is downloaded); MNIST and
        Fashion-MNIST, 70,000 images 28 x 28 of 10 classes, uint8.
    url : str
        Dataset to write.
    part : {'train', 'test'}
        60,000 or 10,000 rows; ignored for digits. `append_rows` makes one dataset of both.
    cache : path, optional
        Folder of the downloads; by default the environment variable SCALELATENT_CACHE, else the user's cache.
    mirror : str, optional
        Address of a folder on a server with the files, instead of the known addresses.
    **options
        See `import_npy`.

    Returns
    -------
    Dataset
        Images (n, h, w) and labels.

    Raises
    ------
    DataError
        An unknown name; no address could be reached, or none had the right file (the message explains how to
        import without a network); an output that exists. No dataset stays behind.

    Examples
    --------
    >>> import_named("digits", "memory://doc-named", overwrite=True)
    <Dataset 1,797 rows x (8, 8) uint8, 10 classes, 'memory://doc-named'>
    """
    if name == "digits":
        x, y = (ArrayReader(values, "scikit-learn's digits") for values in load_base_digits())
        return write_rows(url, x, y, importer="digits", sources=["digits.csv.gz"], **options)
    images, labels = _fetch_files(name, part, cache, mirror)
    return import_rows(
        lambda: open_idx(images, f"file of {name}"),
        lambda: open_idx(labels, f"file of {name}"),
        url,
        importer=name,
        sources=[images, labels],
        provenance={"part": part},
        **options,
    )


def _fetch_files(name: str, part: str, cache: PathOrUrl | None, mirror: str | None) -> list[Path]:
    """Return the paths of images and labels in the cache, after downloading missing files."""
    if name not in PUBLIC_FILES:
        raise DataError(
            f"no dataset {name!r} is known by name; the known ones are {', '.join(DATASET_NAMES)}"
        )
    if part not in DATASET_PARTS:
        raise DataError(f"{name} has no part {part!r}; the parts are {', '.join(DATASET_PARTS)}")
    import pooch

    folder = Path(cache or os.environ.get("SCALELATENT_CACHE") or pooch.os_cache("scalelatent")) / name
    return [_fetch(name, folder, file, mirror) for file in PUBLIC_FILES[name][part]]


def _fetch(name: str, folder: Path, file: RemoteFile, mirror: str | None) -> Path:
    """Return the path of one file, downloaded from the first address that has the file with its checksum."""
    import pooch

    problems = []
    for url in file.urls if mirror is None else (f"{mirror.rstrip('/')}/{file.title}",):
        # pooch downloads to a temporary file, compares the checksum and renames the file.
        download = pooch.HTTPDownloader(timeout=_TIMEOUT_SECONDS)
        try:
            return Path(pooch.retrieve(url, file.checksum, file.title, folder, downloader=download))
        except (OSError, ValueError) as error:  # requests raises OSError; a wrong checksum is a ValueError
            problems.append(f"{url} ({_describe_error(error)})")
    pair = next(files for files in PUBLIC_FILES[name].values() if file in files)
    raise DataError(
        f"{name}: {file.title} is not in the cache and could not be downloaded: {'; '.join(problems)}. "
        f"Without a network, download it elsewhere and put it into {folder}, then try again, or scalelatent "
        f"data import idx {' '.join(each.title for each in pair)} OUT.zarr. Another server that has it: "
        "--mirror URL (mirror=)"
    )


def _describe_error(error: Exception) -> str:
    from requests import exceptions

    if isinstance(error, exceptions.HTTPError) and error.response is not None:
        return f"the server answered {error.response.status_code} {error.response.reason}"
    if isinstance(error, exceptions.Timeout):
        return f"no answer within {_TIMEOUT_SECONDS} s"
    if isinstance(error, exceptions.ChunkedEncodingError):
        return "the connection was interrupted"
    if isinstance(error, exceptions.ConnectionError):
        return "no connection"
    if isinstance(error, ValueError):
        return "the checksum is wrong: it is another file"
    return str(error)
