"""Which array of a file holds the rows and which the labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scalelatent.errors import DataError

__all__ = ["find_key", "find_keys"]

_MAX_SHOWN = 20


def find_keys(
    arrays: Sequence[str] | Mapping[str, str], x: str | None, y: str | None, where: str
) -> tuple[str, str | None]:
    """Names of the arrays that hold rows and labels; labels may be absent.

    Parameters
    ----------
    arrays : sequence or mapping of str
        Names of the arrays in the file, paths such as ``train/x`` where it has groups; a mapping says what
        each is, for messages.
    x, y : str or None
        The names asked for. By default the one array called ``x`` (``y``), in either case, in any group;
        labels are looked for in the group of the rows.
    where : str
        What to call the file in messages.

    Raises
    ------
    DataError
        No such array, or several; the message lists what is there.

    Examples
    --------
    >>> find_keys(["train/X", "train/y", "test/X"], "train/X", None, "file.h5")
    ('train/X', 'train/y')
    """
    rows = find_key(arrays, "x", x, where)
    assert rows is not None
    group = rows.rpartition("/")[0]
    beside = [name for name in arrays if name.rpartition("/")[0] == group]
    return rows, find_key(arrays if y else beside, "y", y, where)


def find_key(arrays: Sequence[str] | Mapping[str, str], role: str, key: str | None, where: str) -> str | None:
    """Name of the array that plays a role, "x" or "y"; labels may be absent. See `find_keys`."""
    if key:
        found = [name for name in arrays if name == key.strip("/")]
    else:
        found = [name for name in arrays if name.rpartition("/")[2].lower() == role]
    if len(found) == 1:
        return found[0]
    if not key and not found and role == "y":
        return None
    if key:
        problem = f"has no array {key!r}"
    else:
        problem = f"has {len(found)} arrays that could be {role!r}" if found else f"has no array {role!r}"
    raise DataError(f"{where} {problem}; it holds {_list(arrays)}: name one with --{role} KEY ({role}='KEY')")


def _list(arrays: Sequence[str] | Mapping[str, str]) -> str:
    what = arrays if isinstance(arrays, Mapping) else {}
    names = [f"{name} {what[name]}" if name in what else name for name in arrays]
    rest = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return (", ".join(names[:_MAX_SHOWN]) or "nothing") + rest
