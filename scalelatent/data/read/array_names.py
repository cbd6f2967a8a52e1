"""Choose the arrays of a file or a group that hold rows and labels, by their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scalelatent.errors import DataError

_MAX_SHOWN = 20  # maximum number of names in an error message


def choose_arrays(
    arrays: Sequence[str] | Mapping[str, str], x: str | None, y: str | None, source_name: str
) -> tuple[str, str | None]:
    """Return (name of the array with the rows, name of the array with the labels or None).

    `x` and `y` are names that the user chose, or None. `arrays` lists the names of all arrays of the file, or
    maps each name to a description for messages. If `y` is None, the labels must be in the group of the rows.
    """
    rows = choose_array(arrays, "x", x, source_name)
    assert rows is not None
    group = rows.rpartition("/")[0]
    siblings = [name for name in arrays if name.rpartition("/")[0] == group]
    return rows, choose_array(arrays if y else siblings, "y", y, source_name)


def choose_array(
    arrays: Sequence[str] | Mapping[str, str], role: str, key: str | None, source_name: str
) -> str | None:
    """Return the name of the array with the rows (`role` "x") or the labels (`role` "y").

    The user may name the array with `key`; otherwise the array has the name `role`. A file without such an
    array has no labels (None); missing rows raise a `DataError`.
    """
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
    raise DataError(
        f"{source_name} {problem}; it holds {_describe(arrays)}: name one with --{role} KEY ({role}='KEY')"
    )


def _describe(arrays: Sequence[str] | Mapping[str, str]) -> str:
    descriptions = arrays if isinstance(arrays, Mapping) else {}
    names = [f"{name} {descriptions[name]}" if name in descriptions else name for name in arrays]
    rest = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return (", ".join(names[:_MAX_SHOWN]) or "nothing") + rest
