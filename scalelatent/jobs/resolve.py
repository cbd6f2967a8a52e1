"""Resolve job file, environment and command line into one `Job` with a value for every key.

Precedence: command line (``--set section.key=value``) > environment (``SCALELATENT_SECTION__KEY``) > job
file > defaults. The job records the origin of every value, which `scalelatent plan` prints.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from scalelatent.contract.kinds import find_job_kind, find_kind
from scalelatent.errors import JobError, StoreError, nearest
from scalelatent.storage.access import SECRET_NAMES
from scalelatent.storage.disk import check_address
from scalelatent.storage.location import FROM_ENVIRONMENT

from .job_callbacks import check_callbacks
from .spec import SECTIONS, Job

# Keys outside [cluster] that a resume may change: the handling of bad shards, and the cache.
_ALSO_CHANGEABLE = ("engine.on_bad_shard", "engine.cache")

VARIABLE_PREFIX = "SCALELATENT_"
_ACCOUNTS = ("anon", "cloud", "google_default")  # values of gcsfs's `token` that are not secrets
_PATH_KEYS = {
    "job": ("out", "scratch"),
    "data": ("train", "validation", "test", "target", "validation_target", "test_target"),
    "cluster": ("tls_ca", "tls_cert", "tls_key"),
}


def load_job(
    path: str | os.PathLike[str],
    *,
    settings: Iterable[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Job:
    """Read a job file and return the resolved job."""
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8-sig")  # Windows editors write a byte order mark
    except FileNotFoundError:
        raise JobError(f"job file {file} does not exist (looked in {Path.cwd()})") from None
    except IsADirectoryError:
        jobs = sorted(file.glob("*.toml"))
        step = f"give {jobs[0]}" if jobs else f"to resume a run folder: scalelatent resume {file}"
        raise JobError(f"{file} is a folder, not a job file; {step}") from None
    except UnicodeDecodeError as error:
        raise JobError(f"job file {file} cannot be read: {error}; save it as UTF-8") from None
    except (OSError, ValueError) as error:  # ValueError: an invalid file name
        reason = getattr(error, "strerror", None) or str(error)
        raise JobError(f"job file {shorten(str(file))} cannot be read: {reason}; check its name") from None
    try:
        stored = tomllib.loads(text)
    except RecursionError:
        raise JobError(f"job file {file} is not valid TOML: it is nested too deeply") from None
    except ValueError as error:
        reason = "a number has too many digits" if "digits" in str(error) else str(error)
        raise JobError(f"job file {file} is not valid TOML: {reason}") from None
    return resolve(stored, settings=settings, environ=environ, where=f"job file {file}")


def resolve(
    stored: Mapping[str, Any],
    *,
    settings: Iterable[str] = (),
    environ: Mapping[str, str] | None = None,
    where: str = "job",
) -> Job:
    """Resolve a job from nested values (as read from TOML), environment and command line."""
    raw: dict[str, dict[str, tuple[Any, str, str]]] = {name: {} for name in SECTIONS}
    callbacks = _resolve_callbacks(stored.get("callbacks", ()), where)
    for section, table in stored.items():
        if section == "callbacks":
            continue
        _check_section(section, where)
        if not isinstance(table, Mapping):
            raise JobError(f"{where}: {section!r} must be a section, [{section}], not a single value")
        for key, value in table.items():
            raw[section][key] = (_refuse_credentials(section, key, value, where), "job file", where)
    for section, key, value, name in _from_environment(os.environ if environ is None else environ):
        source = f"environment variable {name}"
        raw[section][key] = (_refuse_credentials(section, key, value, source), f"environment {name}", source)
    for setting in settings:
        section, key, value = parse_setting(setting)
        value = _refuse_credentials(section, key, value, "--set")
        raw[section][key] = (value, "command line", f"--set {setting}")

    origins: dict[str, str] = {}
    kind, params = _resolve_model(raw.pop("model"), where, origins)
    if not raw["search"]:
        del raw["search"]
    sections = {name: _resolve_section(name, values, where, origins) for name, values in raw.items()}
    job = Job(kind=kind, params=params, origins=origins, callbacks=callbacks, **sections)
    _check_agreement(job)
    return job


def override(job: Job, settings: Iterable[str]) -> Job:
    """Return a resolved job with changed values; refuse changes that a resume may not make."""
    origins = dict(job.origins)
    sections = {"cluster": job.cluster.model_dump(), "engine": job.engine.model_dump()}
    values = {
        name: {
            key: (value, origins.get(f"{name}.{key}", "default"), "job.json")
            for key, value in section.items()
        }
        for name, section in sections.items()
    }
    table = find_kind(job.kind).load_parameters()
    free = [*_ALSO_CHANGEABLE, *(f"model.{one.name}" for one in table if one.changes_on_resume)]
    params = dict(job.params)
    for setting in settings:
        section, key, value = parse_setting(setting)
        if section != "cluster" and f"{section}.{key}" not in free:
            raise JobError(
                f"--set {setting}: a resume may only change [cluster] values, and {', '.join(free)}; to "
                "change other values, start a new run: scalelatent fit JOB --out FOLDER"
            )
        if section == "model":
            params[key], origins[f"model.{key}"] = value, "command line"
            continue
        values[section][key] = (value, "command line", f"--set {setting}")
        other = {"workers": "scheduler", "scheduler": "workers"}.get(key)
        # A scheduler replaces the workers to start, and vice versa.
        if other and str(value).strip().lower() != "none":
            values[section][other] = (None, "default", "")
    made = {name: _resolve_section(name, given, "job", origins) for name, given in values.items()}
    changed = replace(job, **made, params=params, origins=origins)
    _check_agreement(changed)
    return changed


def parse_setting(text: str) -> tuple[str, str, Any]:
    """Split ``"section.key=value"`` and read the value."""
    name, equals, value = text.partition("=")
    section, dot, key = name.strip().partition(".")
    if not equals or not dot or not key:
        raise JobError(f"--set {text}: write --set section.key=value, for example --set model.capsule_dim=4")
    _check_section(section, f"--set {text}")
    return section, key, parse_value(value)


def parse_value(text: str) -> Any:
    """Parse a value as TOML; return invalid TOML as plain text."""
    text = text.strip()
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # invalid TOML, or a number or nesting beyond Python's limits
        return text
    return text if isinstance(value, date | datetime | time) else value


def _from_environment(environ: Mapping[str, str]) -> Iterable[tuple[str, str, Any, str]]:
    for name in sorted(environ):
        section, separator, key = name.removeprefix(VARIABLE_PREFIX).partition("__")
        if name.startswith(VARIABLE_PREFIX) and separator:
            _check_section(section.lower(), f"environment variable {name}")
            yield section.lower(), key.lower(), parse_value(environ[name]), name


def _refuse_credentials(section: str, key: str, value: Any, where: str) -> Any:
    """Return the value; refuse credentials, because job files are copied into run folders and shared."""
    shape = SECTIONS.get(section)
    known = () if shape is None else shape.model_fields
    if section != "model" and key not in known and SECRET_NAMES.search(key) and value not in _ACCOUNTS:
        raise JobError(f"{where}: [{section}] {key} looks like a credential; remove it; {FROM_ENVIRONMENT}")
    if (section, key) == ("data", "storage_options") and isinstance(value, str) and value != "none":
        raise JobError(
            f"{where}: [data] storage_options must be a table such as {{anon = true}}, without credentials; "
            f"{FROM_ENVIRONMENT}"
        )
    if key.startswith("storage_options") and isinstance(value, Mapping):
        for name, inner in value.items():
            _refuse_credentials(section, f"{key}.{name}", inner, where)
    for text in value if isinstance(value, list | tuple) else [value]:
        if isinstance(text, str) and "\0" in text:
            raise JobError(f"{where}: [{section}] {key} contains a NUL character; remove it")
        if isinstance(text, str) and "://" in text:
            try:
                check_address(text)
            except StoreError as error:
                raise JobError(f"{where}: [{section}] {key}: {error}") from None
    return value


def _resolve_callbacks(given: Any, where: str) -> tuple[dict[str, Any], ...]:
    tables = check_callbacks(given, where)
    for table in tables:
        for key, value in table.items():
            _refuse_credentials("callbacks", key, value, where)
    return tables


def _check_section(section: str, where: str) -> None:
    if section not in SECTIONS:
        known = [*SECTIONS, "callbacks"]
        raise JobError(f"{where}: unknown section [{section}]; {nearest(section, known)}")


def _resolve_model(
    values: dict[str, tuple[Any, str, str]], where: str, origins: dict[str, str]
) -> tuple[str, dict[str, Any]]:
    """Return kind and parameters of the model; refuse parameters that models of this kind do not have."""
    if "kind" not in values:
        raise JobError(f'{where}: [model] kind is missing; write for example kind = "capsule"')
    kind, origins["model.kind"], source = values.pop("kind")
    if not isinstance(kind, str):
        raise JobError(f'{source}: [model] kind must be a word such as "capsule", not {kind!r}')
    table = find_job_kind(kind).load_parameters()
    known = table.defaults()
    for key, (value, _, source) in values.items():
        if key in table.removed:
            try:
                table.drop_removed({key: value})
            except ValueError as error:
                raise JobError(f"{source}: [model] {error}") from None
        elif key not in known:
            raise JobError(f"{source}: unknown key {key!r} in [model] (kind {kind!r}); {nearest(key, known)}")
    params = {}
    for key, default in known.items():
        value, origin, _ = values.get(key, (default, "default", where))
        params[key] = None if isinstance(value, str) and value.strip().lower() == "none" else value
        origins[f"model.{key}"] = origin
    return kind, params


def _resolve_section(
    name: str, values: dict[str, tuple[Any, str, str]], where: str, origins: dict[str, str]
) -> Any:
    """Check the keys and then the values of one section; return the section."""
    shape = SECTIONS[name]
    assert shape is not None
    known = shape.model_fields
    for key, (_, _, source) in values.items():
        if key not in known:
            raise JobError(f"{source}: unknown key {key!r} in [{name}]; {nearest(key, known)}")
    given = {key: value for key, (value, _, _) in values.items()}
    try:
        section = shape.model_validate(given)
    except ValidationError as error:
        raise JobError(_validation_message(error, name, values, where)) from None
    for key in known:
        origins[f"{name}.{key}"] = values[key][1] if key in values else "default"
    paths = {key: _absolute(getattr(section, key)) for key in _PATH_KEYS.get(name, ())}
    return section.model_copy(update=paths)


def _validation_message(
    error: ValidationError, name: str, values: dict[str, tuple[Any, str, str]], where: str
) -> str:
    """Return a validation error as one readable line."""
    first = error.errors()[0]
    key = str(first["loc"][0])
    if first["type"] == "missing":
        return f"{where}: [{name}] {key} is missing"
    value, _, source = values[key]
    message = first["msg"].removeprefix("Value error, ")
    return f"{source}: [{name}] {key} = {shorten(repr(value))}: {message[0].lower()}{message[1:]}"


def shorten(text: str) -> str:
    """Return a text, shortened in the middle if it has more than 200 characters."""
    return text if len(text) <= 200 else f"{text[:40]}…{text[-40:]}"


def _absolute(path: str | None) -> str | None:
    """Return an absolute path, so that a resume in another folder finds it; return URLs unchanged."""
    if path is None or "://" in path:
        return path
    return os.path.abspath(os.path.expanduser(path))


def _check_search(job: Job) -> None:
    """Refuse a search over unknown parameters, or with both folds and validation rows."""
    if job.search is None:
        return
    table = find_job_kind(job.kind).load_parameters()
    known = [one.name for one in table if one.searched]
    for name in job.search.grid:
        if name not in known and name in table.defaults():
            raise JobError(
                f"[search] grid: {name} affects where or how a fit runs, not the model; give it in [model]"
            )
        if name not in known:
            raise JobError(
                f"[search] grid: unknown parameter {name!r} (kind {job.kind!r}); {nearest(name, known)}"
            )
    if job.search.cv is not None and job.data.validation is not None:
        raise JobError(
            f"[search] cv = {job.search.cv} and [data] validation are both given; a search compares "
            "candidates on validation rows or by folds of the training rows. Give only one of them"
        )


def _check_agreement(job: Job) -> None:
    """Refuse settings that contradict each other."""
    _check_search(job)
    data, cluster, params, origins = job.data, job.cluster, job.params, job.origins
    for name in ("validation", "test"):
        if getattr(data, f"{name}_rows") is not None and getattr(data, name) is None:
            raise JobError(
                f"[data] {name}_rows is given without [data] {name}; to use rows of the training dataset "
                f'write {name} = "{data.train}"'
            )
        if getattr(data, f"{name}_target") is not None and getattr(data, name) is None:
            raise JobError(f"[data] {name}_target is given without [data] {name}; give both or neither")
    if cluster.scheduler is not None and cluster.workers is not None:
        raise JobError(
            "[cluster] scheduler and workers are both given; give either the address of a running scheduler "
            "or the number of workers to start"
        )
    seed = params.get("random_state")
    if job.job.seed is not None and seed is not None and seed != job.job.seed:
        raise JobError(
            f"[job] seed = {job.job.seed} and [model] random_state = {seed!r} differ; give only one of them"
        )
    device = params.get("device")
    both = origins.get("model.device", "default") != "default" and cluster.device is not None
    if both and device != cluster.device:
        raise JobError(
            f"[cluster] device = {cluster.device!r} and [model] device = {device!r} differ; give only one of "
            "them"
        )
