"""Declarations of model parameters: names, defaults and allowed values.

Job files are checked with these declarations, so this module imports little.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol, TypeGuard

from scalelatent.errors import warn_user

DEVICES = ("auto", "cpu", "gpu")


def is_number(value: object) -> TypeGuard[float]:
    """Return True for a finite number that is not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def is_whole(value: object, least: int = 1) -> TypeGuard[float]:
    """Return True for a whole number of at least ``least``."""
    return is_number(value) and int(value) == value and value >= least


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return hasattr(value, "__len__") and hasattr(value, "__iter__") and not isinstance(value, (str, Mapping))


def _is_same(value: object, default: object) -> bool:
    if is_list(value):
        return is_list(default) and list(value) == list(default)
    return bool(value == default)


class Allowed(Protocol):
    """Rule that decides which values of a parameter are allowed."""

    def refusal(self, value: object) -> str:
        """Return the end of an error message that starts with ``name=value``, or "" for an allowed value."""


@dataclass(frozen=True)
class Number:
    """Rule that allows a finite number within bounds, or one of the values ``also``.

    ``give`` is the advice in the error message for any other value, such as "give a number above 0".
    """

    give: str = "give a finite number"
    least: float = -math.inf
    above: float = -math.inf
    most: float = math.inf
    below: float = math.inf
    also: tuple[str | None, ...] = ()

    def refusal(self, value: object) -> str:
        if (value is None or isinstance(value, str)) and value in self.also:
            return ""
        if not is_number(value):
            return f": {self.give}" if self.also else ": give a finite number"
        inside = self.least <= value <= self.most and self.above < value < self.below
        return "" if inside else f": {self.give}"


@dataclass(frozen=True)
class Whole:
    """Rule that allows a whole number of at least ``least``, or one of the values ``also``."""

    least: int = 1
    also: tuple[str | None, ...] = ()
    give: str = ""

    def refusal(self, value: object) -> str:
        if is_whole(value, self.least):
            return ""
        if (value is None or isinstance(value, str)) and value in self.also:
            return ""
        return f": {self.give or f'give a whole number of at least {self.least}'}"


@dataclass(frozen=True)
class Choice:
    """Rule that allows the strings (or None) in ``values``, and the strings in ``silent``."""

    values: tuple[str | None, ...]
    silent: tuple[str, ...] = ()
    """Allowed values that only tests use, so error messages do not list them."""

    def refusal(self, value: object) -> str:
        if (value is None or isinstance(value, str)) and value in self.values + self.silent:
            return ""
        return f" is not one of {', '.join(map(repr, self.values))}"


@dataclass(frozen=True)
class Flag:
    """Rule that allows True or False; None is allowed only if it is in ``also``."""

    give: str = "give True or False"
    also: tuple[None, ...] = ()

    def refusal(self, value: object) -> str:
        if value is None and value in self.also:
            return ""
        return "" if type(value).__name__ in ("bool", "bool_") else f": {self.give}"


@dataclass(frozen=True)
class Items:
    """Rule that allows a non-empty list of ``item`` values; with ``one``, also a single ``item`` value."""

    item: Allowed
    give: str
    one: bool = False
    also: tuple[None, ...] = ()

    def refusal(self, value: object) -> str:
        if value is None and value in self.also:
            return ""
        if is_list(value):
            fits = len(value) > 0 and not any(self.item.refusal(one) for one in value)
        else:
            fits = self.one and not self.item.refusal(value)
        return "" if fits else f": {self.give}"


@dataclass(frozen=True)
class Satisfies:
    """Rule that allows any value for which the function ``fits`` returns True."""

    fits: Callable[[Any], bool]
    give: str

    def refusal(self, value: object) -> str:
        return "" if self.fits(value) else f": {self.give}"


@dataclass(frozen=True)
class Anything:
    """Rule that allows any value; the fit checks the value when it has the rows."""

    def refusal(self, value: object) -> str:
        return ""


