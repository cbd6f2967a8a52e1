"""Send storage options to the workers once, so that tasks need only refer to them by an id.

A worker plugin contains these options, because Dask also sends plugins to workers that join later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distributed import WorkerPlugin

from scalelatent.errors import RunError
from scalelatent.storage.storage_options import locate_recorded

from .timed_calls import GONE_ERRORS, ask_workers

if TYPE_CHECKING:
    from collections.abc import Hashable

    from distributed import Client

    from scalelatent.data.dataset import Dataset
    from scalelatent.storage.access import Access


class SentAccess(WorkerPlugin):
    """Worker plugin with storage options, which a process can use as long as it has the unpickled plugin."""

    def __init__(self, access: Access) -> None:
        self.access = access


def send_access(client: Client, ds: Dataset) -> None:
    """Let all workers, including later ones, open a dataset with the storage options of this process."""
    for access in ds.accesses:
        try:
            client.register_plugin(SentAccess(access), name=f"scalelatent-access-{access.mark}")
        except Exception as error:
            raise RunError(
                f"{ds.url} was opened with storage options that cannot be sent to the workers "
                f"({type(error).__name__}: {access.hide(str(error))}): use options that can be pickled, or "
                "set them in the environment of the workers"
            ) from error
    for place in ds.places:
        if place.access is not None:
            _check_seen(client, place.url, place.access)


def _check_seen(client: Client, url: str, access: Access) -> None:
    """Raise a RunError if a worker cannot open the dataset at ``url``, or finds another dataset there."""
    here = _stamp(url, access.mark)
    stamps = ask_workers(client, _stamp, url, access.mark)
    blind = {
        address: found
        for address, found in stamps.items()
        if found != here and not isinstance(found, GONE_ERRORS)
    }
    if blind:
        words = {access.hide(str(found)) for found in blind.values() if isinstance(found, Exception)}
        why = "; ".join(sorted(words)) or "it is in the memory of this process or on this machine"
        raise RunError(
            f"worker(s) {', '.join(sorted(blind))} cannot open {url} with the storage options of this "
            f"process ({why}): save it where all workers can read it (Dataset.save), and open it there"
        )


def _stamp(url: str, mark: str) -> Hashable:
    """Return a value that identifies the dataset that this process finds at ``url``."""
    return locate_recorded(url, mark).stamp("zarr.json")
