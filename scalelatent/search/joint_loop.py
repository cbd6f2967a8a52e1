"""Training loop of several learners in shared passes; a learner that is done leaves, the others continue."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from scalelatent.contract.learners import BatchLearner
from scalelatent.engine.batch_loop import fit_batches
from scalelatent.engine.callbacks import Callback
from scalelatent.engine.checkpoints import EngineStore
from scalelatent.engine.executor import Executor
from scalelatent.engine.passes import Stage
from scalelatent.engine.plan import ALLOWED_SHARE, Resources, check_fits, stage_memory
from scalelatent.storage.record import same_array

from .joint import JointLearner, JointState, MemberRows, make_joint_stage

# Largest number of states in the memory of one worker: the states of two consecutive passes, one that was
# read from storage, and two copies while a state is written.
_STATES_HELD = 5


@dataclass(frozen=True)
class Member:
    """One learner of a joint fit, its initial state, and its rows by name (``"train"``, ``"validation"``)."""

    learner: BatchLearner
    state: object
    rows: Mapping[str, MemberRows]


@dataclass(frozen=True)
class Outcome:
    """Result of a member (learner): last state, records of passes, error message, whether it has ended."""

    state: object
    history: list[dict[str, Any]]
    error: str | None
    done: bool


def fit_joint(
    executor: Executor,
    name: str,
    members: Mapping[str, Member],
    *,
    callbacks: Callback,
    device: str = "auto",
    classes: np.ndarray | None = None,
    first: int = 0,
    until: int = 0,
    store: EngineStore | None = None,
    grid: Mapping[str, Any] | None = None,
    **checkpoint: Any,
) -> dict[str, Outcome]:
    """Run batch learners jointly, each until it is done; return their outcomes by key.

    ``first`` is the number of passes that the members (learners) have had. ``until``, unless it is 0, is the
    number of the pass after which all members stop.
    """
    outcomes = {} if store is None else load_outcomes(store, name, members)
    state = JointState({k: m.state for k, m in members.items() if k not in outcomes}, {}, first)
    history, stage_name = [], ""  # type: ignore[var-annotated]
    if store is not None:
        stage_name, state, history = _resume(store, name, members, state)
    stopped = False
    while state.members:
        live = {key: members[key] for key in state.members}
        segment = f"{name}-{len(live)}_estep"
        stage = make_joint_stage(
            segment,
            {key: (m.learner, m.rows) for key, m in live.items()},
            device,
            classes,
            until=until,
            **(grid or {}),
        )
        learner = cast(JointLearner, stage.work)
        if not learner.is_done(state):
            callbacks.on_stage({"stage": segment, "rows": stage.rows})
            result = fit_batches(
                executor, stage, state, callbacks=callbacks, store=store, first=state.iteration, **checkpoint
            )
            if stage_name not in ("", segment) and store is not None:
                store.drop_stage(stage_name)
            stage_name, state, history = segment, result.state, _merge_histories(history, result.history)
            stopped = not learner.is_done(state)
        ended = learner.find_ended(state)
        leaving = list(state.members) if stopped or (until and state.iteration >= until) else ended
        for key in leaving:
            outcomes[key] = Outcome(
                state.members[key], _select_member_records(history, key), state.failed.get(key), key in ended
            )
            if store is not None:
                tree = {k: getattr(outcomes[key], k) for k in ("state", "history", "error", "done")}
                store.save_result(f"{name}-member-{key}", tree)
        rest = {k: v for k, v in state.members.items() if k not in leaving}
        state = JointState(rest, {}, state.iteration)
    if store is not None:
        # Remove the stored states of all stages (each with fewer members), also those of an interrupted run.
        for n in range(1, len(members) + 1):
            store.drop_stage(f"{name}-{n}_estep")
    return {key: outcomes[key] for key in members}


def load_outcomes(store: EngineStore, name: str, keys: Iterable[str]) -> dict[str, Outcome]:
    """Return the stored outcomes of members (learners) that an earlier call of :func:`fit_joint` finished."""
    out = {}
    for key in keys:
        stored = store.load_result(f"{name}-member-{key}")
        if stored is not None:
            out[key] = Outcome(stored["state"], stored["history"], stored["error"], bool(stored["done"]))
    return out


def _resume(
    store: EngineStore, name: str, members: Mapping[str, Member], state: JointState
) -> tuple[str, JointState, list[dict[str, Any]]]:
    """Return (stage, state, history) of an interrupted loop; its last stage has the fewest members."""
    if not state.members:
        return "", state, []
    stages = [f"{name}-{n}_estep" for n in range(len(members), 0, -1)]
    found = next(((s, f) for s in reversed(stages) if (f := store.latest_state(s)) is not None), None)
    if found is None:
        return "", state, []
    stage, (iteration, stored, _) = found
    history: list[dict[str, Any]] = []
    for earlier in stages[: stages.index(stage) + 1]:
        history = _merge_histories(history, store.load_history(earlier, iteration))
    # Exclude members (learners) that ended before the interruption and whose outcomes were stored.
    rest = {k: v for k, v in stored.members.items() if k in state.members}
    return stage, replace(stored, members=rest), history


def _merge_histories(
    before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the records of both lists, sorted by pass; if both lists have a pass, use that of ``before``."""
    by_pass = {record["pass"]: record for record in (*after, *before)}
    return [by_pass[k] for k in sorted(by_pass)]


