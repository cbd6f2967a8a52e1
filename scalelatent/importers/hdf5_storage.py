"""Where the numbers of an HDF5 array lie: in its file, or, by what the file says, in any other one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from scalelatent.errors import DataError

if TYPE_CHECKING:
    import h5py

__all__ = ["check_storage"]

_SHOWN = 3


def check_storage(
    array: h5py.Dataset,
    what: str,
    allow_external: bool = False,
    seen: frozenset[tuple[str, str]] = frozenset(),
) -> None:
    """Refuse an array whose numbers lie outside of its file, and parts of one that HDF5 would make up.

    Parameters
    ----------
    array : h5py.Dataset
    what : str
        What to call it in messages.
    allow_external : bool
        Numbers of other files may be read; each of these has to be there, since HDF5 reads what is not as
        fill values.
    seen : frozenset of (str, str)
        File and name of the virtual datasets that this one is a source of.

    Raises
    ------
    DataError
        Naming the files.
    """
    raw = list(array.external or ())
    sources = array.virtual_sources() if array.is_virtual else []
    if (raw or sources) and not allow_external:
        names = list(dict.fromkeys([name for name, _, _ in raw] + [s.file_name for s in sources]))
        shown = ", ".join(map(repr, names[:_SHOWN])) + (
            f" and {len(names) - _SHOWN} more" * (len(names) > _SHOWN)
        )
        kind = "by external raw storage" if raw else "as a virtual dataset"
        raise DataError(
            f"{what} does not hold its numbers: {kind} it takes them from {shown}. Look at what those are, "
            "then import it with `scalelatent data import hdf5 --allow-external` (allow_external=True)"
        )
    if raw:
        _check_raw(array, raw, what)
    here = (os.path.realpath(array.file.filename), array.name)
    if here in seen:
        raise DataError(f"{what} is a virtual dataset of itself; nothing to import")
    for source in sources:
        _check_source(array, source, what, seen | {here})


def _check_raw(array: h5py.Dataset, raw: list[Any], what: str) -> None:
    left = array.nbytes
    for name, offset, size in raw:
        path = os.path.join(os.environ.get("HDF5_EXTFILE_PREFIX", ""), name)
        wanted = min(size, left)
        found = os.path.getsize(path) if os.path.isfile(path) else None
        if found is None or found < offset + wanted:
            there = "is missing" if found is None else f"has {found:,} bytes of {offset + wanted:,}"
            raise DataError(
                f"{what}: its raw storage {path!r} {there}, and HDF5 would read zeros instead; put that file "
                "there (a relative name counts from the current folder)"
            )
        left -= wanted


def _check_source(array: h5py.Dataset, source: Any, what: str, seen: frozenset[tuple[str, str]]) -> None:
    import h5py

    where = f"{what}: its source {source.dset_name!r} in {source.file_name!r}"
    if "%" in source.file_name + source.dset_name:
        raise DataError(
            f"{where} is a pattern of names, of which nobody can tell whether one is missing; copy the array "
            "to a file of its own first"
        )
    step = "put that file there, or copy the array to a file of its own where it is whole"
    try:
        if source.file_name == ".":
            _check_found(array.file, source, where, step, seen)
            return
        with h5py.File(_found(array.file.filename, source.file_name), "r") as file:
            _check_found(file, source, where, step, seen)
    except OSError as error:
        raise DataError(
            f"{where} cannot be opened, and HDF5 would read fill values instead: {error}; {step}"
        ) from error


def _found(virtual: str, name: str) -> str:
    """The file that HDF5 takes for a name: beside the virtual one, else from the current folder."""
    beside = os.path.join(os.environ.get("HDF5_VDS_PREFIX") or os.path.dirname(virtual), name)
    return beside if os.path.exists(beside) else name


def _check_found(
    file: h5py.File, source: Any, where: str, step: str, seen: frozenset[tuple[str, str]]
) -> None:
    import h5py

    found = file.get(source.dset_name)
    if not isinstance(found, h5py.Dataset):
        raise DataError(f"{where} is not in that file, and HDF5 would read fill values instead; {step}")
    declared = source.src_space.shape  # empty where all of the source is meant, whatever its shape
    short = any(want > have for want, have in zip(declared, found.shape, strict=False))
    if short or (not declared and found.size < source.vspace.get_select_npoints()):
        raise DataError(
            f"{where} has shape {found.shape}, which is less than the virtual dataset takes from it, and "
            f"HDF5 would read fill values instead; {step}"
        )
    check_storage(found, where, True, seen)
