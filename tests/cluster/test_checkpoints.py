"""Workers write checkpoints to the run folder; the driver (process of the fit) loads only the last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalelatent.data import Dataset
from scalelatent.engine.callbacks import Callback, Callbacks
from scalelatent.engine.checkpoints import EngineStore
from scalelatent.engine.dask.executor import DaskExecutor
from scalelatent.engine.online_loop import fit_online
from scalelatent.engine.order import RowOrder
from scalelatent.engine.passes import make_stage
from tests.helpers import load_online_toys

toys = load_online_toys()


class CheckpointRecorder(Callback):
    def __init__(self) -> None:
        self.reported: list[dict[str, Any]] = []

    def on_checkpoint(self, info: dict[str, Any]) -> None:
        assert Path(info["path"]).exists()
        self.reported.append(info)


@pytest.fixture
def loaded_states(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that receives the number of each iteration whose state this process (the fit) loads."""
    found: list[int] = []
    original = EngineStore.load_state

    def load(store: EngineStore, stage: str, iteration: int) -> Any:
        found.append(iteration)
        return original(store, stage, iteration)

    monkeypatch.setattr(EngineStore, "load_state", load)
    return found


def list_durable_states(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("durable-*")]


def test_checkpoints_of_a_batch_fit_are_not_sent_through_the_driver(
    client: Any, fit: Any, fit_alone: Any, assert_same: Any, tmp_path: Path, loaded_states: list[int]
) -> None:
    watch = CheckpointRecorder()
    there = fit(client, run_dir=tmp_path, callbacks=watch, engine={"checkpoint_passes": 1})
    assert [info["pass"] for info in watch.reported] == [1, 2, 3, 4, 5]
    assert loaded_states == [5]
    assert list_durable_states(tmp_path / "engine") == ["durable-capsule_estep-000005"]
    assert_same(there, fit_alone())


def test_checkpoints_of_an_online_fit_are_not_sent_through_the_driver(
    client: Any, tmp_path: Path, loaded_states: list[int]
) -> None:
    client.upload_file(toys.__file__)
    rng = np.random.Generator(np.random.Philox(1))
    train = Dataset.from_arrays(rng.normal(size=(480, 6)).astype("f4")).save(tmp_path / "rows")
    learner, store, watch = toys.Evidence(6), EngineStore(tmp_path / "run"), CheckpointRecorder()
    stage = make_stage("toy_step", learner, {"train": train}, "cpu")
    order = RowOrder(480, 3, 48, n_chains=2, run_rows=64, buffer_runs=2)
    fit_online(
        DaskExecutor(client, store), stage, learner.start(), order=order, n_epochs=3,
        callbacks=Callbacks(watch), store=store, checkpoint_seconds=0,
    )  # fmt: skip
    assert [(info["pass"], info["step"]) for info in watch.reported][-1] == (3, 0)
    assert loaded_states == [30]
    assert list_durable_states(tmp_path / "run") == ["durable-toy_step-000030"]
    total, kept, _ = store.latest_state("toy_step")  # type: ignore[misc]
    assert (total, kept["place"].epoch, kept["place"].step) == (30, 3, 0)
