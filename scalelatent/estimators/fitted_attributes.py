"""Fitted attributes that users read and only a fit sets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sklearn.exceptions import NotFittedError

CHANGE_IN_PLACE = "change its values where they are ({0}[...] = values)"
FIT_AGAIN = "fit again"


class FittedAttribute:
    """Fitted attribute that cannot be set, because other fitted values would then not match it."""

    def __init__(self, remedy: str, of: Callable[[Any], object] | None = None) -> None:
        self.remedy, self.of = remedy, of

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, model: Any, owner: type | None = None) -> Any:
        """Return the value for an instance, or the descriptor itself for a class."""
        if model is None:
            return self
        try:
            return vars(model)[self.name] if self.of is None else self.of(model)
        except (KeyError, AttributeError):
            # NotFittedError is also a subclass of AttributeError, as `hasattr` requires.
            fitted = self.name != model._fitted_attribute and model.__sklearn_is_fitted__()
            raise (AttributeError if fitted else NotFittedError)(
                f"{type(model).__name__!r} object has no attribute {self.name!r}"
                + ("" if fitted else ": fit it first")
            ) from None

    def __set__(self, model: object, value: object) -> None:
        raise AttributeError(
            f"{self.name} of {type(model).__name__} is what a fit has learned, and cannot be set: "
            + self.remedy.format(self.name)
        )


def list_fitted(model: object) -> dict[str, object]:
    """Return the fitted attributes by name: scalars and short lists, or shape and dtype of larger arrays."""
    kinds = {
        name
        for owner in type(model).__mro__
        for name, a in vars(owner).items()
        if isinstance(a, FittedAttribute)
    }
    own = {name for name in vars(model) if name.endswith("_") and not name.startswith("_")}
    found = {}
    for name in sorted(own | kinds):
        value = getattr(model, name, None)
        if value is not None and not (isinstance(value, list | tuple | dict) and not value):
            found[name] = shorten_value(value)
    return found


def shorten_value(value: Any) -> object:
    """Return a scalar unchanged, at most 20 entries as a list, and more entries as a text with the size."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        if value.size <= 20:
            return value.tolist()
        return f"array {' x '.join(map(str, value.shape))}, {value.dtype}"
    if isinstance(value, dict):
        return {str(key): shorten_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [shorten_value(item) for item in value] if len(value) <= 20 else f"{len(value)} entries"
    if isinstance(value, str | int | float | bool | type(None)):
        return value
    return str(value)
