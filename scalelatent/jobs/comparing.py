"""Compare runs through their run folders: the parameters that differ, and the results."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from scalelatent.errors import JobError

from .runfolder import RunFolder

ERRORS = (
    "best_validation_error",
    "mean_member_validation_error",
    "test_error",
    "test_nmi",
    "test_accuracy",
)
# Keys and sections of a job that do not affect the fitted model, such as name, output folder and cluster.
_NO_DIFFERENCE = ("job.name", "job.out", "job.scratch", "format", "format_version")
_SECTIONS_APART = ("origins", "cluster")
KIND = "model.kind"


def compare_runs(runs: Sequence[str | os.PathLike[str]]) -> dict[str, Any]:
    """Return a comparison of two or more runs, finished or not."""
    if len(runs) < 2:
        raise JobError("a comparison needs two or more run folders")
    folders = [RunFolder.open(run) for run in runs]
    urls = [folder.url for folder in folders]
    if twice := next((url for url in urls if urls.count(url) > 1), None):
        raise JobError(f"run folder {twice} is given twice; give each run once")
    jobs = [_flat(folder.read_job().to_dict()) for folder in folders]
    differing = {kind: _differing_keys(jobs, kind) for kind in {job.get(KIND) for job in jobs}}
    groups: list[dict[str, Any]] = []
    compared = []
    for folder, job in zip(folders, jobs, strict=True):
        names = differing[job.get(KIND)]
        group = {"kind": job.get(KIND), **_scored_on(job), "differing": names}
        if group not in groups:
            groups.append(group)
        parameters = {name: job.get(name) for name in names}
        compared.append({**_outcome(folder, job), "group": groups.index(group), "parameters": parameters})
    return {"runs": compared, "groups": groups, "notes": _notes(groups, compared)}


def _differing_keys(jobs: Sequence[Mapping[str, Any]], kind: str | None) -> list[str]:
    """Return the keys that differ between jobs of one kind; other kinds have other parameters."""
    alike = [job for job in jobs if job.get(KIND) == kind]
    names = dict.fromkeys(name for job in alike for name in job)
    return [name for name in names if any(job.get(name) != alike[0].get(name) for job in alike)]


def _flat(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a job by "section.key"."""
    found: dict[str, Any] = {}
    for section, values in job.items():
        if isinstance(values, Mapping) and section not in _SECTIONS_APART:
            found |= {f"{section}.{key}": value for key, value in values.items()}
    return {name: value for name, value in found.items() if name not in _NO_DIFFERENCE}


def _scored_on(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rows that the error refers to: test rows, or validation rows without test rows."""
    for role in ("test", "validation"):
        if job.get(f"data.{role}"):
            rows = job.get(f"data.{role}_rows")
            return {"role": role, "data": job[f"data.{role}"], "rows": rows}
    return {"role": None, "data": job.get("data.train"), "rows": job.get("data.train_rows")}


def _outcome(folder: RunFolder, job: Mapping[str, Any]) -> dict[str, Any]:
    state, passes = folder.read_state(), folder.records("metrics.jsonl")
    events = folder.records("events.jsonl")
    started: dict[str, Any] = next((e for e in reversed(events) if e.get("event") == "fit_started"), {})
    scored: dict[str, Any] = next((e for e in reversed(events) if e.get("event") == "scored"), {})
    last = passes[-1] if passes else {}
    done = state.get("state") == "done"
    found = {
        "run": folder.url,
        "id": state.get("id"),
        "kind": job.get(KIND),
        "architecture": started.get("architecture", job.get("model.architecture")),
        "state": state.get("state"),
        "rows": started.get("rows"),
        "passes": last.get("pass", state.get("pass")),
        "seconds": state.get("seconds") if done else None,
        "pass_seconds": round(sum(record.get("seconds") or 0.0 for record in passes), 3),
    }
    # Only the state of a finished run has valid errors; an active run may keep errors of an earlier fit.
    found |= {name: state[name] for name in ERRORS if done and state.get(name) is not None}
    if done and scored.get("test_rows"):
        found["test_rows"] = scored["test_rows"]
    if not done and last.get("validation_error") is not None:
        found["validation_error"] = last["validation_error"]
    return found


def _notes(groups: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]]) -> list[str]:
    notes = []
    kinds = list(dict.fromkeys(group["kind"] for group in groups))
    if len(kinds) > 1:
        notes.append(
            f"models of different kinds ({', '.join(map(str, kinds))}): their errors are not comparable"
        )
    data = {(group["role"], group["data"], group["rows"]) for group in groups}
    if len(data) > 1:
        notes.append("runs were scored on different rows: errors are only comparable within a group")
    unfinished = [str(run["id"]) for run in runs if run["state"] != "done"]
    if unfinished:
        notes.append(f"unfinished: {', '.join(unfinished)}; their errors are those of the last pass")
    return notes
