"""What a fit has learned: read by everyone, set by a fit alone."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any

from sklearn.exceptions import NotFittedError

__all__ = ["Learned", "brief", "learned_of", "learned_table"]

IN_PLACE = "change its values where they are ({0}[...] = values)"
FIT_AGAIN = "fit again"


class Learned:
    """A fitted parameter that is not the only source of predictions: to set it is an error."""

    def __init__(self, remedy: str, of: Callable[[Any], object] | None = None) -> None:
        self.remedy, self.of = remedy, of

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, model: Any, owner: type | None = None) -> Any:
        """The value; the descriptor itself of a class."""
        if model is None:
            return self
        try:
            return vars(model)[self.name] if self.of is None else self.of(model)
        except (KeyError, AttributeError):
            # Both errors are an AttributeError, which `hasattr` needs.
            fitted = self.name != model._sign_of_fit and model.__sklearn_is_fitted__()
            raise (AttributeError if fitted else NotFittedError)(
                f"{type(model).__name__!r} object has no attribute {self.name!r}"
                + ("" if fitted else ": fit it first")
            ) from None

    def __set__(self, model: object, value: object) -> None:
        raise AttributeError(
            f"{self.name} of {type(model).__name__} is what a fit has learned, and cannot be set: "
            + self.remedy.format(self.name)
        )


def learned_of(model: object) -> dict[str, object]:
    """What a fitted model has learned, by name: scalars and short lists; shape and dtype of larger arrays."""
    kinds = {
        name for owner in type(model).__mro__ for name, a in vars(owner).items() if isinstance(a, Learned)
    }
    own = {name for name in vars(model) if name.endswith("_") and not name.startswith("_")}
    found = {}
    for name in sorted(own | kinds):
        value = getattr(model, name, None)
        if value is not None and not (isinstance(value, list | tuple | dict) and not value):
            found[name] = brief(value)
    return found


def brief(value: Any) -> object:
    """A scalar or a short list as it is; anything larger by shape."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        if value.size <= 20:
            return value.tolist()
        return f"array {' x '.join(map(str, value.shape))}, {value.dtype}"
    if isinstance(value, dict):
        return {str(key): brief(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [brief(item) for item in value] if len(value) <= 20 else f"{len(value)} entries"
    if isinstance(value, str | int | float | bool | type(None)):
        return value
    return str(value)


def learned_table(model: object) -> str:
    """What a model has learned as a table of HTML; empty before a fit."""
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>"
        for name, value in learned_of(model).items()
    )
    return f"<table>{rows}</table>" if rows else ""
