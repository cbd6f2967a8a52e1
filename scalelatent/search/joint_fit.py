"""Joint fit of the candidates of a search: each pass over the rows serves all candidates that need a pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.contract.stats import Stats
from scalelatent.engine.batch_loop import LoopResult, Progress
from scalelatent.engine.plan import ALLOWED_SHARE, Resources, check_fits
from scalelatent.engine.rowsets import ChosenRows, SomeOfSet
from scalelatent.estimators.session import FitSession
from scalelatent.estimators.steps import (
    AddRowMap,
    ComputeValue,
    MappedRows,
    StoreArrays,
    StoreRowSets,
    SumStatistic,
    TrainBatch,
    TrainOnline,
)
from scalelatent.reductions.confusion import ConfusionCounts
from scalelatent.storage.record import same_array

from .candidates import Candidate
from .joint import MemberRows, make_joint_sums
from .joint_loop import Member, Outcome, estimate_peak_bytes, fit_joint, group_members, load_outcomes

if TYPE_CHECKING:
    from collections.abc import Hashable

    from scalelatent.contract.learners import Reduction, RowMap
    from scalelatent.engine.passes import Stage
    from scalelatent.engine.rowsets import StoredSets

# Advice in errors about candidates, or sums over rows, that do not fit into memory.
SMALLER, NARROWER = "search over smaller candidates", "set projection lower"


class ComputedValues:
    """Cache of the results of `ComputeValue` steps: each function is called once for equal arguments."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[object, object]] = {}

    def __call__(self, step: ComputeValue) -> object:
        key = step.function.__module__, step.function.__qualname__, *map(make_key, step.arguments)
        if key not in self._kept:
            # Keep the arguments alive with the value, because the key contains their addresses.
            self._kept[key] = step.value(), step.arguments
        return self._kept[key][0]


def make_key(value: object) -> Hashable:
    """Return a hashable key; values with equal keys are interchangeable.

    Numbers, strings, small arrays, and dataclasses or sequences of these have equal keys if they are equal.
    A large array or another object has a different key from all others, valid as long as the object exists.
    """
    if isinstance(value, np.ndarray):
        return same_array(value) if value.size > 64 else (value.tobytes(), value.shape, value.dtype.str)
    if value is None or isinstance(value, (bool, int, float, str)):
        return type(value).__name__, value
    if is_dataclass(value) and not isinstance(value, type):
        own = (make_key(getattr(value, f.name)) for f in fields(value))
        return type(value).__module__, type(value).__qualname__, *own
    if isinstance(value, (tuple, list)):
        return type(value).__name__, *map(make_key, value)
    return "object", id(value)


