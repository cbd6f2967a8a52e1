"""Table of model kinds: one `Kind` per model, from this package and from entry points of other packages."""

from __future__ import annotations

import difflib
import importlib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from scalelatent.errors import JobError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from .parameters import Parameters

GROUP = "scalelatent.models"
OWN_ENTRY_POINT = "scalelatent.models:KINDS"


@dataclass(frozen=True)
class Kind:
    """Description of one model for the rest of the package: its classes, kernels and report.

    Another package declares its kinds with an entry point of the group ``scalelatent.models``. The value of
    the entry point is a `Kind` or an iterable of `Kind`. Its module is imported whenever kinds are listed, so
    this module should import little. Objects given as ``"module:name"`` are imported at their first use.

    Attributes
    ----------
    name : str
        Name of the kind in job files, in saved models and in the names of tasks.
    estimator : str
        ``"module:Class"``, a subclass of `scalelatent.estimators.base.StreamedEstimator`.
    parameters : str
        ``"module:TABLE"`` of the constructor's `scalelatent.contract.parameters.Parameters`. The module
        should import little, because every check of a job file imports it.
    kernels : mapping
        Name of the kernel -> backend (``"reference"``, ``"numba"``, ``"cupy"``) -> ``"module:function"``.
    warm : str
        Package whose kernels ``scalelatent cluster warm`` compiles in advance; "" if there are none.
    python_only : str
        How to fit this model from Python, if jobs cannot fit it; "" if jobs can fit it.
    takes_targets : bool
        True if the model learns outputs, which a job may name as a dataset (``[data] target``).
    supervised : bool
        True if the model cannot be fitted without labels or outputs; jobs without them are refused.
    report_seconds, report_rows : float, int or None
        Seconds that a report takes in addition to predictions, and the maximum number of rows that it uses
        (None: all rows).
    scorer : str
        ``"module:Class"`` of a `scalelatent.evaluation.scoring.Scorer`.
    report : str
        ``"module:function"`` that makes the model's section of a report (`scalelatent.report.page.Section`);
        "" for reports with only the sections that all models share.
    scoring_seconds : float
        Seconds per row that scoring takes in addition to the prediction.

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
    report_seconds: float = 2.0
    report_rows: int | None = None
    scoring_seconds: float = 0.0

    def estimator_class(self) -> Any:
        return import_object(self.estimator)

    def load_parameters(self) -> Parameters:
        """Import and return the declarations of the constructor's parameters."""
        table: Parameters = import_object(self.parameters)
        return table


def import_object(reference: str) -> Any:
    """Import and return the object that ``"module:name"`` names."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def find_kind(name: str) -> Kind:
    """Return the model kind ``name`` of any package; raise a JobError with a suggestion if it is unknown."""
    kind = load_own_kinds().get(name) or load_all_kinds().get(name)
    if kind is None:
        known = [name for name, kind in load_all_kinds().items() if not kind.python_only]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; there are: {', '.join(sorted(known))}"
        raise JobError(f"[model] kind = {name!r} is not a model{hint}")
    return kind


def find_job_kind(name: str) -> Kind:
    """Return the model kind that a job file names; raise a JobError if jobs cannot fit such a model."""
    kind = find_kind(name)
    if kind.python_only:
        raise JobError(f"[model] kind = {name!r} cannot be fitted by a job: in Python, {kind.python_only}")
    return kind


def find_kernels(name: str) -> Mapping[str, str] | None:
    """Return the functions of a kernel (backend -> ``"module:function"``), or None for an unknown name."""
    for kinds in (load_own_kinds, load_all_kinds):
        for kind in kinds().values():
            if name in kind.kernels:
                return kind.kernels[name]
    return None


def list_kernels() -> list[str]:
    return sorted({name for kind in load_all_kinds().values() for name in kind.kernels})


@cache
def load_own_kinds() -> dict[str, Kind]:
    """Import and return the model kinds of this package, by name."""
    return {kind.name: kind for kind in import_object(OWN_ENTRY_POINT)}


@cache
def load_all_kinds() -> dict[str, Kind]:
    """Return all model kinds by name: those of this package, then those of other packages' entry points."""
    from importlib.metadata import entry_points  # this import takes a third of `import scalelatent`

    found = dict(load_own_kinds())
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        if point.value == OWN_ENTRY_POINT:
            continue
        for kind in _load_kinds(point):
            if kind.name in found:
                _warn_ignored(point, f"another package already defines the kind {kind.name!r}")
            else:
                found[kind.name] = kind
    return found


def _load_kinds(point: EntryPoint) -> Iterable[Kind]:
    """Return the model kinds of an entry point; if it is invalid, warn and return an empty list."""
    try:
        value = point.load()
        kinds = [value] if isinstance(value, Kind) else list(value)
    except Exception as error:  # noqa: BLE001  another package's code may raise anything
        _warn_ignored(point, f"{type(error).__name__}: {error}")
        return []
    if invalid := [kind for kind in kinds if not isinstance(kind, Kind)]:
        _warn_ignored(point, f"{invalid[0]!r:.80} is not a scalelatent.contract.kinds.Kind")
        return []
    return kinds


def _warn_ignored(point: EntryPoint, why: str) -> None:
    package = f"package {point.dist.name} {point.dist.version}" if point.dist is not None else "a package"
    warnings.warn(
        f"{package}: its models are ignored: entry point {point.name} = {point.value!r} of {GROUP}: {why}",
        UserWarning,
        stacklevel=2,
    )
