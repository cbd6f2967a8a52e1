"""Describe the keys of job files in JOB.md, from the sections of a job and the parameters of each kind."""

from __future__ import annotations

import inspect
import json
import math
from typing import TYPE_CHECKING, Any

from scalelatent.contract.kinds import import_object, load_own_kinds
from scalelatent.contract.parameters import Allowed, Choice, Flag, Items, Number, Parameter, Satisfies, Whole

from .job_callbacks import CALLBACK_KEYS, OWN_CALLBACKS
from .spec import SECTIONS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

NONE = "none"
"""Word that stands for None in a job file."""

_HEAD = """\
# Job files

This page is for authors of job files. It lists all keys with their values and defaults.

A job file is a TOML file. `[job] out`, `[data] train` and `[model] kind` are required; all other keys have
defaults. Write "none" for the value None. Relative paths start at the folder in which you run the command.
Datasets, `out` and `scratch` may be addresses in an object store. An unknown key is an error that names the
nearest known key.

A value on the command line (`--set model.capsule_dim=8`) overrides the environment
(`SCALELATENT_MODEL__CAPSULE_DIM=8`), the environment overrides the job file, and the job file overrides the
defaults. `scalelatent plan` prints each value with its origin.

`python -m scalelatent.jobs.job_schema` writes this page.

"""


CALLBACKS_TEXT = """\
Callbacks report a run to other programs. The process that drives the run calls them, also for a submitted
job. An error in a callback does not end the fit; it gives one warning. `kind` selects the callback; the other
keys are its options. Other packages can add callbacks with the entry point `scalelatent.callbacks`, which
names a
subclass of `scalelatent.Callback`."""


def job_page() -> str:
    """Return the text of JOB.md, which lists all keys of job files."""
    lines = _HEAD.splitlines()
    for name, section in SECTIONS.items():
        lines += [f"## [{name}]", ""]
        if section is None:
            lines += ["`kind` selects the model; the other keys are its parameters.", ""]
            fitted_by_jobs = [kind for _, kind in sorted(load_own_kinds().items()) if not kind.python_only]
            for kind in fitted_by_jobs:
                lines += [
                    f'### kind = "{kind.name}"',
                    "",
                    *_table(map(_parameter_row, kind.load_parameters())),
                ]
        else:
            fields = section.model_json_schema()["properties"]
            lines += _table(
                (f"`{key}`", _type(field), _default(section.model_fields[key].default), field["description"])
                for key, field in fields.items()
            )
    lines += ["## [[callbacks]]", "", CALLBACKS_TEXT, ""]
    for callback, path in OWN_CALLBACKS.items():
        lines += [f'### kind = "{callback}"', ""]
        given = inspect.signature(import_object(path)).parameters.values()
        rows = ((one, *CALLBACK_KEYS[callback][one.name]) for one in given)
        lines += _table((f"`{one.name}`", value, _default(one.default), doc) for one, value, doc in rows)
    return "\n".join(lines)


def _table(rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| key | value | default | meaning |", "| --- | --- | --- | --- |"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return [*lines, ""]


def _parameter_row(parameter: Parameter) -> tuple[str, str, str, str]:
    doc = parameter.doc + ("; may change on resume" if parameter.changes_on_resume else "")
    return f"`{parameter.name}`", _allowed_text(parameter.allowed), _default(parameter.default), doc


def _default(value: object) -> str:
    if value is None:
        return f'`"{NONE}"`'
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, (str, list, tuple)):
        return f"`{json.dumps(value)}`"
    return "" if type(value).__name__ == "PydanticUndefinedType" else f"`{value}`"


def _type(field: dict[str, Any]) -> str:
    kinds = [of.get("type", "any") for of in field.get("anyOf", [field])]
    names = {"integer": "whole number", "string": "text", "boolean": "true, false", "object": "table"}
    return " or ".join(dict.fromkeys(names.get(kind, kind) for kind in kinds if kind != "null"))


def _allowed_text(allowed: Allowed) -> str:
    """Return the allowed values of a parameter, as the text of a table cell."""
    if isinstance(allowed, Choice):
        return ", ".join(_default(value) for value in allowed.values)
    if isinstance(allowed, Flag):
        return "`true`, `false`"
    if isinstance(allowed, Items):
        return ("number or " if allowed.one else "") + "list"
    if isinstance(allowed, Satisfies):
        return allowed.give.removeprefix("give ").replace("None", f'"{NONE}"').replace("|", "or")
    if not isinstance(allowed, (Number, Whole)):
        return ""
    whole = isinstance(allowed, Whole)
    bounds = [f"at least {allowed.least:g}"] if math.isfinite(allowed.least) else []
    if isinstance(allowed, Number):
        bounds += [f"above {allowed.above:g}"] if math.isfinite(allowed.above) else []
        bounds += [f"at most {allowed.most:g}"] if math.isfinite(allowed.most) else []
        bounds += [f"below {allowed.below:g}"] if math.isfinite(allowed.below) else []
    also = [_default(value) for value in allowed.also]
    return ", ".join([" ".join(["whole number" if whole else "number", " and ".join(bounds)]).strip(), *also])


if __name__ == "__main__":
    from pathlib import Path

    Path(__file__).with_name("JOB.md").write_text(job_page(), encoding="utf-8")
