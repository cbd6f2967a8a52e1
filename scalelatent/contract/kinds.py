"""Model kinds by the name that job files and saved models use."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import inspect
import threading
from pathlib import Path
from typing import Any

from scalelatent.errors import JobError

KINDS = {
    "capsule": ("scalelatent.models.capsule.estimator", "CapsuleRegression"),
    "compressive": ("scalelatent.models.mbn.compressive_estimator", "CompressiveMBN"),
    "crbm": ("scalelatent.models.crbm.estimator", "ConditionalRBM"),
    "mbn": ("scalelatent.models.mbn.estimator", "MultilayerBootstrapNetwork"),
}

# Parameters that a resumed fit may change: what is done stays, what follows has the new values.
FREE_ON_RESUME = {"crbm": ("learning_rate", "n_epochs")}
# They say where or how a fit runs, which a search says for all its candidates.
NOT_SEARCHED = ("n_jobs", "device", "warm_start")
# Only Python code fits these: a job file has no place for the outputs of another model, which they learn.
NO_JOBS = ("compressive",)

# Python 3.11 counts the depth of all threads' trees in one place: where two parse at once one of them may get
# a SystemError (cpython issue 106905).
_PARSING = threading.Lock()


def get_estimator(kind: str) -> Any:
    """The estimator class of a kind.

    Raises
    ------
    JobError
        An unknown kind: naming the nearest.

    Examples
    --------
    >>> get_estimator("capsule").__name__
    'CapsuleRegression'
    """
    module, name = _place(kind)
    return getattr(importlib.import_module(module), name)


def constructor_parameters(kind: str) -> dict[str, Any]:
    """The parameters of the constructor of a job's estimator with their defaults, in its own order.

    They are read from its source text. To import an estimator takes seconds (scikit-learn, numba), which
    whoever hands a job to a cluster need not spend.

    Returns
    -------
    dict
        A parameter without a default maps to `inspect.Parameter.empty`.

    Raises
    ------
    JobError
        An unknown kind, or one that jobs do not fit.

    Examples
    --------
    >>> constructor_parameters("capsule")["momentum"]
    0.9
    """
    module, name = _place(kind)
    if kind in NO_JOBS:
        raise JobError(
            f"[model] kind = {kind!r} is not fitted by jobs: in Python, "
            f"scalelatent.{name}().fit(X, network.transform(X)) learns the output of a network that a job of "
            'kind = "mbn" has fitted'
        )
    spec = importlib.util.find_spec(module)
    if spec is not None and spec.origin is not None and Path(spec.origin).suffix == ".py":
        found = _parse(Path(spec.origin).read_text(encoding="utf-8"), name)
        if found is not None:
            return found
    parameters = inspect.signature(get_estimator(kind)).parameters
    return {name: parameter.default for name, parameter in parameters.items()}


def _parse(text: str, name: str) -> dict[str, Any] | None:
    """Keyword-only parameters of a class's constructor; None where they are not plain enough to be read."""
    try:
        with _PARSING:
            body = ast.parse(text).body
    except SystemError:  # another library's thread was at it
        return None
    classes = (node for node in body if isinstance(node, ast.ClassDef) and node.name == name)
    methods = (node for found in classes for node in found.body if isinstance(node, ast.FunctionDef))
    constructor = next((method for method in methods if method.name == "__init__"), None)
    if constructor is None or len(constructor.args.args) > 1 or constructor.args.kwarg is not None:
        return None
    keywords = zip(constructor.args.kwonlyargs, constructor.args.kw_defaults, strict=True)
    try:
        return {
            argument.arg: inspect.Parameter.empty if default is None else ast.literal_eval(default)
            for argument, default in keywords
        }
    except ValueError:  # a default that is computed
        return None


def _place(kind: str) -> tuple[str, str]:
    """Module and class of a kind."""
    if kind not in KINDS:
        known = [name for name in KINDS if name not in NO_JOBS]
        near = difflib.get_close_matches(kind, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; there are: {', '.join(known)}"
        raise JobError(f"[model] kind = {kind!r} is no model{hint}")
    return KINDS[kind]
