"""What a fit has learned: read by everyone, set by a fit alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Learned"]

IN_PLACE = "change its values where they are ({0}[...] = values)"
FIT_AGAIN = "fit again"


class Learned:
    """A fitted parameter of an estimator. Predictions come from more than this one array, so that another in
    its place would be ignored, or agree with half of the rest: to set it is an error that says what works.

    A fit puts the value into the estimator's ``__dict__``; or ``of`` computes it from what else is there.

    Parameters
    ----------
    remedy : str
        What the error tells to do; ``{0}`` is the attribute's name.
    of : callable, optional
        Estimator -> value; an AttributeError of it means that nothing was fitted yet.

    Examples
    --------
    >>> class Model:
    ...     w_ = Learned(FIT_AGAIN)
    >>> m = Model()
    >>> hasattr(m, "w_")
    False
    >>> vars(m)["w_"] = 3
    >>> m.w_
    3
    >>> m.w_ = 4
    Traceback (most recent call last):
    AttributeError: w_ of Model is what a fit has learned, and cannot be set: fit again
    """

    def __init__(self, remedy: str, of: Callable[[Any], Any] | None = None) -> None:
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
            raise AttributeError(
                f"{type(model).__name__!r} object has no attribute {self.name!r}: fit it first"
            ) from None

    def __set__(self, model: Any, value: Any) -> None:
        raise AttributeError(
            f"{self.name} of {type(model).__name__} is what a fit has learned, and cannot be set: "
            + self.remedy.format(self.name)
        )
