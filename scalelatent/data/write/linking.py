"""A finished dataset at a second place."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from scalelatent.data.dataset import Dataset
from scalelatent.errors import DataError
from scalelatent.storage.disk import Location, locate
from scalelatent.storage.guard import explain_os_errors

__all__ = ["link_dataset"]


def link_dataset(ds: Dataset, place: Location) -> str:
    """Have a finished dataset at another place, too, file by file; returns its fingerprint.

    Files of a finished dataset do not change, so on one disk they are linked and take no room; elsewhere they
    are copied.

    Parameters
    ----------
    ds : Dataset
        A whole stored one.
    place : Location
        Where nothing lies.

    Raises
    ------
    DataError
        The rows are not a stored dataset, or the place cannot be written.
    """
    if ds.url is None or not ds.is_stored:
        raise DataError("rows in memory cannot be linked: write them with Dataset.save")
    source = locate(ds.url)
    with explain_os_errors(place, f"copying {ds.url}"):
        here, there = source.local_path(""), place.local_path("")
        if here is not None and there is not None:
            _link_files(Path(here), Path(there))
        else:
            _copy_files(source, place, "")
    return ds.fingerprint()


def _link_files(source: Path, target: Path) -> None:
    for file in sorted(p for p in source.rglob("*") if p.is_file()):
        path = target / file.relative_to(source)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(file, path)
        except OSError:  # another disk, or one without links
            shutil.copyfile(file, path)


def _copy_files(source: Location, target: Location, prefix: str) -> None:
    for name in source.keys(prefix):
        key = f"{prefix}/{name}" if prefix else name
        data = source.read(key) if source.has(key) else None
        if data is None:
            _copy_files(source, target, key)
        else:
            target.write(key, data)
