"""Virtual zarr stores: references to parts of other files, as kerchunk and VirtualiZarr write them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zarr.abc.store import Store

    from .location import Location

__all__ = ["reference_store"]


def reference_store(place: Location) -> Store:
    """Return the zarr store of a file of references; zarr and fsspec read the referenced files."""
    import fsspec
    from zarr.storage import FsspecStore

    # Each call creates a new file system, because fsspec would cache earlier references of the same address.
    how: dict[str, Any] = {"asynchronous": True, "skip_instance_cache": True}
    return FsspecStore(fsspec.filesystem("reference", fo=place.url, **how), read_only=True, path="")
