"""Parameters of models, declared: name, default, what is allowed. Light: job files are read by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol, TypeGuard

DEVICES = ("auto", "cpu", "gpu")


def is_number(value: object) -> TypeGuard[float]:
    """Whether a parameter is a finite number; a bool is refused."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def is_whole(value: object, least: int = 1) -> TypeGuard[float]:
    """Whether a parameter is a whole number of at least ``least``."""
    return is_number(value) and int(value) == value and value >= least


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return hasattr(value, "__len__") and hasattr(value, "__iter__") and not isinstance(value, (str, Mapping))


def _is_same(value: object, default: object) -> bool:
    if is_list(value):
        return is_list(default) and list(value) == list(default)
    return bool(value == default)


class Allowed(Protocol):
    """What a parameter may be."""

    def refusal(self, value: object) -> str:
        """What is wrong with a value, after ``name=value``; empty where it is allowed."""


@dataclass(frozen=True)
class Number:
    """A finite number within bounds, or one of ``also``; ``give`` is what the message tells to do."""

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
    """A whole number of at least ``least``, or one of ``also``."""

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
    """One of some names, or None where it is among them."""

    values: tuple[str | None, ...]
    silent: tuple[str, ...] = ()
    """Also allowed, and named in no message: for tests."""

    def refusal(self, value: object) -> str:
        if (value is None or isinstance(value, str)) and value in self.values + self.silent:
            return ""
        return f" is not one of {', '.join(map(repr, self.values))}"


@dataclass(frozen=True)
class Flag:
    """True or False, or None where it is among ``also``."""

    give: str = "give True or False"
    also: tuple[None, ...] = ()

    def refusal(self, value: object) -> str:
        if value is None and value in self.also:
            return ""
        return "" if type(value).__name__ in ("bool", "bool_") else f": {self.give}"


@dataclass(frozen=True)
class Items:
    """A list of things that are allowed each, or ``one`` of them alone."""

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
class Where:
    """What a function says yes to."""

    fits: Callable[[Any], bool]
    give: str

    def refusal(self, value: object) -> str:
        return "" if self.fits(value) else f": {self.give}"


@dataclass(frozen=True)
class Anything:
    """Checked where the rows are known, or what it stands for is made."""

    def refusal(self, value: object) -> str:
        return ""


@dataclass(frozen=True)
class Parameter:
    """A parameter of a model's constructor."""

    name: str
    default: object
    allowed: Allowed
    doc: str  # one line, for job files
    decides: bool = True  # a resumed fit must have the same value
    changes_on_resume: bool = False  # a resumed fit may have another value, which holds from there on
    searched: bool = True  # candidates of a search may differ in it
    # it came after the first run folders were written, which are as if it had its default
    later: bool = False

    def check(self, value: object) -> None:
        """Raise a ValueError that names the parameter and what it may be."""
        if why := self.allowed.refusal(value):
            raise ValueError(f"{self.name}={value!r}{why}")


@dataclass(frozen=True)
class Parameters:
    """All parameters of a model, in the order of its constructor, and rules that several have to keep."""

    entries: tuple[Parameter, ...]
    rules: tuple[Callable[[Any], None], ...] = ()  # functions of the model that raise ValueError

    def __iter__(self) -> Iterator[Parameter]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, name: str) -> Parameter:
        return next(entry for entry in self.entries if entry.name == name)

    def defaults(self) -> dict[str, Any]:
        return {entry.name: entry.default for entry in self.entries}

    def check(self, model: object) -> None:
        """Refuse values out of range, by a ValueError that names the parameter and what it may be."""
        for entry in self.entries:
            entry.check(getattr(model, entry.name))
        for rule in self.rules:
            rule(model)

    def deciding(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the given values that decide a fit's result."""
        return {
            entry.name: given[entry.name]
            for entry in self.entries
            if entry.decides and not (entry.later and _is_same(given[entry.name], entry.default))
        }


WARM_START = Parameter("warm_start", False, Flag(), "start from the last fit", decides=False, searched=False)
RANDOM_STATE = Parameter(
    "random_state", None, Anything(), "seed of everything random; None draws one", decides=False
)
DEVICE = Parameter(
    "device",
    "auto",
    Choice(DEVICES, silent=("reference",)),
    "'auto' is the GPU where there is one",
    decides=False,
    searched=False,
)
N_JOBS = Parameter(
    "n_jobs",
    None,
    Where(
        lambda value: value is None or (is_whole(value, -(2**31)) and value != 0),
        "give a number of threads of at least 1, or None for all cores",
    ),
    "threads of a fit in one process",
    decides=False,
    searched=False,
)
