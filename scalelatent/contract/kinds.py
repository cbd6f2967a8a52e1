"""The table of kinds: what each model tells the rest of the package, found by folder and by entry point."""

from __future__ import annotations

import difflib
import importlib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from scalelatent.errors import JobError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from .parameters import Parameters

GROUP = "scalelatent.models"
OWN = "scalelatent.models:KINDS"


class HasKind(Protocol):
    """An estimator: what the contract has to know of it."""

    @property
    def _kind(self) -> str: ...


@dataclass(frozen=True)
class Kind:
    """What a model tells the rest of the package.

    A package of models declares its kinds by an entry point of the group ``scalelatent.models``, whose value
    is a `Kind` or an iterable of some. The module that holds them is imported to list them, so it should
    import little; what is given as ``"module:name"`` is imported when it is first used.

    Attributes
    ----------
    name : str
        In job files, saved models and the names of tasks.
    estimator : str
        ``"module:Class"``, a subclass of `scalelatent.estimators.base.StreamedEstimator`.
    parameters : str
        ``"module:TABLE"``, the constructor's `scalelatent.contract.parameters.Parameters`, in a module that
        imports little: job files are read by it.
    kernels : mapping
        Kernel -> backend (``"reference"``, ``"numba"``, ``"cupy"``) -> ``"module:function"``.
    warm : str
        Package whose compiled kernels ``scalelatent cluster warm`` compiles ahead; "" has none.
    python_only : str
        How Python code fits this kind, where a job cannot; "" where jobs fit it.
    takes_targets : bool
        Whether it learns outputs, which a job may name as a dataset (``[data] target``).
    supervised : bool
        Whether it cannot learn without labels or outputs, so that a job must not leave them out.
    report_seconds, report_rows : float, int or None
        What a report takes beside predictions, and the most rows that it looks at (None: all).
    scorer : str
        ``"module:Class"`` of a `scalelatent.evaluation.scoring.Scorer`.
    report : str
        ``"module:function"`` that makes a model's part of a report (`scalelatent.report.page.Section`); ""
        has the part that all models share.
    compare : str
        ``"module:function"`` that draws figures of several runs of this kind side by side; "" has none.
    scoring_seconds : float
        What scoring takes for a row beside its prediction.

    Examples
    --------
    >>> kind = Kind("means", estimator="means.estimator:Means", parameters="means.parameters:PARAMETERS")
    >>> kind.python_only, kind.takes_targets
    ('', False)
    """

    name: str
    estimator: str
    parameters: str
    kernels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    warm: str = ""
    python_only: str = ""
    takes_targets: bool = False
    supervised: bool = False
    scorer: str = "scalelatent.evaluation.scoring:ClassScorer"
    report: str = ""
    compare: str = ""
    report_seconds: float = 2.0
    report_rows: int | None = None
    scoring_seconds: float = 0.0

    def estimator_class(self) -> Any:
        return load(self.estimator)

    def table(self) -> Parameters:
        table: Parameters = load(self.parameters)
        return table


def load(place: str) -> Any:
    """What ``"module:name"`` names."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def find_kind(name: str) -> Kind:
    """The kind of a name, of ours or of other packages; a JobError names the nearest."""
    kind = own_kinds().get(name) or known_kinds().get(name)
    if kind is None:
        known = [name for name, kind in known_kinds().items() if not kind.python_only]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; there are: {', '.join(sorted(known))}"
        raise JobError(f"[model] kind = {name!r} is not a model{hint}")
    return kind


def job_kind(name: str) -> Kind:
    """The kind of a name that a job gives; a JobError where jobs do not fit it."""
    kind = find_kind(name)
    if kind.python_only:
        raise JobError(f"[model] kind = {name!r} is not fitted by jobs: in Python, {kind.python_only}")
    return kind


def kind_of(model: HasKind) -> Kind:
    """The kind of an estimator."""
    return find_kind(model._kind)


def find_kernels(name: str) -> Mapping[str, str] | None:
    """Backend -> ``"module:function"`` of a kernel; None where there is no such kernel."""
    for kinds in (own_kinds, known_kinds):
        for kind in kinds().values():
            if name in kind.kernels:
                return kind.kernels[name]
    return None


def kernel_names() -> list[str]:
    return sorted({name for kind in known_kinds().values() for name in kind.kernels})


@cache
def own_kinds() -> dict[str, Kind]:
    """The kinds of this package, by name."""
    return {kind.name: kind for kind in load(OWN)}


@cache
def known_kinds() -> dict[str, Kind]:
    """All kinds, by name: ours, and those of the entry points of other packages."""
    from importlib.metadata import entry_points  # takes a third of `import scalelatent`

    found = dict(own_kinds())
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        if point.value == OWN:
            continue
        for kind in _kinds_of(point):
            if kind.name in found:
                _warn(point, f"there is a kind {kind.name!r} already")
            else:
                found[kind.name] = kind
    return found


def _kinds_of(point: EntryPoint) -> Iterable[Kind]:
    """The kinds of an entry point; none, with a warning, where it is broken."""
    try:
        given = point.load()
        kinds = [given] if isinstance(given, Kind) else list(given)
    except Exception as error:  # noqa: BLE001  another package's code may raise anything
        _warn(point, f"{type(error).__name__}: {error}")
        return []
    if odd := [kind for kind in kinds if not isinstance(kind, Kind)]:
        _warn(point, f"{odd[0]!r:.80} is not a scalelatent.contract.kinds.Kind")
        return []
    return kinds


def _warn(point: EntryPoint, why: str) -> None:
    package = f"package {point.dist.name} {point.dist.version}" if point.dist is not None else "a package"
    warnings.warn(
        f"{package}: its models are left out: entry point {point.name} = {point.value!r} of {GROUP}: {why}",
        UserWarning,
        stacklevel=2,
    )
