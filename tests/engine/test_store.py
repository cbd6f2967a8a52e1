"""The engine stores a fit's identity, states, history and finished spans (row ranges) in its run folder."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scalelatent.engine.checkpoints import KEEP_STATES, EngineStore
from scalelatent.engine.dask.pass_tasks import RecentObjects
from scalelatent.engine.passes import Span
from scalelatent.engine.resume_identity import named_values
from scalelatent.errors import DataError, RunError


@pytest.fixture
def store(tmp_path: Path) -> EngineStore:
    return EngineStore(tmp_path / "run" / "engine")


def _save(store: EngineStore, *iterations: int, stage: str = "toy_estep") -> None:
    for iteration in iterations:
        store.save_state(stage, iteration, {"at": iteration, "w": np.arange(4.0) + iteration}, durable=False)


def test_a_new_folder_has_no_state(store: EngineStore) -> None:
    assert store.latest_state("toy_estep") is None


def test_latest_state_is_the_newest(store: EngineStore) -> None:
    _save(store, 1, 2, 10)
    iteration, state, messages = store.latest_state("toy_estep")
    assert (iteration, state["at"], messages) == (10, 10, [])


def test_iterations_sort_as_numbers_within_each_stage(store: EngineStore) -> None:
    _save(store, 999_999, 1_000_000)
    _save(store, 3, stage="toy_other")
    assert store.latest_state("toy_estep")[0] == 1_000_000
    assert store.latest_state("toy_other")[0] == 3
    assert store.latest_state("toy") is None


def test_only_the_newest_states_are_kept(store: EngineStore) -> None:
    _save(store, *range(1, 10))
    _save(store, 4, stage="toy_other")
    kept = sorted(int(p.stem.rsplit("-", 1)[1]) for p in store.folder.glob("state-toy_estep-*"))
    assert kept == list(range(10 - KEEP_STATES, 10))
    assert store.latest_state("toy_other")[0] == 4


@pytest.mark.parametrize("damage", ["empty", "half", "flip", "text"])
def test_a_damaged_state_is_replaced_by_the_one_before(store: EngineStore, damage: str) -> None:
    _save(store, 1, 2, 3)
    for iteration in (3, 2):
        path = Path(store.state_path("toy_estep", iteration))
        data = path.read_bytes()
        path.write_bytes(
            {
                "empty": b"",
                "half": data[: len(data) // 2],
                "flip": data[:50] + b"\0\0\1" + data[53:],
                "text": b"{}",
            }[damage]
        )
        found, state, messages = store.latest_state("toy_estep")
        assert found == state["at"] == iteration - 1
        assert len(messages) == 4 - iteration
        assert path.name in messages[-1]
        assert "falling back to the previous checkpoint" in messages[-1]
    Path(store.state_path("toy_estep", 1)).write_bytes(b"")
    assert store.latest_state("toy_estep") is None


def test_the_error_names_a_missing_state(store: EngineStore) -> None:
    with pytest.raises(RunError, match=r"state-toy_estep-000007\.rec"):
        store.load_state("toy_estep", 7)


IDENTITY = {"kind": "toy", "seed": 3, "params": {}}


def test_a_folder_belongs_to_one_fit(store: EngineStore) -> None:
    store.claim(IDENTITY, resume=False)
    store.claim(dict(IDENTITY), resume=True)
    with pytest.raises(RunError, match=r"already holds a fit.*resume=True.*another run_dir"):
        store.claim(IDENTITY, resume=False)
    with pytest.raises(
        RunError, match=r"holds another fit \(seed: 3 -> 4\): resume with the same job and data, or"
    ):
        store.claim({**IDENTITY, "seed": 4}, resume=True)
    with pytest.raises(RunError, match=r"holds another fit \(colour: None -> red\)"):
        store.claim({**IDENTITY, "colour": "red"}, resume=True)
    store.claim(IDENTITY, resume=True)  # A refusal changes nothing.


def test_parameters_that_other_versions_lack_count_as_their_defaults(store: EngineStore) -> None:
    def claim(**params: Any) -> None:
        defaults = {"base": {"removed": 1.0, "later": None}}
        identity = {"kind": "toy", "params": named_values({"base": params})}
        store.claim(identity, resume=True, defaults=defaults)

    claim(removed=1.0, dim=2)
    claim(later=None, dim=2)
    with pytest.raises(RunError, match=r"holds another fit \(base.later: None -> 3\)"):
        claim(later=3, dim=2)
    with pytest.raises(RunError, match=r"base.dim: 2 -> None; base.removed: 1.0 -> 2.0"):
        claim(removed=2.0)


def claim_folder(store: EngineStore, params: dict[str, Any]) -> None:
    store.claim({"kind": "toy", "params": named_values(params)}, resume=True)


LOSS = np.linspace(0, 1, 10_000).reshape(100, 100)


@pytest.mark.parametrize(
    ("was", "now", "reported"),
    [
        ({"dim": 4, "tol": None}, {"dim": 2, "tol": None}, "dim: 4 -> 2"),
        ({"dim": 4}, {"dim": 4, "tol": 0.1}, "tol: None -> 0.1"),
        ({"a": 1, "b": "x"}, {"a": 2, "b": "y"}, "a: 1 -> 2; b: 'x' -> 'y'"),
        ({"loss": LOSS}, {"loss": LOSS + (LOSS[50, 50] == LOSS)}, "loss: array float64 (100, 100) #"),
        ({"loss": LOSS[0]}, {"loss": LOSS[0] + 1e-12}, "loss: array float64 (100,) #"),
        ({"loss": LOSS[0, :2]}, {"loss": LOSS[0, 1:3]}, "loss: array float64 (2,) [0.0, 0.0001"),
        ({"loss": LOSS}, {"loss": None}, "-> None"),
        ({"base": {"dim": 2}}, {"base": {"dim": 3}}, "base.dim: 2 -> 3"),
        ({"tried": [{"dim": 2}, {"dim": 3}]}, {"tried": [{"dim": 2}, {"dim": 4}]}, "tried[1].dim: 3 -> 4"),
        ({"tried": [{"dim": 2}, {"dim": 3}]}, {"tried": [{"dim": 2}]}, "tried: 2 of them -> 1 of them"),
        ({"pairs": [(0.5, 3)]}, {"pairs": [(0.5, 4)]}, "pairs: [[0.5, 3]] -> [[0.5, 4]]"),
    ],
)
def test_parameters_of_a_fit_are_compared_by_value(
    store: EngineStore, was: dict[str, Any], now: dict[str, Any], reported: str
) -> None:
    claim_folder(store, was)
    copied = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in was.items()}
    claim_folder(store, copied)
    with pytest.raises(RunError, match=re.escape(reported)):
        claim_folder(store, now)


def test_equal_parameters_are_equal_in_any_container(store: EngineStore) -> None:
    claim_folder(store, {"a": 0.5, "b": [1, 2], "c": float("nan"), "new": None})
    claim_folder(store, {"a": np.float64(0.5), "b": (1, np.int64(2)), "c": np.float32("nan")})


def test_a_resume_of_an_empty_folder_starts_a_fit(store: EngineStore) -> None:
    store.claim(IDENTITY, resume=True)
    with pytest.raises(RunError, match="already holds"):
        store.claim(IDENTITY, resume=False)


def test_the_error_names_a_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"cannot create the run folder .*file/engine.*run_dir"):
        EngineStore(tmp_path / "file" / "engine")


def test_the_id_of_a_run_is_stable_and_unique(tmp_path: Path) -> None:
    first = EngineStore(tmp_path / "a").ref
    assert EngineStore(tmp_path / "a").ref == first
    assert EngineStore(tmp_path / "b").ref[1] != first[1]
    assert first[0] == str(tmp_path / "a")


def test_stored_results_load_and_damaged_ones_count_as_missing(store: EngineStore) -> None:
    assert store.load_result("moments") is None
    store.save_result("moments", {"v": np.arange(3.0)})
    np.testing.assert_array_equal(store.load_result("moments")["v"], np.arange(3.0))
    path = store.folder / "result-moments.rec"
    path.write_bytes(path.read_bytes()[:-1])
    assert store.load_result("moments") is None


def test_history_is_cut_back_to_the_state(store: EngineStore) -> None:
    for number in (1, 2, 3, 4):
        store.append_history("toy", {"pass": number, "objective": 1 / number})
    assert [r["pass"] for r in store.load_history("toy", 2)] == [1, 2]
    lines = (store.folder / "history-toy.jsonl").read_text().splitlines()
    assert [json.loads(line)["pass"] for line in lines] == [1, 2]
    store.append_history("toy", {"pass": 3, "objective": 9.0})
    assert [r["objective"] for r in store.load_history("toy", 3)] == [1.0, 0.5, 9.0]


def test_the_last_line_of_a_killed_run_is_dropped(store: EngineStore) -> None:
    store.append_history("toy", {"pass": 1})
    store.append_history("toy", {"pass": 2})
    path = store.folder / "history-toy.jsonl"
    path.write_text(path.read_text()[:-4])
    assert store.load_history("toy", 9) == [{"pass": 1}]
    store.append_history("toy", {"pass": 2})  # A new record does not continue the incomplete line.
    assert store.load_history("toy", 9) == [{"pass": 1}, {"pass": 2}]


def test_a_missing_history_is_empty(store: EngineStore) -> None:
    assert store.load_history("toy", 5) == []


def test_stored_nodes_load_with_their_statistic(store: EngineStore) -> None:
    spans = [Span("train", 0, 3), Span("train", 1, 12), Span("validation", 0, 0)]
    for i, span in enumerate(spans):
        store.save_node("toy_estep", 7, span, np.full(2, float(i)))
    store.save_node("toy_estep", 8, spans[0], np.zeros(2))
    store.save_node("toy_other", 7, spans[0], np.zeros(2))
    assert sorted(store.nodes("toy_estep", 7), key=str) == sorted(spans, key=str)
    assert store.nodes("toy_estep", 9) == []
    np.testing.assert_array_equal(store.load_node("toy_estep", 7, spans[1], 2), [1.0, 1.0])
    # A version whose statistic had two numbers wrote such a file; counters of the file must not be read as
    # sums.
    assert store.load_node("toy_estep", 7, spans[1], 4) is None
    (path,) = store.folder.glob("node-toy_estep-000007-train-1-12.rec")
    path.write_bytes(path.read_bytes()[:40])
    assert store.load_node("toy_estep", 7, spans[1], 2) is None
    store.drop_nodes()
    assert store.nodes("toy_estep", 7) == store.nodes("toy_other", 7) == []


def test_stored_stages_load_with_their_datasets(
    store: EngineStore, toy: SimpleNamespace, tmp_path: Path
) -> None:
    from scalelatent.engine.grid import RowGrid
    from scalelatent.engine.passes import Stage
    from scalelatent.reductions.moments import SecondMoments

    train = toy.rows(50).save(tmp_path / "train")[5:45]
    stage = Stage(
        "toy_m",
        {"train": SecondMoments(3, 2)},
        {"train": train},
        {"train": RowGrid(40, 4, 2)},
        "cpu",
        np.array(["a", "b"]),
        cache=0.25,
    )
    store.save_stage(stage)
    got = store.load_stage("toy_m")
    assert (got.name, got.grids, got.device, len(got.datasets["train"])) == ("toy_m", stage.grids, "cpu", 40)
    assert (got.classes.tolist(), got.cache) == (["a", "b"], 0.25)
    np.testing.assert_array_equal(got.datasets["train"].read_x(0, 40), train.read_x(0, 40))
    assert got.reductions["train"].layout() == stage.reductions["train"].layout()


def test_a_stage_of_rows_in_memory_cannot_be_saved(store: EngineStore, toy: SimpleNamespace) -> None:
    with pytest.raises(DataError, match=r"Dataset\.save"):
        store.save_stage(toy.stage(toy.rows(20)))


def test_recent_objects_are_loaded_once_and_dropped_oldest_first() -> None:
    recent, loads = RecentObjects(2), []

    def get(key: str) -> str:
        return recent.get((key,), lambda: loads.append(key) or key.upper())

    assert [get(k) for k in "aabab"] == ["A", "A", "B", "A", "B"]
    assert loads == ["a", "b"]
    get("a")
    get("c")  # b is now the oldest.
    get("a")
    get("b")
    assert loads == ["a", "b", "c", "b"]


def test_a_finished_stage_is_deleted_except_its_history(store: EngineStore) -> None:
    _save(store, 1, 2)
    _save(store, 1, stage="toy_other")
    (store.folder / "stage-toy_estep.rec").write_text("")
    store.append_history("toy_estep", {"pass": 1})
    store.drop_stage("toy_estep")
    store.drop_stage("toy_estep")
    assert store.latest_state("toy_estep") is None
    assert store.latest_state("toy_other") is not None
    assert not list(store.folder.glob("stage-*"))
    assert store.load_history("toy_estep", 9) == [{"pass": 1}]


# -- states survive a power failure --------------------------------------------------------------------------


def lose_power(store: EngineStore, unsynced: list[int]) -> None:
    for iteration in unsynced:
        path = Path(store.state_path("toy_estep", iteration))
        path.write_bytes(path.read_bytes()[:10])


@pytest.mark.parametrize("how", ["written", "made"])
def test_the_newest_durable_state_survives_later_ones(store: EngineStore, how: str) -> None:
    for iteration in range(1, 20):
        durable = iteration in (4, 9)
        store.save_state("toy_estep", iteration, {"at": iteration}, durable=durable and how == "written")
        if durable and how == "made":
            assert store.make_durable("toy_estep", iteration)
    assert store.iterations("toy_estep") == [9, 17, 18, 19]
    lose_power(store, [17, 18, 19])
    iteration, state, messages = store.latest_state("toy_estep")
    assert (iteration, state["at"], len(messages)) == (9, 9, 3)
    assert [name for name in store.location.keys("") if name.startswith("durable")] == [
        "durable-toy_estep-000009"
    ]


def test_a_missing_state_cannot_be_made_durable(store: EngineStore) -> None:
    assert not store.make_durable("toy_estep", 3)
    assert store.location.keys("") == []


def test_the_successor_of_a_durable_state_is_durable(
    store: EngineStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state at an epoch's start has the step number, and so the file, of the end of the epoch before."""
    synced: list[str] = []
    write = store.location.write

    def watched(key: str, data: bytes, *, durable: bool = False) -> None:
        synced.extend([key] if durable else [])
        write(key, data, durable=durable)

    monkeypatch.setattr(store.location, "write", watched)
    store.save_state("toy_estep", 5, {"at": "the end"}, durable=True)
    synced.clear()
    store.save_state("toy_estep", 5, {"at": "the start"}, durable=False)
    store.save_state("toy_estep", 6, {"at": "later"}, durable=False)
    assert synced == ["state-toy_estep-000005.rec"]


