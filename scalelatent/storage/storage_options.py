"""Locations with storage options, that is arguments of fsspec's file system for an address."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from scalelatent.errors import DataError

from .access import Access, known_access
from .disk import check_address, is_local, locate
from .location import Location
from .objects import ObjectLocation


def find_location(thing: Any, storage_options: Mapping[str, Any] | None = None) -> Location:
    """Return the location of an address, with storage options if there are any."""
    if isinstance(thing, Location):
        return thing
    if not isinstance(thing, (str, os.PathLike)):
        raise DataError(
            f"a {type(thing).__module__}.{type(thing).__name__} is not a location: give a path, or an "
            "address such as 's3://bucket/name' (with storage_options for its file system, if needed)"
        )
    if storage_options is None:
        return locate(thing)
    url = os.fspath(thing)
    if is_local(url):
        raise DataError(
            f"{url} is on a disk, which has no storage_options: leave them out (they configure "
            "fsspec for addresses such as 's3://bucket/name')"
        )
    check_address(url)
    return ObjectLocation(url, Access.from_options(storage_options))


def locate_recorded(url: str, mark: str | None) -> Location:
    """Return the location of an address; `mark` is the identifier of its storage options, or None."""
    if mark is None:
        return locate(url)
    access = known_access(mark)
    if access is None:
        raise DataError(
            f"{url} was opened with storage options, which run folders do not record: open it again with "
            "open_dataset, and pass the result"
        )
    return ObjectLocation(url, access)
