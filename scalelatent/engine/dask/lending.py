"""Distribution of storage options and stores to the workers, so that tasks contain only a short mark (law 7).

A worker plugin also gives them to workers that join later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distributed import WorkerPlugin

from scalelatent.errors import RunError
from scalelatent.storage.stores import known_place

from .asking import AWAY, ask_workers

if TYPE_CHECKING:
    from collections.abc import Hashable

    from distributed import Client

    from scalelatent.data.dataset import Dataset
    from scalelatent.storage.access import Access

__all__ = ["lend_access"]


class LentAccess(WorkerPlugin):
    """Worker plugin that makes an access known on a worker as long as the worker holds the plugin."""

    def __init__(self, access: Access) -> None:
        self.access = access


def lend_access(client: Client, ds: Dataset) -> None:
    """Give all present and later workers the accesses with which this process opened a dataset."""
    for access in ds.accesses:
        try:
            client.register_plugin(LentAccess(access), name=f"scalelatent-access-{access.mark}")
        except Exception as error:
            raise RunError(
                f"{ds.url} was opened with storage options or a store that the workers cannot be given "
                f"({type(error).__name__}: {access.hide(str(error))}): install its package there, give "
                "options that can be pickled, or let the environment of the workers say them"
            ) from error
    for place in ds.places:
        if place.access is not None:
            _check_seen(client, place.url, place.access)


def _check_seen(client: Client, url: str, access: Access) -> None:
    """Raise `RunError` if a worker does not see the same store, such as one in memory or on a local disk."""
    here = _stamp(url, access.mark)
    seen = ask_workers(client, _stamp, url, access.mark)
    blind = {
        address: found for address, found in seen.items() if found != here and not isinstance(found, AWAY)
    }
    if blind:
        words = {access.hide(str(found)) for found in blind.values() if isinstance(found, Exception)}
        why = "; ".join(sorted(words)) or "it lies in this process or on this machine"
        raise RunError(
            f"worker(s) {', '.join(sorted(blind))} do not see {url} by what opened it here ({why}): save it "
            "where all workers see it (Dataset.save), and open it there"
        )


def _stamp(url: str, mark: str) -> Hashable:
    return known_place(url, mark).stamp("zarr.json")