class SharedFit:
    """Executor of the fit steps of all candidates of a search, which combines their passes over the rows."""

    def __init__(
        self,
        session: FitSession,
        resources: Resources,
        scorer: Callable[[Stats], float],
        rungs: Sequence[int],
        memo: ComputedValues,
    ) -> None:
        self.session, self.resources = session, resources
        self.scorer, self.rungs, self.memo = scorer, list(rungs), memo
        self.n_passes = 0  # passes over the rows so far, of all candidates together
        self._grid = session.grid
        self._names: dict[Hashable, tuple[str, Reduction | RowMap]] = {}
        self._learned = self._gathered = 0

    # -- steps -------------------------------------------------------------------------------------------

    def run(self, candidates: Sequence[Candidate], answers: Mapping[str, Any]) -> None:
        """Run the fits of all candidates; ``answers`` has the seed and rows of each fit by candidate key."""
        for one in candidates:
            self._advance(one, answers[one.key])
        while waiting := [one for one in candidates if one.step is not None]:
            # Training passes begin only when every candidate has finished its earlier steps.
            if gathering := [one for one in waiting if isinstance(one.step, StoreRowSets)]:
                self._store_samples(gathering)
            elif collecting := [one for one in waiting if isinstance(one.step, SumStatistic)]:
                names = {one.key: self._name_pass(one.step) for one in collecting}
                found = self.collect({names[one.key]: one.step for one in collecting})
                for one in collecting:
                    self._advance(one, found[names[one.key]])
            elif online := [one for one in waiting if isinstance(one.step, TrainOnline)]:
                for one in online:
                    self._train_online(one)
            else:
                self._train(waiting)

    def _store_samples(self, waiting: Sequence[Candidate]) -> None:
        """Gather the samples of all candidates that wait for samples of the same rows, in one pass."""
        step: StoreRowSets = waiting[0].step
        assert step.rows is not None
        assert isinstance(step.sets, ChosenRows), "candidates share samples of rows"
        key = self._rows_key(step.rows)
        together = [one for one in waiting if self._rows_key(one.step.rows) == key]
        wanted = np.unique(np.concatenate([one.step.sets.numbers for one in together]))
        self._gathered += 1
        sets = replace(step.sets, numbers=wanted)
        whole = self.session.store_row_sets(replace(step, name=f"{step.name}-{self._gathered}", sets=sets))
        self.n_passes += 1
        # Candidates with equal samples get the same object, to share values computed from the sample.
        answers: dict[Hashable, StoredSets | SomeOfSet] = {}
        for one in together:
            numbers = one.step.sets.numbers
            own = make_key(numbers)
            if own not in answers:
                every = len(numbers) == len(wanted)
                answers[own] = whole if every else SomeOfSet(whole, np.searchsorted(wanted, numbers))
            self._advance(one, answers[own])

    @staticmethod
    def _rows_key(rows: MappedRows) -> tuple[Hashable, ...]:
        return id(rows.dataset), *(name for name, _ in rows.maps)

    def _advance(self, one: Candidate, answer: object) -> None:
        try:
            one.step = one.steps.send(answer)
            while isinstance(one.step, (StoreArrays, ComputeValue, AddRowMap)):
                if isinstance(one.step, StoreArrays):
                    # A candidate never continues an earlier fit, so it starts with new initial arrays.
                    answer = one.step.value()
                elif isinstance(one.step, ComputeValue):
                    answer = self.memo(one.step)
                else:
                    answer = self.session.add_map(self._name_pass(one.step), one.step)
                one.step = one.steps.send(answer)
        except StopIteration:
            one.step = None

    def _name_pass(self, step: SumStatistic | AddRowMap) -> str:
        """Return the name of a pass over rows, or of a row map; equal passes share a name.

        Names are numbered in the order of the steps, so that a resumed search finds stored results by name.
        """
        work = step.reduction if isinstance(step, SumStatistic) else step.row_map
        rows = self._rows_key(step.rows)
        # A map is applied to all rows, so its key does not contain the mask (fold) of the candidate.
        key = *rows, step.rows.mask if isinstance(step, SumStatistic) else None, make_key(work)
        return self._names.setdefault(key, (f"{step.name}-{len(self._names) + 1}", work))[0]

    def _select_rows(self, rows: MappedRows) -> MemberRows:
        return MemberRows(self.session.apply_maps(rows), rows.mask)

    # -- passes of reductions ------------------------------------------------------------------------------

    def collect(self, wanted: Mapping[str, SumStatistic]) -> dict[str, Stats]:
        """Run reductions in as few passes as memory allows; return and store their statistics by name."""
        store, kind = self.session.store, self.session.kind
        out: dict[str, Stats] = {}
        for name, step in wanted.items():
            stored = store.load_result(f"{kind}_{name}") if store else None
            if stored is not None:
                out[name] = Stats(step.reduction.layout(), stored["vector"])
        for group in self._group_passes([name for name in wanted if name not in out], wanted):
            stage, places = self._make_stage(f"{group[0]}-{len(group)}", [wanted[name] for name in group])
            self.session.callbacks.on_stage({"stage": stage.name, "rows": stage.rows})
            found = self.session.executor.collect(stage, Progress(self.session.callbacks, stage.name, 0))
            self.n_passes += 1
            for name, (part, slot) in zip(group, places, strict=True):
                out[name] = stage.reductions[part].split(found[part])[slot]  # type: ignore[attr-defined]
                if store:
                    store.save_result(f"{kind}_{name}", {"vector": np.array(out[name].vector)})
        return out

    def _make_stage(self, name: str, steps: Sequence[SumStatistic]) -> tuple[Stage, list[tuple[str, int]]]:
        parts = [(step.reduction, self._select_rows(step.rows)) for step in steps]
        session = self.session
        return make_joint_sums(
            f"{session.kind}_{name}", parts, session.device, steps[0].classes, **self._grid
        )

    def _group_passes(self, names: Sequence[str], wanted: Mapping[str, SumStatistic]) -> list[list[str]]:
        """Return groups of reductions that use equal class labels and whose sums fit into memory together."""

        def peak(tried: Sequence[str]) -> dict[str, int]:
            return estimate_peak_bytes(
                self._make_stage(tried[0], [wanted[n] for n in tried])[0], self.resources, 0
            )

        groups: list[list[str]] = []
        for name in names:
            tried = [*groups[-1], name] if groups else [name]
            alike = make_key(wanted[tried[0]].classes) == make_key(wanted[name].classes)
            if groups and alike and sum(peak(tried).values()) <= ALLOWED_SHARE * self.resources.memory:
                groups[-1].append(name)
            else:
                check_fits(f"search_{name}", peak([name]), self.resources, NARROWER)
                groups.append([name])
        return groups

    def scores(self, candidates: Sequence[Candidate], name: str, maps: Mapping[str, Any]) -> dict[str, float]:
        """Return scores on held-out rows by candidate key; ``maps`` compute class probabilities of rows."""
        wanted = {}
        for one in candidates:
            classes = one.validation.classes
            assert classes is not None
            counts = ConfusionCounts(maps[one.key], len(classes))
            wanted[f"{name}-{one.key}"] = SumStatistic("score", counts, one.validation, classes)
        found = self.collect(wanted)
        return {one.key: self.scorer(found[f"{name}-{one.key}"]) for one in candidates}

    # -- training passes -----------------------------------------------------------------------------------

    def _train(self, waiting: Sequence[Candidate]) -> None:
        self._learned += 1
        base = self.session.kind + (str(self._learned) if self._learned > 1 else "")
        race, outcomes = list(waiting), dict[str, Outcome]()
        for rung, until in enumerate([*self.rungs, 0]):
            running = [one for one in race if not _is_ended(outcomes.get(one.key))]
            if not running:
                break
            name = f"{base}-r{rung}" if self.rungs else base
            first = self.rungs[rung - 1] if rung else 0
            found = self._run_rung(name, running, outcomes, first, until)
            if until and any(not _is_ended(o) and o.history[-1]["pass"] < until for o in found.values()):
                break  # a callback has stopped the fit
            if until:
                race = self._better_half(name, race, outcomes)
        for one in waiting:
            outcome = outcomes[one.key]
            one.passes = len(outcome.history)
            one.seconds = sum(r["seconds"] / r["candidates"] for r in outcome.history)
            if outcome.error is None:
                self._advance(one, LoopResult(outcome.state, outcome.history))
            else:
                self._mark_failed(one, outcome.error)

    def _train_online(self, one: Candidate) -> None:
        """Run the epochs of an online learner for one candidate alone; only earlier steps are shared."""
        step: TrainOnline = one.step
        try:
            result = self.session.learn_online(f"{step.name}-{one.key}", step)
        except (FloatingPointError, np.linalg.LinAlgError) as error:
            self._mark_failed(one, str(error))
            return
        one.passes = len({record["pass"] for record in result.history})
        one.seconds = sum(record["seconds"] for record in result.history)
        self.n_passes += one.passes
        self._advance(one, result)

    @staticmethod
    def _mark_failed(one: Candidate, error: str) -> None:
        one.steps.close()
        one.step, one.error = None, error

    def _run_rung(
        self, name: str, running: Sequence[Candidate], outcomes: dict[str, Outcome], first: int, until: int
    ) -> dict[str, Outcome]:
        """Run the passes before a comparison (rung) of successive halving; return outcomes by candidate.

        The passes are those after number ``first`` up to ``until``, or to the end of the fits if ``until`` is
        0. The outcomes are also added to ``outcomes``.
        """
        steps: dict[str, TrainBatch] = {one.key: one.step for one in running}
        session, store = self.session, self.session.store
        stored = store.load_result(f"{name}-groups") if store else None
        out: dict[str, Outcome] = {}
        if store and stored:
            for part_of, keys in _name_groups(name, stored["groups"]):
                out.update(load_outcomes(store, part_of, keys))
        # If all outcomes are stored, a resumed search does not map (for example, project) the rows again.
        if len(out) < len(steps):
            members = {
                key: Member(
                    step.learner,
                    outcomes[key].state if key in outcomes else step.state,
                    {part: self._select_rows(rows) for part, rows in step.rows.items()},
                )
                for key, step in steps.items()
            }
            groups = (
                group_members(f"{name}_estep", members, self.resources, session.device, SMALLER, **self._grid)
                if stored is None
                else stored["groups"]
            )
            # A resumed search uses the stored groups, because another machine may have other memory.
            if store and stored is None:
                store.save_result(f"{name}-groups", {"groups": groups})
            for part_of, keys in _name_groups(name, groups):
                found = fit_joint(
                    session.executor,
                    part_of,
                    {key: members[key] for key in keys},
                    callbacks=session.callbacks,
                    device=session.device,
                    classes=steps[keys[0]].classes,
                    first=first,
                    until=until,
                    store=store,
                    grid=self._grid,
                    checkpoint_seconds=session.options.get("checkpoint_seconds", 30.0),
                    checkpoint_passes=session.options.get("checkpoint_passes"),
                )
                self.n_passes += max(len(o.history) for o in found.values())
                out.update(found)
        for key, outcome in out.items():
            before = outcomes[key].history if key in outcomes else []
            outcomes[key] = replace(outcome, history=[*before, *outcome.history])
        return out

    def _better_half(
        self, name: str, race: Sequence[Candidate], outcomes: Mapping[str, Outcome]
    ) -> list[Candidate]:
        """Return the better half of the candidates by mean score over folds, rounded up for an odd number."""
        sound = [one for one in race if outcomes[one.key].error is None]
        maps = {one.key: one.step.predictor(outcomes[one.key].state) for one in sound}
        scores = self.scores(sound, f"{name}-score", maps)
        means = {
            n: float(np.mean([scores.get(one.key, -np.inf) for one in race if one.number == n]))
            for n in {one.number for one in race}
        }
        better = sorted(means, key=lambda n: (-means[n], n))[: -(-len(means) // 2)]
        self.session.callbacks.on_event({"event": "halved", "stage": name, "candidates": len(better)})
        return [one for one in race if one.number in better]


def _name_groups(name: str, groups: Sequence[list[str]]) -> list[tuple[str, list[str]]]:
    """Return (name of the joint passes, candidate keys) of each group of candidates."""
    return [(f"{name}-g{n}" if len(groups) > 1 else name, group) for n, group in enumerate(groups)]


def _is_ended(outcome: Outcome | None) -> bool:
    return outcome is not None and (outcome.done or outcome.error is not None)
