"""Virtual zarr stores: references to parts of other files, as kerchunk and VirtualiZarr write them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zarr.abc.store import Store

    from .location import Location

__all__ = ["reference_store"]


def reference_store(place: Location) -> Store:
    """The zarr store that a file of references describes; zarr and fsspec read what it refers to."""
    import fsspec
    from zarr.storage import FsspecStore

    # A file of its own each time: fsspec would keep what it found under this name before.
    how: dict[str, Any] = {"asynchronous": True, "skip_instance_cache": True}
    return FsspecStore(fsspec.filesystem("reference", fo=place.url, **how), read_only=True, path="")
