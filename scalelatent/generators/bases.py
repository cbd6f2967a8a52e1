"""Base sets: the datasets, or scikit-learn's digits, from which generators derive rows."""

from __future__ import annotations

import functools
import importlib.util
import os

import numpy as np

from scalelatent.data.dataset import Dataset, open_dataset
from scalelatent.errors import DataError
from scalelatent.storage.disk import locate
from scalelatent.storage.write_checks import check_not_own_input


@functools.lru_cache(maxsize=1)
def load_base_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return scikit-learn's 1,797 digits, uint8 (1797, 8, 8) with grey values 0 to 255, and labels uint8."""
    # Find the folder of sklearn without importing it, because the import takes a second.
    spec = importlib.util.find_spec("sklearn")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    paths = [os.path.join(folder, "datasets", "data", "digits.csv.gz") for folder in folders]
    path = next((p for p in paths if os.path.exists(p)), None)
    if path is None:
        raise DataError(
            "scikit-learn's digits (datasets/data/digits.csv.gz) are not installed; install scikit-learn, or "
            "give another base: a dataset of uint8 images"
        )
    rows = np.loadtxt(path, delimiter=",", dtype=np.uint8)
    images = np.rint(rows[:, :-1].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    labels = np.ascontiguousarray(rows[:, -1])
    images.flags.writeable = labels.flags.writeable = False
    return images, labels


def base_name(base: str | os.PathLike[str], url: str) -> str:
    """Return the name of a base set for the provenance: 'digits', a url with a scheme, or a relative path."""
    text = os.fspath(base)
    if text == "digits":
        return text
    place = locate(text).url
    if "://" in place or "://" in url:
        return place
    return os.path.relpath(place, url)  # so that both datasets can be moved together


def open_stored_base(name: str, url: str, fingerprint: str | None = None) -> Dataset:
    """Open the base dataset `name`, an address or a path relative to `url`; refuse another fingerprint."""
    place = name if "://" in name or "://" in url else os.path.normpath(os.path.join(url, name))
    check_not_own_input(url, place)
    return _check_unchanged(open_dataset(place), name, url, fingerprint)


def open_base(name: str, url: str, fingerprint: str | None = None) -> Dataset:
    """Open the base set (the original images of a generator) `name`: uint8 (n, h, w), perhaps with labels."""
    ds = Dataset.from_arrays(*load_base_digits()) if name == "digits" else open_stored_base(name, url)
    if ds.dtype != "u1" or len(ds.feature_shape) != 2 or ds.is_sparse:
        raise DataError(
            f"base {ds.url} holds rows of shape {ds.feature_shape} and dtype {ds.dtype}; uint8 images "
            "(height, width) are needed"
        )
    return _check_unchanged(ds, name, url, fingerprint)


def check_base_rows(base_rows: tuple[int, int] | None, n: int) -> tuple[int, int]:
    """Return the range of rows A:B of a base set of n rows; raise `DataError` if it is not inside 0:n."""
    a, b = (0, n) if base_rows is None else (int(base_rows[0]), int(base_rows[1]))
    if not 0 <= a < b <= n:
        raise DataError(
            f"base rows {a}:{b} are not inside 0:{n}, the rows of the base set; give --base-rows A:B within "
            "it"
        )
    return a, b


def _check_unchanged(base: Dataset, name: str, url: str, fingerprint: str | None) -> Dataset:
    found = base.fingerprint() if fingerprint is not None else None
    if found != fingerprint:
        raise DataError(
            f"{url}: its base {name} has changed since the first shard was made (fingerprint "
            f"{str(found)[:12]}, was {str(fingerprint)[:12]}); restore the base, or make the dataset again "
            "with --overwrite"
        )
    return base