def _select_member_records(history: Sequence[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    shared = ("stage", "seconds", "rows", "bytes_read", "candidates")
    return [
        {**record["members"][key], **{k: record[k] for k in shared}}
        for record in history
        if key in record["members"]
    ]


def count_array_bytes(tree: object, visited: set[object] | None = None) -> int:
    """Return the bytes of all arrays in dataclasses, dicts and sequences; a repeated array counts once."""
    visited = set() if visited is None else visited
    if isinstance(tree, np.ndarray):
        key = same_array(tree)
        fresh = key not in visited
        visited.add(key)
        return tree.nbytes if fresh else 0
    if isinstance(tree, Mapping):
        return sum(count_array_bytes(v, visited) for v in tree.values())
    if isinstance(tree, (list, tuple)):
        return sum(count_array_bytes(v, visited) for v in tree)
    return sum(count_array_bytes(v, visited) for v in vars(tree).values()) if hasattr(tree, "__dict__") else 0


def estimate_peak_bytes(stage: Stage, resources: Resources, constants: int) -> dict[str, int]:
    """Return the peak bytes of a worker in a joint pass, by purpose.

    A pass reads several sets of rows, such as training and validation rows. Statistics that wait until they
    are merged exist for all sets at once, so their bytes are added. For other memory the maximum counts.
    """
    total: dict[str, int] = {}
    for part, grid in stage.grids.items():
        alone = replace(
            stage,
            work={"train": stage.reductions[part]},
            datasets={"train": stage.datasets[part]},
            grids={"train": grid},
        )
        for kind, size in stage_memory(alone, resources, stage.datasets[part], constants).items():
            waits = kind.startswith("statistics waiting")
            total[kind] = total.get(kind, 0) + size if waits else max(total.get(kind, 0), size)
    return total


def group_members(
    name: str,
    members: Mapping[str, Member],
    resources: Resources,
    device: str,
    remedy: str,
    **grid: Any,
) -> list[list[str]]:
    """Return groups of members (learners) that fit into memory together: as few as the given order allows."""

    def peak(keys: Sequence[str]) -> dict[str, int]:
        wanted = {k: (members[k].learner, members[k].rows) for k in keys}
        constants = count_array_bytes([members[k].learner for k in keys])
        constants += _STATES_HELD * count_array_bytes([members[k].state for k in keys])
        return estimate_peak_bytes(make_joint_stage(name, wanted, device, None, **grid), resources, constants)

    groups: list[list[str]] = []
    for key in members:
        if groups and sum(peak([*groups[-1], key]).values()) <= ALLOWED_SHARE * resources.memory:
            groups[-1].append(key)
        else:
            check_fits(name, peak([key]), resources, remedy)
            groups.append([key])
    return groups