def test_states_are_made_durable_in_object_stores_too() -> None:
    store = EngineStore("memory://test-durable")
    store.save_state("toy_estep", 1, {"at": 1}, durable=False)
    assert store.make_durable("toy_estep", 1)
    for iteration in range(2, 9):
        store.save_state("toy_estep", iteration, {"at": iteration}, durable=False)
    assert store.iterations("toy_estep") == [1, 6, 7, 8]
    store.drop_stage("toy_estep")
    assert store.location.keys("") == []


# -- tasks that outlive their run ----------------------------------------------------------------------------


def test_a_task_creates_no_folder(tmp_path: Path) -> None:
    EngineStore(tmp_path / "gone", "run")
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize("then", ["removed", "made again"])
def test_a_task_writes_nothing_after_its_run_is_deleted(tmp_path: Path, then: str) -> None:
    ref = EngineStore(tmp_path / "run").ref
    task = EngineStore(*ref)
    task.save_state("toy_estep", 1, {"at": 1}, durable=False)
    assert task.ref == ref
    shutil.rmtree(tmp_path / "run")
    there = "was removed"
    if then == "made again":
        there = f"belongs to run {EngineStore(tmp_path / 'run').ref[1]} now"
    writes = [
        lambda: task.save_state("toy_estep", 2, {"at": 2}, durable=False),
        lambda: task.make_durable("toy_estep", 1),
        lambda: task.save_node("toy_estep", 1, Span("train", 0, 0), np.zeros(2)),
        lambda: task.append_history("toy_estep", {"pass": 1}),
    ]
    for write in writes:
        with pytest.raises(
            RunError, match=rf"{there}, and this is a task of run {ref[1]}: .* was not written"
        ):
            write()
    left = [] if then == "removed" else ["run-id"]
    assert EngineStore(tmp_path / "run", "any").location.keys("") == left


def test_a_slot_keeps_its_newest_object_until_its_run_is_forgotten() -> None:
    recent, loads = RecentObjects(8), []

    def get(run: str, iteration: int) -> int:
        return recent.get((run, "state"), lambda: loads.append(iteration) or iteration, iteration)

    assert [get("a", i) for i in (1, 1, 2, 2, 1)] == [1, 1, 2, 2, 1]
    assert loads == [1, 2, 1]
    assert (get("a", 7), get("b", 7)) == (7, 7)
    assert loads == [1, 2, 1, 7, 7]
    assert len(recent._kept) == 2
    recent.forget("a")
    assert get("b", 7) == 7
    assert loads == [1, 2, 1, 7, 7]
    get("a", 7)
    assert loads == [1, 2, 1, 7, 7, 7]


def test_large_arrays_in_parameters_are_compared_completely() -> None:
    given = np.arange(5000).astype(object)
    other = given.copy()
    other[2500] = "x"
    assert named_values({"loss": given}) == named_values({"loss": given.copy()})
    assert named_values({"loss": given}) != named_values({"loss": other})
