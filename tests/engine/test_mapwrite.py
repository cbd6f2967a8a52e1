"""Any number of threads writes the same bytes of a map's outputs; a resume writes only missing shards."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scalelatent.contract.block_requirements import BlockRequirements
from scalelatent.contract.learners import Block
from scalelatent.data import open_dataset
from scalelatent.engine import mapwrite
from scalelatent.engine.inprocess import InProcessExecutor
from scalelatent.engine.mapwrite import map_rows, start_map
from scalelatent.errors import DataError


@dataclass(frozen=True)
class DoubleMap:
    requirements = BlockRequirements()

    def output(self) -> tuple[tuple[int, ...], str]:
        return (2,), "float32"

    def prepare(self, backend: Any) -> float:
        return 2.0

    def apply(self, prepared: float, block: Block) -> np.ndarray:
        return (block.x[:, :2] * prepared + block.start * 0).astype("f4")


class LabelMap(DoubleMap):
    requirements = BlockRequirements(labels=True)

    @staticmethod
    def labels(scores: np.ndarray) -> np.ndarray:
        return scores.argmax(axis=1)


@pytest.fixture(autouse=True)
def use_small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    from scalelatent.data import create_dataset

    monkeypatch.setattr(
        "scalelatent.data.create_dataset",
        lambda *a, **k: create_dataset(*a, **{"chunk_rows": 50, "shard_rows": 100, **k}),
    )


def list_files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def ignore_progress(done: int, total: int) -> None:
    pass


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("stored", [True, False])
def test_a_written_map_has_rows_labels_and_weights(
    toy: SimpleNamespace, tmp_path: Path, stored: bool, weighted: bool
) -> None:
    ds = toy.rows(430, weighted=weighted)
    if stored:
        ds = ds.save(tmp_path / "in", chunk_rows=33)[3:]
    outs = []
    for jobs in (1, 3):
        reported: list[tuple[int, int]] = []
        task = start_map("toy_double", ds, DoubleMap(), tmp_path / f"out{jobs}", "cpu")
        out = map_rows(
            InProcessExecutor(jobs),
            task,
            lambda done, total, reported=reported: reported.append((done, total)),
        )
        assert reported[0] == (0, len(ds))
        assert reported[-1] == (len(ds), len(ds))
        np.testing.assert_array_equal(out.read_x(0, len(ds)), ds.read_x(0, len(ds))[:, :2] * 2)
        np.testing.assert_array_equal(out.read_y(0, len(ds)), ds.read_y(0, len(ds)))
        assert out.has_weight is weighted
        if weighted:
            np.testing.assert_array_equal(out.read_weight(0, len(ds)), ds.read_weight(0, len(ds)))
        outs.append(list_files(tmp_path / f"out{jobs}"))
    assert outs[0] == outs[1]
    assert open_dataset(tmp_path / "out1").attrs["provenance"]["made_by"] == "toy_double"


def test_a_map_may_omit_the_labels_and_weights_of_its_rows(toy: SimpleNamespace, tmp_path: Path) -> None:
    ds = toy.rows(120, weighted=True)
    out = map_rows(
        InProcessExecutor(1),
        start_map("m", ds, DoubleMap(), tmp_path / "o", "cpu", with_labels=False),
        ignore_progress,
    )
    assert (out.has_y, out.has_weight) == (False, False)


@pytest.mark.parametrize("classes", [np.array([3, 9]), np.array(["no", "yes"])])
def test_a_map_may_compute_the_labels_of_its_output(
    toy: SimpleNamespace, tmp_path: Path, classes: np.ndarray
) -> None:
    ds = toy.rows(250)
    out = map_rows(
        InProcessExecutor(2),
        start_map("m", ds, LabelMap(), tmp_path / "o", "cpu", classes=classes),
        ignore_progress,
    )
    expected = classes[(ds.read_x(0, 250)[:, :2] * 2).argmax(axis=1)]
    np.testing.assert_array_equal(out.read_y(0, 250), expected)
    assert out.classes.tolist() == classes.tolist()


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_resume_writes_only_missing_shards(
    toy: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    ds = toy.rows(430)
    map_rows(
        InProcessExecutor(1), start_map("m", ds, DoubleMap(), tmp_path / "whole", "cpu"), ignore_progress
    )
    written: list[int] = []
    original = mapwrite.MapTask.write_shard

    def write_shard(self: Any, shard: int, *rest: Any) -> int:
        if len(written) == after and not resumed:
            raise KeyboardInterrupt
        written.append(shard)
        return original(self, shard, *rest)

    monkeypatch.setattr(mapwrite.MapTask, "write_shard", write_shard)
    resumed = False
    with pytest.raises(KeyboardInterrupt):
        map_rows(
            InProcessExecutor(1), start_map("m", ds, DoubleMap(), tmp_path / "out", "cpu"), ignore_progress
        )
    with pytest.raises(DataError, match="incomplete"):
        open_dataset(tmp_path / "out")
    first, resumed = list(written), True
    reported: list[int] = []
    task = start_map("m", ds, DoubleMap(), tmp_path / "out", "cpu", resume=True)
    out = map_rows(InProcessExecutor(1), task, lambda done, total: reported.append(done))
    assert sorted(written) == [0, 1, 2, 3, 4]
    assert written[: len(first)] == first
    assert reported[0] == 100 * after
    np.testing.assert_array_equal(out.read_x(0, 430), ds.read_x(0, 430)[:, :2] * 2)
    assert list_files(tmp_path / "out") == list_files(tmp_path / "whole")
    # A second resume finds all shards and writes nothing.
    map_rows(
        InProcessExecutor(1),
        start_map("m", ds, DoubleMap(), tmp_path / "out", "cpu", resume=True),
        ignore_progress,
    )
    assert len(written) == 5


def test_an_existing_output_is_refused_without_overwrite(toy: SimpleNamespace, tmp_path: Path) -> None:
    ds = toy.rows(120)
    map_rows(InProcessExecutor(1), start_map("m", ds, DoubleMap(), tmp_path / "o", "cpu"), ignore_progress)
    before = list_files(tmp_path / "o")
    with pytest.raises(DataError, match=str(tmp_path / "o")):
        start_map("m", ds, DoubleMap(), tmp_path / "o", "cpu")
    assert list_files(tmp_path / "o") == before
    other = toy.rows(150, seed=4)
    out = map_rows(
        InProcessExecutor(1),
        start_map("m", other, DoubleMap(), tmp_path / "o", "cpu", overwrite=True),
        ignore_progress,
    )
    assert len(out) == 150


def test_a_resume_over_other_rows_is_refused(toy: SimpleNamespace, tmp_path: Path) -> None:
    ds = toy.rows(250)
    task = start_map("m", ds, DoubleMap(), tmp_path / "o", "cpu")
    InProcessExecutor(1).run_map(task, ignore_progress)
    with pytest.raises(DataError, match=str(tmp_path / "o")):
        start_map("m", toy.rows(250, seed=9), DoubleMap(), tmp_path / "o", "cpu", resume=True)