@dataclass(frozen=True)
class Parameter:
    """Declaration of one parameter of a model's constructor: its name, default, allowed values and help."""

    name: str
    default: object
    allowed: Allowed
    doc: str  # one line of help for job files
    decides: bool = True  # True: the value changes the result, so a resumed fit must have an equal value
    changes_on_resume: bool = False  # True: a resumed fit may continue with another value
    searched: bool = True  # True: a hyperparameter search may try several values
    # True for a parameter that earlier versions of the model did not have. Run folders of these versions do
    # not contain the parameter, and their fits behaved as with its default.
    later: bool = False

    def check(self, value: object) -> None:
        """Raise a ValueError that names the parameter and its allowed values if ``value`` is not allowed."""
        if why := self.allowed.refusal(value):
            raise ValueError(f"{self.name}={value!r}{why}")


@dataclass(frozen=True)
class Parameters:
    """All parameters of a model, in the order of its constructor, and rules about combinations of them."""

    entries: tuple[Parameter, ...]
    # Each function receives a model and raises a ValueError for a combination of values that is not allowed.
    rules: tuple[Callable[[Any], None], ...] = ()
    # Parameters of earlier versions, with their defaults. A job or saved model that sets one of them is
    # accepted if the value is the default.
    removed: Mapping[str, Any] = field(default_factory=dict)
    # Names in ``removed`` of parameters that changed only the fit, so that saved models predict as before.
    removed_from_fit: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Parameter]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, name: str) -> Parameter:
        return next(entry for entry in self.entries if entry.name == name)

    def defaults(self) -> dict[str, Any]:
        return {entry.name: entry.default for entry in self.entries}

    def drop_removed(self, given: Mapping[str, Any], *, fitted: bool = False) -> dict[str, Any]:
        """Return the given parameter values without parameters that only earlier versions had.

        If ``fitted`` is True, the values are those of a fitted model. Then a value of a parameter in
        ``removed_from_fit`` that is not the default causes a warning instead of an error.

        Raises
        ------
        ValueError
            If a former parameter has another value than its default.
        """
        for name, default in self.removed.items():
            if name not in given or _is_same(given[name], default):
                continue
            text = (
                f"{name}={given[name]!r}: this version has no parameter {name} and behaves as with "
                f"{name}={default!r}"
            )
            if not fitted or name not in self.removed_from_fit:
                raise ValueError(f"{text}: remove {name} and fit again, or use the version that wrote it")
            warn_user(f"the model was saved with {text}: its predictions stay the same, but not a new fit")
        return {name: value for name, value in given.items() if name not in self.removed}

    def defaults_of_other_versions(self) -> dict[str, Any]:
        """Return the defaults of the parameters that only some versions of the package have.

        A run folder of a version without such a parameter contains a fit that behaved as with the default.
        """
        return {**self.removed, **{entry.name: entry.default for entry in self.entries if entry.later}}

    def check(self, model: object) -> None:
        """Raise a ValueError that names the parameter if a value or combination of values is not allowed."""
        for entry in self.entries:
            entry.check(getattr(model, entry.name))
        for rule in self.rules:
            rule(model)

    def select_deciding(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return, from the given values, only the parameters that change the result of a fit."""
        return {entry.name: given[entry.name] for entry in self.entries if entry.decides}


WARM_START = Parameter("warm_start", False, Flag(), "start from the last fit", decides=False, searched=False)
RANDOM_STATE = Parameter(
    "random_state", None, Anything(), "seed of all random numbers; None draws one", decides=False
)
DEVICE = Parameter(
    "device",
    "auto",
    Choice(DEVICES, silent=("reference",)),
    "'auto' uses a GPU if there is one",
    decides=False,
    searched=False,
)
N_JOBS = Parameter(
    "n_jobs",
    None,
    Satisfies(
        lambda value: value is None or (is_whole(value, -(2**31)) and value != 0),
        "give a number of threads of at least 1, or None for all cores",
    ),
    "number of threads of a fit in one process",
    decides=False,
    searched=False,
)
